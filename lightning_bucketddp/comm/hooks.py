"""Communication hooks: torch's own and the user's, on every backend.

A hook replaces the all-reduce of a bucket. It has torch's signature, ``hook(state, bucket) -> Future[Tensor]``, and
torch's duties: it sends what it likes and divides by the world size itself. Its future's tensor becomes the bucket.
torch's ``GradBucket`` has no constructor, so hooks get an object with the same methods.

Two things do not work: ``batched_powerSGD_hook`` (broken in torch 2.13 itself), and torch's quantization hooks on gloo,
where they fail under torch DDP too.

Some hooks start further collectives when an earlier one has completed (PowerSGD), on the thread that completes it.
With several buckets under way their order would differ between ranks, and wrong tensors would be paired. So a bucket is
launched when the hook has completed the bucket before. Known hooks that start everything at once may have several
buckets under way, and so may all hooks on accelerators, whose own backends complete a collective's future when it has
started.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # documented, not in __all__
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.devices import is_accelerator
from lightning_bucketddp.comm.wire import Pack, real
from lightning_bucketddp.comm.work import FutureHandle, Stage, Stages
from lightning_bucketddp.layout.options import HookName, Options
from lightning_bucketddp.layout.plan import Layout

HookFunction = Callable[[Any, Any], torch.futures.Future[Tensor]]

_NAMED: dict[HookName, HookFunction] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "powersgd": powerSGD_hook,
}
_START_EVERYTHING_AT_ONCE = (
    default_hooks.allreduce_hook,
    default_hooks.bf16_compress_hook,
    default_hooks.fp16_compress_hook,
    noop_hook,
    post_localSGD_hook,
)


class CommHookError(RuntimeError):
    """A communication hook raised, or returned something else than a future of the bucket's size."""


class HookBucket:
    """A bucket as a hook sees it, with the methods of ``torch.distributed.GradBucket``.

    Complex gradients appear as real ones, with a last dimension of 2 for the real and imaginary parts.

    Args:
        layout: The layout.
        index: The bucket's index in it.
        flat: The bucket's tensor.
        params: The parameters of its slots.
        is_last: Whether it is the last bucket of this pass.
    """

    def __init__(self, layout: Layout, index: int, flat: Tensor, params: Sequence[Tensor], is_last: bool) -> None:
        bucket = layout.buckets[index]
        slots = [layout.slots[slot] for slot in bucket.slots]
        names = [slot.spec.name for slot in slots]
        self.description = f"the bucket of {names[0]!r} to {names[-1]!r} ({len(names)} parameters)"
        self._index = index
        self._params = list(params)
        self._is_last = is_last
        parts = 2 if flat.is_complex() else 1
        self._buffer = real(flat)
        self._places = [
            ((slot.offset - bucket.start) * parts, slot.spec.numel * parts, slot.spec.shape + (parts,) * (parts > 1))
            for slot in slots
        ]
        starts = [start for start, *_ in self._places[1:]] + [self._buffer.numel()]
        gaps = [self._buffer[at + n : next_at] for (at, n, _), next_at in zip(self._places, starts, strict=True)]
        # What a hook left between slots (noise, a rounding error) must not add up.
        torch._foreach_zero_([gap for gap in gaps if gap.numel()] or [self._buffer[:0]])

    def index(self) -> int:
        """The bucket's place in the launch order. It changes with the layout alone."""
        return self._index

    def buffer(self) -> Tensor:
        """The gradients as one 1-D tensor, padding included."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the tensor behind :meth:`buffer` and :meth:`gradients` by one of as many elements."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Per parameter, a contiguous view of the present buffer with the parameter's shape, as in torch.

        Elements of gradients with other strides (channels_last) are therefore in another order.
        """
        return [self._buffer[at : at + n].view(shape) for at, n, shape in self._places]

    def parameters(self) -> list[Tensor]:
        """The parameters."""
        return self._params

    def is_last(self) -> bool:
        """Whether this bucket is the last of this pass."""
        return self._is_last


class CommHook:
    """A hook and its state, as registered.

    Args:
        function: The hook.
        state: Its first argument.
        leave_behind: Called with the error when a collective that the hook started may still be under way.

    Attributes:
        name: Qualified name.

    Raises:
        TypeError: If the hook is not callable.
        ValueError: If its annotations say that it takes no bucket, or returns no future.
    """

    def __init__(self, function: HookFunction, state: Any, leave_behind: Callable[[str], None]) -> None:
        if not callable(function):
            raise TypeError(f"Communication hook must be callable. Found {function!r}")  # begins as torch's error
        _require_annotations(function)
        self.name = _qualified_name(function)
        self._function = function
        self._state = state
        self._leave_behind = leave_behind

    def one_at_a_time(self, device: torch.device) -> bool:
        """Whether a bucket waits for the hook to complete the one before.

        Args:
            device: The gradients' device. An accelerator's own backend completes a collective, for the host, when it
                has started. With another one the lane waits.
        """
        return self._function not in _START_EVERYTHING_AT_ONCE and not is_accelerator(device)

    def options(self) -> dict[str, object]:
        """The hook's name and its state's numbers. They must be the same on every rank."""
        options: dict[str, object] = {"comm_hook": self.name}
        if isinstance(self._state, PowerSGDState | PostLocalSGDState):  # they decide how much is sent, and to whom
            for name in self._state.__slots__:
                value = getattr(self._state, name)
                if isinstance(value, bool | int | float):
                    options[f"{type(self._state).__name__}.{name}"] = value
        return options

    def stages(self, show: Callable[[], HookBucket], pack: Pack) -> Stages:
        """Call the hook, and bring its result into the bucket.

        Args:
            show: Makes the bucket as the hook sees it.
            pack: Packs it, before that.

        Raises:
            CommHookError: If the hook raises, or returns something else than a future.
        """
        pack()
        bucket = show()
        target = bucket.buffer()
        with self._naming(bucket), torch.no_grad():
            future = self._function(self._state, bucket)
            if not isinstance(future, torch.Future):
                found = type(future).__name__
                raise TypeError(f"callback must return a torch.futures.Future object, but got {found}")  # as torch's
        yield Stage(FutureHandle(future), followed=False)  # whoever waits for the bucket brings the result there
        self._finish(bucket, future, target)

    @torch.no_grad()
    def _finish(self, bucket: HookBucket, future: torch.Future[Any], target: Tensor) -> None:
        """Copy the hook's result into the bucket's memory."""
        with self._naming(bucket):
            result = future.wait()  # on accelerators the current stream waits, not the host
            if isinstance(result, list | tuple) and len(result) == 1:  # as from Work.get_future()
                result = result[0]
            if not isinstance(result, Tensor) or result.numel() != target.numel():
                found = f"one of {result.numel()}" if isinstance(result, Tensor) else type(result).__name__
                raise TypeError(f"expected its future to hold a tensor of {target.numel()} elements, found {found}")
            if result.data_ptr() != target.data_ptr() or result.dtype is not target.dtype:
                target.copy_(result.reshape(-1))

    @contextmanager
    def _naming(self, bucket: HookBucket) -> Iterator[None]:
        """Turn what the hook raises into an error that names the hook and the bucket."""
        try:
            yield
        except Exception as error:
            why = f"communication hook {self.name!r} failed for {bucket.description}: {type(error).__name__}: {error}"
            self._leave_behind(why)
            raise CommHookError(why) from error

    # -- PowerSGD's memory of buckets ----------------------------------------------------------------

    def forget_buckets(self) -> None:
        """Drop PowerSGD's memory of all buckets: they have changed, or the pass failed."""
        if isinstance(self._state, PowerSGDState):
            self._state.error_dict.clear()
            self._state.p_memory_dict.clear()
            self._state.q_memory_dict.clear()

    def memory(self) -> dict[str, Any]:
        """What PowerSGD remembers, in tensors and simple types. Its errors differ between ranks."""
        if not isinstance(state := self._state, PowerSGDState):
            return {}
        generator: Any = state.rng.get_state()
        tensors = {"errors": state.error_dict, "p": dict(state.p_memory_dict), "q": dict(state.q_memory_dict)}
        return {**tensors, "step": state.iter, "generator": [generator[0], generator[1].tolist(), *generator[2:]]}

    def recall(self, memory: dict[str, Any], device: torch.device) -> None:
        """Remember what an earlier run did, in the same buckets."""
        if isinstance(state := self._state, PowerSGDState) and memory:
            for name, own in (("errors", state.error_dict), ("p", state.p_memory_dict), ("q", state.q_memory_dict)):
                own.update({index: tensor.to(device, copy=True) for index, tensor in memory[name].items()})
            state.iter = memory["step"]
            state.rng.set_state(tuple(memory["generator"]))

    def forget_slot(self, layout: Layout, slot: int) -> None:
        """Drop PowerSGD's error of a slot that no rank used, and its bucket's factors.

        A matrix of zeros leaves zeros or NaNs in the factors for good.
        """
        if not isinstance(self._state, PowerSGDState):
            return
        index = next(at for at, bucket in enumerate(layout.buckets) if slot in bucket.slots)
        self._state.p_memory_dict.pop(index, None)
        self._state.q_memory_dict.pop(index, None)
        error = self._state.error_dict.get(index)
        if error is not None:
            bucket, place = layout.buckets[index], layout.slots[slot]
            parts = len(error) // bucket.numel  # 2 for complex gradients, which the hook sees as real ones
            at = (place.offset - bucket.start) * parts
            error[at : at + place.spec.numel * parts].zero_()


def _require_annotations(function: HookFunction) -> None:
    """Require that a hook's annotations, where it has some that can be read, allow a bucket and a future.

    Raises:
        ValueError: If one does not. It begins as torch's errors do.
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except Exception:  # no signature, or annotations with names that type checkers alone know
        return
    bucket = signature.parameters.get("bucket")
    for what, wanted, classes, found in (
        ("bucket", "dist.GradBucket", (GradBucket, HookBucket), Any if bucket is None else bucket.annotation),
        ("return", "torch.futures.Future[torch.Tensor]", (torch.futures.Future,), signature.return_annotation),
    ):
        # Protocols, and what is more than a class, may allow anything.
        plain = isinstance(found, type) and Protocol not in found.__mro__
        mistaken = plain and not any(issubclass(kind, found) or issubclass(found, kind) for kind in classes)
        if found is None or (mistaken and found not in (Any, inspect.Signature.empty)):
            raise ValueError(f"Communication hook: {what} annotation should be {wanted}. Found {found}")


def choose_hook(options: Options, collectives: Collectives) -> CommHook | None:
    """The hook that the options ask for.

    Args:
        options: Have a hook, the name of one, or None. ``"powersgd"`` takes a ``PowerSGDState``; the other named hooks
            take no state.
        collectives: The group that named hooks use.

    Raises:
        ValueError: If the state is not the hook's.
    """
    hook, state = options.comm_hook, options.comm_hook_state
    if hook is None or hook in ("bf16", "fp16"):
        if state is not None:
            raise ValueError(f"expected comm_hook_state to be None with comm_hook={hook!r}, found {state!r}")
        state = collectives.group
    elif hook == "powersgd":
        state = _power_sgd_state(state, collectives.group)
    if hook is None:
        return None
    return CommHook(_NAMED[hook] if isinstance(hook, str) else hook, state, collectives.leave_behind)


def _power_sgd_state(state: Any, group: dist.ProcessGroup) -> PowerSGDState:
    if state is None:  # epsilon: without one a gradient of zeros becomes NaN
        return PowerSGDState(process_group=group, orthogonalization_epsilon=1e-8)
    if not isinstance(state, PowerSGDState):
        raise ValueError(f"expected comm_hook_state to be a PowerSGDState, found a {type(state).__name__}")
    if state.process_group not in (None, group):
        raise ValueError("expected a PowerSGDState with the wrapper's process group (or None), found another group")
    state.process_group = group
    return state


def _qualified_name(function: Any) -> str:
    if isinstance(function, partial):
        return _qualified_name(function.func)
    if not hasattr(function, "__qualname__"):
        function = type(function)
    return f"{function.__module__}.{function.__qualname__}"
