"""Where keys and values of a TOML text stand: for every way TOML has of writing them, judged by tomllib itself."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogw.config.positions import Key, Positions, of_syntax_error

TEXTS = {
    "empty": "",
    "comment": "# [a]\n# b = 1",
    "bare": "a=1\n  b-c_9 =  2# 3\n\t1 = 3",
    "crlf": "a = 1\r\n[t]\r\n# c\r\nb = '''\r\nx\r\n'''\r\nc = 2\r\n",
    "quoted-keys": '"a.b" = 1\n\'c "d\' = 2\n"" = 3\n"\\u00e9\\"]=#" = 4\nü = 5'.replace("ü", '"ü"'),
    "dotted": 'a.b.c = 1\na . "x.y" . d = 2\na.b.e = 3\n[t]\nb.c = 4\nb.d.e = 5',
    "headers": "[a.b.c]\nx = 1\n[a]\ny = 2\n[ a . 'd' ]\nz = 3\n[\"\"]\nw = 4",
    "arrays-of-tables": "[[a]]\nx=1\n[[a]]\nx=2\n[[a.b]]\ny=3\n[[a.b]]\ny=4\n[a.c]\nz=5\n[[a]]\n[[a.b]]\ny=6",
    "arrays": "a = [ 1, # ]\n 2,\n [3, [4,],],\n]\nb=[]\nc = [[]]\nd = ['a,]', \"b#]\"]",
    "inline": "a = { b = 1, c.d = [ {e = 2}, {} ], 'f}' = '}' }\nb = {}\nc = [{x=1},{y={z=2}}]",
    "strings": (
        'a = "#\\"\'" # x\nb = \'\\\'\nc = """\n[x]\ny = 1 \\""" "" \\\\"""\nd = \'\'\'\n[z]\n\'\'\'\n'
        'e = """"two""""" # "\nf = \'\'\'\'two\'\'\'\'\'\ng = ""\nh = """"""\ni = \'\'\nj = \'\'\'\'\'\'\nk = 1'
    ),
    "scalars": (
        "a = 1979-05-27 07:32:00 # x\nb = [1979-05-27 07:32:00, 07:32:00]\nc = -1_000.5e+3\nd = 0xff\ne = true\n"
        "f = inf\ng = [-inf,+1]\nh = 1979-05-27T07:32:00.5-07:00"
    ),
    "wide": "é = 1\n".replace("é", '"é"') + 'b = "😀" # 😀\nc = ["é", "x"]',
}


def leaves(value: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every value in ``value`` with its key, tables and arrays included."""
    if key:
        yield key, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield from leaves(one, (*key, name))


def offset(text: str, place: tuple[int, int]) -> int:
    line, column = place
    return sum(len(one) + 1 for one in text.split("\n")[: line - 1]) + column - 1


def begins_with(text: str, value: Any) -> bool:
    """Whether some beginning of ``text`` is ``value`` to tomllib."""
    for end in range(1, len(text) + 1):
        try:
            found = tomllib.loads(f"x = {text[:end]}")["x"]
        except ValueError:
            continue
        if str(found) == str(value):
            return True
    return False


def check(text: str) -> None:
    document = tomllib.loads(text)
    positions = Positions(text)
    for key, value in leaves(document):
        at = text[offset(text, positions.of(key)) :]
        table = isinstance(value, dict) or (isinstance(value, list) and at.startswith("[["))
        if not table or at.startswith("{"):
            assert begins_with(at, value), (key, at[:20])
        else:
            assert at.startswith("[") or name_at(at) in key, (key, at[:20])
        if isinstance(key[-1], str):
            assert key[-1] == name_at(text[offset(text, positions.of_name(key)) :]), key


def name_at(text: str) -> str:
    found = re.match(r"""[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*'""", text)
    assert found
    (name,) = tomllib.loads(f"{found[0]} = 1")
    return name


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_way_of_writing(text: str) -> None:
    """Each key that tomllib finds is found where it is written."""
    check(text)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.sampled_from(["a", "b", "[c]", "d.e", "#"])
LEAVES = st.booleans() | st.integers(-(2**40), 2**40) | NAMES | st.text("\"'\\\n#[]{}=,", max_size=8) | st.datetimes()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=12
)


@settings(deadline=None, max_examples=300)
@given(document=st.dictionaries(NAMES, VALUES, max_size=4), multiline=st.booleans())
def test_every_document(document: dict[str, Any], multiline: bool) -> None:
    """The same of whatever tomli-w can write."""
    check(tomli_w.dumps(document, multiline_strings=multiline))


@pytest.mark.parametrize(
    ("text", "key", "place"),
    [
        ("", ("a",), (1, 1)),
        ("a = 1\n\n# end \n\n", ("b", "c"), (3, 6)),
        ("a = 1\n[t]\nb = 2\n[u]", ("t", "c"), (2, 1)),
        ("a = 1\n  [t.u]\n", ("t", "c"), (2, 3)),
        ("[t]\nx = { y = 1 }", ("t", "x", "z", "w"), (2, 5)),
        ("[t]\nx.y = 1", ("t", "x", "z"), (2, 1)),
        ("[[t]]\n[[t]]\n", ("t", 1, "z"), (2, 1)),
        ("[t.u]\n[t]\n", ("t", "c"), (2, 1)),
    ],
)
def test_what_is_missing_is_missing_in_its_table(text: str, key: Key, place: tuple[int, int]) -> None:
    """At the header or brace of the innermost table that is there; without one, at the end of what is written."""
    assert place == Positions(text).of(key) == Positions(text).of_name(key)


def test_depth_is_what_tomllib_can_take() -> None:
    """Nesting that tomllib takes does not end in a recursion here."""
    depth = 300
    check_depth = "a = " + "[" * depth + "]" * depth
    tomllib.loads(check_depth)
    assert (1, 5 + depth - 1) == Positions(check_depth).of(("a", *[0] * (depth - 1)))


# -- what is no TOML ------------------------------------------------------------------------------------------------

NOT_TOML = (
    *("a", "a b = 1", "[server", "listen = ", 'listen = "a', "listen = [1", "a = 1\na = 2", "[a]\n[a]", "a = {b=1"),
    *(
        "a = 1 b = 2",
        'a = "\\q"',
        'a = "x\n"',
        "[[a]",
        "a = 01",
        "a = yes",
        "= 1",
        "a.b = 1\na = 2",
        "a = {b=1}\n[a.c]",
    ),
    *(
        "a = {b=1,b=2}",
        'a = """x',
        "a = 'x",
        "a = 2020-13-01",
        'a = "\\uD800"',
        'a = "\\ud"',
        "a = [1 2]",
        "[]",
        "[a]]",
    ),
    *(
        "a: 1",
        "a = True",
        'a = "\x01"',
        "# \x01",
        "a = {\nb=1}",
        "a = {b=1}\na.c=2",
        "a=[]\n[[a]]",
        "[a]\n[[a]]",
        "a.b=1\n[a]",
    ),
    *("a = \u201cx\u201d", 'a = """\\\n\\d"""', "a = " + "1" * 5000, "a = " + "[" * 50_000),
)


@pytest.mark.parametrize("text", NOT_TOML, ids=lambda text: text[:16])
def test_what_is_no_toml_is_said_in_our_words(text: str) -> None:
    """None of the parser's own, which begin with a capital, speak of namespaces, and have a place of their own form."""
    with pytest.raises((ValueError, RecursionError)) as caught:
        tomllib.loads(text)
    reason, where = of_syntax_error(text, caught.value)
    assert not reason[0].isupper()
    assert "(at " not in reason
    assert str(caught.value).partition(" (at ")[0] != reason
    assert where is None or 1 <= where[0] <= 1 + text.count("\n")
