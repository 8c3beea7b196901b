"""Everything graphify raises or warns with.

RuntimeError
└── GraphifyError
    ├── CaptureError         a call that cannot become a graph: where, why, what to write
    ├── InputError           an argument that cannot be staged (also a ValueError)
    ├── StaleOutputError     a static output used after a later replay overwrote it
    ├── PaddingError         a function whose live rows depend on the padding
    └── VerificationError    a replay that differed from eager
UserWarning
└── GraphifyWarning          a fallback or a habit that costs speed, said once
"""

from __future__ import annotations

from typing import TypeVar

__all__ = [
    "CaptureError",
    "GraphifyError",
    "GraphifyWarning",
    "InputError",
    "PaddingError",
    "StaleOutputError",
    "VerificationError",
    "again",
    "alone",
]


class GraphifyError(RuntimeError):
    """Base of every error that graphify raises by itself."""


class CaptureError(GraphifyError):
    """A call that cannot be captured: the message says where, why and what to write instead.

    `where` is the user's own "file:line", or None when no line of theirs is to blame.
    """

    def __init__(self, what: str, *, where: str | None = None, why: str = "", fix: str = "") -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        super().__init__(_taught(what, where=where, why=why, write=fix))


class InputError(GraphifyError, ValueError):
    """An argument that cannot be staged into a static input."""


class StaleOutputError(GraphifyError):
    """A static output that was used after a later replay overwrote it."""


class PaddingError(GraphifyError):
    """A function for which padded rows change what is live: the message says what, why and what to write."""

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(_taught(what, why=why, write=fix))


class VerificationError(GraphifyError):
    """A replay that left something else than eager: the message says what, the likely cause, and what to write."""

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(_taught(what, why=why, write=fix))


E = TypeVar("E", bound=BaseException)


def alone(error: E) -> E:
    """The error without the frames that it came through, and those of its causes.

    A frame that holds the error it raised is a cycle with it: all that the run made, nodes of autograd among it,
    would stay until the next garbage collection.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def again(error: E) -> E:
    """An equal error to raise, where this one stays in a variable or is kept: what is raised must be held by no frame."""
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made


def _taught(what: str, **lines: str | None) -> str:
    return "\n".join([what, *(f"  {f'{name}:':<6} {text}" for name, text in lines.items() if text)])


class GraphifyWarning(UserWarning):
    """A fallback to eager, or a habit that makes graphs useless; said once per reason."""
