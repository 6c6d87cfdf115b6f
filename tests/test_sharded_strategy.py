"""``bucketddp_sharded``: what holds without ``shard_optimizer`` in a Trainer and in Fabric holds with it."""

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import Optimizer

from lightning_bucketddp import BucketDDPFabricStrategy, BucketDDPStrategy, PeerFailureError
from tests import lightning_models, test_fabric
from tests.lightning_models import Citizen, Regression, close_to, data, trainer, with_nets_and_optimizers
from tests.models import Mlp
from tests.reference import largest_difference_between_ranks
from tests.test_callbacks import ROWS as CALLBACKS
from tests.test_callbacks import Backbone, Relay, Tuned
from tests.test_checkpoints import ROWS as CHECKPOINTS

RunRanks = Callable[..., list[Any]]

sharded = partial(lightning_models.ours, shard_optimizer=True)


class Quiet(Regression):
    """Looks at no gradients."""

    def on_after_backward(self) -> None: ...

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


# -- the jobs of other tests -------------------------------------------------------------------------


def log_norm(self: Citizen, optimizer: Optimizer) -> None:
    """Instead of Lightning's utility, which looks at gradients."""
    strategy = self.trainer.strategy
    if isinstance(strategy, BucketDDPStrategy):
        norm = strategy.grad_norm()
    else:
        norm = nn.utils.get_total_norm([param.grad for param in self.parameters() if param.grad is not None])
    self.log("norm", norm)


@contextmanager
def everything_sharded(module: Any, **options: Any) -> Iterator[None]:
    """The strategies that a test module makes are sharded, and its models do not look at gradients."""
    sharded_so = partial(sharded, **options)
    patches: list[tuple[Any, str, Any]] = [
        (Regression, "_grads", lambda self: {}),
        (Citizen, "on_before_optimizer_step", log_norm),
        (lightning_models, "ours", sharded_so),
    ]
    if hasattr(module, "ours"):
        patches.append((module, "ours", sharded_so))
    if hasattr(module, "STRATEGIES"):
        patches.append((module, "STRATEGIES", {**module.STRATEGIES, "ours": sharded_so}))
    if hasattr(module, "BucketDDPFabricStrategy"):
        patches.append((module, "BucketDDPFabricStrategy", partial(BucketDDPFabricStrategy, shard_optimizer=True)))
    if hasattr(module, "last"):  # rank 0 alone has the optimizer's state
        left_out, last = ["optimizer_states"] if dist.get_rank() else [], module.last
        patches.append((module, "last", lambda *args: {k: v for k, v in last(*args).items() if k not in left_out}))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def with_shards(module: str, job: str, *args: Any) -> Any:
    """A job of another test module, sharded."""
    owner = importlib.import_module(f"tests.{module}")
    with everything_sharded(owner):
        return getattr(owner, job)(*args)


def with_parts(module: str, job: str, *args: Any) -> Any:
    """The same, with checkpoints that are directories."""
    owner = importlib.import_module(f"tests.{module}")
    with everything_sharded(owner, state_dict_type="sharded"):
        return getattr(owner, job)(*args)


@pytest.mark.parametrize(
    ("net", "optimizer", "options"),
    with_nets_and_optimizers(
        {
            "plain": {},
            "accumulate and clip": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
            "clip values": {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
            "bf16-mixed": {"precision": "bf16-mixed"},
        }
    ),
)
def test_the_same_weights_as_ddp(run_ranks: RunRanks, net: str, optimizer: str, options: dict[str, Any]) -> None:
    assert run_ranks(2, with_shards, "test_trainer", "fit_with_both", net, optimizer, options) == [0.0, 0.0]


@pytest.mark.parametrize("strategies", [("ours", "ddp"), ("ddp", "ours")], ids=" to ".join)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_resumed_equals_undisturbed(
    run_ranks: RunRanks, name: str, strategies: tuple[str, str], tmp_path: Path
) -> None:
    found = run_ranks(2, with_shards, "test_checkpoints", "handed_over", name, *strategies, str(tmp_path))
    assert found == [0.0, 0.0]


@pytest.mark.parametrize(
    "index",
    [index for index, row in enumerate(CALLBACKS) if "averag" in row.name or row.name in ("best", "early stopping")],
    ids=lambda index: CALLBACKS[index].name,
)
def test_callbacks_as_with_ddp(run_ranks: RunRanks, index: int, tmp_path: Any) -> None:
    assert run_ranks(2, with_shards, "test_callbacks", "both", index, str(tmp_path)) == [0.0, 0.0]


def prune(lottery: bool) -> tuple[float, float]:
    """The first two modules' largest difference, and that between ranks."""
    models = []
    for strategy in (lightning_models.ddp(), sharded()):
        pruning = ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=lottery)
        model = Quiet()
        trainer(strategy, max_epochs=3, callbacks=[pruning]).fit(model, data())
        models.append(model)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs), largest_difference_between_ranks(models[1])


def test_parameters_whose_data_are_replaced(run_ranks: RunRanks) -> None:
    """Which pruning does. ``ddp`` then trains the copies of the first weights that Lightning starts anew from."""
    for difference, between_ranks in run_ranks(2, prune, False):
        assert difference < 1e-5
        assert between_ranks == 0
    for difference, between_ranks in run_ranks(2, prune, True):
        assert difference > 1e-3
        assert between_ranks == 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("callback", [Backbone, Relay])
def test_resumed_fine_tuning(
    run_ranks: RunRanks, callback: type[BaseFinetuning], precision: str, tmp_path: Any
) -> None:
    args = (callback, {"every_n_train_steps": 5}, 5, precision, str(tmp_path))
    assert run_ranks(2, with_shards, "test_callbacks", "resumed", *args) == [0.0, 0.0]


@pytest.mark.parametrize(("callback", "precision"), [(Backbone, "32-true"), (Relay, "bf16-true")])
def test_fine_tuning_resumed_from_a_directory(
    run_ranks: RunRanks, callback: type[BaseFinetuning], precision: str, tmp_path: Path
) -> None:
    args = (callback, {"every_n_train_steps": 5}, 5, precision, str(tmp_path))
    assert run_ranks(2, with_parts, "test_callbacks", "resumed", *args) == [0.0, 0.0]
    assert (tmp_path / "at-step=5.ckpt" / ".metadata").is_file()


def test_a_search_that_saves_and_loads_a_directory_leaves_no_trace(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(2, with_parts, "test_callbacks", "find_rate", str(tmp_path)) == [0.0, 0.0]


def test_the_learning_rate_is_found_as_with_ddp(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(2, with_shards, "test_callbacks", "find_rate", str(tmp_path)) == [0.0, 0.0]


def test_a_trainer_takes_a_compiled_module(run_ranks: RunRanks) -> None:
    assert run_ranks(2, with_shards, "wrapper.test_compile", "fit_compiled") == [0.0, 0.0]


# -- clipping, scaling and norms ---------------------------------------------------------------------


class Clipping(Quiet):
    """Clips the first half of the network in ``configure_gradient_clipping``; notes norms before and after."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer=optimizer)
        self.norms: list[Tensor] = []

    def norm(self, norm_type: float = 2.0, parameters: list[Tensor] | None = None) -> Tensor:
        params = list(self.parameters()) if parameters is None else parameters
        if isinstance(self.trainer.strategy, BucketDDPStrategy):
            return self.trainer.strategy.grad_norm(norm_type, params)
        return nn.utils.get_total_norm([param.grad for param in params if param.grad is not None], norm_type)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms += [self.norm(), self.norm(float("inf")), self.norm(1.0, list(self.net.layers.parameters()))]

    def configure_gradient_clipping(self, optimizer: Any, **given: Any) -> None:
        self.clip_gradients(optimizer, **given)
        self.norms.append(self.norm())
        assert self.norms[-1] < self.norms[-4], "it was clipped"


class ClippingByHand(Clipping):
    """Two optimizers, each clipped in its own way; a toggled one, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rest = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            loss = nn.functional.mse_loss(self.rest(self.net(batch[0])), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            mine = [param for group in optimizer.param_groups for param in group["params"]]
            before = self.norm(parameters=mine)
            kind, limit = ("norm", 0.01) if index else ("value", 0.002)
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=kind)
            after = self.norm(parameters=mine)
            assert after < before
            self.norms += [before, after]
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.net.parameters(), lr=1e-2),
            torch.optim.SGD(self.rest.parameters(), lr=0.1, momentum=0.9),
        ]


def scaler_plugin() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5))


def clip_with_both(model: type[Clipping], scaled: bool, options: dict[str, Any]) -> float:
    models = []
    for strategy in (lightning_models.ours(), sharded()):
        plugins = [scaler_plugin()] if scaled else []
        runs = trainer(strategy, max_epochs=2, plugins=plugins, **options)
        before = dict(vars(runs.strategy.precision_plugin))
        models.append(model())
        runs.fit(models[-1], data())
        assert dict(vars(runs.strategy.precision_plugin)).keys() == before.keys(), "given back"
    close_to(models[1], models[0])
    assert len(models[1].norms) > 20
    torch.testing.assert_close(models[1].norms, models[0].norms)
    return largest_difference_between_ranks(models[1])


@pytest.mark.parametrize(
    ("model", "scaled", "options"),
    [
        (Clipping, False, {"gradient_clip_val": 0.01}),
        (Clipping, False, {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}),
        (Clipping, True, {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2}),
        (ClippingByHand, False, {}),
    ],
    ids=["norm", "value", "norm, scaled", "by hand"],
)
def test_clipping_and_norms(run_ranks: RunRanks, model: type[Clipping], scaled: bool, options: dict[str, Any]) -> None:
    assert run_ranks(2, clip_with_both, model, scaled, options) == [0.0, 0.0]


class Infinite(Quiet):
    """In the third batch one gradient of one rank is infinite."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.scales: list[float] = []
        self.moved: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.global_rank == 1:
            loss = loss + (self.net.head.bias[3] - self.net.head.bias[3].detach()) * float("inf")
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = self.net.head.weight.detach().clone()

    def on_train_batch_end(self, *args: Any) -> None:
        self.moved.append(not torch.equal(self.before, self.net.head.weight))
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def overflow() -> tuple[list[float], list[bool], float]:
    model = Infinite()
    trainer(sharded(), plugins=[scaler_plugin()]).fit(model, data())
    assert all(bool(param.isfinite().all()) for param in model.parameters())
    return model.scales, model.moved, largest_difference_between_ranks(model)


def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(run_ranks: RunRanks) -> None:
    scales = [64.0, 64.0, 32.0, 32.0, 32.0, 32.0]
    expected = (scales, [True, True, False, True, True, True], 0.0)
    assert run_ranks(3, overflow) == [expected] * 3


# -- checkpoints -------------------------------------------------------------------------------------


class Whole(Quiet):
    """Its batches are those of all ranks together, and do not depend on their number."""

    def __init__(self, low: bool = False) -> None:
        super().__init__(optimizer="adamw")
        self.low = low

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator = torch.Generator().manual_seed(100 + self.global_step)
        inputs, target = torch.randn(12, 8, generator=generator), torch.randn(12, 4, generator=generator)
        mine = slice(self.global_rank, None, self.trainer.world_size)
        dtype = torch.bfloat16 if self.low else torch.float32
        return nn.functional.mse_loss(self.net(inputs[mine].to(dtype)).float(), target[mine])


def whole_run(kind: str, epochs: int, load: str | None, save: str | None) -> dict[str, Tensor]:
    """Weights after a number of epochs; ``kind`` may end in ``low`` for bf16 with masters."""
    low = kind.endswith("low")
    masters = {"grad_dtype": "float32"} if low else {}
    in_parts = {"state_dict_type": "sharded"}
    strategies = {
        "ddp": lightning_models.ddp,
        "ours": lightning_models.ours,
        "sharded": sharded,
        "ours-parts": partial(lightning_models.ours, **in_parts),
        "sharded-parts": partial(sharded, **in_parts),
    }
    model = Whole(low)
    options = {"precision": "bf16-true"} if low else {}
    runs = trainer(strategies[kind.split(" ")[0]](**masters), max_epochs=epochs, **options)
    runs.fit(model, data(2), ckpt_path=load)
    if save:
        runs.save_checkpoint(save)
    assert largest_difference_between_ranks(model) == 0
    return {name: value.float() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("first", "second", "worlds"),
    [
        ("sharded", "sharded", (3, 2)),
        ("sharded", "ours", (2, 1)),
        ("sharded", "sharded", (2, 1)),
        ("ddp", "sharded", (1, 3)),
        ("sharded low", "sharded low", (3, 2)),
        ("sharded low", "ours low", (2, 2)),
        ("ours low", "sharded low", (2, 3)),
    ],
    ids=str,
)
def test_training_goes_on_at_another_world_size(
    run_ranks: RunRanks, first: str, second: str, worlds: tuple[int, int], tmp_path: Path
) -> None:
    file = str(tmp_path / "first.ckpt")
    undisturbed = run_ranks(1, whole_run, "ours low" if "low" in first else "ours", 4, None, None)[0]
    run_ranks(worlds[0], whole_run, first, 2, None, file)
    resumed = run_ranks(worlds[1], whole_run, second, 4, file, None)[0]
    tolerance = 2e-2 if "low" in first else 1e-5
    torch.testing.assert_close(resumed, undisturbed, rtol=tolerance, atol=tolerance)
    saved = torch.load(file, weights_only=True)
    (state,) = saved["optimizer_states"]
    assert [state["state"][index]["exp_avg"].shape for index in range(len(resumed))] == [
        value.shape for value in saved["state_dict"].values()
    ]
    if "low" in first:
        assert len(state["master_params"]) == len(resumed)


@pytest.mark.parametrize(
    ("first", "second", "worlds"),
    [
        ("sharded-parts", "sharded", (3, 2)),
        ("sharded-parts low", "sharded low", (2, 3)),
        ("ours-parts", "sharded-parts", (1, 2)),
        ("sharded-parts", "ours", (2, 1)),
    ],
    ids=str,
)
def test_training_goes_on_from_a_directory(
    run_ranks: RunRanks, first: str, second: str, worlds: tuple[int, int], tmp_path: Path
) -> None:
    folder = tmp_path / "first.ckpt"
    undisturbed = run_ranks(1, whole_run, "ours low" if "low" in first else "ours", 4, None, None)[0]
    run_ranks(worlds[0], whole_run, first, 2, None, str(folder))
    assert (folder / ".metadata").is_file()
    resumed = run_ranks(worlds[1], whole_run, second, 4, str(folder), None)[0]
    tolerance = 2e-2 if "low" in first else 1e-5
    torch.testing.assert_close(resumed, undisturbed, rtol=tolerance, atol=tolerance)
    one_file = tmp_path / "one.pt"
    dcp_to_torch_save(folder, one_file)
    saved = torch.load(one_file, weights_only=False)
    Whole("low" in first).load_state_dict(saved["model"])
    assert saved["extra"]["epoch"] == 2
    (state,) = saved["optimizers"]
    assert all(state["state"][name]["exp_avg"].shape == value.shape for name, value in saved["model"].items())


class Adds(pl.Callback):
    """Puts something else into checkpoints."""

    def on_save_checkpoint(self, runs: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {key: value + 1 for key, value in checkpoint["state_dict"].items()}


class Scored(Quiet):
    """Logs the losses of training and validation."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)


def kept_and_evaluated(folder: str) -> tuple[list[str], str, list[float], list[str]]:
    """The checkpoints that are kept, the best of them, what evaluation makes of the last, and what is refused."""
    saves = pl.callbacks.ModelCheckpoint(folder, "{step}", "loss", every_n_train_steps=1, save_last=True)
    runs = trainer(sharded(state_dict_type="sharded"), callbacks=[saves], enable_checkpointing=True)
    model = Scored()
    runs.fit(model, data(6))
    last = f"{folder}/last.ckpt"
    scores = []
    for strategy in (sharded(state_dict_type="sharded"), lightning_models.ours()):
        again = Scored()
        (logged,) = trainer(strategy).validate(again, data(), ckpt_path=last, verbose=False)
        close_to(again, model)
        scores.append(logged["score"])
    said = []

    def refused(*kinds: type[Exception], attempt: Callable[[], None]) -> None:
        with pytest.raises(kinds) as caught:
            attempt()
        said.append(str(caught.value))

    def fit(*callbacks: pl.Callback, **options: Any) -> None:
        trainer(sharded(state_dict_type="sharded"), callbacks=[*callbacks]).fit(Scored(), data(), **options)

    saving = pl.callbacks.ModelCheckpoint(f"{folder}/changed", every_n_train_steps=1)
    refused(
        ValueError,
        attempt=lambda: trainer(
            sharded(state_dict_type="sharded"), callbacks=[Adds(), saving], enable_checkpointing=True
        ).fit(Scored(), data()),
    )
    refused(ValueError, attempt=lambda: fit(ckpt_path=last, weights_only=True))
    refused(TypeError, attempt=lambda: runs.save_checkpoint(f"{folder}/other", storage_options={"any": 1}))
    runs.save_checkpoint(f"{folder}/weights", weights_only=True)
    refused(KeyError, attempt=lambda: fit(ckpt_path=f"{folder}/weights"))
    kept = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    return kept, Path(saves.best_model_path).name, scores, said


def test_directories_as_checkpoints_of_callbacks_and_for_evaluation(run_ranks: RunRanks, tmp_path: Path) -> None:
    both = run_ranks(2, kept_and_evaluated, str(tmp_path), fresh=True)
    assert both[0] == both[1]
    kept, best, scores, said = both[0]
    assert kept == sorted(["last.ckpt", best, "weights"]), "others were removed"
    assert scores[0] == pytest.approx(scores[1])
    changed, untrusted, stored, resumed = said
    assert "another tensor as 'net." in changed
    assert "weights_only" in untrusted
    assert "storage_options" in stored
    assert "only the model" in resumed


class Adapted(Quiet):
    """A large layer, and a small one which alone is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.adapter = nn.Linear(8, 20_000), nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.adapter(batch[0]), batch[1]) + self.large(batch[0]).square().mean()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        everything = super().state_dict(*args, **kwargs)
        return {key: value for key, value in everything.items() if key.startswith(("adapter", "net.head"))}


def save_adapters(folder: str) -> tuple[int, int]:
    model = Adapted()
    runs = trainer(lightning_models.ours(shard_optimizer=True, bucket_cap_mb=25), max_steps=2)

    class Save(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            runs.save_checkpoint(f"{folder}/part.ckpt", weights_only=True)

    runs.callbacks.append(Save())
    runs.fit(model, data())
    saved = torch.load(f"{folder}/part.ckpt", weights_only=True)["state_dict"]
    runs.strategy.barrier()
    torch.testing.assert_close(dict(saved), dict(model.state_dict()))
    return Path(f"{folder}/part.ckpt").stat().st_size, sum(param.nbytes for param in model.parameters())


def test_a_filtered_state_dict_saves_its_tensors_alone(run_ranks: RunRanks, tmp_path: Path) -> None:
    size, whole = run_ranks(2, save_adapters, str(tmp_path))[0]
    assert whole > 600_000
    assert size < 20_000


# -- while it trains ---------------------------------------------------------------------------------


class Gan(Quiet):
    """Two networks, each with an optimizer that is toggled; ``compiled``: torch.compile'd by themselves."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))
        self.compiled = compiled

    def parts(self) -> tuple[Any, Any]:
        if not self.compiled:
            return self.net, self.critic
        return torch.compile(self.net, backend="eager"), torch.compile(self.critic, backend="eager")

    def training_step(self, batch: Any, batch_idx: int) -> None:
        net, critic = self.parts()
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(-critic(torch.cat([batch[0], net(batch[0])], 1)).mean())
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        real = critic(torch.cat([batch[0], batch[1]], 1))
        made = critic(torch.cat([batch[0], net(batch[0]).detach()], 1))  # by what the first optimizer has just made
        assert all(type(param) is nn.Parameter for param in self.net.parameters()), "they were waited for"
        self.manual_backward((real - 1).square().mean() + made.square().mean())
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.net.parameters(), lr=1e-2),
            torch.optim.RMSprop(self.critic.parameters(), lr=1e-2),
        ]


class Evaluated(Quiet):
    """Notes what validation, which follows steps at once, and hooks find."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.found: list[Tensor] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.found.append(torch.cat([param.flatten() for param in self.parameters()]).sum().detach())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.found.append(nn.functional.mse_loss(self.net(batch[0]), batch[1]))


def fit_like_unsharded(build: Callable[[], pl.LightningModule], options: dict[str, Any]) -> float:
    models = []
    for strategy in (lightning_models.ours(), sharded()):
        callbacks = [make() for make in options.get("callbacks", [])]
        model = build()
        runs = trainer(strategy, **{"max_epochs": 3, **options, "callbacks": callbacks})
        loaders = [] if isinstance(model, Tuned) else [data(), data()] if isinstance(model, Evaluated) else [data()]
        runs.fit(model, *loaders)
        models.append(model)
    close_to(models[1], models[0])
    torch.testing.assert_close(*(getattr(model, "found", []) for model in models))
    return largest_difference_between_ranks(models[1])


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (Gan, {}),
        (partial(Gan, compiled=True), {}),
        (Evaluated, {"val_check_interval": 2}),
        (Tuned, {"callbacks": [Backbone]}),
        (Tuned, {"callbacks": [Relay]}),
    ],
    ids=["gan", "compiled gan", "evaluated", "unfreezing", "freezing and unfreezing"],
)
def test_trains_as_without_shards(run_ranks: RunRanks, build: Any, options: dict[str, Any]) -> None:
    assert run_ranks(2, fit_like_unsharded, build, options) == [0.0, 0.0]


def interrupted(folder: str) -> tuple[str, list[str]]:
    """What a failing run says, and what is in the checkpoint that a callback saves then."""
    file = f"{folder}/failed.ckpt"

    class Fails(Quiet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3 and self.global_rank == 0:
                raise ArithmeticError("no batch today")
            return super().training_step(batch, batch_idx)

    class Save(pl.Callback):
        def on_exception(self, runs: pl.Trainer, module: Any, exception: BaseException) -> None:
            if runs.global_rank == 0:
                runs.save_checkpoint(file)

    runs = trainer(sharded(), callbacks=[Save()])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises((ArithmeticError, PeerFailureError)) as caught:
            runs.fit(Fails(optimizer="adamw"), data())
    told = [str(warning.message) for warning in said if "while an exception is handled" in str(warning.message)]
    return caught.type.__name__, told


def test_a_checkpoint_while_an_exception_is_handled_waits_for_nobody(run_ranks: RunRanks, tmp_path: Path) -> None:
    (first, told), (second, _) = run_ranks(2, interrupted, str(tmp_path), fresh=True)
    assert (first, second) == ("ArithmeticError", "PeerFailureError")
    assert told
    saved = torch.load(tmp_path / "failed.ckpt", weights_only=True)
    Quiet().load_state_dict(saved["state_dict"])
    optimizer = torch.optim.AdamW(Quiet().parameters())
    optimizer.load_state_dict(saved["optimizer_states"][0])
    assert any(state["exp_avg"].ndim != param.ndim for param, state in optimizer.state.items())


# -- Fabric ------------------------------------------------------------------------------------------


FABRIC_JOBS: dict[str, Any] = {
    "train_with_both": {feature: (0.0, 2 if feature == "accumulate" else 6) for feature in test_fabric.FEATURES},
    "gan_with_both": [(0.0, [4, 8])] * 2,
    "exchange_checkpoints": None,
    "resume_masters": ("torch.float32", 0.0),
}


@pytest.mark.parametrize("job", FABRIC_JOBS)
def test_fabric_as_without_shards(run_ranks: RunRanks, job: str, tmp_path: Path) -> None:
    args = [str(tmp_path)] if job in ("exchange_checkpoints", "resume_masters") else []
    assert run_ranks(2, with_shards, "test_fabric", job, *args) == [FABRIC_JOBS[job]] * 2


def save_with_fabric(folder: str) -> tuple[int, list[str]]:
    """The size of a filtered file, and the parameters that refusals name."""
    fabric = test_fabric.start("bucketddp", shard_optimizer=True, bucket_cap_mb=25)
    torch.manual_seed(5)
    plain = Mlp(width=150)
    alone = copy.deepcopy(plain)
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters()))
    fabric.backward(test_fabric.loss_of(model, 0))
    for rank in range(fabric.world_size):
        inputs, target = test_fabric.batch(0, rank)
        (nn.functional.mse_loss(alone(inputs), target) / fabric.world_size).backward()
    expected = {
        kind: nn.utils.get_total_norm([p.grad for p in alone.parameters()], kind) for kind in (2.0, float("inf"))
    }
    for kind, norm in expected.items():
        torch.testing.assert_close(fabric.strategy.grad_norm(model, kind), norm)
        torch.testing.assert_close(fabric.clip_gradients(model, optimizer, max_norm=9.0, norm_type=kind), norm)
    head = alone.head.weight.grad
    torch.testing.assert_close(fabric.strategy.wrapper_of(model).full_grad(plain.head.weight), head)
    refused = []
    for call in (lambda: plain.head.weight.grad.sum(), lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)):
        with pytest.raises(RuntimeError, match="is sharded: this rank holds its own part only") as caught:
            call()
        refused.append(str(caught.value).split("'")[1])
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    only = {"model": lambda key, _: key.startswith("head"), "optimizer": lambda key, _: key == "param_groups"}
    fabric.save(f"{folder}/part.ckpt", state, filter=only)
    fabric.barrier()
    saved = torch.load(f"{folder}/part.ckpt", weights_only=True)
    torch.testing.assert_close(saved["model"]["head.weight"], plain.head.weight.detach())
    fabric.strategy.teardown()
    return Path(f"{folder}/part.ckpt").stat().st_size, refused


def test_fabric_saves_parts_and_tells_norms(run_ranks: RunRanks, tmp_path: Path) -> None:
    size, refused = run_ranks(2, save_with_fabric, str(tmp_path))[0]
    assert size < 10_000, "of 190,000"
    assert refused == ["head.weight", "layers.0.weight"]
