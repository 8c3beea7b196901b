"""A random program: source text that builds a callable with its state, and what is known of both."""

from __future__ import annotations

import linecache
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ._checks import check_callable, check_kind, check_place
from ._strategies import Pair, Record

__all__ = ["Input", "Place", "Program", "State", "render"]


class Input(NamedTuple):
    """A tensor parameter: `dims` are sizes, or "n" for the size that calls choose.

    `written`: the program may write into it. `optional`: it has the default None. `box`: it comes in a container.
    """

    name: str
    dims: tuple[int | str, ...]
    dtype: str = "float32"
    high: int = 8
    written: bool = False
    optional: bool = False
    box: str = ""


class State(NamedTuple):
    """Something that the program holds: "float", "flag", "word", "tensor", "module", "weight", "dict", "note" (an object), ..."""

    name: str
    kind: str
    init: str


@dataclass(frozen=True, repr=False)
class Program:
    """Source with a function `make()`; what it makes takes `inputs` and the keyword `scalars`, and holds `state`.

    `modes` are the contexts it is safe in: "no_grad", "inference", "grad". `min_n` is the smallest size for "n".
    """

    source: str
    inputs: tuple[Input, ...] = ()
    scalars: tuple[tuple[str, tuple[object, ...]], ...] = ()
    state: tuple[State, ...] = ()
    modes: tuple[str, ...] = ("no_grad",)
    min_n: int = 1

    def __post_init__(self) -> None:
        check_kind("Program: source", self.source, str, "Python text")

    def make(self, device: torch.device | str = "cpu") -> Callable[..., Any]:
        """Run the source in a namespace of its own; the same state each time, whatever the random state."""
        name = f"<program {zlib.crc32(self.source.encode()):08x}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        space: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional, "Pair": Pair, "Record": Record}
        space["__name__"] = "program"
        place = check_place("Program.make: device", device)
        on_cpu = place.type == "cpu"
        forked = torch.random.fork_rng(devices=[] if on_cpu else [place], device_type=place.type)
        with forked, place, torch.inference_mode(False):
            # torch.manual_seed costs 5 ms without a GPU: it keeps a stack trace for each lazy device module.
            (torch.default_generator.manual_seed if on_cpu else torch.manual_seed)(0)
            exec(compile(self.source, name, "exec"), space)
            check_callable("Program: make in the source", space.get("make"), "a function", ())
            made: Callable[..., Any] = space["make"]()
        return made

    def __repr__(self) -> str:
        rest = "".join(
            f", {name}={getattr(self, name)!r}" for name in ("inputs", "scalars", "state", "modes", "min_n")
        )
        return f'Program("""\\\n{self.source}"""{rest})'

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def render(
    shape: str, state: list[State], signature: str, body: list[str], helpers: list[str], stores: list[str]
) -> str:
    """The source text, with state kept on a "module", on an "object", in a "closure" or in a "global"."""
    head = [*helpers, ""] if helpers else []
    if shape in ("module", "object"):
        return _lines(
            [*head, *_class(shape, state, signature, body), "", "def make():", "    return Model()"]
        )
    variables = [f"{item.name} = {item.init}" for item in state]
    declare = [f"{'global' if shape == 'global' else 'nonlocal'} {', '.join(stores)}"] if stores else []
    function = [f"def step({signature}):", *_indent([*declare, *body])]
    if shape == "global":
        return _lines([*head, *variables, "", *function, "", "def make():", "    return step"])
    return _lines([*head, "def make():", *_indent([*variables, *function, "return step"])])


def _class(shape: str, state: list[State], signature: str, body: list[str]) -> list[str]:
    base, method = ("(nn.Module)", "forward") if shape == "module" else ("", "__call__")
    init = ["super().__init__()"] if shape == "module" else []
    for item in state:
        buffer = shape == "module" and item.kind == "tensor" and not item.name.startswith("plain")
        init.append(
            f"self.register_buffer({item.name!r}, {item.init})"
            if buffer
            else f"self.{item.name} = {item.init}"
        )
    return [
        f"class Model{base}:",
        *_indent(["def __init__(self):", *_indent(init or ["pass"])]),
        *_indent([f"def {method}(self, {signature}):", *_indent(body)]),
    ]


def _indent(lines: list[str]) -> list[str]:
    return [f"    {line}" if line else line for line in lines]


def _lines(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


class Place:
    """Where a twin keeps a named part of its state: an attribute, a closure cell or a global."""

    def __init__(self, twin: Any, name: str) -> None:
        self._twin, self._name = twin, name

    def get(self) -> Any:
        """What is there."""
        code = getattr(self._twin, "__code__", None)
        if code is None:
            return getattr(self._twin, self._name)
        if self._name in code.co_freevars:
            return self._twin.__closure__[code.co_freevars.index(self._name)].cell_contents
        return self._twin.__globals__[self._name]

    def set(self, value: Any) -> None:
        """Bind something else there."""
        code = getattr(self._twin, "__code__", None)
        if code is None:
            setattr(self._twin, self._name, value)
        elif self._name in code.co_freevars:
            self._twin.__closure__[code.co_freevars.index(self._name)].cell_contents = value
        else:
            self._twin.__globals__[self._name] = value
