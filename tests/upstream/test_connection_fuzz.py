"""Responses as nobody would write them: cut anywhere they mean the same, and no bytes make the protocol raise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import FakeTransport, Outcome

from aiogw.upstream.connection import Connection

FAST = settings(max_examples=200, deadline=None)


class Keeper:
    def __init__(self) -> None:
        self.idle = 0
        self.closed = 0

    def connection_idle(self, _connection: Connection) -> None:
        self.idle += 1

    def connection_closed(self, _connection: Connection) -> None:
        self.closed += 1


class Run:
    """One request on a connection, and the pieces of what comes back."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.keeper = Keeper()
        self.connection = Connection(
            loop=loop, keeper=self.keeper, upstream="u", first_byte_timeout_seconds=60, idle_timeout_seconds=60
        )
        self.transport = FakeTransport(self.connection, loop)
        self.connection.connection_made(self.transport)
        self.outcome = Outcome()
        self.connection.send(b"POST / HTTP/1.1\r\n\r\n", b"", self.outcome)

    def receive(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            if piece and not self.transport.closing:
                self.connection.data_received(piece)

    def close(self, error: Exception | None = None) -> None:
        self.transport.lose(error)


@pytest.fixture(scope="module", autouse=True)
def _loop() -> Iterator[None]:
    loops.append(asyncio.new_event_loop())
    yield
    loops.pop().close()


loops: list[asyncio.AbstractEventLoop] = []


def run(test: Any) -> None:
    """Call ``test`` within the module's loop: examples are plain calls, and a loop for each would be slow."""

    async def within() -> None:
        test(loops[0])

    loops[0].run_until_complete(within())


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(raw), *(place % (len(raw) + 1) for place in places)})
    return [raw[start:end] for start, end in pairwise(edges)]


names = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12).map(lambda name: f"x-{name}".encode())
values = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30).map(str.encode)
headers = st.lists(st.tuples(names, values), max_size=6)
bodies = st.lists(st.binary(min_size=1, max_size=200), max_size=8)


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, int, list[tuple[str, str]], bytes, bool]:
    """A valid response: its bytes, status, own headers, body, and whether it ends with the connection."""
    status = draw(st.sampled_from([200, 201, 400, 404, 429, 500, 503, 204, 304]))
    fields = draw(headers)
    pieces = draw(bodies)
    interim = draw(st.integers(0, 2))
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    if status in (204, 304):
        pieces, framing = [], "none"
    lines = [b"HTTP/1.1 %d Some Reason" % status, *(name + b": " + value for name, value in fields)]
    body = b"".join(pieces)
    if framing == "length":
        lines.append(b"Content-Length: %d" % len(body))
        wire = body
    elif framing == "chunked":
        lines.append(b"Transfer-Encoding: chunked")
        extension = draw(st.sampled_from([b"", b";a=b", b";x"]))
        trailer = draw(st.sampled_from([b"", b"x-t: 1\r\n"]))
        wire = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)
        wire += b"0\r\n" + trailer + b"\r\n"
    else:
        wire = body
    raw = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * interim + b"\r\n".join(lines) + b"\r\n\r\n" + wire
    own = [(name.decode(), value.decode()) for name, value in fields]
    return raw, status, own, body, framing == "close"


@FAST
@given(responses(), st.lists(st.integers(0, 5000), max_size=20))
def test_cut_anywhere_it_means_the_same(
    response: tuple[bytes, int, list[tuple[str, str]], bytes, bool], places: list[int]
) -> None:
    """However a valid response is cut into reads, head, body and end are those that were written."""
    raw, status, own, body, until_close = response

    def test(loop: asyncio.AbstractEventLoop) -> None:
        one = Run(loop)
        one.receive(cut(raw, places))
        assert one.outcome.ended != until_close
        one.close()
        outcome = one.outcome
        assert outcome.error is None
        assert outcome.ended
        assert outcome.head is not None
        assert (outcome.head.status, outcome.data) == (status, body)
        assert list(outcome.head.headers) == own
        assert one.keeper.idle == (0 if until_close else 1)
        assert one.keeper.closed == 1

    run(test)


@FAST
@given(responses(), st.integers(0, 5000), st.lists(st.integers(0, 5000), max_size=5), st.booleans())
def test_cut_short_it_has_one_outcome(
    response: tuple[bytes, int, list[tuple[str, str]], bytes, bool], place: int, places: list[int], reset: bool
) -> None:
    """Cut short anywhere, a response is never taken for whole unless the end of the connection is its end."""
    raw, _, _, body, until_close = response
    short = raw[: place % len(raw)]

    def test(loop: asyncio.AbstractEventLoop) -> None:
        one = Run(loop)
        one.receive(cut(short, places))
        one.close(ConnectionResetError() if reset else None)
        outcome = one.outcome
        assert outcome.over.is_set()
        assert body.startswith(outcome.data)
        assert not outcome.ended or (until_close and not reset)
        assert outcome.ended or outcome.untouched == (short == b"")

    run(test)


# Bytes that look enough like a response to get somewhere.
fragments = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.0 200\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Connection: close\r\n",
        b"Connection: upgrade\r\nUpgrade: x\r\n",
        b"\r\n",
        b"\n",
        b"\r",
        b"hello",
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b": ",
        b"\x00",
        b"\xff\xfe",
    ]
)
noise = st.lists(st.one_of(fragments, st.binary(max_size=20)), max_size=12)


@settings(max_examples=600, deadline=None)
@given(noise, st.booleans(), st.booleans())
def test_no_bytes_make_it_raise(pieces: list[bytes], reset: bool, joined: bool) -> None:
    """Arbitrary bytes never raise, and always come to one outcome, at the latest when the connection ends."""

    def test(loop: asyncio.AbstractEventLoop) -> None:
        one = Run(loop)
        one.receive([b"".join(pieces)] if joined else pieces)
        one.close(ConnectionResetError() if reset else None)
        assert one.outcome.over.is_set()
        assert one.outcome.ended == (one.outcome.error is None)
        assert one.keeper.closed == 1

    run(test)


@FAST
@given(st.lists(responses(), min_size=1, max_size=5), st.lists(st.integers(0, 5000), max_size=10))
def test_responses_one_after_another(
    all_of_them: list[tuple[bytes, int, list[tuple[str, str]], bytes, bool]], places: list[int]
) -> None:
    """On one connection every request gets its own response, whatever came before it."""

    def test(loop: asyncio.AbstractEventLoop) -> None:
        one = Run(loop)
        for number, (raw, status, _, body, until_close) in enumerate(all_of_them):
            if number:
                one.outcome = Outcome()
                one.connection.send(b"POST / HTTP/1.1\r\n\r\n", b"", one.outcome)
            one.receive(cut(raw, places))
            if until_close:
                one.close()
            assert one.outcome.head is not None
            assert (one.outcome.head.status, one.outcome.data, one.outcome.ended) == (status, body, True)
            if until_close:
                break
        one.close()
        assert one.keeper.closed == 1

    run(test)
