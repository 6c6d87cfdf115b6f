"""``strategy="bucketdp"``: what steps keep in attributes, module buffers and batches is that of one device, or said."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.dp import digits, fit, one_process, replicas
from tests.lightning_models import close_to

close = torch.testing.assert_close

CLASSES = 4


class Stateful(pl.LightningModule):
    """What a test's step does, which gets the module, the samples and their classes."""

    step: Callable[..., Any]

    def __init__(self, manual: bool = False, **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.automatic_optimization = not manual
        self.first = nn.Linear(8, 8)
        self.net = nn.Sequential(nn.Tanh(), nn.Linear(8, CLASSES))
        self.mean = MeanMetric()
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.first(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return type(self).step(self, *batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def of(step: Callable[..., Any], **attributes: Any) -> Any:
    return type("Tested", (Stateful,), {"step": step})(**attributes)


def loss_of(module: Any, x: Tensor, classes: Tensor) -> Tensor:
    return functional.cross_entropy(module(x), classes)


def assert_as_on_one_device(make: Callable[[], Any], share: bool, kept: Callable[[Any], Any] = lambda module: 0) -> Any:
    """Trains on one device and on two and on three, and compares weights and what is ``kept``."""
    expected = make()
    fit(expected, 1)
    for devices in (2, 3):
        found = make()
        fit(found, devices, share)
        close_to(found, expected)
        close(kept(found), kept(expected), rtol=1e-5, atol=1e-6)
    return expected


# -- dicts -------------------------------------------------------------------------------------------


@replicas
@pytest.mark.parametrize("where", ["root", "submodule", "method hook", "partial hook", "nested function hook"])
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_what_a_step_keeps_in_a_dict_is_its_own_replicas_after_a_call_for_all(
    share: bool, where: str, manual: bool
) -> None:
    def keep(module: Any, name: str, layer: Any, inputs: Any, output: Tensor) -> None:
        module.cache[name] = output

    def keep_output(module: Any, layer: Any, inputs: Any, output: Tensor) -> None:
        module.cache["h"] = output

    def make() -> Any:
        module = of(step, manual=manual, cache={})
        module.first.cache = {}
        if where == "method hook":
            type(module).keep = keep_output
            module.first.register_forward_hook(module.keep)
        elif where == "partial hook":
            type(module).keep = keep
            module.first.register_forward_hook(partial(module.keep, "h"))
        elif where == "nested function hook":
            module.first.register_forward_hook(lambda *args: module.cache.update(h=args[2]))
        return module

    def step(module: Any, x: Tensor, classes: Tensor) -> Any:
        h = module.first(x)
        if where == "root":
            module.cache["h"] = h
        elif where == "submodule":
            module.first.cache["h"] = h
        loss = functional.cross_entropy(module.net(h), classes)
        if manual:
            module.optimizers().zero_grad()
        else:
            module.mean(loss.detach())
        loss = loss + (module.first.cache if where == "submodule" else module.cache)["h"].square().mean()
        if not manual:
            return loss
        module.manual_backward(loss)
        module.optimizers().step()
        return None

    assert_as_on_one_device(make, share)


@replicas
def test_dicts_lists_and_deques_of_all_modules_have_what_all_replicas_added(share: bool) -> None:
    def step(module: Any, x: Tensor, classes: Tensor) -> Tensor:
        loss = loss_of(module, x, classes)
        module.net.history.append(loss.item())
        module.nested["train"]["loss"].append(loss.item())
        module.latest.append(loss.item())
        module.rebound = [*module.rebound, loss.item()]
        for row, label in zip(x, classes.tolist(), strict=True):
            module.by_sample[f"{row[0]:.5f}"] = row
            module.counted[label] += 1
            module.summed[label] += float(row.sum())
            module.by_class.setdefault(label, {}).setdefault("rows", []).append(f"{row[0]:.5f}")
        return loss

    def make() -> Any:
        module = of(
            step,
            nested={"train": {"loss": []}},
            latest=deque(maxlen=5),
            rebound=[],
            by_sample={},
            by_class={},
            counted=Counter(),
            summed=defaultdict(float),
        )
        module.net.history = []
        return module

    def kept(module: Any) -> Any:
        assert module.latest.maxlen == 5
        rows = {label: sorted(map(float, found["rows"])) for label, found in sorted(module.by_class.items())}
        return [
            *(module.net.history, module.nested, list(module.latest), module.rebound, module.by_sample),
            *(dict(module.counted), dict(module.summed), rows),
        ]

    expected = assert_as_on_one_device(make, share, kept)
    assert sum(expected.counted.values()) == 46
    assert len(expected.by_sample) == 23
    assert len(expected.nested["train"]["loss"]) == 8


def test_keys_that_the_first_replica_sets_or_removes_stay_so() -> None:
    def step(module: Any, x: Tensor, classes: Tensor) -> Tensor:
        module.found["rows"] = x
        module.found.pop("old", None)
        return loss_of(module, x, classes)

    module = of(step, found={"old": 1, "same": 2})
    fit(module, 2)
    assert module.found.keys() == {"same", "rows"}
    assert len(module.found["rows"]) == 3


# -- numbers, buffers and tensors that replicas share ------------------------------------------------


def buffered(step: Callable[..., Any]) -> Any:
    module = of(step, numbers={"seen": 0, "batches": 0}, rows=torch.ones(1))
    module.register_buffer("seen", torch.tensor(0))
    module.register_buffer("calls", torch.zeros(1))
    module.register_buffer("matrix", torch.zeros(CLASSES, 8))
    module.register_buffer("constant", torch.ones(3))
    module.norm = nn.BatchNorm1d(8)
    module.ema = {"weight": torch.zeros(8, 8)}
    module.array = np.ones(1, np.float32)
    module.emas = [torch.zeros(8, 8)]
    return module


def count_in_buffer(module: Any, x: Tensor, classes: Tensor) -> None:
    module.seen += len(x)


def count_in_matrix(module: Any, x: Tensor, classes: Tensor) -> None:
    module.matrix.index_add_(0, classes, x)


def set_matrix(module: Any, x: Tensor, classes: Tensor) -> None:
    module.matrix = module.matrix + x.sum()


def count_in_dict(module: Any, x: Tensor, classes: Tensor) -> None:
    module.numbers["seen"] += len(x)


def extend(module: Any, x: Tensor, classes: Tensor) -> None:
    module.rows = torch.cat([module.rows, x[:, 0]])


def extend_array(module: Any, x: Tensor, classes: Tensor) -> None:
    module.array = np.concatenate([module.array, x[:, 0].numpy()])


def average(module: Any, x: Tensor, classes: Tensor) -> None:
    module.ema["weight"].lerp_(module.first.weight.detach(), 0.1)


def average_in_list(module: Any, x: Tensor, classes: Tensor) -> None:
    module.emas[0].lerp_(module.first.weight.detach(), 0.1)


@replicas
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (count_in_buffer, "set self.seen to the same values"),
        (count_in_matrix, "set self.matrix to the same values"),
        (set_matrix, "set self.matrix to the same values"),
        (count_in_dict, r"set self.numbers\['seen'\] to the same number"),
        (extend, "set self.rows to the same tensor"),
        (extend_array, "set self.array to the same tensor"),
        (average, r"found self.ema\['weight'\] changed in place"),
        (average_in_list, r"found self.emas\[0\] changed in place"),
    ],
)
def test_what_is_kept_of_the_first_replica_alone_is_warned_of_once(
    share: bool, change: Callable[..., None], name: str
) -> None:
    def step(module: Any, x: Tensor, classes: Tensor) -> Tensor:
        change(module, x, classes)
        return loss_of(module, x, classes)

    with pytest.warns(UserWarning, match=name) as warned:
        fit(buffered(step), 2, share, digits(count=24))
    assert sum("expected training_step to" in str(warning.message) for warning in warned) == 1
    fit(buffered(step), 1, loader=digits(count=24))


@replicas
def test_what_all_replicas_set_to_the_same_is_as_on_one_device(share: bool) -> None:
    def step(module: Any, x: Tensor, classes: Tensor) -> Tensor:
        module.calls += 1
        module.numbers["batches"] += 1
        module.matrix.copy_(module.first.weight[:CLASSES])
        module.rows = module.first.bias.detach().clone()
        return functional.cross_entropy(module.net(module.norm(module.first(x))), classes)

    found, expected = buffered(step), buffered(step)
    fit(found, 2, share)
    fit(expected, 1)
    assert found.calls == expected.calls == 8
    assert found.numbers == expected.numbers == {"seen": 0, "batches": 8}


def test_buffers_in_evaluation_are_watched_too() -> None:
    class Evaluated(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.tensor(0))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen += len(batch[0])

    with pytest.warns(UserWarning, match=r"self\.seen to the same values"):
        one_process(2).validate(Evaluated(), digits(), verbose=False)


# -- batches and optimizers --------------------------------------------------------------------------


@replicas
def test_a_tensor_of_no_dimension_in_the_batch_is_each_replicas_own(share: bool) -> None:
    def collate(rows: Any) -> Any:
        return *(torch.stack(column) for column in zip(*rows, strict=True)), torch.tensor(1.0)

    def step(module: Any, x: Tensor, classes: Tensor, scale: Tensor) -> Tensor:
        scale *= 2
        return loss_of(module, x, classes) / scale

    loader = DataLoader(digits().dataset, 6, collate_fn=collate)
    found, expected = of(step), of(step)
    fit(found, 3, share, loader)
    fit(expected, 1, loader=loader)
    close_to(found, expected)


@replicas
@pytest.mark.parametrize("use_pl_optimizer", [False, True])
def test_a_learning_rate_that_a_step_multiplies_is_multiplied_once(share: bool, use_pl_optimizer: bool) -> None:
    def step(module: Any, x: Tensor, classes: Tensor) -> None:
        optimizer = module.optimizers(use_pl_optimizer=use_pl_optimizer)
        optimizer.zero_grad()
        module.manual_backward(loss_of(module, x, classes))
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        module.rates.append(optimizer.param_groups[0]["lr"])

    assert_as_on_one_device(lambda: of(step, manual=True, rates=[]), share, lambda module: module.rates)
