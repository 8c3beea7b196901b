"""`graphify.testing` can fail: each kind of difference is found and named; and what it draws is what it says."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import graphify
from graphify.testing import (
    Ambient,
    Call,
    Changes,
    Data,
    Input,
    Late,
    Latest,
    Pair,
    Program,
    Record,
    Rows,
    Spoil,
    State,
    assert_matches_eager,
    call_sequences,
    make_tensor,
    programs,
    pytrees,
    tensors,
)

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
SOURCES = {"Input": Input, "Program": Program, "State": State}


def calls(count: int = 3, shape: tuple[int, ...] = (2, 3)) -> list[tuple[Tensor]]:
    return [(torch.randn(shape),) for _ in range(count)]


def on_result(change: Callable[[Any], Any]) -> Wrap:
    """A graphed stand-in whose results are right but for one change."""
    return lambda target: lambda *args, **kwargs: change(target(*args, **kwargs))


def plain(target: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in that changes nothing."""
    return lambda *args, **kwargs: target(*args, **kwargs)


def differing(target: Any, graphed: Wrap, sequence: Any = None, **options: Any) -> str:
    """The message about a stand-in."""
    with pytest.raises(AssertionError) as caught:
        assert_matches_eager(target, calls() if sequence is None else sequence, graphed=graphed, **options)
    return str(caught.value)


def twice(x: Tensor) -> Tensor:
    return x * 2


class Counter(nn.Module):
    """State of every kind: a parameter, a buffer, a plain attribute, a container, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.scale, self.last = 1.5, None
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        self.last = x * self.scale
        return self.lin(x) + torch.rand(3, device=x.device)


RESULTS = {
    "a value": (twice, lambda y: y + 1e-6, r"output: values: \d of 6 differ, first at \(0, 0\): eager"),
    "the sign of zero": (
        torch.zeros_like,
        lambda y: -y,
        r"output: values: 6 of 6 differ.*eager 0.0, graphed -0.0",
    ),
    "a stride": (
        twice,
        lambda y: y.t().contiguous().t(),
        r"output: stride: eager \(3, 1\), graphed \(1, 2\)",
    ),
    "a dtype": (twice, lambda y: y.double(), "output: dtype: eager torch.float32, graphed torch.float64"),
    "a shape": (twice, lambda y: y[None], r"output: shape: eager \(2, 3\), graphed \(1, 2, 3\)"),
    "requires_grad": (
        twice,
        lambda y: y.requires_grad_(),
        "output: requires_grad: eager False, graphed True",
    ),
    "a conj bit": (
        lambda x: torch.complex(x, x).conj(),
        lambda y: y.resolve_conj(),
        "output: is_conj: eager True, graphed False",
    ),
    "a container": (lambda x: [x * 2], tuple, r"output: type: eager list, graphed tuple"),
    "a named tuple": (lambda x: Pair(x * 2, 1), tuple, "output: type: eager Pair, graphed tuple"),
    "a dataclass": (lambda x: Record(x * 2), vars, "output: type: eager Record, graphed dict"),
    "a field": (
        lambda x: Record(x * 2, 1),
        lambda r: Record(r.value, 2),
        r"output.note: value: eager 1 \(int\)",
    ),
    "the order of keys": (
        lambda x: {"a": x * 2, "b": 1},
        lambda d: dict(reversed(d.items())),
        r"output: keys: eager \['a', 'b'\], graphed \['b', 'a'\]",
    ),
    "a length": (lambda x: [x * 2, 1], lambda r: r[:1], "output: length: eager 2, graphed 1"),
    "a constant": (
        lambda x: (x * 2, 1),
        lambda r: (r[0], True),
        r"output\[1\]: type: eager 1 \(int\), graphed True",
    ),
    "a NaN": (lambda x: (x * 2, float("nan")), lambda r: (r[0], 0.0), r"output\[1\]: value: eager nan"),
    "a missing leaf": (
        lambda x: {"a": (x * 2, None)},
        lambda d: {"a": (d["a"][0], d["a"][0])},
        r"output\['a'\]\[1\]: type",
    ),
    "a Parameter": (
        lambda x: nn.Parameter(x * 2, requires_grad=False),
        lambda y: y.detach(),
        "output: type: eager Parameter, graphed Tensor",
    ),
    "its own object": (
        lambda x: x,
        lambda y: y[...],
        r"output: aliasing: eager is args\[0\], graphed shares memory",
    ),
    "shared memory": (
        lambda x: x[1:],
        lambda y: y.clone(),
        r"output: aliasing: eager shares memory with args\[0\] at \+12 bytes, graphed has its own memory",
    ),
    "separate outputs": (
        lambda x: (x * 2, x * 2),
        lambda r: (r[0], r[0]),
        r"output\[1\]: aliasing: eager has its own memory, graphed is output\[0\]",
    ),
    "one output twice": (
        lambda x: (lambda y: (y, y))(x * 2),
        lambda r: (r[0], r[1].clone()),
        r"output\[1\]: aliasing: eager is output\[0\], graphed has its own memory",
    ),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_result_that_differs_is_named(kind: str) -> None:
    """Each kind of difference in a result is found, with its path and both sides."""
    target, change, message = RESULTS[kind]

    assert_matches_eager(target, calls(), graphed=plain)
    text = differing(target, on_result(change))

    assert text.startswith("call 1 of 3 differs from eager:\n  ")
    assert re.search(message, text), text


def test_an_inference_tensor_is_told_from_a_normal_one() -> None:
    """Inference mode leaves its mark on results, and the mark is compared."""

    def outside(target: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor) -> Tensor:
            with torch.inference_mode(False), torch.no_grad():
                return x.clone() * 2

        return call

    sequence = [Call((torch.randn(2),), context=torch.inference_mode)]

    assert_matches_eager(twice, sequence, graphed=plain)
    assert "output: is_inference: eager True, graphed False" in differing(twice, outside, sequence)


def spoiled(change: Callable[[Any], object]) -> Wrap:
    """A stand-in that runs the target and then does something to it."""

    def wrap(target: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = target(*args)
            with torch.no_grad():
                change(target)
            return result

        return call

    return wrap


STATE = {
    "a buffer": (lambda m: m.seen.add_(1), "self.seen: values: 3 of 3 differ"),
    "a parameter": (lambda m: m.lin.weight.mul_(2), "self.lin.weight: values: 9 of 9 differ"),
    "a gradient": (
        lambda m: setattr(m.lin.weight, "grad", torch.zeros(3, 3)),
        "self.lin.weight.grad: type: eager None",
    ),
    "requires_grad of a parameter": (
        lambda m: m.lin.requires_grad_(False),
        "self.lin.weight: requires_grad: eager True",
    ),
    "a plain attribute": (
        lambda m: setattr(m, "scale", 2.0),
        r"self.scale: value: eager 1.5 \(float\), graphed 2.0",
    ),
    "a new attribute": (
        lambda m: setattr(m, "extra", 1),
        r"self: attributes: eager \[.*\], graphed \[.*'extra'",
    ),
    "a training flag": (lambda m: m.lin.eval(), "self.lin.training: value: eager True"),
    "a list": (lambda m: m.log.append(1), "self.log: length: eager 0, graphed 1"),
    "a stale attribute": (lambda m: setattr(m, "last", torch.zeros(2, 3)), "self.last: values"),
    "a tied parameter": (
        lambda m: setattr(m, "last", m.seen),
        r"self.last: aliasing: eager has its own memory, graphed is self.seen|self.last: shape",
    ),
}


@pytest.mark.parametrize("kind", STATE)
def test_state_that_differs_is_named(kind: str) -> None:
    """Parameters, buffers, attributes, flags, containers and gradients of the twins are compared."""
    change, message = STATE[kind]

    text = differing(Counter(), spoiled(change))

    assert re.search(message, text), text


def test_state_can_be_left_out() -> None:
    """`check_state=False` compares calls alone."""
    change, _ = STATE["a list"]

    assert_matches_eager(Counter(), calls(), graphed=spoiled(change), check_state=False)


def test_closure_cells_and_globals_are_state() -> None:
    """What a function made by `make` keeps in cells and globals is compared too."""

    def make() -> Callable[..., Any]:
        total, count = torch.zeros(3), 0

        def step(x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            total.add_(x.sum(0))
            return total * 2

        return step

    def cell(target: Any, name: str) -> Any:
        return target.__closure__[target.__code__.co_freevars.index(name)]

    def recount(target: Any) -> None:
        cell(target, "count").cell_contents = 7

    assert_matches_eager(make=make, calls=calls(), graphed=plain)
    assert "step.count: value: eager 1 (int), graphed 7 (int)" in differing(None, spoiled(recount), make=make)
    assert "step.total: values" in differing(
        None, spoiled(lambda f: cell(f, "total").cell_contents.zero_()), make=make
    )


def test_more_state_can_be_given() -> None:
    """`check_state` may be a callable that fetches what no walk from the twin would find."""
    held: dict[int, list[int]] = {}

    def wrap(target: Any) -> Callable[..., Any]:
        held.setdefault(id(target), []).append(1)
        return target.__call__

    text = differing(Counter(), wrap, check_state=lambda twin: held.get(id(twin), []))

    assert "state: length: eager 0, graphed 1" in text


def test_a_mutated_argument_must_be_mutated_alike() -> None:
    """Writes into arguments are compared, at once and whenever a later call touches an older one."""

    def bump(x: Tensor) -> Tensor:
        return x.add_(1) * 2

    def late(target: Any) -> Callable[..., Any]:
        earlier: list[Tensor] = []

        def call(x: Tensor) -> Tensor:
            earlier.append(x)
            earlier[0].add_(len(earlier) - 1)
            return target(x)

        return call

    on_a_copy = differing(bump, lambda target: lambda x: target(x.clone()))

    assert "args[0]: values: 6 of 6 differ" in on_a_copy
    assert on_a_copy.startswith("call 1 of 3")
    assert differing(bump, late).startswith("call 2 of 3")
    assert "args[0] of call 1: values" in differing(bump, late)


def test_an_output_overwritten_by_a_later_call_is_found() -> None:
    """Results stay with their owner: a later call that changes one is named, with both calls."""

    def reuse(target: Any) -> Callable[..., Any]:
        buffer = torch.zeros(2, 3)
        return lambda x: buffer.copy_(target(x)).detach()

    text = differing(twice, reuse)

    assert text.startswith("call 2 of 3 differs")
    assert "output of call 1: values: 6 of 6 differ" in text
    assert_matches_eager(twice, calls(), graphed=reuse, outputs="static")


def test_what_the_owner_does_to_a_result_must_not_reach_the_graph() -> None:
    """`after` changes a result in place on both sides; a stand-in that hands out its own memory is caught."""

    def remember(target: Any) -> Callable[..., Any]:
        known: list[Tensor] = []

        def call(x: Tensor) -> Tensor:
            known.append(target(x))
            return known[0]

        return call

    same = torch.ones(2, 3)
    spoil = [Call((same,), after=lambda twin, out: out.zero_()), Call((same,))]

    assert "output: values" in differing(twice, remember, spoil)


RANDOM = {
    "torch's CPU generator": lambda: torch.rand(1),
    "random": random.random,
    "numpy.random": lambda: sys.modules["numpy"].random.rand(),
}


@pytest.mark.parametrize("stream", RANDOM)
def test_a_random_stream_that_moved_is_named(stream: str) -> None:
    """Both twins start from one random state; drawing more than eager does is a difference, and none remains."""
    if stream == "numpy.random" and "numpy" not in sys.modules:
        pytest.skip("numpy is not loaded")
    sequence = calls()
    before = torch.get_rng_state()

    text = differing(twice, spoiled(lambda target: RANDOM[stream]()), sequence)

    assert f"rng: the state of {stream} differs" in text
    assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_are_drawn_alike() -> None:
    """Two twins that draw the same numbers are equal, call by call, whatever `before` and `after` draw."""
    sequence = [
        Call((torch.ones(2, 3),), before=lambda twin: torch.rand(2), after=lambda twin, out: torch.rand(3)),
        Call((torch.ones(2, 3),), before=lambda twin: torch.manual_seed(3)),
        Call((torch.ones(2, 3),)),
    ]

    assert_matches_eager(Counter(), sequence, graphed=plain)


def picky(x: Tensor) -> Tensor:
    if x.shape[0] == 2:
        raise ValueError("two rows")
    return x * 2


EXCEPTIONS = {
    "missing": (lambda x: x * 2, "exception: eager ValueError: two rows, graphed none"),
    "of another type": (lambda x: list(x)[5], "exception: eager ValueError: two rows, graphed IndexError"),
    "with other words": (
        lambda x: picky(x[:1]) if x.shape[0] < 2 else int("x"),
        "graphed ValueError: invalid literal",
    ),
}


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_an_exception_that_differs_is_named(kind: str) -> None:
    """Eager's exceptions must surface: same type, same words."""
    wrong, message = EXCEPTIONS[kind]

    assert_matches_eager(picky, calls(), graphed=plain)
    assert message in differing(picky, lambda target: wrong)


def test_an_exception_of_the_stand_in_is_the_cause_of_the_failure() -> None:
    """The traceback of what the graphed twin raised stays at hand."""

    def broken(target: Any) -> Callable[..., Any]:
        return lambda x: {}["gone"]

    with pytest.raises(AssertionError, match="exception: eager none, graphed KeyError") as caught:
        assert_matches_eager(twice, calls(), graphed=broken)

    assert isinstance(caught.value.__cause__, KeyError)


def test_global_switches_left_behind_are_named() -> None:
    """Grad mode, autocast and the like must be after the call what eager leaves."""

    def leak(target: Any) -> Callable[..., Any]:
        def call(x: Tensor) -> Tensor:
            torch.set_grad_enabled(False)
            return target(x)

        return call

    sequence = [Call((torch.ones(2),), context=torch.enable_grad)]

    assert "grad mode after the call: eager True, graphed False" in differing(twice, leak, sequence)


def loud(trace: Callable[[Any], object] = lambda target: None) -> Wrap:
    """A stand-in that refuses its second call, perhaps after it has changed something."""

    def wrap(target: Any) -> Callable[..., Any]:
        done: list[int] = []

        def call(*args: Any) -> Any:
            done.append(1)
            if len(done) == 2:
                with torch.no_grad():
                    trace(target)
                raise graphify.CaptureError("no graph for this")
            return target(*args)

        return call

    return wrap


def test_a_loud_refusal_fails_unless_it_is_allowed() -> None:
    """Equal or loud: `loud_ok` decides, for all or case by case, and the sequence goes on."""
    seen: list[graphify.GraphifyError] = []

    text = differing(Counter(), loud())
    assert_matches_eager(Counter(), calls(), graphed=loud(), loud_ok=True)
    assert_matches_eager(Counter(), calls(), graphed=loud(), loud_ok=lambda error: not seen.append(error))

    assert text == "call 2 of 3: eager succeeds, graphed raised CaptureError: no graph for this"
    assert [str(error) for error in seen] == ["no graph for this"]
    assert differing(Counter(), loud(), loud_ok=lambda error: False) == text


def test_a_loud_refusal_that_left_a_trace_is_found() -> None:
    """After a refusal everything must be as before: the plain function then does what eager did."""
    text = differing(Counter(), loud(lambda twin: twin.seen.add_(1)), loud_ok=True)

    assert text.startswith("call 2 of 3 (repeated plainly after a loud refusal) differs from eager:")
    assert "self.seen: values" in text
    assert "rng: the state" not in text
    assert "output: values" in differing(Counter(), loud(lambda twin: twin.lin.weight.add_(1)), loud_ok=True)


def test_long_messages_are_cut() -> None:
    """At most eight differences are shown, and how many more there are."""

    def many(x: Tensor) -> list[Tensor]:
        return [x * number for number in range(12)]

    lines = differing(many, on_result(lambda r: [y + 1 for y in r])).splitlines()

    assert len(lines) == 10
    assert lines[-1] == "  ... and 4 more"


def test_twins_are_copies_and_the_target_is_left_alone() -> None:
    """Neither twin is the target, and nothing of it or of the arguments moves."""
    model, x = Counter(), torch.randn(2, 3)
    before = x.clone()

    assert_matches_eager(model, [(x,), (x,)], graphed=plain)
    assert_matches_eager(lambda x: x.zero_(), [(x,)], graphed=plain)

    assert model.seen.sum() == 0
    assert model.last is None
    assert torch.equal(x, before)


def test_one_tensor_in_two_calls_is_one_tensor_in_each_twin() -> None:
    """Arguments keep their identity across calls, and the memory they share with each other."""
    x = torch.zeros(4)
    found: list[float] = []

    def bump(x: Tensor) -> Tensor:
        return x.add_(1)[0].clone()

    def record(twin: Any, output: Tensor) -> None:
        found.append(output.item())

    assert_matches_eager(bump, [Call((x,), after=record), Call((x[1:],), after=record)], graphed=plain)

    assert found == [1.0, 1.0, 2.0, 2.0]


def test_an_argument_can_be_what_the_target_holds() -> None:
    """A tensor of the target among the arguments is, in each twin, the twin's own."""
    model = Counter()
    held: list[bool] = []

    def look(target: Any) -> Callable[..., Any]:
        def call(x: Tensor) -> Tensor:
            held.append(x is target.seen and x is not model.seen)
            return target(x)

        return call

    assert_matches_eager(model, [(model.seen,)], graphed=look)

    assert held == [True]


def test_copies_keep_everything_about_a_tensor() -> None:
    """Strides, offset, memory shared, conj and neg bits, inference, requires_grad, Parameter: as the caller made them."""
    base = torch.randn(4, 6)
    z = torch.randn(3, dtype=torch.complex64)
    with torch.inference_mode():
        inference = torch.randn(2)
    leaf = nn.Parameter(torch.randn(3))
    leaf.grad = torch.ones(3)
    arguments = (
        base,
        base[1:, ::2],
        base.t(),
        base[:1].expand(5, 6),
        z.conj(),
        z.conj().imag,
        inference,
        leaf,
        leaf,
    )
    seen: list[tuple[Tensor, ...]] = []

    assert_matches_eager(
        make=lambda: lambda *args: seen.append(args), calls=[arguments], graphed=plain, check_state=False
    )

    for twin in seen:
        for original, copy in zip(arguments, twin, strict=True):
            assert copy is not original
            assert copy.data_ptr() != original.data_ptr()
            assert type(copy) is type(original)
            for fact in ("shape", "dtype", "requires_grad", "grad"):
                same = getattr(copy, fact) == getattr(original, fact)
                assert same.all() if isinstance(same, Tensor) else same
            for fact in ("stride", "storage_offset", "is_conj", "is_neg", "is_inference"):
                assert getattr(copy, fact)() == getattr(original, fact)()
            assert torch.equal(copy, original)
        assert twin[7] is twin[8]
        assert twin[1].untyped_storage().data_ptr() == twin[0].untyped_storage().data_ptr()


def test_calls_say_what_happens_around_them() -> None:
    """`before` changes each twin, `context` surrounds the call, keyword arguments arrive by keyword."""

    def scaled(x: Tensor, *, by: float = 1.0) -> tuple[Tensor, bool]:
        return x * by, torch.is_grad_enabled()

    results: list[Any] = []
    sequence = [
        Call(
            (torch.ones(2),), {"by": 3.0}, context=torch.no_grad, after=lambda twin, out: results.append(out)
        ),
        Call((torch.ones(2),), after=lambda twin, out: results.append(out)),
    ]

    assert_matches_eager(scaled, sequence, graphed=plain)
    flips = [Call((torch.ones(2, 3),), before=lambda model: model.train(False))]
    assert_matches_eager(Counter(), flips, graphed=plain)

    assert [(y.tolist(), grad) for y, grad in results] == [([3.0, 3.0], False)] * 2 + [([1.0, 1.0], True)] * 2


def test_a_late_argument_is_looked_up_in_each_twin() -> None:
    """Earlier results and what the twin holds can be passed in, the things themselves."""
    sequence = [
        (torch.ones(2, 3),),
        (Late(lambda twin, outputs: outputs[-1]),),
        Call((Late(lambda twin, outputs: twin.seen),)),
    ]
    results: list[Tensor] = []

    def note(target: Any) -> Callable[..., Any]:
        def call(x: Tensor) -> Tensor:
            results.append(x)
            return target(x)

        return call

    assert_matches_eager(Counter(), sequence, graphed=note)

    assert not torch.equal(results[1], results[0])
    assert results[2].shape == (3,)


def test_functions_whose_twins_would_share_state_are_refused() -> None:
    """A plain function cannot be copied: one that uses tensors or counters from outside needs `make`."""
    weight, log, count = torch.ones(3), [1], 0

    def counts(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x

    assert counts(torch.ones(1)).shape == (1,)
    for function in (lambda x: x * weight, lambda x: log.append(1), counts):
        with pytest.raises(
            TypeError, match=r"`\w+` from outside, so its twins would share it. Pass a factory"
        ):
            assert_matches_eager(function, calls(), graphed=plain)
    with pytest.raises(TypeError, match="either a target or make="):
        assert_matches_eager(twice, calls(), make=lambda: twice)
    with pytest.raises(TypeError, match="either a target or make="):
        assert_matches_eager(None, calls())


def test_a_graphed_target_is_refused() -> None:
    """With a graphed "eager" twin nothing would be compared with eager."""
    with pytest.raises(TypeError, match="graphed already; give the plain one"):
        assert_matches_eager(graphify.graphify(twice, backend="tape"), calls())
    with pytest.raises(TypeError, match="graphed already"):
        assert_matches_eager(graphify.graphify(Counter(), backend="tape"), calls())


def test_a_real_backend_is_compared_and_counted(backend: str, device: torch.device) -> None:
    """Without a stand-in `graphify` makes the twin; its counts come back, and options are passed on."""
    sequence = [Call((torch.randn(2, 3),), context=torch.no_grad) for _ in range(5)]

    stats = assert_matches_eager(Counter(), sequence, backend=backend, device=device, warmup=2)

    assert (stats.calls, stats.warmups, stats.captures, stats.replays) == (5, 2, 1, 2)


# -- strategies


@settings(max_examples=200)
@given(st.data())
def test_tensors_are_what_was_asked_for(data: st.DataObject) -> None:
    """dtypes, dimensions, sides and layouts stay within what the caller named."""
    drawn = data.draw(
        tensors(
            dtypes=[torch.float32, torch.int64],
            min_dims=1,
            max_dims=3,
            min_side=1,
            max_side=3,
            layouts=["stepped"],
        )
    )

    assert drawn.dtype in (torch.float32, torch.int64)
    assert 1 <= drawn.ndim <= 3
    assert all(1 <= side <= 3 for side in drawn.shape)
    assert drawn.stride(-1) == 2


LAYOUTS = {
    "contiguous": ((2, 3), torch.float32, lambda t: t.is_contiguous()),
    "transposed": ((2, 3), torch.float32, lambda t: t.stride() == (1, 2)),
    "stepped": ((2, 3), torch.float32, lambda t: t.stride() == (6, 2)),
    "offset": ((2, 3), torch.float32, lambda t: t.storage_offset() == 16),
    "unaligned": ((2, 3), torch.float32, lambda t: t.storage_offset() == 3),
    "expanded": ((2, 3), torch.float32, lambda t: t.stride() == (0, 1)),
    "overlapping": ((2, 3), torch.float32, lambda t: t.stride() == (1, 1)),
    "channels_last": (
        (2, 3, 4, 5),
        torch.float32,
        lambda t: t.is_contiguous(memory_format=torch.channels_last),
    ),
    "conj": ((2,), torch.complex64, lambda t: t.is_conj()),
    "neg": ((2,), torch.float32, lambda t: t.is_neg()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_what_their_names_say(layout: str) -> None:
    """Each layout has its mark, and one description gives the same bits each time."""
    shape, dtype, mark = LAYOUTS[layout]

    made = make_tensor(shape, dtype, layout=layout, seed=4)

    assert mark(made)
    assert made.shape == shape
    assert torch.equal(made, make_tensor(shape, dtype, layout=layout, seed=4))
    assert torch.equal(made, Data(shape, str(dtype).removeprefix("torch."), layout=layout, seed=4).make())
    assert not torch.equal(made, make_tensor(shape, dtype, layout=layout, seed=5))


def test_an_unknown_layout_is_refused() -> None:
    """A wrong argument of a strategy is an error that lists the right ones."""
    with pytest.raises(ValueError, match=r"tensors: layouts must be one of 'contiguous', .*, not 'diagonal'"):
        tensors(layouts=["diagonal"])


@settings(max_examples=100)
@given(pytrees(st.just("leaf"), allow_constants=False))
def test_pytrees_hold_only_the_leaves_asked_for(tree: Any) -> None:
    """Containers around the caller's leaves, and nothing else."""

    def check(value: Any) -> None:
        if isinstance(value, Record):
            check(value.value)
            check(value.note)
        elif isinstance(value, dict):
            list(map(check, value.values()))
        elif isinstance(value, (list, tuple)):
            list(map(check, value))
        else:
            assert value == "leaf"

    check(tree)


@settings(max_examples=100)
@given(st.data())
def test_programs_run_can_be_pasted_and_repeat_themselves(data: st.DataObject) -> None:
    """Every program runs through its calls without an exception; its repr builds the same program again."""
    program = data.draw(programs())
    sequence = data.draw(call_sequences(program))
    pasted = eval(repr(program), dict(SOURCES))
    raised: list[Exception] = []

    def listen(target: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return target(*args, **kwargs)
            except Exception as error:
                if str(error) != "refused":  # the one that programs raise on purpose
                    raised.append(error)
                raise

        return call

    assert_matches_eager(make=program.make, calls=sequence, graphed=listen)

    assert pasted == program
    assert not raised
    assert 3 <= len(sequence) <= 8


def test_calls_of_a_program_can_be_pasted() -> None:
    """The repr of a drawn call is the text that makes it."""
    names = {
        "Call": Call,
        "Data": Data,
        "Rows": Rows,
        "Latest": Latest,
        "Ambient": Ambient,
        "Changes": Changes,
    }
    names |= {"Spoil": Spoil, "Pair": Pair, "Record": Record}

    @settings(max_examples=50)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        program = data.draw(programs())
        for call in data.draw(call_sequences(program)):
            assert repr(eval(repr(call), dict(names))) == repr(call)

    run()


def test_without_hypothesis_only_the_strategies_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """`graphify.testing` imports without hypothesis, and a strategy says what to install."""
    monkeypatch.setitem(sys.modules, "hypothesis.strategies", None)

    assert_matches_eager(twice, calls(), graphed=plain)
    for strategy in (tensors, pytrees, programs, lambda: call_sequences(Program(""))):
        with pytest.raises(ImportError, match=r"strategies of graphify\.testing need hypothesis: pip"):
            strategy()
