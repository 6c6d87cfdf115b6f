"""Divisors, token counts and reductions by hand, in one training loop with everything else."""

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP, PeerFailureError
from tests.models import Fragile, Mlp
from tests.pool import case, on_ranks
from tests.reference import (
    TINY,
    assert_grads,
    inputs_of,
    largest_difference_between_ranks,
    mean_over_ranks,
    pair,
    raises_soon,
    run_backward,
)

PLACES: list[dict[str, Any]] = [{}, {"use_contiguous_buffers": False}]
BF16, FP32 = torch.bfloat16, torch.float32
"""Seconds: less than a rank waits for one that does not come."""


def summed(models: list[nn.Module], step: int, **options: Any) -> None:
    """One backward of each, of a loss that is a sum over this rank's batch."""
    for model in models:
        model(inputs_of(step), **options).square().sum().backward()


def divided_sum(plain: nn.Module, divisor: float) -> dict[str, Tensor | None]:
    factor = dist.get_world_size() / divisor
    return {name: None if mean is None else mean * factor for name, mean in mean_over_ranks(plain).items()}


@on_ranks(2, cases=[("zero_grad", True), ("zero_grad_buffer", False), ("optimizer", False), ("raise", False)])
def test_tokens_are_dropped_with_their_gradients(how: str, guarded: bool) -> None:
    plain, ours = pair(Fragile, TINY, gradient_divide_by="tokens")
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    clear = {"optimizer": optimizer.zero_grad, "zero_grad_buffer": ours.zero_grad_buffer}.get(how, ours.zero_grad)
    for step in range(2):
        clear()
        plain.zero_grad()
        ours.count_tokens(10)
        with nullcontext() if how == "raise" else ours.no_sync():
            with pytest.raises(ArithmeticError) if how == "raise" else nullcontext():
                summed([ours], 10 + step, fail=how == "raise")
        clear()
        ours.count_tokens(7 + dist.get_rank())
        run_backward(ours, ours(inputs_of(step)).square().sum(), guarded)
        summed([plain], step)
        with case(how, guarded, step):
            assert_grads(ours.module, divided_sum(plain, 15))


@on_ranks(2)
def test_token_counts_are_whole_numbers_and_exact() -> None:
    plain, ours = pair(lambda: Mlp(depth=1).double(), gradient_divide_by="tokens")
    inputs = inputs_of(0).double()
    for fraction in (2.5, torch.tensor(2.75)):
        with pytest.raises(ValueError, match="tokens"):
            ours.count_tokens(fraction)
    for count, dtype in [(1003, BF16), (1003.0, FP32), (torch.tensor(1003), FP32), (torch.tensor(1003.0), FP32)]:
        torch.set_default_dtype(dtype)
        try:
            ours.count_tokens(count)
            for model in (plain, ours):
                model.zero_grad()
                model(inputs).square().sum().backward()
        finally:
            torch.set_default_dtype(FP32)
        with case(count, dtype):
            assert_grads(ours.module, divided_sum(plain, 2006), rtol=1e-12, atol=0)


@pytest.mark.parametrize("what", ["count_tokens", "cleared"])
@on_ranks(2, fresh=True)
def test_a_rank_that_forgets_something_is_named(what: str) -> None:
    _, ours = pair(cap=TINY, gradient_divide_by="tokens" if what == "count_tokens" else 1)
    rank = dist.get_rank()
    if what == "count_tokens" and rank == 0:
        ours.count_tokens(3)
    if what == "cleared":
        summed([ours], 0)
        if rank == 0:
            ours.zero_grad()
    with raises_soon(RuntimeError if rank else PeerFailureError, match=what, within=10) as error:
        summed([ours], 1)
    if rank == 0:
        assert "rank 1" in str(error.value)
    elif what == "cleared":
        assert any(f"'{name}'" in str(error.value) for name, _ in Mlp().named_parameters())


@on_ranks(2)
def test_a_sum_is_not_reduced_again() -> None:
    for divisor, options in zip([1, "tokens"], PLACES, strict=True):
        plain, ours = pair(cap=TINY, gradient_divide_by=divisor, **options)
        tokens = 3 if divisor == "tokens" else 0
        for step in range(2):
            ours.zero_grad()
            plain.zero_grad()
            if tokens:
                ours.count_tokens(tokens)
            summed([plain, ours], step)
            if tokens:
                ours.count_tokens(tokens)
            with pytest.raises(RuntimeError, match="expected cleared gradients"):
                ours.allreduce_gradients()
            with case(divisor, options, step):
                assert_grads(ours.module, divided_sum(plain, 2 * tokens or 1))
        ours.close()


@on_ranks(2, cases=PLACES)
def test_a_reduction_under_way_is_not_disturbed(options: dict[str, Any]) -> None:
    """Between the start and the end of a reduction by hand."""
    plain, ours = pair(cap=TINY, **options)
    for step in range(2):
        ours.zero_grad()
        plain.zero_grad()
        with ours.no_sync():
            summed([plain, ours], step)
        ours.start_grad_sync()
        assert options or ours.module.head.weight.grad is None
        inputs = inputs_of(9).requires_grad_()
        found, expected = (torch.autograd.grad(model(inputs).sum(), inputs)[0] for model in (ours, plain))
        torch.testing.assert_close(found, expected)
        with pytest.raises(RuntimeError, match="finish_grad_sync"):
            ours.zero_grad_buffer()
        if step == 0:
            ours.finish_grad_sync()
            assert_grads(ours.module, mean_over_ranks(plain))
    with pytest.raises(RuntimeError, match="finish_grad_sync"), ours.no_sync() if options else nullcontext():
        summed([ours], 1)
    with suppress(RuntimeError):
        ours.finish_grad_sync()


@on_ranks(2)
def test_an_unfrozen_parameter_may_be_reduced_by_hand() -> None:
    """A gradient that the user sets takes part, and zeroing reaches one that came in a local pass."""
    plain, ours = pair(cap=TINY)
    ours.close()
    weight = ours.module.layers[1].weight.requires_grad_(False)
    ours = BucketDDP(ours.module)
    summed([ours], 0)
    weight.requires_grad_(True)
    with ours.no_sync():
        summed([ours], 1)
    assert weight.grad.any()
    ours.zero_grad_buffer()
    assert weight.grad is None or not weight.grad.any()
    weight.grad = torch.full_like(weight, float(dist.get_rank()))
    ours.allreduce_gradients()
    assert weight.grad.eq(0.5).all()
    ours.zero_grad()
    summed([plain, ours], 2)
    assert_grads(ours.module, mean_over_ranks(plain))


@on_ranks(2)
def test_parameters_may_be_broadcast_after_a_failed_pass() -> None:
    plain, ours = pair(Fragile, TINY)
    for step in range(3):
        ours.zero_grad()
        with pytest.raises(ArithmeticError) if step == 2 else nullcontext():
            summed([ours], step, fail=step == 2)
    with torch.no_grad():
        plain.first.weight.fill_(0.5)
        ours.module.first.weight.fill_(dist.get_rank() + 0.5)
    ours.broadcast_params()
    ours.zero_grad()
    summed([plain, ours], 4)
    assert_grads(ours.module, mean_over_ranks(plain))
    assert largest_difference_between_ranks(ours.module) == 0
