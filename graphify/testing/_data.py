"""Tensors by description: shape, dtype, layout in memory and a seed give the same bits everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._checks import check_count, check_kind, check_one_of
from ._worlds import Late, World

__all__ = ["LAYOUTS", "Data", "Rows", "Scaled", "fits", "make_tensor"]

Shape = tuple[int, ...]


def _contiguous(values: Tensor) -> Tensor:
    return values


def _transposed(values: Tensor) -> Tensor:
    return values.permute(*reversed(range(values.ndim))).contiguous().permute(*reversed(range(values.ndim)))


def _stepped(values: Tensor) -> Tensor:
    wide = values.new_zeros(*values.shape[:-1], values.shape[-1] * 2)
    return wide[..., ::2].copy_(values)


def _offset(values: Tensor, elements: int | None = None) -> Tensor:
    # By default as aligned as new memory: matrix products round otherwise elsewhere.
    start = 64 // values.element_size() if elements is None else elements
    return torch.cat([values.new_zeros(start), values.reshape(-1)])[start:].view(values.shape)


def _unaligned(values: Tensor) -> Tensor:
    return _offset(values, 3)


def _expanded(values: Tensor) -> Tensor:
    return values[:1].clone().expand(values.shape)


def _overlapping(values: Tensor) -> Tensor:
    line = values.new_zeros(sum(values.shape) + 1)
    line[: min(line.numel(), values.numel())] = values.reshape(-1)[: line.numel()]
    return line.as_strided(values.shape, (1,) * values.ndim)


def _channels_last(values: Tensor) -> Tensor:
    return values.contiguous(memory_format=torch.channels_last)


def _conj(values: Tensor) -> Tensor:
    return values.conj()


def _neg(values: Tensor) -> Tensor:
    return torch.complex(values, values).conj().imag


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Shape, torch.dtype], bool]]] = {
    "contiguous": (_contiguous, lambda shape, dtype: True),
    "transposed": (_transposed, lambda shape, dtype: len(shape) > 1),
    "stepped": (_stepped, lambda shape, dtype: len(shape) > 0),
    "offset": (_offset, lambda shape, dtype: True),
    "unaligned": (_unaligned, lambda shape, dtype: True),
    "expanded": (_expanded, lambda shape, dtype: len(shape) > 0 and shape[0] > 1),
    "overlapping": (_overlapping, lambda shape, dtype: len(shape) > 1 and 0 not in shape),
    "channels_last": (_channels_last, lambda shape, dtype: len(shape) == 4),
    "conj": (_conj, lambda shape, dtype: dtype.is_complex),
    "neg": (_neg, lambda shape, dtype: dtype in (torch.float32, torch.float64)),
}
"""Each layout by name: what makes it from contiguous values, and which shapes and dtypes it fits."""


def fits(layout: str, shape: Shape, dtype: torch.dtype) -> bool:
    """Whether a tensor of this shape and dtype can have this layout."""
    return LAYOUTS[layout][1](shape, dtype)


def make_tensor(
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    *,
    layout: str = "contiguous",
    seed: int = 0,
    high: int = 8,
    special: bool = False,
) -> Tensor:
    """The tensor that these say: a CPU tensor with small random values, from no global random state.

    Integers are in [0, high). `special` puts NaN, infinities and -0.0 among the floats.

    Raises:
        TypeError, ValueError: an argument of another kind; a layout that is unknown or does not fit the shape.
    """
    _check("make_tensor", shape, dtype, layout)
    check_count("make_tensor: high", high, 1)
    check_kind("make_tensor: seed", seed, int, "an int")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            values = torch.randn(shape, generator=generator, dtype=wide).to(dtype)
            if special and values.numel():
                spots = torch.randint(0, values.numel(), (4,), generator=generator)
                oddities = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], dtype=dtype)
                values.view(-1)[spots] = oddities
        else:
            low = 0 if dtype in (torch.bool, torch.uint8) or high != 8 else -8
            values = torch.randint(low, 2 if dtype == torch.bool else high, shape, generator=generator).to(
                dtype
            )
        return LAYOUTS[layout][0](values)


def _check(function: str, shape: object, dtype: object, layout: object) -> None:
    check_kind(f"{function}: shape", shape, tuple, "a tuple of sizes")
    assert isinstance(shape, tuple)
    for size in shape:
        check_count(f"{function}: a size in shape", size)
    check_kind(f"{function}: dtype", dtype, torch.dtype, "a torch.dtype")
    assert isinstance(dtype, torch.dtype)
    check_one_of(f"{function}: layout", layout, LAYOUTS)
    assert isinstance(layout, str)
    if not fits(layout, shape, dtype):
        raise ValueError(f"{function}: layout {layout!r} does not fit shape {tuple(shape)} of {dtype}")


@dataclass(frozen=True)
class Data(Late):
    """A tensor argument by description; equal descriptions, in one call or several, are one tensor in each twin."""

    shape: Shape
    dtype: str = "float32"
    layout: str = "contiguous"
    seed: int = 0
    high: int = 8
    requires_grad: bool = False
    inference: bool = False

    def __post_init__(self) -> None:
        dtype = getattr(torch, str(self.dtype), None)
        check_kind("Data: dtype", dtype, torch.dtype, 'the name of one, such as "float32"')
        assert isinstance(dtype, torch.dtype)
        _check("Data", self.shape, dtype, self.layout)
        if self.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(
                f"Data: requires_grad needs a dtype of real or complex numbers, not {self.dtype}"
            )

    def make(self) -> Tensor:
        """A new tensor of this description."""
        with torch.inference_mode(self.inference), torch.no_grad():
            dtype = getattr(torch, self.dtype)
            tensor = make_tensor(self.shape, dtype, layout=self.layout, seed=self.seed, high=self.high)
        return tensor.requires_grad_() if self.requires_grad else tensor

    def resolve(self, world: World) -> Any:
        """This world's tensor."""
        return world.once(self, self.make)

    def __repr__(self) -> str:
        fields = type(self).__dataclass_fields__.values()
        changed = [field for field in fields if getattr(self, field.name) != field.default]
        named = [f"{field.name}={getattr(self, field.name)!r}" for field in changed[1:]]
        return f"Data({', '.join([repr(self.shape), *named])})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True)
class Rows(Late):
    """Some rows of another argument's tensor, sharing its memory."""

    of: Data
    start: int
    stop: int

    def __post_init__(self) -> None:
        check_kind("Rows: of", self.of, Data, "a Data")
        check_count("Rows: start", self.start)
        check_count("Rows: stop", self.stop)

    def resolve(self, world: World) -> Any:
        """A new view of this world's tensor."""
        tensor = self.of.resolve(world)
        with torch.inference_mode(tensor.is_inference()):
            return tensor[self.start : self.stop]


@dataclass(frozen=True)
class Scaled(Late):
    """Another argument's tensor times a number: one with a history, where that requires gradients."""

    of: Data
    factor: float = 2.0

    def __post_init__(self) -> None:
        check_kind("Scaled: of", self.of, Data, "a Data")

    def resolve(self, world: World) -> Any:
        """A new product in this world."""
        with torch.enable_grad():
            return self.of.resolve(world) * self.factor
