"""Models for the benchmarks of real compute, each with its batches of random data.

Sized so that a training step takes one core of a server from 100 to 400 ms; ``small=True`` makes them tiny.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer; the head shares its weight with the embedding."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each with BatchNorm, around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.convs = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convs(x) + self.shortcut(x))


def resnet50(width: int, classes: int = 100, blocks: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Sequential:
    """ResNet-50's 16 bottlenecks and 161 parameters; its ``width`` is 64."""
    stages: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    ]
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            stages.append(_Bottleneck(channels, width << stage, stride=2 if stage and not block else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*stages, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)))


class _Residual(nn.Module):
    """A residual layer with four small parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.tanh(self.linear(self.norm(x)))


def many_small(parameters: int, width: int) -> nn.Sequential:
    """Layers of four parameters each, the largest of ``width * width`` elements."""
    return nn.Sequential(*(_Residual(width) for _ in range(parameters // 4)))


def mlp(width: int, layers: int) -> nn.Sequential:
    """Wide linear layers: large gradients for little compute."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


class RecurrentModel(nn.Module):
    """A language model of LSTM layers: each layer's gradients come together, after all time steps."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens))[0])


class _Separable(nn.Module):
    """A depthwise convolution and two linear layers, around a shortcut, as in ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).movedim(1, -1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).movedim(-1, 1)


def convnext(widths: tuple[int, ...], blocks: int, classes: int) -> nn.Sequential:
    """Stages of separable convolutions; each stage halves the picture."""
    stages: list[nn.Module] = []
    channels = 3
    for width in widths:
        stages += [nn.Conv2d(channels, width, 2, 2), *(_Separable(width) for _ in range(blocks))]
        channels = width
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Shuffled(nn.Module):
    """The layers of an MLP, registered in another order than they are used in."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.order: list[int] = torch.randperm(layers, generator=torch.Generator().manual_seed(1)).tolist()

    def forward(self, x: Tensor) -> Tensor:
        for at in self.order:
            x = F.relu(self.layers[at](x))
        return x


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
        name: What tables call it.
        make: Makes the model, with initial weights from torch's global generator.
        shape: The shape of a batch of inputs.
        classes: Number of classes to predict.
        tokens: Whether inputs are numbers of tokens rather than features.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    tokens: bool = False

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random inputs and targets on the CPU."""
        if self.tokens:
            inputs = torch.randint(self.classes, self.shape, generator=generator)
            return inputs, inputs.roll(-1, dims=1)
        inputs = torch.randn(self.shape, generator=generator)
        return inputs, torch.randint(self.classes, self.shape[:1], generator=generator)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over the last dimension."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def workloads(small: bool = False) -> dict[str, Workload]:
    """Models that take time to compute, by name."""
    if small:
        return {
            "gpt": Workload("gpt", lambda: GPT(256, 16, 64, 2, 2), (2, 16), 256, tokens=True),
            "resnet": Workload("resnet", lambda: resnet50(4, 10, (1, 1, 1, 1)), (4, 3, 32, 32), 10),
            "many small": Workload("many small", lambda: many_small(200, 8), (4, 8), 8),
            "wide mlp": Workload("wide mlp", lambda: mlp(256, 3), (8, 256), 256),
            "lstm": Workload("lstm", lambda: RecurrentModel(64, 32, 2), (2, 8), 64, tokens=True),
            "convnext": Workload("convnext", lambda: convnext((8, 16), 1, 10), (2, 3, 16, 16), 10),
        }
    return {
        "gpt": Workload("gpt", lambda: GPT(2048, 128, 384, 6, 4), (2, 128), 2048, tokens=True),
        "resnet": Workload("resnet", lambda: resnet50(32), (16, 3, 64, 64), 100),
        "many small": Workload("many small", lambda: many_small(1200, 32), (64, 32), 32),
        "wide mlp": Workload("wide mlp", lambda: mlp(2048, 4), (48, 2048), 2048),
        "lstm": Workload("lstm", lambda: RecurrentModel(4096, 512, 2), (8, 32), 4096, tokens=True),
        "convnext": Workload("convnext", lambda: convnext((64, 128, 256, 512), 2, 100), (8, 3, 64, 64), 100),
    }
