"""What a step does by itself in every replica, though one device would have done it once: found, and said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric, MetricCollection

OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has."""

_MANY = 1000
"""Longer lists are what steps have collected, not copies of a module's parameters."""


class SharedParameters:
    """Tensors that several replicas hold, which a step may only change where it is done once for all of them.

    These are parameters, and tensors that are attributes, or in lists or dicts that are.

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
        self._plain = list(_plain_tensors(module)) if others else []
        self._hook = hook
        self._warned = warned
        self.renew()

    def renew(self) -> None:
        """Takes the tensors as they are now for unchanged."""
        self._versions = _versions(self._params)
        self._plain_versions = _versions(self._plain)

    def check(self) -> None:
        """Warns if a tensor has changed."""
        self._check_plain()
        changed = _changed(self._params, self._versions)
        key = f"parameters in {self._hook}"
        if changed and key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(
                f"expected {self._hook} to leave parameters as they are, found {', '.join(changed[:3])} changed by it, "
                "and so once by every replica that shares them; do it once, in on_train_batch_end or "
                "on_before_optimizer_step"
            )

    def _check_plain(self) -> None:
        changed = _changed(self._plain, self._plain_versions)
        key = f"tensors in {self._hook}"
        if changed and key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(
                f"expected {self._hook} to leave tensors that replicas share as they are, found "
                f"{', '.join(changed[:3])} changed in place, which every replica did. Sums over samples, and rows that "
                "belong to them, are those of one device; what happens once a step, as to a moving average, belongs in "
                "on_train_batch_end or on_before_optimizer_step"
            )


def _versions(tensors: Sequence[tuple[str, Tensor]]) -> list[int]:
    # Private, as there is no public way to see that a tensor was changed in place.
    return [tensor._version for _, tensor in tensors]


def _changed(tensors: Sequence[tuple[str, Tensor]], versions: Sequence[int]) -> list[str]:
    return [name for (name, tensor), version in zip(tensors, versions, strict=True) if tensor._version != version]


def _plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors that are attributes of modules, or in their lists and dicts, with names for messages."""
    for path, part in module.named_modules():
        for name, value in vars(part).items() if may_count(part) else ():
            if isinstance(value, Tensor):
                items = [("", value)]
            elif isinstance(value, dict) and name not in OF_MODULES:
                items = [(f"[{key!r}]", item) for key, item in value.items() if isinstance(item, Tensor)]
            elif type(value) is list and len(value) <= _MANY:
                items = [(f"[{index}]", item) for index, item in enumerate(value) if isinstance(item, Tensor)]
            else:
                continue
            for key, tensor in items:
                if tensor.is_floating_point() and not tensor.is_inference():
                    yield f"self.{path}{'.' if path else ''}{name}{key}", tensor


def may_count(part: nn.Module) -> bool:
    """Whether a module is one that steps change, as those of torch.nn are not, and metrics have means of their own."""
    in_torch = type(part).__module__.startswith("torch.nn.") or isinstance(part, _BatchNorm)
    return not in_torch and not isinstance(part, Metric | MetricCollection)


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
