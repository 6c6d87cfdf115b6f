"""One step of a LightningModule on several replicas at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_bucketddp.replicas.replicas import Replicas, parallel_apply
from lightning_bucketddp.trainer.dp.batch_division import Division
from lightning_bucketddp.trainer.dp.merging import LogBook, merge
from lightning_bucketddp.trainer.dp.metrics import StepMetrics

_COMPARED = 3
"""In how many steps of each kind the values of parameters are compared; later ones look at version counters alone."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What values are added up as, by the bytes of one."""


class ReplicaSteps:
    """Runs ``training_step``, ``validation_step``, ``test_step`` and ``predict_step`` on replicas.

    Args:
        module: The LightningModule.
        replicas: Its replicas.
    """

    def __init__(self, module: pl.LightningModule, replicas: Replicas) -> None:
        self._module = module
        self._replicas = replicas
        self._times: Counter[str] = Counter()

    def run(self, hook: str, division: Division, *args: Any) -> Any:
        """Runs a step.

        Args:
            hook: The step's name.
            division: The divided batch.
            args: The step's arguments after the batch; all replicas get them.

        Returns:
            The replicas' outputs, merged.

        Raises:
            BaseException: What a replica raised, after all have ended.
            RuntimeError: If the step changes parameters or learning rates, or a metric cannot be merged; says which.
            ValueError: If what replicas return or log cannot be merged; says which and why.
        """
        module, sizes = self._module, division.sizes
        home, devices = self._replicas.devices[0], self._replicas.devices[: len(sizes)]
        replicas: list[Any] = self._replicas.refresh(len(sizes))
        for index, (replica, device) in enumerate(zip(replicas, devices, strict=True)):
            _place(replica, device)
            if index:
                vars(replica)["print"] = _do_nothing
        metrics = StepMetrics(module, replicas, home, hook)
        logs = LogBook(sizes, home, hook, metrics.originals)
        for index, replica in enumerate(replicas):
            vars(replica)["log"] = partial(logs.log, index)
        with self._unchanged_parameters(hook, replicas):
            steps = [getattr(replica, hook) for replica in replicas]
            shards = [(shard, *args) for shard in division.shards]
            outputs = parallel_apply(steps, shards, devices=devices, thread_per_device=True)
        _keep_buffers(module, replicas[0])
        metrics.merge()
        logs.replay(module.log)
        return merge(outputs, sizes, home, hook)

    @contextmanager
    def _unchanged_parameters(self, hook: str, replicas: Sequence[nn.Module]) -> Iterator[None]:
        """Requires that parameters are the same at the end, as each replica would have changed them."""
        self._times[hook] += 1
        compared = self._times[hook] <= _COMPARED
        found: dict[int, tuple[str, Tensor]] = {}
        for replica in (self._module, *replicas):
            found.update((id(param), (name, param)) for name, param in replica.named_parameters())
        before, rates = [_state(param, compared) for _, param in found.values()], self._learning_rates()
        yield
        pairs = zip(found.values(), before, strict=True)
        changed = list(dict.fromkeys(name for (name, param), state in pairs if _state(param, compared) != state))
        if changed or self._learning_rates() != rates:
            raise RuntimeError(
                f"expected {hook} to leave parameters and learning rates as they are, as every replica runs it, found "
                f"{', '.join(map(repr, changed[:3])) or 'learning rates'} changed by it; change them in "
                "on_train_batch_end, which runs once"
            )

    def _learning_rates(self) -> list[float]:
        groups = [group for optimizer in self._module.trainer.optimizers for group in optimizer.param_groups]
        return [float(group["lr"]) for group in groups if "lr" in group]


def _state(param: Tensor, compared: bool) -> tuple[int, int]:
    """What shows whether a tensor was changed: its version and, if it is to be compared, the sum of its bits."""
    # The version is private, as there is no public way to see that a tensor was changed in place; `.data` leaves it.
    version = 0 if param.is_inference() else param._version
    plain = type(param) in (Tensor, nn.Parameter) and param.layout is torch.strided
    if not compared or not plain or param.itemsize not in _INTEGERS:
        return version, 0
    return version, int(param.detach().view(_INTEGERS[param.itemsize]).sum(dtype=torch.int64))


def _place(replica: nn.Module, device: torch.device) -> None:
    """Has ``self.device`` be the replica's, in nested LightningModules and metrics too."""
    for part in replica.modules():
        # Private, as the property has no setter; Lightning sets it the same way before `setup`.
        if "_device" in vars(part) and hasattr(type(part), "device"):
            vars(part)["_device"] = device


def _keep_buffers(module: nn.Module, first: nn.Module) -> None:
    """Keeps module buffers that the first replica has replaced; what it changes in place is the module's own."""
    parts = dict(first.named_modules())
    for name, part in module.named_modules():
        for key, buffer in part._buffers.items():
            mine = parts[name]._buffers.get(key)
            if mine is not buffer and not (buffer is not None and buffer.requires_grad):
                part._buffers[key] = mine


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """What all replicas but the first do where one is enough."""
