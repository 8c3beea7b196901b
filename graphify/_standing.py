"""Surveys that stand for later ones: while nothing has changed, nothing is walked again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from ._code import Executed, is_library, names_of
from ._guards import Guard
from ._layout import family_key
from ._raw import is_a
from ._survey import Survey

__all__ = ["Surveys"]

_FLAGS = attrgetter("layout", "shape", "dtype", "requires_grad", "is_leaf")

Roots = Sequence[tuple[str, Any]]


class Surveys:
    """Makes the surveys of one wrapper; while it captures many graphs in a row, one that still holds stands for others."""

    def __init__(self) -> None:
        self._keeping = False
        self._latest: _Standing | None = None
        self._guarded: _Guarded | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the latest survey inside, and with it all that it met."""
        before, self._keeping = self._keeping, True
        try:
            yield
        finally:
            self._keeping = before
            if not before:
                self._latest = self._guarded = None

    def ran(self) -> None:
        """Code of the user's has run, or may have: what holds is to be seen anew."""
        if self._latest is not None:
            self._latest.fresh = False

    def of(self, roots: Roots, executed: Executed) -> Survey:
        """What code that ran can reach from these roots now."""
        if not self._keeping:
            return Survey(roots, executed)
        if self._latest is None or not self._latest.covers(roots, executed):
            self._latest = _Standing(roots, executed)
        return self._latest.survey.fork(self._latest.still_holds)

    def after(self, roots: Roots, executed: Executed) -> Survey:
        """The same after a run; what that changed will be put back, so the latest survey is kept for then."""
        if self._latest is not None and self._latest.covers(roots, executed):
            return self._latest.survey.fork(self._latest.still_holds)
        return Survey(roots, executed)

    def guard(
        self,
        survey: Survey,
        *,
        outside: Sequence[Tensor],
        written: set[tuple[int, Any]],
        device: torch.device,
    ) -> Guard:
        """What a recording takes for granted; one guard for all recordings in a row that take the same.

        Not where an optimizer's number may be lifted out of one of them.
        """
        if not self._keeping or survey.optimizers:
            return Guard(survey, outside=outside, written=written, device=device)
        if not written:  # what the survey met is guarded anyway
            outside = [t for t in outside if not survey.holds(t)]
        wanted = _Guarded(survey, outside, written, device)
        if self._guarded is None or not self._guarded.is_for(wanted):
            wanted.guard = Guard(survey, outside=outside, written=written, device=device)
            self._guarded = wanted
        guard = self._guarded.guard
        assert guard is not None, "what is kept has its guard"
        return guard


class _Standing:
    """One survey, and a test of whether another one would meet the same: a fraction of the walk."""

    def __init__(self, roots: Roots, executed: Executed) -> None:
        self.survey = survey = Survey(roots, executed)
        self._roots, self.fresh = list(roots), True
        self._codes, self._everything = frozenset(executed.codes), executed.everything
        held = [
            *(c for c, _, _ in survey.sizes),
            *survey.registries,
            *(hooks for hooks, _, _ in survey.hooks),
        ]
        containers = list({id(c): c for c in held}.values())
        dicts: list[dict[Any, Any]] = [c for c in containers if isinstance(c, dict)]
        self._dicts, self._empty = [d for d in dicts if d], [d for d in dicts if not d]
        self._counts = [*map(len, self._dicts)]
        self._keys, self._values = [*self._all_keys()], [*self._all_values()]
        self._rows = [(c, [*c]) for c in containers if not isinstance(c, dict)]
        self._ordered = [(d, [*OrderedDict.keys(d)]) for d in self._dicts if isinstance(d, OrderedDict)]
        whole = {id(c) for c in containers}
        places = (held for held in survey.places.values() if id(held[0].container) not in whole)
        self._loose = [(p, value) for p, value in places if not is_a(p.container, tuple)]
        self._strided = [t for t, _, facts in survey.tensor_facts if facts.form is not None]
        self._others = [(t, facts) for t, _, facts in survey.tensor_facts if facts.form is None]
        self._flags, self._forms = [*map(_FLAGS, self._strided)], [*self._all_forms()]

    def covers(self, roots: Roots, executed: Executed) -> bool:
        """Whether a survey of these roots, by what ran, would meet the same."""
        return (
            len(roots) == len(self._roots)
            and all(
                name == n and value is v for (name, value), (n, v) in zip(roots, self._roots, strict=True)
            )
            and self._everything == executed.everything
            and self._knows(executed)
            and self.still_holds()
        )

    def still_holds(self) -> bool:
        """The same as `holds`, asked once for each run."""
        self.fresh = self.fresh or self.holds()
        return self.fresh

    def _knows(self, executed: Executed) -> bool:
        """Whether this code leads nowhere else than the code that the survey went by."""
        if not self._codes <= executed.codes.keys():
            return False
        names, new = (
            self.survey.names,
            (executed.codes[key][0] for key in executed.codes.keys() - self._codes),
        )
        return all(
            is_library(code.co_filename) and (names is None or names_of(code).all <= names) for code in new
        )

    def holds(self) -> bool:
        """Whether every container and place still holds the very same objects, and these are as they were."""
        return (
            not any(self._empty)
            and [*map(len, self._dicts)] == self._counts
            and all(map(is_, self._all_keys(), self._keys))
            and all(map(is_, self._all_values(), self._values))
            and all(all(map(is_, OrderedDict.keys(d), keys)) for d, keys in self._ordered)
            and all(len(row) == len(held) and all(map(is_, row, held)) for row, held in self._rows)
            and all(place.read() is value for place, value in self._loose)
            and [*map(_FLAGS, self._strided)] == self._flags
            and [*self._all_forms()] == self._forms
            and all(facts.nothing_to_restore(tensor) for tensor, facts in self._others)
            and all(bulk.read() == bulk.content for bulk in self.survey.bulk)
            and not any(stream.drawn() for stream in self.survey.streams)
        )

    def _all_keys(self) -> Iterable[Any]:
        return chain.from_iterable(map(dict.keys, self._dicts))

    def _all_values(self) -> Iterable[Any]:
        return chain.from_iterable(map(dict.values, self._dicts))

    def _all_forms(self) -> Iterable[Any]:
        """The same as `TensorFacts`, of all tensors at a fraction of the cost."""
        return chain.from_iterable(
            map(read, self._strided) for read in (family_key, Tensor.storage_offset, Tensor.stride)
        )


class _Guarded:
    """What a guard is made from, held so that nothing else comes to lie there."""

    def __init__(
        self, survey: Survey, outside: Sequence[Tensor], written: set[tuple[int, Any]], device: torch.device
    ) -> None:
        self.guard: Guard | None = None
        self.base, self.added = survey.base, survey.added()
        self.outside, self.written = list(outside), set(written)
        self.mode = (device, torch.is_grad_enabled())

    def is_for(self, other: _Guarded) -> bool:
        """Whether the guard of one is that of the other."""
        return (
            self.base is not None
            and self.base is other.base
            and self.mode == other.mode
            and self.written == other.written
            and _same(self.outside, other.outside)
            and [p.id for p, _ in self.added] == [p.id for p, _ in other.added]
            and _same([v for _, v in self.added], [v for _, v in other.added])
        )


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))
