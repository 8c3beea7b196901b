"""Random programs, trained at random: graphed equals eager in results, gradients and parameters, or says so."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st
from strategies import Case, Tally, check, options, programs, training_sequences


@st.composite
def cases(draw: st.DrawFn, device: str, *, steps: bool = False) -> Case:
    program = draw(programs(trained=True, steps=steps, max_statements=5, host_side_percent=3))
    calls = draw(training_sequences(program, min_calls=4, max_calls=7, device=device, steps=steps))
    return Case(program, calls, draw(options(defaults=3)))


def test_random_programs_train_as_in_eager_or_refuse_loudly(backend: str, device: torch.device) -> None:
    """Results, gradients, parameters, buffers, random streams: as eager leaves them after any training, or an error."""
    tally = Tally()

    @settings(max_examples=max(20, settings.default.max_examples * 2 // 5))
    @given(cases(device.type))
    def run(case: Case) -> None:
        check(case, tally, backend, device)

    run()

    tally.check(replay=0.6, backward=0.3)


def test_random_whole_steps_are_as_in_eager_or_refuse_loudly(backend: str, device: torch.device) -> None:
    """Programs that go through their own backward and move their weights: equal after each call, or an error."""
    tally = Tally()

    @settings(max_examples=max(20, settings.default.max_examples // 5))
    @given(cases(device.type, steps=True))
    def run(case: Case) -> None:
        check(case, tally, backend, device)

    run()

    tally.check(replay=0.6)
