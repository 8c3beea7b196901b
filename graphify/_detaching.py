"""`detach_`, which never reaches the dispatcher, heard by patching it while somebody listens."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["hearing_detach"]

# Process-wide, because methods are: who listens, and what to put back when the last one leaves.
_lock = threading.Lock()
_listeners = 0
_restorers: list[Callable[[], None]] = []


class _Ears(threading.local):
    """The listeners of this thread, innermost last."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Tensor], None]] = []


_ears = _Ears()


@contextmanager
def hearing_detach(hear: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `hear` with each tensor that this thread is about to `detach_`; it may raise, and then that is not done."""
    _install()
    _ears.listeners.append(hear)
    try:
        yield
    finally:
        _ears.listeners.pop()
        _uninstall()


def _install() -> None:
    global _listeners  # noqa: PLW0603
    with _lock:
        _listeners += 1
        if _listeners == 1:
            _restorers.extend([_patched(Tensor), _patched(torch)])


def _uninstall() -> None:
    global _listeners  # noqa: PLW0603
    with _lock:
        _listeners -= 1
        while not _listeners and _restorers:
            _restorers.pop()()


def _patched(owner: Any) -> Callable[[], None]:
    """Shadow the method, or the function of this name, and answer what puts it back."""
    original: Callable[..., Any] = owner.detach_

    @functools.wraps(original)
    def detach_(*args: Any, **kwargs: Any) -> Any:
        for tensor in (*args, *kwargs.values()) if _ears.listeners else ():
            for hear in _ears.listeners if isinstance(tensor, Tensor) else ():
                hear(tensor)
        return original(*args, **kwargs)

    def restore() -> None:
        # If somebody has patched over us since, theirs stays: ours below it is deaf without listeners.
        if vars(owner).get("detach_") is detach_:
            owner.detach_ = original

    owner.detach_ = detach_
    return restore
