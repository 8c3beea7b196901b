"""Hypothesis strategies for tensors and argument pytrees."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ._checks import check_count, check_counts, check_kind, check_one_of
from ._data import LAYOUTS, fits, make_tensor

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["Pair", "Record", "check_words", "need_hypothesis", "pytrees", "tensors"]

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


class Pair(NamedTuple):
    """A NamedTuple that generated pytrees and programs use."""

    left: Any
    right: Any


@dataclass
class Record:
    """A dataclass that generated pytrees and programs use."""

    value: Any
    note: Any = None


def need_hypothesis() -> Any:
    """`hypothesis.strategies`, or an ImportError that says what to install."""
    try:
        return importlib.import_module("hypothesis.strategies")
    except ImportError as error:
        raise ImportError(
            "the strategies of graphify.testing need hypothesis: pip install hypothesis"
        ) from error


def check_strategy(name: str, value: object) -> None:
    """TypeError unless the value is a hypothesis strategy or None."""
    kind = need_hypothesis().SearchStrategy
    check_kind(name, value, (kind, type(None)), "a hypothesis strategy or None")


def check_words(name: str, words: object, allowed: Collection[str]) -> None:
    """An error unless these are words out of the allowed ones, at least one."""
    check_kind(name, words, (tuple, list), f"a list of words out of {', '.join(map(repr, allowed))}")
    assert isinstance(words, (tuple, list))
    for word in words:
        check_one_of(name, word, allowed)
    check_count(f"{name}: the number of words", len(words), 1)


def tensors(
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    shapes: SearchStrategy[tuple[int, ...]] | None = None,
    layouts: Sequence[str] = tuple(LAYOUTS),
    min_dims: int = 0,
    max_dims: int = 4,
    min_side: int = 0,
    max_side: int = 4,
    allow_special: bool = True,
) -> SearchStrategy[Tensor]:
    """CPU tensors of all layouts, no requires_grad; `tensors(dtypes=[torch.float32], max_dims=2)`.

    Args:
        dtypes: what to choose from.
        shapes: a strategy for shapes; None: `min_dims` to `max_dims` sides of `min_side` to `max_side`.
        layouts: "contiguous", "transposed", "stepped" (every second element), "offset" (starts 64 bytes into its storage), "unaligned" (starts at its fourth element),
            "expanded" (stride 0), "overlapping" (a sliding window), "channels_last", "conj", "neg". One that fits no
            drawn shape is left out for it; "contiguous" is what is left when none fits.
        allow_special: let floats hold NaN, infinities and -0.0.

    Raises:
        TypeError, ValueError: an argument of another kind, an unknown layout, a smallest size above the largest.
    """
    st = need_hypothesis()
    check_words("tensors: layouts", layouts, LAYOUTS)
    check_kind("tensors: dtypes", dtypes, (tuple, list), "a list of dtypes")
    check_count("tensors: the number of dtypes", len(dtypes), 1)
    for dtype in dtypes:
        check_kind("tensors: each of dtypes", dtype, torch.dtype, "a torch.dtype")
    check_counts("tensors", {"min_dims": min_dims, "max_dims": max_dims})
    check_counts("tensors", {"min_side": min_side, "max_side": max_side})
    check_strategy("tensors: shapes", shapes)
    if shapes is None:
        shapes = st.lists(st.integers(min_side, max_side), min_size=min_dims, max_size=max_dims).map(tuple)

    def draw_tensor(draw: DrawFn) -> Tensor:
        shape, dtype = draw(shapes), draw(st.sampled_from(list(dtypes)))
        fitting = [layout for layout in layouts if fits(layout, shape, dtype)] or ["contiguous"]
        layout, seed = draw(st.sampled_from(fitting)), draw(st.integers(0, 2**16))
        return make_tensor(
            shape, dtype, layout=layout, seed=seed, special=allow_special and draw(st.booleans())
        )

    strategy: SearchStrategy[Tensor] = st.composite(draw_tensor)()
    return strategy


def pytrees(
    leaves: SearchStrategy[Any] | None = None,
    *,
    max_leaves: int = 8,
    keys: SearchStrategy[Hashable] | None = None,
    allow_constants: bool = True,
) -> SearchStrategy[Any]:
    """Argument pytrees: dicts, lists, tuples, a NamedTuple and a dataclass around leaves; `pytrees(tensors())`.

    Args:
        leaves: a strategy for leaves; None: `tensors()`.
        max_leaves: about how many leaves at most.
        keys: a strategy for dict keys; None: short strings and small integers.
        allow_constants: let None, numbers, strings, dtypes and the like stand among the leaves.

    Raises:
        TypeError, ValueError: an argument of another kind.
    """
    st = need_hypothesis()
    check_strategy("pytrees: leaves", leaves)
    check_strategy("pytrees: keys", keys)
    check_count("pytrees: max_leaves", max_leaves, 1)
    constants = st.sampled_from(
        [
            None,
            True,
            False,
            0,
            1,
            -1,
            0.0,
            -0.0,
            1.0,
            float("nan"),
            "",
            "a",
            2j,
            torch.float32,
            torch.device("cpu"),
            ...,
        ]
    )
    keys = st.sampled_from(["a", "b", "c", 0, 1]) if keys is None else keys
    leaves = tensors() if leaves is None else leaves

    def containers(inner: SearchStrategy[Any]) -> SearchStrategy[Any]:
        lists: SearchStrategy[Any] = st.lists(inner, max_size=3)
        mixed: SearchStrategy[Any] = st.one_of(
            lists,
            lists.map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.builds(Pair, inner, inner),
            st.builds(Record, inner, inner),
        )
        return mixed

    base = st.one_of(leaves, constants) if allow_constants else leaves
    strategy: SearchStrategy[Any] = st.recursive(base, containers, max_leaves=max_leaves)
    return strategy
