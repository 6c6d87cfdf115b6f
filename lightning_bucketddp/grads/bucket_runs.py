"""The buckets during passes: pack, launch, publish.

This file moves gradients; when it does so is the reducer's business. What a slot contributes to a reduction: what
accumulated since its last one, in whichever passes; or the ``.grad`` it has otherwise; or zeros. Stale content of a
buffer never reaches the wire.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.hooks import CommHook, HookBucket
from lightning_bucketddp.comm.work import Work
from lightning_bucketddp.grads.buffers import GradBuffers
from lightning_bucketddp.grads.checks import require_sound
from lightning_bucketddp.grads.slots import SlotKind, SlotTable, TrainableSet
from lightning_bucketddp.layout.plan import MIB, Bucket, Layout

OUTSIDE_BYTES = 16 * MIB
"""Gradients that lie outside of the buffers at most, where buckets do not limit them."""

NONE: frozenset[int] = frozenset()

MAX_REMEMBERED_SETS = 64
"""Trainable sets whose slots per bucket are remembered; more are worked out again when they come back."""


class BucketRun:
    """One bucket: its memory, and which of its gradients are still awaited in the present pass.

    Attributes:
        index: Its place in the layout.
        slots: Its slots.
        flat: Its contiguous 1-D tensor.
        waiting: Slots whose gradients are expected in this pass and are not ready.
        launched: Whether its collective has been started in this pass.
        launched_at: When, on ``time.perf_counter``.
        pending: That collective.
    """

    __slots__ = (
        "flat",
        "held_back",
        "index",
        "launched",
        "launched_at",
        "pending",
        "slots",
        "waiting",
    )

    def __init__(self, index: int, bucket: Bucket, flat: Tensor, held_back: bool) -> None:
        self.index = index
        self.slots = bucket.slots
        self.flat = flat
        self.held_back = held_back  # may get several gradients for one slot: only the end of backward may launch it
        self.waiting: set[int] = set()
        self.launched = False
        self.launched_at = 0.0
        self.pending: Work | None = None


class BucketRuns:
    """All buckets of the present layout.

    Args:
        slots: The slots; a layout is made of what the table knows.
        collectives: The group.
        overlap: Whether buckets are launched as they become complete; if not, all of them at the end of backward.
        max_abs_grad: Gradients beyond this in absolute value, or not finite, are refused; None: not looked at.
        wire_dtype: In which gradients travel, as for :meth:`Collectives.all_reduce_mean`.

    Attributes:
        comm_hook: What reduces the buckets instead of an all-reduce, if there is such a hook.
        contributing: Slots with a gradient since their last reduction.
        settled: Slots whose gradients need no more attention in this pass: in a local one those that contribute
            already, as autograd adds to their gradients in place.
        marks_only: Whether a gradient of this pass has only to be marked as ready until its bucket is full.
        run_of: The bucket of each slot.
        streams: The streams of accelerators on which gradients were made.
        active: The buckets that take part in the present synchronised pass, in launch order.
        launched: How many of them have been launched.
        awaited_run: The bucket whose collective was waited for last.
    """

    def __init__(
        self,
        slots: SlotTable,
        collectives: Collectives,
        overlap: bool = True,
        max_abs_grad: float | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._slots = slots
        self._collectives = collectives
        self._overlap = overlap
        self._max_abs_grad = max_abs_grad
        self.wire_dtype = wire_dtype
        self.comm_hook: CommHook | None = None
        self._on_accelerator = any(param.device.type != "cpu" for param in slots.all_params)
        self._make_buffers()
        self._make_runs()
        self.contributing: set[int] = set()
        self.settled: AbstractSet[int] = NONE
        self.marks_only = False
        self.streams: set[torch.Stream] = set()
        self._bucket_by_bucket = False  # whether gradients should come so in this pass
        self._contributed_before: set[int] = set()  # this local pass
        self.active: list[BucketRun] = []
        self.launched = 0
        self.awaited_run: BucketRun | None = None
        self._known_clear = False
        self._outside: list[int] = []  # slots whose gradients lie where autograd put them
        self._outside_bytes = 0
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
        return self._slots.all_params[0].device  # there may be no bucket, all gradients being sparse

    # -- layout --------------------------------------------------------------------------------------

    def _make_buffers(self) -> None:
        self._buffers = GradBuffers(self._slots.plan())

    def _memory(self, index: int) -> Tensor:
        """The contiguous 1-D tensor of a bucket."""
        return self._buffers.bucket_flat(self._buffers.layout.buckets[index])

    def _make_runs(self) -> None:
        kinds = self._slots.kinds
        self._runs = [
            BucketRun(
                index,
                bucket,
                self._memory(index),
                held_back=not self._overlap or any(kinds[slot] is not SlotKind.NORMAL for slot in bucket.slots),
            )
            for index, bucket in enumerate(self.layout.buckets)
        ]
        self._nbytes = [spec.nbytes for spec in self._slots.specs]
        self._with_main_grad = frozenset(self._slots.with_main_grad())
        self._bind_main_grads()
        self._largest_bucket = max((self.layout.bucket_nbytes(it) for it in self.layout.buckets), default=0)
        run_of = {slot: run for run in self._runs for slot in run.slots}
        self.run_of = [run_of[slot] for slot in range(len(run_of))]
        self._expected: dict[TrainableSet, list[tuple[BucketRun, frozenset[int]]]] = {}

    def _bind_main_grads(self) -> None:
        for slot in self._slots.with_main_grad():
            self._slots.params[slot].main_grad = self._buffers.views[slot]  # type: ignore[attr-defined]
        self._main_grads_bound = True

    def unbind_main_grads(self) -> None:
        """Takes ``main_grad`` away from the parameters."""
        for slot in self._slots.with_main_grad():
            self._slots.params[slot].__dict__.pop("main_grad", None)
        self._main_grads_bound = False

    def require_main_grads(self) -> None:
        """Gives ``main_grad`` back if it was taken away."""
        if not self._main_grads_bound:
            self._bind_main_grads()

    def _forget_runs(self) -> None:
        self.unbind_main_grads()
        self._runs.clear()
        self.run_of.clear()
        self._expected.clear()
        self.active.clear()

    def relayout(self) -> None:
        """Lays the buffers out by what the slot table knows now; gradients move along."""
        self._forget_runs()  # they hold the flat tensors, which the buffers may want to give back first
        before = self._buffers.layout
        self._buffers.relayout(self._slots.plan(), self._slots.params)
        if self.comm_hook is not None and self._buffers.layout != before:
            self.comm_hook.forget_buckets()
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

    # -- between passes ------------------------------------------------------------------------------

    def zero(self) -> None:
        """Sets all gradients to zero, in the buffers: one fill for each of them."""
        for flat in self._buffers.flats:
            flat.zero_()
        for slot, param in enumerate(self._slots.params):
            if param.requires_grad:
                self._buffers.bind(slot, param)
            elif param.grad is not None:
                param.grad.zero_()
        self.contributing.clear()
        self._known_clear = True

    def contribute_present(self) -> None:
        """Lets every gradient that is there take part in the next reduction, wherever it came from."""
        self.contributing.update(slot for slot, param in enumerate(self._slots.params) if param.grad is not None)

    def before_gradients(self) -> None:
        """A backward is about to add to what is in ``.grad``, if the pass was opened in time."""

    def no_gradient_came(self) -> None:
        """A backward has ended without a gradient, as `torch.autograd.grad` does."""

    def require_untouched(self, slot: int) -> None:
        """Requires that nothing was added to a gradient before :meth:`before_gradients`, where that matters."""

    def _published_grad(self, slot: int) -> Tensor | None:
        """What lies in ``.grad``, as far as this rank holds it."""
        return self._slots.params[slot].grad

    def first_uncleared(self) -> str | None:
        """The first parameter whose ``.grad`` is not zero and not what accumulated since the last reduction."""
        if self._known_clear:
            return None
        old = [
            (slot, grad)
            for slot in range(len(self._slots))
            if (grad := self._published_grad(slot)) is not None and slot not in self.contributing and grad.numel()
        ]
        if not old:
            return None
        norms = torch.stack([norm.double() for norm in torch._foreach_norm([grad for _, grad in old])])
        for (slot, _), norm in zip(old, norms.tolist(), strict=True):
            if norm:
                return self._slots.specs[slot].name
        return None

    def holds_gradients(self) -> bool:
        """Whether any parameter still has what accumulated since the last reduction."""
        return any(self._slots.params[slot].grad is not None for slot in self.contributing)

    def holds_reduced(self) -> bool:
        """Whether any parameter has a gradient that is not what accumulated since the last reduction."""
        contributing = self.contributing
        return any(param.grad is not None and slot not in contributing for slot, param in enumerate(self._slots.params))

    # -- a pass --------------------------------------------------------------------------------------

    def begin(
        self, trainable: TrainableSet, reachable: set[int] | None, local: bool = False, in_order: bool = True
    ) -> None:
        """Begins to wait for gradients.

        Args:
            trainable: The parameters that may get one in this pass.
            reachable: Ids of the parameters that will, if that is known.
            local: Whether they are not to travel yet.
            in_order: Whether they should come bucket by bucket.
        """
        self._bucket_by_bucket = in_order and self._overlap
        self._contributed_before = self.contributing.copy() if local else set()
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

    def settle_local(self) -> None:
        """A local pass has begun."""
        self.settled = self.contributing

    def may_only_mark(self) -> bool:
        """Whether a gradient has only to be marked in this pass: buckets become full, and its stream is known."""
        return self._bucket_by_bucket and (not self._on_accelerator or len(self.streams) == 1)

    def ready(self, slot: int) -> BucketRun | None:
        """Note that a gradient is ready.

        Returns:
            Its bucket if that is full now.

        Raises:
            RuntimeError: If the gradient comes too late, its bucket being on the wire.
        """
        run = self.run_of[slot]
        if run.launched:
            raise RuntimeError(self._too_late(slot))
        self.contributing.add(slot)
        if self._on_accelerator:
            self.streams.add(torch.accelerator.current_stream(self._slots.params[slot].device))
        run.waiting.discard(slot)
        if self._bucket_by_bucket:
            return None if run.waiting else run
        self._outside.append(slot)
        self._outside_bytes += self._nbytes[slot]
        if self._outside_bytes >= min(OUTSIDE_BYTES, self._largest_bucket):
            self._hold_outside()
        return None

    def awaited(self) -> list[int]:
        """The slots whose gradients have not come in this pass, in launch order."""
        return [slot for run in self.active for slot in sorted(run.waiting)]

    def hold(self, slots: Sequence[int]) -> None:
        """Pack gradients that do not travel yet and bind their views: they exist once, and autograd adds to them."""
        self._wait_for_streams()
        params = self._slots.params
        fresh: list[int] = []
        grads: list[Tensor] = []
        for slot in slots:
            grad = params[slot].grad
            if grad is not None and slot in self.contributing and not self._buffers.holds(slot, grad):
                fresh.append(slot)
                grads.append(grad)
        self._buffers.pack(fresh, grads)
        for slot in fresh:
            self._buffers.bind(slot, params[slot])

    def _hold_outside(self) -> None:
        self.hold(self._outside)
        self._outside, self._outside_bytes = [], 0

    def _wait_for_streams(self) -> None:
        """Lets what is done next see the gradients that were made on other streams."""
        for stream in self.streams:
            current = torch.accelerator.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)
                self._buffers.made_elsewhere = True

    def end_local(self) -> None:
        """Ends a local pass: brings all its gradients into the buffers."""
        # Somebody may look at a main_grad, whatever zero_grad() has dropped.
        self.hold(sorted(self.contributing if self._with_main_grad else self.contributing - self._contributed_before))
        self._outside, self._outside_bytes = [], 0

    def launch_complete(self) -> None:
        """Launches buckets, in order, up to the first that still waits for a gradient, or for its turn.

        Whether it is a bucket's turn is a matter of timing, but only moves its launch to a later point before the
        end of the pass, with no other collective in between.
        """
        while self.launched < len(self.active):
            run = self.active[self.launched]
            before = self._must_end_first()
            if run.waiting or run.held_back or (before is not None and not before.done()):
                return
            self._launch(run)

    def _too_late(self, slot: int) -> str:
        return (
            f"rank {self._collectives.rank}: a gradient of parameter {self._slots.specs[slot].name!r} arrived "
            "after its bucket was on its way. It came less often in the first pass than now, as with re-entrant "
            "checkpointing of a varying number of calls; use checkpoint(..., use_reentrant=False)"
        )

    def launch_rest(self, on_idle: Callable[[], None]) -> None:
        """Launches all buckets that have not been.

        Args:
            on_idle: Called now and then while the host waits for a bucket's turn; an exception it raises ends the wait.
        """
        while self.launched < len(self.active):
            if (before := self._must_end_first()) is not None:
                before.proceed(on_idle)
            self._launch(self.active[self.launched])

    def launch_rest_as_they_are(self, on_idle: Callable[[], None]) -> None:
        """Keeps the others from waiting in a pass that failed here; what is sent will not be used.

        Args:
            on_idle: As for :meth:`launch_rest`.
        """
        while self.launched < len(self.active):
            if (before := self._must_end_first()) is not None:
                before.proceed(on_idle)
            run = self.active[self.launched]
            run.pending = self._start(run)
            self.launched += 1

    def _must_end_first(self) -> Work | None:
        """What has to be completed before the next bucket is launched."""
        if self.comm_hook is None or not self.comm_hook.one_at_a_time or not self.launched:
            return None
        return self.active[self.launched - 1].pending

    def _divisor(self, run: BucketRun) -> int | None:
        """What gradients are divided by on their way into the bucket; the same in all passes and on all ranks."""
        if self.comm_hook is not None:
            return None
        return self._collectives.divisor_before(run.flat.dtype, run.flat.device, self.wire_dtype)

    def _start(self, run: BucketRun) -> Work:
        if self.comm_hook is None:
            return self._collectives.all_reduce_mean(run.flat, self.wire_dtype, divided=self._divisor(run) is not None)
        params = [self._slots.params[slot] for slot in run.slots]
        return self.comm_hook.start(HookBucket(self.layout, run.index, run.flat, params, run is self.active[-1]))

    def _launch(self, run: BucketRun) -> None:
        """Starts a bucket's collective; until it is published its parameters have no ``.grad`` to accumulate into."""
        if self._max_abs_grad is not None:
            self.hold(run.slots)
            self._require_sound(run, self._max_abs_grad)
        self._wait_for_streams()
        divisor = self._divisor(run)
        self.pack(run, None if divisor is None else 1.0 / divisor)
        run.pending = self._start(run)
        run.launched = True
        run.launched_at = time.perf_counter()
        self.launched += 1

    def _require_sound(self, run: BucketRun, limit: float) -> None:
        """Requires that what a bucket is about to send is finite and within the limit. The host waits for it."""
        params = self._slots.params
        present = [(slot, g) for slot in run.slots if (g := params[slot].grad) is not None and g.numel()]
        if not present:
            return
        largest = torch.stack([norm.double() for norm in torch._foreach_norm([g for _, g in present], math.inf)])
        for (slot, _), value in zip(present, largest.tolist(), strict=True):
            require_sound(value, limit, self._collectives.rank, self._slots.specs[slot].name)

    def pack(self, run: BucketRun, scale: float | None) -> None:
        """Bring a bucket's gradients into its memory, scaled, and hide them until they are published.

        The loops run for every parameter in every pass.

        Args:
            run: The bucket.
            scale: What they are multiplied by on the way; None for no scaling.
        """
        params, views, contributing = self._slots.params, self._buffers.views, self.contributing
        slots: list[int] = []
        grads: list[Tensor] = []
        absent: list[int] = []
        for slot in run.slots:
            grad = params[slot].grad
            if grad is None:
                absent.append(slot)
                continue
            if slot not in contributing:
                self._keep(slot, grad)
            slots.append(slot)
            grads.append(grad)
        self._buffers.pack(slots, grads, scale, run.flat)
        if absent:
            contributing.difference_update(absent)  # zero_grad() has dropped what there was
            torch._foreach_zero_([views[slot] for slot in absent])
        for slot in slots:
            self._hide(slot)

    def _hide(self, slot: int) -> None:
        self._slots.params[slot].grad = None

    def _keep(self, slot: int, grad: Tensor) -> None:
        """Remember a gradient without anything new, should no rank have anything new."""
        self._kept[slot] = (grad, grad.detach().clone() if self._buffers.holds(slot, grad) else None)

    def publish(self, run: BucketRun) -> list[int]:
        """Binds the reduced gradients of a bucket to its parameters; returns the slots not used on this rank."""
        params, views, contributing = self._slots.params, self._buffers.views, self.contributing
        unused: list[int] = []
        for slot in run.slots:
            if slot not in contributing:
                unused.append(slot)
            elif slot in self._with_main_grad:
                self._buffers.bind(slot, params[slot])
            else:
                params[slot].grad = views[slot]
        return unused

    def publish_unused(self, slot: int, used_elsewhere: bool) -> None:
        """A parameter without a gradient here: the mean if another rank had one, else what was there before."""
        if used_elsewhere:
            self._buffers.bind(slot, self._slots.params[slot])
            return
        self._forget(slot)
        self._put_back(slot)

    def _forget(self, slot: int) -> None:
        if self.comm_hook is not None:
            self.comm_hook.forget_slot(self.layout, self.run_of[slot].index, slot)

    def _put_back(self, slot: int) -> None:
        if slot in self._kept:
            grad, value = self._kept[slot]
            if value is not None:
                grad.copy_(value)
            self._slots.params[slot].grad = grad

    def rescale(self, factor: float | Tensor) -> None:
        """Multiplies what was reduced.

        Args:
            factor: A number, or a tensor of no dimension on :attr:`device`.
        """
        for run in self.active:
            run.flat.mul_(factor.to(run.flat.device) if isinstance(factor, Tensor) else factor)

    def end(self) -> None:
        """Ends a synchronised pass."""
        self._kept.clear()
        self._outside, self._outside_bytes = [], 0
        self.awaited_run = None
        self.contributing = set()  # not cleared: the notes of the pass keep the old one
        self._known_clear = False

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
        self._outside, self._outside_bytes = [], 0
        for run in self.active[self.launched :]:
            self._move_out(run)
        self._kept.clear()
        self.contributing.clear()

    def _move_out(self, run: BucketRun) -> None:
        for slot in run.slots:
            param = self._slots.params[slot]
            if param.grad is not None and self._buffers.holds(slot, param.grad):
                param.grad = param.grad.clone()

    def forget_sent(self) -> None:
        """What was sent in this pass is of no use, on any rank."""
        if self.comm_hook is not None:
            self.comm_hook.forget_buckets()

    def proceed(self, on_idle: Callable[[], None]) -> None:
        """Gets every launched bucket to where the collectives that follow may be started.

        Args:
            on_idle: As for :meth:`wait`.
        """
        for run in self.active:
            assert run.pending is not None
            self.awaited_run = run
            run.pending.proceed(on_idle)

    def wait(self, on_idle: Callable[[], None]) -> None:
        """Waits for everything that was launched.

        Args:
            on_idle: Called now and then while the host waits; an exception it raises ends the wait.
        """
        for run in self.active:
            assert run.pending is not None
            self.awaited_run = run
            run.pending.wait(on_idle)
