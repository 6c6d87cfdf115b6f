"""``Fabric(strategy="bucketddp")`` against Fabric's ``ddp``, and where ``ddp`` fails."""

import inspect
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import Strategy
from lightning_utilities import is_overridden
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import (
    BucketDDP,
    BucketDDPFabricStrategy,
    BucketDDPStrategy,
    PeerFailureError,
    RankMismatchError,
)
from lightning_bucketddp.trainer.common import REGISTERED
from tests.lightning_models import PoolEnvironment
from tests.models import Branches, ConvBatchNorm, Fragile, Mlp
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]


def start(kind: str, precision: Any = None, plugins: Any = None, **options: Any) -> Fabric:
    """A launched Fabric over the pool's ranks, with our strategy or Fabric's ``ddp``."""
    environment = PoolEnvironment()
    strategy: DDPStrategy
    if kind == "bucketddp":
        strategy = BucketDDPFabricStrategy(cluster_environment=environment, **{"bucket_cap_mb": 0.0003, **options})
    else:
        strategy = DDPStrategy(cluster_environment=environment, **options)
    fabric = Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, precision=precision, plugins=plugins
    )
    fabric.launch()
    return fabric


def batch(step: int, rank: int | None = None, inputs: int = 8) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, inputs, generator=generator), torch.randn(4, 4, generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs, target = batch(step)
    return nn.functional.mse_loss(model(inputs), target)


def assert_same(first: nn.Module, second: nn.Module) -> None:
    for (name, value), other in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, msg=lambda m, n=name: f"{n}: {m}")


def make(net: type[nn.Module] = Mlp, optimizer: str = "sgd") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5 + dist.get_rank())  # the ranks start with rank 0's values
    model = net()
    if optimizer == "adamw":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


# -- parity with ddp ---------------------------------------------------------------------------------


class Scaler(torch.amp.GradScaler):
    """For the CPU, which has no mixed precision in fp16 of Lightning's own."""

    def __init__(self) -> None:
        super().__init__(device="cpu", init_scale=256.0)


class WithLoss(Mlp):
    def loss_here(self, step: int) -> Tensor:
        return loss_of(self, step)


def train(kind: str, feature: str) -> tuple[nn.Module, Fabric]:
    net = {"batchnorm": ConvBatchNorm, "marked": WithLoss}.get(feature, Mlp)
    plugins = MixedPrecision("16-mixed", "cpu", Scaler()) if feature == "scaler" else None
    fabric = start(kind, "bf16-mixed" if feature == "bf16-mixed" else None, plugins)
    plain, optimizer = make(net, "adamw" if feature == "adamw" else "sgd")
    model, optimizer = fabric.setup(plain, optimizer)
    if feature == "marked":
        model.mark_forward_method("loss_here")
    for step in range(6):
        last = feature != "accumulate" or step % 3 == 2
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model.loss_here(step) if feature == "marked" else loss_of(model, step)
            if feature == "plain backward":
                loss.backward()
            else:
                fabric.backward(loss)
        if not last:
            continue
        if feature == "clip norm":
            total = fabric.clip_gradients(model, optimizer, max_norm=0.05)
            assert float(total) > 0.05
        elif feature == "clip value":
            fabric.clip_gradients(model, optimizer, clip_val=0.001)
        optimizer.step()
        optimizer.zero_grad()
    return model, fabric


FEATURES = [
    "plain",
    "adamw",
    "batchnorm",
    "accumulate",
    "clip norm",
    "clip value",
    "bf16-mixed",
    "scaler",
    "plain backward",
    "marked",
]


def train_with_both() -> dict[str, tuple[float, int]]:
    results = {}
    for feature in FEATURES:
        theirs, _ = train("ddp", feature)
        ours, fabric = train("bucketddp", feature)
        wrapper = fabric.strategy.wrapper_of(ours)
        assert isinstance(wrapper, BucketDDP)
        for first, second in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(first, second, msg=lambda m, f=feature: f"{f}: {m}")
        wrapper.synchronise_module_buffers()
        results[feature] = (largest_difference_between_ranks(ours), wrapper.passes)
        fabric.strategy.teardown()
        assert wrapper.closed
    return results


def test_the_same_weights_as_ddp(run_ranks: RunRanks) -> None:
    for results in run_ranks(2, train_with_both):
        assert results == {feature: (0.0, 2 if feature == "accumulate" else 6) for feature in FEATURES}


# -- where ddp goes wrong ----------------------------------------------------------------------------


def go_wrong(kind: str) -> tuple[float, float]:
    """Trains where ``ddp`` hangs, raises or drifts; returns differences between ranks, and to one process."""
    fabric = start("bucketddp")
    torch.manual_seed(5)
    plain, alone = Branches(), Branches()
    alone.load_state_dict(plain.state_dict())
    if kind == "unfrozen later":
        for net in (plain, alone):
            net.left.requires_grad_(False)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, alone)]

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        inputs, target = batch(step, rank)
        if kind == "constant loss" and rank == 1:
            return torch.ones((), requires_grad=True)
        take = {"unused": "left", "branch": "left" if rank == 0 else "right"}.get(kind, "both")
        return nn.functional.mse_loss(model(inputs, take), target)

    model, optimizers[0] = fabric.setup(plain, optimizers[0])
    for step in range(4):
        if kind == "unfrozen later" and step == 2:
            for net in (plain, alone):
                net.left.requires_grad_(True)
        for optimizer in optimizers:
            optimizer.zero_grad()
        fabric.backward(loss(model, fabric.global_rank, step))
        (sum(loss(alone, rank, step) for rank in range(2)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(plain.parameters(), alone.parameters(), strict=True)
    return largest_difference_between_ranks(plain), max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("kind", ["unused", "branch", "constant loss", "unfrozen later"])
def test_right_where_ddp_hangs_raises_or_drifts(run_ranks: RunRanks, kind: str) -> None:
    for between_ranks, to_one_process in run_ranks(2, go_wrong, kind):
        assert between_ranks == 0
        assert to_one_process < 1e-6


# -- several models ----------------------------------------------------------------------------------


def train_gan(kind: str, name_model: bool) -> tuple[list[nn.Module], list[int]]:
    fabric = start(kind)
    torch.manual_seed(5)
    generator, critic = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
    nets = [generator, critic]
    models, optimizers = [], []
    for net in nets:
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        models.append(model)
        optimizers.append(optimizer)
    for step in range(4):
        real = batch(step)[0]
        fake = models[0](real)
        optimizers[1].zero_grad()
        loss = models[1](fake.detach()).mean() - models[1](real).mean()
        fabric.backward(loss, **({"model": models[1]} if name_model else {}))
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        fabric.backward(-models[1](fake).mean())
        optimizers[0].step()
    passes = [fabric.strategy.wrapper_of(model).passes for model in models] if kind == "bucketddp" else []
    fabric.strategy.teardown()
    return nets, passes


def gan_with_both() -> list[tuple[float, list[int]]]:
    theirs, _ = train_gan("ddp", False)
    results = []
    for name_model in (False, True):
        ours, passes = train_gan("bucketddp", name_model)
        for first, second in zip(ours, theirs, strict=True):
            assert_same(first, second)
        results.append((max(largest_difference_between_ranks(net) for net in ours), passes))
    return results


def test_two_models_of_which_one_backward_trains_one(run_ranks: RunRanks) -> None:
    for results in run_ranks(2, gan_with_both):
        assert results == [(0.0, [4, 8])] * 2, "the critic's backward is no pass of the generator"


# -- checkpoints -------------------------------------------------------------------------------------


def exchange_checkpoints(folder: str) -> None:
    """Trains four steps in one go, and in two halves with a checkpoint that the other strategy loads."""

    def run(kind: str, steps: range, load: str | None = None, save: str | None = None) -> nn.Module:
        fabric = start(kind)
        model, optimizer = fabric.setup(*make(ConvBatchNorm, "adamw"))
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        if load:
            assert fabric.load(load, state) == {}
            assert state["step"] == steps.start
        for step in steps:
            optimizer.zero_grad()
            fabric.backward(loss_of(model, step))
            optimizer.step()
        if save:
            fabric.save(save, {**state, "step": steps.stop})
        fabric.strategy.teardown()
        return model

    whole = run("ddp", range(4))
    for first, second in (("ddp", "bucketddp"), ("bucketddp", "ddp"), ("bucketddp", "bucketddp")):
        path = f"{folder}/{first}-{second}.ckpt"
        run(first, range(2), save=path)
        for resumed, expected in zip(run(second, range(2, 4), load=path).parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(resumed, expected)
    contents = [torch.load(f"{folder}/{pair}.ckpt") for pair in ("ddp-bucketddp", "bucketddp-ddp")]
    assert contents[0]["model"].keys() == contents[1]["model"].keys()
    for name, value in contents[0]["model"].items():  # rank 0's module buffers, in both
        torch.testing.assert_close(contents[1]["model"][name], value)


def test_checkpoints_go_both_ways(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, exchange_checkpoints, str(tmp_path))


def resume_masters(folder: str) -> tuple[str, float]:
    path = f"{folder}/masters.ckpt"

    def run(steps: range, load: bool = False, save: bool = False) -> nn.Module:
        fabric = start("bucketddp", "bf16-true", grad_dtype="float32")
        model, optimizer = fabric.setup(*make(Mlp, "adamw"))
        state = {"model": model, "optimizer": optimizer}
        if load:
            fabric.load(path, state)
        for step in steps:
            optimizer.zero_grad()
            fabric.backward(loss_of(model, step))
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            dtypes.add(str(next(model.parameters()).grad.dtype))
            optimizer.step()
        if save:
            fabric.save(path, state)
        fabric.strategy.teardown()
        return model

    dtypes: set[str] = set()
    whole = run(range(6))
    run(range(3), save=True)
    resumed = run(range(3, 6), load=True)
    worst = max(float((a - b).abs().max()) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    return " ".join(dtypes), worst


def test_fp32_masters_of_bf16_parameters_resume_bit_for_bit(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(2, resume_masters, str(tmp_path)) == [("torch.float32", 0.0)] * 2


# -- one after the other -----------------------------------------------------------------------------


def other_ways() -> dict[str, Any]:
    results: dict[str, Any] = {}

    fabric = start("bucketddp")
    plain, _ = make()
    optimizer = torch.optim.LBFGS(plain.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    model, lbfgs = fabric.setup(plain, optimizer)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = loss_of(model, 0)
        fabric.backward(loss)
        return loss

    before = float(loss_of(model, 0))
    lbfgs.step(closure)
    results["lbfgs"] = (largest_difference_between_ranks(plain), float(loss_of(model, 0)) < before)

    again, again_optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for _ in range(2):
        again_optimizer.zero_grad()
        fabric.backward(loss_of(again, 0))
        again_optimizer.step()
    results["set up again"] = (largest_difference_between_ranks(plain), fabric.strategy.wrapper_of(again).passes)

    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    unraisable: list[str] = []
    sys.unraisablehook = lambda found: unraisable.append(str(found.exc_value))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch.compile has to say about itself
            net, _ = make()
            compiled = fabric.setup(torch.compile(net, backend=backend))
            for step in range(3):
                fabric.backward(loss_of(compiled, step))
                torch.testing.assert_close(compiled(batch(step)[0]), net(batch(step)[0]))
    finally:
        sys.unraisablehook = sys.__unraisablehook__
    # One graph, of the module's forward; tracing what the wrapper does around it would make half-made objects.
    results["compiled"] = (fabric.strategy.wrapper_of(compiled).passes, len(graphs), unraisable)

    on_its_own = Fabric(accelerator="cpu", devices=1)
    try:
        fabric.strategy._backward_sync_control.no_backward_sync(on_its_own.setup(Mlp()), True)
    except TypeError as error:
        results["no_backward_sync"] = str(error)
    try:
        fabric.strategy.wrapper_of(Mlp())
    except ValueError as error:
        results["wrapper_of"] = str(error)
    return results


def test_set_up_again_compiled_with_line_search_or_wrongly(run_ranks: RunRanks) -> None:
    for results in run_ranks(2, other_ways):
        assert results["lbfgs"] == (0.0, True)
        assert results["set up again"] == (0.0, 2)
        assert results["compiled"] == (3, 1, [])
        assert "found _FabricModule" in results["no_backward_sync"]
        assert "found Mlp" in results["wrapper_of"]


# -- arguments and names -----------------------------------------------------------------------------


def test_the_options_are_those_of_the_trainers_strategy() -> None:
    def names(kind: type) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(kind).parameters)

    ours = names(BucketDDPFabricStrategy)
    not_here = {"precision_plugin", "model_averaging_period", "uneven_inputs"}
    not_here.add("state_dict_type")  # `save_sharded` of the model does it
    not_here |= {"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper"}
    trainers = {name: found for name, found in names(BucketDDPStrategy).items() if name not in not_here}
    assert {name: found.default for name, found in ours.items() if name != "precision"} == {
        name: found.default for name, found in trainers.items()
    }
    assert {name: found.annotation for name, found in ours.items() if name in BucketDDP.__init__.__annotations__} == {
        name: found.annotation for name, found in trainers.items() if name in BucketDDP.__init__.__annotations__
    }
    assert list(ours)[:8] == list(names(DDPStrategy))[:8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_cap_mb": -1}, "expected bucket_cap_mb to be None or a number of MiB from 0"),
        ({"comm_hook": "bf16", "wire_dtype": "bfloat16"}, "expected either comm_hook or wire_dtype"),
        ({"broadcast_buffers": True, "module_buffers": "off"}, "expected one choice for module buffers"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_ranks_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BucketDDPFabricStrategy(**options)


@pytest.mark.parametrize("name", REGISTERED)
def test_names_are_registered_with_fabric(name: str) -> None:
    strategy = Fabric(accelerator="cpu", devices=2, strategy=name).strategy
    assert type(strategy) is BucketDDPFabricStrategy
    assert name in STRATEGY_REGISTRY.available_strategies()
    assert strategy._start_method == REGISTERED[name]["start_method"]
    assert strategy._options.find_unused_parameters is ("_true" in name)
    assert strategy._options.shard_optimizer is ("_sharded" in name)


def test_private_api_of_fabric_is_still_there() -> None:
    strategy = BucketDDPFabricStrategy()
    assert "_backward_sync_control" in vars(DDPStrategy())
    assert not is_overridden("backward", strategy, parent=Strategy), "Fabric would refuse plain loss.backward()"
    assert BucketDDPFabricStrategy.backward is not Strategy.backward
    assert not isinstance(strategy._backward_sync_control, DistributedDataParallel)
    assert "_convert_stateful_objects_in_state" in vars(Strategy)


# -- failures, which end the pool's processes: last --------------------------------------------------


def constant_critic(name_model: bool) -> str:
    fabric = start("bucketddp", process_group=dist.new_group())
    generator, critic = fabric.setup(nn.Linear(8, 8)), fabric.setup(nn.Linear(8, 1))
    constant = torch.ones((), requires_grad=True)
    try:
        for step in range(2):
            reaches = step == 0 or fabric.global_rank == 0
            loss = critic(generator(batch(step)[0]).detach()).mean() if reaches else constant
            fabric.backward(loss, **({"model": critic} if name_model else {}))
    except (PeerFailureError, RankMismatchError) as error:
        return str(error)
    return f"{fabric.strategy.wrapper_of(critic).passes} passes"


def raise_on_rank_1() -> str:
    fabric = start("bucketddp", process_group=dist.new_group())
    model = fabric.setup(Fragile())
    inputs, _ = batch(0)
    fabric.backward(model(inputs).sum())
    try:
        fabric.backward(model(inputs, fail=fabric.global_rank == 1).sum())
    except (PeerFailureError, ArithmeticError) as error:
        return str(error)
    return "nothing"


def fail() -> tuple[str, str, str]:
    return constant_critic(True), constant_critic(False), raise_on_rank_1()


def test_what_one_rank_does_wrong_is_an_error_on_the_others(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, fail, fresh=True, timeout=30)
    assert first[0] == second[0] == "2 passes", "with model=, a rank takes part whose loss reaches none of the models"
    assert "rank 1 ran no backward in step 2" in first[1]
    assert "rank 1 raised" in first[2]
    assert "no gradient today" in first[2]
    assert second[2] == "no gradient today"


def backward_through_another_model() -> str:
    fabric = start("bucketddp")
    models = [fabric.setup_module(nn.Linear(4, 1)) for _ in range(2)]
    with pytest.raises(RankMismatchError) as error:
        fabric.backward(models[dist.get_rank()](torch.ones(2, 4)).mean())
    return str(error.value)


def test_ranks_that_train_different_models_are_told_so(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, backward_through_another_model, fresh=True):
        assert "passes of different models" in message
