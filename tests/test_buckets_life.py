"""Buckets over time: kinds of targets, evictions, resets, threads, values and tensors that change between calls."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bucketing import BATCH, ROWS, like_eager, over, rows
from checks import counts, together
from torch import Tensor, nn

from graphify import CaptureError, GraphifyWarning, GraphPool, graphify, handle
from graphify.testing import Call


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Inference, unless a test says otherwise."""
    with torch.no_grad():
        yield


class Scaled(nn.Module):
    """A parameter, and a plain number beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale


class TestTargets:
    def test_a_module(self, backend: str, device: torch.device) -> None:
        """The twin of a module pads and cuts; the original stays eager."""
        stats = like_eager(Scaled, over(rows), backend, device, **ROWS)

        assert (stats.captures, stats.eager) == (3, 0)

    def test_a_module_copied(self, backend: str, device: torch.device) -> None:
        """A deep copy starts without graphs, with the same buckets."""
        first = graphify(Scaled().to(device), backend=backend, **ROWS)
        x = torch.randn(3, 3, device=device)
        for _ in range(3):
            first(x)

        second = copy.deepcopy(first)
        for _ in range(3):
            assert torch.equal(second(x), x * 2)

        assert counts(second) == (1, 1, 1, 0, 0)

    def test_a_method_in_a_class_body(self, backend: str, device: torch.device) -> None:
        """`self` is no argument of the option; each instance has its graphs."""

        class Server:
            def __init__(self, factor: float) -> None:
                self.weight = torch.full((3,), factor, device=device)

            @graphify(buckets={"x": {0: BATCH}}, pad={"x": 1}, backend=backend)
            def run(self, x: Tensor) -> Tensor:
                return x * self.weight

        servers = [Server(2.0), Server(5.0)]
        for n in (3, 3, 3, 4, 1, 2, 1):
            for server, factor in zip(servers, (2.0, 5.0), strict=True):
                x = torch.randn(n, 3, device=device)
                assert torch.equal(server.run(x), x * factor)

        assert all(counts(server.run) == (2, 2, 3, 0, 0) for server in servers)

    def test_a_decorated_class(self, backend: str, device: torch.device) -> None:
        """The forward of every instance."""

        @graphify(backend=backend, **ROWS)
        class Twice(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * 2

        net = Twice()
        for n in (3, 3, 4, 2, 2, 1):
            x = torch.randn(n, 3, device=device)
            assert torch.equal(net(x), x * 2)
        assert counts(net) == (2, 2, 2, 0, 0)


class TestChanges:
    def test_a_plain_number_that_changes(self, backend: str, device: torch.device) -> None:
        """A value the code reads is part of the signature, for every size of a bucket."""

        def set_scale(value: float) -> Any:
            def change(twin: Any) -> None:
                twin.scale = value

            return change

        calls = [
            Call((torch.randn(n, 3),), before=set_scale(2.0 if index % 8 < 4 else 3.0))
            for index, n in enumerate((3, 3, 4, 2, 3, 3, 4, 2, 3, 1, 4, 2, 3, 1, 4, 2))
        ]

        stats = like_eager(Scaled, calls, backend, device, buckets=[4])

        assert stats.captures == 2

    def test_a_parameter_that_moves(self, backend: str, device: torch.device) -> None:
        """New memory is noticed at the next call of any size."""

        def move(twin: Any) -> None:
            twin.weight = nn.Parameter(twin.weight.detach() * 2)

        calls = [
            Call((torch.randn(n, 3),), before=move if index in (5, 11) else None)
            for index, n in enumerate((3, 3, 4, 2, 3, 1, 3, 4, 2, 3, 2, 3, 3, 4, 1))
        ]

        stats = like_eager(Scaled, calls, backend, device, buckets=[4])

        assert stats.recordings == 3

    def test_a_parameter_written_in_place(self, backend: str, device: torch.device) -> None:
        """An update in place is seen by all buckets without a new capture."""

        def update(twin: Any) -> None:
            twin.weight.mul_(1.5)

        calls = [Call((torch.randn(n, 3),), before=update) for n in (3, 3, 8, 8, 4, 7, 3, 5)]

        stats = like_eager(Scaled, calls, backend, device, buckets=[4, 8])

        assert stats.captures == 2

    def test_training_mode(self, backend: str, device: torch.device) -> None:
        """`eval()` and `train()` are two signatures."""

        class Modes(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * (2 if self.training else 3)

        calls = [
            Call(
                (torch.randn(n, 3),), before=(lambda net: net.eval()) if i % 2 else (lambda net: net.train())
            )
            for i, n in enumerate((3, 3, 3, 3, 1, 4, 2, 4))
        ]

        stats = like_eager(Modes, calls, backend, device, buckets=[4])

        assert stats.captures == 2


class TestLimits:
    def test_at_most_max_graphs(self, backend: str, device: torch.device) -> None:
        """The least recently used bucket goes; results stay right, and what a size holds of a graph goes with it."""
        step = graphify(lambda x: x * 2, max_graphs=2, backend=backend, **ROWS)

        for n in [3, 3, 1, 1, 8, 8, 3, 4, 3, 1, 7, 5, 3, 2, 8] * 3:
            x = torch.randn(n, 3, device=device)
            assert torch.equal(step(x), x * 2)
            assert len(step.graphs) <= 2

        stats = step.stats()
        assert stats.evictions > 0
        assert set(stats.reasons) <= {"evicted"}
        assert stats.calls == 45

    def test_replays_of_evicted_buckets_are_still_counted(self, backend: str, device: torch.device) -> None:
        """Counts never go back."""
        step, before = graphify(lambda x: x * 2, max_graphs=1, backend=backend, **ROWS), 0

        for n in [3, 3, 4, 3, 4, 8, 8, 8, 7, 3, 3]:
            step(torch.randn(n, 3, device=device))
            replays = step.stats().replays
            assert replays >= before
            before = replays
        assert before > 0

    def test_reset(self, backend: str, device: torch.device) -> None:
        """Everything is forgotten but the counts; results stay valid, and the next calls start again."""
        step = graphify(lambda x: x * 2, backend=backend, **ROWS)
        x = torch.randn(3, 3, device=device)
        kept = [step(x) for _ in range(4)]

        step.reset()

        assert step.graphs == ()
        assert all(torch.equal(out, x * 2) for out in kept)
        for n in (3, 3, 3, 4):
            y = torch.randn(n, 3, device=device)
            assert torch.equal(step(y), y * 2)
        assert counts(step) == (2, 2, 4, 0, 0)

    def test_a_pool_for_two_wrappers(self, backend: str, device: torch.device) -> None:
        """Two functions that never replay at once share memory and stay apart in results."""
        pool = GraphPool()
        twice = graphify(lambda x: x * 2, pool=pool, outputs="static", backend=backend, **ROWS)
        thrice = graphify(lambda x: x * 3, pool=pool, backend=backend, **ROWS)

        for n in (3, 3, 3, 8, 8, 8, 1, 4, 5):
            x, y = torch.randn(n, 3, device=device), torch.randn(n, 3, device=device)
            assert torch.equal(twice(x).clone(), x * 2)
            assert torch.equal(thrice(y), y * 3)

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
    def test_a_copy_of_a_pool_is_the_pool(
        self, backend: str, device: torch.device, copied: Callable[[Any], Any]
    ) -> None:
        """What is copied with the wrappers that it holds shares its pool with them, in use or not."""
        pool = GraphPool()
        step = graphify(lambda x: x * 2, pool=pool, backend=backend, **ROWS)
        for n in (3, 3, 3):
            x = torch.randn(n, 3, device=device)
            assert torch.equal(step(x), x * 2)
            assert copied(pool) is pool
            assert copied({"pool": pool})["pool"] is pool

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_a_pickled_pool_is_a_new_one(self, backend: str, device: torch.device, protocol: int) -> None:
        """A pool belongs to its process: what comes back is one empty pool for all who shared it, and works."""
        pool = GraphPool()
        step = graphify(lambda x: x * 2, pool=pool, backend=backend, **ROWS)
        x = torch.randn(3, 3, device=device)
        assert torch.equal(step(x), x * 2)
        assert torch.equal(step(x), x * 2)

        one, other = pickle.loads(pickle.dumps((pool, pool), protocol))

        assert type(one) is GraphPool
        assert one is other
        assert one is not pool
        again = graphify(lambda x: x * 3, pool=one, backend=backend, **ROWS)
        for n in (3, 2, 3, 4, 3):
            x = torch.randn(n, 3, device=device)
            assert torch.equal(again(x), x * 3)
            assert torch.equal(step(x), x * 2)

    def test_threads(self, backend: str, device: torch.device) -> None:
        """Four threads with sizes of their own get their own rows back."""
        step = graphify(lambda x: x * 2 + 1, backend=backend, **ROWS)
        # Made beforehand: the tape takes a draw of another thread for one of the function's.
        inputs = [torch.rand(n, 3, device=device) for n in (3, 8, 1, 5, 2, 4, 7, 6) * 4]

        def work() -> bool:
            with torch.no_grad():
                return all(torch.equal(step(x), x * 2 + 1) for x in inputs)

        assert together(4, work) == [True] * 4
        stats = step.stats()
        assert stats.calls == 128
        assert stats.captures <= 3

    def test_a_failure_inside_a_padded_call_leaves_no_trace(self, backend: str, device: torch.device) -> None:
        """The user's own error surfaces; other sizes go on, and the failing size works once its cause is gone."""
        broken = {"now": False}

        def step(x: Tensor) -> Tensor:
            if broken["now"]:
                raise KeyError("mine")
            return x * 2

        graphed = graphify(step, backend=backend, **ROWS)
        x = torch.randn(3, 3, device=device)
        graphed(x)
        broken["now"] = True
        with pytest.raises(KeyError, match="mine"):
            graphed(torch.randn(1, 3, device=device))
        broken["now"] = False

        for n in (3, 3, 1, 1, 1):
            y = torch.randn(n, 3, device=device)
            assert torch.equal(graphed(y), y * 2)
        assert handle(graphed).stats().errors == 1

    def test_a_function_that_cannot_be_captured(self, backend: str, device: torch.device) -> None:
        """A host read is refused in buckets as without them, or runs eagerly at the exact size."""

        def step(x: Tensor) -> Tensor:
            return x * float(x.sum() > 0)

        with pytest.raises(CaptureError):
            graphify(step, backend=backend, **ROWS)(torch.ones(3, 3, device=device))
        quiet = graphify(step, fallback="eager", backend=backend, **ROWS)
        with pytest.warns(GraphifyWarning):
            for n in (3, 3, 4):
                x = torch.ones(n, 3, device=device)
                assert torch.equal(quiet(x), x)
        assert quiet.stats().reasons == {"uncapturable": 3}


def test_sizes_without_end_are_forgotten(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept for exact sizes is bounded, and counts stay right when it is let go."""
    monkeypatch.setattr("graphify._sizes._MANY", 4)
    graphed = graphify(lambda x: x * 2, buckets=[64], backend=backend)
    with torch.no_grad():
        for n in [*range(1, 40), *range(1, 40)]:
            x = torch.randn(n, 2, device=device)
            assert torch.equal(graphed(x), x * 2)
        (entry,) = handle(graphed)._life.entries.ready
        assert len(entry.graph.fits) <= 4
    stats = graphed.stats()
    assert stats.replays + stats.warmups + stats.captures + stats.eager == stats.calls == 78


def test_sizes_that_come_back_are_captured_after_all(backend: str, device: torch.device) -> None:
    """A first pass of new sizes stops captures; once calls come back to them, each gets its graph."""
    graphed = graphify(lambda x: x * 2, backend=backend)
    inputs = [torch.randn(n, 2, device=device) for n in range(1, 31)]
    with torch.no_grad(), pytest.warns(GraphifyWarning, match="dimension 0 of `x` took .* values"):
        for x in inputs * 2:
            assert torch.equal(graphed(x), x * 2)
        assert 16 <= len(graphed.graphs) < 20
        for x in inputs * 5:
            assert torch.equal(graphed(x), x * 2)
    assert len(graphed.graphs) == 30
    assert graphed.stats().replays > 60
