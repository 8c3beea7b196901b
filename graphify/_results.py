"""Results: how each tensor that a call returns or leaves behind is made after a replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._layout import family_key, first_byte, is_dense, span, view_of
from .backends.base import Backend, Loan

__all__ = ["ResultPlan", "lending"]

Sources = Sequence[Tensor]
Maker = Callable[[Sources, Sequence[Tensor]], Tensor]


def lending(
    launch: Callable[[], Any], results: Sources, backend: Backend, closers: list[Callable[[], None]]
) -> Callable[[], Sequence[Tensor]]:
    """A launch that lends graph memory, and adds what ends each loan to `closers`.

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
        for i, result in enumerate(results):
            loan, shelf[i] = shelf[i] or backend.lend(result), None
            closers.append(ending(i, loan))
            lent.append(loan.tensor)
        return lent

    return launch_and_lend


class ResultPlan:
    """Where each result tensor comes from at a call.

    - the caller's argument, or the same view of it, when the run returned its static input;
    - an outside tensor itself, or the same view of it;
    - else memory of the recording: one copy per storage, viewed with eager's strides.
    """

    def __init__(self, results: Sources, statics: Sources, outside: Sequence[Tensor]) -> None:
        self.results = results
        self._statics = _by_storage(statics)
        self._outside = _by_storage(outside)
        self.copied: list[Tensor] = []
        self._wholes: dict[int, tuple[int, int]] = {}
        self._makers = [self._maker(result) for result in results]

    def in_order(self) -> bool:
        """Whether the results are the copies, one by one, as they stand."""
        return (
            len(self.copied) == len(self._makers)
            and not any(r.requires_grad for r in self.copied)
            and all(type(maker) is _Copied and maker.position == i for i, maker in enumerate(self._makers))
        )

    def maker(self) -> Callable[[Sources, Sequence[Tensor]], Sequence[Tensor]]:
        """What makes the results of a call from its tensors and the fresh copies."""
        makers = self._makers
        first = [next(j for j, r in enumerate(self.results) if r is result) for result in self.results]
        grads = [
            r.requires_grad and isinstance(m, _Copied) for r, m in zip(self.results, makers, strict=True)
        ]

        def make(sources: Sources, fresh: Sequence[Tensor]) -> Sequence[Tensor]:
            made: list[Tensor] = []
            for i, maker in enumerate(makers):
                made.append(made[first[i]] if first[i] < i else maker(sources, fresh))
                if grads[i]:
                    made[i].requires_grad_()
            return made

        return make

    def moded(self, launch: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
        """Make the copies in the inference mode in which the run made its results, where all agree."""
        modes = {t.is_inference() for t in self.copied}
        if len(modes) != 1 or modes == {torch.is_inference_mode_enabled()}:
            return launch
        inference = modes.pop()

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
                return lambda sources, fresh: sources[i]
        i, static = held[0]
        shift = first_byte(result) - first_byte(static)
        size, stride = result.shape, result.stride()
        return lambda sources, fresh: view_of(
            sources[i].detach(), result, first_byte(sources[i]) + shift, size, stride
        )

    def _from_outside(self, result: Tensor, held: list[tuple[int, Tensor]]) -> Maker:
        for _, tensor in held:
            if result is tensor:
                return lambda sources, fresh: result
        base, byte, size, stride = held[0][1], first_byte(result), result.shape, result.stride()
        return lambda sources, fresh: view_of(base.detach(), result, byte, size, stride)

    def _from_copy(self, result: Tensor, key: int) -> Maker:
        if key not in self._wholes:
            self._wholes[key] = self._add_whole([r for r in self.results if family_key(r) == key])
        position, low = self._wholes[key]
        if self.copied[position] is result:
            mixed = len({r.is_inference() for r in self.results}) > 1
            return _Recast(position, result.is_inference()) if mixed else _Copied(position)
        byte, size, stride = first_byte(result) - low, result.shape, result.stride()
        return lambda sources, fresh: view_of(fresh[position], result, byte, size, stride)

    def _add_whole(self, family: list[Tensor]) -> tuple[int, int]:
        """Choose what to copy for results that share one storage: the tensor itself, or its byte range."""
        result = family[0]
        alone = all(r is result for r in family)
        if alone and is_dense(result) and not (result.is_conj() or result.is_neg()):
            self.copied.append(result)
            return len(self.copied) - 1, 0
        low, high = span(family)
        flat = torch.empty(0, dtype=torch.uint8, device=result.device)
        self.copied.append(flat.set_(result.untyped_storage(), low, (high - low,), (1,)))
        return len(self.copied) - 1, low


class _Copied:
    """A result that is a copy as it stands."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __call__(self, sources: Sources, fresh: Sequence[Tensor]) -> Tensor:
        return fresh[self.position]


class _Recast(_Copied):
    """A copy that must be made once more, in the inference mode of its result: the results are of both."""

    def __init__(self, position: int, inference: bool) -> None:
        super().__init__(position)
        self.inference = inference

    def __call__(self, sources: Sources, fresh: Sequence[Tensor]) -> Tensor:
        made = fresh[self.position]
        if made.is_inference() == self.inference:
            return made
        with torch.inference_mode(self.inference):
            return made.clone()


def _by_storage(tensors: Sources) -> dict[int, list[tuple[int, Tensor]]]:
    found: dict[int, list[tuple[int, Tensor]]] = {}
    for i, tensor in enumerate(tensors):
        found.setdefault(family_key(tensor), []).append((i, tensor))
    return found
