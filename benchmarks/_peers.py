"""What graphify is compared with: graphs made by hand, torch's own helper, tensordict, torch.compile."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._case import Call

__all__ = ["by_hand", "compiled", "graphed_callable", "has_tensordict", "tensordict_module"]


def by_hand(function: Call, example: Sequence[Tensor]) -> dict[str, Call]:
    """What a careful user writes: one graph, inputs copied with `copy_`, the result cloned or not.

    With several inputs the better hand-written way is one foreach copy, so there are both.
    """
    static = [x.clone() for x in example]
    graph, out = _captured(function, static)

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

    return {
        "raw replay": raw,
        "hand-written static": copied,
        "hand-written fresh": lambda *inputs: copied(*inputs).clone(),
        "foreach static": foreach,
        "foreach fresh": lambda *inputs: foreach(*inputs).clone(),
    }


def _captured(function: Call, static: Sequence[Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Three warm-up calls on a side stream and a capture, as the documentation of torch has it."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*static)
    return graph, out


def graphed_callable(net: nn.Module, example: Sequence[Tensor]) -> nn.Module:
    """`torch.cuda.make_graphed_callables`, on a copy since it replaces `forward`."""
    make: Callable[..., Any] = torch.cuda.make_graphed_callables
    with torch.enable_grad():
        graphed: nn.Module = make(copy.deepcopy(net), tuple(x.clone() for x in example))
    return graphed


def has_tensordict() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("tensordict") is not None


def tensordict_module(net: nn.Module) -> Call:
    """`tensordict.nn.CudaGraphModule`: results are clones."""
    made: Call = importlib.import_module("tensordict.nn").CudaGraphModule(net)
    return made


def compiled(net: nn.Module) -> Call:
    """`torch.compile` with CUDA graphs of its own."""
    made: Call = torch.compile(copy.deepcopy(net), mode="reduce-overhead")
    return made
