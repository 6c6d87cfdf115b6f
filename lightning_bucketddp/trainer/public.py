"""What users of Lightning import."""

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
