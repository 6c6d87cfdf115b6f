"""Simulated efficiency of data-parallel training from 8 to 4096 ranks on published cluster shapes.

    python benchmarks/scale.py

Efficiency is the time of forward and backward divided by the time of the step. The step also contains communication
that no computation hides. Three layouts are compared with a bound that no bucket boundaries exceed:

- 25 MiB buckets by torch DDP's own function; the first has 1 MiB;
- this package's default buckets;
- Megatron-Core's, of 40 M elements, or of 1 M per rank if that is more.

This is pure arithmetic with ``schedule.py`` and takes seconds on any machine.

The model leaves out:

- the optimizer, data loading and everything else between steps;
- stragglers, and the jitter of thousands of ranks;
- compute that slows down while NCCL runs beside it;
- contention and routing in the switches, and reduction inside them (SHARP);
- NCCL's low-latency protocols, which may speed up small buckets;
- the host, which may be slower than the device on small models;
- copies into and out of buckets, and activation checkpointing.

Layers take time in proportion to their FLOPs, so BatchNorm and similar layers take none. Gradients are fp32, as in
mixed precision with fp32 parameters. The number of samples per rank is constant, although nobody trains a ResNet-50
with 131,072 images per step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from model_shapes import ModelShapes, gpt2_medium, gpt_1_3b, resnet50
from report import median, plots, save, table
from schedule import Cluster, CollectiveCost, Link, lower_bound, simulate

from lightning_bucketddp.layout.plan import MIB, ParamSpec, plan

RANKS = (8, 32, 128, 512, 2048, 4096)
RANKS_PER_NODE = 8
PLANS = ("25 MiB", "default", "40 M elements", "bound")
GB = 1e9
US = 1e-6

# Share of the line rate that an all-reduce gets. Assumption; NCCL's tuner caps A100's NVLink at 235 of 300 GB/s (0.78).
USED = 0.8
# From a rank's call to the kernel at work. Assumption; NCCL's tuner adds 8.4 us per ring all-reduce ("baseLat").
LAUNCH = CollectiveCost(10 * US, 0.0)
# Per hop over NVLink. NCCL's tuner: 3.4 us ("hwLat", ring, simple protocol; src/graph/tuning.cc).
NVLINK_LATENCY = 3.4 * US
# Per hop between nodes. NCCL's tuner: 9.6 us for ring and simple protocol.
INFINIBAND_LATENCY = 9.6 * US
# Assumption: EFA's reliable datagrams pass through the host's driver and take about twice as long.
EFA_LATENCY = 20 * US


@dataclass(frozen=True)
class FasterOf(CollectiveCost):
    """Two ways of doing a collective, of which the faster is taken for each size, as NCCL does with ring and tree.

    Its lower bound still holds: sent together, bytes never take longer than sent apart.
    """

    other: CollectiveCost

    def seconds(self, nbytes: float) -> float:
        return min(super().seconds(nbytes), self.other.seconds(nbytes))


@dataclass(frozen=True)
class Site:
    """A published cluster shape with eight ranks per node, and the speed of its ranks.

    Attributes:
        name: The cluster's name.
        nvlink: Line rate in GB/s of one GPU's NVLinks, one direction.
        network: Line rate in Gbit/s of all of a node's network adapters, one direction.
        latency: Seconds per hop between nodes.
        gpt_flops: FLOP/s that a GPU achieves in training a GPT.
        images_per_second: Images per second in training ResNet-50 on one GPU.
    """

    name: str
    nvlink: float
    network: float
    latency: float
    gpt_flops: float
    images_per_second: float

    def all_reduce(self, ranks: int) -> FasterOf:
        """The cost of an all-reduce among so many ranks."""
        inner = Link(NVLINK_LATENCY, USED * self.nvlink * GB)
        outer = Link(self.latency, USED * self.network / 8 * GB)
        cluster = Cluster(-(-ranks // RANKS_PER_NODE), RANKS_PER_NODE, inner, outer)
        small, large = (cluster.all_reduce(nbytes) + LAUNCH for nbytes in (0, 1e15))
        return FasterOf(small.latency, small.seconds_per_byte, large)

    def forward_seconds(self, model: ModelShapes) -> float:
        """How long the forward of a step takes; backward takes twice as long, as it multiplies twice."""
        if model.sample == "images":
            return model.samples / self.images_per_second / 3
        return model.samples * model.forward_flops / self.gpt_flops


# DGX H100: 900 GB/s NVLink per GPU in both directions together; eight ConnectX-7 of 400 Gbit/s (NVIDIA DGX SuperPOD
#   Reference Architecture RA-11333-001). H100 SXM: 989 TFLOP/s of dense bf16 (NVIDIA H100 architecture white paper).
#   Assumptions: GPTs achieve 40 % of that; ResNet-50 runs at twice the A100's rate.
# p4d.24xlarge: eight A100, 600 GB/s NVSwitch, 400 Gbit/s EFA (aws.amazon.com/ec2/instance-types/p4). A100: 312 TFLOP/s
#   of bf16, of which a GPT of 1.7 B achieves 137 (Narayanan et al., SC21, table 1); ResNet-50 with mixed precision:
#   2,470 images/s (NVIDIA DeepLearningExamples, PyTorch ResNet50 v1.5, one GPU of a DGX A100).
# p3dn.24xlarge: eight V100, 300 GB/s NVLink, 100 Gbit/s (aws.amazon.com/ec2/instance-types/p3). A GPT of 1.2 B achieves
#   39 TFLOP/s on a V100 (Shoeybi et al. 2019, "Megatron-LM"); ResNet-50: 1,200 images/s (the same examples, DGX-1).
SITES = (
    Site("DGX H100 SuperPOD, 8 x 400 Gbit/s NDR", 450, 8 * 400, INFINIBAND_LATENCY, 0.4 * 989e12, 2 * 2470),
    Site("AWS p4d (8 x A100), 400 Gbit/s EFA", 300, 400, EFA_LATENCY, 137e12, 2470),
    Site("AWS p3dn (8 x V100), 100 Gbit/s EFA", 150, 100, EFA_LATENCY, 39e12, 1200),
)


@dataclass(frozen=True)
class Gradients:
    """A model's gradients in the order in which backward makes them ready.

    Attributes:
        specs: The parameters.
        ready: For each, the share of backward that is over when it is ready.
        nbytes: The size of each.
    """

    specs: tuple[ParamSpec, ...]
    ready: tuple[float, ...]
    nbytes: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelShapes) -> Gradients:
        specs: list[ParamSpec] = []
        ready: list[float] = []
        backward = list(reversed(model.layers))
        for layer, done in zip(backward, accumulate(layer.flops for layer in backward), strict=True):
            for at, shape in reversed(list(enumerate(layer.shapes))):
                name = f"{layer.name}.{at}"
                specs.append(ParamSpec.of(name, torch.empty(shape, device="meta")))
                ready.append(done / model.forward_flops)
        return cls(tuple(specs), tuple(ready), tuple(spec.nbytes for spec in specs))

    def torch_boundaries(self) -> tuple[int, ...]:
        """Where the buckets of torch DDP end, as shipped: a first one of 1 MiB, then 25 MiB, by its own function."""
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in self.specs]
        buckets, _ = dist._compute_bucket_assignment_by_size(tensors, [MIB, 25 * MIB])
        return tuple(accumulate(len(bucket) for bucket in buckets))

    def planned_boundaries(self, ranks: int, cap_bytes: Sequence[int] = ()) -> tuple[int, ...]:
        """Where this package's buckets end: its default ones, or buckets of a size."""
        one_machine = ranks <= RANKS_PER_NODE
        layout = plan(self.specs, range(len(self.specs)), cap_bytes, world_size=ranks, one_machine=one_machine)
        return tuple(accumulate(len(bucket.slots) for bucket in layout.buckets))


@dataclass(frozen=True)
class Planned:
    """How training goes with one set of buckets.

    Attributes:
        efficiency: Time of forward and backward / time of the step.
        exposed_ms: Milliseconds of communication that no computation hides.
        buckets: How many there are; None for the bound.
        median_mb: The median bucket in MB; None for the bound.
    """

    efficiency: float
    exposed_ms: float
    buckets: int | None = None
    median_mb: float | None = None


def simulated(site: Site, model: ModelShapes, ranks: int) -> dict[str, Planned]:
    """How training goes with each of :data:`PLANS`, by name."""
    gradients = Gradients.of(model)
    forward = site.forward_seconds(model)
    backward = 2 * forward
    ready = [backward * part for part in gradients.ready]
    cost = site.all_reduce(ranks)

    def ending(finish: float) -> tuple[float, float]:
        end = max(finish, backward)
        return (forward + backward) / (forward + end), (end - backward) * 1e3

    def with_buckets(boundaries: Sequence[int]) -> Planned:
        finish = simulate(ready, gradients.nbytes, boundaries, cost).finish
        return Planned(*ending(finish), len(boundaries), _median_size(gradients.nbytes, boundaries))

    return {
        "25 MiB": with_buckets(gradients.torch_boundaries()),
        "default": with_buckets(gradients.planned_boundaries(ranks)),
        "40 M elements": with_buckets(gradients.planned_boundaries(ranks, [4 * max(40_000_000, 1_000_000 * ranks)])),
        "bound": Planned(*ending(lower_bound(ready, gradients.nbytes, cost))),
    }


def _median_size(nbytes: Sequence[int], boundaries: Sequence[int]) -> float:
    return median([sum(nbytes[first:stop]) for first, stop in pairwise([0, *boundaries])]) / 1e6


def described(site: Site, model: ModelShapes, rows: dict[int, dict[str, Planned]]) -> str:
    """The table of one cluster and model; by number of ranks, what :func:`simulated` gave."""
    forward = site.forward_seconds(model) * 1e3
    head = (
        f"{site.name}: {model.name}, {model.samples} {model.sample} per rank, forward {forward:.1f} ms, backward "
        f"{2 * forward:.1f} ms, {model.numel * 4 / 1e6:.0f} MB of gradients"
    )
    lines = [["ranks", *PLANS, "not hidden, ms", "buckets", "median bucket, MB"]]
    for ranks, row in rows.items():
        plans = [row[name] for name in PLANS]
        lines.append(
            [
                str(ranks),
                *(f"{plan.efficiency:.4f}" for plan in plans),
                " / ".join(f"{plan.exposed_ms:.1f}" for plan in plans),
                " / ".join(str(plan.buckets) for plan in plans if plan.buckets is not None),
                " / ".join(f"{plan.median_mb:.1f}" for plan in plans if plan.median_mb is not None),
            ]
        )
    return f"{head}\n{table(lines)}\n"


Results = dict[str, dict[str, dict[int, dict[str, Planned]]]]
"""By cluster, model, number of ranks and buckets."""


def drawn(results: Results) -> Any:
    """Efficiency over ranks, one panel per cluster."""
    pyplot = plots()
    figure, panels = pyplot.subplots(1, len(results), figsize=(4.2 * len(results), 4), sharey=True, squeeze=False)
    styles = {"bound": (":", 1.0), "default": ("-", 2.0), "25 MiB": ("--", 1.2), "40 M elements": ("-.", 1.0)}
    models = list(next(iter(results.values())))
    for panel, (site, by_model) in zip(panels[0], results.items(), strict=True):
        for color, rows in enumerate(by_model.values()):
            for name, (style, width) in styles.items():
                values = [row[name].efficiency for row in rows.values()]
                panel.plot(list(rows), values, style, linewidth=width, color=f"C{color}")
        panel.set_xscale("log", base=2)
        panel.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
        panel.minorticks_off()
        panel.set_xlabel("number of ranks")
        panel.set_title(site, fontsize=9)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("efficiency: compute time relative to step time")
    lines = [pyplot.Line2D([], [], color=f"C{color}", linewidth=3) for color in range(len(models))]
    lines += [pyplot.Line2D([], [], color="0.3", linestyle=style, linewidth=width) for style, width in styles.values()]
    names = [*models, *("25 MiB (torch DDP)" if name == "25 MiB" else name for name in styles)]
    figure.suptitle("Simulated efficiency of data-parallel training (1 is best)")
    figure.tight_layout()
    figure.legend(lines, names, loc="upper center", bbox_to_anchor=(0.5, 0.01), ncols=len(names), frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two numbers of ranks, two models; saves nothing")
    arguments = parser.parse_args()
    numbers = (32, 2048) if arguments.quick else RANKS
    models = (resnet50(), gpt2_medium()) if arguments.quick else (resnet50(), gpt2_medium(), gpt_1_3b())
    lines = ["Efficiency: time of forward and backward / time of the step.", f"a / b / ...: {' / '.join(PLANS)}", ""]
    print("\n".join(lines))
    results: Results = {}
    for site in SITES:
        for model in models:
            rows = {ranks: simulated(site, model, ranks) for ranks in numbers}
            results.setdefault(site.name, {})[model.name] = rows
            lines.append(described(site, model, rows))
            print(lines[-1], flush=True)
    if not arguments.quick:
        figures = {
            site: {
                model: {ranks: {name: asdict(plan) for name, plan in row.items()} for ranks, row in rows.items()}
                for model, rows in by_model.items()
            }
            for site, by_model in results.items()
        }
        print(save("scale", {"simulated": figures}, "\n".join(lines), drawn(results)))


if __name__ == "__main__":
    main()
