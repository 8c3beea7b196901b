"""Two objects walked side by side: what differs, by path, and which tensors share memory."""

from __future__ import annotations

import dataclasses
import struct
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Comparison", "held_by", "tensor_differences"]

_SAME_SIZE_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ATOMS = (
    type(None),
    bool,
    int,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    range,
    slice,
)
_OWN = "has its own memory"
_SCHEMA = ("dtype", "device", "layout", "shape", "requires_grad")


class Comparison:
    """Collects the differences between an eager object and its graphed twin, and the pairs of tensors met."""

    def __init__(self) -> None:
        self.differences: list[str] = []
        self.suffix = ""
        self.pairs: list[tuple[str, Tensor, Tensor]] = []
        self._seen: set[tuple[int, int]] = set()
        self._gradients: set[int] = set()
        self._in_gradients = False

    def take(self) -> list[str]:
        """The differences since the last time."""
        taken, self.differences = self.differences, []
        return taken

    def walk(self, path: str, eager: Any, graphed: Any) -> None:
        """Compare two objects, containers and plain objects to any depth."""
        if isinstance(eager, Tensor) and isinstance(graphed, Tensor):
            self._tensors(f"{path}{self.suffix}", eager, graphed)
        elif not _same_type(type(eager), type(graphed)):
            self._differ(path, "type", _short(eager), _short(graphed))
        elif isinstance(eager, (float, complex)):
            if _bits(eager) != _bits(graphed):
                self._differ(path, "value", _short(eager), _short(graphed))
        elif isinstance(eager, _ATOMS):
            if eager != graphed:
                self._differ(path, "value", _short(eager), _short(graphed))
        elif self._first_time(eager, graphed):
            self._compound(path, eager, graphed)

    def gradients(self, path: str, eager: Any, graphed: Any) -> None:
        """Compare gradients: eager's may share memory with each other where the graphed ones are fresh.

        The stride of a dimension of size 1 is not compared: there it depends on whether torch took a gradient over
        or added to one.
        """
        outer, self._in_gradients = self._in_gradients, True
        self.walk(path, eager, graphed)
        self._in_gradients = outer

    def _compound(self, path: str, eager: Any, graphed: Any) -> None:
        if isinstance(eager, Mapping):
            self._mappings(path, eager, graphed)
        elif isinstance(eager, (list, tuple)):
            self._sequences(path, eager, graphed)
        elif isinstance(eager, (set, frozenset)):
            if eager != graphed:
                self._differ(path, "value", _short(eager), _short(graphed))
        elif isinstance(eager, torch.Generator):
            if not torch.equal(eager.get_state(), graphed.get_state()):
                self.differences.append(f"{path}: generator state differs")
        elif isinstance(eager, types.FunctionType):
            self._fields(path, dict(held_by(eager)), dict(held_by(graphed)))
        elif isinstance(eager, types.MethodType):
            self.walk(f"{path}.__self__", eager.__self__, graphed.__self__)
        elif not isinstance(eager, (type, types.ModuleType, types.BuiltinFunctionType)):
            self._fields(path, dict(_attributes(eager)), dict(_attributes(graphed)))

    def _tensors(self, path: str, eager: Tensor, graphed: Tensor) -> None:
        if self._in_gradients:
            self._gradients.add(len(self.pairs))
        self.pairs.append((path, eager, graphed))
        if eager is graphed or not self._first_time(eager, graphed):
            return
        found = tensor_differences(eager, graphed, single=not self._in_gradients)
        self.differences += [f"{path}: {text}" for text in found]
        self._gradients_of(path.removesuffix(self.suffix), eager, graphed)
        if eager._base is not None and graphed._base is not None:
            self._gradients_of(f"{path.removesuffix(self.suffix)}._base", eager._base, graphed._base)

    def _gradients_of(self, path: str, eager: Tensor, graphed: Tensor) -> None:
        if _is_leaf(eager) and _is_leaf(graphed) and (eager.grad is not None or graphed.grad is not None):
            self.gradients(f"{path}.grad", eager.grad, graphed.grad)

    def _mappings(self, path: str, eager: Mapping[Any, Any], graphed: Mapping[Any, Any]) -> None:
        if any(isinstance(key, Tensor) for key in eager):  # what an optimizer knows of each parameter
            self._sequences(path, [*eager.items()], [*graphed.items()])
            return
        if list(eager) != list(graphed):
            self._differ(path, "keys", str(list(eager)), str(list(graphed)))
        for key in eager:
            if key in graphed:
                self.walk(f"{path}[{key!r}]", eager[key], graphed[key])
        if hasattr(eager, "__dict__"):
            self._fields(path, vars(eager), vars(graphed))

    def _sequences(self, path: str, eager: Any, graphed: Any) -> None:
        if len(eager) != len(graphed):
            self._differ(path, "length", str(len(eager)), str(len(graphed)))
        names = getattr(eager, "_fields", None)
        for index, (left, right) in enumerate(zip(eager, graphed, strict=False)):
            self.walk(f"{path}.{names[index]}" if names else f"{path}[{index}]", left, right)

    def _fields(self, path: str, eager: Mapping[str, Any], graphed: Mapping[str, Any]) -> None:
        if set(eager) != set(graphed):
            self._differ(path, "attributes", str(sorted(eager)), str(sorted(graphed)))
        for name in eager:
            if name in graphed:
                self.walk(f"{path}.{name}", eager[name], graphed[name])

    def _first_time(self, eager: Any, graphed: Any) -> bool:
        pair = (id(eager), id(graphed))
        new = pair not in self._seen
        self._seen.add(pair)
        return new

    def _differ(self, path: str, what: str, eager: str, graphed: str) -> None:
        self.differences.append(f"{path}{self.suffix}: {what}: eager {eager}, graphed {graphed}")

    def compare_aliasing(self) -> None:
        """Add a difference for each tensor that is, or shares memory with, another one in one twin only."""
        paths = [path for path, _, _ in self.pairs]
        eager = _relations([tensor for _, tensor, _ in self.pairs])
        graphed = _relations([tensor for _, _, tensor in self.pairs])
        for index, (left, right) in enumerate(zip(eager, graphed, strict=True)):
            texts = _relation_text(index, left, paths), _relation_text(index, right, paths)
            fresh = index in self._gradients and left[0] == index and texts[1] == _OWN
            if texts[0] != texts[1] and not fresh:
                self._differ(paths[index], "aliasing", *texts)


def tensor_differences(eager: Tensor, graphed: Tensor, *, single: bool = True) -> list[str]:
    """What a user can tell apart in two tensors, memory aside; values bit for bit, NaN equal to NaN.

    `single`: whether the stride of a dimension of size 1 counts.
    """
    found = [
        f"{name}: eager {_plain(getattr(eager, name))}, graphed {_plain(getattr(graphed, name))}"
        for name in _SCHEMA
        if getattr(eager, name) != getattr(graphed, name)
    ]
    marks = [
        (name, getattr(eager, name)(), getattr(graphed, name)())
        for name in ("is_inference", "is_conj", "is_neg")
    ]
    for name, left, right in [*marks, ("is_leaf", _is_leaf(eager), _is_leaf(graphed))]:
        if left != right:
            found.append(f"{name}: eager {left}, graphed {right}")
    if type(eager) is not type(graphed):
        found.append(f"type: eager {type(eager).__name__}, graphed {type(graphed).__name__}")
    if eager.shape != graphed.shape or eager.dtype != graphed.dtype or eager.layout != torch.strided:
        return found
    strides = zip(eager.shape, eager.stride(), graphed.stride(), strict=True)
    if any(left != right for size, left, right in strides if single or size != 1):
        found.append(f"stride: eager {eager.stride()}, graphed {graphed.stride()}")
    return found + list(_value_differences(eager, graphed))


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # torch does not say, for one of several views of a base that was written since
        return False


def _value_differences(eager: Tensor, graphed: Tensor) -> Iterator[str]:
    with torch.no_grad():
        left, right = _dense(eager), _dense(graphed)
        if torch.equal(_as_ints(left), _as_ints(right)):
            return
        differ = _as_ints(left) != _as_ints(right)
        if left.dtype.is_floating_point:
            differ &= ~((left != left) & (right != right))
        if not bool(differ.any()):
            return
        first = tuple(int(index) for index in differ.nonzero()[0])
        count, total = int(differ.sum()), differ.numel()
        yield (
            f"values: {count} of {total} differ, first at {first}: eager {left[first].item()!r}, "
            f"graphed {right[first].item()!r}; largest difference {_largest(left[differ], right[differ])}"
        )


def _dense(tensor: Tensor) -> Tensor:
    """The values on the host, without conj or neg bits; a complex tensor gains a last dimension."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return torch.view_as_real(dense) if dense.is_complex() else dense


def _as_ints(tensor: Tensor) -> Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.view(_SAME_SIZE_INT[tensor.element_size()])


def _largest(left: Tensor, right: Tensor) -> str:
    return f"{float((left.double() - right.double()).abs().max()):.3g}"


Relation = tuple[int, tuple[int, int] | None]
"""The first tensor that is the same object, and the first that shares memory with the bytes between them."""


def _relations(tensors: list[Tensor]) -> list[Relation]:
    groups = _groups(tensors)
    objects: dict[int, int] = {}
    found: list[Relation] = []
    for index, tensor in enumerate(tensors):
        shared = None
        if groups[index] is not None:
            first = groups.index(groups[index])
            shared = (first, tensor.data_ptr() - tensors[first].data_ptr())
        found.append((objects.setdefault(id(tensor), index), shared))
    return found


def _groups(tensors: list[Tensor]) -> list[int | None]:
    """Number the storages so that those that overlap in memory have one number; None where there are no bytes."""
    spans = []
    for index, tensor in enumerate(tensors):
        if tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel():
            storage = tensor.untyped_storage()
            spans.append(
                (str(tensor.device), storage.data_ptr(), storage.data_ptr() + storage.nbytes(), index)
            )
    groups: list[int | None] = [None] * len(tensors)
    number, place, end = 0, "", 0
    for device, start, stop, index in sorted(spans):
        if device != place or start >= end:
            number, place, end = number + 1, device, stop
        end = max(end, stop)
        groups[index] = number
    return groups


def _relation_text(index: int, relation: Relation, paths: list[str]) -> str:
    same, shared = relation
    if same != index:
        return f"is {paths[same]}"
    if shared is not None and shared[0] != index:
        return f"shares memory with {paths[shared[0]]} at {shared[1]:+d} bytes"
    return _OWN


def _same_type(left: type, right: type) -> bool:
    """One class, or the same class statement run once for each twin."""
    return left is right or (left.__module__, left.__qualname__) == (right.__module__, right.__qualname__)


def _bits(number: Any) -> bytes:
    parts = (number.real, number.imag) if isinstance(number, complex) else (number,)
    return b"".join(b"nan" if part != part else struct.pack("d", part) for part in parts)


def held_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a plain function can remember between calls: closure cells, and the globals that its code names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell that is still empty
            continue
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if name in function.__globals__ and not isinstance(value, types.ModuleType):
            yield name, value


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    registered = ("_parameters", "_buffers", "_modules") if isinstance(value, nn.Module) else ()
    for name, held in getattr(value, "__dict__", {}).items():
        if name in registered:
            yield from held.items()
        else:
            yield name, held
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value


def _short(value: object) -> str:
    if isinstance(value, Tensor) or dataclasses.is_dataclass(value) or len(repr(value)) > 60:
        return type(value).__name__
    return f"{value!r} ({type(value).__name__})"
