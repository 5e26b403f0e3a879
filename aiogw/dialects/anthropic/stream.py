"""A chat completion stream into a Messages stream: what each chunk means for the blocks, and how it all ends.

Output is kept until it is handed over, so that a fault in the middle of a read loses nothing that came before it.
"""

from __future__ import annotations

from collections import deque

from aiogw.canonical import ResponseHead, TokenUsage
from aiogw.dialects.anthropic import chat
from aiogw.dialects.anthropic.blocks import MESSAGE_STOP, PING, BlockWriter, Kind, message_delta, message_start
from aiogw.dialects.anthropic.calls import Call, CallTable
from aiogw.dialects.anthropic.errors import error_event
from aiogw.dialects.anthropic.ids import generated_tool_id, message_id, shown_tool_id
from aiogw.dialects.anthropic.responses import (
    Ending,
    in_terms,
    require_media_type,
    stop_reason,
    token_usage,
    usage_members,
)
from aiogw.dialects.anthropic.terms import ReplyTerms
from aiogw.errors import GatewayError, UpstreamBroken, UpstreamStatus
from aiogw.sse import EventSplitter, EventTooLarge, event_data

# One event may hold the whole of a call's arguments, a file that is to be written say.
MAX_EVENT_BYTES = 16 * 1024 * 1024

_HEAD = ResponseHead(
    status=200,
    content_type="text/event-stream; charset=utf-8",
    content_length=None,
    headers=(("cache-control", "no-cache"), ("x-accel-buffering", "no")),
)


class _Passage:
    """Text or thinking that came while the arguments of a call were incomplete."""

    def __init__(self, kind: Kind, text: str) -> None:
        self.kind = kind
        self.pieces = [text]


class StreamEncoder:
    """The response of one call that asked to stream."""

    def __init__(self, terms: ReplyTerms) -> None:
        self.head: ResponseHead | None = None
        self._terms = terms
        self._splitter = EventSplitter(max_event_bytes=MAX_EVENT_BYTES)
        self._writer = BlockWriter(omit_thinking=terms.omit_thinking)
        self._table = CallTable()
        self._open_call: Call | None = None
        self._waiting: deque[Call | _Passage] = deque()
        self._used_ids: set[str] = set()
        self._message_id = ""
        self._usage: chat.Usage | None = None
        self._finish_reason: str | None = None
        self._matched: str | int | None = None
        self._ended = False

    # -- what the relay calls -----------------------------------------------------------------------------------------

    def begin(self, head: ResponseHead) -> None:
        require_media_type(head, "text/event-stream", self._terms.upstream)

    def feed(self, data: bytes, *, last: bool) -> bytes:
        committed = self.head is not None
        try:
            if not self._ended:
                self._read(data, last=last)
        except GatewayError:
            if not committed:
                # Nothing of it has gone out: still an ordinary error response.
                self.head = None
            raise
        return self._writer.take()

    def wait(self, ahead: int, estimated_seconds: float | None) -> bytes:
        if self._ended:
            return b""
        if self.head is None:
            self._start(None)
        self._writer.write(PING)
        return self._writer.take()

    @property
    def said_all(self) -> bool:
        return self._ended

    @property
    def usage(self) -> TokenUsage | None:
        return token_usage(self._usage)

    def refused(self, error: UpstreamStatus) -> GatewayError:
        return in_terms(error, self._terms)

    def fail(self, error: GatewayError, request_id: str) -> bytes | None:
        if self._ended:
            return b""
        if self.head is None:
            return None
        self._ended = True
        # The open block stays open: Claude Code takes a stopped one as finished and runs a tool at that moment.
        self._writer.write(error_event(error, request_id, max_model_len=self._terms.max_model_len))
        return self._writer.take()

    # -- events -------------------------------------------------------------------------------------------------------

    def _read(self, data: bytes, *, last: bool) -> None:
        try:
            for event in self._splitter.feed(data):
                payload = event_data(event)
                if payload is not None:
                    self._take_event(payload)
                    if self._ended:
                        return
        except EventTooLarge as error:
            raise UpstreamBroken(upstream=self._terms.upstream, reason=str(error)) from None
        if not last:
            return
        # Against the letter of the standard: a last event may lack its blank line, as long as it is whole.
        payload = event_data(self._splitter.rest)
        if payload is not None:
            self._take_event(payload)
        if not self._ended:
            self._finish()

    def _take_event(self, payload: bytes) -> None:
        if payload.startswith((b"[", b" ", b"\t")) and payload.strip() == b"[DONE]":
            self._finish()
            return
        completion = chat.read_completion(payload, self._terms.upstream)
        if completion.usage is not None:
            self._usage = completion.usage
        if not completion.choices:
            return
        if self.head is None:
            self._start(completion.id)
        for choice in completion.choices:
            if choice.index:
                continue
            if choice.delta is not None:
                self._take_delta(choice.delta)
            if choice.finish_reason:
                self._finish_reason = choice.finish_reason
                self._matched = choice.stop_reason

    def _start(self, upstream_id: str | None) -> None:
        """Commit to a 200.  Without an id it is a sign of life; the real first chunk then starts nothing again."""
        self.head = _HEAD
        self._message_id = message_id(upstream_id)
        # Preliminary: the usage of ``message_delta`` counts.
        self._writer.write(message_start(self._message_id, self._terms.model, usage_members(self._usage)))

    def _take_delta(self, delta: chat.Message) -> None:
        if self._terms.show_thinking:
            reasoning = delta.reasoning or delta.reasoning_content
            if reasoning:
                self._say(Kind.THINKING, reasoning)
        if delta.content:
            text = chat.content_text(delta.content)
            if text:
                self._say(Kind.TEXT, text)
        if delta.refusal:
            self._say(Kind.TEXT, delta.refusal)
        if delta.tool_calls:
            for piece in delta.tool_calls:
                arguments = chat.arguments_text(piece.function, self._terms.upstream) if piece.function else ""
                self._take_piece(self._table.find(piece, arguments), arguments)
        if delta.function_call is not None:
            arguments = chat.arguments_text(delta.function_call, self._terms.upstream)
            self._take_piece(self._table.find_legacy(delta.function_call, arguments), arguments)

    # -- one block at a time ------------------------------------------------------------------------------------------

    def _say(self, kind: Kind, text: str) -> None:
        open_call = self._open_call
        if not self._waiting and (open_call is None or open_call.scan.complete):
            self._write_passage(kind, text)
            return
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, _Passage) and last.kind is kind:
            last.pieces.append(text)
        else:
            self._waiting.append(_Passage(kind, text))

    def _write_passage(self, kind: Kind, text: str) -> None:
        if kind is Kind.TEXT:
            self._writer.text(text)
        else:
            self._writer.thinking(text)
        if self._open_call is not None and self._writer.kind is not Kind.TOOL_USE:
            self._open_call.closed = True
            self._open_call = None

    def _take_piece(self, call: Call, arguments: str) -> None:
        if call.closed:
            if arguments.strip():
                # Its block has been stopped, and a client may have run it by now.
                reason = f"more arguments for the call of {call.name!r} after they were complete"
                raise UpstreamBroken(upstream=self._terms.upstream, reason=reason)
            return
        new = not call.begun
        call.begun = True
        if arguments:
            call.take(arguments)
            if call is self._open_call:
                self._writer.arguments(arguments)
            else:
                call.pieces.append(arguments)
        if new:
            self._waiting.append(call)
        if self._waiting:
            self._write_waiting()

    def _write_waiting(self, *, at_end: bool = False) -> None:
        """Write what has been waiting, up to a call that is not complete yet or has no name yet."""
        while self._waiting:
            if self._open_call is not None and not self._open_call.scan.complete and not at_end:
                return
            item = self._waiting[0]
            if isinstance(item, _Passage):
                self._write_passage(item.kind, "".join(item.pieces))
            elif item.name is not None:
                self._open(item, item.name)
            elif not at_end:
                return
            self._waiting.popleft()

    def _open(self, call: Call, name: str) -> None:
        if self._open_call is not None:
            self._open_call.closed = True
        self._open_call = call
        upstream_id = call.id or ""
        if upstream_id and upstream_id not in self._used_ids:
            shown_id = shown_tool_id(upstream_id)
        else:
            shown_id = generated_tool_id(self._message_id, self._table.calls.index(call))
        self._used_ids.add(upstream_id)
        self._writer.start_tool(shown_id, name)
        if call.pieces:
            self._writer.arguments("".join(call.pieces))
            call.pieces.clear()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        # Whether this is an end comes first: a block that is stopped before an error would be taken for a finished one.
        calls = [call.complete for call in self._table.calls if call.name is not None]
        if any(call.name is None and (call.id or not call.blank) for call in self._table.calls):
            raise UpstreamBroken(upstream=self._terms.upstream, reason="a tool call has no name")
        ending = Ending(finish_reason=self._finish_reason, matched=self._matched, calls=calls)
        reason, sequence = stop_reason(ending, self._usage, self._terms)
        self._write_waiting(at_end=True)
        self._writer.finish()
        self._writer.write(message_delta(reason, sequence, usage_members(self._usage)))
        self._writer.write(MESSAGE_STOP)
        self._ended = True
