"""`graphify.check`: everything in the way of a graph at once, with the user's lines, and without trace."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from conftest import needs_cuda
from test_messages import SAID, box, held, line_with, log, shares
from torch import Tensor, nn

import graphify
from graphify import CaptureError, check, disabled


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    monkeypatch.setattr(box, "n", 0)
    log.clear()


@pytest.mark.parametrize("said", SAID, ids=lambda said: said[0].__name__)
def test_check_says_what_the_capture_would_say(said):
    """One fault is one finding, in the words of the error that a capture raises, and with a line."""
    function, source, what, why, fix = said
    report = check(function, torch.ones(3))
    (finding,) = report
    assert not report
    assert (finding.what.replace("log[0]", "log[1]"), finding.why, finding.fix) == (what, why, fix)
    if source is not None:
        number, text = line_with(function, source)
        assert finding.where == f"{__file__.replace('test_check', 'test_messages')}:{number}: {text}"
    assert str(finding) == str(CaptureError(finding.what, where=finding.where, why=why, fix=fix))
    assert str(finding) in str(report)
    assert (box.n, log) == (0, [])


class Everything(nn.Module):
    """A fault of each kind, a line each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=None)
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0
        self.history: list[int] = []

    def forward(self, x: Tensor, names: Any, mask: Any = None) -> Any:
        self.calls += 1
        self.history.append(1)
        self.steps += 1
        y = self.norm(self.linear(x))
        if y.sum() > 0:
            y = y + 1
        y = y * random.random()
        self.last = y
        return y[y > 0].sum(), y.nonzero(), names


KINDS = [
    ("`names` is a set", "report ="),
    ("the count of batches of a BatchNorm", "self.norm("),
    ("a tensor's value is read", "if y.sum()"),
    ("`x[mask]`", "return y[y > 0]"),
    ("`nonzero`", "return y[y > 0]"),
    ("`Everything` draws from random", "random.random()"),
    ("`Everything` reads and re-binds `Everything.calls`", "self.calls += 1"),
    ("`Everything` changes `Everything.history[1]`", "self.history.append"),
    ("`output[2]` is a set", None),
]


def test_all_findings_come_at_once_and_nothing_is_left_behind():
    """Nine faults are nine findings at their own lines; memory, attributes and random streams are as before."""
    net, x = Everything(), torch.randn(3, 4)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    streams, host = torch.get_rng_state(), random.getstate()
    report = check(net, x, {1})
    for (what, source), finding in zip(KINDS, report, strict=True):
        assert finding.what.startswith(what)
        assert source is None or source in str(finding.where)
    assert len(report) == 9
    assert not report.ok
    assert str(report).startswith("Everything: 9 in the way of a graph\n1. `names` is a set")
    assert (net.calls, net.history, hasattr(net, "last")) == (0, [], False)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), streams)
    assert random.getstate() == host


def test_a_function_without_faults():
    """Nothing in the way: the report is true, has no findings and says so."""
    report = check(lambda x, scale=2.0: (x * scale).relu(), torch.randn(3))
    assert report.ok
    assert report
    assert [*report] == []
    assert str(report).endswith("nothing in the way of a graph")


@pytest.mark.parametrize("kind", ["function", "module", "method"])
def test_what_is_graphed_already_is_checked_as_what_it_wraps(kind):
    """A graphed target captures nothing, counts nothing, and its body is looked into."""

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

        @graphify.graphify(backend="tape")
        def other(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    net = Net()
    function = graphify.graphify(lambda x: x * x.sum().item(), backend="tape")
    target = {"function": function, "module": graphify.graphify(net, backend="tape"), "method": net.other}[
        kind
    ]
    (finding,) = check(target, torch.ones(3))
    assert "x.sum().item()" in str(finding.where)
    assert graphify.handle(target).stats().calls == 0


def test_a_lazily_built_cache_is_no_fault():
    """What a function builds in its first run and only reads later is not in the way."""
    tables: dict[int, Tensor] = {}

    def f(x: Tensor) -> Tensor:
        if x.shape[0] not in tables:
            tables[x.shape[0]] = torch.arange(x.shape[0], dtype=torch.float32)
        return x + tables[x.shape[0]]

    assert check(f, torch.ones(3))
    assert tables == {}


def test_optimizers_are_named_with_their_remedy():
    """A step that counts on the host is one finding, at the line of the step; its state and gradients are undone."""
    net = nn.Linear(4, 2)

    def step(optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    before = net.weight.clone()
    bad, good = torch.optim.Adam(net.parameters()), torch.optim.Adam(net.parameters(), fused=True)
    (finding,) = check(step, bad, torch.ones(3, 4))
    assert finding.what == "`Adam` counts its steps on the host"
    assert "optimizer.step()" in str(finding.where)
    assert "fused=True" in finding.fix
    assert check(step, good, torch.ones(3, 4))
    assert not bad.state
    assert not good.state
    assert net.weight.grad is None
    assert torch.equal(net.weight, before)


def test_a_step_that_returns_its_loss():
    """A result that could go backward a second time is found."""
    net = nn.Linear(4, 2)

    def step(x: Tensor) -> Tensor:
        loss = net(x).sum()
        loss.backward()
        return loss

    (finding,) = check(step, torch.ones(3, 4))
    assert finding.fix == "`return loss.detach()`"


def test_arguments_are_named_by_path_all_of_them():
    """Each argument that cannot be staged is a finding of its own, and the call runs all the same."""
    report = check(lambda a, b, *, c: c + 1, {"k": {1}}, torch.eye(2).to_sparse(), c=torch.ones(2))
    first, second = report
    assert first.what.startswith("`a['k']` is a set")
    assert second.what.startswith("argument `b`: its layout is torch.sparse_coo")


def test_an_argument_that_is_outside_memory_too():
    """An argument on memory that the function writes from outside is found."""
    before = held.clone()
    (finding,) = check(shares, held)
    assert finding.what.startswith("`x` shares memory with a tensor that `shares` uses from outside")
    assert torch.equal(held, before)


def test_the_targets_own_error_surfaces_and_leaves_no_trace():
    """What the target raises is raised as it is, after everything is put back."""
    buffer = torch.zeros(3)

    def f(x: Tensor) -> Tensor:
        buffer.add_(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        check(f, torch.ones(3))
    assert torch.equal(buffer, torch.zeros(3))


def test_large_memory_is_put_back_too():
    """Other trials leave memory above 256 MiB as it was written; this one copies all of it."""
    cache = torch.zeros(257 << 20, dtype=torch.uint8)
    assert check(lambda x: cache[:3].add_(x).sum(), torch.ones(3, dtype=torch.uint8))
    assert not cache[:3].any()


def test_disabled_stays_as_it_was():
    """The switch that keeps inner graphs from capturing is put back."""
    inner = graphify.graphify(lambda x: x + 1, backend="tape")
    assert check(lambda x: inner(x) * 2, torch.ones(3))
    assert inner.stats().reasons == {"disabled": 2}
    inner(torch.ones(3))
    assert inner.stats().warmups == 1
    with disabled():
        assert check(lambda x: x + 1, torch.ones(3))


# -- what only a device has


@pytest.mark.cuda
@needs_cuda
def test_waits_that_no_operator_shows_are_heard():
    """A wait below the dispatcher is found by torch's debug mode, at its line, where one thread is alive."""

    def hidden(x: Tensor) -> Tensor:
        with torch._C._DisableTorchDispatch():
            return x * x.sum().item()

    before = torch.cuda.get_sync_debug_mode()
    report = check(hidden, torch.ones(3, device="cuda"))
    assert torch.cuda.get_sync_debug_mode() == before
    if threading.active_count() == 1:
        assert [f.what for f in report] == ["the host waits for the device"]
        assert "x.sum().item()" in str(report.found[0].where)


@pytest.mark.cuda
@needs_cuda
def test_host_tensors_are_found_on_a_device():
    """A CPU tensor made inside and one passed beside CUDA tensors are findings."""
    x = torch.ones(3, device="cuda")
    (made,) = check(lambda x: x + torch.ones(3).to(x.device), x)
    assert made.what == "a CPU tensor made or read inside is copied to the device"
    (passed,) = check(lambda x, y: x + 1, x, torch.ones(3))
    assert passed.what.startswith("argument `y` is on cpu beside tensors on cuda:0")
