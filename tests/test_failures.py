"""Nothing hangs that could have been an error, and errors say who, what and what to do."""

import copy
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from lightning_bucketddp.reducer.reducer import PassState
from tests.inside import reducer_of
from tests.models import Branches, ConvBatchNorm, Fragile, Mlp, OutOfOrder, batch, loss_of
from tests.reference import assert_grads, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003


# -- backward raises ---------------------------------------------------------------------------------


def backward(ours: BucketDDP, loss: torch.Tensor, guarded: bool) -> None:
    with ours.backward_pass(loss) if guarded else nullcontext():
        loss.backward()


def all_ranks_raise(guarded: bool) -> None:
    torch.manual_seed(0)
    plain = Fragile()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=0.0001)
    rank = dist.get_rank()
    for step in range(5):
        inputs, target = batch(step, rank)
        plain.zero_grad()
        ours.zero_grad()
        if step in (0, 3):  # while the order is learned, and later
            loss = loss_of(ours(inputs, fail=True), target)
            with pytest.raises(ArithmeticError, match="no gradient today"):
                backward(ours, loss, guarded)
            if guarded or step == 3:
                ours(inputs)  # in plain PyTorch the next use finds out that all ranks failed
                assert all(param.grad is None for param in ours.parameters())
            ours.zero_grad()
        loss_of(plain(inputs), target).backward()
        loss_of(ours(inputs), target).backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


@pytest.mark.parametrize("guarded", [True, False], ids=["backward_pass", "plain"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_goes_on_when_backward_raised_on_every_rank(
    run_ranks: RunRanks, world_size: int, guarded: bool
) -> None:
    run_ranks(world_size, all_ranks_raise, guarded)


def failure_then_past_the_wrapper() -> None:
    torch.manual_seed(0)
    plain = Fragile()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=0.0001)
    rank = dist.get_rank()
    for step in range(3):
        inputs, target = batch(step, rank)
        with pytest.raises(ArithmeticError):
            loss_of(ours(inputs, fail=True), target).backward()
        assert all(param.grad is None for param in ours.parameters())
        plain.zero_grad()
        loss_of(plain(inputs), target).backward()
        loss_of(ours.module(inputs), target).backward()  # its first gradient is what finds the failed pass
        assert_grads(ours.module, mean_over_ranks(plain))
        ours.zero_grad()
    ours.close()


def test_the_first_gradient_after_a_failure_is_not_lost(run_ranks: RunRanks) -> None:
    run_ranks(2, failure_then_past_the_wrapper)


def raise_in_backward(grad: torch.Tensor) -> None:
    raise ArithmeticError("no gradient today")


def failure_beside_a_published_gradient(guarded: bool) -> int:
    ours = BucketDDP(Branches(), bucket_cap_mb=0.0001, find_unused_parameters=True)
    inputs, _ = batch(0, dist.get_rank())
    for _ in range(2):
        ours(inputs).square().mean().backward()
    ours.module.left.weight.grad.add_(dist.get_rank())  # on each rank another: what is put back is this rank's own
    before = ours.module.left.weight.grad.clone()
    inputs.requires_grad_().register_hook(raise_in_backward)
    loss = ours(inputs, "right").square().mean()
    kept = []
    ours.module.stem.bias.register_hook(lambda _: kept.extend(reducer_of(ours).storage._kept))
    with pytest.raises(ArithmeticError):
        backward(ours, loss, guarded)
    assert ours.module.right.weight.grad is None
    assert torch.equal(ours.module.left.weight.grad, before)
    ours(inputs)
    assert torch.equal(ours.module.left.weight.grad, before)
    ours.close()
    return len(kept)


@pytest.mark.parametrize("guarded", [True, False], ids=["backward_pass", "plain"])
def test_a_gradient_that_a_failed_pass_did_not_concern_is_put_back(run_ranks: RunRanks, guarded: bool) -> None:
    on_the_wire = run_ranks(2, failure_beside_a_published_gradient, guarded)
    assert all(on_the_wire) == guarded, "only a guard knows beforehand that the gradient will not come"


def one_rank_raises(guarded: bool, step_of_failure: int) -> tuple[str, str, float]:
    ours = BucketDDP(Fragile(), bucket_cap_mb=0.0001)
    rank = dist.get_rank()
    for step in range(step_of_failure):
        ours.zero_grad()
        inputs, target = batch(step, rank)
        backward(ours, loss_of(ours(inputs), target), guarded)
    inputs, target = batch(step_of_failure, rank)
    loss = loss_of(ours(inputs, fail=rank == 1), target)
    begin = time.monotonic()
    with pytest.raises((ArithmeticError, PeerFailureError)) as error:
        backward(ours, loss, guarded)
    elapsed = time.monotonic() - begin
    # Nobody may go on by mistake, least of all the rank that failed.
    with pytest.raises(PeerFailureError) as later:
        ours(batch(9, rank)[0])
    assert reducer_of(ours).state is PassState.FAILED
    return str(error.value), str(later.value), elapsed


@pytest.mark.parametrize("step_of_failure", [0, 3])
@pytest.mark.parametrize("guarded", [True, False], ids=["backward_pass", "plain"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_raising_in_backward_is_an_error_on_every_rank(
    run_ranks: RunRanks, world_size: int, guarded: bool, step_of_failure: int
) -> None:
    results = run_ranks(world_size, one_rank_raises, guarded, step_of_failure, fresh=True)
    for rank, (first, later, elapsed) in enumerate(results):
        assert elapsed < 8
        if rank == 1:
            assert first == "no gradient today"
        else:
            assert f"rank {rank}: pass {step_of_failure} cannot be completed: rank 1" in first
            assert ("ArithmeticError" in first and "no gradient today" in first) if guarded else "first." in first
        assert "rank 1" in later


def raised_in_a_local_pass() -> None:
    torch.manual_seed(0)
    plain = Fragile()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    rank = dist.get_rank()
    inputs, target = batch(0, rank)
    if rank == 1:  # nothing is on the wire: this concerns nobody else
        with pytest.raises(ArithmeticError), ours.no_sync():
            loss_of(ours(inputs, fail=True), target).backward()
        ours.zero_grad()
    loss_of(plain(inputs), target).backward()
    loss_of(ours(inputs), target).backward()
    assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_a_failed_local_pass_concerns_nobody_else(run_ranks: RunRanks) -> None:
    run_ranks(2, raised_in_a_local_pass)


def failure_outside_a_pass() -> tuple[str, float]:
    ours = BucketDDP(Mlp())
    rank = dist.get_rank()
    inputs, target = batch(0, rank)
    loss_of(ours(inputs), target).backward()
    if rank == 1:
        ours.publish_failure(OSError("disk full"))
        return "", 0.0
    begin = time.monotonic()
    with pytest.raises(PeerFailureError) as error:
        loss_of(ours(inputs), target).backward()
    return str(error.value), time.monotonic() - begin


def test_a_published_failure_wakes_the_ranks_that_wait(run_ranks: RunRanks) -> None:
    message, elapsed = run_ranks(2, failure_outside_a_pass, fresh=True)[0]
    assert "rank 0: pass 1 cannot be completed: rank 1 raised OSError: disk full" in message
    assert elapsed < 8


def a_rank_dies() -> str:
    ours = BucketDDP(Mlp(), bucket_cap_mb=TINY)
    rank = dist.get_rank()
    inputs, target = batch(0, rank)
    loss_of(ours(inputs), target).backward()
    if rank == 1:
        os._exit(1)
    with pytest.raises(PeerFailureError) as error:
        loss_of(ours(inputs), target).backward()
    return str(error.value)


def test_a_rank_that_is_gone_is_an_error_that_names_what_was_waited_for(run_ranks: RunRanks) -> None:
    message = run_ranks(2, a_rank_dies, fresh=True, may_exit=[1])[0]
    assert "rank 0: reducing the gradients of 'head." in message
    assert "failed in pass 1" in message


def interrupted_after_the_pass() -> str:
    """Rank 1 raises when the collectives of the pass are through: rank 0 learns of it in the next one."""
    ours = BucketDDP(Mlp())
    rank = dist.get_rank()
    inputs, target = batch(0, rank)
    loss = loss_of(ours(inputs), target)
    if rank == 1:
        reducer_of(ours)._end = interrupt
        with pytest.raises(KeyboardInterrupt), ours.backward_pass(loss):
            loss.backward()
        return ""
    with ours.backward_pass(loss):
        loss.backward()
    with pytest.raises(PeerFailureError) as error:
        loss_of(ours(inputs), target).backward()
    return str(error.value)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_rank_interrupted_after_a_pass_is_noticed_in_the_next(run_ranks: RunRanks) -> None:
    message = run_ranks(2, interrupted_after_the_pass, fresh=True)[0]
    assert "rank 0: pass 1 cannot be completed: rank 1 raised KeyboardInterrupt" in message


def a_skipped_backward() -> str:
    ours = BucketDDP(Mlp())
    rank = dist.get_rank()
    with pytest.raises(RankMismatchError) as error:
        run_steps(ours, skipped=1 if rank == 1 else None)
    return str(error.value)


def run_steps(ours: BucketDDP, skipped: int | None) -> None:
    for step in range(4):
        ours.begin_step()
        inputs, target = batch(step, dist.get_rank())
        loss = loss_of(ours(inputs), target)
        if step != skipped:
            with ours.backward_pass(loss):
                loss.backward()


def test_a_rank_that_skipped_a_backward_is_noticed(run_ranks: RunRanks) -> None:
    for rank, message in enumerate(run_ranks(2, a_skipped_backward, fresh=True)):
        assert f"rank {rank}: ranks met in pass 1 from different steps; this rank is in step {2 + rank}" in message


def the_group_of_a_failed_pass(waits_for: str) -> tuple[str, str]:
    """Rank 0 waits for a bucket, or rank 1 for rank 0's module buffers, when the other has failed."""
    module = ConvBatchNorm()
    ours = BucketDDP(module, timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    inputs, target = batch(0, rank)
    loss_of(ours(inputs), target).backward()
    if waits_for == "bucket":
        ours.synchronise_module_buffers()
    if rank == (1 if waits_for == "bucket" else 0):
        ours.publish_failure(OSError("disk full"))
    else:
        with pytest.raises(PeerFailureError, match="disk full"):
            loss_of(ours(inputs), target).backward()
    ours.close()
    with pytest.raises(RuntimeError) as error:
        BucketDDP(module, timeout=timedelta(seconds=20))
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize("waits_for", ["bucket", "module buffers"])
def test_a_group_with_collectives_left_behind_is_refused_on_every_rank(run_ranks: RunRanks, waits_for: str) -> None:
    waited, failed = (0, 1) if waits_for == "bucket" else (1, 0)
    results = run_ranks(2, the_group_of_a_failed_pass, waits_for, fresh=True)
    kind, message = results[waited]
    assert kind == "RuntimeError"
    assert "disk full" in message
    kind, message = results[failed]
    assert kind == "PeerFailureError"
    assert f"rank {failed}: rank {waited} cannot go on" in message
    assert "start the processes anew" in message


def late_gradient() -> str:
    """The block is called once in the pass that teaches the order, and twice later."""
    from tests.models import Checkpointed

    module = Checkpointed(use_reentrant=True, calls=1)
    ours = BucketDDP(module, bucket_cap_mb=0.0001)
    inputs, target = batch(0, dist.get_rank())
    loss_of(ours(inputs), target).backward()
    module.calls = 2
    with pytest.raises(RuntimeError, match="came after its bucket") as error:
        loss_of(ours(inputs), target).backward()
    return str(error.value)


def test_a_gradient_that_comes_too_late_is_named(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, late_gradient, fresh=True):
        assert "'block.0." in message
        assert "use_reentrant=False" in message


# -- setting up --------------------------------------------------------------------------------------


def build_differently(kind: str) -> tuple[str, float]:
    rank = dist.get_rank()
    last = rank == dist.get_world_size() - 1
    module: nn.Module = Mlp()
    options: dict[str, Any] = {}
    if kind == "shape" and last:
        module = Mlp(width=17)
    elif kind == "order" and last:
        module = nn.ModuleDict({"head": module.head, "layers": module.layers})
    elif kind == "dtype" and last:
        module.head.bias = nn.Parameter(module.head.bias.detach().double())
    elif kind == "strides":
        module = nn.Conv2d(2, 3, 2)
        if last:
            module = module.to(memory_format=torch.channels_last)
    elif kind == "frozen" and last:
        module.head.bias.requires_grad_(False)
    elif kind == "missing" and last:
        module.head = nn.Linear(16, 4, bias=False)
    elif kind == "buffer":
        module = ConvBatchNorm()
        if last:
            module.norm.register_buffer("extra", torch.zeros(3))
    elif kind == "option" and last:
        options = {"bucket_cap_mb": 3.0}
    begin = time.monotonic()
    with pytest.raises(RankMismatchError) as error:
        BucketDDP(module, **options)
    return str(error.value), time.monotonic() - begin


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("shape", "parameter 'layers.0.weight': rank 0 has shape (16, 8), torch.float32, strides (8, 1), rank {} has"),
        (
            "order",
            "rank 0 has parameter 'layers.0.weight' (shape (16, 8), torch.float32, strides (8, 1)) where rank {}",
        ),
        (
            "dtype",
            "parameter 'head.bias': rank 0 has shape (4,), torch.float32, strides (1,), rank {} has shape (4,), ",
        ),
        ("strides", "parameter 'weight': rank 0 has shape (3, 2, 2, 2), torch.float32, strides (8, 4, 2, 1), rank {}"),
        (
            "frozen",
            "parameter 'head.bias': rank 0 has shape (4,), torch.float32, strides (1,), rank {} has shape (4,), ",
        ),
        ("missing", "only rank 0 has parameter 'head.bias' (shape (4,), torch.float32, strides (1,))"),
        ("buffer", "only rank {} has module buffer 'norm.extra' (shape (3,), torch.float32)"),
        ("option", "option bucket_cap_mb: rank 0 has None, rank {} has 3.0"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_built_differently(run_ranks: RunRanks, world_size: int, kind: str, expected: str) -> None:
    for rank, (message, elapsed) in enumerate(run_ranks(world_size, build_differently, kind)):
        assert message.startswith(f"rank {rank}: ranks disagree on parameters, module buffers and options: ")
        assert expected.format(world_size - 1) in message
        assert elapsed < 5


def one_rank_cannot_wrap() -> str:
    rank = dist.get_rank()
    begin = time.monotonic()
    with pytest.raises((ValueError, PeerFailureError)) as error:
        BucketDDP(Mlp().requires_grad_(rank == 0))
    assert time.monotonic() - begin < 5
    module = Mlp()
    again = BucketDDP(module)  # the failed attempt leaves nothing that the next could stumble over
    inputs, target = batch(0, rank)
    loss_of(again(inputs), target).backward()
    again.close()
    return str(error.value)


def test_an_error_in_wrapping_reaches_the_other_ranks(run_ranks: RunRanks) -> None:
    message0, message1 = run_ranks(2, one_rank_cannot_wrap)
    assert "rank 0: rank 1 cannot go on with parameters, module buffers and options: expected at least" in message0
    assert message1.startswith("expected at least one parameter that requires grad")


def silent_rank() -> str:
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(RuntimeError) as error:
        BucketDDP(Mlp(), timeout=timedelta(seconds=1))
    return str(error.value)


def test_a_rank_that_never_wraps_is_named(run_ranks: RunRanks) -> None:
    rank0, _, rank2 = run_ranks(3, silent_rank, fresh=True)
    assert "rank 0: waited 1 s" in rank0
    assert "nothing came from rank(s) [1]" in rank0
    assert "nothing came from rank(s) [1]" in rank2


def bad_on_rank_1(module: Any, options: dict[str, Any]) -> str:
    mine = dist.get_rank() == 1
    with pytest.raises(TypeError if mine else PeerFailureError) as error:
        BucketDDP(module if mine else Mlp(), **(options if mine else {}))
    return str(error.value)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Mlp(), {"timeout": -5}, "expected timeout to be None or a positive timedelta, found -5"),
        (Mlp(), {"overlap": "no"}, "expected overlap to be True or False, found 'no'"),
        (Mlp(), {"overlaps": True}, "unexpected keyword argument 'overlaps'"),
        ("x", {}, "expected module to be an nn.Module, found 'x'"),
    ],
    ids=["timeout", "overlap", "unknown", "module"],
)
def test_every_rank_hears_of_a_bad_option(
    run_ranks: RunRanks, module: Any, options: dict[str, Any], message: str
) -> None:
    for found in run_ranks(2, bad_on_rank_1, module, options):
        assert message in found


def bad_arguments() -> None:
    with pytest.raises(ValueError, match="at least one parameter that requires grad"):
        BucketDDP(Mlp().requires_grad_(False))
    with pytest.raises(ValueError, match="number of MiB from 0, found -1"):
        BucketDDP(Mlp(), bucket_cap_mb=-1)
    with pytest.raises(ValueError, match="expected module_buffers to be None, "):
        BucketDDP(Mlp(), module_buffers="sum")
    with pytest.raises(ValueError, match=r"one type of device that holds values, found \['meta'\]"):
        BucketDDP(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="'weight' is uninitialised"):
        BucketDDP(nn.LazyLinear(2))
    module = Mlp()
    optimizer = torch.optim.SGD([module.head.bias], lr=0.1)
    module.head.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(ValueError, match=r"'head\.bias' has a post-accumulate-grad hook") as error:
        BucketDDP(module)
    assert "on_after_backward" in str(error.value)
    assert "registered after" not in str(error.value), "`.grad` may be None there"
    module = Mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, [module.head.bias], {"lr": 0.1})
    with pytest.raises(ValueError, match=r"'head\.bias' has an optimizer that steps during backward .* after backward"):
        BucketDDP(module)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_bad_arguments_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(1, bad_arguments)


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        BucketDDP(OutOfOrder())
