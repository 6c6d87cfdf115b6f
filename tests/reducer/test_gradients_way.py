"""A gradient's way to the wire: how many frames it takes, and how a feature takes part in it."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_bucketddp
from lightning_bucketddp import BucketDDP
from lightning_bucketddp.grads.bucket import Bucket, Buckets
from lightning_bucketddp.reducer.participant import Participant, Settled
from tests.inside import reducer_of
from tests.models import Mlp, batch
from tests.reference import mean_over_ranks

RunRanks = Callable[..., list[Any]]

PACKAGE = str(Path(lightning_bucketddp.__file__).parent)
SENT_BY = ["all_reduce", "all_to_all_single"]


def package_frames() -> list[str]:
    """The frames of the package on the stack, from the wire to autograd's hook; empty if there is no hook below."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        if code.co_filename.startswith(PACKAGE):
            names.append(f"{Path(code.co_filename).stem}.{code.co_name}")
            if names[-1] == "hooks.on_gradient":
                return names
    return []


def frames_to_the_wire(options: dict[str, Any]) -> list[list[str]]:
    ours = BucketDDP(Mlp(), bucket_cap_mb=0.001, **options)
    found: list[list[str]] = []
    kept = {name: getattr(dist, name) for name in SENT_BY}

    def noting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(package_frames())
            return kept[name](*args, **kwargs)

        return call

    try:
        for name in SENT_BY:
            setattr(dist, name, noting(name))
        for step in range(3):
            inputs, target = batch(step, dist.get_rank())
            nn.functional.mse_loss(ours(inputs), target).backward()
            ours.zero_grad()
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
    ours.close()
    return [names for names in found if names]


@pytest.mark.parametrize(
    ("options", "limit"),
    [({}, 5), ({"wire_dtype": torch.bfloat16}, 6), ({"shard_optimizer": True}, 6), ({"comm_hook": "fp16"}, 5)],
    ids=["dense", "wire_dtype", "sharded", "comm_hook"],
)
def test_few_frames_lie_between_autograd_and_the_wire(run_ranks: RunRanks, options: dict[str, Any], limit: int) -> None:
    for found in run_ranks(2, frames_to_the_wire, options):
        assert found, "no bucket was launched early"
        assert all(len(names) <= limit for names in found), max(found, key=len)


class BucketNorms(Participant):
    """Writes down the norm of each bucket's mean gradient."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.norms: list[float] = []

    def before_launch(self, bucket: Bucket) -> None:
        self.launched.append(bucket.index)

    def settle(self, settled: Settled) -> None:
        self.norms = [bucket.flat.norm().item() for bucket in settled.buckets.active]


def norms_of_buckets() -> None:
    ours = BucketDDP(Mlp(), bucket_cap_mb=0.001)
    plain = copy.deepcopy(ours.module)
    norms = BucketNorms()
    reducer_of(ours).participants.append(norms)
    for step in range(2):
        norms.launched.clear()
        inputs, target = batch(step, dist.get_rank())
        for model in (ours, plain):
            model.zero_grad()
            nn.functional.mse_loss(model(inputs), target).backward()
        means = mean_over_ranks(plain)
        buckets: Buckets = reducer_of(ours).buckets
        assert norms.launched == [bucket.index for bucket in buckets.all]
        assert len(norms.launched) > 1
        names = [[reducer_of(ours).table.specs[slot].name for slot in bucket.slots] for bucket in buckets.all]
        expected = [float(nn.utils.get_total_norm([means[name] for name in of_one])) for of_one in names]
        torch.testing.assert_close(Tensor(norms.norms), Tensor(expected))
    ours.close()


def test_a_participant_is_one_class_and_one_line(run_ranks: RunRanks) -> None:
    run_ranks(2, norms_of_buckets)
