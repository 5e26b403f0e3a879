"""A third dialect, which nobody needs: that it is one module and one entry in a registry proves that a dialect is that.

Its wire is newline-delimited JSON.  A request is a line with ``model``, ``prompt``, ``stream`` and ``max_tokens``, and
may have further lines, each a turn with ``role`` and ``text``.  An answer is lines of ``text`` and one with the
``end``; a failure is a line with ``kind`` and ``why``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from attrs import frozen

from aiogw.canonical import CanonicalRequest, Document, ModelCard, Operation, ResponseHead, TokenUsage
from aiogw.dialects.base import (
    Call,
    Dialect,
    Endpoint,
    FindEngine,
    LocalEndpoint,
    RelayEndpoint,
    check_size_decoded,
    error_headers,
)
from aiogw.errors import (
    GatewayError,
    InvalidField,
    MalformedBody,
    MethodNotAllowed,
    UnknownEndpoint,
    UpstreamBroken,
    UpstreamStatus,
)
from aiogw.sse import EventSplitter, EventTooLarge, event_data

LINES_TYPE = "application/x-ndjson"


def line(**members: Any) -> bytes:
    return json.dumps(members).encode() + b"\n"


# -- endpoints ------------------------------------------------------------------------------------------------------


def _list_models(models: tuple[ModelCard, ...], _query: Mapping[str, str]) -> Document:
    body = line(models=[model.id for model in models])
    return Document(status=200, content_type="application/json", body=body)


ENDPOINTS: dict[str, tuple[tuple[str, ...], Endpoint]] = {
    "/lines/chat": (("POST",), RelayEndpoint(operation=Operation.CHAT, path="/v1/chat/completions")),
    "/lines/models": (("GET", "HEAD"), LocalEndpoint(answer=_list_models)),
}


# -- requests -------------------------------------------------------------------------------------------------------


def _object(text: bytes) -> dict[str, Any]:
    check_size_decoded(text)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedBody(reason=f"a line is not JSON ({type(error).__name__})") from None
    if not isinstance(document, dict):
        raise MalformedBody(reason="expected a JSON object in each line")
    return document


def _member(document: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = document.get(name, default)
    if type(value) is not kind:
        raise InvalidField(path=name, reason=f"expected {kind.__name__}")
    return value


def _chat_body(model: str, head: dict[str, Any], turns: list[dict[str, Any]], *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": _member(head, "prompt", str)}] if "prompt" in head else []
    messages += ({"role": _member(turn, "role", str), "content": _member(turn, "text", str)} for turn in turns)
    if not messages:
        raise InvalidField(path="prompt", reason="nothing is said")
    body: dict[str, Any] = {"model": model, "messages": messages}
    if "max_tokens" in head:
        body["max_tokens"] = _member(head, "max_tokens", int)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body, separators=(",", ":")).encode()


# -- responses ------------------------------------------------------------------------------------------------------


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_completion = msgspec.json.Decoder(_Completion)


class LinesEncoder:
    """See ``aiogw.dialects.base.ResponseEncoder``."""

    def __init__(self, *, upstream: str, stream: bool) -> None:
        self.head: ResponseHead | None = None
        self.usage: TokenUsage | None = None
        self.said_all = False
        self._upstream = upstream
        self._stream = stream
        self._splitter = EventSplitter(max_event_bytes=1 << 24)
        self._received = bytearray()
        self._finish_reason: str | None = None
        self._ended = False
        self._out = bytearray()

    def begin(self, head: ResponseHead) -> None:
        expected = "text/event-stream" if self._stream else "application/json"
        if not head.content_type.lower().startswith(expected):
            raise self._broken(f"it answered with {head.content_type!r}")

    def feed(self, data: bytes, *, last: bool) -> bytes:
        if not self._stream:
            self._received += data
            return self._whole() if last else b""
        committed = self.head is not None
        try:
            for event in self._splitter.feed(data):
                self._take(event)
            if last:
                self._take(self._splitter.rest)
                self._finish()
        except EventTooLarge as error:
            raise self._broken(str(error)) from None
        except GatewayError:
            if not committed:
                self.head = None
            raise
        return self._taken()

    def wait(self, ahead: int, estimated_seconds: float | None) -> bytes:
        if not self._stream or self._ended:
            return b""
        self._commit()
        return self._taken() + line(waiting=ahead, seconds=estimated_seconds)

    def refused(self, error: UpstreamStatus) -> GatewayError:
        return error

    def fail(self, error: GatewayError, request_id: str) -> bytes | None:
        if self.head is None or not self._stream:
            return None
        self._out += line(kind=error.code, why=error.message, request=request_id)
        return self._taken()

    def _take(self, event: bytes) -> None:
        payload = event_data(event)
        if self._ended or payload is None:
            return
        if payload.strip() == b"[DONE]":
            self.said_all = True
            self._finish()
            return
        completion = self._read(payload)
        for choice in completion.choices:
            self._commit()
            if choice.delta is not None and choice.delta.content:
                self._out += line(text=choice.delta.content)
            self._finish_reason = choice.finish_reason or self._finish_reason

    def _finish(self) -> None:
        if self._ended:
            return
        if self._finish_reason is None:
            raise self._broken("its stream ended without a finish reason")
        self._ended = True
        self._out += line(end=self._finish_reason, tokens=self._tokens())

    def _whole(self) -> bytes:
        completion = self._read(bytes(self._received))
        if not completion.choices or completion.choices[0].message is None:
            raise self._broken("there is no choice in its answer")
        choice = completion.choices[0]
        text = choice.message.content if choice.message else None
        body = line(text=text or "", end=choice.finish_reason, tokens=self._tokens())
        self.head = ResponseHead(status=200, content_type="application/json", content_length=len(body))
        return body

    def _read(self, document: bytes) -> _Completion:
        try:
            completion = _completion.decode(document)
        except (msgspec.DecodeError, RecursionError):
            raise self._broken("its answer could not be read") from None
        if completion.error:
            error = completion.error if isinstance(completion.error, dict) else {"message": completion.error}
            code = error.get("code")
            raise UpstreamStatus(
                upstream=self._upstream,
                upstream_status=code if type(code) is int and 400 <= code <= 599 else 500,
                upstream_message=str(error.get("message")),
                error=None,
                upstream_retry_after_seconds=None,
            )
        if completion.usage is not None:
            usage = completion.usage
            self.usage = TokenUsage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
        return completion

    def _tokens(self) -> list[int]:
        return [self.usage.prompt_tokens, self.usage.completion_tokens] if self.usage else []

    def _commit(self) -> None:
        if self.head is None:
            self.head = ResponseHead(status=200, content_type=LINES_TYPE, content_length=None)

    def _taken(self) -> bytes:
        out = bytes(self._out)
        self._out.clear()
        return out

    def _broken(self, reason: str) -> UpstreamBroken:
        return UpstreamBroken(upstream=self._upstream, reason=reason)


# -- all of it ------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class LinesDialect:
    """See ``aiogw.dialects.base.Dialect``."""

    name: str = "lines"
    mount: str = "/lines"
    request_id_headers: tuple[str, ...] = ("x-request-id",)

    def endpoint(self, method: str, path: str) -> Endpoint:
        if path not in ENDPOINTS:
            raise UnknownEndpoint(method=method, path=path, hint=f"There are {' and '.join(ENDPOINTS)}.")
        methods, endpoint = ENDPOINTS[path]
        if method not in methods:
            raise MethodNotAllowed(method=method, path=path, allowed=methods)
        return endpoint

    def decode(self, endpoint: RelayEndpoint, content_type: str, body: bytes, find_engine: FindEngine) -> Call:
        head, *turns = [_object(text) for text in body.splitlines() if text.strip()] or [_object(body)]
        model = _member(head, "model", str)
        if not model:
            raise InvalidField(path="model", reason="a model name is required")
        engine = find_engine(model)
        stream = _member(head, "stream", bool, default=False)
        request = CanonicalRequest(
            operation=endpoint.operation,
            model=model,
            stream=stream,
            sequences=1,
            body=_chat_body(engine.model, head, turns, stream=stream),
            content_type="application/json",
            path=endpoint.path,
            surface=self.name,
        )
        return Call(request=request, encoder=LinesEncoder(upstream=engine.model, stream=stream))

    def render_error(self, error: GatewayError, request_id: str) -> Document:
        body = line(kind=error.code, why=error.message, request=request_id)
        return Document(status=error.status, content_type=LINES_TYPE, body=body, headers=error_headers(error))


LINES: Dialect = LinesDialect()
