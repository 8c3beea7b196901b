"""Nothing grows: many replays over several signatures, many captures that are evicted, many captures that fail.

Short by default. `LONG_RUN=1` runs a million replays, ten thousand evictions and a hundred failures of each kind.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable

import pytest
import torch
from checks import equal
from torch import Tensor

from graphify import CaptureError, graphify

LONG = os.environ.get("LONG_RUN", "0") not in ("", "0")
MIB = 2**20


def scaled(long: int, short: int) -> int:
    return long if LONG else short


class Growth:
    """What this process and its device hold more than at the start, once everything has been used once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = self._now()

    def check(self, *, host: int, objects: int) -> None:
        """Fail for more than so many bytes of the host and so many Python objects; the device must hold no byte more."""
        now = self._now()
        grown = {name: now[name] - self.before[name] for name in now}
        assert grown["allocated"] <= 0, grown
        if LONG:  # run alone: other processes use the device, too
            assert grown["used on the device"] <= 4 * MIB, grown
        assert grown["objects"] <= objects, grown
        assert grown["host"] <= host, grown

    def _now(self) -> dict[str, int]:
        gc.collect()
        found = {
            "objects": len(gc.get_objects()),
            "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            return {
                **found,
                "allocated": torch.cuda.memory_allocated(),
                "used on the device": total - free,
            }
        return {**found, "allocated": 0, "used on the device": 0}


@pytest.mark.skipif(sys.platform == "win32", reason="`resource` is of Unix")
@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_replays_over_eight_signatures(backend, device, outputs):
    """Replays, a million in the long run, leave nothing behind and stay right."""
    weight = torch.randn(16, 16, device=device)
    graphed = graphify(lambda x: torch.relu(x @ weight), backend=backend, outputs=outputs)
    inputs = [torch.randn(n, 16, device=device) for n in range(1, 9)]
    for x in inputs * 3:
        equal(torch.relu(x @ weight), graphed(x).clone())
    growth, rounds = Growth(device), scaled(125_000 if backend == "cuda" else 10_000, 100)
    for _ in range(rounds):
        for x in inputs:
            y = graphed(x)
    equal(torch.relu(inputs[-1] @ weight), y.clone())
    assert graphed.stats().replays == 8 * (rounds + 1)
    del y
    growth.check(host=32 * MIB, objects=500)


@pytest.mark.skipif(sys.platform == "win32", reason="`resource` is of Unix")
def test_captures_that_are_evicted(backend, device):
    """Captures and evictions, ten thousand in the long run, give back all that they took."""
    weight = torch.randn(16, 16, device=device)
    graphed = graphify(lambda x, k: torch.relu(x @ weight) * k, backend=backend, max_graphs=2)
    x = torch.randn(4, 16, device=device)

    def capture(k: float) -> Tensor:
        graphed(x, k)
        return graphed(x, k)

    with pytest.warns(UserWarning, match="has seen 8 values"):
        for i in range(scaled(1100, 60)):  # signatures that never come back are remembered up to a limit
            capture(1.0 + i / 16)
    growth = Growth(device)
    for i in range(scaled(10_000, 60)):
        equal(torch.relu(x @ weight) * (-1.0 - i / 16), capture(-1.0 - i / 16))
    growth.check(host=32 * MIB, objects=scaled(16_000, 2400))
    assert len(graphed.graphs) == 2


def on_the_host(x: Tensor) -> Tensor:
    return x * float(x.sum())


def of_data(x: Tensor) -> Tensor:
    return x[x > 0]


@pytest.mark.skipif(sys.platform == "win32", reason="`resource` is of Unix")
@pytest.mark.parametrize("fails", [on_the_host, of_data])
def test_captures_that_fail(backend, device, fails: Callable[[Tensor], Tensor]):
    """Functions that cannot be captured, a hundred in the long run, leave nothing and break nothing."""
    x = torch.randn(4, 16, device=device)
    works = graphify(lambda x: x * 2, backend=backend)

    def fail() -> None:
        with pytest.raises(CaptureError):
            graphify(fails, backend=backend)(x)

    for _ in range(3):
        fail()
        works(x)
    growth = Growth(device)
    for _ in range(scaled(100, 10)):
        fail()
        equal(x * 2, works(x))
    growth.check(host=32 * MIB, objects=500)
