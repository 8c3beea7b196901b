"""What is known of the padding of a bucket: trials proved it, or calls showed how results are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from ._cuts import Learner
from ._padding import Fit
from ._tree import Tree
from .errors import PaddingError

__all__ = ["UNTRIED", "Lived", "Padded", "Proof", "listed", "padding_error", "remedy", "trusted", "untried"]

Padded: TypeAlias = tuple[int, int]
"""A dimension of a leaf."""

UNTRIED = "it writes tensors above 256 MiB, of which no trial makes a copy"
_FIX = "mask the padded rows, give `pad=` a value that they ignore, or take this dimension out of `buckets`"
_MANY = 8


class Lived:
    """What the calls of a bucket showed of results at each size, beside their tensors."""

    def __init__(self) -> None:
        self.consts: dict[tuple[int, ...], tuple[object, ...]] = {}
        """Of calls that ran at their exact size."""
        self.left: dict[tuple[int, ...], list[Any]] = {}
        """Places of Python that these changed, each with what was there then."""
        self.full: set[tuple[int, ...]] = set()
        """Sizes that calls were padded to."""


class Proof(NamedTuple):
    """What the runs of one bucket taught."""

    tree: Tree | None
    """Of the result; None when no run has shown it."""
    cuts: tuple[Learner, ...]
    """One per tensor of the result."""
    touched: frozenset[int]
    """Outside memory that the function uses, when it writes any of it."""
    said: str
    """Why something was not compared; empty when all was."""
    lived: Lived | None = None
    """What calls themselves showed, where no trial may run."""
    untold: frozenset[Padded] = frozenset()
    """Where no run told padding from rows, since none was there or all held the same."""
    alike: int = 0
    """How many calls since then told nothing of it."""

    def hides(self, fit: Fit) -> frozenset[Padded]:
        """Where calls of this size are padded, and no run has told padding from rows."""
        return self.untold & fit.padded_dims()

    def is_clear(self, fit: Fit) -> bool:
        """Whether the runs so far tell which part of each result is live in calls of this size."""
        return all(learner.is_clear(fit) for learner in self.cuts)

    def awaits(self, fit: Fit) -> bool:
        """Whether a call of this size must still show, in place of a trial, which part of each result is live."""
        return self.lived is not None and not (fit.full in self.lived.full and self.is_clear(fit))


def untried() -> Proof:
    """That of a bucket in which no trial may run."""
    return Proof(None, (), frozenset(), UNTRIED, Lived())


def trusted(names: Sequence[str]) -> str:
    """What is said once of a function whose padding nothing proves, and how to prove it all the same."""
    return (
        f"writes {listed(names)}, above 256 MiB, of which no trial makes a copy: that padding changes nothing is trusted,"
        " not proved. Prove it once with a smaller one, or compare a padded call with eager; check_padding=False says"
        " that you have"
    )


def listed(names: Sequence[str]) -> str:
    """A few names, and whether there are more."""
    return ", ".join(names[:_MANY]) + (", ..." if names[_MANY:] else "")


def padding_error(name: str, fit: Fit, what: str, why: str, fix: str) -> PaddingError:
    """What padding changes in a call of one size, and the bucket that it was padded to."""
    sizes = [
        f"{bucket.name} {live} in {full}"
        for bucket, live, full in zip(fit.axes.buckets, fit.live, fit.full, strict=True)
    ]
    return PaddingError(f"`{name}`, {', '.join(sizes)}: {what}", why=why, fix=fix)


def remedy(unnamed: Sequence[str]) -> str:
    """What to write; a mask without `pad` among the padded arguments is the commonest cause."""
    if not unnamed:
        return _FIX
    names = [f"`{path}`" for path in unnamed]
    return f"{_FIX}; if it tells what is padding, give it `pad=`: {listed(names)}"
