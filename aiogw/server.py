"""The server that requests come in through: aiohttp's, with an answer of our own for what is not a request.

What aiohttp's parser refuses never reaches a middleware.  Nothing here may know what a request means.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError, HttpVersion10, HttpVersion11, RawRequestMessage

from aiogw.canonical import Document
from aiogw.clientstream import SentResponse
from aiogw.errors import GatewayError, MalformedRequest
from aiogw.protocol import LINGER_SECONDS, ClientProtocol, end_writing
from aiogw.record import request_id_from

log = logging.getLogger(__name__)

# One header field, or the request line: aiohttp's own 8,190 is less than some tokens and cookies have.
MAX_FIELD_BYTES = 32768
MAX_HEADER_FIELDS = 128

# A scanner or a broken client must not fill the log.  The metric has them all.
LINES_PER_MINUTE = 6

_REASONS = {
    "BadHttpMethod": "it does not begin with a method of HTTP/1.1",
    "BadStatusLine": "its first line is not one of HTTP/1.1",
    "InvalidHeader": "a header field in it is malformed",
    "InvalidURLError": "its target is malformed",
    "LineTooLong": f"a line or header field in it is longer than {MAX_FIELD_BYTES} bytes",
}
_OTHER_REASON = "its head or its framing is malformed"


class MalformedRequests:
    """Counts, tells and answers what is not a request; which surface it was meant for, nobody knows."""

    def __init__(self, *, render: Callable[[GatewayError, str], Document], count: Callable[[], None]) -> None:
        self._render = render
        self._count = count
        self._minute_ends_at = 0.0
        self._lines_left = 0
        self._untold = 0

    def refuse(self, error: MalformedRequest, kind: str) -> bytes:
        """The whole response.

        ``kind`` and the reason are for the log as well, and from closed sets: nothing of what was sent is told.
        """
        self._count()
        request_id = request_id_from(None)
        now = time.monotonic()
        if now >= self._minute_ends_at:
            self._minute_ends_at, self._lines_left = now + 60, LINES_PER_MINUTE
        if self._lines_left:
            self._lines_left -= 1
            fields: dict[str, Any] = {"request_id": request_id, "status": error.status, "kind": kind}
            fields["detail"] = error.detail
            if self._untold:
                fields["untold"] = self._untold
                self._untold = 0
            log.info("refused what is not a request", extra={"fields": fields})
        else:
            self._untold += 1
        document = self._render(error, request_id)
        headers = "".join(f"{name}: {value}\r\n" for name, value in document.headers)
        head = (
            f"HTTP/1.1 {document.status} Bad Request\r\ncontent-type: {document.content_type}\r\n"
            f"content-length: {len(document.body)}\r\nx-request-id: {request_id}\r\n{headers}"
            f"connection: close\r\nserver: aiogw\r\ndate: {formatdate(usegmt=True)}\r\n\r\n"
        )
        return head.encode("ascii") + document.body


class ClientConnection(ClientProtocol):
    """aiohttp's side of one client connection."""

    __slots__ = ("_malformed",)

    def __init__(self, server: web.Server, *, malformed: MalformedRequests, **options: Any) -> None:
        super().__init__(server, **options)
        self._malformed = malformed

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._messages or isinstance(self._messages[-1][0], RawRequestMessage):
            return
        # The parser has given up.  Whoever waits for the rest of a body would do so until the client leaves, since
        # aiohttp (3.14, C parser) tells only whoever asks for the next request.
        bodies = [body for _, body in self._messages]
        if self._current_request is not None:
            bodies.append(self._current_request.content)
        for body in bodies:
            if not body.is_eof():
                body.set_exception(web.RequestPayloadError())

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        kind = type(exc).__name__
        return self.refuse(MalformedRequest(reason=_REASONS.get(kind, _OTHER_REASON)), kind)

    def log_exception(self, *args: Any, **options: Any) -> None:
        # A body that is not what it said has been answered and told; aiohttp meets it again while it closes.
        if not isinstance(options.get("exc_info"), web.RequestPayloadError | HttpProcessingError):
            super().log_exception(*args, **options)

    def refuse(self, error: MalformedRequest, kind: str) -> web.StreamResponse:
        """Answer in HTTP/1.1, whatever was spoken, and hear nothing more."""
        answer = self._malformed.refuse(error, kind)
        if self.transport is not None:
            self.transport.write(answer)
            end_writing(self.transport)
        self.close()
        return _Lingering(status=error.status, keep_alive=False)


class _Lingering(SentResponse):
    async def write_eof(self, data: bytes = b"") -> None:
        await asyncio.sleep(LINGER_SECONDS)  # cancelled when the client closes


class _Server(web.Server):
    """What aiohttp's own server does, with connections of ours."""

    def __init__(self, server: web.Server, options: dict[str, Any]) -> None:
        super().__init__(self._handle, request_factory=self._make, handler_cancellation=server.handler_cancellation)
        self._behind = server
        self._options = options

    def __call__(self) -> web.RequestHandler:
        return ClientConnection(self, loop=asyncio.get_running_loop(), **self._options)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.version not in (HttpVersion11, HttpVersion10):
            # The parsers are of several minds about others (0.9 and 2.0 pass one of them, or both).
            assert isinstance(request.protocol, ClientConnection)
            return request.protocol.refuse(MalformedRequest(reason=_REASONS["BadStatusLine"]), "BadVersion")
        return await self._behind.request_handler(request)

    def _make(self, message: RawRequestMessage, *others: Any) -> web.BaseRequest:
        # What comes behind such a request is not to be trusted to the C parser (3.14).  After an upgrade, which nothing
        # here is, it loses what came along and takes what comes later for the beginning of a request.  A trailer of a
        # chunked body becomes a header field of the next request, which may be another client's behind a proxy.
        if message.upgrade or message.chunked:
            message = message._replace(should_close=True)
        return self._behind.request_factory(message, *others)


class Runner(web.AppRunner):
    """aiohttp's runner for an application, on connections that have ``options``."""

    def __init__(self, application: web.Application, *, shutdown_timeout: float, **options: Any) -> None:
        # Off in aiohttp's own runner, where a queued client could leave without anybody noticing.
        super().__init__(application, shutdown_timeout=shutdown_timeout, handler_cancellation=True)
        self._options = options

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self._options)
