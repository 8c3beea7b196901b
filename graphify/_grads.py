"""The `.grad` of every leaf around a run that holds a backward: before it, after it, and at each replay."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from ._guards import Miss
from ._layout import family_key, is_dense
from ._touched import Touched, bind_grad, grad_of
from .errors import CaptureError

__all__ = ["GradPlan", "Grads", "refused_arguments"]

_grad_of = operator.attrgetter("grad")


class Grads:
    """The `.grad` of these leaves around a run that is recorded.

    Example: `grads = Grads(named_leaves); run(); grads.settle(touched)` in what is recorded; then
    `plan = grads.plan(touched, given)`, or `grads.restore(touched)` when that failed. Leaves that the run did not
    touch are none of its business: another thread may train them.
    """

    def __init__(self, leaves: Iterable[tuple[str, Tensor]]) -> None:
        self._names: dict[int, str] = {}
        self.leaves: list[Tensor] = []
        for name, tensor in leaves:
            # A frozen parameter, too: `zero_grad` and a step look at its `.grad`.
            trained = tensor.requires_grad or isinstance(tensor, nn.Parameter)
            if tensor.is_leaf and trained and id(tensor) not in self._names:
                self._names[id(tensor)] = name
                self.leaves.append(tensor)

    def knows(self, tensor: Tensor) -> bool:
        """Whether this is one of the leaves."""
        return id(tensor) in self._names

    def _before(self, touched: Touched) -> list[tuple[Tensor, Tensor | None]]:
        return [touched.before[id(t)] for t in self.leaves if id(t) in touched.before]

    def families(self, touched: Touched) -> set[int]:
        """The memory of the gradients that there were."""
        return {family_key(grad) for _, grad in self._before(touched) if grad is not None}

    def restore(self, touched: Touched) -> None:
        """Put back what the run changed; the memory of a `.grad` is not this one's business."""
        for tensor, grad in self._before(touched):
            bind_grad(tensor, grad)

    def settle(self, touched: Touched) -> None:
        """Record, at the end of the run, that gradients stay where the next call looks for them.

        A run that uses the gradient of the last call and then makes another would find it elsewhere each time.
        """
        for tensor, before in self._before(touched):
            after = grad_of(tensor)
            if before is None or after is None or after is before or not touched.uses(before):
                continue
            if _facts(after)[1:] == _facts(before)[1:] and is_dense(before) and not after.requires_grad:
                with torch.no_grad():
                    before.copy_(after)
                bind_grad(tensor, before)

    def plan(self, touched: Touched, given: Collection[int] = ()) -> GradPlan:
        """What replays of the run that just happened need and leave; `given` are its arguments' families.

        Raises:
            CaptureError: the run left a `.grad` that a replay could not.
        """
        plan = GradPlan()
        for tensor, before in self._before(touched):
            name, after = f"{self._names[id(tensor)]}.grad", grad_of(tensor)
            if after is not None and after is not before:
                _check(name, after, given)
            if before is not None and touched.uses(before):
                _check(name, before, given)
                plan.expect_memory(name, tensor, before)
            else:
                plan.expect_presence(name, tensor, before is not None)
            if after is not before:
                plan.leave(tensor, after)
        return plan


def _check(name: str, grad: Tensor, given: Collection[int]) -> None:
    if grad.requires_grad:
        raise CaptureError(
            f"`{name}` needs a gradient itself after `backward(create_graph=True)`",
            why="a replay repeats device work only and makes no autograd graph",
            fix="`torch.autograd.grad(..., create_graph=True)` for the inner gradient",
        )
    if grad.layout is not torch.strided:
        raise CaptureError(
            f"`{name}` is a sparse tensor",
            why="its size depends on values, and a graph has fixed sizes",
            fix="`sparse=False`",
        )
    if family_key(grad) in given:
        raise CaptureError(
            f"`{name}` is set to an argument",
            why="the graph has its own copy of the argument, which the next call overwrites",
            fix="copy it into the `.grad` that is there, or set it outside the graphed function",
        )


def refused_arguments(statics: Iterable[tuple[str, Tensor]]) -> CaptureError | None:
    """Why the backward in a recorded run cannot be: it reached an argument, of which the graph has a copy."""
    for name, static in statics:
        if static.is_leaf and static.grad is not None:
            return CaptureError(
                f"`{name}` gets a gradient from a backward inside",
                why="the graph has its own copy of the argument, so the caller's would get none",
                fix=f"`torch.autograd.grad(loss, {name})` inside and return it, or `{name}.detach()`",
            )
    return None


class GradPlan:
    """What one recording takes for granted of `.grad`, and what it leaves there.

    Where the run touched the memory of a `.grad`, that memory must still be there; elsewhere only whether
    there was one counts. Holds the gradients that the run made, which are the graph's own buffers.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._seen: list[Tensor] = []
        self._absent: list[bool] = []
        self._touching: list[Tensor] = []
        self._expected: list[Tensor] = []
        self._facts: list[tuple[object, ...]] = []
        self._left: list[tuple[Tensor, Tensor | None]] = []

    def expect_memory(self, name: str, tensor: Tensor, grad: Tensor) -> None:
        """From now on `tensor.grad` must be in this memory."""
        self._names[id(tensor)] = name
        self._touching.append(tensor)
        self._expected.append(grad)
        self._facts.append(_facts(grad))

    def expect_presence(self, name: str, tensor: Tensor, present: bool) -> None:
        """From now on `tensor.grad` must be there, or must not."""
        self._names[id(tensor)] = name
        self._seen.append(tensor)
        self._absent.append(not present)

    def leave(self, tensor: Tensor, grad: Tensor | None) -> None:
        """Each replay leaves this as `tensor.grad`."""
        self._left.append((tensor, grad))

    @property
    def matters(self) -> bool:
        """Whether the run used or changed a gradient; one without a backward or a step need not ask otherwise."""
        return bool(self._touching or self._left)

    @property
    def made(self) -> list[Tensor]:
        """The gradients that the run left: no other graph may get their memory."""
        return [grad for _, grad in self._left if grad is not None]

    def holds(self) -> bool:
        """Whether a replay may happen now."""
        if [grad is None for grad in map(_grad_of, self._seen)] != self._absent:
            return False
        # No comparison of lists: an item that is another tensor would be compared by its values.
        return all(map(operator.is_, map(_grad_of, self._touching), self._expected)) or self._same_memory()

    def _same_memory(self) -> bool:
        now = [*map(_grad_of, self._touching)]
        if any(g is None for g in now) or [*map(_facts, now)] != self._facts:
            return False
        self._expected = now
        return True

    def miss(self) -> Miss | None:
        """The first `.grad` that is not as needed, or None; `moved` when it is a tensor in other memory."""
        for tensor, absent in zip(self._seen, self._absent, strict=True):
            if (tensor.grad is None) != absent:
                return Miss(self._names[id(tensor)], None if absent else tensor, tensor.grad, False)
        for tensor, grad, facts in zip(self._touching, self._expected, self._facts, strict=True):
            if tensor.grad is None or _facts(tensor.grad) != facts:
                return Miss(self._names[id(tensor)], grad, tensor.grad, tensor.grad is not None)
        return None

    def apply(self) -> None:
        """Leave what the run left, at the end of a replay."""
        for tensor, grad in self._left:
            if tensor.grad is not grad:
                tensor.grad = grad


def _facts(grad: Tensor) -> tuple[object, ...]:
    if grad.layout is not torch.strided:
        return (id(grad),)
    return grad.data_ptr(), grad.dtype, grad.stride()
