"""Recordings in a row: a run that repeats the one before at another size needs no watch.

A watch costs more than the run. It finds the memory from outside that a run touches, and what of it the run
writes. A later run reads and writes the same memory if it executes the same instructions, and if all of that was
found at places that a survey walks: what the same code may find there instead, the guard holds as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    """What a run writes, as autograd counts: the arguments and every tensor that a survey met, in order."""

    def __init__(self, inputs: Sequence[Tensor], survey: Found) -> None:
        self.tensors = [*inputs, *(t for _, t in survey.tensors())]
        self._inputs, self._nodes = len(inputs), next_node()
        self._before = [None if t.is_inference() else t._version for t in self.tensors]

    def moved(self) -> list[bool] | None:
        """Which were written since; None where that does not tell all: nobody counts, or autograd kept something."""
        if None in self._before or next_node() != self._nodes:
            return None
        return [t._version != before for t, before in zip(self.tensors, self._before, strict=True)]

    def inputs(self) -> Sequence[Tensor]:
        """The arguments among the tensors."""
        return self.tensors[: self._inputs]

    def over_the_same(self, other: Versions) -> bool:
        """Whether both met the same tensors; arguments are of other sizes."""
        mine, theirs = self.tensors[self._inputs :], other.tensors[other._inputs :]
        return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))


class Example:
    """A run that was watched: what it touched, and what it moved on which path."""

    def __init__(self, path: Path, watch: Watch, versions: Versions, moved: list[bool]) -> None:
        self._path, self._watch, self._versions, self._moved = path, watch, versions, moved
        self._written = [i for i, t in enumerate(versions.inputs()) if family_key(t) in watch.written]
        self.bumped = watch.bumped()

    def is_for(self, versions: Versions) -> bool:
        """Whether a run over these tensors may repeat this one."""
        return versions.over_the_same(self._versions)

    def foretell(self, watch: Watch, versions: Versions) -> None:
        """Tell a watch that will not look on what the run will touch."""
        inputs = versions.inputs()
        watch.expect(self._watch, [inputs[i] for i in self._written])

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

    def keep(self, watch: Watch, versions: Versions) -> None:
        """Take the run that was learned, with all that its watch found, for the example of later ones."""
        moved = versions.moved()
        if self._path is not None and moved is not None and not watch.executed.everything:
            self._example = Example(self._path, watch, versions, moved)

    def example(self, versions: Versions) -> Example | None:
        """What a run over these tensors may repeat."""
        found = self._example
        return found if found is not None and found.is_for(versions) else None
