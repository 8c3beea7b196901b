"""Memory that recordings share because they never replay at the same time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["GraphPool"]


class Member(Protocol):
    """Whoever has graphs in a pool."""

    def let_go(self) -> None:
        """Drop them all."""


class GraphPool:
    """A pool of graph memory, shared by wrappers that never replay at the same time.

    Example:
        >>> pool = GraphPool()
        >>> encode = graphify(encode, pool=pool)
        >>> decode = graphify(decode, pool=pool)

    Replays of one pool run one after the other, also across threads and streams. A static output
    (`outputs="static"`) is closed when *any* recording of its pool replays.

    Copies of what holds a pool, `copy.deepcopy` included, share it. It belongs to its process: a pickled one
    comes back as a new pool.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.retired: list[Callable[[], None]] = []
        self.short: BaseException | None = None
        """Raised by a replay that found no memory for its results, and did nothing yet."""
        self.spent: BaseException | None = None
        """Raised after the work of a replay."""
        self._memory: dict[tuple[str, torch.device], Any] = {}
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()

    def __copy__(self) -> GraphPool:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphPool:
        return self

    def __reduce__(self) -> tuple[type[GraphPool], tuple[()]]:
        return type(self), ()

    def join(self, member: Member) -> None:
        """Ask this member, too, when the pool must go."""
        self._members.add(member)

    def memory(self, backend: Any, device: torch.device) -> Any:
        """The backend's own pool for this device, made at first use."""
        key = (backend.name, device)
        if key not in self._memory:
            self._memory[key] = backend.pool(device)
        return self._memory[key]

    def retire(self) -> None:
        """Close the static outputs handed out so far; call with the lock held, before memory is rewritten."""
        for close in self.retired:
            close()
        self.retired.clear()

    def drop(self) -> None:
        """Drop every graph of every member: the memory of a pool comes back when the last of its graphs is gone."""
        for member in list(self._members):
            member.let_go()
        self.forget()

    def forget(self) -> None:
        """Let go of the memory; the next recording starts with a new pool."""
        self._memory.clear()
