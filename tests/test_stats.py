"""The record of calls and the report for people."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from graphify.stats import GraphRecord, Stats, report


def test_report() -> None:
    """Counts that are not zero, reasons by count, one line per graph; MiB and us."""
    reasons = Counter({"disabled": 1, "host read in f.py:3": 2})
    stats = Stats(
        calls=15, warmups=2, captures=2, replays=8, eager=3, recordings=3, evictions=1, reasons=reasons
    )
    graphs = [
        GraphRecord("x: (8, 128) float32", 7, 24, 3 * 2**20, 0.00125),
        GraphRecord("x: (16, 128) float32, mode='b'", 1, 1024, 2**19, 0.0123456, ("table", "cache.k")),
    ]

    assert report("decode", stats, graphs).splitlines() == [
        "decode: 15 calls = 2 warmups, 2 captures, 8 replays, 3 eager",
        "  3 recordings, 1 eviction",
        "  eager, 2x: host read in f.py:3",
        "  eager, 1x: disabled",
        "  replays  nodes  MiB  capture us  signature",
        "        7     24  3.0        1250  x: (8, 128) float32",
        "        1   1024  0.5       12346  x: (16, 128) float32, mode='b'",
        "    not guarded: table, cache.k",
    ]


def test_report_of_nothing() -> None:
    """Before the first call there is little to say, and it is said."""
    assert report("f", Stats(), []).splitlines() == [
        "f: 0 calls",
        "  0 recordings, 0 evictions",
        "  no graphs",
    ]


def test_report_says_one_call() -> None:
    """One is not many."""
    assert report("f", Stats(calls=1, warmups=1), []).startswith("f: 1 call = 1 warmup\n")


def test_a_reason_of_several_lines_stays_below_its_count() -> None:
    """The lines of a capture error are indented as one block."""
    stats = Stats(calls=1, eager=1, reasons=Counter({"x.item()\n  where: f.py:3": 1}))

    assert report("f", stats, []).splitlines()[2:4] == ["  eager, 1x: x.item()", "      where: f.py:3"]


def test_each_unguarded_line_follows_its_graph() -> None:
    """What is not guarded stands below the graph that it belongs to."""
    graphs = [GraphRecord(name, 0, 0, 0, 0.0, (f"{name}.w",)) for name in ("a", "b")]
    lines = report("f", Stats(), graphs).splitlines()

    assert [line.split()[-1] for line in lines[3:]] == ["a", "a.w", "b", "b.w"]


def test_stats_count_from_zero_and_are_their_own() -> None:
    """Every count starts at zero, and no two records share their reasons."""
    one, other = Stats(), Stats()
    one.reasons["disabled"] += 1

    assert dataclasses.asdict(other) == dict.fromkeys(
        ("calls", "warmups", "captures", "replays", "eager", "errors", "recordings", "evictions"), 0
    ) | {"reasons": Counter()}


def test_a_graph_record_is_frozen() -> None:
    """A record says how things stood; nobody can change it."""
    record = GraphRecord("x", 1, 2, 3, 4.0)

    with pytest.raises(dataclasses.FrozenInstanceError):
        record.replays = 2  # type: ignore[misc]
