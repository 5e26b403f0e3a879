"""One connection to an upstream: however a response is framed, cut, delayed or malformed, it has one outcome."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from rig import FakeTransport, Outcome

from aiogw.errors import UpstreamBroken, UpstreamTimeout
from aiogw.upstream.connection import MAX_HEAD_BYTES, UNREAD_GRACE_SECONDS, Connection

REQUEST_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"


class Keeper:
    """Owns the connection, and writes down what it is told."""

    def __init__(self) -> None:
        self.idle: list[Connection] = []
        self.closed: list[Connection] = []

    def connection_idle(self, connection: Connection) -> None:
        self.idle.append(connection)

    def connection_closed(self, connection: Connection) -> None:
        self.closed.append(connection)


class Wire:
    """A connection on a transport that is not real, so that every byte arrives when the test says."""

    def __init__(self, *, first_byte_timeout_seconds: float = 5, idle_timeout_seconds: float = 5) -> None:
        loop = asyncio.get_running_loop()
        self.keeper = Keeper()
        self.connection = Connection(
            loop=loop,
            keeper=self.keeper,
            upstream="reasoning",
            first_byte_timeout_seconds=first_byte_timeout_seconds,
            idle_timeout_seconds=idle_timeout_seconds,
        )
        self.transport = FakeTransport(self.connection, loop)
        self.connection.connection_made(self.transport)

    def request(self, body: bytes = b"{}") -> Outcome:
        outcome = Outcome()
        self.connection.send(REQUEST_HEAD, body, outcome)
        return outcome

    def receive(self, *pieces: bytes) -> None:
        """What the upstream sends, as long as the connection would still take it."""
        for piece in pieces:
            if not self.transport.closing:
                self.connection.data_received(piece)

    def end(self) -> None:
        """The upstream closes in order."""
        self.transport.lose()

    @property
    def kept(self) -> bool:
        return self.connection in self.keeper.idle and self.connection.usable


def answer(raw: bytes) -> bytes:
    """Line ends as HTTP has them, for readable tables."""
    return raw.replace(b"\n", b"\r\n")


OK = b"HTTP/1.1 200 OK\n"

# What comes, the status and the body it means, and whether the connection can be used again.
COMPLETE = {
    "length": (OK + b"content-type: a/b\ncontent-length: 5\n\nhello", 200, b"hello", True),
    "length-0": (OK + b"content-length: 0\n\n", 200, b"", True),
    "length-padded": (OK + b"Content-Length:   5  \n\nhello", 200, b"hello", True),
    "chunked": (OK + b"transfer-encoding: chunked\n\n5\nhello\n0\n\n", 200, b"hello", True),
    "chunked-empty": (OK + b"transfer-encoding: chunked\n\n0\n\n", 200, b"", True),
    "chunked-many": (OK + b"Transfer-Encoding: Chunked\n\n1\nh\n3\nell\n01\no\n0\n\n", 200, b"hello", True),
    "chunked-hex": (
        OK + b"transfer-encoding: chunked\n\nA\n0123456789\na\n0123456789\n0\n\n",
        200,
        b"0123456789" * 2,
        True,
    ),
    "chunk-extensions": (OK + b'transfer-encoding: chunked\n\n5;a=b;c="d"\nhello\n0;e\n\n', 200, b"hello", True),
    "trailers": (OK + b"transfer-encoding: chunked\n\n5\nhello\n0\nx-a: 1\nx-b: 9\n\n", 200, b"hello", True),
    "204": (b"HTTP/1.1 204 No Content\n\n", 204, b"", True),
    "204-chunked": (b"HTTP/1.1 204 No Content\nserver: x\n\n", 204, b"", True),
    "304": (b"HTTP/1.1 304 Not Modified\netag: 1\n\n", 304, b"", True),
    "304-length": (b"HTTP/1.1 304 Not Modified\ncontent-length: 5\n\n", 304, b"", True),
    "400": (b"HTTP/1.1 400 Bad Request\ncontent-length: 2\n\n{}", 400, b"{}", True),
    "100": (b"HTTP/1.1 100 Continue\n\n" + OK + b"content-length: 5\n\nhello", 200, b"hello", True),
    "103": (
        b"HTTP/1.1 103 Early Hints\nlink: x\ncontent-length: 7\n\n" + OK + b"content-length: 5\n\nhello",
        200,
        b"hello",
        True,
    ),
    "many-1xx": (b"HTTP/1.1 102 Processing\n\n" * 5 + OK + b"content-length: 5\n\nhello", 200, b"hello", True),
    "no-reason": (b"HTTP/1.1 200 \ncontent-length: 5\n\nhello", 200, b"hello", True),
    "odd-reason": (b"HTTP/1.1 299 \xe9\xff Yes?\ncontent-length: 5\n\nhello", 299, b"hello", True),
    "close": (OK + b"connection: close\ncontent-length: 5\n\nhello", 200, b"hello", False),
    "close-among": (OK + b"Connection: x-a, Close\ncontent-length: 5\n\nhello", 200, b"hello", False),
    "close-chunked": (OK + b"connection: close\ntransfer-encoding: chunked\n\n5\nhello\n0\n\n", 200, b"hello", False),
    "1.0-length": (b"HTTP/1.0 200 OK\ncontent-length: 5\n\nhello", 200, b"hello", False),
    "1.0-keep": (b"HTTP/1.0 200 OK\nconnection: keep-alive\ncontent-length: 5\n\nhello", 200, b"hello", True),
    "surplus-junk": (OK + b"content-length: 5\n\nhellojunk", 200, b"hello", False),
    "surplus-answer": (OK + b"content-length: 5\n\nhello" + OK + b"content-length: 1\n\nx", 200, b"hello", False),
    "surplus-chunked": (OK + b"transfer-encoding: chunked\n\n5\nhello\n0\n\nHTTP/1.1 500 x\n", 200, b"hello", False),
    "surplus-204": (b"HTTP/1.1 204 No Content\n\nbody", 204, b"", False),
}

# Those whose end is that of the connection.
UNTIL_CLOSE = {
    "until-close": (OK + b"content-type: a/b\n\nhello", b"hello"),
    "until-close-empty": (OK + b"\n", b""),
    "until-close-1.0": (b"HTTP/1.0 200 OK\n\nhello", b"hello"),
    "until-close-said": (OK + b"connection: close\n\nhello", b"hello"),
    "until-close-keep": (OK + b"connection: keep-alive\n\nhello", b"hello"),
}

BROKEN = {
    "nonsense": b"hello\n\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "http2": b"PRI * HTTP/2.0\n\nSM\n\n",
    "request": b"POST / HTTP/1.1\n\n",
    "version": b"HTTP/3.7 200 OK\ncontent-length: 0\n\n",
    "version-text": b"HTTP/x.y 200 OK\n\n",
    "status-text": b"HTTP/1.1 OK 200\n\n",
    "status-short": b"HTTP/1.1 20\n\n",
    "status-long": b"HTTP/1.1 2000 OK\n\n",
    "header-without-colon": OK + b"nonsense\n\n",
    "header-space": OK + b"a b: c\n\n",
    "header-space-colon": OK + b"a : c\n\n",
    "header-nul": OK + b"a: b\x00c\n\n",
    "header-no-name": OK + b": c\n\n",
    "length-text": OK + b"content-length: five\n\nhello",
    "length-negative": OK + b"content-length: -5\n\nhello",
    "length-plus": OK + b"content-length: +5\n\nhello",
    "length-list": OK + b"content-length: 5, 5\n\nhello",
    "length-huge": OK + b"content-length: 99999999999999999999999\n\nhello",
    "length-twice": OK + b"content-length: 5\ncontent-length: 5\n\nhello",
    "length-two": OK + b"content-length: 5\ncontent-length: 6\n\nhello",
    "both": OK + b"content-length: 5\ntransfer-encoding: chunked\n\n5\nhello\n0\n\n",
    "both-other-order": OK + b"transfer-encoding: chunked\ncontent-length: 5\n\n5\nhello\n0\n\n",
    "length-in-trailer": OK + b"transfer-encoding: chunked\n\n5\nhello\n0\ncontent-length: 9\n\n",
    "coding-gzip": OK + b"transfer-encoding: gzip\n\nhello",
    "coding-gzip-chunked": OK + b"transfer-encoding: gzip, chunked\n\n5\nhello\n0\n\n",
    "coding-identity": OK + b"transfer-encoding: identity\n\nhello",
    "coding-twice": OK + b"transfer-encoding: chunked\ntransfer-encoding: chunked\n\n0\n\n",
    "coding-not-last": OK + b"transfer-encoding: chunked, gzip\n\nhello",
    "chunk-size-text": OK + b"transfer-encoding: chunked\n\nzz\nhello\n0\n\n",
    "chunk-size-none": OK + b"transfer-encoding: chunked\n\n\nhello\n0\n\n",
    "chunk-size-negative": OK + b"transfer-encoding: chunked\n\n-5\nhello\n0\n\n",
    "chunk-size-huge": OK + b"transfer-encoding: chunked\n\nfffffffffffffffff\nhello\n0\n\n",
    "chunk-too-long": OK + b"transfer-encoding: chunked\n\n5\nhello!\n0\n\n",
    "upgrade": b"HTTP/1.1 101 Switching Protocols\nconnection: upgrade\nupgrade: websocket\n\n",
}


@pytest.mark.parametrize("name", COMPLETE)
@pytest.mark.parametrize("step", [1, 2, 7, 100000])
async def test_complete(name: str, step: int) -> None:
    """A response means the same in one piece and byte by byte, and decides whether its connection is kept."""
    raw, status, body, kept = COMPLETE[name]
    raw = answer(raw)
    wire = Wire()
    outcome = wire.request()
    wire.receive(*(raw[start : start + step] for start in range(0, len(raw), step)))

    assert outcome.ended
    assert outcome.head is not None
    assert (outcome.head.status, outcome.data) == (status, body)
    if not name.startswith("surplus"):
        assert wire.kept == kept
    await asyncio.sleep(0)
    assert wire.kept == kept
    assert wire.transport.closing != kept


@pytest.mark.parametrize("name", UNTIL_CLOSE)
@pytest.mark.parametrize("step", [1, 7, 100000])
async def test_complete_with_the_end_of_the_connection(name: str, step: int) -> None:
    """Without any other framing the end in order of the connection is that of the body."""
    raw, body = UNTIL_CLOSE[name]
    raw = answer(raw)
    wire = Wire()
    outcome = wire.request()
    wire.receive(*(raw[start : start + step] for start in range(0, len(raw), step)))
    assert not outcome.over.is_set()
    wire.end()

    assert outcome.ended
    assert outcome.data == body
    assert not wire.kept


@pytest.mark.parametrize("name", UNTIL_CLOSE)
async def test_reset_instead_of_the_end(name: str) -> None:
    """A reset is never the end of a body."""
    wire = Wire()
    outcome = wire.request()
    wire.receive(answer(UNTIL_CLOSE[name][0]))
    wire.transport.lose(ConnectionResetError())
    assert isinstance(outcome.error, UpstreamBroken)


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("step", [1, 7, 100000])
async def test_broken(name: str, step: int) -> None:
    """What is not a proper response is one failure, not retried, and the end of its connection."""
    raw = answer(BROKEN[name])
    wire = Wire()
    outcome = wire.request()
    wire.receive(*(raw[start : start + step] for start in range(0, len(raw), step)))
    if not outcome.over.is_set():
        # Some nonsense only shows when nothing follows.
        wire.end()

    assert isinstance(outcome.error, UpstreamBroken)
    assert outcome.untouched is False
    assert not outcome.ended
    await asyncio.sleep(0)
    assert wire.keeper.closed == [wire.connection]
    assert wire.keeper.idle == []


@pytest.mark.parametrize("name", [*COMPLETE, *UNTIL_CLOSE])
@pytest.mark.parametrize("reset", [False, True], ids=("fin", "rst"))
async def test_cut_at_every_byte(name: str, reset: bool) -> None:
    """A response cut anywhere has one outcome: a failure, or its end where that had come already."""
    if name in COMPLETE:
        raw, _, body, _ = COMPLETE[name]
        end = None
    else:
        raw, body = UNTIL_CLOSE[name]
        end = answer(raw).index(b"\r\n\r\n") + 4
    raw = answer(raw)
    for cut in range(len(raw)):
        wire = Wire()
        outcome = wire.request()
        wire.receive(raw[:cut])
        complete_before = outcome.ended
        wire.transport.lose(ConnectionResetError() if reset else None)

        assert outcome.over.is_set(), cut
        assert body.startswith(outcome.data)
        if complete_before:
            # Only what comes behind a response can have been cut off then.
            assert name.startswith("surplus")
        elif end is not None and cut >= end and not reset:
            assert outcome.ended
        else:
            assert isinstance(outcome.error, UpstreamBroken), cut
            assert outcome.untouched == (cut == 0)
        assert wire.keeper.closed == [wire.connection]


async def test_the_reason_says_where_it_broke() -> None:
    """Before the answer, in its head and in its body are told apart."""
    for raw, part in ((b"", "without an answer"), (b"HTTP/1.1 20", "in the head"), (b"x", "before its answer was")):
        wire = Wire()
        outcome = wire.request()
        if raw == b"x":
            wire.receive(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nx")
        else:
            wire.receive(raw)
        wire.end()
        assert part in str(outcome.error)


# -- head -----------------------------------------------------------------------------------------------------------


async def test_the_head_keeps_what_belongs_to_the_answer() -> None:
    """Names are in lower case, hop-by-hop fields and those that Connection names are left out, order is kept."""
    wire = Wire()
    outcome = wire.request()
    wire.receive(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nX-A: 1\r\nConnection: keep-alive, X-Hop\r\n"
        b"Keep-Alive: timeout=5\r\nX-Hop: 1\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\nUpgrade: h2c\r\n"
        b"Trailer: x\r\nProxy-Authenticate: Basic\r\n"
        b"Content-Length: 2\r\nx-empty:\r\n\r\nok"
    )
    assert outcome.head is not None
    assert (outcome.head.status, outcome.head.content_type, outcome.head.content_length) == (200, "text/plain", 2)
    assert outcome.head.headers == (("x-a", "1"), ("set-cookie", "a=1"), ("set-cookie", "b=2"), ("x-empty", ""))


async def test_trailers_are_dropped() -> None:
    """A trailer is not a header, whatever it is called."""
    wire = Wire()
    outcome = wire.request()
    wire.receive(answer(OK + b"transfer-encoding: chunked\n\n5\nhello\n0\nx-trailer: 1\n\n"))
    assert outcome.head is not None
    assert outcome.head.headers == ()
    second = wire.request()
    wire.receive(answer(OK + b"x-second: 2\ncontent-length: 0\n\n"))
    assert second.head is not None
    assert second.head.headers == (("x-second", "2"),)


async def test_interim_headers_are_dropped() -> None:
    """What a 103 says is not said by the answer."""
    wire = Wire()
    outcome = wire.request()
    wire.receive(answer(b"HTTP/1.1 103 Early Hints\nx-early: 1\n\n" + OK + b"x-late: 1\ncontent-length: 0\n\n"))
    assert outcome.head is not None
    assert outcome.head.headers == (("x-late", "1"),)


@pytest.mark.parametrize("line", [b"x-a: " + b"b" * 1000 + b"\r\n", b"a: b\r\n", b"x" * 100])
async def test_an_endless_head(line: bytes) -> None:
    """A head that does not end is given up at its limit, whether it is one field or many."""
    wire = Wire()
    outcome = wire.request()
    wire.receive(b"HTTP/1.1 200 OK\r\n")
    sent = 0
    while not outcome.over.is_set():
        wire.receive(line)
        sent += len(line)
        assert sent < 2 * MAX_HEAD_BYTES
    assert "larger than 65536 bytes" in str(outcome.error)
    assert wire.transport.aborted


async def test_endless_interim_answers() -> None:
    """Interim answers count as well: an upstream cannot go on with them for ever."""
    wire = Wire()
    outcome = wire.request()
    for _ in range(2 * MAX_HEAD_BYTES // 25):
        wire.receive(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert isinstance(outcome.error, UpstreamBroken)


async def test_a_large_head_that_is_within_the_limit() -> None:
    """Sixty kilobytes of head are odd and allowed."""
    wire = Wire()
    outcome = wire.request()
    wire.receive(b"HTTP/1.1 200 OK\r\n" + (b"x-a: " + b"b" * 1000 + b"\r\n") * 60 + b"content-length: 2\r\n\r\nok")
    assert outcome.ended
    assert outcome.data == b"ok"


async def test_a_head_and_a_large_body_in_one_read() -> None:
    """What counts against the limit of the head is the head."""
    wire = Wire()
    outcome = wire.request()
    wire.receive(b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + b"x" * 200000)
    assert outcome.ended
    assert len(outcome.data) == 200000


# -- steps ----------------------------------------------------------------------------------------------------------


async def test_one_step_for_each_read() -> None:
    """What one read brings is told in one step, in the call in which it came."""
    wire = Wire()
    outcome = wire.request()
    wire.receive(answer(OK + b"transfer-encoding: chunked\n\n1\na\n1\nb\n1\nc\n"))
    assert (outcome.steps, outcome.data, outcome.ended) == (1, b"abc", False)
    wire.receive(answer(b"1\nd\n"))
    assert (outcome.steps, outcome.data, outcome.ended) == (2, b"abcd", False)
    wire.receive(answer(b"1\ne\n0\n\n"))
    assert (outcome.steps, outcome.data, outcome.ended) == (3, b"abcde", True)


async def test_the_connection_is_free_when_the_end_is_told() -> None:
    """In the very call that tells of the end the next request can be sent, and is on the wire before it returns."""
    wire = Wire()
    written: list[bytes] = []
    second = Outcome()

    class First(Outcome):
        def response_step(self, head: object, data: bytes, ended: bool) -> None:
            super().response_step(head, data, ended)  # type: ignore[arg-type]
            if ended:
                assert wire.kept
                wire.connection.send(REQUEST_HEAD, b"{2}", second)
                written.append(wire.transport.written)

    wire.connection.send(REQUEST_HEAD, b"{1}", First())
    wire.receive(answer(OK + b"content-length: 2\n\nok"))
    assert written[0] == REQUEST_HEAD + b"{1}" + REQUEST_HEAD + b"{2}"
    wire.receive(answer(OK + b"content-length: 3\n\nyes"))
    assert second.data == b"yes"


async def test_a_hundred_responses_on_one_connection() -> None:
    """Nothing of one response is left in the next, whichever framing they have."""
    wire = Wire()
    kept = [name for name, (*_, keep) in COMPLETE.items() if keep]
    for number in range(100):
        raw, status, body, _ = COMPLETE[kept[number * 7 % len(kept)]]
        outcome = wire.request()
        wire.receive(answer(raw))
        assert outcome.head is not None
        assert (outcome.head.status, outcome.data) == (status, body)
        assert wire.kept


# -- bytes nobody asked for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"x", b"\r\n", b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"])
async def test_bytes_on_an_idle_connection(said: bytes) -> None:
    """They end the connection, used or not, and are nobody's answer."""
    for requests in (0, 1):
        wire = Wire()
        for _ in range(requests):
            wire.request()
            wire.receive(answer(OK + b"content-length: 0\n\n"))
        wire.connection.data_received(said)
        assert wire.transport.aborted
        assert not wire.connection.usable
        await asyncio.sleep(0)
        assert wire.keeper.closed == [wire.connection]


async def test_an_idle_connection_that_is_closed() -> None:
    """Its owner is told, and nobody else."""
    wire = Wire()
    outcome = wire.request()
    wire.receive(answer(OK + b"content-length: 0\n\n"))
    wire.end()
    assert not wire.connection.usable
    assert wire.keeper.closed == [wire.connection]
    assert outcome.error is None


# -- giving up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("received", [b"", b"HTTP/1.1 2", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhe"])
async def test_abort_is_silent(received: bytes) -> None:
    """Whoever aborts is told nothing more, whatever still happens to the connection."""
    wire = Wire(first_byte_timeout_seconds=0.01, idle_timeout_seconds=0.01)
    outcome = wire.request()
    wire.receive(received)
    wire.connection.abort()
    wire.connection.abort()
    wire.connection.data_received(b"llo")
    await asyncio.sleep(0.03)  # beyond both time-outs
    assert not outcome.over.is_set()
    assert wire.transport.aborted
    assert wire.keeper.closed == [wire.connection]


async def test_abort_after_the_end() -> None:
    """Aborting what is over, or never began, does nothing harmful."""
    wire = Wire()
    wire.request()
    wire.receive(answer(OK + b"connection: close\ncontent-length: 0\n\n"))
    wire.end()
    wire.connection.abort()
    wire.connection.pause_reading()
    wire.connection.resume_reading()
    assert wire.keeper.closed == [wire.connection]


async def test_an_early_response() -> None:
    """One that comes before the request is all written is told; the connection is broken off and not used again."""
    wire = Wire()
    outcome = wire.request(b"x" * 1000)
    wire.transport.unsent = 500
    wire.receive(answer(b"HTTP/1.1 413 Too Large\ncontent-length: 2\n\nno"))
    assert outcome.ended
    assert outcome.head is not None
    assert outcome.head.status == 413
    assert wire.transport.aborted
    assert not wire.connection.usable


# -- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("received", [b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"H"])
async def test_no_head_in_time(received: bytes) -> None:
    """Nothing short of a whole head counts as the first byte of an answer."""
    wire = Wire(first_byte_timeout_seconds=0.03, idle_timeout_seconds=5)
    outcome = wire.request()
    wire.receive(received)
    await outcome.end()
    assert isinstance(outcome.error, UpstreamTimeout)
    assert (outcome.error.waiting_for, outcome.error.timeout_seconds) == ("the first byte", 0.03)
    assert outcome.untouched is False
    assert wire.transport.aborted


async def test_bytes_that_stay_unread_buy_little_time() -> None:
    """A time-out that is due while something lies unread waits for the loop to read it, and not for ever."""
    wire = Wire(first_byte_timeout_seconds=0.03)
    ours, upstreams = socket.socketpair()
    with ours, upstreams:
        wire.transport.sock = ours
        upstreams.send(b"never read")
        outcome = wire.request()
        began_at = time.monotonic()
        await outcome.end()
        assert time.monotonic() - began_at >= 0.03 + UNREAD_GRACE_SECONDS - 0.01
        assert isinstance(outcome.error, UpstreamTimeout)
        assert wire.transport.aborted


async def test_silence_in_the_body() -> None:
    """Once the body has begun the other time-out counts, from the last byte of it."""
    wire = Wire(first_byte_timeout_seconds=5, idle_timeout_seconds=0.05)
    outcome = wire.request()
    wire.receive(answer(OK + b"content-length: 50\n\n"))
    for _ in range(5):
        await asyncio.sleep(0.02)  # less than the limit, more than it in all
        wire.receive(b"x")
    assert not outcome.over.is_set()
    await outcome.end()
    assert isinstance(outcome.error, UpstreamTimeout)
    assert outcome.error.waiting_for == "the next byte"
    assert len(outcome.data) == 5
    assert wire.transport.aborted


async def test_framing_is_not_data() -> None:
    """Chunk extensions and trailers that drip for ever do not keep a response alive."""
    wire = Wire(idle_timeout_seconds=0.05)
    outcome = wire.request()
    wire.receive(answer(OK + b"transfer-encoding: chunked\n\n1\nx\n5;x="))
    for _ in range(100):
        if outcome.over.is_set():
            break
        wire.receive(b"y")
        await asyncio.sleep(0.005)  # its pace
    assert isinstance(outcome.error, UpstreamTimeout)
    assert outcome.error.waiting_for == "the next byte"


@pytest.mark.parametrize("framing", [b"", b"5;x=y", b"5\r\n"])
async def test_a_head_is_no_first_byte(framing: bytes) -> None:
    """A head that comes before the engine has begun, as uvicorn sends it for a stream, is no progress yet."""
    wire = Wire(first_byte_timeout_seconds=0.05, idle_timeout_seconds=5)
    outcome = wire.request()
    wire.receive(answer(OK + b"transfer-encoding: chunked\n\n"), framing)
    await outcome.end()
    assert isinstance(outcome.error, UpstreamTimeout)
    assert (outcome.error.waiting_for, outcome.error.timeout_seconds) == ("the first byte", 0.05)
    assert outcome.untouched is False
    assert wire.transport.aborted


async def test_a_long_prompt_behind_an_early_head() -> None:
    """From the head to the first byte of the body the longer time-out counts, and from there the shorter one."""
    wire = Wire(first_byte_timeout_seconds=5, idle_timeout_seconds=0.03)
    outcome = wire.request()
    wire.receive(answer(OK + b"content-length: 5\n\n"))
    await asyncio.sleep(0.1)  # more than three times the idle time-out
    assert not outcome.over.is_set()
    wire.receive(b"h")
    await outcome.end()
    assert isinstance(outcome.error, UpstreamTimeout)
    assert (outcome.error.waiting_for, outcome.error.timeout_seconds) == ("the next byte", 0.03)
    assert outcome.data == b"h"


async def test_a_paused_connection_is_not_a_silent_one() -> None:
    """While the caller does not want to read, no time runs; afterwards it begins anew."""
    wire = Wire(idle_timeout_seconds=0.05)
    outcome = wire.request()
    wire.receive(answer(OK + b"content-length: 5\n\nhe"))
    wire.connection.pause_reading()
    wire.connection.pause_reading()
    assert not wire.transport.reading
    await asyncio.sleep(0.15)  # three times the limit
    assert not outcome.over.is_set()
    wire.connection.resume_reading()
    wire.connection.resume_reading()
    assert wire.transport.reading
    await asyncio.sleep(0.02)  # less than the limit, which runs anew
    wire.receive(b"llo")
    assert outcome.ended


async def test_a_connection_that_ends_while_it_is_paused_reads_again() -> None:
    """The end of a response undoes the pause: the next one starts with a connection that reads."""
    wire = Wire()
    outcome = wire.request()
    wire.receive(answer(OK + b"content-length: 5\n\nhe"))
    wire.connection.pause_reading()
    wire.connection.data_received(b"llo")
    assert outcome.ended
    assert wire.transport.reading
    assert wire.kept


async def test_an_idle_connection_has_no_time_out() -> None:
    """R39: the timers of a response end with it."""
    wire = Wire(first_byte_timeout_seconds=0.02, idle_timeout_seconds=0.02)
    wire.request()
    wire.receive(answer(OK + b"content-length: 0\n\n"))
    await asyncio.sleep(0.06)  # three times both limits
    assert wire.kept
    assert not wire.transport.closing
