"""What in a call counts as a constant, and the token by which two constants are compared.

Tokens are hashable and live in signatures. Beside its exact type, equal tokens mean equal constants: 0.0 and -0.0
differ, NaN equals itself, an object that has no value of its own is its identity.
"""

from __future__ import annotations

import array
import collections
import enum
import sys
import types
import weakref
from collections.abc import Hashable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

import torch

__all__ = ["TOKEN_CODE", "kind_of", "refusal_of", "shown", "token_of"]

_PLAIN = (int, float, complex, str, bytes)
_SINGLES = (None, ..., NotImplemented)
_SAME = (
    bool,
    int,
    str,
    bytes,
    object,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
_KINDS: dict[type, str] = {
    **dict.fromkeys(map(type, _SINGLES), "single"),
    **dict.fromkeys(_SAME, "same"),
    **dict.fromkeys((complex, range, slice), "checked"),
    float: "float",
}

TOKEN_CODE = {
    "single": "None",
    "same": "{0}",
    "float": "({0} if {0} and {0} == {0} else repr({0}))",
    "enum": "{0}._name_",
    "flag": "{0}._value_",
    "opaque": "id({0})",
}
"""The expression that makes a token from a constant of this kind; a "checked" one needs a call of `token_of`."""

_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (
        (set, KeysView, ItemsView),
        "a signature cannot hold something without an order",
        "a tuple, list or frozenset",
    ),
    (ValuesView, "it is only a view of a dict", "a list"),
    ((types.CoroutineType, types.AsyncGeneratorType), "a graph cannot repeat its Python", "its result"),
    (Iterator, "the first call would use it up", "a list of what it yields"),
    (
        (bytearray, memoryview, array.array, collections.deque, types.MappingProxyType),
        "what it holds can change without its identity",
        "a tuple, bytes, a dict or a tensor",
    ),
)


def kind_of(value: Any) -> str:
    """How this value becomes a token: a key of `TOKEN_CODE`, or "checked"."""
    cls = type(value)
    kind = _KINDS.get(cls) or _numpy_kind(value)
    if kind is not None:
        return kind
    # A class, since an object's own `__class__` may pretend anything, or run anything.
    if issubclass(cls, enum.Enum):
        return "flag" if issubclass(cls, enum.Flag) else "enum"
    if issubclass(cls, type):
        return "same" if _compares_as(cls, type) else "opaque"
    return "checked" if cls is frozenset or _is_plain_subclass(value) else "opaque"


def _numpy_kind(value: object) -> str | None:
    """The kind of a numpy scalar, None for anything else; numpy is never imported for this."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not issubclass(type(value), numpy.generic):
        return None
    if isinstance(value, numpy.floating):
        return "float"
    if isinstance(value, (numpy.integer, numpy.bool_, numpy.str_, numpy.bytes_)):
        return "checked" if isinstance(value, numpy.timedelta64) else "same"
    return "checked" if isinstance(value, (numpy.complexfloating, numpy.datetime64)) else None


def _is_plain_subclass(value: Any) -> bool:
    """Whether this is a number or a string of the user's own class that adds nothing to its value."""
    cls = type(value)
    base = next((base for base in _PLAIN if issubclass(cls, base)), None)
    return base is not None and _compares_as(cls, base) and not getattr(value, "__dict__", None)


def _compares_as(cls: Any, base: Any) -> bool:
    return cls.__eq__ is base.__eq__ and cls.__hash__ is base.__hash__


def token_of(value: Any) -> Hashable | None:
    """A token that holds the exact type too; None for what is no constant (tuples of constants are)."""
    cls, kind = type(value), kind_of(value)
    if kind == "opaque" and cls is not tuple:
        return None
    parts = _parts_of(value)
    if parts is None:
        return cls, _token_of_one(value, kind)
    tokens = tuple(map(token_of, parts))
    if None in tokens:
        return None
    return cls, frozenset(tokens) if cls is frozenset else tokens


_WITH_PARTS = (complex, range, slice, frozenset, tuple)


def _parts_of(value: Any) -> tuple[Any, ...] | None:
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, (range, slice)):
        return value.start, value.stop, value.step
    return tuple(value) if type(value) in (tuple, frozenset) else None


def _token_of_one(value: Any, kind: str) -> Any:
    if kind == "single":
        return None
    if kind in ("enum", "flag"):
        return value._name_ if kind == "enum" else value._value_
    if kind != "float" and (kind != "checked" or isinstance(value, (int, str, bytes))):
        return value
    # Tells 0.0 from -0.0 and lets NaN equal itself; a numpy date is in its text with its unit.
    return value if isinstance(value, float) and value and value == value else repr(value)


def shown(token: Any, cls: type) -> str:
    """The constant of this exact type that such a token stands for, as a message writes it."""
    if isinstance(token, tuple) and len(token) == 2 and token[0] is cls:  # from `token_of`
        return shown(token[1], cls)
    if isinstance(token, (tuple, frozenset)) and cls in _WITH_PARTS:
        parts = [shown(part, part[0]) for part in token]
        return f"{cls.__name__}({', '.join(sorted(parts) if cls is frozenset else parts)})"
    if issubclass(cls, enum.Enum):
        return f"{cls.__name__}.{token}" if isinstance(token, str) else f"{cls.__name__}({token!r})"
    # A float that is zero or NaN has its text as token.
    return token if isinstance(token, str) and not issubclass(cls, str) else repr(token)


def refusal_of(value: Any) -> str | None:
    """Why a signature can hold this object neither by value nor by identity, and what to pass; None when it can."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(type(value), numpy.ndarray):
        return "its values can change without its identity. Pass torch.from_numpy(array) or a tuple."
    for kinds, why, instead in _REFUSED:
        if issubclass(type(value), kinds):
            return f"{why}. Pass {instead}."
    try:
        weakref.ref(value)
    except TypeError:
        return (
            "it has no value that graphify knows and cannot be weakly referenced, so its graphs could not die with it."
            " Pass its fields as plain values, make it a dataclass, or add '__weakref__' to its __slots__."
        )
    return None
