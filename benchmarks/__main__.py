"""CPU time until a call returns, wall time and latency of graphify and of what people use instead.

python -m benchmarks                       # on a GPU: all cases, and which targets hold
python -m benchmarks --out notes           # and a dated file of them
python -m benchmarks --cases mlp --steps   # one case, and what a call spends where
python -m benchmarks --rounds 1 --calls 3  # on a CPU: only that it runs
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ._buckets import buckets
from ._captures import measure_captures
from ._case import Case, Row
from ._inference import deep24, mlp_case, multi8
from ._measure import measure
from ._report import capture_table, case_table, step_table, target_tables
from ._steps import breakdown
from ._training import train
from ._whole_step import step

__all__ = ["main"]

CASES = {
    "mlp": mlp_case,
    "deep24": deep24,
    "multi8": multi8,
    "train": train,
    "step": step,
    "buckets": buckets,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the result file if asked for; 1 if a graphed way failed or is not to be trusted."""
    options = _parser().parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    text: list[str] = []
    results: dict[str, dict[str, Row]] = {}
    _say(text, _circumstances(options, device))
    for key in options.cases:
        case = CASES[key](device, options.compile)
        rows = measure(case, rounds=options.rounds, number=options.calls)
        _say(text, case_table(case, rows))
        if options.steps and not case.grad:
            with torch.no_grad():
                _say(text, _steps(case, rows, options))
        if case.captures is not None:
            captured = measure_captures(case.captures.ways, rounds=options.rounds)
            _say(text, capture_table(case, captured))
            rows += captured
        results[key] = {row.way.name: row for row in rows}
    if device.type == "cuda":
        _say(text, target_tables(results))
    if options.out is not None:
        sys.stdout.write(f"written to {_write(text, options, device)}\n")
    return int(any(_failed(row) for rows in results.values() for row in rows.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cases",
        type=_cases,
        default=list(CASES),
        metavar="NAMES",
        help=f"which, with commas between (default {','.join(CASES)})",
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds whose median is shown (default 7)")
    parser.add_argument(
        "--calls", type=int, default=300, help="calls per round at most; slow ways make fewer (default 300)"
    )
    parser.add_argument("--steps", action="store_true", help="also time a replayed call step by step")
    parser.add_argument("--compile", action="store_true", help="also torch.compile; takes minutes")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for a dated result file")
    return parser


def _cases(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"no case {name!r}; there are {', '.join(CASES)}")
    return names


def _say(text: list[str], lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
        text.append(line)
    sys.stdout.flush()


def _circumstances(options: argparse.Namespace, device: torch.device) -> Iterator[str]:
    yield "# What a call costs"
    yield ""
    yield f"- hardware: {_hardware(device)}, {platform.machine()}"
    yield f"- versions: {', '.join(_versions())}"
    yield f"- command: {_command(options)}"
    yield (
        f"- medians of {options.rounds} rounds of up to {options.calls} calls, the ways by turns, a fresh input"
        " each call; us"
    )
    yield (
        "- dispatch: CPU time until the call returns; wall: time per call in a loop; latency: one call, waited for"
    )
    if device.type != "cuda":
        yield "- no GPU: this is the tape, which shows that the benchmark runs and says nothing about speed or targets"
    yield ""


def _versions() -> Iterator[str]:
    yield f"torch {torch.__version__}"
    yield f"CUDA {torch.version.cuda}"
    yield f"Python {platform.python_version()}"
    try:
        yield f"tensordict {version('tensordict')}"
    except PackageNotFoundError:
        yield "tensordict not installed"


def _command(options: argparse.Namespace) -> str:
    flags = [f"--{name}" for name in ("steps", "compile") if getattr(options, name)]
    numbers = ["--rounds", str(options.rounds), "--calls", str(options.calls)]
    return " ".join(["python -m benchmarks --cases", ",".join(options.cases), *numbers, *flags])


def _steps(case: Case, rows: Sequence[Row], options: argparse.Namespace) -> Iterator[str]:
    for row in rows:
        if row.ready is not None and row.ready.graphed is not None and row.clocks is not None:
            steps = breakdown(row.ready.graphed, case.inputs[0], rounds=options.rounds, number=options.calls)
            yield from step_table(row, steps)


def _write(text: Sequence[str], options: argparse.Namespace, device: torch.device) -> Path:
    training = {"train", "step"}
    chosen = set(options.cases)
    theme = "training" if chosen <= training else "all" if chosen & training else "inference"
    theme = "buckets" if chosen == {"buckets"} else theme
    today = datetime.now(tz=timezone.utc)
    path: Path = options.out / f"{theme}_{_slug(_hardware(device))}_{today:%Y-%m-%d}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def _failed(row: Row) -> bool:
    return row.way.name.startswith("graphify") and bool(row.problem or row.note)


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.processor()}".strip()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    raise SystemExit(main())
