"""Wrong uses of `graphify.testing`: each raises an error that names the argument, before anything is compared."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from misuse import Bench, Use, misused, rows
from torch import Tensor, nn

from graphify import graphify
from graphify.testing import (
    Ambient,
    Backward,
    Call,
    Changes,
    Data,
    Drop,
    Edit,
    EditArguments,
    Gradients,
    Hook,
    Input,
    Late,
    Latest,
    Program,
    Rows,
    Scaled,
    Spoil,
    Then,
    Update,
    assert_matches_eager,
    call_sequences,
    make_tensor,
    programs,
    pytrees,
    tensors,
    training_sequences,
)

HERE = torch.device("cpu")
X = torch.arange(3.0)
CALLS = [(X + number,) for number in range(4)]
NORM = nn.BatchNorm1d(3)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def uses_a_global(x: Tensor) -> Tensor:
    return x * X


def wrong(name: str, error: type[Exception], says: str, *arguments: Any, **options: Any) -> Use:
    """A comparison with wrong arguments; a wrong one by keyword is named in the text."""
    return Use(name, lambda b: assert_matches_eager(*arguments, **options), error, says)


def compared(**options: Any) -> Use:
    """Right but for one option, which takes values of another kind."""
    ((name, value),) = options.items()
    says = f"assert_matches_eager: {name} must be"
    return wrong(f"{name}={value!r}"[:40], TypeError, says, doubled, CALLS, **options)


def of_calls(name: str, calls: Any, says: str) -> Use:
    return wrong(name, TypeError, f"assert_matches_eager: {says}", doubled, calls)


MATCHING = [
    wrong("nothing", TypeError, "give either a target or make="),
    wrong("target and make", TypeError, "give either a target or make=", doubled, CALLS, make=lambda: doubled),
    wrong("a graphed target", TypeError, "the target is graphed already", graphify(doubled), CALLS),
    wrong("an int as target", TypeError, "the target must be a module, a function", 3, CALLS),
    wrong("a class as target", TypeError, "the target must be a module, a function", nn.Linear, CALLS),
    wrong("a target with a global", TypeError, "`uses_a_global` uses `X` from outside", uses_a_global, CALLS),
    wrong("a third position", TypeError, "assert_matches_eager() takes", doubled, CALLS, "tape"),
    wrong("a backend", ValueError, "backend must be one of", doubled, CALLS, backend="gpu"),
    wrong("an option's value", ValueError, "warmup must be at least 1", doubled, CALLS, warmup=0),
    wrong("an option's name", TypeError, "'warmups'", doubled, CALLS, warmups=2),
    wrong("an unknown device", ValueError, "device: no device 'nowhere'", doubled, CALLS, device="nowhere"),
    wrong("a device of a kind", ValueError, "device: no device <object", doubled, CALLS, device=object()),
    wrong("a device without values", ValueError, "device: tensors on the meta", doubled, CALLS, device="meta"),
    of_calls("calls: None", None, "calls must be an iterable of Calls"),
    of_calls("calls: an int", 3, "calls must be an iterable of Calls"),
    of_calls("calls: a tensor", X, "calls must be an iterable of Calls"),
    of_calls("calls: a dict", {"x": X}, "calls must be an iterable of Calls"),
    of_calls("calls: one Call", Call((X,)), "calls must be an iterable of Calls"),
    of_calls("calls: one tuple", (X,), "each of calls must be a Call or a tuple"),
    of_calls("calls: tensors", [X, X], "each of calls must be a Call or a tuple"),
    of_calls("calls: strings", ["ab"], "each of calls must be a Call or a tuple"),
    of_calls("calls: dicts", [{"x": X}], "each of calls must be a Call or a tuple"),
    of_calls("calls: numbers", [3], "each of calls must be a Call or a tuple"),
    wrong("make: an int", TypeError, "make must be a function", make=3, calls=CALLS),
    wrong("make: a module", TypeError, "make must be a function", make=NORM, calls=CALLS),
    wrong("make gives nothing", TypeError, "what make() gave must be", make=lambda: None, calls=CALLS),
    wrong("make gives one twice", TypeError, "make() gave one BatchNorm1d twice", make=lambda: NORM, calls=CALLS),
    wrong("make gives graphed", TypeError, "what make() gave is graphed already", make=lambda: graphify(doubled)),
    wrong("make gives a global", TypeError, "uses `X` from outside", make=lambda: uses_a_global, calls=CALLS),
    wrong("graphed gives nothing", TypeError, "graphed gave None", doubled, CALLS, graphed=lambda twin: None),
    compared(graphed=3),
    compared(check_state="yes"),
    compared(check_state=None),
    compared(loud_ok="no"),
    compared(loud_ok=ValueError),
]  # fmt: skip
CALL = [
    Use("args: a tensor", lambda b: Call(X), TypeError, "Call: args must be a tuple"),
    Use("kwargs: a list", lambda b: Call((X,), [1]), TypeError, "Call: kwargs must be a dict"),
    Use("kwargs: None", lambda b: Call((X,), None), TypeError, "Call: kwargs must be a dict"),
    Use(
        "kwargs: a number as key", lambda b: Call((X,), {1: 2}), TypeError, "Call: each key of kwargs must be"
    ),
    Use("before: an int", lambda b: Call((X,), before=3), TypeError, "Call: before must be a function"),
    Use(
        "context: one made", lambda b: Call((X,), context=torch.no_grad()), TypeError, "Call: context must be"
    ),
    Use("context: a string", lambda b: Call((X,), context="no_grad"), TypeError, "Call: context must be"),
    Use("after: an int", lambda b: Call((X,), after=3), TypeError, "Call: after must be a function"),
    Use(
        "after: a list", lambda b: Call((X,), after=[Backward()]), TypeError, "Call: after must be a function"
    ),
    Use("after: an act", lambda b: Call((X,), after=Backward()), TypeError, "write Then((Backward(),))"),
    Use("an unknown field", lambda b: Call((X,), then=3), TypeError, "'then'"),
    Use("Then: one act", lambda b: Then(Backward()), TypeError, "Then: acts must be a tuple of acts"),
    Use("Then: a function", lambda b: Then((doubled,)), TypeError, "Then: acts must be a tuple of acts"),
    Use("Late: a tensor", lambda b: Late(X), TypeError, "Late: get must be a function"),
]
ACTS = [
    Use("Backward: one ago", lambda b: Backward(0), TypeError, "Backward: ago must be a tuple"),
    Use("Backward: the future", lambda b: Backward((-1,)), ValueError, "Backward: ago must be at least 0"),
    Use(
        "Backward: a loss", lambda b: Backward(loss="max"), ValueError, "Backward: loss must be one of 'sum'"
    ),
    Use(
        "Backward: a layout", lambda b: Backward(loss="direct x"), ValueError, "Backward: loss must be one of"
    ),
    Use("Backward: into", lambda b: Backward(into="weights"), ValueError, "Backward: into must be one of"),
    Use("Backward: picks", lambda b: Backward(picks="a"), TypeError, "Backward: picks must be a tuple"),
    Use("Backward: seed", lambda b: Backward(seed="a"), TypeError, "Backward: seed must be an int"),
    Use(
        "Gradients: to", lambda b: Gradients(to="me"), ValueError, "Gradients: to must be one of 'parameters'"
    ),
    Use("Gradients: a loss", lambda b: Gradients(loss=""), ValueError, "Gradients: loss must be one of"),
    Use("Edit: pick", lambda b: Edit(pick="a"), TypeError, "Edit: pick must be an int"),
    Use("EditArguments: ago", lambda b: EditArguments(1), TypeError, "EditArguments: ago must be a tuple"),
    Use("Update: rate", lambda b: Update(rate="fast"), TypeError, "Update: rate must be a number"),
    Use("Update: clip", lambda b: Update(clip="a"), TypeError, "Update: clip must be a number or None"),
    Use("Hook: pick", lambda b: Hook(pick=-1), ValueError, "Hook: pick must be at least 0"),
    Use("Drop: ago", lambda b: Drop((-3,)), ValueError, "Drop: ago must be at least 0"),
    Use(
        "Changes: a string", lambda b: Changes("set"), TypeError, "Changes: changes must be a tuple of tuples"
    ),
    Use(
        "Changes: a verb",
        lambda b: Changes((("burn", "", 1),)),
        ValueError,
        "Changes: the verb must be one of",
    ),
    Use(
        "Changes: too short", lambda b: Changes((("set",),)), ValueError, "Changes: the length of each change"
    ),
    Use("Ambient: mode", lambda b: Ambient("train"), ValueError, "Ambient: mode must be one of 'no_grad'"),
    Use("Ambient: autocast", lambda b: Ambient("grad", "x"), ValueError, "Ambient: autocast must be one of"),
    Use("Spoil: factor", lambda b: Spoil("a"), TypeError, "Spoil: factor must be a number"),
]
DATA = [
    Use("a layout", lambda b: make_tensor((2,), layout="x"), ValueError, "make_tensor: layout must be one of"),
    Use("one that does not fit", lambda b: make_tensor((2,), layout="channels_last"), ValueError, "does not fit shape (2,)"),
    Use("a dtype's name", lambda b: make_tensor((2,), "float32"), TypeError, "make_tensor: dtype must be"),
    Use("one size", lambda b: make_tensor(3), TypeError, "make_tensor: shape must be a tuple of sizes"),
    Use("a negative size", lambda b: make_tensor((-3,)), ValueError, "make_tensor: a size in shape must be at least 0"),
    Use("half a size", lambda b: make_tensor((1.5,)), TypeError, "make_tensor: a size in shape must be an int"),
    Use("a seed", lambda b: make_tensor((2,), seed="a"), TypeError, "make_tensor: seed must be an int"),
    Use("no integers", lambda b: make_tensor((2,), torch.int64, high=0), ValueError, "make_tensor: high must be at least 1"),
    Use("Data: a dtype", lambda b: Data((2,), dtype="floaty"), TypeError, "Data: dtype must be the name of one"),
    Use("Data: a torch dtype", lambda b: Data((2,), dtype=torch.half), TypeError, "Data: dtype must be the name"),
    Use("Data: a layout", lambda b: Data((2,), layout="x"), ValueError, "Data: layout must be one of"),
    Use("Data: a list", lambda b: Data([2]), TypeError, "Data: shape must be a tuple of sizes"),
    Use("Data: integers that need gradients", lambda b: Data((2,), "int64", requires_grad=True), ValueError, "Data: requires_grad"),
    Use("Rows: of a tensor", lambda b: Rows(X, 0, 1), TypeError, "Rows: of must be a Data"),
    Use("Rows: start", lambda b: Rows(Data((4,)), "a", 1), TypeError, "Rows: start must be an int"),
    Use("Scaled: of a tensor", lambda b: Scaled(X), TypeError, "Scaled: of must be a Data"),
    Use("Latest: like a tensor", lambda b: Latest(X), TypeError, "Latest: like must be a Data"),
]  # fmt: skip
PROGRAM = Program("def make():\n    return lambda x: x * 2\n", (Input("x", (3,)),))
PROGRAMS = [
    Use("no text", lambda b: Program(None), TypeError, "Program: source must be Python text"),
    Use(
        "no make()",
        lambda b: Program("x = 1\n").make(),
        TypeError,
        "Program: make in the source must be a function",
    ),
    Use(
        "no such device",
        lambda b: PROGRAM.make("nowhere"),
        ValueError,
        "Program.make: device: no device 'nowhere'",
    ),
]


@rows(*MATCHING, *CALL, *ACTS, *DATA, *PROGRAMS)
def test_wrong_uses(use: Use) -> None:
    """An argument of a wrong kind is named where it is given; nothing is taken for something else in silence."""
    misused(use, Bench("tape", HERE))


STRATEGIES = [
    Use("layouts: unknown", lambda b: tensors(layouts=["x"]), ValueError, "tensors: layouts must be one of"),
    Use("layouts: one", lambda b: tensors(layouts="conj"), TypeError, "tensors: layouts must be a list of words"),
    Use("layouts: none", lambda b: tensors(layouts=[]), ValueError, "tensors: layouts: the number of words"),
    Use("dtypes: one", lambda b: tensors(dtypes=torch.half), TypeError, "tensors: dtypes must be a list"),
    Use("dtypes: names", lambda b: tensors(dtypes=["int64"]), TypeError, "tensors: each of dtypes must be"),
    Use("dtypes: none", lambda b: tensors(dtypes=[]), ValueError, "tensors: the number of dtypes must be"),
    Use("shapes: a tuple", lambda b: tensors(shapes=(2, 3)), TypeError, "tensors: shapes must be a hypothesis"),
    Use("dims: swapped", lambda b: tensors(min_dims=3, max_dims=1), ValueError, "tensors: min_dims must be at most"),
    Use("dims: negative", lambda b: tensors(min_dims=-1), ValueError, "tensors: min_dims must be at least 0"),
    Use("dims: half", lambda b: tensors(max_dims=1.5), TypeError, "tensors: max_dims must be an int"),
    Use("sides: swapped", lambda b: tensors(min_side=5), ValueError, "tensors: min_side must be at most max_side"),
    Use("sides: negative", lambda b: tensors(min_side=-2), ValueError, "tensors: min_side must be at least 0"),
    Use("leaves: a list", lambda b: pytrees([X]), TypeError, "pytrees: leaves must be a hypothesis strategy"),
    Use("keys: a list", lambda b: pytrees(keys=["a"]), TypeError, "pytrees: keys must be a hypothesis strategy"),
    Use("no leaves", lambda b: pytrees(max_leaves=0), ValueError, "pytrees: max_leaves must be at least 1"),
    Use("statements: swapped", lambda b: programs(min_statements=20), ValueError, "programs: min_statements must"),
    Use("statements: negative", lambda b: programs(min_statements=-1), ValueError, "programs: min_statements must"),
    Use("shapes: unknown", lambda b: programs(shapes=("planet",)), ValueError, "programs: shapes must be one of"),
    Use("shapes: one", lambda b: programs(shapes="module"), TypeError, "programs: shapes must be a list"),
    Use("percent: too many", lambda b: programs(host_side_percent=101), ValueError, "host_side_percent must be at most"),
    Use("percent: a word", lambda b: programs(host_side_percent="few"), TypeError, "host_side_percent must be an int"),
    Use("calls: no program", lambda b: call_sequences(doubled), TypeError, "call_sequences: program must be"),
    Use("calls: swapped", lambda b: call_sequences(PROGRAM, min_calls=9), ValueError, "call_sequences: min_calls must"),
    Use("calls: negative", lambda b: call_sequences(PROGRAM, min_calls=-1), ValueError, "call_sequences: min_calls must"),
    Use("calls: device", lambda b: call_sequences(PROGRAM, device="x"), ValueError, "call_sequences: device: no device"),
    Use("training: no program", lambda b: training_sequences("p"), TypeError, "training_sequences: program must be"),
    Use("training: swapped", lambda b: training_sequences(PROGRAM, max_calls=2), ValueError, "training_sequences: min_calls"),
    Use("training: without gradients", lambda b: training_sequences(PROGRAM), ValueError, "must run in grad mode"),
]  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("hypothesis") is None, reason="needs hypothesis")
@rows(*STRATEGIES)
def test_wrong_strategies(use: Use) -> None:
    """A strategy says what is wrong when it is made, not when the first example is drawn."""
    misused(use, Bench("tape", HERE))
