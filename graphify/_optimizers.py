"""Optimizers inside a run: which ones step, and which cannot be captured."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ._ambient import dispatch_modes
from ._code import Executed
from ._lifted import Lifted, OnDevice
from ._places import Change
from .errors import CaptureError

__all__ = ["SCHEDULES", "UnbuiltError", "refusal_of", "refused_change", "refused_code", "steps"]

_READS = "a graph replays device work only; the host cannot read a value in the middle of it"
_ONCE = "Python runs when a graph is recorded; a replay repeats device work only"
_BAKED = "it keeps its step count on the host, where a replay cannot count"
_HOST_ONLY = {"Adafactor", "LBFGS", "SparseAdam"}
_COUNTING = {"ASGD", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam"}
_FUSED = {"Adagrad", "Adam"}


class UnbuiltError(CaptureError):
    """A step that built the optimizer's state: the next one can be captured."""


# -- finding


@contextmanager
def steps(lifted: Lifted | None = None) -> Iterator[list[Optimizer]]:
    """Note each optimizer that steps inside the body, on this thread or in the hooks of a backward that it runs.

    Where one has tensors among its options, its step runs with these kept on the device: torch itself would
    read some of them on the host. `lifted` are the numbers that are such tensors for this run only.
    """
    thread, modes, found = threading.get_ident(), dispatch_modes(), list[Optimizer]()
    entered: list[OnDevice | None] = []

    def here() -> bool:
        """A device's backward runs its hooks on a thread of its own, below the modes of the thread that asked for it."""
        return threading.get_ident() == thread or (
            bool(modes) and any(m is modes[-1] for m in dispatch_modes())
        )

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not here():
            return
        if all(optimizer is not known for known in found):
            found.append(optimizer)
        mode = OnDevice(lifted) if _has_tensors(optimizer) else None
        entered.append(mode)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if here():
            leave()

    def leave() -> None:
        mode = entered.pop() if entered else None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        while entered:  # of steps that raised
            leave()


def _has_tensors(optimizer: Optimizer) -> bool:
    options = (value for g in optimizer.param_groups for key, value in g.items() if key != "params")
    return any(isinstance(v, Tensor) or (isinstance(v, tuple) and _has_tensor(v)) for v in options)


def _has_tensor(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, Tensor) for value in values)


# -- what cannot be captured


def refusal_of(optimizer: Optimizer, device: torch.device) -> CaptureError | None:
    """Why a graph on `device` cannot hold this optimizer's step, or None when nothing is known against it."""
    name, kind = _step_of(optimizer), type(optimizer).__name__
    if name in _HOST_ONLY:
        return CaptureError(
            f"`{kind}` decides on the host how to step",
            why=_READS,
            fix=f"step it outside the graphed function, or use another optimizer: {_replacement(device)}",
        )
    for group in optimizer.param_groups:
        if _counts_on_host(name, group, device):
            fix = _remedy(kind, name, group, device)
            return CaptureError(f"`{kind}` counts its steps on the host", why=_BAKED, fix=fix)
    return None


def _step_of(optimizer: Optimizer) -> str | None:
    """The class of torch's whose `step` this optimizer has, or None for one of the user's."""
    step = inspect.unwrap(type(optimizer).step)
    return step.__qualname__.partition(".")[0] if step.__module__.startswith("torch.optim.") else None


def _counts_on_host(name: str | None, group: dict[str, Any], device: torch.device) -> bool:
    if device.type != "cpu" and "capturable" in group:
        # torch asks for the flag in a capture, also of a fused optimizer, which could do without.
        return not group["capturable"]
    return name in _COUNTING and not group.get("fused")


def _remedy(kind: str, name: str | None, group: dict[str, Any], device: torch.device) -> str:
    if device.type != "cpu" and "capturable" in group:
        return f"`torch.optim.{kind}(..., {'fused=True, ' if group.get('fused') else ''}capturable=True)`"
    if name in _FUSED:
        return f"`torch.optim.{kind}(..., fused=True)`"
    return f"an optimizer that counts on the device: {_replacement(device)}"


def _replacement(device: torch.device) -> str:
    return f"`torch.optim.AdamW(..., fused=True{'' if device.type == 'cpu' else ', capturable=True'})`"


def refused_code(executed: Executed) -> CaptureError | None:
    """What a run's code did around its optimizers that a graph cannot hold, or None."""
    for code, _ in executed.codes.values():
        if code.co_name == "step" and code.co_filename == SCHEDULES:
            return CaptureError(
                "a learning-rate schedule is stepped inside",
                why=_ONCE,
                fix="`scheduler.step()` after the call of the graphed function",
            )
    if id(_ASKS_SCALER) in executed.codes:
        return CaptureError(
            "`GradScaler.step` reads on the host whether the gradients are finite",
            why=_READS,
            fix="a fused optimizer, which skips on the device: "
            "`torch.optim.AdamW(..., fused=True, capturable=True)`, `torch.optim.SGD(..., fused=True)`",
        )
    return None


SCHEDULES = torch.optim.lr_scheduler.LRScheduler.step.__code__.co_filename
_ASKS_SCALER = getattr(getattr(GradScaler, "_maybe_opt_step", None), "__code__", None)


def refused_change(change: Change, optimizers: Iterable[tuple[str, Optimizer]]) -> CaptureError | None:
    """The words for what a run changed in an optimizer, or None when it is another change."""
    for name, optimizer in optimizers:
        if change.place.kind == "bulk" and change.place.name == f"{name}.state":
            return UnbuiltError(
                f"`{name}` builds its state in this step",
                why="a replay would build it anew each time",
                fix="take one step before the capture",
            )
        if any(change.place.container is group for group in optimizer.param_groups):
            return CaptureError(
                f"`{change.place.name}` changes inside",
                why=_ONCE,
                fix="change it after the call of the graphed function",
            )
    return None
