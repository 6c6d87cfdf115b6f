"""A module that is wrapped again, and what a wrapper leaves behind."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer as optimizer_file

from lightning_bucketddp import BucketDDP
from tests.models import Mlp, batch, build, loss_of
from tests.reference import assert_grads, largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]


def step(model: nn.Module, number: int = 0) -> None:
    inputs, target = batch(number, dist.get_rank())
    loss_of(model(inputs), target).backward()


def wrap_again() -> float:
    module = Mlp()
    cells = []
    for number in range(3):  # as a notebook cell that is run again
        wrapper = BucketDDP(module)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        optimizer.zero_grad()
        step(wrapper, number)
        optimizer.step()
        assert wrapper.passes == 1
        cells.append(wrapper)
    old, inputs = cells[0], batch(0, dist.get_rank())[0]
    assert list(old.state_dict()) == list(module.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(old.eval()(inputs), module.eval()(inputs))
    module.train()
    later = "found an earlier one: gradients are averaged by the later one"
    with pytest.raises(RuntimeError, match=later):
        old(inputs)
    with pytest.raises(RuntimeError, match=later):
        with old.no_sync():
            pass
    with pytest.raises(RuntimeError, match="after close"):
        with old.backward_pass(torch.zeros((), requires_grad=True)):
            pass
    assert all(len(param._post_accumulate_grad_hooks) == 1 for param in module.parameters())
    wrapper.zero_grad()
    step(wrapper, 3)
    difference = largest_difference_between_ranks(module)
    wrapper.close()
    return difference


def test_the_wrapper_made_last_takes_over(run_ranks: RunRanks) -> None:
    assert run_ranks(2, wrap_again) == [0.0, 0.0]


def wrap_parts() -> None:
    """Wrappers around other parameters, or ones that are frozen there, stay as they are."""
    module = Mlp()
    module.head.requires_grad_(False)
    body = BucketDDP(module)
    module.head.requires_grad_(True)
    head = BucketDDP(module.head)
    module.head.requires_grad_(False)
    step(body)
    assert body.passes == 1
    head.close()
    body.close()


def test_a_wrapper_of_other_parameters_stays(run_ranks: RunRanks) -> None:
    run_ranks(2, wrap_parts)


def wrap_a_wrapper() -> None:
    module, plain = Mlp(), Mlp()
    plain.load_state_dict(module.state_dict())
    inner = BucketDDP(module)
    outer = BucketDDP(inner)
    for number, model in enumerate((outer, inner, outer)):
        plain.zero_grad()
        outer.zero_grad()
        step(plain, number)
        step(model, number)
        assert_grads(module, mean_over_ranks(plain))
    assert (inner.passes, outer.passes) == (0, 3)
    outer.close()


def test_a_wrapper_inside_another_one_only_forwards(run_ranks: RunRanks) -> None:
    run_ranks(2, wrap_a_wrapper)


def wrap_with_live_optimizer(options: dict[str, Any]) -> None:
    module = Mlp().to(torch.bfloat16) if "grad_dtype" in options else Mlp()
    dtype = next(module.parameters()).dtype
    inputs = batch(0, dist.get_rank())[0].to(dtype)
    wrapper = BucketDDP(module, **options)
    optimizer = torch.optim.AdamW(module.parameters())
    wrapper(inputs).square().sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"AdamW with shards or fp32 masters of its parameters; close\(\) that"):
        BucketDDP(module, **options)
    wrapper.zero_grad()
    wrapper(inputs).square().sum().backward()  # goes on as before
    optimizer.step()
    wrapper.close()
    BucketDDP(module).close()


@pytest.mark.parametrize("options", [{"shard_optimizer": True}, {"grad_dtype": torch.float32}], ids=str)
def test_shards_and_masters_ask_for_close_first(run_ranks: RunRanks, options: dict[str, Any]) -> None:
    run_ranks(2, wrap_with_live_optimizer, options)


def drop(options: dict[str, Any]) -> None:
    module = Mlp().to(torch.bfloat16) if "grad_dtype" in options else Mlp()
    dtype = next(module.parameters()).dtype
    before = dict(module.__dict__)
    global_hooks = len(optimizer_file._global_optimizer_pre_hooks)
    wrapper = BucketDDP(module, **options)
    output = wrapper(batch(0, dist.get_rank())[0].to(dtype))
    output.square().sum().backward()
    del wrapper, output
    gc.collect()
    assert len(optimizer_file._global_optimizer_pre_hooks) == global_hooks
    assert module.__dict__.keys() == before.keys()
    for param in module.parameters():
        assert not param._post_accumulate_grad_hooks
        assert param.grad_dtype in (None, dtype)
        assert not hasattr(param, "main_grad")
        assert param.grad.untyped_storage().nbytes() == param.grad.nbytes, "a plain tensor, not a view"
    module(batch(0, 0)[0].to(dtype)).sum().backward()


@pytest.mark.parametrize("options", [{}, {"grad_dtype": torch.float32}, {"module_buffers": "mean"}], ids=str)
def test_a_dropped_wrapper_leaves_nothing_behind(run_ranks: RunRanks, options: dict[str, Any]) -> None:
    run_ranks(2, drop, options)


def failing_to_wrap() -> None:
    """A wrapper whose options are refused leaves the one before it alone."""
    module = build("mlp")
    wrapper = BucketDDP(module)
    with pytest.raises(ValueError, match="pad_buckets_to"):
        BucketDDP(module, pad_buckets_to=0)
    step(wrapper)
    grads = {name: param.grad.clone() for name, param in module.named_parameters()}
    wrapper.close()
    module.zero_grad()
    step(module)
    expected = mean_over_ranks(module)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name])


def test_a_refused_wrapper_takes_nothing_over(run_ranks: RunRanks) -> None:
    run_ranks(2, failing_to_wrap)
