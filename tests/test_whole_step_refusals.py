"""Whole training steps that no graph can hold are refused in words that say what to write; and captures ahead of time."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import counts, equal
from stepping import (
    ALL_REPLAYED,
    ONCE,
    READS,
    REPLAYS,
    Opaque,
    adamw,
    batches,
    closure_step,
    left,
    loss_of,
    pair,
    plain_step,
    recordings,
    refused,
)
from torch import Tensor
from training import Wrap, clear, mlp, same

from graphify import CaptureError, GraphifyWarning, graphify, handle

# -- what is refused, and in which words


HOST_COUNTS: dict[str, tuple[str, str]] = {
    "Adam": ("fused=True", "capturable=True"),
    "AdamW": ("fused=True", "capturable=True"),
    "NAdam": ("", "capturable=True"),
    "RAdam": ("", "capturable=True"),
    "Adamax": ("", "capturable=True"),
}


@pytest.mark.parametrize("kind", HOST_COUNTS)
def test_optimizers_that_count_on_the_host(backend, device, kind):
    """An optimizer that counts its steps in Python's reach is refused at once, with the line to write."""
    net = mlp(device)
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1)
    calls = [batches(device, 1)]
    before = left(net, optimizer)
    error = refused(plain_step(net, optimizer), calls, backend)

    assert error.what == f"`{kind}` counts its steps on the host"
    assert error.why == "it keeps its step count on the host, where a replay cannot count"
    option = HOST_COUNTS[kind][device.type != "cpu"]
    assert error.fix == (
        f"`torch.optim.{kind}(..., {option})`"
        if option
        else "an optimizer that counts on the device: `torch.optim.AdamW(..., fused=True)`"
    )
    equal(before, left(net, optimizer))


def test_lbfgs(backend, device):
    """An optimizer that decides on the host how to go on is refused by name."""
    net = mlp(device)
    optimizer = torch.optim.LBFGS(net.parameters())

    calls = [batches(device, 1)]
    before = left(net, optimizer)
    error = refused(closure_step(net, optimizer), calls, backend)
    other = f"`torch.optim.AdamW(..., fused=True{'' if device.type == 'cpu' else ', capturable=True'})`"
    assert error.what == "`LBFGS` decides on the host how to step"
    assert error.why == READS
    assert error.fix == f"step it outside the graphed function, or use another optimizer: {other}"
    equal(before, left(net, optimizer))


def test_a_schedule_stepped_inside(backend, device):
    """A schedule inside is refused at its first call, and that call leaves no trace."""
    net, optimizer = pair(device)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    plain = plain_step(net, optimizer)

    def step(x: Tensor) -> Tensor:
        loss = plain(x)
        schedule.step()
        return loss

    calls = [batches(device, 1)]
    before = left(net, optimizer), copy.deepcopy(schedule.state_dict())
    error = refused(step, calls, backend)
    assert error.what == "a learning-rate schedule is stepped inside"
    assert error.why == ONCE
    assert error.fix == "`scheduler.step()` after the call of the graphed function"
    equal(before, (left(net, optimizer), schedule.state_dict()))


def test_a_loss_that_still_needs_gradients(backend, device):
    """A loss returned after its backward is refused with `return loss.detach()`."""
    net, optimizer = pair(device)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x)
        loss.backward()
        optimizer.step()
        return loss

    error = refused(step, [[x] for x in batches(device, 2)], backend)
    assert error.what == (
        "`test_a_loss_that_still_needs_gradients.<locals>.step` runs a backward and returns a tensor that needs "
        "gradients"
    )
    assert (
        error.why == "its backward is in the graph already, and a second one would need what the first let go"
    )
    assert error.fix == "`return loss.detach()`"


def clear_by_hand(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None


ENDS: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "None": lambda optimizer: optimizer.zero_grad(),
    "zeros": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "by hand": clear_by_hand,
}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_a_loss_that_still_needs_gradients_though_none_are_left(backend, device, end, kept):
    """A step that clears its gradients at the end is refused with the same words, and leaves no trace."""
    net, optimizer = pair(device)
    optimizer.zero_grad()

    def step(x: Tensor) -> Tensor:
        loss = sum(p.sum() for p in net.parameters()) * x.mean()
        loss.backward(retain_graph=kept)
        optimizer.step()
        ENDS[end](optimizer)
        return loss

    graphed, (first, *others) = graphify(step, backend=backend), batches(device, 3)
    graphed(first)
    before = left(net, optimizer)
    for x in others:
        with pytest.raises(CaptureError, match=r"write: `return loss\.detach\(\)`"):
            graphed(x)
        equal(before, left(net, optimizer))


def test_a_gradient_penalty_inside_a_step(backend, device):
    """A penalty on inner gradients and the step that trains on it fit into one recording."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, adamw)

        @wrap
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            x = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad(loss_of(net, x), x, create_graph=True)
            loss = (inner.norm(dim=1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for x in batches(device):
            yield step(x), left(net, optimizer)

    assert counts(*same(train, backend)) == ALL_REPLAYED


def test_an_argument_that_gets_a_gradient(backend, device):
    """A backward inside that reaches an argument is refused, since the graph has a copy of it."""
    net, optimizer = pair(device)
    calls = [[x.requires_grad_()] for x in batches(device, 2)]
    error = refused(plain_step(net, optimizer), calls, backend)
    assert error.what == "`x` gets a gradient from a backward inside"
    assert error.why == "the graph has its own copy of the argument, so the caller's would get none"
    assert error.fix == "`torch.autograd.grad(loss, x)` inside and return it, or `x.detach()`"


def test_the_gradient_of_an_argument_may_be_returned(backend, device):
    """What the message proposes works: an input's gradient taken inside and handed out."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, _ = pair(device)
        run = wrap(lambda x: torch.autograd.grad(loss_of(net, x), x)[0])
        for x in batches(device):
            yield run(x.requires_grad_()), left(net)

    assert counts(*same(train, backend)) == ALL_REPLAYED


def test_fallback_to_eager(backend, device):
    """With `fallback="eager"` what cannot be captured trains as before, counted and said once."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = mlp(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        step = wrap(plain_step(net, optimizer))
        for x in batches(device):
            yield step(x), left(net, optimizer)

    with pytest.warns(GraphifyWarning, match="`Adam` counts its steps on the host") as seen:
        (graphed,) = same(train, backend, fallback="eager")
    assert len(seen) == 1
    assert counts(graphed) == (1, 0, 0, REPLAYS + 1, 0)
    assert handle(graphed).stats().reasons == {"uncapturable": REPLAYS + 1}


def test_ahead_of_time_before_the_first_step(backend, device):
    """A capture before the optimizer has its state says to take a step first, and leaves no trace."""
    net, optimizer = pair(device)
    graphed = graphify(plain_step(net, optimizer), backend=backend)
    sample = batches(device, 1)
    before = left(net, optimizer)
    with pytest.raises(CaptureError) as raised:
        graphed.capture(*sample)
    assert raised.value.what == "`optimizer` builds its state in this step"
    assert raised.value.why == "a replay would build it anew each time"
    assert raised.value.fix == "take one step before the capture"
    equal(before, left(net, optimizer))


@pytest.mark.parametrize("to_none", [True, False])
def test_ahead_of_time_after_one_step(backend, device, to_none):
    """After one plain step a capture leaves no trace, and each call after it is a replay."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, adamw)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=to_none)
            loss = loss_of(net, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        step(*batches(device, 1))
        run = wrap(step)
        sample = batches(device, 1)
        yield left(net, optimizer)
        if run is not step:
            handle(run).capture(*sample)
        yield left(net, optimizer)
        for x in batches(device):
            yield run(x), left(net, optimizer)

    (graphed,) = same(train, backend)
    assert counts(graphed) == (0, 0, REPLAYS + 2, 0, 0)
    assert recordings(graphed) == 1


def test_gradients_that_need_gradients(backend, device):
    """`backward(create_graph=True)` would leave gradients with a history, and is refused with another way."""
    net, optimizer = pair(device)

    def step(x: Tensor) -> Tensor:
        loss = loss_of(net, x)
        torch.autograd.backward(loss, create_graph=True)
        optimizer.step()
        return loss.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, of the reference cycle
        error = refused(step, [[x] for x in batches(device, 2)], backend)
    clear(net)
    if backend == "cuda":  # where the warm-up's gradients keep nodes that the device refuses to capture
        return
    assert error.what == "`net.0.weight.grad` needs a gradient itself after `backward(create_graph=True)`"
    assert error.fix == "`torch.autograd.grad(..., create_graph=True)` for the inner gradient"


def test_an_argument_as_a_gradient(backend, device):
    """A `.grad` that is set to an argument is refused, since the graph has a copy of it."""
    net, optimizer = pair(device)

    def step(x: Tensor) -> None:
        net[0].weight.grad = x
        optimizer.step()

    error = refused(step, [[x] for x in batches(device, 2)], backend)
    assert error.what == "`net.0.weight.grad` is set to an argument"
    assert error.fix == "copy it into the `.grad` that is there, or set it outside the graphed function"


def test_parameters_that_no_name_leads_to(backend, device):
    """A net that is out of sight is refused: nobody could follow its gradients."""
    net = mlp(device)
    unseen = Opaque(net)

    def step(x: Tensor) -> Tensor:
        loss = loss_of(unseen.get(), x)
        loss.backward()
        return loss.detach()

    error = refused(step, [[x] for x in batches(device, 2)], backend)
    assert error.what.startswith("a parameter of shape (")
    assert error.what.endswith("is trained that no name leads to")
    assert error.fix == "keep it in a module, an attribute or a variable that the function names"


def test_other_results_that_need_gradients(backend, device):
    """What stands beside a detached loss must not need gradients either."""
    net, optimizer = pair(device)
    plain = plain_step(net, optimizer)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return plain(x), net(x)

    assert refused(step, [[x] for x in batches(device, 2)], backend).fix == "`return loss.detach()`"
