"""The call path: bind, key, guard, replay."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._binding import binder_of
from ._entry import Entry, Table
from ._graph import Call, Setting
from ._life import Life
from ._options import Options, disabled, switched_off
from ._pool import GraphPool
from ._signature import ambient_reader, inactive, matcher_of, overlap, same_ambient
from ._sizes import Sizes, sizes_wanted
from ._tree import tree_of
from .backends import backend_for
from .backends.base import Backend
from .errors import GraphifyError, InputError
from .stats import GraphRecord, Stats, report

__all__ = ["Options", "Runner", "disabled"]

_runners: weakref.WeakSet[Runner] = weakref.WeakSet()


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
            graph = entry.graph
            if (
                graph is not None
                and entry.tree is table.tree
                and entry.key[1] == tokens
                and entry.same_ambient()
                and entry.matches(*tensors)
                and overlap(tensors) == entry.key[3]
                and entry.holds()
                and (entry.admits is None or entry.admits(tensors))
            ):
                return graph(tensors, values)
            return self._look_up(table, tensors, tokens, values)
        except BaseException:
            self._life.counts["errors"] += 1
            raise

    def _off(self) -> str | None:
        if switched_off():
            return "disabled"
        return inactive() or ("nested" if self._backend.busy() else None)

    def _plain(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.target(*args, **kwargs)
        self._life.count_eager(reason)
        return result

    def _table_for(self, values: tuple[Any, ...]) -> Table | None:
        """The table of this structure; None when no signature can hold it and eager is allowed."""
        try:
            table = self._life.table_for(values)
        except InputError as error:
            if self.options.fallback == "raise":
                raise
            self._life.say("input", f"runs eagerly: {error}")
            return None
        self._table = table
        return table

    def _look_up(
        self, table: Table, tensors: tuple[Tensor, ...], tokens: tuple[Any, ...], values: tuple[Any, ...]
    ) -> Any:
        """The way of a call whose signature is not the last one: by its whole key."""
        key = (self._ambient(), tokens, table.specs(tensors), overlap(tensors))
        with self._pool.lock:
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
        life, counts = self._life, self._life.counts
        replays = life.retired_replays + sum(e.graph.uses for e in life.ready if e.graph is not None)
        made = {name: counts[name] for name in ("warmups", "captures", "eager", "errors")}
        return Stats(
            calls=replays + sum(made.values()),
            replays=replays,
            recordings=counts["recordings"],
            evictions=counts["evictions"],
            reasons=life.reasons.copy(),
            **made,
        )

    @property
    def graphs(self) -> tuple[GraphRecord, ...]:
        """One record per live graph."""
        pairs = [(entry.label, entry.graph) for entry in self._life.ready if entry.graph is not None]
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

        Warm-ups and capture leave buffers, random streams, arguments and module state as they were.

        Raises:
            CaptureError: the call cannot be captured.
            InputError: an argument cannot be staged.
        """
        values = self._bind(*args, **kwargs)
        table = self._life.table_for(values)
        found = table.unpack(values)
        assert found is not None
        key = (self._ambient(), found[1], table.specs(found[0]), overlap(found[0]))
        with self._pool.lock:
            entry = self._life.find(table, key, found[0], values)
            if entry.graph is None and entry.refusal is None:
                self._life.rehearse(entry, Call(table.tree, values, found[0]))
        if entry.graph is None:
            raise _not_captured(self.name, entry)
        return next(g for g, e in zip(self.graphs, self._life.ready, strict=True) if e is entry)

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


def _not_captured(name: str, entry: Entry) -> Exception:
    refusal = entry.refusal
    assert refusal is not None
    return refusal.error or GraphifyError(
        f"`{name}` was not captured ({refusal.reason}): {refusal.advice or 'see stats()'}"
    )


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
