"""Objects of the user's are looked at without running a line of their classes' own code."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from checks import equal
from torch import Tensor

from graphify import check, graphify


class Config:
    """Finds its entries in a dict, and raises what a dict raises."""

    def __init__(self) -> None:
        self.__dict__["entries"] = {"scale": 2.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["entries"][name]


class Slotted:
    """Counts in the process what is looked up in vain."""

    __slots__ = ("__weakref__", "scale", "spare")
    asked: list[str] = []

    def __init__(self) -> None:
        self.scale = 2.0

    def __getattr__(self, name: str) -> Any:
        Slotted.asked.append(name)
        raise RuntimeError(name)


class Unbound:
    """A stand-in for an object that is not there yet, as those of web frameworks are: all about it raises."""

    scale = 2.0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("unbound")

    @property
    def __class__(self) -> Any:
        raise RuntimeError("unbound")

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise RuntimeError("unbound")

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("unbound")


class Making(defaultdict[str, float]):
    """Makes what it lacks, and says so."""

    made: list[str] = []

    def __missing__(self, key: str) -> float:
        Making.made.append(key)
        self[key] = 1.0
        return 1.0


@pytest.mark.parametrize("kind", [Config, Slotted, Unbound])
@pytest.mark.parametrize("fallback", ["raise", "eager"])
@pytest.mark.parametrize("place", ["closure", "argument", "container"])
def test_objects_with_lookups_of_their_own(kind: type, fallback: Any, place: str) -> None:
    """An object whose `__getattr__` raises anything, or does anything, is captured, and nothing is looked up in it."""
    held, asked = kind(), len(Slotted.asked)
    inside = {"held": [held]}

    def kept(x: Tensor, given: Any = None) -> tuple[Tensor, Any]:
        found = given if place == "argument" else inside["held"][0] if place == "container" else held
        return x * 2, found

    graphed = graphify(kept, backend="tape", fallback=fallback)
    rest = (held,) if place == "argument" else ()
    with torch.no_grad():
        assert check(kept, torch.ones(2), *rest)
        for number in range(4):
            x = torch.full((2,), float(number))
            doubled, found = graphed(x, *rest)
            equal(doubled, x * 2)
            assert found is held
    assert graphed.stats().replays == 2
    assert len(Slotted.asked) == asked


def test_a_lookup_that_raises_does_not_break_the_call() -> None:
    """A config whose `__getattr__` raises KeyError is read as eager reads it."""
    config = Config()
    graphed = graphify(lambda x: x * config.scale, backend="tape")
    with torch.no_grad():
        for scale in (2.0, 2.0, 2.0, 3.0, 3.0):
            config.entries["scale"] = scale
            equal(graphed(torch.ones(2)), torch.ones(2) * scale)


def test_an_emptied_slot_is_a_change() -> None:
    """A slot that is deleted and filled again is seen, and nobody asks for it by `__getattr__` but the function."""
    held = Slotted()
    graphed = graphify(lambda x: x * held.scale, backend="tape")
    with torch.no_grad():
        for scale in (2.0, 2.0, 2.0, 5.0, 5.0, 5.0):
            del held.scale
            held.scale = scale
            equal(graphed(torch.ones(2)), torch.ones(2) * scale)
    assert graphed.stats().replays == 2


def test_guards_make_no_items() -> None:
    """An item that was taken out of a dict that makes items is not made by looking whether it is there."""
    table = Making(float, {"a": 2.0, "b": 3.0})
    graphed = graphify(lambda x: x * table.get("a", 5.0), backend="tape")
    with torch.no_grad():
        for _ in range(3):
            equal(graphed(torch.ones(2)), torch.ones(2) * 2)
        del table["a"], table["b"]
        for _ in range(3):
            equal(graphed(torch.ones(2)), torch.ones(2) * 5)

    assert not Making.made
    assert not table
