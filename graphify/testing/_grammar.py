"""The strategy that draws random programs: parameters, statements, a result."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ._checks import check_count, check_counts
from ._programs import Input, Program, render
from ._statements import FAMILIES, host_side, write_out
from ._strategies import check_words, need_hypothesis
from ._trainable import TRAINABLE, step, weight
from ._writer import ROWS, WIDTH, Var, Writer

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["programs"]

TENSORS = [
    Input("", ROWS),
    Input("", (WIDTH,)),
    Input("", ("n",)),
    Input("", ()),
    Input("", ROWS, "bool"),
    Input("", ("n",), "int64", high=WIDTH),
    Input("", ROWS, "float64"),
    Input("", ROWS, "bfloat16"),
    Input("", ROWS, "complex64"),
]
BOXES = {"dict": "['t']", "list": "[0]", "tuple": "[1]", "pair": ".left", "record": ".value"}
_TRAINED = [family for family in FAMILIES if family is not write_out] + TRAINABLE


def programs(
    *,
    min_statements: int = 2,
    max_statements: int = 10,
    shapes: tuple[str, ...] = ("module", "object", "closure", "global"),
    host_side_percent: int = 10,
    trained: bool = False,
    steps: bool = False,
) -> SearchStrategy[Program]:
    """Small random `Program`s: `make()` builds the callable with its state; the repr can be pasted into a test.

    Args:
        min_statements, max_statements: about how long.
        shapes: where the state lives: an nn.Module, another object, closure cells, globals.
        host_side_percent: how many contain what no graph can repeat (counting, appending, host reads); expect a
            GraphifyError or eager calls from these.
        trained: for `training_sequences`: all run in grad mode, most hold leaves that require gradients.
        steps: each goes through its own backward and moves its weights, alone or by an optimizer.
    """
    need_hypothesis()
    check_counts("programs", {"min_statements": min_statements, "max_statements": max_statements})
    check_words("programs: shapes", shapes, ("module", "object", "closure", "global"))
    check_count("programs: host_side_percent", host_side_percent, most=100)
    strategy: SearchStrategy[Program] = _composite()(
        (min_statements, max_statements), shapes, host_side_percent, trained or steps, steps
    )
    return strategy


@functools.cache
def _composite() -> Any:
    return need_hypothesis().composite(_draw_program)


def _draw_program(
    draw: DrawFn,
    sizes: tuple[int, int],
    shapes: tuple[str, ...],
    host_side_percent: int,
    trained: bool,
    steps: bool,
) -> Program:
    st = need_hypothesis()
    w = Writer(draw, draw(st.sampled_from(shapes)), trained=trained)
    families = _TRAINED if trained else FAMILIES
    w.history = 0 if steps else w.history
    inputs = [_input(w, number) for number in range(w.choose([1, 2, 2, 3]))]
    if steps or (trained and w.chance(70)):
        weight(w)
    for _ in range(draw(st.integers(*sizes))):
        w.choose(families)(w)
    if w.chance(host_side_percent):
        host_side(w)
    for _ in range(w.choose([0, 1, 2])):
        w.choose(families)(w)
    if trained and w.chance(40):
        weight(w)
    w.body.append(f"return {step(w) if steps else _result(w)}")
    return _finish(w, inputs)


def _input(w: Writer, number: int) -> Input:
    """A parameter, and the variable that the body finds in it."""
    name = f"x{number}"
    found: Input = Input("", ROWS) if number == 0 else w.choose(TENSORS)
    box = w.choose(BOXES) if w.chance(25) else ""
    optional = number > 0 and not box and found == TENSORS[0] and w.chance(25)
    inside = f"t{number}" if box else name
    if box:
        w.body.append(f"{inside} = {name}{BOXES[box]}")
    if optional:
        w.body.append(
            f"{name} = x_first * 0.5 if {name} is None else {name}".replace("x_first", w.variables[0].name)
        )
    w.variables.append(Var(inside, found.dims, found.dtype, frozenset({name})))
    return found._replace(name=name, box=box, optional=optional)


def _result(w: Writer) -> str:
    """What the program returns: variables, inputs, state and constants, bare or in containers."""
    size = f"len({w.variables[0].name}.shape)"
    held = [w.hold(item.name, item.kind, item.init) for item in w.state.values() if item.kind == "tensor"]
    names = [var.name for var in reversed(w.variables)]
    items = [w.choose([*names[:4], *names[:4], *names, *held, "None", size, "'done'"]) for _ in range(4)]
    items[0] = names[0]
    forms = [
        "{0}",
        "({0}, {1})",
        "[{0}, {1}, {2}]",
        "{{'a': {0}, 'b': ({1}, {2})}}",
        "Pair({0}, [{1}])",
        "Record({0}, {{'x': {1}, 'y': {2}}})",
        "({0}, {0}, {1})",
        "({0}, {0}[...], {1})",
        "{0}[...]",
    ]
    return str(w.choose(forms)).format(*items)


def _finish(w: Writer, inputs: list[Input]) -> Program:
    state = list(w.state.values())
    optional = [item for item in inputs if item.optional]
    required = [item for item in inputs if not item.optional]
    signature = [item.name for item in required] + [f"{item.name}=None" for item in optional]
    signature += ["*"] if w.scalars and w.chance(20) else []
    signature += [f"{name}={values[0]!r}" for name, values in w.scalars.items()]
    bare = [name.removeprefix("self.") for name in w.stores]
    return Program(
        source=render(w.shape, state, ", ".join(signature), w.body, w.helpers, bare),
        inputs=tuple(item._replace(written=item.name in w.written) for item in required + optional),
        scalars=tuple(w.scalars.items()),
        state=tuple(state),
        modes=tuple(w.modes),
        min_n=w.min_n,
    )
