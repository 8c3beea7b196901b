"""Methods that others stand in front of while somebody listens: for the whole process, because methods are."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Shadows", "shadow"]

Restore = Callable[[], None]


class _Ears(threading.local):
    """The listeners of this thread, outermost first."""

    def __init__(self) -> None:
        self.listeners: list[Callable[..., None]] = []


class Shadows:
    """Some methods, shadowed as long as anybody is inside `cast()` or `hearing()`, whatever the thread."""

    def __init__(self, install: Callable[[], Iterable[Restore]]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._inside = 0
        self._restorers: list[Restore] = []
        self._ears = _Ears()

    @contextmanager
    def cast(self) -> Iterator[None]:
        """Shadow them inside."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._restorers.extend(self._install())
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                while not self._inside and self._restorers:
                    self._restorers.pop()()

    @contextmanager
    def hearing(self, hear: Callable[..., None]) -> Iterator[None]:
        """Shadow them inside, and let `hear` hear what they tell on this thread; it may raise."""
        self._ears.listeners.append(hear)
        try:
            with self.cast():
                yield
        finally:
            self._ears.listeners.pop()

    def tell(self, *what: Any) -> None:
        """Call all who listen on this thread: what a shadow does first."""
        for hear in self._ears.listeners:
            hear(*what)


def shadow(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Restore:
    """Put what `wrap` makes of a method, or of whatever has this name, in its place; answers what puts it back."""
    original, inherited = getattr(owner, name), name not in vars(owner)
    made = functools.wraps(original)(wrap(original))

    def restore() -> None:
        # If somebody has patched over us since, theirs stays: ours below it is deaf without listeners.
        if vars(owner).get(name) is made:
            delattr(owner, name) if inherited else setattr(owner, name, original)

    setattr(owner, name, made)
    return restore
