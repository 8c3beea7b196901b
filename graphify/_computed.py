"""Which names a code object computes at run time to look them up, and on what: no bytecode shows these."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import dis
import importlib
import inspect
import operator
import sys
from collections.abc import Sequence
from functools import cache, partial
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from ._raw import is_a

__all__ = ["Computed", "computed_by", "names_in", "names_of_getter", "reads_any_name"]

_BY_NAME = (getattr, hasattr, setattr, delattr)
_GETTERS = (operator.attrgetter, operator.methodcaller)
_FIELDS = (dataclasses.asdict, dataclasses.astuple, dataclasses.fields, dataclasses.replace)
_ALL_NAMES = (vars, dir, inspect.getmembers, copy.copy, copy.deepcopy, *_FIELDS)
_MODULES = (importlib.import_module, builtins.__import__)
_HOMES = {f.__name__: f for f in (*_GETTERS, *_ALL_NAMES, *_MODULES)}
_IMPORTED = frozenset({"copy", "dataclasses", "importlib", "inspect", "operator"})
_DUNDERS = frozenset({"__getattribute__", "__getattr__", "__setattr__", "__delattr__"})
_CALLS = frozenset({"CALL", "PRECALL", "CALL_FUNCTION", "CALL_METHOD"})
_SILENT = frozenset({"CACHE", "NOP", "EXTENDED_ARG", "RESUME", "KW_NAMES"})


class Computed(NamedTuple):
    """Where a code object looks up names that nothing shows."""

    anywhere: bool = False
    """On objects that are not known."""
    owners: frozenset[str] = frozenset()
    """On what these variables hold, the first of a method or one around."""
    objects: tuple[Any, ...] = ()
    """On what it finds among its globals."""
    scope: bool = False
    """Among its globals."""
    modules: bool = False
    """Among all modules."""


class _Step(NamedTuple):
    name: str
    value: Any
    effect: int
    jumps: bool = False


class _Use(NamedTuple):
    """A function that code loads by a path of names, and the loads that make its arguments where it is called there."""

    path: tuple[str, ...]
    receiver: tuple[_Step, ...]
    arguments: list[tuple[_Step, ...]] | None


def computed_by(code: CodeType, scope: dict[str, Any]) -> Computed:
    """What this code looks up by computed names, with these globals."""
    found = Computed()
    for use in _uses(code):
        function = _resolve(use.path, code, scope)
        if function is globals:
            found = found._replace(scope=True)
        elif _is_one_of(function, _MODULES) or function is sys.modules:
            found = found._replace(modules=True)
        elif use.path[-1] in _DUNDERS:
            if not _is_named(code, (use.arguments or [()])[:2], use.arguments):
                found = _on(found, code, scope, _receiver(code, use))
        elif reads_any_name(function) and not _shows_names(function, code, use):
            target = use.arguments[0] if use.arguments and not _is_one_of(function, _GETTERS) else ()
            found = _on(found, code, scope, target)
    return found


def _shows_names(function: Any, code: CodeType, use: _Use) -> bool:
    """Whether the names that this call looks up are among the code's strings, or in its caller's code."""
    given = use.arguments
    if given is None or _is_one_of(function, _ALL_NAMES):
        return False
    if function is operator.attrgetter:
        return all(map(_is_literal, given))
    at = 0 if function is operator.methodcaller else 1
    return _is_named(code, given[at : at + 1], given)


def _is_named(code: CodeType, names: Sequence[tuple[_Step, ...]], given: Any) -> bool:
    own = {*code.co_varnames[1:2]} - _stored(code) if code.co_name in _DUNDERS else set()
    return given is not None and any(_is_literal(n) or _variable(n) in own for n in names)


def _is_literal(loads: tuple[_Step, ...]) -> bool:
    return len(loads) == 1 and loads[0].name == "LOAD_CONST" and isinstance(loads[0].value, str)


def _variable(loads: tuple[_Step, ...]) -> str | None:
    single = len(loads) == 1 and loads[0].name.startswith(("LOAD_FAST", "LOAD_DEREF"))
    return loads[0].value if single else None


def _receiver(code: CodeType, use: _Use) -> tuple[_Step, ...]:
    """The object whose attribute a call such as `object.__setattr__(x, name, value)` means."""
    if use.path[0] == "super":
        return (_Step("LOAD_FAST", next(iter(code.co_varnames), ""), 1),)
    if _variable(use.receiver) is not None:
        return use.receiver
    return use.arguments[0] if use.arguments else ()


def _on(found: Computed, code: CodeType, scope: dict[str, Any], target: tuple[_Step, ...]) -> Computed:
    variable = _variable(target)
    if variable is not None:
        own = {*code.co_varnames[: min(code.co_argcount, 1)]} - _stored(code)
        if variable in own.union(code.co_freevars):
            return found._replace(owners=found.owners | {variable})
    elif target and target[0].name == "LOAD_GLOBAL":
        value = _resolve(tuple(step.value for step in target), code, scope)
        if value is not None and all(s.name.startswith(("LOAD_GLOBAL", "LOAD_ATTR")) for s in target):
            return found._replace(objects=(*found.objects, value))
    return found._replace(anywhere=True)


def reads_any_name(value: Any) -> bool:
    """Whether this is a function that reads or writes an attribute by a name that it is given, or all of them."""
    return _is_one_of(value, (*_BY_NAME, *_GETTERS, *_ALL_NAMES))


def _is_one_of(value: Any, functions: Sequence[Any]) -> bool:
    return any(value is function for function in functions)


def names_of_getter(getter: Any) -> frozenset[str]:
    """The names that an `operator.attrgetter` or `operator.methodcaller` looks up."""
    made, given = getter.__reduce__()
    given = made.args if isinstance(made, partial) else given
    return frozenset().union(*(names_in(name) for name in given if isinstance(name, str)))


def names_in(text: str) -> list[str]:
    """A name, or those of a dotted one; none of other text."""
    parts = text.split(".")
    return parts if all(map(str.isidentifier, parts)) else []


def _resolve(path: tuple[str, ...], code: CodeType, scope: dict[str, Any]) -> Any:
    """What a path of names leads to, through modules only."""
    first, *rest = path
    if first in scope:
        value = scope[first]
    elif hasattr(builtins, first):
        value = getattr(builtins, first)
    else:  # a local name, as an import inside the function makes
        imports = (step.value for step in _steps(code) if step.name == "IMPORT_NAME")
        local = _IMPORTED & {name.partition(".")[0] for name in imports}
        return _HOMES.get(path[-1]) if local else None
    for name in rest:
        value = getattr(value, name, None) if is_a(value, ModuleType) else None
    return value


@cache
def _steps(code: CodeType) -> tuple[_Step, ...]:
    """The instructions, with two for each that loads two variables."""
    found: list[_Step] = []
    for step in dis.get_instructions(code):
        if step.opname in _SILENT:
            continue
        effect = dis.stack_effect(step.opcode, step.arg, jump=False)
        jumps = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
        if step.opname.startswith("LOAD_FAST") and isinstance(step.argval, tuple):
            found += [_Step("LOAD_FAST", value, 1) for value in step.argval]
        else:
            found.append(_Step(step.opname, step.argval, effect, jumps))
    return tuple(found)


@cache
def _stored(code: CodeType) -> frozenset[str]:
    """The variables that the code itself binds anew."""
    kinds = ("STORE_FAST", "STORE_DEREF", "DELETE_FAST", "DELETE_DEREF")
    stores = (s.value for s in _steps(code) if s.name.startswith(kinds))
    pairs = (value if isinstance(value, tuple) else (value,) for value in stores)
    return frozenset().union(*pairs)


@cache
def _uses(code: CodeType) -> tuple[_Use, ...]:
    """Every function that the code loads from its globals, from a module or as one of an object's special methods."""
    steps, found = _steps(code), list[_Use]()
    for i, step in enumerate(steps):
        if step.name.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
            found.append(_Use((step.value,), (), _arguments(steps, i)))
        elif step.name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            before = steps[i - 1]
            parent = "super" if step.name == "LOAD_SUPER_ATTR" or before.name in _CALLS else before.value
            if isinstance(parent, str):
                found.append(_Use((parent, step.value), (before,), _arguments(steps, i)))
        elif step.name == "IMPORT_FROM":
            found.append(_Use(("", step.value), (), None))
    return tuple(found)


def _arguments(steps: Sequence[_Step], at: int) -> list[tuple[_Step, ...]] | None:
    """The loads that make each argument of the function that is loaded at this step; None if it is not plainly called."""
    pops = {"LOAD_METHOD": 1, "LOAD_ATTR": 1, "LOAD_SUPER_ATTR": 3}.get(steps[at].name, 0)
    below = pops + steps[at].effect
    first = at + 1
    if first < len(steps) and steps[first].name == "PUSH_NULL":
        below, first = below + 1, first + 1
    depth, depths = below, list[int]()
    for i in range(first, len(steps)):
        depth += steps[i].effect
        if steps[i].jumps:
            return None
        if depth <= below:
            left = {below} if steps[i].name == "PRECALL" else {1, 1 - _has_null_below(steps, at)}
            ends = steps[i].name in _CALLS and depth in left
            return _split(steps[first:i], depths, below) if ends else None
        depths.append(depth)
    return None


def _has_null_below(steps: Sequence[_Step], at: int) -> bool:
    """Whether the call takes a null that was pushed before the function, as Python 3.11 and 3.12 do."""
    before = steps[max(at - 2, 0) : at]
    by_attribute = steps[at].name == "LOAD_ATTR" and bool(before) and before[-1].effect == 2
    return by_attribute or any(step.name == "PUSH_NULL" for step in before)


def _split(steps: Sequence[_Step], depths: Sequence[int], below: int) -> list[tuple[_Step, ...]]:
    count = (depths[-1] if depths else below) - below
    ends = [max(i for i, depth in enumerate(depths) if depth <= below + n) + 1 for n in range(1, count + 1)]
    return [tuple(steps[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
