"""``Trainer(strategy="bucketddp")`` against ``strategy="ddp"``, and where ``ddp`` fails."""

import gc
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDP, BucketDDPStrategy, PeerFailureError, RankMismatchError
from tests.lightning_models import Regression, close_to, data, ddp, ours, trainer, with_nets_and_optimizers
from tests.models import Branches, Fragile
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]


# -- parity with ddp ---------------------------------------------------------------------------------


def fit_with_both(net: str, optimizer: str, options: dict[str, Any]) -> float:
    models = []
    for strategy in (ddp(), ours()):
        model = Regression(net, optimizer)
        trainer(strategy, max_epochs=2, **options).fit(model, data())
        models.append(model)
    if dist.get_rank() == 0:
        close_to(models[1], models[0])
    else:  # `ddp` leaves each rank its own module buffers at the end; here they are rank 0's
        for first, second in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(first, second)
    for kind in ("after_backward", "before_step"):
        expected, found = getattr(models[0], kind), getattr(models[1], kind)
        assert len(expected) == len(found) > 0
        last_of_cycle = options.get("accumulate_grad_batches", 1)
        for at, (first, second) in enumerate(zip(found, expected, strict=True)):
            if kind == "after_backward" and (at + 1) % last_of_cycle:
                continue
            assert first.keys() == second.keys()
            for name in first:
                torch.testing.assert_close(first[name], second[name])
    return largest_difference_between_ranks(models[1])


@pytest.mark.parametrize(
    ("net", "optimizer", "options"),
    with_nets_and_optimizers(
        {
            "plain": {},
            "accumulate": {"accumulate_grad_batches": 3},
            "clip": {"gradient_clip_val": 0.05},
            "bf16-mixed": {"precision": "bf16-mixed"},
        }
    ),
)
def test_the_same_weights_as_ddp(run_ranks: RunRanks, net: str, optimizer: str, options: dict[str, Any]) -> None:
    assert run_ranks(2, fit_with_both, net, optimizer, options) == [0.0, 0.0]


def accumulation_sends_once_a_cycle() -> tuple[int, int]:
    class Count(pl.Callback):
        passes = 0
        wrapped = False

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            Count.passes = trainer.strategy.bucket_ddp.passes
            Count.wrapped = isinstance(trainer.model, BucketDDP)

    model = Regression()
    runs = trainer(ours(), accumulate_grad_batches=3, callbacks=[Count()])
    runs.fit(model, data())
    assert Count.wrapped
    assert runs.model is model, "unwrapped after fit"
    return Count.passes, runs.global_step


def test_accumulation_goes_through_no_sync(run_ranks: RunRanks) -> None:
    assert run_ranks(2, accumulation_sends_once_a_cycle) == [(2, 2), (2, 2)]


# -- where ddp goes wrong ----------------------------------------------------------------------------


class ByRank(pl.LightningModule):
    """What a rank uses depends on the rank."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = Branches()
        self.kind = kind
        self.rank_of_this_copy: int | None = None

    def loss_of_rank(self, batch: tuple[Tensor, Tensor], rank: int, batch_idx: int) -> Tensor:
        inputs, target = batch
        if self.kind == "constant loss" and rank == 1:
            return torch.ones((), requires_grad=True)
        take = "both"
        if self.kind == "branch":
            take = "left" if rank == 0 else "right"
        elif self.kind == "unused":
            take = "left"
        elif self.kind == "local only":
            take = "both" if batch_idx % 2 == 0 and rank == 0 else "left"
        return nn.functional.mse_loss(self.net(inputs, take), target)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss_of_rank(batch, dist.get_rank(), batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Weight decay moves a parameter whose gradient is zero and leaves one alone that has none.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def by_rank(kind: str, find_unused: bool) -> tuple[float, list[str]]:
    accumulate = 2 if kind == "local only" else 1
    model = ByRank(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    runs = trainer(ours(find_unused_parameters=find_unused), accumulate_grad_batches=accumulate)
    runs.fit(model, data())

    # One process that goes through all ranks' batches and averages their losses.
    alone = ByRank(kind)
    optimizer = alone.configure_optimizers()
    world = dist.get_world_size()
    inputs, targets = data().dataset.tensors
    for index in range(6):
        for rank in range(world):
            rows = torch.arange(4) * world + index * 4 * world + rank  # as the distributed sampler deals them
            (alone.loss_of_rank((inputs[rows], targets[rows]), rank, index) / world / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    close_to(model, alone)
    unmoved = [name for name, value in model.state_dict().items() if torch.equal(value, before[name])]
    return largest_difference_between_ranks(model), unmoved


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("kind", ["constant loss", "branch", "unused", "local only"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_a_rank_uses_may_depend_on_the_rank(
    run_ranks: RunRanks, world_size: int, kind: str, find_unused: bool
) -> None:
    for difference, unmoved in run_ranks(world_size, by_rank, kind, find_unused):
        assert difference == 0
        expected = {"net.idle"} | ({"net.right.weight", "net.right.bias"} if kind == "unused" else set())
        assert set(unmoved) == expected


def unused_with_ddp() -> str:
    with pytest.raises(RuntimeError) as error:
        trainer(ddp()).fit(ByRank("unused"), data())
    return str(error.value)


def test_ddp_raises_where_a_parameter_is_unused(run_ranks: RunRanks) -> None:
    """The reason for the test above; `ddp` hangs in the other cases, which is not tried here."""
    for message in run_ranks(2, unused_with_ddp, fresh=True):
        assert "parameters that were not used in producing the loss" in message


class Backboned(Regression):
    """A frozen backbone that ``BackboneFinetuning`` unfreezes."""

    def __init__(self, net: str = "mlp") -> None:
        super().__init__(net)
        self.backbone, self.head = self.net, nn.Linear(4, 4)
        del self.net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.SGD(trainable, lr=0.05, momentum=0.9)


def finetune(net: str, strategy: str) -> tuple[float, bool]:
    model = Backboned(net)
    before = {name: value.clone() for name, value in model.backbone.named_parameters()}
    unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_lr=0.05)
    runs = trainer(ours() if strategy == "ours" else ddp(), max_epochs=9, callbacks=[unfreeze])
    runs.fit(model, data())
    assert runs.global_step == 54
    moved = all(not torch.equal(value, before[name]) for name, value in model.backbone.named_parameters())
    return largest_difference_between_ranks(model), moved


@pytest.mark.parametrize("net", ["mlp", "conv"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_backbone_finetuning_keeps_ranks_the_same(run_ranks: RunRanks, world_size: int, net: str) -> None:
    assert run_ranks(world_size, finetune, net, "ours") == [(0.0, True)] * world_size


@pytest.mark.filterwarnings("ignore")
def test_ddp_lets_an_unfrozen_backbone_drift(run_ranks: RunRanks) -> None:
    """The reason for the test above: if this fails, Lightning has mended it."""
    assert all(difference > 0 and moved for difference, moved in run_ranks(2, finetune, "mlp", "ddp"))


class Gan(pl.LightningModule):
    """Two optimizers, toggled, in manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(8, 4), nn.Linear(4, 1)
        self.plain_backward = False
        self.reduced: list[set[str]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            fake = self.generator(batch[0])
            loss = -self.critic(fake).mean() if index == 0 else (self.critic(fake) - self.critic(batch[1])).mean()
            optimizer.zero_grad()
            if self.plain_backward:
                loss.backward()
            else:
                self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (self.generator, self.critic)]


def adversarial(plain_backward: bool) -> float:
    model = Gan()
    model.plain_backward = plain_backward
    trainer(ours()).fit(model, data())
    before = Gan()
    assert not torch.equal(before.generator.weight, model.generator.weight)
    return largest_difference_between_ranks(model)


@pytest.mark.parametrize("plain_backward", [False, True])
def test_toggled_optimizers_and_manual_backward(run_ranks: RunRanks, plain_backward: bool) -> None:
    assert run_ranks(2, adversarial, plain_backward) == [0.0, 0.0]


class UnfreezesWithin(pl.LightningModule):
    """Manual optimisation that unfreezes another network inside ``training_step`` and calls plain ``backward``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)
        self.second.requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        late = batch_idx >= 2
        self.first.requires_grad_(not late)
        self.second.requires_grad_(late)
        optimizer.zero_grad()
        if batch_idx % 3 == 1:  # a local pass, and one that is reduced with it
            with self.trainer.strategy.block_backward_sync():
                nn.functional.mse_loss(
                    (self.second if late else self.first)(batch[1] @ torch.ones(4, 8)), batch[1]
                ).backward()
        nn.functional.mse_loss((self.second if late else self.first)(batch[0]), batch[1]).backward()
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def unfreeze_within() -> tuple[float, int]:
    class Passes(pl.Callback):
        count = 0

        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            self.count = trainer.strategy.bucket_ddp.passes

    model, passes = UnfreezesWithin(), Passes()
    trainer(ours(), callbacks=[passes]).fit(model, data())
    assert not torch.equal(model.second.weight, UnfreezesWithin().second.weight)
    return largest_difference_between_ranks(model), passes.count


def test_unfreezing_within_a_step_of_manual_optimisation(run_ranks: RunRanks) -> None:
    assert run_ranks(2, unfreeze_within) == [(0.0, 6), (0.0, 6)]


# -- errors ------------------------------------------------------------------------------------------


class Failing(pl.LightningModule):
    """Rank 1 does something of its own in the fourth batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = Fragile()
        self.kind = kind
        if kind == "unfreezes":
            self.net.first.requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        alone = dist.get_rank() == 1 and batch_idx == 3
        if alone and self.kind == "raises in forward":
            raise ArithmeticError("no output today")
        return nn.functional.mse_loss(self.net(batch[0], fail=alone and self.kind == "raises in backward"), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if dist.get_rank() == 1 and batch_idx == 3 and self.kind == "unfreezes":
            self.net.first.requires_grad_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def failing(kind: str) -> tuple[str, str, float]:
    begin = time.monotonic()
    with pytest.raises((ArithmeticError, PeerFailureError, RankMismatchError)) as error:
        trainer(ours(timeout=timedelta(seconds=30))).fit(Failing(kind), data())
    return type(error.value).__name__, str(error.value), time.monotonic() - begin


@pytest.mark.parametrize("kind", ["raises in backward", "raises in forward", "unfreezes"])
def test_what_one_rank_does_alone_is_an_error_on_every_rank(run_ranks: RunRanks, kind: str) -> None:
    for rank, (name, message, elapsed) in enumerate(run_ranks(3, failing, kind, fresh=True)):
        assert elapsed < 12
        if kind == "unfreezes":
            assert name == "RankMismatchError"
            assert f"rank {rank}: ranks disagree on which parameters are trainable in pass 3" in message
            assert "'net.first.weight'" in message
        elif rank == 1:
            assert name == "ArithmeticError"
        else:
            assert name == "PeerFailureError"
            assert f"rank {rank}: pass 3 cannot be completed: rank 1 raised ArithmeticError" in message


def more_batches(counts: list[int]) -> str:
    count = counts[dist.get_rank()]
    dataset = TensorDataset(torch.randn(count, 4, 8), torch.randn(count, 4, 4))
    try:
        trainer(ours(timeout=timedelta(seconds=30))).fit(Regression(), DataLoader(dataset, batch_size=None))
    except PeerFailureError as error:
        return str(error)
    os._exit(0)  # as a script that ends: until then Lightning waits in a broadcast of its own


def test_a_rank_that_has_more_batches_is_told_of_the_option_for_it(run_ranks: RunRanks) -> None:
    message, _ = run_ranks(2, more_batches, [4, 3], fresh=True, may_exit=[1])
    assert "rank 1 has ended training after 3 passes" in message
    assert "uneven_inputs" in message


class Skipping(Gan):
    """Rank 1 skips a ``manual_backward`` in the third batch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = self.critic(self.generator(batch[0])).mean()
        if not (dist.get_rank() == 1 and batch_idx == 2):
            self.manual_backward(loss)


def skipping() -> str:
    processes: list[Any] = [None, None]
    dist.all_gather_object(processes, os.getpid())
    begin = time.monotonic()
    with pytest.raises(RankMismatchError) as error:
        trainer(ours(timeout=timedelta(seconds=30))).fit(Skipping(), data())
    assert time.monotonic() - begin < 12
    # Lightning broadcasts something in each batch; rank 1 waits there, and would until rank 0's process has ended.
    os.kill(processes[1], signal.SIGKILL)
    return str(error.value)


def test_a_skipped_manual_backward_is_noticed(run_ranks: RunRanks) -> None:
    message = run_ranks(2, skipping, fresh=True, may_exit=[1])[0]
    assert "rank 0: rank 1 ran no backward in step 3, in which rank 0 is in pass 2" in message


def skipping_together() -> int:
    class Together(Skipping):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            if batch_idx % 2:
                self.manual_backward(self.critic(self.generator(batch[0])).mean())

    runs = trainer(ours())
    runs.fit(Together(), data())
    return runs.fit_loop.epoch_loop.batch_idx


def test_a_step_without_backward_on_all_ranks_is_no_error(run_ranks: RunRanks) -> None:
    assert run_ranks(2, skipping_together) == [5, 5]


# -- lifecycle ---------------------------------------------------------------------------------------


def fit_twice() -> tuple[list[int], list[int], float]:
    model = Regression()
    hooks, tensors = [], []

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            hooks.append(sum(len(p._post_accumulate_grad_hooks) for p in module.parameters()))

    for _ in range(4):
        trainer(ours(), callbacks=[Look()]).fit(model, data())
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
        model.after_backward.clear()
        model.before_step.clear()
        gc.collect()
        tensors.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
    return hooks, tensors, largest_difference_between_ranks(model)


def test_fit_again_leaves_one_set_of_hooks_and_no_memory(run_ranks: RunRanks) -> None:
    for hooks, tensors, difference in run_ranks(2, fit_twice):
        assert hooks == [8] * 4, "one hook for each parameter"
        assert tensors[1] == tensors[2] == tensors[3]
        assert difference == 0


def fit_after_a_failure(kind: str) -> tuple[str, str]:
    rank = dist.get_rank()
    with pytest.raises((ArithmeticError, PeerFailureError)):
        trainer(ours(timeout=timedelta(seconds=30))).fit(Failing(kind), data())
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        trainer(ours(timeout=timedelta(seconds=30))).fit(Regression(), data())
    assert time.monotonic() - begin < 12
    return type(error.value).__name__, f"rank {rank}: {error.value}"


def test_fit_after_one_rank_failed_is_refused_on_every_rank(run_ranks: RunRanks) -> None:
    for _, message in run_ranks(2, fit_after_a_failure, "raises in forward", fresh=True):
        assert "expected a process group without unfinished collectives" in message
        assert "ArithmeticError: no output today" in message


def validate_and_test() -> list[float]:
    seen = []

    class Watch(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                seen.append(largest_difference_between_ranks(self))

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0])

    model = Watch("conv")
    runs = trainer(ours(), max_epochs=2, num_sanity_val_steps=1)
    runs.fit(model, data(), data())
    seen.append(largest_difference_between_ranks(model))  # module buffers too, at the end of fit
    runs.test(model, data())
    assert len(runs.predict(model, data())) == 6
    return seen


def test_every_rank_validates_the_same_model(run_ranks: RunRanks) -> None:
    for seen in run_ranks(2, validate_and_test):
        assert seen == [0.0] * 5


def module_buffers_after_fit() -> float:
    model = Regression("conv")
    trainer(ours()).fit(model, data())
    return largest_difference_between_ranks(model)


def test_module_buffers_are_the_same_after_fit_without_validation(run_ranks: RunRanks) -> None:
    assert run_ranks(2, module_buffers_after_fit) == [0.0, 0.0]


def checkpoints_go_both_ways(folder: str) -> None:
    first = Regression("conv", "adamw")
    runs = trainer(ours())
    runs.fit(first, data())
    runs.save_checkpoint(f"{folder}/ours.ckpt")
    keys = torch.load(f"{folder}/ours.ckpt", weights_only=False)["state_dict"].keys()
    assert list(keys) == list(first.state_dict())
    continued = []
    for strategy in (ddp(), ours()):
        model = Regression("conv", "adamw")
        runs = trainer(strategy, max_epochs=2)
        runs.fit(model, data(), ckpt_path=f"{folder}/ours.ckpt")
        assert runs.global_step == 12
        continued.append(model)
        if len(continued) == 1:
            runs.save_checkpoint(f"{folder}/ddp.ckpt")
    if dist.get_rank() == 0:
        close_to(continued[0], continued[1])
    model = Regression("conv", "adamw")
    trainer(ours(), max_epochs=3).fit(model, data(), ckpt_path=f"{folder}/ddp.ckpt")
    assert largest_difference_between_ranks(model) == 0


def test_checkpoints_are_interchangeable_with_ddp(run_ranks: RunRanks, tmp_path: Any) -> None:
    run_ranks(2, checkpoints_go_both_ways, str(tmp_path))


# -- registry ----------------------------------------------------------------------------------------


def test_the_names_are_registered() -> None:
    methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    for name, sharded in (("bucketddp", False), ("bucketddp_sharded", True)):
        for started, start_method in methods.items():
            strategy = StrategyRegistry.get(name + started)
            assert isinstance(strategy, BucketDDPStrategy)
            assert strategy._start_method == start_method
            assert strategy._options.shard_optimizer is sharded
    BucketDDPStrategy.register_strategies(StrategyRegistry)  # again: no error
    runs = pl.Trainer(strategy="bucketddp", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert type(runs.strategy) is BucketDDPStrategy


def test_options_are_refused_early() -> None:
    with pytest.raises(TypeError, match="bucket_cap"):
        BucketDDPStrategy(bucket_cap=25)
