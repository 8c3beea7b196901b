"""What happened to the calls of one callable, and the graphs that it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["BucketRecord", "CapturedBuckets", "GraphRecord", "Stats", "report"]

_MIB = 1024 * 1024


@dataclass(slots=True)
class Stats:
    """Counts of calls by how their result was made.

    `calls == warmups + captures + replays + eager + errors`, and `reasons` says why for every eager call.
    """

    calls: int = 0
    warmups: int = 0
    captures: int = 0
    replays: int = 0
    eager: int = 0
    errors: int = 0
    recordings: int = 0
    """Graphs recorded for whatever reason; a call may make none, one or several."""
    evictions: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One graph as it stands: sizes in bytes, times in seconds."""

    signature: str
    replays: int
    nodes: int
    bytes: int
    seconds: float
    unguarded: tuple[str, ...] = ()
    """Outside tensors that no place is known for: re-binding one of these goes unseen."""


@dataclass(frozen=True, slots=True)
class BucketRecord:
    """One bucket captured ahead of time: sizes by name, seconds, bytes that the pool grew by, nodes."""

    sizes: dict[str, int]
    seconds: float
    bytes: int
    nodes: int
    unproved: str = ""
    """Why its padding was not compared with eager yet; empty when it was."""


@dataclass(frozen=True, slots=True)
class CapturedBuckets:
    """What `capture_buckets` made; printing it gives a table."""

    name: str
    buckets: tuple[BucketRecord, ...]

    @property
    def seconds(self) -> float:
        """What all of it took."""
        return sum(bucket.seconds for bucket in self.buckets)

    @property
    def bytes(self) -> int:
        """Graph memory of all buckets."""
        return sum(bucket.bytes for bucket in self.buckets)

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {_many(len(self.buckets), 'bucket')}, {self.bytes / _MIB:.1f} MiB, {self.seconds:.2f} s"
        ]
        for bucket in self.buckets:
            sizes = ", ".join(f"{name} {size}" for name, size in bucket.sizes.items())
            said = f"  padding not compared: {bucket.unproved}" if bucket.unproved else ""
            lines.append(
                f"  {sizes}: {bucket.bytes / _MIB:.1f} MiB, {bucket.nodes} nodes, {bucket.seconds:.3f} s{said}"
            )
        return "\n".join(lines)


def report(name: str, stats: Stats, graphs: Sequence[GraphRecord]) -> str:
    """A table for people: the counts, why calls ran eagerly, and a line per graph.

    Memory is in MiB (2**20 bytes), capture time in us.
    """
    counts = [_many(getattr(stats, f"{noun}s"), noun) for noun in ("warmup", "capture", "replay", "error")]
    counts.insert(3, f"{stats.eager} eager")
    made = ", ".join(count for count in counts if not count.startswith("0 "))
    lines = [f"{name}: {_many(stats.calls, 'call')}" + (f" = {made}" if made else "")]
    lines.append(f"  {_many(stats.recordings, 'recording')}, {_many(stats.evictions, 'eviction')}")
    for reason, count in stats.reasons.most_common():
        lines.append(f"  eager, {count}x: " + reason.replace("\n", "\n    "))
    return "\n".join(lines + _table(graphs))


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _table(graphs: Sequence[GraphRecord]) -> list[str]:
    if not graphs:
        return ["  no graphs"]
    rows = [("replays", "nodes", "MiB", "capture us", "signature")]
    rows += [
        (str(g.replays), str(g.nodes), f"{g.bytes / _MIB:.1f}", f"{g.seconds * 1e6:.0f}", g.signature)
        for g in graphs
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  " + "  ".join([*(row[i].rjust(widths[i]) for i in range(4)), row[4]]) for row in rows]
    for index, graph in reversed(list(enumerate(graphs, start=1))):
        if graph.unguarded:
            lines.insert(index + 1, f"    not guarded: {', '.join(graph.unguarded)}")
    return lines
