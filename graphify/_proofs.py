"""Proofs that padding changes nothing: a bucket's run beside one at the exact size and one with other padding.

A run that would write memory above 256 MiB, which no trial can put back, ends before it does: then nothing is compared,
and calls themselves teach how results are cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ._exacts import Exacts
from ._graph import Call
from ._left import unlike_values
from ._lessons import Lessons, large_writes
from ._marks import Extra
from ._material import stirred
from ._nearness import unlike
from ._padding import Fit
from ._proof_runs import SIZE, Marked, Run, Runs
from ._trust import Proof, trusted, untried
from ._undo import TooLargeError
from .errors import alone

__all__ = ["prove"]

_ROWS = "each padded row is written where its index says, as a live one is"
_UNSEEN = (
    "has padded rows that write {}, which holds one number everywhere: whether they keep what is there cannot be seen."
    " Prove it with other numbers there, or give `pad=` an index that nothing is written at"
)
_SCRATCH = (
    "give `pad=` an index that nothing is written at, or, for a row that nobody reads,"
    ' write check_padding="outputs"'
)


def prove(
    lessons: Lessons,
    device: torch.device,
    call: Call,
    fit: Fit,
    fills: Sequence[tuple[Any, bool]],
    *,
    check: bool | str,
    static: Collection[str],
    exacts: Exacts[Run],
) -> Proof:
    """Run a call at its exact size and padded in two ways, compare, and learn how results are cut.

    `fills` has the fill of each leaf, and whether the user chose it: then the second padding has it, too. `static` names
    the arguments that are never copied. `exacts` may know what the run at the exact size leaves.

    Raises:
        CaptureError: the function can never be captured.
        PaddingError: what differs, with the smallest difference.
    """
    runs = Runs(lessons, device, call, fit, fills, state=check is True, static=static, exacts=exacts)
    try:
        return _proved(runs, check)
    except TooLargeError as error:
        alone(error)
    runs.check_offences()  # what can never be captured is said also where a run ends early
    if check is True:
        _say_trusted(runs)
    return untried()


def _proved(runs: Runs, check: bool | str) -> Proof:
    exact, padded = runs.exact(), runs.padded()
    why = _uncompared(exact, check)
    _check_form(runs, exact, padded)
    if not why:
        _compare(runs, exact, padded, rounding=True)
        _check_writes(runs, exact, padded)
        if runs.unnamed:
            _compare(runs, padded, runs.padded(other=True), rounding=False)
    outside = exact.watch.outside.keys()
    touched = frozenset(outside) if exact.watch.written & outside else frozenset()
    places = (place for places in runs.fit.axes.places for place in places)
    untold = frozenset() if why else frozenset(places) - runs.told
    return Proof(exact.tree, tuple(runs.cuts), touched, why, untold=untold)


def _uncompared(exact: Run, check: bool | str) -> str:
    if not check:
        return "check_padding=False"
    return "it draws random numbers" if exact.watch.drew else ""


def _say_trusted(runs: Runs) -> None:
    """Say what the latest run was about to write, so that nothing could be compared."""
    assert runs.watch is not None, "a run was made"
    names = large_writes(runs.watch, runs.lessons.survey(runs.call), runs.call)
    runs.lessons.plain.say("untried", trusted(names))


def _check_form(runs: Runs, exact: Run, padded: Run) -> None:
    """Raise where values of the result or of attributes would be a bucket's, also where no numbers are compared."""
    if exact.tree != padded.tree or exact.tokens != padded.tokens:
        raise runs.error("returns other values, not tensors, when padded", SIZE)
    for name in {**exact.left, **padded.left}:
        if name not in exact.left or name not in padded.left:
            raise runs.error(f"{name} is written in one run only", SIZE)
        what = unlike_values(exact.left[name], padded.left[name])
        if what is not None:
            raise runs.error(f"{name} depends on the padding: {what}", SIZE)


def _check_writes(runs: Runs, exact: Run, padded: Run) -> None:
    """Raise where padded rows write memory that live rows leave alone, whatever it holds and they write."""
    if runs.state and not exact.watch.backward:
        _check_marks(runs, exact.marks, padded.marks)
    outside = exact.watch.outside.items()
    stir = [t for key, t in outside if key in exact.watch.written and t.is_floating_point()]
    if not runs.state or not stir or exact.watch.backward:
        return
    live = runs.live(stir).memory
    found = runs.padded(stir).memory
    for name in live.keys() & found.keys():
        start = stirred(live[name])
        theirs = (live[name] == start) & (found[name] != start)
        if theirs.any():
            raise runs.error(f"padded rows write {int(theirs.sum())} elements of {name}", _ROWS, _SCRATCH)


def _check_marks(runs: Runs, exact: Marked, padded: Marked) -> None:
    """What only padded rows write must stay as it is, also where it is another number."""
    extra: dict[object, Extra] = {}
    for key, mark in padded.items():
        live = exact.get(key)
        places = mark.mask if live is None else mark.mask & ~live.mask
        if places.any():
            extra[key] = Extra(mark, places, mark.left if live is None else live.left)
    found = runs.padded(extra=extra).marks if extra else {}
    for key, more in extra.items():
        if more.unseen:
            runs.lessons.plain.say("unseen", _UNSEEN.format(more.name))
        if number := more.changed(found.get(key)):
            raise runs.error(f"padded rows write {number} elements of {more.name}", _ROWS, _SCRATCH)


def _compare(runs: Runs, expected: Run, found: Run, *, rounding: bool) -> None:
    """Raise for the first thing that differs between two runs."""
    _check_form(runs, expected, found)
    paths = [f"`{path}`" for path in expected.tree.tensor_paths]
    mine, theirs = (dict(zip(paths, run.results, strict=True)) for run in (expected, found))
    _compare_all(runs, mine, theirs, rounding)
    _compare_all(runs, _arguments(runs, expected), _arguments(runs, found), rounding)
    _compare_all(runs, expected.state, found.state, rounding)
    _compare_all(runs, expected.grads, found.grads, rounding)


def _arguments(runs: Runs, run: Run) -> dict[str, Tensor]:
    """What a run left in its arguments, by name; one that is not padded is state, such as a cache."""
    shown = runs.fit.dims()
    named = enumerate(zip(runs.call.tree.tensor_paths, run.arguments, strict=True))
    return {f"argument `{path}`": left for leaf, (path, left) in named if runs.state or leaf in shown}


def _compare_all(runs: Runs, expected: dict[str, Tensor], found: dict[str, Tensor], rounding: bool) -> None:
    for name in {**expected, **found}:
        if name not in expected or name not in found:
            raise runs.error(f"{name} is written in one run only", SIZE)
        what = unlike(expected[name], found[name], rounding=rounding)
        if what is not None:
            with_what = "the padding" if rounding else "what the padding holds"
            raise runs.error(f"{name} depends on {with_what}: {what}", SIZE)
