"""A decoder with a paged cache in buckets: what a server would notice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks._decoder import PAD, Decoder, Size, steps
from graphify import Bucket, PaddingError, graphify

SIZE = Size(layers=2, hidden=32, heads=2, vocabulary=64, sequences=9, pages=2, dtype=torch.float32)


def test_every_batch_size_is_the_padded_eager_call(backend: str, device: torch.device) -> None:
    """Sizes in random order, captured ahead of time: bit for bit as eager at the bucket's size, caches included."""
    torch.manual_seed(0)
    policy = Bucket.decode(SIZE.sequences)
    model = Decoder(SIZE).to(device).eval()
    padded, exact = copy.deepcopy(model), copy.deepcopy(model)

    def step(
        tokens: Tensor, positions: Tensor, slots: Tensor, block_tables: Tensor, context_lens: Tensor
    ) -> Tensor:
        logits: Tensor = model(tokens, positions, slots, block_tables, context_lens)
        return logits

    graphed = graphify(
        step, buckets=policy, pad=PAD, check_padding="outputs", outputs="static", backend=backend
    )
    with torch.no_grad():
        (example,) = steps(SIZE, [1], device)
        assert [bucket.sizes["batch"] for bucket in graphed.capture_buckets(*example).buckets] == [
            9,
            8,
            4,
            2,
            1,
        ]
        for mine, untouched in zip(model.caches(), padded.caches(), strict=True):
            assert torch.equal(mine, untouched), "a capture ahead of time leaves no trace"
        graphed.seal()
        counts = torch.randperm(27, generator=torch.Generator().manual_seed(0)) % 9 + 1
        for given in steps(SIZE, counts.tolist(), device):
            count, full = len(given.tokens), policy.fit(len(given.tokens))
            assert full is not None
            rows = {
                name: F.pad(x, (0, 0) * (x.dim() - 1) + (0, full - count), value=PAD.get(name, 0))
                for name, x in given._asdict().items()
            }
            expected, alone, actual = padded(**rows)[:count], exact(*given), graphed(*given)
            assert torch.equal(actual, expected)
            torch.testing.assert_close(actual, alone, rtol=1e-3, atol=1e-3)
        for mine, other in zip(model.caches(), padded.caches(), strict=True):
            assert torch.equal(mine, other)
    stats = graphed.stats()
    assert (stats.replays, stats.calls, stats.recordings) == (27, 27, 5)


def test_a_new_bucket_leaves_no_rows_of_its_own_behind(backend: str, device: torch.device) -> None:
    """A padded row gets its pad value also where another bucket was recorded since: no live slot is written."""
    cache = torch.zeros(32, device=device)

    def put(x: Tensor, slots: Tensor) -> Tensor:
        cache.index_copy_(0, slots, x)
        return x * 2

    graphed = graphify(put, buckets=[4, 8], pad={"slots": 0}, check_padding="outputs", backend=backend)

    def call(count: int, first: int, value: float) -> None:
        slots = torch.arange(first, first + count, device=device)
        graphed(torch.full((count,), value, device=device), slots)

    with torch.no_grad():
        for _ in range(3):
            call(1, 1, 1.0)
        for _ in range(2):
            call(7, 11, 2.0)
        cache[11:18] = 9.0  # the slots have another owner now
        call(1, 1, 3.0)

    assert cache[11:18].tolist() == [9.0] * 7
    assert cache[1].item() == 3.0


def test_attention_is_proved(backend: str, device: torch.device) -> None:
    """Attention that takes padded positions for real ones is refused, and the mask that leaves them out is not."""

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None, None])

    length = Bucket("length", [8])
    wrong = graphify(attend, buckets={"x": {2: length}}, backend=backend)
    right = graphify(
        masked, buckets={"x": {2: length}, "mask": {1: length}}, pad={"mask": False}, backend=backend
    )
    x, mask = torch.randn(2, 2, 5, 4, device=device), torch.ones(2, 5, dtype=torch.bool, device=device)
    with torch.no_grad():
        assert not right.capture_buckets(x, mask).buckets[0].unproved
        with pytest.raises(PaddingError, match="length 5 in 8"):
            wrong(x)


def test_a_size_that_filled_its_bucket_may_be_smaller_later(backend: str, device: torch.device) -> None:
    """Two sizes, the first call full in one of them: results of later calls are cut in both."""
    batch, length = Bucket("batch", [4]), Bucket("length", [32])

    def outer(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.unsqueeze(-1) * torch.arange(3, device=device), x[:, 0] * 1.0

    graphed = graphify(outer, buckets={"x": {0: batch, 1: length}}, backend=backend)
    with torch.no_grad():
        for shape in ((4, 20), (2, 26), (4, 26), (1, 32), (3, 7)):
            x = torch.randn(shape, device=device)
            for actual, expected in zip(graphed(x), outer(x), strict=True):
                assert torch.equal(actual, expected)


def test_results_of_buckets_lie_on_one_memory(device: torch.device, backend: str) -> None:
    """Large results of many buckets take the pool no more than those of the largest, and stay each call's own."""
    if backend != "cuda":
        pytest.skip("only a device gives memory that nobody holds to the next capture")
    weight = torch.randn(4, 2**18, device=device)
    sizes = [8, 16, 24, 32, 40, 48, 56, 64]
    graphed = graphify(lambda x: (x @ weight).relu(), buckets=sizes, backend=backend)
    with torch.no_grad():
        captured = graphed.capture_buckets(torch.randn(3, 4, device=device), progress=False)
        assert captured.bytes < 3 * 64 * 2**18 * 4  # the product, the result, a workspace
        kept = [
            (x, graphed(x)) for x in (torch.randn(n, 4, device=device) for n in (3, 64, 9, 33, 64, 1, 40))
        ]
        for x, y in kept:
            torch.testing.assert_close(y, (x @ weight).relu())
    graphed.reset()
    torch.testing.assert_close(kept[1][1], (kept[1][0] @ weight).relu())


def test_static_results_of_a_bucket_outlive_its_graphs(device: torch.device, backend: str) -> None:
    """A static result stays readable after `reset`, whatever is captured next."""
    weight = torch.randn(4, 2**16, device=device)
    graphed = graphify(lambda x: x @ weight, buckets=[8, 16], outputs="static", backend=backend)
    with torch.no_grad():
        x = torch.randn(5, 4, device=device)
        for _ in range(3):
            y = graphed(x)
        expected = y.clone()
        graphed.reset()
        other = graphify(lambda x: (x @ weight).exp(), buckets=[8, 16], backend=backend)
        for _ in range(4):
            other(torch.randn(7, 4, device=device))
        assert torch.equal(y, expected)
