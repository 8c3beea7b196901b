"""What the tests of whole training steps share: nets, optimizers, and all that a step leaves."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import counts
from torch import Tensor, nn
from torch.optim import Optimizer
from training import mlp

from graphify import CaptureError, graphify, handle

READS = "a graph replays device work only; the host cannot read a value in the middle of it"
ONCE = "Python runs when a graph is recorded; a replay repeats device work only"
REPLAYS = 6
ALL_REPLAYED = (1, 1, REPLAYS, 0, 0)


def sgd(parameters: Any, device: torch.device, **options: Any) -> Optimizer:
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})


def counting(kind: type[Any], parameters: Any, device: torch.device, **options: Any) -> Optimizer:
    """An optimizer that counts its steps on the device: its fused form on a CPU, its capturable one elsewhere."""
    how = {"fused": True} if device.type == "cpu" else {"capturable": True}
    return kind(parameters, **{"lr": 0.01, **how, **options})


def adamw(parameters: Any, device: torch.device, **options: Any) -> Optimizer:
    return counting(torch.optim.AdamW, parameters, device, fused=True, **options)


MAKERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda ps, d: torch.optim.SGD(ps, lr=0.1),
    "SGD momentum": sgd,
    "SGD nesterov": functools.partial(sgd, nesterov=True),
    "SGD decay": functools.partial(sgd, weight_decay=0.1),
    "SGD fused": functools.partial(sgd, weight_decay=0.1, fused=True),
    "SGD foreach": functools.partial(sgd, foreach=True),
    "Adam": functools.partial(counting, torch.optim.Adam),
    "AdamW": functools.partial(counting, torch.optim.AdamW),
    "Adam fused": functools.partial(counting, torch.optim.Adam, fused=True, weight_decay=0.1),
    "AdamW fused": adamw,
    "AdamW amsgrad": functools.partial(adamw, amsgrad=True, maximize=True),
}


def batches(device: torch.device, count: int = REPLAYS + 2, *shape: int) -> list[Tensor]:
    return [torch.randn(*(shape or (4, 3)), device=device) for _ in range(count)]


def loss_of(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return net(x).square().mean()


def left(*owners: Any) -> list[Any]:
    """Copies of all that a step may leave: parameters, `.grad`, buffers, state of optimizers, random streams."""
    found = [_left(owner) for owner in owners]
    streams = [torch.get_rng_state()]
    if torch.cuda.is_available():
        streams.append(torch.cuda.get_rng_state())
    return [*found, streams]


def _left(owner: Any) -> Any:
    if isinstance(owner, nn.Module):
        parameters = [(p.detach().clone(), p.requires_grad, _copied(p.grad)) for p in owner.parameters()]
        return parameters, [b.clone() for b in owner.buffers()]
    if isinstance(owner, Tensor):
        return owner.detach().clone(), _copied(owner.grad)
    return copy.deepcopy(owner.state_dict())


def _copied(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.clone()


def plain_step(net: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def closure_step(net: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, x)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return step


def pair(device: torch.device, make: Callable[..., Optimizer] = sgd) -> tuple[nn.Module, Optimizer]:
    net = mlp(device)
    return net, make(net.parameters(), device)


def recordings(graphed: Any) -> int:
    return handle(graphed).stats().recordings


def replayed(graphed: Any, least: int) -> None:
    """No call was eager or failed, and at least so many were replays."""
    stats = handle(graphed).stats()
    assert (stats.eager, stats.errors) == (0, 0), stats
    assert stats.replays >= least, stats


def refused(step: Callable[..., Any], calls: list[Any], backend: str) -> CaptureError:
    """The error that the last of these calls raises; those before go well."""
    graphed = graphify(step, backend=backend)
    for call in calls[:-1]:
        graphed(*call)
    for _ in range(2):  # again, for a refusal is remembered
        with pytest.raises(CaptureError) as raised:
            graphed(*calls[-1])
    assert counts(graphed)[1:] == (0, 0, 0, 2)
    return raised.value


class Opaque:
    """Keeps a value where no walk over attributes finds it."""

    __slots__ = ("_call",)

    def __init__(self, value: Any) -> None:
        self._call = iter([value, value]).__reduce__  # the value is in C only

    def get(self) -> Any:
        return self._call()[1][0][0]


def noisy(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2)).to(
        device
    )
