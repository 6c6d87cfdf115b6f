"""``strategy="bucketdp"``: how batches are divided, and how what replicas return, log and measure is merged."""

from collections import defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.aggregation import RunningMean, RunningSum
from torchmetrics.classification import BinaryAUROC, BinaryF1Score
from torchmetrics.regression import PearsonCorrCoef
from torchmetrics.text import CharErrorRate

from lightning_bucketddp import BucketDPStrategy
from lightning_bucketddp.trainer.dp.batch_division import divide
from lightning_bucketddp.trainer.dp.lists import AppendedLists
from lightning_bucketddp.trainer.dp.logging import LogBook
from lightning_bucketddp.trainer.dp.merging import merge, merge_loss, weighted_mean
from tests.dp import fit, one_process, replicas, samples
from tests.lightning_models import Memory

CPU = torch.device("cpu")
HOME = [CPU, CPU]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# -- dividing ----------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: Tensor
    name: list[str]


def test_batches_are_divided_by_samples_whatever_they_are_made_of() -> None:
    x, y = torch.arange(10.0).view(5, 2), torch.arange(5)
    scale = torch.tensor(3.0)
    division = divide({"x": x, "pair": Pair([x], (y,)), "names": list("abcde"), "ids": "abcde", "scale": scale}, HOME)
    assert division.sizes == [3, 2]
    for part, shard in zip((slice(0, 3), slice(3, 5)), division.shards, strict=True):
        close(shard["x"], x[part])
        close(shard["pair"], Pair([x[part]], (y[part],)))
        assert isinstance(shard["pair"], Pair)
        assert shard["names"] == list("abcde")[part]
        assert shard["ids"] == "abcde"
        close(shard["scale"], scale)
    first, second = divide(Sample(x, list("abcde")), HOME).shards
    assert (first.name, second.name) == (["a", "b", "c"], ["d", "e"])
    for other in (["a", "b"], [1, 2.5, None], (b"a", torch.float32, CPU)):
        assert [shard["other"] for shard in divide({"x": x, "other": other}, HOME).shards] == [other] * 2
    first, second = divide([x, y, y, y, y], HOME).shards  # as many tensors as samples
    close((first, second), ([x[:3], *[y[:3]] * 4], [x[3:], *[y[3:]] * 4]))
    assert divide([x, y], [CPU] * 4).sizes == [2, 2, 1]
    assert divide(x[:1], HOME).sizes == [1]
    assert divide("nothing to divide", HOME).shards == ["nothing to divide"]
    assert divide([torch.zeros(0, 2), "none"], HOME).sizes == [1]


def test_batches_of_several_loaders_are_divided_one_by_one() -> None:
    x, y = torch.arange(6.0), torch.arange(12.0)
    division = divide({"few": [x], "many": [y, y]}, HOME)
    first, second = division.shards
    close(first, {"few": [x[:3]], "many": [y[:6], y[:6]]})
    close(second, {"few": [x[3:]], "many": [y[6:], y[6:]]})
    assert division.sizes == [3, 3]
    first, second = divide([["of all"], [x], [y]], HOME).shards
    assert first[0] == second[0] == ["of all"]
    close((first[1:], second[1:]), ([[x[:3]], [y[:6]]], [[x[3:]], [y[6:]]]))
    first, second = divide({"x": [x], "names": list("abcdef")}, HOME).shards  # of one size
    assert (first["names"], second["names"]) == (list("abc"), list("def"))
    with pytest.raises(ValueError, match=r"same proportion, found \[2, 1\] samples per device in one and \[6, 6\]"):
        divide({"few": [x[:3]], "many": [y]}, HOME)


class Graph:
    """Of a kind that cannot be known here."""


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([torch.zeros(4), torch.zeros(3)], "samples along their first dimension, found 4 and 3 in batch"),
        ([torch.zeros(4), {"of graphs": Graph()}], r"found a Graph in batch\[1\]\['of graphs'\]"),
        ([torch.zeros(4), pack_sequence([torch.zeros(4)])], r"found a PackedSequence in batch\[1\]"),
    ],
)
def test_batches_that_cannot_be_divided_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message + r"(?s:.*)scatter_batch="):
        divide(batch, HOME)


def test_a_function_divides_batches_of_another_kind() -> None:
    class Detector(pl.LightningModule):
        """Gets a list of images of all sizes."""

        def predict_step(self, batch: Any, batch_idx: int) -> list[Tensor]:
            return [image.sum() for image in batch["images"]]

    def halves(batch: Any, count: int) -> list[Any]:
        middle = (len(batch["images"]) + 1) // count
        parts = batch["images"][:middle], batch["images"][middle:]
        return [({"images": part}, len(part)) for part in parts if part]

    batches = [{"images": [torch.full((size, 2), float(size)) for size in sizes]} for sizes in ((1, 2, 3), (4,))]
    loader = DataLoader(batches, batch_size=None)
    with pytest.raises(ValueError, match="expected all tensors of a batch"):
        one_process(2).predict(Detector(), loader)
    strategy = BucketDPStrategy(scatter_batch=halves)
    found = one_process(2, strategy=strategy).predict(Detector(), loader)
    close(found, one_process().predict(Detector(), loader))
    strategy = BucketDPStrategy(scatter_batch=lambda batch, count: [({"images": batch["images"][:1]}, 1)])
    assert [len(outputs) for outputs in one_process(2, strategy=strategy).predict(Detector(), loader)] == [1, 1]
    devices = [CPU, torch.device("meta")]
    division = divide([], devices, lambda batch, count: [(torch.ones(2), 2), (torch.ones(1), 1)])
    assert [shard.device for shard in division.shards] == devices
    for wrong in ([], ["a"], [("a", 1)] * 3, [("a", 0)]):
        with pytest.raises(ValueError, match="expected scatter_batch to return 1 to 2 pairs"):
            divide([], HOME, lambda batch, count, wrong=wrong: wrong)


# -- merging outputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "merged"),
    [
        ([torch.ones(3, 2), torch.zeros(1, 2)], torch.tensor([[1.0, 1]] * 3 + [[0, 0]])),
        ([torch.ones(3), torch.tensor(0.0)], torch.tensor([1.0, 1, 1, 0])),  # squeezed, of one sample
        ([torch.tensor(1.0), torch.tensor(5.0)], torch.tensor(2.0)),
        ([torch.tensor(2), torch.tensor(5)], torch.tensor(7)),
        ([1.0, 5.0], 2.0),
        ([3, 1], 4),
        ([2, 2], 4),
        ([{"n": 3, "batch_idx": 3}, {"n": 1, "batch_idx": 3}], {"n": 4, "batch_idx": 3}),
        ([True, True], True),
        (["a", "a"], "a"),
        ([["a", "b", "c"], ["d"]], ["a", "b", "c", "d"]),
        ([("a", "b", "c"), ("d",)], ("a", "b", "c", "d")),
        ([[torch.ones(2), torch.ones(5), torch.ones(1)], [torch.ones(4)]], [torch.ones(n) for n in (2, 5, 1, 4)]),
        ([[torch.ones(3, 5)], [torch.ones(1, 5)]], [torch.ones(4, 5)]),
        ([(torch.tensor(1.0), torch.ones(3)), (torch.tensor(5.0), torch.ones(1))], (torch.tensor(2.0), torch.ones(4))),
        ([Pair(torch.ones(3), None), Pair(torch.ones(1), None)], Pair(torch.ones(4), None)),
        ([{"a": {"b": torch.ones(3)}}, {"a": {"b": torch.ones(1)}}], {"a": {"b": torch.ones(4)}}),
        ([[torch.ones(3)] * 3, [torch.ones(1)]], [torch.ones(n) for n in (3, 3, 3, 1)]),
        ([torch.tensor(2, dtype=torch.int32)] * 2, torch.tensor(4, dtype=torch.int32)),
        ([torch.tensor(1.0j), torch.tensor(5.0j)], torch.tensor(2.0j)),
        ([np.ones((3, 2)), np.ones((1, 2))], np.ones((4, 2))),
    ],
)
def test_values_are_merged_as_one_device_makes_them(values: list[Any], merged: Any) -> None:
    found = merge(values, [3, 1], CPU)
    assert type(found) is type(merged)
    if isinstance(merged, np.ndarray):
        np.testing.assert_array_equal(found, merged)
    elif isinstance(merged, str | list | tuple) and isinstance(merged[0], str):
        assert found == merged
    else:
        close(found, merged)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([torch.ones(3, 2), torch.ones(1, 3)], r"first dimension, found \(3, 2\) of torch.float32, \(1, 3\)"),
        (
            [{"a": "b"}, {"a": "c"}],
            r"cannot merge the output\['a'\] of the replicas: expected the same value, found b, c",
        ),
        (
            [{"idx": 1}, {"idx": 2}],
            r"cannot merge the output\['idx'\] of the replicas: expected the same value, found 1",
        ),
        ([{"a": 1}, {"b": 1}], "expected the same keys, found"),
        ([torch.ones(3), "a"], "expected a tensor of each, found Tensor, str"),
        ([torch.ones(3), torch.ones(1).long()], r"found \(3,\) of torch.float32, \(1,\) of torch.int64"),
        ([1, "a"], "expected values of one type, found int, str"),
        ([(1, 2), (1,)], "expected as many items in each, found 2, 1"),
        ([torch.tensor(True), torch.tensor(False)], "expected the same value, found True, False"),
    ],
)
def test_values_that_cannot_be_merged_are_an_error(values: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(values, [3, 1], CPU)


def test_items_of_each_sample_are_told_from_batches() -> None:
    ones, zeros = torch.ones(2), torch.zeros(2)
    close(merge([[ones, ones], [zeros, zeros]], [2, 2], CPU), [torch.cat([ones, zeros])] * 2)
    close(merge([(torch.tensor(1.0),), (torch.tensor(3.0),)], [1, 1], CPU), (torch.tensor(2.0),))


def test_dataclasses_are_merged_by_their_fields() -> None:
    @dataclass
    class Lazy(Sample):
        later: Tensor = field(init=False)

    merged = merge([Lazy(torch.ones(3), list("abc")), Lazy(torch.zeros(1), ["d"])], [3, 1], CPU)
    assert type(merged) is Lazy
    close(merged.x, torch.tensor([1.0, 1, 1, 0]))
    assert merged.name == list("abcd")
    first, second = divide(Lazy(torch.ones(3), list("abc")), HOME).shards
    assert (first.name, second.name) == (["a", "b"], ["c"])


def test_values_that_a_step_has_moved_to_the_cpu_stay_there() -> None:
    meta = torch.device("meta")
    assert merge([torch.ones(3), torch.ones(1)], [3, 1], meta).device == CPU
    items = merge([[torch.ones(n, device=meta) for n in (2, 5, 1)], [torch.ones(4)]], [3, 1], meta)
    assert [item.device for item in items] == [meta] * 4


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([torch.tensor(1.0), torch.tensor([1.0])], r"shape \(1,\) in replica 1"),
        ([torch.ones(2), torch.ones(2)], r"shape \(2,\) in replica 0"),
        ([torch.tensor(1.0), None], "None in replica 1"),
    ],
)
def test_losses_that_have_no_mean_are_an_error(losses: list[Any], found: str) -> None:
    with pytest.raises(ValueError, match=f"one element for manual_backward, .* found {found}"):
        merge_loss(losses, [3, 1], CPU, "manual_backward")


# -- logging -----------------------------------------------------------------------------------------


class Logging(pl.LightningModule):
    """Logs what a test asks for: ``what(module, batch, in_second)``, where batches are of 4, 4 and 3 samples."""

    def __init__(self, what: Callable[[Any, Tensor, bool], None], **metrics: nn.Module) -> None:
        super().__init__()
        self.what = what
        for name, metric in metrics.items():
            setattr(self, name, metric)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.what(self, batch[0], len(batch[0]) < 4 and bool((batch[0][0] == SECOND).all(1).any()))


LOADER = samples((8,), count=11, batch_size=4)
SECOND = torch.stack([batch[2] for (batch,) in LOADER])  # the first sample of each second share


def logged(
    what: Callable[[Any, Tensor, bool], None], devices: int = 2, share: bool = True, **metrics: Callable[[], nn.Module]
) -> tuple[dict[str, Any], Logging]:
    memory = Memory()
    trainer = one_process(devices, share, logger=memory)
    module = Logging(what, **{name: metric() for name, metric in metrics.items()})
    (result,) = trainer.validate(module, LOADER, verbose=False)
    return {"result": result, "steps": memory.logged}, module


def in_every_way(module: Any, x: Tensor, in_second: bool) -> None:
    for reduce_fx in ("mean", "avg", torch.mean):
        module.log(f"mean {reduce_fx}", x.mean(), on_step=True, on_epoch=True, reduce_fx=reduce_fx)
    module.log("rows", len(x), on_step=True, on_epoch=True, reduce_fx="sum")
    module.log("rows of torch", float(len(x)), on_step=True, reduce_fx=torch.sum)
    module.log("total", x.sum(), reduce_fx="SUM")
    module.log("largest", x.max(), reduce_fx="max")
    module.log("smallest", x.min().item(), reduce_fx=min)
    module.log("explicit", x[:, :3].mean(), batch_size=3 * len(x))
    module.log("constant", 0.1, True, False, True)
    module.log_dict({"a": x[:, 0].sum(), "b": x[:, 1].sum()}, reduce_fx="sum")
    changed = x.mean()
    module.log("as it was", changed)
    changed.zero_()
    module.log("twice", x[:, 0].mean())
    module.log("twice", x[:, 1].mean())


@replicas
@pytest.mark.filterwarnings("ignore:You called `self.log.'rows', ...")
def test_what_replicas_log_is_logged_once_as_on_one_device(share: bool) -> None:
    (found, _), (expected, _) = logged(in_every_way, share=share), logged(in_every_way, devices=1)
    assert found["result"]["largest"] == float(torch.cat([batch for (batch,) in LOADER]).max())
    close(found, expected)
    assert len(found["steps"]) == 4


def test_weights_of_zero_leave_values_out_unless_all_are_zero() -> None:
    values = [torch.tensor(1.0), torch.tensor(3.0), torch.tensor(float("nan"))]
    close(weighted_mean(values, [1, 3, 0], CPU), torch.tensor(2.5))
    close(weighted_mean(values[:2], [0, 0], CPU), torch.tensor(2.0))


def test_a_share_without_samples_leaves_the_mean_as_it_is() -> None:
    def what(module: Any, x: Tensor, in_second: bool) -> None:
        mask = torch.full((len(x),), not in_second)
        module.log("masked", x[:, 0][mask].mean(), batch_size=int(mask.sum()))

    found, _ = logged(what)
    close(found["result"]["masked"], float(torch.cat([batch[:2, 0] for (batch,) in LOADER]).mean()))


@pytest.mark.parametrize("batch_size", [9, 4])
def test_a_constant_batch_size_is_the_batchs(batch_size: int) -> None:
    def what(module: Any, x: Tensor, in_second: bool) -> None:
        module.log("constant", x.mean(), batch_size=batch_size)

    (found, _), (expected, _) = logged(what), logged(what, devices=1)
    close(found, expected)


def test_a_batch_size_that_a_replica_has_is_its_own() -> None:
    found, _ = logged(lambda module, x, _: module.log("own", x.mean(), batch_size=2))
    means = [float(share.mean()) for (batch,) in LOADER for share in batch.split(2)]
    close(found["result"]["own"], sum(means) / len(means))


def test_a_log_method_may_have_arguments_of_its_own() -> None:
    class Staged(Logging):
        def log(self, name: str, value: Any, stage: str = "fit", **options: Any) -> None:
            super().log(f"{stage} {name}", value, **options)

    class Passing(Logging):
        def log(self, *args: Any, **options: Any) -> None:
            super().log(*args, **options)

    def what(module: Any, x: Tensor, in_second: bool) -> None:
        module.log("mean", x.mean(), "evaluation")
        module.log("rows", float(len(x)), "evaluation", reduce_fx="sum")

    def by_position(module: Any, x: Tensor, in_second: bool) -> None:
        module.log("rows", float(len(x)), False, False, False, True, "sum")

    (found,) = one_process(2).validate(Staged(what), LOADER, verbose=False)
    close([found], one_process().validate(Staged(what), LOADER, verbose=False))
    assert found.keys() == {"evaluation mean", "evaluation rows"}
    trainer = one_process(2)
    trainer.validate(Passing(by_position), LOADER, verbose=False)
    assert trainer.callback_metrics == {"rows": 11.0}


@pytest.mark.parametrize("enable_graph", [True, False])
def test_values_have_a_graph_if_that_is_asked_for(enable_graph: bool) -> None:
    book = LogBook([1, 1], CPU, "training_step")
    for replica in range(2):
        book.log(replica, "loss", torch.ones((), requires_grad=True) * 2, enable_graph=enable_graph)
    logged: list[Any] = []
    book.replay(lambda name, value, **_: logged.append(value), lambda *_: None)
    assert [value.requires_grad for value in logged] == [enable_graph]


def test_numbers_stay_numbers_of_the_same_precision() -> None:
    book = LogBook([1, 1], CPU, "training_step")
    for replica in range(2):
        book.log(replica, "constant", 0.1)
    logged: list[Any] = []
    book.replay(lambda name, value, **_: logged.append(value), lambda *_: None)
    assert [(type(value), value) for value in logged] == [(float, 0.1)]


def test_a_name_that_some_replicas_log_is_weighted_by_their_samples() -> None:
    def what(module: Any, x: Tensor, in_second: bool) -> None:
        if in_second:
            module.log("second", x.mean())
        else:
            module.log("first", x.mean(), batch_size=len(x) * 7)

    found, _ = logged(what)
    shares = [batch.split([2, len(batch) - 2]) for (batch,) in LOADER]
    close(found["result"]["first"], float(torch.cat([first for first, _ in shares]).mean()))
    close(found["result"]["second"], float(torch.cat([second for _, second in shares]).mean()))


def test_different_arguments_under_one_name_are_an_error() -> None:
    def what(module: Any, x: Tensor, in_second: bool) -> None:
        module.log("loss", x.mean(), prog_bar=in_second)

    with pytest.raises(
        ValueError, match=r"to log 'loss' with the same arguments in validation_step, found .*replica 1"
    ):
        logged(what)


def test_lightnings_own_errors_are_raised() -> None:
    def what(module: Any, x: Tensor, in_second: bool) -> None:
        module.log("loss", x.mean(), on_step=False, on_epoch=False)

    with pytest.raises(MisconfigurationException, match="is not useful"):
        logged(what)
    with pytest.raises(ValueError, match="nested dictionaries cannot be logged"):
        logged(lambda module, x, _: module.log("loss", {"a": {"b": x.mean()}}, batch_size=len(x)))


# -- metrics -----------------------------------------------------------------------------------------


class LargestStep(Metric):
    """Keeps the largest difference between the means of two updates: no state of a batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("last", torch.tensor(0.0))
        self.add_state("largest", torch.tensor(0.0))

    def update(self, values: Tensor) -> None:
        mean = values.mean()
        self.largest = torch.maximum(self.largest, (mean - self.last).abs())
        self.last = mean

    def compute(self) -> Tensor:
        return self.largest


def binary(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, 0].sigmoid(), (x[:, 1] > 0).long()


def binary_collection() -> MetricCollection:
    return MetricCollection({"f1": BinaryF1Score(), "auroc": BinaryAUROC(), "again": BinaryF1Score()}, prefix="a ")


@replicas
@pytest.mark.filterwarnings("ignore:No (negative|positive) samples in targets")
@pytest.mark.parametrize(
    ("metric", "give"),
    [
        (BinaryF1Score, lambda metric, x: metric(*binary(x))),
        (BinaryAUROC, lambda metric, x: metric(*binary(x))),
        (lambda: PearsonCorrCoef(), lambda metric, x: metric(x[:, 0], x[:, 1])),
        (LargestStep, lambda metric, x: metric(x)),
        (lambda: MinMaxMetric(BinaryF1Score()), lambda metric, x: metric(*binary(x))),
        (MeanMetric, lambda metric, x: metric(x.mean())),
        (MeanMetric, lambda metric, x: metric(x[:, :2].mean(), weight=len(x))),
        (MeanMetric, lambda metric, x: metric(x)),
        (SumMetric, lambda metric, x: metric(x.sum())),
        (SumMetric, lambda metric, x: metric(float(len(x)))),
        (MaxMetric, lambda metric, x: metric(x.max())),
        (CharErrorRate, lambda metric, x: metric([f"{v:.3f}" for v in x[:, 0]], [f"{v:.2f}" for v in x[:, 0]])),
    ],
)
def test_metrics_are_those_of_one_device(
    share: bool, metric: Callable[[], Metric], give: Callable[[Metric, Tensor], Any]
) -> None:
    """The value of the batch and of the epoch, logged as a metric and as a value; with ``update`` too."""

    def what(module: Any, x: Tensor, in_second: bool) -> None:
        value = give(module.metric, x)
        module.log("value", value["raw"] if isinstance(value, dict) else value, on_step=True, on_epoch=False)
        minmax = isinstance(module.metric, MinMaxMetric)  # whose value is a dict, which Lightning logs not as a metric
        if not minmax:
            module.log("metric", module.metric, on_step=True, on_epoch=True)
        give(module.updated.update, x)
        module.log("updated", module.updated.compute()["raw"] if minmax else module.updated.compute())

    (found, module), (expected, reference) = (
        logged(what, devices, share, metric=metric, updated=metric) for devices in (2, 1)
    )
    close(found, expected)
    steps = [metrics for _, metrics in found["steps"] if "value" in metrics]
    assert len(steps) == 3
    assert module.metric.update_count == reference.metric.update_count
    assert module.updated.update_count == reference.updated.update_count


@replicas
@pytest.mark.filterwarnings("ignore:No (negative|positive) samples in targets")
def test_collections_of_metrics_are_those_of_one_device(share: bool) -> None:
    def what(module: Any, x: Tensor, in_second: bool) -> None:
        x, y = binary(x)
        module.log_dict(module.scores(x, y), on_step=True, on_epoch=False)
        module.updated["first"].update(x, y)
        module.log_dict(module.updated["first"], on_step=False, on_epoch=True)
        module.member["f1"](x, y)
        module.log("member", module.member["f1"])
        module.log("computed", module.updated["first"]["auroc"].compute(), on_step=True, on_epoch=False)

    def nested() -> nn.Module:
        return nn.ModuleDict({"first": binary_collection().clone(prefix="updated ")})

    metrics = {"scores": binary_collection, "updated": nested, "member": binary_collection}
    (found, _), (expected, _) = (logged(what, devices, share, **metrics) for devices in (2, 1))
    close(found, expected)
    assert expected["result"].keys() >= {"updated f1", "updated auroc", "updated again", "member"}
    assert "a f1" in found["steps"][0][1]
    assert "computed" in found["steps"][0][1]


class Total(Metric):
    """The sum of values, each multiplied by a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0))

    def update(self, values: Tensor, factor: Any = 1) -> None:
        self.total = self.total + (values * factor).sum()

    def compute(self) -> Tensor:
        return self.total


class Average(Metric):
    """The mean of losses, each with its number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0))
        self.add_state("count", torch.tensor(0.0))

    def update(self, loss: Tensor, count: int) -> None:
        self.total = self.total + loss * count
        self.count = self.count + count

    def compute(self) -> Tensor:
        return self.total / self.count


@replicas
@pytest.mark.parametrize(
    ("metric", "give"),
    [
        (Average, lambda metric, x: metric.update(x.mean(), len(x))),
        (Average, lambda metric, x: [metric.update(value, 1) for value in x[:, 0]]),
        (MeanMetric, lambda metric, x: [metric.update(value) for value in x[:, 0]]),
        (SumMetric, lambda metric, x: [metric.update(value) for value in x[:, 0]]),
        (lambda: RunningSum(2), lambda metric, x: metric.update(x.sum())),
        (lambda: RunningMean(2), lambda metric, x: metric.update(x.mean())),
        (lambda: MetricCollection([SumMetric(), MaxMetric()]), lambda metric, x: metric.update(x[:, 0].sum())),
        (lambda: MetricCollection([SumMetric(), Total()]), lambda metric, x: metric.update(x[:, 0].sum())),
        (Total, lambda metric, x: metric.update(x, 2)),
        (Total, lambda metric, x: metric.update(x, torch.tensor(2))),
        (LargestStep, lambda metric, x: [metric.update(row) for row in x]),
        (CatMetric, lambda metric, x: [metric.update(row) for row in x]),
        (MeanMetric, lambda metric, x: (metric.reset(), metric.update(x))),
    ],
)
def test_metrics_that_get_numbers_are_those_of_one_device(
    share: bool, metric: Callable[[], Metric], give: Callable[[Metric, Tensor], Any]
) -> None:
    class Kept(Logging):
        def on_validation_epoch_end(self) -> None:
            self.value: Any = self.metric.compute()

    def ended(devices: int) -> Any:
        module = Kept(lambda module, x, _: give(module.metric, x), metric=metric())
        one_process(devices, share).validate(module, LOADER, verbose=False)
        value = module.value  # the largest of sums is the one thing that shares cannot tell
        return value["SumMetric"] if isinstance(value, dict) else value

    close(ended(2), ended(1))


@replicas
def test_metrics_in_lists_are_those_of_one_device(share: bool) -> None:
    class Listed(Logging):
        def __init__(self) -> None:
            super().__init__(what)
            self.mean, self.largest = MeanMetric(), MaxMetric()
            self.all = [self.mean, self.largest]

    def what(module: Any, x: Tensor, in_second: bool) -> None:
        for name, metric in zip(("mean", "largest"), module.all, strict=True):
            metric(x)
            module.log(name, metric)

    found, expected = Listed(), Listed()
    (result,) = one_process(2, share).validate(found, LOADER, verbose=False)
    close([result], one_process().validate(expected, LOADER, verbose=False))
    assert found.all[0] is found.mean
    assert found.mean.update_count == expected.mean.update_count


def test_what_a_helper_reaches_by_a_reference_of_its_own_counts_for_the_replica_that_called_it() -> None:
    class Helper:
        def __init__(self, module: Any) -> None:
            self.module = module

    class Helped(Logging):
        def __init__(self) -> None:
            super().__init__(what)
            self.metric, self.updated = MeanMetric(), MeanMetric()
            self.scores = MetricCollection({"largest": MaxMetric(), "sum": SumMetric()})
            self.helper = Helper(self)
            self.collections: list[Any] = []

        def log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
            if isinstance(dictionary, MetricCollection):
                self.collections.append(dictionary)
            super().log_dict(dictionary, *args, **options)

    def what(module: Any, x: Tensor, in_second: bool) -> None:
        original = module.helper.module
        original.metric(x)
        original.updated.update(x)
        original.log_dict({"metric": original.metric, "updated": original.updated, "mean": x.mean()})
        original.scores.update(x)
        original.log_dict(original.scores)

    helped = Helped()
    (found,) = one_process(2).validate(helped, LOADER, verbose=False)
    close([found], one_process().validate(Helped(), LOADER, verbose=False))
    assert [collection is helped.scores for collection in helped.collections] == [True] * len(LOADER), "once a batch"


def test_some_replicas_may_update_a_metric_but_all_have_to_ask_for_its_value() -> None:
    def update(module: Any, x: Tensor, in_second: bool) -> None:
        if in_second:
            module.metric.update(x)
        module.log("metric", module.metric)

    found, _ = logged(update, metric=MeanMetric)
    close(found["result"]["metric"], float(torch.cat([batch[2:] for (batch,) in LOADER]).mean()))

    def forward(module: Any, x: Tensor, in_second: bool) -> None:
        if in_second:
            module.metric(x)

    with pytest.raises(RuntimeError, match=r"replica 1 \(cpu\) called the metric 'metric', replica 0 \(cpu\) ended"):
        logged(forward, metric=MeanMetric)

    def compute(module: Any, x: Tensor, in_second: bool) -> None:
        if in_second:
            module.metric.compute()
        else:
            module.metric(x)

    with pytest.raises(
        RuntimeError, match=r"0 \(cpu\) called the metric 'metric', .* the metric 'metric'\.compute\(\)"
    ):
        logged(compute, metric=MeanMetric)


def test_replicas_that_update_a_metric_count_by_their_samples() -> None:
    def update(module: Any, x: Tensor, in_second: bool) -> None:
        if not torch.equal(x[0], batch[0]):
            module.metric.update(x.mean())
        module.log("metric", module.metric)

    loader = samples((8,), count=5, batch_size=5)
    ((batch,),) = loader
    (result,) = one_process(3).validate(Logging(update, metric=MeanMetric()), loader, verbose=False)
    close(result["metric"], float(batch[2:].mean()))


def test_replicas_that_give_a_metric_other_arguments_are_an_error() -> None:
    def forward(module: Any, x: Tensor, in_second: bool) -> None:
        module.metric(x, **({"weight": x.abs()} if in_second else {}))

    with pytest.raises(ValueError, match="given to the metric 'metric' in the replicas: expected the same arguments"):
        logged(forward, metric=MeanMetric)


def test_one_number_of_each_replicas_one_sample_is_one_update() -> None:
    def ended(devices: int) -> Any:
        module = Logging(lambda module, x, _: module.metric.update(x.mean()), metric=MeanMetric())
        one_process(devices).validate(module, samples((8,), count=8, batch_size=2), verbose=False)
        return module.metric

    found, expected = ended(2), ended(1)
    assert found.update_count == expected.update_count == 4


def test_a_metric_can_be_the_loss() -> None:
    class Correlated(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.net = nn.Linear(8, 1)
            self.metric = PearsonCorrCoef()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return 1 - self.metric(self.net(batch[0])[:, 0], batch[0][:, 0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found, expected = Correlated(), Correlated()
    for devices, model in ((2, found), (1, expected)):
        fit(model, devices, loader=samples((8,)))
    close(found.net.weight, expected.net.weight)
    assert not torch.equal(found.net.weight, Correlated().net.weight)


# -- what steps append -------------------------------------------------------------------------------


@replicas
def test_lists_that_a_step_appends_to_are_those_of_one_device(share: bool) -> None:
    class Keeping(Logging):
        def __init__(self) -> None:
            super().__init__(keep)
            self.outputs: list[Any] = []
            self.same = self.outputs
            self.by_name: dict[str, list[Any]] = {"x": [], "name": []}
            self.seen_by_hooks: dict[str, list[Any]] = {"x": []}
            self.by_key: defaultdict[str, list[Any]] = defaultdict(list)
            self.some: list[Any] = []

    def keep(module: Any, x: Tensor, in_second: bool) -> None:
        module.outputs.append({"x": x, "mean": x.mean(), "rows": torch.tensor(len(x))})
        module.same.append(x[:, 0])
        module.by_name["x"].append(x)
        module.by_name["name"].extend([f"{value:.3f}" for value in x[:, 0]])
        module.by_key["new"].append(x)
        module.seen_by_hooks["x"].append(x)
        assert module.outputs[-2]["x"] is x

        if in_second:
            module.some.append(x)

    found, expected = Keeping(), Keeping()
    one_process(2, share).validate(found, LOADER, verbose=False)
    one_process().validate(expected, LOADER, verbose=False)
    close(found.outputs, expected.outputs)
    assert found.same is found.outputs
    close(found.by_key["new"], expected.by_key["new"])
    close(found.by_name["x"], expected.by_name["x"])
    close(found.seen_by_hooks, expected.seen_by_hooks)
    assert [len(batch) for batch in found.by_name["x"]] == [4, 4, 3]
    assert sorted(found.by_name["name"]) == sorted(expected.by_name["name"])
    close(found.some, [batch[2:] for (batch,) in LOADER])


class Lists(nn.Module):
    """What holds lists; each replica has the same ones until its lists are copied."""

    def __init__(self, **lists: Any) -> None:
        super().__init__()
        vars(self).update(lists)


def lists_after(
    step: Callable[[Any, int], None], sizes: tuple[int, ...] = (2, 1), home: torch.device = CPU, **lists: Any
) -> Any:
    """The module after ``step(replica, size)`` in each replica."""
    modules = [Lists(**lists) for _ in sizes]
    appended = AppendedLists(modules[0], modules)
    for replica, size in zip(modules, sizes, strict=True):
        step(replica, size)
    appended.merge(sizes, home)
    return modules[0]


@replicas
@pytest.mark.parametrize(
    "items",
    [
        lambda x: (x[:, 0] * 10).long().tolist(),
        lambda x: x[:, 0].tolist(),
        lambda x: (x[:, 0] * 10).long().numpy(),
        lambda x: x[:, 0].numpy(),
        lambda x: (x[:, 0] * 10).long(),
        lambda x: x[:, :3],
        lambda x: [{"row": row} for row in x],
    ],
    ids=["ints", "floats", "NumPy ints", "NumPy floats", "tensors", "rows", "dicts"],
)
@pytest.mark.parametrize("count", [12, 11, 10], ids=["even", "uneven", "one each"])
def test_lists_that_get_an_item_of_each_sample_have_all_items(
    share: bool, items: Callable[[Tensor], Any], count: int
) -> None:
    class Keeping(Logging):
        def __init__(self) -> None:
            super().__init__(lambda module, x, in_second: module.kept.extend(items(x)))
            self.kept: list[Any] = []

    loader = samples((8,), count=count, batch_size=4)
    found, expected = Keeping(), Keeping()
    one_process(2, share).validate(found, loader, verbose=False)
    one_process().validate(expected, loader, verbose=False)
    assert len(expected.kept) == count
    assert [type(item) for item in found.kept] == [type(item) for item in expected.kept]
    close(found.kept, expected.kept)


def test_hyper_parameters_with_lists_are_there_in_every_replica() -> None:
    class Configured(Logging):
        def __init__(self, widths: list[int], weight: float) -> None:
            super().__init__(lambda module, x, _: module.log("weighted", x.mean() * module.hparams.weight))
            self.save_hyperparameters()

    (found,) = one_process(2).validate(Configured([1, 2], 0.5), LOADER, verbose=False)
    close([found], one_process().validate(Configured([1, 2], 0.5), LOADER, verbose=False))


@replicas
def test_lists_for_each_dataloader_are_those_of_one_device(share: bool) -> None:
    class PerLoader(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[Any] = [[], []]
            self.pairs: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.outputs[dataloader_idx].append(batch[0])
            self.pairs.extend([value] * 2 for value in batch[0][:, 0].tolist())

    found, expected = PerLoader(), PerLoader()
    for devices, module in ((2, found), (1, expected)):
        one_process(devices, share).validate(module, [LOADER, samples((8,), count=6)], verbose=False)
    close(found.outputs, expected.outputs)
    close(found.pairs, expected.pairs)
    assert [[len(batch) for batch in outputs] for outputs in found.outputs] == [[4, 4, 3], [6]]


def test_lists_that_lose_items_in_the_step_have_what_all_replicas_appended() -> None:
    x, old = torch.arange(6.0).view(3, 2), [torch.ones(2, 2), torch.zeros(2, 2)]

    def step(replica: Any, size: int) -> None:
        mine = x[:2] if size == 2 else x[2:]
        replica.cleared.clear()
        replica.cleared.append(mine)
        replica.ring.pop(0)
        replica.ring.append(mine)
        replica.corrected.pop()
        replica.corrected.append(mine)
        replica.emptied.clear()

    module = lists_after(step, cleared=list(old), ring=list(old), corrected=list(old), emptied=list(old))
    assert module.emptied == []
    close(module.cleared, [x])
    close(module.ring, [old[1], x])
    close(module.corrected, [old[0], x])


def test_a_list_that_the_first_replica_sets_stays() -> None:
    def step(replica: Any, size: int) -> None:
        if size == 2:
            replica.kept = ["set"]
        else:
            replica.kept.append("appended")

    assert lists_after(step, kept=[]).kept == ["set"]


def test_items_that_a_step_has_moved_to_the_cpu_stay_there() -> None:
    def step(replica: Any, size: int) -> None:
        replica.rows.extend(torch.ones(size, 5))
        replica.apart.extend(torch.ones(size, 5, device="meta" if size == 2 else "cpu"))

    module = lists_after(step, home=torch.device("meta"), rows=[], apart=[])
    assert [row.device.type for row in module.rows] == ["cpu"] * 3
    assert [row.device.type for row in module.apart] == ["meta"] * 3


def test_what_cannot_be_merged_in_a_list_comes_one_replica_after_the_other() -> None:
    names = [["a", "b"], ["c", "d"]]
    module = lists_after(lambda replica, _: replica.kept.extend(names.pop(0)), sizes=(3, 3), kept=[])
    assert module.kept == ["a", "b", "c", "d"]


@replicas
def test_all_gather_gives_every_replica_the_whole_batch(share: bool) -> None:
    class Contrastive(pl.LightningModule):
        """Each sample against all others of the batch."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.net = nn.Linear(8, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            mine = nn.functional.normalize(self.net(batch[0]))
            everyone = self.all_gather(mine, sync_grads=True)
            index = self.all_gather(batch[1])
            counts.append(self.all_gather(len(batch[0])))
            target = (batch[1][:, None, 0] == index[None, :, 0]).float().argmax(1)
            return nn.functional.cross_entropy(mine @ everyone.T, target)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    counts: list[Any] = []
    found, expected = Contrastive(), Contrastive()
    for devices, model in ((2, found), (1, expected)):
        fit(model, devices, share, loader=samples((8,), (1,)))
    close(found.net.weight, expected.net.weight)
    assert all(isinstance(count, Tensor) for count in counts)
    assert [int(count) for count in counts] == ([6] * 6 + [5] * 2) * 2 + ([6] * 3 + [5]) * 2
