"""Tables in Markdown: the ways of a case, the steps of a call, the targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ._case import Case, Row
from ._targets import NOT_HERE, Results, Verdict, verdicts

__all__ = ["capture_table", "case_table", "step_table", "target_tables"]


def case_table(case: Case, rows: Sequence[Row]) -> Iterator[str]:
    """A line per way: three clocks, and ratios to its rival, to the GPU's work alone and to eager."""
    by_name = {row.way.name: row for row in rows}
    yield f"## {case.key}: {case.title}"
    yield ""
    yield f"| way | dispatch | wall | latency | dispatch / rival | wall / rival | wall / {case.floor} | eager wall / wall |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield _line(case, row, by_name)
    yield ""
    notes = [f"- {row.way.name}: {row.note}" for row in rows if row.note]
    yield from [*notes, ""] if notes else ()


def _line(case: Case, row: Row, by_name: Mapping[str, Row]) -> str:
    if row.clocks is None:
        return f"| {row.way.name} | {row.problem.replace('|', '/')} | | | | | | |"
    rival, floor = by_name.get(row.way.rival), by_name.get(case.floor)
    name = row.way.name
    eager = by_name.get(row.way.mirrors or (name if name.startswith("eager") else "eager"))
    cells = [
        *(f"{time:.1f}" for time in row.clocks),
        _ratio(row, rival, "dispatch"),
        _ratio(row, rival, "wall"),
        _ratio(row, floor, "wall"),
        _ratio(eager, row, "wall"),
    ]
    return f"| {row.way.name} | {' | '.join(cells)} |"


def _ratio(row: Row | None, other: Row | None, clock: str) -> str:
    if row is None or other is None or row.clocks is None or other.clocks is None:
        return ""
    ratio: float = getattr(row.clocks, clock) / getattr(other.clocks, clock)
    return f"{ratio:.2f}x"


def capture_table(case: Case, rows: Sequence[Row]) -> Iterator[str]:
    """A line per way to make the graphs of a case: time, memory, and ratios to its rivals."""
    captures = case.captures
    assert captures is not None, "only a case with captures has rows of them"
    yield f"{case.key}, made ahead of time (ms; MiB that torch reserves, MiB that the device has less):"
    yield ""
    by_name = {row.way.name: row for row in rows}
    quick, small = captures.time_rival, captures.memory_rival
    yield f"| way | graphs | capture | pool | device | capture / {quick} | pool / {small} | device / {small} |"
    yield "|---|---|---|---|---|---|---|---|"
    for capture, row in zip(captures.ways, rows, strict=True):
        if row.costs is None:
            yield f"| {row.way.name} | {row.problem.replace('|', '/')} | | | | | | |"
            continue
        cells = [f"{number:.1f}" for number in row.costs]
        ratios = [_share(row, by_name.get(quick), "capture")]
        ratios += [_share(row, by_name.get(small), memory) for memory in ("pool", "device")]
        yield f"| {row.way.name} | {capture.graphs} | {' | '.join([*cells, *ratios])} |"
    yield ""


def _share(row: Row, other: Row | None, cost: str) -> str:
    if other is None or row.costs is None or other.costs is None or not getattr(other.costs, cost):
        return ""
    return f"{getattr(row.costs, cost) / getattr(other.costs, cost):.2f}x"


def step_table(row: Row, steps: Sequence[tuple[str, float]]) -> Iterator[str]:
    """What one replayed call spends where."""
    yield f"{row.way.name}, step by step:"
    yield ""
    yield "| step | us |"
    yield "|---|---|"
    for name, time in steps:
        yield f"| {name} | {time:.2f} |"
    yield ""


def target_tables(results: Results) -> Iterator[str]:
    """Each target in one line, then each limit with its figures."""
    judged = verdicts(results)
    yield "## Targets"
    yield ""
    for target in sorted({verdict.limit.target for verdict in judged}):
        yield f"- target {target}: {_summary([one for one in judged if one.limit.target == target])}"
    yield f"- target 3 has more nets: {NOT_HERE}"
    yield ""
    yield "| target | figure | at most | measured | measured / peer | holds |"
    yield "|---|---|---|---|---|---|"
    yield from (_target_line(verdict) for verdict in judged if verdict.limit.case in results)


def _summary(judged: Sequence[Verdict]) -> str:
    known = [verdict.holds for verdict in judged if verdict.holds is not None]
    if not known:
        return "not measured"
    unknown = len(judged) - len(known)
    rest = f", {unknown} not measured" if unknown else ""
    word = "holds" if all(known) else "missed"
    return f"{word}: {sum(known)} of {len(known)} limits hold{rest}"


def _target_line(verdict: Verdict) -> str:
    limit = verdict.limit
    rule = f"{limit.factor:.3g} x {' or '.join(limit.peers)}" + (f" + {limit.plus:g}" if limit.plus else "")
    most = rule if verdict.most is None else f"{rule} = {verdict.most:.1f}"
    ours = "" if verdict.ours is None else f"{verdict.ours:.1f}"
    both = verdict.ours is not None and verdict.peer is not None
    ratio = f"{verdict.ours / verdict.peer:.2f}x" if both else ""  # type: ignore[operator]
    said = {True: "yes", False: "no", None: "not measured"}[verdict.holds]
    note = " (see its note)" if verdict.note and verdict.holds is not None else ""
    figure = f"{limit.case}, {limit.clock}, {limit.ours}"
    return f"| {limit.target} | {figure} | {most} | {ours} | {ratio} | {said}{note} |"
