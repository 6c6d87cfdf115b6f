"""Structural copies of a module: new module objects around given tensors."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

_REGISTRIES = ("_parameters", "_buffers", "_modules")
HOOKS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict) and name not in _REGISTRIES]
"""The attributes in which a module keeps its hooks. They are private: torch has no public list of hooks."""

_CONTAINERS = frozenset({list, tuple, dict, OrderedDict})
_PLAIN = frozenset({bool, int, float, str, set, type(None)})
_DEPTH = 4
"""How deep to look into containers and functions, which may lead back to themselves."""


def fill(
    replicas: Sequence[Sequence[nn.Module]], originals: Sequence[nn.Module], tensors: Sequence[Mapping[int, Tensor]]
) -> None:
    """Give the modules of each replica the attributes that their originals have now.

    Every reference to one of the originals becomes a reference to its copy. This holds for submodules, parameters and
    hooks, and for plain attributes (``self.act = self.net.forward``, ``self.stages = [self.a, self.b]``). It holds
    inside other containers, :class:`functools.partial`, and functions nested in a method that refer to ``self``. A list
    or dict in such a function's variables stays the original's: functions append to those.

    Args:
        replicas: The modules of each replica, in the order of the originals.
        originals: The module and its submodules.
        tensors: Each replica's own tensors, by the id of the original's. It shares all others.
    """
    references = [
        (position, name, value)
        for position, original in enumerate(originals)
        for name, value in vars(original).items()
        if type(value) not in _PLAIN
        and (type(value) not in _CONTAINERS or value)
        and name not in _REGISTRIES
        and not (type(value) is FunctionType and name in ("update", "compute"))  # of metrics: count in the original
    ]
    for copies, own in zip(replicas, tensors, strict=True):
        replacements: dict[int, Any] = {
            id(original): copy for original, copy in zip(originals, copies, strict=True)
        } | {**own}
        for original, copy in zip(originals, copies, strict=True):
            attributes = vars(copy)
            attributes.update(vars(original), _is_replica=True)  # the mark of torch.nn.DataParallel
            for name in _REGISTRIES:
                attributes[name] = {key: replacements.get(id(value), value) for key, value in attributes[name].items()}
            for name in HOOKS:  # hooks that a replica registers in its forward are for its own samples
                attributes[name] = attributes[name].copy()
        for position, name, value in references:
            new = _redirected(value, replacements)
            if new is not value:
                vars(copies[position])[name] = new


def _redirected(value: Any, replacements: Mapping[int, Any], depth: int = _DEPTH, in_container: bool = True) -> Any:
    """Return ``value`` with everything it leads to replaced; the same object if there is nothing to replace."""
    kind = type(value)
    if kind in _PLAIN or (kind in _CONTAINERS and not (value and in_container)):
        return value
    if id(value) in replacements:
        return replacements[id(value)]
    parts = _parts(value) if depth else []
    new = [_redirected(part, replacements, depth - 1, kind in _CONTAINERS) for part in parts]
    return value if all(map(operator.is_, parts, new)) else _rebuilt(value, new)


def _parts(value: Any) -> list[Any]:
    """List what a value leads to: a container's items, a method's object, a partial's or function's references."""
    kind = type(value)
    if kind in _CONTAINERS:
        return list(value.values() if isinstance(value, dict) else value)
    if kind is MethodType:
        return [value.__self__]
    if kind is partial:
        return [value.func, *value.args, *value.keywords.values()]
    try:
        return [cell.cell_contents for cell in value.__closure__ or ()] if kind is FunctionType else []
    except ValueError:  # a variable that has no value yet
        return []


def _rebuilt(value: Any, parts: Sequence[Any]) -> Any:
    """Make a value like ``value`` that leads to other parts, in the order of :func:`_parts`."""
    kind = type(value)
    if kind is MethodType:
        return MethodType(value.__func__, parts[0])
    if kind is partial:
        first_keyword = 1 + len(value.args)
        keywords = dict(zip(value.keywords, parts[first_keyword:], strict=True))
        return partial(parts[0], *parts[1:first_keyword], **keywords)
    if kind is FunctionType:
        cells = tuple(
            cell if cell.cell_contents is part else CellType(part)
            for cell, part in zip(value.__closure__, parts, strict=True)
        )
        function = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        function.__kwdefaults__ = value.__kwdefaults__
        vars(function).update(vars(value))
        return function
    return kind(zip(value, parts, strict=True) if isinstance(value, dict) else parts)


def require_copyable(module: nn.Module) -> None:
    """Require that every submodule can be copied structurally.

    Raises:
        TypeError: For scripted and compiled modules.
        ValueError: For lazy modules that have seen no batch.
    """
    for name, part in module.named_modules():
        where = f"submodule {name!r}" if name else "the module"
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(
                f"expected Python modules, found that {where} is a {type(part).__name__}, whose compiled code is bound "
                "to its parameters; replicate the module from which it was scripted or traced"
            )
        if isinstance(part, torch._dynamo.OptimizedModule) or part._compiled_call_impl is not None:
            raise TypeError(
                f"expected modules that are not compiled, found that {where} is. Its compiled code is bound to its "
                "parameters; replicate the module before it is compiled"
            )
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and nn.parameter.is_lazy(tensor):
                raise ValueError(
                    f"expected initialised parameters, found {f'{name}.{key}' if name else key!r} that waits for its "
                    "first batch; call the module once before it is replicated"
                )


def require_no_collectives(module: nn.Module) -> None:
    """Require that no layer has collectives: replicas would start them in the order in which their threads run.

    Raises:
        ValueError: If a layer has. The message names it.
    """
    if (name := first_sync_batchnorm(module)) is not None:
        raise ValueError(
            f"expected a module without collectives of its own, found SyncBatchNorm {name!r}: replicas are threads and "
            "would start collectives in any order. Use BatchNorm, which normalises each replica's samples, or one "
            'process per device, as with strategy="bucketddp"'
        )


def first_sync_batchnorm(module: nn.Module) -> str | None:
    """The name of a module's first ``SyncBatchNorm`` layer; None if it has none."""
    return next((name for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)), None)
