"""Training in buckets: gradients of live rows are eager's, padded rows have none, and whole steps work or say why not.

The data are whole numbers: sums over more rows are then equal bit for bit.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bucketing import BATCH, BOTH, ROWS
from checks import counts, equal
from torch import Tensor, nn
from training import Wrap, grads, same

from graphify import CaptureError, GraphifyWarning, PaddingError, graphify
from graphify._watch import Watch

SIZES = (3, 3, 3, 4, 1, 1, 2, 5, 5, 8, 6, 7, 3, 2, 8, 1)


def whole(*shape: int, device: torch.device, grad: bool = False) -> Tensor:
    """Small whole numbers, as floats."""
    return torch.randint(-4, 5, shape).float().to(device).requires_grad_(grad)


class Net(nn.Module):
    """Two layers whose weights are whole numbers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.to(device)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(whole(*parameter.shape, device=device))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out


def test_parameters_and_inputs_get_eagers_gradients(backend: str, device: torch.device) -> None:
    """A loss outside sees live rows only, and so does each gradient; they add up over calls."""

    def scenario(wrap: Wrap) -> Iterator[Any]:
        net = Net(device)
        step = wrap(net)
        for index, n in enumerate(SIZES):
            x = whole(n, 3, device=device, grad=index % 4 > 0)
            out = step(x)
            yield out
            (out * whole(n, 2, device=device)).sum().backward()
            yield grads(net, x)

    (graphed,) = same(scenario, backend, **ROWS)
    found = counts(graphed)
    assert found[4] == 0
    assert found[2] > 0


def test_a_mean_outside_divides_by_the_live_rows(backend: str, device: torch.device) -> None:
    """The result has the call's own size, so a mean over it is eager's."""

    def scenario(wrap: Wrap) -> Iterator[Any]:
        net = Net(device)
        step = wrap(net)
        for n in (4, 2, 4, 2, 1, 8, 4, 8, 2, 1):
            net.zero_grad()
            step(whole(n, 3, device=device)).mean().backward()
            # A padded row adds 0.0, which makes 0.0 of a sum that is -0.0.
            yield [grad + 0.0 for grad in grads(net) if grad is not None]

    same(scenario, backend, buckets=[4, 8])


def test_gradients_of_padded_rows_are_zero(backend: str, device: torch.device) -> None:
    """A hook inside, at the bucket's size, sees zeros behind the live rows."""
    seen: list[Tensor] = []
    weight = whole(3, 3, device=device, grad=True)

    def step(x: Tensor) -> Tensor:
        y = x @ weight
        if y.requires_grad:
            y.register_hook(lambda grad: seen.append(grad.detach().clone()))
        return y * 2

    graphed = graphify(step, buckets=[4], backend="eager")
    graphed(whole(3, 3, device=device)).sum().backward()

    assert seen[-1].shape == (4, 3)
    assert torch.equal(seen[-1][:3], torch.full((3, 3), 2.0, device=device))
    assert not seen[-1][3].any()


RESULTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "several": lambda x, w: {"a": x @ w, "b": [(x @ w).relu(), x * 2]},
    "parts of one": lambda x, w: (x @ w).split([1, 2], -1),
    "one and a view of it": lambda x, w: (lambda y: (y, y[:, 0]))(x @ w),
    "transposed": lambda x, w: (x @ w).t(),
    "flattened": lambda x, w: (x @ w).flatten(),
    "one without gradient": lambda x, w: (x @ w, (x @ w).detach() * 2, x.detach()),
    "the argument beside": lambda x, w: (x @ w, x),
    "a view of the argument beside": lambda x, w: (x @ w, x[:, 1:]),
    "expanded": lambda x, w: (x @ w)[:, None].expand(-1, 2, -1),
    "the weight": lambda x, w: (x @ w, w, w * 2),
}


@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("name", RESULTS)
def test_results_of_every_kind_go_backward(
    backend: str, device: torch.device, name: str, needs: bool
) -> None:
    """Each result is cut, and a loss over all of them brings eager's gradients to weight and argument."""

    def scenario(wrap: Wrap) -> Iterator[Any]:
        weight = whole(3, 3, device=device, grad=True)
        function = RESULTS[name]
        step = wrap(lambda x: function(x, weight))
        for n in SIZES:
            x = whole(n, 3, device=device, grad=needs)
            out = step(x)
            yield out
            leaves = torch.utils._pytree.tree_leaves(out)
            total = sum((leaf * (i + 1)).sum() for i, leaf in enumerate(leaves) if leaf.requires_grad)
            total.backward()
            yield weight.grad, x.grad

    same(scenario, backend, **ROWS)


def test_two_axes(backend: str, device: torch.device) -> None:
    """Batch and sequence padded at once, and flattened by the function."""

    def scenario(wrap: Wrap) -> Iterator[Any]:
        net = Net(device)
        step = wrap(lambda x: net(x).flatten(0, 1))
        for n, s in [(3, 3), (3, 3), (3, 3), (2, 4), (1, 2), (8, 7), (5, 5), (8, 8), (4, 4), (1, 8), (3, 2)]:
            x = whole(n, s, 3, device=device, grad=True)
            out = step(x)
            yield out
            (out * whole(n * s, 2, device=device)).sum().backward()
            yield grads(net, x)

    same(scenario, backend, **BOTH)


def test_another_bucket_between_a_forward_and_its_backward(backend: str, device: torch.device) -> None:
    """What one call saved is its own, whatever sizes are called before its backward comes."""

    def scenario(wrap: Wrap) -> Iterator[Any]:
        net = Net(device)
        step = wrap(net)
        for first, second in [(3, 8), (3, 8), (4, 5), (1, 3), (3, 3), (3, 4), (8, 3), (2, 7), (6, 2)]:
            x, y = whole(first, 3, device=device, grad=True), whole(second, 3, device=device, grad=True)
            out, other = step(x), step(y)
            yield out, other
            (out * out).sum().backward()
            (other * 3).sum().backward()
            yield grads(net, x, y)

    same(scenario, backend, **ROWS)


def test_training_and_inference_in_turn(backend: str, device: torch.device) -> None:
    """One size with and without gradients is two signatures; neither disturbs the other."""

    def scenario(wrap: Wrap) -> Iterator[Any]:
        net = Net(device)
        step = wrap(net)
        for n in (3, 3, 3, 4, 1, 2, 3):
            x = whole(n, 3, device=device)
            out = step(x)
            with torch.no_grad():
                yield step(x), out
            with torch.inference_mode():
                yield step(x).clone()
            out.sum().backward()
            yield grads(net)

    same(scenario, backend, **ROWS)


def test_a_forward_that_never_goes_back(backend: str, device: torch.device) -> None:
    """Results that are dropped, kept, or used twice: the next calls are right."""

    def scenario(wrap: Wrap) -> Iterator[Any]:
        net = Net(device)
        step = wrap(net)
        kept = []
        for index, n in enumerate(SIZES):
            out = step(whole(n, 3, device=device))
            if index % 3 == 0:
                kept.append(out)
            if index % 3 == 1:
                out.sum().backward(retain_graph=True)
                out.sum().backward()
            yield out.detach().clone(), grads(net)
        for out in kept:
            out.sum().backward()
        yield grads(net)

    same(scenario, backend, **ROWS)


UNSAFE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a mean over the batch": lambda x, w: (x @ w).mean(0),
    "a loss that is a mean": lambda x, w: (x @ w).square().mean(),
    "a gradient scaled by the size": lambda x, w: (x @ w) * 1.0 + (x @ w - (x @ w).detach()) * len(x),
    "batch norm": lambda x, w: nn.functional.batch_norm(x @ w, None, None, training=True),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_gradients_that_padding_would_change(backend: str, device: torch.device, name: str) -> None:
    """`PaddingError`, even where results alone are right; with fallback="eager" eager's gradients."""
    weight, function = whole(3, 3, device=device, grad=True), UNSAFE[name]
    loud = graphify(lambda x: function(x, weight), backend=backend, **ROWS)
    quiet = graphify(lambda x: function(x, weight), fallback="eager", backend=backend, **ROWS)

    for _ in range(2):
        with pytest.raises(PaddingError, match="depends on the padding"):
            loud(whole(3, 3, device=device))
    assert weight.grad is None

    with pytest.warns(GraphifyWarning):
        for _ in range(3):
            x = whole(3, 3, device=device)
            out, expected = quiet(x), function(x, weight)
            equal(expected, out)
            equal(torch.autograd.grad(expected.sum(), weight), torch.autograd.grad(quiet(x).sum(), weight))
    assert set(quiet.stats().reasons) == {"padding"}


def test_a_gradient_is_compared_by_name(backend: str, device: torch.device) -> None:
    """The message says whose gradient it is."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, device=device))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.weight
            return y + (y - y.detach()) * len(x)

    with pytest.raises(PaddingError, match=r"the gradient of `self.weight` depends on the padding"):
        graphify(Scaled(), backend=backend, **ROWS)(whole(3, 3, device=device))


# ---------------------------------------------------------------- whole steps


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.125)


def summed(net: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mul(0.0078125).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def masked(net: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor, mask: Tensor, count: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = ((net(x) - y).square() * mask[:, None]).sum() / count
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_a_whole_step_whose_loss_counts_live_rows(backend: str, device: torch.device) -> None:
    """A sum divided by a count that is given: parameters, gradients and loss stay with eager, step by step."""
    nets = [Net(device), Net(device)]
    nets[1].load_state_dict(nets[0].state_dict())
    with torch.no_grad():
        for net in nets:
            for parameter in net.parameters():
                parameter.mul_(0.1)
    plain, captured = (masked(net, sgd(net), device) for net in nets)
    step = graphify(
        captured,
        buckets={"x": {0: BATCH}, "y": {0: BATCH}, "mask": {0: BATCH}},
        pad={"mask": 0},
        backend=backend,
    )

    for n in (3, 3, 3, 4, 1, 2, 2, 5, 8, 3, 7, 1):
        x, y = torch.randn(n, 3, device=device), torch.randn(n, 2, device=device)
        mask, count = torch.ones(n, device=device), torch.full((), float(n * 2), device=device)
        expected, found = plain(x, y, mask, count), step(x, y, mask, count)
        assert torch.allclose(expected, found, rtol=1e-4)
        for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)

    found_counts = counts(step)
    assert found_counts[2] > 0
    assert found_counts[4] == 0


def test_a_whole_step_whose_padded_rows_count_is_refused(backend: str, device: torch.device) -> None:
    """A sum over rows whose target is padding adds to the loss: refused before any parameter has moved."""
    net = Net(device)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    step = graphify(summed(net, sgd(net), device), backend=backend, **ROWS)

    for _ in range(2):
        with pytest.raises(PaddingError):
            step(whole(3, 3, device=device), whole(3, 2, device=device))

    equal(before, dict(net.state_dict()))
    assert all(p.grad is None for p in net.parameters())


def test_a_whole_step_with_a_mean_is_refused_or_runs_eagerly(backend: str, device: torch.device) -> None:
    """With fallback="eager" the step is eager's at the exact size."""
    nets = [Net(device), Net(device)]
    nets[1].load_state_dict(nets[0].state_dict())

    def make(net: nn.Module) -> Callable[..., Any]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    plain, step = make(nets[0]), graphify(make(nets[1]), fallback="eager", backend=backend, **ROWS)

    with pytest.warns(GraphifyWarning, match="padded|padding"):
        for n in (3, 3, 3, 1, 5):
            x, y = whole(n, 3, device=device), whole(n, 2, device=device)
            equal(plain(x, y), step(x, y))
            equal(dict(nets[0].state_dict()), dict(nets[1].state_dict()))
    assert step.stats().reasons["padding"] == 5


# ---------------------------------------------------------------- what random programs found


def test_a_backward_that_eager_refuses_is_no_matter_of_the_proof(backend: str, device: torch.device) -> None:
    """An argument that is written after it was saved: the forward is right, and only a backward raises."""
    weight = whole(3, 3, device=device, grad=True)

    def step(x: Tensor) -> Tensor:
        y = x @ weight
        x.zero_()
        return y

    graphed = graphify(step, backend=backend, **ROWS)
    x = whole(3, 3, device=device)
    expected = (x @ weight).detach()

    out = graphed(x)

    assert torch.equal(out, expected)
    assert not x.any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_beside_written_state(backend: str, device: torch.device) -> None:
    """A call without gradients after one with them, of a function that writes outside memory."""

    def scenario(wrap: Wrap) -> Iterator[Any]:
        net, buffer, ones = Net(device), torch.zeros(3, device=device), torch.ones(3, device=device)

        def step(x: Tensor) -> Tensor:
            buffer.copy_(ones)
            out: Tensor = net(x)
            return out

        graphed = wrap(step)
        for index, n in enumerate((2, 2, 3, 3, 3, 4, 2)):
            x = whole(n, 3, device=device)
            with torch.set_grad_enabled(index % 2 == 0):
                out = graphed(x)
            yield out
            if out.requires_grad:
                out.sum().backward()
            yield buffer, grads(net)

    same(scenario, backend, buckets=[8])


def test_outside_memory_that_gets_a_history(backend: str, device: torch.device) -> None:
    """The proof takes the history back; the first call stands, as eager's does, and the next is refused."""
    weight, table = whole(3, 3, device=device, grad=True), torch.zeros(3, 3, device=device)

    def step(x: Tensor) -> Tensor:
        table.add_(weight * 2)
        return x @ weight

    graphed = graphify(step, check_padding="outputs", backend=backend, **ROWS)
    x = whole(3, 3, device=device)

    assert torch.equal(graphed(x), x @ weight)
    assert torch.equal(table, weight * 2)
    with pytest.raises(CaptureError, match="table"):
        graphed(x)
    assert torch.equal(table, weight * 2)


def test_what_watched_a_run_goes_with_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: torch.device
) -> None:
    """No cycle keeps the histories of a proof's runs: a leaf's node that lives on would be met by the next capture."""
    alive: weakref.WeakSet[Watch] = weakref.WeakSet()
    plain = Watch.__init__

    def begin(self: Watch, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        alive.add(self)

    monkeypatch.setattr(Watch, "__init__", begin)
    weight = torch.ones(3, device=device, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        loss = (x * weight).square().sum()
        loss.backward()
        return loss.detach()

    graphed = graphify(step, buckets=[4, 8], pad={"x": 0}, backend=backend)
    gc.collect()
    gc.disable()
    try:
        for size in (3, 4, 2, 3):
            weight.grad = None
            graphed(torch.randn(size, 3, device=device))
        kept = len(alive)
    finally:
        gc.enable()
    assert kept == (1 if backend == "eager" else 0), "the eager backend runs under the watch of the recording"
