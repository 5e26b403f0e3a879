"""Anthropic's Messages API as a dialect, ``/llm/*``: requests up into chat requests, chat responses down into messages.

Claude Code and the Anthropic SDKs are the clients this is for.  Nothing here waits or reads a clock.
"""

from __future__ import annotations

from attrs import frozen

from aiogw.canonical import Document, Operation
from aiogw.dialects.anthropic import errors
from aiogw.dialects.anthropic.counting import CountEncoder
from aiogw.dialects.anthropic.endpoints import COUNT_TOKENS, MOUNT, find_endpoint
from aiogw.dialects.anthropic.requests import translate, translate_count
from aiogw.dialects.anthropic.responses import WholeEncoder
from aiogw.dialects.anthropic.stream import StreamEncoder
from aiogw.dialects.base import Call, Dialect, Endpoint, FindEngine, RelayEndpoint
from aiogw.errors import GatewayError


@frozen(kw_only=True)
class AnthropicDialect:
    """See ``aiogw.dialects.base.Dialect``."""

    name: str = "anthropic"
    mount: str = MOUNT
    request_id_headers: tuple[str, ...] = ("x-request-id", "request-id")

    def endpoint(self, method: str, path: str) -> Endpoint:
        return find_endpoint(method, path)

    def decode(
        self, endpoint: RelayEndpoint, content_type: str, body: bytes, find_engine: FindEngine
    ) -> Call | Document:
        if endpoint.operation is Operation.TOKENIZE:
            counting = translate_count(body, path=endpoint.path, surface=self.name, find_engine=find_engine)
            if isinstance(counting, Document):
                return counting
            return Call(request=counting, encoder=CountEncoder(upstream=counting.model, path=COUNT_TOKENS))
        translation = translate(body, path=endpoint.path, surface=self.name, find_engine=find_engine)
        encoder = StreamEncoder if translation.request.stream else WholeEncoder
        return Call(request=translation.request, encoder=encoder(translation.terms))

    def render_error(self, error: GatewayError, request_id: str) -> Document:
        return errors.render_error(error, request_id)


ANTHROPIC: Dialect = AnthropicDialect()
