"""The parameters and module buffers of the wrapped module, looked up anew when the module has changed."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Container, Iterable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.plan import ParamSpec
from lightning_bucketddp.layout.require import listed
from lightning_bucketddp.optim.param_buffers import require_own_values
from lightning_bucketddp.optim.swap import holders_of_masters
from lightning_bucketddp.peers.agreement import Entry, WrapError
from lightning_bucketddp.reducer.sparse import find_sparse
from lightning_bucketddp.wrapper.validation import (
    is_expanded,
    named_parameters,
    names_to_ignore,
    require_distinct_elements,
    require_may_be_sent,
    require_own_memory,
    require_valid_parameters,
)


class ModuleParams:
    """The parameters of a module, the kind of gradient that each has, and the module buffers.

    Args:
        module: The module.
        options: The wrapper's options.

    Attributes:
        module: The module.
        named: Each parameter once, under the first of its names that is not ignored, in registration order.
        sparse: Names of the parameters whose gradients are sparse.
        changes: How often changed parameters were taken in.
        optimizers: The optimizers that the wrapper knows.
    """

    def __init__(self, module: nn.Module, options: Options) -> None:
        self.module, self._options = module, options
        self.sparse: frozenset[str] = frozenset()
        self.changes = 0
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._own_grad_dtypes: list[tuple[nn.Parameter, torch.dtype | None]] = []
        self._late: list[nn.Parameter] = []  # frozen ones that came while optimizers have shards
        self._buffers: dict[str, tuple[Any, str, Tensor]] = {}  # the owner, the name there, and the last as sent
        self._look_up_buffers(self._look_up())

    def _look_up(self) -> dict[str, tuple[nn.Module, str]]:
        """Look parameters and submodules up anew. Return where each module buffer is."""
        ignored = names_to_ignore(self.module)
        self.named = named_parameters(self.module)
        self._dtypes = [param.dtype for _, param in self.named]
        registries = [registry for owner in self.module.modules() for registry in (owner._modules, owner._parameters)]
        self._members = [registry.values() for registry in registries]  # live views
        self._members_before = [*chain.from_iterable(self._members)]  # held, so that none has the place of an old one
        owners = {
            f"{prefix}.{name}".lstrip("."): (owner, name)
            for prefix, owner in self.module.named_modules()
            for name in owner._buffers.keys()  # noqa: SIM118 -- of a ScriptModule: no dict
            if f"{prefix}.{name}".lstrip(".") not in ignored
        }
        self._buffers = self._found_again(owners)
        return owners

    def _found_again(self, owners: dict[str, tuple[nn.Module, str]]) -> dict[str, tuple[Any, str, Tensor]]:
        """The known module buffers where they are now: in their module, which may have moved, or in a new one."""
        places = {(id(owner), name): full_name for full_name, (owner, name) in owners.items()}
        moved = {buffer: places.get((id(owner), name), buffer) for buffer, (owner, name, _) in self._buffers.items()}
        return {now: (*owners.get(now, (None, "")), self._buffers[before][2]) for before, now in moved.items()}

    def _same_members(self) -> bool:
        """Whether submodules and parameters are those of the last look. Every pass asks."""
        now, before = [*chain.from_iterable(self._members)], self._members_before
        return len(now) == len(before) and all(map(is_, now, before))

    def _look_up_buffers(self, owners: dict[str, tuple[nn.Module, str]], modules_before: Container[int] = ()) -> None:
        """Look module buffers up anew, but for caches of this rank, which are new in an old module."""
        found: dict[int, tuple[str, tuple[nn.Module, str, Tensor]]] = {}
        for full_name, (owner, name) in owners.items():
            buffer, (*_, before) = getattr(owner, name, None), self._buffers.get(full_name, (None,))
            if buffer is not None and (before is not None or id(owner) not in modules_before):
                found.setdefault(id(buffer), (full_name, (owner, name, buffer if before is None else before)))
        self._buffers = dict(found.values())

    def named_buffers(self) -> dict[str, Tensor]:
        """The module buffers that ranks have agreed on, each once, by name.

        Modules replace their buffers. One of another shape or dtype may be a cache that only this rank needed: then it
        is the one before.
        """
        found = {}
        for full_name, (owner, name, before) in self._buffers.items():
            buffer: Tensor = getattr(owner, name, before)
            fits = buffer is not None and (buffer.shape, buffer.dtype) == (before.shape, before.dtype)
            found[full_name] = buffer if fits else before
        return found

    def buffers_to_write(self) -> list[Tensor]:
        """The module buffers, for other ranks' values to be written into.

        A graph may have saved what a module buffer was replaced by, such as an activation. So it gets memory of its
        own, once, unless it shares that of a parameter or of a module buffer from before.

        Raises:
            WrapError: If one was replaced by a tensor that cannot be sent.
        """
        buffers = self.named_buffers()
        replaced = {name: buffer for name, buffer in buffers.items() if buffer is not self._buffers[name][-1]}
        if not replaced:
            return [*buffers.values()]
        before = [*(param for _, param in self.named), *(buffer for *_, buffer in self._buffers.values())]
        known = {_place(tensor) for tensor in before}
        own: dict[int, Tensor] = {}
        for full_name, buffer in replaced.items():
            require_may_be_sent(f"module buffer {full_name!r}, replaced since it was sent,", buffer)
            is_trained = buffer.requires_grad and buffer.is_leaf  # by an optimizer that holds this very tensor
            if is_expanded(buffer) or not (is_trained or _place(buffer) in known):
                with torch.inference_mode(False), torch.enable_grad():  # its graph, if it has one, goes on
                    own[id(buffer)] = buffer.clone()
        for module in self.module.modules() if own else ():
            for name, present in [*module._buffers.items()]:
                if id(present) in own:
                    setattr(module, name, own[id(present)])
        for full_name, buffer in replaced.items():
            buffers[full_name] = own.get(id(buffer), buffer)
            self._buffers[full_name] = (*self._buffers[full_name][:2], buffers[full_name])
        return [*buffers.values()]

    def prepare(self) -> None:
        """Find the sparse parameters, and set ``grad_dtype`` on the parameters that the options name.

        Raises:
            WrapError: If a parameter cannot be wrapped.
            ValueError: If an option names a parameter that does not exist.
        """
        require_valid_parameters(self.module)
        options = self._options
        sent: dict[str, Tensor] = {f"parameter {name!r}": param for name, param in self.named if options.init_sync}
        if options.module_buffers != "off" or (options.init_sync and options.init_sync_module_buffers):
            sent |= {f"module buffer {name!r}": buffer for name, (*_, buffer) in self._buffers.items()}
        for what, tensor in sent.items():
            require_may_be_sent(what, tensor)
            require_distinct_elements(what, tensor)
        if options.shard_optimizer:
            require_own_memory([*self.named, *self.named_buffers().items()])
            for name, param in self.named:
                if param.requires_grad:
                    require_own_values(name, param)
        if not self.changes:
            options.require_patterns_match([name for name, _ in self.named])
        declared, names = options.sparse_parameters, {name for name, _ in self.named}
        still = [name for name in declared if name in names] if self.changes else declared
        self.sparse = find_sparse(self.module, still)
        for name, param in self.named:
            dtype = options.grad_dtype_of(name, param.dtype)
            if name not in self.sparse and options.grad_dtype is not None and param.grad_dtype is not dtype:
                self._own_grad_dtypes.append((param, param.grad_dtype))
                _set_grad_dtype(param, dtype)

    def restore_grad_dtypes(self) -> None:
        """Give parameters the ``grad_dtype`` that they had before."""
        for param, dtype in reversed(self._own_grad_dtypes):
            _set_grad_dtype(param, dtype)
        self._own_grad_dtypes.clear()

    def entries(self) -> list[Entry]:
        """Options, parameters and module buffers, line by line: they must be the same on all ranks."""
        lines = [Entry(f"option {name}", value) for name, value in self._options.described()]
        for name, param in self.named:
            spec = ParamSpec.of(name, param)
            notes = f", gradient {spec.dtype}" if spec.param_dtype is not None else ""
            notes += ("" if param.requires_grad else ", frozen") + (", sparse gradient" if name in self.sparse else "")
            kind = f"shape {spec.shape}, {param.dtype}, strides {spec.strides}{notes}"
            lines.append(Entry(f"parameter {name!r}", kind))
        for name, buffer in self.named_buffers().items():
            lines.append(Entry(f"module buffer {name!r}", f"shape {tuple(buffer.shape)}, {buffer.dtype}"))
        return lines

    def changed(self) -> bool:
        """Whether parameters were added, removed, replaced, renamed or re-typed since the last look."""
        if [param.dtype for _, param in self.named] != self._dtypes or any(param.requires_grad for param in self._late):
            return True
        if self._same_members():
            return False
        now = named_parameters(self.module)
        if [(name, id(param)) for name, param in now] != [(name, id(param)) for name, param in self.named]:
            return True
        self._look_up()  # other modules with the same parameters
        return False

    def take_in(self, trained: Callable[[], Container[int]]) -> None:
        """Look parameters up anew, and warn of optimizers that hold replaced ones.

        Args:
            trained: Gives the ids of the parameters that are trained or were.

        Raises:
            WrapError: If a new parameter cannot be wrapped, or an optimizer has shards or masters of replaced ones.
        """
        here = {id(param) for _, param in named_parameters(self.module)}
        replaced = {id(param): name for name, param in self.named if id(param) not in here}
        for holder in holders_of_masters(replaced):
            raise WrapError(
                f"parameters were replaced after the module was wrapped, and {type(holder).__name__} has fp32 masters "
                f"of the old ones{_in_brackets(replaced.values())}; make a new optimizer of the new parameters"
            )
        before = {id(self.module), *map(id, self._members_before)}
        if self._options.shard_optimizer:
            self._late += self._require_same_shards(trained())
        for optimizer in self.optimizers:
            params = (param for group in optimizer.param_groups for param in group["params"])
            if held := [replaced[id(param)] for param in params if id(param) in replaced]:
                warnings.warn(
                    f"parameters were replaced after the module was wrapped. {type(optimizer).__name__} still holds "
                    f"the old ones{_in_brackets(held)}: make a new optimizer, or give it the new ones by "
                    "add_param_group()",
                    stacklevel=2,
                )
        self._look_up_buffers(self._look_up(), before)
        self.changes += 1
        self.prepare()

    def _require_same_shards(self, trained: Container[int]) -> list[nn.Parameter]:
        """Require that all trained parameters are what they were. Return the frozen ones that are new.

        Raises:
            WrapError: If trained parameters were removed, replaced or re-typed, or parameters to train were added.
        """
        now = {id(param): (name, param) for name, param in named_parameters(self.module)}
        known = {id(param): (name, dtype) for (name, param), dtype in zip(self.named, self._dtypes, strict=True)}
        late = {id(param) for param in self._late}
        odd = [name for number, (name, _) in known.items() if number in trained and number not in now]
        for number, (name, param) in now.items():
            retyped = number in trained and param.dtype is not known[number][1]
            if retyped or (param.requires_grad and (number in late or number not in known)):
                odd.append(name)
        if odd:
            raise WrapError(
                "parameters were added, replaced or re-typed after the module was wrapped, and the optimizer has "
                f"shards of the old ones{_in_brackets(dict.fromkeys(odd))}; do it before training, in a Trainer before "
                "fit(); or close() the wrapper, wrap again and make a new optimizer"
            )
        return [param for number, (_, param) in now.items() if number not in known]


def _place(tensor: Tensor) -> int:
    """Where a tensor's storage begins."""
    with torch._C.DisableTorchFunctionSubclass():  # the place of a parameter that the lazy all-gather has yet to fill
        return tensor.untyped_storage().data_ptr()


def _set_grad_dtype(param: nn.Parameter, dtype: torch.dtype | None) -> None:
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad if dtype is None else grad.to(dtype)


def _in_brackets(names: Iterable[str]) -> str:
    shown = listed(names)
    return f" ({shown})" if shown else ""
