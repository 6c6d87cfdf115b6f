"""First synchronisation, and module buffers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm import broadcast as broadcast_file
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
    broadcast_file._CHUNK_BYTES, before = 100, broadcast_file._CHUNK_BYTES  # several chunks
    ours = BucketDDP(module, init_sync=init_sync)
    broadcast_file._CHUNK_BYTES = before
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


class Scaled(nn.Module):
    """A linear layer times a module buffer, which every forward adds one to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = float(self.scale)
        self.scale = self.scale + 1
        return self.layer(x) * self.scale


def seen_by_forward(wrapper: nn.Module, mine: float, inputs: torch.Tensor, backward: bool = True) -> float:
    """What a forward sees of a module buffer that this rank has set."""
    wrapper.module.scale = torch.tensor(mine)
    output = wrapper(inputs)
    if backward:
        output.sum().backward()
    return wrapper.module.seen


def module_buffers_in_forwards(make: str, mode: str = "broadcast") -> list[float]:
    """What forwards of many kinds see of a module buffer that is 10 times the rank."""
    module = Scaled()
    wrapper = BucketDDP(module, module_buffers=mode) if make == "ours" else nn.parallel.DistributedDataParallel(module)
    rank, inputs = dist.get_rank(), batch(0, dist.get_rank())[0]
    mine = 10.0 * rank
    seen = [seen_by_forward(wrapper, mine, inputs), seen_by_forward(wrapper, mine, inputs)]
    seen += [seen_by_forward(wrapper, mine, inputs, backward=False) for _ in range(2)]  # nothing reduced in between
    wrapper.eval()  # as Lightning leaves a wrapper behind validation
    seen.append(seen_by_forward(wrapper, mine, inputs))
    wrapper.train()
    with wrapper.no_sync():
        seen += [seen_by_forward(wrapper, mine, inputs), seen_by_forward(wrapper, mine, inputs)]
    seen += [seen_by_forward(wrapper, mine, inputs), seen_by_forward(wrapper, mine, inputs)]
    if make == "ours":
        wrapper.close()
    return seen


def test_forward_synchronises_module_buffers_as_torch_does(run_ranks: RunRanks) -> None:
    synchronised, own = 0.0, 10.0
    expected = [*[synchronised] * 6, own, own, synchronised]
    assert run_ranks(2, module_buffers_in_forwards, "torch")[1] == expected
    assert run_ranks(2, module_buffers_in_forwards, "ours")[1] == expected
    assert run_ranks(2, module_buffers_in_forwards, "ours", "off")[1] == [own] * 9
    mean = 5.0
    assert run_ranks(2, module_buffers_in_forwards, "ours", "mean")[1] == [*[mean] * 6, own, own, mean]


def evaluates_alone() -> float:
    """Rank 1 evaluates between two steps, in training mode too, without any other rank."""
    module = ConvBatchNorm()
    ours = BucketDDP(module)
    inputs, _ = batch(0, dist.get_rank())
    ours(inputs + dist.get_rank()).sum().backward()
    own = module.norm.running_mean.clone()
    if dist.get_rank() == 1:
        with torch.no_grad():
            ours.eval()(inputs)
            ours.train()
    assert torch.equal(module.norm.running_mean, own)
    ours.eval()(inputs).sum().backward()  # eval mode: BatchNorm leaves its statistics alone
    difference = largest_difference_between_ranks(module)
    ours.close()
    return difference


def test_a_rank_may_evaluate_alone(run_ranks: RunRanks) -> None:
    assert run_ranks(2, evaluates_alone) == [0.0, 0.0]


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


def one_collective_per_dtype() -> list[str]:
    ours = BucketDDP(ConvBatchNorm())
    inputs, _ = batch(0, dist.get_rank())
    ours(inputs).sum().backward()
    calls = []
    collectives = ours._runtime.collectives
    start = collectives.broadcast
    collectives.broadcast = lambda tensor, *args: (calls.append(str(tensor.dtype)), start(tensor, *args))[1]
    ours(inputs)
    ours.close()
    return sorted(calls)


def test_one_collective_per_dtype_of_module_buffers(run_ranks: RunRanks) -> None:
    assert run_ranks(2, one_collective_per_dtype) == [["torch.float32", "torch.int64"]] * 2
