"""Compare the cost of replicas in one process: kept between steps, or made anew in each step.

    python benchmarks/replicas.py [--devices 2 4] [--rounds 30]
    python benchmarks/replicas.py --device cuda

Two parts of a step are timed. ``replicate`` brings modules and values to all devices. ``reduce`` is the backward from
the gradients of all replicas' parameters, the same ones in every round, to ``.grad`` of the original. Every peer runs
in every round, in rotating order. Tables show medians over the rounds, and the median ratio within a round.

Each peer has one replica on the original's device, which shares its memory, and copies elsewhere:

    per tensor      made anew in each step; tensors are copied, and gradients added, one by one
    in chunks       made anew in each step; tensors and gradients are flattened into chunks of 10 MiB, as in
                    torch.nn.DataParallel
    torch           torch.nn.parallel.replicate itself, if there are several CUDA devices
    kept            lightning_bucketddp.replicas between devices
    kept, shared    the same with all replicas on one device: they share the original's parameters

If there are fewer devices than replicas, some devices hold several. Copies then cost memory bandwidth instead of a
link's. Host time is measured, with the device synchronised before and after.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from models import workloads
from ranks import require_device
from rebuilt_replicas import RebuiltReplicas
from report import median, paired_ratio, plots, save, table

from lightning_bucketddp.replicas.replicas import Replicas

WARM_UP = 3
PER_TENSOR, IN_CHUNKS, TORCH, KEPT, SHARED = "per tensor", "in chunks", "torch", "kept", "kept, shared"
COLOURS = {PER_TENSOR: "tab:red", IN_CHUNKS: "tab:orange", TORCH: "tab:purple", KEPT: "tab:blue", SHARED: "tab:cyan"}
REPLICATE, REDUCE, BOTH = "replicate", "reduce", "both"
Seconds = dict[str, dict[str, list[float]]]
"""By peer and by what was timed, one per round."""


def peers(module: nn.Module, devices: Sequence[torch.device]) -> dict[str, Callable[[], list[nn.Module]]]:
    """By peer, a function that makes a step's replicas."""
    home, others = Replicas(module, devices[:1]), Replicas(module, devices[1:], share=False)
    found: dict[str, Callable[[], list[nn.Module]]] = {
        PER_TENSOR: RebuiltReplicas(module, devices, coalesced=False).refresh,
        IN_CHUNKS: RebuiltReplicas(module, devices, coalesced=True).refresh,
        KEPT: lambda: [*home.refresh(), *others.refresh()],
    }
    if len(set(devices)) == 1:
        found[SHARED] = Replicas(module, devices).refresh
    elif len(set(devices)) == len(devices) and devices[0].type == "cuda":
        found[TORCH] = lambda: torch.nn.parallel.replicate(module, list(devices))
    return found


def tensors_of(replica: nn.Module, module: nn.Module) -> list[Tensor]:
    """The replica's tensors in the place of the module's parameters, each once."""
    parts = dict(replica.named_modules())
    found: dict[int, Tensor] = {}
    for prefix, part in module.named_modules():
        for name, param in part._parameters.items():
            if param is not None:
                found.setdefault(id(param), getattr(parts[prefix], name))
    return list(found.values())


def wait(devices: Sequence[torch.device]) -> None:
    for device in set(devices):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


class Step:
    """One peer's step without its forward and backward.

    Args:
        module: The original.
        devices: The replicas' devices.
        refresh: Makes the replicas.
    """

    def __init__(
        self, module: nn.Module, devices: Sequence[torch.device], refresh: Callable[[], list[nn.Module]]
    ) -> None:
        self.module = module
        self.devices = devices
        self.refresh = refresh
        generator = torch.Generator().manual_seed(1)
        self.grads = [
            torch.randn(param.shape, generator=generator).to(device)
            for device in devices
            for param in module.parameters()
        ]

    def run(self) -> dict[str, float]:
        """Seconds, by part."""
        for param in self.module.parameters():
            param.grad = None
        wait(self.devices)
        begin = time.perf_counter()
        replicas = self.refresh()
        wait(self.devices)
        middle = time.perf_counter()
        ends = [tensor for replica in replicas for tensor in tensors_of(replica, self.module)]
        wait(self.devices)
        backward = time.perf_counter()
        torch.autograd.backward(ends, self.grads)
        wait(self.devices)
        end = time.perf_counter()
        return {REPLICATE: middle - begin, REDUCE: end - backward, BOTH: middle - begin + end - backward}


def measure(module: nn.Module, devices: Sequence[torch.device], rounds: int) -> Seconds:
    """All peers on one module."""
    steps = {name: Step(module, devices, refresh) for name, refresh in peers(module, devices).items()}
    sums: list[Tensor] = []
    for name, step in steps.items():
        for _ in range(WARM_UP):
            step.run()
        grads = [param.grad.clone() for param in module.parameters() if param.grad is not None]
        sums = sums or grads
        for grad, expected in zip(grads, sums, strict=True):
            torch.testing.assert_close(grad, expected, msg=lambda text, name=name: f"{name}: {text}")
    found: Seconds = {name: {REPLICATE: [], REDUCE: [], BOTH: []} for name in steps}
    names = list(steps)
    for _ in range(rounds):
        gc.collect()
        gc.disable()
        for name in names:
            for part, seconds in steps[name].run().items():
                found[name][part].append(seconds)
        gc.enable()
        names.append(names.pop(0))
    return found


def described(results: dict[str, Seconds]) -> str:
    """The table: milliseconds by part, and the ratio of both parts together to those of the peer in chunks."""
    rows = [["model, replicas, peer", "replicate ms", "reduce ms", "both ms", f"ratio to {IN_CHUNKS}"]]
    for title, found in results.items():
        for peer, parts in found.items():
            numbers = [f"{median(parts[part]) * 1e3:.2f}" for part in (REPLICATE, REDUCE, BOTH)]
            ratio = paired_ratio(parts[BOTH], found[IN_CHUNKS][BOTH])
            rows.append([f"{title}: {peer}", *numbers, f"{ratio:.3f}"])
    return table(rows)


def plot(results: dict[str, Seconds]) -> Any:
    """Bars of both parts, a group per model and number of replicas."""
    pyplot = plots()
    figure, axes = pyplot.subplots(1, len(results), figsize=(2.2 * len(results), 3.8), squeeze=False)
    for axis, (title, found) in zip(axes[0], results.items(), strict=True):
        for at, (peer, parts) in enumerate(found.items()):
            first, second = (median(parts[part]) * 1e3 for part in (REPLICATE, REDUCE))
            axis.bar(at, first, color=COLOURS[peer], label=peer)
            axis.bar(at, second, bottom=first, color=COLOURS[peer], alpha=0.55)
        axis.set_xticks([])
        axis.set_title(title.replace(", ", ",\n"), fontsize=8)
    axes[0][0].set_ylabel("time per step in ms: replicate (dark) and reduce (light)")
    figure.suptitle("Time that replicas cost per step: lower is better", fontsize=10)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8, frameon=False)
    return figure


def devices_of(device_type: str, count: int) -> list[torch.device]:
    """``count`` devices of a type; some several times if there are fewer."""
    if device_type == "cpu":
        return [torch.device("cpu")] * count
    return [torch.device(device_type, index % torch.accelerator.device_count()) for index in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4], help="numbers of replicas")
    parser.add_argument("--rounds", type=int, default=30, help="each peer has one turn per round")
    parser.add_argument("--device", default="cpu", help="type of the devices")
    parser.add_argument("--quick", action="store_true", help="small models, few rounds: shows that it runs; no results")
    arguments = parser.parse_args()
    require_device(arguments.device)
    torch.set_num_threads(1)
    rounds = 3 if arguments.quick else arguments.rounds
    results: dict[str, Seconds] = {}
    for name, workload in workloads(small=arguments.quick).items():
        for count in arguments.devices:
            torch.manual_seed(0)
            devices = devices_of(arguments.device, count)
            module = workload.make().to(devices[0])
            results[f"{name}, {count}"] = measure(module, devices, rounds)
    distinct = len(set(devices_of(arguments.device, max(arguments.devices))))
    text = f"{distinct} device(s) of type {arguments.device}, {rounds} rounds\n{described(results)}\n"
    print(text, flush=True)
    if not arguments.quick:
        figures = {"device": arguments.device, "rounds": rounds, "seconds": results}
        print(
            save(
                "replicas" + ("" if arguments.device == "cpu" else f"-{arguments.device}"), figures, text, plot(results)
            )
        )


if __name__ == "__main__":
    main()
