"""``Trainer(sync_batchnorm=True)`` with :class:`BucketDDPStrategy`."""

from datetime import timedelta

from lightning.pytorch.plugins import LayerSync
from torch.nn import Module
from typing_extensions import override

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.wrapper.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm


class BatchNormSync(LayerSync):
    """Synchronises BatchNorm layers during ``fit``, on every backend, in a process group of their own.

    Args:
        timeout: How long collectives and agreements wait; torch's default if None.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout

    @override
    def apply(self, model: Module) -> Module:
        collectives = Collectives(None)
        ranks = Ranks(collectives, Peers(collectives, self._timeout))
        ranks.objects(None, "a process group for BatchNorm")  # torch makes one without hearing that a rank has failed
        return convert_sync_batchnorm(model, timeout=self._timeout)

    @override
    def revert(self, model: Module) -> Module:
        return revert_sync_batchnorm(model)
