"""The OpenAI dialect, ``/v1``: its wire is the canonical form already, so the client's bytes are passed on as they are.

A request is looked into for the few members that decide its way; a response is not changed at all.  Nothing here may
know another dialect, a queue or a socket.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Any

import msgspec
from attrs import frozen

from aiogw.canonical import CanonicalRequest, Document, ModelCard, Operation, ResponseHead
from aiogw.dialects.base import Call, Endpoint, FindEngine, LocalEndpoint, RelayEndpoint, error_headers
from aiogw.errors import (
    ClientFault,
    GatewayError,
    InvalidField,
    MalformedBody,
    MethodNotAllowed,
    Refusal,
    UnknownEndpoint,
    UnknownModel,
    UpstreamFault,
    UpstreamStatus,
)

MOUNT = "/v1"

# How much of an event that is not yet complete is held back; a larger one is passed on in parts.
HELD_BYTES = 1 << 20

# Of a form: starlette, which parses it at vLLM, stops at a thousand parts, too.
MAX_PARTS = 1000
MAX_PART_HEAD_BYTES = 16384
# More sequences than any cap.
MAX_COUNT = 10**9

_OPERATIONS = {
    "/v1/chat/completions": Operation.CHAT,
    "/v1/completions": Operation.COMPLETIONS,
    "/v1/responses": Operation.RESPONSES,
    "/v1/embeddings": Operation.EMBEDDINGS,
    "/v1/score": Operation.SCORE,
    "/v1/rerank": Operation.RERANK,
    "/v1/audio/transcriptions": Operation.TRANSCRIPTIONS,
    "/v1/audio/translations": Operation.TRANSLATIONS,
}
_ENDPOINTS = {path: RelayEndpoint(operation=operation, path=path) for path, operation in _OPERATIONS.items()}
_HINT = "OpenAI clients use the base URL http(s)://HOST:PORT/v1, Anthropic clients http(s)://HOST:PORT/llm."

# Response headers that come down besides the content type; the rest speaks about the upstream, not about the answer.
_KEPT_HEADERS = ("cache-control", "content-encoding", "content-disposition")


class _Peek(msgspec.Struct):
    """The members that decide a request's way; all else is neither decoded nor judged here."""

    model: str | msgspec.UnsetType = msgspec.UNSET
    stream: msgspec.Raw = msgspec.Raw(b"false")
    n: msgspec.Raw = msgspec.Raw(b"1")
    best_of: msgspec.Raw = msgspec.Raw(b"1")
    prompt: msgspec.Raw = msgspec.Raw(b"")


_peek_decoder = msgspec.json.Decoder(_Peek)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


@frozen(kw_only=True)
class OpenAIDialect:
    """See ``dialects.base.Dialect``."""

    name: str = "openai"
    mount: str = MOUNT
    request_id_headers: tuple[str, ...] = ("x-request-id",)

    def endpoint(self, method: str, path: str) -> Endpoint:
        relayed = _ENDPOINTS.get(path)
        if relayed is not None:
            if method != "POST":
                raise MethodNotAllowed(method=method, path=path, allowed=("POST",))
            return relayed
        if path == "/v1/models" or path.startswith("/v1/models/"):
            if method not in ("GET", "HEAD"):
                raise MethodNotAllowed(method=method, path=path, allowed=("GET", "HEAD"))
            return _MODELS if path == "/v1/models" else _model(path.removeprefix("/v1/models/"))
        raise UnknownEndpoint(method=method, path=path, hint=_hint(path))

    def decode(self, endpoint: RelayEndpoint, content_type: str, body: bytes, find_engine: FindEngine) -> Call:
        if content_type.lower().startswith("multipart/form-data"):
            peek = _Peek(model=_multipart_model(content_type, body))
        else:
            peek = _peek(body)
        if peek.model is msgspec.UNSET or not peek.model:
            raise InvalidField(path="model", reason="a model name is required")
        find_engine(peek.model)
        request = CanonicalRequest(
            operation=endpoint.operation,
            model=peek.model,
            stream=bytes(peek.stream) == b"true",
            sequences=_sequences(endpoint.operation, peek),
            body=body,
            content_type=content_type or "application/json",
            path=endpoint.path,
            surface=self.name,
        )
        return Call(request=request, encoder=PassThrough())

    def render_error(self, error: GatewayError, request_id: str) -> Document:
        """RFC 9457, with the ``error`` member from which the OpenAI SDKs take what they show."""
        document = {
            "type": f"urn:aiogw:problem:{error.code.replace('_', '-')}",
            "title": error.title,
            "status": error.status,
            "detail": error.message,
            "instance": f"urn:aiogw:request:{request_id}",
            "request_id": request_id,
            "error": error_object(error),
        }
        return Document(
            status=error.status,
            content_type="application/problem+json",
            body=_encode(document),
            headers=error_headers(error),
        )


OPENAI = OpenAIDialect()


class PassThrough:
    """Lets a response through byte for byte; of an event stream, only events that are complete.

    So a failure can be told in an event of its own, instead of being glued to half of another.
    """

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self._events = False
        self._tail = b""

    def begin(self, head: ResponseHead) -> None:
        self._events = head.content_type.lower().startswith("text/event-stream")
        kept = [(name, value) for name, value in head.headers if name in _KEPT_HEADERS]
        if self._events:
            # nginx, where one stands in front, would otherwise collect the events before it passes them on.
            kept.append(("x-accel-buffering", "no"))
        self.head = ResponseHead(
            status=head.status,
            content_type=head.content_type,
            content_length=head.content_length,
            headers=tuple(kept),
        )

    def feed(self, data: bytes, *, last: bool) -> bytes:
        if not self._events or (not self._tail and data.endswith(b"\n\n")):
            return data
        data = self._tail + data
        cut = len(data) if last or len(data) > HELD_BYTES else _end_of_events(data)
        self._tail = data[cut:]
        return data[:cut]

    def wait(self, position: int, estimated_seconds: float | None) -> bytes:
        return b""

    def fail(self, error: GatewayError, request_id: str) -> bytes | None:
        if not self._events or (self.head is not None and self.head.content_length is not None):
            return None
        return b"data: " + _encode({"error": error_object(error)}) + b"\n\n"


def error_object(error: GatewayError) -> dict[str, Any]:
    """OpenAI's ``error`` object; an upstream's own is kept with all its members."""
    if isinstance(error, UpstreamStatus) and error.error is not None and not error.about_credentials:
        return {**error.error, "message": error.message}
    return {"message": error.message, "type": _error_type(error), "param": error.param, "code": error.code}


def _error_type(error: GatewayError) -> str:
    if isinstance(error, ClientFault):
        return "invalid_request_error"
    if isinstance(error, Refusal):
        return "server_overloaded"
    return "upstream_error" if isinstance(error, UpstreamFault) else "server_error"


def _encode(document: Any) -> bytes:
    """JSON, also of text with lone surrogates, which an upstream's message may hold and UTF-8 cannot."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return json.dumps(document, separators=(",", ":")).encode()


# -- requests -------------------------------------------------------------------------------------------------------


def _peek(body: bytes) -> _Peek:
    if not body.strip():
        raise MalformedBody(reason="it is empty, where a JSON object is expected")
    try:
        return _peek_decoder.decode(body)
    except msgspec.ValidationError as error:
        if "$.model" in str(error):
            raise InvalidField(path="model", reason="expected a string") from None
        raise MalformedBody(reason="expected a JSON object") from None
    except RecursionError:
        raise MalformedBody(reason="it is nested too deeply") from None
    except msgspec.DecodeError:
        return _peek_leniently(body)


def _peek_leniently(body: bytes) -> _Peek:
    """As vLLM itself would read it: the standard library takes lone surrogates, NaN and a byte order mark; msgspec not.

    Whoever sent it gets the upstream's opinion and not a stricter one.
    """
    try:
        document = json.loads(body)
    except json.JSONDecodeError as error:
        reason = f"it is not valid JSON ({error.msg} at line {error.lineno}, column {error.colno})"
        raise MalformedBody(reason=reason) from None
    except UnicodeDecodeError as error:
        raise MalformedBody(reason=f"it is not valid UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise MalformedBody(reason="it is nested too deeply") from None
    except ValueError as error:
        raise MalformedBody(reason=f"it is not valid JSON ({error})") from None
    if not isinstance(document, dict):
        raise MalformedBody(reason="expected a JSON object")
    model = document.get("model", msgspec.UNSET)
    if model is not msgspec.UNSET and not isinstance(model, str):
        raise InvalidField(path="model", reason="expected a string")
    deciding = {name: document[name] for name in ("stream", "n", "best_of", "prompt") if name in document}
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in deciding.items()}
    return _Peek(model=model, **raw)


def _sequences(operation: Operation, peek: _Peek) -> int:
    """How many engine sequences the request becomes: ``n`` (or ``best_of``, if more) for each of its prompts.

    A wrong type is for the upstream to refuse, and counts as 1 here.
    """
    if operation not in (Operation.CHAT, Operation.COMPLETIONS):
        return 1
    each = max(_count(peek.n), _count(peek.best_of))
    return each * (_prompts(peek.prompt) if operation is Operation.COMPLETIONS else 1)


def _count(raw: msgspec.Raw) -> int:
    """A count as vLLM's lax models read it: 6, 6.0 and "6" are six; what they refuse counts as 1."""
    try:
        number = float(bytes(raw).strip(b'" '))
    except ValueError:
        return 1
    # Anything above is as good as one more than the cap.
    if not math.isfinite(number):
        return MAX_COUNT if number > 0 else 1
    return max(1, min(MAX_COUNT, int(number)))


def _prompts(raw: msgspec.Raw) -> int:
    """A string or a list of token ids is one prompt; a list of strings or of lists is as many."""
    text = bytes(raw)
    if not text.startswith(b"["):
        return 1
    try:
        items = _list_decoder.decode(text)
    except msgspec.DecodeError:
        # What only the lenient parser reads is text with lone surrogates, or NaN; see _peek_leniently.
        lenient = json.loads(text)
        return len(lenient) if isinstance(lenient[0], str | list) else 1
    return len(items) if items and bytes(items[0])[:1] in (b'"', b"[") else 1


def _multipart_model(content_type: str, body: bytes) -> str | msgspec.UnsetType:
    """The text of the form's ``model`` part (RFC 7578); the parts before it are stepped over, not copied."""
    form = Message()
    form["content-type"] = content_type
    try:
        boundary = form.get_boundary()
    except UnicodeError:
        # boundary*=CHARSET'' with a character set that Python knows, but not as one for text of this kind.
        boundary = None
    if not boundary:
        raise MalformedBody(reason="its multipart content type names no boundary")
    delimiter = b"--" + boundary.encode("utf-8", "surrogateescape")
    start = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    if not body.startswith(delimiter, start):
        raise MalformedBody(reason="its multipart boundary does not occur in it")
    for _ in range(MAX_PARTS):
        head_start = start + len(delimiter)
        head_end = body.find(b"\r\n\r\n", head_start, head_start + MAX_PART_HEAD_BYTES)
        if head_end < 0:
            return msgspec.UNSET
        # From the end of the head's last line, which an empty part shares with its delimiter.
        end = body.find(b"\r\n" + delimiter, head_end + 2)
        if end < 0:
            raise MalformedBody(reason="its last multipart part has no end")
        head = BytesHeaderParser().parsebytes(body[head_start + 2 : head_end + 2])
        if head.get_param("name", header="content-disposition") == "model":
            return body[head_end + 4 : end].decode("utf-8", "replace").strip()
        start = end + 2
    raise MalformedBody(reason=f"it has more than {MAX_PARTS} multipart parts before one named model")


# -- answers of our own ---------------------------------------------------------------------------------------------


def _card(model: ModelCard) -> dict[str, Any]:
    return {"id": model.id, "object": "model", "created": model.created, "owned_by": "aiogw"}


def _json(document: Any) -> Document:
    return Document(status=200, content_type="application/json", body=_encode(document))


def _list_models(models: tuple[ModelCard, ...], _query: Mapping[str, str]) -> Document:
    return _json({"object": "list", "data": [_card(model) for model in models]})


def _model(model_id: str) -> LocalEndpoint:
    def answer(models: tuple[ModelCard, ...], _query: Mapping[str, str]) -> Document:
        for model in models:
            if model.id == model_id:
                return _json(_card(model))
        raise UnknownModel(model=model_id, known=tuple(model.id for model in models))

    return LocalEndpoint(answer=answer)


_MODELS = LocalEndpoint(answer=_list_models)


def _hint(path: str) -> str:
    if path in ("/v1/messages", "/v1/messages/count_tokens"):
        return f"Anthropic's Messages API is at /llm{path}. {_HINT}"
    if path.startswith("/v1/v1"):
        return f"The /v1 is doubled: the client adds one to a base URL that already has it. {_HINT}"
    if f"/v1{path}" in _ENDPOINTS or path == "/models":
        return f"The /v1 is missing. {_HINT}"
    return _HINT


def _end_of_events(data: bytes) -> int:
    """The position behind the last blank line in ``data``, 0 if there is none; all three line ends of SSE count."""
    return max(data.rfind(end) + len(end) if end in data else 0 for end in (b"\n\n", b"\r\n\r\n", b"\r\r"))
