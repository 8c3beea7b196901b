"""The twin of a module: another object over the very same state, whose `forward` is replayed as a graph."""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ._compiled import Compiled
from ._controls import CONTROLS
from ._method import ONCE, plain, travelling
from ._options import Options
from ._wrapper import Runner

__all__ = ["GraphedModule", "runner_of", "twin"]

M = TypeVar("M", bound=nn.Module)


class _Held:
    """What a twin has of its own; everything else is the module's."""

    __slots__ = ("compiled", "forward", "module", "options", "runner")

    def __init__(self, module: nn.Module, options: Options) -> None:
        self.module = module
        self.options = options
        self.renew()

    def renew(self) -> None:
        """Start anew on the forward that the module has now."""
        # Readers compare `forward` and `compiled` before they take `runner`: it changes first.
        forward, compiled = self.module.forward, self.module._compiled_call_impl
        target = plain(forward) if compiled is None else Compiled(self.module)
        self.runner = Runner(target, self.options, type(self.module).__qualname__)
        self.forward, self.compiled = forward, compiled

    def current(self) -> Runner:
        """The runner of the forward that the module has now, patched or not."""
        module = self.module
        if module.forward != self.forward or module._compiled_call_impl is not self.compiled:
            with ONCE.lock:
                if not _same(module.forward, self.forward) or module._compiled_call_impl is not self.compiled:
                    self.renew()
        return self.runner


def _same(one: Any, other: Any) -> bool:
    """Whether two forwards are one; a partialmethod makes a new partial at each access."""
    if isinstance(one, partial) and isinstance(other, partial):
        return one.func == other.func and one.args == other.args and one.keywords == other.keywords
    return bool(one == other)


class _Forward:
    """`forward` of a twin: its runner; on the class, the plain function that the class has."""

    # A data descriptor, or a `forward` patched into the shared `__dict__` would hide the graphs. The check
    # of `__get__` is that of `_Held.current`, written out: one Python frame less per call.
    def __get__(self, module: Any, owner: type | None = None, /) -> Any:
        if module is None:
            return super(GraphedModule, owner).forward  # type: ignore[misc]
        held: _Held = module._graphify
        original = held.module
        if is_dynamo_compiling():  # it is to inline, and cannot compare bound methods
            return original.forward
        if original.forward == held.forward and original._compiled_call_impl is held.compiled:
            return held.runner
        return held.current()

    def __set__(self, module: GraphedModule, value: Any, /) -> None:
        """Patch the module itself; giving back what `forward` was takes the patch away."""
        original, value = module._graphify.module, plain(value)
        vars(original)["forward"] = value
        if value == _unpatched(original):
            del original.forward

    def __delete__(self, module: GraphedModule, /) -> None:
        del module._graphify.module.forward


def _unpatched(module: nn.Module) -> Any:
    function = inspect.getattr_static(type(module), "forward")
    return types.MethodType(function, module) if isinstance(function, types.FunctionType) else None


class GraphedModule(nn.Module):
    """A module that shares another module's whole state, and replays its forward as graphs.

    Made by `graphify(module)`; never by hand. It is an instance of the module's own class too, with the very
    same `__dict__`: parameters, hooks, `state_dict` keys and later changes are one. Hooks run at every call,
    around the graph. The module that was given stays as it was, an eager twin.

    Copies (`copy.deepcopy`, `pickle`, `torch.save`) are GraphedModules with the same options and no graphs
    yet; a pickled one leaves its `pool` behind. The controls (`stats`, `graphs`, `report`, `capture`,
    `capture_buckets`, `estimate`, `seal`, `buffer`, `reset`) are found after the module's own names;
    `graphify.handle(model)` always gives them.

    Example:
        >>> model = graphify(nn.Linear(8, 4))
        >>> model(torch.randn(2, 8)).shape
        torch.Size([2, 4])
        >>> model.stats().calls
        1

    `model.__class__` is the module's class, so that code which builds from it, or replaces it, reaches the
    module; `type(model)` is the twin's.

    Warning:
        Inside `forward`, `self` is the module that was given: what it calls on itself runs eagerly.
    """

    __slots__ = ("_graphify",)

    _graphify: _Held
    _graphify_original: type[nn.Module]

    if TYPE_CHECKING:
        from .stats import CapturedBuckets, GraphRecord, Stats

        def stats(self) -> Stats: ...
        @property
        def graphs(self) -> tuple[GraphRecord, ...]: ...
        def report(self) -> str: ...
        def capture(self, *args: Any, **kwargs: Any) -> GraphRecord: ...
        def capture_buckets(self, *args: Any, progress: bool = True, **kwargs: Any) -> CapturedBuckets: ...
        def estimate(self, *args: Any, **kwargs: Any) -> int: ...
        def seal(self) -> None: ...
        def buffer(self, name: str) -> Tensor: ...
        def reset(self) -> None: ...

    else:
        forward = _Forward()
        # `module.compile()` stores a compiled call here, in the shared state; the twin's calls go by hooks and
        # graph all the same, and `Compiled` takes the compiled code into the graph.
        _compiled_call_impl = property(lambda self: None)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # type(model)(...), as data parallel replicas are made: a new module of the original class and its
        # twin. `__init__`, if it runs, fills the state of both.
        if cls is GraphedModule:
            raise TypeError("a GraphedModule is made from a module: write graphify(module)")
        original = cls._graphify_original
        return _twin_of(original.__new__(original, *args, **kwargs), Options())

    def __init_subclass__(cls) -> None:
        if "_graphify_original" not in vars(cls):
            _refuse_subclass(cls)
        # The original's own __init_subclass__ is not run: a twin's class is nothing to register.

    def __getattr__(self, name: str) -> Any:
        if name == "_graphify":
            raise AttributeError(f"this {type(self).__qualname__} is not complete yet")
        held = self._graphify
        try:
            return getattr(held.module, name)
        except AttributeError:
            if name == "__wrapped__":
                return held.module
            if name not in CONTROLS:
                raise
        return getattr(held.current(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__dict__":
            object.__setattr__(self._graphify.module, name, value)
            object.__setattr__(self, name, value)
        elif name == "__class__":
            _become(self, value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *CONTROLS]  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return f"GraphedModule({self._graphify.module!r})"

    def __copy__(self) -> Any:
        return _twin_of(copy.copy(self._graphify.module), self._graphify.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        held = self._graphify
        module = copy.deepcopy(held.module, memo)
        # A module that refers to its own twin has brought about the copy already.
        return memo[id(self)] if id(self) in memo else _twin_of(module, held.options)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = (self._graphify.module, travelling(self._graphify.options))
        return _blank, (), state, None, None, _fill

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module itself, as `module.compile()` does; the next graphs hold the compiled code."""
        self._graphify.module.compile(*args, **kwargs)


def twin(module: M, options: Options) -> M:
    """A GraphedModule over the state of `module`; of a twin, another independent twin of the same module."""
    original = module._graphify.module if isinstance(module, GraphedModule) else module
    return cast(M, _twin_of(original, options))


def runner_of(module: GraphedModule) -> Runner:
    """The controls of a twin, whatever names the module has."""
    return module._graphify.current()


def _twin_of(module: nn.Module, options: Options) -> GraphedModule:
    made: GraphedModule = object.__new__(_class_for(type(module)))
    return _attach(made, module, options)


def _attach(made: GraphedModule, module: nn.Module, options: Options) -> GraphedModule:
    object.__setattr__(made, "__dict__", module.__dict__)
    # The runner's target is the module's own bound forward: nothing here refers back to the twin.
    object.__setattr__(made, "_graphify", _Held(module, options))
    return made


def _blank() -> GraphedModule:
    """What unpickling begins with: the module may refer to its own twin."""
    blank: GraphedModule = object.__new__(GraphedModule)
    return blank


def _fill(blank: GraphedModule, state: tuple[nn.Module, Options]) -> None:
    module, options = state
    _own_class.__set__(blank, _class_for(type(module)))
    _attach(blank, module, options)


_own_class: Any = vars(object)["__class__"]  # the twins' own `__class__` is a property that hides it


def _class_of_module(made: GraphedModule) -> type[nn.Module]:
    return type(made._graphify.module)


def _become(made: GraphedModule, cls: type) -> None:
    """Give module and twin another class, as lazy modules and parametrizations do."""
    cls = getattr(cls, "_graphify_original", cls)
    made._graphify.module.__class__ = cls
    _own_class.__set__(made, _class_for(cls))


_classes: weakref.WeakKeyDictionary[type, weakref.ref[type[Any]]] = weakref.WeakKeyDictionary()


def _class_for(original: type) -> type[Any]:
    """The class of all twins of modules of one class; it lives as long as one of them does."""
    with ONCE.lock:
        known = _classes.get(original)
        made = known() if known is not None else None
        if made is None:
            made = _new_class(original)
            _classes[original] = weakref.ref(made)
        return made


def _new_class(original: type) -> type[Any]:
    namespace: dict[str, Any] = {
        "__slots__": (),
        "__module__": original.__module__,
        "__qualname__": f"GraphedModule[{original.__qualname__}]",
        "__doc__": original.__doc__,
        "__class__": property(_class_of_module),
        "_graphify_original": original,
    }
    if hasattr(original, "__del__"):
        namespace["__del__"] = _nothing_to_finalise
    if issubclass(original, torch.fx.GraphModule):
        namespace["recompile"] = _recompile
    # The name stays the original's: checkpoints and logs store `type(model).__name__`.
    try:
        return types.new_class(
            original.__name__, (GraphedModule, original), exec_body=lambda n: n.update(namespace)
        )
    except Exception as error:
        raise TypeError(
            f"graphify cannot make a twin of a `{original.__qualname__}`: {error}\n"
            "  why:   a twin is an object of a subclass that shares the module's `__dict__`; values in `__slots__`\n"
            "         cannot be shared, and a metaclass may refuse the subclass\n"
            "  write: module.forward = graphify(module.forward)"
        ) from error


def _nothing_to_finalise(made: GraphedModule) -> None:
    """The module finalises itself; its twin going away is no reason."""


def _recompile(made: GraphedModule) -> Any:
    """torch.fx writes new code to `type(self)`, which must be the module's class and not its twin's."""
    return cast("torch.fx.GraphModule", made._graphify.module).recompile()


def _refuse_subclass(cls: type) -> NoReturn:
    twins = next((base for base in cls.__mro__[1:] if issubclass(base, GraphedModule)), GraphedModule)
    raise TypeError(
        f"`{cls.__name__}` cannot be a subclass of `{twins.__qualname__}`, the class of graphed modules.\n"
        "  write: to graph a class of your own, put @graphify above it; the class of a graphed module's own\n"
        "         module is `model.__class__`"
    )
