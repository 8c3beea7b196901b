"""Which of an optimizer's numbers are tensors in recordings, because they change from call to call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from ._entry import Refusal
from ._lifted import can_lift, unliftable
from ._places import Place

__all__ = ["Numbers"]

_VALUES = 2


class Numbers:
    """What one wrapper learned of the floats in `param_groups`: those that changed, and those that must be values."""

    def __init__(self) -> None:
        self._lifted: set[Any] = set()
        self._values: Counter[Any] = Counter()
        self._fixed: set[Any] = set()
        self._refusal: Refusal | None = None

    def lift(self, place: Place, device: torch.device, *, read: bool) -> bool:
        """A number has changed; whether recordings have a tensor in its place from now on.

        Where the user's own code reads such numbers (`read`), a tensor would not compute as the float does.
        """
        if place.id not in self._fixed and not read and can_lift(place, device):
            self._lifted.add(place.id)
            return True
        self._fixed.add(place.id)
        self._values[place.id] += 1
        if self._values[place.id] > _VALUES:
            self._refusal = Refusal("uncapturable", unliftable(place))
        return False

    def lifted(self, places: Iterable[Place]) -> list[Place]:
        """Those of the places that are tensors in recordings."""
        return [place for place in places if place.id in self._lifted]

    def give_up(self, places: Iterable[Place]) -> bool:
        """A recording with tensors failed; whether there were any, which are values from now on."""
        found = {place.id for place in self.lifted(places)}
        self._lifted -= found
        self._fixed |= found
        return bool(found)

    def refusal(self) -> Refusal | None:
        """Why no more graphs are made: a number that must be a value keeps changing."""
        return self._refusal
