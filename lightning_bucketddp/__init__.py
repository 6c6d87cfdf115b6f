"""Data-parallel training for PyTorch Lightning on contiguous gradient buffers.

Importing the package registers ``Trainer(strategy="bucketddp")`` and its variants.
"""

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lightning_bucketddp.grads.checks import GradientError
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.optim.element_wise import declare_element_wise
from lightning_bucketddp.peers.agreement import PeerFailureError, RankMismatchError, WrapError
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

_LIGHTNING = [name for name in ("lightning", "pytorch_lightning") if (spec := find_spec(name)) and spec.origin]
"""Lightning's packages that are installed. A folder of that name has no origin."""

if TYPE_CHECKING or _LIGHTNING[:1] == ["lightning"]:
    from lightning_bucketddp.trainer.public import (
        BucketDDPFabricStrategy,
        BucketDDPStrategy,
        BucketDPStrategy,
        CommunicationMonitor,
        PreemptionCheckpoint,
    )
elif _LIGHTNING == ["pytorch_lightning"]:
    from lightning_bucketddp.pytorch_lightning import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        raise ImportError(
            f"expected Lightning, as {name} is for its Trainer or Fabric; found neither `lightning` nor "
            "`pytorch_lightning`. Install one: pip install lightning"
        )


if len(_LIGHTNING) == 2:
    try:
        import_module("lightning_bucketddp.pytorch_lightning")
    except ImportError as error:  # an old one, beside the `lightning` that is used
        warnings.warn(f"`pytorch_lightning` does not know bucketddp, only `lightning` does: {error}", stacklevel=2)
