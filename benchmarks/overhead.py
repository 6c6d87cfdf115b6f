"""Measure the host time that a wrapper adds to a pass: per parameter, per bucket and fixed.

    python benchmarks/overhead.py [--ranks 1 2] [--rounds 30]
    python benchmarks/overhead.py --profile

The model is a chain of tiny parameters, so that autograd costs little and the wrapper's work per parameter shows. All
peers run in every round. A wrapper adds its time minus the unwrapped module's time in the same round; the median over
rounds counts. ``fixed + a * parameters + b * buckets`` is fitted by least squares. The weight of a case is one over the
unwrapped module's time, so that long cases do not decide alone. In some cases the number of parameters grows with one
bucket, in others the number of buckets grows.

There are two settings. With one rank, bucketddp sends nothing, and torch's ddp starts an all-reduce per bucket without
waiting for a peer. With two gloo ranks on loopback all send. A backward then ends when the other rank's data have
arrived, so that a bucket's cost includes its collective, which is also measured alone. The fixed part includes
bucketddp's control vector: 4 bytes per parameter in the last bucket, if that is small. The slope over parameters
compares best.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import math
import pstats
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from plain_peers import BEST, COLOURS, OURS, UNWRAPPED, WRAPPED, bucket_count, local, plain_peers
from ranks import prepare, run_ranks
from report import median, paired_ratio, plots, save, table
from wrapped import Wrapping

NUMEL = 16
PARAM_BYTES = 4 * NUMEL
MIB = 1024 * 1024
WARM_UP = 5

FORWARD, BACKWARD = "forward", "backward"
LOCAL_FORWARD, FIRST_LOCAL, LATER_LOCAL = "local forward", "first local backward", "later local backward"
PHASES = {
    FORWARD: "forward",
    BACKWARD: "backward, synchronised",
    LOCAL_FORWARD: "forward in no_sync",
    FIRST_LOCAL: "backward in no_sync, first of a cycle",
    LATER_LOCAL: "backward in no_sync, later ones",
}
ALL_REDUCES = "the all-reduces alone"


@dataclass(frozen=True)
class Case:
    """A chain of parameters, and the number of buckets that its gradients are cut into."""

    parameters: int
    buckets: int

    @property
    def params_per_bucket(self) -> int:
        return -(-self.parameters // self.buckets)


class Chain(nn.Module):
    """Adds one tiny parameter after the other to its input."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.zeros(NUMEL)) for _ in range(parameters))
        self._chain = tuple(self.params)  # walking a ParameterList takes longer than adding

    def forward(self, x: Tensor) -> Tensor:
        for param in self._chain:
            x = x + param
        return x


class Subject:
    """One wrapped chain, warmed up.

    Args:
        wrapping: Which peer.
        case: How many parameters and buckets.
    """

    def __init__(self, wrapping: Wrapping, case: Case) -> None:
        chain = Chain(case.parameters)
        self.params = list(chain.parameters())
        self.net = wrapping.wrap(chain)
        for _ in range(WARM_UP):
            self.synchronised()
        for param in self.params:
            torch.testing.assert_close(param.grad, torch.ones(NUMEL))
        if wrapping.synchronises and (found := bucket_count(self.net)) != case.buckets:
            raise RuntimeError(f"{wrapping.name}: expected {case.buckets} buckets, found {found}")

    def _clear(self) -> None:
        for param in self.params:
            param.grad = None

    def _pass(self) -> tuple[float, float]:
        """Seconds of a forward and of its backward, begun by all ranks at once."""
        x = torch.zeros(NUMEL)
        dist.barrier()
        begin = time.perf_counter()
        loss = self.net(x).sum()
        between = time.perf_counter()
        loss.backward()
        return between - begin, time.perf_counter() - between

    def synchronised(self) -> dict[str, float]:
        """A synchronised pass by itself."""
        self._clear()
        forward, backward = self._pass()
        return {FORWARD: forward, BACKWARD: backward}

    def accumulating(self) -> dict[str, float]:
        """The first two local passes of a cycle: fresh gradients, then gradients that are added to."""
        self._clear()
        with local(self.net):
            _, first = self._pass()
            forward, later = self._pass()
        return {LOCAL_FORWARD: forward, FIRST_LOCAL: first, LATER_LOCAL: later}


def all_reduces(case: Case) -> float:
    """Seconds of a case's all-reduces, started at once and waited for."""
    flats = [torch.zeros(case.params_per_bucket * NUMEL) for _ in range(case.buckets)]
    dist.barrier()
    begin = time.perf_counter()
    for work in [dist.all_reduce(flat, async_op=True) for flat in flats]:
        work.wait()
    return time.perf_counter() - begin


def measure(device: torch.device, cases: list[tuple[int, int]], rounds: int) -> dict[str, dict[str, list[list[float]]]]:
    """One rank's work: seconds by peer, phase, case and round."""
    warnings.simplefilter("ignore")  # torch DDP's, on views
    subjects: list[dict[str, Subject]] = []
    for case in (Case(*numbers) for numbers in cases):
        peers = plain_peers(bucket_cap_mb=case.params_per_bucket * PARAM_BYTES / MIB)
        subjects.append({peer.name: Subject(peer, case) for peer in peers})
    names = list(subjects[0])
    found: dict[str, dict[str, list[list[float]]]] = {
        **{name: {phase: [[] for _ in cases] for phase in PHASES} for name in names},
        ALL_REDUCES: {BACKWARD: [[] for _ in cases]},
    }
    for _ in range(rounds):
        gc.collect()
        gc.disable()  # as timeit does: the cost of a collection depends on everything in the process
        subjects[0][names[0]].synchronised()  # else the first peer would pay for the pause
        for at, case in enumerate(cases):
            for name in names:
                subject = subjects[at][name]
                for phase, seconds in {**subject.synchronised(), **subject.accumulating()}.items():
                    found[name][phase][at].append(seconds)
            found[ALL_REDUCES][BACKWARD][at].append(all_reduces(Case(*case)))
        names.append(names.pop(0))
        gc.enable()
    return found


@dataclass(frozen=True)
class Measured:
    """The measurements of one setting.

    Attributes:
        cases: The cases.
        seconds: By peer, phase, case and round.
    """

    cases: list[Case]
    seconds: dict[str, dict[str, list[list[float]]]]

    def whole(self, peer: str, phases: Sequence[str], case: Case) -> list[float]:
        """Seconds of some phases together, by round."""
        at = self.cases.index(case)
        return [sum(parts) for parts in zip(*(self.seconds[peer][phase][at] for phase in phases), strict=True)]

    def added(self, peer: str, phases: Sequence[str], case: Case) -> float:
        """Microseconds by which a peer takes longer than the unwrapped module; for the all-reduces, their own time."""
        mine = self.whole(peer, phases, case)
        if peer == ALL_REDUCES:
            return median(mine) * 1e6
        plain = self.whole(UNWRAPPED, phases, case)
        return median([time - other for time, other in zip(mine, plain, strict=True)]) * 1e6

    def fit(self, peer: str, phase: str) -> dict[str, float]:
        """What a peer adds to a phase, in microseconds: fixed, per parameter, per bucket.

        Returns:
            These three, and the largest distance of a case from the fit, as a share of the unwrapped module's time.
        """
        plain = [median(self.whole(UNWRAPPED, [phase], case)) * 1e6 for case in self.cases]
        weights = 1 / torch.tensor(plain, dtype=torch.float64)
        values = torch.tensor([self.added(peer, [phase], case) for case in self.cases], dtype=torch.float64)
        terms = torch.tensor([(1, case.parameters, case.buckets) for case in self.cases], dtype=torch.float64)
        found = torch.linalg.lstsq(terms * weights[:, None], (values * weights)[:, None]).solution[:, 0]
        fixed, parameter, bucket = found.tolist()
        off = ((terms @ found - values) * weights).abs().max().item()
        return {"per parameter": parameter, "per bucket": bucket, "fixed": fixed, "off by": off}

    def fits(self) -> dict[str, dict[str, dict[str, float]]]:
        """All fits, by phase and peer."""
        return {
            phase: {
                peer: self.fit(peer, phase) for peer, of in self.seconds.items() if peer != UNWRAPPED and phase in of
            }
            for phase in PHASES
        }

    @property
    def growing(self) -> list[Case]:
        """The cases of one bucket, by number of parameters."""
        return sorted((case for case in self.cases if case.buckets == 1), key=lambda case: case.parameters)


def fits_table(measured: Measured) -> str:
    """Return the terms that wrappers add to each phase."""
    rows = [["µs more than the unwrapped module", "per parameter", "per bucket", "fixed", "fit off by"]]
    for phase, of_peers in measured.fits().items():
        for peer, terms in of_peers.items():
            numbers = [f"{terms['per parameter']:.2f}", f"{terms['per bucket']:.1f}", f"{terms['fixed']:.0f}"]
            rows.append([f"{PHASES[phase]}: {peer}", *numbers, f"{terms['off by']:.0%}"])
    return table(rows)


SYNCHRONISED, LOCAL = (FORWARD, BACKWARD), (LOCAL_FORWARD, LATER_LOCAL)


def growth_table(measured: Measured) -> str:
    """Return the time of passes per parameter, by number of parameters."""
    rows = [["µs per parameter, one bucket", UNWRAPPED, *(f"+ {peer}" for peer in WRAPPED), f"{OURS} / {BEST}"]]
    for title, phases in (("synchronised pass", SYNCHRONISED), ("later local pass", LOCAL)):
        for case in measured.growing:
            plain = median(measured.whole(UNWRAPPED, phases, case)) * 1e6
            each = [plain, *(measured.added(peer, phases, case) for peer in WRAPPED)]
            ratio = paired_ratio(measured.whole(OURS, phases, case), measured.whole(BEST, phases, case))
            numbers = [f"{value / case.parameters:.2f}" for value in each]
            rows.append([f"{title}, {case.parameters:,} parameters", *numbers, f"{ratio:.3f}"])
    return table(rows)


def plot(results: dict[str, Measured]) -> Any:
    """Added time per pass over the number of parameters; a panel per setting."""
    pyplot = plots()
    figure, axes = pyplot.subplots(1, len(results), figsize=(5.2 * len(results), 4.8), sharey=True, squeeze=False)
    for axis, (title, measured) in zip(axes[0], results.items(), strict=True):
        counts = [case.parameters for case in measured.growing]
        for phases, style, what in ((SYNCHRONISED, "-", "synchronised"), (LOCAL, ":", "local, later ones")):
            for peer in WRAPPED:
                values = [measured.added(peer, phases, case) for case in measured.growing]
                shown = [value if value > 0 else math.nan for value in values]
                axis.plot(counts, shown, style, marker="o", ms=3, color=COLOURS[peer], label=f"{peer}, {what}")
        plain = [median(measured.whole(UNWRAPPED, SYNCHRONISED, case)) * 1e6 for case in measured.growing]
        axis.plot(counts, plain, "--", color=COLOURS[UNWRAPPED], label="for comparison: an unwrapped pass")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(bottom=10)
        axis.set_xlabel("number of parameters (16 elements each, in one bucket)")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("time added to a pass in µs")
    figure.suptitle(
        "Host time that a wrapper adds to forward and backward: lower is better.\n"
        "Missing points: no difference from the unwrapped module's time could be measured",
        fontsize=10,
    )
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def setting(ranks: int) -> str:
    return "one rank" if ranks == 1 else f"{ranks} gloo ranks on loopback"


def profile(device: torch.device, parameters: int, passes: int) -> str:
    """One rank's work: passes of bucketddp in one bucket, rank 0's in the profiler."""
    warnings.simplefilter("ignore")
    case = Case(parameters, 1)
    subject = Subject(next(peer for peer in plain_peers(bucket_cap_mb=MIB) if peer.name == OURS), case)
    texts = []
    for title, run in (("synchronised passes", subject.synchronised), ("pairs of local passes", subject.accumulating)):
        profiler = cProfile.Profile() if dist.get_rank() == 0 else None
        for _ in range(passes):
            with profiler or nullcontext():
                run()
        if profiler is not None:
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(25)
            texts.append(f"{passes} {title}, {parameters} parameters (calls of Python look dearer in a profiler)")
            texts.append(text.getvalue().strip() + "\n")
    return "\n".join(texts)


def cases_of(counts: Sequence[int], buckets: Sequence[int], at: int) -> list[tuple[int, int]]:
    """One bucket for every number of parameters; every number of buckets for one number of parameters, ``at``."""
    return [*((count, 1) for count in counts), *((at, number) for number in buckets)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="one setting for each")
    parser.add_argument("--rounds", type=int, default=30, help="each peer has one turn per round")
    parser.add_argument("--quick", action="store_true", help="few cases and rounds: shows that it runs; saves nothing")
    parser.add_argument("--profile", action="store_true", help="where bucketddp's host time goes; saves nothing")
    parser.add_argument("--parameters", type=int, default=1000, help="number of parameters of the profiled model")
    arguments = parser.parse_args()
    prepare()
    if arguments.profile:
        passes = 10 if arguments.quick else 100
        for ranks in arguments.ranks:
            print(f"{setting(ranks)}\n{run_ranks(profile, arguments.parameters, passes, size=ranks)[0]}", flush=True)
        return
    cases, rounds = cases_of([100, 300, 1000, 3000, 10000], [2, 4, 8, 16, 32], 1000), arguments.rounds
    if arguments.quick:
        cases, rounds = cases_of([100, 300], [2, 4], 100), min(rounds, 4)
    results: dict[str, Measured] = {}
    text: list[str] = []
    for ranks in arguments.ranks:
        seconds = run_ranks(measure, cases, rounds, size=ranks)[0]
        measured = results[setting(ranks)] = Measured([Case(*numbers) for numbers in cases], seconds)
        note = "bucketddp sends nothing, ddp all-reduces alone" if ranks == 1 else "times are rank 0's, waits included"
        tables = [fits_table(measured), "", growth_table(measured), ""]
        text += [f"{setting(ranks)}, {rounds} rounds", f"({note})", *tables]
        print("\n".join(text[-6:]), flush=True)
    if not arguments.quick:
        print(save("overhead", figures(results), "\n".join(text), plot(results)))


def figures(results: dict[str, Measured]) -> dict[str, Any]:
    """The figures to save of each setting: the fits, and medians in microseconds by peer, phase and case."""
    return {
        title: {
            "fitted, µs more than the unwrapped module": measured.fits(),
            "median µs, by peer, phase and parameters/buckets": {
                peer: {
                    phase: {
                        f"{case.parameters}/{case.buckets}": median(of_case) * 1e6
                        for case, of_case in zip(measured.cases, of_cases, strict=True)
                    }
                    for phase, of_cases in of_phases.items()
                }
                for peer, of_phases in measured.seconds.items()
            },
        }
        for title, measured in results.items()
    }


if __name__ == "__main__":
    main()
