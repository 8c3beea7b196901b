"""The graphs of one signature whose results need gradients: one for each forward whose backward is still to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ._graph import Graph

__all__ = ["MOST", "Instances", "graphs_of"]

MOST = 8
"""How many forwards may wait for their backwards; each keeps its activations, as in eager."""


class Instances:
    """Several recordings of one call behind the face of one graph; `more` makes a call for which none is free."""

    def __init__(self, first: Graph, more: Callable[[tuple[Tensor, ...], tuple[Any, ...]], Any]) -> None:
        self.graphs = [first]
        self.pool, self.recording, self.conflicts = first.pool, first.recording, first.conflicts
        self.unguarded = first.unguarded
        self.replays = 0
        self.step = first.step
        self._more = more

    def __call__(self, tensors: tuple[Tensor, ...], values: tuple[Any, ...], staged: bool = False) -> Any:
        """Replay an instance that waits for no backward."""
        with self.pool.lock:
            for graph in self.graphs:
                if not graph.busy():
                    graph.reclaim()
                    result = graph(tensors, values, staged)
                    self.replays += 1
                    return result
        return self._more(tensors, values)

    @property
    def uses(self) -> int:
        """Replays for calls of whatever size."""
        return self.replays

    @property
    def seconds(self) -> float:
        """What recording them took."""
        return sum(graph.seconds for graph in self._all())

    @property
    def nodes(self) -> int:
        """Operations in all forwards and backwards."""
        return sum(graph.nodes for graph in self._all())

    @property
    def bytes(self) -> int:
        """Memory of all forwards and backwards."""
        return sum(graph.bytes for graph in self._all())

    def _all(self) -> Iterator[Graph]:
        for graph in self.graphs:
            yield graph
            yield from graph.backwards()


def graphs_of(graph: Graph | Instances | None) -> list[Graph]:
    """The graphs behind a signature's, each with inputs of its own."""
    if isinstance(graph, Instances):
        return graph.graphs
    return [] if graph is None else [graph]
