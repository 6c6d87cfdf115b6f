"""Sharded checkpoints: all ranks write and read one directory, each its own parts.

``torch.distributed.checkpoint`` does the work. No rank ever holds a whole tensor that is sharded. Parts are written as
chunks of the tensors (:mod:`lightning_bucketddp.layout.chunks`), under these keys, with the shapes of one process::

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
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_bucketddp.comm.host_copy import HostCopy
from lightning_bucketddp.optim import checkpoint_places as places
from lightning_bucketddp.optim.checkpoint_planners import Chunks, ChunksLoadPlanner, ChunksSavePlanner
from lightning_bucketddp.optim.checkpoint_writer import CheckpointWriter
from lightning_bucketddp.optim.parts import ParamPart, Parts
from lightning_bucketddp.optim.stepped import SHARD_KEY, STATE_DICT_KEY, params_of
from lightning_bucketddp.optim.swap import Swap, swap_of
from lightning_bucketddp.peers.ranks import Ranks

_log = logging.getLogger("lightning_bucketddp")

FORMAT_KEY = "lightning_bucketddp"
"""Entry of the metadata's ``planner_data``: {"version": 1, "groups": the parameters' names, by optimizer and group}."""


class ShardedCheckpoint:
    """Saves and loads a module and its optimizers. All ranks must call the same alike.

    Args:
        module: The module.
        ranks: The ranks.
        parts: This rank's part of each parameter; all of it if None.
        prepare: Called with each optimizer first; gives it shards or masters.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        parts: Parts | None,
        prepare: Callable[[Optimizer], Swap | None],
    ) -> None:
        self._module, self._ranks, self._parts, self._prepare = module, ranks, parts or Parts(), prepare
        self._names = {id(param): name for name, param in module.named_parameters()}

    # -- saving --------------------------------------------------------------------------------------

    def save(
        self,
        path: Path,
        optimizers: Sequence[Optimizer],
        extra: Mapping[str, Any] | None,
        overwrite: bool,
        writer: CheckpointWriter | None = None,
    ) -> None:
        """Save into a directory, which appears when it is complete.

        With a writer, values are copied to the host here, and the writer's thread writes the copies.
        """
        first, what, partial = self._ranks.rank == 0, f"saving to {path}", places.partial_of(path)
        if writer is None:
            group, storage = self._ranks.collectives.group, FileSystemWriter(partial)
        else:  # values are on the host then: the thread asks for no device
            group, storage = writer.group, FileSystemWriter(partial, per_thread_copy_ahead=0)

        def collect() -> tuple[Callable[[], dict[str, Any]], dict[str, Any]]:
            _require_numpy()
            if first and path.exists() and not overwrite:
                raise FileExistsError(f"expected nothing at {path}, found something; pass overwrite=True to replace it")
            if first:
                places.make_room(path)
            groups = [self._groups(number, optimizer) for number, optimizer in enumerate(optimizers)]
            own = self._own_names()
            nested: dict[str, Any] = {"model": self._module_values(own)}
            if optimizers:
                pairs = zip(optimizers, groups, strict=True)
                nested["optimizers"] = [self._optimizer_values(*pair, own) for pair in pairs]
            if first and extra is not None:
                nested["extra"] = _storable(dict(extra))
            flat, paths = flatten_state_dict(nested)
            values = (lambda: flat) if writer is None else _copied(flat)
            return values, {**paths, FORMAT_KEY: {"version": 1, "groups": groups}}

        def write() -> None:
            try:
                save(values(), storage_writer=storage, planner=ChunksSavePlanner(data), process_group=group)
                if first:  # all ranks have written
                    places.put_in_place(path)
            finally:
                if first and not places.is_complete(partial):
                    shutil.rmtree(partial, ignore_errors=True)  # is there if somebody has failed

        values, data = self._ranks.together(what, collect)
        if writer is None:
            self._ranks.together(what, write)
        else:
            writer.save(path, write)

    def _own_names(self) -> set[str]:
        """The names of the parameters that this rank writes, with their state: its parts of those that are divided.

        Of the others each rank writes some, as many bytes as the other ranks.
        """
        rank, sums, own = self._ranks.rank, [0] * self._ranks.world_size, set()
        for name, param in self._module.named_parameters():
            writes = rank
            if self._parts.find(param) is None:
                writes = sums.index(min(sums))
                sums[writes] += param.nbytes
            if writes == rank:
                own.add(name)
        return own

    def _module_values(self, own: set[str]) -> dict[str, Any]:
        """Return the entries of the module's state dict that this rank offers to write."""
        first, state_dict = self._ranks.rank == 0, self._module.state_dict(keep_vars=True)
        # Module buffers are rank 0's, as in any checkpoint: they may differ between synchronisations.
        return {
            name: _storable(self._memory(value))
            for name, value in state_dict.items()
            if (self._names[id(value)] in own if id(value) in self._names else first)
        }

    def _optimizer_values(self, optimizer: Optimizer, groups: list[list[str]], own: set[str]) -> dict[str, Any]:
        """Return the entries of an optimizer's state that this rank offers to write, by its parameters' names."""
        swap = self._prepare(optimizer) or swap_of(optimizer)
        packed = optimizer.state_dict()
        state = dict(packed.pop("state"))
        values: dict[str, Any] = {"state": {}, STATE_DICT_KEY: {}}
        for index, param in enumerate(params_of(optimizer)):
            name, found = self._names[id(param)], self._parts.find(param)
            entries = dict(state.pop(index, {}))
            if name not in own:
                continue
            if swap is not None and (master := swap.master(param)) is not None:  # also if the swap is closed
                entries[STATE_DICT_KEY] = master
            for key, value in entries.items():
                if found is not None and found.is_split(key, value):
                    value = Chunks.of(found, value.detach())
                entries[key] = _storable(value)
            if STATE_DICT_KEY in entries:
                values[STATE_DICT_KEY][name] = entries.pop(STATE_DICT_KEY)
            values["state"][name] = entries
        if self._ranks.rank == 0:
            named = zip(packed.pop("param_groups"), groups, strict=True)
            values["param_groups"] = _storable([{**group, "params": names} for group, names in named])
            rest = {key: value for key, value in packed.items() if key not in (SHARD_KEY, STATE_DICT_KEY)}
            if state or rest:  # some optimizers keep more
                values["others"] = _storable({"state": state, "entries": rest})
        return values

    # -- loading -------------------------------------------------------------------------------------

    def load(
        self, path: Path, optimizers: Sequence[Optimizer], strict: bool, with_module: bool = True
    ) -> dict[str, Any]:
        """Load from a directory; return the caller's ``extra``."""
        left = places.found(path)
        if left != path:
            _log.warning("rank %d: expected %s, found %s, as a save was killed", self._ranks.rank, path, left)
        what, path, reader = f"loading from {path}", left, FileSystemReader(left)
        self._parts.wait()

        def make_room() -> tuple[dict[str, Any], dict[str, Any]]:
            _require_numpy()
            if not path.is_dir():
                raise RuntimeError(f"expected a directory that save_sharded() has written, found none: {path}")
            metadata = reader.read_metadata()
            paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
            if FORMAT_KEY not in paths:
                raise ValueError("expected a checkpoint that BucketDDP.save_sharded() has written, found another one")
            self._require_fit(paths, optimizers, strict and with_module)
            return self._room(metadata, optimizers, with_module), paths

        flat, paths = self._ranks.together(what, make_room)

        def read() -> None:
            load(flat, storage_reader=reader, planner=ChunksLoadPlanner(), process_group=self._ranks.collectives.group)

        self._ranks.together(what, read)
        values = {
            key: value.part.shaped(value.flat) if isinstance(value, Chunks) else value for key, value in flat.items()
        }
        nested = unflatten_state_dict(values, paths)
        self._ranks.together(what, lambda: self._apply(nested, optimizers))
        self._parts.replaced()
        return nested.get("extra", {})

    def _require_fit(self, paths: Mapping[str, Any], optimizers: Sequence[Optimizer], strict: bool) -> None:
        """Require that names and parameter groups are those of the checkpoint."""
        saved = {path[1] for path in paths.values() if isinstance(path, tuple) and path[0] == "model"}
        present = self._module.state_dict(keep_vars=True).keys()
        for what, names in (("without", sorted(present - saved)), ("with unknown", sorted(saved - present))):
            if strict and names:
                listed = f"{', '.join(map(repr, names[:5]))}{' and others' if len(names) > 5 else ''}"
                raise ValueError(f"expected the names of the module in the checkpoint, found one {what} {listed}")
        groups = paths[FORMAT_KEY]["groups"]
        if optimizers and len(groups) != len(optimizers):
            raise ValueError(
                f"expected as many optimizers as the checkpoint has, {len(groups)}, found {len(optimizers)}; pass none "
                "to load the module alone"
            )
        for number, optimizer in enumerate(optimizers):
            self._prepare(optimizer)
            pairs = zip_longest(groups[number], self._groups(number, optimizer), fillvalue=())
            for at, (theirs, ours) in enumerate(pairs):
                if odd := sorted(set(theirs) ^ set(ours)):
                    raise ValueError(
                        f"expected group {at} of optimizer {number} to hold the parameters with which it was saved, "
                        f"found {odd[0]!r} in {'the optimizer' if odd[0] in ours else 'the checkpoint'} only"
                    )

    def _room(self, metadata: Metadata, optimizers: Sequence[Optimizer], with_module: bool) -> dict[str, Any]:
        """Return the memory that this rank reads into, by key: tensors and chunks, None for an object."""
        present = self._module.state_dict(keep_vars=True) if with_module else {}
        by_name = [{self._names[id(param)]: param for param in params_of(optimizer)} for optimizer in optimizers]
        room: dict[str, Any] = {}
        own_ids = self._own_ids()
        for key, stored in metadata.state_dict_metadata.items():
            match metadata.planner_data[key]:
                case ("model", name) if name in present:
                    own = id(present[name]) in own_ids
                    room[key] = self._memory(present[name]) if own else _empty(stored)
                case ("optimizers", number, "state" | "master_params" as kind, name, *rest) if optimizers:
                    param = by_name[number][name]
                    found = self._parts.find(param)
                    if found is None or found.numel:
                        room[key] = _room_of(param, found, rest[0] if rest else kind, stored)
                case ("extra",) | ("optimizers", _, "param_groups" | "others"):
                    room[key] = None
        return room

    def _apply(self, nested: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Load the optimizers' state and what modules make for a state dict, which were read into other memory."""
        for number, optimizer in enumerate(optimizers):
            saved = {"state": {}, STATE_DICT_KEY: {}, **nested["optimizers"][number]}
            others = saved.get("others", {"state": {}, "entries": {}})
            index_of = {self._names[id(param)]: index for index, param in enumerate(params_of(optimizer))}
            state, masters = (
                {index_of[n]: entries for n, entries in saved[key].items()} for key in ("state", STATE_DICT_KEY)
            )
            own = optimizer.state_dict()
            pairs = zip(saved["param_groups"], own["param_groups"], strict=True)
            groups = [{**group, "params": mine["params"]} for group, mine in pairs]
            loaded = {"state": {**state, **others["state"]}, STATE_DICT_KEY: masters, "param_groups": groups}
            shard = {SHARD_KEY: own[SHARD_KEY]} if SHARD_KEY in own else {}
            optimizer.load_state_dict({**others["entries"], **loaded, **shard})
        present = self._module.state_dict(keep_vars=True)
        own_ids = self._own_ids()
        made = {name: value for name, value in nested.get("model", {}).items() if id(present[name]) not in own_ids}
        if made:
            self._module.load_state_dict(made, strict=False)

    # -- details -------------------------------------------------------------------------------------

    def _own_ids(self) -> set[int]:
        """The ids of parameters and module buffers. Other entries of a state dict, as extra state, are made for it."""
        return {*self._names, *map(id, self._module.buffers())}

    def _memory(self, value: Any) -> Any:
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


def _require_numpy() -> None:
    """Require NumPy before ranks wait for each other: torch unpickles what they send with it."""
    try:
        torch.empty(0).numpy()
    except RuntimeError as error:
        raise RuntimeError(
            "expected NumPy, with which torch.distributed.checkpoint exchanges plans between ranks, found none that "
            "works. Install it: pip install numpy"
        ) from error


def _storable(value: Any) -> Any:
    """Return what a checkpoint can store: tensors and chunks as they are, other objects pickled."""
    if isinstance(value, Tensor | Chunks):
        return value
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


def _copied(flat: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Start to copy tensors and chunks to the host; return a function that waits for the copies."""
    copies = {key: _copy(value) for key, value in flat.items()}
    return lambda: {key: read() for key, read in copies.items()}


def _copy(value: Any) -> Callable[[], Any]:
    if isinstance(value, Chunks):
        copy = HostCopy(value.flat)
        return lambda: Chunks.of(value.part, copy.read())
    return HostCopy(value.detach()).read if isinstance(value, Tensor) else lambda: value


def _empty(stored: Any) -> Tensor | None:
    """Make a tensor like a stored one; None for an object."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _room_of(param: Tensor, found: ParamPart | None, key: str, stored: Any) -> Any:
    """Make the tensor or chunks that an entry of a parameter's state is read into; None for an object."""
    room = _empty(stored)
    if room is None or key == "step":
        return room
    if found is not None and found.splits(key, room.shape):
        return Chunks.of(found, found.shaped(torch.empty(found.numel, dtype=room.dtype, device=param.device)))
    # With the parameter's strides where that is possible.
    whole = found is None and room.shape == param.shape
    return torch.empty_like(param, dtype=room.dtype, requires_grad=False) if whole else room
