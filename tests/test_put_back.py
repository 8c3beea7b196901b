"""What a run did to containers, modules and the environment is put back: in order, in full, and once."""

from __future__ import annotations

import copy
import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import equal
from torch import Tensor, nn

from graphify import CaptureError, check, graphify


class Strict(OrderedDict[str, float]):
    """A dict whose own methods refuse to take anything away, as those of some model outputs do."""

    def __delitem__(self, key: str) -> None:
        raise TypeError("nothing is taken away")

    def drop(self, key: str) -> float:
        value = self[key]
        OrderedDict.__delitem__(self, key)
        return value


def tensors() -> list[Any]:
    return [torch.full((2,), 2.0), torch.full((2,), 3.0), nn.Linear(2, 2), object()]


Act = Callable[[Any, Tensor], Tensor]


def lists() -> dict[str, tuple[Any, Act]]:
    def shorten(held: Any, x: Tensor) -> Tensor:
        held[0:2] = [7]
        return x * held[0]

    def drop(held: Any, x: Tensor) -> Tensor:
        first = held[0]
        del held[0]
        return x * first

    return {
        "pop": ([*range(9)], lambda held, x: x * held.pop()),
        "pop of the first": ([*range(9)], lambda held, x: x * held.pop(0)),
        "pop of many": ([*range(99)], lambda held, x: x * held.pop(0)),
        "del": ([*range(9)], drop),
        "slice": ([*range(9)], shorten),
        "append beyond what is compared one by one": (
            [*range(64)],
            lambda held, x: x if held.append(1) else x + 1,
        ),
        "deque": (deque(range(9), maxlen=9), lambda held, x: x * held.popleft()),
        "long deque": (deque(range(99)), lambda held, x: x * held.popleft()),
        "nested": ([[1, 2, 3, 4, 5], [6]], lambda held, x: x * held[0].pop()),
        "objects": (tensors(), lambda held, x: x if held.pop() is None else x + 1),
    }


def dicts() -> dict[str, tuple[Any, Act]]:
    def first(held: Any) -> Any:
        return next(iter(held))

    def renew(held: Any, x: Tensor) -> Tensor:
        held[first(held)] = held.pop(first(held))
        return x

    def turn(held: Any, x: Tensor) -> Tensor:
        held.move_to_end(first(held))
        return x

    def clear(held: Any, x: Tensor) -> Tensor:
        total = sum(held.values())
        held.clear()
        held["total"] = total + 1
        return x * total

    letters = dict.fromkeys("abcdef", 2.0)
    return {
        "pop of a key": (letters.copy(), lambda held, x: x * held.pop(first(held))),
        "popitem": (letters.copy(), lambda held, x: x * held.popitem()[1]),
        "clear": (letters.copy(), clear),
        "order": (letters.copy(), renew),
        "order of an OrderedDict": (OrderedDict(letters), turn),
        "order of many": (OrderedDict.fromkeys(range(99), 1.0), turn),
        "a dict with methods of its own": (Strict(letters), lambda held, x: x * held.drop(first(held))),
        "counter": (Counter("aab"), lambda held, x: (held.update("b"), x)[1]),
        "default": (defaultdict(list), lambda held, x: (held["a"].append(1), x)[1]),
        "set": ({1, 2, 3}, lambda held, x: (held.remove(min(held)), x)[1]),
        "large set": ({*range(99)}, lambda held, x: (held.add(len(held)), x)[1]),
    }


CONTAINERS = lists() | dicts()


@pytest.fixture(params=CONTAINERS)
def held(request: pytest.FixtureRequest) -> tuple[Any, Act]:
    value, act = CONTAINERS[request.param]
    return copy.deepcopy(value), act


def order(held: Any) -> list[Any]:
    """What is in a container, by identity and in its order."""
    if isinstance(held, dict):
        return [(key, order(value)) for key, value in held.items()]
    return [order(each) for each in held] if isinstance(held, list | deque | set) else [id(held)]


@pytest.mark.parametrize("ahead", ["check", "capture", "capture_buckets", "estimate"])
def test_what_is_made_ahead_leaves_containers_as_they_were(held: tuple[Any, Act], ahead: str) -> None:
    """A run without trace leaves the same objects in a container, in the same order."""
    value, act = held
    before = order(value)

    def shifted(x: Tensor) -> Tensor:
        return act(value, x)

    with torch.no_grad():
        if ahead == "check":
            check(shifted, torch.ones(2))
        else:
            with pytest.raises(CaptureError, match="changes `value"):
                options: dict[str, Any] = {} if ahead == "capture" else {"buckets": [2, 4]}
                getattr(graphify(shifted, backend="tape", **options), ahead)(torch.ones(2))

    assert order(value) == before


def test_a_refused_run_is_as_if_it_never_was(held: tuple[Any, Act]) -> None:
    """A capture that is refused leaves what the warm-up left."""
    value, act = held
    twin = copy.deepcopy(value)

    graphed = graphify(lambda x: act(value, x), backend="tape")
    with torch.no_grad():
        equal(graphed(torch.ones(2)), act(twin, torch.ones(2)))
        before = order(value)
        with pytest.raises(CaptureError, match="changes `value"):
            graphed(torch.ones(2))

    assert order(value) == before


@pytest.mark.filterwarnings("ignore")
def test_a_call_that_falls_back_happens_once(held: tuple[Any, Act]) -> None:
    """With `fallback="eager"` each call changes a container once, and gives what eager gives."""
    value, act = held
    twin = copy.deepcopy(value)

    graphed = graphify(lambda x: act(value, x), backend="tape", fallback="eager")
    with torch.no_grad():
        for number in range(3):
            x = torch.full((2,), number + 1.0)
            equal(graphed(x), act(twin, x.clone()))

    assert len(order(value)) == len(order(twin))
    if not any(isinstance(each, Tensor) for each in value):
        assert repr(value) == repr(twin)


def test_verified_replays_leave_containers_alone() -> None:
    """The eager run beside a replay puts back what it pops."""
    table, spare = [1.0, 2.0, 3.0], [4.0, 5.0]

    def with_spare(x: Tensor) -> Tensor:
        if spare:
            spare.append(spare.pop(0))
            spare.insert(0, spare.pop())
        return x * table[0]

    graphed = graphify(with_spare, backend="tape", verify=2)
    with torch.no_grad():
        for number in range(5):
            equal(graphed(torch.full((2,), float(number))), torch.full((2,), float(number)))

    assert (table, spare) == ([1.0, 2.0, 3.0], [4.0, 5.0])


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
@pytest.mark.parametrize("fallback", ["raise", "eager"])
@pytest.mark.filterwarnings("ignore")
def test_submodules_that_a_run_takes_out(kind: Any, fallback: Any) -> None:
    """A module that loses a layer inside loses one for each call that stands, and none for a refused one."""

    class Shrinking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(2, 2), nn.ReLU(), nn.Tanh(), nn.Identity()]
            self.layers = kind(layers) if kind is nn.ModuleList else kind(*layers)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers.pop(0)(x)

    net = Shrinking()
    layers, twin = [*net.layers], copy.deepcopy(net)
    graphed = graphify(net, backend="tape", fallback=fallback)
    with torch.no_grad():
        check(net, torch.ones(2))
        assert [*net.layers] == layers
        equal(graphed(torch.ones(2)), twin(torch.ones(2)))
        if fallback == "raise":
            with pytest.raises(CaptureError, match=r"changes `self\.layers"):
                graphed(torch.ones(2))
        else:
            equal(graphed(-torch.ones(2)), twin(-torch.ones(2)))

    assert [*net.layers] == layers[1 if fallback == "raise" else 2 :]


class Lazy(nn.Module):
    """Makes something at its first call, in each way in which a module can."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "z"):
            if self.way == "buffer":
                self.register_buffer("z", torch.full((2,), 3.0))
            elif self.way == "passing":
                self.register_buffer("z", torch.full((2,), 3.0), persistent=False)
            elif self.way == "parameter":
                self.z = nn.Parameter(torch.full((2,), 3.0))
            elif self.way == "module":
                self.add_module("z", nn.Identity())
            else:
                self.z = torch.full((2,), 3.0)
            self.inner.register_forward_hook(lambda *_: None)
        return self.inner(x) * (2.0 if self.way == "module" else self.z)


@pytest.mark.parametrize("way", ["buffer", "passing", "parameter", "module", "attribute"])
@pytest.mark.parametrize("ahead", ["check", "capture", "capture_buckets"])
def test_state_that_the_first_run_makes_is_taken_back(way: str, ahead: str) -> None:
    """What a module makes in a run without trace is gone after it; a call makes it for good, and is captured."""
    net, twin = Lazy(way), Lazy(way)
    state, fields = [*net.state_dict()], {name: copy.copy(value) for name, value in vars(net).items()}
    with torch.no_grad():
        if ahead == "check":
            check(net, torch.ones(1, 2))
        else:
            options: dict[str, Any] = {} if ahead == "capture" else {"buckets": [2, 4]}
            with pytest.raises(CaptureError, match=r"makes `self\.z`"):
                getattr(graphify(net, backend="tape", **options), ahead)(torch.ones(1, 2))
        assert [*net.state_dict()] == state
        assert vars(net) == fields
        assert not net.inner._forward_hooks

        graphed = graphify(net, backend="tape")
        for number in range(4):
            x = torch.full((1, 2), float(number))
            equal(graphed(x), twin(x.clone()))
    assert [*net.state_dict()] == [*twin.state_dict()]


@pytest.mark.parametrize("ahead", ["check", "capture"])
def test_the_environment_is_put_back(ahead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run without trace writes to, or takes out of, `os.environ` is as before."""
    monkeypatch.setenv("GRAPHIFY_TEST_TAKEN", "1")

    def writing(x: Tensor) -> Tensor:
        os.environ["GRAPHIFY_TEST_MADE"] = "1"
        os.environ.pop("GRAPHIFY_TEST_TAKEN", None)
        return x + 1

    before = dict(os.environ)
    if ahead == "check":
        check(writing, torch.ones(2))
    else:
        with pytest.raises(CaptureError, match=r"changes `os\.environ`"):
            graphify(writing, backend="tape").capture(torch.ones(2))

    assert dict(os.environ) == before
    assert os.getenv("GRAPHIFY_TEST_TAKEN") == "1"
