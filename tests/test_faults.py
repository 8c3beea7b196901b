"""Every place of the backend fails once with every kind of error: the laws hold, and the next calls are right."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import counts, equal
from conftest import _global_state
from faulty import AFTER, ERRORS, PLACES, Faulty, FaultyEager, FaultyTape
from torch import Tensor, nn

from graphify import GraphPool, graphify

CALLS = 5
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"


class Program:
    """Something to call, plain or graphed, and all that a call may change."""

    sizes: tuple[int, ...] = (3,) * CALLS

    def __init__(self, wrap: Callable[..., Any]) -> None:
        torch.manual_seed(1)
        self.build()
        self.graphed = wrap(self.step, **self.options())

    def build(self) -> None:
        self.weight = torch.randn(4, 4)

    def options(self) -> dict[str, Any]:
        return {}

    def step(self, x: Tensor) -> Any:
        return (x @ self.weight).relu()

    def call(self, x: Tensor) -> Any:
        with torch.no_grad():
            return self.graphed(x)

    def state(self) -> list[Any]:
        return [self.weight.clone()]

    def adopt(self, other: Program) -> None:
        """Go on from where the other one was left."""
        kept = {name: value for name, value in vars(other).items() if name != "graphed"}
        vars(self).update(copy.deepcopy(kept))


class Mutation(Program):
    def build(self) -> None:
        self.norm = nn.BatchNorm1d(4)
        self.total = torch.zeros(4)

    def step(self, x: Tensor) -> Any:
        self.total += x.sum(0)
        y = self.norm(x) + torch.rand_like(x)
        x.mul_(2)
        self.latest = y.sum()
        return y, x

    def state(self) -> list[Any]:
        latest = getattr(self, "latest", None)
        return [self.total.clone(), self.norm.state_dict(), None if latest is None else latest.clone()]


class Static(Program):
    def options(self) -> dict[str, Any]:
        return {"outputs": "static"}

    def call(self, x: Tensor) -> Any:
        return super().call(x).clone()


class Buckets(Program):
    sizes = (3, 2, 4, 3, 7)

    def options(self) -> dict[str, Any]:
        return {"buckets": [4, 8]}

    def step(self, x: Tensor) -> Any:
        return (x * 2).relu()


class Training(Program):
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def step(self, x: Tensor) -> Any:
        return self.net(x).square().mean()

    def call(self, x: Tensor) -> Any:
        loss = self.graphed(x)
        loss.backward()
        return loss.detach()

    def adopt(self, other: Program) -> None:
        super().adopt(other)
        for mine, theirs in zip(self.net.parameters(), other.net.parameters(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.clone()

    def state(self) -> list[Any]:
        return [None if p.grad is None else p.grad.clone() for p in self.net.parameters()]


class WholeStep(Program):
    def build(self) -> None:
        self.net = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def step(self, x: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def call(self, x: Tensor) -> Any:
        return self.graphed(x)

    def state(self) -> list[Any]:
        ps = list(self.net.parameters())
        momenta = [self.optimizer.state[p].get("momentum_buffer") for p in ps if p in self.optimizer.state]
        grads = [p.grad for p in ps]
        return [t if t is None else t.detach().clone() for t in (*ps, *grads, *momenta)]


PROGRAMS = [Program, Mutation, Static, Buckets, Training, WholeStep]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type[Faulty]], Faulty]]:
    """A new backend for the next wrappers."""

    def make(kind: type[Faulty]) -> Faulty:
        backend = kind()
        monkeypatch.setattr("graphify._call_path.backend_for", lambda name: backend)
        return backend

    return make


def data(kind: type[Program]) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(n, 4) for n in kind.sizes]


def visits(kind: type[Program], backend: Faulty) -> dict[str, int]:
    program = Program.__new__(kind)
    program.__init__(lambda f, **options: graphify(f, backend="tape", **options))  # type: ignore[misc]
    for x in data(kind):
        program.call(x.clone())
    return dict(backend.visits)


def seen(program: Program) -> list[Any]:
    return [program.state(), torch.get_rng_state()]


def attempt(program: Program, x: Tensor, error: type[BaseException]) -> tuple[Any, bool]:
    """The result of a call, or that it raised what was injected, as it was."""
    try:
        return program.call(x), True
    except error as raised:
        caught = raised
    assert type(caught) is error
    assert str(caught) in ("injected", "")
    return None, False


def play(kind: type[Program], backend: Faulty, place: str, visit: int, name: str) -> None:
    """One fault in a sequence of calls beside eager: the call has happened or it has not, and all others are right."""
    error, act = ERRORS[name]
    mine, eager = kind(lambda f, **options: graphify(f, backend="tape", **options)), kind(lambda f, **_: f)
    torch.manual_seed(3)
    streams = torch.get_rng_state()
    backend.arm(place, visit, act)
    before, failed = _global_state(), 0
    for number, x in enumerate(data(kind)):
        torch.set_rng_state(streams)
        given, was = x.clone(), seen(mine)
        result, finished = attempt(mine, given, error)
        after = torch.get_rng_state()
        failed += not finished
        assert failed <= 1, number
        assert _global_state() == before
        if finished:
            torch.set_rng_state(streams)
            theirs = x.clone()
            equal(eager.call(theirs), result)
            equal(theirs, given)
            equal(torch.get_rng_state(), after)
            equal(eager.state(), mine.state())
        elif place in AFTER or (isinstance(backend, FaultyEager) and place in ("middle", "run")):
            eager.adopt(mine)
        else:
            equal(was, seen(mine))
            equal(x, given)
        streams = torch.get_rng_state()
    total = counts(mine.graphed)
    assert sum(total) == CALLS if kind is not Training else sum(total) <= CALLS
    assert total[4] == (failed if kind is not Training else total[4])
    assert backend.fired == 1, (place, visit)


def other(backend: Faulty) -> Any:
    """A graph of somebody else's on the same backend."""
    graphed = graphify(lambda x: x.cos() + 1, backend="tape")
    for _ in range(3):
        graphed(torch.ones(3))
    return graphed


def cases() -> list[Any]:
    """All of them in a deep run, else those that found something once."""
    every = [(kind, base, name) for kind in PROGRAMS for base in (FaultyTape, FaultyEager) for name in ERRORS]
    short = [c for c in every if c[0] in (Mutation, Training, WholeStep) and c[1:] != (FaultyEager, "thread")]
    chosen = every if DEEP else [c for c in every if c[1:] == (FaultyTape, "error") or c in short]
    return [pytest.param(*c, id="-".join(getattr(part, "__name__", part) for part in c)) for c in chosen]


@pytest.mark.parametrize(("kind", "base", "name"), cases())
def test_every_place_fails_once(kind, base, name, faulty):
    """The error surfaces as it is, state and modes are as before or as after the call, every later call is eager's."""
    tried, wrong = 0, []
    visits(kind, faulty(base))  # the first run in a process meets code that torch runs once
    for place, times in visits(kind, faulty(base)).items():
        if place not in PLACES or (place, name) == ("launched", "memory"):  # which a backend rules out
            continue
        few = {1, times} if (base, name) == (FaultyTape, "error") else {times}
        for visit in range(1, times + 1) if DEEP else sorted(few):
            backend = faulty(base)
            neighbour = other(backend)
            try:
                play(kind, backend, place, visit, name)
                x = torch.randn(3)
                equal(x.cos() + 1, neighbour(x))
            except Exception as error:
                wrong.append(f"{place} {visit} of {times}: {error!r}")
            tried += 1
    assert not wrong, "\n".join(wrong)
    assert tried >= 9


# -- out of memory


def fail(backend: Faulty, place: str, visit: int = 1, times: int = 1) -> None:
    """Run out of memory at this visit of a place, and at the next ones."""
    _, act = ERRORS["memory"]

    def again() -> None:
        if backend.fired < times:
            backend.arm(place, 1, again)
        act()

    backend.arm(place, visit, again)


@pytest.mark.parametrize("place", ["record", "middle", "run", "recorded", "replayer", "launch"])
def test_out_of_memory_once_is_no_error(place, faulty):
    """The pool goes with all graphs of all its wrappers, what the device kept is reclaimed, and the call is right."""
    backend, pool = faulty(FaultyTape), GraphPool()
    state = torch.zeros(3)
    one = graphify(lambda x: state.add_(x) * 2, backend="tape", pool=pool)
    two = graphify(lambda x: x + 1, backend="tape", pool=pool)
    for n in range(1, 4):
        two(torch.ones(n))
        two(torch.ones(n))
    one(torch.ones(3))
    fail(backend, place)
    equal(torch.full((3,), 4.0), one(torch.ones(3)))
    assert backend.fired == backend.visits["reclaim"] == 1
    assert counts(one) == (1, 1, 0, 0, 0)
    assert len(two.graphs) == 0
    assert two.stats().evictions == 3
    for n in range(1, 4):
        equal(torch.full((n,), 2.0), two(torch.ones(n)))
    assert counts(two) == (3, 6, 0, 0, 0)
    equal(torch.full((3,), 6.0), one(torch.ones(3)))


@pytest.mark.parametrize("place", ["record", "middle", "launch"])
def test_out_of_memory_twice_surfaces(place, faulty):
    """The second time it is the caller's error, nothing has happened, and later calls are captured again."""
    backend = faulty(FaultyTape)
    state = torch.zeros(3)
    graphed = graphify(lambda x: state.add_(x) * 2, backend="tape")
    graphed(torch.ones(3))
    fail(backend, place, times=2)
    with pytest.raises(torch.OutOfMemoryError, match="^injected$"):
        graphed(torch.ones(3))
    equal(torch.ones(3), state)
    assert backend.fired == 2
    assert counts(graphed) == (1, 0, 0, 0, 1)
    for n in range(2, 6):
        equal(torch.full((3,), 2.0 * n), graphed(torch.ones(3)))
    assert counts(graphed)[2:] == (counts(graphed)[2], 0, 1)


def test_no_memory_for_the_results_of_a_replay(faulty):
    """A replay that cannot hand out its results has not begun: the call is made once, in a new pool."""
    backend = faulty(FaultyTape)
    state = torch.zeros(3)
    graphed = graphify(lambda x: state.add_(x) * 2, backend="tape")
    for n in range(1, 6):
        if n == 4:
            fail(backend, "launch")
        equal(torch.full((3,), 2.0 * n), graphed(torch.ones(3)))
    assert backend.fired == 1
    assert counts(graphed) == (1, 2, 2, 0, 0)
    assert graphed.stats().recordings == 2


def test_no_memory_in_a_backward(faulty):
    """A backward that finds no memory, when it is recorded or replayed, is tried once more and adds once."""
    for visit in (2, 4, 6):
        backend = faulty(FaultyTape)
        net, plain = nn.Linear(3, 2), nn.Linear(3, 2)
        plain.load_state_dict(net.state_dict())
        graphed = graphify(net, backend="tape")
        backend.visits.clear()
        fail(backend, "launch", visit)
        for _ in range(5):
            x = torch.randn(4, 3)
            graphed(x).square().sum().backward()
            plain(x).square().sum().backward()
            equal(plain.weight.grad, net.weight.grad)
        assert backend.fired == 1
        backend = faulty(FaultyTape)


def test_reclaiming_fails_too(faulty):
    """An error while memory is given back surfaces, and the wrapper works on."""
    backend = faulty(FaultyTape)
    graphed = graphify(lambda x: x * 2, backend="tape")
    graphed(torch.ones(3))
    fail(backend, "record")
    backend.arm("reclaim", 1, ERRORS["error"][1])
    with pytest.raises(ERRORS["error"][0]):
        graphed(torch.ones(3))
    for _ in range(3):
        equal(torch.full((3,), 2.0), graphed(torch.ones(3)))
    assert counts(graphed)[4] == 1
