"""Results: how each tensor that a call returns or leaves behind is made after a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ._layout import family_key, first_byte, is_dense, overlaps_itself, span, view_of, with_bits
from ._pool import GraphPool
from .backends.base import Backend, Loan

__all__ = ["Attach", "Copied", "Maker", "Primary", "ResultPlan", "TangledError", "lending"]

T = TypeVar("T")
Sources = Sequence[Tensor]
Maker = Callable[[Sources, Sequence[Tensor], list[Any]], Tensor]
Attach = Callable[[Sources, Sequence[Tensor]], Sequence[Tensor]]
"""Ties copies to the backward of their recording, for the tensors of a call."""


def lending(
    launch: Callable[[], Any], results: Sources, backend: Backend, pool: GraphPool
) -> Callable[[], Sequence[Tensor]]:
    """A launch that lends graph memory, and adds what ends each loan to what the pool retires.

    A loan that nobody holds any more when it ends is lent again: making one costs ten times as much.
    """
    shelf: list[Loan | None] = [None] * len(results)

    def ending(i: int, loan: Loan) -> Callable[[], None]:
        def end() -> None:
            if loan.idle():
                shelf[i] = loan
            else:
                loan.close()

        return end

    def launch_and_lend() -> Sequence[Tensor]:
        launch()
        lent = []
        try:
            for i, result in enumerate(results):
                loan, shelf[i] = shelf[i] or backend.lend(result), None
                pool.retired.append(ending(i, loan))
                lent.append(loan.tensor)
        except BaseException as error:
            pool.spent = error
            raise
        return lent

    return launch_and_lend


class TangledError(Exception):
    """Gradients cannot be handed out through the results as they are: why, in a word, and what to do about it."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(advice)
        self.reason, self.advice = reason, advice


_VIEWS = (
    "its results need gradients and are views that cannot be taken of a copy: return the whole tensor, and take "
    "the views outside"
)
_LENT = (
    "its results need gradients and are views of an argument, or of a tensor from outside, that strides alone do "
    "not give: return a copy, or take the views outside"
)


class Primary(NamedTuple):
    """A result that gradients come back to: a tensor of its own, or the one whose views the results are."""

    tensor: Tensor
    leaf: int
    """The result that it is, or is the base of."""
    is_base: bool
    position: int
    """Of its copy."""
    byte: int
    """Where it begins in the memory of its copy."""

    def of(self, results: Sources) -> Tensor:
        """The same among the results of another run."""
        base = results[self.leaf]._base if self.is_base else results[self.leaf]
        assert base is not None
        return base


class _Whole(NamedTuple):
    """A copy that serves all results on one storage: its number, its first byte, its primary's number."""

    position: int
    low: int
    primary: int | None


class ResultPlan:
    """Where each result tensor comes from at a call.

    - the caller's argument, or the same view of it, when the run returned its static input;
    - an outside tensor itself, or the same view of it;
    - else memory of the recording: one copy per storage, viewed with eager's strides. Where gradients are
      recorded, copies that need them pass through `attach`, which ties them to their backward.

    `outside` gives each outside tensor as the run knew it, and as it is.

    Raises:
        TangledError: results with gradients are views that autograd cannot repeat over a copy.
    """

    def __init__(self, results: Sources, statics: Sources, outside: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.results = results
        self.copied: list[Tensor] = []
        self.primaries: list[Primary] = []
        self._statics = _by_storage(enumerate(statics))
        self._outside = _by_storage((real, known) for known, real in outside)
        self._wholes: dict[int, _Whole] = {}
        self._views: dict[int, _View] = {}
        self._makers = [self._maker(result) for result in results]

    def in_order(self) -> bool:
        """Whether the results are the copies, one by one, as they stand."""
        return (
            len(self.copied) == len(self._makers)
            and not any(r.requires_grad for r in self.copied)
            and all(type(maker) is Copied and maker.position == i for i, maker in enumerate(self._makers))
        )

    def maker(self, attach: Attach | None) -> Callable[[Sources, Sequence[Tensor]], Sequence[Tensor]]:
        """What makes the results of a call from its tensors and the fresh copies."""
        makers, primaries, copied = self._makers, self.primaries, self.copied
        # In the order in which the run made them, as that is the order in which their gradients add up.
        views = sorted(self._views.values(), key=lambda view: view.age)
        first = [next(j for j, r in enumerate(self.results) if r is result) for result in self.results]
        leaves = [
            r.requires_grad and r.grad_fn is None and isinstance(m, Copied)
            for r, m in zip(self.results, makers, strict=True)
        ]

        def make(sources: Sources, fresh: Sequence[Tensor]) -> Sequence[Tensor]:
            tied: list[Tensor | None] = [None] * len(views)
            if attach is not None:
                tied = [*attach(sources, [_part(p, copied, fresh) for p in primaries]), *tied]
            for view in views:
                view(sources, fresh, tied)
            made: list[Tensor] = []
            for i, maker in enumerate(makers):
                made.append(made[first[i]] if first[i] < i else maker(sources, fresh, tied))
                if leaves[i]:
                    made[i].requires_grad_()
            return made

        return make

    def moded(self, launch: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
        """Make the copies in the inference mode in which the run made its results; once more, where it made some in each."""
        modes = [t.is_inference() for t in self.copied]
        if len({*modes, torch.is_inference_mode_enabled()}) == 1:
            return launch
        if len({*modes}) > 1:
            return lambda: [*map(_recast, launch(), modes)]
        inference = modes[0]

        def switched() -> Sequence[Tensor]:
            with torch.inference_mode(inference):
                return launch()

        return switched

    def _maker(self, result: Tensor) -> Maker:
        key = family_key(result)
        if key in self._statics:
            return self._from_argument(result, self._statics[key])
        if key in self._outside:
            return self._from_outside(result, self._outside[key])
        return self._from_copy(result, key)

    def _from_argument(self, result: Tensor, held: list[tuple[int, Tensor]]) -> Maker:
        for i, static in held:
            if result is static:
                return lambda sources, fresh, tied: sources[i]
        i, static = _base_among(result, held)
        shift = first_byte(result) - first_byte(static)
        return lambda sources, fresh, tied: _view(sources[i], result, first_byte(sources[i]) + shift)

    def _from_outside(self, result: Tensor, held: list[tuple[Tensor, Tensor]]) -> Maker:
        for real, _ in held:
            if result is real:
                return lambda sources, fresh, tied: result
        base, byte = _base_among(result, held)[0], first_byte(result)
        return lambda sources, fresh, tied: _view(base, result, byte)

    def _from_copy(self, result: Tensor, key: int) -> Maker:
        if key not in self._wholes:
            self._wholes[key] = self._add_whole([r for r in self.results if family_key(r) == key])
        position, low, primary = self._wholes[key]
        byte = first_byte(result) - low
        if primary is not None and result.grad_fn is not None:
            if result is self.primaries[primary].tensor:
                return lambda sources, fresh, tied: tied[primary]
            return self._views.get(id(result)) or self._add_view(result, primary, low)
        if self.copied[position] is result:
            return Copied(position)
        return lambda sources, fresh, tied: _view(fresh[position], result, byte)

    def _add_view(self, result: Tensor, primary: int, low: int) -> _View:
        above = self._above(result, self.primaries[primary].tensor)
        base = None if above is None else self._views.get(id(above)) or self._add_view(above, primary, low)
        made = self._views[id(result)] = _View(
            result, first_byte(result) - low, primary, base, len(self._views)
        )
        return made

    def _above(self, result: Tensor, base: Tensor) -> Tensor | None:
        """The result that this one is a view of, between it and their base: gradients add up there first."""
        others = {r.grad_fn: r for r in self.results if r._base is base and not overlaps_itself(r)}
        node: Any = result.grad_fn
        while node is not None and node != base.grad_fn:
            node = node.next_functions[0][0] if node.next_functions else None
            if node in others:
                return others[node]
        return None

    def _add_whole(self, family: list[Tensor]) -> _Whole:
        """Choose what to copy for results that share one storage: a tensor as it is, or a byte range."""
        primary = _primary(family)
        members = family if primary is None else [*family, primary]
        chosen = family[0] if primary is None else primary
        low, high = span(members)
        number = None if primary is None else len(self.primaries)
        plain = is_dense(chosen) and not (chosen.is_conj() or chosen.is_neg())
        if (
            plain
            and span([chosen]) == (low, high)
            and (number is not None or all(r is chosen for r in family))
        ):
            self.copied.append(chosen)
        else:
            with torch.inference_mode(chosen.is_inference()):
                flat = torch.empty(0, dtype=torch.uint8, device=chosen.device)
                self.copied.append(flat.set_(chosen.untyped_storage(), low, (high - low,), (1,)))
        position = len(self.copied) - 1
        if primary is not None:
            leaf = next(i for i, r in enumerate(self.results) if r is primary or r._base is primary)
            is_base = self.results[leaf] is not primary
            self.primaries.append(Primary(primary, leaf, is_base, position, first_byte(primary) - low))
        return _Whole(position, low, number)


def _primary(family: list[Tensor]) -> Tensor | None:
    """The tensor with gradients that all results with gradients on one storage are, or are views of."""
    graded = [r for r in family if r.grad_fn is not None]
    if not graded:
        return None
    if all(r is graded[0] for r in graded):
        return graded[0]
    bases = {id(base): base for base in (r._base if r._base is not None else r for r in graded)}
    base = next(iter(bases.values()))
    if len(bases) > 1 or base.grad_fn is None or any(r.dtype != base.dtype for r in graded):
        raise TangledError("views", _VIEWS)
    return base


def _base_among(result: Tensor, held: list[tuple[T, Tensor]]) -> tuple[T, Tensor]:
    """The one of these tensors, with what stands before it, that a result is a view of, for autograd too."""
    if not result.requires_grad:
        return held[0]
    for i, tensor in held:
        base = result._base
        if overlaps_itself(tensor):
            continue  # the backward of a view by strides would spread over all elements that share memory
        if base is not None and (base is tensor or base is tensor._base) and result.dtype == tensor.dtype:
            return i, tensor
    raise TangledError("views of others", _LENT)


def _view(base: Tensor, result: Tensor, byte: int) -> Tensor:
    """The same view as a result, of another base; with gradients where the result has them."""
    if base.requires_grad and not result.requires_grad:
        base = base.detach()
    made = view_of(base, result, byte, result.shape, result.stride())
    if made.is_inference() == result.is_inference():
        return made
    # As torch makes a view of another dtype outside of the mode in which its base was made.
    with torch.inference_mode(result.is_inference()):
        alias = torch.empty(0, dtype=result.dtype, device=result.device)
        alias.set_(base.untyped_storage(), made.storage_offset(), result.shape, result.stride())
        return with_bits(alias, result)


def _part(primary: Primary, copied: Sources, fresh: Sequence[Tensor]) -> Tensor:
    """A call's own copy of a primary, which is nobody's view."""
    whole = fresh[primary.position]
    if copied[primary.position] is primary.tensor:
        return whole
    return _view(whole, primary.tensor, primary.byte).detach()


class _View:
    """A result with gradients that is a view of a primary, or of another such view; made once at each call."""

    def __init__(self, like: Tensor, byte: int, primary: int, above: _View | None, number: int) -> None:
        node: Any = like.grad_fn
        self.age: int = node._sequence_nr()
        self._like, self._byte, self._primary, self._above, self._number = like, byte, primary, above, number

    def __call__(self, sources: Sources, fresh: Sequence[Tensor], tied: list[Any]) -> Tensor:
        place = ~self._number  # behind the primaries
        if tied[place] is None:
            base = tied[self._primary] if self._above is None else self._above(sources, fresh, tied)
            tied[place] = _view(base, self._like, self._byte)
        made: Tensor = tied[place]
        return made


class Copied:
    """A result that is a copy as it stands."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __call__(self, sources: Sources, fresh: Sequence[Tensor], tied: list[Any]) -> Tensor:
        return fresh[self.position]


def _recast(made: Tensor, inference: bool) -> Tensor:
    """The same in the inference mode of the result that it is for."""
    if made.is_inference() == inference:
        return made
    with torch.inference_mode(inference):
        return made.clone()


def _by_storage(tensors: Iterable[tuple[T, Tensor]]) -> dict[int, list[tuple[T, Tensor]]]:
    found: dict[int, list[tuple[T, Tensor]]] = {}
    for what, tensor in tensors:
        found.setdefault(family_key(tensor), []).append((what, tensor))
    return found
