"""Backwards that ask for some of the gradients only: what is in the way of the others is in nobody's way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from checks import counts
from torch import Tensor, nn
from training import Wrap, clear, error_of, grads, leaf, let_go, mlp, same

from graphify import CaptureError, graphify

Ask = Callable[[Tensor, Sequence[Tensor]], Any]


def by_inputs(loss: Tensor, of: Sequence[Tensor]) -> None:
    loss.backward(inputs=list(of))


def by_grad(loss: Tensor, of: Sequence[Tensor]) -> Any:
    return torch.autograd.grad(loss, of)


WAYS: dict[str, Ask] = {"backward": by_inputs, "grad": by_grad}


@pytest.fixture(params=WAYS)
def ask(request: pytest.FixtureRequest) -> Ask:
    return WAYS[request.param]


def test_an_input_that_was_written_inside(backend, device, ask):
    """What the function itself overwrote raises eager's error only in a backward that needs it."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 3, 3)

        def forward(x: Tensor, gain: Tensor) -> Tensor:
            h = (x @ w).relu() * gain
            x.add_(1.0)
            return h

        f = wrap(forward)
        for i in range(8):
            gain = leaf(device, 2, 3)
            loss = f(torch.randn(2, 3, device=device), gain).sum()
            if i % 4 == 1:
                yield error_of(loss.backward)
                clear(w, gain)
            else:
                yield ask(loss, (gain,)), grads(w, gain)
            del loss
            let_go(device)

    (graphed,) = same(train, backend)
    assert counts(graphed) == (1, 1, 6, 0, 0)
    assert graphed.stats().recordings == 2


def change(tensor: Tensor, how: str) -> None:
    if how == "written":
        with torch.no_grad():
            tensor.mul_(0.5)
    else:
        tensor.data = tensor.detach() * 0.5


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gain = nn.Linear(3, 3), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.gain


@pytest.mark.parametrize("first", ["whole", "part"])
@pytest.mark.parametrize("how", ["written", "rebound"])
def test_a_weight_changed_since(backend, device, ask, how, first):
    """A weight changed after the forward is in the way of what needs it, and of nothing behind it."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Gained().to(device))
        for i in range(8):
            x = leaf(device, 2, 3)
            loss = net(x).square().sum()
            if i == 2 and first == "whole":
                loss.backward()
                yield grads(net, x)
                clear(net)
                continue
            change(net.fc.weight, how)
            if i % 3 == 2 and how == "written":
                yield error_of(lambda loss=loss, x=x: ask(loss, (net.gain, x)))
            else:
                yield ask(loss, (net.gain,)), grads(net.gain)
            clear(net)

    assert counts(*same(train, backend))[3:] == (0, 0)


class Fails(torch.autograd.Function):
    """A gradient that raises, or counts how often it was asked for."""

    seen: list[int]
    late = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fails.late:
            Fails.seen.append(1)
            return grad * 2
        raise ArithmeticError("not here")


@pytest.mark.filterwarnings("ignore:.*runs its backward eagerly")
@pytest.mark.parametrize("late", [True, False])
def test_a_gradient_that_cannot_be_had(backend, device, ask, late, monkeypatch):
    """Python in the backward of what nobody asks for does not run, whether it would raise or be seen."""
    monkeypatch.setattr(Fails, "late", late)

    def train(wrap: Wrap) -> Iterator[Any]:
        Fails.seen = []
        w, gain = leaf(device, 3), leaf(device, 3)
        f = wrap(lambda x: Fails.apply(x * w) * gain)
        for _ in range(5):
            yield ask(f(torch.randn(2, 3, device=device)).sum(), (gain,)), grads(w, gain), list(Fails.seen)

    (graphed,) = same(train, backend, fallback="eager")
    assert counts(graphed) == (1, 1, 3, 0, 0)
    assert graphed.stats().recordings == 2


def test_a_gradient_that_cannot_be_had_raises_its_own_error(backend, device, ask):
    """Where it is asked for, the user's own error surfaces; and the next backward to others is right."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w, gain = leaf(device, 3), leaf(device, 3)
        f = wrap(lambda x: Fails.apply(x * w) * gain)
        for i in range(6):
            of = (gain, w) if i % 2 else (gain,)
            try:
                yield ask(f(torch.randn(2, 3, device=device)).sum(), of)
            except ArithmeticError as error:
                yield str(error)
            clear(w, gain)
            let_go(device)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


class Reads(torch.autograd.Function):
    """A gradient that reads a tensor on the host, and notes what it read under a name."""

    seen: list[tuple[str, float]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.tag = name
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        Reads.seen.append((ctx.tag, grad.sum().item()))
        return grad * 2, None


def test_a_refused_backward_goes_to_what_is_asked_for(backend, device):
    """A backward that cannot be recorded runs live, to the ends that are asked for: no others' Python runs."""

    def train(wrap: Wrap) -> Iterator[Any]:
        Reads.seen = []
        a, b = leaf(device, 3), leaf(device, 3)
        f = wrap(lambda x: Reads.apply(x * a, "a") * Reads.apply(x + b, "b"), fallback="eager")
        for i in range(8):
            loss = f(torch.randn(2, 3, device=device)).sum()
            yield by_grad(loss, ((a,), (b,), (a, b))[i % 3]), list(Reads.seen)

    with pytest.warns(UserWarning, match="runs its backward eagerly"):
        (graphed,) = same(train, backend)
    assert counts(graphed) == (1, 1, 6, 0, 0)


def test_a_refused_backward_raises_where_it_is_asked_for(backend, device):
    """By default it is an error, in a backward to the ends behind it only."""
    Reads.seen = []
    w, gain = leaf(device, 3), leaf(device, 3)
    graphed = graphify(lambda x: Reads.apply(x * w, "w") * gain, backend=backend)
    graphed(torch.ones(2, 3, device=device)).sum().backward()
    for _ in range(3):
        loss = graphed(torch.ones(2, 3, device=device)).sum()
        with pytest.raises(CaptureError, match="read on the host"):
            by_grad(loss, (w,))
        del loss
        (found,) = by_grad(graphed(torch.ones(2, 3, device=device)).sum(), (gain,))
        assert torch.equal(found, 4 * w.detach())


class Heads(nn.Module):
    """Two results with a part of their own each, behind more parameters than it takes for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(3, 3), nn.Tanh())))
        self.a, self.b = mlp(torch.device("cpu")), mlp(torch.device("cpu"))
        self.gain = nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.body(x)
        return self.a(y) * self.gain, self.b(y), y


@pytest.mark.parametrize("edited", ["gain", "a.2.weight", "b.2.weight"])
def test_several_results(backend, device, ask, edited):
    """Each result's own part may be out of date while a backward through the others, or beside it, is right."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Heads().to(device))
        weights = dict(net.named_parameters())
        asked = ([net.gain], [net.b[0].weight], [net.body[0].bias, net.b[2].bias], [net.a[2].weight])
        for i in range(12):
            x = leaf(device, 4, 3)
            results = net(x)
            with torch.no_grad():
                weights[edited].mul_(0.9)
            loss = sum(r.square().sum() for r in results)
            found = []
            yield error_of(lambda loss=loss, i=i, found=found: found.append(ask(loss, asked[i % 4])))
            yield found, grads(net, x) if found else None
            clear(net)

    assert counts(*same(train, backend))[3:] == (0, 0)
