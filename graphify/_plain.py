"""Calls that no graph makes: run by the plain function, counted, and said why."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from ._baked import UnsettledError
from ._code import user_frame
from ._entry import Entry, Refusal
from ._gate import Gate
from ._graph import Call, Setting
from ._signature import Signature, explain, likeness
from .errors import CaptureError, GraphifyWarning, again

__all__ = ["Plain"]

log = logging.getLogger("graphify")

_QUIET = frozenset({"cpu", "disabled", "nested", "compiling", "functorch", "mode", "evicted"})


class Plain:
    """The plain calls of one wrapper, and what was said about them."""

    def __init__(self, setting: Setting, fallback: str, counts: Counter[str]) -> None:
        self.setting, self.fallback, self.counts = setting, fallback, counts
        self.reasons: Counter[str] = Counter()
        self.gates: weakref.WeakValueDictionary[tuple[int, ...], Gate] = weakref.WeakValueDictionary()
        self._said: set[str] = set()

    def run(self, reason: str, call: Call) -> Any:
        """Make the result by the plain function."""
        result = self.setting.run(call.values)
        self.count(reason)
        return result

    def count(self, reason: str) -> None:
        """Count one plain call."""
        self.counts["eager"] += 1
        self.reasons[reason] += 1
        self.note_beside()

    def note_beside(self) -> None:
        """A call that was not replayed adds to the gradients of the same leaves on its own."""
        if torch.is_grad_enabled():
            for gate in self.gates.values():
                gate.beside = True

    def refuse(self, refused: Refusal, call: Call) -> Any:
        """Make the result of a call that is not captured, or raise why it cannot be."""
        if refused.error is not None and self.fallback == "raise":
            raise again(refused.error)
        self.say_refused(refused)
        return self.run(refused.reason, call)

    def say_refused(self, refused: Refusal) -> None:
        """Say once why calls are not captured, where it is worth a word."""
        if refused.error is not None:
            self.say(refused.reason, f"runs eagerly from now on for this kind of call: {refused.error}")
        elif refused.advice:
            self.say(refused.reason, f"runs eagerly: {refused.advice}")

    def refuse_backward(self, error: CaptureError) -> None:
        """A backward that cannot be recorded: raised, or said once and run live; one that does not pay runs live."""
        if self.fallback == "raise" and not isinstance(error, UnsettledError):
            raise again(error)
        self.say("backward", f"runs its backward eagerly from now on: {error}")

    def missed(self, entry: Entry, call: Call, ready: Iterable[Entry]) -> Any:
        """Run a call that no graph was captured for before the wrapper was sealed, and log what is new about it."""
        here = Signature(entry.tree, *entry.key)
        known = [Signature(e.tree, *e.key) for e in ready]
        nearest = max(known, key=lambda there: likeness(here, there), default=None)
        why = "nothing was captured" if nearest is None else explain(here, nearest)
        log.warning("%s: sealed, and no graph fits: %s", self.setting.name, why)
        return self.run("sealed", call)

    def say(self, reason: str, text: str) -> None:
        """Warn once per reason, at the user's own line."""
        if reason in self._said or reason in _QUIET:
            return
        self._said.add(reason)
        frame, message = user_frame(), f"`{self.setting.name}` {text}"
        log.warning(message)
        if frame is None:
            warnings.warn(message, GraphifyWarning, stacklevel=2)
        else:
            registry = frame.f_globals.setdefault("__warningregistry__", {})
            warnings.warn_explicit(
                message, GraphifyWarning, frame.f_code.co_filename, frame.f_lineno, registry=registry
            )
