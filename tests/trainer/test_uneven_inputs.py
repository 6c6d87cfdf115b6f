"""``uneven_inputs``: ranks run out of training batches at different times in a Trainer."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.trainer.uneven_loader import EvenedLoader as evened
from tests.lightning_models import PoolEnvironment, trainer
from tests.models import ConvBatchNorm, Mlp
from tests.reference import largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]


# -- the loader --------------------------------------------------------------------------------------


class Scripted:
    """The other ranks' part of a conversation: what each of them will say."""

    def __init__(self, *others: int) -> None:
        self.others = list(others)

    def __call__(self, value: int) -> list[int]:
        return [value, self.others.pop(0)]


def test_a_rank_that_runs_out_repeats_its_last_batch() -> None:
    own, again = 2, 1
    loader = evened(["a", "b"], Scripted(3, own, own, own, again), rank=0)
    assert len(loader) == 3
    assert list(loader) == ["a", "b", "b"]
    assert [loader.take() for _ in range(3)] == [(0, 1), (0, 1), (1,)]


def test_a_loader_without_length_has_none() -> None:
    loader = evened(iter([1]), Scripted(-1), rank=0)
    with pytest.raises(TypeError, match="no length"):
        len(loader)


def test_a_length_on_some_ranks_only_is_none() -> None:
    with pytest.raises(TypeError, match="no length on rank 1"):
        len(evened([1, 2], Scripted(-1), rank=0))


def test_a_rank_without_any_batch_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="found none on rank 1"):
        list(evened([1, 2], Scripted(0, 0), rank=0))


def test_all_ranks_skip_none_or_no_rank_does() -> None:
    own, again, pause = 2, 1, 3
    loader = evened([None, "a", None, None], Scripted(4, pause, own, own, again, again), rank=0)
    assert list(loader) == [None, "a", "a", None]
    assert [loader.take() for _ in range(4)] == [(0, 1), (0, 1), (1,), (0, 1)]
    with pytest.raises(RuntimeError, match="rank 0: expected a first batch, as another rank has one, found None"):
        list(evened([None, "a"], Scripted(2, own), rank=0))


def test_an_iteration_that_ended_early_is_forgotten() -> None:
    own, again, second_time = 2, 1, 4
    loader = evened(["a", "b"], Scripted(2, own, again, second_time + own), rank=0)
    iterator = iter(loader)
    next(iterator)
    assert next(iterator) == "b"  # rank 1 has none; neither is taken
    next(iter(loader))
    assert loader.take() == (0, 1)
    with pytest.raises(IndexError):
        loader.take()


def test_hooks_do_not_change_the_batch_that_is_repeated() -> None:
    again = evened([{"x": 1, "label": 2}], Scripted(2, 2, 2, 1), rank=0)
    assert [sorted((batch.pop("label"), *batch)[1:]) for batch in again] == [["x"], ["x"]]


def test_a_rank_that_leaves_an_epoch_alone_is_an_error() -> None:
    own = 2
    loader = evened(["a", "b"], Scripted(2, own, own), rank=0)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="found rank 0 in the next one and rank 1 waiting for another batch"):
        next(iter(loader))


def test_it_passes_on_what_the_loader_has() -> None:
    inner = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    loader = evened(inner, Scripted(2), rank=0)
    assert loader.sampler is inner.sampler
    assert not hasattr(loader, "state_dict")
    inner.state_dict = lambda: {"at": 3}  # type: ignore[attr-defined]
    inner.load_state_dict = lambda state: None  # type: ignore[attr-defined]
    assert evened(inner, Scripted(2), rank=0).state_dict() == {"at": 3}


# -- in a Trainer ------------------------------------------------------------------------------------


class Batches(Dataset[Any]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.items = [
            (torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Stream(IterableDataset[Any]):
    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches.items)


class Model(pl.LightningModule):
    def __init__(self, kind: str = "automatic") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = ConvBatchNorm() if kind == "batchnorm" else Mlp()
        self.kind = kind
        self.validated = 0
        self.automatic_optimization = kind not in ("manual", "plain backward")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)  # a collective of its own in each step
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss.backward() if self.kind == "plain backward" else self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1
        self.log("validation", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def lengths() -> list[int]:
    return [3, 5, 4][: dist.get_world_size()]


def reference(divide_by: str, accumulate: int, epochs: int = 2) -> nn.Module:
    net = Model().net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    ranks = [Batches(count, seed) for seed, count in enumerate(lengths())]
    longest = max(lengths())
    for _ in range(epochs):
        for start in range(0, longest, accumulate):
            stop = min(start + accumulate, longest)
            active = [batches.items[start:stop] for batches in ranks if len(batches) > start]
            divisor = len(ranks) if divide_by == "world_size" else len(active)
            for batches in active:
                for inputs, target in batches:
                    (nn.functional.mse_loss(net(inputs), target) / divisor / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
    return net


def fit(divide_by: str, kind: str, loader: str, accumulate: int) -> tuple[float, int]:
    rank = dist.get_rank()
    batches = Batches(lengths()[rank], seed=rank)
    dataset = Stream(batches) if loader == "stream" else batches
    model = Model(kind)
    strategy = BucketDDPStrategy(cluster_environment=PoolEnvironment(), uneven_inputs=divide_by)
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "num_sanity_val_steps": 1}
    runs = trainer(strategy, **options)
    validation = DataLoader(Batches(2 + rank, seed=9), batch_size=None)
    runs.fit(model, DataLoader(dataset, batch_size=None), validation)
    assert model.validated == 1 + 2 * (2 + rank), "validation goes through each rank's own batches"
    assert runs.fit_loop.epoch_loop.batch_progress.total.ready == 2 * max(lengths())
    torch.testing.assert_close(model.net.state_dict(), reference(divide_by, accumulate).state_dict())
    return largest_difference_between_ranks(model), runs.global_step


@pytest.mark.parametrize(
    ("world_size", "divide_by", "kind", "loader", "accumulate"),
    [
        (2, "world_size", "automatic", "stream", 1),
        (3, "active_ranks", "automatic", "stream", 1),
        (3, "world_size", "automatic", "sized", 1),
        (2, "active_ranks", "automatic", "sized", 1),
        (2, "world_size", "automatic", "stream", 2),
        (2, "active_ranks", "automatic", "sized", 2),
        (2, "active_ranks", "automatic", "sized", 5),
        (2, "world_size", "manual", "sized", 1),
    ],
)
def test_ranks_that_run_out_do_not_count(
    run_ranks: RunRanks, world_size: int, divide_by: str, kind: str, loader: str, accumulate: int
) -> None:
    """A rank that runs out within a cycle of accumulation counts in that cycle."""
    steps = {1: 10, 2: 6, 5: 2}[accumulate]
    assert run_ranks(world_size, fit, divide_by, kind, loader, accumulate) == [(0.0, steps)] * world_size


class WithLineSearch(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def line_search(divide_by: str) -> float:
    rank = dist.get_rank()
    model = WithLineSearch()
    strategy = BucketDDPStrategy(cluster_environment=PoolEnvironment(), uneven_inputs=divide_by)
    trainer(strategy).fit(model, DataLoader(Batches(lengths()[rank], seed=rank), batch_size=None))
    expected = WithLineSearch()
    optimizer = expected.configure_optimizers()
    ranks = [Batches(count, seed) for seed, count in enumerate(lengths())]
    for at in range(max(lengths())):
        active = [batches.items[at] for batches in ranks if len(batches) > at]

        def closure(active: Any = active) -> Tensor:
            optimizer.zero_grad()
            losses = [nn.functional.mse_loss(expected.net(x), y) for x, y in active]
            loss = torch.stack(losses).sum() / (len(ranks) if divide_by == "world_size" else len(active))
            loss.backward()
            return loss

        optimizer.step(closure)
    torch.testing.assert_close(model.net.state_dict(), expected.net.state_dict(), rtol=1e-3, atol=1e-4)
    return largest_difference_between_ranks(model)


@pytest.mark.parametrize("divide_by", ["world_size", "active_ranks"])
def test_line_searches_see_the_losses_that_count(run_ranks: RunRanks, divide_by: str) -> None:
    assert run_ranks(2, line_search, divide_by) == [0.0, 0.0]


def plain_backward() -> str:
    with pytest.raises(RuntimeError) as error:
        fit("world_size", "plain backward", "sized", 1)
    return str(error.value)


def test_a_plain_backward_of_a_joined_rank_is_an_error(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, plain_backward, fresh=True)
    assert "rank 0: expected a backward inside backward_pass() (manual_backward() in a LightningModule)" in first
    assert "rank 0 raised RuntimeError" in second


def module_buffers_of_ranks_with_data() -> bool:
    rank = dist.get_rank()
    model = Model("batchnorm")
    reference = Model("batchnorm")
    strategy = BucketDDPStrategy(cluster_environment=PoolEnvironment(), uneven_inputs="active_ranks")
    batches = Batches([1, 3][rank], seed=rank)
    trainer(strategy).fit(model, DataLoader(batches, batch_size=None))
    for batch in Batches(1, seed=0).items + Batches(3, seed=1).items[1:]:  # rank 0 has data in the first step only
        reference.net(batch[0])
    counts = [b for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts
    assert all(int(count) == 3 for count in counts)
    first = next(b for name, b in model.named_buffers() if name.endswith("running_mean"))
    expected = next(b for name, b in reference.named_buffers() if name.endswith("running_mean"))
    return torch.allclose(first, expected, atol=0.05) and not torch.equal(first, torch.zeros_like(first))


def test_module_buffers_are_those_of_a_rank_with_data(run_ranks: RunRanks) -> None:
    assert run_ranks(2, module_buffers_of_ranks_with_data) == [True, True]


class WatchesModuleBuffers(Model):
    """Logs module buffers behind each batch, where a checkpoint may be written."""

    def on_train_start(self) -> None:
        self.found: list[list[Tensor]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append([buffer.clone() for buffer in self.buffers()])


def module_buffers_in_every_step() -> list[bool]:
    rank = dist.get_rank()
    model = WatchesModuleBuffers("batchnorm")
    strategy = BucketDDPStrategy(cluster_environment=PoolEnvironment(), uneven_inputs="active_ranks")
    trainer(strategy, max_epochs=2).fit(model, DataLoader(Batches([1, 3][rank], seed=rank), batch_size=None))
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, model.found)
    return [all(map(torch.equal, one, other)) for one, other in zip(*everybody, strict=True)]


def test_module_buffers_of_repeated_batches_go_with_the_step(run_ranks: RunRanks) -> None:
    """A checkpoint of rank 0 does not hold them, and the next epoch does not begin with them."""
    assert run_ranks(2, module_buffers_in_every_step) == [[False, True, True] * 2] * 2


class CountsSteps(Model):
    def setup(self, stage: str) -> None:
        self.expected_steps = self.trainer.estimated_stepping_batches


def length_asked_for_early() -> tuple[int, int]:
    model = CountsSteps()
    strategy = BucketDDPStrategy(cluster_environment=PoolEnvironment(), uneven_inputs="world_size")
    runs = trainer(strategy)
    runs.fit(model, DataLoader(Batches(lengths()[dist.get_rank()], seed=1), batch_size=None))
    return model.expected_steps, runs.global_step


def test_the_length_is_known_before_the_module_is_wrapped(run_ranks: RunRanks) -> None:
    assert run_ranks(2, length_asked_for_early) == [(5, 5), (5, 5)]


class Tokens(Model):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.trainer.strategy.bucket_ddp.count_tokens(4)
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1], reduction="sum") / 4


def tokens() -> None:
    rank = dist.get_rank()
    model, net = Tokens(), Model().net
    strategy = BucketDDPStrategy(
        cluster_environment=PoolEnvironment(), uneven_inputs="world_size", gradient_divide_by="tokens"
    )
    trainer(strategy).fit(model, DataLoader(Batches(lengths()[rank], seed=rank), batch_size=None))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    ranks = [Batches(count, seed) for seed, count in enumerate(lengths())]
    for at in range(max(lengths())):
        active = [batches.items[at] for batches in ranks if len(batches) > at]
        loss = sum(nn.functional.mse_loss(net(x), y, reduction="sum") / 4 for x, y in active)
        (loss / (4 * len(active))).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.net.state_dict(), net.state_dict())


def test_tokens_of_repeated_batches_do_not_count(run_ranks: RunRanks) -> None:
    run_ranks(2, tokens)


def no_batch_at_all() -> str:
    strategy = BucketDDPStrategy(cluster_environment=PoolEnvironment(), uneven_inputs="world_size")
    dataset = Stream(Batches(3 * dist.get_rank(), seed=1))
    with pytest.raises(RuntimeError) as error:
        trainer(strategy).fit(Model(), DataLoader(dataset, batch_size=None))
    return str(error.value)


def test_a_rank_without_any_batch_fails_on_all(run_ranks: RunRanks) -> None:
    for rank, message in enumerate(run_ranks(2, no_batch_at_all)):
        assert f"rank {rank}: expected at least one training batch on each rank, found none on rank 0" in message


class TakesTheIterator(Model):
    def training_step(self, dataloader_iter: Any) -> Any:
        return None


def refused(kind: str) -> str:
    strategy = BucketDDPStrategy(cluster_environment=PoolEnvironment(), uneven_inputs="world_size")
    model = TakesTheIterator() if kind == "iterator" else Model()
    loader = DataLoader(Batches(3, seed=1), batch_size=None)
    with pytest.raises(ValueError, match="expected") as error:
        trainer(strategy).fit(model, {"a": loader, "b": loader} if kind == "several" else loader)
    return str(error.value)


@pytest.mark.parametrize(("kind", "message"), [("iterator", "`dataloader_iter`"), ("several", "found several")])
def test_loaders_that_cannot_be_evened_are_refused(run_ranks: RunRanks, kind: str, message: str) -> None:
    for found in run_ranks(2, refused, kind):
        assert message in found
