"""One twin's world: its own copy of every tensor and object that a sequence of calls hands to it."""

from __future__ import annotations

import copy
import dis
import functools
import pickle
import random
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._layout import with_bits
from ._checks import check_callable
from ._compare import held_by

__all__ = ["Late", "Rng", "World", "reachable", "refuse_shared_state"]


class Late:
    """An argument that is looked up in each twin at the moment of the call.

    `get(twin, outputs)` takes the twin (the module, the object or the function made for it) and the list of
    results so far, one per call, None for a call that raised.

    Example: feed a result back, or hand in a buffer that the module holds itself::

        Call((Late(lambda twin, outputs: outputs[-1]["hidden"]),))
        Call((Late(lambda twin, outputs: twin.cache[:4]),))
    """

    def __init__(self, get: Callable[[Any, list[Any]], Any]) -> None:
        check_callable("Late: get", get, "a function of twin and outputs", ())
        self._get = get

    def resolve(self, world: World) -> Any:
        """The object to pass in this world."""
        return self._get(world.twin, world.outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Late:
        raise TypeError("a Late argument cannot be inside an object that is copied")


class World:
    """Copies what calls mention, once: what two calls share in the original is shared in the copy.

    Tensors keep strides, offset, conj and neg bits, requires_grad, inference and Parameter; tensors that share
    memory go on sharing it. A tensor with a grad_fn becomes a leaf.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.twin: Any = None
        self.outputs: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._made: dict[Hashable, Tensor] = {}
        self._bytes: dict[int, Tensor] = {}
        self._alive: list[object] = []

    def copy(self, value: Any) -> Any:
        """This world's version of a value."""
        self._alive.append(value)
        for found in reachable(value, set()):
            if isinstance(found, Late):
                self._memo[id(found)] = found.resolve(self)
            elif id(found) not in self._memo:
                self._memo[id(found)] = self._tensor(found)
        return copy.deepcopy(value, self._memo)

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """This world's copy of a tensor that is made on first use of `key`."""
        if key not in self._made:
            self._made[key] = self._tensor(make())
        return self._made[key]

    @property
    def made(self) -> Mapping[Hashable, Tensor]:
        """The tensors made by key so far."""
        return self._made

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            moved: Tensor = (
                copy.deepcopy(tensor) if self.device is None else tensor.to(self.device, copy=True)
            )
            return moved
        memory = self._memory(tensor)
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            twin = torch.empty(0, dtype=tensor.dtype, device=memory.device)
            twin.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
            twin = with_bits(twin, tensor)
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=False)
        twin.requires_grad_(tensor.requires_grad)
        if tensor.is_leaf and tensor.grad is not None:
            twin.grad = self.copy(tensor.grad)
        return twin

    def _memory(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key == 0 or key not in self._bytes:
            self._alive.append(storage)
            every_byte = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._bytes[key] = every_byte.to(self.device or tensor.device, copy=True)
        return self._bytes[key]


_ATOMS = frozenset({bool, int, float, complex, str, bytes, torch.dtype, torch.device})


def reachable(value: Any, seen: set[int]) -> Iterator[Any]:
    """The tensors and Late arguments inside a value, through containers and plain objects."""
    if value is None or type(value) in _ATOMS or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (Tensor, Late)):
        yield value
        return
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)
    elif isinstance(value, types.MethodType):
        inside = [value.__self__]
    elif isinstance(value, functools.partial):
        inside = [value.func, value.args, value.keywords]
    else:
        inside = []
    if not isinstance(value, (type, types.FunctionType, types.ModuleType)):
        inside += getattr(value, "__dict__", {}).values()
        inside += _in_slots(value)
    for item in inside:
        yield from reachable(item, seen)


def _in_slots(value: Any) -> list[Any]:
    kind: Any = type(value)
    return [getattr(value, slot) for slot in _slots_of(kind) if hasattr(value, slot)]


@functools.lru_cache(256)
def _slots_of(kind: Any) -> tuple[str, ...]:
    described = [item for cls in kind.__mro__ for item in vars(cls).items()]
    return tuple(name for name, found in described if isinstance(found, types.MemberDescriptorType))


def refuse_shared_state(target: Any) -> None:
    """A plain function cannot be copied with its state: two twins of it would move the same objects."""
    if not isinstance(target, types.FunctionType):
        return
    cells = target.__code__.co_freevars
    written = {
        step.argval
        for step in dis.get_instructions(target)
        if step.opname in ("STORE_GLOBAL", "STORE_DEREF") and step.argval not in target.__code__.co_cellvars
    }
    for name, value in held_by(target):
        mutable = name in cells and isinstance(value, (list, dict, set, bytearray))
        tensors = isinstance(value, nn.Module) or any(True for _ in reachable(value, set()))
        if name in written or mutable or tensors:
            raise TypeError(
                f"assert_matches_eager: `{target.__qualname__}` uses `{name}` from outside, so its twins would share "
                f"it. Pass a factory that builds the function with its state: make=lambda: ..."
            )


class Rng:
    """Where the random streams stand: torch's CPU generator, the device's, `random` and NumPy (if loaded)."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device if device is not None and device.type != "cpu" else None
        self.states: dict[str, Any] = {
            "torch's CPU generator": torch.get_rng_state(),
            "random": random.getstate(),
        }
        if self._device is not None:
            self.states[f"{self._device}'s generator"] = self._module().get_rng_state(self._device)
        if "numpy" in sys.modules:
            self.states["numpy.random"] = sys.modules["numpy"].random.get_state()

    def restore(self) -> None:
        """Put every stream back to where it stood."""
        torch.set_rng_state(self.states["torch's CPU generator"])
        random.setstate(self.states["random"])
        if self._device is not None:
            self._module().set_rng_state(self.states[f"{self._device}'s generator"], self._device)
        if "numpy.random" in self.states:
            sys.modules["numpy"].random.set_state(self.states["numpy.random"])

    def differences(self, other: Rng) -> list[str]:
        """The streams that stand elsewhere in `other`."""
        return [name for name, state in self.states.items() if not _same_state(state, other.states.get(name))]

    def _module(self) -> Any:
        return torch.get_device_module(self._device)


def _same_state(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return pickle.dumps(left) == pickle.dumps(right)
