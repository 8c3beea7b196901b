"""Recording one call: watch it being captured, compare Python before and after, plan its replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ._autograd import Instance
from ._code import Executed
from ._ends import Ends
from ._grads import refused_arguments
from ._graph import Argument, Graph, Order, Outcome, Setting, plan_delivery, plan_launch
from ._guards import Guard, find_place, once
from ._inputs import StaticInputs
from ._layout import family_key, is_dense
from ._places import Change
from ._results import ResultPlan
from ._saved import Saved, saving
from ._stand_ins import StandIns, StandInUsedError
from ._survey import Survey
from ._tree import Tree, tensors_of, tree_of
from ._trial import HostRandomness
from ._undo import UndoLog, version_of
from ._verdicts import (
    device_refused,
    keeps_random_state,
    long_history,
    other_flag,
    other_form,
    random_draw,
    second_backward,
    shared_memory,
    side_effect,
    unknown_result,
    without_memory,
)
from ._watch import Watch, watching
from ._whole_step import WholeStep, hooks_on
from .backends.base import Recording
from .errors import CaptureError, again

__all__ = ["NeedsGradError", "Recorded", "has_gradients", "record"]

_PARTS = "{} its parts, such as `indices()` and `values()`, or its dense form, or do this part outside"
_ONCE = "Python runs when a graph is recorded; a replay repeats device work only"


class NeedsGradError(Exception):
    """The results of a run need gradients, which its warm-ups did not."""


class Recorded(NamedTuple):
    """A graph, what it takes for granted, and what undoes the run that was recorded while no replay has begun."""

    graph: Graph
    guard: Guard
    take_back: Callable[[], None]


def has_gradients(result: Any, given: Sequence[Tensor]) -> bool:
    """Whether gradients were recorded, and a result of a run needs them; `given` are the arguments."""
    found = tensors_of(result)
    if torch.is_grad_enabled():
        return any(t.requires_grad for t in found)
    # The run itself can have recorded them all the same.
    return any(t.grad_fn is not None and all(t is not own for own in given) for t in found)


def record(
    setting: Setting,
    order: Order,
    known: Executed,
    generators: Sequence[torch.Generator],
    undo: UndoLog | None = None,
) -> Recorded:
    """Record one call; its device work happens at the first replay. Call inside the backend's scope.

    `undo` notes what the recording run writes where that run is real; the caller then rolls it back.

    Raises:
        CaptureError: the run cannot be a graph; Python state and random streams are as before.
        NeedsGradError: the results need gradients, and the order knows nothing of a backward.
        TangledError: the results are views that gradients cannot be handed out through.
    """
    return _Recorder(setting, order, known, undo).graph(generators)


class _Recorder:
    """The state of one recording while it is made."""

    def __init__(self, setting: Setting, order: Order, known: Executed, undo: UndoLog | None) -> None:
        call, specs, device, self.patterns, numbers = (
            order.call,
            order.specs,
            order.device,
            order.patterns,
            order.numbers,
        )
        self.setting, self.call, self.device, self.known = setting, call, device, known
        self.roots = setting.roots(call)
        self.before = setting.surveys.of(self.roots, known)
        if numbers is not None and (hooks := hooks_on(self.before)):
            self.roots += hooks
            known.note(
                [hook for _, hook in hooks]
            )  # they run where the backward does, on a thread of its own
            self.before = setting.surveys.of(self.roots, known)
        self.host = HostRandomness(device)
        self.inputs = StaticInputs(
            call.tensors,
            specs,
            device,
            order.staged,
            by_reference=order.by_reference,
            take=self._taking(order),
        )
        self.layouts = [(_metadata(t), t.requires_grad) for t in self.inputs.tensors]
        self.undo = undo or UndoLog()
        # Only a backend whose recording run is real needs the log: on a device a copy would be captured.
        log = self.undo if setting.backend.runs_live else None
        self.watch = Watch(device, given=self.inputs.tensors, strict=True, undo=log)
        # A run that is real at each replay deals with gradients and numbers by itself.
        self.numbers = {place.id for place in numbers or ()}
        mine = [] if numbers is None or setting.backend.runs_live else numbers
        self.step = None if numbers is None else WholeStep(self.before, mine, device)
        self.watch.given |= self.step.lent if self.step is not None else set()
        self.arguments = call.tree.rebuild(self.inputs.tensors, call.consts)
        self.tokens = _tokens(call.tree, self.arguments)
        self.executed = Executed()
        self.after: Survey | None = None
        self.compared = False
        self.hidden: list[Change] = []
        self.results: Tree | None = None
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

    def graph(self, generators: Sequence[torch.Generator]) -> Recorded:
        """Capture, check, plan; undo what Python did when that fails."""
        backend, pool = self.setting.backend, self.setting.pool
        started = time.perf_counter()
        streams = backend.rng_state(generators) if backend.runs_live else None
        recording: Recording | None = None
        try:
            # What waits for a backward must not lie where an earlier graph has its temporaries.
            alone = self.patterns is not None
            memory = backend.pool(self.device) if alone else pool.memory(backend, self.device)
            recording, (result, hidden) = self._capture(memory, generators)
            graph = Graph(self.setting, recording, memory)
            graph.paths = self.call.tree.tensor_paths
            guard = self._plan(graph, result, hidden)
        except BaseException:
            self._restore(recording, streams)
            raise
        graph.seconds = time.perf_counter() - started
        take_back = self._taking_back(streams)
        # A backend that records the run itself keeps this recorder too, which must not keep the caller's objects.
        del self.before, self.call, self.host, self.roots
        self.after, self.undo = None, UndoLog()
        return Recorded(graph, guard, take_back)

    def _restore(self, recording: Recording | None, streams: Any) -> None:
        if recording is not None:
            recording.close()
        self._taking_back(streams)()

    def _taking_back(self, streams: Any) -> Callable[[], None]:
        """What puts back all that the run did in Python, and where the run is real in memory, too."""
        undo, before, step, host = self.undo, self.before, self.step, self.host
        backend = self.setting.backend

        def take_back() -> None:
            undo.rollback()
            before.restore()
            if step is not None:
                step.restore()
            host.restore()
            if streams is not None:
                backend.set_rng_state(streams)

        return take_back

    def _capture(self, memory: Any, generators: Sequence[torch.Generator]) -> tuple[Recording, Any]:
        backend = self.setting.backend
        try:
            return backend.record(self._run, memory, generators)
        except StandInUsedError:
            raise second_backward(self.setting.name) from None
        except Exception as error:
            if isinstance(error, CaptureError) or not backend.is_capture_error(error):
                raise
            raise device_refused(error) from error
        finally:
            self.watch.undo = None

    def _run(self) -> tuple[Any, list[Any]]:
        """What is recorded: the result, and what the run left in fields that it only writes."""
        self.saved = []
        self.watch.aliases.clear()  # of an earlier run, where the run is repeated
        keeping = nullcontext() if self.patterns is None else saving(self.saved)
        with self.stand_ins.instead():
            with keeping, watching(self.watch, self.setting.backend.listen):
                result = self._called()
            if not self.compared:
                self._compare()
            hidden = [change.place.read() for change in self.hidden]
        if self.instance is not None:
            self.instance.renew(tensors_of((result, *hidden)), self.saved, self.watch.outside)
        return result, hidden

    def _called(self) -> Any:
        if self.step is None or self.setting.backend.runs_live:
            return self.setting.run(self.arguments)
        with self.step.inside(self.watch):
            return self.setting.run(self.arguments)

    def _compare(self) -> None:
        """Find what only Python did, and refuse what a replay could not repeat."""
        self.compared = True
        self._check_host()
        self._check_arguments()
        self.known.merge_library(self.watch.executed)
        self.executed.merge(self.known)
        self.executed.merge(self.watch.executed)
        self._check_checkpoints()
        self.after = self.setting.surveys.after(self.roots, self.executed)
        self.hidden = [self._hidden(change) for change in self.before.changes(self.after)]

    def _plan(self, graph: Graph, result: Any, hidden: list[Any]) -> Guard:
        assert self.after is not None
        self._plan_step(graph, result, hidden)
        written = {change.place.id for change in self.hidden}
        written |= self.numbers
        self.before.adopt(self.after, written)
        self._plan_outside(graph)
        self._plan_arguments(graph)
        self._plan_results(graph, result, hidden, self.after)
        surveys = self.setting.surveys
        return surveys.guard(self.before, outside=graph.kept, written=written, device=self.device)

    def _plan_step(self, graph: Graph, result: Any, hidden: list[Any]) -> None:
        graded = has_gradients((result, hidden), self.inputs.tensors)
        if (graded and self.patterns is None) or (self.watch.backward and self.step is None):
            raise NeedsGradError
        if self.step is None:
            return
        refused = refused_arguments(zip(self.call.tree.tensor_paths, self.inputs.tensors, strict=True))
        if refused is not None:
            raise again(refused)
        results = tensors_of((result, *hidden))
        used = self.step.plan(self.watch, results, everything=self.executed.everything)
        if graded and used:
            raise second_backward(self.setting.name)
        if not self.setting.backend.runs_live and (used or self.watch.backward or self.numbers):
            graph.step = self.step

    def _check_host(self) -> None:
        for generator in self.host.drawn():
            raise random_draw(self.setting.name, generator)

    def _check_checkpoints(self) -> None:
        """The state of a generator, kept for a recomputation, would be that of the capture for good."""
        if self.patterns is None:
            return
        refused = keeps_random_state(self.setting.name, self.watch)
        if refused is not None:
            raise again(refused)

    def _check_arguments(self) -> None:
        tree, statics = self.call.tree, self.inputs.tensors
        for path, static, (layout, needed) in zip(tree.tensor_paths, statics, self.layouts, strict=True):
            if _metadata(static) != layout:
                raise other_form(path)
            if static.requires_grad != needed:
                raise other_flag(path)
        found = tree.unpack(self.arguments)
        if (
            found is None
            or found[1] != self.tokens
            or any(a is not b for a, b in zip(found[0], statics, strict=True))
        ):
            raise CaptureError(
                f"`{self.setting.name}` changes a container among its arguments",
                why=_ONCE,
                fix="return the new value instead, or write into a tensor with `copy_`",
            )

    def _hidden(self, change: Change) -> Change:
        """A change that can be repeated at each call: a field that is only written."""
        refused = side_effect(self.setting.name, change, self.executed, self.before.optimizers)
        if refused is not None:
            raise again(refused)
        return change

    def _plan_outside(self, graph: Graph) -> None:
        """Keep alive what the graph reads, and note what no guard can watch."""
        outside = self.watch.outside.items()
        graph.bumped = [t for key, t in outside if self.watch.versions[key] != version_of(t)]
        placed = {family_key(t) for _, t in self.before.tensors()}
        placed |= self.step.known() if self.step is not None else set()
        found: list[str] = []
        for tensor in self.watch.outside.values():
            graph.kept.append(tensor)
            if family_key(tensor) in placed:
                continue
            place = find_place(tensor, ignore=(self.watch.outside, graph.__dict__))
            if place is None:
                found.append(f"{tuple(tensor.shape)} {tensor.dtype}")
            else:
                self.before.places[place.id] = (place, tensor)
        graph.unguarded = tuple(found)

    def _plan_arguments(self, graph: Graph) -> None:
        written, outside = self.watch.written, self.watch.outside
        statics = enumerate(self.inputs.tensors)
        mutated = [(i, t) for i, t in statics if family_key(t) in written]
        graph.mutated = [(i, t) for i, t in mutated if i not in self.inputs.by_reference]
        graph.bumped += [t for i, t in mutated if i in self.inputs.by_reference and not t.is_inference()]
        for path, static in zip(self.call.tree.tensor_paths, self.inputs.tensors, strict=True):
            if family_key(static) in self.watch.restrided and not is_dense(static):
                raise CaptureError(
                    f"`{path}` is viewed by `as_strided`, and its elements lie apart",
                    why="the memory between them is the caller's, and a graph has a copy of the elements only",
                    fix=f"pass `{path}.contiguous()`, or the whole tensor that it is a part of",
                )
            if family_key(static) in written and static.device.type != self.device.type:
                self._refuse_host_write(f"the {static.device.type} tensor `{path}`")
        for key, tensor in outside.items():
            if key in written and tensor.device.type != self.device.type:
                self._refuse_host_write(f"a {tensor.device.type} tensor")
        graph.conflicts = frozenset(outside if graph.mutated else written & outside.keys())
        for path, tensor in zip(self.call.tree.tensor_paths, self.call.tensors, strict=True):
            if family_key(tensor) in graph.conflicts:
                raise shared_memory(self.setting.name, path)

    def _refuse_host_write(self, what: str) -> NoReturn:
        raise CaptureError(
            f"`{self.setting.name}` writes into {what}",
            why="a replay repeats the work of one device",
            fix=f"keep that tensor on {self.device}",
        )

    def _plan_results(self, graph: Graph, result: Any, hidden: list[Any], after: Survey) -> None:
        names = ["output", *(change.place.name for change in self.hidden)]
        roots = (result, *hidden)
        tree = self.setting.result = _either(self.setting.result, tree_of(roots, names))
        found = tree.unpack(roots)
        assert found is not None
        outside = [(t, t) for _, t in self.before.tensors()]
        outside += [(t, t) for t in self.step.made] if self.step is not None else []
        self._check_memory(zip(tree.tensor_paths, found[0], strict=True), {id(t) for t, _ in outside})
        results = self._let_go(graph, found[0]) if self.setting.sized and self.patterns is None else found[0]
        plan = ResultPlan(results, self.inputs.tensors, [*self.stand_ins.pairs(), *outside])
        if plan.primaries:
            self._plan_backward(graph, plan)
        lent = self.setting.static_outputs and not plan.primaries
        plan_launch(graph, self.setting, self.inputs, plan, lent=lent)
        consts = self._result_consts(tree, tree.consts(roots), after)
        outcome = Outcome(results, outside, tree, consts, [change.place for change in self.hidden])
        plan_delivery(
            graph, plan, outcome, self.call.tree, None if self.instance is None else self.instance.attach
        )
        if self.setting.sized and self.instance is None:
            graph.outcome = outcome

    def _check_memory(self, results: Iterable[tuple[str, Tensor]], known: Collection[int]) -> None:
        """Refuse what has no memory of its own to copy from, or to guard; what only passes through is as good as any."""
        names = {id(t): f"`{place.name}`" for place, t in self.before.tensors()}
        made = [
            without_memory(f"`{path}`", t, _PARTS.format("return"))
            for path, t in results
            if id(t) not in known
        ]
        read = [
            without_memory(
                names.get(id(t), f"a tensor {tuple(t.shape)} from outside"), t, _PARTS.format("use")
            )
            for t in self.watch.outside.values()
        ]
        for refused in (*made, *read):
            if refused is not None:
                raise again(refused)

    def _let_go(self, graph: Graph, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """Buckets copy or lend their results before another one replays: they may lie on one memory."""
        known = {family_key(t) for t in (*self.inputs.tensors, *(t for _, t in self.before.tensors()))}
        known |= self.watch.outside.keys()
        known |= {family_key(t) for t in self.step.made} if self.step is not None else set()
        mine = {id(t): t for t in results if family_key(t) not in known}
        free = dict(zip(mine, self.setting.backend.let_go(list(mine.values()), graph.memory), strict=True))
        return [free.get(id(t), t) for t in results]

    def _plan_backward(self, graph: Graph, plan: ResultPlan) -> None:
        """Everything that needs grad and is older than the run is an input of its backward."""
        assert self.patterns is not None
        outside, statics = self.watch.outside, self.inputs.tensors
        met = [t for t in self.watch.history.values() if self.watch.is_older(t)]
        older = [*met, *(t for _, t in self.before.tensors())]
        ends = Ends(
            statics, self.stand_ins.real, older, self.watch.born | self.watch.given, self.watch.aliases
        )
        wants = ends.of((p.tensor for p in plan.primaries), self.device)
        if wants.uncut or (wants.real and self.watch.drew and self.setting.backend.nodes_have_streams):
            raise long_history(wants, self.before)
        self.instance = Instance(self.setting, graph, self.device, self.patterns)
        self.instance.drew = self.watch.drew
        self.instance.plan(plan.primaries, wants, statics)
        graph.primaries = plan.primaries
        self.instance.renew(plan.results, self.saved, outside)
        graph.instance, graph.kept = self.instance, once([*graph.kept, *wants.leaves, *wants.others])
        self.instance.reads(once([*graph.kept, *(t for _, t in self.before.tensors())]))

    def _result_consts(self, tree: Tree, consts: tuple[object, ...], survey: Survey) -> list[object]:
        """Constants of the result; those that are the caller's own objects become positions."""
        mine = self.call.consts
        positions = {id(mine[i]): i for i in self.call.tree.opaque}
        made: list[object] = list(consts)
        for i in tree.opaque:
            if id(consts[i]) in positions:
                made[i] = Argument(positions[id(consts[i])])
            elif not survey.holds(consts[i]):
                raise unknown_result(tree.const_paths[i], consts[i])
        return made


def _either(known: Tree | None, tree: Tree) -> Tree:
    """The tree that is known already, where it is the same under the same names."""
    if known != tree or known.tensor_paths != tree.tensor_paths or known.const_paths != tree.const_paths:
        return tree
    return known


def _tokens(tree: Tree, values: tuple[Any, ...]) -> tuple[Hashable, ...]:
    found = tree.unpack(values)
    assert found is not None, "rebuilt arguments have the structure they were rebuilt from"
    return found[1]


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, family_key(tensor)
