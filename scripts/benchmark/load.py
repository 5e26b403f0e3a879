"""The load: HTTP/1.1 clients on bare protocols, so that what is measured is the gateway and not its clients."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, cast

import httptools
from attrs import frozen

STAMP = re.compile(rb"@(\d+)@")
# Every client shows it; only the gateway asks.
KEY = "sk-aiogw-bench-7d1f0c5e2b9a48636f"
PATHS = {"openai": "/v1/chat/completions", "anthropic": "/llm/v1/messages"}
# A client that was refused comes back after this; without a pause a few clients would be a storm.
REFUSED_PAUSE_SECONDS = 0.02


def request(surface: str, *, tag: int = 0, stream: bool = False, body_bytes: int = 0) -> bytes:
    """One POST in the words of ``surface``, its body padded to ``body_bytes``; ``tag`` is what the stub knows it by."""
    document: dict[str, Any] = {
        "model": "reasoning",
        "max_tokens": 1000,
        "stream": stream,
        "messages": [{"role": "user", "content": f"tag:{tag} "}],
    }
    padding = body_bytes - len(json.dumps(document))
    document["messages"][0]["content"] += "x" * max(0, padding)
    return post(PATHS[surface], json.dumps(document).encode())


def post(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nuser-agent: aiogw-bench\r\naccept: */*\r\n"
        f"authorization: Bearer {KEY}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@frozen(kw_only=True)
class Answer:
    """A whole response; ``seconds`` from the request's first byte sent to the response's last byte received."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float


class ClientConnection(asyncio.Protocol):
    """One connection with at most one request on it.  With ``on_body``, body bytes go there and are not kept."""

    def __init__(self, on_body: Callable[[bytes], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._take_body = on_body if on_body is not None else self._body.append
        self._sent_at = 0.0
        self.begun: asyncio.Future[int] | None = None
        self.answer: asyncio.Future[Answer] | None = None
        self.usable = False

    def send(self, request: bytes) -> asyncio.Future[Answer]:
        """Send ``request``; ``begun`` then waits for the head of the response, what is returned for its end."""
        if self._transport is None or not self.usable:
            raise ConnectionError("the connection has been closed")
        self.begun = self._loop.create_future()
        self.answer = self._loop.create_future()
        self._sent_at = time.monotonic()
        self._transport.write(request)
        return self.answer

    def abort(self) -> None:
        """Leave, now, as a client whose process has been killed does."""
        self.usable = False
        for future in (self.begun, self.answer):
            if future is not None:
                future.cancel()
        if self._transport is not None:
            self._transport.abort()

    # -- what the transport calls -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an instance of asyncio's class: uvloop's transports only behave like it.
        self._transport = cast(asyncio.Transport, transport)
        self.usable = True

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        for future in (self.begun, self.answer):
            if future is not None and not future.done():
                future.set_exception(ConnectionError("the connection was closed before the response was whole"))
                future.exception()  # looked at, so that asyncio does not complain of the one nobody waits for

    # -- what the parser calls --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._headers = {}
        self._body.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.begun is not None and not self.begun.done():
            self.begun.set_result(self._parser.get_status_code())

    def on_body(self, piece: bytes) -> None:
        self._take_body(piece)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.usable = False
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(
                Answer(
                    status=self._parser.get_status_code(),
                    headers=self._headers,
                    body=b"".join(self._body),
                    seconds=time.monotonic() - self._sent_at,
                )
            )


async def connect(port: int, on_body: Callable[[bytes], None] | None = None) -> ClientConnection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: ClientConnection(on_body), "127.0.0.1", port)
    return connection


async def connect_many(port: int, count: int) -> list[ClientConnection]:
    """``count`` connections, a few at a time: a burst of thousands would test the kernel's backlog instead."""
    connections: list[ClientConnection] = []
    while len(connections) < count:
        batch = min(50, count - len(connections))
        connections += await asyncio.gather(*(connect(port) for _ in range(batch)))
    return connections


class Clients:
    """Connections and the tasks that use them, all of them gone at the end of the ``async with``."""

    def __init__(self) -> None:
        self.connections: list[ClientConnection] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self.tasks:
            task.cancel()
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        for connection in self.connections:
            connection.abort()
        if error is None:
            for result in results:
                if isinstance(result, Exception):
                    raise result


class ClosedLoop(Clients):
    """``count`` clients that each send their next request when they have had the answer to the last one.

    ``late_us``: how old each 200 was when it arrived, since the upstream wrote it.
    """

    def __init__(self, port: int, *, count: int, surfaces: Sequence[str], body_bytes: int = 0) -> None:
        super().__init__()
        self._port = port
        self._count = count
        self._requests = [request(surface, body_bytes=body_bytes) for surface in surfaces]
        self.statuses: Counter[int] = Counter()
        self.late_us: list[float] = []

    async def __aenter__(self) -> Self:
        self.connections = await connect_many(self._port, self._count)
        self.tasks = [asyncio.create_task(self._client(index)) for index in range(self._count)]
        return self

    def forget(self) -> None:
        """Start counting anew, and raise the fault of a client that has had one."""
        for task in self.tasks:
            if task.done():
                task.result()
        self.statuses.clear()
        self.late_us.clear()

    async def _client(self, index: int) -> None:
        request_bytes = self._requests[index % len(self._requests)]
        while True:
            if not self.connections[index].usable:
                self.connections[index] = await connect(self._port)
            answer = await self.connections[index].send(request_bytes)
            self.statuses[answer.status] += 1
            if answer.status == 200:
                now_ns = time.monotonic_ns()
                found = STAMP.search(answer.body)
                if found is not None:
                    self.late_us.append((now_ns - int(found[1])) / 1e3)
            else:
                await asyncio.sleep(REFUSED_PAUSE_SECONDS)


class Paced(Clients):
    """``per_second`` requests, evenly, whatever the answers take; each on the next of ``count`` connections."""

    def __init__(self, port: int, *, count: int, surface: str, per_second: int, body_bytes: int) -> None:
        super().__init__()
        self._port = port
        self._count = count
        self._request = request(surface, body_bytes=body_bytes)
        self._per_second = per_second

    async def __aenter__(self) -> Self:
        self.connections = await connect_many(self._port, self._count)
        self.tasks = [asyncio.create_task(self._send())]
        return self

    def check(self) -> None:
        """Raise unless every answer so far was a 200."""
        for connection in self.connections:
            if connection.answer is not None and connection.answer.done() and connection.answer.result().status != 200:
                raise ConnectionError(f"a request was answered with {connection.answer.result().status}")

    async def _send(self) -> None:
        next_at = time.monotonic()
        while True:
            for connection in self.connections:
                if connection.answer is None or connection.answer.done():
                    connection.send(self._request)
                next_at += 1 / self._per_second
                await asyncio.sleep(max(0, next_at - time.monotonic()))


class Streams(Clients):
    """``count`` event streams; ``late_us``: how old each event was as it came; ``written_ns``: when it was written."""

    def __init__(self, port: int, *, count: int, surface: str) -> None:
        super().__init__()
        self._port = port
        self._count = count
        self._surface = surface
        self.late_us: list[float] = []
        self.written_ns: list[int] = []

    async def __aenter__(self) -> Self:
        self.connections = [await connect(self._port, self._take) for _ in range(self._count)]
        for tag, connection in enumerate(self.connections):
            connection.send(request(self._surface, tag=tag, stream=True))
        await all_begun(self.connections)
        return self

    def check(self) -> None:
        """Raise if a stream has ended."""
        if not all(connection.usable for connection in self.connections):
            raise ConnectionError("a stream ended while it was measured")

    def received(self, since: float, until: float) -> int:
        """How many events have arrived of those that were written between two times of the monotonic clock."""
        return sum(since <= ns / 1e9 <= until for ns in self.written_ns)

    def _take(self, piece: bytes) -> None:
        now_ns = time.monotonic_ns()
        for stamp in STAMP.findall(piece):
            self.written_ns.append(int(stamp))
            self.late_us.append((now_ns - int(stamp)) / 1e3)


async def all_begun(connections: Sequence[ClientConnection]) -> None:
    """Wait for the heads of all responses; raises unless each is a 200."""
    for connection in connections:
        assert connection.begun is not None
        status = await connection.begun
        if status != 200:
            raise ConnectionError(f"a stream was answered with {status}")
