"""The strategy for Ray Train, whose ``prepare_trainer`` accepts subclasses of its own strategies only."""

from lightning.pytorch.strategies import DDPStrategy
from ray.train.lightning import RayDDPStrategy

from lightning_bucketddp.trainer.strategy import BucketDDPStrategy

if not issubclass(RayDDPStrategy, DDPStrategy):
    raise ImportError(
        f"expected Ray Train to use {DDPStrategy.__module__.rpartition('.strategies')[0]}, found that it uses "
        f"{RayDDPStrategy.__mro__[1].__module__}. It prefers `lightning` where both are installed; "
        "the folder `trainer` of lightning_bucketddp has this for it, in `ray`"
    )


class RayBucketDDPStrategy(BucketDDPStrategy, RayDDPStrategy):
    """:class:`BucketDDPStrategy` on the workers that Ray Train has started. Needs the extra ``ray``.

    Use it with ``RayLightningEnvironment`` and ``prepare_trainer``, in place of ``RayDDPStrategy``. It takes the
    arguments of :class:`BucketDDPStrategy`. Ray makes the process group: backend and timeout of collectives are those
    of its ``TorchConfig``. ``examples/ray_train.py`` shows a run that survives a killed worker.
    """
