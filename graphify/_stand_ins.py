"""Stand-ins: while a run is recorded, or leaves no trace, tensors are other tensors on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ._touched import bind_grad, grad_of

__all__ = ["StandInUsedError", "StandIns", "set_aside"]

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
        tensor, other = pair
        held = grad_of(tensor) if tensor.is_leaf else None
        _swapped(tensor, other)
        # Another thread may read `.grad` meanwhile, or drop it.
        if tensor.is_leaf and grad_of(tensor) is not held:
            bind_grad(tensor, held)


@contextmanager
def set_aside(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep what autograd knows of these, for the body to be taken back: nothing else gives a view, or what has a
    history, its old one again after a write with gradients.
    """
    chosen = {id(t): t for t in tensors if _swap is not None and type(t) in _KINDS and not t.is_inference()}
    with torch.inference_mode(False), torch.enable_grad():
        pairs = [(t, _alike(t)) for t in chosen.values() if t.grad_fn is not None or t._is_view()]
    swapped: list[tuple[Tensor, Tensor]] = []
    try:
        for pair in pairs:
            with suppress(RuntimeError):  # as above
                _swapped(*pair)
                swapped.append(pair)
        yield
    finally:
        for tensor, held in swapped:
            try:
                _swapped(tensor, held)
            except RuntimeError:  # its history keeps a gradient for it, by a weak reference of torch's own
                tensor.detach_()
                _swapped(tensor, held)


def _swapped(tensor: Tensor, other: Tensor) -> None:
    assert _swap is not None, "nothing is chosen without it"
    _swap(tensor, other)


class _Alike(torch.autograd.Function):
    """The same tensor again, with a history that leads to the first, and the same count of writes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _alike(tensor: Tensor) -> Tensor:
    if tensor.grad_fn is None:
        return tensor.detach().requires_grad_(tensor.requires_grad)
    made: Tensor = _Alike.apply(tensor)  # type: ignore[no-untyped-call]
    return made


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
