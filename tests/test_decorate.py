"""What can be graphed, what it becomes, and how methods keep graphs per instance; eager is the oracle."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import gc
import inspect
import os
import pickle
import subprocess
import sys
import threading
import types
import typing
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import together
from torch import Tensor, nn

from graphify import GraphedModule, GraphPool, _method, graphify, handle
from graphify._method import WeakMethod

TAPE: dict[str, Any] = {"backend": "tape"}


@graphify(backend="tape")
def scaled(x: Tensor, k: float = 2.0) -> Tensor:
    """Scale it."""
    return x * k


def plain_scaled(x: Tensor, k: float = 2.0) -> Tensor:
    return x * k


class Adder:
    """A callable object."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.amount

    def plain(self, x: Tensor) -> Tensor:
        return x + self.amount


class Model:
    """A class of the user's, with a graphed method of every kind."""

    weight = 10.0

    def __init__(self, weight: float) -> None:
        self.weight = weight

    @graphify(backend="tape")
    def step(self, x: Tensor, k: float = 1.0) -> Tensor:
        """One step."""
        return x * self.weight * k

    @graphify(backend="tape")
    @classmethod
    def above(cls, x: Tensor) -> Tensor:
        return x * cls.weight

    @classmethod
    @graphify(backend="tape")
    def below(cls, x: Tensor) -> Tensor:
        return x * cls.weight

    @graphify(backend="tape")
    @staticmethod
    def free_above(x: Tensor, k: float = 3.0) -> Tensor:
        return x * k

    @staticmethod
    @graphify(backend="tape")
    def free_below(x: Tensor, k: float = 3.0) -> Tensor:
        return x * k


class Child(Model):
    weight = 20.0

    @graphify(backend="tape")
    def step(self, x: Tensor, k: float = 1.0) -> Tensor:
        return super().step(x, k) + 1


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def agree(graphed: Callable[..., Any], eager: Callable[..., Any], calls: int = 4) -> None:
    """Both give the same for fresh data, often enough for a warm-up, a capture and replays."""
    for _ in range(calls):
        x = torch.randn(3)
        torch.testing.assert_close(graphed(x), eager(x), rtol=0, atol=0)


# What can be graphed, and how it is written.


@pytest.mark.parametrize(
    "target",
    [
        plain_scaled,
        lambda x: x.relu() + 1,
        functools.partial(plain_scaled, k=3.0),
        Adder(1.5),
        Adder(2.5).plain,
        torch.relu,
        torch.jit.script(plain_scaled),
        functools.partial(Adder(1.0)),
        torch.compile(lambda x: x * 3, backend="eager"),
        torch.no_grad()(plain_scaled),
    ],
    ids=[
        "function", "lambda", "partial", "object", "method", "builtin", "jit", "partial-object", "compiled", "no_grad",
    ],
)  # fmt: skip
def test_every_callable_can_be_graphed(target: Callable[..., Any]) -> None:
    """Functions, lambdas, partials, objects, methods, builtins, jit and compiled functions replay to equal results."""
    graphed = graphify(target, **TAPE)

    agree(graphed, target, calls=5)

    stats = handle(graphed).stats()
    assert (stats.calls, stats.warmups) == (5, 1)
    assert stats.replays >= 2
    assert graphed.__wrapped__ is target or graphed.__wrapped__ == target


def test_three_ways_of_writing_it() -> None:
    """Bare, with options and as a call make the same thing."""

    @graphify
    def bare(x: Tensor) -> Tensor:
        return x + 1

    @graphify(outputs="static", max_graphs=3, backend="tape")
    def optioned(x: Tensor) -> Tensor:
        return x + 1

    called = graphify(bare.__wrapped__, warmup=2, **TAPE)

    for graphed in (bare, optioned, called):
        agree(lambda x, graphed=graphed: graphed(x).clone(), lambda x: x + 1)
    assert handle(bare).options.backend == "auto"
    assert (handle(optioned).options.outputs, handle(optioned).options.max_graphs) == ("static", 3)
    assert handle(called).stats().warmups == 2


def test_options_are_checked_where_they_are_written() -> None:
    """A wrong option is an error of the decoration, not of the first call."""
    with pytest.raises((TypeError, ValueError), match="warmup"):
        graphify(warmup=0)
    with pytest.raises((TypeError, ValueError), match="outputs"):
        graphify(plain_scaled, outputs="fast")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="buckts"):
        graphify(plain_scaled, buckts=[1])  # type: ignore[call-overload]


def test_metadata_survives() -> None:
    """Name, documentation, module, signature and type hints are the function's; so are its own attributes."""

    def original(x: Tensor, k: int = 1) -> Tensor:
        """Documented."""
        return x * k

    original.tag = "mine"  # type: ignore[attr-defined]
    graphed = graphify(original)

    assert graphed.__wrapped__ is original
    for name in ("__name__", "__qualname__", "__doc__", "__module__", "tag"):
        assert getattr(graphed, name) == getattr(original, name)
    assert inspect.signature(graphed) == inspect.signature(original)
    assert typing.get_type_hints(graphed) == typing.get_type_hints(original)
    assert repr(graphed) == f"<graphed {original.__qualname__}>"


def test_attributes_of_callable_objects_stay_theirs() -> None:
    """A wrapper of an object takes no snapshot of the object's attributes."""
    target = Adder(1.0)
    graphed = graphify(target, **TAPE)

    assert not hasattr(graphed, "amount")
    assert graphed.__doc__ == Adder.__doc__
    agree(graphed, target)
    target.amount = 5.0
    agree(graphed, target)


def test_wrong_calls_raise_what_the_function_raises() -> None:
    """A missing or unknown argument is the function's own TypeError, word for word."""
    model = Model(2.0)
    eager = functools.partial(Model.step.__wrapped__, model)
    for graphed, plain in ((graphify(plain_scaled, **TAPE), plain_scaled), (model.step, eager)):
        for args, kwargs in [((), {}), ((1, 2, 3), {}), ((1,), {"q": 1}), ((1,), {"x": 1})]:
            with pytest.raises(TypeError) as expected:
                plain(*args, **kwargs)
            with pytest.raises(TypeError) as found:
                graphed(*args, **kwargs)
            assert str(found.value) == str(expected.value)


# Methods.


def test_each_instance_has_graphs_of_its_own() -> None:
    """Two instances compute with their own state, and count for themselves."""
    two, three = Model(2.0), Model(3.0)

    agree(two.step, lambda x: x * 2)
    agree(three.step, lambda x: x * 3, calls=5)

    assert two.step.stats().calls == 4
    assert (three.step.stats().calls, three.step.stats().replays) == (5, 3)
    assert handle(two.step) is not handle(three.step)
    two.weight = 7.0
    agree(two.step, lambda x: x * 7)


def test_positional_and_keyword_arguments_meet_in_methods() -> None:
    """However a call of a method spells its arguments, it is the same signature."""
    model = Model(2.0)

    for _ in range(2):
        x = torch.randn(3)
        for result in (model.step(x, 1.0), model.step(x, k=1.0), model.step(x=x), model.step(x)):
            assert torch.equal(result, x * 2)

    stats = model.step.stats()
    assert (stats.warmups, stats.captures, stats.replays) == (1, 1, 6)


def test_a_bound_method_looks_like_one() -> None:
    """It is a `MethodType` with the function's metadata, equal to itself, and holds its instance."""
    model = Model(2.0)

    assert inspect.ismethod(model.step)
    assert model.step.__self__ is model
    assert (model.step.__name__, model.step.__doc__) == ("step", "One step.")
    assert model.step.__qualname__ == "Model.step"
    assert model.step.__module__ == __name__
    assert list(inspect.signature(model.step).parameters) == ["x", "k"]
    assert list(inspect.signature(Model.step).parameters) == ["self", "x", "k"]
    assert model.step == model.step
    assert hash(model.step) == hash(model.step)
    assert model.step != Model(2.0).step
    agree(Model(4.0).step, lambda x: x * 4)


def test_attributes_set_by_other_decorators_are_seen_through_instances() -> None:
    """A mark that another decorator leaves on the graphed function is found on its bound methods."""

    class Marked:
        @graphify
        def step(self, x: Tensor) -> Tensor:
            return x

    Marked.step.mark = "late"  # type: ignore[attr-defined]

    assert Marked().step.mark == "late"  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["raising", "equal", "unhashable"])
def test_equality_and_hash_of_instances_play_no_part(how: str) -> None:
    """Instances that are equal, unhashable or raise when compared have graphs of their own."""

    class Odd(Model):
        def __eq__(self, other: object) -> bool:
            if how == "raising":
                raise RuntimeError("do not compare me")
            return True

        __hash__ = None if how == "unhashable" else lambda self: 1  # type: ignore[assignment]

    two, three = Odd(2.0), Odd(3.0)

    agree(two.step, lambda x: x * 2)
    agree(three.step, lambda x: x * 3)
    assert two.step.stats().calls == 4


def test_the_graphs_of_an_instance_die_with_it(no_gc: None) -> None:
    """Neither the instance nor its runner outlives the last reference, and no collector is needed."""
    model = Model(2.0)
    agree(model.step, lambda x: x * 2)
    gone, runner = weakref.ref(model), weakref.ref(handle(model.step))

    del model

    assert gone() is None
    assert runner() is None


def test_an_instance_in_a_circle_is_freed_after_reset() -> None:
    """What an instance's graphs check may refer back to it; `reset()` lets go of both."""
    model = Model(2.0)
    model.weight = Model(3.0)  # type: ignore[assignment]
    model.weight.owner = model  # type: ignore[attr-defined]
    step = graphify(lambda self, x: x * self.weight.weight, **TAPE)
    bound = step.__get__(model)
    agree(bound, lambda x: x * 3)
    gone = weakref.ref(model)

    bound.reset()
    del model, bound
    gc.collect()

    assert gone() is None


def test_a_reused_id_is_a_new_instance(no_gc: None) -> None:
    """An instance that is born where another died starts without graphs, and with its own state."""
    ids = set()
    for n in range(20):
        model = Model(float(n))
        ids.add(id(model))
        agree(model.step, lambda x, n=n: x * n, calls=3)
        assert model.step.stats().calls == 3
        del model
    assert len(ids) < 20, "no id was reused: this test shows nothing"


def test_a_function_that_is_replaced_frees_its_graphs(no_gc: None) -> None:
    """Taking a graphed method off its class frees the graphs of instances that live on."""

    class Local:
        step = graphify(lambda self, x: x + 1, **TAPE)

    model = Local()
    agree(model.step, lambda x: x + 1)
    runner = weakref.ref(handle(model.step))

    Local.step = lambda self, x: x + 2  # type: ignore[assignment]

    assert runner() is None
    agree(model.step, lambda x: x + 2)


def test_nothing_is_stored_in_the_instance() -> None:
    """The instance's `__dict__` is untouched; it pickles and copies, and the copies start without graphs."""
    model = Model(2.0)
    agree(model.step, lambda x: x * 2)
    assert vars(model) == {"weight": 2.0}

    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), copy.copy(model)):
        other.weight = 5.0
        assert other.step.stats().calls == 0
        agree(other.step, lambda x: x * 5)
    agree(model.step, lambda x: x * 2)


def test_bound_methods_pickle_and_copy_with_their_instance() -> None:
    """A bound graphed method travels as any bound method does."""
    model = Model(2.0)

    for bound in (pickle.loads(pickle.dumps(model.step)), copy.deepcopy(model.step)):
        agree(model.step, lambda x: x * 2)
        assert bound.__self__ is not model
        bound.__self__.weight = 6.0
        agree(bound, lambda x: x * 6)


def test_the_function_of_a_bound_method_takes_any_instance() -> None:
    """`a.method.__func__(b, ...)` computes with b, in b's graphs, as it does with a plain method."""
    one, two = Model(2.0), Model(3.0)
    agree(one.step, lambda x: x * 2)

    agree(functools.partial(one.step.__func__, two), lambda x: x * 3)
    agree(types.MethodType(one.step.__func__, two), lambda x: x * 3)

    assert one.step.stats().calls == 4
    assert two.step.stats().calls == 8


def test_slots_without_weak_references_are_refused_by_name() -> None:
    """The error names the class and the line to write; that line works."""

    class Tight:
        __slots__ = ("weight",)
        step = Model.__dict__["step"]

    class Loose:
        __slots__ = ("__weakref__", "weight")
        step = Model.__dict__["step"]

    tight, loose = Tight(), Loose()
    tight.weight, loose.weight = 2.0, 3.0

    with pytest.raises(TypeError, match="cannot be weakly referenced") as error:
        tight.step
    assert "Model.step" in str(error.value)
    assert 'write: add "__weakref__" to the `__slots__` of' in str(error.value)
    assert "Tight" in str(error.value)
    agree(loose.step, lambda x: x * 3)
    agree(graphify(Tight.step.__wrapped__.__get__(tight), **TAPE), lambda x: x * 2)


def test_dataclasses_with_slots() -> None:
    """A frozen dataclass is an instance like any other."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        scale: float

        @graphify(backend="tape")
        def apply(self, x: Tensor) -> Tensor:
            return x * self.scale

    one, same = Config(2.0), Config(2.0)

    agree(one.apply, lambda x: x * 2)

    assert one == same
    assert same.apply.stats().calls == 0


def test_overriding_and_super() -> None:
    """An override and the method it overrides both work, each with graphs of its own; so does inheriting."""

    class Heir(Model):
        pass

    child, heir = Child(2.0), Heir(3.0)

    agree(child.step, lambda x: x * 2 + 1)
    agree(heir.step, lambda x: x * 3)
    agree(super(Child, child).step, lambda x: x * 2)

    assert child.step.stats().calls == 4
    assert handle(super(Child, child).step) is not handle(child.step)


def test_calling_through_the_class() -> None:
    """`Class.method(instance, ...)` uses that instance's graphs, and controls are asked of an instance."""
    model = Model(2.0)
    agree(functools.partial(Model.step, model), lambda x: x * 2)
    agree(model.step, lambda x: x * 2)

    assert model.step.stats().calls == 8
    assert Model.step is Model.__dict__["step"]
    for ask in (Model.step.stats, lambda: handle(Model.step)):
        with pytest.raises(TypeError, match=r"has graphs per instance.\n  write: instance.step.stats\(\)"):
            ask()
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        Model.step()  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Model.step(model)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["above", "below"])
def test_class_methods(name: str) -> None:
    """In either order, a class method computes with the class it is called on."""
    for cls, weight in ((Model, 10.0), (Child, 20.0)):
        agree(getattr(cls, name), lambda x, weight=weight: x * weight)
        agree(getattr(cls(1.0), name), lambda x, weight=weight: x * weight)
    assert isinstance(inspect.getattr_static(Model, name), classmethod)
    assert list(inspect.signature(getattr(Model, name)).parameters) == ["x"]
    assert handle(getattr(Model, name)).stats().replays >= 2


def test_a_graphed_class_method_has_graphs_per_class() -> None:
    """Class and subclass count for themselves, and a class that dies takes its graphs along."""

    class Local(Model):
        pass

    agree(Local.above, lambda x: x * 10, calls=3)

    assert handle(Local.above).stats().calls == 3
    assert handle(Local.above) is not handle(Model.above)


def test_the_graphs_of_a_class_die_with_it() -> None:
    """A class that is gone takes the graphs of its class methods along."""

    class Top:
        @graphify(backend="tape")
        @classmethod
        def make(cls, x: Tensor) -> Tensor:
            return x * 3

    class Local(Top):
        pass

    agree(Local.make, lambda x: x * 3)
    runner = weakref.ref(handle(Local.make))

    del Local
    gc.collect()

    assert runner() is None
    agree(Top.make, lambda x: x * 3)


@pytest.mark.parametrize("name", ["free_above", "free_below"])
def test_static_methods(name: str) -> None:
    """In either order, a static method takes no instance and has one set of graphs."""
    before = handle(getattr(Model, name)).stats().calls

    agree(getattr(Model, name), lambda x: x * 3)
    agree(getattr(Child(1.0), name), lambda x: x * 3)

    assert isinstance(inspect.getattr_static(Model, name), staticmethod)
    assert handle(getattr(Model, name)).stats().calls == before + 8


def test_abstract_methods_stay_abstract() -> None:
    """In either order, a class with a graphed abstract method cannot be instantiated before it is overridden."""

    class Base(abc.ABC):
        @abc.abstractmethod
        @graphify(backend="tape")
        def one(self, x: Tensor) -> Tensor:
            return x + 1

        @graphify(backend="tape")
        @abc.abstractmethod
        def two(self, x: Tensor) -> Tensor:
            return x + 2

    class Done(Base):
        def one(self, x: Tensor) -> Tensor:
            return super().one(x)

        @graphify(backend="tape")
        def two(self, x: Tensor) -> Tensor:
            return super().two(x)

    assert Base.__abstractmethods__ == {"one", "two"}
    with pytest.raises(TypeError, match="abstract"):
        Base()  # type: ignore[abstract]
    agree(Done().one, lambda x: x + 1)
    agree(Done().two, lambda x: x + 2)


def test_what_does_not_bind_eagerly_does_not_bind_graphed() -> None:
    """Partials, builtins, objects and bound methods in a class body take no instance, as without graphify."""
    other = Adder(1.0)

    class Holder:
        partial = graphify(functools.partial(plain_scaled, k=3.0), **TAPE)
        builtin = graphify(torch.relu, **TAPE)
        thing = graphify(other, **TAPE)
        method = graphify(other.plain, **TAPE)

    holder = Holder()
    agree(holder.partial, lambda x: x * 3)
    agree(holder.builtin, torch.relu)
    agree(holder.thing, other)
    agree(holder.method, other)


def test_other_descriptors_bind_their_own_way() -> None:
    """A decorator object with a `__get__` of its own is bound by it, and a late assignment is a method too."""

    class Logged:
        def __init__(self, function: Callable[..., Any]) -> None:
            self.function = function

        def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
            return functools.partial(self.function, instance)

        def __call__(self, *args: Any) -> Any:
            return self.function(*args)

    class Late:
        scale = 3.0

    Late.step = graphify(Logged(lambda self, x: x * self.scale), **TAPE)  # type: ignore[attr-defined]
    late = Late()

    agree(late.step, lambda x: x * 3)  # type: ignore[attr-defined]
    assert late.step.stats().replays == 2  # type: ignore[attr-defined]
    assert Late().step.stats().calls == 0  # type: ignore[attr-defined]


def test_threads_make_one_runner_per_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads touch a method of a new instance first, it gets one runner."""
    made: list[Any] = []

    class Counting(_method.Runner):
        def __init__(self, *args: Any) -> None:
            made.append(args)
            threading.Event().wait(0.01)  # long enough for every thread to come by
            super().__init__(*args)

    monkeypatch.setattr(_method, "Runner", Counting)
    model = Model(2.0)

    runners = together(8, lambda: handle(model.step))

    assert len(made) == 1
    assert len(runners) == 8
    assert len(set(map(id, runners))) == 1


FORKED = """
import os, threading, torch
from graphify import _method, graphify

class Model:
    @graphify
    def step(self, x):
        return x + 1

def hold():
    with _method.ONCE.lock:
        held.set()
        done.wait()

held, done = threading.Event(), threading.Event()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
pid = os.fork()
if pid == 0:
    os._exit(0 if Model().step is not None else 1)
done.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_does_not_wait_for_a_thread_of_its_parent() -> None:
    """A fork while another thread makes a runner leaves the child able to make its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parent.parent,
    )

    assert done.stdout.strip() == "0"


def test_a_weak_method_stands_for_the_bound_method() -> None:
    """It calls through the instance, has the signature without it, and says so once the instance is gone."""
    adder = Adder(2.0)
    weak = WeakMethod(adder, Adder.plain)

    assert torch.equal(weak(torch.ones(2)), torch.full((2,), 3.0))
    assert weak.__self__ is adder
    assert weak.__func__ is Adder.plain
    assert weak.__wrapped__ == adder.plain
    assert weak.__name__ == "plain"
    assert inspect.signature(weak) == inspect.signature(adder.plain)

    del adder

    with pytest.raises(ReferenceError, match=r"the instance of Adder.plain\(\) is gone"):
        weak(torch.ones(2))


# Modules.


def test_a_module_becomes_a_twin() -> None:
    """An instance becomes a GraphedModule, whichever way graphify is written."""
    eager = nn.Linear(3, 3)
    with torch.no_grad():
        for model in (graphify(eager, **TAPE), graphify(**TAPE)(eager)):
            assert isinstance(model, GraphedModule)
            agree(model, eager)


class Base(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@graphify(backend="tape")
class Graphed(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Derived(Graphed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_a_module_class_is_itself_with_a_graphed_forward() -> None:
    """The class is returned, instances graph their forward each for itself, and hooks run at every call."""
    two, three = Graphed(2.0), Graphed(3.0)
    seen: list[int] = []
    two.register_forward_hook(lambda m, args, out: seen.append(1))

    agree(two, lambda x: x * 2 + 1)
    agree(three, lambda x: x * 3 + 1)

    assert isinstance(Graphed, type)
    assert type(two) is Graphed
    assert not isinstance(two, GraphedModule)
    assert len(seen) == 4
    assert handle(two).stats().replays == 2
    assert handle(two) is not handle(three)
    assert list(inspect.signature(two.forward).parameters) == ["x"]


def test_instances_of_a_graphed_module_class_copy_and_nest() -> None:
    """They pickle, copy, take `super()` calls of subclasses, and can become twins."""
    model = Graphed(2.0)
    agree(model, lambda x: x * 2 + 1)

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert handle(other).stats().calls == 0
        agree(other, lambda x: x * 2 + 1)
    agree(Derived(2.0), lambda x: (x * 2 + 1) * 2)
    twin = graphify(model, **TAPE)
    agree(twin, lambda x: x * 2 + 1)
    assert handle(twin).stats().replays == 2
    assert handle(model).stats().calls == 4


def test_a_module_class_that_inherits_its_forward() -> None:
    """The forward is graphed in the decorated class only; the base stays eager."""

    @graphify(backend="tape")
    class Local(Base):
        pass

    agree(Local(2.0), lambda x: x * 2)

    assert "forward" in vars(Local)
    assert inspect.isfunction(Base.forward)
    assert handle(Local(1.0)).stats().calls == 0


# Again, and elsewhere.


def test_graphify_again_is_an_independent_wrapper() -> None:
    """Graphing something graphed wraps the plain callable anew, with the options given now."""
    again = graphify(scaled, max_graphs=5, **TAPE)
    model = Model(2.0)
    bound = graphify(model.step, max_graphs=6, **TAPE)
    before = scaled.stats().calls

    agree(again, lambda x: x * 2)
    agree(bound, lambda x: x * 2)

    assert again.__wrapped__ is scaled.__wrapped__
    assert (handle(again).options.max_graphs, handle(bound).options.max_graphs) == (5, 6)
    assert scaled.stats().calls == before
    assert model.step.stats().calls == 0


def test_a_graphed_function_pickles_by_reference() -> None:
    """A decorated function of a module, or a method through its class, is the same object after a round trip."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(scaled, protocol)) is scaled
        assert pickle.loads(pickle.dumps(Model.step, protocol)) is Model.step
    assert copy.deepcopy(scaled) is scaled
    assert copy.copy(scaled) is scaled


def test_a_wrapper_under_another_name_pickles_by_value() -> None:
    """It is rebuilt around the plain callable, with its options but for the pool, and without graphs."""
    graphed = graphify(functools.partial(plain_scaled, k=4.0), max_graphs=9, pool=GraphPool(), **TAPE)
    agree(graphed, lambda x: x * 4)

    other = pickle.loads(pickle.dumps(graphed))

    assert handle(other).stats().calls == 0
    assert handle(other).options.max_graphs == 9
    assert handle(other).options.pool is None
    agree(other, lambda x: x * 4)


def test_deepcopy_follows_what_is_wrapped() -> None:
    """A wrapper held by an object is copied with it, around the copy, and keeps its pool."""

    class Owner(Adder):
        def __init__(self) -> None:
            super().__init__(1.0)
            self.fast = graphify(self.plain, pool=GraphPool(), **TAPE)

    owner = Owner()
    agree(owner.fast, lambda x: x + 1)

    other = copy.deepcopy(owner)
    other.amount = 2.0

    agree(other.fast, lambda x: x + 2)
    agree(owner.fast, lambda x: x + 1)
    assert handle(other.fast).options.pool is handle(owner.fast).options.pool


def test_handle_gives_the_controls() -> None:
    """Of a function, a bound method, a twin, a module of a graphed class, and of controls themselves."""
    model, net = Model(2.0), Graphed(1.0)

    for graphed in (scaled, model.step, Model.above, Model.below, graphify(nn.Identity()), net, net.forward):
        runner = handle(graphed)
        assert runner.stats().calls >= 0
        assert handle(graphed) is runner
        assert handle(runner) is runner
    for other in (plain_scaled, nn.Identity(), 1, None, Adder(1.0).plain):
        with pytest.raises(TypeError, match="is not graphed; write graphify"):
            handle(other)


def test_the_controls_work_from_each_object() -> None:
    """stats, graphs, report, capture and reset are those of the object's own runner."""
    model = Model(2.0)
    for graphed in (graphify(plain_scaled, **TAPE), model.step):
        graphed.capture(torch.randn(3))
        assert len(graphed.graphs) == 1
        agree(graphed, lambda x: x * 2)
        assert graphed.stats().replays == 4
        assert graphed.report()
        graphed.reset()
        assert graphed.graphs == ()
        agree(graphed, lambda x: x * 2)


def test_torch_compile_inlines_the_plain_function() -> None:
    """Dynamo traces through graphed functions and methods in one piece."""
    model, fresh = Model(2.0), Model(2.0)
    agree(model.step, lambda x: x * 2)
    first = scaled.stats().captures

    def both(x: Tensor) -> Tensor:
        return model.step(scaled(x)) + Model.step(model, x) + fresh.step(x)

    agree(torch.compile(both, backend="eager", fullgraph=True), lambda x: x * 2 * 2 + x * 2 + x * 2)

    assert scaled.stats().captures == first
    assert (model.step.stats().calls, fresh.step.stats().calls) == (4, 0)


# What is refused, and with which words.


async def coroutine(x: Tensor) -> Tensor:
    return x


async def async_generator(x: Tensor) -> AsyncIterator[Tensor]:
    yield x


def generator(x: Tensor) -> Iterator[Tensor]:
    yield x


class Sleeper:
    async def __call__(self, x: Tensor) -> Tensor:
        return x

    def produce(self, x: Tensor) -> Iterator[Tensor]:
        yield x


class SleepingModule(nn.Module):
    async def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (coroutine, "`coroutine` is a coroutine function"),
        (functools.partial(functools.partial(coroutine), 1), "`coroutine` is a coroutine function"),
        (async_generator, "`async_generator` is an async generator function"),
        (generator, "`generator` is a generator function"),
        (Sleeper(), "a `Sleeper` object is a coroutine function"),
        (functools.partial(Sleeper()), "a `partial` object is a coroutine function"),
        (Sleeper().produce, "`Sleeper.produce` is a generator function"),
        (staticmethod(generator), "`generator` is a generator function"),
        (classmethod(coroutine), "`coroutine` is a coroutine function"),
        (SleepingModule(), "a `SleepingModule` object is a coroutine function"),
        (SleepingModule, "`SleepingModule.forward` is a coroutine function"),
        (property(plain_scaled), "`plain_scaled` is a property"),
        (functools.cached_property(plain_scaled), "`plain_scaled` is a property"),
        (functools.partialmethod(plain_scaled), "`plain_scaled` is a partialmethod"),
        (Adder, "`Adder` is a class"),
        (nn.Module, "`Module` has no forward"),
        (nn.ModuleList, "`ModuleList` has no forward"),
        (GraphedModule, "`GraphedModule` is the class of graphed modules"),
        (3, "a `int` object is not callable"),
        (torch.ones(1), "a `Tensor` object is not callable"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_graphed_is_refused_where_it_is_written(target: Any, words: str) -> None:
    """The TypeError comes at decoration, names the target, and says what to write."""
    for decorate in (graphify, graphify(warmup=2)):
        with pytest.raises(TypeError) as error:
            decorate(target)
        first, second = str(error.value).split("\n")
        assert first.startswith(f"graphify: {words}")
        assert second.startswith("  write: ")
