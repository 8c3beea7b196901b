"""What the calls of a wrapper do again and again: values, addresses and sizes that never settle."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import Tensor

from ._auto import Watcher
from ._entry import Entry, Refusal, Table
from ._raw import is_a
from ._tree import Tree

__all__ = ["Habits"]

_MANY_VALUES = 8
_MANY_TIMES = 3
_MANY_SIZES = 16
_FEW_SCALARS = 4


class Habits:
    """What changed from call to call, and what is said or refused once it has changed too often."""

    def __init__(self, say: Callable[[str, str], None], static_args: Collection[str]) -> None:
        self._say, self._static = say, static_args
        self._rebinds: Counter[str] = Counter()
        self._bound: dict[str, Callable[[], Any]] = {}
        self.scalars_are_read = False
        """Whether code reads host scalars, so that they stay values."""
        self._values: dict[tuple[Any, ...], set[Any]] = {}
        self._scalars: dict[Any, set[tuple[Any, ...]]] = {}
        self._watchers: dict[Any, Watcher] = {}
        self._lost = 0

    def refusal(self, entry: Entry, ready: Iterable[Entry], *, warm: bool) -> Refusal | None:
        """Why no graph is worth it: something that a graph must take as fixed changes again and again."""
        if self._watchers and (sizes := self._unsettled(entry, ready)) is not None:
            return sizes
        for name, times in self._rebinds.items() if warm else ():
            if times >= _MANY_TIMES:
                return Refusal(
                    "rebound",
                    advice=f"`{name}` is re-bound to another tensor again and again, and a graph reads fixed "
                    "memory: write into one tensor with `copy_`, or pass it as an argument",
                )
        return None

    def rebound(self, name: str, now: Any, *, idle: bool) -> None:
        """A name leads to another tensor than the graph reads, which was of use before unless `idle`.

        That counts once, however many graphs meet it; `now` is the tensor, or where its memory is.
        """
        if name in self._bound and _is_same(self._bound[name](), now):
            return
        self._bound[name] = weakref.ref(now) if isinstance(now, Tensor) else lambda: now
        self._rebinds[name] = self._rebinds[name] + 1 if idle else 0

    def forget_rebinds(self) -> None:
        """Begin anew with names that were bound to other tensors."""
        self._rebinds.clear()
        self._bound.clear()

    def _unsettled(self, entry: Entry, ready: Iterable[Entry]) -> Refusal | None:
        """Sizes that never settle end in few graphs, not in one per call."""
        family = _family(entry.tree, [shape for shape, *_ in entry.key[2]])
        watcher = self._watchers.get(family)
        if watcher is None or watcher.exact_pays:
            return None
        alike = [e for e in ready if _family(e.tree, [shape for shape, *_ in e.key[2]]) == family]
        if len(alike) < _MANY_SIZES:
            return None
        return Refusal(
            "sizes",
            advice=f"{'; '.join(watcher.ranges())}: a graph per size does not pay, and no more than {_MANY_SIZES} are"
            ' captured while most sizes are new. Write `buckets="auto"`, or name the sizes in `buckets`',
        )

    def watcher(self, table: Table, shapes: Sequence[Sequence[int]]) -> Watcher:
        """What is known of the sizes of calls like this one."""
        family = _family(table.tree, shapes)
        if family not in self._watchers:
            self._watchers[family] = Watcher(table.tree.tensor_paths, self._static)
        return self._watchers[family]

    def see(self, table: Table, specs: Sequence[tuple[Any, ...]]) -> None:
        """Note the sizes of a call whose sizes are not declared."""
        shapes = tuple(shape for shape, *_ in specs)
        if None not in shapes:  # as those of a tensor that is refused
            self.watcher(table, shapes).see(shapes)

    def many_scalars(self, entry: Entry, values: tuple[Any, ...]) -> bool:
        """Whether host scalars have shown so many values that they are better staged as tensors."""
        seen = self._scalars.setdefault((id(entry.tree), entry.key), set())
        seen.add(values)
        return len(seen) > _FEW_SCALARS and not self.scalars_are_read

    def count_address(self, path: str, tensor: Tensor) -> None:
        """Many addresses of one argument have a graph each."""
        seen = self._values.setdefault(("address", path), set())
        seen.add(tensor.data_ptr())
        if len(seen) == _MANY_VALUES:
            self._say(
                f"addresses of {path}",
                f"has seen `{path}` at {_MANY_VALUES} addresses, and has a graph for each: keep one tensor, or take"
                " it out of `static_args`",
            )

    def count_tokens(self, table: Table, key: Any) -> None:
        """Note the plain values among the arguments of a call."""
        for i, (path, token) in enumerate(zip(table.tree.const_paths, key[1], strict=True)):
            if i not in table.tree.opaque:
                self.count_value((id(table), path), token, path)

    def count_value(self, where: tuple[Any, ...], value: Any, name: str) -> None:
        """Many values of one number are the sign of a number that should be a tensor."""
        if not is_a(value, (int, float)) or is_a(value, bool):
            return
        seen = self._values.setdefault(where, set())
        if len(seen) < _MANY_VALUES:
            seen.add(value)
        if len(seen) == _MANY_VALUES:
            self._say(
                f"values of {name}",
                f"has seen {_MANY_VALUES} values of `{name}`; each is baked into a graph of its own: pass it as a tensor",
            )

    def lose(self, entry: Entry) -> None:
        """An opaque argument has died before this entry had a graph."""
        self._lost += 1
        if self._lost == _MANY_TIMES:
            paths = ", ".join(f"`{entry.tree.const_paths[i]}`" for i in entry.tree.opaque)
            self._say(
                "opaque",
                f"{paths} is a new object at each call, so no call is ever captured: keep one object",
            )


def _is_same(known: Any, now: Any) -> bool:
    return known is now or (not isinstance(now, Tensor) and not isinstance(known, Tensor) and known == now)


def _family(tree: Tree, shapes: Sequence[Sequence[int]]) -> tuple[Tree, tuple[int, ...]]:
    """What calls have in common that differ in sizes only."""
    return tree, tuple(map(len, shapes))
