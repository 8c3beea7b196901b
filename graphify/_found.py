"""What a survey found, how two surveys differ, and how all that one found is put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from itertools import chain, islice
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self

from ._layout import family_key
from ._lazy import is_lazy
from ._places import MISSING, Bulk, Change, Place, TensorFacts, is_plain, same
from ._raw import contents_of, is_a, put_back, reordered
from ._streams import Stream

__all__ = ["Found"]


def _nobody(container: Any) -> bool:
    return False


class Found:
    """What a survey met, as it was then: places, lengths, content compared as a whole, tensors."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, Any], tuple[Place, Any]] = {}
        self.sizes: list[tuple[Any, int, str]] = []
        self.contents: dict[int, tuple[Any, Any, str]] = {}
        """Containers with what they held; the name is empty where length and order are nobody's values."""
        self.internals: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Fields that are put back and not compared: where they are, and what they held."""
        self.bulk: list[Bulk] = []
        self.tensor_facts: list[tuple[Tensor, str, TensorFacts]] = []
        self.generators: list[torch.Generator] = []
        self.hooks: list[tuple[Any, int, str]] = []
        self.registries: list[dict[str, Any]] = []
        self.optimizers: list[tuple[str, Optimizer]] = []
        self.held: list[tuple[Place, Tensor]] = []
        self.closed: list[str] = []
        """Names of containers that hold what no walk sees."""
        self.blind: list[tuple[str, Any]] = []
        """Iterators that nobody can put back, by name."""
        self.streams: list[Stream] = []
        self.seen: dict[int, Any] = {}
        self.placed: set[int] = set()
        """The ids of what some place holds: that lives as long as the place."""
        self.queue: deque[tuple[Any, str]] = deque()
        self.base: Self | None = None
        self._met: list[tuple[Place, Tensor]] | None = None
        self._over: tuple[int, dict[int, list[Tensor]]] = (-1, {})
        self._base_holds: Callable[[], bool] = bool

    def fork(self, holds: Callable[[], bool]) -> Self:
        """The same survey to add to; `holds` tells whether all is as this one found it."""
        made = copy(self)
        made.places, made.seen, made.contents = dict(self.places), dict(self.seen), dict(self.contents)
        made.sizes, made.bulk, made.tensor_facts = [*self.sizes], [*self.bulk], [*self.tensor_facts]
        made.generators, made.hooks, made.held = [*self.generators], [*self.hooks], [*self.held]
        made.closed, made.internals = [*self.closed], [*self.internals]
        made.blind, made.streams = [*self.blind], [*self.streams]
        made.optimizers, made.registries, made.queue = [*self.optimizers], [*self.registries], deque()
        if self._met is None:
            self._met = [*self.tensors()]
        made.base, made._base_holds, made._met, made._over = self, holds, None, (-1, {})
        return made

    def added(self) -> list[tuple[Place, Any]]:
        """The places that the survey below this one does not have."""
        known, *_ = _extent(self.base)
        return [*islice(self.places.values(), known, None)]

    def holds(self, value: Any) -> bool:
        """Whether the survey met this very object."""
        return id(value) in self.seen

    def tensors(self) -> Iterator[tuple[Place, Tensor]]:
        """The places that hold tensors, those of an optimizer that are compared as a whole included."""
        return self._own_tensors() if self.base is None else chain(self.base._met or (), self._own_tensors())

    def _own_tensors(self) -> Iterator[tuple[Place, Tensor]]:
        found = ((place, value) for place, value in self.added() if issubclass(type(value), Tensor))
        held = self.held[0 if self.base is None else len(self.base.held) :]
        return ((place, value) for place, value in chain(found, held) if not is_lazy(value))

    def over(self, memory: int) -> list[Tensor]:
        """The tensors that it met over this memory, as `family_key` says it."""
        size, index = len(self.places) + len(self.held), self._over[1]
        if self._over[0] != size:
            index = {}
            for _, tensor in self._own_tensors():
                index.setdefault(family_key(tensor), []).append(tensor)
            self._over = size, index
        below = [] if self.base is None else self.base.over(memory)
        return below + index.get(memory, [])

    def changes(self, after: Found) -> list[Change]:
        """What happened between this survey and a later one of the same roots."""
        found = []
        base = self.base if self.base is after.base else None  # which held just now
        known, held, bulks, facts_known = _extent(base)
        for key, (place, now) in islice(after.places.items(), known, None):
            if key in self.places and not same(now, self.places[key][1]):
                found.append(Change(place, self.places[key][1], now))
            elif key not in self.places and self._was_absent(place):
                found.append(Change(place, MISSING, now))
        for key, (place, before) in islice(self.places.items(), known, None):
            if key not in after.places and place.read() is MISSING:
                found.append(Change(place, before, MISSING))
        known_containers = {id(change.place.container) for change in found}
        for container, content, name in islice(self.contents.values(), held, None):
            if name and id(container) not in known_containers and _differs(container, content):
                found.append(Change(Place(container, None, "bulk", name), content, container))
        bulk = [b for b in self.bulk[bulks:] if b.read() != b.content]
        found += [Change(Place(b, None, "bulk", b.name), b.content, b.read()) for b in bulk]
        drawn = [s for s in self.streams[0 if base is None else len(base.streams) :] if s.drawn()]
        found += [Change(Place(s, None, "draw", s.name), MISSING, MISSING) for s in drawn]
        moved = [
            (t, name, facts) for t, name, facts in self.tensor_facts[facts_known:] if not facts.same_as(t)
        ]
        return found + [Change(Place(t, None, "tensor", name), facts, t) for t, name, facts in moved]

    def _was_absent(self, place: Place) -> bool:
        """Whether a container that this survey knows did not have this key then."""
        if id(place.container) not in self.contents:
            return False
        _, content, _ = self.contents[id(place.container)]
        return place.key not in content if isinstance(content, dict) else place.key >= len(content)

    def adopt(self, after: Found, changed: set[tuple[int, Any]]) -> None:
        """Take over places that only a later survey met, unless they changed."""
        known, *_ = _extent(self.base if self.base is after.base else None)
        for key, held in islice(after.places.items(), known, None):
            if key not in changed and self.holds(held[0].container):
                self.places.setdefault(key, held)

    def restore(self, spared: Callable[[Any], bool] = _nobody) -> None:
        """Put back what the surveyed places and containers held; not where this says so of what has the content."""
        base = self.base if self._base_holds() else None
        known, held, bulks, facts_known = _extent(base)
        for container, content, _ in islice(self.contents.values(), held, None):
            if not spared(container):
                put_back(container, content)
        for bulk in self.bulk[bulks:]:
            if bulk.read() != bulk.content and not spared(bulk):
                bulk.restore()
        for stream in self.streams[0 if base is None else len(base.streams) :]:
            stream.restore()
        for tensor, _, facts in self.tensor_facts[facts_known:]:
            facts.restore(tensor)
        for fields, before in self.internals[0 if base is None else len(base.internals) :]:
            if not all(map(is_, map(fields.get, before), before.values())):
                fields.update(before)
        for place, value in islice(self.places.values(), known, None):
            if place.read() is not value and not spared(place.container):
                place.write(value)

    def add(self, place: Place) -> None:
        """Note what a place holds now, and reach that."""
        value = place.read()
        if value is MISSING or place.id in self.places:
            return
        self.places[place.id] = (place, value)
        self.seen[id(place.container)] = place.container
        if is_a(value, Tensor):
            self.meet(value, place.name)
        self.placed.add(id(value))
        self.reach(value, place.name)

    def add_all(self, places: Iterable[Place]) -> None:
        """The same for many."""
        for place in places:
            self.add(place)

    def meet(self, tensor: Tensor, name: str) -> None:
        """Note what the tensor is over now."""
        if id(tensor) not in self.seen:
            self.seen[id(tensor)] = tensor
            if not is_lazy(tensor):  # over nothing yet
                self.tensor_facts.append((tensor, name, TensorFacts(tensor)))

    def reach(self, value: Any, name: str) -> None:
        """Queue an object for its walk, unless it was met before or has nothing inside."""
        if id(value) in self.seen or is_a(value, Tensor) or is_plain(value):
            return
        self.seen[id(value)] = value
        self.queue.append((value, name))

    def size(self, container: Any, name: str, *, listed: bool = True) -> None:
        """Note what a list or a dict holds; `listed`: its length and order, too, are what code reads."""
        self.seen[id(container)] = container
        if not is_a(container, tuple):
            self.hold(container, name if listed else "")
            self.sizes.append((container, len(container), name))

    def hold(self, container: Any, name: str = "") -> None:
        """Note what a container holds, so that it can be put back."""
        self.contents.setdefault(id(container), (container, contents_of(container), name))


def _extent(base: Found | None) -> tuple[int, int, int, int]:
    """How many places, containers, contents and tensors a fork has of its base, before its own."""
    if base is None:
        return 0, 0, 0, 0
    return len(base.places), len(base.contents), len(base.bulk), len(base.tensor_facts)


def _differs(container: Any, content: Any) -> bool:
    """Whether a list has another length, or a dict other keys or another order."""
    if isinstance(container, dict):
        return dict.__len__(container) != len(content) or reordered(container, content)
    return len(container) != len(content)
