"""A response on ``/v1``: let through byte for byte, looked into for little, and ended honestly.

Of an event stream only whole events go out, at once, so that a sign of life or a failure can stand between two of them.
"""

from __future__ import annotations

import re

import msgspec

from aiogw.canonical import Operation, ResponseHead, TokenUsage
from aiogw.dialects.openai.errors import error_event, response_failed_event
from aiogw.dialects.openai.terms import ReplyTerms
from aiogw.errors import GatewayError, UpstreamBroken, UpstreamStatus
from aiogw.sse import event_data

# How much of an event that is not yet complete is held back; a larger one is passed on in parts.
HELD_BYTES = 1 << 20
# A whole answer is kept for its usage up to this size; one with the logprobs of a long text is larger.
ACCOUNTED_BYTES = 1 << 20
# One that is to be changed is kept whole; the longest contexts served today make some 4 MB of text.
REWRITTEN_BYTES = 64 << 20

# What comes down besides the content type; the rest speaks about the upstream, not about the answer.
_KEPT_HEADERS = ("cache-control", "content-encoding", "content-disposition")
_EVENT_STREAM = "text/event-stream"
_JSON = "application/json"
_TEXTUAL = (Operation.CHAT, Operation.COMPLETIONS, Operation.RESPONSES, Operation.BATCH)
"""The operations whose answers are never anything but JSON and events; sound, say, may be anything."""
# Of a blank line, all but its last character.
_EDGE_BYTES = 3
_DONE = b"data: [DONE]\n\n"
_FINISH_REASON = b'"finish_reason":'
_FINISHED = (_FINISH_REASON + b'"', _FINISH_REASON + b' "')
_ID = re.compile(rb"^id:|[\r\n]id:")
_ERROR = re.compile(rb'"error"\s*:\s*(?!null)')
_EVENT = re.compile(rb".*?(?:\n\n|\r\n\r\n|\r\r)|.+\Z", re.DOTALL)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Document(msgspec.Struct):
    """Of a chunk or a whole answer, what accounting looks at."""

    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None


_document_decoder = msgspec.json.Decoder(_Document)
_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


class PassThrough:
    """See ``aiogw.dialects.base.ResponseEncoder``."""

    def __init__(self, terms: ReplyTerms) -> None:
        self.head: ResponseHead | None = None
        self.usage: TokenUsage | None = None
        self.said_all = False
        self._terms = terms
        self._events = False
        self._repeats = terms.repeat_reasoning_as is not None
        self._looks = terms.accounting or self._repeats
        self._held = bytearray()
        self._in_event = False
        self._has_ids = False
        self._finished = not terms.must_finish
        self._passed = b""
        self._unsent = b""
        self._whole: list[bytes] = []
        self._whole_bytes = 0

    def begin(self, head: ResponseHead) -> None:
        media_type = _media_type(head)
        self._events = media_type == _EVENT_STREAM
        if self._terms.operation in _TEXTUAL and media_type not in (_EVENT_STREAM, _JSON):
            # A page of a proxy in between, say: a client would take it for an empty answer.
            raise self._broken(f"it answered with {media_type or 'no content type'} where {_JSON} was due")
        if self.head is not None:
            # A sign of life has promised a stream.
            if not self._events:
                raise self._broken(
                    f"it answered a request for a stream with {head.content_type or 'no content type'!r}"
                )
            return
        kept = [(name, value) for name, value in head.headers if name in _KEPT_HEADERS]
        if self._events:
            # nginx, where one stands in front, would otherwise collect the events before it passes them on.
            kept.append(("x-accel-buffering", "no"))
        changed = self._looks if self._events else self._repeats
        self.head = ResponseHead(
            status=head.status,
            content_type=head.content_type,
            content_length=None if changed else head.content_length,
            headers=tuple(kept),
        )

    def feed(self, data: bytes, *, last: bool) -> bytes:
        if not self._events:
            return self._feed_whole(data, last=last)
        if self._held or not data.endswith(b"\n\n"):
            data = self._whole_events(data, last=last)
            if not data and not last:
                return b""
        else:
            self._in_event = False
        # One line and its blank one, as an engine writes for each token: what it is can be told from its two ends, and
        # searches through all of it would cost more than anything else.
        single = data.find(b"\n") == len(data) - 2
        if not self._has_ids:
            self._has_ids = data.startswith(b"id:") if single else b"id:" in data and _ID.search(data) is not None
        if not self._finished:
            self._finished = _finishes(data, single=single)
        if (self._terms.accounting and b'"usage"' in data) or (self._repeats and b'"delta"' in data):
            data = b"".join([self._look(event) for event in _EVENT.findall(data)])
        self.said_all = data.endswith(_DONE)
        if last and not self._finished and not _ERROR.search(data or self._passed):
            self._unsent = data
            raise self._broken("its stream ended without a finish reason")
        self._passed = data
        return data

    def wait(self, ahead: int, estimated_seconds: float | None) -> bytes:
        if not self._terms.stream or (self.head is not None and not self._events_promised()) or self._in_event:
            return b""
        if self.head is None:
            headers = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))
            content_type = f"{_EVENT_STREAM}; charset=utf-8"
            self.head = ResponseHead(status=200, content_type=content_type, content_length=None, headers=headers)
        text = "keep-alive"
        if estimated_seconds is not None:
            text = f"queued: {ahead} ahead, about {estimated_seconds:.0f} s to wait"
        elif ahead:
            text = f"queued: {ahead} ahead"
        # Once an id has been seen, openai's decoder makes an event of nothing from any further blank line.
        return f": {text}\n".encode() + (b"" if self._has_ids else b"\n")

    def refused(self, error: UpstreamStatus) -> GatewayError:
        return error

    def fail(self, error: GatewayError, request_id: str) -> bytes | None:
        if not self._events_promised():
            return None
        # An event that was cut in the middle of being passed on is closed first.
        closing = b"\n\n" if self._in_event else b""
        said = response_failed_event if self._terms.operation is Operation.RESPONSES else error_event
        return self._unsent + closing + said(error, request_id)

    def _events_promised(self) -> bool:
        head = self.head
        return head is not None and head.content_length is None and _media_type(head) == _EVENT_STREAM

    def _broken(self, reason: str) -> UpstreamBroken:
        return UpstreamBroken(upstream=self._terms.upstream, reason=reason)

    def _whole_events(self, data: bytes, *, last: bool) -> bytes:
        """What there is, up to the end of its last event; the rest is held back unless it is the last or too much.

        What is held has no end in it, so that an event of many reads is looked through once.
        """
        held = self._held
        edge = bytes(held[-_EDGE_BYTES:])
        cut = max(0, _end_of_events(edge + data) - len(edge))
        rest_bytes = len(data) - cut + (0 if cut else len(held))
        if cut:
            self._in_event = False
        if last or rest_bytes > HELD_BYTES:
            self._in_event = rest_bytes > 0
            cut = len(data)
        elif not cut:
            held += data
            return b""
        whole = bytes(held) + data[:cut]
        held[:] = data[cut:]
        return whole

    def _look(self, event: bytes) -> bytes:
        """One event: its usage is read, and hidden if only we asked for it; its reasoning is repeated."""
        payload = event_data(event)
        if payload is None:
            return event
        if self._terms.accounting and b'"usage"' in payload:
            document = self._account(payload)
            if document is not None and document.choices == [] and self._terms.hide_usage:
                return b""
        if self._repeats:
            changed = self._with_reasoning_repeated(payload, "delta")
            if changed != payload:
                return event.replace(payload, changed)
        return event

    def _feed_whole(self, data: bytes, *, last: bool) -> bytes:
        """A whole answer: passed on as it comes, unless its reasoning is to be repeated; that needs all of it."""
        rewrites = self._repeats
        if not self._looks or (self._whole_bytes > ACCOUNTED_BYTES and not rewrites):
            return data
        self._whole.append(data)
        self._whole_bytes += len(data)
        if rewrites and self._whole_bytes > REWRITTEN_BYTES:
            raise self._broken(f"its answer is larger than {REWRITTEN_BYTES} bytes")
        if not last:
            return b"" if rewrites else data
        document = b"".join(self._whole)
        if self._terms.accounting:
            self._account(document)
        return self._with_reasoning_repeated(document, "message") if rewrites else data

    def _account(self, document: bytes) -> _Document | None:
        """Note the usage ``document`` tells, if it does."""
        try:
            found = _document_decoder.decode(document)
        except (msgspec.DecodeError, RecursionError):
            return None
        if found.usage is None:
            return None
        self.usage = TokenUsage(
            prompt_tokens=found.usage.prompt_tokens, completion_tokens=found.usage.completion_tokens
        )
        return found

    def _with_reasoning_repeated(self, document: bytes, holder: str) -> bytes:
        """``document`` with the reasoning of each choice's ``holder`` under its second name, too; values stay bytes."""
        name, second = self._terms.reasoning_field, self._terms.repeat_reasoning_as
        try:
            members = _members_decoder.decode(document)
            choices = [_members_decoder.decode(choice) for choice in _list_decoder.decode(members["choices"])]
            for choice in choices:
                held = _members_decoder.decode(choice[holder])
                if second is not None and name in held and second not in held:
                    held[second] = held[name]
                    choice[holder] = msgspec.Raw(msgspec.json.encode(held))
        except (msgspec.DecodeError, RecursionError, KeyError):
            return document
        members["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        return msgspec.json.encode(members)


def _media_type(head: ResponseHead) -> str:
    return head.content_type.partition(";")[0].strip().lower()


def _finishes(data: bytes, *, single: bool) -> bool:
    """Whether a stream that ends behind ``data`` is complete; ``single``: it is one event, mostly of one choice."""
    if single and (reason := data.rfind(_FINISH_REASON)) >= 0 and data.find(_FINISH_REASON) == reason:
        return data.startswith(_FINISHED, reason)
    return b"[DONE]" in data or any(finished in data for finished in _FINISHED)


def _end_of_events(data: bytes) -> int:
    """The position behind the last blank line in ``data``, 0 if there is none; all three line ends of SSE count."""
    if data.endswith(b"\n\n"):
        return len(data)
    if data.find(b"\n") < 0 and data.find(b"\r") < 0:
        return 0  # the middle of a large event, told ten times sooner than by looking for two characters
    return max(data.rfind(end) + len(end) if end in data else 0 for end in (b"\n\n", b"\r\n\r\n", b"\r\r"))
