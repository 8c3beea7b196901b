"""What graphify says: where, why and what to write, at the user's own line, once."""

from __future__ import annotations

import inspect
import linecache
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphify import CaptureError, GraphifyError, GraphifyWarning, InputError, graphify

READ = "a graph replays device work only; the host cannot read a value in the middle of it"
SHAPE = "the size of the result depends on values, and a graph has fixed sizes"
ONCE = "Python runs when a graph is recorded; a replay repeats device work only"
KEEP = "keep it in a tensor and change that in place (`copy_`, `add_`), or return it"


class Box:
    n = 0


box = Box()
log: list[int] = []
held = torch.ones(3)


def item(x: Tensor) -> Tensor:
    return x * x[0].item()


def branch(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def as_list(x: Tensor) -> Tensor:
    return x * x.tolist()[0]


def masked(x: Tensor) -> Tensor:
    return x[x > 0]


def nonzero(x: Tensor) -> Tensor:
    return x.nonzero()


def masked_select(x: Tensor) -> Tensor:
    return x.masked_select(x > 0)


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(x.long())


def equal(x: Tensor) -> bool:
    return torch.equal(x, x)


def masked_store(x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = x
    return y


def inverse(x: Tensor) -> Tensor:
    return torch.linalg.inv(x.diag())


def draws(x: Tensor) -> Tensor:
    return x * random.random()


def counts_up(x: Tensor) -> Tensor:
    box.n += 1
    return x + 1


def appends(x: Tensor) -> Tensor:
    log.append(1)
    return x + 1


def turns(x: Tensor) -> Tensor:
    return x.unsqueeze_(0) + 1


def makes(x: Tensor) -> Any:
    return x + 1, Box()


def shares(x: Tensor) -> Tensor:
    return x + held.add_(1)


SCALAR = (
    "a tensor's value is read on the host (`.item()`, `bool()`, `int()`, `float()`, or an `if` on a tensor)"
)
ON_DEVICE = "keep it on the device (`torch.where` for a branch), or do this part outside the graphed function"
SAID: list[tuple[Callable[..., Any], str | None, str, str, str]] = [
    (item, "x[0].item()", SCALAR, READ, ON_DEVICE),
    (branch, "return x if", SCALAR, READ, ON_DEVICE),
    (as_list, "x.tolist()", "`Tensor.tolist` reads a tensor on the host", READ,
     "keep it on the device, or do this part outside the graphed function"),
    (masked, "x[x > 0]", "`x[mask]` makes a result of data-dependent size", SHAPE, "`torch.where(mask, x, other)`"),
    (nonzero, "x.nonzero()", "`nonzero` makes a result of data-dependent size", SHAPE,
     "`torch.where(mask, x, other)`, or `torch.nonzero_static(x, size=n)`"),
    (masked_select, "x.masked_select", "`masked_select` makes a result of data-dependent size", SHAPE,
     "`torch.where(mask, x, other)`, or multiply by the mask"),
    (repeated, "x.repeat_interleave", "`repeat_interleave` with a tensor of counts has a data-dependent size", SHAPE,
     "pass `output_size=`"),
    (equal, "torch.equal", "two tensors are compared on the host (`torch.equal`, `torch.allclose`)", READ, "compare outside"),
    (masked_store, "y[x > 0] = x", "`x[mask] = values` hides a data-dependent size", SHAPE,
     "`x.copy_(torch.where(mask, values, x))`"),
    (inverse, "torch.linalg.inv", "a `torch.linalg` function checks for errors on the host", READ,
     "its `_ex` form, such as `torch.linalg.inv_ex`"),
    (draws, None, "`draws` draws from random", ONCE,
     "draw outside and pass the number as a tensor, or use torch's generator of the device"),
    (counts_up, None, "`counts_up` reads and re-binds `box.n`", ONCE, KEEP),
    (appends, None, "`appends` changes `log[1]`", ONCE, KEEP),
    (turns, None, "`x` gets another shape or layout in place", "the caller's tensor would not, since a replay changes memory only",
     "use the form without underscore, which makes a view"),
    (makes, None, "`output[1]` is a new Box at each call",
     "a replay cannot make Python objects of a kind that graphify does not know",
     "return tensors, tuples, dicts, NamedTuples or dataclasses"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    monkeypatch.setattr(box, "n", 0)
    log.clear()


@pytest.mark.parametrize("said", SAID, ids=lambda said: said[0].__name__)
def test_capture_errors_say_where_why_and_what_to_write(said):
    """Each refusal names the thing, the user's line where there is one, the reason and the cure."""
    function, source, what, why, fix = said
    graphed = graphify(function, backend="tape")
    with pytest.raises(CaptureError) as raised:
        for _ in range(2):
            graphed(torch.ones(3))
    error = raised.value
    assert (error.what, error.why, error.fix) == (what, why, fix)
    lines = [what, f"  why:   {why}", f"  write: {fix}"]
    if source is not None:
        number, text = line_with(function, source)
        assert error.where == f"{__file__}:{number}: {text}"
        lines.insert(1, f"  where: {error.where}")
    assert str(error) == "\n".join(lines)


def line_with(function: Callable[..., Any], source: str) -> tuple[int, str]:
    lines, start = inspect.getsourcelines(function)
    index = next(i for i, line in enumerate(lines) if source in line)
    return start + index, lines[index].strip()


def test_an_argument_that_shares_memory_with_outside_state():
    """Passing the very tensor that the function writes from outside is refused by argument name."""
    graphed = graphify(shares, backend="tape")
    with pytest.raises(CaptureError) as raised:
        for _ in range(2):
            graphed(held)
    assert (
        raised.value.what
        == "`x` shares memory with a tensor that `shares` uses from outside, and one is written"
    )
    assert raised.value.fix == "pass a clone, or use only one of the two"


INPUTS = [
    (lambda: {1}, "`x` is a set: a signature cannot hold something without an order. Pass a tuple, list or frozenset."),
    (lambda: iter([1]), "`x` is a list_iterator: the first call would use it up. Pass a list of what it yields."),
    (lambda: {"a": [{1}]}, "`x['a'][0]` is a set: a signature cannot hold something without an order. Pass a tuple, list or frozenset."),
    (lambda: torch.eye(2).to_sparse(), "argument `x`: its layout is torch.sparse_coo: only strided tensors can be copied into a buffer. Pass to_dense()."),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text"), INPUTS, ids=["set", "iterator", "nested set", "sparse"])
def test_input_errors_name_the_argument_by_path(make, text):
    """An argument that no signature can hold is named by its path, with what to pass instead."""
    with pytest.raises(InputError) as raised:
        graphify(lambda x: x, backend="tape")(make())
    assert str(raised.value) == text
    assert isinstance(raised.value, (GraphifyError, ValueError))


def warned(call: Callable[[], Any], times: int = 4) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(times):
            call()
    return [w for w in seen if issubclass(w.category, GraphifyWarning)]


def test_fallback_warns_once_at_the_callers_line():
    """A fallback warns once per reason, at the line that made the call, and carries the whole message."""
    graphed = graphify(item, backend="tape", fallback="eager")
    caller = lambda: graphed(torch.ones(3))
    (only,) = warned(caller)
    number, text = line_with(item, ".item()")
    assert str(only.message) == (
        f"`item` runs eagerly from now on for this kind of call: {SCALAR}\n"
        f"  where: {__file__}:{number}: {text}\n  why:   {READ}\n  write: {ON_DEVICE}"
    )
    assert only.filename == __file__
    assert "caller = lambda" in linecache.getline(only.filename, only.lineno)


def test_each_wrapper_and_each_reason_warns_for_itself():
    """Another wrapper warns again, and so does another reason of the same wrapper."""

    def two(x: Tensor, kind: str) -> Any:
        return x.nonzero() if kind == "a" else x

    for _ in range(2):
        graphed = graphify(two, backend="tape", fallback="eager")
        seen = warned(lambda: (graphed(torch.ones(3), "a"), graphed({1}, "b")))
        assert len(seen) == 2
        assert "nonzero" in str(seen[0].message)
        assert "`x` is a set" in str(seen[1].message)


def test_many_values_of_a_number():
    """A number with many values is named, once, with the way out."""
    graphed = graphify(lambda x, step: x * step, backend="tape")
    numbers = iter(range(20))
    (only,) = warned(lambda: graphed(torch.ones(3), next(numbers)), times=20)
    assert str(only.message) == (
        "`test_many_values_of_a_number.<locals>.<lambda>` has seen 8 values of `step`; each is baked into a graph of "
        "its own: pass it as a tensor"
    )


def test_new_object_at_each_call_is_named_as_such():
    """An object that is new at each call is called that, and not a number with many values."""
    graphed = graphify(lambda x, config: x + 1, backend="tape")
    keep: list[Box] = []

    def call() -> None:
        keep.append(Box())
        graphed(torch.ones(3), keep[-1])
        del keep[:-2]

    seen = warned(call, times=12)
    assert [str(w.message).partition("` `")[2] for w in seen] == [
        "config` is a new object at each call, so no call is ever captured: keep one object"
    ]


def test_an_argument_container_that_the_function_changes():
    """A function that changes a dict among its arguments is refused by a CaptureError, not by a fault of ours."""

    def f(batch: dict[str, Any]) -> Tensor:
        batch["seen"] = True
        return batch["x"] + 1

    graphed = graphify(f, backend="tape")
    with pytest.raises(CaptureError, match="changes a container among its arguments"):
        for _ in range(2):
            graphed({"x": torch.ones(3)})


def test_what_runs_eagerly_by_nature_says_nothing():
    """disabled(), torch.func and CPU tensors under auto run plainly without a word."""
    from graphify import disabled

    graphed = graphify(lambda x: x * 2)
    assert warned(lambda: graphed(torch.ones(3))) == []
    taped = graphify(lambda x: x * 2, backend="tape")
    with disabled():
        assert warned(lambda: taped(torch.ones(3))) == []
    assert warned(lambda: torch.vmap(taped)(torch.ones(3))) == []


def test_options_are_checked_by_name():
    """A wrong option is a TypeError or ValueError that names it."""
    for options, kind, text in (
        ({"warmup": 0}, ValueError, "warmup must be at least 1, not 0"),
        ({"max_graphs": "many"}, TypeError, "max_graphs must be an int, not 'many'"),
        ({"fallback": "error"}, ValueError, "fallback must be one of 'raise', 'eager', not 'error'"),
        ({"backend": "gpu"}, ValueError, "backend must be one of 'auto', 'cuda', 'tape', 'eager', not 'gpu'"),
        ({"outputs": "copy"}, ValueError, "outputs must be one of 'fresh', 'static', not 'copy'"),
        ({"pool": 3}, TypeError, "pool must be a GraphPool or None, not 3"),
    ):
        with pytest.raises(kind) as raised:
            graphify(lambda x: x, **options)
        assert str(raised.value) == text
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket'"):
        graphify(lambda x: x, bucket=[1])
