"""The connections of one upstream: made when needed, kept while they are good, never shared between two requests.

There is no limit here on purpose: the gate is the only one, and two would make neither true.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from attrs import field, frozen

from aiogw.canonical import ResponseHead
from aiogw.errors import UpstreamFault, UpstreamUnavailable
from aiogw.upstream.connection import Connection

log = logging.getLogger(__name__)

# uvicorn, vLLM's server, closes a connection that has been idle for five seconds.  One that is nearly that old would
# die under the request sent on it.
MAX_IDLE_SECONDS = 4.0

# Not the endpoint's doing: there is nothing left here to make a connection with.
_OUR_OWN_LACK = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}

# So long an address is tried while its name has others (RFC 8305, section 5).
ATTEMPT_SECONDS = 0.25


@frozen(kw_only=True)
class Target:
    """Where an upstream listens: ``host`` and ``port``, or, where it is given, the ``path`` of a Unix socket.

    ``address`` is the one of the host's to connect to, None: the first that takes it.  ``authority`` is sent as
    ``Host``; ``prefix`` comes before every path; ``ssl_context`` None: plain HTTP.  ``credential`` is the gateway's
    own, sent as a bearer token; None: none is sent.
    """

    host: str
    port: int
    path: str | None
    authority: str
    prefix: str
    address: str | None = None
    ssl_context: ssl.SSLContext | None = field(repr=False)
    credential: str | None = field(repr=False)


class ResponseListener(Protocol):
    """Who waits for the response; see ``connection.Exchange`` for what the steps mean."""

    def response_step(self, head: ResponseHead | None, data: bytes, ended: bool) -> None: ...

    def response_data(self, data: bytes) -> None: ...

    def response_failed(self, error: UpstreamFault) -> None: ...


class UpstreamCall:
    """One POST and its response, over at most two connections.

    A kept connection may die just as the request is written on it.  Then, and only if not one byte of a response was
    seen, the request goes out once more on a fresh connection: still one request to whoever holds the slot.
    ``sent_at`` is when it was last written, on the monotonic clock, and ``times_sent`` how often.
    """

    def __init__(self, pool: UpstreamPool, head: bytes, body: bytes, listener: ResponseListener) -> None:
        self._pool = pool
        self._head = head
        self._body = body
        self._listener: ResponseListener | None = listener
        self.response_data = listener.response_data  # straight from the connection: there is nothing to do here
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.sent_at: float | None = None
        self.times_sent = 0

    def start(self, connection: Connection | None) -> None:
        """On ``connection``, or else on a kept one, or else on one that is made for it."""
        connection = connection or self._pool.take()
        if connection is not None:
            self._send(connection)
        else:
            self._connect()

    def abort(self) -> bool:
        """End it, now and silently: the connection is closed, whatever it was doing.

        Whether the request had been sent, so that an engine may still be at work on it.
        """
        self._listener = None
        if self._connecting is not None:
            self._connecting.cancel()
        connection, self._connection = self._connection, None
        if connection is None:
            return False
        connection.abort()
        return True

    def pause_reading(self) -> None:
        if self._connection is not None:
            self._connection.pause_reading()

    def resume_reading(self) -> None:
        if self._connection is not None:
            self._connection.resume_reading()

    # -- what the connection tells ----------------------------------------------------------------------------------

    def response_step(self, head: ResponseHead | None, data: bytes, ended: bool) -> None:
        if head is not None:
            self._body = b""  # it will not be sent again, and may be large
        if ended:
            self._connection = None
        if self._listener is not None:
            self._listener.response_step(head, data, ended)

    def response_failed(self, error: UpstreamFault, *, untouched: bool) -> None:
        was_kept = self._connection is not None and self._connection.used
        self._connection = None
        if untouched and was_kept:
            self._connect()
        elif self._listener is not None:
            self._listener.response_failed(error)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _send(self, connection: Connection) -> None:
        self._connection = connection
        self.sent_at = time.monotonic()
        self.times_sent += 1
        connection.send(self._head, self._body, self)

    def _connect(self) -> None:
        self._connecting = asyncio.get_running_loop().create_task(self._connect_and_send())

    async def _connect_and_send(self) -> None:
        try:
            connection = await self._pool.connect()
        except UpstreamUnavailable as error:
            if self._listener is not None:
                self._listener.response_failed(error)
        else:
            if self._listener is None:
                connection.abort()
            else:
                self._send(connection)
        finally:
            self._connecting = None


def request_fields(headers: Iterable[tuple[str, str]], body: bytes) -> bytes:
    """The fields of a request, made beforehand so that a grant has next to nothing left to do but write.

    ``headers`` are end-to-end fields; Host and a credential are the pool's to say, Content-Length and Accept-Encoding
    are written here.  An encoding is never asked for, because nobody could look into a compressed event stream.
    """
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers)
    text = f"{fields}accept-encoding: identity\r\ncontent-length: {len(body)}\r\n\r\n"
    return text.encode("utf-8", "surrogateescape")


class UpstreamPool:
    """The connections of the upstream ``upstream`` at ``target``; time-outs in seconds.

    ``on_unreachable`` is called whenever no connection could be made, before whoever wanted it is told.
    ``unreached_since`` is when that began, on the monotonic clock; None: the last attempt succeeded, or none was made.
    """

    def __init__(
        self,
        *,
        upstream: str,
        target: Target,
        connect_timeout_seconds: float,
        first_byte_timeout_seconds: float,
        idle_timeout_seconds: float,
        on_unreachable: Callable[[], None] = lambda: None,
    ) -> None:
        self._upstream = upstream
        self._target = target
        self.on_unreachable = on_unreachable
        self.unreached_since: float | None = None
        self._connect_timeout_seconds = connect_timeout_seconds
        self._first_byte_timeout_seconds = first_byte_timeout_seconds
        self._idle_timeout_seconds = idle_timeout_seconds
        self._idle: list[Connection] = []
        self._closed = False
        self._failure_told = False
        credential = "" if target.credential is None else f"authorization: Bearer {target.credential}\r\n"
        self._start = f" HTTP/1.1\r\nhost: {target.authority}\r\n{credential}".encode()

    def send(
        self,
        path: str,
        fields: bytes,
        body: bytes,
        listener: ResponseListener,
        *,
        method: str = "POST",
        on: Connection | None = None,
    ) -> UpstreamCall:
        """Send a request to ``path``, with what ``request_fields`` made.

        On a kept connection, or on the one it is to go ``on``, it is on the wire before this returns.
        """
        target = f"{method} {self._target.prefix}{path}".encode("utf-8", "surrogateescape")
        call = UpstreamCall(self, target + self._start + fields, body, listener)
        call.start(on)
        return call

    def close(self) -> None:
        """Drop the kept connections, and keep none from now on."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()

    def take(self) -> Connection | None:
        """The connection that was used last, which is the likeliest to be alive; None: make one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and asyncio.get_running_loop().time() - connection.idle_since < MAX_IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    async def connect(self) -> Connection:
        """A fresh connection; raises UpstreamUnavailable."""
        loop = asyncio.get_running_loop()
        connection = Connection(
            loop=loop,
            keeper=self,
            upstream=self._upstream,
            first_byte_timeout_seconds=self._first_byte_timeout_seconds,
            idle_timeout_seconds=self._idle_timeout_seconds,
        )
        target = self._target
        try:
            async with asyncio.timeout(self._connect_timeout_seconds):
                if target.path is not None:
                    await loop.create_unix_connection(lambda: connection, target.path)
                else:
                    await self._open(connection)
        except TimeoutError:
            connection.abort()
            raise self.unavailable(f"no connection within {self._connect_timeout_seconds:g} s") from None
        except OSError as error:
            connection.abort()
            detail = getattr(error, "verify_message", None)
            raise self.unavailable(_reason(error), detail, ours=error.errno in _OUR_OWN_LACK) from None
        except UnicodeError:
            # Of a name that cannot be written for DNS, which is not an OSError.
            connection.abort()
            raise self.unavailable("its name cannot be resolved") from None
        except Exception:
            # Who waits for it must not wait for ever, nor any asking in the background end: whatever it is.
            connection.abort()
            log.exception("a connection to an upstream failed in a way it should not")
            raise self.unavailable("the connection failed", ours=True) from None
        except BaseException:
            # Cancelled, perhaps in the tick in which the connection was made: it must not stay behind.
            connection.abort()
            raise
        if not connection.usable:
            # Lost again before this task had its turn: there is nothing any more to send on.
            connection.abort()
            raise self.unavailable("it closed the connection at once")
        self.unreached_since = None
        if self._failure_told:
            self._failure_told = False
            log.info("the upstream %s at %s takes connections again", self._upstream, self._where)
        return connection

    async def _open(self, connection: Connection) -> None:
        """Connect to the first of the host's addresses that takes it; raises OSError.

        The name is resolved here: a cancelled create_connection leaves its look-up behind, whose failure would then be
        logged as an exception that nobody has fetched (uvloop 0.23).
        """
        loop = asyncio.get_running_loop()
        target = self._target
        found = await loop.getaddrinfo(target.address or target.host, target.port, type=socket.SOCK_STREAM)
        sock = await _reach(deque((family, address) for family, _, _, _, address in found))
        try:
            await loop.create_connection(
                lambda: connection,
                sock=sock,
                ssl=target.ssl_context,
                server_hostname=target.host if target.ssl_context is not None else None,
            )
        except BaseException:
            sock.close()  # nobody else's before there is a transport
            raise

    def connection_idle(self, connection: Connection) -> None:
        if self._closed:
            connection.abort()
        else:
            self._idle.append(connection)

    def connection_closed(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    @property
    def _where(self) -> str:
        address = self._target.address
        return self._target.authority if address is None else f"{self._target.authority} ({address})"

    def unavailable(self, reason: str, detail: str | None = None, *, ours: bool = False) -> UpstreamUnavailable:
        """``detail`` is for the log: what it says of the upstream is not the client's business.

        ``ours``: it is not the endpoint that lacks something.
        """
        if not ours:
            self.unreached_since = self.unreached_since or time.monotonic()
            self.on_unreachable()
        # Once until it is there again: each request says in its own line how it ended.
        level = logging.DEBUG if self._failure_told else logging.WARNING
        self._failure_told = True
        told = reason if detail is None else f"{reason}: {detail}"
        log.log(level, "cannot connect to the upstream %s at %s: %s", self._upstream, self._where, told)
        return UpstreamUnavailable(upstream=self._upstream, reason=reason)


async def _reach(addresses: deque[tuple[int, Any]]) -> socket.socket:
    """A socket that is connected to one of the addresses, in their order; raises OSError.

    One that neither takes nor refuses the connection goes to the end of the line while there are others.
    """
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    while addresses:
        family, address = addresses.popleft()
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS if addresses else None) as attempt:
                await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            if attempt.expired():
                addresses.append((family, address))
            else:
                failure = error
        except BaseException:  # cancelled
            sock.close()
            raise
        else:
            return sock
    raise failure or OSError("the name has no address")


def _reason(error: OSError) -> str:
    """What went wrong, without the address, which is not the client's business."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "its certificate is not valid"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or 'handshake'}"
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    return os.strerror(error.errno).lower() if error.errno else "the connection failed"
