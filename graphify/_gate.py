"""One autograd node in front of many parameters: their gradients are accumulated together, not node by node."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import get_gradient_edge

from ._ambient import current_backward, keeps_graph
from ._arrivals import Arrivals, at_end
from ._pulled import Pulled, summed

__all__ = ["Gate", "asks_for", "close_gates", "gated", "leave", "let_go"]

_KINDS = (Tensor, nn.Parameter)
_will_run: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)

# Every gate, so that all can be closed: the nodes that one keeps alive belong to the stream they were made on.
_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


class _Taken(NamedTuple):
    """What one replay's backward left at the gate: for each leaf whether the gate serves it, and its gradient."""

    task: int
    direct: list[bool]
    grads: list[Tensor | None]
    pulled: Pulled | None
    """Instead of gradients, where the gate serves all leaves: they are the recording's own."""


class Gate:
    """Stands between the replays of a wrapper and the leaves that they take gradients of.

    On one H200 the way of 96 gradients through 96 nodes costs 2.3 ms of CPU time. Where nobody watches a leaf the
    gate adds to `.grad` itself, all leaves in one operation; a leaf with hooks, or whose node somebody else
    holds, gets its gradient through the engine, as does one that has gradients from elsewhere in the same
    backward. Every edge is there, so `torch.autograd.grad` and `backward(inputs=...)` find the leaves.
    """

    def __init__(self, leaves: Sequence[Tensor], device: torch.device) -> None:
        self.leaves = list(leaves)
        self._all, self._nothing = [True] * len(self.leaves), [False] * len(self.leaves)
        self._lock = threading.Lock()
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()
        """The library's own recordings that end at the leaves' nodes, and hold each once."""
        self._pulled: list[_Taken] = []
        self._token: Tensor | None = None
        self._nodes: list[Any] = []
        self._nobody: Any = None
        self._arrivals: Arrivals | None = None
        self._none = torch.zeros((), device=device)
        self._waits: list[weakref.ref[Any]] = []
        self.beside = False
        """Whether a call was made eagerly since the last backward, whose own gradients may come in between."""
        _gates.add(self)

    def free(self) -> bool:
        """Whether no replay that reads these leaves still waits for its backward.

        What a gate brings is added last, as is what the first of several forwards brings in eager: only that one
        may go through it, so that the others keep their place in the sum of each gradient.
        """
        self._waits = [ref for ref in self._waits if (node := ref()) is not None and not let_go(node)]
        return not self.beside and not self._waits

    def wait(self, node: Any) -> None:
        """This node's backward will be over before the gate is free again."""
        self._waits.append(weakref.ref(node))

    def token(self) -> Tensor:
        """The tensor through which a backward reaches the gate."""
        if self._token is None:
            self._nodes = [get_gradient_edge(leaf).node for leaf in self.leaves]
            # Nobody can ask for this leaf's gradient, so its node runs in a backward without `inputs=` only.
            nobody = torch.zeros((), device=self._none.device, requires_grad=True)
            self._nobody = get_gradient_edge(nobody).node
            apply: Callable[..., Tensor] = _Opened.apply
            self._token = apply(weakref.ref(self), nobody, *self.leaves)
            _hasten(self._token.grad_fn)
        return self._token

    def close(self) -> None:
        """Let go of the leaves' nodes; the next call makes new ones."""
        if self._arrivals is not None:
            self._arrivals.close()
        self._token, self._nodes, self._nobody, self._arrivals = None, [], None, None

    def pull(self, pulled: Pulled) -> Tensor:
        """Take gradients that are the recording's own until its next replay; the gate runs later in this backward."""
        direct = self._direct() if pulled.strided else self._nothing
        if direct is self._all and at_end is not None:
            end = partial(self._end, pulled)
            at_end(end)
            pulled.lend(end)
            taken = _Taken(current_backward(), direct, [], pulled)
        else:
            grads = [*pulled.copies()]
            others = tuple(i for i, d in enumerate(direct) if not d and grads[i] is not None)
            for i, other in zip(others, pulled.hand_out(others), strict=True):
                grads[i] = other
            taken = _Taken(current_backward(), direct, grads, None)
        with self._lock:
            self._pulled.append(taken)
        return self._none

    def settle(self) -> Sequence[Tensor | None]:
        """Accumulate what this backward pulled; what the engine must take on, leaf by leaf."""
        task = current_backward()
        with self._lock, torch.no_grad():
            mine = [taken for taken in self._pulled if taken.task == task]
            self._pulled = []  # those of a backward that did not come to the gate go, too
            if not mine:
                return [None] * len(self.leaves)
            if len(mine) == 1 and mine[0].pulled is not None:
                return self._serve(mine[0].pulled)
            found = [[*taken.pulled.copies()] if taken.pulled is not None else taken.grads for taken in mine]
            direct = [all(modes) for modes in zip(*(taken.direct for taken in mine), strict=True)]
            return self._accumulate(direct, summed(found))

    def _serve(self, pulled: Pulled) -> Sequence[Tensor | None]:
        """Give all leaves their gradients, straight from the recording's memory where there is a `.grad` to add to."""
        there = [*map(_grad_of, self.leaves)]
        present = [
            grad is not None for grad, mine in zip(there, pulled.fitting, strict=True) if mine is not None
        ]
        if all(present) and self._expected(pulled):
            return [None] * len(there)
        copies = pulled.copies()
        pulled.leave()
        if any(present):
            return self._accumulate(self._all, [*copies])
        for leaf, grad in zip(self.leaves, copies, strict=True):
            if grad is not None:
                leaf.grad = grad
        return [None] * len(there)

    def _end(self, pulled: Pulled) -> None:
        """The backward that pulled these is over."""
        if self._arrivals is not None:
            self._arrivals.add(pulled)
        pulled.leave()

    def _accumulate(self, direct: list[bool], totals: list[Tensor | None]) -> list[Tensor | None]:
        """Serve the leaves that are to be served here; the gradients of the others.

        What is in `.grad` already must come last in the sum, and the engine may bring more.
        """
        for i, (leaf, total) in enumerate(zip(self.leaves, totals, strict=True)):
            if direct[i] and total is not None and leaf.grad is None:
                leaf.grad, totals[i] = total, None
        return totals

    def _expected(self, pulled: Pulled) -> bool:
        if self._arrivals is None:
            self._arrivals = Arrivals(self.leaves, self._nodes)
            return False
        return self._arrivals.expect(pulled)

    def _direct(self) -> list[bool]:
        """Which leaves the gate may serve itself; none in `torch.autograd.grad`, which wants them all."""
        if _will_run is None or _grouped() or not self._nodes:
            return self._nothing
        try:
            plain = _will_run(self._nobody)
            wanted = self._all if plain else [*map(_will_run, self._nodes)]
        except RuntimeError:  # torch cannot say, since nothing is accumulated at all
            return self._nothing
        alone, holders = _alone() + len(self.holders), [*map(sys.getrefcount, self._nodes)]
        if plain and holders == [alone] * len(holders) and not self._watched():
            return wanted
        watched = map(_watched, self.leaves)
        return [w and n == alone and not s for w, n, s in zip(wanted, holders, watched, strict=True)]

    def _watched(self) -> bool:
        """Whether any leaf may be watched: asked of all at once, which takes a quarter of the time."""
        leaves = self.leaves
        if (
            any(map(_hooks_of, leaves))
            or any(map(_later_hooks_of, leaves))
            or not all(map(_needs_grad, leaves))
        ):
            return True
        grads = [grad for grad in map(_grad_of, leaves) if grad is not None]
        return bool(grads) and len({*map(_kind_of, leaves), *map(_kind_of, grads)}) > 1


_grad_of = attrgetter("grad")
_hooks_of = attrgetter("_backward_hooks")
_later_hooks_of = attrgetter("_post_accumulate_grad_hooks")
_needs_grad = attrgetter("requires_grad")
_kind_of = attrgetter("dtype", "layout")


@functools.cache
def _alone() -> int:
    """The references to a node that nobody but a gate holds."""
    with torch.enable_grad():
        gate = Gate([torch.zeros((), requires_grad=True)], torch.device("cpu"))
        gate.token()
    (count,) = [*map(sys.getrefcount, gate._nodes)]
    return count


class _Opened(torch.autograd.Function):
    """The gate's node. It saves nothing, so that it can run in every backward."""

    @staticmethod
    def forward(ctx: Any, gate: weakref.ref[Gate], nobody: Tensor, *leaves: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gate = gate
        return nobody.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        gate = ctx.gate()
        assert gate is not None, "a backward goes through the replays that hold the gate"
        # The engine comes to the leaf that nobody sees all the same, so the end of a backward waits for this stream.
        return None, None, *gate.settle()


def leave(node: Any) -> None:
    """Know, at the end of the backward of one of our nodes, whether the graph was to be retained."""
    node.over = keeps_graph is not None and not keeps_graph()


def let_go(node: Any) -> bool:
    """Whether a backward has gone through one of our nodes and let go of what it saved."""
    if keeps_graph is not None:
        return bool(getattr(node, "over", False))
    try:
        node.saved_tensors  # noqa: B018
    except RuntimeError:  # which takes as long as a hundred calls that return
        return True
    return False


def gated(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor that needs gradients can be behind a gate."""
    return tensor.is_leaf and type(tensor) in _KINDS and tensor.device == device


def _hasten(node: Any) -> None:
    """Have the engine come to a node as soon as it can, as it does to a leaf's, and not by the age of the node."""
    hasten = getattr(node, "_set_sequence_nr", None)
    if hasten is not None:
        hasten(2**62)


def asks_for(node: Any) -> bool:
    """Whether the running backward comes to a node, or gives what that would be given."""
    if node is None or _will_run is None:
        return node is not None
    try:
        return _will_run(node)
    except RuntimeError:  # a leaf whose gradient `torch.autograd.grad` was asked for
        return True


def close_gates() -> None:
    """Before a backward is captured that accumulates into `.grad` by itself, on the stream of the capture."""
    for gate in list(_gates):
        gate.close()


def _watched(leaf: Tensor) -> bool:
    """Whether somebody could see how this leaf's gradient is accumulated, or torch would do it another way."""
    if leaf._backward_hooks or leaf._post_accumulate_grad_hooks or not leaf.requires_grad:
        return True
    return leaf.grad is not None and (leaf.grad.layout is not torch.strided or leaf.grad.dtype != leaf.dtype)


def _grouped() -> bool:
    """Whether processes train together: the hooks that reduce their gradients are nowhere to be seen."""
    return distributed.is_available() and distributed.is_initialized()
