"""How near two tensors are: the same, equal to rounding, or different at a place that can be shown."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["unlike"]

# Two runs of one network at two sizes use other kernels: an element differs by some hundred units in the last place.
_ELEMENT = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# Rounding has no direction. A wrong divisor does, and moves every element by the same part.
_BIAS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 2.5e-4, torch.bfloat16: 1e-3}
_ENOUGH = 16
_SIZES = ("padded", "at its exact size")


def unlike(expected: Tensor, found: Tensor, *, rounding: bool, words: tuple[str, str] = _SIZES) -> str | None:
    """Where and by how much one tensor is not another, or None; NaN equals itself.

    With `rounding`, floats need to be near only: each element on the scale of the whole, and all of them without a
    common factor. `words` say which of the two is which, the found one first.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{_form(found)} {words[0]}, {_form(expected)} {words[1]}"
    if not expected.numel():
        return None
    if not rounding or not (expected.is_floating_point() or expected.is_complex()):
        apart = (expected != found) & ~((expected != expected) & (found != found))
        return _shown(expected, found, apart, words) if apart.any() else None
    wide, near = _wide(expected), _wide(found)
    return _apart(wide, near, expected.dtype, words) or _biased(wide, near, expected.dtype, words)


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _wide(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.detach().double()


def _limit(table: dict[torch.dtype, float], dtype: torch.dtype) -> float:
    return table.get(dtype, table[torch.bfloat16] if dtype.itemsize == 1 else table[torch.float32])


def _apart(expected: Tensor, found: Tensor, dtype: torch.dtype, words: tuple[str, str]) -> str | None:
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    apart = ~torch.isclose(found, expected, rtol=0.0, atol=_limit(_ELEMENT, dtype) * scale, equal_nan=True)
    return _shown(expected, found, apart, words) if apart.any() else None


def _biased(expected: Tensor, found: Tensor, dtype: torch.dtype, words: tuple[str, str]) -> str | None:
    """Whether one is a multiple of the other by more than chance."""
    both = expected.isfinite() & found.isfinite()
    expected, found = expected[both], found[both]
    power = float((expected * expected).sum())
    if expected.numel() < _ENOUGH or not power:
        return None
    factor = float((expected * found).sum()) / power
    noise = float((found - factor * expected).square().sum() / power / expected.numel()) ** 0.5
    if abs(factor - 1) <= _limit(_BIAS, dtype) + 6 * noise:
        return None
    return f"every element is {factor:.6g} times what it is {words[1]}"


def _shown(expected: Tensor, found: Tensor, apart: Tensor, words: tuple[str, str]) -> str:
    """The smallest difference, which is the plainest example."""
    gaps = torch.where(apart, (found.double() - expected.double()).abs(), torch.inf).nan_to_num(nan=torch.inf)
    if not gaps.isfinite().any():
        gaps = torch.where(apart, 0.0, torch.inf)
    place = [int(i) for i in torch.unravel_index(gaps.argmin(), gaps.shape)]
    here, there = found[tuple(place)].item(), expected[tuple(place)].item()
    return f"smallest difference at {place}: {here:.6g} {words[0]}, {there:.6g} {words[1]}"
