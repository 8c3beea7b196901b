"""Train a small GPT whose forward and backward are graphs; loss, clipping and optimizer stay yours.

Runs on a GPU, and on a CPU by the tape backend, which shows equal numbers and no speed: python examples/train_module.py
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphify import graphify, handle

gpu = torch.cuda.is_available()
device = "cuda" if gpu else "cpu"
STEPS, VOCABULARY, HEADS = 40, 61, 4
BATCH, LENGTH, WIDTH = (16, 64, 128) if gpu else (4, 16, 32)


class Block(nn.Module):
    """Causal attention and a feed-forward part, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().logical_not())

    def forward(self, x: Tensor) -> Tensor:
        """Take and give (batch, length, width)."""
        parts = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(self.mask, float("-inf"))
        x = x + self.dropout(self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2)))
        added: Tensor = self.dropout(self.narrow(F.gelu(self.wide(self.between(x)))))
        return x + added


class GPT(nn.Module):
    """Logits (batch, length, vocabulary) for tokens (batch, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next token at each place."""
        logits: Tensor = self.head(self.blocks(self.tokens(tokens) + self.places.weight))
        return logits


def batches() -> list[Tensor]:
    """Sequences in which each token follows from the one before."""
    starts = torch.randint(VOCABULARY, (STEPS, BATCH, 1), generator=torch.Generator().manual_seed(1))
    rows = [starts]
    for _ in range(LENGTH):
        rows.append((rows[-1] * 3 + 1) % VOCABULARY)
    return list(torch.cat(rows, -1).to(device))


def train(graphed: bool) -> tuple[list[float], list[float]]:
    """Give the losses and the seconds of each step."""
    torch.manual_seed(0)
    model = GPT().to(device)
    if graphed:
        model = graphify(model, backend="cuda" if gpu else "tape")  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, seconds = [], []
    for batch in batches():
        start = time.perf_counter()
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU, so that the time is that of the whole step
        seconds.append(time.perf_counter() - start)
    if graphed:
        print(handle(model).report())
        stats = handle(model).stats()
        assert stats.replays >= STEPS - 2, stats
    return losses, seconds


def main() -> None:
    """Train twice from one seed, eagerly and graphed."""
    torch.set_num_threads(1)  # the tensors are small: on a CPU more threads only cost time
    expected, slow = train(graphed=False)
    actual, fast = train(graphed=True)
    assert actual == expected, max(abs(a - b) for a, b in zip(actual, expected, strict=True))
    print(f"{STEPS} steps, loss {expected[0]:.3f} to {expected[-1]:.3f}: every loss equalled eager")
    print(f"per step: eager {median(slow) * 1e3:.2f} ms, graphed {median(fast) * 1e3:.2f} ms")
    if not gpu:
        print("this was the tape on a CPU: speed needs a GPU")


if __name__ == "__main__":
    main()
