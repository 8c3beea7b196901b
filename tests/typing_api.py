"""What type checkers see of graphify. Checked by `mypy --strict`, never run.

A line with `type: ignore` is a promise too: the checker complains there, and says so if it no longer does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from graphify import GraphedModule, graphify, handle
from graphify._controls import BoundMethod
from graphify._method import GraphedFunction
from graphify._wrapper import Runner
from graphify.stats import GraphRecord, Stats

x = torch.ones(2)

# A function keeps its parameters and its result, bare or with options.


@graphify
def scale(x: Tensor, k: int = 1, *, bias: float = 0.0) -> Tensor:
    return x * k + bias


@graphify(outputs="static", max_graphs=None)
def pair(x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return x + y, 1


@graphify()
def nothing() -> None: ...


assert_type(scale(x), Tensor)
assert_type(scale(x, 2, bias=1.0), Tensor)
assert_type(scale(x=x, k=2), Tensor)
assert_type(pair(x, y=x), tuple[Tensor, int])
scale("x")  # type: ignore[arg-type]
scale(x, bais=1.0)  # type: ignore[call-arg]
scale()  # type: ignore[call-arg]
pair(x)  # type: ignore[call-arg]
nothing(1)  # type: ignore[call-arg]

# Whatever else can be called.


class Doubler:
    def __call__(self, x: Tensor) -> int:
        return 1


def plain(x: Tensor, k: int) -> Tensor:
    return x * k


assert_type(graphify(plain)(x, 2), Tensor)
assert_type(graphify(plain, warmup=3)(x, 2), Tensor)
assert_type(graphify(partial(plain, k=2))(x), Tensor)
assert_type(graphify(Doubler())(x), int)
assert_type(graphify(torch.compile(plain))(x, 2), Tensor)


def unknown(f: Callable[..., Tensor]) -> Tensor:
    return graphify(f)(x, "anything")


assert_type(graphify(warmup=2)(plain)(x, 1), Tensor)
graphify(Doubler())("x")  # type: ignore[arg-type]
graphify(1)  # type: ignore[call-overload]

# Options are known by name and by value.

graphify(plain, output="static")  # type: ignore[call-overload]
graphify(plain, outputs="fast")  # type: ignore[call-overload]
graphify(plain, warmup="1")  # type: ignore[call-overload]
graphify(outputs="fast")  # type: ignore[call-overload]

# Methods keep theirs, without the instance where there is one.


class Trainer:
    @graphify
    def step(self, x: Tensor, k: int = 1) -> Tensor:
        return x * k

    @graphify(warmup=2)
    def other(self, x: Tensor) -> int:
        return 1

    @classmethod
    @graphify
    def make(cls, x: Tensor) -> Tensor:
        return x

    @staticmethod
    @graphify
    def free(x: Tensor, k: int = 1) -> Tensor:
        return x * k

    @graphify
    @classmethod
    def made(cls, x: Tensor) -> Tensor:
        return x

    @graphify
    @staticmethod
    def loose(x: Tensor, k: int = 1) -> Tensor:
        return x * k


class Child(Trainer):
    @graphify
    def step(self, x: Tensor, k: int = 1) -> Tensor:
        return super().step(x, k)


trainer = Trainer()
assert_type(trainer.step(x), Tensor)
assert_type(trainer.step(x, k=2), Tensor)
assert_type(trainer.other(x), int)
assert_type(Trainer.step(trainer, x, 2), Tensor)
assert_type(Child().step(x), Tensor)
assert_type(trainer.step.stats(), Stats)
trainer.step("x")  # type: ignore[arg-type]
trainer.step(x, 1, 2)  # type: ignore[call-arg]
trainer.other()  # type: ignore[call-arg]
Trainer.step(trainer, "x")  # type: ignore[call-overload]

assert_type(trainer.make(x), Tensor)
assert_type(Trainer.make(x), Tensor)
assert_type(Trainer.free(x, 2), Tensor)
assert_type(trainer.made(x), Tensor)
assert_type(Trainer.made(x), Tensor)
assert_type(Trainer.loose(x, 2), Tensor)
Trainer.make("x")  # type: ignore[call-overload]
Trainer.free("x")  # type: ignore[call-overload]
trainer.free(x, 1)  # type: ignore[call-arg, arg-type]  # mypy binds it; write Trainer.free

# Modules stay what they were; a class is itself.


@graphify
class Net(nn.Module):
    width: int

    def forward(self, x: Tensor) -> Tensor:
        return x


@graphify(backend="tape")
class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()


assert_type(graphify(nn.Linear(2, 2)), nn.Linear)
assert_type(graphify(Net()), Net)
assert_type(graphify(Net(), outputs="static").width, int)
assert_type(graphify(backend="eager")(nn.Linear(2, 2)).in_features, int)
assert_type(Deep(3), Deep)
Deep("3")  # type: ignore[arg-type]

# The controls.

assert_type(scale.stats(), Stats)
assert_type(scale.graphs, tuple[GraphRecord, ...])
assert_type(scale.report(), str)
assert_type(scale.capture(x), GraphRecord)
assert_type(handle(Net()), Runner)
assert_type(handle(scale).stats(), Stats)
assert_type(scale.__name__, str)
assert_type(scale.__wrapped__(x), Tensor)
scale.reset()
scale.restart()  # type: ignore[attr-defined]


def controls(model: nn.Module) -> None:
    if isinstance(model, GraphedModule):
        assert_type(model.stats(), Stats)


# The names for annotations.


def takes(f: GraphedFunction[[Tensor], Tensor], m: BoundMethod[[Tensor, int], Tensor]) -> Any:
    return f(x), m(x, 1)


@graphify
def one(x: Tensor) -> Tensor:
    return x


takes(one, trainer.step)
takes(pair, trainer.step)  # type: ignore[arg-type]
