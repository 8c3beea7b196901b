"""A twin: one world, what is called in it, and where its random streams stand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from ._checks import check_callable, check_kind
from ._witness import Witness
from ._worlds import Rng, World

__all__ = ["Act", "Call", "Done", "Outcome", "Then", "Twin"]


class Act:
    """Something that the owner of results does after a call, seeing the whole of its twin's world."""

    optional = False
    """Whether it is left out on the graphed side where eager raises; it must then raise before it has any effect."""
    quiet = False
    """Whether the next comparison is soon enough: nothing that it shows is gone by then."""
    goes_back = False
    """Whether it goes back from results: then a witness stands by the eager twin's forwards."""
    keeps = False
    """Whether it puts new gradients among what the twin holds."""

    def __call__(self, twin: Twin) -> None:
        """Do it in this twin's world."""
        raise NotImplementedError

    def __repr__(self) -> str:
        named = [f"{item.name}={getattr(self, item.name)!r}" for item in fields(self) if self._differs(item)]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(named)})"

    def _differs(self, item: Any) -> bool:
        return bool(getattr(self, item.name) != item.default)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True)
class Then:
    """What the owner of results does after a call, one act after the other on both twins."""

    acts: tuple[Act, ...]

    def __post_init__(self) -> None:
        check_kind("Then: acts", self.acts, (tuple, list), "a tuple of acts, as in Then((Backward(),))")
        for act in self.acts:
            check_kind("Then: acts", act, Act, "a tuple of acts")

    def __repr__(self) -> str:
        return f"Then({self.acts!r})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass
class Call:
    """One call of a sequence, made on both twins.

    Example: eval mode from here on, under autocast, the result changed in place by its owner::

        Call((x,), {"mask": m}, before=lambda model: model.eval(),
             context=lambda: torch.autocast("cpu", torch.bfloat16), after=lambda model, out: out.zero_())

    `args` and `kwargs` are copied for each twin (`Late` looks one up instead). `before(twin)` runs first, on each
    twin; what it assigns must be made inside, or the twins share it. `context()` makes the context manager around
    the call. `after(twin, output)` runs last, unless the call raised; `Then` in its place makes acts of training.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    before: Callable[[Any], object] | None = None
    context: Callable[[], AbstractContextManager[Any]] | None = None
    after: Callable[[Any, Any], object] | Then | None = None

    def __post_init__(self) -> None:
        check_kind(
            "Call: args", self.args, (tuple, list), "a tuple of positional arguments, as in Call((x,))"
        )
        check_kind("Call: kwargs", self.kwargs, Mapping, "a dict of keyword arguments")
        for name in self.kwargs:
            check_kind("Call: each key of kwargs", name, str, "a string")
        check_callable("Call: before", self.before, "a function of the twin, or None")
        if not callable(self.context) or isinstance(self.context, AbstractContextManager):
            wanted = "what makes a context manager, as in context=torch.no_grad, or None"
            check_kind("Call: context", self.context, type(None), wanted)
        if isinstance(self.after, Act):
            raise TypeError(f"Call: after must be a function, not an act; write Then(({self.after!r},))")
        if not isinstance(self.after, Then):
            check_callable(
                "Call: after", self.after, "a function of twin and output, Then((act, ...)) or None"
            )


@dataclass
class Outcome:
    """What one call did, as far as it is not in the world."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any = None
    error: Exception | None = None
    ambient: dict[str, object] = field(default_factory=dict)


@dataclass
class Done:
    """How an act ended; `modified`: plain eager would have raised, for something saved was written since."""

    error: RuntimeError | None = None
    modified: bool = False


class Twin:
    """One side of the comparison; `entry` is what is called, the eager twin's being the plain callable.

    `held` is what acts keep to be compared. A `witness` stands by an eager twin that is trained.
    """

    def __init__(self, world: World, entry: Callable[..., Any], witness: Witness | None = None) -> None:
        self.world, self.entry, self.witness = world, entry, witness
        self.held: list[Any] = []
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
        assert callable(call.after)
        self.rng.restore()
        call.after(self.subject, outcome.value)
        self.rng = Rng(self.world.device)

    def perform(self, act: Act) -> Done:
        """Do this act; what autograd raises is compared with the other twin's."""
        done = Done()
        if not act.quiet:
            self.rng.restore()
        if self.witness is not None:
            self.witness.modified = False
        try:
            act(self)
        except RuntimeError as error:
            done.error = error
        done.modified = self.witness is not None and self.witness.modified
        if not act.quiet:
            self.rng = Rng(self.world.device)
        return done

    def drop(self, number: int) -> None:
        """Let go of one result; a negative number counts from the latest."""
        self.outcomes[number].value = self.world.outputs[number] = None

    def forget(self) -> None:
        """Let go of the results so far."""
        for number in range(len(self.outcomes)):
            self.drop(number)

    def _attempt(
        self, entry: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
    ) -> Outcome:
        outcome = Outcome(args, kwargs)
        witnessed = contextlib.nullcontext if self.witness is None else self.witness.standing_by
        with (call.context or contextlib.nullcontext)(), witnessed():
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
