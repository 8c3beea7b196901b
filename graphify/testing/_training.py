"""Sequences of calls that train a program: forwards, backwards of all kinds, optimizer steps, what users do between."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ._acts import (
    LOSSES,
    Backward,
    Drop,
    Edit,
    EditArguments,
    Gradients,
    HoldGradients,
    Hook,
    SetGradients,
    Update,
    ZeroGradients,
)
from ._changes import Change, Changes, changes_of
from ._checks import check_counts, check_kind, check_place
from ._data import Data, Scaled
from ._programs import Input, Program
from ._sequences import Ambient, Drawer, Setting
from ._strategies import need_hypothesis
from ._twins import Act, Call, Then

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["training_sequences"]

_KINDS = [
    "plain",
    "plain",
    "plain",
    "several",
    "several",
    "micro",
    "joint",
    "retain",
    "parts",
    "gradients",
    "none",
]
_SEVERAL = ("several", "micro", "joint")
_GENTLE = ("weights", "copy", "require", "train", "seed")
"""Changes that eager hears of, or that touch nothing saved, while a backward is still to come."""


@dataclass(frozen=True)
class _Habit:
    """How rounds of one sequence mostly go."""

    kind: str
    loss: str
    picks: tuple[int, ...]
    finish: tuple[Act, ...]


class _Trainer(Drawer):
    """Draws rounds of training for one program."""

    def setting(self, modes: tuple[str, ...]) -> Setting:
        found, inputs = super().setting(modes), self.program.inputs
        if found.inference or not self.chance(50):
            return found
        wide = [item for item in inputs if item.dtype.startswith(("float", "bfloat", "complex"))]
        needing = {item for item in wide if self.chance(70 if not item.written else 0 if item.box else 5)}
        scaled = {item for item in needing if not item.box and (item.written or self.chance(25))}
        return replace(found, needing=_names(needing), scaled=_names(scaled))

    def _datum(self, item: Input, layout: str, setting: Setting) -> Data:
        datum = super()._datum(item, layout, setting)
        return replace(datum, requires_grad=item.name in setting.needing)

    def _values(self, setting: Setting) -> list[Any]:
        """Some have a history, and rarely one that the program writes into."""
        values = super()._values(setting)
        for index, (item, value) in enumerate(zip(self.program.inputs, values, strict=True)):
            if isinstance(value, Data) and item.name in setting.scaled:
                values[index] = Scaled(value)
        return values

    def habit(self) -> _Habit:
        return _Habit(
            kind=self.choose(_KINDS),
            loss=self.choose(LOSSES),
            picks=self.choose([(0,), (1,), (0, 1)]) if self.chance(25) else (),
            finish=self._finish(),
        )

    def _finish(self) -> tuple[Act, ...]:
        acts: list[Act] = []
        if self.chance(50):
            acts.append(Update(clip=1.0) if self.chance(20) else Update())
        if self.chance(70):
            acts.append(ZeroGradients(set_to_none=self.choose([True, False])))
        return tuple(acts)

    def round(self, habit: _Habit, room: int) -> list[list[Act]]:
        """What follows each call of a round."""
        count = min(room, self.choose([2, 2, 3])) if habit.kind in _SEVERAL else 1
        acts: list[list[Act]] = [[] for _ in range(count)]
        getattr(self, f"_{habit.kind}")(habit, acts)
        if self.chance(15):
            acts[-1].append(HoldGradients())
        acts[-1] += habit.finish
        if self.chance(20):
            acts[-1].append(Drop(tuple(range(count))))
        if self.chance(8):
            acts[-1].append(self.choose([SetGradients(self.new_seed()), self._hook()]))
        return acts

    def _hook(self) -> Hook:
        return Hook(pick=self.choose(range(4)), accumulated=self.chance(40))

    def _backward(self, habit: _Habit, ago: tuple[int, ...] = (0,), *, retain: bool = False) -> Backward:
        into = self.choose(["parameters", "arguments"]) if self.chance(5) else ""
        return Backward(ago, habit.loss, habit.picks, retain, into, self.new_seed())

    def _edits(self, ago: int = 0) -> list[Act]:
        """What may happen to a result, or to what went in, before a backward."""
        if not self.chance(18):
            return []
        return [
            self.choose(
                [
                    EditArguments((ago,)),
                    Edit((ago,)),
                    Edit((ago,), pick=1),
                    Edit((ago,), recorded=False),
                    Update(),
                ]
            )
        ]

    def _plain(self, habit: _Habit, acts: list[list[Act]]) -> None:
        acts[0] += [*self._edits(), self._backward(habit)]

    def _none(self, habit: _Habit, acts: list[list[Act]]) -> None:
        acts[0] += [Drop()] if self.chance(50) else []

    def _several(self, habit: _Habit, acts: list[list[Act]]) -> None:
        order = range(len(acts))
        for ago in order if self.chance(50) else reversed(order):
            acts[-1] += [*self._edits(ago), self._backward(habit, (ago,))]

    def _micro(self, habit: _Habit, acts: list[list[Act]]) -> None:
        for after in acts:
            after += [*self._edits(), self._backward(habit)]

    def _joint(self, habit: _Habit, acts: list[list[Act]]) -> None:
        acts[-1] += [*self._edits(), self._backward(habit, tuple(range(len(acts))))]

    def _retain(self, habit: _Habit, acts: list[list[Act]]) -> None:
        first = self._backward(habit, retain=not self.chance(10))
        between = self._edits()
        acts[0] += [first, *between, self._backward(habit)]

    def _parts(self, habit: _Habit, acts: list[list[Act]]) -> None:
        """One result after the other: eager allows it without `retain` where they have no history in common."""
        retain = self.chance(50)
        first = replace(self._backward(habit, retain=retain), picks=(0,))
        acts[0] += [first, *self._edits(), replace(self._backward(habit), picks=(1,))]

    def _gradients(self, habit: _Habit, acts: list[list[Act]]) -> None:
        to = self.choose(["all", "parameters", "arguments"])
        acts[0] += self._edits()
        seed, create = self.new_seed(), self.chance(8)
        acts[0].append(Gradients((0,), habit.loss, habit.picks, self.chance(20), to, seed, create))
        if self.chance(20):
            acts[0].append(self._backward(habit))

    def changes(self, gentle: bool) -> Changes | None:
        """Between calls: toggles of what is trained, weights written or replaced, train and eval, plain values."""
        found: list[Change] = [("seed", "", self.new_seed())]
        if "(nn.Module)" in self.program.source:
            found += [("train", "", False), ("train", "", True)]
        for item in self.program.state:
            found += changes_of(item, self.new_seed())
            if item.kind in ("module", "weight", "leaf"):
                index = self.choose(range(3))
                found += 2 * [("require", item.name, index, False), ("require", item.name, index, True)]
            if item.kind in ("weight", "leaf"):
                found.append(("copy", item.name, self.new_seed()))
            if item.kind == "weight":
                found.append(("renew", item.name, self.new_seed()))
        found = [change for change in found if not gentle or change[0] in _GENTLE]
        count = self.choose([1, 1, 2])
        return Changes(tuple(self.choose(found[::-1]) for _ in range(count)))


class _Stepper(_Trainer):
    """Draws calls of a program that is a whole step."""

    def setting(self, modes: tuple[str, ...]) -> Setting:
        return replace(super().setting(modes), needing=frozenset(), scaled=frozenset())

    def habit(self) -> _Habit:
        return _Habit("none", LOSSES[0], (), ())

    def round(self, habit: _Habit, room: int) -> list[list[Act]]:
        """What may happen after a step: its results and its gradients are the caller's to change."""
        seed = self.new_seed()
        acts: list[list[Act]] = [[], [ZeroGradients()], [ZeroGradients(set_to_none=False)]]
        acts += [[Update()], [SetGradients(seed)], [Edit(recorded=False)], [EditArguments()], [Drop()]]
        return [self.choose(acts) if self.chance(25) else []]


def _names(inputs: set[Input]) -> frozenset[str]:
    return frozenset(item.name for item in inputs)


def training_sequences(
    program: Program, *, min_calls: int = 4, max_calls: int = 9, device: str = "cpu", steps: bool = False
) -> SearchStrategy[list[Call]]:
    """Calls that train a program that runs in grad mode: rounds of forwards with what their owner does with the results.

    A round is a forward and a backward; several forwards and then their backwards in either order; micro-batches; one
    loss over several calls; a backward twice; `torch.autograd.grad`; or no backward at all. Around it: results, arguments
    and parameters edited in place before a backward, steps of gradient descent, gradients zeroed, set or held, hooks,
    parameters frozen and thawed, train and eval. Draw programs with `programs(trained=True)`.

    `steps`: for programs that are whole steps (`programs(steps=True)`). No one goes back from their results, and no one
    holds their `.grad`, which is a graph's own memory.
    """
    need_hypothesis()
    check_kind("training_sequences: program", program, Program, "a Program")
    check_counts("training_sequences", {"min_calls": min_calls, "max_calls": max_calls})
    check_place("training_sequences: device", device)
    if "grad" not in program.modes:
        raise ValueError(
            "training_sequences: program must run in grad mode; draw it with programs(trained=True)"
        )
    strategy: SearchStrategy[list[Call]] = _composite()(program, (min_calls, max_calls), device, steps)
    return strategy


@functools.cache
def _composite() -> Any:
    return need_hypothesis().composite(_draw_training)


def _draw_training(
    draw: DrawFn, program: Program, counts: tuple[int, int], device: str, steps: bool
) -> list[Call]:
    trainer = (_Stepper if steps else _Trainer)(draw, program, device)
    settings = [trainer.setting(("grad",))]
    if trainer.chance(40):
        settings.append(trainer.setting(trainer.choose([("grad",), ("no_grad",), ("inference",)])))
    total, habit = draw(need_hypothesis().integers(*counts)), trainer.habit()
    calls: list[Call] = []
    while len(calls) < total:
        usual = trainer.habit() if trainer.chance(25) else habit
        number = trainer.choose([0, 0, len(settings) - 1])
        for index, acts in enumerate(trainer.round(usual, total - len(calls))):
            args, kwargs = trainer.arguments(number, settings[number])
            change = trainer.changes(gentle=index > 0) if trainer.chance(15) else None
            context = Ambient(settings[number].mode, settings[number].autocast)
            calls.append(Call(args, kwargs, change, context, Then(tuple(acts))))
    return calls
