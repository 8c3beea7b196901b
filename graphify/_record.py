"""Recording one call: watch it being captured, compare Python before and after, plan its replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ._code import Executed, line_of
from ._guards import Guard, find_place
from ._inputs import StaticInputs
from ._layout import family_key, is_dense
from ._places import MISSING, Change, Place, Survey
from ._pool import GraphPool
from ._results import ResultPlan, lending
from ._signature import TensorSpec
from ._tree import Tree, tensors_of, tree_of
from ._trial import HostRandomness
from ._undo import UndoLog
from ._watch import Watch, watching
from .backends.base import STALE, Backend, Recording
from .errors import CaptureError, StaleOutputError

__all__ = ["Call", "Graph", "NeedsGradError", "Order", "Setting", "needs_grad", "record"]

_ONCE = "Python runs when a graph is recorded; a replay repeats device work only"


class NeedsGradError(Exception):
    """The results of a run need gradients, which a forward recording alone cannot give."""


class Call:
    """One call, taken apart before it runs: a value per parameter, the tensors in them, the other leaves."""

    def __init__(self, tree: Tree, values: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> None:
        self.tree, self.values, self.tensors = tree, values, tensors
        self.consts = tree.consts(values)

    def opaque(self) -> list[tuple[str, Any]]:
        """The arguments that are compared by identity, with their paths."""
        return [(self.tree.const_paths[i], self.consts[i]) for i in self.tree.opaque]


class Order(NamedTuple):
    """What to record: a call, the specs of its tensors, where, and which host scalars become tensors."""

    call: Call
    specs: Sequence[TensorSpec]
    device: torch.device
    staged: frozenset[int] = frozenset()


@dataclass
class Setting:
    """What all recordings of one wrapper share."""

    name: str
    target: Callable[..., Any]
    spread: Callable[[Callable[..., Any], tuple[Any, ...]], Any]
    backend: Backend
    pool: GraphPool
    static_outputs: bool

    def run(self, values: tuple[Any, ...]) -> Any:
        """Call the target with one value per parameter."""
        return self.spread(self.target, values)

    def roots(self, call: Call) -> list[tuple[str, Any]]:
        """Where a survey of what the target can read begins."""
        return [(self.name, self.target), *call.opaque()]


class Graph:
    """A recording with everything planned; calling it replays it for a new set of tensors."""

    def __init__(self, setting: Setting, recording: Recording, memory: Any) -> None:
        self.recording, self.memory, self.pool = recording, memory, setting.pool
        self.order = setting.backend.order
        self.stage: Callable[[Sequence[Tensor]], None]
        self.fill: Callable[[Sequence[Tensor]], None] | None = None
        self.launch: Callable[[], Sequence[Tensor]]
        self.mutated: list[tuple[int, Tensor]] = []
        self.deliver: Deliver
        self.inputs: StaticInputs  # owned here: a graph holds addresses only
        self.copied: Sequence[Tensor] = ()
        self.conflicts: frozenset[int] = frozenset()
        self.kept: list[Tensor] = []
        self.unguarded: tuple[str, ...] = ()
        self.replays = 0
        self.seconds = 0.0

    def __call__(self, tensors: tuple[Tensor, ...], values: tuple[Any, ...], staged: bool = False) -> Any:
        """Replay for these tensors, unless they are staged already, and make the results."""
        pool = self.pool
        with pool.lock:
            self.order(self.memory)
            if not staged:
                self._stage(tensors)
            if pool.retired:
                pool.retire()
            fresh = self.launch()
            for index, static in self.mutated:
                tensors[index].copy_(static)
            self.replays += 1
            return self.deliver(tensors, fresh, values)

    def _stage(self, tensors: tuple[Tensor, ...]) -> None:
        try:
            self.stage(tensors)
            if self.fill is not None:
                self.fill(tensors)
        except RuntimeError as error:
            stale = stale_input(error)
            if stale is None:
                raise
            raise stale from None  # whose text holds the storage's own


def stale_input(error: RuntimeError) -> StaleOutputError | None:
    """The error for an argument that is a static output closed by a later replay."""
    if STALE not in str(error) or isinstance(error, StaleOutputError):
        return None
    return StaleOutputError(f"an argument is a static output that {STALE}")


def needs_grad(result: Any, watch: Watch) -> bool:
    """Whether a run is training: a result needs grad, or a backward ran inside."""
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of(result))
    return watch.backward or graded


def record(
    setting: Setting,
    order: Order,
    known: Executed,
    generators: Sequence[torch.Generator],
    undo: UndoLog | None = None,
) -> tuple[Graph, Guard]:
    """Record one call; its device work happens at the first replay. Call inside the backend's scope.

    `undo` notes what the recording run writes where that run is real; the caller then rolls it back.

    Raises:
        CaptureError: the run cannot be a graph; Python state and random streams are as before.
        NeedsGradError: the results need gradients.
    """
    return _Recorder(setting, order, known, undo).graph(generators)


class _Recorder:
    """The state of one recording while it is made."""

    def __init__(self, setting: Setting, order: Order, known: Executed, undo: UndoLog | None) -> None:
        call, specs, device, staged = order
        self.setting, self.call, self.device, self.known = setting, call, device, known
        self.before = Survey(setting.roots(call), known)
        self.host = HostRandomness(device)
        self.inputs = StaticInputs(call.tensors, specs, device, staged)
        self.layouts = [_metadata(t) for t in self.inputs.tensors]
        self.undo = undo or UndoLog()
        # Only a backend whose recording run is real needs the log: on a device a copy would be captured.
        log = self.undo if setting.backend.runs_live else None
        self.watch = Watch(device, given=self.inputs.tensors, strict=True, undo=log)
        self.arguments = call.tree.rebuild(self.inputs.tensors, call.consts)
        self.tokens = _tokens(call.tree, self.arguments)
        self.executed = Executed()
        self.after: Survey | None = None
        self.compared = False
        self.hidden: list[Change] = []

    def graph(self, generators: Sequence[torch.Generator]) -> tuple[Graph, Guard]:
        """Capture, check, plan; undo what Python did when that fails."""
        backend, pool = self.setting.backend, self.setting.pool
        started = time.perf_counter()
        streams = backend.rng_state(generators) if backend.runs_live else None
        recording: Recording | None = None
        try:
            memory = pool.memory(backend, self.device)
            recording, (result, hidden) = self._capture(memory, generators)
            graph = Graph(self.setting, recording, memory)
            guard = self._plan(graph, result, hidden)
        except BaseException:
            self._restore(recording, streams)
            raise
        graph.seconds = time.perf_counter() - started
        # A backend that records the run itself keeps this recorder too, which must not keep the caller's objects.
        del self.before, self.call, self.host
        self.after = None
        return graph, guard

    def _restore(self, recording: Recording | None, streams: Any) -> None:
        if recording is not None:
            recording.close()
        self.undo.rollback()
        self.before.restore()
        self.host.restore()
        if streams is not None:
            self.setting.backend.set_rng_state(streams)

    def _capture(self, memory: Any, generators: Sequence[torch.Generator]) -> tuple[Recording, Any]:
        backend = self.setting.backend
        try:
            return backend.record(self._run, memory, generators)
        except Exception as error:
            if isinstance(error, CaptureError) or not backend.is_capture_error(error):
                raise
            raise CaptureError(
                f"the device refused to capture: {str(error).splitlines()[0]}",
                where=line_of(error),
                why="a stream capture allows no waiting for the device, and no work on uncaptured streams",
                fix="do this part outside the graphed function",
            ) from error
        finally:
            self.watch.undo = None

    def _run(self) -> tuple[Any, list[Any]]:
        """What is recorded: the result, and what the run left in fields that it only writes."""
        with watching(self.watch, self.setting.backend.listen):
            result = self.setting.run(self.arguments)
        if not self.compared:
            self._compare()
        return result, [change.place.read() for change in self.hidden]

    def _compare(self) -> None:
        """Find what only Python did, and refuse what a replay could not repeat."""
        self.compared = True
        self._check_host()
        self._check_arguments()
        self.executed.merge(self.known)
        self.executed.merge(self.watch.executed)
        self.after = Survey(self.setting.roots(self.call), self.executed)
        self.hidden = [self._hidden(change) for change in self.before.changes(self.after)]

    def _plan(self, graph: Graph, result: Any, hidden: list[Any]) -> Guard:
        assert self.after is not None
        if needs_grad((result, hidden), self.watch):
            raise NeedsGradError
        written = {change.place.id for change in self.hidden}
        self.before.adopt(self.after, written)
        self._plan_outside(graph)
        self._plan_arguments(graph)
        self._plan_results(graph, result, hidden, self.after)
        return Guard(self.before, outside=graph.kept, written=written, device=self.device)

    def _check_host(self) -> None:
        drawn = self.host.drawn()
        if drawn is not None:
            raise CaptureError(
                f"`{self.setting.name}` draws from {drawn}",
                why=_ONCE,
                fix="draw outside and pass the number as a tensor, or use torch's generator of the device",
            )

    def _check_arguments(self) -> None:
        tree, statics = self.call.tree, self.inputs.tensors
        for path, static, layout in zip(tree.tensor_paths, statics, self.layouts, strict=True):
            if _metadata(static) != layout:
                raise CaptureError(
                    f"`{path}` gets another shape or layout in place",
                    why="the caller's tensor would not, since a replay changes memory only",
                    fix="use the form without underscore, which makes a view",
                )
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
        place = change.place
        writable = place.kind in ("field", "cell", "attr") and change.after is not MISSING
        if writable and place.key in self.executed.stores() and place.key not in self.executed.reads():
            return change
        what = "reads and re-binds" if writable else "changes"
        raise CaptureError(
            f"`{self.setting.name}` {what} `{place.name}`",
            why=_ONCE,
            fix="keep it in a tensor and change that in place (`copy_`, `add_`), or return it",
        )

    def _plan_outside(self, graph: Graph) -> None:
        """Keep alive what the graph reads, and note what no guard can watch."""
        placed = {family_key(t) for _, t in self.before.tensors()}
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
        graph.mutated = [(i, t) for i, t in statics if family_key(t) in written]
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
                raise CaptureError(
                    f"`{path}` shares memory with a tensor that `{self.setting.name}` uses from outside, and one is written",
                    why="the graph reads its own copy of the argument, which would not see the write",
                    fix="pass a clone, or use only one of the two",
                )

    def _refuse_host_write(self, what: str) -> NoReturn:
        raise CaptureError(
            f"`{self.setting.name}` writes into {what}",
            why="a replay repeats the work of one device",
            fix=f"keep that tensor on {self.device}",
        )

    def _plan_results(self, graph: Graph, result: Any, hidden: list[Any], after: Survey) -> None:
        names = ["output", *(change.place.name for change in self.hidden)]
        roots = (result, *hidden)
        tree = tree_of(roots, names)
        found = tree.unpack(roots)
        assert found is not None
        outside = [t for _, t in self.before.tensors()]
        plan = ResultPlan(found[0], self.inputs.tensors, outside)
        self._plan_launch(graph, plan)
        consts = self._result_consts(tree, tree.consts(roots), after)
        places = [change.place for change in self.hidden]
        if tree.tensor_paths == ("output",) and not consts and not places and plan.in_order():
            graph.deliver = _deliver_one
        else:
            graph.deliver = _delivering(plan.maker(), tree, consts, self.call.tree, places)

    def _plan_launch(self, graph: Graph, plan: ResultPlan) -> None:
        setting, lent = self.setting, self.setting.static_outputs
        copied = [] if lent else plan.copied
        stage, launch = setting.backend.replayer(graph.recording, self.inputs.copies, copied)
        if lent and plan.copied:
            launch = lending(launch, plan.copied, setting.backend, setting.pool.retired)
        graph.inputs, graph.copied = self.inputs, plan.copied
        graph.stage, graph.launch, graph.fill = stage, plan.moded(launch), self.inputs.filler()

    def _result_consts(self, tree: Tree, consts: tuple[object, ...], survey: Survey) -> list[object]:
        """Constants of the result; those that are the caller's own objects become positions."""
        mine = self.call.consts
        positions = {id(mine[i]): i for i in self.call.tree.opaque}
        made: list[object] = list(consts)
        for i in tree.opaque:
            if id(consts[i]) in positions:
                made[i] = _Argument(positions[id(consts[i])])
            elif not survey.holds(consts[i]):
                raise CaptureError(
                    f"`{tree.const_paths[i]}` is a new {type(consts[i]).__name__} at each call",
                    why="a replay cannot make Python objects of a kind that graphify does not know",
                    fix="return tensors, tuples, dicts, NamedTuples or dataclasses",
                )
        return made


class _Argument(NamedTuple):
    """A result that is one of the caller's own opaque arguments."""

    position: int


Deliver = Callable[[Sequence[Tensor], Sequence[Tensor], tuple[Any, ...]], Any]


def _deliver_one(tensors: Sequence[Tensor], fresh: Sequence[Tensor], values: tuple[Any, ...]) -> Any:
    """The commonest result: one tensor of its own."""
    return fresh[0]


def _delivering(
    make: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]],
    tree: Tree,
    consts: list[object],
    arguments: Tree,
    hidden: list[Place],
) -> Deliver:
    """How the tensors of a call and the fresh copies become its result and its hidden outputs."""
    rebuild = tree.rebuild
    borrowed = [(i, c.position) for i, c in enumerate(consts) if isinstance(c, _Argument)]

    def deliver(tensors: Sequence[Tensor], fresh: Sequence[Tensor], values: tuple[Any, ...]) -> Any:
        leaves = consts
        if borrowed:
            theirs = arguments.consts(values)
            leaves = list(consts)
            for i, position in borrowed:
                leaves[i] = theirs[position]
        result, *written = rebuild(make(tensors, fresh), leaves)
        for place, value in zip(hidden, written, strict=True):
            place.write(value)
        return result

    return deliver


def _tokens(tree: Tree, values: tuple[Any, ...]) -> tuple[Hashable, ...]:
    found = tree.unpack(values)
    assert found is not None, "rebuilt arguments have the structure they were rebuilt from"
    return found[1]


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, family_key(tensor)
