"""Running a function without trace: memory, random streams and Python state are put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ._bystanders import Bystanders
from ._lazy import hearing_birth, no_birth
from ._survey import Survey
from ._touched import bind_grad
from ._undo import UndoLog

__all__ = ["HostRandomness", "Snapshot", "is_large", "trial"]

_LIMIT = 256 * 2**20


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

    def drawn(self) -> list[str]:
        """The names of the generators that were drawn from since."""
        pairs = zip(self.readers, self.states, strict=True)
        return [name for (name, read, _), state in pairs if not _equal(read(), state)]

    def restore(self) -> None:
        """Put the states back."""
        for (_, _, write), state in zip(self.readers, self.states, strict=True):
            write(state)


def is_large(tensor: Tensor) -> bool:
    """Whether a trial leaves this memory as it was written, since a copy would cost too much."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > _LIMIT


class Snapshot:
    """What `undo` puts back: memory written through a `Watch` that has the `log`, random streams, Python state.

    Tensors above 256 MiB are not copied unless `large`; the log lists those that a run wrote.
    """

    def __init__(
        self,
        streams: Streams,
        device: torch.device,
        survey: Survey,
        generators: Sequence[torch.Generator],
        *,
        large: bool = False,
    ) -> None:
        self.log = UndoLog(limit=None if large else _LIMIT)
        self._streams, self._survey = streams, survey
        self._host = HostRandomness(device)
        self._state = streams.rng_state([*generators, *survey.generators])
        # One that needs no gradient may come to need one inside.
        self.log.touched.within(t for _, t in survey.tensors() if t.is_leaf)

    def undo(self) -> None:
        """Put everything back."""
        self.log.rollback()
        self._survey.restore(Bystanders(self._survey.optimizers, self.log.touched).hold)
        for tensor, grad in self.log.touched.before.values():
            bind_grad(tensor, grad)
        self._streams.set_rng_state(self._state)
        self._host.restore()


@contextmanager
def trial(
    streams: Streams,
    device: torch.device,
    survey: Survey,
    generators: Sequence[torch.Generator] = (),
    *,
    large: bool = False,
) -> Iterator[UndoLog]:
    """Undo what the body does, on the device and in Python; give the log to the body's `Watch`.

    Raises:
        TooLargeError: the log spared memory that the body was about to write.
    """
    snapshot = Snapshot(streams, device, survey, generators, large=large)
    try:
        with hearing_birth(no_birth):
            yield snapshot.log
    finally:
        snapshot.undo()
        snapshot.log.check()


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, tuple) and set(map(type, left)) != {int}:  # which Python compares, all 625 of them
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool((left == right).all()) if hasattr(left, "all") else bool(left == right)
