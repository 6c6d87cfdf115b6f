"""Data-parallel training for PyTorch Lightning on contiguous gradient buffers.

Importing the package registers ``Trainer(strategy="bucketddp")`` and its variants.
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_bucketddp.grads.checks import GradientError
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.optim.element_wise import declare_element_wise
from lightning_bucketddp.peers.agreement import PeerFailureError, RankMismatchError, WrapError
from lightning_bucketddp.trainer.dp.strategy import BucketDPStrategy
from lightning_bucketddp.trainer.fabric import BucketDDPFabricStrategy
from lightning_bucketddp.trainer.monitor import CommunicationMonitor
from lightning_bucketddp.trainer.preemption import PreemptionCheckpoint
from lightning_bucketddp.trainer.strategy import BucketDDPStrategy
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP
from lightning_bucketddp.wrapper.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm

__version__ = "0.2.0"

__all__ = [
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
    "revert_sync_batchnorm",
]

BucketDDPStrategy.register_strategies(StrategyRegistry)
BucketDPStrategy.register_strategies(StrategyRegistry)
BucketDDPFabricStrategy.register_strategies(STRATEGY_REGISTRY)
