"""Step times of data-parallel training over a link of limited rate, all peers in one run.

    sudo python benchmarks/link.py                                            # the reference case, about 12 minutes
    sudo python benchmarks/link.py --rates 0.5 1 2 4 --ratios 0.5 1 2         # others as well, about 24 minutes
    sudo python benchmarks/link.py --shapes                                   # layers of other sizes as well
    sudo python benchmarks/link.py --only bucketddp "best flags, 2 MiB"       # some peers; saves nothing
    sudo python benchmarks/link.py --num-nodes-only                           # without LOCAL_WORLD_SIZE, Trainers alone
    sudo python benchmarks/link.py --ranks-per-host 4 --slower 4 --save-as link-2x4    # two hosts of four ranks

In a virtual environment write ``sudo "$(which python)"``.

Two ranks, or more with ``--ranks-per-host``, run real gloo, in one network namespace for each host; a virtual cable of
limited rate joins them. Each layer of the model is a timed sleep, which imitates a GPU: the processor is idle
meanwhile. So a step's time shows how much of the communication a peer hides. Every peer runs in every round, in reverse
order in every second one. Figures are medians over rounds; ratios compare the same round. The ranks' hosts have one
name. Trainers have ``num_nodes=2``, and ``LOCAL_WORLD_SIZE`` is set as ``torchrun`` sets it, for the plain loops; with
``--num-nodes-only`` it is not. With several ranks per host the all-reduce that bounds are computed from is gloo's ring
of all ranks, which two levels may beat.

Eight ranks keep two cores busy at 2 Gbit/s, and a step's time is that of the processors. ``--slower 4`` makes the
reference case's layers take four times as long, and its link four times slower. So each rank has as much processor time
for a layer as with a core of its own.

The reference case has 24 layers, 58 MB of gradients, 4 ms forward and 8 ms backward a layer, and 2 Gbit/s. In the
others the layers' times follow from the ratio of backward to an all-reduce of all gradients at the link's rate: each of
``--rates`` is run at ratio 1, and each of ``--ratios`` at 2 Gbit/s, with a few peers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from link_cases import NBYTES, REFERENCE_RATE, SHAPES, Case, case_of, reference, shaped, swept
from link_report import NOTES, SHIPPED, UNSYNCHRONISED, Measured, described, drawn_reference
from namespaces import ADDRESSES, limit, own_prefix, two_hosts, why_not
from report import median, save

PORT = 29511
"""In the first rank's namespace, where nothing else listens."""
COMPARED = (UNSYNCHRONISED, SHIPPED)
"""Peers that tables compare with; they always run."""
SWEPT = (
    "ddp, best flags, 2 MiB",
    "bucketddp",
    "bucketddp_sharded",
    "bucketddp, fp16 hook",
    "bucketddp, bf16 wire",
    *(f"torch DDP, fp16 hook, {cap} MiB (plain loop)" for cap in (2, 4)),
)
"""Peers for other rates and ratios."""
SHAPED = (
    *(f"ddp, best flags, {cap} MiB" for cap in (1, 2, 4, 8)),
    "bucketddp",
    "bucketddp_sharded",
    "bucketddp, fp16 hook",
    "bucketddp, bf16 wire",
)
"""Peers for layers of other sizes."""


@dataclass(frozen=True)
class Job:
    """The ranks' work in one case.

    Attributes:
        case: The link's rate and the layers' times.
        peers: Names of peers, in the order in which they run.
        rounds: How often each runs.
        steps: Counted steps of a run; some to warm up come before.
        launcher_tells: Whether ``LOCAL_WORLD_SIZE`` is set.
        ranks_per_host: How many ranks each of the two hosts has.
    """

    case: Case
    peers: tuple[str, ...]
    rounds: int
    steps: int
    launcher_tells: bool = True
    ranks_per_host: int = 1


def worker(rank: int, folder: Path) -> None:
    """One rank's work: train with one peer after the other, in rounds."""
    import logging
    import warnings

    import torch
    import torch.distributed as dist
    from paced import paced
    from peers import WARM_UP, peers, step_times

    content = json.loads((folder / "job.json").read_text())
    job = Job(**{**content, "case": Case(**content["case"])})
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ranks = 2 * job.ranks_per_host
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=rank, world_size=ranks)
    measured = Measured(sizes=job.case.sizes, ranks=ranks)
    chosen = []
    for peer in peers():
        if peer.name in job.peers:
            if (reason := peer.why_not()) is None:
                chosen.append(peer)
            else:
                measured.skipped[peer.name] = reason
    # This run does not count: the first run of a process is slower, as it gets memory from the system.
    step_times(chosen[0], paced(forward_ms=1.0, backward_ms=1.0), 8)
    for number in range(job.rounds):
        measured.all_reduce.append(_all_reduce_seconds())
        model = paced(job.case.sizes, job.case.forward_ms, job.case.backward_ms)
        for kind, seconds in zip(("forward", "backward", "optimizer"), _unsynchronised_seconds(model), strict=True):
            getattr(measured, kind).append(seconds)
        for peer in chosen if number % 2 == 0 else reversed(chosen):
            passes: list[Any] = []
            busy: list[float] = []
            model = paced(job.case.sizes, job.case.forward_ms, job.case.backward_ms)
            try:
                times = step_times(peer, model, WARM_UP + job.steps, passes, num_nodes=2, busy=busy)
            except Exception as error:  # now: the traceback comes after the other rank's output
                print(f"{peer.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                raise
            measured.steps.setdefault(peer.name, []).append(median(times[WARM_UP:]))
            everyones_busy = torch.tensor(busy[-1] - busy[WARM_UP])
            dist.all_reduce(everyones_busy)
            measured.busy.setdefault(peer.name, []).append(everyones_busy.item() / job.steps)
            if passes:
                counted = passes[WARM_UP:]
                both = [record.backward_seconds for record in counted], [record.exposed_seconds for record in counted]
                measured.passes.setdefault(peer.name, []).append((median(both[0]), median(both[1])))
            gc.collect()  # not in the next peer's turn
            dist.barrier()
        if rank == 0:
            print(f"{job.case.name}: round {number + 1} of {job.rounds}", file=sys.stderr, flush=True)
    if rank == 0:
        (folder / "measured.json").write_text(json.dumps(asdict(measured)))
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # reference cycles keep gloo's threads alive, with which a process may abort when it ends


def _all_reduce_seconds() -> float:
    """Time an all-reduce of all gradients in one piece; the faster of two."""
    import torch
    import torch.distributed as dist

    gradients = torch.zeros(NBYTES // 4)
    times = []
    for _ in range(2):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(gradients)
        times.append(time.perf_counter() - begin)
    return min(times)


def _unsynchronised_seconds(model: Any) -> tuple[float, float, float]:
    """Time forward, backward and the optimizer's step; the fastest of three, as the first gets memory."""
    import torch
    from peers import adamw

    optimizer = adamw(model.parameters())
    times = []
    for _ in range(3):
        model.zero_grad()
        at = [time.perf_counter()]
        loss = model(torch.zeros(1, 1)).mean()
        at.append(time.perf_counter())
        loss.backward()
        at.append(time.perf_counter())
        optimizer.step()
        at.append(time.perf_counter())
        times.append([end - begin for begin, end in pairwise(at)])
    forward, backward, step = (min(each) for each in zip(*times, strict=True))
    return forward, backward, step


def measure(names: tuple[str, str], job: Job) -> Measured:
    """Run all ranks.

    Raises:
        SystemExit: If one fails; the others are ended.
    """
    limit(names, job.case.rate)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.json").write_text(json.dumps(asdict(job)))
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(2 * job.ranks_per_host):
            name = names[rank // job.ranks_per_host]
            settings = {"GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            environment = {name: value for name, value in os.environ.items() if name != "LOCAL_WORLD_SIZE"}
            if job.launcher_tells:
                settings["LOCAL_WORLD_SIZE"] = str(job.ranks_per_host)
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--worker", str(rank), folder]
            processes.append(subprocess.Popen(command, env={**environment, **settings}))
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    break
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()  # no effect if it has ended
                process.wait()
        if any(process.returncode for process in processes):
            raise SystemExit("a rank failed; see above")
        return Measured(**json.loads((Path(folder) / "measured.json").read_text()))


def chosen_peers(
    only: Sequence[str], among: Sequence[str] | None = None, trainers_only: bool = False, ranks_per_host: int = 1
) -> tuple[str, ...]:
    """Names of peers to run: those whose names contain a part in ``only``, and the peers that they are compared with.

    Args:
        only: Parts of names; all peers if empty.
        among: Names of peers to choose from if ``only`` is empty; all if None.
        trainers_only: Leave out plain loops.
        ranks_per_host: With one, peers that ask for one level are left out: all have one.
    """
    from peers import ONE_LEVEL, peers

    def is_chosen(name: str) -> bool:
        if ranks_per_host == 1 and ONE_LEVEL in name:
            return False
        if only:
            return any(part in name for part in only)
        return among is None or name in among

    found = [peer for peer in peers() if is_chosen(peer.name) and not (trainers_only and peer.plain)]
    compared = [peer for peer in peers() if peer.name in COMPARED]
    if any(peer.plain for peer in found):
        compared += [peer for peer in peers() if peer.plain and not peer.synchronised]
    names = {peer.name for peer in [*found, *compared]}
    return tuple(peer.name for peer in peers() if peer.name in names)


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    """The reference case, then others."""
    tells, each = not arguments.num_nodes_only, arguments.ranks_per_host
    first = chosen_peers(arguments.only, None, not tells, each)
    if arguments.quick:
        return [Job(case_of(20.0, 1.0), first, 1, 2, tells, each)]
    jobs = [Job(reference(arguments.rate, arguments.slower), first, arguments.rounds, arguments.steps, tells, each)]
    others = [(case, SWEPT) for case in swept(arguments.rates, arguments.ratios)]
    others += [(shaped(name), SHAPED) for name in (SHAPES if arguments.shapes else ())]
    for case, among in others:
        peers = chosen_peers(arguments.only, among, not tells, each)
        jobs.append(Job(case, peers, arguments.sweep_rounds, arguments.sweep_steps, tells, each))
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=REFERENCE_RATE, help="Gbit/s of the reference case")
    parser.add_argument("--slower", type=float, default=1.0, help="by how much to slow its layers and link down")
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="Gbit/s, each at ratio 1")
    parser.add_argument("--ratios", type=float, nargs="+", default=[], help="each at 2 Gbit/s")
    parser.add_argument("--shapes", action="store_true", help="layers of other sizes as well, at 2 Gbit/s")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the reference case")
    parser.add_argument("--steps", type=int, default=8, help="counted steps, in the reference case")
    parser.add_argument("--sweep-rounds", type=int, default=3, help="rounds of the other cases")
    parser.add_argument("--sweep-steps", type=int, default=4, help="counted steps, in the other cases")
    parser.add_argument(
        "--only", nargs="+", default=[], help="parts of peers' names; the peers that they are compared with are added"
    )
    parser.add_argument(
        "--num-nodes-only", action="store_true", help="leave LOCAL_WORLD_SIZE out, and with it the plain loops"
    )
    parser.add_argument("--ranks-per-host", type=int, default=1, help="how many ranks each of the two hosts has")
    parser.add_argument("--quick", action="store_true", help="one round at 20 Gbit/s; saves nothing")
    parser.add_argument("--save-as", help="save the results of --only under this name")
    parser.add_argument("--note", default="", help="what the saved results say of the run, such as a busy machine")
    parser.add_argument("--worker", nargs=2, metavar=("RANK", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(int(arguments.worker[0]), Path(arguments.worker[1]))
        return
    if (reason := why_not()) is not None:
        raise SystemExit(f"link.py {reason}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no rank or namespace stays behind
    found: dict[Case, Measured] = {}
    lines = [NOTES + f"{arguments.note}\n" * bool(arguments.note)]
    print(lines[0])
    with two_hosts(own_prefix()) as names:
        for job in jobs_of(arguments):
            found[job.case] = measure(names, job)
            lines.append(described(job.case, found[job.case]))
            print(lines[-1], flush=True)
    if arguments.quick or (arguments.only and not arguments.save_as):
        return
    first, of_first = next(iter(found.items()))
    cases = [{"case": asdict(case), "ratio": case.ratio, **asdict(measured)} for case, measured in found.items()]
    stem = save(
        arguments.save_as or "link",
        {"note": arguments.note, "cases": cases},
        "\n".join(lines),
        drawn_reference(first, of_first),
    )
    print(stem)


if __name__ == "__main__":
    main()
