"""Where each key and value of a TOML text stands, which tomllib does not tell; not a judge of TOML.

It reads only what tomllib has taken already, so whatever it meets is well-formed.
"""

from __future__ import annotations

import re
import tomllib

Key = tuple[str | int, ...]
"""The way to a value: names of tables and keys, and positions in arrays."""

_BETWEEN = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_NAME = re.compile(r'(?P<bare>[A-Za-z0-9_-]+)|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'')
# Up to two quotes may stand directly before the three that close.
_STRING = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"{3,5}|\'{3}[\s\S]*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'',
)
# A date and its time may have a space between them.
_SCALAR = re.compile(r"[^,\]}#\r\n]+")


class Positions:
    """Offsets become a line and a column, both from 1; a column is a character, not a byte."""

    def __init__(self, text: str) -> None:
        self._text = text
        # Of a table: its header, its brace, or the first mention that made it.
        self._values: dict[Key, int] = {(): len(text.rstrip())}
        self._names: dict[Key, int] = {}
        self._lengths: dict[Key, int] = {}
        self._document()

    def of(self, key: Key) -> tuple[int, int]:
        """Where the value at ``key`` begins; of one that is not there, where it is missing: its table, or the end."""
        while key not in self._values:
            key = key[:-1]
        return line_and_column(self._text, self._values[key])

    def of_name(self, key: Key) -> tuple[int, int]:
        """Where the last name of ``key`` stands."""
        return line_and_column(self._text, self._names[key]) if key in self._names else self.of(key)

    def _document(self) -> None:
        table: Key = ()
        at = self._skip(0)
        while at < len(self._text):
            if self._text[at] == "[":
                table, at = self._header(at)
            else:
                at = self._pair(table, at)
            at = self._skip(at)

    def _header(self, start: int) -> tuple[Key, int]:
        brackets = 2 if self._text.startswith("[[", start) else 1
        names, at = self._dotted(start + brackets)
        key: Key = ()
        for name, offset in names:
            if key in self._lengths:
                key = (*key, self._lengths[key] - 1)
            key = (*key, name)
            self._names.setdefault(key, offset)
            self._values.setdefault(key, start)
        if brackets == 2:
            self._lengths[key] = self._lengths.get(key, 0) + 1
            key = (*key, self._lengths[key] - 1)
        self._values[key] = start
        return key, at + brackets

    def _pair(self, table: Key, at: int) -> int:
        names, at = self._dotted(at)
        key = table
        for name, offset in names:
            key = (*key, name)
            self._names.setdefault(key, offset)
            self._values.setdefault(key, offset)
        return self._value(key, self._skip(at + 1))

    def _value(self, key: Key, at: int) -> int:
        """Returns where it ends, as all below."""
        self._values[key] = at
        opening = self._text[at]
        if opening in "\"'":
            return self._match(_STRING, at).end()
        if opening not in "[{":
            return self._match(_SCALAR, at).end()
        at = self._skip(at + 1)
        position = 0
        while self._text[at] not in "]}":
            at = self._pair(key, at) if opening == "{" else self._value((*key, position), at)
            position += 1
            at = self._skip(at)
            if self._text[at] == ",":
                at = self._skip(at + 1)
        return at + 1

    def _dotted(self, at: int) -> tuple[list[tuple[str, int]], int]:
        """The names of a dotted key, each with its offset, and where the key ends."""
        names: list[tuple[str, int]] = []
        while True:
            found = self._match(_NAME, self._skip(at))
            written = found[0]
            name = written if found["bare"] else tomllib.loads(f"name = {written}")["name"]
            names.append((name, found.start()))
            at = self._skip(found.end())
            if self._text[at] != ".":
                return names, at
            at += 1

    def _skip(self, at: int) -> int:
        return self._match(_BETWEEN, at).end()

    def _match(self, pattern: re.Pattern[str], at: int) -> re.Match[str]:
        found = pattern.match(self._text, at)
        assert found is not None, "not what tomllib takes"
        return found


_REASON = re.compile(r"(?P<reason>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)", re.DOTALL)


# What tomllib says, by how it begins, and what it means.
_WORDS = (
    ("Invalid statement", "expected a key or a [table]"),
    ("Expected '='", "expected = after a key"),
    ("Expected ']'", "expected ] after the name of a table"),
    ("Expected ']]'", "expected ]] after the name of an array of tables"),
    (
        "Invalid initial character for a key part",
        "expected the name of a key, in quotes if it has more than A-Z a-z 0-9 _ -",
    ),
    ("Invalid value", 'expected a value: a "string", a number, true, false, an [array] or a {table}'),
    ("Expected newline or end of document", "expected the end of the line"),
    ("Unclosed array", "expected , or ] in an array"),
    ("Unclosed inline table", "expected , or } in a table, which has to end on its line"),
    ("Unterminated string", "a string does not end"),
    ("Expected \"'", "a string does not end"),
    ("Illegal character '\\n'", "a string does not end on its line"),
    ("Illegal character", "a control character"),
    ("Found invalid character", "a control character"),
    ("Cannot overwrite a value", "this key has a value already"),
    ("Duplicate inline table key", "this key has a value already"),
    ("Cannot declare", "this table is there already"),
    ("Cannot redefine", "this table is there already"),
    ("Cannot mutate", "a table in { } or an array in [ ] cannot be added to"),
    ("Unescaped '\\'", "\\ begins an escape, and this is none; expected \\\\, or the string in single quotes"),
    ("Invalid hex value", "the digits of an escape are missing"),
    ("Escaped character", "the escape of no character"),
    ("Invalid date", "no such date or time"),
    ("Exceeds the limit", "a number of too many digits"),
    ("maximum recursion depth", "arrays or tables too deep in each other"),
)


def of_syntax_error(text: str, error: ValueError | RecursionError) -> tuple[str, tuple[int, int] | None]:
    """What is wrong with a text that is no TOML, and where it stops to be, if tomllib says that."""
    found = _REASON.fullmatch(str(error))
    if found is None:
        return _worded(str(error)), None
    if found["line"] is None:
        return _worded(found["reason"]), line_and_column(text, len(text.rstrip()))
    return _worded(found["reason"]), (int(found["line"]), int(found["column"]))


def _worded(reason: str) -> str:
    return next((words for begins, words in _WORDS if reason.startswith(begins)), reason)


def line_and_column(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)
