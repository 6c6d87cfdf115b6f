"""The parameters of the wrapped module, looked up anew when the module has changed."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Container
from operator import is_

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.optim.masters import holders_of_masters
from lightning_bucketddp.peers.agreement import Entry, WrapError
from lightning_bucketddp.reducer.sparse import find_sparse
from lightning_bucketddp.wrapper.validation import entries, names_to_ignore, require_valid_parameters


class ModuleParams:
    """Which parameters a module has, and what is known of their gradients.

    Args:
        module: The module.
        may_be_frozen: Whether all parameters may be frozen, to be unfrozen later.

    Attributes:
        named: Each parameter once, under the first of its names that is not ignored, in registration order.
        ignored: Names of parameters and module buffers that the module asks wrappers to leave alone.
        sparse: Names of the parameters whose gradients are sparse.
        changes: How often parameters were taken in.
        optimizers: The optimizers that the wrapper knows.
    """

    def __init__(self, module: nn.Module, may_be_frozen: bool = False) -> None:
        self._module = module
        self._may_be_frozen = may_be_frozen
        self.ignored = names_to_ignore(module)
        self.sparse: frozenset[str] = frozenset()
        self.changes = 0
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._own_grad_dtypes: list[tuple[nn.Parameter, torch.dtype | None]] = []
        self._look_up()

    def _look_up(self) -> None:
        self.named = _named(self._module, self.ignored)
        self._structure = [
            (owner, list(owner._modules.values()), list(owner._parameters.values())) for owner in self._module.modules()
        ]
        self._plain = [param for _, param in self.named]
        self._dtypes = [param.dtype for param in self._plain]

    def prepare(self, options: Options) -> None:
        """Find what the options say of the parameters, and set ``grad_dtype`` on them.

        Raises:
            WrapError: If a parameter cannot be wrapped.
            ValueError: If an option names a parameter that is not there.
        """
        require_valid_parameters(self._module, self.named, self._may_be_frozen)
        self._options = options
        names = [name for name, _ in self.named]
        declared = options.sparse_parameters
        if self.changes:
            declared = [name for name in declared if name in names]
        else:
            options.require_patterns_match(names)
        self.sparse = find_sparse(self._module, declared)
        for name, param in self.named:
            if name not in self.sparse:
                self._set_grad_dtype(name, param)

    def _set_grad_dtype(self, name: str, param: nn.Parameter) -> None:
        dtype = self._options.grad_dtype_of(name, param.dtype)
        if self._options.grad_dtype is None or param.grad_dtype is dtype:
            return
        self._own_grad_dtypes.append((param, param.grad_dtype))
        grad, param.grad = param.grad, None
        param.grad_dtype = dtype
        if grad is not None:
            param.grad = grad.to(dtype)

    def restore_grad_dtypes(self) -> None:
        """Give parameters the ``grad_dtype`` that they had."""
        for param, dtype in reversed(self._own_grad_dtypes):
            grad, param.grad = param.grad, None
            param.grad_dtype = dtype
            if grad is not None:
                param.grad = grad if dtype is None else grad.to(dtype)
        self._own_grad_dtypes.clear()

    def entries(self) -> list[Entry]:
        """What must be the same on all ranks, line by line."""
        return entries(self._module, self.named, self.sparse, self.ignored, self._options)

    def changed(self) -> bool:
        """Whether parameters were added, removed, replaced or re-typed since they were looked up."""
        for owner, modules, params in self._structure:
            if (
                len(owner._modules) != len(modules)
                or len(owner._parameters) != len(params)
                or not all(map(is_, owner._modules.values(), modules))
                or not all(map(is_, owner._parameters.values(), params))
            ):
                break
        else:
            return [param.dtype for param in self._plain] != self._dtypes
        now = _named(self._module, self.ignored)
        if [(name, id(param)) for name, param in now] != [(name, id(param)) for name, param in self.named]:
            return True
        if [param.dtype for param in self._plain] != self._dtypes:
            return True
        self._look_up()  # other modules with the same parameters
        return False

    def take_in(self) -> None:
        """Look the parameters up anew.

        Raises:
            WrapError: If a new one cannot be wrapped, or an optimizer holds shards or masters of old ones.
        """
        before = {id(param): name for name, param in self.named}
        here = {id(param) for _, param in _named(self._module, self.ignored)}
        stale = {key: name for key, name in before.items() if key not in here}
        if holders := holders_of_masters(stale):
            raise WrapError(
                f"parameters were replaced after the module was wrapped, and {type(holders[0]).__name__} has fp32 "
                f"masters of the old ones{_listed(list(stale.values()))}; make a new optimizer"
            )
        for optimizer in self.optimizers:
            held = [stale[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in stale]
            if held and not self._options.shard_optimizer:
                self._warn_of_stale(type(optimizer).__name__, held)
        if self._options.shard_optimizer:
            raise WrapError(
                "parameters were added, replaced or re-typed after the module was wrapped, and the optimizer has "
                f"shards of the old ones{_listed(list(stale.values()))}; close() the wrapper, wrap the module again "
                "and make a new optimizer"
            )
        self._look_up()
        self.changes += 1
        self.prepare(self._options)

    def _warn_of_stale(self, optimizer: str, names: list[str]) -> None:
        warnings.warn(
            f"parameters were replaced after the module was wrapped. {optimizer} still holds the old "
            f"ones{_listed(names)} and does not update the new ones: make a new optimizer, or give it the new ones "
            "with add_param_group()",
            stacklevel=2,
        )


def _named(module: nn.Module, ignored: Container[str]) -> list[tuple[str, nn.Parameter]]:
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if name not in ignored:
            found.setdefault(id(param), (name, param))
    return list(found.values())


def _listed(names: list[str], most: int = 3) -> str:
    shown = ", ".join(map(repr, names[:most])) + (", ..." if len(names) > most else "")
    return f" ({shown})" if names else ""
