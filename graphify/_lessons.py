"""Runs before a capture, and what they teach about the code behind a wrapper."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._autograd import Patterns
from ._bystanders import Bystanders
from ._code import Executed
from ._entries import Entries
from ._entry import Entry, Refusal
from ._graph import Call, Setting
from ._guards import Guard
from ._layout import family_key
from ._lifted import numbers_of
from ._numbers import Numbers
from ._optimizers import refusal_of, refused_code, steps
from ._plain import Plain
from ._record import has_gradients
from ._repeats import Versions
from ._survey import Survey
from ._tree import tensors_of
from ._trial import Snapshot, is_large
from ._verdicts import given_history, host_reads, replaced_argument, seeded
from ._watch import Watch, watching
from .errors import CaptureError, again

__all__ = ["Lessons", "large_writes"]


def large_writes(watch: Watch, survey: Survey, call: Call) -> tuple[str, ...]:
    """The names of what a run wrote, or was about to write, of memory that no trial copies."""
    given = {family_key(t): t for t in call.tensors}
    written = [(k, t) for k, t in (watch.outside | given).items() if k in watch.written and is_large(t)]
    if not written:
        return ()
    names = {family_key(t): f"`{place.name}`" for place, t in survey.tensors()}
    names |= {
        family_key(t): f"`{path}`" for path, t in zip(call.tree.tensor_paths, call.tensors, strict=True)
    }
    return tuple(names.get(key, f"a tensor {tuple(t.shape)} from outside") for key, t in written)


class Lessons:
    """What runs of one wrapper's calls executed, drew from and changed; what no capture can hold, by name."""

    def __init__(self, setting: Setting, plain: Plain, entries: Entries) -> None:
        self.setting, self.plain, self.entries = setting, plain, entries
        self.executed = Executed()
        self.generators: dict[int, torch.Generator] = {}
        self.numbers = Numbers()
        self.caches = False
        """Whether runs may find or leave tensors where no survey looks."""

    def warm_up(self, entry: Entry, call: Call) -> Any:
        """Run for real, on the capture stream, and learn what a capture would meet."""
        backend, before, base = self.setting.backend, None, self.survey(call)
        if self.plain.fallback == "raise":
            before = Snapshot(backend, entry.device_or_raise(), base, self.known_generators())
        watch = Watch(entry.device_or_raise(), undo=before.log if before is not None else None)
        # A run with autograd stays on the caller's stream: its nodes remember the stream for the backward.
        aside = not torch.is_grad_enabled()
        with backend.scope(watch.device, aside=aside), watching(watch, backend.listen), steps() as found:
            result = self.setting.run(call.values)
        backend.hand_over(tensors_of(result))
        renewed = watch.renewed(call.tensors)
        self.learn(entry, call, watch, result, found, renewed, base)
        if entry.refusal is not None and entry.refusal.error is not None:
            if before is None:
                self.plain.say_refused(entry.refusal)
            # A tensor's history cannot be put back, nor large memory, and nothing makes a module lazy again: then this
            # call stands, and the next is refused.
            elif not (before.log.skipped or renewed or watch.detached or watch.built):
                before.undo()
                # The run is undone, and what it made is no part of the signature that is refused.
                survey = Survey(self.setting.roots(call), self.executed)
                entry.trust(Guard(survey, outside=(), written=set(), device=watch.device))
                raise again(entry.refusal.error)
        self.plain.counts["warmups"] += 1
        self.plain.note_beside()
        return result

    def survey(self, call: Call, *, after: bool = False) -> Survey:
        """What a run of this call may change; all that is in reach while nothing is known of its code.

        `after`: a run was, which is still to be undone.
        """
        known = self.executed if self.executed.codes else Executed(everything=True)
        surveys, roots = self.setting.surveys, self.setting.roots(call)
        found = surveys.after(roots, known) if after else surveys.of(roots, known)
        return found.beyond([("arguments", list(call.values))])

    def known_generators(self) -> list[torch.Generator]:
        """Those that runs so far drew from."""
        return list(self.generators.values())

    def learn(
        self,
        entry: Entry,
        call: Call,
        watch: Watch,
        result: Any,
        stepped: Sequence[Optimizer],
        renewed: Sequence[Tensor],
        before: Survey | None = None,
    ) -> None:
        """Take note of what a run did, to whose histories, too; refuse the entry where no capture can hold it.

        `before` is what Python held before a run that stands.
        """
        self.executed.merge(watch.executed)
        self.generators.update(watch.generators)
        entry.warmed += 1
        survey = self._survey_with(call, stepped)
        self.caches = self.caches or bool(survey.closed)
        entry.large = large_writes(watch, survey, call)
        others = Bystanders(survey.optimizers, watch.touched)
        entry.numbers = numbers_of(held for held in survey.optimizers if not others.include(held[1]))
        free = {place.id for place in self.numbers.lifted(entry.numbers)} | others.places
        free |= self._only_written(before, survey) if before is not None else set()
        entry.trust(self.setting.surveys.guard(survey, outside=(), written=free, device=watch.device))
        offence = self.offence(watch, stepped)
        if offence is not None:
            entry.refusal = Refusal("uncapturable", offence)
        elif not watch.device_work and not call.tensors:
            entry.refusal = Refusal("cpu")
        else:
            entry.whole = watch.backward or bool(stepped) or bool(watch.touched.before)
            self._learn_histories(entry, call, renewed, survey)
            if has_gradients(result, call.tensors):
                self._learn_gradients(entry, call, watch)
            elif entry.refusal is None and not entry.whole and self.setting.backend.records_aside:
                self._offer(entry, call, watch, survey)

    def _only_written(self, before: Survey, after: Survey) -> set[tuple[int, Any]]:
        """What a run changed and no code loads by name: its old content matters to no run, and a recording judges it."""
        loads = self.executed.loads()
        return {change.place.id for change in before.changes(after) if change.place.key not in loads}

    def _offer(self, entry: Entry, call: Call, watch: Watch, survey: Survey) -> None:
        """Let recordings repeat this warm-up."""
        versions = Versions(call.tensors, survey)
        by_reference = [i for i, _ in entry.addresses]
        self.setting.repeats.keep(watch, survey, versions, versions.written(watch), by_reference)

    def _survey_with(self, call: Call, stepped: Sequence[Optimizer]) -> Survey:
        """What a run can reach, its optimizers included, whether or not a name leads to them."""
        survey = self.setting.surveys.of(self.setting.roots(call), self.executed)
        unknown = [optimizer for optimizer in stepped if not survey.holds(optimizer)]
        if not unknown:
            return survey
        self.setting.optimizers += [(type(optimizer).__name__, optimizer) for optimizer in unknown]
        return self.setting.surveys.of(self.setting.roots(call), self.executed)

    def offence(self, watch: Watch, stepped: Sequence[Optimizer]) -> CaptureError | None:
        """Why a run like this one can never be captured, the clearest reason first."""
        refused = (refusal_of(optimizer, watch.device) for optimizer in stepped)
        found = (
            seeded(watch.executed)
            or refused_code(watch.executed)
            or next((e for e in refused if e is not None), None)
        )
        return found or next(iter(host_reads(watch, self.executed)), None)

    def _learn_histories(self, entry: Entry, call: Call, renewed: Sequence[Tensor], survey: Survey) -> None:
        """A replay changes memory only: a tensor that a call gives a history would have that of the capture."""
        named = [*zip(call.tree.tensor_paths, call.tensors, strict=True)]
        error = given_history(renewed, survey, named)
        if error is not None:
            entry.refusal = Refusal("uncapturable", error)

    def _learn_gradients(self, entry: Entry, call: Call, watch: Watch) -> None:
        """The results need gradients: a backward will be recorded, too."""
        for error in replaced_argument(watch, zip(call.tree.tensor_paths, call.tensors, strict=True)):
            entry.refusal = Refusal("uncapturable", error)
        if entry.patterns is None:
            entry.patterns = self._patterns()
        mine = {family_key(t) for t in call.tensors}
        outside = ((key, t) for key, t in watch.outside.items() if key not in mine)
        entry.patterns.outside = [t for _, t in outside if t.requires_grad]

    def _patterns(self) -> Patterns:
        # Weak, since entries own their patterns: a wrapper dies without the garbage collector.
        plain, entries, counts = weakref.ref(self.plain), weakref.ref(self.entries), self.plain.counts

        def refuse(error: CaptureError) -> None:
            alive = plain()
            if alive is not None:
                alive.refuse_backward(error)

        def recorded() -> None:
            counts["recordings"] += 1

        def make_way() -> None:
            alive = entries()
            if alive is not None:
                alive.make_way()

        generators = self.generators
        return Patterns(lambda: list(generators.values()), refuse, recorded, make_way, self.plain.gates)
