"""What a recorded backward took for granted of Python: hooks and `backward` methods run when it is recorded only."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from ._code import Executed
from ._guards import Guard, Miss
from ._raw import is_a
from ._survey import Survey
from .errors import CaptureError

__all__ = ["UnsettledError", "read_by", "unsettled"]

_MANY = 8


class UnsettledError(CaptureError):
    """Python code in a backward reads another value again and again, and a graph of each does not pay."""


def read_by(
    root: tuple[str, Any], forward: Executed, backward: Executed, written: set[Any], device: torch.device
) -> Guard | None:
    """The test of what user code read while a backward was recorded; None where none ran.

    What the forward executed leads there, too: its guard holds at each replay, and what it has `written` may change.
    """
    if not backward.everything and not any(backward.scopes()):
        return None
    executed = Executed()
    executed.merge(forward)
    executed.merge(backward)
    survey = Survey([root], executed)
    survey.beyond(("a backward", f) for f in _unmet(forward, backward, survey))
    return Guard(survey, outside=(), written=written, device=device)


def unsettled(name: str, recorded: int, miss: Callable[[], Miss | None]) -> UnsettledError | None:
    """Why no more is recorded after as many recordings of one backward, each for another state of Python."""
    if recorded < _MANY:
        return None
    found = miss()
    what = "what Python code in it reads" if found is None else f"`{found.name}`"
    return UnsettledError(
        f"the backward of `{name}` reads Python state that never settles: {what}",
        why="Python runs when a backward is recorded, so that each value is baked into a recording of its own",
        fix="keep it in a tensor, and write that with `fill_`",
    )


def _unmet(forward: Executed, backward: Executed, survey: Survey) -> Iterator[FunctionType]:
    """Functions with closures that ran and that no name leads to, such as the methods of a class made in a function.

    One that the forward made is a new one at each call, of what that call had.
    """
    made = {id(inner) for code, _ in forward.codes.values() for inner in code.co_consts}
    met = {id(f.__code__) for f in survey.seen.values() if is_a(f, FunctionType)}
    codes: list[CodeType] = [code for code, _ in backward.scopes() if code.co_freevars]
    codes = [code for code in codes if id(code) not in made | met]
    holders = gc.get_referrers(*codes) if codes else []
    return (f for f in holders if is_a(f, FunctionType))
