"""What is known of an operator before it runs: asked once for each operator of a run, not at each call of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ._composite import calls_others, is_composite
from ._illegal import is_suspect
from ._undo import may_write

__all__ = ["Operator", "operator_of"]

aten = torch.ops.aten
_OVERLOAD = type(aten.add.Tensor)
_RESTRIDING = frozenset(
    getattr(aten, name).default
    for name in ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")
)
_BORN = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default})


class Operator:
    """One operator on one kind of device."""

    __slots__ = (
        "_dropout",
        "born",
        "call",
        "calls_others",
        "composite",
        "draws",
        "func",
        "generator",
        "odd",
        "restrides",
        "seeds",
        "suspect",
        "writes",
    )

    def __init__(self, func: Any, device_type: str) -> None:
        self.func = func  # held, so that its id stays its own
        self.call: Callable[..., Any] = func._op if type(func) is _OVERLOAD else func
        self.composite = is_composite(func, device_type)
        self.calls_others = calls_others(func, device_type)
        self.suspect = is_suspect(func)
        self.writes = may_write(func)
        self.restrides = func in _RESTRIDING
        self.born = func in _BORN
        self.seeds = func is aten.random_.default
        self.generator = _takes_generator(func)
        self.odd = self.suspect or self.generator or self.born or self.restrides
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self._dropout = self._place_of("dropout_p") if self.draws else None

    def _place_of(self, name: str) -> tuple[int, Any] | None:
        found = ((i, a) for i, a in enumerate(self.func._schema.arguments) if a.name == name)
        return next(found, None)

    def drew(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call drew random numbers: attention says so of itself even where its dropout is 0."""
        if self._dropout is None:
            return self.draws
        place, argument = self._dropout
        given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        return bool(given)


operator_of = cache(Operator)


def _takes_generator(func: Any) -> bool:
    """Whether some call of this operator names a generator; one without a schema may."""
    schema = getattr(func, "_schema", None)
    return schema is None or any("Generator" in str(argument.type) for argument in schema.arguments)
