"""What `buckets="auto"` makes of the shapes it sees: when it acts, what it proposes, how it says so."""

from __future__ import annotations

import random
import timeit
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from strategies import share

from graphify._auto import Shapes, Watcher
from graphify._axes import Axes
from graphify._signature import specs_of
from graphify._specification import specification
from graphify.buckets import Bucket
from graphify.errors import InputError

few = share(0.2)

NAMES = ("tokens", "mask", "x")


def watched(paths: Sequence[str], calls: Iterable[Shapes], **more: Any) -> Watcher:
    watcher = Watcher(paths, **more)
    for shapes in calls:
        watcher.see(shapes)
    return watcher


def planned(watcher: Watcher, paths: Sequence[str], shapes: Shapes) -> Axes:
    """The axes of what is proposed."""
    proposal = watcher.proposal()
    assert proposal is not None
    return proposal.axes_of(paths, [len(shape) for shape in shapes])


def pasted(watcher: Watcher) -> Any:
    """What the proposal's text gives as the option `buckets`."""
    space: dict[str, Any] = {"Bucket": Bucket}
    exec(str(watcher.proposal()), space)
    return space["buckets"]


def batches(sizes: Iterable[int], rows: int = 4) -> list[Shapes]:
    """Calls with tokens and a mask of shape (rows, size)."""
    return [((rows, size), (rows, size)) for size in sizes]


class TestWhenExactSignaturesPay:
    def test_sizes_that_never_settle(self) -> None:
        """Four calls of four shapes are enough to see that none comes back."""
        watcher = Watcher(("tokens", "mask"))
        paid = []
        for shapes in batches([30, 47, 12, 99, 64]):
            watcher.see(shapes)
            paid.append(watcher.exact_pays)

        assert paid == [True, True, True, False, False]

    def test_sizes_that_come_back(self) -> None:
        """As many repeats as new shapes are worth their graphs."""
        assert watched(("tokens", "mask"), batches([8, 8, 16, 16, 32, 32, 64, 64])).exact_pays
        assert not watched(("tokens", "mask"), batches([8, 8, 16, 16, 32, 32, 64])).exact_pays

    def test_a_last_smaller_batch(self) -> None:
        """A training loop with one odd batch per epoch, and evaluation with another, keeps exact graphs."""
        watcher = Watcher(("x",))
        for epoch in range(3):
            for rows in [*[32] * 20, 17 + epoch, *[64] * 5, 9]:
                watcher.see(((rows, 3),))
                assert watcher.exact_pays

    def test_a_few_shapes_are_no_pattern(self) -> None:
        """Three shapes say nothing yet."""
        assert watched(("x",), [((n,),) for n in (1, 2, 3)]).exact_pays

    def test_recent_calls_decide(self) -> None:
        """A thousand equal calls do not hide for a thousand more that sizes began to vary."""
        watcher = watched(("x",), [((7,),)] * 1000)
        needed = next(n for n in range(1, 100) if watcher.see(((7 + n,),)) is None and not watcher.exact_pays)

        assert needed == 33

    def test_and_settle_again(self) -> None:
        """When sizes come back, exact signatures pay again."""
        watcher = watched(("x",), [((n,),) for n in range(50)])
        assert not watcher.exact_pays
        for _ in range(64):
            watcher.see(((7,),))

        assert watcher.exact_pays

    def test_watching_never_grows(self) -> None:
        """The oldest shapes are forgotten, whatever comes; new ones still count."""
        watcher = watched(("x",), [((n,),) for n in range(5000)])

        assert watcher.distinct == 1024
        assert watcher.ranges() == ("dimension 0 of `x` took 1024 values from 3976 to 4999",)


class TestProposal:
    def test_nothing_varies(self) -> None:
        """Without a varying size there is nothing to propose or to say."""
        for watcher in (Watcher(("x",)), watched(("x",), [((3, 4),)] * 9), watched((), [()] * 9)):
            assert watcher.proposal() is None
            assert watcher.ranges() == ()

    def test_dimensions_that_vary_together_are_one_size(self) -> None:
        """A name where places share a size, a plain list where there is one, nothing for what is constant."""
        calls = [((4, n), (4, n), (m, 4)) for n, m in [(12, 5), (211, 9), (30, 9), (64, 30), (99, 2)]]
        watcher = watched(NAMES, calls)

        assert str(watcher.proposal()) == (
            'tokens_1 = Bucket("tokens_1", [16, 32, 64, 128, 256])\n'
            'buckets={"tokens": {1: tokens_1}, "mask": {1: tokens_1}, "x": {0: [2, 4, 8, 16, 32]}}'
        )

    def test_both_dimensions_of_a_square(self) -> None:
        """One tensor may have one size twice."""
        watcher = watched(("x",), [((n, 2, n),) for n in (3, 9, 5, 33)])

        assert pasted(watcher) == {"x": dict.fromkeys((0, 2), Bucket("x_0", [4, 8, 16, 32, 64]))}

    def test_large_sizes_have_finer_steps(self) -> None:
        """From 1024, a size half-way between two powers of two saves up to a quarter of the work."""
        watcher = watched(("x",), [((n,),) for n in (300, 2100, 900, 4000)])

        assert pasted(watcher) == {"x": {0: [512, 1024, 1536, 2048, 3072, 4096]}}

    def test_sizes_that_keep_coming_back_are_kept(self) -> None:
        """A full and a last batch stay as they are, beside lengths that never settle."""
        draw = random.Random(0)
        calls = [((24 if n % 10 else 7, draw.randint(12, 211)),) for n in range(1, 60)]

        assert pasted(watched(("x",), calls)) == {"x": {0: [7, 24], 1: [16, 32, 64, 128, 256]}}

    def test_zero_and_one(self) -> None:
        """No rows fit the bucket of one."""
        assert pasted(watched(("x",), [((n,),) for n in (0, 1, 5, 3)])) == {"x": {0: [1, 2, 4, 8]}}
        assert pasted(watched(("x",), [((n,),) for n in (0, 1) * 4])) == {"x": {0: [1]}}

    def test_a_handful_of_graphs(self) -> None:
        """Batches that are padded to their own longest sequence end in a handful of graphs."""
        draw = random.Random(0)
        for most, graphs in ((211, 5), (512, 6), (4096, 11)):
            calls = batches(draw.randint(12, most) for _ in range(2000))
            plan = planned(watched(NAMES[:2], calls), NAMES[:2], calls[0])

            assert plan.count <= graphs

    def test_static_arguments_are_left_alone(self) -> None:
        """What is taken by reference is not padded."""
        calls = [((n,), (n,)) for n in (1, 2, 3, 4)]
        watcher = watched(("x", "cache['k']"), calls, static=("cache",))

        assert pasted(watcher) == {"x": {0: [1, 2, 4]}}
        assert watcher.ranges() == ("dimension 0 of `x` took 4 values from 1 to 4",)

    def test_what_was_equal_by_chance_comes_apart(self) -> None:
        """A call that tells two sizes apart is refused by the old plan and taken by the next."""
        paths, calls = ("x", "mask"), [((n,), (n,)) for n in (3, 9, 5, 33)]
        watcher, odd = watched(paths, calls), ((4,), (6,))
        with pytest.raises(InputError, match="`x` has size 4 in dimension 0, but `mask` has size 6"):
            planned(watcher, paths, odd).sizes(odd)

        watcher.see(odd)
        assert planned(watcher, paths, odd).sizes(odd) == (4, 6)

    def test_growth_keeps_what_there_is(self) -> None:
        """A larger call adds sizes; those that have graphs stay."""
        watcher = watched(("x",), [((n,),) for n in (3, 9, 5, 33)])
        before = planned(watcher, ("x",), ((1,),))
        assert before.fit((65,)) is None

        watcher.see(((65,),))
        after = planned(watcher, ("x",), ((1,),))
        assert after.fit((65,)) == (128,)
        assert set(before.grid()) < set(after.grid())

    def test_names_are_identifiers(self) -> None:
        """Whatever a key is called, the text can be pasted."""
        paths = ("x['m²']", "x['a b']", "x.a_b", "x['größe'][0]", 'x["it\'s"]', "x[<Color.RED: 1>]")
        calls = [tuple((n, n + 1 + i // 2 * m) for i in range(6)) for m, n in enumerate((3, 9, 5, 33))]
        watcher = watched(paths, calls)

        assert specification(pasted(watcher), NAMES) == watcher.proposal()


class TestRanges:
    def test_words(self) -> None:
        """The size with the most values comes first; places of one size stand together."""
        calls = [((4, n), (4, n), (n % 2 + 1, 4)) for n in (12, 211, 30, 64, 99)]

        assert watched(NAMES, calls).ranges() == (
            "dimension 1 of `tokens` and `mask` took 5 values from 12 to 211",
            "dimension 0 of `x` took 2 values from 1 to 2",
        )

    def test_many_places(self) -> None:
        """A long list of names is cut; other dimensions are told apart."""
        paths = ("a", "b", "c", "d", "e", "f")
        calls = [(*((n,),) * 4, (2, n), (2, n)) for n in (1, 2, 3)]

        assert watched(paths, calls).ranges() == (
            "dimension 0 of `a`, `b`, `c` and 1 more and dimension 1 of `e` and `f` took 3 values from 1 to 3",
        )


@st.composite
def families(draw: st.DrawFn) -> tuple[tuple[str, ...], list[Shapes]]:
    """Calls of one family whose dimensions are drawn from a few sizes, so that some vary together."""
    ranks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    source = {(leaf, d): draw(st.integers(0, 2)) for leaf, rank in enumerate(ranks) for d in range(rank)}
    size = st.integers(0, draw(st.sampled_from([3, 300, 10**5])))
    drawn = draw(st.lists(st.tuples(size, size, size), min_size=1, max_size=30))
    calls = [
        tuple(tuple(sizes[source[leaf, d]] for d in range(rank)) for leaf, rank in enumerate(ranks))
        for sizes in drawn
    ]
    return NAMES[: len(ranks)], calls


class TestProperties:
    @few
    @given(families())
    def test_a_proposal_fits_every_call_it_was_made_from(
        self, family: tuple[tuple[str, ...], list[Shapes]]
    ) -> None:
        """Every seen call agrees with the axes, has a bucket, and wastes less than half of each large size."""
        paths, calls = family
        watcher = watched(paths, calls)
        if watcher.proposal() is None:
            assert len(set(calls)) == 1
            return
        plan = planned(watcher, paths, calls[0])
        least = [min(shapes[places[0].leaf][places[0].dim] for shapes in calls) for places in plan.places]
        for shapes in calls:
            live = plan.sizes(shapes)
            fitted = plan.fit(live)
            assert fitted is not None
            assert all(f < 2 * max(n, low, 1) for f, n, low in zip(fitted, live, least, strict=True))

    @few
    @given(families())
    def test_exactly_what_varies_is_bucketed(self, family: tuple[tuple[str, ...], list[Shapes]]) -> None:
        """A dimension is in the plan if it took two values, and in one axis with all that were always equal."""
        paths, calls = family
        columns: dict[tuple[int, ...], set[tuple[int, int]]] = {}
        for leaf, shape in enumerate(calls[0]):
            for dim in range(len(shape)):
                values = tuple(shapes[leaf][dim] for shapes in calls)
                columns.setdefault(values, set()).add((leaf, dim))
        expected = [places for values, places in columns.items() if len(set(values)) > 1]
        watcher = watched(paths, calls)
        found = planned(watcher, paths, calls[0]).places if expected else ()

        assert sorted(map(sorted, found)) == sorted(map(sorted, expected))

    @few
    @given(families())
    def test_the_text_can_be_pasted(self, family: tuple[tuple[str, ...], list[Shapes]]) -> None:
        """What is printed is the proposal, as an explicit option."""
        watcher = watched(*family)
        proposal = watcher.proposal()
        if proposal is not None:
            assert specification(pasted(watcher), NAMES) == proposal

    @few
    @given(families())
    def test_ranges_are_the_axes(self, family: tuple[tuple[str, ...], list[Shapes]]) -> None:
        """There is one line per size that varies."""
        watcher = watched(*family)
        proposal = watcher.proposal()
        axes = () if proposal is None else planned(watcher, family[0], family[1][0]).buckets

        assert len(watcher.ranges()) == len(axes)


def test_seeing_costs_less_than_reading_the_specs() -> None:
    """Watching is cheap beside what a call costs anyway."""
    tensors = (torch.empty(4, 30), torch.empty(4, 30), torch.empty(4))
    shapes = tuple(tensor.shape for tensor in tensors)
    watcher, specs = watched(NAMES, [shapes]), specs_of(3)
    see = min(timeit.repeat(lambda: watcher.see(shapes), number=2000, repeat=15))

    assert see < min(timeit.repeat(lambda: specs(tensors), number=2000, repeat=15))
