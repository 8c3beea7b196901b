"""Random programs, trained at random: graphed equals eager in results, gradients and parameters, or says so."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from strategies import Case, all_follow_eager, options, programs, training_sequences


@st.composite
def cases(draw: st.DrawFn, device: str, *, steps: bool = False) -> Case:
    program = draw(programs(trained=True, steps=steps, max_statements=5, host_side_percent=3))
    calls = draw(training_sequences(program, min_calls=4, max_calls=7, device=device, steps=steps))
    return Case(program.make, calls, draw(options(defaults=3)))


def test_random_programs_train_as_in_eager_or_refuse_loudly(backend: str, device: torch.device) -> None:
    """Results, gradients, parameters, buffers, random streams: as eager leaves them after any training, or an error."""
    all_follow_eager(cases(device.type), backend, device, part=0.4, replay=0.6, backward=0.3)


def test_random_whole_steps_are_as_in_eager_or_refuse_loudly(backend: str, device: torch.device) -> None:
    """Programs that go through their own backward and move their weights: equal after each call, or an error."""
    all_follow_eager(cases(device.type, steps=True), backend, device, part=0.2, replay=0.6)
