"""Sharded checkpoints: all ranks write and read one directory, each its own parts.

Through ``torch.distributed.checkpoint``. No rank ever holds a whole tensor that is sharded. Parts are written as chunks
of the tensors (:mod:`lightning_bucketddp.layout.chunks`), under these keys, with the shapes of one process::

    model.<name>                            parameters, module buffers, extra state
    optimizers.<i>.state.<name>.<key>       the i-th optimizer's state, by the parameter's name
    optimizers.<i>.master_params.<name>     fp32 master parameters
    optimizers.<i>.param_groups             hyper-parameters; "params" are names
    extra                                   the caller's own

So a checkpoint loads at any world size and with any buckets, sharded or not. torch's tools for the format read it:
``dcp_to_torch_save`` makes one file of it, ``{"model": ..., "optimizers": [...], "extra": ...}``.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.optim.checkpoint_planners import Chunks, ChunksLoadPlanner, ChunksSavePlanner
from lightning_bucketddp.optim.parts import ParamPart, Parts
from lightning_bucketddp.optim.stepped import SHARD_KEY, STATE_DICT_KEY, params_of
from lightning_bucketddp.optim.swap import Swap, swap_of

FORMAT_KEY = "lightning_bucketddp"
"""Entry of the metadata's ``planner_data``: {"version": 1, "groups": the parameters' names, by optimizer and group}."""

_SAME_ON_ALL_RANKS = (ValueError, TypeError, FileExistsError, RuntimeError)
"""Errors that all ranks raise as one rank raised them. Of others they raise the text."""

_Path = tuple[Any, ...]
"""A value's keys in the nested dict; its key in the checkpoint is these, joined by dots."""

_T = TypeVar("_T")


class ShardedCheckpoint:
    """Saves and loads a module and its optimizers. All ranks must call the same alike.

    Args:
        module: The module.
        collectives: The group.
        parts: This rank's part of each parameter; all of it if None.
        prepare: Called with each optimizer first; gives it shards or masters.
    """

    def __init__(
        self,
        module: nn.Module,
        collectives: Collectives,
        parts: Parts | None,
        prepare: Callable[[Optimizer], Swap | None],
    ) -> None:
        self._module = module
        self._collectives = collectives
        self._parts = parts or Parts()
        self._prepare = prepare
        self._names = {
            id(param): name for name, param in reversed(list(module.named_parameters(remove_duplicate=False)))
        }

    # -- saving --------------------------------------------------------------------------------------

    def save(
        self, path: Path, optimizers: Sequence[Optimizer], extra: Mapping[str, Any] | None, overwrite: bool
    ) -> None:
        """Save into a directory, which appears when it is complete."""
        first, what = self._collectives.rank == 0, f"saving to {path}"
        partial = path.with_name(f"{path.name}.partial")

        def collect() -> dict[_Path, Any]:
            if first:
                if path.exists() and not overwrite:
                    raise FileExistsError(
                        f"expected nothing at {path}, found something; pass overwrite=True to replace it"
                    )
                shutil.rmtree(partial, ignore_errors=True)  # of a save that was interrupted
            values = dict(self._values(optimizers))
            if first and extra is not None:
                values["extra",] = dict(extra)
            return {path: it if isinstance(it, Tensor | Chunks) else _pickled(it) for path, it in values.items()}

        def write() -> None:
            groups = [self._groups(number, optimizer) for number, optimizer in enumerate(optimizers)]
            paths = {_key(path): path for path in values}  # from which torch's tools make the nested dict
            planner = ChunksSavePlanner({**paths, FORMAT_KEY: {"version": 1, "groups": groups}})
            flat = {_key(path): value for path, value in values.items()}
            writer = FileSystemWriter(partial)
            save(flat, storage_writer=writer, planner=planner, process_group=self._collectives.group)
            if first:  # all ranks have written
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
                partial.replace(path)

        values = self._together(what, collect)
        try:
            self._together(what, write)
        except BaseException:
            if first:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _values(self, optimizers: Sequence[Optimizer]) -> Iterator[tuple[_Path, Any]]:
        """Yield what this rank offers to write: tensors, chunks and objects, by path."""
        first = self._collectives.rank == 0
        for name, value in self._module.state_dict(keep_vars=True).items():
            # Module buffers are rank 0's, as in any checkpoint: they may differ between synchronisations.
            if first or id(value) in self._names:
                yield ("model", name), self._own(value)
        for number, optimizer in enumerate(optimizers):
            swap = self._prepare(optimizer) or swap_of(optimizer)
            packed = optimizer.state_dict()
            state = dict(packed.pop("state"))
            for index, param in enumerate(params_of(optimizer)):
                entries = dict(state.pop(index, {}))
                if swap is not None and (master := swap.master(param)) is not None:  # also if the swap is closed
                    entries[STATE_DICT_KEY] = master
                found = self._parts.find(param)
                for key, value in entries.items():
                    if found is not None and found.is_split(key, value):
                        value = Chunks.of(found, value.detach())
                    yield _state_path(number, self._names[id(param)], key), value
            if first:
                groups = zip(packed.pop("param_groups"), self._groups(number, optimizer), strict=True)
                yield ("optimizers", number, "param_groups"), [{**group, "params": names} for group, names in groups]
                rest = {key: value for key, value in packed.items() if key not in (SHARD_KEY, STATE_DICT_KEY)}
                if state or rest:  # some optimizers keep more
                    yield ("optimizers", number, "others"), {"state": state, "entries": rest}

    # -- loading -------------------------------------------------------------------------------------

    def load(
        self, path: Path, optimizers: Sequence[Optimizer], strict: bool, with_module: bool = True
    ) -> dict[str, Any]:
        """Load from a directory; return the caller's ``extra``."""
        what, reader = f"loading from {path}", FileSystemReader(path)
        self._parts.wait()

        def make_rooms() -> dict[_Path, Any]:
            if not path.is_dir():
                raise RuntimeError(f"expected a directory, found none: {path}")
            return dict(self._rooms(reader.read_metadata(), optimizers, strict, with_module))

        rooms = self._together(what, make_rooms)
        flat = {_key(path): room for path, room in rooms.items()}
        group, planner = self._collectives.group, ChunksLoadPlanner()
        self._together(what, lambda: load(flat, storage_reader=reader, planner=planner, process_group=group))
        values = {key: it.flat if isinstance(it, Chunks) else it for key, it in flat.items()}
        nested = unflatten_state_dict(values, {_key(path): path for path in rooms})
        self._together(what, lambda: self._apply(nested, optimizers))
        self._parts.replaced()
        return nested.get("extra", {})

    def _rooms(
        self, metadata: Metadata, optimizers: Sequence[Optimizer], strict: bool, with_module: bool
    ) -> Iterator[tuple[_Path, Any]]:
        """Yield what this rank wants to read, by path: tensors and chunks to read into, None for an object."""
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        if FORMAT_KEY not in paths:
            raise ValueError("expected a checkpoint that BucketDDP.save_sharded() has written, found another one")
        groups = paths[FORMAT_KEY]["groups"]
        saved = {paths[key]: stored for key, stored in metadata.state_dict_metadata.items()}
        if with_module:
            yield from self._module_rooms({path[1]: it for path, it in saved.items() if path[0] == "model"}, strict)
        if ("extra",) in saved:
            yield ("extra",), None
        if optimizers and len(groups) != len(optimizers):
            raise ValueError(
                f"expected as many optimizers as the checkpoint has, {len(groups)}, found {len(optimizers)}; pass none "
                "to load the module alone"
            )
        for number, optimizer in enumerate(optimizers):
            _require_same_groups(number, groups[number], self._groups(number, optimizer))
            self._prepare(optimizer)
            by_name = {self._names[id(param)]: param for param in params_of(optimizer)}
            for path, stored in saved.items():
                if path[:2] != ("optimizers", number):
                    continue
                if path[2] not in ("state", STATE_DICT_KEY):
                    yield path, None
                    continue
                param, key = by_name[path[3]], path[4] if path[2] == "state" else STATE_DICT_KEY
                found = self._parts.find(param)
                if found is None or found.numel:
                    yield path, _room_of(param, found, key, stored)

    def _module_rooms(self, saved: Mapping[str, Any], strict: bool) -> Iterator[tuple[_Path, Any]]:
        present = self._module.state_dict(keep_vars=True)
        missing = [name for name in present if name not in saved]
        for what, names in (("without", missing), ("with unknown", sorted(saved.keys() - present.keys()))):
            if strict and names:
                listed = f"{', '.join(map(repr, names[:5]))}{' and others' if len(names) > 5 else ''}"
                raise ValueError(f"expected the checkpoint of a module with the same names, found {what} {listed}")
        for name, value in present.items():
            if name in saved:
                yield ("model", name), _empty(saved[name]) if _is_extra(name, value) else self._own(value)

    def _apply(self, nested: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Load the optimizers' state and the modules' extra state, which were read into memory of their own."""
        for number, optimizer in enumerate(optimizers):
            saved = {"state": {}, STATE_DICT_KEY: {}, **nested["optimizers"][number]}
            others = saved.get("others", {"state": {}, "entries": {}})
            index_of = {self._names[id(param)]: index for index, param in enumerate(params_of(optimizer))}
            state, masters = (
                {index_of[name]: it for name, it in saved[key].items()} for key in ("state", STATE_DICT_KEY)
            )
            groups = [
                {**group, "params": [index_of[name] for name in names]}
                for group, names in zip(saved["param_groups"], self._groups(number, optimizer), strict=True)
            ]
            loaded = {"state": {**state, **others["state"]}, STATE_DICT_KEY: masters, "param_groups": groups}
            shard = {key: it for key, it in optimizer.state_dict().items() if key == SHARD_KEY}
            optimizer.load_state_dict({**others["entries"], **loaded, **shard})
        present = self._module.state_dict(keep_vars=True)
        extra_state = {name: it for name, it in nested.get("model", {}).items() if _is_extra(name, present[name])}
        if extra_state:
            self._module.load_state_dict(extra_state, strict=False)

    # -- details -------------------------------------------------------------------------------------

    def _own(self, value: Any) -> Any:
        """Return this rank's memory of an entry of the module's state dict."""
        if not isinstance(value, Tensor):
            return value
        found, memory = self._parts.find(value), self._parts.param_part(value).detach()
        return memory if found is None else Chunks.of(found, memory)

    def _groups(self, number: int, optimizer: Optimizer) -> list[list[str]]:
        """Return the names of each group's parameters."""
        for at, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in self._names:
                    raise ValueError(
                        f"expected optimizer {number} to hold parameters of the module, which are saved by name; found "
                        f"another one of shape {tuple(param.shape)} in its group {at}"
                    )
        return [[self._names[id(param)] for param in group["params"]] for group in optimizer.param_groups]

    def _together(self, what: str, run: Callable[[], _T]) -> _T:
        """Call ``run`` on every rank; if it raises on some, raise on all.

        Raises:
            Exception: One of the errors that callers expect, with the first rank's text.
            RuntimeError: If it was any other error.
        """
        problem: BaseException | None = None
        try:
            result = run()
        except CheckpointException as error:  # torch raises it on every rank
            problem, _ = error.failures.get(self._collectives.rank, (None, None))
        except Exception as error:
            problem = error
        told = None
        if problem is not None:  # kind and text, as the error itself might not be unpickled
            kind = next((it for it in _SAME_ON_ALL_RANKS if isinstance(problem, it)), None)
            told = (kind, str(problem)) if kind else (RuntimeError, f"{type(problem).__name__}: {problem}")
        failed = {rank: it for rank, it in enumerate(self._collectives.exchange_objects(told)) if it is not None}
        if failed:
            kind, message = next(iter(failed.values()))
            raise kind(f"{what} failed on rank {', '.join(map(str, failed))}: {message}") from problem
        return result


def _key(path: _Path) -> str:
    return ".".join(map(str, path))


def _state_path(number: int, name: str, key: str) -> _Path:
    return ("optimizers", number, *((key, name) if key == STATE_DICT_KEY else ("state", name, key)))


def _pickled(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


def _is_extra(name: str, value: Any) -> bool:
    """Tell whether an entry of a state dict comes from a module's ``get_extra_state``, which may return a tensor."""
    return not isinstance(value, Tensor) or name.rpartition(".")[2] == "_extra_state"


def _empty(stored: Any) -> Tensor | None:
    """Make a tensor like a stored one; None for an object."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _room_of(param: Tensor, found: ParamPart | None, key: str, stored: Any) -> Any:
    """Make the tensor or chunks that an entry of a parameter's state is read into; None for an object."""
    room = _empty(stored)
    if room is None or (found is None and (key == "step" or room.shape != param.shape)):
        return room
    if found is None:
        return torch.empty_like(param, dtype=room.dtype, requires_grad=False)  # with the parameter's strides
    if not found.splits(key, room.shape):
        return room
    return Chunks.of(found, torch.empty(found.numel, dtype=room.dtype, device=param.device))


def _require_same_groups(number: int, saved: Sequence[Sequence[str]], mine: Sequence[Sequence[str]]) -> None:
    for at, (theirs, ours) in enumerate(zip_longest(saved, mine, fillvalue=())):
        if odd := sorted(set(theirs) ^ set(ours)):
            where = "the optimizer" if odd[0] in ours else "the checkpoint"
            raise ValueError(
                f"expected group {at} of optimizer {number} to hold the parameters with which it was saved, found "
                f"{odd[0]!r} in {where} only"
            )
