"""torch's switches that change what the same code computes, and the tracers under which graphs are off.

The only file that names torch's private getters of switches: each stands beside the public way, which is taken where
the private one is missing. A property of `torch.backends` costs 50 times the getter below it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import overrides
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ._hooks import ProcessHook, hook_tables, process_hooks

__all__ = [
    "Ambient",
    "ambient",
    "ambient_reader",
    "dispatch_modes",
    "dynamo_guard",
    "function_modes",
    "inactive",
    "keeps_graph",
    "same_ambient",
]

Switch = Callable[[], Any]

_cuda = torch.backends.cuda
# torch declares only some of what these two modules offer.
_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn
_fill: Any = torch.utils.deterministic
_mha: Any = torch.backends.mha

_function_stack: Switch = overrides._get_current_function_mode_stack  # there is no public way


class Ambient(NamedTuple):
    """The switches, by name; None where one does not concern this device."""

    grad_mode: bool
    inference_mode: bool
    autocast: torch.dtype | None
    default_dtype: torch.dtype
    default_device: torch.device | None
    deterministic: bool
    deterministic_warn_only: bool
    fill_uninitialized: bool
    float32_precision: Hashable
    flash_sdp: bool
    math_sdp: bool
    math_sdp_reduced: bool
    sdp_priority: tuple[int, ...]
    mem_efficient_sdp: bool | None
    cudnn_sdp: bool | None
    cudnn: bool | None
    cudnn_benchmark: bool | None
    cudnn_deterministic: bool | None
    fp16_reduction: Hashable
    bf16_reduction: Hashable
    fp16_accumulation: bool | None
    mkldnn: bool | None
    mkldnn_deterministic: bool | None
    device_index: int | None
    attention_fastpath: bool
    process_hooks: tuple[ProcessHook, ...]


class _Field(NamedTuple):
    private: str  # a getter of torch._C, or ""
    public: Switch
    device: str = ""  # the only device type that it concerns


_FIELDS = {
    "grad_mode": _Field("", torch.is_grad_enabled),
    "inference_mode": _Field("", torch.is_inference_mode_enabled),
    "default_dtype": _Field("", torch.get_default_dtype),
    "deterministic": _Field("_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled),
    "deterministic_warn_only": _Field(
        "_get_deterministic_algorithms_warn_only", torch.is_deterministic_algorithms_warn_only_enabled
    ),
    "fill_uninitialized": _Field(
        "_get_deterministic_fill_uninitialized_memory", lambda: _fill.fill_uninitialized_memory
    ),
    "flash_sdp": _Field("_get_flash_sdp_enabled", _cuda.flash_sdp_enabled),
    "math_sdp": _Field("_get_math_sdp_enabled", _cuda.math_sdp_enabled),
    "math_sdp_reduced": _Field(
        "_get_math_sdp_allow_fp16_bf16_reduction", _cuda.fp16_bf16_reduction_math_sdp_allowed
    ),
    "mem_efficient_sdp": _Field("_get_mem_efficient_sdp_enabled", _cuda.mem_efficient_sdp_enabled, "cuda"),
    "cudnn_sdp": _Field("_get_cudnn_sdp_enabled", _cuda.cudnn_sdp_enabled, "cuda"),
    "cudnn": _Field("_get_cudnn_enabled", lambda: _cudnn.enabled, "cuda"),
    "cudnn_benchmark": _Field("_get_cudnn_benchmark", lambda: _cudnn.benchmark, "cuda"),
    "cudnn_deterministic": _Field("_get_cudnn_deterministic", lambda: _cudnn.deterministic, "cuda"),
    "fp16_accumulation": _Field(
        "_get_cublas_allow_fp16_accumulation", lambda: _cuda.matmul.allow_fp16_accumulation, "cuda"
    ),
    "mkldnn": _Field("_get_mkldnn_enabled", lambda: _mkldnn.enabled, "cpu"),
    "mkldnn_deterministic": _Field("_get_mkldnn_deterministic", lambda: _mkldnn.deterministic, "cpu"),
}


def ambient(device_type: str) -> Ambient:
    """The switches of this thread that concern work on such a device."""
    return ambient_reader(device_type)()


@functools.cache
def ambient_reader(device_type: str) -> Callable[[], Ambient]:
    """A function that reads the switches for one device type; keep it to save the look-up at each call."""
    return _reader(device_type, private=True)


def _reader(device_type: str, private: bool) -> Callable[[], Ambient]:
    """One generated expression over all getters; `private=False` uses the public ways only."""
    space: dict[str, Any] = {"Ambient": Ambient, "new": tuple.__new__, "torch": torch, "device": device_type}
    parts = [_getter(name, device_type, private, space) for name in Ambient._fields]
    exec(
        compile(f"def read(): return new(Ambient, ({', '.join(parts)}))", "<graphify ambient>", "exec"), space
    )
    read: Callable[[], Ambient] = space["read"]
    return read


def same_ambient(device_type: str, expected: Ambient, *, private: bool = True) -> Callable[[], bool]:
    """A test for these very switches, cheaper than reading them: it stops at the first that differs.

    Dynamo's guard covers several at once. It may say no where all are the same, as after a change of the
    number of threads, so a no means only that the switches are to be read.
    """
    guard = _state_guard() if private else None
    covered = _GUARDED if guard is not None else frozenset()
    space: dict[str, Any] = {"torch": torch, "device": device_type, "guard": guard}
    tests = ["guard()"] if guard is not None else []
    for name, value in zip(Ambient._fields, expected, strict=True):
        code = _getter(name, device_type, private, space)
        if code != "None" and name not in covered:
            tests += _tests(name, code, value, space)
    body = f"def same():\n try:\n  return {' and '.join(tests)}\n except RuntimeError:\n  return False"
    exec(compile(body, "<graphify ambient>", "exec"), space)
    same: Callable[[], bool] = space["same"]
    return same


def _tests(name: str, code: str, value: Any, space: dict[str, Any]) -> list[str]:
    """The cheapest expressions that are true while a switch has this value."""
    if isinstance(value, bool):
        return [code if value else f"not {code}"]
    if name == "default_device" and value is None:
        space["function_modes"] = function_modes
        return [f"(not function_modes() or {code} is None)"]
    if name == "float32_precision" and value in _TF32_PAIRS:
        space.update(matmul_tf32=_matmul_tf32, conv_tf32=_conv_tf32)
        return [f"matmul_tf32() is {value[0]} and conv_tf32() is {value[1]}"]
    if name == "process_hooks" and not value:
        space.update({f"hooks_{i}": table for i, table in enumerate(hook_tables)})
        return [f"not ({' or '.join(f'hooks_{i}' for i in range(len(hook_tables)))})"]
    space[f"e_{name}"] = value
    return [f"{code} == e_{name}"]


_TF32_PAIRS = tuple((a, b) for a in (False, True) for b in (False, True))
"""What the quick reader of the float32 precision answers; the exact one answers names."""


_GUARDED = frozenset({"grad_mode", "autocast", "default_dtype", "deterministic", "deterministic_warn_only"})


def _state_guard() -> Callable[[], bool] | None:
    made = dynamo_guard("GlobalStateGuard")
    return None if made is None else made().check


def dynamo_guard(name: str) -> Any:
    """A class of Dynamo's C++ guards, which need no Dynamo; None where torch lacks it."""
    dynamo = getattr(torch._C, "_dynamo", None)
    return getattr(getattr(dynamo, "guards", None), name, None)


def _getter(name: str, device_type: str, private: bool, space: dict[str, Any]) -> str:
    """The expression that reads one switch; what it calls is put into `space`."""
    switch, code = _special(name, device_type, private) if name not in _FIELDS else (None, "{0}()")
    field = _FIELDS.get(name)
    if field is not None:
        concerned = field.device in ("", device_type)
        switch = (private and getattr(torch._C, field.private, None)) or field.public
        code = code if concerned else "None"
    space[name] = switch
    return code.format(name)


def _special(name: str, device_type: str, private: bool) -> tuple[Switch | None, str]:
    """Getters that are more than one call: an object, and the expression that uses it by its name."""
    if name == "autocast":
        return None, "torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None"
    if name == "default_device":
        return _default_device, "{0}()"
    if name == "float32_precision":
        return _float32(device_type, private), "{0}()"
    if name == "sdp_priority":
        getter = private and getattr(torch._C, "_get_sdp_priority_order", None)
        return getter or None, "tuple({0}())" if getter else "()"
    if name == "attention_fastpath":
        known = private and hasattr(_mha, "_is_fastpath_enabled")
        return (_mha, "{0}._is_fastpath_enabled") if known else (_mha.get_fastpath_enabled, "{0}()")
    if name == "process_hooks":
        return process_hooks, "{0}()"
    if name == "device_index":
        known = device_type != "cpu" and torch.accelerator.is_available()
        getter = private and getattr(torch._C, "_accelerator_getDeviceIndex", None)
        return getter or torch.accelerator.current_device_index, "{0}()" if known else "None"
    return _reduction(name, private), "{0}()" if device_type == "cuda" else "None"


def _reduction(name: str, private: bool) -> Switch:
    long = f"allow_{name.partition('_')[0]}_reduced_precision_reduction"
    getter: Switch | None = getattr(torch._C, f"_get_cublas_{long}", None) if private else None
    split = f"{long}_split_k"
    return getter or (lambda: (getattr(_cuda.matmul, long), getattr(_cuda.matmul, split)))


_matmul_tf32: Switch | None = getattr(torch._C, "_get_cublas_allow_tf32", None)
_conv_tf32: Switch | None = getattr(torch._C, "_get_cudnn_allow_tf32", None)


def _float32(device_type: str, private: bool) -> Switch:
    """The float32 precision of matmul, conv and rnn."""
    exact = _float32_public(device_type)
    one = getattr(torch._C, "_get_fp32_precision_getter", None) if private else None
    if device_type != "cuda" and one is not None:
        return lambda: (one("mkldnn", "matmul"), one("mkldnn", "conv"), one("mkldnn", "rnn"))
    matmul, conv = _matmul_tf32, _conv_tf32
    if not private or device_type != "cuda" or matmul is None or conv is None:
        return exact

    def quick() -> Any:
        try:
            return matmul(), conv()
        except RuntimeError:  # torch refuses to answer here once the old and the new switches were mixed
            return exact()

    return quick


def _float32_public(device_type: str) -> Switch:
    if device_type == "cuda":
        return lambda: (_cuda.matmul.fp32_precision, _cudnn.conv.fp32_precision, _cudnn.rnn.fp32_precision)
    return lambda: (_mkldnn.matmul.fp32_precision, _mkldnn.conv.fp32_precision, _mkldnn.rnn.fp32_precision)


# ---------------------------------------------------------------- tracers and modes


def _first(*names: str) -> Switch | None:
    """The first of these dotted names below torch that exists."""
    for name in names:
        try:
            found: Switch = operator.attrgetter(name)(torch)
        except AttributeError:
            continue
        return found
    return None


def _never() -> bool:
    return False


def dispatch_modes() -> list[Any]:
    """The dispatch modes that are active on this thread, the innermost last; a backward's thread has its caller's."""
    return list(_get_current_dispatch_mode_stack())


def _probes(private: bool) -> tuple[Switch, Switch, Switch, Switch]:
    """Truthy where something is active: tracing, a torch.func transform, a dispatch mode, a function mode."""
    tracing = _first("_C._get_tracing_state") if private else None
    transform = _first("_C._functorch.peek_interpreter_stack", "_C._are_functorch_transforms_active")
    dispatch = _first("_C._len_torch_dispatch_stack") if private else None
    function = _first("_C._len_torch_function_stack") if private else None
    return (
        tracing or _first("jit.is_tracing") or _never,
        transform or _never,  # there is no public way
        dispatch or _get_current_dispatch_mode_stack,  # the flag beside it is shared by all threads
        function or _function_stack,
    )


def _inactive_by(probes: tuple[Switch, Switch, Switch, Switch]) -> Callable[[], str | None]:
    tracing, transform, dispatch, function = probes
    is_dynamo_compiling, graded = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled

    def inactive() -> str | None:
        """Why graphs are off right now: "compiling", "functorch", "mode" and the like; None when they are on."""
        # Dynamo must meet its own test first: it then traces the plain function and none of what follows.
        if is_dynamo_compiling() or tracing():
            return "compiling"
        if transform():
            return "functorch"
        if dispatch() or (function() and _foreign_function_mode()):
            return "mode"
        # Somebody follows autograd itself, which a replay would not show to them.
        if forward_ad._current_level >= 0:
            return "forward_ad"
        if _anomaly():
            return "anomaly"
        # Saved-tensor hooks of the caller: a checkpoint around the call, activations kept on the CPU.
        return "hooks" if graded() and _saved_hooks(False) is not None else None

    return inactive


_anomaly: Switch = _first("_C.is_anomaly_enabled") or torch.is_anomaly_enabled


def _no_hooks(_: bool) -> None:
    """There is no public way to ask."""


_hooks = _first("_C._autograd._top_saved_tensors_default_hooks")
_saved_hooks: Callable[..., Any] = _no_hooks if _hooks is None else _hooks

inactive = _inactive_by(_probes(private=True))


def _foreign_function_mode() -> bool:
    """Whether a TorchFunctionMode is active that is not just torch's default device."""
    return any(type(mode) is not DeviceContext for mode in _function_stack())


def _default_device() -> torch.device | None:
    """The device of `torch.set_default_device` or `with torch.device(...)`; None where nobody set one."""
    if not function_modes():
        return None
    modes = [mode for mode in _function_stack() if type(mode) is DeviceContext]
    return modes[-1].device if modes else None


function_modes = _probes(private=True)[3]
"""Truthy while a TorchFunctionMode is active, torch's default device included."""


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that this thread is in the middle of; -1 outside of one."""


keeps_graph: Callable[[], bool] | None = _first("_C._autograd._get_current_graph_task_keep_graph")
"""Whether the backward that this thread is in the middle of was asked to retain the graph."""
