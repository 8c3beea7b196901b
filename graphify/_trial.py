"""Running a function without trace: memory, random streams and Python state are put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ._places import Survey
from ._undo import UndoLog

__all__ = ["HostRandomness", "trial"]


class Streams(Protocol):
    """The part of a backend that a trial needs."""

    def rng_state(self, generators: Sequence[torch.Generator]) -> Any: ...

    def set_rng_state(self, state: Any) -> None: ...


class HostRandomness:
    """The states of the host's random generators at one moment; `device` keeps torch's CPU one out."""

    def __init__(self, device: torch.device) -> None:
        self.readers: list[tuple[str, Callable[[], Any], Callable[[Any], None]]] = [
            ("random", random.getstate, random.setstate)
        ]
        numpy = sys.modules.get("numpy")
        if numpy is not None and hasattr(numpy, "random"):
            self.readers.append(("numpy.random", numpy.random.get_state, numpy.random.set_state))
        if device.type != "cpu":
            self.readers.append(("torch's CPU generator", torch.get_rng_state, torch.set_rng_state))
        self.states = [read() for _, read, _ in self.readers]

    def drawn(self) -> str | None:
        """The name of a generator that was drawn from since, or None."""
        for (name, read, _), state in zip(self.readers, self.states, strict=True):
            if not _equal(read(), state):
                return name
        return None

    def restore(self) -> None:
        """Put the states back."""
        for (_, _, write), state in zip(self.readers, self.states, strict=True):
            write(state)


@contextmanager
def trial(
    streams: Streams, device: torch.device, survey: Survey, generators: Sequence[torch.Generator] = ()
) -> Iterator[UndoLog]:
    """Undo what the body does, on the device and in Python; give the log to the body's `Watch`."""
    log, host, state = UndoLog(), HostRandomness(device), streams.rng_state(generators)
    grads = [(t, t.grad) for _, t in survey.tensors() if t.is_leaf and t.requires_grad]
    try:
        yield log
    finally:
        log.rollback()
        survey.restore()
        for tensor, grad in grads:
            tensor.grad = grad
        streams.set_rng_state(state)
        host.restore()


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool((left == right).all()) if hasattr(left, "all") else bool(left == right)
