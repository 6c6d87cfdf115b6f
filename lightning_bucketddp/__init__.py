"""Data-parallel training for PyTorch Lightning on contiguous gradient buffers.

Importing the package registers ``Trainer(strategy="bucketddp")`` and its variants.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lightning_bucketddp.grads.checks import GradientError
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.registry import FOLDERS, register_everywhere
from lightning_bucketddp.optim.element_wise import declare_element_wise, declare_whole_parameter
from lightning_bucketddp.peers.agreement import PeerFailureError, RankMismatchError, WrapError
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP
from lightning_bucketddp.wrapper.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm

__version__ = "0.3.0.dev0"

__all__ = [
    "BatchSizeFinder",
    "BucketDDP",
    "BucketDDPFabricStrategy",
    "BucketDDPStrategy",
    "BucketDPStrategy",
    "CommunicationMonitor",
    "GradientError",
    "Options",
    "PeerFailureError",
    "PreemptionCheckpoint",
    "RankMismatchError",
    "WrapError",
    "__version__",
    "convert_sync_batchnorm",
    "declare_element_wise",
    "declare_whole_parameter",
    "revert_sync_batchnorm",
]

if TYPE_CHECKING:
    from lightning_bucketddp.trainer.public import (
        BatchSizeFinder,
        BucketDDPFabricStrategy,
        BucketDDPStrategy,
        BucketDPStrategy,
        CommunicationMonitor,
        PreemptionCheckpoint,
    )


def __getattr__(name: str) -> object:
    """Import what is for Lightning when it is first used: for ``lightning``, or else for ``pytorch_lightning``."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package, folder in FOLDERS.items():
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:  # a folder of that name has no origin
            return getattr(import_module(f"{folder}.public"), name)
    raise ImportError(
        f"expected Lightning, as {name} is for its Trainer or Fabric; found neither `lightning` nor "
        "`pytorch_lightning`. Install one: pip install lightning"
    )


register_everywhere()
