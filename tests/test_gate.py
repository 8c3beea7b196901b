"""The gate in front of parameters, and the stand-ins behind it: nothing that a user can see tells them from eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checks import counts
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from training import Wrap, clear, grads, mlp, same

from graphify import _gate, _stand_ins, graphify
from graphify.backends.tape import TapeBackend


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """For each backward through a gate, which leaves the gate served by itself."""
    found: list[list[bool]] = []
    real = _gate.Gate._direct

    def note(gate: _gate.Gate) -> list[bool]:
        found.append(list(real(gate)))
        return real(gate)

    monkeypatch.setattr(_gate.Gate, "_direct", note)
    return found


def trained(device: torch.device, wrap: Wrap, prepare: Any = lambda net: None) -> Iterator[Any]:
    net = wrap(mlp(device))
    prepare(net)
    for i in range(8):
        if i % 3 == 0:
            net.zero_grad()
        net(torch.randn(4, 3, device=device)).square().sum().backward()
        yield grads(net)


def test_leaves_that_nobody_watches_are_served_together(backend, device, served):
    """From the second replay on no gradient goes through a node of its own, whether `.grad` is there or not."""
    assert counts(*same(lambda wrap: trained(device, wrap), backend)) == (1, 1, 6, 0, 0)
    assert served == [[True] * 4] * 6


@pytest.mark.parametrize("kind", ["hook", "post hook", "held node"])
def test_a_watched_leaf_gets_its_gradient_through_the_engine(backend, device, served, kind):
    """A hook, a post-accumulate hook or somebody who holds the node takes that one leaf, and only that, out."""
    seen: list[int] = []

    def prepare(net: Any) -> Any:
        weight = net[0].weight
        if kind == "hook":
            weight.register_hook(lambda grad: seen.append(1))
        elif kind == "post hook":
            weight.register_post_accumulate_grad_hook(lambda p: seen.append(1))
        else:
            net[0].held = get_gradient_edge(weight).node
            net[0].held.register_hook(lambda inputs, outputs: seen.append(1))

    same(lambda wrap: trained(device, wrap, prepare), backend)
    assert len(seen) == 16  # eight steps, eager and graphed
    assert [sorted(direct) for direct in served] == [[False, True, True, True]] * 6


def test_a_leaf_with_gradients_from_elsewhere(backend, device, served):
    """A penalty on the weights beside the replay is added before what `.grad` holds, bit for bit as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(8):
            loss = net(torch.randn(4, 3, device=device)).square().sum()
            (loss + sum(p.square().sum() for p in net.parameters())).backward()
            yield grads(net)

    same(train, backend)
    assert served


def test_without_the_engines_answer_every_gradient_goes_through_it(backend, device, served, monkeypatch):
    """Where torch cannot say what a backward will run, nothing is served by the gate, and results are the same."""
    monkeypatch.setattr(_gate, "_will_run", None)
    same(lambda wrap: trained(device, wrap), backend)
    assert served == [[False] * 4] * 6


def test_without_an_end_to_wait_for_the_engine_adds_to_gradients(backend, device, served, monkeypatch):
    """Where torch calls nobody at the end of a backward, what is added to `.grad` goes through the engine."""
    monkeypatch.setattr(_gate, "at_end", None)
    same(lambda wrap: trained(device, wrap), backend)
    assert served == [[True] * 4] * 6


@pytest.mark.parametrize("kept", [True, False])
def test_a_call_in_the_middle_of_a_backward(backend, device, kept):
    """A hook that calls the same net again finds it as it is, and the gradients under way stay what they were."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(8):
            x, z = (torch.randn(4, 3, device=device) for _ in range(2))
            x.requires_grad_(i > 2).register_hook(
                lambda grad, z=z: seen.append(net(z).sum())
            ) if i > 2 else None
            seen: list[Tensor] = []
            net(x).square().sum().backward()
            yield seen, grads(net), x.grad
            if not kept:
                net.zero_grad()

    (graphed,) = same(train, backend)
    assert graphed.stats().eager == 0


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("share", ["nothing", "a penalty before", "a penalty after", "another call"])
def test_a_hook_in_front_of_the_graph_finds_its_gradients(backend, device, served, share, kept):
    """What lies in front of a graphed body comes after it in a backward: its hooks see the gradients that eager has.

    Those that were there before are seen once the parameter has a hook of its own.
    """

    def train(wrap: Wrap) -> Iterator[Any]:
        front, net = nn.Linear(3, 3).to(device), mlp(device)
        for p in net.parameters() if kept else ():
            p.register_post_accumulate_grad_hook(lambda p: None)
        body = wrap(net)
        for _ in range(8):
            h = front(torch.randn(4, 3, device=device))
            h.register_hook(lambda grad: seen.extend(g if g is None else g.clone() for g in grads(net)))
            seen: list[Tensor | None] = []
            before = sum(p.square().sum() for p in net.parameters()) if share == "a penalty before" else 0
            loss = body(h).square().sum() + before
            if share == "a penalty after":
                loss = loss + sum(p.square().sum() for p in net.parameters())
            if share == "another call":
                loss = loss + body(h * 2).sum()
            loss.backward()
            yield seen, grads(front, net)
            clear(front, *([] if kept else [net]))

    same(train, backend)
    assert served


@pytest.mark.parametrize("late", [True, False])
def test_a_backward_that_fails_half_way(backend, device, late):
    """An error of the user's own, before or after the gate, leaves nothing behind for the steps that follow."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, v = wrap(mlp(device)), torch.ones(3, device=device, requires_grad=True)
        old = v * 2  # older than the gate, so that the engine comes to it later
        for i in range(12):
            x = torch.randn(4, 3, device=device, requires_grad=True)
            loss = net(x).square().sum() + old.sum()
            failing = (v if late else x).register_hook(fail) if i in (4, 5, 9) else None
            if failing is not None:
                with pytest.raises(ZeroDivisionError):
                    loss.backward(retain_graph=True)
                failing.remove()
                clear(net)  # how far it came is not compared
            else:
                loss.backward(retain_graph=True)
                yield [grad.clone() for grad in grads(net)], x.grad

    (graphed,) = same(train, backend)
    assert graphed.stats().eager == 0


def fail(grad: Tensor) -> None:
    raise ZeroDivisionError


def test_gradients_that_are_there_for_some(backend, device, served):
    """Some gradients dropped and others kept: each leaf gets what it gets in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(8):
            for p in list(net.parameters())[i % 4 :]:
                p.grad = None
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield [grad.clone() for grad in grads(net)]

    assert counts(*same(train, backend)) == (1, 1, 6, 0, 0)
    assert served == [[True] * 4] * 6


def test_a_whole_step_beside_a_graphed_module(backend, device):
    """A recorded step closes the gates of modules that share its parameters, and these open again."""

    def train(wrap: Wrap) -> Iterator[Any]:
        plain = mlp(device)
        net, opt = wrap(plain), torch.optim.SGD(plain.parameters(), lr=0.1)

        @wrap
        def step(x: Tensor) -> Tensor:
            opt.zero_grad()
            loss = plain(x).square().sum()
            loss.backward()
            opt.step()
            return loss.detach()

        for _ in range(5):
            net.zero_grad()
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield grads(net), step(torch.randn(4, 3, device=device)), list(plain.parameters())

    same(train, backend)


@pytest.mark.parametrize("private", [True, False])
def test_stand_ins_are_not_seen(monkeypatch: pytest.MonkeyPatch, private: bool) -> None:
    """With or without torch's private swap, parameters, their nodes and their gradients are those of eager."""
    monkeypatch.setattr(TapeBackend, "nodes_have_streams", True)
    if not private:
        monkeypatch.setattr(_stand_ins, "_swap", None)
    device = torch.device("cpu")

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        before = [(id(p), get_gradient_edge(p).node) for p in net.parameters()]
        for shown in trained(device, lambda target: net):
            after = [(id(p), get_gradient_edge(p).node) for p in net.parameters()]
            yield shown, before == after

    (graphed,) = same(train, "tape")
    assert graphed.stats().recordings == (2 if private else 1)


def test_another_thread_that_trains_while_a_graph_is_recorded_is_told() -> None:
    """A backward through a stand-in raises: its gradient would be lost."""
    w = torch.ones(3, requires_grad=True)
    with _stand_ins.StandIns([w]).instead():
        loss = (w * 2).sum()
    with pytest.raises(RuntimeError, match="another thread recorded a graph"):
        loss.backward()
    assert w.grad is None


def test_gradients_dropped_meanwhile_stay_dropped() -> None:
    """What another thread does to `.grad` while stand-ins are in place is done to the tensor itself."""
    w = torch.ones(3, requires_grad=True)
    w.grad = torch.ones(3)
    with _stand_ins.StandIns([w]).instead():
        assert w.grad is not None
        w.grad = None
    assert w.grad is None


def test_the_gates_of_a_dropped_wrapper_go_with_it() -> None:
    """Nothing keeps a gate, or the nodes that it holds, once its wrapper is gone."""
    before = len(_gate._gates)
    graphed = graphify(mlp(torch.device("cpu")), backend="tape")
    for _ in range(4):
        graphed(torch.randn(4, 3)).square().sum().backward()
    assert len(_gate._gates) == before + 1
    del graphed
    assert len(_gate._gates) == before
