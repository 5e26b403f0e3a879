"""The response to one client: starts once, is written as it comes, and knows when the client has left or takes nothing.

It writes to the client's transport directly, since what it writes comes from a transport's callback and not from a
task.  Nothing here may know a dialect, the gate or the upstream.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import select
import sys
import termios
import time
from collections.abc import Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from aiohttp import web

from aiogw.canonical import ResponseHead
from aiogw.departures import Departures
from aiogw.errors import ClientGone, InternalFault
from aiogw.record import CLIENT_GONE, CLIENT_STALLED

# How often a client that lets its buffer fill is looked at.  Only slow readers are, so it costs nobody else anything.
WATCH_SECONDS = 0.05

# A small chunk is copied together with its framing, which costs less than three buffers in one write.
JOINED_BYTES = 16384

_REASONS = {status.value: status.phrase for status in HTTPStatus}


def _nobody(*_told: object) -> None:
    """Stands in for callbacks that would keep their owner in a cycle."""


@functools.lru_cache(maxsize=2)
def _date(now: int) -> str:
    return formatdate(now, usegmt=True)


class SentResponse(web.StreamResponse):
    """What the handler gives back to aiohttp when the response has already gone out by another way."""

    def __init__(self, *, status: int, keep_alive: bool) -> None:
        super().__init__(status=status)
        self._stays_open = keep_alive

    @property
    def keep_alive(self) -> bool | None:
        return self._stays_open

    async def prepare(self, request: web.BaseRequest) -> Any:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


class ClientStream:
    """The client's side of one exchange.

    Up to ``buffer_bytes`` may wait in the transport; beyond that ``on_full`` is called, and ``on_drained`` once half of
    it has gone.  A client that takes nothing for ``stall_timeout_seconds`` is given up.  ``on_lost`` is called with the
    code of the outcome when that happens, or when there is something to write and the client is found to have left.
    """

    def __init__(
        self,
        request: web.Request,
        *,
        headers: Iterable[tuple[str, str]],
        buffer_bytes: int,
        stall_timeout_seconds: float,
        departures: Departures,
        on_full: Callable[[], None],
        on_drained: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = request.transport
        self._version = request.version
        self._request_keep_alive = request.keep_alive
        self.headers = list(headers)
        self._buffer_bytes = buffer_bytes
        self._stall_timeout_seconds = stall_timeout_seconds
        self._departures = departures
        self._on_full = on_full
        self._on_drained = on_drained
        self._on_lost = on_lost
        self._chunked = False
        self._length_left: int | None = None
        self._full = False
        self._watch: asyncio.TimerHandle | None = None
        self._last_untaken = 0
        self._taken_at = 0.0
        self._drained: asyncio.Future[None] | None = None
        self.started = False
        self.keep_alive = True
        self.ended = False
        self.bytes_written = 0
        self.written_at: float | None = None
        self.status: int | None = None
        fileno = self._fileno()
        self._departure = None if fileno is None else departures.watch(fileno, self._departed)

    @property
    def gone(self) -> bool:
        """Whether the client's connection is known to be closed or closing."""
        return self._transport is None or self._transport.is_closing()

    def left_unnoticed(self) -> bool:
        """Ask the kernel whether the client has closed, for the one moment in which it matters: before a grant is used.

        Its FIN may be in the same batch of events as the one that freed the slot, or behind bytes that nobody reads.
        """
        fileno = self._fileno()
        if self.gone or fileno is None:
            return True
        poll = select.poll()
        poll.register(fileno, select.POLLRDHUP)
        return bool(poll.poll(0))

    def send(self, data: bytes, *, head: ResponseHead | None = None, last: bool = False) -> None:
        """Write ``data``, after the head if it is given, before the end if it is the last; one write for all."""
        if self.ended:
            return
        if self.gone:
            # aiohttp closes a connection that the client half-closes, and then waits for what is buffered to be taken:
            # until then nobody is told, and an upstream would go on for a client that wants nothing more.
            self._lose(CLIENT_GONE)
            return
        size = len(data)
        self.bytes_written += size
        if self._chunked and 0 < size < JOINED_BYTES and not last:
            # A token, as nearly all that is ever sent.
            self._write(b"%x\r\n%b\r\n" % (size, data))
            return
        pieces: list[bytes] = []
        if head is not None:
            pieces.append(self._start(head))
        if data:
            if self._chunked:
                pieces += (b"%x\r\n" % size, data, b"\r\n")
            else:
                pieces.append(data)
            if self._length_left is not None:
                self._length_left -= size
        if last:
            self.ended = True
            if self._chunked:
                pieces.append(b"0\r\n\r\n")
            elif self._length_left:
                # Fewer bytes than were announced: the client must not take them for the whole.
                self._lose(InternalFault.code)
                return
        if pieces:
            self._write(*pieces)

    def break_off(self) -> None:
        """Close without a proper end, so that the client can tell the response from a whole one."""
        self.ended = True
        self.keep_alive = False
        if self._transport is not None:
            self._transport.close() if self.started else self._transport.abort()

    def give_up(self) -> None:
        """Stop waiting for a client that does not take what there is for it."""
        self._lose(CLIENT_STALLED)

    async def drained(self) -> None:
        """Wait until the client has taken everything; raises ClientGone for one that has been given up.

        Without this wait a client that never reads would keep its connection and its bytes for ever.
        """
        if self._buffered() == 0:
            return
        self._drained = self._loop.create_future()
        self._start_watch()
        await self._drained

    def close(self) -> None:
        """Stop watching; nothing is written any more, and nobody called."""
        self.ended = True
        self._on_full = self._on_drained = self._on_lost = _nobody
        if self._departure is not None:
            self._departures.forget(self._departure)
            self._departure = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def response(self) -> SentResponse:
        """What the aiohttp handler returns."""
        return SentResponse(status=self.status or 0, keep_alive=self.keep_alive)

    def _start(self, head: ResponseHead) -> bytes:
        self.started = True
        self.status = head.status
        lines = [f"HTTP/1.1 {head.status} {_REASONS.get(head.status, '')}"]
        if head.content_type:
            lines.append(f"content-type: {head.content_type}")
        lines += [f"{name}: {value}" for name, value in head.headers]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if head.status in (204, 304):
            self._length_left = 0
        elif head.content_length is not None:
            self._length_left = head.content_length
            lines.append(f"content-length: {head.content_length}")
        elif self._version >= (1, 1):
            self._chunked = True
            lines.append("transfer-encoding: chunked")
        else:
            self.keep_alive = False  # HTTP/1.0: the end of the connection is the end of the body
        self.keep_alive = self.keep_alive and self._request_keep_alive and self._version >= (1, 1)
        if not self.keep_alive:
            lines.append("connection: close")
        lines.append(f"date: {_date(int(time.time()))}")
        # The upstream's values were read as Latin-1, so that whatever bytes they have are the bytes they had.
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")

    def _write(self, *pieces: bytes) -> None:
        transport = self._transport
        assert transport is not None
        if len(pieces) == 1:
            transport.write(pieces[0])
        else:
            transport.writelines(pieces)
        self.written_at = time.monotonic()
        if not self._full and transport.get_write_buffer_size() > self._buffer_bytes:
            self._full = True
            self._on_full()
            self._start_watch()

    def _buffered(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _unsent_by_kernel(self) -> int:
        """Bytes that the kernel has been given and the client has not acknowledged."""
        fileno = self._fileno()
        if fileno is None:
            return 0
        try:
            answer = fcntl.ioctl(fileno, termios.TIOCOUTQ, b"\0" * 4)
        except OSError:
            return 0
        return int.from_bytes(answer, sys.byteorder)

    def _fileno(self) -> int | None:
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        fileno = -1 if sock is None else sock.fileno()
        return fileno if fileno >= 0 else None

    def _start_watch(self) -> None:
        if self._watch is None:
            self._last_untaken = self._buffered() + self._unsent_by_kernel()
            self._taken_at = self._loop.time()
            self._watch = self._loop.call_later(WATCH_SECONDS, self._look)

    def _look(self) -> None:
        """Look at a slow client.  Its buffers, not the transport's pause and resume: only they show slow from stuck.

        The kernel's counts, too: it holds megabytes, and lets the transport write again only after a good part of them.
        """
        self._watch = None
        size, now = self._buffered(), self._loop.time()
        untaken = size + self._unsent_by_kernel()
        if untaken < self._last_untaken or untaken == 0:
            self._taken_at = now
        self._last_untaken = untaken
        if now - self._taken_at >= self._stall_timeout_seconds:
            self.give_up()
            return
        if self._full and size <= self._buffer_bytes // 2:
            self._full = False
            self._on_drained()
        if size == 0 and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._full or size:
            self._watch = self._loop.call_later(WATCH_SECONDS, self._look)

    def _departed(self) -> None:
        self._departure = None
        # Whoever has been given everything may go.
        if not self.ended or self._buffered():
            self._lose(CLIENT_GONE)

    def _lose(self, code: str) -> None:
        self.ended = True
        self.keep_alive = False
        self._on_lost(code)
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(ClientGone(code=code))
        if self._transport is not None:
            self._transport.abort()
