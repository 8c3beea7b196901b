"""Recordings in a row: a run that repeats the one before at another size needs no watch.

A watch costs more than the run. It finds the memory from outside that a run touches, and what of it the run
writes. A later run reads and writes the same memory if it executes the same instructions, and if all of that was
found at places that a survey walks: what the same code may find there instead, the guard holds as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import TypeVar

from torch import Tensor

from ._found import Found
from ._layout import family_key
from ._paths import Path, open_path
from ._watch import Watch, next_node

__all__ = ["Example", "Repeats", "UnlikeError", "Versions"]

T = TypeVar("T")


class UnlikeError(Exception):
    """A run did not repeat the one before."""


class Versions:
    """What a run writes, as autograd counts: of its arguments and of every tensor that a survey met, in order."""

    def __init__(self, inputs: Sequence[Tensor], survey: Found) -> None:
        self.inputs, self._state = inputs, [t for _, t in survey.tensors()]
        self._nodes = next_node()
        self._before = [None if t.is_inference() else t._version for t in self._tensors()]

    def _tensors(self) -> Iterator[Tensor]:
        return chain(self.inputs, self._state)

    def moved(self) -> list[bool] | None:
        """Which were written since; None where that does not tell all: nobody counts, or autograd kept something."""
        if not self.counts or next_node() != self._nodes:
            return None
        return [t._version != before for t, before in zip(self._tensors(), self._before, strict=True)]

    def written(self, watch: Watch) -> list[bool] | None:
        """Which a run wrote that was watched."""
        return [family_key(t) in watch.written for t in self._tensors()] if self.counts else None

    def of_state(self, moved: list[bool]) -> list[Tensor]:
        """Those of the survey, one for each memory."""
        pairs = zip(self._state, moved[len(self.inputs) :], strict=True)
        return list({family_key(t): t for t, wanted in pairs if wanted}.values())

    @property
    def counts(self) -> bool:
        """Whether somebody counts the writes of all."""
        return None not in self._before

    def over_the_same(self, other: Versions) -> bool:
        """Whether both met the same tensors; arguments are of other sizes."""
        return len(self._state) == len(other._state) and all(map(is_, self._state, other._state))


class Example:
    """A run that was watched: what it touched, and what it moved on which path."""

    def __init__(self, path: Path, watch: Watch, versions: Versions, moved: list[bool]) -> None:
        self._path, self._versions, self._moved, self._executed = path, versions, moved, watch.executed
        arguments = {family_key(t) for t in versions.inputs}
        self._outside = {key: t for key, t in watch.outside.items() if key not in arguments}
        self._written = watch.written & self._outside.keys()
        self.bumped = versions.of_state(moved)

    def is_for(self, versions: Versions) -> bool:
        """Whether a run over these tensors may repeat this one."""
        return versions.over_the_same(self._versions)

    def foretell(self, watch: Watch, versions: Versions) -> None:
        """Tell a watch that will not look on what the run will touch."""
        arguments = [t for t, moved in zip(versions.inputs, self._moved, strict=False) if moved]
        watch.expect(self._outside, self._written | {*map(family_key, arguments)}, self._executed)

    def repeat(self, run: Callable[[], T], versions: Versions) -> T:
        """Run as this one did.

        Raises:
            UnlikeError: it took another path, or wrote something else.
        """
        result = self._path.follow(run)
        if self._path.strayed or versions.moved() != self._moved:
            raise UnlikeError
        return result


class Repeats:
    """The run that recordings of one wrapper may repeat, while it makes many in a row from one call."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._example: Example | None = None

    @contextmanager
    def in_a_row(self) -> Iterator[None]:
        """Let the recordings made inside repeat each other."""
        with open_path() as path:
            self._path = path
            try:
                yield
            finally:
                self._path = self._example = None

    def learn(self, run: Callable[[], T]) -> T:
        """Run what others may repeat once `keep` was called."""
        self._example = None
        return run() if self._path is None else self._path.learn(run)

    def keep(
        self,
        watch: Watch,
        survey: Found,
        versions: Versions,
        moved: list[bool] | None,
        by_reference: Collection[int],
    ) -> None:
        """Take the run that was learned for the example of later ones, unless these could reach what it did not show."""
        if self._path is None or moved is None:
            return
        written = {i for i, _ in enumerate(versions.inputs) if moved[i]}
        unseen = watch.executed.everything or watch.restrided or survey.closed
        if unseen or not written <= {*by_reference}:
            return
        arguments = {family_key(t) for t in versions.inputs}
        if any(map(survey.over, arguments)) or not all(map(survey.over, watch.outside.keys() - arguments)):
            return
        self._example = Example(self._path, watch, versions, moved)

    def example(self, versions: Versions) -> Example | None:
        """What a run over these tensors may repeat."""
        found = self._example
        return found if found is not None and found.is_for(versions) else None
