"""The life of a wrapper's signatures: a call finds its entry, and an entry comes to its graph or to none."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._code import names_of
from ._entries import Entries
from ._entry import Entry, Refusal, Table, host_value
from ._graph import Call, Setting
from ._habits import Habits
from ._lessons import Lessons
from ._options import Options
from ._plain import Plain
from ._recorder import Recorder
from ._signature import refusal
from ._specification import root_of
from ._verdicts import other_place
from .errors import InputError

__all__ = ["Life"]

log = logging.getLogger("graphify")

_ON_A_CPU = "its tensors are on a CPU: move them to the device, or use backend='tape' or 'eager'"


class Life:
    """The way of every call of one wrapper to its entry, and of every entry to its graph."""

    def __init__(self, setting: Setting, options: Options, names: Sequence[str]) -> None:
        self.setting, self.options = setting, options
        self.counts: Counter[str] = Counter()
        self.plain = Plain(setting, options.fallback, self.counts)
        self.habits = Habits(self.plain.say, options.static_args)
        self.entries = Entries(setting, options, names, self.counts)
        self.lessons = Lessons(setting, self.plain, self.entries)
        self.recorder = Recorder(setting, options, self.plain, self.entries, self.lessons, self.habits)

    # -- finding

    def recent(self, table: Table, tensors: Sequence[Tensor]) -> Entry | None:
        """Nothing: sizes are no key where they are not declared."""

    def find(self, table: Table, key: Any, tensors: tuple[Tensor, ...], values: tuple[Any, ...]) -> Entry:
        """The entry that speaks of this call; a new one when none does."""
        sibling = None
        for entry in list(table.entries.get(key, ())):
            if entry.fits(tensors) or (self._lift(entry) and entry.fits(tensors)):
                self.entries.touch(entry)
                return entry
            sibling = entry if entry.meets_other_gradients() else sibling
            self._note_miss(entry)
        entry = self._new(table, key, Call(table.tree, values, tensors))
        if sibling is not None and entry.refusal is None:
            entry.resemble(sibling)
        return entry

    def _lift(self, entry: Entry) -> bool:
        """An optimizer's float that changes is a value no longer: its next recording has a tensor in its place."""
        changed, numbers = False, {place.id: place for place in entry.numbers}
        read = any("param_groups" in names_of(code).loads for code, _ in self.lessons.executed.scopes())
        while entry.guard is not None and (miss := entry.miss()) is not None:
            place = None if miss.place is None else numbers.pop(miss.place, None)
            if place is None or not self.lessons.numbers.lift(place, entry.device_or_raise(), read=read):
                break
            entry.release(place)
            changed = True
        if changed and entry.graph is not None:
            self.entries.discard(entry)
        return changed

    def alike(self, entry: Entry) -> Entry | None:
        """A recorded entry that differs in sizes only; none where a first run of a size may compile, or fill a cache."""
        if self.lessons.executed.everything or self.lessons.caches:
            return None
        found = (
            e for e in self.entries.ready if e.tree == entry.tree and e.key[:2] == entry.key[:2] and e.holds()
        )
        return next((e for e in found if e.patterns is None and e.device == entry.device), None)

    def _note_miss(self, entry: Entry) -> None:
        """Forget an entry whose tensors have moved: its graph would read memory that is no longer meant."""
        miss = entry.miss() if entry.guard is not None and not entry.holds() else None
        if miss is None:
            return
        log.info("%s: %s", self.setting.name, miss)
        if not miss.moved:
            self.habits.count_value(("place", miss.place, miss.name), miss.now, miss.name)
            return
        if entry.graph is not None:
            self.habits.rebound(miss.name, miss.now, idle=entry.graph.uses == 0)
        self.entries.forget(entry)

    def _new(self, table: Table, key: Any, call: Call) -> Entry:
        device, hosts, refused = self.placement(call)
        entry = Entry(table.tree, key, device)
        entry.refusal = refused
        entry.label = _label(call)
        if hosts:
            self._expect(entry, call, hosts)
        self._stay(entry, call)
        self._watch_opaque(entry, call)
        self.habits.count_tokens(table, key)
        self.entries.add(table, entry)
        return entry

    def placement(self, call: Call) -> tuple[torch.device | None, list[int], Refusal | None]:
        """The device to record on, the host scalars among the tensors, or why there is neither."""
        for path, tensor in zip(call.tree.tensor_paths, call.tensors, strict=True):
            why = refusal(tensor)
            if why is not None:
                return None, [], Refusal("layout", InputError(f"argument `{path}`: {why}"))
        try:
            device = self.setting.backend.device_of(call.tensors)
        except InputError as error:
            return None, [], Refusal("devices", error)
        if device is None:
            return None, [], Refusal("cpu", advice=_ON_A_CPU)
        hosts = [i for i, t in enumerate(call.tensors) if t.device.type != device.type]
        for i in hosts:
            if call.tensors[i].dim():
                elsewhere = other_place(call.tree.tensor_paths[i], call.tensors[i], device)
                return None, [], Refusal("devices", elsewhere)
        return device, hosts, None

    def _expect(self, entry: Entry, call: Call, hosts: list[int]) -> None:
        """A host scalar is a value, until it has shown so many that it is better staged as a tensor."""
        values = tuple(host_value(call.tensors[i]) for i in hosts)
        if not self.habits.many_scalars(entry, values):
            entry.expect(call.tensors, hosts)
            return
        entry.staged = frozenset(hosts)
        paths = ", ".join(f"`{entry.tree.tensor_paths[i]}`" for i in hosts)
        entry.label += f" ({paths} staged from the host: equal to rounding)"

    def _stay(self, entry: Entry, call: Call) -> None:
        """Arguments that are never copied are part of the signature by their address."""
        static = self.options.static_args
        leaves = [i for i, path in enumerate(call.tree.tensor_paths) if static and root_of(path) in static]
        if not leaves or entry.refusal is not None:
            return
        entry.stay(call.tensors, leaves)
        for i in leaves:
            self.habits.count_address(call.tree.tensor_paths[i], call.tensors[i])

    def _watch_opaque(self, entry: Entry, call: Call) -> None:
        """An opaque argument is compared by identity: its entries die with it."""
        life, number = weakref.ref(self), id(entry)

        def gone(_: Any) -> None:
            alive = life()
            known = alive.entries.get(number) if alive is not None else None
            if alive is not None and known is not None:
                alive._outlive(known)

        for _, value in call.opaque():
            entry.opaque.append(weakref.ref(value, gone))

    def _outlive(self, entry: Entry) -> None:
        without_graph = entry.graph is None
        self.entries.forget(entry)
        if without_graph:
            self.habits.lose(entry)

    # -- advancing

    def advance(self, entry: Entry, call: Call) -> Any:
        """Make this call's result by the way that brings its signature nearer to a graph."""
        call.refuse_stale()
        refused = entry.refusal or self._too_often(entry)
        if refused is not None:
            return self.plain.refuse(refused, call)
        if self.entries.sealed and entry.graph is None:
            return self.plain.missed(entry, call, self.entries.ready)
        if entry.wait > 0:
            entry.wait -= 1
            return self.plain.run("evicted", call)
        # A plain run, too, may go backward while the device's thread for backwards waits for the lock.
        with torch.autograd.set_multithreading_enabled(False), self.setting.pool.lock:
            if entry.graph is not None:
                return entry.graph(call.tensors, call.values)
            if entry.warmed < self.options.warmup:
                return self.lessons.warm_up(entry, call)
            return self.recorder.record(entry, call)

    def _too_often(self, entry: Entry) -> Refusal | None:
        """Why no graph is worth it now; asked anew at each call, since habits change."""
        number = self.lessons.numbers.refusal()
        if number is not None:
            return number
        warm = entry.warmed >= self.options.warmup
        return self.habits.refusal(entry, self.entries.ready, warm=warm)

    def clear(self) -> None:
        """Forget everything but the counts."""
        self.entries.clear()
        self.habits.forget_rebinds()


def _label(call: Call) -> str:
    """A signature in a user's words."""
    parts = [
        f"{path}: {str(t.dtype).removeprefix('torch.')}{'' if refusal(t) else list(t.shape)}"
        for path, t in zip(call.tree.tensor_paths, call.tensors, strict=True)
    ]
    parts += [
        f"{path}={value!r}"
        for path, value in zip(call.tree.const_paths, call.consts, strict=True)
        if value is not None
    ]
    return ", ".join(parts[:12]) + (", ..." if len(parts) > 12 else "") or "no arguments"
