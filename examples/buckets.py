"""Serve a small language model, and encode texts of any length, with a handful of graphs.

Runs on a GPU, and on a CPU by the tape backend, which shows equal numbers and no speed: python examples/buckets.py
"""

from __future__ import annotations

import copy
import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphify import Bucket, graphify

chance = random.Random(0)  # noqa: S311
gpu = torch.cuda.is_available()
device, backend = ("cuda", "cuda") if gpu else ("cpu", "tape")
LAYERS, WIDTH, HEADS, VOCABULARY = (8, 512, 8, 1024) if gpu else (2, 32, 2, 61)
PAGE, PAGES, MOST = 16, 4, 48 if gpu else 6  # tokens in a page, pages of a sequence, sequences at once
SCRATCH = 0  # page 0 is for nothing but padding: its first slot is what padded rows write and read


class Attention(nn.Module):
    """One token per sequence attends to the pages of its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        cache = torch.zeros(2, 1 + MOST * PAGES, PAGE, HEADS, WIDTH // HEADS)
        self.cache: Tensor
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor, slots: Tensor, tables: Tensor, mask: Tensor) -> Tensor:
        """Take and give (batch, width); keys and values go to the cache, in place."""
        query, *new = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(1)
        for cache, rows in zip(self.cache, new, strict=True):
            cache.flatten(0, 1).index_copy_(0, slots, rows)
        keys, values = (cache[tables].flatten(1, 2).transpose(1, 2) for cache in self.cache)
        found = F.scaled_dot_product_attention(query.unsqueeze(2), keys, values, attn_mask=mask)
        result: Tensor = self.out(found.flatten(1))
        return result


class Decoder(nn.Module):
    """The next token's logits (batch, vocabulary) for one token of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(PAGES * PAGE, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.attentions = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.narrow = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.steps: Tensor
        self.register_buffer("steps", torch.arange(PAGES * PAGE), persistent=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor
    ) -> Tensor:
        """Take (batch), (batch), (batch), (batch, pages), (batch), all integers."""
        mask = (self.steps < lengths[:, None])[:, None, None]
        x = self.tokens(tokens) + self.places(positions)
        for i in range(LAYERS):
            x = x + self.attentions[i](self.norms[2 * i](x), slots, tables, mask)
            x = x + self.narrow[i](F.gelu(self.wide[i](self.norms[2 * i + 1](x))))
        logits: Tensor = self.head(x)
        return logits


class Sequence:
    """A request: the pages that it was given, and its tokens so far."""

    def __init__(self, pages: list[int]) -> None:
        self.pages, self.length = pages, chance.randint(2, 20)
        self.tokens = [chance.randrange(VOCABULARY)]

    def row(self) -> tuple[int, int, int, list[int], int]:
        """What the decoder gets of it."""
        at = len(self.tokens) - 1
        return self.tokens[-1], at, self.pages[at // PAGE] * PAGE + at % PAGE, self.pages, at + 1


def serve() -> None:
    """Decode for as many sequences as there happen to be; eager decoding of the same tokens is beside it."""
    model = Decoder().to(device).eval()
    eager = copy.deepcopy(model)

    # All that stands here instead of a capture loop, a table of graphs, static buffers and code that pads:
    @graphify(
        buckets=Bucket.decode(MOST),  # 1, 2, 4, 8, 16, ...: dimension 0 of every argument
        pad={"slots": SCRATCH, "lengths": 1},  # the rest gets 0: token 0, position 0, pages of padding
        check_padding="outputs",  # padded rows may write the cache: they write SCRATCH
        outputs="static",  # logits are read before the next step
        backend=backend,
    )
    def decode(tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        logits: Tensor = model(tokens, positions, slots, tables, lengths)
        return logits

    # The third token of a sequence that has pages 1, 2, ...: real data, which padding must not change.
    row = Sequence(list(range(1, 1 + PAGES))).tokens[-1], 2, PAGE + 2, list(range(1, 1 + PAGES)), 3
    example = [torch.tensor([part], device=device) for part in row]
    print(f"all graphs will take about {decode.estimate(*example) / 2**20:.1f} MiB")
    print(decode.capture_buckets(*example))
    decode.seal()  # from here on nothing is captured: no request ever waits for one

    free = [list(range(1 + i * PAGES, 1 + (i + 1) * PAGES)) for i in range(MOST)]
    running: list[Sequence] = []
    decoded = 0
    for _ in range(100):
        if chance.random() < 0.2:
            running += [Sequence(free.pop()) for _ in range(min(len(free), chance.randint(1, MOST // 2)))]
        if not running:
            continue
        batch = [torch.tensor(part, device=device) for part in zip(*(s.row() for s in running), strict=True)]
        logits = decode(*batch)
        torch.testing.assert_close(logits, eager(*batch), rtol=1e-3, atol=1e-3)
        for sequence, token in zip(running, logits.argmax(-1).tolist(), strict=True):
            sequence.tokens.append(token)
            decoded += 1
        free += [s.pages for s in running if len(s.tokens) >= s.length]
        running = [s for s in running if len(s.tokens) < s.length]

    print(decode.report())
    stats = decode.stats()
    assert stats.replays == stats.calls, stats
    for one, other in zip(model.attentions, eager.attentions, strict=True):
        torch.testing.assert_close(one.cache[:, 1:], other.cache[:, 1:], rtol=1e-3, atol=1e-3)
    print(f"{decoded} tokens: all logits and caches equalled eager, to rounding\n")


def encode() -> None:
    """Texts of any number and length: two sizes that share the arguments, over a grid of graphs."""
    width, batch, length = 32, Bucket("batch", [1, 4, 8]), Bucket.powers_of_two("length", 8, 32)
    embedding = nn.Embedding(VOCABULARY, width).to(device)
    layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True).to(device)

    def encoded(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Give states (batch, length, width) and their means (batch, width); the mask is True at tokens."""
        states = layer(embedding(tokens), src_key_padding_mask=~mask)
        weights = mask.unsqueeze(-1).to(states.dtype)
        return states, (states * weights).sum(1) / weights.sum(1).clamp(min=1)

    both = {0: batch, 1: length}
    # The mask is what tells padding from tokens, so its own padding must be False and nothing else.
    graphed = graphify(encoded, buckets={"tokens": both, "mask": both}, pad={"mask": False}, backend=backend)
    example = (
        torch.randint(1, VOCABULARY, (1, 5), device=device),
        torch.ones(1, 5, dtype=torch.bool, device=device),
    )
    print(graphed.capture_buckets(*example))
    for _ in range(60):
        shape = (chance.randint(1, 8), chance.randint(1, 32))
        tokens = torch.randint(VOCABULARY, shape, device=device)
        mask = torch.arange(shape[1], device=device) < torch.randint(1, 1 + shape[1], (shape[0], 1)).to(
            device
        )
        for actual, expected in zip(graphed(tokens, mask), encoded(tokens, mask), strict=True):
            assert actual.shape == expected.shape
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

    print(graphed.report())
    stats = graphed.stats()
    assert stats.recordings == len(batch.sizes) * len(length.sizes), stats
    assert stats.replays == stats.calls, stats
    print(f"{stats.calls} batches of all shapes equalled eager, with {stats.recordings} graphs")


def main() -> None:
    """Serve, then encode."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the tensors are small: on a CPU more threads only cost time
    with torch.inference_mode():
        serve()
        encode()


if __name__ == "__main__":
    main()
