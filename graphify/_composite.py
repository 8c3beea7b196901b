"""Composite operators, which reach a dispatch mode whole under inference mode and in parts elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

__all__ = ["decomposed", "is_composite"]

_COMPOSITE = "CompositeImplicitAutograd"
_has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key


@cache
def is_composite(func: Any, device_type: str) -> bool:
    """Whether this operator only calls others on this device."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name: str = func._schema.name + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
    return bool(_has_kernel(name, _COMPOSITE)) and not _has_kernel(name, device_type.upper())


def decomposed(func: Any, args: Any, kwargs: dict[str, Any], device_type: str) -> Any:
    """Call the operators that this one is made of, by its own C++ kernel, with autocast as outside.

    A decomposition in Python would not do: some of those draw other random numbers.
    """
    with _autocast(device_type):
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@contextmanager
def _autocast(device_type: str) -> Iterator[None]:
    """Let casts happen as they would outside: a mode's handler runs with autocast excluded."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        wanted = torch.is_autocast_enabled(device_type)
    key: Any = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}", None)
    if key is None or not wanted:
        yield
        return
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
