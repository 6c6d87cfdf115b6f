"""torchmetrics in replicas: each replica has its own metrics, whose states are merged after the step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_bucketddp.replicas.nested import move_to

_START = 2**31
"""The number of updates that a replica's metric begins with. A smaller one later shows that the step has reset it."""


class StepMetrics:
    """The metrics of a LightningModule in one step.

    Empties the replicas' metrics, so that after the step each holds its replica's part of the batch.

    Args:
        module: The LightningModule.
        replicas: Its replicas.
        home: The LightningModule's device.
        step: The step's name, for messages.

    Attributes:
        originals: The LightningModule's own metric by the id of a replica's.
    """

    def __init__(self, module: nn.Module, replicas: Sequence[nn.Module], home: torch.device, step: str) -> None:
        parts = [dict(replica.named_modules()) for replica in replicas]
        self._home, self._step = home, step
        self._found: list[tuple[str, Metric, list[Any]]] = []
        self.originals: dict[int, Metric] = {}
        for name, part in module.named_modules():
            copies: list[Any] = [own[name] for own in parts]
            if isinstance(part, MetricCollection):
                for copy in copies:  # its metrics share no states, so that each can be merged
                    copy._groups = {index: [key] for index, key in enumerate(copy._modules)}
                    copy._groups_checked = True
            elif isinstance(part, Metric):
                self._found.append((name, part, copies))
                for copy in copies:
                    self.originals[id(copy)] = part
                    _empty(copy)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the states of the replicas' metrics to the LightningModule's.

        Raises:
            RuntimeError: If the states of a metric cannot be merged, or the step has computed or reset one. The message
                names it.
        """
        for name, metric, copies in self._found:
            if any(copy._computed is not None or copy._update_count < _START for copy in copies):
                raise RuntimeError(
                    f"expected {self._step} to update, call or log the metric {name!r}, of which a replica sees only "
                    "its own samples, found that it calls compute() or reset(); call them in a hook such as "
                    "on_train_batch_end or on_validation_epoch_end"
                )
            used = [copy for copy in copies if any(part._update_count > _START for part in _metrics_in(copy))]
            if used:
                self._merge_into(metric, name, used)

    def _merge_into(self, metric: Metric, name: str, copies: Sequence[Any]) -> None:
        if len(_metrics_in(metric)) > 1:
            raise RuntimeError(_not_mergeable(name, metric, "it is made of other metrics"))
        for copy in copies:
            copy._update_count -= _START
            copy._device = self._home
            for key, state in copy.metric_state.items():
                setattr(copy, key, move_to(state, self._home))

        def joined(before: Any, after: Any) -> Any:
            """Return ``after`` with the states of both, in this order."""
            after._update_count += before._update_count
            try:
                after.merge_state(before.metric_state)
            except (RuntimeError, TypeError, ValueError) as error:
                raise RuntimeError(_not_mergeable(name, after, str(error))) from error
            return after

        called = all(copy._forward_cache is not None for copy in copies)
        total = reduce(joined, copies)
        of_the_batch = total.compute() if called else None
        total = joined(metric, total)
        for key, state in total.metric_state.items():
            setattr(metric, key, state)
        metric._update_count, metric._forward_cache, metric._computed = total._update_count, of_the_batch, None


def _empty(copy: Any) -> None:
    """Give a replica's metric states of its own, and methods that use them: so far it shares the original's."""
    attributes = copy.__getstate__()
    for key, state in copy.metric_state.items():
        attributes[key] = state.detach().to(copy.device, copy=True) if isinstance(state, Tensor) else []
    vars(copy).clear()
    copy.__setstate__(attributes)
    copy.reset()  # other attributes too
    copy._update_count = _START


def _metrics_in(metric: Any) -> list[Any]:
    """List the metric and the metrics that it is made of."""
    return [part for part in metric.modules() if isinstance(part, Metric)]


def _not_mergeable(name: str, metric: Metric, why: str) -> str:
    return (
        f"expected metrics whose states torchmetrics can merge, as each replica has its own, found {name!r}, a "
        f"{type(metric).__name__}: {why}; set full_state_update=False in a class of your own whose states can be "
        "merged, or compute the metric in a hook such as on_validation_epoch_end"
    )
