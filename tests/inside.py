"""The only place where tests look inside of a ``BucketDDP``."""

from torch import Tensor

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.reducer.passes import Passes
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.wrapped import Wrapped


def passes_of(net: BucketDDP) -> Passes:
    return net._passes


def wrapped_of(net: BucketDDP) -> Wrapped:
    return net._passes.wrapped


def reducer_of(net: BucketDDP) -> Reducer:
    return net._passes.reducer


def views_of(net: BucketDDP) -> dict[str, Tensor]:
    reducer = reducer_of(net)
    return {spec.name: view for spec, view in zip(reducer.table.specs, reducer.storage.views, strict=False)}
