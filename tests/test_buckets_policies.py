"""Bucket policies and the option `buckets`: integers in, plan out."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import timeit
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from strategies import share

from graphify._axes import Axes
from graphify._padding import Fills
from graphify._signature import specs_of
from graphify._specification import Specification, specification
from graphify._tree import tree_of
from graphify.buckets import Bucket
from graphify.errors import InputError

few = share(0.2)

BATCH = Bucket("batch", [1, 2, 4, 8])
SEQ = Bucket.powers_of_two("seq", 16, 128)
NAMES = ("x", "mask", "batch")

size_lists = st.sets(st.integers(1, 5000), min_size=1, max_size=40).map(sorted)


def axes(buckets: Any, shapes: dict[str, Sequence[int]], **more: Any) -> Axes:
    made = specification(buckets, NAMES, **more)
    assert made is not None
    return made.axes_of(tuple(shapes), [len(shape) for shape in shapes.values()])


def tensors_like(shapes: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(tuple(shape)) for shape in shapes)


def evaluated(text: str) -> Any:
    """What pasted code gives for the option."""
    space: dict[str, Any] = {"Bucket": Bucket}
    exec(text, space)
    return space["buckets"]


class TestBucket:
    def test_decode_is_what_serving_stacks_capture(self) -> None:
        """256 rows are 35 sizes: 1, 2, 4 and each multiple of 8."""
        bucket = Bucket.decode(256)

        assert bucket.sizes == (1, 2, 4, *range(8, 257, 8))
        assert len(bucket.sizes) == 35
        assert bucket.name == "batch"
        assert Bucket.decode(max=8, name="rows") == Bucket("rows", [1, 2, 4, 8])

    def test_decode_is_coarser_above_256(self) -> None:
        """Each octave from 256 has 16 steps."""
        sizes = Bucket.decode(1024).sizes

        assert sizes[34:52] == (*range(256, 513, 16), 544)
        assert sizes[-17:] == tuple(range(512, 1025, 32))

    @pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 9, 30, 255, 257, 300, 1000])
    def test_decode_has_its_maximum(self, most: int) -> None:
        """A full batch has a graph, on a stride or off it."""
        assert Bucket.decode(most).largest == most

    def test_powers_of_two(self) -> None:
        """Both ends are sizes, powers or not."""
        assert Bucket.powers_of_two("s", 128, 2048).sizes == (128, 256, 512, 1024, 2048)
        assert Bucket.powers_of_two("s", 1, 1).sizes == (1,)
        assert Bucket.powers_of_two("s", 3, 20).sizes == (3, 4, 8, 16, 20)

    def test_multiples_of(self) -> None:
        """Both ends are sizes, multiples or not; the low end is one step unless told."""
        assert Bucket.multiples_of("s", 64, 256).sizes == (64, 128, 192, 256)
        assert Bucket.multiples_of("s", 64, 200, low=16).sizes == (16, 64, 128, 192, 200)
        assert Bucket.multiples_of("s", 64, 20).sizes == (20,)

    def test_zero_elements_fit_the_smallest(self) -> None:
        """A call without rows is all padding."""
        assert BATCH.fit(0) == 1
        assert Bucket("s", [16, 32]).fit(0) == 16

    @few
    @given(size_lists, st.integers(0, 6000))
    def test_fit_is_the_smallest_that_holds(self, sizes: list[int], size: int) -> None:
        """No smaller bucket would do, and above the largest there is none."""
        fitting = [bucket for bucket in sizes if bucket >= size]

        assert Bucket("s", sizes).fit(size) == min(fitting, default=None)

    @few
    @given(size_lists)
    def test_repr_is_code(self, sizes: list[int]) -> None:
        """What is printed can be pasted."""
        assert eval(repr(Bucket("s", sizes))) == Bucket("s", sizes)

    @pytest.mark.parametrize(
        ("bucket", "text"),
        [
            (BATCH, 'Bucket("batch", [1, 2, 4, 8])'),
            (Bucket.decode(256), 'Bucket.decode(256, "batch")'),
            (Bucket.multiples_of("s", 64, 2048), 'Bucket("s", range(64, 2049, 64))'),
        ],
    )
    def test_repr_is_short(self, bucket: Bucket, text: str) -> None:
        """A message shows no list of 35 numbers where a word says it."""
        assert repr(bucket) == text
        assert eval(text) == bucket

    @few
    @given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 300))
    def test_policies_hold_their_ends(self, one: int, other: int, step: int) -> None:
        """Policies make sorted sizes between the ends, and both ends are sizes."""
        low, high = sorted((one, other))
        for bucket in (
            Bucket.powers_of_two("s", low, high),
            Bucket.multiples_of("s", step, high, low=low),
            Bucket.decode(high),
        ):
            assert list(bucket.sizes) == sorted(set(bucket.sizes))
            assert bucket.largest == high
            assert bucket.sizes[0] == (1 if bucket.name == "batch" else low)

    @few
    @given(st.integers(1, 10**6))
    def test_decode_wastes_little(self, size: int) -> None:
        """Above 8 rows a bucket is at most 7 rows or a sixteenth too large."""
        bucket = Bucket.decode(2**20).fit(size)

        assert bucket is not None
        assert bucket - size <= max(7, size / 16)

    def test_equal_buckets_are_one(self) -> None:
        """Name and sizes are what a Bucket is; copies are equal."""
        assert (
            Bucket("batch", (1, 2, 4, 8))
            == BATCH
            == copy.deepcopy(BATCH)
            == pickle.loads(pickle.dumps(BATCH))
        )
        assert len({BATCH, Bucket("batch", [1, 2, 4, 8]), Bucket("rows", [1, 2, 4, 8])}) == 2
        assert Bucket("batch", [1]) != BATCH

    def test_a_bucket_does_not_change(self) -> None:
        """The list it was made from is copied, and its fields are read only."""
        sizes = [1, 2]
        bucket = Bucket("s", sizes)
        sizes.append(4)

        assert bucket.sizes == (1, 2)
        with pytest.raises(AttributeError):
            bucket.sizes = (1,)  # type: ignore[misc]

    @pytest.mark.parametrize(
        ("name", "sizes", "error", "words"),
        [
            ("batch", [], ValueError, r'Bucket\("batch", sizes\): there are no sizes. Write at least one'),
            ("batch", [8, 1, 4], ValueError, r"\[8, 1, 4\] are not sorted. Write \[1, 4, 8\]"),
            ("batch", [1, 4, 4], ValueError, r"\[1, 4, 4\] are double. Write \[1, 4\]"),
            ("batch", [0, 1], ValueError, r"0 is below 1. Write \[1\]; a call of size 0 fits"),
            ("batch", [-2], ValueError, r"-2 is below 1"),
            ("batch", [True, 2], TypeError, r"each size must be an int, not True"),
            ("batch", [1.0, 2], TypeError, r"each size must be an int, not 1.0"),
            ("batch", {1, 2}, TypeError, r"must be a list of ints such as \[1, 2, 4, 8\], not \{1, 2\}"),
            ("batch", 8, TypeError, r'Bucket\("batch", sizes\): sizes must be a list of ints'),
            ("batch", "1248", TypeError, r"sizes must be a list of ints"),
            ([1, 2], "batch", TypeError, r"name must be a str, not \[1, 2\]. Write Bucket\(\"batch\""),
            ("", [1], ValueError, r"Bucket\('', sizes\): the name must be an identifier"),
            ("x.0", [1], ValueError, r"the name must be an identifier"),
            ("class", [1], ValueError, r"the name must be an identifier"),
        ],
    )
    def test_bad_ones_are_refused(self, name: Any, sizes: Any, error: type[Exception], words: str) -> None:
        """A refusal names the Bucket and says what to write."""
        with pytest.raises(error, match=words):
            Bucket(name, sizes)

    @pytest.mark.parametrize(
        ("make", "error", "words"),
        [
            (lambda: Bucket.decode(0), ValueError, r"Bucket.decode: max=0 is below 1"),
            (lambda: Bucket.decode(8.0), TypeError, r"Bucket.decode: max must be an int, not 8.0"),  # type: ignore[arg-type]
            (lambda: Bucket.decode(True), TypeError, r"max must be an int, not True"),
            (lambda: Bucket.powers_of_two("s", 0, 8), ValueError, r"low=0 is below 1"),
            (lambda: Bucket.powers_of_two("s", 8, 4), ValueError, r"high=4 is below low=8"),
            (lambda: Bucket.multiples_of("s", 0, 8), ValueError, r"Bucket.multiples_of: step=0 is below 1"),
            (lambda: Bucket.multiples_of("s", 8, 16, low=17), ValueError, r"high=16 is below low=17"),
            (lambda: Bucket.multiples_of("s", 8, 0), ValueError, r"high=0 is below 1"),
            (lambda: Bucket.multiples_of("s", 8, "9"), TypeError, r"high must be an int, not '9'"),  # type: ignore[arg-type]
        ],
    )
    def test_bad_bounds_are_refused(self, make: Any, error: type[Exception], words: str) -> None:
        """A refusal names the policy and the number."""
        with pytest.raises(error, match=words):
            make()


class TestSpecification:
    def test_none_is_none(self) -> None:
        """Without the option there is nothing to fit."""
        assert specification(None, NAMES) is None

    def test_auto_declares_nothing(self) -> None:
        """The axes of "auto" are found later."""
        made = specification("auto", NAMES)

        assert made is not None
        assert made.auto
        assert made.axes_of(("x",), (2,)).buckets == ()
        assert str(made) == 'buckets="auto"'

    @pytest.mark.parametrize("buckets", [[1, 2, 4, 8], (1, 2, 4, 8), BATCH])
    def test_short_form(self, buckets: Any) -> None:
        """A list or a Bucket alone is dimension 0 of every tensor that has one."""
        plan = axes(buckets, {"x": (3, 5), "mask": (), "batch['ids']": (3,)})

        assert plan.places == (((0, 0), (2, 0)),)
        assert plan.buckets[0].sizes == (1, 2, 4, 8)

    def test_short_form_of_no_dimensions(self) -> None:
        """Where no tensor has a dimension, no size is bucketed."""
        plan = axes([1, 2], {"x": ()})

        assert (plan.buckets, plan.count, list(plan.grid())) == ((), 1, [()])
        assert plan.live(tensors_like([()])) == ()

    def test_short_form_leaves_static_arguments(self) -> None:
        """What is taken by reference has no padding."""
        plan = axes([1, 2], {"x": (2,), "mask": (9,)}, static=("mask",))

        assert plan.places == (((0, 0),),)

    def test_mapping(self) -> None:
        """One Bucket at several places is one axis; the order is that of the leaves."""
        plan = axes(
            {"mask": {0: BATCH, -1: SEQ}, "x": {1: BATCH}},
            {"x": (3, 8), "mask": (8, 1, 20), "batch": (9, 9)},
        )

        assert plan.buckets == (BATCH, SEQ)
        assert plan.places == (((0, 1), (1, 0)), ((1, 2),))

    def test_equal_buckets_are_one_axis(self) -> None:
        """A Bucket may be written out at each place."""
        again = Bucket("batch", [1, 2, 4, 8])

        assert axes({"x": {0: BATCH}, "mask": {0: again}}, {"x": (3,), "mask": (3,)}).places == (
            ((0, 0), (1, 0)),
        )

    def test_lists_are_buckets_of_their_own(self) -> None:
        """Two lists of the same sizes are two sizes; the leaves of one argument share its list."""
        plan = axes(
            {"x": {0: [1, 2]}, "batch": {0: [1, 2]}},
            {"x": (1,), "batch['a']": (2, 2), "batch['b']": (2,)},
        )

        assert plan.places == (((0, 0),), ((1, 0), (2, 0)))
        assert [bucket.name for bucket in plan.buckets] == ["x.0", "batch.0"]

    def test_longest_path_wins(self) -> None:
        """A leaf's own mapping takes the place of its argument's."""
        made = specification({"batch": {0: BATCH}, "batch['m']": {1: BATCH}, "batch['m'].w[1]": {}}, NAMES)
        assert made is not None
        paths = ("batch['x']", "batch['m'].w[0]", "batch['m'].w[1]", "batch['mm']")

        assert made.axes_of(paths, (2, 2, 2, 2)).places == (((0, 0), (1, 1), (3, 0)),)

    @pytest.mark.parametrize(
        ("key", "path"),
        [
            ("batch['ids']", "batch['ids']"),
            ('batch["ids"]', "batch['ids']"),
            ("batch[ 'ids' ]", "batch['ids']"),
            ("batch[('a', 1)]", "batch[('a', 1)]"),
            ("batch['a', 1]", "batch[('a', 1)]"),
            ("batch[-1]", "batch[-1]"),
            ("batch.a.b[0]", "batch.a.b[0]"),
        ],
    )
    def test_paths_as_messages_print_them(self, key: str, path: str) -> None:
        """Any spelling of a path names the leaf."""
        assert axes({key: {0: BATCH}}, {path: (1,)}).buckets == (BATCH,)

    def test_keys_that_print_as_no_code(self) -> None:
        """An enum member as a key is written as it is printed."""
        assert axes({"batch[<Color.RED: 1>]": {0: BATCH}}, {"batch[<Color.RED: 1>]": (1,)}).buckets == (
            BATCH,
        )

    def test_paths_of_real_structures(self) -> None:
        """The paths of a structure of arguments are those that the option takes."""
        roots = ([torch.ones(3, 2), {"ids": torch.ones(3)}], {"k": torch.ones(5)})
        tree = tree_of(roots, ("x", "kwargs"))
        option = {"x[0]": {0: BATCH}, "x[1]['ids']": {0: BATCH}, "k": {0: SEQ}}
        made = specification(option, ("x", "kwargs"), stars="kwargs")
        assert made is not None
        plan = made.axes_of(tree.tensor_paths, (2, 1, 1))

        assert plan.places == (((0, 0), (1, 0)), ((2, 0),))
        assert made.unused(tree.tensor_paths) == ()

    def test_nested_as_torch_export_nests(self) -> None:
        """Mappings by key and lists by index name the leaves below an argument."""
        option = {"batch": {"ids": {0: BATCH}, "m": [{0: BATCH}, None]}, "x": ({0: BATCH},)}
        paths = {"batch['ids']": (3,), "batch['m'][0]": (3,), "batch['m'][1]": (9,), "x[0]": (3,)}

        assert axes(option, paths).places == (((0, 0), (1, 0), (3, 0)),)

    def test_unused(self) -> None:
        """Names that lead to no tensor of a call can be told."""
        made = specification({"x": {0: BATCH}, "mask": {0: BATCH}, "batch['a']": {0: BATCH}}, NAMES)
        assert made is not None

        assert made.unused(("x", "batch['b']")) == ("mask", "batch['a']")

    @pytest.mark.parametrize(
        ("option", "error", "words"),
        [
            (3, TypeError, r'buckets must be None, "auto", a list of ints .*, not 3'),
            ("all", TypeError, r"buckets must be None, \"auto\", .* or a mapping such as .*, not 'all'"),
            ([], ValueError, r"buckets=\[\]: there are no sizes"),
            ([2, 1], ValueError, r"buckets=\[2, 1\]: the sizes \[2, 1\] are not sorted. Write \[1, 2\]"),
            ([1, True], TypeError, r"buckets=\[1, True\]: each size must be an int, not True"),
            ([BATCH], TypeError, r"a bare list is a list of ints. Write buckets=\{\"x\": \{0: Bucket"),
            ({}, ValueError, r"buckets=\{\} names no dimension. Write buckets=None or"),
            ({"x": {}, "mask": None}, ValueError, r"names no dimension"),
            ({0: BATCH}, TypeError, r"keys must be names of arguments \(x, mask, batch\), not 0"),
            ({"y": {0: BATCH}}, ValueError, r"no argument `y`; the arguments are: x, mask, batch. Write one"),
            ({"xs[0]": {0: BATCH}}, ValueError, r"there is no argument `xs`"),
            ({"x[": {0: BATCH}}, ValueError, r"'x\[' is no argument or part of one"),
            ({"x y": {0: BATCH}}, ValueError, r"'x y' is no argument or part of one"),
            (
                {"x": BATCH},
                TypeError,
                r'`x` must have a mapping .* Write \{"x": \{0: Bucket\("batch", .*\)\}\}',
            ),
            ({"x": [1, 2]}, TypeError, r'`x` must have a mapping .*Write \{"x": \{0: \[1, 2\]\}\} for its'),
            ({"x": 8}, TypeError, r'`x` must have a mapping .*, not 8. Write \{"x": \{0: \[1, 2, 4, 8\]\}\}'),
            ({"batch": {"ids": BATCH}}, TypeError, r"`batch\['ids'\]` must have a mapping"),
            ({"x": {True: BATCH}}, TypeError, r"dimensions of `x` must be ints, not True"),
            ({"x": {"a": {0: BATCH}, 1: BATCH}}, TypeError, r"dimensions of `x` must be ints, not 'a'"),
            ({"x": {0: 8}}, TypeError, r'"x": \{0: 8\}.*: dimension 0 of `x` must be a Bucket or a list'),
            ({"x": {0: "auto"}}, TypeError, r"dimension 0 of `x` must be a Bucket or a list of ints"),
            (
                {"x": {1: [4, 2]}},
                ValueError,
                r'buckets=\{"x": \{1: \[4, 2\]\}\}: the sizes .* are not sorted',
            ),
            ({"x[0]": {0: BATCH}, "x[ 0]": {1: SEQ}}, ValueError, r"`x\[ 0\]` is there twice"),
            (
                {"x": {0: BATCH}, "mask": {1: Bucket("batch", [1, 2])}},
                ValueError,
                r"dimension 0 of `x` is Bucket\(\"batch\", \[1, 2, 4, 8\]\), another Bucket of the same name",
            ),
        ],
    )
    def test_bad_forms_are_refused(self, option: Any, error: type[Exception], words: str) -> None:
        """At decoration, by the name of the option and the argument, with the right form."""
        with pytest.raises(error, match=words):
            specification(option, NAMES)

    @pytest.mark.parametrize(
        ("option", "error", "words"),
        [
            (
                {0: -1},
                TypeError,
                r"pad: keys must be names of arguments \(x, mask, batch\), not 0. Write pad=",
            ),
            (
                {"y": -1},
                ValueError,
                r"pad: there is no argument `y`; the arguments are: x, mask, batch. Write one",
            ),
            ({"x[": -1}, ValueError, r"pad: 'x\[' is no argument or part of one"),
            ({"x": "a"}, TypeError, r"pad\['x'\]"),
        ],
    )
    def test_bad_fills_are_refused(self, option: Any, error: type[Exception], words: str) -> None:
        """The option `pad` names arguments as `buckets` does, and is refused in the same words."""
        with pytest.raises(error, match=words):
            Fills(option, NAMES)

    def test_fills_by_path(self) -> None:
        """A part of an argument may have its own, however it is written; other keywords are those of `**kwargs`."""
        fills = Fills({"x": 1, 'batch["ids"]': 2, "more": 3}, (*NAMES, "rest"), stars="rest")

        found = [fills.of(path) for path in ("x[0]", "batch['ids']", "batch['mask']", "rest['more']", "mask")]
        assert found == [(1, True), (2, True), (0, False), (3, True), (0, False)]

    def test_static_arguments_are_not_padded(self) -> None:
        """An argument is padded or taken by reference."""
        with pytest.raises(ValueError, match="`x` is one of `static_args`, which are never padded"):
            specification({"x": {0: BATCH}}, NAMES, static=("x",))

    def test_keywords_of_a_double_star(self) -> None:
        """With `**kwargs` any keyword may be named; without, it is a mistake."""
        made = specification({"y": {0: BATCH}, "x": {0: BATCH}}, ("x", "kwargs"), stars="kwargs")
        assert made is not None

        assert made.axes_of(("x", "kwargs['y']", "kwargs['z']"), (1, 1, 1)).places == (((0, 0), (1, 0)),)

    @pytest.mark.parametrize(
        ("option", "rank", "words"),
        [
            (
                {"x": {2: BATCH}},
                2,
                r"`x` has 2 dimensions, .* dimension 2 of it. Write a dimension from -2 to 1",
            ),
            ({"x": {-2: BATCH}}, 1, r'`x` has 1 dimension, .* dimension -2 .* from -1 to 0 for it: "x": \{0'),
            ({"x": {0: BATCH}}, 0, r'`x` has no dimensions, .* Write no dimension for it: "x": \{\}'),
            (
                {"x": {0: BATCH, -2: SEQ}},
                2,
                r"dimension -2 is dimension 0, .* both Bucket.*batch.* Write it once",
            ),
        ],
    )
    def test_dimensions_that_are_not_there(self, option: Any, rank: int, words: str) -> None:
        """A call whose tensor lacks a dimension is refused by its path."""
        with pytest.raises(InputError, match=words):
            axes(option, {"x": (1,) * rank})

    def test_one_dimension_named_twice_alike(self) -> None:
        """From the front and from the back, a dimension may be one Bucket."""
        assert axes({"x": {0: BATCH, -1: BATCH}}, {"x": (3,)}).places == (((0, 0),),)

    @pytest.mark.parametrize(
        "option",
        [
            [1, 2, 4],
            Bucket.decode(64),
            {"x": {0: BATCH, 1: SEQ}, "batch['ids']": {0: BATCH}},
            {"x": {0: [1, 2]}, "mask": {-1: range(8, 256, 8)}, 'batch["it\'s"]': {0: SEQ}},
        ],
    )
    def test_printed_form_is_the_option(self, option: Any) -> None:
        """What is printed means the same when it is pasted."""
        made = specification(option, NAMES)

        assert specification(evaluated(str(made)), NAMES) == made


class TestAxes:
    def test_sizes_fit_and_shapes(self) -> None:
        """A call's sizes, the buckets that hold them, and the shapes they make."""
        plan = axes({"x": {0: BATCH, 1: SEQ}, "mask": {-1: SEQ}}, {"x": (0, 0, 0), "mask": (0, 0)})
        shapes = [(3, 17, 5), (2, 17)]
        fitted = plan.fit(plan.sizes(shapes))

        assert plan.sizes(shapes) == (3, 17)
        assert fitted == (4, 32)
        assert plan.padded_shapes(shapes, fitted) == ((4, 32, 5), (2, 32))

    def test_above(self) -> None:
        """What is too large is named with its place."""
        plan = axes({"x": {0: BATCH, 1: SEQ}}, {"x": (1, 1)})

        assert plan.fit((9, 16)) is None
        assert plan.fit((8, 129)) is None
        assert plan.above((9, 129)) == "dimension 0 of `x` is 9, above 8, the largest size of its bucket"
        assert plan.above((8, 129)) == "dimension 1 of `x` is 129, above 128, the largest size of its bucket"
        assert plan.above((8, 128)) is None

    @pytest.mark.parametrize("fast", [True, False])
    def test_disagreement_under_names(self, fast: bool) -> None:
        """Both places are named with their sizes, and the mapping that keeps them apart can be pasted."""
        plan = axes({"x": {0: BATCH}, "batch": {1: BATCH}}, {"x": (0,), "batch['a']": (0, 0)})
        shapes = [(3,), (1, 5)]
        with pytest.raises(InputError) as caught:
            plan.live(tensors_like(shapes)) if fast else plan.sizes(shapes)

        text = str(caught.value)
        assert "`x` has size 3 in dimension 0, but `batch['a']` has size 5 in dimension 1" in text
        assert 'both are the Bucket "batch"' in text
        option = evaluated(text[text.index("\n") + 1 :])
        assert axes(option, {"x": (3,), "batch['a']": (1, 5)}).sizes(shapes) == (3, 5)

    def test_disagreement_within_an_argument(self) -> None:
        """Leaves that share their argument's list, and are no one size, get mappings of their own."""
        plan = axes({"batch": {0: [1, 2, 8]}}, {"batch['a']": (0,), "batch['b']": (0,)})
        with pytest.raises(InputError, match=r"both are the sizes \[1, 2, 8\]") as caught:
            plan.sizes([(2,), (3,)])

        text = str(caught.value)
        option = evaluated(text[text.index("\n") + 1 :])
        assert set(option) == {"batch['a']", "batch['b']"}

    @pytest.mark.parametrize("fast", [True, False])
    def test_disagreement_under_the_short_form(self, fast: bool) -> None:
        """The mapping of those that agree is printed to be pasted."""
        plan = axes([1, 2, 4, 8], {"x": (0,), "mask": (0, 0), "batch['ids']": (0,)})
        shapes = [(3,), (7, 7), (3,)]
        with pytest.raises(InputError) as caught:
            plan.live(tensors_like(shapes)) if fast else plan.sizes(shapes)

        text = str(caught.value)
        assert "`x` has size 3 in dimension 0, but `mask` has size 7 in dimension 0" in text
        option = evaluated(text[text.index("\n") + 1 :])
        assert option == {"x": {0: BATCH}, "batch['ids']": {0: BATCH}}
        assert axes(option, {"x": (3,), "mask": (7, 7), "batch['ids']": (3,)}).sizes(shapes) == (3,)

    def test_other_ranks_are_another_plan(self) -> None:
        """Tensors with other dimensions than planned have no sizes here; those without a Bucket may differ."""
        plan = axes({"x": {0: BATCH}}, {"x": (1, 1), "mask": (1,)})

        assert plan.live(tensors_like([(3, 1), (1, 1)])) == (3,)
        assert plan.live(tensors_like([(3,), (1,)])) is None
        assert plan.live(tensors_like([(3, 1)])) is None

    def test_scalars_of_the_short_form_stay_scalars(self) -> None:
        """A tensor that gains a dimension is another plan."""
        plan = axes([1, 2], {"x": (1,), "mask": ()})

        assert plan.live(tensors_like([(2,), ()])) == (2,)
        assert plan.live(tensors_like([(2,), (2,)])) is None

    def test_grid(self) -> None:
        """Every combination once, those with the most elements first."""
        plan = axes({"x": {0: [1, 3], 1: [2, 8]}}, {"x": (1, 1)})

        assert list(plan.grid()) == [(3, 8), (1, 8), (3, 2), (1, 2)]
        assert plan.count == 4

    def test_a_plan_leaves_no_cycle(self) -> None:
        """Dropping a plan frees it and its generated code at once."""
        import gc
        import weakref

        plan = axes([1, 2], {"x": (1,), "mask": (1,)})
        gone = weakref.ref(plan)
        code = weakref.ref(plan.live)
        gc.disable()
        try:
            del plan
            assert gone() is None
            assert code() is None
        finally:
            gc.enable()

    def test_live_costs_a_fraction_of_reading_the_specs(self) -> None:
        """Sizes come nearly for free: well below what the signature costs."""
        plan = axes(
            {"x": {0: BATCH, 1: SEQ}, "mask": {0: BATCH}, "batch": {0: BATCH}}, dict.fromkeys(NAMES, (0, 0))
        )
        tensors = tensors_like([(3, 20), (3, 1), (3, 2)])
        specs = specs_of(3)
        seconds = {
            name: min(timeit.repeat("f(t)", globals={"f": f, "t": tensors}, number=2000, repeat=15))
            for name, f in {"live": plan.live, "specs": specs}.items()
        }

        assert seconds["live"] < seconds["specs"] / 2


@st.composite
def plans(draw: st.DrawFn) -> tuple[Axes, list[tuple[int, ...]]]:
    """A plan over random leaves, and shapes that agree with it."""
    buckets = [Bucket(name, draw(size_lists)) for name in "abc"]
    live = [draw(st.integers(0, bucket.largest)) for bucket in buckets]
    dims: dict[int, dict[int, Bucket]] = {}
    shapes = []
    for leaf in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 3), max_size=4))
        chosen = draw(st.dictionaries(st.integers(0, 3), st.integers(0, 2), max_size=3))
        own = {dim: axis for dim, axis in chosen.items() if dim < len(shape)}
        if own:
            dims[leaf] = {dim: buckets[axis] for dim, axis in own.items()}
        for dim, axis in own.items():
            shape[dim] = live[axis]
        shapes.append(tuple(shape))
    return Axes([f"x[{leaf}]" for leaf in range(len(shapes))], list(map(len, shapes)), dims), shapes


class Shaped:
    """Anything with a shape."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)


class TestProperties:
    @few
    @given(plans())
    def test_padding_fits_and_is_stable(self, case: tuple[Axes, list[tuple[int, ...]]]) -> None:
        """Padded shapes hold the live ones, have bucket sizes, and are their own padding."""
        plan, shapes = case
        live = plan.sizes(shapes)
        fitted = plan.fit(live)
        assert fitted is not None
        padded = plan.padded_shapes(shapes, fitted)
        bucketed = {place for places in plan.places for place in places}

        assert fitted == tuple(bucket.fit(size) for bucket, size in zip(plan.buckets, live, strict=True))
        assert plan.sizes(padded) == fitted == plan.fit(fitted)
        for leaf, (before, after) in enumerate(zip(shapes, padded, strict=True)):
            for dim, (old, new) in enumerate(zip(before, after, strict=True)):
                assert new >= old if (leaf, dim) in bucketed else new == old

    @few
    @given(plans())
    def test_generated_code_says_what_the_slow_way_says(
        self, case: tuple[Axes, list[tuple[int, ...]]]
    ) -> None:
        """`live` reads what `sizes` finds."""
        plan, shapes = case

        assert plan.live([Shaped(shape) for shape in shapes]) == plan.sizes(shapes)

    @few
    @given(plans(), st.data())
    def test_any_disagreement_is_found(
        self, case: tuple[Axes, list[tuple[int, ...]]], data: st.DataObject
    ) -> None:
        """One place of a shared size that differs is refused, fast and slow, by both names."""
        plan, shapes = case
        shared = [place for places in plan.places if len(places) > 1 for place in places]
        if not shared:
            return
        leaf, dim = data.draw(st.sampled_from(shared))
        changed = list(shapes[leaf])
        changed[dim] += 1
        shapes[leaf] = tuple(changed)

        with pytest.raises(
            InputError, match=rf"`x\[{leaf}\]` has size {changed[dim]} in dimension {dim}"
        ) as slow:
            plan.sizes(shapes)
        with pytest.raises(InputError) as fast:
            plan.live([Shaped(shape) for shape in shapes])
        assert str(fast.value) == str(slow.value)

    @few
    @given(plans(), st.data())
    def test_too_large_never_fits(
        self, case: tuple[Axes, list[tuple[int, ...]]], data: st.DataObject
    ) -> None:
        """`fit` is None exactly where `above` has words."""
        plan, _ = case
        live = [data.draw(st.integers(0, bucket.largest + 2)) for bucket in plan.buckets]

        assert (plan.fit(live) is None) == (plan.above(live) is not None)

    @few
    @given(st.lists(st.sets(st.integers(1, 50), min_size=1, max_size=5).map(sorted), min_size=1, max_size=3))
    def test_grid_is_complete_and_ordered(self, sizes: list[list[int]]) -> None:
        """Every combination is there once, and none after a smaller one."""
        plan = axes({"x": dict(enumerate(sizes))}, {"x": (1,) * len(sizes)})
        found = list(plan.grid())

        assert sorted(found) == sorted(itertools.product(*sizes))
        assert len(found) == plan.count
        assert all(math.prod(a) >= math.prod(b) for a, b in itertools.pairwise(found))

    @few
    @given(
        st.dictionaries(
            st.sampled_from(NAMES), st.dictionaries(st.integers(-3, 3), size_lists, min_size=1), min_size=1
        )
    )
    def test_printed_form(self, option: dict[str, dict[int, list[int]]]) -> None:
        """Any mapping that is accepted is printed as one that means the same."""
        made = specification(option, NAMES)

        assert isinstance(made, Specification)
        assert specification(evaluated(str(made)), NAMES) == made
