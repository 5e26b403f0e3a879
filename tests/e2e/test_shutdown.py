"""SIGTERM: stop accepting, refuse who waits, let who runs finish within a limit, end the rest in-band, exit 0."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest
from rig import (
    FIRST_EVENT,
    OPENAI,
    PATIENCE_SECONDS,
    STREAM,
    SURFACES,
    Daemon,
    Rig,
    Surface,
    configuration,
    eventually,
    request_bytes,
    upstream_table,
)


async def draining(daemon: Daemon) -> None:
    """Wait until the daemon says that it drains."""

    async def not_ready() -> bool:
        response = await daemon.admin("/readyz")
        return (response.status, response.body) == (503, b"draining\n")

    await eventually(not_ready, what="/readyz is 503")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_daemon_stops_at_once(rig: Rig, number: int) -> None:
    """R55: with nothing to do it exits with 0, promptly, also with idle connections on both sides."""
    upstream = await rig.upstream(lambda exchange: exchange.answer())
    daemon = await rig.daemon(upstream, server={"drain_timeout_seconds": 60})
    client = await rig.post(daemon, OPENAI)
    await client.response()
    silent = await rig.client(daemon)
    assert (await daemon.admin("/readyz")).status == 200
    assert (await daemon.admin("/livez")).status == 200

    signalled_at = time.monotonic()
    daemon.signal(number)
    assert await daemon.exit_code() == 0
    assert time.monotonic() - signalled_at < 3
    assert await client.ended()
    assert await silent.ended()


async def test_stopping_with_requests_queued_and_in_flight(rig: Rig) -> None:
    """R69: queued requests are refused at once with a time to come back, running ones finish, nothing else starts."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, cap=2)
    whole = await rig.post(daemon, OPENAI, 1)
    await upstream.exchange(0)
    streamed = await rig.post(daemon, SURFACES[1], 2, stream=True)
    exchange = await upstream.exchange(1)
    exchange.begin_stream(*STREAM[:2])
    head = await streamed.read_head()
    head.body = await streamed.read_event()
    waiting = []
    for number, tag in enumerate((3, 4, 5, 6)):
        waiting.append((SURFACES[tag % 2], await rig.post(daemon, SURFACES[tag % 2], tag)))
        await daemon.waiting(number + 1)
    idle = await rig.client(daemon)
    await idle.request("GET", "/v1/models")
    await idle.response()

    daemon.signal(signal.SIGTERM)
    for surface, client in waiting:
        response = await client.response()
        assert response.status == 503
        assert "shutting down" in surface.error(response)["message"]
        assert surface.code(response) in ("draining", None)
        assert 1 <= int(response.header("retry-after") or 0) <= 60
        assert response.header("x-should-retry") == "true"
        assert response.header("connection") == "close"
    await draining(daemon)
    assert (await daemon.admin("/livez")).status == 200
    assert await daemon.metric("aiogw_draining") == 1
    with pytest.raises(ConnectionRefusedError):
        await rig.client(daemon)
    # A connection that was there before may still ask, and is told to go elsewhere.
    await idle.post(OPENAI.path, OPENAI.body(7))
    response = await idle.response()
    assert (response.status, OPENAI.code(response)) == (503, "draining")
    assert response.header("connection") == "close"
    assert await idle.ended()

    assert daemon.running
    upstream.exchanges[0].answer()
    response = await whole.response()
    assert (response.status, response.complete) == (200, True)
    assert response.header("connection") == "close"
    exchange.end_stream(*STREAM[2:])
    await streamed.read_body(head)
    assert head.complete
    assert SURFACES[1].text(head) == "Hello world"
    assert await daemon.exit_code() == 0
    assert upstream.tags == [1, 2]
    assert upstream.aborted == []
    outcomes = sorted(record["outcome"] for record in daemon.records if record["method"] == "POST")
    assert outcomes == ["completed"] * 2 + ["draining"] * 5


async def test_the_drain_has_a_limit(rig: Rig, surface: Surface) -> None:
    """R57: what runs after drain_timeout_seconds is aborted upstream and ended for its client as well as can be."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, cap=2, server={"drain_timeout_seconds": 0.3})
    streamed = await rig.post(daemon, surface, 1, stream=True)
    (await upstream.exchange(0)).begin_stream(*STREAM[:2])
    response = await streamed.read_head()
    response.body = await streamed.read_event()
    silent = await rig.post(daemon, surface, 2)
    await upstream.exchange(1)

    signalled_at = time.monotonic()
    daemon.signal(signal.SIGTERM)
    await streamed.read_body(response)
    assert response.complete
    error = surface.in_band_error(response)
    assert error is not None
    assert "shutting down" in error["message"]
    assert not surface.says_end(response)
    refused = await silent.response()
    assert refused.status == 503
    assert "shutting down" in surface.error(refused)["message"]
    assert await daemon.exit_code() == 0
    assert 0.25 < time.monotonic() - signalled_at < 3
    assert len(upstream.aborted) == 2


async def test_a_second_signal_ends_it_at_once(rig: Rig, surface: Surface) -> None:
    """Whoever asks twice does not want to wait: running requests are cut short, in-band, and the exit code is 0."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, server={"drain_timeout_seconds": 600})
    client = await rig.post(daemon, surface, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(FIRST_EVENT, STREAM[1])
    response = await client.read_head()
    response.body = await client.read_event()

    daemon.signal(signal.SIGTERM)
    await draining(daemon)
    signalled_at = time.monotonic()
    daemon.signal(signal.SIGINT)
    await client.read_body(response)
    assert response.complete
    assert surface.in_band_error(response) is not None
    assert await daemon.exit_code() == 0
    assert time.monotonic() - signalled_at < 3
    assert exchange.aborted


async def test_a_client_that_reads_nothing_does_not_hold_up_the_stop(rig: Rig) -> None:
    """Neither a client that does not take its answer nor one within its request keeps the daemon from stopping."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, server={"drain_timeout_seconds": 0.3, "client_stall_timeout_seconds": 600})
    stuck = await rig.client(daemon, receive_buffer=4096)
    await stuck.post(OPENAI.path, OPENAI.body(1, stream=True))
    exchange = await upstream.exchange(0)
    exchange.begin_stream(*[STREAM[1] * 1000] * 200)
    talking = await rig.client(daemon)
    await talking.send(request_bytes("POST", OPENAI.path, OPENAI.body(2, padding=100000))[:-1])

    daemon.signal(signal.SIGTERM)
    assert await daemon.exit_code(5) == 0
    assert exchange.aborted


async def test_a_departure_during_the_drain(rig: Rig) -> None:
    """R21: when the last running client leaves during the drain, the daemon waits for nobody any more."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, server={"drain_timeout_seconds": 600})
    client = await rig.post(daemon, OPENAI, 1)
    exchange = await upstream.exchange(0)
    daemon.signal(signal.SIGTERM)
    await draining(daemon)
    client.reset()
    assert await daemon.exit_code() == 0
    assert exchange.aborted


async def test_a_stop_right_behind_many_departures(rig: Rig) -> None:
    """R69: handlers that are cancelled just when the process stops hold nothing up, and nothing is told of them."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, cap=10, engine_slots=11, queue_limit=10, server={"drain_timeout_seconds": 600})
    clients = [await rig.post(daemon, OPENAI, tag, stream=tag % 2 == 0) for tag in range(20)]
    await daemon.waiting(10)
    for client in clients:
        client.reset()
    daemon.signal(signal.SIGTERM)
    signalled_at = time.monotonic()
    assert await daemon.exit_code() == 0
    assert time.monotonic() - signalled_at < 2
    await eventually(lambda: len(upstream.aborted) == len(upstream.exchanges))


async def test_the_drain_says_what_it_does(rig: Rig) -> None:
    """The log has a line when the drain begins, when it is cut short and when it is over."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream)
    await rig.post(daemon, OPENAI, 1)
    await upstream.exchange(0)
    daemon.signal(signal.SIGTERM)
    await draining(daemon)
    daemon.signal(signal.SIGTERM)
    assert await daemon.exit_code() == 0
    told = "\n".join(daemon.lines)
    for phrase in ("draining for at most 5 s", "stopping at once", '"message":"stopped"'):
        assert phrase in told


def has_begun(pid: int) -> bool:
    """Whether the process has loaded its event loop, the first thing it does after reading its configuration."""
    return "uvloop" in Path(f"/proc/{pid}/maps").read_text()


async def test_a_signal_at_any_time_of_the_start(rig: Rig) -> None:
    """R69: whenever it comes, the process ends in order, or by the signal while nothing runs that could take it."""
    upstream = await rig.upstream()
    began_at = time.monotonic()
    daemon = await rig.daemon(upstream)
    start_seconds = time.monotonic() - began_at
    path = rig.config_file(configuration({"reasoning": upstream_table(upstream.url)}))
    command = (sys.executable, "-m", "aiogw", "--config", str(path))
    codes = []
    for step in range(24):
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        await asyncio.sleep(start_seconds * step / 20)  # as far as this start gets
        begun = has_begun(process.pid)
        process.terminate()
        _, told = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
        assert b"Traceback" not in told, told.decode()
        assert process.returncode in ((0,) if begun else (0, -signal.SIGTERM)), (step, told.decode())
        assert process.returncode == 0 or told == b""
        codes.append(process.returncode)
    assert 0 == codes[-1]
    assert daemon.running
