"""A decoder with a paged cache of keys and values in plain PyTorch, and the calls that a server makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["PAD", "PAGE", "Decoder", "Size", "Step", "steps"]

PAGE = 16
"""Tokens in a page."""
PAD: dict[str, int] = {"slots": 0, "context_lens": 1}
"""What padded rows get: they write to slot 0 and read it. Page 0 is for nothing else."""


class Size(NamedTuple):
    """How large a decoder is, and how many sequences of which length it may hold."""

    layers: int = 16
    hidden: int = 1024
    heads: int = 16
    vocabulary: int = 8192
    sequences: int = 256
    pages: int = 8
    """Of each sequence."""
    dtype: torch.dtype = torch.bfloat16


class Step(NamedTuple):
    """The arguments of one call, a row per sequence: (B), (B), (B), (B, pages), (B), all int64."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    context_lens: Tensor


class Layer(nn.Module):
    """Attention over the pages and a gated feed-forward part, each added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden, self.heads = size.hidden, size.heads
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.wide, self.narrow = (
            nn.Linear(hidden, 4 * hidden, bias=False),
            nn.Linear(2 * hidden, hidden, bias=False),
        )
        shape = (1 + size.sequences * size.pages, PAGE, size.heads, hidden // size.heads)
        self.keys: Tensor
        self.values: Tensor
        self.register_buffer("keys", torch.randn(shape), persistent=False)
        self.register_buffer("values", torch.randn(shape), persistent=False)

    def forward(self, x: Tensor, turns: Tensor, slots: Tensor, block_tables: Tensor, mask: Tensor) -> Tensor:
        """Take and give (B, hidden); the new keys and values go to their slots."""
        query, key, value = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        query, key = turned(query, turns), turned(key, turns)
        self.keys.flatten(0, 1).index_copy_(0, slots, key)
        self.values.flatten(0, 1).index_copy_(0, slots, value)
        keys = self.keys[block_tables].flatten(1, 2).transpose(1, 2)  # (B, heads, pages * PAGE, width)
        values = self.values[block_tables].flatten(1, 2).transpose(1, 2)
        found = F.scaled_dot_product_attention(query.unsqueeze(2), keys, values, attn_mask=mask)
        x = x + self.out(found.flatten(1))
        gate, up = self.wide(self.between(x)).chunk(2, -1)
        added: Tensor = self.narrow(F.silu(gate) * up)
        return x + added


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding of (B, heads, width) by the cosines and sines (2, B, 1, width / 2) of a position."""
    one, other = x.chunk(2, -1)
    cos, sin = turns.to(x.dtype)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


class Decoder(nn.Module):
    """One decode step for B sequences: logits (B, vocabulary); the caches are buffers of the layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.hidden // size.heads
        self.embedding, self.last = nn.Embedding(size.vocabulary, size.hidden), nn.RMSNorm(size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)
        self.to(size.dtype)
        self.rates: Tensor
        self.places: Tensor
        rates = 10000.0 ** -torch.linspace(0, 1, width // 2)
        self.register_buffer("rates", rates, persistent=False)
        self.register_buffer("places", torch.arange(size.pages * PAGE), persistent=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, block_tables: Tensor, context_lens: Tensor
    ) -> Tensor:
        """Write each token to its slot, and attend to the first `context_lens` places of its pages."""
        angles = positions[:, None, None] * self.rates
        turns = torch.stack((angles.cos(), angles.sin()))
        mask = (self.places < context_lens[:, None])[:, None, None]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, turns, slots, block_tables, mask)
        logits: Tensor = self.head(self.last(x))
        return logits

    def caches(self) -> list[Tensor]:
        """Keys and values, without the page that padded rows write to."""
        return [cache[1:] for name, cache in self.named_buffers() if name.endswith((".keys", ".values"))]


def steps(size: Size, counts: list[int], device: torch.device) -> Iterator[Step]:
    """One call for each count of sequences: any of them, at random positions."""
    source = torch.Generator().manual_seed(1)
    tables = 1 + torch.arange(size.sequences * size.pages).view(size.sequences, size.pages)
    for count in counts:
        chosen = torch.randperm(size.sequences, generator=source)[:count]
        positions = torch.randint(size.pages * PAGE, (count,), generator=source)
        pages = tables[chosen]
        slots = pages.gather(1, positions[:, None] // PAGE)[:, 0] * PAGE + positions % PAGE
        tokens = torch.randint(size.vocabulary, (count,), generator=source)
        yield Step(*(t.to(device) for t in (tokens, positions, slots, pages, positions + 1)))
