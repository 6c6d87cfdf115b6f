"""``shard_optimizer=True`` next to everything else: the same training as without, and equal ranks."""

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.optim import Optimizer

from lightning_bucketddp import BucketDDP, declare_element_wise
from lightning_bucketddp.optim.lazy_all_gather import GatheredLater
from tests.inside import reducer_of
from tests.models import Branches, Lookup, Mlp, SharedWeights, batch, loss_of, tokens
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]
Wrap = Callable[..., BucketDDP]
TINY = 0.0005  # MiB: several buckets


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def mse(model: BucketDDP, step: int, **kwargs: Any) -> Tensor:
    inputs, target = batch(step, dist.get_rank())
    return loss_of(model(inputs, **kwargs), target)


# -- what is trained, sharded and not ----------------------------------------------------------------


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Mlp(12, 2), nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.generator(x))


def gan(wrap: Wrap, toggled: bool = True) -> nn.Module:
    """Gradients of one network stay while the other's pass runs."""
    ours = wrap(seeded(Gan))
    module = ours.module
    players = [module.critic, module.generator]
    optimizers = [adamw(player.parameters()) for player in players]
    for step in range(8):
        for turn, (player, optimizer) in enumerate(zip(players, optimizers, strict=True)):
            if toggled:
                for other in players:
                    other.requires_grad_(other is player)
            optimizer.zero_grad(set_to_none=step % 3 != 0)
            output = ours(batch(step, dist.get_rank())[0])
            (output.square().mean() if turn else (output - 1).square().mean()).backward()
            optimizer.step()
    return module


def accumulation(wrap: Wrap, set_to_none: bool = True, **options: Any) -> nn.Module:
    """Local passes, several synchronised passes before a step, gradients cleared or zeroed or neither."""
    ours = wrap(seeded(Mlp), **options)
    optimizer = adamw(ours.parameters())
    scattered = ours._options.scatter_every_pass
    number = 0
    for step in range(9):
        for _ in range(1 + step % 3):
            for local in (True, False):
                if local and step % 2:
                    continue
                with ours.no_sync() if local else nullcontext():
                    before = ours.passes
                    mse(ours, number).backward()
                    assert ours.passes - before == (not local or scattered)
                number += 1
        optimizer.step()
        if step % 4:
            optimizer.zero_grad(set_to_none)
    return ours.module


def unused(wrap: Wrap, by_rank: bool = False, zeroed: bool = False) -> nn.Module:
    """What no rank used is not stepped on; what one rank used is."""
    ours = wrap(seeded(Branches))
    optimizer = adamw(ours.parameters())
    for step in range(8):
        take = ("left", "right", "none", "both")[(step // 2 + (dist.get_rank() if by_rank else 0)) % 4]
        mse(ours, step, take=take).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not zeroed)
    assert torch.equal(ours.module.idle, torch.ones(5))
    assert ours.module.idle not in optimizer.state
    return ours.module


def freezing(wrap: Wrap, **options: Any) -> nn.Module:
    """Frozen and unfrozen in the middle: buckets are laid out anew, and state moves."""
    module = seeded(Mlp)
    module.layers[0].requires_grad_(False)
    ours = wrap(module, **options)
    optimizer = adamw(module.parameters())
    for step in range(12):
        module.layers[0].requires_grad_(step >= 3)
        module.layers[1].bias.requires_grad_(step not in (6, 7))
        with ours.no_sync() if step == 4 else nullcontext():
            mse(ours, step).backward()
        if step != 4:
            optimizer.step()
            optimizer.zero_grad()
    return module


def tied(wrap: Wrap) -> nn.Module:
    ours = wrap(seeded(SharedWeights))
    optimizer = adamw(ours.parameters())
    for step in range(6):
        mse(ours, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ours.module


def sparse_and_ignored(wrap: Wrap) -> nn.Module:
    module = seeded(Lookup)
    module.extra = nn.Linear(4, 4)
    module._ddp_params_and_buffers_to_ignore = ["extra.weight", "extra.bias"]
    ours = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(6):
        output = ours(*tokens(step, dist.get_rank()))
        (output + module.extra(torch.ones(4))).square().mean().backward()
        for param in module.extra.parameters():  # whose synchronisation is the user's
            dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return module


def plain(wrap: Wrap, optimizer: Callable[[Any], Optimizer] = adamw, steps: int = 8, **options: Any) -> nn.Module:
    ours = wrap(seeded(Mlp), **options)
    chosen = optimizer(ours.parameters())
    for step in range(steps):
        mse(ours, step).backward()
        chosen.step()
        chosen.zero_grad()
    return ours.module


def low_precision(wrap: Wrap, **options: Any) -> nn.Module:
    module = seeded(Mlp).bfloat16()
    ours = wrap(module, grad_dtype=torch.float32, **options)
    optimizer = adamw(module.parameters())
    for step in range(10):
        inputs, target = batch(step, dist.get_rank())
        with ours.no_sync() if step % 2 else nullcontext():
            nn.functional.mse_loss(ours(inputs.bfloat16()).float(), target).backward()
        if step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return module


def powersgd(wrap: Wrap) -> nn.Module:
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
    return plain(wrap, sgd, comm_hook="powersgd", comm_hook_state=state)


def divided(wrap: Wrap) -> nn.Module:
    """Local passes before the buckets are laid out anew, and after."""
    ours = wrap(seeded(Mlp), gradient_divide_by=5)
    optimizer = adamw(ours.parameters())
    for step in range(4):
        for at in range(3):
            with ours.no_sync() if at < 2 else nullcontext():
                mse(ours, 3 * step + at).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ours.module


def by_tokens(wrap: Wrap, **options: Any) -> nn.Module:
    ours = wrap(seeded(Mlp), gradient_divide_by="tokens", **options)
    optimizer = adamw(ours.parameters())
    for step in range(8):
        inputs, target = batch(step, dist.get_rank(), 3 + dist.get_rank())
        ours.count_tokens(len(inputs))
        with ours.no_sync() if step % 2 == 0 else nullcontext():
            (ours(inputs) - target).square().sum().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return ours.module


def uneven(wrap: Wrap) -> nn.Module:
    ours = wrap(seeded(Mlp))
    optimizer = adamw(ours.parameters())
    counts = [2 + dist.get_rank(), 6]
    ours.divide_by_active_ranks()
    for step in range(max(counts)):
        ours.set_active_ranks([rank for rank in range(dist.get_world_size()) if step < 2 + rank or rank == 1])
        with ours.no_sync() if step % 3 == 1 else nullcontext():
            loss = mse(ours, min(step, 5))
            if ours.is_replaying:
                loss = loss.detach()
            with ours.backward_pass(loss):
                if loss.requires_grad:
                    loss.backward()
        if step % 3 != 1:
            optimizer.step()
            optimizer.zero_grad()
    return ours.module


def by_hand(wrap: Wrap) -> nn.Module:
    ours = wrap(seeded(Mlp))
    optimizer = adamw(ours.parameters())
    for step in range(6):
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
        if step == 3:
            ours.zero_grad_buffer()
        else:
            optimizer.zero_grad()
    return ours.module


def with_closure(wrap: Wrap) -> nn.Module:
    ours = wrap(seeded(Mlp))
    optimizer = adamw(ours.parameters())
    for step in range(6):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = mse(ours, step)
            loss.backward()
            return loss

        assert float(optimizer.step(closure)) > 0
    return ours.module


def copies(wrap: Wrap) -> nn.Module:
    """Copied and pickled at any time; the copy goes on training."""
    ours = wrap(seeded(Mlp))
    optimizer = adamw(ours.parameters())
    for step in range(9):
        mse(ours, step).backward()
        if step == 2:  # with gradients
            values = [param.detach().clone() for param in ours.parameters()]
            for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours.module))):
                assert all(torch.equal(a, b) for a, b in zip(other.parameters(), values, strict=True))
        optimizer.step()
        optimizer.zero_grad()
        if step in (4, 6):  # parameters are on their way
            other = copy.deepcopy(ours) if step == 4 else pickle.loads(pickle.dumps(ours))
            saved = ours.optimizer_state_dict(optimizer, every_rank=True)
            assert all(torch.equal(a, b) for a, b in zip(other.parameters(), ours.parameters(), strict=True))
            assert all(type(param) is nn.Parameter for param in other.parameters())
            ours.close()
            ours, optimizer = other, adamw(other.parameters())
            mse(ours, 0)  # starts it
            ours.load_optimizer_state_dict(optimizer, saved)
    wrap.args[0].append(ours)  # type: ignore[attr-defined]
    return ours.module


def two_wrappers(wrap: Wrap) -> nn.Module:
    first, second = wrap(seeded(Mlp)), wrap(seeded(lambda: Mlp(12, 2)), bucket_cap_mb=None)
    optimizers = [adamw(first.parameters()), sgd(second.parameters())]
    for step in range(5):
        (mse(first, step) + mse(second, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return nn.ModuleList([first.module, second.module])


def until_closed(wrap: Wrap) -> nn.Module:
    """The wrapper is closed while parameters are on their way; training goes on without."""
    ours = wrap(seeded(Mlp))
    for step in range(2):
        optimizer = sgd(ours.parameters())
        mse(ours, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    ours.close()
    assert not any(isinstance(param, GatheredLater) for param in ours.parameters())
    assert largest_difference_between_ranks(ours.module) == 0
    inputs, target = batch(7, 0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for _ in range(2):
        loss_of(ours(inputs), target).backward()
        assert all(type(param.grad) is Tensor for param in ours.parameters())
        optimizer.step()
    return ours.module


TRAININGS: dict[str, tuple[Callable[..., nn.Module], float]] = {
    "gan": (gan, 1e-5),
    "gan_not_toggled": (partial(gan, toggled=False), 1e-5),
    "accumulation": (accumulation, 1e-5),
    "accumulation_zeros": (partial(accumulation, set_to_none=False), 1e-5),
    "unused": (unused, 1e-5),
    "unused_zeros": (partial(unused, zeroed=True), 1e-5),
    "used_on_one_rank": (partial(unused, by_rank=True), 1e-5),
    "freezing": (freezing, 1e-5),
    "tied": (tied, 1e-5),
    "sparse_and_ignored": (sparse_and_ignored, 1e-5),
    "hook_bf16": (partial(plain, optimizer=sgd, comm_hook="bf16"), 2e-2),
    "hook_powersgd": (powersgd, 1e-4),
    "wire_bf16": (partial(plain, optimizer=sgd, wire_dtype="bfloat16"), 2e-2),
    "low_precision": (low_precision, 1e-5),
    "divide_by_int": (divided, 1e-5),
    "divide_by_tokens": (by_tokens, 1e-5),
    "max_abs_grad": (partial(plain, max_abs_grad=1e3), 1e-5),
    "uneven": (uneven, 1e-5),
    "no_overlap": (partial(freezing, overlap=False), 1e-5),
    "by_hand": (by_hand, 1e-5),
    "closure": (with_closure, 1e-5),
    "copies": (copies, 1e-5),
    "two_wrappers": (two_wrappers, 1e-5),
    "closed": (until_closed, 1e-5),
}


def wrapped(made: list[BucketDDP], shard: bool, extra: dict[str, Any], module: nn.Module, **options: Any) -> BucketDDP:
    chosen = {"bucket_cap_mb": TINY, **(extra if shard else {}), **options}
    ours = BucketDDP(module, shard_optimizer=shard, **chosen)
    made.append(ours)
    return ours


def both_ways(name: str, extra: dict[str, Any]) -> None:
    training, tolerance = TRAININGS[name]
    made: list[BucketDDP] = []
    results = []
    for shard in (False, True):
        result = training(partial(wrapped, made, shard, extra))
        results.append({key: value.detach().clone() for key, value in result.named_parameters()})
        for ours in made:
            ours.close()
        if name != "sparse_and_ignored":
            assert largest_difference_between_ranks(result) == 0
        made.clear()
    for key, value in results[0].items():
        torch.testing.assert_close(
            results[1][key], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=key: f"{name}, {n}: {m}"
        )


def all_of(names: list[str], extra: dict[str, Any]) -> None:
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            both_ways(name, extra)


@pytest.mark.parametrize("name", list(TRAININGS))
def test_same_training_as_without_shards(run_ranks: RunRanks, name: str) -> None:
    run_ranks(3, both_ways, name, {})


def refusals() -> None:
    ours = BucketDDP(seeded(Mlp), shard_optimizer=True)
    with pytest.raises(ValueError, match="steps no optimizer"), ours.join():
        pass
    with ours.join(throw_on_early_termination=True):
        mse(ours, 0).backward()
    other = BucketDDP(seeded(Mlp), shard_optimizer=True)
    mse(other, 0).backward()
    with pytest.raises(ValueError, match="that is sharded by another one"):
        sgd([*ours.parameters(), *other.parameters()]).step()
    for kind, words in [
        (torch.optim.LBFGS, "LBFGS: its directions"),
        (torch.optim.Adafactor, "Adafactor: it keeps sums over rows"),
        (torch.optim.Muon, "Muon: it orthogonalises"),
        (OwnSgd, "declare_element_wise"),
    ]:
        params = [param for param in ours.parameters() if param.ndim == 2]
        with pytest.raises(ValueError, match=words):
            ours.prepare_optimizer(kind(params))
    optimizer = declare_element_wise(DeclaredSgd)(ours.parameters())
    before = [param.detach().clone() for param in ours.parameters()]
    optimizer.step()
    assert not any(torch.equal(param, value) for param, value in zip(ours.parameters(), before, strict=True))
    for options, words in [
        ({"scatter_every_pass": True}, "cannot be had with shard_optimizer=False"),
        ({"shard_optimizer": True, "scatter_every_pass": True, "gradient_divide_by": "tokens"}, "tokens of all passes"),
    ]:
        with pytest.raises(ValueError, match=words):
            BucketDDP(seeded(Mlp), **options)
    ours.close()
    other.close()


class OwnSgd(torch.optim.SGD):
    """Not known to be element-wise."""


class DeclaredSgd(OwnSgd):
    """Declared to be."""


def test_what_cannot_be_sharded_is_refused_by_name(run_ranks: RunRanks) -> None:
    run_ranks(2, refusals)


SCATTERED = [
    "gan",
    "accumulation",
    "accumulation_zeros",
    "freezing",
    "low_precision",
    "used_on_one_rank",
    "divide_by_int",
    "copies",
]


def test_local_passes_may_be_scattered_too(run_ranks: RunRanks) -> None:
    run_ranks(3, all_of, SCATTERED, {"scatter_every_pass": True})


def test_same_training_in_groups_of_ranks(run_ranks: RunRanks) -> None:
    names = ["gan", "accumulation", "freezing", "low_precision", "used_on_one_rank", "uneven", "copies"]
    run_ranks(4, all_of, names, {"shard_group_size": 2})


def only_shards() -> tuple[int, int]:
    ours = BucketDDP(seeded(Mlp), shard_optimizer=True, scatter_every_pass=True)
    optimizer = sgd(ours.parameters())
    buffers = reducer_of(ours).storage._inner.buffers
    for step in range(3):
        with ours.no_sync():
            mse(ours, step).backward()
        assert all(flat.untyped_storage().nbytes() == 0 for flat in buffers.flats)
        mse(ours, step).backward()
        norm = ours.grad_norm()
        for param in ours.parameters():
            param.grad.mul_(0.5)
            param.grad *= 2
        torch._foreach_mul_([param.grad for param in ours.parameters()], torch.tensor(3.0))
        torch.testing.assert_close(ours.grad_norm(), 3 * norm)
        for param in ours.parameters():
            with pytest.raises(RuntimeError, match="is sharded"):
                param.grad.mul_(torch.ones_like(param))
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(RuntimeError):  # nothing may be added to what has no memory
        sum(param.sum() for param in ours.parameters()).backward()
    held, numel = reducer_of(ours).storage.shards.numel, ours.layout.nbytes // 4
    ours.close()
    return held, numel


def test_only_shards_of_gradients_have_memory_between_passes(run_ranks: RunRanks) -> None:
    for held, numel in run_ranks(3, only_shards, fresh=True):
        assert held == numel // 3
