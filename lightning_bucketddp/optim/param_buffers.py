"""The parameters of a sharded optimizer in flat tensors, one per bucket of their gradients.

One all-gather then fills all parameters of a bucket.

Others may see a parameter's memory: an alias (``param.detach()``, a NumPy array), or another process. In place it is
filled by the all-gather like the rest. If it lies elsewhere (``param.share_memory_()``, ``param.data = tensor``), the
parameter comes into its place for the length of a step, and back when the new values are there::

    between steps    param.data ─▶ memory that others see
    step             param.data ─▶ its place in the flat tensor; the optimizer, then the all-gather, write there
    its end          values are copied into the memory that others see; param.data ─▶ that memory
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.devices import has_addresses
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.peers.agreement import WrapError


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


def require_own_values(name: str, param: Tensor) -> None:
    """Require that a parameter's values lie in its own memory, where shards of them can be put together.

    Raises:
        WrapError: If the parameter wraps other tensors, as quantised weights do.
    """
    if hasattr(param, "__tensor_flatten__"):  # torch's protocol for such tensors
        raise WrapError(
            f"expected plain tensors to train with shard_optimizer=True, found parameter {name!r}, a "
            f"{type(param).__name__} that wraps other tensors; freeze it, or train without shard_optimizer"
        )


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
"""How many tensors and Python objects hold a storage. Private: torch has no public way. Without it all are seen."""


def _has_aliases(storage: torch.UntypedStorage, params: int = 1) -> bool:
    """Whether anything holds a storage besides its Python object and its parameters.

    Args:
        storage: The storage.
        params: How many parameters lie in it.
    """
    return _use_count is None or _use_count(storage._cdata) > params + 1


class ParamBuffers:
    """Holds parameters in flat tensors that follow the layout of their gradients.

    Attributes:
        flats: One flat tensor per bucket, of the parameters' dtype; none before :meth:`lay_out` and after
            :meth:`release`.
    """

    def __init__(self) -> None:
        self.flats: list[Tensor] = []
        self._layout = Layout((), (), ())
        self._bucket_of: dict[int, int] = {}  # by slot
        self._addresses: dict[int, int] = {}  # by slot, where the parameter's data began
        self._storages: dict[int, torch.UntypedStorage] = {}  # by slot, the parameter's in its place
        self._elsewhere: dict[int, Tensor] = {}  # by slot, memory that others see and that this step writes at its end

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
        self._bucket_of = {slot: index for index, bucket in enumerate(layout.buckets) for slot in bucket.slots}
        del self.flats[kept:]  # old memory is freed bucket by bucket
        new = [slot for bucket in layout.buckets[kept:] for slot in bucket.slots]
        for slot in new:
            require_own_values(layout.slots[slot].spec.name, params[slot])
        self._note_seen(new, params)
        for index, bucket in enumerate(layout.buckets[kept:], kept):
            first = params[bucket.slots[0]]
            self.flats.append(torch.zeros(bucket.numel, dtype=first.dtype, device=first.device))
            for slot in bucket.slots:
                self._move(index, slot, params[slot])
        self.give_back(params)

    def _note_seen(self, slots: Iterable[int], params: Sequence[nn.Parameter]) -> None:
        """Note the memory of parameters that others see. Several parameters may lie in one storage (cuDNN's LSTM)."""
        storages = {slot: params[slot].untyped_storage() for slot in slots}
        inside = Counter(storage.data_ptr() for storage in storages.values())
        for slot, storage in storages.items():
            in_shared_memory = storage.device.type == "cpu" and storage.is_shared()  # all of CUDA's may be shared
            seen = in_shared_memory or _has_aliases(storage, inside[storage.data_ptr()])
            if seen and has_addresses(storage.device) and slot not in self._elsewhere:
                self._elsewhere[slot] = params[slot].data

    def _move(self, index: int, slot: int, param: nn.Parameter) -> None:
        place = self._layout.slots[slot]
        begin = place.offset - self._layout.buckets[index].start
        memory = with_own_storage(self.flats[index], begin, begin + place.spec.numel)
        param.data = memory.as_strided(place.spec.shape, place.spec.strides).copy_(param.data)
        self._addresses[slot] = param.data_ptr()
        if has_addresses(param.device):  # else many parameters lie in one storage
            self._storages[slot] = param.untyped_storage()

    @torch.no_grad()
    def bring_back(self, params: Sequence[nn.Parameter]) -> None:
        """Bring parameters into their places that lie elsewhere; until :meth:`give_back`, if others see them there.

        Args:
            params: The parameter of each slot.

        Raises:
            RuntimeError: If the present data do not fit into the parameter's place.
        """
        out = [slot for slot, param in enumerate(params) if param.data_ptr() != self._addresses[slot]]
        for slot in out:
            self._require_fits(slot, params[slot])
        self._note_seen(out, params)
        for slot in out:
            self._move(self._bucket_of[slot], slot, params[slot])

    def _require_fits(self, slot: int, param: nn.Parameter) -> None:
        spec = self._layout.slots[slot].spec
        expected = spec.shape, spec.param_dtype or spec.dtype, spec.device
        found = tuple(param.shape), param.dtype, str(param.device)
        if found != expected:
            raise RuntimeError(
                f"expected parameter {spec.name!r} as it was wrapped, with shape, dtype and device {expected}, found "
                f"{found}; change the module before it is wrapped"
            )

    def seen(self) -> set[int]:
        """Return the buckets with parameters that others see, in their places or elsewhere."""
        return {self._bucket_of[slot] for slot in (*self._with_aliases(), *self._elsewhere)}

    def _with_aliases(self) -> list[int]:
        """The slots whose places have aliases. Every step asks."""
        return [slot for slot, storage in self._storages.items() if _has_aliases(storage)]

    @torch.no_grad()
    def give_back(self, params: Sequence[nn.Parameter]) -> None:
        """Write the values of parameters into the memory where others see them, and let the parameters lie there.

        Args:
            params: The parameter of each slot.
        """
        for slot, memory in self._elsewhere.items():
            params[slot].data = memory.copy_(params[slot])
        self._elsewhere.clear()

    @torch.no_grad()
    def release(self, params: Sequence[nn.Parameter]) -> None:
        """Give every parameter memory of its own, unless others see it where it is."""
        self.give_back(params)
        seen = self._with_aliases()
        for slot, address in self._addresses.items():
            if params[slot].data_ptr() == address and slot not in seen:
                params[slot].data = params[slot].data.clone()
        self.flats, self._layout, self._addresses, self._storages = [], Layout((), (), ()), {}, {}
