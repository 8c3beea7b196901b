"""Static inputs: the memory that a recording reads in place of the caller's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ._layout import family_key, first_byte, overlaps_itself, span, view_of
from ._signature import TensorSpec
from .backends.base import Copy

__all__ = ["StaticInputs"]

Sources = Sequence[Tensor]


class Range(NamedTuple):
    """A run of memory filled at once: the destination, the leaf it comes from, bytes before that leaf."""

    flat: Tensor
    leaf: int
    before: int


class StaticInputs:
    """One static tensor per leaf, always our own memory, and what fills them: `copies` and a `filler`.

    Strides, sharing among leaves, conjugate bits and flags are the caller's. Leaves that share memory keep
    sharing it; these and expanded ones are filled by one copy of the range of memory they cover.
    """

    def __init__(self, leaves: Sources, specs: Sequence[TensorSpec]) -> None:
        self.tensors: list[Tensor] = list(leaves)
        self.copies: list[Copy] = []
        self._ranges: list[Range] = []
        inference = any(spec.inference for spec in specs)
        with torch.inference_mode(inference), torch.no_grad():
            for family in _families(leaves):
                if len(family) == 1 and not overlaps_itself(leaves[family[0]]):
                    self.copies.append((self._allocate(leaves[family[0]], family[0]), family[0]))
                else:
                    self._allocate_range(leaves, family)
        self._set_flags(specs)

    def _allocate(self, leaf: Tensor, index: int) -> Tensor:
        static = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        self.tensors[index] = static.conj() if leaf.is_conj() else static
        return self.tensors[index]

    def _allocate_range(self, leaves: Sources, family: list[int]) -> None:
        low, high = span(leaves[i] for i in family)
        flat = torch.empty(high - low, dtype=torch.uint8, device=leaves[family[0]].device)
        made: dict[int, Tensor] = {}
        for i in family:
            leaf = leaves[i]
            if id(leaf) not in made:
                made[id(leaf)] = view_of(flat, leaf, first_byte(leaf) - low, leaf.shape, leaf.stride())
            self.tensors[i] = made[id(leaf)]
        self._ranges.append(Range(flat, family[0], first_byte(leaves[family[0]]) - low))

    def _set_flags(self, specs: Sequence[TensorSpec]) -> None:
        made: dict[int, Tensor] = {}
        for i, spec in enumerate(specs):
            static = self.tensors[i]
            if id(static) not in made:
                kind = spec.kind is nn.Parameter
                made[id(static)] = nn.Parameter(static, spec.requires_grad) if kind else static
                if spec.requires_grad:
                    made[id(static)].requires_grad_()
            self.tensors[i] = made[id(static)]

    def filler(self) -> Callable[[Sources], None] | None:
        """What fills the ranges of memory that `copies` leaves out; None when there are none."""
        ranges, inference = self._ranges, any(flat.is_inference() for flat, _, _ in self._ranges)
        if not ranges:
            return None

        def fill(sources: Sources) -> None:
            with torch.inference_mode() if inference else torch.no_grad():
                for flat, leaf, before in ranges:
                    flat.copy_(
                        view_of(sources[leaf], flat, first_byte(sources[leaf]) - before, flat.shape, (1,))
                    )

        return fill


def _families(leaves: Sources) -> list[list[int]]:
    """Indices of leaves by the storage they view."""
    found: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        found.setdefault(family_key(leaf), []).append(i)
    return list(found.values())
