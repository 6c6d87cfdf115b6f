"""The models that tests train, all in one place. Batches are deterministic functions of (step, rank)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

Build = Callable[[], nn.Module]
ROWS = 40  # of embeddings


class Mlp(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8 if i == 0 else width, width) for i in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class ConvBatchNorm(nn.Module):
    """Channels-last convolutions with BatchNorm: strides to keep, module buffers to synchronise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, bias=False)  # its true gradient before BatchNorm is 0
        self.norm, self.conv2 = nn.BatchNorm2d(6), nn.Conv2d(6, 4, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 2, 2).repeat(1, 1, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.conv2(torch.relu(self.norm(self.conv1(x)))).mean((2, 3))


class SharedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(torch.tanh(self.first(x)))))[:, :4]


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.low = nn.Linear(16, 16).to(torch.bfloat16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.low(torch.tanh(self.first(x)).bfloat16()).float())


@dataclass
class Outputs:
    logits: Tensor
    extras: dict[str, list[Tensor]]


class NestedOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.side = nn.Linear(8, 12), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Outputs:
        hidden = torch.tanh(self.body(x))
        return Outputs(self.head(hidden), {"side": [self.side(hidden), hidden.detach()]})


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool, calls: int = 1) -> None:
        super().__init__()
        self.use_reentrant, self.calls = use_reentrant, calls
        self.stem = nn.Linear(8, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.calls):
            x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


MODELS: dict[str, Build] = {
    "mlp": Mlp,
    "conv_batchnorm_channels_last": ConvBatchNorm,
    "shared_weights": SharedWeights,
    "mixed_dtypes": MixedDtypes,
    "nested_outputs": NestedOutputs,
    "checkpoint_reentrant": lambda: Checkpointed(use_reentrant=True),
    "checkpoint_non_reentrant": lambda: Checkpointed(use_reentrant=False),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name]()


class Int8(Tensor):
    """A matrix in 8 bits, as libraries that quantise frozen weights have it: torch swaps it in ``module.to()``."""

    @staticmethod
    def __new__(cls, values: Tensor) -> "Int8":
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: Tensor) -> None:
        self.values8 = values

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values8"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> "Int8":
        return cls(inner["values8"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("detach", "alias", "clone", "_to_copy"):
            return cls(args[0].values8)
        plain = tree_map(
            lambda each: each.values8.float() * 0.1 if isinstance(each, Int8) else each, (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])


class Quantised(nn.Module):
    """A frozen base, a quantised and a plain part, and a part that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.plain_base = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)
        self.base = nn.Parameter(Int8(torch.randint(-9, 9, (8, 4), dtype=torch.int8)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.base + self.plain_base(x) + self.adapter(x)


def batch(step: int, rank: int, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)


def loss_of(output: Tensor | Outputs, target: Tensor) -> Tensor:
    if isinstance(output, Outputs):
        return nn.functional.mse_loss(output.logits, target) + output.extras["side"][0].square().mean()
    return nn.functional.mse_loss(output, target)


class Branches(nn.Module):
    """Two branches of which a call takes one, both or none, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.idle = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, take: str = "both") -> Tensor:
        x = torch.tanh(self.stem(x))
        out = x[:, :4]
        for name in ("left", "right"):
            if take in (name, "both"):
                out = out + getattr(self, name)(x)
        return out


class OutOfOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Towers(nn.Module):
    """Two towers on a stem, whose gradients come in the reverse of the order in which the towers are called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, swapped: bool = False) -> Tensor:
        x = torch.tanh(self.stem(x))
        towers = [self.second, self.first] if swapped else [self.first, self.second]
        return sum((torch.tanh(tower(x)) for tower in towers), torch.zeros(()))


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise ArithmeticError("no gradient today")


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.second(RaiseInBackward.apply(x) if fail else x)


class Lookup(nn.Module):
    """Two embeddings with sparse gradients and a dense layer; the first may be used as an output layer too."""

    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 4, sparse=True)
        self.bag = nn.EmbeddingBag(ROWS, 4, sparse=True, mode=mode)
        self.head = nn.Linear(4, 4)

    def forward(
        self, words: Tensor, bag: Tensor, use_words: bool = True, use_bag: bool = True, tied: bool = False
    ) -> Tensor:
        x = torch.ones(len(words), 4)
        if use_words:
            x = x + self.words(words).sum(1)
        if use_bag:
            x = x * self.bag(bag)
        x = self.head(torch.tanh(x))
        return x @ self.words.weight.T if tied else x


def tokens(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Indices for ``Lookup``; some come more than once. Ranks differ in how many rows they touch."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    most = 6 + 4 * rank
    return torch.randint(most, (5, 3), generator=generator), torch.randint(most, (5, 2), generator=generator)


class AllKinds(nn.Module):
    """Parameters of every kind: channels-last, bf16 (if ``low``), tied, of no dimension or element, idle, frozen."""

    def __init__(self, low: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 2, bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.low = nn.Linear(5, 7).to(torch.bfloat16 if low else torch.float32)
        self.first, self.last = nn.Linear(7, 11, bias=False), nn.Linear(7, 11, bias=False)
        self.last.weight = self.first.weight
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.nothing, self.idle = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(13))
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
        self.later = nn.Parameter(torch.ones(7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x.view(-1, 2, 2, 2)))
        x = torch.tanh(self.low(x.mean((2, 3)).to(self.low.weight.dtype)).float()) * self.later
        x = self.first(x) * self.scale + torch.tanh(self.last(x)) * self.one
        return x @ torch.full((11, 3), 0.1) @ self.frozen


class Recurrent(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(4, 2, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, 2, 4))[0][:, -1]


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(2))
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(8)), "shift": nn.Parameter(torch.randn(8))})
        self.waves = nn.Parameter(torch.randn(8, 4, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        x = x * self.named["scale"] + self.named["shift"]
        return (x.to(self.waves.dtype) @ self.waves).abs().to(x.dtype)


class Reparametrized(nn.Module):
    """Weights that are computed: by parametrizations, and by hooks before forward, of which one keeps buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.rotated = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.bounded = nn.utils.spectral_norm(nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.bounded(torch.tanh(self.scaled(torch.tanh(self.rotated(x)))))


class Bits(nn.Module):
    """An embedding with sparse gradients, read by which inputs are positive, and by name an output layer."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.bits, self.head = nn.Embedding(16, 8, sparse=sparse), nn.Linear(8, 4)

    def forward(self, x: Tensor, tied: bool = False) -> Tensor:
        x = torch.tanh(self.bits(2 * torch.arange(8) + (x > 0)).sum(1))
        return self.head(x @ self.bits.weight.T @ self.bits.weight if tied else x)


class TrainedBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("prompt", torch.ones(8, requires_grad=True))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("graph", torch.eye(8).to_sparse())
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.sparse.mm(self.graph, torch.tanh(self.linear(x) * self.prompt).T).T[:, :4]


REPLICATED: dict[str, Build] = {
    "recurrent": Recurrent,
    "containers": Containers,
    "reparametrized": Reparametrized,
    "sparse": Bits,
    "trained_buffer": TrainedBuffer,
    "all_kinds": AllKinds,
}
"""Modules that are easily copied wrongly."""
