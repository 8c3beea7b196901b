"""Random programs, trained at random: graphed equals eager in results, gradients and parameters, or says so."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings, strategies as st
from strategies import Program, programs, training_sequences

from graphify import GraphifyError, GraphifyWarning
from graphify.testing import Call, assert_matches_eager


class Case(NamedTuple):
    program: Program
    calls: list[Call]
    options: dict[str, Any]


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly none; else any mix of those that must not change what a caller sees."""
    if draw(st.sampled_from([True, True, True, False])):
        return {}
    choices = {
        "outputs": ["fresh", "static"],
        "fallback": ["raise", "eager"],
        "warmup": [1, 2],
        "max_graphs": [64, 1, 2, None],
    }
    return {name: draw(st.sampled_from(values)) for name, values in choices.items()}


@st.composite
def cases(draw: st.DrawFn, device: str, *, steps: bool = False) -> Case:
    program = draw(programs(trained=True, steps=steps, max_statements=5, host_side_percent=3))
    calls = draw(training_sequences(program, min_calls=4, max_calls=7, device=device, steps=steps))
    return Case(program, calls, draw(options()))


class Tally:
    """Counts what became of the calls, for a property that sees no replay and no recorded backward cannot fail."""

    def __init__(self) -> None:
        self.runs = self.replayed = self.backwards = 0
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
        for name in ("warmups", "captures", "replays", "eager", "errors", "recordings"):
            self.calls[name] += getattr(stats, name)
        self.reasons.update(stats.reasons)

    def __str__(self) -> str:
        return (
            f"{self.replayed} of {self.runs} runs replayed, {self.backwards} recorded a backward; {dict(self.calls)}; "
            f"eager: {dict(self.reasons)}; loud: {self.loud.most_common(8)}"
        )


def check(case: Case, tally: Tally, backend: str, device: torch.device) -> None:
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


def test_random_programs_train_as_in_eager_or_refuse_loudly(backend: str, device: torch.device) -> None:
    """Results, gradients, parameters, buffers, random streams: as eager leaves them after any training, or an error."""
    tally = Tally()

    @settings(max_examples=max(50, settings.default.max_examples // 10))
    @given(cases(device.type))
    def run(case: Case) -> None:
        check(case, tally, backend, device)

    run()

    print(tally)
    assert tally.replayed >= 0.6 * tally.runs, str(tally)
    assert tally.backwards >= 0.3 * tally.runs, str(tally)
    assert sum(tally.loud.values()) <= 0.1 * sum(tally.calls.values()), str(tally)


def test_random_whole_steps_are_as_in_eager_or_refuse_loudly(backend: str, device: torch.device) -> None:
    """Programs that go through their own backward and move their weights: equal after each call, or an error."""
    tally = Tally()

    @settings(max_examples=max(20, settings.default.max_examples // 25))
    @given(cases(device.type, steps=True))
    def run(case: Case) -> None:
        check(case, tally, backend, device)

    run()

    print(tally)
    assert tally.replayed >= 0.6 * tally.runs, str(tally)
    assert sum(tally.loud.values()) <= 0.1 * sum(tally.calls.values()), str(tally)
