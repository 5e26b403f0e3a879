"""Every ending other than success in Anthropic's words, as a document or as an event; decides nothing but wording.

Claude Code acts on some of these sentences, so where an upstream says the same in its own words they are replaced.
"""

from __future__ import annotations

import re

import msgspec

from aiogw.canonical import Document
from aiogw.dialects.base import error_headers
from aiogw.errors import OVERLOADED_RETRY_AFTER_SECONDS, GatewayError, TooManySequences, UnknownModel, UpstreamStatus

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OTHER_TYPE = "api_error"

# Claude Code gives up when told to wait for longer.
_MAX_RETRY_AFTER_SECONDS = 60

_MAX_MESSAGE_CHARACTERS = 2000

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_MODEL_NAME = re.compile(r"model [`'\"]([^`'\"]+)[`'\"]")


def render_error(error: GatewayError, request_id: str) -> Document:
    """The error document; total over the error tree."""
    status = _status(error)
    return Document(
        status=status,
        content_type="application/json",
        body=_envelope(_type(status), _message(error, max_model_len=None), request_id),
        headers=_headers(error, status),
    )


def error_event(error: GatewayError, request_id: str, *, max_model_len: int | None) -> bytes:
    """The last event of a stream that failed after it had begun."""
    status = error.status
    if isinstance(error, UpstreamStatus) and not error.about_credentials:
        # Inside a 200 there is no path of ours to be wrong: a 404 is what it says.
        status = error.upstream_status
    body = _envelope(_type(status), _message(error, max_model_len=max_model_len), request_id)
    return b"event: error\ndata: %b\n\n" % body


def _envelope(error_type: str, message: str, request_id: str) -> bytes:
    # Compact: Claude Code looks for the text "type":"overloaded_error".
    return msgspec.json.encode(
        {
            "type": "error",
            "error": {"type": error_type, "message": _SURROGATE.sub("\ufffd", message)},
            "request_id": _SURROGATE.sub("\ufffd", request_id),
        }
    )


def _status(error: GatewayError) -> int:
    if isinstance(error, TooManySequences):
        return 400
    if isinstance(error, UpstreamStatus):
        # Anthropic has no 422; 529 is its own number for what is a 503 everywhere else.
        return {422: 400, 529: 503}.get(error.upstream_status, error.status)
    return error.status


def _type(status: int) -> str:
    return _TYPES.get(status, _OTHER_TYPE)


def _headers(error: GatewayError, status: int) -> tuple[tuple[str, str], ...]:
    headers = dict(error_headers(error))
    if isinstance(error, UpstreamStatus):
        seconds = error.retry_after
        if seconds is None and status == 503:
            seconds = OVERLOADED_RETRY_AFTER_SECONDS  # a 529, which is a 503 on this surface only
        if seconds is not None:
            headers["retry-after"] = str(min(max(seconds, 1), _MAX_RETRY_AFTER_SECONDS))
        if status == 502 and 400 <= error.upstream_status < 500:
            # Credentials or a path that are wrong here stay wrong.
            headers["x-should-retry"] = "false"
    return tuple(headers.items())


def _message(error: GatewayError, *, max_model_len: int | None) -> str:
    if isinstance(error, UnknownModel):
        # The name first, as Anthropic says it; what may be asked for instead helps whoever reads it.
        return f"model: {_clean(error.model)} (known models: {', '.join(error.known)})"
    if not isinstance(error, UpstreamStatus):
        return error.message
    if error.upstream_status == 404 and error.about_model:
        named = _MODEL_NAME.search(error.upstream_message)
        return f"model: {_clean(named[1] if named else error.upstream)}"
    if error.upstream_status == 400:
        overflow = context_overflow(error.upstream_message, max_model_len=max_model_len)
        if overflow is not None:
            return overflow
    return _clean(error.message)


def _clean(text: str) -> str:
    shown = _CONTROL.sub(" ", text[: _MAX_MESSAGE_CHARACTERS + 1]).strip()
    return shown if len(shown) <= _MAX_MESSAGE_CHARACTERS else shown[: _MAX_MESSAGE_CHARACTERS - 1] + "…"


# -- context overflow -------------------------------------------------------------------------------------------------

# vLLM, SGLang and llama.cpp, newest wording first.  P: tokens of the prompt, C: of the completion asked for, M: what
# the model takes.  Bounded digits, so that no number is too long for int().
_N = r"(\d{1,18})"
_REQUESTED = re.compile(rf"maximum context length is {_N} tokens.*?\({_N} in the messages, {_N} in the completion\)")
_TOO_LARGE = re.compile(rf"is too large: {_N}.*?maximum context length is {_N} tokens.*?has {_N} input tokens")
_PROMPT_TOKENS = re.compile(rf"maximum context length is {_N} tokens.*?contains (?:at least )?{_N} input tokens")
_PROMPT_CHARACTERS = re.compile(rf"maximum context length is {_N} tokens.*?contains (?:at least )?{_N} characters")
_INPUT_LENGTH = re.compile(rf"Input length \({_N}\) exceeds model's maximum context length \({_N}\)")
_CONTEXT_SIZE = re.compile(rf"request \({_N} tokens\) exceeds the available context size \({_N} tokens\)")
_OUTPUT_ALONE = re.compile(rf"max(?:_completion)?_tokens={_N} cannot be greater than max_model_len={_N}")
_NOTHING_LEFT = re.compile(rf"max_tokens must be at least 1, got -?{_N}")


def context_overflow(message: str, *, max_model_len: int | None) -> str | None:
    """The sentence by which Claude Code knows to compact, or to ask for less; None where ``message`` is another fault.

    It reads the numbers, and wants the first one larger.
    """
    text = " ".join(message.split())
    if found := _OUTPUT_ALONE.search(text):
        completion, longest = map(int, found.groups())
        return _output_too_long(0, completion, longest)
    if found := _TOO_LARGE.search(text):
        completion, longest, prompt = map(int, found.groups())
        return _too_long_together(prompt, completion, longest)
    if found := _REQUESTED.search(text):
        longest, prompt, completion = map(int, found.groups())
        return _too_long_together(prompt, completion, longest)
    if found := _PROMPT_TOKENS.search(text):
        longest, prompt = map(int, found.groups())
        return _prompt_too_long(prompt, longest)
    if found := _PROMPT_CHARACTERS.search(text):
        longest, characters = map(int, found.groups())
        return _prompt_too_long(characters // 4, longest)
    if found := _INPUT_LENGTH.search(text) or _CONTEXT_SIZE.search(text):
        prompt, longest = map(int, found.groups())
        return _prompt_too_long(prompt, longest)
    if found := _NOTHING_LEFT.search(text):
        # The server derived it from a context that is full.
        if max_model_len is None:
            return "prompt is too long for this model"
        return _prompt_too_long(max_model_len + int(found[1]), max_model_len)
    return None


def _prompt_too_long(prompt: int, longest: int) -> str:
    return f"prompt is too long: {max(prompt, longest + 1)} tokens > {longest} maximum"


def _output_too_long(prompt: int, completion: int, longest: int) -> str:
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {completion} > {longest}, decrease input "
        "length or `max_tokens` and try again"
    )


def _too_long_together(prompt: int, completion: int, longest: int) -> str:
    if prompt >= longest:
        return _prompt_too_long(prompt, longest)
    return _output_too_long(prompt, completion, longest)
