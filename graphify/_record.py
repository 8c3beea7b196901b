"""Recording one call: capture a run of it, and plan its replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ._autograd import Instance
from ._code import Executed
from ._ends import Ends
from ._grads import refused_arguments
from ._graph import Argument, Graph, Order, Outcome, Setting, plan_delivery, plan_launch
from ._guards import Guard, find_place, once
from ._layout import family_key, is_dense
from ._recorded_run import RecordedRun
from ._repeats import UnlikeError
from ._results import ResultPlan
from ._stand_ins import StandInUsedError
from ._survey import Survey
from ._tree import Tree, tensors_of, tree_of
from ._undo import UndoLog
from ._verdicts import (
    device_refused,
    has_memory,
    long_history,
    second_backward,
    shared_memory,
    unknown_result,
    without_memory,
)
from .backends.base import Recording
from .errors import CaptureError, again

__all__ = ["NeedsGradError", "Recorded", "has_gradients", "record"]

_PARTS = "{} its parts, such as `indices()` and `values()`, or its dense form, or do this part outside"


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
    run = RecordedRun(setting, order, known, undo, watched=False)
    try:
        return _recorded(run, order, generators)
    except (UnlikeError, CaptureError):
        if run.example is None:
            raise
    return _recorded(RecordedRun(setting, order, known, undo, watched=True), order, generators)


def _recorded(run: RecordedRun, order: Order, generators: Sequence[torch.Generator]) -> Recorded:
    setting, device = run.setting, run.device
    backend, pool = setting.backend, setting.pool
    started = time.perf_counter()
    streams = backend.rng_state(generators) if backend.runs_live else None
    recording: Recording | None = None
    try:
        # What waits for a backward must not lie where an earlier graph has its temporaries.
        memory = pool.memory(backend, device) if order.patterns is None else backend.pool(device)
        recording, (result, hidden) = _capture(run, memory, generators)
        graph = Graph(setting, recording, memory)
        graph.paths = order.call.tree.tensor_paths
        guard = _plan(run, graph, result, hidden)
    except BaseException:
        if recording is not None:
            recording.close()
        run.taking_back(streams)()
        raise
    graph.seconds = time.perf_counter() - started
    take_back = run.taking_back(streams)
    run.forget()
    return Recorded(graph, guard, take_back)


def _capture(run: RecordedRun, memory: Any, generators: Sequence[torch.Generator]) -> tuple[Recording, Any]:
    backend = run.setting.backend
    try:
        return backend.record(run, memory, generators)
    except StandInUsedError:
        raise second_backward(run.setting.name) from None
    except Exception as error:
        if isinstance(error, CaptureError) or not backend.is_capture_error(error):
            raise
        raise device_refused(error) from error
    finally:
        run.watch.undo = None


def _plan(run: RecordedRun, graph: Graph, result: Any, hidden: list[Any]) -> Guard:
    assert run.after is not None
    _plan_step(run, graph, result, hidden)
    written = {change.place.id for change in run.hidden}
    written |= run.numbers | run.others.places
    run.before.adopt(run.after, written)
    run.to_repeat()  # while the survey has nothing that only the collector finds
    _plan_outside(run, graph)
    _plan_arguments(run, graph)
    if run.setting.backend.runs_live:
        graph.bumped = []  # each replay is a run, which autograd counts by itself
    _plan_results(run, graph, result, hidden, run.after)
    surveys = run.setting.surveys
    return surveys.guard(run.before, outside=graph.kept, written=written, device=run.device)


def _plan_step(run: RecordedRun, graph: Graph, result: Any, hidden: list[Any]) -> None:
    graded = has_gradients((result, hidden), run.inputs.tensors)
    touched = bool(run.watch.touched.before)
    if (graded and run.patterns is None) or ((run.watch.backward or touched) and run.step is None):
        raise NeedsGradError
    if run.step is None:
        return
    refused = refused_arguments(zip(run.call.tree.tensor_paths, run.inputs.tensors, strict=True))
    if refused is not None:
        raise again(refused)
    results = tensors_of((result, *hidden))
    used = run.step.plan(run.watch, results)
    if graded and used and run.watch.backward:
        raise second_backward(run.setting.name)
    if not run.setting.backend.runs_live and (used or touched or run.watch.backward or run.numbers):
        graph.step = run.step


def _plan_outside(run: RecordedRun, graph: Graph) -> None:
    """Keep alive what the graph reads, and note what no guard can watch."""
    outside = run.watch.outside
    graph.kept += outside.values()
    if run.example is not None:
        graph.bumped += run.example.bumped
        return
    graph.bumped = run.watch.bumped()
    placed = run.step.known(run.watch.touched) if run.step is not None else set()
    found: list[str] = []
    strange = [t for key, t in outside.items() if key not in placed and not run.before.over(key)]
    for tensor in strange:
        place = find_place(tensor, ignore=(outside, graph.__dict__))
        if place is None:
            found.append(f"{tuple(tensor.shape)} {tensor.dtype}")
        else:
            run.before.places[place.id] = (place, tensor)
    graph.unguarded = tuple(found)


def _plan_arguments(run: RecordedRun, graph: Graph) -> None:
    written, outside = run.watch.written, run.watch.outside
    statics = enumerate(run.inputs.tensors)
    mutated = [(i, t) for i, t in statics if family_key(t) in written]
    graph.mutated = [(i, t) for i, t in mutated if i not in run.inputs.by_reference]
    graph.bumped += [t for i, t in mutated if i in run.inputs.by_reference and not t.is_inference()]
    for path, static in zip(run.call.tree.tensor_paths, run.inputs.tensors, strict=True):
        if family_key(static) in run.watch.restrided and not is_dense(static):
            raise CaptureError(
                f"`{path}` is viewed by `as_strided`, and its elements lie apart",
                why="the memory between them is the caller's, and a graph has a copy of the elements only",
                fix=f"pass `{path}.contiguous()`, or the whole tensor that it is a part of",
            )
        if family_key(static) in written and static.device.type != run.device.type:
            _refuse_host_write(run, f"the {static.device.type} tensor `{path}`")
    for key, tensor in outside.items():
        if key in written and tensor.device.type != run.device.type:
            _refuse_host_write(run, f"a {tensor.device.type} tensor")
    graph.conflicts = frozenset(outside if graph.mutated else written & outside.keys())
    for path, tensor in zip(run.call.tree.tensor_paths, run.call.tensors, strict=True):
        if family_key(tensor) in graph.conflicts:
            raise shared_memory(run.setting.name, path)


def _refuse_host_write(run: RecordedRun, what: str) -> NoReturn:
    raise CaptureError(
        f"`{run.setting.name}` writes into {what}",
        why="a replay repeats the work of one device",
        fix=f"keep that tensor on {run.device}",
    )


def _plan_results(run: RecordedRun, graph: Graph, result: Any, hidden: list[Any], after: Survey) -> None:
    names = ["output", *(change.place.name for change in run.hidden)]
    roots = (result, *hidden)
    tree = run.setting.result = _either(run.setting.result, tree_of(roots, names))
    found = tree.unpack(roots)
    assert found is not None
    outside = [(t, t) for key in {*map(family_key, found[0])} for t in run.before.over(key)]
    outside += [(t, t) for t in run.step.made] if run.step is not None else []
    _check_memory(run, zip(tree.tensor_paths, found[0], strict=True), {id(t) for t, _ in outside})
    results = _let_go(run, graph, found[0]) if run.setting.sized and run.patterns is None else found[0]
    plan = ResultPlan(results, run.inputs.tensors, [*run.stand_ins.pairs(), *outside])
    if plan.primaries:
        _plan_backward(run, graph, plan)
    lent = run.setting.static_outputs and not plan.primaries
    plan_launch(graph, run.setting, run.inputs, plan, lent=lent)
    consts = _result_consts(run, tree, tree.consts(roots), after)
    outcome = Outcome(results, outside, tree, consts, [change.place for change in run.hidden])
    plan_delivery(graph, plan, outcome, run.call.tree, None if run.instance is None else run.instance.attach)
    if run.setting.sized and run.instance is None:
        graph.outcome = outcome


def _check_memory(run: RecordedRun, results: Iterable[tuple[str, Tensor]], known: Collection[int]) -> None:
    """Refuse what has no memory of its own to copy from, or to guard; what only passes through is as good as any."""
    for path, made in results:
        if id(made) not in known and not has_memory(made):
            raise without_memory(f"`{path}`", made, _PARTS.format("return"))
    outside = () if run.example is not None else run.watch.outside.values()  # an example showed these
    for read in outside:
        if not has_memory(read):
            raise without_memory(_name_of(run, read), read, _PARTS.format("use"))


def _name_of(run: RecordedRun, tensor: Tensor) -> str:
    names = (f"`{place.name}`" for place, t in run.before.tensors() if t is tensor)
    return next(names, f"a tensor {tuple(tensor.shape)} from outside")


def _let_go(run: RecordedRun, graph: Graph, results: Sequence[Tensor]) -> Sequence[Tensor]:
    """Buckets copy or lend their results before another one replays: they may lie on one memory."""
    known = {family_key(t) for t in run.inputs.tensors} | run.watch.outside.keys()
    known |= {family_key(t) for t in run.step.made} if run.step is not None else set()
    keyed = [(family_key(t), t) for t in results]
    mine = {id(t): t for key, t in keyed if key not in known and not run.before.over(key)}
    free = dict(zip(mine, run.setting.backend.let_go(list(mine.values()), graph.memory), strict=True))
    return [free.get(id(t), t) for t in results]


def _plan_backward(run: RecordedRun, graph: Graph, plan: ResultPlan) -> None:
    """Everything that needs grad and is older than the run is an input of its backward."""
    assert run.patterns is not None
    outside, statics = run.watch.outside, run.inputs.tensors
    met = [t for t in run.watch.history.values() if run.watch.is_older(t)]
    older = [*met, *(t for _, t in run.before.tensors())]
    ends = Ends(statics, run.stand_ins.real, older, run.watch.born | run.watch.given, run.watch.aliases)
    wants = ends.of((p.tensor for p in plan.primaries), run.device)
    if wants.uncut or (wants.real and run.watch.drew and run.setting.backend.nodes_have_streams):
        raise long_history(wants, run.before)
    written = {change.place.id for change in run.hidden}
    run.instance = Instance(run.setting, graph, run.device, run.patterns, run.executed, written)
    run.instance.drew = run.watch.drew
    run.instance.plan(plan.primaries, wants, statics)
    graph.primaries = plan.primaries
    run.instance.renew(plan.results, run.saved, outside)
    graph.instance, graph.kept = run.instance, once([*graph.kept, *wants.leaves, *wants.others])
    run.instance.reads(once([*graph.kept, *(t for _, t in run.before.tensors())]))


def _result_consts(run: RecordedRun, tree: Tree, consts: tuple[object, ...], survey: Survey) -> list[object]:
    """Constants of the result; those that are the caller's own objects become positions."""
    mine = run.call.consts
    positions = {id(mine[i]): i for i in run.call.tree.opaque}
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
