"""Train with one graphed function that does the whole step: forward, loss, backward, clipping, AdamW.

Runs on a GPU, and on a CPU by the tape backend, which shows equal numbers and no speed: python examples/train_step.py
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphify import graphify

gpu = torch.cuda.is_available()
device = "cuda" if gpu else "cpu"
STEPS, DEPTH, CLASSES = 60, 6, 10
BATCH, WIDTH = (64, 256) if gpu else (32, 32)


def network() -> nn.Module:
    """Layers that are small, so that eager training waits for Python."""
    hidden = [
        part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
    ]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Points (batch, width) and the one of ten directions that each lies along most."""
    source = torch.Generator().manual_seed(1)
    directions = torch.randn(WIDTH, CLASSES, generator=source)
    points = [torch.randn(BATCH, WIDTH, generator=source) for _ in range(STEPS)]
    return [(x.to(device), (x @ directions).argmax(-1).to(device)) for x in points]


def train(graphed: bool) -> tuple[list[float], list[float], list[Tensor]]:
    """Give the losses, the seconds of each step, and the parameters at the end."""
    torch.manual_seed(0)
    net = network().to(device)
    # capturable: the optimizer counts its steps on the device. fused: it takes a learning rate from there as well.
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, capturable=True, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=STEPS, cycle_momentum=False
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()  # without detach() the loss would ask for another backward

    run = graphify(step, backend="cuda" if gpu else "tape")  # the one line; or write @graphify above step
    losses, seconds = [], []
    for x, y in batches():
        start = time.perf_counter()
        loss = run(x, y) if graphed else step(x, y)
        schedule.step()  # a new learning rate at each step, and no new graph for it
        losses.append(loss.item())  # waits for the GPU, so that the time is that of the whole step
        seconds.append(time.perf_counter() - start)
    if graphed:
        print(run.report())
        assert run.stats().replays >= STEPS - 10, run.stats()
    return losses, seconds, [parameter.detach() for parameter in net.parameters()]


def main() -> None:
    """Train twice from one seed, eagerly and graphed."""
    torch.set_num_threads(1)  # the tensors are small: on a CPU more threads only cost time
    expected, slow, left = train(graphed=False)
    actual, fast, right = train(graphed=True)
    assert actual == expected, max(abs(a - b) for a, b in zip(actual, expected, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))
    print(
        f"{STEPS} steps, loss {expected[0]:.3f} to {expected[-1]:.3f}: losses and parameters equalled eager"
    )
    print(f"per step: eager {median(slow) * 1e3:.2f} ms, graphed {median(fast) * 1e3:.2f} ms")
    if not gpu:
        print("this was the tape on a CPU: speed needs a GPU")


if __name__ == "__main__":
    main()
