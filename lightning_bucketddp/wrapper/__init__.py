"""``BucketDDP``: validation, module buffers, SyncBatchNorm, compiled modules, join, Megatron's calls."""

from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP

__all__ = ["BucketDDP"]
