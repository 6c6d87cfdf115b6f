"""A model whose layers take a given time and leave the processor idle, as an accelerator does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

EVEN = (604_000,) * 24
"""Parameters of each layer, counted in elements, in the order of forward."""
FORWARD_MS, BACKWARD_MS = 4.0, 8.0
"""Milliseconds of a layer."""


class _PacedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        time.sleep(forward_s)
        ctx.weight, ctx.backward_s = weight, backward_s
        return x + weight.view(-1)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return grad, torch.full_like(ctx.weight, float(grad.sum())), None, None


class PacedLayer(nn.Module):
    """One parameter; forward and backward take the given seconds."""

    def __init__(self, numel: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, numel))  # of two dimensions: biases do not travel in 8 bits
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return _PacedLayer.apply(x, self.weight, self.forward_s, self.backward_s)


def paced(
    sizes: Sequence[int] = EVEN, forward_ms: float = FORWARD_MS, backward_ms: float = BACKWARD_MS
) -> nn.Sequential:
    """The reference case: 24 layers, 58 MB of gradients, 4 ms forward and 8 ms backward a layer."""
    return nn.Sequential(*(PacedLayer(numel, forward_ms / 1000, backward_ms / 1000) for numel in sizes))
