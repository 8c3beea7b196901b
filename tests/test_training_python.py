"""Python that runs in a backward reads what Python holds by then, as in eager: each state has a recording of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import counts
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from training import Wrap, clear, grads, same

from graphify import GraphifyWarning

VALUES = (1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 3.0, 2.0)
Made = tuple[nn.Module, Callable[[Tensor], Tensor], Callable[[float], None]]


class Reversed(torch.autograd.Function):
    """Gradient reversal, whose factor is a class attribute."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -Reversed.factor * g


class Scaled(torch.autograd.Function):
    """The same by a module that the context keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Owner) -> Tensor:
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.owner.factor, None


class Owner(nn.Module):
    """A module with a factor for gradients, and several ways to use it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.factor, self.body = kind, 1.0, nn.Linear(2, 2)

    def scale(self, g: Tensor) -> Tensor:
        return g * self.factor

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.body(x)
        if self.kind == "context":
            h = Scaled.apply(h, self)
        else:
            h.register_hook(self.scale)
        return h * 2


FACTOR = 1.0


def class_attribute(device: torch.device) -> Made:
    net = nn.Linear(2, 2).to(device)
    return net, lambda x: Reversed.apply(net(x)), lambda value: setattr(Reversed, "factor", value)


def closure(device: torch.device, make: Callable[[float], Any]) -> Made:
    """A class made in a function: no name leads to what its `backward` closes over."""
    net, state = nn.Linear(2, 2).to(device), {"factor": make(1.0)}

    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return state["factor"] * g

    return net, lambda x: Local.apply(net(x)), lambda value: state.update(factor=make(value))


def closure_number(device: torch.device) -> Made:
    return closure(device, float)


def closure_tensor(device: torch.device) -> Made:
    return closure(device, functools.cache(lambda value: torch.full((), value, device=device)))


def by_global(g: Tensor) -> Tensor:
    return g * FACTOR


def global_number(device: torch.device) -> Made:
    net = nn.Linear(2, 2).to(device)

    def forward(x: Tensor) -> Tensor:
        h: Tensor = net(x)
        h.register_hook(by_global)
        return h * 2

    return net, forward, lambda value: globals().update(FACTOR=value)


def module_hook(device: torch.device) -> Made:
    net, factor = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device), [1.0]
    net[1].register_full_backward_hook(lambda module, given, out: (given[0] * factor[0],))
    return net, net, lambda value: factor.__setitem__(0, value)


def module_pre_hook(device: torch.device) -> Made:
    net, factor = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device), {"value": 1.0}
    net[1].register_full_backward_pre_hook(lambda module, out: (out[0] * factor["value"],))
    return net, net, lambda value: factor.update(value=value)


def owner(device: torch.device, kind: str) -> Made:
    net = Owner(kind).to(device)
    return net, net, lambda value: setattr(net, "factor", value)


def bound_method(device: torch.device) -> Made:
    return owner(device, "hook")


def kept_in_context(device: torch.device) -> Made:
    return owner(device, "context")


WAYS = [
    class_attribute, closure_number, closure_tensor, global_number, module_hook, module_pre_hook, bound_method,
    kept_in_context,
]  # fmt: skip


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Callable[[torch.device], Made]:
    return request.param


def test_what_a_backward_reads(backend, device, way):
    """State that changes between calls, and comes back, is that of eager; equal state replays what was recorded for it."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, forward, change = way(device)
        f = wrap(forward)
        for value in VALUES:
            change(value)
            f(torch.randn(3, 2, device=device)).sum().backward()
            yield grads(net)
            clear(net)
        change(1.0)

    (graphed,) = same(train, backend)
    assert counts(graphed) == (1, 1, len(VALUES) - 2, 0, 0)
    assert graphed.stats().recordings == 1 + len({*VALUES})


def test_what_changes_before_the_backward(backend, device, way):
    """What was changed after the forward counts, since eager's backward would read it."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, forward, change = way(device)
        f = wrap(forward)
        for i, value in enumerate(VALUES):
            change(1.0)
            loss = f(torch.randn(3, 2, device=device)).sum()
            change(value)
            loss.backward()
            yield i, grads(net)
            clear(net)
        change(1.0)

    same(train, backend)


def test_state_that_never_settles(backend, device):
    """A factor with a schedule is not recorded for ever: its backwards run live, said once, and are eager's."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, forward, change = class_attribute(device)
        f = wrap(forward)
        for i in range(14):
            change(1.0 + i / 8)
            f(torch.randn(3, 2, device=device)).sum().backward()
            yield grads(net)
            clear(net)
        change(1.0)

    with pytest.warns(
        GraphifyWarning, match=r"reads Python state that never settles: `Reversed\.factor`"
    ) as said:
        (graphed,) = same(train, backend)
    assert len(said) == 1
    assert graphed.stats().recordings == 1 + 8


def test_what_only_the_forward_leaves(backend, device):
    """A field that the forward writes at each call needs no new recording of its backward."""

    class Net(Owner):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            self.last = result.detach()
            return result

    def train(wrap: Wrap) -> Iterator[Any]:
        net = Net("hook").to(device)
        f = wrap(net)
        for _ in range(5):
            f(torch.randn(3, 2, device=device)).sum().backward()
            yield grads(net), net.last
            clear(net)

    (graphed,) = same(train, backend)
    assert graphed.stats().recordings == 2


def test_switches_around_a_backward(backend, device):
    """A backward is that of the switches it runs under, which may be others than its forward's."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = nn.Linear(2, 2).to(device)
        f = wrap(net)
        for i in range(8):
            loss = f(torch.randn(3, 2, device=device)).pow(2).sum()
            with torch.autocast(device.type, torch.bfloat16, enabled=i % 4 in (1, 2)):
                loss.backward()
            yield grads(net)
            clear(net)

    (graphed,) = same(train, backend)
    assert graphed.stats().recordings == 3
