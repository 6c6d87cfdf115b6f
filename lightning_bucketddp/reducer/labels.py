"""Labels in torch's profiler, as "bucketddp: bucket 3, all-reduce, 4.2 MiB"."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.autograd import profiler
from torch.profiler import record_function

from lightning_bucketddp.grads.bucket import Bucket
from lightning_bucketddp.layout.plan import size_text

_P = ParamSpec("_P")
_R = TypeVar("_R")


def profiler_runs() -> bool:
    """Whether one of torch's profilers runs: a label takes microseconds even without one.

    There is no public way to ask. Should torch drop its flag, labels are always made.
    """
    return getattr(profiler, "_is_profiler_enabled", True)


def labelled(call: Callable[_P, _R], what: str, bucket: Bucket) -> Callable[_P, _R]:
    """The same function, whose calls have a label in the profiler."""
    size = size_text(bucket.flat.numel() * bucket.flat.element_size())

    def inside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with record_function(f"bucketddp: bucket {bucket.index}, {what}, {size}"):
            return call(*args, **kwargs)

    return inside
