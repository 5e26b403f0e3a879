"""The connections of one upstream on real sockets: made when needed, reused when good, gone when they are not."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from rig import (
    WHOLE,
    Outcome,
    Rig,
    ScriptedUpstream,
    UpstreamConnection,
    answer,
    chunk,
    eventually,
    head,
    make_certificate,
    needs_openssl,
    open_files,
    whole,
)

from aiogw.errors import UpstreamBroken, UpstreamTimeout, UpstreamUnavailable
from aiogw.upstream import pool as pool_module
from aiogw.upstream.connection import Connection
from aiogw.upstream.pool import Target, UpstreamCall, UpstreamPool, request_fields

HEADERS = [("content-type", "application/json"), ("x-request-id", "r-1")]


def make_pool(upstream: ScriptedUpstream | tuple[str, int], **changes: object) -> UpstreamPool:
    address = upstream.address if isinstance(upstream, ScriptedUpstream) else upstream
    unix = isinstance(address, str)
    target = Target(
        host="" if unix else address[0],
        port=0 if unix else int(address[1]),
        path=address if unix else None,
        authority="upstream.test:80",
        prefix=str(changes.pop("prefix", "")),
        ssl_context=changes.pop("ssl_context", None),  # type: ignore[arg-type]
        credential=changes.pop("credential", None),  # type: ignore[arg-type]
    )
    seconds = {"connect_timeout_seconds": 2.0, "first_byte_timeout_seconds": 5.0, "idle_timeout_seconds": 5.0}
    return UpstreamPool(upstream="reasoning", target=target, **(seconds | changes))  # type: ignore[arg-type]


@pytest.fixture
async def upstream(rig: Rig) -> ScriptedUpstream:
    return await rig.upstream()


def begin(pool: UpstreamPool, outcome: Outcome, body: bytes = b"{}") -> UpstreamCall:
    """Send one request."""
    return pool.send("/v1/x", request_fields(HEADERS, body), body, outcome)


async def post(pool: UpstreamPool, body: bytes = b"{}") -> Outcome:
    """One request and its outcome."""
    outcome = Outcome()
    begin(pool, outcome, body)
    return await outcome.end()


def peek(connection: UpstreamConnection) -> bytes:
    """What the kernel has for the upstream to read: nothing at all raises BlockingIOError, the end is empty."""
    with socket.socket(fileno=os.dup(connection.transport.get_extra_info("socket").fileno())) as twin:
        return twin.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)


# -- the request ----------------------------------------------------------------------------------------------------


async def test_the_request_byte_by_byte(upstream: ScriptedUpstream) -> None:
    """What goes up: one head with the configured Host and prefix and the given headers, and the body as it is."""
    upstream.script = answer
    pool = make_pool(upstream, prefix="/engine")
    await post(pool, b'{"a": 1}')
    assert upstream.exchanges[0].request.raw == (
        b"POST /engine/v1/x HTTP/1.1\r\nhost: upstream.test:80\r\ncontent-type: application/json\r\n"
        b'x-request-id: r-1\r\naccept-encoding: identity\r\ncontent-length: 8\r\n\r\n{"a": 1}'
    )
    pool.close()


async def test_a_large_body(upstream: ScriptedUpstream) -> None:
    """Thirty megabytes arrive as they are, even if the upstream reads them slowly."""
    body = bytes(range(256)) * (120 << 10)
    pool = make_pool(upstream)
    outcome = Outcome()
    begin(pool, outcome, body)
    exchange = await upstream.exchange(0)
    assert exchange.request.body == body
    exchange.answer()
    assert (await outcome.end()).data == WHOLE
    pool.close()


async def test_an_upstream_that_takes_its_time_to_take_it() -> None:
    """R28: while a large request is being taken, its upstream is not silent; the time for an answer begins after it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for taken in range(30):
            await reader.readexactly(1 << 20)
            await asyncio.sleep(0.03)  # together several times first_byte_timeout_seconds
            if not answers and taken == 20:
                await stopped.wait()
                writer.transport.abort()
                return
        writer.write(whole(WHOLE))
        await writer.drain()
        writer.close()

    stopped = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    for answers in (True, False):
        pool = make_pool(server.sockets[0].getsockname(), first_byte_timeout_seconds=0.2)
        outcome = await post(pool, b"x" * (30 << 20))
        if answers:
            assert outcome.data == WHOLE
        else:
            # One that does not take it any more is given up.
            assert isinstance(outcome.error, UpstreamTimeout)
        pool.close()
    stopped.set()
    server.close()
    await eventually(lambda: len(asyncio.all_tasks()) == 1)


async def test_a_kept_connection_is_written_to_at_once(upstream: ScriptedUpstream) -> None:
    """On a kept connection the request has gone to the kernel when ``post`` returns: no turn of the loop is lost."""
    upstream.script = answer
    pool = make_pool(upstream)
    await post(pool)
    (connection,) = upstream.connections
    outcome = Outcome()
    begin(pool, outcome)
    assert peek(connection) == b"P"
    await outcome.end()
    pool.close()


# -- reuse ----------------------------------------------------------------------------------------------------------


async def test_the_last_used_connection_comes_first(upstream: ScriptedUpstream) -> None:
    """The one that was used last is the likeliest to be alive."""
    pool = make_pool(upstream)
    outcomes = [Outcome(), Outcome()]
    for outcome in outcomes:
        begin(pool, outcome)
    await upstream.exchange(1)
    for exchange, outcome in zip(list(upstream.exchanges), outcomes, strict=True):
        exchange.answer()
        await asyncio.sleep(0)
        await outcome.end()
    last = upstream.exchanges[1].connection
    upstream.script = answer
    for _ in range(3):
        await post(pool)
    assert [exchange.connection for exchange in upstream.exchanges[2:]] == [last] * 3
    pool.close()


async def test_one_that_is_too_old_is_closed(upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection idle for longer than the upstream would keep it is not written to."""
    upstream.script = answer
    pool = make_pool(upstream)
    await post(pool)
    monkeypatch.setattr(pool_module, "MAX_IDLE_SECONDS", 0.0)
    await post(pool)
    assert len(upstream.connections) == 2
    await eventually(lambda: upstream.connections[0].closed)
    pool.close()


async def test_a_closed_pool_keeps_nothing(upstream: ScriptedUpstream) -> None:
    """Idle connections go when the pool is closed, and those in use as soon as they become idle."""
    pool = make_pool(upstream)
    outcomes = [Outcome(), Outcome()]
    for tag, outcome in enumerate(outcomes):
        begin(pool, outcome, b"tag:%d" % tag)
    # Two that connect at once may arrive in either order.
    first, second = await upstream.tagged(0), await upstream.tagged(1)
    first.answer()
    await outcomes[0].end()
    pool.close()
    await eventually(lambda: first.connection.closed)
    assert not second.connection.closed
    second.answer()
    assert (await outcomes[1].end()).data == WHOLE
    await eventually(lambda: upstream.open_connections == [])
    assert pool.take() is None


async def test_an_idle_connection_that_the_upstream_closed_is_forgotten(upstream: ScriptedUpstream) -> None:
    """The pool holds no dead connections, however many there have been."""
    upstream.script = answer
    pool = make_pool(upstream)
    for _ in range(10):
        await post(pool)
        upstream.connections[-1].close()
        await eventually(lambda: upstream.connections[-1].closed)
    await eventually(lambda: pool.take() is None)


# -- connecting -----------------------------------------------------------------------------------------------------


async def test_a_name_with_two_addresses(rig: Rig) -> None:
    """Where only one address of a name answers, that one is found."""
    upstream = await rig.upstream(answer)
    assert isinstance(upstream.address, tuple)
    pool = make_pool(("localhost", upstream.address[1]))
    assert (await post(pool)).data == WHOLE
    pool.close()


async def test_an_address_of_two_that_does_not_answer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """R65: it does not use up the time in which another one would have answered; slow ones come round again."""
    upstream = await rig.upstream(answer)
    assert isinstance(upstream.address, tuple)
    loop = asyncio.get_running_loop()
    port = upstream.address[1]
    tried: list[str] = []
    answers_from = 0

    async def getaddrinfo(*_arguments: object, **_more: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("192.0.2.1", "127.0.0.1")]

    async def sock_connect(sock: socket.socket, address: tuple[str, int]) -> None:
        tried.append(address[0])
        if address[0] == "192.0.2.1" or len(tried) < answers_from:
            await asyncio.Event().wait()
        await type(loop).sock_connect(loop, sock, address)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo, raising=False)
    monkeypatch.setattr(loop, "sock_connect", sock_connect, raising=False)
    monkeypatch.setattr(pool_module, "ATTEMPT_SECONDS", 0.02)
    for turns in (1, 2):
        tried.clear()
        answers_from = 2 * turns - 1
        pool = make_pool(("two.test", port), connect_timeout_seconds=8)
        assert (await post(pool)).data == WHOLE
        assert ["192.0.2.1", "127.0.0.1"] * turns == tried
        pool.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('10.0.0.1', 80)"), "connection refused"),
        (OSError(113, "No route to host 10.0.0.1"), "no route to host"),
        (OSError(24, "Too many open files"), "too many open files"),
        (socket.gaierror(-3, "Temporary failure in name resolution of secret.test"), "its name cannot be resolved"),
        (OSError("Multiple exceptions: [Errno 111] 10.0.0.1, [Errno 113] 10.0.0.2"), "the connection failed"),
    ],
)
async def test_why_there_is_no_connection(
    error: OSError, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client is told what went wrong in plain words and without an address; the log has one line with it."""

    async def sock_connect(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", sock_connect, raising=False)
    outcome = await post(make_pool(("10.0.0.1", 80)))
    assert isinstance(outcome.error, UpstreamUnavailable)
    assert outcome.error.reason == reason
    assert "10.0.0" not in str(outcome.error)
    (record,) = caplog.records
    assert "upstream.test:80" in record.getMessage()


async def test_nobody_answers_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is not made in time is given up."""
    never = asyncio.Event()

    async def sock_connect(*_arguments: object) -> None:
        await never.wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", sock_connect, raising=False)
    outcome = await post(make_pool(("10.0.0.1", 80), connect_timeout_seconds=0.03))
    assert isinstance(outcome.error, UpstreamUnavailable)
    assert outcome.error.reason == "no connection within 0.03 s"


async def test_aborting_at_any_moment_of_the_connecting(upstream: ScriptedUpstream) -> None:
    """A call that is aborted while its connection is made leaves none behind and is told nothing."""
    pool = make_pool(upstream)
    before = open_files()
    outcomes = []
    for turns in range(12):
        outcome = Outcome()
        outcomes.append(outcome)
        call = begin(pool, outcome)
        for _ in range(turns):
            await asyncio.sleep(0)
        call.abort()
        call.abort()
    await eventually(lambda: all(connection.closed for connection in upstream.connections))
    assert not any(outcome.over.is_set() for outcome in outcomes)
    assert pool.take() is None
    await eventually(lambda: open_files() <= before)


async def test_aborting_closes_the_connection_at_once(upstream: ScriptedUpstream) -> None:
    """The upstream sees the close before whoever aborted does anything else: its engine never has two for one slot."""
    pool = make_pool(upstream)
    call = begin(pool, Outcome())
    exchange = await upstream.exchange(0)
    call.abort()
    # No turn of the loop in between: the kernel has it already.
    assert peek(exchange.connection) == b""
    await eventually(lambda: exchange.aborted)


async def test_nothing_is_told_after_an_abort(upstream: ScriptedUpstream) -> None:
    """Whatever the upstream still says, an aborted call is silent."""
    pool = make_pool(upstream)
    outcome = Outcome()
    call = begin(pool, outcome)
    exchange = await upstream.exchange(0)
    exchange.write(whole(WHOLE)[:-5])
    await eventually(lambda: outcome.head is not None)
    exchange.finish(whole(WHOLE)[-5:])
    call.abort()
    call.pause_reading()
    call.resume_reading()
    await eventually(lambda: exchange.connection.closed)
    assert not outcome.over.is_set()
    assert pool.take() is None


# -- once more ------------------------------------------------------------------------------------------------------


async def test_a_kept_connection_that_died(upstream: ScriptedUpstream) -> None:
    """The request is sent once more on a fresh connection, and only there."""
    upstream.script = answer
    pool = make_pool(upstream)
    await post(pool)
    upstream.script = lambda exchange: exchange.reset() if len(exchange.connection.exchanges) > 1 else answer(exchange)
    outcome = await post(pool, b'{"tag:2":0}')
    assert outcome.data == WHOLE
    assert upstream.tags == [None, 2, 2]
    pool.close()


async def test_a_kept_connection_that_died_and_nobody_listens_any_more(rig: Rig) -> None:
    """When there is no fresh connection, that is what is told."""
    upstream = await rig.upstream(answer)
    pool = make_pool(upstream)
    await post(pool)
    server = upstream._server
    assert server is not None
    server.close()
    upstream.script = lambda exchange: exchange.reset()
    outcome = await post(pool)
    assert isinstance(outcome.error, UpstreamUnavailable)


async def test_a_fresh_connection_that_died(upstream: ScriptedUpstream) -> None:
    """On a fresh connection the upstream has seen the request: it is not sent again."""
    upstream.script = lambda exchange: exchange.reset()
    outcome = await post(make_pool(upstream))
    assert isinstance(outcome.error, UpstreamBroken)
    assert len(upstream.exchanges) == 1


async def test_aborting_between_the_two_attempts(upstream: ScriptedUpstream) -> None:
    """The second attempt is given up like the first."""
    upstream.script = answer
    pool = make_pool(upstream)
    await post(pool)
    upstream.script = None
    for turns in range(8):
        before = len(upstream.exchanges)
        if not upstream.open_connections:
            upstream.script = answer
            await post(pool)
            before = len(upstream.exchanges)
            upstream.script = None
        outcome = Outcome()
        call = begin(pool, outcome)
        exchange = await upstream.exchange(before)
        exchange.reset()
        for _ in range(turns):
            await asyncio.sleep(0)
        call.abort()
        await eventually(lambda: upstream.open_connections == [])
        assert not outcome.over.is_set()


# -- reading and not reading ----------------------------------------------------------------------------------------


async def test_pausing_holds_the_upstream_back(upstream: ScriptedUpstream) -> None:
    """While the caller does not read, what the upstream sends stays with it; afterwards all of it comes."""
    pool = make_pool(upstream, idle_timeout_seconds=0.2)
    outcome = Outcome()
    call = begin(pool, outcome)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(chunk({}))
    await eventually(lambda: outcome.head is not None)
    call.pause_reading()
    for _ in range(300):
        exchange.event(chunk({"content": "x" * 100000}))
    exchange.end_stream()
    await asyncio.sleep(0.4)  # twice the idle time-out, which must not run
    assert len(outcome.data) < 1000
    assert exchange.connection.transport.get_write_buffer_size() > 1 << 20
    call.resume_reading()
    await outcome.end()
    assert outcome.ended
    assert outcome.data == chunk({}) + chunk({"content": "x" * 100000}) * 300
    pool.close()


async def test_the_three_time_outs(upstream: ScriptedUpstream) -> None:
    """R31: each limit is the one that was set, and the upstream sees its connection closed."""
    pool = make_pool(upstream, first_byte_timeout_seconds=0.05, idle_timeout_seconds=0.1)
    outcome = await post(pool)
    assert isinstance(outcome.error, UpstreamTimeout)
    assert (outcome.error.waiting_for, outcome.error.timeout_seconds) == ("the first byte", 0.05)
    upstream.script = lambda exchange: exchange.write(head(200, "content-length: 5") + b"x")
    outcome = await post(pool)
    assert isinstance(outcome.error, UpstreamTimeout)
    assert (outcome.error.waiting_for, outcome.error.timeout_seconds) == ("the next byte", 0.1)
    await eventually(lambda: upstream.open_connections == [])
    assert len(upstream.aborted) == 2


# -- TLS ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


async def tls_server(certificate: tuple[Path, Path]) -> asyncio.Server:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(2)
                writer.write(whole(WHOLE))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)


@needs_openssl
@pytest.mark.parametrize(
    ("host", "trusted", "reason"),
    [
        ("localhost", True, None),
        ("localhost", False, "its certificate is not valid"),
        ("127.0.0.1", True, "its certificate is not valid"),
    ],
)
async def test_tls(
    certificate: tuple[Path, Path], host: str, trusted: bool, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """An https upstream is spoken to if its certificate is good for its name, and else is unavailable."""
    server = await tls_server(certificate)
    context = ssl.create_default_context(cafile=str(certificate[0]) if trusted else None)
    pool = make_pool((host, server.sockets[0].getsockname()[1]), ssl_context=context)
    outcome = await post(pool)
    if reason is None:
        assert outcome.data == WHOLE
        assert (await post(pool)).data == WHOLE
    else:
        assert isinstance(outcome.error, UpstreamUnavailable)
        assert outcome.error.reason == reason
        assert re.search(f"{reason}: (self-signed certificate|IP address mismatch)", caplog.text)
    pool.close()
    server.close()
    await server.wait_closed()


@needs_openssl
async def test_tls_with_a_plain_server(rig: Rig) -> None:
    """A server that does not speak TLS is unavailable, and the reason says that it is TLS."""
    upstream = await rig.upstream()
    upstream.greeting = lambda connection: connection.transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert isinstance(upstream.address, tuple)
    pool = make_pool(("localhost", upstream.address[1]), ssl_context=ssl.create_default_context())
    outcome = await post(pool)
    assert isinstance(outcome.error, UpstreamUnavailable)
    assert "TLS failed" in outcome.error.reason


@needs_openssl
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=("asyncio", "uvloop"))
def test_aborts_within_tls(certificate: tuple[Path, Path], new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """R63: calls aborted at any moment of handshake and answer leave no descriptor and no noise, on either loop."""
    faults: list[dict[str, object]] = []

    async def abort_often() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
        server = await tls_server(certificate)
        context = ssl.create_default_context(cafile=str(certificate[0]))
        pool = make_pool(("localhost", server.sockets[0].getsockname()[1]), ssl_context=context)
        assert (await post(pool)).data == WHOLE
        pool.take().abort()  # type: ignore[union-attr]
        before = open_files()
        for turns in range(200):
            call = begin(pool, Outcome())
            for _ in range(turns % 40):
                await asyncio.sleep(0)
            call.abort()
        await eventually(lambda: open_files() <= before, what=lambda: f"{open_files()} <= {before} descriptors")
        assert (await post(pool)).data == WHOLE
        pool.close()
        server.close()
        await eventually(lambda: len(asyncio.all_tasks()) == 1, what="the server's own tasks have ended")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(abort_often())
    assert faults == []


# -- whose fault it is that there is no connection --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "told"), [(errno.EMFILE, 0), (errno.ENFILE, 0), (errno.ECONNREFUSED, 1), (errno.EHOSTUNREACH, 1)]
)
async def test_our_own_lack_is_not_the_endpoints(number: int, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no descriptor left here, nobody is told that the endpoint is not there."""
    unreachable: list[int] = []

    def no_socket(*_: object) -> socket.socket:
        raise OSError(number, os.strerror(number))

    pool = make_pool(("127.0.0.1", 1), on_unreachable=lambda: unreachable.append(1))
    monkeypatch.setattr("aiogw.upstream.pool.socket.socket", no_socket)
    outcome = await post(pool)
    assert isinstance(outcome.error, UpstreamUnavailable)
    assert (told, told == 1) == (len(unreachable), pool.unreached_since is not None)


async def test_a_name_that_cannot_be_written(rig: Rig) -> None:
    """It is one that cannot be resolved, and not a request that hangs."""
    outcome = await post(make_pool(("a" * 70, 80)))
    assert isinstance(outcome.error, UpstreamUnavailable)
    assert outcome.error.reason == "its name cannot be resolved"


async def test_a_connection_that_is_lost_as_it_is_made(
    upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be sent on it: the request is told so, and the address counts as not reached."""
    opened = UpstreamPool._open

    async def slow(pool: UpstreamPool, connection: Connection) -> None:
        await opened(pool, connection)
        await eventually(lambda: upstream.connections)
        upstream.connections[0].transport.abort()
        await eventually(lambda: not connection.usable)

    monkeypatch.setattr(UpstreamPool, "_open", slow)
    pool = make_pool(upstream)
    outcome = await post(pool)
    assert isinstance(outcome.error, UpstreamUnavailable)
    assert outcome.error.reason == "it closed the connection at once"
    assert pool.unreached_since is not None
    monkeypatch.undo()
    upstream.script = answer
    assert (await post(pool)).data == WHOLE
    assert pool.unreached_since is None
    pool.close()


async def test_a_mistake_while_connecting(rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Whatever goes wrong, who waits for the response is told."""

    async def broken(_pool: UpstreamPool, _connection: Connection) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(UpstreamPool, "_open", broken)
    outcome = await post(make_pool(("127.0.0.1", 1)))
    assert isinstance(outcome.error, UpstreamUnavailable)
    assert "in a way it should not" in caplog.text
