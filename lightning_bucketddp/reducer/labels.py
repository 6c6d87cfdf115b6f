"""Labels in torch's profiler, as "bucketddp: bucket 3, all-reduce, 4.2 MiB"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

from lightning_bucketddp.grads.bucket import Bucket
from lightning_bucketddp.layout.plan import size_text


def profiler_runs() -> bool:
    """Whether one of torch's profilers runs: a label takes microseconds even if none does.

    There is no public way to ask. Should torch drop its flag, labels are always made.
    """
    return getattr(profiler, "_is_profiler_enabled", True)


def labelled(call: Callable[..., Any], what: str, bucket: Bucket) -> Callable[..., Any]:
    """The same function, whose next call has a label in the profiler."""
    size = size_text(bucket.flat.numel() * bucket.flat.element_size())
    return record_function(f"bucketddp: bucket {bucket.index}, {what}, {size}")(call)
