"""Buckets captured in a row: a run that repeats the one before is not watched, and any other one is."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import together
from torch import Tensor, nn

from graphify import Bucket, graphify
from graphify._paths import open_path
from graphify._watch import Watch

SIZES = [1, 2, 4, 8]
TELLS = hasattr(sys, "monitoring")
"""Whether Python can tell which instructions a run executes."""


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Inference."""
    with torch.no_grad():
        yield


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes at which a recorded run multiplied under a watch."""
    sizes: list[int] = []
    plain = Watch._before

    def before(self: Watch, operator: Any, args: Any, kwargs: Any) -> None:
        if self.strict and operator.func is torch.ops.aten.mul.Tensor:
            sizes.append(len(args[0]))
        plain(self, operator, args, kwargs)

    monkeypatch.setattr(Watch, "_before", before)
    return sizes


class Net(nn.Module):
    """Multiplies its rows by what `factor` answers for their number."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.one, self.other = torch.full((3,), 2.0, device=device), torch.full((3,), 3.0, device=device)
        self.tables = {size: torch.full((3,), float(size), device=device) for size in SIZES}
        self.small, self.count = 2, torch.zeros((), device=device)

    def factor(self, size: int) -> Tensor:
        return self.one

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor(len(x))


def captured(target: Callable[..., Any], backend: str, device: torch.device) -> Any:
    """All buckets, from an example that fills the largest."""
    graphed = graphify(target, buckets=SIZES, backend=backend)
    graphed.capture_buckets(torch.randn(8, 3, device=device), progress=False)
    return graphed


def compare(graphed: Any, target: Callable[..., Tensor], device: torch.device, sizes: list[int]) -> None:
    """Replays of these sizes give what the target gives now."""
    before, kept = graphed.stats().replays, []
    for size in sizes:
        x = torch.randn(size, 3, device=device)
        y = graphed(x)
        kept.append((y, y.clone(), target(x)))
    for y, then, expected in kept:
        assert y.equal(then)
        assert y.equal(expected)
    assert graphed.stats().replays == before + len(sizes)


def outlives(net: Net, table: Any, backend: str, device: torch.device, watched: list[int]) -> None:
    """Graphs recorded over a full cache, each under a watch, multiply by the size when nobody else holds that factor."""
    for size in SIZES:
        net(torch.randn(size, 3, device=device))
    graphed = captured(net, backend, device)
    assert watched == [8, 4, 2, 1]
    table.cache_clear()
    gc.collect()
    rubbish = [torch.full((3,), -9.0, device=device) for _ in range(64)]
    for size in (2, 8, 4):
        x = torch.randn(size, 3, device=device)
        assert graphed(x).equal(x * float(size))
    del rubbish


class OneWay(Net):
    """The same at all sizes."""


class Statement(Net):
    """Another tensor at small sizes, by a statement."""

    def factor(self, size: int) -> Tensor:
        if size <= self.small:
            return self.other
        return self.one


class Expression(Net):
    """The same in the middle of one line."""

    def factor(self, size: int) -> Tensor:
        return self.other if size <= self.small else self.one


class Either(Net):
    """The same by `and` and `or`."""

    def factor(self, size: int) -> Tensor:
        return ((size <= self.small and [self.other]) or [self.one])[0]


class Writes(Net):
    """Counts its calls at small sizes, by a statement that all sizes execute."""

    def factor(self, size: int) -> Tensor:
        for _ in range(size, self.small):
            self.count.add_(1)
        return self.one


class Table(Net):
    """Another tensor for each size, by the same instructions."""

    def factor(self, size: int) -> Tensor:
        return self.tables[size]


class ByName(Net):
    """The same, by a name that is made at each call."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        for size in SIZES:
            setattr(self, f"table{size}", torch.full((3,), float(size), device=device))

    def factor(self, size: int) -> Tensor:
        found: Tensor = getattr(self, f"table{size}")
        return found


class TestWhatIsWatched:
    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            (OneWay, [8]),
            (Statement, [8, 2]),
            (Expression, [8, 2]),
            (Either, [8, 2]),
            (Writes, [8, 1]),
            (Table, [8]),
        ],
    )
    def test_each_path_once(
        self, backend: str, device: torch.device, watched: list[int], kind: type[Net], expected: list[int]
    ) -> None:
        """The first run along each path is watched, those that repeat it are not; all replay what eager does.

        On a device the first one is the warm-up. A recording of the eager backend is a run that is real, each time.
        """
        net = kind(device)
        graphed = captured(net, backend, device)
        told = expected[1:] if backend == "cuda" else expected
        assert watched == (told if TELLS and backend != "eager" else [8, 4, 2, 1])
        compare(graphed, net, device, [8, 1, 2, 4, 1])

    def test_no_tool_left(self, backend: str, device: torch.device, watched: list[int]) -> None:
        """Where debuggers and profilers have all tools of `sys.monitoring`, each run is watched."""
        if not TELLS:
            pytest.skip("Python 3.12")
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        taken = [tool for tool in range(6) if monitoring.get_tool(tool) is None]
        for tool in taken:
            monitoring.use_tool_id(tool, "somebody")
        try:
            net = OneWay(device)
            graphed = captured(net, backend, device)
        finally:
            for tool in taken:
                monitoring.free_tool_id(tool)
        assert watched == [8, 4, 2, 1]
        compare(graphed, net, device, SIZES)

    def test_nothing_is_left_behind(self, backend: str, device: torch.device) -> None:
        """Afterwards Python reports to nobody."""
        captured(OneWay(device), backend, device)
        if TELLS:
            monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
            assert not any("graphify" in str(monitoring.get_tool(tool)) for tool in range(6))

    def test_inference_tensors(self, backend: str, device: torch.device, watched: list[int]) -> None:
        """Nobody counts writes of inference tensors: runs that get some are watched."""
        with torch.inference_mode():
            graphed = captured(OneWay(device), backend, device)
            assert watched == [8, 4, 2, 1]
            x = torch.randn(2, 3, device=device)
            assert graphed(x).equal(x * 2)


class TestPromises:
    @pytest.mark.parametrize("kind", [Statement, Expression, Either])
    def test_another_tensor(self, backend: str, device: torch.device, kind: type[Net]) -> None:
        """What only small sizes read is guarded and kept for them."""
        net = kind(device)
        graphed = captured(net, backend, device)
        net.other = torch.full((3,), 7.0, device=device)
        gc.collect()
        for size in (2, 8):
            x = torch.randn(size, 3, device=device)
            assert graphed(x).equal(net(x))

    @pytest.mark.parametrize("kind", [Table, ByName])
    def test_a_tensor_of_each_size(self, backend: str, device: torch.device, kind: type[Net]) -> None:
        """What the same code finds at another size is updated in place, and noticed when it is replaced."""
        net = kind(device)
        graphed = captured(net, backend, device)
        held: Any = net.tables if kind is Table else vars(net)
        key: Any = 2 if kind is Table else "table2"
        held[key].mul_(5)
        compare(graphed, net, device, [2, 4, 8, 1])
        held[key] = torch.full((3,), -1.0, device=device)
        gc.collect()
        x = torch.randn(2, 3, device=device)
        assert graphed(x).equal(net(x))

    def test_a_tensor_where_no_survey_looks(
        self, backend: str, device: torch.device, watched: list[int]
    ) -> None:
        """A cache of functools answers each size with a tensor that only it holds: its graph keeps that alive."""

        @functools.cache
        def table(size: int) -> Tensor:
            return torch.full((3,), float(size), device=device)

        class Cached(Net):
            def factor(self, size: int) -> Tensor:
                return table(size)

        outlives(Cached(device), table, backend, device, watched)

    def test_a_cache_that_shares_with_an_attribute(
        self, backend: str, device: torch.device, watched: list[int]
    ) -> None:
        """A cache is as closed where a survey happens to meet what it answers for the largest size."""

        @functools.cache
        def table(size: int) -> Tensor:
            return torch.full((3,), float(size), device=device)

        class Shared(Net):
            def factor(self, size: int) -> Tensor:
                assert self.one is not None
                return table(size)

        net = Shared(device)
        net.one = table(8)
        outlives(net, table, backend, device, watched)

    def test_a_cache_that_the_first_runs_fill(self, backend: str, device: torch.device) -> None:
        """What a run leaves in a cache is eager's: none is recorded before one of its size was made."""

        @functools.cache
        def table(size: int) -> Tensor:
            return torch.full((3,), float(size), device=device)

        class Cached(Net):
            def factor(self, size: int) -> Tensor:
                return table(size)

        net = Cached(device)
        graphed = captured(net, backend, device)
        for size in SIZES:
            x = torch.randn(size, 3, device=device)
            assert net(x).equal(x * float(size))
        compare(graphed, net, device, [4, 1, 8, 2])

    def test_one_new_weight_is_one_change(self, backend: str, device: torch.device) -> None:
        """All buckets notice the same replacement, which is not "again and again": each is recorded anew."""
        net = OneWay(device)
        net.register_parameter("weight", nn.Parameter(torch.ones(3, device=device)))
        graphed = captured(net, backend, device)
        net.load_state_dict({"weight": torch.zeros(3, device=device)}, assign=True)
        for size in (*SIZES, *SIZES, *SIZES):
            x = torch.randn(size, 3, device=device)
            assert graphed(x).equal(net(x))
        assert graphed.stats().replays == len(SIZES)

    def test_an_argument_that_all_sizes_write(
        self, backend: str, device: torch.device, watched: list[int]
    ) -> None:
        """Where arguments are written, each run is watched: what a size reads of the memory around must be known."""

        def step(x: Tensor) -> Tensor:
            x.add_(1)
            return x * 2

        graphed = captured(step, backend, device)
        assert watched == [8, 4, 2, 1]
        for size in (1, 8, 2):
            x = torch.randn(size, 3, device=device)
            twin = x.clone()
            assert graphed(x).equal(step(twin))
            assert x.equal(twin)

    def test_an_argument_that_few_sizes_write(self, backend: str, device: torch.device) -> None:
        """`reshape` answers a view at one size and a copy at others: each call leaves in its argument what eager does."""

        def step(x: Tensor) -> Tensor:
            x.t().reshape(-1).add_(1)
            return x * 2

        graphed = captured(step, backend, device)
        for size in (1, 2, 8, 1):
            x = torch.randn(size, 3, device=device)
            twin = x.clone()
            y, expected = graphed(x), step(twin)
            assert x.equal(twin), size
            assert y.equal(expected), size

    def test_state_that_few_sizes_write(self, backend: str, device: torch.device) -> None:
        """A counter moves with the calls of the sizes that move it, and capturing moved it not at all."""
        net, twin = Writes(device), Writes(device)
        graphed = captured(net, backend, device)
        assert net.count.item() == 0
        for size in (1, 2, 1, 8):
            x = torch.randn(size, 3, device=device)
            assert graphed(x).equal(twin(x))
            assert net.count.equal(twin.count)

    @pytest.mark.parametrize("alias", [False, True])
    def test_versions(self, backend: str, device: torch.device, alias: bool) -> None:
        """A replay counts as a write of what it writes where eager's does, and not behind autograd's back."""
        net, twin = OneWay(device), OneWay(device)

        def step(net: Net, x: Tensor) -> Tensor:
            (net.count.data if alias else net.count).add_(1)
            return net(x)

        graphed = captured(functools.partial(step, net), backend, device)
        for size in (1, 8, 2, 4):
            x, before = torch.randn(size, 3, device=device), (net.count._version, twin.count._version)
            assert graphed(x).equal(step(twin, x))
            assert net.count.equal(twin.count)
            assert net.count._version - before[0] == twin.count._version - before[1] == (not alias)

    def test_a_graph_that_autograd_keeps(self, backend: str, device: torch.device) -> None:
        """A gradient that one size takes inside is not taken for a repetition."""
        weight = torch.full((3,), 2.0, device=device, requires_grad=True)

        def step(x: Tensor) -> Tensor:
            with torch.set_grad_enabled(len(x) == 2):
                y = x * weight
            return y.detach()

        graphed = captured(step, backend, device)
        for size in (2, 8, 1):
            x = torch.randn(size, 3, device=device)
            y, expected = graphed(x), step(x)
            assert y.equal(expected)
            assert y.requires_grad is expected.requires_grad

    def test_two_axes(self, backend: str, device: torch.device) -> None:
        """A grid over two sizes, where one of them decides the path."""
        batch, length = Bucket("batch", [1, 2]), Bucket("length", [2, 4, 8])
        one, other = torch.tensor(2.0, device=device), torch.tensor(3.0, device=device)

        def step(x: Tensor) -> Tensor:
            return x * (one if x.shape[1] > 2 else other)

        graphed = graphify(step, buckets={"x": {0: batch, 1: length}}, backend=backend)
        graphed.capture_buckets(torch.randn(2, 8, device=device), progress=False)
        for rows in (1, 2):
            for columns in (2, 4, 8):
                x = torch.randn(rows, columns, device=device)
                assert graphed(x).equal(step(x))
        assert graphed.stats().replays == 6


@pytest.mark.skipif(not TELLS, reason="Python 3.12")
class TestPath:
    def test_repeated(self) -> None:
        """The same call again strays nowhere; other instructions of the same function do, each time."""

        def run(flag: bool) -> int:
            return 1 if flag else 2

        with open_path() as path:
            assert path is not None
            assert path.learn(functools.partial(run, True)) == 1
            for flag, strays in ((True, False), (False, True), (False, True), (True, False)):
                assert path.follow(functools.partial(run, flag)) == (1 if flag else 2)
                assert path.strayed is strays

    def test_only_the_last_is_learned(self) -> None:
        """A second run that is learned takes the place of the first."""

        def run(flag: bool) -> int:
            return 1 if flag else 2

        with open_path() as path:
            assert path is not None
            path.learn(functools.partial(run, True))
            path.learn(functools.partial(run, False))
            path.follow(functools.partial(run, True))
            assert path.strayed
            path.follow(functools.partial(run, False))
            assert not path.strayed

    def test_other_threads(self) -> None:
        """What other threads execute in the meantime is no part of a path, and hides nothing of it."""

        def run(flag: bool) -> int:
            return 1 if flag else 2

        def beside() -> int:
            together(1, lambda: run(False))
            return run(True)

        with open_path() as path:
            assert path is not None
            path.learn(beside)
            path.follow(beside)
            assert not path.strayed
            path.follow(functools.partial(run, False))
            assert path.strayed

    def test_an_error(self) -> None:
        """An error inside surfaces, and nobody listens any more."""

        def fail() -> None:
            raise KeyError("x")

        with open_path() as path:
            assert path is not None
            for hear in (path.learn, path.follow):
                with pytest.raises(KeyError):
                    hear(fail)
                assert sys.monitoring.get_events(path._tool) == 0  # type: ignore[attr-defined,unused-ignore]
