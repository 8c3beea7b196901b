"""`torch.export` takes what is wrapped: the exported program is the one of the plain module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checks import equal
from torch import Tensor, nn

from graphify import graphify


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
        return self.inner(x).relu() * scale


class Decorated(Net):
    forward = graphify(Net.forward, backend="tape")


def nested() -> nn.Module:
    return nn.Sequential(graphify(Net(), backend="tape"), nn.Tanh())


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("make", [lambda: graphify(Net(), backend="tape"), Decorated, nested])
def test_export(make: Callable[[], nn.Module], warm: bool) -> None:
    """A graphed module is exported as the plain one, whether or not it has graphs, and is replayed on."""
    net = make().requires_grad_(False)
    inputs = [torch.randn(3, 4) for _ in range(4)]
    results = [net(x) for x in inputs] if warm else []
    program = torch.export.export(net, (torch.randn(3, 4),))
    for x in inputs:
        equal(program.module()(x), net(x))
    for x, result in zip(inputs, results, strict=False):
        equal(result, net(x))
    twin = net[0] if isinstance(net, nn.Sequential) else net
    stats = twin.stats() if hasattr(twin, "stats") else twin.forward.stats()
    assert (stats.warmups, stats.captures, stats.replays) == (1, 1, 10 if warm else 2)
    assert [name for name, _ in program.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert "relu" in str(program.graph)


def test_what_is_no_function_has_no_code() -> None:
    """A wrapper has code where what it wraps has some."""
    assert graphify(Net.forward).__code__ is Net.forward.__code__
    assert not hasattr(graphify(torch.relu, backend="tape"), "__code__")
