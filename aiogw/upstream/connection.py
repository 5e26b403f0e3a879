"""One HTTP/1.1 connection to an upstream, used for one POST at a time: the slot, as far as the wire knows it.

What arrives is pushed to the caller in steps, in the call in which it arrived; nobody is woken to fetch it.  Nothing
here may know the queue, a dialect or the client, and nothing happens behind the caller's back: no redirect, no
decompression, no cookie, no re-send.

States: IDLE (kept for the next request) -> BUSY (a request is out, its response not complete) -> IDLE or CLOSED.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools

from aiogw.canonical import ResponseHead
from aiogw.errors import UpstreamBroken, UpstreamFault, UpstreamTimeout

# The head of a response, status line and fields together.  vLLM's are about 200 bytes; 64 KiB is what curl allows one
# field.  It bounds what a broken upstream can make us hold before we know what it is saying.
MAX_HEAD_BYTES = 65536

# For a time-out that is due while bytes lie unread: long enough for the loop to read them, whatever else it has to do.
UNREAD_GRACE_SECONDS = 0.05

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Fields that speak about one connection (RFC 9110, 7.6.1) and never travel further."""


class Exchange(Protocol):
    """What a connection tells about the response to the request it was given."""

    def response_step(self, head: ResponseHead | None, data: bytes, ended: bool) -> None:
        """All that one read brought: the head once, body bytes, and whether the response is now complete.

        When ``ended`` is true the connection is already free for another request.
        """
        ...

    @property
    def response_data(self) -> Callable[[bytes], None]:
        """The same for a read that brought body bytes alone: a stream is little else, so this way is kept short."""
        ...

    def response_failed(self, error: UpstreamFault, *, untouched: bool) -> None:
        """The response will not be completed; ``untouched``: not one byte of it had been seen, and the peer closed."""
        ...


class Keeper(Protocol):
    """Who owns the connection between requests."""

    def connection_idle(self, connection: Connection) -> None: ...

    def connection_closed(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """See the module.  Time-outs are in seconds and never run while the caller has paused reading."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        keeper: Keeper,
        upstream: str,
        first_byte_timeout_seconds: float,
        idle_timeout_seconds: float,
    ) -> None:
        self._loop = loop
        self._keeper = keeper
        self._upstream = upstream
        self._first_byte_timeout_seconds = first_byte_timeout_seconds
        self._idle_timeout_seconds = idle_timeout_seconds
        self._transport: asyncio.Transport | None = None
        # It calls back to here, so it exists only as long as the wire: a cycle would outlive both.
        self._parser: Any = None
        self._exchange: Exchange | None = None
        self._deadline = 0.0
        self._untaken = 0
        self._timer: asyncio.TimerHandle | None = None
        self._reading_paused = False
        self._overdue = False
        self.used = False
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._fields: list[tuple[str, str]] = []
        self._head_bytes = 0
        self._head: ResponseHead | None = None
        self._head_done = False
        self._body_begun = False
        self._interim = False
        self._until_close = False
        self._pieces: list[bytes] = []
        self._complete = False
        self._keep_alive = False
        self._surplus = False
        self._fault: str | None = None

    # -- for the caller ---------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether a request may be sent now."""
        return self._exchange is None and self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, exchange: Exchange) -> None:
        """Put one request on the wire; its response is told to ``exchange``."""
        assert self._transport is not None
        assert self._exchange is None
        self._exchange = exchange
        self._reset()
        # One system call for both, without joining a body of many megabytes to its head.
        self._transport.writelines((head, body))
        self._untaken = self._transport.get_write_buffer_size()
        self._deadline = self._loop.time() + self._first_byte_timeout_seconds
        self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def pause_reading(self) -> None:
        if self._transport is not None and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and self._reading_paused:
            self._reading_paused = False
            self._deadline = self._loop.time() + self._idle_timeout_seconds
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once; whatever is going on ends without being told."""
        self._end_exchange()
        self._close()

    # -- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            # Bytes nobody asked for: whatever they are, the next response could not be told from them.
            self.abort()
            return
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fault = "it switched to another protocol"
        except httptools.HttpParserError as error:
            # After a complete response it is only the rest that is malformed: the connection is of no further use.
            if self._complete:
                self._surplus = True
            else:
                self._fault = f"its answer is not valid HTTP ({error})"
        if self._fault is None and not self._head_done and self._head_bytes > MAX_HEAD_BYTES:
            self._fault = f"the head of its answer is larger than {MAX_HEAD_BYTES} bytes"
        self._deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._parser = None
        self._keeper.connection_closed(self)
        if self._exchange is None:
            return
        if self._until_close and self._head_done and exc is None:
            self._complete = True
            self._deliver()
            return
        untouched = self._head_bytes == 0
        if untouched:
            reason = "it closed the connection without an answer"
        elif not self._head_done:
            reason = "it closed the connection in the head of its answer"
        else:
            reason = "it closed the connection before its answer was complete"
        self._fail(UpstreamBroken(upstream=self._upstream, reason=reason), untouched=untouched)

    # -- httptools --------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            self._surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._complete:
            self._fields.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status = self._parser.get_status_code()
        if status < 200:
            # 100 and 103 come before the answer; llhttp reports each as a message of its own.
            self._interim = True
            self._fields = []
            return
        self._head_done = True
        self._head = self._read_head(status)

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
            return
        if not self._complete:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _read_head(self, status: int) -> ResponseHead:
        content_type = ""
        lengths: list[str] = []
        codings: list[str] = []
        named_by_connection: set[str] = set()
        for name, value in self._fields:
            if name == "content-length":
                lengths.append(value)
            elif name == "transfer-encoding":
                codings.append(value.lower())
            elif name == "content-type":
                content_type = value
            elif name == "connection":
                named_by_connection.update(token.strip().lower() for token in value.split(","))
        if codings and lengths:
            # RFC 9112, 6.3: a sign of smuggling; who believes which one decides where the answer ends.
            self._fault = "its answer has both a Content-Length and a Transfer-Encoding"
        elif codings and codings != ["chunked"]:
            self._fault = f"its answer has the transfer coding {', '.join(codings)!r}"
        self._until_close = not codings and not lengths and status not in (204, 304)
        return ResponseHead(
            status=status,
            content_type=content_type,
            content_length=int(lengths[0]) if lengths and lengths[0].isdecimal() else None,
            headers=tuple(
                (name, value)
                for name, value in self._fields
                if name not in ("content-type", "content-length")
                and name not in HOP_BY_HOP
                and name not in named_by_connection
            ),
        )

    def _deliver(self) -> None:
        """Tell what the last read brought; the head and the end count only if what came before them was in order."""
        if self._fault is not None:
            fault = self._fault
            self._close()
            self._fail(UpstreamBroken(upstream=self._upstream, reason=fault), untouched=False)
            return
        head, self._head = self._head, None
        pieces = self._pieces
        data = b"" if not pieces else pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if pieces:
            self._pieces = []
        exchange = self._exchange
        assert exchange is not None
        if self._complete:
            self._finish()
            exchange.response_step(head, data, True)
            return
        if head is None and not data:
            return
        # A head alone is no progress: uvicorn sends that of a stream before the engine has begun with the prompt.
        if data:
            self._deadline = self._loop.time() + self._idle_timeout_seconds
            if not self._body_begun:
                self._body_begun = True
                self._rearm()
        if head is None:
            exchange.response_data(data)
        else:
            exchange.response_step(head, data, False)

    def _finish(self) -> None:
        """The response is complete: keep the connection for the next request if it is fit for one."""
        self._end_exchange()
        transport = self._transport
        if transport is None:
            return
        if self._reading_paused:
            self._reading_paused = False
            transport.resume_reading()
        # A response that came before the whole request was written leaves the rest of it in the way of the next one.
        if self._keep_alive and not self._surplus and not transport.get_write_buffer_size():
            self.used = True
            self.idle_since = self._loop.time()
            self._keeper.connection_idle(self)
        elif transport.get_write_buffer_size():
            # Closing would first wait until the rest of the request has been taken, by somebody who may not read it.
            transport.abort()
        else:
            transport.close()

    def _fail(self, error: UpstreamFault, *, untouched: bool) -> None:
        exchange = self._exchange
        assert exchange is not None
        self._end_exchange()
        exchange.response_failed(error, untouched=untouched)

    def _close(self) -> None:
        """Close now.  The transport alone would close in the next turn of the loop, and a request that is granted the
        slot in this one would reach the upstream while it still works on the one that was given up."""
        if self._transport is None:
            return
        sock = self._transport.get_extra_info("socket")
        if sock is not None and not self._transport.is_closing():
            # A second descriptor, because what uvloop and asyncio hand out has no shutdown.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(sock.fileno())) as twin:
                twin.shutdown(socket.SHUT_RDWR)
        self._transport.abort()

    def _end_exchange(self) -> None:
        self._exchange = None
        self._overdue = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        """The deadline moves with every read; the timer only catches up with it, once per period."""
        if self._reading_paused:
            self._deadline = self._loop.time() + self._idle_timeout_seconds
        untaken = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if untaken < self._untaken and not self._body_begun:
            # A large request is still on its way, and nothing can be answered yet: only who takes none of it is silent.
            self._untaken = untaken
            self._deadline = self._loop.time() + self._first_byte_timeout_seconds
        if self._loop.time() < self._deadline:
            self._overdue = False
            self._rearm()
            return
        if not self._overdue and self._unread():
            # After a stall of this process libuv runs the timers before it reads: the silence may have been our own.
            self._overdue = True
            self._timer = self._loop.call_later(UNREAD_GRACE_SECONDS, self._check_deadline)
            return
        first = not self._body_begun
        error = UpstreamTimeout(
            upstream=self._upstream,
            waiting_for="the first byte" if first else "the next byte",
            timeout_seconds=self._first_byte_timeout_seconds if first else self._idle_timeout_seconds,
        )
        self._close()
        self._fail(error, untouched=False)

    def _unread(self) -> bool:
        """Whether the kernel has something, bytes or an end, that the loop has not come to read."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLIN)
        return bool(poll.poll(0))
