"""The memory in which parameters lie bucket by bucket, as their gradients do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_bucketddp.layout.plan import Bucket, Layout


def with_own_storage(flat: Tensor, start: int, stop: int) -> Tensor:
    """The memory of ``flat[start:stop]``, with a storage that ends where it does, where torch has such.

    Whoever saves, pickles or copies a view, as one parameter filtered from a state dict, saves all of its storage.
    """
    if flat.device.type not in ("cpu", "cuda"):  # where a pointer into memory may not be one
        return flat[start:stop]
    size = flat.element_size()
    try:
        memory = flat.untyped_storage()[start * size : stop * size]  # shares the memory, and keeps it alive
    except (RuntimeError, TypeError):  # not documented
        return flat[start:stop]
    assert isinstance(memory, torch.UntypedStorage)
    return flat.new_empty(0).set_(memory, 0, (stop - start,), (1,))


class ParamBuffers:
    """The parameters' memory: a flat tensor for each bucket, of the parameters' dtype.

    Attributes:
        layout: The layout that the parameters follow now.
        flats: One per bucket.
    """

    def __init__(self) -> None:
        self.layout = Layout((), (), ())
        self.flats: list[Tensor] = []
        self._views: list[Tensor] = []
        self._addresses: list[int] = []

    @torch.no_grad()
    def lay_out(self, layout: Layout, params: Sequence[nn.Parameter]) -> None:
        """Move parameters into flat tensors of their own, which follow ``layout``.

        Args:
            layout: The layout. Parameters in one bucket have one dtype.
            params: The parameter of each slot; stays the object that it is.
        """
        self.flats, self._views = [], []  # old memory goes as its last parameter moves
        flats: list[Tensor] = []
        views: dict[int, Tensor] = {}
        for bucket in layout.buckets:
            first = params[bucket.slots[0]]
            flat = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
            for slot in bucket.slots:
                view = views[slot] = self._view(layout, bucket, slot, flat)
                view.copy_(params[slot].data)
                params[slot].data = view
            flats.append(flat)
        self.layout, self.flats = layout, flats
        self._views = [views[slot] for slot in range(len(layout.slots))]
        self._addresses = [view.data_ptr() for view in self._views]

    @staticmethod
    def _view(layout: Layout, bucket: Bucket, slot: int, flat: Tensor) -> Tensor:
        place = layout.slots[slot]
        begin = place.offset - bucket.start
        return with_own_storage(flat, begin, begin + place.spec.numel).as_strided(place.spec.shape, place.spec.strides)

    @torch.no_grad()
    def bring_back(self, slot: int, param: nn.Parameter) -> None:
        """Take a parameter in again whose data were replaced (``param.data = tensor``, ``share_memory_()``).

        Raises:
            RuntimeError: If what it has now does not fit into its place.
        """
        if param.data_ptr() == self._addresses[slot]:
            return
        view = self._views[slot]
        if param.shape != view.shape or param.dtype != view.dtype or param.device != view.device:
            raise RuntimeError(
                f"expected parameter {self.layout.slots[slot].spec.name!r} as it was wrapped, of shape "
                f"{tuple(view.shape)}, {view.dtype} on {view.device}, found {tuple(param.shape)}, {param.dtype} on "
                f"{param.device}; change the module before it is wrapped"
            )
        # Made anew, as the view's storage may have gone elsewhere too, into memory shared with a process.
        index = next(index for index, bucket in enumerate(self.layout.buckets) if slot in bucket.slots)
        view = self._views[slot] = self._view(self.layout, self.layout.buckets[index], slot, self.flats[index])
        view.copy_(param.data)
        param.data = view

    @torch.no_grad()
    def release(self, params: Sequence[nn.Parameter]) -> None:
        """Give every parameter memory of its own."""
        for view, param in zip(self._views, params, strict=False):
            if param.data_ptr() == view.data_ptr():
                param.data = torch.empty_like(view).copy_(view)
        self.__init__()  # type: ignore[misc]
