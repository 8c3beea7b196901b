"""A twin: one world, what is called in it, and where its random streams stand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ._worlds import Rng, World

__all__ = ["Call", "Outcome", "Twin"]


@dataclass
class Call:
    """One call of a sequence, made on both twins.

    Example: eval mode from here on, under autocast, the result changed in place by its owner::

        Call((x,), {"mask": m}, before=lambda model: model.eval(),
             context=lambda: torch.autocast("cpu", torch.bfloat16), after=lambda model, out: out.zero_())

    `args` and `kwargs` are copied for each twin (`Late` looks one up instead). `before(twin)` runs first, on each
    twin; what it assigns must be made inside, or the twins share it. `context()` makes the context manager around
    the call. `after(twin, output)` runs last, unless the call raised.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    before: Callable[[Any], object] | None = None
    context: Callable[[], AbstractContextManager[Any]] | None = None
    after: Callable[[Any, Any], object] | None = None


@dataclass
class Outcome:
    """What one call did, as far as it is not in the world."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any = None
    error: Exception | None = None
    ambient: dict[str, object] = field(default_factory=dict)


class Twin:
    """One side of the comparison; `entry` is what is called, the eager twin's being the plain callable."""

    def __init__(self, world: World, entry: Callable[..., Any]) -> None:
        self.world, self.entry = world, entry
        self.plain: Any = world.twin
        self.subject = entry if isinstance(entry, nn.Module) else self.plain
        self.outcomes: list[Outcome] = []
        self.rng = self._before_entry = Rng(world.device)

    def run(self, call: Call) -> Outcome:
        """Make the call, from where this twin's random streams stand."""
        self.rng.restore()
        if call.before is not None:
            call.before(self.subject)
        args = tuple(self.world.copy(value) for value in call.args)
        kwargs = {name: self.world.copy(value) for name, value in call.kwargs.items()}
        self._before_entry = Rng(self.world.device)
        return self._attempt(self.entry, args, kwargs, call)

    def run_plain(self, call: Call, failed: Outcome) -> Outcome:
        """Make a call that failed loudly again, by the plain function, from the same random state."""
        self._before_entry.restore()
        return self._attempt(self.plain, failed.args, failed.kwargs, call)

    def accept(self, outcome: Outcome) -> None:
        """The call is over: its result is from now on an earlier one."""
        self.outcomes.append(outcome)
        self.world.outputs.append(outcome.value)

    def after(self, call: Call, outcome: Outcome) -> None:
        """Let the call's owner do what it does with the result."""
        assert call.after is not None
        self.rng.restore()
        call.after(self.subject, outcome.value)
        self.rng = Rng(self.world.device)

    def forget(self) -> None:
        """Let go of the results so far."""
        for index, outcome in enumerate(self.outcomes):
            outcome.value = self.world.outputs[index] = None

    def _attempt(
        self, entry: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
    ) -> Outcome:
        outcome = Outcome(args, kwargs)
        with (call.context or contextlib.nullcontext)():
            try:
                outcome.value = entry(*args, **kwargs)
            except Exception as error:  # compared with the other twin's
                outcome.error = error
            outcome.ambient = _ambient(self.world.device)
        self.rng = Rng(self.world.device)
        return outcome


def _ambient(device: torch.device | None) -> dict[str, object]:
    device_type = "cpu" if device is None else device.type
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled(device_type),
        "autocast dtype": torch.get_autocast_dtype(device_type),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
