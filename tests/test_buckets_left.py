"""What calls of a bucket leave in Python: eager's, or an error that names it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bucketing import ROWS
from torch import Tensor, nn

from graphify import GraphifyWarning, PaddingError, graphify

CHECKS: list[Any] = [True, "outputs", False]
COUNTED = 0


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Inference, unless a test says otherwise."""
    with torch.no_grad():
        yield


@dataclasses.dataclass
class Both:
    """A number and a tensor."""

    count: int
    mean: Tensor


class Box:
    """An object that no walk takes apart."""


def box(x: Tensor) -> Box:
    made = Box()
    made.count = x.shape[0]  # type: ignore[attr-defined]
    return made


class Leaves(nn.Module):
    """Sets one attribute that it never reads."""

    left: Any

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        self.left = self.make(x)
        return x * 2


def in_a_dict(seen: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        seen["count"] = x.shape[0]
        return x * 2

    return step


def in_a_cell() -> Callable[[Tensor], Tensor]:
    count = 0

    def step(x: Tensor) -> Tensor:
        nonlocal count
        count = x.shape[0]
        return x * 2

    return step


def in_a_global(x: Tensor) -> Tensor:
    global COUNTED  # noqa: PLW0603
    COUNTED = x.shape[0]
    return x * 2


OF_THE_SIZE: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda x: x.shape[0],
    "float": lambda x: 1 / x.shape[0],
    "text": lambda x: f"{len(x)} rows",
    "shape": lambda x: x.shape,
    "tuple": lambda x: ("rows", (x.shape[0],)),
    "list": lambda x: [0] * x.shape[0],
    "dataclass": lambda x: Both(x.shape[0], torch.zeros(2, device=x.device)),
    "object": box,
    "rows": lambda x: x * 3,
    "rows inside": lambda x: {"rows": [x * 3]},
    "argument inside": lambda x: (x,),
}
OF_THE_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "bare": lambda x: x.mean(0),
    "tuple": lambda x: (x.mean(0),),
    "dict": lambda x: {"mean": x.mean(0)},
    "list in a tuple": lambda x: (1, [x.mean(0)]),
    "dataclass": lambda x: Both(2, x.mean(0)),
}
OF_NEITHER: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda x: None,
    "nan": lambda x: float("nan"),
    "constants": lambda x: (7, "seven", torch.float32, torch.relu),
    "tensor inside": lambda x: [torch.ones(2, device=x.device) * 3],
    "width": lambda x: {"width": x.shape[1]},
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("kind", OF_THE_SIZE)
def test_what_is_made_of_the_size(backend: str, device: torch.device, kind: str, check: Any) -> None:
    """A value that is the bucket's and not the call's is refused by name, whatever is compared, and left by no call."""
    net = Leaves(OF_THE_SIZE[kind])
    step = graphify(net, check_padding=check, backend=backend, **ROWS)

    for n in (3, 3, 1):
        with pytest.raises(PaddingError, match=r"self\.left"):
            step(torch.randn(n, 2, device=device))
        assert not hasattr(net, "left")


@pytest.mark.parametrize("check", [True, "outputs"])
@pytest.mark.parametrize("kind", OF_THE_ROWS)
def test_what_is_made_of_all_rows(backend: str, device: torch.device, kind: str, check: Any) -> None:
    """A tensor that padded rows take part in is found wherever an attribute holds it."""
    net = Leaves(OF_THE_ROWS[kind])
    step = graphify(net, check_padding=check, backend=backend, **ROWS)

    for n in (3, 3, 1):
        with pytest.raises(PaddingError, match=r"self\.left.*smallest difference"):
            step(torch.randn(n, 2, device=device))
        assert not hasattr(net, "left")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("kind", OF_NEITHER)
def test_what_padding_does_not_change(backend: str, device: torch.device, kind: str, check: Any) -> None:
    """A value that is the same at every size is left by every call, replays included."""
    plain, net = Leaves(OF_NEITHER[kind]), Leaves(OF_NEITHER[kind])
    step = graphify(net, check_padding=check, backend=backend, **ROWS)

    for n in (3, 3, 4, 1, 2, 3, 1, 2):
        x = torch.randn(n, 2, device=device)
        net.left = "nothing yet"
        assert torch.equal(step(x), plain(x))
        assert repr(net.left) == repr(plain.left)
    assert step.stats().replays > 0


def test_a_size_that_fills_the_bucket(backend: str, device: torch.device) -> None:
    """Calls without padding leave their own size, before and after one with padding is refused."""
    net = Leaves(OF_THE_SIZE["int"])
    step = graphify(net, buckets=[4], backend=backend)

    for n in (4, 4, 4, 3, 4, 2, 4):
        x = torch.randn(n, 2, device=device)
        if n < 4:
            with pytest.raises(PaddingError, match=f"self.left.*4 padded, {n} at its exact size|self.left"):
                step(x)
        else:
            assert torch.equal(step(x), x * 2)
        assert net.left == 4


@pytest.mark.parametrize("check", CHECKS)
def test_other_places(backend: str, device: torch.device, check: Any) -> None:
    """Items of a dict, closure variables and globals are places like any other."""
    seen: dict[str, Any] = {}
    for target, name in ((in_a_dict(seen), "count"), (in_a_cell(), "count"), (in_a_global, "COUNTED")):
        step = graphify(target, check_padding=check, backend=backend, **ROWS)
        for n in (3, 1):
            with pytest.raises(PaddingError, match=name):
                step(torch.randn(n, 2, device=device))
    assert seen == {}
    assert COUNTED == 0


def test_the_same_value_by_chance(backend: str, device: torch.device) -> None:
    """A place that already holds the call's size, or the bucket's, hides nothing."""
    for before in (3, 4):
        net = Leaves(OF_THE_SIZE["int"])
        net.left = before
        step = graphify(net, buckets=[4], backend=backend)
        with pytest.raises(PaddingError, match=r"self\.left"):
            step(torch.randn(3, 2, device=device))
        assert net.left == before


def test_sizes_that_vary_by_themselves(backend: str, device: torch.device) -> None:
    """Where nobody asked for padding, such a function keeps exact sizes."""
    plain, net = Leaves(OF_THE_SIZE["int"]), Leaves(OF_THE_SIZE["int"])
    step = graphify(net, buckets="auto", backend=backend)

    with pytest.warns(GraphifyWarning):
        for n in (1, 2, 3, 4, 5, 6, 7, 8, 3, 5, 5, 3, 3):
            x = torch.randn(n, 2, device=device)
            assert torch.equal(step(x), plain(x))
            assert net.left == plain.left


def test_random_numbers_hide_no_size(backend: str, device: torch.device) -> None:
    """A function that draws is not compared, but for the values that it returns or leaves."""
    net = Leaves(lambda x: (x.shape[0], torch.rand_like(x).sum()))
    with pytest.raises(PaddingError, match=r"self\.left\[0\]"):
        graphify(net, backend=backend, **ROWS)(torch.randn(3, 2, device=device))
    for check in CHECKS:
        step = graphify(lambda x: (x * 2, len(x)), check_padding=check, backend=backend, **ROWS)
        with pytest.raises(PaddingError, match="other values"):
            step(torch.randn(3, 2, device=device))


class Large(Leaves):
    """Writes memory of which no trial makes a copy, too."""

    memory: Tensor

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__(make)
        self.register_buffer("memory", torch.zeros(300))

    def forward(self, x: Tensor) -> Tensor:
        self.memory.add_(1)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.* is trusted, not proved:graphify.GraphifyWarning")
class TestWithoutTrials:
    """Functions over large memory, whose own calls show what they leave."""

    @pytest.fixture(autouse=True)
    def limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is large here."""
        monkeypatch.setattr("graphify._trial._LIMIT", 1000)

    @pytest.mark.parametrize("kind", [k for k in OF_THE_SIZE if k != "argument inside"])
    def test_of_the_size(self, backend: str, device: torch.device, kind: str) -> None:
        """The first call is eager's; the first one that leaves what the bucket has says so."""
        net = Large(OF_THE_SIZE[kind]).to(device)
        step = graphify(net, buckets=[4], backend=backend)

        x = torch.randn(3, 2, device=device)
        assert torch.equal(step(x), x * 2)
        for n in (3, 3, 2):
            with pytest.raises(PaddingError, match=r"self\.left"):
                step(torch.randn(n, 2, device=device))

    @pytest.mark.parametrize("kind", OF_NEITHER)
    def test_of_neither(self, backend: str, device: torch.device, kind: str) -> None:
        """What is the same at every size is left by every call."""
        plain, net = Large(OF_NEITHER[kind]).to(device), Large(OF_NEITHER[kind]).to(device)
        step = graphify(net, backend=backend, **ROWS)

        for n in (3, 3, 4, 1, 2, 3, 1, 2, 3):
            x = torch.randn(n, 2, device=device)
            assert torch.equal(step(x), plain(x))
            assert repr(net.left) == repr(plain.left)
        assert torch.equal(net.memory, plain.memory)
        assert step.stats().replays > 0
