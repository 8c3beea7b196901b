"""Which elements of memory a run writes, also where it writes what is there already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._illegal import tensors_in
from ._layout import family_key, with_bits
from ._material import memory_of
from ._undo import below, bytes_of, writes_of

__all__ = ["Extra", "Mark", "Marks"]


class Mark(NamedTuple):
    """What a run wrote of one memory: by what name, which elements, and all that it left there."""

    name: str
    tensor: Tensor
    mask: Tensor
    left: Tensor


class Extra:
    """Elements that one run writes and another leaves alone: a third run from another start shows whether they change.

    There a start holds what the memory holds elsewhere, before a run or after, so that an index stays legal.
    """

    def __init__(self, mark: Mark, places: Tensor, left: Tensor) -> None:
        self.name, self.tensor, self.places, self._left = mark.name, mark.tensor, places, left
        self._start: Tensor | None = None

    def begin(self, memory: Tensor) -> None:
        """Change these elements, unless the memory holds one number only."""
        start = _unlike(memory[self.places], memory, self._left)
        if start is not None:
            memory[self.places] = start
        self._start = start

    @property
    def unseen(self) -> bool:
        """Whether nothing could be changed."""
        return self._start is None

    def changed(self, mark: Mark | None) -> int:
        """How many of the elements a run from there did not leave as they were."""
        if self._start is None or mark is None:
            return 0
        return int((mark.left[self.places] != self._start).sum())


class Marks:
    """Marks each element that a watched run writes of the memory that `wanted` asks for.

    An operator that writes there runs twice, first on copies that hold something else at each place: what it
    leaves there of that, it did not write. So nobody is ever given what might be no legal index. What no dispatcher
    sees is not marked.
    """

    def __init__(self, wanted: Callable[[Tensor], bool]) -> None:
        self._wanted = wanted
        self.masks: dict[int, tuple[Tensor, Tensor]] = {}
        """By memory: a tensor that lies there, and for each byte whether it was written."""

    def around(self, func: Any, args: Any, kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Mark what this operator writes; for `Watch.around`."""
        written = writes_of(func, args, kwargs)
        mine = [t for t in written if self._wanted(t)]
        if not mine:
            return call()
        given = [id(t) for t in tensors_in((args, kwargs))]
        alone = func.namespace != "c10d" and all(given.count(id(t)) == 1 and _is_plain(t) for t in written)
        with torch.inference_mode(False), below():
            trace = _Trace(func, args, kwargs, written, mine) if alone else None
        result = call()
        with torch.inference_mode(False), below():
            for tensor in mine:
                mask = self._mask_of(tensor)
                mask |= trace.of(tensor) if trace is not None else _shown(tensor, mask)
        return result

    def found(self, names: Mapping[int, str]) -> dict[int, Mark]:
        """What was written, by memory."""
        made: dict[int, Mark] = {}
        for key, (tensor, mask) in self.masks.items():
            size = tensor.element_size()
            elements = mask[: mask.numel() // size * size].view(-1, size).any(1)
            name = names.get(key, f"a tensor {tuple(tensor.shape)} from outside")
            made[key] = Mark(name, tensor, elements, memory_of(tensor).clone())
        return made

    def _mask_of(self, tensor: Tensor) -> Tensor:
        key = family_key(tensor)
        if key not in self.masks:
            flat = _bytes_of(tensor)
            self.masks[key] = tensor, torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
        return self.masks[key][1]


class _Trace:
    """What one operator writes, from a run on copies."""

    def __init__(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        written: Sequence[Tensor],
        mine: Sequence[Tensor],
    ) -> None:
        self._before = {family_key(t): _bytes_of(t).clone() for t in mine}
        self._other = {family_key(t): _otherwise(self._before[family_key(t)], t) for t in mine}
        self._left = {key: flat.clone() for key, flat in self._other.items()}
        others = {id(t): _bytes_of(t).clone() for t in written if family_key(t) not in self._left}
        shadow = {
            id(t): _view(others[id(t)] if id(t) in others else self._left[family_key(t)], t) for t in written
        }
        func(*_replaced(args, shadow), **_replaced(kwargs, shadow))

    def of(self, tensor: Tensor) -> Tensor:
        """Which bytes were written, now that the operator has run; all of an element, or none."""
        key, size = family_key(tensor), tensor.element_size()
        changed = (self._left[key] != self._other[key]) | (_bytes_of(tensor) != self._before[key])
        rows = changed[: changed.numel() // size * size].view(-1, size)
        rows.copy_(rows.any(1, keepdim=True).expand_as(rows))
        return changed


def _unlike(here: Tensor, memory: Tensor, left: Tensor) -> Tensor | None:
    """Other numbers than these, of a kind that is sure to be legal; None where nobody knows of any."""
    if here.dtype == torch.bool:
        return ~here
    if here.is_floating_point() or here.is_complex():
        return torch.where(here == 1, 2, 1).to(here.dtype)
    low = torch.minimum(memory.min(), left.min())
    high = torch.maximum(memory.max(), left.max())
    return None if bool(low == high) else torch.where(here == high, low, high)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _bytes_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return bytes_of(storage, storage.nbytes())


def _otherwise(flat: Tensor, tensor: Tensor) -> Tensor:
    """Bytes that differ at each place; of a bool only one bit may."""
    return flat.bitwise_xor(1) if tensor.dtype == torch.bool else flat.bitwise_not()


def _view(flat: Tensor, like: Tensor) -> Tensor:
    """These bytes, seen as a tensor sees its own."""
    seen = torch.empty(0, dtype=like.dtype, device=like.device)
    seen.set_(flat.untyped_storage(), like.storage_offset(), like.size(), like.stride())
    return with_bits(seen, like)


def _shown(tensor: Tensor, mask: Tensor) -> Tensor:
    """Every byte of what a tensor shows: that much may be written, where nobody can tell more."""
    size = tensor.element_size()
    places = torch.arange(mask.numel() // size, device=mask.device)
    shown = torch.zeros_like(mask)
    where = places.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    shown[: len(places) * size].view(-1, size)[where.reshape(-1)] = True
    return shown


def _replaced(given: Any, shadow: dict[int, Tensor]) -> Any:
    """The same arguments with copies in place of what is written."""
    if isinstance(given, Tensor):
        return shadow.get(id(given), given)
    if isinstance(given, dict):
        return {key: _replaced(value, shadow) for key, value in given.items()}
    return type(given)(_replaced(v, shadow) for v in given) if isinstance(given, (list, tuple)) else given
