"""Passes of every shape: what may happen between and within backwards, and the gradients that must come of it.

Most jobs begin with two passes (:func:`warm_up`), the first of which learns the order of gradients.
"""

import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from lightning_bucketddp.grads import buffers
from lightning_bucketddp.grads.hooks import is_reducers_own
from tests.grads.support import RunRanks, both, case, inner, inputs_of, on_ranks, pair, run_backward, warm_up
from tests.inside import views_of
from tests.models import Branches, Checkpointed
from tests.reference import assert_grads, grads, mean_over_ranks

SEVERAL = 0.002  # MiB; several buckets, with several parameters in each


def is_free(module: nn.Module) -> bool:
    """Whether no hook of ours is left."""
    hooks = [hook for param in module.parameters() for hook in (param._post_accumulate_grad_hooks or {}).values()]
    return not any(map(is_reducers_own, hooks))


@on_ranks(2)
def test_backward_may_reach_other_parameters_on_each_rank() -> None:
    rank = dist.get_rank()
    plain, ours = pair()
    warm_up(plain, ours)
    names = [name for name, _ in ours.module.named_parameters()]
    for guarded, zero in itertools.product((False, True), repeat=2):
        for step in range(2):
            with case(guarded, zero, step):
                if zero:
                    plain.zero_grad()
                    ours.zero_grad()
                for model in (plain, ours):
                    inputs = [inner(model).get_parameter(name) for name in names[rank : rank + 2]]
                    run_backward(ours, model(inputs_of(step)).square().mean(), guarded and model is ours, inputs=inputs)
                assert_grads(ours.module, mean := mean_over_ranks(plain))
                assert set(names[:3]) == {name for name, grad in mean.items() if grad is not None}
        plain.zero_grad()
        ours.zero_grad()
    assert ours.passes == 10
    ours.close()


def note(came: list[bool], param: Tensor, before: Tensor | None, _grad: Tensor) -> None:
    came.append(before is None or not torch.equal(param.grad, before))


def before_the_root(local: bool) -> None:
    """A penalty on parameters that forward does not use: their gradients come before any output is reached."""
    plain, ours = pair(Branches)
    warm_up(plain, ours)
    for step in range(4):
        came: list[bool] = []
        for model in (plain, ours):
            if step % 2 == 0:  # else it comes in place
                model.zero_grad()
            right = inner(model).right.weight
            if local:
                with ours.no_sync():
                    (model(inputs_of(50 + step), "left").square().mean() + right.sum() * step).backward()
                assert model is plain or step or right.grad is not None
            out = model(inputs_of(step), "left")
            before = right.grad if right.grad is None else right.grad.clone()
            out.register_hook(partial(note, came, right, before))
            penalty = right.square().sum() * (dist.get_rank() if not local else 0) + right.sum()
            (out.square().mean() + penalty).backward()
        assert came == [True, True]
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


@pytest.mark.parametrize("local", [False, True])
def test_gradients_may_come_before_an_output_is_reached(run_ranks: RunRanks, local: bool) -> None:
    run_ranks(2, before_the_root, local)


@on_ranks(3)
def test_gradients_may_be_changed_between_passes() -> None:
    """Gradients that are changed in place between passes belong to a parameter that the next pass does not use."""
    for how, guarded in [("zero", False), ("zero", True), ("clip", False), ("clip", True), ("none", False)]:
        plain, ours = pair(Branches)
        warm_up(plain, ours)
        for step in range(4):
            take = "both" if step % 2 == 0 else "left"
            before = grads(ours.module)
            for model in (plain, ours):
                if how == "zero":
                    model.zero_grad(set_to_none=False)
                elif how == "clip":
                    clip_grad_norm_(model.parameters(), 1e-2)
                run_backward(ours, model(inputs_of(step), take).square().mean(), guarded and model is ours)
            mean = mean_over_ranks(plain)
            with case(how, guarded, step):
                assert_grads(ours.module, mean)
                if how == "none" and take == "left":
                    assert torch.equal(ours.module.right.weight.grad, before["right.weight"])
            for name, param in plain.named_parameters():
                param.grad = mean[name]
        assert ours.module.idle.grad is None
        ours.close()


@on_ranks(3)
def test_a_gradient_that_no_rank_made_keeps_every_bit() -> None:
    rank = float(dist.get_rank())
    for guarded in (False, True):
        plain, ours = pair(Branches)
        warm_up(plain, ours)
        both([plain, ours], inputs_of(0))
        right = ours.module.right
        right.weight.grad.add_(rank)  # as a user may, on each rank otherwise
        own = right.bias.grad = torch.full((4,), rank)
        torch.autograd.grad(ours(inputs_of(0), "left").sum(), ours.module.left.weight)
        before = grads(right)
        run_backward(ours, ours(inputs_of(1), "left").square().mean(), guarded)
        with case(guarded):
            assert all(torch.equal(param.grad, before[name]) for name, param in right.named_parameters())
            assert right.bias.grad is own
        ours.close()


@on_ranks(2)
def test_gradients_may_be_cleared_inside_a_guard() -> None:
    plain, ours = pair()
    warm_up(plain, ours)
    for name, param in ours.module.named_parameters():
        param.grad = torch.full_like(param, len(name))  # as new as autograd's own
    loss = ours(inputs_of(0)).square().mean()
    with ours.backward_pass(loss):
        ours.zero_grad()
        loss.backward()
    both([plain], inputs_of(0))
    assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


@on_ranks(2)
def test_local_passes_accumulate_in_the_buffers() -> None:
    """Local passes that reach different parameters."""
    rank = dist.get_rank()
    plain, ours = pair(cap=SEVERAL)
    warm_up(plain, ours)
    names, views = [name for name, _ in ours.module.named_parameters()], views_of(ours)
    patterns: list[list[str] | None] = [names[:1], None, names[1:3], names[rank : rank + 1]]
    for start in range(len(patterns)):
        plain.zero_grad()
        ours.zero_grad()
        seen: set[str] = set()
        for at in range(3):
            only = patterns[(start + at) % len(patterns)]
            both([plain], inputs_of(4 * start + at), only=only, zero=False)
            with ours.no_sync():
                both([ours], inputs_of(4 * start + at), only=only, zero=False)
            seen |= set(names if only is None else only)
            found = dict(ours.module.named_parameters())
            assert seen == {name for name, param in found.items() if param.grad is not None}
            assert all(found[name].grad is views[name] for name in seen), "accumulated in the buffers"
        both([plain, ours], inputs_of(4 * start + 3), only=names[3:4], zero=False)
        assert_grads(ours.module, mean_over_ranks(plain))
        assert ours.last_pass().local_passes == 3
    ours.close()
    plain, ours = pair(Branches)
    warm_up(plain, ours)
    for take in ("left", "both"):
        with ours.no_sync():
            both([plain, ours], inputs_of(0), "right")
        both([plain, ours], inputs_of(1), take)
        assert_grads(ours.module, mean_over_ranks(plain))  # without those that zero_grad() dropped
    ours.close()


@on_ranks(2)
def test_backward_may_come_by_no_output_of_forward() -> None:
    """Backwards that come by no output of the wrapper."""
    plain, ours = pair()
    warm_up(plain, ours)
    for local, step in itertools.product((False, True), range(3)):
        for model in (plain, ours):
            if step == 1:
                model.zero_grad(set_to_none=False)
            for at in range(1 + local):
                loss = inner(model)(inputs_of(2 * step + at)).square().mean()
                with ours.no_sync() if local and at == 0 else nullcontext():
                    loss.backward()
        mean = mean_over_ranks(plain)
        with case(local, step):
            assert_grads(ours.module, mean)
        for name, param in plain.named_parameters():
            param.grad = mean[name]
    ours.close()


@on_ranks(3, fresh=True)
def test_a_gradient_may_come_again_before_the_launch() -> None:
    """Gradients that are scaled one by one: some come twice, and a user's hook looks at one."""
    buffers.LARGE_BYTES = 1  # type: ignore[misc]
    plain, ours = pair(lambda: Checkpointed(use_reentrant=True))
    seen: list[Tensor] = []
    ours.module.head.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    for step in range(5):
        for model in (plain, ours):
            inner(model).calls = 2 if step > 2 else 1
        both([plain, ours], inputs_of(step))
        torch.testing.assert_close(seen[-1], plain.head.weight.grad)
        assert_grads(ours.module, mean_over_ranks(plain))
    assert len(seen) == 5
    assert len(ours.layout.buckets) == 1


def hook_all(module: nn.Module, calls: list[str]) -> list[torch.utils.hooks.RemovableHandle]:
    return [
        param.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
        for name, param in module.named_parameters()
    ]


@on_ranks(2)
def test_hooks_of_the_user_stay() -> None:
    plain, ours = pair()
    names = [name for name, _ in ours.module.named_parameters()]
    calls: list[str] = []
    handles = hook_all(ours.module, calls)
    both([plain, ours], inputs_of(0))
    handles[0].remove()
    hook_all(ours.module, calls)
    calls.clear()
    both([plain, ours], inputs_of(1))
    assert_grads(ours.module, mean_over_ranks(plain))
    assert sorted(calls) == sorted(names[1:] + names)
    ours.close()
    calls.clear()
    both([ours], inputs_of(2))
    assert sorted(calls) == sorted(names[1:] + names)
    assert is_free(ours.module)
