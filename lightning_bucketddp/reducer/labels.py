"""Labels in torch's profiler, as "bucketddp: bucket 3, all-reduce, 4.2 MiB"."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler
from torch.profiler import record_function

from lightning_bucketddp.grads.bucket import Bucket
from lightning_bucketddp.layout.plan import size_text

_NO_LABEL = nullcontext()


def label(what: str, bucket: Bucket) -> AbstractContextManager[object]:
    """A context with a label in the profiler that runs, if one does: a label takes microseconds even if none does."""
    # There is no public way to ask. Should torch drop its flag, labels are always made.
    if not getattr(profiler, "_is_profiler_enabled", True):
        return _NO_LABEL
    size = size_text(bucket.flat.numel() * bucket.flat.element_size())
    return record_function(f"bucketddp: bucket {bucket.index}, {what}, {size}")
