"""One client's connection: aiohttp's own protocol, with an end to what a peer may do slowly or leave undone.

A head has a deadline, an answer that is not taken has one, and an upload that is refused is not read any further.
Nothing here may know a dialect, the gate or an upstream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest
from attrs import frozen

# A refused body of up to this size is read and thrown away while the connection lingers, for clients that look for an
# answer only when they have sent everything; a longer one is not read any further.  Go's net/http draws the same line.
SHORT_BODY_BYTES = 262144
# How long a connection with unread bytes stays open behind the refusal.  Closing it is a reset, which some systems let
# overtake what their program has not read yet.
LINGER_SECONDS = 1.0


@frozen(kw_only=True)
class ConnectionLimits:
    """How long a client may take, in seconds.

    ``header_timeout_seconds`` is for the head of a request: from the beginning of the connection, later from the head's
    first byte.  Until that byte comes, a connection that has been served may be idle for ``keepalive_timeout_seconds``.
    An answer has to be taken within ``client_stall_timeout_seconds``; a relayed one is watched while it is sent.
    """

    header_timeout_seconds: float
    keepalive_timeout_seconds: float
    client_stall_timeout_seconds: float


class ClientProtocol(RequestHandler):
    """A request that comes in one piece costs no timer here: only a head that is incomplete starts one.

    The limits are those that hold when the connection is made.
    """

    __slots__ = ("_body", "_head_timer", "_limits", "_on_header_timeout", "_reads_no_more")

    def __init__(
        self,
        server: web.Server,
        *,
        limits: Callable[[], ConnectionLimits],
        on_header_timeout: Callable[[], None],
        **options: Any,
    ) -> None:
        self._limits = limits()
        super().__init__(
            server,
            keepalive_timeout=self._limits.keepalive_timeout_seconds,
            lingering_time=LINGER_SECONDS,
            **options,
        )
        self._on_header_timeout = on_header_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        # Of the last request that has begun: what comes after its end is the next head.
        self._body: StreamReader = EMPTY_PAYLOAD
        self._reads_no_more = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_came()
        self._body = EMPTY_PAYLOAD  # it knows this connection: without the cycle, all of it goes when it ends
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        requests = self._request_count
        between = self._body.is_eof()
        super().data_received(data)
        if self._request_count != requests:
            self._head_came()
            self._body = self._messages[-1][1]
        elif data and between and self._head_timer is None:
            self._expect_head()
        if self._current_request is None and self._messages and self._body.total_bytes and not self._body.is_eof():
            # Nobody has looked at this request yet, and it may be refused: hundreds that come in one turn of the loop
            # would each bring what a buffer holds.  Whoever begins to read the body goes on with the connection.
            self._pause_transport_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        if not self._reads_no_more:
            super().resume_reading(resume_parser)

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write an answer of our own, and see that it is taken.  Of a body that was refused unread, nothing is read."""
        transport = self.transport
        if transport is None:
            return await super().finish_response(request, resp, start_time)
        unread = not request.content.is_eof()
        if unread:
            resp.force_close()
            length = request.content_length
            # Of a body that is broken there is no more to come: aiohttp closes at once.
            if request.content.exception() is None and (length is None or length > SHORT_BODY_BYTES):
                self._read_no_more(request)
        stalled = self._loop.call_later(self._limits.client_stall_timeout_seconds, transport.abort)
        try:
            result = await super().finish_response(request, resp, start_time)
            if transport.get_write_buffer_size():
                # aiohttp is content with what fits a buffer, and whoever never reads would keep that for ever.
                transport.set_write_buffer_limits(0)
                await self._drain_helper()
                transport.set_write_buffer_limits()
        finally:
            stalled.cancel()
        if unread:
            end_writing(transport)
        return result

    def _read_no_more(self, request: BaseRequest) -> None:
        self._reads_no_more = True
        self._pause_transport_reading()
        request.content.read_nowait()  # thrown away

    def _expect_head(self) -> None:
        self._head_timer = self._loop.call_later(self._limits.header_timeout_seconds, self._head_overdue)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_overdue(self) -> None:
        self._head_timer = None
        if self._waiter is None:
            # It came ahead of its time, and the request before it is still being served.
            self._expect_head()
            return
        self._on_header_timeout()
        self.force_close()

    def _process_keepalive(self) -> None:
        # Once a head has begun, its own deadline counts.
        if self._head_timer is None:
            super()._process_keepalive()
        else:
            self._keepalive_handle = None


def end_writing(transport: asyncio.Transport) -> None:
    """Send the FIN behind what has been written, where that can be done."""
    if transport.can_write_eof() and not transport.is_closing():
        with contextlib.suppress(OSError):  # it may be a reset that is yet to be seen
            transport.write_eof()
