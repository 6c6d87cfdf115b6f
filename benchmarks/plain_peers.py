"""Four ways to train in a plain PyTorch loop, for benchmarks of host time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wrapped import Wrapping, bucketddp, ddp, unwrapped

from lightning_bucketddp import BucketDDP

UNWRAPPED, SHIPPED, BEST, OURS = "unwrapped", "ddp as shipped", "ddp, best flags", "bucketddp"
WRAPPED = (SHIPPED, BEST, OURS)
COLOURS = {UNWRAPPED: "0.5", SHIPPED: "tab:orange", BEST: "tab:red", OURS: "tab:blue"}


def plain_peers(**options: Any) -> list[Wrapping]:
    """All four.

    Args:
        options: For the wrappers; options that all of them know, such as ``bucket_cap_mb``.
    """
    return [
        unwrapped(),
        ddp(SHIPPED, **options),
        ddp(BEST, gradient_as_bucket_view=True, static_graph=True, batched_grad_copy=True, **options),
        bucketddp(OURS, **options),
    ]


def local(net: nn.Module) -> AbstractContextManager[Any]:
    """A context in which passes are local: ``no_sync``, where there is anything to synchronise."""
    return net.no_sync() if isinstance(net, DistributedDataParallel | BucketDDP) else nullcontext()


def bucket_count(net: nn.Module) -> int:
    """How many buckets a synchronised pass reduces, from the fifth on: until then they may change."""
    if isinstance(net, BucketDDP):
        return len(net.layout.buckets)
    if isinstance(net, DistributedDataParallel):
        return len(str(net._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(","))
    return 0
