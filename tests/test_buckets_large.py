"""Functions that write memory of which no trial makes a copy: every call happens once, whether or not it is padded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bucketing import BATCH, ROWS, SEQ
from checks import counts, equal
from torch import Tensor, nn

from graphify import CaptureError, GraphifyWarning, PaddingError, graphify

pytestmark = pytest.mark.filterwarnings("ignore:.* is trusted, not proved:graphify.GraphifyWarning")
SIZES = (3, 3, 3, 4, 1, 1, 2, 5, 5, 8, 6, 7, 3, 2, 8, 1)
CHECKS: list[Any] = [True, "outputs", False]


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large here."""
    monkeypatch.setattr("graphify._trial._LIMIT", 1000)


def whole(*shape: int, device: torch.device) -> Tensor:
    """Small whole numbers, whose sums are equal bit for bit in any order."""
    return torch.randint(-4, 5, shape, device=device).float()


class Trained:
    """A whole step over a large weight and a small one."""

    def __init__(self, device: torch.device, ran: list[int] | None = None, **options: Any) -> None:
        self.net = nn.Sequential(nn.Linear(3, 200, bias=False), nn.Linear(200, 2)).to(device)
        with torch.no_grad():
            for index, parameter in enumerate(self.net.parameters()):
                generator = torch.Generator().manual_seed(index)
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator) / 16)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=2**-12, **options)
        self.note = [].append if ran is None else ran.append  # which no survey looks into

    def __call__(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        self.note(x.shape[0])
        self.optimizer.zero_grad()
        loss = ((self.net(x) - y).square() * mask[:, None]).sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def batch(n: int, device: torch.device) -> tuple[Tensor, ...]:
    return whole(n, 3, device=device), whole(n, 2, device=device), torch.ones(n, device=device)


def follow(plain: Trained, net: nn.Module, step: Callable[..., Any], n: int, device: torch.device) -> None:
    """One step of each, after which they are alike."""
    args = batch(n, device)
    expected, found = plain(*args), step(*(t.clone() for t in args))
    assert torch.allclose(expected, found, rtol=1e-4)
    for a, b in zip(plain.net.parameters(), net.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("check", CHECKS)
def test_a_whole_step(backend: str, device: torch.device, check: Any, momentum: float) -> None:
    """Weights move once per call; the run of a proof ends before it touches the large one."""
    ran: list[int] = []
    plain, mine = Trained(device, momentum=momentum), Trained(device, ran, momentum=momentum)
    step = graphify(mine, pad={"mask": 0}, check_padding=check, backend=backend, **ROWS)

    for index, n in enumerate(SIZES):
        follow(plain, mine.net, step, n, device)
        if index == 2:  # a trial that ends early and the call itself; a warm-up; a capture
            assert ran == [3, 3, 4, 4]
    before = len(ran)
    for n in (3, 1, 7, 2):
        follow(plain, mine.net, step, n, device)
    assert len(ran) == before + (4 if backend == "eager" else 0)
    assert counts(step)[2] > 0
    assert step.stats().reasons["cut"] == 3  # one per bucket


def test_a_proof_puts_back_what_it_wrote_before(backend: str, device: torch.device) -> None:
    """A trial that ends early leaves small weights, gradients, random streams and versions as they were."""
    mine = Trained(device)
    small = mine.net[1].bias
    states: list[Any] = []
    note = states.append

    def step(x: Tensor) -> Tensor:
        note((small.detach().clone(), small._version, mine.net[0].weight._version))
        with torch.no_grad():
            small.add_(1)
            mine.net[0].weight.add_(1)
        return x * 2

    graphed = graphify(step, backend=backend, **ROWS)
    graphed(whole(3, 3, device=device))

    assert len(states) == 2
    equal(states[0], states[1])
    assert small._version == states[0][1] + 1


def test_a_step_that_catches_everything(backend: str, device: torch.device) -> None:
    """A function that lets no exception through is run once still, as far as its memory shows."""
    memory = torch.zeros(300, device=device)

    def step(x: Tensor) -> Tensor:
        try:
            memory.add_(1)
        except:  # noqa: E722
            memory.add_(2)
        return x * 2

    graphed = graphify(step, backend=backend, **ROWS)
    for index, n in enumerate(SIZES):
        x = whole(n, 3, device=device)
        assert torch.equal(graphed(x), x * 2)
        assert torch.equal(memory, torch.full_like(memory, index + 1.0))


class Cache(nn.Module):
    """A large cache, rows by slot; padded rows have slot -1 and write what is there."""

    kv: Tensor

    def __init__(self, ran: list[int] | None = None) -> None:
        super().__init__()
        self.register_buffer("kv", torch.zeros(100, 3))
        self.note = [].append if ran is None else ran.append

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        self.note(x.shape[0])
        live, safe = slots >= 0, slots.clamp(min=0)
        self.kv.index_add_(0, safe, torch.where(live[:, None], x - self.kv[safe], 0.0))
        return self.kv[safe] * 2


@pytest.mark.parametrize("check", CHECKS)
def test_a_cache_with_slots(backend: str, device: torch.device, check: Any) -> None:
    """A large cache holds what eager puts there after every call."""
    ran: list[int] = []
    plain, mine = Cache().to(device), Cache(ran).to(device)
    with torch.no_grad():
        step = graphify(mine, pad={"slots": -1}, check_padding=check, backend=backend, **ROWS)
        for index, n in enumerate(SIZES):
            x, slots = whole(n, 3, device=device), torch.randperm(100)[:n].to(device)
            assert torch.equal(plain(x, slots), step(x, slots))
            assert torch.equal(plain.kv, mine.kv)
            if index == 2:
                assert ran == [3, 3, 4, 4]

    assert counts(step)[:4] == (3, 3, 7, 3)


@pytest.mark.parametrize("check", CHECKS)
def test_a_cache_that_is_an_argument(backend: str, device: torch.device, check: Any) -> None:
    """A large cache that is given by reference is written in place, once per call."""
    ran: list[int] = []
    note_run = ran.append

    def step(x: Tensor, slots: Tensor, kv: Tensor) -> Tensor:
        note_run(x.shape[0])
        live, safe = slots >= 0, slots.clamp(min=0)
        kv.index_add_(0, safe, torch.where(live[:, None], x, 0.0))
        return kv[safe] * 2

    plain, mine = torch.zeros(100, 3, device=device), torch.zeros(100, 3, device=device)
    with torch.no_grad():
        graphed = graphify(
            step,
            pad={"slots": -1},
            static_args=("kv",),
            buckets={"x": {0: BATCH}, "slots": {0: BATCH}},
            check_padding=check,
            backend=backend,
        )
        for index, n in enumerate(SIZES):
            x, slots = whole(n, 3, device=device), torch.randperm(100)[:n].to(device)
            assert torch.equal(graphed(x, slots, mine), step(x, slots, plain))
            assert torch.equal(plain, mine)
            if index == 2:
                assert ran == [3, 3, 3, 4, 3, 4, 3]

    assert graphed.stats().replays > 0


@pytest.mark.parametrize("check", CHECKS)
def test_an_accumulating_buffer(backend: str, device: torch.device, check: Any) -> None:
    """A large sum over all rows so far grows once per call."""
    ran: list[int] = []

    class Sums(nn.Module):
        total: Tensor

        def __init__(self, note: Callable[[int], None]) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(300))
            self.note = note

        def forward(self, x: Tensor) -> Tensor:
            self.note(x.shape[0])
            self.total += x.sum()
            return x + self.total[0]

    plain, mine = Sums([].append).to(device), Sums(ran.append).to(device)
    with torch.no_grad():
        step = graphify(mine, pad=0, check_padding=check, backend=backend, **ROWS)
        for index, n in enumerate(SIZES):
            x = whole(n, 3, device=device)
            assert torch.equal(plain(x), step(x))
            assert torch.equal(plain.total, mine.total)
            if index == 2:
                assert ran == [3, 3, 4, 4]

    assert counts(step)[:4] == (3, 3, 7, 3)


def test_a_bucket_that_was_full_first(backend: str, device: torch.device) -> None:
    """What a full call has shown to be large needs no trial that ends early."""
    ran: list[int] = []
    plain, mine = Trained(device), Trained(device, ran)
    step = graphify(mine, pad={"mask": 0}, backend=backend, **ROWS)

    for n in (4, 4, 3, 3, 3):
        follow(plain, mine.net, step, n, device)

    assert ran[:3] == [4, 4, 3]
    assert step.stats().reasons["cut"] == 1


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: None,
    "rows and their sum": lambda x: (x * 2, x.sum((0, 1))),
    "flattened": lambda x: x.flatten(0, 1),
    "flattened the other way": lambda x: x.transpose(0, 1).flatten(0, 1),
    "transposed": lambda x: {"a": x.transpose(0, 1), "b": x},
    "every second": lambda x: x[:, ::2],
    "a view beside": lambda x: [x[:, :1], x * 3],
    "as many columns": lambda x: x.new_ones(x.shape[0], 3) * 2,
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_cut_to_eagers(backend: str, device: torch.device, name: str) -> None:
    """Shapes of real calls tell how results are cut; where they leave two ways open, the size runs eagerly."""
    large, expected = torch.zeros(300, device=device), torch.zeros(300, device=device)
    result = RESULTS[name]

    def step(x: Tensor, total: Tensor) -> Any:
        total += x.sum()
        return result(x)

    buckets = {"x": {0: BATCH, 1: SEQ}}
    graphed = graphify(lambda x: step(x, large), pad=0, buckets=buckets, backend=backend)
    sizes = [
        (3, 3),
        (3, 3),
        (3, 3),
        (2, 3),
        (2, 3),
        (4, 3),
        (3, 4),
        (4, 4),
        (1, 1),
        (3, 5),
        (3, 5),
        (3, 5),
        (2, 7),
    ]
    with torch.no_grad():
        for n, s in [*sizes, *sizes]:
            x = whole(n, s, 6, device=device)
            equal(step(x, expected), graphed(x))
            assert torch.equal(large, expected)

    assert graphed.stats().replays > 0


@pytest.mark.parametrize("options", [{}, {"buckets": [4]}])
def test_what_cannot_be_captured(backend: str, device: torch.device, options: dict[str, Any]) -> None:
    """A call that has written large memory stands; the next one is refused before it does anything."""
    large = torch.zeros(300, device=device)

    def step(x: Tensor) -> Tensor:
        large.add_(1)
        return x * large.sum().item()

    graphed = graphify(step, backend=backend, **options)
    assert torch.equal(graphed(torch.ones(3, 3, device=device)), torch.full((3, 3), 300.0, device=device))
    for _ in range(2):
        with pytest.raises(CaptureError, match="read on the host"):
            graphed(torch.ones(3, 3, device=device))
    assert large[0] == 1


def test_what_cannot_be_captured_and_is_known_before(backend: str, device: torch.device) -> None:
    """What a trial has met before it ends is said at once."""
    large = torch.zeros(300, device=device)

    def step(x: Tensor) -> Tensor:
        large.add_(x.sum().item())
        return x * 2

    graphed = graphify(step, buckets=[4], backend=backend)
    with pytest.raises(CaptureError, match="read on the host"):
        graphed(torch.ones(3, 3, device=device))
    assert large[0] == 0


def test_a_number_that_is_a_size(backend: str, device: torch.device) -> None:
    """A call whose plain results padding changes has eager's; from then on its bucket is refused."""
    large = torch.zeros(300, device=device)

    def step(x: Tensor) -> tuple[Tensor, int]:
        large.add_(1)
        return x * 2, x.shape[0]

    graphed = graphify(step, backend=backend, **ROWS)
    for count in (1, 2):
        x = whole(3, 3, device=device)
        found = graphed(x)
        assert torch.equal(found[0], x * 2)
        assert found[1] == 3
        assert large[0] == count
    with pytest.raises(PaddingError, match="returns other values, not tensors"):
        graphed(x)
    assert large[0] == 2


def test_an_argument_that_is_written_from_outside(backend: str, device: torch.device) -> None:
    """A bucket's copy of it would not see the write."""
    state = torch.zeros(300, 3, device=device)

    def step(x: Tensor) -> Tensor:
        state.add_(1)
        return x * 2

    graphed = graphify(step, buckets=[4], backend=backend)
    with torch.no_grad():
        assert torch.equal(graphed(state[:3]), torch.full((3, 3), 2.0, device=device))
        with pytest.raises(CaptureError, match="shares memory"):
            graphed(state[:3])
    assert state[0, 0] == 1


@pytest.mark.parametrize("first", [False, True])
def test_a_whole_step_ahead_of_time(backend: str, device: torch.device, first: bool) -> None:
    """No weight moves: it is refused, and calls capture it; after a real step only where a capture runs nothing."""
    plain, mine = (Trained(device, weight_decay=0.5) for _ in range(2))
    step = graphify(mine, pad={"mask": 0}, backend=backend, **ROWS)
    for n in (8, 8) if first else ():
        follow(plain, mine.net, step, n, device)
    before = [p.detach().clone() for p in mine.net.parameters()]

    if first and backend != "eager":
        captured = step.capture_buckets(*batch(3, device), progress=False)
        assert {bucket.unproved for bucket in captured.buckets}
    else:
        with pytest.raises(CaptureError, match="whole step over tensors above 256 MiB"):
            step.capture_buckets(*batch(3, device), progress=False)

    equal(before, [p.detach() for p in mine.net.parameters()])
    for n in SIZES:
        follow(plain, mine.net, step, n, device)
    assert step.stats().replays > 0


def test_the_record_says_what_is_not_compared(backend: str, device: torch.device) -> None:
    """A cache captured ahead of time is not touched; the record says that its padding was not compared."""
    plain, mine = Cache().to(device), Cache().to(device)
    with torch.no_grad():
        step = graphify(mine, pad={"slots": -1}, backend=backend, **ROWS)
        captured = step.capture_buckets(
            whole(3, 3, device=device), torch.arange(3, device=device), progress=False
        )
        assert not mine.kv.any()
        for n in SIZES:
            x, slots = whole(n, 3, device=device), torch.randperm(100)[:n].to(device)
            assert torch.equal(plain(x, slots), step(x, slots))
            assert torch.equal(plain.kv, mine.kv)

    assert "padding not compared: it writes tensors above 256 MiB" in str(captured)
    assert step.stats().reasons["cut"] == 3


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("check", CHECKS)
def test_what_is_trusted_is_said_once(backend: str, device: torch.device, check: Any, full: bool) -> None:
    """A large cache that padding might write is named once, with a way to prove it, unless the check is off."""
    step = graphify(Cache().to(device), pad={"slots": -1}, check_padding=check, backend=backend, **ROWS)
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for n in (4, 4, *SIZES) if full else SIZES:
            step(whole(n, 3, device=device), torch.randperm(100)[:n].to(device))

    texts = [str(warning.message) for warning in said if warning.category is GraphifyWarning]
    assert len(texts) == (check is True)
    for text in texts:
        assert "writes `self.kv`, above 256 MiB, of which no trial makes a copy" in text
        assert "Prove it once with a smaller one" in text


def test_what_is_trusted_may_be_an_argument(backend: str, device: torch.device) -> None:
    """A large argument by reference is named as such."""

    def step(x: Tensor, kv: Tensor) -> Tensor:
        kv[: x.shape[0]] = x
        return x * 2

    graphed = graphify(step, static_args=("kv",), buckets={"x": {0: BATCH}}, backend=backend)
    with torch.no_grad(), pytest.warns(GraphifyWarning, match="writes `kv`, above 256 MiB"):
        graphed(whole(3, 3, device=device), torch.zeros(100, 3, device=device))


@pytest.mark.parametrize("called", [0, 3])
def test_a_capture_of_real_rows_ahead_of_time(backend: str, device: torch.device, called: int) -> None:
    """Without buckets it would write a large cache for good: refused, and calls capture it."""
    plain, mine = Cache().to(device), Cache().to(device)
    step = graphify(mine, backend=backend)
    x, slots = whole(3, 3, device=device), torch.tensor([2, 5, 7], device=device)
    with torch.no_grad():
        for _ in range(called):
            assert torch.equal(plain(x, slots), step(x, slots))
        given = x[:2], slots[:2] + 10
        with pytest.raises(CaptureError, match="writes tensors above 256 MiB") as raised:
            step.capture(*given)
        assert "declare `buckets`" in raised.value.fix
        assert torch.equal(plain.kv, mine.kv)
        for _ in range(4):
            assert torch.equal(plain(*given), step(*given))
            assert torch.equal(plain.kv, mine.kv)
    assert step.stats().captures == 1 + (called > 0)


def test_a_capture_of_real_rows_after_a_warm_up(backend: str, device: torch.device) -> None:
    """Of a signature that a call has warmed up, a capture that runs nothing leaves no trace."""
    plain, mine = Cache().to(device), Cache().to(device)
    step = graphify(mine, backend=backend)
    x, slots = whole(3, 3, device=device), torch.tensor([2, 5, 7], device=device)
    with torch.no_grad():
        assert torch.equal(plain(x, slots), step(x, slots))
        if backend == "eager":
            with pytest.raises(CaptureError, match="writes tensors above 256 MiB"):
                step.capture(x + 1, slots + 1)
        else:
            assert step.capture(x + 1, slots + 1).nodes
        assert torch.equal(plain.kv, mine.kv)
        for i in range(4):
            assert torch.equal(plain(x + i, slots), step(x + i, slots))
            assert torch.equal(plain.kv, mine.kv)
