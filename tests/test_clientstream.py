"""The response to one client, on a transport whose buffer the test fills and empties."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.test_utils import make_mocked_request
from rig import FakeTransport, eventually

from aiogw import clientstream
from aiogw.canonical import ResponseHead
from aiogw.clientstream import JOINED_BYTES, ClientStream
from aiogw.departures import Departures, Watched
from aiogw.errors import ClientGone

HEAD = ResponseHead(status=200, content_type="text/plain", content_length=None, headers=(("x-a", "1"),))


class Noted(Departures):
    """Nobody leaves unless the test says so."""

    def __init__(self) -> None:
        self.watched: list[Watched] = []

    def watch(self, fileno: int, departed: Callable[[], None]) -> Watched:
        self.watched.append(Watched(fileno, departed))
        return self.watched[-1]

    def forget(self, watched: Watched) -> None:
        self.watched.remove(watched)


class Client:
    """A stream, its transport, and what the stream has told."""

    def __init__(
        self,
        *,
        version: Any = HttpVersion11,
        close: bool = False,
        stall_timeout_seconds: float = 5,
        sock: socket.socket | None = None,
        departures: Departures | None = None,
    ) -> None:
        self.told: list[str] = []
        self.transport = FakeTransport(asyncio.Protocol(), asyncio.get_running_loop())
        self.transport.sock = sock
        request = make_mocked_request("POST", "/", version=version, closing=close, transport=self.transport)
        self.stream = ClientStream(
            request,
            headers=[("x-request-id", "r-1")],
            buffer_bytes=1000,
            stall_timeout_seconds=stall_timeout_seconds,
            departures=Noted() if departures is None else departures,
            on_full=lambda: self.told.append("full"),
            on_drained=lambda: self.told.append("drained"),
            on_lost=self.told.append,
        )

    @property
    def head(self) -> list[str]:
        return self.transport.written.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")

    @property
    def body(self) -> bytes:
        return self.transport.written.partition(b"\r\n\r\n")[2]


# -- what is written ------------------------------------------------------------------------------------------------


async def test_a_response_without_a_length_is_chunked() -> None:
    """Head, chunks and end, each in the write in which it was sent."""
    client = Client()
    client.stream.send(b"hello", head=HEAD)
    assert client.head[:5] == [
        "HTTP/1.1 200 OK",
        "content-type: text/plain",
        "x-a: 1",
        "x-request-id: r-1",
        "transfer-encoding: chunked",
    ]
    assert client.head[5].startswith("date: ")
    assert client.body == b"5\r\nhello\r\n"
    client.stream.send(b"")
    client.stream.send(b"x" * 20)
    client.stream.send(b"", last=True)
    assert client.body == b"5\r\nhello\r\n14\r\n" + b"x" * 20 + b"\r\n0\r\n\r\n"
    assert (client.stream.bytes_written, client.stream.status, client.stream.ended) == (25, 200, True)
    response = client.stream.response()
    assert (response.status, response.keep_alive) == (200, True)


async def test_a_response_with_a_length() -> None:
    """With a length there are no chunks."""
    client = Client()
    head = ResponseHead(status=201, content_type="", content_length=5)
    client.stream.send(b"he", head=head)
    client.stream.send(b"llo", last=True)
    assert "content-length: 5" in client.head
    assert not any(line.startswith(("transfer-encoding", "content-type")) for line in client.head)
    assert client.body == b"hello"
    assert client.stream.keep_alive
    assert not client.transport.closing


async def test_a_large_chunk_is_not_copied() -> None:
    """It goes out between its frame, and is framed like any other."""
    client = Client()
    client.stream.send(b"x" * JOINED_BYTES, head=HEAD)
    assert client.body == b"%x\r\n" % JOINED_BYTES + b"x" * JOINED_BYTES + b"\r\n"


async def test_a_response_in_one_write() -> None:
    """Head, body and end of a short answer are one write."""
    client = Client()
    writes: list[int] = []
    real = client.transport.writelines
    client.transport.writelines = lambda pieces: (writes.append(1), real(pieces))  # type: ignore[assignment,func-returns-value]
    client.stream.send(b"hello", head=HEAD, last=True)
    assert writes == [1]
    assert client.body == b"5\r\nhello\r\n0\r\n\r\n"


@pytest.mark.parametrize("status", [204, 304])
async def test_a_response_that_has_no_body(status: int) -> None:
    """It has neither a length nor chunks."""
    client = Client()
    client.stream.send(b"", head=ResponseHead(status=status, content_type="", content_length=None), last=True)
    assert not any(line.startswith(("transfer-encoding", "content-length")) for line in client.head)
    assert client.body == b""
    assert client.stream.keep_alive


async def test_an_unknown_status() -> None:
    """A status without a name has none."""
    client = Client()
    client.stream.send(b"", head=ResponseHead(status=299, content_type="", content_length=0), last=True)
    assert client.head[0] == "HTTP/1.1 299 "


@pytest.mark.parametrize("length", [None, 5])
async def test_an_old_client(length: int | None) -> None:
    """HTTP/1.0 gets no chunks, and the connection ends with the response."""
    client = Client(version=HttpVersion10)
    client.stream.send(b"hello", head=ResponseHead(status=200, content_type="", content_length=length), last=True)
    assert client.body == b"hello"
    assert "connection: close" in client.head
    assert client.stream.response().keep_alive is False


async def test_a_client_that_wants_to_close() -> None:
    """It is told that it may."""
    client = Client(close=True)
    client.stream.send(b"hello", head=HEAD, last=True)
    assert "connection: close" in client.head
    assert client.stream.response().keep_alive is False


async def test_a_connection_that_is_to_be_closed() -> None:
    """Whoever owns the stream can decide before it starts that the connection is not kept."""
    client = Client()
    client.stream.keep_alive = False
    client.stream.send(b"hello", head=HEAD, last=True)
    assert "connection: close" in client.head


async def test_fewer_bytes_than_announced() -> None:
    """A response that falls short of its length ends with its connection and not in order, and is a fault of ours."""
    client = Client()
    client.stream.send(b"hell", head=ResponseHead(status=200, content_type="", content_length=5))
    before = client.transport.written
    client.stream.send(b"", last=True)
    assert client.told == ["internal_error"]
    assert client.transport.aborted
    assert client.transport.written == before
    assert client.stream.ended
    assert client.stream.response().keep_alive is False


async def test_nothing_is_written_behind_the_end() -> None:
    """After the end whatever is sent goes nowhere."""
    client = Client()
    client.stream.send(b"hello", head=HEAD, last=True)
    before = client.transport.written
    client.stream.send(b"more")
    client.stream.send(b"", last=True)
    assert client.transport.written == before
    assert client.told == []


async def test_breaking_off() -> None:
    """Before the response has begun the connection is dropped; within it what was written still goes out."""
    client = Client()
    client.stream.break_off()
    assert client.transport.aborted
    client = Client()
    client.stream.send(b"hello", head=HEAD)
    client.stream.break_off()
    assert client.transport.closing
    assert not client.transport.aborted
    assert not client.transport.written.endswith(b"0\r\n\r\n")
    assert client.stream.response().keep_alive is False


async def test_header_bytes_go_out_as_they_came() -> None:
    """What was read as Latin-1 is written as Latin-1."""
    client = Client()
    value = "é".encode().decode("latin-1")
    client.stream.send(b"", head=ResponseHead(status=200, content_type="", content_length=0, headers=(("x-a", value),)))
    assert b"x-a: \xc3\xa9\r\n" in client.transport.written


# -- a client that has left -----------------------------------------------------------------------------------------


async def test_sending_to_a_client_that_is_leaving() -> None:
    """When the connection is found closing there is nobody to write to, and the owner is told."""
    client = Client()
    client.stream.send(b"hello", head=HEAD)
    client.transport.closing = True
    before = client.transport.written
    client.stream.send(b"more")
    client.stream.send(b"", last=True)
    assert client.told == ["client_gone"]
    assert client.transport.written == before
    assert client.stream.gone
    assert client.stream.ended


async def test_a_request_without_a_connection() -> None:
    """A client that left before its request was looked at is gone from the start."""
    request = make_mocked_request("POST", "/")
    told: list[str] = []
    request._transport_ssl_context = None
    request._protocol.transport = None
    stream = ClientStream(
        request,
        headers=(),
        buffer_bytes=10,
        stall_timeout_seconds=1,
        departures=(departures := Noted()),
        on_full=lambda: None,
        on_drained=lambda: None,
        on_lost=told.append,
    )
    assert stream.gone
    assert stream.left_unnoticed()
    stream.send(b"x", head=HEAD)
    stream.break_off()
    await stream.drained()
    assert told == ["client_gone"]
    stream.close()
    assert departures.watched == []


@pytest.mark.parametrize("unread", [b"", b"more bytes that nobody has read"])
@pytest.mark.parametrize("how", ["close", "half-close", "stay"])
async def test_asking_the_kernel(how: str, unread: bytes) -> None:
    """Whether a client has closed can be asked without reading, also behind bytes that were not read."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = Client(sock=ours)
        theirs.send(unread or b"x")
        if how == "close":
            theirs.close()
        elif how == "half-close":
            theirs.shutdown(socket.SHUT_WR)
        assert client.stream.left_unnoticed() == (how != "stay")


@pytest.mark.parametrize("closed", [False, True])
async def test_asking_the_kernel_without_a_socket(closed: bool) -> None:
    """Where there is no socket to ask, or none any more, there is nobody to answer."""
    with socket.socket() as ours:
        client = Client(sock=ours if closed else None)
    assert client.stream.left_unnoticed()


@pytest.mark.parametrize("how", ["close", "half-close"])
async def test_a_client_that_nobody_reads_leaves(how: str) -> None:
    """Its departure is noticed behind bytes that are not read, and ends the response at once."""
    departures = Departures(asyncio.get_running_loop())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = Client(sock=ours, departures=departures)
        theirs.send(b"the beginning of another request")
        client.stream.send(b"hello", head=HEAD)
        theirs.close() if how == "close" else theirs.shutdown(socket.SHUT_WR)
        await eventually(lambda: client.told == ["client_gone"])
        assert client.transport.aborted
        assert client.stream.ended
        assert client.stream.response().keep_alive is False
        client.stream.close()
    departures.close()


async def test_one_that_was_given_everything_may_leave() -> None:
    """After the end of a response that has gone out, a departure is nobody's loss."""
    with socket.socket() as ours:
        departures = Noted()
        client = Client(sock=ours, departures=departures)
        assert [ours.fileno()] == [one.fileno for one in departures.watched]
        client.stream.send(b"hello", head=HEAD, last=True)
        departures.watched[0].departed()
        assert client.told == []
        assert not client.transport.aborted


async def test_one_that_leaves_before_it_has_taken_all() -> None:
    """What still waits in the buffer is lost, and whoever waits for it to be taken learns of it."""
    with socket.socket() as ours:
        departures = Noted()
        client = Client(sock=ours, departures=departures)
        client.stream.send(b"hello", head=HEAD, last=True)
        client.transport.unsent = 10
        waiting = asyncio.ensure_future(client.stream.drained())
        await asyncio.sleep(0)
        departures.watched[0].departed()
        with pytest.raises(ClientGone) as caught:
            await waiting
        assert caught.value.code == "client_gone"
        assert client.told == ["client_gone"]
        assert client.transport.aborted
        client.stream.close()


async def test_after_the_end_nobody_is_watched() -> None:
    """``close`` ends that too, once, and has nothing to end after a departure."""
    with socket.socket() as ours:
        departures = Noted()
        client = Client(sock=ours, departures=departures)
        assert len(departures.watched) == 1
        client.stream.close()
        client.stream.close()
        assert departures.watched == []
        client = Client(sock=ours, departures=departures)
        departures.watched[0].departed()
        departures.watched.clear()
        client.stream.close()
        assert client.told == ["client_gone"]


# -- a client that reads slowly -------------------------------------------------------------------------------------


async def test_a_full_buffer_and_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the owner is told once, and once again when half of it has gone."""
    monkeypatch.setattr(clientstream, "WATCH_SECONDS", 0.001)
    client = Client()
    client.transport.unsent = 1000
    client.stream.send(b"x", head=HEAD)
    assert client.told == []
    client.transport.unsent = 1001
    client.stream.send(b"x")
    client.stream.send(b"x")
    assert client.told == ["full"]
    client.transport.unsent = 501
    await asyncio.sleep(0.01)  # ten looks
    assert client.told == ["full"]
    client.transport.unsent = 500
    await eventually(lambda: client.told == ["full", "drained"])
    client.transport.unsent = 1001
    client.stream.send(b"x")
    assert client.told == ["full", "drained", "full"]
    client.transport.unsent = 0
    await eventually(lambda: len(client.told) == 4)
    client.stream.close()


async def test_a_stuck_client_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose buffer does not shrink for the whole of the time-out is lost, and its connection broken off."""
    monkeypatch.setattr(clientstream, "WATCH_SECONDS", 0.005)
    client = Client(stall_timeout_seconds=0.05)
    client.transport.unsent = 2000
    client.stream.send(b"x", head=HEAD)
    await eventually(lambda: client.told == ["full", "client_stalled"])
    assert client.transport.aborted
    assert client.stream.ended
    client.stream.close()


async def test_a_slow_client_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte within the time-out is enough, and new bytes from us are none."""
    monkeypatch.setattr(clientstream, "WATCH_SECONDS", 0.005)
    client = Client(stall_timeout_seconds=0.1)
    client.transport.unsent = 2000
    client.stream.send(b"x", head=HEAD)
    for _ in range(8):
        await asyncio.sleep(0.03)  # in all more than twice the time-out
        client.transport.unsent -= 1
    assert client.told == ["full"]
    for _ in range(30):
        if "client_stalled" in client.told:
            break
        await asyncio.sleep(0.01)  # its pace
        client.transport.unsent += 1
    assert client.told == ["full", "client_stalled"]


async def test_what_the_kernel_holds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes what the kernel still had for it is slow, though its buffer here has not moved."""
    monkeypatch.setattr(clientstream, "WATCH_SECONDS", 0.005)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(10):
            ours.send(b"x" * 1000)
        client = Client(sock=ours, stall_timeout_seconds=0.1)
        client.transport.unsent = 2000
        client.stream.send(b"x", head=HEAD)
        for _ in range(8):
            await asyncio.sleep(0.03)  # in all more than twice the time-out
            theirs.recv(1000)
        assert client.told == ["full"]
        await eventually(lambda: client.told == ["full", "client_stalled"])
        assert client.transport.aborted


@pytest.mark.parametrize("how", ["listening", "closed"])
async def test_a_kernel_that_does_not_say(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Where it cannot be asked, the buffer here is what counts."""
    monkeypatch.setattr(clientstream, "WATCH_SECONDS", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as ours:
        client = Client(sock=ours)
        if how == "closed":
            ours.close()
        client.transport.unsent = 2000
        client.stream.send(b"x", head=HEAD)
        client.transport.unsent = 0
        await eventually(lambda: client.told == ["full", "drained"])
        client.stream.close()


async def test_waiting_until_all_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """``drained`` returns when the buffer is empty, at once if it is already."""
    monkeypatch.setattr(clientstream, "WATCH_SECONDS", 0.001)
    client = Client()
    client.stream.send(b"x", head=HEAD, last=True)
    await client.stream.drained()
    client.transport.unsent = 10
    waiting = asyncio.ensure_future(client.stream.drained())
    await asyncio.sleep(0.01)  # ten looks
    assert not waiting.done()
    client.transport.unsent = 0
    await waiting
    client.stream.close()


async def test_waiting_for_a_stuck_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """``drained`` raises for a client that takes nothing any more."""
    monkeypatch.setattr(clientstream, "WATCH_SECONDS", 0.001)
    client = Client(stall_timeout_seconds=0.02)
    client.stream.send(b"x", head=HEAD, last=True)
    client.transport.unsent = 10
    with pytest.raises(ClientGone) as caught:
        await client.stream.drained()
    assert caught.value.code == "client_stalled"
    assert client.transport.aborted


async def test_closing_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``close`` nothing is told any more."""
    monkeypatch.setattr(clientstream, "WATCH_SECONDS", 0.001)
    client = Client(stall_timeout_seconds=0.005)
    client.transport.unsent = 2000
    client.stream.send(b"x", head=HEAD)
    client.stream.close()
    await asyncio.sleep(0.02)  # four times the time-out
    assert client.told == ["full"]


async def test_the_response_that_aiohttp_gets_does_nothing() -> None:
    """It has been sent by another way, so neither preparing nor ending it writes anything."""
    client = Client()
    client.stream.send(b"x", head=HEAD, last=True)
    before = client.transport.written
    response = client.stream.response()
    request = make_mocked_request("POST", "/", transport=client.transport)
    assert isinstance(response, web.StreamResponse)
    await response.prepare(request)
    await response.write_eof()
    assert client.transport.written == before
