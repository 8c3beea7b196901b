"""One signature's life: new, warm, ready, or refused with a reason."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._autograd import Patterns
from ._axes import Axes
from ._graph import Graph
from ._guards import Guard, Miss
from ._instances import Instances
from ._layout import family_key
from ._places import Place
from ._signature import overlap
from ._tree import Tree

__all__ = ["Entry", "Refusal", "Table", "host_value"]


class Refusal(NamedTuple):
    """Why calls of one signature run eagerly.

    `error` is set when the call can never be captured, which `fallback="raise"` raises; without it the
    call is not worth a graph or not now, and always runs eagerly.
    """

    reason: str
    error: Exception | None = None
    advice: str = ""


class Entry:
    """What is known of one signature, plain values included."""

    def __init__(self, tree: Tree, key: Any, device: torch.device | None) -> None:
        self.tree, self.key, self.device = tree, key, device
        self.guard: Guard | None = None
        self.graph: Graph | Instances | None = None
        self.patterns: Patterns | None = None
        self.whole = False
        self.numbers: list[Place] = []
        self.built = 0
        self.refusal: Refusal | None = None
        self.scalars: tuple[tuple[int, Any], ...] = ()
        self.staged: frozenset[int] = frozenset()
        self.warmed = 0
        self.wait = 0
        self.evictions = 0
        self.used = 0
        self.label = ""
        self.proof: Any = None
        """That padding changes nothing, where calls of several sizes share the graph."""
        self.large: tuple[str, ...] = ()  # names of what a warm-up wrote and no trial copies
        """Whether a run writes outside memory that no trial puts back."""
        self.capacity: tuple[int, ...] = ()
        self.addresses: tuple[tuple[int, int], ...] = ()
        self.bucket: Entry | None = None
        """Whose graph this one uses for calls of one exact size."""
        self.opaque: list[weakref.ref[Any]] = []
        self.admits: Callable[[Sequence[Tensor]], bool] | None = None
        self.holds: Callable[[], bool] = _always
        self.matches: Callable[..., bool] = _never
        self.same_ambient: Callable[[], bool] = _never

    def serves(self, tree: Tree, tensors: tuple[Tensor, ...], tokens: tuple[Any, ...]) -> bool:
        """Whether this entry's graph, if it has one, replays this very call; the cheapest tests by which it can be known, in order of cost."""
        return (
            self.tree is tree
            and self.key[1] == tokens
            and self.same_ambient()
            and self.matches(*tensors)
            and (len(tensors) == 1 or overlap(tensors) == self.key[3])
            and self.holds()
            and (self.admits is None or self.admits(tensors))
        )

    def device_or_raise(self) -> torch.device:
        """The device to record on; an entry without one was refused."""
        assert self.device is not None, "a refused entry has no device"
        return self.device

    def trust(self, guard: Guard) -> None:
        """Check this guard before each use from now on."""
        self.guard = guard
        self._rearm()

    def _rearm(self) -> None:
        assert self.guard is not None, "there is a guard to check"
        step, holds = self.graph.step if self.graph is not None else None, self.guard.holds
        self.holds = holds if step is None else lambda: holds() and step.holds()

    def release(self, place: Place) -> None:
        """What this place holds is no part of the signature any more."""
        if self.guard is not None:
            self.guard.release(place.id)
            self._rearm()

    def settle(self, graph: Graph | Instances, guard: Guard) -> None:
        """The signature has its graph."""
        self.graph, self.wait = graph, 0
        self.trust(guard)
        self._watch_arguments()

    def expect(self, tensors: Sequence[Tensor], hosts: Iterable[int]) -> None:
        """Take the values of host scalars among the arguments as part of the signature."""
        self.scalars = tuple((i, host_value(tensors[i])) for i in hosts)
        self.staged = frozenset()
        self._watch_arguments()

    def stay(self, tensors: Sequence[Tensor], leaves: Iterable[int]) -> None:
        """Take the addresses of arguments that are never copied as part of the signature."""
        self.addresses = tuple((i, tensors[i].data_ptr()) for i in leaves)
        self._watch_arguments()

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether this entry still speaks of the call, learning equal values in new objects."""
        if self.admits is not None and not self.admits(tensors):
            return False
        return self.holds() or (self.guard is not None and self.miss() is None)

    def miss(self) -> Miss | None:
        """What the guard finds changed."""
        assert self.guard is not None
        found = self.guard.miss()
        if found is None and self.graph is not None and self.graph.step is not None:
            found = self.graph.step.miss()
        self._rearm()
        return found

    def meets_other_gradients(self) -> bool:
        """Whether a whole step was recorded, and only what `.grad` holds is in the way of a replay."""
        step = self.graph.step if self.graph is not None else None
        if step is None or self.guard is None or not self.guard.holds():
            return False
        return step.meets_other_gradients()

    def resemble(self, other: Entry) -> None:
        """Take over what warm-ups taught about a signature that differs in `.grad` only."""
        self.warmed, self.whole, self.large = other.warmed, other.whole, other.large
        self.numbers, self.patterns = other.numbers, other.patterns

    def drop(self) -> None:
        """Let go of the graph; it is freed once no thread is in the middle of its replay."""
        self.graph = None
        self.matches = _never
        if self.guard is not None:
            self._rearm()
        self._watch_arguments()

    def end(self) -> None:
        """Fit no call any more: an opaque argument's address may come back with another object."""
        self.drop()
        self.holds, self.guard = _never, None

    def _watch_arguments(self) -> None:
        scalars, addresses = self.scalars, self.addresses
        conflicts = self.graph.conflicts if self.graph is not None else frozenset()
        if not scalars and not conflicts and not addresses:
            self.admits = None
            return

        def admits(tensors: Sequence[Tensor]) -> bool:
            if any(tensors[i].data_ptr() != address for i, address in addresses):
                return False
            if any(host_value(tensors[i]) != value for i, value in scalars):
                return False
            return not conflicts or conflicts.isdisjoint(map(family_key, tensors))

        self.admits = admits


class Table:
    """The entries of all calls with one structure of arguments."""

    def __init__(self, tree: Tree, specs: Callable[[tuple[Tensor, ...]], tuple[Any, ...]]) -> None:
        self.tree, self.specs = tree, specs
        self.unpack = tree.unpack
        self.entries: dict[Any, list[Entry]] = {}
        self.sized: dict[Any, Entry] = {}
        """What is known of calls of one exact size, where sizes are bucketed."""
        self.axes: Axes | None = None
        self.recent: dict[tuple[int, ...], Entry] = {}
        """The entry that the last call of these sizes had."""

    def forget_sizes(self) -> None:
        """Begin anew with calls of exact sizes."""
        for entry in self.sized.values():
            entry.drop()
        self.sized.clear()
        self.recent.clear()
        self.axes = None

    def add(self, entry: Entry) -> None:
        """Remember an entry under its key."""
        self.entries.setdefault(entry.key, []).append(entry)

    def remove(self, entry: Entry) -> None:
        """Forget an entry and free its graph."""
        entry.end()
        family = self.entries.get(entry.key, [])
        if entry in family:
            family.remove(entry)
        if not family:
            self.entries.pop(entry.key, None)


def _always() -> bool:
    return True


def _never(*_: Any) -> bool:
    return False


def host_value(scalar: Tensor) -> Any:
    """The value of a tensor without dimensions, NaN equal to itself."""
    value = scalar.item()
    return value if value == value else "nan"
