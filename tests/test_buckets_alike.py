"""Data that cannot show what padding changes: no proof is made of it, and a wrong result is found all the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bucketing import ROWS
from torch import Tensor

from graphify import Bucket, GraphifyWarning, PaddingError, VerificationError, graphify

ALIKE = r"rows hold in every call what their padding holds"


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Inference, unless a test says otherwise."""
    with torch.no_grad():
        yield


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def forgets(x: Tensor, mask: Tensor) -> Tensor:
    return (x - x.mean(0)) * mask


def embedded(x: Tensor, slots: Tensor) -> Tensor:
    return x + torch.sin(slots.float()).mean()


def rows(n: int, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.randn(n, 4, device=device),)


def rows_and_mask(n: int, device: torch.device) -> tuple[Tensor, ...]:
    return torch.randn(n, 4, device=device), torch.ones(n, 1, device=device)


def rows_and_slots(n: int, device: torch.device) -> tuple[Tensor, ...]:
    return torch.randn(n, 4, device=device), torch.arange(1, n + 1, device=device)


def zeros(given: tuple[Tensor, ...], *leaves: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(t) if leaf in leaves else t for leaf, t in enumerate(given))


KINDS: dict[str, tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, ...]], int]] = {
    "one": (centred, rows, 0),
    "beside a mask": (forgets, rows_and_mask, 0),
    "integers": (embedded, rows_and_slots, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_of_zeros(backend: str, device: torch.device, kind: str) -> None:
    """Buckets captured from zeros are proved by the first call with real data; the record says that they were not."""
    target, given, leaf = KINDS[kind]
    step = graphify(target, pad={"mask": 0.0} if "mask" in kind else None, backend=backend, **ROWS)

    captured = step.capture_buckets(*zeros(given(3, device), leaf), progress=False)
    assert ["example" in bucket.unproved for bucket in captured.buckets] == [True, True, True]
    step.seal()
    for n in (3, 5, 3):
        with pytest.raises(PaddingError, match="depends on the padding"):
            step(*given(n, device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_first_calls_of_zeros(backend: str, device: torch.device, kind: str, number: int) -> None:
    """Zeros come out as in eager, and prove nothing for what comes after them."""
    target, given, leaf = KINDS[kind]
    step = graphify(target, pad={"mask": 0.0} if "mask" in kind else None, backend=backend, **ROWS)

    for _ in range(number):
        args = zeros(given(3, device), leaf)
        assert torch.allclose(step(*args), target(*args), atol=1e-6)
    with pytest.raises(PaddingError, match="depends on the padding"):
        step(*given(3, device))


def test_rows_that_are_the_padding(backend: str, device: torch.device) -> None:
    """It is the padding that rows must differ from: other than zero, it is the same with rows of that number."""
    step = graphify(centred, pad=2.0, backend=backend, **ROWS)

    assert torch.equal(step(torch.full((3, 4), 2.0, device=device)), torch.zeros(3, 4, device=device))
    with pytest.raises(PaddingError, match="depends on the padding"):
        step(torch.zeros(3, 4, device=device))


def test_what_padding_does_not_change(backend: str, device: torch.device) -> None:
    """A function that is right is proved later, without a warning, and is replayed in between and after."""
    step = graphify(lambda x: torch.relu(x) + 1, backend=backend, **ROWS)

    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphifyWarning)
        captured = step.capture_buckets(torch.zeros(3, 4, device=device), progress=False)
        assert all(bucket.unproved for bucket in captured.buckets)
        for n in (3, 3, 3, 2, 3, 4, 1, 7):
            x = torch.zeros(n, 4, device=device) if n == 2 else torch.randn(n, 4, device=device)
            assert torch.equal(step(x), torch.relu(x) + 1)
    assert step.stats().replays == 8
    real = graphify(torch.relu, backend=backend, buckets=[2, 4, 8])
    assert not any(b.unproved for b in real.capture_buckets(torch.randn(1, 4, device=device)).buckets)


def test_calls_that_never_show_it(backend: str, device: torch.device) -> None:
    """After a few calls of a bucket that show nothing it is trusted, which is said once, with the argument's name."""
    step = graphify(lambda x, k: x + k, buckets=[4], backend=backend)

    with pytest.warns(GraphifyWarning, match=ALIKE) as said:
        for n in [3, 2, 1] * 6:
            x = torch.randn(n, 4, device=device)
            assert torch.equal(step(x, torch.zeros(n, 1, device=device)), x)
    messages = [str(w.message) for w in said]
    assert len(messages) == 1, messages
    assert "`k`" in messages[0]
    assert "`x`" not in messages[0]
    assert step.stats().replays == 16


class TestOtherDimensions:
    """A dimension that no call has padded so far is not proved by those that pad another one."""

    def test_a_full_dimension(self, backend: str, device: torch.device) -> None:
        """A mean over a dimension that the first call fills is found at the first call that does not."""
        both = {0: Bucket("batch", [4]), 1: Bucket("length", [8])}

        def step(x: Tensor) -> Tensor:
            return x - x.mean(1, keepdim=True)

        graphed = graphify(step, buckets={"x": both}, backend=backend)
        for shape in ((3, 8), (2, 8), (3, 8), (4, 8)):
            x = torch.randn(shape, device=device)
            assert torch.allclose(graphed(x), step(x), atol=1e-6)
        for shape in ((4, 5), (3, 5)):
            with pytest.raises(PaddingError, match="depends on the padding"):
                graphed(torch.randn(shape, device=device))

    def test_a_full_call_of_another_layout(self, backend: str, device: torch.device) -> None:
        """A call that fills its bucket, and is copied for its strides only, proves nothing of padding."""
        graphed = graphify(centred, buckets=[4], backend=backend)

        x = torch.randn(4, 8, device=device)[:, ::2]
        assert torch.allclose(graphed(x), centred(x), atol=1e-6)
        for n in (3, 2):
            with pytest.raises(PaddingError, match="depends on the padding"):
                graphed(torch.randn(n, 4, device=device))

    def test_dimensions_that_are_shown_one_by_one(self, backend: str, device: torch.device) -> None:
        """What one call shows of one dimension, and the next one of another, is known of both."""
        both = {0: Bucket("batch", [4]), 1: Bucket("length", [8])}
        graphed = graphify(lambda x: torch.relu(x), buckets={"x": both}, backend=backend)

        with warnings.catch_warnings():
            warnings.simplefilter("error", GraphifyWarning)
            for _ in range(4):
                for shape in ((3, 8), (4, 5), (2, 3), (4, 8)):
                    x = torch.randn(shape, device=device)
                    assert torch.equal(graphed(x), torch.relu(x))


def test_verify_names_padding(backend: str, device: torch.device) -> None:
    """What a proof could not see, `verify` finds, and says that padding may be the cause."""
    gate = torch.zeros((), device=device)
    step = graphify(lambda x: x + gate * x.mean(0), buckets=[4], verify=2, backend=backend)

    x = torch.randn(3, 4, device=device)
    for _ in range(2):
        assert torch.equal(step(x), x)
    gate.fill_(1.0)
    with pytest.raises(VerificationError, match="padding changes it"):
        step(x)


@pytest.mark.parametrize("verify", [0, 3])
def test_a_cache_among_the_arguments(backend: str, device: torch.device, verify: int) -> None:
    """With "outputs", padded rows may write the scratch row of a cache that is passed, zeros in the example or not."""

    def step(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        cache.index_copy_(0, slots, x)
        return x + cache[slots].sum(-1, keepdim=True)

    batch = Bucket("batch", [4])
    options: dict[str, Any] = {
        "buckets": {"x": {0: batch}, "slots": {0: batch}},
        "pad": {"slots": 0},
        "static_args": ["cache"],
    }
    for first in (zeros, lambda given, *_: given):
        plain, cache = torch.zeros(9, 4, device=device), torch.zeros(9, 4, device=device)
        graphed = graphify(step, check_padding="outputs", verify=verify, backend=backend, **options)
        graphed.capture_buckets(*first(rows_and_slots(1, device), 0, 1), cache, progress=False)
        for n in (3, 2, 1, 4, 3, 3, 2):
            x, slots = rows_and_slots(n, device)
            assert torch.allclose(graphed(x, slots, cache), step(x, slots, plain))
            assert torch.equal(cache[1:], plain[1:])
    strict = graphify(step, backend=backend, **options)
    with pytest.raises(PaddingError, match="cache"):
        strict(*rows_and_slots(3, device), torch.zeros(9, 4, device=device))
