"""What one operator call becomes on the tape: pinned arguments now, a call without options at replay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._composite import AUTOCAST_CPU, VIEWS, marking
from .._illegal import tensors_in
from .._undo import below, writes_of
from ..errors import GraphifyError
from ._memory import Slot

__all__ = ["Call", "Output", "Step", "allocates", "constant", "pinned", "refilling", "settled"]


class Step(NamedTuple):
    """One operator call on the tape, and the thread state that its kernel reads."""

    run: Callable[[], Any]
    inference: bool
    grad: bool


class Output(NamedTuple):
    """Memory that a call made, and which leaf of its result goes there."""

    leaf: int
    slot: Slot


def pinned(tensor: Tensor) -> Tensor:
    """An alias that outlives the tensor and keeps its present shape and strides."""
    with below():
        return tensor.detach()


class Call:
    """One operator call with its tensors pinned as they are before it runs.

    A tensor that is passed twice is one alias twice: some kernels ask whether `query is key`. An alias needs grad
    as the tensor does: kernels that call others choose by that among them.
    """

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.pins: dict[int, Tensor] = {}
        self.args = self._pin(args)
        self.kwargs = {name: self._pin(value) for name, value in kwargs.items()}
        self.written = writes_of(func, args, kwargs)
        self.found: tuple[Any, ...] = ()  # what `uncovered` let in again

    def _pin(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self.pins:
                self.pins[id(value)] = alias = pinned(value)
                alias.requires_grad = value.requires_grad
            return self.pins[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(self._pin(item) for item in value)
        return value

    def has_effect(self) -> bool:
        """Whether the call does more than make its results: it writes memory, or has no results at all."""
        if self.written:
            # `t_` and its like change what the host knows of a tensor, which a replay does not repeat;
            # `resize_` also gets memory, which operators after it rely on.
            moves = torch.Tag.inplace_view in self.func.tags
            return not moves or self.func.__name__.startswith("resize_")
        return bool(self.pins) and not self.func._schema.returns

    def bound(self) -> Callable[[], Any]:
        """The same call on the pinned tensors."""
        func = self.func
        op = functools.partial(getattr(func, "_op", func), *self.args, **self.kwargs)
        casts = torch.get_autocast_dtype("cpu") if AUTOCAST_CPU in self.found else None
        views = VIEWS in self.found and any(alias.requires_grad for alias in self.pins.values())
        if views or casts is not None:
            op = functools.partial(_as_found, op, views, casts)
        return (lambda: settled(func, op())) if "c10d" in func.namespace else op


def _as_found(op: Callable[[], Any], views: bool, casts: torch.dtype | None) -> Any:
    """Run a kernel that may call other operators with what it found when it was recorded."""
    with torch.autocast("cpu", casts, enabled=casts is not None, cache_enabled=False), marking(views):
        return op()


def settled(func: Any, result: Any) -> Any:
    """Wait for a collective's result: the tape has no stream that would wait for it."""
    if func.namespace == "c10d":
        for leaf in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(leaf, (Tensor, list)):
                leaf.wait()
    elif func.namespace == "_c10d_functional" and "wait_tensor" not in func.__name__:
        with below():
            for tensor in tensors_in(result):
                torch.ops._c10d_functional.wait_tensor(tensor)
    return result


def allocates(func: Any) -> bool:
    """Whether an operator only allocates: its contents are undefined, so a replay leaves them alone."""
    if func.namespace != "aten" or not func.__name__.startswith(("empty", "new_empty")):
        return False
    fills = getattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    return not (fills and torch.are_deterministic_algorithms_enabled())


def constant(tensor: Tensor) -> Callable[[], Tensor]:
    """A run that gives what a tensor, made from numbers on the host, holds now."""
    with torch.inference_mode(tensor.is_inference()), below():
        value = tensor.clone()
    return lambda: value


def refilling(
    run: Callable[[], Any], func: Any, leaves: int, outputs: Sequence[Output]
) -> Callable[[], None]:
    """Run, then copy the new results to where the recorded ones live."""
    if leaves == 1 and outputs[0].leaf == 0:
        refill = outputs[0].slot.refill

        def run_one() -> None:
            new = run()
            if not isinstance(new, Tensor):
                (new,) = tensors_in(new)
            if not refill(new):
                raise _differs(func, outputs[0], new)

        return run_one

    def run_many() -> None:
        made = list(tensors_in(run()))
        for output in outputs:
            if len(made) != leaves or not output.slot.refill(made[output.leaf]):
                raise _differs(func, output, *made)

    return run_many


def _differs(func: Any, output: Output, *made: Tensor) -> GraphifyError:
    new = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in made)
    return GraphifyError(
        f"`{func}` gave {new} at replay, and {output.slot} when it was recorded: some global state of torch that it reads has changed. Record again after such a change."
    )
