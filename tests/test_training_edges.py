"""Gradients where a function makes histories of its own, in arguments, in outside tensors, against its caller's mode."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import counts, equal
from torch import Tensor, nn
from training import Wrap, clear, grads, leaf, same

from graphify import CaptureError, GraphifyWarning, graphify
from graphify.backends.tape import TapeBackend


# Such a first call runs on the capture stream, and torch says that its nodes have another one than the backward.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_function_that_records_gradients_by_itself(backend, device, mode):
    """A result of a call without gradients has a history where the function switched them on, and goes backward."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 3)

        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.inference_mode(False), torch.enable_grad():
                y = (torch.ones(3, device=device) * w).exp()
            return y, x * w

        f = wrap(forward)
        for _ in range(5):
            with mode():
                y, z = f(torch.randn(2, 3, device=device))
            y.sum().backward()
            yield y, z, y.requires_grad, z.requires_grad, w.grad

    assert counts(*same(train, backend)) == (1, 1, 3, 0, 0)


def test_an_argument_handed_back_without_gradients(backend, device):
    """A call under no_grad that returns an argument or a weight as it is needs no backward, and replays."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 3)
        f = wrap(lambda x: (x, w, x + w))
        for _ in range(4):
            x = leaf(device, 3) * 2
            with torch.no_grad():
                yield f(x)
            assert x.grad_fn is not None

    assert counts(*same(train, backend)) == (1, 1, 2, 0, 0)


def half(x: Tensor, w: Tensor) -> Tensor:
    h = (x + 1.0) @ w
    x[0] = 0.5
    return h


def read(x: Tensor, w: Tensor) -> Tensor:
    x[0] = 0.5
    return (x @ w) * x.sum().item()


@pytest.mark.parametrize("function", [half, read])
def test_a_refusal_that_comes_after_a_run(backend, device, function):
    """Where a call gave its argument a history it stands as it is; the next is refused before anything runs."""
    w = leaf(device, 3, 3)
    graphed = graphify(function, backend=backend)
    for i in range(3):
        plain, other = (leaf.detach().requires_grad_() for leaf in [torch.ones(2, 3, device=device)] * 2)
        x, y = plain * 2.0, other * 2.0
        if i:
            with pytest.raises(CaptureError):
                graphed(y, w)
            result = function(y, w)
        else:
            result = graphed(y, w)
        want = function(x, w)
        equal(want, result)
        equal(torch.autograd.grad(want.sum(), (plain, w)), torch.autograd.grad(result.sum(), (other, w)))
    assert counts(graphed) == (1, 0, 0, 0, 2)


def set_rows(table: Tensor, y: Tensor) -> None:
    table[:3] = y


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rows": set_rows,
    "copy_": lambda table, y: table[1:].copy_(y),
    "add_": lambda table, y: table.add_(y.sum()),
    "index_put_": lambda table, y: table.index_put_((torch.arange(3, device=table.device),), y),
}


@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize("kind", WRITES)
def test_an_outside_tensor_that_would_get_a_history(backend, device, kind, needed):
    """The first call is eager's; the next is refused by the tensor's name, whether or not its result needs gradients."""
    w = leaf(device, 4)
    table, twin = torch.zeros(4, 4, device=device), torch.zeros(4, 4, device=device)

    def step(x: Tensor, into: Tensor | None = None) -> Tensor:
        into = table if into is None else into
        WRITES[kind](into, x * w)
        return x * w if needed else x * 2

    graphed = graphify(step, backend=backend)
    x = torch.randn(3, 4, device=device)
    equal(step(x, twin), graphed(x))
    equal(torch.autograd.grad(twin.sum(), w), torch.autograd.grad(table.sum(), w))
    before = table.detach().clone()
    with pytest.raises(CaptureError, match=r"`[\w.]*table`.*written in place.*needs gradients"):
        graphed(x)
    equal(before, table.detach())


def told(tensor: Tensor) -> tuple[Any, ...]:
    """All that autograd knows of a tensor and of its base; only the node of a view is made anew by torch itself."""
    base, node = tensor._base, tensor.grad_fn
    empty = tensor.is_leaf and tensor.grad is None
    known = (tensor.requires_grad, tensor.is_leaf, tensor._version, type(tensor), empty)
    below = None if base is None else (id(base), told(base))
    return known, type(node) if base is not None else node, tensor.tolist(), below


KINDS: dict[str, Callable[[torch.device], Tensor]] = {
    "plain": lambda device: torch.rand(4, 4, device=device),
    "view": lambda device: torch.rand(6, 4, device=device)[1:5],
    "frozen": lambda device: nn.Parameter(torch.rand(4, 4, device=device), requires_grad=False),
    "result": lambda device: leaf(device, 4, 4) * 2,
    "view of a result": lambda device: (leaf(device, 6, 4) * 2)[1:5],
}


@pytest.mark.parametrize("place", ["argument", "outside", "attribute"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", WRITES)
def test_a_capture_ahead_of_time_gives_no_history(backend, device, write, kind, place):
    """It is refused, and leaves a tensor that the function writes with gradients as it was, in every way."""
    w, table, holder = leaf(device, 4), KINDS[kind](device), nn.Module()
    if place == "attribute":
        holder.table = table

    def step(x: Tensor, into: Tensor | None = None) -> Tensor:
        into = {"argument": into, "outside": table, "attribute": getattr(holder, "table", None)}[place]
        WRITES[write](into, x * w)
        return x * 2

    graphed, before, x = graphify(step, backend=backend), told(table), torch.randn(3, 4, device=device)
    with pytest.raises(CaptureError, match=r"table|into.*written in place.*needs gradients"):
        graphed.capture(*(x, table) if place == "argument" else (x,))
    assert told(table) == before


@pytest.mark.parametrize("kind", ["plain", "view", "frozen"])
@pytest.mark.parametrize("outside", [True, False])
def test_a_capture_ahead_of_time_gives_no_gradient(backend, device, kind, outside):
    """A tensor that comes to need a gradient inside, and gets one, has neither after a capture that is refused."""
    w, table = leaf(device, 4), KINDS[kind](device)

    def step(x: Tensor, into: Tensor) -> Tensor:
        into = table if outside else into
        (into.requires_grad_() * w).sum().backward(inputs=[into])
        return x * 2

    graphed, before, x = graphify(step, backend=backend), told(table), torch.randn(3, 4, device=device)
    with pytest.raises(CaptureError):
        graphed.capture(x, x if outside else table)
    assert told(table) == before


def test_an_outside_tensor_written_without_history(backend, device):
    """Written under no_grad, or with what is detached, it is state like any other."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w, table, mean = leaf(device, 4), torch.zeros(3, 4, device=device), torch.zeros(4, device=device)

        def step(x: Tensor) -> Tensor:
            y = x * w
            table.copy_(y.detach())
            with torch.no_grad():
                mean.lerp_(y.mean(0), 0.5)
            return y + mean

        f = wrap(step)
        for _ in range(5):
            f(torch.randn(3, 4, device=device)).square().sum().backward()
            yield table, mean, w.grad

    assert counts(*same(train, backend)) == (1, 1, 3, 0, 0)


@pytest.mark.parametrize("outside", [True, False])
def test_a_view_of_an_expanded_tensor(backend, device, outside):
    """The gradient of one row of an expanded tensor is eager's: such calls run eagerly, and say so."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 4).detach().expand(3, 4).requires_grad_()
        f = wrap(lambda x: (x if not outside else w)[1])
        for _ in range(4):
            x = w.detach().requires_grad_()
            f(x).square().sum().backward()
            yield grads(x, w)

    with pytest.warns(GraphifyWarning, match="views of an argument, or of a tensor from outside"):
        (graphed,) = same(train, backend)
    assert graphed.stats().reasons == {"views of others": 3}


def test_a_view_as_another_kind_of_number(backend, device):
    """A complex result beside the real numbers that it is made of: such calls run eagerly, with words of their own."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 4)

        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.complex(x * w, x + w)
            return h, torch.view_as_real(h)

        f = wrap(forward)
        for _ in range(4):
            h, numbers = f(torch.randn(3, 4, device=device))
            (h.abs().sum() + numbers.square().sum()).backward()
            yield h, numbers, w.grad

    with pytest.warns(GraphifyWarning, match="views that cannot be taken of a copy"):
        (graphed,) = same(train, backend)
    assert graphed.stats().reasons == {"views": 3}


class Aside(nn.Parameter):
    """A kind of parameter that nobody knows."""


KEPT: dict[str, Callable[[torch.device], Tensor]] = {
    "has a history of its own": lambda device: leaf(device, 3) * 2,
    "is needed beside random numbers": lambda device: Aside(torch.rand(3, device=device)),
}


@pytest.mark.parametrize("why", KEPT)
def test_a_gradient_of_a_tensor_that_cannot_be_set_aside(why, monkeypatch):
    """Calls that need it run eagerly, with its name and the reason, and with what to write."""
    monkeypatch.setattr(TapeBackend, "nodes_have_streams", True)
    device = torch.device("cpu")

    def train(wrap: Wrap) -> Iterator[Any]:
        w, kept = leaf(device, 3), KEPT[why](device)
        if not kept.is_leaf:
            kept.retain_grad()
        f = wrap(lambda x: nn.functional.dropout(x * kept * w, 0.5))
        for _ in range(4):
            f(torch.randn(2, 3, device=device)).sum().backward(retain_graph=True)
            yield w.grad, kept.grad

    with pytest.warns(GraphifyWarning, match=f"a gradient of `kept`, which {why}.*pass it as an argument"):
        (graphed,) = same(train, "tape")
    assert graphed.stats().reasons == {"history": 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_incoming_gradients_with_lazy_bits(backend, device, dtype):
    """A gradient that comes as a view yet to be negated or conjugated counts for what it is."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 4, 4).to(dtype).detach().requires_grad_()
        f = wrap(lambda x: ((x @ w) * 2) @ w)
        for _ in range(4):
            lazy = torch.randn(3, 4, dtype=torch.complex64, device=device).conj()
            y = f(torch.randn(3, 4, dtype=dtype, device=device))
            y.backward(lazy if dtype.is_complex else lazy.imag)
            yield y, w.grad

    same(train, backend)


class Inner(nn.Module):
    """A network that takes a gradient of its own with respect to a tensor that it makes a leaf."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.fc, self.other, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way

    def inner(self, x: Tensor) -> Tensor:
        if self.way == "no_grad":
            with torch.no_grad():
                x = x[:2]
        elif self.way == "weight":
            x = self.other.weight
        elif self.way == "parameter":
            return nn.Parameter(x)
        return (x.clone() if self.way == "clone" else x).detach().requires_grad_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.inner(x)
        y = self.fc(z).tanh() @ self.other.weight
        (force,) = torch.autograd.grad(y.sum(), z, create_graph=True)
        return y, force.square().sum()


@pytest.mark.parametrize("way", ["detach", "no_grad", "weight", "parameter", "clone"])
def test_inner_gradients_of_a_leaf_made_inside(backend, device, way):
    """A leaf that the function makes of its argument, or of a weight, is nobody else's, and trains as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Inner(way).to(device))
        for _ in range(5):
            y, penalty = net(torch.randn(3, 4, device=device))
            (y.sum() + penalty).backward()
            yield y, penalty, grads(net)
            clear(net)

    (graphed,) = same(train, backend)
    assert counts(graphed) == (1, 1, 3, 0, 0)
    assert graphed.stats().recordings == 2  # the backward, too, also where nodes have streams


def test_an_argument_that_comes_to_need_gradients_inside(backend, device):
    """The caller's tensor would not: refused by name, before it is seen to differ."""
    w = leaf(device, 3)

    def force(x: Tensor) -> Tensor:
        x.requires_grad_()
        return torch.autograd.grad((x * w).square().sum(), x)[0]

    graphed = graphify(force, backend=backend)
    x = torch.randn(3, device=device)
    equal(force(x.clone()), graphed(x.clone()))
    with pytest.raises(CaptureError, match=r"`x` gets another `requires_grad`"):
        graphed(x)
    assert not x.requires_grad


class Hidden:
    """A tensor with a history, which a step finds outside, and one of the ways to change that history."""

    def __init__(self, device: torch.device, change: Callable[[Tensor], Any], quiet: str = "") -> None:
        self.w = leaf(device, 3)
        self.h = torch.ones(3, device=device)
        self.h.add_(self.w)
        self.node = self.h.grad_fn
        self.change, self.quiet = change, quiet

    def step(self, x: Tensor) -> Tensor:
        if not os.path.exists(self.quiet):  # noqa: PTH110  # nothing that a survey would find changed
            self.change(self.h)
        return (x * self.h).detach()

    def same(self) -> bool:
        return self.h.grad_fn is self.node


CHANGES = [
    pytest.param(lambda h: h.detach_(), "`detach_` of a tensor from outside", id="method"),
    pytest.param(lambda h: torch.detach_(h), "`detach_` of a tensor from outside", id="function"),
    pytest.param(lambda h: h.mul_(2), "written in place", id="write"),
    pytest.param(lambda h: h[0].mul_(2), "written in place", id="view"),
    pytest.param(lambda h: (h.mul_(2), h.detach_()), "written in place", id="both"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_recording_that_fails_leaves_histories_alone(backend, device, tmp_path, change, words):
    """A recording that would change the history of an outside tensor, as no warm-up did, is refused before it does."""
    quiet = tmp_path / "quiet"
    hidden = Hidden(device, change, str(quiet))
    graphed = graphify(hidden.step, backend=backend, fallback="raise")
    quiet.touch()
    graphed(torch.randn(3, device=device))
    quiet.unlink()
    values = hidden.h.detach().clone()
    with pytest.raises(CaptureError, match=rf"{words}[\s\S]*test_training_edges"):
        graphed(torch.randn(3, device=device))
    assert hidden.same()
    assert torch.equal(hidden.h, values)
    (hidden.h * 3).sum().backward()
    assert torch.equal(hidden.w.grad, torch.full((3,), 3.0, device=device))


@pytest.mark.parametrize("fallback", ["raise", "eager"])
def test_detaching_an_outside_tensor_in_place(backend, device, fallback):
    """A real call detaches as eager does and is never captured; ahead of time nothing is detached at all."""
    hidden, x = Hidden(device, lambda h: h.detach_()), torch.randn(3, device=device)
    graphed = graphify(hidden.step, backend=backend, fallback=fallback)
    with pytest.raises(CaptureError, match=r"`detach_` of a tensor from outside[\s\S]*detach\(\)"):
        graphed.capture(x)
    assert hidden.same()
    graphed.reset()
    if fallback == "raise":
        assert torch.equal(graphed(x), x * (1 + hidden.w.detach()))
    else:
        with pytest.warns(GraphifyWarning, match="`detach_` of a tensor from outside"):
            graphed(x)
    assert (hidden.h.requires_grad, hidden.h.grad_fn) == (False, None)
    assert graphed.stats().captures == 0


def test_what_a_run_makes_it_may_detach(backend, device):
    """`detach_` of what the run made, and of an outside tensor without a history, is no matter for anybody."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w, plain = leaf(device, 3), torch.ones(3, device=device)

        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            mine, part = x * w, plain.detach().requires_grad_()
            mine.detach_()
            part.detach_()
            plain.detach_()
            return mine * w, part * 2

        f = wrap(forward)
        for _ in range(5):
            y, z = f(torch.randn(3, device=device))
            y.sum().backward()
            yield y, z, w.grad

    assert counts(*same(train, backend)) == (1, 1, 3, 0, 0)
