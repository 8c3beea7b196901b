"""Whole training steps: what a recording with a backward or an optimizer inside must do beside its device work."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ._grads import GradPlan, Grads
from ._guards import Miss
from ._lifted import Lifted
from ._optimizers import steps
from ._places import Place
from ._survey import Survey
from ._touched import Touched
from ._watch import Watch
from .errors import CaptureError, again

__all__ = ["WholeStep", "hooks_on"]

_PATIENCE = 0.1


class WholeStep:
    """The gradients that a step finds and leaves, and the optimizer's numbers that change between calls.

    Make it on the stream of the capture, before it; `numbers` are lent to the run as tensors.
    """

    def __init__(
        self, survey: Survey, numbers: Sequence[Place], device: torch.device, touched: Touched
    ) -> None:
        self._grads = Grads((place.name, tensor) for place, tensor in survey.tensors())
        touched.within(self._grads.leaves)
        self._lifted = Lifted(numbers, device)
        self._plan = GradPlan()
        self._leaves = [t for _, t in survey.tensors() if t.is_leaf and t.requires_grad]
        self._hooks = [*map(_hooks_of, self._leaves)]
        if device.type != "cpu":
            _wait_for_nodes_to_go([t for t in self._leaves if t.device == device and not t.is_inference()])

    @property
    def lent(self) -> set[int]:
        """The memory of these tensors."""
        return self._lifted.families

    @property
    def made(self) -> list[Tensor]:
        """The gradients that the recording leaves: its own buffers."""
        return self._plan.made

    def known(self, touched: Touched) -> set[int]:
        """The memory that is accounted for here: lent numbers, and the gradients there were before."""
        return self._lifted.families | self._grads.families(touched)

    @contextmanager
    def inside(self, watch: Watch) -> Iterator[None]:
        """Around the run that is recorded, under its watch."""
        with steps(self._lifted), self._lifted.lent():
            yield
            self._grads.settle(watch.touched)

    def plan(self, watch: Watch, results: Iterable[Tensor]) -> bool:
        """Plan for replays; whether the run used or left a gradient at all.

        Raises:
            CaptureError: the run left what a replay could not.
        """
        refused = self._lifted.refused_results(results) or self._unknown(watch)
        if refused is not None:
            raise again(refused)
        self._plan = self._grads.plan(watch.touched, watch.given)
        return self._plan.matters

    def _unknown(self, watch: Watch) -> CaptureError | None:
        for tensor in watch.outside.values():
            if watch.backward and tensor.is_leaf and tensor.requires_grad and not self._grads.knows(tensor):
                return CaptureError(
                    f"a parameter of shape {tuple(tensor.shape)} is trained that no name leads to",
                    why="its `.grad` cannot be followed from call to call",
                    fix="keep it in a module, an attribute or a variable that the function names",
                )
        return None

    def restore(self, touched: Touched) -> None:
        """Put the `.grad`s back that a recording changed, which failed."""
        self._grads.restore(touched)

    def holds(self) -> bool:
        """Whether a replay may happen now."""
        return self._plan.holds() and self._lifted.holds() and self._same_hooks()

    def _same_hooks(self) -> bool:
        """The hooks of the leaves are in the recording."""
        return [*map(_hooks_of, self._leaves)] == self._hooks

    def miss(self) -> Miss | None:
        """What is in the way of a replay."""
        found = self._plan.miss()
        if found is None and not self._lifted.holds():
            found = Miss("an option of the optimizer", None, None, moved=False)
        if found is None and not self._same_hooks():
            found = Miss("the hooks of a parameter", None, None, moved=False)
        return found

    def meets_other_gradients(self) -> bool:
        """Whether `.grad` alone is in the way."""
        return self._plan.miss() is not None and self._lifted.holds() and self._same_hooks()

    def refill(self) -> None:
        """Bring the recording's numbers up to what Python holds; before each launch."""
        self._lifted.refill()

    def apply(self) -> None:
        """Leave `.grad` as the run left it; after each launch."""
        self._plan.apply()


def hooks_on(survey: Survey) -> list[tuple[str, Any]]:
    """The hooks of the tensors that a survey met, with names."""
    found = []
    for place, tensor in survey.tensors():
        for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
            found += [(f"a hook of {place.name}", hook) for hook in (hooks or {}).values()]
    return found


def _wait_for_nodes_to_go(leaves: Sequence[Tensor]) -> None:
    """Give the device's thread time to let go of an eager backward: a leaf's node stays on its stream until it dies.

    Not for ever: somebody may hold it, and that thread may wait for a lock of this one.
    """
    until = time.monotonic() + _PATIENCE
    with torch.inference_mode(False):
        while any(map(_has_node, leaves)) and time.monotonic() < until:
            time.sleep(0.001)


def _has_node(leaf: Tensor) -> bool:
    """Whether somebody holds the node that accumulates into `.grad`: only then a mark on it lasts."""
    node: Any = get_gradient_edge(leaf).node
    node.metadata[__name__] = True
    del node
    node = get_gradient_edge(leaf).node
    return __name__ in node.metadata


def _hooks_of(leaf: Tensor) -> tuple[int, int]:
    return len(leaf._backward_hooks or ()), len(leaf._post_accumulate_grad_hooks or ())
