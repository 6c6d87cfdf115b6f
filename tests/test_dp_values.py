"""``strategy="bucketdp"``: values that could be taken for others are those of one device, or there is one warning."""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryF1Score

from lightning_bucketddp.trainer.dp.doubts import Doubts, StepMemory
from lightning_bucketddp.trainer.dp.merging import merge
from tests.dp import fit, one_process, replicas, samples
from tests.lightning_models import Memory

CPU = torch.device("cpu")


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def batches(count: int = 10, batch_size: int = 4) -> DataLoader[Any]:
    """By default batches of 4, 4 and 2, so that replicas have as many samples, or not if ``count`` is odd."""
    return samples((8,), count=count, batch_size=batch_size)


class Step(pl.LightningModule):
    """Does in its steps what a test asks for: ``what(module, x, batch_idx)``."""

    def __init__(self, what: Callable[[Any, Tensor, int], Any]) -> None:
        super().__init__()
        self.what = what
        self.kept: list[Any] = []
        self.f1, self.mean = BinaryF1Score(), MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.what(self, batch[0], batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.what(self, batch[0], batch_idx)


def logged(what: Callable[[Any, Tensor, int], Any], devices: int, share: bool = True, **options: Any) -> Any:
    memory = Memory()
    trainer = one_process(devices, share, logger=memory)
    (result,) = trainer.validate(Step(what), batches(**options), verbose=False)
    return result, memory.logged


def predicted(what: Callable[[Any, Tensor, int], Any], devices: int, **options: Any) -> Any:
    return one_process(devices).predict(Step(what), batches(**options))


# -- values that change in place -----------------------------------------------------------------------


def change_metric_value(module: Any, x: Tensor, _: int) -> None:
    value = module.f1(x[:, 0].sigmoid(), (x[:, 1] > 0).long())
    value *= 100
    module.log("f1", value, on_step=True, on_epoch=True)


def change_gathered(module: Any, x: Tensor, _: int) -> None:
    value = module.all_gather({"mean": [x.mean()]})["mean"][0]
    value *= 2
    module.log("mean", value, on_step=True, on_epoch=True)


def change_after_update(module: Any, x: Tensor, _: int) -> None:
    scores, target = x[:, 0].sigmoid(), (x[:, 1] > 0).long()
    module.f1.update(scores, target)
    module.mean.update(value=scores)
    target[target == 0] = 1
    scores.zero_()
    module.log("f1", module.f1)
    module.log("mean", module.mean)


@replicas
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("what", [change_metric_value, change_gathered, change_after_update])
def test_tensors_that_a_step_changes_in_place_are_those_of_one_device(what: Any, devices: int, share: bool) -> None:
    close(logged(what, devices, share), logged(what, 1))


@replicas
def test_a_metric_that_was_given_a_parameter_has_it_as_it_was(share: bool) -> None:
    class Scaled(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.mean.update(self.scale)
            optimizer.zero_grad()
            self.manual_backward((batch[0] * self.scale).square().mean())
            optimizer.step()
            self.log("mean", self.mean, on_step=False, on_epoch=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found, expected = (fit(Scaled(), devices, share, loader=batches()).callback_metrics for devices in (2, 1))
    close(found, expected)
    assert float(found["mean"]) < 1


@pytest.mark.parametrize("how", [copy.deepcopy, lambda metric: metric.clone(), copy.copy])
def test_a_metric_that_a_step_copies_is_an_error_that_says_where_to_do_it(how: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"copied or pickled outside of steps.* BinaryF1Score .*on_train_batch_end"):
        logged(lambda module, x, _: how(module.f1), 2)


# -- logging -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [20, 18, 19])
def test_a_constant_batch_size_is_the_batchs_in_a_smaller_last_batch_too(count: int) -> None:
    def what(module: Any, x: Tensor, _: int) -> None:
        module.log("constant", x.mean(), batch_size=8)
        module.log("own", x.mean(), batch_size=len(x))

    close(logged(what, 2, count=count, batch_size=8), logged(what, 1, count=count, batch_size=8))


def test_batch_sizes_of_one_run_say_nothing_of_another() -> None:
    trainer = one_process(2)
    module = Step(lambda module, x, _: module.log("own", x.mean(), batch_size=4))
    trainer.validate(module, batches(count=4), verbose=False)
    loader = batches(count=11, batch_size=8)  # shards of 4 and 4, which is the number given, and of 2 and 1
    (result,) = trainer.validate(module, loader, verbose=False)
    (first,), (last,) = loader
    close(result["own"], float((first.mean() * 8 + last.mean() * 4) / 12))


@pytest.mark.filterwarnings("ignore:You called `self.log.'")
@pytest.mark.parametrize("count", [10, 11])
def test_integers_are_logged_as_on_one_device(count: int) -> None:
    def what(module: Any, x: Tensor, batch_idx: int) -> None:
        module.log("rows", len(x), on_step=True, on_epoch=True)
        module.log("rows as a tensor", torch.tensor(len(x)), on_step=True, on_epoch=True)
        module.log("positive", (x > 0).sum(), on_step=True, on_epoch=True, batch_size=len(x))
        module.log("constant", 50, on_step=True, on_epoch=True)
        module.log("batch_idx", batch_idx + 1, on_step=True, on_epoch=True)
        module.log("total", len(x), reduce_fx="sum")
        module.log("smallest", len(x) * 0 + 3, reduce_fx="min")
        module.log("flag", torch.tensor(True), on_step=True, on_epoch=True)

    close(logged(what, 2, count=count), logged(what, 1, count=count))


# -- merging -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10, 11])
@pytest.mark.parametrize(
    "what",
    [
        lambda module, x, _: (x.mean().item(), x[:, 0].mean().item()),
        lambda module, x, _: (x.mean(), x[:, 0].mean()),
        lambda module, x, _: {"both": ([x.mean()], x[:, 0].mean())},
        lambda module, x, _: ([f"{value:.2f}" for value in x[:, 0]], x[:, 0].tolist()),
        lambda module, x, _: x[:, 0].tolist(),
        lambda module, x, _: (x[:, 0] * 10).long().tolist(),
        lambda module, x, _: list(x[:, 0].numpy()),
        lambda module, x, _: tuple(f"{value:.2f}" for value in x[:, 0]),
        lambda module, x, _: x[:, :2].tolist(),
        lambda module, x, _: list(x),
        lambda module, x, batch_idx: {"batch_idx": batch_idx, "epoch": 3, "x": x, "current_step": torch.tensor(7)},
        lambda module, x, _: (len(x), (x > 0).sum().item(), x),
    ],
)
def test_outputs_are_those_of_one_device(what: Any, count: int) -> None:
    found, expected = predicted(what, 2, count=count), predicted(what, 1, count=count)
    close(_plain(found), _plain(expected))


def _plain(value: Any) -> Any:
    """With strings as numbers, as ``assert_close`` takes no strings."""
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return float(value) if isinstance(value, str) else value


@pytest.mark.parametrize("items", [tuple, list])
def test_pairs_of_numbers_that_are_appended_stay_pairs(items: Any) -> None:
    def what(module: Any, x: Tensor, _: int) -> None:
        mean = x.mean().item() if items is tuple else x.mean()
        module.kept.append(items([mean, mean * 2]))

    kept = []
    for devices in (2, 1):
        module = Step(what)
        trainer = one_process(devices)
        if items is list and devices > 1:
            with pytest.warns(UserWarning, match=r"appended to 'kept' .*2 numbers .*make it a tuple"):
                trainer.validate(module, batches(), verbose=False)
        else:
            trainer.validate(module, batches(), verbose=False)
        kept.append(module.kept)
    close(*kept)


@pytest.mark.parametrize(
    ("values", "sizes", "merged"),
    [
        ([list(torch.ones(3)), list(torch.zeros(2))], [3, 2], [*torch.ones(3), *torch.zeros(2)]),
        ([[1.0], [3.0, 4.0]], [2, 2], [1.0, 3.0, 4.0]),
        ([[3, 7], [2, 5]], [3, 3], [3, 7, 2, 5]),
        ([([1.0, 2.0], [3.0, 4.0]), ([5.0, 6.0], [7.0, 8.0])], [2, 2], ([1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0])),
    ],
)
def test_sequences_without_doubts_are_merged_without_warnings(values: Any, sizes: list[int], merged: Any) -> None:
    close(merge(values, sizes, CPU, "the output", Doubts(StepMemory(), {})), merged)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda module, x, _: [x.mean().item(), x.max().item(), 1.0], r"3 numbers in each .*make it a tuple"),
        (lambda module, x, batch_idx: (batch_idx, x), r'returned\[0\] to be 1 in each, .*\{"batch_idx": batch_idx\}'),
        (lambda module, x, _: x[:, :5].mean(0), r"5 rows in each replica, which have 2, 2 samples; .*MeanMetric"),
        (
            lambda module, x, _: {"c": x[:, :3].T @ x[:, :3]},
            r"returned\['c'\] to have 3 rows in each .*ConfusionMatrix",
        ),
    ],
)
def test_values_in_doubt_are_warned_of_once(what: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=message) as warned:
        predicted(what, 2, count=20)
    assert sum("expected" in str(warning.message) for warning in warned) == 1


def test_rows_that_no_samples_have_are_warned_of() -> None:
    doubts = Doubts(StepMemory(), {})
    with pytest.warns(UserWarning, match="8 rows in each replica, which have 3, 2 samples"):
        merge([torch.ones(8), torch.ones(8)], [3, 2], CPU, "the output", doubts)
    with pytest.warns(UserWarning, match="3 rows in each replica, which have 2, 2 samples"):
        merge([torch.ones(3, 3), torch.ones(3, 3)], [2, 2], CPU, "another", doubts)
    merge([torch.ones(6, 3), torch.ones(6, 3)], [2, 2], CPU, "a third", doubts)


def test_values_that_were_seen_to_depend_on_samples_are_not_warned_of() -> None:
    doubts = Doubts(StepMemory(), {"batch_idx": 3})
    for rows in (2, 1):
        merge([(torch.ones(1), 5), (torch.ones(rows), 4)], [3, 3], CPU, "the output", doubts)
    close(merge([(torch.ones(1), 3), (torch.ones(1), 3)], [3, 2], CPU, "the output", doubts), (torch.ones(2), 6))


def test_only_names_tell_that_an_integer_is_no_count() -> None:
    path = "what validation_step returned for the epoch"
    assert merge([4, 4], [3, 3], CPU, path) == 8
    assert merge([{"steps_taken": 4}] * 2, [3, 3], CPU, path) == {"steps_taken": 8}
    assert merge([{"num_classes": 4}] * 2, [3, 3], CPU, path) == {"num_classes": 4}
    with pytest.raises(ValueError, match=r"\['step'\] of the replicas: expected the same value, found 1, 2"):
        merge([{"step": torch.tensor(1)}, {"step": torch.tensor(2)}], [3, 3], CPU, path)
