"""The parameters of the wrapped module, looked up anew when the module has changed."""

from __future__ import annotations

import warnings
import weakref
from operator import is_

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.plan import ParamSpec
from lightning_bucketddp.optim.swap import holders_of_masters
from lightning_bucketddp.peers.agreement import Entry, WrapError
from lightning_bucketddp.reducer.sparse import find_sparse
from lightning_bucketddp.wrapper.validation import named_parameters, names_to_ignore, require_valid_parameters


class ModuleParams:
    """Which parameters a module has, and what is known of their gradients.

    Args:
        module: The module.
        may_be_frozen: Whether all parameters may be frozen, to be unfrozen later.

    Attributes:
        module: The module.
        named: Each parameter once, under the first of its names that is not ignored, in registration order.
        ignored: Names of parameters and module buffers that the module asks wrappers to leave alone.
        sparse: Names of the parameters whose gradients are sparse.
        changes: How often parameters were taken in.
        optimizers: The optimizers that the wrapper knows.
    """

    def __init__(self, module: nn.Module, may_be_frozen: bool = False) -> None:
        self.module = module
        self._may_be_frozen = may_be_frozen
        self.ignored = names_to_ignore(module)
        self.sparse: frozenset[str] = frozenset()
        self.changes = 0
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._own_grad_dtypes: list[tuple[nn.Parameter, torch.dtype | None]] = []
        self._look_up()

    def _look_up(self) -> None:
        self.named = named_parameters(self.module)
        self._structure = [
            (owner, list(owner._modules.values()), list(owner._parameters.values())) for owner in self.module.modules()
        ]
        self._plain = [param for _, param in self.named]
        self._dtypes = [param.dtype for param in self._plain]

    def prepare(self, options: Options) -> None:
        """Find what the options say of the parameters, and set ``grad_dtype`` on them.

        Raises:
            WrapError: If a parameter cannot be wrapped.
            ValueError: If an option names a parameter that is not there.
        """
        require_valid_parameters(self.module, self._may_be_frozen)
        self._options = options
        names = [name for name, _ in self.named]
        declared = options.sparse_parameters
        if self.changes:
            declared = [name for name in declared if name in names]
        else:
            options.require_patterns_match(names)
        self.sparse = find_sparse(self.module, declared)
        for name, param in self.named:
            dtype = options.grad_dtype_of(name, param.dtype)
            if name not in self.sparse and options.grad_dtype is not None and param.grad_dtype is not dtype:
                self._own_grad_dtypes.append((param, param.grad_dtype))
                _set_grad_dtype(param, dtype)

    def restore_grad_dtypes(self) -> None:
        """Give parameters the ``grad_dtype`` that they had."""
        for param, dtype in reversed(self._own_grad_dtypes):
            _set_grad_dtype(param, dtype)
        self._own_grad_dtypes.clear()

    def entries(self) -> list[Entry]:
        """What must be the same on all ranks, line by line."""
        lines = [Entry(f"option {name}", value) for name, value in self._options.described()]
        for name, param in self.named:
            spec = ParamSpec.of(name, param)
            notes = f", gradient {spec.dtype}" if spec.param_dtype is not None else ""
            notes += ("" if param.requires_grad else ", frozen") + (", sparse gradient" if name in self.sparse else "")
            kind = f"shape {spec.shape}, {param.dtype}, strides {spec.strides}{notes}"
            lines.append(Entry(f"parameter {name!r}", kind))
        for name, buffer in self.module.named_buffers():
            if name not in self.ignored:
                lines.append(Entry(f"module buffer {name!r}", f"shape {tuple(buffer.shape)}, {buffer.dtype}"))
        return lines

    def changed(self) -> bool:
        """Whether parameters were added, removed, replaced or re-typed since they were looked up."""
        if [param.dtype for param in self._plain] != self._dtypes:
            return True
        if all(
            len(owner._modules) == len(modules)
            and len(owner._parameters) == len(params)
            and all(map(is_, owner._modules.values(), modules))
            and all(map(is_, owner._parameters.values(), params))
            for owner, modules, params in self._structure
        ):
            return False
        now = named_parameters(self.module)
        if [(name, id(param)) for name, param in now] != [(name, id(param)) for name, param in self.named]:
            return True
        self._look_up()  # other modules with the same parameters
        return False

    def take_in(self) -> None:
        """Look the parameters up anew.

        Raises:
            WrapError: If a new one cannot be wrapped, or an optimizer holds shards or masters of old ones.
        """
        before = {id(param): name for name, param in self.named}
        here = {id(param) for _, param in named_parameters(self.module)}
        stale = {key: name for key, name in before.items() if key not in here}
        if holders := holders_of_masters(stale):
            raise WrapError(
                f"parameters were replaced after the module was wrapped, and {type(holders[0]).__name__} has fp32 "
                f"masters of the old ones{_listed(list(stale.values()))}; make a new optimizer"
            )
        for optimizer in self.optimizers:
            held = [stale[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in stale]
            if held and not self._options.shard_optimizer:
                warnings.warn(
                    f"parameters were replaced after the module was wrapped. {type(optimizer).__name__} still holds "
                    f"the old ones{_listed(held)} and does not update the new ones: make a new optimizer, or give it "
                    "the new ones with add_param_group()",
                    stacklevel=2,
                )
        if self._options.shard_optimizer:
            raise WrapError(
                "parameters were added, replaced or re-typed after the module was wrapped, and the optimizer has "
                f"shards of the old ones{_listed(list(stale.values()))}; close() the wrapper, wrap the module again "
                "and make a new optimizer"
            )
        self._look_up()
        self.changes += 1
        self.prepare(self._options)


def _set_grad_dtype(param: nn.Parameter, dtype: torch.dtype | None) -> None:
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad if dtype is None else grad.to(dtype)


def _listed(names: list[str], most: int = 3) -> str:
    shown = ", ".join(map(repr, names[:most])) + (", ..." if len(names) > most else "")
    return f" ({shown})" if names else ""
