"""What `graphify` puts around a callable: its calls by replay, and the controls of its graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ._ahead import capture_all, capture_one, estimated, largest_two, may_capture, static_input
from ._call_path import CallPath
from ._likeness import FunctionLike
from ._sizes import Sizes
from .stats import CapturedBuckets, GraphRecord, Stats, report

__all__ = ["Runner"]


class Runner(CallPath, FunctionLike):
    """One callable, called by replay, with the controls of its graphs."""

    def stats(self) -> Stats:
        """Counts of calls by how their result was made; calls is their sum."""
        entries, counts = self._life.entries, self._life.counts
        replays = entries.retired_replays + sum(e.graph.uses for e in entries.ready if e.graph is not None)
        made = {name: counts[name] for name in ("warmups", "captures", "eager", "errors")}
        return Stats(
            calls=replays + sum(made.values()),
            replays=replays,
            recordings=counts["recordings"],
            evictions=counts["evictions"],
            reasons=self._life.plain.reasons.copy(),
            **made,
        )

    @property
    def graphs(self) -> tuple[GraphRecord, ...]:
        """One record per live graph."""
        pairs = [(entry.label, entry.graph) for entry in self._life.entries.ready if entry.graph is not None]
        return tuple(
            GraphRecord(
                signature=label,
                replays=graph.uses,
                nodes=graph.nodes,
                bytes=graph.bytes,
                seconds=graph.seconds,
                unguarded=graph.unguarded,
            )
            for label, graph in pairs
        )

    def report(self) -> str:
        """A table of the counts and the graphs, to print."""
        return report(self.name, self.stats(), self.graphs)

    def capture(self, *args: Any, **kwargs: Any) -> GraphRecord:
        """Record the graph of one signature ahead of time, without trace.

        Example:
            >>> decode.capture(torch.zeros(8, 1, dtype=torch.long, device="cuda"))

        Warm-ups and capture leave buffers, random streams, arguments and module state as they were. With
        `GRAPHIFY_DISABLE=1` in the environment nothing is captured.

        Raises:
            CaptureError: the call cannot be captured, or not here: inside `disabled()`, a trace, a transform, a capture.
            InputError: an argument cannot be staged.
        """
        if not may_capture(self._life, self._off(), "capture"):
            return GraphRecord("GRAPHIFY_DISABLE is set", replays=0, nodes=0, bytes=0, seconds=0.0)
        entry = capture_one(self._life, self._ways, *self._located(args, kwargs))
        return next(g for g, e in zip(self.graphs, self._life.entries.ready, strict=True) if e is entry)

    def capture_buckets(self, *args: Any, progress: bool = True, **kwargs: Any) -> CapturedBuckets:
        """Record the graphs of all buckets ahead of time, the largest first, from one example and without trace.

        Example:
            >>> print(decode.capture_buckets(tokens, slots))     # both of some size, such as (4,)
            decode: 35 buckets, 96.0 MiB, 1.93 s

        Args:
            progress: Show a progress bar, where tqdm is installed.

        The runs hold nothing but padding. Where the example is smaller than a bucket, its rows prove that padding
        changes nothing, if they hold real data; other buckets are proved at their first call with padding.

        Raises:
            CaptureError, InputError, PaddingError: a bucket cannot be captured.
            ValueError: the wrapper has no buckets, or more of them than `max_graphs`.
        """
        sizes = self._sized("capture_buckets")
        if not may_capture(self._life, self._off(), "capture_buckets"):
            return CapturedBuckets(self.name, ())
        located = self._located(args, kwargs)
        axes = sizes.axes_of(located[0], located[2])
        if self.options.max_graphs is not None and axes.count > self.options.max_graphs:
            raise ValueError(
                f"`{self.name}` has {axes.count} combinations of bucket sizes, more than max_graphs="
                f"{self.options.max_graphs}. Write max_graphs={axes.count}, or fewer sizes."
            )
        return capture_all(self._life, sizes, *located, grid=list(axes.grid()), progress=progress)

    def estimate(self, *args: Any, **kwargs: Any) -> int:
        """Bytes that the graphs of all buckets would take, from capturing the two largest in a pool of their own.

        Example:
            >>> decode.estimate(tokens, slots) / 2**20     # MiB, before the cache is sized
            134.0

        Raises:
            CaptureError, InputError, PaddingError, ValueError: as `capture_buckets`.
        """
        self._sized("estimate")
        if not may_capture(self._life, self._off(), "estimate"):
            return 0
        probe = Runner(
            self.target, replace(self.options, pool=None, max_graphs=None, max_bytes=None), self.name
        )
        located = probe._located(args, kwargs)
        sizes = probe._sized("estimate")
        axes = sizes.axes_of(located[0], located[2])
        two = largest_two(axes.grid())
        try:
            return estimated(capture_all(probe._life, sizes, *located, grid=two, progress=False), axes.count)
        finally:
            probe.reset()

    def seal(self) -> None:
        """Capture nothing from now on: a call without a graph runs eagerly, and what is new about it is logged.

        Example:
            >>> decode.capture_buckets(tokens, slots)
            >>> decode.seal()

        `reset()` breaks the seal.
        """
        self._life.entries.sealed = True

    def buffer(self, name: str) -> Tensor:
        """The static input of an argument, for producers that write in place; passed as the argument it is not copied.

        Example:
            >>> slots = decode.buffer("slots")     # (256,), the largest bucket
            >>> slots[:n] = allocator.slots(n)
            >>> decode(tokens[:n], slots[:n])

        Args:
            name: The argument, or the path of a tensor in it: "x", "batch['ids']".

        Raises:
            ValueError: nothing was captured yet, no tensor has this name, or several static inputs do.

        Warning:
            It is graph memory: whatever a bucketed graph does not get as live rows, it fills again.
        """
        return static_input(self._life.entries, name)

    def _sized(self, what: str) -> Sizes:
        if not isinstance(self._ways, Sizes):
            text = f"{what}: `{self.name}` has no buckets. Write graphify(..., buckets=[1, 2, 4, 8])."
            raise ValueError(text)  # noqa: TRY004
        return self._ways
