"""What graphify wants to reach, and whether it did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ._buckets import ALL, HAND_LOOP, LARGEST
from ._case import Costs, Row
from ._nets import LAYER_PARAMETERS

__all__ = ["Results", "Verdict", "verdicts"]

Results = Mapping[str, Mapping[str, Row]]
"""Rows by case and way."""
GUARD = 0.25
"""Microseconds that checking one parameter may cost a call."""
NOT_HERE = "mlp bf16, conv+BN, LSTM, ResNet-50, ViT-B/16 and the encoder layer have no case here yet"


class Limit(NamedTuple):
    """One clock or cost of one way may be at most so many times another's (the best of several), plus so much."""

    target: int
    case: str
    clock: str
    ours: str
    factor: float
    peers: tuple[str, ...]
    plus: float = 0.0


class Verdict(NamedTuple):
    """A limit and what was measured, in the unit of its clock or cost; None where a way was not measured."""

    limit: Limit
    ours: float | None
    peer: float | None
    note: str = ""

    @property
    def most(self) -> float | None:
        """What the clock may show."""
        return None if self.peer is None else self.peer * self.limit.factor + self.limit.plus

    @property
    def holds(self) -> bool | None:
        """None: cannot be told."""
        if self.ours is None or self.most is None:
            return None
        return self.ours <= self.most and not self.note


def _limits() -> Iterator[Limit]:
    yield from _dispatch("mlp", 1.0, 0.65, 0.4, 0.0)
    yield from _dispatch("deep24", 1.0, 0.65, 0.4, GUARD * LAYER_PARAMETERS * 24)
    yield from _dispatch("multi8", 0.25, 0.3, 0.6, 0.0)
    for outputs in ("fresh", "static"):
        ours = f"graphify {outputs}"
        yield Limit(3, "mlp", "wall", ours, 1.03, ("raw replay",))
        yield Limit(3, "mlp", "wall", ours, 1 / 4.8, ("eager",))
        yield Limit(3, "deep24", "wall", ours, 1.03, ("raw replay",))
        yield Limit(3, "multi8", "wall", ours, 1.0, (f"hand-written {outputs}", f"foreach {outputs}"))
    for case in ("mlp", "deep24", "multi8", "step"):
        for outputs in ("fresh", "static"):
            peers = (f"hand-written {outputs}",)
            yield Limit(4, case, "latency", f"graphify {outputs}", 1.05, peers)
    yield from _train()
    for outputs in ("fresh", "static"):
        yield Limit(6, "step", "wall", f"graphify {outputs}", 1.03, ("hand-written static",))
    for memory in ("pool", "device"):
        yield Limit(8, "buckets", memory, ALL, 1.15, (LARGEST,))
    yield Limit(8, "buckets", "capture", ALL, 0.6, (HAND_LOOP,))


def _dispatch(case: str, static: float, fresh: float, tensordict: float, plus: float) -> Iterator[Limit]:
    target = 2 if case == "multi8" else 1
    for outputs, factor in (("fresh", fresh), ("static", static)):
        ours = f"graphify {outputs}"
        yield Limit(target, case, "dispatch", ours, factor, (f"hand-written {outputs}",), plus)
        yield Limit(target, case, "dispatch", ours, tensordict, ("tensordict",), plus)


def _train() -> Iterator[Limit]:
    for variant, factor in (("hooks", 0.7), ("set to None", 0.7), ("kept", 0.5)):
        peers = (f"make_graphed_callables, {variant}",)
        yield Limit(5, "train", "wall", f"graphify, {variant}", factor, peers)
    for variant in ("set to None", "kept"):
        yield Limit(5, "train", "wall", f"graphify, {variant}", 1.2, ("one graph",))


def verdicts(results: Results) -> Sequence[Verdict]:
    """One for each limit, in the order of the targets."""
    return [_judged(limit, results.get(limit.case, {})) for limit in _limits()]


def _judged(limit: Limit, rows: Mapping[str, Row]) -> Verdict:
    ours = rows.get(limit.ours)
    times = [_clock(rows.get(peer), limit.clock) for peer in limit.peers]
    known = [time for time in times if time is not None]
    return Verdict(limit, _clock(ours, limit.clock), min(known, default=None), ours.note if ours else "")


def _clock(row: Row | None, clock: str) -> float | None:
    measured = None if row is None else row.costs if clock in Costs._fields else row.clocks
    if measured is None:
        return None
    number: float = getattr(measured, clock)
    return number
