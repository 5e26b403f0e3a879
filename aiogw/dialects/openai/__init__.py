"""OpenAI's API as a dialect, ``/v1/*``: its wire is the canonical form, so a client's bytes are passed on as they are.

Codex, Open WebUI, the OpenAI SDKs and nearly everything else are the clients this is for.  Nothing here waits, and
nothing may know another dialect.
"""

from __future__ import annotations

from attrs import frozen

from aiogw.canonical import Document
from aiogw.dialects.base import Call, Dialect, Endpoint, FindEngine, RelayEndpoint
from aiogw.dialects.openai import errors
from aiogw.dialects.openai.endpoints import MOUNT, find_endpoint
from aiogw.dialects.openai.requests import read_request
from aiogw.dialects.openai.responses import PassThrough
from aiogw.errors import GatewayError


@frozen(kw_only=True)
class OpenAIDialect:
    """See ``aiogw.dialects.base.Dialect``."""

    name: str = "openai"
    mount: str = MOUNT
    request_id_headers: tuple[str, ...] = ("x-request-id",)

    def endpoint(self, method: str, path: str) -> Endpoint:
        return find_endpoint(method, path)

    def decode(self, endpoint: RelayEndpoint, content_type: str, body: bytes, find_engine: FindEngine) -> Call:
        request, terms = read_request(endpoint, content_type, body, surface=self.name, find_engine=find_engine)
        return Call(request=request, encoder=PassThrough(terms))

    def render_error(self, error: GatewayError, request_id: str) -> Document:
        return errors.render_error(error, request_id)


OPENAI: Dialect = OpenAIDialect()
