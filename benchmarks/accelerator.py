"""Compare wrappers on one accelerator, all peers in one run, and check their gradients.

    python benchmarks/accelerator.py [--models gpt resnet] [--rounds 10]
    python benchmarks/accelerator.py --device cpu --quick

One rank with the accelerator's own backend (NCCL on CUDA): forward, backward, AdamW, zero_grad. Peers are copies of
one model, wrapped differently, that see the same batches. In each round every peer runs a block of steps, in random
order. The device is synchronised only before and after a block. Ratios compare blocks of the same round: their median,
and their quartiles in brackets.

The rank is alone. torch's ddp all-reduces all the same; bucketddp sends nothing. A second bucketddp is forced to start
its collectives, so that its host does the work of a rank among several.

Host time runs from a forward on an idle device until ``backward()`` returns. If there are more kernels than the
device's queue holds, the host waits for the device. On CUDA, ``torch.cuda.set_sync_debug_mode("error")`` finds every
other wait.

Two ranks check the gradients. They share the device and send by gloo if there is only one. Gradients must be equal on
both ranks to the last bit, and close to the gradients of one process on the same batches.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from models import GPT, Workload, loss_of, many_small, resnet50, workloads
from plain_peers import COLOURS, OURS, UNWRAPPED, local, plain_peers
from ranks import prepare, require_device, run_ranks
from report import median, paired_ratio, plots, save, table
from wrapped import Wrapping

from lightning_bucketddp import BucketDDP

WARM_UP = 5
BATCHES = 4
GOAL = 1.01
"""The most overhead, as a share of the unwrapped module's step."""
TOLERANCE = 0.02
"""Largest relative difference of the first losses between peers: kernels that add atomically differ from run to run."""

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
SENDING = "bucketddp, sending"


def device_workloads(shrink: int) -> dict[str, Workload]:
    """Models that keep a large accelerator busy, and one that does not.

    Args:
        shrink: Batches are smaller by this factor.
    """
    found = [
        Workload("gpt", lambda: GPT(16384, 512, 768, 12, 12), (16, 512), 16384, tokens=True),
        Workload("resnet", lambda: resnet50(64, 1000).to(memory_format=torch.channels_last), (128, 3, 224, 224), 1000),
        Workload("many small", lambda: many_small(1200, 256), (16384, 256), 256),
        Workload("many small, small batch", lambda: many_small(1200, 256), (64, 256), 256),
    ]
    return {one.name: replace(one, shape=(max(1, one.shape[0] // shrink), *one.shape[1:])) for one in found}


def chosen_workloads(small: bool, shrink: int) -> dict[str, Workload]:
    return workloads(small=True) if small else device_workloads(shrink)


def _sending(module: nn.Module) -> nn.Module:
    net = BucketDDP(module)
    collectives = net._runtime.collectives
    collectives._nothing_to_do = lambda tensor: tensor.numel() == 0  # type: ignore[method-assign]
    collectives._backend_averages = dist.get_backend() == "nccl"  # a rank that is alone does not find out
    return net


def peers() -> list[Wrapping]:
    return [*plain_peers(), Wrapping(SENDING, _sending)]


def now(device: torch.device) -> float:
    """Wait until the device is idle; return the time in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@dataclass
class Peer:
    """One wrapped copy of the model, and its measured seconds by round."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[Tensor, Tensor]]
    dtype: torch.dtype | None
    device: torch.device
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    local_host_s: list[float] = field(default_factory=list)

    def run_pass(self) -> Tensor:
        """A forward and its backward."""
        inputs, targets = next(self.batches)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            loss = loss_of(self.net(inputs), targets)
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.run_pass()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def measure(self, steps: int) -> None:
        """Run one block of steps."""
        begin = now(self.device)
        for _ in range(steps):
            self.step()
        self.step_s.append((now(self.device) - begin) / steps)
        self.host_s.append(self._host_s())
        self.optimizer.zero_grad()
        with local(self.net):
            self.run_pass()
            self.local_host_s.append(self._host_s())
        self.optimizer.zero_grad()

    def _host_s(self) -> float:
        begin = now(self.device)
        self.run_pass()
        return time.perf_counter() - begin

    def host_waits(self) -> str | None:
        """Find out whether a pass makes the host wait: ``"no"``, or which and why; None if that is unknown."""
        if self.device.type != "cuda":
            return None
        passes = {"a local pass": local(self.net), "a synchronised pass": nullcontext(), "the next": nullcontext()}
        for which, context in passes.items():
            try:
                with context, waits_are_errors():
                    self.run_pass()
            except RuntimeError as error:
                return f"{which}: {str(error).splitlines()[0]}"
        return "no"


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Make every wait of the host for a CUDA device raise, as far as torch notices it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def batches_of(
    workload: Workload, device: torch.device, seed: int, count: int = BATCHES
) -> list[tuple[Tensor, Tensor]]:
    """Random batches on the device."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (inputs.to(device), targets.to(device)) for inputs, targets in (workload.batch(generator) for _ in range(count))
    ]


def measure(
    device: torch.device, name: str, precisions: list[str], rounds: int, steps: int, small: bool, shrink: int
) -> list[dict[str, Any]]:
    """Measure one model in each precision: the rank's work."""
    warnings.simplefilter("ignore")  # torch DDP's, on views
    workload = chosen_workloads(small, shrink)[name]
    return [measure_in(precision, device, workload, rounds, steps) for precision in precisions]


def measure_in(precision: str, device: torch.device, workload: Workload, rounds: int, steps: int) -> dict[str, Any]:
    """Times of all peers with one model in one precision."""
    batches = batches_of(workload, device, 1)
    torch.manual_seed(0)
    model = workload.make().to(device)
    found: dict[str, Peer] = {}
    for wrapping in peers():
        net = wrapping.wrap(copy.deepcopy(model))
        found[wrapping.name] = Peer(
            net, wrapping.optimizer(net.parameters()), cycle(batches), PRECISIONS[precision], device
        )
    for peer in found.values():
        peer.losses = [float(peer.step()) for _ in range(WARM_UP)]
    for number in range(rounds):
        order = list(found.values())
        random.Random(number).shuffle(order)
        for peer in order:
            peer.measure(steps)
    return {
        "model": workload.name,
        "precision": precision,
        "batch": workload.shape[0],
        "parameters": len(list(model.parameters())),
        "gradient_bytes": gradient_bytes(model),
        "difference_of_losses": difference_of_losses({name: peer.losses for name, peer in found.items()}),
        "peers": {
            name: {
                "step_s": peer.step_s,
                "host_s": peer.host_s,
                "local_host_s": peer.local_host_s,
                "host_waits": peer.host_waits(),
            }
            for name, peer in found.items()
        },
    }


def gradient_bytes(module: nn.Module) -> int:
    return sum(param.numel() * param.element_size() for param in module.parameters())


def difference_of_losses(losses: dict[str, list[float]]) -> float:
    """The largest relative difference of the first three losses between a peer and the unwrapped module.

    Raises:
        AssertionError: If peers do not train alike, or nothing is trained.
    """
    expected = losses[UNWRAPPED][:3]
    assert expected[0] != expected[-1], "the loss does not move"
    largest = 0.0
    for name, of_peer in losses.items():
        difference = max(abs(loss - other) / abs(other) for loss, other in zip(of_peer, expected, strict=False))
        assert difference <= TOLERANCE, f"{name}: a loss differs from the unwrapped module's by {difference:.1%}"
        largest = max(largest, difference)
    return largest


def compare_gradients(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Compare the gradients of each model: the work of one of two ranks."""
    return [compare_gradients_of(workloads(small)[name], device) for name in ("gpt", "resnet", "many small")]


def compare_gradients_of(workload: Workload, device: torch.device) -> dict[str, Any]:
    """Compare bucketddp with one process that runs both ranks' batches.

    Three passes: the first, which learns the order; one with early launches; and one after a local pass.
    """
    torch.manual_seed(0)
    module = workload.make().to(device)
    reference = copy.deepcopy(module)
    net = BucketDDP(module, bucket_cap_mb=gradient_bytes(module) / 8 / 2**20)
    ranks, own = dist.get_world_size(), dist.get_rank()
    batches = [batches_of(workload, device, 1 + rank) for rank in range(ranks)]
    largest, early = 0.0, 0
    for number, (is_local, cleared) in enumerate([(False, True), (False, True), (True, True), (False, False)]):
        if cleared:
            for param in [*module.parameters(), *reference.parameters()]:
                param.grad = None
        with local(net) if is_local else nullcontext():
            inputs, targets = batches[own][number]
            loss_of(net(inputs), targets).backward()
        for inputs, targets in (of_rank[number] for of_rank in batches):
            (loss_of(reference(inputs), targets) / ranks).backward()
        if is_local:
            continue
        early = net.last_pass().early_launches
        for (which, param), other in zip(module.named_parameters(), reference.parameters(), strict=True):
            assert param.grad is not None
            assert other.grad is not None
            options = {"rtol": 1e-4, "atol": 1e-5, "msg": lambda text, which=which: f"{which}: {text}"}
            torch.testing.assert_close(param.grad, other.grad, **options)  # kernels that add atomically differ a little
            largest = max(largest, float((param.grad - other.grad).abs().max()))
            first = param.grad.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, param.grad), f"{which}: ranks 0 and {own} differ"
    return {
        "model": workload.name,
        "backend": dist.get_backend(),
        "largest_difference": largest,
        "buckets": len(net.layout.buckets),
        "early": early,
    }


def _cells(values: list[float], references: list[float]) -> str:
    ratios = [value / reference for value, reference in zip(values, references, strict=True)]
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return f"{paired_ratio(values, references):.3f} [{low:.3f}, {high:.3f}]"


def described(result: dict[str, Any]) -> str:
    """The table of one model in one precision."""
    plain = result["peers"][UNWRAPPED]
    rows = [["peer", "step ms", "of unwrapped's", "host ms a pass", "more", "a local pass", "more", "host waits"]]
    reasons = []
    for name, peer in result["peers"].items():
        row = [name, f"{median(peer['step_s']) * 1e3:.2f}", _cells(peer["step_s"], plain["step_s"])]
        for key in ("host_s", "local_host_s"):
            more = median([time - other for time, other in zip(peer[key], plain[key], strict=True)])
            row += [f"{median(peer[key]) * 1e3:.2f}", f"{more * 1e3:.2f}"]
        waits = peer["host_waits"]
        rows.append([*row, "not tried" if waits is None else "no" if waits == "no" else "yes"])
        if waits not in (None, "no"):
            reasons.append(f"{name} waits in {waits}")
    head = (
        f"{result['model']}, {result['precision']}: batch {result['batch']}, {result['parameters']} parameters, "
        f"{result['gradient_bytes'] / 1e6:.1f} MB of gradients; first losses agree within "
        f"{result['difference_of_losses']:.1e}"
    )
    return "\n".join([head, table(rows), *reasons, ""])


def plot(results: list[dict[str, Any]]) -> Any:
    """Paired ratios of steps to the unwrapped module's."""
    pyplot = plots()
    figure, axis = pyplot.subplots(figsize=(max(6.0, 1.5 * len(results)), 4.0), constrained_layout=True)
    names = [name for name in results[0]["peers"] if name != UNWRAPPED]
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        colour = {"color": COLOURS.get(name, COLOURS[OURS]), "alpha": 1.0 if name in COLOURS else 0.5}
        for at, result in enumerate(results):
            plain = result["peers"][UNWRAPPED]["step_s"]
            ratio = paired_ratio(result["peers"][name]["step_s"], plain)
            x = at + (place - (len(names) - 1) / 2) * width
            axis.bar(x, ratio - 1, 0.9 * width, bottom=1, label=None if at else name, **colour)
            where = {"va": "bottom" if ratio >= 1 else "top", "ha": "center"}
            axis.text(x, ratio, f" {ratio:.3f} ", fontsize=6, rotation=90, **where)
    axis.axhline(1, color="0.3", lw=0.8)
    axis.axhline(GOAL, color="tab:green", ls="--", lw=1, label=f"goal of bucketddp: {GOAL:g}")
    axis.set_xticks(range(len(results)), [f"{one['model']}\n{one['precision']}" for one in results])
    axis.set_ylabel("step time relative to the unwrapped module")
    axis.set_title("One accelerator: what wrappers add to a step (lower is better; bars begin at 1)")
    axis.margins(y=0.15)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
    return figure


def default_device(quick: bool) -> str | None:
    """The type of device to run on; None if there is no accelerator and the run is not a quick one."""
    if quick:
        return "cpu"
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(device_workloads(1)), default=list(device_workloads(1)))
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=10, help="each peer has one turn per round")
    parser.add_argument("--steps", type=int, default=10, help="steps per turn")
    parser.add_argument("--shrink", type=int, default=1, help="divides batch sizes, for devices of less memory")
    parser.add_argument("--device", help="type of the device; default: the accelerator, with --quick the CPU")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, few rounds: shows that it runs; saves nothing"
    )
    arguments = parser.parse_args()
    device = arguments.device or default_device(arguments.quick)
    if device is None:
        print("accelerator.py: no accelerator here")
        return
    require_device(device)
    rounds, steps, names = arguments.rounds, arguments.steps, arguments.models
    if arguments.quick:
        rounds, steps = min(rounds, 2), min(steps, 2)
        names = [name for name in names if name in workloads(small=True)]
    prepare()
    text: list[str] = []
    gradients: list[dict[str, Any]] = []
    for found in run_ranks(compare_gradients, arguments.quick, size=2, device_type=device)[0]:
        gradients.append(found)
        who = f"{found['model']}: gradients of two {found['backend']} ranks on {device}"
        launched = f"{found['early']} of {found['buckets']} buckets launched early"
        text.append(f"{who} equal each other, and one process's within {found['largest_difference']:.1e}; {launched}")
        print(text[-1], flush=True)
    print()
    text.append("")
    results: list[dict[str, Any]] = []
    for name in names:
        options = (name, arguments.precisions, rounds, steps, arguments.quick, arguments.shrink)
        for result in run_ranks(measure, *options, size=1, device_type=device)[0]:
            results.append(result)
            text.append(described(result))
            print(text[-1], flush=True)
    if not arguments.quick:
        print(
            save(
                "accelerator",
                {"device": device, "gradients": gradients, "results": results},
                "\n".join(text),
                plot(results),
            )
        )


if __name__ == "__main__":
    main()
