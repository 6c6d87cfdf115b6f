"""Public models as numbers: shapes of parameters and FLOPs per layer, in the order of forward."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """Gradients that become ready together in backward.

    Attributes:
        name: The layer's name.
        shapes: The shapes of its parameters, in registration order.
        flops: Floating-point operations of its forward per sample; a multiply-add is two.
    """

    name: str
    shapes: tuple[Shape, ...]
    flops: float


@dataclass(frozen=True)
class ModelShapes:
    """A model and how it is trained.

    Attributes:
        name: The model's name.
        layers: Its layers, in the order of forward.
        samples: Number of samples per rank and step.
        sample: What a sample is.
    """

    name: str
    layers: tuple[Layer, ...]
    samples: int
    sample: str

    @property
    def numel(self) -> int:
        """Number of parameters, counted in elements."""
        return sum(prod(shape) for layer in self.layers for shape in layer.shapes)

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of the forward of one sample."""
        return sum(layer.flops for layer in self.layers)


def resnet50(samples: int = 32) -> ModelShapes:
    """ResNet-50 v1.5 on images of 224 x 224: 25.6 M parameters (He et al. 2016; stride in the 3 x 3 convolutions).

    Args:
        samples: Images per rank and step; 32 as in Goyal et al. 2017, "Accurate, Large Minibatch SGD".
    """
    layers: list[Layer] = []

    def convolution(name: str, channels: int, out: int, kernel: int, side: int) -> None:
        """A convolution without bias that gives ``side`` x ``side`` pixels, and its BatchNorm."""
        weight = (out, channels, kernel, kernel)
        layers.append(Layer(name, (weight, (out,), (out,)), 2.0 * prod(weight) * side * side))

    convolution("conv1", 3, 64, 7, 112)
    channels, side = 64, 56
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            inside = side
            side = side // 2 if stage > 1 and block == 0 else side
            convolution(f"{name}.conv1", channels, width, 1, inside)
            convolution(f"{name}.conv2", width, width, 3, side)
            convolution(f"{name}.conv3", width, 4 * width, 1, side)
            if block == 0:
                convolution(f"{name}.downsample", channels, 4 * width, 1, side)
            channels = 4 * width
    layers.append(Layer("fc", ((1000, channels), (1000,)), 2.0 * 1000 * channels))
    return ModelShapes("ResNet-50", tuple(layers), samples, "images")


def gpt(name: str, layers: int, width: int, context: int, vocabulary: int, sequences: int) -> ModelShapes:
    """A GPT-2-like decoder whose output layer shares the weight of the token embedding.

    That weight gets its last gradient from the embedding, the very last layer of backward.

    Args:
        name: The model's name.
        layers: Number of blocks.
        width: Width of the residual stream; MLPs are four times as wide.
        context: Tokens per sequence.
        vocabulary: Number of different tokens.
        sequences: Number of sequences per rank and step.
    """

    def linear(at: str, out: int, features: int) -> Layer:
        return Layer(at, ((out, features), (out,)), 2.0 * out * features * context)

    def norm(at: str) -> Layer:
        return Layer(at, ((width,), (width,)), 0.0)

    found = [Layer("wte, wpe", ((vocabulary, width), (context, width)), 0.0)]
    for at in range(layers):
        found += [
            norm(f"h.{at}.ln_1"),
            linear(f"h.{at}.attn.c_attn", 3 * width, width),
            Layer(f"h.{at}.attn", (), 4.0 * context * context * width),  # scores, and values weighted by them
            linear(f"h.{at}.attn.c_proj", width, width),
            norm(f"h.{at}.ln_2"),
            linear(f"h.{at}.mlp.c_fc", 4 * width, width),
            linear(f"h.{at}.mlp.c_proj", width, 4 * width),
        ]
    found += [norm("ln_f"), Layer("lm_head", (), 2.0 * vocabulary * width * context)]
    return ModelShapes(name, tuple(found), sequences, f"sequences of {context} tokens")


def gpt2_medium(sequences: int = 8) -> ModelShapes:
    """GPT-2 medium: 355 M parameters (Radford et al. 2019)."""
    return gpt("GPT-2 medium", 24, 1024, 1024, 50257, sequences)


def gpt_1_3b(sequences: int = 4) -> ModelShapes:
    """GPT-3 XL's shape with GPT-2's vocabulary: 1.3 B parameters (Brown et al. 2020, table 2.1)."""
    return gpt("GPT 1.3 B", 24, 2048, 2048, 50257, sequences)
