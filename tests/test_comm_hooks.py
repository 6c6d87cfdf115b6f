"""Communication hooks and the low-precision wire: against torch DDP with the same hook, and against exact means."""

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from lightning_bucketddp.comm.hooks import CommHookError
from tests.hooks import HOOKS, WAYS, disguised, options_for
from tests.inside import comm_hook_of
from tests.models import Branches, Fragile, Mlp, batch, build, loss_of
from tests.reference import assert_grads, grads, largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003

ROUNDING = {"fp16": 2.0**-9, "bf16": 2.0**-6}


# -- parity with torch DDP ---------------------------------------------------------------------------


def gradients_of_a_few_steps(wrapped: nn.Module, accumulate: int) -> list[dict[str, Tensor | None]]:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)  # the same weights: differences do not grow
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(accumulate):
            with nullcontext() if micro == accumulate - 1 else wrapped.no_sync():
                inputs, target = batch(step * accumulate + micro, dist.get_rank())
                loss_of(wrapped(inputs), target).backward()
        seen.append(grads(wrapped.module))
        optimizer.step()
    return seen


def same_as_torch_ddp(name: str, model: str, accumulate: int) -> list[dict[str, Tensor | None]]:
    module = build(model)
    reference = DistributedDataParallel(copy.deepcopy(module))
    reference.register_comm_hook(None, disguised(HOOKS[name]))
    expected = gradients_of_a_few_steps(reference, accumulate)
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    ours.register_comm_hook(None, HOOKS[name])
    found = gradients_of_a_few_steps(ours, accumulate)
    rounding = max(ROUNDING.get(name.split("_")[0], 1e-6), 2.0**-6 if model == "mixed_dtypes" else 0.0)
    for step, step_expected in enumerate(expected):
        for key, grad in step_expected.items():
            largest = max(float(g.abs().max()) for g in step_expected.values() if g is not None)
            torch.testing.assert_close(found[step][key], grad, rtol=rounding, atol=rounding * largest)
    assert len(ours.layout.buckets) > 1
    assert ours.early_launches > 0
    ours.close()
    return found


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("model", ["mlp", "conv_batchnorm_channels_last", "mixed_dtypes"])
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_same_gradients_as_torch_ddp_with_the_same_hook(
    run_ranks: RunRanks, world_size: int, name: str, model: str, accumulate: int
) -> None:
    by_rank = run_ranks(world_size, same_as_torch_ddp, name, model, accumulate)
    for step in range(3):
        for key, grad in by_rank[0][step].items():
            equal = torch.equal(grad, by_rank[1][step][key])
            assert equal is (name != "noop"), f"{key}: noop leaves each rank its own gradients, others do not"


def compressed(choice: str, named: bool) -> dict[str, Tensor | None]:
    ours = BucketDDP(build("mlp"), bucket_cap_mb=TINY, comm_hook=choice if named else HOOKS[choice])
    inputs, target = batch(0, dist.get_rank())
    loss_of(ours(inputs), target).backward()
    ours.close()
    return grads(ours.module)


@pytest.mark.parametrize("choice", ["bf16", "fp16"])
def test_a_named_hook_is_the_one_it_names(run_ranks: RunRanks, choice: str) -> None:
    for named, by_hand in zip(
        run_ranks(2, compressed, choice, True), run_ranks(2, compressed, choice, False), strict=True
    ):
        dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[choice])
        for key, grad in named.items():
            assert torch.equal(grad, by_hand[key])
            assert torch.equal(grad, grad.to(dtype).float()), "went through the dtype"


def own_group(choice: str | None, wire_dtype: torch.dtype | None) -> None:
    """Ranks 1 and 2 of three train together; rank 0 must not be needed."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    plain = build("mlp")
    ours = BucketDDP(copy.deepcopy(plain), process_group=group, comm_hook=choice, wire_dtype=wire_dtype)
    for step in range(2):
        batches = [batch(step, rank) for rank in (1, 2)]
        ours.zero_grad()
        plain.zero_grad()
        for inputs, target in batches:
            (loss_of(plain(inputs), target) / 2).backward()
        inputs, target = batches[dist.get_rank() - 1]
        loss_of(ours(inputs), target).backward()
        for param, other in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad, rtol=2**-6, atol=2**-6 * float(other.grad.abs().max()))
    ours.close()


@pytest.mark.parametrize(("choice", "wire_dtype"), [("bf16", None), ("powersgd", None), (None, torch.bfloat16)])
def test_the_wrappers_own_group_is_used(run_ranks: RunRanks, choice: str, wire_dtype: torch.dtype | None) -> None:
    run_ranks(3, own_group, choice, wire_dtype)


def train_post_local(wrapped: nn.Module, start: int) -> dict[str, Tensor]:
    subgroup, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=start)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=start)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    apart = []
    for step in range(start + 5):
        inputs, target = batch(step, dist.get_rank())
        optimizer.zero_grad()
        loss_of(wrapped(inputs), target).backward()
        optimizer.step()
        averager.average_parameters(wrapped.parameters())
        apart.append(largest_difference_between_ranks(wrapped.module))
    assert apart[0] == 0
    assert apart[-2] > 1e-3, "local steps take the ranks apart"
    assert apart[-1] < 1e-6, "averaging brings them together"
    return {name: param.detach().clone() for name, param in wrapped.module.named_parameters()}


def post_local_sgd() -> None:
    module = build("mlp")
    expected = train_post_local(DistributedDataParallel(copy.deepcopy(module)), 3)
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    found = train_post_local(ours, 3)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda message, name=name: f"{name}: {message}")
    ours.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_post_local_sgd_ends_with_torch_ddps_weights(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, post_local_sgd)


# -- PowerSGD ----------------------------------------------------------------------------------------


def train_with_power_sgd(wrapped: nn.Module, state: PowerSGDState, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2)
    losses = []
    for step in range(steps):
        inputs, _ = batch(step % 4, dist.get_rank(), size=16)
        optimizer.zero_grad()
        loss = loss_of(wrapped(inputs), torch.tanh(inputs[:, :4] - inputs[:, 4:]))
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    assert state.iter > state.start_powerSGD_iter
    rate, before, after = state.compression_stats()
    assert rate > 4, "compression was active"
    assert before > after > 0
    return losses


def power_sgd(cap: float | None) -> list[float]:
    torch.manual_seed(0)
    module = Mlp(width=64, depth=4)
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    # One bucket for torch DDP: with several, PowerSGD on gloo starts collectives in an order that differs by rank.
    reference = DistributedDataParallel(copy.deepcopy(module))
    reference.register_comm_hook(state, powerSGD_hook)
    expected = train_with_power_sgd(reference, state, 40)
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    ours = BucketDDP(module, bucket_cap_mb=cap, comm_hook="powersgd", comm_hook_state=state)
    found = train_with_power_sgd(ours, state, 40)
    assert state.process_group is dist.group.WORLD
    assert len(state.error_dict) == len(ours.layout.buckets)
    assert found[:3] == pytest.approx(expected[:3])
    assert expected[-1] < 0.7 * expected[0]
    if cap is None:  # the same bucket, and so the same random factors
        assert found == pytest.approx(expected, rel=1e-3)
    assert sum(found[-4:]) == pytest.approx(sum(expected[-4:]), rel=0.1)
    assert largest_difference_between_ranks(module) == 0
    ours.close()
    return found


@pytest.mark.parametrize("cap", [None, 0.01])
@pytest.mark.parametrize("world_size", [2, 3])
def test_power_sgd_trains_as_with_torch_ddp(run_ranks: RunRanks, world_size: int, cap: float | None) -> None:
    by_rank = run_ranks(world_size, power_sgd, cap)
    assert all(losses == by_rank[0] for losses in by_rank)


def power_sgd_in_many_buckets() -> tuple[int, int]:
    """Ranks at different speeds, chains of collectives in many buckets."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    module = Mlp(width=48, depth=8)
    for index, layer in enumerate(module.layers):
        layer.weight.register_hook(lambda _, index=index: time.sleep(0.002 * ((index + rank) % 3)))
    state = PowerSGDState(None, start_powerSGD_iter=2)
    ours = BucketDDP(module, bucket_cap_mb=0.001, comm_hook="powersgd", comm_hook_state=state)
    train_with_power_sgd(ours, state, 12)
    assert largest_difference_between_ranks(module) == 0
    counts = len(ours.layout.buckets), ours.early_launches
    ours.close()
    return counts


def test_power_sgds_chains_of_collectives_keep_their_order_across_buckets(run_ranks: RunRanks) -> None:
    for buckets, early in run_ranks(3, power_sgd_in_many_buckets):
        assert buckets >= 8
        assert early > 0


def power_sgd_after_unfreezing() -> None:
    torch.manual_seed(0)
    module = Mlp(width=32, depth=4)
    module.head.requires_grad_(False)  # comes before all others when it is unfrozen
    module.layers[3].requires_grad_(False)
    state = PowerSGDState(None, start_powerSGD_iter=2)
    ours = BucketDDP(module, bucket_cap_mb=0.006, comm_hook=powerSGD_hook, comm_hook_state=state)
    train_with_power_sgd(ours, state, 5)
    known = {index: len(error) for index, error in state.error_dict.items()}
    module.requires_grad_(True)
    train_with_power_sgd(ours, state, 5)
    sizes = {index: bucket.numel for index, bucket in enumerate(ours.layout.buckets)}
    assert {index: len(error) for index, error in state.error_dict.items()} == sizes
    assert any(sizes[index] != size for index, size in known.items())
    assert largest_difference_between_ranks(module) == 0
    ours.close()


def test_power_sgds_memory_of_buckets_ends_with_the_layout(run_ranks: RunRanks) -> None:
    run_ranks(2, power_sgd_after_unfreezing)


class Sometimes(nn.Module):
    """A layer that is used in some passes only, in a bucket with one that always is."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(8, 32)
        self.sometimes = nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = self.always(x)
        return self.head(self.sometimes(x) if use else x)


def power_sgd_unused(epsilon: float, zeroed: bool) -> None:
    torch.manual_seed(0)
    module = Sometimes()
    rank = dist.get_rank()
    ours = BucketDDP(
        module,
        comm_hook="powersgd",
        comm_hook_state=PowerSGDState(None, 1, start_powerSGD_iter=2, orthogonalization_epsilon=epsilon),
    )
    weight = module.sometimes.weight
    sent, owed = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, use in enumerate([True, True, False, False, True, True, False, True, True, True]):
        inputs, target = batch(step, rank)
        before = weight.grad.clone() if weight.grad is not None and not zeroed else None
        if zeroed or use:
            ours.zero_grad()
        plain = copy.deepcopy(module)
        plain.zero_grad()
        loss_of(plain(inputs, use), target).backward()
        mean = mean_over_ranks(plain)["sometimes.weight"]
        loss_of(ours(inputs, use), target).backward()
        if use:
            assert torch.isfinite(weight.grad).all()
            assert weight.grad.norm() > 0.1 * mean.norm(), "what was zero once does not stay so"
            sent += weight.grad
            owed += mean
        else:
            if zeroed:
                assert weight.grad is None
            else:
                assert torch.equal(weight.grad, before), "bit for bit"
            sent.zero_()  # nothing is owed to a slot that no rank used
            owed.zero_()
    # Error feedback: what was not sent since is in the memory of the ranks, no more and no less.
    state = comm_hook_of(ours)._state
    slot = next(s for s in ours.layout.slots if s.spec.name == "sometimes.weight")
    assert len(ours.layout.buckets) == 1
    residual = state.error_dict[0][slot.offset : slot.offset + weight.numel()].view(weight.shape).clone()
    dist.all_reduce(residual)
    residual /= dist.get_world_size()
    torch.testing.assert_close(sent + residual, owed, rtol=1e-3, atol=1e-4)
    ours.close()


@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize("epsilon", [0.0, 1e-8])
def test_power_sgd_recovers_from_passes_without_a_gradient(run_ranks: RunRanks, epsilon: float, zeroed: bool) -> None:
    run_ranks(2, power_sgd_unused, epsilon, zeroed)


# -- what a pass guarantees, with hooks --------------------------------------------------------------


def branches(way: str) -> None:
    torch.manual_seed(3)
    rank = dist.get_rank()
    plain = Branches()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY, **WAYS[way])
    patterns = ["both", "left", "none", "right", "left", "both", "none"]
    idle = torch.full((5,), 0.1) + rank
    ours.module.idle.grad = idle
    before = idle.clone()
    for step in range(len(patterns)):
        take = patterns[(step + 2 * rank) % len(patterns)]
        inputs, _ = batch(step, rank)
        plain.zero_grad()
        plain(inputs, take).square().mean().backward()
        for name, param in ours.module.named_parameters():
            param.grad = param.grad if name == "idle" else None
        ours(inputs, take).square().mean().backward()
        for name, mean in mean_over_ranks(plain).items():
            grad = ours.module.get_parameter(name).grad
            if name == "idle":
                assert grad is idle
                assert torch.equal(idle, before)
            elif mean is None:
                assert grad is None
            else:
                tolerance = {"rtol": 2**-6, "atol": 2**-7 * float(mean.abs().max())} if way == "wire" else {}
                torch.testing.assert_close(grad, mean, **tolerance)
    ours.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_branches_and_unused_parameters(run_ranks: RunRanks, world_size: int, way: str) -> None:
    run_ranks(world_size, branches, way)


def what_a_hook_sees() -> None:
    module = build("conv_batchnorm_channels_last")
    seen: list[tuple[int, bool]] = []

    def hook(state: str, bucket: Any) -> torch.futures.Future[Tensor]:
        assert state == "state"
        seen.append((bucket.index(), bucket.is_last()))
        params, gradients = bucket.parameters(), bucket.gradients()
        names = [ours.layout.slots[slot].spec.name for slot in ours.layout.buckets[bucket.index()].slots]
        assert [id(p) for p in params] == [id(module.get_parameter(name)) for name in names]
        assert [g.shape for g in gradients] == [p.shape for p in params]
        assert all(g.is_contiguous() for g in gradients)
        gradients[0].add_(1.0)  # a view of the buffer
        assert bucket.buffer()[: gradients[0].numel()].sub(gradients[0].view(-1)).eq(0).all()
        low = bucket.buffer().double()
        bucket.set_buffer(low)
        assert bucket.buffer() is low
        assert all(g.dtype is torch.float64 for g in bucket.gradients())
        bucket.gradients()[-1].fill_(7.0)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(low.view(-1, 1))  # another tensor, dtype and shape
        return future

    ours = BucketDDP(module, bucket_cap_mb=TINY)
    ours.register_comm_hook("state", hook)
    for step in range(2):
        seen.clear()
        inputs, target = batch(step, dist.get_rank())
        loss_of(ours(inputs), target).backward()
        last = len(ours.layout.buckets) - 1
        assert seen == [(index, index == last) for index in range(last + 1)]
        for bucket in ours.layout.buckets:
            name = ours.layout.slots[bucket.slots[-1]].spec.name
            assert module.get_parameter(name).grad.eq(7.0).all()
    ours.close()


def test_a_hook_sees_what_torchs_bucket_shows(run_ranks: RunRanks) -> None:
    run_ranks(1, what_a_hook_sees)
    run_ranks(2, what_a_hook_sees)


class ComplexModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs().square().mean()


def complex_gradients(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = ComplexModel()
    ours = BucketDDP(copy.deepcopy(plain), **options)
    inputs, _ = batch(0, dist.get_rank())
    plain(inputs).backward()
    ours(inputs).backward()
    mean = mean_over_ranks(plain)["weight"]
    torch.testing.assert_close(ours.module.weight.grad, mean, rtol=2**-6, atol=2**-7 * float(mean.abs().max()))
    ours.close()


@pytest.mark.parametrize("options", [{"comm_hook": "bf16"}, {"wire_dtype": torch.bfloat16}], ids=["hook", "wire"])
def test_complex_gradients_travel_as_real_ones(run_ranks: RunRanks, options: dict[str, Any]) -> None:
    run_ranks(3, complex_gradients, options)


def leaves_noise_in_padding(_: None, bucket: Any) -> torch.futures.Future[Tensor]:
    assert not bucket.buffer()[bucket.gradients()[-1].numel() :].any() or len(bucket.parameters()) > 1
    bucket.buffer().add_(1.0)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def padding() -> None:
    ours = BucketDDP(nn.Linear(8, 4), bucket_cap_mb=0.0001, comm_hook=leaves_noise_in_padding)
    for step in range(3):
        ours(batch(step, 0)[0]).sum().backward()
    assert max(len(bucket.slots) for bucket in ours.layout.buckets) == 1
    ours.close()


def test_what_a_hook_leaves_in_padding_does_not_add_up(run_ranks: RunRanks) -> None:
    run_ranks(1, padding)


# -- failures ----------------------------------------------------------------------------------------


def all_ranks_raise(way: str, guarded: bool) -> None:
    torch.manual_seed(0)
    ours = BucketDDP(Fragile(), bucket_cap_mb=0.0001, **options_for(way))
    plain = copy.deepcopy(ours.module)
    for step in range(7):
        inputs, target = batch(step, dist.get_rank())
        plain.zero_grad()
        ours.zero_grad()
        if step in (0, 4):
            loss = loss_of(ours(inputs, fail=True), target)
            with pytest.raises(ArithmeticError), ours.backward_pass(loss) if guarded else nullcontext():
                loss.backward()
            ours(inputs)
            assert all(param.grad is None for param in ours.parameters())
        loss_of(plain(inputs), target).backward()
        loss_of(ours(inputs), target).backward()
        means = mean_over_ranks(plain)
        if way in ("allreduce", "own hook"):
            assert_grads(ours.module, means)
        elif way == "wire" or step == 0:  # two passes: PowerSGD has not started
            for name, mean in means.items():
                grad = ours.module.get_parameter(name).grad
                torch.testing.assert_close(grad, mean, rtol=2**-6, atol=2**-6 * float(mean.abs().max()))
    assert largest_difference_between_ranks(ours.module) == 0
    for param in ours.parameters():
        assert torch.isfinite(param.grad).all()
    ours.close()


@pytest.mark.parametrize("guarded", [True, False], ids=["backward_pass", "plain"])
@pytest.mark.parametrize("way", [*WAYS, "powersgd"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_goes_on_when_backward_raised_on_every_rank(
    run_ranks: RunRanks, world_size: int, way: str, guarded: bool
) -> None:
    run_ranks(world_size, all_ranks_raise, way, guarded)


def one_rank_raises(way: str, guarded: bool) -> tuple[str, float]:
    ours = BucketDDP(Fragile(), bucket_cap_mb=0.0001, **options_for(way))
    rank = dist.get_rank()
    for step in range(3):
        inputs, target = batch(step, rank)
        loss_of(ours(inputs), target).backward()
    inputs, target = batch(3, rank)
    loss = loss_of(ours(inputs, fail=rank == 1), target)
    begin = time.monotonic()
    with pytest.raises((ArithmeticError, PeerFailureError)) as error:
        with ours.backward_pass(loss) if guarded else nullcontext():
            loss.backward()
    elapsed = time.monotonic() - begin
    with pytest.raises(PeerFailureError):
        ours(batch(9, rank)[0])
    return str(error.value), elapsed


@pytest.mark.parametrize("guarded", [True, False], ids=["backward_pass", "plain"])
@pytest.mark.parametrize("way", ["allreduce", "wire", "powersgd"])
def test_one_rank_raising_in_backward_is_an_error_on_every_rank(run_ranks: RunRanks, way: str, guarded: bool) -> None:
    results = run_ranks(3, one_rank_raises, way, guarded, fresh=True)
    for rank, (message, elapsed) in enumerate(results):
        assert elapsed < 8 if rank != 1 else elapsed < 15
        assert message == "no gradient today" if rank == 1 else f"rank {rank}: pass 3 cannot be completed" in message


def hook_that_raises(state: dict[str, int], bucket: Any) -> torch.futures.Future[Tensor]:
    state["calls"] += 1
    if dist.get_rank() == 1 and state["calls"] == state["bad call"]:
        raise OSError("out of sorts")
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def run_steps(ours: BucketDDP, guarded: bool) -> None:
    for step in range(4):
        inputs, target = batch(step, dist.get_rank())
        loss = loss_of(ours(inputs), target)
        with ours.backward_pass(loss) if guarded else nullcontext():
            loss.backward()


def raising_hook(bad_call: int, guarded: bool) -> tuple[str, str, float]:
    ours = BucketDDP(Mlp(depth=6), bucket_cap_mb=TINY)
    ours.register_comm_hook({"calls": 0, "bad call": bad_call}, hook_that_raises)
    begin = time.monotonic()
    with pytest.raises((CommHookError, PeerFailureError)) as error:
        run_steps(ours, guarded)
    return type(error.value).__name__, str(error.value), time.monotonic() - begin


@pytest.mark.parametrize("guarded", [True, False], ids=["backward_pass", "plain"])
@pytest.mark.parametrize("bad_call", [2, 20])
def test_a_hook_that_raises_on_one_rank_is_named_on_every_rank(
    run_ranks: RunRanks, bad_call: int, guarded: bool
) -> None:
    results = run_ranks(2, raising_hook, bad_call, guarded, fresh=True)
    for rank, (kind, message, elapsed) in enumerate(results):
        assert kind == ("CommHookError" if rank == 1 else "PeerFailureError")
        assert "communication hook 'tests.test_comm_hooks.hook_that_raises' failed for the bucket of '" in message
        assert "OSError: out of sorts" in message
        assert rank == 1 or "rank 1 cannot go on in pass" in message
        assert elapsed < 8


def returns_no_future(_: None, bucket: Any) -> Any:
    return bucket.buffer()


def returns_too_little(_: None, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer()[1:])
    return future


def fails_later(_: None, bucket: Any) -> torch.futures.Future[Tensor]:
    def after(future: Any) -> Tensor:
        raise KeyError("later")

    return default_hooks.allreduce_hook(dist.group.WORLD, bucket).then(after)


def bad_hook(hook: Callable[..., Any]) -> str:
    ours = BucketDDP(Mlp(), comm_hook=hook)
    inputs, target = batch(0, dist.get_rank())
    with pytest.raises(CommHookError) as error:
        loss_of(ours(inputs), target).backward()
    with pytest.raises(PeerFailureError):
        ours(inputs)
    return str(error.value)


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (returns_no_future, "expected it to return a torch.futures.Future, found Tensor"),
        (returns_too_little, "expected its future to hold a tensor of "),
        (fails_later, "KeyError: 'later'"),
    ],
)
def test_a_hook_with_a_wrong_result_is_named(run_ranks: RunRanks, hook: Callable[..., Any], expected: str) -> None:
    for message in run_ranks(2, bad_hook, hook, fresh=True):
        assert f"communication hook 'tests.test_comm_hooks.{hook.__name__}' failed for the bucket of 'head." in message
        assert "(8 parameters)" in message
        assert expected in message


def peer_fails_while_a_hook_waits() -> tuple[str, float]:
    ours = BucketDDP(Mlp(), comm_hook=disguised(default_hooks.allreduce_hook))
    inputs, target = batch(0, dist.get_rank())
    loss_of(ours(inputs), target).backward()
    if dist.get_rank() == 1:
        ours.publish_failure(OSError("disk full"))
        return "", 0.0
    begin = time.monotonic()
    with pytest.raises(PeerFailureError) as error:
        loss_of(ours(inputs), target).backward()
    return str(error.value), time.monotonic() - begin


def test_a_rank_that_waits_for_a_hook_learns_of_failures(run_ranks: RunRanks) -> None:
    message, elapsed = run_ranks(2, peer_fails_while_a_hook_waits, fresh=True)[0]
    assert "rank 1 raised OSError: disk full" in message
    assert elapsed < 8


# -- registering -------------------------------------------------------------------------------------


def register_wrongly() -> None:
    ours = BucketDDP(Mlp(), bucket_cap_mb=TINY)
    inputs, target = batch(0, dist.get_rank())

    def in_the_middle(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match="between passes, found one under way"):
            ours.register_comm_hook(None, noop_hook)

    handle = ours.module.layers[0].weight.register_hook(in_the_middle)
    loss_of(ours(inputs), target).backward()
    handle.remove()
    with pytest.raises(TypeError, match="to be callable, found 3"):
        ours.register_comm_hook(None, 3)
    ours.register_comm_hook(None, noop_hook)  # between passes it may
    ours.zero_grad()
    loss_of(ours(inputs), target).backward()
    assert_grads(ours.module, mean_over_ranks(ours.module)) if dist.get_world_size() == 1 else None
    with pytest.raises(RuntimeError, match=r"can only be called once.*noop_hook"):
        ours.register_comm_hook(None, noop_hook)
    ours.close()
    with pytest.raises(RuntimeError, match="after close"):
        ours.register_comm_hook(None, noop_hook)

    ours = BucketDDP(Mlp(), wire_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"either comm_hook or wire_dtype, found both.*wire_dtype=torch.bfloat16"):
        ours.register_comm_hook(None, noop_hook)
    ours.close()
    for error, options, message in [
        (ValueError, {"comm_hook": noop_hook, "wire_dtype": torch.float16}, "either comm_hook or wire_dtype, found"),
        (ValueError, {"wire_dtype": torch.float32}, "expected wire_dtype to be None or one of"),
        (ValueError, {"comm_hook": "fp8"}, r"callable or one of \('bf16', 'fp16', 'powersgd'\), found 'fp8'"),
        (ValueError, {"comm_hook": "fp16", "comm_hook_state": 1}, "comm_hook_state to be None with comm_hook='fp16'"),
        (ValueError, {"comm_hook": "powersgd", "comm_hook_state": 1}, "to be a PowerSGDState, found a int"),
        (ValueError, {"comm_hook_state": 1}, "comm_hook_state to be None with comm_hook=None, found 1"),
        (TypeError, {"comm_hook": 3}, "expected comm_hook to be None, callable or one of .*, found 3"),
    ]:
        with pytest.raises(error, match=message):
            BucketDDP(Mlp(), **options)


def test_hooks_registered_wrongly_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(2, register_wrongly)


def wrap_differently(kind: str, last: bool) -> None:
    if kind == "constructor":
        BucketDDP(Mlp(), comm_hook="bf16" if last else "fp16")
    elif kind == "none":
        BucketDDP(Mlp(), comm_hook=None if last else "fp16")
    elif kind == "wire":
        BucketDDP(Mlp(), wire_dtype=torch.bfloat16 if last else torch.float16)
    elif kind == "state":
        state = PowerSGDState(None, matrix_approximation_rank=3 if last else 2)
        BucketDDP(Mlp(), comm_hook=powerSGD_hook, comm_hook_state=state)
    else:
        BucketDDP(Mlp()).register_comm_hook(None, noop_hook if last else default_hooks.allreduce_hook)


def ranks_differ(kind: str) -> tuple[str, float]:
    begin = time.monotonic()
    with pytest.raises(RankMismatchError) as error:
        wrap_differently(kind, last=dist.get_rank() == dist.get_world_size() - 1)
    return str(error.value), time.monotonic() - begin


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constructor", ["fp16_compress_hook", "bf16_compress_hook"]),
        ("none", ["fp16_compress_hook", "None"]),
        ("wire", ["torch.float16", "torch.bfloat16"]),
        ("state", ["PowerSGDState.matrix_approximation_rank: rank 0 has 2, rank 2 has 3"]),
        ("register", ["allreduce_hook", "noop_hook"]),
    ],
)
def test_ranks_with_different_hooks_are_an_error_that_names_both(
    run_ranks: RunRanks, kind: str, expected: list[str]
) -> None:
    for message, elapsed in run_ranks(3, ranks_differ, kind):
        assert all(part in message for part in expected), message
        assert elapsed < 8


def register_on_rank_0(ours: BucketDDP, loss: Tensor) -> None:
    if dist.get_rank() == 0:
        ours.register_comm_hook(None, noop_hook)
    loss.backward()


def registered_on_one_rank() -> tuple[str, float]:
    ours = BucketDDP(Mlp(), timeout=timedelta(seconds=60))
    inputs, target = batch(0, dist.get_rank())
    loss_of(ours(inputs), target).backward()
    loss = loss_of(ours(inputs), target)
    begin = time.monotonic()
    with pytest.raises((RankMismatchError, PeerFailureError)) as error:
        register_on_rank_0(ours, loss)
    return str(error.value), time.monotonic() - begin


def test_a_hook_registered_on_one_rank_only_is_an_error_on_all(run_ranks: RunRanks) -> None:
    for message, elapsed in run_ranks(2, registered_on_one_rank, fresh=True):
        assert "the communication hook from pass 1 on" in message
        assert "is in pass 1" in message
        assert elapsed < 8
