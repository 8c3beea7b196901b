"""The README and the examples do what they say: their code runs, on the tape where there is no GPU."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checks import python

import graphify
import graphify.testing  # before `graphify()` is replaced below, so that it keeps the real one
from graphify._options import Options
from graphify.backends import cuda
from graphify.errors import CaptureError

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Line number and source of each Python block, in the order of reading."""
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start(1)), found[1]


def run(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run all blocks as one program; errors carry the README's line numbers."""
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    for lines_above, source in blocks(text):
        code = compile("\n" * lines_above + source, str(README), "exec", dont_inherit=True)
        exec(code, module.__dict__)
    return module.__dict__


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`graphify()` takes the tape where no backend is named; gives all that was graphed."""
    plain, made = graphify.graphify, []

    def on_tape(target: Any = None, /, **options: Any) -> Any:
        options.setdefault("backend", "tape")
        if target is None:
            return lambda real: on_tape(real, **options)
        made.append(plain(target, **options))
        return made[-1]

    monkeypatch.setattr(graphify, "graphify", on_tape)
    return made


def test_the_readme_runs_on_the_tape(
    taped: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks run, calls are replays where the text says so, and the error shows the README's own line."""
    monkeypatch.delenv("GRAPHIFY_DISABLE", raising=False)
    names = run(README.read_text(encoding="utf-8"), monkeypatch)

    stats = graphify.handle(names["model"]).stats()
    assert (stats.warmups, stats.captures, stats.replays, stats.eager) == (1, 1, 8, 1)
    assert names["score"].stats().replays == 2
    assert graphify.handle(names["two"].step).stats().replays == 2
    assert names["write"].stats().replays == 3
    assert names["clamp_on_device"].stats().replays == 1
    assert isinstance(names["result"], names["Scores"])
    assert names["step"].stats().replays == 1
    assert len(taped) == 18
    for name, graphs, replays in (
        ("classify", 2, 4),
        ("encode", 1, 1),
        ("centred_live", 1, 2),
        ("decode", 4, 3),
        ("anything", 5, 47),
    ):
        stats = graphify.handle(names[name]).stats()
        assert (stats.recordings, stats.replays) == (graphs, replays), name
    for name in ("trained", "train_step", "mixed"):
        assert graphify.handle(names[name]).stats().replays >= 2, name
    line = next(n for n, text in enumerate(README.read_text().splitlines(), 1) if "if x.max() > 1:" in text)
    assert f"README.md:{line}" in capsys.readouterr().out


@pytest.mark.skipif(not cuda.available(), reason="no CUDA device")
@pytest.mark.cuda
def test_the_readme_runs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks run as they stand."""
    names = run(README.read_text(encoding="utf-8"), monkeypatch)

    assert graphify.handle(names["model"]).stats().replays == 8


def test_the_readme_runs_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks run without any option changed, whatever device there is."""
    run(README.read_text(encoding="utf-8"), monkeypatch)


def test_a_broken_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner above fails where a block fails, at the block's own line."""
    with pytest.raises(ZeroDivisionError) as raised:
        run("title\n\n```python\nx = 1\n```\ntext\n```python\nx / 0\n```\n", monkeypatch)

    assert raised.traceback[-1].lineno + 1 == 8


def test_code_comes_early() -> None:
    """The one line that matters stands within the first ten."""
    assert "graphify(" in "\n".join(README.read_text(encoding="utf-8").splitlines()[:10])


def test_both_set_up_commands_are_there() -> None:
    """A reader can copy the two commands, and the test runner of the project runs the second one."""
    text = README.read_text(encoding="utf-8")
    test_command = 'pip install -e ".[dev]" && pytest'

    assert "pip install -e . && python -m graphify demo" in text
    assert test_command in text
    assert test_command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_option_table_is_complete() -> None:
    """Each option of `graphify()` has its row with its default, and no row is about one that does not exist."""
    text = README.read_text(encoding="utf-8").partition("## Options")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", text, re.MULTILINE))

    assert rows == {
        field.name: repr(field.default).replace("'", '"') for field in dataclasses.fields(Options)
    }


def test_public_names_are_explained() -> None:
    """The README mentions each public callable, and only imports that exist."""
    text = README.read_text(encoding="utf-8")

    for name in (
        "graphify",
        "disabled",
        "handle",
        "Bucket",
        "GraphPool",
        "PaddingError",
        CaptureError.__name__,
    ):
        assert name in text
    for module, names in re.findall(r"^from (graphify\S*) import (.+)$", text, re.MULTILINE):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_check_themselves(example: Path) -> None:
    """Each example runs, on whatever device there is, and says what it found equal."""
    done = python(str(example))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "equalled eager" in done.stdout


def test_there_are_examples() -> None:
    """The quickstart, both ways to train and the buckets are among them."""
    assert {"quickstart", "train_module", "train_step", "buckets"} <= {path.stem for path in EXAMPLES}
