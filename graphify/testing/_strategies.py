"""Hypothesis strategies for tensors and argument pytrees."""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ._data import LAYOUTS, fits, make_tensor

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["Pair", "Record", "need_hypothesis", "pytrees", "tensors"]

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
        ValueError: an unknown layout, when the first tensor is drawn.
    """
    st = need_hypothesis()
    if shapes is None:
        shapes = st.lists(st.integers(min_side, max_side), min_size=min_dims, max_size=max_dims).map(tuple)

    def draw_tensor(draw: DrawFn) -> Tensor:
        unknown = sorted(set(layouts) - set(LAYOUTS))
        if unknown:
            raise ValueError(f"tensors(layouts=...): {unknown} not among {sorted(LAYOUTS)}")
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
    """
    st = need_hypothesis()
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
