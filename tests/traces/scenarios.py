"""The scenarios in plain PyTorch whose collectives are recorded. Each rank runs the whole function."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lightning_bucketddp import BucketDDP, PeerFailureError, convert_sync_batchnorm
from tests.models import (
    Branches,
    Checkpointed,
    ConvBatchNorm,
    Fragile,
    Lookup,
    MixedDtypes,
    Mlp,
    OutOfOrder,
    Towers,
    batch,
    loss_of,
    tokens,
)
from tests.traces.recorder import mark

TINY = 0.0003  # MiB: several buckets in the smallest model


@dataclass(frozen=True)
class Scenario:
    """A function that is recorded.

    Attributes:
        run: The function.
        ranks: Number of ranks.
        fresh: Whether the ranks' processes cannot be used afterwards.
    """

    run: Callable[[], object]
    ranks: int
    fresh: bool = False


SCENARIOS: dict[str, Scenario] = {}


def add(ranks: int = 2, **runs: Callable[[], object]) -> None:
    """Adds functions to the table, by name."""
    SCENARIOS.update({name: Scenario(run, ranks) for name, run in runs.items()})


def scenario(ranks: int = 2, fresh: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Adds one that is longer than a line."""

    def add_one(run: Callable[[], None]) -> Callable[[], None]:
        SCENARIOS[run.__name__] = Scenario(run, ranks, fresh)
        return run

    return add_one


def wrap(module: nn.Module, **options: Any) -> BucketDDP:
    mark("wrapping")
    return BucketDDP(module, **{"bucket_cap_mb": TINY, **options})


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)  # without momentum, which would not go from sparse to dense


def loss_in(net: nn.Module, step: int = 0, *args: Any, **options: Any) -> Tensor:
    inputs, target = batch(step, dist.get_rank())
    dtype = next(net.parameters()).dtype
    return loss_of(net(inputs.to(dtype), *args, **options).float(), target)


def train(
    net: BucketDDP,
    steps: int = 2,
    micro: int = 1,
    loss: Callable[[BucketDDP, int], Tensor] = loss_in,
    before_step: Callable[[BucketDDP], object] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    set_to_none: bool = True,
) -> None:
    """Some steps, each of ``micro`` backwards of which the last one is synchronised."""
    optimizer = optimizer or sgd(net)
    for step in range(steps):
        mark(f"step {step}")
        optimizer.zero_grad(set_to_none)
        for index in range(micro):
            with net.no_sync() if index < micro - 1 else nullcontext():
                loss(net, step * micro + index).backward()
        if before_step is not None:
            before_step(net)
        optimizer.step()


def raising(run: Callable[[], object], *errors: type[Exception]) -> None:
    with pytest.raises(errors):
        run()


# -- passes ------------------------------------------------------------------------------------------


@scenario()
def accumulation_from_the_second_step() -> None:
    net = wrap(Mlp())
    train(net, steps=1)
    train(net, steps=2, micro=2)


@scenario()
def gradients_by_autograd_grad() -> None:
    net = wrap(Mlp())
    torch.autograd.grad(loss_in(net), list(net.parameters()))
    train(net, steps=2)


add(
    plain=lambda: train(wrap(Mlp()), steps=3),
    order_learned_in_the_first_pass=lambda: train(wrap(OutOfOrder())),
    order_that_differs_between_ranks=lambda: train(
        wrap(Towers()), loss=lambda net, step: loss_in(net, step, swapped=dist.get_rank() == 1)
    ),
    accumulation=lambda: train(wrap(Mlp()), micro=3),
    zero_grad_to_zeros=lambda: train(wrap(Mlp()), steps=3, set_to_none=False),
    two_backwards_without_zero_grad=lambda: train(
        wrap(Mlp()), loss=lambda net, step: (loss_in(net, step).backward(), loss_in(net, step + 9))[1]
    ),
    reentrant_checkpoint=lambda: train(wrap(Checkpointed(use_reentrant=True, calls=2))),
    mixed_dtypes=lambda: train(wrap(MixedDtypes())),
    compiled=lambda: train(wrap(torch.compile(Mlp(), backend="eager"))),
)
add(ranks=3, plain_three_ranks=lambda: train(wrap(Mlp())))

# -- what is trained, and what gets a gradient -------------------------------------------------------


def gan(generator: nn.Module, critic: nn.Module, params: tuple[nn.Module, nn.Module]) -> None:
    for step in range(3):
        for at, name in enumerate(("critic", "generator")):
            mark(f"step {step}, {name}")
            for index, module in enumerate(params):
                module.requires_grad_(index == 1 - at).zero_grad()
            inputs, _ = batch(step, dist.get_rank())
            critic(generator(inputs)).mean().backward()


@scenario()
def gan_with_two_wrappers() -> None:
    generator, critic = wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), wrap(nn.Linear(8, 4))
    gan(generator, critic, (generator, critic))


@scenario()
def gan_in_one_wrapper() -> None:
    both = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    gan(nn.Identity(), wrap(both), (both[0], both[1]))


@scenario()
def two_wrappers_in_one_backward() -> None:
    nets = [wrap(Branches()), wrap(Mlp())]
    for step in range(3):
        mark(f"step {step}")
        take = "left" if dist.get_rank() else "both"
        (loss_in(nets[0], step, take) + loss_in(nets[1], step)).backward()
        for net in nets:
            net.zero_grad()


@scenario()
def unfreezing() -> None:
    module = Mlp()
    module.layers.requires_grad_(False)
    net = wrap(module)
    train(net, steps=2)
    module.layers.requires_grad_(True)
    train(net, steps=2)


@scenario()
def freezing() -> None:
    net = wrap(Mlp())
    train(net, steps=2)
    net.module.layers[0].requires_grad_(False)
    train(net, steps=2)


@scenario()
def loss_that_reaches_nothing_on_one_rank() -> None:
    net = wrap(Mlp())
    for step in range(3):
        mark(f"step {step}")
        net.zero_grad()
        loss = torch.ones((), requires_grad=True) if step == dist.get_rank() == 1 else loss_in(net, step)
        with net.backward_pass(loss):
            loss.backward()


@scenario()
def find_unused_parameters() -> None:
    net = wrap(Branches(), find_unused_parameters=True)
    train(net, loss=lambda net, step: loss_in(net, step, "left" if dist.get_rank() else "none"))


add(
    branch_by_rank=lambda: train(
        wrap(Branches()), loss=lambda net, step: loss_in(net, step, ["left", "right"][dist.get_rank()])
    ),
    parameters_that_no_rank_uses=lambda: train(
        wrap(Branches()), loss=lambda net, step: loss_in(net, step, "left" if step else "both")
    ),
)


# -- sparse gradients --------------------------------------------------------------------------------


def lookup_loss(net: BucketDDP, step: int, **options: bool) -> Tensor:
    return net(*tokens(step, dist.get_rank()), **options).square().mean()


add(
    sparse=lambda: train(wrap(Lookup()), loss=lookup_loss),
    sparse_mean_with_accumulation=lambda: train(wrap(Lookup("mean")), loss=lookup_loss, micro=2),
    sparse_on_one_rank_dense_on_the_other=lambda: train(
        wrap(Lookup()), loss=lambda net, step: lookup_loss(net, step, tied=step == dist.get_rank() == 1)
    ),
    sparse_unused_on_one_rank=lambda: train(
        wrap(Lookup()), loss=lambda net, step: lookup_loss(net, step, use_words=step != dist.get_rank())
    ),
)


# -- how gradients travel ----------------------------------------------------------------------------


def two_stages(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    dist.all_reduce(buffer, op=dist.ReduceOp.MAX)
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


@scenario()
def hook_of_ones_own() -> None:
    net = wrap(Mlp())
    train(net, steps=1)
    net.register_comm_hook(None, two_stages)
    train(net, steps=2)


@scenario()
def hook_powersgd() -> None:
    state = PowerSGDState(None, 1, start_powerSGD_iter=2)
    train(wrap(Mlp(width=12), comm_hook="powersgd", comm_hook_state=state), steps=4)


@scenario()
def divided_by_tokens() -> None:
    def loss(net: BucketDDP, step: int) -> Tensor:
        net.count_tokens(step + 1)
        return loss_in(net, step)

    train(wrap(Mlp(), gradient_divide_by="tokens"), loss=loss, micro=2)


@scenario()
def megatron_calls() -> None:
    net = wrap(Mlp())
    for step in range(2):
        mark(f"step {step}")
        with net.no_sync():
            loss_in(net, step).backward()
        net.allreduce_gradients()
        net.zero_grad_buffer()
    mark("broadcast_params")
    net.broadcast_params()


add(
    hook_fp16=lambda: train(wrap(Mlp(), comm_hook="fp16")),
    hook_bf16=lambda: train(wrap(Mlp(), comm_hook="bf16")),
    wire_bf16=lambda: train(wrap(Mlp(), wire_dtype="bfloat16")),
    gradients_not_in_buffers=lambda: train(wrap(MixedDtypes(), use_contiguous_buffers=False)),
    no_overlap=lambda: train(wrap(Mlp(), overlap=False)),
    fp16_parameters=lambda: train(wrap(Mlp().half())),
    fp32_gradients_and_masters=lambda: train(wrap(Mlp().bfloat16(), grad_dtype=torch.float32), micro=2),
    divided_by_an_integer=lambda: train(wrap(Mlp(), gradient_divide_by=7)),
    max_abs_grad=lambda: train(wrap(Mlp(), max_abs_grad=100.0)),
    padded_buckets=lambda: train(wrap(Mlp(), pad_buckets_to=512)),
)
add(ranks=3, wire_fp16_three_ranks=lambda: train(wrap(Mlp(), wire_dtype="float16")))

# -- a sharded optimizer -----------------------------------------------------------------------------


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def shard(steps: int = 2, micro: int = 1, module: nn.Module | None = None, **options: Any) -> BucketDDP:
    net = wrap(module if module is not None else Mlp(), shard_optimizer=True, **options)
    train(net, steps, micro, optimizer=adamw(net))
    return net


@scenario()
def sharded_clipping() -> None:
    net = wrap(Mlp(), shard_optimizer=True)
    train(net, optimizer=adamw(net), before_step=lambda net: net.clip_grad_norm_(0.1))


@scenario()
def sharded_freezing_and_questions() -> None:
    net = wrap(Mlp(), shard_optimizer=True)
    optimizer = adamw(net)
    train(net, 2, optimizer=optimizer)
    net.module.layers[0].requires_grad_(False)
    train(net, 2, optimizer=optimizer, before_step=lambda net: net.full_grad(net.module.head.weight))
    mark("optimizer_state_dict")
    net.optimizer_state_dict(optimizer)


add(
    sharded=shard,
    sharded_many_buckets=lambda: shard(module=Mlp(depth=8)),
    sharded_accumulation=lambda: shard(micro=2),
    sharded_scatter_every_pass=lambda: shard(micro=3, scatter_every_pass=True),
    sharded_in_groups_of_one=lambda: shard(shard_group_size=1),
    sharded_wire_bf16=lambda: shard(wire_dtype="bfloat16"),
    sharded_masters=lambda: shard(module=Mlp().bfloat16(), grad_dtype=torch.float32),
)
add(ranks=3, sharded_three_ranks=shard)
add(ranks=4, sharded_in_groups_of_two=lambda: shard(shard_group_size=2))

# -- join --------------------------------------------------------------------------------------------


def join(net: BucketDDP, by_initial: bool) -> None:
    with net.join(divide_by_initial_world_size=by_initial):
        train(net, steps=2 + dist.get_rank())
        mark("out of data")
    train(net, steps=1)


add(
    join_by_initial_world_size=lambda: join(wrap(Mlp()), True),
    join_with_module_buffers=lambda: join(wrap(ConvBatchNorm()), True),
)
add(ranks=3, join_by_ranks_with_data=lambda: join(wrap(Mlp()), False))

# -- failures ----------------------------------------------------------------------------------------


@scenario(fresh=True)
def failure_on_one_rank() -> None:
    net = wrap(Fragile(), bucket_cap_mb=0.0001)
    train(net, steps=2)
    mark("step 2")
    loss = loss_in(net, 2, fail=dist.get_rank() == 1)

    def backward() -> None:
        with net.backward_pass(loss):
            loss.backward()

    raising(backward, ArithmeticError, PeerFailureError)


@scenario()
def failure_on_all_ranks() -> None:
    net = wrap(Fragile(), bucket_cap_mb=0.0001)
    train(net, steps=2)
    mark("failing")
    raising(lambda: loss_in(net, 2, fail=True).backward(), ArithmeticError)
    train(net, steps=2)


# -- module buffers ----------------------------------------------------------------------------------


@scenario()
def evaluation_on_one_rank() -> None:
    net = wrap(ConvBatchNorm())
    train(net, steps=2)
    mark("evaluation")
    if dist.get_rank() == 0:
        with torch.no_grad():
            loss_in(net.eval())
            loss_in(net.train())
    train(net, steps=2)


add(
    module_buffers_broadcast=lambda: train(wrap(ConvBatchNorm())),
    module_buffers_mean=lambda: train(wrap(ConvBatchNorm(), module_buffers="mean")),
    module_buffers_off=lambda: train(wrap(ConvBatchNorm(), module_buffers="off")),
    module_buffers_with_accumulation=lambda: train(wrap(ConvBatchNorm()), micro=3),
    sync_batchnorm=lambda: train(wrap(convert_sync_batchnorm(ConvBatchNorm()))),
)


# -- other ways to run -------------------------------------------------------------------------------


@scenario(ranks=3)
def subgroup() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        train(wrap(ConvBatchNorm(), process_group=group))


@scenario()
def wrapped_again() -> None:
    net = wrap(Mlp())
    train(net, steps=2)
    train(wrap(net.module), steps=2)


@scenario()
def replaced_head() -> None:
    net = wrap(Mlp())
    train(net, steps=2)
    net.module.head = nn.Linear(16, 4)
    train(net, steps=2)


add(
    two_replicas_in_each_process=lambda: train(wrap(Mlp(), device_ids=["cpu", "cpu"])),
    no_first_synchronisation=lambda: train(wrap(ConvBatchNorm(), init_sync=False), steps=2),
)
