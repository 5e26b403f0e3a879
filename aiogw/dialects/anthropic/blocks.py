"""The events of a Messages stream, one block open at a time; knows nothing of what an upstream sends.

The templates are bytes because this is the hot path: per delta only the text itself is encoded.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


class Kind(Enum):
    """Of a content block."""

    TEXT = "text"
    THINKING = "thinking"
    TOOL_USE = "tool_use"


PING = b'event: ping\ndata: {"type":"ping"}\n\n'
MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

_START = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b:'
_DELTA_END = b"}}\n\n"

_EMPTY_TEXT = b'{"type":"text","text":""}'
_EMPTY_THINKING = b'{"type":"thinking","thinking":"","signature":""}'

_DELTA_MEMBER = {
    Kind.TEXT: b'"text_delta","text"',
    Kind.THINKING: b'"thinking_delta","thinking"',
    Kind.TOOL_USE: b'"input_json_delta","partial_json"',
}
_SIGNATURE_MEMBER = b'"signature_delta","signature"'


def message_start(shown_id: str, model: str, usage: dict[str, Any]) -> bytes:
    message: dict[str, Any] = {
        "id": shown_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    return b'event: message_start\ndata: {"type":"message_start","message":%b}\n\n' % _encode(message)


def message_delta(stop_reason: str, stop_sequence: str | None, usage: dict[str, Any]) -> bytes:
    delta = _encode({"stop_reason": stop_reason, "stop_sequence": stop_sequence})
    return b'event: message_delta\ndata: {"type":"message_delta","delta":%b,"usage":%b}\n\n' % (delta, _encode(usage))


class BlockWriter:
    """Writes blocks in the order they are given, opening and closing as their kind changes.

    ``kind`` is that of the open block.  White space at the start of a text run is held back until there is more of it:
    models put line ends between their reasoning and their calls, and an empty text block confuses clients
    (litellm#34692).
    """

    def __init__(self, *, omit_thinking: bool) -> None:
        self.kind: Kind | None = None
        self._omit_thinking = omit_thinking
        self._pieces: list[bytes] = []
        self._index = -1
        self._prefix = b""
        self._held = ""
        self._any_text_or_tool = False
        self._thought = hashlib.sha256()

    def take(self) -> bytes:
        """What has been written since the last call."""
        pieces = self._pieces
        if len(pieces) == 1:
            return pieces.pop()
        out = b"".join(pieces)
        pieces.clear()
        return out

    def write(self, event: bytes) -> None:
        self._pieces.append(event)

    def text(self, text: str) -> None:
        if self.kind is not Kind.TEXT:
            text = self._held + text
            if text.isspace():
                self._held = text
                return
            self._open(Kind.TEXT, _EMPTY_TEXT)
        self._pieces.append(self._prefix + _encode(text) + _DELTA_END)

    def thinking(self, text: str) -> None:
        if self.kind is not Kind.THINKING:
            held = self._held
            self._open(Kind.THINKING, _EMPTY_THINKING)
            self._held = held
            self._thought = hashlib.sha256()
        self._thought.update(text.encode())
        if not self._omit_thinking:
            self._pieces.append(self._prefix + _encode(text) + _DELTA_END)

    def start_tool(self, shown_id: str, name: str) -> None:
        self._open(Kind.TOOL_USE, _encode({"type": "tool_use", "id": shown_id, "name": name, "input": {}}))

    def arguments(self, piece: str) -> None:
        """A piece of the open tool's arguments, as the upstream cut it."""
        self._pieces.append(self._prefix + _encode(piece) + _DELTA_END)

    def finish(self) -> None:
        """Close what is open; white space that nothing followed is text only where there is no other."""
        if self._held and not self._any_text_or_tool:
            text = self._held
            self._open(Kind.TEXT, _EMPTY_TEXT)
            self._pieces.append(self._prefix + _encode(text) + _DELTA_END)
        self._close()

    def _open(self, kind: Kind, start: bytes) -> None:
        self._close()
        self._index += 1
        self.kind = kind
        self._held = ""
        self._any_text_or_tool |= kind is not Kind.THINKING
        self._pieces.append(_START % (self._index, start))
        self._prefix = _DELTA % (self._index, _DELTA_MEMBER[kind])

    def _close(self) -> None:
        if self.kind is None:
            return
        if self.kind is Kind.THINKING:
            signed = _encode(self._thought.hexdigest())
            self._pieces.append(_DELTA % (self._index, _SIGNATURE_MEMBER) + signed + _DELTA_END)
        self._pieces.append(_STOP % self._index)
        self.kind = None
