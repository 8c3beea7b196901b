"""One autograd node in front of many parameters: their gradients are accumulated together, not node by node."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import get_gradient_edge

from ._ambient import current_backward
from ._layout import is_dense

__all__ = ["Gate", "Pulled", "close_gates", "fitted", "freed", "gated", "summed"]

_KINDS = (Tensor, nn.Parameter)
_will_run: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)

# Every gate, so that all can be closed: the nodes that one keeps alive belong to the stream they were made on.
_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


class Pulled(NamedTuple):
    """The gradients of a gate's leaves that one backward made, where the recording has them."""

    fitting: Sequence[Tensor | None]
    """In the layout that `.grad` has by autograd's rule."""
    hand_out: Callable[[], Sequence[Tensor | None]]
    """Makes copies of the caller's own, exactly as eager would give them."""


class _Taken(NamedTuple):
    """What one replay's backward left at the gate: for each leaf whether the gate serves it, and its gradient."""

    task: int
    direct: list[bool]
    grads: list[Tensor | None]


class Gate:
    """Stands between the replays of a wrapper and the leaves that they take gradients of.

    On one H200 the way of 96 gradients through 96 nodes costs 2.3 ms of CPU time. Where nobody watches a leaf the
    gate adds to `.grad` itself, all leaves in one operation; a leaf with hooks, or whose node somebody else
    holds, gets its gradient through the engine, as does one that has gradients from elsewhere in the same
    backward. Every edge is there, so `torch.autograd.grad` and `backward(inputs=...)` find the leaves.
    """

    def __init__(self, leaves: Sequence[Tensor], device: torch.device) -> None:
        self.leaves = list(leaves)
        self._lock = threading.Lock()
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()
        """The library's own recordings that end at the leaves' nodes, and hold each once."""
        self._pulled: list[_Taken] = []
        self._token: Tensor | None = None
        self._nodes: list[Any] = []
        self._nobody: Any = None
        self._arrivals: _Arrivals | None = None
        self._none = torch.zeros((), device=device)
        self._waits: list[weakref.ref[Any]] = []
        self.beside = False
        """Whether a call was made eagerly since the last backward, whose own gradients may come in between."""
        _gates.add(self)

    def free(self) -> bool:
        """Whether no replay that reads these leaves still waits for its backward.

        The gate is the last node that a backward comes to, as is the first of several forwards in eager: only that
        one may go through it, so that the others keep their place in the sum of each gradient.
        """
        self._waits = [ref for ref in self._waits if (node := ref()) is not None and not freed(node)]
        if not self._waits and self._arrivals is not None:
            self._arrivals.forget()  # of a backward that ended half-way
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
        return self._token

    def close(self) -> None:
        """Let go of the leaves' nodes; the next call makes new ones."""
        if self._arrivals is not None:
            self._arrivals.close()
        self._token, self._nodes, self._nobody, self._arrivals = None, [], None, None

    def pull(self, pulled: Pulled) -> Tensor:
        """Take gradients that are the recording's own until its next replay; the gate runs later in this backward."""
        direct, fitting = self._direct(), pulled.fitting
        places = [i for i, grad in enumerate(fitting) if direct[i] and grad is not None]
        copies = _copies([fitting[i] for i in places])
        taken: list[Tensor | None] = [*copies]
        if len(places) < len(fitting):
            taken = [*(fitting if all(direct) else pulled.hand_out())]
            for i, copy in zip(places, copies, strict=True):
                taken[i] = copy
        with self._lock:
            self._pulled.append(_Taken(current_backward(), direct, taken))
        return self._none

    def settle(self) -> Sequence[Tensor | None]:
        """Accumulate what this backward pulled; what the engine must take on, leaf by leaf."""
        task = current_backward()
        with self._lock, torch.no_grad():
            mine = [taken for taken in self._pulled if taken.task == task]
            self._pulled = []  # those of a backward that did not come to the gate go, too
            if not mine:
                return [None] * len(self.leaves)
            direct, totals = mine[0].direct, mine[0].grads
            if len(mine) > 1:
                totals = summed([taken.grads for taken in mine])
                direct = [all(modes) for modes in zip(*(taken.direct for taken in mine), strict=True)]
            return self._accumulate(direct, totals)

    def _accumulate(self, direct: list[bool], totals: list[Tensor | None]) -> list[Tensor | None]:
        """Serve the leaves that are to be served here; the gradients of the others."""
        late: list[Tensor | None] = [None] * len(totals)
        for i, (leaf, total) in enumerate(zip(self.leaves, totals, strict=True)):
            if direct[i] and total is not None:
                totals[i] = None
                if leaf.grad is None:
                    leaf.grad = total
                else:
                    late[i] = total
        # What is there already must come last in the sum, and the engine may bring more.
        if any(total is not None for total in late) and not self._expected(late):
            return [a if b is None else b for a, b in zip(totals, late, strict=True)]
        return totals

    def _expected(self, late: list[Tensor | None]) -> bool:
        if self._arrivals is None:
            self._arrivals = _Arrivals(self.leaves, self._nodes)
            return False
        return self._arrivals.expect(late)

    def _direct(self) -> list[bool]:
        """Which leaves the gate may serve itself; none in `torch.autograd.grad`, which wants them all."""
        nothing = [False] * len(self.leaves)
        if _will_run is None or _grouped() or not self._nodes:
            return nothing
        try:
            plain = _will_run(self._nobody)
            wanted = [True] * len(self.leaves) if plain else [*map(_will_run, self._nodes)]
        except RuntimeError:  # torch cannot say, since nothing is accumulated at all
            return nothing
        alone, holders = _alone() + len(self.holders), [*map(sys.getrefcount, self._nodes)]
        watched = [*map(_watched, self.leaves)]
        if plain and not any(watched) and holders == [alone] * len(holders):
            return wanted
        return [w and n == alone and not s for w, n, s in zip(wanted, holders, watched, strict=True)]


@functools.cache
def _alone() -> int:
    """The references to a node that nobody but a gate holds."""
    with torch.enable_grad():
        gate = Gate([torch.zeros((), requires_grad=True)], torch.device("cpu"))
        gate.token()
    (count,) = [*map(sys.getrefcount, gate._nodes)]
    return count


class _Arrivals:
    """Gradients to add to what `.grad` holds, once the engine has come to all leaves: it may have more for some."""

    def __init__(self, leaves: list[Tensor], nodes: list[Any]) -> None:
        self._leaves = leaves
        self._totals: list[Tensor | None] = [None] * len(leaves)
        self._left = 0
        self._handles = [node.register_prehook(partial(self._arrive, i)) for i, node in enumerate(nodes)]

    def expect(self, totals: list[Tensor | None]) -> bool:
        """Add these when all their leaves were met; False while another backward is at it."""
        if self._left:
            return False
        self._totals, self._left = totals, sum(total is not None for total in totals)
        return True

    def forget(self) -> None:
        """Add nothing."""
        self._totals, self._left = [None] * len(self._leaves), 0

    def close(self) -> None:
        """Leave the nodes alone."""
        for handle in self._handles:
            handle.remove()

    def _arrive(self, index: int, grads: tuple[Tensor | None, ...]) -> tuple[Tensor] | None:
        total = self._totals[index]
        if total is None:
            return None
        self._left -= 1
        other = grads[0]
        if other is not None:
            self._totals[index] = None
        if not self._left:
            self._add()
        return None if other is None else (other + total,)

    def _add(self) -> None:
        pairs = [(leaf.grad, total) for leaf, total in zip(self._leaves, self._totals, strict=True)]
        found = [(into, total) for into, total in pairs if into is not None and total is not None]
        self.forget()
        if found:
            with torch.no_grad():
                torch._foreach_add_([into for into, _ in found], [total for _, total in found])


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
        return None, None, *gate.settle()


def freed(node: Any) -> bool:
    """Whether a backward has let go of what an autograd node saved."""
    try:
        node.saved_tensors  # noqa: B018
    except RuntimeError:
        return True
    return False


def gated(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor that needs gradients can be behind a gate."""
    return tensor.is_leaf and type(tensor) in _KINDS and tensor.device == device


def close_gates() -> None:
    """Before a backward is captured that accumulates into `.grad` by itself, on the stream of the capture."""
    for gate in list(_gates):
        gate.close()


def fitted(grad: Tensor | None, leaf: Tensor) -> Tensor | None:
    """A gradient in the layout that autograd gives to `.grad` (the layout contract of AccumulateGrad)."""
    if grad is None or _obeys(grad, leaf):
        return grad
    return torch.empty_like(leaf.detach(), dtype=grad.dtype).copy_(grad)


def _obeys(grad: Tensor, leaf: Tensor) -> bool:
    if not is_dense(leaf):
        return grad.is_contiguous()
    pairs = zip(leaf.shape, grad.stride(), leaf.stride(), strict=True)
    return all(mine == its for size, mine, its in pairs if size != 1)


def _watched(leaf: Tensor) -> bool:
    """Whether somebody could see how this leaf's gradient is accumulated, or torch would do it another way."""
    if leaf._backward_hooks or leaf._post_accumulate_grad_hooks or not leaf.requires_grad:
        return True
    return leaf.grad is not None and (leaf.grad.layout is not torch.strided or leaf.grad.dtype != leaf.dtype)


def _grouped() -> bool:
    """Whether processes train together: the hooks that reduce their gradients are nowhere to be seen."""
    return distributed.is_available() and distributed.is_initialized()


def summed(found: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """The sums over several replays, in the order in which they were pulled, as the engine adds them."""
    total = [*found[0]]
    for more in found[1:]:
        total = [b if a is None else a if b is None else a + b for a, b in zip(total, more, strict=True)]
    return total


def _copies(tensors: list[Any]) -> Sequence[Tensor]:
    """Fresh copies with the same strides; a product with one is one kernel for all of them."""
    if not tensors:
        return []
    if any(t.is_complex() for t in tensors):
        return [t.clone() for t in tensors]
    made: Sequence[Tensor] = torch._foreach_mul(tensors, 1)
    return made
