"""What one run left, and how another one left it otherwise."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._constants import token_of
from ._nearness import unlike
from ._places import MISSING, Change, is_plain, same
from ._tree import Tree, tree_of
from .errors import InputError

__all__ = [
    "ARGUMENT",
    "GRADIENT",
    "Backward",
    "Left",
    "apart",
    "difference",
    "form_of",
    "is_state",
    "unlike_values",
]

ARGUMENT = "argument "
GRADIENT = "the gradient of "
_WORDS = ("replayed", "in eager")

Backward = dict[str, Tensor | None]
"""What one backward gave, by what it is the gradient of."""


class Left(NamedTuple):
    """What one run left, copied before anything else could write there."""

    tree: Tree | None
    """Of the result; None where no structure could be read off it."""
    tokens: tuple[Any, ...]
    results: Sequence[Tensor]
    memory: dict[str, Tensor]
    python: dict[str, Any]
    grads: dict[str, Tensor | None]
    backward: list[Backward | None]
    """For each recorded backward."""
    streams: Any
    drawn: list[str]

    def copies(self) -> Iterator[Tensor]:
        """Every tensor that was copied for it."""
        yield from self.results
        yield from self.memory.values()
        passed = (grad for found in self.backward if found is not None for grad in found.values())
        others = (*self.python.values(), *self.grads.values(), *passed)
        yield from (t for t in others if isinstance(t, Tensor))


class _Structure(NamedTuple):
    """What holds the parts of a value."""

    spec: Hashable


def apart(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Named values with their containers taken apart: tensors, plain values and other objects, each by its name as code."""
    found: dict[str, Any] = {}
    for name, value in values:
        try:
            tree = tree_of((value,), [name])
        except InputError:  # compared by identity
            found[f"`{name}`"] = value
            continue
        leaves = tree.unpack((value,))
        assert leaves is not None, "a value has the structure that was read off it"
        found[f"`{name}`"] = _Structure(tree.spec)  # of a single leaf that leaf itself, which has its name
        paths, parts = (*tree.tensor_paths, *tree.const_paths), (*leaves[0], *tree.consts((value,)))
        found |= {f"`{path}`": part for path, part in zip(paths, parts, strict=True)}
    return found


def form_of(part: Any) -> Any:
    """A tensor without memory in place of one; other parts as they are."""
    if not isinstance(part, Tensor):
        return part
    return torch.empty(part.shape, dtype=part.dtype, device="meta")


def is_state(change: Change, reads: Collection[str]) -> bool:
    """Whether the code reads again what it left there; the key of a value in a dict may be any string of it."""
    return change.place.key in reads and (change.place.kind != "item" or isinstance(change.after, Tensor))


def unlike_values(expected: Any, found: Any) -> str | None:
    """How one such part of a padded run is not that of a run at the exact size; of tensors the form alone counts."""
    words = "{} padded, {} at its exact size"
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        alike = expected.shape == found.shape and expected.dtype == found.dtype
        return None if alike else words.format(tuple(found.shape), tuple(expected.shape))
    if isinstance(expected, _Structure) and isinstance(found, _Structure):
        return None if expected == found else "another structure padded than at its exact size"
    mine, theirs = token_of(expected), token_of(found)
    if expected is found or (mine is not None and mine == theirs):
        return None
    if mine is None and type(expected) is type(found):
        return f"another {type(found).__name__} in each run, whose content cannot be compared"
    return words.format(_shown(found), _shown(expected))


def difference(expected: Left, found: Left, *, rounding: bool, state: bool) -> str | None:
    """The first thing that one run left otherwise than another; without `state` of results, arguments and gradients only."""
    what = _unlike_results(expected, found, rounding=rounding)
    if what is None:
        memories = [left.memory for left in (expected, found)]
        if not state:
            memories = [{n: t for n, t in memory.items() if n.startswith(ARGUMENT)} for memory in memories]
        what = _unlike_all(*memories, rounding=rounding)
    if what is None and state:
        what = _unlike_state(expected, found, rounding=rounding)
    return what if what is not None else _unlike_backward(expected, found, rounding=rounding)


def _unlike_state(expected: Left, found: Left, *, rounding: bool) -> str | None:
    return (
        _unlike_all(expected.python, found.python, rounding=rounding)
        or _unlike_all(expected.grads, found.grads, rounding=rounding)
        or _unlike_streams(expected, found)
    )


def _unlike_backward(expected: Left, found: Left, *, rounding: bool) -> str | None:
    for one, other in zip(expected.backward, found.backward, strict=False):
        if one is not None and other is not None:
            what = _unlike_all(one, other, rounding=rounding)
            if what is not None:
                return f"{GRADIENT}{what}"
    return None


def _unlike_results(expected: Left, found: Left, *, rounding: bool) -> str | None:
    if expected.tree is None or found.tree is None or expected.tree != found.tree:
        return "`output` is of another structure in eager"
    for path, left, right in zip(expected.tree.const_paths, expected.tokens, found.tokens, strict=True):
        if left != right:
            return f"`{path}` is {right!r} replayed, {left!r} in eager"
    for path, one, other in zip(expected.tree.tensor_paths, expected.results, found.results, strict=True):
        what = unlike(one, other, rounding=rounding, words=_WORDS)
        if what is not None:
            return f"`{path}`: {what}"
    return None


def _unlike_all(expected: Mapping[str, Any], found: Mapping[str, Any], *, rounding: bool) -> str | None:
    for name in {**expected, **found}:
        left, right = expected.get(name, MISSING), found.get(name, MISSING)
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            what = unlike(left, right, rounding=rounding, words=_WORDS)
        elif is_plain(left) and is_plain(right) and same(right, left):
            what = None
        elif left is MISSING or right is MISSING or is_plain(left) or is_plain(right):
            what = f"left as {_shown(right)} by the replay, as {_shown(left)} by eager"
        else:
            what = None
        if what is not None:
            return f"{name}: {what}"
    return None


def _shown(value: Any) -> str:
    if value is MISSING:
        return "it was"
    return repr(value) if is_plain(value) else f"a {type(value).__name__}"


def _unlike_streams(expected: Left, found: Left) -> str | None:
    for name in expected.drawn:
        if name not in found.drawn:
            return f"the stream of {name} moves in eager only"
    for (generator, left), (_, right) in zip(expected.streams, found.streams, strict=True):
        if not torch.equal(left, right):
            return f"the random stream of {generator.device} is at another place than in eager"
    return None
