"""``torch.compile`` around a wrapper, inside of it, or of blocks.

Autograd sees a compiled backward as one function: all its gradients come at its end, and no bucket leaves before. So
torch cuts the graph wherever a bucket of its own DDP is full, and compiles the pieces. Its compiler asks the running
DDP module for the size of buckets, ``bucket_bytes_cap``. Here :func:`cutting_graphs` tells it.

Some names here are private, as torch has no public ones. Without them training stays right, but slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch._dynamo
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.plan import MIB


def bytes_per_graph(options: Options, largest_bucket: int) -> int | None:
    """How many bytes of parameters a graph has, counted from the end; None if every bucket waits for backward's end.

    Args:
        options: The wrapper's options.
        largest_bucket: The largest size of a bucket in bytes.
    """
    if not options.overlap or not options.use_contiguous_buffers:
        return None
    return max(largest_bucket, MIB)  # torch's last piece has 1 MiB, and the others may not have less


@contextmanager
def cutting_graphs(nbytes: int | None) -> Iterator[None]:
    """Have the compiler cut graphs inside, unless ``torch._dynamo.config.optimize_ddp`` is False.

    Args:
        nbytes: As :func:`bytes_per_graph`; None to leave graphs whole.
    """
    outside = getattr(DistributedDataParallel, "_active_ddp_module", None)
    stand_in: Any = None if nbytes is None else SimpleNamespace(bucket_bytes_cap=nbytes)
    DistributedDataParallel._active_ddp_module = stand_in
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = outside


def leave_untraced(package: str) -> None:
    """Keep the compiler from tracing a package's functions, such as hooks. It compiles the user's module all the same.

    Args:
        package: The package's name.
    """
    add = getattr(getattr(torch._dynamo, "trace_rules", None), "add", None)
    if add is not None:
        add(package)


def frames_are_compiled() -> bool:
    """Whether torch compiles functions that are called from here, as below a compiled wrapper. True if in doubt."""
    callback = getattr(getattr(torch._C._dynamo, "eval_frame", None), "get_eval_frame_callback", None)
    return callback is None or callable(callback())
