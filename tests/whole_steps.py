"""Whole training steps on the tape, without the library's own call path: for tests of its parts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphify._grads import GradPlan, Grads
from graphify._lifted import Lifted, numbers_of
from graphify._optimizers import steps
from graphify._watch import Watch, watching
from graphify.backends.tape import TapeBackend

CPU = torch.device("cpu")
tape = TapeBackend()
Function = Callable[[nn.Module, torch.optim.Optimizer, Tensor], Any]


class Variant(NamedTuple):
    plan: GradPlan
    lifted: Lifted
    static: Tensor
    replay: Callable[[], None]
    out: Any

    def holds(self) -> bool:
        return self.plan.holds() and self.lifted.holds()


class Step:
    """A whole step on the tape: run live at first, then recorded for each state of `.grad` that it meets.

    The options of `lift` are lifted. Two live calls: one step may only begin to use a gradient that the call
    before it made.
    """

    def __init__(
        self,
        function: Function,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lift: Collection[str] = (),
    ) -> None:
        self.function, self.model, self.optimizer, self.lift = function, model, optimizer, lift
        self.pool = tape.pool(CPU)
        self.variants: list[Variant] = []
        self.cold = 2

    def __call__(self, x: Tensor) -> Any:
        if self.cold:
            self.cold -= 1
            return self.function(self.model, self.optimizer, x)
        variant = next((v for v in self.variants if v.holds()), None) or self.record(x)
        variant.static.copy_(x)
        variant.lifted.refill()
        variant.replay()
        variant.plan.apply()
        return variant.out.clone() if isinstance(variant.out, Tensor) else variant.out

    def record(self, x: Tensor) -> Variant:
        static = torch.empty_like(x)
        numbers = [p for p in numbers_of([("optimizer", self.optimizer)]) if p.key in self.lift]
        lifted = Lifted(numbers, CPU)
        watch = Watch(CPU, given=[static], strict=True)
        watch.given |= lifted.families
        grads = Grads(self.model.named_parameters())

        def run() -> Any:
            with watching(watch, tape.listen), steps(lifted), lifted.lent():
                out = self.function(self.model, self.optimizer, static)
                grads.settle(watch.touched)
            return out

        try:
            with tape.scope(CPU):
                recording, out = tape.record(run, self.pool, ())
            plan = grads.plan(watch.touched, watch.given)
        except BaseException:
            grads.restore(watch.touched)
            raise
        assert plan.matters or watch.backward
        self.variants.append(Variant(plan, lifted, static, recording.replay, out))
        return self.variants[-1]


def net() -> nn.Sequential:
    """A small net whose parameters have names such as `0.weight`."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss
