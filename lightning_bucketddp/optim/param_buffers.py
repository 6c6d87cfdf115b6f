"""The parameters of a sharded optimizer in flat tensors, one per bucket of their gradients.

One all-gather then fills all parameters of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.devices import has_addresses
from lightning_bucketddp.layout.plan import Layout


def with_own_storage(flat: Tensor, start: int, stop: int) -> Tensor:
    """View ``flat[start:stop]`` through a storage of that size, where torch can make one.

    ``torch.save``, ``pickle`` and ``deepcopy`` of a view write all of its storage: a state dict of one parameter would
    hold the whole bucket.
    """
    if not has_addresses(flat.device):
        return flat[start:stop]
    size = flat.element_size()
    memory = flat.untyped_storage()[start * size : stop * size]  # shares the memory, and keeps it alive
    assert isinstance(memory, torch.UntypedStorage)
    return flat.new_empty(0).set_(memory, 0, (stop - start,), (1,))


class ParamBuffers:
    """Holds parameters in flat tensors that follow the layout of their gradients.

    Attributes:
        flats: One flat tensor per bucket, of the parameters' dtype; none before :meth:`lay_out` and after
            :meth:`release`.
    """

    def __init__(self) -> None:
        self.flats: list[Tensor] = []
        self._layout = Layout((), (), ())
        self._addresses: dict[int, int] = {}  # by slot, where the parameter's data began

    @torch.no_grad()
    def lay_out(self, layout: Layout, params: Sequence[nn.Parameter]) -> None:
        """Move the data of parameters into new flat tensors. Buckets that stay keep theirs.

        Args:
            layout: The layout. Parameters in one bucket have one dtype.
            params: The parameter of each slot.
        """
        buckets = zip(layout.buckets, self._layout.buckets, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], buckets))
        self._layout = layout
        del self.flats[kept:]  # old memory is freed bucket by bucket
        for index, bucket in enumerate(layout.buckets[kept:], kept):
            first = params[bucket.slots[0]]
            self.flats.append(torch.zeros(bucket.numel, dtype=first.dtype, device=first.device))
            for slot in bucket.slots:
                self._move(index, slot, params[slot])

    def _move(self, index: int, slot: int, param: nn.Parameter) -> None:
        place = self._layout.slots[slot]
        begin = place.offset - self._layout.buckets[index].start
        memory = with_own_storage(self.flats[index], begin, begin + place.spec.numel)
        param.data = memory.as_strided(place.spec.shape, place.spec.strides).copy_(param.data)
        self._addresses[slot] = param.data_ptr()

    @torch.no_grad()
    def bring_back(self, params: Sequence[nn.Parameter]) -> None:
        """Move parameters back whose data were replaced (``param.data = tensor``, ``share_memory_()``).

        Args:
            params: The parameter of each slot.

        Raises:
            RuntimeError: If the new data do not fit into the parameter's place.
        """
        for slot, param in enumerate(params):
            if param.data_ptr() != self._addresses[slot]:
                self._bring_back(slot, param)

    def _bring_back(self, slot: int, param: nn.Parameter) -> None:
        spec = self._layout.slots[slot].spec
        expected = spec.shape, spec.param_dtype or spec.dtype, spec.device
        found = tuple(param.shape), param.dtype, str(param.device)
        if found != expected:
            raise RuntimeError(
                f"expected parameter {spec.name!r} as it was wrapped, with shape, dtype and device {expected}, found "
                f"{found}; change the module before it is wrapped"
            )
        index = next(index for index, bucket in enumerate(self._layout.buckets) if slot in bucket.slots)
        self._move(index, slot, param)

    @torch.no_grad()
    def release(self, params: Sequence[nn.Parameter]) -> None:
        """Give every parameter memory of its own."""
        for slot, address in self._addresses.items():
            if params[slot].data_ptr() == address:
                params[slot].data = params[slot].data.clone()
        self.flats, self._layout, self._addresses = [], Layout((), (), ()), {}
