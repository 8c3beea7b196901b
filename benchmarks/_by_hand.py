"""What the author of a server writes for himself: one graph per batch size, inputs of the largest size and slices."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["BucketRunner"]


class BucketRunner:
    """Graphs of a step whose arguments have a row per sequence, in one pool, the largest first.

    `pad` has what padded rows get, by argument; the others keep what stands there, which is legal once it was.
    """

    def __init__(
        self,
        step: Callable[..., Tensor],
        sizes: Sequence[int],
        largest: Mapping[str, Tensor],
        pad: Mapping[str, int],
    ) -> None:
        self.step, self.sizes = step, sizes
        self.inputs = [torch.full_like(x, pad.get(name, 0)) for name, x in largest.items()]
        self.tails = [(x, pad[name]) for name, x in zip(largest, self.inputs, strict=True) if name in pad]
        self.out = step(*self.inputs)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, warmups: int = 1) -> None:
        """Record all graphs with nothing but padding in them, each after so many runs."""
        pool = None
        for size in reversed(self.sizes):
            inputs, out = [x[:size] for x in self.inputs], self.out[:size]
            for _ in range(warmups):
                out.copy_(self.step(*inputs))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool):
                out.copy_(self.step(*inputs))
            pool = pool or graph.pool()
            self.graphs[size] = graph

    def static(self, *given: Tensor) -> Tensor:
        """Copy, pad, replay; the result is valid until the next call."""
        count = given[0].shape[0]
        size = self._size(count)
        for x, mine in zip(given, self.inputs, strict=True):
            mine[:count].copy_(x)
        if count < size:
            for mine, fill in self.tails:
                mine[count:size].fill_(fill)
        self.graphs[size].replay()
        return self.out[:count]

    def fresh(self, *given: Tensor) -> Tensor:
        """The same, and the result is the caller's."""
        return self.static(*given).clone()

    def raw(self, *given: Tensor) -> Tensor:
        """The replay alone."""
        count = given[0].shape[0]
        self.graphs[self._size(count)].replay()
        return self.out[:count]

    def _size(self, count: int) -> int:
        return self.sizes[bisect_left(self.sizes, count)]
