"""What a case is: inputs, and several ways to make the same call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ._clocks import Clocks
from ._nets import Inputs

__all__ = [
    "OUTPUTS",
    "Call",
    "Capture",
    "Captures",
    "Case",
    "Costs",
    "Outputs",
    "Ready",
    "Row",
    "Way",
    "backend_of",
]

Call = Callable[..., Tensor]
Outputs = Literal["fresh", "static"]
OUTPUTS: tuple[Outputs, ...] = ("fresh", "static")


def _nothing() -> Sequence[Tensor | None]:
    return ()


class Ready(NamedTuple):
    """A way that was built: graphs captured, libraries warmed up."""

    call: Call
    seen: Callable[[], Sequence[Tensor | None]] = _nothing
    """What else a call changes that must equal eager: gradients, parameters."""
    graphed: Any = None
    """The wrapper, where graphify makes the call."""


class Way(NamedTuple):
    """One way to make the call of a case; it is built when its turn comes, since that may fail."""

    name: str
    build: Callable[[], Ready]
    mirrors: str | None = "eager"
    """The way whose numbers this one must give; None: it is that way, or a replay of what stands there."""
    rival: str = ""
    """The way that this one is compared with."""
    tolerance: float = 0.0
    """How far a number may be off, as a share of the largest one of its tensor; 0: bit for bit."""


class Costs(NamedTuple):
    """What making graphs costs: milliseconds, and MiB that torch reserves and that the device has less."""

    capture: float
    pool: float
    device: float


class Capture(NamedTuple):
    """One way to make the graphs of a case ahead of time."""

    name: str
    graphs: int
    make: Callable[[], Any]
    """Gives what holds the graphs."""


class Captures(NamedTuple):
    """Several ways to do so, and which of them time and memory are compared with."""

    ways: Sequence[Capture]
    time_rival: str
    memory_rival: str


class Case(NamedTuple):
    """Several ways to make one call, and the arguments of successive calls."""

    key: str
    title: str
    inputs: Inputs
    ways: Sequence[Way]
    floor: str = "raw replay"
    """The way that does the GPU's work and nothing else."""
    grad: bool = False
    """Whether gradients are recorded around the calls."""
    checked: int = 8
    """Calls that are compared: graphs of a backward are replayed from the fourth on."""
    captures: Captures | None = None
    """What is measured of making the graphs, where that is of interest."""


@dataclass
class Row:
    """What became of one way: its clocks or costs, or the problem that it had; a note where one needs a word."""

    way: Way
    ready: Ready | None = None
    clocks: Clocks | None = None
    costs: Costs | None = None
    problem: str = ""
    note: str = ""


def backend_of(device: torch.device) -> Any:
    """CUDA graphs where there is a GPU, else the tape, which shows only that everything runs."""
    return "cuda" if device.type == "cuda" else "tape"
