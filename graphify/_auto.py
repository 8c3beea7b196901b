"""What `buckets="auto"` lays over calls whose sizes vary, and the words for those whose owner may declare it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from ._axes import Place, name_of
from ._specification import Specification, root_of, same_path
from .buckets import Bucket, unnamed

__all__ = ["Watcher"]

_LEAST = 4  # distinct shapes before anything is said
_RECENT = 64  # calls that decide whether exact signatures pay
_KEPT = 1024  # distinct shapes that are remembered, so that watching never grows
_FEW = 4  # values of a size that keeps coming back to them
_FINE = 1024  # from here on, sizes half-way between powers of two, too

Shape = Sequence[int]
Shapes = tuple[Shape, ...]


class Watcher:
    """The shapes of the calls of one family: same structure, ranks and dtypes; `paths` are those of its tensors.

    Whoever calls `see` holds the lock of the family: a Watcher has none.
    """

    def __init__(self, paths: Sequence[str], static: Collection[str] = ()) -> None:
        self._paths = tuple(paths)
        self._open = tuple(leaf for leaf, path in enumerate(paths) if root_of(path) not in static)
        self._counts: dict[Shapes, int] = {}
        self._fresh: deque[bool] = deque(maxlen=_RECENT)

    def see(self, shapes: Shapes) -> None:
        """Take note of one call, by the shapes of its tensors (hashable, such as `torch.Size`)."""
        before = self._counts.get(shapes, 0)
        if not before and len(self._counts) >= _KEPT:
            del self._counts[next(iter(self._counts))]
        self._counts[shapes] = before + 1
        self._fresh.append(not before)

    @property
    def distinct(self) -> int:
        """How many different shapes calls had, up to a limit."""
        return len(self._counts)

    @property
    def exact_pays(self) -> bool:
        """Whether exact graphs are worth it: recent calls repeat shapes at least as often as they bring new ones."""
        return len(self._counts) < _LEAST or 2 * sum(self._fresh) <= len(self._fresh)

    def ranges(self) -> tuple[str, ...]:
        """Each size that varies, in words; the one with the most values first.

        "dimension 1 of `tokens` and `mask` took 37 values from 12 to 211"
        """
        found = sorted(self._varying(), key=lambda axis: len(set(axis[1])), reverse=True)
        return tuple(
            f"{self._where(places)} took {len(set(values))} values from {min(values)} to {max(values)}"
            for places, values in found
        )

    def proposal(self) -> Specification | None:
        """Buckets for each size that varies; None when none does.

        Dimensions that were equal at every call are one size. Sizes that come back to a few values keep these, others
        have powers of two up to the first that holds the largest seen; from 1024, the sizes half-way between, too.
        Later calls may tell apart what was equal, or be larger: ask again then.
        """
        table: dict[str, dict[int, Bucket]] = {}
        taken: set[str] = set()
        for places, values in self._varying():
            sizes = self._sizes(set(values))
            path, dim = self._paths[places[0].leaf], places[0].dim
            if len(places) == 1:
                bucket = unnamed(f"{path}.{dim}", sizes, path)
            else:
                bucket = Bucket(name_of(path, dim, taken), sizes)
                taken.add(bucket.name)
            for place in places:
                table.setdefault(same_path(self._paths[place.leaf]), {})[place.dim] = bucket
        return Specification(table) if table else None

    def _varying(self) -> Iterator[tuple[list[Place], tuple[int, ...]]]:
        """The dimensions that vary, those that vary together at once, with their values of all shapes."""
        seen = tuple(self._counts)
        together: dict[tuple[int, ...], list[Place]] = {}
        for leaf in self._open if seen else ():
            for dim, values in enumerate(zip(*(shapes[leaf] for shapes in seen), strict=True)):
                together.setdefault(values, []).append(Place(leaf, dim))
        return ((places, values) for values, places in together.items() if len(set(values)) > 1)

    def _sizes(self, values: set[int]) -> list[int]:
        if len(values) <= _FEW and sum(self._counts.values()) >= _FEW * len(values):
            return sorted({max(1, value) for value in values})
        first, last = (max(0, value - 1).bit_length() for value in (min(values), max(values)))
        powers = [1 << exponent for exponent in range(first, last + 1)]
        return sorted([*powers, *(power + power // 2 for power in powers[:-1] if power >= _FINE)])

    def _where(self, places: Sequence[Place]) -> str:
        """Places as words, those of one dimension together."""
        by_dim: dict[int, list[str]] = {}
        for place in places:
            by_dim.setdefault(place.dim, []).append(f"`{self._paths[place.leaf]}`")
        return " and ".join(f"dimension {dim} of {_listed(names)}" for dim, names in by_dim.items())


def _listed(names: Sequence[str]) -> str:
    """The first few of some names."""
    shown = [*names[:3], *([f"{len(names) - 3} more"] if len(names) > 3 else [])]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
