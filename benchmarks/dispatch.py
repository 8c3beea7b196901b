"""CPU time until a call returns, wall time and latency, beside eager and hand-written graphs.

python -m benchmarks.dispatch                # on a GPU: the tables
python -m benchmarks.dispatch --out notes    # and a dated file of them
python -m benchmarks.dispatch --rounds 1 --calls 3    # on a CPU: only that it runs
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from graphify import handle

from ._cases import Case, Way, all_cases, ways_of
from ._clocks import Clocks, timed
from ._steps import breakdown

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the result file if asked for."""
    options = _parser().parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    lines = list(_report(device, options.rounds, options.calls))
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        today = datetime.now(tz=timezone.utc)
        path = options.out / f"dispatch_{_slug(_hardware(device))}_{today:%Y-%m-%d}.md"
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        sys.stdout.write(f"written to {path}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dispatch", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds whose median is shown (default 7)")
    parser.add_argument("--calls", type=int, default=300, help="calls per round (default 300)")
    parser.add_argument("--out", type=Path, help="folder for a dated result file")
    return parser


def _report(device: torch.device, rounds: int, number: int) -> Iterator[str]:
    yield "# Dispatch: what a call costs"
    yield ""
    yield from _circumstances(device, rounds, number)
    with torch.inference_mode(False), torch.no_grad():
        for case in all_cases(device):
            ways = ways_of(case, device)
            _check(case, ways)
            clocks = timed([way.call for way in ways], case.inputs, rounds=rounds, number=number)
            yield from _table(case, ways, clocks)
            for way in ways:
                if way.graphed is not None:
                    _check_replayed(way)
                    yield from _breakdown(case, way, rounds, number)


def _circumstances(device: torch.device, rounds: int, number: int) -> Iterator[str]:
    yield f"- hardware: {_hardware(device)}, {platform.machine()}"
    yield f"- versions: torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    yield f"- command: python -m benchmarks.dispatch --rounds {rounds} --calls {number}"
    yield f"- medians of {rounds} rounds of {number} calls, the ways by turns, a fresh input each call; us"
    if device.type != "cuda":
        yield "- no GPU: this is the tape, which shows that the benchmark runs and says nothing about speed"


def _check(case: Case, ways: Sequence[Way]) -> None:
    """Every way must give eager's numbers, or its time means nothing."""
    for args in case.inputs:
        expected = case.net(*args)
        for way in ways:
            got = way.call(*args)
            if way.name != "raw replay" and not torch.equal(got, expected):
                raise SystemExit(f"{case.name}: {way.name} differs from eager")


def _check_replayed(way: Way) -> None:
    stats = handle(way.graphed).stats()
    if (stats.warmups, stats.captures, stats.eager, stats.errors) != (1, 1, 0, 0):
        raise SystemExit(f"{way.name} did not replay: {stats}")


def _table(case: Case, ways: Sequence[Way], clocks: Sequence[Clocks]) -> Iterator[str]:
    by_name = {way.name: time for way, time in zip(ways, clocks, strict=True)}
    yield ""
    yield f"## {case.name}"
    yield ""
    yield "| way | dispatch | wall | latency | dispatch / hand-written | wall / raw replay | eager wall / wall |"
    yield "|---|---|---|---|---|---|---|"
    for way, time in zip(ways, clocks, strict=True):
        rival = by_name.get("hand-written static" if "static" in way.name else "hand-written fresh")
        raw, eager = by_name.get("raw replay"), by_name["eager"]
        ratios = [
            _ratio(time.dispatch, rival.dispatch if rival else None),
            _ratio(time.wall, raw.wall if raw else None),
            _ratio(eager.wall, time.wall),
        ]
        yield f"| {way.name} | {time.dispatch:.1f} | {time.wall:.1f} | {time.latency:.1f} | {' | '.join(ratios)} |"


def _breakdown(case: Case, way: Way, rounds: int, number: int) -> Iterator[str]:
    yield ""
    yield f"{way.name}, step by step:"
    yield ""
    yield "| step | us |"
    yield "|---|---|"
    for name, time in breakdown(way.graphed, case.inputs[0], rounds=rounds, number=number):
        yield f"| {name} | {time:.2f} |"


def _ratio(time: float, other: float | None) -> str:
    return "" if other is None else f"{time / other:.2f}x"


def _hardware(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.processor()}".strip()
    )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    raise SystemExit(main())
