"""The rules of the dialects: each id is named by a test that holds it, in its docstring or in a comment."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

# Sections 1 to 5 of the notes on dialects: Q request, P whole answer, S stream, E error, O OpenAI surface, M models and
# counting.
RULES = """
    Q1-6 Q10-25 Q30-51 Q60-66 Q70-75
    P1-8 P3a P3b P3c P3d P3e
    S1-6 S10-33 S26a S40-46
    E1-20 E13a
    O1-16
    M1-4
"""

# Held by no test, and why.
ELSEWHERE = {
    "Q19": "a heading: thinking is Q70 to Q75",
    "Q20": "a heading: tools are Q60 to Q66",
    "E17": "keys of clients are a later issue; until then nobody is refused for one",
}

_ID = re.compile(r"\b([QPSEOM])(\d{1,2})(?:([a-e])|(?:-| to )\1?(\d{1,2}))?\b")


def ids(text: str) -> Iterator[str]:
    """The ids in ``text``; ``E1-9`` and ``E1 to E9`` are nine of them."""
    for letter, first, part, last in _ID.findall(text):
        if part:
            yield f"{letter}{first}{part}"
        else:
            yield from (f"{letter}{number}" for number in range(int(first), int(last or first) + 1))


def said(path: Path) -> Iterator[str]:
    """The docstrings of all functions in a file, and its comments."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@functools.cache
def named() -> frozenset[str]:
    files = [path for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    return frozenset(one for path in files for text in said(path) for one in ids(text))


def test_every_rule_has_a_test() -> None:
    """None is forgotten, apart from those that say why."""
    assert [] == [rule for rule in ids(RULES) if rule not in named() and rule not in ELSEWHERE]


def test_what_is_elsewhere_is_not_here() -> None:
    """A reason that no longer holds is taken away."""
    assert [] == [rule for rule in ELSEWHERE if rule in named()]
    assert set(ELSEWHERE) <= set(ids(RULES))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("S26a, S27: x", ["S26a", "S27"]),
        ("E1-E3 and E5 to E6, P3a.", ["E1", "E2", "E3", "E5", "E6", "P3a"]),
        ("Q10-12", ["Q10", "Q11", "Q12"]),
        ("UTF8, E402x, HTTP2, aO1, P4.3", ["P4"]),
    ],
)
def test_how_rules_are_named(text: str, expected: list[str]) -> None:
    """One by one, or from one to another."""
    assert expected == list(ids(text))


def test_all_of_them_are_meant() -> None:
    """The list is that of the notes."""
    assert 149 == len(set(ids(RULES)))
