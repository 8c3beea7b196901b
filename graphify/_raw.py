"""Objects and containers as Python stores them: read, compared and put back without a line of their classes' own code."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import starmap, zip_longest
from operator import is_
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

__all__ = [
    "contents_of",
    "del_item",
    "field_of",
    "fields_of",
    "get_item",
    "has_own_items",
    "is_a",
    "items_of",
    "member_of",
    "put_back",
    "reordered",
    "set_item",
]

_KINDS = (OrderedDict, dict, list, tuple, deque, set)


def is_a(value: Any, kind: type | tuple[Any, ...]) -> bool:
    """The same as `isinstance`, but for what an object's `__class__` pretends."""
    return issubclass(type(value), kind)


def member_of(cls: type, name: str) -> Any:
    """What a class or the first of its bases defines under a name; None where none does."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def fields_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object; None where it has none."""
    if is_a(value, threading.local):
        state: Any = threading.local.__getattribute__(value, "__dict__")
        return state if isinstance(state, dict) else None
    for base in type(value).__mro__:
        found = vars(base).get("__dict__")
        if isinstance(
            found, (GetSetDescriptorType, MemberDescriptorType)
        ):  # a property is the user's own code
            state = found.__get__(value)
            return state if isinstance(state, dict) else None
    return None


def field_of(value: Any, name: str) -> Any:
    """What an object holds under a name in its `__dict__`; None where it holds nothing."""
    state = fields_of(value)
    return None if state is None else dict.get(state, name)


def items_of(held: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """The items of a dict in its order."""
    items: Iterable[tuple[Any, Any]] = _kind(held).items(held)
    return items


def has_own_items(container: Any) -> bool:
    """Whether looking up an item of this dict runs code of its class, as to make one that is missing."""
    names = ("__getitem__", "__missing__")
    return is_a(container, dict) and any(
        member_of(type(container), n) is not member_of(dict, n) for n in names
    )


def get_item(container: Any, key: Any, default: Any) -> Any:
    """An item; `default` where a dict has none, which makes none either."""
    if type(container) is dict or is_a(container, dict):
        return dict.get(container, key, default)
    return _kind(container).__getitem__(container, key)


def set_item(container: Any, key: Any, value: Any) -> None:
    """Make a container hold an item."""
    _kind(container).__setitem__(container, key, value)


def del_item(container: Any, key: Any) -> None:
    """Take an item out of a container."""
    _kind(container).__delitem__(container, key)


def _kind(container: Any) -> Any:
    """The class of Python's own whose methods reach what it stores."""
    exact = type(container)  # of most of thousands
    return exact if exact in _KINDS else next((kind for kind in _KINDS if is_a(container, kind)), exact)


def contents_of(container: Any) -> Any:
    """What a list, deque, set or dict holds now."""
    if type(container) is dict:
        return container.copy()
    if is_a(container, dict):
        return (OrderedDict if is_a(container, OrderedDict) else dict)(items_of(container))
    return _kind(container).copy(container)


def put_back(container: Any, content: Any) -> None:
    """Make a container hold what it held, in that order; under a key that a dict has still, what is there now stays."""
    kind = _kind(container)
    if kind is dict or kind is OrderedDict:
        if not _alike(kind.__iter__(container), content):
            _put_back_items(container, content, kind)
    elif kind is list:
        if not _alike(list.__iter__(container), content):
            list.__setitem__(container, slice(None), content)
    elif kind is deque:
        if not _alike(deque.__iter__(container), content):
            deque.clear(container)
            deque.extend(container, content)
    elif set.__ne__(container, content):
        set.clear(container)
        set.update(container, content)


def _alike(now: Iterable[Any], before: Iterable[Any]) -> bool:
    return all(starmap(is_, zip_longest(now, before, fillvalue=_KINDS)))


def _put_back_items(held: dict[Any, Any], content: dict[Any, Any], kind: Any) -> None:
    for key in [key for key, _ in items_of(held) if key not in content]:
        kind.__delitem__(held, key)
    # One by one, since other threads may read it: what stands before the first difference stays.
    now, keys = [key for key, _ in items_of(held)], [*content]
    for key in keys[next((i for i, key in enumerate(now) if key is not keys[i]), len(now)) :]:
        value = kind.get(held, key, content[key])
        if kind.__contains__(held, key):
            kind.__delitem__(held, key)  # `OrderedDict.pop` of Python 3.10 asks the class's own
        kind.__setitem__(held, key, value)


def reordered(held: dict[Any, Any], content: dict[Any, Any]) -> bool:
    """Whether the keys that a dict still has are in another order than they were."""
    now = [key for key, _ in items_of(held)]
    if len(now) == len(content) and all(map(is_, now, content)):
        return False
    return [key for key in now if key in content] != [key for key in content if key in held]
