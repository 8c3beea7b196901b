"""What makes two calls the same call: structure, constants, tensors, shared memory and torch's switches."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._ambient import (
    Ambient as Ambient,
    ambient as ambient,
    ambient_reader as ambient_reader,
    function_modes,
    inactive as inactive,
    same_ambient as same_ambient,
)
from ._constants import shown
from ._specs import (
    TensorSpec as TensorSpec,
    matcher_of as matcher_of,
    refusal as refusal,
    specs_of as specs_of,
    without_modes,
)
from ._tree import Tree

__all__ = [
    "Ambient",
    "Shared",
    "Signature",
    "TensorSpec",
    "ambient",
    "ambient_reader",
    "explain",
    "inactive",
    "likeness",
    "matcher_of",
    "overlap",
    "refusal",
    "same_ambient",
    "specs_of",
]


class Shared(NamedTuple):
    """One tensor of a group that shares memory."""

    place: int
    offset: int  # in bytes, from the first byte of the group
    first: int  # the lowest place that holds this very tensor object


Overlap = tuple[tuple[Shared, ...], ...]


class Signature(NamedTuple):
    """Everything that a graph depends on and that belongs to the call; there is one graph per signature."""

    tree: Tree
    ambient: Ambient
    tokens: tuple[Hashable, ...]
    tensors: tuple[TensorSpec, ...]
    overlap: Overlap | None


# ---------------------------------------------------------------- shared memory


def overlap(tensors: Sequence[Tensor]) -> Overlap | None:
    """Which tensors share memory, and how they lie in it; None when no two do.

        overlap((base[:3], base[1:])) == ((Shared(0, 0, 0), Shared(1, 4, 1)),)     # float32

    Views of one storage whose ranges of bytes meet count, even when their elements interleave.
    """
    if len(tensors) <= 1:
        return None
    return _overlap_below_modes(tensors) if function_modes() else _overlap(tensors)


def _overlap(tensors: Sequence[Tensor]) -> Overlap | None:
    try:
        if len({t.untyped_storage()._cdata for t in tensors}) == len(tensors):
            return None
    except RuntimeError:  # something that `refusal` will name has no storage
        return _groups([(place, t) for place, t in enumerate(tensors) if refusal(t) is None])
    return _groups(list(enumerate(tensors)))


_overlap_below_modes = without_modes(_overlap)


def _groups(placed: list[tuple[int, Tensor]]) -> Overlap | None:
    by_storage: dict[int, list[tuple[int, int, int]]] = {}
    firsts: dict[int, int] = {}
    for place, tensor in placed:
        firsts.setdefault(id(tensor), place)
        if tensor.numel():
            extents = by_storage.setdefault(tensor.untyped_storage()._cdata, [])
            extents.append((*_extent(tensor), place))
    first_of = {place: firsts[id(tensor)] for place, tensor in placed}
    groups = [
        tuple(sorted(Shared(place, start - run[0][0], first_of[place]) for start, place in run))
        for extents in by_storage.values()
        for run in _runs(extents)
    ]
    return tuple(sorted(groups)) or None


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The half-open range of bytes of its storage that a tensor with elements reaches."""
    size, first = tensor.element_size(), tensor.storage_offset()
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(first * size), int((first + reach + 1) * size)


def _runs(extents: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Groups of two or more ranges that meet, as (start, place), lowest start first."""
    run: list[tuple[int, int]] = []
    end = -1
    for start, stop, place in sorted(extents):
        if start >= end:
            if len(run) > 1:
                yield run
            run, end = [], stop
        run.append((start, place))
        end = max(end, stop)
    if len(run) > 1:
        yield run


# ---------------------------------------------------------------- explaining


def explain(new: Signature, old: Signature) -> str:
    """The first thing by which two signatures differ, by name: "`x`: shape (8, 4) instead of (16, 4)"."""
    for difference in (_structure, _constants, _tensors, _memory, _switches):
        found = difference(new, old)
        if found is not None:
            return found
    return "nothing differs"


def likeness(new: Signature, old: Signature) -> tuple[int, ...]:
    """How near two signatures are: the larger, the fewer fields differ."""
    alike = new.tree == old.tree
    tensors = sum(
        a == b
        for here, there in zip(new.tensors, old.tensors, strict=False)
        for a, b in zip(here, there, strict=True)
    )
    tokens = sum(a == b for a, b in zip(new.tokens, old.tokens, strict=False))
    return alike, new.ambient == old.ambient, tokens, tensors


def _structure(new: Signature, old: Signature) -> str | None:
    if new.tree == old.tree:
        return None
    for kind, here, there in (
        ("tensor", new.tree.tensor_paths, old.tree.tensor_paths),
        ("constant", new.tree.const_paths, old.tree.const_paths),
    ):
        added = next((path for path in here if path not in there), None)
        if added is not None:
            return f"`{added}`: a {kind} that was not there before"
    gone = [path for path in old.tree.tensor_paths + old.tree.const_paths if path not in _paths(new.tree)]
    if gone:
        return f"`{gone[0]}`: no longer there"
    types = zip(new.tree.const_paths, new.tree.const_types, old.tree.const_types, strict=True)
    changed = next(((path, a, b) for path, a, b in types if a is not b), None)
    if changed is not None:
        return f"`{changed[0]}`: type {changed[1].__name__} instead of {changed[2].__name__}"
    return "other containers, or their keys in another order"


def _paths(tree: Tree) -> set[str]:
    return {*tree.tensor_paths, *tree.const_paths}


def _constants(new: Signature, old: Signature) -> str | None:
    for index, (path, here, there) in enumerate(
        zip(new.tree.const_paths, new.tokens, old.tokens, strict=True)
    ):
        if here != there:
            cls = new.tree.const_types[index]
            if index in new.tree.opaque:
                return f"`{path}`: another {cls.__name__} object"
            return f"`{path}`: {shown(here, cls)} instead of {shown(there, cls)}"
    return None


def _tensors(new: Signature, old: Signature) -> str | None:
    for path, here, there in zip(new.tree.tensor_paths, new.tensors, old.tensors, strict=True):
        for name, a, b in zip(TensorSpec._fields, here, there, strict=True):
            if a != b:
                return f"`{path}`: {name} {_plain(a)} instead of {_plain(b)}"
    return None


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value


def _memory(new: Signature, old: Signature) -> str | None:
    if new.overlap == old.overlap:
        return None
    both = [
        {shared.place for group in signature.overlap or () for shared in group} for signature in (new, old)
    ]
    places = sorted(both[0] | both[1])
    names = ", ".join(f"`{new.tree.tensor_paths[place]}`" for place in places)
    return f"{names}: these share memory in another way than before"


def _switches(new: Signature, old: Signature) -> str | None:
    for name, here, there in zip(Ambient._fields, new.ambient, old.ambient, strict=True):
        if here != there:
            return f"{name.replace('_', ' ')}: {here} instead of {there}"
    return None
