"""Time an optimizer's step on a large model, with and without dividing the work between the ranks.

    python benchmarks/optimizer_step.py [--megaparameters 64] [--worlds 1 2] [--rounds 7]

AdamW, fused and as a loop over parameters, and Muon on the matrices, in plain PyTorch with BucketDDP; every rank has
one core. Ranks step one
after the other while the others wait: they share the machine's memory bandwidth, which ranks on several machines do
not.

The update is the optimizer's own ``step``. The whole step of a sharded optimizer also swaps shards in for parameters
and starts the all-gather of new parameters. On the last rank the all-gather's threads compete with the step. Another
column shows how long it takes after the step until all parameters have arrived, over loopback, with all ranks stepping
at once. A step begins only when the parameters of the last one have arrived.

Ratios compare with the unsharded step of the same round, on the slowest rank; perfect division would give 1/N.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from models import mlp
from ranks import prepare, require_device, run_ranks
from report import paired_ratio, plots, save, table

from lightning_bucketddp import BucketDDP, declare_element_wise, declare_whole_parameter

WIDTH = 1024
WARM_UP = 3
"""Steps that do not count: buckets follow the order of gradients from the second on, and state is made in the first."""
UPDATE, STEP, ARRIVAL = "update", "step", "until parameters are there"


class Timed(torch.optim.Optimizer):
    """Notes how many seconds its last update took."""

    update_s = 0.0

    def step(self, closure: Any = None) -> Any:
        device = self.param_groups[0]["params"][0].device
        begin = _now(device)
        result = super().step(closure)
        self.update_s = _now(device) - begin
        return result


@declare_element_wise
class TimedAdamW(Timed, torch.optim.AdamW):
    pass


@declare_whole_parameter
class TimedMuon(Timed, torch.optim.Muon):
    pass


OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], Timed]] = {
    "AdamW, fused": partial(TimedAdamW, lr=1e-4, fused=True),
    "AdamW, a loop": partial(TimedAdamW, lr=1e-4, foreach=False),
    "Muon": partial(TimedMuon, lr=1e-4),
}


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def worker(device: torch.device, megaparameters: float, rounds: int) -> dict[str, Any]:
    """One rank's work: seconds of each step, by optimizer, sharded or not, and what was timed."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    elements = 0
    for name, make in OPTIMIZERS.items():
        trained: dict[str, tuple[BucketDDP, Timed]] = {}
        for kind, sharded in (("unsharded", False), ("sharded", True)):
            torch.manual_seed(0)
            layers = max(1, round(megaparameters * 1e6 / WIDTH**2))
            model = BucketDDP(mlp(WIDTH, layers).to(device), shard_optimizer=sharded)
            params = [param for param in model.parameters() if param.ndim == 2]  # Muon takes no others
            optimizer = make(params)
            model.prepare_optimizer(optimizer)  # all ranks at once: Muon's buckets are cut anew
            trained[kind] = model, optimizer
            elements = sum(param.numel() for param in params)
        found[name] = {kind: {UPDATE: [], STEP: [], ARRIVAL: []} for kind in trained}
        for number in range(WARM_UP + rounds):
            for kind in list(trained) if number % 2 else reversed(list(trained)):
                for what, seconds in _seconds(*trained[kind], device).items():
                    if number >= WARM_UP:
                        found[name][kind][what].append(seconds)
        for model, _ in trained.values():
            model.close()
    return {"elements": elements, "seconds": found}


def _seconds(model: BucketDDP, optimizer: Timed, device: torch.device) -> dict[str, float]:
    """Time a step that ranks take one after the other, and the wait after a step that all take at once."""
    times: dict[str, float] = {}
    inputs = torch.ones(1, WIDTH, device=device)
    for in_turns in (True, False):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        dist.barrier()
        begin = stepped = 0.0
        for rank in range(dist.get_world_size()):
            if rank == dist.get_rank():
                begin = _now(device)
                optimizer.step()  # its all-gathers wait for the other ranks' steps
                stepped = _now(device)
            if in_turns:
                dist.barrier()
        model.wait_for_parameters()
        if in_turns:
            times |= {UPDATE: optimizer.update_s, STEP: stepped - begin}
        else:
            times[ARRIVAL] = _now(device) - stepped
    return times


def slowest(of_ranks: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Keep the slowest rank's seconds of each round."""
    first = of_ranks[0]["seconds"]
    return {
        name: {
            kind: {
                manner: [
                    max(each) for each in zip(*(one["seconds"][name][kind][manner] for one in of_ranks), strict=True)
                ]
                for manner in manners
            }
            for kind, manners in kinds.items()
        }
        for name, kinds in first.items()
    }


def described(worlds: dict[int, Any], elements: int) -> str:
    """The table."""
    rows = [["optimizer", "ranks", "1/N", "update ms", "sharded ms", "ratio", "step's ratio", "gathered after, ms"]]
    for name in OPTIMIZERS:
        for world, found in worlds.items():
            whole, mine = found[name]["unsharded"], found[name]["sharded"]
            rows.append(
                [
                    name,
                    str(world),
                    f"{1 / world:.3f}",
                    f"{median(whole[UPDATE]) * 1e3:.1f}",
                    f"{median(mine[UPDATE]) * 1e3:.1f}",
                    f"{paired_ratio(mine[UPDATE], whole[UPDATE]):.3f}",
                    f"{paired_ratio(mine[STEP], whole[STEP]):.3f}",
                    f"{median(mine[ARRIVAL]) * 1e3:.1f}",
                ]
            )
    return f"{elements / 1e6:.0f} million parameters in fp32, {os.cpu_count()} cores\n{table(rows)}\n"


def plot(worlds: dict[int, Any], elements: int) -> Any:
    """The ratio to the unsharded step over the number of ranks."""
    pyplot = plots()
    figure, axis = pyplot.subplots(figsize=(6, 3.8), constrained_layout=True)
    xs = list(worlds)
    for name, colour in zip(OPTIMIZERS, ("C0", "C1", "C2"), strict=True):
        for what, style in ((UPDATE, "o-"), (STEP, "s--")):
            pairs = [(worlds[x][name]["sharded"][what], worlds[x][name]["unsharded"][what]) for x in xs]
            ratios = [paired_ratio(*pair) for pair in pairs]
            axis.plot(xs, ratios, style, color=colour, markersize=4, label=f"{name}: {what}")
    axis.plot(xs, [1 / x for x in xs], ":", color="0.3", label="1 / ranks")
    axis.set_xticks(xs)
    axis.set_ylim(0, None)
    axis.set_xlabel("number of ranks")
    axis.set_ylabel("time relative to the unsharded step, slowest rank")
    axis.set_title(f"Time of the optimizer's step, {elements / 1e6:.0f} million parameters: lower is better")
    axis.legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megaparameters", type=float, default=64, help="millions of parameters")
    parser.add_argument(
        "--worlds", type=int, nargs="+", help="numbers of ranks (default: 1, 2, and 4 on 4 cores or more)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", help="type of the device; ranks share it if there is one only")
    parser.add_argument("--quick", action="store_true", help="a small model: shows that it runs; saves nothing")
    arguments = parser.parse_args()
    require_device(arguments.device)
    size, rounds = (4.0, 3) if arguments.quick else (arguments.megaparameters, arguments.rounds)
    prepare()
    found: dict[int, Any] = {}
    elements = 0
    for world in arguments.worlds or [1, 2, *([4] if (os.cpu_count() or 1) >= 4 else [])]:
        of_ranks = run_ranks(worker, size, rounds, size=world, device_type=arguments.device)
        found[world], elements = slowest(of_ranks), of_ranks[0]["elements"]
    text = described(found, elements)
    print(text, flush=True)
    if not arguments.quick:
        figures = {"device": arguments.device, "elements": elements, "worlds": found}
        print(save("optimizer-step", figures, text, plot(found, elements)))


if __name__ == "__main__":
    main()
