"""``Fabric(strategy="bucketddp")``: like Fabric's ``ddp`` where that is right, and right where it is not."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_bucketddp import PeerFailureError, RankMismatchError
from tests.lightning_models import start_fabric
from tests.models import ConvBatchNorm, Mlp, batch
from tests.pool import on_ranks
from tests.reference import WHERE, drift, loss_at


class WithLoss(Mlp):
    def loss_here(self, step: int) -> Tensor:
        return loss_at(self, step)


def make(net: type[nn.Module] = Mlp, optimizer: str = "sgd") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5 + dist.get_rank())  # the ranks start with rank 0's values
    model = net()
    if optimizer == "adamw":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def assert_close(first: nn.Module, second: nn.Module, **tolerance: float) -> None:
    torch.testing.assert_close(list(first.parameters()), list(second.parameters()), **tolerance)


def train(kind: str, feature: str) -> tuple[nn.Module, Fabric]:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    plugins = MixedPrecision("16-mixed", "cpu", scaler) if feature == "scaler" else None
    fabric = start_fabric(kind, "bf16-mixed" if feature == "bf16-mixed" else None, plugins)
    given = make(ConvBatchNorm, "adamw") if feature == "batchnorm, adamw" else make(WithLoss)
    if feature == "compiled":
        given = torch.compile(given[0], backend="eager"), given[1]
    model, optimizer = fabric.setup(*given)
    if feature == "marked":
        model.mark_forward_method("loss_here")
    for step in range(6):
        last = feature != "accumulate" or step % 3 == 2
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model.loss_here(step) if feature == "marked" else loss_at(model, step)
            loss.backward() if feature == "plain backward" else fabric.backward(loss)
        if not last:
            continue
        if feature == "clip norm":
            assert float(fabric.clip_gradients(model, optimizer, max_norm=0.05)) > 0.05
        elif feature == "clip value":
            fabric.clip_gradients(model, optimizer, clip_val=0.001)
        optimizer.step()
        optimizer.zero_grad()
    return model, fabric


FEATURES = [
    *("batchnorm, adamw", "accumulate", "clip norm", "clip value", "bf16-mixed", "scaler", "plain backward"),
    "marked",
]


@on_ranks(2, cases={feature: feature for feature in (*FEATURES, "compiled")}, quick=FEATURES)
def test_weights_are_those_of_ddp(feature: str) -> None:
    theirs, _ = train("ddp", feature)
    ours, fabric = train("bucketddp", feature)
    wrapper = fabric.strategy.wrapper_of(ours)
    assert_close(ours, theirs)
    wrapper.synchronise_module_buffers()
    assert drift(ours) == 0
    assert wrapper.passes == (2 if feature == "accumulate" else 6)
    fabric.strategy.teardown()
    assert wrapper.closed


def train_gan(kind: str, name_model: bool = False) -> nn.Module:
    fabric = start_fabric(kind)
    torch.manual_seed(5)
    nets = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))])
    pairs = [fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    (generator, generator_optimizer), (critic, critic_optimizer) = pairs
    for step in range(4):
        real = batch(step, dist.get_rank())[0]
        fake = generator(real)
        critic_optimizer.zero_grad()
        loss = critic(fake.detach()).mean() - critic(real).mean()
        fabric.backward(loss, **({"model": critic} if name_model else {}))
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        generator_optimizer.zero_grad()
        fabric.backward(-critic(fake).mean())
        generator_optimizer.step()
    if kind == "bucketddp":
        passes = [fabric.strategy.wrapper_of(model).passes for model, _ in pairs]
        assert passes == [4, 8], "the critic's backward is no pass of the generator"
        assert drift(nets) == 0
    fabric.strategy.teardown()
    return nets


@on_ranks(2)
def test_weights_of_a_gan_are_those_of_ddp() -> None:
    expected = train_gan("ddp")
    for name_model in (False, True):
        assert_close(train_gan("bucketddp", name_model), expected)


def two_models() -> tuple[Fabric, list[nn.Module], list[Tensor]]:
    """Two models, and two losses of the second, of which one reaches no model on rank 1."""
    fabric = start_fabric(process_group=dist.new_group())
    models = [fabric.setup(nn.Linear(8, 8)), fabric.setup(nn.Linear(8, 1))]
    losses = [models[1](models[0](batch(step, 0)[0]).detach()).mean() for step in range(2)]
    constant = torch.ones((), requires_grad=True)
    return fabric, models, [losses[0], losses[1] if fabric.global_rank == 0 else constant]


@on_ranks(2, fresh=True)
def test_right_where_ddp_hangs_raises_or_drifts() -> None:
    rank, inputs = dist.get_rank(), batch(0, 0)[0]
    with patch("lightning_bucketddp.trainer.common.listen") as listens:
        start_fabric(report_after=7)
    assert listens.call_args.args[1] == 7, "else nobody hears of an error before setup()"
    fabric, models, losses = two_models()
    for loss in losses:
        fabric.backward(loss, model=models[1])
    passes = fabric.strategy.wrapper_of(models[1]).passes
    assert passes == 2, "with model=, a rank takes part whose loss reaches no model"

    fabric, models, losses = two_models()
    fabric.backward(losses[0])
    skipped = pytest.raises((PeerFailureError, RankMismatchError), match=f"rank 1{WHERE} ran no backward in step 2")
    with skipped if rank == 0 else nullcontext():
        fabric.backward(losses[1])

    fabric = start_fabric(process_group=dist.new_group())
    models = [fabric.setup_module(nn.Linear(8, 1)) for _ in range(2)]
    with pytest.raises((PeerFailureError, RankMismatchError), match="passes of different models" if rank == 0 else ""):
        fabric.backward(models[rank](inputs).mean())


def run(
    fabric: Fabric,
    steps: range,
    load: str | None = None,
    save: str | None = None,
    net: type[nn.Module] = ConvBatchNorm,
    clips: Sequence[dict[str, float]] = (),
    accumulates: bool = False,
) -> nn.Module:
    """Train with a limit of ``clips`` in turn, perhaps on two batches in some steps, and load and save."""
    model, optimizer = fabric.setup(*make(net, "adamw"))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if load:
        assert fabric.load(load, state) == {}
        assert state["step"] == steps.start
    for step in steps:
        local = accumulates and step % 3 == 1
        with fabric.no_backward_sync(model, enabled=local):
            fabric.backward(loss_at(model, step))
        if local:
            continue
        if clips:
            fabric.clip_gradients(model, optimizer, **clips[step % len(clips)])
            assert next(model.parameters()).grad.dtype == torch.float32
        optimizer.step()
        optimizer.zero_grad()
    if save:
        fabric.save(save, {**state, "step": steps.stop})
    fabric.strategy.teardown()
    return model


@on_ranks(2)
def test_checkpoints_go_both_ways_and_keep_fp32_masters(tmp_path: Path) -> None:
    """Trains four steps in one go, and in two halves with a checkpoint that the other strategy loads."""
    whole = run(start_fabric("ddp"), range(4))
    for first, second in (("ddp", "bucketddp"), ("bucketddp", "ddp")):
        path = f"{tmp_path}/{first}.ckpt"
        run(start_fabric(first), range(2), save=path)
        assert_close(run(start_fabric(second), range(2, 4), load=path), whole)
    theirs, ours = (torch.load(f"{tmp_path}/{kind}.ckpt")["model"] for kind in ("ddp", "bucketddp"))
    torch.testing.assert_close(ours, theirs)  # with rank 0's module buffers
    with_masters = partial(start_fabric, "bucketddp", "bf16-true", grad_dtype="float32")
    path, clips = f"{tmp_path}/masters.ckpt", [{"max_norm": 0.1}]
    whole = run(with_masters(), range(6), clips=clips)
    run(with_masters(), range(3), save=path, clips=clips)
    assert_close(run(with_masters(), range(3, 6), load=path, clips=clips), whole, rtol=0, atol=0)


@on_ranks(2)
def test_shards_train_and_resume_as_whole_gradients(tmp_path: Path) -> None:
    path, options = f"{tmp_path}/shards.ckpt", {"net": Mlp, "accumulates": True}
    options["clips"] = [{"clip_val": 0.01}, {"max_norm": 0.1}]
    runs = [run(start_fabric(shard_optimizer=shard), range(9), **options) for shard in (False, True)]
    run(start_fabric(shard_optimizer=True), range(6), save=path, **options)
    runs += [run(start_fabric(shard_optimizer=shard), range(6, 9), load=path, **options) for shard in (False, True)]
    for each in runs[1:]:
        assert drift(each) == 0
        assert_close(each, runs[0], rtol=1e-5, atol=1e-5)
    fabric, (plain, optimizer) = start_fabric(shard_optimizer=True), make(optimizer="adamw")
    model, optimizer = fabric.setup(plain, optimizer)
    fabric.backward(loss_at(model, 0))
    norm = fabric.strategy.grad_norm(model)
    torch.testing.assert_close(fabric.clip_gradients(model, optimizer, max_norm=9.0), norm)
    assert 0 < fabric.strategy.wrapper_of(model).full_grad(plain.head.weight).norm() < norm


@on_ranks(2)
def test_modules_are_set_up_again_or_wrongly() -> None:
    fabric = start_fabric()
    plain, _ = make()
    optimizer = torch.optim.LBFGS(plain.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    model, lbfgs = fabric.setup(plain, optimizer)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = loss_at(model, 0)
        fabric.backward(loss)
        return loss

    lbfgs.step(closure)
    assert drift(plain) == 0

    again, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(loss_at(again, 0))
        optimizer.step()
    assert drift(plain) == 0
    assert fabric.strategy.wrapper_of(again).passes == 2
    assert fabric.strategy.wrapper_of(model) is fabric.strategy.wrapper_of(plain) is fabric.strategy.wrapper_of(again)

    other = Fabric(accelerator="cpu", devices=1).setup(Mlp())
    with pytest.raises(TypeError, match="found _FabricModule"):
        fabric.strategy._backward_sync_control.no_backward_sync(other, True)
    with pytest.raises(ValueError, match="found Mlp"):
        fabric.strategy.wrapper_of(Mlp())
