"""Buckets without memory of their own: gradients stay where autograd put them, and are coalesced after backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_bucketddp.grads.bucket_runs import BucketRun, BucketRuns
from lightning_bucketddp.grads.buffers import GradBuffers
from lightning_bucketddp.layout.plan import Layout


class CoalescedRuns(BucketRuns):
    """All buckets of the present layout, in memory that exists from the end of backward to the end of the pass.

    ``.grad`` stays the tensor that it is. In exchange gradients are there twice during the reduction, are copied
    twice, and nothing is reduced while backward runs.
    """

    def _make_buffers(self) -> None:
        self._layout = self._slots.plan()
        self._buffers = GradBuffers(Layout((), (), ()))

    @property
    def layout(self) -> Layout:
        """Where the gradients lie during a reduction."""
        return self._layout

    def relayout(self) -> None:
        """Lays the buckets out by what the slot table knows now."""
        self._forget_runs()
        before, self._layout = self._layout, self._slots.plan()
        if self.comm_hook is not None and self._layout != before:
            self.comm_hook.forget_buckets()
        self._make_runs()

    def _memory(self, index: int) -> Tensor:
        return torch.empty(0, device=self.device)

    def _bind_main_grads(self) -> None:
        """Nothing: there is no memory that a parameter could refer to."""
        self._main_grads_bound = True

    def zero(self) -> None:
        """Sets all gradients that are there to zero."""
        grads = [param.grad for param in self._slots.params if param.grad is not None]
        if grads:
            torch._foreach_zero_(grads)
        self.contributing.clear()

    def _require_contents(self) -> None:
        """Makes the memory of the pass, if there is none yet."""
        if self._buffers.layout is not self._layout:
            self._buffers = GradBuffers(self._layout)
            for run, bucket in zip(self._runs, self._layout.buckets, strict=True):
                run.flat = self._buffers.bucket_flat(bucket)

    def hold(self, slots: Sequence[int]) -> None:
        """Nothing: gradients stay where they are."""

    def _launch(self, run: BucketRun) -> None:
        self._require_contents()
        super()._launch(run)

    def launch_rest_as_they_are(self, on_idle: Callable[[], None]) -> None:
        """As for buckets with memory of their own."""
        self._require_contents()
        super().launch_rest_as_they_are(on_idle)

    def _divisor(self, run: BucketRun) -> int | None:
        """None: gradients are averaged where they have been copied together."""
        return None

    def _hide(self, slot: int) -> None:
        """Nothing: gradients stay where they are."""

    def _keep(self, slot: int, grad: Tensor) -> None:
        """Nothing: gradients stay what they are."""

    def publish(self, run: BucketRun) -> list[int]:
        """Writes reduced gradients of a bucket back; returns the slots not used on this rank."""
        unused: list[int] = []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for slot in run.slots:
            grad = self._slots.params[slot].grad
            if slot not in self.contributing:
                unused.append(slot)
            elif grad is not None:
                targets.append(grad)
                sources.append(self._buffers.views[slot])
        if targets:
            torch._foreach_copy_(targets, sources)
        return unused

    def publish_unused(self, slot: int, used_elsewhere: bool) -> None:
        """A parameter without a gradient here: the mean if another rank had one, else what is there."""
        param = self._slots.params[slot]
        if not used_elsewhere:
            self._forget(slot)
        elif param.grad is None:
            param.grad = self._buffers.views[slot].clone()
        else:
            param.grad.copy_(self._buffers.views[slot])

    def _move_out(self, run: BucketRun) -> None:
        """Nothing: gradients stay where they are."""

    def end(self) -> None:
        """Ends a synchronised pass, and frees its memory."""
        super().end()
        self._free()

    def release(self) -> None:
        """Frees the memory of a pass that was not ended."""
        self._free()
        super().release()

    def _free(self) -> None:
        for run in self._runs:
            run.flat = torch.empty(0, device=self.device)
            run.pending = None
        self._buffers = GradBuffers(Layout((), (), ()))
