"""The table of known faults in `tests/README.md` and the names of the tests say the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROW = re.compile(r"^\| ([BX]\d+) \| [^|]+ \| `(\w+)` \| `(\w+\.py)` \|$", re.MULTILINE)
NUMBERED = re.compile(r"test((?:_[bx]\d+)+)_")


def numbered() -> dict[str, dict[str, str]]:
    """For each case number the tests that have it in their name, and their files."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = NUMBERED.match(node.name) if isinstance(node, ast.FunctionDef) else None
            if named is not None and isinstance(node, ast.FunctionDef):
                for number in re.findall(r"[bx]\d+", named[1]):
                    found.setdefault(number.upper(), {})[node.name] = path.name
    return found


def faults(text: str, tests: dict[str, dict[str, str]]) -> list[str]:
    """What the table says and the tests do not, or the other way round."""
    rows = ROW.findall(text)
    listed = [number for number, *_ in rows]
    wrong = [f"{number}: twice in the table" for number in set(listed) if listed.count(number) > 1]
    wrong += [f"{number}: not in the table" for number in tests.keys() - listed]
    absent = [row for row in rows if tests.get(row[0], {}).get(row[1]) != row[2]]
    return wrong + [f"{number}: no {name} in {file}" for number, name, file in absent]


def test_the_table_and_the_tests_agree() -> None:
    """Each case number of the table is in the name of a test, each number in a name is in the table."""
    text = (TESTS / "README.md").read_text(encoding="utf-8")

    assert len(ROW.findall(text)) > 90
    assert faults(text, numbered()) == []


def test_what_does_not_agree_is_found() -> None:
    """A wrong name, file or number in the table is a fault."""
    tests = {
        "B01": {"test_b01_one": "test_a.py", "test_b01_two": "test_a.py"},
        "B02": {"test_b02": "test_a.py"},
    }
    right = "| B01 | x | `test_b01_one` | `test_a.py` |\n| B02 | y | `test_b02` | `test_a.py` |\n"

    assert faults(right, tests) == []
    assert faults(right.replace("`test_b02`", "`test_b2`"), tests) == ["B02: no test_b2 in test_a.py"]
    assert faults(right.replace("| `test_a.py` |\n| B02", "| `test_b.py` |\n| B02"), tests) == [
        "B01: no test_b01_one in test_b.py"
    ]
    assert faults(right.replace("B02", "B03"), tests) == [
        "B02: not in the table",
        "B03: no test_b02 in test_a.py",
    ]
    assert faults(right + right.splitlines()[1], tests) == ["B02: twice in the table"]
