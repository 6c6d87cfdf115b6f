"""Two ranks that send through the simulated device's communicator train to the CPU's bits, whatever the options."""

import math
import threading
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm.host_copy import HostCopy
from lightning_bucketddp.wrapper.sync_batchnorm import convert_sync_batchnorm
from tests.accelerator import DEVICE, simulated, sleep
from tests.inside import reducer_of
from tests.models import Mlp, batch, loss_of
from tests.pool import on_ranks
from tests.reference import nodes_of_size
from tests.sampling import some_slow
from tests.simulated.training import SMALL, Case, Checkpointed, Pictures, TwoStreams, Unused, compare, waits_in

BF16 = torch.bfloat16


def clip(wrapper: Any, module: nn.Module, device: torch.device) -> None:
    assert not waits_in(partial(wrapper.clip_grad_norm_, 0.1), device), "clipping makes nobody wait"


def unfreeze(module: nn.Module, step: int) -> None:
    module.layers[0].requires_grad_(step >= 2)


def use_hook(wrapper: Any) -> None:
    wrapper.register_comm_hook(None, allreduce_hook)


CASES: dict[str, Case] = {
    "plain": Case(),
    "clipping": Case(after_backward=clip),
    "one bucket": Case({"bucket_cap_mb": 25}),
    "no overlap": Case({"overlap": False}),
    "wire": Case({"wire_dtype": BF16}),
    "8 bits": Case({"wire_dtype": torch.int8}),
    "sharded": Case({"shard_optimizer": True}),
    "sharded, clipping": Case({"shard_optimizer": True}, after_backward=clip),
    "sharded wire": Case({"shard_optimizer": True, "wire_dtype": BF16}),
    "scatter every pass": Case({"shard_optimizer": True, "scatter_every_pass": True}),
    "bf16 with fp32 gradients": Case({"grad_dtype": torch.float32}, dtype=BF16),
    "bf16 with fp32 gradients, sharded": Case({"grad_dtype": torch.float32, "shard_optimizer": True}, dtype=BF16),
    "bf16 hook": Case({"comm_hook": "bf16"}),
    "own hook": Case(prepare=use_hook),
    "coalesced": Case({"use_contiguous_buffers": False}),
    "module buffers": Case(model=Pictures),
    "mean of module buffers": Case({"module_buffers": "mean"}, model=Pictures),
    "checkpointing": Case(model=Checkpointed),
    "two streams": Case(model=TwoStreams),
    "two streams, one bucket": Case({"bucket_cap_mb": 25}, model=TwoStreams),
    "two streams, bf16 hook": Case({"comm_hook": "bf16"}, model=TwoStreams),
    "unfreezing": Case(before_step=unfreeze),
    "sharded, unfreezing": Case({"shard_optimizer": True}, before_step=unfreeze),
}


QUICK = {
    *("plain", "8 bits", "no overlap", "sharded, clipping", "scatter every pass", "bf16 with fp32 gradients, sharded"),
    *("coalesced", "mean of module buffers", "checkpointing", "two streams, bf16 hook", "sharded, unfreezing"),
}
"""Each option, model and moment occurs."""


@pytest.mark.parametrize("name", some_slow(CASES, QUICK))
@on_ranks(2)
def test_options_train_to_the_bits_of_the_cpu(name: str) -> None:
    compare(CASES[name], from_pass=6 if "unfreezing" in name else 4)


WITH_UNUSED: dict[str, Any] = {
    "plain": {},
    "looked for": {"find_unused_parameters": True},
    "sharded": {"shard_optimizer": True},
}


@on_ranks(2, cases=WITH_UNUSED, quick=["looked for", "sharded"])
def test_ranks_with_unused_parameters_wait_once_a_pass(options: dict[str, Any]) -> None:
    """A rank must know whether others have used the parameter: the control vector tells."""
    found = compare(Case(options, model=Unused), allowed_waits=["synchronize an event"])
    assert any(found.waits), "nobody had to wait"


@on_ranks(2)
def test_hooks_of_any_kind_have_several_buckets_under_way() -> None:
    model = BucketDDP(Mlp(depth=6).to(DEVICE), bucket_cap_mb=SMALL)
    model.register_comm_hook(None, lambda state, bucket: allreduce_hook(state, bucket))
    for step in range(3):
        x, target = (tensor.to(DEVICE) for tensor in batch(step, dist.get_rank()))
        loss_of(model(x), target).backward()
    record = model.last_pass()
    assert record is not None
    assert record.early_launches >= len(record.buckets) - 1 > 2


@on_ranks(1)
def test_another_thread_asks_for_a_copy_with_its_device_current() -> None:
    """Threads begin with device 0, where CUDA would make a context for them."""
    copy, found = HostCopy(torch.ones(3, device=torch.device(DEVICE.type, 1))), list[Any]()
    current = torch.accelerator.current_device_index
    copy._event = SimpleNamespace(query=current)  # type: ignore[assignment]
    thread = threading.Thread(target=lambda: found.extend([current(), copy.arrived(), current()]))
    thread.start()
    thread.join(20)
    assert found == [0, 1, 0]


@on_ranks(1)
def test_other_threads_do_not_ask_the_device_how_far_it_is() -> None:
    """That would end the capture of a CUDA graph."""
    model = BucketDDP(Mlp().to(DEVICE))
    x, target = (tensor.to(DEVICE) for tensor in batch(0, 0))
    loss_of(model(x), target).backward()
    sleep(1)
    loss_of(model(x), target).backward()
    control = reducer_of(model)._context.control
    for exchange in control._unread:
        exchange._copy._event = SimpleNamespace(query=pytest.fail, synchronize=lambda: None)  # type: ignore
    assert control._unread
    assert control._not_ended() > 0
    torch.accelerator.synchronize()
    assert control._not_ended() == 0
    control._unread.clear()


@on_ranks(2)
def test_looking_for_bad_gradients_waits_once_a_bucket() -> None:
    compare(Case({"max_abs_grad": 1e3, "bucket_cap_mb": 25}), allowed_waits=["copy to the host"])


def break_one(module: nn.Module, step: int) -> None:
    if step == 2 and dist.get_rank() == 1:
        hook = module.head.bias.register_hook(lambda grad: (hook.remove(), grad * math.nan)[1])


SKIPPING: dict[str, Any] = {"plain": {}, "sharded": {"shard_optimizer": True}, "wire": {"wire_dtype": BF16}}


@on_ranks(2, cases=SKIPPING, quick=["sharded"])
def test_skipping_steps_waits_twice_a_pass(options: dict[str, Any]) -> None:
    """For the control vector, and for what the ranks found in the gradients."""
    options = {"skip_step_on": ["nonfinite", "oom"], "skip_norm_above": 50.0, **options}
    compare(Case(options, TwoStreams), allowed_waits=["synchronize an event", "copy to the host"])
    with warnings.catch_warnings(action="ignore"):
        compare(Case(options, before_step=break_one), from_pass=10)


@on_ranks(2, cases=("tokens", "samples"), quick=["samples"])
def test_counting_makes_nobody_wait(what: str) -> None:
    compare(Case({"gradient_divide_by": what}))


@on_ranks(4, cases={"full precision": None, "bf16 wire": BF16}, quick=["bf16 wire"])
def test_shard_groups_train_to_the_bits_of_the_cpu(wire_dtype: torch.dtype | None) -> None:
    compare(Case({"shard_optimizer": True, "shard_group_size": 2, "wire_dtype": wire_dtype}))


TWO_LEVELS: dict[str, dict[str, Any]] = {
    "plain": {"hierarchical": True},
    "wire": {"wire_dtype": BF16},
    "sharded": {"hierarchical": True, "shard_optimizer": True},
    "sharded, wire": {"wire_dtype": BF16, "shard_optimizer": True},
}


@on_ranks(4, cases=TWO_LEVELS, quick=["sharded, wire"])
def test_two_levels_train_as_on_the_cpu(options: dict[str, Any]) -> None:
    with nodes_of_size(2):
        assert BucketDDP(Mlp().to(DEVICE))._passes.wrapped.context.levels is None, "not by default"
        compare(Case(options, tolerance=1e-6))  # communicators add up in another order than gloo


@pytest.mark.slow
@on_ranks(4, cases=TWO_LEVELS)
def test_two_levels_train_two_streams_in_low_precision_as_on_the_cpu(options: dict[str, Any]) -> None:
    with nodes_of_size(2):
        compare(Case(options, dtype=BF16, model=TwoStreams, tolerance=1e-2))


@on_ranks(4)
def test_all_of_two_levels_start_during_backward_in_groups_of_their_own() -> None:
    with nodes_of_size(2):
        model = BucketDDP(Mlp(depth=6).to(DEVICE), bucket_cap_mb=SMALL, hierarchical=True)
    during = groups_of_a_backward(model)
    assert len(set(during)) >= 3


@on_ranks(2)
def test_sync_batchnorm_normalises_over_all_ranks() -> None:
    """On the device torch's own layer does the work, in another order of operations; it waits three times."""
    norm = partial(nn.BatchNorm2d)
    compare(Case(model=lambda: convert_sync_batchnorm(Pictures(norm)), tolerance=1e-5), ["aten::nonzero"] * 3)


@on_ranks(4)
def test_second_stages_of_shard_groups_start_during_backward() -> None:
    model = BucketDDP(Mlp(depth=6).to(DEVICE), bucket_cap_mb=SMALL, shard_optimizer=True, shard_group_size=2)
    during = groups_of_a_backward(model)
    assert len(set(groups_started())) >= 2, "within a shard group, and across them"
    assert len(set(during)) >= 2


def groups_of_a_backward(model: BucketDDP) -> list[str]:
    """The groups of the collectives that start before backward ends, in the fourth pass: the first learns the order."""
    during: list[str] = []
    for step in range(4):
        x, target = (tensor.to(DEVICE) for tensor in batch(step, dist.get_rank()))
        during = []
        x.requires_grad_().register_hook(lambda grad, to=during: to.extend(groups_started()))
        simulated().clear()
        loss_of(model(x), target).backward()
    return during


def groups_started() -> list[str]:
    return [group for group, *_ in simulated().started_collectives()]
