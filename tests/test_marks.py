"""Which elements a run writes, whatever was there: each kind of operator that writes, on copies first and then once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphify._marks import Marks
from graphify._watch import Watch

INDEX, VALUES = torch.tensor([1, 3]), torch.tensor([0, 0])


def out_of_another(t: Tensor) -> None:
    torch.add(torch.zeros_like(t), 0, out=t)


# What writes zeros over zeros, and at which elements of six.
WRITES: dict[str, tuple[Callable[[Tensor], Any], list[int]]] = {
    "index_put": (lambda t: t.index_put_((INDEX,), VALUES), [1, 3]),
    "scatter": (lambda t: t.scatter_(0, INDEX, VALUES), [1, 3]),
    "index_copy": (lambda t: t.index_copy_(0, INDEX, VALUES), [1, 3]),
    "index_fill": (lambda t: t.index_fill_(0, INDEX, 0), [1, 3]),
    "masked_fill": (lambda t: t.masked_fill_(torch.arange(6) > 3, 0), [4, 5]),
    "slice": (lambda t: t[2:4].copy_(VALUES), [2, 3]),
    "strided": (lambda t: t[::2].zero_(), [0, 2, 4]),
    "view": (lambda t: t.view(2, 3)[1].fill_(0), [3, 4, 5]),
    "transposed": (lambda t: t.view(2, 3).t()[0].fill_(0), [0, 3]),
    "all": (lambda t: t.zero_(), [0, 1, 2, 3, 4, 5]),
    "out": (out_of_another, [0, 1, 2, 3, 4, 5]),
    "foreach": (lambda t: torch._foreach_zero_([t[:1], t[5:]]), [0, 5]),
    "from itself": (lambda t: t[:2].copy_(t[2:4]), [0, 1]),
    "adds nothing": (lambda t: t.index_add_(0, INDEX, VALUES), []),
    "adds": (lambda t: t.index_add_(0, INDEX, torch.tensor([2, 0])), [1]),
    "by itself": (lambda t: t.mul_(t), [0, 1, 2, 3, 4, 5]),
    "nothing": (lambda t: t + 1, []),
    "twice": (lambda t: (t[:1].zero_(), t[2:3].zero_()), [0, 2]),
    "one": (lambda t: t[4].fill_(0), [4]),
}


def marking(marks: Marks) -> Watch:
    """A watch that marks."""
    watch = Watch(torch.device("cpu"))
    watch.around = marks.around
    return watch


def marked(write: Callable[[Tensor], Any], t: Tensor) -> list[int]:
    marks = Marks(lambda tensor: tensor.untyped_storage()._cdata == t.untyped_storage()._cdata)
    with marking(marks):
        write(t)
    return [i for mark in marks.found({}).values() for i in mark.mask.nonzero().flatten().tolist()]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_what_writes_the_same_is_seen(name: str, inference: bool) -> None:
    """Zeros over zeros leave marks at just their places, in any mode, and the memory is as without."""
    write, places = WRITES[name]
    with torch.inference_mode(inference):
        t, twin = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
        assert marked(write, t) == places
        write(twin)
        assert torch.equal(t, twin)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.float32, torch.bfloat16, torch.complex64]
)
def test_any_kind_of_number(dtype: torch.dtype) -> None:
    """What is written is marked whether it differs from what was there or not, for every dtype."""
    for value in (0, 1):
        t = torch.zeros(6, dtype=dtype)
        assert marked(lambda t, value=value: t[1:3].fill_(value), t) == [1, 2]
        assert t.tolist() == [0, value, value, 0, 0, 0]


def test_a_lazy_bit() -> None:
    """A view with the negative or conjugate bit set is written through like any other."""
    t = torch.zeros(4, dtype=torch.complex64)
    assert marked(lambda t: t.conj()[1:2].fill_(1j), t) == [1]
    assert t[1] == -1j
    assert marked(lambda t: t.conj().imag[2:3].fill_(2.0), t) != []
    assert t[2] == -2j


def test_with_autograd_and_for_memory_that_nobody_asks_for() -> None:
    """Only the memory asked for is marked; operators that write two memories run once for either."""
    total, other, weight = torch.zeros(3), torch.zeros(3), torch.ones(3, requires_grad=True)

    def run(t: Tensor) -> Tensor:
        torch._foreach_add_([t, other], [1.0, 2.0])
        return (weight * 2).sum() + t.sum()

    found: list[Tensor] = []
    assert marked(lambda t: found.append(run(t)), total) == [0, 1, 2]
    assert total.tolist() == [1, 1, 1]
    assert other.tolist() == [2, 2, 2]
    found[0].backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 2]


@torch.library.custom_op("graphify_tests::put_two", mutates_args=("keys", "values"))
def put_two(keys: Tensor, values: Tensor, slots: Tensor, rows: Tensor) -> None:
    """What a serving kernel does: two caches at once, by slots."""
    keys.index_copy_(0, slots, rows)
    values.index_add_(0, slots, rows)


def test_a_custom_operator() -> None:
    """Both memories are copies while it tries, so that what adds up adds once."""
    keys, values = torch.zeros(4, 2), torch.ones(4, 2)
    marks = Marks(lambda tensor: tensor is keys or tensor is values)
    with marking(marks):
        put_two(keys, values, torch.tensor([2]), torch.zeros(1, 2))
        put_two(keys, values, torch.tensor([1]), torch.ones(1, 2))
    seen = [mark.mask.view(4, 2)[:, 0].tolist() for mark in marks.found({}).values()]
    assert seen == [[False, True, True, False], [False, True, False, False]]
    assert values[:, 0].tolist() == [1, 2, 1, 1]


@pytest.mark.parametrize("inference", [False, True])
def test_what_a_part_of_an_operator_writes_is_seen(inference: bool) -> None:
    """Inference mode hands composite operators over whole; the statistics that BatchNorm moves are marked there too."""
    norm = torch.nn.BatchNorm1d(4)
    with torch.inference_mode(inference), torch.no_grad():
        marks = Marks(lambda tensor: tensor is norm.running_mean)
        with marking(marks):
            norm(torch.randn(3, 4))

    (mark,) = marks.found({}).values()
    assert mark.mask.all()
