"""BatchNorm over the batches of all ranks together, on every backend. On accelerators torch's own layer does the work.

On the CPU each rank sends a count and, for each channel, the sum of its values and of their squares. Every rank adds
them up in the same order, so running statistics have the same bits on all ranks. Backward sends the gradients of these
sums in the same way.

These collectives have a process group of their own. Buckets are launched whenever they are ready: in one group the two
kinds of collectives would come in a different order on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.devices import is_accelerator
from lightning_bucketddp.comm.groups import group_apart
from lightning_bucketddp.peers.agreement import RankMismatchError
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.participant import Participant

_FIRST_MESSAGE = 2 * 256 + 2
"""Numbers in the first message of every exchange; layers of up to 256 channels need no second one.

The length is the same for all layers, as gloo aborts processes that send each other different lengths. So ranks find
out that they are in different layers before they send anything else.
"""


class StatisticsLink(Participant):
    """Connects the layers of one module with the other ranks. Copies of a layer share it; a pickle has an empty one.

    It takes part in the passes of the wrapper around the module, if there is one: it hears when a backward has ended.

    Args:
        collectives: The group that statistics travel in; None after loading from a pickle.
        names: The layers' qualified names, by number.

    Attributes:
        peers: The other ranks, as the wrapper sees them; None while there is no wrapper.
        counts: False while this rank repeats a batch only to stay in step: the batch is not in the statistics.
    """

    peers: Peers | None
    counts: Callable[[], bool]

    def __init__(self, collectives: Collectives | None = None, names: Sequence[str] = ()) -> None:
        self.collectives = collectives
        self._names = names
        self.leave()

    def join(self, peers: Peers, counts: Callable[[], bool]) -> None:
        """Note that the module has been wrapped.

        Args:
            peers: The wrapper's.
            counts: As the attribute.
        """
        self.leave()
        self.peers, self.counts = peers, counts

    def leave(self) -> None:
        """Note that the module is not wrapped, or no longer."""
        self.peers, self.counts = None, lambda: True
        self._forwards: list[tuple[int, int]] = []  # layer and length of the sums, of forwards since the last backward
        self._reached = False  # whether backward has come to a layer

    def note_forward(self, layer: int, length: int) -> None:
        """Note a forward that backward may come to."""
        if self.peers is not None:
            self._forwards.append((layer, length))

    def backward_ended(self, raised: bool) -> None:
        """Send zeros for all layers if backward came to none of them: a loss that reaches no layer counts as zero.

        The order is autograd's: the last forward comes first.

        Args:
            raised: Whether backward raised.
        """
        forwards, self._forwards = self._forwards, []
        if not (raised or self._reached):
            for layer, length in reversed(forwards):
                self.sum(torch.zeros(length, dtype=torch.float64), layer, backward=True)
        self._reached = False

    def __deepcopy__(self, memo: dict[int, Any]) -> StatisticsLink:
        return self

    def __reduce__(self) -> tuple[type[StatisticsLink], tuple[()]]:
        return StatisticsLink, ()

    def sum(self, values: Tensor, layer: int, backward: bool = False) -> Tensor:
        """Add up the ranks' values for a layer.

        Args:
            values: A number, and two per channel, in fp64 on the CPU.
            layer: The layer's number.
            backward: Whether this is its backward.

        Returns:
            As many numbers, with the same bits on every rank.

        Raises:
            PeerFailureError: If another rank failed.
            RankMismatchError: If another rank is in another layer.
            RuntimeError: The backend's, if a peer is gone or the time is up and there is no wrapper.
        """
        self._reached |= backward
        collectives, peers = self.collectives, self.peers
        assert collectives is not None

        def gather(part: Tensor) -> Tensor:
            what = f"the statistics of {self._names[layer]!r}"
            with nullcontext() if peers is None else peers.waiting_for(what, Phase.EXCHANGE):
                everyone, work = collectives.all_gather(part)
                work.wait()
            return everyone

        first_tag = 0 if peers is None else peers.number << 32  # tells layers of two wrappers apart
        end = values.numel() + 1
        mine = values.new_zeros(max(end, _FIRST_MESSAGE))
        mine[0], mine[1:end] = first_tag + 2 * layer + backward, values
        everyone = gather(mine[:_FIRST_MESSAGE])
        if not bool((everyone[:, 0] == mine[0]).all()):
            raise RankMismatchError(
                f"rank {collectives.rank}: ranks met in different BatchNorm layers; this rank is in "
                f"{'backward' if backward else 'forward'} of {self._names[layer]!r}. Look for a branch that depends on "
                "the rank or on its data: every rank must reach these layers in the same order"
            )
        if end > _FIRST_MESSAGE:
            everyone = torch.cat((everyone, gather(mine[_FIRST_MESSAGE:])), 1)
        return everyone[:, 1:end].sum(0)


class _SumOverRanks(torch.autograd.Function):
    """Sums over the ranks. Their gradients are sums over the ranks too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, link: StatisticsLink, layer: int) -> Tensor:
        ctx.link, ctx.layer = link, layer
        return link.sum(values, layer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.link.sum(grad, ctx.layer, backward=True), None, None


class SyncBatchNorm(nn.SyncBatchNorm):
    """A BatchNorm layer with statistics over the batches of all ranks together.

    Only :func:`convert_sync_batchnorm` makes it, by changing a layer's class. So references, hooks, attributes,
    ``isinstance`` and keys of the state dict stay as they are.
    """

    _original_class: type[_BatchNorm]
    _link: StatisticsLink
    _number: int

    @property
    def process_group(self) -> dist.ProcessGroup | None:  # type: ignore[override]
        """The group that statistics travel in; torch's layer reads it."""
        collectives = self._link.collectives
        return collectives.group if collectives is not None else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies and pickles cannot find this class by its name, as it is made on demand.
        return _new_layer, (self._original_class,), super().__reduce_ex__(protocol)[2]

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; in training by mean and variance over all ranks' batches.

        Args:
            input: Of shape ``(N, C, *)``. ``N`` may differ between ranks, and be 0 on some.

        Raises:
            ValueError: On all ranks, if they have no more than one value per channel together.
            PeerFailureError: If another rank fails while this one waits for it.
            RankMismatchError: If the ranks are not in the same layer.
        """
        collectives = self._link.collectives
        if not self.training or collectives is None or collectives.world_size == 1:
            return _BatchNorm.forward(self, input)
        if is_accelerator(input.device):
            return super().forward(input)
        self._check_input_dim(input)
        x, link = input.to(torch.promote_types(input.dtype, torch.float32)), self._link
        dims, shape = [0, *range(2, x.dim())], (1, -1, *(1 for _ in x.shape[2:]))
        size, total = x.numel() // x.shape[1], x.sum(dims, dtype=torch.float64)
        near = (total.detach() / max(size, 1)).to(x.dtype)
        centred = x - near.view(shape)  # near zero: its squares lose nothing in fp32
        squares = centred.square().sum(dims, dtype=torch.float64) + near * (2 * total - size * near.double())
        mine = torch.cat((total.new_tensor([size]), total, squares))
        if mine.requires_grad:
            link.note_forward(self._number, mine.numel())
        mine = mine if link.counts() else torch.zeros_like(mine)
        sums: Tensor = _SumOverRanks.apply(mine, link, self._number)
        count = int(sums[0])
        if count < 2:
            raise ValueError(
                f"expected more than 1 value per channel in training, found {count} in all ranks' batches together"
            )
        mean, mean_square = (sums[1:] / count).view(2, -1)
        var = (mean_square - mean.square()).clamp(min=0)
        self._track(mean, var * (count / (count - 1)))
        factor, offset = (var + self.eps).rsqrt().to(x.dtype), (near - mean).to(x.dtype)
        factor = factor if self.weight is None else factor * self.weight
        offset = offset * factor if self.bias is None else offset * factor + self.bias
        return torch.addcmul(offset.view(shape), centred, factor.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_var: Tensor) -> None:
        """Move the running statistics towards this batch's."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / self.num_batches_tracked.item()
        assert momentum is not None
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), momentum)


def convert_sync_batchnorm(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, timeout: timedelta | None = None
) -> nn.Module:
    """Give all BatchNorm layers of a module the statistics of all ranks' batches together. Convert before wrapping.

    torch's ``SyncBatchNorm.convert_sync_batchnorm`` makes new layers, for accelerators alone. This function changes the
    class of the layers, on every backend. Layers of torch's ``SyncBatchNorm`` with a process group of their own stay as
    they are. All ranks must call this at the same point.

    Args:
        module: The module; changed in place.
        process_group: The ranks that compute statistics together, in a group that nothing else travels in. By default a
            group of all ranks, which is made once.
        timeout: How long collectives of the default group wait; torch's default if None.

    Returns:
        The module.

    Raises:
        ValueError: If a layer's class has a ``forward`` of its own, which would be lost, or a layer has yet to see its
            first input (``LazyBatchNorm``); names it.
    """
    layers = [(name, layer) for name, layer in module.named_modules() if _can_convert(layer)]
    for name, layer in layers:
        if isinstance(layer, LazyModuleMixin):  # takes its final class in its first forward
            raise ValueError(
                f"expected BatchNorm layers that know their number of channels, found {name!r} of class "
                f"{type(layer).__qualname__}; run one batch through the module first"
            )
        if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            raise ValueError(
                f"expected BatchNorm layers with torch's own forward, found {name!r} of class "
                f"{type(layer).__qualname__}, whose own forward would be lost; give it torch's class, or synchronise "
                "its statistics by hand"
            )
    if not layers:
        return module
    group = process_group if process_group is not None else group_apart(timeout)
    link = StatisticsLink(Collectives(group), [name for name, _ in layers])
    for number, (_, layer) in enumerate(layers):
        vars(layer).update(_link=link, _number=number)
        layer.__class__ = _synchronised(type(layer))  # type: ignore[arg-type]
    return module


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Give the layers that :func:`convert_sync_batchnorm` converted their class back. They keep their statistics.

    Args:
        module: The module; changed in place.

    Returns:
        The module.
    """
    for layer in _layers(module):
        layer.__class__ = layer._original_class  # type: ignore[assignment]
        del layer._link, layer._number
    return module


def links_of(module: nn.Module) -> list[StatisticsLink]:
    """The links of a module's converted layers, each once."""
    return list({id(layer._link): layer._link for layer in _layers(module)}.values())


def _layers(module: nn.Module) -> Iterator[SyncBatchNorm]:
    return (layer for layer in module.modules() if isinstance(layer, SyncBatchNorm))


def _can_convert(layer: nn.Module) -> TypeGuard[_BatchNorm]:
    if not isinstance(layer, _BatchNorm) or isinstance(layer, SyncBatchNorm):
        return False
    return not (isinstance(layer, nn.SyncBatchNorm) and layer.process_group is not None)


@cache
def _synchronised(original: type[_BatchNorm]) -> type[SyncBatchNorm]:
    """The class that a converted layer has, which derives from the layer's own class too."""
    members = {"_original_class": original, "_check_input_dim": original._check_input_dim}
    return type(f"Synchronised{original.__name__}", (SyncBatchNorm, original), members)


def _new_layer(original: type[_BatchNorm]) -> SyncBatchNorm:
    cls: type[SyncBatchNorm] = _synchronised(original)  # type: ignore[arg-type]
    return cls.__new__(cls)
