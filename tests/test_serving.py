"""Pitfalls of serving with CUDA graphs, each seen in a real project: what goes wrong by hand is right here, or loud.

The numbers in the names are those of the list of pitfalls that the project keeps; those about several processes
(19), teardown order (20), allocator asserts (21) and slower graphs (25) have their tests elsewhere.
"""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bucketing import ROWS, Cache
from checks import counts, equal, reader
from conftest import needs_cuda
from torch import Tensor, nn

from graphify import (
    Bucket,
    CaptureError,
    GraphifyWarning,
    InputError,
    PaddingError,
    StaleOutputError,
    VerificationError,
    graphify,
)

TOKENS = Bucket("tokens", [2, 4, 8])


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Serving needs no gradients."""
    with torch.no_grad():
        yield


class CountingCache(Cache):
    """A cache that counts its steps on the device."""

    steps: Tensor

    def __init__(self, *, masked: bool = False) -> None:
        super().__init__(masked=masked)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x, slots)


def request(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, device=device), torch.randperm(31, device=device)[:n]


def test_p01_a_padding_row_does_not_overwrite_a_live_slot(backend: str, device: torch.device) -> None:
    """`kv[-1]` is a live row: refused when the bucket is proved, or right by the plain call; nothing was written."""
    loud = graphify(CountingCache().to(device), pad={"slots": -1}, backend=backend, **ROWS)
    quiet = graphify(CountingCache().to(device), pad={"slots": -1}, fallback="eager", backend=backend, **ROWS)
    plain = CountingCache().to(device)

    with pytest.raises(PaddingError, match=r"self.kv"):
        loud(*request(3, device))
    assert not loud.kv.any()

    with pytest.warns(GraphifyWarning):
        for n in (3, 1, 5):
            x, slots = request(n, device)
            equal(plain(x, slots), quiet(x, slots))
            equal(plain.kv, quiet.kv)


def test_p02_nothing_of_the_last_batch_is_left(backend: str, device: torch.device) -> None:
    """Block tables with fewer rows and fewer columns than the last: what is behind them is padding again."""
    table = Bucket("blocks", [2, 8])
    pages = torch.arange(1.0, 33.0, device=device)

    def read(tables: Tensor) -> Tensor:
        return torch.where(tables >= 0, pages[tables.clamp(min=0)], 0.0).sum(1)

    graphed = graphify(read, buckets={"tables": {0: TOKENS, 1: table}}, pad=-1, backend=backend)

    for n, blocks in [(8, 8), (3, 2), (3, 5), (8, 8), (1, 1), (5, 7), (5, 3), (2, 8), (1, 2), (7, 4)] * 2:
        tables = torch.randint(0, 32, (n, blocks), device=device)
        assert torch.equal(graphed(tables), read(tables))


def test_p03_a_number_beside_the_tensors_is_part_of_the_signature(backend: str, device: torch.device) -> None:
    """`max_seqlen` is never frozen: each value has its graph, and many values are said."""

    def attend(x: Tensor, max_seqlen: int) -> Tensor:
        return x[:, :max_seqlen].sum(1)

    graphed = graphify(attend, buckets={"x": {0: TOKENS}}, backend=backend)

    with pytest.warns(GraphifyWarning, match="8 values of `max_seqlen`"):
        for longest in (1, 2, 3, 4, 5, 6, 7, 8) * 3:
            x = torch.randint(0, 9, (3, 8), device=device).float()
            assert torch.equal(graphed(x, longest), attend(x, longest))


def test_p04_the_batch_is_where_the_option_says(backend: str, device: torch.device) -> None:
    """`[1, N]` ids and `[3, T]` positions: the axis is named per argument, never guessed."""

    def embed(ids: Tensor, positions: Tensor) -> Tensor:
        return ids.float()[0] + positions.sum(0)

    graphed = graphify(embed, buckets={"ids": {1: TOKENS}, "positions": {1: TOKENS}}, backend=backend)
    for n in (3, 3, 3, 1, 2, 4, 8, 5, 7):
        ids, positions = (
            torch.randint(0, 9, (1, n), device=device),
            torch.randint(0, 9, (3, n), device=device),
        )
        equal(embed(ids, positions), graphed(ids, positions))

    guessed = graphify(embed, backend=backend, **ROWS)
    with pytest.raises(InputError, match="`ids` has size 1 in dimension 0, but `positions` has size 3"):
        guessed(ids, positions)


def test_p05_a_count_on_the_host_is_seen(backend: str, device: torch.device) -> None:
    """A count that the code takes from a shape is refused; as an int it is a value, as a tensor an input."""
    shaped = graphify(lambda x: x.sum(1) / len(x), backend=backend, **ROWS)
    with pytest.raises(PaddingError):
        shaped(torch.randn(3, 2, device=device))

    counted = graphify(lambda x, live: x.sum(1) / live, buckets={"x": {0: TOKENS}}, backend=backend)
    for n in (3, 3, 4, 2, 1, 7, 5, 6):
        x = torch.randint(0, 9, (n, 2), device=device).float()
        live = torch.full((), float(n), device=device)
        assert torch.equal(counted(x, live), x.sum(1) / live)
    assert counts(counted) == (3, 3, 2, 0, 0)


def test_p06_the_largest_size_has_a_graph(backend: str, device: torch.device) -> None:
    """A maximum off the stride is always one of the sizes, and a miss never raises."""
    policy = Bucket.decode(13)
    assert policy.sizes == (1, 2, 4, 8, 13)
    graphed = graphify(lambda x: x * 2, buckets=policy, backend=backend)

    with pytest.warns(GraphifyWarning, match="is 14, above 13"):
        for n in (13, 13, 13, 12, 9, 14):
            x = torch.randn(n, 2, device=device)
            assert torch.equal(graphed(x), x * 2)

    assert counts(graphed) == (1, 1, 3, 1, 0)


def test_p07_a_second_axis_wider_than_any_bucket_runs_eagerly(backend: str, device: torch.device) -> None:
    """513 blocks where 512 are the most: right, counted, said once."""
    dims = {0: TOKENS, 1: Bucket("blocks", [256, 512])}
    graphed = graphify(lambda tables: tables.clone() * 2, buckets={"tables": dims}, backend=backend)

    with pytest.warns(GraphifyWarning, match="dimension 1 of `tables` is 513, above 512") as said:
        for blocks in (512, 512, 512, 513, 300, 513):
            tables = torch.randint(0, 9, (2, blocks), device=device)
            assert torch.equal(graphed(tables), tables * 2)

    assert len(said) == 1
    assert graphed.stats().reasons["above"] == 2


@pytest.mark.parametrize("fails", [False, True])
def test_p08_nothing_is_collected_during_captures(backend: str, device: torch.device, fails: bool) -> None:
    """The collector rests while buckets are captured, and is as it was afterwards, also after a failure."""
    ran: list[int] = []
    note_run = ran.append  # which no survey looks into

    def step(x: Tensor) -> Tensor:
        note_run(len(x))
        if fails and x.shape[0] == 2:
            raise KeyError("mine")
        return x * len([[] for _ in range(2000)])

    graphed = graphify(step, backend=backend, **ROWS)
    collected: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and ran:
            collected.append(len(ran))

    threshold, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.callbacks.append(note)
    gc.set_threshold(10)
    try:
        if fails:
            with pytest.raises(KeyError):
                graphed.capture_buckets(torch.randn(8, 3, device=device), progress=False)
        else:
            graphed.capture_buckets(torch.randn(8, 3, device=device), progress=False)
        during = len([number for number in collected if number < len(ran)])
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)

    assert during == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_p09_other_threads_may_work_during_a_capture(backend: str, device: torch.device) -> None:
    """A thread that allocates and computes all the while breaks no capture and is not captured."""
    stop, errors = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            while not stop.is_set():
                torch.ones(16, device=device).mul_(2).sum()
        except BaseException as error:
            errors.append(error)

    graphed = graphify(lambda x: x * 2, backend=backend, **ROWS)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        record = graphed.capture_buckets(torch.randn(8, 3, device=device), progress=False)
    finally:
        stop.set()
        thread.join()

    assert not errors
    assert len(record.buckets) == 3
    for n in (1, 3, 8):
        x = torch.randn(n, 3, device=device)
        assert torch.equal(graphed(x), x * 2)
    assert counts(graphed)[2] == 3


@pytest.mark.cuda
@needs_cuda
def test_p10_a_side_stream_that_is_not_joined() -> None:
    """Work left on another stream at the end is refused by name, and the next capture works."""
    side = torch.cuda.Stream()

    def step(x: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x * 3
        return x * 2

    graphed = graphify(step, **ROWS)
    with pytest.raises(CaptureError, match="stream"):
        for _ in range(2):
            graphed(torch.randn(3, 3, device="cuda"))

    other = graphify(lambda x: x * 2, **ROWS)
    for _ in range(3):
        x = torch.randn(3, 3, device="cuda")
        assert torch.equal(other(x), x * 2)


class Grows(nn.Module):
    """A workspace that grows with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.space: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.space is None or len(self.space) < len(x):
            self.space = torch.zeros_like(x)
        part = self.space[: len(x)]
        part.copy_(x)
        return part * 2


def test_p11_a_workspace_that_grows_is_not_freed_under_a_graph(backend: str, device: torch.device) -> None:
    """Small, large, small: the new workspace is noticed, and the small bucket is recorded over it."""
    graphed = graphify(Grows().to(device), check_padding="outputs", backend=backend, **ROWS)

    for n in (1, 1, 1, 3, 3, 3, 1, 2, 1, 8, 8, 8, 3, 1, 7, 4, 2):
        x = torch.randn(n, 3, device=device)
        assert torch.equal(graphed(x), x * 2)

    with pytest.raises(PaddingError, match=r"self.space"):
        graphify(Grows().to(device), backend=backend, **ROWS)(torch.randn(3, 3, device=device))


def test_p12_captures_move_no_state(backend: str, device: torch.device) -> None:
    """Caches, counters, random streams, gradients and arguments are after `capture_buckets` what they were."""
    model = CountingCache(masked=True).to(device)
    graphed = graphify(model, pad={"slots": -1}, backend=backend, **ROWS)
    x, slots = request(3, device)
    graphed(x, slots)
    before = {name: t.clone() for name, t in graphed.state_dict().items()}
    given, stream = (x.clone(), slots.clone()), torch.get_rng_state()

    graphed.capture_buckets(x, slots, progress=False)

    equal(before, dict(graphed.state_dict()))
    equal(given, (x, slots))
    assert torch.equal(stream, torch.get_rng_state())
    assert graphed.steps.item() == 1


def test_p13_the_capturing_call_has_a_result(backend: str, device: torch.device) -> None:
    """A capture only records; the call that makes it returns eager's result, and state moves once."""
    graphed, plain = (
        graphify(CountingCache(masked=True).to(device), pad={"slots": -1}, backend=backend, **ROWS),
        CountingCache(),
    )
    plain.to(device)

    for expected in ((1, 0, 0), (1, 1, 0), (1, 1, 1)):
        x, slots = request(3, device)
        x.mul_(8).round_().abs_()
        equal(plain(x, slots), graphed(x, slots))
        equal(dict(plain.state_dict()), dict(graphed.state_dict()))
        assert counts(graphed)[:3] == expected


def test_p14_a_failed_capture_is_no_storm(backend: str, device: torch.device) -> None:
    """One size that cannot be captured is tried once, runs eagerly from then on, and disturbs no other."""
    runs: list[int] = []
    note = runs.append  # which no survey looks into

    def step(x: Tensor) -> Tensor:
        note(len(x))
        return x * float(x.sum() > -1e9) if len(x) == 8 else x * 2

    graphed = graphify(step, fallback="eager", backend=backend, **ROWS)
    with pytest.warns(GraphifyWarning, match="runs eagerly from now on") as said:
        for n in (2, 2, 2, 8, 8, 8, 2, 8, 4, 4, 4, 2):
            x = torch.randn(n, 3, device=device)
            equal(step(x), graphed(x))

    assert len(said) == 1
    assert graphed.stats().reasons["uncapturable"] >= 3
    assert runs.count(8) <= 4 + 4 + 1
    assert len(graphed.graphs) == 2


def test_p15_new_weights_are_noticed(backend: str, device: torch.device) -> None:
    """`load_state_dict(assign=True)`, `.data`, a new parameter, another adapter: the next call has them."""
    net = graphify(nn.Linear(3, 3).to(device), backend=backend, **ROWS)

    def fresh() -> Tensor:
        return torch.randn(3, 3, device=device)

    changes = [
        lambda: net.load_state_dict({"weight": fresh(), "bias": torch.zeros(3, device=device)}, assign=True),
        lambda: setattr(net.weight, "data", fresh()),
        lambda: setattr(net, "weight", nn.Parameter(fresh())),
        lambda: net.weight.copy_(fresh()),
        lambda: None,
    ]
    for change in changes:
        for n in (3, 3, 4, 1):
            x = torch.randn(n, 3, device=device)
            torch.testing.assert_close(net(x), x @ net.weight.T + net.bias)
        change()
        x = torch.randn(2, 3, device=device)
        torch.testing.assert_close(net(x), x @ net.weight.T + net.bias)


def test_p16_an_output_outlives_the_next_bucket(backend: str, device: torch.device) -> None:
    """Fresh results keep their values whatever replays next; static ones say that they are gone."""
    fresh = graphify(lambda x: x * 2, backend=backend, **ROWS)
    static = graphify(lambda x: x * 2, outputs="static", backend=backend, **ROWS)
    small, large = torch.randn(3, 3, device=device), torch.randn(8, 3, device=device)
    for graphed in (fresh, static):
        graphed.capture_buckets(large, progress=False)

    kept = fresh(small)
    fresh(large)
    assert torch.equal(kept, small * 2)

    gone = static(small)
    static(large)
    with pytest.raises(StaleOutputError):
        static(gone)


def test_p17_nothing_is_captured_while_serving(
    backend: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """After `seal` a miss runs eagerly, is counted, and the log says by what it missed."""
    graphed = graphify(lambda x: x * 2, backend=backend, **ROWS)
    graphed.capture_buckets(torch.randn(8, 3, device=device), progress=False)
    graphed.seal()

    with caplog.at_level(logging.WARNING, "graphify"):
        for n, width in ((3, 3), (8, 3), (3, 5), (1, 3)):
            x = torch.randn(n, width, device=device)
            assert torch.equal(graphed(x), x * 2)

    assert counts(graphed) == (0, 0, 3, 1, 0)
    assert graphed.stats().reasons == {"sealed": 1}
    assert graphed.stats().recordings == 3
    assert "`x`: shape (4, 5) instead of" in caplog.text


def test_p18_graphs_do_not_grow_without_end(backend: str, device: torch.device) -> None:
    """Hundreds of signatures leave at most `max_graphs` graphs."""
    graphed = graphify(lambda x, y: (x * 2, y), max_graphs=8, buckets={"x": {0: TOKENS}}, backend=backend)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphifyWarning)
        for width in range(1, 61):
            for n in (3, 3, 2):
                x, y = torch.randn(n, 2, device=device), torch.randn(width, device=device)
                assert torch.equal(graphed(x, y)[0], x * 2)
                assert len(graphed.graphs) <= 8


def test_p22_padding_may_be_nan(backend: str, device: torch.device) -> None:
    """Rows of padding that divide by zero leave nothing behind, ahead of time or later; `pad` makes them legal."""

    def mean(x: Tensor, lengths: Tensor) -> Tensor:
        return x.sum(1) / lengths

    for pad in (0, {"lengths": 1}):
        graphed = graphify(mean, pad=pad, backend=backend, **ROWS)
        x, lengths = torch.randn(3, 4, device=device), torch.full((3,), 4.0, device=device)
        graphed.capture_buckets(x, lengths, progress=False)
        for n in (3, 8, 1, 5):
            x, lengths = torch.randn(n, 4, device=device), torch.full((n,), 4.0, device=device)
            assert torch.equal(graphed(x, lengths), mean(x, lengths))
        assert counts(graphed)[2] == 4


def test_p23_what_a_replay_does_not_repeat_is_verified(backend: str, device: torch.device) -> None:
    """A value that no guard can see was frozen by the capture: the first replays are compared with eager."""

    class Settings:
        def __init__(self) -> None:
            self.scale = 2.0

    settings, get = Settings(), reader("scale")
    graphed = graphify(lambda x: x * get(settings), buckets=[4], verify=2, backend=backend)
    x = torch.ones(3, 2, device=device)
    for _ in range(2):
        graphed(x)
    settings.scale = 3.0

    if backend == "eager":  # which runs the function itself
        assert torch.equal(graphed(x), x * 3)
        return
    with pytest.raises(VerificationError):
        graphed(x)


def test_p24_each_bucket_is_recorded_at_its_own_size(backend: str, device: torch.device) -> None:
    """What code chooses by the size, it chooses for the bucket: no other size is ever run for it."""
    seen: set[int] = set()
    note = seen.add  # which no survey looks into

    def step(x: Tensor) -> Tensor:
        note(len(x))
        return x * 2 if len(x) > 4 else x + x

    graphed = graphify(step, backend=backend, **ROWS)
    graphed.capture_buckets(torch.randn(8, 3, device=device), progress=False)

    assert seen == {2, 4, 8}


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the first rows": lambda rows: rows[:3],
    "rows further on": lambda rows: rows[1:4],
    "all": lambda rows: rows,
    "every other row": lambda rows: rows[::2],
    "one row many times": lambda rows: rows[:1].expand(3, 2),
    "the other way round": lambda rows: rows[:2].t(),
    "columns": lambda rows: rows[:, 1:].expand(4, 2),
}


@pytest.mark.parametrize("part", PARTS)
def test_any_part_of_a_buffer_is_an_argument(backend: str, device: torch.device, part: str) -> None:
    """A view of the graphs' own memory is taken for what it shows, wherever in it that lies and in whatever order."""
    graphed = graphify(lambda x: x * 2, buckets=[4], backend=backend)
    for n in (4, 4, 3, 3):
        graphed(torch.randn(n, 2, device=device))
    buffer, kept = graphed.buffer("x"), []

    for _ in range(4):
        buffer.copy_(torch.randn(4, 2, device=device))
        given = PARTS[part](buffer)
        expected = given.clone() * 2
        kept.append((expected, graphed(given)))
    for expected, found in kept:
        assert torch.equal(expected, found)


def test_buffers_that_are_exchanged(backend: str, device: torch.device) -> None:
    """Parts of two buffers may be each other's arguments: each is read before any is written."""
    graphed = graphify(lambda x, y: x - y * 2, buckets=[4], backend=backend)
    for n in (4, 4, 3, 3):
        graphed(torch.randn(n, 2, device=device), torch.randn(n, 2, device=device))
    x, y = graphed.buffer("x"), graphed.buffer("y")

    for _ in range(3):
        for first, second in ((y[:3], x[:3]), (x[2:], x[:2]), (y[:2], y[2:])):
            x.copy_(torch.randn(4, 2, device=device))
            y.copy_(torch.randn(4, 2, device=device))
            expected = first - second * 2
            assert torch.equal(graphed(first, second), expected)
