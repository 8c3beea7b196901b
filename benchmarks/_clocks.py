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
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(
    calls: Sequence[Call], inputs: Sequence[tuple[Tensor, ...]], *, rounds: int, number: int
) -> list[Clocks]:
    """Medians over rounds in which the ways take turns, so that a slow moment of the machine hits them all."""
    found: list[list[Clocks]] = [[] for _ in calls]
    for round_ in range(rounds + 1):
        for call, times in zip(calls, found, strict=True):
            clocks = Clocks(*_loop(call, inputs, number), _latency(call, inputs, max(1, number // 3)))
            if round_:  # the first round warms up
                times.append(clocks)
    return [Clocks(*map(median, zip(*times, strict=True))) for times in found]


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
