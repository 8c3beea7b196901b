"""Sequences of calls for a program: new data, few signatures, and what may happen between calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ._changes import Change, Changes, changes_of
from ._checks import check_counts, check_kind, check_one_of, check_place
from ._data import Data, Rows, fits
from ._programs import Input, Program
from ._strategies import Pair, Record, need_hypothesis
from ._twins import Call
from ._worlds import Late, World, reachable

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["Ambient", "Drawer", "Latest", "Setting", "Spoil", "call_sequences"]


@dataclass(frozen=True)
class Ambient:
    """A call's context; `mode` is "no_grad", "inference" or "grad"."""

    mode: str = "no_grad"
    autocast: str = ""

    def __post_init__(self) -> None:
        check_one_of("Ambient: mode", self.mode, ("no_grad", "inference", "grad"))
        check_one_of("Ambient: autocast", self.autocast, ("", "cpu", "cuda"))

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        mode = (
            torch.inference_mode()
            if self.mode == "inference"
            else torch.set_grad_enabled(self.mode == "grad")
        )
        casting = torch.autocast(self.autocast, torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with mode, casting:
            yield


@dataclass(frozen=True)
class Spoil:
    """The caller changes what it got, in place, as an owner may."""

    factor: float = 0.5

    def __post_init__(self) -> None:
        check_kind("Spoil: factor", self.factor, (int, float), "a number")

    def __call__(self, twin: Any, output: Any) -> None:
        with torch.inference_mode():
            for tensor in reachable(output, set()):
                wide = tensor.dtype.is_floating_point or tensor.dtype.is_complex
                span = 1 + sum(
                    (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
                )
                if wide and tensor.numel() and span >= tensor.numel():
                    tensor.mul_(self.factor)


@dataclass(frozen=True)
class Latest(Late):
    """The latest result's first tensor like `like`, itself and not a copy; `like` where there is none."""

    like: Data

    def __post_init__(self) -> None:
        check_kind("Latest: like", self.like, Data, "a Data")

    def resolve(self, world: World) -> Any:
        """That tensor."""
        wanted = self.like.resolve(world)
        for tensor in reachable(world.outputs[-1] if world.outputs else None, set()):
            if tensor.shape == wanted.shape and tensor.dtype == wanted.dtype:
                return tensor
        return wanted


@dataclass(frozen=True)
class Setting:
    """What calls of one signature share."""

    n: int
    mode: str
    layouts: tuple[str, ...]
    scalars: tuple[tuple[str, object], ...] = ()
    autocast: str = ""
    omitted: tuple[str, ...] = ()
    by_keyword: bool = False
    overlapping: bool = False
    inference: bool = False
    requires_grad: bool = False
    needing: frozenset[str] = frozenset()
    """Where only some inputs require gradients: these, and which of them have a history."""
    scaled: frozenset[str] = frozenset()


class Drawer:
    """Draws settings and calls for one program."""

    def __init__(self, draw: DrawFn, program: Program, device: str) -> None:
        self._st, self._draw = need_hypothesis(), draw
        self.program, self.device = program, device
        self.seeds = 0
        self.previous: dict[int, list[Any]] = {}

    def choose(self, options: Any) -> Any:
        return self._draw(self._st.sampled_from(list(options)))

    def chance(self, percent: int) -> bool:
        return bool(self._draw(self._st.integers(0, 99)) >= 100 - percent)

    def new_seed(self) -> int:
        self.seeds += 1
        return self.seeds

    def setting(self, modes: tuple[str, ...]) -> Setting:
        program, mode = self.program, self.choose(modes)
        return Setting(
            n=self.choose([3, 4, 2, max(1, program.min_n)]),
            mode=mode,
            layouts=tuple(self._layout(item) for item in program.inputs),
            scalars=tuple((name, self.choose(values)) for name, values in program.scalars if self.chance(60)),
            autocast=self.device if self.chance(8) else "",
            omitted=tuple(item.name for item in program.inputs if item.optional and self.chance(40)),
            by_keyword=self.chance(20),
            overlapping=self.chance(20),
            inference=mode == "inference" and self.chance(30),
            requires_grad=mode == "grad" and self.chance(30),
        )

    def _layout(self, item: Input) -> str:
        shape, dtype = _shape(item, 3), getattr(torch, item.dtype)
        names = ["transposed", "stepped", "offset", "conj", "neg"]
        names += [] if item.written else ["expanded", "overlapping"]
        odd = [name for name in names if fits(name, shape, dtype)]
        return str(self.choose(odd)) if self.chance(30) else "contiguous"

    def call(self, number: int, setting: Setting) -> Call:
        """One call, and perhaps something before and after it."""
        args, kwargs = self.arguments(number, setting)
        return Call(
            args,
            kwargs,
            before=self._changes() if self.chance(20) else None,
            context=Ambient(setting.mode, setting.autocast),
            after=Spoil() if self.chance(15) else None,
        )

    def arguments(self, number: int, setting: Setting) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to pass; rarely the very tensors of the last call of this setting, or a result."""
        values = self.previous.get(number) if self.chance(10) else None
        values = self._values(setting) if values is None else values
        self.previous[number] = values
        first = self.program.inputs[0]
        if not first.box and not first.written and self.chance(10) and isinstance(values[0], Data):
            values = [Latest(values[0]), *values[1:]]
        return self._bind(setting, values)

    def _values(self, setting: Setting) -> list[Any]:
        inputs = self.program.inputs
        values: list[Any] = [
            self._datum(item, layout, setting) for item, layout in zip(inputs, setting.layouts, strict=True)
        ]
        rows = [index for index, item in enumerate(inputs) if item[1:3] == inputs[0][1:3]]
        if setting.overlapping and len(rows) > 1:
            base = replace(values[0], shape=(setting.n + 1, *values[0].shape[1:]), layout="contiguous")
            values[rows[0]], values[rows[1]] = Rows(base, 0, setting.n), Rows(base, 1, setting.n + 1)
        return [_boxed(item.box, value) for item, value in zip(inputs, values, strict=True)]

    def _datum(self, item: Input, layout: str, setting: Setting) -> Data:
        dtype = getattr(torch, item.dtype)
        shape = _shape(item, setting.n)
        return Data(
            shape,
            item.dtype,
            layout=layout if fits(layout, shape, dtype) else "contiguous",
            seed=self.new_seed(),
            high=item.high,
            requires_grad=setting.requires_grad and dtype.is_floating_point and not item.written,
            inference=setting.inference,
        )

    def _bind(self, setting: Setting, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = {item.name: value for item, value in zip(self.program.inputs, values, strict=True)}
        kept = {name: value for name, value in named.items() if name not in setting.omitted}
        scalars = dict(setting.scalars)
        if setting.by_keyword or setting.omitted:
            return (), {**scalars, **kept}
        return tuple(kept.values()), scalars

    def _changes(self) -> Changes:
        found: list[Change] = [("seed", "", self.new_seed())]
        if "(nn.Module)" in self.program.source:
            found += [("train", "", False), ("train", "", True)]
        for item in self.program.state:
            found += changes_of(item, self.new_seed())
        count = self.choose([1, 1, 2])
        return Changes(tuple(self.choose(found[::-1]) for _ in range(count)))


def _shape(item: Input, n: int) -> tuple[int, ...]:
    return tuple(n if size == "n" else int(size) for size in item.dims)


def _boxed(box: str, value: Any) -> Any:
    boxes: dict[str, Any] = {
        "dict": {"t": value, "note": None},
        "list": [value],
        "tuple": (1, value),
        "pair": Pair(value, "right"),
        "record": Record(value),
    }
    return boxes.get(box, value)


def call_sequences(
    program: Program, *, min_calls: int = 3, max_calls: int = 8, device: str = "cpu"
) -> SearchStrategy[list[Call]]:
    """Calls for a program: one or two signatures, new data, and now and then something between or after calls.

    Between: attributes set, train and eval, buffers and weights updated in place, bound anew, replaced through
    `.data` or `load_state_dict(assign=True)`, `manual_seed`. Around: no_grad, inference_mode, grad mode, autocast.
    After: the caller changes the result in place, or passes it to the next call.
    """
    need_hypothesis()
    check_kind("call_sequences: program", program, Program, "a Program")
    check_counts("call_sequences", {"min_calls": min_calls, "max_calls": max_calls})
    check_place("call_sequences: device", device)
    strategy: SearchStrategy[list[Call]] = _composite()(program, (min_calls, max_calls), device)
    return strategy


@functools.cache
def _composite() -> Any:
    return need_hypothesis().composite(_draw_calls)


def _draw_calls(draw: DrawFn, program: Program, counts: tuple[int, int], device: str) -> list[Call]:
    drawer = Drawer(draw, program, device)
    groups = [("no_grad",), ("inference",), ("no_grad", "inference"), ("no_grad", "grad"), ("grad",)]
    modes = drawer.choose([group for group in groups if set(group) <= set(program.modes)])
    settings = [drawer.setting(modes) for _ in range(drawer.choose([1, 1, 2]))]
    count = draw(need_hypothesis().integers(*counts))
    numbers = [drawer.choose([0, 0, len(settings) - 1]) for _ in range(count)]
    return [drawer.call(number, settings[number]) for number in numbers]
