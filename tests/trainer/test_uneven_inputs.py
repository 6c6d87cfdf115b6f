"""``uneven_inputs``: ranks run out of training batches at different times in a Trainer."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bucketddp.trainer.uneven_loader import EvenedLoader
from tests.lightning_models import Regression, ours, trainer
from tests.models import batch
from tests.pool import on_ranks
from tests.reference import WHERE, drift, everyones

AGAIN, OWN, PAUSE, NEXT_TIME = 1, 2, 3, 4
LENGTHS = [3, 5, 4]  # by rank, in a Trainer


def evened(loader: Any, *others: int) -> EvenedLoader:
    """Rank 0's, and what rank 1 will say, first of all its length."""
    script = list(others)
    return EvenedLoader(loader, lambda value: [value, script.pop(0)], rank=0)


def test_a_rank_that_runs_out_repeats_its_last_batch() -> None:
    loader = evened(["a", "b"], 3, OWN, OWN, OWN, AGAIN)
    assert len(loader) == 3
    assert list(loader) == ["a", "b", "b"]
    assert [loader.take() for _ in range(3)] == [(0, 1), (0, 1), (1,)]
    again = evened([{"x": 1, "label": 2}], 3, OWN, OWN, OWN, AGAIN)
    popped = [sorted((batch.pop("label"), *batch)[1:]) for batch in again]
    assert popped == [["x"]] * 3, "hooks do not change the batch that is repeated"


def test_all_ranks_skip_none_or_no_rank_does() -> None:
    loader = evened([None, "a", None, None], 4, PAUSE, OWN, OWN, AGAIN, AGAIN)
    assert list(loader) == [None, "a", "a", None]
    assert [loader.take() for _ in range(4)] == [(0, 1), (0, 1), (1,), (0, 1)]


def test_an_iteration_that_ended_early_is_forgotten() -> None:
    loader = evened(["a", "b"], 2, OWN, AGAIN, NEXT_TIME + OWN)
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == ["a", "b"]  # rank 1 has no second one; neither is taken
    next(iter(loader))
    assert loader.take() == (0, 1)


def leave_alone(loader: EvenedLoader) -> None:
    next(iter(loader))
    next(iter(loader))


@pytest.mark.parametrize(
    ("batches", "said", "use", "message"),
    [
        (iter([1]), [-1], len, "no length"),
        ([1, 2], [-1], len, "no length on rank 1"),
        ([1, 2], [0, 0], list, "found none on rank 1"),
        ([None, "a"], [2, OWN], list, "rank 0: expected a first batch, as another rank has one, found None"),
        (["a", "b"], [2, OWN, OWN], leave_alone, "found rank 0 in the next one and rank 1 waiting for another batch"),
    ],
)
def test_ranks_that_cannot_go_on_together_are_named(batches: Any, said: list[int], use: Any, message: str) -> None:
    with pytest.raises((TypeError, RuntimeError), match=message):
        use(evened(batches, *said))


def test_it_passes_on_what_the_loader_has() -> None:
    inner = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    loader = evened(inner, 2)
    assert loader.sampler is inner.sampler
    assert not hasattr(loader, "state_dict")
    inner.state_dict = lambda: {"at": 3}  # type: ignore[attr-defined]
    inner.load_state_dict = lambda state: None  # type: ignore[attr-defined]
    assert evened(inner, 2).state_dict() == {"at": 3}
    before = torch.get_rng_state()
    iter(loader)
    assert not torch.equal(torch.get_rng_state(), before), "a DataLoader draws its workers' seed at once"


def batches_of(rank: int, count: int | None = None) -> list[tuple[Tensor, Tensor]]:
    return [batch(step, rank) for step in range(LENGTHS[rank] if count is None else count)]


class Stream(IterableDataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def own(kind: str = "sized", count: int | None = None) -> DataLoader[Any]:
    batches: Any = batches_of(dist.get_rank(), count)
    return DataLoader(Stream(batches) if kind == "stream" else batches, batch_size=None)


class Model(Regression):
    def __init__(self, kind: str = "automatic") -> None:
        super().__init__("conv" if kind == "batchnorm" else "mlp")
        self.kind, self.validated = kind, 0
        self.found: list[list[Tensor]] = []
        self.automatic_optimization = kind not in ("manual", "plain backward")

    def setup(self, stage: str) -> None:
        self.expected_steps = self.trainer.estimated_stepping_batches if self.kind == "asks" else 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.kind == "tokens" and self.trainer.training:
            self.trainer.strategy.bucket_ddp.count_tokens(1)
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)  # a collective of its own in each step
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss.backward() if self.kind == "plain backward" else self.manual_backward(loss)
        optimizer.step()
        return None

    def on_train_batch_end(self, *_: Any) -> None:  # where a checkpoint may be written
        self.found.append([buffer.clone() for buffer in self.buffers()])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1
        self.log("validation", super().training_step(batch, batch_idx), sync_dist=True)


def reference(divide_by: str, kind: str, accumulate: int) -> dict[str, Tensor]:
    model, world = Model(kind), dist.get_world_size()
    optimizer = model.configure_optimizers()
    for start in [*range(0, max(LENGTHS[:world]), accumulate)] * 2:
        active = [batches[start : start + accumulate] for batches in map(batches_of, range(world))]
        active = [batches for batches in active if batches]
        optimizer.zero_grad()
        losses = [nn.functional.mse_loss(model.net(x), y) for batches in active for x, y in batches]
        by_active = divide_by == "active_ranks" or kind == "tokens"
        (torch.stack(losses).sum() / (len(active) if by_active else world) / accumulate).backward()
        optimizer.step()
    return model.net.state_dict()


RUNS = [
    ("world_size", "automatic", "stream", 2),
    ("active_ranks", "automatic", "stream", 1),
    ("active_ranks", "automatic", "sized", 2),
    ("active_ranks", "automatic", "sized", 5),
    ("world_size", "manual", "sized", 1),
    ("world_size", "tokens", "sized", 1),
    ("world_size", "asks", "sized", 1),
]


QUICK = [
    *("world_size, automatic, stream, 2", "active_ranks, automatic, stream, 1", "world_size, tokens, sized, 1"),
]


@on_ranks(2, 3, cases=RUNS, quick=QUICK)
def test_ranks_that_run_out_do_not_count(divide_by: str, kind: str, loader: str, accumulate: int) -> None:
    """A rank that runs out within a cycle of accumulation counts in that cycle."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, divisor = Model(kind), "tokens" if kind == "tokens" else "world_size"
    strategy = ours(uneven_inputs=divide_by, gradient_divide_by=divisor)
    runs = trainer(strategy, max_epochs=2, accumulate_grad_batches=accumulate, num_sanity_val_steps=1)
    runs.fit(model, own(loader), own(count=2 + rank))
    assert model.validated == 1 + 2 * (2 + rank), "validation goes through each rank's own batches"
    assert runs.fit_loop.epoch_loop.batch_progress.total.ready == 2 * max(LENGTHS[:world_size])
    assert runs.global_step == {1: 10, 2: 6, 5: 2}[accumulate]
    assert kind != "asks" or model.expected_steps == runs.global_step
    torch.testing.assert_close(model.net.state_dict(), reference(divide_by, kind, accumulate))
    assert drift(model) == 0


@on_ranks(2)
def test_module_buffers_of_repeated_batches_go_with_the_step() -> None:
    """A checkpoint of rank 0 does not hold them, and the next epoch does not begin with them."""
    model, counted = Model("batchnorm"), Model("batchnorm")
    trainer(ours(uneven_inputs="active_ranks"), max_epochs=2).fit(model, own(count=[1, 3][dist.get_rank()]))
    for inputs, _ in [*batches_of(0, 1), *batches_of(1, 3)[1:]] * 2:  # rank 0 has data in the first step only
        counted.net(inputs)
    assert int(model.net.norm.num_batches_tracked) == int(counted.net.norm.num_batches_tracked) == 6
    torch.testing.assert_close(model.net.norm.running_mean, counted.net.norm.running_mean, rtol=0, atol=0.1)
    same = [all(map(torch.equal, one, other)) for one, other in zip(*everyones(model.found), strict=True)]
    assert same == [False, True, True] * 2


@on_ranks(2, fresh=True)
def test_what_cannot_be_evened_is_an_error() -> None:
    rank = dist.get_rank()
    nothing = rf"^rank {rank}: expected at least one training batch on each rank, found none on rank 0"
    outside = r"rank 0: expected a backward inside backward_pass\(\) \(manual_backward\(\) in a LightningModule\)"
    refused: list[tuple[Model, Any, str]] = [
        (Model(), own("stream", 3 * rank), nothing),
        (Model(), {"a": own(), "b": own()}, "found several"),
        (Model("plain backward"), own(), f"rank 0{WHERE} raised RuntimeError" if rank else outside),
    ]
    for model, loader, message in refused:
        with pytest.raises((RuntimeError, ValueError), match=message):
            trainer(ours(uneven_inputs="world_size")).fit(model, loader)
