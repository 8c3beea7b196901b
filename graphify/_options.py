"""How a wrapper works, and the switches that turn every wrapper off."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from ._binding import Binder
from ._padding import Fills, Pad
from ._pool import GraphPool
from ._specification import Specification, specification
from .buckets import Buckets

__all__ = ["BACKENDS", "Options", "disabled", "off_everywhere", "sizes_wanted", "switch"]

BACKENDS = ("auto", "cuda", "tape", "eager")


def off_everywhere() -> bool:
    """Whether the environment turns all graphs off."""
    return os.environ.get("GRAPHIFY_DISABLE", "") not in ("", "0")


class _Switch(threading.local):
    off = off_everywhere()
    """Whether `disabled()` or the environment asks this thread for plain functions."""


switch = _Switch()
_VERIFY = os.environ.get("GRAPHIFY_VERIFY", "") or "0"
if not _VERIFY.isdecimal():
    raise ValueError(f"GRAPHIFY_VERIFY is the number of replays per graph to verify, not {_VERIFY!r}")


@dataclass(frozen=True)
class Options:
    """How a wrapper works; `graphify` says what each option means."""

    buckets: Buckets = None
    pad: Pad = None
    check_padding: bool | Literal["outputs"] = True
    static_args: tuple[str, ...] = ()
    outputs: Literal["fresh", "static"] = "fresh"
    warmup: int = 1
    fallback: Literal["raise", "eager"] = "raise"
    max_graphs: int | None = 64
    max_bytes: int | None = None
    verify: int = 0
    pool: GraphPool | None = None
    backend: Literal["auto", "cuda", "tape", "eager"] = "auto"

    def __post_init__(self) -> None:
        _one_of("outputs", self.outputs, ("fresh", "static"))
        _one_of("fallback", self.fallback, ("raise", "eager"))
        _one_of("backend", self.backend, BACKENDS)
        _count("warmup", self.warmup)
        _count("verify", self.verify, least=0)
        if self.max_graphs is not None:
            _count("max_graphs", self.max_graphs)
        if self.max_bytes is not None:
            _count("max_bytes", self.max_bytes)
        _one_of("check_padding", self.check_padding, (True, False, "outputs"))
        object.__setattr__(self, "static_args", _names("static_args", self.static_args))
        if self.buckets is None and self.pad is not None:
            raise ValueError(
                "pad is for padded sizes, and there are no buckets. Write buckets=..., or leave pad out."
            )
        if self.pool is not None and not isinstance(self.pool, GraphPool):
            raise TypeError(f"pool must be a GraphPool or None, not {self.pool!r}")

    @property
    def verified(self) -> int:
        """How many replays of each graph are verified, asked for here or in the environment."""
        return max(self.verify, int(_VERIFY))


def _names(name: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        raise TypeError(f"{name} must be a sequence of argument names, not a str. Write {name}=({given!r},).")
    if not isinstance(given, Iterable) or not all(isinstance(each, str) for each in given):
        raise TypeError(f"{name} must be a sequence of argument names, not {given!r}")
    return tuple(given)


def _one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def _count(name: str, value: object, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


@contextmanager
def disabled() -> Iterator[None]:
    """Run every graphed callable on this thread as the plain function, while inside.

    Example:
        >>> with disabled():
        ...     y = model(x)     # eager, whatever was captured

    Works as a decorator too. `GRAPHIFY_DISABLE=1` in the environment does the same for the whole process.
    """
    before = switch.off
    switch.off = True
    try:
        yield
    finally:
        switch.off = before


def sizes_wanted(options: Options, binder: Binder) -> tuple[Specification | None, Fills]:
    """The options that speak of sizes, checked against the arguments.

    Raises:
        TypeError, ValueError: what is wrong at which argument, and the right form.
    """
    for name in options.static_args:
        if name not in binder.names and binder.stars is None:
            known = ", ".join(binder.names) or "none"
            raise ValueError(f"static_args: there is no argument `{name}`; the arguments are: {known}.")
    wanted = specification(options.buckets, binder.names, stars=binder.stars, static=options.static_args)
    return wanted, Fills(options.pad, binder.names, stars=binder.stars)
