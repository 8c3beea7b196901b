"""`python -m graphify doctor`: what this installation can do, and whether it does it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata

import torch

from ._decorate import graphify, handle
from ._options import off_everywhere
from .backends import cuda

__all__ = ["doctor"]


def doctor(say: Callable[[str], object] = print) -> bool:
    """Say versions, devices, the backend that `auto` takes and one test capture each; True if all is well."""
    gpu = cuda.available()
    for title, text in [*versions(gpu), *choice(gpu)]:
        say(f"{title:<13} {text}")
    verdicts = [examine(backend, device) for backend, device in tested(gpu)]
    for line, _ in verdicts:
        say(f"{'capture':<13} {line}")
    healthy = all(well for _, well in verdicts)
    say(f"{'verdict':<13} {'all is well' if healthy else 'something is wrong, see above'}")
    return healthy


def versions(gpu: bool) -> list[tuple[str, str]]:
    """Software first, then what the CUDA backend knows about driver and devices."""
    lines = [
        ("graphify", installed("graphify")),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
    ]
    if gpu:
        return lines + list(cuda.facts().items())
    built = (
        f"torch was built for CUDA {torch.version.cuda}"
        if torch.version.cuda
        else "this torch is a CPU build"
    )
    return [*lines, ("cuda", f"no CUDA device can be used; {built}")]


def installed(name: str) -> str:
    """The version of a distribution, or that it runs from its source."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed, running from source"


def choice(gpu: bool) -> list[tuple[str, str]]:
    """Which backend a call gets that names none, and why."""
    value = os.environ.get("GRAPHIFY_DISABLE")
    switch = "is not set" if value is None else f"is {value!r}"
    if off_everywhere():
        return [
            ("switch", f"GRAPHIFY_DISABLE {switch}: every call is a plain call"),
            ("auto", "a plain call"),
        ]
    if gpu:
        auto = '"cuda" for calls with CUDA tensors; a plain call for others'
    else:
        auto = 'a plain call, since tensors are on the CPU; backend="tape" emulates graphs for tests'
    return [("switch", f"GRAPHIFY_DISABLE {switch}"), ("auto", auto)]


def tested(gpu: bool) -> list[tuple[str, str]]:
    """Backends to try, with their device."""
    return [("tape", "cpu"), *([("cuda", "cuda")] if gpu else [])]


def examine(backend: str, device: str) -> tuple[str, bool]:
    """Capture a small function, replay it on new input and compare with eager."""
    if off_everywhere():
        return f"{backend}: not tried, GRAPHIFY_DISABLE is set", True
    try:
        return attempt(backend, device)
    except Exception as error:
        return f"{backend}: FAILED with {type(error).__name__}: {error}", False


def attempt(backend: str, device: str) -> tuple[str, bool]:
    """Three calls: a live warm-up, the capture, a replay."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ y) + 1

    graphed = graphify(function, backend=backend)  # type: ignore[call-overload]
    with torch.no_grad():
        inputs = [torch.linspace(-1, step, 64, device=device).view(8, 8) for step in (1, 2, 3)]
        matches = [torch.equal(function(x, x.T), graphed(x, x.T)) for x in inputs]
    stats = handle(graphed).stats()
    equal = all(matches)
    well = equal and (stats.warmups, stats.captures, stats.replays) == (1, 1, 1)
    nodes = sum(graph.nodes for graph in handle(graphed).graphs)
    counts = f"{stats.warmups} warm-up, {stats.captures} capture, {stats.replays} replay, {nodes} nodes"
    return (
        f"{backend}: {'ok' if well else 'FAILED'}, {counts}, {'equal' if equal else 'NOT equal'} to eager",
        well,
    )
