"""Random programs over random sizes: buckets equal eager at the exact size, and bit for bit at the padded size.

Programs are made of parts that treat each row by itself, so padding cannot matter; one part of another kind must be
refused, whatever stands around it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from checks import equal
from hypothesis import given, strategies as st
from strategies import often, share, shown
from torch import Tensor, nn

from graphify import Bucket, GraphifyWarning, PaddingError, graphify
from graphify.testing import Call, assert_matches_eager

FEATURES = 4
FILLS = (0.0, 1.0, -2.5, 1e4)


class Model(nn.Module):
    """A program: parts one after the other over (batch, seq, features) and a mask of live places."""

    calls: Tensor
    weight: Tensor

    def __init__(self, parts: Sequence[str], ending: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.parts, self.ending = tuple(parts), ending
        self.register_buffer("weight", torch.randn(FEATURES, FEATURES, generator=generator))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        for part in self.parts:
            x = (SAFE.get(part) or UNSAFE[part])(self, x, mask)
        return ENDINGS[self.ending].make(x)


Part = Callable[[Model, Tensor, Tensor], Tensor]


def _attention(model: Model, x: Tensor, mask: Tensor) -> Tensor:
    scores = (x @ x.transpose(1, 2)).masked_fill(mask[:, None, :] == 0, -1e9)
    return scores.softmax(-1) @ x


def _count(model: Model, x: Tensor, mask: Tensor) -> Tensor:
    model.calls.add_(1)
    return x * model.calls


def _write(model: Model, x: Tensor, mask: Tensor) -> Tensor:
    x.mul_(0.5)
    return x + 1


SAFE: dict[str, Part] = {
    "scaled": lambda m, x, mask: x * 1.5 + 0.25,
    "squashed": lambda m, x, mask: x.tanh(),
    "rectified": lambda m, x, mask: nn.functional.leaky_relu(x),
    "projected": lambda m, x, mask: x @ m.weight,
    "softmax over features": lambda m, x, mask: x.softmax(-1) + x,
    "normed over features": lambda m, x, mask: nn.functional.layer_norm(x, (FEATURES,)),
    "summed over features": lambda m, x, mask: x + x.sum(-1, keepdim=True),
    "summed over live places": lambda m, x, mask: x + (x * mask[..., None]).sum(1, keepdim=True),
    "attention over live places": _attention,
    "summed up to here": lambda m, x, mask: x.cumsum(1),
    "calls counted": _count,
    "argument written": _write,
    "sorted features": lambda m, x, mask: x.sort(-1).values,
}

UNSAFE: dict[str, Part] = {
    "a mean over the batch": lambda m, x, mask: x - (x + 1).mean(0),
    "a sum over the batch": lambda m, x, mask: x + (x + 3).sum(0),
    "a mean over all places": lambda m, x, mask: x + (x + 1).mean(1, keepdim=True),
    "softmax over the batch": lambda m, x, mask: x + 3 * x.softmax(0),
    "summed from the end": lambda m, x, mask: x + (x + 1).flip(0).cumsum(0).flip(0),
    "turned around": lambda m, x, mask: x.flip(0),
    "the size as a factor": lambda m, x, mask: x * x.shape[0],
    "the other size as a divisor": lambda m, x, mask: (x + 1) / x.shape[1],
    "a ramp over the rows": lambda m, x, mask: (
        x + torch.linspace(0, 1, x.shape[0], device=x.device)[:, None, None]
    ),
    "batch norm": lambda m, x, mask: nn.functional.batch_norm(
        x.transpose(1, 2) + 1, None, None, training=True
    ).transpose(1, 2),
    "the last place": lambda m, x, mask: x + x[:, -1:],
}


class Ending(NamedTuple):
    """A result, and how its live part is taken out of one of the bucket's size."""

    make: Callable[[Tensor], Any]
    cut: Callable[[Any, int, int, tuple[int, int]], Any]


def _flat_cut(y: Tensor, n: int, s: int, full: tuple[int, int]) -> Tensor:
    return y.unflatten(0, full)[:n, :s].flatten(0, 1)


def _pair_cut(pair: tuple[Tensor, Tensor], n: int, s: int, full: tuple[int, int]) -> Any:
    return pair[0][:n, :s], pair[1][:n, :s]


ENDINGS: dict[str, Ending] = {
    "as it is": Ending(lambda x: x * 1, lambda y, n, s, full: y[:n, :s]),
    "a dict": Ending(lambda x: {"out": x * 2}, lambda y, n, s, full: {"out": y["out"][:n, :s]}),
    "flattened": Ending(lambda x: (x * 1).flatten(0, 1), _flat_cut),
    "places first": Ending(lambda x: (x * 1).transpose(0, 1), lambda y, n, s, full: y[:s, :n]),
    "halves": Ending(lambda x: (x * 1).chunk(2, -1), _pair_cut),
    "per row": Ending(lambda x: x[:, 0] * 1, lambda y, n, s, full: y[:n]),
    "one place more": Ending(
        lambda x: nn.functional.pad(x, (0, 0, 1, 0)), lambda y, n, s, full: y[:n, : s + 1]
    ),
}

sizes = st.tuples(st.integers(1, 8), st.integers(1, 6))
buckets = st.tuples(st.sampled_from([[8], [3, 8], [2, 4, 8]]), st.sampled_from([[6], [6], [3, 6], [1, 6]]))
actions = st.lists(st.one_of(*[sizes] * 9, st.just("reset")), min_size=2, max_size=5)


class Plan(NamedTuple):
    parts: list[str]
    ending: str
    axes: tuple[list[int], list[int]]
    fill: float
    max_graphs: int | None
    outputs: str
    inference: bool


plans = st.builds(
    Plan,
    st.lists(st.sampled_from(sorted(SAFE)), min_size=1, max_size=4),
    st.sampled_from(sorted(ENDINGS)),
    buckets,
    st.sampled_from(FILLS),
    st.sampled_from([None, None, None, 1, 2]),
    st.sampled_from(["fresh", "fresh", "static"]),
    st.booleans(),
)


def options(plan: Plan) -> dict[str, Any]:
    batch, seq = Bucket("batch", plan.axes[0]), Bucket("seq", plan.axes[1])
    dims = {0: batch, 1: seq}
    return {
        "buckets": {"x": dims, "mask": dims},
        "pad": {"x": plan.fill, "mask": 0},
        "max_graphs": plan.max_graphs,
        "outputs": plan.outputs,
    }


class Run:
    """A graphed program, eager at the exact size and eager at the padded size, over one sequence of calls."""

    def __init__(self, plan: Plan, backend: str, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.exact, self.padded, inner = (Model(plan.parts, plan.ending).to(device) for _ in range(3))
        self.model = inner
        self.graphed = graphify(inner, backend=backend, **options(plan))
        self.buckets = [Bucket("batch", plan.axes[0]), Bucket("seq", plan.axes[1])]
        self.seen: set[tuple[int, ...]] = set()

    def call(self, n: int, s: int, seed: int) -> None:
        """One call on all three, and the comparisons."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, s, FEATURES, generator=generator).to(self.device)
        mask = torch.ones(n, s, device=self.device)
        full = tuple(bucket.fit(size) or 0 for bucket, size in zip(self.buckets, (n, s), strict=True))
        self.seen.add(full)
        wide = torch.full((*full, FEATURES), self.plan.fill, device=self.device)
        wide[:n, :s] = x
        wide_mask = torch.zeros(full, device=self.device)
        wide_mask[:n, :s] = mask
        mine, theirs = x.clone(), x.clone()
        before = self.graphed.stats().eager

        found = self.graphed(mine, mask)

        expected = self.exact(theirs, mask)
        at_full = ENDINGS[self.plan.ending].cut(self.padded(wide, wide_mask), n, s, full)
        near(expected, found)
        near(theirs, mine)
        if self.graphed.stats().eager == before:  # a call that shows a shape runs at the exact size
            exactly(at_full, found)
            exactly(wide[:n, :s], mine)
        equal(self.exact.calls, self.model.calls)

    def check_counts(self) -> None:
        """What holds whatever the calls were."""
        stats, limit = self.graphed.stats(), self.plan.max_graphs
        assert limit is None or len(self.graphed.graphs) <= limit
        assert stats.calls == stats.warmups + stats.captures + stats.replays + stats.eager
        assert set(stats.reasons) <= {"cut", "evicted"}

    def reset(self) -> None:
        """Forget all graphs."""
        self.graphed.reset()
        assert not self.graphed.graphs


def near(expected: Any, found: Any) -> None:
    """The same form, and values equal to rounding."""
    for left, right in zip(leaves(expected), leaves(found), strict=True):
        assert left.shape == right.shape
        assert left.stride() == right.stride()
        scale = float(left.abs().max()) if left.numel() else 1.0
        assert torch.allclose(left, right, rtol=1e-4, atol=1e-4 * max(scale, 1e-3))


def exactly(expected: Any, found: Any) -> None:
    """The same bits."""
    for left, right in zip(leaves(expected), leaves(found), strict=True):
        assert torch.equal(left, right)


def leaves(value: Any) -> list[Tensor]:
    found: list[Tensor] = torch.utils._pytree.tree_leaves(value)
    return found


def test_any_program_over_any_sizes(backend: str, device: torch.device) -> None:
    """Results, arguments and state follow eager through evictions and resets; graphs and captures stay few."""
    tally: Counter[str] = shown(Counter())

    @share(0.1)
    @given(plans, actions)
    def run(plan: Plan, steps: list[Any]) -> None:
        with torch.inference_mode(plan.inference), torch.no_grad():
            twin, resets = Run(plan, backend, device), 0
            for seed, step in enumerate([*steps, *reversed(steps), *steps]):
                if step == "reset":
                    twin.reset()
                    resets += 1
                else:
                    twin.call(*step, seed)
                twin.check_counts()
        stats = twin.graphed.stats()
        if not stats.evictions and not resets:
            assert stats.captures <= len(twin.seen)
        tally.update(replays=stats.replays, calls=stats.calls, runs=1, replayed=stats.replays > 0)

    run()

    assert often(tally["replayed"], 0.5, tally["runs"]), tally
    assert tally["replays"] >= 0.25 * tally["calls"], tally


@st.composite
def unsafe(draw: st.DrawFn) -> tuple[Plan, str]:
    plain = ["argument written", "calls counted", "projected", "rectified", "scaled", "summed over features"]
    name = draw(st.sampled_from(sorted(UNSAFE)))
    before = draw(st.lists(st.sampled_from(plain), max_size=2))
    after = draw(st.lists(st.sampled_from(["scaled", "rectified", "projected"]), max_size=2))
    plan = draw(plans)
    return plan._replace(parts=[*before, name, *after], axes=([8], [6]), max_graphs=None), name


def inputs(n: int, s: int, seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, s, FEATURES, generator=torch.Generator().manual_seed(seed)), torch.ones(n, s)


def test_programs_that_padding_would_change_are_refused(backend: str, device: torch.device) -> None:
    """`PaddingError` at every call, and arguments, state and random streams are as before it."""

    @share(0.12)
    @given(unsafe(), st.tuples(st.integers(2, 7), st.integers(2, 5)))
    def run(case: tuple[Plan, str], size: tuple[int, int]) -> None:
        plan, refused = case[0]._replace(ending="as it is"), []

        def judge(error: Exception) -> bool:
            refused.append(error)
            return isinstance(error, PaddingError)

        calls = [Call(inputs(*size, seed), context=torch.no_grad) for seed in range(2)]
        assert_matches_eager(
            make=lambda: Model(plan.parts, plan.ending),
            calls=calls,
            backend=backend,
            device=device,
            loud_ok=judge,
            **options(plan),
        )
        assert len(refused) == 2

    run()


def test_programs_that_padding_would_change_fall_back(backend: str, device: torch.device) -> None:
    """With fallback="eager" each call is eager's, counted as "padding", and said once."""

    @share(0.06)
    @given(unsafe(), st.tuples(st.integers(2, 7), st.integers(2, 5)))
    def run(case: tuple[Plan, str], size: tuple[int, int]) -> None:
        plan = case[0]
        calls = [Call(inputs(*size, seed), context=torch.no_grad) for seed in range(3)]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            stats = assert_matches_eager(
                make=lambda: Model(plan.parts, plan.ending),
                calls=calls,
                backend=backend,
                device=device,
                fallback="eager",
                **options(plan),
            )
        assert stats.reasons == {"padding": 3}
        assert [warning.category for warning in said] == [GraphifyWarning]

    run()
