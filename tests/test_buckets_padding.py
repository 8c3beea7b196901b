"""What stands behind the live rows, that it changes nothing, and what happens to functions for which it would."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bucketing import BATCH, ROWS, Cache, like_eager, over, rows
from checks import counts
from torch import Tensor, nn

from graphify import Bucket, GraphifyWarning, InputError, PaddingError, StaleOutputError, graphify
from graphify.testing import assert_matches_eager

NO_GRAD = [torch.no_grad, torch.inference_mode]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Inference, unless a test says otherwise."""
    with torch.no_grad():
        yield


# ---------------------------------------------------------------- writes


class TestWrites:
    @pytest.mark.parametrize("context", NO_GRAD)
    def test_live_rows_of_an_argument_are_written_back(
        self, backend: str, device: torch.device, context: Any
    ) -> None:
        """What the function writes into its argument, the caller's tensor has, in every kind of call."""

        def step(x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            y[:, 0] = x[:, 1]
            return x.mul_(2)

        calls = over(lambda batch, seq: (torch.randn(batch, 3), torch.randn(batch, 2)), context=context)

        like_eager(lambda: step, calls, backend, device, **ROWS)

    @pytest.mark.parametrize("context", NO_GRAD)
    def test_memory_behind_the_live_rows_is_not_touched(
        self, backend: str, device: torch.device, context: Any
    ) -> None:
        """An argument that is a view of a larger tensor is written where the view is, and nowhere else."""
        step = graphify(lambda x: x.add_(1), buckets=[4, 8], backend=backend)

        for n in (3, 3, 3, 4, 6, 5, 2, 7):
            with context():
                base = torch.randn(10, 3, device=device)
                expected = base.clone()
                expected[1 : n + 1] += 1

                step(base[1 : n + 1])

            assert torch.equal(base, expected)

    def test_outside_state_moves_once_per_call(self, backend: str, device: torch.device) -> None:
        """A counter in a buffer counts calls, whatever their size."""

        class Counts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(3))

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return x * self.calls

        like_eager(Counts, over(rows), backend, device, **ROWS)

    def test_rows_of_a_cache_are_written_where_they_are_live(
        self, backend: str, device: torch.device
    ) -> None:
        """A cache that masks index -1 holds what eager puts there, slot by slot."""
        calls = over(lambda batch, seq: (torch.randn(batch, 3), torch.randperm(30)[:batch]))

        like_eager(lambda: Cache(masked=True), calls, backend, device, pad={"slots": -1}, **ROWS)

    def test_a_scratch_row_is_allowed_when_state_is_not_compared(
        self, backend: str, device: torch.device
    ) -> None:
        """With check_padding="outputs" padded rows may write a row that nobody reads."""
        calls = over(lambda batch, seq: (torch.randn(batch, 3), torch.randperm(30)[:batch]))
        model = graphify(
            Cache(masked=False).to(device),
            pad={"slots": 31},
            check_padding="outputs",
            backend=backend,
            **ROWS,
        )
        plain = Cache(masked=False).to(device)

        for call in calls:
            args = [t.to(device) for t in call.args]
            assert torch.equal(model(*args), plain(*args))
            assert torch.equal(model.kv[:31], plain.kv[:31])

        assert counts(model)[:4] == (3, 3, 6, 0)

    def test_an_attribute_that_holds_no_rows_is_assigned(self, backend: str, device: torch.device) -> None:
        """What the function leaves in an attribute is left at every call, if no bucketed size is in it."""

        class Leaves(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(3))
                self.last: Any = None

            def forward(self, x: Tensor) -> Tensor:
                self.last = self.scale * 2
                return x * self.scale

        like_eager(Leaves, over(rows), backend, device, **ROWS)


# ---------------------------------------------------------------- what stands behind


class TestFills:
    """`check_padding=False` and a sum over all rows make the padding visible."""

    SIZES = (8, 3, 3, 8, 5, 1, 4, 2, 7, 2, 6, 8, 1, 1, 3)

    def sums(self, backend: str, pad: Any, function: Callable[[Tensor], Any], **options: Any) -> Any:
        return graphify(function, pad=pad, check_padding=False, backend=backend, **(ROWS | options))

    @pytest.mark.parametrize("fill", [0, 3, -1.5])
    def test_only_padding_is_behind_the_live_rows(
        self, backend: str, device: torch.device, fill: float
    ) -> None:
        """Rows of an earlier, longer call are filled again: large, small, large, and from bucket to bucket."""
        total = self.sums(backend, fill, lambda x: x.sum(0))

        for n in self.SIZES:
            x = torch.randint(0, 9, (n, 3), device=device).float()
            bucket = BATCH.fit(n)
            assert bucket is not None
            assert torch.equal(total(x), x.sum(0) + fill * (bucket - n))

    def test_a_graph_that_writes_its_input_leaves_nothing_behind(
        self, backend: str, device: torch.device
    ) -> None:
        """Padded rows that a replay has changed are padding again in the next."""

        def step(x: Tensor) -> Tensor:
            total = x.sum(0)
            x.add_(1)
            return total

        total = self.sums(backend, 0, step)

        for n in self.SIZES:
            x = torch.randint(0, 9, (n, 3), device=device).float()
            expected = x.sum(0)
            assert torch.equal(total(x), expected)

    @pytest.mark.parametrize("layout", ["first", "last", "both"])
    def test_padding_along_any_dimension(self, backend: str, device: torch.device, layout: str) -> None:
        """The dirty part of a buffer is a block of rows, of columns, or both."""
        seq = Bucket("seq", [4, 8])
        dims: Any = {"first": {0: BATCH}, "last": {1: seq}, "both": {0: BATCH, 1: seq}}[layout]
        total = self.sums(backend, 1, lambda x: x.sum(), buckets={"x": dims})

        for n, s in [(8, 8), (3, 5), (3, 5), (8, 8), (2, 3), (1, 8), (5, 1), (8, 4), (2, 2), (1, 1), (7, 7)]:
            n, s = (n if layout != "last" else 3), (s if layout != "first" else 3)
            x = torch.randint(0, 9, (n, s), device=device).float()
            rows_in, columns_in = (BATCH.fit(n) if 0 in dims else n), (seq.fit(s) if 1 in dims else s)
            assert rows_in is not None
            assert columns_in is not None
            assert total(x).item() == x.sum().item() + rows_in * columns_in - n * s

    def test_one_fill_per_argument(self, backend: str, device: torch.device) -> None:
        """Each argument has its own value, by path; what is not named has 0."""

        def step(x: Tensor, more: Any) -> Any:
            return x.sum(0), more["a"].sum(0), more["b"].sum(0)

        total = graphify(
            step,
            buckets=[4],
            pad={"x": 5, "more['a']": -1},
            check_padding=False,
            backend=backend,
        )

        for _ in range(3):
            x, a, b = (torch.ones(3, 2, device=device) for _ in range(3))
            found = total(x, {"a": a, "b": b})
            assert [t[0].item() for t in found] == [8, 2, 3]

    def test_none_keeps_what_is_there(self, backend: str, device: torch.device) -> None:
        """`None` costs nothing: a replay leaves the rows of earlier calls where they are."""
        total = self.sums(backend, {"x": None}, lambda x: x.sum(0), buckets=[4])
        four, three = torch.ones(4, 2, device=device), torch.zeros(3, 2, device=device)

        for _ in range(3):
            total(four)

        assert total(three)[0].item() == 1

    def test_a_function_fills_as_it_likes(self, backend: str, device: torch.device) -> None:
        """It gets a buffer of the bucket's shape and the live shape, and its rows are what the graph sees."""
        seen = []

        def fill(buffer: Tensor, live: tuple[int, ...]) -> None:
            seen.append((tuple(buffer.shape), live))
            buffer[live[0] :] = 7

        total = self.sums(backend, fill, lambda x: x.sum(0), buckets=[4])

        for n in (3, 2, 1, 3, 4):
            x = torch.ones(n, 2, device=device)
            assert total(x)[0].item() == n + 7 * (4 - n)
        assert set(seen) <= {((4, 2), (n, 2)) for n in range(1, 5)}

    @pytest.mark.parametrize(
        ("dtype", "fill"),
        [(torch.int64, -1), (torch.bool, True), (torch.complex64, 1j), (torch.bfloat16, float("-inf"))],
        ids=str,
    )
    def test_fills_of_any_dtype(
        self, backend: str, device: torch.device, dtype: torch.dtype, fill: Any
    ) -> None:
        """The value is written as the argument's dtype has it."""
        last = self.sums(backend, fill, lambda x: x[-1].clone(), buckets=[4])

        for _ in range(3):
            x = torch.zeros(3, 2, dtype=dtype, device=device)
            found = last(x)
            assert found.dtype == dtype
            assert found[0].item() == torch.tensor(fill).to(dtype).item()


# ---------------------------------------------------------------- functions that padding would change


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 3
        return x * 2


UNSAFE: dict[str, Callable[[], Callable[..., Any]]] = {
    "a mean over the batch": lambda: lambda x: x - x.mean(0),
    "a sum over the batch, shifted": lambda: lambda x: (x + 1).sum(0),
    "a softmax over the batch": lambda: lambda x: x.softmax(0),
    "a largest of the batch": lambda: lambda x: (x - 9).max(0).values,
    "a sum from the end": lambda: lambda x: (x + 1).flip(0).cumsum(0).flip(0),
    "the batch turned around": lambda: lambda x: x.flip(0),
    "the last row": lambda: lambda x: x[-1] * 2,
    "a roll": lambda: lambda x: x.roll(1, 0),
    "the size as a factor": lambda: lambda x: x * x.shape[0],
    "the size as a divisor": lambda: lambda x: x.sum(1) / x.shape[0],
    "a ramp over the rows": lambda: lambda x: x + torch.linspace(0, 1, len(x), device=x.device)[:, None],
    "the size in the result": lambda: lambda x: (x * 2, x.shape[0]),
    "the size in a tensor": lambda: lambda x: (x * 2, torch.full((), len(x), device=x.device)),
    "batch norm that trains": lambda: Normed(),
    "rows left in an attribute": lambda: Remembers(),
    "a sort of the batch": lambda: lambda x: x.sort(0).values,
    "distances of all rows summed": lambda: lambda x: torch.cdist(x + 1, x).sum(1),
    "other results for other sizes": lambda: lambda x: x * 2 if x.shape[0] < 4 else (x * 2, x),
    "an error for other sizes": lambda: lambda x: x * torch.ones(3, 1, device=x.device),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_padding_that_would_change_a_result_is_refused(backend: str, device: torch.device, name: str) -> None:
    """`PaddingError` at the first call already and at every one, and nothing has moved."""
    refused = []

    def note(error: Any) -> bool:
        refused.append(error)
        return isinstance(error, PaddingError)

    calls = over(rows, [(3, 1)] * 4)
    assert_matches_eager(make=UNSAFE[name], calls=calls, backend=backend, device=device, loud_ok=note, **ROWS)

    assert len(refused) == 4
    assert "mask the padded rows" in str(refused[0])


@pytest.mark.parametrize("name", UNSAFE)
def test_padding_that_would_change_a_result_falls_back(backend: str, device: torch.device, name: str) -> None:
    """With fallback="eager" each call is eager's at its exact size, counted, and said once."""
    with pytest.warns(GraphifyWarning, match="depends on|padded") as warned:
        stats = assert_matches_eager(
            make=UNSAFE[name],
            calls=over(rows, [(3, 1)] * 3),
            backend=backend,
            device=device,
            fallback="eager",
            **ROWS,
        )

    assert stats.reasons == {"padding": 3}
    assert len(warned) == 1


@pytest.mark.parametrize("slot", [0, -1, 31])
def test_padded_rows_that_write_state_are_refused(backend: str, device: torch.device, slot: int) -> None:
    """A cache of zeros and padded rows of zeros hide nothing: which memory is written counts, not what with."""
    made = graphify(Cache(masked=False).to(device), pad={"slots": slot, "x": 0}, backend=backend, **ROWS)

    for _ in range(2):
        with pytest.raises(PaddingError, match=r"padded rows write 3 elements of `self.kv`"):
            made(torch.randn(3, 3, device=device), torch.tensor([4, 7, 2], device=device))

    assert not made.kv.any()
    assert made.kv._version == 0


def put(table: Tensor, slots: Tensor, tokens: Tensor) -> None:
    table[slots] = tokens.to(table.dtype)


# Ways to write the numbers that padded rows hold, by default 0, where slot 0 holds 0 already.
SAME: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "index_put": put,
    "index_copy": lambda table, slots, tokens: table.index_copy_(0, slots, tokens.to(table.dtype)),
    "scatter": lambda table, slots, tokens: table.scatter_(0, slots, tokens.to(table.dtype)),
    "a view": lambda table, slots, tokens: put(table.view(2, -1).view(-1), slots, tokens),
    "a constant": lambda table, slots, tokens: table.index_fill_(0, slots, 0),
}


@pytest.mark.parametrize("held", ["outside", "argument", "reference"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32])
@pytest.mark.parametrize("way", SAME)
def test_padded_rows_that_write_what_is_there_are_refused(
    backend: str, device: torch.device, way: str, dtype: torch.dtype, held: str
) -> None:
    """A table that padded rows overwrite with what it holds by chance is found, whatever kind of numbers it has."""
    mine, start = torch.zeros(8, dtype=dtype, device=device), torch.zeros(8, dtype=dtype, device=device)
    mine[4:] = start[4:] = 1

    def step(tokens: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        SAME[way](mine if held == "outside" else table, slots, tokens)
        return tokens * 2

    sizes = {"tokens": {0: BATCH}, "slots": {0: BATCH}}
    by = {"static_args": ("table",)} if held == "reference" else {}
    made = graphify(step, buckets=sizes, backend=backend, **by)
    tokens, slots = torch.tensor([1, 6, 1], device=device), torch.tensor([2, 3, 5], device=device)

    with pytest.raises(PaddingError, match="padded rows write 1 elements of") as raised:
        made(tokens, slots, mine)

    assert ("`mine`" if held == "outside" else "argument `table`") in str(raised.value)
    assert "pad=" in raised.value.fix
    assert torch.equal(mine, start)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("held", ["outside", "reference"])
def test_padded_rows_that_keep_what_is_there_are_allowed(
    backend: str, device: torch.device, dtype: torch.dtype, held: str
) -> None:
    """A table into which padded rows put what they found there is no trouble, and is as eager leaves it."""
    mine, twin = (torch.arange(8, device=device).to(dtype) for _ in range(2))

    def step(tokens: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        kept = mine if held == "outside" and table is not twin else table
        safe = slots.clamp(min=0)
        kept[safe] = torch.where(slots >= 0, tokens.to(kept.dtype), kept[safe])
        return kept[safe] * 2

    sizes = {"tokens": {0: BATCH}, "slots": {0: BATCH}}
    by = {"static_args": ("table",)} if held == "reference" else {}
    made = graphify(step, buckets=sizes, pad={"slots": -1}, backend=backend, **by)
    for n in (3, 3, 2, 4, 1, 5, 7, 6, 3):
        tokens, slots = torch.randint(0, 9, (n,), device=device), 1 + torch.randperm(7, device=device)[:n]
        given = mine if held == "reference" else torch.zeros_like(mine)
        assert torch.equal(made(tokens, slots, given), step(tokens, slots, twin))
        assert torch.equal(mine, twin)
    assert counts(made)[4] == 0


def test_a_table_of_one_number_is_said_to_be_unseen(backend: str, device: torch.device) -> None:
    """Where integers hold one number only, nobody knows another legal one: what could not be seen is said once."""
    table = torch.zeros(8, dtype=torch.int64, device=device)

    def step(tokens: Tensor, slots: Tensor) -> Tensor:
        safe = slots.clamp(min=0)
        table[safe] = torch.where(slots >= 0, tokens, table[safe])
        return table[safe] + 1

    made = graphify(step, pad={"slots": -1}, backend=backend, **ROWS)
    with pytest.warns(GraphifyWarning, match="write `table`, which holds one number everywhere") as said:
        for n in (3, 3, 2, 1, 5, 6):
            tokens, slots = (
                torch.zeros(n, dtype=torch.int64, device=device),
                torch.arange(1, n + 1, device=device),
            )
            assert made(tokens, slots).tolist() == [1] * n
    assert len(said) == 1
    assert counts(made)[4] == 0


def test_default_padding_of_an_index_is_refused(backend: str, device: torch.device) -> None:
    """Where no `pad` is given, index 0 is what padded rows would write."""
    made = graphify(Cache(masked=False).to(device), backend=backend, **ROWS)

    with pytest.raises(PaddingError, match="self.kv"):
        made(torch.randn(3, 3, device=device), torch.tensor([4, 7, 2], device=device))


def test_the_smallest_difference_is_shown(backend: str, device: torch.device) -> None:
    """The message names the function, the size in its bucket, the result, and one place with both numbers."""
    step = graphify(lambda x: {"mean": x.mean(0)}, buckets=[4], backend=backend)

    with pytest.raises(PaddingError) as caught:
        step(torch.tensor([[3.0], [6.0]], device=device))

    text = str(caught.value)
    assert "2 in 4: `output['mean']` depends on the padding" in text
    assert "smallest difference at [0]: 2.25 padded, 4.5 at its exact size" in text


def test_arguments_without_pad_are_named(backend: str, device: torch.device) -> None:
    """A mask that nobody said how to pad is the commonest cause; `pad` for it is the cure."""

    def step(x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        return (x * mask[:, None]).sum(0) * scale.sum()

    buckets: dict[str, Any] = {"x": {0: BATCH}, "mask": {0: BATCH}, "scale": {0: BATCH}}
    args = torch.randn(3, 3, device=device), torch.ones(3, device=device), torch.ones(3, device=device)

    with pytest.raises(PaddingError, match="tells what is padding, give it `pad=`: `x`, `mask`$"):
        graphify(step, buckets=buckets, pad={"scale": 0}, backend=backend)(*args)
    with pytest.raises(PaddingError) as caught:
        graphify(lambda x: x.mean(0), pad=0, buckets=[4], backend=backend)(args[0])
    assert "give it `pad=`" not in str(caught.value)

    cured = graphify(step, buckets=buckets, pad={"scale": 0, "mask": 0}, backend=backend)
    assert torch.allclose(cured(*args), step(*args))


def test_a_full_bucket_needs_no_proof(backend: str, device: torch.device) -> None:
    """A mean over the batch is right while nothing is padded, and refused from the first padded call on."""
    step = graphify(lambda x: x - x.mean(0), buckets=[4], backend=backend)

    for _ in range(3):
        x = torch.randn(4, 3, device=device)
        assert torch.equal(step(x), x - x.mean(0))
    with pytest.raises(PaddingError):
        step(torch.randn(3, 3, device=device))

    assert counts(step) == (1, 1, 1, 0, 1)


def test_checks_can_be_switched_off(backend: str, device: torch.device) -> None:
    """With check_padding=False the function is trusted: a mean over the batch is that of the bucket."""
    step = graphify(lambda x: x.mean(0), buckets=[4], check_padding=False, backend=backend)
    x = torch.ones(3, 2, device=device)

    for _ in range(3):
        assert torch.equal(step(x), torch.full((2,), 0.75, device=device))


def test_random_numbers_are_those_of_the_bucket(backend: str, device: torch.device) -> None:
    """Draws cannot be compared, so nothing is: results and streams are eager's at the bucket's size, cut."""

    def step(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)

    graphed = graphify(step, backend=backend, **ROWS)
    for n in (3, 3, 3, 1, 1, 1, 3, 4, 5, 7, 6):
        x, bucket = torch.randn(n, 3, device=device), BATCH.fit(n)
        assert bucket is not None
        torch.manual_seed(n)
        expected = step(torch.cat([x, x.new_zeros(bucket - n, 3)]))[:n]
        after = torch.rand(2, device=device)
        torch.manual_seed(n)

        assert torch.equal(graphed(x), expected)
        assert torch.equal(torch.rand(2, device=device), after)


def test_rows_left_in_an_attribute_are_refused_beside_random_numbers(
    backend: str, device: torch.device
) -> None:
    """Where draws forbid to compare values, an attribute of the bucket's size is refused still."""

    class Drops(nn.Module):
        last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return nn.functional.dropout(x, 0.5)

    with pytest.raises(PaddingError, match=r"`self.last` depends on the padding: \(4, 3\) padded, \(3, 3\)"):
        graphify(Drops(), backend=backend, **ROWS)(torch.randn(3, 3, device=device))


def test_an_argument_left_in_an_attribute_is_refused(backend: str, device: torch.device) -> None:
    """A row of the caller's tensor is none of the bucket's copy, whatever its shape."""

    class Keeps(nn.Module):
        last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x[:1]
            return x * 2

    made = graphify(Keeps(), backend=backend, **ROWS)

    with pytest.raises(PaddingError, match="`self.last` is left as memory of `x`"):
        made(torch.randn(3, 3, device=device))
    assert made.last is None


# ---------------------------------------------------------------- sizes that no bucket holds, arguments that cannot be padded


def test_sizes_above_the_largest_run_eagerly(backend: str, device: torch.device) -> None:
    """Counted, and said once with the argument, its size and the largest."""
    step = graphify(lambda x: x * 2, buckets=[2, 4], backend=backend)

    with pytest.warns(GraphifyWarning, match="dimension 0 of `x` is 6, above 4") as warned:
        for n in (3, 6, 3, 9, 3, 6):
            x = torch.randn(n, 3, device=device)
            assert torch.equal(step(x), x * 2)

    assert len(warned) == 1
    assert counts(step) == (1, 1, 1, 3, 0)


def test_no_rows_run_eagerly(backend: str, device: torch.device) -> None:
    """Size 0 is right, counted, and worth no warning, also where a mean over no rows is NaN."""
    step = graphify(lambda x: (x * 2, x.sum(1)), buckets=[2, 4], backend=backend)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (0, 3, 0, 3, 0, 3):
            x = torch.randn(n, 3, device=device)
            twice, total = step(x)
            assert torch.equal(twice, x * 2)
            assert torch.equal(total, x.sum(1))

    assert counts(step) == (1, 1, 1, 3, 0)


def test_arguments_that_share_memory_are_refused_by_name(backend: str, device: torch.device) -> None:
    """Two overlapping views would be padded apart; clones are taken, and views that do not overlap."""
    step = graphify(lambda x, y: x + y, backend=backend, **ROWS)
    base = torch.randn(6, 3, device=device)

    with pytest.raises(InputError, match="`x` and `y` share memory"):
        step(base[:3], base[1:4])

    for _ in range(3):
        assert torch.equal(step(base[:3], base[1:4].clone()), base[:3] + base[1:4])
        assert torch.equal(step(base[:3], base[3:]), base[:3] + base[3:])


@pytest.mark.parametrize("written", [False, True])
def test_arguments_side_by_side_in_one_memory(backend: str, device: torch.device, written: bool) -> None:
    """Parts of one tensor that share no element are padded apart, also where they are written."""

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.add_(k) if written else q + k) * v

    graphed = graphify(step, backend=backend, **ROWS)
    for n in (3, 3, 2, 4, 3, 1, 8, 3):
        whole = torch.randn(n, 2, 12, device=device)
        expected = whole.clone()
        assert torch.equal(graphed(*whole.chunk(3, -1)), step(*expected.chunk(3, -1)))
        assert torch.equal(whole, expected)
    assert graphed.stats().replays > 0


def test_parts_that_meet_somewhere(backend: str, device: torch.device) -> None:
    """Columns, rows or steps that share one element are refused; those that share none are not."""
    sizes = {"x": {0: BATCH}, "y": {0: BATCH}}
    step = graphify(lambda x, y: x * 2 + y[:, :1], buckets=sizes, backend=backend)
    base = torch.randn(8, 12, device=device)

    for x, y in (
        (base[:4, :4], base[:4, 3:6]),
        (base[:4, :4], base[3:7, 2:4]),
        (base[:4, ::2], base[:4, 2::2]),
        (base[:3, :2], base.t()[:3, :2]),
    ):
        with pytest.raises(InputError, match="`x` and `y` share memory"):
            step(x, y)
    for x, y in (
        (base[:3, :4], base[:3, 4:6]),
        (base[1:4, 8:], base[2:5, :8]),
        (base[:3, ::2], base[:3, 1::2]),
        (base[:3], base[3:6]),
    ):
        for _ in range(3):
            assert torch.equal(step(x, y), x * 2 + y[:, :1])


def test_sizes_that_should_agree(backend: str, device: torch.device) -> None:
    """Arguments of one axis with two sizes are refused with both, under both spellings of the option."""
    x, y = torch.randn(3, 2, device=device), torch.randn(4, 2, device=device)
    short = graphify(lambda x, y: x[:3] + y[:3], backend=backend, **ROWS)
    named = graphify(lambda x, y: x[:3] + y[:3], buckets={"x": {0: BATCH}, "y": {0: BATCH}}, backend=backend)

    with pytest.raises(InputError, match="`x` has size 3 in dimension 0, but `y` has size 4"):
        short(x, y)
    with pytest.raises(InputError, match='both are the Bucket "batch"'):
        named(x, y)


# ---------------------------------------------------------------- static results, arguments by reference


def test_a_static_result_is_stale_after_the_next_replay(backend: str, device: torch.device) -> None:
    """Whichever bucket replays next: using the earlier result as an argument raises."""
    step = graphify(lambda x: x * 2, outputs="static", backend=backend, **ROWS)
    small, large = torch.randn(3, 3, device=device), torch.randn(7, 3, device=device)
    for _ in range(3):
        step(small)
        step(large)

    kept = step(small)
    assert torch.equal(kept, small * 2)
    step(large)

    with pytest.raises(StaleOutputError):
        step(kept)


class TestArgumentsByReference:
    def make(self, backend: str, **options: Any) -> Any:
        def decode(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
            live, safe = slots >= 0, slots.clamp(min=0)
            cache.index_add_(0, safe, torch.where(live[:, None], x, 0.0))
            return cache[safe] + x

        return graphify(
            decode, pad={"slots": -1}, static_args=("cache",), backend=backend, **(ROWS | options)
        )

    def test_they_are_written_where_they_are(self, backend: str, device: torch.device) -> None:
        """The caller's own memory is read and written at every call; what others write into it is seen."""
        decode = self.make(backend)
        cache, mirror = (torch.zeros(16, 3, device=device) for _ in range(2))
        place = cache.data_ptr()

        for n in (3, 3, 3, 1, 1, 1, 4, 8, 5, 5):
            x, slots = torch.randn(n, 3, device=device), torch.randperm(16, device=device)[:n]
            mirror.index_add_(0, slots, x)
            assert torch.allclose(decode(x, slots, cache), mirror[slots] + x)
            assert torch.allclose(cache, mirror)
            cache.mul_(0.5)
            mirror.mul_(0.5)

        assert cache.data_ptr() == place
        assert counts(decode) == (3, 3, 4, 0, 0)

    def test_their_address_is_part_of_the_signature(self, backend: str, device: torch.device) -> None:
        """Another tensor of the same form is another signature; both are right in turn."""
        decode = self.make(backend, buckets=[4])
        caches = [torch.zeros(16, 3, device=device) for _ in range(2)]

        for _ in range(4):
            for cache in caches:
                before, x = cache.clone(), torch.ones(2, 3, device=device)
                decode(x, torch.tensor([1, 5], device=device), cache)
                before[[1, 5]] += 1
                assert torch.equal(cache, before)

        assert counts(decode) == (2, 2, 4, 0, 0)

    def test_too_many_addresses_are_said(self, backend: str, device: torch.device) -> None:
        """A new cache at each call would be a graph per call."""
        decode = self.make(backend, buckets=[4])
        kept = [torch.zeros(16, 3, device=device) for _ in range(9)]

        with pytest.warns(GraphifyWarning, match="`cache` at 8 addresses"):
            for cache in kept:
                decode(torch.ones(2, 3, device=device), torch.tensor([1, 5], device=device), cache)

    def test_large_ones_are_not_copied_for_a_proof(
        self, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A cache that fills half of the device is proved where it is."""
        monkeypatch.setattr("graphify._trial._LIMIT", 1000)
        places: list[int] = []
        note = places.append  # which no survey looks into

        def read(x: Tensor, small: Tensor, large: Tensor) -> Tensor:
            note(large.data_ptr())
            return x * small[0] * large[0]

        graphed = graphify(read, static_args=("small", "large"), backend=backend, **ROWS)
        small, large = torch.ones(2, 3, device=device), torch.ones(200, 3, device=device)

        for n in (3, 3, 3, 1, 1, 1):
            x = torch.randn(n, 3, device=device)
            assert torch.equal(graphed(x, small, large), x)

        assert set(places) == {large.data_ptr()}


def test_b07_padding_keeps_nothing_of_earlier_calls(backend: str, device: torch.device) -> None:
    """Rows behind a smaller batch are padding, not NaN of the batch before; what reads them is refused."""
    weight = torch.randn(3, 3, device=device)
    rows = graphify(lambda x: torch.relu(x @ weight), buckets=[4, 8], backend=backend)
    summed = graphify(lambda x: x.sum(0), buckets=[4, 8], pad=0, backend=backend)
    norm = nn.BatchNorm1d(3).to(device)
    with torch.no_grad():
        for _ in range(3):
            rows(torch.full((8, 3), torch.nan, device=device))
            summed(torch.full((8, 3), torch.nan, device=device))
            x = torch.randn(5, 3, device=device)
            assert torch.allclose(rows(x), torch.relu(x @ weight), atol=1e-6)
            assert torch.allclose(summed(x), x.sum(0), atol=1e-6)
        for wrong in (lambda x: x.mean(0), norm):
            with pytest.raises(PaddingError, match="depends on"):
                graphify(wrong, buckets=[4, 8], backend=backend)(torch.randn(5, 3, device=device))
    assert norm.num_batches_tracked == 0
