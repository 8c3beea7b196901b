"""The leaves of a twin that collect gradients, and how both twins come together again after an act."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._layout import family_key, overlaps_itself
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
    """Every leaf that may hold a gradient: of the state, and of what arguments were made from."""
    yield from (tensor for tensor in _state(twin) if tensor.is_leaf)
    yield from (tensor for tensor in twin.world.made.values() if tensor.is_leaf)


def forget(twin: Twin) -> None:
    """After a backward that raised: nothing that it may have half done, and no result whose graph it may have freed."""
    for kept in twin.held:
        kept.clear()
    for leaf in collecting(twin):
        leaf.grad = None
    twin.forget()


def align(act: Act, eager: Twin, graphed: Twin) -> None:
    """Where a sum of gradients may be rounded in another order: if both are close, make them equal."""
    if not _adds_up_elsewhere(act, eager):
        return
    for left, right in zip(collecting(eager), collecting(graphed), strict=True):
        if left.grad is not None and right.grad is not None and _close(left.grad, right.grad):
            with torch.no_grad():
                right.grad.copy_(left.grad)
    if act.keeps and eager.held:
        given, found = eager.held[-1], graphed.held[-1]
        found[:] = [_like(left, right) for left, right in zip(given, found, strict=True)]


def _like(left: Any, right: Any) -> Any:
    """Eager's gradient with its strides, if the graphed one is close."""
    if isinstance(left, Tensor) and isinstance(right, Tensor) and _close(left, right):
        return right if overlaps_itself(left) else torch.empty_like(left).copy_(left)
    return right


def _adds_up_elsewhere(act: Act, twin: Twin) -> bool:
    """Whether a backward goes through several calls, or from a result that is an argument or a parameter itself.

    Eager then adds up all parts in the order of its graph; a graphed call adds up its own parts first.
    """
    made = [twin.outcomes[-1 - ago] for ago in getattr(act, "ago", ()) if ago < len(twin.outcomes)]
    if not made:
        return False
    given, state = [tensor for outcome in made for tensor in arguments(outcome)], _state(twin)
    memory = {family_key(tensor) for tensor in (*given, *state) if tensor.requires_grad}
    returned = {id(tensor) for outcome in twin.outcomes for tensor in floats(outcome.value)}
    return (
        len(made) > 1
        or any(family_key(tensor) in memory for outcome in made for tensor in results(outcome))
        or any(id(tensor) in returned for tensor in given)
        or any(tensor.grad_fn is not None and tensor._version for tensor in state)
    )


def _close(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    tolerance = _ROUNDING.get(left.dtype, 1e-10)
    size = float(left.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if left.numel() else 0.0
    return torch.allclose(left, right, rtol=tolerance, atol=tolerance * max(size, 1.0), equal_nan=True)


def _state(twin: Twin) -> list[Tensor]:
    plain = twin.plain
    return floats(dict(held_by(plain)) if isinstance(plain, types.FunctionType) else plain)
