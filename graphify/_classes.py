"""What of classes and functions a run goes by: what a class defines, which class an object has, which code a function."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from ._code import Executed
from ._places import Place
from ._raw import is_a, member_of

__all__ = [
    "SKIPPED_PACKAGES",
    "class_of",
    "defined_names",
    "functions_behind",
    "parts_of",
    "slots_of",
    "special_names",
    "user_bases",
]

SKIPPED_PACKAGES = frozenset(sys.stdlib_module_names) | {"torch", "numpy"}
_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
_KINDS_OF_CLASS, _CHANGEABLE = 3 << 8, 2 << 8  # made by Python code, and not immutable


def user_bases(cls: type) -> Iterator[type]:
    """The classes of an object that are the user's."""
    skipped = SKIPPED_PACKAGES | {"graphify"}
    return (base for base in cls.__mro__ if base.__module__.partition(".")[0] not in skipped)


def slots_of(cls: type, base: type) -> list[str]:
    """The attributes of a class's instances that live in slots which this base made."""
    found = ((name, value) for name, value in vars(base).items() if is_a(value, MemberDescriptorType))
    return [name for name, value in found if member_of(cls, name) is value]


def defined_names(cls: type) -> list[str]:
    """What a class defines that code may look up by name."""
    hidden = (MemberDescriptorType, GetSetDescriptorType)
    found = ((name, value) for name, value in vars(cls).items() if not is_a(value, hidden))
    return [name for name, value in found if not name.startswith("__")]


def special_names(cls: type, executed: Executed) -> list[str]:
    """The special methods of a class that ran, which no code has to name."""
    found = ((name, value) for name, value in vars(cls).items() if name.startswith("__"))
    return [name for name, value in found if _heard(value, executed)]


def _heard(value: Any, executed: Executed) -> bool:
    return any(executed.heard(function.__code__) for function in functions_behind(value))


def functions_behind(value: Any) -> Iterator[FunctionType]:
    """The functions that an attribute of a class calls."""
    if is_a(value, property):
        found = [value.fget, value.fset, value.fdel]
    elif is_a(value, (functools.cached_property, functools.partialmethod)):
        found = [value.func]
    else:
        found = [value.__func__ if is_a(value, (classmethod, staticmethod)) else value]
    return (function for function in found if is_a(function, FunctionType))


def class_of(value: Any, name: str, *, held: bool) -> list[Place]:
    """The place of an object's class, where `value.__class__ = ...` may change it; what nothing holds is not kept alive."""
    if type(value).__flags__ & _KINDS_OF_CLASS != _CHANGEABLE or is_a(value, type):
        return []
    if held:
        return [Place(value, "__class__", "type", f"type({name})")]
    if not type(value).__weakrefoffset__:
        return []
    return [Place(weakref.ref(value), "__class__", "referent", f"type({name})")]


def parts_of(function: FunctionType, name: str) -> list[Place]:
    """What a function does, and with what where an argument is left out."""
    return [Place(function, part, "part", f"{name}.{part}") for part in _PARTS]
