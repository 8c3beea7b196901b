"""The case step: forward, loss, backward and optimizer in one graphed function."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from graphify import graphify

from . import _peers
from ._case import OUTPUTS, Call, Case, Outputs, Ready, Way, backend_of
from ._nets import Inputs, layers, random_inputs

__all__ = ["step"]

HAND = ("raw replay", "hand-written static", "hand-written fresh")
CLOSE = 1e-5
"""Equal kernels are equal bit for bit; others may add in another order."""


class Trainer(NamedTuple):
    """A training step and what it changes."""

    step: Call
    net: nn.Module
    optimizer: torch.optim.Optimizer

    def parameters(self) -> list[Tensor]:
        """As they are now."""
        return [parameter.detach() for parameter in self.net.parameters()]


def step(device: torch.device, compiled: bool) -> Case:
    """One function makes the whole step; `compiled` asks for nothing here."""
    inputs = random_inputs((32, 256), 2, device)
    title = "24 x (Linear 256, LayerNorm, GELU), batch 32: forward, loss, backward, AdamW in one function"
    ways = [Way("eager", functools.partial(_eager, device), mirrors=None)]
    if device.type == "cuda":
        ways += [_way(name, functools.partial(_by_hand, name, inputs)) for name in HAND]
    ways += [_way(f"graphify {outputs}", functools.partial(_ours, outputs, device)) for outputs in OUTPUTS]
    return Case("step", title, inputs, ways, grad=True)


def _way(name: str, build: functools.partial[Ready]) -> Way:
    if name == "raw replay":
        return Way(name, build, mirrors=None)
    return Way(name, build, rival=f"hand-written {name.rpartition(' ')[2]}", tolerance=CLOSE)


def _trainer(device: torch.device) -> Trainer:
    """The same weights each time."""
    net = layers(24, device)
    on_gpu = device.type == "cuda"
    # On a CPU only the fused form reads nothing on the host.
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=1e-3, capturable=on_gpu, fused=None if on_gpu else True
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = (net(x) - y).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return Trainer(step, net, optimizer)


def _eager(device: torch.device) -> Ready:
    trainer = _trainer(device)
    return Ready(trainer.step, trainer.parameters)


def _by_hand(name: str, inputs: Inputs) -> Ready:
    """A graph of its own for each way, since each call moves the weights."""
    trainer = _trainer(inputs[0][0].device)
    before = [parameter.clone() for parameter in trainer.parameters()]
    call = _peers.by_hand(trainer.step, inputs[0])[name]
    _start_again(trainer, before)
    return Ready(call, trainer.parameters)


def _start_again(trainer: Trainer, parameters: list[Tensor]) -> None:
    """Undo what the warm-up calls of a capture by hand did, at the addresses that the graph reads."""
    for now, before in zip(trainer.parameters(), parameters, strict=True):
        now.copy_(before)
    for state in trainer.optimizer.state.values():
        for value in state.values():
            value.zero_()


def _ours(outputs: Outputs, device: torch.device) -> Ready:
    trainer = _trainer(device)
    graphed = graphify(trainer.step, backend=backend_of(device), outputs=outputs)
    return Ready(graphed, trainer.parameters, graphed)
