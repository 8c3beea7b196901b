"""What the tests of buckets share: sizes that fill, shrink and switch buckets, and eager as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphify import Bucket
from graphify.stats import Stats
from graphify.testing import Call, assert_matches_eager

BATCH, SEQ = Bucket("batch", [2, 4, 8]), Bucket("seq", [4, 8])
ROWS: dict[str, Any] = {"buckets": [2, 4, 8]}
BOTH: dict[str, Any] = {"buckets": {"x": {0: BATCH, 1: SEQ}}}

SIZES = [(3, 3), (4, 4), (3, 2), (1, 4), (2, 3), (1, 2), (5, 5), (8, 4), (4, 8), (3, 7), (1, 1), (3, 3)]
"""(batch, seq) of each call: buckets are filled, left and come back with fewer rows."""


def rows(batch: int, seq: int) -> tuple[Tensor, ...]:
    """One argument, a row per batch."""
    return (torch.randn(batch, 3),)


def steps(batch: int, seq: int) -> tuple[Tensor, ...]:
    """One argument, a row per batch and place in a sequence."""
    return (torch.randn(batch, seq, 6),)


def over(
    args: Callable[[int, int], Any], sizes: Sequence[tuple[int, int]] = SIZES, context: Any = torch.no_grad
) -> list[Call]:
    """One call per size, with other data each."""
    made = []
    for batch, seq in sizes:
        with context():
            found = args(batch, seq)
        call = found if isinstance(found, Call) else Call(found)
        call.context = context
        made.append(call)
    return made


def like_eager(
    make: Callable[[], Callable[..., Any]],
    calls: Iterable[Call],
    backend: str,
    device: torch.device,
    *,
    shown: int = 0,
    **options: Any,
) -> Stats:
    """Graphed equals eager, bit for bit; but for warm-ups, captures and at most `shown` calls, all were replays."""
    stats = assert_matches_eager(make=make, calls=calls, backend=backend, device=device, **options)
    assert stats.replays > 0, stats
    assert stats.reasons["cut"] <= shown, stats
    assert stats.eager == stats.reasons["cut"], stats
    return stats


class Cache(nn.Module):
    """Rows by slot; index -1 is Python's last row where it is not masked."""

    kv: Tensor

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.register_buffer("kv", torch.zeros(32, 3))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        if not self.masked:
            self.kv[slots] = x
            return self.kv[slots] * 2
        live, safe = slots >= 0, slots.clamp(min=0)
        self.kv.index_add_(0, safe, torch.where(live[:, None], x - self.kv[safe], 0.0))
        return self.kv[safe] * 2
