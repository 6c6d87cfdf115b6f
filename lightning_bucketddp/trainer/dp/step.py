"""Run one step of a LightningModule on several replicas at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_bucketddp.reducer.ranks_check import sum_of_bits
from lightning_bucketddp.replicas.replicas import Replicas, parallel_apply
from lightning_bucketddp.trainer.dp.batch_division import Shards
from lightning_bucketddp.trainer.dp.merging import LogBook, merge
from lightning_bucketddp.trainer.dp.metrics import StepMetrics

_COMPARED = 3
"""In the first steps of each kind the values of parameters are compared, in later ones only version counters."""


class ReplicaSteps:
    """Runs ``training_step``, ``validation_step``, ``test_step`` and ``predict_step`` on replicas.

    Args:
        module: The LightningModule.
        replicas: Its replicas.
    """

    def __init__(self, module: pl.LightningModule, replicas: Replicas) -> None:
        self._module, self._replicas = module, replicas
        self._times: Counter[str] = Counter()

    def run(self, hook: str, batch: Shards, *args: Any) -> Any:
        """Run a step and merge what the replicas return, log and measure.

        Args:
            hook: The step's name.
            batch: The split batch.
            args: The step's arguments after the batch. All replicas get them.

        Returns:
            The merged outputs.

        Raises:
            BaseException: What a replica raised, after all have ended.
            RuntimeError: If the step changes parameters or learning rates, or a metric cannot be merged.
            ValueError: If what replicas return or log cannot be merged.
        """
        module, sizes = self._module, [size for _, size in batch]
        home, devices = self._replicas.devices[0], self._replicas.devices[: len(sizes)]
        replicas: list[Any] = self._replicas.refresh(len(sizes))
        for replica, device in zip(replicas, devices, strict=True):
            _place(replica, device)
        metrics = StepMetrics(module, replicas, home, hook)
        logs = LogBook(sizes, home, hook, metrics.originals)
        for index, replica in enumerate(replicas):
            vars(replica)["log"] = partial(logs.log, index)
            if index:
                vars(replica)["print"] = _do_nothing
        with self._unchanged_parameters(hook, replicas):
            steps = [getattr(replica, hook) for replica in replicas]
            inputs = [(shard, *args) for shard, _ in batch]
            outputs = parallel_apply(steps, inputs, devices=devices, thread_per_device=True)
        _keep_buffers(module, replicas[0])
        metrics.merge()
        logs.replay(module.log)
        return merge(outputs, sizes, home, hook)

    @contextmanager
    def _unchanged_parameters(self, hook: str, replicas: Sequence[nn.Module]) -> Iterator[None]:
        """Require that a step leaves parameters as they are: every replica would change them."""
        self._times[hook] += 1
        by_value = self._times[hook] <= _COMPARED
        named = {param: repr(name) for part in (self._module, *replicas) for name, param in part.named_parameters()}
        groups = [group for optimizer in self._module.trainer.optimizers for group in optimizer.param_groups]

        def states() -> list[Any]:
            return [*(_state(param, by_value) for param in named), *(float(group.get("lr", 0)) for group in groups)]

        before = states()
        yield
        names = [*named.values(), *(["learning rates"] * len(groups))]
        changed = {name: None for name, old, new in zip(names, before, states(), strict=True) if old != new}
        if changed:
            raise RuntimeError(
                f"expected {hook} to leave parameters and learning rates as they are, as every replica runs it, found "
                f"that it changes {', '.join([*changed][:3])}; change them in on_train_batch_end, which runs once"
            )


def _state(param: Tensor, by_value: bool) -> tuple[int, int]:
    """Return what shows that a tensor was changed: its version, and by value the sum of its bits."""
    version = 0 if param.is_inference() else param._version  # private; changes of `.data` leave it
    plain = type(param) in (Tensor, nn.Parameter) and param.layout is torch.strided
    return version, int(sum_of_bits(param)) if by_value and plain else 0


def _place(replica: nn.Module, device: torch.device) -> None:
    """Make ``self.device`` the replica's, in nested LightningModules and metrics too."""
    for part in replica.modules():
        if "_device" in vars(part) and hasattr(type(part), "device"):
            vars(part)["_device"] = device  # private: the property has no setter


def _keep_buffers(module: nn.Module, first: nn.Module) -> None:
    """Take over module buffers that the first replica has replaced. It shares the others with the module."""
    parts = dict(first.named_modules())
    for name, part in module.named_modules():
        for key, buffer in part._buffers.items():
            own = parts[name]._buffers.get(key)
            if own is not buffer and not (buffer is not None and buffer.requires_grad):
                part._buffers[key] = own


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for ``print`` in all replicas but the first."""
