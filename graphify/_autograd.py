"""Gradients of a recording: what lives from a forward to its backward, and the backward recordings."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ._ambient import ambient_reader, keeps_graph
from ._backwards import Backward, Known, Part, kind_of, moved, ordering, record_backward
from ._baked import unsettled
from ._code import Executed
from ._ends import Group, Wanted, ways_between
from ._gate import Gate
from ._graph import Graph, Setting
from ._layout import family_key
from ._pulled import Pulled, all_strided, fitted
from ._results import Primary
from ._saved import Saved
from ._turns import Found, Turn
from .errors import CaptureError, again, alone

__all__ = ["Instance", "Patterns"]

Grads = Sequence[Tensor | None]
_FEW = 8
"""Where results have groups of ends: more leaves than it takes time to go through a gate."""


class Patterns:
    """What the instances of one signature share: which incoming gradients were met, and who judges a refusal."""

    def __init__(
        self,
        generators: Callable[[], list[torch.Generator]],
        refuse: Callable[[CaptureError], None],
        recorded: Callable[[], None],
        make_way: Callable[[], None],
        gates: weakref.WeakValueDictionary[tuple[int, ...], Gate],
    ) -> None:
        self.generators, self.refuse, self.recorded = generators, refuse, recorded
        self.make_way = make_way
        self.gates = gates
        self.outside: list[Tensor] = []
        """What needed gradients in a warm-up and lies outside."""
        self.refused: dict[Any, CaptureError] = {}


class Instance:
    """One forward recording from its replay to its backward: static inputs, activations, backward recordings.

    It belongs to the turn of the call that replayed it last, until no backward through that can come any more:
    its results died, or a backward without `retain_graph` let go of what they saved.
    """

    def __init__(
        self,
        setting: Setting,
        graph: Graph,
        device: torch.device,
        patterns: Patterns,
        executed: Executed,
        written: set[Any],
    ) -> None:
        self.setting, self.device, self.patterns = setting, device, patterns
        self.executed, self.written = executed, written
        self._ambient = ambient_reader(device.type)
        self.name, self.memory, self.stream = setting.name, graph.memory, graph.recording.stream
        self.wanted = Wanted([], [], [], [], [], [], [])
        self.joined = True
        self.groups: dict[int, Group] = {}
        self.ways: dict[int, list[int]] = {}
        self._attached = 0
        self._gates: dict[int, Gate] = {}
        self.drew = False
        self.saved: list[Saved] = []
        self.checked: list[Saved] = []
        self._watched: list[Tensor] = []
        self.read: list[tuple[Tensor, int]] = []
        self._backwards: dict[Any, list[Known]] = {}
        self._primaries: list[Primary] = []
        self._outputs: list[Tensor] = []
        self._statics: Sequence[Tensor] = ()
        self._turn: Callable[[], Turn | None] = _nobody
        self._lent: Pulled | None = None
        self.zero = torch.zeros((), device=device)

    def plan(self, primaries: list[Primary], wants: Wanted, statics: Sequence[Tensor]) -> None:
        """Learn what the outputs of the forward are, and whose gradients its backward gives."""
        self._primaries, self.wanted, self._statics = primaries, wants, statics
        # Only with torch's word on `retain_graph` can nodes of their own tell what eager would allow.
        self.joined = wants.joined or keeps_graph is None
        self.groups = {0: wants.whole} if self.joined else wants.groups()
        self.ways = {} if self.joined else ways_between(self.groups, len(primaries))
        for reach, group in self.groups.items():
            if len(group.leaves) > (0 if self.joined else _FEW):
                self._gates[reach] = self._shared_gate([wants.leaves[i] for i in group.leaves])

    def _shared_gate(self, leaves: list[Tensor]) -> Gate:
        gates, key = self.patterns.gates, tuple(map(id, leaves))
        gate = gates.get(key) or gates.setdefault(key, Gate(leaves, self.device))
        if self.wanted.real:
            gate.holders.add(self)
        return gate

    def renew(self, results: Sequence[Tensor], saved: list[Saved], outside: Container[int]) -> None:
        """Take the autograd graph of the run that made these results and saved these tensors."""
        self._outputs = [p.of(results) for p in self._primaries]
        self.saved = saved
        self.checked = [kept for kept in saved if family_key(kept.tensor) in outside]
        self._watched = [kept.tensor for kept in self.checked]

    def reads(self, tensors: Iterable[Tensor]) -> None:
        """Learn which tensors from outside a backward may read: those that share memory with what was saved."""
        saved = {family_key(kept.tensor) for kept in self.checked}
        self.read = [(t, t.data_ptr()) for t in tensors if family_key(t) in saved]

    def busy(self) -> bool:
        """Whether a backward through the last replay may still come."""
        turn = self._turn()
        if turn is not None and turn.waits():
            return True
        return self._lent is not None and self._lent.needed_elsewhere()

    def attach(self, sources: Sequence[Tensor], parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tie the outputs of a call to this instance's backward."""
        turn = Turn(self, [*map(_version_of, self._watched)])
        self._turn = weakref.ref(turn)
        if torch.is_grad_enabled():
            tied = turn.tie(sources, parts)
        else:
            # The function itself recorded gradients where its caller did not.
            with torch.inference_mode(False), torch.enable_grad():
                tied = turn.tie(sources, [t.clone() if t.is_inference() else t for t in parts])
        self._attached += 1
        return tied

    def gate_of(self, reach: int) -> Gate | None:
        """The gate in front of a group's leaves, where this call may use it."""
        gate = self._gates.get(reach) if self._attached else None
        return gate if gate is not None and gate.free() else None

    def wait(self, reach: int, node: Any) -> None:
        """A group's node is there, whose backward will come to the leaves."""
        if reach in self._gates:
            self._gates[reach].wait(node)

    def passed_by(self, reach: int) -> None:
        """A backward came to a group's leaves beside the gate."""
        if reach in self._gates:
            self._gates[reach].beside = False

    def holds(self, turn: Turn) -> bool:
        """Whether its memory is still this turn's."""
        return self._turn() is turn

    def recordings(self) -> Iterable[Graph]:
        """The recordings of the backward."""
        return [known.backward.graph for family in self._backwards.values() for known in family]

    def pull(self, turn: Turn, grads: Grads) -> Found:
        """The gradients of what lies behind the outputs, for these of the outputs."""
        given = tuple(g for g in grads if g is not None)
        wants = self.wanted
        if not given or not wants.edges:
            nothing: list[Tensor | None] = [None] * len(wants.leaves)
            return [None] * (len(wants.arguments) + len(wants.others)), Pulled(
                nothing, lambda places: [None] * len(places), _nobody
            )
        key = (tuple(g is None for g in grads), *kind_of(given), self._ambient())
        with self.setting.pool.lock:
            self.reclaim()
            known = self._recorded_for(key)
            if known is None or known.in_the_way(turn.versions, self.name) is not None:
                part = turn.asked()
                for kept, version in zip(self.checked, turn.versions, strict=True):
                    kept.expect(version)
                known = self._serving(turn, key, part, grads, given)
                if known is None:
                    return self._live(grads, given, part)
            found, self._lent = self._replayed(known.backward, given), known.backward.pulled(given)
            return found, self._lent

    def _recorded_for(self, key: Any) -> Known | None:
        """The recording for these incoming gradients and for what Python code in it reads now."""
        return next((known for known in self._backwards.get(key, ()) if known.holds()), None)

    def _replayed(self, backward: Backward, given: tuple[Tensor, ...]) -> Grads:
        """The gradients of a replay; where there was no memory for them, once more with all else let go."""
        pool, staged = self.setting.pool, backward.graph.recording.ran
        try:
            grads: Grads = backward.graph(given, (), staged)
        except BaseException as error:
            if error is not pool.short:
                raise
            pool.short = None
        else:
            return grads
        self.patterns.make_way()
        again: Grads = backward.graph(given, (), staged)
        return again

    def reclaim(self) -> None:
        """The next replay may write where gradients lie that the running backward has not added yet."""
        if self._lent is not None:
            self._lent.keep()
            self._lent = None

    def _serving(
        self, turn: Turn, key: Any, part: Part, grads: Grads, given: tuple[Tensor, ...]
    ) -> Known | None:
        """The recording to replay; None where the backward has to run live."""
        if self.wanted.real and self.setting.backend.nodes_have_streams:
            # A capture would have to wait for the stream of that tensor's node.
            return None
        try:
            return self._prepared(turn, key, part, grads, given)
        except CaptureError as error:
            refused = alone(error)
        if self.drew and self.setting.backend.nodes_have_streams:
            raise again(
                refused
            )  # a random operator's backward looks on the device for what a live one has on the host
        self.patterns.refuse(refused)
        return None

    def _prepared(self, turn: Turn, key: Any, part: Part, grads: Grads, given: tuple[Tensor, ...]) -> Known:
        """A backward to all ends; where that fails, to those alone that are asked for."""
        if all(part):
            return self._ready(turn, key, None, grads, given)
        less = (*key, part)
        if less not in self._backwards and less not in self.patterns.refused:
            try:
                return self._ready(turn, key, None, grads, given)
            except Exception as error:  # what is in the way of ends that are asked for is met again
                alone(error)
        return self._ready(turn, less, part, grads, given)

    def _ready(
        self, turn: Turn, key: Any, part: Part | None, grads: Grads, given: tuple[Tensor, ...]
    ) -> Known:
        known = self._recorded_for(key)
        if known is None:
            return self._first(key, part, grads, given)
        error = known.in_the_way(turn.versions, self.name)
        if error is not None:
            raise again(error)
        return known

    def _first(self, key: Any, part: Part | None, grads: Grads, given: tuple[Tensor, ...]) -> Known:
        """Record the backward for a new pattern of incoming gradients, or for what Python holds now."""
        patterns, family = self.patterns, self._backwards.get(key, [])
        refused = patterns.refused.get(key) or unsettled(self.name, len(family), lambda: family[0].miss())
        if refused is not None:
            patterns.refused[key] = refused
            raise again(refused)
        try:
            backward = self._recorded(grads, given, key[1], part)
        except CaptureError as error:
            patterns.refused[key] = error
            raise
        patterns.recorded()
        known = self._known(backward)
        self._backwards[key] = [known, *family]
        return known

    def _known(self, backward: Backward) -> Known:
        places, read = [i for i, kept in enumerate(self.checked) if kept.used], self._used()
        checked = [self.checked[i].tensor for i in places]
        return Known(backward, places, checked, [t for t, _ in read], [address for _, address in read])

    def _live(self, grads: Grads, given: tuple[Tensor, ...], part: Part) -> Found:
        """Run the backward for real, through the activations that the last replay left."""
        backend = self.setting.backend
        backend.order(self.memory)
        found = self.run(grads, given, part)
        backend.hand_over(g for g in found if g is not None)
        # What the recording owns must not leave it: the next replay writes there. A sparse gradient may hold some of it.
        saved = (kept.tensor for kept in self.saved)
        own = {family_key(t) for t in (*saved, *self._outputs, *self._statics)}
        own |= {family_key(g) for g in found if g is not None and g.layout is not torch.strided}
        mine = [g.clone() if g is not None and family_key(g) in own else g for g in found]
        at, leaves = len(self.wanted.arguments), self.wanted.leaves
        taken = mine[at : at + len(leaves)]
        fitting = [*map(fitted, taken, leaves)]
        return [*mine[:at], *mine[at + len(leaves) :]], Pulled(
            fitting,
            lambda places: [taken[i] for i in places],
            ordering(self.setting, self.memory),
            strided=all_strided(fitting),
        )

    def run(self, grads: Sequence[Any], given: Sequence[Tensor], part: Part | None) -> Grads:
        """Run the backward of the last replay for the outputs that have a gradient, to these ends or to all."""
        edges = self.wanted.edges if part is None else [*compress(self.wanted.edges, part)]
        outputs = [t for t, g in zip(self._outputs, grads, strict=True) if g is not None]
        for kept in self.saved:
            kept.used = False
        with unhooked([*self.wanted.leaves, *self.wanted.others]):
            found: Grads = torch.autograd.grad(outputs, edges, given, retain_graph=True, allow_unused=True)
        # Known only now: what the recording saved is where it was, whatever became of the tensor.
        if any(t.data_ptr() != address for t, address in self._used()):
            raise moved(self.name)
        if part is None:
            return found
        rest = iter(found)
        return [next(rest) if asked else None for asked in part]

    def _used(self) -> list[tuple[Tensor, int]]:
        used = {family_key(kept.tensor) for kept in self.checked if kept.used}
        return [(t, address) for t, address in self.read if family_key(t) in used]

    def _recorded(
        self, grads: Grads, given: tuple[Tensor, ...], specs: Sequence[Any], part: Part | None
    ) -> Backward:
        mask = [None if g is None else True for g in grads]
        generators = self.patterns.generators()
        for last in (False, True):
            try:
                with self.setting.backend.scope(self.device, stream=self.stream):
                    return record_backward(self, mask, given, specs, part, generators)
            except Exception as error:
                if last or not self.setting.backend.is_oom(error):
                    raise
            self.patterns.make_way()
        raise AssertionError("the second time returns or raises")


@contextmanager
def unhooked(tensors: Sequence[Tensor]) -> Iterator[None]:
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


_version_of = attrgetter("_version")


def _nobody() -> None:
    """No turn has an instance that was never replayed; nothing waits for gradients that are none."""
