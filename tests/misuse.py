"""What the tests of wrong uses share: one use per row, what it must raise, and what must work after it."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from graphify import graphify, handle


class Use(NamedTuple):
    """A wrong use: its name, its code, and the type and parts of the text of the error that it must raise."""

    name: str
    code: Callable[[Bench], object]
    error: type[Exception]
    says: str | tuple[str, ...]


def rows(*uses: Use) -> Any:
    """The test once per row of a table."""
    return pytest.mark.parametrize("use", uses, ids=[use.name for use in uses])


def scaled(x: Tensor, scale: float = 2.0, *, shift: Tensor | None = None) -> Tensor:
    return x * scale if shift is None else x * scale + shift


class Bench:
    """Wrappers that a wrong use gets hold of; afterwards the same ones must do what eager does."""

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend, self.device = backend, device
        self.graphed: Any = graphify(scaled, backend=backend)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
        self.model: Any = graphify(self.net, backend=backend)
        self.calls = 0

    def data(self, *shape: int, **options: Any) -> Tensor:
        """Numbers that no random stream gives, other ones at each time."""
        self.calls += 1
        count = torch.Size(shape or (3,)).numel()
        made = torch.arange(count, dtype=torch.float32, device=self.device).sin().reshape(shape or (3,))
        return (made + self.calls).requires_grad_(options.get("requires_grad", False))

    def graphify(self, target: Any, **options: Any) -> Any:
        return graphify(target, backend=self.backend, **options)

    def run(self, function: Callable[..., Any], *arguments: Any, times: int = 4, **options: Any) -> Any:
        """Calls of a function graphed for this; the first argument is new data where none is given."""
        graphed = self.graphify(function, **options)
        for _ in range(times):
            result = graphed(*(arguments or (self.data(2, 3),)))
        return result

    def works(self) -> None:
        """Right calls of the same wrappers are what eager makes of them, and some are replays."""
        before = handle(self.graphed).stats().replays, handle(self.model).stats().replays
        for _ in range(4):
            x, shift = self.data(), self.data()
            assert torch.equal(self.graphed(x, shift=shift), scaled(x, shift=shift))
            self.trains()
        after = handle(self.graphed).stats().replays, handle(self.model).stats().replays
        assert after[0] >= before[0] + 2
        assert after[1] >= before[1] + 2

    def trains(self) -> None:
        """The model's results and gradients are eager's."""
        x, found = self.data(2, 3), []
        for model in (self.net, self.model):
            result = model(x)
            found.append([result, *torch.autograd.grad(result.square().sum(), list(self.net.parameters()))])
        assert all(map(torch.equal, *found))


def ambient() -> list[Any]:
    """What a wrong use leaves as it was, beside what every test does."""
    modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()]
    streams = [torch.get_rng_state().tolist(), random.getstate()]
    if torch.cuda.is_available():
        streams.append(torch.cuda.get_rng_state().tolist())
    return [*modes, *streams]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """TimeoutError where the body takes longer; waits without a limit where there are no such signals."""

    def late(*arguments: Any) -> None:
        raise TimeoutError(f"still busy after {seconds} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    usual = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)


def misused(use: Use, bench: Bench) -> None:
    """The use raises what its row says and leaves nothing, on fresh wrappers and on those that replay."""
    with within(60):
        for _ in range(2):
            before = ambient()
            with pytest.raises(use.error) as raised:
                use.code(bench)
            for part in (use.says,) if isinstance(use.says, str) else use.says:
                assert part in str(raised.value)
            assert ambient() == before
            bench.works()
