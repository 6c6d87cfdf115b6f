"""What ``strategy="bucketdp"`` makes of outputs, logged values, metrics and batches, and what it refuses by name."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import BinaryAccuracy, MulticlassAUROC

from lightning_bucketddp import BucketDPStrategy
from lightning_bucketddp.trainer.dp.batch_division import divide
from lightning_bucketddp.trainer.dp.merging import merge
from tests.dp import Digits, Plain, close, digits, fit, one_process, replicas, samples
from tests.lightning_models import Memory, PoolEnvironment

CPU = torch.device("cpu")


class Uses(Plain):
    def __init__(self, use: Callable[[Any, Tensor], Any], metric: Metric | MetricCollection | None = None) -> None:
        super().__init__()
        self.metric = metric
        self.use = [use]  # in a list, as it is no method

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.use[0](self, batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.use[0](self, batch[0])


def validate(module: Any, devices: int = 2, count: int = 5, **options: Any) -> Any:
    return one_process(devices, **options).validate(module, samples((8,), count=count), verbose=False)


@dataclass
class Output:
    rows: Tensor
    loss: Any
    nothing: None = None


def test_outputs_are_merged_item_by_item() -> None:
    x = torch.arange(10.0, requires_grad=True).reshape(5, 2)
    outputs = [
        {"o": Output(part, part.mean()), "l": [part[:, 0].long(), (part.mean().item(),)], "none": None}
        for part in (x[:3], x[3:])
    ]
    found = merge(outputs, [3, 2], CPU, "predict_step")
    assert found["none"] is found["o"].nothing is None
    close([found["o"].rows, found["o"].loss], [x, x.mean()])
    close(torch.autograd.grad(found["o"].loss, [x])[0], torch.full((5, 2), 0.1))
    close(found["l"][0], x[:, 0].long())
    assert found["l"][1] == (pytest.approx(x.mean().item()),)
    there = [torch.ones(rows, device="meta") for rows in (2, 1)]
    assert merge(there, [2, 1], CPU, "predict_step").device.type == "meta", "where the step has put it"


REFUSED: list[tuple[Callable[[int], Any], str]] = [
    (lambda rows: {"n": 1}, r"what predict_step returned\['n'\] .* found a int in replica 0"),
    (lambda rows: ["a"], r"returned\[0\] .* found a str in replica 0"),
    (lambda rows: torch.tensor(3), r"shape \(\) and torch.int64 in replica 0"),
    (lambda rows: torch.ones(4), r"one row per sample \(3, 2\).* \(4,\) and torch.float32 in rep"),
    (lambda rows: [torch.ones(rows)] * rows, "expected the same length .* 3 in replica 0 and 2 in rep"),
    (lambda rows: {str(rows): None}, "expected the same set of keys"),
    (lambda rows: None if rows == 2 else torch.ones(3), "None in replica 1"),
    (lambda rows: torch.ones(rows, rows), r"cannot join output: expected the same shape"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_outputs_that_cannot_be_merged_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_process(2).predict(Uses(lambda _, x: make(len(x))), samples((8,), count=5))


LOGGED: list[Callable[[Any, Tensor], Any]] = [
    lambda module, x: module.log("v", x.mean().item(), on_step=True),
    lambda module, x: module.log("v", x.mean().reshape(1)),
    lambda module, x: module.log("v", x[x > 0].mean(), batch_size=int((x > 0).sum())),
    lambda module, x: module.log("v", float(len(x)), reduce_fx="sum"),
    lambda module, x: module.log("v", x.min(), reduce_fx=torch.min),
    lambda module, x: module.log("v", x.max(), False, True, reduce_fx="MAX"),
    lambda module, x: [module.log("v", value) for value in (x.mean(), x.mean() * 2)],
    lambda module, x: module.log_dict({"v": x.mean(), "w": x.square().mean()}),
    lambda module, x: module.log_dict({"int": len(x), "tensor": (x > 0).sum()}, reduce_fx="sum"),
]


@pytest.mark.filterwarnings("ignore:You called `self.log.* the value")
@pytest.mark.parametrize("write", LOGGED)
def test_logged_values_are_those_of_one_device(write: Any) -> None:
    found = []
    for devices in (1, 2):
        logger = Memory()
        found.append((validate(Uses(write), devices, 17, logger=logger), logger.logged))
    close(found[1], found[0])
    assert found[0][0][0]


class Measures(Digits):
    def __init__(self) -> None:
        super().__init__()
        self.curve, self.loss, self.sometimes = MulticlassAUROC(4), MeanMetric(), BinaryAccuracy()
        self.all = [self.curve]
        self.so_far: list[Tensor] = []

    def on_test_start(self) -> None:
        scores: Any = self.scores["valid"]
        for _ in range(2):  # from then on a collection shares states between its metrics
            scores.update(torch.eye(4)[[0, 1, 1]], torch.tensor([0, 1, 2]))
        assert scores.compute_groups == {0: ["MulticlassAccuracy", "MulticlassF1Score"]}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        predictions = self(batch[0])
        self.log_dict(self.scores["valid"](predictions, batch[1]), batch_size=len(batch[0]), on_step=True)
        self.all[0].update(predictions, batch[1])
        self.log("curve", self.curve)
        losses = nn.functional.cross_entropy(predictions, batch[1], reduction="none")
        self.log("loss", self.loss(losses) and self.loss, on_step=True, on_epoch=True)
        if batch[0][0, 0] > 0:
            self.sometimes(batch[0][:, 0], batch[1] > 1)

    def on_test_batch_end(self, *args: Any) -> None:
        self.so_far.append(self.loss.compute())

    def on_test_epoch_end(self) -> None:
        scores: Any = self.scores["valid"]
        self.so_far += scores.compute().values()
        scores.update(torch.eye(4), torch.arange(4))
        self.so_far += scores.compute().values()


@replicas
def test_metrics_have_the_states_and_values_of_one_device(share: bool) -> None:
    values: list[dict[str, Any]] = []
    logged = []
    for devices in (1, 2):
        model, logger = Measures(), Memory()
        trainer = one_process(devices, share, logger=logger)
        trainer.test(model, digits(batch_size=4), verbose=False)
        logged.append([*(values["loss_step"] for _, values in logger.logged if "loss_step" in values), *model.so_far])
        values.append({key: value for key, value in trainer.callback_metrics.items() if "Multiclass" not in key})
        assert model.sometimes.update_count > 0
    close(values[1], values[0])
    close(logged[1], logged[0])
    assert len(logged[0]) == 16
    assert {"curve", "loss_epoch"} <= values[0].keys()


class Overall(SumMetric):
    """Has not said whether its state can be merged."""

    full_state_update = None


def update(module: Any, x: Tensor, and_then: str = "") -> None:
    module.metric.update(x[:, 0])
    if and_then:
        getattr(module.metric, and_then)()


@pytest.mark.parametrize(
    ("use", "metric", "message"),
    [
        (lambda module, x: module.log("n", len(x)), None, r'log\(\'n\'\) in validation_step, .*found 3, 2; .*"sum"'),
        (lambda module, x: module.log("n", x), None, r"self\.log\('n'\) .* found tensor"),
        (lambda module, x: len(x) == 3 or module.log("n", 1.0), None, r"same names .* found \[None, 'n'\]; log in ev"),
        (update, MaxMetric(), r"found 'metric', a MaxMetric: .*full_state_update"),
        (update, Overall(), r"found 'metric', a Overall: .*; set full_state_update=False in a class of your own"),
        (update, MetricCollection([MaxMetric()]), r"found 'metric\.MaxMetric', a MaxMetric"),
        (update, MinMaxMetric(MeanMetric()), "found 'metric', a MinMaxMetric: it is made of other metrics"),
        (lambda *args: update(*args, "compute"), MeanMetric(), r"expected validation_step to update, call or log the"),
        (lambda *args: update(*args, "reset"), MeanMetric(), r"expected validation_step to update, call or log the"),
    ],
)
def test_values_and_metrics_that_cannot_be_merged_are_named(use: Any, metric: Any, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        validate(Uses(use, metric))


def test_a_batch_is_split_by_samples_and_constants_go_everywhere() -> None:
    x = torch.arange(5)
    batch = {"x": x, "names": list("abcde"), "both": (x * 2, 7), "scale": torch.tensor(2.0), "size": torch.Size([3])}
    shards = divide(batch, [CPU, CPU])
    assert [size for _, size in shards] == [3, 2]
    for (shard, _), rows in zip(shards, (slice(0, 3), slice(3, 5)), strict=True):
        close([shard["x"], shard["both"][0]], [x[rows], x[rows] * 2])
        rest = (shard["names"], shard["both"][1], shard["scale"].item(), shard["size"])
        assert rest == (list("abcde")[rows], 7, 2.0, torch.Size([3]))
    assert divide(["a"], [CPU, CPU]) == [(["a"], 1)]
    assert [size for _, size in divide(x[:1], [CPU, CPU])] == [1]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (torch.ones(4), r"for each of the 5 samples, found 4 in batch\['extra'\]"),
        ([1, 2], r"for each of the 5 samples, found 2 in batch\['extra'\]"),
        ({"y": object()}, r"found a object in batch\['extra'\]\['y'\]; pass BucketDPStrategy\(scatter_batch"),
        (pack_sequence([torch.ones(5)]), "found a PackedSequence"),
    ],
)
def test_batches_that_cannot_be_split_are_an_error_that_says_where(extra: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        divide({"x": torch.ones(5), "extra": extra}, [CPU, CPU])


def test_a_function_splits_batches_of_another_kind() -> None:
    class Graphs(Plain):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch.rows)

        def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
            return batch

    def scatter_batch(batch: Any, count: int) -> list[tuple[Any, int]]:
        return [(SimpleNamespace(rows=part), len(part)) for part in batch.rows.chunk(count)]

    loader = DataLoader(list(torch.ones(11, 8)), 4, collate_fn=lambda rows: SimpleNamespace(rows=torch.stack(rows)))
    found = one_process(2, strategy=BucketDPStrategy(scatter_batch=scatter_batch)).predict(Graphs(), loader)
    close(found, one_process().predict(Graphs(), loader))
    with pytest.raises(ValueError, match=r"1 to 2 pairs of a shard and its number of samples, .* found 1 with \[0\]"):
        divide(None, [CPU, CPU], lambda *_: [(None, 0)])


class Changes(Plain):
    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.change = [change]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.change[0](self)
        return super().training_step(batch, batch_idx)


def by_data(module: Any) -> None:
    for param in module.net.parameters():
        param.data.mul_(0.9)


def late(module: Any) -> None:
    if module.global_step > 5:
        with torch.no_grad():
            module.net.weight.mul_(0.9)


def rates(module: Any) -> None:
    for group in module.optimizers().param_groups:
        group["lr"] *= 0.9


@pytest.mark.parametrize(
    ("change", "named", "share"),
    [(by_data, "'net.weight', 'net.bias'", False), (late, "'net.weight'", True), (rates, "learning rates", False)],
)
def test_steps_that_change_parameters_are_an_error(change: Any, named: str, share: bool) -> None:
    message = f"expected training_step to leave .* found that it changes {named}; change them in on_train_batch_end"
    with pytest.raises(RuntimeError, match=message):
        fit(Changes(change), 2, share, samples((8,)))


class OfTwo(PoolEnvironment):
    def world_size(self) -> int:
        return 2


class Manual(Uses):
    automatic_optimization = False


class Started(Plain):
    def on_fit_start(self) -> None:
        pytest.fail("training has started")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: Manual(update), {}, r'found automatic_optimization=False in Manual; .*strategy="bucketddp_notebook"'),
        (Started, {"num_nodes": 2}, r"expected one node and one process with strategy=\"bucketdp\".*found num_nodes=2"),
        (Started, {"plugins": [OfTwo()]}, "expected one node and one process .* and 2 processes in OfTwo"),
        (Started, {"sync_batchnorm": True}, r"expected Trainer\(sync_batchnorm=False\)"),
        (lambda: Started(nn.Sequential(nn.SyncBatchNorm(8))), {}, r"found SyncBatchNorm 'net\.0'"),
        (lambda: Started(torch.compile(nn.Linear(8, 1), backend="eager")), {}, "found that submodule 'net' is"),
        (lambda: Started(nn.LazyLinear(1)), {}, "found 'net.weight' that waits for its first batch"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_the_first_batch(model: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fit(model(), 2, loader=samples((8,)), **options)
