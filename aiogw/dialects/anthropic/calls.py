"""The tool calls of one stream: which call a piece belongs to, and when its arguments are complete; writes nothing."""

from __future__ import annotations

import re

from aiogw.dialects.anthropic import chat

# From inside a string: up to its closing quote, or all there is.  Possessive: linear, whatever it holds.
_IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_STRUCTURE = re.compile(r'["{}\[\]]')

# The place of a legacy ``function_call`` among calls with an index.
_LEGACY_INDEX = -1


class JSONScan:
    """Sees where one JSON value ends, piece by piece, at linear cost: depth and strings, no grammar.

    A bare number, ``true`` or ``null`` is never known to be complete.
    """

    def __init__(self) -> None:
        self.complete = False
        self._bare = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._begun = False

    def feed(self, piece: str) -> None:
        position = 0
        if not self._begun:
            position = len(piece) - len(piece.lstrip())
            if position == len(piece):
                return
            self._begun = True
            self._bare = piece[position] not in '"{['
        if self._bare:
            return
        while position < len(piece) and not self.complete:
            if self._in_string:
                position = self._skip_string(piece, position)
                continue
            match = _STRUCTURE.search(piece, position)
            if match is None:
                return
            position = match.end()
            mark = match[0]
            if mark == '"':
                self._in_string = True
            elif mark in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                self.complete = self._depth == 0

    def _skip_string(self, piece: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        match = _IN_STRING.match(piece, position)
        end = match.end() if match else position
        if end == len(piece):
            return end
        if piece[end] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.complete = self._depth == 0
        return end + 1


class Call:
    """One tool call as far as it has come.  ``pieces`` are arguments that could not be written yet."""

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.id: str | None = None
        self.name: str | None = None
        self.pieces: list[str] = []
        self.scan = JSONScan()
        self.blank = True
        self.begun = False
        self.closed = False

    @property
    def complete(self) -> bool:
        """No arguments at all mean an empty object."""
        return self.blank or self.scan.complete

    def take(self, arguments: str) -> None:
        self.scan.feed(arguments)
        if self.blank and not arguments.isspace():
            self.blank = False


class CallTable:
    """The calls of one response in order of their first appearance."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._by_index: dict[int, Call] = {}
        self._by_id: dict[str, Call] = {}
        self._last: Call | None = None

    def find(self, piece: chat.ToolCall, arguments: str) -> Call:
        """The call of ``piece``, a new one where it is the first: by index, else by id, else the last one."""
        name = piece.function.name if piece.function is not None else None
        call = self._known(piece, name, arguments)
        if call is None:
            call = Call(piece.index)
            self.calls.append(call)
        if call.id is None and piece.id:
            call.id = piece.id
            self._by_id[piece.id] = call
        if call.name is None and name:
            call.name = name
        if piece.index is not None:
            self._by_index[piece.index] = call
        self._last = call
        return call

    def find_legacy(self, function: chat.Function, arguments: str) -> Call:
        return self.find(chat.ToolCall(index=_LEGACY_INDEX, function=function), arguments)

    def _known(self, piece: chat.ToolCall, name: str | None, arguments: str) -> Call | None:
        last = self._last
        if piece.index is not None:
            call = self._by_index.get(piece.index)
            if call is None and last is not None and last.index is None and not piece.id and not name:
                # Only its first piece lacked the index (AstrBot#6661).
                return last
            if call is not None and name and piece.id and call.id and piece.id != call.id:
                # Two calls that share an index (ollama#14816).
                return None
            return call
        if piece.id:
            return self._by_id.get(piece.id)
        if last is not None and name and last.scan.complete and arguments.strip():
            # Neither index nor id, and what came before is whole: another call.
            return None
        return last
