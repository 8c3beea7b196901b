"""Three clocks per call: dispatch, wall, latency."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Clocks", "alone", "synchronize", "timed"]

Call = Callable[..., Any]
BUDGET = 0.6
"""Seconds that one way's loop may take in a round; slow ways make fewer calls."""
WARMING = 30
FEWEST = 20
_ON_GPU = torch.cuda.is_available()  # asked once: the clocks run while it is asked


class Clocks(NamedTuple):
    """Microseconds of one call.

    `dispatch` is CPU time until the call returns, `wall` the same with one synchronisation at the end of the
    loop, `latency` one call and a synchronisation.
    """

    dispatch: float
    wall: float
    latency: float


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if _ON_GPU:
        torch.cuda.synchronize()


def timed(
    calls: Sequence[Call], inputs: Sequence[tuple[Tensor, ...]], *, rounds: int, number: int
) -> list[Clocks | Exception]:
    """Medians over rounds in which the ways take turns, so that a slow moment of the machine hits them all.

    A way that raises gives its exception and leaves the turns to the others.
    """
    turns = [_Turns(call, inputs, number) for call in calls]
    for _ in range(rounds + 1):
        for one in turns:
            one.take()
    return [one.error or Clocks(*map(median, zip(*one.times, strict=True))) for one in turns]


class _Turns:
    """One way's rounds; the first warms up and tells how many calls fit into the later ones."""

    def __init__(self, call: Call, inputs: Sequence[tuple[Tensor, ...]], number: int) -> None:
        self.call, self.inputs, self.most = call, inputs, number
        self.number = 0
        self.times: list[Clocks] = []
        self.error: Exception | None = None

    def take(self) -> None:
        if self.error is not None:
            return
        try:
            if self.number:
                self.times.append(self._round(self.number))
            else:
                wall = self._round(min(WARMING, self.most)).wall
                self.number = min(self.most, max(FEWEST, int(BUDGET / wall * 1e6)))
        except Exception as error:
            self.error = error

    def _round(self, number: int) -> Clocks:
        dispatch, wall = _loop(self.call, self.inputs, number)
        return Clocks(dispatch, wall, _latency(self.call, self.inputs, max(1, number // 3)))


def _loop(call: Call, inputs: Sequence[tuple[Tensor, ...]], number: int) -> tuple[float, float]:
    given = list(itertools.islice(itertools.cycle(inputs), number))
    synchronize()
    start = time.perf_counter()
    for args in given:
        call(*args)
    returned = time.perf_counter()
    synchronize()
    ended = time.perf_counter()
    return (returned - start) / number * 1e6, (ended - start) / number * 1e6


def _latency(call: Call, inputs: Sequence[tuple[Tensor, ...]], number: int) -> float:
    times = []
    for args in itertools.islice(itertools.cycle(inputs), number):
        synchronize()
        start = time.perf_counter()
        call(*args)
        synchronize()
        times.append(time.perf_counter() - start)
    return median(times) * 1e6


def alone(call: Callable[[], Any], *, rounds: int, number: int) -> float:
    """Microseconds of CPU time until a call without arguments returns, without the loop around it."""
    times = []
    for _ in range(rounds + 1):
        synchronize()
        times.append(_repeat(call, number) - _repeat(_nothing, number))
    synchronize()
    return median(times[1:]) / number * 1e6


def _repeat(call: Callable[[], Any], number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        call()
    return time.perf_counter() - start


def _nothing() -> None:
    """Cost a call."""
