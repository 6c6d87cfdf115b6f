"""First synchronisation, and module buffers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp import module_state as module_state_file
from tests.models import ConvBatchNorm, batch
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]


class ManyKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = ConvBatchNorm()
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.transposed = nn.Parameter(torch.ones(4, 3).t())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("ids", torch.arange(3))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)


def first_synchronisation(init_sync: bool) -> float:
    module = ManyKinds()
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(tensor + dist.get_rank() if tensor.dtype is not torch.bool else tensor ^ bool(dist.get_rank()))
    strides = module.transposed.stride()
    module_state_file._CHUNK_BYTES, before = 100, module_state_file._CHUNK_BYTES  # several chunks
    ours = BucketDDP(module, init_sync=init_sync)
    module_state_file._CHUNK_BYTES = before
    assert module.transposed.stride() == strides
    difference = largest_difference_between_ranks(module)
    if init_sync:
        assert module.scalar.item() == 1
        assert module.flags.tolist() == [True, False]
        assert module.ids.tolist() == [0, 1, 2]
    ours.close()
    return difference


def test_everything_starts_as_rank_0_has_it(run_ranks: RunRanks) -> None:
    assert run_ranks(3, first_synchronisation, True) == [0.0, 0.0, 0.0]
    assert min(run_ranks(3, first_synchronisation, False)) > 0


def after_one_step(mode: str) -> dict[str, Any]:
    module = ConvBatchNorm()
    ours = BucketDDP(module, module_buffers=mode)
    rank = dist.get_rank()
    inputs, _ = batch(0, rank)
    ours(inputs + 3 * rank).square().mean().backward()
    own = module.norm.running_mean.clone()
    gathered = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    module.norm.num_batches_tracked += rank
    seen = {}

    def look(_: nn.Module, __: Any) -> None:
        seen["in forward"] = module.norm.running_mean.clone()
        seen["count"] = int(module.norm.num_batches_tracked)

    handle = module.register_forward_pre_hook(look)
    with torch.no_grad():
        ours.eval()(inputs)
        evaluated = seen["in forward"]
        ours.train()(inputs)
        not_recorded = seen["in forward"]
        module.norm.running_mean.copy_(own)
    ours.eval()(inputs)
    in_eval = seen["in forward"]
    ours.train()(inputs)
    handle.remove()
    ours.close()
    return {"all": gathered, "own": own, "quiet": [evaluated, not_recorded, in_eval], **seen}


@pytest.mark.parametrize("mode", ["broadcast", "mean", "off"])
def test_module_buffers_in_the_first_training_forward_after_a_pass(run_ranks: RunRanks, mode: str) -> None:
    for rank, result in enumerate(run_ranks(3, after_one_step, mode)):
        everyone = torch.stack(result["all"])
        assert not torch.equal(everyone[0], everyone[1])
        for quiet in result["quiet"]:
            torch.testing.assert_close(quiet, result["own"], rtol=0, atol=0)
        if mode == "broadcast":
            assert torch.equal(result["in forward"], everyone[0])
        elif mode == "mean":
            torch.testing.assert_close(result["in forward"], everyone.mean(0))
        else:
            assert torch.equal(result["in forward"], everyone[rank])
        if mode != "off":
            assert result["count"] == 2, "rank 0's: one recorded and one unrecorded training forward"


def version_counters() -> None:
    """A graph that saved a module buffer stays valid when the buffer is synchronised before backward."""

    class UsesBuffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale  # saves the buffer for backward

    ours = BucketDDP(UsesBuffer())
    inputs, _ = batch(0, dist.get_rank())
    ours(inputs).sum().backward()
    version = ours.module.scale._version
    kept = ours.module(inputs).sum()
    ours(inputs).sum()  # broadcasts
    assert ours.module.scale._version == version
    kept.backward()
    ours.close()


def test_synchronisation_is_invisible_to_version_counters(run_ranks: RunRanks) -> None:
    run_ranks(2, version_counters)


def replaced_buffer() -> float:
    module = ConvBatchNorm()
    ours = BucketDDP(module)
    inputs, _ = batch(0, dist.get_rank())
    ours(inputs).sum().backward()
    module.norm.running_mean = torch.full((6,), float(dist.get_rank()))
    ours.synchronise_module_buffers()
    value = float(module.norm.running_mean.sum())
    ours.close()
    return value


def test_a_buffer_that_was_replaced_is_synchronised(run_ranks: RunRanks) -> None:
    assert run_ranks(2, replaced_buffer) == [0.0, 0.0]


def one_collective_per_dtype() -> int:
    ours = BucketDDP(ConvBatchNorm())
    inputs, _ = batch(0, dist.get_rank())
    ours(inputs).sum().backward()
    calls = []
    start = ours._collectives.broadcast
    ours._collectives.broadcast = lambda tensor, *args: (calls.append(tensor.dtype), start(tensor, *args))[1]
    ours(inputs)
    ours(inputs)
    ours.close()
    assert set(calls) == {torch.float32, torch.int64}
    return len(calls)


def test_one_collective_per_dtype_and_once_per_pass(run_ranks: RunRanks) -> None:
    assert run_ranks(2, one_collective_per_dtype) == [2, 2]
