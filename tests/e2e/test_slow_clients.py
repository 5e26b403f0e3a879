"""Clients that read slowly or not at all: the upstream is slowed down, slots are not held, the stuck are given up."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from rig import (
    DONE,
    FIRST_EVENT,
    OPENAI,
    STREAM,
    TEXT,
    WHOLE,
    Exchange,
    RawClient,
    Response,
    Rig,
    RunningGateway,
    Surface,
    chunk,
    eventually,
    everywhere,
    everywhere_both_ways,
    framed,
    head,
    resident_bytes,
)

MEGABYTE = 1 << 20
# Not as small as can be: with less than a segment the kernel opens the window only now and then, which is not our pace.
RECEIVE_BUFFER = 128 << 10
LONG_EVENT = chunk({"content": "x" * 50000})


async def flood(exchange: Exchange, megabytes: int) -> None:
    """Send more than all buffers on the way can take, so that something has to wait here."""
    exchange.begin_stream(FIRST_EVENT)
    for _ in range(megabytes * MEGABYTE // len(LONG_EVENT)):
        exchange.event(LONG_EVENT)


def unsent(exchange: Exchange) -> int:
    return exchange.connection.transport.get_write_buffer_size()


async def slow_client(rig: Rig, gateway: RunningGateway, surface: Surface, tag: int, **more: object) -> RawClient:
    """A client with a small receive buffer that has asked and reads nothing."""
    client = await rig.client(gateway, receive_buffer=RECEIVE_BUFFER)
    await client.post(surface.path, surface.body(tag, **more))
    return client


@everywhere
async def test_a_client_that_reads_nothing(rig: Rig, surface: Surface, process: bool) -> None:
    """The upstream is paused, not buffered without end; after client_stall_timeout_seconds the client is given up."""
    # R64
    upstream = await rig.upstream()
    server = {"client_stall_timeout_seconds": 0.5}
    gateway = await rig.gateway(upstream, server=server, process=process)
    client = await slow_client(rig, gateway, surface, 1, stream=True)
    exchange = await upstream.exchange(0)
    (second,) = await rig.queued(gateway, surface, [2])
    began_at = time.monotonic()
    await flood(exchange, 24)

    await eventually(lambda: exchange.aborted, what="the upstream sees the close")
    assert exchange.aborted_at is not None
    assert 0.45 < exchange.aborted_at - began_at < 3
    (await upstream.exchange(1)).answer()
    assert (await second.response()).status == 200
    await gateway.record(outcome="client_stalled")
    # Its connection was broken off, so it cannot take what it has for a whole answer.
    response = await client.response()
    assert not response.complete


async def test_the_upstream_is_paused_at_the_limit(rig: Rig) -> None:
    """No more than response_buffer_bytes, and what the kernel holds, is taken from the upstream for a slow client."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await slow_client(rig, gateway, OPENAI, 1, stream=True)
    exchange = await upstream.exchange(0)
    await flood(exchange, 64)
    # Once it is paused, a turn of the loop brings nothing any more.
    before, turns = -1, 0
    while turns < 200:
        turns = turns + 1 if unsent(exchange) == before else 0
        before = unsent(exchange)
        await asyncio.sleep(0)
    assert before > 32 * MEGABYTE
    client.reset()
    await eventually(lambda: exchange.aborted, what="the upstream sees the close")


@everywhere_both_ways
async def test_a_slow_reader_does_not_hold_its_slot(rig: Rig, surface: Surface, stream: bool, process: bool) -> None:
    """When the upstream has finished, the next request is sent, even if the client has not read a byte yet."""
    text = "y" * 5 * MEGABYTE
    upstream = await rig.upstream()
    server = {"response_buffer_bytes": 64 * MEGABYTE}
    gateway = await rig.gateway(upstream, server=server, process=process)
    client = await slow_client(rig, gateway, surface, 1, stream=stream)
    exchange = await upstream.exchange(0)
    (second,) = await rig.queued(gateway, surface, [2])
    if stream:
        exchange.stream((FIRST_EVENT, chunk({"content": text}), *STREAM[3:]))
    else:
        exchange.answer(whole_answer(text))
    (await upstream.exchange(1)).answer()
    assert (await second.response()).status == 200
    await gateway.settled()
    response = await client.response()
    assert response.complete
    assert text == surface.text(response)


def whole_answer(text: str) -> bytes:
    return WHOLE.replace(TEXT.encode(), text.encode())


@pytest.mark.parametrize("pause", [0.0, 0.01])
async def test_a_slow_reader_gets_everything(rig: Rig, pause: float) -> None:
    """Pausing and resuming, many times over, loses and doubles nothing."""
    events = [chunk({"content": f"{number}-" + "z" * 20000}) for number in range(500)]
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await slow_client(rig, gateway, OPENAI, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream()
    for event in events:
        exchange.event(event)
    exchange.end_stream(DONE)
    response = await client.read_head()
    received = b""
    while data := await client.read_chunk():
        received += data
        if len(received) % 20 == 0:
            await asyncio.sleep(pause)

    assert response.status == 200
    assert b"".join(events) + DONE == received
    await gateway.record(outcome="completed")


async def test_a_steady_slow_reader_is_not_given_up(rig: Rig) -> None:
    """Only a client that takes nothing at all is given up: one that reads a little all the time is not."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, server={"client_stall_timeout_seconds": 0.3})
    client = await slow_client(rig, gateway, OPENAI, 1, stream=True)
    exchange = await upstream.exchange(0)
    await flood(exchange, 8)
    exchange.end_stream(DONE)
    response = await client.read_head()
    began_at = time.monotonic()
    # A second of slow reading, three times the limit, then the rest.
    while time.monotonic() - began_at < 1:
        response.body += await client.read_chunk()
        await asyncio.sleep(0.05)  # its pace
    await client.read_body(response)
    assert response.complete
    assert response.body.count(LONG_EVENT) == 8 * MEGABYTE // len(LONG_EVENT)


async def test_a_very_slow_reader_is_not_given_up(rig: Rig, process: bool) -> None:
    """What the kernel has sent counts as taken: its buffer is megabytes, and ours may stand still for minutes."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, server={"client_stall_timeout_seconds": 0.8}, process=process)
    client = await rig.client(gateway, receive_buffer=16 << 10)
    await client.post(OPENAI.path, OPENAI.body(1, stream=True))
    exchange = await upstream.exchange(0)
    await flood(exchange, 24)
    exchange.end_stream(DONE)
    response = await client.read_head()
    began_at = time.monotonic()
    # Three times the limit; some 400 kB, while the kernel asks for more only after a third of its 4 MB.
    while time.monotonic() - began_at < 2.5:
        response.body += await client.read_chunk()
        await asyncio.sleep(0.2)  # its pace, a quarter of the limit
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MEGABYTE)
    await client.read_body(response)
    assert response.complete
    assert 24 * MEGABYTE // len(LONG_EVENT) == response.body.count(LONG_EVENT)
    await gateway.record(outcome="completed")


async def test_the_upstreams_time_does_not_run_while_it_is_paused(rig: Rig) -> None:
    """An upstream that is kept waiting by a slow client is not taken for a silent one."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, idle_timeout_seconds=0.1)
    client = await slow_client(rig, gateway, OPENAI, 1, stream=True)
    exchange = await upstream.exchange(0)
    await flood(exchange, 24)
    exchange.end_stream(DONE)
    await asyncio.sleep(0.8)  # four times the limit
    response = await client.response()
    assert response.complete
    assert OPENAI.in_band_error(response) is None


async def test_a_client_that_does_not_take_the_end(rig: Rig, stream: bool) -> None:
    """A client that stops reading is given up even when its answer is complete; its slot was free long before."""
    upstream = await rig.upstream()
    server = {"client_stall_timeout_seconds": 0.3, "response_buffer_bytes": 64 * MEGABYTE}
    gateway = await rig.gateway(upstream, server=server)
    client = await slow_client(rig, gateway, OPENAI, 1, stream=stream)
    exchange = await upstream.exchange(0)
    if stream:
        exchange.stream([LONG_EVENT] * 200)
    else:
        exchange.answer(b"x" * 10 * MEGABYTE)
    await gateway.settled()
    await gateway.record(outcome="client_stalled")
    response: Response = await client.response()
    assert not response.complete


async def test_a_stuck_client_with_a_silent_upstream(rig: Rig) -> None:
    """While a client is stuck below the limit of the buffer, the upstream is not paused and its time runs."""
    upstream = await rig.upstream()
    server = {"client_stall_timeout_seconds": 5, "response_buffer_bytes": 64 * MEGABYTE}
    gateway = await rig.gateway(upstream, server=server, idle_timeout_seconds=0.3)
    client = await slow_client(rig, gateway, OPENAI, 1, stream=True)
    exchange = await upstream.exchange(0)
    await flood(exchange, 10)
    await eventually(lambda: exchange.aborted, what="the silent upstream is let go")
    response = await client.response()
    assert OPENAI.in_band_error(response) is not None
    assert framed(b"") not in response.body


async def test_a_hundred_clients_that_read_nothing(rig: Rig) -> None:
    """R64: streamed and whole, all are given up, their slots are back, and meanwhile they took what they may take."""
    count, stall_seconds = 100, 2
    took_at: dict[int | None, float] = {}

    async def send_on(exchange: Exchange) -> None:
        # What the kernels hold between the upstream and the gateway is not what this is about.
        sock = exchange.connection.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        streamed = b'"stream":true' in exchange.request.body
        if streamed:
            exchange.begin_stream()
        else:
            exchange.write(head(200, "content-type: application/json", f"content-length: {1 << 30}"))
        while not exchange.aborted:
            if unsent(exchange) == 0:
                took_at[exchange.tag] = time.monotonic()
                exchange.write(framed(LONG_EVENT) if streamed else LONG_EVENT)
            await asyncio.sleep(0.01)  # its pace

    upstream = await rig.upstream()
    server = {"client_stall_timeout_seconds": stall_seconds}
    daemon = await rig.daemon(upstream, server=server, engine_slots=count + 1, cap=count)
    clients = [await rig.client(daemon, receive_buffer=16 << 10) for _ in range(count)]
    for tag, client in enumerate(clients):
        await client.post(OPENAI.path, OPENAI.body(tag, stream=not tag % 2))
    await upstream.exchange(count - 1)
    before = resident_bytes(daemon)
    sending = [asyncio.ensure_future(send_on(exchange)) for exchange in upstream.exchanges]
    await eventually(lambda: len(upstream.aborted) == count, 30, what=lambda: f"{len(upstream.aborted)} given up")
    await asyncio.gather(*sending)
    grown = resident_bytes(daemon, peak=True) - before
    await daemon.settled()
    assert sum(record["outcome"] == "client_stalled" for record in daemon.records) == count
    late = [(exchange.aborted_at or 0) - took_at[exchange.tag] - stall_seconds for exchange in upstream.aborted]
    assert max(late) < 2
    # For each response_buffer_bytes, and one read from its upstream.
    assert grown < 64 * MEGABYTE
