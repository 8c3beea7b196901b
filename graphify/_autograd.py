"""Gradients of a recording: what lives from a forward to its backward, and the backward recordings."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ._code import Executed
from ._gate import Gate, Pulled, fitted, freed, gated
from ._graph import Graph, Setting, plan_launch
from ._inputs import StaticInputs
from ._layout import family_key
from ._results import Primary, ResultPlan
from ._signature import TensorSpec, overlap, specs_of
from ._survey import Survey
from ._trial import HostRandomness
from ._undo import UndoLog, version_of
from ._watch import Watch, watching
from .backends.base import Recording
from .errors import CaptureError, GraphifyError

__all__ = ["Ends", "Instance", "Patterns", "Saved", "saving"]

_TWICE = "Python runs when a backward is recorded; a replay repeats device work only"
_FIX = "keep Python state out of backward hooks and of `backward` methods"


class Wanted(NamedTuple):
    """What a backward gives gradients for: arguments, leaves behind a gate, and what else lies outside."""

    arguments: list[int]
    leaves: list[Tensor]
    others: list[Tensor]
    edges: list[Any]
    """The tensors or edges of the recorded run that stand for these, in this order."""
    real: bool = False
    """Whether an edge belongs to a tensor itself and not to a stand-in."""
    uncut: bool = False
    """Whether behind one of these lies a history that may lead to another of them."""
    custom: bool = False
    """Whether somebody's own `autograd.Function` is on the way, which may keep what no hook sees."""


class Ends:
    """Where the autograd graph of a recorded run ends: at static inputs, stand-ins, tensors that are older.

    `real` are the tensors behind stand-ins, `older` tensors with a history that the run may have met, `born` the
    storages that it made.
    """

    def __init__(
        self,
        statics: Sequence[Tensor],
        real: Mapping[int, Tensor],
        older: Iterable[Tensor],
        born: Container[int],
    ) -> None:
        self._places = {id(t): i for i, t in reversed(list(enumerate(statics)))}
        self._real, self._born, self._custom = real, born, False
        self._history = {(t.grad_fn, t.output_nr): t for t in older if t.grad_fn is not None}

    def of(self, results: Iterable[Tensor], device: torch.device) -> Wanted:
        """Search the graph behind these results."""
        arguments: dict[int, Any] = {}
        outside: list[tuple[Tensor, Any]] = []
        for end in self._search([(t.grad_fn, t.output_nr) for t in results]):
            if id(end) in self._places:
                arguments[self._places[id(end)]] = end
            elif id(end) in self._real:
                outside.append((self._real[id(end)], end))
            elif end.grad_fn is not None or family_key(end) not in self._born:
                outside.append((end, get_gradient_edge(end)))
        order = sorted(arguments)
        leaves = [(t, edge) for t, edge in outside if gated(t, device)]
        others = [(t, edge) for t, edge in outside if not gated(t, device)]
        edges = [*(arguments[i] for i in order), *(edge for _, edge in (*leaves, *others))]
        real = any(isinstance(edge, GradientEdge) for edge in edges)
        uncut = len(outside) > 1 and any(isinstance(e, GradientEdge) and not t.is_leaf for t, e in outside)
        return Wanted(order, [t for t, _ in leaves], [t for t, _ in others], edges, real, uncut, self._custom)

    def _search(self, edges: list[tuple[Any, int]]) -> Iterable[Tensor]:
        found: dict[int, Tensor] = {}
        seen: set[Any] = set()
        while edges:
            edge = edges.pop()
            node = edge[0]
            if node is None or edge in seen:
                continue
            seen.add(edge)
            end = (
                node.variable if node.name() == "torch::autograd::AccumulateGrad" else self._history.get(edge)
            )
            if end is not None:
                found[id(end)] = end
            elif node not in seen:
                seen.add(node)
                edges += node.next_functions
                self._custom = self._custom or isinstance(node, BackwardCFunction)
        return found.values()


class Saved:
    """A tensor that a forward saved for its backward, and how often it had been written by then."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # the tensor itself could be a result: a reference cycle
        self.version = version_of(tensor)
        self.overwritten = False

    def settle(self) -> None:
        """The forward is over: what it wrote since is no longer what it saved."""
        self.overwritten = version_of(self.tensor) != self.version

    def unpack(self) -> Tensor:
        """Give the tensor to the backward, or eager's error."""
        if self.overwritten:
            raise _modified(self.tensor, self.version)
        return self.tensor


def _modified(tensor: Tensor, version: int | None) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
    )


@contextmanager
def saving(saved: list[Saved]) -> Iterator[None]:
    """Note every tensor that the body saves for its backward.

    Replays write where these lie, so that torch's own check of their versions must not run: it does not for
    tensors that went through hooks.
    """

    def pack(tensor: Tensor) -> Saved:
        saved.append(Saved(tensor))
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, Saved.unpack):
        yield
    for kept in saved:
        kept.settle()


class Patterns:
    """What the instances of one signature share: which incoming gradients were met, and who judges a refusal."""

    def __init__(
        self,
        generators: Callable[[], list[torch.Generator]],
        refuse: Callable[[CaptureError], None],
        recorded: Callable[[], None],
        gates: weakref.WeakValueDictionary[tuple[int, ...], Gate],
    ) -> None:
        self.generators, self.refuse, self.recorded = generators, refuse, recorded
        self.gates = gates
        self.outside: list[Tensor] = []
        """What needed gradients in a warm-up and lies outside."""
        self.refused: dict[Any, CaptureError] = {}


class Instance:
    """One forward recording from its replay to its backward: static inputs, activations, backward recordings.

    It belongs to the autograd node of the call that replayed it last, until that node dies or lets go of what
    it saved, as it does after a backward without `retain_graph`.
    """

    def __init__(self, setting: Setting, graph: Graph, device: torch.device, patterns: Patterns) -> None:
        self.setting, self.device, self.patterns = setting, device, patterns
        self.memory, self.stream = graph.memory, graph.recording.stream
        self.wanted = Wanted([], [], [], [])
        self._attached = 0
        self._gate: Gate | None = None
        self.drew = False
        self.saved: list[Tensor] = []
        self.checked: list[Tensor] = []
        self.read: list[Tensor] = []
        self._addresses: list[int] = []
        self._backwards: dict[Any, Backward] = {}
        self._primaries: list[Primary] = []
        self._outputs: list[Tensor] = []
        self._statics: Sequence[Tensor] = ()
        self._node: Callable[[], Any] = _nobody

    def plan(self, primaries: list[Primary], wants: Wanted, statics: Sequence[Tensor]) -> None:
        """Learn what the outputs of the forward are, and whose gradients its backward gives."""
        self._primaries, self.wanted, self._statics = primaries, wants, statics
        if wants.leaves:
            gates, key = self.patterns.gates, tuple(map(id, wants.leaves))
            self._gate = gates.get(key) or gates.setdefault(key, Gate(wants.leaves, self.device))
            if wants.real:
                self._gate.holders.add(self)

    def renew(self, results: Sequence[Tensor], saved: list[Saved], outside: Container[int]) -> None:
        """Take the autograd graph of the run that made these results and saved these tensors."""
        self._outputs = [p.of(results) for p in self._primaries]
        self.saved = [kept.tensor for kept in saved]
        self.checked = [t for t in self.saved if family_key(t) in outside]

    def reads(self, tensors: Iterable[Tensor]) -> None:
        """Learn which tensors from outside the backward reads: those that share memory with what was saved."""
        saved = {family_key(t) for t in self.checked}
        self.read = [t for t in tensors if family_key(t) in saved]
        self._addresses = [t.data_ptr() for t in self.read]

    def busy(self) -> bool:
        """Whether a backward through the last replay may still come."""
        node = self._node()
        return node is not None and not freed(node)

    def attach(self, sources: Sequence[Tensor], parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tie the outputs of a call to this instance's backward."""
        inputs = [sources[i] for i in self.wanted.arguments]
        gate = self._gate if self._attached and self._gate is not None and self._gate.free() else None
        self._attached += 1
        inputs += self.wanted.leaves if gate is None else [gate.token()]
        apply: Callable[..., Sequence[Tensor]] = _Replayed.apply
        return apply(self, parts, gate, *inputs, *self.wanted.others)

    def hold(self, node: Any) -> list[int]:
        """The instance is this node's from now on; the versions that its backward relies on."""
        self._node = weakref.ref(node)
        if self._gate is not None:
            self._gate.wait(node)
        return [*map(_version, self.checked)]

    def recordings(self) -> Iterable[Graph]:
        """The recordings of the backward."""
        return [backward.graph for backward in self._backwards.values()]

    def pull(
        self, node: Any, versions: list[int], gate: Gate | None, grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The gradients of what `attach` tied together, for these of the outputs."""
        if freed(node) and (self.saved or (self.wanted.custom and self._node() is not node)):
            node.saved_tensors  # noqa: B018  raises eager's own error
        self._check_versions(versions)
        given = tuple(g for g in grads if g is not None)
        if not given:
            wants = self.wanted
            return [None] * (
                len(wants.arguments) + (1 if gate is not None else len(wants.leaves)) + len(wants.others)
            )
        key = (tuple(g is None for g in grads), *_kind(given))
        with self.setting.pool.lock:
            backward = self._backwards.get(key)
            if backward is None:
                found, pulled = self._first(key, grads, given)
            else:
                found, pulled = backward.graph(given, ()), backward.pulled(given)
            return self._joined(found, pulled, gate)

    def _joined(
        self, found: Sequence[Tensor | None], pulled: Pulled, gate: Gate | None
    ) -> Sequence[Tensor | None]:
        """The gradients of arguments and others as they are, those of the leaves through the gate or as copies."""
        place = len(self.wanted.arguments)
        if gate is not None:
            return [*found[:place], gate.pull(pulled), *found[place:]]
        if self._gate is not None:
            self._gate.beside = False
        return [*found[:place], *pulled.hand_out(), *found[place:]]

    def _check_versions(self, versions: list[int]) -> None:
        for tensor, before in zip(self.checked, versions, strict=True):
            if tensor._version != before:
                raise _modified(tensor, before)
        if [*map(Tensor.data_ptr, self.read)] != self._addresses:
            raise GraphifyError(
                f"a tensor that `{self.setting.name}` reads was bound to other memory between its forward and its backward: "
                "assign `.data` or cast the module after the backward"
            )

    def _first(
        self, key: Any, grads: Sequence[Tensor | None], given: tuple[Tensor, ...]
    ) -> tuple[Sequence[Tensor | None], Pulled]:
        """Record the backward for a new pattern of incoming gradients, and replay it once."""
        patterns, backend = self.patterns, self.setting.backend
        if self.wanted.real and backend.nodes_have_streams:
            return self._live(
                grads, given
            )  # a capture would have to wait for the stream of that tensor's node
        error = patterns.refused.get(key)
        if error is None:
            try:
                backward = self._recorded(grads, given, key[1])
            except CaptureError as refused:
                patterns.refused[key] = error = refused
            else:
                self._backwards[key] = backward
                patterns.recorded()
                ran = backward.graph.recording.ran
                return backward.graph(given, (), staged=ran), backward.pulled(given)
        if self.drew and backend.nodes_have_streams:
            raise error  # a random operator's backward looks on the device for what a live one has on the host
        patterns.refuse(error)
        return self._live(grads, given)

    def _live(
        self, grads: Sequence[Tensor | None], given: tuple[Tensor, ...]
    ) -> tuple[Sequence[Tensor | None], Pulled]:
        """Run the backward for real, through the activations that the last replay left."""
        backend = self.setting.backend
        backend.order(self.memory)
        found = self.run(grads, given)
        backend.hand_over(g for g in found if g is not None)
        # What the recording owns must not leave it: the next replay writes there.
        own = {family_key(t) for t in (*self.saved, *self._outputs, *self._statics)}
        mine = [g.clone() if g is not None and family_key(g) in own else g for g in found]
        at, leaves = len(self.wanted.arguments), self.wanted.leaves
        taken = mine[at : at + len(leaves)]
        fitting = [*map(fitted, taken, leaves)]
        return [*mine[:at], *mine[at + len(leaves) :]], Pulled(fitting, lambda: taken)

    def run(self, grads: Sequence[Tensor | None], given: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Run the backward of the last replay for the outputs that have a gradient."""
        outputs = [t for t, g in zip(self._outputs, grads, strict=True) if g is not None]
        with _unhooked([*self.wanted.leaves, *self.wanted.others]):
            found: Sequence[Tensor | None] = torch.autograd.grad(
                outputs, self.wanted.edges, given, retain_graph=True, allow_unused=True
            )
        return found

    def _recorded(
        self, grads: Sequence[Tensor | None], given: tuple[Tensor, ...], specs: Sequence[Any]
    ) -> Backward:
        mask = [None if g is None else True for g in grads]
        with self.setting.backend.scope(self.device, stream=self.stream):
            return _BackwardRecorder(self, mask, given, [TensorSpec(*spec) for spec in specs]).backward()


def _kind(given: tuple[Tensor, ...]) -> tuple[Any, Any]:
    """What tells incoming gradients of one pattern from another: layouts, and which share memory."""
    if any(map(_is_batched, given)):
        raise GraphifyError(
            "batched gradients (`is_grads_batched=True`, a vectorized Jacobian) through a replay: "
            "make the call inside `with graphify.disabled():`"
        )
    return specs_of(len(given))(given), overlap(given)


# Without it a batched gradient still raises, with torch's own words for a copy under vmap.
_is_batched: Callable[[Tensor], bool] = getattr(
    torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False
)


class Backward(NamedTuple):
    """A recorded backward: a graph that gives the gradients of arguments and others, and access to the leaves'."""

    graph: Graph
    pulled: Callable[[tuple[Tensor, ...]], Pulled]


class _BackwardRecorder:
    """The state of one backward recording while it is made."""

    def __init__(
        self, instance: Instance, mask: Sequence[Any], given: tuple[Tensor, ...], specs: Sequence[TensorSpec]
    ) -> None:
        # Weak, because a backend that records the run itself keeps this recorder, and the instance keeps that.
        self._instance, self.mask = weakref.ref(instance), mask
        self.setting, self.patterns = instance.setting, instance.patterns
        self.inputs = StaticInputs(given, specs, instance.device, frozenset())
        self.before: Survey | None = self._survey()
        self.host = HostRandomness(instance.device)
        self.undo = UndoLog()
        log = self.undo if self.setting.backend.runs_live else None
        self.watch = Watch(instance.device, given=self.inputs.tensors, strict=True, undo=log)

    @property
    def instance(self) -> Instance:
        """Whose backward it is."""
        instance = self._instance()
        assert instance is not None, "a backward runs through its instance"
        return instance

    def backward(self) -> Backward:
        """Capture, check and plan; leave no trace when that fails."""
        backend, memory = self.setting.backend, self.instance.memory
        generators = self.patterns.generators()
        streams = backend.rng_state(generators) if backend.runs_live else None
        recording: Recording | None = None
        try:
            recording, (found, fitting) = backend.record(self._run, memory, generators)
            return self._planned(Graph(self.setting, recording, memory), found, fitting)
        except BaseException:
            if recording is not None:
                recording.close()
            self._restore(streams)
            raise
        finally:
            self.watch.undo = self.before = None

    def _restore(self, streams: Any) -> None:
        assert self.before is not None
        self.undo.rollback()
        self.before.restore()
        self.host.restore()
        if streams is not None:
            self.setting.backend.set_rng_state(streams)

    def _survey(self) -> Survey:
        # Which code a backward runs is not known before: hooks, and `backward` methods, are found wherever they are.
        return Survey([(self.setting.name, self.setting.target)], Executed(everything=True))

    def _run(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """What is recorded: the gradients, and those of the leaves in the layout of `.grad`."""
        if self.before is None:
            found = self.instance.run(self.mask, self.inputs.tensors)
            return found, self._fitting(found)
        with watching(self.watch, self.setting.backend.listen):
            found = self.instance.run(self.mask, self.inputs.tensors)
        self._compare(self.before)
        if any(g is not None and g.layout is not torch.strided for g in found):
            raise CaptureError(
                f"the backward of `{self.setting.name}` makes a sparse gradient",
                why="a replay writes into memory of a fixed size",
                fix="`sparse=False`, or call that layer outside",
            )
        return found, self._fitting(found)

    def _fitting(self, found: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        wants = self.instance.wanted
        with torch.no_grad():
            return [*map(fitted, found[len(wants.arguments) :], wants.leaves)]

    def _compare(self, before: Survey) -> None:
        drawn, changes = self.host.drawn(), before.changes(self._survey())
        what = [f"draws from {drawn}"] if drawn else [f"changes `{c.place.name}`" for c in changes]
        if what:
            raise CaptureError(f"the backward of `{self.setting.name}` {what[0]}", why=_TWICE, fix=_FIX)

    def _planned(
        self, graph: Graph, found: Sequence[Tensor | None], fitting: Sequence[Tensor | None]
    ) -> Backward:
        wants, statics = self.instance.wanted, self.inputs.tensors
        at, end = len(wants.arguments), len(wants.arguments) + len(wants.leaves)
        own = _Copies([*found[:at], *found[end:]], statics)
        plan_launch(graph, self.setting, self.inputs, own.plan, lent=False)
        graph.deliver = lambda tensors, fresh, values: own.make(tensors, fresh)
        graph.mutated = [(i, t) for i, t in enumerate(statics) if family_key(t) in self.watch.written]
        graph.kept = list(self.watch.outside.values())
        taken = found[at:end]
        leaves = _Copies(taken, statics)

        def pulled(given: tuple[Tensor, ...]) -> Pulled:
            return Pulled(fitting, lambda: leaves.make(given, [t.clone() for t in leaves.plan.copied]))

        return Backward(graph, pulled)


class _Copies:
    """How gradients that may be missing are made from fresh copies."""

    def __init__(self, grads: Sequence[Tensor | None], statics: Sequence[Tensor]) -> None:
        self.plan = ResultPlan([g for g in grads if g is not None], statics, [])
        self._maker = self.plan.maker(None)
        self._present = [g is not None for g in grads]

    def make(self, given: Sequence[Tensor], fresh: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradients for these incoming ones."""
        made = iter(self._maker(given, fresh))
        return [next(made) if present else None for present in self._present]


class _Replayed(torch.autograd.Function):
    """The backward of a replay."""

    @staticmethod
    def forward(
        ctx: Any, instance: Instance, parts: Sequence[Tensor], gate: Gate | None, *inputs: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.instance, ctx.gate, ctx.versions = instance, gate, instance.hold(ctx)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise GraphifyError(
                f"`create_graph=True` through a replay of `{ctx.instance.setting.name}`: a recorded backward has no graph "
                "of its own; make the call inside `with graphify.disabled():`"
            )
        return None, None, None, *ctx.instance.pull(ctx, ctx.versions, ctx.gate, grads)


@contextmanager
def _unhooked(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Set aside hooks and `.grad`: the caller's backward runs the hooks, once, on what it is given."""
    hooks = [(t._backward_hooks, list(t._backward_hooks.items())) for t in tensors if t._backward_hooks]
    grads = [(t, t.grad) for t in tensors if t.retains_grad]
    for held, _ in hooks:
        held.clear()
    try:
        yield
    finally:
        for held, items in hooks:
            held.update(items)
        for tensor, grad in grads:
            tensor.grad = grad


def _nobody() -> None:
    """No node holds an instance that was never replayed."""


def _version(tensor: Tensor) -> int:
    return tensor._version
