"""`detach_`, which never reaches the dispatcher, heard by patching it while somebody listens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ._shadows import Shadows, shadow

__all__ = ["hearing_detach"]


class _Ears(threading.local):
    """The listeners of this thread, innermost last."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Tensor], None]] = []


_ears = _Ears()


@contextmanager
def hearing_detach(hear: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `hear` with each tensor that this thread is about to `detach_`; it may raise, and then that is not done."""
    _ears.listeners.append(hear)
    try:
        with _shadows.cast():
            yield
    finally:
        _ears.listeners.pop()


def _heard(original: Callable[..., Any]) -> Callable[..., Any]:
    def detach_(*args: Any, **kwargs: Any) -> Any:
        for tensor in (*args, *kwargs.values()) if _ears.listeners else ():
            for hear in _ears.listeners if isinstance(tensor, Tensor) else ():
                hear(tensor)
        return original(*args, **kwargs)

    return detach_


_shadows = Shadows(lambda: [shadow(owner, "detach_", _heard) for owner in (Tensor, torch)])
