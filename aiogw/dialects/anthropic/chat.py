"""The part of an upstream's chat completion documents that this dialect looks at; knows nothing of Messages.

One shape for chunks and whole documents.  Members not named here (token ids, logprobs, metrics) are never looked at.
"""

from __future__ import annotations

from typing import Any

import msgspec

from aiogw.dialects.anthropic.parsing import NULL, repair_surrogates
from aiogw.errors import UpstreamBroken, UpstreamStatus


class Function(msgspec.Struct, gc=False):
    """``arguments`` is a JSON text in a string; some upstreams send the object itself."""

    name: str | None = None
    arguments: msgspec.Raw = NULL


class ToolCall(msgspec.Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: Function | None = None


class ContentPart(msgspec.Struct, gc=False):
    text: str | None = None


class Message(msgspec.Struct, gc=False):
    """A message, or a piece of one.  vLLM says ``reasoning`` since 0.15.1, others ``reasoning_content``."""

    content: str | list[ContentPart] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Function | None = None


class Choice(msgspec.Struct, gc=False):
    """``stop_reason`` is vLLM's own: the matched stop string, or the id of a stop token."""

    index: int | None = None
    delta: Message | None = None
    message: Message | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None
    created_cache_tokens: int | None = None


class CompletionDetails(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Completion(msgspec.Struct, gc=False):
    id: str | None = None
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = NULL


_completion = msgspec.json.Decoder(Completion)
_string = msgspec.json.Decoder(str)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_anything: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def read_completion(document: bytes, upstream: str) -> Completion:
    """A chunk or a whole document.

    Raises UpstreamBroken where it is not one, and UpstreamStatus where it is the error vLLM sends with a 200.
    """
    try:
        completion = _completion.decode(document)
    except (msgspec.DecodeError, RecursionError):
        completion = _read_repaired(document, upstream)
    if completion.error is not NULL:
        _raise_reported(completion.error, upstream)
    return completion


def _read_repaired(document: bytes, upstream: str) -> Completion:
    try:
        return _completion.decode(repair_surrogates(document))
    except (msgspec.DecodeError, RecursionError) as error:
        raise UpstreamBroken(upstream=upstream, reason=f"its answer could not be read: {error}") from None


def arguments_text(function: Function, upstream: str) -> str:
    """The JSON text of a call's arguments as far as it goes, empty where there is none; raises UpstreamBroken."""
    raw = function.arguments
    if raw is NULL:
        return ""
    text = bytes(raw)
    try:
        if text.startswith(b'"'):
            return _string.decode(text)
        return "" if text == b"null" else str(text, "utf-8")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UpstreamBroken(upstream=upstream, reason=f"the arguments of a call could not be read: {error}") from None


def is_json_object(text: str) -> bool:
    try:
        _object.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def content_text(content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or "" for part in content)


def _raise_reported(raw: msgspec.Raw, upstream: str) -> None:
    try:
        error = _anything.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        error = "an error that could not be read"
    if not error:
        return
    members = error if isinstance(error, dict) else {}
    message = members.get("message", error)
    raise UpstreamStatus(
        upstream=upstream,
        upstream_status=_status(members),
        upstream_message=message if isinstance(message, str) else "",
        error=members or None,
        upstream_retry_after_seconds=None,
    )


# What the ``type`` of an error says where its ``code`` is not a status; vLLM spells the first in two ways.
_STATUS_BY_TYPE = {
    "BadRequestError": 400,
    "Bad Request": 400,
    "invalid_request_error": 400,
    "NotFoundError": 404,
    "not_found_error": 404,
    "RateLimitError": 429,
    "rate_limit_error": 429,
    "ServiceUnavailableError": 503,
    "overloaded_error": 503,
    "timeout_error": 504,
}


def _status(error: dict[str, Any]) -> int:
    code = error.get("code")
    if isinstance(code, str) and code.isdecimal():
        code = int(code[:4])
    if isinstance(code, int) and 400 <= code <= 599:
        return code
    kind = error.get("type")
    return _STATUS_BY_TYPE.get(kind, 500) if isinstance(kind, str) else 500
