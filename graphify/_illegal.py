"""Operators that a graph cannot hold, each with the words that help.

The rules are those of a CUDA stream capture: the host may not wait for the device, and shapes may not
depend on values (https://pytorch.org/docs/stable/notes/cuda.html#constraints).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "DETACHED",
    "HOST",
    "PLAIN",
    "READ",
    "RENEWED",
    "Offence",
    "foreign",
    "is_suspect",
    "offence",
    "tensors_in",
]

aten = torch.ops.aten

READ = "a graph replays device work only; the host cannot read a value in the middle of it"
SHAPE = "the size of the result depends on values, and a graph has fixed sizes"
HOST = "a replay repeats the copy from a host address that is gone, so the device would read garbage"

PLAIN = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout})
PLAIN |= {torch.memory_format}
"""Kinds of arguments of operators that neither are nor hold tensors."""


class Offence(NamedTuple):
    """One thing in a run that a graph cannot hold."""

    what: str
    why: str
    fix: str


_HISTORY = "a graph repeats device work only, and leaves every history as it is"
DETACHED = Offence(
    "`detach_` of a tensor from outside that has a history",
    _HISTORY,
    "`.detach()`, which makes another tensor on the same memory, or call `detach_` outside the graphed function",
)
RENEWED = Offence(
    "a tensor from outside that has a history is written in place",
    _HISTORY,
    "write under `torch.no_grad()` or write into `.detach()`, or return the new value",
)


def tensors_in(value: Any) -> Sequence[Tensor]:
    """Every tensor among an operator's arguments or results, which nest lists at most."""
    if type(value) is Tensor:
        return (value,)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return (value,) if isinstance(value, Tensor) else ()
    found: list[Tensor] = []
    for item in value:
        kind = type(item)
        if kind is Tensor:
            found.append(item)
        elif kind in PLAIN:  # a cheap test: `isinstance` of what is no tensor asks Tensor's metaclass
            continue
        elif issubclass(kind, (list, tuple, dict)):
            found += tensors_in(item)
        elif isinstance(item, Tensor):
            found.append(item)
    return found


def is_suspect(func: Any) -> bool:
    """Whether some call of this operator cannot be held whatever device its tensors are on."""
    tags = func.tags
    return func in _RULES or torch.Tag.cudagraph_unsafe in tags or torch.Tag.dynamic_output_shape in tags


def offence(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Offence | None:
    """Why a graph on `device` cannot hold this operator call, or None."""
    rule = _RULES.get(func)
    if rule is not None:
        return rule(args, kwargs, device)
    if torch.Tag.cudagraph_unsafe in func.tags:
        return Offence(f"`{func}` is marked unsafe for graphs", "its author says so", "call it outside")
    if torch.Tag.dynamic_output_shape in func.tags and _on(device, args):
        name = func.name().split("::")[1].split(".")[0]
        return Offence(
            f"`{name}` makes a result of data-dependent size", SHAPE, _SHAPE_FIXES.get(name, _SHAPE_FIX)
        )
    return foreign(tensors_in((args, kwargs)), device)


def _on(device: torch.device, args: Any) -> bool:
    return any(t.device.type == device.type for t in tensors_in(args))


def foreign(tensors: Iterable[Tensor], device: torch.device) -> Offence | None:
    """Why a graph on `device` cannot hold work on these tensors, or None."""
    if device.index is None:
        return None
    for t in tensors:
        if t.device != device and t.device.type == device.type:  # in order of cost
            return Offence(
                f"a tensor on {t.device} in a graph on {device}",
                "one graph lives on one device",
                "move the tensor first, or split the function by device",
            )
    return None


Rule = Callable[[Sequence[Any], dict[str, Any], torch.device], Offence | None]


def _reading(what: str, fix: str) -> Rule:
    """A rule for an operator that reads the device's tensors on the host."""
    found = Offence(what, READ, fix)
    return lambda args, kwargs, device: found if _on(device, args) else None


_scalar = _reading(
    "a tensor's value is read on the host (`.item()`, `bool()`, `int()`, `float()`, or an `if` on a tensor)",
    "keep it on the device (`torch.where` for a branch), or do this part outside the graphed function",
)
_compare = _reading(
    "two tensors are compared on the host (`torch.equal`, `torch.allclose`)", "compare outside"
)
_linalg = _reading(
    "a `torch.linalg` function checks for errors on the host", "its `_ex` form, such as `torch.linalg.inv_ex`"
)


def _index(args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Offence | None:
    if not any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1])) or not _on(device, args):
        return None
    return Offence("`x[mask]` makes a result of data-dependent size", SHAPE, "`torch.where(mask, x, other)`")


def _index_put(args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Offence | None:
    masked = any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
    if not masked or args[2].numel() == 1 or not _on(device, args[:1]):
        return None
    return Offence(
        "`x[mask] = values` hides a data-dependent size", SHAPE, "`x.copy_(torch.where(mask, values, x))`"
    )


def _repeat(args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Offence | None:
    if kwargs.get("output_size") is not None or not _on(device, args):
        return None
    return Offence(
        "`repeat_interleave` with a tensor of counts has a data-dependent size", SHAPE, "pass `output_size=`"
    )


def _to_copy(args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Offence | None:
    source, target = args[0].device, kwargs.get("device") or args[0].device
    return _transfer(args[0], source, torch.device(target), device)


def _copy(args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Offence | None:
    return _transfer(args[1], args[1].device, args[0].device, device)


def _transfer(
    source: Tensor, origin: torch.device, target: torch.device, device: torch.device
) -> Offence | None:
    if origin.type == target.type:
        return foreign((source,), device)
    if origin.type == device.type:
        return Offence(f"a tensor is copied to the {target.type} (`.cpu()`, `.to`)", READ, "copy it outside")
    if target.type == device.type and not source.is_pinned():
        return Offence(
            "a CPU tensor made or read inside is copied to the device",
            HOST,
            "make it with `device=`, or once outside the graphed function, or pass it as an argument",
        )
    return None


_SHAPE_FIX = "an operator with a fixed result size, or do this part outside the graphed function"
_SHAPE_FIXES = {
    "nonzero": "`torch.where(mask, x, other)`, or `torch.nonzero_static(x, size=n)`",
    "masked_select": "`torch.where(mask, x, other)`, or multiply by the mask",
}


def _rules() -> dict[Any, Rule]:
    """The operators whose tags say too much or too little."""
    named: list[tuple[str, Rule]] = [
        ("_local_scalar_dense", _scalar),
        ("item", _scalar),
        ("is_nonzero", _scalar),
        ("equal", _compare),
        ("allclose", _compare),
        ("index.Tensor", _index),
        ("index_put", _index_put),
        ("index_put_", _index_put),
        ("_index_put_impl_", _index_put),
        ("repeat_interleave.Tensor", _repeat),
        ("_linalg_check_errors", _linalg),
        ("_to_copy", _to_copy),
        ("copy_", _copy),
    ]
    rules: dict[Any, Rule] = {}
    for name, rule in named:
        packet, _, overload = name.partition(".")
        rules[getattr(getattr(aten, packet), overload or "default")] = rule
    return rules


_RULES = _rules()
