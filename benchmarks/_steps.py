"""What one replayed call of a wrapper spends, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from graphify import handle
from graphify._graph import Graph
from graphify._signature import overlap

from ._clocks import alone

__all__ = ["breakdown"]

Step = tuple[str, Callable[[], Any]]


def breakdown(graphed: Any, args: tuple[Tensor, ...], *, rounds: int, number: int) -> list[tuple[str, float]]:
    """Each step's name and microseconds, in the order of the call path; the last row is the whole call.

    Steps are timed one by one in a loop, so caches are warmer than in a call and the sum may be below the whole.
    """
    steps = _steps(graphed, args)
    times = [(name, alone(step, rounds=rounds, number=number)) for name, step in steps]
    whole = alone(lambda: graphed(*args), rounds=rounds, number=number)
    return [*times, ("sum of the above", sum(t for _, t in times)), ("whole call", whole)]


def _steps(graphed: Any, args: tuple[Tensor, ...]) -> Sequence[Step]:
    graphed(*args)  # so that the wrapper's last entry is the one of this call
    runner = handle(graphed)
    entry, table, graph = runner._last, runner._table, runner._last.graph
    assert isinstance(graph, Graph), "breakdown: the wrapper must be replaying, without gradients"
    values = runner._bind(*args)
    found = table.unpack(values)
    assert found is not None, "breakdown: the arguments must fit the wrapper's last table"
    tensors, _ = found
    fresh = graph.launch()
    return [
        ("off: disabled, tracing, other modes, nested", runner._off),
        ("bind", lambda: runner._bind(*args)),
        ("unpack", lambda: table.unpack(values)),
        ("ambient", entry.same_ambient),
        ("specs", lambda: entry.matches(*tensors)),
        ("overlap", lambda: overlap(tensors) == entry.key[3]),
        ("guard", lambda: entry.holds()),
        ("order", lambda: graph.order(graph.memory)),
        ("fill", lambda: graph.stage(tensors)),
        ("replay and copy out", graph.launch),
        ("make", lambda: graph.deliver(tensors, fresh, values)),
    ]
