"""A module that is wrapped again, and traces that a wrapper leaves behind."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import optimizer as optimizer_file

from lightning_bucketddp import BucketDDP
from tests.models import Mlp, batch
from tests.reference import assert_grads, grads, largest_difference_between_ranks, mean_over_ranks
from tests.wrapper.cases import backward, on_ranks

FP32, BF16 = torch.float32, torch.bfloat16
MASTERS = {"grad_dtype": FP32}


@on_ranks(2)
def test_the_last_wrapper_takes_over() -> None:
    module, plain = Mlp(), Mlp()
    cells = []
    for step in range(3):  # a notebook cell that is run again
        wrapper = BucketDDP(module)
        wrapper.zero_grad()
        backward(wrapper, step)
        torch.optim.SGD(wrapper.parameters(), lr=0.1).step()
        assert wrapper.passes == 1
        cells.append(wrapper)
    old, inputs = cells[0], batch(0, dist.get_rank())[0]
    assert list(old.state_dict()) == list(module.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(old(inputs), module(inputs))
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
    with pytest.raises(ValueError, match="pad_buckets_to"):
        BucketDDP(module, pad_buckets_to=0)  # refused: takes nothing over
    plain.load_state_dict(module.state_dict())
    wrapper.zero_grad()
    backward(wrapper, 3)
    backward(plain, 3)
    assert_grads(module, mean_over_ranks(plain))
    assert largest_difference_between_ranks(module) == 0
    wrapper.close()


@on_ranks(2)
def test_wrappers_around_other_parameters_stay() -> None:
    """Around ones that are frozen there, too; a wrapper inside a wrapper only forwards."""
    module, plain = Mlp(), Mlp()
    module.head.requires_grad_(False)
    body = BucketDDP(module)
    module.head.requires_grad_(True)
    head = BucketDDP(module.head)
    module.head.requires_grad_(False)
    backward(body)
    assert body.passes == 1
    head.close()
    body.close()

    inner = BucketDDP(module.requires_grad_(True))
    plain.load_state_dict(module.state_dict())
    outer = BucketDDP(inner)
    for step, model in enumerate((outer, inner, outer)):
        plain.zero_grad()
        outer.zero_grad()
        backward(plain, step)
        backward(model, step)
        assert_grads(module, mean_over_ranks(plain))
    assert (inner.passes, outer.passes) == (0, 3)
    outer.close()


@on_ranks(2, {"shards": [{"shard_optimizer": True}, FP32], "masters": [MASTERS, BF16]})
def test_a_wrapper_with_a_live_optimizer_is_not_replaced(options: dict[str, Any], dtype: torch.dtype) -> None:
    module = Mlp().to(dtype)
    wrapper = BucketDDP(module, **options)
    optimizer = torch.optim.AdamW(module.parameters())
    backward(wrapper, 0, dtype)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"AdamW with shards or fp32 masters of its parameters; close\(\) that"):
        BucketDDP(module, **options)
    wrapper.zero_grad()
    backward(wrapper, 1, dtype)  # goes on as before
    optimizer.step()
    wrapper.close()
    BucketDDP(module).close()


@on_ranks(2, {"masters": [MASTERS, BF16], "mean": [{"module_buffers": "mean"}, FP32]})
def test_a_dropped_wrapper_leaves_nothing_behind(options: dict[str, Any], dtype: torch.dtype) -> None:
    module = Mlp().to(dtype)
    before, global_hooks = set(vars(module)), len(optimizer_file._global_optimizer_pre_hooks)
    wrapper = BucketDDP(module, **options)
    backward(wrapper, 0, dtype)
    del wrapper
    gc.collect()
    assert len(optimizer_file._global_optimizer_pre_hooks) == global_hooks
    assert set(vars(module)) == before
    for param in module.parameters():
        assert not param._post_accumulate_grad_hooks
        assert param.grad_dtype in (None, dtype)
        assert not hasattr(param, "main_grad")
        assert param.grad.untyped_storage().nbytes() == param.grad.nbytes, "a plain tensor, not a view"
    found = grads(module)
    backward(module, 0, dtype)
    assert all(param.grad.ne(found[name]).any() for name, param in module.named_parameters())
