"""The buckets during passes: capture, launch, publish.

This file moves gradients; when it does so is the reducer's business. What a slot contributes to a reduction: what
accumulated since its last one, in whichever passes; or the ``.grad`` it has otherwise; or zeros. Stale content of a
buffer never reaches the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_bucketddp.collectives import Collectives, Pending
from lightning_bucketddp.grad_buffer import GradBuffers
from lightning_bucketddp.layout import Bucket, Layout
from lightning_bucketddp.slots import SlotKind, SlotTable, TrainableSet

MAX_REMEMBERED_SETS = 64
"""Trainable sets whose slots per bucket are remembered; more are worked out again when they come back."""


class BucketRun:
    """One bucket: its memory, and which of its gradients are still awaited in the present pass.

    Attributes:
        slots: Its slots.
        flat: Its contiguous 1-D tensor.
        waiting: Slots whose gradients are expected in this pass and have not come.
        launched: Whether its collective has been started in this pass.
        pending: That collective.
    """

    __slots__ = ("flat", "held_back", "launched", "pending", "slots", "streams", "waiting")

    def __init__(self, bucket: Bucket, flat: Tensor, held_back: bool) -> None:
        self.slots = bucket.slots
        self.flat = flat
        self.held_back = held_back  # may get several gradients for one slot: only the end of backward may launch it
        self.waiting: set[int] = set()
        self.streams: set[torch.Stream] = set()
        self.launched = False
        self.pending: Pending | None = None


class BucketRuns:
    """All buckets of the present layout.

    Args:
        slots: The slots; a layout is made of what the table knows.
        collectives: The group.

    Attributes:
        contributing: Slots with a gradient since their last reduction.
        active: The buckets that take part in the present synchronised pass, in launch order.
        launched: How many of them have been launched.
    """

    def __init__(self, slots: SlotTable, collectives: Collectives) -> None:
        self._slots = slots
        self._collectives = collectives
        self._on_accelerator = any(param.device.type != "cpu" for param in slots.all_params)
        self._buffers = GradBuffers(slots.plan())
        self._make_runs()
        self.contributing: set[int] = set()
        self.active: list[BucketRun] = []
        self.launched = 0
        # Gradients that were there before the pass without anything new in them; the clone if `.grad` is the view.
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}

    @property
    def layout(self) -> Layout:
        """Where the gradients lie now."""
        return self._buffers.layout

    @property
    def views(self) -> list[Tensor]:
        """The view of each slot."""
        return self._buffers.views

    @property
    def device(self) -> torch.device:
        """A device whose tensors the group sends."""
        return self._runs[0].flat.device

    # -- layout --------------------------------------------------------------------------------------

    def _make_runs(self) -> None:
        kinds = self._slots.kinds
        self._runs = [
            BucketRun(
                bucket,
                self._buffers.bucket_flat(bucket),
                held_back=any(kinds[slot] is not SlotKind.NORMAL for slot in bucket.slots),
            )
            for bucket in self._buffers.layout.buckets
        ]
        self._run_of = {slot: run for run in self._runs for slot in run.slots}
        self._expected: dict[TrainableSet, list[tuple[BucketRun, frozenset[int]]]] = {}

    def _forget_runs(self) -> None:
        self._runs.clear()
        self._run_of.clear()
        self._expected.clear()
        self.active.clear()

    def relayout(self) -> None:
        """Lays the buffers out by what the slot table knows now; gradients move along."""
        self._forget_runs()  # they hold the flat tensors, which the buffers may want to give back first
        self._buffers.relayout(self._slots.plan(), self._slots.params)
        self._make_runs()

    def under_way(self) -> bool:
        """Whether collectives were launched that nobody has waited for."""
        return any(run.pending is not None and not run.pending.done() for run in self.active)

    def release(self) -> None:
        """Gives gradients back as plain tensors, and the buffers to the allocator."""
        for param, view in zip(self._slots.params, self._buffers.views, strict=False):
            if param.grad is view:
                param.grad = view.clone()
        self._forget_runs()
        self._kept.clear()
        self._buffers.release()

    def _expected_in(self, trainable: TrainableSet) -> list[tuple[BucketRun, frozenset[int]]]:
        """Per bucket, the slots whose parameters are in the set."""
        found = self._expected.get(trainable)
        if found is None:
            if len(self._expected) >= MAX_REMEMBERED_SETS:
                self._expected.clear()
            found = [
                (run, frozenset(slot for slot in run.slots if self._slots.is_in(slot, trainable))) for run in self._runs
            ]
            self._expected[trainable] = found
        return found

    # -- a pass --------------------------------------------------------------------------------------

    def begin(self, trainable: TrainableSet, reachable: set[int] | None) -> None:
        """Begins to wait for gradients.

        Args:
            trainable: The parameters that may get one in this pass.
            reachable: Ids of the parameters that will, if that is known.
        """
        params = self._slots.params
        for run, expected in self._expected_in(trainable):
            run.launched = False
            if reachable is None:
                run.waiting = set(expected)
            else:
                run.waiting = {slot for slot in expected if id(params[slot]) in reachable}

    def activate(self, trainable: TrainableSet) -> None:
        """Chooses the buckets that this synchronised pass reduces: those with a parameter in the set."""
        self.active = [run for run, slots in self._expected_in(trainable) if slots]
        self.launched = 0

    def arrived(self, slot: int) -> bool:
        """Takes note of a gradient.

        Returns:
            Whether its bucket is complete now.

        Raises:
            RuntimeError: If the gradient comes too late, its bucket being on the wire.
        """
        run = self._run_of[slot]
        if run.launched:
            raise RuntimeError(
                f"rank {self._collectives.rank}: a gradient of parameter {self._slots.specs[slot].name!r} arrived "
                "after its bucket was on its way. It came less often in the first pass than now, as with re-entrant "
                "checkpointing of a varying number of calls; use checkpoint(..., use_reentrant=False)"
            )
        self.contributing.add(slot)
        if self._on_accelerator:
            run.streams.add(torch.accelerator.current_stream(run.flat.device))
        waiting = run.waiting
        if slot in waiting:
            waiting.discard(slot)
            if not waiting:
                self._capture(run)
                return True
        return False

    def awaited(self) -> list[int]:
        """The slots whose gradients have not come in this pass, in launch order."""
        return [slot for run in self.active for slot in sorted(run.waiting)]

    def _capture(self, run: BucketRun) -> None:
        contributing = self.contributing
        self._buffers.capture([slot for slot in run.slots if slot in contributing], self._slots.params)

    def capture_rest(self) -> None:
        """Brings whatever has accumulated into the buffers, complete bucket or not."""
        self._buffers.capture(list(self.contributing), self._slots.params)

    def launch_complete(self) -> None:
        """Launches buckets, in order, up to the first that still waits for a gradient."""
        while self.launched < len(self.active):
            run = self.active[self.launched]
            if run.waiting or run.held_back:
                return
            self._launch(run)

    def launch_rest(self) -> None:
        """Launches all buckets that have not been."""
        while self.launched < len(self.active):
            self._launch(self.active[self.launched])

    def launch_rest_as_they_are(self) -> None:
        """Keeps the others from waiting in a pass that failed here; what is sent will not be used."""
        for run in self.active[self.launched :]:
            run.pending = self._collectives.all_reduce_mean(run.flat)
        self.launched = len(self.active)

    def _launch(self, run: BucketRun) -> None:
        """Starts a bucket's collective; until it is published its parameters have no ``.grad`` to accumulate into."""
        params, views, contributing = self._slots.params, self._buffers.views, self.contributing
        for stream in run.streams:
            torch.accelerator.current_stream(run.flat.device).wait_stream(stream)
        run.streams.clear()
        self._capture(run)
        absent: list[Tensor] = []
        for slot in run.slots:
            param = params[slot]
            grad = param.grad
            if grad is None:
                contributing.discard(slot)  # zero_grad() has dropped what there was
                absent.append(views[slot])
            elif slot not in contributing:
                self._keep(slot, grad)
            param.grad = None
        if absent:
            torch._foreach_zero_(absent)
        run.pending = self._collectives.all_reduce_mean(run.flat)
        run.launched = True
        self.launched += 1

    def _keep(self, slot: int, grad: Tensor) -> None:
        """Lets a gradient without anything new take part, and remembers it should no rank have anything new."""
        if self._buffers.holds(slot, grad):
            self._kept[slot] = (grad, grad.detach().clone())
            return
        self._buffers.require_fit(slot, grad)
        self._buffers.renew(slot, grad)
        self._buffers.views[slot].copy_(grad)
        self._kept[slot] = (grad, None)

    def publish(self, run: BucketRun) -> Iterator[int]:
        """Binds the reduced gradients of a bucket to its parameters; yields the slots not used on this rank."""
        params, views, contributing = self._slots.params, self._buffers.views, self.contributing
        for slot in run.slots:
            if slot in contributing:
                params[slot].grad = views[slot]
            else:
                yield slot

    def publish_unused(self, slot: int, used_elsewhere: bool) -> None:
        """A parameter without a gradient here: the mean if another rank had one, else what was there before."""
        if used_elsewhere:
            self._slots.params[slot].grad = self._buffers.views[slot]
        elif slot in self._kept:
            grad, value = self._kept[slot]
            if value is not None:
                grad.copy_(value)
            self._slots.params[slot].grad = grad

    def end(self) -> None:
        """Ends a synchronised pass."""
        self._kept.clear()
        self.contributing.clear()

    def drop(self) -> None:
        """Lets the gradients of a pass that failed be of no use.

        What accumulated since the last reduction is gone. Other gradients stay what they were, outside of the buffers,
        whose collectives are under way or yet to come.
        """
        params = self._slots.params
        for slot in self.contributing:
            params[slot].grad = None
        for slot, (kept, value) in self._kept.items():
            params[slot].grad = kept if value is None else value
        for run in self.active[self.launched :]:
            for slot in run.slots:
                grad = params[slot].grad
                if grad is not None and self._buffers.holds(slot, grad):
                    params[slot].grad = grad.clone()
        self.end()

    def wait(self, on_idle: Callable[[], None]) -> None:
        """Waits for everything that was launched.

        Args:
            on_idle: Called now and then while the host waits; an exception it raises ends the wait.
        """
        for run in self.active:
            assert run.pending is not None
            run.pending.wait(on_idle)
