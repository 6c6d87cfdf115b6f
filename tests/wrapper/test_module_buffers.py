"""First synchronisation, and module buffers."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm import broadcast as broadcast_file
from tests.models import ConvBatchNorm, batch
from tests.pool import on_ranks
from tests.reference import backward, largest_difference_between_ranks


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


@on_ranks(3)
def test_everything_starts_as_rank_0_has_it() -> None:
    module = ManyKinds()
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(tensor + dist.get_rank() if tensor.dtype is not torch.bool else tensor ^ bool(dist.get_rank()))
    assert largest_difference_between_ranks(module) > 0
    strides = module.transposed.stride()
    broadcast_file._CHUNK_BYTES, before = 100, broadcast_file._CHUNK_BYTES  # several chunks
    BucketDDP(module).close()
    broadcast_file._CHUNK_BYTES = before
    assert module.transposed.stride() == strides
    assert (module.scalar.item(), module.flags.tolist(), module.ids.tolist()) == (1, [True, False], [0, 1, 2])
    assert largest_difference_between_ranks(module) == 0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = float(self.scale)
        self.scale = self.scale + 1
        return self.layer(x) * self.scale  # saves the buffer for backward


@on_ranks(2, cases={"torch": [None, 0.0], "broadcast": ["broadcast", 0.0], "off": ["off", 10.0], "mean": ["mean", 5.0]})
def test_forward_synchronises_module_buffers_as_torch_does(mode: str | None, synchronised: float) -> None:
    """Forwards of many kinds see a module buffer that is 10 times the rank. Without a mode: in torch DDP."""
    rank, seen = dist.get_rank(), []
    module = Scaled()
    wrapper = BucketDDP(module, module_buffers=mode) if mode else nn.parallel.DistributedDataParallel(module)

    def look(times: int = 2, backward: bool = True) -> None:
        for _ in range(times):
            module.scale = torch.tensor(10.0 * rank)
            output = wrapper(batch(0, rank)[0])
            if backward:
                output.sum().backward()
            seen.append(module.seen)

    look()
    look(backward=False)  # nothing reduced in between
    wrapper.eval()  # Lightning leaves a wrapper like this behind validation
    look(1)
    wrapper.train()
    with wrapper.no_sync():
        look()
    look()
    own = 10.0
    assert rank == 0 or seen == [*[synchronised] * 6, own, own, synchronised]


@on_ranks(2)
def test_module_buffers_may_be_replaced_and_used_by_a_graph() -> None:
    ours = BucketDDP(ConvBatchNorm())
    norm, inputs = ours.module.norm, batch(0, dist.get_rank())[0]
    backward(ours)
    kept = ours.module.eval()(inputs).sum()  # saves its statistics for backward
    own = norm.running_mean.clone()
    if dist.get_rank() == 1:  # a rank may evaluate alone
        with torch.no_grad():
            ours.eval()(inputs)
        assert torch.equal(norm.running_mean, own)
    ours.train()(inputs)  # broadcasts
    kept.backward()  # and autograd has not seen it
    norm.running_mean = torch.full((6,), float(dist.get_rank()))  # replaced, not written to
    ours.synchronise_module_buffers()
    assert norm.running_mean.eq(0).all()
