"""Optimizers inside a step: found, surveyed, refused by name, their changing numbers lifted to tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import needs_cuda
from torch import Tensor, nn
from whole_steps import CPU, Function, Step, loss_of, net, tape

from graphify._code import Executed
from graphify._guards import Guard
from graphify._lifted import Lifted, can_lift, numbers_of, unliftable
from graphify._optimizers import refusal_of, refused_change, refused_code, steps
from graphify._places import Place
from graphify._survey import Survey
from graphify._watch import Watch, watching
from graphify.backends.eager import EagerBackend
from graphify.errors import CaptureError

GPU = torch.device("cuda", 0)
optimizer_module, adam_module = (import_module(f"torch.optim.{name}") for name in ("optimizer", "adam"))
Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.1, "fused": True, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    return loss.detach()


def ready(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has taken its first step."""
    model = net()
    optimizer = make(model)
    train(model, optimizer, torch.randn(6, 4))
    return model, optimizer


def survey_of(function: Callable[..., Any]) -> Survey:
    return Survey([("step", function)], Executed(everything=True))


def watched(run: Callable[[], Any]) -> Watch:
    """Run below a backend, as a wrapper does: code that nobody of ours called is not followed."""
    watch = Watch(CPU)

    def inside() -> None:
        with watching(watch, tape.listen):
            run()

    EagerBackend().record(inside, None, ())
    return watch


def stepper(model: nn.Module, optimizer: Any) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        loss_of(model, torch.ones(2, 4)).backward()
        optimizer.step()

    return step


class TestFinding:
    """Which optimizers stepped in a run."""

    def test_each_once_in_order(self) -> None:
        """Every optimizer that stepped is found once, those outside of the body are not."""
        (_, first), (_, second), (_, third) = (ready(sgd) for _ in range(3))
        first.step()
        with steps() as found:
            second.step()
            first.step()
            second.step()
        third.step()

        assert len(found) == 2
        assert found[0] is second
        assert found[1] is first

    def test_other_threads_do_not_count(self) -> None:
        """A step on another thread at the same time is somebody else's."""
        _, mine = ready(sgd)
        _, theirs = ready(sgd)
        with steps() as found:
            other = threading.Thread(target=theirs.step)
            other.start()
            other.join()
            mine.step()

        assert len(found) == 1
        assert found[0] is mine

    def test_a_subclass_and_a_scheduled_one(self) -> None:
        """A user's own class is found, and so is a step that a schedule has wrapped."""

        class Mine(torch.optim.SGD):
            pass

        model = net()
        mine = Mine(model.parameters(), lr=0.1)
        _, scheduled = ready(sgd)
        torch.optim.lr_scheduler.StepLR(scheduled, 1)
        with steps() as found:
            mine.step()
            scheduled.step()

        assert [type(o) for o in found] == [Mine, torch.optim.SGD]

    def test_nothing_stays_after_an_error(self) -> None:
        """A step that raises leaves no hook and no mode."""
        _, optimizer = ready(lambda model: sgd(model, lr=torch.tensor(0.1)))
        hooks = optimizer_module._global_optimizer_pre_hooks
        before = len(hooks)

        def fail(*_: Any) -> None:
            raise ValueError("mine")

        optimizer.register_step_pre_hook(fail)
        with pytest.raises(ValueError, match="mine"), steps():
            optimizer.step()

        assert len(hooks) == before
        assert torch._C._len_torch_function_stack() == 0


class TestSurvey:
    """What a step reads of its optimizer is guarded and named."""

    def test_names(self) -> None:
        """Options, state and parameters have the names that a user would write."""
        model, optimizer = ready(adamw)
        survey = survey_of(stepper(model, optimizer))

        names = {place.name for place, _ in survey.places.values()}
        tensors = {place.name for place, _ in survey.tensors()}
        assert {"optimizer.param_groups[0]['lr']", "optimizer.param_groups[0]['betas']"} <= names
        assert "optimizer.state" in names
        assert {"optimizer.state[0]['exp_avg']", "optimizer.state[3]['step']"} <= tensors
        assert "optimizer.param_groups[0]['params'][1]" in tensors
        assert [name for name, _ in survey.optimizers] == ["optimizer"]

    @pytest.mark.parametrize("how", ["closure", "attribute", "method", "default", "scheduler's wrapper"])
    def test_met_from_everywhere(self, how: str) -> None:
        """An optimizer is met wherever a function can hold it."""
        model, optimizer = ready(sgd)
        if how == "scheduler's wrapper":
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        trainer = SimpleNamespace(optimizer=optimizer)
        root: Any = {
            "closure": stepper(model, optimizer),
            "attribute": stepper(model, trainer),
            "method": optimizer.step,
            "default": lambda o=optimizer: o.step(),
            "scheduler's wrapper": stepper(model, optimizer),
        }[how]
        if how == "attribute":
            root = lambda: trainer.optimizer.step()

        assert [o for _, o in survey_of(root).optimizers] == [optimizer]

    CHANGES: dict[str, Callable[[Any], Any]] = {
        "param_groups[0]['lr']": lambda o: o.param_groups[0].update(lr=0.2),
        "param_groups[0]['momentum']": lambda o: o.param_groups[0].update(momentum=0.8),
        "param_groups[0]['nesterov']": lambda o: o.param_groups[0].update(nesterov=True),
        "param_groups": lambda o: o.load_state_dict(o.state_dict()),
        "len(optimizer.param_groups)": lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "param_groups[0]['params']": lambda o: o.param_groups[0]["params"].pop(),
        "state": lambda o: o.state.clear(),
        "the hooks of optimizer": lambda o: o.register_step_pre_hook(lambda *_: None),
    }

    @pytest.mark.parametrize("name", CHANGES)
    def test_guarded(self, name: str) -> None:
        """A change of anything that the step reads is noticed, and named."""
        model, optimizer = ready(sgd)
        guard = Guard(survey_of(stepper(model, optimizer)), outside=(), written=set(), device=CPU)
        assert guard.holds()

        self.CHANGES[name](optimizer)

        assert not guard.holds()
        miss = guard.miss()
        assert miss is not None
        assert name in miss.name

    def test_moved_state_is_guarded(self) -> None:
        """State tensors that somebody replaces in place, as when moving them to a device, are noticed."""
        model, optimizer = ready(sgd)
        guard = Guard(survey_of(stepper(model, optimizer)), outside=(), written=set(), device=CPU)
        for held in optimizer.state.values():
            held["momentum_buffer"] = held["momentum_buffer"].clone()

        assert not guard.holds()

    def test_a_step_changes_nothing(self) -> None:
        """A second step changes memory only: no place of the survey differs."""
        model, optimizer = ready(adamw)
        step = stepper(model, optimizer)
        before = survey_of(step)
        step()

        assert before.changes(survey_of(step)) == []

    @pytest.mark.parametrize("make", [sgd, adamw])
    def test_the_first_step_builds_state(self, make: Make) -> None:
        """The first step is a change with words of its own, and can be taken back."""
        model = net()
        optimizer = make(model)
        step = stepper(model, optimizer)
        before = survey_of(step)
        step()
        changes = before.changes(survey_of(step))

        errors = [refused_change(change, before.optimizers) for change in changes]
        assert "`optimizer` builds its state in this step" in str(errors)
        before.restore()
        assert dict(optimizer.state) == {}

    def test_state_of_another_kind(self) -> None:
        """Entries beside those of parameters are compared and put back as well."""
        model, optimizer = ready(sgd)
        optimizer.state["calls"] = 3
        guard = Guard(survey_of(stepper(model, optimizer)), outside=(), written=set(), device=CPU)
        before = survey_of(stepper(model, optimizer))
        assert guard.holds()
        optimizer.state["calls"] = 4
        assert not guard.holds()

        before.restore()

        assert optimizer.state["calls"] == 3
        assert len(optimizer.state) == 5

    def test_restore(self) -> None:
        """What a failed run left in an optimizer is taken back: state, options, lists of parameters."""
        model, optimizer = ready(sgd)
        kept = {p: dict(held) for p, held in optimizer.state.items()}
        before = survey_of(stepper(model, optimizer))
        group = optimizer.param_groups[0]
        last = group["params"].pop()
        for held in optimizer.state.values():
            held["momentum_buffer"] = torch.zeros(1)
        optimizer.state.pop(last)
        group["lr"] = 5.0
        before.restore()

        assert group["lr"] == 0.1
        assert len(group["params"]) == 4
        assert list(optimizer.state) == list(kept)
        assert all(optimizer.state[p]["momentum_buffer"] is kept[p]["momentum_buffer"] for p in kept)

    def test_a_user_class_with_attributes(self) -> None:
        """What a user's own optimizer keeps beside torch's is surveyed like any object's attributes."""

        class Mine(torch.optim.SGD):
            def __init__(self, params: Any) -> None:
                super().__init__(params, lr=0.1)
                self.scale = 2.0

        model = net()
        survey = survey_of(stepper(model, Mine(model.parameters())))

        assert "optimizer.scale" in {place.name for place, _ in survey.places.values()}

    def test_a_wrapper_of_an_optimizer(self) -> None:
        """A wrapper that shows another optimizer's groups as properties leads to that one."""

        class Wrapped(torch.optim.Optimizer):
            def __init__(self, inner: torch.optim.Optimizer) -> None:
                self.inner = inner

            @property
            def param_groups(self) -> Any:  # type: ignore[override]
                return self.inner.param_groups

        model, optimizer = ready(sgd)

        assert survey_of(stepper(model, Wrapped(optimizer))).optimizers == [("optimizer.inner", optimizer)]


class TestSchedules:
    """A schedule belongs outside: stepping it is Python."""

    def test_outside_a_step_is_no_change(self) -> None:
        """What a schedule hangs on an optimizer is no change that the step makes."""
        model, optimizer = ready(sgd)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step = stepper(model, optimizer)
        before = survey_of(step)
        step()

        assert before.changes(survey_of(step)) == []
        schedule.step()
        assert [c.place.name for c in before.changes(survey_of(step))] == ["optimizer.param_groups[0]['lr']"]

    @pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
    def test_inside_is_refused(self, lr: Any) -> None:
        """A schedule stepped inside is refused with the line to write, for tensors too."""
        _, optimizer = ready(lambda model: sgd(model, lr=lr))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

        def step() -> None:
            optimizer.step()
            schedule.step()

        assert refused_code(watched(optimizer.step).executed) is None
        assert "`scheduler.step()` after the call" in str(refused_code(watched(step).executed))

    def test_a_number_set_by_hand_is_refused_by_name(self) -> None:
        """An option that the step itself sets is named."""
        model, optimizer = ready(sgd)
        before = survey_of(stepper(model, optimizer))
        optimizer.param_groups[0]["lr"] = 0.3

        (change,) = before.changes(survey_of(stepper(model, optimizer)))
        error = refused_change(change, before.optimizers)
        assert "`optimizer.param_groups[0]['lr']` changes inside" in str(error)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters()),
    "SGD fused": lambda m: torch.optim.SGD(m.parameters(), fused=True),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters()),
    "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters()),
    "Adam fused": lambda m: torch.optim.Adam(m.parameters(), fused=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "Adagrad fused": lambda m: torch.optim.Adagrad(m.parameters(), fused=True),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters()),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters()),
    "RAdam foreach": lambda m: torch.optim.RAdam(m.parameters(), foreach=True),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters()),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters()),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters()),
    "SparseAdam": lambda m: torch.optim.SparseAdam(m.parameters()),
}


class TestRefusals:
    """What cannot be captured is refused with the class and the line to write."""

    @pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in ("LBFGS", "SparseAdam")])
    def test_the_table_is_what_a_watch_sees(self, name: str) -> None:
        """On the CPU exactly those are refused whose step reads on the host."""
        model, optimizer = ready(OPTIMIZERS[name])
        watch = Watch(CPU)
        with watching(watch, tape.listen):
            train(model, optimizer, torch.randn(6, 4))

        assert (refusal_of(optimizer, CPU) is not None) == bool(watch.offences)

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("AdamW", r"`AdamW` counts.*`torch\.optim\.AdamW\(\.\.\., fused=True\)`"),
            ("Adagrad", r"`Adagrad` counts.*`torch\.optim\.Adagrad\(\.\.\., fused=True\)`"),
            ("NAdam", r"`NAdam` counts.*such as|`NAdam` counts.*AdamW\(\.\.\., fused=True\)"),
            ("LBFGS", "`LBFGS` decides on the host"),
            ("SparseAdam", "`SparseAdam` decides on the host"),
        ],
    )
    def test_words_on_the_cpu(self, name: str, words: str) -> None:
        """The message names the class and what to write on a CPU, where nothing is capturable."""
        with pytest.raises(CaptureError, match=f"(?s){words}"):
            raise refusal_of(OPTIMIZERS[name](net()), CPU) or AssertionError("not refused")

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("AdamW", r"`torch\.optim\.AdamW\(\.\.\., capturable=True\)`"),
            ("AdamW fused", r"`torch\.optim\.AdamW\(\.\.\., fused=True, capturable=True\)`"),
            ("RMSprop", r"`torch\.optim\.RMSprop\(\.\.\., capturable=True\)`"),
            ("Adadelta", r"`torch\.optim\.Adadelta\(\.\.\., capturable=True\)`"),
            ("Adagrad", r"`torch\.optim\.Adagrad\(\.\.\., fused=True\)`"),
            ("Adafactor", r"`torch\.optim\.AdamW\(\.\.\., fused=True, capturable=True\)`"),
        ],
    )
    def test_words_on_a_device(self, name: str, words: str) -> None:
        """On a device torch asks for the flag, of a fused optimizer too."""
        with pytest.raises(CaptureError, match=f"(?s){words}"):
            raise refusal_of(OPTIMIZERS[name](net()), GPU) or AssertionError("not refused")

    def test_what_is_fine_on_a_device(self) -> None:
        """SGD, whatever its kernels, fused Adagrad, and whatever is capturable."""
        for name in ("SGD", "SGD fused", "Adagrad fused"):
            assert refusal_of(OPTIMIZERS[name](net()), GPU) is None
        capturable = torch.optim.AdamW(net().parameters(), capturable=True)
        assert refusal_of(capturable, GPU) is None
        capturable.add_param_group({"params": [nn.Parameter(torch.ones(1))], "capturable": False})
        assert refusal_of(capturable, GPU) is not None

    def test_a_step_of_the_users_own(self) -> None:
        """Nothing is known against a user's own step, while a class that inherits torch's is as torch's."""

        class Inherits(torch.optim.Adam):
            pass

        class Own(torch.optim.Adam):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                pass

        assert refusal_of(Own(net().parameters()), CPU) is None
        assert "`Inherits` counts" in str(refusal_of(Inherits(net().parameters()), CPU))


def scaled(scaler: torch.amp.GradScaler) -> Function:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


class TestScalers:
    """A GradScaler inside."""

    @pytest.mark.parametrize("make", [lambda m: sgd(m, fused=True), adamw], ids=["SGD", "AdamW"])
    def test_inside_with_a_fused_optimizer(self, make: Make) -> None:
        """Steps, skipped steps and the scale itself equal eager, from one recording."""
        model = net()
        twin = deepcopy(model)
        mine, theirs = (torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3) for _ in range(2))
        step = Step(scaled(mine), model, make(model))
        eager = scaled(theirs)
        other = make(twin)
        for call in range(10):
            x = torch.randn(6, 4)
            if call in (1, 5, 6):
                x[0, 0] = float("inf")
            got, want = step(x), eager(twin, other, x)
            assert torch.equal(got.nan_to_num(), want.nan_to_num())
            assert all(map(torch.equal, model.parameters(), twin.parameters()))
            assert mine.get_scale() == theirs.get_scale()
        assert len(step.variants) == 1

    def test_its_notes_are_no_change(self) -> None:
        """What a scaler notes of its optimizers is made anew by each step; its scale and options are guarded."""
        model, optimizer = ready(adamw)
        scaler = torch.amp.GradScaler("cpu")
        step = scaled(scaler)

        def run() -> None:
            step(model, optimizer, torch.ones(2, 4))

        run()
        before = survey_of(run)
        run()
        assert before.changes(survey_of(run)) == []
        names = {place.name for place, _ in before.places.values()}
        assert {"scaler._scale", "scaler._growth_tracker", "scaler._growth_factor"} <= names

    def test_with_an_optimizer_that_is_not_fused(self) -> None:
        """There the scaler asks on the host whether to step, which is refused with what to write."""
        model, optimizer = ready(sgd)
        step = scaled(torch.amp.GradScaler("cpu"))
        watch = watched(lambda: step(model, optimizer, torch.randn(6, 4)))

        assert watch.offences
        assert "a fused optimizer, which skips on the device" in str(refused_code(watch.executed))


LIFTS: dict[str, tuple[Make, str]] = {
    "SGD lr": (lambda m: sgd(m), "lr"),
    "SGD lr, foreach": (lambda m: sgd(m, foreach=True), "lr"),
    "SGD lr, fused": (lambda m: sgd(m, fused=True), "lr"),
    "SGD lr, double": (lambda m: sgd(m.double()), "lr"),
    "SGD lr, everything": (lambda m: sgd(m, weight_decay=0.1, nesterov=True), "lr"),
    "SGD lr, maximize": (lambda m: sgd(m, maximize=True, foreach=True), "lr"),
    "SGD momentum": (lambda m: sgd(m), "momentum"),
    "SGD momentum, foreach": (lambda m: sgd(m, foreach=True), "momentum"),
    "SGD weight_decay": (lambda m: sgd(m, weight_decay=0.1), "weight_decay"),
    "SGD weight_decay, foreach": (lambda m: sgd(m, weight_decay=0.1, foreach=True), "weight_decay"),
    "AdamW lr, fused": (adamw, "lr"),
    "Adam lr, fused": (lambda m: torch.optim.Adam(m.parameters(), lr=0.1, fused=True), "lr"),
    "Adagrad lr, fused": (lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, fused=True), "lr"),
    "Adadelta lr": (lambda m: torch.optim.Adadelta(m.parameters(), lr=0.1), "lr"),
}


def assert_lifted(make: Make, key: str, calls: int = 8) -> Step:
    """A number that takes a new value at each call equals eager bit for bit, from one recording."""
    model = net()
    twin = deepcopy(model)
    optimizer, other = make(model), make(twin)
    step = Step(train, model, optimizer, lift=[key])
    for call in range(calls):
        for group in (*optimizer.param_groups, *other.param_groups):
            group[key] = 0.3 / (call + 3)
        x = torch.randn(6, 4, dtype=next(model.parameters()).dtype)
        assert torch.equal(step(x), train(twin, other, x))
        assert all(map(torch.equal, model.parameters(), twin.parameters())), f"call {call}"
        assert type(optimizer.param_groups[0][key]) is float
    return step


class TestLifted:
    """Numbers that change are filled into tensors."""

    @pytest.mark.parametrize("case", LIFTS)
    def test_equal_to_eager(self, case: str) -> None:
        """Bit for bit, with one recording for all values; the options are floats again after each call."""
        make, key = LIFTS[case]
        step = assert_lifted(make, key)

        assert len(step.variants) == 1
        assert can_lift(step.variants[0].lifted.places[0], CPU)

    @pytest.mark.parametrize(
        ("key", "foreach"),
        [("lr", True), ("lr", False), ("weight_decay", True), ("weight_decay", False), ("betas", True)],
    )
    def test_capturable_adam(self, key: str, foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a device allows, here on the CPU: the arithmetic on tensors is equal to rounding."""
        monkeypatch.setattr(adam_module, "_get_capturable_supported_devices", lambda **_: ["cpu"])
        model = net()
        twin = deepcopy(model)
        optimizer, other = (
            torch.optim.AdamW(m.parameters(), lr=0.1, foreach=foreach, capturable=True) for m in (model, twin)
        )
        step = Step(train, model, optimizer, lift=[key])
        for call in range(8):
            value: Any = 0.1 / (call + 1)
            for group in (*optimizer.param_groups, *other.param_groups):
                group[key] = (0.9 - value / 10, 0.99 + value / 100) if key == "betas" else value
            x = torch.randn(6, 4)
            step(x)
            train(twin, other, x)
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        assert len(step.variants) == 1

    def test_one_cycle(self) -> None:
        """A schedule that moves learning rate and momentum together is one recording."""
        model = net()
        twin = deepcopy(model)
        optimizer, other = sgd(model), sgd(twin)
        schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.5, 12) for o in (optimizer, other)]
        step = Step(train, model, optimizer, lift=["lr", "momentum"])
        for _ in range(10):
            x = torch.randn(6, 4)
            assert torch.equal(step(x), train(twin, other, x))
            assert all(map(torch.equal, model.parameters(), twin.parameters()))
            for schedule in schedules:
                schedule.step()

        assert len(step.variants) == 1

    def test_groups_with_values_of_their_own(self) -> None:
        """Each group's number is its own tensor."""
        model = net()
        twin = deepcopy(model)

        def make(of: nn.Module) -> torch.optim.SGD:
            groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(of.parameters())]
            return torch.optim.SGD(groups, foreach=True)

        optimizer, other = make(model), make(twin)
        step = Step(train, model, optimizer, lift=["lr"])
        for call in range(8):
            for o in (optimizer, other):
                o.param_groups[call % 4]["lr"] *= 0.5
            x = torch.randn(6, 4)
            assert torch.equal(step(x), train(twin, other, x))
            assert all(map(torch.equal, model.parameters(), twin.parameters()))

    @pytest.mark.parametrize(
        ("make", "key"),
        [(adamw, "weight_decay"), (adamw, "betas"), (lambda m: sgd(m, fused=True), "momentum")],
        ids=["fused weight_decay", "fused betas", "fused momentum"],
    )
    def test_what_a_kernel_reads_on_the_host(self, make: Make, key: str) -> None:
        """A fused kernel takes the learning rate only: known before, and the capture fails on other numbers."""
        model, optimizer = ready(make)
        step = Step(train, model, optimizer, lift=[key])
        step.cold = 0
        (place,) = (p for p in numbers_of([("optimizer", optimizer)]) if p.key == key)
        value = place.read()

        assert not can_lift(place, CPU)
        with pytest.raises(CaptureError, match="on the host"):
            step(torch.randn(6, 4))
        assert place.read() is value
        assert f"`optimizer.param_groups[0]['{key}']` takes a new value" in str(unliftable(place))

    def test_a_branch_on_the_number(self) -> None:
        """A step that branches on a number, as on a weight decay of zero, is another recording there."""
        model, optimizer = ready(lambda m: sgd(m, weight_decay=0.1))
        step = Step(train, model, optimizer, lift=["weight_decay"])
        step.cold = 0
        group = optimizer.param_groups[0]
        for value in (0.1, 0.2, 0.0, 0.0, 0.3):
            group["weight_decay"] = value
            step(torch.randn(6, 4))

        assert len(step.variants) == 2

    def test_holds(self) -> None:
        """The same kind of value holds; an int, a tensor or a longer tuple in the place does not."""
        _, optimizer = ready(adamw)
        group = optimizer.param_groups[0]
        lifted = Lifted([p for p in numbers_of([("o", optimizer)]) if p.key in ("lr", "betas")], CPU)
        assert lifted.holds()
        group["lr"], group["betas"] = 0.7, (0.5, 0.6)
        assert lifted.holds()
        lifted.refill()
        for key, value in (("lr", 1), ("lr", torch.tensor(0.1)), ("betas", (0.1, 0.2, 0.3))):
            before, group[key] = group[key], value
            assert not lifted.holds()
            group[key] = before
        assert lifted.holds()

    def test_a_value_put_there_inside_stays(self) -> None:
        """What the run itself puts in the place of a lent tensor is a change like any other."""
        _, optimizer = ready(sgd)
        group = optimizer.param_groups[0]
        lifted = Lifted(numbers_of([("o", optimizer)]), CPU)
        with pytest.raises(ZeroDivisionError), lifted.lent():
            assert isinstance(group["momentum"], Tensor)
            group["lr"] = 5.0
            raise ZeroDivisionError

        assert (group["lr"], group["momentum"]) == (5.0, 0.9)

    def test_a_returned_number_is_refused(self) -> None:
        """Eager returns a float where the recorded run would return a tensor."""
        _, optimizer = ready(sgd)
        lifted = Lifted(numbers_of([("optimizer", optimizer)]), CPU)
        with lifted.lent():
            lr = optimizer.param_groups[0]["lr"]

        assert "`optimizer.param_groups[0]['lr']` is among the results" in str(lifted.refused_results([lr]))
        assert lifted.refused_results([torch.ones(1)]) is None

    def test_tensors_of_the_users_own(self) -> None:
        """A learning rate that is a tensor already is kept on the device by every form of SGD."""
        for foreach in (True, False):
            model = net()
            twin = deepcopy(model)
            optimizer = sgd(model, lr=torch.tensor(0.1), foreach=foreach)
            other = sgd(twin, lr=torch.tensor(0.1), foreach=foreach)
            step = Step(train, model, optimizer)
            for _ in range(6):
                for o in (optimizer, other):
                    o.param_groups[0]["lr"].mul_(0.5)
                x = torch.randn(6, 4)
                assert torch.equal(step(x), train(twin, other, x))
                assert all(map(torch.equal, model.parameters(), twin.parameters()))
            assert len(step.variants) == 1

    def test_numbers(self) -> None:
        """Floats and tuples of floats are numbers; flags, ints and None are not."""
        _, optimizer = ready(lambda m: adamw(m, weight_decay=0))

        keys = [place.key for place in numbers_of([("o", optimizer)])]

        assert keys == ["lr", "betas", "eps"]

    def test_reduced_precision(self) -> None:
        """A tensor would be rounded to the parameters' own precision, except in a fused kernel."""
        model = net().bfloat16()
        for fused, expected in ((False, False), (True, True)):
            place = Place(sgd(model, fused=fused).param_groups[0], "lr", "item", "lr")
            assert can_lift(place, GPU) is expected
        error = unliftable(Place(sgd(model).param_groups[0], "lr", "item", "o.param_groups[0]['lr']"))
        assert "`fused=True`, which takes the learning rate" in str(error)
        adam = torch.optim.AdamW(model.parameters(), fused=True)
        error = unliftable(Place(adam.param_groups[0], "betas", "item", "o.param_groups[0]['betas']"))
        assert "capturable" not in str(error)  # torch refuses it on a CPU


DEVICE_LIFTS: dict[str, tuple[Make, str, float]] = {
    "SGD lr": (sgd, "lr", 0.0),
    "SGD lr, foreach=False": (lambda m: sgd(m, foreach=False), "lr", 0.0),
    "SGD lr, everything": (lambda m: sgd(m, weight_decay=0.1, nesterov=True), "lr", 0.0),
    "SGD lr, double": (lambda m: sgd(m.double()), "lr", 1e-12),
    "SGD momentum": (sgd, "momentum", 0.0),
    "SGD weight_decay": (lambda m: sgd(m, weight_decay=0.1), "weight_decay", 0.0),
    "SGD lr, fused": (lambda m: sgd(m, fused=True), "lr", 1e-6),
    "AdamW lr, fused": (lambda m: adamw(m, capturable=True), "lr", 1e-5),
    "AdamW lr, foreach": (lambda m: adamw(m, fused=None, capturable=True), "lr", 1e-5),
    "AdamW betas, foreach": (lambda m: adamw(m, fused=None, capturable=True), "betas", 1e-4),
    "AdamW weight_decay, foreach": (lambda m: adamw(m, fused=None, capturable=True), "weight_decay", 1e-5),
}


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("case", DEVICE_LIFTS)
def test_lifted_on_a_device(case: str) -> None:
    """A captured step takes new numbers at each replay: bit for bit for SGD in single precision, else to rounding."""
    make, key, tolerance = DEVICE_LIFTS[case]
    model = net().cuda()
    twin = deepcopy(model)
    optimizer, other = make(model), make(twin)
    static = torch.randn(6, 4, device="cuda", dtype=next(model.parameters()).dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(model, optimizer, static)
    torch.cuda.current_stream().wait_stream(side)
    train(twin, other, static)
    lifted = Lifted([p for p in numbers_of([("o", optimizer)]) if p.key == key], static.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), steps(lifted), lifted.lent():
        train(model, optimizer, static)
    for call in range(20):
        value = 0.3 / (call + 3)
        for group in (*optimizer.param_groups, *other.param_groups):
            group[key] = (0.9 - value, 0.99 - value / 10) if key == "betas" else value
        static.copy_(torch.randn(6, 4))
        lifted.refill()
        graph.replay()
        train(twin, other, static)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance / 10)
