"""Calls to values and back, as generated code: one value per parameter, however the call spelled it.

The generated `bind` has the parameters, the defaults and the name of the function itself, so that Python binds at its
own speed and a wrong call raises, word for word, what the function would have raised.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Binder", "binder_of"]


@dataclass(frozen=True, slots=True)
class Binder:
    """Positional and keyword forms of one call meet here: one value per parameter.

    `bind(*args, **kwargs)` answers the values in the order of `names` (`*args` as one tuple, `**kwargs` as one dict,
    defaults filled in); `call(fn, values)` passes such values to `fn`, each in its parameter's kind.
    """

    names: tuple[str, ...]
    bind: Callable[..., tuple[Any, ...]]
    call: Callable[[Callable[..., Any], tuple[Any, ...]], Any]
    stars: str | None = None
    """The one of `names` that takes further keywords."""


@dataclass(frozen=True, slots=True)
class _Target:
    """The Python function that a callable ends in, and what the callable already passes to it."""

    function: types.FunctionType
    given: int = 0  # leading positional arguments, such as self
    named: Mapping[str, Any] = field(default_factory=dict)  # keywords of a functools.partial


def binder_of(fn: Callable[..., Any]) -> Binder:
    """Plan how calls of `fn` become values.

        binder_of(lambda x, *, scale=1.0: ...).bind(t) == (t, 1.0)

    Functions, bound methods, `functools.partial`, callable objects and torch's own pass-through decorators (`no_grad`,
    `autocast`) have their real parameters; everything else, such as a builtin, has `args` and `kwargs`.
    """
    target = _resolve(fn)
    return _any_call() if target is None else _binder(target)


def _resolve(fn: Any) -> _Target | None:
    """None where the real parameters are not known."""
    if isinstance(fn, types.FunctionType):
        return _resolve(vars(fn)["__wrapped__"]) if _passes_through(fn) else _Target(fn)
    if isinstance(fn, types.MethodType):
        return _with(_resolve(fn.__func__), 1, {})
    if isinstance(fn, functools.partial):
        placeholder = getattr(functools, "Placeholder", fn)  # of Python 3.14: arguments out of order
        known = all(value is not placeholder for value in fn.args)
        return _with(_resolve(fn.func), len(fn.args), fn.keywords) if known else None
    if isinstance(fn, torch.nn.Module):
        return _resolve(fn.forward)
    if isinstance(fn, (type, types.BuiltinFunctionType)):
        return None
    if isinstance(getattr(fn, "__func__", None), types.FunctionType):  # a method bound by other means
        return _with(_resolve(fn.__func__), 1, {})
    call = inspect.getattr_static(type(fn), "__call__", None)
    return _with(_resolve(call), 1, {}) if isinstance(call, types.FunctionType) else None


def _passes_through(fn: types.FunctionType) -> bool:
    """Whether a decorator that hands on its arguments unchanged made this: others may add or drop arguments."""
    owner = fn.__globals__.get("__name__", "")
    known = owner == contextlib.__name__ or owner.partition(".")[0] == torch.__name__
    return known and hasattr(fn, "__wrapped__")


def _with(target: _Target | None, given: int, named: Mapping[str, Any]) -> _Target | None:
    return target and _Target(target.function, target.given + given, {**target.named, **named})


def _any_call() -> Binder:
    def bind(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return args, kwargs

    def call(fn: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        return fn(*values[0], **values[1])

    return Binder(("args", "kwargs"), bind, call, "kwargs")


@dataclass(frozen=True, slots=True)
class _Parameters:
    """A function's parameters by kind, read off its code object: a `__signature__` may say something else."""

    positional: tuple[str, ...]
    position_only: int
    keyword: tuple[str, ...]
    star: str | None
    stars: str | None

    @staticmethod
    def of(function: types.FunctionType) -> _Parameters:
        code = function.__code__
        end, last = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
        names = iter(code.co_varnames[last:])
        star = next(names) if code.co_flags & inspect.CO_VARARGS else None
        stars = next(names) if code.co_flags & inspect.CO_VARKEYWORDS else None
        return _Parameters(
            code.co_varnames[:end], code.co_posonlyargcount, code.co_varnames[end:last], star, stars
        )

    def head(self) -> str:
        """The parameter list as source, without defaults."""
        first = ["/" if i == self.position_only else "" for i in range(len(self.positional) + 1)]
        parts = [part for i, name in enumerate(self.positional) for part in (first[i] if i else "", name)]
        parts.append(first[-1] if self.positional else "")
        parts.append(f"*{self.star}" if self.star else "*" if self.keyword else "")
        parts += self.keyword
        parts.append(f"**{self.stars}" if self.stars else "")
        return ", ".join(part for part in parts if part)


def _binder(target: _Target) -> Binder:
    parameters = _Parameters.of(target.function)
    visible = parameters.positional[target.given :]
    values, arguments = list(visible), list[str]()
    by_name = False
    for i, name in enumerate(visible, start=target.given):
        by_name = by_name or (name in target.named and i >= parameters.position_only)
        arguments.append((f"{name}=" if by_name else "") + f"v{len(arguments)}")
    names = list(visible)
    if parameters.star:
        over = max(0, target.given - len(parameters.positional))
        values.append(f"{parameters.star}[{over}:]" if over else parameters.star)
        arguments.append(f"*v{len(arguments)}")
        names.append(parameters.star)
    for name in parameters.keyword:
        arguments.append(f"{name}=v{len(arguments)}")
    values += parameters.keyword
    names += parameters.keyword
    if parameters.stars:
        arguments.append(f"**v{len(arguments)}")
        values.append(parameters.stars)
        names.append(parameters.stars)
    return Binder(tuple(names), _bind(target, parameters, values), _call(arguments), parameters.stars)


def _bind(target: _Target, parameters: _Parameters, values: list[str]) -> Callable[..., tuple[Any, ...]]:
    function = target.function
    made = _function("bind", parameters.head(), f"({', '.join(values)},)" if values else "()")
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    made.__name__, made.__qualname__ = function.__name__, function.__qualname__
    if target.named:
        return functools.partial(made, *range(target.given), **target.named)
    if target.given == 1:
        return types.MethodType(made, 0)
    return functools.partial(made, *range(target.given)) if target.given else made


def _call(arguments: list[str]) -> Callable[[Callable[..., Any], tuple[Any, ...]], Any]:
    count = len(arguments)
    unpacked = "".join(f"v{i}, " for i in range(count))
    source = f"    {unpacked}= values\n" if count else ""
    return _function("call", "fn, values", f"fn({', '.join(arguments)})", source)


def _function(name: str, head: str, result: str, before: str = "") -> types.FunctionType:
    space: dict[str, Any] = {}
    source = f"def {name}({head}):\n{before}    return {result}\n"
    exec(compile(source, f"<graphify {name}>", "exec"), space)
    made = space[name]
    assert isinstance(made, types.FunctionType)
    return made
