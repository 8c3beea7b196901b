"""What the tests of the cases share: eager as the oracle, and data that differ from call to call."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from graphify import handle
from graphify.stats import Stats
from graphify.testing import Call, assert_matches_eager
from graphify.testing._compare import Comparison

ROOT = Path(__file__).parent.parent


def rows(*shape: int, count: int = 5, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Different data for each of `count` calls."""
    if dtype.is_floating_point or dtype.is_complex:
        return [
            torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else None).to(dtype)
            for _ in range(count)
        ]
    return [torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype) for _ in range(count)]


def equal(eager: Any, graphed: Any) -> None:
    """Fail unless a user could not tell the two apart, bit for bit."""
    both = Comparison()
    both.walk("output", eager, graphed)
    both.compare_aliasing()
    found = both.take()
    assert not found, "\n".join(found)


def follows_eager(
    calls: Iterable[Call | tuple[Any, ...]],
    backend: str,
    device: torch.device,
    *,
    target: Callable[..., Any] | None = None,
    make: Callable[[], Callable[..., Any]] | None = None,
    replays: int | None = None,
    grad: bool = False,
    **options: Any,
) -> Stats:
    """`assert_matches_eager` under no_grad; by default all but the first two calls must have been replays."""
    sequence = list(calls)
    with torch.set_grad_enabled(grad):
        stats = assert_matches_eager(target, sequence, make=make, backend=backend, device=device, **options)
    assert stats.replays == (len(sequence) - 2 if replays is None else replays), stats
    return stats


def counts(graphed: Any) -> tuple[int, int, int, int, int]:
    """Warm-ups, captures, replays, eager calls, errors."""
    s = handle(graphed).stats()
    assert s.calls == s.warmups + s.captures + s.replays + s.eager + s.errors
    assert s.eager == s.reasons.total()
    return s.warmups, s.captures, s.replays, s.eager, s.errors


def reader(name: str) -> Callable[[Any], Any]:
    """What an extension does: read an attribute by a name that no Python shows."""
    made = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_char_p)
    read, wanted = made(("PyObject_GetAttrString", ctypes.pythonapi)), name.encode()
    return lambda held: read(held, wanted)


def together(number: int, work: Callable[[], Any]) -> list[Any]:
    """What `work` answers in each of `number` threads that begin at once."""
    start, found = threading.Barrier(number), list[Any]()

    def run() -> None:
        start.wait()
        found.append(work())

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python as a user does, in another process; `GRAPHIFY_DISABLE` is set only where the test says so."""
    kept = {name: value for name, value in os.environ.items() if name != "GRAPHIFY_DISABLE"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=kept | {"PYTHONPATH": str(ROOT)} | environment,
    )
