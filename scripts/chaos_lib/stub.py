"""The upstream of a chaos run: it answers as each request's id asks, and keeps its own account of what it held when.

It knows nothing of the gateway and nothing of the clients.  A sequence is held from the head of its request until the
response is written, the stub breaks it off, or the kernel says that the gateway has closed.  The engine behind it may
hold it longer: up to ``engine_lag_seconds`` after an abort.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import cast

from attrs import define

FLOOD_EVENT_BYTES = 32768
FLOOD_BYTES = 6 << 20
DRIP_EVENTS = 6
DRIP_SECONDS = 0.003
# How often the stub looks at how late its own loop is, and how long such a finding counts.
TICK_SECONDS = 0.005
LATE_SECONDS = 0.02
LATE_FOR_SECONDS = 0.5


def _chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    document = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "reasoning", "choices": [choice]}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


FIRST = _framed(_chunk({"role": "assistant", "content": ""}))
WORD = _framed(_chunk({"content": "word "}))
LAST = _framed(_chunk({"content": ""}, "stop")) + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
FLOOD = _framed(_chunk({"content": "x" * FLOOD_EVENT_BYTES}))
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
MESSAGE = {"role": "assistant", "content": "word word", "tool_calls": []}
WHOLE = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "reasoning",
        "choices": [{"index": 0, "message": MESSAGE, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2},
    }
).encode()
WHOLE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"


@define(eq=False)
class Held:
    """One request as the stub saw it; ``ended``: finished, cut (by the stub) or aborted (by the gateway).

    ``on_its_way``: it lay unread in a kept connection when its client left, so it had been granted before.
    """

    request_id: str
    number: int
    weight: int
    started_at: float
    kept: bool
    on_its_way: bool
    began: bool = False
    ended: str | None = None
    ended_at: float = 0.0


class Stub:
    """The listener and the account.

    ``on_start`` and ``before_finish`` tell when a sequence begins and is to end; the latter says who left just then.
    """

    def __init__(self, *, cap: int, engine_slots: int, engine_lag_seconds: float, seed: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._cap = cap
        self._engine_slots = engine_slots
        self._engine_lag_seconds = engine_lag_seconds
        self._chance = random.Random(f"engine/{seed}")
        self._server: asyncio.AbstractServer | None = None
        self._connections: set[_Connection] = set()
        # When this loop, which is also that of the clients, stood still, and for how long clocks say little after it.
        self._late: list[tuple[float, float]] = []
        self._tick_at = 0.0
        self._holding: dict[Held, _Connection] = {}
        self._engine: dict[Held, None] = {}
        self.port = 0
        self.account: list[Held] = []
        self.peak = 0
        self.engine_peak = 0
        self.over_cap: list[list[str]] = []
        self.over_slots: list[list[str]] = []
        self.too_early: list[str] = []
        self.outages = 0
        self.on_start: Callable[[str], None] = lambda _request_id: None
        self.before_finish: Callable[[], str | None] = lambda: None
        self._on_its_way: dict[_Connection, str] = {}

    @property
    def sequences_held(self) -> int:
        return sum(held.weight for held in self._holding)

    def holding(self) -> set[Held]:
        """What the gateway has not given up: the kernel is asked, since this loop may not have come to it."""
        self._reap()
        return set(self._holding)

    def was_late(self, since: float, until: float) -> bool:
        """Whether the stub was late somewhere between two moments of the monotonic clock.

        Only to be asked afterwards: a loop that stood still reads what has come before its timers tell it so.
        """
        return any(begin <= until and since <= end for begin, end in self._late)

    async def start(self) -> None:
        self._server = await self._loop.create_server(
            lambda: _Connection(self), "127.0.0.1", self.port, backlog=1024, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]
        if not self._tick_at:
            self._tick()

    async def outage(self, seconds: float) -> None:
        """Refuse connections for a while; what is idle is closed, what is being answered goes on."""
        self.outages += 1
        assert self._server is not None
        self._server.close()
        self._server = None
        self.drop_idle()
        await asyncio.sleep(seconds)
        await self.start()

    def drop_idle(self) -> None:
        for connection in list(self._connections):
            if connection.held is None:
                connection.transport.close()

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.transport.abort()

    def _tick(self) -> None:
        now = time.monotonic()
        if self._tick_at and now > self._tick_at + LATE_SECONDS:
            self._late.append((self._tick_at - TICK_SECONDS, now + LATE_FOR_SECONDS))
        self._tick_at = now + TICK_SECONDS
        self._loop.call_later(TICK_SECONDS, self._tick)

    # -- the account ------------------------------------------------------------------------------------------------

    def began(self, connection: _Connection, request_id: str, *, kept: bool) -> Held:
        number, _surface, _form, weight, *_ = request_id.split(".")
        now = time.monotonic()
        held = Held(
            request_id=request_id,
            number=int(number),
            weight=int(weight[1:]),
            started_at=now,
            kept=kept,
            on_its_way=self._on_its_way.pop(connection, None) == request_id,
        )
        self.account.append(held)
        if self.sequences_held + held.weight > self._cap:
            self._reap()
        self._holding[held] = connection
        self._engine[held] = None
        self.peak = max(self.peak, self.sequences_held)
        if self.sequences_held > self._cap:
            self.over_cap.append([one.request_id for one in self._holding])
        in_engine = sum(one.weight for one in self._engine)
        self.engine_peak = max(self.engine_peak, in_engine)
        if in_engine > self._engine_slots:
            self.over_slots.append([one.request_id for one in self._engine])
        self.on_start(request_id)
        return held

    def ended(self, held: Held, how: str) -> None:
        if held.ended is not None:
            return
        held.ended = how
        held.ended_at = time.monotonic()
        del self._holding[held]
        if how == "aborted" and self._engine_lag_seconds:
            lag = self._chance.uniform(0, self._engine_lag_seconds)
            self._loop.call_later(lag, self._engine.pop, held)
        else:
            del self._engine[held]

    def will_finish(self) -> None:
        left = self.before_finish()
        if left is not None:
            for connection in self._connections:
                if connection.held is None and connection.has(select.POLLIN):
                    self._on_its_way[connection] = left

    def _reap(self) -> None:
        """Ask the kernel which connections the gateway has closed.

        The loop may read a new request before an older end of another connection that lies in the same batch of events;
        what counts is what the gateway had done by then.
        """
        for held, connection in list(self._holding.items()):
            if connection.closed_by_peer():
                self.ended(held, "aborted")

    def connected(self, connection: _Connection) -> None:
        self._connections.add(connection)

    def disconnected(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._on_its_way.pop(connection, None)


class _Connection(asyncio.Protocol):
    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._body_left = 0
        self._requests = 0
        self._timer: asyncio.TimerHandle | None = None
        self._flooding = 0
        self._lost = False
        self.held: Held | None = None
        self.transport: asyncio.Transport

    def closed_by_peer(self) -> bool:
        return self.has(select.POLLRDHUP)

    def has(self, event: int) -> bool:
        """Whether the kernel has ``event`` for it; a connection that is closed has every one."""
        sock = self.transport.get_extra_info("socket")
        if self._lost or sock is None or sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(sock.fileno(), event)
        return bool(poll.poll(0))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit it
        self._stub.connected(self)

    def data_received(self, data: bytes) -> None:
        if self._body_left:
            self._body_left -= len(data)
            if self._body_left < 0 and self.held is not None:
                self._stub.too_early.append(self.held.request_id)
            if self._body_left <= 0:
                self._body_left = 0
                self._answer()
            return
        if self.held is not None:
            self._stub.too_early.append(self.held.request_id)
            return
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        self._buffer = b""
        fields = dict(line.split(": ", 1) for line in head.decode("latin-1").split("\r\n")[1:])
        self.held = self._stub.began(self, fields["x-request-id"], kept=self._requests > 0)
        self._requests += 1
        self._body_left = int(fields["content-length"]) - len(body)
        if self._body_left == 0:
            self._answer()

    def eof_received(self) -> bool:
        self._peer_left()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._stub.disconnected(self)
        self._peer_left()

    def _peer_left(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.held is not None:
            self._stub.ended(self.held, "aborted")

    # -- the answers ------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        assert self.held is not None
        _number, _surface, form, _weight, way, delay, *_ = self.held.request_id.split(".")
        self._later(
            int(delay.removesuffix("ms")) / 1000, getattr(self, f"_{way.partition('_4')[0].partition('_5')[0]}")
        )
        self._streams = form == "stream"
        self._way = way

    def _later(self, seconds: float, step: Callable[[], None]) -> None:
        self._timer = self._loop.call_later(seconds, step)

    def _write(self, data: bytes) -> None:
        """Something that is not the end of an answer."""
        if self.held is not None and self.held.ended is None:
            self.held.began = True
            self.transport.write(data)

    def _finish(self, data: bytes) -> None:
        """The end of an answer.  The account is settled first: the gateway may react to the bytes at once."""
        held, self.held = self.held, None
        self._timer = None
        if held is None or held.ended is not None:
            return
        held.began = True
        self._stub.ended(held, "finished")
        self._stub.will_finish()
        self.transport.write(data)

    def _break(self, *, reset: bool) -> None:
        held, self.held = self.held, None
        if held is not None:
            self._stub.ended(held, "cut")
        if reset:
            sock = self.transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self.transport.close()

    def _ok(self, *headers: bytes) -> None:
        extra = b"".join(headers) + b"\r\n"
        if self._streams:
            self._finish(STREAM_HEAD + extra + FIRST + WORD + WORD + LAST)
        else:
            self._finish(WHOLE_HEAD % len(WHOLE) + extra + WHOLE)

    _slow = _ok

    def _close_after(self) -> None:
        self._ok(b"connection: close\r\n")
        self.transport.close()

    def _die_idle(self) -> None:
        self._ok()
        self._loop.call_later(0.0005, self._die_if_idle)

    def _die_if_idle(self) -> None:
        if self.held is None:
            self.transport.close()

    def _until_close(self) -> None:
        if self._streams:
            self._close_after()
            return
        self._finish(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + WHOLE)
        self.transport.close()

    def _drip(self) -> None:
        if not self._streams:
            self._ok()
            return
        self._write(STREAM_HEAD + b"\r\n" + FIRST)
        self._later(DRIP_SECONDS, lambda: self._drop(DRIP_EVENTS))

    def _drop(self, left: int) -> None:
        if left == 0:
            self._finish(LAST)
        else:
            self._write(WORD)
            self._later(DRIP_SECONDS, lambda: self._drop(left - 1))

    def _flood(self) -> None:
        self._write(STREAM_HEAD + b"\r\n" + FIRST)
        self._flooding = FLOOD_BYTES // FLOOD_EVENT_BYTES
        self._pour()

    def _pour(self) -> None:
        while self._flooding and not self.transport.get_write_buffer_size():
            self._flooding -= 1
            self._write(FLOOD)
            if self.held is None or self.held.ended is not None:
                return
        if not self._flooding:
            self._finish(LAST)

    def resume_writing(self) -> None:
        if self._flooding:
            self._pour()

    def pause_writing(self) -> None:
        """Seen by ``_pour`` in the buffer itself."""

    def _reset_before(self) -> None:
        self._break(reset=True)

    def _fin_before(self) -> None:
        self._break(reset=False)

    def _begin(self) -> None:
        if self._streams:
            self._write(STREAM_HEAD + b"\r\n" + FIRST + WORD)
        else:
            self._write(WHOLE_HEAD % len(WHOLE) + b"\r\n" + WHOLE[:40])

    def _reset_mid(self) -> None:
        self._begin()
        # A reset overtakes what has been written, unless that is read first.
        self._later(DRIP_SECONDS, lambda: self._break(reset=True))

    def _cut(self) -> None:
        self._begin()
        self._break(reset=False)

    def _error(self) -> None:
        status = int(self._way.removeprefix("error_"))
        error = {"message": "as planned", "type": "Planned", "param": None, "code": status}
        body = json.dumps({"error": error}).encode()
        head = b"HTTP/1.1 %d Planned\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._finish(head % (status, len(body)) + body)

    def _silent(self) -> None:
        self._timer = None

    def _silent_mid(self) -> None:
        self._begin()
        self._timer = None

    def _not_http(self) -> None:
        self._write(b"SSH-2.0-OpenSSH_9.2p1\r\n")

    def _two_framings(self) -> None:
        self._write(STREAM_HEAD + b"content-length: 5\r\n\r\n0\r\n\r\n")

    def _bad_chunk(self) -> None:
        self._write(STREAM_HEAD + b"\r\n" + FIRST + b"zz\r\n")

    def _huge_head(self) -> None:
        self._write(STREAM_HEAD + b"x-filler: " + b"x" * 70000)

    def _bad_json(self) -> None:
        body = b'{"choices": [{"me'
        self._finish(WHOLE_HEAD % len(body) + b"\r\n" + body)
