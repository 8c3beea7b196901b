"""Names that are computed at run time, which no bytecode shows: what is read by them is guarded like any state."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import operator
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from checks import counts
from torch import Tensor, nn

from graphify import CaptureError, graphify, handle
from graphify._code import Executed

GLOBAL = 1.0
MODULE = types.ModuleType("computed_names_state")
MODULE.k = 1.0  # type: ignore[attr-defined]
ask = getattr

Reader = tuple[Callable[[Tensor], Tensor], Callable[[float], Any]]
"""A function and a change, between calls, of a number that it reads."""


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that only `sys.modules` leads to, and globals as they were."""
    monkeypatch.setitem(sys.modules, MODULE.__name__, MODULE)
    monkeypatch.setattr(MODULE, "k", 1.0)
    monkeypatch.setitem(globals(), "GLOBAL", 1.0)
    torch.set_grad_enabled(False)
    yield
    torch.set_grad_enabled(True)


class Holder:
    """An object whose methods look names up in several ways."""

    def __init__(self) -> None:
        self.k, self.mode, self.names = 1.0, "k", ["k"]

    def by_name(self, x: Tensor) -> Tensor:
        return x * getattr(self, f"{'k'}")

    def by_mode(self, x: Tensor) -> Tensor:
        return x * getattr(self, self.mode)

    def in_turn(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = x * getattr(self, name)
        return x

    def at_once(self, x: Tensor) -> Tensor:
        return x * sum(getattr(self, name) for name in self.names)

    def listed(self, x: Tensor) -> Tensor:
        return x * sum(getattr(self, name) for name in dir(self) if len(name) == 1)

    def members(self, x: Tensor) -> Tensor:
        return x * sum(v for n, v in inspect.getmembers(self) if len(n) == 1)

    def alias(self, x: Tensor) -> Tensor:
        return x * ask(self, self.mode)

    def handed_over(self, x: Tensor) -> Tensor:
        return x * sum(map(getattr, [self], self.names))

    def getter(self, x: Tensor) -> Tensor:
        return x * operator.attrgetter(self.mode)(self)

    def local_import(self, x: Tensor) -> Tensor:
        from operator import attrgetter

        return x * attrgetter(self.mode)(self)

    def special(self, x: Tensor) -> Tensor:
        return x * object.__getattribute__(self, self.mode)

    def asked(self, x: Tensor) -> Tensor:
        return x * hasattr(self, f"{'k'}")

    def copied(self, x: Tensor) -> Tensor:
        return x * copy.copy(self)


class Slots:
    __slots__ = ("k",)


class Sub(Holder):
    """The methods are those of its base."""


@dataclasses.dataclass
class Config:
    k: float = 1.0


def method(name: str, cls: type[Holder] = Holder) -> Callable[[], Reader]:
    def made() -> Reader:
        holder = cls()
        return getattr(holder, name), lambda v: setattr(holder, "k", v)

    made.__name__ = f"{cls.__name__}_{name}"
    return made


def module_attribute() -> Reader:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale0 = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * getattr(self, f"scale{0}")

    net = Net()
    return net, lambda v: setattr(net, "scale0", v)


def class_attribute() -> Reader:
    class Own:
        k = 1.0

        @classmethod
        def run(cls, x: Tensor) -> Tensor:
            return x * getattr(cls, f"{'k'}")

    return Own.run, lambda v: setattr(Own, "k", v)


def slot() -> Reader:
    held = Slots()
    held.k = 1.0
    return lambda x: x * getattr(held, f"{'k'}"), lambda v: setattr(held, "k", v)


def mapped_name() -> Reader:
    """As configurations do that know one setting under several names."""

    class Mapped:
        names = {"scale": "k"}

        def __init__(self) -> None:
            self.k = 1.0

        def __getattribute__(self, key: str) -> Any:
            return super().__getattribute__({"scale": "k"}.get(key, key))

    held = Mapped()
    return lambda x: x * held.scale, lambda v: setattr(held, "k", v)


def forwarded() -> Reader:
    class Prefixed:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, "pre" + name)

    inner = types.SimpleNamespace(prek=1.0)
    outer = Prefixed(inner)
    return lambda x: x * outer.k, lambda v: setattr(inner, "prek", v)


def of_any_first_argument() -> Reader:
    """A function whose first argument is no instance of its own."""

    class Own:
        @staticmethod
        def read(held: Any, name: str) -> Any:
            return getattr(held, "k" + name)

    held = types.SimpleNamespace(k=1.0)
    return lambda x: x * Own.read(held, ""), lambda v: setattr(held, "k", v)


def fields(read: Callable[[Config], float]) -> Callable[[], Reader]:
    def made() -> Reader:
        config = Config()
        return lambda x: x * read(config), lambda v: setattr(config, "k", v)

    return made


def as_dict() -> Reader:
    return fields(lambda c: dataclasses.asdict(c)["k"])()


def as_tuple() -> Reader:
    return fields(lambda c: dataclasses.astuple(c)[0])()


def each_field() -> Reader:
    return fields(lambda c: sum(getattr(c, f.name) for f in dataclasses.fields(c)))()


def replaced() -> Reader:
    return fields(lambda c: float(str(dataclasses.replace(c)).partition("=")[2].rstrip(")")))()


def deep_copy() -> Reader:
    return fields(lambda c: next(iter(vars(copy.deepcopy(c)).values())))()


def among_globals() -> Reader:
    return lambda x: x * globals()["GLO" + "BAL"], lambda v: globals().update(GLOBAL=v)


def evaluated() -> Reader:
    return lambda x: x * eval("GLOBAL * 1.0"), lambda v: globals().update(GLOBAL=v)


def evaluated_attribute() -> Reader:
    held = Config()
    return lambda x: x * eval("h." + "k", {"h": held}), lambda v: setattr(held, "k", v)


def executed() -> Reader:
    held = Config()

    def f(x: Tensor) -> Tensor:
        space = {"h": held}
        exec("y = h." + "k", space)
        return x * space["y"]

    return f, lambda v: setattr(held, "k", v)


def of_a_module() -> Reader:
    return lambda x: x * getattr(MODULE, f"{'k'}"), lambda v: setattr(MODULE, "k", v)


def of_some_module() -> Reader:
    held = types.SimpleNamespace(module=MODULE)
    return lambda x: x * getattr(held.module, f"{'k'}"), lambda v: setattr(MODULE, "k", v)


def in_sys_modules() -> Reader:
    return lambda x: x * sys.modules["computed_names_state"].k, lambda v: setattr(MODULE, "k", v)


def imported() -> Reader:
    return (
        lambda x: x * importlib.import_module("computed_names_" + "state").k,
        lambda v: setattr(MODULE, "k", v),
    )


def imported_by_hand() -> Reader:
    return lambda x: x * __import__("computed_names_state").k, lambda v: setattr(MODULE, "k", v)


def method_caller() -> Reader:
    class Own:
        def __init__(self) -> None:
            self.run = lambda: 1.0

    held = Own()
    return (
        lambda x: x * operator.methodcaller(f"{'run'}")(held),
        lambda v: setattr(held, "run", lambda: v),
    )


def getter_from_outside() -> Reader:
    held, get = Config(), operator.attrgetter("k")
    return lambda x: x * get(held), lambda v: setattr(held, "k", v)


def caller_from_outside() -> Reader:
    held = types.SimpleNamespace(run=lambda by: by)
    get = operator.methodcaller("run", by=1.0)
    return lambda x: x * get(held), lambda v: setattr(held, "run", lambda by: by * v)


def partial_from_outside() -> Reader:
    held = Config()
    get = partial(getattr, held, "k")
    return lambda x: x * get(), lambda v: setattr(held, "k", v)


METHODS = [
    "by_name", "by_mode", "in_turn", "at_once", "listed", "members", "alias", "handed_over", "getter", "local_import",
    "special",
]  # fmt: skip
READERS = [
    *map(method, METHODS), method("at_once", Sub), module_attribute, class_attribute, slot, mapped_name, forwarded,
    of_any_first_argument, as_dict, as_tuple, each_field, replaced, deep_copy, among_globals, evaluated,
    evaluated_attribute, executed, of_a_module, of_some_module, in_sys_modules, imported, imported_by_hand,
    method_caller, getter_from_outside, caller_from_outside, partial_from_outside,
]  # fmt: skip


@pytest.mark.parametrize("make", READERS, ids=lambda make: make.__name__)
def test_a_number_behind_a_computed_name_is_noticed(backend, device, make):
    """A change between calls is seen by the next one, in whatever way the name of the number is made."""
    function, change = make()
    graphed, kept = graphify(function, backend=backend), []
    for i in range(9):
        if i % 4 == 3:
            change(float(i))
        x = torch.randn(3, device=device)
        y = graphed(x)
        kept.append((y, function(x)))
    assert all(torch.equal(mine, theirs) for mine, theirs in kept)
    assert counts(graphed)[2] >= 3


def test_an_attribute_that_comes_is_noticed(backend, device):
    """`hasattr` with a computed name asks anew once there is such an attribute, and once there is none."""
    held = Holder()
    del held.k
    graphed = graphify(held.asked, backend=backend)
    x = torch.ones(3, device=device)
    for change in (lambda: None, lambda: setattr(held, "k", 1.0), lambda: delattr(held, "k")):
        change()
        for _ in range(3):
            assert torch.equal(graphed(x), held.asked(x))


Writer = tuple[Callable[[Tensor], Tensor], Callable[[], Any]]
"""A function that changes state, and what shows it."""


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nk, self.last = 0, None

    def counts(self, x: Tensor) -> Tensor:
        k = "k"
        setattr(self, "n" + k, getattr(self, "n" + k) + 1)
        return x * 2

    def writes(self, x: Tensor) -> Tensor:
        k = "k"
        setattr(self, "n" + k, self.seen.pop() if x[0].isnan() else 5.0)
        return x * 2

    def writes_object(self, x: Tensor) -> Tensor:
        object.__setattr__(self, "n" + "kk"[1:], 5.0)
        return x * 2

    def deletes(self, x: Tensor) -> Tensor:
        self.nk = None
        delattr(self, f"{'nk'}")
        return x * 2

    def writes_what_it_reads(self, x: Tensor) -> Tensor:
        before = getattr(self, f"{'last'}")
        self.last = x
        return x if before is None else x + before


@pytest.mark.filterwarnings("ignore::graphify.GraphifyWarning")
@pytest.mark.parametrize("name", ["counts", "writes_object", "deletes", "writes_what_it_reads"])
def test_a_write_by_a_computed_name(backend, device, name):
    """What is written by a computed name is left as eager leaves it: such a function is refused, or redone at each call."""
    net, twin = Counter(), Counter()
    graphed = graphify(getattr(net, name), backend=backend, fallback="eager")
    for _ in range(5):
        net.__dict__.setdefault("nk", 0)
        twin.__dict__.setdefault("nk", 0)
        x = torch.randn(3, device=device)
        assert torch.equal(graphed(x), getattr(twin, name)(x))
        assert vars(net).get("nk") == vars(twin).get("nk")


def test_such_a_write_is_named(backend, device):
    """The error says which attribute it is."""
    net = Counter()
    graphed = graphify(net.counts, backend=backend, fallback="raise")
    with pytest.raises(CaptureError, match="`self.nk`"):
        for _ in range(3):
            graphed(torch.ones(3, device=device))


class Literal:
    """Looks up by names that are written out, or that the caller's code shows."""

    def __init__(self) -> None:
        self.k, self.inner, self.unused = 1.0, types.SimpleNamespace(b=1.0, unused=1.0), 1.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        object.__setattr__(self, name, value)

    def run(self, x: Tensor) -> Tensor:
        k = getattr(self, "k") if hasattr(self, "k") else getattr(self, "j", getattr(self, "i", 0.0))  # noqa: B009
        self.last = operator.attrgetter("inner.b")(self)
        return x * k * self.b * ask(self.inner, "b", None)


@dataclasses.dataclass
class Output:
    """As results of models are that look through their own fields."""

    out: Any

    def __post_init__(self) -> None:
        assert all(getattr(self, f.name) is not None for f in dataclasses.fields(self))


def guarded(target: Callable[[Tensor], Any]) -> tuple[set[Any], Executed]:
    """The keys of the places that a recording is guarded by, and what it executed."""
    graphed = graphify(target, backend="tape")
    for _ in range(3):
        graphed(torch.ones(3))
    life = handle(graphed)._life
    (entry,) = life.entries.ready
    return {place.key for place, _ in entry.guard.places}, life.lessons.executed


def test_names_that_are_written_out_guard_nothing_else():
    """`getattr(self, "k")` makes the guard no wider than `self.k`; nor does `__getattr__` that hands a name on."""
    keys, executed = guarded(Literal().run)
    assert not executed.by_any_name()
    assert {"k", "b", "inner"} <= keys
    assert "unused" not in keys


def test_methods_that_look_through_their_own_instance_guard_that_alone():
    """A result that looks through its own fields makes no other object's attributes count."""
    held = Literal()
    keys, executed = guarded(lambda x: Output(x * held.k))
    assert not executed.by_any_name()
    assert "k" in keys
    assert "unused" not in keys
