"""Which dimensions of one structure's tensors are bucketed sizes: live sizes in, padded shapes out."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from .buckets import Bucket
from .errors import InputError

__all__ = ["Axes", "Dims", "Place", "Shapes", "name_of", "text_of"]

Shapes = Sequence[Sequence[int]]
Dims = Mapping[int, Bucket]


class Place(NamedTuple):
    """One dimension of one tensor of a structure."""

    leaf: int
    dim: int  # from 0


class Axes:
    """The bucketed sizes of one structure of tensors; axis i is `buckets[i]` and stands at each of `places[i]`.

    `dims` has, for each leaf that it has an opinion on, the Buckets of its dimensions, counted from 0. `live(tensors)`
    is `sizes` of their shapes at the speed of generated code, or None for tensors of other ranks on those leaves.
    `fit(live)` is the bucket of each size, or None when one is too large (`above` says which).
    """

    def __init__(
        self,
        paths: Sequence[str],
        ranks: Sequence[int],
        dims: Mapping[int, Dims],
        *,
        shorthand: bool = False,
    ) -> None:
        places: dict[Bucket, list[Place]] = {}
        for leaf, buckets in dims.items():
            for dim, bucket in buckets.items():
                places.setdefault(bucket, []).append(Place(leaf, dim))
        self.paths = tuple(paths)
        self.buckets = tuple(places)
        self.places = tuple(map(tuple, places.values()))
        self.shorthand = shorthand
        self._ranks = {leaf: ranks[leaf] for leaf in dims}
        # The generated functions hold no reference to these axes: nothing here needs a garbage collection.
        self.sizes: Callable[[Shapes], tuple[int, ...]] = partial(
            _sizes, self.paths, self.buckets, self.places, shorthand
        )
        self.live: Callable[[Sequence[Any]], tuple[int, ...] | None] = _live(
            len(self.paths), self._ranks, self.places, self.sizes
        )
        self.fit: Callable[[Sequence[int]], tuple[int, ...] | None] = _fit(self.buckets)

    @property
    def count(self) -> int:
        """The number of combinations of bucket sizes."""
        return math.prod(len(bucket.sizes) for bucket in self.buckets)

    def grid(self) -> Iterator[tuple[int, ...]]:
        """All combinations of bucket sizes, those with the most elements first."""
        every = itertools.product(*(bucket.sizes for bucket in self.buckets))
        return iter(sorted(every, key=lambda sizes: (math.prod(sizes), sizes), reverse=True))

    def above(self, live: Sequence[int]) -> str | None:
        """The first size that no bucket holds, in words; None when all fit."""
        for bucket, places, size in zip(self.buckets, self.places, live, strict=True):
            if size > bucket.largest:
                where = f"dimension {places[0].dim} of `{self.paths[places[0].leaf]}`"
                return f"{where} is {size}, above {bucket.largest}, the largest size of its bucket"
        return None

    def padded_shapes(self, shapes: Shapes, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The shapes with each bucketed dimension at its axis' size."""
        padded = [list(shape) for shape in shapes]
        for places, size in zip(self.places, sizes, strict=True):
            for leaf, dim in places:
                padded[leaf][dim] = size
        return tuple(map(tuple, padded))


# ---------------------------------------------------------------- sizes


def _sizes(
    paths: Sequence[str],
    buckets: Sequence[Bucket],
    axes: Sequence[Sequence[Place]],
    shorthand: bool,
    shapes: Shapes,
) -> tuple[int, ...]:
    """The live size of each axis.

    Raises:
        InputError: two dimensions of one axis disagree.
    """
    for bucket, places in zip(buckets, axes, strict=True):
        found = [shapes[leaf][dim] for leaf, dim in places]
        if found.count(found[0]) != len(found):
            other = next(i for i, size in enumerate(found) if size != found[0])
            pair = (places[0], places[other])
            first, second = (_side(paths, place, shapes) for place in pair)
            advice = (
                _mapping_advice(paths, bucket, places, found)
                if shorthand
                else _own_advice(paths, bucket, pair)
            )
            raise InputError(f"{first}, but {second}: {advice}")
    return tuple(int(shapes[places[0].leaf][places[0].dim]) for places in axes)


def _side(paths: Sequence[str], place: Place, shapes: Shapes) -> str:
    size = shapes[place.leaf][place.dim]
    return f"`{paths[place.leaf]}` has size {size} in dimension {place.dim}"


def _own_advice(paths: Sequence[str], bucket: Bucket, pair: Sequence[Place]) -> str:
    what = f'the Bucket "{bucket.name}"' if bucket.name.isidentifier() else f"the sizes {bucket!r}"
    table: dict[str, dict[int, Bucket]] = {}
    taken: list[str] = []
    for place in pair:
        path = paths[place.leaf]
        taken.append(name_of(path, place.dim, taken))
        table.setdefault(path, {})[place.dim] = Bucket(taken[-1], bucket.sizes)
    return (
        f"both are {what} in the option `buckets`, so they are one size."
        f" Pass tensors that agree, or give each a Bucket of its own:\n{text_of(table)}"
    )


def _mapping_advice(
    paths: Sequence[str], bucket: Bucket, places: Sequence[Place], found: Sequence[int]
) -> str:
    """The mapping of those that agree; the most frequent size is taken for the one that was meant."""
    common = Counter(found).most_common(1)[0][0]
    named = bucket if bucket.name.isidentifier() else Bucket("batch", bucket.sizes)
    agreed = [place for place, size in zip(places, found, strict=True) if size == common]
    text = text_of({paths[place.leaf]: {place.dim: named} for place in agreed})
    return (
        "a bare list or Bucket as `buckets` takes dimension 0 of every tensor argument for one size."
        f" Name the dimensions that are; what is not named keeps its exact size:\n{text}"
    )


def name_of(path: str, dim: int, taken: Collection[str] = ()) -> str:
    """An identifier for one dimension of a path, none of those taken: "batch_ids_0" of `batch['ids']`."""
    spaced = "".join(char if f"a{char}".isidentifier() else " " for char in path)
    name = "_".join([*spaced.split(), str(dim)])
    others = (f"{name}_{number}" for number in itertools.count(2))
    return next(found for found in itertools.chain([name], others) if found not in taken)


def text_of(table: Mapping[str, Dims]) -> str:
    """A table from paths to Buckets as code that can be pasted: one line per name, then the option."""
    found = dict.fromkeys(bucket for dims in table.values() for bucket in dims.values())
    lines = [f"{bucket.name} = {bucket!r}" for bucket in found if bucket.name.isidentifier()]
    entries = []
    for path, dims in table.items():
        key = f'"{path}"' if '"' not in path and "\\" not in path else repr(path)
        sizes = [f"{d}: {b.name if b.name.isidentifier() else repr(b)}" for d, b in dims.items()]
        entries.append(f"{key}: {{{', '.join(sizes)}}}")
    return "\n".join([*lines, f"buckets={{{', '.join(entries)}}}"])


# ---------------------------------------------------------------- generated code


def _live(
    count: int,
    ranks: Mapping[int, int],
    axes: Sequence[Sequence[Place]],
    sizes: Callable[[Shapes], tuple[int, ...]],
) -> Callable[[Sequence[Any]], tuple[int, ...] | None]:
    """One assignment reads all shapes: unpacking a shape tests its rank, too."""
    names: dict[Place, str] = {}
    differ: list[str] = []
    for axis, places in enumerate(axes):
        names.update({place: f"n{axis}_{index}" for index, place in enumerate(places)})
        differ += [f"n{axis}_0 != n{axis}_{index}" for index in range(1, len(places))]
    tensors = [f"t{leaf}" if leaf in ranks else "_" for leaf in range(count)]
    parts = [
        _targets([names.get(Place(leaf, dim), "_") for dim in range(rank)]) for leaf, rank in ranks.items()
    ]
    reads = (
        f"{_targets(tensors)} = tensors; {_targets(parts)} = {_targets([f't{leaf}.shape' for leaf in ranks])}"
    )
    source = (
        f"def live(tensors):\n    try: {reads}\n    except ValueError: return None\n"
        + (f"    if {' or '.join(differ)}: return sizes([t.shape for t in tensors])\n" if differ else "")
        + f"    return {_targets([f'n{axis}_0' for axis in range(len(axes))])}\n"
    )
    made: Callable[[Sequence[Any]], tuple[int, ...] | None] = _function("live", source, {"sizes": sizes})
    return made


def _targets(names: Sequence[str]) -> str:
    return f"({', '.join(names)},)" if names else "()"


def _fit(buckets: Sequence[Bucket]) -> Callable[[Sequence[int]], tuple[int, ...] | None]:
    count = range(len(buckets))
    found = _targets([f"s{axis}[bisect(s{axis}, n{axis})]" for axis in count])
    source = (
        f"def fit(live):\n    {_targets([f'n{axis}' for axis in count])} = live\n"
        f"    try: return {found}\n    except IndexError: return None\n"
    )
    sizes = {f"s{axis}": bucket.sizes for axis, bucket in enumerate(buckets)}
    made: Callable[[Sequence[int]], tuple[int, ...] | None] = _function(
        "fit", source, {"bisect": bisect_left, **sizes}
    )
    return made


def _function(name: str, source: str, space: dict[str, Any]) -> Any:
    exec(compile(source, f"<graphify {name}>", "exec"), space)
    return space.pop(name)
