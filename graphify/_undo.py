"""What an op writes, and how to take it back: each storage is saved before its first write."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._illegal import tensors_in
from ._touched import Touched

__all__ = ["BELOW_VIEWS", "TooLargeError", "UndoLog", "below", "bytes_of", "version_of", "writes_of"]

BELOW_VIEWS = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", torch._C._AutoDispatchBelowAutograd)


@contextlib.contextmanager
def below() -> Iterator[None]:
    """Below modes, subclasses, autocast and autograd: work inside leaves no mark, not even a version.

    Enter `torch.inference_mode(...)` outside of this, never inside: that brings autograd back.
    """
    with (
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunctionSubclass(),
        torch._C._DisableAutocast(),
        BELOW_VIEWS(),
    ):
        yield


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written, as autograd counts; nobody counts for an inference tensor."""
    return None if tensor.is_inference() else tensor._version


class _Hidden(NamedTuple):
    """Arguments that a kernel writes although its schema does not say so."""

    positions: tuple[int, ...]
    only_if: int | None = None  # position of the `training` flag that makes it write


_BATCH_NORM = _Hidden((3, 4), only_if=5)
_HIDDEN = {
    "aten::native_batch_norm": _BATCH_NORM,
    "aten::cudnn_batch_norm": _BATCH_NORM,
    "aten::miopen_batch_norm": _BATCH_NORM,
    "aten::_batch_norm_impl_index": _BATCH_NORM,
    "aten::batch_norm_gather_stats": _Hidden((3, 4)),
    "aten::batch_norm_gather_stats_with_counts": _Hidden((3, 4)),
    "aten::batch_norm_update_stats": _Hidden((1, 2)),
}


@functools.cache
def _marked(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that the schema marks as written."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def may_write(func: Any) -> bool:
    """Whether some call of this operator writes memory that it was given."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    return bool(_marked(func)) or schema.name in _HIDDEN or schema.name.startswith("c10d::")


def writes_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors whose memory (or, for `t_` and its like, whose metadata) this op call writes.

    Reads the schema's marks (in place, `out=`, foreach, fused optimizers, mutable custom ops), knows the
    kernels that write without a mark, and takes every tensor of a collective as written. A higher-order
    operator has no schema: its inner ops report for themselves.

    Example: `writes_of(torch.ops.aten.add_.Tensor, (x, 1), {})` gives `[x]`.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    if schema.name.startswith("c10d::"):
        return list(tensors_in([*args, *kwargs.values()]))
    hidden = _HIDDEN.get(schema.name)
    marked = _marked(func)
    if hidden is not None and (hidden.only_if is None or args[hidden.only_if]):
        marked += tuple((position, "") for position in hidden.positions)
    written = [args[position] if position < len(args) else kwargs.get(name) for position, name in marked]
    return list(tensors_in(written))


class TooLargeError(BaseException):
    """A run is about to write memory that nothing would put back; no error, so that a function's own `except` lets it pass."""


class _Host(NamedTuple):
    """What the host knows of a tensor; a device run neither makes nor undoes it."""

    tensor: Tensor
    storage: torch.UntypedStorage
    offset: Any
    shape: torch.Size
    stride: Any  # of ints
    version: int | None  # None: an inference tensor, which has no versions


class UndoLog:
    """Saves storages before their first write; `rollback` puts back what was.

    Example: `log.before_write(buffer); buffer.add_(1); log.rollback()` leaves `buffer` as it was, its version
    too.

    Storages above `limit` bytes are not copied: the tensors that would have been are listed in `skipped`. Where
    `spares` says so at that moment, such a write does not happen: `TooLargeError`, and again by `check`.
    The log holds the saved storages and tensors until `rollback` or `clear`. `touched` is for what its run does
    with gradients.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.skipped: list[Tensor] = []
        self.touched = Touched()
        self.spares: Callable[[], bool] = _never
        self._refused = False
        self._limit = limit
        self._seen: set[int] = set()
        self._born: set[int] = set()
        self._bytes: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._opaque: list[tuple[Tensor, Tensor]] = []
        self._host: dict[int, _Host] = {}

    def born(self, tensor: Tensor) -> None:
        """Say that this tensor's storage was made by the run itself: nothing is there to put back."""
        if tensor.layout is torch.strided:
            self._born.add(tensor.untyped_storage()._cdata)

    def before_write(self, tensor: Tensor) -> None:
        """Save what this tensor's storage holds, unless an earlier write already did."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            self._save_opaque(tensor)
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._born:
            return
        if id(tensor) not in self._host:
            self._host[id(tensor)] = _host(tensor, storage)
        large = self._limit is not None and storage.nbytes() > self._limit
        if large and self.spares():
            self._refused = True
            raise TooLargeError
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        if large:
            self.skipped.append(tensor)
            return
        with below():
            self._bytes.append((storage, bytes_of(storage, storage.nbytes()).clone()))

    def check(self) -> None:
        """Raise `TooLargeError` once more where a function has caught it after all."""
        if self._refused:
            raise TooLargeError

    def rollback(self, *, values_only: bool = False) -> None:
        """Put every saved value back, and versions, shapes and strides too unless `values_only`.

        A capture wants `values_only`: its host work did happen, once, and the first replay adds no version.
        A storage that has grown keeps its size, so that tensors over the grown part stay valid.
        """
        with below():
            for storage, saved in reversed(self._bytes):
                # `set_` inside gives a shrunk storage its size back.
                bytes_of(storage, saved.numel()).copy_(saved)
            for tensor, clone in reversed(self._opaque):
                tensor.copy_(clone)
            for host in [] if values_only else reversed(self._host.values()):
                _restore_host(host)
        self.clear()

    def clear(self) -> None:
        """Keep what was written and let go of what was saved."""
        for kept in (self._seen, self._born, self._bytes, self._opaque, self._host):
            kept.clear()

    def _save_opaque(self, tensor: Tensor) -> None:
        if all(tensor is not known for known, _ in self._opaque):
            with below():
                self._opaque.append((tensor, tensor.clone()))


def _never() -> bool:
    return False


def bytes_of(storage: torch.UntypedStorage, size: int) -> Tensor:
    """The first bytes of a storage, as one flat tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,), (1,))


def _host(tensor: Tensor, storage: torch.UntypedStorage) -> _Host:
    return _Host(tensor, storage, tensor.storage_offset(), tensor.size(), tensor.stride(), version_of(tensor))


def _restore_host(host: _Host) -> None:
    tensor, storage, offset, shape, stride, version = host
    now = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.size(), tensor.stride())
    if now != (storage._cdata, offset, shape, stride):
        tensor.set_(storage, offset, shape, stride)
    if version is not None and tensor._version != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
