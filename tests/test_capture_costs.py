"""What capturing many buckets costs, in runs and in surveys of Python state, and that sparing them costs no promise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checks import together
from torch import Tensor, nn

from graphify import CaptureError, PaddingError, graphify
from graphify._graph import Setting
from graphify._guards import Guard
from graphify._survey import Survey

FEW, MANY = [2, 4], [2, 4, 6, 8, 10, 12, 14, 16]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Inference."""
    with torch.no_grad():
        yield


def counting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """The first argument of each call of a method from now on."""
    found: list[Any] = []
    plain = getattr(owner, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(args[0])
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return found


class Net(nn.Module):
    """A few layers, and Python state that a subclass may read or leave behind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.scale, self.large, self.last = 2.0, 3.0, None
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def captured(net: Net, backend: str, device: torch.device, sizes: list[int], given: int) -> Any:
    """The buckets of a net from an example of some rows."""
    graphed = graphify(net.to(device).forward, buckets=sizes, backend=backend)
    graphed.capture_buckets(torch.randn(given, 3, device=device), progress=False)
    return graphed


class TestCounts:
    @pytest.mark.parametrize("proved", [False, True])
    def test_surveys(
        self, monkeypatch: pytest.MonkeyPatch, backend: str, device: torch.device, proved: bool
    ) -> None:
        """However many buckets are captured in a row, with proofs or without, Python state is walked as often."""
        counts = []
        for sizes in (FEW, MANY):
            with monkeypatch.context() as patch:
                surveys = counting(patch, Survey, "__init__")
                captured(Net(), backend, device, sizes, 1 if proved else sizes[-1])
            counts.append(len(surveys))
        assert counts[0] == counts[1] <= 4, counts

    def test_runs(self, monkeypatch: pytest.MonkeyPatch, backend: str, device: torch.device) -> None:
        """The function runs once for each bucket, and once before: what one bucket taught holds for the others."""
        runs = counting(monkeypatch, Setting, "run")
        captured(Net(), backend, device, MANY, MANY[-1])
        assert [len(values[0]) for values in runs] == [MANY[-1], *reversed(MANY)]

    def test_runs_of_proofs(
        self, monkeypatch: pytest.MonkeyPatch, backend: str, device: torch.device
    ) -> None:
        """A proof runs the function padded in two ways; the run at the exact size stands for all buckets."""
        runs = counting(monkeypatch, Setting, "run")
        captured(Net(), backend, device, FEW, 1)
        assert [len(values[0]) for values in runs] == [4, 4, 1, 4, 4, 2, 2, 2]

    def test_guards(self, monkeypatch: pytest.MonkeyPatch, backend: str, device: torch.device) -> None:
        """Buckets that take the same for granted share what checks it."""
        guards = counting(monkeypatch, Guard, "__init__")
        captured(Net(), backend, device, MANY, MANY[-1])
        assert len(guards) <= 3

    @pytest.mark.parametrize("name", ["mode", "prev", "old_dispatch_mode_flags"])
    def test_names_of_the_watch(self, backend: str, device: torch.device, name: str) -> None:
        """A field that torch's own switches name, and the function does not, may change: what was captured still holds."""
        net = Net().to(device)
        graphed = graphify(net.forward, backend=backend)
        for turn in range(4):
            setattr(net, name, turn // 2)
            x = torch.randn(2, 3, device=device)
            assert torch.equal(graphed(x), net(x))
        assert graphed.stats().warmups == graphed.stats().captures == 1


class LeavesOne(Net):
    """Leaves its result in an attribute, at one size only."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if len(x) == 8:
            self.last = y
        return y


class Appends(Net):
    """Appends to a list at one size only."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 8:
            self.seen.append(len(x))
        return super().forward(x)


class ReadsAnother(Net):
    """Runs other code at one size, which reads a name that nothing else reads."""

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x) if len(x) == 8 else super().forward(x)

    def other(self, x: Tensor) -> Tensor:
        return x * self.large


class Rebinds(Net):
    """Makes a table at each new size, which later calls read."""

    def forward(self, x: Tensor) -> Tensor:
        if self.last is None:
            self.last = x.new_ones(3)
        return super().forward(x) * self.last


class MixesRows(Net):
    """At one size each row gets something of all others."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if len(x) == 8 else super().forward(x)


class TestPromises:
    """Each walk that is spared would have met the same."""

    def test_what_one_bucket_leaves(self, backend: str, device: torch.device) -> None:
        """An attribute that one bucket writes is written by its replays, and by those of no other."""
        net = LeavesOne()
        graphed = captured(net, backend, device, MANY, 16)
        assert net.last is None
        for count in (16, 4, 8):
            x = torch.randn(count, 3, device=device)
            y = graphed(x)
            assert y.equal(LeavesOne().to(device)(x))
            assert net.last.equal(y) if count == 8 else net.last is None
        assert graphed.stats().replays == 3

    def test_a_side_effect_of_a_later_bucket(self, backend: str, device: torch.device) -> None:
        """What a later bucket alone would do to Python state is refused by name, and undone."""
        net = Appends()
        with pytest.raises(CaptureError, match=r"seen"):
            captured(net, backend, device, MANY, 16)
        assert net.seen == []

    def test_code_of_one_bucket(self, backend: str, device: torch.device) -> None:
        """A value that only the code of one bucket reads is part of its signature, and of no other's."""
        net = ReadsAnother()
        graphed = captured(net, backend, device, MANY, 16)
        net.large = 5.0
        before = graphed.stats().replays
        for count in (16, 4):
            x = torch.randn(count, 3, device=device)
            assert graphed(x).equal(net(x))
        assert graphed.stats().replays == before + 2
        x = torch.randn(8, 3, device=device)
        assert graphed(x).equal(x * 5.0)

    @pytest.mark.parametrize("count", [2, 8, 16])
    def test_a_change_after(self, backend: str, device: torch.device, count: int) -> None:
        """A change of what all buckets read is seen by each of them; an equal value in a new object is no change."""
        net = Net()
        graphed = captured(net, backend, device, MANY, 16)
        net.scale = float("2.0")
        for size in (16, count):
            x = torch.randn(size, 3, device=device)
            assert graphed(x).equal(net(x))
        assert graphed.stats().replays == 2
        net.layers[1].weight = nn.Parameter(torch.ones(3, 3, device=device))
        x = torch.randn(count, 3, device=device)
        assert graphed(x).equal(net(x))
        assert graphed.stats().replays == 2

    def test_a_table_made_inside(self, backend: str, device: torch.device) -> None:
        """A table that the first run makes is made by each call that finds none, buckets captured in a row or not."""
        net, other = Rebinds(), Rebinds()
        with pytest.raises(CaptureError, match="last"):
            captured(net, backend, device, MANY, 16)
        assert net.last is None
        other.to(device)(torch.randn(1, 3, device=device))
        graphed = captured(other, backend, device, MANY, 16)
        x = torch.randn(8, 3, device=device)
        assert graphed(x).equal(other(x))

    def test_padding_that_one_bucket_feels(self, backend: str, device: torch.device) -> None:
        """A bucket whose own code mixes rows is refused, though the run at the exact size is another bucket's."""
        with pytest.raises(PaddingError, match=r"batch.*8|8.*batch|\(8, 3\)|depends on"):
            captured(MixesRows(), backend, device, MANY, 3)
        assert captured(MixesRows(), backend, device, [2, 4, 16], 3).stats().recordings == 3

    def test_a_write_between(
        self, monkeypatch: pytest.MonkeyPatch, backend: str, device: torch.device
    ) -> None:
        """Memory that another thread writes between two buckets is read anew by the proof of the second."""
        net, runs, plain = Net(), [], Setting.run

        def write() -> None:
            with torch.no_grad():
                net.layers[0].weight.add_(1)

        def run(self: Setting, values: tuple[Any, ...]) -> Any:
            runs.append(len(values[0]))
            if runs.count(2) == 1 == runs.count(1):
                together(1, write)
            return plain(self, values)

        monkeypatch.setattr(Setting, "run", run)
        graphed = captured(net, backend, device, FEW, 1)
        assert [size for size in runs if size == 1] == [1, 1], runs
        x = torch.randn(2, 3, device=device)
        assert graphed(x).equal(net(x))
