"""A gradient's way to the wire: how many frames it takes, and how a feature takes part in it."""

import copy
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_bucketddp
from lightning_bucketddp import BucketDDP
from lightning_bucketddp.grads.bucket import Bucket
from lightning_bucketddp.reducer.participant import Participant, Settled
from tests.inside import reducer_of
from tests.models import Mlp
from tests.pool import on_ranks
from tests.reference import both, inputs_of, mean_over_ranks

PACKAGE = str(Path(lightning_bucketddp.__file__).parent)
WAYS: list[tuple[dict[str, Any], int]] = [
    ({}, 5),
    ({"wire_dtype": torch.bfloat16}, 6),
    ({"shard_optimizer": True}, 6),
    ({"comm_hook": "fp16"}, 5),
]


def package_frames() -> list[str]:
    """The frames of the package on the stack, from the wire to autograd's hook; empty if there is no hook below."""
    codes = [frame.f_code for frame, _ in traceback.walk_stack(None) if frame.f_code.co_filename.startswith(PACKAGE)]
    names = [f"{Path(code.co_filename).stem}.{code.co_name}" for code in codes]
    return names[: names.index("hooks.on_gradient") + 1] if "hooks.on_gradient" in names else []


def noting(found: list[list[str]], original: Callable[..., Any]) -> Callable[..., Any]:
    def send(*args: Any, **options: Any) -> Any:
        found.append(package_frames())
        return original(*args, **options)

    return send


@on_ranks(2, cases=WAYS)
def test_few_frames_lie_between_autograd_and_the_wire(options: dict[str, Any], limit: int) -> None:
    ours = BucketDDP(Mlp(), bucket_cap_mb=0.001, **options)
    found: list[list[str]] = []
    with (
        patch.object(dist.ProcessGroup, "allreduce", noting(found, dist.ProcessGroup.allreduce)),
        patch.object(dist, "all_to_all_single", noting(found, dist.all_to_all_single)),
    ):
        for step in range(3):
            both([ours], inputs_of(step))
    assert any(found), "no bucket was launched early"
    assert max(map(len, found)) <= limit, max(found, key=len)


class BucketNorms(Participant):
    def __init__(self) -> None:
        self.launched: list[int] = []
        self.norms: list[float] = []

    def before_launch(self, bucket: Bucket) -> None:
        self.launched.append(bucket.index)

    def settle(self, settled: Settled) -> None:
        self.norms = [bucket.flat.norm().item() for bucket in settled.buckets.active]


@on_ranks(2)
def test_a_participant_is_one_class_and_one_line() -> None:
    ours = BucketDDP(Mlp(), bucket_cap_mb=0.001)
    plain = copy.deepcopy(ours.module)
    norms = BucketNorms()
    reducer_of(ours).participants.append(norms)
    for step in range(2):
        norms.launched.clear()
        both([ours, plain], inputs_of(step))
        means = mean_over_ranks(plain)
        buckets = reducer_of(ours).buckets.all
        assert norms.launched == [bucket.index for bucket in buckets]
        assert len(buckets) > 1
        names = [[reducer_of(ours).table.specs[slot].name for slot in bucket.slots] for bucket in buckets]
        expected = [float(nn.utils.get_total_norm([means[name] for name in of_one])) for of_one in names]
        torch.testing.assert_close(Tensor(norms.norms), Tensor(expected))
