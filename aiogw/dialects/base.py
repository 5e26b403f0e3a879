"""What a dialect is: a mount, a closed table of endpoints, and codecs between its wire and the canonical form.

A dialect is a value in the registry (``aiogw.dialects.DIALECTS``).  It waits for nothing and knows neither the gate nor
a socket nor another dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
from attrs import frozen

from aiogw.canonical import CanonicalRequest, Document, Engine, ModelCard, Operation, ResponseHead, TokenUsage
from aiogw.errors import GatewayError, InvalidKey, MalformedBody, MethodNotAllowed, QueueRefusal, UpstreamStatus

FindEngine = Callable[[str], Engine]
"""The engine behind a model name as clients know it; raises UnknownModel."""

Answer = Callable[[tuple[ModelCard, ...], Mapping[str, str]], Document]
"""An answer the gateway gives by itself, from the models it serves and the query; may raise a ClientFault."""


@frozen(kw_only=True)
class RelayEndpoint:
    """A POST that becomes work for an upstream; ``path`` is where it goes there."""

    operation: Operation
    path: str


@frozen(kw_only=True)
class LocalEndpoint:
    """A request that is answered here, without a slot or an upstream."""

    answer: Answer


Endpoint = RelayEndpoint | LocalEndpoint


class ResponseEncoder(Protocol):
    """Turns one upstream response (always a 2xx) into what this dialect's client gets; holds the state of one request.

    The relay calls ``begin`` once, then ``feed`` with what has arrived, ``last`` with the final piece (which may be
    empty).  ``begin`` and ``feed`` may raise GatewayError when the upstream's answer is not what this dialect can stand
    for.

    ``head`` is None until the encoder can vouch for the response; the relay starts the client's response with the first
    call after which it is set, and until then a failure can still become an ordinary error document.
    """

    head: ResponseHead | None

    @property
    def usage(self) -> TokenUsage | None:
        """What the upstream said the response cost, once it has."""
        ...

    @property
    def said_all(self) -> bool:
        """Whether the upstream has said that it is done, although its response has not ended yet: it works no more."""
        ...

    def begin(self, head: ResponseHead) -> None:
        """The upstream's head has arrived."""
        ...

    def feed(self, data: bytes, *, last: bool) -> bytes:
        """The bytes for the client that ``data`` gives rise to."""
        ...

    def wait(self, ahead: int, estimated_seconds: float | None) -> bytes:
        """A sign of life while the request waits or the upstream says nothing presentable.

        ``ahead`` is how many requests wait before it, ``estimated_seconds`` the wait to come; None: it is granted, or
        nothing is known of it.
        Commits ``head`` if need be.  Empty, and ``head`` untouched, where this response cannot carry one.
        """
        ...

    def refused(self, error: UpstreamStatus) -> GatewayError:
        """What it means for this request that the upstream refused it; mostly ``error`` itself."""
        ...

    def fail(self, error: GatewayError, request_id: str) -> bytes | None:
        """The error as this response can still carry it after ``head`` has gone.

        None where its form has no way to say so; then the client's connection is broken off instead.
        """
        ...


@frozen(kw_only=True)
class Call:
    """A decoded request: what goes up, and how what comes down is rendered."""

    request: CanonicalRequest
    encoder: ResponseEncoder


class Dialect(Protocol):
    """One API surface.

    ``name`` is for logs and metrics, ``mount`` the path prefix it owns, ``request_id_headers`` the response headers in
    which its SDKs look for the request id.
    """

    @property
    def name(self) -> str: ...

    @property
    def mount(self) -> str: ...

    @property
    def request_id_headers(self) -> tuple[str, ...]: ...

    def endpoint(self, method: str, path: str) -> Endpoint:
        """The endpoint of a request below the mount; raises UnknownEndpoint or MethodNotAllowed."""
        ...

    def decode(
        self, endpoint: RelayEndpoint, content_type: str, body: bytes, find_engine: FindEngine
    ) -> Call | Document:
        """The canonical request of ``body``, or its answer where none but us is needed.

        Raises a ClientFault that names what is wrong and where.  Asks ``check_size_decoded`` of whatever it decodes.
        """
        ...

    def render_error(self, error: GatewayError, request_id: str) -> Document:
        """The error document of this surface, total over every leaf of the error tree."""
        ...


# Of JSON that is to be decoded: each object or list may take a kilobyte then, each other value a hundred bytes.
# Each is a token of text or more, so that what fits a context stays far below.
MAX_COMMAS = 500_000
MAX_OPENING_BRACKETS = 300_000


def check_size_decoded(document: bytes) -> None:
    """Refuse what would take gigabytes and seconds once it is decoded, by what can be counted in its bytes.

    Raises MalformedBody.  To be asked where values are made of a document, and not where it is only looked through.
    """
    if len(document) <= MAX_OPENING_BRACKETS:
        return
    if document.count(b",") > MAX_COMMAS:
        raise MalformedBody(reason=f"it has more than {MAX_COMMAS} commas, those in strings included")
    if document.count(b"[") + document.count(b"{") > MAX_OPENING_BRACKETS:
        raise MalformedBody(reason=f"it has more than {MAX_OPENING_BRACKETS} of [ and {{, those in strings included")


def encode_body(document: Any) -> bytes:
    """``document`` as the JSON body of a canonical request, which may wait for minutes.

    A copy of what msgspec makes, which keeps the whole block it grew while writing, up to twice as much (0.23: 24 KiB
    for 16 KiB of text).
    """
    return bytes(memoryview(msgspec.json.encode(document)))


def error_headers(error: GatewayError) -> tuple[tuple[str, str], ...]:
    """The headers every surface sends with an error: when to come back, whether to, and what would have been right."""
    headers = []
    if error.retry_after is not None:
        headers.append(("retry-after", str(error.retry_after)))
    if error.should_retry is not None:
        headers.append(("x-should-retry", "true" if error.should_retry else "false"))
    if isinstance(error, QueueRefusal) and error.estimated_seconds is not None:
        headers.append(("x-aiogw-queue-estimate-seconds", f"{error.estimated_seconds:.1f}"))
    if isinstance(error, InvalidKey):
        headers.append(("www-authenticate", "Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append(("allow", ", ".join(error.allowed)))
    return tuple(headers)
