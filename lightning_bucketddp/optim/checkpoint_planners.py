"""Planners for ``torch.distributed.checkpoint``: which boxes of which tensors a rank writes, and reads into what.

Both are torch's public base classes, so that its storage and its exchange of plans and errors are used as they are.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from lightning_bucketddp.layout.chunks import overlap

FORMAT_KEY = "lightning_bucketddp"
"""Entry of the metadata's ``planner_data`` that says who has written it, and which parameters each group has."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and this rank's memory of it."""

    offsets: tuple[int, ...]
    memory: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box, as the format has it."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.memory.shape)


@dataclass
class Contents:
    """What a rank offers to write, or wants to read.

    Attributes:
        tensors: By key, the whole tensor's shape and dtype, and this rank's pieces.
        objects: By key, what is pickled.
        paths: By key, where it comes in the nested dict that it is part of.
        groups: Per optimizer and group, the names of the parameters.
        read: By key, tensors made to read into: 1-D for parts.
    """

    tensors: dict[str, tuple[torch.Size, torch.dtype, list[Piece]]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    groups: list[list[list[str]]] = field(default_factory=list)
    read: dict[str, Tensor] = field(default_factory=dict)

    def add(self, path: tuple[Any, ...], shape: torch.Size, dtype: torch.dtype, pieces: list[Piece]) -> None:
        """Adds a tensor."""
        self.tensors[key_of(path)] = shape, dtype, pieces
        self.paths[key_of(path)] = path

    def add_whole(self, path: tuple[Any, ...], tensor: Tensor) -> None:
        """Adds a tensor that this rank holds all of."""
        self.add(path, tensor.shape, tensor.dtype, [Piece((0,) * tensor.dim(), tensor.detach())])

    def add_object(self, path: tuple[Any, ...], value: Any) -> None:
        """Adds something that is no tensor."""
        self.objects[key_of(path)] = value
        self.paths[key_of(path)] = path

    def piece(self, index: MetadataIndex) -> Piece:
        """The piece at an index."""
        return next(it for it in self.tensors[index.fqn][2] if torch.Size(it.offsets) == index.offset)


def key_of(path: tuple[Any, ...]) -> str:
    """The key under which the format has what comes at a path of the nested dict."""
    return ".".join(str(step) for step in path)


def portable(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Has what a method raises be of a class that the other ranks can unpickle, or they would wait for it for ever."""

    @functools.wraps(method)
    def raising(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if type(error).__module__ == "builtins":
                raise
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return raising


class BoxSavePlanner(DefaultSavePlanner):
    """Offers a rank's pieces. What several ranks offer is written by the one that has least to write."""

    def __init__(self, contents: Callable[[], Contents]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._make = contents

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Makes what this rank offers; here, so that all ranks hear of it if that fails."""
        self._contents = self._make()
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """This rank's pieces and objects."""
        items: list[WriteItem] = []
        for key, (shape, dtype, pieces) in self._contents.tensors.items():
            for piece in pieces:
                data = TensorWriteData(piece.chunk, TensorProperties(dtype=dtype), shape)
                items.append(WriteItem(MetadataIndex(key, piece.offsets), WriteItemType.SHARD, tensor_data=data))
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._contents.objects]
        self.plan = SavePlan(items, planner_data=(self._contents.paths, self._contents.groups))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what, on the first rank."""
        plans, metadata = super().create_global_plan(all_plans)
        # By key the path, as torch's own planner has it, for tools that put the nested dict together again.
        planner_data: dict[str, Any] = {}
        for plan in all_plans:
            planner_data.update(plan.planner_data[0])
        planner_data[FORMAT_KEY] = {"version": 1, "groups": all_plans[0].planner_data[1]}
        self.metadata = replace(metadata, planner_data=planner_data)
        return [replace(plan, planner_data=None) for plan in plans], self.metadata

    @portable
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """What is written for an item."""
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self._contents.objects[write_item.index.fqn], stream)
            return stream
        return self._contents.piece(write_item.index).memory


class BoxLoadPlanner(LoadPlanner):
    """Has read what overlaps with a rank's pieces, into their memory."""

    def __init__(self, contents: Callable[[Metadata], Contents]) -> None:
        self._make = contents
        self.contents = Contents()

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Makes what this rank wants; here, so that all ranks hear of it if that fails."""
        assert metadata is not None
        self._metadata = metadata
        self.contents = self._make(metadata)

    def create_local_plan(self) -> LoadPlan:
        """Every overlap of a piece with what was written."""
        items: list[ReadItem] = []
        nothing = torch.Size([])
        for key, (_, _, pieces) in self.contents.tensors.items():
            stored = self._metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            for piece in pieces:
                for number, chunk in enumerate(stored.chunks):
                    common = overlap((piece.offsets, piece.memory.shape), (chunk.offsets, chunk.sizes))
                    if common is not None:
                        items.append(
                            ReadItem(
                                LoadItemType.TENSOR,
                                MetadataIndex(key, piece.offsets),
                                torch.Size(common.in_first),
                                MetadataIndex(key, chunk.offsets, number),
                                torch.Size(common.in_second),
                                torch.Size(common.sizes),
                            )
                        )
        for key in self.contents.objects:
            index = MetadataIndex(key)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    @portable
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickles an object."""
        # Not weights_only: hyper-parameters and extra state may be anything, and the format's metadata is a pickle.
        key = read_item.dest_index.fqn
        self.contents.objects[key] = torch.load(value, map_location="cpu", weights_only=False)

    @torch.no_grad()
    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The memory to read an overlap into."""
        memory = self.contents.piece(read_item.dest_index).memory
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            memory = memory.narrow(dim, offset, length)
        return memory

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: it was read to where it belongs."""
