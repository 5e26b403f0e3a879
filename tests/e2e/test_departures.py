"""Clients that leave: whenever and however they do, the upstream hears of it at once, and never of those who waited."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from rig import (
    FIRST_EVENT,
    OPENAI,
    STREAM,
    WHOLE,
    Daemon,
    Exchange,
    RawClient,
    Rig,
    RunningGateway,
    Surface,
    answer,
    chunk,
    eventually,
    everywhere,
    everywhere_both_ways,
    request_bytes,
    whole,
)

WAYS = ("fin", "rst", "half-close")
WAYS_AND_ONE_DAEMON = (*((False, how) for how in WAYS), (True, "rst"))

# What a client's departure may take until the upstream's connection is closed.
PROMPTLY_SECONDS = 0.25


# More than aiohttp takes in before it stops reading, so that what is left hides the end of the connection.
BEGINNING = request_bytes("POST", OPENAI.path, None, "content-length: 900000") + b"x" * 600_000


async def send_ahead(gateway: RunningGateway, client: RawClient) -> None:
    """Send the beginning of another large request, and wait until the gateway has read as much of it as it will."""
    await client.send(BEGINNING)
    for _ in range(10):
        # Each is at least one turn of its loop, in which it also looks at the client.
        await gateway.metrics()


async def closed_promptly(exchange: Exchange, left_at: float) -> None:
    """Wait until the upstream has seen its connection end, and check that it did not take long."""
    await eventually(lambda: exchange.aborted, what=lambda: f"{exchange} aborted")
    assert exchange.aborted_at is not None
    assert exchange.aborted_at - left_at < PROMPTLY_SECONDS


# -- while queued ---------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize(("how", "padding"), [*((how, 0) for how in WAYS), ("rst", 2 << 20)])
async def test_leaving_the_queue(rig: Rig, surface: Surface, process: bool, how: str, padding: int) -> None:
    """A client that leaves while queued gives its place up at once, and the upstream never sees its request."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    first = await rig.post(gateway, surface, 1)
    await upstream.exchange(0)
    leaver, third = await rig.queued(gateway, surface, [2, 3], padding=padding)

    leaver.leave(how)
    await gateway.waiting(1)
    record = await gateway.record(outcome="client_gone")
    assert "status" not in record

    upstream.exchanges[0].answer()
    assert (await first.response()).status == 200
    (await upstream.exchange(1)).answer()
    assert (await third.response()).status == 200
    assert upstream.tags == [1, 3]


@pytest.mark.parametrize("how", WAYS)
async def test_leaving_the_queue_with_a_large_request(rig: Rig, surface: Surface, how: str) -> None:
    """R02: the size of what a client has sent does not hide its departure."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    first = await rig.post(gateway, surface, 1)
    await upstream.exchange(0)
    (leaver,) = await rig.queued(gateway, surface, [2], padding=3 << 20)
    leaver.leave(how)
    await gateway.waiting(0)
    upstream.exchanges[0].answer()
    assert (await first.response()).status == 200
    await rig.check_usable(gateway, upstream)
    assert 2 not in upstream.tags


async def test_everybody_leaves_the_queue(rig: Rig, surface: Surface) -> None:
    """When all who wait have left, the next who comes is served as if nothing had been."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    first = await rig.post(gateway, surface, 1)
    await upstream.exchange(0)
    for client in await rig.queued(gateway, surface, range(2, 9)):
        client.reset()
    await gateway.waiting(0)

    upstream.exchanges[0].answer()
    await first.response()
    await gateway.settled()
    upstream.script = answer
    assert (await rig.ask(gateway, surface, 9)).status == 200
    assert upstream.tags == [1, 9]


async def test_a_place_in_a_full_queue_becomes_free(rig: Rig, surface: Surface) -> None:
    """Where somebody leaves a full queue, there is room for the next one."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_limit=1)
    first = await rig.post(gateway, surface, 1)
    await upstream.exchange(0)
    (leaver,) = await rig.queued(gateway, surface, [2])
    assert (await rig.ask(gateway, surface, 3)).status == 503
    leaver.close()
    await gateway.waiting(0)
    (fourth,) = await rig.queued(gateway, surface, [4])

    upstream.exchanges[0].answer()
    await first.response()
    (await upstream.exchange(1)).answer()
    assert (await fourth.response()).status == 200
    assert upstream.tags == [1, 4]


@pytest.mark.parametrize("how", WAYS)
async def test_leaving_the_queue_behind_half_a_request(rig: Rig, surface: Surface, process: bool, how: str) -> None:
    """A client that has begun another request, which nobody reads, gives its place up as promptly as any."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_timeout_seconds=60, first_byte_timeout_seconds=60, process=process)
    first = await rig.post(gateway, surface, 1)
    exchange = await upstream.exchange(0)
    (leaver,) = await rig.queued(gateway, surface, [2])
    await send_ahead(gateway, leaver)

    left_at = time.monotonic()
    leaver.leave(how)
    await gateway.waiting(0)
    assert time.monotonic() - left_at < 1
    record = await gateway.record(outcome="client_gone")
    assert "status" not in record
    exchange.answer()
    assert 200 == (await first.response()).status
    await rig.check_usable(gateway, upstream)
    assert 2 not in upstream.tags


@pytest.mark.parametrize("how", ["fin", "half-close"])
async def test_leaving_the_queue_of_a_unix_socket_behind_half_a_request(rig: Rig, process: bool, how: str) -> None:
    """The same on a Unix socket."""
    upstream = await rig.upstream()
    server = {"listen": f"unix:{rig.directory}/gateway.sock"}
    gateway = await rig.gateway(upstream, queue_timeout_seconds=60, server=server, process=process)
    first = await rig.post(gateway, OPENAI, 1)
    exchange = await upstream.exchange(0)
    (leaver,) = await rig.queued(gateway, OPENAI, [2])
    await send_ahead(gateway, leaver)
    leaver.leave(how)
    await gateway.waiting(0)
    exchange.answer()
    assert 200 == (await first.response()).status
    assert [1] == upstream.tags


# -- in the very tick of the grant ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("order", ["leave-first", "answer-first"])
async def test_leaving_in_the_tick_of_the_grant(rig: Rig, how: str, order: str) -> None:
    """A client whose close arrives together with the end that frees its slot never reaches the upstream."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    holder = await rig.post(gateway, OPENAI, 1000)
    for number in range(35):
        exchange = await upstream.exchange(number)
        leaver, successor = await rig.queued(gateway, OPENAI, [number, 1001 + number])
        # Both before the loop looks at its sockets again, so that the gateway finds both in one go.
        if order == "leave-first":
            leaver.leave(how)
            exchange.answer()
        else:
            exchange.answer()
            leaver.leave(how)
        assert (await holder.response()).status == 200
        holder.close()
        holder = successor
    (await upstream.exchange(35)).answer()
    assert (await holder.response()).status == 200

    assert list(range(1000, 1036)) == upstream.tags
    assert upstream.peak == 1


async def test_leaving_in_the_tick_of_the_grant_of_the_daemon(rig: Rig) -> None:
    """The same race against the real process, where both loops run by themselves."""
    upstream = await rig.upstream()
    gateway = await rig.daemon(upstream)
    holder = await rig.post(gateway, OPENAI, 1000)
    for number in range(60):
        exchange = await upstream.exchange(number)
        leaver, successor = await rig.queued(gateway, OPENAI, [number, 1001 + number])
        leaver.leave(WAYS[number % 3])
        exchange.answer()
        assert (await holder.response()).status == 200
        holder.close()
        holder = successor
        await upstream.exchange(number + 1)
    upstream.exchanges[60].answer()
    assert (await holder.response()).status == 200

    assert list(range(1000, 1061)) == upstream.tags
    assert upstream.peak == 1


async def test_all_leave_in_the_tick_of_the_grant(rig: Rig, surface: Surface) -> None:
    """When the whole queue leaves as the slot becomes free, the slot is not lost on the way down the line."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_limit=50)
    holder = await rig.post(gateway, surface, 1000)
    exchange = await upstream.exchange(0)
    leavers = await rig.queued(gateway, surface, range(50))
    exchange.answer()
    for leaver in leavers:
        leaver.reset()
    await holder.response()

    upstream.script = answer
    assert (await rig.ask(gateway, surface, 1001)).status == 200
    assert upstream.tags == [1000, 1001]


async def test_leaving_behind_requests_that_nobody_reads(rig: Rig, process: bool) -> None:
    """R02: a client that has sent so much ahead that its connection is not read any more is still not sent upstream."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    first = await rig.post(gateway, OPENAI, 1)
    await upstream.exchange(0)
    (leaver,) = await rig.queued(gateway, OPENAI, [2])
    await leaver.send(request_bytes("POST", OPENAI.path, OPENAI.body(2, padding=100)) * 60)
    leaver.close()

    upstream.exchanges[0].answer()
    assert (await first.response()).status == 200
    upstream.script = answer
    assert (await rig.ask(gateway, OPENAI, 3)).status == 200
    assert upstream.tags == [1, 3]


# -- at the upstream ------------------------------------------------------------------------------------------------


@everywhere_both_ways
@pytest.mark.parametrize("how", WAYS)
async def test_leaving_before_the_first_byte(rig: Rig, surface: Surface, stream: bool, process: bool, how: str) -> None:
    """A client that leaves while the upstream still thinks: the upstream sees the close, the slot is used again."""
    # R01, R05
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.post(gateway, surface, 1, stream=stream)
    exchange = await upstream.exchange(0)

    left_at = time.monotonic()
    client.leave(how)
    await closed_promptly(exchange, left_at)
    await gateway.record(outcome="client_gone")
    await rig.check_usable(gateway, upstream)


@pytest.mark.parametrize("how", WAYS)
async def test_leaving_behind_half_a_request_before_the_first_byte(
    rig: Rig, surface: Surface, stream: bool, process: bool, how: str
) -> None:
    """The same of a client that has begun another request, which nobody reads."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, first_byte_timeout_seconds=60, process=process)
    client = await rig.post(gateway, surface, 1, stream=stream)
    exchange = await upstream.exchange(0)
    await send_ahead(gateway, client)

    left_at = time.monotonic()
    client.leave(how)
    await closed_promptly(exchange, left_at)
    await gateway.record(outcome="client_gone")
    await rig.check_usable(gateway, upstream)


@everywhere
@pytest.mark.parametrize("how", WAYS)
async def test_leaving_mid_stream(rig: Rig, surface: Surface, process: bool, how: str) -> None:
    """A client that leaves in the middle of a stream: the upstream sees the close, the next in line gets the slot."""
    # R06, R22
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.post(gateway, surface, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(*STREAM[:2])
    await client.read_head()
    await client.read_event()
    (second,) = await rig.queued(gateway, surface, [2])

    left_at = time.monotonic()
    client.leave(how)
    await closed_promptly(exchange, left_at)
    successor = await upstream.exchange(1)
    assert successor.started_at - left_at < PROMPTLY_SECONDS
    successor.answer()
    assert (await second.response()).status == 200
    record = await gateway.record(outcome="client_gone")
    assert record["status"] == 200
    assert upstream.tags == [1, 2]
    assert upstream.peak == 1


@pytest.mark.parametrize(("process", "how"), WAYS_AND_ONE_DAEMON)
async def test_leaving_while_the_upstream_goes_on_talking(rig: Rig, process: bool, how: str) -> None:
    """R03, R09: an upstream that sends without a pause is stopped as well as one that is silent."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.post(gateway, OPENAI, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(FIRST_EVENT)

    async def talk() -> None:
        while not exchange.aborted:
            exchange.event(chunk({"content": "x" * 500}))
            await asyncio.sleep(0)

    talking = asyncio.ensure_future(talk())
    await client.read_head()
    await client.read_event()
    left_at = time.monotonic()
    client.leave(how)
    await closed_promptly(exchange, left_at)
    await talking
    await rig.check_usable(gateway, upstream)


async def test_leaving_in_a_whole_answer(rig: Rig, process: bool) -> None:
    """The same in the middle of an answer that is not streamed."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.post(gateway, OPENAI, 1)
    exchange = await upstream.exchange(0)
    exchange.write(whole(WHOLE)[:-10])
    await client.read_head()

    left_at = time.monotonic()
    client.reset()
    await closed_promptly(exchange, left_at)
    await rig.check_usable(gateway, upstream)


async def test_half_closing_with_an_answer_in_the_buffer(rig: Rig) -> None:
    """A client that reads no more and then half-closes has left, even if bytes for it are still in the buffers."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, server={"response_buffer_bytes": 32 << 20})
    client = await rig.client(gateway, receive_buffer=4096)
    await client.post(OPENAI.path, OPENAI.body(1, stream=True))
    exchange = await upstream.exchange(0)
    exchange.begin_stream(*[chunk({"content": "x" * 100000})] * 80)
    await eventually(lambda: exchange.connection.transport.get_write_buffer_size() == 0)
    await client.read_head()

    client.half_close()
    # The transport cannot say that it is closing before it has flushed its buffer, so the next event has to notice.
    await eventually(lambda: exchange.event(FIRST_EVENT) or exchange.aborted, what="the upstream sees the close")


async def test_leaving_while_the_upstream_is_connected_to(rig: Rig, surface: Surface) -> None:
    """A client that leaves before there is a connection to the upstream gives its slot back; a late one is dropped."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    loop = asyncio.get_running_loop()
    connecting, go_on = asyncio.Event(), asyncio.Event()
    real = loop.create_connection

    async def create_connection(*arguments: object, **more: object) -> object:
        connecting.set()
        await go_on.wait()
        return await real(*arguments, **more)  # type: ignore[arg-type]

    loop.create_connection = create_connection  # type: ignore[method-assign]
    try:
        client = await rig.post(gateway, surface, 1)
        await connecting.wait()
        (second,) = await rig.queued(gateway, surface, [2])
        client.reset()
        await gateway.waiting(0)
        go_on.set()
        (await upstream.exchange(0)).answer()
    finally:
        del loop.create_connection  # type: ignore[method-assign]
    assert (await second.response()).status == 200
    assert upstream.tags == [2]


async def test_two_hundred_leave_while_connections_are_made(rig: Rig) -> None:
    """R19: clients that leave at any moment of the connecting leave neither slots nor connections behind."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=7, queue_limit=100)
    for number in range(200):
        client = await rig.post(gateway, OPENAI, number)
        for _ in range(number % 12):
            await asyncio.sleep(0)
        client.reset()
    await gateway.settled()
    await eventually(lambda: upstream.in_flight == 0)
    await eventually(lambda: upstream.open_connections == [])
    await rig.check_usable(gateway, upstream)


@pytest.mark.parametrize(("process", "how"), WAYS_AND_ONE_DAEMON)
async def test_leaving_within_the_request(rig: Rig, surface: Surface, process: bool, how: str) -> None:
    """Half a request is no request: it takes no slot and the upstream does not hear of it."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.client(gateway)
    await client.send(request_bytes("POST", surface.path, surface.body(1, padding=100000))[:-1])
    client.leave(how)

    await gateway.record(outcome="client_gone")
    assert (await rig.ask(gateway, surface, 2)).status == 200
    assert upstream.tags == [2]


@everywhere
async def test_leaving_after_the_answer_is_no_departure(rig: Rig, surface: Surface, process: bool) -> None:
    """A client that closes as soon as it has its answer is one that has been served."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=process)
    for tag in range(20):
        await rig.ask(gateway, surface, tag, stream=True)
    await eventually(lambda: len(gateway.records) == 20)
    assert {"completed"} == {record["outcome"] for record in gateway.records}


async def test_two_hundred_departures(rig: Rig) -> None:
    """R07: after many departures of all kinds the process has no socket and no slot more than before."""
    upstream = await rig.upstream()
    gateway = await rig.daemon(upstream, cap=4, queue_limit=200)
    # The event loop opens a file of its own for its first connection.
    assert (await gateway.admin("/livez")).status == 200
    before = gateway.open_files
    clients = [await rig.post(gateway, OPENAI, tag, stream=True) for tag in range(200)]
    await gateway.waiting(196)
    for exchange in upstream.exchanges:
        exchange.begin_stream(FIRST_EVENT)
    for number, client in enumerate(reversed(clients)):
        client.leave(WAYS[number % 3])
    await gateway.settled()
    for client in clients:
        client.close()

    await eventually(lambda: gateway.open_files <= before, what=lambda: f"{gateway.open_files} <= {before} descriptors")
    await eventually(lambda: not close_wait(gateway), what=lambda: f"{close_wait(gateway)} closed")
    assert upstream.peak == 4
    await rig.check_usable(gateway, upstream)


def close_wait(gateway: Daemon) -> list[str]:
    """The sockets of the daemon that their peers have closed and it has not."""
    inodes = set()
    for number in os.listdir(f"/proc/{gateway.pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{gateway.pid}/fd/{number}"))
        except OSError:
            continue
    with open(f"/proc/{gateway.pid}/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return [" ".join(row[:4]) for row in rows if row[3] == "08" and f"socket:[{row[9]}]" in inodes]


async def test_a_client_that_closes_at_the_last_event(rig: Rig, surface: Surface, process: bool) -> None:
    """The engine has said that it is done, so there is nothing to settle: the slot is the next one's at once."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, abort_settle_seconds=60, process=process)
    client = await rig.post(gateway, surface, 1, stream=True)
    exchange = await upstream.tagged(1)
    waiting = await rig.post(gateway, surface, 2)
    await gateway.waiting(1)
    exchange.begin_stream(*STREAM)
    response = await client.read_head()
    assert response.status == 200
    while not surface.says_end(response):
        response.body += await client.read_chunk()
    client.close()
    (await upstream.tagged(2)).answer()
    assert (await waiting.response()).status == 200
