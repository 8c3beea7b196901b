"""What the runs of a proof are given, and what they leave: copies, other padding, whole storages, weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ._layout import first_byte, span, view_of
from ._watch import Watch

__all__ = ["copied", "from_batch", "memory_of", "stirred", "weights", "written"]


def copied(tensor: Tensor) -> Tensor:
    """A copy that is laid out alike, gaps included."""
    low, high = span([tensor])
    flat = torch.empty(high - low, dtype=torch.uint8, device=tensor.device)
    flat.copy_(torch.empty_like(flat).set_(tensor.untyped_storage(), low, (high - low,), (1,)))
    return view_of(flat, tensor, first_byte(tensor) - low, tensor.shape, tensor.stride())


def from_batch(buffer: Tensor, live: tuple[int, ...]) -> None:
    """Other padding of a kind that is sure to be legal: rows of the call itself, the last first."""
    for dim, size in enumerate(live):
        if behind := buffer.shape[dim] - size:
            rows = (-1 - torch.arange(behind, device=buffer.device)) % size
            buffer.narrow(dim, size, behind).copy_(buffer.index_select(dim, rows))


def memory_of(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, rows that it does not show included."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


def stirred(memory: Tensor) -> Tensor:
    """Values near 1 that no run would write by chance."""
    return (
        torch.arange(memory.numel(), device=memory.device, dtype=torch.float64)
        .cos()
        .div(2)
        .add(1)
        .to(memory.dtype)
    )


def weights(result: Tensor) -> Tensor:
    """Incoming gradients that differ from element to element."""
    numbers = torch.arange(1, result.numel() + 1, device=result.device, dtype=torch.float32).cos()
    return numbers.reshape(result.shape).to(result.dtype)


def written(watch: Watch, names: dict[int, str]) -> dict[str, Tensor]:
    """The outside memory that a run wrote, as it left it: whole storages, since rows behind a view count."""
    return {
        names.get(key, f"a tensor {tuple(tensor.shape)} from outside"): memory_of(tensor).clone()
        for key, tensor in watch.outside.items()
        if key in watch.written
    }
