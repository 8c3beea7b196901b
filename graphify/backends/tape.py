"""Capture and replay, emulated on CPU tensors: a tape of operator calls on pinned memory.

Nothing happens at capture, as on a device: what the run wrote is put back, random streams too, and its results
are NaN until the first replay. Replays run below autograd, leave no version, and do not repeat Python. Recordings
of one pool spoil each other's memory where a device would reuse it. See `TapePool`.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._undo import below
from ..errors import CaptureError, GraphifyError
from ._host_reads import listen
from ._memory import SpoiledLoan, copying, holders, is_oom, spoil, whole
from ._rng import RngState, rng_state, set_rng_state
from ._tape_record import Recorder
from ._tape_steps import Step
from .base import Copy, Recording, Replay, Report

__all__ = ["TapeBackend", "TapePool", "TapeRecording"]

T = TypeVar("T")

# Process-wide: `torch.compile` is held off for the whole process while one thread records.
_turn = threading.RLock()


class _Here(threading.local):
    recording = False


_here = _Here()


class TapeRecording:
    """The operator calls of one run, and the memory they were made on."""

    def __init__(self, recorder: Recorder) -> None:
        self.nodes = len(recorder.steps)
        self.ran, self.stream = False, None
        self.memory = {key: whole(t.untyped_storage(), t.dtype) for key, t in recorder.owned.items()}
        self.bytes = sum(flat.nbytes for flat in self.memory.values())
        # Aliases count as holders of a storage, so the tape must know exactly how many are its own.
        self.pins = recorder.pins + Counter(self.memory.keys())
        self.spoils: weakref.WeakKeyDictionary[TapeRecording, frozenset[int]] = weakref.WeakKeyDictionary()
        self._owned = recorder.owned
        self._runs = _runs(recorder.steps)
        self._dtype = torch.get_default_dtype()
        self._closed = False

    def replay(self) -> None:
        """Repeat the operators, after spoiling what shares memory with them in the pool."""
        if self._closed:
            raise RuntimeError("this recording was closed")
        if torch.get_default_dtype() != self._dtype:
            raise GraphifyError(
                f"replayed under default dtype {torch.get_default_dtype()}, recorded under {self._dtype}"
            )
        for victim, keys in list(self.spoils.items()):
            victim.spoil(keys)
        for inference, grad, calls in self._runs:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad), below():
                for call in calls:
                    call()

    def spoil(self, keys: Iterable[int]) -> None:
        """Fill these storages with NaN."""
        for key in keys:
            if key in self.memory:
                spoil(self.memory[key])

    def close(self) -> None:
        """Let go of the tape and its memory; closing twice is harmless."""
        self._closed = True
        self._runs = []
        for kept in (self.memory, self.pins, self.spoils, self._owned):
            kept.clear()


def _runs(steps: Iterable[Step]) -> list[tuple[bool, bool, list[Callable[[], Any]]]]:
    """Steps in order, grouped by thread state: kernels read it below autograd.

    An LSTM, for one, makes no workspace for its backward while grad mode is off.
    """
    grouped = itertools.groupby(steps, key=lambda step: (step.inference, step.grad))
    return [(inference, grad, [step.run for step in group]) for (inference, grad), group in grouped]


class TapePool:
    """Memory that recordings reuse, as a device's graph pool does.

    A storage that only tapes hold is dead: a recording that is captured later may get its memory. So, for an
    earlier recording E and a later one L of a pool, with what was dead in E when L had been captured:

    - each replay of L fills with NaN what was dead;
    - each replay of E fills with NaN all that L made, if anything was dead: L may live in it.

    What somebody held at that moment is safe from L, as on a device, and no replay harms its own memory.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakSet[TapeRecording] = weakref.WeakSet()

    def admit(self, new: TapeRecording) -> None:
        """Let a recording in, and find out which memory it shares with the earlier ones."""
        members = list(self._members)
        pins = sum((recording.pins for recording in (*members, new)), Counter[int]())
        for old in members:
            dead = frozenset(key for key in old.memory if holders(key) <= pins[key])
            if dead:
                new.spoils[old] = dead
                old.spoils[new] = frozenset(new.memory)
        self._members.add(new)


class TapeBackend:
    """Records runs on the CPU as tapes."""

    name = "tape"
    device_type = "cpu"
    nodes_have_streams = False
    records_aside = False
    runs_live = False

    def device_of(self, tensors: Iterable[Tensor]) -> torch.device | None:
        """The CPU, unless a tensor lives elsewhere."""
        return torch.device("cpu") if all(t.device.type == "cpu" for t in tensors) else None

    def busy(self) -> bool:
        """Whether this thread is recording right now."""
        return _here.recording

    def scope(
        self, device: torch.device, *, aside: bool = True, stream: Any = None
    ) -> AbstractContextManager[Any]:
        """One thread at a time; there are no streams to join."""
        return _turn

    def pool(self, device: torch.device) -> TapePool:
        """A new pool."""
        return TapePool()

    def record(
        self, run: Callable[[], T], pool: TapePool, generators: Sequence[torch.Generator]
    ) -> tuple[TapeRecording, T]:
        """Record `run` and undo what it did to memory and to random streams.

        Raises:
            CaptureError: for a capture inside a capture, a higher-order operator, Python code that moves a
                generator, a first `torch.compile`. Whatever the run raises surfaces as it is.
        """
        if _here.recording:
            raise CaptureError(
                "a capture inside a capture",
                why="one thread records one graph at a time",
                fix="capture it alone",
            )
        recorder = Recorder(generators)
        try:
            result = _watched(run, recorder)
        except BaseException:
            recorder.undo.rollback()
            recorder.streams.restore()
            raise
        recorder.undo.rollback(values_only=True)
        recorder.streams.restore()
        recorder.settle_memory()
        recording = TapeRecording(recorder)
        recording.spoil(recording.memory)
        pool.admit(recording)
        return recording, result

    def listen(self, report: Report) -> AbstractContextManager[None]:
        """Report host reads of CPU tensors on this thread."""
        return listen(report)

    def waits(self, report: Report) -> AbstractContextManager[None]:
        """Nothing to hear: the host does the work itself."""
        return nullcontext()

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do: there is one stream."""

    def order(self, pool: TapePool) -> None:
        """Nothing to do: replays run in the calling thread."""

    def replayer(
        self, recording: Recording, copies: Sequence[Copy], results: Sequence[Tensor], *, shared: bool = False
    ) -> Replay:
        """A `copy_` or a foreach copy per dtype, the replay, a clone each."""
        return copying(recording, copies, results)

    def let_go(self, tensors: Sequence[Tensor], pool: Any) -> list[Tensor]:
        """The tensors themselves: the recording holds its memory for as long as it lives."""
        return list(tensors)

    def lend(self, tensor: Tensor) -> SpoiledLoan:
        """A copy that closing fills with NaN."""
        return SpoiledLoan(tensor)

    def rng_state(self, generators: Sequence[torch.Generator]) -> RngState:
        """The states of the CPU's default generator and of these."""
        return rng_state(generators)

    def set_rng_state(self, state: RngState) -> None:
        """Put the states back."""
        set_rng_state(state)

    def reclaim(self) -> None:
        """Nothing to do: memory is not kept."""

    def is_oom(self, error: BaseException) -> bool:
        """Whether memory ran out."""
        return is_oom(error)

    def is_capture_error(self, error: BaseException) -> bool:
        """Never: a CPU refuses nothing."""
        return False


def _watched(run: Callable[[], T], recorder: Recorder) -> T:
    _here.recording = True
    try:
        # A backward must run on this thread, where the mode is.
        with torch.autograd.set_multithreading_enabled(False), _uncompiled(), recorder:
            result = run()
            recorder.check_streams("its end")
    finally:
        _here.recording = False
    return result


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled functions as written: their kernels pass by the dispatcher, and the tape would miss them.

    They stay compiled for everyone after. Other threads run them as written, too, while this one records.
    """
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["frames"]:
        raise CaptureError(
            "`torch.compile` was used for the first time inside a capture",
            why="compiled kernels would be missing from the tape",
            fix="call the compiled function once before",
        )
