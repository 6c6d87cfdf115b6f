"""One hook per parameter tells of its gradient: what may come, in which order, and what must then be reduced.

Most tests begin with two passes (:func:`warm_up`), the first of which learns the order of gradients.
"""

import copy
import gc
import io
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from lightning_bucketddp import BucketDDP, PeerFailureError
from lightning_bucketddp.grads import buffers as grad_buffer
from lightning_bucketddp.grads.hooks import is_reducers_own
from tests.inside import views_of
from tests.models import Branches, Checkpointed, Fragile, LateScale, Lookup, MixedDtypes, Mlp, Towers, batch, tokens
from tests.reference import assert_grads, grads, largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003  # MiB; makes several buckets of the small test models
SEVERAL = 0.002  # MiB; several parameters in each of them
ONE = 1


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def pair(build: Callable[[], nn.Module], bucket_cap_mb: float = ONE, **options: Any) -> tuple[nn.Module, BucketDDP]:
    plain = seeded(build)
    return plain, BucketDDP(copy.deepcopy(plain), bucket_cap_mb=bucket_cap_mb, **options)


def is_free(module: nn.Module) -> bool:
    """Whether no hook of ours is left."""
    return not any(
        is_reducers_own(hook)
        for param in module.parameters()
        for hook in (param._post_accumulate_grad_hooks or {}).values()
    )


def inputs_of(step: int) -> Tensor:
    return batch(step, dist.get_rank())[0]


def both(models: Iterable[nn.Module], *args: Any, only: Iterable[str] | None = None, zero: bool = True) -> None:
    """One backward of each; ``only`` names the parameters that get a gradient."""
    for model in models:
        if zero:
            model.zero_grad()
        params = dict((model.module if isinstance(model, BucketDDP) else model).named_parameters())
        inputs = None if only is None else [params[name] for name in only]
        model(*args).square().mean().backward(inputs=inputs)


def run_backward(ours: BucketDDP, loss: Tensor, guarded: bool, **options: Any) -> None:
    with ours.backward_pass(loss) if guarded else nullcontext():
        loss.backward(**options)


def warm_up(plain: nn.Module, ours: BucketDDP) -> None:
    """Two passes, after which the order of gradients is known."""
    both([plain, ours], inputs_of(100))
    both([plain, ours], inputs_of(101))
    assert_grads(ours.module, mean_over_ranks(plain))
    plain.zero_grad()
    ours.zero_grad()


def launched_early() -> None:
    plain, ours = pair(Mlp, SEVERAL)
    warm_up(plain, ours)
    buckets = ours.layout.buckets
    assert 1 < len(buckets) < len(list(ours.parameters()))
    for step in range(3):
        both([plain, ours], inputs_of(step))
        assert_grads(ours.module, mean_over_ranks(plain))
        assert ours.early_launches == len(buckets) - 1, "the last one waits for the control vector"
    views = views_of(ours)
    assert all(param.grad is views[name] for name, param in ours.module.named_parameters())
    ours.close()
    assert is_free(ours.module)


def test_a_bucket_is_launched_when_its_last_gradient_comes(run_ranks: RunRanks) -> None:
    run_ranks(2, launched_early)


def as_ddp(build: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    rank = dist.get_rank()
    module = seeded(build)
    ours, ddp = BucketDDP(copy.deepcopy(module), **options), DistributedDataParallel(copy.deepcopy(module))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5) for model in (ours, ddp)]
    for step in range(5):
        args = tokens(step, rank) if build is Lookup else [inputs_of(step)]
        for model, optimizer in zip((ours, ddp), optimizers, strict=True):
            optimizer.zero_grad()
            if step == 3:
                with model.no_sync():
                    model(*args).float().square().mean().backward()
            model(*args).float().square().mean().backward()
            optimizer.step()
    for mine, reference in zip(ours.module.parameters(), ddp.module.parameters(), strict=True):
        low = reference.dtype is torch.bfloat16
        torch.testing.assert_close(mine, reference, rtol=1e-2 if low else 1e-3, atol=2e-3 if low else 1e-4)
    assert largest_difference_between_ranks(ours.module) == 0
    ours.close()


WAYS: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (Mlp, {"bucket_cap_mb": SEVERAL}),
    (Mlp, {"pad_buckets_to": 100, "max_abs_grad": 1e9}),
    (MixedDtypes, {"grad_dtype": torch.float32, "master_params": False}),
    (Lookup, {}),
    (Mlp, {"overlap": False}),
    (Mlp, {"use_contiguous_buffers": False}),
    (Mlp, {"find_unused_parameters": True}),
]


@pytest.mark.parametrize(("build", "options"), WAYS)
def test_training_is_ddps(run_ranks: RunRanks, build: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    run_ranks(2, as_ddp, build, options)


def reached(guarded: bool, zero: bool) -> None:
    """Backwards that reach other parameters on each rank."""
    rank = dist.get_rank()
    plain, ours = pair(Mlp)
    warm_up(plain, ours)
    names = [name for name, _ in ours.module.named_parameters()]
    for step in range(3):
        if zero:
            plain.zero_grad()
            ours.zero_grad()
        before = mean_over_ranks(plain)
        only = names[rank : rank + 2]
        for model in (plain, ours):
            loss = model(inputs_of(step)).square().mean()
            inputs = [dict((model.module if model is ours else model).named_parameters())[name] for name in only]
            run_backward(ours, loss, guarded and model is ours, inputs=inputs)
        assert_grads(ours.module, mean := mean_over_ranks(plain))
        assert set(names[:3]) == {name for name, grad in mean.items() if grad is not None}
        assert zero or step == 0 or all(before[name] is not None for name in names[:3])
    assert ours.passes == 5
    ours.close()


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("zero", [False, True])
def test_a_backward_may_reach_other_parameters_on_each_rank(run_ranks: RunRanks, guarded: bool, zero: bool) -> None:
    run_ranks(2, reached, guarded, zero)


def silent() -> None:
    plain, ours = pair(Mlp)
    warm_up(plain, ours)
    both([plain, ours], inputs_of(0))
    before = grads(ours.module)
    notes = ours.last_pass()
    if dist.get_rank() == 0:  # on one rank only: nothing may be sent
        torch.autograd.grad(ours(inputs_of(1)).sum(), list(ours.module.parameters()))
        inputs = inputs_of(1).requires_grad_()
        ours(inputs).sum().backward(inputs=[inputs])
    assert ours.passes == 3
    assert ours.last_pass() == notes
    assert_grads(ours.module, before)
    both([plain, ours], inputs_of(2), zero=False)
    assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_autograd_grad_sends_nothing(run_ranks: RunRanks) -> None:
    run_ranks(2, silent)


def several_backwards() -> None:
    plain, ours = pair(Mlp, SEVERAL)
    warm_up(plain, ours)
    passes = ours.passes
    for zero in (False, True):
        for model in (plain, ours):
            model.zero_grad()
            first, second = model(inputs_of(0)).square().mean(), model(inputs_of(1)).square().mean()
            first.backward(retain_graph=True)
            if zero:
                model.zero_grad(set_to_none=False)
            (first + second).backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    assert ours.passes == passes + 4
    ours.close()


def test_two_backwards_of_one_forward(run_ranks: RunRanks) -> None:
    run_ranks(2, several_backwards)


def note(came: list[bool], param: Tensor, before: Tensor | None, _grad: Tensor) -> None:
    came.append(before is None or not torch.equal(param.grad, before))


def before_the_root(local: bool) -> None:
    """A penalty on parameters that forward does not use: their gradients come before any output is reached."""
    plain, ours = pair(Branches)
    warm_up(plain, ours)
    for step in range(8):
        came: list[bool] = []
        for model in (plain, ours):
            if step % 2 == 0:  # else it comes in place
                model.zero_grad()
            right = (model.module if model is ours else model).right.weight
            if local:
                with ours.no_sync():
                    (model(inputs_of(50 + step), "left").square().mean() + right.sum() * step).backward()
                if model is ours and step == 0:
                    assert right.grad is not None
            out = model(inputs_of(step), "left")
            before = right.grad if right.grad is None else right.grad.clone()
            out.register_hook(partial(note, came, right, before))
            penalty = right.square().sum() * (dist.get_rank() if not local else 0) + right.sum()
            (out.square().mean() + penalty).backward()
        assert came == [True, True]
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


@pytest.mark.parametrize("local", [False, True])
def test_gradients_that_come_before_the_root(run_ranks: RunRanks, local: bool) -> None:
    run_ranks(2, before_the_root, local)


def touched_between(how: str, guarded: bool) -> None:
    """Gradients that are changed in place between passes, and belong to a parameter that is not used in the next."""
    plain, ours = pair(Branches)
    warm_up(plain, ours)
    for step in range(8):
        take = "both" if step % 2 == 0 else "left"
        before = grads(ours.module)
        for model in (plain, ours):
            if how == "zero":
                model.zero_grad(set_to_none=False)
            elif how == "clip":
                clip_grad_norm_(model.parameters(), 1e-2)
            loss = model(inputs_of(step), take).square().mean()
            run_backward(ours, loss, guarded and model is ours)
        mean = mean_over_ranks(plain)
        assert_grads(ours.module, mean)
        if how == "none" and take == "left":
            assert torch.equal(ours.module.right.weight.grad, before["right.weight"])
        for name, param in plain.named_parameters():
            param.grad = mean[name]
    assert ours.module.idle.grad is None
    ours.close()


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("how", ["zero", "clip", "none"])
def test_gradients_that_are_changed_between_passes(run_ranks: RunRanks, how: str, guarded: bool) -> None:
    run_ranks(3, touched_between, how, guarded)


def untouched(guarded: bool) -> None:
    plain, ours = pair(Branches)
    warm_up(plain, ours)
    both([plain, ours], inputs_of(0))
    right = ours.module.right.weight
    right.grad.add_(dist.get_rank())  # as a user may, on each rank otherwise
    own = torch.full((4,), float(dist.get_rank()))
    if guarded:
        ours.module.right.bias.grad = own
    before = grads(ours.module)
    run_backward(ours, ours(inputs_of(1), "left").square().mean(), guarded)
    for name, param in ours.module.right.named_parameters():
        assert torch.equal(param.grad, before[f"right.{name}"])
    assert not guarded or ours.module.right.bias.grad is own
    ours.close()


@pytest.mark.parametrize("guarded", [False, True])
def test_what_no_rank_uses_keeps_every_bit(run_ranks: RunRanks, guarded: bool) -> None:
    run_ranks(3, untouched, guarded)


def doubted_in_vain() -> None:
    """Gradients of the user's own may have come in the backward that is found under way, until it has ended."""
    plain, ours = pair(Branches)
    warm_up(plain, ours)
    ours.module.right.bias.grad = torch.full((4,), float(dist.get_rank()))
    torch.autograd.grad(ours(inputs_of(0), "left").sum(), ours.module.left.weight)
    both([ours], inputs_of(1), "left", zero=False)
    assert torch.equal(ours.module.right.bias.grad, torch.full((4,), float(dist.get_rank())))
    ours.close()


def test_doubts_end_with_the_backward(run_ranks: RunRanks) -> None:
    run_ranks(2, doubted_in_vain)


def two_forwards_first() -> None:
    plain, ours = pair(Branches)
    warm_up(plain, ours)
    for model in (plain, ours):
        first, second = model(inputs_of(0)).square().mean(), model(inputs_of(1), "left").square().mean()
        first.backward()
        second.backward()
    assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_two_forwards_before_two_backwards(run_ranks: RunRanks) -> None:
    run_ranks(2, two_forwards_first)


def cleared_in_the_guard() -> None:
    plain, ours = pair(Mlp)
    warm_up(plain, ours)
    for name, param in ours.module.named_parameters():
        param.grad = torch.full_like(param, len(name))  # as new as what autograd is about to make
    loss = ours(inputs_of(0)).square().mean()
    with ours.backward_pass(loss):
        ours.zero_grad()
        loss.backward()
    both([plain], inputs_of(0))
    assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_gradients_cleared_inside_a_guard(run_ranks: RunRanks) -> None:
    run_ranks(2, cleared_in_the_guard)


def local_passes() -> None:
    """Local passes that reach this and that."""
    rank = dist.get_rank()
    plain, ours = pair(Mlp, SEVERAL)
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
            seen |= set(dict(plain.named_parameters()) if only is None else only)
            found = dict(ours.module.named_parameters())
            assert seen == {name for name, param in found.items() if param.grad is not None}
            assert all(found[name].grad is views[name] for name in seen), "accumulated in the buffers"
        both([plain, ours], inputs_of(4 * start + 3), only=names[3:4], zero=False)
        assert_grads(ours.module, mean_over_ranks(plain))
        assert ours.last_pass().local_passes == 3
    ours.close()


def test_local_passes_accumulate_in_the_buffers(run_ranks: RunRanks) -> None:
    run_ranks(2, local_passes)


def dropped_between() -> None:
    plain, ours = pair(Branches)
    warm_up(plain, ours)
    for take in ("left", "both"):
        with ours.no_sync():
            both([plain, ours], inputs_of(0), "right")
        both([plain, ours], inputs_of(1), take)
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_local_gradients_dropped_by_zero_grad_do_not_come_back(run_ranks: RunRanks) -> None:
    run_ranks(2, dropped_between)


def freezing() -> None:
    plain, ours = pair(Branches)
    warm_up(plain, ours)
    tail = ours.layout.slots[ours.layout.buckets[0].slots[-1]].spec.name
    for step in range(12):
        for model in (plain, ours.module):
            params = dict(model.named_parameters())
            params[tail].requires_grad_(step % 3 != 1)
            model.left.requires_grad_(step % 2 == 0)
            model.right.requires_grad_(step % 2 == 1)
            if step >= 6:
                model.idle.requires_grad_(False)
        if step % 4 == 1:
            with ours.no_sync():
                both([plain, ours], inputs_of(20 + step), zero=False)
        both([plain, ours], inputs_of(step), zero=False)
        mean = mean_over_ranks(plain)
        assert_grads(ours.module, mean)
        plain.zero_grad()
        ours.zero_grad()
    ours.close()


def test_parameters_frozen_and_unfrozen_afterwards(run_ranks: RunRanks) -> None:
    run_ranks(2, freezing)


def toggled() -> None:
    """The two players of a GAN."""
    plain, ours = pair(Towers)
    for step in range(16):
        for model in (plain, ours.module):
            model.first.requires_grad_(step % 2 == 0)
            model.second.requires_grad_(step % 2 == 1)
        both([plain, ours], inputs_of(step))
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_toggled_optimizers(run_ranks: RunRanks) -> None:
    run_ranks(2, toggled)


def no_root(local: bool) -> None:
    """A backward that comes by no output."""
    plain, ours = pair(Mlp)
    warm_up(plain, ours)
    for step in range(3):
        for model in (plain, ours):
            if step == 1:
                model.zero_grad(set_to_none=False)
            for at in range(1 + local):
                inner = ours.module if model is ours else model
                loss = inner(inputs_of(2 * step + at)).square().mean()
                if local and at == 0:
                    with ours.no_sync():
                        loss.backward()
                else:
                    loss.backward()
        mean = mean_over_ranks(plain)
        assert_grads(ours.module, mean)
        for name, param in plain.named_parameters():
            param.grad = mean[name]
    both([plain, ours], inputs_of(9))
    ours.close()


@pytest.mark.parametrize("local", [False, True])
def test_a_backward_without_a_root(run_ranks: RunRanks, local: bool) -> None:
    run_ranks(2, no_root, local)


def comes_twice() -> None:
    plain, ours = pair(LateScale, 0.0001)
    warm_up(plain, ours)
    with pytest.raises(RuntimeError, match="a gradient of parameter 'scale' came after its bucket had been launched"):
        ours(inputs_of(0), True).square().mean().backward()


def test_a_gradient_that_comes_again_after_the_launch_is_refused(run_ranks: RunRanks) -> None:
    run_ranks(2, comes_twice, fresh=True)


def comes_again_in_time() -> None:
    """From the fourth step on gradients of one layer come twice before their bucket is launched."""
    grad_buffer.LARGE_BYTES = 1  # type: ignore[attr-defined]
    plain, ours = pair(lambda: Checkpointed(use_reentrant=True))
    for step in range(5):
        for model in (plain, ours):
            model.zero_grad()
            model_of(model).calls = 2 if step > 2 else 1
            inputs, target = batch(step, dist.get_rank())
            nn.functional.mse_loss(model(inputs), target).backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    assert len(ours.layout.buckets) == 1


def looked_at() -> None:
    """A hook that only looks at this rank's gradient, registered after wrapping, sees it whatever its size."""
    grad_buffer.LARGE_BYTES = 1  # type: ignore[attr-defined]
    plain, ours = pair(Mlp)
    seen: list[Tensor] = []
    ours.module.head.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    for step in range(3):
        for model in (plain, ours):
            model.zero_grad()
            inputs, target = batch(step, dist.get_rank())
            nn.functional.mse_loss(model(inputs), target).backward()
        torch.testing.assert_close(seen[-1], plain.head.weight.grad)
        assert_grads(ours.module, mean_over_ranks(plain))
    assert len(seen) == 3


def test_hooks_see_a_large_gradient(run_ranks: RunRanks) -> None:
    run_ranks(2, looked_at, fresh=True)


def model_of(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, BucketDDP) else model


def test_a_large_gradient_that_comes_again_before_the_launch(run_ranks: RunRanks) -> None:
    run_ranks(3, comes_again_in_time, fresh=True)


def raised(bucket_cap_mb: float, guarded: bool, local: bool) -> None:
    """Backward raises half-way on all ranks, behind some gradients, or all of one bucket."""
    plain, ours = pair(Fragile, bucket_cap_mb)
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


@pytest.mark.parametrize(("guarded", "local"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("bucket_cap_mb", [ONE, 0.0002])
def test_what_came_before_an_exception(run_ranks: RunRanks, bucket_cap_mb: float, guarded: bool, local: bool) -> None:
    run_ranks(2, raised, bucket_cap_mb, guarded, local)


def raise_behind(ours: BucketDDP, loss: Tensor) -> None:
    with ours.backward_pass(torch.zeros((), requires_grad=True)):
        loss.backward(inputs=[ours.module.head.weight])
        raise ArithmeticError


def went_elsewhere() -> None:
    """Inside a guard, a backward that comes neither by its loss nor by an output, and then an exception."""
    plain, ours = pair(Mlp)
    warm_up(plain, ours)
    loss = ours.module(inputs_of(0)).square().mean()
    with pytest.raises(ArithmeticError):
        raise_behind(ours, loss)
    assert ours.module.head.weight.grad is None
    both([plain, ours], inputs_of(1), zero=False)
    assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_what_came_by_another_way_before_an_exception_in_a_guard(run_ranks: RunRanks) -> None:
    run_ranks(2, went_elsewhere)


def raised_on_one(guarded: bool) -> str:
    plain, ours = pair(Fragile)
    warm_up(plain, ours)
    failing = dist.get_rank() == 0
    loss = ours(inputs_of(0), failing).square().mean()
    with pytest.raises(ArithmeticError if failing else PeerFailureError) as error:
        run_backward(ours, loss, guarded)
    with pytest.raises(PeerFailureError):
        ours(inputs_of(0)).square().mean().backward()
    return str(error.value)


@pytest.mark.parametrize("guarded", [False, True])
def test_an_exception_on_one_rank(run_ranks: RunRanks, guarded: bool) -> None:
    _, message = run_ranks(2, raised_on_one, guarded, fresh=True)
    assert "rank 0" in message


def after_a_failure(rooted: bool) -> None:
    """A forward from before, whose backward follows one that raised on every rank."""
    plain, ours = pair(Fragile)
    warm_up(plain, ours)
    good = [model(inputs_of(0)).square().mean() for model in (plain, ours if rooted else ours.module)]
    bad = ours(inputs_of(1), True).square().mean()
    with pytest.raises(ArithmeticError):
        bad.backward()
    for loss in good:
        loss.backward()
    assert_grads(ours.module, mean_over_ranks(plain))
    both([plain, ours], inputs_of(2))
    assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


@pytest.mark.parametrize("rooted", [True, False])
def test_a_backward_that_follows_a_failed_one_is_whole(run_ranks: RunRanks, rooted: bool) -> None:
    run_ranks(2, after_a_failure, rooted)


def uncleared() -> None:
    _, ours = pair(Mlp, gradient_divide_by=1)
    both([ours], inputs_of(0))
    both([ours], inputs_of(1))
    name, _ = next(ours.module.named_parameters())
    with pytest.raises(RuntimeError, match="expected cleared gradients"):
        both([ours], inputs_of(2), only=[name], zero=False)


def test_gradients_that_were_not_cleared_are_refused_where_they_must_be(run_ranks: RunRanks) -> None:
    run_ranks(2, uncleared, fresh=True)


def no_own_batch() -> None:
    plain, ours = pair(Mlp)
    warm_up(plain, ours)
    ours.set_active_ranks([0])
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="expected a backward inside backward_pass"):
            both([ours], inputs_of(0), only=["head.weight"])


def test_a_rank_without_a_batch_of_its_own_must_not_contribute(run_ranks: RunRanks) -> None:
    run_ranks(2, no_own_batch, fresh=True)


def uneven() -> None:
    rank = dist.get_rank()
    plain, ours = pair(Mlp)
    ddp = DistributedDataParallel(plain)
    for model in (ddp, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(3 + 3 * rank):
                optimizer.zero_grad()
                model(inputs_of(step)).square().mean().backward()
                optimizer.step()
    for mine, reference in zip(ours.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, reference)
    ours.close()


def test_ranks_that_run_out_of_data(run_ranks: RunRanks) -> None:
    run_ranks(2, uneven)


def by_hand() -> None:
    plain, ours = pair(Branches)
    warm_up(plain, ours)
    for step in range(2):
        for take in ("left", "right"):
            with ours.no_sync():
                both([plain, ours], inputs_of(step), take, zero=take == "left")
        ours.start_grad_sync()
        assert ours.module.left.weight.grad is None
        ours.finish_grad_sync()
        assert_grads(ours.module, mean := mean_over_ranks(plain))
        ours.zero_grad_buffer()
        for name, param in plain.named_parameters():
            param.grad = None if mean[name] is None else torch.zeros_like(param)
        both([plain, ours], inputs_of(step), "left", zero=False)
        torch.testing.assert_close(ours.module.left.weight.grad, mean_over_ranks(plain)["left.weight"])
        assert not ours.module.right.weight.grad.any()
    ours.close()


def test_reductions_without_a_backward(run_ranks: RunRanks) -> None:
    run_ranks(2, by_hand)


def users_hooks() -> None:
    plain, ours = pair(Mlp)
    calls: list[str] = []
    handles = [
        param.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
        for name, param in ours.module.named_parameters()
    ]
    both([plain, ours], inputs_of(0))
    handles[0].remove()
    both([plain, ours], inputs_of(1))
    calls.clear()
    both([plain, ours], inputs_of(2))
    assert_grads(ours.module, mean_over_ranks(plain))
    names = [name for name, _ in ours.module.named_parameters()]
    assert sorted(calls) == sorted(names[1:])
    more = [
        param.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
        for name, param in ours.module.named_parameters()
    ]
    calls.clear()
    both([ours], inputs_of(2))
    assert sorted(calls) == sorted(names[1:] + names)
    for handle in more:
        handle.remove()
    first = ours.module.layers[0].weight
    first.register_post_accumulate_grad_hook(lambda _: calls.append(names[0]))
    ours.close()
    calls.clear()
    both([ours], inputs_of(3))
    assert sorted(calls) == sorted(names)
    assert is_free(ours.module)


def test_hooks_of_others_stay(run_ranks: RunRanks) -> None:
    run_ranks(2, users_hooks)


def copies() -> None:
    plain, ours = pair(Mlp)
    warm_up(plain, ours)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        for step in range(3):
            both([plain, other], inputs_of(step))
            assert_grads(other.module, mean_over_ranks(plain))
        other.close()
        both([plain, ours], inputs_of(3))
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_copies_learn_for_themselves(run_ranks: RunRanks) -> None:
    run_ranks(2, copies)


def dropped() -> None:
    """What a dropped wrapper's forward has returned is of concern to nobody."""
    plain, ours = pair(Mlp)
    warm_up(plain, ours)
    module, out = ours.module, ours(inputs_of(0))
    both([plain, ours], inputs_of(1))
    for param in module.parameters():
        param.grad.mul_(2)
    before = grads(module)
    del ours
    gc.collect()
    assert is_free(module)
    if dist.get_rank() == 0:
        out.square().mean().backward()
        assert not torch.equal(module.head.weight.grad, before["head.weight"])
    assert is_free(module)


def test_a_dropped_wrapper_reduces_nothing(run_ranks: RunRanks) -> None:
    run_ranks(2, dropped)


def by_another_way() -> tuple[int, float]:
    """A backward that comes neither by an output of forward nor by a guard, to one parameter after the other."""
    plain, ours = pair(Mlp)
    warm_up(plain, ours)
    before = ours.passes
    names = [name for name, _ in ours.module.named_parameters()]
    for name in names:
        for model in (plain, ours.module):
            model.zero_grad()
            (dict(model.named_parameters())[name] * (dist.get_rank() + 1)).square().sum().backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    return ours.passes - before - len(names), largest_difference_between_ranks(ours.module)


def test_a_backward_past_forward_and_guard(run_ranks: RunRanks) -> None:
    assert run_ranks(2, by_another_way) == [(0, 0.0)] * 2
