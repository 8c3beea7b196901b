"""Hearing of every Python function that this thread starts, while somebody listens."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

__all__ = ["claim_tool", "hearing_calls", "unheard"]

P = ParamSpec("P")
T = TypeVar("T")

Listener = Callable[[FrameType], bool]
"""Whether it needs to hear of this function no more."""


def hearing_calls(listener: Listener) -> contextlib.AbstractContextManager[bool]:
    """Call `listener` with the frame of each Python function that this thread starts; False if it cannot.

    A function that it has heard enough of may be reported again.

    From Python 3.12 on by `sys.monitoring`: there `sys.setprofile`, set thousands of times in one process, was
    seen to end in a segmentation fault.
    """
    return _by_monitoring(listener) if hasattr(sys, "monitoring") else _by_profile(listener)


@contextlib.contextmanager
def _by_profile(listener: Listener) -> Iterator[bool]:
    previous = sys.getprofile()
    if previous is not None and not callable(previous):
        # A C profiler (cProfile) cannot be put back from Python.
        yield False
        return

    def follow(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            listener(frame)
        if previous is not None:
            previous(frame, event, arg)  # type: ignore[arg-type]

    sys.setprofile(follow)
    try:
        yield True
    finally:
        sys.setprofile(previous)


def unheard(fn: Callable[P, T]) -> Callable[P, T]:
    """A function of ours below which nobody listens: it would cost a call for each of ours."""
    if hasattr(sys, "monitoring"):  # which hears of each function once
        return fn

    @functools.wraps(fn)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> T:
        profile = sys.getprofile()
        if profile is None or not callable(profile):
            return fn(*args, **kwargs)
        sys.setprofile(None)
        try:
            return fn(*args, **kwargs)
        finally:
            sys.setprofile(profile)

    return quiet


# Process-wide, because tools of `sys.monitoring` are: one tool for all threads, held while one of them listens.
_lock = threading.Lock()
_tool: int | None = None
_users = 0


_here = threading.local()


@contextlib.contextmanager
def _by_monitoring(listener: Listener) -> Iterator[bool]:
    before: tuple[Listener, ...] = getattr(_here, "listeners", ())
    found = _take()
    _here.listeners = (*before, listener)
    try:
        yield found
    finally:
        _here.listeners = before
        _leave()


def _started(code: CodeType, offset: int) -> Any:
    """Tell this thread's listeners; none needs to hear of a function twice, unless other threads listen, too."""
    listeners = getattr(_here, "listeners", ())
    enough = [listener(sys._getframe(1)) for listener in listeners]
    if enough and all(enough) and _users == len(listeners):
        return sys.monitoring.DISABLE  # type: ignore[attr-defined,unused-ignore]
    return None


def claim_tool(monitoring: Any, name: str) -> int | None:
    """A tool that nobody has; debuggers, coverage and profilers take the first ones by custom."""
    for tool in (4, 3, 2, 1, 0):
        try:
            monitoring.use_tool_id(tool, name)
        except ValueError:  # somebody has it
            continue
        return tool
    return None


def _take() -> bool:
    global _tool, _users  # noqa: PLW0603
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    with _lock:
        _users += 1
        if _tool is None:
            _tool = claim_tool(monitoring, "graphify")
            if _tool is not None:
                monitoring.register_callback(_tool, monitoring.events.PY_START, _started)
                monitoring.set_events(_tool, monitoring.events.PY_START)
        monitoring.restart_events()
        return _tool is not None


def _leave() -> None:
    global _tool, _users  # noqa: PLW0603
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    with _lock:
        _users -= 1
        if _users == 0 and _tool is not None:
            monitoring.set_events(_tool, 0)
            monitoring.register_callback(_tool, monitoring.events.PY_START, None)
            monitoring.free_tool_id(_tool)
            _tool = None
