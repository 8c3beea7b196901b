"""Who stands by an eager twin that is trained: it knows the right gradient even where eager raises."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .._layout import with_bits

__all__ = ["Witness"]

Saved = tuple[Tensor, int, Tensor]
"""An alias of what autograd saved, its version then, and a copy of it."""


class Witness:
    """Keeps what autograd saves as it was then; `modified` says that something used since had been written.

    Eager raises in a backward that meets a saved tensor written after the forward. A graphed one must raise as well,
    or give the gradient of the forward that was made: which is what a backward gives that is witnessed.
    """

    def __init__(self) -> None:
        self.modified = False

    def standing_by(self) -> AbstractContextManager[None]:
        """Around each call that autograd records."""
        hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(
            self._save, self._give_back
        )
        return hooks

    def _save(self, tensor: Tensor) -> Saved:
        # Not the tensor itself: autograd's node would hold it and it the node.
        return tensor.detach(), tensor._version, _as_it_is(tensor)

    def _give_back(self, saved: Saved) -> Tensor:
        alias, version, copy = saved
        self.modified |= alias._version != version
        return copy


def _as_it_is(tensor: Tensor) -> Tensor:
    """A copy with the very strides and offset, for kernels choose by them."""
    if tensor.layout != torch.strided:
        return tensor.detach().clone()
    memory: Any = tensor.untyped_storage()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(memory.clone(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return with_bits(copy, tensor)
