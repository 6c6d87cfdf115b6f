"""What users of Lightning import. Importing this file registers the strategies by name."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_bucketddp.trainer.dp.strategy import BucketDPStrategy
from lightning_bucketddp.trainer.fabric import BucketDDPFabricStrategy
from lightning_bucketddp.trainer.monitor import CommunicationMonitor
from lightning_bucketddp.trainer.preemption import PreemptionCheckpoint
from lightning_bucketddp.trainer.strategy import BucketDDPStrategy

__all__ = [
    "BucketDDPFabricStrategy",
    "BucketDDPStrategy",
    "BucketDPStrategy",
    "CommunicationMonitor",
    "PreemptionCheckpoint",
]

BucketDDPStrategy.register_strategies(StrategyRegistry)
BucketDPStrategy.register_strategies(StrategyRegistry)
BucketDDPFabricStrategy.register_strategies(STRATEGY_REGISTRY)
