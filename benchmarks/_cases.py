"""The nets that are timed, and the ways to call each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphify import graphify

__all__ = ["Case", "Way", "all_cases", "ways_of"]

Call = Callable[..., Tensor]
INPUTS = 16


class Case(NamedTuple):
    """A net and inputs that differ from call to call."""

    name: str
    net: nn.Module
    inputs: list[tuple[Tensor, ...]]


class Way(NamedTuple):
    """One way to call a net; `graphed` is the wrapper where graphify makes the call."""

    name: str
    call: Call
    graphed: Any = None


class Layers(nn.Module):
    """So many times Linear, LayerNorm, GELU; several inputs are added first."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        parts = [(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)]
        self.layers = nn.Sequential(*(part for triple in parts for part in triple))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Take tensors (batch, width) and give one like them."""
        total = inputs[0]
        for one in inputs[1:]:
            total = total + one
        result: Tensor = self.layers(total)
        return result


def all_cases(device: torch.device) -> list[Case]:
    """The three cases of which dispatch is the point."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    return [
        _case("mlp: 128-256-128, batch 64", mlp, (64, 128), 1, device),
        _case("deep24: 24 x (Linear 256, LayerNorm, GELU), batch 32", Layers(24, 256), (32, 256), 1, device),
        _case("multi8: 8 such layers, 8 inputs added", Layers(8, 256), (32, 256), 8, device),
    ]


def _case(name: str, net: nn.Module, shape: tuple[int, ...], count: int, device: torch.device) -> Case:
    inputs = [tuple(torch.randn(shape, device=device) for _ in range(count)) for _ in range(INPUTS)]
    return Case(name, net.eval().to(device), inputs)


def ways_of(case: Case, device: torch.device) -> list[Way]:
    """Eager, by hand (on CUDA), and graphify with either output policy."""
    by_hand = _by_hand(case) if device.type == "cuda" else []
    backend: Any = "cuda" if device.type == "cuda" else "tape"
    fresh = graphify(case.net, backend=backend)
    static = graphify(case.net, backend=backend, outputs="static")
    return [
        Way("eager", case.net),
        *by_hand,
        Way("graphify fresh", fresh, fresh),
        Way("graphify static", static, static),
    ]


def _by_hand(case: Case) -> list[Way]:
    """What a careful user writes: one graph, inputs copied with `copy_`, the result cloned or not.

    With several inputs the better hand-written way is one foreach copy, so both are timed.
    """
    static = [x.clone() for x in case.inputs[0]]
    graph, out = _captured(case.net, static)

    def raw(*inputs: Tensor) -> Tensor:
        graph.replay()
        return out

    def copied(*inputs: Tensor) -> Tensor:
        for target, source in zip(static, inputs, strict=True):
            target.copy_(source)
        graph.replay()
        return out

    def foreach(*inputs: Tensor) -> Tensor:
        torch._foreach_copy_(static, inputs)
        graph.replay()
        return out

    return [
        Way("raw replay", raw),
        Way("hand-written static", copied),
        Way("hand-written fresh", lambda *inputs: copied(*inputs).clone()),
        Way("foreach static", foreach),
        Way("foreach fresh", lambda *inputs: foreach(*inputs).clone()),
    ]


def _captured(net: nn.Module, static: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            net(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out: Tensor = net(*static)
    return graph, out
