"""Steps of about a millisecond, where the wrapper and the latency of collectives are all that counts.

    python benchmarks/small.py                      # 2, 4 and 8 ranks; on two cores more than 20 minutes
    python benchmarks/small.py --ranks 2 4          # 9 minutes
    python benchmarks/small.py --ranks 2            # 2 minutes

Models have six or 600 small parameters, with LayerNorm or BatchNorm. Module buffers are synchronised in each
step. Peers run in a plain PyTorch loop and in a Trainer. Every peer runs in every round, in every other round in
reverse order. Figures are medians over rounds of the median step. Ratios compare the same round: a plain loop's with
torch DDP at its best flags, a Trainer's with Lightning's ``ddp``. "The same again" shows how much of a ratio is noise.

Last come parts that are trained in turn, as a GAN's: passes whose trainable set is not that of the pass before, and the
mean of passes that train each part alone.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peers import Peer, adamw, step_times
from ranks import prepare, run_ranks
from report import median, paired_ratio, save, table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP, BucketDDPStrategy

WARM_UP = 20
"""Steps that do not count: buckets change in the first ones."""
SETTLED = 70
"""Passes after which a wrapper whose trainable set has changed once proves it no more."""
WIDTH = 8
MODELS = {
    "6 parameters, LayerNorm": (2, nn.LayerNorm),
    "8 parameters, BatchNorm": (2, nn.BatchNorm1d),
    "600 parameters, LayerNorm": (150, nn.LayerNorm),
}
PLAIN, TRAINER = ("plain loop", "torch DDP, best flags"), ("Trainer", "ddp")
"""How peers run, and the peer with which the others are compared."""


class Rows(nn.Module):
    """Makes a batch of four of a single number: BatchNorm needs several."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1)[:1] + torch.arange(4.0 * WIDTH).view(4, WIDTH)


def model(layers: int, norm: type[nn.Module]) -> nn.Sequential:
    """Linear layers and norms in turn; after the last linear layer only BatchNorm."""
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), norm(WIDTH))]
    return nn.Sequential(Rows(), *(parts if norm is nn.BatchNorm1d else parts[:-1]))


def compared() -> dict[tuple[str, str], list[Peer]]:
    """The peers, by how they run."""
    from lightning.pytorch.strategies import DDPStrategy
    from peers import StartedRanks

    def plain(name: str, wrapper: Any) -> Peer:
        def wrap(net: nn.Sequential, optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
            module = wrapper(net)
            return module, optimizer(module.parameters())

        return Peer(name, None, adamw, wrap)

    best = partial(DistributedDataParallel, gradient_as_bucket_view=True, static_graph=True, batched_grad_copy=True)
    return {
        PLAIN: [
            plain(PLAIN[1], best),
            plain("the same again", best),
            plain("BucketDDP", BucketDDP),
            plain("BucketDDP, sharded", partial(BucketDDP, shard_optimizer=True)),
        ],
        TRAINER: [
            Peer(TRAINER[1], lambda: DDPStrategy(cluster_environment=StartedRanks())),
            Peer("bucketddp", lambda: BucketDDPStrategy(cluster_environment=StartedRanks())),
            Peer(
                "bucketddp_sharded", lambda: BucketDDPStrategy(shard_optimizer=True, cluster_environment=StartedRanks())
            ),
        ],
    }


def worker(device: torch.device, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """The median seconds of a step, by model and peer, for each round."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, dict[str, list[float]]] = {}
    for name, made_of in MODELS.items():
        of_peers = found[name] = {}
        for number in range(rounds):
            for peers in compared().values():
                for peer in peers if number % 2 == 0 else reversed(peers):
                    times = step_times(peer, model(*made_of), WARM_UP + steps)
                    of_peers.setdefault(peer.name, []).append(median(times[WARM_UP:]))
                    gc.collect()  # here rather than in the next peer's turn
                    dist.barrier()
    return found


TURNS = {"equal parts": (1, 1), "parts of one and of nine layers": (1, 9)}
"""How many layers the two parts have."""


def in_turn(device: torch.device, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """The median seconds of a pass for each round, with one part trained alone or both in turn."""
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, list[float]]] = {}
    inputs = torch.randn(8, 64)
    for name, depths in TURNS.items():
        made = {how: nn.ModuleList(_part(depth) for depth in depths) for how in ("first", "second", "in turn")}
        nets = {how: BucketDDP(parts) for how, parts in made.items()}
        of_ways = found[name] = {how: [] for how in nets}
        for number in range(-1, rounds):  # in the first one wrappers learn, and prove sets that have changed
            times: dict[str, list[float]] = {how: [] for how in nets}
            for step in range(max(steps, SETTLED if number < 0 else 0)):
                for how, net in nets.items():
                    trained = {"first": 0, "second": 1}.get(how, step % 2)
                    for at, part in enumerate(made[how]):
                        part.requires_grad_(at == trained)
                    net.zero_grad()
                    dist.barrier()
                    begin = time.perf_counter()
                    made[how][trained](inputs).square().mean().backward()
                    times[how].append(time.perf_counter() - begin)
            if number >= 0:
                turns = times["in turn"]
                times["in turn"] = [(one + other) / 2 for one, other in zip(turns[::2], turns[1::2], strict=False)]
                for how, seconds in times.items():
                    of_ways[how].append(median(seconds))
    return found


def _part(depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(depth)))


def described_turns(ranks: int, found: dict[str, dict[str, list[float]]]) -> str:
    """The table of parts that are trained in turn."""
    rows = [[f"passes, {ranks} ranks", "ms alone", "ms in turn", "ratio"]]
    for name, ways in found.items():
        alone = [(first + second) / 2 for first, second in zip(ways["first"], ways["second"], strict=True)]
        ratio = paired_ratio(ways["in turn"], alone)
        rows.append([name, f"{median(alone) * 1e3:.3f}", f"{median(ways['in turn']) * 1e3:.3f}", f"{ratio:.3f}"])
    return table(rows)


def described(ranks: int, found: dict[str, dict[str, list[float]]]) -> str:
    """The tables of one number of ranks."""
    texts = []
    for name, of_peers in found.items():
        rows = [[f"{name}, {ranks} ranks", "ms a step", "ratio"]]
        for (how, reference), peers in compared().items():
            for peer in peers:
                times = of_peers[peer.name]
                ratio = paired_ratio(times, of_peers[reference])
                rows.append([f"{how}: {peer.name}", f"{median(times) * 1e3:.3f}", f"{ratio:.3f}"])
        texts.append(table(rows))
    return "\n\n".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="that count, per round and peer")
    parser.add_argument("--quick", action="store_true", help="two ranks, one round, few steps; saves nothing")
    arguments = parser.parse_args()
    ranks, rounds, steps = ([2], 1, 5) if arguments.quick else (arguments.ranks, arguments.rounds, arguments.steps)
    prepare()
    found, turns, texts = {}, {}, []
    for size in ranks:
        found[size] = run_ranks(worker, rounds, steps, size=size)[0]
        texts.append(described(size, found[size]))
        turns[size] = run_ranks(in_turn, rounds, steps, size=size)[0]
        texts.append(described_turns(size, turns[size]))
        print("\n\n".join(texts[-2:]), flush=True)
    if not arguments.quick:
        print(save("small", {"ranks": found, "in turn": turns}, "\n\n".join(texts)))


if __name__ == "__main__":
    main()
