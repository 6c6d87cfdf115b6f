"""What a step does by itself in every replica, though one device would have done it once: found, and said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn


class SharedParameters:
    """Parameters that several replicas hold, which a step may only change where it is done once for all of them.

    Args:
        module: The LightningModule.
        others: The other replicas on its device.
        hook: The step's name, for messages.
        warned: What has been warned of before, and need not be again.
    """

    def __init__(self, module: nn.Module, others: Sequence[nn.Module], hook: str, warned: set[str]) -> None:
        shared = {id(param) for other in others[:1] for param in other.parameters()}
        self._params = [
            (name, param)
            for name, param in (module.named_parameters() if shared else ())
            if id(param) in shared and not param.is_inference()
        ]
        self._hook = hook
        self._warned = warned
        self.renew()

    def renew(self) -> None:
        """Takes the parameters as they are now for unchanged."""
        # Private, as there is no public way to see that a tensor was changed in place.
        self._versions = [param._version for _, param in self._params]

    def check(self) -> None:
        """Warns if a parameter has changed."""
        changed = [
            name
            for (name, param), version in zip(self._params, self._versions, strict=True)
            if param._version != version
        ]
        key = f"parameters in {self._hook}"
        if changed and key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(
                f"expected {self._hook} to leave parameters as they are, found {', '.join(changed[:3])} changed by it, "
                "and so by all replicas at once, which share them; do it once, in on_train_batch_end or "
                "on_before_optimizer_step"
            )


class Gradients:
    """Gradients of the LightningModule, which a step of manual optimisation may only change once for all replicas.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._params = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        self.renew()

    def renew(self) -> None:
        """Takes the gradients as they are now for unchanged."""
        # Private, as there is no public way to see that a tensor was changed in place.
        self._found = [(grad, grad._version) if (grad := param.grad) is not None else None for _, param in self._params]

    def check(self) -> None:
        """Requires that gradients are the same, or were set to None or zero, which may happen several times.

        Raises:
            RuntimeError: If a gradient has changed.
        """
        changed = [
            name
            for (name, param), found in zip(self._params, self._found, strict=True)
            if (grad := param.grad) is not None
            and (found is None or found[0] is not grad or found[1] != grad._version)
            and bool(grad.any())
        ]
        if changed:
            raise RuntimeError(
                "expected training_step to change gradients where it is done once for all replicas, found that of "
                f"{', '.join(changed[:3])} changed by a replica itself; replace torch.nn.utils.clip_grad_norm_ by "
                "self.clip_gradients(optimizer, gradient_clip_val=..., gradient_clip_algorithm=...), and do other "
                "things in on_before_optimizer_step"
            )


@contextmanager
def watched_optimizers(optimizers: Sequence[Any], hook: str, is_outside: Callable[[], bool]) -> Iterator[None]:
    """Inside, an optimizer that is stepped by a replica itself raises: it would step once in each.

    Args:
        optimizers: The Trainer's.
        hook: The step's name, for messages.
        is_outside: Whether something is being done for all replicas.
    """

    def require_outside(optimizer: Any, *_: Any) -> None:
        if not is_outside():
            raise RuntimeError(
                f"expected {hook} to step optimizers that it gets by self.optimizers(), which step once for all "
                f"replicas, found {type(optimizer).__name__}.step() called by a replica itself; replace "
                "self.trainer.optimizers, or wherever the optimizer was kept, by self.optimizers()"
            )

    handles = [
        optimizer.register_step_pre_hook(require_outside)
        for optimizer in optimizers
        if isinstance(optimizer, torch.optim.Optimizer)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Counters:
    """Numbers that are attributes of the LightningModule and its modules, which keep those that the first replica sets.

    Args:
        module: The LightningModule.
        others: The other replicas, before their step.
        sizes: How many samples each replica has.
        hook: The step's name, for messages.
        warned: What has been warned of before, and need not be again.
    """

    def __init__(
        self, module: nn.Module, others: Sequence[nn.Module], sizes: Sequence[int], hook: str, warned: set[str]
    ) -> None:
        named = list(module.named_modules())
        self._found = [
            (name, vars(kept), vars(part), dict(vars(part)), size)
            for other, size in zip(others, sizes[1:], strict=True)
            for (name, kept), part in zip(named, other.modules(), strict=True)
            if not type(part).__module__.startswith("torch.nn.")  # which count nothing
        ]
        self._hook = hook
        self._warned = warned

    def check(self) -> None:
        """Warns if the share of another replica is lost: if it has set another number, or added that of its samples."""
        for path, kept, now, before, size in self._found:
            for key, value in now.items():
                was = before.get(key)
                if value is was or not (_is_number(value) and _is_number(was)):
                    continue
                name = f"{path}.{key}" if path else key
                if name in self._warned or not self._is_lost(kept.get(key), value, was, size):
                    continue
                self._warned.add(name)
                rank_zero_warn(
                    f"expected {self._hook} to set self.{name} to the same number in all replicas, and not to one that "
                    "depends on their samples; the first replica's stays, whose samples are a part of the batch. To "
                    "count or add up, use a metric such as SumMetric, a list that is appended to, or self.log(..., "
                    'reduce_fx="sum")'
                )

    def _is_lost(self, kept: Any, value: Any, was: Any, size: int) -> bool:
        plain = _plain(value)
        if not _is_number(kept) or _plain(kept) != plain:
            return True
        return size > 1 and plain - _plain(was) == size


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
