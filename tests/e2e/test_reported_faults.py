"""Faults that others have reported of proxies like this one, as small tests: those that no other test is about.

The ids are those of section 4 of the notes on reliability; tests/test_fault_log.py says which test holds which.
"""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rig import (
    ANTHROPIC,
    FIRST_EVENT,
    OPENAI,
    STREAM,
    SURFACES,
    Daemon,
    Exchange,
    Rig,
    Surface,
    answer,
    chunk,
    eventually,
    resident_bytes,
    upstream_table,
    vllm_error,
)

# -- clients that leave ---------------------------------------------------------------------------------------------


async def test_resets_between_the_request_and_the_head(rig: Rig) -> None:
    """R04: each is one line that says who left, and none is an error."""
    upstream = await rig.upstream()
    gateway = await rig.daemon(upstream, cap=7)
    for number in range(100):
        client = await rig.post(gateway, SURFACES[number % 2], number, stream=number % 4 < 2)
        await upstream.exchange(number)
        client.reset()
    await eventually(lambda: len(gateway.records) == 100)
    assert {"client_gone"} == {record["outcome"] for record in gateway.records}
    assert 100 == await gateway.metric(
        "aiogw_requests_total", surface="openai", upstream="reasoning", outcome="client_gone"
    ) + await gateway.metric("aiogw_requests_total", surface="anthropic", upstream="reasoning", outcome="client_gone")
    await rig.check_usable(gateway, upstream)


async def test_a_client_that_sends_again(rig: Rig, surface: Surface, process: bool) -> None:
    """R32: one that gives up and sends the same again does not queue behind its own abandoned copy."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process, cap=1)
    client = await rig.post(gateway, surface, 0, stream=True)
    for attempt in range(4):
        exchange = await upstream.exchange(attempt)
        assert upstream.exchanges[:attempt] == upstream.aborted
        client.close()
        client = await rig.post(gateway, surface, 0, stream=True)
        await eventually(lambda exchange=exchange: exchange.aborted)
    (await upstream.exchange(4)).respond(stream=True)
    assert (await client.response()).status == 200
    assert upstream.peak == 1


# -- slots ----------------------------------------------------------------------------------------------------------

ROUTES: list[tuple[str, dict[str, Any], bool]] = [
    (OPENAI.path, {"messages": [{"role": "user", "content": "x"}]}, True),
    ("/v1/completions", {"prompt": "x"}, True),
    ("/v1/responses", {"input": "x"}, True),
    ("/v1/embeddings", {"input": "x"}, False),
    (ANTHROPIC.path, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}, True),
]


@pytest.mark.parametrize(
    ("path", "members", "stream"),
    [(path, members, stream) for path, members, streams in ROUTES for stream in ((False, True)[: 1 + streams])],
)
async def test_every_end_on_every_route(rig: Rig, path: str, members: dict[str, Any], stream: bool) -> None:
    """R15: answered, left and broken off, three times as often as there are slots: each gives its slot back."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=2)
    body = OPENAI.body(stream=stream, **members) if stream else OPENAI.body(**members)

    def broken(exchange: Exchange) -> None:
        exchange.write(b"HTTP/1.1 2")  # else it would be sent again: the connection had been kept
        exchange.close()

    ends: list[Callable[[Exchange], None]] = [lambda exchange: exchange.respond(stream=stream), broken]
    for number in range(6):
        for end in (*ends, None):
            before = len(upstream.exchanges)
            client = await rig.client(gateway)
            await client.post(path, body)
            exchange = await upstream.exchange(before)
            if end is None:
                client.leave(("fin", "rst")[number % 2])
                await eventually(lambda exchange=exchange: exchange.aborted)
            else:
                end(exchange)
                await client.response()
    await gateway.settled()
    await rig.check_usable(gateway, upstream)


async def test_a_slot_is_free_before_anything_is_written_down(rig: Rig) -> None:
    """R18: when a request comes to its line in the log, the next one is already on the wire."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=1)
    first = await rig.post(gateway, OPENAI, 1)
    await upstream.exchange(0)
    await rig.queued(gateway, OPENAI, [2])
    seen: list[bytes] = []

    class Sink(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            sock = upstream.connections[0].transport.get_extra_info("socket")
            with socket.socket(fileno=os.dup(sock.fileno())) as twin:
                seen.append(twin.recv(4, socket.MSG_PEEK | socket.MSG_DONTWAIT))

    sink = Sink()
    log = logging.getLogger("aiogw.access")
    log.addHandler(sink)
    try:
        upstream.exchanges[0].answer()
        # Nobody else runs until the line is written: what the upstream has not read yet is still there to be seen.
        upstream.connections[0].transport.pause_reading()
        await eventually(lambda: seen)
    finally:
        log.removeHandler(sink)
        upstream.connections[0].transport.resume_reading()
    assert seen == [b"POST"]
    assert (await first.response()).status == 200
    (await upstream.exchange(1)).answer()


async def test_refused_with_a_large_body(rig: Rig, surface: Surface) -> None:
    """R25: who finds the queue full is refused whatever the size, without the upstream and without a wait."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=1, queue_limit=0)
    await rig.post(gateway, OPENAI, 1)
    exchange = await upstream.exchange(0)
    response = await rig.ask(gateway, surface, 2, padding=3 << 20)
    assert response.status == 503
    assert surface.error(response)
    assert upstream.tags == [1]
    exchange.answer()


async def test_slots_die_with_their_process(rig: Rig) -> None:
    """R26: permits are in memory and nowhere else; a gateway that was killed leaves none behind for its successor."""
    upstream = await rig.upstream()
    gateway = await rig.daemon(upstream, cap=5)
    for tag in range(5):
        await rig.post(gateway, OPENAI, tag)
    await upstream.exchange(4)
    gateway.signal(signal.SIGKILL)
    assert await gateway.exit_code() == -signal.SIGKILL
    rig.forget(gateway)
    await eventually(lambda: len(upstream.aborted) == 5)
    await rig.check_usable(await rig.daemon(upstream, cap=5), upstream)


async def test_nothing_else_is_limited(rig: Rig) -> None:
    """R24, R53: with slots and queue full, lists of models, probes and metrics are served to fifty at once."""
    upstream = await rig.upstream()
    gateway = await rig.daemon(upstream, cap=1, queue_limit=1)
    await rig.post(gateway, OPENAI, 1)
    exchange = await upstream.exchange(0)
    await rig.queued(gateway, OPENAI, [2])

    async def models(number: int) -> int:
        client = await rig.client(gateway)
        await client.request("GET", (OPENAI, ANTHROPIC)[number % 2].models_path)
        return (await client.response()).status

    async def admin(number: int) -> int:
        return (await gateway.admin(("/livez", "/readyz", "/metrics")[number % 3])).status

    statuses = await asyncio.gather(*(each(number) for number in range(50) for each in (models, admin)))
    assert {200} == set(statuses)
    exchange.answer()
    (await upstream.exchange(1)).answer()


PACKAGE = Path(__file__).parents[2] / "aiogw"


# The live view's, whose caller closes it (contextlib.aclosing), and that of ``aiogw top``, which does nothing else.
CLOSED_BY_WHO_ITERATES = {"events", "follow"}


def test_nothing_outlives_its_request() -> None:
    """R21, R23: nothing is shielded from a cancellation, and no generator is left for somebody else to finish."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Attribute) and node.attr == "shield"), path
            if isinstance(node, ast.AsyncFunctionDef) and node.name not in CLOSED_BY_WHO_ITERATES:
                assert not any(isinstance(inner, ast.Yield) for inner in ast.walk(node)), f"{path}: {node.name}"


# -- time and size --------------------------------------------------------------------------------------------------


async def test_a_long_upload(rig: Rig, surface: Surface) -> None:
    """R28: the upstream's time-outs do not run while a client sends."""
    upstream = await rig.upstream(answer)
    limits = {f"{name}_timeout_seconds": 0.1 for name in ("first_byte", "idle")}
    gateway = await rig.gateway(upstream, **limits)
    client = await rig.client(gateway)
    body = surface.body(1, padding=100_000)
    await client.send(f"POST {surface.path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode())
    for start in range(0, len(body), 10_000):
        await client.send(body[start : start + 10_000])
        await asyncio.sleep(0.03)  # together three times what the upstream has
    assert (await client.response()).status == 200


async def test_a_long_stream_is_not_kept(rig: Rig) -> None:
    """R41: of fifty megabytes that pass, none stay."""
    upstream = await rig.upstream()
    gateway = await rig.daemon(upstream)
    event = chunk({"content": "x" * 100_000})
    client = await rig.post(gateway, OPENAI, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(FIRST_EVENT)
    head = await client.read_head()
    assert head.status == 200
    before = resident_bytes(gateway, peak=True)

    async def talk() -> None:
        for _ in range(500):
            exchange.event(event)
            await eventually(lambda: exchange.connection.transport.get_write_buffer_size() < 1 << 20)
        exchange.end_stream(*STREAM[3:])

    talking = asyncio.ensure_future(talk())
    size = 0
    while data := await client.read_chunk():
        size += len(data)
    await talking
    assert size == 500 * len(event) + sum(map(len, (FIRST_EVENT, *STREAM[3:])))
    assert resident_bytes(gateway, peak=True) - before < 16 << 20


async def test_fields_of_browsers(rig: Rig, process: bool) -> None:
    """R66: nine kilobytes of cookies pass; what is larger than anybody needs is refused, and is nobody's error."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=process)
    fields = [f"x-field-{number}: {number}" for number in range(50)]
    for large in ("cookie: " + "c" * 9000, "x-unknown: " + "u" * 9000):
        assert (await rig.ask(gateway, OPENAI, 1, large, *fields)).status == 200
    client = await rig.client(gateway)
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncookie: " + b"c" * 100_000 + b"\r\n\r\n")
    response = await client.response()
    assert 400 <= response.status < 500
    assert await client.ended()
    assert len(upstream.exchanges) == 2


# -- where a request goes -------------------------------------------------------------------------------------------


async def test_the_environment_leads_nowhere(
    rig: Rig, surface: Surface, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """R37: neither a proxy nor a .netrc of the environment changes where a request goes or what it carries."""
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    netrc = tmp_path / "netrc"
    netrc.write_text("default login somebody password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    upstream = await rig.upstream(answer)
    response = await rig.ask(await rig.daemon(upstream), surface, 1)
    assert response.status == 200
    assert upstream.exchanges[0].request.header("authorization") is None


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_a_refusal_is_not_tried_again(rig: Rig, surface: Surface, status: int) -> None:
    """R52: the gateway adds no retries to those of its clients: each request is one at the upstream."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(vllm_error("no", status), status=status))
    gateway = await rig.gateway(upstream)
    for tag in range(5):
        assert (await rig.ask(gateway, surface, tag)).status >= 400
    assert upstream.tags == [0, 1, 2, 3, 4]


async def test_a_slow_name_server_holds_up_nobody_else(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """R62: while a name is looked up, requests for another upstream are served."""
    answered = threading.Event()
    asked = threading.Event()
    real = socket.getaddrinfo

    def look_up(host: str, *arguments: Any, **more: Any) -> Any:
        if host != "slow.test":
            return real(host, *arguments, **more)
        asked.set()
        answered.wait(8)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    upstream = await rig.upstream(answer)
    others = {"slow": upstream_table("http://slow.test:80", models=["slow"], connect_timeout_seconds=8)}
    gateway = await rig.gateway(upstream, others=others)
    waiting = await rig.post(gateway, OPENAI, 1, model="slow")
    await eventually(asked.is_set)
    try:
        for tag in range(5):
            assert (await rig.ask(gateway, OPENAI, tag)).status == 200
        assert waiting.quiet()
    finally:
        answered.set()
    assert (await waiting.response()).status == 503


# -- running it -----------------------------------------------------------------------------------------------------


def children(gateway: Daemon) -> str:
    return Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children").read_text()


async def test_one_process(rig: Rig) -> None:
    """R59: metrics are those of the whole gateway, because it is one process without children."""
    upstream = await rig.upstream(answer)
    gateway = await rig.daemon(upstream, cap=3, queue_limit=20)
    await asyncio.gather(*(rig.ask(gateway, OPENAI, tag) for tag in range(20)))
    assert children(gateway) == ""
    counted = await gateway.metric("aiogw_requests_total", surface="openai", upstream="reasoning", outcome="completed")
    assert counted == 20


async def test_clients_make_no_series(rig: Rig) -> None:
    """R60: whatever models, paths and ids they make up, the labels are ours; a departure is an outcome of its own."""
    upstream = await rig.upstream()
    gateway = await rig.daemon(upstream, cap=2)

    async def provoke(number: int) -> None:
        for surface in SURFACES[:2]:
            await rig.ask(gateway, surface, number, f"x-request-id: id-{number}", model=f"model-{number}")
        client = await rig.client(gateway)
        await client.post(f"/v1/path-{number}", b"{}", f"user-agent: agent/{number}")
        await client.response()

    async def leave() -> None:
        client = await rig.post(gateway, OPENAI, 1)
        await upstream.exchange(len(upstream.exchanges))
        client.close()
        await gateway.settled()

    await provoke(0)
    await leave()
    before = set(await gateway.metrics())
    await asyncio.gather(*(provoke(number) for number in range(1, 300)))
    await leave()
    assert before == set(await gateway.metrics())
    outcome = {"surface": "openai", "upstream": "reasoning", "outcome": "client_gone"}
    assert 2 == await gateway.metric("aiogw_requests_total", **outcome)
