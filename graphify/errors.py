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

__all__ = [
    "CaptureError",
    "GraphifyError",
    "GraphifyWarning",
    "InputError",
    "PaddingError",
    "StaleOutputError",
    "VerificationError",
]


class GraphifyError(RuntimeError):
    """Base of every error that graphify raises by itself."""


class CaptureError(GraphifyError):
    """A call that cannot be captured: the message says where, why and what to write instead.

    `where` is the user's own "file:line", or None when no line of theirs is to blame.
    """

    def __init__(self, what: str, *, where: str | None = None, why: str = "", fix: str = "") -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        lines = [what]
        lines += [f"  where: {where}"] if where else []
        lines += [f"  why:   {why}"] if why else []
        lines += [f"  write: {fix}"] if fix else []
        super().__init__("\n".join(lines))


class InputError(GraphifyError, ValueError):
    """An argument that cannot be staged into a static input."""


class StaleOutputError(GraphifyError):
    """A static output that was used after a later replay overwrote it."""


class PaddingError(GraphifyError):
    """A function whose live rows depend on the rows that padding added."""


class VerificationError(GraphifyError):
    """A replay whose result differed from the eager result."""


class GraphifyWarning(UserWarning):
    """A fallback to eager, or a habit that makes graphs useless; said once per reason."""
