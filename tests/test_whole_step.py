"""Whole training steps: a function with its backward and its optimizer inside leaves all that eager leaves."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import counts
from stepping import (
    ALL_REPLAYED,
    MAKERS,
    READS,
    REPLAYS,
    adamw,
    batches,
    left,
    loss_of,
    noisy,
    pair,
    plain_step,
    recordings,
    refused,
    replayed,
    sgd,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from training import Wrap, mlp, same

from graphify import CaptureError, graphify

# -- the case


def test_b63_whole_training_step(backend, device):
    """A step with backward and optimizer inside leaves eager's weights after each call, whatever the rate is."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)
        step = wrap(plain_step(net, optimizer))
        for i, x in enumerate(batches(device)):
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            yield step(x), left(net, optimizer)

    (graphed,) = same(train, backend)
    assert counts(graphed) == ALL_REPLAYED
    assert recordings(graphed) == 1


@pytest.mark.parametrize("name", MAKERS)
def test_every_optimizer_that_can_be_captured(backend, device, name):
    """Loss, parameters, gradients and the optimizer's state equal eager after each step, by one recording."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, MAKERS[name])
        step = wrap(plain_step(net, optimizer))
        for x in batches(device):
            yield step(x), left(net, optimizer)

    (graphed,) = same(train, backend)
    assert counts(graphed) == ALL_REPLAYED
    assert recordings(graphed) == 1


# -- zero_grad, accumulation, clipping


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("where", ["first", "last", "both", "outside", "never"])
def test_zero_grad_wherever_it_is(backend, device, where, to_none):
    """Gradients are what eager leaves, None or zeros or a sum, wherever they are cleared."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)

        def step(x: Tensor) -> Tensor:
            if where in ("first", "both"):
                optimizer.zero_grad(set_to_none=to_none)
            loss = loss_of(net, x)
            loss.backward()
            optimizer.step()
            if where in ("last", "both"):
                optimizer.zero_grad(set_to_none=to_none)
            return loss.detach()

        run = wrap(step)
        for x in batches(device):
            yield run(x), left(net, optimizer)
            if where == "outside":
                optimizer.zero_grad(set_to_none=to_none)
                yield left(net)

    assert counts(*same(train, backend)) == ALL_REPLAYED


def test_several_backwards_before_the_step(backend, device):
    """Gradients of several micro-batches add up inside one step."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, adamw)

        def step(*parts: Tensor) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), device=device)
            for x in parts:
                loss = loss_of(net, x) / len(parts)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            return total

        run = wrap(step)
        for _ in range(REPLAYS + 2):
            yield run(*batches(device, 3)), left(net, optimizer)

    assert counts(*same(train, backend)) == ALL_REPLAYED


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_add_up_across_calls(backend, device, to_none):
    """One function only runs backwards, another steps: gradients are handed from graph to graph."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)

        def accumulate(x: Tensor) -> Tensor:
            loss = loss_of(net, x)
            loss.backward()
            return loss.detach()

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

        accumulate, update = wrap(accumulate), wrap(update)
        for _ in range(8):
            for x in batches(device, 3):
                yield accumulate(x), left(net, optimizer)
            update()
            yield left(net, optimizer)

    for graphed in same(train, backend):
        replayed(graphed, 4)


def test_only_the_optimizer_is_graphed(backend, device):
    """A graphed step reads the gradients that an eager backward makes anew at each turn."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)
        update = wrap(lambda: optimizer.step())
        for x in batches(device):
            optimizer.zero_grad(set_to_none=False)
            loss_of(net, x).backward()
            update()
            yield left(net, optimizer)

    assert counts(*same(train, backend)) == ALL_REPLAYED


def test_a_flag_that_says_when_to_step(backend, device):
    """A plain argument that decides whether this call steps makes two graphs, which take turns."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)

        def step(x: Tensor, last: bool) -> Tensor:
            loss = loss_of(net, x)
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            return loss.detach()

        run = wrap(step)
        for i, x in enumerate(batches(device, 18)):
            yield run(x, i % 3 == 2), left(net, optimizer)

    (graphed,) = same(train, backend)
    replayed(graphed, 10)


CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.01),
    "norm inf": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.01, norm_type=float("inf")),
    "norm foreach": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.01, foreach=True),
    "value": lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.001),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_clipping(backend, device, clip):
    """Clipped gradients are left in `.grad`, and the norm may be returned."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)

        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            loss = loss_of(net, x)
            loss.backward()
            norm = CLIPS[clip](net)
            optimizer.step()
            return loss.detach(), norm

        run = wrap(step)
        for x in batches(device):
            yield run(x), left(net, optimizer)

    assert counts(*same(train, backend)) == ALL_REPLAYED


# -- parameters without a gradient, frozen and thawed


class Branches(nn.Module):
    """A trunk and a head that a plain flag leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.use_head = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.trunk(x).tanh()
        return self.head(y) if self.use_head else y


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_gradient_that_comes_later(backend, device, make, to_none):
    """A parameter without a gradient at the capture gets one, and state, once a flag brings it into play."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = Branches().to(device)
        optimizer = make(net.parameters(), device)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=to_none)
            loss = loss_of(net, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        for i, x in enumerate(batches(device, 20)):
            net.use_head = i >= 5 and i % 4 != 3
            yield run(x), left(net, optimizer)

    (graphed,) = same(train, backend)
    replayed(graphed, 9)


def test_a_parameter_that_never_gets_a_gradient(backend, device):
    """What the loss does not reach keeps None, and no state of the optimizer comes to be."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = Branches().to(device)
        optimizer = adamw(net.parameters(), device)
        run = wrap(plain_step(net, optimizer))
        for x in batches(device):
            yield run(x), left(net, optimizer)
            assert net.head.weight.grad is None

    assert counts(*same(train, backend)) == ALL_REPLAYED


# -- numbers of the optimizer that change


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, 24, cycle_momentum=False),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", [sgd, functools.partial(sgd, fused=True), adamw])
def test_schedules(backend, device, make, schedule):
    """A schedule outside costs at most one more recording, however many values the rate takes."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, make)
        plan = SCHEDULES[schedule](optimizer)
        step = wrap(plain_step(net, optimizer))
        for x in batches(device, 20):
            yield step(x), left(net, optimizer), plan.get_last_lr()
            plan.step()

    (graphed,) = same(train, backend)
    late = schedule == "StepLR"
    assert counts(graphed) == (1, 1 + late, 18 - late, 0, 0)
    assert recordings(graphed) == 1 + late


def test_rate_and_momentum_move_together(backend, device):
    """OneCycleLR changes two options at each step, and one recording serves them all."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, functools.partial(sgd, nesterov=True))
        plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 24)
        step = wrap(plain_step(net, optimizer))
        for x in batches(device, 20):
            yield step(x), left(net, optimizer)
            plan.step()

    (graphed,) = same(train, backend)
    assert counts(graphed) == (1, 1, 18, 0, 0)
    assert recordings(graphed) == 1


@pytest.mark.parametrize("make", [sgd, adamw])
def test_the_same_rate_in_new_objects(backend, device, make):
    """Setting an equal number anew is no change; going back to an old one is no recording."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, make)
        step = wrap(plain_step(net, optimizer))
        for lr in ("0.1", "0.1", "0.1", "0.1", "0.2", "0.2", "0.1", "0.1", "0.2", "0.3", "0.1"):
            optimizer.param_groups[0]["lr"] = float(lr)
            yield step(*batches(device, 1)), left(net, optimizer)

    (graphed,) = same(train, backend)
    assert counts(graphed) == (1, 2, 8, 0, 0)
    assert recordings(graphed) == 2


def test_each_group_has_its_own_rate(backend, device):
    """Rates of several groups that change at different times are all taken up."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = mlp(device)
        groups = [{"params": list(part.parameters()), "lr": 0.1 / (i + 1)} for i, part in enumerate(net[::2])]
        optimizer = adamw(groups, device)
        step = wrap(plain_step(net, optimizer))
        for i, x in enumerate(batches(device, 14)):
            if i > 3:
                optimizer.param_groups[i % 2]["lr"] *= 0.7
            yield step(x), left(net, optimizer)

    (graphed,) = same(train, backend)
    assert counts(graphed) == (1, 3, 10, 0, 0)


def test_a_group_that_is_added_later(backend, device):
    """A group of parameters that joins is trained from then on."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = mlp(device)
        optimizer = adamw(net[0].parameters(), device)
        step = wrap(plain_step(net, optimizer))
        for i, x in enumerate(batches(device, 12)):
            if i == 5:
                optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.5})
            net.zero_grad()
            yield step(x), left(net, optimizer)

    (graphed,) = same(train, backend)
    assert counts(graphed) == (2, 2, 8, 0, 0)


@pytest.mark.parametrize("values", [(0.1, 0.0), (0.1, 0.2, 0.0, 0.3, 0.0), (0.0, 0.1)])
@pytest.mark.parametrize("option", ["weight_decay", "momentum"])
def test_an_option_that_becomes_nothing(backend, device, option, values):
    """A number that is switched off, which takes another way through the step, is followed."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device)
        step = wrap(plain_step(net, optimizer))
        for i in range(6 * len(values)):
            optimizer.param_groups[0][option] = values[i // 6]
            yield step(*batches(device, 1)), left(net, optimizer)

    (graphed,) = same(train, backend)
    replayed(graphed, 4 * len(values) - 2)


def test_a_rate_in_a_tensor(backend, device):
    """A learning rate that the user keeps in a tensor is read where it lies."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = mlp(device)
        optimizer = adamw(net.parameters(), device, lr=torch.tensor(0.1, device=device))
        step = wrap(plain_step(net, optimizer))
        for i, x in enumerate(batches(device)):
            optimizer.param_groups[0]["lr"].fill_(0.1 / (i + 1))
            yield step(x), left(net, optimizer)

    assert counts(*same(train, backend)) == ALL_REPLAYED


def decaying(net: nn.Module, optimizer: Optimizer, run: Callable[[Tensor], Any], device: torch.device) -> Any:
    for value in (0.1, 0.2, 0.3):
        optimizer.param_groups[0]["weight_decay"] = value
        for x in batches(device, 4):
            yield run(x), left(net, optimizer)


def test_a_number_that_no_tensor_can_stand_for(backend, device):
    """Where a kernel reads a number on the host, its third value is refused with what to write."""
    if backend == "eager":
        pytest.skip("a replay of the eager backend runs the function, which reads the number itself")
    net, optimizer = pair(device, adamw)
    run = graphify(plain_step(net, optimizer), backend=backend)
    seen = decaying(net, optimizer, run, device)
    with pytest.raises(CaptureError) as raised:
        for _ in seen:
            pass
    assert (
        raised.value.what == "`optimizer.param_groups[0]['weight_decay']` takes a new value again and again"
    )
    assert raised.value.why == (
        "each value is baked into a graph of its own, and this optimizer reads the number on the host"
    )
    assert raised.value.fix.endswith("keep the number, or step outside the graphed function")
    assert counts(run) == (2, 2, 4, 0, 1)


# -- mixed precision, randomness, statistics, averages


@pytest.mark.parametrize("make", [functools.partial(sgd, fused=True), adamw])
@pytest.mark.parametrize("inside", [True, False])
def test_a_scaler(backend, device, make, inside):
    """A GradScaler scales, skips the step of an overflow and grows as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, make)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=3)

        def forward(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, x)
            scaler.scale(loss).backward()
            return loss.detach()

        def update() -> None:
            scaler.step(optimizer)
            scaler.update()

        def step(x: Tensor) -> Tensor:
            loss = forward(x)
            update()
            return loss

        run = wrap(step if inside else forward)
        for i, x in enumerate(batches(device, 14)):
            if i in (3, 8, 9):
                x[0, 0] = float("inf")
            yield run(x)
            if not inside:
                update()
            yield left(net, optimizer), scaler.state_dict()

    # Outside, the optimizer's first step builds its state only after the first call.
    assert counts(*same(train, backend)) == ((1, 1, 12, 0, 0) if inside else (2, 1, 11, 0, 0))


def test_a_scaler_with_an_optimizer_that_is_not_fused(backend, device):
    """A scaler that would ask on the host whether to step is refused with the way that asks on the device."""
    net, optimizer = pair(device)
    scaler = torch.amp.GradScaler(device.type)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    error = refused(step, [batches(device, 1)], backend)
    assert error.what == "`GradScaler.step` reads on the host whether the gradients are finite"
    assert error.why == READS
    assert error.fix.startswith("a fused optimizer, which skips on the device: `torch.optim.AdamW(...")


@pytest.mark.parametrize("clip", [False, True])
def test_autocast_inside(backend, device, clip):
    """Autocast around the forward inside the step, with its cache of cast weights, is as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, adamw)

        @wrap
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = loss_of(net, x) + loss_of(net, x + 1)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            return loss.detach()

        for x in batches(device):
            yield step(x), left(net, optimizer)

    assert counts(*same(train, backend)) == ALL_REPLAYED


def test_dropout_and_batch_norm(backend, device):
    """Masks, the random stream and running statistics go on as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = noisy(device)
        optimizer = sgd(net.parameters(), device)
        step = wrap(plain_step(net, optimizer))
        for x in batches(device):
            yield step(x), left(net, optimizer), torch.rand(2, device=device)

    assert counts(*same(train, backend)) == ALL_REPLAYED


@pytest.mark.parametrize("how", ["lerp", "copy"])
def test_an_average_of_the_weights(backend, device, how):
    """A moving average that the step updates follows the weights of the very step."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, optimizer = pair(device, adamw)
        average = copy.deepcopy(net).requires_grad_(False)
        plain = plain_step(net, optimizer)

        @wrap
        def step(x: Tensor) -> Tensor:
            loss = plain(x)
            with torch.no_grad():
                if how == "lerp":
                    torch._foreach_lerp_([*average.parameters()], [*net.parameters()], 0.1)
                else:
                    for mine, theirs in zip(average.parameters(), net.parameters(), strict=True):
                        mine.copy_(mine * 0.9 + theirs * 0.1)
            return loss

        for x in batches(device):
            yield step(x), left(net, optimizer, average), average(x)

    assert counts(*same(train, backend)) == ALL_REPLAYED
