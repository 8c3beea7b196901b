"""`.grad` around a whole step: what a recording needs of it, and what each replay leaves."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from whole_steps import CPU, Function, Step, loss_of, net, tape

from graphify._grads import Grads, refused_arguments
from graphify._touched import Touched
from graphify._watch import Watch, watching
from graphify.errors import CaptureError


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def equal(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return left is right
    if isinstance(left, Tensor):
        return torch.equal(left, right) and left.stride() == right.stride()
    return len(left) == len(right) and all(map(equal, left, right))


def unheard(grads: Grads) -> Touched:
    """A run that is about to do what cannot be heard."""
    touched = Touched()
    touched.within(grads.leaves)
    touched.hear_all()
    return touched


Between = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def nothing(call: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def assert_like_eager(function: Function, calls: int = 8, between: Between = nothing) -> Step:
    """The step on the tape and its eager twin agree after every call, in results, gradients and parameters."""
    model = net()
    twin = deepcopy(model)
    optimizer, other = sgd(model), sgd(twin)
    step = Step(function, model, optimizer)
    for call in range(calls):
        x = torch.randn(6, 4)
        got, want = step(x), function(twin, other, x)
        assert equal(got, want), f"call {call}"
        assert equal(grads_of(model), grads_of(twin)), f"call {call}"
        assert equal(list(model.parameters()), list(twin.parameters())), f"call {call}"
        between(call, model, optimizer)
        between(call, twin, other)
    return step


def zero_first(set_to_none: bool) -> Function:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def zero_last(set_to_none: bool) -> Function:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        return loss.detach()

    return step


def never_zero(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    for part in x.chunk(3):
        loss_of(model, part).backward()
    optimizer.step()
    return x.sum()


def late_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.step()
    optimizer.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    return loss.detach()


class TestEveryWayToZero:
    """What eager leaves in `.grad` is what each replay leaves, with as few recordings as can be."""

    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("where", [zero_first, zero_last])
    def test_inside(self, where: Callable[[bool], Function], set_to_none: bool) -> None:
        """`zero_grad` in the step, first or last, either way: one recording serves all calls."""
        assert len(assert_like_eager(where(set_to_none)).variants) == 1

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_outside(self, set_to_none: bool) -> None:
        """`zero_grad` between the calls: one recording serves all calls."""
        step = assert_like_eager(
            never_zero, between=lambda n, model, optimizer: optimizer.zero_grad(set_to_none=set_to_none)
        )
        assert len(step.variants) == 1

    def test_never(self) -> None:
        """Gradients that are never zeroed grow as in eager, in the memory that eager gave them."""
        assert len(assert_like_eager(never_zero).variants) == 1

    def test_now_and_then(self) -> None:
        """Zeroed outside at every third call: a recording that starts from nothing and one that adds."""

        def between(call: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            if call % 3 == 2:
                optimizer.zero_grad()

        assert len(assert_like_eager(never_zero, 14, between).variants) == 3

    def test_several_backwards(self) -> None:
        """Micro-batches that add up inside one step are one recording."""
        assert len(assert_like_eager(accumulate).variants) == 1

    def test_the_gradient_of_the_last_call(self) -> None:
        """A step that first uses the gradient of the call before, then makes the next one, is recorded once."""
        assert len(assert_like_eager(late_step).variants) == 1


class TestWhatTheUserDoes:
    """Between calls `.grad` is the user's."""

    def test_other_memory_that_the_step_ignores(self) -> None:
        """A gradient that is thrown away anyway may be any tensor."""

        def between(call: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            for p in model.parameters():
                p.grad = torch.full_like(p, 7.0)

        assert len(assert_like_eager(zero_first(True), between=between).variants) == 1

    def test_other_memory_that_the_step_adds_to(self) -> None:
        """A replaced gradient is added to as in eager, which takes another recording; the graph's memory is safe."""
        held: list[Tensor] = []

        def between(call: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            if call == 4:
                for p in model.parameters():
                    assert p.grad is not None
                    held.append(p.grad)
                    p.grad = torch.full_like(p, 0.5)

        step = assert_like_eager(never_zero, between=between)

        assert len(step.variants) == 2
        miss = step.variants[0].plan.miss()
        assert miss is not None
        assert miss.name == "0.weight.grad"
        assert miss.moved
        assert equal(held[: len(held) // 2], held[len(held) // 2 :])

    def test_another_object_over_the_same_memory(self) -> None:
        """Only memory counts: a new tensor over it is the same gradient."""

        def between(call: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            for p in model.parameters():
                assert p.grad is not None
                p.grad = p.grad.detach()

        assert len(assert_like_eager(never_zero, between=between).variants) == 1

    def test_deleted(self) -> None:
        """A gradient set to None is missing at the next call, and named."""

        def between(call: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            if call == 4:
                model.get_parameter("2.bias").grad = None

        step = assert_like_eager(never_zero, between=between)

        assert len(step.variants) == 3  # with every gradient there, without this one, with the graph's own

    def test_miss_names_what_is_missing(self) -> None:
        """The name of the parameter, what there was and what there is; not moved."""
        step = assert_like_eager(never_zero, calls=4)
        step.model.get_parameter("2.bias").grad = None

        miss = step.variants[0].plan.miss()

        assert miss is not None
        assert (miss.name, miss.now, miss.moved) == ("2.bias.grad", None, False)


class TestMissingGradients:
    """None stays None."""

    def test_unused_parameters(self) -> None:
        """A parameter that gets no gradient has none after a replay."""

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model.get_submodule("0")(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        made = assert_like_eager(step)

        assert made.model.get_parameter("2.weight").grad is None

    def test_a_gradient_that_comes_later(self) -> None:
        """A parameter without gradient at the capture, which gets one from elsewhere: stepped from then on."""

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
            loss = model.get_submodule("0")(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def between(call: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            if call == 3:
                loss_of(model, torch.ones(2, 4)).backward()
                optimizer.step()  # builds what the optimizer keeps

        made = assert_like_eager(step, between=between)

        assert len(made.variants) == 2

    def test_frozen_parameters_are_followed(self) -> None:
        """A parameter that needs no gradient may have one, which a step uses and `zero_grad` drops."""
        model = net()
        model.get_parameter("0.weight").requires_grad_(False)

        grads = Grads([*model.named_parameters(), ("data", torch.ones(3))])

        assert grads.knows(model.get_parameter("0.weight"))
        assert grads.knows(model.get_parameter("0.bias"))


class TestNothingToDo:
    def test_a_forward_does_not_matter(self) -> None:
        """A run that neither uses nor changes gradients has a plan that says so."""
        model = net()
        loss_of(model, torch.randn(2, 4)).backward()
        grads = Grads(model.named_parameters())
        watch = Watch(CPU)
        with watching(watch, tape.listen), torch.no_grad():
            model(torch.randn(2, 4))

        assert not grads.plan(watch.touched, watch.given).matters

    def test_unknown_work_takes_every_gradient_as_used(self) -> None:
        """Where the device work was not seen, the memory of every gradient counts."""
        model = net()
        loss_of(model, torch.randn(2, 4)).backward()
        grads = Grads(model.named_parameters())
        plan = grads.plan(unheard(grads))
        model.get_parameter("0.weight").grad = torch.zeros(5, 4)

        assert not plan.holds()

    def test_made_lists_the_gradients_of_the_graph(self) -> None:
        """What must outlive the recording's pool is known."""
        step = assert_like_eager(zero_first(True), calls=4)

        assert equal(step.variants[0].plan.made, grads_of(step.model))


def create_graph(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, x).backward(create_graph=True)


def from_argument(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model.get_parameter("0.weight").grad = x[:5]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
class TestRefused:
    """What a replay could not leave in `.grad` is refused by name, and `.grad` is put back."""

    @pytest.mark.parametrize(
        ("function", "words"),
        [
            (create_graph, r"`0\.weight\.grad` needs a gradient itself.*create_graph"),
            (from_argument, r"`0\.weight\.grad` is set to an argument"),
        ],
    )
    def test_refused(self, function: Function, words: str) -> None:
        """The message names the gradient, and what was there before is there again."""
        model = net()
        step = Step(function, model, sgd(model))
        step.cold = 0
        before = torch.zeros(5, 4)
        model.get_parameter("0.weight").grad = before

        with pytest.raises(CaptureError, match=f"(?s){words}"):
            step(torch.randn(6, 4))

        assert model.get_parameter("0.weight").grad is before

    def test_sparse(self) -> None:
        """A sparse gradient is refused."""
        table = nn.Embedding(5, 3, sparse=True)
        grads = Grads(table.named_parameters())
        touched = unheard(grads)
        table(torch.tensor([1, 2])).sum().backward()

        with pytest.raises(CaptureError, match=r"`weight\.grad` is a sparse tensor"):
            grads.plan(touched)

    def test_a_gradient_of_an_argument(self) -> None:
        """An argument that a backward inside reaches is refused with what to write."""
        x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        (x * 2).sum().backward()

        assert "`batch.x` gets a gradient" in str(refused_arguments([("y", y), ("batch.x", x)]))
        assert refused_arguments([("y", y)]) is None
