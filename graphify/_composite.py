"""Composite operators, which reach a dispatch mode whole under inference mode and in parts elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from ._undo import BELOW_VIEWS

__all__ = ["AUTOCAST_CPU", "VIEWS", "decomposed", "is_composite", "marking", "uncover"]

_COMPOSITE = "CompositeImplicitAutograd"
_Key = torch._C.DispatchKey
VIEWS, AUTOCAST_CPU = _Key.ADInplaceOrView, _Key.AutocastCPU
_LAZY = (_Key.Conjugate, _Key.Negative, _Key.ZeroTensor)
_exclude: Any = torch._C._dispatch_tls_set_dispatch_key_excluded


@cache
def is_composite(func: Any, device_type: str) -> bool:
    """Whether this operator only calls others on this device."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return _has_kernel(func, _COMPOSITE) and not _has_kernel(func, device_type.upper())


def _has_kernel(func: Any, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def uncover(func: Any, device_type: str) -> tuple[Any, ...]:
    """Let the kernel of `func` find what it finds outside of modes, until the handler of the mode returns.

    A handler runs with all kept out that comes before it, and kernels call operators as well: lazy conjugates
    would never be resolved (wrong numbers), nothing would be cast, and under inference mode views of parameters
    would not need grad. Gives what is let in again.
    """
    keys = _covered(func, torch.is_inference_mode_enabled())
    torch.autocast_increment_nesting()
    if torch.autocast_decrement_nesting():
        keys += tuple(key for key in _casts(func, device_type, kernel=False) if _was_on(key))
    for key in keys:
        _exclude(key, False)
    return keys


@contextmanager
def marking(views: bool) -> Iterator[None]:
    """Below autograd: whether views are told as such there, and need grad as their bases do."""
    _exclude(VIEWS, not views)
    try:
        yield
    finally:
        _exclude(VIEWS, True)


@cache
def _covered(func: Any, inference: bool) -> tuple[Any, ...]:
    if not isinstance(func, torch._ops.OpOverload):
        return ()
    # The kernel that marks views and counts writes keeps itself out of what it calls.
    marks = not inference or _has_kernel(func, VIEWS.name)
    return _LAZY if marks else (*_LAZY, VIEWS)


@cache
def _casts(func: Any, device_type: str, *, kernel: bool) -> list[Any]:
    """The kinds of autocast that may be on here for which this operator has a kernel, or has none."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    names = {"AutocastCPU", f"Autocast{device_type.upper()}"} & _Key.__members__.keys()
    return [_Key.__members__[name] for name in sorted(names) if _has_kernel(func, name) == kernel]


def _was_on(key: Any) -> bool:
    """Whether a kind of autocast was on when torch was entered."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def decomposed(
    func: Any, args: Any, kwargs: dict[str, Any], mode: AbstractContextManager[Any], device_type: str
) -> Any:
    """Let `mode` see the operators that this one is made of, called by its own C++ kernel as outside of modes.

    Views that need grad or do not decide which kernels some take, autocast casts, and lazy conjugates are resolved.
    A decomposition in Python would not do: some of those draw other random numbers.
    """
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        # A kernel of this operator that came before keeps its own kind out of what it calls.
        for key in _casts(func, device_type, kernel=True):
            _exclude(key, True)
        if _has_kernel(func, VIEWS.name):
            _exclude(VIEWS, True)
        # Elsewhere only code below autograd hands composite operators over whole.
        below: Any = nullcontext if torch.is_inference_mode_enabled() else BELOW_VIEWS
        with mode, below():
            return func._op_dk(_Key.CompositeImplicitAutograd, *args, **kwargs)
