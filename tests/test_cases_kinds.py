"""Cases F: kinds of arguments, results and callables."""

from __future__ import annotations

import asyncio
import collections
import copy
import dataclasses
import functools
import gc
import logging
import pickle
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from checks import counts, equal, follows_eager, rows
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from graphify import CaptureError, GraphifyError, GraphifyWarning, InputError, graphify, handle
from graphify.testing import Call


def test_x01_same_tensor_twice(backend, device):
    """`G(x, x)` and `G(p, q)` are told apart."""
    xs = rows(3, count=12)
    calls = [(x, x) if i % 2 else (x, x * 3) for i, x in enumerate(xs)]
    follows_eager(calls, backend, device, target=lambda p, q: p - 2 * q, replays=8)


REFILLED = "the capturing call refills a mutated argument before it writes back"


def test_x01_same_tensor_twice_written(backend, device, request):
    """A tensor passed twice and written through one name is seen through the other, and by the caller."""

    def f(p: Tensor, q: Tensor) -> Tensor:
        p.add_(1)
        return p * q

    xs = rows(3, count=12)
    calls = [(x, x) if i % 2 else (x, x * 3) for i, x in enumerate(xs)]
    follows_eager(calls, backend, device, target=f, replays=8)


@pytest.mark.parametrize("written", [None, 0, 1])
def test_x01_overlapping_views(backend, device, written, request):
    """Views that overlap in one buffer, in several ways, keep overlapping, written or not."""

    def f(a: Tensor, b: Tensor) -> Tensor:
        if written is not None:
            (a, b)[written].mul_(2)
        return a + b.flip(0)

    calls = []
    for i, base in enumerate(rows(8, count=16)):
        pairs = [
            (base[:3], base[1:4]),
            (base[:3], base[4:7]),
            (base[::2][:3], base[1::2][:3]),
            (base[:3], base[:3].clone()),
        ]
        calls.append(pairs[i % 4])
    stats = follows_eager(calls, backend, device, target=f, replays=10)
    assert stats.captures == 3  # apart in one buffer is like apart


def test_x01_views_of_two_dtypes(backend, device, request):
    """Views of one buffer with different dtypes share it in the graph as well."""

    def f(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b.clone()

    calls = [(base, base.view(torch.int32)) for base in rows(4)]
    follows_eager(calls, backend, device, target=f)


def test_x03_the_callers_sample_is_never_adopted(backend, device):
    """A tensor used at warm-up or capture is left alone by later calls."""
    graphed = graphify(lambda x: x * 2, backend=backend)
    kept = []
    for x in [t.to(device) for t in rows(3, count=6)]:
        kept.append((x.clone(), x))
        equal(x * 2, graphed(x))
        for was, now in kept:
            equal(was, now)


@dataclasses.dataclass
class Mutable:
    a: Tensor
    k: int = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Tensor
    b: Any = None


@dataclasses.dataclass
class Slotted:
    __slots__ = ("a",)
    a: Tensor


class Named(NamedTuple):
    a: Tensor
    rest: tuple[Any, ...] = ()


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):
    """As Hugging Face's: items and attributes in step."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


RECORDS = {
    "dataclass": lambda t: Mutable(t, 3),
    "frozen": lambda t: Frozen(t, [t + 1]),
    "slots": Slotted,
    "named": lambda t: Named(t, (t, None)),
    "model output": lambda t: ModelOutput(logits=t),
    "ordered": lambda t: collections.OrderedDict(b=t, a=t * 2),
    "defaultdict": lambda t: collections.defaultdict(list, {"a": t}),
    "nested": lambda t: Frozen(t, Mutable(t * 3, 2)),
}


def first(record: Any) -> Tensor:
    if isinstance(record, dict):
        return next(iter(record.values()))
    return record.a


@pytest.mark.parametrize("kind", RECORDS)
def test_x05_records_in_and_out(backend, device, kind):
    """Dataclasses, NamedTuples and dict subclasses keep their type both ways, a new object per call."""
    calls = [(RECORDS[kind](x),) for x in rows(3)]
    follows_eager(calls, backend, device, target=lambda r: (RECORDS[kind](first(r) * 2), first(r) + 1))


@pytest.mark.parametrize("kind", RECORDS)
def test_x05_a_record_passed_through(backend, device, kind):
    """A record that is returned as it came holds the caller's own tensors."""
    calls = [(RECORDS[kind](x),) for x in rows(3)]
    follows_eager(calls, backend, device, target=lambda r: (first(r) * 2, r))


def test_x07_scalars_in_and_out(backend, device):
    """0-dim tensors and numbers derived from shapes are right, per signature."""
    calls = [(x, x.sum()) for n in (3, 4) for x in rows(n)]
    follows_eager(
        calls,
        backend,
        device,
        target=lambda x, s: (x.sum(), s * 2, x.size(0) / 2, x.numel(), x.dim() > 1),
        replays=6,
    )


def test_x08_many_inputs(backend, device):
    """Two thousand tensors of mixed dtypes are each their own, in bounded time."""
    count = 200 if backend == "eager" else 2000
    dtypes = [torch.float32, torch.float64, torch.int64, torch.bfloat16]
    graphed = graphify(
        lambda *xs: [xs[0] * 2, sum(x.double().sum() for x in xs[:40]), xs[-1] + 1], backend=backend
    )
    started = time.perf_counter()
    for i in range(5):
        xs = [(torch.ones(2, device=device) * (i + j)).to(dtypes[j % 4]) for j in range(count)]
        equal([xs[0] * 2, sum(x.double().sum() for x in xs[:40]), xs[-1] + 1], graphed(*xs))
    assert counts(graphed)[2] == 3
    assert time.perf_counter() - started < 30


class Subclass(Tensor):
    pass


ODD = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "subclass": lambda: torch.ones(3).as_subclass(Subclass),
    "meta": lambda: torch.ones(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ODD)
def test_x10_layouts_that_cannot_be_staged(backend, device, kind):
    """Sparse, nested, meta tensors and subclasses are refused by argument name, or run eagerly when allowed."""
    place = None if kind == "meta" else device
    make = lambda: ODD[kind]() if place is None else ODD[kind]().to(place)
    graphed = graphify(lambda x, t: (x + 1, t), backend=backend)
    for x in [t.to(device) for t in rows(3, count=3)]:
        with pytest.raises(InputError, match="`t`"):
            graphed(x, make())
    soft = graphify(lambda x, t: (x + 1, t), backend=backend, fallback="eager")
    with pytest.warns(GraphifyWarning, match="`t`"):
        for x in [t.to(device) for t in rows(3, count=4)]:
            t = make()
            got = soft(x, t)
            equal(x + 1, got[0])
            assert got[1] is t
    assert counts(soft) == (0, 0, 0, 4, 0)


def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x[0], x[1][:2]], layout=torch.jagged, device=x.device)


WITHOUT_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda x: x.to_sparse(),
    "sparse csr": lambda x: x.to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1][:2]], device=x.device),
    "jagged": jagged,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["tape", "eager"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_x10_results_that_have_no_memory_to_copy(backend, kind, grad):
    """A sparse or nested result is a CaptureError that says what to write, or runs eagerly when allowed."""
    make = WITHOUT_MEMORY[kind]
    graphed = graphify(lambda x: (x + 1, make(x)), backend=backend)
    with torch.set_grad_enabled(grad):
        for given in range(3):
            with pytest.raises(CaptureError) if given else nullcontext() as raised:
                graphed(torch.randn(2, 3, requires_grad=grad))
            assert raised is None or (raised.value.why and raised.value.fix)
        assert counts(graphed) == (1, 0, 0, 0, 2)
        soft = graphify(lambda x: (x + 1, make(x)), backend=backend, fallback="eager")
        with pytest.warns(GraphifyWarning):
            for x in [t.requires_grad_(grad) for t in rows(2, 3, count=4)]:
                one, other = soft(x)
                assert torch.equal(one, x + 1)
                assert (other.layout, other.is_nested) == (make(x).layout, make(x).is_nested)
                parts = (
                    zip(other.unbind(), make(x).unbind(), strict=True)
                    if other.is_nested
                    else [(other, make(x))]
                )
                assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in parts)
    assert counts(soft) == (1, 0, 0, 3, 0)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["tape", "eager"])
@pytest.mark.parametrize("grad", [False, True])
def test_x10_results_of_other_kinds(backend, grad):
    """A quantised result, one on the meta device, and one that wraps tensors are what eager makes, at each call."""

    def f(x: Tensor) -> Any:
        quantised = torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)
        return TwoTensor(x * 2, x), torch.empty(3, device="meta"), quantised, x + 1

    graphed, kept = graphify(f, backend=backend), []
    with torch.set_grad_enabled(grad):
        for x in [t.requires_grad_(grad) for t in rows(2, 3)]:
            kept.append((f(x), graphed(x)))
            for want, got in kept:
                assert list(map(type, got)) == list(map(type, want))
                assert torch.equal(got[0].a, want[0].a)
                assert torch.equal(got[0].b, want[0].b)
                assert got[1].is_meta
                assert torch.equal(got[2].int_repr(), want[2].int_repr())
                assert torch.equal(got[3], want[3])
    assert counts(graphed) == (1, 1, 3, 0, 0)


@pytest.mark.parametrize("backend", ["tape", "eager"])
@pytest.mark.parametrize("grad", [False, True])
def test_x10_a_sparse_tensor_from_outside(backend, grad):
    """One that is only passed on is no trouble; one that is used is refused by name, written or not."""
    adjacency = torch.eye(3).to_sparse()
    reads = graphify(lambda x: adjacency @ x, backend=backend)
    writes = graphify(lambda x: (adjacency.mul_(1.0), x)[1] + 1, backend=backend)
    holds = graphify(lambda x: (x + 1, adjacency), backend=backend)
    with torch.set_grad_enabled(grad):
        for i, x in enumerate(rows(3, 2)):
            for graphed in (reads, writes):
                with pytest.raises(CaptureError, match="sparse") if i else nullcontext():
                    graphed(x)
            one, other = holds(x)
            assert torch.equal(one, x + 1)
            assert other is adjacency
        with pytest.raises(CaptureError) as raised:
            reads(x)
    if backend == "eager" or not grad:
        assert raised.value.what == "`adjacency` is a sparse_coo tensor"
    assert counts(holds) == (1, 1, 3, 0, 0)


def test_x10_parameters_and_buffers_are_tensors(backend, device):
    """Parameters, and what nn.Buffer makes, can be arguments, and keep their kind."""
    calls = [(nn.Parameter(x, requires_grad=False), nn.Buffer(x * 2)) for x in rows(3)]
    follows_eager(
        calls,
        backend,
        device,
        target=lambda p, b: (p * 2, p, b, type(p).__name__, isinstance(p, nn.Parameter)),
    )


def test_x11_prints_happen_while_python_runs(backend, device, capsys, caplog):
    """Prints, logs and warnings come from the warm-up and the capture, and not from replays."""

    def f(x: Tensor) -> Tensor:
        print("step")
        logging.getLogger("mine").warning("logged")
        warnings.warn("mine", UserWarning, stacklevel=1)
        return x + 1

    graphed = graphify(f, backend=backend)
    with pytest.warns(UserWarning, match="mine"):
        for x in [t.to(device) for t in rows(3, count=6)]:
            equal(x + 1, graphed(x))
    assert counts(graphed) == (1, 1, 4, 0, 0)
    if backend != "eager":
        assert capsys.readouterr().out == "step\nstep\n"
        assert [r.message for r in caplog.records if r.name == "mine"] == ["logged"] * 2


def test_x11_printing_a_tensor_is_refused(backend, device):
    """`print(tensor)` reads the device and is refused at its line."""

    def f(x: Tensor) -> Tensor:
        print(x)
        return x + 1

    with pytest.raises(CaptureError) as raised:
        graphify(f, backend=backend)(torch.ones(3, device=device))
    assert "print(x)" in (raised.value.where or "")


class Base:
    def __init__(self, w: float) -> None:
        self.w = w

    def step(self, x: Tensor) -> Tensor:
        """Multiply by w."""
        return x * self.w


def methods(backend: str) -> type:
    class A(Base):
        __hash__ = None

        def __eq__(self, other: object) -> bool:
            return True

        @graphify(backend=backend)
        def step(self, x: Tensor) -> Tensor:
            """Multiply by w."""
            return x * self.w

        @classmethod
        @graphify(backend=backend)
        def of_class(cls, x: Tensor) -> Tensor:
            return x * len(cls.__name__)

        @staticmethod
        @graphify(backend=backend)
        def static(x: Tensor) -> Tensor:
            return x - 5

        @property
        def derived(self) -> Tensor:
            return self.step(torch.ones(3))

    return A


def test_x12_methods_have_graphs_per_instance(backend, device):
    """Each instance has its own graphs and numbers, whatever its equality and hash."""
    cls = methods(backend)
    one, two = cls(2.0), cls(3.0)
    for x in [t.to(device) for t in rows(3, count=6)]:
        equal(x * 2.0, one.step(x))
        equal(x * 3.0, two.step(x))
        equal(x * 1, cls.of_class(x))
        equal(x * 1, one.of_class(x))
        equal(x - 5, two.static(x))
    assert counts(one.step) == counts(two.step) == (1, 1, 4, 0, 0)
    assert cls.step.__doc__ == "Multiply by w."
    assert cls.step.__name__ == "step"


def test_x12_subclass_overrides_and_super(backend, device):
    """An override that calls super().step computes as in eager."""
    cls = methods(backend)

    class B(cls):
        @graphify(backend=backend)
        def step(self, x: Tensor) -> Tensor:
            return super().step(x) + 1

    b = B(4.0)
    for x in [t.to(device) for t in rows(3, count=6)]:
        equal(x * 4.0 + 1, b.step(x))
    assert counts(b.step)[2] == 4


def test_x12_graphs_die_with_the_instance(backend, device, request):
    """An instance, and its graphs with it, goes when its last reference goes."""
    one = methods(backend)(2.0)
    for x in [t.to(device) for t in rows(3)]:
        one.step(x)
    runner, instance = weakref.ref(handle(one.step)), weakref.ref(one)
    gc.collect()
    gc.disable()
    try:
        del one
        assert instance() is None
        assert runner() is None
    finally:
        gc.enable()


def test_x12_slots(backend, device):
    """An instance with __slots__ and __weakref__ works, with its slots as values."""

    class S:
        __slots__ = ("__weakref__", "w")

        @graphify(backend=backend)
        def step(self, x: Tensor) -> Tensor:
            return x * self.w

    s = S()
    for w in (2.0, 3.0):
        s.w = w
        for x in [t.to(device) for t in rows(3, count=4)]:
            equal(x * w, s.step(x))


class Picklable:
    def __init__(self) -> None:
        self.w = 3.0

    @graphify(backend="tape")
    def step(self, x: Tensor) -> Tensor:
        return x * self.w


def test_x12_instances_travel():
    """Copies and pickles of an instance with a graphed method are instances without graphs."""
    one = Picklable()
    for x in rows(3):
        one.step(x)
    for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), copy.copy(one)):
        other.w = 5.0
        for x in rows(3):
            equal(x * 5.0, other.step(x))
            equal(x * 3.0, one.step(x))


class Adds:
    def __call__(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.mark.parametrize(
    "target",
    [
        functools.partial(torch.add, other=1),
        Adds(),
        Adds().__call__,
        torch.relu,
        torch.Tensor.sin,
        nn.Sequential(nn.ReLU(), nn.Flatten(0)),
        lambda x: x + 1,
        nn.functional.gelu,
    ],
    ids=["partial", "object", "bound method", "builtin", "descriptor", "Sequential", "lambda", "functional"],
)
def test_x15_callables_of_all_kinds(backend, device, target):
    """Partials, callable objects, bound methods, builtins and containers of modules are graphed."""
    graphed = graphify(target, backend=backend)
    for x in [t.to(device) for t in rows(3)]:
        equal(target(x), graphed(x))
    assert counts(graphed)[2] == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_x15_scripted_modules(backend, device):
    """A ScriptModule is graphed."""
    module = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(device))
    graphed = graphify(module, backend=backend)
    with torch.no_grad():
        for x in [t.to(device) for t in rows(2, 3)]:
            equal(module(x), graphed(x))


async def coroutine(x: Tensor) -> Tensor:
    await asyncio.sleep(0)
    return x


def generator(x: Tensor) -> Any:
    yield x


async def async_generator(x: Tensor) -> Any:
    yield x


@pytest.mark.parametrize(
    "target", [coroutine, generator, async_generator, functools.partial(generator), 3, Base]
)
def test_x15_what_cannot_be_graphed_is_refused_at_once(target):
    """Coroutines, generators, plain classes and what is not callable are a TypeError at decoration."""
    with pytest.raises(TypeError, match="write:"):
        graphify(target)


def test_x15_a_generator_that_is_returned_is_refused(backend, device):
    """A function that returns a generator or iterator is loud, not captured with an exhausted one."""
    graphed = graphify(lambda x: (y for y in [x + 1]), backend=backend)
    for _ in range(3):
        with pytest.raises(GraphifyError):
            graphed(torch.ones(2, device=device))


def test_x15_results_of_unknown_kinds(backend, device):
    """A new object of an unknown kind at each call is refused by name; one that is always the same comes back."""
    constant = Adds()
    follows_eager([Call((x,)) for x in rows(3)], backend, device, make=lambda: lambda x: (x + 1, Base))
    graphed = graphify(lambda x: (x + 1, Adds()), backend=backend)
    graphed(torch.ones(2, device=device))
    with pytest.raises(CaptureError, match=r"`output\[1\]`"):
        graphed(torch.ones(2, device=device))
    same = graphify(lambda x: (x + 1, constant), backend=backend)
    for x in [t.to(device) for t in rows(3)]:
        assert same(x)[1] is constant
    assert counts(same)[2] == 3
