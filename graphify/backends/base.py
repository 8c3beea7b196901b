"""The one seam for hardware: what a backend must be able to do.

Nothing above this floor names a stream, an allocator or a device API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

__all__ = ["STALE", "Backend", "Copy", "Loan", "Recording", "Replay", "Report"]

Copy = tuple[Tensor, int]
"""A destination tensor and the index of its source among the tensors of the call."""

STALE = "a later replay overwrote: clone it before that replay, or use outputs='fresh'"
"""The end of what is said of a closed hand-out, by which its error is recognised."""

Report = Callable[[str], None]
"""Called with the name of a host read, such as "Tensor.tolist", that no dispatcher sees."""


class Replay(NamedTuple):
    """One way to use a recording, in two steps: what the caller's tensors hold may change between them."""

    stage: Callable[[Sequence[Tensor]], None]
    """Take the inputs of the next launch from the tensors of a call."""
    launch: Callable[[], Sequence[Tensor]]
    """Replay, and answer fresh copies of the results; memory for these is made before the work, or nothing happens."""


class Loan(Protocol):
    """Graph memory in a caller's hands."""

    tensor: Tensor

    def idle(self) -> bool:
        """Whether nobody holds the tensor, a view of it or a detached copy any more."""

    def close(self) -> None:
        """End the loan for good: whoever uses what was lent fails, or reads NaN."""


class Recording(Protocol):
    """One captured run: replaying it repeats the run's device work on the same memory."""

    nodes: int
    bytes: int
    stream: Any
    """Where it was captured, for `scope`."""
    ran: bool
    """Whether the recorded run itself did the work of the next replay, which then does nothing."""

    def replay(self) -> None:
        """Repeat the work, in the order and on the memory of the recorded run."""

    def close(self) -> None:
        """Free the work and let go of its memory; closing twice is harmless."""


class Backend(Protocol):
    """Records runs on one kind of device."""

    name: str
    device_type: str
    nodes_have_streams: bool
    """Whether autograd runs a node on the stream on which it was made."""
    records_aside: bool
    """Whether a recording runs no Python of its own between the operators of the run."""
    runs_live: bool
    """Whether the run that `record` makes already did its work; the first replay then does nothing."""

    def device_of(self, tensors: Iterable[Tensor]) -> torch.device | None:
        """The device to record on; None when this backend has nothing to do for these tensors."""

    def busy(self) -> bool:
        """Whether somebody else is capturing on this thread's stream."""

    def scope(
        self, device: torch.device, *, aside: bool = True, stream: Any = None
    ) -> AbstractContextManager[Any]:
        """Warm-ups and captures run inside: the capture stream, joined both ways, one thread at a time.

        With `aside=False` the work stays on the caller's own stream; with a recording's `stream` it goes there.
        """

    def pool(self, device: torch.device) -> Any:
        """A new memory pool for recordings that never replay at the same time."""

    def record(
        self, run: Callable[[], T], pool: Any, generators: Sequence[torch.Generator]
    ) -> tuple[Recording, T]:
        """Record `run`; its device work does not happen until the first replay. Call inside `scope`."""

    def listen(self, report: Report) -> AbstractContextManager[None]:
        """Report host reads on this thread that no dispatch mode sees."""

    def waits(self, report: Report) -> AbstractContextManager[None]:
        """Report each wait of the host for the device, whoever causes it; process-wide, so for one thread alone."""

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """Let the caller's stream use tensors that were made inside `scope`."""

    def order(self, pool: Any) -> None:
        """Make this thread's work wait for the pool's last replay, wherever that ran."""

    def replayer(
        self, recording: Any, copies: Sequence[Copy], results: Sequence[Tensor], *, shared: bool = False
    ) -> Replay:
        """Plan once how to fill these destinations, replay, and copy these tensors out fresh and dense.

        Sources have the shapes and dtypes of their destinations: the signature has seen to that. With `shared`
        there may be other plans for the same recording; else there is one, and strides agree, too.
        """

    def let_go(self, tensors: Sequence[Tensor], pool: Any) -> list[Tensor]:
        """The same tensors without a hold on their memory, which a later recording of the pool may use between replays."""

    def lend(self, tensor: Tensor) -> Loan:
        """Hand out graph memory under a storage of its own."""

    def rng_state(self, generators: Sequence[torch.Generator]) -> Any:
        """The state of the device's default generators and of these."""

    def set_rng_state(self, state: Any) -> None:
        """Put a state from `rng_state` back."""

    def reclaim(self) -> None:
        """Give cached memory that nobody uses back to the device."""

    def is_oom(self, error: BaseException) -> bool:
        """Whether this error means that the device's memory ran out."""

    def is_capture_error(self, error: BaseException) -> bool:
        """Whether the device refused something because it was capturing."""
