"""The run of a proof at a call's exact size, which stands for the proofs of many buckets while nothing changes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ._cuts import Learner
from ._graph import Call
from ._lessons import Lessons
from ._survey import Survey
from ._undo import version_of
from ._watch import Watch

__all__ = ["Exacts"]


class Run(Protocol):
    """What a run left."""

    @property
    def watch(self) -> Watch: ...


R = TypeVar("R", bound=Run)


@dataclass(frozen=True)
class _Kept(Generic[R]):
    call: Call
    run: R
    cuts: list[Learner]
    """As this run taught them; those of a proof learn more."""
    base: Survey
    versions: list[int | None]


class Exacts(Generic[R]):
    """The latest run of a call at its exact size: the same call would leave the same while all that it reads is the same."""

    def __init__(self) -> None:
        self._kept: _Kept[R] | None = None

    def keep(self, lessons: Lessons, call: Call, run: R, cuts: list[Learner]) -> None:
        """Keep a run that was undone; not one that drew random numbers, which nobody compares."""
        base = lessons.survey(call).base
        if base is not None and not run.watch.drew:
            self._kept = _Kept(call, run, deepcopy(cuts), base, _versions(call, run.watch))

    def of(self, lessons: Lessons, call: Call) -> tuple[R, list[Learner]] | None:
        """The run of this very call, if it would be the same now, with learners that know of it."""
        kept = self._kept
        if kept is None or kept.call is not call or kept.base is not lessons.survey(call).base:
            return None
        if kept.versions != _versions(call, kept.run.watch):
            return None
        return kept.run, deepcopy(kept.cuts)


def _versions(call: Call, watch: Watch) -> list[int | None]:
    """What every write into memory that the run only read changes; of inference tensors nobody counts writes.

    What the run writes is put back after it, whoever writes there meanwhile; a capture counts its writes all the same.
    """
    read = (t for key, t in watch.outside.items() if key not in watch.written)
    return [version_of(t) for t in (*call.tensors, *read)]
