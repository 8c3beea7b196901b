"""Composite operators, which reach a dispatch mode whole under inference mode and in parts elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from ._undo import BELOW_VIEWS

__all__ = ["AUTOCAST_CPU", "VIEWS", "calls_others", "decomposed", "is_composite", "marking", "uncovered"]

_COMPOSITE = "CompositeImplicitAutograd"
_Key = torch._C.DispatchKey
VIEWS, AUTOCAST_CPU = _Key.ADInplaceOrView, _Key.AutocastCPU
_LAZY = (_Key.Conjugate, _Key.Negative, _Key.ZeroTensor)
# Kernels that call other operators although they are written for one kind of device.
_CALLERS = frozenset(
    {
        "aten::_cdist_forward",
        "aten::_native_multi_head_attention",
        "aten::_transformer_encoder_layer_fwd",
        "aten::linalg_matrix_exp",
    }
)
# Outside of inference mode nothing shows whether autocast was off where a composite operator called this one. These
# call others, and Python calls them itself or by a composite operator of which it is known whether it is cast.
_ENTERED = {
    "aten::_native_multi_head_attention": "aten::_native_multi_head_attention",
    "aten::_transformer_encoder_layer_fwd": "aten::_transformer_encoder_layer_fwd",
    "aten::_trilinear": "aten::bilinear",
    "aten::linalg_matrix_exp": "aten::linalg_matrix_exp",
    "aten::linalg_pinv.atol_rtol_tensor": "aten::linalg_pinv.atol_rtol_tensor",  # or `pinverse`, an old name
}
_exclude: Any = torch._C._dispatch_tls_set_dispatch_key_excluded


@cache
def is_composite(func: Any, device_type: str) -> bool:
    """Whether this operator only calls others on this device."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return _has_kernel(func, _COMPOSITE) and not _has_kernel(func, device_type.upper())


def _name(func: Any) -> str:
    return str(func.name())


def _has_kernel(func: Any, key: str) -> bool:
    return _named_kernel(_name(func), key)


def _named_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


@cache
def calls_others(func: Any, device_type: str) -> bool:
    """Whether the kernel of this operator calls others on this device."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return not _has_kernel(func, device_type.upper()) or _name(func) in _CALLERS


@contextmanager
def uncovered(func: Any, device_type: str) -> Iterator[tuple[Any, ...]]:
    """Let the kernel of an operator that calls others find what it finds outside of modes; gives what is let in again.

    The handler of a mode runs with all kept out that comes before it: lazy conjugates would never be resolved
    (wrong numbers), nothing would be cast, and under inference mode views of parameters would not need grad.
    """
    inference = torch.is_inference_mode_enabled()
    # The kernel that marks views and counts writes keeps itself out of what it calls.
    marks = not inference or _has_kernel(func, VIEWS.name)
    casts = [key for key in _uncast(func, device_type, inference) if _was_on(key)]
    wanted = (*_LAZY, *casts) if marks else (*_LAZY, *casts, VIEWS)
    # A handler that is called for `detach` in the middle of C++ has nothing kept out.
    keys = tuple(filter(torch._C._dispatch_tls_is_dispatch_key_excluded, wanted))
    for key in keys:
        _exclude(key, False)
    try:
        yield keys
    finally:
        for key in keys:
            _exclude(key, True)


@contextmanager
def marking(views: bool) -> Iterator[None]:
    """Below autograd: whether views are told as such there, and need grad as their bases do."""
    _exclude(VIEWS, not views)
    try:
        yield
    finally:
        _exclude(VIEWS, True)


@cache
def _cast(func: Any, device_type: str) -> list[Any]:
    """The kinds of autocast for which this operator has a kernel."""
    return [key for key in _kinds(device_type) if _has_kernel(func, key.name)]


@cache
def _uncast(func: Any, device_type: str, inference: bool) -> list[Any]:
    """The kinds of autocast that are on in the kernel of this operator if they were on when torch was entered."""
    entered = _name(func) if inference else _ENTERED.get(_name(func))
    if entered is None:
        return []
    return [key for key in _kinds(device_type) if not _named_kernel(entered, key.name)]


def _kinds(device_type: str) -> list[Any]:
    known = _Key.__members__
    return [known[name] for name in sorted({"AutocastCPU", f"Autocast{device_type.upper()}"} & known.keys())]


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
        for key in _cast(func, device_type):
            _exclude(key, True)
        if _has_kernel(func, VIEWS.name):
            _exclude(VIEWS, True)
        # Elsewhere only code below autograd hands composite operators over whole.
        below: Any = nullcontext if torch.is_inference_mode_enabled() else BELOW_VIEWS
        with mode, below():
            return func._op_dk(_Key.CompositeImplicitAutograd, *args, **kwargs)
