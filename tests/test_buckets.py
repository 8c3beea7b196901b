"""Calls of many sizes over the graphs of few: results, arguments and memory are what eager gives at the exact size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from bucketing import BATCH, BOTH, ROWS, SEQ, like_eager, over, rows, steps
from torch import Tensor, nn

from graphify.testing import Call

Case = tuple[Callable[..., Any], Callable[[int, int], Any], dict[str, Any], int]
"""A function, its arguments at a size, the options, and how many calls may be needed to show a shape."""


class Parts(NamedTuple):
    left: Tensor
    right: Tensor


def run(case: Case, backend: str, device: torch.device, context: Any = torch.no_grad) -> None:
    function, args, options, shown = case
    like_eager(lambda: function, over(args, context=context), backend, device, shown=shown, **options)


# ---------------------------------------------------------------- the option and the arguments it speaks of


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return x * mask[..., None]


def nested(batch: Any) -> Any:
    return {"out": batch["ids"] * batch["more"][0]}


def of_nested(batch: int, seq: int) -> Any:
    return ({"ids": torch.randn(batch, 3), "more": [torch.randn(batch, 3)]},)


FORMS: dict[str, Case] = {
    "a list": (lambda x: x * 2 + 1, rows, {"buckets": [2, 4, 8]}, 0),
    "a range": (lambda x: x * 2 + 1, rows, {"buckets": range(2, 9, 2)}, 0),
    "a Bucket": (lambda x: x * 2 + 1, rows, {"buckets": BATCH}, 0),
    "one size for all arguments": (
        lambda x, y: x + y,
        lambda batch, seq: (torch.randn(batch, 3), torch.randn(batch, 3)),
        ROWS,
        0,
    ),
    "one argument, the other as it is": (
        lambda x, y: (x * y, y * 2),
        lambda batch, seq: (torch.randn(batch, 3), torch.randn(3)),
        {"buckets": {"x": {0: BATCH}}},
        0,
    ),
    "two axes, shared by two arguments": (
        masked,
        lambda batch, seq: (torch.randn(batch, seq, 3), torch.randn(batch, seq)),
        {"buckets": {"x": {0: BATCH, 1: SEQ}, "mask": {0: BATCH, 1: SEQ}}},
        1,
    ),
    "dimensions from the end": (
        masked,
        lambda batch, seq: (torch.randn(batch, seq, 3), torch.randn(batch, seq)),
        {"buckets": {"x": {0: BATCH, -2: SEQ}, "mask": {0: BATCH, -1: SEQ}}},
        1,
    ),
    "another dimension in each argument": (
        lambda positions, x: x * positions.sum(0)[:, None],
        lambda batch, seq: (torch.randint(0, 9, (3, batch)), torch.randn(batch, 2)),
        {"buckets": {"positions": {1: BATCH}, "x": {0: BATCH}}},
        0,
    ),
    "leaves by path": (
        nested,
        of_nested,
        {"buckets": {"batch['ids']": {0: BATCH}, 'batch["more"][0]': {0: BATCH}}},
        0,
    ),
    "leaves as torch.export nests them": (
        nested,
        of_nested,
        {"buckets": {"batch": {"ids": {0: BATCH}, "more": [{0: BATCH}]}}},
        0,
    ),
    "all leaves of an argument": (nested, of_nested, {"buckets": {"batch": {0: BATCH}}}, 0),
    "starred arguments": (
        lambda *xs: sum(xs),
        lambda batch, seq: (torch.randn(batch, 3), torch.randn(batch, 3)),
        {"buckets": {"xs": {0: BATCH}}},
        0,
    ),
    "keywords": (
        lambda x, **more: x * more["mask"],
        lambda batch, seq: Call((torch.randn(batch, 3),), {"mask": torch.randn(batch, 3)}),
        {"buckets": {"x": {0: BATCH}, "mask": {0: BATCH}}},
        0,
    ),
    "a default that is no tensor": (
        lambda x, mask=None: x * 2 if mask is None else x * mask,
        rows,
        {"buckets": {"x": {0: BATCH}, "mask": {0: BATCH}}},
        0,
    ),
    "a mapping in place of a list": (lambda x: x * 2, steps, BOTH, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_option_in_each_of_its_forms(backend: str, device: torch.device, form: str) -> None:
    """Whatever way the sizes are named, results are eager's, and buckets are all that is captured."""
    run(FORMS[form], backend, device)


def test_one_graph_per_bucket(backend: str, device: torch.device) -> None:
    """Twelve calls of eight sizes meet three buckets: three warm-ups, three captures, else replays."""
    stats = like_eager(lambda: lambda x: x * 2, over(rows), backend, device, **ROWS)

    assert (stats.warmups, stats.captures, stats.replays, stats.eager) == (3, 3, 6, 0)


# ---------------------------------------------------------------- results


def several(x: Tensor) -> Any:
    y = x * 2
    return y, y[:, 0], y.t(), {"part": y[:, :2]}


def one_and_its_parts(x: Tensor) -> Any:
    return Parts(*(x * 2).split([1, 2], -1))


def cls_token(x: Tensor) -> Tensor:
    return torch.cat([x.new_ones(x.shape[0], 1, 6), x], 1)


RESULTS: dict[str, Case] = {
    "batch and sequence in one dimension": (lambda x: (x * 2).flatten(0, 1), steps, BOTH, 1),
    "the sequence before the batch": (lambda x: (x * 2).transpose(0, 1).flatten(0, 1), steps, BOTH, 1),
    "all in one dimension": (lambda x: (x * 2).flatten(), steps, BOTH, 1),
    "one more row": (lambda x: nn.functional.pad(x, (0, 0, 1, 0)), rows, ROWS, 0),
    "a token before each sequence": (cls_token, steps, BOTH, 1),
    "one row less": (lambda x: x.diff(dim=0), rows, ROWS, 0),
    "each row twice": (lambda x: x.repeat_interleave(2, 0), rows, ROWS, 0),
    "every row with every row": (lambda x: x[:, None] * x[None], rows, ROWS, 1),
    "neither": (lambda x: torch.arange(5.0, device=x.device), rows, ROWS, 0),
    "nothing": (lambda x: None, rows, ROWS, 0),
    "a number beside": (lambda x: (x * 2, x.shape[1]), rows, ROWS, 0),
    "a named tuple of torch's": (lambda x: x.max(-1), rows, ROWS, 0),
    "the argument itself": (lambda x: x, rows, ROWS, 0),
    "the argument among others": (lambda x: (x, x * 2, [x]), rows, ROWS, 0),
    "columns of the argument": (lambda x: x[:, 1:], rows, ROWS, 0),
    "the argument transposed": (lambda x: (x.t(), x.unsqueeze(-1)), rows, ROWS, 0),
    "all rows but the first": (lambda x: (x[1:], x[0]), rows, ROWS, 0),
    "the argument flattened": (lambda x: (x.view(-1), x.view(-1, 6)), steps, BOTH, 1),
    "slices along both sizes": (lambda x: (x[1:], x[:, 1:], x.select(1, 0)), steps, BOTH, 1),
    "the argument's bytes": (lambda x: x.view(torch.int32), rows, ROWS, 0),
    "the argument expanded": (lambda x: x[:, None].expand(-1, 3, -1), rows, ROWS, 0),
    "expanded": (lambda x: (x * 2)[:, None].expand(-1, 3, -1), rows, ROWS, 0),
    "windows that overlap": (lambda x: (x * 2).unfold(1, 2, 1), rows, ROWS, 0),
    "transposed": (lambda x: (x * 2).t(), rows, ROWS, 0),
    "heads": (lambda x: (x * 2).view(*x.shape[:2], 2, 3).transpose(1, 2), steps, BOTH, 2),
    "the sequence first": (lambda x: (x * 2).transpose(0, 1), steps, BOTH, 2),
    "several on one memory": (several, rows, ROWS, 0),
    "a named tuple of parts": (one_and_its_parts, rows, ROWS, 0),
    "query, key and value of one": (lambda x: (x * 2).chunk(3, -1), steps, BOTH, 1),
}


@pytest.mark.parametrize("result", RESULTS)
def test_results_are_cut_to_eagers(backend: str, device: torch.device, result: str) -> None:
    """Shape, strides, values, and what shares memory with what: in warm-ups, captures and replays."""
    run(RESULTS[result], backend, device)


@pytest.mark.parametrize("result", ["columns of the argument", "several on one memory", "heads", "expanded"])
def test_results_are_cut_in_inference_mode(backend: str, device: torch.device, result: str) -> None:
    """Views of arguments and results of their own are of the mode that eager makes them in."""
    run(RESULTS[result], backend, device, torch.inference_mode)


@pytest.mark.parametrize(
    "result", ["several on one memory", "heads", "all in one dimension", "a token before each sequence"]
)
def test_static_results_lie_as_in_eager(backend: str, device: torch.device, result: str) -> None:
    """The graph's own memory, or a copy where rows of a bucket lie apart: shape, strides and values are eager's."""
    function, args, options, shown = RESULTS[result]

    run((function, args, options | {"outputs": "static"}, shown), backend, device)


def test_views_of_outside_tensors_are_views_of_them(backend: str, device: torch.device) -> None:
    """A view of a buffer whose length follows the batch is a new view of that buffer at every call."""

    def make() -> Any:
        buffer = torch.randn(16, 3, device=device)
        return lambda x: (buffer[: x.shape[0]], buffer, x * 2)

    like_eager(make, over(rows), backend, device, **ROWS)


def test_outside_tensors_that_are_only_returned(backend: str, device: torch.device) -> None:
    """A buffer, a parameter or an item of a list that no operator touches comes back as itself."""

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.pile = [torch.zeros(4)]

        def forward(self, x: Tensor) -> Any:
            return x * 2, self.weight, self.pile[0], self.weight[1:]

    like_eager(Holds, over(rows), backend, device, **ROWS)


def test_which_of_two_orders_is_right_is_not_guessed(backend: str, device: torch.device) -> None:
    """One live element shows neither order of a flattened result; the next size is proved anew."""
    sizes = [(1, 1), (2, 3), (2, 4), (1, 3), (2, 2)]

    def run_with(function: Any) -> None:
        like_eager(lambda: function, over(steps, sizes), backend, device, shown=2, **BOTH)

    run_with(lambda x: (x * 2).flatten(0, 1))
    run_with(lambda x: (x * 2).transpose(0, 1).flatten(0, 1))


def test_a_size_that_never_varied_is_not_taken_for_fixed(backend: str, device: torch.device) -> None:
    """While the sequence fills its bucket, nothing tells a dimension of its length from a fixed one."""
    sizes = [(1, 4), (1, 4), (1, 2), (1, 3), (2, 2), (1, 2)]

    like_eager(lambda: lambda x: x * 2, over(steps, sizes), backend, device, shown=1, **BOTH)


# ---------------------------------------------------------------- layouts and dtypes of arguments


def typed(dtype: torch.dtype) -> Callable[[int, int], Any]:
    def args(batch: int, seq: int) -> Any:
        return ((torch.randn(batch, 3, dtype=torch.complex64 if dtype.is_complex else None) * 3).to(dtype),)

    return args


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex64], ids=str
)
def test_any_dtype(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """Rows of any dtype are padded and cut."""
    run((lambda x: (x == x, x + x, x), typed(dtype), ROWS, 0), backend, device)


def complex_rows(batch: int, seq: int) -> Tensor:
    return torch.randn(batch, 3, dtype=torch.complex64)


def images(batch: int, seq: int) -> Any:
    return (torch.randn(batch, 3, seq, 2).to(memory_format=torch.channels_last),)


def columns(batch: int, seq: int) -> Any:
    return (torch.randn(batch, 6)[:, ::2],)


def mixed(batch: int, seq: int) -> Any:
    return columns(batch, seq) if seq % 2 else rows(batch, seq)


LAYOUTS: dict[str, Case] = {
    "channels last": (lambda x: x * 2, images, {"buckets": {"x": {0: BATCH, 2: SEQ}}}, 4),
    "channels last, and a view": (
        lambda x: (x * 2, x[:, 1:]),
        images,
        {"buckets": {"x": {0: BATCH, 2: SEQ}}},
        4,
    ),
    "transposed": (lambda x: (x * 2, x.t()), lambda b, s: (torch.randn(3, b).t(),), ROWS, 1),
    "every other column": (lambda x: (x * 2, x, x[:, 1:]), columns, ROWS, 3),
    "every other row": (lambda x: (x * 2, x), lambda b, s: (torch.randn(2 * b, 3)[::2],), ROWS, 1),
    "made contiguous inside": (lambda x: (x.contiguous(), x.reshape(-1), x * 2), columns, ROWS, 1),
    "of two layouts in turn": (lambda x: (x.contiguous(), x.reshape(-1), x[:, 1:]), mixed, ROWS, 3),
    "one row expanded": (lambda x: x * 2, lambda b, s: (torch.randn(1, 3).expand(b, 3),), ROWS, 1),
    "one column expanded": (
        lambda x: (x * 2, x[:, :2]),
        lambda b, s: (torch.randn(b, 1).expand(b, 3),),
        ROWS,
        1,
    ),
    "conjugated": (
        lambda x: (x * 2, x, x.conj(), x[:, 1:]),
        lambda b, s: (complex_rows(b, s).conj(),),
        ROWS,
        1,
    ),
    "negated": (lambda x: (x * 2, x), lambda b, s: (complex_rows(b, s).conj().imag,), ROWS, 3),
    "with columns of none": (lambda x: (x * 2, x[:, 3:]), rows, ROWS, 0),
    "without features": (lambda x: x + 1, lambda b, s: (torch.randn(b),), ROWS, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arguments_of_any_layout(backend: str, device: torch.device, layout: str) -> None:
    """Results and views of arguments have the strides that the caller's own layout gives them in eager."""
    run(LAYOUTS[layout], backend, device)


def twice(batch: int, seq: int) -> Any:
    x = torch.randn(batch, 3)
    return x, x


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_one_tensor_given_twice_is_padded_once(backend: str, device: torch.device, context: Any) -> None:
    """What is written through one argument is seen through the other, live rows only."""

    def step(x: Tensor, y: Tensor) -> Any:
        x.add_(1)
        return x * y, y

    run((step, twice, ROWS, 0), backend, device, context)


def test_a_scalar_on_the_host_stays_one(backend: str, device: torch.device) -> None:
    """A tensor without dimensions beside the padded ones is passed as it is."""
    case: Case = (lambda x, k: x * k, lambda b, s: (torch.randn(b, 3), torch.tensor(2.0)), ROWS, 0)

    run(case, backend, device)
