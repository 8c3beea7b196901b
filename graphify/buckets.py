"""Named sizes that calls are padded up to, so that many shapes share few graphs."""

from __future__ import annotations

import keyword
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Bucket", "Buckets", "unnamed"]

_LONG = 12  # sizes; more are shown in a shorter form where there is one


@dataclass(frozen=True, init=False, repr=False)
class Bucket:
    """A size that several dimensions share, and the sizes it is padded up to.

    Example:
        >>> batch, seq = Bucket("batch", [1, 2, 4, 8]), Bucket.powers_of_two("seq", 128, 2048)
        >>> decode = graphify(decode, buckets={"tokens": {0: batch, 1: seq}, "mask": {0: batch, 1: seq}})

    A call with tokens of shape (3, 200) runs as (4, 256). `name` is an identifier; `sizes` are sorted counts of
    elements, each at least 1. Two Buckets of the same name and sizes are one and the same size: every dimension
    given to either must agree at each call. One name with different sizes is refused.

    Raises:
        TypeError: a name that is no str, or sizes that are no list, tuple or range of ints.
        ValueError: a name that is no identifier, or sizes that are empty, unsorted, double or below 1.
    """

    name: str
    sizes: tuple[int, ...]

    def __init__(self, name: str, sizes: Sequence[int]) -> None:
        _check_name(name)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "sizes", _checked(f'Bucket("{name}", sizes)', sizes))

    @classmethod
    def powers_of_two(cls, name: str, low: int, high: int) -> Bucket:
        """The powers of two from `low` to `high`, and these two themselves.

        Example:
            >>> Bucket.powers_of_two("seq", 128, 1000).sizes
            (128, 256, 512, 1000)

        Raises:
            TypeError, ValueError: bounds that are no ints, below 1 or in the wrong order.
        """
        _check_bounds("powers_of_two", low=low, high=high)
        return cls(name, sorted({low, high, *_powers(low, high)}))

    @classmethod
    def multiples_of(cls, name: str, step: int, high: int, low: int | None = None) -> Bucket:
        """The multiples of `step` from `low` (by default `step`) to `high`, and these two themselves.

        Example:
            >>> Bucket.multiples_of("tokens", 64, 200, low=16).sizes
            (16, 64, 128, 192, 200)

        A large `high` with a small `step` asks for that many graphs.

        Raises:
            TypeError, ValueError: numbers that are no ints, below 1 or in the wrong order.
        """
        _check_bounds("multiples_of", step=step)
        _check_bounds("multiples_of", high=high)
        low = min(step, high) if low is None else low
        _check_bounds("multiples_of", low=low, high=high)
        first = -(-low // step) * step
        return cls(name, sorted({low, high, *range(first, high + 1, step)}))

    @classmethod
    def decode(cls, max: int, name: str = "batch") -> Bucket:  # noqa: A002
        """The batch sizes that serving stacks capture for decoding: dense when small, coarser when large.

        Example:
            >>> Bucket.decode(30).sizes
            (1, 2, 4, 8, 16, 24, 30)

        1, 2, 4, each multiple of 8 up to 256, of 16 up to 512, of 32 up to 1024 and so on; `max`, in rows, is always
        included. 256 rows are 35 sizes.

        Raises:
            TypeError, ValueError: a `max` that is no int or below 1.
        """
        _check_bounds("decode", max=max)
        return cls(name, _decode_sizes(max))

    @property
    def largest(self) -> int:
        """The size above which calls run eagerly."""
        return self.sizes[-1]

    def fit(self, size: int) -> int | None:
        """The smallest of the sizes that holds `size` elements; None above the largest.

        Example:
            >>> Bucket("batch", [1, 2, 4]).fit(3)
            4

        Zero elements fit the smallest.
        """
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else None

    def __repr__(self) -> str:
        if not self.name.isidentifier():
            return _shown(self.sizes)
        if len(self.sizes) > _LONG and self.sizes == tuple(_decode_sizes(self.largest)):
            return f'Bucket.decode({self.largest}, "{self.name}")'
        return f'Bucket("{self.name}", {_shown(self.sizes)})'


Sizes: TypeAlias = "Bucket | Sequence[int]"
Nested: TypeAlias = "Mapping[int, Sizes] | Mapping[str, Nested] | Sequence[Nested] | None"
Buckets: TypeAlias = "Bucket | Sequence[int] | Literal['auto'] | Mapping[str, Nested] | None"
"""What the option `buckets` may be."""


def unnamed(place: str, sizes: Sequence[int], where: str) -> Bucket:
    """The Bucket of a bare list: named after its place, which is no identifier, and printed as the list again.

    `where` is how messages name the list.
    """
    bucket = object.__new__(Bucket)
    object.__setattr__(bucket, "name", place)
    object.__setattr__(bucket, "sizes", _checked(where, sizes))
    return bucket


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f'Bucket(name, sizes): name must be a str, not {name!r}. Write Bucket("batch", [1, 2, 4, 8]).'
        )
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(
            f"Bucket({name!r}, sizes): the name must be an identifier, since it is printed as code."
            ' Write a name such as "batch" or "seq".'
        )


def _checked(where: str, sizes: object) -> tuple[int, ...]:
    if not isinstance(sizes, (list, tuple, range)):
        raise TypeError(f"{where}: sizes must be a list of ints such as [1, 2, 4, 8], not {sizes!r}.")
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{where}: each size must be an int, not {size!r}.")
    found = tuple(map(int, sizes))
    if not found:
        raise ValueError(f"{where}: there are no sizes. Write at least one, such as [8].")
    right = sorted({size for size in found if size >= 1}) or [1]
    if min(found) < 1:
        raise ValueError(
            f"{where}: {min(found)} is below 1. Write {right}; a call of size 0 fits the smallest size."
        )
    if list(found) != right:
        what = "double" if len(right) < len(found) else "not sorted"
        raise ValueError(f"{where}: the sizes {list(found)} are {what}. Write {right}.")
    return found


def _check_bounds(what: str, **bounds: object) -> None:
    """Each bound is an int from 1, and not above the next."""
    before, least = "", 1
    for name, bound in bounds.items():
        if not isinstance(bound, int) or isinstance(bound, bool):
            raise TypeError(f"Bucket.{what}: {name} must be an int, not {bound!r}.")
        if bound < least:
            reason = f"{before}={least}" if before else "1"
            raise ValueError(f"Bucket.{what}: {name}={bound} is below {reason}. Write a larger {name}.")
        before, least = name, bound


def _shown(sizes: tuple[int, ...]) -> str:
    """Sizes as code: a list, or a range where that is shorter."""
    steps = range(sizes[0], sizes[-1] + 1, max(1, sizes[-1] - sizes[-2])) if len(sizes) > _LONG else ()
    return repr(steps) if tuple(steps) == sizes else f"{list(sizes)}"


def _powers(low: int, high: int) -> list[int]:
    first, last = (low - 1).bit_length(), high.bit_length()
    return [1 << exponent for exponent in range(first, last)]


def _decode_sizes(largest: int) -> list[int]:
    sizes = [size for size in (1, 2, 4) if size < largest]
    size = 8
    while size < largest:
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += max(8, octave // 16)
    return [*sizes, largest]
