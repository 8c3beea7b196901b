"""Hooks that torch calls for every module, every registration in one and every optimizer of the process.

The only file that names where torch keeps them, for which there is no public way; kinds that a torch lacks are none.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch.optim import optimizer as _optimizer

__all__ = ["ProcessHook", "hook_roots", "hook_tables", "process_hooks"]

_KINDS = {
    "_global_forward_pre_hooks": "a forward pre-hook of all modules",
    "_global_forward_hooks": "a forward hook of all modules",
    "_global_backward_pre_hooks": "a backward pre-hook of all modules",
    "_global_backward_hooks": "a backward hook of all modules",
    "_global_buffer_registration_hooks": "a hook of all new buffers",
    "_global_module_registration_hooks": "a hook of all new submodules",
    "_global_parameter_registration_hooks": "a hook of all new parameters",
    "_global_optimizer_pre_hooks": "a hook before the steps of all optimizers",
    "_global_optimizer_post_hooks": "a hook after the steps of all optimizers",
}
_WAYS = ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called")
_OURS = __name__.rpartition(".")[0] + "._"


def _table(name: str) -> dict[int, Any]:
    """What torch itself fills and empties, in place."""
    home = _optimizer if "optimizer" in name else torch.nn.modules.module
    found: dict[int, Any] = getattr(home, name, {})
    return found


_TABLES = {name: _table(name) for name in _KINDS}
_FLAGS = [_table(name) for name in _WAYS]
hook_tables = tuple(_TABLES.values())
"""Where torch keeps them; all are empty in most processes."""


class ProcessHook:
    """One hook and how it is called, by identity; a method is the same at each look."""

    __slots__ = ("_mark", "hook", "kind")

    def __init__(self, kind: str, hook: Any, flags: tuple[bool, ...]) -> None:
        self.kind, self.hook = kind, hook
        parts = (hook.__self__, hook.__func__) if isinstance(hook, MethodType) else (hook,)
        self._mark = (kind, flags, *map(id, parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessHook) and self._mark == other._mark

    def __hash__(self) -> int:
        return hash(self._mark)

    def __repr__(self) -> str:
        return f"{self.kind} ({getattr(self.hook, '__qualname__', type(self.hook).__qualname__)})"


def process_hooks() -> tuple[ProcessHook, ...]:
    """Those in force now, in the order in which torch calls each kind; not the library's own."""
    if not any(hook_tables):
        return ()
    return tuple(
        ProcessHook(_KINDS[name], hook, tuple(number in flags for flags in _FLAGS))
        for name, table in _TABLES.items()
        for number, hook in list(table.items())
        if not (getattr(hook, "__module__", None) or "").startswith(_OURS)
    )


def hook_roots() -> list[tuple[str, Any]]:
    """The same with names, for surveys: their code takes part in runs, and no name of the user's need lead there."""
    return [(each.kind, each.hook) for each in process_hooks()]
