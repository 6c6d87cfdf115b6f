"""Random models for the fuzz test: stages of every kind that a gradient buffer has to cope with.

A model is described by a tuple of :class:`Stage` values, which print as what they are, and is the same in every process
that builds it from the same description.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import RaiseInBackward

WIDTH = 6
BATCH = 4


@dataclass(frozen=True)
class Stage:
    """One stage of a random model.

    Attributes:
        kind: A key of :data:`KINDS`, or ``"tied"``: the weight of the first linear stage once more.
        checkpoint: ``""``, ``"reentrant"`` or ``"plain"``.
        calls: How often the stage is run in a row.
    """

    kind: str
    checkpoint: str = ""
    calls: int = 1


class Cast(nn.Module):
    """A linear layer in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).to(dtype)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h.to(self.layer.weight.dtype)).to(h.dtype)


class Conv(nn.Module):
    """A convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.to(memory_format=torch.channels_last)

    def forward(self, h: Tensor) -> Tensor:
        image = h.view(-1, 2, 3, 1).contiguous(memory_format=torch.channels_last)
        return self.conv(image).reshape(-1, WIDTH)


class Embedded(nn.Module):
    """An embedding of which some rows stay unused."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h * self.table(torch.arange(BATCH))


class Matrix(nn.Module):
    """A matrix parameter with strides of its own: transposed, or with gaps between its elements."""

    def __init__(self, gaps: bool) -> None:
        super().__init__()
        values = torch.randn(WIDTH, 2 * WIDTH)[:, ::2] if gaps else torch.randn(WIDTH, WIDTH).t()
        self.matrix = nn.Parameter(0.5 * values if not gaps else values)
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
    """Parameters that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(11))

    def forward(self, h: Tensor) -> Tensor:
        return torch.zeros_like(h)


KINDS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "bf16": lambda: Cast(torch.bfloat16),
    "fp64": lambda: Cast(torch.float64),
    "conv": Conv,
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "embedding": Embedded,
    "transposed": lambda: Matrix(gaps=False),
    "gaps": lambda: Matrix(gaps=True),
    "oddments": Oddments,
    "idle": Idle,
}


class RandomModel(nn.Module):
    """Stages in a row, of which a call takes some, and a parameter that forward does not use.

    Args:
        stages: What to build.
        seed: Of the values, and of the order in which stages are registered.
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
                if stage.checkpoint:
                    h = torch.tanh(h + checkpoint(layer, h, use_reentrant=stage.checkpoint == "reentrant"))
                else:
                    h = torch.tanh(h + layer(h))
        return RaiseInBackward.apply(h) if fail == "output" else h


def draw_stages(draw: random.Random) -> tuple[Stage, ...]:
    """A model of 2 to 7 stages."""
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
