"""torch's planners for ``torch.distributed.checkpoint``, for tensors of which each rank holds a part."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

FORMAT_KEY = "lightning_bucketddp"
"""Entry of the metadata's ``planner_data`` that says who has written it, and which parameters each group has."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Chunks:
    """A tensor of which this rank holds some elements.

    torch's planners ask the methods with underscores, as they ask a DTensor's (``torch.distributed._checkpointable``).

    Attributes:
        shape: The whole tensor's shape.
        flat: This rank's elements, 1-D.
        chunks: By their offsets, the same elements as boxes.
    """

    shape: torch.Size
    flat: Tensor
    chunks: Mapping[torch.Size, Tensor]

    def size(self) -> torch.Size:
        """The whole tensor's shape."""
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, chunk.shape) for offsets, chunk in self.chunks.items()]

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.flat.dtype)
        return [
            WriteItem(
                MetadataIndex(key, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


@dataclass
class Contents:
    """What a rank offers to write, or wants to read.

    Attributes:
        values: By key, a tensor or :class:`Chunks` to write or to read into, or what is pickled.
        paths: By key, where it comes in the nested dict that it is part of.
        groups: Per optimizer and group, the names of the parameters.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    groups: list[list[list[str]]] = field(default_factory=list)

    def add(self, path: tuple[Any, ...], value: Any) -> None:
        """Adds a value under the key of its path."""
        key = ".".join(str(step) for step in path)
        self.values[key] = value
        self.paths[key] = path

    def memory(self, index: MetadataIndex) -> Any:
        """The value, or the chunk of it, at an index."""
        value = self.values[index.fqn]
        return value.chunks[index.offset or torch.Size([])] if isinstance(value, Chunks) else value


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


class ChunksSavePlanner(DefaultSavePlanner):
    """Offers what a rank has. What several ranks offer is written by the one that has least to write."""

    def __init__(self, contents: Callable[[], Contents]) -> None:
        super().__init__()
        self._make = contents

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Makes what this rank offers; here, so that all ranks hear of it if that fails."""
        self._contents = self._make()
        self.state_dict = self._contents.values
        # By key the path, for tools that put the nested dict together again.
        written = {"version": 1, "groups": self._contents.groups}
        self.mappings = {**self._contents.paths, FORMAT_KEY: written}  # type: ignore[dict-item]
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The memory at an index."""
        return self._contents.memory(index)

    @portable
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """What is written for an item."""
        return super().resolve_data(write_item)


class ChunksLoadPlanner(DefaultLoadPlanner):
    """Has read what overlaps with a rank's parts, into their memory."""

    def __init__(self, contents: Callable[[Metadata], Contents]) -> None:
        super().__init__(flatten_state_dict=False)
        self._make = contents
        self.contents = Contents()

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Makes what this rank wants; here, so that all ranks hear of it if that fails."""
        assert metadata is not None
        self.metadata = metadata
        self.contents = self._make(metadata)
        self.state_dict = self.contents.values

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The memory at an index."""
        memory: Tensor = self.contents.memory(index)
        return memory

    @portable
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickles an object, whose tensors stay on the CPU."""
        # Not weights_only: hyper-parameters and extra state may be anything, and the format's metadata is a pickle.
        key = read_item.dest_index.fqn
        self.contents.values[key] = torch.load(value, map_location="cpu", weights_only=False)
