"""Results of a bucket become those of a call: what eager has in memory of others is there, the rest is laid out anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from ._cuts import Way
from ._forms import Form, like_of, placed
from ._graph import Outcome
from ._layout import family_key, first_byte, overlaps_itself, span
from ._padding import Fit
from ._results import Copied, Maker, ResultPlan

__all__ = ["CutPlan", "cut_results"]

Sources = Sequence[Tensor]
Member = tuple[Tensor, Tensor, Form]
"""The live part of a result, a tensor of its kind, and where eager has it."""


def cut_results(results: Sources, ways: Sequence[Way], tensors: Sources, fit: Fit) -> list[Tensor]:
    """The results of a run of a bucket as those of a call with these tensors; gradients flow back."""
    made: dict[int, Tensor] = {}
    for result, way in zip(results, ways, strict=True):
        if id(result) in made:
            continue
        if way.base.kind == "own":
            made |= _own_results(results, ways, way.base.leaf, fit)
        elif way.base.kind == "argument":
            made[id(result)] = tensors[way.base.leaf]
        elif way.base.kind == "view":
            base = tensors[way.base.leaf]
            like, byte = like_of(result, way.form), first_byte(base) + way.form.offset
            made[id(result)] = placed(_history(base, result), like, byte, way.form)
        else:
            made[id(result)] = _from_outside(result, result, way.form)
    return [made[id(result)] for result in results]


def _own_results(results: Sources, ways: Sequence[Way], family: int, fit: Fit) -> dict[int, Tensor]:
    """All results on one memory of their own."""
    members = _members(results, ways, family, fit)
    result, (_, _, form) = members[0]
    if len(members) == 1 and Form.of(result, first_byte(result)) == form:
        return {id(result): result}
    laid = _laid_out([member for _, member in members])
    return {id(result): made for (result, _), made in zip(members, laid, strict=True)}


def _history(base: Tensor, result: Tensor) -> Tensor:
    """What a view is to be taken of: of a base without its history where the result has none."""
    return base.detach() if base.requires_grad and not result.requires_grad else base


def _members(results: Sources, ways: Sequence[Way], family: int, fit: Fit) -> list[tuple[Tensor, Member]]:
    found: dict[int, tuple[Tensor, Member]] = {}
    for result, way in zip(results, ways, strict=False):
        if way.base == ("own", family):
            part = way.cut.part(result, fit.live, fit.full)
            found.setdefault(id(result), (result, (part, like_of(result, way.form), way.form)))
    return list(found.values())


def _from_outside(base: Tensor, result: Tensor, form: Form) -> Tensor:
    if (tuple(result.shape), result.stride(), first_byte(result)) == form[:3]:
        return result
    return placed(base, like_of(result, form), form.offset, form)


def _laid_out(members: Sequence[Member]) -> list[Tensor]:
    """The live parts in new memory, as eager has them there."""
    part, _, form = members[0]
    with _mode_of(form):
        if len(members) == 1 and _is_dense(form):
            alone = torch.empty_strided(form.shape, form.strides, dtype=part.dtype, device=part.device)
            return [alone.copy_(part.reshape(form.shape))]
        kind = next((p for p, _, _ in members if p.requires_grad), part)
        count = -(-max(map(_end, members)) // kind.element_size())
        home = torch.empty(count, dtype=kind.dtype, device=kind.device)
        # Those with a history last: the last write is where gradients of shared elements go.
        for part, like, form in sorted(members, key=lambda member: member[0].requires_grad):
            _write(placed(home, like, form.offset, form), part.reshape(form.shape))
        return [placed(_history(home, part), like, form.offset, form) for part, like, form in members]


def _write(place: Tensor, part: Tensor) -> None:
    """Copy, into memory that several indices may share as well: eager has the same values there."""
    if not overlaps_itself(place):
        place.copy_(part)
    elif 0 in place.stride():
        dim = place.stride().index(0)
        _write(place.select(dim, 0), part.select(dim, 0))
    else:
        for row, live in zip(place, part, strict=True):
            _write(row, live)


def _mode_of(form: Form) -> AbstractContextManager[object]:
    same = form.inference == torch.is_inference_mode_enabled()
    return nullcontext() if same else torch.inference_mode(form.inference)


def _is_dense(form: Form) -> bool:
    steps = sorted((stride, size) for stride, size in zip(form.strides, form.shape, strict=True) if size != 1)
    expected = 1
    for stride, size in steps:
        if stride != expected:
            return False
        expected *= size
    return form.offset == 0 and not any(form.bits)


def _end(member: Member) -> int:
    _, like, form = member
    if 0 in form.shape:
        return form.offset
    reach = sum((size - 1) * stride for size, stride in zip(form.shape, form.strides, strict=True))
    return form.offset + (reach + 1) * like.element_size()


class CutPlan(ResultPlan):
    """Where the results of a replay for calls of one size come from."""

    def __init__(
        self, outcome: Outcome, ways: Sequence[Way], statics: Sources, lives: Sources, fit: Fit
    ) -> None:
        self._special: dict[int, Callable[[], Maker]] = {}
        """What makes the maker of a result, by the identity of what stands for it in the plan."""
        made = {id(static): live for static, live in zip(statics, lives, strict=True)}
        for result, way in zip(outcome.tensors, ways, strict=False):
            if way.base.kind == "argument":
                made[id(result)] = lives[way.base.leaf]
            elif way.base.kind == "own":
                made |= self._own(_members(outcome.tensors, ways, way.base.leaf, fit))
            else:
                made[id(result)] = result
                self._special[id(result)] = partial(self._from_others, result, way)
        super().__init__([made.get(id(r), r) for r in outcome.tensors], lives, outcome.outside)

    def _maker(self, result: Tensor) -> Maker:
        special = self._special.get(id(result))
        return super()._maker(result) if special is None else special()

    def _from_others(self, result: Tensor, way: Way) -> Maker:
        form, index = way.form, way.base.leaf
        if way.base.kind == "view":
            like, byte = like_of(result, form), form.offset
            return lambda sources, fresh, tied: placed(
                _history(sources[index], result), like, first_byte(sources[index]) + byte, form
            )
        held = self._outside.get(family_key(result))
        base = result if held is None else held[0][0]
        if _from_outside(base, result, form) is result:
            return super()._maker(result)
        return lambda sources, fresh, tied: _from_outside(base, result, form)

    def _own(self, members: list[tuple[Tensor, Member]]) -> dict[int, Tensor]:
        """What stands for results on one memory of their own: the live parts, where these lie as in eager."""
        low, _ = span(part for _, (part, _, _) in members)
        if all(_lies(part, form, low) for _, (part, _, form) in members):
            for _, (part, _, _) in members:
                self._special[id(part)] = partial(self._from_copy, part, family_key(part))
            return {id(result): part for result, (part, _, _) in members}
        anew = _Anew([member for _, member in members], self)
        for number, (result, _) in enumerate(members):
            self._special[id(result)] = partial(anew.maker, number)
        return {id(result): result for result, _ in members}


def _lies(part: Tensor, form: Form, low: int) -> bool:
    return Form.of(part, low) == form


class _Anew:
    """Makers of results on one memory that are copied out of a replay and laid out as in eager."""

    def __init__(self, members: Sequence[Member], plan: CutPlan) -> None:
        self._members, self._plan = members, plan
        self._first: int | None = None
        self._laid: list[Tensor] = []

    def maker(self, number: int) -> Maker:
        """The maker of one of them; that of the first, which runs first, makes all."""
        if self._first is None:
            self._first = len(self._plan.copied)
            self._plan.copied += [part for part, _, _ in self._members]
        first, members = self._first, self._members
        if len(members) == 1 and _copies_as(members[0]):
            return _alone(members[0], first)

        def make(sources: Sources, fresh: Sources, tied: Sources) -> Tensor:
            if number == 0:
                copies = fresh[first : first + len(members)]
                self._laid = _laid_out(
                    [(copy, like, form) for copy, (_, like, form) in zip(copies, members, strict=True)]
                )
            laid = self._laid[number]
            if number == len(members) - 1:
                self._laid = []
            return laid

        return make


def _alone(member: Member, position: int) -> Maker:
    """The maker of a result that is one copy; views cost a call something, so as few as can be."""
    part, _, form = member
    shape, strides = form.shape, form.strides
    copied = torch.empty_like(part, device="meta")
    if (copied.shape, copied.stride()) == (shape, strides):
        return Copied(position)
    if copied.reshape(shape).stride() == strides:
        return lambda sources, fresh, tied: fresh[position].reshape(shape)
    return lambda sources, fresh, tied: fresh[position].reshape(shape).as_strided(shape, strides)


def _copies_as(member: Member) -> bool:
    """Whether a copy of the part lies as in eager but for dimensions of one element."""
    part, _, form = member
    copied = torch.empty_like(part, device="meta")
    if not _is_dense(form) or part.is_conj() or part.is_neg() or part.is_inference() != form.inference:
        return False
    strides = copied.reshape(form.shape).stride()
    return all(n == 1 or a == b for n, a, b in zip(form.shape, strides, form.strides, strict=True))
