"""Gradients of a run's results for made-up incoming ones: no `.grad` changes and no hook runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ._autograd import unhooked

__all__ = ["gradients"]


def gradients(
    results: Sequence[Tensor],
    incoming: Sequence[Tensor],
    wanted: Mapping[str, Tensor],
    is_oom: Callable[[BaseException], bool],
) -> dict[str, Tensor | None] | None:
    """By name what these gradients of the results give each of these; None where their backward raises.

    The graph is retained. An error is no answer here: the caller's own backward raises it when it comes.
    """
    if not results or not wanted:
        return {}
    tensors = list(wanted.values())
    try:
        with unhooked(tensors):
            found: Sequence[Tensor | None] = torch.autograd.grad(
                results, tensors, incoming, retain_graph=True, allow_unused=True
            )
    except RuntimeError as error:
        if is_oom(error):
            raise
        return None
    return dict(zip(wanted, found, strict=True))
