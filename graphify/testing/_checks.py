"""Arguments of the testing helpers are checked where they are given, and an error says which one is wrong."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

import torch

__all__ = ["check_callable", "check_count", "check_counts", "check_kind", "check_one_of", "check_place"]


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """TypeError unless the value is of one of these kinds."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, not {reprlib.repr(value)}")


def check_callable(
    name: str, value: object, wanted: str, others: tuple[object, ...] = (None,), *, classes: bool = True
) -> None:
    """TypeError unless the value can be called, or is one of these others; a module is no such function."""
    if any(value is other for other in others):
        return
    if not callable(value) or isinstance(value, torch.nn.Module) or (isinstance(value, type) and not classes):
        raise TypeError(f"{name} must be {wanted}, not {reprlib.repr(value)}")


def check_count(name: str, value: object, least: int = 0, most: int | None = None) -> None:
    """An error unless the value is a whole number, at least and at most so large."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {reprlib.repr(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, not {value}")


def check_counts(function: str, counts: Mapping[str, Any], least: int = 0) -> None:
    """The same for a smallest and a largest number, in this order."""
    for name, value in counts.items():
        check_count(f"{function}: {name}", value, least)
    (low, start), (high, stop) = counts.items()
    if start > stop:
        raise ValueError(f"{function}: {low} must be at most {high}, not {start} and {stop}")


def check_one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """ValueError unless the value is one of these words."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {reprlib.repr(value)}")


def check_place(name: str, device: object) -> torch.device:
    """The device of this name; ValueError where there is none that holds values."""
    try:
        place = torch.device(device)  # type: ignore[call-overload]
        torch.empty(0, device=place)
    except (AssertionError, RuntimeError, TypeError) as error:  # as torch says it
        raise ValueError(f"{name}: no device {reprlib.repr(device)}: {str(error).splitlines()[0]}") from error
    if place.type == "meta":
        raise ValueError(f"{name}: tensors on the meta device have no values to compare")
    assert isinstance(place, torch.device)
    return place
