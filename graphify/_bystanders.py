"""Optimizers in reach that a run has nothing to do with: another thread may train with them meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from ._optimizers import SCHEDULES
from ._places import Bulk, Place, hyperparameters
from ._touched import Touched

__all__ = ["Bystanders"]

_NAMES = frozenset(
    {"param_groups", "state", "state_dict", "load_state_dict", "add_param_group", "__dict__", "vars"}
)
"""By these code may come to what an optimizer holds although it does not step."""


class Bystanders:
    """Those of some optimizers with whose state and options a run can have had nothing to do, as far as that shows.

    A step, or `zero_grad`, asks for the `.grad` of each parameter.
    """

    def __init__(self, optimizers: Iterable[tuple[str, Optimizer]], touched: Touched) -> None:
        apart = not touched.everything and _by_steps_alone(touched)
        found = [
            (name, optimizer) for name, optimizer in optimizers if apart and not _met(optimizer, touched)
        ]
        self._found = {id(optimizer) for _, optimizer in found}
        self._held = {id(held) for _, optimizer in found for held in _held(optimizer)}
        self.places = {place.id for name, optimizer in found for place in hyperparameters(optimizer, name)}
        """Of their options and their state, for a guard to leave out."""
        self.places |= {(id(optimizer.state), None) for _, optimizer in found}

    def include(self, optimizer: Optimizer) -> bool:
        """Whether this is one of them."""
        return id(optimizer) in self._found

    def hold(self, container: Any) -> bool:
        """Whether this container, or content that is compared as a whole, belongs to one of them."""
        return id(container.holder if isinstance(container, Bulk) else container) in self._held

    def own(self, place: Place) -> bool:
        """Whether a place does."""
        return self.hold(place.container)


def _by_steps_alone(touched: Touched) -> bool:
    """Whether the code of a run that was watched shows no other way to an optimizer's insides than its own methods."""
    mine = [name for executed in touched.executed for name in _NAMES & executed.user_names()]
    schedules = (c.co_filename == SCHEDULES for e in touched.executed for c, _ in e.codes.values())
    return bool(touched.executed) and not mine and not any(schedules)


def _met(optimizer: Optimizer, touched: Touched) -> bool:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return not params or any(id(param) in touched.before for param in params)


def _held(optimizer: Optimizer) -> Iterable[Any]:
    groups = optimizer.param_groups
    return (optimizer.__dict__, optimizer.state, groups, *groups, *(group["params"] for group in groups))
