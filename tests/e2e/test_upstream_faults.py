"""Upstreams that fail: each failure is told to the client in its surface's form, and gives the slot back once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rig import (
    ANTHROPIC,
    DONE,
    FIRST_EVENT,
    LAST_CHUNK,
    OPENAI,
    PLACES,
    STREAM,
    STREAM_HEAD,
    TEXT,
    WHOLE,
    Exchange,
    Rig,
    RunningGateway,
    Surface,
    eventually,
    everywhere,
    everywhere_both_ways,
    framed,
    head,
    vllm_error,
    whole,
)


async def outcome(gateway: RunningGateway, code: str, status: int) -> None:
    record = await gateway.record(outcome=code)
    assert status == record["status"]


# -- before the first byte: a status can still be said --------------------------------------------------------------


@everywhere_both_ways
async def test_nobody_listens(rig: Rig, surface: Surface, stream: bool, process: bool) -> None:
    """A refused connection is a 503 that says so and when to come back, and not a bad gateway."""
    with closed_port() as url:
        gateway = await rig.gateway(url, process=process)
        response = await rig.ask(gateway, surface, stream=stream)

        assert response.status == 503
        assert "connection refused" in surface.error(response)["message"]
        assert 1 <= int(response.header("retry-after") or 0) <= 60
        assert response.header("x-should-retry") == "true"
        assert surface.code(response) in ("upstream_unavailable", None)
        await outcome(gateway, "upstream_unavailable", 503)


async def test_the_name_does_not_resolve(rig: Rig, surface: Surface, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upstream whose name is unknown is unavailable; the address is not told to the client."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *arguments: object, **more: object) -> object:
        if host == "nowhere.test":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    gateway = await rig.gateway("http://nowhere.test:8000")
    response = await rig.ask(gateway, surface)

    assert response.status == 503
    message = surface.error(response)["message"]
    assert "cannot be resolved" in message
    assert "nowhere" not in message


async def test_no_connection_in_time(rig: Rig, surface: Surface) -> None:
    """A connection that is not made within connect_timeout_seconds is given up: unavailable, and the limit is named."""
    with full_backlog() as url:
        gateway = await rig.gateway(url, connect_timeout_seconds=0.2)
        response = await rig.ask(gateway, surface)

        assert response.status == 503
        assert "no connection within 0.2 s" in surface.error(response)["message"]
        await outcome(gateway, "upstream_unavailable", 503)


def reset(exchange: Exchange) -> None:
    exchange.reset()


def close(exchange: Exchange) -> None:
    exchange.close()


def half_close(exchange: Exchange) -> None:
    exchange.half_close()


def cut_in_head(exchange: Exchange) -> None:
    exchange.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/js")
    exchange.close()


def only_interim(exchange: Exchange) -> None:
    exchange.write(b"HTTP/1.1 102 Processing\r\n\r\n")
    exchange.close()


def not_http(exchange: Exchange) -> None:
    exchange.finish(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")


def endless_head(exchange: Exchange) -> None:
    exchange.finish(b"HTTP/1.1 200 OK\r\n" + b"x-filler: %s\r\n" % (b"x" * 1000) * 80)


def two_framings(exchange: Exchange) -> None:
    exchange.finish(head(200, "content-length: 5", "transfer-encoding: chunked") + b"0\r\n\r\n")


@pytest.mark.parametrize(
    "fault", [reset, close, half_close, cut_in_head, only_interim, not_http, endless_head, two_framings]
)
async def test_broken_before_the_answer(
    rig: Rig, surface: Surface, stream: bool, fault: Callable[[Exchange], None]
) -> None:
    """A connection that breaks, or an answer that is none, before anything could be passed on is a plain 502."""
    upstream = await rig.upstream(fault)
    gateway = await rig.gateway(upstream)
    response = await rig.ask(gateway, surface, stream=stream)

    assert response.status == 502
    assert "broke off" in surface.error(response)["message"]
    assert response.header("x-should-retry") == "true"
    assert surface.code(response) in ("upstream_broken", None)
    await outcome(gateway, "upstream_broken", 502)
    # It was sent once and no more: the connection was a fresh one.
    assert upstream.tags == [0]
    await rig.check_usable(gateway, upstream)


async def test_broken_before_the_answer_of_the_daemon(rig: Rig, surface: Surface) -> None:
    """The same through the real process."""
    upstream = await rig.upstream(reset)
    gateway = await rig.daemon(upstream)
    response = await rig.ask(gateway, surface)

    assert response.status == 502
    await rig.check_usable(gateway, upstream)


@everywhere_both_ways
async def test_silent_from_the_start(rig: Rig, surface: Surface, stream: bool, process: bool) -> None:
    """An upstream that says nothing for first_byte_timeout_seconds is let go with a 504; it sees the close."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, first_byte_timeout_seconds=0.2, process=process)
    response = await rig.ask(gateway, surface, stream=stream)

    assert response.status == 504
    message = surface.error(response)["message"]
    assert "silent for 0.2 s" in message
    assert "first byte" in message
    assert surface.code(response) in ("upstream_timeout", None)
    await outcome(gateway, "upstream_timeout", 504)
    (exchange,) = upstream.exchanges
    assert exchange.aborted
    await rig.check_usable(gateway, upstream)


@pytest.mark.parametrize("begun", [False, True])
async def test_an_answer_in_time_counts_though_it_is_read_late(rig: Rig, begun: bool) -> None:
    """A gateway that stood still past the time-out takes what has come meanwhile: the silence was its own."""
    upstream = await rig.upstream()
    gateway = await rig.daemon(upstream, first_byte_timeout_seconds=0.2, idle_timeout_seconds=0.2)
    client = await rig.post(gateway, OPENAI, stream=True)
    exchange = await upstream.exchange(0)
    if begun:
        exchange.begin_stream(FIRST_EVENT)
        await client.read_head()
    gateway.signal(signal.SIGSTOP)
    stat = Path(f"/proc/{gateway.pid}/stat")
    await eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    if not begun:
        exchange.begin_stream(FIRST_EVENT)
    exchange.end_stream(DONE)
    await asyncio.sleep(0.4)  # twice the limit: the time-out is due before the answer is read
    gateway.signal(signal.SIGCONT)

    await gateway.record(outcome="completed")
    await rig.check_usable(gateway, upstream)


@pytest.mark.parametrize("start", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-"])
async def test_silent_within_the_head(rig: Rig, start: bytes) -> None:
    """An interim answer or half a head is not the first byte of an answer, and buys no time."""
    upstream = await rig.upstream(lambda exchange: exchange.write(start))
    gateway = await rig.gateway(upstream, first_byte_timeout_seconds=0.2)
    response = await rig.ask(gateway, OPENAI)

    assert response.status == 504


@everywhere
async def test_a_long_prefill_behind_the_head(rig: Rig, surface: Surface, process: bool) -> None:
    """vLLM sends the head of a stream before the prompt is read: the first event has the time of the first byte."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, first_byte_timeout_seconds=30, idle_timeout_seconds=0.2, process=process)
    client = await rig.post(gateway, surface, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream()
    await asyncio.sleep(0.6)  # three times the limit for what comes after the first byte
    exchange.end_stream(*STREAM)
    response = await client.response()

    assert (200, True) == (response.status, response.complete)
    assert TEXT == surface.text(response)
    record = await gateway.record(outcome="completed")
    assert record["first_byte_seconds"] >= 0.5


@everywhere
async def test_silent_behind_the_head(rig: Rig, surface: Surface, process: bool) -> None:
    """A head without an event is let go after first_byte_timeout_seconds, and the client hears which limit it was."""
    upstream = await rig.upstream(Exchange.begin_stream)
    gateway = await rig.gateway(upstream, first_byte_timeout_seconds=0.3, idle_timeout_seconds=30, process=process)
    response = await rig.ask(gateway, surface, stream=True)

    error = surface.in_band_error(response) if response.status == 200 else surface.error(response)
    assert error is not None
    assert "silent for 0.3 s" in error["message"]
    assert "first byte" in error["message"]
    await gateway.record(outcome="upstream_timeout")
    (exchange,) = upstream.exchanges
    assert exchange.aborted
    await rig.check_usable(gateway, upstream)


async def test_the_time_in_the_queue_is_not_the_upstreams(rig: Rig) -> None:
    """R29: the upstream's time starts with the grant: a wait longer than its limit takes nothing from it."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, first_byte_timeout_seconds=0.4)
    first = await rig.post(gateway, OPENAI, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(FIRST_EVENT)
    (second,) = await rig.queued(gateway, OPENAI, [2])
    await asyncio.sleep(0.6)  # the wait itself is what is tested
    exchange.end_stream()
    assert (await first.response()).status == 200
    (await upstream.exchange(1)).answer()
    assert (await second.response()).status == 200


@pytest.mark.parametrize(
    ("said", "body", "expected", "message"),
    [
        (400, vllm_error("This model's maximum context length is 64 tokens.", 400), 400, "maximum context length"),
        (404, vllm_error("The model `reasoning` does not exist.", 404), 404, "reasoning"),
        # The path was ours and not the client's: for the client it is a gateway that is set up wrongly.
        (404, b'{"detail":"Not Found"}', 502, "Not Found"),
        (405, b'{"detail":"Method Not Allowed"}', 502, "Method Not Allowed"),
        (422, vllm_error("temperature must be non-negative", 422), 422, "non-negative"),
        (429, vllm_error("slow down", 429), 429, "slow down"),
        (500, vllm_error("EngineCore died", 500), 500, "EngineCore died"),
        (503, vllm_error("loading", 503), 503, "loading"),
        (401, vllm_error("invalid api key sk-123", 401), 502, "the gateway's own credentials"),
        (403, b"", 502, "the gateway's own credentials"),
        (418, b"", 418, "418"),
        (500, b"<html><h1>Internal Server Error</h1></html>", 500, "status 500"),
        (500, b"", 500, "status 500"),
        (502, b'{"object":"error","message":"bad"}', 502, "bad"),
        (507, b'{"error":"full"}', 502, "full"),
    ],
)
async def test_the_upstream_refuses(
    rig: Rig, surface: Surface, said: int, body: bytes, expected: int, message: str
) -> None:
    """The upstream's own refusal comes with its status, where that would not mislead, and with its message."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(body, status=said))
    gateway = await rig.gateway(upstream)
    response = await rig.ask(gateway, surface, stream=True)

    if surface is ANTHROPIC and expected == 422:
        expected = 400  # the Messages API has no 422
    assert response.status == expected
    error = surface.error(response)
    assert message in error["message"]
    assert "sk-123" not in error["message"]
    record = await gateway.record(status=expected)
    assert record["outcome"] in ("upstream_error", "upstream_auth")
    await rig.check_usable(gateway, upstream)


async def test_a_refusal_says_when_to_come_back(rig: Rig, surface: Surface) -> None:
    """The upstream's Retry-After is passed on, bounded to what clients obey; a 503 always says when."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    for given, expected in (("7", "7"), ("3600", "60"), ("0", "1"), ("Fri, 01 Jan 2027 00:00:00 GMT", "5")):
        upstream.script = lambda exchange, given=given: exchange.answer(b"{}", f"retry-after: {given}", status=503)
        response = await rig.ask(gateway, surface)
        assert (503, expected) == (response.status, response.header("retry-after"))


async def test_a_refusal_keeps_the_upstreams_own_error_object(rig: Rig) -> None:
    """On /v1 the members of vLLM's error object are kept: type, param and code."""
    error = {"message": "bad n", "type": "BadRequestError", "param": "n", "code": 400, "extra": [1]}
    upstream = await rig.upstream(lambda exchange: exchange.answer(json.dumps({"error": error}).encode(), status=400))
    gateway = await rig.gateway(upstream)
    response = await rig.ask(gateway, OPENAI)

    assert error == response.json["error"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(rig: Rig, surface: Surface, status: int) -> None:
    """A redirect is a fault of the set-up; the request goes nowhere else, and the place is not told to the client."""
    elsewhere = await rig.upstream()
    upstream = await rig.upstream()
    upstream.script = lambda exchange: exchange.answer(b"", f"location: {elsewhere.url}/v1", status=status)
    gateway = await rig.gateway(upstream)
    response = await rig.ask(gateway, surface)

    assert response.status == 502
    surface.error(response)
    assert response.header("location") is None
    assert elsewhere.connections == []


@pytest.mark.parametrize("ending", [close, reset])
async def test_a_refusal_that_is_cut_short(rig: Rig, surface: Surface, ending: Callable[[Exchange], None]) -> None:
    """A refusal whose body does not end is still told, as a broken upstream."""

    def script(exchange: Exchange) -> None:
        exchange.write(head(400, "content-type: application/json", "content-length: 100") + b'{"error":')
        ending(exchange)

    upstream = await rig.upstream(script)
    gateway = await rig.gateway(upstream)
    response = await rig.ask(gateway, surface)

    assert response.status == 502
    surface.error(response)
    await rig.check_usable(gateway, upstream)


async def test_an_endless_refusal(rig: Rig, surface: Surface) -> None:
    """A refusal of unlimited length is read up to a limit and answered; the upstream is let go."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.post(gateway, surface)
    exchange = await upstream.exchange(0)
    exchange.write(head(500, "content-type: text/plain", "transfer-encoding: chunked"))
    for _ in range(20):
        exchange.write(framed(b"no" * 5000))
    response = await client.response()

    assert response.status == 500
    assert len(surface.error(response)["message"]) <= 2000
    assert exchange.aborted


# -- after the first byte: in-band, or the connection is broken off --------------------------------------------------


def begin(exchange: Exchange, *, stream: bool) -> None:
    """Begin an answer that is not complete."""
    if stream:
        exchange.begin_stream(STREAM[0], STREAM[1])
    else:
        exchange.write(whole(WHOLE)[:-10])


@pytest.mark.parametrize(
    ("surface", "process", "ending"),
    [(*place, ending) for place in PLACES for ending in (close, reset, half_close) if not place[1] or ending is reset],
)
async def test_broken_in_a_stream(
    rig: Rig, surface: Surface, process: bool, ending: Callable[[Exchange], None]
) -> None:
    """A stream that breaks off ends with an error event, in order, and never looks finished."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.post(gateway, surface, stream=True)
    exchange = await upstream.exchange(0)
    begin(exchange, stream=True)
    response = await client.read_head()
    response.body = await client.read_chunk()
    ending(exchange)
    await client.read_body(response)

    assert response.status == 200
    assert response.complete
    error = surface.in_band_error(response)
    assert error is not None
    assert "broke off" in error["message"]
    assert not surface.says_end(response)
    await outcome(gateway, "upstream_broken", 200)
    await rig.check_usable(gateway, upstream)


async def test_broken_within_an_event(rig: Rig, surface: Surface) -> None:
    """Half an event is dropped when the stream breaks off, so that the error is an event of its own."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.post(gateway, surface, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(STREAM[0], STREAM[1], STREAM[2][:-10])
    response = await client.read_head()
    response.body = await client.read_chunk()
    exchange.reset()
    await client.read_body(response)

    assert surface.in_band_error(response) is not None
    assert b"world" not in response.body
    assert b"Hello" in response.body


@pytest.mark.parametrize(("process", "ending"), [(False, close), (False, reset), (False, half_close), (True, reset)])
async def test_broken_in_a_whole_answer(rig: Rig, process: bool, ending: Callable[[Exchange], None]) -> None:
    """A whole answer that breaks off leaves its client with a broken connection, not with one that looks whole."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.post(gateway, OPENAI)
    exchange = await upstream.exchange(0)
    begin(exchange, stream=False)
    response = await client.read_head()
    ending(exchange)
    await client.read_body(response)

    assert not response.complete
    assert WHOLE[: len(response.body)] == response.body
    await outcome(gateway, "upstream_broken", 200)
    await rig.check_usable(gateway, upstream)


@pytest.mark.parametrize("ending", [close, reset])
async def test_broken_in_a_whole_answer_that_is_translated(rig: Rig, ending: Callable[[Exchange], None]) -> None:
    """Where the answer is translated as a whole, nothing has been said when it breaks off: a plain 502."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.post(gateway, ANTHROPIC)
    exchange = await upstream.exchange(0)
    begin(exchange, stream=False)
    ending(exchange)
    response = await client.response()

    assert response.status == 502
    ANTHROPIC.error(response)


@everywhere
async def test_silent_in_a_stream(rig: Rig, surface: Surface, process: bool) -> None:
    """A stream in which nothing comes for idle_timeout_seconds is ended in-band, and the upstream sees the close."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, idle_timeout_seconds=0.2, process=process)
    client = await rig.post(gateway, surface, stream=True)
    exchange = await upstream.exchange(0)
    begin(exchange, stream=True)
    response = await client.response()

    assert response.complete
    error = surface.in_band_error(response)
    assert error is not None
    assert "silent for 0.2 s" in error["message"]
    assert not surface.says_end(response)
    await outcome(gateway, "upstream_timeout", 200)
    assert exchange.aborted
    await rig.check_usable(gateway, upstream)


async def test_silent_in_a_whole_answer(rig: Rig) -> None:
    """A whole answer that stops in its middle is broken off after idle_timeout_seconds."""
    upstream = await rig.upstream(lambda exchange: begin(exchange, stream=False))
    gateway = await rig.gateway(upstream, idle_timeout_seconds=0.2)
    response = await rig.ask(gateway, OPENAI)

    assert not response.complete
    await outcome(gateway, "upstream_timeout", 200)
    await rig.check_usable(gateway, upstream)


async def test_a_slow_stream_is_not_a_silent_one(rig: Rig) -> None:
    """R27: time-outs count silence and not length: a stream that lasts three times its limits goes on to its end."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, idle_timeout_seconds=0.15, first_byte_timeout_seconds=0.15)
    client = await rig.post(gateway, OPENAI, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream()
    for _ in range(9):
        await asyncio.sleep(0.05)  # the pace of this upstream
        exchange.event(STREAM[1])
    exchange.end_stream(DONE)
    response = await client.response()

    assert response.complete
    assert STREAM[1] * 9 + DONE == response.body


def short_length(exchange: Exchange) -> None:
    exchange.write(head(200, "content-type: application/json", f"content-length: {len(WHOLE) + 1}") + WHOLE)
    exchange.close()


def short_chunked(exchange: Exchange) -> None:
    exchange.write(head(200, "content-type: application/json", "transfer-encoding: chunked") + framed(WHOLE))
    exchange.close()


def bad_chunk(exchange: Exchange) -> None:
    exchange.write(head(200, "content-type: application/json", "transfer-encoding: chunked") + framed(WHOLE[:-1]))
    exchange.finish(b"zz\r\n}\r\n0\r\n\r\n")


@pytest.mark.parametrize("fault", [short_length, short_chunked, bad_chunk])
async def test_a_body_that_ends_short(rig: Rig, fault: Callable[[Exchange], None]) -> None:
    """R50: a body shorter than its framing says is never passed on as a whole one."""
    upstream = await rig.upstream(fault)
    gateway = await rig.gateway(upstream)
    client = await rig.post(gateway, OPENAI)
    try:
        response = await client.response()
    except EOFError:
        response = None  # broken off before its head had gone, which says it just as well
    assert response is None or response.status == 502 or not response.complete
    await gateway.record(outcome="upstream_broken")
    await rig.check_usable(gateway, upstream)


async def test_a_stream_with_a_length_is_broken_off(rig: Rig) -> None:
    """Where an error event would not fit the announced length, the connection is broken off instead."""
    length = sum(map(len, STREAM))
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.post(gateway, OPENAI, stream=True)
    exchange = await upstream.exchange(0)
    exchange.write(head(200, "content-type: text/event-stream", f"content-length: {length}") + STREAM[0])
    response = await client.read_head()
    exchange.close()
    await client.read_body(response)

    assert not response.complete
    assert STREAM[0] == response.body


async def test_bytes_behind_the_answer_are_not_passed_on(rig: Rig) -> None:
    """What an upstream says after its answer is dropped together with the connection."""
    upstream = await rig.upstream(lambda exchange: exchange.finish(whole(WHOLE) + b"HTTP/1.1 200 OK\r\n"))
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    for tag in (1, 2, 3):
        await client.post(OPENAI.path, OPENAI.body(tag))
        response = await client.response()
        assert (response.status, response.body) == (200, WHOLE)
    assert upstream.tags == [1, 2, 3]
    assert len(upstream.connections) == 3


async def test_twenty_faults_in_a_row(rig: Rig, surface: Surface) -> None:
    """No fault takes a slot with it, however often it comes: reset, silence, refusal and broken streams in turn."""
    # R16

    def broken_stream(exchange: Exchange) -> None:
        exchange.write(STREAM_HEAD + framed(FIRST_EVENT))
        exchange.reset()

    def refusal(exchange: Exchange) -> None:
        exchange.answer(b"{}", status=500)

    def good(exchange: Exchange) -> None:
        exchange.finish(STREAM_HEAD + b"".join(map(framed, STREAM)) + LAST_CHUNK)

    def silence(_exchange: Exchange) -> None:
        pass

    scripts = (reset, broken_stream, refusal, good, silence)
    upstream = await rig.upstream(lambda exchange: scripts[(exchange.tag or 0) % 5](exchange))
    gateway = await rig.gateway(upstream, cap=3, queue_limit=20, first_byte_timeout_seconds=0.1)
    clients = [await rig.post(gateway, surface, tag, stream=True) for tag in range(20)]
    for client in clients:
        await client.response()
    assert set(range(20)) == set(upstream.tags)
    assert upstream.peak <= 3
    await rig.check_usable(gateway, upstream)


# -- helpers --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def closed_port() -> Iterator[str]:
    """An address where nobody listens, and nobody else can meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@contextlib.contextmanager
def full_backlog() -> Iterator[str]:
    """An address where connections are neither accepted nor refused: the kernel drops a SYN that finds no place."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
