"""Whether a run takes the path of an earlier one: which instructions of Python it executes, from Python 3.12 on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

from ._code import is_ours
from ._following import claim_tool

__all__ = ["Path", "open_path"]

T = TypeVar("T")


class Path:
    """The instructions that one run of this thread executed, those of graphify's own code left out.

    Each reports once and is silent from then on, so that a run along a known path costs nothing. Instructions of
    other threads report at each turn and are not counted.
    """

    def __init__(self, monitoring: Any, tool: int) -> None:
        self._monitoring, self._tool = monitoring, tool
        self._thread = threading.get_ident()
        self._codes: dict[int, CodeType] = {}  # held, so that their ids stay their own
        self._known: set[tuple[int, int]] = set()
        self._learning = False
        self.strayed = False

    def learn(self, run: Callable[[], T]) -> T:
        """Run, and take that for the path."""
        self._codes.clear()
        self._known.clear()
        self._monitoring.restart_events()
        self._learning = True
        try:
            return self._hear(run)
        finally:
            self._learning = False

    def follow(self, run: Callable[[], T]) -> T:
        """Run, and note in `strayed` whether that executed an instruction which is not on the path."""
        self.strayed = False
        return self._hear(run)

    def _hear(self, run: Callable[[], T]) -> T:
        self._monitoring.set_events(self._tool, self._monitoring.events.INSTRUCTION)
        try:
            return run()
        finally:
            self._monitoring.set_events(self._tool, 0)

    def executed(self, code: CodeType, offset: int) -> Any:
        """Called before an instruction."""
        if threading.get_ident() != self._thread:
            return None
        if is_ours(code):
            return self._monitoring.DISABLE
        step = id(code), offset
        if self._learning:
            self._codes[step[0]] = code
            self._known.add(step)
        elif step not in self._known:
            self.strayed = True
            return None  # it is as strange in the next run
        return self._monitoring.DISABLE


@contextmanager
def open_path() -> Iterator[Path | None]:
    """A path to compare runs with inside; None where Python cannot tell, or all its tools are taken."""
    monitoring: Any = getattr(sys, "monitoring", None)
    tool = None if monitoring is None else claim_tool(monitoring, "graphify paths")
    if tool is None:
        yield None
        return
    path = Path(monitoring, tool)
    monitoring.register_callback(tool, monitoring.events.INSTRUCTION, path.executed)
    try:
        yield path
    finally:
        monitoring.register_callback(tool, monitoring.events.INSTRUCTION, None)
        monitoring.free_tool_id(tool)
