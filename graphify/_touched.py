"""Whose `.grad` a run on this thread uses or changes; other threads may change others meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

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


class Touched:
    """Whose `.grad` a run has to do with: heard where Python names it, told by memory where a backward adds up.

    Work that no dispatcher sees, as of compiled code, may have to do with `everything`.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self.leaves: dict[int, Tensor] = {}
        self.everything = everything
        self.executed: list[Executed] = []
        """The code of its runs."""
        self._used: list[Collection[int]] = []
        self._made: list[Collection[int]] = []

    def hear(self, leaf: Tensor) -> None:
        """The run is about to read or bind this one's `.grad`."""
        self.leaves[id(leaf)] = leaf

    def see(
        self,
        outside: Collection[int],
        written: Collection[int],
        born: Collection[int],
        given: Collection[int],
        executed: Executed,
    ) -> None:
        """Follow what a watch notes: the memory that a run finds outside, writes, makes, and is given, and its code."""
        self.executed.append(executed)
        self._used += (outside, written)
        self._made += (outside, born, given)

    def join(self, other: Touched) -> None:
        """Take over what another run had to do with."""
        self.leaves.update(other.leaves)
        self.everything |= other.everything
        self.executed += other.executed

    def uses(self, grad: Tensor) -> bool:
        """Whether the run's device work read or wrote the memory of a gradient that was there before."""
        return self.everything or any(family_key(grad) in memory for memory in self._used)

    def has_to_do_with(self, leaf: Tensor, before: Tensor | None) -> bool:
        """Whether the run read or changed the `.grad` of this leaf, which was this one before."""
        if self.everything or id(leaf) in self.leaves or (before is not None and self.uses(before)):
            return True
        after = grad_of(leaf) if leaf.is_leaf else None
        if after is None or after is before:
            return False
        key = family_key(after)
        return any(key in memory for memory in self._made)


class _Ears(threading.local):
    """The listeners of this thread, innermost last."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Tensor], None]] = []


_ears = _Ears()


@contextmanager
def hearing_grads(hear: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `hear` with each tensor whose `.grad` Python code on this thread is about to read or bind."""
    _ears.listeners.append(hear)
    try:
        with _shadows.cast():
            yield
    finally:
        _ears.listeners.pop()


class _Heard:
    """Stands in front of `Tensor.grad`; of the class it is torch's own, which torch compares with."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        if tensor is None:
            return self._original
        self._tell(tensor)
        return self._original.__get__(tensor, owner)

    def __set__(self, tensor: Tensor, grad: Any) -> None:
        self._tell(tensor)
        self._original.__set__(tensor, grad)

    def __delete__(self, tensor: Tensor) -> None:
        self._tell(tensor)
        self._original.__delete__(tensor)

    def _tell(self, tensor: Tensor) -> None:
        for hear in _ears.listeners:
            hear(tensor)


_shadows = Shadows(lambda: [shadow(Tensor, "grad", _Heard)])
