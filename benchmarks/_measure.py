"""Build the ways of a case, compare their numbers with eager, time them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphify import handle

from ._case import Case, Ready, Row
from ._clocks import Clocks, timed

__all__ = ["measure", "told"]

Numbers = list[Tensor | None]


def measure(case: Case, *, rounds: int, number: int) -> list[Row]:
    """One row per way; what raises costs its own row only."""
    with torch.set_grad_enabled(case.grad):
        rows = [Row(way) for way in case.ways]
        for row in rows:
            _build(row)
        for args in case.inputs[: case.checked]:
            _compare(rows, args)
        before = {row.way.name: _recordings(row) for row in rows}
        _time(case, rows, rounds, number)
        for row in rows:
            _judge(row, before[row.way.name])
    return rows


def _build(row: Row) -> None:
    try:
        row.ready = row.way.build()
    except Exception as error:
        row.problem = told(error)


def _compare(rows: Sequence[Row], args: tuple[Tensor, ...]) -> None:
    """One call of each way that is checked, and of those that they are checked against."""
    wanted = {row.way.mirrors for row in rows}
    expected: dict[str | None, Numbers] = {}
    for row in rows:
        mirrors = row.way.mirrors
        if row.problem or (mirrors is None and row.way.name not in wanted):
            continue
        assert row.ready is not None, "a row without a problem was built"
        try:
            got = _numbers(row.ready, args)
        except Exception as error:
            row.problem = told(error)
            continue
        expected[row.way.name] = got
        if mirrors is not None and mirrors not in expected:
            row.note = f"not compared: {mirrors} gave nothing"
        elif mirrors is not None:
            off = max(map(_off, got, expected[mirrors]))
            if off > row.way.tolerance:
                row.note = f"differs from eager, by {off:.1e} of the largest number"


def _numbers(ready: Ready, args: tuple[Tensor, ...]) -> Numbers:
    result = ready.call(*args).detach().clone()
    return [result, *(None if one is None else one.clone() for one in ready.seen())]


def _off(got: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference as a share of the largest number; infinite where only one is there."""
    if got is None or expected is None:
        return 0.0 if got is expected else float("inf")
    if got.shape != expected.shape or torch.equal(got, expected):
        return 0.0 if got.shape == expected.shape else float("inf")
    off = ((got - expected).abs().max() / expected.abs().max()).item()
    return off if off == off else float("inf")


def _time(case: Case, rows: Sequence[Row], rounds: int, number: int) -> None:
    sound = [(row, row.ready.call) for row in rows if row.ready is not None and not row.problem]
    times = timed([call for _, call in sound], case.inputs, rounds=rounds, number=number)
    for (row, _), result in zip(sound, times, strict=True):
        if isinstance(result, Clocks):
            row.clocks = result
        else:
            row.problem = told(result)


def _recordings(row: Row) -> int:
    graphed = row.ready.graphed if row.ready is not None else None
    return 0 if graphed is None else handle(graphed).stats().recordings


def _judge(row: Row, before: int) -> None:
    """A time of calls that were no replays says nothing about graphify."""
    if row.ready is None or row.ready.graphed is None or row.problem:
        return
    stats = handle(row.ready.graphed).stats()
    if stats.eager or stats.errors or not stats.replays:
        row.note = f"not replayed: {dict(stats.reasons) or stats}"
    elif stats.recordings != before:
        row.note = f"{stats.recordings - before} recordings while it was timed"


def told(error: Exception) -> str:
    """The first lines of what was raised, as one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:240]
