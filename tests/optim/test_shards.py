"""Sharded optimizers: the training of one process, from shards of state; and beside everything else."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.optim import SGD, AdamW, Optimizer

from lightning_bucketddp import BucketDDP, declare_element_wise
from lightning_bucketddp.optim import sharded_params
from lightning_bucketddp.optim.swap import master_params
from tests.inside import reducer_of
from tests.models import MODELS, Branches, Lookup, Mlp, SharedWeights, batch, tokens
from tests.optim.common import TINY, RunRanks, assert_close, average, mse, seeded, stepped, values
from tests.reference import largest_difference_between_ranks

Wrap = Callable[..., BucketDDP]

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.005, momentum=0.9, centered=True),
    "adamw": lambda params: AdamW(params, lr=0.01, weight_decay=0.1),
    "adam_amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "sgd": lambda params: SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
}
PAIRS = list(zip(MODELS, OPTIMIZERS, strict=True))  # sgd with mixed dtypes: others make much of bf16's rounding


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    params = list(module.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.003, "weight_decay": 0.0}]


# -- as in one process -------------------------------------------------------------------------------


def parity(model: str, optimizer: str, clip: float | None) -> None:
    plain = seeded(MODELS[model])
    ours = BucketDDP(copy.deepcopy(plain), shard_optimizer=True, bucket_cap_mb=TINY)
    steppers = [OPTIMIZERS[optimizer](two_groups(module)) for module in (plain, ours.module)]
    for step in range(10):
        for local in (True, False) if step % 3 == 2 else (False,):
            with ours.no_sync() if local else nullcontext():
                mse(ours, 2 * step + local).backward()
            mse(plain, 2 * step + local).backward()
        average(plain)
        if clip is not None:
            mine, theirs = ours.clip_grad_norm_(clip), nn.utils.clip_grad_norm_(plain.parameters(), clip)
            torch.testing.assert_close(mine, theirs.float(), rtol=5e-3, atol=1e-6)
        for stepper in steppers:
            stepped(stepper)
    assert_close(values(ours), values(plain), f"{model}, {optimizer}", 2e-3 if model == "mixed_dtypes" else 2e-4)
    ours.synchronise_module_buffers()
    assert largest_difference_between_ranks(ours.module) == 0
    ours.close()


def parities(pairs: list[tuple[str, str]]) -> None:
    for at, (model, optimizer) in enumerate(pairs):
        parity(model, optimizer, 0.1 if at % 2 else None)


@pytest.mark.parametrize(("world_size", "part"), [(2, slice(None, None, 2)), (3, slice(1, None, 2))], ids=str)
def test_training_is_that_of_one_process(run_ranks: RunRanks, world_size: int, part: slice) -> None:
    run_ranks(world_size, parities, PAIRS[part])


WIDTHS = (257, 191, 313, 127, 211)  # primes: nothing divides


class Counting(Optimizer):
    """Plain SGD that counts the elements it steps on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            param.add_(param.grad, alpha=-1e-3)
        self.stepped = sum(param.numel() for param in params)


declare_element_wise(Counting)


def kept_and_stepped(dtype: torch.dtype, bucket_cap_mb: float | None) -> tuple[int, int, int]:
    """Bytes of the state of a sharded optimizer, and of one that is not, and how many elements are stepped on."""
    found: list[int] = []
    options = {"grad_dtype": torch.float32} if dtype is torch.bfloat16 else {}
    for shard, make in ((True, AdamW), (False, AdamW), (True, Counting)):
        module = nn.Sequential(*(nn.Linear(wide, narrow) for wide, narrow in pairwise(WIDTHS))).to(dtype)
        ours = BucketDDP(module, shard_optimizer=shard, bucket_cap_mb=bucket_cap_mb, **options)
        optimizer = make(ours.parameters())
        for _ in range(3):  # buckets follow the order of gradients from the second step on
            ours(torch.ones(2, WIDTHS[0], dtype=dtype)).float().square().sum().backward()
            stepped(optimizer)
        packed = optimizer.state_dict()
        tensors = [*packed.get("master_params", {}).values()]
        tensors += [value for state in packed["state"].values() for value in state.values()]
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        found.append(optimizer.stepped if isinstance(optimizer, Counting) else nbytes)
        ours.close()
    return found[0], found[1], found[2]


@pytest.mark.parametrize(
    ("world_size", "dtype", "cap"), [(2, torch.float32, None), (3, torch.float32, 0.1), (3, torch.bfloat16, 0.1)]
)
def test_state_and_step_are_divided_by_the_ranks(
    run_ranks: RunRanks, world_size: int, dtype: torch.dtype, cap: float | None
) -> None:
    elements = sum(wide * narrow + narrow for wide, narrow in pairwise(WIDTHS))
    found = run_ranks(world_size, kept_and_stepped, dtype, cap)
    for mine, whole, count in found:
        assert whole >= elements * (12 if dtype is torch.bfloat16 else 8)  # two moments, and the masters
        assert mine == pytest.approx(whole / world_size, rel=0.02)
        assert count == pytest.approx(elements / world_size, rel=0.02)
    assert sum(count for _, _, count in found) == elements


# -- steps -------------------------------------------------------------------------------------------


def counted_sends(ours: BucketDDP) -> list[int]:
    """How many buckets go with each send from now on."""
    params, sent = ours._runtime.optimizers.parts, []
    send = params.send

    def count(given: list[Tensor], complete: bool = True) -> None:
        sent.append(len({params.find(param).part.bucket for param in given}))
        send(given, complete)

    params.send = count
    return sent


def in_stages(dtype: torch.dtype) -> None:
    """What forward needs first is on its way while the rest is stepped on; the bits are those of one step."""
    cut = sharded_params.ShardedParams.in_stages
    for name in ("sgd", "adamw", "adagrad", "nadam"):
        trained = []
        for most in (1, 3):
            sharded_params.MAX_STAGES = most
            sharded_params.ShardedParams.in_stages = cut if most > 1 else lambda self, params: []  # type: ignore[method-assign]
            module = seeded(Mlp).to(dtype)
            ours = BucketDDP(module, shard_optimizer=True, bucket_cap_mb=TINY, grad_dtype=torch.float32)
            optimizer = OPTIMIZERS[name](two_groups(ours.module))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
            hooked: list[int] = []
            optimizer.register_step_post_hook(lambda *_, hooked=hooked: hooked.append(1))
            for step in range(4):
                ours(batch(step, dist.get_rank())[0].to(dtype)).float().square().mean().backward()
                sent = counted_sends(ours)
                stepped(optimizer)
                del ours._runtime.optimizers.parts.send
                scheduler.step()
                assert len(sent) == (1 if most == 1 else most + 1)
                assert sum(sent) == len(ours.layout.buckets) > 3
            assert len(hooked) == 4, "whoever hooks steps sees one"
            assert all(it["step"] == 4 for it in optimizer.state.values() if "step" in it)
            swap = ours.prepare_optimizer(optimizer)
            assert any(swap.master(param) is not None for param in ours.parameters()) == (dtype is torch.bfloat16)
            assert not any(flat.requires_grad for flat in ours._runtime.optimizers.parts._buffers.flats), "no graph"
            trained.append(values(ours.module))
            ours.close()
        assert_close(*trained, name, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_stages_are_bit_for_bit_one_step(run_ranks: RunRanks, dtype: torch.dtype) -> None:
    run_ranks(2, in_stages, dtype, fresh=True)


def beside_sharded_ones() -> None:
    ours = BucketDDP(seeded(Mlp).bfloat16(), shard_optimizer=True, grad_dtype=torch.float32)
    other = nn.Parameter(torch.full((3,), 0.5, dtype=torch.bfloat16))
    other.grad_dtype = torch.float32
    plain = nn.Parameter(other.detach().float())
    optimizers = [AdamW([*ours.parameters(), other], lr=0.01), AdamW([plain], lr=0.01)]
    for step in range(3):
        ours(batch(step, dist.get_rank())[0].bfloat16()).square().mean().backward()
        other.grad = torch.full((3,), 0.1 + step)
        plain.grad = other.grad.clone()
        for optimizer in optimizers:
            stepped(optimizer)
    swap = ours.prepare_optimizer(optimizers[0])
    assert torch.equal(swap.master(other), plain.detach())
    parts = [swap.master(param) for param in ours.parameters()]
    assert 0 < sum(part.numel() for part in parts if part is not None) < sum(it.numel() for it in ours.parameters())
    masters = ours.optimizer_state_dict(optimizers[0], every_rank=True)["master_params"]
    assert torch.equal(masters[len(parts)], plain.detach())
    assert [masters[at].shape for at in range(len(parts))] == [it.shape for it in ours.parameters()]
    alone = AdamW([other], lr=0.01)  # no parameter of which is sharded
    other.grad = torch.ones(3)
    assert ours.prepare_optimizer(alone) is not None
    before = other.detach().clone()
    alone.step()
    assert not torch.equal(other, before)
    ours.close()


def test_optimizers_step_on_parameters_that_are_not_sharded(run_ranks: RunRanks) -> None:
    run_ranks(2, beside_sharded_ones, fresh=True)


def outside_changes() -> None:
    """A graph notices a step, on ranks without a part too; parameters whose memory was replaced are taken in again."""
    modules = []
    for shard in (True, False):
        ours = BucketDDP(seeded(Mlp), shard_optimizer=shard, bucket_cap_mb=TINY)
        modules.append(ours.module)
        optimizer = OPTIMIZERS["adamw"](ours.parameters())
        for step in range(6):
            mse(ours, step).backward()
            saved = ours.module(batch(step, 0)[0]).square().mean()
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                saved.backward()
            optimizer.zero_grad()
            values(ours)  # all parameters have come
            if step == 2:
                for param in ours.parameters():
                    param.data = param.data.clone()
            if step == 4:
                ours.module.share_memory()  # as sending a tensor to another process does
        assert largest_difference_between_ranks(ours.module) == 0
        ours.module.head.bias.data = torch.zeros(3)
        if shard:
            with pytest.raises(RuntimeError, match=r"parameter 'head.bias' as it was wrapped.*\(4,\).*found \(\(3,\)"):
                optimizer.step()
        ours.module.head.bias.data = torch.zeros(4)
        ours.close()
    assert_close(*map(values, modules))


def test_steps_and_replaced_memory_are_noticed(run_ranks: RunRanks) -> None:
    run_ranks(3, outside_changes, fresh=True)


def close_after_step() -> tuple[int, float]:
    """How many buckets were on their way when it was closed, and the difference between ranks."""
    ours = BucketDDP(seeded(Mlp), shard_optimizer=True, bucket_cap_mb=TINY)
    optimizer = OPTIMIZERS["adamw"](ours.parameters())
    mse(ours, 0).backward()
    optimizer.step()
    arrivals = list(ours._runtime.optimizers.parts._arrivals.values())
    ours.close()
    assert all(arrival._wait is None for arrival in arrivals), "they were waited for"
    assert all(type(param) is nn.Parameter for param in ours.parameters())
    assert all(param.untyped_storage().nbytes() == param.nbytes for param in ours.parameters()), "memory of their own"
    state = ours.optimizer_state_dict(optimizer, every_rank=True)["state"]
    assert [state[index]["exp_avg"].shape for index in range(8)] == [param.shape for param in ours.parameters()]
    return len(arrivals), largest_difference_between_ranks(ours.module)


def test_closing_waits_for_parameters_and_whole_state_remains(run_ranks: RunRanks) -> None:
    for under_way, difference in run_ranks(3, close_after_step):
        assert under_way > 1
        assert difference == 0


# -- beside everything else: the same training with shards and without ---------------------------------


Take = Callable[[BucketDDP, Optimizer, int], object]


def plainly(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    mse(ours, step).backward()
    stepped(optimizer)


def loop(
    wrap: Wrap,
    take: Take = plainly,
    build: Callable[[], nn.Module] = Mlp,
    steps: int = 8,
    optimizer: str = "adamw",
    **options: Any,
) -> nn.Module:
    ours = wrap(seeded(build), **options)
    stepper = OPTIMIZERS[optimizer](ours.parameters())
    for step in range(steps):
        take(ours, stepper, step)
    return ours.module


def accumulate(ours: BucketDDP, optimizer: Optimizer, step: int, set_to_none: bool = True) -> None:
    """Local passes, several synchronised passes before a step, gradients cleared or zeroed or neither."""
    for at in range(1 + step % 3):
        for local in (False,) if step % 2 else (True, False):
            with ours.no_sync() if local else nullcontext():
                before = ours.passes
                mse(ours, 6 * step + 2 * at + local).backward()
                assert ours.passes - before == (not local or ours._options.scatter_every_pass)
    optimizer.step()
    if step % 4:
        optimizer.zero_grad(set_to_none)


def use(ours: BucketDDP, optimizer: Optimizer, step: int, by_rank: bool = False) -> None:
    """What no rank used is not stepped on; what one rank used is."""
    take = ("left", "right", "none", "both")[(step // 2 + (dist.get_rank() if by_rank else 0)) % 4]
    mse(ours, step, take).backward()
    stepped(optimizer, set_to_none=step < 4)
    assert ours.module.idle not in optimizer.state


def freeze(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    """Frozen and unfrozen in the middle: buckets are laid out anew, and state moves."""
    ours.module.layers[0].requires_grad_(step >= 3)
    ours.module.layers[1].bias.requires_grad_(step not in (6, 7))
    with ours.no_sync() if step == 4 else nullcontext():
        mse(ours, step).backward()
    if step != 4:
        stepped(optimizer)


def in_bf16(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    inputs, target = batch(step, dist.get_rank())
    with ours.no_sync() if step % 2 else nullcontext():
        nn.functional.mse_loss(ours(inputs.bfloat16()).float(), target).backward()
    if step % 2 == 0:
        stepped(optimizer)


def three_batches(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    for at in range(3):
        with ours.no_sync() if at < 2 else nullcontext():
            mse(ours, 3 * step + at).backward()
    stepped(optimizer)


def by_tokens(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    inputs, target = batch(step, dist.get_rank(), 3 + dist.get_rank())
    ours.count_tokens(len(inputs))
    with ours.no_sync() if step % 2 == 0 else nullcontext():
        (ours(inputs) - target).square().sum().backward()
    if step % 2:
        stepped(optimizer)


def unevenly(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    ours.divide_by_active_ranks()
    ours.set_active_ranks([rank for rank in range(dist.get_world_size()) if step < 2 + rank or rank == 1])
    with ours.no_sync() if step % 3 == 1 else nullcontext():
        loss = mse(ours, min(step, 5))
        loss = loss.detach() if ours.is_replaying else loss
        with ours.backward_pass(loss):
            if loss.requires_grad:
                loss.backward()
    if step % 3 != 1:
        stepped(optimizer)


def by_hand(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    for at in range(2):
        with ours.no_sync():
            mse(ours, 2 * step + at).backward()
    if step % 2:
        ours.allreduce_gradients()
    else:
        ours.start_grad_sync()
        ours.finish_grad_sync()
    ours.scale_gradients(0.5)
    optimizer.step()
    ours.zero_grad_buffer() if step == 3 else optimizer.zero_grad()


def with_closure(ours: BucketDDP, optimizer: Optimizer, step: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse(ours, step)
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) > 0


def backward_twice(ours: BucketDDP, optimizer: Optimizer, step: int, kind: str) -> None:
    """Two backwards before one step, past forward's output; the second reaches other parameters."""

    def backward(take: str) -> None:
        x, target = batch(step, dist.get_rank())
        nn.functional.mse_loss(ours.module(x, take), target).backward()

    backward("left")
    if kind in ("local between", "cleared"):
        with ours.no_sync():
            backward("right")
    if kind == "cleared":
        optimizer.zero_grad()
    backward("both" if kind == "shared" else "right")
    stepped(optimizer)
    assert ours.passes >= 2 * (step + 1)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Mlp(12, 2), nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.generator(x))


def gan(wrap: Wrap) -> nn.Module:
    """Gradients of one network stay while the other's pass runs; toggled every second step."""
    ours = wrap(seeded(Gan))
    players = [ours.module.critic, ours.module.generator]
    optimizers = [OPTIMIZERS["adamw"](player.parameters()) for player in players]
    for step in range(8):
        for turn, (player, optimizer) in enumerate(zip(players, optimizers, strict=True)):
            for other in players:
                other.requires_grad_(bool(step % 2) or other is player)
            optimizer.zero_grad(set_to_none=step % 3 != 0)
            output = ours(batch(step, dist.get_rank())[0])
            (output.square().mean() if turn else (output - 1).square().mean()).backward()
            optimizer.step()
    return ours.module


def sparse_and_ignored(wrap: Wrap) -> nn.Module:
    module = seeded(Lookup)
    module.extra = nn.Linear(4, 4)
    module._ddp_params_and_buffers_to_ignore = ["extra.weight", "extra.bias"]
    ours = wrap(module)
    optimizer = SGD(module.parameters(), lr=0.1)
    for step in range(6):
        output = ours(*tokens(step, dist.get_rank()))
        (output + module.extra(torch.ones(4))).square().mean().backward()
        for param in module.extra.parameters():  # whose synchronisation is the user's
            dist.all_reduce(param.grad)
        stepped(optimizer)
    return module


def powersgd(wrap: Wrap) -> nn.Module:
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
    return loop(wrap, optimizer="sgd", comm_hook="powersgd", comm_hook_state=state)


def copies(wrap: Wrap) -> nn.Module:
    """Copied and pickled at any time; the copy goes on training."""
    ours = wrap(seeded(Mlp))
    optimizer = OPTIMIZERS["adamw"](ours.parameters())
    for step in range(9):
        mse(ours, step).backward()
        if step == 2:  # with gradients
            for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours.module))):
                assert all(torch.equal(a, b) for a, b in zip(other.parameters(), ours.parameters(), strict=True))
        stepped(optimizer)
        if step in (4, 6):  # parameters are on their way
            other = copy.deepcopy(ours) if step == 4 else pickle.loads(pickle.dumps(ours))
            saved = ours.optimizer_state_dict(optimizer, every_rank=True)
            assert all(torch.equal(a, b) for a, b in zip(other.parameters(), ours.parameters(), strict=True))
            ours.close()
            ours, optimizer = other, OPTIMIZERS["adamw"](other.parameters())
            mse(ours, 0)  # starts it
            ours.load_optimizer_state_dict(optimizer, saved)
    wrap.args[0].append(ours)  # type: ignore[attr-defined]
    return ours.module


def two_wrappers(wrap: Wrap) -> nn.Module:
    pair = wrap(seeded(Mlp)), wrap(seeded(lambda: Mlp(12, 2)), bucket_cap_mb=None)
    optimizers = [OPTIMIZERS[name](ours.parameters()) for name, ours in zip(("adamw", "sgd"), pair, strict=True)]
    for step in range(5):
        sum(mse(ours, step) for ours in pair).backward()
        for optimizer in optimizers:
            stepped(optimizer)
    return nn.ModuleList([ours.module for ours in pair])


def until_closed(wrap: Wrap) -> nn.Module:
    """The wrapper is closed while parameters are on their way; training goes on without."""
    ours = wrap(seeded(Mlp))
    for step in range(2):
        plainly(ours, OPTIMIZERS["sgd"](ours.parameters()), step)  # with an optimizer that goes
    ours.close()
    optimizer = SGD(ours.parameters(), lr=0.1)
    for _ in range(2):
        nn.functional.mse_loss(*map(ours, batch(7, 0)[:1]), batch(7, 0)[1]).backward()
        assert all(type(param.grad) is Tensor for param in ours.parameters())
        optimizer.step()
    return ours.module


LOW = {"build": lambda: Mlp().bfloat16(), "grad_dtype": torch.float32}
TRAININGS: dict[str, Callable[..., nn.Module]] = {
    "gan": gan,
    "accumulation": partial(loop, take=accumulate),
    "accumulation_zeros": partial(loop, take=partial(accumulate, set_to_none=False)),
    "unused": partial(loop, take=use, build=Branches),
    "used_on_one_rank": partial(loop, take=partial(use, by_rank=True), build=Branches),
    "freezing": partial(loop, take=freeze, steps=12),
    "tied": partial(loop, build=SharedWeights),
    "sparse_and_ignored": sparse_and_ignored,
    "hook_bf16": partial(loop, optimizer="sgd", comm_hook="bf16"),
    "hook_powersgd": powersgd,
    "wire_bf16": partial(loop, optimizer="sgd", wire_dtype="bfloat16"),
    "low_precision": partial(loop, take=in_bf16, **LOW),
    "divide_by_int": partial(loop, take=three_batches, steps=4, gradient_divide_by=5),
    "divide_by_tokens": partial(loop, take=by_tokens, gradient_divide_by="tokens"),
    "max_abs_grad": partial(loop, max_abs_grad=1e3),
    "uneven": partial(loop, take=unevenly, steps=6),
    "no_overlap": partial(loop, take=freeze, steps=12, overlap=False),
    "by_hand": partial(loop, take=by_hand, steps=6),
    "closure": partial(loop, take=with_closure),
    "copies": copies,
    "two_wrappers": two_wrappers,
    "closed": until_closed,
    "two_backwards": partial(loop, take=partial(backward_twice, kind="apart"), build=Branches, steps=3),
    "two_shared": partial(loop, take=partial(backward_twice, kind="shared"), build=Branches, steps=3),
    "two_local_between": partial(loop, take=partial(backward_twice, kind="local between"), build=Branches, steps=3),
    "two_cleared": partial(loop, take=partial(backward_twice, kind="cleared"), build=Branches, steps=3),
}
ROUGH = {"hook_bf16": 2e-2, "wire_bf16": 2e-2, "hook_powersgd": 1e-4}


def wrapped(made: list[BucketDDP], shard: bool, extra: dict[str, Any], module: nn.Module, **options: Any) -> BucketDDP:
    ours = BucketDDP(module, shard_optimizer=shard, **{"bucket_cap_mb": TINY, **(extra if shard else {}), **options})
    made.append(ours)
    return ours


def both_ways(names: list[str], extra: dict[str, Any]) -> None:
    for name in names:
        results = []
        for shard in (False, True):
            made: list[BucketDDP] = []
            module = TRAININGS[name](partial(wrapped, made, shard, extra))
            results.append(values(module))
            for ours in made:
                ours.close()
            if name != "sparse_and_ignored":
                assert largest_difference_between_ranks(module) == 0, name
        assert_close(*results, name, ROUGH.get(name, 1e-5))


NAMES = list(TRAININGS)
GROUPED = ["gan", "accumulation", "freezing", "low_precision", "used_on_one_rank", "uneven", "copies"]
SCATTERED = ["gan", "accumulation", "accumulation_zeros", "freezing", "low_precision", "used_on_one_rank"]
SCATTERED += ["divide_by_int", "copies", "two_backwards", "two_shared", "two_cleared"]


@pytest.mark.parametrize(
    ("world_size", "names", "extra"),
    [
        *((3, NAMES[at::4], {}) for at in range(4)),
        (3, SCATTERED, {"scatter_every_pass": True}),
        (4, GROUPED, {"shard_group_size": 2}),
    ],
    ids=["first", "second", "third", "fourth", "scattered", "in groups"],
)
def test_the_same_training_as_without_shards(
    run_ranks: RunRanks, world_size: int, names: list[str], extra: dict[str, Any]
) -> None:
    run_ranks(world_size, both_ways, names, extra)


def only_shards() -> tuple[int, int]:
    ours = BucketDDP(seeded(Mlp), shard_optimizer=True, scatter_every_pass=True)
    optimizer = OPTIMIZERS["sgd"](ours.parameters())
    buffers = reducer_of(ours).storage._inner.buffers
    for step in range(3):
        with ours.no_sync():
            mse(ours, step).backward()
        assert all(flat.untyped_storage().nbytes() == 0 for flat in buffers.flats)
        mse(ours, step).backward()
        norm = ours.grad_norm()
        for param in ours.parameters():
            param.grad *= 1.5
        torch._foreach_mul_([param.grad for param in ours.parameters()], torch.tensor(2.0))
        torch.testing.assert_close(ours.grad_norm(), 3 * norm)
        for param in ours.parameters():
            with pytest.raises(RuntimeError, match="is sharded"):
                param.grad.mul_(torch.ones_like(param))
        if step < 2:
            stepped(optimizer)
    with pytest.raises(RuntimeError):  # nothing may be added to what has no memory
        sum(param.sum() for param in ours.parameters()).backward()
    held, numel = reducer_of(ours).storage.shards.numel, ours.layout.nbytes // 4
    ours.close()
    return held, numel


def test_only_shards_of_gradients_have_memory_between_passes(run_ranks: RunRanks) -> None:
    for held, numel in run_ranks(3, only_shards, fresh=True):
        assert held == numel // 3


# -- refused -----------------------------------------------------------------------------------------


def refusals() -> None:
    ours = BucketDDP(seeded(Mlp), shard_optimizer=True)
    with pytest.raises(ValueError, match="nobody would update the shard"), ours.join():
        pass
    with ours.join(throw_on_early_termination=True):
        mse(ours, 0).backward()
    other = BucketDDP(seeded(Mlp), shard_optimizer=True)
    mse(other, 0).backward()
    with pytest.raises(ValueError, match="that is sharded by another one"):
        SGD([*ours.parameters(), *other.parameters()], lr=0.1).step()
    prepared = SGD(ours.parameters(), lr=0.1)
    master_params(prepared)
    with pytest.raises(ValueError, match="or has whole master parameters"):
        ours.prepare_optimizer(prepared)
    for options, words in [
        ({"scatter_every_pass": True}, "cannot be combined with shard_optimizer=False"),
        ({"shard_optimizer": True, "scatter_every_pass": True, "gradient_divide_by": "tokens"}, "tokens of all passes"),
    ]:
        with pytest.raises(ValueError, match=words):
            BucketDDP(seeded(Mlp), **options)
    ours.close()
    other.close()


def test_what_goes_with_no_shards_is_refused(run_ranks: RunRanks) -> None:
    run_ranks(2, refusals)
