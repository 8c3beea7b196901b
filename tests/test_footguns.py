"""What Python does beside the tensors: read at capture, or done once. Each hazard with the way round it."""

from __future__ import annotations

import argparse
import collections
import contextvars
import dataclasses
import functools
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import counts, equal, follows_eager, rows
from torch import Tensor, nn

from graphify import CaptureError, GraphifyWarning, graphify

Reader = tuple[Callable[[Tensor], Tensor], Callable[[float], Any]]
"""A function and a change, between calls, of a number that it reads."""


class Plain:
    k = 1.0


def attribute() -> Reader:
    box = Plain()
    return lambda x: x * box.k, lambda v: setattr(box, "k", v)


def deep_attribute() -> Reader:
    box = Plain()
    box.a = Plain()
    box.a.b = Plain()
    return lambda x: x * box.a.b.k, lambda v: setattr(box.a.b, "k", v)


def class_attribute() -> Reader:
    class Own(Plain):
        pass

    return lambda x: x * Own.k, lambda v: setattr(Own, "k", v)


def property_of_an_attribute() -> Reader:
    class Own:
        _k = 1.0
        k = property(lambda self: self._k)

    box = Own()
    return lambda x: x * box.k, lambda v: setattr(box, "_k", v)


def slot() -> Reader:
    class Own:
        __slots__ = ("k",)

    box = Own()
    box.k = 1.0
    return lambda x: x * box.k, lambda v: setattr(box, "k", v)


def data_class() -> Reader:
    @dataclasses.dataclass
    class Config:
        k: float = 1.0

    config = Config()
    return lambda x: x * config.k, lambda v: setattr(config, "k", v)


def simple_namespace() -> Reader:
    config = types.SimpleNamespace(k=1.0)
    return lambda x: x * config.k, lambda v: setattr(config, "k", v)


def argparse_namespace() -> Reader:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.args = argparse.Namespace(k=1.0)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.args.k

    module = Own()
    return module, lambda v: setattr(module.args, "k", v)


def dict_item() -> Reader:
    config = {"k": 1.0}
    return lambda x: x * config["k"], lambda v: config.update(k=v)


def list_item() -> Reader:
    config = [0.0, 1.0]
    return lambda x: x * config[1], lambda v: config.__setitem__(1, v)


def long_list_of_lists() -> Reader:
    config = [[1.0] for _ in range(100)]
    return lambda x: x * config[70][0], lambda v: config[70].__setitem__(0, v)


def set_membership() -> Reader:
    seen: set[float] = set()
    return lambda x: x * (len(seen) + 1), seen.add


def deque_item() -> Reader:
    config = collections.deque([1.0])
    return lambda x: x * config[0], lambda v: config.__setitem__(0, v)


def chain_map() -> Reader:
    config = collections.ChainMap({}, {"k": 1.0})
    return lambda x: x * config["k"], lambda v: config.__setitem__("k", v)


def mapping_proxy() -> Reader:
    config = {"k": 1.0}
    view = types.MappingProxyType(config)
    return lambda x: x * view["k"], lambda v: config.update(k=v)


def partial_keyword() -> Reader:
    f = functools.partial(lambda x, config: x * config["k"], config={"k": 1.0})
    return f, lambda v: f.keywords["config"].update(k=v)


def mutable_default() -> Reader:
    config = {"k": 1.0}

    def f(x: Tensor, config: dict[str, float] = config) -> Tensor:
        return x * config["k"]

    return f, lambda v: config.update(k=v)


def decorated() -> Reader:
    config = {"k": 1.0}

    def scaled(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(f)
        def inner(x: Tensor) -> Tensor:
            return f(x) * config["k"]

        return inner

    return scaled(lambda x: x + 1), lambda v: config.update(k=v)


def function_attribute() -> Reader:
    def f(x: Tensor) -> Tensor:
        return x * f.k

    f.k = 1.0
    return f, lambda v: setattr(f, "k", v)


def closure_in_a_registry() -> Reader:
    k = 1.0

    def scale(x: Tensor) -> Tensor:
        return x * k

    def change(value: float) -> None:
        nonlocal k
        k = value

    registry = types.SimpleNamespace(scale=scale)
    return lambda x: registry.scale(x), change


def weak_reference() -> Reader:
    box = Plain()
    reference = weakref.ref(box)
    return lambda x: x * reference().k, lambda v: setattr(box, "k", v)


def thread_local() -> Reader:
    box = threading.local()
    box.k = 1.0
    return lambda x: x * box.k, lambda v: setattr(box, "k", v)


def context_variable() -> Reader:
    variable = contextvars.ContextVar("variable", default=1.0)
    return lambda x: x * variable.get(), variable.set


def environment() -> Reader:
    name = "GRAPHIFY_TEST_NUMBER"
    os.environ[name] = "1"
    return lambda x: x * float(os.environ[name]), lambda v: os.environ.__setitem__(name, str(v))


def module_attribute() -> Reader:
    settings = types.ModuleType("graphify_test_settings")
    settings.k = 1.0
    return lambda x: x * settings.k, lambda v: setattr(settings, "k", v)


def late_import() -> Reader:
    settings = types.ModuleType("graphify_test_settings")
    settings.k = 1.0
    sys.modules["graphify_test_settings"] = settings

    def f(x: Tensor) -> Tensor:
        from graphify_test_settings import k

        return x * k

    return f, lambda v: setattr(settings, "k", v)


def numpy_array() -> Reader:
    numpy = pytest.importorskip("numpy")
    box = Plain()
    box.values = numpy.ones(1)
    return lambda x: x * float(box.values[0]), lambda v: box.values.__setitem__(0, v)


READERS = [
    attribute, deep_attribute, class_attribute, property_of_an_attribute, slot, data_class, simple_namespace,
    argparse_namespace, dict_item, list_item, long_list_of_lists, set_membership, deque_item, chain_map, mapping_proxy,
    partial_keyword, mutable_default, decorated, function_attribute, closure_in_a_registry, weak_reference, thread_local,
    context_variable, environment, module_attribute, late_import, numpy_array,
]  # fmt: skip


@pytest.mark.parametrize("make", READERS, ids=lambda make: make.__name__)
def test_numbers_that_python_holds_are_never_frozen(backend, device, make, request):
    """A number changed between calls, wherever Python holds it, is the one used, or the call is refused."""
    f, change = make()
    graphed = graphify(f, backend=backend)
    for value in (1.0, 2.0, 3.0, 2.0):
        change(value)
        for x in [t.to(device) for t in rows(3, count=4)]:
            try:
                got = graphed(x)
            except CaptureError as error:
                assert error.fix  # noqa: PT017
                return
            equal(f(x), got)
    assert counts(graphed)[2] >= 4


Writer = tuple[Callable[[Tensor], Any], Callable[[], Any]]
"""A function that does something in Python, and a look at what it did."""


def counter() -> Writer:
    box = Plain()
    box.n = 0

    def f(x: Tensor) -> Tensor:
        box.n += 1
        return x * 2

    return f, lambda: box.n


def counter_by_name() -> Writer:
    box = Plain()
    box.n = 0

    def f(x: Tensor) -> Tensor:
        setattr(box, "n", getattr(box, "n") + 1)  # noqa: B009, B010
        return x * 2

    return f, lambda: box.n


def counter_in_vars() -> Writer:
    box = Plain()
    box.n = 0
    key = "n"

    def f(x: Tensor) -> Tensor:
        vars(box)[key] += 1
        return x * 2

    return f, lambda: box.n


def counter_in_a_namespace() -> Writer:
    box = types.SimpleNamespace(n=0)

    def f(x: Tensor) -> Tensor:
        box.n += 1
        return x * 2

    return f, lambda: box.n


def counter_of_a_class() -> Writer:
    class Own:
        n = 0

    def f(x: Tensor) -> Tensor:
        Own.n += 1
        return x * 2

    return f, lambda: Own.n


def counter_of_the_function() -> Writer:
    def f(x: Tensor) -> Tensor:
        f.n += 1
        return x * 2

    f.n = 0
    return f, lambda: f.n


def counter_in_a_cell() -> Writer:
    n = 0

    def f(x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return x * 2

    return f, lambda: n


def iterator() -> Writer:
    numbers = itertools.count()
    return lambda x: x * next(numbers), lambda: None


def appended_list() -> Writer:
    log: list[int] = []

    def f(x: Tensor) -> Tensor:
        log.append(x.size(0))
        return x * 2

    return f, lambda: list(log)


def appended_tensors() -> Writer:
    kept: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        kept.append(x * 3)
        return x * 2

    return f, lambda: list(kept)


def grown_set() -> Writer:
    seen: set[int] = set()

    def f(x: Tensor) -> Tensor:
        seen.add(len(seen))
        return x * 2

    return f, lambda: set(seen)


def stored_in_a_dict() -> Writer:
    store: dict[str, Tensor] = {}

    def f(x: Tensor) -> Tensor:
        store["last"] = x * 3
        return x * 2

    return f, lambda: dict(store)


def stored_in_an_attribute() -> Writer:
    box = Plain()

    def f(x: Tensor) -> Tensor:
        box.last = x * 3
        return x * 2

    return f, lambda: box.last


def stored_in_a_cell() -> Writer:
    last = None

    def f(x: Tensor) -> Tensor:
        nonlocal last
        last = x * 3
        return x * 2

    return f, lambda: last


def rebound_buffer() -> Writer:
    box = Plain()
    box.t = torch.zeros(3)

    def f(x: Tensor) -> Tensor:
        box.t = (box.t if box.t.device == x.device else torch.zeros_like(x)) + x
        return box.t * 2

    return f, lambda: box.t


def rebound_data() -> Writer:
    """As older code writes a moving average."""
    average = nn.Parameter(torch.zeros(3), requires_grad=False)

    def f(x: Tensor) -> Tensor:
        last = average.data if average.device == x.device else torch.zeros_like(x)
        average.data = last * 0.5 + x
        return average * 2

    return f, lambda: average.detach().clone()


def flipped_flag() -> Writer:
    box = Plain()
    box.flag = False

    def f(x: Tensor) -> Tensor:
        box.flag = not box.flag
        return x if box.flag else -x

    return f, lambda: box.flag


def flipped_requires_grad() -> Writer:
    t = torch.zeros(3)

    def f(x: Tensor) -> Tensor:
        t.requires_grad_(not t.requires_grad)
        return x * 2

    return f, lambda: t.requires_grad


def swapped() -> Writer:
    box = Plain()
    box.a, box.b = 1.0, 2.0

    def f(x: Tensor) -> Tensor:
        box.a, box.b = box.b, box.a
        return x * box.a

    return f, lambda: (box.a, box.b)


WRITERS = [
    counter, counter_by_name, counter_in_vars, counter_in_a_namespace, counter_of_a_class, counter_of_the_function,
    counter_in_a_cell, iterator, appended_list, appended_tensors, grown_set, stored_in_a_dict, stored_in_an_attribute,
    stored_in_a_cell, rebound_buffer, rebound_data, flipped_flag, flipped_requires_grad, swapped,
]  # fmt: skip


@pytest.mark.parametrize("fallback", ["raise", "eager"])
@pytest.mark.filterwarnings("ignore::graphify.GraphifyWarning")
def test_b18_a_counter_never_stands_still(backend, device, fallback):
    """A position that Python counts is refused with its name, and as it was; or the calls run eagerly, and count."""
    plain, state = Plain(), Plain()
    plain.n = state.n = 0

    def step(owner: Plain, x: Tensor) -> Tensor:
        owner.n += 1
        return x + owner.n

    graphed = graphify(step, backend=backend, fallback=fallback)
    for i, x in enumerate([t.to(device) for t in rows(3, count=5)]):
        if fallback == "raise" and i > 0:
            with pytest.raises(CaptureError, match=r"`owner\.n`"):
                graphed(state, x)
        else:
            equal(step(plain, x), graphed(state, x))
        assert state.n == plain.n

    assert plain.n == (5 if fallback == "eager" else 1)


@pytest.mark.parametrize("make", WRITERS, ids=lambda make: make.__name__)
def test_what_python_does_is_repeated_or_refused(backend, device, make, request):
    """Python state that a call changes is as in eager after each call, or refused with the state as before."""
    (plain, look), (mine, see) = make(), make()
    graphed = graphify(mine, backend=backend)
    kept = []
    for x in [t.to(device) for t in rows(3, count=6)]:
        before = see() if kept else None
        try:
            got = graphed(x)
        except CaptureError as error:
            assert error.fix  # noqa: PT017
            assert len(kept) == 2, "the first capture is the time to refuse"
            equal(before, see())
            return
        kept.append((plain(x), got))
        kept.append((look(), see()))
        for a, b in kept:
            equal(a, b)


def test_footgun_list_append_workaround(backend, device):
    """What was appended to a list is returned instead."""

    def layers(x: Tensor) -> list[Tensor]:
        kept = []
        for _ in range(3):
            x = x.sin()
            kept.append(x)
        return kept

    follows_eager([(x,) for x in rows(3)], backend, device, target=layers)


def test_footgun_counter_workaround(backend, device):
    """A counter kept in a tensor advances at every call."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            return x * self.n

    follows_eager([(x,) for x in rows(3, count=6)], backend, device, make=Steps)


def test_footgun_attribute_rebound_workaround(backend, device):
    """State written with `copy_` instead of being re-bound is one graph."""

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("t", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.t.copy_(self.t * 0.5 + x)
            return self.t * 2

    follows_eager([(x,) for x in rows(3, count=6)], backend, device, make=Average)


def test_footgun_item_workaround(backend, device):
    """A value kept on the device, and torch.where for the branch, is captured."""
    follows_eager([(x,) for x in rows(3)], backend, device, target=lambda x: x * x[0])
    follows_eager(
        [(x,) for x in rows(3)], backend, device, target=lambda x: torch.where(x.sum() > 0, x * 2, x - 1)
    )


def test_footgun_mask_workaround(backend, device):
    """`torch.where` in place of `x[mask]` is captured."""
    follows_eager([(x,) for x in rows(6)], backend, device, target=lambda x: torch.where(x > 0, x, 0).sum())


def test_footgun_cpu_tensor_workaround(backend, device):
    """A table made once with `device=`, or handed in, is captured."""
    table = torch.arange(3.0, device=device)
    graphed = graphify(lambda x: x + table, backend=backend)
    for x in [t.to(device) for t in rows(3)]:
        equal(x + table, graphed(x))
    assert counts(graphed)[2] == 3


class Config:
    def __init__(self, k: float) -> None:
        self.k = k


def test_footgun_new_object_at_each_call(backend, device, request):
    """An object that is new at each call is never captured, right each time, and named in one warning."""
    graphed = graphify(lambda x, config: x * config.k, backend=backend)
    with pytest.warns(GraphifyWarning, match="`config` is a new object at each call") as seen:
        for i in range(8):
            x = torch.randn(3, device=device)
            equal(x * i, graphed(x, Config(float(i))))
    assert len(seen) == 1
    assert counts(graphed)[1:3] == (0, 0)


def test_footgun_new_object_workaround(backend, device):
    """One object kept, or a dataclass, is captured; its plain attributes stay values."""
    graphed = graphify(lambda x, config: x * config.k, backend=backend)
    config = Config(1.0)
    for i in range(8):
        config.k = float(i // 4)
        x = torch.randn(3, device=device)
        equal(x * config.k, graphed(x, config))
    assert counts(graphed)[:3] == (2, 2, 4)

    @dataclasses.dataclass
    class Options:
        k: float

    fresh = graphify(lambda x, options: x * options.k, backend=backend)
    for x in [t.to(device) for t in rows(3)]:
        equal(x * 2.0, fresh(x, Options(2.0)))
    assert counts(fresh)[:3] == (1, 1, 3)


def test_footgun_dict_keyed_by_tensors_or_objects_that_cannot_be_printed(backend, device):
    """Keys of any kind are looked at, never printed: printing a tensor reads it in the middle of a capture."""

    class Silent:
        def __repr__(self) -> str:
            raise AssertionError("printed")

    def make() -> Callable[[Tensor], Tensor]:
        weight = nn.Parameter(torch.ones(3, device=device))
        scales = {weight: 2.0, Silent(): 3.0}
        return lambda x: x * scales[weight]

    follows_eager([(x,) for x in rows(3)], backend, device, make=make)
