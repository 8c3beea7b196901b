"""Whole training steps in programs: where optimizers are kept, what goes on between steps, who holds gradients."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checks import counts, equal
from stepping import (
    ALL_REPLAYED,
    REPLAYS,
    Opaque,
    adamw,
    batches,
    closure_step,
    left,
    loss_of,
    noisy,
    pair,
    plain_step,
    recordings,
    sgd,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from training import Wrap, clear, grads, mlp, reset, same

from graphify import graphify, handle

# -- where optimizer and net are kept


def test_several_optimizers_in_one_step(backend, device):
    """A GAN step, two nets and two optimizers that train against each other, is one recording."""

    def train(wrap: Wrap) -> Iterator[Any]:
        maker, judge = mlp(device), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)).to(device)
        of_maker, of_judge = adamw(maker.parameters(), device), sgd(judge.parameters(), device)

        @wrap
        def step(noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
            of_judge.zero_grad()
            fake = maker(noise)
            judged = judge(fake.detach()).mean() - judge(real).mean()
            judged.backward()
            of_judge.step()
            of_maker.zero_grad()
            fooled = -judge(fake).mean()
            fooled.backward()
            of_maker.step()
            return judged.detach(), fooled.detach()

        for noise, real in zip(batches(device), batches(device, REPLAYS + 2, 4, 2), strict=True):
            losses = step(noise, real)
            yield losses, left(maker, judge, of_maker, of_judge)

    (graphed,) = same(train, backend)
    assert counts(graphed) == ALL_REPLAYED
    assert recordings(graphed) == 1


class Trainer:
    """Net and optimizer as attributes, as most people keep them."""

    def __init__(self, device: torch.device, make: Callable[..., Optimizer] = adamw) -> None:
        self.net = mlp(device)
        self.optimizer = make(self.net.parameters(), device)

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self.net, x)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


held: dict[str, Any] = {}


def step_of_globals(x: Tensor) -> Tensor:
    held["optimizer"].zero_grad()
    loss = loss_of(held["net"], x)
    loss.backward()
    held["optimizer"].step()
    return loss.detach()


def global_step(net: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    held.update(net=net, optimizer=optimizer)
    return step_of_globals


def helper_step(net: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    helper = SimpleNamespace(parts=(net, {"optimizer": [optimizer]}))

    def step(x: Tensor) -> Tensor:
        net, found = helper.parts
        return plain_step(net, found["optimizer"][0])(x)

    return step


def opaque_step(net: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    helper = Opaque(optimizer)
    return lambda x: plain_step(net, helper.get())(x)


def partial_step(net: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    return functools.partial(lambda net, optimizer, x: plain_step(net, optimizer)(x), net, optimizer)


def default_step(net: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    update = optimizer.step

    def step(x: Tensor, net: nn.Module = net, update: Callable[[], Any] = update) -> Tensor:
        net.zero_grad()
        loss = loss_of(net, x)
        loss.backward()
        update()
        return loss.detach()

    return step


KEPT: dict[str, Callable[..., Callable[[Tensor], Tensor]]] = {
    "closure": plain_step,
    "global": global_step,
    "helper": helper_step,
    "opaque": opaque_step,
    "partial": partial_step,
    "default": default_step,
}


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("how", KEPT)
def test_wherever_the_optimizer_is_kept(backend, device, how, make):
    """Its numbers are followed from a closure, a global, a helper, and where no name leads to it."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, make)
        run = wrap(KEPT[how](net, optimizer))
        for i, x in enumerate(batches(device, 12)):
            if i > 4:
                optimizer.param_groups[0]["lr"] *= 0.7
            yield run(x), left(net, optimizer)

    (graphed,) = same(train, backend)
    assert counts(graphed) == (1, 2, 9, 0, 0)


def test_a_method_of_a_trainer(backend, device):
    """A bound method, graphed from outside, finds all in its object."""

    def train(wrap: Wrap) -> Iterator[Any]:
        trainer = Trainer(device)
        run = wrap(trainer.step)
        for x in batches(device):
            yield run(x), left(trainer.net, trainer.optimizer)

    assert counts(*same(train, backend)) == ALL_REPLAYED


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True:UserWarning")
def test_a_method_decorated_in_the_class_body(backend, device):
    """Each trainer has graphs of its own, and a deep copy trains on its own net from where the first was."""
    made: list[Any] = []

    def train(wrap: Wrap) -> Iterator[Any]:
        class Mine(Trainer):
            @wrap
            def step(self, x: Tensor) -> Tensor:
                self.optimizer.zero_grad()
                loss = loss_of(self.net, x)
                loss.backward()
                self.optimizer.step()
                return loss.detach()

        trainers = [Mine(device), Mine(device, sgd)]
        for turn in range(2):
            for x in batches(device):
                for trainer in trainers:
                    yield trainer.step(x), left(trainer.net, trainer.optimizer)
            made[:] = trainers
            if turn == 0:
                trainers.append(copy.deepcopy(trainers[0]))

    same(train, backend)
    assert [counts(trainer.step) for trainer in made] == [(1, 1, 14, 0, 0), (1, 1, 14, 0, 0), ALL_REPLAYED]


class Learner(nn.Module):
    """Net, loss and optimizer in one module whose forward is a whole step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.net, self.loss = mlp(device), nn.MSELoss()
        self.optimizer = adamw(self.net.parameters(), device)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        out = self.net(x)
        loss = self.loss(out, y)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach(), "out": out.detach()}


def test_a_module_that_is_a_whole_step(backend, device):
    """A module that wraps net, loss and optimizer is graphed like any module."""

    def train(wrap: Wrap) -> Iterator[Any]:
        learner = wrap(Learner(device))
        for x in batches(device):
            yield learner(x, x[:, :2] * 2), left(learner.net, learner.optimizer)

    assert counts(*same(train, backend)) == ALL_REPLAYED


def test_two_functions_share_one_optimizer(backend, device):
    """Two graphed steps on one net and one optimizer continue where the other left off."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, adamw)
        one = wrap(plain_step(net, optimizer))

        @wrap
        def other(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = net(x).abs().sum()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            return loss.detach()

        for i, x in enumerate(batches(device, 18)):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + i // 6)
            yield (other if i % 3 == 1 else one)(x), left(net, optimizer)

    one, other = same(train, backend)
    assert counts(one) == (1, 2, 9, 0, 0)
    assert counts(other) == (1, 2, 3, 0, 0)


# -- interleaved with other work


def test_shapes_take_turns(backend, device):
    """Batches of several sizes have graphs of their own, which share weights, state and rate."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, adamw)
        step = wrap(plain_step(net, optimizer))
        for i in range(18):
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            yield step(torch.randn(2 + i % 3, 3, device=device)), left(net, optimizer)

    (graphed,) = same(train, backend)
    assert counts(graphed) == (3, 3, 12, 0, 0)
    assert recordings(graphed) == 3


def test_training_and_evaluation_take_turns(backend, device):
    """A step in train mode and a graphed evaluation of the same net see each other's work."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = noisy(device)
        optimizer = adamw(net.parameters(), device)
        step = wrap(plain_step(net, optimizer))

        @wrap
        @torch.no_grad()
        def evaluate(x: Tensor) -> Tensor:
            return loss_of(net, x)

        for _ in range(6):
            for x in batches(device, 2):
                yield step(x), left(net, optimizer)
            net.eval()
            yield evaluate(x), left(net, optimizer)
            net.train()

    step, evaluate = same(train, backend)
    assert counts(step) == (1, 1, 10, 0, 0)
    assert counts(evaluate) == (1, 1, 4, 0, 0)


def test_one_function_for_training_and_evaluation(backend, device):
    """A function that trains only in train mode is two graphs."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = noisy(device)
        optimizer = adamw(net.parameters(), device)

        @wrap
        def run(x: Tensor) -> Tensor:
            if not net.training:
                with torch.no_grad():
                    return loss_of(net, x)
            return plain_step(net, optimizer)(x)

        for i, x in enumerate(batches(device, 18)):
            net.train(i % 3 != 2)
            yield run(x), left(net, optimizer)

    assert counts(*same(train, backend)) == (2, 2, 14, 0, 0)


@pytest.mark.parametrize("what", ["net", "optimizer", "both"])
def test_load_state_dict_between_steps(backend, device, what):
    """A checkpoint put back between steps is trained on from there."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, adamw)
        step = wrap(plain_step(net, optimizer))
        for i, x in enumerate(batches(device, 18)):
            yield step(x), left(net, optimizer)
            if i == 4:
                saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            if i == 9 and what in ("net", "both"):
                net.load_state_dict(saved[0])
            if i == 9 and what in ("optimizer", "both"):
                optimizer.load_state_dict(saved[1])

    (graphed,) = same(train, backend)
    assert counts(graphed) == ((1, 1, 16, 0, 0) if what == "net" else (2, 2, 14, 0, 0))


def test_reset_between_steps(backend, device):
    """After `reset()` training goes on from the same state, with new graphs."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, adamw)
        step = wrap(plain_step(net, optimizer))
        for i, x in enumerate(batches(device, 15)):
            if i in (1, 2, 8):
                reset(step)
                yield left(net, optimizer)
            yield step(x), left(net, optimizer)

    (graphed,) = same(train, backend)
    assert counts(graphed) == (4, 2, 9, 0, 0)


def test_eviction_between_steps(backend, device):
    """A graph that is dropped for another one comes back, and gradients outlive it."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, adamw)
        step = wrap(plain_step(net, optimizer))
        for i in range(32):
            yield step(torch.randn(2 + i // 4 % 2, 3, device=device)), left(net, optimizer)

    (graphed,) = same(train, backend, max_graphs=1)
    stats = handle(graphed).stats()
    assert stats.evictions >= 2, stats
    assert stats.replays >= 6, stats
    assert set(stats.reasons) <= {"evicted"}, stats


# -- gradients in the user's hands


@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_that_the_user_replaced(backend, device, to_none):
    """A `.grad` that the user puts there between calls is cleared or added to as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)

        @wrap
        def step(x: Tensor) -> Tensor:
            if to_none:
                optimizer.zero_grad()
            loss = loss_of(net, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        for i, x in enumerate(batches(device, 14)):
            if i in (4, 9):
                for p in net.parameters():
                    p.grad = torch.full_like(p, 0.5)
            yield step(x), left(net, optimizer)

    (graphed,) = same(train, backend)
    assert counts(graphed)[3:] == (0, 0)
    if to_none:
        assert counts(graphed) == (1, 1, 12, 0, 0)


def test_a_gradient_that_the_user_edits(backend, device):
    """Values written into the `.grad` that a step left are what the next call finds."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)

        @wrap
        def step(x: Tensor) -> Tensor:
            loss = loss_of(net, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        for x in batches(device):
            yield step(x), left(net, optimizer)
            for p in net.parameters():
                p.grad.mul_(0.5)

    assert counts(*same(train, backend)) == ALL_REPLAYED


def test_a_gradient_that_the_user_kept(backend, device):
    """The stated exception: a kept `.grad` is the graph's own buffer; a clone, and what `reset()` left, stay."""
    if backend == "eager":
        pytest.skip("the eager backend leaves what the function itself leaves")
    net, optimizer = pair(device)
    step = graphify(plain_step(net, optimizer), backend=backend)
    data = batches(device, 6)
    for x in data[:3]:
        step(x)
    kept = grads(net)
    clones = [g.clone() for g in kept]
    step(data[3])
    now = grads(net)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(kept, now, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(kept, clones, strict=True))

    step.reset()
    clones = [g.clone() for g in kept]
    for x in data[4:]:
        step(x)
    equal(clones, kept)
    clear(net)


# -- errors in the middle


@pytest.mark.parametrize("at", [0, 3])
def test_an_error_of_the_users_own(backend, device, at):
    """An error between backward and step leaves the gradients there, and training goes on afterwards."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)
        switch = SimpleNamespace(broken=False)

        @wrap
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, x)
            loss.backward()
            if switch.broken:
                raise ValueError("mine")
            optimizer.step()
            return loss.detach()

        for i, x in enumerate(batches(device, 12)):
            switch.broken = i == at
            if i == at:
                with pytest.raises(ValueError, match="mine"):
                    step(x)
                yield left(net, optimizer)
            else:
                yield step(x), left(net, optimizer)

    (graphed,) = same(train, backend)
    assert counts(graphed)[3:] == (0, 1)


def test_an_error_while_recording(backend, device):
    """An error in the run that is recorded leaves everything as before that call, and training goes on."""
    net, optimizer = pair(device)
    twin = copy.deepcopy(net)
    other = sgd(twin.parameters(), device)
    broken = [False]
    unseen = Opaque(broken)

    def check(*_: Any) -> None:
        if unseen.get()[0]:
            raise ValueError("mine")

    optimizer.register_step_pre_hook(check)
    step, eager = graphify(plain_step(net, optimizer), backend=backend), plain_step(twin, other)
    for i, x in enumerate(batches(device, 8)):
        broken[0] = i == 1
        if broken[0]:
            before = left(net, optimizer)
            with pytest.raises(ValueError, match="mine"):
                step(x)
            equal(before, left(net, optimizer))
        else:
            equal((eager(x), left(twin, other)), (step(x), left(net, optimizer)))
    assert counts(step)[1:] == (1, 4, 0, 1)


# -- other ways to write a step


def by_hand(net: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = loss_of(net, x)
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return loss.detach()

    return step


def by_autograd_grad(net: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        parameters = [*net.parameters()]
        loss = loss_of(net, x)
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = grad
        optimizer.step()
        return loss.detach()

    return step


def by(backward: Callable[[nn.Module, Tensor], Any]) -> Callable[..., Callable[[Tensor], Tensor]]:
    def make(net: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = backward(net, x)
            optimizer.step()
            return loss.detach()

        return step

    return make


def twice(net: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(net, x)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def in_part(net: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(net, x)
    loss.backward(inputs=[net[2].weight])
    return loss


def with_checkpoint(net: nn.Module, x: Tensor) -> Tensor:
    loss = checkpoint(net, x, use_reentrant=False).square().mean()
    loss.backward()
    return loss


def without_grad_mode(net: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    return torch.no_grad()(torch.enable_grad()(plain_step(net, optimizer)))


WAYS: dict[str, Callable[..., Callable[[Tensor], Tensor]]] = {
    "by hand": by_hand,
    "autograd.grad": by_autograd_grad,
    "closure": closure_step,
    "backward twice": by(twice),
    "backward of some": by(in_part),
    "checkpoint": by(with_checkpoint),
    "enable_grad inside no_grad": without_grad_mode,
}


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_write_a_step(backend, device, way):
    """However gradients and updates are written, one recording leaves what eager leaves."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, adamw)
        step = wrap(WAYS[way](net, optimizer))
        for x in batches(device):
            yield step(x), left(net, optimizer)

    assert counts(*same(train, backend)) == ALL_REPLAYED


@pytest.mark.parametrize("options", [{"outputs": "static"}, {"warmup": 3}, {"max_graphs": None}], ids=str)
def test_options(backend, device, options):
    """The wrapper's options change nothing of what a step leaves."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, adamw)
        step = wrap(plain_step(net, optimizer))
        for i, x in enumerate(batches(device)):
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            yield step(x).clone(), left(net, optimizer)

    warmups = options.get("warmup", 1)
    assert counts(*same(train, backend, **options)) == (warmups, 1, REPLAYS + 1 - warmups, 0, 0)


def re_set(net: nn.Module, optimizer: Optimizer) -> None:
    for p in net.parameters():
        p.data = p.data.clone()


def replace(net: nn.Module, optimizer: Optimizer) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())


CHANGES: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "data": re_set,
    "parameter": replace,
    "state": lambda net, optimizer: optimizer.state.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_step_uses_is_replaced(backend, device, change):
    """Other memory, another parameter or no state any more: noticed, and recorded anew."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, adamw)
        step = wrap(plain_step(net, optimizer))
        for i, x in enumerate(batches(device, 14)):
            if i == 6:
                CHANGES[change](net, optimizer)
            yield step(x), left(net, optimizer)

    assert counts(*same(train, backend)) == (2, 2, 10, 0, 0)


def test_a_tied_parameter(backend, device):
    """A parameter that stands in two layers gets the sum of both gradients, and one step."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(device)
        net[2].weight = net[0].weight
        optimizer = adamw(net.parameters(), device)
        step = wrap(plain_step(net, optimizer))
        for x in batches(device):
            yield step(x), left(net, optimizer)

    assert counts(*same(train, backend)) == ALL_REPLAYED
