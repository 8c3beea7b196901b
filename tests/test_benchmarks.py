"""The benchmark command runs without a GPU, and its judgements are right; nothing here asserts a time."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checks import python
from torch import Tensor, nn

from benchmarks._captures import measure_captures
from benchmarks._case import Capture, Captures, Case, Costs, Ready, Row, Way
from benchmarks._clocks import Clocks
from benchmarks._measure import measure
from benchmarks._report import capture_table, case_table, target_tables
from benchmarks._targets import verdicts
from graphify import graphify

command = functools.partial(python, "-m", "benchmarks")
WAYS = {
    "mlp": ["eager", "graphify fresh", "graphify static"],
    "deep24": ["eager", "graphify fresh", "graphify static"],
    "multi8": ["eager", "graphify fresh", "graphify static"],
    "train": [f"{way}, {kind}" for way in ("eager", "graphify") for kind in ("hooks", "set to None", "kept")],
    "step": ["eager", "graphify fresh", "graphify static"],
    "buckets": ["eager", "eager, padded", "graphify fresh", "graphify static"],
}


def test_all_cases_run_and_a_dated_file_says_so(tmp_path: Path) -> None:
    """Each way of each case is timed, equals eager and was replayed; the file holds what was printed."""
    done = command("--rounds", "1", "--calls", "3", "--out", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"all_[a-z0-9-]+_\d{4}-\d\d-\d\d\.md", file.name)
    text = file.read_text(encoding="utf-8")
    assert done.stdout == f"{text}written to {file}\n"
    assert "--cases mlp,deep24,multi8,train,step,buckets --rounds 1 --calls 3" in text
    for key, ways in WAYS.items():
        table = text.partition(f"## {key}: ")[2].partition("\n## ")[0]
        timed = re.findall(r"^\| ([^|]+?) \| \d+\.\d \| \d+\.\d \| \d+\.\d \|", table, re.MULTILINE)
        assert set(ways) <= set(timed)
    made = re.findall(r"^\| (graphify, [^|]+?) \| (\d+) \| \d+\.\d \| 0\.0 \| 0\.0 \|", text, re.MULTILINE)
    largest, whole = ("graphify, largest bucket", "1"), ("graphify, all buckets", "4")
    assert made == [largest, whole, ("graphify, all buckets, proved", "4")]


def test_steps_of_a_call(tmp_path: Path) -> None:
    """`--steps` names the parts of a replayed call, and the file is named for its cases."""
    done = command("--cases", "mlp", "--rounds", "1", "--calls", "3", "--steps", "--out", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| whole call | ") == 2
    assert [path.name.partition("_")[0] for path in tmp_path.iterdir()] == ["inference"]


def test_a_wrong_case_is_named() -> None:
    """A case that does not exist is an error that lists those that do."""
    done = command("--cases", "mlp,huge")

    assert done.returncode == 2
    assert "no case 'huge'; there are mlp, deep24, multi8, train, step, buckets" in done.stderr


def case(*ways: Way) -> Case:
    net = nn.Linear(4, 4)
    inputs = [(torch.randn(2, 4),) for _ in range(16)]
    return Case("small", "a Linear", inputs, [Way("eager", lambda: Ready(net), mirrors=None), *ways])


def raises(message: str) -> Callable[..., Ready]:
    def build(*args: Tensor) -> Ready:
        raise RuntimeError(message)

    return build


def test_a_way_that_raises_costs_its_row_only() -> None:
    """It may raise when it is built, called or timed; the others are timed, and the table says what happened."""
    calls = iter(range(9))

    def late(x: Tensor) -> Tensor:
        next(calls)
        return x

    bad = case(
        Way("cannot be built", raises("no | luck\nat all")),
        Way("cannot be called", lambda: Ready(raises("not now"))),  # type: ignore[arg-type]
        Way("ends", lambda: Ready(late)),
    )
    rows = measure(bad, rounds=1, number=3)

    assert [row.way.name for row in rows if row.clocks is not None] == ["eager"]
    table = "\n".join(case_table(bad, rows))
    assert "| cannot be built | RuntimeError: no / luck at all |" in table
    assert "| cannot be called | RuntimeError: not now |" in table
    assert "| ends | StopIteration:" in table


def test_making_graphs_is_timed_and_what_fails_is_told() -> None:
    """Each way to make graphs has a row with its costs, or with what it raised; ratios are those to its rivals."""
    made = []
    ways = [Capture("small", 1, lambda: made.append(1)), Capture("none", 2, raises("no | memory"))]
    rows = measure_captures(ways, rounds=2)

    assert len(made) == 3, "memory once, time twice"
    costs = rows[0].costs
    assert costs is not None
    assert costs.capture > 0
    assert rows[1].costs is None
    rows.append(Row(rows[0].way._replace(name="big"), costs=Costs(costs.capture * 3, 8.0, 2.0)))
    rows[0].costs = costs._replace(pool=4.0)
    captures = Captures([*ways, Capture("big", 3, list)], time_rival="small", memory_rival="small")
    table = "\n".join(capture_table(case()._replace(captures=captures), rows))
    assert "| none | RuntimeError: no / memory |" in table
    assert re.search(
        r"^\| big \| 3 \| \d+\.\d \| 8\.0 \| 2\.0 \| 3\.00x \| 2\.00x \|  \|$", table, re.MULTILINE
    )


def test_wrong_numbers_are_noted() -> None:
    """A way whose result or gradient differs from eager's has a note; within its tolerance it has none."""
    unseen: list[list[Tensor | None]] = [[torch.ones(1)], [None]]
    bad = case(
        Way("zeros", lambda: Ready(torch.zeros_like)),
        Way("near", lambda: Ready(lambda x: x), mirrors="same"),
        Way("same", lambda: Ready(lambda x: x * 1.25, lambda: unseen[0]), mirrors=None),
        Way("lost", lambda: Ready(lambda x: x * 1.25, lambda: unseen[1]), mirrors="same"),
        Way("close", lambda: Ready(lambda x: x, lambda: unseen[0]), mirrors="same", tolerance=0.5),
    )
    notes = {row.way.name: row.note for row in measure(bad, rounds=1, number=3)}

    assert notes["zeros"] == "differs from eager, by 1.0e+00 of the largest number"
    assert notes["lost"] == "differs from eager, by inf of the largest number"
    assert notes["near"] == "not compared: same gave nothing"
    assert notes["eager"] == notes["close"] == ""


def test_calls_that_were_no_replays_are_noted() -> None:
    """A wrapper that ran eagerly or recorded while it was timed is not to be trusted."""
    sizes = iter(range(1, 1000))

    def eager() -> Ready:
        graphed = graphify(torch.relu, backend="auto")  # on a CPU: plain calls
        return Ready(graphed, graphed=graphed)

    def recorded() -> Ready:
        graphed = graphify(lambda x, n: x * 1, backend="tape", max_graphs=None)
        return Ready(lambda x: graphed(x, next(sizes) // 4), graphed=graphed)

    bad = case(Way("plain", eager, mirrors=None), Way("anew", recorded, mirrors=None))
    notes = {row.way.name: row.note for row in measure(bad, rounds=1, number=8)}

    assert notes["plain"].startswith("not replayed: ")
    assert notes["anew"].endswith(" recordings while it was timed")


def row(name: str, time: float, note: str = "") -> Row:
    return Row(Way(name, lambda: Ready(torch.relu)), clocks=Clocks(time, time, time), note=note)


@pytest.mark.parametrize(
    ("time", "note", "holds"), [(10.3, "", True), (10.31, "", False), (1.0, "differs", False)]
)
def test_a_target_holds_up_to_its_limit(time: float, note: str, holds: bool) -> None:
    """Target 6 allows 1.03 times the hand-written step, and no time counts of a way that has a note."""
    rows = [row("hand-written static", 10.0), row("graphify static", time, note)]
    judged = verdicts({"step": {one.way.name: one for one in rows}})

    (verdict,) = [one for one in judged if one.limit.target == 6 and one.limit.ours == "graphify static"]
    assert verdict.holds is holds
    assert all(one.holds is None for one in judged if one.limit.case != "step")


def test_costs_have_targets() -> None:
    """Target 8 allows 1.15 times the memory of the largest bucket, and 0.6 times the time of a loop by hand."""
    costs = {
        "graphify, largest bucket": Costs(5.0, 100.0, 100.0),
        "graphify, all buckets": Costs(60.0, 114.9, 115.1),
        "torch.cuda.graph, one pool": Costs(100.0, 115.0, 115.0),
    }
    rows = {name: Row(Way(name, lambda: Ready(torch.relu)), costs=one) for name, one in costs.items()}
    judged = [one for one in verdicts({"buckets": rows}) if one.limit.target == 8]

    assert {one.limit.clock: one.holds for one in judged} == {"pool": True, "device": False, "capture": True}


def test_targets_are_summed_up() -> None:
    """Each of the seven targets has its line, also where nothing was measured; guards and the best peer count."""
    rows = [row("hand-written fresh", 20.0), row("foreach fresh", 10.0), row("graphify fresh", 11.0)]
    multi8 = {one.way.name: one for one in rows}
    deep24 = {one.way.name: one for one in (row("hand-written static", 10.0), row("graphify static", 34.0))}
    text = "\n".join(target_tables({"multi8": multi8, "deep24": deep24}))

    assert "- target 1: holds: 1 of 1 limits hold, 7 not measured" in text
    assert "- target 5: not measured" in text
    assert (
        "| 1 | deep24, dispatch, graphify static | 1 x hand-written static + 24 = 34.0 | 34.0 | 3.40x | yes |"
        in text
    )
    assert (
        "| 3 | multi8, wall, graphify fresh | 1 x hand-written fresh or foreach fresh = 10.0 | 11.0 | 1.10x | no |"
        in text
    )
    assert "train" not in text
