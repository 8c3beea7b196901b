"""Buckets in which no trial may run, since it would write large memory: real calls teach how results are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ._code import Executed
from ._cuts import Learner, Way, teach
from ._entry import Entry, Refusal
from ._fitted import through_padding
from ._forms import plain_layout
from ._graph import Call
from ._layout import family_key
from ._left import apart, form_of, is_state, unlike_values
from ._life import Life
from ._padding import Fit
from ._places import MISSING, Change, Place
from ._survey import Survey
from ._tree import tree_of
from ._trust import Proof, padding_error
from ._watch import Watch, watching
from .errors import PaddingError

__all__ = ["at_exact_size", "foresees", "padded"]

_SIZE = "no trial could show it, and a size that is used as a number is the bucket's"
_WRITTEN = ("item", "field", "cell", "attr", "class", "variable")
_FIX = "take this dimension out of `buckets`, or return what has the size of the arguments"


def foresees(proof: Proof, fit: Fit, call: Call) -> bool:
    """Whether a padded run of this call will tell, by shapes alone, which part of each result is live."""
    layout = plain_layout(call.tensors)
    known = proof.lived is not None and fit.live in proof.lived.consts
    return known and all(learner.foresees(fit, layout) for learner in proof.cuts)


def at_exact_size(life: Life, bucket: Entry, fit: Fit, call: Call) -> Any:
    """Make a call eagerly, and learn from it what a trial at the exact size would have shown."""
    proof: Proof = bucket.proof
    before = _survey(life, call)
    if proof.tree is None:
        result, touched, is_outside = _watched(life, bucket, call)
    else:
        cuts, touched = proof.cuts, proof.touched
        result, is_outside = life.plain.run("cut", call), lambda i, _: cuts[i].is_outside()
    changes = before.changes(_survey(life, call))
    roots = (result,)
    tree = tree_of(roots, ["output"])
    found = tree.unpack(roots)
    assert found is not None, "a value has the structure that was read off it"
    if proof.tree is None:
        proof = proof._replace(tree=tree, cuts=tuple(Learner() for _ in found[0]), touched=touched)
    elif proof.tree != tree or not _take(proof, found[0]):
        return result
    teach(proof.cuts, fit.live, found[0], call.tensors, is_outside)
    assert proof.lived is not None, "this is for buckets without trials"
    proof.lived.consts[fit.live] = tree.consts(roots)
    proof.lived.left[fit.live] = [(place, _parts(place, after)) for place, _, after in changes]
    bucket.proof = proof
    return result


def _take(proof: Proof, results: Sequence[Tensor]) -> bool:
    return all(learner.takes(result) for learner, result in zip(proof.cuts, results, strict=True))


def _watched(
    life: Life, bucket: Entry, call: Call
) -> tuple[Any, frozenset[int], Callable[[int, Tensor], bool]]:
    """The result of a real call, the outside memory that matters to arguments, and what tells outside memory."""
    device, backend = bucket.device_or_raise(), life.setting.backend
    known = life.lessons.executed if life.lessons.executed.codes else Executed(everything=True)
    reached = {family_key(t) for _, t in Survey(life.setting.roots(call), known).tensors()}
    watch = Watch(device, given=call.tensors)
    with backend.scope(device, aside=False), watching(watch, backend.listen):
        result = life.setting.run(call.values)
    life.plain.count("cut")
    offence = life.lessons.offence(watch, ())
    if offence is not None:  # said before the next call has done anything
        bucket.refusal = Refusal("uncapturable", offence)
    # An argument that is outside memory, too, is seen as an argument only: what has a name tells.
    outside = watch.outside.keys() | (reached & watch.given)
    touched = frozenset(outside) if watch.written & outside else frozenset()
    held = reached | watch.outside.keys()
    return result, touched, lambda _, t: family_key(t) in held


def padded(life: Life, bucket: Entry, fit: Fit, fills: Sequence[Any], call: Call) -> Any:
    """Make a call at the bucket's size, and learn from it what a trial there would have shown.

    Raises:
        PaddingError: its results cannot be told from the padding; later calls are refused.
    """
    proof: Proof = bucket.proof

    def run(tensors: tuple[Tensor, ...], values: tuple[Any, ...]) -> Any:
        return life.advance(bucket, Call(call.tree, values, tensors))

    def find(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Way]:
        ways = _shown(proof, fit, results, tensors, call)
        if ways is None:
            raise _refused(life, bucket, fit, "returns tensors of other sizes when padded")
        return ways

    before = _survey(life, call)
    result = _own_values(life, bucket, fit, through_padding(run, fit, find, fills, call))
    what = _left_otherwise(life, bucket, fit, before.changes(_survey(life, call)))
    if what is not None:
        raise _refused(life, bucket, fit, what)
    return result


def _left_otherwise(life: Life, bucket: Entry, fit: Fit, changes: Sequence[Change]) -> str | None:
    """What a padded call left in Python that was otherwise after one of this size."""
    lived, reads = bucket.proof.lived, life.lessons.executed.reads()
    known = lived.left[fit.live]
    places = {place.id: place for place in (*(place for place, _ in known), *(c.place for c in changes))}
    expected = {place.id: parts for place, parts in known}
    for key, place in places.items():
        now = place.read() if place.kind in _WRITTEN else MISSING
        if place.kind not in _WRITTEN or is_state(Change(place, None, now), reads):
            continue
        mine, theirs = expected.get(key, {}), _parts(place, now)
        for name in {**mine, **theirs}:
            what = unlike_values(mine.get(name, MISSING), theirs.get(name, MISSING))
            if what is not None:
                return f"{name} depends on the padding: {what}"
    return None


def _parts(place: Place, value: Any) -> dict[str, Any]:
    return {name: form_of(part) for name, part in apart([(place.name, value)]).items()}


def _survey(life: Life, call: Call) -> Survey:
    """All places that the function may change, as they are now."""
    known = life.lessons.executed if life.lessons.executed.codes else Executed(everything=True)
    return Survey([*life.setting.roots(call), ("arguments", list(call.values))], known)


def _shown(
    proof: Proof, fit: Fit, results: Sequence[Tensor], tensors: Sequence[Tensor], call: Call
) -> list[Way] | None:
    cuts, layout = proof.cuts, plain_layout(call.tensors)
    if len(results) != len(cuts) or not _take(proof, results):
        return None
    teach(cuts, fit.full, results, tensors, lambda i, _: cuts[i].is_outside())
    ways = [learner.way(fit, layout) for learner in cuts if learner.is_within(fit)]
    known = [way for way in ways if way is not None]
    return known if len(known) == len(cuts) else None


def _own_values(life: Life, bucket: Entry, fit: Fit, result: Any) -> Any:
    """A result whose plain values are those of the exact size; a graph would have the bucket's, and is refused."""
    proof: Proof = bucket.proof
    roots = (result,)
    tree = tree_of(roots, ["output"])
    if proof.tree != tree:
        raise _refused(life, bucket, fit, "returns another structure when padded")
    assert proof.lived is not None, "this is for buckets without trials"
    found, own = tree.unpack(roots), proof.lived.consts[fit.live]
    assert found is not None, "a value has the structure that was read off it"
    tensors, tokens = found
    consts = [
        new if place in tree.opaque else old
        for place, (new, old) in enumerate(zip(tree.consts(roots), own, strict=True))
    ]
    mine = tree.rebuild(tensors, consts)
    again = tree.unpack(mine)
    assert again is not None, "a value that was rebuilt has its structure"
    if again[1] == tokens:
        proof.lived.full.add(fit.full)
        return result
    _refused(life, bucket, fit, "returns other values, not tensors, when padded")
    return mine[0]


def _refused(life: Life, bucket: Entry, fit: Fit, what: str) -> PaddingError:
    """Refuse later calls: this one has been made."""
    error = padding_error(life.setting.name, fit, what, _SIZE, _FIX)
    life.entries.discard(bucket)
    bucket.refusal = Refusal("padding", error)
    return error
