"""Connections to the upstream that are kept: reused when they are good, never trusted, never an error to a client."""

from __future__ import annotations

import asyncio

import pytest
from rig import OPENAI, STREAM, WHOLE, Exchange, Rig, Surface, answer, eventually, whole

from aiogw.upstream import pool


async def test_a_connection_is_used_again(rig: Rig, surface: Surface) -> None:
    """Requests one after another, whole and streamed, share one connection to the upstream."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    for tag in range(6):
        assert (await rig.ask(gateway, surface, tag, stream=bool(tag % 2))).status == 200
    assert len(upstream.connections) == 1


async def test_an_upstream_that_closes_each_time(rig: Rig, surface: Surface, stream: bool) -> None:
    """``Connection: close`` is obeyed: every request gets a new connection, and none fails."""

    def script(exchange: Exchange) -> None:
        if stream:
            exchange.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
            exchange.write(b"".join(STREAM))
        else:
            exchange.write(whole(WHOLE, "connection: close"))
        exchange.close()

    upstream = await rig.upstream(script)
    gateway = await rig.gateway(upstream, queue_limit=20)
    clients = [await rig.post(gateway, surface, tag, stream=stream) for tag in range(10)]
    for client in clients:
        response = await client.response()
        assert (response.status, surface.text(response)) == (200, "Hello world")
        assert response.header("connection") is None
    assert sorted(upstream.tags) == list(range(10))
    assert len(upstream.connections) == 10
    assert upstream.peak == 1


async def test_a_connection_that_says_close_but_stays_is_not_used_again(rig: Rig) -> None:
    """After ``Connection: close`` nothing more is sent, whether or not the upstream closes."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(WHOLE, "connection: close"))
    gateway = await rig.gateway(upstream)
    for tag in range(3):
        assert (await rig.ask(gateway, OPENAI, tag)).status == 200
    assert [len(connection.exchanges) for connection in upstream.connections] == [1, 1, 1]


def die_by_reset(exchange: Exchange) -> None:
    exchange.reset()


def die_by_close(exchange: Exchange) -> None:
    exchange.close()


@pytest.mark.parametrize("death", [die_by_reset, die_by_close])
async def test_a_kept_connection_that_dies_under_a_request(
    rig: Rig, surface: Surface, stream: bool, death: object
) -> None:
    """The request is sent once more on a fresh connection, within its slot, and the client notices nothing."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    await rig.ask(gateway, surface, 1)

    def die_if_kept(exchange: Exchange) -> None:
        if len(exchange.connection.exchanges) > 1:
            death(exchange)  # type: ignore[operator]
        else:
            answer(exchange)

    upstream.script = die_if_kept
    response = await rig.ask(gateway, surface, 2, stream=stream)
    assert (response.status, response.complete) == (200, True)
    assert surface.text(response) == "Hello world"
    assert upstream.tags == [1, 2, 2]
    assert upstream.exchanges[1].request.raw == upstream.exchanges[2].request.raw
    assert upstream.peak == 1
    assert await gateway.metric("aiogw_grants_total", upstream="reasoning") == 2


async def test_a_request_is_never_sent_a_third_time(rig: Rig, surface: Surface) -> None:
    """When the fresh connection dies as well, the client is told."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    await rig.ask(gateway, surface, 1)
    upstream.script = die_by_reset
    response = await rig.ask(gateway, surface, 2)

    assert response.status == 502
    surface.error(response)
    assert upstream.tags == [1, 2, 2]
    await rig.check_usable(gateway, upstream)


async def test_several_kept_connections_that_are_all_dead(rig: Rig) -> None:
    """The second attempt is on a fresh connection, not on the next kept one, which is probably as dead."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=3)
    clients = [await rig.post(gateway, OPENAI, tag) for tag in range(3)]
    await upstream.exchange(2)
    for exchange in upstream.exchanges:
        exchange.answer()
    for client in clients:
        await client.response()

    upstream.script = lambda exchange: exchange.reset() if len(exchange.connection.exchanges) > 1 else answer(exchange)
    for tag in range(10, 13):
        assert (await rig.ask(gateway, OPENAI, tag)).status == 200
    assert all(upstream.tags.count(tag) <= 2 for tag in upstream.tags)


@pytest.mark.parametrize("said", [b"H", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_request_that_was_answered_in_part_is_not_sent_again(rig: Rig, surface: Surface, said: bytes) -> None:
    """One byte of an answer is enough: the upstream has begun, so the request is not repeated."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    await rig.ask(gateway, surface, 1)

    def script(exchange: Exchange) -> None:
        exchange.write(said)
        exchange.close()

    upstream.script = script
    response = await rig.ask(gateway, surface, 2)
    assert response.status == 502
    assert upstream.tags == [1, 2]
    await rig.check_usable(gateway, upstream)


async def test_a_kept_connection_that_goes_silent_is_not_a_dead_one(rig: Rig) -> None:
    """A request that timed out may be at work still, so it is not sent again."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, first_byte_timeout_seconds=0.2)
    await rig.ask(gateway, OPENAI, 1)
    upstream.script = None
    assert (await rig.ask(gateway, OPENAI, 2)).status == 504
    assert upstream.tags == [1, 2]


async def test_a_client_that_leaves_while_its_request_is_repeated(rig: Rig) -> None:
    """Between the two attempts there is a client that can leave, too."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    await rig.ask(gateway, OPENAI, 1)
    upstream.script = None
    client = await rig.post(gateway, OPENAI, 2)
    exchange = await upstream.exchange(1)
    exchange.reset()
    client.reset()
    await gateway.settled()
    await rig.check_usable(gateway, upstream)


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_an_idle_connection_that_the_upstream_closes(rig: Rig, surface: Surface, how: str) -> None:
    """It is forgotten without a word; the next request makes a new one."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    await rig.ask(gateway, surface, 1)
    (connection,) = upstream.connections
    connection.close() if how == "fin" else connection.reset()
    await eventually(lambda: connection.closed)
    assert (await rig.ask(gateway, surface, 2)).status == 200
    assert upstream.tags == [1, 2]
    assert len(upstream.connections) == 2


async def test_an_upstream_that_closes_soon_after_each_answer(rig: Rig) -> None:
    """R34: however soon an idle connection is closed under the next request, that one is served, and once."""

    def script(exchange: Exchange) -> None:
        answer(exchange)
        asyncio.get_running_loop().call_later(0.0001 * ((exchange.tag or 0) % 20), exchange.connection.close)

    upstream = await rig.upstream(script)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    for tag in range(200):
        await client.post(OPENAI.path, OPENAI.body(tag))
        assert (await client.response()).status == 200
    assert upstream.tags == list(range(200))


@pytest.mark.parametrize("said", [b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n", b"\r\n", b"x"])
async def test_an_idle_connection_that_says_something(rig: Rig, said: bytes) -> None:
    """Bytes nobody asked for make a connection useless: it is dropped, and they are nobody's answer."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    await rig.ask(gateway, OPENAI, 1)
    (connection,) = upstream.connections
    connection.transport.write(said)
    await eventually(lambda: connection.closed)
    assert (await rig.ask(gateway, OPENAI, 2)).status == 200
    assert len(upstream.connections) == 2


async def test_a_connection_that_was_idle_for_too_long(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is nearly as old as the upstream lets it become is closed and not used."""
    monkeypatch.setattr(pool, "MAX_IDLE_SECONDS", 0.05)
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    await rig.ask(gateway, OPENAI, 1)
    await asyncio.sleep(0.06)  # the age that is meant
    assert (await rig.ask(gateway, OPENAI, 2)).status == 200
    assert len(upstream.connections) == 2
    await eventually(lambda: upstream.connections[0].closed)


async def test_an_aborted_connection_is_not_used_again(rig: Rig, surface: Surface) -> None:
    """R08: what is left of an abandoned answer never reaches another client."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.post(gateway, surface, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(*STREAM[:2])
    await client.read_head()
    client.reset()
    await eventually(lambda: exchange.aborted)
    upstream.script = answer
    response = await rig.ask(gateway, surface, 2)
    assert surface.text(response) == "Hello world"
    assert len(upstream.connections) == 2


async def test_an_answer_before_the_request_is_sent(rig: Rig, surface: Surface) -> None:
    """An upstream may refuse a large request from its head: its word reaches the client, the connection is dropped."""
    upstream = await rig.upstream()

    def refuse(connection: object) -> None:
        connection.transport.pause_reading()  # type: ignore[attr-defined]
        connection.transport.write(whole(b'{"error":{"message":"far too long","type":"x"}}', status=413))  # type: ignore[attr-defined]

    upstream.on_head = refuse
    gateway = await rig.gateway(upstream, server={"max_body_bytes": 64 << 20})
    response = await rig.ask(gateway, surface, 1, padding=32 << 20)
    assert response.status == 413
    assert surface.error(response)["message"] == "far too long"
    upstream.on_head = None
    (connection,) = upstream.connections
    # It reads no more, so only breaking it off can end it: what waits to be written must not wait for ever.
    connection.transport.resume_reading()
    await eventually(lambda: connection.closed, what="the connection is given up")
    assert connection.received < 32 << 20
    await rig.check_usable(gateway, upstream)


async def test_the_pool_never_holds_more_than_were_needed(rig: Rig) -> None:
    """Under a cap of three there are never more than three connections, however many requests there are."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, cap=3, queue_limit=100)
    clients = [await rig.post(gateway, OPENAI, tag, stream=bool(tag % 2)) for tag in range(90)]
    for client in clients:
        assert (await client.response()).status == 200
    assert len(upstream.connections) <= 3
