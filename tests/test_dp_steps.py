"""``strategy="bucketdp"``: what steps do beyond losses and outputs, as on one device or found and said."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.aggregation import RunningMean, RunningSum
from torchmetrics.wrappers import Running

from lightning_bucketddp.trainer.dp.batch_division import divide
from lightning_bucketddp.trainer.dp.merging import merge
from lightning_bucketddp.trainer.dp.metrics import _class_in_replica
from tests.dp import digits, fit, one_process, replicas, samples
from tests.lightning_models import Digits, close_to, strategy_of, trainer

CPU = torch.device("cpu")
close = torch.testing.assert_close


class Manual(pl.LightningModule):
    """What a test's step does, which gets the module, its optimizer and the samples."""

    step: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.kept: list[Any] = []
        self.profiler = PassThroughProfiler()

    def loss(self, batch: Tensor) -> Tensor:
        return (self.head(self.body(batch)) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return type(self).step(self, self.optimizers(), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(step: Callable[..., Any], devices: int = 2, share: bool = True, **options: Any) -> Any:
    model = type("Tested", (Manual,), {"step": step})()
    fit(model, devices, share, samples((8,)), **options)
    return model


SECOND = torch.cat([batch[3:] for (batch,) in samples((8,))])
"""The samples of the second of two replicas."""


def in_second(batch: Tensor) -> bool:
    return any(torch.equal(batch[0], row) for row in SECOND)


# -- exceptions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [False, True], ids=["first replica", "second replica"])
@pytest.mark.parametrize("call", ["untoggle", "zero_grad"])
@pytest.mark.parametrize("handles_another", [False, True])
def test_an_exception_is_raised_as_it_was_though_a_finally_makes_a_call_for_all(
    failing: bool, call: str, handles_another: bool
) -> None:
    models = []

    def fails_in_one(batch: Tensor) -> None:
        if in_second(batch) is failing:
            raise LookupError("of this replica")

    def step(module: Any, optimizer: Any, batch: Tensor) -> None:
        if not in_second(batch):
            models.append(module)
        module.toggle_optimizer(optimizer)
        try:
            fails_in_one(batch)
            module.manual_backward(module.loss(batch))
        finally:
            if call == "untoggle":
                module.untoggle_optimizer(optimizer)
            else:
                optimizer.zero_grad()

    def run_handling() -> None:
        if not handles_another:
            run(step)
            return
        try:
            raise KeyError("of the caller")
        except KeyError:
            run(step)

    with pytest.raises(LookupError, match="of this replica") as caught:
        run_handling()
    assert [entry.name for entry in caught.traceback][-2:] == ["step", "fails_in_one"]
    if not handles_another:
        assert caught.value.__context__ is None
    assert all(param.requires_grad for param in models[0].parameters())


def test_a_finally_of_all_replicas_is_run_after_what_one_call_for_all_raised() -> None:
    untoggled = []

    def step(module: Any, optimizer: Any, batch: Tensor) -> None:
        module.toggle_optimizer(optimizer)
        try:
            module.manual_backward(module.loss(batch).detach())
        finally:
            module.untoggle_optimizer(optimizer)
            untoggled.append(in_second(batch))

    with pytest.raises(RuntimeError, match="does not require grad"):
        run(step)
    assert sorted(untoggled) == [False, True]


def test_calls_that_differ_while_the_caller_handles_an_exception_are_named() -> None:
    def step(module: Any, optimizer: Any, batch: Tensor) -> None:
        if in_second(batch):
            optimizer.zero_grad()
        module.manual_backward(module.loss(batch))

    try:
        raise KeyError("of the caller")
    except KeyError:
        with pytest.raises(RuntimeError, match="expected the replicas to make the same calls"):
            run(step)


# -- hooks and profilers -----------------------------------------------------------------------------


@replicas
def test_hooks_that_a_step_registers_see_its_own_samples(share: bool) -> None:
    def step(module: Any, optimizer: Any, batch: Tensor) -> None:
        seen: list[Tensor] = []
        called: list[str] = []
        handles = [
            module.body.register_forward_hook(lambda _, __, output: seen.append(output)),
            module.head.register_forward_pre_hook(lambda *_: called.append("pre"), with_kwargs=True),
            module.head.register_full_backward_hook(lambda *_: called.append("backward")),
            module.register_forward_hook(lambda *_: called.append("own"), always_call=True),
        ]
        optimizer.zero_grad()  # where the replicas meet
        loss = module.loss(batch)
        module.manual_backward(loss + seen[0].square().mean())
        optimizer.step()
        for handle in handles:
            handle.remove()
        assert len(seen) == 1
        assert called == ["pre", "backward"]
        module.loss(batch)
        assert len(seen) == 1
        assert called == ["pre", "backward"]

    found, expected = run(step, 2, share), run(step, 1)
    close_to(found, expected)


@replicas
def test_hooks_that_a_step_leaves_are_there_once(share: bool) -> None:
    called: list[int] = []

    def step(module: Any, optimizer: Any, batch: Tensor) -> None:
        if not module.kept:
            module.body.register_forward_hook(lambda *_: called.append(1))
        module.kept.append(len(batch))

    counted = []
    for devices in (1, 2):
        model = run(step, devices, share, max_epochs=1)
        called.clear()
        model.body(torch.zeros(1, 8))
        counted.append(len(called))
    assert counted == [1, 1]


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler])
@replicas
def test_what_a_step_profiles_is_recorded_once(kind: Any, share: bool, tmp_path: Any) -> None:
    def step(module: Any, optimizer: Any, batch: Tensor) -> None:
        with module.trainer.profiler.profile("forward and backward") as action:
            assert action == "forward and backward"
            optimizer.zero_grad()
            module.manual_backward(module.loss(batch))
        module.trainer.profiler.start("step")
        optimizer.step()
        module.trainer.profiler.stop("step")
        with module.profiler.profile("of its own"):
            module.zero_grad()

    def profiled(devices: int) -> Any:
        model = type("Tested", (Manual,), {"step": step})()
        profiler = model.profiler = kind(dirpath=tmp_path, filename=f"{devices}")
        trainer = fit(model, devices, share, samples((8,)), profiler=profiler, max_epochs=1)
        assert trainer.profiler is model.profiler is profiler
        return model, profiler

    (expected, reference), (found, profiler) = profiled(1), profiled(2)
    close_to(found, expected)
    if kind is SimpleProfiler:
        actions = ("forward and backward", "step", "of its own")
        counts = [[len(each.recorded_durations[action]) for action in actions] for each in (profiler, reference)]
        assert counts == [[4, 4, 4]] * 2


# -- gradients ---------------------------------------------------------------------------------------


def clips(module: Any) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.01)


def scales(module: Any) -> None:
    for param in module.parameters():
        param.grad.mul_(0.5)


def replaces(module: Any) -> None:
    for param in module.parameters():
        param.grad = torch.ones_like(param)


def sets_to_zero(module: Any) -> None:
    module.head.zero_grad(set_to_none=False)


def sets_to_none(module: Any) -> None:
    module.zero_grad()


@replicas
@pytest.mark.parametrize("change", [clips, scales, replaces])
@pytest.mark.parametrize("is_last", [False, True], ids=["in between", "at the end"])
def test_gradients_that_replicas_change_themselves_are_refused(
    share: bool, change: Callable[[Any], None], is_last: bool
) -> None:
    def step(module: Any, optimizer: Any, batch: Tensor) -> None:
        module.manual_backward(module.loss(batch))
        if in_second(batch) is share:  # copies have no gradients, so that only the first replica can change any
            change(module)
        if not is_last:
            optimizer.step()

    with pytest.raises(RuntimeError, match=r"that of body\.0\.weight, .* by self\.clip_gradients\(optimizer"):
        run(step, 2, share)


@replicas
@pytest.mark.parametrize("change", [sets_to_zero, sets_to_none])
def test_modules_can_be_asked_to_let_go_of_gradients(share: bool, change: Callable[[Any], None]) -> None:
    def step(module: Any, optimizer: Any, batch: Tensor) -> None:
        module.manual_backward(module.loss(batch))
        change(module)
        module.manual_backward(module.loss(batch))
        module.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        change(module)

    close_to(run(step, 2, share), run(step, 1))


# -- numbers of modules ------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.samples: Any = 0
        self.calls = 0
        self.total: Any = torch.tensor(0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


class Counted(pl.LightningModule):
    def __init__(self, counts: str = "") -> None:
        super().__init__()
        self.encoder = nn.Sequential(Counting())
        self.mean = MeanMetric()
        self.seen = 0
        self.counts = counts

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, counting = batch[0], self.encoder[0]
        loss = self.encoder(x).square().mean()
        self.mean(loss.detach())
        if self.counts == "seen":
            self.seen += len(x)
        elif self.counts == "encoder.0.samples":
            counting.samples = counting.samples + len(x)
        elif self.counts == "encoder.0.total":
            counting.total = counting.total + x.detach().sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@replicas
@pytest.mark.parametrize("counts", ["seen", "encoder.0.samples", "encoder.0.total"])
def test_counts_of_a_share_are_warned_of_in_all_modules_also_if_shares_are_equal(share: bool, counts: str) -> None:
    with pytest.warns(UserWarning, match=rf"to set self\.{counts} to the same number in all replicas") as warned:
        fit(Counted(counts), 2, share, samples((8,), count=24))
    assert sum("the same number" in str(warning.message) for warning in warned) == 1
    fit(Counted(counts), 1, share, samples((8,), count=24))


@replicas
def test_counts_of_calls_are_those_of_one_device(share: bool) -> None:
    found, expected = Counted(), Counted()
    fit(found, 2, share, samples((8,)))
    fit(expected, 1, share, samples((8,)))
    assert found.encoder[0].calls == expected.encoder[0].calls == 8


# -- batches and outputs -----------------------------------------------------------------------------


def test_exhausted_loaders_of_a_longer_one_are_none_in_every_replica() -> None:
    lengths = []

    class Several(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.net = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            lengths.append({name: part and len(part[0]) for name, part in batch.items()})
            return sum(self.net(part[0]).square().mean() for part in batch.values() if part is not None)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def loader(count: int, batch_size: int) -> DataLoader[Any]:
        return samples((8,), count=count, batch_size=batch_size)

    def trained(devices: int) -> Any:
        lengths.clear()
        model = Several()
        loaders = {"long": loader(48, 4), "wide": loader(64, 8), "short": loader(4, 2)}
        trainer = one_process(devices, max_epochs=1)
        trainer.fit(model, CombinedLoader(loaders, "max_size"))
        return model

    expected = trained(1)
    close_to(trained(2), expected)
    assert lengths[0] == {"long": 2, "wide": 4, "short": 1}
    assert lengths[4 * 2 :: 2][0] == {"long": 2, "wide": 4, "short": None}
    assert lengths[-1] == {"long": 2, "wide": None, "short": None}
    first, second = divide([None, [torch.ones(4)], (torch.ones(2), None)], [CPU, CPU]).shards
    assert first[0] is second[0] is first[2][1] is second[2][1] is None


@pytest.mark.parametrize(
    ("values", "merged"),
    [
        ([torch.ones(3, 4), torch.zeros(4)], torch.cat([torch.ones(3, 4), torch.zeros(1, 4)])),
        ([torch.ones(3, 4, 2), torch.zeros(4, 2)], torch.cat([torch.ones(3, 4, 2), torch.zeros(1, 4, 2)])),
        ([{"a": torch.ones(3)}, {"a": torch.tensor(0.0)}], {"a": torch.tensor([1.0, 1, 1, 0])}),
        (
            [[{"b": torch.ones(n, 4)} for n in (2, 0)], [{"b": torch.ones(5, 4)}]],
            [{"b": torch.ones(n, 4)} for n in (2, 0, 5)],
        ),
        ([[{"b": torch.ones(7, 4)}], [{"b": torch.ones(5, 4)}]], [{"b": torch.ones(n, 4)} for n in (7, 5)]),
        ([[], [{"b": torch.ones(5, 4)}]], [{"b": torch.ones(5, 4)}]),
        ([[{"b": torch.ones(3, 4)}], [{"b": torch.ones(1, 4)}]], [{"b": torch.ones(4, 4)}]),
    ],
    ids=["rows", "matrices", "numbers", "records", "records of some", "records of one replica", "columns"],
)
def test_squeezed_tensors_and_lists_of_dicts_are_merged_as_one_device_makes_them(
    values: list[Any], merged: Any
) -> None:
    close(merge(values, [3, 1], CPU), merged)


@pytest.mark.parametrize("values", [[torch.ones(3, 4), torch.ones(2)], [torch.tensor(1.0), torch.ones(1)]])
def test_tensors_of_other_dimensions_are_an_error_that_names_the_output(values: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="cannot merge the output of the replicas: expected tensors of one dtype and"):
        merge(values, [3, 1], CPU)


# -- metrics -----------------------------------------------------------------------------------------


class Boxes(Metric):
    """Gets a list of dicts, one per image, as metrics of detection do, and minds the order."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("areas", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("images", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("updates", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: list[dict[str, Tensor]], target: list[dict[str, Tensor]]) -> None:
        assert len(preds) == len(target)
        for found, wanted in zip(preds, target, strict=True):
            self.images += 1
            self.areas = self.areas * 0.9 + found["boxes"].sum() * found["scores"].sum() + wanted["boxes"].sum()
        self.updates += 1

    def compute(self) -> Tensor:
        return torch.stack([self.areas, self.images.float(), self.updates.float()])


@replicas
@pytest.mark.parametrize("how", ["forward", "update", "some images"])
@pytest.mark.parametrize("batch_size", [6, 4, 2])
def test_metrics_that_get_lists_of_dicts_are_those_of_one_device(share: bool, how: str, batch_size: int) -> None:
    class Detector(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.boxes = Boxes()
            self.values: list[Tensor] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            preds = [
                {"boxes": row.expand(int(n) + 1, 8), "scores": row[: int(n) + 1]} for row, n in zip(*batch, strict=True)
            ]
            target = [{"boxes": row.view(2, 4)} for row in batch[0]]
            if how == "some images":
                kept = [index for index, n in enumerate(batch[1]) if n > 0]
                preds, target = [preds[index] for index in kept], [target[index] for index in kept]
            if how == "forward":
                self.boxes(preds, target)
            else:
                self.boxes.update(preds, target)

        def on_validation_epoch_end(self) -> None:
            self.values.append(self.boxes.compute())

    found, expected = Detector(), Detector()
    loader = samples((8,), classes=4, batch_size=batch_size)
    one_process(2, share).validate(found, loader, verbose=False)
    one_process(1).validate(expected, loader, verbose=False)
    close(found.values, expected.values)
    assert found.values[0][1] > 10


MEANS = {"of two": lambda: RunningMean(2), "of three": lambda: RunningMean(3), "all": MeanMetric, "again": MeanMetric}
WINDOWS: dict[str, tuple[Callable[[], Any], str]] = {
    "mean": (lambda: Running(MeanMetric(), 2), "mean"),
    "sum": (lambda: Running(SumMetric(), 2), "sum"),
    "collection of means": (lambda: MetricCollection({key: make() for key, make in MEANS.items()}), "mean"),
    "collection of sums": (lambda: MetricCollection({"a": RunningSum(2), "b": RunningSum(2), "c": SumMetric()}), "sum"),
}


@replicas
@pytest.mark.parametrize("method", ["update", "forward"])
@pytest.mark.parametrize("kind", WINDOWS)
def test_metrics_with_windows_that_get_numbers_are_those_of_one_device(share: bool, method: str, kind: str) -> None:
    make, reduction = WINDOWS[kind]

    class Windowed(Digits):
        def __init__(self) -> None:
            super().__init__()
            self.window = make()
            self.values: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            value = getattr(torch, reduction)(batch[0][:, 0])
            (self.window.update if method == "update" else self.window)(value)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *args: Any) -> None:
            self.values.append(self.window.compute())

    found, expected = Windowed(), Windowed()
    fit(found, 2, share)
    fit(expected)
    close(found.values, expected.values)
    assert len(found.values) == 8


def test_means_next_to_other_windows_in_one_collection_are_refused() -> None:
    class Windowed(Digits):
        def __init__(self) -> None:
            super().__init__()
            self.window = MetricCollection({"mean": RunningMean(2), "sum": RunningSum(2)})

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.window.update(batch[0].sum())
            return super().training_step(batch, batch_idx)

    with pytest.raises(
        RuntimeError, match="expected the collection 'window', which is given a number, to have no mean"
    ):
        fit(Windowed(), 2)


def test_classes_of_stand_ins_are_not_kept_for_ever() -> None:
    metrics = [type("Again", (SumMetric,), {}) for _ in range(100)]
    made = [_class_in_replica(metric) for metric in metrics]
    assert [issubclass(stand_in, metric) for stand_in, metric in zip(made, metrics, strict=True)] == [True] * 100
    assert _class_in_replica.cache_info().currsize < 100


# -- checkpoints -------------------------------------------------------------------------------------


def handed_over_among_strategies(folder: str) -> None:
    def trained(strategy: str, epochs: int, resume: str | None = None) -> tuple[Any, Path]:
        path = Path(folder, f"{strategy} {epochs} {resume and Path(resume).name}.ckpt")
        model = Digits()
        if strategy == "bucketdp":
            runs = one_process(2, max_epochs=epochs)
        else:
            runs = trainer(strategy_of(strategy), devices=1, max_epochs=epochs)
        runs.fit(model, digits(), ckpt_path=resume, weights_only=False)
        runs.save_checkpoint(path)
        return torch.load(path, weights_only=False), path

    kinds = ("ddp", "bucketddp", "bucketdp")
    expected, _ = trained("ddp", 2)
    firsts = {kind: trained(kind, 1)[1] for kind in kinds}
    for first, second in (
        ("bucketdp", "ddp"),
        ("bucketdp", "bucketddp"),
        ("ddp", "bucketdp"),
        ("bucketddp", "bucketdp"),
    ):
        found, _ = trained(second, 2, str(firsts[first]))
        assert found.keys() == expected.keys()
        for key in ("state_dict", "optimizer_states", "global_step"):
            close(found[key], expected[key], msg=lambda m, what=(key, first, second): f"{what}: {m}")


def test_checkpoints_go_from_one_process_to_several_and_back(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(1, handed_over_among_strategies, str(tmp_path))
