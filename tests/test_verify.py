"""`verify=n`: the first replays of each graph beside eager, without trace, with the likely cause of a difference."""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from checks import counts, equal, follows_eager, python, reader, rows
from torch import Tensor, nn

from graphify import GraphPool, VerificationError, graphify, handle
from graphify._graph import Graph
from graphify._instances import graphs_of
from graphify._verify import Verified
from graphify.testing import Call


class Settings:
    """Read by what names it, and by what does not."""

    def __init__(self) -> None:
        self.scale = 2.0


def verifying(graphed: Any) -> list[bool]:
    entries = handle(graphed)._life.entries
    found = [g for e in entries.ready for g in graphs_of(e.graph)]
    fits = [made for g in found for made in g.fits.values()]
    return [isinstance(g, Verified) for g in fits or found]


# -- calls that are right


def test_right_calls_are_what_they_are_without(backend, device):
    """State, arguments, random streams and statistics move once per call, verified or not."""
    weight = torch.randn(4, device=device)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("steps", torch.zeros((), device=device))

        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            self.steps += 1
            cache.add_(x.sum())
            self.last = x * self.steps
            return self.norm(x) + torch.rand_like(x) * weight, cache

    calls = [(torch.randn(3, 4), torch.randn(2)) for _ in range(6)]
    with torch.no_grad():
        follows_eager(calls, backend, device, make=lambda: Net().to(device), verify=3)


def test_verified_replays_leave_the_path(backend, device):
    """After n replays a graph is a plain one: nothing of the check is left on the call path."""
    graphed = graphify(lambda x: x * 2, backend=backend, verify=2)
    seen = []
    for x in rows(3, count=6):
        equal(x.to(device) * 2, graphed(x.to(device)))
        seen.append(verifying(graphed))
    assert seen == [[], [True], [True], [False], [False], [False]]
    (graph,) = graphs_of(handle(graphed)._life.entries.ready[0].graph)
    assert type(graph) is Graph
    assert not hasattr(graph, "verifier")
    assert counts(graphed) == (1, 1, 4, 0, 0)


def test_training_pairs_are_verified(backend, device):
    """Forward and backward of a training pair are compared; gradients are those of eager, each backward runs once."""
    net = nn.Linear(4, 2).to(device)
    twin, graphed = nn.Linear(4, 2).to(device), graphify(net, backend=backend, verify=3)
    twin.load_state_dict(net.state_dict())
    for x in rows(3, 4, count=6):
        twin(x.to(device)).square().sum().backward()
        graphed(x.to(device)).square().sum().backward()
        equal(twin.weight.grad, net.weight.grad)
    assert counts(graphed)[4] == 0


class Doubles(torch.autograd.Function):
    """Its backward counts itself, on the device, and multiplies by what only Python holds."""

    factor: Callable[[], float]

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        ctx.total = total
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.total.add_(1)
        return grad * Doubles.factor(), None


class Trains(nn.Module):
    """Several results, views of one among them, dropout, and a backward that writes memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("total", torch.zeros(()))
        self.seen: list[str] = []
        note = self.seen.append
        self.first.weight.register_hook(lambda grad: note("tensor") or grad * 2)
        self.second.weight.register_post_accumulate_grad_hook(lambda weight: note("accumulated"))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = nn.functional.dropout(self.first(x), 0.5)
        low, high = hidden.chunk(2)
        return low, high, Doubles.apply(self.second(hidden), self.total)


@pytest.mark.parametrize("loss", ["all", "some", "in turn"])
def test_a_verified_backward_leaves_no_trace(backend, device, loss):
    """Hooks run, `.grad` adds up, a backward writes and random streams move as without, whatever is differentiated."""
    Doubles.factor = staticmethod(lambda: 2.0)

    def run(**options: Any) -> list[Any]:
        torch.manual_seed(5)
        net = Trains().to(device)
        graphed = graphify(net, backend=backend, **options) if options else net
        left: list[Any] = []
        for x in rows(4, 4, count=7):
            x = x.to(device).requires_grad_()
            x.retain_grad()
            low, high, out = graphed(x)
            if loss == "in turn":
                low.sum().backward(retain_graph=True)
                (high.square().sum() + out.sum()).backward()
            else:
                ((low * 2).sum() + out.square().sum() * (loss == "all")).backward()
            left += [low.detach(), out.detach(), x.grad, net.total.clone(), list(net.seen)]
            left += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        assert not options or counts(graphed)[4] == 0
        return [*left, torch.rand(3, device=device)]

    for mine, theirs in zip(run(), run(verify=4), strict=True):
        equal(mine, theirs)


def test_several_forwards_before_the_backwards_are_verified(backend, device):
    """Instances that wait for their backwards are compared one by one, and keep what they hold."""
    net = nn.Linear(4, 2).to(device)
    graphed = graphify(net, backend=backend, verify=3)
    for _ in range(4):
        xs = [t.to(device).requires_grad_() for t in rows(3, 4, count=3)]
        ys = [graphed(x) for x in xs]
        for x, y in zip(reversed(xs), reversed(ys), strict=True):
            (grad,) = torch.autograd.grad(y.square().sum(), x)
            (want,) = torch.autograd.grad(net(x).square().sum(), x)
            equal(want, grad)
    assert counts(graphed)[4] == 0


@pytest.mark.parametrize("kind", ["argument", "parameter"])
@pytest.mark.parametrize("loss", ["sum", "square"])
def test_a_gradient_that_is_not_eagers_is_found(kind, loss):
    """A backward that Python takes part in, and that a recording repeats, is an error that names the gradient."""
    settings = Settings()
    get = reader("scale")
    Doubles.factor = staticmethod(lambda: get(settings))
    net, total = nn.Linear(4, 2, bias=False), torch.zeros(())
    graphed = graphify(lambda x: Doubles.apply(net(x), total), backend="tape", verify=9)

    def step() -> None:
        y = graphed(torch.randn(3, 4, requires_grad=kind == "argument"))
        (y if loss == "sum" else y.square()).sum().backward()

    for _ in range(4):
        step()
    settings.scale = 3.0
    held, before = net.weight.grad.clone(), total.clone()
    for errors in (1, 2):
        with pytest.raises(VerificationError) as raised:
            step()
        name = "argument `x`" if kind == "argument" else "`net.weight`"
        assert f"the gradient of {name}: smallest difference at" in str(raised.value)
        assert "Python takes part in the backward" in raised.value.why
        assert raised.value.fix
        assert counts(graphed) == (1, 1, 2, 0, errors)
    equal(held, net.weight.grad)
    equal(before, total)
    settings.scale = 2.0
    step()
    assert counts(graphed) == (1, 1, 3, 0, 2)


def test_whole_steps_are_verified(backend, device):
    """A step's parameters, optimizer state and `.grad` are compared; each step is taken once."""

    def run(options: dict[str, Any] | None) -> list[Tensor]:
        torch.manual_seed(7)
        net = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        called = step if options is None else graphify(step, backend=backend, **options)
        losses = [called(torch.randn(3, 4).to(device)) for _ in range(8)]
        return [*losses, net.weight.detach(), net.weight.grad, optimizer.state[net.weight]["momentum_buffer"]]

    for mine, theirs in zip(run(None), run({"verify": 4}), strict=True):
        equal(mine, theirs)


@pytest.mark.parametrize("grad", [False, True])
def test_buckets_are_verified(backend, device, grad):
    """Calls of all sizes are compared with eager at their own size; sizes of one bucket share the count."""
    net = nn.Linear(4, 2).to(device)
    graphed = graphify(net, backend=backend, buckets=[2, 4, 8], verify=3)
    with torch.set_grad_enabled(grad):
        for n in [8, 8, 5, 7, 8, 6, 5, 1, 2, 1]:
            x = torch.randn(n, 4, device=device)
            torch.testing.assert_close(graphed(x), net(x))
    assert counts(graphed)[4] == 0
    if not grad:
        assert not all(verifying(graphed))


def test_random_numbers_in_buckets_are_not_compared(backend, device):
    """Padded rows draw numbers too, so a cut run cannot equal eager: such calls are let through."""
    graphed = graphify(lambda x: x + torch.rand_like(x), backend=backend, buckets=[4], verify=8)
    for n in (3, 3, 3, 2, 4):
        x = torch.zeros(n, device=device)
        assert ((graphed(x) >= 0) & (graphed(x) < 1)).all()


def test_capture_ahead_of_time_is_verified_from_the_first_call(backend, device):
    """A graph that was captured ahead is compared from its first replay on."""
    settings = Settings()
    get = reader("scale")
    graphed = graphify(lambda x: x * get(settings), backend=backend, verify=1)
    graphed.capture(torch.ones(3, device=device))
    settings.scale = 3.0
    if backend == "eager":
        return
    with pytest.raises(VerificationError):
        graphed(torch.ones(3, device=device))


def test_nothing_outlives_the_check(device):
    """A verified graph keeps no instance alive and is freed without the garbage collector."""

    class Net:
        def __init__(self) -> None:
            self.parent = self.weights = torch.ones(3)

        @graphify(backend="tape", verify=100)
        def step(self, x: Tensor) -> Tensor:
            return x * self.weights

    net = Net()
    for _ in range(4):
        net.step(torch.ones(3))
    (graph,) = graphs_of(handle(net.step)._life.entries.ready[0].graph)
    gone = weakref.ref(net), weakref.ref(graph)
    del net, graph
    assert [ref() for ref in gone] == [None, None]


# -- replays that are wrong


Cheat = tuple[Callable[[Tensor], Any], Callable[[], None], str, str]


def baked_attribute() -> Cheat:
    """A read by a name that no bytecode shows."""
    settings, get = Settings(), reader("scale")
    return (
        lambda x: x * get(settings),
        lambda: setattr(settings, "scale", 3.0),
        "`output`: smallest difference at",
        "a baked scalar: `settings.scale` is 3.0, and was 2.0 at the capture",
    )


def rebound_tensor() -> Cheat:
    """In a list that no name leads to."""
    settings, get = Settings(), reader("weights")
    settings.weights = [torch.ones(3)]  # type: ignore[attr-defined]
    return (
        lambda x: x * get(settings)[0],
        lambda: operator.setitem(get(settings), 0, torch.full((3,), 3.0)),
        "`output`: smallest difference at",
        "`settings.weights[0]` is re-bound since the capture",
    )


def rebound_word() -> Cheat:
    settings, get = Settings(), reader("mode")
    settings.mode = "sin"  # type: ignore[attr-defined]
    return (
        lambda x: x.sin() if get(settings) == "sin" else x.cos(),
        lambda: setattr(settings, "mode", "cos"),
        "`output`: smallest difference at",
        "host state: `settings.mode` changed since the capture",
    )


def counter_in_c() -> Cheat:
    turns: SimpleQueue[float] = SimpleQueue()
    for i in range(99):
        turns.put(float(i))
    return (
        lambda x: x * turns.get(),
        lambda: None,
        "`output`: smallest",
        "host state: eager itself gives another",
    )


def constant_result() -> Cheat:
    settings, get = Settings(), reader("scale")
    return (
        lambda x: (x + 1, get(settings)),
        lambda: setattr(settings, "scale", 3.0),
        "`output[1]` is 2.0 replayed, 3.0 in eager",
        "a baked scalar",
    )


def hidden_operator() -> Cheat:
    def f(x: Tensor) -> Tensor:
        with torch._C._DisableTorchDispatch():
            y = x * 2
        return y + 1

    return f, lambda: None, "`output`: smallest difference at", "some of the work is not in the recording"


def hidden_write() -> Cheat:
    state = torch.zeros(3)

    def f(x: Tensor) -> Tensor:
        with torch._C._DisableTorchDispatch():
            state.add_(1)
        return x + state

    return f, lambda: None, "`output`: smallest difference at", "some of the work is not in the recording"


def copy_in_c() -> Cheat:
    """What an extension does: a kernel on addresses."""
    memory = torch.zeros(3)

    def f(x: Tensor) -> Tensor:
        ctypes.memmove(memory.data_ptr(), x.data_ptr(), x.nbytes)
        return memory * 2

    return f, lambda: None, "`output`: smallest difference at", "some of the work is not in the recording"


def argument_behind_its_back() -> Cheat:
    """An argument that is written through its address."""

    def f(x: Tensor) -> Tensor:
        y = x + 1
        ctypes.memset(x.data_ptr(), 0, x.nbytes)
        return y

    return f, lambda: None, "argument `x`: smallest difference at", "some of the work is not in the recording"


def attribute_now_and_then() -> Cheat:
    settings, get = Settings(), reader("scale")

    def f(x: Tensor) -> Tensor:
        if get(settings) == 3.0:
            settings.seen = x + 1  # type: ignore[attr-defined]
        return x + 1

    return (
        f,
        lambda: setattr(settings, "scale", 3.0),
        "`settings.seen`: left as it was by the replay, as a Tensor by eager",
        "a baked scalar",
    )


def draws_now_and_then() -> Cheat:
    settings, get = Settings(), reader("scale")

    def f(x: Tensor) -> Tensor:
        if get(settings) == 3.0:
            torch.rand(3)
        return x + 1

    return (
        f,
        lambda: setattr(settings, "scale", 3.0),
        "the random stream of cpu is at another place",
        "a baked scalar",
    )


CHEATS = [
    baked_attribute, rebound_tensor, rebound_word, counter_in_c, constant_result, hidden_operator, hidden_write, copy_in_c,
    argument_behind_its_back, attribute_now_and_then, draws_now_and_then,
]  # fmt: skip


@pytest.mark.parametrize("make", CHEATS, ids=lambda make: make.__name__)
def test_what_cheats_the_watch_is_found(make):
    """A replay that is not eager's is an error with path, numbers and cause; the call has not happened."""
    function, change, what, why = make()
    graphed = graphify(function, backend="tape", verify=2)
    with torch.no_grad():
        for x in rows(3, count=2):
            graphed(x)
        change()
        x = torch.randn(3)
        held, streams = x.clone(), torch.get_rng_state()
        for errors in (1, 2):
            with pytest.raises(VerificationError) as raised:
                graphed(x)
            assert what in str(raised.value)
            assert why in raised.value.why
            assert raised.value.fix
            assert counts(graphed) == (1, 1, 0, 0, errors)
        assert torch.equal(x, held)
        assert torch.equal(torch.get_rng_state(), streams)


def test_the_same_cheats_are_silent_without(device):
    """What `verify` finds is nothing that a guard would have found."""
    for make in (baked_attribute, hidden_operator, copy_in_c):
        function, change, _, _ = make()
        graphed = graphify(function, backend="tape")
        xs = rows(3, count=3)
        graphed(xs[0])
        graphed(xs[1])
        change()
        assert not torch.equal(graphed(xs[2]), function(xs[2]))


def test_state_is_as_before_after_a_difference():
    """Buffers, attributes and earlier results are untouched by the call that was refused."""
    settings, get = Settings(), reader("scale")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            y = x * get(settings)
            self.left = y
            return y + self.steps

    net = Net()
    graphed = graphify(net, backend="tape", verify=9)
    for x in rows(3, count=4):
        graphed(x)
    left = net.left
    settings.scale = 3.0
    with pytest.raises(VerificationError):
        graphed(torch.ones(3))
    assert torch.equal(net.steps, torch.full((3,), 4.0))
    assert net.left is left
    settings.scale = 2.0
    assert torch.equal(graphed(torch.ones(3)), torch.full((3,), 7.0))


def test_gradients_of_a_step_are_compared():
    """A `.grad` that a replay leaves otherwise is named."""
    net, settings, get = nn.Linear(3, 1, bias=False), Settings(), reader("scale")

    def step(x: Tensor) -> Tensor:
        net.zero_grad()
        (net(x).sum() * get(settings)).backward()
        return x + 1

    graphed = graphify(step, backend="tape", verify=3)
    for x in rows(2, 3, count=4):
        graphed(x)
    settings.scale = 3.0
    with pytest.raises(VerificationError, match=r"net\.weight\.grad|from outside"):
        graphed(torch.ones(2, 3))


def test_an_eager_run_that_rounds_differently_each_time_is_compared_loosely():
    """Where eager is not bit-equal to itself, a replay needs to be near only, and the call's result is a replay's."""
    noise: SimpleQueue[float] = SimpleQueue()
    for i in range(99):
        noise.put(1 + i * 1e-7)
    graphed = graphify(lambda x: x * noise.get(), backend="tape", verify=2)
    for x in rows(3, count=6):
        torch.testing.assert_close(graphed(x), x, rtol=1e-4, atol=1e-4)
    assert counts(graphed) == (1, 1, 4, 0, 0)


def test_large_memory_is_said_to_be_left_out():
    """What no copy is made of cannot be verified: said once, and the call is a replay."""
    cache = torch.zeros(257 << 20, dtype=torch.uint8)
    graphed = graphify(lambda x: cache[:3].add_(x) + 1, backend="tape", verify=2)
    with pytest.warns(UserWarning, match="is not verified: it writes tensors above 256 MiB"):
        for _ in range(4):
            graphed(torch.ones(3, dtype=torch.uint8))
    assert cache[:3].tolist() == [4, 4, 4]


# -- options


@pytest.mark.parametrize(
    ("value", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), ("2", TypeError)]
)
def test_wrong_counts(value, error):
    """The option is a count."""
    with pytest.raises(error, match="verify must be"):
        graphify(lambda x: x, verify=value)


PROGRAM = """
import ctypes, torch
from graphify import graphify
settings = type("Settings", (), {"scale": 2.0})
read = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_char_p)(("PyObject_GetAttrString", ctypes.pythonapi))
f = graphify(lambda x: x * read(settings, b"scale"), backend="tape")
for _ in range(2):
    f(torch.ones(3))
settings.scale = 3.0
print(f(torch.ones(3)))
"""


def test_the_environment_asks_for_it():
    """GRAPHIFY_VERIFY=n verifies code that nobody edits; nonsense there is said at once."""
    found = python("-c", PROGRAM, GRAPHIFY_VERIFY="1")
    assert (
        "VerificationError: `<lambda>`: `output`: smallest difference at [0]: 2 replayed, 3 in eager"
        in found.stderr
    )
    assert "a baked scalar: `settings.scale` is 3.0" in found.stderr
    assert "GRAPHIFY_VERIFY is the number of replays" in python("-c", PROGRAM, GRAPHIFY_VERIFY="yes").stderr


def test_pools_and_calls_by_keyword(backend, device):
    """Wrappers that share a pool and calls in keyword form are verified like any other."""
    pool = GraphPool()
    one = graphify(lambda x, *, k=1.0: x + k, backend=backend, pool=pool, verify=2)
    two = graphify(lambda x: one(x, k=2.0) * 2, backend=backend, pool=pool, verify=2)
    for x in rows(3, count=5):
        x = x.to(device)
        equal(x + 3.0, one(x=x, k=3.0))
        equal((x + 2.0) * 2, two(x))
    follows_eager([Call((x,)) for x in rows(3)], backend, device, target=lambda x: x.cos(), verify=1)


def test_static_outputs_as_arguments(backend, device):
    """A static output that is the next call's argument is read before its loan ends, verified or not."""
    graphed = graphify(lambda x, y: (x + 1, y.add_(1)), backend=backend, outputs="static", verify=9)
    x, y = torch.zeros(3, device=device), torch.zeros(3, device=device)
    for n in range(1, 7):
        x, y = graphed(x, y)
        equal(torch.full((3,), float(n), device=device), x.clone())
        equal(x.clone(), y)
    assert counts(graphed) == (1, 1, 4, 0, 0)


@pytest.mark.parametrize("check", [False, "outputs"])
def test_padding_that_may_matter_is_not_compared(check):
    """What `check_padding` leaves out, `verify` leaves out, too: results, or memory that padding may write."""
    cache = torch.zeros(4)

    def f(x: Tensor) -> Tensor:
        if check:
            cache.index_add_(0, torch.arange(x.shape[0]), x + 1)
            return x * 2
        return x - x.max()

    graphed = graphify(f, backend="tape", buckets=[4], verify=9, check_padding=check, pad=9.0)
    for n in (3, 3, 3, 4, 2, 2):
        graphed(torch.ones(n))
    assert counts(graphed)[4] == 0
