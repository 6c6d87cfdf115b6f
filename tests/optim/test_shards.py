"""Sharded optimizers: the training of one process, from shards of state; and beside everything else."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.optim import SGD, Optimizer

from lightning_bucketddp import BucketDDP, RankMismatchError, declare_element_wise
from lightning_bucketddp.optim.swap import master_params, swap_of
from tests.inside import reducer_of
from tests.models import MODELS, Branches, Lookup, Mlp, SharedWeights, batch, tokens
from tests.optim.common import OPTIMIZERS, TINY, assert_close, average, stepped, two_groups, values
from tests.pool import close_wrappers, on_ranks
from tests.reference import backward, drift, everyones, loss_at, run_backward, seeded

FP32, BF16 = torch.float32, torch.bfloat16
Wrap = Callable[..., BucketDDP]
Take = Callable[[BucketDDP, Optimizer, int], object]
sharded: Wrap = partial(BucketDDP, shard_optimizer=True, bucket_cap_mb=TINY)
SCATTERED = {"scatter_every_pass": True}
CASES = [(*pair, SCATTERED if at % 4 > 1 else {}) for at, pair in enumerate(zip(MODELS, OPTIMIZERS, strict=True))]
"""sgd goes with mixed dtypes: others make much of bf16's rounding."""
GROUPS = [{"shard_group_size": size, **wire} for size in (1, 2) for wire in ({}, {"wire_dtype": "bfloat16"})]


def parity(model: str, optimizer: str, options: dict[str, Any]) -> None:
    """Trains beside one process, with accumulation and freezing; each element has state on one rank."""
    group = dist.new_group([0, 1, 2, 3]) if "wire_dtype" in options else None
    plain = seeded(MODELS[model])
    ours = sharded(copy.deepcopy(plain), process_group=group, **options)
    steppers = [OPTIMIZERS[optimizer](two_groups(module)) for module in (plain, ours.module)]
    tolerance = 3e-2 if "wire_dtype" in options else 2e-3 if model == "mixed_dtypes" else 2e-4
    close = {"rtol": tolerance, "atol": tolerance}
    for step in range(7):
        for module in (plain, ours.module):
            list(module.parameters())[-1].requires_grad_(step not in (4, 5))
        for at in range(2):
            with ours.no_sync() if at < step % 2 else nullcontext():
                backward(ours, 2 * step + at)
            backward(plain, 2 * step + at)
        average(plain)
        theirs = nn.utils.clip_grad_norm_(plain.parameters(), 0.1).float()
        torch.testing.assert_close(ours.clip_grad_norm_(0.1), theirs, **{**close, "rtol": max(tolerance, 5e-3)})
        stepped(*steppers)
    torch.testing.assert_close(values(ours.module), values(plain), **close)
    ours.synchronise_module_buffers()
    assert drift(ours.module) == 0
    saved = ours.optimizer_state_dict(steppers[1], every_rank=True)
    torch.testing.assert_close(saved["state"], steppers[0].state_dict()["state"], **close)
    ours.load_optimizer_state_dict(steppers[1], saved)
    held = elements_with_state(steppers[1])
    ours.close()
    torch.testing.assert_close(ours.optimizer_state_dict(steppers[1], every_rank=True), saved)
    counts, size = everyones(held), options.get("shard_group_size", dist.get_world_size())
    groups = {sum(counts[first : first + size]) for first in range(0, len(counts), size)}
    assert groups == {sum(param.numel() for param in plain.parameters())}


def elements_with_state(optimizer: Optimizer) -> int:
    """How many elements have state here, by the memory of the largest kind of state."""
    found = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in found)
    return sum(max(value.numel() for value in state.values()) for state in optimizer.state.values())


@on_ranks(3, 2, cases=CASES)
def test_training_is_that_of_one_process(model: str, optimizer: str, options: dict[str, Any]) -> None:
    parity(model, optimizer, options)


@on_ranks(4, cases=GROUPS, quick=["shard_group_size=2"])
def test_training_in_shard_groups_is_that_of_one_process(options: dict[str, Any]) -> None:
    parity("mlp", "adamw", options)


@on_ranks(4)
def test_ranks_may_be_in_different_numbers_of_groups() -> None:
    row = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    of_one = dist.new_group([0])
    for number in range(2):
        ours = sharded(seeded(Mlp), process_group=row)
        backward(ours)
        assert ours.passes == 1
        ours.close()
        if dist.get_rank() == 0 and number == 0:
            dist.destroy_process_group(of_one)


@on_ranks(2, cases=[("sgd", FP32), ("adagrad", FP32), ("nadam", BF16)])
def test_a_step_sends_all_buckets_and_divides_masters(name: str, dtype: torch.dtype) -> None:
    ours = sharded(seeded(Mlp).to(dtype), grad_dtype=FP32)
    optimizer = OPTIMIZERS[name](two_groups(ours.module))
    optimizer.register_step_post_hook(hooked := Mock(return_value=None))
    parts = ours._runtime.optimizers.parts
    for step in range(4):
        backward(ours, step)
        with patch.object(parts, "send", side_effect=parts.send) as send:
            stepped(optimizer)
        sent = [len({parts.find(param).part.bucket for param in call.args[0]}) for call in send.call_args_list]
        assert sent == [len(ours.layout.buckets)]
    assert hooked.call_count == 4, "whoever hooks steps sees one"
    masters = optimizer.state_dict().get("master_params", {}).values()
    held = elements_with_state(optimizer) if dtype is BF16 else 0
    assert sum(master.untyped_storage().nbytes() for master in masters) == 4 * held, "masters are divided too"
    assert not any(flat.requires_grad for flat in parts._buffers.flats), "no graph"


def outside_changes(shard: bool) -> dict[str, Tensor]:
    """A graph notices a step, on ranks without a part too; parameters whose memory was replaced are taken in again."""
    ours = sharded(seeded(Mlp), shard_optimizer=shard)
    optimizer = OPTIMIZERS["adamw"](ours.parameters())
    for step in range(6):
        backward(ours, step)
        saved = ours.module(batch(step, 0)[0]).square().mean()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()
        optimizer.zero_grad()
        found = values(ours.module)  # all parameters have come
        if step == 2:
            for param in ours.parameters():
                param.data = param.data.clone()
        if step == 4:
            ours.module.share_memory()  # as sending a tensor to another process does
    assert drift(ours.module) == 0
    ours.module.head.bias.data = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"as it was wrapped.*\(4,\).*found \(\(3,\)") if shard else nullcontext():
        optimizer.step()
    ours.module.head.bias.data = torch.zeros(4)
    ours.close()
    return found


@on_ranks(3, fresh=True)
def test_steps_and_replaced_memory_are_noticed() -> None:
    assert_close(*map(outside_changes, (True, False)))


def plainly(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    backward(ours, step)
    stepped(optimizer)


@on_ranks(3)
def test_closing_waits_for_parameters() -> None:
    ours = sharded(seeded(Mlp))
    for step in range(2):
        plainly(ours, OPTIMIZERS["sgd"](ours.parameters()), step)  # with an optimizer that goes
    arrivals = list(ours._runtime.optimizers.parts._arrivals.values())
    ours.close()
    assert len(arrivals) > 1
    assert all(arrival._wait is None for arrival in arrivals), "they were waited for"
    backward(ours)
    for param in ours.parameters():
        assert (type(param), type(param.grad)) == (nn.Parameter, Tensor)
        assert param.untyped_storage().nbytes() == param.nbytes, "memory of its own"
    assert drift(ours.module) == 0


def loop(
    wrap: Wrap, take: Take = plainly, build: Any = Mlp, steps: int = 8, optimizer: Any = "adamw", **options: Any
) -> nn.Module:
    ours = wrap(seeded(build), **options)
    stepper = OPTIMIZERS.get(optimizer, optimizer)(ours.parameters())
    for step in range(steps):
        take(ours, stepper, step)
    return ours.module


def hooked(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    if step < 2:  # before the optimizer's swap has hooks, and after
        optimizer.register_step_pre_hook(lambda *_: [param.grad.mul_(0.7) for param in ours.parameters()] and None)
        optimizer.register_step_post_hook(lambda *_: ours.module.head.bias.data.mul_(0.8))
    plainly(ours, optimizer, step)


@declare_element_wise
class Moving(SGD):
    """Gives parameters other memory."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.data = param.data - 0.1 * param.grad


def use(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    by_rank = dist.get_rank() if step > 5 else 0
    backward(ours, step, take=("left", "right", "none", "both")[(step // 2 + by_rank) % 4])
    stepped(optimizer, set_to_none=step < 4)


def freeze(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    ours.module.layers[0].requires_grad_(step >= 3)
    ours.module.layers[1].bias.requires_grad_(step not in (6, 7))
    with ours.no_sync() if step == 4 else nullcontext():
        backward(ours, step)
    if step != 4:
        stepped(optimizer)


def unevenly(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    ours._uneven.divide_by_active()
    ours._uneven.set_active([rank for rank in range(dist.get_world_size()) if step < 2 + rank or rank == 1])
    with ours.no_sync() if step % 3 == 1 else nullcontext():
        loss = loss_at(ours, min(step, 5))
        loss = loss if ours._passes.joining.counts() else loss.detach()
        run_backward(ours, loss, guarded=True)
    if step % 3 != 1:
        stepped(optimizer)


def by_hand(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    for at in range(2):
        with ours.no_sync():
            backward(ours, 2 * step + at)
    if step % 2:
        ours.allreduce_gradients()
    else:
        ours.start_grad_sync()
        ours.finish_grad_sync()
    ours.scale_gradients(0.5)
    optimizer.step()
    ours.zero_grad_buffer() if step == 3 else optimizer.zero_grad()


def twice(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    x, target = batch(step, dist.get_rank())
    cleared = step % 3 == 2
    for at, take in enumerate(("left", "right", "right") if cleared else ("left", ("right", "both")[step % 3])):
        with ours.no_sync() if at == 1 and cleared else nullcontext():
            nn.functional.mse_loss(ours.module(x, take), target).backward()
        if at == 1 and cleared:
            optimizer.zero_grad()
    stepped(optimizer)


def gan(wrap: Wrap) -> nn.Module:
    ours = wrap(seeded(lambda: nn.Sequential(Mlp(12, 2), nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))))
    players = [ours.module[1:], ours.module[:1]]
    optimizers = [OPTIMIZERS["adamw"](player.parameters()) for player in players]
    for step in range(8):
        for turn, (player, optimizer) in enumerate(zip(players, optimizers, strict=True)):
            for other in players:
                other.requires_grad_(bool(step % 2) or other is player)
            optimizer.zero_grad(set_to_none=step % 3 != 0)
            (ours(batch(step, dist.get_rank())[0]) + turn - 1).square().mean().backward()
            optimizer.step()
    return ours.module


def sparse_and_ignored(wrap: Wrap) -> nn.Module:
    module = seeded(Lookup)
    module.extra = nn.Linear(4, 4)
    module._ddp_params_and_buffers_to_ignore = ["extra.weight", "extra.bias"]
    ours = wrap(module)
    optimizer = SGD(module.parameters(), lr=0.1)
    for step in range(6):
        (ours(*tokens(step, dist.get_rank())) + module.extra(torch.ones(4))).square().mean().backward()
        for param in module.extra.parameters():  # whose synchronisation is the user's
            dist.all_reduce(param.grad)
        stepped(optimizer)
    return module


powersgd = partial(PowerSGDState, None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
TRAININGS: dict[str, Callable[..., nn.Module]] = {
    "gan": gan,
    "divide_by_int": partial(loop, take=freeze, steps=8, optimizer="sgd", gradient_divide_by=5, overlap=False),
    "unused": partial(loop, take=use, build=Branches, steps=12, optimizer=Moving),
    "freezing": partial(loop, take=freeze, steps=12),
    "tied": partial(loop, build=SharedWeights, max_abs_grad=1e3),
    "sparse_and_ignored": sparse_and_ignored,
    "hook_powersgd": lambda wrap: loop(wrap, optimizer="sgd", comm_hook="powersgd", comm_hook_state=powersgd()),
    "wire_bf16": partial(loop, optimizer="sgd", wire_dtype="bfloat16"),
    "low_precision": partial(loop, build=lambda: Mlp().bfloat16(), grad_dtype=FP32),
    "uneven": partial(loop, take=unevenly, steps=6),
    "hooks": partial(loop, take=hooked),
    "by_hand": partial(loop, take=by_hand, steps=6),
    "two_backwards": partial(loop, take=twice, build=Branches),
}
ROUGH = {"wire_bf16": 2e-2, "hook_powersgd": 1e-4}
SOME = ["gan", "low_precision", "divide_by_int", "two_backwards"]


def both_ways(name: str, extra: dict[str, Any]) -> None:
    results = []
    for wrap in (partial(BucketDDP, bucket_cap_mb=TINY), partial(sharded, **extra)):
        module = TRAININGS[name](wrap)
        results.append(values(module))
        close_wrappers()
        if name != "sparse_and_ignored":
            assert drift(module) == 0
    assert_close(*results, tolerance=ROUGH.get(name, 1e-5))


TRAINED = {name: (name, {}) for name in TRAININGS} | {f"{name}, scattered": (name, SCATTERED) for name in SOME}


QUICK = ["sparse_and_ignored", "low_precision", "uneven", "hooks", "two_backwards", "gan, scattered"]


@on_ranks(3, 2, cases=TRAINED, quick=QUICK, timeout=200)
def test_the_same_training_as_without_shards(name: str, extra: dict[str, Any]) -> None:
    both_ways(name, extra)


@on_ranks(4, cases=("freezing", "low_precision", "unused", "uneven"), quick=["freezing"])
def test_the_same_training_in_shard_groups(name: str) -> None:
    both_ways(name, {"shard_group_size": 2})


@on_ranks(3, fresh=True)
def test_only_shards_of_gradients_have_memory_between_passes() -> None:
    ours = sharded(seeded(Mlp), **SCATTERED)
    buffers = reducer_of(ours).storage._inner.buffers
    for step in range(3):
        with ours.no_sync():
            backward(ours, step)
        assert all(flat.untyped_storage().nbytes() == 0 for flat in buffers.flats)
        backward(ours, step)
        norm = ours.grad_norm()
        torch._foreach_mul_([param.grad for param in ours.parameters()], torch.tensor(2.0))
        torch.testing.assert_close(ours.grad_norm(), 2 * norm)
        if step < 2:
            ours.zero_grad()
    with pytest.raises(RuntimeError):  # nothing may be added to what has no memory
        sum(param.sum() for param in ours.parameters()).backward()
    held, numel = reducer_of(ours).storage.shards.numel, ours.layout.nbytes // 4
    ours.close()
    assert held == numel // 3


@on_ranks(3)
def test_what_goes_with_no_shards_is_refused() -> None:
    ours, other = sharded(seeded(Mlp)), sharded(seeded(Mlp))
    with pytest.raises(ValueError, match="nobody would update the shard"), ours.join():
        pass
    with ours.join(throw_on_early_termination=True):
        backward(ours)
    backward(other)
    with pytest.raises(ValueError, match="that is sharded by another one"):
        SGD([*ours.parameters(), *other.parameters()], lr=0.1).step()
    prepared = SGD(ours.parameters(), lr=0.1)
    master_params(prepared)
    with pytest.raises(ValueError, match="or has whole master parameters"):
        ours.prepare_optimizer(prepared)
    other_params = torch.optim.LBFGS([torch.ones(1)])
    assert ours.prepare_optimizer(other_params) is other_params
    assert swap_of(other_params) is None
    size = (1, 3, 3)[dist.get_rank()]
    for error, shard, options, words in [
        (ValueError, False, SCATTERED, "cannot be combined with shard_optimizer=False"),
        (ValueError, False, {"shard_group_size": 3}, "cannot be combined with shard_optimizer=False"),
        (ValueError, True, {**SCATTERED, "gradient_divide_by": "tokens"}, "tokens of all passes"),
        (ValueError, True, {"shard_group_size": 2}, "shard_group_size=2 and 3 ranks"),
        (RankMismatchError, True, {"shard_group_size": size}, "shard_group_size"),
    ]:
        with pytest.raises(error, match=words):
            sharded(seeded(Mlp), shard_optimizer=shard, **options)
