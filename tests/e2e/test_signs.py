"""Signs of life: whoever streams and waits hears something, on both surfaces, and a refusal then comes in-band."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from rig import (
    ANTHROPIC,
    DONE,
    FIRST_EVENT,
    OPENAI,
    STREAM,
    SURFACES,
    TEXT,
    TRANSCRIPTS,
    WHOLE,
    Daemon,
    Exchange,
    RawClient,
    Response,
    Rig,
    RunningGateway,
    ScriptedUpstream,
    Surface,
    answer,
    chunk,
    eventually,
    everywhere,
    vllm_error,
)

# Short enough to wait for, long enough for a test to act in between.
SOON = {"first_sign_seconds": 0.1, "sign_interval_seconds": 0.1}

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


async def read_sign(client: RawClient, surface: Surface) -> bytes:
    """The next event, which has to be a sign of life and nothing else."""
    event = await client.read_event()
    if surface is OPENAI:
        assert event.startswith((b": queued: ", b": keep-alive\n\n")), event
    elif surface is ANTHROPIC:
        assert event.endswith(PING), event
    else:
        assert "waiting" in json.loads(event)
    return event


async def waiting_stream(rig: Rig, gateway: RunningGateway, surface: Surface, tag: int) -> tuple[RawClient, Response]:
    """A client whose request waits in the queue, and the head of its response, which is there already."""
    client = await rig.post(gateway, surface, tag, stream=True)
    response = await client.read_head()
    assert 200 == response.status
    assert surface.stream_type == response.header("content-type")
    if surface in (OPENAI, ANTHROPIC):
        assert ("no-cache", "no") == (response.header("cache-control"), response.header("x-accel-buffering"))
    response.body = await read_sign(client, surface)
    return client, response


async def busy(
    rig: Rig, upstream: ScriptedUpstream, process: bool = False, **changes: Any
) -> tuple[RunningGateway, RawClient, Exchange]:
    """A gateway whose only slot is taken by the request 1000."""
    server = SOON | changes.pop("server", {})
    gateway = await rig.gateway(upstream, process=process, server=server, **changes)
    client = await rig.post(gateway, OPENAI, 1000)
    return gateway, client, await upstream.tagged(1000)


# -- in the queue ---------------------------------------------------------------------------------------------------


@everywhere
async def test_who_waits_hears_something(rig: Rig, surface: Surface, process: bool) -> None:
    """R51, O11, S32: a first sign, then one in each interval, then the answer as if nothing had been."""
    upstream = await rig.upstream()
    gateway, _, holder = await busy(rig, upstream, process)
    asked_at = time.monotonic()
    client, response = await waiting_stream(rig, gateway, surface, 1)
    assert time.monotonic() - asked_at >= 0.1
    assert "" != (response.header("x-request-id") or "")
    for _ in range(3):
        since = time.monotonic()
        response.body += await read_sign(client, surface)
        # It may have been under way when the one before it was read.
        assert time.monotonic() - since < 2
    upstream.script = answer
    holder.answer()
    await client.read_body(response)

    assert response.complete
    assert TEXT == surface.text(response)
    assert surface.says_end(response)
    assert surface is not ANTHROPIC or 1 == response.body.count(b"event: message_start\n")
    assert [1000, 1] == upstream.tags
    record = await gateway.record(surface=surface.name, stream=True)
    assert ("completed", 200) == (record["outcome"], record["status"])
    assert record["wait_seconds"] >= 0.3


async def test_a_sign_says_the_place(rig: Rig) -> None:
    """O11: how many are ahead and, once something has ended, about how long it takes; the place moves up."""
    upstream = await rig.upstream()
    gateway, client, first = await busy(rig, upstream)
    second_client = await rig.post(gateway, OPENAI, 1001)
    await gateway.waiting(1)
    _, response = await waiting_stream(rig, gateway, OPENAI, 1002)
    assert b": queued: 1 ahead\n\n" == response.body
    first.answer()
    await client.response()
    (await upstream.tagged(1001)).answer()
    await second_client.response()
    holder = await upstream.tagged(1002)
    waiting = await rig.queued(gateway, OPENAI, [1])
    client, response = await waiting_stream(rig, gateway, OPENAI, 2)
    assert response.body.startswith(b": queued: 1 ahead, about ")
    assert response.body.endswith(b" s to wait\n\n")
    holder.answer()
    second = await upstream.tagged(1)
    # Places are counted once a second.
    for _ in range(30):
        if (await read_sign(client, OPENAI)).startswith(b": queued: 0 ahead"):
            break
    else:
        pytest.fail("the place did not move up")
    upstream.script = answer
    second.answer()
    await client.read_body(response)
    assert TEXT == OPENAI.text(response)
    assert 200 == (await waiting[0].response()).status


async def test_a_ping_comes_after_the_start(rig: Rig) -> None:
    """S2, S32: there is one message_start, before the first ping, and what the first real chunk says starts nothing."""
    upstream = await rig.upstream()
    gateway, _, holder = await busy(rig, upstream)
    client, response = await waiting_stream(rig, gateway, ANTHROPIC, 1)
    start, ping, rest = response.body.split(b"\n\n")
    assert (PING, b"") == (ping + b"\n\n", rest)
    message = json.loads(start.partition(b"data: ")[2])["message"]
    assert ("message", "assistant", "reasoning", []) == (
        message["type"],
        message["role"],
        message["model"],
        message["content"],
    )
    assert message["id"].startswith("msg_")
    upstream.script = answer
    holder.answer()
    await client.read_body(response)
    types = [line.removeprefix(b"event: ") for line in response.body.split(b"\n") if line.startswith(b"event: ")]
    assert b"message_start" == types[0]
    assert 1 == types.count(b"message_start") == types.count(b"message_stop")


async def test_a_whole_answer_hears_nothing(rig: Rig, surface: Surface) -> None:
    """O11, S32: nothing can be said before a document; the status comes when it is known."""
    upstream = await rig.upstream()
    gateway, _, holder = await busy(rig, upstream, queue_timeout_seconds=1)
    (whole,) = await rig.queued(gateway, surface, [1])
    streamed, _ = await waiting_stream(rig, gateway, surface, 2)
    for _ in range(3):
        await read_sign(streamed, surface)
    # The streaming client has heard four signs in the meantime.
    assert whole.quiet()
    response = await whole.response()
    assert 503 == response.status
    assert surface.error(response)
    holder.answer()


async def test_never_is_never(rig: Rig, surface: Surface) -> None:
    """O11: with first_sign_seconds = 0 a refusal is a status, however long the wait, and prefill is silent."""
    upstream = await rig.upstream()
    server = {"first_sign_seconds": 0, "sign_interval_seconds": 0.01}
    gateway, _, holder = await busy(rig, upstream, server=server, queue_timeout_seconds=0.3)
    response = await rig.ask(gateway, surface, 1, stream=True)
    assert 503 == response.status
    holder.answer()
    client = await rig.post(gateway, surface, 2, stream=True)
    exchange = await upstream.tagged(2)
    await asyncio.sleep(0.1)  # ten intervals
    assert client.quiet()
    exchange.answer(vllm_error("no", 400), status=400)
    assert 400 == (await client.response()).status


async def test_who_need_not_wait_hears_no_sign(rig: Rig, surface: Surface) -> None:
    """O6: an answer that begins at once is what it would be without all this."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, server=SOON)
    response = await rig.ask(gateway, surface, 1, stream=True)
    assert PING not in response.body
    if surface is OPENAI:
        assert b"".join(STREAM) == response.body


async def test_who_leaves_after_a_sign_never_reaches_the_upstream(rig: Rig, surface: Surface) -> None:
    """A response that has begun is no promise to an engine."""
    upstream = await rig.upstream()
    gateway, _, holder = await busy(rig, upstream)
    client, _ = await waiting_stream(rig, gateway, surface, 1)
    client.close()
    await gateway.waiting(0)
    holder.answer()
    await gateway.record(outcome="client_gone", status=200)
    await rig.check_usable(gateway, upstream)
    assert 1 not in upstream.tags


async def test_many_wait(rig: Rig, process: bool) -> None:
    """Forty streams on both surfaces all hear signs, and all are answered, in the order in which they came."""
    upstream = await rig.upstream()
    gateway, _, holder = await busy(rig, upstream, process, queue_limit=40)
    clients = []
    for tag in range(40):
        clients.append(await rig.post(gateway, SURFACES[tag % 2], tag, stream=True))
        await gateway.waiting(tag + 1)
    responses = []
    for tag, client in enumerate(clients):
        responses.append(await client.read_head())
        await read_sign(client, SURFACES[tag % 2])
    upstream.script = answer
    holder.answer()
    for tag, client in enumerate(clients):
        await client.read_body(responses[tag])
        assert TEXT == SURFACES[tag % 2].text(responses[tag])
    assert [1000, *range(40)] == upstream.tags
    assert 1 == upstream.peak


# -- at the upstream ------------------------------------------------------------------------------------------------


async def test_a_long_prefill_is_not_silent(rig: Rig, surface: Surface) -> None:
    """S32: at the upstream the first sign comes after a whole interval, so that a refusal can be a status first."""
    upstream = await rig.upstream()
    server = {"first_sign_seconds": 0.01, "sign_interval_seconds": 0.3}
    gateway = await rig.gateway(upstream, server=server)
    asked_at = time.monotonic()
    client = await rig.post(gateway, surface, 1, stream=True)
    response = await client.read_head()
    assert time.monotonic() - asked_at >= 0.3
    for _ in range(2):
        response.body += await read_sign(client, surface)
    assert surface is not OPENAI or response.body.endswith(b": keep-alive\n\n")
    upstream.exchanges[0].stream()
    await client.read_body(response)
    assert TEXT == surface.text(response)


async def test_a_grant_begins_a_new_interval(rig: Rig, surface: Surface) -> None:
    """Who is granted just before its first sign has the time of an interval to be refused with a status."""
    upstream = await rig.upstream()
    server = {"first_sign_seconds": 0.3, "sign_interval_seconds": 5}
    gateway, _, holder = await busy(rig, upstream, server=server)
    (client,) = await rig.queued(gateway, surface, [1], stream=True)
    holder.answer()
    exchange = await upstream.tagged(1)
    await asyncio.sleep(0.5)  # more than the first sign takes
    assert client.quiet()
    exchange.answer(vllm_error("no", 400), status=400)
    assert 400 == (await client.response()).status


async def test_a_pause_in_a_stream_is_not_silent(rig: Rig, surface: Surface) -> None:
    """O11, S32: between two events of an answer, counted from what the client last got."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, server=SOON)
    client = await rig.post(gateway, surface, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(FIRST_EVENT, STREAM[1])
    response = await client.read_head()
    response.body = await client.read_event()
    while b"Hello" not in response.body:
        response.body += await client.read_event()
    for _ in range(3):
        sign = await read_sign(client, surface)
        assert surface is not ANTHROPIC or PING == sign
        assert surface is not OPENAI or b": keep-alive\n\n" == sign
    exchange.end_stream(*STREAM[2:])
    await client.read_body(response)
    assert TEXT == surface.text(response)


async def spoken_to(exchange: Exchange, event: bytes, until: Callable[[], Awaitable[bytes]]) -> bytes:
    """What ``until`` returns while the upstream says ``event`` again and again."""
    task = asyncio.ensure_future(until())
    while not task.done():
        exchange.event(event)
        await asyncio.sleep(0.01)  # its pace, a tenth of the interval
    return await task


async def test_suppressed_reasoning_is_silence(rig: Rig) -> None:
    """S32, P8: whoever did not ask for thinking gets pings while the model thinks."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, server=SOON)
    client = await rig.post(gateway, ANTHROPIC, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(FIRST_EVENT)
    response = await client.read_head()
    response.body = await client.read_event()

    async def three_signs() -> bytes:
        return b"".join([await read_sign(client, ANTHROPIC) for _ in range(3)])

    assert PING * 3 == await spoken_to(exchange, chunk({"reasoning": "hm"}), three_signs)
    exchange.end_stream(*STREAM[1:])
    await client.read_body(response)
    assert TEXT == ANTHROPIC.text(response)


async def test_a_buffered_tool_is_silence(rig: Rig) -> None:
    """S22, S32: while one call is open, what comes of another is held back, and pings say that all is well."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, server=SOON)
    client = await rig.post(gateway, ANTHROPIC, 1, stream=True)
    exchange = await upstream.exchange(0)

    def call(index: int, arguments: str, **more: str) -> bytes:
        function = {"arguments": arguments} | ({"name": "f"} if more else {})
        return chunk({"tool_calls": [{"index": index, "function": function} | more]})

    exchange.begin_stream(call(0, '{"a":', id="a"), call(1, '{"b":"', id="b"))
    response = await client.read_head()
    while b'partial_json":"{\\"a\\":"' not in response.body:
        response.body += await client.read_event()

    async def two_signs() -> bytes:
        return b"".join([await read_sign(client, ANTHROPIC) for _ in range(2)])

    assert PING * 2 == await spoken_to(exchange, call(1, "x"), two_signs)
    exchange.end_stream(call(0, "1}"), call(1, '"}'), chunk({}, finish="tool_calls"), DONE)
    await client.read_body(response)
    assert response.complete
    assert ANTHROPIC.says_end(response)
    assert 1 == response.body.count(b'"partial_json":"{\\"b\\":\\"xx')


async def test_a_stream_that_speaks_hears_no_signs(rig: Rig) -> None:
    """O6: as long as something comes within each interval, nothing is put between."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, server={"first_sign_seconds": 0.1, "sign_interval_seconds": 1})
    client = await rig.post(gateway, OPENAI, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream()
    for _ in range(30):
        exchange.event(STREAM[1])
        await asyncio.sleep(0.05)  # its pace, for one and a half times the interval
    exchange.end_stream(DONE)
    response = await client.response()
    assert STREAM[1] * 30 + DONE == response.body


# -- refused after a sign -------------------------------------------------------------------------------------------


async def ended(client: RawClient, response: Response, surface: Surface) -> dict[str, Any]:
    """The error inside of the rest of ``response``, which ends properly and claims no success."""
    await client.read_body(response)
    assert response.complete
    assert not surface.says_end(response)
    error = surface.in_band_error(response)
    assert error is not None
    return error


async def test_a_time_out_after_a_sign(rig: Rig, surface: Surface) -> None:
    """O11, S30, E16: the same refusal as an event, and the log has its name."""
    upstream = await rig.upstream()
    gateway, _, holder = await busy(rig, upstream, queue_timeout_seconds=0.4)
    client, response = await waiting_stream(rig, gateway, surface, 1)
    error = await ended(client, response, surface)
    assert "within 0.4" in error["message"]
    assert ("overloaded_error" if surface is ANTHROPIC else "queue_timeout") in (error.get("code"), error["type"])
    await gateway.record(outcome="queue_timeout", status=200)
    assert 1 == await gateway.metric("aiogw_refusals_total", upstream="reasoning", reason="queue_timeout")
    holder.answer()
    await rig.check_usable(gateway, upstream)
    assert 1 not in upstream.tags


@everywhere
async def test_draining_after_a_sign(rig: Rig, surface: Surface, process: bool) -> None:
    """O11, S30, E16: who waits is told in-band that the gateway stops; who runs is served."""
    upstream = await rig.upstream()
    gateway, running, holder = await busy(rig, upstream, process)
    client, response = await waiting_stream(rig, gateway, surface, 1)
    rig.forget(gateway)
    stopping = asyncio.ensure_future(gateway.stop())
    error = await ended(client, response, surface)
    assert "shutting down" in error["message"]
    holder.answer()
    assert 200 == (await running.response()).status
    await stopping
    await gateway.record(outcome="draining", status=200)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (429, "rate_limit_error"), (500, "api_error")]
)
async def test_an_upstream_refusal_after_a_sign(rig: Rig, surface: Surface, status: int, kind: str) -> None:
    """O11, S28, E1: its own words in an event; on /v1 with its own error object."""
    upstream = await rig.upstream(
        lambda exchange: exchange.answer(vllm_error("so it is", status), status=status) if exchange.tag == 1 else None
    )
    gateway, _, holder = await busy(rig, upstream)
    client, response = await waiting_stream(rig, gateway, surface, 1)
    holder.answer()
    error = await ended(client, response, surface)
    assert "so it is" == error["message"]
    assert surface is not ANTHROPIC or kind == error["type"]
    assert surface is not OPENAI or status == error["code"]
    await gateway.record(outcome="upstream_error", status=200)


async def test_a_context_overflow_after_a_sign(rig: Rig) -> None:
    """E10, S31: Claude Code compacts on the sentence, also inside of a stream."""
    message = "This model's maximum context length is 2048 tokens. However, your prompt contains 2049 input tokens."
    upstream = await rig.upstream(
        lambda exchange: exchange.answer(vllm_error(message, 400), status=400) if exchange.tag == 1 else None
    )
    gateway, _, holder = await busy(rig, upstream)
    client, response = await waiting_stream(rig, gateway, ANTHROPIC, 1)
    holder.answer()
    error = await ended(client, response, ANTHROPIC)
    assert ("invalid_request_error", "prompt is too long: 2049 tokens > 2048 maximum") == (
        error["type"],
        error["message"],
    )


async def test_a_document_after_a_sign(rig: Rig, surface: Surface) -> None:
    """O11: an upstream that answers a stream with a document cannot be relayed any more, and it says so."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(WHOLE) if exchange.tag == 1 else None)
    gateway, _, holder = await busy(rig, upstream)
    client, response = await waiting_stream(rig, gateway, surface, 1)
    holder.answer()
    error = await ended(client, response, surface)
    assert "application/json" in error["message"]
    await gateway.record(outcome="upstream_broken", status=200)


async def test_a_broken_upstream_after_a_sign(rig: Rig, surface: Surface) -> None:
    """O11, S29: it resets, or cannot be reached; the client hears it in-band and the slot is free."""
    upstream = await rig.upstream(lambda exchange: exchange.reset() if exchange.tag == 1 else None)
    gateway, _, holder = await busy(rig, upstream)
    client, response = await waiting_stream(rig, gateway, surface, 1)
    holder.answer()
    assert "broke off" in (await ended(client, response, surface))["message"]
    await rig.check_usable(gateway, upstream)


async def test_an_error_event_first_after_a_sign(rig: Rig, surface: Surface) -> None:
    """S1, S28: what would have been a status is an event; on /v1 it is the upstream's own, once."""
    event = b'data: {"error":{"message":"boom","type":"InternalServerError","code":500}}\n\n'
    upstream = await rig.upstream(lambda exchange: exchange.stream([event, DONE]) if exchange.tag == 1 else None)
    gateway, _, holder = await busy(rig, upstream)
    client, response = await waiting_stream(rig, gateway, surface, 1)
    holder.answer()
    await client.read_body(response)
    assert 1 == response.body.count(b"boom")
    if surface is ANTHROPIC:
        assert "api_error" == (surface.in_band_error(response) or {})["type"]
        assert not surface.says_end(response)


# -- the Responses API -----------------------------------------------------------------------------------------------

RESPONSE_EVENTS = (TRANSCRIPTS / "responses-stream.body.txt").read_bytes().split(b"\n\n")[:4]


async def waiting_response(rig: Rig, gateway: RunningGateway) -> tuple[RawClient, Response]:
    """A client of /v1/responses that has heard one sign."""
    client = await rig.client(gateway)
    await client.post("/v1/responses", json.dumps({"model": "reasoning", "input": "tag:1", "stream": True}).encode())
    response = await client.read_head()
    assert 200 == response.status
    await read_sign(client, OPENAI)
    return client, response


async def failed(client: RawClient, response: Response) -> dict[str, Any]:
    """The error inside of a Responses stream, whose last event says in Codex's words that it has failed."""
    await client.read_body(response)
    assert response.complete
    event = response.body.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    name, data = event.split(b"\n")
    assert b"event: response.failed" == name
    document = json.loads(data.removeprefix(b"data: "))
    assert ("response.failed", "failed") == (document["type"], document["response"]["status"])
    return document["response"]["error"]


async def test_a_response_that_waits_too_long(rig: Rig) -> None:
    """A queue that times out is a rate limit, with the seconds that Codex waits before it asks again."""
    upstream = await rig.upstream()
    gateway, _, holder = await busy(rig, upstream, queue_timeout_seconds=0.4)
    error = await failed(*await waiting_response(rig, gateway))
    assert "rate_limit_exceeded" == error["code"]
    assert re.search(r"within 0\.4.*Please try again in \d+s\.", error["message"])
    await gateway.record(outcome="queue_timeout", status=200)
    holder.answer()
    await rig.check_usable(gateway, upstream)


LONG = "This model's maximum context length is 2048 tokens. However, your prompt contains 2049 input tokens."


@pytest.mark.parametrize(
    ("status", "message", "code"), [(400, LONG, "context_length_exceeded"), (500, "boom", "server_error")]
)
async def test_a_response_that_is_refused_after_a_sign(rig: Rig, status: int, message: str, code: str) -> None:
    """The upstream's sentence, under the code by which Codex compacts, or gives up."""
    upstream = await rig.upstream(
        lambda exchange: exchange.answer(vllm_error(message, status), status=status) if exchange.tag == 1 else None
    )
    gateway, _, holder = await busy(rig, upstream)
    client, response = await waiting_response(rig, gateway)
    holder.answer()
    error = await failed(client, response)
    assert code == error["code"]
    assert message in error["message"]
    await gateway.record(outcome="upstream_error", status=200)


async def test_a_response_that_breaks_off(rig: Rig) -> None:
    """Upstream broken mid-stream: what it has said comes first, then that it failed."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.post("/v1/responses", json.dumps({"model": "reasoning", "input": "tag:1", "stream": True}).encode())
    exchange = await upstream.exchange(0)
    exchange.begin_stream(*(event + b"\n\n" for event in RESPONSE_EVENTS))
    response = await client.read_head()
    response.body = await client.read_event()
    exchange.reset()
    error = await failed(client, response)
    assert b"\n\n".join(RESPONSE_EVENTS) + b"\n\nevent: response.failed\n" in response.body
    assert "server_error" == error["code"]
    assert "broke off" in error["message"]
    await gateway.record(outcome="upstream_broken", status=200)
    await rig.check_usable(gateway, upstream)


# -- refused at entry -----------------------------------------------------------------------------------------------


async def test_a_hopeless_wait_is_refused_at_entry(rig: Rig, surface: Surface) -> None:
    """E16: with enough measured, a request that would only time out gets a true 503 at once, and no sign."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_timeout_seconds=0.05, server={"first_sign_seconds": 0.001})

    async def slowly(exchange: Exchange) -> None:
        await asyncio.sleep(0.07)  # more than the deadline
        exchange.answer()

    upstream.script = slowly
    for tag in range(8):
        assert 200 == (await rig.ask(gateway, OPENAI, tag)).status
    upstream.script = None
    client = await rig.post(gateway, OPENAI, 100)
    holder = await upstream.tagged(100)
    response = await rig.ask(gateway, surface, 101, stream=True)
    assert 503 == response.status
    assert "would wait longer than the 0.05 s" in surface.error(response)["message"]
    assert surface.code(response) in ("queue_too_slow", None)
    assert 1 <= int(response.header("retry-after") or 0) <= 60
    await gateway.record(outcome="queue_too_slow", status=503)
    holder.answer()
    assert 200 == (await client.response()).status


# -- what does not wait ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", [False, True], ids=["in-process", "daemon"])
async def test_counting_and_listing_pass_a_full_queue(rig: Rig, process: bool) -> None:
    """R54, M1, M3, O13: no slot and no place in the queue is needed, however full both are."""

    def script(exchange: Exchange) -> None:
        if exchange.request.target == "/tokenize":
            exchange.answer(b'{"count":7,"max_model_len":40960,"tokens":[1,2,3,4,5,6,7]}')

    upstream = await rig.upstream(script)
    gateway, running, holder = await busy(rig, upstream, process, queue_limit=1)
    await rig.queued(gateway, ANTHROPIC, [1])
    assert 503 == (await rig.ask(gateway, ANTHROPIC, 2)).status
    client = await rig.client(gateway)
    for _ in range(20):
        await client.post(f"{ANTHROPIC.path}/count_tokens?beta=true", ANTHROPIC.body(3))
        response = await client.response()
        assert (200, {"input_tokens": 7}) == (response.status, response.json)
    for path in ("/v1/models", "/llm/v1/models", "/v1/models/reasoning", "/llm/v1/models/reasoning"):
        await client.request("GET", path, None)
        assert 200 == (await client.response()).status
    assert 1 == await gateway.metric("aiogw_grants_total", upstream="reasoning")
    assert 1 == await gateway.metric("aiogw_queue_requests", upstream="reasoning")
    record = await gateway.record(path=f"{ANTHROPIC.path}/count_tokens")
    assert ("completed", 0, "reasoning") == (record["outcome"], record["sequences"], record["upstream"])
    assert "position" not in record
    holder.answer()
    (await upstream.tagged(1)).answer()
    assert 200 == (await running.response()).status


async def test_an_estimate_asks_nobody(rig: Rig) -> None:
    """M2: where it is configured, the count comes from here."""
    upstream = await rig.upstream()
    gateway, running, holder = await busy(rig, upstream, queue_limit=0, dialect={"count_tokens": "estimate"})
    client = await rig.client(gateway)
    await client.post(f"{ANTHROPIC.path}/count_tokens", ANTHROPIC.body(3, padding=4000))
    response = await client.response()
    assert 200 == response.status
    assert 1000 < response.json["input_tokens"] < 1100
    assert 1 == len(upstream.exchanges)
    holder.answer()
    assert 200 == (await running.response()).status


async def test_an_upstream_that_cannot_count(rig: Rig) -> None:
    """M2, E4: a 404 that is not to be tried again, and never a 0."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(b'{"detail":"Not Found"}', status=404))
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.post(f"{ANTHROPIC.path}/count_tokens", ANTHROPIC.body(3))
    response = await client.response()
    assert (404, "false") == (response.status, response.header("x-should-retry"))
    assert "not_found_error" == ANTHROPIC.error(response)["type"]


async def test_who_leaves_while_it_is_counted(rig: Rig) -> None:
    """M1: the upstream is let go, as for an answer."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.post(f"{ANTHROPIC.path}/count_tokens", ANTHROPIC.body(3))
    exchange = await upstream.exchange(0)
    client.close()
    await eventually(lambda: exchange.aborted)
    await gateway.record(outcome="client_gone")


# -- the SDKs -------------------------------------------------------------------------------------------------------

# What they are set to here, and how long the queue lasts: as 6 s and 60 s, but in less time.
READ_TIMEOUT_SECONDS = 1.0
QUEUED_SECONDS = 3.0


@asynccontextmanager
async def impatient(gateway: RunningGateway) -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    """Both SDKs with a short read time-out, and no second try."""
    more: dict[str, Any] = {"api_key": "sk-test", "max_retries": 0, "timeout": READ_TIMEOUT_SECONDS}
    async with (
        openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", http_client=openai.DefaultAsyncHttpxClient(trust_env=False), **more
        ) as one,
        anthropic.AsyncAnthropic(
            base_url=f"{gateway.url}/llm", http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False), **more
        ) as other,
    ):
        yield one, other


async def streamed_by_openai(client: openai.AsyncOpenAI) -> str:
    stream = await client.chat.completions.create(
        model="reasoning", messages=[{"role": "user", "content": "tag:1"}], stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def streamed_by_anthropic(client: anthropic.AsyncAnthropic) -> str:
    async with client.messages.stream(
        model="reasoning", max_tokens=16, messages=[{"role": "user", "content": "tag:2"}]
    ) as stream:
        text = "".join([text async for text in stream.text_stream])
        assert "end_turn" == (await stream.get_final_message()).stop_reason
        return text


async def test_the_sdks_wait_as_long_as_it_takes(rig: Rig) -> None:
    """O11, S32: with a read time-out far below the wait, a request finishes normally on both surfaces."""
    upstream = await rig.upstream()
    server = {"first_sign_seconds": 0.2, "sign_interval_seconds": 0.3}
    daemon, _, holder = await busy(rig, upstream, True, server=server)
    async with impatient(daemon) as (one, other):
        asking = asyncio.gather(streamed_by_openai(one), streamed_by_anthropic(other))
        await daemon.waiting(2)
        await asyncio.sleep(QUEUED_SECONDS)  # three times what the SDKs bear in silence
        assert not asking.done()
        upstream.script = answer
        holder.answer()
        assert [TEXT, TEXT] == await asking


async def test_without_signs_the_sdks_give_up(rig: Rig) -> None:
    """What the signs are for: the same wait in silence is an error to both, and their requests leave the queue."""
    upstream = await rig.upstream()
    daemon, _, holder = await busy(rig, upstream, True, server={"first_sign_seconds": 0})
    assert isinstance(daemon, Daemon)
    async with impatient(daemon) as (one, other):
        results = await asyncio.gather(streamed_by_openai(one), streamed_by_anthropic(other), return_exceptions=True)
    assert [openai.APITimeoutError, anthropic.APITimeoutError] == [type(result) for result in results]
    await daemon.waiting(0)
    holder.answer()


async def test_the_sdks_raise_on_a_refusal_after_signs(rig: Rig) -> None:
    """O11, S30: the same exception as for any error in a stream, with the gateway's sentence."""
    upstream = await rig.upstream()
    daemon, _, holder = await busy(rig, upstream, True, queue_timeout_seconds=0.5)
    async with impatient(daemon) as (one, other):
        with pytest.raises(openai.APIError, match="no room for this request within"):
            await streamed_by_openai(one)
        with pytest.raises(anthropic.APIStatusError, match="no room for this request within"):
            await streamed_by_anthropic(other)
    holder.answer()
