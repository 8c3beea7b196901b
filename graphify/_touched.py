"""Whose `.grad` a run on this thread uses or changes; other threads may change others meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ._code import Executed
from ._layout import family_key
from ._shadows import Shadows, shadow

__all__ = ["Touched", "bind_grad", "grad_of", "hearing_grads"]

_below: Any = Tensor.grad  # the class always answers with torch's own
grad_of: Callable[[Tensor], Tensor | None] = _below.__get__
"""Read `.grad` unheard."""
bind_grad: Callable[[Tensor, Tensor | None], None] = _below.__set__
"""Bind `.grad` unheard."""
_node: Callable[[], Any] = torch._C._current_autograd_node


class Touched:
    """Whose `.grad` a run has to do with, and what it was before: heard where Python names it or a backward adds up.

    Of no other leaf is `.grad` as much as read. Race: torch frees what another thread reads while one binds it.
    """

    def __init__(self) -> None:
        self.before: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.everything = False
        """Whether compiled code ran, which may have to do with whatever is in reach."""
        self.executed: list[Executed] = []
        """The code of its runs."""
        self._used: list[Collection[int]] = []
        self._reach: list[Tensor] = []

    def within(self, leaves: Iterable[Tensor]) -> None:
        """Name what is in reach."""
        self._reach += leaves
        if self.everything:
            self.hear_all()

    def see(self, outside: Collection[int], written: Collection[int], executed: Executed) -> None:
        """Follow what a watch notes: the memory that a run finds outside and writes, and its code."""
        self._used += (outside, written)
        self.executed.append(executed)

    def hear(self, leaf: Tensor) -> None:
        """The run is about to read or change this one's `.grad`."""
        if id(leaf) not in self.before and leaf.is_leaf:
            self.before[id(leaf)] = leaf, grad_of(leaf)

    def hear_backward(self) -> None:
        """The run is inside a backward, which may be about to add to a leaf's `.grad`."""
        node = _node()
        if node is not None and hasattr(node, "variable"):
            self.hear(node.variable)

    def hear_all(self) -> None:
        """The run is about to do what cannot be heard."""
        self.everything = True
        for leaf in self._reach:
            self.hear(leaf)

    def join(self, other: Touched) -> None:
        """Take it that a run will have to do with what another one had."""
        for leaf, _ in other.before.values():
            self.hear(leaf)
        self.everything |= other.everything
        self.executed += other.executed

    def uses(self, grad: Tensor) -> bool:
        """Whether the run's device work read or wrote the memory of a gradient that was there before."""
        return self.everything or any(family_key(grad) in memory for memory in self._used)


def hearing_grads(hear: Callable[[Tensor], None]) -> AbstractContextManager[None]:
    """Call `hear` with each tensor whose `.grad` Python code on this thread is about to read or bind."""
    return _shadows.hearing(hear)


class _Heard:
    """Stands in front of `Tensor.grad`; of the class it is torch's own, which torch compares with."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        if tensor is None:
            return self._original
        _shadows.tell(tensor)
        return self._original.__get__(tensor, owner)

    def __set__(self, tensor: Tensor, grad: Any) -> None:
        _shadows.tell(tensor)
        self._original.__set__(tensor, grad)

    def __delete__(self, tensor: Tensor) -> None:
        _shadows.tell(tensor)
        self._original.__delete__(tensor)


_shadows = Shadows(lambda: [shadow(Tensor, "grad", _Heard)])
