"""Calls to values and back: every way of spelling a call, and the errors of wrong ones."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from graphify._binding import binder_of


def echo(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def plain(x: Any, mask: Any = None) -> Any:
    return x, mask


def everything(a: Any, /, b: Any, c: Any = 3, *rest: Any, d: Any, e: Any = 5, **more: Any) -> Any:
    return a, b, c, rest, d, e, more


def keyword_only(*, k: Any, j: Any = 2) -> Any:
    return k, j


def position_only(a: Any, b: Any = 2, /) -> Any:
    return a, b


def nothing() -> Any:
    return ()


def clashing(fn: Any, values: Any, v0: Any = 0, *, bind: Any = 1, call: Any = 2, tuple: Any = 3) -> Any:  # noqa: A002
    return fn, values, v0, bind, call, tuple


def same_names(args: Any, kwargs: Any = 1, *more: Any, **others: Any) -> Any:
    return args, kwargs, more, others


def unicode_name(größe: Any, _: Any = 1) -> Any:  # noqa: PLC2401
    return größe, _


class Net:
    def __init__(self, weight: int = 0) -> None:
        self.weight = weight

    def step(self, x: Any, *, scale: Any = 1) -> Any:
        return x, scale

    @classmethod
    def make(cls, x: Any) -> Any:
        return (x,)

    @staticmethod
    def helper(x: Any) -> Any:
        return (x,)

    @torch.no_grad()
    def frozen(self, x: Any, y: Any = 2) -> Any:
        return x, y

    def __call__(self, x: Any, y: Any = 1) -> Any:
        return x, y


class Layer(torch.nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return x, mask


FUNCTIONS: list[Callable[..., Any]] = [
    *(plain, everything, keyword_only, position_only, nothing, clashing, same_names, unicode_name),
    lambda x, y=2, *rest: (x, y, rest),
    *(Net().step, Net.make, Net.helper, Net.helper, Net(), Net().frozen, Net.step),
    torch.no_grad()(plain),
    torch.inference_mode()(everything),
    torch.autocast("cpu")(keyword_only),
    functools.partial(plain, 1),
    functools.partial(plain, mask=2),
    functools.partial(everything, 1, 2, d=4),
    functools.partial(everything, 1, 2, 3, 4, 5, z=6),
    functools.partial(functools.partial(everything, 1, c=7), 2, d=4),
    functools.partial(Net().step, scale=3),
    functools.partial(keyword_only, k=1),
]

RIGHT: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (functools.partial(everything, 1, 2, 3, 4, 5, z=6), (7, 8), {"d": 9}),
    (functools.partial(everything, 1, 2, 3, 4, 5, z=6), (), {"d": 9, "z": 10, "y": 11}),
    (functools.partial(everything, a=1), (2, 3), {"d": 4}),
    (functools.partial(everything, 1, b=2), (), {"d": 4, "c": 5}),
    (functools.partial(torch.no_grad()(functools.partial(everything, 1, c=7)), 2, d=4), (), {"e": 6}),
    (torch.no_grad()(functools.partial(plain, mask=2)), (1,), {}),
    (functools.partial(Net().frozen, y=3), (1,), {}),
    (clashing, (1, 2), {"tuple": 3, "v0": 4, "bind": 5}),
    (same_names, (1, 2, 3), {"more": 4, "others": 5}),
]


@pytest.mark.parametrize(("fn", "args", "kwargs"), RIGHT)
def test_a_right_call_gives_the_functions_own_result(fn: Any, args: Any, kwargs: Any) -> None:
    """What a partial holds and what the call adds meet as they do in the function."""
    binder = binder_of(fn)

    assert binder.call(fn, binder.bind(*args, **kwargs)) == fn(*args, **kwargs)


names = st.sampled_from(
    ["a", "b", "c", "d", "e", "x", "y", "k", "j", "mask", "scale", "z", "fn", "args", "kwargs", "self"]
)
arguments = st.tuples(
    st.lists(st.integers(10, 99), max_size=6), st.dictionaries(names, st.integers(100, 199), max_size=4)
)


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "result", call()
    except TypeError as error:
        return "error", str(error)


@settings(deadline=None, max_examples=1000)
@given(st.sampled_from(FUNCTIONS), arguments)
def test_binding_a_call_is_making_it(fn: Callable[..., Any], call: tuple[list[int], dict[str, int]]) -> None:
    """Bound and passed on, any call gives the function's own result; a wrong one gives its own TypeError."""
    args, kwargs = call
    binder = binder_of(fn)

    def bound() -> Any:
        values = binder.bind(*args, **kwargs)
        assert len(values) == len(binder.names)
        return binder.call(fn, values)

    assert outcome(bound) == outcome(lambda: fn(*args, **kwargs))


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (plain, ("x", "mask")),
        (everything, ("a", "b", "c", "rest", "d", "e", "more")),
        (nothing, ()),
        (Net().step, ("x", "scale")),
        (Net.make, ("x",)),
        (Net(), ("x", "y")),
        (Layer(), ("x", "mask")),
        (torch.no_grad()(plain), ("x", "mask")),
        (torch.no_grad()(torch.autocast("cpu")(plain)), ("x", "mask")),
        (functools.partial(plain, 1), ("mask",)),
        (functools.partial(everything, 1, 2, 3, 4, d=1), ("rest", "d", "e", "more")),
        (torch.add, ("args", "kwargs")),
        (int, ("args", "kwargs")),
        (Net, ("args", "kwargs")),
        (functools.partial(torch.add, 1), ("args", "kwargs")),
    ],
)
def test_names(fn: Callable[..., Any], expected: tuple[str, ...]) -> None:
    """The values carry the names of the function's own parameters."""
    assert binder_of(fn).names == expected


def test_positional_and_keyword_forms_meet() -> None:
    """However a call is spelled, its values are the same; defaults are filled in."""
    bind = binder_of(plain).bind

    assert bind(1, 2) == bind(1, mask=2) == bind(mask=2, x=1) == (1, 2)
    assert bind(1) == bind(x=1) == (1, None)


def test_rest_is_a_tuple_and_more_a_dict_in_order() -> None:
    """`*args` is one tuple, `**kwargs` one dict in the order of the call."""
    values = binder_of(everything).bind(1, 2, 3, 4, 5, d=6, z=7, y=8)

    assert values == (1, 2, 3, (4, 5), 6, 5, {"z": 7, "y": 8})
    assert list(values[-1]) == ["z", "y"]


def test_defaults_are_the_objects_of_the_function() -> None:
    """A default that is a tensor or a sentinel arrives as itself."""
    marker, weight = object(), torch.ones(2)

    def f(x: Any, y: Any = weight, *, z: Any = marker) -> None: ...

    assert [value is part for value, part in zip(binder_of(f).bind(1), (1, weight, marker), strict=True)] == [
        True
    ] * 3


WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (plain, (), {}),
    (plain, (1, 2, 3), {}),
    (plain, (1,), {"masc": 2}),
    (plain, (1,), {"x": 2}),
    (everything, (1,), {}),
    (everything, (1, 2), {}),
    (position_only, (), {"a": 1}),
    (keyword_only, (1,), {"k": 1}),
    (Net().step, (), {}),
    (Net().step, (1, 2, 3), {}),
    (Net.make, (), {}),
    (Net(), (), {}),
    (Layer(), (), {}),
    (Layer(), (1, 2, 3), {}),
    (torch.no_grad()(plain), (), {}),
    (functools.partial(plain, 1), (2, 3), {}),
    (functools.partial(plain, x=1), (2,), {}),
    (lambda x: x, (), {}),
]


@pytest.mark.parametrize(("fn", "args", "kwargs"), WRONG)
def test_a_wrong_call_raises_the_functions_own_error(fn: Any, args: Any, kwargs: Any) -> None:
    """A missing, surplus, doubled or unknown argument is reported in the function's own words."""
    with pytest.raises(TypeError) as expected:
        fn(*args, **kwargs)
    with pytest.raises(TypeError) as actual:
        binder_of(fn).bind(*args, **kwargs)

    assert str(actual.value) == str(expected.value)


def test_an_unknown_decorator_is_called_as_the_user_called_it() -> None:
    """What a decorator of the user's does with its arguments is its own affair: it may add some."""

    def adding(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return fn("added", *args, **kwargs)

        return wrapper

    wrapped = adding(plain)
    binder = binder_of(wrapped)

    assert binder.names == ("args", "kwargs")
    assert binder.call(wrapped, binder.bind(1)) == wrapped(1) == ("added", 1)


def test_a_context_decorator_keeps_the_parameters() -> None:
    """Decorators made by contextlib hand on what they get."""

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        yield

    assert binder_of(scope()(plain)).names == ("x", "mask")


def test_a_false_signature_is_not_believed() -> None:
    """`__signature__` is for readers; the call goes by the code."""

    def f(x: Any, y: Any = 2) -> Any:
        return x, y

    f.__signature__ = inspect.signature(nothing)  # type: ignore[attr-defined]

    assert binder_of(f).bind(1) == (1, 2)


def test_the_binder_keeps_no_owner_alive() -> None:
    """Binding a method needs its parameters only, not the object."""
    binder = binder_of(Net(7).step)

    assert binder.call(Net(8).step, binder.bind(3)) == (3, 1)
    assert getattr(binder.bind, "__self__", None) == 0
