"""Sockets to listen on: bound here or inherited, with their options and their files.

Nothing here may know what is accepted from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from pathlib import Path
from typing import Any

from aiogw.config import ListenAddress

# Connections the kernel completes before we accept them: a burst of clients must not meet a full backlog, and whoever
# connects during a restart waits there.
BACKLOG = 4096
# What the kernel holds of answers for one slow reader (it doubles the number for its own bookkeeping).
SEND_BUFFER_BYTES = 262144
# A client that has vanished without a word is noticed after 30 s of silence.
KEEPALIVE_IDLE_SECONDS = 15
KEEPALIVE_INTERVAL_SECONDS = 5
KEEPALIVE_PROBES = 3


class CannotListen(Exception):
    """An address that cannot be listened on; the text says which and why."""


def shown(sock: socket.socket) -> str:
    """Where it listens, as the configuration says it."""
    name = sock.getsockname()
    return str(ListenAddress(path=name) if isinstance(name, str) else ListenAddress(host=name[0], port=name[1]))


class ListeningSockets:
    """The sockets of one address.  ``inherited`` ones are somebody else's, who will give them to the next process."""

    def __init__(self, sockets: list[socket.socket], *, inherited: bool, file: tuple[str, int, int] | None) -> None:
        self._sockets = sockets
        self.inherited = inherited
        self._file = file

    def __iter__(self) -> Any:
        return iter(self._sockets)

    @classmethod
    async def open(
        cls, address: ListenAddress, given: list[socket.socket], *, unacknowledged_seconds: float
    ) -> ListeningSockets:
        """Those of the ``given`` sockets that are bound to ``address``, taken from the list; else some of our own.

        Raises CannotListen.  A client that acknowledges nothing for ``unacknowledged_seconds`` is gone; Linux counts
        one that only takes nothing among them.
        """
        try:
            opened = await cls._open(address, given)
            for sock in opened:
                _set_options(sock)
                sock.setblocking(False)
                if not opened.inherited:
                    sock.listen(BACKLOG)
            opened.set_unacknowledged(unacknowledged_seconds)
        except OSError as error:
            raise CannotListen(f"cannot listen on {address}: {_reason(error)}") from None
        return opened

    @classmethod
    async def _open(cls, address: ListenAddress, given: list[socket.socket]) -> ListeningSockets:
        places = await _places(address)
        bound = {_without_scope(place) for _, place in places}
        taken = [sock for sock in given if _without_scope(sock.getsockname()) in bound]
        if taken:
            given[:] = [sock for sock in given if sock not in taken]
            return cls(taken, inherited=True, file=None)
        if address.path is not None:
            return cls([_bind_path(address.path)], inherited=False, file=_file_of(address.path))
        return cls(_bind_all(places), inherited=False, file=None)

    def set_unacknowledged(self, seconds: float) -> None:
        for sock in self._sockets:
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets = []
        # Only the file that was made here: by now another gateway's may be there.
        if self._file is not None and _file_of(self._file[0]) == self._file:
            with contextlib.suppress(OSError):
                Path(self._file[0]).unlink()
        self._file = None


def _set_options(sock: socket.socket) -> None:
    """Whatever is accepted from ``sock`` has them from it."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


async def _places(address: ListenAddress) -> list[tuple[int, Any]]:
    """The families and addresses that ``address`` stands for: a name may have several."""
    if address.path is not None:
        return [(socket.AF_UNIX, address.path)]
    found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [(family, place) for family, _, _, _, place in found]


def _bind_all(places: list[tuple[int, Any]]) -> list[socket.socket]:
    """A socket for each place; one that this machine does not have is left out if another one works."""
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, (host, port, *scope) in places:
        try:
            # Port 0 is any free one, but the same one for all addresses of a name.
            port = port or (sockets[0].getsockname()[1] if sockets else 0)
            sockets.append(_bind(family, (host, port, *scope)))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for sock in sockets:
                    sock.close()
                raise
            missing = error
    if not sockets and missing is not None:
        raise missing
    return sockets


def _bind(family: int, place: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(place)
    except OSError:
        sock.close()
        raise
    return sock


def _bind_path(path: str) -> socket.socket:
    """A Unix socket; the file of one that nobody listens on is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_listened_on(path):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        if Path(path).is_socket():
            Path(path).unlink()
        sock.bind(path)
    except OSError:
        sock.close()
        raise
    return sock


def _is_listened_on(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _without_scope(place: Any) -> Any:
    """An address without the parts that only IPv6 has."""
    return place[:2] if isinstance(place, tuple) else place


def _file_of(path: str) -> tuple[str, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return path, status.st_dev, status.st_ino


def _reason(error: OSError) -> str:
    """What is wrong, in the system's own words."""
    number = error.errno or 0
    return (os.strerror(number).lower() if number > 0 else error.strerror) or str(error)
