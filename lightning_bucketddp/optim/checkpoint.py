"""Checkpoints that all ranks write and read together, each its own parts, through ``torch.distributed.checkpoint``.

Nothing is ever put together on one rank: what a rank's optimizer does not hold it neither writes nor reads, but for
parameters that are not sharded and for what is small. Parts are written as boxes of the tensors that they are parts of
(:mod:`lightning_bucketddp.layout.chunks`), under these keys, with the shapes that the tensors have in one process::

    model.<name>                            parameters, module buffers, extra state
    optimizers.<i>.state.<name>.<key>       the i-th optimizer's state, by the parameter's name
    optimizers.<i>.master_params.<name>     fp32 master parameters
    optimizers.<i>.param_groups             hyper-parameters; "params" are names
    extra                                   what the caller adds

So a checkpoint loads at any world size and with any buckets, sharded or not, and torch's tools for the format read it:
``dcp_to_torch_save`` makes one file of it, ``{"model": ..., "optimizers": [...], "extra": ...}``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.optim.checkpoint_planners import Chunks, ChunksLoadPlanner, ChunksSavePlanner, DirectoryWriter
from lightning_bucketddp.optim.parts import Parts
from lightning_bucketddp.optim.sharding import Sharding
from lightning_bucketddp.optim.state_dicts import SHARD_KEY, STATE_DICT_KEY, is_per_element, params_of
from lightning_bucketddp.optim.swap import Swap, swap_of

FORMAT_KEY = "lightning_bucketddp"
"""Entry of the metadata's ``planner_data`` that says who has written it, and which parameters each group has."""

_KEPT = (ValueError, TypeError, FileExistsError, RuntimeError)
"""Errors that are raised on all ranks as what they are on one."""

_T = TypeVar("_T")


class _Contents:
    """What a rank offers to write, or wants to read.

    Attributes:
        values: By key, a tensor or :class:`Chunks` to write or to read into, or a pickle.
        paths: By key, where it comes in the nested dict that it is part of.
        groups: Per optimizer and group, the names of the parameters.
    """

    def __init__(self, groups: list[list[list[str]]]) -> None:
        self.groups = groups
        self.values: dict[str, Any] = {}
        self.paths: dict[str, tuple[Any, ...]] = {}

    def add(self, path: tuple[Any, ...], value: Any) -> None:
        """Add a tensor, :class:`Chunks`, or an object, which is pickled."""
        key = ".".join(map(str, path))
        self.paths[key] = path
        if not isinstance(value, Tensor | Chunks):
            stream = io.BytesIO()
            torch.save(value, stream)
            value = stream
        self.values[key] = value

    def nested(self) -> Any:
        """The nested dict, of tensors, of this rank's elements of tensors, and of objects."""
        values = {key: value.flat if isinstance(value, Chunks) else value for key, value in self.values.items()}
        return unflatten_state_dict(values, self.paths)


class ShardedCheckpoint:
    """Saves and loads a module and its optimizers, each rank its own parts. All ranks must call the same alike.

    Args:
        module: The module.
        collectives: The ranks that take part.
        sharding: What knows who has which part; None if every rank has everything.
        prepare: Called with each optimizer first: makes it one that has masters, or is sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        collectives: Collectives,
        sharding: Sharding | None,
        prepare: Callable[[Optimizer], Swap | None],
    ) -> None:
        self._module = module
        self._collectives = collectives
        self._parts = Parts() if sharding is None else sharding.params
        self._prepare = prepare
        self._names = {
            id(param): name for name, param in reversed(list(module.named_parameters(remove_duplicate=False)))
        }

    # -- saving --------------------------------------------------------------------------------------

    def save(
        self, path: Path, optimizers: Sequence[Optimizer], extra: Mapping[str, Any] | None, overwrite: bool
    ) -> None:
        """Save into a directory, which comes into being when everything has been written."""
        writer = DirectoryWriter(path)

        def make() -> _Contents:
            if self._collectives.rank == 0:
                if path.exists() and not overwrite:
                    raise FileExistsError(
                        f"expected nothing at {path}, found something; pass overwrite=True to replace it"
                    )
                writer.discard()
            return self._contents_to_save(optimizers, extra)

        what = f"saving to {path}"
        contents = self._together(what, make)
        # By key the path, for tools that put the nested dict together again.
        planner = ChunksSavePlanner({**contents.paths, FORMAT_KEY: {"version": 1, "groups": contents.groups}})
        group = self._collectives.group
        try:
            self._together(
                what, lambda: save(contents.values, storage_writer=writer, planner=planner, process_group=group)
            )
        except BaseException:
            if self._collectives.rank == 0:
                writer.discard()
            raise

    def _contents_to_save(self, optimizers: Sequence[Optimizer], extra: Mapping[str, Any] | None) -> _Contents:
        contents = _Contents([self._groups(number, optimizer) for number, optimizer in enumerate(optimizers)])
        first = self._collectives.rank == 0
        for name, value in self._module.state_dict(keep_vars=True).items():
            # Module buffers are rank 0's, as in any checkpoint: they may differ between synchronisations.
            if first or id(value) in self._names:
                contents.add(("model", name), self._own(value))
        for number, optimizer in enumerate(optimizers):
            self._add_optimizer(contents, number, optimizer)
        if extra is not None and first:
            contents.add(("extra",), dict(extra))
        return contents

    def _add_optimizer(self, contents: _Contents, number: int, optimizer: Optimizer) -> None:
        swap = self._prepare(optimizer) or swap_of(optimizer)  # without hooks, if training has ended
        packed = optimizer.state_dict()
        state = dict(packed.pop("state"))
        packed = {key: value for key, value in packed.items() if key not in (SHARD_KEY, STATE_DICT_KEY)}
        for index, param in enumerate(params_of(optimizer)):
            name = self._names[id(param)]
            found = None if swap is None else swap.stepped.parts.find(param)
            own: dict[tuple[Any, ...], Any] = {
                ("state", name, key): value for key, value in state.pop(index, {}).items()
            }
            if swap is not None and (master := swap.master(param)) is not None:
                own[STATE_DICT_KEY, name] = master
            for path, value in own.items():
                if isinstance(value, Tensor):
                    value = value.detach()
                    if found is not None and path[2:] != ("step",) and value.shape == (found.numel,):
                        value = Chunks.of(found, value)
                contents.add(("optimizers", number, *path), value)
        groups = zip(packed.pop("param_groups"), contents.groups[number], strict=True)
        if self._collectives.rank == 0:
            named = [{**group, "params": names} for group, names in groups]
            contents.add(("optimizers", number, "param_groups"), named)
            if state or packed:  # of optimizers that keep something of their own
                contents.add(("optimizers", number, "others"), {"state": state, "entries": packed})

    # -- loading -------------------------------------------------------------------------------------

    def load(
        self, path: Path, optimizers: Sequence[Optimizer], strict: bool, with_module: bool = True
    ) -> dict[str, Any]:
        """Load from a directory; give what the caller had added."""
        what = f"loading from {path}"
        self._parts.wait()
        reader = FileSystemReader(path)

        def make() -> _Contents:
            if not path.is_dir():
                raise RuntimeError(f"expected a directory, found none: {path}")
            return self._contents_to_load(reader.read_metadata(), optimizers, strict, with_module)

        contents = self._together(what, make)
        planner, group = ChunksLoadPlanner(), self._collectives.group
        self._together(what, lambda: load(contents.values, storage_reader=reader, planner=planner, process_group=group))
        extra = self._together(what, lambda: self._apply(contents, optimizers))
        self._parts.replaced()
        return extra

    def _contents_to_load(
        self, metadata: Metadata, optimizers: Sequence[Optimizer], strict: bool, with_module: bool
    ) -> _Contents:
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        if FORMAT_KEY not in paths:
            raise ValueError("expected a checkpoint that BucketDDP.save_sharded() has written, found another one")
        groups = paths[FORMAT_KEY]["groups"]
        saved = {paths[key]: stored for key, stored in metadata.state_dict_metadata.items()}
        contents = _Contents([self._groups(number, optimizer) for number, optimizer in enumerate(optimizers)])
        if with_module:
            self._want_module(contents, {path[1]: it for path, it in saved.items() if path[0] == "model"}, strict)
        if ("extra",) in saved:
            contents.add(("extra",), None)
        if optimizers and len(groups) != len(optimizers):
            raise ValueError(
                f"expected as many optimizers as the checkpoint has, {len(groups)}, found {len(optimizers)}; pass none "
                "to load the module alone"
            )
        for number, optimizer in enumerate(optimizers):
            _require_same_groups(number, groups[number], contents.groups[number])
            mine = {path: stored for path, stored in saved.items() if path[:2] == ("optimizers", number)}
            self._want_optimizer(contents, optimizer, mine)
        return contents

    def _want_module(self, contents: _Contents, saved: Mapping[str, Any], strict: bool) -> None:
        present = self._module.state_dict(keep_vars=True)
        missing = [name for name in present if name not in saved]
        for what, names in (("without", missing), ("with unknown", sorted(saved.keys() - present.keys()))):
            if strict and names:
                listed = f"{', '.join(map(repr, names[:5]))}{' and others' if len(names) > 5 else ''}"
                raise ValueError(f"expected the checkpoint of a module with the same names, found {what} {listed}")
        wanted: set[int] = set()
        for name, value in present.items():
            if name not in saved or id(value) in wanted:
                continue  # tied parameters are saved under each name
            if _is_extra(name, value):
                contents.add(("model", name), _empty(saved[name]))
            else:
                wanted.add(id(value))
                contents.add(("model", name), self._own(value))

    def _want_optimizer(self, contents: _Contents, optimizer: Optimizer, saved: Mapping[tuple[Any, ...], Any]) -> None:
        swap = self._prepare(optimizer) or swap_of(optimizer)
        by_name = {self._names[id(param)]: param for param in params_of(optimizer)}
        for path, stored in saved.items():
            if path[2] not in ("state", STATE_DICT_KEY):
                contents.add(path, None)
                continue
            param, key = by_name[path[3]], path[4] if path[2] == "state" else STATE_DICT_KEY
            found = None if swap is None else swap.stepped.parts.find(param)
            if found is not None and not found.numel:
                continue  # what a rank has no part of it has no state of
            room: Any = _empty(stored)
            if room is not None and found is not None and is_per_element(key, room.shape, found.spec):
                room = Chunks.of(found, torch.empty(found.numel, dtype=room.dtype, device=param.device))
            elif room is not None and (key == STATE_DICT_KEY or (key != "step" and room.shape == param.shape)):
                room = torch.empty_like(param, dtype=room.dtype, requires_grad=False)
            contents.add(path, room)

    def _apply(self, contents: _Contents, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Hand over what has been read into tensors of its own; give what the caller had added."""
        read = contents.nested()
        for number, optimizer in enumerate(optimizers):
            mine = {"state": {}, STATE_DICT_KEY: {}, **read["optimizers"][number]}
            others = mine.get("others", {"state": {}, "entries": {}})
            index_of = {self._names[id(param)]: index for index, param in enumerate(params_of(optimizer))}
            by_index = {
                part: dict(sorted((index_of[name], it) for name, it in mine[part].items()))
                for part in ("state", STATE_DICT_KEY)
            }
            groups = [
                {**group, "params": [index_of[name] for name in names]}
                for group, names in zip(mine["param_groups"], contents.groups[number], strict=True)
            ]
            described = optimizer.state_dict().get(SHARD_KEY)
            loaded = {**others["entries"], **by_index, "param_groups": groups}
            loaded["state"].update(others["state"])
            optimizer.load_state_dict(loaded if described is None else {**loaded, SHARD_KEY: described})
        present = self._module.state_dict(keep_vars=True)
        read_model = read.get("model", {})
        extra_state = {name: value for name, value in read_model.items() if _is_extra(name, present[name])}
        if extra_state:  # which modules take in themselves
            self._module.load_state_dict(extra_state, strict=False)
        return read.get("extra", {})

    # -- parts ---------------------------------------------------------------------------------------

    def _own(self, value: Any) -> Any:
        """What this rank holds of an entry of the module's state dict."""
        if not isinstance(value, Tensor):
            return value
        found, memory = self._parts.find(value), self._parts.param_part(value).detach()
        return memory if found is None else Chunks.of(found, memory)

    def _groups(self, number: int, optimizer: Optimizer) -> list[list[str]]:
        """The names of each group's parameters."""
        for at, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in self._names:
                    raise ValueError(
                        f"expected optimizer {number} to hold parameters of the module, which are saved by name; found "
                        f"another one of shape {tuple(param.shape)} in its group {at}"
                    )
        return [[self._names[id(param)] for param in group["params"]] for group in optimizer.param_groups]

    # -- together ------------------------------------------------------------------------------------

    def _together(self, what: str, run: Callable[[], _T]) -> _T:
        """Run something on every rank.

        Raises:
            RuntimeError: If it raised on some rank, on all of them; or another error, if that is for callers.
        """
        problem: BaseException | None = None
        try:
            result = run()
        except CheckpointException as error:  # torch's, on every rank, whoever has failed
            failure = error.failures.get(self._collectives.rank)
            problem = None if failure is None else failure[0]
        except Exception as error:
            problem = error
        told = None
        if problem is not None:  # not the error itself, which might not be unpickled
            kept = next((kind for kind in _KEPT if isinstance(problem, kind)), None)
            told = kept or RuntimeError, str(problem) if kept else f"{type(problem).__name__}: {problem}"
        failed = {rank: it for rank, it in enumerate(self._collectives.exchange_objects(told)) if it is not None}
        if failed:
            kind, message = next(iter(failed.values()))
            raise kind(f"{what} failed on rank {', '.join(map(str, failed))}: {message}") from problem
        return result


def _is_extra(name: str, value: Any) -> bool:
    """Whether an entry of a state dict is what a module's ``get_extra_state`` gave, which may be a tensor."""
    return not isinstance(value, Tensor) or name.rpartition(".")[2] == "_extra_state"


def _empty(stored: Any) -> Tensor | None:
    """What is read into where nothing but the checkpoint tells what it is."""
    return (
        torch.empty(stored.size, dtype=stored.properties.dtype) if isinstance(stored, TensorStorageMetadata) else None
    )


def _require_same_groups(number: int, saved: Sequence[Sequence[str]], mine: Sequence[Sequence[str]]) -> None:
    for at, (theirs, ours) in enumerate(zip_longest(saved, mine, fillvalue=())):
        if odd := sorted(set(theirs) ^ set(ours)):
            where = "the optimizer" if odd[0] in ours else "the checkpoint"
            raise ValueError(
                f"expected group {at} of optimizer {number} to hold the parameters with which it was saved, found "
                f"{odd[0]!r} in {where} only"
            )
