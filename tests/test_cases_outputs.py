"""Cases A: results belong to the caller, and every call returns real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import counts, equal, follows_eager, rows

from graphify import StaleOutputError, graphify
from graphify.testing import Call


def two_results(x: torch.Tensor) -> dict[str, Any]:
    y = x * 2
    return {"own": y, "row": y[0], "pair": (y.t(), x + 1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool])
def test_b01_earlier_results_keep_their_numbers(backend, device, dtype):
    """A result of any dtype, its views and detached copies keep the numbers of the call that made them."""
    graphed = graphify(lambda x: ~x if x.dtype == torch.bool else x * 3 + 1, backend=backend)
    kept = []
    for x in [r.to(device) for r in rows(3, 2, count=6, dtype=dtype)]:
        y = graphed(x)
        want = ~x if dtype == torch.bool else x * 3 + 1
        kept.append((want, y, y.detach(), y[0], y.view(-1)[1:]))
        for expected, result, detached, row, tail in kept:
            equal(expected, result)
            equal(expected, detached)
            assert torch.equal(row, expected[0])
            assert torch.equal(tail, expected.view(-1)[1:])
    assert counts(graphed)[2] == 4


def test_b01_results_in_containers_and_views_of_each_other(backend, device):
    """Results that share memory in eager share it in every call, and never with another call."""
    follows_eager([(x,) for x in rows(3, 2)], backend, device, target=two_results)


def test_b01_in_place_edits_of_a_result_stay_with_the_caller(backend, device):
    """Writing into a result changes no later result."""
    calls = [Call((x,), after=lambda twin, out: out["own"].fill_(torch.nan)) for x in rows(3, 2)]
    follows_eager(calls, backend, device, target=two_results)


def test_b01_methods_and_modules_give_fresh_results_too(backend, device):
    """A module's results are the caller's as a function's are."""
    follows_eager([(x,) for x in rows(4, 3)], backend, device, make=lambda: torch.nn.Linear(3, 2))


def test_b01_static_results_are_never_silently_stale(backend, device):
    """With outputs="static", a result that a later replay overwrote is never taken for its old numbers."""
    graphed = graphify(lambda x: x * 2, backend=backend, outputs="static")
    xs = [r.to(device) for r in rows(4, count=6)]
    results = []
    for x in xs:
        results.append(graphed(x))
        assert torch.equal(results[-1], x * 2)
    stale, expected = results[-2], xs[-2] * 2
    try:
        values = stale.clone()
    except RuntimeError as error:
        assert "outputs" in str(error)  # noqa: PT017
    else:
        assert torch.equal(values, expected) or bool(values.isnan().all())


def test_b01_static_result_as_argument_is_refused_by_name(backend, device):
    """A stale static result passed back as an argument is a StaleOutputError that names the argument by its path."""
    if backend == "eager":
        pytest.skip("the eager backend overwrites nothing")
    graphed = graphify(lambda x, more: x * 2 + more["y"], backend=backend, outputs="static")
    fine, *others = rows(4, count=6)
    results = [graphed(r.to(device), {"y": r.to(device)}) for r in others]
    for given, path in ((results[-2], "x"), (fine.to(device), "more['y']")):
        with pytest.raises(StaleOutputError) as raised:
            graphed(given, {"y": results[-2]})
        assert str(raised.value) == STALE.format(path)


STALE = (
    "argument `{}` is a static output that a later replay overwrote: "
    "clone it before that replay, or use outputs='fresh'"
)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("buckets", [None, [4, 8]])
def test_b01_static_result_as_argument_of_a_first_call(backend, device, buckets, grad):
    """A stale static result is refused by name also where no graph stages it: in warm-ups and where it is padded."""
    if backend == "eager":
        pytest.skip("the eager backend overwrites nothing")
    graphed = graphify(lambda x: x * 2, backend=backend, outputs="static")
    results = [graphed(r.to(device)) for r in rows(4, 2, count=6)]
    weight = torch.ones(2, device=device, requires_grad=grad)
    other = graphify(lambda x, *xs: xs[0] * weight, backend=backend, buckets=buckets)
    for x in [r.to(device) for r in rows(4, 2)]:
        with pytest.raises(StaleOutputError) as raised:
            other(x, results[-2])
        assert str(raised.value) == STALE.format("xs[0]")
        equal(x * weight, other(x, x))


def made_in_inference(x):
    with torch.inference_mode():
        return x.relu(), x * 2


INFERRED = {
    "a view": lambda x: made_in_inference(x)[0][0],
    "views of one": lambda x: (row := made_in_inference(x)[0][0], row[...], row[1:]),
    "one and a view of it": lambda x: (one := made_in_inference(x)[0], one[0]),
    "both kinds": lambda x: (*(h := made_in_inference(x))[0], h[1], x + 1, (x - 1)[0], (x - 1)[0].double()),
    "another dtype": lambda x: (
        one := made_in_inference(x)[0],
        one.view(torch.int32),
        one[1:].view(torch.int32),
    ),
}


@pytest.mark.parametrize("outputs", ["fresh", "static"])
@pytest.mark.parametrize("buckets", [None, [4, 8]])
@pytest.mark.parametrize("kind", INFERRED)
def test_b01_results_made_in_inference_mode_inside(backend, device, kind, buckets, outputs):
    """Results that a part under inference mode made are inference tensors, views of them and of each other too."""
    function = INFERRED[kind]
    graphed = graphify(function, backend=backend, buckets=buckets, outputs=outputs)
    for x in [r.to(device) for r in rows(4, 4, count=6)]:
        equal(function(x), graphed(x))
    assert counts(graphed)[2] > 0


def test_b02_output_fed_back_as_input(backend, device):
    """`y = G(y)`, again and again, equals eager at every step."""
    for outputs in ("fresh", "static"):
        graphed = graphify(lambda x: torch.sin(x) * 2 + 0.1, backend=backend, outputs=outputs)
        y = r = torch.randn(4, 3, device=device)
        for _ in range(7):
            y = graphed(y)
            r = torch.sin(r) * 2 + 0.1
            assert torch.equal(y, r)
        assert counts(graphed)[2] == 5


def test_b02_two_graphs_in_a_row(backend, device):
    """`G2(G1(x))` and `G(x, previous result)` equal eager at every step."""
    first = graphify(lambda x: x.cumsum(0), backend=backend)
    second = graphify(lambda x, y: (x - y).cos(), backend=backend)
    y = r = torch.zeros(5, device=device)
    kept = []
    for x in [t.to(device) for t in rows(5, count=6)]:
        y = second(first(x), y)
        r = (x.cumsum(0) - r).cos()
        kept.append((r, y))
        for want, got in kept:
            equal(want, got)


def test_b02_part_of_a_result_fed_back_in_place(backend, device, request):
    """A view of a result can be the argument that the next call writes into."""

    def roll(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state.add_(1)
        return state * 2, state

    graphed = graphify(roll, backend=backend)
    y, r = torch.randn(2, 3, device=device), None
    r = y.clone()
    for _ in range(6):
        (a, b), (c, d) = graphed(y[0]), roll(r[0])
        equal((c, d), (a, b))
        equal(r, y)
        y, r = torch.stack([a, b]), torch.stack([c, d])


def test_b03_every_call_returns_real_values(backend, device):
    """The warm-up, the capturing call and each replay all return computed values."""
    graphed = graphify(lambda x: (x + 1, x.sum(), torch.zeros_like(x)), backend=backend)
    for number, x in enumerate([t.to(device) for t in rows(6)], 1):
        equal((x + 1, x.sum(), torch.zeros_like(x)), graphed(x))
        assert counts(graphed)[:3] == (
            min(number, 1),
            min(number - 1, 1) if number > 1 else 0,
            max(number - 2, 0),
        )


def test_b03_capture_ahead_of_time_makes_the_first_call_a_replay(backend, device):
    """After `capture()` the first call already returns real values, by replay."""
    graphed = graphify(lambda x: x.relu() - 1, backend=backend)
    graphed.capture(torch.randn(4, device=device))
    for x in [t.to(device) for t in rows(4)]:
        equal(x.relu() - 1, graphed(x))
    assert counts(graphed) == (0, 0, 5, 0, 0)


def test_b06_absent_tensor_is_absent(backend, device):
    """An optional tensor that was given at capture plays no part in a call that leaves it out."""
    m = rows(3, count=12)
    x = rows(3, count=12)
    calls = [Call((a,), {"m": b} if i % 2 else {}) for i, (a, b) in enumerate(zip(x, m, strict=True))]
    stats = follows_eager(
        calls, backend, device, target=lambda x, m=None: x if m is None else x * m, replays=8
    )
    assert stats.captures == 2


def test_b06_absent_tensor_inside_a_container(backend, device):
    """A dict entry or a list item that is missing or None makes another signature."""

    def f(batch: dict[str, Any]) -> torch.Tensor:
        extra = batch.get("extra")
        return batch["x"] if extra is None else batch["x"] + sum(extra)

    shapes = [
        lambda a, b: {"x": a},
        lambda a, b: {"x": a, "extra": None},
        lambda a, b: {"x": a, "extra": [b]},
        lambda a, b: {"x": a, "extra": [b, a]},
        lambda a, b: {"x": a, "extra": []},
    ]
    calls = [(shapes[i % 5](a, a * 2),) for i, a in enumerate(rows(3, count=20))]
    follows_eager(calls, backend, device, target=f, replays=10)


def test_b09_in_place_update_of_a_closed_over_tensor_is_seen(backend, device):
    """A tensor parked in a closed-over dict is read anew by every replay."""
    holder = {"p": torch.zeros(3, device=device)}
    graphed = graphify(lambda x: x + holder["p"], backend=backend)
    for x in [t.to(device) for t in rows(3, count=6)]:
        holder["p"].copy_(x * 10)
        equal(x + x * 10, graphed(x))
    assert counts(graphed)[2] == 4


def test_b09_rebinding_a_closed_over_tensor_is_seen(backend, device):
    """A tensor re-bound in a closed-over dict, list, attribute or cell is noticed at the next call."""

    class Box:
        pass

    box, items, table = Box(), [torch.zeros(3, device=device)], {"p": torch.zeros(3, device=device)}
    box.t = torch.zeros(3, device=device)
    cell = torch.zeros(3, device=device)
    graphed = graphify(lambda x: x + table["p"] + items[0] * 2 + box.t * 4 + cell * 8, backend=backend)

    def check(count: int) -> None:
        for x in [t.to(device) for t in rows(3, count=count)]:
            equal(x + table["p"] + items[0] * 2 + box.t * 4 + cell * 8, graphed(x))

    check(4)
    table["p"] = torch.ones(3, device=device)
    check(4)
    items[0] = torch.ones(3, device=device)
    check(4)
    box.t = torch.ones(3, device=device)
    check(4)
    cell = torch.ones(3, device=device)
    check(4)
    assert counts(graphed) == (5, 5, 10, 0, 0)


side = torch.zeros(3)


def test_b09_rebinding_a_global_tensor_is_seen(backend, device, monkeypatch):
    """A global tensor that is re-bound is noticed at the next call."""
    monkeypatch.setitem(globals(), "side", torch.zeros(3, device=device))
    graphed = graphify(lambda x: x - side, backend=backend)
    for value in (1.0, 2.0):
        for x in [t.to(device) for t in rows(3, count=4)]:
            equal(x - side, graphed(x))
        monkeypatch.setitem(globals(), "side", torch.full((3,), value, device=device))
    equal(torch.ones(3, device=device) - side, graphed(torch.ones(3, device=device)))


def test_b09_old_tensor_comes_back(backend, device):
    """Going back to a tensor that an earlier graph read gives that tensor's present numbers."""
    old, new = torch.zeros(3, device=device), torch.ones(3, device=device)
    holder = {"p": old}
    graphed = graphify(lambda x: x + holder["p"], backend=backend)
    for tensor in (old, new, old, new):
        holder["p"] = tensor
        tensor.add_(5)
        for x in [t.to(device) for t in rows(3, count=3)]:
            equal(x + tensor, graphed(x))
