"""Rules by which a number, such as the length of a dimension or a stride, follows the bucketed sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["Follows", "Kept", "Product", "Rule", "Seen", "Sizes", "fitting", "predicted"]

Sizes = tuple[int, ...]
"""The size of each axis in one run."""


class Kept(NamedTuple):
    """A dimension that no bucketed size changes."""

    size: int

    def size_at(self, sizes: Sizes) -> int | None:
        """How long it is at these sizes."""
        return self.size

    def cut(self, result: Tensor, dim: int, live: Sizes, full: Sizes) -> Tensor:
        """The live part of a result along it."""
        return result


class Follows(NamedTuple):
    """A dimension that is one axis, or a few elements more, the live ones first."""

    axis: int
    more: int = 0

    def size_at(self, sizes: Sizes) -> int | None:
        """How long it is at these sizes."""
        return max(0, sizes[self.axis] + self.more)

    def cut(self, result: Tensor, dim: int, live: Sizes, full: Sizes) -> Tensor:
        """The live part of a result along it."""
        return result.narrow(dim, 0, max(0, live[self.axis] + self.more))


class Product(NamedTuple):
    """Several axes in one dimension, the first slowest; a factor below 0 is a fixed count of elements."""

    factors: tuple[int, ...]

    def size_at(self, sizes: Sizes) -> int | None:
        """How long it is at these sizes."""
        return math.prod(sizes[f] if f >= 0 else -f for f in self.factors)

    def cut(self, result: Tensor, dim: int, live: Sizes, full: Sizes) -> Tensor:
        """The live part of a result along it, which lies in pieces: one dimension per factor."""
        cut: Tensor = result.unflatten(dim, [full[f] if f >= 0 else -f for f in self.factors])  # type: ignore[no-untyped-call]
        for place, factor in enumerate(self.factors):
            if factor >= 0:
                cut = cut.narrow(dim + place, 0, live[factor])
        return cut


class Seen:
    """A dimension of sizes that follow no rule: those met so far, the live elements first."""

    def __init__(self) -> None:
        self.known: dict[Sizes, int] = {}

    def size_at(self, sizes: Sizes) -> int | None:
        """How long it is at these sizes; None where no run has shown it."""
        return self.known.get(sizes)

    def cut(self, result: Tensor, dim: int, live: Sizes, full: Sizes) -> Tensor:
        """The live part of a result along it."""
        return result.narrow(dim, 0, self.known[live])


Rule = Kept | Follows | Product | Seen


def predicted(sizes: Sizes, runs: Sequence[tuple[Sizes, int]]) -> int | None:
    """The number at these sizes that all rules that explain the runs agree on; None when they do not."""
    found = {rule.size_at(sizes) for rule in fitting(runs)}
    return found.pop() if len(found) == 1 else None


def fitting(runs: Sequence[tuple[Sizes, int]]) -> list[Rule]:
    """The rules that explain all of these runs, the plainest first.

    A size that was the same in all of them explains a number that was, too: only a run of another size can tell.
    """
    axes, (sizes, size) = range(len(runs[0][0])), runs[0]
    rules: list[Rule] = [Kept(size), *(Follows(axis, size - sizes[axis]) for axis in axes)]
    for count in range(1, len(sizes) + 1):
        for some in itertools.combinations(axes, count):
            rules += _products(some, sizes, size)
    return [rule for rule in rules if all(rule.size_at(s) == n for s, n in runs)]


def _products(axes: tuple[int, ...], sizes: Sizes, size: int) -> Iterator[Rule]:
    elements = math.prod(sizes[axis] for axis in axes)
    if size and elements and size % elements == 0:
        times = size // elements
        factors = axes if times == 1 else (*axes, -times)
        if len(factors) > 1:
            yield from map(Product, itertools.permutations(factors))
