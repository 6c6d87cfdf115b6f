"""Compare step times of models that compute, on two ranks of one machine.

    python benchmarks/compute.py [--models gpt resnet] [--accumulation 1 8] [--rounds 10]

A loop in plain PyTorch: forward, backward, clipping, AdamW, zero_grad. Peers are copies of one model with the same
initial weights, wrapped differently. They see the same batches, and their losses must agree. In each round every peer
runs a step, in random order; both ranks begin it together, and the slower rank's time counts.
Ratios compare steps of the same round: their median, and their quartiles in brackets. Torch DDP at its best flags runs
twice with every bucket cap. The cap with the best median is the reference. Its twin shows the noise: how much two equal
peers differ.

With gradient accumulation, the local passes after the first of each cycle are also timed by themselves, and compared
with the same passes of the unwrapped module.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from models import Workload, loss_of, workloads
from ranks import prepare, require_device, run_ranks
from report import median, paired_ratio, plots, save, table
from torch import Tensor, nn
from wrapped import Wrapping, bucketddp, ddp, local_pass, try_wrap, unwrapped

RANKS = 2
WARM_UP = 12
"""Steps without accumulation before anything counts: wrappers learn orders and make optimizer state."""
SINGLE_PASSES = 4
"""How many times as many rounds steps of one pass get."""
BATCHES = 8
"""Number of different batches. They are used in turn."""
CAPS_MB = (1, 4, 25)
MAX_NORM = 1.0
SAME_LOSSES = 3
"""How many of a sharded optimizer's first losses are compared."""
TOLERANCE = 1e-4
"""Largest relative difference of losses between peers that synchronise: they sum in different orders."""

UNWRAPPED, SHIPPED, OURS, SHARDED = "unwrapped", "ddp as shipped", "bucketddp", "bucketddp_sharded"
BEST, TWIN = "ddp, best flags", "ddp, best flags, its twin"


def _flags(cap: int, copy: str) -> Wrapping:
    flags = dict.fromkeys(("gradient_as_bucket_view", "static_graph", "batched_grad_copy"), True)
    options: dict[str, Any] = {**flags, "bucket_cap_mb": cap}
    return ddp(f"{BEST}, {cap} MiB{copy}", **options)


def wrappings() -> list[Wrapping]:
    """All peers."""
    return [
        unwrapped(),
        ddp(SHIPPED),
        *(_flags(cap, copy) for cap in CAPS_MB for copy in ("", ", twin")),
        bucketddp(OURS),
        bucketddp(SHARDED, shard_optimizer=True),
    ]


@dataclass
class Peer:
    """One wrapped copy of the model, and its measurements."""

    wrapping: Wrapping
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Any
    step_s: list[float] = field(default_factory=list)
    local_pass_s: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _step(peer: Peer, accumulation: int, device: torch.device) -> list[float]:
    """One training step. Returns the times at which it and each of its passes began, and at which it ended."""
    times = [_now(device)]
    for at in range(accumulation):
        inputs, targets = next(peer.batches)
        with local_pass(peer.model) if at < accumulation - 1 else nullcontext():
            loss = loss_of(peer.model(inputs), targets)
            (loss / accumulation).backward()
        peer.losses.append(loss.detach())
        times.append(_now(device))
    peer.wrapping.clip(peer.model, MAX_NORM)
    peer.optimizer.step()
    peer.optimizer.zero_grad()
    return [*times, _now(device)]


def _make(workload: Workload, wrapping: Wrapping, device: torch.device, notes: list[str]) -> Peer | None:
    torch.manual_seed(0)
    model, note = try_wrap(wrapping, workload.make().to(device))
    if model is None:
        notes.append(note)
        return None
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batches = [[tensor.to(device) for tensor in workload.batch(generator)] for _ in range(BATCHES)]
    return Peer(wrapping, model, wrapping.optimizer(model.parameters()), cycle(batches))


def worker(device: torch.device, names: list[str], accumulations: list[int], rounds: int, small: bool) -> list[Any]:
    """Run one rank; return its measurements for each model and each number of passes in a step."""
    import warnings

    warnings.simplefilter("ignore")  # torch DDP's, on static graphs and on views
    return [
        {"model": name, "accumulation": accumulation, **_measure(workloads(small)[name], accumulation, rounds, device)}
        for name in names
        for accumulation in accumulations
    ]


def _measure(workload: Workload, accumulation: int, rounds: int, device: torch.device) -> dict[str, Any]:
    notes: list[str] = []
    peers = [peer for wrapping in wrappings() if (peer := _make(workload, wrapping, device, notes)) is not None]
    for peer in peers:
        for _ in range(WARM_UP):
            _step(peer, 1, device)
        if accumulation > 1:
            _step(peer, accumulation, device)
    for number in range(rounds if accumulation > 1 else SINGLE_PASSES * rounds):
        for peer in random.Random(number).sample(peers, len(peers)):  # the same order on every rank
            dist.barrier()
            times = _step(peer, accumulation, device)
            peer.step_s.append(times[-1] - times[0])
            if accumulation > 2:
                peer.local_pass_s.append((times[accumulation - 1] - times[1]) / (accumulation - 2))
    params = list(peers[0].model.parameters())
    return {
        "parameters": len(params),
        "gradient_bytes": sum(param.numel() * param.element_size() for param in params),
        "notes": notes,
        "peers": {
            peer.wrapping.name: {
                "synchronises": peer.wrapping.synchronises,
                "step_s": peer.step_s,
                "local_pass_s": peer.local_pass_s,
                "losses": [float(loss) for loss in peer.losses],
            }
            for peer in peers
        },
    }


def merged(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the ranks' measurements: the slower rank's time of steps, the mean of local passes.

    The best of torch DDP's bucket caps and its twin get their own names. Losses are compared and left out.
    """
    first = of_ranks[0]
    peers: dict[str, dict[str, list[float]]] = {}
    for name in first["peers"]:
        of_rank = [one["peers"][name] for one in of_ranks]
        peers[name] = {
            "step_s": [max(times) for times in zip(*(one["step_s"] for one in of_rank), strict=True)],
            "local_pass_s": [fmean(times) for times in zip(*(one["local_pass_s"] for one in of_rank), strict=True)],
        }
    swept = {f"{BEST}, {cap} MiB": median(peers[f"{BEST}, {cap} MiB"]["step_s"]) for cap in CAPS_MB}
    best = min(swept, key=lambda name: swept[name])
    chosen = {BEST: peers[best], TWIN: peers[f"{best}, twin"]}
    others = {name: peer for name, peer in peers.items() if not name.startswith(BEST)}
    return {
        **{key: first[key] for key in ("model", "accumulation", "parameters", "gradient_bytes", "notes")},
        "best_cap": best.removeprefix(f"{BEST}, "),
        "largest_difference_of_losses": agreement_of_losses(of_ranks),
        "peers": {UNWRAPPED: others.pop(UNWRAPPED), SHIPPED: others.pop(SHIPPED), **chosen, **others},
        "swept": {name: peer for name, peer in peers.items() if name.startswith(BEST)},
    }


def agreement_of_losses(of_ranks: list[dict[str, Any]]) -> float:
    """The largest relative difference of a loss between peers that synchronise, over all ranks and passes.

    Raises:
        AssertionError: If peers do not train alike. Or if the unwrapped module's losses are the same as theirs: the
            comparison would then not notice a peer that does not synchronise.
    """
    largest, without = 0.0, 0.0
    for one in of_ranks:
        expected = one["peers"][SHIPPED]["losses"]
        for name, peer in one["peers"].items():
            # A sharded optimizer sums norms over shards, in another order. Clipping carries the norm's last bit into
            # gradients. With BatchNorm and Adam losses then differ after some ten steps; without clipping they do not.
            # Peers that warm up for different numbers of steps are in the same step only until the warm-up ends.
            same_steps = len(expected) if len(peer["losses"]) == len(expected) else WARM_UP
            compared = SAME_LOSSES if name == SHARDED else same_steps
            pairs = zip(peer["losses"][:compared], expected[:compared], strict=True)
            difference = max(abs(loss - other) / max(abs(other), 1e-2) for loss, other in pairs)
            if peer["synchronises"]:
                assert difference <= TOLERANCE, f"{name}: losses differ from torch DDP's by {difference:.2e}"
                largest = max(largest, difference)
            else:
                without = max(without, difference)
    assert without > 10 * TOLERANCE, f"the unwrapped module's losses differ by no more than {without:.2e}"
    return largest


def _spread(values: list[float], references: list[float]) -> tuple[float, float]:
    """The quartiles of the paired ratios."""
    ratios = [value / reference for value, reference in zip(values, references, strict=True)]
    if len(ratios) < 2:
        return ratios[0], ratios[0]
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return low, high


def _cells(values: list[float], references: list[float]) -> str:
    low, high = _spread(values, references)
    return f"{paired_ratio(values, references):.3f} [{low:.3f}, {high:.3f}]"


def described(result: dict[str, Any]) -> str:
    """The tables of one model."""
    peers, accumulation = result["peers"], result["accumulation"]
    reference = peers[BEST]["step_s"]
    shipped = peers[SHIPPED]["step_s"]
    rows = [["peer", "step ms", "of ddp's, best flags", "of ddp's as shipped"]]
    for name, peer in peers.items():
        times = peer["step_s"]
        shown = f"{name} ({result['best_cap']})" if name == BEST else name
        rows.append([shown, f"{median(times) * 1000:.1f}", _cells(times, reference), _cells(times, shipped)])
    megabytes = result["gradient_bytes"] / 1e6
    lines = [
        f"{result['model']}: {result['parameters']} parameters, {megabytes:.1f} MB of gradients, {accumulation} "
        f"{'pass' if accumulation == 1 else 'passes'} in a step",
        table(rows),
        f"losses of peers that synchronise agree within {result['largest_difference_of_losses']:.1e}",
        f"noise: {_cells(peers[TWIN]['step_s'], reference)}",
        *result["notes"],
    ]
    if accumulation > 2:
        base = peers[UNWRAPPED]["local_pass_s"]
        rows = [["local passes after the first", "pass ms", "of the unwrapped module's", "us more per parameter"]]
        for name, peer in peers.items():
            times = peer["local_pass_s"]
            more = median([time - other for time, other in zip(times, base, strict=True)]) / result["parameters"]
            rows.append([name, f"{median(times) * 1000:.2f}", _cells(times, base), f"{more * 1e6:.2f}"])
        lines.append(table(rows))
    return "\n".join([*lines, ""])


COLOURS = {
    UNWRAPPED: "0.75",
    SHIPPED: "tab:red",
    BEST: "tab:orange",
    OURS: "tab:blue",
    SHARDED: "tab:purple",
}


def plot(results: list[dict[str, Any]]) -> Any:
    """Bars of paired ratios: of steps to torch DDP at its best flags, of local passes to the unwrapped module."""
    pyplot = plots()
    panels = [(one, "step_s", BEST) for one in sorted({result["accumulation"] for result in results})]
    panels += [(accumulation, "local_pass_s", UNWRAPPED) for accumulation, _, _ in panels if accumulation > 2]
    height = 3.6 * len(panels)
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(12, height), squeeze=False, constrained_layout=True)
    for axis, (accumulation, kind, reference) in zip(axes[:, 0], panels, strict=True):
        chosen = [result for result in results if result["accumulation"] == accumulation]
        _bars(axis, chosen, kind, reference)
        passes = "one pass" if accumulation == 1 else f"{accumulation} passes"
        if kind == "step_s":
            axis.set_title(f"Steps of {passes}: lower is better")
            axis.set_ylabel("step time relative to\nddp at its best flags")
        else:
            axis.set_title(f"Local passes after the first, in steps of {passes}: lower is better")
            axis.set_ylabel("pass time relative to\nthe unwrapped module")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, frameon=False)
    return figure


def _bars(axis: Any, results: list[dict[str, Any]], kind: str, reference: str) -> None:
    shown = [name for name in COLOURS if name != reference and any(name in one["peers"] for one in results)]
    width, top = 0.84 / len(shown), 1.2
    for at, result in enumerate(results):
        peers = {name: peer[kind] for name, peer in result["peers"].items()}
        first = not at  # names each colour once in the legend
        if reference == BEST:
            low, high = _spread(peers[TWIN], peers[BEST])
            label = "noise: ddp, best flags, a second time (quartiles)" if first else None
            axis.fill_between([at - 0.47, at + 0.47], low, high, color="k", alpha=0.15, zorder=3, lw=0, label=label)
        for place, name in enumerate(name for name in shown if name in peers):
            ratio, (low, high) = paired_ratio(peers[name], peers[reference]), _spread(peers[name], peers[reference])
            x, error = at + (place - (len(shown) - 1) / 2) * width, [[max(ratio - low, 0)], [max(high - ratio, 0)]]
            axis.bar(x, ratio, 0.9 * width, color=COLOURS[name], label=name if first else None, zorder=2)
            axis.errorbar(x, ratio, error, color="k", lw=0.8, capsize=2, zorder=4)
            axis.text(x, 0.03, f"{ratio:.2f}", ha="center", color="k", fontsize=8, zorder=5)
            top = max(top, min(high, 1.5 * ratio) + 0.1)
    axis.axhline(1, color=COLOURS[reference], lw=1.5, zorder=3.5, label=reference)
    axis.set_ylim(0, top)
    axis.set_xticks(range(len(results)), [f"{one['model']} ({one['best_cap']})" for one in results])
    axis.set_xlabel("model (in brackets: the best bucket size for ddp)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(workloads()), default=list(workloads()))
    parser.add_argument("--accumulation", type=int, nargs="+", help="passes in a step (default: 1 8)")
    parser.add_argument(
        "--rounds", type=int, default=10, help="each peer makes a step in each; steps of one pass get 4 times as many"
    )
    parser.add_argument("--device", default="cpu", help="type of the device; ranks share it if there is one only")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, few rounds: shows that it runs; saves nothing"
    )
    arguments = parser.parse_args()
    require_device(arguments.device)
    rounds = min(arguments.rounds, 3) if arguments.quick else arguments.rounds
    accumulations = arguments.accumulation or ([1, 4] if arguments.quick else [1, 8])
    prepare()
    results: list[dict[str, Any]] = []
    text: list[str] = []
    for name in arguments.models:
        of_ranks = run_ranks(
            worker, [name], accumulations, rounds, arguments.quick, size=RANKS, device_type=arguments.device
        )
        for one in zip(*of_ranks, strict=True):
            results.append(merged(list(one)))
            text.append(described(results[-1]))
            print(text[-1], flush=True)
    if not arguments.quick:
        print(save("compute", {"device": arguments.device, "results": results}, "\n".join(text), plot(results)))


if __name__ == "__main__":
    main()
