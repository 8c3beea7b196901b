"""What one run left, and how another one left it otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._nearness import unlike
from ._places import MISSING, is_plain, same
from ._tree import Tree

__all__ = ["ARGUMENT", "GRADIENT", "Backward", "Left", "difference"]

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
