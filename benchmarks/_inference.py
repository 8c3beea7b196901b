"""The cases without gradients: mlp, deep24, multi8."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import nn

from graphify import graphify

from . import _peers
from ._case import OUTPUTS, Call, Case, Outputs, Ready, Way, backend_of
from ._nets import Inputs, layers, mlp, random_inputs

__all__ = ["deep24", "mlp_case", "multi8"]

HAND = ("raw replay", "hand-written static", "hand-written fresh", "foreach static", "foreach fresh")
COMPILED = 1e-4  # other kernels: not bit for bit


def mlp_case(device: torch.device, compiled: bool) -> Case:
    """A net so small that only dispatch counts."""
    inputs = random_inputs((64, 128), 1, device)
    return _case("mlp", "128-256-128, batch 64", mlp(device), inputs, compiled)


def deep24(device: torch.device, compiled: bool) -> Case:
    """Many small kernels, one input."""
    title = "24 x (Linear 256, LayerNorm, GELU), batch 32"
    return _case("deep24", title, layers(24, device), random_inputs((32, 256), 1, device), compiled)


def multi8(device: torch.device, compiled: bool) -> Case:
    """Many inputs, each of which has to get to where the graph reads."""
    title = "8 such layers, 8 inputs added"
    return _case("multi8", title, layers(8, device), random_inputs((32, 256), 8, device), compiled)


def _case(key: str, title: str, net: nn.Module, inputs: Inputs, compiled: bool) -> Case:
    net.eval()
    device = inputs[0][0].device
    ways = [Way("eager", lambda: Ready(net), mirrors=None)]
    if device.type == "cuda":
        ways += _by_hand(net, inputs)
        ways += _libraries(net, inputs, compiled)
    ways += _ours(net, device)
    return Case(key, title, inputs, ways)


def _by_hand(net: nn.Module, inputs: Inputs) -> Iterator[Way]:
    @functools.cache
    def made() -> dict[str, Call]:
        return _peers.by_hand(net, inputs[0])

    def build(name: str) -> Ready:
        return Ready(made()[name])

    for name in HAND:
        mirrors = None if name == "raw replay" else "eager"
        yield Way(name, functools.partial(build, name), mirrors=mirrors, rival=_rival(name))


def _libraries(net: nn.Module, inputs: Inputs, compiled: bool) -> Iterator[Way]:
    rival = "hand-written fresh"
    yield Way("make_graphed_callables", lambda: Ready(_peers.graphed_callable(net, inputs[0])), rival=rival)
    if _peers.has_tensordict():
        yield Way("tensordict", lambda: Ready(_peers.tensordict_module(net)), rival=rival)
    if compiled:
        yield Way(
            "compile reduce-overhead",
            lambda: Ready(_peers.compiled(net)),
            rival=rival,
            tolerance=COMPILED,
        )


def _ours(net: nn.Module, device: torch.device) -> Iterator[Way]:
    def made(outputs: Outputs) -> Ready:
        graphed = graphify(net, backend=backend_of(device), outputs=outputs)
        return Ready(graphed, graphed=graphed)

    for outputs in OUTPUTS:
        name = f"graphify {outputs}"
        yield Way(name, functools.partial(made, outputs), rival=_rival(name))


def _rival(name: str) -> str:
    return "" if name == "raw replay" else f"hand-written {name.rpartition(' ')[2]}"
