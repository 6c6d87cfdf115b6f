"""Random models for the fuzz test: stages of every kind that a gradient buffer has to cope with.

A tuple of :class:`Stage` values describes a model, which is the same in every process.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import RaiseInBackward

WIDTH = 6
BATCH = 4


@dataclass(frozen=True)
class Stage:
    kind: str  # a key of KINDS, or "tied": the weight of the first linear stage once more
    checkpoint: str = ""  # or "reentrant" or "plain"
    calls: int = 1  # in a row


class Layer(nn.Module):
    def __init__(self, layer: nn.Module, apply_to: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.apply_to = layer, apply_to

    def forward(self, h: Tensor) -> Tensor:
        return self.apply_to(self.layer, h)


def cast(linear: nn.Linear, h: Tensor) -> Tensor:
    return linear(h.to(linear.weight.dtype)).to(h.dtype)


def in_channels_last(conv: nn.Conv2d, h: Tensor) -> Tensor:
    return conv(h.view(-1, 2, 3, 1).contiguous(memory_format=torch.channels_last)).reshape(-1, WIDTH)


def look_up(table: nn.Embedding, h: Tensor) -> Tensor:
    return h * table(torch.arange(BATCH))  # some rows stay unused


class Matrix(nn.Module):
    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)
        assert not self.matrix.is_contiguous()

    def forward(self, h: Tensor) -> Tensor:
        return h @ self.matrix


class Oddments(nn.Module):
    """A scalar, odd sizes, no elements at all, a complex parameter, a bf16 one."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.odd = nn.Parameter(torch.randn(17, 3))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.low = nn.Parameter(torch.randn(5).bfloat16())

    def forward(self, h: Tensor) -> Tensor:
        factor = self.scalar + self.odd.tanh().mean() + self.empty.sum() + self.low.float().sin().sum()
        return h * factor + (self.phase * self.phase.conj()).real


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(11))

    def forward(self, h: Tensor) -> Tensor:
        return torch.zeros_like(h)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "bf16": lambda: Layer(nn.Linear(WIDTH, WIDTH).bfloat16(), cast),
    "fp64": lambda: Layer(nn.Linear(WIDTH, WIDTH).double(), cast),
    "conv": lambda: Layer(nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last), in_channels_last),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "embedding": lambda: Layer(nn.Embedding(7, WIDTH), look_up),
    "transposed": lambda: Matrix(0.5 * torch.randn(WIDTH, WIDTH).t()),
    "gaps": lambda: Matrix(torch.randn(WIDTH, 2 * WIDTH)[:, ::2]),
    "oddments": Oddments,
    "idle": Idle,
}


class RandomModel(nn.Module):
    """Stages in a row, of which a call takes some, and a parameter that forward does not use.

    ``seed`` decides on values, and on the order in which stages are registered.
    """

    def __init__(self, stages: tuple[Stage, ...], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stages = stages
        built: list[nn.Module] = []
        for stage in stages:
            if stage.kind == "tied":
                layer = nn.Linear(WIDTH, WIDTH)
                layer.weight = next(m for m, s in zip(built, stages, strict=False) if s == Stage("linear")).weight
                built.append(layer)
            else:
                built.append(KINDS[stage.kind]())
        order = list(range(len(stages)))
        random.Random(seed).shuffle(order)
        self.penalised = nn.Parameter(torch.ones(3))
        self.layers = nn.ModuleDict({str(index): built[index] for index in order})

    def forward(self, x: Tensor, take: tuple[bool, ...], fail: str = "") -> Tensor:
        """Runs the stages that ``take`` names; backward raises at the ``"input"`` or the ``"output"`` if told to."""
        h = RaiseInBackward.apply(x) if fail == "input" else x
        for index, stage in enumerate(self.stages):
            if not take[index]:
                continue
            layer = self.layers[str(index)]
            for _ in range(stage.calls):
                reentrant = stage.checkpoint == "reentrant"
                out = checkpoint(layer, h, use_reentrant=reentrant) if stage.checkpoint else layer(h)
                h = torch.tanh(h + out)
        return RaiseInBackward.apply(h) if fail == "output" else h


def draw_stages(draw: random.Random) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    for _ in range(draw.randint(2, 7)):
        how = draw.choices(["", "reentrant", "plain"], [8, 1, 1])[0]
        kind = draw.choice([*KINDS, "linear", "tied"])
        if kind == "tied" and Stage("linear") not in stages:
            kind = "linear"
        if kind == "tied" or (how == "reentrant" and kind in ("batch_norm", "idle")):
            how = ""
        calls = draw.choice([1, 2, 3]) if how or kind in ("linear", "layer_norm") else 1
        stages.append(Stage(kind, how, calls))
    return tuple(stages)
