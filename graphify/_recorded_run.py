"""The run that is recorded: what it gets, what it leaves, and refusals of what only Python did in it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ._autograd import Instance
from ._bystanders import Bystanders
from ._code import Executed
from ._graph import Order, Setting
from ._inputs import StaticInputs
from ._layout import family_key
from ._places import Change
from ._repeats import Versions
from ._saved import Saved, saving
from ._stand_ins import StandIns
from ._survey import Survey
from ._tree import Tree, tensors_of
from ._trial import HostRandomness
from ._undo import UndoLog
from ._verdicts import (
    blind_iterator,
    changed_container,
    hung_on,
    keeps_random_state,
    other_flag,
    other_form,
    random_draw,
    seeded,
    side_effect,
)
from ._watch import Watch, unwatched, watching
from ._whole_step import WholeStep, hooks_on
from .errors import again

__all__ = ["RecordedRun"]


class RecordedRun:
    """One run of a call, and all that a plan of its replays must know of it; a call of this runs it.

    Unless `watched`, it may repeat the run before.
    """

    def __init__(
        self, setting: Setting, order: Order, known: Executed, undo: UndoLog | None, *, watched: bool
    ) -> None:
        call, device, numbers = order.call, order.device, order.numbers
        self.setting, self.call, self.device, self._known = setting, call, device, known
        self.patterns = order.patterns
        self._roots = setting.roots(call)
        self.before = setting.surveys.of(self._roots, known)
        if numbers is not None and (hooks := hooks_on(self.before)):
            self._roots += hooks
            # They run where the backward does, on a thread of its own.
            known.note([hook for _, hook in hooks])
            self.before = setting.surveys.of(self._roots, known)
        self._refuse_early(known, self.before)
        self._host = HostRandomness(device)
        self.inputs = StaticInputs(
            call.tensors,
            order.specs,
            device,
            order.staged,
            by_reference=order.by_reference,
            take=self._taking(order),
        )
        self._layouts = [(_metadata(t), t.requires_grad) for t in self.inputs.tensors]
        self._undo = undo = undo or UndoLog()
        undo.touched.everything |= known.everything
        # Only a backend whose recording run is real needs the log: on a device a copy would be captured.
        log = self._undo if setting.backend.runs_live else None
        self.watch = Watch(device, given=self.inputs.tensors, strict=True, undo=log, touched=undo.touched)
        # A run that is real at each replay deals with gradients and numbers by itself.
        self.numbers = {place.id for place in numbers or ()}
        mine = [] if numbers is None or setting.backend.runs_live else numbers
        self.step = None if numbers is None else WholeStep(self.before, mine, device, self.watch.touched)
        self.watch.given |= self.step.lent if self.step is not None else set()
        self._versions = Versions(self.inputs.tensors, self.before)
        self._simple = not setting.backend.runs_live and self.patterns is None and self.step is None
        self.example = setting.repeats.example(self._versions) if self._simple and not watched else None
        if self.example is not None:
            self.example.foretell(self.watch, self._versions)
        self._arguments = call.tree.rebuild(self.inputs.tensors, call.consts)
        self._tokens = _tokens(call.tree, self._arguments)
        self.executed = Executed()
        self.after: Survey | None = None
        self._compared = False
        self.hidden: list[Change] = []
        self.others: Bystanders
        self.instance: Instance | None = None
        self.saved: list[Saved] = []
        self.stand_ins = StandIns(self._to_cut())

    def _taking(self, order: Order) -> Callable[[int, Tensor], Tensor | None] | None:
        """Where bucketed inputs lie: in memory that all buckets share, unless it must last until a backward."""
        flats, capacity, paths = self.setting.flats, order.capacity, self.call.tree.tensor_paths
        if not capacity or order.patterns is not None:
            return None
        return lambda i, leaf: flats.take(paths[i], leaf, capacity[i]) if capacity[i] else None

    def _to_cut(self) -> list[Tensor]:
        """The outside tensors that the run may take gradients of, where a backward must end at them.

        A tensor with a history of its own would let it go on behind, to leaves that are reached anyway. A backward
        inside shows at a stand-in, whatever becomes of the gradients.
        """
        if self.patterns is None:
            return []
        found = [*(t for _, t in self.before.tensors() if t.requires_grad), *self.patterns.outside]
        whole, streams = self.step is not None, self.setting.backend.nodes_have_streams
        return found if whole or streams or any(not t.is_leaf for t in found) else []

    def __call__(self) -> tuple[Any, list[Any]]:
        """Run: the result, and what the run left in fields that it only writes."""
        self.saved = []
        for earlier in (self.watch.aliases, self.watch.touched.before):  # where the run is repeated
            earlier.clear()
        keeping = nullcontext() if self.patterns is None else saving(self.saved)
        with self.stand_ins.instead():
            with keeping, self._seen():
                result = self._called()
            if not self._compared:
                self._compare()
            hidden = [change.place.read() for change in self.hidden]
        if self.instance is not None:
            self.instance.renew(tensors_of((result, *hidden)), self.saved, self.watch.outside)
        return result, hidden

    def _seen(self) -> AbstractContextManager[Any]:
        if self.example is not None:
            return unwatched(self.watch)
        return watching(self.watch, self.setting.backend.listen)

    def to_repeat(self) -> None:
        """Let later runs repeat this one."""
        if self._simple and self.example is None:
            moved, mine = self._versions.moved(), self.inputs.by_reference
            self.setting.repeats.keep(self.watch, self.before, self._versions, moved, mine)

    def _called(self) -> Any:
        if self.example is not None:
            return self.example.repeat(self._run, self._versions)
        if self.step is None or self.setting.backend.runs_live:
            return self.setting.repeats.learn(self._run)
        with self.step.inside(self.watch):
            return self._run()

    def _run(self) -> Any:
        return self.setting.run(self._arguments)

    def _compare(self) -> None:
        """Find what only Python did, and refuse what a replay could not repeat."""
        self._compared = True
        self._check_host()
        self._check_arguments()
        self._known.merge_library(self.watch.executed)
        self.executed.merge(self._known)
        self.executed.merge(self.watch.executed)
        self._check_checkpoints()
        self.after = self.setting.surveys.after(self._roots, self.executed)
        self._refuse_early(self.executed, self.after)
        self.others = Bystanders(self.before.optimizers, self.watch.touched)
        changes = (c for c in self.before.changes(self.after) if not self.others.own(c.place))
        self.hidden = [self._hidden(change) for change in changes]

    def _check_host(self) -> None:
        for generator in self._host.drawn():
            raise random_draw(self.setting.name, generator)
        refused = seeded(self.watch.executed)
        if refused is not None:
            raise again(refused)

    def _refuse_early(self, executed: Executed, survey: Survey) -> None:
        """Before the run, which would take an item that nobody can give back, or miss what hangs on an argument."""
        named = zip(self.call.tree.tensor_paths, self.call.tensors, strict=True)
        refused = blind_iterator(self.setting.name, executed, survey) or hung_on(executed, named)
        if refused is not None:
            raise again(refused)

    def _check_checkpoints(self) -> None:
        """The state of a generator, kept for a recomputation, would be that of the capture for good."""
        if self.patterns is None:
            return
        refused = keeps_random_state(self.setting.name, self.watch)
        if refused is not None:
            raise again(refused)

    def _check_arguments(self) -> None:
        tree, statics = self.call.tree, self.inputs.tensors
        for path, static, (layout, needed) in zip(tree.tensor_paths, statics, self._layouts, strict=True):
            if _metadata(static) != layout:
                raise other_form(path)
            if static.requires_grad != needed:
                raise other_flag(path)
        found = tree.unpack(self._arguments)
        if (
            found is None
            or found[1] != self._tokens
            or any(a is not b for a, b in zip(found[0], statics, strict=True))
        ):
            raise changed_container(self.setting.name)

    def _hidden(self, change: Change) -> Change:
        """A change that can be repeated at each call: a field that is only written."""
        assert self.after is not None, "what changed is known"
        refused = side_effect(self.setting.name, change, self.executed, self.after)
        if refused is not None:
            raise again(refused)
        return change

    def taking_back(self, streams: Any) -> Callable[[], None]:
        """What puts back all that the run did in Python, and where the run is real in memory, too."""
        undo, before, step, host = self._undo, self.before, self.step, self._host
        backend = self.setting.backend

        def take_back() -> None:
            undo.rollback()
            before.restore(Bystanders(before.optimizers, undo.touched).hold)
            if step is not None:
                step.restore(undo.touched)
            host.restore()
            if streams is not None:
                backend.set_rng_state(streams)

        return take_back

    def forget(self) -> None:
        """Drop the caller's objects: a backend that records the run itself keeps this for as long as its recording."""
        del self.before, self.call, self._host, self._roots, self._versions
        self.after, self.example, self._undo = None, None, UndoLog()


def _tokens(tree: Tree, values: tuple[Any, ...]) -> tuple[Hashable, ...]:
    found = tree.unpack(values)
    assert found is not None, "rebuilt arguments have the structure they were rebuilt from"
    return found[1]


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, family_key(tensor)
