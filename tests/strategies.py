"""What the property tests share: the library's own strategies, those that users get, and what became of the calls."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from graphify import GraphifyError, GraphifyWarning
from graphify.testing import (
    Call,
    Pair as Pair,
    Program as Program,
    Record as Record,
    assert_matches_eager,
    call_sequences as call_sequences,
    programs as programs,
    pytrees as pytrees,
    tensors as tensors,
    training_sequences as training_sequences,
)


class Case(NamedTuple):
    program: Program
    calls: list[Call]
    options: dict[str, Any]


@st.composite
def options(draw: st.DrawFn, *, defaults: int = 2) -> dict[str, Any]:
    """None, `defaults` times as often as any mix of those that must not change what a caller sees."""
    if draw(st.sampled_from([True] * defaults + [False])):
        return {}
    choices = {
        "outputs": ["fresh", "static"],
        "fallback": ["raise", "eager"],
        "warmup": [1, 2],
        "max_graphs": [64, 1, 2, None],
    }
    return {name: draw(st.sampled_from(values)) for name, values in choices.items()}


class Tally:
    """Counts what became of the calls, for a property that sees no replay and no recorded backward cannot fail."""

    def __init__(self) -> None:
        self.runs = self.replayed = self.backwards = self.made = 0
        self.calls: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.loud: Counter[str] = Counter()

    def refuse(self, error: GraphifyError) -> bool:
        self.loud[str(error).splitlines()[0]] += 1
        return True

    def add(self, stats: Any) -> None:
        self.runs += 1
        self.replayed += stats.replays > 0
        self.backwards += stats.recordings > stats.captures
        self.made += stats.recordings
        for name in ("warmups", "captures", "replays", "eager", "errors"):
            self.calls[name] += getattr(stats, name)
        self.reasons.update(stats.reasons)

    def __str__(self) -> str:
        return (
            f"{self.replayed} of {self.runs} runs replayed, {self.backwards} recorded a backward; {dict(self.calls)}; "
            f"{self.made} recordings; eager: {dict(self.reasons)}; loud: {self.loud.most_common(8)}"
        )


def check(case: Case, tally: Tally, backend: str, device: torch.device) -> None:
    """Eager and graphed twins of the program over its calls; loud refusals are counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphifyWarning)
        stats = assert_matches_eager(
            make=lambda: case.program.make(device),
            calls=case.calls,
            backend=backend,
            device=device,
            loud_ok=tally.refuse,
            **case.options,
        )
    tally.add(stats)
