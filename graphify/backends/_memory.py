"""Filling, copying and spoiling memory, for backends that need no device API."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._undo import below
from .base import STALE, Copy, Recording, Replay

__all__ = ["Slot", "SpoiledLoan", "copier", "copying", "holders", "is_closed", "is_oom", "spoil", "whole"]


_CLOSED = "_graphify_closed"


def copier(copies: Sequence[Copy]) -> Callable[[Sequence[Tensor]], None]:
    """Plan the fill of these destinations: one `copy_`, or one foreach copy per dtype.

    Sources have the shapes and dtypes of their destinations: the signature has seen to that.
    """
    groups: dict[Any, list[Copy]] = {}
    for target, index in copies:
        groups.setdefault((target.dtype, target.is_inference()), []).append((target, index))
    fills = [_filler(group, inference) for (_, inference), group in groups.items()]

    def fill(sources: Sequence[Tensor]) -> None:
        _refuse_closed(sources)
        for one in fills:
            one(sources)

    return fill


def _filler(group: Sequence[Copy], inference: bool) -> Callable[[Sequence[Tensor]], None]:
    targets, indices = [t for t, _ in group], [i for _, i in group]

    def plain(sources: Sequence[Tensor]) -> None:
        if len(targets) == 1:
            targets[0].copy_(sources[indices[0]])
        else:
            torch._foreach_copy_(targets, [sources[i] for i in indices])

    def ungraded(sources: Sequence[Tensor]) -> None:
        if not torch.is_grad_enabled():
            plain(sources)
            return
        with torch.no_grad():
            plain(sources)

    def inferred(sources: Sequence[Tensor]) -> None:
        with torch.inference_mode():
            plain(sources)

    return inferred if inference else ungraded


def copying(recording: Recording, copies: Sequence[Copy], results: Sequence[Tensor]) -> Replay:
    """Copies around a replay, without any device's help."""
    originals = [t.detach() for t in results]

    def launch() -> Sequence[Tensor]:
        fresh = [torch.empty_like(t) for t in originals]
        recording.replay()
        for new, t in zip(fresh, originals, strict=True):
            new.copy_(t)
        return fresh

    return Replay(copier(copies), launch)


class SpoiledLoan:
    """A copy that stands for graph memory; closing spoils it with NaN and a version bump.

    An alias would show the next replay's numbers: on a CPU nobody can close the views of a storage.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().clone()

    def idle(self) -> bool:
        """Never: a copy holds the numbers of its own replay only."""
        return False

    def close(self) -> None:
        """Spoil the copy."""
        spoil(whole(self.tensor.untyped_storage(), self.tensor.dtype))
        setattr(self.tensor, _CLOSED, True)
        if not self.tensor.is_inference():
            torch.autograd.graph.increment_version(self.tensor)


def is_closed(tensor: Tensor) -> bool:
    """Whether this is lent memory whose loan has ended."""
    if hasattr(tensor, _CLOSED):
        return True
    try:
        tensor.data_ptr()
    except RuntimeError as error:  # a storage that was closed says so; others have no address at all
        return STALE in str(error)
    return False


def _refuse_closed(sources: Sequence[Tensor]) -> None:
    if any(hasattr(t, _CLOSED) for t in sources):
        raise RuntimeError(f"a static output that {STALE}")


class Slot:
    """The memory of a recorded result, which takes later results of the same kind."""

    def __init__(self, target: Tensor) -> None:
        self.shape, self.dtype = target.shape, target.dtype
        dims = zip(range(target.dim()), target.shape, target.stride(), strict=True)
        # Where the stride is 0 one element stands for all; `copy_` refuses to write it several times.
        self._repeated = [dim for dim, size, stride in dims if size > 1 and stride == 0]
        self._target = self._narrowed(target)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype}"

    def refill(self, new: Tensor) -> bool:
        """Copy a new result into place; False, and nothing done, if it is of another kind."""
        if new.shape != self.shape or new.dtype != self.dtype:
            return False
        self._target.copy_(self._narrowed(new) if self._repeated else new)
        return True

    def _narrowed(self, tensor: Tensor) -> Tensor:
        for dim in self._repeated:
            tensor = tensor.narrow(dim, 0, 1)
        return tensor


def holders(storage_key: int) -> int:
    """How many tensors hold the storage with this `_cdata`, Python's own wrapper of it left out."""
    return torch._C._storage_Use_Count(storage_key) - _wrappers()


@functools.cache
def _wrappers() -> int:
    """What the wrapper adds to the count, which depends on torch's version."""
    with below():
        storage = torch.empty(1).untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


_INTEGERS = frozenset(
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32}
    | {torch.int64}
)


def whole(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """All of a storage as one flat tensor: integers and bool in their dtype, anything else as bytes."""
    if dtype not in _INTEGERS or storage.nbytes() % dtype.itemsize:
        dtype = torch.uint8
    with torch.inference_mode(False), below():
        flat = torch.empty(0, dtype=dtype, device=storage.device)
        return flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


def spoil(flat: Tensor) -> None:
    """Fill a `whole` storage with what nobody takes for a result: NaN, the least integer, True."""
    if flat.dtype is torch.bool:
        value = 1
    elif flat.dtype is torch.uint8:
        value = 255  # 0xff in every byte is NaN in each usual floating point format
    else:
        value = torch.iinfo(flat.dtype).min or torch.iinfo(flat.dtype).max
    with torch.inference_mode(False), below():
        flat.fill_(value)


def is_oom(error: BaseException) -> bool:
    """Whether memory ran out, on the host or on a device."""
    host = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return host or isinstance(error, (MemoryError, torch.OutOfMemoryError))
