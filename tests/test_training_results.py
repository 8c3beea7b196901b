"""Several results of one call: a backward from some of them does what eager does, and leaves the others alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Wrap, clear, error_of, grads, same

from graphify import _autograd


class Towers(nn.Module):
    """Two results that share parameters at most, two that share a node that saves nothing, two that share one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, z = self.a(x), self.b(x).tanh()
        return y.sin(), y + 1, z, z * self.gain, self.a(x * 2).exp()


def replayed(graphed: list[Any]) -> int:
    """How many recordings the calls took, which were replayed and never run eagerly."""
    stats = graphed[0].stats()
    assert stats.replays > 0
    assert stats.eager == stats.errors == 0
    return stats.captures


def outcome(loss: Tensor, *owners: Any) -> Any:
    """The error of a backward, or the gradients after it: how far a failing one comes is not compared."""
    error = error_of(loss.backward)
    found = [None if g is None else g.clone() for g in grads(*owners)] if error is None else None
    if error is not None:
        clear(*owners)
    return error, found


PAIRS = list(itertools.product(range(5), repeat=2))


def towers(device: torch.device, wrap: Wrap) -> Iterator[tuple[int, nn.Module, tuple[Tensor, ...]]]:
    net = wrap(Towers().to(device))
    for i in range(4):
        yield i, net, net(torch.randn(2, 3, device=device))
        clear(net)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_backward_from_one_result_and_then_another(backend, device, first, second):
    """A second backward raises where the two results share what eager let go, and only there."""

    def train(wrap: Wrap) -> Iterator[Any]:
        for i, net, results in towers(device, wrap):
            results[first].sum().backward(retain_graph=i == 3)
            yield outcome(results[second].sum(), net)
            yield outcome(sum(r.sum() for r in results), net)

    replayed(same(train, backend))


def test_without_the_engines_word_no_result_goes_backward_late(backend, device, monkeypatch):
    """Where torch does not say whether a graph is retained, a second backward is right or raises eager's error."""
    monkeypatch.setattr(_autograd, "keeps_graph", None)

    def train(wrap: Wrap) -> Iterator[Any]:
        for i, net, results in towers(device, wrap):
            results[0].sum().backward(retain_graph=True)
            results[3].sum().backward(retain_graph=i % 2 > 0)
            yield outcome(results[3].sum(), net)

    replayed(same(train, backend))


@pytest.mark.parametrize("pick", range(5))
def test_hooks_of_what_a_backward_does_not_reach(backend, device, pick):
    """Hooks on a parameter that the results gone back from do not depend on stay silent."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, seen = wrap(Towers().to(device)), []
        for name, p in net.named_parameters():
            p.register_hook(lambda grad, name=name: seen.append(name) or grad * 2)
            p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(f"{name} is there"))
        for i in range(6):
            results = net(torch.randn(2, 3, device=device))
            results[pick if i < 4 else i % 5].sum().backward()
            yield sorted(seen), grads(net)
            seen.clear()

    replayed(same(train, backend))


def test_a_result_keeps_what_it_needs_until_its_own_backward(backend, device):
    """A call made after a backward from one result leaves the other results' gradients as they would have been."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Towers().to(device))
        for _ in range(5):
            first = net(torch.randn(2, 3, device=device))
            first[0].sum().backward()
            second = net(torch.randn(2, 3, device=device))
            first[2].sum().backward()
            second[3].sum().backward()
            second[4].sum().backward()
            yield grads(net)

    replayed(same(train, backend))


def test_dropped_results_keep_nothing(backend, device):
    """Results that nobody holds, and those whose graph eager has let go, take no further recording."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Towers().to(device))
        for _ in range(6):
            kept = list(net(torch.randn(2, 3, device=device)))
            del kept[2:]  # the second of those left goes through what the first goes through
            kept[0].sum().backward()
            yield grads(net)

    graphed = same(train, backend)
    assert replayed(graphed) == 1


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x * 2
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.kept


def edited(h: Tensor) -> Tensor:
    h[0].add_(1.0)
    return h


ONCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "saves nothing": lambda x, w: x + w,
    "a number": lambda x, w: (x + w) * 0.5,
    "a slice written": lambda x, w: edited(x + w),
    "somebody's own": lambda x, w: Own.apply(x + w),
    "one that is not on the way": lambda x, w: ((x * w).relu(), x + w)[1],
}


@pytest.mark.parametrize("kind", ONCE)
def test_a_second_backward_through_one_result(backend, device, kind):
    """It raises where eager raises, at once and after a later call."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = nn.Parameter(torch.rand(3, device=device))
        f = wrap(lambda x: ONCE[kind](x, w))
        for _ in range(5):
            y = f(torch.randn(2, 3, device=device))
            y.sum().backward()
            yield outcome(y.square().sum(), w)

    same(train, backend)


def test_an_old_backward_that_needs_nothing(backend, device):
    """Where nothing was saved a result may go backward after later calls, with the gradient of its own."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = nn.Parameter(torch.rand(3, device=device))
        f, old = wrap(lambda x: ((x * w).relu(), x + w)[1]), []
        for i in range(6):
            old.append(f(torch.randn(2, 3, device=device)))
            old[-1].sum().backward()
            (old[i // 2] * i).sum().backward()
            yield w.grad

    replayed(same(train, backend))


def test_saved_tensors_that_a_backward_does_not_need(backend, device):
    """A weight that was edited raises eager's error only in a backward that reads it."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Towers().to(device))
        for _ in range(4):
            results = net(torch.randn(2, 3, device=device))
            with torch.no_grad():
                net.gain.mul_(0.5)
            yield outcome(results[4].sum(), net)
            yield outcome(results[3].sum(), net)

    replayed(same(train, backend))


def test_a_result_that_depends_on_no_outside_tensor(backend, device):
    """It needs a gradient all the same, and its backward gives none to anybody."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = nn.Parameter(torch.rand(3, device=device))

        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            own = torch.ones(3, device=device, requires_grad=True)
            return x + own, x * w

        f = wrap(forward)
        for i in range(5):
            results = f(torch.randn(2, 3, device=device))
            results[i % 2].sum().backward()
            yield [r.requires_grad for r in results], w.grad

    same(train, backend)


VIEWS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "a view of a view": lambda h: (h[0], h[0][...], h),
    "the inner one first": lambda h: (h[0][1:], h[0], h.t(), h),
    "one of the other": lambda h: tuple(nested(h)),
    "in another order": lambda h: (h[1:], h[:1], h.view(-1), h)[::-1],
    "written": lambda h: tuple(written(h)),
}


def nested(h: Tensor) -> Iterator[Tensor]:
    row = h[0]
    yield row[1:]
    yield row[:2]
    yield row
    yield h


def written(h: Tensor) -> Iterator[Tensor]:
    row = h[0]
    row.mul_(0.5)
    yield row[1:]
    yield row
    yield h


@pytest.mark.parametrize("kind", VIEWS)
def test_views_of_one_another(backend, device, kind):
    """Gradients of a result and of views of it, and of views of these, add up in eager's order, bit for bit."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = nn.Parameter(torch.rand(3, device=device))
        f = wrap(lambda x: VIEWS[kind]((x * w).exp() * 2))
        for _ in range(6):
            results = f(torch.randn(2, 3, device=device))
            sum((r * torch.randn(r.shape, device=device)).mean() for r in results).backward()
            yield results, w.grad

    replayed(same(train, backend))


LAID_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "alias": lambda h: h[...],
    "view of the same shape": lambda h: h.view_as(h),
    "transposed": lambda h: h.t(),
    "flat": lambda h: h.view(-1),
    "rows": lambda h: h[:2],
    "columns": lambda h: h[:, :3],
}


@pytest.mark.parametrize("kind", LAID_OUT)
@pytest.mark.parametrize("pick", [0, 1])
def test_layouts_of_gradients_of_views(backend, device, kind, pick):
    """A gradient of a view of a result comes in with the layout that it has: products round by that."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = nn.Parameter(torch.linspace(-1.0, 1.0, 16, device=device).view(4, 4))

        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.relu(x @ w) @ w
            return h, LAID_OUT[kind](h)

        f = wrap(forward)
        for _ in range(12):
            result = f(torch.randn(3, 4, device=device))[pick]
            clear(w)
            result.backward(
                torch.randn(result.shape[::-1], device=device).permute(*range(result.dim())[::-1])
            )
            yield w.grad

    replayed(same(train, backend))


def test_strides_of_a_gradient_of_one_row(backend, device):
    """The gradient of an argument is laid out as in eager, also where a dimension of one element leaves a choice."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = nn.Parameter(torch.rand(4, 3, device=device))

        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            h = x.relu() * 0.5
            return h @ w, h

        f, old = wrap(forward), []
        for i in range(6):
            x = torch.rand(4, device=device).as_strided((1, 4), (1, 1)).requires_grad_()
            old.append((x, sum(r.sum() for r in f(x))))
            for earlier, loss in old[i % 2 :]:
                loss.backward(retain_graph=True)
                yield earlier.grad, earlier.grad.stride()
            del old[: i % 2]

    replayed(same(train, backend))


class Deep(nn.Module):
    """A body and two heads, each of enough parameters for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = (
            nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(3, 3), nn.Tanh())))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.body(x)
        return y, self.a(y), self.b(y), self.b(x)


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_groups_of_many_parameters(backend, device, kept, again):
    """Heads and body, together and alone, with `.grad` there or not, and with a call in the middle of a backward."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Deep().to(device))
        for i in range(12):
            x, z = (torch.randn(2, 3, device=device, requires_grad=True) for _ in range(2))
            if again and i > 3:
                x.register_hook(lambda grad, z=z: seen.append(net(z)[1].detach()))
            seen: list[Tensor] = []
            results = net(x)
            picked = [[results[1]], [results[2], results[0]], results, [results[3]]][i % 4]
            sum(r.square().sum() for r in picked).backward()
            yield seen, x.grad, [None if g is None else g.clone() for g in grads(net)]
            if not kept:
                clear(net)

    replayed(same(train, backend))
