"""What a signature holds of each tensor, read at every call as fast as Python can, and what it never can hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ._ambient import dynamo_guard, function_modes

__all__ = ["TensorSpec", "matcher_of", "refusal", "specs_of", "without_modes"]

_KINDS: frozenset[type] = frozenset((Tensor, torch.nn.Parameter))
_GENERATED = 16  # beyond, a loop is as fast and compiles at once


class TensorSpec(NamedTuple):
    """What kernels and code can tell about a tensor beside its values and its address."""

    shape: tuple[int, ...] | None  # None, as the stride, where a tensor that is refused has none
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    inference: bool
    conj: bool
    neg: bool
    kind: type
    layout: torch.layout


Specs = Callable[[Sequence[Tensor]], tuple[TensorSpec, ...]]

_SPEC_CODE = (
    "({0}.shape, {0}.stride(), {0}.dtype, {0}.device, {0}.requires_grad, {0}.is_inference(), {0}.is_conj(),"
    " {0}.is_neg(), {0}_kind, {0}.layout)"
)


@functools.cache
def specs_of(n: int) -> Specs:
    """A function that reads the specs of exactly `n` tensors, as plain tuples that equal `TensorSpec`s."""
    if n == 0:
        return lambda tensors: ()
    if n > _GENERATED:
        each = _SPEC_CODE.format("t").replace("t_kind", "type(t)")
        return _compiled("not KINDS.issuperset(map(type, tensors))", f"tuple([{each} for t in tensors])")
    names = [f"t{i}" for i in range(n)]
    strange = [f"({name}_kind := type({name})) is not Tensor and {name}_kind not in KINDS" for name in names]
    specs = ", ".join(_SPEC_CODE.format(name) for name in names)
    return _compiled(" or ".join(strange), f"({specs},)", f"    {', '.join(names)}, = tensors\n")


def _compiled(strange: str, specs: str, before: str = "") -> Specs:
    """Two functions of one body: where a function mode is active, the second runs below it."""
    body = (
        f"{before}    if {strange}: return careful(tensors)\n"
        f"    try: return {specs}\n"
        "    except RuntimeError: return careful(tensors)\n"  # a layout that has no shape or no stride
    )
    space: dict[str, Any] = {
        "Tensor": Tensor,
        "KINDS": _KINDS,
        "careful": _careful_specs,
        "modes": function_modes,
    }
    source = f"def below(tensors):\n{body}def specs(tensors):\n    if modes(): return bare(tensors)\n{body}"
    exec(compile(source, "<graphify specs>", "exec"), space)
    space["bare"] = without_modes(space["below"])
    made: Specs = space["specs"]
    return made


def without_modes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with no function mode or subclass in its way: below a default device each getter costs 10 us else."""

    def bare(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return fn(*args)

    return bare


def _careful_specs(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    """The specs of any tensors: subclasses run no code of theirs, and what is refused need have no shape."""
    return tuple(map(_careful_spec, tensors))


def _careful_spec(tensor: Tensor) -> TensorSpec:
    refused = refusal(tensor) is not None
    return TensorSpec(*_attributes(tensor, refused))


def _read_attributes(tensor: Tensor, refused: bool) -> tuple[Any, ...]:
    sizes = (None, None) if refused else (tensor.shape, tensor.stride())
    flags = (tensor.requires_grad, tensor.is_inference(), tensor.is_conj(), tensor.is_neg())
    return *sizes, tensor.dtype, tensor.device, *flags, type(tensor), tensor.layout


_attributes = without_modes(_read_attributes)


def matcher_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A test for other tensors of the same specs, several times as fast as reading and comparing these.

    `matcher_of([x, y])(a, b)` is True only where `specs_of(2)` would answer the same for both pairs; it may be False
    where it would too, as for one tensor given twice. Ask it only under the switches under which it was made.
    """
    guards = _tensor_guards()
    if guards is None:
        return _slow_matcher(tensors)
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    check: Callable[..., bool] = guards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    return check


def _tensor_guards() -> Any:
    return dynamo_guard("TensorGuards")


def _slow_matcher(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    read = specs_of(len(tensors))
    expected = read(tensors)
    return lambda *others: read(others) == expected


def _reason(tensor: Tensor) -> str | None:
    cls = type(tensor)
    if is_lazy(tensor):
        return "it has no values yet: call its lazy module once before."
    if tensor.is_nested:
        return "it is a nested tensor. Pass its padded form, or its values and offsets."
    if cls not in _KINDS:
        return _reason_of_class(cls)
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}: only strided tensors can be copied into a buffer. Pass to_dense()."
    if tensor.is_quantized:
        return "it is quantised. Pass int_repr() with its scale and zero point, or dequantize()."
    if tensor.is_meta:
        return "it is on the meta device and has no values. Pass a tensor on a real device."
    named = any(getattr(tensor, "names", ()))  # torch 2.11 to 2.12 have names
    return "its dimensions are named, which a copy would lose. Pass rename(None)." if named else None


def _reason_of_class(cls: type) -> str:
    if any(base.__name__ == "FakeTensor" for base in cls.__mro__):
        return "it is a fake tensor and has no values. Pass a real one."
    return (
        f"it is a {cls.__module__}.{cls.__qualname__}, a subclass of Tensor with code of its own that a replay would"
        " skip. Pass a plain tensor: .as_subclass(torch.Tensor), or the tensors inside it."
    )


_reason_below_modes = without_modes(_reason)


def refusal(tensor: Tensor) -> str | None:
    """Why a tensor like this can never be staged into a static input, and what to pass; None when it can."""
    reason: str | None = _reason_below_modes(tensor)
    return reason
