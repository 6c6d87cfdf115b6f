"""Programs with streams of their own, on two ranks; with torch's DDP in the wrapper's place they are clean as well."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm.lane import Streams
from tests.accelerator import DEVICE, on_stream, simulated
from tests.inside import reducer_of
from tests.models import Mlp, batch, loss_of
from tests.pool import on_ranks
from tests.sampling import some_slow
from tests.simulated.training import CPU, SMALL, Case, TwoStreams, Unused, compare

BF16 = torch.bfloat16


class Averages:
    """Moving averages of the parameters, worked out on a stream of their own after each step."""

    def __init__(self) -> None:
        self.stream = torch.Stream(DEVICE)
        self.of: dict[nn.Module, list[Tensor]] = {}

    def after_backward(self, wrapper: Any, module: nn.Module, device: torch.device) -> None:
        if device != CPU:  # it has read the parameters that are about to change
            torch.accelerator.current_stream().wait_stream(self.stream)

    def after_step(self, wrapper: Any, module: nn.Module, device: torch.device) -> None:
        if device != CPU:
            self.stream.wait_stream(torch.accelerator.current_stream())
        with torch.no_grad(), on_stream(None if device == CPU else self.stream):
            params = [param.detach() for param in module.parameters()]
            if module in self.of:
                torch._foreach_lerp_(self.of[module], params, 0.1)
            else:
                self.of[module] = [param.clone() for param in params]


def averaging(options: dict[str, Any], with_ddp: bool = False) -> None:
    averages = Averages()
    hooks = {"after_backward": averages.after_backward, "after_step": averages.after_step}
    compare(Case(options, with_ddp=with_ddp, **hooks))
    expected, found = averages.of.values()
    torch.accelerator.synchronize()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other.cpu())


@on_ranks(2, cases={"ddp": [{}, True], "plain": [{}, False]})
def test_a_second_stream_reads_parameters_after_the_step(options: dict[str, Any], with_ddp: bool) -> None:
    averaging(options, with_ddp)


@on_ranks(2)
def test_a_second_stream_reads_lazily_gathered_parameters() -> None:
    averaging({"shard_optimizer": True})


TWO: dict[str, Case] = {
    "ddp": Case(with_ddp=True),
    "plain": Case(),
    "one bucket": Case({"bucket_cap_mb": 25}),
    "bf16 hook": Case({"comm_hook": "bf16"}),
    "begins later": Case(),
}


@pytest.mark.parametrize("name", some_slow(TWO, {"plain", "begins later"}))
@on_ranks(2)
def test_gradients_of_two_streams_are_reduced(name: str) -> None:
    case = replace(TWO[name], model=lambda: TwoStreams(begins=4 if "later" in name else 0))
    compare(case)


IN_STAGES: dict[str, Case] = {
    "wire": Case({"wire_dtype": BF16}),
    "8 bits": Case({"wire_dtype": torch.int8}),
    "sharded wire": Case({"wire_dtype": BF16, "shard_optimizer": True}),
    "sharded": Case({"shard_optimizer": True}),
    "sharded, one bucket": Case({"shard_optimizer": True, "bucket_cap_mb": 25}),
}


@pytest.mark.parametrize("name", some_slow(IN_STAGES, {"sharded wire", "sharded, one bucket"}))
@on_ranks(2)
def test_gradients_of_two_streams_are_reduced_in_stages(name: str) -> None:
    compare(replace(IN_STAGES[name], model=TwoStreams))


class InTurns(Unused):
    """On all ranks one branch is used in one step, and the other one in the next."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.tanh(self.stem(x))
        return x[:, :4] + (self.left if self.calls % 2 else self.right)(x)


APART: dict[str, Case] = {
    "ddp": Case(with_ddp=True, apart=True),
    "plain": Case(apart=True),
    "sharded, gradients set to zero": Case({"shard_optimizer": True}, apart=True, set_to_none=False),
    "scatter every pass": Case({"shard_optimizer": True, "scatter_every_pass": True}, apart=True),
    "unused gradients": Case(model=InTurns, local_passes=0, apart=True, set_to_none=False),
}


@pytest.mark.parametrize("name", some_slow(APART, {"sharded, gradients set to zero", "unused gradients"}))
@on_ranks(2)
def test_forward_backward_and_step_have_a_stream_each(name: str) -> None:
    """Memory is made on forward's stream, at the root, and freed where backward was called."""
    compare(APART[name], allowed_waits=["synchronize an event"] if "unused" in name else ())


@on_ranks(2)
def test_the_side_stream_keeps_no_bucket() -> None:
    """A bucket that is freed can be used again at once."""
    model = BucketDDP(Mlp().to(DEVICE), bucket_cap_mb=SMALL, shard_optimizer=True)
    kept, record_stream = list[int](), Tensor.record_stream

    def note(tensor: Tensor, stream: torch.Stream) -> None:
        kept.append(tensor.untyped_storage().data_ptr())
        record_stream(tensor, stream)

    for step in range(3):
        x, target = (tensor.to(DEVICE) for tensor in batch(step, dist.get_rank()))
        loss = loss_of(model(x), target)
        with patch.object(Tensor, "record_stream", note):
            loss.backward()
    assert kept
    assert not {bucket.flat.untyped_storage().data_ptr() for bucket in reducer_of(model).buckets.all} & set(kept)


@on_ranks(1)
def test_another_devices_thread_notes_a_stream_while_this_one_waits() -> None:
    streams, made = Streams(), [torch.Stream(DEVICE) for _ in range(3)]
    streams.seen.update(made[:2])

    def current(device: torch.device) -> torch.Stream:
        streams.seen.add(made[2])
        return made[0]

    with patch("torch.accelerator.current_stream", current):
        streams.wait_for([])
    assert len(streams.seen) == 3


class UsedLater(TwoStreams):
    """As the base, with a layer that is first used when the stream begins, on that stream."""

    def __init__(self) -> None:
        super().__init__(begins=4)

    def forward(self, x: Tensor) -> Tensor:
        if self.calls < self.begins:
            self.calls += 1
            return self.head(torch.tanh(self.main(x)))
        return super().forward(x)


@on_ranks(2)
def test_a_parameter_is_first_used_in_a_later_pass_on_a_stream_that_is_new() -> None:
    compare(Case({"find_unused_parameters": True}, model=UsedLater), allowed_waits=["synchronize an event"])


def powersgd(with_ddp: bool) -> int:
    """How many pairs of accesses are unordered with torch's hook, trained until its factors are reduced."""

    def use(wrapper: Any) -> None:
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    from tests.simulated.training import train

    simulated().clear()
    train(Case({"bucket_cap_mb": 25}, with_ddp=with_ddp, prepare=use, model=TwoStreams), DEVICE)
    torch.accelerator.synchronize()
    found = [text for text in simulated().unordered_accesses() if "powerSGD_hook.py" in text]
    simulated().clear()
    return len(found)


@on_ranks(2)
def test_powersgd_of_torch_frees_memory_too_early_with_torchs_ddp_as_well() -> None:
    assert powersgd(with_ddp=True) > 0


@on_ranks(2)
def test_backward_ends_on_another_device_than_that_of_the_parameters() -> None:
    """There the inputs are. So autograd's thread of that device ends the pass."""
    rank = dist.get_rank()
    device, other = torch.device("sim", rank), torch.device("sim", 1 - rank)
    model = BucketDDP(Mlp().to(device), bucket_cap_mb=SMALL)
    for step in range(8):
        x, target = batch(step, rank)
        loss_of(model(x.to(other).requires_grad_().to(device)), target.to(device)).backward()
