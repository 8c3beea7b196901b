"""The case buckets: one decode step at any batch size, over the graphs of few."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from graphify import Bucket, graphify

from ._by_hand import BucketRunner
from ._case import OUTPUTS, Capture, Captures, Case, Outputs, Ready, Way, backend_of
from ._decoder import PAD, Decoder, Size, Step, steps

__all__ = ["ALL", "HAND_LOOP", "LARGEST", "buckets"]

BF16 = 5e-2
"""Kernels of another batch size round otherwise, through sixteen layers."""
TOY = Size(layers=1, hidden=32, heads=2, vocabulary=64, sequences=5, pages=2, dtype=torch.float32)
PADDED = "eager, padded"
HAND = {"raw replay": "raw", "hand-written static": "static", "hand-written fresh": "fresh"}
HAND_LOOP, LARGEST, ALL = "torch.cuda.graph, one pool", "graphify, largest bucket", "graphify, all buckets"
DOCUMENTED = 3
"""Runs before each capture in PyTorch's own notes on CUDA graphs; the least that can work is one."""


def buckets(device: torch.device, compiled: bool) -> Case:
    """Each batch size once, in random order; `compiled` asks for nothing here."""
    size = Size() if device.type == "cuda" else TOY
    policy = Bucket.decode(size.sequences)
    counts = 1 + torch.randperm(size.sequences, generator=torch.Generator().manual_seed(0))
    kinds = _Kinds(size, policy, device)
    ways = [
        Way("eager", kinds.eager, mirrors=None),
        Way(PADDED, kinds.padded, mirrors="eager", tolerance=BF16),
    ]
    if device.type == "cuda":
        ways += kinds.by_hand()
    ways += [_way(f"graphify {outputs}", functools.partial(kinds.ours, outputs)) for outputs in OUTPUTS]
    title = (
        f"one decode step, {size.layers} layers, hidden {size.hidden}, {str(size.dtype).removeprefix('torch.')},"
        f" paged cache, batch 1 to {size.sequences} in {len(policy.sizes)} buckets"
    )
    inputs: list[tuple[Tensor, ...]] = list(steps(size, counts.tolist(), device))
    return Case("buckets", title, inputs, ways, checked=len(inputs), captures=kinds.captures())


def _way(name: str, build: Callable[[], Ready]) -> Way:
    if name == "raw replay":
        return Way(name, build, mirrors=None)
    return Way(name, build, mirrors=PADDED, rival=f"hand-written {name.rpartition(' ')[2]}")


class _Kinds:
    """The ways to make the call, each with a decoder and caches of its own, equal to the others'."""

    def __init__(self, size: Size, policy: Bucket, device: torch.device) -> None:
        self.size, self.policy, self.device = size, policy, device
        self.largest = next(steps(size, [size.sequences], device))
        self.hand = functools.cache(self._hand)

    def _decoder(self) -> Decoder:
        torch.manual_seed(0)
        with self.device:
            return Decoder(self.size).eval()

    def eager(self) -> Ready:
        """At the exact size."""
        decoder = self._decoder()
        return Ready(decoder, lambda: _marks(decoder))

    def padded(self) -> Ready:
        """At the size of the bucket."""
        decoder = self._decoder()

        def call(*given: Tensor) -> Tensor:
            count, full = len(given[0]), self.policy.fit(len(given[0]))
            assert full is not None, "no call is above the largest bucket"
            rows = [_filled(x, full, PAD.get(name, 0)) for name, x in zip(Step._fields, given, strict=True)]
            result: Tensor = decoder(*rows)
            return result[:count]

        return Ready(call, lambda: _marks(decoder))

    def _hand(self) -> tuple[Decoder, BucketRunner]:
        decoder = self._decoder()
        runner = BucketRunner(decoder, self.policy.sizes, self.largest._asdict(), PAD)
        runner.capture()
        return decoder, runner

    def by_hand(self) -> Iterator[Way]:
        """One runner, whose calls come back in three forms: a step that is made again leaves the same."""

        def build(form: str) -> Ready:
            decoder, runner = self.hand()
            return Ready(getattr(runner, form), lambda: _marks(decoder))

        for name, form in HAND.items():
            yield _way(name, functools.partial(build, form))

    def ours(self, outputs: Outputs) -> Ready:
        """Captured and sealed, as before serving."""
        decoder = self._decoder()
        graphed = self._graphed(decoder, self.policy, outputs)
        # One row proves every other bucket, so that no call has to.
        graphed.capture_buckets(*(x[:1] for x in self.largest), progress=False)
        graphed.seal()
        return Ready(graphed, lambda: _marks(decoder), graphed)

    def _graphed(self, decoder: Decoder, policy: Bucket, outputs: Outputs = "static") -> Any:
        def step(
            tokens: Tensor, positions: Tensor, slots: Tensor, block_tables: Tensor, context_lens: Tensor
        ) -> Tensor:
            logits: Tensor = decoder(tokens, positions, slots, block_tables, context_lens)
            return logits

        return graphify(
            step,
            buckets=policy,
            pad=PAD,
            check_padding="outputs",
            outputs=outputs,
            backend=backend_of(self.device),
        )

    def captures(self) -> Captures:
        """What making the graphs costs: of the largest alone, of all, of all with the proofs of padding, by hand."""
        sizes, decoder = self.policy.sizes, self._decoder()
        whole, one = self.largest, Step(*(x[:1] for x in self.largest))

        def ours(policy: Bucket, example: Step) -> Any:
            graphed = self._graphed(decoder, policy)
            graphed.capture_buckets(*example, progress=False)
            return graphed

        def by_hand(warmups: int) -> Any:
            runner = BucketRunner(decoder, sizes, whole._asdict(), PAD)
            runner.capture(warmups)
            return runner

        alone = Bucket("batch", sizes[-1:])
        ways = [
            Capture(LARGEST, 1, functools.partial(ours, alone, whole)),
            Capture(ALL, len(sizes), functools.partial(ours, self.policy, whole)),
            Capture(f"{ALL}, proved", len(sizes), functools.partial(ours, self.policy, one)),
        ]
        if self.device.type == "cuda":
            ways.append(Capture(HAND_LOOP, len(sizes), functools.partial(by_hand, 1)))
            three = functools.partial(by_hand, DOCUMENTED)
            ways.append(Capture(f"{HAND_LOOP}, {DOCUMENTED} warm-ups", len(sizes), three))
        return Captures(ways, time_rival=HAND_LOOP, memory_rival=LARGEST)


def _filled(x: Tensor, full: int, fill: int) -> Tensor:
    return torch.cat((x, x.new_full((full - len(x), *x.shape[1:]), fill)))


def _marks(decoder: Decoder) -> list[Tensor]:
    """A number per cache that a wrong row would change."""
    return [torch.stack([torch.linalg.vector_norm(c, dtype=torch.float64) for c in decoder.caches()])]
