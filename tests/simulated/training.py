"""Trains one model on the CPU and on the simulated device: the same steps, in which streams and options differ."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_bucketddp import BucketDDP
from tests.accelerator import DEVICE, on_stream, simulated
from tests.models import Mlp, batch

SMALL = 0.0005  # MiB; several buckets in the small models
STEPS = 4
CPU = torch.device("cpu")


class TwoStreams(nn.Module):
    """One layer on a stream of its own, with every wait that plain PyTorch needs.

    The stream comes into play with the call ``begins``; before, and on the CPU, there is one stream.
    """

    def __init__(self, begins: int = 0) -> None:
        super().__init__()
        self.side, self.main, self.head = nn.Linear(8, 64), nn.Linear(8, 64), nn.Linear(64, 4)
        self.begins, self.calls, self.stream = begins, 0, torch.Stream(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if x.device == CPU or self.calls <= self.begins:
            return self.head(torch.tanh(self.side(x) + self.main(x)))
        now = torch.accelerator.current_stream()
        self.stream.wait_stream(now)
        x.record_stream(self.stream)
        with on_stream(self.stream):
            from_side = self.side(x)
        from_main = self.main(x)
        now.wait_stream(self.stream)
        from_side.record_stream(now)
        return self.head(torch.tanh(from_side + from_main))


class Unused(nn.Module):
    """Ranks take different branches in turn, and one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.idle, self.calls = nn.Parameter(torch.ones(5)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.tanh(self.stem(x))
        return x[:, :4] + (self.left if (self.calls + dist.get_rank()) % 2 else self.right)(x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(checkpoint(self.block, self.stem(x), use_reentrant=True)))


class Pictures(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 6, 2, padding=1, bias=False), norm(6), nn.Linear(54, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x.view(-1, 2, 2, 2)))).flatten(1))


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        options: Of ``BucketDDP``.
        model: Makes the module.
        dtype: Of its parameters.
        local_passes: Before each synchronised one.
        prepare: Called with the wrapper before training.
        before_step: Called with the module and the step's number, before its passes.
        after_backward: Called with the wrapper, the module and the device.
        after_step: As ``after_backward``, with the step done.
        apart: Whether forward, backward and step have a stream each, with every wait that plain PyTorch needs.
        set_to_none: The argument of ``zero_grad``.
        with_ddp: Whether torch's DDP takes the wrapper's place.
        tolerance: Of what is compared; 0: every bit.
    """

    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = Mlp
    dtype: torch.dtype = torch.float32
    local_passes: int = 1
    prepare: Callable[[nn.Module], None] = lambda wrapper: None
    before_step: Callable[[nn.Module, int], None] = lambda module, step: None
    after_backward: Callable[[nn.Module, nn.Module, torch.device], None] = lambda wrapper, module, device: None
    after_step: Callable[[nn.Module, nn.Module, torch.device], None] = lambda wrapper, module, device: None
    apart: bool = False
    set_to_none: bool = True
    with_ddp: bool = False
    tolerance: float = 0


@dataclass
class Trained:
    """What training gave: values on the CPU, and what the host has waited for in each pass."""

    state: dict[str, Tensor]
    waits: list[list[str]]


def waits_in(run: Callable[[], None], device: torch.device) -> list[str]:
    before = 0 if device == CPU else simulated().library.host_wait_count()
    run()
    return [] if device == CPU else simulated().host_waits(before)


@contextmanager
def in_turn_on(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream current that comes after the one before, which goes on after it; None changes nothing."""
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream()
    stream.wait_stream(before)
    with on_stream(stream):
        yield
    before.wait_stream(stream)


Turns = Sequence[torch.Stream | None]
"""The streams of forward, of backward and of the step."""


def run_pass(wrapper: Any, x: Tensor, target: Tensor, local: bool, tokens: Tensor, case: Case, turns: Turns) -> None:
    by_tokens = case.options.get("gradient_divide_by") == "tokens"
    with wrapper.no_sync() if local else nullcontext():
        if by_tokens:
            wrapper.count_tokens(tokens)
        if case.options.get("gradient_divide_by") == "samples":
            wrapper.count_samples(len(x))
        with in_turn_on(turns[0]):
            squares = (wrapper(x) - target).float().square()
            loss = squares.sum() if by_tokens else squares.mean()
        with in_turn_on(turns[1]):
            loss.backward()


def train(case: Case, device: torch.device) -> Trained:
    torch.manual_seed(3)
    module = case.model().to(device, case.dtype)
    if case.with_ddp:
        wrapper: Any = DistributedDataParallel(module, bucket_cap_mb=SMALL)
    else:
        wrapper = BucketDDP(module, **{"bucket_cap_mb": SMALL, **case.options})
    case.prepare(wrapper)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    passes = case.local_passes + 1
    # Copied first: they make the host wait, and what it has waited for is ordered, whatever the wrapper leaves out.
    given = [batch(number, dist.get_rank()) for number in range(STEPS * passes)]
    batches = [[tensor.to(device, case.dtype) for tensor in one] for one in given]
    tokens = torch.tensor(len(given[0][0]), device=device)
    turns: Turns = [torch.Stream(DEVICE) if case.apart and device != CPU else None for _ in range(3)]
    waits = []
    for step in range(STEPS):
        case.before_step(module, step)
        for index in range(passes):
            x, target = batches[step * passes + index]
            local = index < case.local_passes
            waits.append(waits_in(partial(run_pass, wrapper, x, target, local, tokens, case, turns), device))
        case.after_backward(wrapper, module, device)
        with in_turn_on(turns[2]):
            optimizer.step()
            optimizer.zero_grad(case.set_to_none)
        case.after_step(wrapper, module, device)
    if device != CPU:  # other streams may still read what is freed here
        torch.accelerator.synchronize()
    state = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    if not case.with_ddp:
        wrapper.close()
    return Trained(state, waits)


def compare(case: Case, allowed_waits: Sequence[str] = (), from_pass: int = 4) -> Trained:
    """Train on both. Weights are the CPU's, ranks have no unordered access and one order of collectives.

    Args:
        case: What is trained.
        allowed_waits: First lines of what the host may wait for in a pass, once.
        from_pass: The first pass in which waits count: earlier ones learn the order of gradients.
    """
    expected = train(case, CPU)
    simulated().clear()
    found = train(case, DEVICE)
    simulated().check_ranks()
    assert len(simulated().started_collectives()) >= STEPS
    for name, value in expected.state.items():
        torch.testing.assert_close(found.state[name], value, rtol=case.tolerance, atol=case.tolerance)
    for waited in found.waits[from_pass:]:
        left = [text for text in waited if text.partition("\n")[0] not in allowed_waits]
        assert not left, "the host waited in a pass for:\n" + "\n".join(left)
        assert len(waited) <= len(allowed_waits), "\n".join(waited)
    return found
