"""What making graphs ahead of time costs: time and memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from ._case import Capture, Costs, Ready, Row, Way
from ._clocks import synchronize
from ._measure import told

__all__ = ["measure_captures"]

ROUNDS = 3
MIB = 2**20


def measure_captures(ways: Sequence[Capture], *, rounds: int) -> list[Row]:
    """One row per way, what raises costs its own row only; the clocks of the case have warmed everything up.

    Memory is that of a first turn in which all ways keep their graphs: the driver hands what one frees to the next.
    Time is the median of later ones.
    """
    rows = [Row(Way(capture.name, _nothing)) for capture in ways]
    kept: list[Any] = []
    with torch.no_grad():
        for capture, row in zip(ways, rows, strict=True):
            _try(row, _memory_of, capture, row, kept)
        kept.clear()
        times: list[list[float]] = [[] for _ in rows]
        for _ in range(max(1, min(rounds, ROUNDS))):
            for capture, row, taken in zip(ways, rows, times, strict=True):
                _try(row, _time_of, capture, taken)
    for row, taken in zip(rows, times, strict=True):
        if row.costs is not None and not row.problem:
            row.costs = row.costs._replace(capture=median(taken))
    return rows


def _nothing() -> Ready:
    raise AssertionError("a way to make graphs makes no calls")


def _try(row: Row, measure: Callable[..., None], *args: Any) -> None:
    if row.problem:
        return
    try:
        measure(*args)
    except Exception as error:
        row.costs, row.problem = None, told(error)


def _memory_of(capture: Capture, row: Row, kept: list[Any]) -> None:
    before = _memory()
    kept.append(capture.make())
    row.costs = Costs(0.0, *((now - then) / MIB for now, then in zip(_memory(), before, strict=True)))


def _time_of(capture: Capture, taken: list[float]) -> None:
    _memory()
    start = time.perf_counter()
    made = capture.make()
    synchronize()
    seconds = time.perf_counter() - start
    del made
    taken.append(seconds * 1e3)


def _memory() -> tuple[int, int]:
    """Bytes that torch has reserved and that are gone from the device, without what only a cache holds."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0, 0
    synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_reserved(), total - free
