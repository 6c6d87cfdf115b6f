"""Backwards that raise: no gradient of theirs is left, and training goes on where every rank raised."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.grads.support import both, case, inputs_of, on_ranks, pair, run_backward, warm_up
from tests.models import Fragile
from tests.reference import assert_grads, mean_over_ranks


def raised(cap: float, guarded: bool, local: bool) -> None:
    """Backward raises half-way on all ranks, behind some gradients, or all of one bucket."""
    plain, ours = pair(Fragile, cap)
    warm_up(plain, ours)
    kept = torch.full((8, 8), 2.0 + dist.get_rank())  # of no failed pass
    for step in range(2):
        if guarded:
            ours.module.first.weight.grad = kept
        with ours.no_sync() if local else nullcontext():
            loss = ours(inputs_of(10 + step), True).square().mean()
        with pytest.raises(ArithmeticError):
            run_backward(ours, loss, guarded)
        if guarded:
            assert torch.equal(ours.module.first.weight.grad, kept)
            ours.module.first.weight.grad = None
        for mine, other in zip(ours.module.second.parameters(), plain.second.parameters(), strict=True):
            assert (mine.grad is None) == (not local), "what came in a local pass counts"
            other.grad = mine.grad if mine.grad is None else mine.grad.clone()
        both([plain, ours], inputs_of(step), zero=False)  # nothing else must be left
        assert_grads(ours.module, mean_over_ranks(plain))
        plain.zero_grad()
        ours.zero_grad()
    ours.close()


@on_ranks(2)
def test_a_backward_that_raised_leaves_no_gradient() -> None:
    for cap, (guarded, local) in itertools.product([1, 0.0002], [(False, False), (True, False), (False, True)]):
        with case(cap, guarded, local):
            raised(cap, guarded, local)


@on_ranks(2)
def test_the_backward_after_a_failed_one_is_whole() -> None:
    """A forward from before, whose backward follows one that raised on every rank."""
    for rooted in (True, False):
        plain, ours = pair(Fragile)
        warm_up(plain, ours)
        good = [model(inputs_of(0)).square().mean() for model in (plain, ours if rooted else ours.module)]
        bad = ours(inputs_of(1), True).square().mean()
        with pytest.raises(ArithmeticError):
            bad.backward()
        for loss in good:
            loss.backward()
        with case(rooted):
            assert_grads(ours.module, mean_over_ranks(plain))
        both([plain, ours], inputs_of(2))
        assert_grads(ours.module, mean_over_ranks(plain))
        ours.close()
