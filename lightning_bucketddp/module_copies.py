"""Structural copies of a module: module objects of their own around tensors that somebody else provides."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

_OWN_WAY = "_replicate_for_data_parallel"
"""How torch.nn.DataParallel lets modules say what a replica copies; private, but what they override."""

HELD = "_bucketddp_replicas"
"""The attribute under which a module holds its replicas between steps; replicas have none of their own."""


class ModuleTree:
    """A module's submodules and tensors as they were found, to notice what has changed since.

    Args:
        module: The module.

    Attributes:
        modules: The module and its submodules, each once.
        tensors: Its parameters and module buffers, each once.
        names: What they are called.
        is_param: Which of them are parameters.
        slots: Per module, the names of its parameters and module buffers with their positions in ``tensors``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.is_param: list[bool] = []
        self.slots: list[tuple[list[tuple[str, int]], list[tuple[str, int]]]] = []
        positions: dict[int, int] = {}
        for prefix, part in module.named_modules():
            own: list[list[tuple[str, int]]] = []
            for entries, is_param in ((part._parameters, True), (part._buffers, False)):
                own.append([])
                for name, tensor in entries.items():
                    if tensor is None:
                        continue
                    position = positions.setdefault(id(tensor), len(self.tensors))
                    if position == len(self.tensors):
                        self.tensors.append(tensor)
                        self.names.append(f"{prefix}.{name}" if prefix else name)
                        self.is_param.append(is_param)
                    own[-1].append((name, position))
            self.slots.append((own[0], own[1]))
        self._entries = list(self._present_entries())
        self._kinds = [_kind(tensor) for tensor in self.tensors]

    def _present_entries(self) -> Iterable[Any]:
        for part in self.modules:
            yield from part._modules.values()
            yield from part._parameters.values()
            yield from part._buffers.values()
            yield from part._modules
            yield from part._parameters
            yield from part._buffers

    def still_holds(self) -> bool:
        """Whether submodules and tensors are the same still, under the same names and of the same kind."""
        present = list(self._present_entries())
        return (
            len(present) == len(self._entries)
            and all(map(operator.is_, present, self._entries))
            and [_kind(tensor) for tensor in self.tensors] == self._kinds
        )


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


class ModuleCopy:
    """One replica: a copy of every module object of a tree.

    Its modules are of the same classes and have the attributes that the originals have at the last :meth:`renew`, as
    the replicas of torch.nn.DataParallel; hooks are shared.

    Args:
        tree: The original.
    """

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree
        self._copies = [object.__new__(type(original)) for original in tree.modules]
        by_id = {id(original): copy for original, copy in zip(tree.modules, self._copies, strict=True)}
        self._children = [
            {name: None if child is None else by_id[id(child)] for name, child in original._modules.items()}
            for original in tree.modules
        ]
        self._own_way = [
            getattr(type(original), _OWN_WAY, None)
            not in (None, getattr(nn.Module, _OWN_WAY, None), getattr(GraphModule, _OWN_WAY, None))
            for original in tree.modules
        ]
        self._by_id = by_id

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
            attributes.pop(HELD, None)
            copy.__dict__ = attributes

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Puts other tensors in the place of the original's.

        Args:
            tensors: As ``tree.tensors``.
        """
        for copy, (params, buffers) in zip(self._copies, self._tree.slots, strict=True):
            if params:
                entries: dict[str, Any] = copy._parameters
                for name, position in params:
                    entries[name] = tensors[position]
            if buffers:
                entries = copy._buffers
                for name, position in buffers:
                    entries[name] = tensors[position]


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
                "original's parameters; replicate the module and compile functions that it calls instead"
            )
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if nn.parameter.is_lazy(tensor):
                raise ValueError(
                    f"expected initialised parameters, found {f'{name}.{key}' if name else key!r} that waits for its "
                    "first batch; call the module once before it is replicated"
                )
