"""Cases E: failed captures, lifetimes, streams, threads, memory."""

from __future__ import annotations

import ctypes
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from checks import counts, equal, follows_eager, rows
from conftest import needs_cuda
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from graphify import CaptureError, GraphifyError, GraphifyWarning, VerificationError, graphify, handle
from graphify.testing import Call

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

SYNCS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x * x[0].item(),
    "tolist": lambda x: x * x.tolist()[0],
    "bool": lambda x: x if bool((x > 0).any()) else -x,
    "float": lambda x: x * float(x[0]),
    "int": lambda x: x * int(x[0]),
    "if": lambda x: x * 2 if x.sum() > 0 else x - 1,
    "nonzero": lambda x: x.nonzero().float(),
    "where": lambda x: torch.where(x > 0)[0],
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.int64)),
    "print": lambda x: x + len(repr(x)) * 0,
    "equal": lambda x: x if torch.equal(x, x) else -x,
    "allclose": lambda x: x if torch.allclose(x, x) else -x,
    "in": lambda x: x if 1.0 in x else -x,
    "numpy": lambda x: x * float(x.detach().cpu().numpy()[0]),
    "index by tensor": lambda x: x[: x.abs().long()[0]],
    "range": lambda x: sum((x for _ in range(x.abs().long()[0])), x),
    "linalg": lambda x: torch.linalg.inv(torch.eye(4, device=x.device) * 2) @ x,
    "bincount": lambda x: torch.bincount(x.abs().long()),
    "cpu": lambda x: x + x.cpu().to(x.device),
}


@pytest.mark.parametrize("name", SYNCS)
def test_b74_host_reads_are_refused_with_the_line(backend, device, name):
    """Each way to wait for the device raises a CaptureError with the user's line, and the next capture works."""
    if backend != "cuda" and name == "cpu":
        pytest.skip("a copy to the CPU is none on a CPU")
    if name == "numpy":
        pytest.importorskip("numpy")
    f = SYNCS[name]
    graphed = graphify(f, backend=backend)
    for i in range(3):
        with pytest.raises(CaptureError) as raised:
            graphed(torch.randn(4, device=device) + i)
        assert __file__ in (raised.value.where or "")
        assert raised.value.fix
    follows_eager([(x,) for x in rows(4)], backend, device, target=lambda x: x + 1)


@pytest.mark.parametrize("name", ["item", "mask", "unique", "if", "print"])
def test_b74_host_reads_run_eagerly_when_allowed(backend, device, name):
    """With fallback="eager" such calls equal eager, warn once and are counted."""
    f = SYNCS[name]
    graphed = graphify(f, backend=backend, fallback="eager")
    with pytest.warns(GraphifyWarning) as seen:
        for x in [t.to(device) for t in rows(4)]:
            equal(f(x), graphed(x))
    assert len(seen) == 1
    assert counts(graphed)[1:3] == (0, 0)


def library_mask(t: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t[m] = t[m] * 0 - 1
    return t


def test_b75_mask_hidden_in_a_helper(backend, device):
    """The message names the helper's own line; the form with torch.where is captured."""
    graphed = graphify(lambda x: library_mask(x, x > 0) + 1, backend=backend)
    with pytest.raises(CaptureError, match="torch.where") as raised:
        graphed(torch.randn(4, device=device))
    assert "t[m] = " in (raised.value.where or "")
    follows_eager([(x,) for x in rows(4)], backend, device, target=lambda x: torch.where(x > 0, -1, x) + 1)


def test_b75_constant_stores_by_mask_are_graphs(backend, device):
    """`t[mask] = number` has a fixed size and is captured."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[x > 0] = 7.0
        return y.masked_fill(x < -1, 0)

    follows_eager([(x,) for x in rows(6)], backend, device, target=f)


@pytest.mark.cuda
@needs_cuda
def test_b76_cpu_tensor_made_inside():
    """A CPU tensor made inside and copied to the device is refused with its line; made with `device=` it is fine."""
    for f in (
        lambda x: x * torch.arange(3).to(x.device),
        lambda x: x * torch.tensor([1.0, 2.0, 3.0]).to(x.device),
    ):
        graphed = graphify(f)
        with pytest.raises(CaptureError, match="CPU tensor"):
            for _ in range(2):
                graphed(torch.ones(3, device="cuda"))
        soft = graphify(f, fallback="eager")
        with pytest.warns(GraphifyWarning, match="CPU tensor"):
            for x in rows(3):
                equal(f(x.cuda()), soft(x.cuda()))
    follows_eager(
        [(x,) for x in rows(3)],
        "cuda",
        torch.device("cuda"),
        target=lambda x: x * torch.arange(3, device=x.device),
    )


def test_b76_tensors_made_inside(backend, device):
    """Tensors made inside on the right device are the graph's own."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(3, device=x.device)
        y += torch.arange(3, device=x.device) + torch.full_like(x, 2.0)
        return x * y

    follows_eager([(x,) for x in rows(3)], backend, device, target=f)


def test_b77_branch_on_an_attribute(backend, device):
    """A branch on a Python attribute follows the attribute."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flag = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if self.flag else x - 1

    flip = lambda m: setattr(m, "flag", not m.flag)
    calls = [Call((x,), before=flip if i % 3 == 0 else None) for i, x in enumerate(rows(3, count=12))]
    stats = follows_eager(calls, backend, device, make=Branch, replays=8)
    assert stats.captures == 2


def counted_compile() -> tuple[Any, list[int]]:
    """A compiled function, and a list that grows with each time it is compiled."""
    runs: list[int] = []

    def compiler(gm: Any, _: Any) -> Any:
        runs.append(1)
        return gm.forward

    f = torch.compile(lambda x: (x * 2).relu(), backend=compiler, dynamic=False)
    return f, runs


def test_b78_compiled_function_inside(backend, device):
    """A torch.compile'd function is compiled in the warm-up, replayed after, and still compiled outside."""
    f, runs = counted_compile()
    graphed = graphify(f, backend=backend)
    for shape in ((3,), (4,)):
        for x in [t.to(device) for t in rows(*shape)]:
            equal((x * 2).relu(), graphed(x))
    assert counts(graphed) == (2, 2, 6, 0, 0)
    assert len(runs) == 2
    torch.compiler.reset()


def test_b78_compiled_function_is_not_compiled_again_outside(backend, device):
    """A compiled function that was used inside a graph runs outside without being compiled anew, and the reverse."""
    f, runs = counted_compile()
    graphed = graphify(f, backend=backend)
    for x in [t.to(device) for t in rows(3)]:
        equal((x * 2).relu(), f(x))
        equal((x * 2).relu(), graphed(x))
    torch.compiler.reset()
    assert len(runs) == 1


def test_b78_compile_around_a_graphed_function(backend, device):
    """torch.compile around a graphed function traces the plain function."""
    graphed = graphify(lambda x: x.sin() + 1, backend=backend)
    compiled = torch.compile(lambda x: graphed(x) * 2, backend="eager")
    for x in [t.to(device) for t in rows(3)]:
        equal((x.sin() + 1) * 2, compiled(x))
    for x in [t.to(device) for t in rows(3)]:
        equal(x.sin() + 1, graphed(x))
    torch.compiler.reset()


class Adder:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


KINDS: dict[str, Callable[[str], Any]] = {
    "function": lambda backend: graphify(lambda x: x + 1, backend=backend),
    "module": lambda backend: graphify(nn.Linear(3, 3), backend=backend),
    "object": lambda backend: graphify(Adder(), backend=backend),
    "static": lambda backend: graphify(lambda x: x + 1, backend=backend, outputs="static"),
    "buckets": lambda backend: graphify(lambda x: x + 1, backend=backend, buckets=[2, 4]),
    "auto": lambda backend: graphify(lambda x: x + 1, backend=backend, buckets="auto"),
    "verify": lambda backend: graphify(lambda x: x + 1, backend=backend, verify=1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("used", [0, 1, 2, 5])
def test_b79_no_reference_cycles(backend, device, kind, used):
    """A wrapper dies with its last reference, without the garbage collector, at any point of its life."""
    graphed = KINDS[kind](backend)
    if isinstance(graphed, nn.Module):
        graphed.to(device)
    with torch.no_grad():
        for x in [t.to(device) for t in rows(2, 3, count=used)]:
            graphed(x)
    alive = weakref.ref(graphed)
    runner = weakref.ref(handle(graphed))
    gc.collect()
    gc.disable()
    try:
        del graphed
        assert alive() is None
        assert runner() is None
    finally:
        gc.enable()


def test_b79_collector_state_is_kept(backend, device):
    """The garbage collector is on, or off, after a capture as before, also when the capture failed."""
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        try:
            graphed = graphify(lambda x: x + 1, backend=backend)
            for x in [t.to(device) for t in rows(3)]:
                graphed(x)
            assert gc.isenabled() is on
            bad = graphify(SYNCS["item"], backend=backend)
            with pytest.raises(CaptureError):
                bad(torch.ones(4, device=device))
            assert gc.isenabled() is on
        finally:
            gc.enable()


class Fails(nn.Module):
    """Raises the user's own error on the calls named."""

    def __init__(self, when: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.when = when
        self.ready = True
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        self.total.add_(1)
        y = torch.nn.functional.dropout(self.lin(x), 0.5)
        if number in self.when:
            raise ValueError(f"mine {number}")
        return y + self.total


@pytest.mark.parametrize("when", [(0,), (1,), (2,), (0, 1), (1, 2, 3)])
def test_b80_users_own_error_at_any_call(backend, device, when):
    """The user's error surfaces unchanged from any call, state moves as in eager, and later calls work."""
    calls = []
    for i, x in enumerate(rows(2, 3, count=9)):
        calls.append(Call((x, 99 if i not in when else i)))
    follows_eager(calls, backend, device, make=lambda: Fails(when), replays=9 - 2 - len(when))


def test_b80_error_in_the_capturing_call(backend, device):
    """An error raised only while capturing surfaces as it is, leaves no trace, and does not come at every call."""
    total = torch.zeros(3, device=device)

    def f(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        y = x + total + torch.rand_like(x)
        if handle(graphed)._backend.busy():
            raise ValueError("mine")
        return y

    graphed = graphify(f, backend=backend)
    expected, raised = 0, 0
    for x in [t.to(device) for t in rows(3, count=14)]:
        state = torch.get_rng_state() if backend != "cuda" else torch.cuda.get_rng_state()
        try:
            graphed(x)
        except ValueError as error:
            assert str(error) == "mine"  # noqa: PT017
            equal(state, torch.get_rng_state() if backend != "cuda" else torch.cuda.get_rng_state())
            raised += 1
        else:
            expected += 1
        equal(torch.full((3,), float(expected), device=device), total)
    assert 1 <= raised <= 3
    assert counts(graphed)[4] == raised


def test_b80_refused_warm_up_leaves_no_trace(backend, device):
    """A call that is refused with an error has moved neither state nor random streams."""
    module = nn.BatchNorm1d(3, momentum=None).to(device)
    graphed = graphify(module, backend=backend)
    before, rng = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    with pytest.raises(CaptureError), torch.no_grad():
        graphed(torch.randn(4, 3, device=device))
    equal(before, dict(module.state_dict()))
    torch.set_rng_state(rng)


def test_b80_refusal_is_remembered(backend, device):
    """A signature that was refused is not tried again at each call; other signatures and wrappers work on."""

    def f(x: torch.Tensor, bad: bool) -> torch.Tensor:
        if bad:
            return x * x[0].item()
        return x + 1

    graphed, other = (
        graphify(f, backend=backend, fallback="eager"),
        graphify(lambda x: x - 1, backend=backend),
    )
    with pytest.warns(GraphifyWarning):
        for x in [t.to(device) for t in rows(3, count=6)]:
            equal(f(x, bad=True), graphed(x, bad=True))
            equal(f(x, bad=False), graphed(x, bad=False))
            equal(x - 1, other(x))
    assert graphed.stats().recordings == 1
    assert counts(graphed)[2] == 4
    assert counts(other)[2] == 4


def test_b81_out_of_memory_while_capturing(backend, device):
    """Out of memory in a capture: once more in a new pool, then it surfaces without trace, and a later call captures."""
    trouble: SimpleQueue[int] = SimpleQueue()  # which nothing puts back

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if not trouble.empty() and trouble.get():
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return y

    graphed = graphify(f, backend=backend)
    graphed(torch.ones(3, device=device))
    trouble.put(1)
    trouble.put(1)
    with pytest.raises(torch.OutOfMemoryError):
        graphed(torch.ones(3, device=device))
    graphed(torch.ones(3, device=device))
    trouble.put(1)
    equal(torch.full((3,), 2.0, device=device), graphed(torch.ones(3, device=device)))
    assert counts(graphed) == (2, 1, 0, 0, 1)
    for x in [t.to(device) for t in rows(3)]:
        equal(x + 1, graphed(x))


def test_b82_cache_is_bounded(backend, device):
    """Many shapes in turn keep at most max_graphs graphs, stay right and do not capture for ever."""
    graphed = graphify(lambda x: x * 2 + 1, backend=backend, max_graphs=4)
    captures = []
    for _ in range(8):
        for n in range(1, 13):
            x = torch.randn(n, device=device)
            equal(x * 2 + 1, graphed(x))
            assert len(graphed.graphs) <= 4
        captures.append(counts(graphed)[1])
    assert captures[-1] - captures[-4] <= 20
    assert graphed.stats().reasons["evicted"] > 20


def test_b83_results_outlive_eviction(backend, device):
    """Results of an evicted graph keep their numbers, and the graphs that stay are right."""
    w = torch.randn(4, 4, device=device)
    graphed = graphify(lambda x: x @ w, backend=backend, max_graphs=2)
    kept = []
    for _ in range(4):
        for n in (1, 2, 3):
            for x in [t.to(device) for t in rows(n, 4, count=3)]:
                kept.append((x @ w, graphed(x)))
                for want, got in kept:
                    equal(want, got)
    assert counts(graphed)[2] > 0


@pytest.mark.cuda
@needs_cuda
def test_b84_workspaces_do_not_grow_with_captures():
    """Twenty shapes of one linear layer cost buffers, not a workspace each."""
    layer = nn.Linear(64, 64, device="cuda")
    graphed = graphify(layer)
    sizes = []
    with torch.no_grad():
        for n in range(1, 21):
            for _ in range(3):
                graphed(torch.randn(n, 64, device="cuda"))
            torch.cuda.synchronize()
            sizes.append(torch.cuda.memory_allocated())
    assert sizes[-1] - sizes[1] < 8 * 2**20


@pytest.mark.parametrize("how", ["del", "reset"])
def test_b87_memory_goes_with_the_wrapper(backend, device, how):
    """Static inputs and graph memory go with the wrapper or at reset(), and the module stays usable."""
    module = nn.Linear(3, 3).to(device)
    graphed = graphify(module, backend=backend)
    with torch.no_grad():
        for x in [t.to(device) for t in rows(2, 3)]:
            y = graphed(x)
        graph = weakref.ref(handle(graphed)._life.entries.ready[0].graph)
        gc.disable()
        try:
            if how == "del":
                del graphed
            else:
                handle(graphed).reset()
            assert graph() is None
        finally:
            gc.enable()
        equal(module(x), y)


def reserved() -> int:
    """Memory that torch holds of the device once nothing is left that it could give back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.mark.cuda
@needs_cuda
@torch.no_grad()
def test_b88_memory_used_on_two_streams_is_bounded():
    """Memory marked with `record_stream` in a capture costs that capture once: said in bytes, and given back."""
    side, count = torch.cuda.Stream(), 2**20

    def f(x: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream()
        for _ in range(50):
            side.wait_stream(here)
            with torch.cuda.stream(side):
                y = x.sin()
            here.wait_stream(side)
            y.record_stream(here)
            x = x + y
        return x

    small = graphify(f)
    for x in rows(3, count=3):
        equal(f(x.cuda()), small(x.cuda()))
    before = reserved()
    graphed = graphify(f)
    for n in (count, count // 2, count // 4):
        for x in [t.cuda() for t in rows(n, count=4)]:
            equal(f(x), graphed(x))
        del x
        torch.cuda.synchronize()
    first, *later = graphed.graphs
    assert 0 < first.bytes < 50 * 4 * count + 2**27
    assert all(graph.bytes < first.bytes + 2**27 for graph in later)
    assert counts(graphed) == (3, 3, 6, 0, 0)
    graphed.reset()
    assert reserved() < before + 2**26


@pytest.mark.cuda
@needs_cuda
@two_gpus
def test_b89_device_comes_from_the_arguments():
    """Tensors on cuda:1 while cuda:0 is current are computed there, in turn with cuda:0."""
    graphed = graphify(lambda x: x * 2 + 1)
    for i in range(10):
        x = torch.randn(3, device=f"cuda:{i % 2}")
        equal(x * 2 + 1, graphed(x))
        assert torch.cuda.current_device() == 0
    assert counts(graphed)[2] == 6


@pytest.mark.cuda
@needs_cuda
@two_gpus
def test_b90_two_devices_in_one_call_are_refused():
    """Arguments on two devices are refused with both names."""
    graphed = graphify(lambda x, y: x + y.to(x.device))
    with pytest.raises(GraphifyError, match="cuda:0.*cuda:1"):
        graphed(torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"))


def copy_in_c(target: torch.Tensor, source: torch.Tensor) -> None:
    """What an extension does that knows no streams: work on the legacy default stream, seen by no capture."""
    legacy = ctypes.c_void_p(1)
    ends = ctypes.c_uint64(target.data_ptr()), ctypes.c_uint64(source.data_ptr())
    code = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2(*ends, ctypes.c_size_t(source.nbytes), legacy)
    assert code == 0, f"CUDA driver error {code}"


def copied_and_more(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    copy_in_c(y, x)
    return y + 1


def only_copied(x: torch.Tensor) -> torch.Tensor:
    """Nothing of its work is in a capture, which is empty."""
    y = torch.empty_like(x)
    copy_in_c(y, x)
    return y


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("f", [copied_and_more, only_copied])
def test_b91_work_on_the_legacy_default_stream(f):
    """A kernel that no capture holds is found by `verify`, at each replay that it would check, and names the cause."""
    graphed = graphify(f, verify=2)
    first, *others = [t.cuda() for t in rows(256, count=5)]
    equal(f(first), graphed(first))
    graphed(others[0])
    for x in others[1:]:
        held = x.clone()
        with pytest.raises(VerificationError, match="`output`: smallest difference at") as raised:
            graphed(x)
        assert "on another stream" in str(raised.value.why)
        equal(held, x)
    assert counts(graphed) == (1, 1, 0, 0, 3)


@pytest.mark.cuda
@needs_cuda
def test_b93_caller_on_a_side_stream():
    """A caller on streams of its own reads right results, also when two streams take turns."""
    graphed = graphify(lambda x: x @ x)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for i in range(12):
        with torch.cuda.stream(streams[i % 2]):
            x = torch.randn(256, 256, device="cuda")
            torch.cuda._sleep(2_000_000)
            x = x * 2
            equal(x @ x, graphed(x))
    assert counts(graphed)[2] == 10


@pytest.mark.cuda
@needs_cuda
def test_b94_side_stream_left_unjoined():
    """A forked stream that is never joined raises a GraphifyError, and later captures work."""
    side = torch.cuda.Stream()

    def f(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return x * 2

    graphed = graphify(f)
    x = torch.ones(3, device="cuda")
    graphed(x)
    with pytest.raises(CaptureError):
        graphed(x)
    torch.cuda.synchronize()
    follows_eager([(x,) for x in rows(3)], "cuda", torch.device("cuda"), target=lambda x: x + 1)


def test_b95_no_global_is_patched(backend, device):
    """Using graphify leaves torch's own classes and functions as they are."""
    watched = [
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__repr__,
        torch.cuda.CUDAGraph,
        torch.cuda.graph,
        nn.Module.__call__,
        torch.manual_seed,
        torch.Tensor.cpu,
    ]
    graphed = graphify(lambda x: x + 1, backend=backend)
    for x in [t.to(device) for t in rows(3)]:
        graphed(x)
    now = [
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__repr__,
        torch.cuda.CUDAGraph,
        torch.cuda.graph,
        nn.Module.__call__,
        torch.manual_seed,
        torch.Tensor.cpu,
    ]
    assert all(a is b for a, b in zip(watched, now, strict=True))


@pytest.mark.cuda
@needs_cuda
def test_b95_a_data_loader_beside_captures():
    """Captures while a loader's threads pin memory and its processes work: both right, no process dies."""
    data = TensorDataset(torch.arange(512.0).reshape(128, 4))
    graphed = graphify(lambda x: x * 2 + 1)
    loader = DataLoader(data, batch_size=2, num_workers=2, pin_memory=True, timeout=60)
    for i, (batch,) in enumerate(loader):
        x = batch.to("cuda", non_blocking=True).repeat(1 + i % 16, 1)
        equal(x * 2 + 1, graphed(x))
    assert counts(graphed) == (16, 16, 32, 0, 0)


def in_threads(n: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads), "deadlock"
    if errors:
        raise errors[0]


def test_b96_threads_on_one_wrapper(backend, device):
    """Eight threads on one wrapper each get their own answer, and no call is lost from the counts."""
    graphed = graphify(lambda x: (x * 2).cumsum(0), backend=backend)

    def work(i: int) -> None:
        for j in range(30):
            x = torch.full((5 + i % 3,), float(i * 1000 + j), device=device)
            equal((x * 2).cumsum(0), graphed(x))

    in_threads(8, work)
    assert graphed.stats().calls == 240


def test_b96_two_wrappers_captured_at_once(backend, device):
    """Wrappers first called at the same moment in several threads all capture rightly."""
    graphs = [graphify(lambda x, k=k: x * k + torch.ones_like(x), backend=backend) for k in range(4)]

    def work(i: int) -> None:
        for j in range(10):
            x = torch.full((3,), float(j), device=device)
            equal(x * (i % 4) + 1, graphs[i % 4](x))

    in_threads(8, work)
    assert all(g.stats().calls == 20 for g in graphs)


def test_b96_eager_work_in_another_thread_while_capturing(backend, device):
    """Work of other threads is neither captured nor disturbed."""
    stop = threading.Event()
    results: list[bool] = []

    def busy() -> None:
        while not stop.is_set():
            a = torch.ones(4, device=device)
            results.append(bool(((a + 1) == 2).all()))

    thread = threading.Thread(target=busy, daemon=True)
    thread.start()
    try:
        for n in range(3, 9):
            graphed = graphify(lambda x: x * 3, backend=backend)
            for x in [t.to(device) for t in rows(n, count=4)]:
                equal(x * 3, graphed(x))
    finally:
        stop.set()
        thread.join(30)
    assert results
    assert all(results)


@pytest.mark.parametrize("primed", [False, True])
def test_b97_graphed_inside_graphed(backend, device, primed):
    """Inside a graphed function an inner one runs plainly; both stay right."""
    inner = graphify(lambda x: x.exp() + 1, backend=backend)
    if primed:
        for x in [t.to(device) for t in rows(3)]:
            inner(x)
    outer = graphify(lambda x: inner(x) * 2 + inner(x + 1), backend=backend)
    for x in [t.to(device) for t in rows(3)]:
        equal((x.exp() + 1) * 2 + ((x + 1).exp() + 1), outer(x))
        equal(x.exp() + 1, inner(x))
    assert counts(outer) == (1, 1, 3, 0, 0)
    assert counts(inner)[2] >= 3


def test_b97_recursion(backend, device):
    """A graphed function that calls itself with a smaller shape equals eager."""

    @graphify(backend=backend)
    def halves(x: torch.Tensor) -> torch.Tensor:
        return x if x.size(0) == 1 else halves(x[: x.size(0) // 2]) * 2 + 1

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x if x.size(0) == 1 else plain(x[: x.size(0) // 2]) * 2 + 1

    for n in (8, 4, 8):
        for x in [t.to(device) for t in rows(n, count=4)]:
            equal(plain(x), halves(x))


def test_b97_nested_modules(backend, device):
    """A graphed module as a child of a graphed module equals eager, whichever was used first."""
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(device)
    net = nn.Sequential(graphify(plain[0], backend=backend), plain[1])
    graphed = graphify(net, backend=backend)
    with torch.no_grad():
        for x in [t.to(device) for t in rows(2, 3, count=6)]:
            equal(plain(x), graphed(x))
            equal(plain[0](x), net[0](x))


@pytest.mark.cuda
@needs_cuda
def test_b97_inside_the_users_own_capture():
    """Inside the user's torch.cuda.graph the plain function is captured."""
    graphed = graphify(lambda x: x * 2)
    static = torch.ones(3, device="cuda")
    for _ in range(3):
        graphed(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = graphed(static)
    static.fill_(5)
    graph.replay()
    equal(static * 2, y)
    assert graphed.stats().reasons == {"nested": 1}


def test_b98_reset_and_recapture(backend, device):
    """Reset twice, capture again, delete, twenty times over; results from before stay."""
    kept = []
    for i in range(20):
        graphed = graphify(lambda x, i=i: x * i, backend=backend)
        for _ in range(2):
            for x in [t.to(device) for t in rows(3, count=3)]:
                kept.append((x * i, graphed(x)))
            graphed.reset()
            graphed.reset()
        assert counts(graphed) == (2, 2, 2, 0, 0)
        assert graphed.graphs == ()
        del graphed
    for want, got in kept:
        equal(want, got)


def test_b98_reset_inside_the_call(backend, device):
    """A function that resets its own wrapper while running does no harm."""
    graphed = graphify(lambda x: (graphed.reset(), x + 1)[1], backend=backend, fallback="eager")
    for x in [t.to(device) for t in rows(3)]:
        equal(x + 1, graphed(x))


def test_b99_replay_of_a_closed_recording(backend, device):
    """A recording that was closed raises a RuntimeError instead of crashing; closing twice is harmless."""
    graphed = graphify(lambda x: x + 1, backend=backend)
    for x in [t.to(device) for t in rows(3)]:
        graphed(x)
    recording = handle(graphed)._life.entries.ready[0].graph.recording
    recording.close()
    recording.close()
    with pytest.raises(RuntimeError):
        recording.replay()


EXITS = {"normal": "", "error": "raise SystemExit(3)", "exception": "raise ValueError('mine')"}


@pytest.mark.parametrize("way", EXITS)
def test_b100_exit_is_clean(backend, way):
    """A program that used graphs ends by itself, whatever way it ends."""
    if backend == "eager" or (backend == "tape" and way != "exception"):
        pytest.skip("one process is enough where there is no device")
    code = f"""
import torch
from graphify import graphify
device = {"cuda" if backend == "cuda" else "cpu"!r}
keep = graphify(torch.nn.Linear(3, 3).to(device), backend={backend!r})
with torch.no_grad():
    for _ in range(4):
        keep(torch.ones(2, 3, device=device))
{EXITS[way]}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == {"normal": 0, "error": 3, "exception": 1}[way], done.stderr
    assert "Exception ignored" not in done.stderr


def test_b101_one_capture_for_many_equal_calls(backend, device, caplog):
    """A hundred equal calls make one recording, and the collector does not run for it."""
    graphed = graphify(lambda x: x + 1, backend=backend)
    before = [s["collections"] for s in gc.get_stats()][2]
    with caplog.at_level(logging.INFO, "graphify"):
        for _ in range(100):
            graphed(torch.randn(3, device=device))
    assert counts(graphed) == (1, 1, 98, 0, 0)
    assert graphed.stats().recordings == 1
    assert sum("recorded" in r.message for r in caplog.records) == 1
    assert [s["collections"] for s in gc.get_stats()][2] - before <= 1


@pytest.mark.cuda
@needs_cuda
def test_b102_empty_cache_between_calls():
    """Emptying the allocator's cache between calls changes nothing."""
    graphed = graphify(lambda x: x @ x + 1)
    for x in rows(16, 16, count=8):
        y = graphed(x.cuda())
        torch.cuda.empty_cache()
        equal(x.cuda() @ x.cuda() + 1, y)
