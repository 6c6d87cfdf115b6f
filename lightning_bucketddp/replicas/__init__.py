"""Several devices in one process, as PyTorch's C++ ``data_parallel``: scatter, replicate, parallel_apply, gather."""

from lightning_bucketddp.replicas.replicas import Replicas, data_parallel, gather, parallel_apply, replicate, scatter

__all__ = ["Replicas", "data_parallel", "gather", "parallel_apply", "replicate", "scatter"]
