"""Memory that recordings share because they never replay at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["GraphPool"]


class GraphPool:
    """A pool of graph memory, shared by wrappers that never replay at the same time.

    Example:
        >>> pool = GraphPool()
        >>> encode = graphify(encode, pool=pool)
        >>> decode = graphify(decode, pool=pool)

    Replays of one pool run one after the other, also across threads and streams. A static output
    (`outputs="static"`) is closed when *any* recording of its pool replays.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.retired: list[Callable[[], None]] = []
        self._memory: dict[tuple[str, torch.device], Any] = {}

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

    def forget(self) -> None:
        """Let go of the memory; the next recording starts with a new pool."""
        self._memory.clear()
