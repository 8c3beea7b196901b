"""The leaves of a twin that collect gradients, and how both twins come together again after an act."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._layout import overlaps_itself
from ._compare import held_by
from ._twins import Act, Outcome, Twin
from ._worlds import reachable

__all__ = ["align", "arguments", "collecting", "floats", "forget", "parameters", "results"]

_ROUNDING = {torch.bfloat16: 0.1, torch.float16: 0.01, torch.float32: 1e-4, torch.complex64: 1e-4}


def floats(value: Any) -> list[Tensor]:
    """The float and complex tensors inside a value, each once."""
    found = reachable(value, set())
    return [t for t in found if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]


def parameters(twin: Twin) -> list[Tensor]:
    """The leaves that a twin holds and that require gradients."""
    return [tensor for tensor in _state(twin) if tensor.requires_grad and tensor.is_leaf]


def arguments(outcome: Outcome) -> list[Tensor]:
    """The arguments of a call that require gradients, leaves or not."""
    return [tensor for tensor in floats((outcome.args, outcome.kwargs)) if tensor.requires_grad]


def results(outcome: Outcome, picks: tuple[int, ...] = ()) -> list[Tensor]:
    """The results of a call that require gradients: all, or these, counted round and round."""
    found = [tensor for tensor in floats(outcome.value) if tensor.requires_grad]
    if not picks or not found:
        return found
    return [found[index] for index in sorted({pick % len(found) for pick in picks})]


def collecting(twin: Twin) -> Iterator[Tensor]:
    """Every leaf that may hold a gradient: of the state, and of all arguments so far."""
    yield from (tensor for tensor in _state(twin) if tensor.is_leaf)
    for outcome in twin.outcomes:
        for tensor in floats((outcome.args, outcome.kwargs)):
            yield from (t for t in (tensor, tensor._base) if t is not None and t.is_leaf)


def forget(act: Act, twin: Twin) -> None:
    """After a backward that raised: nothing that it may have half done, and not the results that it went back from."""
    for kept in twin.held:
        kept.clear()
    for leaf in collecting(twin):
        leaf.grad = None
    for ago in getattr(act, "ago", ()):
        if ago < len(twin.outcomes):
            twin.drop(-1 - ago)


def align(act: Act, eager: Twin, graphed: Twin) -> None:
    """Where a backward went through several calls, sums may be rounded in another order: if close, make them equal."""
    if not _goes_through_several(act, eager):
        return
    for left, right in zip(_gradients(eager), _gradients(graphed), strict=False):
        if left is not None and right is not None and not overlaps_itself(right) and _close(left, right):
            with torch.no_grad():
                right.copy_(left)


def _goes_through_several(act: Act, twin: Twin) -> bool:
    made = [twin.outcomes[-1 - ago] for ago in getattr(act, "ago", ()) if ago < len(twin.outcomes)]
    chained = [tensor for outcome in made for tensor in arguments(outcome)] + (_state(twin) if made else [])
    return len(made) > 1 or any(tensor.requires_grad and not tensor.is_leaf for tensor in chained)


def _gradients(twin: Twin) -> list[Tensor | None]:
    return [leaf.grad for leaf in collecting(twin)] + floats(twin.held[-1:])


def _close(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    tolerance = _ROUNDING.get(left.dtype, 1e-10)
    size = float(left.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if left.numel() else 0.0
    return torch.allclose(left, right, rtol=tolerance, atol=tolerance * max(size, 1.0), equal_nan=True)


def _state(twin: Twin) -> list[Tensor]:
    plain = twin.plain
    return floats(dict(held_by(plain)) if isinstance(plain, types.FunctionType) else plain)
