"""Many threads, many streams, calls inside calls: each caller gets its own answer, and nobody waits for ever."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from checks import counts
from conftest import needs_cuda
from torch import Tensor, nn

from graphify import GraphPool, _whole_step, disabled, graphify, handle
from graphify.backends.cuda import CudaBackend

THREADS = 8
PATIENCE = 120.0


def in_threads(*bodies: Callable[[], object]) -> None:
    """Run each body in a thread of its own, all let go at once; their errors surface, and so does a deadlock."""
    start, errors = threading.Barrier(len(bodies)), []

    def run(body: Callable[[], object]) -> None:
        start.wait(PATIENCE)
        try:
            with torch.no_grad():
                body()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # turns come often: more interleavings, less waiting
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors[0]
    assert not any(thread.is_alive() for thread in threads), "deadlock"


def mlp(device: torch.device, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval().to(device)


def inputs(device: torch.device, seed: int, count: int, batch: int = 3) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 8, generator=source).to(device) for _ in range(count)]


def expected(net: Callable[[Tensor], Tensor], xs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [net(x) for x in xs]


@torch.no_grad()
def test_eight_threads_on_one_wrapper_get_their_own_answers(backend: str, device: torch.device) -> None:
    """8 threads x 100 calls of one wrapper: each result is the caller's own, and every call is counted."""
    net = mlp(device)
    graphed = graphify(net, backend=backend)
    data = [inputs(device, seed, 100) for seed in range(THREADS)]
    want = [expected(net, xs) for xs in data]

    def body(mine: int) -> None:
        got = [graphed(x) for x in data[mine]]  # kept: a later call of any thread must not write into it
        assert all(map(torch.equal, got, want[mine]))

    in_threads(*(lambda mine=mine: body(mine) for mine in range(THREADS)))
    assert counts(graphed) == (1, 1, THREADS * 100 - 2, 0, 0)


def test_threads_with_shapes_of_their_own(backend: str, device: torch.device) -> None:
    """Threads whose signatures differ warm up and capture at the same time, without harm to each other."""
    net = mlp(device)
    graphed = graphify(net, backend=backend)
    data = [inputs(device, seed, 30, batch=seed + 1) for seed in range(THREADS)]
    want = [expected(net, xs) for xs in data]

    def body(mine: int) -> None:
        assert all(torch.equal(graphed(x), y) for x, y in zip(data[mine], want[mine], strict=True))

    in_threads(*(lambda mine=mine: body(mine) for mine in range(THREADS)))
    assert counts(graphed) == (THREADS, THREADS, THREADS * 28, 0, 0)


def test_wrappers_first_called_at_once(backend: str, device: torch.device) -> None:
    """Two wrappers whose first calls, and so whose captures, come at the same moment both work."""
    for round_ in range(10):
        nets = [mlp(device, seed=2 * round_ + i) for i in (0, 1)]
        graphed = [graphify(net, backend=backend) for net in nets]
        data = [inputs(device, 10 * round_ + i, 5) for i in (0, 1)]
        want = [expected(net, xs) for net, xs in zip(nets, data, strict=True)]

        def body(
            i: int,
            graphed: list[nn.Module] = graphed,
            data: list[list[Tensor]] = data,
            want: list[list[Tensor]] = want,
        ) -> None:
            assert all(torch.equal(graphed[i](x), y) for x, y in zip(data[i], want[i], strict=True))

        in_threads(lambda: body(0), lambda: body(1))
        assert [counts(g) for g in graphed] == [(1, 1, 3, 0, 0)] * 2


def test_replays_while_another_thread_captures(backend: str, device: torch.device) -> None:
    """A ready graph, of the same wrapper or another, goes on giving right answers while others are captured."""
    net, other = mlp(device), mlp(device, seed=1)
    graphed, second = graphify(net, backend=backend), graphify(other, backend=backend)
    xs = inputs(device, 1, 60)
    want, want_other = expected(net, xs), expected(other, xs)
    shapes = [inputs(device, n, 3, batch=n) for n in range(4, 24)]
    want_shapes = [expected(net, given) for given in shapes]
    with torch.no_grad():
        for x in xs[:3]:
            graphed(x), second(x)

    def capture() -> None:
        for given, right in zip(shapes, want_shapes, strict=True):
            assert all(torch.equal(graphed(x), y) for x, y in zip(given, right, strict=True))

    def replay(wrapper: nn.Module, right: list[Tensor]) -> None:
        for _ in range(3):
            assert all(torch.equal(wrapper(x), y) for x, y in zip(xs, right, strict=True))

    in_threads(capture, lambda: replay(graphed, want), lambda: replay(second, want_other))
    assert counts(graphed) == (21, 21, 1 + 180 + 20, 0, 0)
    assert counts(second) == (1, 1, 1 + 180, 0, 0)


def test_an_error_in_one_thread_is_its_own(backend: str, device: torch.device) -> None:
    """An exception inside one thread's calls reaches that thread, and no other thread's answer changes."""

    class MineError(Exception):
        pass

    def step(x: Tensor, fail: bool) -> Tensor:
        if fail:
            raise MineError
        return x.sin() * 3

    graphed = graphify(step, backend=backend)
    xs = inputs(device, 3, 50)

    def good() -> None:
        assert all(torch.equal(graphed(x, fail=False), x.sin() * 3) for x in xs)

    def bad() -> None:
        for x in xs:
            with pytest.raises(MineError):
                graphed(x, fail=True)

    in_threads(good, bad, good)
    assert counts(graphed) == (1, 1, 98, 0, 50)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch, in a thread's first eager matmul
def test_modes_belong_to_the_thread(backend: str, device: torch.device) -> None:
    """Autocast, inference mode and `disabled()` of one thread do not leak into the calls of another."""
    net = mlp(device)
    graphed = graphify(net, backend=backend)
    xs = inputs(device, 4, 20)

    def same(eager: Tensor, got: Tensor) -> None:
        assert torch.equal(eager, got)
        assert (got.dtype, got.is_inference()) == (eager.dtype, eager.is_inference())

    def plain() -> None:
        for x in xs:
            same(net(x), graphed(x))

    def cast() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            plain()

    def inferred() -> None:
        with torch.inference_mode():
            plain()

    def off() -> None:
        with disabled():
            plain()

    in_threads(plain, cast, inferred, off)
    assert handle(graphed).stats().reasons == {"disabled": 20}
    assert counts(graphed) == (3, 3, 54, 20, 0)


def test_a_graphed_function_calls_another(backend: str, device: torch.device) -> None:
    """A graphed function inside a graphed function is part of the outer graph, and equals eager."""
    net = mlp(device)
    inner = graphify(net, backend=backend)

    def outer(x: Tensor) -> Tensor:
        return inner(x) + inner(x * 2)

    graphed = graphify(outer, backend=backend)
    with torch.no_grad():
        for x in inputs(device, 5, 6):
            assert torch.equal(graphed(x), net(x) + net(x * 2))
        for x in inputs(device, 6, 6):
            assert torch.equal(inner(x), net(x))
    assert counts(graphed) == (1, 1, 4, 0, 0)
    counts(inner)


def test_a_graphed_function_calls_itself(backend: str, device: torch.device) -> None:
    """Recursion through the wrapper itself ends, and equals eager at every depth."""

    @graphify(backend=backend)
    def power(x: Tensor, n: int) -> Tensor:
        return x if n == 0 else x * power(x + 1, n - 1)

    def plain(x: Tensor, n: int) -> Tensor:
        return x if n == 0 else x * plain(x + 1, n - 1)

    for x in inputs(device, 7, 6):
        for n in (3, 1, 0, 2):
            assert torch.equal(power(x, n), plain(x, n))
    counts(power)
    assert power.stats().errors == 0
    assert power.stats().replays > 0


def test_calls_inside_calls_from_two_sides_do_not_deadlock(backend: str, device: torch.device) -> None:
    """Each of two wrappers calls the other, first from two threads at once: all answers come, and are right."""
    for round_ in range(10):
        nets = [mlp(device, seed=i) for i in (0, 1)]
        inner = [graphify(net, backend=backend) for net in nets]
        outer = [
            graphify(lambda x, first=inner[i], then=inner[1 - i]: first(x) - then(x), backend=backend)
            for i in (0, 1)
        ]
        xs = inputs(device, round_, 6)
        want = [[nets[i](x).detach() - nets[1 - i](x).detach() for x in xs] for i in (0, 1)]

        def body(wrapper: Callable[[Tensor], Tensor], right: list[Tensor], xs: list[Tensor] = xs) -> None:
            assert all(torch.equal(wrapper(x), y) for x, y in zip(xs, right, strict=True))

        with torch.no_grad():
            alone = [expected(net, xs) for net in nets]
        in_threads(
            lambda o=outer, w=want: body(o[0], w[0]),
            lambda o=outer, w=want: body(o[1], w[1]),
            lambda i=inner, a=alone: body(i[0], a[0]),
            lambda i=inner, a=alone: body(i[1], a[1]),
        )


# -- backwards


def test_a_backward_inside_runs_on_the_callers_thread(backend: str, device: torch.device) -> None:
    """Warm-ups and recordings run a backward inside where they are themselves; a caller's own runs as ever."""
    net, mine = mlp(device), threading.get_ident()

    def look(grad: Tensor) -> None:
        assert threading.get_ident() == mine
        assert not torch._C._is_multithreading_enabled()

    def step(x: Tensor) -> Tensor:
        y = net(x)
        y.register_hook(look)
        y.square().mean().backward()
        return y.detach()

    graphed = graphify(step, backend=backend, warmup=2)
    for x in inputs(device, 11, 5):
        net.zero_grad()
        graphed(x)
        assert torch._C._is_multithreading_enabled()
    assert counts(graphed) == (2, 1, 2, 0, 0)


def test_a_step_while_another_thread_is_in_a_backward_of_its_pool(backend: str, device: torch.device) -> None:
    """A whole step and the backward of a graphed module share a pool and a device: neither waits for ever."""
    pool, net, other = GraphPool(), mlp(device), mlp(device, seed=1)
    pair, inside = graphify(other, backend=backend, pool=pool), threading.Event()

    def step(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        time.sleep(0.05)  # the other thread comes to the pool's lock, which this one has
        loss.backward()
        return loss.detach()

    graphed = graphify(step, backend=backend, pool=pool)
    xs = inputs(device, 12, 6)
    with torch.enable_grad():
        for x in xs[:3]:
            pair(x).sum().backward()

    def wait(grad: Tensor) -> None:
        inside.set()
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and pool.lock.acquire(blocking=False):
            pool.lock.release()
            time.sleep(0.001)

    def backward(x: Tensor) -> None:
        with torch.enable_grad():
            y = pair(x) * 1
            y.register_hook(wait)
            y.sum().backward()

    def train(x: Tensor) -> None:
        assert inside.wait(PATIENCE)
        with torch.enable_grad():
            graphed(x)

    for x in xs[3:5]:  # a warm-up, and a recording
        inside.clear()
        net.zero_grad()
        in_threads(lambda x=x: backward(x), lambda x=x: train(x))
    assert counts(graphed) == (1, 1, 0, 0, 0)


def test_a_leafs_node_that_is_about_to_go_is_waited_for() -> None:
    """The wait ends when nobody holds the node any more, and after a moment where somebody goes on holding it."""
    leaf, patience = torch.ones(3, requires_grad=True), _whole_step._PATIENCE
    with torch.inference_mode():
        began = time.monotonic()
        _whole_step._wait_for_nodes_to_go([leaf])
        assert time.monotonic() - began < patience / 2
    held = [leaf * 2]
    began = time.monotonic()
    _whole_step._wait_for_nodes_to_go([leaf])
    assert time.monotonic() - began >= patience
    threading.Timer(patience / 5, held.clear).start()
    _whole_step._wait_for_nodes_to_go([leaf])
    assert not held
    assert not _whole_step._has_node(leaf)


# -- streams


@contextmanager
def slowly(stream: torch.cuda.Stream) -> Iterator[None]:
    """The body's work on a stream starts milliseconds late, so that whoever does not wait reads old memory."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5_000_000)
        yield


cuda = pytest.mark.cuda


@cuda
@needs_cuda
@torch.no_grad()
@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_side_streams_by_turns(outputs: str) -> None:
    """Inputs made by slow kernels on alternating streams, results read there: the order is that of the caller."""
    device = torch.device("cuda")
    net = mlp(device)
    graphed = graphify(net, outputs=outputs)
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()]
    data = inputs(device, 8, 30)
    want = expected(net, data)
    torch.cuda.synchronize()
    got = []
    for i, given in enumerate(data):
        with slowly(streams[i % 3]):
            x = torch.zeros_like(given)
            x.copy_(given)
            got.append(graphed(x).clone())
            x.fill_(torch.nan)  # after the call, on the same stream: the call has read it by then
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, want))
    assert counts(graphed) == (1, 1, 28, 0, 0)


@cuda
@needs_cuda
def test_a_stream_per_thread() -> None:
    """8 threads on streams of their own share one wrapper: replays queue behind each other on the device."""
    device = torch.device("cuda")
    net = mlp(device)
    graphed = graphify(net)
    data = [inputs(device, seed, 100) for seed in range(THREADS)]
    want = [expected(net, xs) for xs in data]
    torch.cuda.synchronize()

    def body(mine: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            got = [graphed(x * 1) for x in data[mine]]
            torch.cuda.current_stream().synchronize()
        assert all(map(torch.equal, got, want[mine]))

    in_threads(*(lambda mine=mine: body(mine) for mine in range(THREADS)))
    assert counts(graphed) == (1, 1, THREADS * 100 - 2, 0, 0)


@cuda
@needs_cuda
def test_b72_captures_while_other_threads_are_busy() -> None:
    """Pinning, event queries, waiting for a stream and allocation in other threads neither break a capture nor die.

    Two things are another matter: waiting for the whole device, which CUDA forbids while any of its streams is
    captured, and drawing from the device's default generator, which before torch 2.12 belongs to the capture.
    """
    device, stop = torch.device("cuda"), threading.Event()
    net = mlp(device)
    graphed = graphify(net)
    shapes = [inputs(device, n, 3, batch=n) for n in range(1, 41)]
    want = [expected(net, xs) for xs in shapes]
    rounds = {"pin": 0, "query": 0, "wait": 0, "allocate": 0}

    def until_stopped(name: str, work: Callable[[], object]) -> None:
        while not stop.is_set():
            work()
            rounds[name] += 1

    def query() -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream())
        event.query()

    def capture() -> None:
        try:
            for xs, right in zip(shapes, want, strict=True):
                assert all(torch.equal(graphed(x), y) for x, y in zip(xs, right, strict=True))
        finally:
            stop.set()

    with torch.cuda.stream(torch.cuda.Stream()):
        in_threads(
            capture,
            lambda: until_stopped(
                "pin", lambda: torch.empty(1 << 16).pin_memory().to(device, non_blocking=True)
            ),
            lambda: until_stopped("query", query),
            lambda: until_stopped("wait", lambda: torch.cuda.current_stream().synchronize()),
            lambda: until_stopped("allocate", lambda: torch.ones(256, 256, device=device).sum()),
        )
    assert all(rounds.values()), rounds
    assert counts(graphed) == (40, 40, 40, 0, 0)


@cuda
@needs_cuda
@torch.no_grad()
@pytest.mark.parametrize("calls_before", [0, 1, 5])
def test_inside_the_callers_own_capture(calls_before: int) -> None:
    """In somebody else's `torch.cuda.graph` the plain function runs and becomes part of their graph."""
    device = torch.device("cuda")
    net = mlp(device)
    graphed = graphify(net)
    static, *others = inputs(device, 9, 8)
    for x in others[:calls_before]:
        graphed(x)
    net(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = graphed(static)
    for x in others:
        static.copy_(x)
        graph.replay()
        assert torch.equal(out, net(x))
        assert torch.equal(graphed(x), net(x))
    assert handle(graphed).stats().reasons == {"nested": 1}


@cuda
@needs_cuda
@torch.no_grad()
def test_a_function_with_a_stream_of_its_own_inside() -> None:
    """A fork to a side stream and back, inside the function, is captured with its order."""
    device = torch.device("cuda")
    side = torch.cuda.Stream()

    def step(x: Tensor) -> Tensor:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            left = (x @ x.T).sin()
        right = (x @ x.T).cos()
        here.wait_stream(side)
        left.record_stream(here)
        return left + right

    graphed = graphify(step)
    for x in inputs(device, 10, 10, batch=64):
        assert torch.equal(graphed(x), step(x))
    assert counts(graphed) == (1, 1, 8, 0, 0)


@cuda
@needs_cuda
@torch.no_grad()
def test_results_are_handed_to_the_callers_stream_without_lazy_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one set, torch's `record_stream` damages the host's heap, and the process dies later."""
    seen: list[tuple[bool, bool, int]] = []
    monkeypatch.setattr(
        Tensor, "record_stream", lambda t, stream: seen.append((t.is_conj(), t.is_neg(), t.data_ptr()))
    )
    z = torch.randn(3, dtype=torch.complex64, device="cuda")
    made = [z, z.conj(), z.conj().imag]
    assert (made[1].is_conj(), made[2].is_neg()) == (True, True)
    CudaBackend().hand_over(made)
    assert seen == [(False, False, t.data_ptr()) for t in made]
