"""The LightningModule's methods by which a step reaches the Trainer and the optimizers, as replicas have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torchmetrics import MetricCollection

from lightning_bucketddp.replicas.nested import move_to
from lightning_bucketddp.trainer.dp.logging import LogBook
from lightning_bucketddp.trainer.dp.merging import merge_loss
from lightning_bucketddp.trainer.dp.optimizers import Meeting, in_replica, original_of


class ReplicaMethods:
    """What replicas have in the place of the LightningModule's methods, while a step runs.

    Args:
        module: The LightningModule.
        step: The step.
        logs: Where what replicas log is kept until the step has ended.
        hook: The step's name.

    Attributes:
        toggled: The optimizer that the step has toggled last, and not untoggled.
    """

    def __init__(self, module: pl.LightningModule, step: Meeting, logs: LogBook, hook: str) -> None:
        self._module = module
        self._step = step
        self._logs = logs
        self._trains = hook == "training_step"
        self.toggled: Any = None

    def of(self, index: int, replica: Any, device: torch.device) -> dict[str, Callable[..., Any]]:
        """The methods of one replica, by name."""
        methods: dict[str, Callable[..., Any]] = {
            "log": partial(self._log, index),
            "log_dict": partial(self._log_dict, index, replica.log_dict),
            "all_gather": partial(self._all_gather, index, device),
        }
        if index != 0:
            methods["print"] = do_nothing
        if self._trains and not self._module.automatic_optimization:
            methods["manual_backward"] = partial(self._manual_backward, index)
            methods["clip_gradients"] = partial(self._clip_gradients, index)
            methods["toggle_optimizer"] = partial(self.toggle, index, on=True)
            methods["untoggle_optimizer"] = partial(self.toggle, index, on=False)
            methods["toggled_optimizer"] = partial(self._toggled_optimizer, index)
            methods["optimizers"] = partial(self._optimizers, index)
        if self._trains:
            methods["lr_schedulers"] = partial(self._schedulers, index)
        return methods

    def _log(self, index: int, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self._logs.log(self._step.current(index), name, value, *args, **kwargs)

    def _log_dict(self, index: int, method: Callable[..., None], dictionary: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(dictionary, MetricCollection):
            self._logs.log_collection(self._step.current(index), dictionary, *args, **kwargs)
        else:
            method(dictionary, *args, **kwargs)  # which calls `log` for each

    def _all_gather(self, index: int, device: torch.device, data: Any, *args: Any, **kwargs: Any) -> Any:
        """The data of all replicas, which on one device is the data itself."""

        def once(found: list[Any]) -> Any:
            merged = self._step.merge(found, "what was given to all_gather")
            return self._module.all_gather(merged, *args, **kwargs)

        return move_to(self._step.meet(index, "all_gather()", data, once), device)

    def _manual_backward(self, index: int, loss: Any, *args: Any, **kwargs: Any) -> None:
        if args or "gradient" in kwargs:
            raise ValueError(
                "expected manual_backward(loss) without a gradient, as the mean of the replicas' losses is taken, "
                "found one; multiply the loss with it"
            )

        def once(losses: list[Any]) -> None:
            total = merge_loss(losses, self._step.sizes, self._step.home, "manual_backward")
            self._module.manual_backward(total, **kwargs)

        self._step.meet(index, "manual_backward()", loss, once)

    def _clip_gradients(self, index: int, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original = original_of(optimizer)
        call = f"clip_gradients() for {_name_of(optimizer)}"
        self._step.meet(index, call, None, lambda _: self._module.clip_gradients(original, *args, **kwargs))

    def toggle(self, replica: int, optimizer: Any, on: bool) -> None:
        """Calls ``toggle_optimizer`` or ``untoggle_optimizer`` once for all replicas."""
        name = "toggle_optimizer" if on else "untoggle_optimizer"
        original = original_of(optimizer)

        def once(_: list[Any]) -> None:
            getattr(self._module, name)(original)
            self.toggled = original if on else None
            self._step.renew()

        self._step.meet(replica, f"{name}() for {_name_of(optimizer)}", None, once)

    @contextmanager
    def _toggled_optimizer(self, index: int, optimizer: Any) -> Iterator[None]:
        self.toggle(index, optimizer, on=True)
        yield
        self.toggle(index, optimizer, on=False)  # not after an exception, which other replicas may not have raised

    def _optimizers(self, index: int, use_pl_optimizer: bool = True) -> Any:
        return in_replica(type(self._module).optimizers(self._module, use_pl_optimizer), "optimizer", self._step, index)

    def _schedulers(self, index: int) -> Any:
        return in_replica(type(self._module).lr_schedulers(self._module), "scheduler", self._step, index)


def _name_of(optimizer: Any) -> str:
    return getattr(optimizer, "_name", None) or type(optimizer).__name__


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """What all replicas but the first do where one is enough."""
