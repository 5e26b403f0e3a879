"""What an upstream says when it refuses: its status and whatever body, read as one error value.  Pure."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from aiogw.canonical import ResponseHead
from aiogw.errors import UpstreamStatus

MAX_MESSAGE_CHARACTERS = 2000
MAX_RETRY_AFTER_SECONDS = 60


def read_error(upstream: str, head: ResponseHead, body: bytes) -> UpstreamStatus:
    """The error value of a response that is not a 2xx.

    Seen in the wild: ``{"error": {...}}`` and ``{"error": "text"}`` (vLLM), ``{"object": "error", "message": ...}``
    (older vLLM), ``{"detail": ...}`` (FastAPI), ``{"message": ...}``, HTML, plain text, nothing.
    """
    document = _parse(body)
    error = document.get("error") if isinstance(document, dict) else None
    plain = head.content_type.lower().startswith("text/plain")
    return UpstreamStatus(
        upstream=upstream,
        upstream_status=head.status,
        upstream_message=_clean(_message(document) or (body.decode("utf-8", "replace") if plain else "")),
        error=error if isinstance(error, dict) else None,
        upstream_retry_after_seconds=_retry_after(head),
    )


def _parse(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        # vLLM quotes what it was sent, which may be lone surrogates; only the standard library reads those.
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _message(document: Any) -> str:
    """The first text found in ``error.message``, ``error``, ``message``, ``detail`` and FastAPI's list of details."""
    if not isinstance(document, dict):
        return ""
    error = document.get("error")
    candidates = (error.get("message") if isinstance(error, dict) else error, document.get("message"))
    details = document.get("detail")
    for text in (*candidates, details):
        if isinstance(text, str) and text:
            return text
    if not isinstance(details, list):
        return ""
    return "; ".join(_detail(one) for one in details if isinstance(one, dict))


def _detail(detail: dict[str, Any]) -> str:
    """One entry of ``{"detail": [{"loc": ["body", "n"], "msg": "..."}]}``."""
    where = detail.get("loc")
    path = ".".join(str(step) for step in where) if isinstance(where, list) else ""
    return f"{path}: {detail.get('msg', '')}".removeprefix(": ")


def _clean(text: str) -> str:
    """``text`` without control characters, cut to a length that a person would read."""
    kept = "".join(character for character in text if character.isprintable() or character in "\n\t")
    return kept.strip()[:MAX_MESSAGE_CHARACTERS]


def _retry_after(head: ResponseHead) -> int | None:
    """The upstream's ``Retry-After`` in whole seconds, bounded to what clients obey; a date is not worth a clock."""
    for name, value in head.headers:
        if name == "retry-after" and value.isascii() and value.isdigit():
            # int() refuses to read thousands of digits; nine are more than enough to be above the bound.
            return max(1, min(MAX_RETRY_AFTER_SECONDS, int(value[:9])))
    return None
