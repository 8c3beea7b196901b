"""Whole training steps at their edges: what changes between steps although nobody thinks of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checks import counts
from stepping import (
    ALL_REPLAYED,
    Opaque,
    adamw,
    batches,
    left,
    loss_of,
    pair,
    plain_step,
    refused,
    replayed,
    sgd,
)
from torch import Tensor
from training import Wrap, mlp, same, same_or_loud

from graphify import CaptureError, graphify, handle


@pytest.mark.parametrize("make", [sgd, adamw])
def test_frozen_and_thawed(backend, device, make):
    """Parameters that are frozen for a while keep their values, and `.grad`, as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, make)
        run = wrap(plain_step(net, optimizer))
        for i, x in enumerate(batches(device, 20)):
            net[0].requires_grad_(i // 4 % 2 == 0)
            yield run(x), left(net, optimizer)

    (graphed,) = same(train, backend)
    replayed(graphed, 10)


def test_zero_grad_outside_now_this_way_now_that(backend, device):
    """Gradients that are None, zeros or left over at a call are each met as eager meets them."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)

        def step(x: Tensor) -> Tensor:
            loss = loss_of(net, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        for i, x in enumerate(batches(device, 24)):
            yield run(x), left(net, optimizer)
            if i % 3:
                optimizer.zero_grad(set_to_none=i % 3 == 1)

    (graphed,) = same(train, backend)
    replayed(graphed, 12)


def test_a_gradient_penalty_with_its_backward_outside(backend, device):
    """Inner gradients with a graph of their own are no backward that the results forbid."""
    if backend == "eager":
        pytest.skip("the eager backend cannot follow a leaf that is made inside, and says so")

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)

        @wrap
        def penalty(x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad(loss_of(net, x), x, create_graph=True)
            return (inner.norm(dim=1) - 1).square().mean()

        for x in batches(device):
            optimizer.zero_grad()
            loss = penalty(x)
            loss.backward()
            optimizer.step()
            yield loss.detach(), left(net, optimizer)

    (graphed,) = same(train, backend)
    assert counts(graphed) == ALL_REPLAYED


@pytest.mark.parametrize("inside", [True, False])
def test_a_gradient_that_the_user_gives_a_frozen_parameter(backend, device, inside):
    """A `.grad` put on a parameter that needs none is stepped with, or cleared, as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)
        net[0].requires_grad_(False)

        @wrap
        def step(x: Tensor) -> Tensor:
            if inside:
                optimizer.zero_grad()
            loss = loss_of(net, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for i, x in enumerate(batches(device, 12)):
            if i % 3 == 2:
                net[0].weight.grad = torch.full_like(net[0].weight, float(i))
            yield step(x), left(net, optimizer)

    same(train, backend)


@pytest.mark.parametrize("how", ["added", "removed", "counting"])
def test_hooks_of_parameters(backend, device, how):
    """Tensor hooks that come, go or count between steps are noticed, or refused."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)
        seen = [0]

        def hook(grad: Tensor) -> Tensor:
            seen[0] += how == "counting"
            return grad * 0.5

        step = wrap(plain_step(net, optimizer))
        handle = None if how == "added" else net[0].weight.register_hook(hook)
        for i, x in enumerate(batches(device)):
            if i == 5 and how == "added":
                net[0].weight.register_hook(hook)
            if i == 5 and how == "removed":
                handle.remove()
            yield step(x), left(net, optimizer), [*seen]

    same_or_loud(train, backend)


def test_optimizers_in_hooks(backend, device):
    """Optimizers that step inside the backward, one for each parameter, follow their rates."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = mlp(device)
        optimizers = {p: sgd([p], device) for p in net.parameters()}

        def hook(p: Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(hook)

        @wrap
        def step(x: Tensor) -> Tensor:
            loss = loss_of(net, x)
            loss.backward()
            return loss.detach()

        for i, x in enumerate(batches(device, 12)):
            for optimizer in optimizers.values():
                optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            yield step(x), left(net, *optimizers.values())

    same(train, backend)


def test_a_rate_that_the_function_reads(backend, device):
    """A rate that the user's own code computes with is as exact as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)

        @wrap
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, x) + optimizer.param_groups[0]["lr"] / 3
            loss.backward()
            optimizer.step()
            return loss.detach()

        for i, x in enumerate(batches(device, 12)):
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            yield step(x), left(net, optimizer)

    same_or_loud(train, backend)


def test_a_rate_that_is_returned(backend, device):
    """A rate among the results is the one of this call."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)
        plain = plain_step(net, optimizer)
        step = wrap(lambda x: (plain(x), optimizer.param_groups[0]["lr"]))
        for i, x in enumerate(batches(device, 12)):
            optimizer.param_groups[0]["lr"] = 0.1 / (i // 4 + 1)
            yield step(x), left(net, optimizer)

    same_or_loud(train, backend)


def test_a_rate_that_becomes_a_tensor(backend, device):
    """A rate may be a number first and a tensor later."""
    if backend == "eager":
        pytest.skip("the eager backend runs torch's own step, which reads a tensor on the host")

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)
        step = wrap(plain_step(net, optimizer))
        for i, x in enumerate(batches(device, 12)):
            if i == 4:
                optimizer.param_groups[0]["lr"] = torch.tensor(0.2, device=device)
            yield step(x), left(net, optimizer)

    same(train, backend)


def test_a_decay_that_never_stays(backend, device):
    """A number that no tensor can stand for and that differs at each call is refused, too."""
    if backend == "eager":
        pytest.skip("a replay of the eager backend runs the function, which reads the number itself")
    net, optimizer = pair(device, adamw)
    run = graphify(plain_step(net, optimizer), backend=backend)
    with pytest.raises(CaptureError, match="takes a new value again and again"):
        for i, x in enumerate(batches(device, 12)):
            optimizer.param_groups[0]["weight_decay"] = 0.1 / (i + 1)
            run(x)


def test_a_refusal_is_remembered(backend, device):
    """A step that was refused is not run again to be refused again."""
    net = mlp(device)
    optimizer = torch.optim.NAdam(net.parameters(), lr=0.1)
    seen: list[int] = []
    unseen = Opaque(seen)
    plain = plain_step(net, optimizer)

    def step(x: Tensor) -> Tensor:
        unseen.get().append(1)
        return plain(x)

    refused(step, [batches(device, 1)], backend)
    assert len(seen) == 1


def test_ahead_of_time_where_no_state_is(backend, device):
    """An optimizer without state may be captured before its first step, and that graph is used."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = mlp(device)
        plain = plain_step(net, torch.optim.SGD(net.parameters(), lr=0.1))
        step = wrap(plain)
        sample = batches(device, 1)
        if step is not plain:
            handle(step).capture(*sample)
        for x in batches(device):
            yield step(x), left(net)

    (graphed,) = same(train, backend)
    stats = handle(graphed).stats()
    assert stats.warmups == 0, stats


def test_words_where_nothing_is_capturable(backend, device):
    """On a CPU nobody is told to write `capturable=True`, which torch refuses there."""
    if backend != "tape":
        pytest.skip("about the tape's words")
    net, optimizer = pair(device, adamw)
    run = graphify(plain_step(net, optimizer), backend=backend)
    with pytest.raises(CaptureError) as raised:
        for i in range(12):
            optimizer.param_groups[0]["weight_decay"] = (0.1, 0.2, 0.3)[i // 4]
            run(*batches(device, 1))
    assert "capturable" not in raised.value.fix
