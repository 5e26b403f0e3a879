"""Errors as OpenAI's clients read them: a problem document before the first byte, an error event after it."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from aiogw.canonical import Document
from aiogw.dialects.base import error_headers
from aiogw.errors import ClientFault, GatewayError, Refusal, UpstreamFault, UpstreamStatus


def render_error(error: GatewayError, request_id: str) -> Document:
    """RFC 9457, with the ``error`` member from which the OpenAI SDKs take what they show (openai 3.57)."""
    document = {
        "type": f"urn:aiogw:problem:{error.code.replace('_', '-')}",
        "title": error.title,
        "status": error.status,
        "detail": error.message,
        "instance": f"urn:aiogw:request:{request_id}",
        "request_id": request_id,
        "error": _error_object(error),
    }
    return Document(
        status=error.status,
        content_type="application/problem+json",
        body=encode(document),
        headers=error_headers(error),
    )


def error_event(error: GatewayError, _request_id: str) -> bytes:
    """The error inside a stream: the SDK raises on any event whose data has an ``error``."""
    return b"data: " + encode({"error": _error_object(error)}) + b"\n\n"


# Greater than any number a stream has counted to: what follows must not go back, and nobody has counted here.
_LAST_SEQUENCE_NUMBER = 2**31 - 1


def response_failed_event(error: GatewayError, request_id: str) -> bytes:
    """The end of a Responses stream that failed, as Codex reads it: it compacts, waits or gives up by the code."""
    code, message = "server_error", error.message
    if isinstance(error, Refusal):
        code = "rate_limit_exceeded"
        message += f". Please try again in {error.retry_after_seconds}s."
    elif isinstance(error, UpstreamStatus) and "maximum context length" in message:
        code = "context_length_exceeded"
    failed = {
        "id": f"resp_{request_id}",
        "object": "response",
        "status": "failed",
        "output": [],
        "error": {"code": code, "message": message},
    }
    event = {"type": "response.failed", "sequence_number": _LAST_SEQUENCE_NUMBER, "response": failed}
    return b"event: response.failed\ndata: " + encode(event) + b"\n\n"


def _error_object(error: GatewayError) -> dict[str, Any]:
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


def encode(document: Any) -> bytes:
    """JSON, also of text with lone surrogates, which an upstream's message may hold and UTF-8 cannot."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return json.dumps(document, separators=(",", ":")).encode()
