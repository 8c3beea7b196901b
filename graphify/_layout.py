"""Where a tensor's elements lie in its storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

__all__ = [
    "disjoint",
    "family_key",
    "first_byte",
    "flipped",
    "is_dense",
    "overlaps_itself",
    "span",
    "view_of",
    "with_bits",
]


_STRIDED = torch.strided


def _storage_number(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


# The same number, without making Python's object of the storage.
_storage_address: Callable[[Tensor], int] = getattr(torch._C, "_storage_address", _storage_number)


def family_key(tensor: Tensor) -> int:
    """The identity of the storage that a tensor views; equal keys mean shared memory."""
    return _storage_address(tensor) if tensor.layout is _STRIDED else -id(tensor)


def first_byte(tensor: Tensor) -> int:
    """Where in its storage a tensor begins."""
    return int(tensor.storage_offset()) * tensor.element_size()


def span(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """The half-open range of bytes of one storage that these tensors cover."""
    ranges = []
    for t in tensors:
        first = int(t.storage_offset())
        reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        last = first + 1 + reach if t.numel() else first
        ranges.append((first * t.element_size(), last * t.element_size()))
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two indices may share an element; never wrong when it says no."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return tensor.numel() > 0
            reach += stride * (size - 1)
    return False


def disjoint(left: Tensor, right: Tensor) -> bool:
    """Whether two views of one storage share no byte; never wrong when it says yes."""
    (low, high), (start, end) = span([left]), span([right])
    if high <= start or end <= low:
        return True
    if not left.dim() or not right.dim():
        return False
    mine, theirs = _outermost(left), _outermost(right)
    step = left.stride(mine) * left.element_size()
    if step != right.stride(theirs) * right.element_size():
        return False
    # Rows that lie side by side within each step of the outermost dimension.
    rows = left.select(mine, 0), right.select(theirs, 0)
    begin, stop = span(rows)
    return stop - begin <= step and disjoint(*rows)


def _outermost(tensor: Tensor) -> int:
    return max(range(tensor.dim()), key=tensor.stride)


def is_dense(tensor: Tensor) -> bool:
    """Whether every element has a place of its own and no gaps lie between them."""
    low, high = span([tensor])
    return high - low == tensor.numel() * tensor.element_size() and not overlaps_itself(tensor)


def view_of(base: Tensor, like: Tensor, byte: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A view of `base`'s storage that starts at a byte, with the dtype and the bits of `like`."""
    base = with_bits(base, base)  # a bit set twice is gone
    offset = byte // like.element_size()
    if base.dtype == like.dtype:
        same = (base.shape, base.stride(), base.storage_offset()) == (size, stride, offset)
        # An alias hands a gradient on in the layout that it has.
        view = base[...] if same else base.as_strided(size, stride, offset)
    else:
        with torch.inference_mode(base.is_inference()):
            view = torch.empty(0, dtype=like.dtype, device=base.device)
            view.set_(base.untyped_storage(), offset, size, stride)
    return with_bits(view, like)


def with_bits(tensor: Tensor, like: Tensor) -> Tensor:
    """A view with the conjugate and negative bits flipped where `like` has them set."""
    return flipped(tensor, conj=like.is_conj(), neg=like.is_neg())


def flipped(tensor: Tensor, *, conj: bool, neg: bool) -> Tensor:
    """A view with these bits flipped."""
    if conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if neg else tensor
