"""Capturing before calls come: one bucket or all of them, without trace, and what all of them would cost."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._ambient import dispatch_modes
from ._collection import uncollected
from ._entries import Entries
from ._entry import Entry, Table
from ._graph import Call
from ._instances import graphs_of
from ._layout import family_key
from ._life import Life
from ._options import off_everywhere
from ._rehearsal import rehearse
from ._sized import Sized
from ._sizes import Sizes
from ._specification import same_path
from ._trust import UNTRIED
from ._watch import Watch
from .errors import CaptureError, GraphifyError
from .stats import BucketRecord, CapturedBuckets

__all__ = ["capture_all", "capture_one", "estimated", "largest_two", "may_capture", "static_input"]

_ALIKE = "not all rows of the example differ from their padding: the first call where they do proves it"
_LEAST = 2**20
"""What a graph takes of a device even where the pool does not grow, in bytes."""

_PLAIN = "calls there run the plain function, and a capture would show in what {} sees"
_NOT_NOW = {
    "disabled": (
        "while graphs are off",
        "`with disabled():` makes every call a plain one",
        "capture outside of it",
    ),
    "compiling": (
        "inside `torch.compile` or another tracer",
        "a trace holds the plain function, and no graph",
        "capture before the traced code runs",
    ),
    "functorch": (
        "inside a `torch.func` transform",
        "its tensors are the transform's own, and calls with them run the plain function",
        "capture outside of it, with plain tensors",
    ),
    "mode": ("under a mode", _PLAIN.format("the mode"), "capture outside of the mode"),
    "forward_ad": ("inside forward-mode autograd", _PLAIN.format("autograd"), "capture outside of it"),
    "anomaly": ("under anomaly detection", _PLAIN.format("it"), "capture before `detect_anomaly`"),
    "hooks": ("under hooks on saved tensors", _PLAIN.format("a hook"), "capture outside of the hooks"),
    "nested": (
        "inside another capture, or a warm-up before one",
        "one thread captures one graph at a time",
        "capture it first",
    ),
}

_compiler = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
"""What Dynamo has between two of its graphs, where Python runs as it is written; nothing elsewhere."""


def may_capture(life: Life, off: str | None, what: str) -> bool:
    """Whether there is anything to do: where the environment turns all graphs off, there is not, which is said once.

    `off` is why a call here would be a plain one.

    Raises:
        CaptureError: just here, calls run the plain function.
    """
    if off in (None, "nested") and _compiler():
        off = "compiling"
    if off == "mode" and any(isinstance(mode, Watch) for mode in dispatch_modes()):
        off = "nested"
    if off is None:
        return True
    if off == "disabled" and off_everywhere():
        life.plain.say("everywhere", "captures nothing ahead of time: GRAPHIFY_DISABLE is set")
        return False
    where, why, fix = _NOT_NOW[off]
    raise CaptureError(f"`{what}` of `{life.setting.name}` {where}", why=why, fix=fix)


def capture_one(
    life: Life,
    ways: Life | Sizes,
    table: Table,
    key: Any,
    tensors: tuple[Tensor, ...],
    values: tuple[Any, ...],
) -> Entry:
    """Record the graph of one signature, or of its bucket, without trace.

    Raises:
        CaptureError, InputError, PaddingError: why it cannot be.
    """
    call = Call(table.tree, values, tensors)
    with life.setting.pool.lock:
        entry = ways.find(table, key, tensors, values)
        if isinstance(entry, Sized) and isinstance(ways, Sizes):
            entry = ways.rehearse(entry, call)
        elif entry.graph is None and entry.refusal is None:
            rehearse(life.recorder, entry, call, blank=False)
    if entry.graph is None:
        raise _not_captured(life.setting.name, entry)
    return entry


def _not_captured(name: str, entry: Entry) -> Exception:
    refusal = entry.refusal
    assert refusal is not None, "what has no graph was refused one"
    return refusal.error or GraphifyError(
        f"`{name}` was not captured ({refusal.reason}): {refusal.advice or 'see stats()'}"
    )


def capture_all(
    life: Life,
    sizes: Sizes,
    table: Table,
    key: Any,
    tensors: tuple[Tensor, ...],
    values: tuple[Any, ...],
    *,
    grid: Sequence[tuple[int, ...]],
    progress: bool,
) -> CapturedBuckets:
    """Record the graphs of these buckets from one example, in this order."""
    call, made, axes = Call(table.tree, values, tensors), [], sizes.axes_of(table, tensors)
    with life.setting.pool.lock, uncollected(), sizes.in_a_row():
        for full in _shown(grid, life.setting.name, progress):
            started = time.perf_counter()
            entry = sizes.rehearse(sizes.at(table, key, tensors, full), call)
            graph = entry.graph
            if graph is None:
                raise _not_captured(life.setting.name, entry)
            names = {bucket.name: size for bucket, size in zip(axes.buckets, full, strict=True)}
            seconds = time.perf_counter() - started
            made.append(BucketRecord(names, seconds, graph.bytes, graph.nodes, _unproved(entry)))
        life.setting.backend.reclaim()
    return CapturedBuckets(life.setting.name, tuple(made))


def _unproved(bucket: Entry) -> str:
    """Why the padding of a bucket was not compared with eager; empty when it was."""
    if bucket.proof is not None:
        return str(bucket.proof.said) or (_ALIKE if bucket.proof.untold else "")
    if bucket.large:
        return UNTRIED
    return "the example fills it: the first call that is padded proves it"


def largest_two(grid: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The two buckets with the most elements."""
    found = iter(grid)
    return [full for full, _ in zip(found, range(2), strict=False)]


def estimated(captured: CapturedBuckets, count: int) -> int:
    """Bytes of `count` buckets of one pool, from the two largest: each smaller one adds at most what the second did."""
    first, *rest = [bucket.bytes for bucket in captured.buckets]
    return max(first, _LEAST) + (count - 1) * max([*rest, _LEAST])


def static_input(entries: Entries, name: str) -> Tensor:
    """The static input of one argument, the largest where buckets share its memory."""
    path, found, names = same_path(name), dict[int, Tensor](), set[str]()
    for entry in entries.ready:
        names.update(entry.tree.tensor_paths)
        for graph in graphs_of(entry.graph):
            for leaf, static in zip(
                map(same_path, entry.tree.tensor_paths), graph.inputs.tensors, strict=True
            ):
                known = found.get(family_key(static))
                if leaf == path and (known is None or known.numel() < static.numel()):
                    found[family_key(static)] = static
    if len(found) != 1:
        what, known_names = f"{len(found) or 'no'} static inputs", ", ".join(sorted(names)) or "nothing yet"
        raise ValueError(
            f"buffer: `{entries.setting.name}` has {what} for {name!r}; captured are: {known_names}"
        )
    entries.lend_input(path)
    return next(iter(found.values())).detach()


def _shown(grid: Sequence[tuple[int, ...]], name: str, progress: bool) -> Iterable[tuple[int, ...]]:
    """The buckets, behind a progress bar where tqdm is installed."""
    if not progress:
        return grid
    try:
        bar: Any = importlib.import_module("tqdm")
    except ImportError:
        return grid
    shown: Iterable[tuple[int, ...]] = bar.tqdm(grid, desc=f"capturing {name}", unit="bucket")
    return shown
