"""Gradients that are added to `.grad` when a backward is over, since it may bring more for the same leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._pulled import Pulled

__all__ = ["Arrivals", "at_end"]

at_end: Callable[[Callable[[], None]], None] | None = getattr(
    getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None
)
"""Call something when the backward that this thread is in the middle of is over."""


class Arrivals:
    """Adds what a gate's backward pulled to what `.grad` of its leaves holds, once nothing more can come.

    What is there must come last in the sum. Where the engine has another gradient for a leaf, that leaf's node
    gets the sum of both.
    """

    def __init__(self, leaves: Sequence[Tensor], nodes: Sequence[Any]) -> None:
        self._leaves = leaves
        self._pulled: Pulled | None = None
        self._met: set[int] = set()
        self._handles = [
            node.register_prehook(_Arrival(partial(self._meet, i)).__getitem__)
            for i, node in enumerate(nodes)
        ]

    def expect(self, pulled: Pulled) -> bool:
        """Add these when `add` is called; False while another backward is at it."""
        if self._pulled is not None and self._pulled.needed_elsewhere():
            return False
        self._pulled = pulled
        self._met.clear()
        return True

    def add(self, pulled: Pulled) -> None:
        """Nothing more can come in the backward that pulled these."""
        if self._pulled is not pulled:
            return
        found = [*zip(self._leaves, pulled.fitting, strict=True)]
        rest = [pair for i, pair in enumerate(found) if i not in self._met] if self._met else found
        pairs = [(leaf.grad, mine) for leaf, mine in rest if mine is not None]
        into = [grad for grad, _ in pairs if grad is not None]
        self._pulled = None
        if into:
            pulled.order()
            with torch.no_grad():
                torch._foreach_add_(into, [mine for grad, mine in pairs if grad is not None])

    def close(self) -> None:
        """Leave the nodes alone."""
        for handle in self._handles:
            handle.remove()

    def _meet(self, index: int, other: Tensor) -> tuple[Tensor] | None:
        mine = (
            None if self._pulled is None or self._pulled.needed_elsewhere() else self._pulled.fitting[index]
        )
        if mine is None or index in self._met:
            return None
        self._met.add(index)
        with torch.no_grad():
            return (other + mine,)


class _Arrival(dict[tuple[Any, ...], None]):
    """What a node asks before it accumulates. Looking up runs no Python where the engine brings nothing."""

    def __init__(self, meet: Callable[[Tensor], tuple[Tensor] | None]) -> None:
        super().__init__({(None,): None})
        self._meet = meet

    def __missing__(self, grads: tuple[Tensor]) -> tuple[Tensor] | None:
        return self._meet(grads[0])
