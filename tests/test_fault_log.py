"""The log of faults that others have reported: each of its rows is named by a test, in its docstring or in a comment.

``python tests/test_fault_log.py`` prints which test holds which row.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

# Section 4 of the notes on reliability.
ROWS = tuple(f"R{number:02}" for number in range(1, 70))

_ID = re.compile(r"\bR(\d\d)\b")


def said(source: str) -> Mapping[str, str]:
    """What each test of a file says of itself: its docstring, and the comments on it."""
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            comments = [line.strip() for line in lines[node.lineno - 1 : node.end_lineno] if line.strip()[:1] == "#"]
            found[node.name] = "\n".join([ast.get_docstring(node) or "", *comments])
    return found


@functools.cache
def holders() -> Mapping[str, Sequence[str]]:
    """The tests of each row."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        if path == Path(__file__):
            continue
        for name, text in said(path.read_text()).items():
            for row in {f"R{number}" for number in _ID.findall(text)}:
                found[row].append(f"{path.relative_to(TESTS)}::{name}")
    return found


def table() -> str:
    lines = []
    for row in ROWS:
        tests = holders().get(row) or ["held by no test"]
        lines += [f"{row}  {tests[0]}", *(f"     {test}" for test in tests[1:])]
    return "\n".join(lines)


def test_every_row_has_a_test() -> None:
    """None is forgotten; the map is printed."""
    print(table())
    assert [] == [row for row in ROWS if not holders().get(row)]


def test_every_id_is_a_row() -> None:
    """A mistyped id would make its row look forgotten, or another's look held."""
    assert set(holders()) <= set(ROWS)


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        ('def test_x():\n    """R01, R2, R034, XR05: x of R06."""\n', {"01", "06"}),
        ('async def test_x():\n    """x"""\n    # R07\n    pass\n', {"07"}),
        ('def helper():\n    """R08"""\n', set()),
    ],
)
def test_how_rows_are_named(source: str, rows: set[str]) -> None:
    """By two digits, in what a test says of itself."""
    assert rows == {number for text in said(source).values() for number in _ID.findall(text)}


if __name__ == "__main__":
    print(table())
