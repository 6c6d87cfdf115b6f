"""Planners for ``torch.distributed.checkpoint``, for tensors that are divided between ranks."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_tensor_shard

from lightning_bucketddp.layout.chunks import chunks_of
from lightning_bucketddp.optim.parts import ParamPart


@dataclass(frozen=True)
class Chunks:
    """A tensor of which this rank holds some chunks.

    torch calls the methods with underscores, as it does on a DTensor (``torch.distributed._checkpointable``).

    Attributes:
        shape: The whole tensor's shape.
        part: This rank's elements, as its optimizer sees them.
        flat: The same, 1-D.
        chunks: The same as chunks, by their offsets.
    """

    shape: torch.Size
    part: Tensor
    flat: Tensor
    chunks: Mapping[torch.Size, Tensor]

    @classmethod
    def of(cls, found: ParamPart, memory: Tensor) -> Chunks:
        """Cut the memory of a part into chunks."""
        spec, part, flat = *found, found.run(memory)
        shape = torch.Size(spec.shape)
        if spec.numel == 0:  # an empty chunk, as readers expect the key
            return cls(shape, memory, flat, {torch.Size([0] * len(shape)): flat.view(shape)})
        chunks: dict[torch.Size, Tensor] = {}
        for chunk in chunks_of(spec.shape, spec.strides, part.start, part.stop):
            at = chunk.at - part.start
            ordered = flat[at : at + chunk.numel].view([chunk.sizes[dim] for dim in chunk.order])
            chunks[torch.Size(chunk.offsets)] = ordered.permute([chunk.order.index(dim) for dim in range(len(shape))])
        return cls(shape, memory, flat, chunks)

    def size(self) -> torch.Size:
        """Return the whole tensor's shape."""
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, chunk.shape) for offsets, chunk in self.chunks.items()]

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.flat.dtype)
        data = [TensorWriteData(chunk, properties, self.shape) for chunk in self.__create_chunk_list__()]
        return [
            WriteItem(MetadataIndex(key, shard.chunk.offsets), WriteItemType.SHARD, tensor_data=shard) for shard in data
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.chunks[index.offset]


class ChunksSavePlanner(DefaultSavePlanner):
    """Plans to write tensors, :class:`Chunks` and pickles. torch divides what several ranks hold between them.

    Args:
        data: Saved with the checkpoint's metadata.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__()
        self._data = data

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Take the state dict as it is."""
        self.state_dict, self.mappings, self.is_coordinator = state_dict, self._data, is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the memory at an index."""
        return find_tensor_shard(self.state_dict[index.fqn], index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Leave objects as they are, which are pickles already."""
        return object


class ChunksLoadPlanner(DefaultLoadPlanner):
    """Plans to read pickles, and all values of this rank's tensors and chunks into their memory."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the state dict as it is."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the memory at an index."""
        return find_tensor_shard(self.state_dict[index.fqn], index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle an object."""
        # Not weights_only: hyper-parameters and extra state may be anything, and the format's metadata is a pickle.
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=False)
