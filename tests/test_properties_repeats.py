"""Random programs that do other things at other sizes: all buckets captured in a row equal eager, whatever changes after.

Calls have the sizes of buckets, so that nothing is padded, and a size may be used in any way.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from checks import equal
from hypothesis import given, strategies as st
from strategies import often, share, shown
from torch import Tensor, nn

from graphify import GraphifyError, graphify
from graphify._repeats import Example

SIZES = [1, 2, 4, 8]
WIDTH = 3


def made(size: int, device: torch.device) -> Tensor:
    return torch.linspace(0.5, 1.5, WIDTH, device=device) + size


class Model(nn.Module):
    """Parts one after the other, and tensors and values that they find by the number of rows, one way or another."""

    def __init__(self, parts: list[str], device: torch.device) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.one, self.other = made(0, device), made(-1, device)
        self.weight = nn.Parameter(made(1, device))
        self.tables = {size: made(size, device) for size in SIZES}
        self.rows = [made(size, device) for size in SIZES]
        self.few = {2: made(5, device)}
        self.nested = {"deep": [{size: made(size + 2, device) for size in SIZES}]}
        for size in SIZES:
            setattr(self, f"table{size}", made(size, device))
        self.cached = functools.lru_cache(functools.partial(made, device=device))
        self.keeper = [made(size, device) for size in SIZES]
        self.weak = weakref.WeakValueDictionary(zip(SIZES, self.keeper, strict=True))
        self.scales = {size: 1.0 + size / 8 for size in SIZES}
        self.small, self.chosen = 2, [2, 8]
        self.grid, self.count = torch.zeros(8, WIDTH, device=device), torch.zeros((), device=device)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = PARTS[part](self, x)
        return x * 1

    def state(self) -> list[Tensor | None]:
        """What calls may leave."""
        return [self.grid, self.count, self.last]


def _statement(m: Model, x: Tensor) -> Tensor:
    if len(x) <= m.small:
        x = x * m.other
    return x * m.one


def _caught(m: Model, x: Tensor) -> Tensor:
    try:
        return x + m.few[len(x)]
    except KeyError:
        return x - m.one


def _looped(m: Model, x: Tensor) -> Tensor:
    for row in m.rows[: len(x) // 2]:
        x = x + row
    return x


def _counted(m: Model, x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        m.count.add_(1)
    return x * 2


def _counted_aside(m: Model, x: Tensor) -> Tensor:
    m.count.data.add_(1)
    return x + 1


def _grid_viewed(m: Model, x: Tensor) -> Tensor:
    m.grid[: len(x)].t().reshape(-1).add_(1)  # a view of one row, and a copy of more
    return x + m.grid[0]


def _grid_row(m: Model, x: Tensor) -> Tensor:
    m.grid[len(x) - 1].add_(1)
    return x * m.grid[len(x) - 1]


def _argument(m: Model, x: Tensor) -> Tensor:
    x.t().reshape(-1).add_(1)
    return x * 2


def _graded(m: Model, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(len(x) == 2):
        return (x * m.weight).detach()


def _left(m: Model, x: Tensor) -> Tensor:
    m.last = m.one * 2
    return x * 3


def _left_by_few(m: Model, x: Tensor) -> Tensor:
    if len(x) == 4:
        m.last = m.one * 3
    return x * 4


Part = Callable[[Model, Tensor], Tensor]
PARTS: dict[str, Part] = {
    "plain": lambda m, x: x * 1.5 + 0.25,
    "normed": lambda m, x: nn.functional.layer_norm(x, (WIDTH,)),
    "weighted": lambda m, x: x * m.weight,
    "table": lambda m, x: x * m.tables[len(x)],
    "list": lambda m, x: x * m.rows[SIZES.index(len(x))],
    "nested": lambda m, x: x - m.nested["deep"][0][len(x)],
    "by name": lambda m, x: x * getattr(m, f"table{len(x)}"),
    "cached": lambda m, x: x + m.cached(len(x)),
    "weak": lambda m, x: x * m.weak[len(x)],
    "statement": _statement,
    "expression": lambda m, x: x * (m.other if len(x) <= m.small else m.one),
    "caught": _caught,
    "got": lambda m, x: x - m.few.get(len(x), m.one),
    "any of": lambda m, x: x.sin() if any(len(x) == size for size in m.chosen) else x.cos(),
    "function": lambda m, x: {True: torch.sin, False: torch.tanh}[len(x) > 2](x),
    "looped": _looped,
    "scaled": lambda m, x: x * m.scales[len(x)],
    "counted by all": lambda m, x: _counted(m, x, 1),
    "counted by few": lambda m, x: _counted(m, x, max(0, m.small - len(x))),
    "counted by size": lambda m, x: _counted(m, x, len(x) // 2),
    "counted aside": _counted_aside,
    "grid viewed": _grid_viewed,
    "grid row": _grid_row,
    "argument": _argument,
    "graded": _graded,
    "left": _left,
    "left by few": _left_by_few,
}


def _forget(m: Model, size: int) -> None:
    m.cached.cache_clear()
    gc.collect()
    m.rubbish = [torch.full_like(m.one, -9.0) for _ in range(32)]


def _place(held: Any, key: Any) -> None:
    held[key] = held[key] * -1.25


Act = Callable[[Model, int], Any]
ACTS: dict[str, Act] = {
    "change one": lambda m, size: m.one.mul_(1.5),
    "change a table": lambda m, size: m.tables[size].add_(1),
    "change a name": lambda m, size: getattr(m, f"table{size}").add_(1),
    "change what is cached": lambda m, size: m.cached(size).add_(1),
    "replace one": lambda m, size: setattr(m, "one", m.one + 1),
    "replace the other": lambda m, size: setattr(m, "other", m.other + 1),
    "replace a table": lambda m, size: _place(m.tables, size),
    "replace in the list": lambda m, size: _place(m.rows, SIZES.index(size)),
    "replace deep down": lambda m, size: _place(m.nested["deep"][0], size),
    "replace a name": lambda m, size: setattr(m, f"table{size}", getattr(m, f"table{size}") * 2),
    "replace a weight": lambda m, size: setattr(m, "weight", nn.Parameter(m.weight.detach() + 1)),
    "add to few": lambda m, size: m.few.setdefault(size, m.one + size),
    "another scale": lambda m, size: m.scales.__setitem__(size, m.scales[size] + 1),
    "another limit": lambda m, size: setattr(m, "small", size),
    "choose": lambda m, size: m.chosen.append(size),
    "forget": _forget,
}


class Plan(NamedTuple):
    parts: list[str]
    called: bool
    """Whether eager calls came first, and filled the cache."""
    steps: list[tuple[str, int]]


names = st.one_of(*[st.just("call")] * 4, st.sampled_from(sorted(ACTS)))
plans = st.builds(
    Plan,
    st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=4),
    st.booleans(),
    st.lists(st.tuples(names, st.sampled_from(SIZES)), min_size=3, max_size=12),
)


class Run:
    """A graphed model and its eager twin, to which the same happens."""

    def __init__(self, plan: Plan, backend: str, device: torch.device) -> None:
        self.device, self.seed = device, 0
        self.model, self.twin = (Model(plan.parts, device) for _ in range(2))
        self.graphed = graphify(self.model.forward, buckets=SIZES, check_padding=False, backend=backend)
        for size in SIZES if plan.called else []:
            x = self.rows(size)
            self.model(x.clone())
            self.twin(x)
        self.same()
        self.graphed.capture_buckets(self.rows(8), progress=False)
        self.same()

    def rows(self, size: int) -> Tensor:
        """Other numbers each time."""
        self.seed += 1
        return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(self.seed)).to(self.device)

    def same(self) -> None:
        """Both have the same state."""
        for mine, theirs in zip(self.model.state(), self.twin.state(), strict=True):
            equal(theirs, mine)

    def call(self, size: int) -> None:
        """The same call of both."""
        x = self.rows(size)
        mine, theirs = x.clone(), x.clone()
        found, expected = self.graphed(mine), self.twin(theirs)
        equal(expected, found)
        equal(theirs, mine)
        self.same()


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """One for each recording that tried to repeat a run: whether it did."""
    found: list[bool] = []
    plain = Example.repeat

    def repeat(self: Example, *args: Any) -> Any:
        found.append(False)
        result = plain(self, *args)
        found[-1] = True
        return result

    monkeypatch.setattr(Example, "repeat", repeat)
    return found


def test_any_program_at_any_size(backend: str, device: torch.device, repeated: list[bool]) -> None:
    """Results, arguments and state follow eager, through every change of what the program finds, or it says why not."""
    tally: Counter[str] = shown(Counter())

    @share(0.08)
    @given(plans)
    def run(plan: Plan) -> None:
        tally["runs"] += 1
        before = len(repeated)
        with torch.no_grad():
            try:
                both = Run(plan, backend, device)
                for name, size in plan.steps:
                    if name == "call":
                        both.call(size)
                    else:
                        for model in (both.model, both.twin):
                            ACTS[name](model, size)
            except GraphifyError as error:
                tally[type(error).__name__] += 1
                return
        tally["replays"] += both.graphed.stats().replays
        tally["replayed"] += both.graphed.stats().replays > 0
        tally["repeated"] += any(repeated[before:])
        tally["strayed"] += not all(repeated[before:])

    run()
    assert often(tally["replayed"], 0.4, tally["runs"]), tally
    if backend != "eager" and hasattr(sys, "monitoring"):
        assert often(tally["repeated"], 0.2, tally["runs"]), tally
        assert often(tally["strayed"], 0.05, tally["runs"]), tally
