"""Gradient buffers without a process group: views, packing, scaling, refusals."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_bucketddp.grads import buffers
from lightning_bucketddp.grads.bucket import Buckets
from lightning_bucketddp.grads.buffers import GradBuffers
from lightning_bucketddp.grads.checks import GradientError, require_sound
from lightning_bucketddp.grads.contiguous import Contiguous
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.plan import Layout, ParamSpec, plan


def some_params() -> list[nn.Parameter]:
    conv = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    return [nn.Parameter(tensor) for tensor in (conv, torch.randn(7), torch.randn(2, 5), torch.randn(()))]


def layout_of(params: list[nn.Parameter]) -> Layout:
    return plan([ParamSpec.of(f"p{at}", param) for at, param in enumerate(params)], range(len(params)), 100)


@pytest.mark.parametrize("large_bytes", [1, 10**6], ids=["one by one", "together"])
@pytest.mark.parametrize("inside", [True, False], ids=["in the buffer", "elsewhere"])
def test_packing_copies_and_scales(monkeypatch: pytest.MonkeyPatch, large_bytes: int, inside: bool) -> None:
    monkeypatch.setattr(buffers, "LARGE_BYTES", large_bytes)
    params = some_params()
    layout = layout_of(params)
    made = GradBuffers(layout)
    for bucket in layout.buckets:
        slots = bucket.slots
        expected = [torch.randn_like(params[slot]) for slot in slots]
        grads = [made.views[slot].copy_(grad) if inside else grad for slot, grad in zip(slots, expected, strict=True)]
        made.pack(slots, [grad.clone() if not inside else grad for grad in grads], 0.5, made.bucket_flat(bucket))
        for slot, grad in zip(slots, expected, strict=True):
            torch.testing.assert_close(made.views[slot], grad * 0.5)
            assert made.views[slot].stride() == params[slot].stride()
            assert made.holds(slot, made.views[slot])


def test_a_view_that_was_moved_is_no_gradient_of_the_buffer() -> None:
    made = GradBuffers(layout_of(some_params()))
    moved = made.views[1]
    moved.data = torch.full((7,), 3.0)  # as module.to(dtype) does
    assert not made.holds(1, moved)
    made.pack([1], [moved])
    assert made.views[1] is not moved
    assert made.holds(1, made.views[1])
    assert made.flats[0].sum() == 21.0


@pytest.mark.parametrize(
    ("grad", "message"),
    [
        (lambda: torch.ones(7, requires_grad=True), r"'p1' requires grad.*create_graph=True.*torch.autograd.grad"),
        (lambda: torch.ones(7).to_sparse(), r"'p1' is torch.sparse_coo.*sparse_parameters=\['p1'\]"),
        (lambda: torch.ones(8), r"'p1' cannot be reduced: expected.*shape \(7,\).*found.*shape \(8,\)"),
        (lambda: torch.ones(7, dtype=torch.int64), r"'p1' cannot be reduced: expected.*float32.*found.*int64"),
        (lambda: torch.ones(7, device="meta"), r"'p1' cannot be reduced: expected.*on cpu, found.*on meta"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(grad: Callable[[], Tensor], message: str) -> None:
    made = GradBuffers(layout_of(some_params()))
    with pytest.raises(RuntimeError, match=message):
        made.pack([0, 1], [torch.ones(4, 3, 2, 2), grad()])
    assert not made.flats[0].any(), "nothing was copied"


def test_a_lost_gradient_dtype_comes_back() -> None:
    param = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    made = GradBuffers(layout_of([param]))
    param.grad_dtype = torch.bfloat16
    made.bind(0, param)
    assert param.grad is made.views[0]
    assert param.grad.dtype is torch.float32


def test_another_layout_takes_gradients_along() -> None:
    params = some_params()
    table = SlotTable([(f"p{at}", param) for at, param in enumerate(params)])
    planner = LayoutPlanner(table, Options(bucket_cap_mb=0.0001), world_size=2, one_machine=True)
    buckets = Buckets(table, planner)
    storage = Contiguous(table, buckets, planner.plan())
    before = storage.layout
    params[0].grad, own = storage.views[3].fill_(5.0), torch.ones(2, 5)
    params[2].grad = own
    params[3].grad = storage.views[0].fill_(6.0)
    planner.learn([2.0, 1.0, None, 0.0], [1])
    assert storage.lay_out(planner.plan())
    assert storage.layout != before
    assert params[0].grad is storage.views[3]
    assert params[3].grad is storage.views[0]
    assert params[0].grad.eq(5.0).all()
    assert params[3].grad.eq(6.0).all()
    assert params[2].grad is own
    assert [bucket.held_back for bucket in buckets.all] == [
        any(table.specs[slot].name in ("p1", "p2") for slot in bucket.slots) for bucket in buckets.all
    ]
    storage.release()
    assert params[0].grad.eq(5.0).all()
    assert params[0].grad.untyped_storage().nbytes() == params[0].nbytes, "a plain tensor"


def test_unsound_gradients_are_named() -> None:
    require_sound(2.0, 2.0, 0, "p")
    for largest, limit, found in [(2.5, 2.0, "2.5"), (math.nan, 2.0, "NaN"), (math.inf, math.inf, "Inf")]:
        with pytest.raises(GradientError, match=f"rank 3: found {found} .*gradient of parameter 'p'.*={limit}"):
            require_sound(largest, limit, 3, "p")
