"""Kinds of places where Python holds what a run can read: slots, plain content as a whole, what tensors are over."""

from __future__ import annotations

import enum
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._layout import family_key
from ._raw import contents_of, del_item, get_item, is_a, member_of, set_item

__all__ = [
    "MISSING",
    "Bulk",
    "Change",
    "Place",
    "TensorFacts",
    "entries",
    "hyperparameters",
    "is_plain",
    "item_name",
    "nothing",
    "same",
]

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()

_PLAIN: tuple[Any, ...] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
)
_PLAIN += (torch.layout, torch.memory_format, type(Ellipsis), range, slice)


def is_plain(value: Any) -> bool:
    """Whether a value is compared by value rather than by identity."""
    if type(value) is tuple or type(value) is frozenset:
        return all(map(is_plain, value))
    return is_a(value, _PLAIN)


def same(new: Any, old: Any) -> bool:
    """Whether a place still holds what it held: plain values by type and value, others by identity."""
    if new is old:
        return True
    if type(new) is not type(old) or not is_plain(new):
        return False
    return repr(new) == repr(old) if isinstance(new, (float, complex, tuple)) else bool(new == old)


class Place(NamedTuple):
    """One slot that Python code can read.

    Kinds: "item" of a dict or list, "field" of an instance's or module's `__dict__` or of a namespace,
    "class" attribute, closure "cell", "attr" in a slot, "part" of a function, "type" of an object or of the
    "referent" of a weak reference, "bulk" for a long list of plain values.
    """

    container: Any
    key: Any
    kind: str
    name: str

    def read(self) -> Any:
        """What the place holds now, or MISSING."""
        try:
            if self.kind in ("item", "field"):
                return get_item(self.container, self.key, MISSING)
            if self.kind == "class":
                return vars(self.container)[self.key]
            if self.kind == "variable":
                return self.container.get()
            if self.kind == "cell":
                return self.container.cell_contents
            if self.kind == "type":
                return type(self.container)
            if self.kind == "referent":
                return type(self.container())
            return member_of(type(self.container), self.key).__get__(self.container)
        except (LookupError, AttributeError, ValueError):
            return MISSING

    def write(self, value: Any) -> None:
        """Make the place hold a value; MISSING empties it."""
        container, key = self.container, "cell_contents" if self.kind == "cell" else self.key
        container = container() if self.kind == "referent" else container
        owner: Any = type if self.kind == "class" else object
        if self.kind == "variable":
            container.set(value)
        elif is_a(container, MappingProxyType):
            return  # what it shows is somebody else's
        elif self.kind in ("item", "field"):
            del_item(container, key) if value is MISSING else set_item(container, key, value)
        elif value is MISSING:
            owner.__delattr__(container, key)
        else:
            owner.__setattr__(container, key, value)

    @property
    def variable(self) -> str:
        """The name by which code reaches it: of an item, that of what holds it."""
        if isinstance(self.key, str) and self.kind in ("field", "class", "cell", "attr"):
            return self.key
        return self.name.partition("[")[0].rpartition(".")[2]

    @property
    def id(self) -> tuple[int, Any]:
        """What makes two places the same one."""
        return (id(self.container), self.key)


class Bulk(NamedTuple):
    """Plain content that is compared as a whole; `moved` when another content means other memory. `holder` has it.

    What a list, deque, set or dict held is put back with all other containers.
    """

    read: Callable[[], Any]
    content: Any
    restore: Callable[[], Any]
    name: str
    moved: bool = False
    holder: Any = None

    @classmethod
    def of(cls, container: Any, name: str) -> Bulk:
        """A list, dict, deque or set of plain values."""
        return cls(lambda: container, contents_of(container), nothing, name)

    @classmethod
    def of_objects(cls, container: Any, items: Callable[[], Iterable[Any]], name: str) -> Bulk:
        """Many objects that count by identity, far cheaper to compare than a place each."""
        content = list(items())
        kept = _contents(container)

        def read() -> str:
            pairs = itertools.zip_longest(items(), content, fillvalue=MISSING)
            return _THESE if all(itertools.starmap(operator.is_, pairs)) else "others"

        return cls(read, _THESE, lambda: _refill(container, kept), name, True, container)


_THESE = "these objects"


def _contents(container: Any) -> Any:
    """A list, or a dict of dicts, with what is in it."""
    if isinstance(container, list):
        return list(container)
    return [(key, held, copy(held)) for key, held in container.items()]


def _refill(container: Any, kept: Any) -> None:
    if isinstance(container, list):
        container[:] = kept
        return
    container.clear()
    for key, held, content in kept:
        if isinstance(held, dict):
            held.clear()
            held.update(content)
        container[key] = held


def entries(state: dict[Any, Any]) -> Iterable[Any]:
    """What an optimizer keeps, parameter by parameter."""
    if all(map(isinstance, state.values(), itertools.repeat(dict))):
        return itertools.chain.from_iterable(map(dict.values, state.values()))
    nested = (held.values() if isinstance(held, dict) else (held,) for held in state.values())
    return itertools.chain.from_iterable(nested)


def item_name(container: str, key: Any) -> str:
    """An item as code; printing a key that is no plain value may run anything, a tensor's reads the device."""
    return f"{container}[{key!r}]" if is_plain(key) else f"{container}[<{type(key).__name__}>]"


def hyperparameters(optimizer: Optimizer, name: str) -> Iterator[Place]:
    """The places of an optimizer's options, group by group."""
    for i, group in enumerate(optimizer.param_groups):
        label = f"{name}.param_groups[{i}]"
        keys = [key for key in group if key not in ("params", "param_names")]
        yield from (Place(group, key, "item", f"{label}[{key!r}]") for key in keys)


class TensorFacts:
    """What `tensor.data = ...` or `requires_grad_()` would change."""

    def __init__(self, tensor: Tensor) -> None:
        strided = tensor.layout is torch.strided
        self.alias = tensor.detach() if strided else None  # keeps the memory
        self.form = _form(tensor) if strided else None
        self.grad, self.leaf = tensor.requires_grad, tensor.is_leaf

    def same_as(self, tensor: Tensor) -> bool:
        """Whether the tensor still is over this memory, in this form."""
        if tensor.requires_grad != self.grad:
            return False
        return self.form is None or (tensor.layout is torch.strided and self.form == _form(tensor))

    def nothing_to_restore(self, tensor: Tensor) -> bool:
        """Whether it is as it was for autograd, too."""
        return tensor.is_leaf == self.leaf and self.same_as(tensor)

    def restore(self, tensor: Tensor) -> None:
        """Put memory and flag back."""
        moved = not self.same_as(tensor)
        if moved and self.alias is not None:
            tensor.data = self.alias
        if self.leaf and not tensor.is_leaf and not tensor._is_view():
            tensor.detach_()  # from a history that the run gave it
        if tensor.is_leaf and tensor.requires_grad != self.grad:
            tensor.requires_grad_(self.grad)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return family_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def nothing() -> None:
    """Some content cannot be put back."""


class Change(NamedTuple):
    """A place whose content a run changed."""

    place: Place
    before: Any
    after: Any
