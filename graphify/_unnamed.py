"""What executed code reads by names that no bytecode shows, and so all of which counts."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from ._classes import functions_behind
from ._code import Executed, names_of
from ._computed import names_of_getter, reads_any_name
from ._raw import is_a

__all__ = ["Unnamed"]

_CODE = (FunctionType, BuiltinFunctionType, type, ModuleType)


class Unnamed:
    """The objects, classes and namespaces that one survey has to take whole, and names that only objects show."""

    def __init__(self, executed: Executed) -> None:
        self.anywhere = False
        self.names: frozenset[str] = frozenset()
        self.whole: set[int] = set()
        """The ids of dicts whose keys are computed."""
        self.functions = _known_functions(executed)
        """What a code object calls by a global name: that was looked at there."""
        self._everything = executed.everything
        found = [*executed.computed()]
        self._owned = {id(code): c.owners for code, _, c in found if c.owners}
        self._homeless = set(self._owned)
        self._owns: dict[type, bool] = {}
        objects = [value for _, _, c in found for value in c.objects]
        self._objects = {id(value): value for value in (*objects, *map(type, objects))}
        self._scopes = [scope for _, scope, c in found if c.scope]
        self._modules = any(c.modules for _, _, c in found)
        self.whole |= {*map(id, self._scopes)}

    def globals(self) -> Iterator[tuple[dict[str, Any], str]]:
        """The places of namespaces that the code looks into as a whole."""
        held = ((scope, name, value) for scope in self._scopes for name, value in [*scope.items()])
        return ((s, n) for s, n, v in held if not n.startswith("__") and not is_a(v, ModuleType))

    def modules(self) -> list[ModuleType]:
        """All modules, where the code looks for one by name."""
        found: list[Any] = [*sys.modules.values()] if self._modules else []
        return [module for module in found if is_a(module, ModuleType)]

    def of_module(self, module: ModuleType, *, everywhere: bool) -> set[str]:
        """The names of a module that count, whether or not they are known."""
        scope = vars(module)
        if id(module) in self._objects:
            self.whole.add(id(scope))
            return {*scope}
        state = everywhere and not self._everything
        return {name for name, value in [*scope.items()] if not is_a(value, _CODE)} if state else set()

    def reads_all(self, holder: Any) -> bool:
        """Whether all names of an object or class count: code that computes them is one of its methods."""
        return id(holder) in self._objects or (
            bool(self._owned) and self._is_owner(holder if is_a(holder, type) else type(holder))
        )

    def meet(self, getter: Any, known: frozenset[str] | None) -> None:
        """Take note of a function that looks up names."""
        if is_a(getter, (operator.attrgetter, operator.methodcaller)):
            self.names |= names_of_getter(getter) - (known or frozenset())
        else:
            self.anywhere = self.anywhere or reads_any_name(getter)

    def found(self) -> bool:
        """Whether a survey that went by names alone has missed something."""
        self.anywhere = self.anywhere or bool(self._homeless)
        return self.anywhere or bool(self.names)

    def _is_owner(self, cls: type) -> bool:
        if cls not in self._owns:
            self._owns[cls] = True in [self._defines(base) for base in cls.__mro__]
        return self._owns[cls]

    def _defines(self, cls: type) -> bool:
        functions = [f for value in [*vars(cls).values()] for f in _functions_of(value)]
        return True in [self._is_owned(f.__code__, None) for f in functions]

    def _is_owned(self, code: CodeType, instance: str | None) -> bool:
        """Whether this code, or some inside, computes names of the instance whose method it is."""
        if instance is None:
            instance = code.co_varnames[0] if code.co_argcount else ""
        mine = self._owned.get(id(code), frozenset()) == {instance}
        if mine:
            self._homeless.discard(id(code))
        inner = [c for c in code.co_consts if isinstance(c, CodeType) and instance in c.co_freevars]
        return True in [mine, *(self._is_owned(c, instance) for c in inner)]


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """The functions behind an attribute of a class, whose first argument is an instance or the class."""
    found = [] if is_a(value, staticmethod) else [*functions_behind(value)]
    for function in found:
        yield function
        found += functions_behind(function.__dict__.get("__wrapped__"))


def _known_functions(executed: Executed) -> dict[int, Any]:
    scopes = ((names_of(code).scope, scope) for code, scope in executed.scopes())
    values = (scope.get(name) for names, scope in scopes for name in names)
    return {id(v): v for v in values if is_a(v, BuiltinFunctionType) and reads_any_name(v)}
