"""The two nets of `python -m graphify demo`, small enough that launching costs more than computing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Decoder", "mlp"]


def mlp() -> nn.Sequential:
    """The 128-256-128 net of the motivating experiment; takes (batch, 128)."""
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).eval()


class Block(nn.Module):
    """Pre-norm attention over a cache of fixed size, then a feed-forward net."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cache: Tensor, position: Tensor, visible: Tensor) -> Tensor:
        """Take x (batch, width); cache (2, batch, heads, length, head width), written at `position`."""
        batch, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, 3, self.heads, 1, width // self.heads)
        query, key, value = qkv.unbind(1)
        keys, values = cache.unbind(0)
        keys.index_copy_(2, position, key)
        values.index_copy_(2, position, value)
        seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible)
        x = x + self.out(seen.reshape(batch, width))
        fed: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + fed


class Decoder(nn.Module):
    """A language model that takes one token at a time and greedily picks the next one.

    It does what a decode step on a GPU must do to be captured: nothing grows, the cache has its final size,
    and where to write is a tensor, not a Python number.
    """

    steps: Tensor

    def __init__(
        self, *, layers: int = 4, width: int = 256, heads: int = 4, length: int = 64, vocab: int = 512
    ) -> None:
        super().__init__()
        self.shape = (layers, 2, heads, length, width // heads)
        self.embed, self.place = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.register_buffer("steps", torch.arange(length), persistent=False)

    def new_cache(self, batch: int) -> Tensor:
        """An empty cache: (layers, 2, batch, heads, length, head width)."""
        layers, two, *rest = self.shape
        return torch.zeros(layers, two, batch, *rest, device=self.steps.device)

    def forward(self, token: Tensor, position: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Give logits (batch, vocab) and the next token (batch,) for token (batch,) at position (1,)."""
        visible = (self.steps <= position).view(1, 1, 1, -1)
        x = self.embed(token) + self.place(position)
        for block, layer in zip(self.blocks, cache.unbind(0), strict=True):
            x = block(x, layer, position, visible)
        logits: Tensor = self.head(self.norm(x))
        return logits, logits.argmax(-1)
