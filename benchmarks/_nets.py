"""The nets that are timed, and the inputs that they get."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["INPUTS", "LAYER_PARAMETERS", "Inputs", "layers", "mlp", "random_inputs"]

Inputs = list[tuple[Tensor, ...]]
"""Arguments that differ from call to call."""
INPUTS = 16
LAYER_PARAMETERS = 4
"""Parameters of one Linear and one LayerNorm."""


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


def mlp(device: torch.device) -> nn.Module:
    """128-256-128, the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).to(device)


def layers(depth: int, device: torch.device) -> nn.Module:
    """So many layers of width 256, the same weights each time."""
    torch.manual_seed(0)
    return Layers(depth, 256).to(device)


def random_inputs(shape: tuple[int, ...], count: int, device: torch.device) -> Inputs:
    """Sixteen calls' arguments, `count` tensors each."""
    return [tuple(torch.randn(shape, device=device) for _ in range(count)) for _ in range(INPUTS)]
