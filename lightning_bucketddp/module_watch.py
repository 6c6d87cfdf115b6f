"""Notices parameters that were added or replaced after wrapping."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from operator import is_

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.engine import hook_gradient


class ModuleWatch:
    """Remembers a module's structure, and refuses gradients of parameters that have come in since.

    A parameter that never gets a gradient, such as an averaged copy's, is of no concern.

    Args:
        module: The module, as it was wrapped.
        ignored: Names of parameters that are nobody's business but the rank's.
    """

    def __init__(self, module: nn.Module, ignored: Container[str] = ()) -> None:
        self._module = module
        self._ignored = ignored
        self._known = {id(param) for param in module.parameters()}
        self._hooks: list[RemovableHandle] = []
        self._remember()

    def _remember(self) -> None:
        self._structure = [
            (owner, list(owner._modules.values()), list(owner._parameters.values())) for owner in self._module.modules()
        ]

    def look(self) -> None:
        """Compares the structure with the remembered one, and hooks parameters that were not there.

        Their gradients raise a RuntimeError in backward that names them.
        """
        for owner, modules, params in self._structure:
            if (
                len(owner._modules) != len(modules)
                or len(owner._parameters) != len(params)
                or not all(map(is_, owner._modules.values(), modules))
                or not all(map(is_, owner._parameters.values(), params))
            ):
                break
        else:
            return
        for name, param in self._module.named_parameters():
            if id(param) not in self._known and name not in self._ignored:
                self._known.add(id(param))
                hook = hook_gradient(param, partial(_refuse, name))
                if hook is not None:
                    self._hooks.append(hook)
        self._remember()

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _refuse(name: str, param: Tensor) -> None:
    if param.requires_grad:
        raise RuntimeError(
            f"parameter {name!r} was added or replaced after the module was wrapped, so that its gradient would not be "
            "averaged over the ranks; change the module before it is wrapped (a LightningModule in configure_model() "
            "or setup()), or close() the wrapper and wrap the module again"
        )
