"""``bucketddp_sharded`` in a Trainer trains as the strategies without shards do."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import AdamW
from torchmetrics import SumMetric

from lightning_bucketddp import BucketDDPStrategy, PeerFailureError
from tests import lightning_models
from tests.fixtures.checkpoints import At
from tests.lightning_models import Gan, Regression, Relay, close_to, data, scaler, trainer
from tests.pool import RunRanks, on_ranks
from tests.reference import drift
from tests.sampling import some_slow

sharded = partial(lightning_models.ours, shard_optimizer=True)
parts = partial(sharded, state_dict_type="sharded")


class Quiet(Regression):
    records = False

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        return AdamW([param for param in self.parameters() if param.requires_grad], lr=1e-2)


class Clipping(Quiet):
    def norm(self, norm_type: float = 2.0, parameters: Any = None) -> Tensor:
        params = list(self.parameters()) if parameters is None else list(parameters)
        if isinstance(self.trainer.strategy, BucketDDPStrategy):
            return self.trainer.strategy.grad_norm(norm_type, params)
        return nn.utils.get_total_norm([param.grad for param in params if param.grad is not None], norm_type)

    def configure_gradient_clipping(self, optimizer: Any, **given: Any) -> None:
        self.found += [self.norm(float("inf")), self.norm(1.0, self.net.layers.parameters()), self.norm()]
        self.clip_gradients(optimizer, **given)
        self.found.append(self.norm())
        assert self.found[-1] < self.found[-2], "it was clipped"


class ShardedGan(Gan):
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


class Evaluated(Quiet):
    """Notes what validation, which follows steps at once, and hooks find."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = SumMetric()
        self.steps.persistent(True)  # a state dict holds a copy

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps.update(1)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.found.append(torch.cat([param.flatten() for param in self.parameters()]).sum().detach())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.found.append(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        self.log("score", self.found[-1], sync_dist=True)


class Compiling(Quiet):
    """Compiles a part of itself when training has begun."""

    def on_train_start(self) -> None:
        self.net.head = torch.compile(self.net.head, backend="eager")


def pruning() -> dict[str, Any]:
    # Without resets of weights: Lightning's give them the memory from which the next reset is made.
    prune = pl.callbacks.ModelPruning(
        "l1_unstructured",
        amount=0.2,
        parameter_names=["weight"],
        use_global_unstructured=False,
        use_lottery_ticket_hypothesis=False,
    )
    return {"callbacks": [prune]}


growing = partial(scaler, 64.0, growth_interval=5)
RUNS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "accumulated and clipped": (Quiet, lambda: {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
    "bf16-mixed": (Quiet, lambda: {"precision": "bf16-mixed"}),
    "clipped values": (Clipping, lambda: {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}),
    "scaled": (Clipping, lambda: {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2, "plugins": [growing()]}),
    "toggled": (ShardedGan, dict),
    "averaged": (Evaluated, lambda: {"val_check_interval": 2, "callbacks": [EMAWeightAveraging()]}),
    "pruned": (Quiet, pruning),
    "compiled": (Compiling, dict),
    "fine-tuned": (Quiet, lambda: {"callbacks": [Relay()]}),
}
AS_DDP = ["accumulated and clipped", "bf16-mixed"]  # others are compared with this strategy, without shards


QUICK = ["accumulated and clipped", "toggled", "averaged"]


@on_ranks(2, cases={name: [name, *RUNS[name]] for name in RUNS}, quick=QUICK)
def test_a_trainer_trains_as_without_shards(name: str, build: Callable[[], Any], options: Any) -> None:
    models = []
    for strategy in (lightning_models.ddp() if name in AS_DDP else lightning_models.ours(), sharded()):
        model = build()
        runs = trainer(strategy, **{"max_epochs": 2, **options()})
        before = set(vars(runs.strategy.precision_plugin))
        runs.fit(model, data(), data(2) if isinstance(model, Evaluated) else None)
        assert set(vars(runs.strategy.precision_plugin)) == before, "clipping was given back"
        models.append(model)
    close_to(*models)
    torch.testing.assert_close(*(getattr(model, "found", []) for model in models))
    assert drift(models[1]) == 0


class Whole(Quiet):
    """Its batches are those of all ranks together, and do not depend on their number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator = torch.Generator().manual_seed(100 + self.global_step)
        inputs, target = torch.randn(12, 8, generator=generator), torch.randn(12, 4, generator=generator)
        mine = slice(self.global_rank, None, self.trainer.world_size)
        return nn.functional.mse_loss(self.net(inputs[mine].to(self.dtype)).float(), target[mine])


STRATEGIES: dict[str, Callable[..., Any]] = {
    "ddp": lightning_models.ddp,
    "ours": lightning_models.ours,
    "sharded": sharded,
    "ours in parts": partial(lightning_models.ours, state_dict_type="sharded"),
    "sharded in parts": parts,
}


def whole_run(kind: str, low: bool, tuned: bool, epochs: int, load: str | None, save: str | None) -> dict[str, Tensor]:
    model, strategy = Whole(), STRATEGIES[kind](**({"grad_dtype": "float32"} if low else {}))
    runs = trainer(strategy, max_epochs=epochs, precision="bf16-true" if low else None, callbacks=[Relay()] * tuned)
    runs.fit(model, data(2), ckpt_path=load)
    if save:
        runs.save_checkpoint(save)
    assert drift(model) == 0
    return {name: value.float() for name, value in model.state_dict().items()}


RESUMED = {
    "one file, by ddp": ("sharded", "ddp", (3, 2), False, False),
    "ddp's, by shards": ("ddp", "sharded", (1, 3), False, False),
    "parts of low precision, whole": ("sharded in parts", "ours", (3, 2), True, False),
    "parts, tuned, by shards": ("ours in parts", "sharded in parts", (1, 2), False, True),
    "one file of low precision, tuned, whole": ("sharded", "ours", (2, 1), True, True),
}
"""Strategies that save and that load, their numbers of ranks, bf16 with masters, fine-tuning."""


@pytest.mark.parametrize("name", some_slow(RESUMED, {"ddp's, by shards", "parts of low precision, whole"}))
def test_training_goes_on_from_a_checkpoint(run_ranks: RunRanks, name: str, tmp_path: Path) -> None:
    first, second, worlds, low, tuned = RESUMED[name]
    path = tmp_path / "first.ckpt"
    undisturbed = run_ranks(1, whole_run, "ours", low, tuned, 4, None, None)[0]
    run_ranks(worlds[0], whole_run, first, low, tuned, 2, None, str(path))
    resumed = run_ranks(worlds[1], whole_run, second, low, tuned, 4, str(path), None)[0]
    tolerance = 2e-2 if low else 1e-5
    torch.testing.assert_close(resumed, undisturbed, rtol=tolerance, atol=tolerance)
    if "parts" in first:
        dcp_to_torch_save(path, tmp_path / "one.pt")
        saved = torch.load(tmp_path / "one.pt", weights_only=False)
        Whole().load_state_dict(saved["model"])
        assert saved["extra"]["epoch"] == 2
    else:
        saved = torch.load(path, weights_only=True)
        (state,) = saved["optimizer_states"]
        shapes = {value.shape for value in saved["state_dict"].values()}
        assert {param_state["exp_avg"].shape for param_state in state["state"].values()} <= shapes
        assert not low or len(state["master_params"]) == len(state["state"])


@on_ranks(2, fresh=True)
def test_directories_as_checkpoints_of_callbacks_and_for_evaluation(tmp_path: Path) -> None:
    saves = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", "loss", every_n_train_steps=1, save_last=True)
    model, last, scores = Evaluated(), tmp_path / "last.ckpt", []

    def fit(module: Evaluated, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
        runs = trainer(parts(), callbacks=[*callbacks], enable_checkpointing=bool(callbacks))
        runs.fit(module, data(3), **options)
        return runs

    runs, other = fit(model, saves), Evaluated()
    runs.validate(other, data(2), verbose=False)
    runs.save_checkpoint(tmp_path / "other", weights_only=True)
    for strategy in (parts, lightning_models.ours):
        for path, saved in ((tmp_path / "other", other), (last, model)):
            again = Evaluated()
            (logged,) = trainer(strategy()).validate(again, data(2), ckpt_path=path, verbose=False)
            close_to(again, saved)
            assert again.steps.sum_value == saved.steps.sum_value
        scores.append(logged["score"])
    assert scores[0] == pytest.approx(scores[1])
    dist.barrier()
    if dist.get_rank() == 0:
        last.rename(tmp_path / "last.replaced.ckpt")  # as a save leaves it that is killed
    dist.barrier()
    again = Evaluated()
    trainer(parts()).validate(again, data(2), ckpt_path=last, verbose=False)
    close_to(again, model)
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "last.replaced.ckpt").rename(last)
    dist.barrier()
    with pytest.raises(ValueError, match="weights_only"):
        fit(Evaluated(), ckpt_path=last, weights_only=True)
    runs.save_checkpoint(tmp_path / "weights", weights_only=True)
    with pytest.raises(KeyError, match="only the model"):
        fit(Evaluated(), ckpt_path=tmp_path / "weights")
    kept = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert kept == {"last.ckpt", "other", "weights", Path(saves.best_model_path).name}, "others were removed"


@on_ranks(2, fresh=True)
def test_a_checkpoint_while_an_exception_is_handled_waits_for_nobody(tmp_path: Path) -> None:
    first, path = dist.get_rank() == 0, tmp_path / "failed.ckpt"

    def fail(runs: pl.Trainer) -> None:
        if first and runs.global_step == 3:
            raise ArithmeticError("no batch today")

    save = At("on_exception", lambda runs: runs.save_checkpoint(path) if first else None)
    with pytest.warns(match="while an exception is handled") if first else nullcontext():
        with pytest.raises(ArithmeticError if first else PeerFailureError):
            trainer(sharded(), callbacks=[At("on_train_batch_start", fail), save]).fit(Quiet(), data())
    if first:
        saved = torch.load(path, weights_only=True)
        Quiet().load_state_dict(saved["state_dict"])
        optimizer = AdamW(Quiet().parameters())
        optimizer.load_state_dict(saved["optimizer_states"][0])
        assert any(state["exp_avg"].ndim != param.ndim for param, state in optimizer.state.items())
