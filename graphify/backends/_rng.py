"""Random streams of torch generators: saved, put back, and watched while a run is recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .._undo import below

__all__ = ["RngState", "Streams", "rng_state", "set_rng_state"]

RngState = list[tuple[torch.Generator, Tensor]]


def rng_state(generators: Iterable[torch.Generator]) -> RngState:
    """The states of these generators and of the CPU's default one."""
    every = {id(g): g for g in (torch.default_generator, *generators)}
    return [(generator, generator.get_state()) for generator in every.values()]


def set_rng_state(state: RngState) -> None:
    """Put the states back."""
    for generator, saved in state:
        generator.set_state(saved)


class Streams:
    """CPU generators during one run: where they began, and who moves them, an operator or the host."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._start: RngState = []
        self._now: dict[int, Tensor] = {}
        for generator in (torch.default_generator, *generators):
            self.add(generator)

    def add(self, generator: torch.Generator) -> None:
        """Watch one more generator, from here on."""
        if generator.device.type == "cpu" and id(generator) not in self._now:
            state = generator.get_state()
            self._start.append((generator, state))
            self._now[id(generator)] = state

    def moved(self) -> bool:
        """Whether any generator has another state than when this was last asked."""
        moved = False
        for generator, _ in self._start:
            state = generator.get_state()
            with below():
                same = torch.equal(state, self._now[id(generator)])
            if not same:
                self._now[id(generator)] = state
                moved = True
        return moved

    def restore(self) -> None:
        """Put every generator back to where it began."""
        set_rng_state(self._start)
