"""Random cases for the fuzz test: all drawn from one seed, alike in every process.

A case is a model of a few stages, how it is wrapped, and the rounds that it goes through. Stages are of every kind that
a gradient buffer has to cope with. What a rank may do alone (which stages it takes, whether its loss is a constant) is
drawn per rank, all else once. ``draw_case`` at the end of the file draws a case from the parts before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import RaiseInBackward

WIDTH, BATCH = 6, 4


@dataclass(frozen=True)
class Stage:
    kind: str  # a key of KINDS, or "tied": the weight of the first linear stage once more
    checkpoint: str = ""  # or "reentrant" or "plain"
    calls: int = 1  # in a row


class Cast(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h.to(self.weight.dtype)).to(h.dtype)


class Conv(nn.Conv2d):
    def forward(self, h: Tensor) -> Tensor:
        h = h.view(-1, 2, 3, 1).contiguous(memory_format=torch.channels_last)
        return super().forward(h).reshape(-1, WIDTH)


class Factors(nn.Embedding):
    def forward(self, h: Tensor) -> Tensor:
        return h * super().forward(torch.arange(BATCH))  # some rows stay unused


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
        self.scalar, self.odd = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(17, 3))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.low = nn.Parameter(torch.randn(5).bfloat16())

    def forward(self, h: Tensor) -> Tensor:
        factor = self.scalar + self.odd.tanh().mean() + self.empty.sum() + self.low.float().sin().sum()
        return h * factor + (self.phase * self.phase.conj()).real


class Idle(Matrix):
    def forward(self, h: Tensor) -> Tensor:
        return torch.zeros_like(h)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "bf16": lambda: Cast(WIDTH, WIDTH).bfloat16(),
    "fp64": lambda: Cast(WIDTH, WIDTH).double(),
    "conv": lambda: Conv(2, 2, 3, padding=1).to(memory_format=torch.channels_last),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "embedding": lambda: Factors(7, WIDTH),
    "transposed": lambda: Matrix(0.5 * torch.randn(WIDTH, WIDTH).t()),
    "gaps": lambda: Matrix(torch.randn(WIDTH, 2 * WIDTH)[:, ::2]),
    "oddments": Oddments,
    "idle": lambda: Idle(torch.ones(3, 4).t()),
}


class RandomModel(nn.Module):
    """Stages in a row, of which a call takes some, and an unused parameter. ``seed`` decides on values and order."""

    def __init__(self, stages: tuple[Stage, ...], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stages = stages
        built: list[Any] = []
        for stage in stages:
            built.append(KINDS["linear" if stage.kind == "tied" else stage.kind]())
            if stage.kind == "tied":
                built[-1].weight = built[stages.index(Stage("linear"))].weight
        order = list(range(len(stages)))
        Random(seed).shuffle(order)
        self.penalised = nn.Parameter(torch.ones(3))
        self.layers = nn.ModuleDict({str(index): built[index] for index in order})

    def forward(self, x: Tensor, take: tuple[bool, ...], fail: str = "") -> Tensor:
        """Runs the stages that ``take`` names; backward raises at the ``"input"`` or the ``"output"`` if told to."""
        h = RaiseInBackward.apply(x) if fail == "input" else x
        for index, stage in enumerate(self.stages):
            layer, reentrant = self.layers[str(index)], stage.checkpoint == "reentrant"
            for _ in range(stage.calls if take[index] else 0):
                out = checkpoint(layer, h, use_reentrant=reentrant) if stage.checkpoint else layer(h)
                h = torch.tanh(h + out)
        return RaiseInBackward.apply(h) if fail == "output" else h


def draw_stages(draw: Random) -> tuple[Stage, ...]:
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


STEADY_ROUNDS = 3
"""After as many the order of gradients is known."""

Flags = tuple[bool, ...]


@dataclass(frozen=True)
class Forward:
    take: tuple[Flags, ...]  # per rank, which stages it uses
    local: bool  # inside `no_sync`
    direct: bool  # past the wrapper, as `wrapper.module(...)`
    training: bool  # `module.train()` or `module.eval()`
    inputs_require_grad: bool


@dataclass(frozen=True)
class Backward:
    of: tuple[int, ...]  # which forwards of the round are summed in the loss
    local: bool  # inside `no_sync`
    guarded: bool  # inside `backward_pass`
    only: Flags | None  # per parameter, whether `backward(inputs=...)` names it; None for a plain call
    penalty: bool  # the loss has a term that does not come by forward's output
    constant: Flags  # per rank, whether its loss is a constant instead
    fail: str = ""  # where a local backward raises, on every rank: "input" or "output"


@dataclass(frozen=True)
class Round:
    """What happens between two optimizer steps, or less."""

    trainable: Flags | None  # per parameter, `requires_grad` from now on; None to leave it
    zero: str  # "none", "zero" (as `set_to_none=False`) or "" for no `zero_grad`
    nudge: bool  # each rank then changes its gradients in place, each otherwise
    aside: str  # a forward without backward: "no_grad", "eval" (without gradients too), "dropped" or ""
    forwards: tuple[Forward, ...]  # before all backwards
    backwards: tuple[Backward, ...]
    step: bool  # the optimizer steps in the end


@dataclass(frozen=True)
class Case:
    """A model, how it is wrapped (with which parameters frozen), and what it goes through."""

    seed: int
    stages: tuple[Stage, ...]
    trainable: Flags | None
    options: dict[str, Any]
    replicas: str  # two replicas in each process, whose parameters are "shared" or "copied"; "" for none
    rounds: tuple[Round, ...]

    def __str__(self) -> str:
        rounds = [f"round {number}: {in_short(each)}" for number, each in enumerate(self.rounds)]
        return "\n".join([in_short(replace(self, rounds=())), *rounds])


def in_short(value: Any) -> str:
    """A value in words, without the attributes that are empty or off. Flags are digits."""
    if is_dataclass(value):
        attributes = ((field.name, getattr(value, field.name)) for field in fields(value))
        shown = [f"{name}={in_short(each)}" for name, each in attributes if each not in (None, False, "", ())]
        return f"{type(value).__name__}({', '.join(shown)})"
    if isinstance(value, tuple):
        flags = all(isinstance(each, bool) for each in value)
        return "".join(str(int(each)) for each in value) if flags else f"({', '.join(map(in_short, value))})"
    return repr(value)


def synchronised(this_round: Round, backward: Backward) -> bool:
    """Whether a backward is to be reduced: the guard's place decides, else the forward's, else the backward's."""
    forwards = [this_round.forwards[call] for call in backward.of]
    wrapped = [forward for forward in forwards if not forward.direct]
    return not (backward.local if backward.guarded or not wrapped else wrapped[0].local)


class RoundDrawer:
    """Draws rounds for a model, with the habits of one program, which are drawn first."""

    def __init__(self, draw: Random, stages: tuple[Stage, ...], params: int, world_size: int, steady: bool) -> None:
        self.draw = draw
        self.stages, self.params = stages, params
        self.world_size = world_size
        # How often the trainable set changes.
        self.freezes = draw.choice([0.0, 0.0, 0.05, 0.2] if steady else [0.0, 0.0, 0.4, 0.8])
        # Each of these ends a steady state, some of them for good.
        self.past_the_wrapper = draw.choice([0.0, 0.0, 0.1]) if steady else 0.1
        self.penalties = draw.choice([0.0, 0.05, 0.2]) if steady else 0.2
        self.branches = draw.choice(["all", "same", "by rank"])
        self.reentrant = any(s.checkpoint == "reentrant" for s in stages)
        # Without several calls, two forwards would bring more gradients to a layer than the first pass had: refused.
        self.two_forwards = not any(s.checkpoint == "reentrant" and s.calls == 1 for s in stages)
        self.batch_norm = any(s.kind == "batch_norm" for s in stages)

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def flags(self, count: int, probability: float) -> Flags:
        return tuple(self.chance(probability) for _ in range(count))

    def take(self) -> tuple[Flags, ...]:
        """Per rank, which stages a forward takes."""
        count = len(self.stages)
        if self.branches == "by rank":
            return tuple(self.flags(count, 0.6) for _ in range(self.world_size))
        return ((True,) * count if self.branches == "all" else self.flags(count, 0.7),) * self.world_size

    def trainable(self, probability: float) -> Flags | None:
        """A trainable set that is new with this probability; None to leave it."""
        if not self.chance(probability):
            return None
        flags = self.flags(self.params, self.draw.choice([0.2, 0.5, 0.9, 1.0]))
        return flags if any(flags) else None

    def plain_round(self) -> Round:
        """One forward, one backward and a step, with every stage."""
        everything, nobody = ((True,) * len(self.stages),) * self.world_size, (False,) * self.world_size
        forward = Forward(everything, local=False, direct=False, training=True, inputs_require_grad=self.reentrant)
        backward = Backward((0,), local=False, guarded=False, only=None, penalty=False, constant=nobody)
        return Round(None, "none", nudge=False, aside="", forwards=(forward,), backwards=(backward,), step=True)

    def round(self) -> Round:
        trainable = self.trainable(self.freezes)
        local, direct = self.chance(0.35), self.chance(self.past_the_wrapper)
        guarded = self.chance(0.4) or (direct and self.reentrant)
        forwards = tuple(
            Forward(self.take(), local, direct, self.batch_norm or self.chance(0.9), self.chance(0.3))
            for _ in range(2 if self.two_forwards and self.chance(0.3) else 1)
        )
        uses: list[tuple[int, ...]] = [(0,)] * self.draw.choice([1, 1, 1, 2, 3])
        if len(forwards) == 2:
            uses = self.draw.choice([[(0, 1)], [(0,), (1,)], [(1,), (0,)], [(0, 1), (0, 1)], [(0,), (0, 1), (1,)]])
        if local and self.chance(0.15):
            backwards = (self.failing(guarded),)
            forwards = tuple(replace(forward, inputs_require_grad=True) for forward in forwards)
        else:
            backwards = tuple(self.backward(of, local, direct, guarded) for of in uses)
        return Round(
            trainable,
            zero=self.draw.choice(["none", "none", "zero", ""]),
            nudge=self.chance(0.1),
            aside=self.draw.choice(["", "", "", "no_grad", "eval", "dropped"]),
            forwards=forwards,
            backwards=backwards,
            step=self.chance(0.7),
        )

    def backward(self, of: tuple[int, ...], local: bool, direct: bool, guarded: bool) -> Backward:
        penalty = self.chance(self.penalties)
        if guarded or not (direct or penalty):  # otherwise the forward decides, wherever backward is
            local = self.chance(0.3)
        only = self.flags(self.params, 0.5) if not self.reentrant and self.chance(0.15) else None
        some_constant = guarded and self.chance(0.2)
        constant = self.flags(self.world_size, 0.5) if some_constant else (False,) * self.world_size
        return Backward(of, local, guarded, only, penalty, constant)

    def failing(self, guarded: bool) -> Backward:
        """A local backward that raises."""
        fail = self.draw.choice(["input", "output"])
        return Backward((0,), True, guarded, None, False, (False,) * self.world_size, fail)


STEADY_WAYS = [{}, {}, {}, {"pad_buckets_to": 100}, {"grad_dtype": torch.float32}, {"wire_dtype": torch.bfloat16}]
OTHER_WAYS = [{"overlap": False}, {"use_contiguous_buffers": False}, {"comm_hook": "bf16", "overlap": False}]


def draw_case(seed: int, world_size: int, sharded: bool = False) -> Case:
    """Draws a case: every other one a steady one, in which only the last gradient of each bucket is told of."""
    draw, steady = Random(seed), seed % 2 == 0
    stages = draw_stages(draw)
    options = {
        "bucket_cap_mb": draw.choice([None, 1e-6, 1e-4, 3e-4, 1e-3, 1]),
        "find_unused_parameters": not steady and draw.random() < 0.3,
        "module_buffers": draw.choice(["broadcast", "mean", "off"]),
        **draw.choice(STEADY_WAYS if steady else STEADY_WAYS + OTHER_WAYS),
    }
    rounds = RoundDrawer(draw, stages, len(list(RandomModel(stages, seed).parameters())), world_size, steady)
    trainable = rounds.trainable(probability=0.3)
    known = tuple(rounds.plain_round() for _ in range(STEADY_ROUNDS if steady else 0))
    others = tuple(rounds.round() for _ in range(draw.choice([3, 5, 7, 9, 30])))
    case = Case(seed, stages, trainable, options, draw_replicas(seed, stages, others), known + others)
    return shardable(case) if sharded else case


def shardable(case: Case) -> Case:
    """Leaves out what sharded optimizers refuse, and changes of a rank's own gradients."""
    options = {name: value for name, value in case.options.items() if not any(name in way for way in OTHER_WAYS)}
    stages = tuple(replace(stage, checkpoint=stage.checkpoint and "plain") for stage in case.stages)
    rounds = tuple(
        replace(each, nudge=False, backwards=tuple(replace(backward, guarded=True) for backward in each.backwards))
        for each in case.rounds
    )
    return replace(case, stages=stages, options=options, rounds=rounds)


def draw_replicas(seed: int, stages: tuple[Stage, ...], rounds: tuple[Round, ...]) -> str:
    """Of models that treat each sample alike, about half run on parts of the batch."""
    # The first replica raises before any gradient is complete.
    raises = any(backward.fail and not backward.guarded for each in rounds for backward in each.backwards)
    # How bf16 gradients of parts of the batch are rounded is not measured by their sum.
    unlike = any(stage.kind in ("batch_norm", "embedding", "bf16", "oddments") for stage in stages)
    # Past the wrapper a layer has one gradient in a pass, and from replicas several: refused.
    one = any(stage.checkpoint == "reentrant" and stage.calls == 1 for stage in stages)
    drawn = Random(f"replicas of {seed}").choice(["", "", "shared", "copied"])
    return "" if raises or unlike or one else drawn
