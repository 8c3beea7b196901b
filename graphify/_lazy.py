"""Parameters and buffers that get their memory in the first run of a lazy module, heard of while somebody listens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from ._code import user_line
from ._shadows import Shadows, shadow
from .errors import CaptureError

__all__ = ["LazyError", "hearing_birth", "is_lazy", "no_birth"]


class LazyError(CaptureError):
    """A run that was to leave no trace was the first of a lazy module."""


def hearing_birth(hear: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `hear` when this thread is about to give a lazy parameter its memory; it may raise, and then it has none."""
    return _shadows.hearing(hear)


def no_birth() -> None:
    """What a run without trace says, since nothing makes a module lazy again.

    Raises:
        LazyError: always.
    """
    raise LazyError(
        "a lazy module has its first run here",
        where=user_line(),
        why="that makes its parameters, which cannot be taken back, and this run is to leave no trace",
        fix="call it once with such arguments before, as for any lazy module",
    )


def _heard(original: Callable[..., Any]) -> Callable[..., Any]:
    def materialize(*args: Any, **kwargs: Any) -> Any:
        _shadows.tell()
        return original(*args, **kwargs)

    return materialize


_KINDS = (UninitializedParameter, UninitializedBuffer)
_shadows = Shadows(lambda: [shadow(kind, "materialize", _heard) for kind in _KINDS])
