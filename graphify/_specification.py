"""The option `buckets` in each of its forms, checked at decoration, and the axes it means for one structure."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._axes import Axes, Dims, text_of
from .buckets import Bucket, unnamed
from .errors import InputError

__all__ = ["Specification", "longest", "path_of", "root_of", "same_path", "specification"]

_FORM = '{"x": {0: Bucket("batch", [1, 2, 4, 8])}}'
_DIMS = "a mapping from dimensions to Buckets such as {0: [1, 2, 4, 8]}"
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*|\[.+\])*")
_ROOT = re.compile(r"[^\W\d]\w*(?=$|[.\[])")


@dataclass(frozen=True)
class Specification:
    """Which dimensions of which arguments are bucketed sizes, whatever structure a call has.

    `table` has the Buckets by path of an argument or a leaf; the longest path that leads to a leaf is its own.
    `shared`, of the short form, is dimension 0 of every tensor argument. With `auto` nothing is declared.
    `static` arguments are never padded.
    """

    table: Mapping[str, Dims] = field(default_factory=dict)
    shared: Bucket | None = None
    auto: bool = False
    static: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """Code that gives this option again."""
        if self.auto:
            return 'buckets="auto"'
        return f"buckets={self.shared!r}" if self.shared is not None else text_of(self.table)

    def axes_of(self, paths: Sequence[str], ranks: Sequence[int]) -> Axes:
        """The bucketed sizes of tensors at these paths with that many dimensions each.

        Raises:
            InputError: a dimension that a tensor does not have, or that is two Buckets.
        """
        dims = {}
        for leaf, (path, rank) in enumerate(zip(paths, ranks, strict=True)):
            wanted = self._wanted(path, rank)
            if wanted is not None:
                dims[leaf] = _counted_from_zero(path, rank, wanted)
        return Axes(paths, ranks, dims, shorthand=self.shared is not None)

    def unused(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Paths of the option that lead to none of these tensors, as of an argument that is None."""
        used = {self._key(path) for path in paths}
        return tuple(key for key in self.table if key not in used)

    def _wanted(self, path: str, rank: int) -> Dims | None:
        if self.shared is None:
            key = self._key(path)
            return None if key is None else self.table[key]
        if root_of(path) in self.static:
            return None
        return {0: self.shared} if rank else {}

    def _key(self, path: str) -> str | None:
        return longest(self.table, path)


def longest(keys: Iterable[str], path: str) -> str | None:
    """The longest of these paths that leads to a leaf, or is it."""
    whole = same_path(path)
    fitting = [key for key in keys if whole.startswith(key) and whole[len(key) :][:1] in ("", "[", ".")]
    return max(fitting, key=len, default=None)


def root_of(path: str) -> str:
    """The argument that a path starts at."""
    found = _ROOT.match(path)
    return found.group() if found else path


def same_path(path: str) -> str:
    """One spelling of a path: `batch["ids"]` is `batch['ids']`."""
    try:
        return ast.unparse(ast.parse(path, mode="eval"))
    except (SyntaxError, ValueError):  # a key that prints as no code, such as an enum member
        return path


def path_of(option: str, key: object, names: Sequence[str], stars: str | None, form: str) -> str:
    """The path of the argument, or of the part of one, that a key of an option names.

    Raises:
        TypeError, ValueError: it names none, and the right form.
    """
    known = ", ".join(names) or "none"
    if not isinstance(key, str):
        raise TypeError(f"{option}: keys must be names of arguments ({known}), not {key!r}. Write {form}.")
    if not _PATH.fullmatch(key):
        raise ValueError(
            f'{option}: {key!r} is no argument or part of one. Write "x", "x[0]" or "x[\'ids\']".'
        )
    root = root_of(key)
    if root in names:
        return key
    if stars is None:
        raise ValueError(
            f"{option}: there is no argument `{root}`; the arguments are: {known}. Write one of them, as in {form}."
        )
    return f"{stars}[{root!r}]{key[len(root) :]}"


def _counted_from_zero(path: str, rank: int, wanted: Dims) -> Dims:
    found: dict[int, Bucket] = {}
    for dim, bucket in wanted.items():
        if not -rank <= dim < rank:
            has = f"has {rank} dimension{'s' * (rank != 1)}" if rank else "has no dimensions"
            right = f"a dimension from {-rank} to {rank - 1}" if rank else "no dimension"
            raise InputError(
                f"`{path}` {has}, but the option `buckets` names dimension {dim} of it."
                f' Write {right} for it: "{path}": {{{"0: ..." if rank else ""}}}.'
            )
        before = found.setdefault(dim % rank, bucket)
        if before != bucket:
            raise InputError(
                f"`{path}` has {rank} dimension{'s' * (rank != 1)}, so dimension {dim} is dimension {dim % rank},"
                f" which the option `buckets` makes both {before!r} and {bucket!r}. Write it once."
            )
    return found


# ---------------------------------------------------------------- reading the option


def specification(
    buckets: object, names: Sequence[str], *, stars: str | None = None, static: Collection[str] = ()
) -> Specification | None:
    """Read and check the option `buckets` of a callable; None for None.

        specification({"x": {0: batch}}, ("x", "mask"))

    `names` are the arguments, `stars` that of `**kwargs` among them (another name is then one of its keywords) and
    `static` those that are never padded.

    Raises:
        TypeError, ValueError: what is wrong at which argument, and the right form.
    """
    if buckets is None:
        return None
    if isinstance(buckets, str) and buckets == "auto":
        return Specification(auto=True, static=frozenset(static))
    if isinstance(buckets, Mapping):
        return Specification(_Reader(names, stars, static).table(buckets))
    if isinstance(buckets, (list, tuple, range)):
        if any(isinstance(size, (Bucket, Mapping)) for size in buckets):
            raise TypeError(f"buckets={buckets!r}: a bare list is a list of ints. Write buckets={_FORM}.")
        buckets = unnamed("dimension 0", buckets, f"buckets={buckets!r}")
    if isinstance(buckets, Bucket):
        return Specification(shared=buckets, static=frozenset(static))
    raise TypeError(
        'buckets must be None, "auto", a list of ints such as [1, 2, 4, 8], a Bucket'
        f" or a mapping such as {_FORM}, not {buckets!r}"
    )


class _Reader:
    """One walk over a mapping; collects the dimensions of each path."""

    def __init__(self, names: Sequence[str], stars: str | None, static: Collection[str]) -> None:
        self._names, self._stars, self._static = tuple(names), stars, static
        self._table: dict[str, Dims] = {}
        self._named: dict[str, tuple[Bucket, str]] = {}

    def table(self, option: Mapping[Any, Any]) -> Mapping[str, Dims]:
        for key, value in option.items():
            path = path_of("buckets", key, self._names, self._stars, _FORM)
            if root_of(key) in self._static:
                raise ValueError(
                    f"buckets: `{root_of(key)}` is one of `static_args`, which are never padded. Take it out of one of"
                    " them."
                )
            self._read(path, value)
        if not any(self._table.values()):
            raise ValueError(f"buckets={option!r} names no dimension. Write buckets=None or buckets={_FORM}.")
        return self._table

    def _read(self, path: str, value: object) -> None:
        """Dimensions of a path, or, as torch.export nests them, those of the items of a dict, a list or a tuple."""
        if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
            for key, item in value.items():
                self._read(f"{path}[{key!r}]", item)
        elif isinstance(value, (list, tuple)) and value and all(_is_nested(item) for item in value):
            for index, item in enumerate(value):
                self._read(f"{path}[{index}]", item)
        elif value is None or isinstance(value, Mapping):
            if same_path(path) in self._table:
                raise ValueError(
                    f"buckets: `{path}` is there twice. Write all its dimensions in one mapping."
                )
            dims = {dim: self._bucket(path, dim, sizes) for dim, sizes in (value or {}).items()}
            self._table[same_path(path)] = dims
        else:
            shown = value if isinstance(value, (Bucket, list, tuple, range)) else "[1, 2, 4, 8]"
            raise TypeError(
                f"buckets: `{path}` must have {_DIMS}, not {value!r}."
                f' Write {{"{path}": {{0: {shown!s}}}}} for its dimension 0.'
            )

    def _bucket(self, path: str, dim: object, sizes: object) -> Bucket:
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"buckets: the dimensions of `{path}` must be ints, not {dim!r}. Write {_DIMS}.")
        where = f'buckets={{"{path}": {{{dim}: {sizes!r}}}}}'
        if not isinstance(sizes, (Bucket, list, tuple, range)):
            raise TypeError(f"{where}: dimension {dim} of `{path}` must be a Bucket or a list of ints.")
        bucket = sizes if isinstance(sizes, Bucket) else unnamed(f"{path}.{dim}", sizes, where)
        before, there = self._named.setdefault(bucket.name, (bucket, f"dimension {dim} of `{path}`"))
        if before != bucket:
            raise ValueError(
                f"{where}: {there} is {before!r}, another Bucket of the same name."
                " Write one Bucket for both if they are one size, and two names if they are not."
            )
        return bucket


def _is_nested(value: object) -> bool:
    return value is None or isinstance(value, Mapping)
