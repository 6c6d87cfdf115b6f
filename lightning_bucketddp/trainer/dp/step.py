"""One step of a LightningModule on several replicas at once, as one device would have made it on the whole batch."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_bucketddp.replicas.replicas import Replicas, parallel_apply
from lightning_bucketddp.replicas.round_robin import RoundRobin
from lightning_bucketddp.trainer.dp.batch_division import Division
from lightning_bucketddp.trainer.dp.checks import Gradients, SharedParameters, watched_optimizers
from lightning_bucketddp.trainer.dp.counters import Counters
from lightning_bucketddp.trainer.dp.doubts import Doubts, StepMemory
from lightning_bucketddp.trainer.dp.lists import AppendedLists
from lightning_bucketddp.trainer.dp.lockstep import AbandonedError, Lockstep
from lightning_bucketddp.trainer.dp.logging import LogBook
from lightning_bucketddp.trainer.dp.merging import merge, merge_loss
from lightning_bucketddp.trainer.dp.methods import ReplicaMethods, do_nothing
from lightning_bucketddp.trainer.dp.metrics import SharedMetrics
from lightning_bucketddp.trainer.dp.profiler import first_replicas_profiler, without_profilers

_Entry = tuple[dict[str, Any], str, Any]
_ABSENT = object()


class ReplicaStep:
    """What ``training_step``, ``validation_step``, ``test_step`` or ``predict_step`` needs to run on replicas.

    The LightningModule is the first replica itself, so that what a step sets on it stays. In all replicas the methods
    by which a step reaches the Trainer and the optimizers are replaced, and metrics too, while the step runs.

    Args:
        module: The LightningModule.
        hook: The step's name.
        replicas: The module's replicas.
        division: The divided batch; at least two shards.
        memory: What is known from the steps before this one.

    Attributes:
        sizes: How many samples each replica has.
        home: The module's device.
    """

    def __init__(
        self, module: pl.LightningModule, hook: str, replicas: Replicas, division: Division, memory: StepMemory
    ) -> None:
        self.sizes: Sequence[int] = division.sizes
        self.home = replicas.devices[0]
        self._module = module
        self._hook = hook
        self._shards = division.shards
        self._replicas = replicas
        self._devices = replicas.devices[: len(division.sizes)]
        self._manual = hook == "training_step" and not module.automatic_optimization
        self._thread = threading.local()
        self._lockstep = Lockstep(self._devices, hook)
        self._turns = RoundRobin(self._devices)
        self._logs = LogBook(self.sizes, self.home, hook, type(module).log, memory)
        self._entries: list[_Entry] = []  # what makes the first replica of the module, and back
        self._of_others: list[_Entry] = []  # what takes the other replicas' stand-ins and methods from them
        self._has_ended = False
        self._is_outside = True
        self._memory = memory
        self._doubts: Doubts | None = None
        self._params: SharedParameters | None = None
        self._gradients: Gradients | None = None
        self._methods = ReplicaMethods(module, self, self._logs, hook)  # until the step ends

    def run(self, *args: Any) -> Any:
        """Runs the step.

        Args:
            args: The step's arguments after the batch; all replicas get them.

        Returns:
            The replicas' outputs, merged.

        Raises:
            BaseException: What a replica raised, after all have ended.
            RuntimeError: If replicas make different calls of those that are made once for all of them.
            ValueError: If what replicas return, log or give to metrics cannot be merged; says which and why.
        """
        try:
            return self._run(*args)
        finally:
            self._end()

    def _run(self, *args: Any) -> Any:
        module = self._module
        others = self._replicas.refresh(len(self._shards))[1:]
        modules: list[Any] = [module, *others]
        at_home = [other for other, device in zip(others, self._devices[1:], strict=True) if device == self.home]
        indices = dict(zip(("batch_idx", "dataloader_idx"), args, strict=False))
        reached = {"current_epoch": module.current_epoch, "global_step": module.global_step}
        self._doubts = Doubts(self._memory, indices | reached)
        self._params = SharedParameters(module, at_home, self._hook, self._memory.warned)
        self._gradients = Gradients(module) if self._manual else None
        lists = AppendedLists(module, modules)
        counters = Counters(module, others, self.sizes, self._hook, self._memory.warned)
        metrics = SharedMetrics(module, weakref.proxy(self))  # as what it makes refers to it and to itself
        for index, (replica, device) in enumerate(zip(modules, self._devices, strict=True)):
            entries = metrics.stand_ins(replica, index, device)
            entries += [
                (vars(replica), name, method) for name, method in self._methods.of(index, replica, device).items()
            ]
            if index == 0:
                self._entries = entries
            else:
                self._of_others += _put(entries + without_profilers(replica))
                _place(replica, device)
        steps: list[Any] = [partial(self._run_one, index, replica) for index, replica in enumerate(modules)]
        try:
            with (
                self.inside(),
                self._watched_gradients(),
                self._watched_optimizers(),
                first_replicas_profiler(module.trainer, lambda: self.current(0) == 0),
            ):
                shards = [(shard, *args) for shard in self._shards]
                outputs = parallel_apply(
                    steps, shards, devices=self._devices, turns=self._turns, on_end=self._lockstep.end
                )
        except BaseException:
            if self._methods.toggled is not None:  # replicas do not meet any more, and parameters would stay frozen
                module.untoggle_optimizer(self._methods.toggled)
            raise
        self._check()
        counters.check()
        metrics.flush()
        self._logs.replay(module.log, module.log_dict)
        lists.merge(self.sizes, self.home, self._doubts)
        return self._merged(outputs)

    def _end(self) -> None:
        """Lets go of the batch and whatever else the step held, by references from the replicas to it and back."""
        self._has_ended = True
        _put(self._of_others)
        self._entries, self._of_others, self._params, self._gradients = [], [], None, None
        del self._shards, self._logs, self._lockstep, self._methods

    def _run_one(self, index: int, replica: Any, *args: Any) -> Any:
        self._thread.replica = index
        self._thread.handled = sys.exc_info()[1]
        try:
            return getattr(replica, self._hook)(*args)
        except AbandonedError:  # what the other replica raised is raised to the caller
            own = self._lockstep.raised_by(index)  # or what this one did, before a `finally` that calls something
        if own is not None:
            try:
                raise own
            finally:
                own = None  # else the traceback, which holds this frame, would keep itself alive
        return None

    def _merged(self, outputs: list[Any]) -> Any:
        call = self._hook
        without = [index for index, output in enumerate(outputs) if output is None]
        if len(without) == len(outputs):
            return None
        if without:
            with_one = next(index for index, output in enumerate(outputs) if output is not None)
            remedy = (
                "a loss of zero that has a graph, such as output.sum() * 0.0"
                if call == "training_step"
                else "something in all, such as an empty tensor, or None in all"
            )
            raise RuntimeError(
                f"expected {call} to return something in all replicas or in none, found None in replica {without[0]} "
                f"({self._devices[without[0]]}) and {type(outputs[with_one]).__name__} in replica {with_one} "
                f"({self._devices[with_one]}); the outputs of all are merged, so return {remedy}"
            )
        path = f"what {call} returned"
        if call == "training_step" and not self._manual:
            if all(isinstance(output, Tensor) for output in outputs):
                return merge_loss(outputs, self.sizes, self.home, call)
            if all(isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor) for output in outputs):
                loss = merge_loss([output["loss"] for output in outputs], self.sizes, self.home, call)
                rest = [{key: value for key, value in output.items() if key != "loss"} for output in outputs]
                return {"loss": loss, **self.merge(rest, path)}
        return self.merge(outputs, path)

    # -- what replicas' methods, optimizers and metrics need ------------------------------------------

    def toggle(self, replica: int, optimizer: Any, on: bool) -> None:
        """Calls ``toggle_optimizer`` or ``untoggle_optimizer`` once for all replicas."""
        self._methods.toggle(replica, optimizer, on)

    def meet(self, replica: int, call: str, value: Any, once: Callable[[list[Any]], Any]) -> Any:
        """As :meth:`Lockstep.meet`; ``once`` sees the LightningModule as it is outside of steps."""

        def outside(values: list[Any]) -> Any:
            with self.outside():
                return once(values)

        if self._has_ended:
            raise RuntimeError(
                f"expected what a step calls to be of that step, found {call} of one that has ended; call "
                "self.optimizers() and self.lr_schedulers() in each step, and keep none of what they return"
            )
        replica = self.current(replica)
        handled = sys.exc_info()[1]
        if handled is getattr(self._thread, "handled", None):  # as the step began
            handled = None
        with self._turns.away(replica):
            return self._lockstep.meet(replica, call, value, outside, handled)

    def merge(self, values: Sequence[Any], path: str) -> Any:
        """Merges one value per replica, with warnings where it may have been meant otherwise."""
        return merge(values, self.sizes, self.home, path, self._doubts)

    def current(self, replica: int) -> int:
        """The replica whose thread this is, which may have got at another replica's things by a reference it kept."""
        return getattr(self._thread, "replica", replica)

    def renew(self) -> None:
        """Brings the replicas' parameters up to date, in the middle of a step."""
        with torch.enable_grad():  # wherever the step has put its call
            self._replicas.refresh_parameters(len(self._devices))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, the LightningModule is the first replica."""
        self._take_as_unchanged()
        with self._exchanged(outside=False):
            yield

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside, which is within :meth:`inside`, the LightningModule is as it is outside of steps."""
        self._check()
        with self._exchanged(outside=True):
            yield
        self._take_as_unchanged()

    def _check(self) -> None:
        """Looks whether the replicas have changed what is only changed outside."""
        if self._params is not None:
            self._params.check()
        if self._gradients is not None:
            self._gradients.check()

    def _take_as_unchanged(self) -> None:
        if self._params is not None:
            self._params.renew()
        if self._gradients is not None:
            self._gradients.renew()

    @contextmanager
    def _exchanged(self, outside: bool) -> Iterator[None]:
        self._entries = _put(self._entries)
        self._is_outside = outside
        try:
            yield
        finally:
            self._is_outside = not outside
            self._entries = _put(self._entries)

    @contextmanager
    def _watched_gradients(self) -> Iterator[None]:
        """Inside, a backward that is not Lightning's raises: each replica would add its own, unweighted gradients."""

        def require_manual_backward(_: Tensor) -> None:
            if not self._is_outside:
                raise RuntimeError(
                    "expected backward by self.manual_backward(loss), as the mean of the replicas' losses is "
                    "differentiated, found one of a replica's own; replace loss.backward() by it"
                )

        handles = [
            param.register_post_accumulate_grad_hook(require_manual_backward)
            for param in self._module.parameters()
            if self._manual and param.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _watched_optimizers(self) -> AbstractContextManager[None]:
        optimizers = self._module.trainer.optimizers if self._hook == "training_step" else []
        return watched_optimizers(optimizers, self._hook, lambda: self._is_outside)


def _put(entries: list[_Entry]) -> list[_Entry]:
    """Puts values in namespaces, and returns what undoes it."""
    before = [(namespace, key, namespace.get(key, _ABSENT)) for namespace, key, _ in entries]
    for namespace, key, value in entries:
        if value is _ABSENT:
            namespace.pop(key, None)
        else:
            namespace[key] = value
    return before


def _place(replica: torch.nn.Module, device: torch.device) -> None:
    """Has ``self.device`` be the replica's, in nested LightningModules and metrics too.

    ``zero_grad`` does nothing in it: the gradients are the original's, and the first replica's to let go of.
    """
    for module in replica.modules():
        vars(module)["zero_grad"] = do_nothing
        # Private, as the property has no setter; Lightning sets it the same way before `setup`.
        if "_device" in vars(module) and hasattr(type(module), "device"):
            vars(module)["_device"] = device
