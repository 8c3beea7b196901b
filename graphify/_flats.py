"""Static inputs that buckets share: one flat buffer per argument, and what stands behind its live part."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._layout import family_key

__all__ = ["Flats", "Tail"]

_ALL = 1 << 62


class Flats:
    """The flat buffers of one wrapper; a bucket's static input is a dense view of a prefix of one.

    Only recordings that keep nothing between replays, and never replay at the same time, may share them.
    """

    def __init__(self) -> None:
        self._flats: dict[Hashable, Tensor] = {}
        self._marks: dict[int, _Marks] = {}

    def take(self, place: Hashable, like: Tensor, capacity: int) -> Tensor:
        """Memory for a dense tensor of this form; `capacity` counts the elements of the largest that will come."""
        key = (place, like.dtype, like.device, like.is_inference())
        flat = self._flats.get(key)
        if flat is None or flat.numel() < like.numel():
            flat = torch.empty(max(capacity, like.numel()), dtype=like.dtype, device=like.device)
            self._flats[key] = flat
        if family_key(flat) in self._marks:  # whoever takes it writes it
            self._marks[family_key(flat)].layout = None
        return flat.as_strided(like.shape, like.stride())

    def tail(self, static: Tensor, dims: Sequence[int], fill: Any) -> Tail:
        """What stands behind the live part of a static input, on this memory."""
        marks = self._marks.setdefault(family_key(static), _Marks(static.untyped_storage()))
        return Tail(static, dims, fill, marks)

    def clear(self) -> None:
        """Let go of the buffers; graphs keep theirs."""
        self._flats.clear()
        self._marks.clear()


class _Marks:
    """Which rows of a buffer were written since they were filled: all below `low` and from `high` to `reach`.

    Rows are counted in the layout that wrote last; to another one everything is dirty.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage  # held, so that its address stays its own
        self.layout: Hashable = None
        self.box: list[int] = []
        self.low = self.high = self.reach = 0


class Tail:
    """What stands behind the live part of one static input, refilled only where a call made it dirty."""

    def __init__(self, static: Tensor, dims: Sequence[int], fill: Any, marks: _Marks) -> None:
        self.static, self.dims, self.fill, self.marks = static.detach(), tuple(dims), fill, marks
        self.rows = len(dims) == 1 and static.stride(dims[0]) == max(static.stride())
        shape = [n for dim, n in enumerate(static.shape) if not self.rows or dim != dims[0]]
        self.layout = (static.dtype, self.rows, static.stride(), tuple(shape))
        self.clean: Callable[[Sequence[int]], None]
        if callable(fill):
            self.clean = lambda live: fill(self.static, tuple(live))
        else:
            self.clean = self._clean_rows if self.rows else self._clean_box

    def spoil(self) -> None:
        """All of it may have been written."""
        self.marks.layout = None

    def _clean_rows(self, live: Sequence[int]) -> None:
        """One dimension, the slowest: buckets of other sizes have the same rows."""
        marks, dim = self.marks, self.dims[0]
        n, full = live[dim], self.static.shape[dim]
        if marks.layout != self.layout:
            marks.layout, marks.low, marks.high, marks.reach = self.layout, _ALL, _ALL, _ALL
        # One fill costs more than the rows that it fills once too often.
        self._fill(dim, n if n < marks.low else max(marks.high, n), min(max(marks.low, marks.reach), full))
        if marks.low > full:
            marks.high, marks.reach = full, max(marks.low, marks.reach)
        else:
            marks.high = max(marks.high, full)
        if marks.reach <= marks.high:
            marks.high = marks.reach = n
        marks.low = n

    def _clean_box(self, live: Sequence[int]) -> None:
        marks = self.marks
        if marks.layout != self.layout:
            marks.layout, marks.box = self.layout, list(self.static.shape)
        for dim in self.dims:
            self._fill(dim, live[dim], marks.box[dim])
            marks.box[dim] = live[dim]

    def _fill(self, dim: int, start: int, stop: int) -> None:
        if start < stop and self.fill is not None:
            self.static.narrow(dim, start, stop - start).fill_(self.fill)
