"""The scenarios in plain PyTorch whose collectives are recorded. Each rank runs the whole function."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lightning_bucketddp import BucketDDP, PeerFailureError, convert_sync_batchnorm
from tests import models, reference
from tests.models import Branches, ConvBatchNorm, Lookup, Mlp, batch, tokens
from tests.reference import TINY, loss_at
from tests.traces.recorder import mark


class Scenario(NamedTuple):
    """A function that is recorded, on how many ranks, and whether their processes cannot be used afterwards."""

    run: Callable[[], object]
    ranks: int = 2
    fresh: bool = False


SCENARIOS: dict[str, Scenario] = {}


def scenario(run: Callable[[], object], ranks: int = 2, fresh: bool = False) -> None:
    SCENARIOS[run.__name__] = Scenario(run, ranks, fresh)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)  # without momentum, which would not go from sparse to dense


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def wrap(module: nn.Module, **options: Any) -> BucketDDP:
    mark("wrapping")
    return BucketDDP(module, **{"bucket_cap_mb": TINY, **options})


def lookup(net: nn.Module, step: int, **options: bool) -> Tensor:
    return net(*tokens(step, dist.get_rank()), **options).square().mean()


def train(
    net: BucketDDP,
    steps: int = 2,
    micro: int = 1,
    loss: Callable[..., Tensor] = loss_at,
    call: Callable[[int, int], dict[str, Any]] = lambda step, rank: {},
    optimizer: torch.optim.Optimizer | Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    before_step: Callable[[BucketDDP], object] = lambda net: None,
    set_to_none: bool = True,
) -> None:
    """Some steps, each of ``micro`` backwards. ``call`` tells further inputs of forward, by step and rank."""
    optimizer = optimizer(net) if callable(optimizer) else optimizer
    for step in range(steps):
        mark(f"step {step}")
        optimizer.zero_grad(set_to_none)
        for at in range(step * micro, step * micro + micro):
            with net.no_sync() if (at + 1) % micro else nullcontext():
                loss(net, at, **call(at, dist.get_rank())).backward()
        before_step(net)
        optimizer.step()


def trains(
    name: str,
    build: Callable[[], nn.Module] = Mlp,
    options: dict[str, Any] | None = None,
    ranks: int = 2,
    between: Callable[[BucketDDP], object] | None = None,
    **settings: Any,
) -> None:
    """Adds one training, or two with something ``between`` them; ``settings`` are those of ``train``."""

    def run() -> None:
        net = wrap(build(), **(options or {}))
        train(net, **settings)
        if between is not None:
            between(net)
            train(net, **settings)

    SCENARIOS[name] = Scenario(run, ranks)


def one_backward_more(net: nn.Module, step: int) -> Tensor:
    loss_at(net, step).backward()
    return loss_at(net, step + 9)


trains("plain", steps=3)
trains("plain_three_ranks", ranks=3)
trains("order_learned_in_the_first_pass", models.OutOfOrder)
trains("order_that_differs_between_ranks", models.Towers, call=lambda step, rank: {"swapped": rank == 1})
trains("accumulation", micro=3)
trains("zero_grad_to_zeros", steps=3, set_to_none=False)
trains("two_backwards_without_zero_grad", loss=one_backward_more)
trains("reentrant_checkpoint", lambda: models.Checkpointed(use_reentrant=True, calls=2))
trains("mixed_dtypes", models.MixedDtypes)
trains("compiled", lambda: torch.compile(Mlp(), backend="eager"))


@scenario
def accumulation_from_the_second_step() -> None:
    net = wrap(Mlp())
    train(net, steps=1)
    train(net, micro=2)


@scenario
def gradients_by_autograd_grad() -> None:
    net = wrap(Mlp())
    torch.autograd.grad(loss_at(net), list(net.parameters()))
    train(net)


def gan(net: nn.Module, generator: nn.Module, critic: nn.Module) -> None:
    for step in range(3):
        for name in ("critic", "generator"):
            mark(f"step {step}, {name}")
            generator.requires_grad_(name == "generator").zero_grad()
            critic.requires_grad_(name == "critic").zero_grad()
            net(batch(step, dist.get_rank())[0]).mean().backward()


@scenario
def gan_with_two_wrappers() -> None:
    generator, critic = wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), wrap(nn.Linear(8, 4))
    gan(nn.Sequential(generator, critic), generator, critic)


@scenario
def gan_in_one_wrapper() -> None:
    net = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    gan(net, net.module[0], net.module[1])


@scenario
def sharded_gan() -> None:
    net = wrap(nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 4)), shard_optimizer=True)
    gan(net, net.module[0], net.module[1])


@scenario
def two_wrappers_in_one_backward() -> None:
    nets = [wrap(Branches()), wrap(Mlp())]
    for step in range(3):
        mark(f"step {step}")
        (loss_at(nets[0], step, take="left" if dist.get_rank() else "both") + loss_at(nets[1], step)).backward()
        for net in nets:
            net.zero_grad()


def frozen_layers() -> nn.Module:
    module = Mlp()
    module.layers.requires_grad_(False)
    return module


trains("unfreezing", frozen_layers, between=lambda net: net.module.requires_grad_(True))
trains("freezing", between=lambda net: net.module.layers[0].requires_grad_(False))
trains("replaced_head", between=lambda net: setattr(net.module, "head", nn.Linear(16, 4)))


@scenario
def wrapped_again() -> None:
    net = wrap(Mlp())
    train(net)
    train(wrap(net.module))


@scenario
def loss_that_reaches_nothing_on_one_rank() -> None:
    net = wrap(Mlp())
    for step in range(3):
        mark(f"step {step}")
        net.zero_grad()
        loss = torch.ones((), requires_grad=True) if step == dist.get_rank() == 1 else loss_at(net, step)
        with net.backward_pass(loss):
            loss.backward()


left_or_none: dict[str, Any] = {"call": lambda step, rank: {"take": "left" if rank else "none"}}
trains("find_unused_parameters", Branches, {"find_unused_parameters": True}, **left_or_none)
trains("branch_by_rank", Branches, call=lambda step, rank: {"take": "right" if rank else "left"})
trains("parameters_that_no_rank_uses", Branches, call=lambda step, rank: {"take": "left" if step else "both"})

trains("sparse", Lookup, loss=lookup)
trains("sparse_mean_with_accumulation", lambda: Lookup("mean"), loss=lookup, micro=2)
tied_once: dict[str, Any] = {"call": lambda step, rank: {"tied": step == rank == 1}}
trains("sparse_on_one_rank_dense_on_the_other", Lookup, loss=lookup, **tied_once)
trains("sparse_unused_on_one_rank", Lookup, loss=lookup, call=lambda step, rank: {"use_words": step != rank})


def counted(net: BucketDDP, step: int) -> Tensor:
    net.count_tokens(step + 1)
    return loss_at(net, step)


trains("divided_by_tokens", Mlp, {"gradient_divide_by": "tokens"}, loss=counted, micro=2)
trains("divided_by_an_integer", Mlp, {"gradient_divide_by": 7})
trains("hook_fp16", Mlp, {"comm_hook": "fp16"})
trains("hook_bf16", Mlp, {"comm_hook": "bf16"})
trains("wire_bf16", Mlp, {"wire_dtype": "bfloat16"})
trains("wire_int8", Mlp, {"wire_dtype": "int8"})
trains("wire_fp16_three_ranks", Mlp, {"wire_dtype": "float16"}, ranks=3)
trains("gradients_not_in_buffers", models.MixedDtypes, {"use_contiguous_buffers": False})
trains("no_overlap", Mlp, {"overlap": False})
trains("fp16_parameters", lambda: Mlp().half())
trains("fp32_gradients_and_masters", lambda: Mlp().bfloat16(), {"grad_dtype": torch.float32}, micro=2)
trains("max_abs_grad", Mlp, {"max_abs_grad": 100.0})
trains("padded_buckets", Mlp, {"pad_buckets_to": 512})


def two_stages(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.MAX)
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


@scenario
def hook_of_ones_own() -> None:
    net = wrap(Mlp())
    train(net, steps=1)
    net.register_comm_hook(None, two_stages)
    train(net)


@scenario
def hook_powersgd() -> None:
    state = PowerSGDState(None, 1, start_powerSGD_iter=2)
    train(wrap(Mlp(width=12), comm_hook="powersgd", comm_hook_state=state), steps=4)


@scenario
def megatron_calls() -> None:
    net = wrap(Mlp())
    for step in range(2):
        mark(f"step {step}")
        with net.no_sync():
            loss_at(net, step).backward()
        net.allreduce_gradients()
        net.zero_grad_buffer()
    mark("broadcast_params")
    net.broadcast_params()


SHARDED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "sharded": (Mlp, {}, {}),
    "sharded_three_ranks": (Mlp, {}, {"ranks": 3}),
    "sharded_many_buckets": (lambda: Mlp(depth=8), {}, {}),
    "sharded_accumulation": (Mlp, {}, {"micro": 2}),
    "sharded_scatter_every_pass": (Mlp, {"scatter_every_pass": True}, {"micro": 3}),
    "sharded_in_groups_of_one": (Mlp, {"shard_group_size": 1}, {}),
    "sharded_in_groups_of_two": (Mlp, {"shard_group_size": 2}, {"ranks": 4}),
    "sharded_wire_bf16": (Mlp, {"wire_dtype": "bfloat16"}, {}),
    "sharded_masters": (lambda: Mlp().bfloat16(), {"grad_dtype": torch.float32}, {}),
    "sharded_clipping": (Mlp, {}, {"before_step": lambda net: net.clip_grad_norm_(0.1)}),
}
for name, (build, options, settings) in SHARDED.items():
    trains(name, build, {"shard_optimizer": True, **options}, optimizer=adamw, **settings)


@scenario
def sharded_freezing_and_questions() -> None:
    net = wrap(Mlp(), shard_optimizer=True)
    optimizer = adamw(net)
    train(net, optimizer=optimizer)
    net.module.layers[0].requires_grad_(False)
    train(net, optimizer=optimizer, before_step=lambda net: net.full_grad(net.module.head.weight))
    mark("optimizer_state_dict")
    net.optimizer_state_dict(optimizer)


def join(build: Callable[[], nn.Module], by_initial: bool) -> None:
    net = wrap(build())
    with net.join(divide_by_initial_world_size=by_initial):
        train(net, steps=2 + dist.get_rank())
        mark("out of data")
    train(net, steps=1)


SCENARIOS["join_by_initial_world_size"] = Scenario(partial(join, Mlp, True))
SCENARIOS["join_with_module_buffers"] = Scenario(partial(join, ConvBatchNorm, True))
SCENARIOS["join_by_ranks_with_data"] = Scenario(partial(join, Mlp, False), ranks=3)


@partial(scenario, fresh=True)
def failure_on_one_rank() -> None:
    net = wrap(models.Fragile(), bucket_cap_mb=0.0001)
    train(net)
    mark("step 2")
    loss = loss_at(net, 2, fail=dist.get_rank() == 1)
    with pytest.raises((ArithmeticError, PeerFailureError)), net.backward_pass(loss):
        loss.backward()


@partial(scenario, fresh=True)
def failure_on_all_ranks() -> None:
    net = wrap(models.Fragile(), bucket_cap_mb=0.0001)
    train(net)
    mark("step 2")
    loss = loss_at(net, 2, fail=True)
    with pytest.raises(ArithmeticError):
        loss.backward()


def evaluate_on_rank_0(net: BucketDDP) -> None:
    mark("evaluation")
    if dist.get_rank() == 0:
        with torch.no_grad():
            loss_at(net.eval())
            loss_at(net.train())


trains("evaluation_on_one_rank", ConvBatchNorm, between=evaluate_on_rank_0)
for choice in ("broadcast", "mean", "off"):
    trains(f"module_buffers_{choice}", ConvBatchNorm, {"module_buffers": choice})
trains("module_buffers_with_accumulation", ConvBatchNorm, micro=3)
trains("sync_batchnorm", lambda: convert_sync_batchnorm(ConvBatchNorm()))
trains("no_first_synchronisation", ConvBatchNorm, {"init_sync": False})
trains("two_replicas_in_each_process", Mlp, {"device_ids": ["cpu", "cpu"]})


@partial(scenario, ranks=3)
def subgroup() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        train(wrap(ConvBatchNorm(), process_group=group))


@scenario
def several_machines() -> None:
    with reference.several_machines():
        net = wrap(Mlp())
    train(net, steps=3)
