"""Data-parallel training for PyTorch Lightning on contiguous gradient buffers.

Importing the package registers ``Trainer(strategy="bucketddp")`` and its variants.
"""

from lightning_bucketddp.agreement import PeerFailureError, RankMismatchError, WrapError
from lightning_bucketddp.dp_strategy import BucketDPStrategy
from lightning_bucketddp.dp_strategy import register as _register_dp
from lightning_bucketddp.fabric import BucketDDPFabricStrategy
from lightning_bucketddp.fabric import register as _register_with_fabric
from lightning_bucketddp.gradient_checks import GradientError
from lightning_bucketddp.sharded_params import declare_element_wise
from lightning_bucketddp.strategy import BucketDDPStrategy, register
from lightning_bucketddp.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm
from lightning_bucketddp.wrapper import BucketDDP

__version__ = "0.1.0"

__all__ = [
    "BucketDDP",
    "BucketDDPFabricStrategy",
    "BucketDDPStrategy",
    "BucketDPStrategy",
    "GradientError",
    "PeerFailureError",
    "RankMismatchError",
    "WrapError",
    "__version__",
    "convert_sync_batchnorm",
    "declare_element_wise",
    "revert_sync_batchnorm",
]

register()
_register_dp()
_register_with_fabric()
