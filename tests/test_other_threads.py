"""What other threads train or change meanwhile is theirs: no run takes it for its own, and none puts it back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch
from checks import counts, equal
from stepping import ALL_REPLAYED, adamw, batches, left, loss_of, sgd
from torch import Tensor, nn
from torch.optim import Optimizer
from training import Wrap, mlp, same

from graphify import CaptureError, graphify
from graphify._touched import Touched, hearing_grads

Change = Callable[[nn.Module], None]


def in_another_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class Meanwhile:
    """Work for another thread in the middle of the next run; replays have no middle. `steps` train the first of two."""

    def __init__(self, device: torch.device) -> None:
        self.nets = [mlp(device), mlp(device)]
        self.opts = [sgd(net.parameters(), device) for net in self.nets]
        self.work: SimpleQueue[Callable[[], None]] = SimpleQueue()

    @property
    def other(self) -> nn.Module:
        return self.nets[1]

    def step(self, mine: Callable[[Tensor], Any] = Tensor.detach) -> Callable[[Tensor], Any]:
        """A whole step that reaches both nets by name, and trains one."""
        nets, opts, work = self.nets, self.opts, self.work

        def step(x: Tensor) -> Any:
            opts[0].zero_grad()
            loss = loss_of(nets[0], x)
            with suppress(Empty):
                in_another_thread(work.get_nowait())
            loss.backward()
            opts[0].step()
            return mine(loss)

        return step


def make(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad = torch.ones_like(p)


def drop(net: nn.Module) -> None:
    net.zero_grad()


def swap_one(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad = None if p.grad is None else p.grad.clone()


def grads(net: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in net.parameters()]


def are(now: list[Tensor | None], then: list[Tensor | None]) -> bool:
    return all(a is b for a, b in zip(now, then, strict=True))


class TestGradients:
    """`.grad` of a net that the function reaches by name, and another thread trains."""

    @pytest.mark.parametrize("change", [make, drop, swap_one])
    @pytest.mark.parametrize("call", [0, 1])
    def test_of_another_thread(self, backend: str, device: torch.device, change: Change, call: int) -> None:
        """What another thread does to them in a warm-up or a recording stays, and no replay looks at them."""
        world = Meanwhile(device)
        if change is not make:
            make(world.other)
        graphed = graphify(world.step(), backend=backend)
        for i, x in enumerate(batches(device)):
            if i == call:
                world.work.put(lambda: change(world.other))
            before = grads(world.other)
            graphed(x)
            after = grads(world.other)
            assert are(after, before) == (i != call)
            if i > call:
                [make, drop, swap_one][i % 3](world.other)
        assert counts(graphed) == ALL_REPLAYED

    def test_a_run_that_is_undone(self, backend: str, device: torch.device) -> None:
        """A refused warm-up, a refused recording and one ahead of time put back the run's own gradients alone."""
        world, seen = Meanwhile(device), list[int]()
        graphs = [
            graphify(world.step(lambda loss: loss.item()), backend=backend),
            graphify(world.step(lambda loss: seen.append(1)), backend=backend, fallback="eager"),
            graphify(world.step(), backend=backend),
        ]
        (x,) = batches(device, 1)
        world.step()(x)  # builds the state of the optimizer
        make(world.nets[0])
        mine = grads(world.nets[0])
        world.work.put(lambda: make(world.other))
        with pytest.raises(CaptureError, match="read on the host"):
            graphs[0](x)
        assert are(grads(world.nets[0]), mine)
        assert None not in grads(world.other)
        world.work.put(lambda: drop(world.other))
        graphs[2].capture(x)
        assert are(grads(world.nets[0]), mine)
        assert are(grads(world.other), [None] * 4)
        graphs[1](x)
        world.work.put(lambda: make(world.other))
        with pytest.warns(match="changes"):
            graphs[1](x)
        assert None not in grads(world.other)

    def test_a_verified_call(self, backend: str, device: torch.device) -> None:
        """The eager twin of a verified call is undone, and what another thread bound meanwhile is not."""
        world = Meanwhile(device)
        graphed = graphify(world.step(), backend=backend, verify=2)
        xs = batches(device)
        graphed(xs[0])
        graphed(xs[1])
        theirs = [torch.ones_like(p) for p in world.other.parameters()]

        def bind() -> None:
            for p, grad in zip(world.other.parameters(), theirs, strict=True):
                p.grad = grad

        bind()
        world.work.put(bind)
        graphed(xs[2])
        assert are(grads(world.other), [*theirs])

    @pytest.mark.parametrize("make_optimizer", [sgd, adamw])
    def test_two_threads_with_a_step_each(
        self, backend: str, device: torch.device, make_optimizer: Callable[..., Optimizer]
    ) -> None:
        """Two whole steps at once, which reach each other's net by name, train as in eager, with one recording each."""

        def play(wrap: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
            torch.manual_seed(0)
            nets = [mlp(device), mlp(device)]
            opts = [make_optimizer(net.parameters(), device) for net in nets]
            xs = [batches(device) for _ in nets]
            for net, opt in zip(nets, opts, strict=True):
                loss_of(net, xs[0][0]).backward()
                opt.step()

            def step_of(i: int) -> Callable[[Tensor], Tensor]:
                def step(x: Tensor) -> Tensor:
                    opts[i].zero_grad()
                    loss = loss_of(nets[i], x)
                    loss.backward()
                    opts[i].step()
                    return loss.detach()

                return step

            steps, found = [wrap(step_of(i)) for i in (0, 1)], [list[Any](), list[Any]()]
            threads = [
                threading.Thread(target=lambda i=i: found[i].extend(map(steps[i], xs[i]))) for i in (0, 1)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return steps, [*found, left(*nets, *opts)]

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        try:
            for _ in range(2):
                graphed, found = play(lambda step: graphify(step, backend=backend))
                equal(play(lambda step: step)[1], found)
                assert [counts(step) for step in graphed] == [ALL_REPLAYED] * 2
        finally:
            sys.setswitchinterval(interval)


def build(world: Meanwhile) -> None:
    make(world.other)
    world.opts[1].step()


def schedule(world: Meanwhile) -> None:
    world.opts[1].param_groups[0]["lr"] *= 0.5


class TestOptimizers:
    """An optimizer that the function reaches by name, and another thread steps or schedules."""

    @pytest.mark.parametrize("change", [build, schedule])
    @pytest.mark.parametrize("how", ["refused", "warm-up", "recording", "ahead"])
    def test_of_another_thread(
        self, backend: str, device: torch.device, change: Callable[[Meanwhile], None], how: str
    ) -> None:
        """Neither its state nor its options are put back, refused or guarded; the run's own are put back as ever."""
        world, xs = Meanwhile(device), batches(device)
        world.step()(xs[0])
        before = left(world.nets[0], world.opts[0])
        if how == "refused":
            graphed = graphify(world.step(lambda loss: loss.item()), backend=backend)
            world.work.put(lambda: change(world))
            with pytest.raises(CaptureError, match="read on the host"):
                graphed(xs[0])
        elif how == "ahead":
            graphed = graphify(world.step(), backend=backend)
            world.work.put(lambda: change(world))
            graphed.capture(xs[0])
        else:
            graphed = graphify(world.step(), backend=backend)
            for i, x in enumerate(xs):
                if i == (how == "recording"):
                    world.work.put(lambda: change(world))
                graphed(x)
                schedule(world)
            assert counts(graphed) == ALL_REPLAYED
        assert len(world.opts[1].state) == (4 if change is build else 0)
        times = (change is schedule) + (8 if how in ("warm-up", "recording") else 0)
        assert world.opts[1].param_groups[0]["lr"] == 0.1 * 0.5**times
        if how in ("refused", "ahead"):
            equal(before, left(world.nets[0], world.opts[0]))

    def test_that_code_looks_into(self, backend: str, device: torch.device) -> None:
        """An option of one that does not step is a value of the signature as soon as the code can read it."""
        optimizer = sgd(mlp(device).parameters(), device)

        def scale(x: Tensor) -> Tensor:
            return x * optimizer.param_groups[0]["lr"]

        graphed = graphify(scale, backend=backend)
        for i, x in enumerate(batches(device)):
            if i == 2:
                optimizer.param_groups[0]["lr"] = 0.5
            assert torch.equal(graphed(x), scale(x))


class TestOwn:
    """`.grad` that the function itself reads or binds, with no backward and no optimizer inside."""

    def test_is_bound(self, backend: str, device: torch.device) -> None:
        """One that is set to None, or to what the run made, is so after each replay."""

        def train(wrap: Wrap) -> Any:
            net = mlp(device)
            first, last = net[0].weight, net[2].weight

            @wrap
            def bind(x: Tensor) -> Tensor:
                first.grad = None
                last.grad = (last * x.sum()).detach()
                return x * 2

            for x in batches(device):
                first.grad = torch.ones_like(first)
                yield bind(x), first.grad, last.grad.clone()

        (graphed,) = same(train, backend)
        assert counts(graphed)[2] > 4

    def test_is_asked_for(self, backend: str, device: torch.device) -> None:
        """A run that asks whether there is one has a recording for either answer."""

        def train(wrap: Wrap) -> Any:
            weight = mlp(device)[0].weight

            @wrap
            def ask(x: Tensor) -> Tensor:
                return x if weight.grad is None else x * 2

            for i, x in enumerate(batches(device, 8)):
                weight.grad = torch.ones_like(weight) if i % 2 else None
                yield ask(x)

        (graphed,) = same(train, backend)
        assert counts(graphed)[3:] == (0, 0)

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_is_zeroed_before_a_loss(self, backend: str, device: torch.device, set_to_none: bool) -> None:
        """A function that zeroes gradients and returns a loss, whose backward is the caller's, does so in replays."""

        def train(wrap: Wrap) -> Any:
            net = mlp(device)
            optimizer = sgd(net.parameters(), device)

            @wrap
            def begin(x: Tensor) -> Tensor:
                optimizer.zero_grad(set_to_none)
                return loss_of(net, x)

            for x in batches(device):
                loss = begin(x)
                loss.backward()
                yield loss, left(net)
                optimizer.step()

        (graphed,) = same(train, backend)
        assert counts(graphed)[3:] == (0, 0)
        assert counts(graphed)[2] > 3


class TestHearing:
    def test_only_this_thread(self) -> None:
        """The listener hears each way to name `.grad` on its thread; torch's own attribute is there again after."""
        leaf, own = nn.Parameter(torch.ones(2)), Tensor.grad
        touched = Touched()

        def named() -> None:
            leaf.grad = torch.ones(2)

        with hearing_grads(touched.hear):
            assert Tensor.grad is own
            in_another_thread(named)
            assert not touched.before
            assert leaf.grad is not None
            assert [t for t, _ in touched.before.values()] == [leaf]
        assert "grad" not in vars(Tensor)
        for name in (named, lambda: delattr(leaf, "grad"), lambda: setattr(leaf, "grad", None)):
            touched = Touched()
            with hearing_grads(touched.hear):
                name()
            assert touched.before
        with hearing_grads(touched.hear), pytest.raises(TypeError, match="expected to be a Tensor or None"):
            leaf.grad = 1  # type: ignore[assignment]
