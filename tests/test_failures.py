"""Captures that fail, a hundred and more in one process: the right error each time, and nothing left behind."""

from __future__ import annotations

import gc
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from checks import counts
from conftest import needs_cuda
from torch import Tensor

from graphify import CaptureError, GraphifyWarning, GraphPool, graphify, handle

ROUNDS = 20
DEVICES = ["tape", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]


class UserError(Exception):
    """The user's own."""


# -- five ways to fail


def host_read(x: Tensor) -> Tensor:
    return x * x.sum().item()


def user_error(x: Tensor) -> Tensor:
    raise UserError(f"{x.shape[0]} rows")


def out_of_memory(x: Tensor) -> Tensor:
    if x.is_cuda:
        return x + torch.empty(1 << 45, dtype=torch.uint8, device=x.device).sum()
    raise torch.OutOfMemoryError("no more")


def host_tensor(x: Tensor) -> Tensor:
    """On a device: a tensor born on the host and copied over. On the CPU, where that is no fault, its like."""
    if x.is_cuda:
        return x + torch.tensor([1.0, 2.0, 3.0]).to(x.device)
    return x + torch.tensor(x.tolist()).sum()


def wrong_device(x: Tensor) -> Tensor:
    return x + torch.ones(3, device="cpu" if x.is_cuda else "meta")


KINDS: dict[Callable[[Tensor], Tensor], tuple[type[Exception], str]] = {
    host_read: (CaptureError, r"read on the host[\s\S]*x\.sum\(\)\.item\(\)"),
    user_error: (UserError, "^3 rows$"),
    out_of_memory: (torch.OutOfMemoryError, "memory|more"),
    host_tensor: (CaptureError, r"(CPU tensor made|tolist)[\s\S]*torch\.tensor"),
    wrong_device: (RuntimeError, "device"),
}
# What the function itself raises in eager mode is what a caller of eager would see, whatever the fallback.
OWN = (user_error, out_of_memory, wrong_device)


def at_call(number: int, fault: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Well-behaved except in its run of this number; the count is host state that no graph can see.

    A capture that runs out of memory is tried once more: that fault comes twice.
    """
    turns: SimpleQueue[bool] = SimpleQueue()
    last = number + (fault is out_of_memory)
    for run in range(1, 64):
        turns.put(number <= run <= last)

    def sometimes(x: Tensor) -> Tensor:
        y = x.sin() @ x.T + torch.rand(3, 3, device=x.device)
        return fault(x).sum() + y if turns.get() else y

    return sometimes


def well(x: Tensor) -> Tensor:
    """What `at_call` does when it does not fail."""
    return x.sin() @ x.T + torch.rand(3, 3, device=x.device)


# -- what must be left as it was


def ambient(device: torch.device) -> dict[str, object]:
    found: dict[str, object] = {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled(device.type),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "gc": gc.isenabled(),
        "modes": torch._C._len_torch_dispatch_stack(),
    }
    if device.type == "cuda":
        found["stream"] = torch.cuda.current_stream()
        found["capturing"] = torch.cuda.is_current_stream_capturing()
    return found


class Health:
    """An earlier graph with random numbers, and an eager twin of everything the process must still do."""

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend, self.device = backend, device
        self.weight = torch.randn(3, 3, device=device)
        self.earlier = self.graphed()
        for _ in range(3):
            self.earlier(self.data())
        self.before = ambient(device)

    def data(self) -> Tensor:
        return torch.randn(3, 3, device=self.device)

    def step(self, x: Tensor) -> Tensor:
        return (x @ self.weight).relu() + torch.rand(3, 3, device=x.device)

    def graphed(self) -> Any:
        return graphify(lambda x: self.step(x), backend=self.backend)

    def check(self) -> None:
        assert ambient(self.device) == self.before
        x = self.data()
        assert torch.isfinite(x @ x.T).all()
        self.same(self.earlier, replays=1)

    def check_later(self) -> None:
        """A graph that is recorded after the failures works as well, from its first call on."""
        self.check()
        self.same(later := self.graphed(), replays=5)
        assert counts(later) == (1, 1, 3, 0, 0)

    def same(self, graphed: Callable[[Tensor], Tensor], replays: int) -> None:
        xs = [self.data() for _ in range(replays)]
        torch.manual_seed(11)
        want = [self.step(x) for x in xs] + [torch.rand(4, device=self.device)]
        torch.manual_seed(11)
        got = [graphed(x) for x in xs] + [torch.rand(4, device=self.device)]
        assert all(map(torch.equal, got, want))


@pytest.fixture(params=DEVICES)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def health(backend: str, device: torch.device) -> Iterator[Health]:
    with torch.no_grad():
        yield Health(backend, device)


def reserved(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # 32 MiB each, in whatever block was free
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


# -- a hundred of them


def test_a_hundred_functions_that_always_fail(backend: str, device: torch.device, health: Health) -> None:
    """20 x 5 functions that fail at their first call already: the right error, and everything else works on."""
    sizes = []
    for round_ in range(ROUNDS):
        for fault, (error, text) in KINDS.items():
            graphed = graphify(lambda x, fault=fault: fault(x), backend=backend)
            for _ in range(2):
                with pytest.raises(error, match=text):
                    graphed(health.data())
            assert counts(graphed)[1:] == (0, 0, 0, 2)
            health.check()
        if round_ in (1, ROUNDS - 1):
            sizes.append(reserved(device))
    assert sizes[1] <= sizes[0]
    health.check_later()


def test_a_hundred_captures_that_fail(backend: str, device: torch.device, health: Health) -> None:
    """20 x 5 functions that fail only while they are captured: each names itself, and leaves nothing behind."""
    sizes = []
    for round_ in range(ROUNDS):
        for fault, (error, text) in KINDS.items():
            graphed = graphify(at_call(2, fault), backend=backend)
            assert graphed(health.data()).shape == (3, 3)
            with pytest.raises(error, match=text):
                graphed(health.data())
            assert counts(graphed) == (1, 0, 0, 0, 1)
            health.check()
        if round_ in (1, ROUNDS - 1):
            sizes.append(reserved(device))
    assert sizes[1] <= sizes[0]
    health.check_later()


def test_a_hundred_captures_that_fall_back(backend: str, device: torch.device, health: Health) -> None:
    """With `fallback="eager"` a failed capture's call is an eager call: value, random stream and all."""
    for _ in range(ROUNDS):
        for fault in (host_read, host_tensor):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                graphed = graphify(at_call(2, fault), backend=backend, fallback="eager")
                xs = [health.data() for _ in range(5)]
                torch.manual_seed(5)
                want = [well(x) for x in xs] + [torch.rand(2, device=device)]
                torch.manual_seed(5)
                got = [graphed(x) for x in xs] + [torch.rand(2, device=device)]
            assert all(map(torch.equal, got, want))
            assert counts(graphed) == (1, 0, 0, 4, 0)
            assert handle(graphed).stats().reasons == {"uncapturable": 4}
            assert len(said) == 1
            assert fault.__code__.co_filename in str(said[0].message)
            health.check()
    health.check_later()


@pytest.mark.parametrize("fault", [host_read, host_tensor])
def test_functions_that_never_can_be_captured_fall_back(
    backend: str, health: Health, fault: Callable[[Tensor], Tensor]
) -> None:
    """With `fallback="eager"` an uncapturable function is the plain function, warned of once, at its own line."""
    graphed = graphify(fault, backend=backend, fallback="eager")
    with pytest.warns(UserWarning, match=fault.__code__.co_filename) as said:
        for _ in range(5):
            x = health.data()
            assert torch.equal(graphed(x), fault(x))
    assert len(said) == 1
    assert counts(graphed) == (1, 0, 0, 4, 0)
    health.check_later()


@pytest.mark.parametrize("fallback", ["raise", "eager"])
@pytest.mark.parametrize("fault", OWN)
def test_the_functions_own_error_in_a_capture_surfaces_as_it_is(
    backend: str, device: torch.device, health: Health, fault: Callable[[Tensor], Tensor], fallback: Any
) -> None:
    """An error of the function's own keeps its type and text, its call had no effect, and later calls replay."""
    error, text = KINDS[fault]
    graphed = graphify(at_call(2, fault), backend=backend, fallback=fallback)
    graphed(health.data())
    x = health.data()
    torch.manual_seed(3)
    after = torch.rand(2, device=device)
    torch.manual_seed(3)
    with pytest.raises(error, match=text) as caught:
        graphed(x)
    assert not isinstance(caught.value, CaptureError)
    assert torch.equal(torch.rand(2, device=device), after)
    health.check()
    for _ in range(5):
        x = health.data()
        torch.manual_seed(4)
        want = well(x)
        torch.manual_seed(4)
        assert torch.equal(graphed(x), want)
    assert counts(graphed) == (2, 1, 3, 0, 1)
    health.check_later()


@pytest.mark.parametrize("shared", [False, True])
def test_a_pool_in_which_a_capture_broke(
    backend: str, device: torch.device, health: Health, shared: bool
) -> None:
    """After a capture that the device itself broke off, its wrapper and others of the pool capture and replay."""
    pool = GraphPool()

    def waits(x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            unseen_wait(x)
        return x.sin() + torch.rand(x.shape, device=x.device)

    graphed = graphify(waits, backend=backend, pool=pool)
    other = graphify(lambda x: waits(x), backend=backend, pool=pool) if shared else graphed
    before = graphify(lambda x: waits(x), backend=backend, pool=pool)
    for rows in (3, 3, 3, 2):
        before(torch.randn(rows, 3, device=device))
    for _ in range(3):
        graphed(torch.randn(4, 3, device=device))
    graphed(torch.randn(2, 3, device=device))
    if device.type == "cuda":
        with pytest.raises(CaptureError, match="the device refused to capture"):
            graphed(torch.randn(2, 3, device=device))
    for call, rows in ((other, 5), (before, 3), (graphed, 4)):
        for _ in range(4):
            x = torch.randn(rows, 3, device=device)
            torch.manual_seed(8)
            want = waits(x)
            torch.manual_seed(8)
            assert torch.equal(call(x), want)
        assert counts(call)[2] >= 2
    health.check_later()


def unseen_wait(x: Tensor) -> None:
    """Waits for the device where no watch looks."""
    if x.is_cuda:
        torch.cuda.current_stream().synchronize()


@pytest.mark.cuda
@needs_cuda
def test_a_leaf_whose_node_is_still_held() -> None:
    """A step whose parameter still has a node on another stream is refused with words, and all else works on."""
    device = torch.device("cuda")
    with torch.no_grad():
        health = Health("cuda", device)
    net = torch.nn.Linear(3, 3, device=device)
    held = net(health.data()).sum()

    def step(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss.detach()

    graphed = graphify(step, backend="cuda")
    with torch.enable_grad():
        graphed(health.data())
        with pytest.raises(CaptureError, match=r"legacy stream[\s\S]*loss\.detach\(\)"):
            graphed(health.data())
        held.backward()
    del held
    with torch.no_grad():
        health.check_later()


def test_state_that_a_failed_capture_touched_is_put_back(
    backend: str, device: torch.device, health: Health
) -> None:
    """Buffers, attributes, lists, arguments and `.grad` are after a failed capture as before it."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(3, device=device))
            self.scratch = torch.zeros(3, device=device)
            self.last: Tensor | None = None
            self.history: list[Tensor] = []
            self.count = iter([1, 2, 3])

        def forward(self, x: Tensor) -> Tensor:
            self.steps.add_(1)
            x.mul_(2)
            self.last = x * 3
            if next(self.count) == 2:
                self.scratch = self.scratch + 1
                self.history.append(x)
                self.extra = x
                raise UserError("half-way")
            return x + self.steps

    net = Net().eval()
    graphed = graphify(net, backend=backend)
    graphed(health.data())
    last, scratch = net.last, net.scratch
    x = health.data()
    held = x.clone()
    with pytest.raises(UserError, match="half-way"):
        graphed(x)
    assert net.last is last
    assert net.scratch is scratch
    assert net.history == []
    assert not hasattr(net, "extra")
    assert torch.equal(net.steps, torch.ones(3, device=device))
    assert torch.equal(x, held)
    health.check_later()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_in_a_capture(backend: str, health: Health, error: type[BaseException]) -> None:
    """Ctrl-C in the middle of a capture is Ctrl-C, and the process goes on as if the call had not been."""

    def interrupt(x: Tensor) -> Tensor:
        raise error

    graphed = graphify(at_call(2, interrupt), backend=backend)
    graphed(health.data())
    with pytest.raises(error):
        graphed(health.data())
    health.check()
    for _ in range(4):
        graphed(health.data())
    assert counts(graphed)[2] >= 2
    health.check_later()


def test_failures_under_other_modes(backend: str, device: torch.device, health: Health) -> None:
    """Autocast, inference mode, grad mode and a disabled collector are after a failed capture as before it."""
    gc.disable()
    try:
        with torch.enable_grad(), torch.autocast(device.type, torch.bfloat16, cache_enabled=True):
            inside = ambient(device)
            for fault, (error, text) in KINDS.items():
                graphed = graphify(at_call(2, fault), backend=backend)
                graphed(health.data())
                with pytest.raises(error, match=text):
                    graphed(health.data())
                assert ambient(device) == inside
        with torch.inference_mode():
            graphed = graphify(at_call(2, user_error), backend=backend)
            graphed(health.data())
            with pytest.raises(UserError):
                graphed(health.data())
            assert torch.is_inference_mode_enabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    health.check_later()


def test_a_failed_capture_ahead_of_time(backend: str, health: Health) -> None:
    """`capture()` of what fails raises the right error, without trace; live calls are not the worse for it."""
    for fault, (error, text) in KINDS.items():
        graphed = graphify(at_call(2, fault), backend=backend)
        with pytest.raises(error, match=text):
            graphed.capture(health.data())
        assert graphed.stats().calls == 0
        health.check()
    health.check_later()


# -- what only a device can break


cuda = pytest.mark.cuda


def unseen_read(x: Tensor) -> Tensor:
    """A host read that no dispatch mode sees, as of an extension: it breaks the capture itself."""
    with torch._C._DisableTorchDispatch():
        return x * x.sum().item()


def synchronise(x: Tensor) -> Tensor:
    torch.cuda.synchronize()
    return x * 2


def unjoined(x: Tensor) -> Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return x * 2


def foreign_stream(x: Tensor) -> Tensor:
    with torch.cuda.stream(torch.cuda.default_stream()):
        y = x * 2
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    return y


@cuda
@needs_cuda
@torch.no_grad()
@pytest.mark.parametrize("fallback", ["raise", "eager"])
@pytest.mark.parametrize("fault", [unseen_read, synchronise, unjoined])
def test_captures_that_the_driver_breaks(fault: Callable[[Tensor], Tensor], fallback: Any) -> None:
    """What only the driver refuses: a CaptureError or an eager call, twenty times over, and a healthy process."""
    device = torch.device("cuda")
    health, sizes = Health("cuda", device), []
    for round_ in range(ROUNDS):
        graphed = graphify(fault, fallback=fallback)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                x = health.data()
                try:
                    got = graphed(x)
                except CaptureError:
                    assert fallback == "raise"
                    assert handle(graphed).stats().warmups == 1
                else:
                    torch.cuda.synchronize()
                    assert torch.equal(got, x * 2 if fault is unjoined else fault(x))
        if fallback == "eager":
            assert counts(graphed) == (1, 0, 0, 2, 0)
        else:
            assert counts(graphed) == (1, 0, 0, 0, 2)
        torch.cuda.synchronize()
        health.check()
        if round_ in (1, ROUNDS - 1):
            sizes.append(reserved(device))
    assert (
        sizes[1] <= sizes[0] + (2 << 20) * ROUNDS
    )  # torch before 2.14 keeps 2 MiB of a broken capture's pool
    health.check_later()


@cuda
@needs_cuda
@torch.no_grad()
def test_work_on_the_default_stream_inside(recwarn: pytest.WarningsRecorder) -> None:
    """A kernel on the default stream is not part of a capture: refused, never silently left out."""
    health = Health("cuda", torch.device("cuda"))
    graphed = graphify(foreign_stream, fallback="eager")
    for _ in range(6):
        x = health.data()
        got = graphed(x)
        torch.cuda.synchronize()
        assert torch.equal(got, foreign_stream(x))
    health.check_later()


@cuda
@needs_cuda
@torch.no_grad()
def test_out_of_memory_of_the_graph_only() -> None:
    """A function that fits eagerly but not as a graph: eager result or torch's own error, and memory comes back."""
    device = torch.device("cuda")
    health = Health("cuda", device)
    before = reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    part = 64 << 20
    step = graphify(lambda x: x.expand(16, -1).exp().cumsum(1) + 1, fallback="eager")
    x = torch.zeros(part // 4, device=device)
    step(x)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 20 * part) / total)
    try:
        for _ in range(5):
            try:
                step(x)
            except torch.OutOfMemoryError:
                continue
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    health.check()
    del x
    step.reset()
    assert reserved(device) <= before
    health.check_later()


def test_a_refused_run_keeps_nothing_alive(backend, device):
    """What a run made before it was refused is gone at once, without the garbage collector: errors keep no frames."""
    made: list[weakref.ref[Tensor]] = []
    note, box = made.append, types.SimpleNamespace(count=0)

    def counting(x: Tensor) -> Tensor:
        y = x * 2
        note(weakref.ref(y))
        box.count += 1
        return y + 1

    graphed = graphify(counting, backend=backend, fallback="eager")
    gc.disable()
    try:
        with pytest.warns(GraphifyWarning, match=r"reads and re-binds `box\.count`"):
            for _ in range(4):
                graphed(torch.randn(3, device=device))
        assert len(made) >= 4
        assert all(reference() is None for reference in made)
    finally:
        gc.enable()
