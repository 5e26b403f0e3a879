"""Clients that are slow or silent while they ask, and those that do not take what they are told: each has its time."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time

import pytest
from rig import (
    OPENAI,
    PATIENCE_SECONDS,
    RawClient,
    Rig,
    RunningGateway,
    Surface,
    answer,
    eventually,
    everywhere,
)

from aiogw.protocol import ClientProtocol

HALF_A_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway.test\r\nx-slow: "


async def closed_after(client: RawClient) -> float:
    """Wait for the end of the connection; how many seconds that took."""
    began_at = time.monotonic()
    assert await client.ended()
    return time.monotonic() - began_at


async def header_timeouts(gateway: RunningGateway) -> float:
    return await gateway.metric("aiogw_header_timeouts_total")


# -- heads ----------------------------------------------------------------------------------------------------------


async def test_many_heads_that_trickle(rig: Rig) -> None:
    """Heads that never end are all closed at their deadline, while others are served and /livez answers."""
    deadline_seconds = 2
    upstream = await rig.upstream(answer)
    daemon = await rig.daemon(upstream, server={"header_timeout_seconds": deadline_seconds})
    # The event loop opens a file of its own for its first connection.
    assert (await daemon.admin("/livez")).status == 200
    files_before = daemon.open_files
    began_at = time.monotonic()
    silent = [await rig.client(daemon) for _ in range(20)]
    trickling = [await rig.client(daemon) for _ in range(180)]
    connected_at = time.monotonic()
    left = silent + trickling
    for byte in HALF_A_HEAD:
        for client in trickling:
            with contextlib.suppress(OSError):
                client.sock.send(bytes((byte,)))
        assert (await daemon.admin("/livez")).status == 200
        assert (await rig.ask(daemon, OPENAI)).status == 200
        left = [client for client in left if client.quiet()]
        if not left or time.monotonic() > connected_at + deadline_seconds + 2:
            break
        await asyncio.sleep(0.1)  # their pace
    assert left == []
    assert time.monotonic() - began_at > deadline_seconds
    assert await header_timeouts(daemon) == 200
    # One connection to the upstream is kept.
    await eventually(lambda: daemon.open_files <= files_before + 1, what="descriptors back")


@pytest.mark.parametrize("sent", [b"", b"P", HALF_A_HEAD], ids=["nothing", "a-byte", "half"])
async def test_a_head_that_does_not_end(rig: Rig, sent: bytes, process: bool) -> None:
    """The time of the first head runs from the beginning of the connection, whatever has come of it."""
    gateway = await rig.gateway(await rig.upstream(), server={"header_timeout_seconds": 0.4}, process=process)
    before = await header_timeouts(gateway)
    client = await rig.client(gateway)
    await client.send(sent)
    assert 0.3 < await closed_after(client) < 2.4
    assert await header_timeouts(gateway) == before + 1


async def test_a_kept_connection_may_be_idle_for_longer_than_a_head_may_take(rig: Rig, process: bool) -> None:
    """Between two requests only the idle time counts; with the first byte of the next one its head's time begins."""
    upstream = await rig.upstream(answer)
    server = {"header_timeout_seconds": 0.4, "keepalive_timeout_seconds": 30}
    gateway = await rig.gateway(upstream, server=server, process=process)
    client = await rig.client(gateway)
    for _ in range(2):
        await client.post(OPENAI.path, OPENAI.body())
        assert (await client.response()).status == 200
        await asyncio.sleep(1)  # more than twice the time of a head
        assert client.quiet()
    await client.send(HALF_A_HEAD)
    assert 0.3 < await closed_after(client) < 2.4


async def test_an_idle_connection(rig: Rig, process: bool) -> None:
    """After an answer, a connection on which nothing comes is closed when its idle time is over."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, server={"keepalive_timeout_seconds": 0.4}, process=process)
    before = await header_timeouts(gateway)
    client = await rig.client(gateway)
    await client.post(OPENAI.path, OPENAI.body())
    assert (await client.response()).status == 200
    assert 0.3 < await closed_after(client) < 2.4
    assert await header_timeouts(gateway) == before


async def test_a_head_that_begins_at_the_end_of_the_idle_time(rig: Rig, process: bool) -> None:
    """It has its whole time: the idle time ended with its first byte."""
    upstream = await rig.upstream(answer)
    server = {"keepalive_timeout_seconds": 0.6, "header_timeout_seconds": 8}
    gateway = await rig.gateway(upstream, server=server, process=process)
    client = await rig.client(gateway)
    body = OPENAI.body()
    await client.post(OPENAI.path, body)
    assert (await client.response()).status == 200
    await client.send(HALF_A_HEAD)
    await asyncio.sleep(1.2)  # twice the idle time
    assert client.quiet()
    await client.send(f"yes\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    assert (await client.response()).status == 200
    # And the next idle time is a whole one again.
    assert 0.3 < await closed_after(client) < 2.6


async def test_the_beginning_of_another_head_behind_a_running_request(rig: Rig, process: bool) -> None:
    """What comes ahead of its time does not end the request that runs, and does not make its own head endless."""
    upstream = await rig.upstream()
    server = {"header_timeout_seconds": 0.4, "keepalive_timeout_seconds": 0.4}
    gateway = await rig.gateway(upstream, server=server, process=process)
    client = await rig.client(gateway)
    await client.post(OPENAI.path, OPENAI.body(1))
    exchange = await upstream.exchange(0)
    await client.send(HALF_A_HEAD)
    await asyncio.sleep(1)  # more than both times
    assert client.quiet()
    assert not exchange.aborted
    exchange.answer()
    assert (await client.response()).status == 200
    # Its time has been running since its first byte.
    assert await closed_after(client) < 2.4


# -- bodies ---------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize(
    "framing", ["content-length: 1000000", "transfer-encoding: chunked"], ids=["length", "chunked"]
)
async def test_a_body_that_trickles(rig: Rig, surface: Surface, process: bool, framing: str) -> None:
    """A byte now and then is too slow: 408 in the surface's shape, the connection closed, its memory given back."""
    upstream = await rig.upstream()
    server = {"body_timeout_seconds": 0.5, "body_min_bytes_per_second": 1000}
    gateway = await rig.gateway(upstream, server=server, process=process)
    client = await rig.client(gateway)
    began_at = time.monotonic()
    await client.request("POST", surface.path, None, framing)
    while client.quiet() and time.monotonic() < began_at + PATIENCE_SECONDS:
        await client.send(b"1\r\n{\r\n" if "chunked" in framing else b"{")
        await asyncio.sleep(0.05)  # its pace
    response = await client.response()
    assert 0.4 < time.monotonic() - began_at < 2.5
    assert (response.status, response.header("connection")) == (408, "close")
    assert response.header("x-should-retry") == "false"
    assert "0.5 s" in surface.error(response)["message"]
    assert surface.code(response) in ("body_timeout", None)
    assert await client.ended()
    assert upstream.exchanges == []
    await gateway.record(outcome="body_timeout", status=408)
    assert await gateway.metric("aiogw_body_memory_bytes") == 0


async def test_a_short_body_that_stops(rig: Rig, process: bool) -> None:
    """A body that is short enough to be waited for otherwise is not waited for when its time is over."""
    gateway = await rig.gateway(await rig.upstream(), server={"body_timeout_seconds": 0.4}, process=process)
    client = await rig.client(gateway)
    await client.request("POST", OPENAI.path, b"{", "content-length: 2")
    response = await client.response()
    assert (response.status, response.header("connection")) == (408, "close")
    assert await client.ended()


async def test_a_long_upload_that_is_fast_enough(rig: Rig, process: bool) -> None:
    """R28: what comes at more than the least rate may take many times body_timeout_seconds."""
    upstream = await rig.upstream(answer)
    server = {"body_timeout_seconds": 0.4, "body_min_bytes_per_second": 50_000}
    gateway = await rig.gateway(upstream, server=server, process=process)
    body = OPENAI.body(1, padding=400_000)
    client = await rig.client(gateway)
    await client.request("POST", OPENAI.path, body[:1000], f"content-length: {len(body)}")
    for start in range(1000, len(body), 20_000):
        await asyncio.sleep(0.1)  # its pace: 200 kB a second
        await client.send(body[start : start + 20_000])
    assert (await client.response()).status == 200
    assert upstream.tags == [1]


async def test_an_upload_that_stops_halfway(rig: Rig) -> None:
    """What has come earns time for what is left, and no more: 10,000 bytes at 10,000 a second are worth a second."""
    upstream = await rig.upstream()
    server = {"body_timeout_seconds": 0.5, "body_min_bytes_per_second": 10_000}
    gateway = await rig.gateway(upstream, server=server)
    client = await rig.client(gateway)
    began_at = time.monotonic()
    await client.request("POST", OPENAI.path, b" " * 10_000, "content-length: 20000")
    assert (await client.response()).status == 408
    assert 1.4 < time.monotonic() - began_at < 3


async def test_a_compressed_upload_that_stops_halfway(rig: Rig, process: bool) -> None:
    """What has come earns time by its bytes on the wire, whatever they become."""
    upstream = await rig.upstream()
    server = {"body_timeout_seconds": 0.5, "body_min_bytes_per_second": 10_000}
    gateway = await rig.gateway(upstream, server=server, process=process)
    packed = gzip.compress(b" " * 500_000)
    assert len(packed) < 1000
    client = await rig.client(gateway)
    began_at = time.monotonic()
    await client.request("POST", OPENAI.path, packed[:-1], f"content-length: {len(packed)}", "content-encoding: gzip")
    assert (await client.response()).status == 408
    assert 0.4 < time.monotonic() - began_at < 3


async def test_a_client_that_leaves_its_upload(rig: Rig, process: bool) -> None:
    """It is gone like any other, and its memory is given back."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.client(gateway)
    await client.request("POST", OPENAI.path, b"{", "content-length: 1000000")
    await eventually(lambda: held(gateway, 1000000), what="its length held")
    client.reset()
    await gateway.record(outcome="client_gone")
    await eventually(lambda: held(gateway, 0), what="given back")


async def held(gateway: RunningGateway, count: int) -> bool:
    return await gateway.metric("aiogw_body_memory_bytes") == count


# -- answers that are not taken -------------------------------------------------------------------------------------

# Of these the list of models is long enough to fill what the kernel holds.
LONG_NAMES = [f"model-{number}-{'x' * 200}" for number in range(500)]


@pytest.mark.parametrize("leaves", ["stays", "half-close"])
async def test_answers_of_our_own_that_nobody_takes(rig: Rig, process: bool, leaves: str) -> None:
    """A client that asks on and on and never reads is given up, although none of what it gets is relayed."""
    upstream = await rig.upstream()
    server = {"client_stall_timeout_seconds": 0.5}
    gateway = await rig.gateway(upstream, server=server, process=process, models=["reasoning", *LONG_NAMES])
    client = await rig.client(gateway, receive_buffer=16 << 10)
    await client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
    if leaves == "half-close":
        client.half_close()
    await reset_seen(client)


async def test_refusals_that_nobody_takes(rig: Rig) -> None:
    """The same with short answers, of which many fit before anything is full."""
    daemon = await rig.daemon(await rig.upstream(), server={"client_stall_timeout_seconds": 0.5})
    # The event loop opens a file of its own for its first connection.
    assert (await daemon.admin("/livez")).status == 200
    files_before = daemon.open_files
    client = await rig.client(daemon, receive_buffer=16 << 10)
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n{"

    async def ask_on() -> None:
        try:
            while True:
                await asyncio.get_running_loop().sock_sendall(client.sock, request * 100)
        except OSError:
            pass

    async with asyncio.timeout(30):
        await ask_on()
    await eventually(lambda: daemon.open_files <= files_before, what="its descriptor back")


async def reset_seen(client: RawClient) -> None:
    """Wait until the other side has closed, without taking a byte."""

    def broken() -> bool:
        try:
            client.sock.send(b"\r\n")
        except BlockingIOError:
            return False
        except OSError:
            return True
        return False

    await eventually(broken, what="the connection broken off")


async def test_the_last_bytes_that_nobody_takes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection is not kept by the few bytes that it cannot get rid of."""
    transports: list[asyncio.Transport] = []
    connection_made = ClientProtocol.connection_made

    def note(protocol: ClientProtocol, transport: asyncio.Transport) -> None:
        transports.append(transport)
        connection_made(protocol, transport)

    monkeypatch.setattr(ClientProtocol, "connection_made", note)
    server = {"client_stall_timeout_seconds": 0.5, "keepalive_timeout_seconds": 0.2}
    gateway = await rig.gateway(await rig.upstream(), server=server)
    client = await rig.client(gateway, receive_buffer=16 << 10)
    await eventually(lambda: transports)
    (transport,) = transports
    asked = 0
    while not transport.get_write_buffer_size():
        asked += 1
        await client.post(OPENAI.path, b"{")
        await eventually(lambda asked=asked: len(gateway.records) == asked, what="its log line")
    assert transport.get_write_buffer_size() < 16 << 10
    await reset_seen(client)
