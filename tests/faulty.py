"""Backends that fail where they are told to: at the k-th visit of a place, with an error of a kind."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphify.backends.base import Copy, Recording, Replay
from graphify.backends.eager import EagerBackend
from graphify.backends.tape import TapeBackend

__all__ = ["AFTER", "ERRORS", "PLACES", "Faulty", "FaultyEager", "FaultyTape", "InjectedError"]


class InjectedError(RuntimeError):
    """The fault."""


def _from_another_thread(error: type[BaseException]) -> None:
    """Raise in this thread what another one sends, as a watchdog does."""
    mine = threading.get_ident()

    def send() -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(mine), ctypes.py_object(error))

    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    for _ in range(1000):  # it arrives between two steps of this one
        pass


def _raise(error: type[BaseException]) -> Callable[[], None]:
    def act() -> None:
        raise error("injected")

    return act


ERRORS: dict[str, tuple[type[BaseException], Callable[[], None]]] = {
    "error": (InjectedError, _raise(InjectedError)),
    "memory": (torch.OutOfMemoryError, _raise(torch.OutOfMemoryError)),
    "interrupt": (KeyboardInterrupt, _raise(KeyboardInterrupt)),
    "thread": (InjectedError, lambda: _from_another_thread(InjectedError)),
}

BEFORE = (
    "scope",
    "pool",
    "record",
    "middle",
    "run",
    "recorded",
    "replayer",
    "order",
    "stage",
    "launch",
    "rng_state",
    "listen",
)
AFTER = ("launched", "lend", "hand_over")
"""What fails when the work of the call is done, or may be."""
PLACES = BEFORE + AFTER


class _Tripping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails at an operator in the middle of a run."""

    def __init__(self, visit: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.visit = visit

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.visit("middle")
        return result


class Faulty:
    """Before a backend among the bases: counts the visits of each place; `arm` makes one of the next ones fail."""

    def __init__(self) -> None:
        self.visits: Counter[str] = Counter()
        self.fired = 0
        self._armed: dict[str, tuple[int, Callable[[], None]]] = {}

    def arm(self, place: str, visit: int, act: Callable[[], None]) -> None:
        """Fail at this visit of a place, counted from now on."""
        self._armed[place] = (self.visits[place] + visit, act)

    def visit(self, place: str) -> None:
        self.visits[place] += 1
        at, act = self._armed.get(place, (0, None))
        if act is not None and self.visits[place] == at:
            self.fired += 1
            act()

    def scope(
        self, device: torch.device, *, aside: bool = True, stream: Any = None
    ) -> AbstractContextManager[Any]:
        self.visit("scope")
        return super().scope(device, aside=aside, stream=stream)

    def pool(self, device: torch.device) -> Any:
        self.visit("pool")
        return super().pool(device)

    def record(self, run: Callable[[], Any], pool: Any, generators: Sequence[torch.Generator]) -> Any:
        def tripping() -> Any:
            with _Tripping(self.visit):
                result = run()
            self.visit("run")
            return result

        self.visit("record")
        recorded = super().record(tripping, pool, generators)
        self.visit("recorded")
        return recorded

    @contextmanager
    def listen(self, report: Callable[[str], None]) -> Iterator[None]:
        self.visit("listen")
        with super().listen(report):
            yield

    def replayer(
        self, recording: Recording, copies: Sequence[Copy], results: Sequence[Tensor], *, shared: bool = False
    ) -> Replay:
        self.visit("replayer")
        stage, launch = super().replayer(recording, copies, results, shared=shared)

        def staging(sources: Sequence[Tensor]) -> None:
            self.visit("stage")
            stage(sources)

        def launching() -> Sequence[Tensor]:
            self.visit("launch")
            fresh = launch()
            self.visit("launched")
            return fresh

        return Replay(staging, launching)

    def order(self, pool: Any) -> None:
        self.visit("order")
        super().order(pool)

    def lend(self, tensor: Tensor) -> Any:
        self.visit("lend")
        return super().lend(tensor)

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        self.visit("hand_over")
        super().hand_over(tensors)

    def rng_state(self, generators: Sequence[torch.Generator]) -> Any:
        self.visit("rng_state")
        return super().rng_state(generators)

    def reclaim(self) -> None:
        self.visit("reclaim")
        super().reclaim()


class FaultyTape(Faulty, TapeBackend):
    """A tape that fails."""


class FaultyEager(Faulty, EagerBackend):
    """The function itself as its recording, which fails."""
