"""The case train: the module is graphed; loss, backward and gradients are the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphify import graphify

from . import _peers
from ._case import Call, Case, Ready, Way, backend_of
from ._nets import Inputs, layers, random_inputs

__all__ = ["train"]

DEPTH, BATCH, WIDTH = 24, 32, 256
CLOSE = 1e-5
"""Backward kernels may add in another order; equal ones are equal bit for bit."""
HOOKS, NONE, KEPT = VARIANTS = ("hooks", "set to None", "kept")
"""What a user does with gradients: drops them before each step and watches one, drops them, keeps adding."""


def train(device: torch.device, compiled: bool) -> Case:
    """Forward, loss and backward; the module is graphed, loss and `backward()` are the caller's."""
    inputs = random_inputs((BATCH, WIDTH), 1, device)
    title = "24 x (Linear 256, LayerNorm, GELU), batch 32: forward, loss, backward"
    ways = [_eager(variant, device) for variant in VARIANTS]
    if device.type == "cuda":
        ways.append(Way("one graph", lambda: _one_graph(inputs, device), mirrors=None))
        ways += [_graphed_callable(variant, inputs, device) for variant in VARIANTS]
    if compiled and device.type == "cuda":
        ways += [_compiled(variant, device) for variant in VARIANTS]
    ways += [_ours(variant, device) for variant in VARIANTS]
    return Case("train", title, inputs, ways, floor="one graph", grad=True)


def _eager(variant: str, device: torch.device) -> Way:
    def build() -> Ready:
        net = layers(DEPTH, device)
        return _trained(net, net, variant)

    return Way(f"eager, {variant}", build, mirrors=None)


def _graphed_callable(variant: str, inputs: Inputs, device: torch.device) -> Way:
    def build() -> Ready:
        net = _peers.graphed_callable(layers(DEPTH, device), inputs[0])
        return _trained(net, net, variant)

    return _way("make_graphed_callables", variant, build)


def _compiled(variant: str, device: torch.device) -> Way:
    def build() -> Ready:
        made: Any = _peers.compiled(layers(DEPTH, device))
        return _trained(made, made, variant)

    return _way("compile reduce-overhead", variant, build)._replace(tolerance=1e-3)


def _ours(variant: str, device: torch.device) -> Way:
    def build() -> Ready:
        net = layers(DEPTH, device)
        graphed = graphify(net, backend=backend_of(device))
        return _trained(net, graphed, variant)._replace(graphed=graphed)

    return _way("graphify", variant, build)


def _way(name: str, variant: str, build: Callable[[], Ready]) -> Way:
    rival = f"make_graphed_callables, {variant}"
    return Way(f"{name}, {variant}", build, mirrors=f"eager, {variant}", rival=rival, tolerance=CLOSE)


def _trained(net: nn.Module, forward: Call, variant: str) -> Ready:
    """The caller's side of a step around `forward`, which computes with the parameters of `net`."""
    parameters = list(net.parameters())
    fired = 0

    def dropping(x: Tensor) -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        return keeping(x)

    def keeping(x: Tensor) -> Tensor:
        loss = forward(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def count(parameter: Tensor) -> None:
        nonlocal fired
        fired += 1

    if variant == HOOKS:
        watched: Any = parameters[0]
        watched.register_post_accumulate_grad_hook(count)
    if variant == KEPT:
        _zero(parameters)
    call = keeping if variant == KEPT else dropping
    return Ready(call, seen=lambda: [torch.tensor(fired), *(parameter.grad for parameter in parameters)])


def _one_graph(inputs: Inputs, device: torch.device) -> Ready:
    """Forward, loss and backward in one graph that adds to `.grad` inside: the GPU's work and nothing else."""
    net = layers(DEPTH, device)
    _zero(list(net.parameters()))

    def forward_backward(x: Tensor) -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return Ready(_peers.by_hand(forward_backward, inputs[0])["raw replay"])


def _zero(parameters: Sequence[nn.Parameter]) -> None:
    # Not None: make_graphed_callables hands out its own memory, which a `.grad` that was None adopts.
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
