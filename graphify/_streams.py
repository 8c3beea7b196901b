"""Objects that give something else at each asking: iterators, and random generators of the host."""

from __future__ import annotations

import functools
import io
import itertools
import random
import sys
from collections.abc import Callable
from types import GeneratorType
from typing import Any, NamedTuple

__all__ = [
    "BLIND",
    "FILES",
    "GENERATORS",
    "ITERATORS",
    "Stream",
    "numpy_stream",
    "random_stream",
    "rewinding",
    "used_up",
]

_ROWS: tuple[Any, ...] = ([], (), "", "\u00e9", b"")
ITERATORS = (*{type(iter(row)) for row in _ROWS}, type(reversed([])))
"""Those that tell how far they have come, and can be put back."""

_LAZY = [
    kind for kind in vars(itertools).values() if isinstance(kind, type) and kind.__module__ == "itertools"
]
_LAZY.remove(itertools.repeat)  # which has the same at each asking
_VIEWS: tuple[Any, ...] = ({}, {}.values(), {}.items(), set(), range(0), range(2**70))
_TURNED: tuple[Any, ...] = ({}, {}.values(), {}.items())
BLIND: tuple[Any, ...] = (
    *_LAZY,
    *(enumerate, filter, map, reversed, zip, GeneratorType, type(iter(int, 1))),
    *(type(iter(view)) for view in _VIEWS),
    *(type(reversed(view)) for view in _TURNED),
    random.SystemRandom,
)
"""Those of which nobody can tell how far they have come, or that nobody can put back; randomness of the system, too."""

FILES = (io.TextIOWrapper, io.BufferedReader, io.FileIO)
GENERATORS = random.Random


def used_up(value: Any) -> bool:
    """Whether a file can give something and take nothing: one that is written is the user's."""
    return not value.closed and bool(value.readable()) and not value.writable()


def rewinding(iterator: Any) -> Callable[[], Any]:
    """What puts an iterator back to where it is now."""
    _, _, *position = (*iterator.__reduce__(), None)[:3]
    return (lambda: None) if position[0] is None else lambda: iterator.__setstate__(position[0])


class Stream(NamedTuple):
    """A random generator of the user's own: whether it was drawn from since, and the way back."""

    name: str
    drawn: Callable[[], bool]
    restore: Callable[[], Any]


def random_stream(generator: random.Random, name: str) -> Stream:
    """One of the standard library."""
    state = random.Random.getstate(generator)
    return Stream(
        name,
        lambda: random.Random.getstate(generator) != state,
        lambda: random.Random.setstate(generator, state),
    )


def numpy_stream(generator: Any, name: str) -> Stream | None:
    """One of numpy, new or old; None for another object."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return None
    kinds = (numpy.random.Generator, numpy.random.RandomState)
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    if issubclass(type(generator), kinds[1]):
        read, write = functools.partial(generator.get_state, legacy=False), generator.set_state
    elif issubclass(type(generator), kinds[0]):
        bits = generator.bit_generator
        read, write = lambda: bits.state, lambda state: setattr(bits, "state", state)
    else:
        return None
    state = read()
    mark = _frozen(state)
    return Stream(name, lambda: _frozen(read()) != mark, lambda: write(state))


def _frozen(state: Any) -> Any:
    """A state as a value that compares at once."""
    if isinstance(state, dict):
        return tuple((key, _frozen(value)) for key, value in state.items())
    return state.tobytes() if hasattr(state, "tobytes") else state
