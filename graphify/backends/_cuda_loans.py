"""Graph memory in other hands: lent to a caller until the next replay, or under storages that do not own it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from .._layout import with_bits
from ._memory import holders
from .base import STALE

__all__ = ["CudaLoan", "unowned"]


class CudaLoan:
    """Graph memory under a storage of its own, so that views and detached copies share its fate."""

    def __init__(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        self.storage = _alias_of(memory)
        # The lent storage owns nothing: it must keep the graph's memory for as long as anybody holds it.
        self.storage._graphify_memory = memory
        self.tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.tensor.set_(self.storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        self._alone = self._holders()

    def _holders(self) -> tuple[int, int]:
        return sys.getrefcount(self.tensor), holders(self.storage._cdata)

    def idle(self) -> bool:
        """Whether neither the tensor nor another tensor on its storage is held elsewhere."""
        if self._holders() != self._alone:
            return False
        # Autograd may still hold it where no count shows: the new version makes its use there an error.
        if not self.tensor.is_inference():
            torch.autograd.graph.increment_version(self.tensor)
        return True

    def close(self) -> None:
        """Make every later use raise, views and detached copies included."""
        text = f"a static output that {STALE}"
        torch._C._set_storage_data_ptr_access_error_msg(self.storage._cdata, text)


def _alias_of(memory: torch.UntypedStorage) -> Any:
    """A storage on the same addresses that owns nothing."""
    return torch._C._construct_storage_from_data_pointer(memory.data_ptr(), memory.device, memory.nbytes())


def unowned(tensor: Tensor, pool: Any, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """The same tensor on a storage that keeps the pool, but not its block in it; `storages` has those made so far."""
    memory = tensor.untyped_storage()
    if memory._cdata not in storages:
        storages[memory._cdata] = _alias_of(memory)
        storages[memory._cdata]._graphify_pool = pool  # type: ignore[attr-defined]
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        same = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        same.set_(storages[memory._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
    return with_bits(same, tensor)
