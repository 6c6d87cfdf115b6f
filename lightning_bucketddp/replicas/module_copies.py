"""Structural copies of a module: module objects of their own around tensors that somebody else provides."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

_OWN_WAY = "_replicate_for_data_parallel"
"""How torch.nn.DataParallel lets modules say what a replica copies; private, but what they override."""

HELD = "_bucketddp_replicas"
"""The attribute under which a module holds its replicas between steps; replicas have none of their own."""

_HOOKS = [name for name, value in vars(nn.Module()).items() if "ward_" in name and isinstance(value, dict)]
"""Where a module keeps hooks on its forward and backward; private, as there is no public way to those that it has."""


class ModuleTree:
    """A module's submodules and tensors as they were found, to notice what has changed since.

    Args:
        module: The module.

    Attributes:
        modules: The module and its submodules, each once.
        tensors: Its parameters and module buffers, each once.
        slots: Where the tensors are; those that modules share are in several. The number of the module that has it;
            where it has it, ``"_parameters"`` or ``"_buffers"``; its name there; its position among the tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        self.slots: list[tuple[int, str, str, int]] = []
        positions: dict[int, int] = {}
        for index, part in enumerate(module.modules()):
            self.modules.append(part)
            for registry in ("_parameters", "_buffers"):
                for name, tensor in part.__dict__[registry].items():
                    if tensor is None:
                        continue
                    position = positions.setdefault(id(tensor), len(self.tensors))
                    if position == len(self.tensors):
                        self.tensors.append(tensor)
                    self.slots.append((index, registry, name, position))
        self._own = frozenset(map(id, chain[Any](self.modules, self.tensors)))
        self._found = self._entries()

    def _entries(self) -> tuple[list[int], list[str], list[Any]]:
        dicts: list[Any] = []
        for part in self.modules:
            attributes = part.__dict__
            dicts += attributes["_modules"], attributes["_parameters"], attributes["_buffers"]
        sizes, names = list(map(len, dicts)), list(chain.from_iterable(dicts))
        compiled = [part.__dict__.get("_compiled_call_impl") for part in self.modules]
        return sizes, names, [*chain.from_iterable(map(dict.values, dicts)), *compiled, *map(type, self.modules)]

    def still_holds(self) -> bool:
        """Whether submodules and tensors are the same objects still, under the same names, and of the same classes."""
        sizes, names, values = self._entries()
        return sizes == self._found[0] and names == self._found[1] and all(map(operator.is_, values, self._found[2]))

    def aliases(self) -> list[tuple[int, str]]:
        """The attributes, by number of the module, that lead to modules or tensors of the tree now."""
        own = self._own
        return [
            (index, name)
            for index, part in enumerate(self.modules)
            for name, value in part.__dict__.items()
            if type(value) not in _PLAIN  # most attributes end here or in the next line, as empty registries of hooks
            and (type(value) not in _CONTAINERS or value)
            and name not in _REGISTRIES
            and not (type(value) is FunctionType and hasattr(value, "__wrapped__"))  # of metrics: count in the original
            and _leads_to(value, own)
        ]


class ModuleCopy:
    """One replica: a copy of every module object of a tree.

    Its modules are of the same classes and have the attributes that the originals have at the last :meth:`renew`, as
    the replicas of torch.nn.DataParallel. Beyond what those do, methods, hooks and plain attributes that lead to
    modules or tensors of the original (``self.act = self.net.forward``, ``self.stages = [self.a, self.b]``) lead to the
    replica's, also inside other containers, ``functools.partial``, and functions nested in a method, which refer to
    ``self``. Functions that keep one of the module's lists or dicts in a variable of their own keep the original's.

    Args:
        tree: The original.
    """

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree
        self._copies = [object.__new__(type(original)) for original in tree.modules]
        self._by_id: dict[int, Any] = {
            id(original): copy for original, copy in zip(tree.modules, self._copies, strict=True)
        }
        self._children = [
            {name: None if child is None else self._by_id[id(child)] for name, child in original._modules.items()}
            for original in tree.modules
        ]
        usual = {getattr(kind, _OWN_WAY, None) for kind in (nn.Module, GraphModule)}  # torch.fx compiles each copy anew
        self._own_way = [getattr(type(original), _OWN_WAY, None) not in usual for original in tree.modules]

    @property
    def root(self) -> nn.Module:
        """The replica of the module itself."""
        return self._copies[0]

    def renew(self) -> None:
        """Takes over the original's present attributes; the tensors are the original's until :meth:`hold`."""
        for original, copy, children, own_way in zip(
            self._tree.modules, self._copies, self._children, self._own_way, strict=True
        ):
            attributes = getattr(original, _OWN_WAY)().__dict__ if own_way else original.__dict__.copy()
            attributes["_parameters"] = original._parameters.copy()
            attributes["_buffers"] = original._buffers.copy()
            attributes["_modules"] = children.copy()
            attributes["_is_replica"] = True
            for name in _HOOKS:  # what a replica registers in its forward is for its own samples
                if name in attributes:
                    attributes[name] = attributes[name].copy()
            attributes.pop(HELD, None)
            object.__setattr__(copy, "__dict__", attributes)

    def hold(self, tensors: Mapping[int, Tensor], aliases: Iterable[tuple[int, str]]) -> None:
        """Puts other tensors in the place of the original's, and leads aliases to the replica's own.

        Args:
            tensors: By their positions in ``tree.tensors``; the others stay.
            aliases: The tree's present ones.
        """
        for index, registry, name, position in self._tree.slots if tensors else ():
            if position in tensors:
                self._copies[index].__dict__[registry][name] = tensors[position]
        others = {id(self._tree.tensors[position]): tensor for position, tensor in tensors.items()}
        replacements = self._by_id | others
        for index, name in aliases:
            attributes = self._copies[index].__dict__
            attributes[name] = _redirected(attributes[name], replacements)


_CONTAINERS = frozenset({list, tuple, dict, OrderedDict})
_PLAIN = frozenset({bool, int, float, str, set, type(None)})
_REGISTRIES = frozenset({"_modules", "_parameters", "_buffers"})
_DEPTH = 4
"""How deep in containers and functions modules are looked for, as these may lead back to themselves."""


def _parts(value: Any) -> list[Any]:
    """What a value leads to by itself: a container's items, a method's object, what functions and partials refer to."""
    kind = type(value)
    if kind in _CONTAINERS:
        return list(value.values() if isinstance(value, dict) else value)
    if kind is MethodType:
        return [value.__self__]
    if kind is partial:
        return [value.func, *value.args, *value.keywords.values()]
    return list(map(_content, value.__closure__ or ())) if kind is FunctionType else []


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None


def _leads_to(value: Any, ids: Container[int], depth: int = _DEPTH, in_container: bool = True) -> bool:
    kind = type(value)
    if kind in _PLAIN or (kind in _CONTAINERS and not in_container):
        return False  # as functions append to containers that they refer to, which have to stay the same
    return id(value) in ids or (
        depth > 0 and any(_leads_to(part, ids, depth - 1, kind in _CONTAINERS) for part in _parts(value))
    )


def _redirected(value: Any, replacements: Mapping[int, Any], depth: int = _DEPTH, in_container: bool = True) -> Any:
    """``value`` around replacements, if it is, or leads to, something that is to be replaced; else itself."""
    kind = type(value)
    if id(value) in replacements or not _leads_to(value, replacements, depth, in_container):
        return replacements.get(id(value), value)
    parts = [_redirected(part, replacements, depth - 1, kind in _CONTAINERS) for part in _parts(value)]
    if kind is MethodType:
        return MethodType(value.__func__, parts[0])
    if kind is FunctionType:
        return _with_contents(value, parts)
    if kind is partial:
        first_keyword = 1 + len(value.args)
        keywords = dict(zip(value.keywords, parts[first_keyword:], strict=True))
        return partial(parts[0], *parts[1:first_keyword], **keywords)
    return kind(zip(value, parts, strict=True) if isinstance(value, dict) else parts)


def _with_contents(function: FunctionType, contents: Sequence[Any]) -> FunctionType:
    """A nested function that refers to something else in the place of some variables around it."""
    cells = [
        cell if _content(cell) is content else CellType(content)
        for cell, content in zip(function.__closure__ or (), contents, strict=True)
    ]
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    return made


def require_copyable(module: nn.Module) -> None:
    """Requires that every submodule can be copied structurally.

    Raises:
        TypeError: For scripted and compiled modules.
        ValueError: For lazy modules that have seen no batch.
    """
    for name, part in module.named_modules():
        where = f"submodule {name!r}" if name else "the module"
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(
                f"expected modules of Python, found that {where} is a {type(part).__name__}, whose parameters are "
                "bound to its compiled code; replicate the module that was scripted or traced"
            )
        if isinstance(part, torch._dynamo.OptimizedModule) or part.__dict__.get("_compiled_call_impl") is not None:
            raise TypeError(
                f"expected modules that are not compiled, found that {where} is, and its compiled code is bound to the "
                "original's parameters; replicate the module before it is compiled"
            )
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and nn.parameter.is_lazy(tensor):
                raise ValueError(
                    f"expected initialised parameters, found {f'{name}.{key}' if name else key!r} that waits for its "
                    "first batch; call the module once before it is replicated"
                )


def require_no_collectives(module: nn.Module) -> None:
    """Requires that no layer has collectives, which replicas would start in the order in which threads run.

    Raises:
        ValueError: If one has; names it.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise ValueError(
                f"expected replicas without collectives of their own, found SyncBatchNorm {name!r}: they would start "
                "theirs in the order in which threads run. Use BatchNorm, which normalises each replica's samples, or "
                'one process per device, as with strategy="bucketddp"'
            )
