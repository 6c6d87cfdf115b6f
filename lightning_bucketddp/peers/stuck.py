"""Who waits for whom, in words: from the ranks' records, without a process or a store.

A rank waits if its record says for what, or if the innermost Python frame of the thread that trains is in a collective
of torch's ``distributed_c10d``, or in those files of this package that wait for collectives and for what they send.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from linecache import getline
from pathlib import Path
from types import TracebackType

import torch

from lightning_bucketddp.peers.names import in_words
from lightning_bucketddp.peers.status import Frame, Status

_WAITS_IN = (
    "/torch/distributed/distributed_c10d.py",
    *(f"/lightning_bucketddp/comm/{name}.py" for name in ("work", "collectives", "host_copy")),
)
_OWN = f"{Path(__file__).parent.parent}/"
_INNER = (f"{Path(torch.__file__).parent}/", _OWN)
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/"
_MOST_STACKS = 8
"""How many different stacks a report shows."""

_MOST_CALLS = 4
"""How many calls of a stack it shows in any case: the last ones. Others only if they are not in installed packages."""


def waits(status: Status) -> bool:
    """Whether a rank waits for others; False if it is silent."""
    in_collective = bool(status.stack) and status.stack[0][0].endswith(_WAITS_IN)
    return status.heard and (bool(status.waiting_for) or in_collective)


def stuck_report(statuses: Sequence[Status], rank: int, seconds: float, why: str = "") -> str:
    """Say which ranks did not come, and where each rank is.

    Args:
        statuses: The records of all ranks.
        rank: A rank that waits.
        seconds: For how long it has waited.
        why: Why it waits, instead of the ranks that did not come.
    """
    late = {status.rank: status.process for status in statuses if not waits(status)}
    all_wait = "all ranks wait, for different things or the network"
    why = why or (f"{in_words(sorted(late), late)} did not come" if late else all_wait)
    processes = {status.rank: status.process for status in statuses}
    places: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for status in sorted(statuses, key=lambda status: (waits(status), status.rank)):
        places.setdefault((_place(status), _calls(status) if status.heard else ()), []).append(status.rank)
    lines = [f"rank {rank} has waited for {seconds:.0f} s: {why}. Where ranks are (the innermost call last):"]
    for number, ((place, calls), ranks) in enumerate(places.items()):
        lines.append(f"  {in_words(ranks, processes)}: {place}")
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
    shown = [status.stack[number] for number in _shown(status.stack, waits(status))]
    return tuple(f"    {file}:{at} in {name}: {getline(file, at).strip() or '?'}" for file, at, name in shown[::-1])


def _shown(stack: Sequence[Frame], waits: bool) -> list[int]:
    """The calls of a stack that are shown, by number: the last ones, and those outside of installed packages.

    Args:
        stack: The innermost call first.
        waits: Whether to leave out the innermost ones, in which the rank waits.
    """
    inner = 0
    while waits and inner < len(stack) and _is_inner(stack[inner][0]):
        inner += 1
    calls = range(inner, len(stack))
    return [number for number in calls if number < inner + _MOST_CALLS or _is_users(stack[number][0])]


def _is_users(file: str) -> bool:
    return "-packages/" not in file and not file.startswith(_OWN)  # an editable install is in no such folder


def _is_inner(file: str) -> bool:
    return file.startswith(_INNER) or (file.startswith(_STANDARD_LIBRARY) and "-packages/" not in file)


def shortened(traceback: TracebackType | None) -> TracebackType | None:
    """The calls of a traceback that a report would show: where this rank waited.

    Args:
        traceback: The outermost call first, as Python has it.
    """
    calls = _calls_of(traceback)
    short = None
    for number in _shown([(call.tb_frame.f_code.co_filename, call.tb_lineno, "") for call in calls], waits=True):
        call = calls[number]
        short = TracebackType(short, call.tb_frame, call.tb_lasti, call.tb_lineno)
    return short or traceback


def ends_in_wait(traceback: TracebackType | None) -> bool:
    """Whether the innermost call of a traceback waits for others."""
    return any(call.tb_frame.f_code.co_filename.endswith(_WAITS_IN) for call in _calls_of(traceback)[:1])


def _calls_of(traceback: TracebackType | None) -> list[TracebackType]:
    """The calls of a traceback, the innermost first."""
    return [*_calls_of(traceback.tb_next), traceback] if traceback is not None else []
