"""One generated expression per recording that tells whether what it read is still what Python holds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._layout import family_key
from ._lazy import is_lazy
from ._places import Place, is_plain, same
from ._raw import fields_of, has_own_items, is_a, member_of
from ._survey import Survey

__all__ = ["Guard", "Miss", "find_place", "once"]


class Miss(NamedTuple):
    """The first place that no longer holds what the recording read; `moved` when its memory is another."""

    name: str
    before: Any
    now: Any
    moved: bool
    place: tuple[int, Any] | None = None

    def __str__(self) -> str:
        if self.moved:
            return f"`{self.name}` was re-bound or moved to other memory"
        return f"`{self.name}` is {_brief(self.now)}, was {_brief(self.before)}"


class Guard:
    """What a recording took for granted, checked before each replay.

    `holds()` is one generated expression of `is` tests, sizes and addresses. When it fails, `miss()` walks
    the places one by one: an equal plain value in a new object is accepted and learned, anything else is
    named.
    """

    def __init__(
        self,
        survey: Survey,
        *,
        outside: Iterable[Tensor],
        written: set[tuple[int, Any]],
        device: torch.device,
    ) -> None:
        kept = [(p, v) for key, (p, v) in survey.places.items() if key not in written]
        self.places = [(p, v) for p, v in kept if not is_a(p.container, tuple)]
        tensors = once([v for _, v in kept if is_a(v, Tensor)] + list(outside))
        # Others have no address.
        self.tensors = [t for t in tensors if t.layout is torch.strided and not is_lazy(t)]
        self.sizes = [*survey.sizes]
        self.sizes += [(c, n, name) for c, n, name in survey.hooks]
        self.bulk = [b for b in survey.bulk if (id(b.holder), None) not in written]
        self.hosts = [t for t in self.tensors if t.device.type != device.type]
        self.gradients = torch.is_grad_enabled()
        self.facts = self._facts()
        self.holds = self._generate()

    def miss(self) -> Miss | None:
        """The first thing that differs, or None when all still holds (then `holds()` is true again)."""
        for i, (place, expected) in enumerate(self.places):
            now = place.read()
            if not same(now, expected):
                moved = is_a(expected, Tensor) and is_a(now, Tensor)
                return Miss(place.name, expected, now, moved, place.id)
            self.places[i] = (place, now)
        for container, size, name in self.sizes:
            if len(container) != size:
                return Miss(f"len({name})", size, len(container), False)
        for bulk in self.bulk:
            if bulk.read() != bulk.content:
                return Miss(bulk.name, bulk.content, bulk.read(), bulk.moved)
        if self._facts() != self.facts:
            return self._moved()
        self.holds = self._generate()
        return None

    def release(self, place: tuple[int, Any]) -> None:
        """Compare this place no longer."""
        self.places = [(p, v) for p, v in self.places if p.id != place]
        self.holds = self._generate()

    def _moved(self) -> Miss:
        for tensor, now, before in zip(self.tensors, self._facts(), self.facts, strict=True):
            if now != before:
                names = [p.name for p, v in self.places if v is tensor]
                name = names[0] if names else "a tensor"
                if now[0] == before[0] and now[1] != before[1]:
                    return Miss(f"{name}.requires_grad", before[1], now[1], False)
                return Miss(name, before, now, True)
        raise AssertionError("facts differ but no tensor does")

    def _facts(self) -> list[tuple[Any, ...]]:
        hosts = {id(t) for t in self.hosts}
        return [
            (t.data_ptr(), t.requires_grad and self.gradients, _version(t) if id(t) in hosts else None)
            for t in self.tensors
        ]

    def _generate(self) -> Callable[[], bool]:
        scope: dict[str, Any] = {"same": same, "get": dict.get, "type": type}
        tests: list[str] = []
        typed = [place for place, _ in self.places if place.kind == "type"]
        alone = len(typed) <= _FEW
        for i, (place, value) in enumerate(self.places):
            if place.kind == "type" and not alone:
                continue
            scope[f"c{i}"], scope[f"k{i}"], scope[f"v{i}"] = place.container, place.key, value
            if place.read() is value:
                kind = "entry" if place.kind == "item" and has_own_items(place.container) else place.kind
                if kind == "attr":
                    scope[f"k{i}"] = member_of(type(place.container), place.key).__get__
                tests.append(_TESTS[kind].format(i=i, k=_literal(place.key, i), name=place.key))
            else:  # made anew by each read, so only its value can be compared
                scope[f"p{i}"] = place
                tests.append(f"same(p{i}.read(), v{i})")
        if not alone:
            scope["objects"] = objects = [place.container for place in typed]
            scope["types"] = [*map(type, objects)]
            tests.append("[*map(type, objects)] == types")
        tests += self._size_tests(scope)
        for i, bulk in enumerate(self.bulk):
            scope[f"b{i}"], scope[f"e{i}"] = bulk.read, bulk.content
            tests.append(f"b{i}() == e{i}")
        tests += self._address_tests(scope)
        body = " and ".join(tests) or "True"
        source = f"def holds():\n try:\n  return {body}\n except (LookupError, AttributeError, ValueError):\n  return False"
        exec(source, scope)
        holds: Callable[[], bool] = scope.pop("holds")  # left there, it would be a reference cycle
        return holds

    def _size_tests(self, scope: dict[str, Any]) -> list[str]:
        # Most are a module's hooks and submodules, of which there are none: that is asked of all at half the cost.
        empty = [c for c, n, _ in self.sizes if n == 0 and not hasattr(type(c), "__bool__")]
        others = [(c, n) for c, n, _ in self.sizes if n or hasattr(type(c), "__bool__")]
        scope["empty"], scope["containers"] = empty, [c for c, _ in others]
        scope["sizes"] = [n for _, n in others]
        tests = ["not any(empty)"] if empty else []
        return [*tests, "[*map(len, containers)] == sizes"] if others else tests

    def _address_tests(self, scope: dict[str, Any]) -> list[str]:
        if not self.tensors:
            return []
        scope["tensors"], scope["ptr"] = self.tensors, Tensor.data_ptr
        scope["addresses"] = [t.data_ptr() for t in self.tensors]
        tests = ["[*map(ptr, tensors)] == addresses"]
        if self.gradients:
            scope["flags"] = [t.requires_grad for t in self.tensors]
            tests.append("[t.requires_grad for t in tensors] == flags")
        if self.hosts:
            scope["hosts"], scope["version"] = self.hosts, _version
            scope["versions"] = [_version(t) for t in self.hosts]
            tests.append("[*map(version, hosts)] == versions")
        return tests


_FEW = 16
"""Up to so many objects, asking each for its class costs less than asking all in one expression."""

_TESTS = {
    "item": "c{i}[{k}] is v{i}",
    "field": "c{i}[{k}] is v{i}",
    "class": "c{i}.__dict__[{k}] is v{i}",
    "cell": "c{i}.cell_contents is v{i}",
    "variable": "c{i}.get() is v{i}",
    "attr": "k{i}(c{i}) is v{i}",
    "type": "type(c{i}) is v{i}",
    "referent": "type(c{i}()) is v{i}",
    "part": "c{i}.{name} is v{i}",
    "entry": "get(c{i}, {k}) is v{i}",
}


def find_place(tensor: Tensor, ignore: Iterable[Any]) -> Place | None:
    """Where Python holds a tensor that no survey met, found through the garbage collector."""
    skipped = {id(x) for x in ignore}
    for holder in gc.get_referrers(tensor):
        if is_a(holder, CellType):
            return Place(holder, "", "cell", "a closure variable")
        held = _dict_of(holder)
        key = None if held is None or id(held) in skipped else _key_of(tensor, held)
        if held is not None and key is not None:
            return Place(held, key, "item", f"an item {key!r} of a dict")
    return None


def _dict_of(holder: Any) -> dict[Any, Any] | None:
    """A dict, or that of an object: since Python 3.13 the object itself holds what its dict shows. Not of one of ours."""
    held = holder if is_a(holder, dict) else fields_of(holder)
    ours = type(holder).__module__.startswith("graphify.")
    return None if ours else held


def _key_of(tensor: Tensor, holder: dict[Any, Any]) -> Any:
    # A loop: in a comprehension, Python 3.11 would make this very variable one of the cells that are searched.
    for key, value in list(holder.items()):
        # Under a key that is made of the tensor no other one will ever be: so are our own dicts.
        if value is tensor and (type(key) is not int or key not in (id(tensor), family_key(tensor))):
            return key
    return None


def _version(host: Tensor) -> Any:
    """What stands for the value of a CPU tensor that a device recording read on the host."""
    return host.flatten().tolist() if host.is_inference() else host._version


def once(tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor of a list once, in order."""
    return list({id(t): t for t in tensors}.values())


def _literal(key: Any, i: int) -> str:
    return repr(key) if type(key) in (str, int) else f"k{i}"


def _brief(value: Any) -> str:
    if is_a(value, type):
        return str(value.__qualname__)
    return repr(value) if is_plain(value) else f"another {type(value).__name__}"
