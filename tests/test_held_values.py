"""What hangs on tensors, and what objects of the standard library hold, are values like any other."""

from __future__ import annotations

import array
import collections
import configparser
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import equal
from torch import Tensor, nn

from graphify import CaptureError, check, graphify


def config() -> configparser.ConfigParser:
    made = configparser.ConfigParser()
    made["a"] = {"scale": "2"}
    return made


def filled() -> queue.Queue[float]:
    made: queue.Queue[float] = queue.Queue()
    made.put(2.0)
    return made


def logger() -> logging.Logger:
    made = logging.getLogger("graphify.tests.level")
    made.setLevel(2)
    return made


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "UserDict": (
        lambda: collections.UserDict(scale=2.0),
        lambda held: held["scale"],
        lambda held: held.update(scale=5.0),
    ),
    "UserList": (
        lambda: collections.UserList([2.0]),
        lambda held: held[-1],
        lambda held: held.append(5.0),
    ),
    "UserString": (
        lambda: collections.UserString("2"),
        lambda held: float(str(held)),
        lambda held: setattr(held, "data", "5"),
    ),
    "ConfigParser": (
        config,
        lambda held: held.getfloat("a", "scale"),
        lambda held: held.set("a", "scale", "5"),
    ),
    "Event": (
        threading.Event,
        lambda held: 5.0 if held.is_set() else 2.0,
        lambda held: held.set(),
    ),
    "Queue": (filled, lambda held: 2.0 * held.qsize(), lambda held: held.put(1.0)),
    "Logger": (
        lambda: logger(),
        lambda held: float(held.level),
        lambda held: held.setLevel(50),
    ),
    "bytearray": (
        lambda: bytearray(b"\x02"),
        lambda held: float(held[0]),
        lambda held: held.__setitem__(0, 5),
    ),
    "array": (
        lambda: array.array("d", [2.0]),
        lambda held: held[-1],
        lambda held: held.append(5.0),
    ),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_objects_of_the_standard_library(kind: str) -> None:
    """A change of what such an object holds is seen at the next call, and going without one costs no graph."""
    make, read, change = HOLDERS[kind]
    held = make()
    graphed = graphify(lambda x: x * read(held), backend="tape")
    with torch.no_grad():
        for step in range(8):
            if step == 4:
                change(held)
            x = torch.full((2,), float(step))
            equal(graphed(x), x * read(held))
    assert graphed.stats().replays == 4


def test_what_a_run_takes_out_of_a_queue_is_put_back() -> None:
    """A refused run that takes from a queue leaves it as it was."""
    held: queue.Queue[float] = queue.Queue()
    for number in range(4):
        held.put(float(number))
    with torch.no_grad():
        check(lambda x: x * held.get(), torch.ones(2))
        graphed = graphify(lambda x: x * held.get(), backend="tape")
        equal(graphed(torch.ones(2)), torch.zeros(2))
        with pytest.raises(CaptureError, match="`held"):
            graphed(torch.ones(2))
    assert list(held.queue) == [1.0, 2.0, 3.0]


def test_logging_inside_costs_no_graph() -> None:
    """A function that logs is captured, whoever else logs."""
    log = logging.getLogger("graphify.tests.held")

    def logged(x: Tensor) -> Tensor:
        log.warning("called")
        return x * 2

    graphed = graphify(logged, backend="tape")
    with torch.no_grad():
        for step in range(4):
            logging.getLogger("another").debug("%d", step)
            equal(graphed(torch.full((2,), float(step))), torch.full((2,), 2.0 * step))
    assert graphed.stats().replays == 2


class Scaled(nn.Module):
    """Reads numbers that hang on its parameter and its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("b", torch.ones(2))
        self.w.scale = 2.0  # type: ignore[attr-defined]
        self.b.shift = torch.ones(2)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w * self.w.scale + self.b.shift  # type: ignore[attr-defined,union-attr]


def test_attributes_of_tensors() -> None:
    """A value or a tensor that hangs on a parameter or a buffer is guarded."""
    net, twin = Scaled(), Scaled()
    graphed = graphify(net, backend="tape")
    with torch.no_grad():
        for step in range(12):
            for each in (net, twin):
                if step == 4:
                    each.w.scale = 5.0  # type: ignore[attr-defined]
                if step == 8:
                    each.b.shift = torch.full((2,), 3.0)  # type: ignore[union-attr]
            x = torch.full((2,), float(step))
            equal(graphed(x), twin(x.clone()))
    assert graphed.stats().replays >= 5


def test_attributes_of_tensors_that_a_run_changes() -> None:
    """A number that a run counts on a tensor is refused and put back."""
    net = Scaled()

    def counting(x: Tensor) -> Tensor:
        net.w.scale += 1  # type: ignore[attr-defined]
        return x * net.w.scale  # type: ignore[attr-defined]

    with torch.no_grad():
        check(counting, torch.ones(2))
        assert net.w.scale == 2.0  # type: ignore[attr-defined]
        with pytest.raises(CaptureError, match=r"w\.scale`"):
            graphify(counting, backend="tape").capture(torch.ones(2))
    assert net.w.scale == 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("read", [lambda x: x * x.scale, lambda x: x * getattr(x, "scale", 1.0)])
def test_attributes_of_arguments_are_refused(read: Callable[[Any], Tensor]) -> None:
    """An argument with an attribute that the code names is refused with the way out, and one without is not."""

    def own() -> Any:
        x: Any = torch.full((2,), 3.0)
        x.scale, x.unnamed = 2.0, 7
        return x

    graphed = graphify(read, backend="tape")
    with torch.no_grad():
        assert not check(read, own())
        equal(graphed(own()), torch.full((2,), 6.0))
        with pytest.raises(CaptureError, match=r"`x` carries an attribute `scale`[\s\S]*pass `x\.scale`"):
            graphed(own())

        x: Any = torch.full((2,), 3.0)
        x.unnamed = 7
        doubled = graphify(lambda x: x * 2, backend="tape")
        for _ in range(3):
            equal(doubled(x), torch.full((2,), 6.0))


@pytest.mark.filterwarnings("ignore")
def test_attributes_of_arguments_that_fall_back() -> None:
    """With `fallback="eager"` the function reads the caller's own tensor."""
    graphed = graphify(lambda x: x * x.scale, backend="tape", fallback="eager")
    with torch.no_grad():
        for step in range(4):
            x: Any = torch.full((2,), 3.0)
            x.scale = float(step)
            equal(graphed(x), torch.full((2,), 3.0 * step))
