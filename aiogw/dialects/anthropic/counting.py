"""Counting tokens: a Messages request into what vLLM's ``/tokenize`` takes, and its count or an estimate back.

Never 200 with 0: Claude Code would then believe that there is always room and never compact.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from attrs import evolve

from aiogw.canonical import Document, ResponseHead, TokenUsage
from aiogw.dialects.anthropic.responses import require_media_type
from aiogw.errors import GatewayError, UnknownEndpoint, UpstreamBroken, UpstreamStatus

# What an image costs with Anthropic at the most, and about what vision models make of one.
IMAGE_TOKENS = 1600
CHARACTERS_PER_TOKEN = 4

# The whole list of token ids comes along with the count: 1.2 MB for 200,000 tokens (vLLM 0.32).
MAX_DOCUMENT_BYTES = 64 * 1024 * 1024

_COUNTED = ("messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
# As messages.py writes it; in text that says the same, the quotes are escaped.
_IMAGE = re.compile(rb'"image_url":\{"url":"[^"]*"\}')


class _Tokenized(msgspec.Struct):
    count: int


_tokenized = msgspec.json.Decoder(_Tokenized)


def tokenize_body(model: str, prompt: dict[str, Any]) -> bytes:
    """The ``/tokenize`` request for the members of a chat request that the engine makes tokens of."""
    members = {name: prompt[name] for name in _COUNTED if name in prompt}
    return msgspec.json.encode({"model": model, **members})


def estimate(prompt: dict[str, Any]) -> int:
    """Tokens by rule of thumb, on the high side: a quarter of the characters with all JSON around them, plus images."""
    text, images = _IMAGE.subn(b"", tokenize_body("", prompt))
    return max(1, -(-len(str(text, "utf-8")) // CHARACTERS_PER_TOKEN)) + IMAGE_TOKENS * images


def count_document(tokens: int) -> Document:
    return Document(status=200, content_type="application/json", body=msgspec.json.encode({"input_tokens": tokens}))


class CountEncoder:
    """See ``aiogw.dialects.base.ResponseEncoder``; ``upstream`` is a name for messages."""

    def __init__(self, *, upstream: str, path: str) -> None:
        self.head: ResponseHead | None = None
        self.usage: TokenUsage | None = None
        self.said_all = False
        self._upstream = upstream
        self._path = path
        self._received = bytearray()

    def begin(self, head: ResponseHead) -> None:
        require_media_type(head, "application/json", self._upstream)

    def feed(self, data: bytes, *, last: bool) -> bytes:
        self._received += data
        if len(self._received) > MAX_DOCUMENT_BYTES:
            raise UpstreamBroken(upstream=self._upstream, reason="its count is too long a document")
        if not last:
            return b""
        try:
            tokens = _tokenized.decode(self._received).count
        except (msgspec.DecodeError, RecursionError) as error:
            raise UpstreamBroken(upstream=self._upstream, reason=f"its count is none ({error})") from None
        if tokens < 1:
            raise UpstreamBroken(upstream=self._upstream, reason=f"its count is {tokens}")
        document = count_document(tokens)
        self.head = ResponseHead(
            status=document.status, content_type=document.content_type, content_length=len(document.body)
        )
        return document.body

    def wait(self, ahead: int, estimated_seconds: float | None) -> bytes:
        return b""

    def refused(self, error: UpstreamStatus) -> GatewayError:
        if error.upstream_status in (404, 405, 501) and not error.about_model:
            hint = "Estimate, or read input_tokens of a response."
            reason = "its upstream does not count tokens"
            return UnknownEndpoint(method="POST", path=self._path, hint=hint, reason=reason)
        if error.about_model:
            # It names the model as the engine knows it; the client knows it by this name.
            return evolve(error, upstream_message=f"The model `{self._upstream}` does not exist.")
        return error

    def fail(self, error: GatewayError, request_id: str) -> bytes | None:
        return None
