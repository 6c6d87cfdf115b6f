"""Step times of data-parallel training over a link of limited rate, all peers in one run.

    sudo python benchmarks/link.py [--rates 2] [--rounds 5]

Two ranks, each in a network namespace of its own, joined by a virtual cable that is limited to a rate; real gloo. The
model's layers sleep instead of computing, as an accelerator leaves the processor idle: what is measured is how much of
the communication each peer hides. Peers take turns in every round; figures are medians over rounds, ratios are of the
same round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from namespaces import ADDRESSES, limit, two_hosts, why_not
from report import median, paired_ratio, save, table

WARM_UP = 4
REFERENCE = "ddp as shipped"


def worker(rank: int, folder: str, rounds: int, steps: int, only: list[str]) -> None:
    """One rank: trains with one peer after the other, in rounds."""
    import logging
    import warnings

    import torch
    import torch.distributed as dist
    from paced import paced
    from peers import peers, step_times

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:29511", rank=rank, world_size=2)
    found: dict[str, list[float]] = {}
    chosen = [peer for peer in peers() if peer.name == REFERENCE or not only or any(part in peer.name for part in only)]
    for _ in range(rounds):
        for peer in chosen:
            try:
                times = step_times(peer, paced(), steps)
            except Exception as error:  # a peer that does not work here is not to end the others' comparison
                print(f"{peer.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                raise
            found.setdefault(peer.name, []).append(median(times[WARM_UP:]))
            dist.barrier()
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(names: tuple[str, str], rate: float, rounds: int, steps: int, only: list[str]) -> dict[str, list[float]]:
    """Per peer, the median step of each round in seconds."""
    limit(names, rate)
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank, name in enumerate(names):
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"}
            arguments = ["--worker", str(rank), folder, "--rounds", str(rounds), "--steps", str(steps)]
            arguments += ["--only", *only] if only else []
            ranks.append(
                subprocess.Popen(["ip", "netns", "exec", name, sys.executable, __file__, *arguments], env=environment)
            )
        for process in ranks:
            if process.wait() != 0:
                raise SystemExit("a rank failed; see above")
        found: dict[str, list[float]] = json.loads((Path(folder) / "times.json").read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0], help="Gbit/s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=14, help=f"per round and peer, of which {WARM_UP} do not count")
    parser.add_argument(
        "--only", nargs="+", default=[], help="parts of peers' names; what they are compared with is added"
    )
    parser.add_argument("--worker", nargs=2, metavar=("RANK", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(int(arguments.worker[0]), arguments.worker[1], arguments.rounds, arguments.steps, arguments.only)
        return
    if (reason := why_not()) is not None:
        raise SystemExit(f"link.py {reason}")
    results: dict[str, Any] = {}
    lines: list[str] = []
    with two_hosts() as names:
        for rate in arguments.rates:
            times = measure(names, rate, arguments.rounds, arguments.steps, arguments.only)
            results[f"{rate:g} Gbit/s"] = times
            shipped = times[REFERENCE]
            rows = [["peer", "step ms", "of ddp's"]]
            rows += [[peer, f"{median(t) * 1000:.0f}", f"{paired_ratio(t, shipped):.3f}"] for peer, t in times.items()]
            lines += [f"{rate:g} Gbit/s", table(rows), ""]
            print("\n".join(lines[-3:]), flush=True)
    if not arguments.only:
        print(save("link", {"seconds per step": results}, "\n".join(lines)))


if __name__ == "__main__":
    main()
