"""Cuts: which part of a result of a bucket is the live one, learned from runs of several sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["Cut", "Learner", "Observed"]

Sizes = tuple[int, ...]
"""The size of each axis in one run."""


class Observed(NamedTuple):
    """The shape that a result had in a run at these sizes."""

    sizes: Sizes
    shape: tuple[int, ...]


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


class Cut(NamedTuple):
    """One way to cut a result: a rule per dimension."""

    rules: tuple[Rule, ...]
    keeps_strides: bool = True
    """Whether results of a bucket have eager's strides, so that a view of them does, too."""

    def shape_at(self, sizes: Sizes) -> tuple[int, ...] | None:
        """The shape of the result in a run at these sizes; None when no run has shown it."""
        found = [rule.size_at(sizes) for rule in self.rules]
        return None if None in found else tuple(size for size in found if size is not None)

    def part(self, result: Tensor, live: Sizes, full: Sizes) -> Tensor:
        """The live part of a result of a bucket as a view, which may have more dimensions."""
        for dim, rule in reversed(list(enumerate(self.rules))):
            result = rule.cut(result, dim, live, full)
        return result

    def __call__(self, result: Tensor, live: Sizes, full: Sizes) -> Tensor:
        """The live part of a result of a bucket, in its own shape."""
        part, shape = self.part(result, live, full), self.shape_at(live)
        assert shape is not None, "only a cut that is known is made"
        return part if part.shape == shape else part.reshape(shape)


class Learner:
    """What runs of several sizes taught about the shape of one result.

    Sizes at which all cuts that explain every run agree are known without a run; others must be run once.
    """

    def __init__(self) -> None:
        self.keeps_strides = True
        self._runs: dict[Sizes, tuple[int, ...]] = {}
        self._chosen: list[Cut] | None = None
        self._seen: list[Seen] = []

    def note(self, sizes: Sizes, shape: Sequence[int]) -> None:
        """Learn from a run."""
        if self._runs.setdefault(sizes, tuple(shape)) != tuple(shape):
            raise AssertionError("one size has one shape")
        self._seen = self._seen or [Seen() for _ in shape]
        for seen, size in zip(self._seen, shape, strict=True):
            seen.known[sizes] = size
        if self._chosen is not None:
            self._chosen = [cut for cut in self._chosen if self._explains(cut)] or list(self._every())

    def agrees(self, other: Learner) -> bool:
        """Whether no run of the other contradicts a run of this one."""
        ranks = {len(shape) for learner in (self, other) for shape in learner._runs.values()}
        return len(ranks) == 1 and all(self._runs.get(s, n) == n for s, n in other._runs.items())

    def merge(self, other: Learner) -> None:
        """Learn what another one did."""
        for sizes, shape in other._runs.items():
            self.note(sizes, shape)
        self.choose(self.candidates(), keeps_strides=other.keeps_strides)

    def candidates(self) -> list[Cut]:
        """The cuts that explain every run, the plainest first."""
        if self._chosen is None:
            self._chosen = list(self._every())
        return self._chosen

    def choose(self, cuts: list[Cut], *, keeps_strides: bool) -> None:
        """Keep only these of the candidates: values told them from the others."""
        self.keeps_strides = self.keeps_strides and keeps_strides
        self._chosen = [cut._replace(keeps_strides=self.keeps_strides) for cut in cuts]

    def cut_for(self, live: Sizes) -> Cut | None:
        """How to cut results to these sizes; None when a run must show it first."""
        if live in self._runs:
            fitting = [c for c in self.candidates() if c.shape_at(live) == self._runs[live]]
            return fitting[0] if fitting else None
        shapes = {cut.shape_at(live) for cut in self.candidates()}
        return self.candidates()[0] if len(shapes) == 1 and None not in shapes else None

    def _explains(self, cut: Cut) -> bool:
        return all(cut.shape_at(sizes) == shape for sizes, shape in self._runs.items())

    def _every(self) -> Iterator[Cut]:
        """Every cut that explains every run; where no rule does, the sizes seen."""
        for rules in itertools.product(*map(self._rules, range(len(self._seen)))):
            yield Cut(rules, self.keeps_strides)

    def _rules(self, dim: int) -> list[Rule]:
        runs = [(sizes, shape[dim]) for sizes, shape in self._runs.items()]
        return _fitting(runs) or [self._seen[dim]]


def _fitting(runs: Sequence[tuple[Sizes, int]]) -> list[Rule]:
    """The rules for one dimension that explain all of these runs."""
    if len({size for _, size in runs}) == 1:
        return [Kept(runs[0][1])]
    axes, (sizes, size) = range(len(runs[0][0])), runs[0]
    rules: list[Rule] = [Follows(axis, size - sizes[axis]) for axis in axes]
    for count in range(1, len(sizes) + 1):
        for some in itertools.combinations(axes, count):
            rules += _products(some, sizes, size)
    return [rule for rule in rules if all(rule.size_at(s) == n for s, n in runs)]


def _products(axes: tuple[int, ...], sizes: Sizes, size: int) -> Iterator[Rule]:
    elements = math.prod(sizes[axis] for axis in axes)
    if elements and size % elements == 0:
        times = size // elements
        factors = axes if times == 1 else (*axes, -times)
        if len(factors) > 1:
            yield from map(Product, itertools.permutations(factors))
