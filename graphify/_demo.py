"""`python -m graphify demo`: what graphs are for, measured here and compared with eager."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ._decorate import graphify, handle
from ._demo_models import Decoder, mlp
from .backends import cuda
from .stats import GraphRecord, Stats

__all__ = ["demo"]

Step = Callable[..., Any]
Drive = Callable[[Step, int, Callable[..., object]], None]

POLICIES = ("fresh", "static")
CHECKED = 24
ROUNDS, CALLS = 9, 320
TARGET = 4.8


@dataclass(frozen=True)
class Case:
    """One net and the loop around it: `drive(step, calls, see)` hands every visible tensor to `see`."""

    name: str
    net: nn.Module
    drive: Drive


@dataclass(frozen=True)
class Result:
    """One case under one output policy."""

    case: str
    outputs: str
    equal: bool
    stats: Stats
    graphs: tuple[GraphRecord, ...]
    eager_us: float = 0.0
    graphed_us: float = 0.0

    @property
    def speedup(self) -> float:
        return self.eager_us / self.graphed_us


def demo(say: Callable[[str], object] = print) -> bool:
    """Run the experiment, `say` its table line by line, and tell whether all results equalled eager."""
    if os.environ.get("GRAPHIFY_DISABLE", "") not in ("", "0"):
        say("GRAPHIFY_DISABLE is set, so every call would be a plain one: unset it to see the demo.")
        return False
    gpu = cuda.available()
    device, backend = ("cuda", "cuda") if gpu else ("cpu", "tape")
    built = cases(device)
    with torch.inference_mode():
        results = [run(case, outputs, backend) for case in built for outputs in POLICIES]
    for line in gpu_report(results) if gpu else tape_report(results):
        say(line)
    return all(result.equal for result in results)


def cases(device: str) -> list[Case]:
    """The MLP on one batch after another, and the decoder on its own tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, decoder = mlp(), Decoder().eval()
        batches = [torch.randn(64, 128).to(device) for _ in range(CHECKED)]
    positions = torch.split(torch.arange(decoder.steps.numel(), device=device), 1)
    return [
        Case("mlp 128-256-128, batch 64", net.to(device), drive_mlp(batches)),
        Case("decoder, 4 layers, one token", decoder.to(device), drive_decoder(decoder, positions)),
    ]


def drive_mlp(batches: Sequence[Tensor]) -> Drive:
    """Call with the next batch each time."""

    def drive(step: Step, calls: int, see: Callable[..., object]) -> None:
        for call in range(calls):
            see(step(batches[call % len(batches)]))

    return drive


def drive_decoder(decoder: Decoder, positions: Sequence[Tensor]) -> Drive:
    """Start with an empty cache and feed each chosen token to the next step."""

    def drive(step: Step, calls: int, see: Callable[..., object]) -> None:
        cache = decoder.new_cache(batch=1)
        token = torch.ones(1, dtype=torch.int64, device=cache.device)
        for call in range(calls):
            logits, token = step(token, positions[call % len(positions)], cache)
            see(logits, token)
        see(cache)

    return drive


def run(case: Case, outputs: str, backend: str) -> Result:
    """Check one case under one policy; time it where the graphs are real ones."""
    graphed = graphify(case.net, outputs=outputs, backend=backend)  # type: ignore[call-overload]
    equal = same(seen(case, case.net), seen(case, graphed))
    controls = handle(graphed)
    stats, graphs = controls.stats(), controls.graphs
    times = timed(case, graphed) if backend == "cuda" else (0.0, 0.0)
    return Result(case.name, outputs, equal and stats.replays > 0, stats, graphs, *times)


def seen(case: Case, step: Step) -> list[Tensor]:
    """Everything a caller of this case sees, call by call."""
    found: list[Tensor] = []
    case.drive(step, CHECKED, lambda *tensors: found.extend(tensor.clone() for tensor in tensors))
    return found


def same(expected: list[Tensor], actual: list[Tensor]) -> bool:
    """Whether both are equal bit for bit."""
    return len(expected) == len(actual) and all(map(torch.equal, expected, actual))


def timed(case: Case, graphed: Step) -> tuple[float, float]:
    """Microseconds of one call, eager and graphed: medians of rounds that take turns."""
    rounds = [(one_round(case, case.net), one_round(case, graphed)) for _ in range(ROUNDS + 1)]
    eager, replayed = zip(*rounds[1:], strict=True)
    return median(eager), median(replayed)


def one_round(case: Case, step: Step) -> float:
    """Microseconds of one call in a loop, with one synchronisation at its end."""
    cuda.synchronize()
    start = time.perf_counter()
    case.drive(step, CALLS, ignore)
    cuda.synchronize()
    return (time.perf_counter() - start) / CALLS * 1e6


def ignore(*_: Tensor) -> None:
    """See nothing, so that only the calls are timed."""


def gpu_report(results: list[Result]) -> list[str]:
    """Times, speed-ups, equality, and whether the MLP reached its target."""
    mlp_results = [result for result in results if result.case.startswith("mlp")]
    reached = any(result.speedup >= TARGET for result in mlp_results)
    figures = ", ".join(f'{result.speedup:.1f}x with outputs="{result.outputs}"' for result in mlp_results)
    head = ("case", "outputs", "eager", "graphed", "speed-up", "nodes", "memory", "equal to eager")
    rows = [
        (*label(r), us(r.eager_us), us(r.graphed_us), f"{r.speedup:.1f}x", *size(r), yes(r)) for r in results
    ]
    return [
        f"torch {torch.__version__}, " + ", ".join(f"{key} {value}" for key, value in cuda.facts().items()),
        f"Time of one call with a new input each, in a loop: median of {ROUNDS} rounds of {CALLS} calls.",
        "",
        *table(head, rows),
        "",
        f"The MLP's target, {TARGET}x over eager, is {'reached' if reached else 'not reached'}: {figures}.",
    ]


def tape_report(results: list[Result]) -> list[str]:
    """What was captured, how the calls were made, and equality; no times."""
    head = (
        "case",
        "outputs",
        "calls",
        "warm-ups",
        "captures",
        "replays",
        "nodes",
        "memory",
        "equal to eager",
    )
    rows = [(*label(r), *counts(r.stats), *size(r), yes(r)) for r in results]
    return [
        f"torch {torch.__version__} on a CPU: the tape backend repeats what a CUDA graph would do.",
        "",
        *table(head, rows),
        "",
        "Speed needs a GPU: the tape runs the same operations one by one, so no times are shown here.",
    ]


def label(result: Result) -> tuple[str, str]:
    """The first two cells of a row."""
    return result.case, result.outputs


def counts(stats: Stats) -> tuple[str, ...]:
    """How the calls got their results."""
    return tuple(map(str, (stats.calls, stats.warmups, stats.captures, stats.replays)))


def size(result: Result) -> tuple[str, str]:
    """Nodes and memory of the graphs."""
    held = sum(graph.bytes for graph in result.graphs)
    return str(sum(graph.nodes for graph in result.graphs)), f"{held / 2**20:.2f} MiB"


def us(microseconds: float) -> str:
    """Print a time."""
    return f"{microseconds:.1f} us"


def yes(result: Result) -> str:
    """Print equality."""
    return "yes" if result.equal else "NO"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: text to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    texts = (0, 1, len(head) - 1)
    lines = [head, ["-" * width for width in widths], *rows]
    return [
        "  ".join(
            cell.ljust(width) if column in texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
