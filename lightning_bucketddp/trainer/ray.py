"""The strategy for Ray Train, whose ``prepare_trainer`` accepts subclasses of its own strategies only."""

from ray.train.lightning import RayDDPStrategy

from lightning_bucketddp.trainer.strategy import BucketDDPStrategy


class RayBucketDDPStrategy(BucketDDPStrategy, RayDDPStrategy):
    """:class:`BucketDDPStrategy` on the workers that Ray Train has started. Needs the extra ``ray``.

    Use it with ``RayLightningEnvironment`` and ``prepare_trainer``, in place of ``RayDDPStrategy``. It takes the
    arguments of :class:`BucketDDPStrategy`. Ray makes the process group: backend and timeout of collectives are those
    of its ``TorchConfig``. ``examples/ray_train.py`` shows a run that survives a killed worker.
    """
