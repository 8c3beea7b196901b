"""Recording a backward: its graph, and how the gradients of a replay leave it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ._baked import read_by
from ._bystanders import Bystanders
from ._code import Executed
from ._ends import Wanted
from ._graph import Graph, Setting, plan_launch
from ._guards import Guard, Miss
from ._hooks import hook_roots
from ._inputs import StaticInputs
from ._layout import family_key
from ._pulled import Pulled, fitted
from ._results import ResultPlan
from ._saved import modified
from ._signature import TensorSpec, overlap, specs_of
from ._survey import Survey
from ._trial import HostRandomness
from ._undo import UndoLog
from ._watch import Watch, watching
from .backends.base import Recording
from .errors import CaptureError, GraphifyError

__all__ = ["Backward", "Forward", "Known", "Part", "kind_of", "moved", "ordering", "record_backward"]

_TWICE = "Python runs when a backward is recorded; a replay repeats device work only"
_FIX = "keep Python state out of backward hooks and of `backward` methods"


Part = tuple[bool, ...]
"""For each end whether its gradient is asked for."""


class Forward(Protocol):
    """The recorded forward whose backward is recorded."""

    setting: Setting
    device: torch.device
    memory: Any
    wanted: Wanted
    executed: Executed
    written: set[Any]

    def run(
        self, grads: Sequence[Any], given: Sequence[Tensor], part: Part | None
    ) -> Sequence[Tensor | None]:
        """Run the backward for the outputs that have a gradient, to these ends or to all."""


class Backward(NamedTuple):
    """A recorded backward: a graph that gives the gradients of arguments and others, and access to the leaves'."""

    graph: Graph
    pulled: Callable[[tuple[Tensor, ...]], Pulled]
    guard: Guard | None
    """Of what Python code in it read."""


class Known(NamedTuple):
    """A recorded backward and what it reads from outside, with places among the checked, and with addresses."""

    backward: Backward
    places: list[int]
    checked: list[Tensor]
    read: list[Tensor]
    addresses: list[int]

    def holds(self) -> bool:
        """Whether Python holds what code in the recorded run read."""
        guard = self.backward.guard
        return guard is None or guard.holds() or guard.miss() is None

    def miss(self) -> Miss | None:
        """What Python holds no longer."""
        return None if self.backward.guard is None else self.backward.guard.miss()

    def in_the_way(self, versions: list[int], name: str) -> RuntimeError | None:
        """Why it cannot be replayed for a forward that left these versions."""
        if [*map(_version_of, self.checked)] != [versions[place] for place in self.places]:
            for place, tensor in zip(self.places, self.checked, strict=True):
                if tensor._version != versions[place]:
                    return modified(tensor, versions[place])
        return moved(name) if [*map(Tensor.data_ptr, self.read)] != self.addresses else None


_version_of = attrgetter("_version")


def moved(name: str) -> GraphifyError:
    """The error for a tensor that a backward would look for elsewhere than its forward."""
    return GraphifyError(
        f"a tensor that `{name}` reads was bound to other memory between its forward and its backward: "
        "assign `.data` or cast the module after the backward"
    )


def kind_of(given: tuple[Tensor, ...]) -> tuple[Any, Any]:
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


def record_backward(
    forward: Forward,
    mask: Sequence[Any],
    given: tuple[Tensor, ...],
    specs: Sequence[Any],
    part: Part | None,
    generators: Sequence[torch.Generator],
) -> Backward:
    """Record the backward for these incoming gradients, to these ends or to all. Call inside the backend's scope.

    Raises:
        CaptureError: the run cannot be a graph; Python state and random streams are as before.
    """
    recorder = _BackwardRecorder(forward, mask, given, [TensorSpec(*spec) for spec in specs], part)
    return recorder.backward(generators)


class _BackwardRecorder:
    """The state of one backward recording while it is made."""

    def __init__(
        self,
        forward: Forward,
        mask: Sequence[Any],
        given: tuple[Tensor, ...],
        specs: Sequence[TensorSpec],
        part: Part | None,
    ) -> None:
        # Weak, because a backend that records the run itself keeps this recorder, and the forward keeps that.
        self._forward, self.mask, self.part, self.setting = weakref.ref(forward), mask, part, forward.setting
        self.inputs = StaticInputs(given, specs, forward.device, frozenset())
        self.before: Survey | None = self._survey()
        self.host = HostRandomness(forward.device)
        self.undo = UndoLog()
        log = self.undo if self.setting.backend.runs_live else None
        self.watch = Watch(forward.device, given=self.inputs.tensors, strict=True, undo=log)

    @property
    def forward(self) -> Forward:
        """Whose backward it is."""
        forward = self._forward()
        assert forward is not None, "a backward runs through its forward"
        return forward

    def backward(self, generators: Sequence[torch.Generator]) -> Backward:
        """Capture, check and plan; leave no trace when that fails."""
        backend, memory = self.setting.backend, self.forward.memory
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
        self.before.restore(Bystanders(self.before.optimizers, self.watch.touched).hold)
        self.host.restore()
        if streams is not None:
            self.setting.backend.set_rng_state(streams)

    def _survey(self) -> Survey:
        # Which code a backward runs is not known before: hooks, and `backward` methods, are found wherever they are.
        return Survey([(self.setting.name, self.setting.target), *hook_roots()], Executed(everything=True))

    def _run(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """What is recorded: the gradients, and those of the leaves in the layout of `.grad`."""
        if self.before is None:
            found = self.forward.run(self.mask, self.inputs.tensors, self.part)
            return found, self._fitting(found)
        with watching(self.watch, self.setting.backend.listen):
            found = self.forward.run(self.mask, self.inputs.tensors, self.part)
        self._compare(self.before)
        if any(g is not None and g.layout is not torch.strided for g in found):
            raise CaptureError(
                f"the backward of `{self.setting.name}` makes a sparse gradient",
                why="a replay writes into memory of a fixed size",
                fix="`sparse=False`, or call that layer outside",
            )
        return found, self._fitting(found)

    def _fitting(self, found: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        wants = self.forward.wanted
        with torch.no_grad():
            return [*map(fitted, found[len(wants.arguments) :], wants.leaves)]

    def _compare(self, before: Survey) -> None:
        drawn, others = self.host.drawn(), Bystanders(before.optimizers, self.watch.touched)
        changes = [c for c in before.changes(self._survey()) if not others.own(c.place)]
        what = [f"draws from {drawn[0]}"] if drawn else [f"changes `{c.place.name}`" for c in changes]
        if what:
            raise CaptureError(f"the backward of `{self.setting.name}` {what[0]}", why=_TWICE, fix=_FIX)

    def _planned(
        self, graph: Graph, found: Sequence[Tensor | None], fitting: Sequence[Tensor | None]
    ) -> Backward:
        wants, statics = self.forward.wanted, self.inputs.tensors
        at, end = len(wants.arguments), len(wants.arguments) + len(wants.leaves)
        own = _Copies([*found[:at], *found[end:]], statics)
        plan_launch(graph, self.setting, self.inputs, own.plan, lent=False)
        graph.deliver = lambda tensors, fresh, values: own.make(tensors, fresh)
        graph.mutated = [(i, t) for i, t in enumerate(statics) if family_key(t) in self.watch.written]
        graph.kept, graph.mask = list(self.watch.outside.values()), [g is not None for g in self.mask]
        taken = found[at:end]
        copies: dict[tuple[int, ...], _Copies] = {}
        order = ordering(self.setting, graph.memory)

        def pulled(given: tuple[Tensor, ...]) -> Pulled:
            def give(places: tuple[int, ...]) -> Sequence[Tensor | None]:
                if places not in copies:
                    copies[places] = _Copies([taken[i] for i in places], statics)
                return copies[places].make(given, [t.clone() for t in copies[places].plan.copied])

            return Pulled(fitting, give, order)

        root = (self.setting.name, self.setting.target)
        executed, written = self.forward.executed, self.forward.written
        return Backward(
            graph, pulled, read_by(root, executed, self.watch.executed, written, self.forward.device)
        )


def ordering(setting: Setting, memory: Any) -> Callable[[], None]:
    """What makes this thread's work and that of recordings in this memory wait for each other."""
    pool, order = setting.pool, setting.backend.order

    def ordered() -> None:
        with pool.lock:
            order(memory)

    return ordered


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
