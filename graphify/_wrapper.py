"""The call path: bind, key, guard, replay."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._ahead import capture_all, capture_one, estimated, largest_two, may_capture, static_input
from ._binding import binder_of
from ._entry import Entry, Table
from ._graph import Call, Setting
from ._life import Life
from ._options import Options, disabled, switch
from ._pool import GraphPool
from ._signature import ambient_reader, inactive, matcher_of, overlap, same_ambient
from ._sizes import Sizes, sizes_wanted
from ._tree import tree_of
from .backends import backend_for
from .backends.base import Backend
from .errors import InputError
from .stats import CapturedBuckets, GraphRecord, Stats, report

__all__ = ["Options", "Runner", "disabled"]

_runners: weakref.WeakSet[Runner] = weakref.WeakSet()


Located = tuple[Table, Any, tuple[Tensor, ...], tuple[Any, ...]]


class Runner:
    """One callable and its graphs; calling it binds, finds the signature's graph and replays it."""

    def __init__(self, target: Callable[..., Any], options: Options, name: str) -> None:
        self.target, self.options, self.name = target, options, name
        self.__wrapped__ = target
        self._backend = backend_for(options.backend)
        self._pool = options.pool or GraphPool()
        self._binder = binder_of(target)
        self._bind = self._binder.bind
        self._wanted, self._fills = sizes_wanted(options, self._binder)
        self._watched = self._wanted is None or self._wanted.auto
        self._ambient, self._same_ambient = _ambient_of(self._backend)
        self._start()
        _runners.add(self)

    def _start(self) -> None:
        setting = Setting(
            name=self.name,
            target=self.target,
            spread=self._binder.call,
            backend=self._backend,
            pool=self._pool,
            static_outputs=self.options.outputs == "static",
            sized=self._wanted is not None,
        )
        self._life = Life(setting, self.options, self._binder.names)
        self._ways = self._life if self._wanted is None else Sizes(self._life, self._wanted, self._fills)
        self._table: Table = _NO_TABLE
        self._last: Entry = _NO_ENTRY

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the target, by replay where its signature has a graph."""
        off = self._off()
        try:
            if off is not None:
                return self._plain(off, args, kwargs)
            values = self._bind(*args, **kwargs)
            table = self._table
            found = table.unpack(values)
            if found is None:
                fitting = self._table_for(values)
                if fitting is None:
                    return self._plain("input", args, kwargs)
                table, found = fitting, fitting.unpack(values)
                assert found is not None
            tensors, tokens = found
            entry = self._last
            graph = entry.graph  # read once: another thread may drop it
            if graph is not None and entry.serves(table.tree, tensors, tokens):
                return graph(tensors, values)
            return self._look_up(table, tensors, tokens, values)
        except BaseException as error:
            if error is not self._pool.short:
                self._life.counts["errors"] += 1
                raise
            self._pool.short = None
        return self._anew(args, kwargs)  # out here, where no traceback keeps anything

    def _anew(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A replay found no memory for its results, and nothing of the call has happened: once more in a new pool."""
        self._life.entries.make_way()
        try:
            table, key, tensors, values = self._located(args, kwargs)
            with self._pool.lock:
                entry = self._ways.find(table, key, tensors, values)
            return self._ways.advance(entry, Call(table.tree, values, tensors))
        except BaseException:
            self._pool.short = None
            self._life.counts["errors"] += 1
            raise

    def _off(self) -> str | None:
        if switch.off:
            return "disabled"
        return inactive() or ("nested" if self._backend.busy() else None)

    def _plain(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.target(*args, **kwargs)
        self._life.plain.count(reason)
        return result

    def _table_for(self, values: tuple[Any, ...]) -> Table | None:
        """The table of this structure; None when no signature can hold it and eager is allowed."""
        try:
            table = self._life.entries.table_for(values)
        except InputError as error:
            if self.options.fallback == "raise":
                raise
            self._life.plain.say("input", f"runs eagerly: {error}")
            return None
        self._table = table
        return table

    def _look_up(
        self, table: Table, tensors: tuple[Tensor, ...], tokens: tuple[Any, ...], values: tuple[Any, ...]
    ) -> Any:
        """The way of a call whose signature is not the last one: by its sizes, else by its whole key."""
        recent = self._ways.recent(table, tensors)
        graph = recent.graph if recent is not None else None
        if recent is not None and graph is not None and recent.serves(table.tree, tensors, tokens):
            self._last = recent
            return graph(tensors, values)
        key = (self._ambient(), tokens, table.specs(tensors), overlap(tensors))
        with self._pool.lock:
            if self._watched:
                self._life.habits.see(table, key[2])
            entry = self._ways.find(table, key, tensors, values)
            if entry.graph is not None:
                self._expect(entry, tensors)
            self._last = entry
        graph = entry.graph
        if graph is not None:
            return graph(tensors, values)
        return self._ways.advance(entry, Call(table.tree, values, tensors))

    def _expect(self, entry: Entry, tensors: tuple[Tensor, ...]) -> None:
        """Make the quick tests by which the next call of this signature is known."""
        if not entry.same_ambient():
            entry.same_ambient = self._same_ambient(entry.key[0])
        if not entry.matches(*tensors):
            entry.matches = matcher_of(tensors)

    # -- controls

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
        changes nothing; other buckets are proved at their first call with padding.

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

    def _located(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Located:
        """The place of a call among all signatures."""
        values = self._bind(*args, **kwargs)
        table = self._life.entries.table_for(values)
        found = table.unpack(values)
        assert found is not None, "a table fits the values that it was made for"
        tensors, tokens = found
        return table, (self._ambient(), tokens, table.specs(tensors), overlap(tensors)), tensors, values

    def reset(self) -> None:
        """Free every graph and forget every signature; counts stay, results stay valid."""
        with self._pool.lock:
            self._life.clear()
            self._table, self._last = _NO_TABLE, _NO_ENTRY

    def _forked(self) -> None:
        self._pool = GraphPool()
        self._start()


def _ambient_of(backend: Backend) -> tuple[Callable[[], Any], Callable[[Any], Callable[[], bool]]]:
    """How torch's switches are read and tested: the device's; of a backend without one, every device's."""
    if backend.device_type:
        return ambient_reader(backend.device_type), partial(same_ambient, backend.device_type)
    accelerator = torch.accelerator.current_accelerator()
    readers = [ambient_reader(kind) for kind in ("cpu", *([accelerator.type] if accelerator else []))]

    def read() -> tuple[Any, ...]:
        return tuple(reader() for reader in readers)

    return read, lambda expected: lambda: read() == expected


class _Nowhere(Table):
    """The table of no call at all."""

    def __init__(self) -> None:
        self.tree = tree_of((), ())
        self.unpack = lambda values: None
        self.entries = {}


_NO_TABLE = _Nowhere()
_NO_ENTRY = Entry(_NO_TABLE.tree, None, None)


def _start_empty() -> None:
    for runner in list(_runners):
        runner._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_empty)
