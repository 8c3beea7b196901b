"""Stand-ins: while a run is recorded, tensors that need grad are other tensors on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

__all__ = ["StandInUsedError", "StandIns"]

_KINDS = (Tensor, nn.Parameter)
_swap: Callable[[Tensor, Tensor], None] | None = getattr(torch._C, "_swap_tensor_impl", None)


class StandIns:
    """Leaves of the recording's own, each in the place of a tensor that a run takes gradients of.

    The autograd graph of a recording lives as long as the recording. Were it tied to a parameter itself, it would
    keep the node alive that accumulates into `.grad`, for everybody and on the stream of the capture; and a
    backward could not be captured, since that node's own stream would have to wait for it. Objects, `id`s and
    attributes stay; only what is below changes hands. Without torch's private swap nothing is replaced.

    Hazard: while one thread records, another that takes gradients of the same tensors in eager code gets an error.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        chosen = {id(t): t for t in tensors if _swap is not None and type(t) in _KINDS}
        self._pairs = [(t, _leaf(t)) for t in chosen.values()]
        self.real = {id(leaf): t for t, leaf in self._pairs}
        """The tensor behind each stand-in, by the stand-in's `id`."""

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Put the stand-ins in place for the time of the body."""
        swapped: list[tuple[Tensor, Tensor]] = []
        try:
            for pair in self._pairs:
                with suppress(RuntimeError):  # torch itself has a weak reference, as after `retain_grad()`
                    self._exchange(pair)
                    swapped.append(pair)
            yield
        finally:
            for pair in swapped:
                self._exchange(pair)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each stand-in with the tensor behind it."""
        return [(leaf, t) for t, leaf in self._pairs]

    def _exchange(self, pair: tuple[Tensor, Tensor]) -> None:
        assert _swap is not None, "nothing is chosen without it"
        tensor, other = pair
        held = tensor.grad if tensor.is_leaf else None
        _swap(tensor, other)
        # Another thread may read `.grad` meanwhile, or drop it.
        if tensor.is_leaf and tensor.grad is not held:
            tensor.grad = held


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(_refuse)  # type: ignore[no-untyped-call]
    return leaf


class StandInUsedError(RuntimeError):
    """A backward has come to a stand-in, where its gradient would be lost."""


def _refuse(leaf: Any) -> NoReturn:
    raise StandInUsedError(
        "a tensor was used for training in one thread while another thread recorded a graph that reads it: "
        "let the first calls of a graphed function be over before other threads train the same parameters"
    )
