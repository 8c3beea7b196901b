"""One call's replay from its forward to its last backward, and the autograd nodes that its results get."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ._ambient import current_backward, keeps_graph
from ._arrivals import at_end
from ._ends import Group, Wanted
from ._gate import Gate, asks_for, leave, let_go
from ._pulled import Pulled, fitted, summed
from .errors import GraphifyError

__all__ = ["Found", "Source", "Turn"]

Grads = Sequence[Tensor | None]
Found = tuple[Grads, Pulled]
"""The gradients of arguments and of others, and those of leaves."""
_Held = tuple[list[Tensor | None], Pulled]
"""The same, while groups of ends take theirs."""

_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
    "been freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). "
    "Specify retain_graph=True if you need to backward through the graph a second time or if you need to access "
    "saved tensors after calling backward."
)


class Source(Protocol):
    """What was replayed."""

    name: str
    device: torch.device
    wanted: Wanted
    zero: Tensor
    joined: bool
    """Whether all results have one node."""
    groups: dict[int, Group]
    """All ends are that of 0 where the results have one node; the others are in an order in which they can be made."""
    ways: dict[int, list[int]]
    """From the results of a group, or a single one, to the groups that these are a part of."""

    def gate_of(self, reach: int) -> Gate | None:
        """The gate in front of a group's leaves, where this call may use it."""

    def holds(self, turn: Turn) -> bool:
        """Whether its memory is still this turn's."""

    def pull(self, turn: Turn, grads: Grads) -> Found:
        """Run the backward for these gradients of the results."""

    def wait(self, reach: int, node: Any) -> None:
        """A group's node is there, whose backward will come to the leaves."""

    def passed_by(self, reach: int) -> None:
        """A backward came to a group's leaves beside the gate."""


class _Task:
    """What one backward brought to the results so far, where these have nodes of their own."""

    def __init__(self, number: int, results: int) -> None:
        self.number = number
        self.given: list[Tensor | None] = [None] * results
        self.waiting: set[int] = set()
        """Results that were come to, and whose part was not run yet."""
        self.freed = 0
        self.found: _Held | None = None


class Turn:
    """A source is a turn's from its replay until no backward through that can come any more.

    Where eager comes to some of the ends from some of the results only, or could go through the graph from one
    result after it went from another, each result has a node of its own, and so have the ends that the same
    results come from. In one backward the nodes of the results run first; then the first of the others runs the
    recording.
    """

    def __init__(self, source: Source, versions: list[int]) -> None:
        self.source, self.versions = source, versions
        wants = source.wanted
        self._once = [a | b for a, b in zip(wants.letting_go, wants.custom, strict=True)]
        self._freed = self._went = 0
        self._nodes: list[Callable[[], Any]] = [_nobody] * len(self._once)
        self._tasks: dict[int, _Task] = {}
        self._ends: dict[int, weakref.ref[Any]] = {}

    def tie(self, sources: Sequence[Tensor], parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Give the results of the call their nodes."""
        source = self.source
        if source.joined:
            gate = source.gate_of(0)
            made: Sequence[Tensor] = _join(self, parts, gate, *self._inputs(sources, gate, source.groups[0]))
            return made
        tokens: dict[int, Tensor] = {}
        for reach, group in source.groups.items():
            gate, further = source.gate_of(reach), [tokens[way] for way in source.ways[reach]]
            tokens[reach] = _end(self, reach, gate, *self._inputs(sources, gate, group), *further)
        tied = []
        for number, part in enumerate(parts):
            alone = 1 << number
            ways = [alone] if alone in tokens else source.ways[alone]
            tied.append(_result(self, number, (part,), *([tokens[way] for way in ways] or [self._nothing()])))
        return tied

    def _inputs(self, sources: Sequence[Tensor], gate: Gate | None, group: Group) -> list[Tensor]:
        wants = self.source.wanted
        leaves = [gate.token()] if gate is not None else [wants.leaves[i] for i in group.leaves]
        found = [sources[wants.arguments[i]] for i in group.arguments]
        return [*found, *leaves, *(wants.others[i] for i in group.others)] or [self._nothing()]

    def _nothing(self) -> Tensor:
        """For results that need grad although nobody's gradient comes of it."""
        return torch.zeros((), device=self.source.device, requires_grad=True)

    def own(self, node: Any, number: int | None = None) -> None:
        """Know the node of one result, or that of all."""
        for i in range(len(self._nodes)) if number is None else (number,):
            self._nodes[i] = weakref.ref(node)

    def leads(self, reach: int, node: Any) -> None:
        """Know the node that leads to a group of ends."""
        self._ends[reach] = weakref.ref(node)
        self.source.wait(reach, node)

    def asked(self) -> tuple[bool, ...]:
        """Which of the ends the running backward asks for: not those that `inputs=` leaves out."""
        wants = self.source.wanted
        found = [False] * len(wants.edges)
        at, end = len(wants.arguments), len(wants.arguments) + len(wants.leaves)
        for reach, group in self.source.groups.items():
            places = [*group.arguments, *(at + i for i in group.leaves), *(end + i for i in group.others)]
            for place, node in zip(places, self._behind(reach, len(group.arguments)), strict=False):
                found[place] = asks_for(node)
        return tuple(found)

    def _behind(self, reach: int, arguments: int) -> list[Any]:
        """The nodes behind that of a group: its arguments', its leaves', its others', and further groups'."""
        node = self._ends[reach]()
        if node is None:
            return []
        nodes = [further for further, _ in node.next_functions]
        if node.gate is not None:
            leaves = [further for further, _ in nodes[arguments].next_functions]
            nodes[arguments : arguments + 1] = leaves[1:]  # the first is nobody's
        return nodes

    def waits(self) -> bool:
        """Whether a backward may still come for which eager would have kept what it saved."""
        waiting = {number for task in [*self._tasks.values()] for number in task.waiting}
        for number, nodes in enumerate(self._once):
            node = self._nodes[number]()
            if node is None or not nodes:
                continue
            gone = let_go(node) if self.source.joined else nodes & self._freed
            if not gone or number in waiting:
                return True
        return False

    # -- a node for all results

    def pull(self, node: Any, grads: Grads) -> Found:
        """The gradients for these of all results."""
        went = [number for number, grad in enumerate(grads) if grad is not None]
        if let_go(node):
            self._freed |= self._went
        self._check(went, self._freed)
        found = self.source.pull(self, grads)
        for number in went:
            self._went |= self._once[number]
        return found

    # -- a node for each result, and for each group of ends

    def come(self, number: int, grad: Tensor | None) -> None:
        """One result's gradient is here."""
        task = self._task()
        if task is None:
            # One thread has one backward at a time: the last one is over, whether or not it went well.
            task = self._tasks[threading.get_ident()] = _Task(current_backward(), len(self._once))
        self._check([number], self._freed & ~task.freed)
        assert keeps_graph is not None, "without it all results have one node"
        if not keeps_graph():
            task.freed |= self._once[number] & ~self._freed
            self._freed |= self._once[number]
        task.given[number] = grad
        task.waiting.add(number)

    def _task(self) -> _Task | None:
        number = current_backward()
        return next((task for task in [*self._tasks.values()] if task.number == number), None)

    def part(self, reach: int) -> Found:
        """The gradients of one group of ends, of all that this backward brought."""
        task = self._task()
        assert task is not None, "a backward comes to ends through results"
        if task.waiting:
            given = [g if i in task.waiting else None for i, g in enumerate(task.given)]
            found, pulled = self.source.pull(self, given)
            self._lend(pulled)
            new = [*found], pulled
            task.found = new if task.found is None else self._added(task.found, new)
            task.waiting.clear()
        assert task.found is not None
        return self._chosen(task.found, self.source.groups[reach])

    def _lend(self, pulled: Pulled) -> None:
        """What is the recording's own stays so until the last of the groups was come to, as far as one can tell."""
        if at_end is None:
            pulled.copy()
            return
        end = partial(Pulled.leave, pulled)
        at_end(end)
        pulled.lend(end)

    def _added(self, first: _Held, second: _Held) -> _Held:
        """The sum of two parts of one backward."""
        (grads, pulled), (more_grads, more) = first, second
        leaves = summed([pulled.hand_out(), more.hand_out()])
        fitting = [*map(fitted, leaves, self.source.wanted.leaves)]
        strided = pulled.strided and more.strided
        return summed([grads, more_grads]), Pulled(
            fitting, lambda places: [leaves[i] for i in places], pulled.order, strided=strided
        )

    def _chosen(self, found: _Held, group: Group) -> Found:
        arguments, (grads, pulled) = len(self.source.wanted.arguments), found
        places = [*group.arguments, *(arguments + i for i in group.others)]
        chosen = [grads[i] for i in places]
        for i in places:  # torch copies a gradient that somebody else holds, and may lay it out another way
            grads[i] = None
        return chosen, pulled.some(group.leaves)

    def _check(self, numbers: list[int], gone: int) -> None:
        wants = self.source.wanted
        for number in numbers:
            # What is somebody's own may have kept memory of the recording that only the last replay filled.
            if wants.letting_go[number] & gone or (
                wants.custom[number] & gone and not self.source.holds(self)
            ):
                raise RuntimeError(_TWICE)


def _joined(ctx: Any, found: Found, places: int) -> Sequence[Tensor | None]:
    """The gradients in the order of a node's inputs, those of the leaves through the gate or as copies."""
    (grads, pulled), gate = found, ctx.gate
    if gate is None:
        ctx.turn.source.passed_by(ctx.reach)
    leaves = pulled.hand_out() if gate is None else [gate.pull(pulled)]
    made = [*grads[:places], *leaves, *grads[places:]]
    return made or [None]


def _refuse_graph(turn: Turn) -> None:
    if torch.is_grad_enabled():
        raise GraphifyError(
            f"`create_graph=True` through a replay of `{turn.source.name}`: a recorded backward has no graph "
            "of its own; make the call inside `with graphify.disabled():`"
        )


class _Joined(torch.autograd.Function):
    """The node of all results."""

    @staticmethod
    def forward(ctx: Any, turn: Turn, parts: Sequence[Tensor], gate: Gate | None, *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.turn, ctx.reach, ctx.gate = turn, 0, gate
        turn.own(ctx)
        turn.leads(0, ctx)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        turn = ctx.turn
        _refuse_graph(turn)
        made = _joined(ctx, turn.pull(ctx, grads), len(turn.source.wanted.arguments))
        leave(ctx)
        return None, None, None, *made


class _Ends(torch.autograd.Function):
    """The node of one group of ends."""

    @staticmethod
    def forward(ctx: Any, turn: Turn, reach: int, gate: Gate | None, *inputs: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.turn, ctx.reach, ctx.gate = turn, reach, gate
        turn.leads(reach, ctx)
        return torch.empty((), device=turn.source.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        turn, reach = ctx.turn, ctx.reach
        _refuse_graph(turn)
        made = _joined(ctx, turn.part(reach), len(turn.source.groups[reach].arguments))
        leave(ctx)
        return None, None, None, *made, *[turn.source.zero] * len(turn.source.ways[reach])


class _Result(torch.autograd.Function):
    """The node of one result."""

    @staticmethod
    def forward(ctx: Any, turn: Turn, number: int, part: tuple[Tensor], *tokens: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.turn, ctx.number = turn, number
        turn.own(ctx, number)
        return part[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        _refuse_graph(ctx.turn)
        ctx.turn.come(ctx.number, grad)
        # Not None, which would leave the ends to another thread, on no stream.
        return None, None, None, *[ctx.turn.source.zero] * (len(ctx.needs_input_grad) - 3)


# torch does not say what these take and give.
_join: Callable[..., Any] = _Joined.apply
_end: Callable[..., Any] = _Ends.apply
_result: Callable[..., Any] = _Result.apply


def _nobody() -> None:
    """No node holds a turn before its results have theirs."""
