"""Where the autograd graph of a recorded run ends, and which results come from which of these ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ._gate import gated
from ._layout import family_key

__all__ = ["Ends", "Group", "Wanted", "ways_between"]


class Group(NamedTuple):
    """Ends that the same results come from: their places among the arguments, the leaves and the others."""

    arguments: list[int]
    leaves: list[int]
    others: list[int]


class Wanted(NamedTuple):
    """What a backward gives gradients for: arguments, leaves behind a gate, and what else lies outside.

    Sets of results and of autograd nodes are integers, a bit for each.
    """

    arguments: list[int]
    leaves: list[Tensor]
    others: list[Tensor]
    edges: list[Any]
    """The tensors or edges of the recorded run that stand for these, in this order."""
    reach: list[int]
    """For each of these the results that it is behind."""
    letting_go: list[int]
    """For each result the nodes behind it that eager goes through once, since they then let go of what they saved."""
    custom: list[int]
    """For each result the nodes behind it that are somebody's own and may keep what no hook sees."""
    real: Sequence[Tensor] = ()
    """Those of these tensors whose edge is their own and not that of a stand-in."""
    uncut: bool = False
    """Whether behind one of these lies a history that may lead to another of them."""

    @property
    def joined(self) -> bool:
        """Whether eager, too, comes to all of these from each result, and goes through the graph once at most."""
        if len(self.letting_go) == 1:
            return True
        every, some, all_ = (1 << len(self.letting_go)) - 1, 0, -1
        for nodes, own in zip(self.letting_go, self.custom, strict=True):
            some, all_ = some | nodes | own, all_ & nodes
        return all(reach == every for reach in self.reach) and (not some or all_ != 0)

    @property
    def whole(self) -> Group:
        """All ends as one group."""
        return Group(*([*range(len(ends))] for ends in (self.arguments, self.leaves, self.others)))

    def groups(self) -> dict[int, Group]:
        """The ends by the results that they are behind."""
        found: dict[int, Group] = defaultdict(lambda: Group([], [], []))
        at, end = len(self.arguments), len(self.arguments) + len(self.leaves)
        for i, reach in enumerate(self.reach):
            group = found[reach]
            if i < at:
                group.arguments.append(i)
            elif i < end:
                group.leaves.append(i - at)
            else:
                group.others.append(i - end)
        # Those that most results come from are first: the others lead to them.
        return dict(sorted(found.items(), key=lambda item: -item[0].bit_count()))


def ways_between(reaches: Iterable[int], results: int) -> dict[int, list[int]]:
    """From each set of results, single ones included, to those next larger: what one comes to, the larger does."""
    known = [*reaches]
    ways = {}
    for start in {*known, *(1 << number for number in range(results))}:
        above = [reach for reach in known if reach & start == start and reach != start]
        ways[start] = [a for a in above if not any(b & a == b and b != a for b in above)]
    return ways


class _End(NamedTuple):
    tensor: Tensor
    edge: Any
    reach: int


class Ends:
    """Searches the autograd graph of a recorded run for its ends: static inputs, stand-ins, tensors that are older.

    `real` are the tensors behind stand-ins, `older` tensors with a history that the run may have met, `born` the
    storages that only it knows, and `aliases` the tensors that it made on others.
    """

    def __init__(
        self,
        statics: Sequence[Tensor],
        real: Mapping[int, Tensor],
        older: Iterable[Tensor],
        born: Container[int],
        aliases: Container[int],
    ) -> None:
        self._places = {id(t): i for i, t in reversed(list(enumerate(statics)))}
        self._real, self._born, self._aliases = real, born, aliases
        self._history = {(t.grad_fn, t.output_nr): t for t in older if t.grad_fn is not None}
        self._found: dict[int, Tensor] = {}
        self._reach: dict[int, int] = defaultdict(int)
        self._kinds: dict[Any, tuple[int, int]] = {}

    def of(self, results: Iterable[Tensor], device: torch.device) -> Wanted:
        """Search behind these results."""
        nodes = [self._search((t.grad_fn, t.output_nr), 1 << number) for number, t in enumerate(results)]
        arguments: dict[int, _End] = {}
        leaves: list[_End] = []
        others: list[_End] = []
        for key, tensor in self._found.items():
            end = self._end(tensor, self._reach[key])
            if end is None:
                continue
            if key in self._places:
                arguments[self._places[key]] = end
            else:
                (leaves if gated(end.tensor, device) else others).append(end)
        outside, order = [*leaves, *others], sorted(arguments)
        ends = [*(arguments[i] for i in order), *outside]
        uncut = len(outside) > 1 and any(_is_real(end) and not end.tensor.is_leaf for end in outside)
        return Wanted(
            order,
            [end.tensor for end in leaves],
            [end.tensor for end in others],
            [end.edge for end in ends],
            [end.reach for end in ends],
            [kept for kept, _ in nodes],
            [custom for _, custom in nodes],
            [end.tensor for end in ends if _is_real(end)],
            uncut,
        )

    def _end(self, tensor: Tensor, reach: int) -> _End | None:
        """What a backward gives here; None for a leaf that the run made itself."""
        if id(tensor) in self._places:
            return _End(tensor, tensor, reach)
        if id(tensor) in self._real:
            return _End(self._real[id(tensor)], tensor, reach)
        own = id(tensor) in self._aliases or family_key(tensor) in self._born
        if own and tensor.is_leaf:
            return None
        with torch.inference_mode(False):  # in which torch cannot say
            return _End(tensor, get_gradient_edge(tensor), reach)

    def _search(self, root: tuple[Any, int], result: int) -> tuple[int, int]:
        """Note the ends behind one result; answer the nodes that let go of what they saved, and the custom ones."""
        seen: set[Any] = set()
        edges, kept, custom = [root], 0, 0
        while edges:
            edge = edges.pop()
            node = edge[0]
            if node is None or edge in seen:
                continue
            seen.add(edge)
            leaf = node.name() == "torch::autograd::AccumulateGrad"
            end = node.variable if leaf else self._history.get(edge)
            if end is not None:
                self._found[id(end)] = end
                self._reach[id(end)] |= result
            elif node not in seen:
                seen.add(node)
                edges += node.next_functions
                bits = self._kind(node)
                kept, custom = kept | bits[0], custom | bits[1]
        return kept, custom

    def _kind(self, node: Any) -> tuple[int, int]:
        """A bit of its own for a node that saves something, and for a custom one."""
        if node not in self._kinds:
            bit = 1 << len(self._kinds)
            self._kinds[node] = (bit * _saves(node), bit * isinstance(node, BackwardCFunction))
        return self._kinds[node]


def _is_real(end: _End) -> bool:
    return isinstance(end.edge, GradientEdge)


def _saves(node: Any) -> bool:
    """Whether eager raises when a backward comes to this node a second time."""
    try:
        if isinstance(node, BackwardCFunction):
            return bool(node.saved_tensors)
        # What another library wrote in C++ shows nothing of itself.
        opaque = type(node).__name__ in ("CopySlices", "CppFunction")
        names = [name for name in dir(node) if name.startswith("_raw_saved_")]
        return opaque or any(getattr(node, name.removeprefix("_raw")) is not None for name in names)
    except RuntimeError:  # it was overwritten since
        return True
