"""What gradients should be, worked out one parameter at a time with the simplest collectives."""

import copy
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.peers.status import Phase, Status
from lightning_bucketddp.replicas.forward import ReplicatedForward
from tests.models import Mlp, batch, loss_of
from tests.pool import TIMEOUT

WHERE = r" \(host \S+, pids? [\d, ]+\)"
"""Where ranks run, as messages have it behind them."""


def without_where(text: str) -> str:
    """A message without hosts and processes."""
    return re.sub(WHERE, "", text)


TINY = 0.0003
"""MiB; makes several buckets of the small test models."""


def mean_grads(module: nn.Module) -> dict[str, Tensor | None]:
    """The mean of each ``.grad`` over the ranks, a missing one counting as zero; None if missing on all ranks."""
    means: dict[str, Tensor | None] = {}
    for name, param in module.named_parameters():
        used = torch.tensor([float(param.grad is not None)])
        total = param.grad.detach().to_dense().clone() if used else torch.zeros_like(param)
        for tensor in (used, total):
            dist.all_reduce(tensor)
        means[name] = total / dist.get_world_size() if used else None
    return means


def assert_grads(module: nn.Module, expected: dict[str, Tensor | None], **tolerance: float) -> None:
    for name, param in module.named_parameters():
        found = param.grad
        assert (found is None) == (expected[name] is None), f"{name}.grad is {found}, expected {expected[name]}"
        if found is not None:
            found = found.to_dense() if found.is_sparse else found
            torch.testing.assert_close(found, expected[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in module.named_parameters()}


def drift(module: nn.Module) -> float:
    """The largest difference of a parameter or module buffer between rank 0 and another rank."""
    worst = torch.zeros(1, dtype=torch.float64)
    for tensor in [*module.parameters(), *module.buffers()]:
        first = tensor.detach().clone()
        dist.broadcast(first, src=0)
        if tensor.numel():
            worst = torch.maximum(worst, (first.double() - tensor.detach().double()).abs().max())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst.item())


def copying(forward: ReplicatedForward) -> ReplicatedForward:
    """A forward whose replicas on the module's device have copies of its parameters, as those on another one do."""
    return ReplicatedForward(forward._module, forward.devices, forward.output_device, forward.dim, share=False)


def pair(build: Callable[[], nn.Module] = Mlp, cap: float = 1, **options: Any) -> tuple[nn.Module, BucketDDP]:
    """A module that stays as it is, and a wrapped copy."""
    plain = seeded(build)
    return plain, BucketDDP(copy.deepcopy(plain), bucket_cap_mb=cap, timeout=timedelta(seconds=20), **options)


def inputs_of(step: int) -> Tensor:
    return batch(step, dist.get_rank())[0]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, BucketDDP) else model


def both(
    models: Iterable[nn.Module], *args: Any, only: Iterable[str] | None = None, zero: bool = True, **options: Any
) -> None:
    """One backward of each; ``only`` names the parameters that get a gradient."""
    for model in models:
        if zero:
            model.zero_grad()
        inputs = None if only is None else [inner(model).get_parameter(name) for name in only]
        model(*args, **options).square().mean().backward(inputs=inputs)


def taking(step: int, take: str = "both") -> Callable[[nn.Module], Tensor]:
    """The loss of ``Branches`` on this rank's batch."""
    inputs = inputs_of(step)
    return lambda model: model(inputs, take).square().mean()


def mse(step: int, direct: bool = False) -> Callable[[nn.Module], Tensor]:
    """``loss_at`` of a step; ``direct`` goes past the wrapper."""
    return lambda model: loss_at(inner(model) if direct else model, step)


def local_if(ours: BucketDDP, local: bool) -> AbstractContextManager[None]:
    return ours.no_sync() if local else nullcontext()


def run_backward(ours: BucketDDP, loss: Tensor, guarded: bool, **options: Any) -> None:
    """Run a backward where the loss has a graph, if ``guarded`` inside ``backward_pass``."""
    with ours.backward_pass(loss) if guarded else nullcontext():
        if loss.requires_grad:
            loss.backward(**options)


@contextmanager
def raises_soon(*errors: type[BaseException], match: str | None = None) -> Iterator[Any]:
    """``pytest.raises``; not by the timeout of the collectives. A busy machine may take its time all the same.

    The pattern may leave out where ranks run.
    """
    begin = time.monotonic()
    with pytest.raises(errors) as error:
        yield error
    said = "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])
    assert match is None or re.search(match, said) or re.search(match, without_where(said)), said
    assert time.monotonic() - begin < 0.8 * TIMEOUT.total_seconds()


def eventually(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for a state."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def all_ranks(device: torch.device | None = None) -> Ranks:
    """The ranks of the default group. All must call this."""
    collectives = Collectives(None, device)
    return Ranks(collectives, Peers(collectives))


def group_store() -> dist.Store:
    """Where the ranks of a job leave each other notes."""
    return dist.PrefixStore("of the test", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]


@contextmanager
def telling_of_waits(tell: Callable[[], object], phase: Phase = Phase.PASS) -> Iterator[None]:
    """In this context this rank calls ``tell`` whenever it has begun to wait in a pass, or in another phase."""
    waiting = Status.waiting

    @contextmanager
    def telling(status: Status, what: Any, kind: Phase) -> Iterator[None]:
        with waiting(status, what, kind):
            if kind is phase:
                tell()
            yield

    with patch.object(Status, "waiting", telling):
        yield


def nodes_of_size(ranks: int) -> AbstractContextManager[object]:
    """Wrap modules in this context as if so many ranks had a node of their own."""
    return patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks), LOCAL_RANK="")


def several_machines() -> AbstractContextManager[object]:
    """Wrap modules in this context as if each rank had a machine of its own."""
    return nodes_of_size(1)


@contextmanager
def logged(name: str, heard: Callable[[str], object] = lambda text: None) -> Iterator[list[str]]:
    """What a logger is told on this rank. ``heard`` is called with each text."""
    said: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(name)

    def emit(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        heard(said[-1])

    handler.emit = emit  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


@contextmanager
def noted(*names: str, look: Callable[[str, dist.ProcessGroup], Any] = lambda name, group: name) -> Iterator[list[Any]]:
    """What ``look`` returns, the name by default, at each call of these methods of process groups."""
    found: list[Any] = []

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, name)
        return lambda group, *args, **options: (found.append(look(name, group)), original(group, *args, **options))[1]

    with patch.multiple(dist.ProcessGroup, **{name: noting(name) for name in names}):
        yield found


def everyones(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def loss_at(model: nn.Module, step: int = 0, rank: int | None = None, **options: Any) -> Tensor:
    """The loss of this rank's batch, or another rank's, given in the dtype of the parameters, and forward's options."""
    inputs, target = batch(step, dist.get_rank() if rank is None else rank)
    dtype = next(param.dtype for param in model.parameters() if param.is_floating_point())
    return loss_of(model(inputs.to(dtype), **options), target)


def backward(model: Any, step: int = 0, rank: int | None = None, guarded: bool = False, **options: Any) -> Tensor:
    """Run a backward of ``loss_at``, if ``guarded`` inside ``backward_pass``, and return the loss."""
    loss = loss_at(model, step, rank, **options)
    run_backward(model, loss, guarded)
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], **options: Any) -> None:
    """Step on each of these batches' gradients alone; ``options`` are those of ``backward``."""
    for step in steps:
        optimizer.zero_grad()
        backward(model, step, **options)
        optimizer.step()


class Twins:
    """A module, and its copy in a ``BucketDDP``, in several buckets by default, through the same passes."""

    def __init__(self, plain: nn.Module, **options: Any) -> None:
        self.plain = plain
        self.ours = BucketDDP(copy.deepcopy(plain), **{"bucket_cap_mb": TINY, **options})

    @property
    def modules(self) -> tuple[nn.Module, nn.Module]:
        return self.plain, self.ours.module

    def zero_grad(self) -> None:
        self.plain.zero_grad()
        self.ours.zero_grad()

    def backward(self, loss: Callable[[nn.Module], Tensor], local: bool = False, guarded: bool = False) -> None:
        """Run one backward of each."""
        with local_if(self.ours, local):
            plain, ours = loss(self.plain), loss(self.ours)
            run_backward(self.ours, plain, guarded=False)
            run_backward(self.ours, ours, guarded)

    def check(self) -> None:
        assert_grads(self.ours.module, mean_grads(self.plain))

    def step(self, loss: Callable[[nn.Module], Tensor], guarded: bool = False) -> None:
        """Run one synchronised pass with fresh gradients, and compare."""
        self.zero_grad()
        self.backward(loss, guarded=guarded)
        self.check()
