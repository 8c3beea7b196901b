"""The function itself as its recording: the whole path of a graphed call without a graph.

Where `backend="tape"` or a device gives other numbers than eager and this backend does not, the graph is to blame;
where this one does too, it is the way to the graph (binding, static inputs, results).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._layout import family_key
from .._tree import tensors_of
from .._undo import below
from ..errors import CaptureError, GraphifyError
from ._host_reads import listen
from ._memory import Slot, SpoiledLoan, copying, is_oom
from ._rng import RngState, rng_state, set_rng_state
from .base import Copy, Recording, Replay, Report

__all__ = ["EagerBackend", "EagerRecording"]

T = TypeVar("T")

_turn = threading.RLock()


class _Here(threading.local):
    recording = False


_here = _Here()


class EagerRecording:
    """One run to be repeated by calling it again.

    `ran` is true while the recorded run stands for the next replay, which then does nothing: recording and
    replaying once is one run, in Python too. Whoever undid the recorded run sets it to False.
    """

    def __init__(self, run: Callable[[], Any], result: Any) -> None:
        self.ran, self.stream = True, None
        self.nodes = 1
        self._results = tensors_of(result)
        self.bytes = sum(
            {family_key(t): t.untyped_storage().nbytes() for t in self._results if _is_strided(t)}.values()
        )
        self._run: Callable[[], Any] | None = run

    def replay(self) -> None:
        """Run again and copy the results to where the recorded ones are.

        Raises:
            GraphifyError: the run made results of another structure, shape or dtype.
        """
        if self._run is None:
            raise RuntimeError("this recording was closed")
        if self.ran:
            self.ran = False
            return
        made = tensors_of(self._run())
        if len(made) != len(self._results):
            raise GraphifyError(f"a run made {len(made)} tensors, the recorded one {len(self._results)}")
        for old, new in zip(self._results, made, strict=True):
            _move(old, new)

    def close(self) -> None:
        """Let go of the run and its results; closing twice is harmless."""
        self._run, self._results = None, ()


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_there(old: Tensor, new: Tensor) -> bool:
    """Whether a result is in its place already, as an argument or a parameter is that the run returns."""
    if old is new or not (_is_strided(old) and _is_strided(new)):
        return old is new
    same = family_key(old) == family_key(new) and old.storage_offset() == new.storage_offset()
    return same and (old.shape, old.dtype) == (new.shape, new.dtype) and old.stride() == new.stride()


def _move(old: Tensor, new: Tensor) -> None:
    """Give a recorded result the values of a new one, without a trace in autograd or in versions."""
    if _is_there(old, new):
        return
    if hasattr(old, "__tensor_flatten__") and type(new) is type(old):
        for name in old.__tensor_flatten__()[0]:  # it has no memory but that of its parts
            _move(getattr(old, name), getattr(new, name))
        return
    with torch.inference_mode(old.is_inference()), below():
        slot = Slot(old)
        if not slot.refill(new):
            raise GraphifyError(
                f"a run made {tuple(new.shape)} {new.dtype} where the recorded one made {slot}"
            )


def _device_generators() -> Sequence[torch.Generator]:
    """The default generators of the accelerator in use; none before its first use."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return ()
    return tuple(getattr(torch.get_device_module(accelerator), "default_generators", ()))


class EagerBackend:
    """Runs functions as they are, on whatever device their tensors are."""

    name = "eager"
    device_type = ""  # any: autocast and the like are asked about on the CPU
    nodes_have_streams = False
    records_aside = False
    runs_live = True

    def device_of(self, tensors: Iterable[Tensor]) -> torch.device | None:
        """The first device that is not the CPU, else the CPU."""
        devices = (t.device for t in tensors)
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    def busy(self) -> bool:
        """Whether this thread is recording right now."""
        return _here.recording

    def scope(
        self, device: torch.device, *, aside: bool = True, stream: Any = None
    ) -> AbstractContextManager[Any]:
        """One thread at a time; the work stays on the caller's stream."""
        return _turn

    def pool(self, device: torch.device) -> object:
        """A pool in name only: results have memory of their own."""
        return object()

    def record(
        self, run: Callable[[], T], pool: object, generators: Sequence[torch.Generator]
    ) -> tuple[EagerRecording, T]:
        """Call `run`: its work is real, and the first replay does nothing (`EagerRecording.ran`).

        What a failing run leaves behind is the caller's to undo.
        """
        if _here.recording:
            raise CaptureError(
                "a capture inside a capture",
                why="one thread records one graph at a time",
                fix="capture it alone",
            )
        _here.recording = True
        try:
            result = run()
        finally:
            _here.recording = False
        return EagerRecording(run, result), result

    def listen(self, report: Report) -> AbstractContextManager[None]:
        """Report host reads on this thread, so that this path refuses what a graph would refuse."""
        return listen(report)

    def waits(self, report: Report) -> AbstractContextManager[None]:
        """Nothing to hear: the host does the work itself."""
        return nullcontext()

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do: the work stays on the caller's stream."""

    def order(self, pool: object) -> None:
        """Nothing to do: the work stays on the caller's stream."""

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
        """The states of the default generators of the CPU and of the device in use, and of these."""
        return rng_state((*_device_generators(), *generators))

    def set_rng_state(self, state: RngState) -> None:
        """Put the states back."""
        set_rng_state(state)

    def reclaim(self) -> None:
        """Nothing to do: memory is not kept."""

    def is_oom(self, error: BaseException) -> bool:
        """Whether memory ran out, on the host or on a device."""
        return is_oom(error)

    def is_capture_error(self, error: BaseException) -> bool:
        """Never: nothing is captured."""
        return False
