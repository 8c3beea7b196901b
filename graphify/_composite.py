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
# Outside of inference mode nothing shows whether autocast was off where a composite operator called this one. These
# call others, and Python calls them itself or by a composite operator of which it is known whether it is cast.
_ENTERED = {
    "aten::_transformer_encoder_layer_fwd": "aten::_transformer_encoder_layer_fwd",
    "aten::_native_multi_head_attention": "aten::_native_multi_head_attention",
    "aten::linalg_matrix_exp": "aten::linalg_matrix_exp",
    "aten::linalg_pinv.atol_rtol_tensor": "aten::linalg_pinv.atol_rtol_tensor",  # or `pinverse`, an old name
    "aten::_trilinear": "aten::bilinear",
}
_exclude: Any = torch._C._dispatch_tls_set_dispatch_key_excluded


@cache
def is_composite(func: Any, device_type: str) -> bool:
    """Whether this operator only calls others on this device."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return _has_kernel(func, _COMPOSITE) and not _has_kernel(func, device_type.upper())


def _has_kernel(func: Any, key: str) -> bool:
    return _named_kernel(func.name(), key)


def _named_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def uncover(func: Any, device_type: str) -> tuple[Any, ...]:
    """Let the kernel of `func` find what it finds outside of modes, until the handler of the mode returns.

    A handler runs with all kept out that comes before it, and kernels call operators as well: lazy conjugates
    would never be resolved (wrong numbers), nothing would be cast, and under inference mode views of parameters
    would not need grad. Gives what is let in again.
    """
    inference = torch.is_inference_mode_enabled()
    keys = _covered(func, inference)
    torch.autocast_increment_nesting()
    if torch.autocast_decrement_nesting():
        keys += tuple(key for key in _uncast(func, device_type, inference) if _was_on(key))
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
def _cast(func: Any, device_type: str) -> list[Any]:
    """The kinds of autocast for which this operator has a kernel."""
    return [key for key in _kinds(device_type) if _has_kernel(func, key.name)]


@cache
def _uncast(func: Any, device_type: str, inference: bool) -> list[Any]:
    """The kinds of autocast that are on in the kernel of this operator if they were on when torch was entered."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    name: str = func.name()  # type: ignore[no-untyped-call]
    entered = name if inference else _ENTERED.get(name)
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
