"""A graph: a recording with everything planned, so that a call only has to be carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._flats import Flats
from ._hooks import hook_roots
from ._inputs import StaticInputs
from ._places import Place
from ._pool import GraphPool
from ._repeats import Repeats
from ._results import Attach, Primary, ResultPlan, lending
from ._signature import TensorSpec
from ._standing import Surveys
from ._tree import Tree
from ._whole_step import WholeStep
from .backends._memory import is_closed
from .backends.base import STALE, Backend, Recording
from .errors import StaleOutputError

__all__ = [
    "Argument",
    "Call",
    "Graph",
    "Order",
    "Outcome",
    "Setting",
    "delivering",
    "plan_delivery",
    "plan_launch",
    "stale_input",
]


class Call:
    """One call, taken apart before it runs: a value per parameter, the tensors in them, the other leaves."""

    def __init__(self, tree: Tree, values: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> None:
        self.tree, self.values, self.tensors = tree, values, tensors
        self.consts = tree.consts(values)

    def opaque(self) -> list[tuple[str, Any]]:
        """The arguments that are compared by identity, with their paths."""
        return [(self.tree.const_paths[i], self.consts[i]) for i in self.tree.opaque]

    def refuse_stale(self) -> None:
        """Refuse, before anything runs, a static output that a later replay overwrote.

        Raises:
            StaleOutputError: which argument it is.
        """
        if any(map(is_closed, self.tensors)):
            raise stale_input(self.tree.tensor_paths, self.tensors)


class Order(NamedTuple):
    """What to record: a call, the specs of its tensors, where, and which host scalars become tensors."""

    call: Call
    specs: Sequence[TensorSpec]
    device: torch.device
    staged: frozenset[int] = frozenset()
    by_reference: frozenset[int] = frozenset()
    patterns: Any = None
    """What backwards of this signature share, where the warm-up's results needed gradients."""
    capacity: Sequence[int] = ()
    """Elements of each tensor at its largest bucket, where calls of several sizes share recordings."""
    numbers: Sequence[Place] | None = None
    """For a step with a backward or an optimizer inside: the optimizer's floats that change between calls."""


@dataclass
class Setting:
    """What all recordings of one wrapper share."""

    name: str
    target: Callable[..., Any]
    spread: Callable[[Callable[..., Any], tuple[Any, ...]], Any]
    backend: Backend
    pool: GraphPool
    static_outputs: bool
    sized: bool = False
    """Whether calls of several sizes share recordings."""
    flats: Flats = field(default_factory=Flats)
    surveys: Surveys = field(default_factory=Surveys)
    repeats: Repeats = field(default_factory=Repeats)
    lent: set[str] = field(default_factory=set)
    """Arguments whose static input a user writes in place."""
    result: Tree | None = None
    """The structure of the latest result that was recorded: most are alike, and one has its code."""
    optimizers: list[tuple[str, Optimizer]] = field(default_factory=list)
    """Those that stepped in a run although no name leads to them."""

    def run(self, values: tuple[Any, ...]) -> Any:
        """Call the target with one value per parameter."""
        self.surveys.ran()
        return self.spread(self.target, values)

    def roots(self, call: Call) -> list[tuple[str, Any]]:
        """Where a survey of what the target can read begins."""
        return [(self.name, self.target), *call.opaque(), *self.optimizers, *hook_roots()]


class Outcome(NamedTuple):
    """What a recorded run returned and left behind: its tensors, and how they become the result of a call."""

    tensors: Sequence[Tensor]
    outside: Sequence[tuple[Tensor, Tensor]]
    tree: Tree
    consts: list[object]
    hidden: list[Place]


class Instance(Protocol):
    """What lives from a forward to its backward."""

    def busy(self) -> bool:
        """Whether the backward of the last replay may still come."""

    def reclaim(self) -> None:
        """Its memory is about to be written: whoever still needs what lies there gets a copy."""

    def recordings(self) -> Iterable[Graph]:
        """The recordings of the backward."""


class Graph:
    """A recording with everything planned; calling it replays it for a new set of tensors."""

    def __init__(self, setting: Setting, recording: Recording, memory: Any) -> None:
        self.recording, self.memory, self.pool = recording, memory, setting.pool
        self.order = setting.backend.order
        # A replay that is a run may find no memory anywhere in it.
        self._is_oom = _never if setting.backend.runs_live else setting.backend.is_oom
        self.stage: Callable[[Sequence[Tensor]], None]
        self.fill: Callable[[Sequence[Tensor]], None] | None = None
        self.launch: Callable[[], Sequence[Tensor]]
        self.mutated: list[tuple[int, Tensor]] = []
        self.deliver: Deliver
        self.inputs: StaticInputs  # owned here: a graph holds addresses only
        self.copied: Sequence[Tensor] = ()
        self.conflicts: frozenset[int] = frozenset()
        self.paths: Sequence[str] = ()
        """Names of the tensors that it is called with."""
        self.primaries: Sequence[Primary] = ()
        """The results that gradients come back to."""
        self.mask: Sequence[bool] = ()
        """Of a backward: which of these have a gradient."""
        self.kept: list[Tensor] = []
        self.bumped: list[Tensor] = []
        self.instance: Instance | None = None
        self.step: WholeStep | None = None
        self.outcome: Outcome | None = None
        """Kept where calls of several sizes share the recording."""
        self.fits: dict[Any, Graph] = {}
        """The same recording for calls of smaller sizes."""
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
            if self.step is not None:
                self.step.refill()
            if pool.retired:
                pool.retire()
            try:
                fresh = self.launch()
            except BaseException as error:
                self._note_short(error)
                raise
            for index, static in self.mutated:
                tensors[index].copy_(static)
            if self.bumped:
                torch.autograd.graph.increment_version(self.bumped)
            if self.step is not None:
                self.step.apply()
            result = self.deliver(tensors, fresh, values)
            self.replays += 1
            return result

    @property
    def nodes(self) -> int:
        """How many operations a replay repeats."""
        return self.recording.nodes

    @property
    def bytes(self) -> int:
        """How much memory the recording made its own."""
        return self.recording.bytes

    @property
    def uses(self) -> int:
        """Replays for calls of whatever size."""
        return self.replays + sum(fit.replays for fit in self.fits.values())

    def busy(self) -> bool:
        """Whether the backward of the last replay may still come."""
        return self.instance is not None and self.instance.busy()

    def reclaim(self) -> None:
        """A replay comes: what the running backward left in this memory is copied."""
        if self.instance is not None:
            self.instance.reclaim()

    def backwards(self) -> Iterable[Graph]:
        """The recordings of its backward."""
        return () if self.instance is None else self.instance.recordings()

    def _note_short(self, error: BaseException) -> None:
        """Backends make room for results before the work: without it, nothing happened."""
        pool = self.pool
        pool.short = None if error is pool.spent or not self._is_oom(error) else error
        pool.spent = None

    def _stage(self, tensors: tuple[Tensor, ...]) -> None:
        try:
            self.stage(tensors)
            if self.fill is not None:
                self.fill(tensors)
        except RuntimeError as error:
            if STALE not in str(error):
                raise
            raise stale_input(self.paths, tensors) from None  # whose text holds the storage's own


def _never(error: BaseException) -> bool:
    return False


def stale_input(paths: Sequence[str], tensors: Sequence[Tensor]) -> StaleOutputError:
    """The error for the first argument that is a static output closed by a later replay."""
    named = (f"argument `{path}`" for path, t in zip(paths, tensors, strict=False) if is_closed(t))
    return StaleOutputError(f"{next(named, 'an argument')} is a static output that {STALE}")


def plan_launch(
    graph: Graph, setting: Setting, inputs: StaticInputs, plan: ResultPlan, *, lent: bool
) -> None:
    """Plan how a graph takes its inputs and makes its copies, or lends its own memory instead."""
    copied = [] if lent else plan.copied
    stage, launch = setting.backend.replayer(graph.recording, inputs.copies, copied, shared=setting.sized)
    if lent and plan.copied:
        launch = lending(launch, plan.copied, setting.backend, setting.pool)
    graph.inputs, graph.copied = inputs, plan.copied
    graph.stage, graph.launch, graph.fill = stage, plan.moded(launch), inputs.filler()


class Argument(NamedTuple):
    """A result that is one of the caller's own opaque arguments."""

    position: int


Deliver = Callable[[Sequence[Tensor], Sequence[Tensor], tuple[Any, ...]], Any]


def deliver_one(tensors: Sequence[Tensor], fresh: Sequence[Tensor], values: tuple[Any, ...]) -> Any:
    """The commonest result: one tensor of its own."""
    return fresh[0]


def plan_delivery(
    graph: Graph, plan: ResultPlan, outcome: Outcome, arguments: Tree, attach: Attach | None = None
) -> None:
    """Plan how a graph's copies become the result of a call."""
    tree, consts, hidden = outcome.tree, outcome.consts, outcome.hidden
    if tree.tensor_paths == ("output",) and not consts and not hidden and plan.in_order():
        graph.deliver = deliver_one
    else:
        graph.deliver = delivering(plan.maker(attach), tree, consts, arguments, hidden)


def delivering(
    make: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]],
    tree: Tree,
    consts: list[object],
    arguments: Tree,
    hidden: list[Place],
) -> Deliver:
    """How the tensors of a call and the fresh copies become its result and its hidden outputs."""
    rebuild = tree.rebuild
    borrowed = [(i, c.position) for i, c in enumerate(consts) if type(c) is Argument]

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
