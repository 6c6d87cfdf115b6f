"""``self.log(..., sync_dist=True)``: the ranks agree on keys before values are reduced.

Lightning (2.6) reduces values one after the other, in the order in which a rank logs, and nothing says which value it
is. Ranks that log other keys, or in another order, get means of different things; a rank that logs less leaves the
others waiting. Here values travel after the ranks have compared their keys:

- a value of ``on_step=True``, which Lightning reduces in ``self.log``: just before;
- the values of an epoch: all at once, when the Trainer first needs one of them, and in one all-reduce per dtype and
  operation.

``Strategy.reduce`` gets a tensor without its key. So this file extends two private classes of Lightning, and imports
them at the top: where they are gone ``self.log`` is Lightning's own, unless an option needs them. Metrics of
torchmetrics reduce their states themselves, and values with a ``sync_dist_group`` concern that group alone: both are
left alone.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_bucketddp.peers.agreement import RankMismatchError
from lightning_bucketddp.peers.names import in_words
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.peers.status import Phase

_MOST_NAMED = 5
"""How many keys an error names."""


class _Logged(NamedTuple):
    """A key that a rank has logged: what another rank needs to log it too.

    Attributes:
        key: Lightning's key: the hook and the name, and the number of the dataloader.
        dtype: Of the value.
        metadata: The fields of Lightning's metadata.
    """

    key: str
    dtype: torch.dtype
    metadata: Mapping[str, Any]


class LoggedKeys:
    """Reduces what ``self.log(sync_dist=True)`` has logged, after the ranks have agreed on the keys.

    Args:
        strategy: The Trainer's strategy.
        may_differ: Whether a rank may lack keys that others have logged, when the batches of an epoch have been run.
    """

    def __init__(self, strategy: Any, may_differ: bool) -> None:
        self.strategy, self._may_differ = strategy, may_differ

    def agree_on_step(self, key: str, metric: _ResultMetric, value: Tensor) -> None:
        """Require that all ranks are about to reduce the same value of a step.

        Raises:
            RankMismatchError: If a rank logs something else, or does not come here.
        """
        if _is_reduced(metric) and metric.meta.on_step:
            default = torch.promote_types(torch.get_default_dtype(), torch.float32)
            dtype = value.dtype if value.dtype in (torch.float32, torch.float64) else default
            self._agree({_in_words(metric, "on_step", dtype): _Logged(key, dtype, {})}, may_differ=False)

    def pending(self, results: _ResultCollection | None) -> dict[str, tuple[str, _ResultMetric]]:
        """The values of an epoch that are still to be reduced, with their keys; by what must be the same on all ranks.

        Args:
            results: What a loop has logged; None if it logs nothing.
        """
        return {
            _in_words(metric, "on_epoch", metric.value.dtype): (key, metric)
            for key, metric in (results.valid_items() if results is not None else ())
            if _is_reduced(metric) and metric.meta.on_epoch and metric._computed is None
        }

    def reduce(self, results: _ResultCollection | None, steps_end: bool = False) -> None:
        """Reduce the values of an epoch that are still to be reduced.

        Args:
            results: What a loop has logged; None if it logs nothing.
            steps_end: Whether the batches have just been run, which is a point that all ranks come to.

        Raises:
            RankMismatchError: If a rank lacks a key that it may not lack, or does not come here.
        """
        pending, may_differ = self.pending(results), steps_end and self._may_differ
        if results is None or not (pending or may_differ):
            return
        mine = {text: _logged(key, metric) for text, (key, metric) in pending.items()}
        for text, logged in self._agree(mine, may_differ).items():
            if text not in pending:
                pending[text] = logged.key, self._neutral(results, logged)
        groups: defaultdict[tuple[torch.dtype, str], list[_ResultMetric]] = defaultdict(list)
        for _, (_, metric) in sorted(pending.items()):
            groups[metric.value.dtype, str(metric.meta.sync.op)].append(metric)
        for (_, operation), metrics in groups.items():
            self._reduce_together(metrics, operation)

    def _reduce_together(self, metrics: Sequence[_ResultMetric], operation: str) -> None:
        parts = [part.reshape(1).to(self.strategy.root_device) for metric in metrics for part in _parts(metric)]
        reduced: Iterator[Any] = iter(self.strategy.reduce(torch.cat(parts), reduce_op=operation).unbind())
        for metric in metrics:
            value = next(reduced)
            metric._computed = value / next(reduced) if metric.meta.is_mean_reduction else value

    def _neutral(self, results: _ResultCollection, logged: _Logged) -> _ResultMetric:
        """Log a key that this rank lacks, with a value that changes neither a sum nor an extreme."""
        metadata = _Metadata(**logged.metadata)
        metadata.sync = _Sync(fn=self.strategy.reduce, _should=True)
        metric = results[logged.key] = _ResultMetric(metadata, is_tensor=True)
        metric.value = metric.value.to(logged.dtype)
        return metric

    def _agree(self, mine: Mapping[str, _Logged], may_differ: bool) -> Mapping[str, _Logged]:
        """Compare with the other ranks what this one has logged. They send digests, and all of it only if these differ.

        Returns:
            What any rank has logged.

        Raises:
            RankMismatchError: If ranks differ and may not.
        """
        if self.strategy.leaves_out_collectives:
            return mine
        digest = hashlib.sha256(repr(sorted(mine)).encode()).digest()
        own = torch.tensor([int.from_bytes(digest[:8], signed=True)], device=self.strategy.root_device)
        ranks: Ranks = self.strategy._ranks()  # of the group in which Lightning reduces; a Trainer may outlive it
        names = ": " + _some(sorted(mine)) if mine and not may_differ else ""
        what = f"the keys of self.log(sync_dist=True){names}"
        with ranks.waiting_for(what, Phase.AGREEMENT):
            digests, work = ranks.collectives.all_gather(own)
            work.wait()
            if len(set(digests.flatten().tolist())) == 1:
                return mine
            everyone: list[Mapping[str, _Logged]] = ranks.collectives.exchange_objects(mine)
            of_any_rank = {text: logged for logged_there in everyone for text, logged in logged_there.items()}
            keys = {logged.key for logged in of_any_rank.values()}
            if not may_differ or len(keys) < len(of_any_rank):  # a key that is a mean on one rank, a sum on another
                raise RankMismatchError(_difference(everyone))
        return of_any_rank


class KeyedResults(_ResultCollection):
    """Lightning's results of a loop. Before a value is reduced in ``self.log``, ranks agree on its key.

    Args:
        training: As in Lightning's.
        keys: Agrees on keys.
    """

    def __init__(self, training: bool, keys: LoggedKeys) -> None:
        super().__init__(training)
        self._keys = keys

    @override
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        self._keys.agree_on_step(key, self[key], value)
        super().update_metrics(key, value, batch_size)


class KeyedConnector(_LoggerConnector):
    """Lightning's hub for what is logged. It has the values of an epoch reduced together.

    Args:
        connector: The Trainer's, whose state it takes over.
        keys: Reduces the values.
    """

    def __init__(self, connector: _LoggerConnector, keys: LoggedKeys) -> None:
        self.__dict__.update(vars(connector))
        self._keys = keys

    @override
    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        self._keys.reduce(self.trainer._results, steps_end=True)

    @property
    @override
    def metrics(self) -> Any:
        if self._first_loop_iter is None:  # Lightning asks for the values of an epoch
            self._keys.reduce(self.trainer._results)
        return super().metrics

    @property
    @override
    def progress_bar_metrics(self) -> Any:
        # Rank 0 alone asks, in `on_train_epoch_end`. Other ranks may have more to log before they ask for values.
        later = self._keys.pending(self.trainer._results) if self._first_loop_iter is None else {}
        for _, metric in later.values():
            metric.has_reset = True  # Lightning passes over it
        shown = super().progress_bar_metrics
        for _, metric in later.values():
            metric.has_reset = False
        return shown


def install(trainer: Any, keys: LoggedKeys) -> None:
    """Have a Trainer's ranks agree on what they log; once.

    Args:
        trainer: The Trainer.
        keys: Agrees on keys.

    Raises:
        AttributeError: If Lightning lacks a private name. Then nothing is changed.
    """
    connector, epoch_loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    if type(connector) is not _LoggerConnector:
        return
    loops = epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop
    results = [KeyedResults(loop._results.training, keys) for loop in loops]
    _ = connector._first_loop_iter, trainer._results
    trainer._logger_connector = KeyedConnector(connector, keys)
    for loop, keyed in zip(loops, results, strict=True):
        loop._results = keyed


def _is_reduced(metric: _ResultMetric) -> bool:
    """Whether Lightning would reduce a value over all ranks."""
    sync = metric.meta.sync
    return metric.is_tensor and sync.should and not sync.rank_zero_only and sync.group is None


def _parts(metric: _ResultMetric) -> list[Tensor]:
    """What is reduced of a value: the value, and a mean's weight.

    The weight is the number of samples, as a rule. Lightning reduces it as an integer, whose mean makes 50 of 50.5.
    """
    if not metric.meta.is_mean_reduction:
        return [metric.value]
    return [metric.value, metric.cumulated_batch_size.to(metric.value.dtype)]


def _logged(key: str, metric: _ResultMetric) -> _Logged:
    return _Logged(key, metric.value.dtype, _metadata(metric))


def _metadata(metric: _ResultMetric) -> dict[str, Any]:
    metadata = {each.name: getattr(metric.meta, each.name) for each in fields(metric.meta) if each.name != "_sync"}
    metadata["reduce_fx"] = metric.meta.sync.op  # a function need not be picklable
    return metadata


def collected(results: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """What a rank has collected for the end of the epoch so far, as tensors and simple types.

    Args:
        results: What a training epoch has logged.
        module: The LightningModule, which may have metrics.
    """
    metrics = [(name, metric) for name, metric in module.named_modules() if isinstance(metric, Metric)]
    of_module = {name: (metric.metric_state, metric.update_count) for name, metric in metrics}
    logged = {
        key: (_metadata(metric), sync.should, sync.rank_zero_only, metric.metric_state if metric.is_tensor else None)
        for key, metric in results.items()
        if metric.meta.on_epoch and not metric.has_reset and (sync := metric.meta.sync).group is None
    }
    return {"of_module": of_module, "logged": logged}


def restore_collected(results: Any, found: Mapping[str, Any], trainer: Any) -> None:
    """Collect once more what :func:`collected` has found.

    Args:
        results: Where a training epoch's values are.
        found: What was found on this rank, on its device.
        trainer: The Trainer.
    """
    modules: dict[str, Any] = dict(trainer.lightning_module.named_modules())
    for name, (states, count) in found["of_module"].items():
        modules[name].__dict__.update(states, _update_count=count)
    for key, (metadata, should, rank_zero_only, states) in found["logged"].items():
        meta = _Metadata(**metadata)
        meta.sync = _Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
        metric = results[key] = _ResultMetric(meta, is_tensor=states is not None).to(trainer.strategy.root_device)
        metric.__dict__.update(states or {"value": modules[metadata["metric_attribute"]]}, _update_count=1)


def _in_words(metric: _ResultMetric, when: str, dtype: torch.dtype) -> str:
    """What must be the same on all ranks when a value is reduced."""
    hook, _, loader = metric.meta.fx.partition(".")
    where = f"{hook}, dataloader {loader}" if loader else hook
    return f"{metric.meta.name!r} of {where} ({when}, {metric.meta.sync.op}, {str(dtype).removeprefix('torch.')})"


def _some(texts: Sequence[str]) -> str:
    more = len(texts) - _MOST_NAMED
    return "; ".join(texts[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _difference(everyone: Sequence[Mapping[str, _Logged]]) -> str:
    """The message for ranks that have logged different keys. It is the same on all ranks, and so is reported once."""
    found = {text: [at for at, own in enumerate(everyone) if text in own] for own in everyone for text in own}
    differing = [f"{text} on {in_words(at)} alone" for text, at in found.items() if len(at) < len(everyone)]
    return (
        f"expected all ranks to log the same keys with sync_dist=True, found {_some(differing)}. Log them "
        "on all ranks, those of on_step=True in the same order too; look for a branch that depends on the rank or its "
        'data. For the mean of the ranks that have a key: on_step=False and BucketDDPStrategy(logged_keys="any")'
    )
