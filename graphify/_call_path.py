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
from ._options import Options, sizes_wanted, switch
from ._pool import GraphPool
from ._signature import ambient_reader, inactive, matcher_of, overlap, same_ambient
from ._sizes import Sizes
from ._tree import tree_of
from .backends import backend_for
from .backends.base import Backend
from .errors import InputError

__all__ = ["CallPath"]

_alive: weakref.WeakSet[CallPath] = weakref.WeakSet()

Located = tuple[Table, Any, tuple[Tensor, ...], tuple[Any, ...]]


class CallPath:
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
        _alive.add(self)

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
        """Why a call runs the plain function here, where it does."""
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
        """Have no graphs in a child process: they are its parent's."""
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
    for path in list(_alive):
        path._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_empty)
