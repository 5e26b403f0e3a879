"""systemd's side of a daemon: the sockets it hands over and the datagrams it wants to hear, and nothing else.

Without its variables in the environment nothing is inherited and nobody is told anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping

from aiogw.sockets import CannotListen

log = logging.getLogger(__name__)

FIRST_DESCRIPTOR = 3
# How often it is looked whether there is anything to tell: a status is told no more often than that.
TICK_SECONDS = 1.0
# While the gateway stops, it asks for so much time, again and again: one that hangs is killed after it.
EXTEND_SECONDS = 15


@contextlib.contextmanager
def inherited_sockets(environment: Mapping[str, str]) -> Iterator[list[socket.socket]]:
    """The sockets that are passed to this very process (sd_listen_fds(3)).

    Whoever uses one takes it from the list; what is left in it is closed at the end.  Raises CannotListen.
    """
    sockets: list[socket.socket] = []
    try:
        if environment.get("LISTEN_PID") == str(os.getpid()):
            _inherit(environment.get("LISTEN_FDS", ""), sockets)
        yield sockets
    finally:
        for sock in sockets:
            sock.close()


def _inherit(count: str, sockets: list[socket.socket]) -> None:
    if not (count.isascii() and count.isdecimal()):
        raise CannotListen(f"LISTEN_FDS says {count!r}; expected the number of sockets that are passed")
    for descriptor in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count)):
        cannot_use = f"cannot use descriptor {descriptor} of LISTEN_FDS={count}"
        try:
            sock = socket.socket(fileno=descriptor)
        except OSError as error:
            raise CannotListen(f"{cannot_use}: {os.strerror(error.errno or 0).lower()}") from None
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.detach()  # if nothing was passed, it may be the event loop's own by now
            raise CannotListen(f"{cannot_use}: nobody can connect to it")
        sock.set_inheritable(False)
        sockets.append(sock)


class ServiceManager:
    """Tells systemd how the gateway is (sd_notify(3)).

    ``status`` is a line for people.  ``keeps_up`` is asked before it says that the gateway is alive, which it also does
    not say when the loop comes late: then systemd's watchdog ends the process.
    """

    def __init__(
        self, environment: Mapping[str, str], *, status: Callable[[], str], keeps_up: Callable[[], bool]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._status = status
        self._keeps_up = keeps_up
        self._told_status = ""
        self._status_at = 0.0
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._watchdog_seconds = int(environment.get("WATCHDOG_USEC", "0")) / 1_000_000 if watched else 0.0
        self._tick_seconds = min(TICK_SECONDS, self._watchdog_seconds / 4 or TICK_SECONDS)
        self._socket: socket.socket | None = None
        address = environment.get("NOTIFY_SOCKET", "")
        if address.startswith(("/", "@")):
            # "@" stands for the zero byte that an abstract socket's name begins with.
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    def ready(self) -> None:
        """Everything is listened on."""
        self._tell("READY=1")
        if self._socket is not None:
            self._tick(self._loop.time())

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """The configuration is read again, and then in effect or not: ready either way."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        try:
            yield
        finally:
            self._tell("READY=1")

    def stopping(self) -> None:
        self._stopping = True
        self._tell("STOPPING=1", f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1_000_000}")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tick(self, due: float) -> None:
        now = self._loop.time()
        lines = []
        status = self._status()
        if status != self._told_status and now - self._status_at >= TICK_SECONDS:
            self._told_status, self._status_at = status, now
            lines.append(f"STATUS={status}")
        if self._stopping:
            lines.append(f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1_000_000}")
        # Asked even when it is late: the next answer rests on this one.
        keeps_up = self._keeps_up()
        if self._watchdog_seconds and keeps_up and now - due < self._watchdog_seconds / 4:
            lines.append("WATCHDOG=1")
        if lines:
            self._tell(*lines)
        self._timer = self._loop.call_later(self._tick_seconds, self._tick, now + self._tick_seconds)

    def _tell(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            # What keeps being true is told again; the service manager itself may be restarting.
            level = logging.WARNING if lines[0] == "READY=1" else logging.DEBUG
            log.log(level, "the service manager was not told %s: %s", lines[0], error)
