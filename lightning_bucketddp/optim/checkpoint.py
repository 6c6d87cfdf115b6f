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

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.layout.chunks import chunks_of
from lightning_bucketddp.layout.plan import ParamSpec
from lightning_bucketddp.layout.shards import Part
from lightning_bucketddp.optim.checkpoint_planners import (
    FORMAT_KEY,
    Chunks,
    ChunksLoadPlanner,
    ChunksSavePlanner,
    Contents,
    portable,
)
from lightning_bucketddp.optim.masters import STATE_DICT_KEY, params_of
from lightning_bucketddp.optim.sharded_params import SHARD_KEY, is_per_element
from lightning_bucketddp.optim.sharding import Sharding


def _in_chunks(spec: ParamSpec, part: Part, flat: Tensor) -> Chunks:
    """A part's memory as the chunks that checkpoints are made of."""
    if spec.numel == 0:  # of which every rank has all; readers want to see it
        return Chunks(torch.Size(spec.shape), flat, {torch.Size([0] * len(spec.shape)): flat.view(spec.shape)})
    found: dict[torch.Size, Tensor] = {}
    for chunk in chunks_of(spec.shape, spec.strides, part.start, part.stop):
        at = chunk.at - part.start
        memory = flat[at : at + chunk.numel].view([chunk.sizes[dim] for dim in chunk.order])
        order = [chunk.order.index(dim) for dim in range(len(chunk.order))]
        found[torch.Size(chunk.offsets)] = memory.permute(order)
    return Chunks(torch.Size(spec.shape), flat, found)


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
        prepare: Callable[[Optimizer], object],
    ) -> None:
        self._module = module
        self._collectives = collectives
        self._sharding = sharding
        self._prepare = prepare
        self._names = {
            id(param): name for name, param in reversed(list(module.named_parameters(remove_duplicate=False)))
        }

    # -- saving --------------------------------------------------------------------------------------

    def save(
        self, path: Path, optimizers: Sequence[Optimizer], extra: Mapping[str, Any] | None, overwrite: bool
    ) -> None:
        """Saves into a directory, which comes into being when everything has been written."""
        partial = path.with_name(f"{path.name}.partial")

        def contents() -> Contents:
            if self._collectives.rank == 0:
                if path.exists() and not overwrite:
                    raise FileExistsError(
                        f"expected nothing at {path}, found something; pass overwrite=True to replace it"
                    )
                for left in partial.iterdir() if partial.is_dir() else ():  # of a save that was interrupted
                    left.unlink()
            return self._contents_to_save(optimizers, extra)

        what = f"saving to {path}"
        writer = FileSystemWriter(partial)
        group = self._collectives.group
        try:
            self._together(
                what, lambda: save({}, storage_writer=writer, planner=ChunksSavePlanner(contents), process_group=group)
            )
        except BaseException:
            if self._collectives.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        problem: str | None = None
        try:
            if self._collectives.rank == 0:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.exists():
                    path.unlink()
                os.replace(partial, path)
        except OSError as error:
            problem = str(error)
        self._raise_together(what, problem)

    @portable
    def _contents_to_save(self, optimizers: Sequence[Optimizer], extra: Mapping[str, Any] | None) -> Contents:
        contents = Contents()
        contents.groups = [self._groups(number, optimizer) for number, optimizer in enumerate(optimizers)]
        first = self._collectives.rank == 0
        for name, value in self._module.state_dict(keep_vars=True).items():
            path = ("model", name)
            if not isinstance(value, Tensor):
                if first:
                    contents.add(path, value)
            elif first or id(value) in self._names:
                # Module buffers are rank 0's, as in any checkpoint: they may differ between synchronisations.
                contents.add(path, self._own(value))
        for number, optimizer in enumerate(optimizers):
            self._add_optimizer(contents, number, optimizer, first)
        if extra is not None and first:
            contents.add(("extra",), dict(extra))
        return contents

    def _add_optimizer(self, contents: Contents, number: int, optimizer: Optimizer, first: bool) -> None:
        self._prepare(optimizer)
        packed = optimizer.state_dict()
        packed.pop(SHARD_KEY, None)
        masters = packed.pop(STATE_DICT_KEY, {})
        known = self._sharding.sharded(optimizer) if self._sharding is not None else None
        sharded = known is not None
        if known is not None:  # whose hooks may be gone, training having ended
            params = enumerate(params_of(optimizer))
            masters = {index: master for index, param in params if (master := known.master(param)) is not None}
        state = dict(packed.pop("state"))
        for index, param in enumerate(params_of(optimizer)):
            name = self._names[id(param)]
            found = self._find(param) if sharded else None
            for key, value in state.pop(index, {}).items():
                if isinstance(value, Tensor):
                    value = value.detach()
                    if found is not None and key != "step" and value.shape == (found[1].stop - found[1].start,):
                        value = _in_chunks(*found, value)
                contents.add(("optimizers", number, "state", name, key), value)
            if index in masters:
                master = masters[index].detach()
                value = master if found is None else _in_chunks(*found, master)
                contents.add(("optimizers", number, STATE_DICT_KEY, name), value)
        if first:
            groups = [
                {**group, "params": names}
                for group, names in zip(packed.pop("param_groups"), contents.groups[number], strict=True)
            ]
            contents.add(("optimizers", number, "param_groups"), groups)
            if state or packed:  # of optimizers that keep something of their own
                contents.add(("optimizers", number, "others"), {"state": state, "entries": packed})

    # -- loading -------------------------------------------------------------------------------------

    def load(
        self, path: Path, optimizers: Sequence[Optimizer], strict: bool, with_module: bool = True
    ) -> dict[str, Any]:
        """Loads from a directory; gives what the caller had added."""
        what = f"loading from {path}"
        self._raise_together(what, None if path.is_dir() else f"expected a directory, found none: {path}")
        if self._sharding is not None:
            self._sharding.wait()
        planner = ChunksLoadPlanner(lambda metadata: self._contents_to_load(metadata, optimizers, strict, with_module))
        self._together(
            what,
            lambda: load(
                {}, storage_reader=FileSystemReader(path), planner=planner, process_group=self._collectives.group
            ),
        )
        problem: str | None = None
        try:
            self._apply(planner.contents, optimizers)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self._raise_together(what, problem)
        if self._sharding is not None:
            self._sharding.replaced()
        return planner.contents.values.get("extra", {})

    @portable
    def _contents_to_load(
        self, metadata: Metadata, optimizers: Sequence[Optimizer], strict: bool, with_module: bool
    ) -> Contents:
        written = (metadata.planner_data or {}).get(FORMAT_KEY) if isinstance(metadata.planner_data, dict) else None
        if written is None:
            raise ValueError("expected a checkpoint that BucketDDP.save_sharded() has written, found another one")
        contents = Contents()
        saved = metadata.state_dict_metadata
        paths = {key: path for key, path in metadata.planner_data.items() if key != FORMAT_KEY}
        if with_module:
            of_module = {key: saved[key] for key, path in paths.items() if path[0] == "model"}
            self._want_module(contents, of_module, strict)
        if "extra" in saved:
            contents.add(("extra",), None)
        if not optimizers:
            return contents
        if len(written["groups"]) != len(optimizers):
            raise ValueError(
                f"expected as many optimizers as the checkpoint has, {len(written['groups'])}, found "
                f"{len(optimizers)}; pass none to load the module alone"
            )
        for number, optimizer in enumerate(optimizers):
            _require_same_groups(number, written["groups"][number], self._groups(number, optimizer))
            mine = {key: path for key, path in paths.items() if path[:2] == ("optimizers", number)}
            self._want_optimizer(contents, number, optimizer, {path: saved[key] for key, path in mine.items()})
        return contents

    def _want_module(self, contents: Contents, saved: Mapping[str, Any], strict: bool) -> None:
        present = self._module.state_dict(keep_vars=True)
        missing = [name for name in present if f"model.{name}" not in saved]
        unknown = sorted(key.removeprefix("model.") for key in saved.keys() - {f"model.{name}" for name in present})
        if strict and (missing or unknown):
            raise ValueError(
                "expected the checkpoint of a module with the same names, found "
                + " and ".join(
                    f"{what} {', '.join(map(repr, names[:5]))}{' and others' if len(names) > 5 else ''}"
                    for what, names in (("without", missing), ("with unknown", unknown))
                    if names
                )
            )
        wanted: set[int] = set()
        for name, value in present.items():
            stored = saved.get(f"model.{name}")
            if stored is None or id(value) in wanted:
                continue
            if not isinstance(value, Tensor):
                contents.add(("model", name), None)
                continue
            wanted.add(id(value))  # tied parameters are saved under each name
            _require_shape(stored, value, f"{name!r}")
            contents.add(("model", name), self._own(value))

    def _want_optimizer(
        self, contents: Contents, number: int, optimizer: Optimizer, saved: Mapping[tuple[Any, ...], Any]
    ) -> None:
        prepared = self._prepare(optimizer)
        sharded = prepared is not None and self._sharding is not None
        by_name = {self._names[id(param)]: param for param in params_of(optimizer)}
        for path, stored in saved.items():
            if path[2] not in ("state", STATE_DICT_KEY):
                contents.add(path, None)
                continue
            param = by_name[str(path[3])]
            found = self._find(param) if sharded else None
            if found is not None and found[1].empty:
                continue  # what a rank has no part of it has no state of
            if not isinstance(stored, TensorStorageMetadata):
                contents.add(path, None)
                continue
            if path[2] == STATE_DICT_KEY:
                _require_shape(stored, param, f"the master parameter of {path[3]!r}")
                per_element = True
            else:
                per_element = path[4] != "step" and stored.size == param.shape
            dtype = stored.properties.dtype
            if found is not None:
                per_element = per_element or is_per_element(
                    str(path[4]), torch.empty(stored.size, device="meta"), found[0]
                )
            if found is not None and per_element:
                flat = torch.empty(found[1].stop - found[1].start, dtype=dtype, device=param.device)
                contents.add(path, _in_chunks(*found, flat))
            elif per_element:
                contents.add(path, torch.empty_like(param, dtype=dtype, requires_grad=False))
            else:
                contents.add(path, torch.empty(stored.size, dtype=dtype))

    def _apply(self, contents: Contents, optimizers: Sequence[Optimizer]) -> None:
        """What has been read into tensors of its own gets to where it belongs."""
        for number, optimizer in enumerate(optimizers):
            described = optimizer.state_dict().get(SHARD_KEY)
            index_of = {self._names[id(param)]: index for index, param in enumerate(params_of(optimizer))}
            state: dict[Any, dict[str, Any]] = {}
            masters: dict[int, Tensor] = {}
            for key, path in contents.paths.items():
                if path[:2] != ("optimizers", number) or path[2] not in ("state", STATE_DICT_KEY):
                    continue
                index = index_of[str(path[3])]
                value = contents.values[key]
                value = value.flat if isinstance(value, Chunks) else value
                if path[2] == STATE_DICT_KEY:
                    masters[index] = value
                else:
                    state.setdefault(index, {})[path[4]] = value
            groups = contents.values[f"optimizers.{number}.param_groups"]
            others = contents.values.get(f"optimizers.{number}.others", {"state": {}, "entries": {}})
            loaded: dict[str, Any] = {
                **others["entries"],
                "state": {**dict(sorted(state.items())), **others["state"]},
                "param_groups": [
                    {**group, "params": [index_of[name] for name in names]}
                    for group, names in zip(groups, self._groups(number, optimizer), strict=True)
                ],
            }
            if described is not None:
                loaded[SHARD_KEY] = described
            if masters:
                loaded[STATE_DICT_KEY] = masters
            optimizer.load_state_dict(loaded)
        objects = {
            str(path[1]): contents.values[key]
            for key, path in contents.paths.items()
            if path[0] == "model" and not isinstance(contents.values[key], Tensor | Chunks)
        }
        if objects:  # extra state, which modules take in themselves
            self._module.load_state_dict(objects, strict=False)

    # -- parts ---------------------------------------------------------------------------------------

    def _find(self, param: Tensor) -> tuple[ParamSpec, Part] | None:
        """This rank's part of a parameter; None if the parameter is not sharded."""
        return self._sharding.find(param) if self._sharding is not None else None

    def _own(self, value: Tensor) -> Tensor | Chunks:
        """What this rank holds of a parameter or module buffer."""
        found = self._find(value)
        if found is None:
            return value.detach()
        assert self._sharding is not None
        return _in_chunks(*found, self._sharding.param_part(value).detach())

    def _groups(self, number: int, optimizer: Optimizer) -> list[list[str]]:
        """The names of each group's parameters."""
        groups: list[list[str]] = []
        for at, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in self._names:
                    raise ValueError(
                        f"expected optimizer {number} to hold parameters of the module, which are saved by name; found "
                        f"another one of shape {tuple(param.shape)} in its group {at}"
                    )
            groups.append([self._names[id(param)] for param in group["params"]])
        return groups

    # -- together ------------------------------------------------------------------------------------

    def _together(self, what: str, run: Callable[[], object]) -> None:
        try:
            run()
        except CheckpointException as error:  # on every rank, whoever has failed
            failures = [(rank, failure[0]) for rank, failure in sorted(error.failures.items())]
            kind = type(failures[0][1]) if failures else RuntimeError
            if kind not in (ValueError, TypeError, FileExistsError):
                kind = RuntimeError
            first = failures[0][1] if failures else error
            ranks = ", ".join(str(rank) for rank, _ in failures)
            raise kind(f"{what} failed on rank {ranks}: {first}") from first

    def _raise_together(self, what: str, problem: str | None) -> None:
        found = self._collectives.exchange_objects(problem)
        failed = [rank for rank, it in enumerate(found) if it is not None]
        if failed:
            raise RuntimeError(f"{what} failed on rank {', '.join(map(str, failed))}: {found[failed[0]]}")


def _require_shape(stored: Any, value: Tensor, what: str) -> None:
    size = stored.size if isinstance(stored, TensorStorageMetadata) else None
    if size != value.shape:
        found = "no tensor" if size is None else f"shape {tuple(size)}"
        raise ValueError(f"expected {what} to have shape {tuple(value.shape)} in the checkpoint, found {found}")


def _require_same_groups(number: int, saved: Sequence[Sequence[str]], mine: Sequence[Sequence[str]]) -> None:
    if len(saved) != len(mine):
        raise ValueError(
            f"expected the checkpoint of an optimizer with {len(mine)} parameter groups, as optimizer {number} has, "
            f"found {len(saved)}"
        )
    for at, (theirs, ours) in enumerate(zip(saved, mine, strict=True)):
        missing, unknown = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
        if missing or unknown:
            name, where = (missing[0], "the optimizer") if missing else (unknown[0], "the checkpoint")
            raise ValueError(
                f"expected group {at} of optimizer {number} to hold the parameters with which it was saved, found "
                f"{name!r} in {where} only"
            )
