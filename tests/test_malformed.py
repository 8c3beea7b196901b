"""Wrong uses of the public face: each raises an error that names what is wrong, and leaves nothing behind."""

from __future__ import annotations

import array
import asyncio
import collections
import decimal
import functools
import io
import random
import types
from typing import Any

import pytest
import torch
from conftest import needs_cuda
from misuse import Bench, Use, misused, rows, scaled
from torch import Tensor, nn

from graphify import (
    CaptureError,
    GraphedModule,
    GraphifyError,
    GraphPool,
    InputError,
    disabled,
    graphify,
    handle,
)

# -- options


def option(name: str, value: Any, error: type[Exception], says: str) -> Use:
    """One option with a value that it does not take; the text begins with its name."""
    return Use(f"{name}={value!r}", lambda b: graphify(scaled, **{name: value}), error, f"{name} {says}")


WORDS = {
    "outputs": "must be one of 'fresh', 'static', not",
    "fallback": "must be one of 'raise', 'eager', not",
    "backend": "must be one of 'auto', 'cuda', 'tape', 'eager', not",
}
WRONG_WORDS: dict[str, tuple[Any, ...]] = {
    "outputs": ("views", "FRESH", 1, None, True, ["fresh"]),
    "fallback": ("never", None, True, ("raise", "eager")),
    "backend": ("gpu", "cpu", None, torch.device("cpu"), "CUDA"),
}
OPTIONS = [
    *(option(name, value, ValueError, WORDS[name]) for name in WORDS for value in WRONG_WORDS[name]),
    *(option("warmup", value, ValueError, "must be at least 1, not") for value in (0, -1)),
    *(option("warmup", value, TypeError, "must be an int, not") for value in (1.5, True, "1", None, [1])),
    *(option("max_graphs", value, ValueError, "must be at least 1, not") for value in (0, -64)),
    *(option("max_graphs", value, TypeError, "must be an int, not") for value in (2.0, "64", True)),
    *(
        option("pool", value, TypeError, "must be a GraphPool or None, not")
        for value in ("shared", GraphPool, (0, 0), False)
    ),
    Use("an unknown option", lambda b: graphify(scaled, cache=3), TypeError, "graphify() got an unexpected"),
    Use("an option misspelt", lambda b: graphify(scaled, warmups=3), TypeError, "'warmups'"),
    Use("an option by position", lambda b: graphify(scaled, "static"), TypeError, "graphify() takes"),
    Use("the target by name", lambda b: graphify(target=scaled), TypeError, "'target'"),
    Use("no target", lambda b: graphify(warmup=2)(), TypeError, "graphify(...)() missing"),
    Use("two targets", lambda b: graphify(warmup=2)(scaled, scaled), TypeError, "graphify(...)() takes 1"),
    Use("options after options", lambda b: graphify(warmup=2)(scaled, warmup=3), TypeError, "'warmup'"),
]


@rows(*OPTIONS)
def test_wrong_options(use: Use) -> None:
    """An option of a wrong kind or value is refused when it is given, by its name."""
    misused(use, Bench("tape", torch.device("cpu")))


# -- targets


async def coroutine(x: Tensor) -> Tensor:
    return x


def generator(x: Tensor) -> Any:
    yield x


async def async_generator(x: Tensor) -> Any:
    yield x


class Plain:
    def method(self, x: Tensor) -> Tensor:
        return x

    bound = functools.partialmethod(method, 1)

    @property
    def value(self) -> int:
        return 1

    @functools.cached_property
    def cached(self) -> int:
        return 1


class NoForward(nn.Module):
    pass


class Suspended(nn.Module):
    async def forward(self, x: Tensor) -> Tensor:
        return x


class Yields:
    def __call__(self, x: Tensor) -> Any:
        yield x


class Slotted(nn.Module):
    __slots__ = ("own",)

    def forward(self, x: Tensor) -> Tensor:
        return x


TARGET_VALUES: dict[str, tuple[Any, str]] = {
    "an int": (3, "a `int` object is not callable"),
    "a string": ("forward", "a `str` object is not callable"),
    "a tensor": (torch.ones(1), "a `Tensor` object is not callable"),
    "a list": ([scaled], "a `list` object is not callable"),
    "a namespace": (torch.nn, "a `module` object is not callable"),
    "None": (None, "a `NoneType` object is not callable"),
    "a parameter": (nn.Parameter(torch.ones(1)), "a `Parameter` object is not callable"),
    "an optimizer": (
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
        "a `SGD` object is not callable",
    ),
    "a running generator": (generator(torch.ones(1)), "`generator` is not callable"),
    "a coroutine function": (coroutine, "`coroutine` is a coroutine function"),
    "a generator function": (generator, "`generator` is a generator function"),
    "an async generator": (async_generator, "`async_generator` is an async generator function"),
    "a partial of one": (functools.partial(generator, 1), "`generator` is a generator function"),
    "an object that yields": (Yields(), "a `Yields` object is a generator function"),
    "a module that suspends": (Suspended(), "a `Suspended` object is a coroutine function"),
    "its class": (Suspended, "`Suspended.forward` is a coroutine function"),
    "a property": (Plain.__dict__["value"], "`Plain.value` is a property"),
    "a cached property": (Plain.__dict__["cached"], "`Plain.cached` is a property"),
    "a partialmethod": (Plain.__dict__["bound"], "`Plain.method` is a partialmethod"),
    "a static method of no function": (staticmethod(3), "a `int` object is not callable"),
    "a static coroutine": (staticmethod(coroutine), "`coroutine` is a coroutine function"),
    "a class method of a property": (classmethod(Plain.__dict__["value"]), "`Plain.value` is a property"),
    "a plain class": (Plain, "`Plain` is a class"),
    "a tensor class": (Tensor, "`Tensor` is a class"),
    "nn.Module": (nn.Module, "`Module` has no forward"),
    "a class without forward": (NoForward, "`NoForward` has no forward"),
    "GraphedModule": (GraphedModule, "`GraphedModule` is the class of graphed modules"),
    "a module with slots": (Slotted(), "graphify cannot make a twin of a `Slotted`"),
}
TARGETS = [
    Use(name, lambda b, target=target: graphify(backend="tape")(target), TypeError, says)
    for name, (target, says) in TARGET_VALUES.items()
]


def subclass_a_twin(bench: Bench) -> None:
    type("Sub", (type(bench.model),), {})


def no_weak_references(bench: Bench) -> None:
    class Rigid:
        __slots__ = ()

        @graphify(backend="tape")
        def step(self, x: Tensor) -> Tensor:
            return x

    Rigid().step(bench.data())


TARGETS += [
    Use("GraphedModule called", lambda b: GraphedModule(b.net), TypeError, "write graphify(module)"),
    Use("a subclass of a twin's class", subclass_a_twin, TypeError, "`Sub` cannot be a subclass of"),
    Use("instances without weak references", no_weak_references, TypeError, "instances of `"),
    Use("a twin of the class of twins", lambda b: graphify(type(b.model)), TypeError, "graphed modules"),
]


@rows(*TARGETS)
def test_wrong_targets(use: Use) -> None:
    """What cannot be graphed is refused when it is decorated, by its name and with what to write."""
    misused(use, Bench("tape", torch.device("cpu")))


# -- arguments of calls


def cyclic(kind: type) -> Any:
    box: Any = kind()
    if kind is dict:
        box["again"] = box
    else:
        box.append(box)
    return box


def deep(levels: int) -> Any:
    box: Any = 0
    for _ in range(levels):
        box = [box]
    return box


def closed_coroutine() -> Any:
    waiting = coroutine(torch.ones(1))
    waiting.close()  # else Python warns that nobody awaited it
    return waiting


class Subclass(Tensor):
    pass


ARGUMENT_VALUES: dict[str, tuple[Any, str]] = {
    "a set": (lambda: {1, 2}, "is a set"),
    "a set of tensors": (lambda: {torch.ones(1)}, "is a set"),
    "a frozenset of tensors": (lambda: frozenset([torch.ones(1)]), "is a frozenset"),
    "a generator": (lambda: (i for i in [1]), "is a generator"),
    "an iterator": (lambda: iter([1]), "is a list_iterator"),
    "a map": (lambda: map(abs, [1]), "is a map"),
    "a zip": (lambda: zip([1], [2], strict=True), "is a zip"),
    "a file": (lambda: io.StringIO("x"), "is a _io.StringIO"),
    "dict keys": (lambda: {"a": 1}.keys(), "is a dict_keys"),
    "dict values": (lambda: {"a": 1}.values(), "is a dict_values"),
    "a bytearray": (lambda: bytearray(b"a"), "is a bytearray"),
    "a memoryview": (lambda: memoryview(b"a"), "is a memoryview"),
    "an array": (lambda: array.array("f", [1.0]), "is a array.array"),
    "a deque": (lambda: collections.deque([torch.ones(1)]), "is a collections.deque"),
    "a mapping proxy": (lambda: types.MappingProxyType({"a": 1}), "is a mappingproxy"),
    "a namespace object": (lambda: types.SimpleNamespace(x=1), "is a types.SimpleNamespace"),
    "a Decimal": (lambda: decimal.Decimal(1), "is a decimal.Decimal"),
    "an exception": (lambda: KeyError("x"), "is a KeyError"),
    "a coroutine": (closed_coroutine, "is a coroutine"),
    "a tensor as a key": (lambda: {torch.ones(1): 1}, "has a key of type Tensor"),
    "a cyclic list": (lambda: cyclic(list), "[0]` is `"),
    "a cyclic dict": (lambda: cyclic(dict), "['again']` is `"),
    "a very deep list": (lambda: deep(200), "is nested deeper than 100 containers"),
    "a sparse tensor": (lambda: torch.eye(3).to_sparse(), "its layout is torch.sparse_coo"),
    "a compressed tensor": (lambda: torch.eye(3).to_sparse_csc(), "its layout is torch.sparse_csc"),
    "a tensor without values": (lambda: torch.ones(3, device="meta"), "it is on the meta device"),
    "a subclass of Tensor": (lambda: torch.ones(3).as_subclass(Subclass), "a subclass of Tensor"),
}
BAD_CALLS = [
    Use("a missing argument", lambda b: b.graphed(), TypeError, "scaled() missing 1 required positional argument: 'x'"),
    Use("an unknown keyword", lambda b: b.graphed(b.data(), sale=2.0), TypeError, "keyword argument 'sale'"),
    Use("too many arguments", lambda b: b.graphed(b.data(), 1.0, 2.0), TypeError, "scaled() takes from 1 to 2"),
    Use("an argument twice", lambda b: b.graphed(b.data(), x=b.data()), TypeError, "multiple values for argument 'x'"),
    Use("a keyword that is no string", lambda b: b.graphed(b.data(), **{1: 2}), TypeError, "keywords must be strings"),
    Use("a module without its input", lambda b: b.model(), TypeError, "forward() missing 1 required positional"),
]  # fmt: skip


@rows(*BAD_CALLS)
def test_wrong_calls(use: Use, backend: str, device: torch.device) -> None:
    """A call that does not fit the parameters raises what the function itself would raise."""
    misused(use, Bench(backend, device))


WAYS: dict[str, Any] = {
    "": lambda b, value: b.graphed(value),
    ", by keyword": lambda b, value: b.graphed(b.data(), shift=value),
    ", inside a dict": lambda b, value: b.graphed(b.data(), shift={"a": [value]}),
    ", ahead of time": lambda b, value: b.graphed.capture(value),
    ", to a module": lambda b, value: b.model(value),
}
NAMED = {"": "`x", ", by keyword": "`shift", ", inside a dict": "`shift['a'][0]", ", ahead of time": "`x", ", to a module": "`input"}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSC")  # torch's own, once
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ARGUMENT_VALUES)
def test_wrong_arguments(backend: str, device: torch.device, name: str, way: str) -> None:
    """A value that no signature can hold is refused by its path, however it comes in."""
    make, says = ARGUMENT_VALUES[name]

    misused(Use(name, lambda b: WAYS[way](b, make()), InputError, (NAMED[way], says)), Bench(backend, device))


# -- functions that no graph can hold

LOG: list[Tensor] = []
COUNT = [0]


class Bare:
    __slots__ = ("value",)


def counts(x: Tensor) -> Tensor:
    COUNT[0] += 1
    return x * 1


def logs(x: Tensor) -> Tensor:
    LOG.append(x)
    return x * 1


def draws(x: Tensor) -> Tensor:
    return x * random.random()


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + torch.rand_like(x)


def gives_bare(x: Tensor) -> Bare:
    bare = Bare()
    bare.value = x * 2
    return bare


def changes_leaf(x: Tensor) -> Tensor:
    (x * 2).sum().backward()
    return x.detach() * 2


BAD_FUNCTIONS = [
    Use("reads a value", lambda b: b.run(lambda x: x * x.sum().item()), CaptureError, "`.item()`"),
    Use("branches on a value", lambda b: b.run(lambda x: x if x.sum() > 0 else -x), CaptureError, "an `if` on a tensor"),
    Use("masks", lambda b: b.run(lambda x: x[x > 0]), CaptureError, "`x[mask]`"),
    Use("makes a list", lambda b: b.run(lambda x: x.tolist()), CaptureError, "on the host"),
    Use("prints a tensor", lambda b: b.run(lambda x: str(x) and x * 2), CaptureError, "`Tensor.__repr__`"),
    Use("counts", lambda b: b.run(counts), CaptureError, "`counts` changes `COUNT[0]`"),
    Use("logs", lambda b: b.run(logs), CaptureError, "`logs` changes `LOG["),
    Use("draws on the host", lambda b: b.graphify(draws).capture(b.data()), CaptureError, "`draws` draws from random"),
    Use("gives a set", lambda b: b.run(lambda x: {x}), InputError, "`output` is a set"),
    Use("gives a generator", lambda b: b.run(lambda x: (i for i in [x])), InputError, "`output` is a generator"),
    Use("gives an object", lambda b: b.run(gives_bare), InputError, "`output` is a test_malformed.Bare"),
    Use("gives a function", lambda b: b.run(lambda x: lambda: x), CaptureError, "`output` is a new function"),
    Use("ahead of time", lambda b: b.graphify(lambda x: x * x.sum().item()).capture(b.data()), CaptureError, "`.item()`"),
]  # fmt: skip


@rows(*BAD_FUNCTIONS)
def test_functions_that_no_graph_can_hold(use: Use, backend: str, device: torch.device) -> None:
    """What a graph cannot repeat is refused with what the function does, and that call is undone."""
    COUNT[0] = 0
    LOG.clear()

    misused(use, Bench(backend, device))

    assert COUNT[0] == len(LOG) == 0 or use.name in ("counts", "logs")


RECORDED = [
    Use("becomes sparse", lambda b: b.run(lambda x: x.to_sparse()), CaptureError, "sparse_coo"),
    Use(
        "seeds",
        lambda b: b.graphify(seeds).capture(b.data()),
        CaptureError,
        "`torch.manual_seed` is called inside",
    ),
]


@rows(*RECORDED)
@pytest.mark.parametrize("backend", ["tape", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])])
def test_functions_that_no_recording_can_hold(use: Use, backend: str) -> None:
    """The same for what only a recording of operators cannot repeat."""
    misused(use, Bench(backend, torch.device("cuda" if backend == "cuda" else "cpu")))


# -- training


def step_with(make: Any, after: Any = None) -> Any:
    """A whole step of a module and an optimizer made for it."""

    def code(bench: Bench) -> Any:
        with torch.random.fork_rng():
            net = nn.Linear(3, 2).to(bench.device)
        optimizer = make(net.parameters())

        def step(x: Tensor) -> Any:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            return loss.detach() if after is None else after(optimizer, loss)

        return bench.run(step)

    return code


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def scheduled(optimizer: Any, loss: Tensor) -> Tensor:
    optimizer.schedule.step()
    return loss.detach()


def with_schedule(parameters: Any) -> Any:
    optimizer = sgd(parameters)
    optimizer.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def second_order(bench: Bench) -> None:
    bench.trains()
    for _ in range(3):
        loss = bench.model(bench.data(2, 3)).square().sum()
        torch.autograd.grad(loss, list(bench.net.parameters()), create_graph=True)


def own_gradient(bench: Bench) -> Any:
    return bench.run(changes_leaf, bench.data(requires_grad=True))


BAD_TRAINING = [
    Use("create_graph", second_order, GraphifyError, "`create_graph=True` through a replay of `Sequential`"),
    Use("Adam counts on the host", step_with(torch.optim.Adam), CaptureError, "`Adam` counts its steps on the host"),
    Use("NAdam", step_with(torch.optim.NAdam), CaptureError, "`NAdam` counts its steps on the host"),
    Use("Adagrad", step_with(torch.optim.Adagrad), CaptureError, "`Adagrad` counts its steps on the host"),
    Use("LBFGS", step_with(torch.optim.LBFGS), CaptureError, "`LBFGS` decides on the host how to step"),
    Use("a schedule inside", step_with(with_schedule, scheduled), CaptureError, "a learning-rate schedule is stepped"),
    Use("a loss that is read", step_with(sgd, lambda o, loss: loss.item()), CaptureError, "`.item()`"),
    Use("a loss with its history", step_with(sgd, lambda o, loss: loss), CaptureError, "returns a tensor that needs gradients"),
    Use("the gradient of an argument", own_gradient, CaptureError, "`x` gets a gradient from a backward inside"),
]  # fmt: skip


@rows(*BAD_TRAINING)
def test_wrong_training(use: Use, backend: str, device: torch.device) -> None:
    """Training that no graph can repeat is refused with the name of what is in the way."""
    if device.type == "cuda" and use.name == "Adagrad":
        pytest.skip("about optimizers that have no capturable form on a CPU")

    misused(use, Bench(backend, device))


# -- controls


class Holder:
    @graphify(backend="tape")
    def step(self, x: Tensor) -> Tensor:
        return x * 2


HANDLED: dict[str, tuple[Any, str]] = {
    "None": (lambda b: None, "a `NoneType` object"),
    "a string": (lambda b: "model", "a `str` object"),
    "a plain function": (lambda b: scaled, "`scaled`"),
    "a plain module": (lambda b: b.net[0], "a `Linear` object"),
    "the module inside": (lambda b: b.model.__wrapped__, "a `Sequential` object"),
    "the function inside": (lambda b: b.graphed.__wrapped__, "`scaled`"),
    "the class of twins": (lambda b: type(b.model), "`GraphedModule[Sequential]`"),
    "GraphedModule": (lambda b: GraphedModule, "`GraphedModule`"),
    "a pool": (lambda b: GraphPool(), "a `GraphPool` object"),
    "what holds a graphed one": (lambda b: nn.Sequential(b.model), "a `Sequential` object"),
    "a partial of one": (lambda b: functools.partial(b.graphed, 1), "is not graphed"),
}
CONTROLS = [
    *(
        Use(f"handle of {name}", lambda b, make=make: handle(make(b)), TypeError, says)
        for name, (make, says) in HANDLED.items()
    ),
    Use("handle of nothing", lambda b: handle(), TypeError, "'target'"),
    Use("handle of a method without instance", lambda b: handle(Holder.step), TypeError, "`Holder.step` has graphs per"),
    Use("stats of a method without instance", lambda b: Holder.step.stats(), TypeError, "`Holder.step` has graphs per"),
    Use("capture of nothing", lambda b: b.graphed.capture(), TypeError, "scaled() missing 1 required positional"),
    Use("capture with a wrong keyword", lambda b: b.graphed.capture(b.data(), y=1), TypeError, "'y'"),
    Use("capture with too many", lambda b: b.graphed.capture(b.data(), 1.0, 2.0), TypeError, "scaled() takes from"),
    Use("capture of a module's nothing", lambda b: b.model.capture(), TypeError, "forward() missing 1 required"),
    Use("stats of something", lambda b: b.graphed.stats(1), TypeError, "stats() takes 1 positional argument"),
    Use("report of something", lambda b: b.graphed.report("all"), TypeError, "report() takes 1 positional argument"),
    Use("reset of something", lambda b: b.graphed.reset(1), TypeError, "reset() takes 1 positional argument"),
    Use("disabled with a function", lambda b: disabled(scaled), TypeError, "disabled() takes 0 positional"),
    Use("a pool of a device", lambda b: GraphPool("cuda"), TypeError, "GraphPool.__init__() takes 1"),
    Use("a pool with an option", lambda b: GraphPool(size=3), TypeError, "'size'"),
    Use("another class for a twin", lambda b: setattr(b.model, "__class__", int), TypeError, "__class__ assignment"),
]  # fmt: skip


@rows(*CONTROLS)
def test_wrong_controls(use: Use, backend: str, device: torch.device) -> None:
    """Controls say what they got instead of what they take."""
    misused(use, Bench(backend, device))


# -- what eager itself refuses


def twice(model: Any) -> None:
    for _ in range(4):
        loss = model(torch.ones(2, 3, device=model[0].weight.device)).square().sum()
        loss.backward()
    loss.backward()


def of_another_shape(model: Any) -> None:
    model(torch.ones(2, 3, device=model[0].weight.device)).backward(torch.ones(5))


EAGERS: dict[str, Any] = {
    "another shape": lambda b, model, graphed: model(b.data(2, 5)),
    "another dtype": lambda b, model, graphed: model(b.data(2, 3).long()),
    "None": lambda b, model, graphed: graphed(None),
    "a string": lambda b, model, graphed: graphed("x"),
    "shapes that do not broadcast": lambda b, model, graphed: graphed(b.data(3), shift=b.data(4)),
    "a list for a tensor": lambda b, model, graphed: model([[1.0, 2.0, 3.0]]),
    "a backward twice": lambda b, model, graphed: twice(model),
    "a backward of many numbers": lambda b, model, graphed: model(b.data(2, 3)).backward(),
    "a gradient of another shape": lambda b, model, graphed: of_another_shape(model),
    "a parameter that is a number": lambda b, model, graphed: setattr(model[0], "weight", 3),
    "an attribute that is not there": lambda b, model, graphed: model.nonesuch,
}


@pytest.mark.parametrize("name", EAGERS)
def test_what_eager_refuses(backend: str, device: torch.device, name: str) -> None:
    """Where eager raises, the graphed call raises the same, word for word, and works afterwards."""
    bench, texts = Bench(backend, device), []
    for _ in range(2):
        for model, graphed in ((bench.net, scaled), (bench.model, bench.graphed)):
            before = torch.get_rng_state()
            with pytest.raises(Exception) as raised:
                EAGERS[name](bench, model, graphed)
            texts.append((raised.type, str(raised.value)))
            assert torch.equal(before, torch.get_rng_state())
        bench.net.zero_grad()
        bench.works()

    assert len(set(texts)) == 1, texts


def test_a_static_result_that_was_overwritten(backend: str, device: torch.device) -> None:
    """One that comes back as an argument is refused; what is right afterwards works."""
    bench = Bench(backend, device)
    graphed = bench.graphify(scaled, outputs="static")
    results = [graphed(bench.data()) for _ in range(5)]
    del results[:3]

    with pytest.raises(GraphifyError, match="a static output that a later replay overwrote"):
        graphed(results[0])

    x = bench.data()
    assert torch.equal(graphed(x), scaled(x))


def test_the_loop_of_asyncio_is_no_target() -> None:
    """A wrong target inside a running loop is refused there as well, and the loop goes on."""

    async def main() -> str:
        with pytest.raises(TypeError, match="`coroutine` is a coroutine function"):
            graphify(coroutine)
        return "went on"

    assert asyncio.run(main()) == "went on"
