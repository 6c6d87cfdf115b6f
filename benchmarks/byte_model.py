"""A small transformer over bytes, as a LightningModule."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class Block(nn.Module):
    """Causal self-attention and a feed-forward net, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.query_key_value(self.norms[0](hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in split)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.feed_forward(self.norms[1](hidden))


class ByteTransformer(nn.Module):
    """Predicts the next byte: (batch, length) of int64 to logits (batch, length, 256)."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 3, length: int = 256) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(text) + self.position[: text.shape[1]])))


class LanguageModel(pl.LightningModule):
    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.net = net
        self.lr = lr

    def loss(self, text: Tensor) -> Tensor:
        logits = self.net(text[:, :-1])
        return cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("held-out loss", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)
