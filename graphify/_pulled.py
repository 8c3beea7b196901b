"""The gradients of leaves that one backward made, in a recording's memory, until they are copied or added."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._ambient import current_backward
from ._layout import is_dense

__all__ = ["Give", "Pulled", "all_strided", "copies_of", "fitted", "summed"]

Grads = Sequence[Tensor | None]
Give = Callable[[tuple[int, ...]], Grads]


class Pulled:
    """The gradients of leaves that one backward made.

    `fitting` has them in the layout that `.grad` has by autograd's rule, where the recording has them; `give` makes
    copies of the caller's own, of those at some places, exactly as eager would give them. `order` makes this thread's
    work wait for the recording's, and the recording's next for this thread's. Where not all are `strided`, as only a
    live backward gives them, they go through the engine.
    """

    def __init__(
        self, fitting: Grads, give: Give, order: Callable[[], None], *, strided: bool = True
    ) -> None:
        self.fitting, self.order, self.strided = fitting, order, strided
        self._give, self._places, self._parts = give, tuple(range(len(fitting))), list[Pulled]()
        self._task = -1
        self._end: Callable[[], Any] = _over

    def hand_out(self, places: tuple[int, ...] | None = None) -> Grads:
        """Copies of the caller's own, of all or of those at these places."""
        return self._give(self._places if places is None else tuple(self._places[i] for i in places))

    def some(self, places: Sequence[int]) -> Pulled:
        """Those at these places."""
        part = Pulled(
            [self.fitting[i] for i in places],
            lambda places: self._give(places),
            self.order,
            strided=self.strided,
        )
        part._places = tuple(places)
        self._parts.append(part)
        return part

    def lend(self, end: Callable[[], None]) -> None:
        """They are needed where they are until this is called, or let go of, at the end of the running backward."""
        self._task, self._end = current_backward(), weakref.ref(end)

    def needed_elsewhere(self) -> bool:
        """Whether another thread's backward still needs them where they are."""
        return self._end() is not None and self._task != current_backward()

    def copies(self) -> Grads:
        """Fresh copies of the fitting ones."""
        found = [grad for grad in self.fitting if grad is not None]
        self.order()
        copied = copies_of(found)
        if len(found) == len(self.fitting):
            return copied
        made = iter(copied)
        return [None if grad is None else next(made) for grad in self.fitting]

    def keep(self) -> None:
        """The recording is about to write there again: what is still needed is needed as a copy."""
        if self._end() is not None:
            self.copy()

    def copy(self) -> None:
        """Be independent of the recording from now on."""
        given = self.hand_out() if self._parts else ()
        self.fitting, self._end = self.copies(), _over
        if self._parts:
            self._give = lambda places: [given[i] for i in places]
        for part in self._parts:
            part.fitting, part._end = [self.fitting[i] for i in part._places], _over

    def leave(self) -> None:
        """Nobody needs them any more."""
        self._end = _over


def _over() -> None:
    """Nothing is to come."""


def copies_of(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Fresh copies with the same strides; a product with one is one kernel for all of them."""
    if not tensors:
        return []
    if any(map(torch.is_complex, tensors)) or not all_strided(tensors):
        return [t.clone() for t in tensors]
    made: Sequence[Tensor] = torch._foreach_mul(tensors, 1)
    return made


def all_strided(grads: Grads) -> bool:
    """Whether none is sparse or of another layout."""
    return all(grad is None or grad.layout is torch.strided for grad in grads)


def fitted(grad: Tensor | None, leaf: Tensor) -> Tensor | None:
    """A gradient in the layout that autograd gives to `.grad` (the layout contract of AccumulateGrad)."""
    if grad is None or grad.layout is not torch.strided or _obeys(grad, leaf):
        return grad
    return torch.empty_like(leaf.detach(), dtype=grad.dtype).copy_(grad)


def _obeys(grad: Tensor, leaf: Tensor) -> bool:
    if not is_dense(leaf):
        return grad.is_contiguous()
    pairs = zip(leaf.shape, grad.stride(), leaf.stride(), strict=True)
    return all(mine == its for size, mine, its in pairs if size != 1)


def summed(found: Sequence[Grads]) -> list[Tensor | None]:
    """The sums over several backwards, in the order in which they were pulled, as the engine adds them."""
    total = [*found[0]]
    for more in found[1:]:
        total = [b if a is None else a if b is None else _sum(a, b) for a, b in zip(total, more, strict=True)]
    return total


def _sum(first: Tensor, second: Tensor) -> Tensor:
    # torch adds a sparse tensor to a dense one, and not the other way round.
    return second + first if first.layout is torch.sparse_coo else first + second
