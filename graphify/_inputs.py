"""Static inputs: the memory that a recording reads in place of the caller's tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ._layout import first_byte, overlaps_itself, span, view_of, with_bits
from ._signature import TensorSpec, overlap
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
    sharing it; these and expanded ones are filled by one copy of the range of memory they cover. A leaf on
    another device than the graph's is a host scalar: a value of the signature, which nothing refills,
    unless it is `staged` into device memory. Leaves `by_reference` are the caller's tensors themselves.
    `take` gives the memory of a leaf that stands alone and is dense in itself; None: any memory will do.
    """

    def __init__(
        self,
        leaves: Sources,
        specs: Sequence[TensorSpec],
        device: torch.device,
        staged: frozenset[int] = frozenset(),
        *,
        by_reference: frozenset[int] = frozenset(),
        take: Callable[[int, Tensor], Tensor | None] | None = None,
    ) -> None:
        self.by_reference, self._take = by_reference, take or _anywhere
        self.tensors: list[Tensor] = list(leaves)
        self.copies: list[Copy] = []
        self._ranges: list[Range] = []
        self._single: list[Copy] = []
        for family in _families(leaves):
            i = family[0]
            if not by_reference.isdisjoint(family):
                continue
            with torch.inference_mode(specs[i].inference), torch.no_grad():
                if leaves[i].device.type != device.type:
                    self._allocate_scalar(leaves[i], i, device if i in staged else None)
                elif len(family) == 1 and not overlaps_itself(leaves[i]):
                    self._allocate(leaves[i], i)
                else:
                    self._allocate_range(leaves, family)
        self._set_flags(specs)
        self._fill_once(leaves)

    def _allocate_scalar(self, leaf: Tensor, index: int, device: torch.device | None) -> None:
        self.tensors[index] = leaf.clone() if device is None else leaf.to(device)
        if device is not None:
            self._single.append((self.tensors[index], index))

    def _allocate(self, leaf: Tensor, index: int) -> None:
        static = self._take(index, leaf)
        if static is None:
            static = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        # The same bits as the leaf's: a copy may move bytes without asking for their meaning.
        self.tensors[index] = with_bits(static, leaf)
        # No foreach copy takes such a bit.
        (self._single if leaf.is_neg() or leaf.is_conj() else self.copies).append(
            (self.tensors[index], index)
        )

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

    def _fill_once(self, leaves: Sources) -> None:
        """The recording run may read them for real: where it is live, or in its own warm-ups."""
        for static, index in self.copies:
            with torch.inference_mode(static.is_inference()), torch.no_grad():
                static.copy_(leaves[index])
        fill = self.filler()
        if fill is not None:
            fill(leaves)

    def _set_flags(self, specs: Sequence[TensorSpec]) -> None:
        made: dict[int, Tensor] = {}
        for i, spec in enumerate(specs):
            static = self.tensors[i]
            if i in self.by_reference:
                continue
            if id(static) not in made:
                kind = spec.kind is nn.Parameter
                made[id(static)] = nn.Parameter(static, spec.requires_grad) if kind else static
                if spec.requires_grad:
                    made[id(static)].requires_grad_()
            self.tensors[i] = made[id(static)]

    def filler(self, without: Collection[int] = ()) -> Callable[[Sources], None] | None:
        """What fills everything that `copies` leaves out, but for some leaves; None when there is nothing."""
        ranges = [r for r in self._ranges if r.leaf not in without]
        single = [(static, index) for static, index in self._single if index not in without]
        if not ranges and not single:
            return None
        inference = any(t.is_inference() for t in (*(r.flat for r in ranges), *(t for t, _ in single)))

        def fill(sources: Sources) -> None:
            with torch.inference_mode() if inference else torch.no_grad():
                for flat, leaf, before in ranges:
                    flat.copy_(
                        view_of(sources[leaf], flat, first_byte(sources[leaf]) - before, flat.shape, (1,))
                    )
                for static, index in single:
                    static.copy_(sources[index])

        return fill


def _anywhere(index: int, leaf: Tensor) -> None:
    """Any memory will do."""


def _families(leaves: Sources) -> list[list[int]]:
    """Indices of leaves by the memory they share; what the signature calls separate stays separate."""
    groups = [[shared.place for shared in group] for group in overlap(leaves) or ()]
    together = {i for group in groups for i in group}
    return [*groups, *([i] for i in range(len(leaves)) if i not in together)]
