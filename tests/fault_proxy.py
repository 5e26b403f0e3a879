"""A proxy that does one thing wrong: it relays bytes between two peers until a point of their exchange, then strikes.

Nothing here may know who the peers are or what becomes of them; which faults there are is in ``fault_kinds``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from rig import Address, set_reset_on_close

NEAR, FAR = "near", "far"
"""The ends of a link: who has connected to the proxy, and whom it connected to for that."""

UP, DOWN = "up", "down"
"""The directions of a link: towards the far end, which is the way of requests, and back."""

Step = Callable[["Link", "Flow"], Awaitable[None]]
"""A part of a fault; it gets the flow in which the point was reached."""


@dataclass(frozen=True)
class Point:
    """Where in an exchange a fault strikes: ``find`` has the offset in what went ``direction`` so far, once known.

    ``find`` None: as soon as there is a connection.
    """

    name: str
    direction: str
    find: Callable[[bytes], int | None] | None


def _after(mark: bytes, more: int) -> Callable[[bytes], int | None]:
    def find(seen: bytes) -> int | None:
        at = seen.find(mark)
        return None if at < 0 else at + len(mark) + more

    return find


def _first_body_byte(seen: bytes) -> int | None:
    head, found, body = seen.partition(b"\r\n\r\n")
    if not found or b"chunked" not in head:
        return len(head) + 5 if found else None
    size, found, _ = body.partition(b"\r\n")
    return len(head) + 4 + len(size) + 3 if found else None


def _last_byte(seen: bytes) -> int | None:
    """Before the last byte of a response, whichever way it is framed."""
    head, found, _ = seen.partition(b"\r\n\r\n")
    if not found:
        return None
    if b"chunked" in head:
        at = seen.find(b"\r\n0\r\n\r\n")
        return None if at < 0 else at + 6
    length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    return len(head) + 4 + int(length) - 1


CONNECT = Point("connect", UP, None)
POINTS = (
    CONNECT,
    Point("request-head", UP, lambda _seen: 20),
    Point("request-body", UP, _after(b"\r\n\r\n", 12)),
    Point("response-head", DOWN, lambda _seen: 12),
    Point("first-byte", DOWN, _first_body_byte),
    # The exchanges are about this word.
    Point("mid-event", DOWN, _after(b"Hel", 0)),
    Point("end", DOWN, _last_byte),
)


class Flow:
    """One direction of a link: what ``source`` says, on its way to ``sink``.

    ``forward`` passes bytes on, in whatever way a fault makes it; ``edit`` changes what comes next, once.
    """

    def __init__(self, link: Link, source: socket.socket, sink: socket.socket) -> None:
        self.link = link
        self.source = source
        self.sink = sink
        self.forward: Callable[[bytes], Awaitable[None]] = self.send
        self.edit: Callable[[bytes], bytes] | None = None
        self.deaf = False
        self._point: Point | None = None
        self._seen = b""
        self._loop = asyncio.get_running_loop()
        self.task = asyncio.ensure_future(self._run())

    @property
    def closed(self) -> bool:
        return self.source.fileno() < 0 or self.sink.fileno() < 0

    async def send(self, data: bytes) -> None:
        await self.link.open.wait()
        await self._loop.sock_sendall(self.sink, data)

    async def swallow(self, data: bytes) -> None:
        """Take it and say nothing of it, nor of the end."""

    def arm(self, point: Point | None) -> None:
        """Strike at ``point`` of what comes from now on."""
        self._point = point
        self._seen = b""

    def become_deaf(self) -> None:
        self.deaf = True
        self.forward = self.swallow

    async def _run(self) -> None:
        try:
            await self.link.begun.wait()
            while data := await self._loop.sock_recv(self.source, 1 << 16):
                await self._take(data)
                if self.closed:
                    return
            if not self.deaf:
                self.link.half_close(self.sink)
        except ConnectionError:
            if not self.deaf:
                self.link.drop()

    async def _take(self, data: bytes) -> None:
        self.link.note(self)
        if self._point is not None and self._point.find is not None:
            before = len(self._seen)
            self._seen += data
            at = self._point.find(self._seen)
            if at is not None and at < len(self._seen):
                self._point = None
                cut = max(0, at - before)
                if cut:
                    await self.forward(data[:cut])
                await self.link.strike(self)
                data = data[cut:]
        if self.edit is not None:
            edit, self.edit = self.edit, None
            data = edit(data)
        if data and not self.closed:
            await self.forward(data)


class Link:
    """A connection through the proxy: two sockets and the flows between them."""

    def __init__(self, proxy: FaultProxy, near: socket.socket, far: socket.socket) -> None:
        self._proxy = proxy
        self._loop = asyncio.get_running_loop()
        self.ends = {NEAR: near, FAR: far}
        self.open = asyncio.Event()
        self.open.set()
        self.begun = asyncio.Event()
        self._answered = False
        self.flows = {UP: Flow(self, near, far), DOWN: Flow(self, far, near)}
        self.arm(proxy.point)
        for flow in self.flows.values():
            flow.task.add_done_callback(self._ended)

    def arm(self, point: Point | None) -> None:
        for direction, flow in self.flows.items():
            flow.arm(point if point is not None and point.direction == direction else None)

    def note(self, flow: Flow) -> None:
        """A request after an answer is another exchange, which has its fault, too."""
        if flow is self.flows[DOWN]:
            self._answered = True
        elif self._answered:
            self._answered = False
            self.arm(self._proxy.point)

    async def begin(self) -> None:
        if self._proxy.point is CONNECT:
            await self.strike(self.flows[UP])
        self.begun.set()

    async def strike(self, flow: Flow) -> None:
        self._proxy.struck += 1
        for step in self._proxy.steps:
            await step(self, flow)

    def is_open(self, end: str) -> bool:
        return self.ends[end].fileno() >= 0

    def half_close(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)

    def close(self, end: str, *, reset: bool = False) -> None:
        """Close one end; what flows to or from it ends without the other end being told."""
        sock = self.ends[end]
        if sock.fileno() < 0:
            return
        for flow in self.flows.values():
            if flow.task is not asyncio.current_task():
                flow.task.cancel()
        # Now, because the number of the descriptor may be another socket's when the tasks get to it.
        self._loop.remove_reader(sock)
        self._loop.remove_writer(sock)
        if reset:
            set_reset_on_close(sock)
        sock.close()

    def drop(self) -> None:
        """Whatever is left of it, reset."""
        self.close(NEAR, reset=True)
        self.close(FAR, reset=True)
        self._proxy.links.discard(self)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._proxy.own_faults.append(repr(task.exception()))
        # One that a fault has made deaf stays as it is until it is dropped: nobody is told anything.
        if all(flow.task.done() and not flow.deaf and not flow.task.cancelled() for flow in self.flows.values()):
            self.close(NEAR)
            self.close(FAR)
            self._proxy.links.discard(self)


class FaultProxy:
    """Listens at ``address`` for whoever wants ``target``; at ``point`` of each link the ``steps`` are taken."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._in_the_way: list[socket.socket] = []
        self.links: set[Link] = set()
        self.point: Point | None = None
        self.steps: tuple[Step, ...] = ()
        self.struck = 0
        self.own_faults: list[str] = []
        self._listen(0)
        self.address: tuple[str, int] = self._listener.getsockname()

    def _listen(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self._listener.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept())

    def set_fault(self, point: Point | None, steps: Iterable[Step] = ()) -> None:
        self.point = point
        self.steps = tuple(steps)
        self.struck = 0

    def refuse(self) -> None:
        """Let the kernel refuse whoever wants to connect."""
        self._stop_accepting()
        self._listener.close()

    def let_wait(self) -> None:
        """Let the kernel answer nothing to whoever wants to connect, because the backlog is full."""
        self._stop_accepting()
        self._listener.listen(0)
        for _ in range(2):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(self.address)
            self._in_the_way.append(sock)

    def accept_again(self) -> None:
        while self._in_the_way:
            self._in_the_way.pop().close()
        self._listener.close()
        self._listen(self.address[1])

    def drop(self) -> None:
        """Reset all links."""
        for link in list(self.links):
            link.drop()

    def stop(self) -> None:
        self.drop()
        for task in self._beginning:
            task.cancel()
        self._stop_accepting()
        self._listener.close()

    def _stop_accepting(self) -> None:
        self._accepting.cancel()
        self._loop.remove_reader(self._listener)

    async def _accept(self) -> None:
        while True:
            near, _ = await self._loop.sock_accept(self._listener)
            task = asyncio.ensure_future(self._begin(near))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, near: socket.socket) -> None:
        far = socket.socket(socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET)
        for sock in (near, far):
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await self._loop.sock_connect(far, self._target)
        link = Link(self, near, far)
        self.links.add(link)
        await link.begin()
