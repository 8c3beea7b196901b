"""Graph a function and a module, compare both with eager, and see what happened.

Runs on a GPU, and on a CPU by the tape backend: python examples/quickstart.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphify import graphify, handle

gpu = torch.cuda.is_available()
device, backend = ("cuda", "cuda") if gpu else ("cpu", "tape")


def scaled_softmax(x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Return probabilities and the best index for x (batch, classes)."""
    scores = x * scale if mask is None else (x * scale).masked_fill(mask, float("-inf"))
    return {"probabilities": scores.softmax(-1), "best": scores.argmax(-1)}


def main() -> None:
    """Call a function and a module five times each, with new inputs."""
    torch.manual_seed(0)
    graphed = graphify(scaled_softmax, backend=backend)
    with torch.inference_mode():
        for _ in range(5):
            x = torch.randn(4, 10, device=device)
            expected, actual = scaled_softmax(x, scale=0.5), graphed(x, scale=0.5)
            assert all(torch.equal(expected[key], actual[key]) for key in expected)
    print(graphed.report())

    net = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 10)).to(device).eval()
    model = graphify(net, backend=backend)
    with torch.inference_mode():
        for _ in range(5):
            x = torch.randn(4, 10, device=device)
            assert torch.equal(net(x), model(x))
    print(handle(model).report())

    for name, stats in (("function", graphed.stats()), ("module", handle(model).stats())):
        assert (stats.warmups, stats.captures, stats.replays) == (1, 1, 3), stats
        print(f"{name}: {stats.replays} of {stats.calls} calls were replays, and all equalled eager")


if __name__ == "__main__":
    main()
