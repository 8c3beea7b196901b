"""Iterators and random generators from outside give each call what eager gives it, or are refused by name."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import equal
from torch import Tensor, nn

from graphify import CaptureError, check, graphify


def growing() -> Iterator[float]:
    number = 1.0
    while True:
        yield number
        number += 1


def numbers() -> Iterator[float]:
    return iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "a generator": growing,
    "cycle": lambda: itertools.cycle([1.0, 2.0]),
    "count": lambda: itertools.count(1.0),
    "zip": lambda: zip(numbers(), numbers(), strict=True),
    "map": lambda: map(float, [1, 2, 3, 4, 5, 6]),
    "filter": lambda: filter(None, numbers()),
    "enumerate": lambda: enumerate(numbers()),
    "islice": lambda: itertools.islice(numbers(), 5),
    "chain": lambda: itertools.chain([1.0, 2.0], [3.0, 4.0, 5.0]),
    "accumulate": lambda: itertools.accumulate(numbers()),
    "tee": lambda: itertools.tee(numbers())[0],
    "a call": lambda: iter(numbers().__next__, 9.0),
    "a range": lambda: iter(range(1, 7)),
    "a dict": lambda: iter({1.0: 0, 2.0: 0, 3.0: 0, 4.0: 0, 5.0: 0}),
    "a set": lambda: iter({1, 2, 3, 4, 5}),
    "a list": numbers,
    "a tuple": lambda: iter((1.0, 2.0, 3.0, 4.0, 5.0)),
    "a string": lambda: iter("12345"),
    "reversed": lambda: reversed([1.0, 2.0, 3.0, 4.0, 5.0]),
}


def value(item: Any) -> float:
    return float(item[-1] if isinstance(item, tuple) else item)


@pytest.fixture(params=[*ITERATORS, "a file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Iterator[Any]]]:
    if request.param in ITERATORS:
        yield ITERATORS[request.param]
        return
    path = tmp_path / "numbers.txt"
    path.write_text("1\n2\n3\n4\n5\n6\n")
    with ExitStack() as opened:
        yield lambda: opened.enter_context(path.open())


def test_an_iterator_is_refused_before_it_loses_an_item(make: Callable[[], Iterator[Any]]) -> None:
    """The second call is refused with the name of the iterator, which then gives what it would have given."""
    items, twin = make(), make()
    graphed = graphify(lambda x: x * value(next(items)), backend="tape")
    with torch.no_grad():
        equal(graphed(torch.ones(2)), torch.ones(2) * value(next(twin)))
        with pytest.raises(CaptureError, match="`items`"):
            graphed(torch.ones(2))
    assert next(items) == next(twin)


@pytest.mark.filterwarnings("ignore")
def test_an_iterator_that_falls_back(make: Callable[[], Iterator[Any]]) -> None:
    """With `fallback="eager"` each call takes one item."""
    items, twin = make(), make()
    graphed = graphify(lambda x: x * value(next(items)), backend="tape", fallback="eager")
    with torch.no_grad():
        for number in range(4):
            x = torch.full((2,), number + 1.0)
            equal(graphed(x), x * value(next(twin)))


def test_check_names_an_iterator() -> None:
    """`check` lists an iterator with the line that takes from it."""
    items = itertools.cycle([1.0, 2.0])
    (found,) = check(lambda x: x * next(items), torch.ones(2))
    assert "`items` (cycle)" in found.what
    assert found.where is not None
    assert "next(items)" in found.where


def test_iterators_that_the_code_does_not_name_are_no_matter() -> None:
    """An iterator beside what the code uses, and a file that it writes to, keep nothing from its graph."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.batches = growing()
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    net = Net()
    graphed = graphify(net, backend="tape")
    with torch.no_grad():
        for number in range(4):
            x = torch.full((2,), number + next(net.batches))
            equal(graphed(x), x * 2)


def test_a_file_that_is_written(tmp_path: Path) -> None:
    """What a function prints into a file is its own affair."""
    with (tmp_path / "log.txt").open("w") as log:

        def logged(x: Tensor) -> Tensor:
            print("called", file=log)
            return x * 2

        graphed = graphify(logged, backend="tape")
        with torch.no_grad():
            for number in range(4):
                equal(graphed(torch.full((2,), float(number))), torch.full((2,), 2.0 * number))
    assert (tmp_path / "log.txt").read_text() == "called\n" * 2


def draw(generator: Any) -> float:
    return float(generator.random() if hasattr(generator, "random") else generator.rand())


def own(kind: str) -> Any:
    if kind == "random":
        return random.Random(7)
    numpy = pytest.importorskip("numpy")
    if kind == "numpy":
        return numpy.random.default_rng(7)
    if kind == "numpy, old":
        return numpy.random.RandomState(7)
    return numpy.random.Generator(numpy.random.MT19937(7))


KINDS = ["random", "numpy", "numpy, old", "numpy, another"]


class Noisy(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.own = own(kind)
        self.noise = True

    def forward(self, x: Tensor) -> Tensor:
        return x * draw(self.own) if self.noise else x * 2


@pytest.mark.parametrize("kind", KINDS)
def test_own_random_generators_are_refused(kind: str) -> None:
    """A draw from a generator object is refused like one from the global generators, and nothing was drawn."""
    net, twin = Noisy(kind), Noisy(kind)
    with torch.no_grad():
        assert not check(net, torch.ones(2))
        with pytest.raises(CaptureError, match=r"draws from `self\.own`"):
            graphify(net, backend="tape").capture(torch.ones(2))
        graphed = graphify(net, backend="tape")
        equal(graphed(torch.ones(2)), twin(torch.ones(2)))
        with pytest.raises(CaptureError, match=r"draws from `self\.own`"):
            graphed(torch.ones(2))
        equal(net(torch.ones(2)), twin(torch.ones(2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_own_random_generators_that_fall_back(kind: str) -> None:
    """With `fallback="eager"` each call draws once; where nothing is drawn, there is a graph whatever others draw."""
    net, twin = Noisy(kind), Noisy(kind)
    graphed = graphify(net, backend="tape", fallback="eager")
    with torch.no_grad():
        for _ in range(4):
            equal(graphed(torch.ones(2)), twin(torch.ones(2)))
        net.noise = twin.noise = False
        for _ in range(4):
            equal(graphed(torch.ones(2)), twin(torch.ones(2)))
            draw(net.own)
    assert graphed.stats().replays == 2


def test_buckets_see_draws() -> None:
    """Graphs that are made in a row refuse a draw, too."""
    generator = random.Random(1)
    with torch.no_grad(), pytest.raises(CaptureError, match="draws from `generator`"):
        graphify(lambda x: x + generator.random(), backend="tape", buckets=[2, 4]).capture_buckets(
            torch.ones(2, 3)
        )
    assert generator.random() == random.Random(1).random()
