"""Pictures of a pass: its buckets over time, as a plot, and as a trace for Perfetto."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_bucketddp.layout.plan import size_text

if TYPE_CHECKING:
    from lightning_bucketddp.reducer.record import PassRecord


def plot(record: PassRecord, path: str | os.PathLike[str]) -> None:
    """Draw a pass; see :meth:`PassRecord.plot`."""
    from matplotlib.figure import Figure  # without pyplot, which keeps figures and looks for a display

    end, exposed = record.backward_seconds * 1e3, record.exposed_seconds * 1e3
    figure = Figure(figsize=(10, 2.2 + 0.26 * len(record.buckets)), layout="constrained")
    axes = figure.add_subplot(
        title=f"Pass {record.number}, rank {record.rank}: backward {end:.1f} ms, then {exposed:.1f} ms exposed",
        xlabel="ms since the pass opened, by the host's clock",
        xlim=(0, (end + exposed) * 1.01),
    )
    axes.axvspan(0, end, color="0.93", label="backward")
    names = [f"bucket {it.index}, {size_text(it.nbytes)}" for it in record.buckets]
    moments = "ready_at", "launched_at", "done_at"
    ready, launched, done = ([getattr(it, moment) for it in record.buckets] for moment in moments)
    for height, starts, ends, label, color in (
        (0.15, ready, launched, "ready to launched: waits for its turn, is packed", "0.5"),
        (0.6, launched, done, "launched to done", "tab:blue"),
    ):
        widths = [(stop - start) * 1e3 for start, stop in zip(starts, ends, strict=True)]
        axes.barh(names, widths, height, [start * 1e3 for start in starts], color=color, label=label)
    axes.axvline(end, color="tab:red", linestyle="--", label="end of backward")
    axes.axvline(end + exposed, color="tab:green", linestyle=":", label="gradients published")
    axes.invert_yaxis()  # the first bucket on top
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path)


def write_chrome_trace(record: PassRecord, path: str | os.PathLike[str]) -> None:
    """Write a pass as a trace; see :meth:`PassRecord.to_chrome_trace`. A row is a thread of the process "rank"."""
    events: list[dict[str, object]] = []

    def add(what: str, kind: str, row: int, start: float = 0.0, stop: float = 0.0, **args: object) -> None:
        times = {"ts": start * 1e6, "dur": (stop - start) * 1e6, "s": "t"}
        events.append({"name": what, "ph": kind, "pid": record.rank, "tid": row, **times, "args": args})

    end = record.backward_seconds
    add("process_name", "M", 0, name=f"pass {record.number}, rank {record.rank} of {record.world_size}")
    add("thread_name", "M", 0, name="pass")
    add("backward", "X", 0, 0.0, end)
    add("exposed communication", "X", 0, end, end + record.exposed_seconds)
    for row, it in enumerate(record.buckets, 1):
        add("thread_name", "M", row, name=f"bucket {it.index}")
        add("ready", "i", row, it.ready_at)
        facts = {name: getattr(it, name) for name in ("dtype", "device", "nbytes", "parameters", "launched_early")}
        add(f"bucket {it.index}, {size_text(it.nbytes)}", "X", row, it.launched_at, it.done_at, **facts)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, default=str))
