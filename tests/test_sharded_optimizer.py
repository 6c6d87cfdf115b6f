"""``shard_optimizer=True``: parity with one process, shards of state, what is waited for and what is refused."""

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm.work import Work
from lightning_bucketddp.optim import sharded_params
from lightning_bucketddp.optim.swap import master_params
from tests.inside import reducer_of
from tests.models import MODELS, batch
from tests.reference import largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0005  # MiB: several buckets

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adam_amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.002, momentum=0.9),
    "rmsprop_centred": lambda params: torch.optim.RMSprop(params, lr=0.005, momentum=0.9, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
}


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    params = list(module.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.003, "weight_decay": 0.0}]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return build()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    inputs, target = batch(step, rank)
    output = model(inputs)
    output = output if isinstance(output, Tensor) else output.logits
    return nn.functional.mse_loss(output, target)


def whole(plain: nn.Module) -> None:
    """The gradients that one process would have."""
    expected = mean_over_ranks(plain)
    for name, param in plain.named_parameters():
        param.grad = expected[name]


def parity(model: str, optimizer: str, steps: int, options: dict[str, Any], clip: float | None) -> float:
    plain = seeded(MODELS[model])
    ours = BucketDDP(copy.deepcopy(plain), shard_optimizer=True, **options)
    reference = OPTIMIZERS[optimizer](two_groups(plain))
    sharded = OPTIMIZERS[optimizer](two_groups(ours.module))
    rank = dist.get_rank()
    for step in range(steps):
        for at in range(2 if step % 3 == 2 else 1):  # accumulation now and then
            with ours.no_sync() if step % 3 == 2 and at == 0 else nullcontext():
                loss_of(ours, 2 * step + at, rank).backward()
            loss_of(plain, 2 * step + at, rank).backward()
        whole(plain)
        if clip is not None:
            mine = ours.clip_grad_norm_(clip)
            theirs = nn.utils.clip_grad_norm_(plain.parameters(), clip)
            torch.testing.assert_close(mine, theirs.float(), rtol=5e-3 if model == "mixed_dtypes" else 1e-4, atol=1e-6)
        for it in (reference, sharded):
            it.step()
            it.zero_grad()
    worst = 0.0
    for (name, mine), theirs in zip(ours.module.named_parameters(), plain.parameters(), strict=True):
        tolerance = 2e-2 if mine.dtype is torch.bfloat16 else 2e-4
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
        worst = max(worst, float((mine - theirs).detach().abs().max()))
    ours.synchronise_module_buffers()
    assert largest_difference_between_ranks(ours.module) == 0
    ours.close()
    return worst


def close_after_step() -> tuple[int, float]:
    """How many buckets were on their way when it was closed, and the difference between ranks."""
    ours = BucketDDP(seeded(MODELS["mlp"]), shard_optimizer=True, bucket_cap_mb=TINY)
    optimizer = OPTIMIZERS["adamw"](ours.module.parameters())
    loss_of(ours, 0, dist.get_rank()).backward()
    optimizer.step()
    arrivals = list(ours._runtime.optimizers.parts._arrivals.values())
    ours.close()
    assert all(arrival._wait is None for arrival in arrivals), "they were waited for"
    assert all(type(param) is nn.Parameter for param in ours.module.parameters())
    state = ours.optimizer_state_dict(optimizer, every_rank=True)
    assert state is not None
    shapes = [list(state["state"][index]["exp_avg"].shape) for index in range(len(state["state"]))]
    assert shapes == [list(param.shape) for param in ours.module.parameters()]
    return len(arrivals), largest_difference_between_ranks(ours.module)


def test_closing_waits_for_parameters_and_leaves_whole_state_to_be_had(run_ranks: RunRanks) -> None:
    for under_way, difference in run_ranks(3, close_after_step):
        assert under_way > 1
        assert difference == 0


class Towers(nn.Module):
    """Modules next to each other, each of which has an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: MODELS["mlp"]() for name in ("sgd", "adamw", "rmsprop", "adagrad")})

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([tower(inputs) for tower in self.towers.values()])


def hundred_steps() -> None:
    plain = seeded(Towers)
    ours = BucketDDP(copy.deepcopy(plain), shard_optimizer=True, bucket_cap_mb=0.01)
    assert len(ours.layout.buckets) > 1
    pairs = [
        (OPTIMIZERS[name](two_groups(ours.module.towers[name])), OPTIMIZERS[name](two_groups(tower)))
        for name, tower in plain.towers.items()
    ]

    def loss_of_rank(module: nn.Module, step: int, rank: int) -> Tensor:
        inputs, target = batch(step, rank)
        return nn.functional.mse_loss(module(inputs), target.expand(4, *target.shape))

    ranks = range(dist.get_world_size())
    for step in range(100):
        loss_of_rank(ours, step, dist.get_rank()).backward()
        (sum(loss_of_rank(plain, step, rank) for rank in ranks) / len(ranks)).backward()
        for optimizers in pairs:
            for optimizer in optimizers:
                optimizer.step()
        for module in (ours, plain):
            module.zero_grad()
    for (name, mine), theirs in zip(ours.module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert largest_difference_between_ranks(ours.module) == 0
    ours.close()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parity_with_one_process_over_a_hundred_steps(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, hundred_steps)


@pytest.mark.parametrize("optimizer", ["rmsprop_centred", "adam_amsgrad", "adamax", "nadam"])
def test_parity_with_one_process(run_ranks: RunRanks, optimizer: str) -> None:
    run_ranks(3, parity, "mlp", optimizer, 30, {"bucket_cap_mb": TINY}, None)


def counted_sends(ours: BucketDDP) -> list[int]:
    """How many buckets go with each send from now on."""
    params, sent = ours._runtime.optimizers.parts, []
    send = params.send

    def count(given: list[Tensor], complete: bool = True) -> None:
        sent.append(len({params.find(param).part.bucket for param in given}))
        send(given, complete)

    params.send = count  # type: ignore[method-assign]
    return sent


def in_stages(optimizer: str) -> None:
    """What forward needs first is on its way while the rest is stepped on; the bits are those of one step."""
    trained = []
    cut = sharded_params.ShardedParams.in_stages
    for most in (1, 3):
        sharded_params.MAX_STAGES = most
        sharded_params.ShardedParams.in_stages = cut if most > 1 else lambda self, params: []  # type: ignore[method-assign]
        ours = BucketDDP(seeded(MODELS["mlp"]), shard_optimizer=True, bucket_cap_mb=TINY)
        stepper = OPTIMIZERS[optimizer](two_groups(ours.module))
        scheduler = torch.optim.lr_scheduler.StepLR(stepper, 1, 0.9)
        counted: list[int] = []
        stepper.register_step_post_hook(lambda *_, counted=counted: counted.append(len(counted)))
        for step in range(4):
            loss_of(ours, step, dist.get_rank()).backward()
            sent = counted_sends(ours)
            stepper.step()
            del ours._runtime.optimizers.parts.send
            stepper.zero_grad()
            scheduler.step()
            assert len(ours.layout.buckets) > 3
            assert len(sent) == (1 if most == 1 else most + 1)
            assert sum(sent) == len(ours.layout.buckets)
        assert len(counted) == 4, "whoever hooks steps sees one"
        assert all(it["step"] == 4 for it in stepper.state.values() if "step" in it)
        trained.append([param.detach().clone() for param in ours.module.parameters()])
        ours.close()
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adagrad", "nadam"])
def test_steps_in_stages(run_ranks: RunRanks, optimizer: str) -> None:
    run_ranks(2, in_stages, optimizer, fresh=True)


@pytest.mark.parametrize("model", list(MODELS))
def test_parity_for_all_kinds_of_modules(run_ranks: RunRanks, model: str) -> None:
    optimizer = "sgd" if model == "mixed_dtypes" else "adamw"  # which makes much of bf16's rounding
    run_ranks(3, parity, model, optimizer, 8, {"bucket_cap_mb": TINY}, 0.1)


def summed_during_backward() -> tuple[int, int]:
    """How many of the buckets had been summed when backward ended, and how many there were."""
    ours = BucketDDP(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), shard_optimizer=True, bucket_cap_mb=0.001)
    ours(torch.ones(2, 32)).sum().backward()  # launches nothing early
    ours.zero_grad()
    reducer = reducer_of(ours)
    buckets, found = reducer.buckets, []
    proceed = reducer.reduction.proceed

    def noting(on_idle: Callable[[], None]) -> None:
        found.append(sum(bucket.work._handle is None for bucket in buckets.active))
        proceed(on_idle)

    def until_the_first_has_arrived(grad: Tensor) -> None:
        deadline = time.monotonic() + 60
        while not buckets.active[0].work.done() and time.monotonic() < deadline:
            time.sleep(0.001)

    reducer.reduction.proceed = noting
    ours.module[0].register_forward_hook(lambda *it: it[-1].register_hook(until_the_first_has_arrived) and None)
    ours(torch.ones(2, 32)).sum().backward()
    torch.testing.assert_close(ours.full_grad(ours.module[3].bias), torch.full((32,), 2.0))
    count = len(buckets.active)
    ours.close()
    return found[0], count


def test_shards_are_summed_as_they_arrive(run_ranks: RunRanks) -> None:
    for summed, buckets in run_ranks(2, summed_during_backward):
        assert 1 <= summed <= buckets


class Failed:
    """A collective that has come to a bad end."""

    def is_completed(self) -> bool:
        return True

    def wait(self, *_: Any) -> None:
        raise RuntimeError("broken")


def test_a_reduction_that_failed_is_left_to_the_end_of_backward() -> None:
    done: list[int] = []
    pending = Work(Failed(), lambda: done.append(1), on_host=True)
    assert not pending.settle()
    with pytest.raises(RuntimeError, match="broken"):
        pending.wait()
    assert not done


def beside_sharded_ones() -> None:
    ours = BucketDDP(seeded(MODELS["mlp"]).bfloat16(), shard_optimizer=True, grad_dtype=torch.float32)
    other = nn.Parameter(torch.full((3,), 0.5, dtype=torch.bfloat16))
    other.grad_dtype = torch.float32
    plain = nn.Parameter(other.detach().float())
    optimizers = [torch.optim.AdamW([*ours.parameters(), other], lr=0.01), torch.optim.AdamW([plain], lr=0.01)]
    for step in range(3):
        ours(batch(step, dist.get_rank())[0].bfloat16()).square().mean().backward()
        other.grad = torch.full((3,), 0.1 + step)
        plain.grad = other.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    swap = ours.prepare_optimizer(optimizers[0])
    assert torch.equal(swap.master(other), plain.detach())
    assert not torch.equal(plain, plain.bfloat16().float())
    parts = [swap.master(param) for param in ours.parameters()]
    assert 0 < sum(part.numel() for part in parts if part is not None) < sum(it.numel() for it in ours.parameters())
    state = ours.optimizer_state_dict(optimizers[0], every_rank=True)
    assert torch.equal(state["master_params"][len(parts)], plain.detach())
    assert [state["master_params"][at].shape for at in range(len(parts))] == [it.shape for it in ours.parameters()]
    prepared = torch.optim.SGD(ours.parameters(), lr=0.1)
    master_params(prepared)
    with pytest.raises(ValueError, match="or has whole master parameters"):
        ours.prepare_optimizer(prepared)
    ours.close()


def test_a_parameter_that_is_not_sharded_has_a_master_of_all_of_it(run_ranks: RunRanks) -> None:
    run_ranks(2, beside_sharded_ones, fresh=True)


def masters_in_stages() -> None:
    ours = BucketDDP(
        seeded(MODELS["mlp"]).bfloat16(), shard_optimizer=True, grad_dtype=torch.float32, bucket_cap_mb=TINY
    )
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    for step in range(3):
        ours(batch(step, dist.get_rank())[0].bfloat16()).square().mean().backward()
        sent = counted_sends(ours)
        optimizer.step()
        optimizer.zero_grad()
        assert len(sent) > 2
    assert any(ours.prepare_optimizer(optimizer).master(param) is not None for param in ours.parameters())
    assert not any(flat.requires_grad for flat in ours._runtime.optimizers.parts._buffers.flats)
    ours.close()


def test_masters_that_are_stepped_on_in_stages_leave_no_graph(run_ranks: RunRanks) -> None:
    run_ranks(2, masters_in_stages, fresh=True)
