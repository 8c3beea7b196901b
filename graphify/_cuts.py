"""Cuts: which part of a result of a bucket is the live one, learned from runs of several sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._forms import Base, Form, Forms, observed, plain_layout
from ._padding import Fit
from ._rules import Rule, Seen, Sizes, fitting

__all__ = ["Cut", "Learner", "Way", "teach"]


class Cut(NamedTuple):
    """One way to cut a result: a rule per dimension."""

    rules: tuple[Rule, ...]

    def shape_at(self, sizes: Sizes) -> tuple[int, ...] | None:
        """The shape of the result in a run at these sizes; None when no run has shown it."""
        found = [rule.size_at(sizes) for rule in self.rules]
        return None if None in found else tuple(size for size in found if size is not None)

    def part(self, result: Tensor, live: Sizes, full: Sizes) -> Tensor:
        """The live part of a result of a bucket as a view, which may have more dimensions."""
        for dim, rule in reversed(list(enumerate(self.rules))):
            result = rule.cut(result, dim, live, full)
        return result

    def __call__(self, result: Tensor, live: Sizes, full: Sizes) -> Tensor:
        """The live part of a result of a bucket, in its own shape."""
        part, shape = self.part(result, live, full), self.shape_at(live)
        assert shape is not None, "only a cut that is known is made"
        return part if part.shape == shape else part.reshape(shape)


class Way(NamedTuple):
    """How a result of a bucket becomes that of a call: its live part, and where eager has it in memory."""

    cut: Cut
    base: Base
    form: Form


class Learner:
    """What runs of several sizes taught about one result.

    Sizes at which all rules that explain every run agree are known without a run; others must be run once.
    """

    def __init__(self) -> None:
        self._runs: dict[Sizes, tuple[int, ...]] = {}
        self._rules: list[list[Rule]] = []
        self._forms: dict[Hashable, Forms] = {}

    def note(self, sizes: Sizes, shape: Sequence[int]) -> None:
        """Learn a shape from a run."""
        self._runs[sizes] = tuple(shape)
        if not self._rules:
            self._rules = [fitting([(sizes, size)]) for size in shape]
        self._rules = [
            [rule for rule in rules if rule.size_at(sizes) == shape[dim]] or [self._seen(dim)]
            for dim, rules in enumerate(self._rules)
        ]

    def note_form(self, sizes: Sizes, layout: Hashable, base: Base, form: Form) -> None:
        """Learn from a run whose arguments have this layout where its result lay."""
        if layout not in self._forms:
            self._forms[layout] = Forms(base)
        self._forms[layout].note(sizes, base, form)

    def is_outside(self) -> bool:
        """Whether the result is memory that the function has from outside."""
        return any(forms.base.kind == "outside" for forms in self._forms.values())

    def agrees(self, other: Learner) -> bool:
        """Whether one set of rules explains the runs of both."""
        if {len(shape) for shape in (*self._runs.values(), *other._runs.values())} != {len(self._rules)}:
            return False
        return all(
            any(rule.size_at(sizes) == shape[dim] for rule in rules)
            for dim, rules in enumerate(self._common(other))
            for sizes, shape in other._runs.items()
        ) and all(self._common(other))

    def merge(self, other: Learner) -> None:
        """Learn what another one did, its choice among the rules included."""
        self._rules = self._common(other)
        self._runs |= other._runs
        for layout, forms in other._forms.items():
            if layout in self._forms:
                self._forms[layout].merge(forms)
            else:
                self._forms[layout] = forms

    def cuts(self, fit: Fit) -> list[Cut]:
        """The cuts that explain every run, one of those that do the same here."""
        return [Cut(rules) for rules in itertools.product(*(g.values() for g in self._groups(fit)))]

    def choose(self, fit: Fit, cuts: Sequence[Cut]) -> None:
        """Keep only what does the same here as one of these: values told them from the others."""
        self._rules = [
            [rule for rule in rules if _action(rule, size, fit) in wanted]
            for rules, size, wanted in zip(
                self._rules,
                self._runs[fit.full],
                [
                    {_action(cut.rules[dim], size, fit) for cut in cuts}
                    for dim, size in enumerate(self._runs[fit.full])
                ],
                strict=True,
            )
        ]

    def is_clear(self, fit: Fit) -> bool:
        """Whether rules that agree on the shape also agree on the part that is live."""
        if self._shape_at(fit.live) is None or self._shape_at(fit.full) is None:
            return True
        return all(len(group) == 1 for group in self._groups(fit))

    def takes(self, result: Tensor) -> bool:
        """Whether a result has as many dimensions as those met so far."""
        return result.dim() == len(self._rules)

    def is_within(self, fit: Fit) -> bool:
        """Whether the live part that was met is no longer than what the bucket's run returned."""
        live, full = self._runs[fit.live], self._runs[fit.full]
        return all(here <= there for here, there in zip(live, full, strict=True))

    def foresees(self, fit: Fit, layout: Hashable) -> bool:
        """Whether a run at the bucket's size, by shape alone, will tell the live part of such a call.

        Such a call must have run at its own size; each length that a rule foretells must mean one thing.
        """
        forms = self._forms.get(layout)
        if forms is None or not forms.has_run(fit.live):
            return False
        for rules in self._rules:
            found: dict[int, set[Hashable]] = {}
            for rule in rules:
                size = rule.size_at(fit.full)
                if size is not None:
                    found.setdefault(size, set()).add(_action(rule, size, fit))
            if any(len(actions) > 1 for actions in found.values()):
                return False
        return True

    def way(self, fit: Fit, layout: Hashable) -> Way | None:
        """How results become those of such a call; None when a run must show it first."""
        shape, forms = self._shape_at(fit.live), self._forms.get(layout)
        if shape is None or forms is None or self._shape_at(fit.full) is None:
            return None
        form = forms.at(fit.live, shape)
        return None if form is None else Way(self.cuts(fit)[0], forms.base, form)

    def _shape_at(self, sizes: Sizes) -> tuple[int, ...] | None:
        found = [{rule.size_at(sizes) for rule in rules} for rules in self._rules]
        known = [next(iter(each)) for each in found if len(each) == 1]
        shape = tuple(size for size in known if size is not None)
        return shape if len(shape) == len(self._rules) else None

    def _groups(self, fit: Fit) -> list[dict[Hashable, Rule]]:
        """Per dimension, a rule for each thing that can be done to it here."""
        shape = self._runs.get(fit.full) or self._shape_at(fit.full) or ()
        return [
            {_action(rule, size, fit): rule for rule in reversed(rules)}
            for rules, size in zip(self._rules, shape, strict=True)
        ]

    def _seen(self, dim: int) -> Seen:
        seen = Seen()
        seen.known = {sizes: shape[dim] for sizes, shape in self._runs.items()}
        return seen

    def _common(self, other: Learner) -> list[list[Rule]]:
        return [
            [rule for rule in mine if rule in theirs]
            for mine, theirs in zip(self._rules, other._rules, strict=True)
        ]


def _action(rule: Rule, size: int, fit: Fit) -> Hashable:
    """What a rule does to a dimension of this size, equal for rules that keep the same elements in one order."""
    kept = rule.cut(torch.empty(size, device="meta"), 0, fit.live, fit.full)
    steps: list[tuple[int, int]] = []
    for count, stride in zip(kept.shape, kept.stride(), strict=True):
        if count == 1:
            continue
        if steps and steps[-1][1] == count * stride:
            steps[-1] = (steps[-1][0] * count, stride)
        else:
            steps.append((count, stride))
    return int(kept.storage_offset()), kept.numel(), tuple(steps)


def teach(
    learners: Sequence[Learner],
    sizes: Sizes,
    results: Sequence[Tensor],
    tensors: Sequence[Tensor],
    is_outside: Callable[[int, Tensor], bool],
) -> None:
    """Learn from a run at these sizes."""
    layout = plain_layout(tensors)
    found = observed(results, tensors, is_outside)
    for learner, (base, form) in zip(learners, found, strict=True):
        learner.note(sizes, form.shape)
        learner.note_form(sizes, layout, base, form)
