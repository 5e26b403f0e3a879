"""Accepting connections: up to a limit, also when descriptors run out, and none that would be dropped at the end.

Nothing here may know a dialect, the gate or the relay, nor what is said on a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from attrs import frozen

from aiogw.config import ListenAddress
from aiogw.sockets import BACKLOG, ListeningSockets, shown

log = logging.getLogger(__name__)

TLS_HANDSHAKE_SECONDS = 10
TLS_SHUTDOWN_SECONDS = 5
# A flood of connections leaves the loop some time for those that are there.
ACCEPTS_PER_TURN = 64
# When nothing can be accepted, not even to be turned away.
REST_SECONDS = 0.5
# One line for all that were turned away meanwhile.
TELL_SECONDS = 15

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
# What Linux' accept passes on from a connection that has failed by itself.
_FAILED_BY_ITSELF = {
    errno.ECONNABORTED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENONET,
    errno.ENOPROTOOPT,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EPROTO,
}

TOO_MANY = "limit"
NO_DESCRIPTOR = "descriptors"
TLS_FAILED = "tls"

# All clients understand this one: there was no request yet whose form it could follow.
_BODY = b'{"type":"error","error":{"type":"overloaded_error","message":"too many connections; try again"}}'
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nx-should-retry: true\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class AcceptedProtocol(Protocol):
    """What serves a connection; ``transport`` is None until it has been made."""

    transport: Any


@frozen(kw_only=True)
class ListenerStatistics:
    connections: int
    max_connections: int
    refused_total: Mapping[str, int]


class Listener:
    """Accepts connections on the sockets of one address and hands them to ``protocol_factory``.

    ``connections`` says how many are open there.
    """

    def __init__(
        self,
        *,
        protocol_factory: Callable[[], Any],
        connections: Callable[[], int],
        max_connections: int,
        unacknowledged_seconds: float,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._protocol_factory = protocol_factory
        self._connections = connections
        self._max_connections = max_connections
        # What there are descriptors for, whatever ``max_connections`` says.
        self.descriptors_allow = sys.maxsize
        self._unacknowledged_seconds = unacknowledged_seconds
        self._ssl_context = ssl_context
        self._sockets = ListeningSockets([], inherited=False, file=None)
        self._stopped = False
        self._spare = _open_spare()
        self._arriving: set[AcceptedProtocol] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused: Counter[str] = Counter({TOO_MANY: 0, NO_DESCRIPTOR: 0})
        self._told: Counter[str] = Counter()
        self._telling: asyncio.TimerHandle | None = None
        self._turns = 0
        self._waiting_at_turn: int | None = None

    def change(
        self, *, max_connections: int, unacknowledged_seconds: float, ssl_context: ssl.SSLContext | None
    ) -> None:
        """What is true for the connections that come from now on."""
        self._max_connections = max_connections
        self._ssl_context = ssl_context
        self._sockets.set_unacknowledged(unacknowledged_seconds)

    @property
    def addresses(self) -> tuple[Any, ...]:
        """As sockets name them: (host, port, ...) or a path."""
        return tuple(sock.getsockname() for sock in self._sockets)

    @property
    def open(self) -> int:
        """Connections that are open, those included that are still to be handed over."""
        # Whoever has a transport is among ``connections``, although its task may need another turn to end.
        self._arriving = {protocol for protocol in self._arriving if protocol.transport is None}
        return self._connections() + len(self._arriving)

    @property
    def _limit(self) -> int:
        return min(self._max_connections, self.descriptors_allow)

    def statistics(self) -> ListenerStatistics:
        return ListenerStatistics(connections=self.open, max_connections=self._limit, refused_total=dict(self._refused))

    async def listen(self, address: ListenAddress, given: list[socket.socket], purpose: str) -> None:
        """Listen on ``address``, on ``given`` sockets if there are some for it, and say so; raises CannotListen."""
        self._sockets = await ListeningSockets.open(address, given, unacknowledged_seconds=self._unacknowledged_seconds)
        scheme = "" if address.path is not None else "http://" if self._ssl_context is None else "https://"
        for sock in self._sockets:
            self._loop.add_reader(sock, self._accept, sock)
            log.info("%s on %s%s%s", purpose, scheme, shown(sock), " (inherited)" if self._sockets.inherited else "")

    def stop_accepting(self) -> None:
        """Take no more connections.

        What waits at an inherited socket is for the next process.  To a socket of our own nobody comes any more, so
        whoever waits there is taken in first.
        """
        for sock in self._sockets:
            if not self._sockets.inherited:
                for _ in range(BACKLOG // ACCEPTS_PER_TURN):
                    if not self._accept(sock):
                        break
            self._loop.remove_reader(sock)
        self._stopped = True
        if not self._sockets.inherited:
            self._sockets.close()

    async def close(self) -> None:
        """Stop, and break off what is still being handed over."""
        for sock in self._sockets:
            self._loop.remove_reader(sock)
        self._stopped = True
        self._sockets.close()
        # A task that is cancelled before its first step would never know that it has a connection to close.
        await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._telling is not None:
            self._telling.cancel()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def keeps_up(self) -> bool:
        """Whether nobody waits to be accepted who already did at the last call, and nobody was accepted since."""
        poll = select.poll()
        for sock in self._sockets if not self._stopped else ():
            poll.register(sock, select.POLLIN)
        waited, self._waiting_at_turn = self._waiting_at_turn, self._turns if poll.poll(0) else None
        return waited is None or waited != self._waiting_at_turn

    # -- accepting --------------------------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> bool:
        """Take what waits; the answer is whether there may be more.

        ``accept`` is called in a plain callback: a coroutine that accepts can be cancelled with a connection in hand.
        """
        self._turns += 1
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _peer = listening.accept()
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in _FAILED_BY_ITSELF or (error.errno in _EXHAUSTED and self._turn_away(listening)):
                    continue
                self._rest(listening, error)
                return False
            self._take(sock)
        return True

    def _take(self, sock: socket.socket) -> None:
        if self.open >= self._limit:
            self._refuse(sock, TOO_MANY)
            return
        sock.setblocking(False)
        protocol = self._protocol_factory()
        self._arriving.add(protocol)
        task = self._loop.create_task(self._hand_over(sock, protocol))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hand_over(self, sock: socket.socket, protocol: Any) -> None:
        tls = self._ssl_context
        seconds = {"ssl_handshake_timeout": TLS_HANDSHAKE_SECONDS, "ssl_shutdown_timeout": TLS_SHUTDOWN_SECONDS}
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, sock, ssl=tls, **(seconds if tls else {}))
        except OSError:
            # Mostly a peer that does not speak TLS, or has left before it was served.
            sock.close()
            if tls is not None:
                self._count(TLS_FAILED)
        finally:
            self._arriving.discard(protocol)

    def _refuse(self, sock: socket.socket, reason: str) -> None:
        with sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            if self._ssl_context is None:
                sock.send(_REFUSAL)
            sock.shutdown(socket.SHUT_WR)
            # Closing over bytes that nobody has read is a reset, which may overtake the answer.
            sock.recv(65536)
        self._count(reason)

    def _turn_away(self, listening: socket.socket) -> bool:
        """Give the spare descriptor for the moment that it takes to tell one client; False if that is not possible."""
        if self._spare is None:
            return False
        os.close(self._spare)
        try:
            sock, _peer = listening.accept()
        except OSError as error:
            return error.errno not in _EXHAUSTED
        else:
            self._refuse(sock, NO_DESCRIPTOR)
            return True
        finally:
            self._spare = _open_spare()

    def _rest(self, listening: socket.socket, error: OSError) -> None:
        """Do not try for a moment: the same would only happen again, in every turn of the loop."""
        self._count(NO_DESCRIPTOR if error.errno in _EXHAUSTED else errno.errorcode.get(error.errno or 0, "error"))
        self._loop.remove_reader(listening)
        self._loop.call_later(REST_SECONDS, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if self._stopped:
            return
        if self._spare is None:
            self._spare = _open_spare()
        self._loop.add_reader(listening, self._accept, listening)
        self._accept(listening)

    def _count(self, reason: str) -> None:
        self._refused[reason] += 1
        if self._telling is None:
            self._tell()

    def _tell(self) -> None:
        self._telling = None
        fresh = self._refused - self._told
        if not fresh:
            return
        self._told = self._refused.copy()
        told = ", ".join(f"{reason}: {count}" for reason, count in sorted(fresh.items()))
        log.warning("turned connections away (%s); %d of %d are open", told, self.open, self._limit)
        self._telling = self._loop.call_later(TELL_SECONDS, self._tell)


def _open_spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
