"""The front door: what kind of thing is to be graphed, and what it becomes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    overload,
)

from torch import nn
from typing_extensions import Unpack

from ._method import GraphedClassMethod, GraphedFunction, GraphedMethod, plain
from ._module import GraphedModule, runner_of, twin
from ._options import Options
from ._wrapper import Runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._padding import Pad
    from ._pool import GraphPool
    from .buckets import Buckets

__all__ = ["graphify", "handle"]

M = TypeVar("M", bound=nn.Module)
C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")


class _Given(TypedDict, total=False):
    buckets: Buckets
    pad: Pad
    check_padding: bool | Literal["outputs"]
    static_args: Sequence[str]
    outputs: Literal["fresh", "static"]
    warmup: int
    fallback: Literal["raise", "eager"]
    max_graphs: int | None
    max_bytes: int | None
    verify: int
    pool: GraphPool | None
    backend: Literal["auto", "cuda", "tape", "eager"]


class Decorator(Protocol):
    """What `graphify(...)` with options only returns: graphify, with these options."""

    @overload
    def __call__(self, target: type[M], /) -> type[M]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, target: M, /) -> M: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, target: staticmethod[P, R], /) -> staticmethod[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, target: classmethod[C, P, R], /) -> classmethod[C, P, R]: ...
    @overload
    def __call__(self, target: Callable[P, R], /) -> GraphedFunction[P, R]: ...


@overload
def graphify(target: type[M], /, **options: Unpack[_Given]) -> type[M]: ...  # type: ignore[overload-overlap]
@overload
def graphify(target: M, /, **options: Unpack[_Given]) -> M: ...  # type: ignore[overload-overlap]
@overload
def graphify(target: staticmethod[P, R], /, **options: Unpack[_Given]) -> staticmethod[P, R]: ...  # type: ignore[overload-overlap]
@overload
def graphify(target: classmethod[C, P, R], /, **options: Unpack[_Given]) -> classmethod[C, P, R]: ...
@overload
def graphify(target: Callable[P, R], /, **options: Unpack[_Given]) -> GraphedFunction[P, R]: ...
@overload
def graphify(target: None = None, /, **options: Unpack[_Given]) -> Decorator: ...
def graphify(
    target: Any = None,
    /,
    *,
    buckets: Buckets = None,
    pad: Pad = None,
    check_padding: bool | Literal["outputs"] = True,
    static_args: Sequence[str] = (),
    outputs: Literal["fresh", "static"] = "fresh",
    warmup: int = 1,
    fallback: Literal["raise", "eager"] = "raise",
    max_graphs: int | None = 64,
    max_bytes: int | None = None,
    verify: int = 0,
    pool: GraphPool | None = None,
    backend: Literal["auto", "cuda", "tape", "eager"] = "auto",
) -> Any:
    """Replay the calls of a function, a method or a module as CUDA graphs; they keep their eager meaning.

    Example:
        >>> @graphify
        ... def step(x, scale=1.0):
        ...     return (x * scale).relu()
        >>> step(torch.randn(8, 16, device="cuda")).shape
        torch.Size([8, 16])
        >>> model = graphify(model, max_graphs=8)

    Args:
        target: What to graph: a function, lambda, partial, builtin, callable object, bound method; a method,
            class method or static method in a class body; an `nn.Module`, which becomes a `GraphedModule`
            over the same state; an `nn.Module` class, whose `forward` is graphed per instance and which is
            returned itself. Left out, a decorator with these options is returned. Something graphed already
            is graphed anew: an independent wrapper of the same plain callable.
        buckets: Sizes that calls are padded up to, so that many shapes share few graphs. A list of ints: dimension
            0 of every tensor argument is one size. A mapping names dimensions, as `torch.export` does:
            `{"tokens": {0: batch, 1: seq}}` with `batch = Bucket("batch", [1, 2, 4, 8])`. None: a graph per
            exact shape. Results are cut to the call's own size.
        pad: What stands in the padded part: a number for all arguments, or for each by name (`{"slots": -1}`). There
            None keeps what an earlier call left (`{"x": None}`), and a function of the buffer and its live shape fills
            the rest. Arguments without a value of their own, and all with `pad=None`, have 0. Name each that tells
            what is padding, such as a mask.
        check_padding: Whether each bucket is run, without trace, at a call's exact size and with other padding,
            before it is used: a result, gradient or outside tensor that padding changes is a `PaddingError`.
            "outputs": outside tensors are not compared, as for a cache with a row that padding may write.
        static_args: Names of tensor arguments that are read where they are and never copied (caches, workspaces);
            their address is part of the signature.
        outputs: "fresh" results belong to the caller; "static" ones are the graph's own memory, valid until
            the next replay.
        warmup: Live eager calls per signature before it is captured, at least 1.
        fallback: "raise" when a call cannot be captured, or "eager": run it eagerly, counted and warned once.
        max_graphs: Signatures kept; the least recently used are dropped beyond. None: no limit.
        max_bytes: Bytes of graph memory kept; the least recently used signatures are dropped beyond. None: no limit.
        verify: How many replays of each graph, from the first after its capture on, are compared with an eager run of
            the same call, which leaves no trace: results, arguments, memory that the function uses, `.grad`, random
            streams, attributes; of a training pair the gradients, too, for made-up ones of its results, laid out as in
            the backwards recorded so far. A difference is a `VerificationError`, and that call has not happened. Python
            runs once more per verified call. `GRAPHIFY_VERIFY=n` does it for a whole process.
        pool: A `GraphPool` shared by wrappers that never replay at the same time.
        backend: "auto" (graphs on CUDA, plain calls on a CPU), "cuda", "tape" (emulates graphs on a CPU),
            "eager" (the whole path with the function itself as the recording).

    Raises:
        TypeError: The target is no callable, or a coroutine function, a generator function, a property, a
            class that is no `nn.Module`.

    Warning:
        A bound method holds its instance, as any bound method does. The graphs of an instance die with it,
        but they hold the objects whose values they check: an instance that these refer back to
        (`self.child.parent is self`), or whose values are in `__slots__`, is freed after
        `instance.method.reset()` only.
    """
    options = Options(
        buckets=buckets,
        pad=pad,
        check_padding=check_padding,
        static_args=tuple(static_args) if isinstance(static_args, list) else static_args,  # type: ignore[arg-type]
        outputs=outputs,
        warmup=warmup,
        fallback=fallback,
        max_graphs=max_graphs,
        max_bytes=max_bytes,
        verify=verify,
        pool=pool,
        backend=backend,
    )
    if target is None:
        return _decorator(options)
    return _graph(target, options)


def _decorator(options: Options) -> Decorator:
    def decorate(target: Any, /) -> Any:
        return _graph(target, options)

    decorate.__qualname__ = "graphify(...)"  # what a wrong call of it is said to be a call of
    return decorate


def handle(target: object) -> Runner:
    """The controls of anything graphed: `stats`, `graphs`, `report`, `capture`, `reset`.

    Example:
        >>> handle(model).stats().replays
        98

    Raises:
        TypeError: The target is not graphed, or is a method without its instance.
    """
    if isinstance(target, GraphedModule):
        return runner_of(target)
    found = target.forward if isinstance(target, nn.Module) else target
    if isinstance(found, MethodType):
        found = found.__func__
    if isinstance(found, (GraphedFunction, GraphedMethod)):
        return found._controlled()
    if isinstance(found, Runner):
        return found
    raise TypeError(f"handle: {_described(target)} is not graphed; write graphify(...) first")


def _graph(target: Any, options: Options) -> Any:
    if isinstance(target, type):
        return _graph_class(target, options)
    _refuse(target)
    if isinstance(target, nn.Module):
        return twin(target, options)
    if isinstance(target, staticmethod):
        return staticmethod(GraphedFunction(plain(target.__func__), options))
    if isinstance(target, classmethod):
        return GraphedClassMethod(GraphedFunction(plain(target.__func__), options))
    return GraphedFunction(plain(target), options)


def _graph_class(cls: type, options: Options) -> type:
    """Graph the `forward` of a module class, own or inherited, in place."""
    name = cls.__qualname__
    if not issubclass(cls, nn.Module):
        _refuse_with(
            f"`{name}` is a class, and graphs replay calls",
            "@graphify above the methods that do the tensor work, or graphify(instance)",
        )
    if issubclass(cls, GraphedModule):
        _refuse_with(
            f"`{name}` is the class of graphed modules", "graphify(module), or @graphify above your class"
        )
    forward = inspect.getattr_static(cls, "forward", None)
    if forward is None or forward is inspect.getattr_static(nn.Module, "forward"):
        _refuse_with(f"`{name}` has no forward", "a forward method first")
    graphed = _graph(forward, options)
    cls.forward = graphed
    if isinstance(graphed, GraphedFunction):
        graphed.__set_name__(cls, "forward")
    return cls


_TEACH: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (
        inspect.iscoroutinefunction,
        "a coroutine function, and a graph cannot be suspended",
        "@graphify above a plain function that does the tensor work, and call it where you await",
    ),
    (
        inspect.isasyncgenfunction,
        "an async generator function, and a graph cannot be suspended",
        "@graphify above a plain function that makes one item, and call it in the generator",
    ),
    (
        inspect.isgeneratorfunction,
        "a generator function, and a graph cannot be suspended",
        "@graphify above a plain function that makes one item, and call it in the generator",
    ),
)


def _refuse(target: Any) -> None:
    """Raise for what can never be graphed, and say what to write."""
    if isinstance(target, (property, functools.cached_property)):
        _refuse_with(
            f"{_described(target)} is a property, which is not called",
            "@graphify above a method, and a property that calls it",
        )
    if isinstance(target, functools.partialmethod):
        _refuse_with(
            f"{_described(target)} is a partialmethod, which is not called",
            "partialmethod(graphify(function), ...)",
        )
    if isinstance(target, (classmethod, staticmethod)):
        _refuse(target.__func__)
    elif not callable(target):
        _refuse_with(f"{_described(target)} is not callable", "graphify(function) or graphify(module)")
    code = _code_of(target)
    for is_kind, kind, fix in _TEACH:
        if is_kind(code):
            _refuse_with(f"{_described(target)} is {kind}", fix)


def _code_of(target: Any) -> Any:
    """The function that a call of the target runs, through partials, methods and callable objects."""
    while True:
        target = plain(target)
        if isinstance(target, functools.partial):
            target = target.func
        elif isinstance(target, (classmethod, staticmethod, MethodType)):
            target = target.__func__
        elif isinstance(target, nn.Module):
            target = target.forward
        else:
            call = inspect.getattr_static(type(target), "__call__", None)
            return call if inspect.isfunction(call) else target


def _refuse_with(what: str, fix: str) -> NoReturn:
    raise TypeError(f"graphify: {what}.\n  write: {fix}")


def _described(target: Any) -> str:
    inner: Any = target
    while not hasattr(inner, "__qualname__"):
        for part in ("__func__", "func", "fget"):
            if getattr(inner, part, None) is not None:
                inner = getattr(inner, part)
                break
        else:
            return f"a `{type(target).__qualname__}` object"
    return f"`{inner.__qualname__}`"
