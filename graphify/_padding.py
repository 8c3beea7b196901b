"""Padding: the tensors of a call inside tensors of a bucket's shape, and what stands behind the live part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ._axes import Axes
from ._layout import is_dense
from ._specification import longest, path_of, same_path

__all__ = ["Fill", "Fills", "Fit", "Pad", "dense_strides"]

Fill: TypeAlias = "bool | int | float | complex | Callable[[Tensor, tuple[int, ...]], object] | None"
"""A value; None: whatever is there; or a function that fills a buffer outside its live shape."""

Pad: TypeAlias = "Fill | Mapping[str, Fill]"
"""What the option `pad` may be."""

_FORM = 'pad={"slots": -1}'


class Fills:
    """The option `pad`: one fill for all arguments, or one each; 0 where it says nothing.

    Raises:
        TypeError, ValueError: what is wrong at which argument, and the right form.
    """

    def __init__(self, pad: Any, names: Sequence[str], *, stars: str | None = None) -> None:
        self._each: dict[str, Any] = {}
        self._all = 0 if pad is None or isinstance(pad, Mapping) else _checked("pad", pad)
        if isinstance(pad, Mapping):
            for key, fill in pad.items():
                path = same_path(path_of("pad", key, names, stars, _FORM))
                self._each[path] = _checked(f"pad[{key!r}]", fill)
        self.explicit = pad is not None and not isinstance(pad, Mapping)

    def of(self, path: str) -> tuple[Any, bool]:
        """The fill of a leaf, by the longest path that leads to it, and whether the user chose it."""
        found = longest(self._each, path)
        return (self._all, self.explicit) if found is None else (self._each[found], True)


def _checked(what: str, fill: object) -> Any:
    if fill is None or isinstance(fill, (bool, int, float, complex)) or callable(fill):
        return fill
    raise TypeError(
        f"{what} must be a number, None (keep what is there) or a function of a buffer and its live shape,"
        f" not {fill!r}. Write {_FORM}."
    )


def dense_strides(tensor: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor of another shape whose dimensions lie in this one's order."""
    order = list(range(tensor.dim()))
    if not tensor.is_contiguous() and 0 not in tensor.stride():
        order.sort(key=tensor.stride, reverse=True)
    strides, step = [0] * tensor.dim(), 1
    for dim in reversed(order):
        strides[dim], step = step, step * max(1, shape[dim])
    return tuple(strides)


class Fit(NamedTuple):
    """How calls of one size lie in their bucket: live and full size per axis, and the dimensions of each leaf."""

    axes: Axes
    live: tuple[int, ...]
    full: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        """Whether nothing is padded."""
        return self.live == self.full

    def is_as_is(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a call's own tensors are what its bucket takes."""
        return self.is_full and all(_is_plain(tensors[leaf]) for leaf in self.dims())

    def dims(self) -> dict[int, list[tuple[int, int]]]:
        """The bucketed dimensions of each leaf that has some, each with its axis."""
        found: dict[int, list[tuple[int, int]]] = {}
        for axis, places in enumerate(self.axes.places):
            for leaf, dim in places:
                found.setdefault(leaf, []).append((dim, axis))
        return found

    def padded(self, tensors: Sequence[Tensor], fills: Sequence[Any]) -> tuple[Tensor, ...]:
        """The tensors of a call inside new ones of the bucket's shape; gradients flow back to the live part."""
        shapes, dims = self.axes.padded_shapes([t.shape for t in tensors], self.full), self.dims()
        made: dict[int, Tensor] = {}
        for leaf in dims:
            tensor = tensors[leaf]
            if id(tensor) not in made:
                whole = tensor.shape == shapes[leaf] and _is_plain(tensor)
                made[id(tensor)] = tensor if whole else _padded(tensor, shapes[leaf], fills[leaf])
        return tuple(made[id(t)] if leaf in dims else t for leaf, t in enumerate(tensors))

    def blank(self, tensors: Sequence[Tensor], fills: Sequence[Any]) -> tuple[Tensor, ...]:
        """Tensors like `padded` ones that hold nothing but padding, which by its contract touches nothing."""
        shapes, dims = self.axes.padded_shapes([t.shape for t in tensors], self.full), self.dims()
        made: dict[int, Tensor] = {}
        for leaf, places in dims.items():
            if id(tensors[leaf]) not in made:
                none = [0 if any(d == dim for d, _ in places) else n for dim, n in enumerate(shapes[leaf])]
                made[id(tensors[leaf])] = _blank(tensors[leaf], shapes[leaf], fills[leaf], none)
        return tuple(made[id(t)] if leaf in dims else t for leaf, t in enumerate(tensors))

    def padded_dims(self) -> frozenset[tuple[int, int]]:
        """Each leaf and dimension of it that has padding."""
        padded = [axis for axis, live in enumerate(self.live) if live < self.full[axis]]
        return frozenset(place for axis in padded for place in self.axes.places[axis])

    def told(self, padded: Sequence[Tensor]) -> frozenset[tuple[int, int]]:
        """Of these, where not all rows and their padding hold the same, so that a function can show which it uses."""
        return frozenset((leaf, dim) for leaf, dim in self.padded_dims() if _varies(padded[leaf], dim))

    def lives(self, leaf: int, tensor: Tensor) -> Tensor:
        """The live part of a leaf of the bucket's shape."""
        for dim, axis in self.dims().get(leaf, ()):
            tensor = tensor.narrow(dim, 0, self.live[axis])
        return tensor


def _is_plain(tensor: Tensor) -> bool:
    """Whether a bucket's own tensor would have the same form."""
    return type(tensor) is Tensor and is_dense(tensor) and not (tensor.is_conj() or tensor.is_neg())


def _varies(tensor: Tensor, dim: int) -> bool:
    """Whether the slices along a dimension differ; nothing can be said of none."""
    tensor = tensor.detach()
    wide = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
    return not wide.numel() or bool((wide != wide.narrow(dim, 0, 1)).any())


def _padded(tensor: Tensor, shape: Sequence[int], fill: Any) -> Tensor:
    with torch.inference_mode(tensor.is_inference()):
        live = padded = _filled(tensor, shape, fill)
        for dim, size in enumerate(tensor.shape):
            live = live.narrow(dim, 0, size)
        live.copy_(tensor)
        _fill_by(fill, padded, tensor.shape)
    # Without grad mode nothing connects the two, but code may ask.
    return padded.requires_grad_() if tensor.requires_grad and not padded.requires_grad else padded


def _blank(like: Tensor, shape: Sequence[int], fill: Any, live: Sequence[int]) -> Tensor:
    with torch.inference_mode(like.is_inference()):
        blank = _filled(like, shape, fill)
        _fill_by(fill, blank, live)
    return blank.requires_grad_() if like.requires_grad else blank


def _filled(like: Tensor, shape: Sequence[int], fill: Any) -> Tensor:
    """A dense buffer full of padding."""
    with torch.no_grad():
        buffer = torch.empty_strided(shape, dense_strides(like, shape), dtype=like.dtype, device=like.device)
        return buffer.zero_() if fill is None or callable(fill) else buffer.fill_(fill)


def _fill_by(fill: Any, buffer: Tensor, live: Sequence[int]) -> None:
    if callable(fill):
        with torch.no_grad():
            fill(buffer.detach(), tuple(live))
