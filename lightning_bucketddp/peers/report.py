"""Who waits for whom, in words: from the ranks' records, without a process or a store.

A rank waits if its record says for what, or if the innermost Python frame of the thread that trains is in a collective
of torch's ``distributed_c10d``, or in those files of this package that wait for collectives and for what they send.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile, groupby
from linecache import getline
from pathlib import Path

import torch

from lightning_bucketddp.peers.status import Status

_WAITS_IN = (
    "/torch/distributed/distributed_c10d.py",
    *(f"/lightning_bucketddp/comm/{name}.py" for name in ("work", "collectives", "host_copy")),
)
_INNER = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent.parent}/")
_MOST_STACKS = 8
"""How many different stacks a report shows."""

_MOST_CALLS = 4
"""How many calls of a stack it shows in any case: the last ones. Others only if they are not in installed packages."""


def waits(status: Status) -> bool:
    """Whether a rank waits for others; False if it is silent."""
    in_collective = bool(status.stack) and status.stack[0][0].endswith(_WAITS_IN)
    return status.heard and (bool(status.waiting_for) or in_collective)


def report(statuses: Sequence[Status], rank: int, seconds: float, why: str = "") -> str:
    """Say which ranks did not come, and where each rank is.

    Args:
        statuses: The records of all ranks.
        rank: A rank that waits.
        seconds: For how long it has waited.
        why: Why it waits, instead of the ranks that did not come.
    """
    late = sorted(status.rank for status in statuses if not waits(status))
    why = why or (f"{in_words(late)} did not come" if late else "all ranks wait, for different things or the network")
    places: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for status in sorted(statuses, key=lambda status: (waits(status), status.rank)):
        places.setdefault((_place(status), _calls(status) if status.heard else ()), []).append(status.rank)
    lines = [f"rank {rank} has waited for {seconds:.0f} s: {why}. Where ranks are (the innermost call last):"]
    for number, ((place, calls), ranks) in enumerate(places.items()):
        lines.append(f"  {in_words(ranks)}: {place}")
        lines += calls if number < _MOST_STACKS else ()
    return "\n".join(lines)


def _place(status: Status) -> str:
    at = status.position
    point = f"in step {at.step}, pass {at.pass_number}" if at.step else f"in pass {at.pass_number}"
    if not status.heard:
        silent = f"silent for {status.silent_for:.0f} s; its last record, which may be old, says {point}"
        return "ended training" if status.ended else silent
    if status.waiting_for:
        return f"waiting for {status.waiting_for}, {point}"
    return f"waiting in {status.stack[0][2]}(), {point}" if waits(status) else f"not waiting, {point}"


def _calls(status: Status) -> tuple[str, ...]:
    """The calls of a stack that a report shows, a line each, without those in which the rank waits."""
    stack = [*dropwhile(lambda frame: waits(status) and frame[0].startswith(_INNER), status.stack)]
    shown = [call for number, call in enumerate(stack) if number < _MOST_CALLS or "-packages/" not in call[0]]
    return tuple(f"    {file}:{at} in {name}: {getline(file, at).strip() or '?'}" for file, at, name in shown[::-1])


def in_words(ranks: Sequence[int]) -> str:
    """Ascending ranks in words, such as ``ranks 0 to 6, 9``."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    words = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"ranks {words}" if len(ranks) > 1 else f"rank {words}"
