"""What users of Lightning import."""

import warnings

import lightning.pytorch as pl
from packaging.version import Version  # Lightning requires it

from lightning_bucketddp.trainer.batch_size_finder import BatchSizeFinder
from lightning_bucketddp.trainer.dp.strategy import BucketDPStrategy
from lightning_bucketddp.trainer.fabric import BucketDDPFabricStrategy
from lightning_bucketddp.trainer.monitor import CommunicationMonitor
from lightning_bucketddp.trainer.preemption import PreemptionCheckpoint
from lightning_bucketddp.trainer.strategy import BucketDDPStrategy

__all__ = [
    "BatchSizeFinder",
    "BucketDDPFabricStrategy",
    "BucketDDPStrategy",
    "BucketDPStrategy",
    "CommunicationMonitor",
    "PreemptionCheckpoint",
]

_installed = pl.__version__  # type: ignore[attr-defined]  # documented, not in __all__
if Version(_installed) < Version("2.6.dev0"):
    warnings.warn(
        f"expected {pl.__name__} 2.6 or newer, found {_installed}: no run can be resumed with it, and the tests of "
        "lightning_bucketddp fail. Install a newer one",
        stacklevel=1,
    )
