"""Lazy modules: their first run is as in eager, and later ones are graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import counts, equal
from torch import Tensor, nn
from training import Wrap, grads, same

from graphify import CaptureError, check, graphify


def linear() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.Tanh())


def normalised() -> nn.Module:
    return nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(3), nn.Sequential(nn.LazyLinear(2)))


def alone() -> nn.Module:
    return nn.LazyLinear(3)


def state_of(net: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in net.state_dict().values()]


KINDS = [linear, normalised, alone]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("graded", [False, True], ids=["no_grad", "training"])
@pytest.mark.parametrize("way", ["module", "function"])
def test_lazy_modules_follow_eager(backend, device, make: Callable[[], nn.Module], graded: bool, way: str):
    """The first call makes the parameters as in eager, from the same random numbers, and later calls are replays."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = make().to(device)
        graphed = wrap(net) if way == "module" else wrap(lambda x: net(x))
        for _ in range(5):
            with torch.set_grad_enabled(graded):
                y = graphed(torch.randn(4, 5, device=device))
            if graded:
                y.square().sum().backward()
            yield y, state_of(net), grads(net)

    (graphed,) = same(train, backend)
    assert counts(graphed) == (1, 1, 3, 0, 0)


@pytest.mark.parametrize("early", [False, True], ids=["optimizer after", "optimizer before"])
def test_whole_steps_over_lazy_modules(backend, device, early: bool):
    """A step whose optimizer is made after a first dry run, or with the lazy parameters, follows eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizers = normalised().to(device), list[torch.optim.Optimizer]()

        def step(x: Tensor) -> Tensor:
            loss = net(x).square().sum()
            if optimizers:
                optimizers[0].zero_grad()
                loss.backward()
                optimizers[0].step()
            return loss.detach()

        step = wrap(step)
        if not early:
            yield step(torch.randn(4, 5, device=device))
        optimizers.append(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5))
        for _ in range(6):
            yield step(torch.randn(4, 5, device=device)), state_of(net)

    (graphed,) = same(train, backend)
    assert counts(graphed) == ((1, 1, 4, 0, 0) if early else (2, 1, 4, 0, 0))


def test_a_part_that_stays_lazy_until_later(backend, device):
    """A lazy part that only some calls reach is made in the first of these, whatever was captured before."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.LazyLinear(3), nn.LazyLinear(3)])

        def forward(self, x: Tensor, which: int) -> Tensor:
            return self.parts[which](x)

    def train(wrap: Wrap) -> Iterator[Any]:
        net = Either().to(device)
        graphed = wrap(net)
        for i in range(16):
            yield graphed(torch.randn(2, 5, device=device), i // 4 % 2).detach()

    same(train, backend)


def test_a_part_whose_first_run_is_the_one_that_is_recorded(backend, device, tmp_path: Path):
    """Where nothing tells beforehand, the recording gives way to one more warm-up, and nothing is made in a graph."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, flag = nn.Sequential(nn.LazyLinear(5), nn.LazyLinear(5)).to(device), tmp_path / "flag"
        flag.unlink(missing_ok=True)
        graphed = wrap(lambda x: net(x) if flag.exists() else net[0](x))
        for i in range(6):
            if i == 1:
                flag.write_text("")
            yield graphed(torch.randn(2, 5, device=device)).detach(), state_of(net[1]) if i else None

    same(train, backend)


def test_a_refused_call_that_made_parameters_stands(backend, device):
    """What made parameters cannot be taken back: that call gives its result, and the next one says what is wrong."""
    net = linear().to(device)

    def f(x: Tensor) -> Tensor:
        y = net(x)
        return y if y.sum().item() > 1e9 else y * 2

    graphed = graphify(f, backend=backend)
    with torch.no_grad():
        x = torch.randn(2, 5, device=device)
        equal(graphed(x), net(x) * 2)
        if backend != "eager":
            with pytest.raises(CaptureError, match="item"):
                graphed(x)


def test_ahead_of_time_a_lazy_module_is_told_of(backend, device):
    """`capture` says that the module is to be called once, changes nothing, and works after that."""
    net, twin = normalised().to(device), normalised().to(device)
    graphed, x = graphify(net, backend=backend), torch.randn(4, 5, device=device)
    with torch.no_grad():
        with pytest.raises(CaptureError, match=r"(?s)lazy module.*call it once"):
            graphed.capture(x)
        for target in (twin, graphed):
            torch.manual_seed(1)
            target(x)
        graphed.capture(torch.randn(3, 5, device=device))
        equal(twin(x), graphed(x))
        equal(state_of(twin), state_of(net))


def test_check_tells_of_lazy_modules():
    """`check` lists a lazy module that never ran, changes nothing, and finds nothing once it did."""
    net, x = linear(), torch.randn(2, 5)
    found = check(net, x)
    assert "lazy module" in str(found)
    assert isinstance(net[0], nn.LazyLinear)
    net(x)
    assert check(net, x).found == ()


def test_lazy_modules_in_buckets(backend, device):
    """The first call of a bucketed function makes the parameters, too."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = linear().to(device)
        graphed = wrap(net, buckets=[4, 8])
        with torch.no_grad():
            for n in (3, 4, 2, 7, 8, 3, 5):
                yield graphed(torch.randn(n, 5, device=device)).shape, state_of(net)

    same(train, backend)
