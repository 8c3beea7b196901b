"""Values that are compared and put back as a whole: the environment, arrays and buffers, how far an iterator has come."""

from __future__ import annotations

import array
import os
from operator import length_hint
from typing import Any

from ._places import Bulk, nothing
from ._streams import ITERATORS, rewinding

__all__ = ["WHOLES", "array_of", "whole_of"]

_ENVIRONMENT = type(os.environ)
WHOLES = (_ENVIRONMENT, bytearray, array.array, *ITERATORS)


def whole_of(value: Any, name: str) -> Bulk:
    """One of `WHOLES`, as it is now."""
    if type(value) is _ENVIRONMENT:
        return _environment(value)
    if issubclass(type(value), ITERATORS):
        return Bulk(lambda: length_hint(value, -1), length_hint(value, -1), rewinding(value), name)
    content = value[:]
    return Bulk(lambda: value, content, lambda: value.__setitem__(slice(None), content), name)


def array_of(value: Any, name: str) -> Bulk | None:
    """A numpy array, whose bytes are read on the host; None where it has none, and for another object of numpy."""
    if not hasattr(value, "tobytes") or value.dtype.kind == "O":
        return None
    content = value.copy()
    writable = getattr(value, "flags", None) is not None and value.flags.writeable
    restore = (lambda: value.__setitem__(..., content)) if writable else nothing
    return Bulk(value.tobytes, value.tobytes(), restore, name)


def _environment(value: Any) -> Bulk:
    content = dict(value)

    def restore() -> None:
        for key in [key for key in value if key not in content]:
            del value[key]
        value.update(content)

    return Bulk(lambda: dict(value), content, restore, "os.environ")
