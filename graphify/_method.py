"""What a decorated function becomes, and how it keeps one set of graphs per instance of its class."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, MethodType, MethodWrapperType
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, overload

from torch.compiler import is_dynamo_compiling

from ._controls import BoundMethod, Controls
from ._options import Options
from ._wrapper import Runner

__all__ = [
    "ONCE",
    "GraphedClassMethod",
    "GraphedFunction",
    "GraphedMethod",
    "WeakMethod",
    "plain",
    "travelling",
]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


class _Once:
    """The lock under which runners are made, so that two threads never make two for one place."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        # Reentrant: making a runner may collect garbage, and a finaliser may use a graphed method.
        self.lock = threading.RLock()


ONCE = _Once()
if hasattr(os, "register_at_fork"):
    # A thread that the child does not have may hold the lock.
    os.register_at_fork(after_in_child=ONCE.renew)


class WeakMethod:
    """A bound method that does not keep its instance alive; `__self__` raises ReferenceError once it is gone."""

    __slots__ = ("__func__", "__weakref__", "_instance")

    def __init__(self, instance: Any, function: Callable[..., Any]) -> None:
        self._instance = weakref.ref(instance)
        self.__func__ = function

    @property
    def __self__(self) -> Any:
        instance = self._instance()
        if instance is None:
            raise ReferenceError(f"the instance of {_name_of(self.__func__)}() is gone")
        return instance

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return bind(self.__func__, self.__self__)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(self.__func__, self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return bind(self.__func__, self.__self__)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<WeakMethod {_name_of(self.__func__)}>"


def bind(function: Any, instance: Any) -> Callable[..., Any]:
    """The bound method, made the way attribute access makes it."""
    bound: Callable[..., Any] = function.__get__(instance, type(instance))
    return bound


def _inlined(function: Any, instance: Any) -> Callable[..., Any]:
    """What Dynamo traces as the bound method; that of torch 2.12 cannot trace `__get__`."""
    return (
        functools.partial(function, instance)
        if isinstance(function, FunctionType)
        else bind(function, instance)
    )


def binds(function: Any) -> bool:
    """Whether a callable becomes a method in a class body; builtins and plain objects do not."""
    if isinstance(function, functools.partial) and sys.version_info < (3, 14):
        return False  # Python 3.13 only warns that it will
    return hasattr(type(function), "__get__") and not isinstance(function, (MethodType, MethodWrapperType))


class GraphedMethod(Controls, Generic[R]):
    """The graphs of one instance, in the role of the function of a `types.MethodType`.

    That type passes the instance first, and hands on every attribute it has not got itself, the controls
    among them. Only the bound method holds the instance.
    """

    __slots__ = ("__dict__", "__weakref__", "_function", "_instance", "runner")

    __wrapped__: Callable[..., R]

    def __init__(self, function: GraphedFunction[..., R], instance: Any) -> None:
        target = WeakMethod(instance, function.__wrapped__)
        self.runner = Runner(target, function.options, _name_of(function))
        self.__dict__ = function.__dict__  # what is set on the function is found on its bound methods
        self._function = weakref.ref(function)  # which holds this in its table: strongly would be a cycle
        self._instance = weakref.ref(instance)

    def __call__(self, instance: Any, /, *args: Any, **kwargs: Any) -> R:
        # copy.deepcopy, and people, put the function of one bound method to another instance.
        if instance is not self._instance():
            function = self._function()
            return bind(self.__wrapped__ if function is None else function, instance)(*args, **kwargs)  # type: ignore[no-any-return]
        return self.runner(*args, **kwargs)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<graphs of {_name_of(self)} for one instance>"


class _Place(weakref.ref[Any]):
    """Where one instance's runner is kept: under the instance's id, until the instance dies."""

    # The table is reached weakly: were it held, table and place would be a cycle and free nothing without gc.
    __slots__ = ("home", "key", "method")

    key: int
    home: weakref.ref[GraphedFunction[..., Any]]
    method: GraphedMethod[Any]


def _vacate(place: _Place) -> None:
    """Clear the place of an instance that died."""
    home = place.home()
    # The id may have been given to another instance by now.
    if home is not None and home._places.get(place.key) is place:
        del home._places[place.key]


class GraphedFunction(Controls, Generic[P, R]):
    """A callable whose calls are replayed as graphs; what `graphify` makes of anything but a module.

    In a class body it is a method: attribute access on an instance gives a bound method with graphs of that
    instance's own, which die with it. Nothing is stored in the instance, and its `__eq__` and `__hash__`
    play no part.
    """

    __slots__ = ("__dict__", "__weakref__", "_owners", "_places", "options", "runner")

    __wrapped__: Callable[P, R]
    __name__: str
    __qualname__: str
    runner: Runner
    options: Options

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        self.options = options
        self._places: dict[int, _Place] = {}
        self._owners: tuple[weakref.ref[type], ...] = ()
        functools.update_wrapper(self, function, updated=())
        if inspect.isroutine(function):
            self.__dict__.update(getattr(function, "__dict__", {}), __wrapped__=function)
        self.__dict__.setdefault("__name__", type(function).__name__)
        self.__dict__.setdefault("__qualname__", self.__name__)
        self.runner = Runner(function, options, _name_of(function))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.runner(*args, **kwargs)  # type: ignore[no-any-return]

    def __set_name__(self, owner: type, name: str) -> None:
        if binds(self.__wrapped__):
            self._owners += (weakref.ref(owner),)
            self.__class__ = GraphedOnClass  # another `__call__`, at no cost to plain functions

    @overload
    def __get__(
        self: GraphedFunction[Concatenate[Any, Q], R], instance: None, owner: type, /
    ) -> GraphedOnClass[P, Q, R]: ...
    @overload
    def __get__(self, instance: None, owner: type, /) -> GraphedFunction[P, R]: ...
    @overload
    def __get__(
        self: GraphedFunction[Concatenate[S, Q], R], instance: S, owner: type | None = None, /
    ) -> BoundMethod[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        if instance is None:
            return self
        if is_dynamo_compiling() and binds(self.__wrapped__):
            return _inlined(self.__wrapped__, instance)
        place = self._places.get(id(instance))
        if place is None or place() is not instance:
            if not binds(self.__wrapped__):
                return self
            place = self._settle(instance)
        return MethodType(place.method, instance)

    def _settle(self, instance: Any) -> _Place:
        """The place of an instance, made if it has none."""
        with ONCE.lock:
            place = self._places.get(id(instance))
            if place is not None and place() is instance:
                return place
            if type(instance).__weakrefoffset__ == 0:
                self._refuse(type(instance))
            place = _Place(instance, _vacate)
            place.key, place.home = id(instance), weakref.ref(self)
            place.method = GraphedMethod(self, instance)
            # A finaliser may have come first on this very thread: then its runner stays.
            standing = self._places.get(place.key)
            if standing is not None and standing() is instance:
                return standing
            self._places[place.key] = place
            return place

    def _refuse(self, cls: type) -> NoReturn:
        kind = cls.__qualname__
        raise TypeError(
            f"{_name_of(self)}: graphs are kept per instance and die with it, and instances of `{kind}` cannot be "
            f"weakly referenced.\n"
            f'  write: add "__weakref__" to the `__slots__` of `{kind}` (a dataclass: weakref_slot=True), or graph\n'
            f"         one instance's method by hand: graphify({kind}.{self.__name__}.__wrapped__.__get__(instance))"
        )

    def __copy__(self) -> GraphedFunction[P, R]:
        return self  # as functions are

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedFunction[P, R]:
        target = copy.deepcopy(self.__wrapped__, memo)
        return self if target is self.__wrapped__ else GraphedFunction(target, self.options)

    def __reduce__(self) -> Any:
        if _found(self.__module__, self.__qualname__) is self:
            return self.__qualname__
        return GraphedFunction, (self.__wrapped__, travelling(self.options))

    def __repr__(self) -> str:
        return f"<graphed {_name_of(self)}>"


class GraphedOnClass(GraphedFunction[P, R], Generic[P, Q, R]):
    """A graphed method as its class holds it: called through the class, it takes the instance first."""

    __slots__ = ()

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload  # type checkers bind no class methods where a descriptor is in play
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self.__wrapped__(*args, **kwargs)
        owners = [owner for known in self._owners if (owner := known()) is not None]
        if args and isinstance(args[0], tuple(owners)):
            return bind(self, args[0])(*args[1:], **kwargs)
        return self.runner(*args, **kwargs)

    def _controlled(self) -> Runner:
        name = _name_of(self)
        raise TypeError(f"`{name}` has graphs per instance.\n  write: instance.{self.__name__}.stats(), ...")


class GraphedClassMethod(classmethod):  # type: ignore[type-arg]  # not subscriptable when it runs
    """A graphed class method: each class, subclasses included, keeps graphs of its own."""

    def __get__(self, instance: Any, owner: type | None = None, /) -> Any:
        function: Any = self.__func__
        return function.__get__(owner if owner is not None else type(instance))


def plain(target: Any) -> Any:
    """What a graphed callable runs; anything else is itself."""
    if isinstance(target, MethodType) and isinstance(target.__func__, GraphedMethod):
        return bind(target.__func__.__wrapped__, target.__self__)
    if isinstance(target, GraphedFunction):
        return target.__wrapped__
    return target.target if isinstance(target, Runner) else target


def travelling(options: Options) -> Options:
    """The options that a pickled wrapper takes along: a pool belongs to its process."""
    return replace(options, pool=None)


def _found(module: str | None, qualname: str) -> Any:
    """What pickle would find under this name."""
    found: Any = sys.modules.get(module or "")
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _name_of(function: Any) -> str:
    name: str = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name
