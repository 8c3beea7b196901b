"""Forms: how a result lies in memory at each size, learned from runs like its shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from ._layout import family_key, first_byte, flipped, is_dense, span, view_of
from ._rules import Sizes, predicted

__all__ = ["Base", "Form", "Forms", "like_of", "observed", "placed", "plain_layout"]


class Base(NamedTuple):
    """What a result lies in: "argument" itself, a "view" of one, "outside" memory, or memory of its "own".

    `leaf` is that of the argument, or of the first result on the same memory of their own.
    """

    kind: str
    leaf: int = -1


class Form(NamedTuple):
    """Where the elements of a result lie; `offset` counts bytes behind the first of its base."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    bits: tuple[bool, bool] = (False, False)
    """Conjugated, negated."""
    inference: bool = False

    @classmethod
    def of(cls, result: Tensor, low: int) -> Form:
        """How a result lies, counted from this byte of its storage."""
        bits = (result.is_conj(), result.is_neg())
        shape, offset = tuple(result.shape), first_byte(result) - low
        return cls(shape, result.stride(), offset, bits, result.is_inference())


class Forms:
    """The forms of one result in runs whose arguments have one layout."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self._runs: dict[Sizes, Form] = {}
        self._only_seen = False

    def note(self, sizes: Sizes, base: Base, form: Form) -> None:
        """Learn from a run."""
        self._only_seen |= base != self.base
        self._runs.setdefault(sizes, form)

    def limit(self) -> None:
        """Predict nothing: what lies in an argument with gaps follows that one's strides."""
        self._only_seen = True

    def has_run(self, sizes: Sizes) -> bool:
        """Whether a run has shown the form at these sizes."""
        return sizes in self._runs

    def merge(self, other: Forms) -> None:
        """Learn what another one did."""
        for sizes, form in other._runs.items():
            self.note(sizes, other.base, form)

    def at(self, sizes: Sizes, shape: tuple[int, ...]) -> Form | None:
        """The form of a result of this shape at these sizes; None when a run must show it first."""
        if sizes in self._runs:
            return self._runs[sizes]
        if self._only_seen:
            return None
        strides = self._strides(sizes, shape)
        offset = predicted(sizes, [(s, form.offset) for s, form in self._runs.items()])
        if strides is None or offset is None:
            return None
        return next(iter(self._runs.values()))._replace(shape=shape, strides=strides, offset=offset)

    def _strides(self, sizes: Sizes, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        forms = list(self._runs.values())
        order = _order(max(forms, key=_elements))
        if all(form.strides == _dense(order, form.shape) for form in forms):
            # Where a size is 1, torch chooses among orders that hold the same elements.
            certain = order == tuple(range(len(shape))) or _ones(shape) in {_ones(f.shape) for f in forms}
            return _dense(order, shape) if certain else None
        found = [
            predicted(sizes, [(s, form.strides[dim]) for s, form in self._runs.items()])
            for dim in range(len(shape))
        ]
        known = tuple(stride for stride in found if stride is not None)
        return known if len(known) == len(found) else None


def _elements(form: Form) -> int:
    return math.prod(form.shape)


def _ones(shape: Sequence[int]) -> tuple[bool, ...]:
    return tuple(size == 1 for size in shape)


def _order(form: Form) -> tuple[int, ...]:
    """The dimensions, the slowest first."""
    dims = range(len(form.shape))
    if form.strides == _dense(dims, form.shape):
        return tuple(dims)
    return tuple(sorted(dims, key=lambda dim: -form.strides[dim]))


def _dense(order: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * max(1, shape[dim])
    return tuple(strides)


# ---------------------------------------------------------------- one run


def plain_layout(tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """What the layout of results may follow: equal for calls of all sizes that are laid out alike."""
    return tuple((_layout(t), t.is_conj(), t.is_neg()) for t in tensors)


def _layout(tensor: Tensor) -> Hashable:
    strides, dims = tensor.stride(), range(tensor.dim())
    if strides == _dense(dims, tensor.shape):
        return "rows"
    if is_dense(tensor) and 1 not in tensor.shape:
        return tuple(sorted(dims, key=lambda dim: -strides[dim]))
    return ("strides", strides)


def observed(
    results: Sequence[Tensor], tensors: Sequence[Tensor], is_outside: Callable[[int, Tensor], bool]
) -> list[tuple[Base, Form]]:
    """What the results of one run lie in, and how."""
    mine = {family_key(t): i for i, t in reversed(list(enumerate(tensors)))}
    same = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    first: dict[int, int] = {}
    found = []
    for index, result in enumerate(results):
        key, low = family_key(result), 0
        if id(result) in same:
            base = Base("argument", same[id(result)])
        elif key in mine:
            base = Base("view", mine[key])
            low = first_byte(tensors[mine[key]])
        elif is_outside(index, result):
            base = Base("outside")
        else:
            base = Base("own", first.setdefault(key, index))
            low, _ = span(r for r in results if family_key(r) == key)
        found.append((base, Form.of(result, low)))
    return found


def like_of(result: Tensor, form: Form) -> Tensor:
    """A tensor of a result's dtype with the bits of a form."""
    conj, neg = form.bits
    return flipped(result.detach(), conj=conj != result.is_conj(), neg=neg != result.is_neg())


def placed(base: Tensor, like: Tensor, byte: int, form: Form) -> Tensor:
    """The view of a base's memory that has this form, from a byte on."""
    return view_of(base, like, byte, form.shape, form.strides)
