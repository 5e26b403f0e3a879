"""Who has left: a second opinion on clients' sockets, for when their transports are not being read.

aiogw reads a whole request before it waits, but a client may send the beginning of another one behind it; aiohttp then
stops reading the connection, and a connection that is not read cannot be seen to close.  Linux tells of a peer's FIN or
RST all the same, to an epoll of our own.  Nothing here may know what a client waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable


class Watched:
    """One watched socket; a descriptor's number alone may by now be another connection's."""

    __slots__ = ("departed", "fileno")

    def __init__(self, fileno: int, departed: Callable[[], None]) -> None:
        self.fileno = fileno
        self.departed = departed


class Departures:
    """Calls back, once and from the loop, when the peer of a watched socket has closed its sending side or reset it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._watched: dict[int, Watched] = {}
        loop.add_reader(self._epoll.fileno(), self._look)

    def watch(self, fileno: int, departed: Callable[[], None]) -> Watched:
        watched = Watched(fileno, departed)
        if fileno in self._watched:
            # Its socket was closed, which took it out of the epoll, before its owner could say that it is done.
            self._unregister(fileno)
        self._watched[fileno] = watched
        # One that has been closed in this very turn cannot be watched; its transport will tell.
        with contextlib.suppress(OSError):
            self._epoll.register(fileno, select.EPOLLRDHUP)
        return watched

    def forget(self, watched: Watched) -> None:
        """Watch no longer; safe after a departure, and when the socket has been closed."""
        if self._watched.get(watched.fileno) is watched:
            del self._watched[watched.fileno]
            self._unregister(watched.fileno)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._watched.clear()

    def _look(self) -> None:
        for fileno, _event in self._epoll.poll(0):
            self._unregister(fileno)
            watched = self._watched.pop(fileno, None)
            if watched is not None:
                watched.departed()

    def _unregister(self, fileno: int) -> None:
        with contextlib.suppress(OSError):
            self._epoll.unregister(fileno)
