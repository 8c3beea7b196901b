"""The entries of a wrapper in their tables, and room for their graphs: made, kept within limits, given up."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ._entry import Entry, Table
from ._graph import Graph, Setting
from ._options import Options
from ._signature import specs_of
from ._tree import tree_of

__all__ = ["Entries"]

log = logging.getLogger("graphify")

_MANY_ENTRIES = 1024


class Entries:
    """All entries of one wrapper; a member of its pool."""

    def __init__(
        self, setting: Setting, options: Options, names: Sequence[str], counts: Counter[str]
    ) -> None:
        self.setting, self.names, self.counts = setting, names, counts
        self._max_graphs, self._max_bytes = options.max_graphs, options.max_bytes
        setting.pool.join(self)
        self.tables: dict[Any, Table] = {}
        self.ready: list[Entry] = []
        self.retired_replays = 0
        self.sealed = False
        self._clock = itertools.count(1)
        self._known: dict[int, Entry] = {}

    def table_for(self, values: tuple[Any, ...]) -> Table:
        """The table of calls with this structure; InputError for what no signature can hold."""
        tree = tree_of(values, self.names)
        # One step, for threads that call at once: two tables would capture everything twice.
        return self.tables.setdefault(tree.spec, Table(tree, specs_of(len(tree.tensor_paths))))

    def add(self, table: Table, entry: Entry) -> None:
        """Remember a new entry."""
        table.add(entry)
        self.touch(entry)
        self._known[id(entry)] = entry
        if len(self._known) > _MANY_ENTRIES:
            self._trim()

    def get(self, number: int) -> Entry | None:
        """The entry with this id, while it is remembered."""
        return self._known.get(number)

    def touch(self, entry: Entry) -> None:
        """Note that a call used this entry."""
        entry.used = next(self._clock)

    # -- room

    def settle(self, entry: Entry) -> None:
        """An entry has its graph: make room for its bytes."""
        self.ready.append(entry)
        self._keep_bytes()

    def make_room(self) -> None:
        """Drop the least recently used graphs beyond `max_graphs`, counting the one to come."""
        limit = self._max_graphs
        while limit is not None and len(self.ready) >= limit:
            self._evict()

    def _keep_bytes(self) -> None:
        """Drop the least recently used graphs beyond `max_bytes`, but for the newest."""
        limit = self._max_bytes
        while limit is not None and len(self.ready) > 1 and self._bytes() > limit:
            self._evict()

    def _bytes(self) -> int:
        return sum(entry.graph.bytes for entry in self.ready if entry.graph is not None)

    def _evict(self) -> None:
        oldest = min(self.ready, key=lambda entry: entry.used)
        self.discard(oldest)
        # A signature that keeps being evicted must pay: it waits twice as long each time.
        oldest.evictions += 1
        oldest.wait = 2**oldest.evictions
        self.counts["evictions"] += 1

    def make_way(self) -> None:
        """Memory ran out: let the pool go with all its graphs, since one of them alone would free nothing."""
        with self.setting.pool.lock:
            self.setting.pool.drop()
            self.setting.backend.reclaim()
        log.info("%s: out of memory: all graphs of its pool are dropped", self.setting.name)

    def let_go(self) -> None:
        """Drop all graphs, and keep what is known of the calls."""
        self.counts["evictions"] += len(self.ready)
        for entry in list(self.ready):
            self.discard(entry)
        self.setting.flats.clear()

    def lend_input(self, path: str) -> None:
        """A user writes into this static input: it is not copied onto itself, and its tail is never known to be clean."""
        self.setting.lent.add(path)
        self.forget_sizes()

    def forget_sizes(self) -> None:
        """Begin anew with calls of exact sizes; the buckets' own graphs stay."""
        for table in self.tables.values():
            table.forget_sizes()
        for entry in self.ready:
            if isinstance(entry.graph, Graph):
                self.retired_replays += sum(fit.replays for fit in entry.graph.fits.values())
                entry.graph.fits.clear()

    # -- leaving

    def discard(self, entry: Entry) -> None:
        """Drop an entry's graph, and keep what is known of its calls."""
        self._retire(entry)
        entry.drop()

    def forget(self, entry: Entry) -> None:
        """Drop an entry and its graph."""
        self._retire(entry)
        self.tables[entry.tree.spec].remove(entry)
        self._known.pop(id(entry), None)

    def _retire(self, entry: Entry) -> None:
        if entry in self.ready:
            self.ready.remove(entry)
        if entry.graph is not None:
            self.retired_replays += entry.graph.uses

    def _trim(self) -> None:
        """Forget the signatures that never came back, oldest first."""
        idle = sorted((e for e in self._known.values() if e.graph is None), key=lambda e: e.used)
        for entry in idle[: len(idle) // 2]:
            self.forget(entry)

    def clear(self) -> None:
        """Forget everything but the counts."""
        for entry in list(self._known.values()):
            self.forget(entry)
        self.tables.clear()
        self.setting.flats.clear()
        self.sealed = False
        self.setting.pool.forget()
