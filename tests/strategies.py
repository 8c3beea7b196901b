"""What the property tests share: the library's own strategies, those that users get, and what became of the calls."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from hypothesis import given, settings, strategies as st

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

T = TypeVar("T")


class Case(NamedTuple):
    make: Callable[[torch.device], Callable[..., Any]]
    calls: list[Call]
    options: dict[str, Any]


def share(part: float) -> settings:
    """A part of the profile's number of examples."""
    return settings(max_examples=max(20, int(part * settings.default.max_examples)))


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


tallies: dict[str, object] = {}  # the last of each test


def shown(tally: T) -> T:
    """One that the end of a deep run prints, with the name of the test."""
    test, _, _ = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")
    tallies[test] = tally
    return tally


def often(count: float, share: float, runs: int) -> bool:
    """Whether this share of the runs was counted, less two standard deviations: a quick run draws few."""
    return count >= share * runs - 2 * math.sqrt(share * (1 - share) * runs)


class Tally:
    """Counts what became of the calls, for a property that sees no replay and no recorded backward cannot fail."""

    def __init__(self) -> None:
        shown(self)
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

    def check(self, *, replay: float, backward: float = 0.0) -> None:
        """At least these shares of the programs replayed and recorded a backward; at most a tenth of the calls was refused."""
        assert often(self.replayed, replay, self.runs), str(self)
        assert often(self.backwards, backward, self.runs), str(self)
        calls = sum(self.calls.values())
        made = (calls - sum(self.loud.values())) / calls
        assert often(made * self.runs, 0.9, self.runs), str(self)

    def __str__(self) -> str:
        return (
            f"{self.replayed} of {self.runs} runs replayed, {self.backwards} recorded a backward; {dict(self.calls)}; "
            f"{self.made} recordings; eager: {dict(self.reasons)}; loud: {self.loud.most_common(8)}"
        )


def all_follow_eager(
    cases: st.SearchStrategy[Case],
    backend: str,
    device: torch.device,
    *,
    part: float = 1.0,
    replay: float,
    backward: float = 0.0,
) -> None:
    """Eager and graphed twins over the calls of each case, and enough replays of them; loud refusals are counted."""
    tally = Tally()

    @share(part)
    @given(cases)
    def run(case: Case) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GraphifyWarning)
            stats = assert_matches_eager(
                make=lambda: case.make(device),
                calls=case.calls,
                backend=backend,
                device=device,
                loud_ok=tally.refuse,
                **case.options,
            )
        tally.add(stats)

    run()

    tally.check(replay=replay, backward=backward)
