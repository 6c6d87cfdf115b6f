"""Notices parameters that were added or replaced after wrapping."""

from __future__ import annotations

from operator import is_

from torch import nn


class ModuleWatch:
    """Remembers a module's structure, and tells cheaply whether a trainable parameter has come in since.

    Args:
        module: The module, as it was wrapped.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known = {id(param) for param in module.parameters()}
        self._remember()

    def _remember(self) -> None:
        self._structure = [
            (owner, list(owner._modules.values()), list(owner._parameters.values())) for owner in self._module.modules()
        ]

    def require_no_new_parameters(self) -> None:
        """Compares the structure with the remembered one; looks closer only where something differs.

        Raises:
            RuntimeError: If there is a trainable parameter that was not there; names it.
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
        unknown = [(name, param) for name, param in self._module.named_parameters() if id(param) not in self._known]
        for name, param in unknown:
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was added or replaced after the module was wrapped, so that its gradient "
                    "would not be averaged over the ranks; change the module before it is wrapped (a LightningModule "
                    "in configure_model() or setup()), or close() the wrapper and wrap the module again"
                )
        if not unknown:  # something without parameters has come or gone, or parameters have gone
            self._remember()
