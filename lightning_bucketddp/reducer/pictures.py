"""Pictures of a pass: its buckets over time, as a plot, and as a trace for Perfetto."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_bucketddp.layout.plan import size_text

if TYPE_CHECKING:
    from lightning_bucketddp.reducer.record import PassRecord

MOST_ROWS = 60
"""Of more buckets only some are named, and the plot grows no further."""


def plot(record: PassRecord, path: str | os.PathLike[str]) -> None:
    """Draw a pass; see :meth:`PassRecord.plot`."""
    try:
        from matplotlib.figure import Figure  # without pyplot, which keeps figures and looks for a display
    except ImportError as error:
        raise ModuleNotFoundError(
            "expected matplotlib for PassRecord.plot(), found none; install lightning-bucketddp[plot], or use "
            "PassRecord.to_chrome_trace(), which needs nothing"
        ) from error
    buckets, rows = record.buckets, range(len(record.buckets))
    end, published = record.backward_seconds * 1e3, (record.backward_seconds + record.exposed_seconds) * 1e3
    times = [(it.ready_at * 1e3, it.launched_at * 1e3, it.done_at * 1e3) for it in buckets]
    figure = Figure(figsize=(10, 2.2 + 0.26 * min(len(rows), MOST_ROWS)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(0, end, color="0.93", label="backward")
    axes.axvline(end, color="tab:red", linestyle="--", label="end of backward")
    axes.hlines(
        rows,
        [it[0] for it in times],
        [it[1] for it in times],
        color="0.5",
        label="ready to launched: waits for its turn, is packed",
    )
    axes.plot([it[0] for it in times], rows, "|", color="black", label="ready: its last gradient is there")
    for label, color, parts in (
        ("launched to done, hidden behind backward", "tab:blue", [(at, min(done, end)) for _, at, done in times]),
        ("launched to done, hidden by nothing", "tab:orange", [(max(at, end), done) for _, at, done in times]),
    ):
        widths = [max(0.0, stop - start) for start, stop in parts]
        axes.barh(rows, widths, 0.6, [start for start, _ in parts], color=color, label=label)
    axes.axvline(published, color="tab:green", linestyle=":", label="gradients published")
    every = 1 + len(rows) // (MOST_ROWS + 1)
    names = [f"bucket {it.index}, {size_text(it.nbytes)}" for it in buckets[::every]]
    axes.set_yticks(rows[::every], names, fontsize="small")
    axes.set_ylim(len(rows) - 0.3, -0.7)  # the first one on top
    axes.set_xlim(0, published * 1.01)
    axes.set_xlabel("ms since the pass opened, by the host's clock")
    axes.set_title(
        f"Pass {record.number}, rank {record.rank} of {record.world_size}: backward {end:.1f} ms, then "
        f"{published - end:.1f} ms that nothing hides",
        fontsize="medium",
    )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=110)


def write_chrome_trace(record: PassRecord, path: str | os.PathLike[str]) -> None:
    """Write a pass as a trace; see :meth:`PassRecord.to_chrome_trace`. A row is a thread of the process "rank"."""
    events: list[dict[str, object]] = []

    def add(what: str, kind: str, row: int, start: float, stop: float = 0.0, **args: object) -> None:
        times = {"ts": start * 1e6, "dur": (stop - start) * 1e6} if kind == "X" else {"ts": start * 1e6, "s": "t"}
        events.append({"name": what, "ph": kind, "pid": record.rank, "tid": row, **times, "args": args})

    end = record.backward_seconds
    add("process_name", "M", 0, 0.0, name=f"pass {record.number}, rank {record.rank} of {record.world_size}")
    add("thread_name", "M", 0, 0.0, name="pass")
    add("backward", "X", 0, 0.0, end)
    add("exposed communication", "X", 0, end, end + record.exposed_seconds)
    for row, it in enumerate(record.buckets, 1):
        add("thread_name", "M", row, 0.0, name=f"bucket {it.index}")
        add("ready", "i", row, it.ready_at)
        facts = {"dtype": str(it.dtype), "device": it.device, "nbytes": it.nbytes, "parameters": it.parameters}
        name = f"bucket {it.index}, {size_text(it.nbytes)}"
        add(name, "X", row, it.launched_at, it.done_at, launched_early=it.launched_early, **facts)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
