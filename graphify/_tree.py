"""The structure of a call's arguments or of a result, as code: values to leaves and back.

`tree_of` walks once and slowly; what it learns becomes generated functions without a loop and without a choice.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._constants import kind_of, refusal_of, token_of
from ._tree_code import EXACT, Box, Node, Rebuild, Unpack, is_structseq, rebuilder, unpacker
from .errors import InputError

__all__ = ["Tree", "tensors_of", "tree_of"]

_MAX_DEPTH = 100
_BASES: tuple[type, ...] = (OrderedDict, defaultdict, dict, list, tuple)


class Tree:
    """The structure of some named values: what is a tensor, what is a constant, and what holds them.

    Two trees are equal when their values have the same structure; names play no part.
    """

    def __init__(self, nodes: tuple[Node, ...], walk: _Walk) -> None:
        self._nodes = nodes
        self.spec: Hashable = tuple(node.spec for node in nodes)
        self.tensor_paths: tuple[str, ...] = tuple(walk.tensor_paths)
        self.const_paths: tuple[str, ...] = tuple(walk.const_paths)
        self.const_types: tuple[type, ...] = tuple(walk.const_types)
        self.opaque: tuple[int, ...] = tuple(walk.opaque)
        self._hash = hash(self.spec)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Tree) and self.spec == other.spec)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Tree(tensors={list(self.tensor_paths)}, constants={list(self.const_paths)})"

    # Compiled at the first use, since most trees are only looked up; after it this is a plain attribute.
    @functools.cached_property
    def unpack(self) -> Unpack:
        """The tensors and one token per constant, or None for values of another structure."""
        return unpacker(self._nodes)

    @functools.cached_property
    def rebuild(self) -> Rebuild:
        """Values of this structure, in fresh containers of the same types."""
        return rebuilder(self._nodes)

    @functools.cached_property
    def _unpack_raw(self) -> Unpack:
        return unpacker(self._nodes, tokens=False)

    def consts(self, roots: tuple[Any, ...]) -> tuple[object, ...]:
        """The constants of values that have this structure."""
        leaves = self._unpack_raw(roots)
        assert leaves is not None, "consts() of values that have another structure"
        return leaves[1]


def tree_of(roots: tuple[Any, ...], names: Sequence[str]) -> Tree:
    """Walk some named values and describe their structure.

        tree_of(({"a": x, "n": 2},), ["batch"]).tensor_paths == ("batch['a']",)

    Raises:
        InputError: for a value that no signature can hold, named by its path.
    """
    walk = _Walk()
    nodes = tuple(walk.node(value, name) for value, name in zip(roots, names, strict=True))
    return Tree(nodes, walk)


class _Walk:
    """One walk over some values; collects the paths of leaves on its way."""

    def __init__(self) -> None:
        self.tensor_paths: list[str] = []
        self.tensors: list[Tensor] = []
        self.const_paths: list[str] = []
        self.const_types: list[type] = []
        self.opaque: list[int] = []
        self._inside: dict[int, str] = {}

    def node(self, value: Any, path: str) -> Node:
        if issubclass(type(value), Tensor):
            self.tensor_paths.append(path)
            self.tensors.append(value)
            return Node("tensor", "tensor", Tensor)
        kind = kind_of(value)
        base = _base_of(value) if kind == "opaque" else None
        if base is not None:
            return self._enter(value, path, base)
        if kind == "opaque":
            self._check_opaque(value, path)
        elif kind == "checked" and token_of(value) is None:
            raise InputError(f"`{path}` is a {type(value).__name__} that holds more than plain constants.")
        return self._constant(value, path, kind)

    def _constant(self, value: Any, path: str, kind: str) -> Node:
        if kind == "opaque":
            self.opaque.append(len(self.const_paths))
        cls = type(value)
        self.const_paths.append(path)
        self.const_types.append(cls)
        return Node((kind, cls), kind, cls, value if kind == "single" else None)

    def _check_opaque(self, value: Any, path: str) -> None:
        reason = refusal_of(value)
        if reason is not None:
            cls = type(value)
            name = cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
            raise InputError(f"`{path}` is a {name}: {reason}")

    def _enter(self, value: Any, path: str, base: type) -> Node:
        if id(value) in self._inside:
            raise InputError(
                f"`{path}` is `{self._inside[id(value)]}` again: a container that contains itself has no signature."
                " Pass it without the cycle."
            )
        if len(self._inside) >= _MAX_DEPTH:
            raise InputError(f"`{path}` is nested deeper than {_MAX_DEPTH} containers. Pass it flatter.")
        self._inside[id(value)] = path
        try:
            return self._box(value, path, base)
        finally:
            del self._inside[id(value)]

    def _box(self, value: Any, path: str, base: type) -> Node:
        cls = type(value)
        keys, parts, paths = _items_of(value, base, path)
        key_tokens = None if keys is None else tuple(self._key(key, path) for key in keys)
        items = tuple(map(self.node, parts, paths))
        own: dict[str, Any] | None = (
            value.__dict__ if cls.__dictoffset__ and base is not types.MethodType else None
        )
        names, attrs = (None, ()) if own is None else (tuple(own), self._attrs(own, keys, parts, path))
        members, slots, unset = self._slots(value, base, path)
        spec = (
            *(cls, key_tokens, tuple(item.spec for item in items), names),
            *(tuple(attr.spec for attr in attrs), members, tuple(slot.spec for slot in slots)),
        )
        return Node(spec, "box", cls, box=Box(base, keys, items, names, attrs, members, slots, unset))

    def _key(self, key: Any, path: str) -> Hashable:
        token = token_of(key)
        if token is None:
            raise InputError(
                f"`{path}` has a key of type {type(key).__name__}: keys are compared by value."
                " Use strings, numbers, enum members or tuples of them as keys."
            )
        return token

    def _attrs(
        self, own: dict[str, Any], keys: tuple[Any, ...] | None, parts: tuple[Any, ...], path: str
    ) -> Any:
        """Attributes; one that repeats an item of the same name (as in a ModelOutput) stays the same object."""
        places = {key: index for index, key in enumerate(keys or ())}
        nodes = []
        for name, value in own.items():
            place = places.get(name)
            if place is not None and parts[place] is value:
                nodes.append(Node(("mirror", place), "mirror", type(value), place))
            else:
                nodes.append(self.node(value, f"{path}.{name}"))
        return tuple(nodes)

    def _slots(self, value: Any, base: type, path: str) -> tuple[Any, Any, Any]:
        members, slots, unset = [], [], []
        for member in _members_of(type(value), base):
            try:
                held = member.__get__(value)
            except AttributeError:
                unset.append(member)
            else:
                members.append(member)
                slots.append(self.node(held, f"{path}.{member.__name__}"))
        return tuple(members), tuple(slots), tuple(unset)


# ---------------------------------------------------------------- containers


def _base_of(value: Any) -> type | None:
    """The builtin class under a container that can be taken apart and built again; None for anything else."""
    cls = type(value)
    if cls in EXACT or cls is types.MethodType:
        return cls
    if issubclass(cls, torch.nn.Module) or hasattr(cls, "__del__"):
        return None
    if is_structseq(cls):
        return cls if cls.n_fields == cls.n_sequence_fields else None
    base = next((base for base in _BASES if issubclass(cls, base)), None)
    if base is None and dataclasses.is_dataclass(cls):
        base = object
    if base is None or getattr(value, "__dict__", None) is value:
        return None
    return base if _can_make(base, cls) else None


def _can_make(base: Any, cls: type) -> bool:
    try:
        base.__new__(cls)
    except TypeError:  # cls adds C state of its own: only its own __new__ may make instances
        return False
    return True


def _members_of(cls: type, base: type) -> tuple[types.MemberDescriptorType, ...]:
    """Descriptors of the slots that instances have beside their items and __dict__."""
    if base is cls and base is not defaultdict:
        return ()
    found = [vars(owner).values() for owner in cls.__mro__ if owner not in (OrderedDict, *EXACT, object)]
    return tuple(m for values in found for m in values if isinstance(m, types.MemberDescriptorType))


def _items_of(value: Any, base: Any, path: str) -> tuple[tuple[Any, ...] | None, tuple[Any, ...], list[str]]:
    """Keys (of mappings), items and the items' paths, read below whatever the class overrides."""
    if base is object:
        return None, (), []
    if base is types.MethodType:
        return None, (value.__func__, value.__self__), [f"{path}.__func__", f"{path}.__self__"]
    if issubclass(base, dict):
        keys = tuple(base.__iter__(value))
        return keys, tuple(base.values(value)), [f"{path}[{key!r}]" for key in keys]
    items = tuple(base.__iter__(value))
    fields = getattr(type(value), "_fields", None) or (base.__match_args__ if is_structseq(base) else ())
    if len(fields) == len(items):
        return None, items, [f"{path}.{field}" for field in fields]
    return None, items, [f"{path}[{index}]" for index in range(len(items))]


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    """The tensors inside one value, in the order of its structure."""
    walk = _Walk()
    walk.node(value, "output")
    return tuple(walk.tensors)
