"""Capturing ahead of time where calls run the plain function: refused with the reason, or nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from checks import counts, python, rows
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphify import CaptureError, disabled, graphify


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "capture": lambda graphed, x: graphed.capture(x),
    "capture_buckets": lambda graphed, x: graphed.capture_buckets(x, progress=False),
    "estimate": lambda graphed, x: graphed.estimate(x),
}
INSIDE: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "disabled": (disabled, "while graphs are off"),
    "mode": (Sees, "under a mode"),
    "function mode": (SeesFunctions, "under a mode"),
    "forward": (forward_ad.dual_level, "inside forward-mode autograd"),
    "anomaly": (lambda: torch.autograd.detect_anomaly(check_nan=False), "under anomaly detection"),
    "hooks": (save_on_cpu, "under hooks on saved tensors"),
}


def made(backend: str) -> Any:
    return graphify(lambda x: x * 2 + 1, backend=backend, buckets=[2, 4])


def refused(graphed: Any, way: str, x: Tensor, where: str) -> None:
    """Fail unless it raises with the reason and what to write, and leaves nothing."""
    with pytest.raises(CaptureError) as raised:
        WAYS[way](graphed, x)
    assert raised.value.what == f"`{way}` of `made.<locals>.<lambda>` {where}"
    assert raised.value.why
    assert raised.value.fix.startswith("capture ")
    assert graphed.graphs == ()
    assert counts(graphed) == (0, 0, 0, 0, 0)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", INSIDE)
def test_not_where_calls_run_the_plain_function(backend, device, name, way):
    """Under what turns graphs off nothing is captured, and the error says why; outside it works."""
    context, where = INSIDE[name]
    graphed, x = made(backend), torch.randn(3, 2, device=device)
    with context():
        refused(graphed, way, x, where)
    assert WAYS[way](graphed, x)


@pytest.mark.parametrize("way", WAYS)
def test_not_inside_a_transform(backend, device, way):
    """Inside vmap or grad there are no plain tensors to capture with."""
    graphed, x = made(backend), torch.randn(5, 3, 2, device=device)

    def inside(x: Tensor) -> Tensor:
        refused(graphed, way, x, "inside a `torch.func` transform")
        return (x * 2).sum()

    torch.vmap(inside)(x)
    torch.func.grad(inside)(x[0])
    assert WAYS[way](graphed, x[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_not_while_something_traces(backend, device, way):
    """Below a compiled function, and in a trace, nothing is captured."""
    graphed, x = made(backend), torch.randn(3, 2, device=device)

    def inside(x: Tensor) -> Tensor:
        WAYS[way](graphed, x)
        return x * 2

    try:
        with pytest.raises(CaptureError, match="inside `torch.compile` or another tracer"):
            torch.compile(inside, backend="eager")(x)
    finally:
        torch.compiler.reset()
    with pytest.raises(CaptureError, match="inside `torch.compile` or another tracer"):
        torch.jit.trace(inside, (x,))
    assert graphed.graphs == ()
    assert WAYS[way](graphed, x)


@pytest.mark.parametrize("way", WAYS)
def test_not_inside_another_graph(backend, device, way):
    """Neither in the warm-up nor in the capture of another graph; that one is made all the same."""
    graphed, example, seen = made(backend), torch.randn(3, 2, device=device), list[str]()
    note = seen.append

    def outer(x: Tensor) -> Tensor:
        with pytest.raises(CaptureError) as raised:
            WAYS[way](graphed, example)
        note(raised.value.what)
        return x - 1

    other = graphify(outer, backend=backend)
    for x in [t.to(device) for t in rows(3, 2)]:
        assert torch.equal(other(x), x - 1)
    assert counts(other) == (1, 1, 3, 0, 0)
    assert set(seen) == {
        f"`{way}` of `made.<locals>.<lambda>` inside another capture, or a warm-up before one"
    }
    assert graphed.graphs == ()
    assert WAYS[way](graphed, example)


PROGRAM = """
import torch
from graphify import graphify
f = graphify(lambda x: x * 2, backend="tape", buckets=[2, 4])
x = torch.ones(3)
print(f.capture(x).nodes, f.capture_buckets(x), f.estimate(x), f.graphs, f(x).tolist())
"""


def test_the_environment_turns_it_off_without_an_error():
    """With GRAPHIFY_DISABLE=1 code that captures ahead of time goes on: it gets empty records, and is told once."""
    found = python("-c", PROGRAM, GRAPHIFY_DISABLE="1")
    assert found.stdout == "0 <lambda>: 0 buckets, 0.0 MiB, 0.00 s 0 () [2.0, 2.0, 2.0]\n"
    assert (
        found.stderr.count("GraphifyWarning: `<lambda>` captures nothing ahead of time: GRAPHIFY_DISABLE is")
        == 1
    )
