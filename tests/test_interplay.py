"""Features met together: several wrappers, copies, options and calls by hand in one training loop."""

import copy
import io
import pickle
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from lightning_bucketddp.comm import collectives
from tests.models import Branches, Fragile, Lookup, Mlp, RaiseInBackward, batch, tokens
from tests.reference import assert_grads, grads, largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003
BF16 = torch.bfloat16
SOON = timedelta(seconds=20)
AT_ONCE = 5.0
"""Seconds: far less than a rank waits for one that does not come."""


def wrapped(model: Callable[[], nn.Module] = Mlp, **options: Any) -> tuple[nn.Module, BucketDDP]:
    """A module that is left alone, and a wrapper of the same."""
    torch.manual_seed(1)
    plain = model()
    return plain, BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY, timeout=SOON, **options)


def summed(model: nn.Module, step: int, **options: Any) -> Tensor:
    """A loss that is a sum over this rank's batch."""
    return model(batch(step, dist.get_rank())[0], **options).square().sum()


def divided_sum(plain: nn.Module, divisor: float) -> dict[str, Tensor | None]:
    """What ``gradient_divide_by`` makes of the gradients that the ranks have."""
    factor = dist.get_world_size() / divisor
    return {name: None if mean is None else mean * factor for name, mean in mean_over_ranks(plain).items()}


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Counts what is started, by name."""
    names = ["all_reduce", "all_to_all_single", "all_gather_into_tensor", "broadcast"]
    before = {name: getattr(collectives.dist, name) for name in names}
    count: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            count[name] += 1
            return before[name](*args, **options)

        return run

    for name in names:
        setattr(collectives.dist, name, counting(name))
    try:
        yield count
    finally:
        for name in names:
            setattr(collectives.dist, name, before[name])


# -- several wrappers --------------------------------------------------------------------------------


class Fork(nn.Module):
    """Two layers side by side, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return self.always(x) + (self.sometimes(x) if both else 0)


def two_wrappers(first_made_is_called_first: bool, first_called_branches: bool, caps: tuple[float, float]) -> None:
    torch.manual_seed(1)
    plain = [Fork(), Fork()]
    ours = [BucketDDP(copy.deepcopy(p), bucket_cap_mb=cap, timeout=SOON) for p, cap in zip(plain, caps, strict=True)]
    rank = dist.get_rank()
    for step in range(4):
        both = step == 0 or rank == 0
        inputs, _ = batch(step, rank)
        for models in (plain, ours):
            for model in models:
                model.zero_grad()
            first, second = models if first_made_is_called_first else reversed(models)
            hidden = first(inputs, both or not first_called_branches)
            second(hidden, both or first_called_branches).square().sum().backward()
        for model, reference in zip(ours, plain, strict=True):
            assert_grads(model.module, mean_over_ranks(reference))
    for model in ours:
        model.close()


@pytest.mark.parametrize("caps", [(25.0, 25.0), (0.0001, 25.0)], ids=["equal", "unequal"])
@pytest.mark.parametrize("first_called_branches", [True, False], ids=["first_branches", "second_branches"])
@pytest.mark.parametrize("first_made_is_called_first", [True, False], ids=["in_order", "reversed"])
def test_two_wrappers_in_one_backward_with_a_branch_that_one_rank_takes(
    run_ranks: RunRanks, first_made_is_called_first: bool, first_called_branches: bool, caps: tuple[float, float]
) -> None:
    run_ranks(2, two_wrappers, first_made_is_called_first, first_called_branches, caps)


# -- state dicts -------------------------------------------------------------------------------------


class Outer(nn.Module):
    """A module of which one part may be wrapped."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.net = wrap(Fork())
        self.head = nn.Linear(8, 1)


class OwnModule(nn.Module):
    """Has a child that is called ``module``, and perhaps no other."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.module = nn.Linear(8, 8)
        if not alone:
            self.head = nn.Linear(8, 4)


def assert_loads(model: nn.Module, state: dict[str, Tensor], names: dict[str, Tensor]) -> None:
    """Asserts that other values under the names of ``state`` arrive, under ``names``."""
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    loaded = model.state_dict()
    assert list(loaded) == list(names)
    for (name, value), before in zip(loaded.items(), [v.clone() for v in state.values()], strict=True):
        torch.testing.assert_close(value, before + 1, msg=lambda m, n=name: f"{n}: {m}")


def nested_state() -> None:
    torch.manual_seed(1)
    expected = Outer(lambda module: module).state_dict()
    outer = Outer(BucketDDP)
    for model in (outer, copy.deepcopy(outer), copy.deepcopy(copy.deepcopy(outer))):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert list(state) == list(expected)
        assert_loads(model, state, expected)
        assert_loads(model, expected, expected)
    outer.net.close()


def test_a_module_with_a_wrapper_inside_saves_and_loads_as_without(run_ranks: RunRanks) -> None:
    run_ranks(2, nested_state)


def state_of_torch_ddp() -> None:
    model = Fork()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    torchs = {name: value.clone() for name, value in DistributedDataParallel(model).state_dict().items()}
    assert all(name.startswith("module.") for name in torchs)
    ours = BucketDDP(copy.deepcopy(model))
    assert_loads(ours, torchs, plain)
    assert_loads(ours, plain, plain)
    with pytest.raises(RuntimeError, match="nonsense"):
        ours.load_state_dict({**plain, "nonsense": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        ours.load_state_dict({name: value for name, value in torchs.items() if not name.endswith("bias")})
    ours.close()
    for model in (OwnModule(alone=False), OwnModule(alone=True)):
        plain = {name: value.clone() for name, value in model.state_dict().items()}
        ours = BucketDDP(model)
        assert_loads(ours, plain, plain)
        ours.close()


def test_state_dicts_of_torch_ddp_are_loaded(run_ranks: RunRanks) -> None:
    run_ranks(2, state_of_torch_ddp)


# -- copies ------------------------------------------------------------------------------------------


def copies_on_one_rank(closed: bool) -> float:
    """Rank 1 does nothing, so that there is nobody to meet by chance."""
    plain, ours = wrapped()
    inputs, _ = batch(0, dist.get_rank())
    expected = plain(inputs)
    if closed:
        ours.close()
    begun = time.monotonic()
    if dist.get_rank() == 0:
        for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            with torch.no_grad():
                torch.testing.assert_close(copied(inputs), expected)
            assert copied.passes == 0
            assert copied.last_pass() is None
            copied.close()
            torch.testing.assert_close(copied(inputs), expected)
            copied(inputs).sum().backward()
        copied = copy.deepcopy(ours)
        if closed:
            torch.testing.assert_close(copied(inputs), expected)
        copied.close()
    elapsed = time.monotonic() - begun
    dist.barrier()
    ours.close()
    return elapsed


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_a_copy_on_one_rank_waits_for_nobody_until_it_trains(run_ranks: RunRanks, closed: bool) -> None:
    assert max(run_ranks(2, copies_on_one_rank, closed)) < AT_ONCE


def questions_about_attributes() -> float:
    plain, ours = wrapped()
    copied = copy.deepcopy(ours)
    assert vars(ours).keys() - vars(copied).keys() == {"_runtime"}, "all that belongs to this process"
    begun = time.monotonic()
    if dist.get_rank() == 0:
        before, before_copied = dict(vars(ours)), dict(vars(copied))
        hasattr(ours, "_runtime")
        assert not hasattr(ours, "nonsense")
        assert not hasattr(copied, "nonsense")
        assert vars(ours) == before
        assert vars(copied) == before_copied
    elapsed = time.monotonic() - begun
    for model in (plain, ours):
        summed(model, 0).backward()
    assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()
    return elapsed


def test_asking_for_an_attribute_starts_nothing(run_ranks: RunRanks) -> None:
    assert max(run_ranks(2, questions_about_attributes)) < AT_ONCE


def copied_hooks(how: str) -> None:
    plain, ours = wrapped()
    ours.register_comm_hook(dist.group.WORLD, allreduce_hook)
    copied = copy.deepcopy(ours) if how == "copy" else pickle.loads(pickle.dumps(ours))
    for model in (plain, copied):
        summed(model, 0).backward()
    assert_grads(copied.module, mean_over_ranks(plain))
    with pytest.raises(RuntimeError, match="register_comm_hook can only be called once"):
        copied.register_comm_hook(None, noop_hook)
    copied.close()
    ours.close()
    _, ours = wrapped()
    ours.register_comm_hook(dist.group.WORLD, noop_hook)
    copied = copy.deepcopy(ours) if how == "copy" else pickle.loads(pickle.dumps(ours))
    summed(copied, 0).backward()
    assert_grads(copied.module, grads(plain))  # its own, not the mean
    copied.close()
    ours.close()


@pytest.mark.parametrize("how", ["copy", "pickle"])
def test_a_copy_keeps_a_hook_whose_state_is_the_group(run_ranks: RunRanks, how: str) -> None:
    run_ranks(2, copied_hooks, how)


def pickle_sizes() -> tuple[int, int]:
    torch.manual_seed(1)
    plain = nn.Sequential(*(nn.Linear(200, 200) for _ in range(10))).to(BF16)
    ours = BucketDDP(copy.deepcopy(plain), grad_dtype=torch.float32)
    inputs = torch.ones(2, 200, dtype=BF16) * (1 + dist.get_rank())
    ours(inputs).sum().backward()
    ours.zero_grad()
    size = len(pickle.dumps(ours))
    saved = io.BytesIO()
    torch.save(ours.module, saved)
    for param in plain.parameters():
        param.grad_dtype = torch.float32
    for model in (plain, ours):
        model(inputs).sum().backward()
    assert_grads(ours.module, mean_over_ranks(plain))
    for param in ours.parameters():
        assert param.main_grad is param.grad
    ours.close()
    plain.zero_grad()
    return max(size, len(saved.getvalue())), len(pickle.dumps(plain))


def test_pickles_leave_gradient_buffers_out(run_ranks: RunRanks) -> None:
    for ours, plain in run_ranks(2, pickle_sizes):
        assert ours < 1.5 * plain


# -- hooks -------------------------------------------------------------------------------------------


def hook_with_a_counter() -> int:
    def hook(state: Any, bucket: Any) -> Any:
        hook.calls += 1
        return allreduce_hook(None, bucket)

    hook.calls = 0
    plain, ours = wrapped()
    ours.register_comm_hook(None, hook)
    for model in (plain, ours):
        summed(model, 0).backward()
    assert_grads(ours.module, mean_over_ranks(plain))
    buckets = len(ours.last_pass().buckets)
    ours.close()
    return hook.calls - buckets


def test_a_hook_may_refer_to_itself(run_ranks: RunRanks) -> None:
    assert run_ranks(2, hook_with_a_counter) == [0, 0]


def no_hook_on_one_rank() -> tuple[str, str, float]:
    _, ours = wrapped()
    begun = time.monotonic()
    with pytest.raises((TypeError, PeerFailureError)) as caught:
        ours.register_comm_hook(None, 3 if dist.get_rank() == 1 else allreduce_hook)
    elapsed = time.monotonic() - begun
    ours.close()
    return caught.type.__name__, str(caught.value), elapsed


def test_a_hook_that_is_none_on_one_rank_is_an_error_on_all(run_ranks: RunRanks) -> None:
    (other, reason, elapsed), (mine, _, _) = run_ranks(2, no_hook_on_one_rank)
    assert mine == "TypeError"
    assert other == "PeerFailureError"
    assert "rank 1" in reason
    assert "callable" in reason
    assert elapsed < AT_ONCE


# -- parameters that are left alone ------------------------------------------------------------------


def replaced_while_ignored() -> None:
    torch.manual_seed(1)
    module = Fork()
    module._ddp_params_and_buffers_to_ignore = ["sometimes.weight", "sometimes.bias"]
    ours = BucketDDP(module)
    module.sometimes = nn.Linear(8, 8)
    plain = copy.deepcopy(module)
    for step in range(3):
        for model in (plain, ours):
            model.zero_grad()
            summed(model, step).backward()
        means = mean_over_ranks(plain)
        local = grads(plain)
        assert_grads(module, {n: local[n] if n.startswith("sometimes") else means[n] for n in means})
    ours.close()


def test_an_ignored_part_may_be_replaced(run_ranks: RunRanks) -> None:
    run_ranks(2, replaced_while_ignored)


def one_name_ignored(name: str) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    module[2].weight = module[0].weight
    plain = copy.deepcopy(module)
    module._ddp_params_and_buffers_to_ignore = [name]
    ours = BucketDDP(module)
    for model in (plain, ours):
        summed(model, 0).backward()
    assert_grads(module, mean_over_ranks(plain))
    ours.close()


@pytest.mark.parametrize("name", ["0.weight", "2.weight"])
def test_a_shared_weight_is_reduced_unless_all_its_names_are_ignored(run_ranks: RunRanks, name: str) -> None:
    run_ranks(2, one_name_ignored, name)


# -- join --------------------------------------------------------------------------------------------


def error_inside_join() -> str | None:
    group = dist.new_group(timeout=timedelta(seconds=3))  # for how long the other rank waits inside torch's Join
    ours = BucketDDP(Mlp(), process_group=group, timeout=SOON)
    rank = dist.get_rank()
    try:
        with ours.join():
            for step in range(2 + 3 * rank):
                if step == 3:
                    raise ValueError("no more of this")
                summed(ours, step).backward()
    except Exception as error:
        return repr(error)
    return None


def test_an_error_inside_join_is_what_the_rank_raises(run_ranks: RunRanks) -> None:
    assert run_ranks(2, error_inside_join, fresh=True)[1] == "ValueError('no more of this')"


def masters_after_join() -> float:
    """Ranks with fewer batches take over masters too: parameters are the same ever after."""
    plain, ours = wrapped(lambda: Mlp().to(BF16), grad_dtype=torch.float32)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    rank = dist.get_rank()

    def train_one(step: int) -> None:
        optimizer.zero_grad()
        ours(batch(step, rank)[0].to(BF16)).square().mean().backward()
        optimizer.step()

    with ours.join():
        for step in range(6 if rank == 0 else 3):
            train_one(step)
    assert largest_difference_between_ranks(ours.module) == 0
    for step in range(10, 40):
        train_one(step)
    assert any(not torch.equal(p, q) for p, q in zip(plain.parameters(), ours.parameters(), strict=True))
    difference = largest_difference_between_ranks(ours.module)
    ours.close()
    return difference


def test_masters_are_the_same_on_all_ranks_after_join(run_ranks: RunRanks) -> None:
    assert run_ranks(2, masters_after_join) == [0.0, 0.0]


def tokens_of_ranks_out_of_data() -> int:
    """Rank 1 has data for one local pass alone; what it counted there is dropped with its gradients."""
    plain, ours = wrapped(gradient_divide_by="tokens")
    compared = 0
    with ours.join():
        for step in range(4 if dist.get_rank() == 0 else 1):
            if step % 2 == 0:
                ours.zero_grad()
                plain.zero_grad()
            summed(plain, step).backward()
            with ours.no_sync() if step % 2 == 0 else nullcontext():
                ours.count_tokens(10)
                summed(ours, step).backward()
            if step % 2:
                assert_grads(ours.module, {n: g / 20 for n, g in grads(plain).items()})
                compared += 1
    ours.close()
    return compared


def test_tokens_of_a_rank_out_of_data_do_not_count(run_ranks: RunRanks) -> None:
    assert run_ranks(2, tokens_of_ranks_out_of_data) == [2, 0]


# -- tokens ------------------------------------------------------------------------------------------


def tokens_of_dropped_gradients(how: str, guarded: bool) -> None:
    plain, ours = wrapped(gradient_divide_by="tokens")
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    clear = optimizer.zero_grad if how == "optimizer" else getattr(ours, how)
    for step in range(3):
        clear()
        plain.zero_grad()
        with ours.no_sync():
            ours.count_tokens(10)
            summed(ours, 10 + step).backward()
        clear()
        ours.count_tokens(7 + dist.get_rank())
        loss = summed(ours, step)
        with ours.backward_pass(loss) if guarded else nullcontext():
            loss.backward()
        summed(plain, step).backward()
        assert_grads(ours.module, divided_sum(plain, 15))
    ours.close()


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize("how", ["zero_grad", "zero_grad_buffer", "optimizer"])
def test_tokens_are_dropped_with_the_gradients_that_they_belong_to(
    run_ranks: RunRanks, how: str, guarded: bool
) -> None:
    run_ranks(2, tokens_of_dropped_gradients, how, guarded)


def tokens_of_a_broken_backward(guarded: bool) -> None:
    plain, ours = wrapped(Fragile, gradient_divide_by="tokens")
    for step in range(3):
        ours.zero_grad()
        plain.zero_grad()
        if step:
            ours.count_tokens(5)
            loss = summed(ours, 0, fail=True)
            with pytest.raises(ArithmeticError), ours.backward_pass(loss) if guarded else nullcontext():
                loss.backward()
            ours.zero_grad()
        ours.count_tokens(5)
        for model in (plain, ours):
            summed(model, step).backward()
        assert_grads(ours.module, divided_sum(plain, 10))
    ours.close()


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
def test_tokens_of_a_backward_that_raised_do_not_count(run_ranks: RunRanks, guarded: bool) -> None:
    run_ranks(2, tokens_of_a_broken_backward, guarded)


def kinds_of_token_counts() -> None:
    plain, ours = wrapped(gradient_divide_by="tokens")
    for step, five in enumerate((5, 5.0, torch.tensor(5), torch.tensor(5.0))):
        ours.zero_grad()
        plain.zero_grad()
        for fraction in (2.5, torch.tensor(2.75)):
            with pytest.raises(ValueError, match="tokens"):
                ours.count_tokens(fraction)
        ours.count_tokens(five)
        for model in (plain, ours):
            summed(model, step).backward()
        assert_grads(ours.module, divided_sum(plain, 10))
    ours.close()


def test_token_counts_are_whole_numbers_of_any_type(run_ranks: RunRanks) -> None:
    run_ranks(2, kinds_of_token_counts)


def tokens_under_a_default_dtype() -> None:
    plain, ours = wrapped(lambda: Mlp(depth=1).double(), gradient_divide_by="tokens")
    inputs = batch(0, dist.get_rank())[0].double()
    before = torch.get_default_dtype()
    for dtype in (torch.float32, BF16):
        ours.zero_grad()
        plain.zero_grad()
        torch.set_default_dtype(dtype)
        try:
            ours.count_tokens(1003)
            for model in (plain, ours):
                model(inputs).square().sum().backward()
        finally:
            torch.set_default_dtype(before)
        for (name, param), expected in zip(
            ours.module.named_parameters(), divided_sum(plain, 2006).values(), strict=True
        ):
            torch.testing.assert_close(
                param.grad, expected, rtol=1e-12, atol=0, msg=lambda m, n=f"{dtype}, {name}": f"{n}: {m}"
            )
    ours.close()


def test_division_by_tokens_is_exact_whatever_the_default_dtype(run_ranks: RunRanks) -> None:
    run_ranks(2, tokens_under_a_default_dtype)


def error_on_one_rank(what: str) -> tuple[str, str, float]:
    """What each rank raises, and after how long."""
    _, ours = wrapped(gradient_divide_by="tokens" if what == "count" else 1)
    rank = dist.get_rank()
    if what == "count" and rank == 0:
        ours.count_tokens(3)
    if what == "clear":
        summed(ours, 0).backward()
        if rank == 0:
            ours.zero_grad()
    begun = time.monotonic()
    try:
        summed(ours, 1).backward()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "nothing", "", time.monotonic() - begun


def test_a_rank_that_forgets_to_count_tokens_is_named_on_all(run_ranks: RunRanks) -> None:
    (other, reason, elapsed), (mine, message, _) = run_ranks(2, error_on_one_rank, "count", fresh=True)
    assert mine == "RuntimeError"
    assert "count_tokens" in message
    assert other == "PeerFailureError"
    assert "rank 1" in reason
    assert "count_tokens" in reason
    assert elapsed < 10


def test_a_rank_that_forgets_to_clear_gradients_is_named_on_all(run_ranks: RunRanks) -> None:
    (other, reason, elapsed), (mine, message, _) = run_ranks(2, error_on_one_rank, "clear", fresh=True)
    assert mine == "RuntimeError"
    assert "cleared" in message
    assert any(f"'{name}'" in message for name, _ in Mlp().named_parameters())
    assert other == "PeerFailureError"
    assert "rank 1" in reason
    assert "cleared" in reason
    assert elapsed < 10


# -- reductions by hand ------------------------------------------------------------------------------

PLACES = pytest.mark.parametrize(
    "options", [{}, {"use_contiguous_buffers": False}], ids=["contiguous", "where autograd put them"]
)


def reduced_twice(options: dict[str, Any], divisor: int | str) -> None:
    plain, ours = wrapped(gradient_divide_by=divisor, **options)
    for step in range(2):
        ours.zero_grad()
        plain.zero_grad()
        if divisor == "tokens":
            ours.count_tokens(3)
        for model in (plain, ours):
            summed(model, step).backward()
        if divisor == "tokens":
            ours.count_tokens(3)
        with pytest.raises(RuntimeError, match="expected cleared gradients"):
            ours.allreduce_gradients()
        assert_grads(ours.module, divided_sum(plain, 6 if divisor == "tokens" else 1))
    ours.close()


@PLACES
@pytest.mark.parametrize("divisor", [1, "tokens"])
def test_a_sum_is_not_reduced_again_by_hand(run_ranks: RunRanks, options: dict[str, Any], divisor: int | str) -> None:
    run_ranks(2, reduced_twice, options, divisor)


def unfrozen_with_a_gradient() -> list[float]:
    _, ours = wrapped()
    layer = ours.module.layers[1]
    ours.close()
    layer.weight.requires_grad_(False)
    ours = BucketDDP(ours.module)
    summed(ours, 0).backward()
    layer.weight.requires_grad_(True)
    layer.weight.grad = torch.full_like(layer.weight, float(dist.get_rank()))
    ours.allreduce_gradients()
    found = sorted(set(layer.weight.grad.flatten().tolist()))
    ours.close()
    return found


def test_a_gradient_set_at_unfreezing_is_averaged_by_hand(run_ranks: RunRanks) -> None:
    assert run_ranks(2, unfrozen_with_a_gradient) == [[0.5], [0.5]]


def zeroed_after_unfreezing() -> None:
    torch.manual_seed(1)
    plain = Mlp()
    module = copy.deepcopy(plain)
    weight = module.layers[1].weight.requires_grad_(False)
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    summed(ours, 0).backward()
    ours.zero_grad_buffer()
    weight.requires_grad_(True)
    with ours.no_sync():
        summed(ours, 1).backward()
    assert weight.grad is not None
    ours.zero_grad_buffer()
    assert weight.grad is None or not weight.grad.any()
    for model in (plain, ours):
        summed(model, 2).backward()
    assert_grads(module, mean_over_ranks(plain))
    ours.close()


def test_zeroing_reaches_what_was_unfrozen_in_a_local_pass(run_ranks: RunRanks) -> None:
    run_ranks(2, zeroed_after_unfreezing)


def zeroed_in_flight(options: dict[str, Any]) -> None:
    plain, ours = wrapped(**options)
    for step in range(2):
        ours.zero_grad()
        plain.zero_grad()
        with ours.no_sync():
            for model in (plain, ours):
                summed(model, step).backward()
        ours.start_grad_sync()
        with pytest.raises(RuntimeError, match="finish_grad_sync"):
            ours.zero_grad_buffer()
        ours.finish_grad_sync()
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


@PLACES
def test_gradients_on_their_way_are_not_zeroed(run_ranks: RunRanks, options: dict[str, Any]) -> None:
    run_ranks(2, zeroed_in_flight, options)


def backward_in_flight(local: bool) -> None:
    _, ours = wrapped()
    with ours.no_sync():
        summed(ours, 0).backward()
    ours.start_grad_sync()
    with pytest.raises(RuntimeError, match="finish_grad_sync"), ours.no_sync() if local else nullcontext():
        summed(ours, 1).backward()
    with suppress(RuntimeError):
        ours.finish_grad_sync()
    ours.close()


@pytest.mark.parametrize("local", [True, False], ids=["local", "synchronised"])
def test_a_backward_before_the_end_of_a_reduction_says_what_is_missing(run_ranks: RunRanks, local: bool) -> None:
    run_ranks(2, backward_in_flight, local)


def gradient_of_inputs_in_flight(options: dict[str, Any]) -> None:
    plain, ours = wrapped(**options)
    for step in range(3):
        ours.zero_grad()
        plain.zero_grad()
        with ours.no_sync():
            for model in (plain, ours):
                summed(model, step).backward()
        ours.start_grad_sync()
        inputs = batch(9, dist.get_rank())[0].requires_grad_()
        found, expected = (torch.autograd.grad(model(inputs).sum(), inputs)[0] for model in (ours, plain))
        torch.testing.assert_close(found, expected)
        ours.finish_grad_sync()
        assert_grads(ours.module, mean_over_ranks(plain))
        assert ours.passes == step + 1
    ours.close()


@PLACES
def test_gradients_of_inputs_do_not_disturb_a_reduction(run_ranks: RunRanks, options: dict[str, Any]) -> None:
    run_ranks(2, gradient_of_inputs_in_flight, options)


def gradient_penalty(divisor: str | int, accumulate: bool) -> None:
    plain, ours = wrapped(gradient_divide_by=divisor)
    rank = dist.get_rank()

    def penalised(model: nn.Module, step: int) -> Tensor:
        inputs = batch(step, rank)[0].requires_grad_()
        output = model(inputs).square().sum()
        (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
        return output + slope.square().sum()

    for step in range(3):
        ours.zero_grad()
        plain.zero_grad()
        for micro in range(2 if accumulate else 1):
            if divisor == "tokens":
                ours.count_tokens(4)
            with ours.no_sync() if accumulate and micro == 0 else nullcontext():
                loss = penalised(ours, 2 * step + micro)
                assert ours.passes == step
                loss.backward()
            penalised(plain, 2 * step + micro).backward()
        assert ours.passes == step + 1
        total = {"world_size": 2, 1: 1, "tokens": 16 if accumulate else 8}[divisor]
        assert_grads(ours.module, divided_sum(plain, total))
    ours.close()


@pytest.mark.parametrize("accumulate", [False, True], ids=["at_once", "accumulated"])
@pytest.mark.parametrize("divisor", ["world_size", 1, "tokens"])
def test_a_gradient_penalty_opens_no_pass(run_ranks: RunRanks, divisor: str | int, accumulate: bool) -> None:
    run_ranks(2, gradient_penalty, divisor, accumulate)


class Deep(nn.Module):
    """A chain whose backward raises at a depth of choice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor, fail_at: int | None = None) -> Tensor:
        for depth, layer in enumerate(self.layers):
            x = layer(x)
            if depth == fail_at:
                x = RaiseInBackward.apply(x)
        return x


def broadcast_after_a_failure(depths: list[int]) -> float:
    plain, ours = wrapped(Deep)
    rank = dist.get_rank()
    for step in range(3):
        ours.zero_grad()
        summed(ours, step).backward()
    ours.zero_grad()
    with pytest.raises(ArithmeticError):
        summed(ours, 3, fail_at=depths[rank]).backward()
    with torch.no_grad():
        for model in (plain, ours.module):
            model.layers[0].weight.fill_((rank if model is not plain else 0) + 0.5)
    ours.broadcast_params()
    ours.zero_grad()
    for model in (plain, ours):
        summed(model, 4).backward()
    assert_grads(ours.module, mean_over_ranks(plain))
    difference = largest_difference_between_ranks(ours.module)
    ours.close()
    return difference


@pytest.mark.parametrize("depths", [[2, 2], [0, 4], [4, 0]])
def test_parameters_may_be_broadcast_after_a_backward_that_raised_on_every_rank(
    run_ranks: RunRanks, depths: list[int]
) -> None:
    assert run_ranks(2, broadcast_after_a_failure, depths) == [0.0, 0.0]


def collectives_by_hand() -> tuple[list[int], int]:
    plain, ours = wrapped()
    counts = []
    for step in range(5):
        ours.zero_grad_buffer()
        plain.zero_grad()
        with ours.no_sync():
            for model in (plain, ours):
                summed(model, step).backward()
        with counted_collectives() as count:
            ours.allreduce_gradients()
        counts.append(count.total())
        assert_grads(ours.module, mean_over_ranks(plain))
    buckets = len(ours.layout.buckets)
    assert buckets > 1
    ours.close()
    return counts, buckets


def test_reductions_by_hand_come_to_cost_one_collective_per_bucket(run_ranks: RunRanks) -> None:
    for counts, buckets in run_ranks(2, collectives_by_hand):
        assert counts[-2:] == [buckets, buckets]


def checkpoint_by_position() -> list[str]:
    _, ours = wrapped()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ours.state_dict_for_save_checkpoint(None, "p.", False)
    assert list(found) == [f"p.{name}" for name in ours.module.state_dict()]
    ours.close()
    return list(found)


def test_megatron_checkpoints_take_arguments_by_position(run_ranks: RunRanks) -> None:
    assert run_ranks(2, checkpoint_by_position)[0][0] == "p.layers.0.weight"


# -- dtypes of gradients -----------------------------------------------------------------------------


def restored_dtypes() -> None:
    plain, ours = wrapped(lambda: Mlp().to(BF16), grad_dtype=torch.float32)
    inputs = batch(0, dist.get_rank())[0].to(BF16)
    ours(inputs).square().mean().backward()
    ours.close()
    for name, param in ours.module.named_parameters():
        assert param.grad_dtype is BF16, name
        assert param.grad.dtype is BF16, name
    for model in (plain, ours.module):
        model.zero_grad()
        model(inputs).square().mean().backward()
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for expected, param in zip(plain.parameters(), ours.module.parameters(), strict=True):
        torch.testing.assert_close(param, expected)
    again = BucketDDP(ours.module)
    assert {buffer.dtype for buffer in again.layout.buffers} == {BF16}
    again.close()


def test_close_gives_gradients_the_dtype_they_had(run_ranks: RunRanks) -> None:
    run_ranks(2, restored_dtypes)


def other_dtype_on_one_rank() -> None:
    module = Mlp().to(BF16)
    if dist.get_rank() == 0:
        module.layers[1].bias.grad_dtype = torch.float32
    with pytest.raises(RankMismatchError, match=r"layers\.1\.bias"):
        BucketDDP(module)


def test_gradient_dtypes_that_differ_between_ranks_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(2, other_dtype_on_one_rank)


def pattern_without_a_match() -> None:
    module = Mlp()
    with pytest.raises(ValueError, match=r"encoder\.\*"):
        BucketDDP(module.to(BF16), grad_dtype={"layers.*": torch.float32, "encoder.*": torch.float32})


def test_a_gradient_dtype_for_no_parameter_is_refused(run_ranks: RunRanks) -> None:
    run_ranks(2, pattern_without_a_match)


# -- one rank ----------------------------------------------------------------------------------------

ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "hook": {"comm_hook": allreduce_hook},
    "bf16 hook": {"comm_hook": "bf16"},
    "powersgd": {"comm_hook": "powersgd"},
    "wire": {"wire_dtype": BF16},
    "coalesced": {"use_contiguous_buffers": False},
    "coalesced wire": {"use_contiguous_buffers": False, "wire_dtype": BF16},
    "fp64 gradients": {"grad_dtype": torch.float64, "master_params": False},
    "tokens": {"gradient_divide_by": "tokens"},
    "integer": {"gradient_divide_by": 4},
    "padded": {"pad_buckets_to": 64, "overlap": False},
    "checked": {"max_abs_grad": 1e6},
}


def alone(way: str, joined: bool) -> None:
    plain, ours = wrapped(Branches, **ALONE[way])
    if way == "fp64 gradients":
        for param in plain.parameters():
            param.grad_dtype = torch.float64
    divisor = {"tokens": 8, "integer": 4}.get(way, 1)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if way == "bf16 hook" else {}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, ours)]
    with ours.join() if joined else nullcontext():
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for micro in range(2):
                if way == "tokens":
                    ours.count_tokens(4)
                take = ["left", "right", "none", "both"][(step + micro) % 4]
                with ours.no_sync() if micro == 0 else nullcontext():
                    summed(ours, 2 * step + micro, take=take).backward()
                summed(plain, 2 * step + micro, take=take).div(divisor).backward()
            for (name, expected), param in zip(plain.named_parameters(), ours.module.parameters(), strict=True):
                if expected.grad is None:
                    assert param.grad is None, name
                else:
                    torch.testing.assert_close(
                        param.grad, expected.grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance
                    )
            for optimizer in optimizers:
                optimizer.step()
    assert ours.passes == 4
    ours.close()


@pytest.mark.parametrize("joined", [False, True], ids=["plain", "joined"])
@pytest.mark.parametrize("way", ALONE)
def test_one_rank_trains_as_without_a_wrapper(run_ranks: RunRanks, way: str, joined: bool) -> None:
    run_ranks(1, alone, way, joined)


def sparse_alone() -> None:
    plain, ours = wrapped(Lookup)
    for step in range(3):
        words, bag = tokens(step, 0)
        for model in (plain, ours):
            model.zero_grad()
            model(words, bag, use_bag=step != 1).square().sum().backward()
        for (name, expected), param in zip(plain.named_parameters(), ours.module.parameters(), strict=True):
            if expected.grad is None:
                assert param.grad is None, name
            else:
                assert param.grad.is_sparse == expected.grad.is_sparse, name
                torch.testing.assert_close(param.grad.to_dense(), expected.grad.to_dense())
    ours.close()


def test_one_rank_with_sparse_gradients_trains_as_without_a_wrapper(run_ranks: RunRanks) -> None:
    run_ranks(1, sparse_alone)
