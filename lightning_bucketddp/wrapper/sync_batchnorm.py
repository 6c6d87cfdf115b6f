"""BatchNorm over the batches of all ranks together, on every backend.

What a rank knows of a channel is a mean, a sum of squared deviations from it and a count. They are gathered, and every
rank combines them in the same order (Chan, Golub and LeVeque 1979), so that running statistics are the same to the last
bit on all of them. Backward needs two sums over all ranks, gathered likewise. On accelerators torch's layer does it.

The collectives need a process group that gradients do not travel in: buckets are launched as they happen to be ready,
so that in one group the two kinds would come in another order on other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.groups import group_apart
from lightning_bucketddp.peers.agreement import RankMismatchError
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.participant import Participant

_FIRST_MESSAGE = 2 * 256 + 2
"""Numbers in the first message of every exchange, for layers of up to 256 channels the only one. Of one length whatever
the layer, as gloo aborts processes that send each other different ones: that ranks are in different layers is found out
before anything else is sent."""


class StatisticsLink(Participant):
    """How the layers of one module reach the other ranks. Copies of a layer share it; pickles go without.

    A participant in the passes of the module around them: it hears when a backward has ended.

    Args:
        collectives: The group that statistics travel in; None in what was loaded from a pickle.
        names: The layers' qualified names, by number.

    Attributes:
        peers: What the wrapper around the module knows of the other ranks, while there is one.
        counts: Whether this rank's batch is one of its own, rather than one that it goes through once more to stay in
            step with the others.
    """

    def __init__(self, collectives: Collectives | None = None, names: Sequence[str] = ()) -> None:
        self.collectives = collectives
        self._names = names
        self.leave()

    def join(self, peers: Peers, counts: Callable[[], bool]) -> None:
        """The module has been wrapped.

        Args:
            peers: The wrapper's.
            counts: As the attribute.
        """
        self.peers: Peers | None = peers
        self._first_tag = peers.number << 32  # layers of two wrapped modules are not taken for each other
        self.counts = counts
        self._forwards.clear()

    def leave(self) -> None:
        """The module is not wrapped, or no longer."""
        self.peers = None
        self.counts = lambda: True
        self._first_tag = 0
        self._forwards: dict[int, tuple[int, int]] = {}  # that wait for their backward: layer and channels, by number
        self._forwards_noted = 0
        self._reached = False

    def note_forward(self, layer: int, channels: int) -> int:
        """A forward that backward may come to; its number."""
        self._forwards_noted += 1
        if self.peers is not None:
            self._forwards[self._forwards_noted] = layer, channels
        return self._forwards_noted

    def note_backward(self, forward: int) -> None:
        """Backward has come to a forward."""
        self._reached |= self._forwards.pop(forward, None) is not None

    def backward_ended(self, raised: bool) -> None:
        """A backward has ended. If it came to no layer at all, the other ranks get zeros, which are its gradients.

        In the order in which autograd goes through a graph: the last forward first.

        Args:
            raised: Whether it ended by raising.
        """
        missed = [] if raised or self._reached else list(reversed(self._forwards.values()))
        self._forwards.clear()
        self._reached = False
        for layer, channels in missed:
            self.exchange(torch.zeros(2, channels), 0, layer, backward=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> StatisticsLink:
        return self

    def __reduce__(self) -> tuple[type[StatisticsLink], tuple[()]]:
        return StatisticsLink, ()

    def exchange(self, values: Tensor, count: int, layer: int, backward: bool = False) -> tuple[Tensor, Tensor]:
        """Gathers what the ranks have to say on a layer.

        Args:
            values: Two numbers per channel.
            count: How many values of each channel they stand for.
            layer: The layer's number.
            backward: Whether this is its backward.

        Returns:
            The ranks' numbers, ``(world size, 2, channels)``, and their counts, ``(world size, 1)``, in fp64.

        Raises:
            PeerFailureError: If another rank failed.
            RankMismatchError: If another rank is elsewhere.
            RuntimeError: What the backend raises when a peer is gone or the time is up, if there is no wrapper.
        """
        assert self.collectives is not None
        mine = torch.zeros(max(values.numel() + 2, _FIRST_MESSAGE), dtype=torch.float64)
        mine[0], mine[1] = self._first_tag + 2 * layer + backward, count
        mine[2 : values.numel() + 2] = values.flatten()
        if self.peers is not None:
            self.peers.here.begin_exchange()
        everyone = self._gather(mine[:_FIRST_MESSAGE], layer)
        if not bool((everyone[:, 0] == mine[0]).all()):
            raise RankMismatchError(
                f"rank {self.collectives.rank}: ranks met in different BatchNorm layers; this rank is in "
                f"{'backward' if backward else 'forward'} of {self._names[layer]!r}. Layers with synchronised "
                "statistics must be reached in the same order on every rank: look for a branch that depends on the "
                "rank or on its data"
            )
        if mine.numel() > _FIRST_MESSAGE:
            everyone = torch.cat((everyone, self._gather(mine[_FIRST_MESSAGE:], layer)), 1)
        return everyone[:, 2 : values.numel() + 2].view(-1, 2, values.shape[-1]), everyone[:, 1:2]

    def _gather(self, mine: Tensor, layer: int) -> Tensor:
        assert self.collectives is not None
        what = f"the statistics of {self._names[layer]!r}"
        look = None if self.peers is None else self.peers.poll
        with nullcontext() if self.peers is None else self.peers.waiting_for(what, Phase.EXCHANGE):
            everyone, pending = self.collectives.all_gather(mine)
            pending.wait(look)
        return everyone


class SyncBatchNorm(nn.SyncBatchNorm):
    """What a BatchNorm layer becomes while its statistics are those of all ranks' batches together.

    Made by :func:`convert_sync_batchnorm` alone, which changes a layer's class and leaves the layer where it is, so
    that references, hooks, attributes and ``isinstance`` go on working; keys of the state dict stay the same.
    """

    _original_class: type[_BatchNorm]
    _link: StatisticsLink
    _number: int

    @property
    def process_group(self) -> dist.ProcessGroup | None:  # type: ignore[override]
        """The group that statistics travel in; torch's own layer, from which this one derives, looks for it here."""
        collectives = self._link.collectives
        return collectives.group if collectives is not None else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # This layer's class is made on demand, so that neither copy nor pickle finds it by its name.
        return _new_layer, (self._original_class,), super().__reduce_ex__(protocol)[2]

    def forward(self, input: Tensor) -> Tensor:
        """Normalises; in training by the mean and variance over all ranks' batches.

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
        if input.device.type != "cpu":
            return super().forward(input)
        return self._forward_on_cpu(input)

    def _forward_on_cpu(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        momentum = self.momentum
        tracked = self.track_running_stats and self.running_mean is not None and self.running_var is not None
        if tracked and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / self.num_batches_tracked.item()
        mean, var, count = _statistics_of_all_ranks(input.detach(), self._link, self._number)
        if tracked:
            with torch.no_grad():
                _move(self.running_mean, mean, momentum)
                _move(self.running_var, var * (count / (count - 1)), momentum)
        forward = 0
        if torch.is_grad_enabled() and input.requires_grad:
            forward = self._link.note_forward(self._number, input.shape[1])
        where = self._link, self._number, forward
        output: Tensor = _Normalise.apply(input, self.weight, self.bias, mean, var, self.eps, count, where)
        return output


def convert_sync_batchnorm(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, timeout: timedelta | None = None
) -> nn.Module:
    """Has all BatchNorm layers of a module work with the statistics of all ranks' batches together.

    Where torch's ``SyncBatchNorm.convert_sync_batchnorm`` makes new layers, for accelerators alone, this changes the
    class of those that are there, on every backend. All ranks must call it at the same point. Convert before wrapping.
    Layers of torch's ``SyncBatchNorm`` that have a process group of their own stay as they are.

    Args:
        module: The module; changed in place.
        process_group: The ranks that compute statistics together, in a group that nothing else travels in. By default
            one of all ranks, made for the purpose once.
        timeout: How long collectives of that group wait; torch's default if None.

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
        assert isinstance(layer, _BatchNorm)
        layer._link = link  # type: ignore[assignment]
        layer._number = number  # type: ignore[assignment]
        layer.__class__ = _synchronised(type(layer))  # type: ignore[arg-type]
    return module


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Gives layers that :func:`convert_sync_batchnorm` converted the class they had, with the statistics they have now.

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


def _can_convert(layer: nn.Module) -> bool:
    if not isinstance(layer, _BatchNorm) or isinstance(layer, SyncBatchNorm):
        return False
    return not (isinstance(layer, nn.SyncBatchNorm) and layer.process_group is not None)


@cache
def _synchronised(original: type[_BatchNorm]) -> type[SyncBatchNorm]:
    members = {"_original_class": original, "_check_input_dim": original._check_input_dim}
    return type(f"Synchronised{original.__name__}", (SyncBatchNorm, original), members)


def _new_layer(original: type[_BatchNorm]) -> SyncBatchNorm:
    cls: type[SyncBatchNorm] = _synchronised(original)  # type: ignore[arg-type]
    return cls.__new__(cls)


def _move(running: Tensor | None, value: Tensor, momentum: float | None) -> None:
    assert running is not None
    assert momentum is not None
    running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def _statistics_of_all_ranks(x: Tensor, link: StatisticsLink, layer: int) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance per channel, in fp32 or more, and the number of values per channel, over all ranks."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    mine = torch.zeros(2, x.shape[1], dtype=torch.float64)
    count = x.numel() // x.shape[1] if link.counts() else 0
    if count:
        var, mean = torch.var_mean(x.to(dtype), _all_but_channels(x), correction=0)
        mine[0], mine[1] = mean, var * count
    everyone, counts = link.exchange(mine, count, layer)
    means, deviations = everyone.unbind(1)
    total = int(counts.sum())
    if total < 2:
        raise ValueError(
            f"expected more than 1 value per channel in training, found {total} in the batches of all ranks together"
        )
    mean = (means * counts).sum(0) / total
    var = (deviations + counts * (means - mean).square()).sum(0) / total
    return mean.to(dtype), var.to(dtype), total


class _Normalise(torch.autograd.Function):
    """Normalises by given statistics, which in backward depend on the input of every rank."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
        count: int,
        where: tuple[StatisticsLink, int, int],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt())
        ctx.count, ctx.where = count, where
        weight, bias = (None if it is None else it.to(mean.dtype) for it in (weight, bias))
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_std = ctx.saved_tensors
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        centred, grad = x - mean.view(shape), grad.to(mean.dtype)
        dims = _all_but_channels(x)
        grad_bias = grad.sum(dims)
        grad_weight = (grad * centred).sum(dims) * inverse_std
        grad_x = None
        if ctx.needs_input_grad[0]:
            link, layer, forward = ctx.where
            link.note_backward(forward)
            everyone, _ = link.exchange(torch.stack((grad_bias, grad_weight)), 0, layer, backward=True)
            mean_grad, mean_product = (everyone.sum(0) / ctx.count).to(mean.dtype).view(2, *shape)
            scale = (inverse_std if weight is None else inverse_std * weight).view(shape)
            grad_x = centred.mul_(-(mean_product * inverse_std.view(shape))).add_(grad).sub_(mean_grad)
            grad_x = grad_x.mul_(scale).to(x.dtype)
        wanted = zip(ctx.needs_input_grad[1:3], (grad_weight, grad_bias), strict=True)
        affine = [grad.to(weight.dtype) if needed else None for needed, grad in wanted]
        return grad_x, *affine, *(None for _ in range(5))


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]
