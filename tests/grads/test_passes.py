"""Passes of every shape: what may happen between and within backwards, and the gradients that must come of it.

Most jobs begin with two passes (:func:`warm_up`), the first of which learns the order of gradients.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from lightning_bucketddp.grads import buffers
from lightning_bucketddp.grads.hooks import is_reducers_own
from tests.inside import views_of
from tests.models import Branches, Checkpointed, Fragile
from tests.pool import case, on_ranks
from tests.reference import assert_grads, both, grads, inner, inputs_of, mean_over_ranks, pair, run_backward, warm_up

SEVERAL = 0.002  # MiB; several buckets, with several parameters in each


def is_free(module: nn.Module) -> bool:
    hooks = [hook for param in module.parameters() for hook in (param._post_accumulate_grad_hooks or {}).values()]
    return not any(map(is_reducers_own, hooks))


def note(came: list[bool], param: Tensor, before: Tensor | None, _grad: Tensor) -> None:
    came.append(before is None or not torch.equal(param.grad, before))


@on_ranks(2, cases=(False, True))
def test_gradients_may_come_before_an_output_is_reached(local: bool) -> None:
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
            out.register_hook(partial(note, came, right, right.grad if right.grad is None else right.grad.clone()))
            penalty = right.square().sum() * (dist.get_rank() if not local else 0) + right.sum()
            (out.square().mean() + penalty).backward()
        assert came == [True, True]
        assert_grads(ours.module, mean_over_ranks(plain))


@on_ranks(3, cases=[("zero", True), ("clip", False), ("clip", True), ("none", False)])
def test_gradients_may_be_changed_between_passes(how: str, guarded: bool) -> None:
    """Gradients that are changed in place between passes belong to a parameter that the next pass does not use."""
    plain, ours = pair(Branches)
    warm_up(plain, ours)
    for step in range(4):
        take, before = ("both", "left")[step % 2], grads(ours.module)["right.weight"]
        for model in (plain, ours):
            if how == "zero":
                model.zero_grad(set_to_none=False)
            elif how == "clip":
                clip_grad_norm_(model.parameters(), 1e-2)
            run_backward(ours, model(inputs_of(step), take).square().mean(), guarded and model is ours)
        mean = mean_over_ranks(plain)
        with case(how, guarded, step):
            assert_grads(ours.module, mean)
            assert (how, take) != ("none", "left") or torch.equal(ours.module.right.weight.grad, before)
        for name, param in plain.named_parameters():
            param.grad = mean[name]


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


@on_ranks(2)
def test_hooks_of_the_user_stay() -> None:
    plain, ours = pair()
    names = [name for name, _ in ours.module.named_parameters()]
    calls: list[str] = []

    def hook_all() -> list[torch.utils.hooks.RemovableHandle]:
        named = ours.module.named_parameters()
        return [p.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name)) for name, p in named]

    handles = hook_all()
    both([plain, ours], inputs_of(0))
    handles[0].remove()
    hook_all()
    calls.clear()
    both([plain, ours], inputs_of(1))
    assert_grads(ours.module, mean_over_ranks(plain))
    assert sorted(calls) == sorted(names[1:] + names)
    ours.close()
    calls.clear()
    both([ours], inputs_of(2))
    assert sorted(calls) == sorted(names[1:] + names)
    assert is_free(ours.module)


@on_ranks(2, cases=[(1, False, False), (1, False, True), (0.0002, True, False)])
def test_a_backward_that_raised_leaves_no_gradient(cap: float, guarded: bool, local: bool) -> None:
    plain, ours = pair(Fragile, cap)
    warm_up(plain, ours)
    with ours.no_sync() if local else nullcontext():
        loss = ours(inputs_of(10), True).square().mean()
    with pytest.raises(ArithmeticError):
        run_backward(ours, loss, guarded)
    assert ours.module.first.weight.grad is None
    for mine, other in zip(ours.module.second.parameters(), plain.second.parameters(), strict=True):
        assert (mine.grad is None) == (not local), "what came in a local pass counts"
        other.grad = mine.grad if mine.grad is None else mine.grad.clone()
    both([plain, ours], inputs_of(0), zero=False)  # nothing else must be left
    assert_grads(ours.module, mean_over_ranks(plain))
