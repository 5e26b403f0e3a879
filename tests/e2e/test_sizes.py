"""How much a client may send: one body, all bodies together, nesting, fields; and how long an answer's line may be."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable

import anthropic
import openai
import pytest
from rig import (
    ANTHROPIC,
    DONE,
    FIRST_EVENT,
    LINES,
    OPENAI,
    STREAM,
    RawClient,
    Response,
    Rig,
    RunningGateway,
    Surface,
    answer,
    chunk,
    eventually,
    everywhere,
    resident_bytes,
)

MEGABYTE = 1 << 20
BUDGET = {"max_body_bytes": MEGABYTE, "body_memory_bytes": 3 * MEGABYTE}


async def held_bytes(gateway: RunningGateway) -> int:
    return int(await gateway.metric("aiogw_body_memory_bytes"))


async def holds(gateway: RunningGateway, count: int) -> None:
    async def reached() -> bool:
        return await held_bytes(gateway) == count

    await eventually(reached, what=f"{count} bytes held")


def refused_for_memory(surface: Surface, response: Response) -> None:
    assert response.status == 503
    surface.error(response)
    assert surface.code(response) in ("memory_full", None)
    assert response.header("x-should-retry") == "true"
    assert 1 <= int(response.header("retry-after") or 0) <= 60


def announce(surface: Surface, size: int, *headers: str) -> bytes:
    """The head of a request whose body is to be ``size`` bytes."""
    lines = (f"POST {surface.path} HTTP/1.1", "host: x", f"content-length: {size}", *headers)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


# -- all bodies together --------------------------------------------------------------------------------------------


@everywhere
async def test_what_is_held_along_the_way(rig: Rig, surface: Surface, process: bool) -> None:
    """A body counts from its announcement until the upstream begins to answer, waiting and running alike."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, server=BUDGET, process=process)
    body = surface.body(1, padding=500_000, stream=True)
    uploading = await rig.client(gateway)
    await uploading.send(announce(surface, len(body)))
    await holds(gateway, len(body))
    await uploading.send(body)
    running = await upstream.exchange(0)
    sent = len(running.request.body)
    await holds(gateway, sent)
    (waiting,) = await rig.queued(gateway, surface, [2], padding=400_000)
    both = await held_bytes(gateway)
    assert both > sent + 400_000
    running.begin_stream(*STREAM[:2])
    await holds(gateway, both - sent)
    running.end_stream(*STREAM[2:])
    assert (await uploading.response()).complete
    last = await upstream.exchange(1)
    assert await held_bytes(gateway) == both - sent == len(last.request.body)
    last.answer()
    assert (await waiting.response()).status == 200
    await holds(gateway, 0)


@everywhere
async def test_a_declared_upload_too_many(rig: Rig, surface: Surface, process: bool) -> None:
    """It is refused like a full queue before any of it is read; when there is room again, the next one is served."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, server=BUDGET, process=process)
    holders = [await rig.client(gateway) for _ in range(3)]
    for holder in holders:
        await holder.send(announce(surface, MEGABYTE))
    await holds(gateway, 3 * MEGABYTE)
    late = await rig.client(gateway)
    await late.send(announce(surface, 100_000))
    response = await late.response()
    refused_for_memory(surface, response)
    assert response.header("connection") == "close"
    assert await late.ended()
    await gateway.record(outcome="memory_full", status=503)
    assert await gateway.metric("aiogw_requests_total", surface=surface.name, upstream="-", outcome="memory_full") >= 1
    assert await held_bytes(gateway) == 3 * MEGABYTE
    holders[0].reset()
    await holds(gateway, 2 * MEGABYTE)
    assert (await rig.ask(gateway, surface, 7)).status == 200
    assert upstream.tags == [7]


async def test_a_short_body_that_is_refused_is_read(rig: Rig, surface: Surface, process: bool) -> None:
    """Whoever sends it behind the refusal, before they look for an answer, finds that answer and an end in order."""
    gateway = await rig.gateway(await rig.upstream(), server=BUDGET, process=process)
    holders = [await rig.client(gateway) for _ in range(3)]
    for holder in holders:
        await holder.send(announce(surface, MEGABYTE))
    await holds(gateway, 3 * MEGABYTE)
    client = await rig.client(gateway)
    body = surface.body(5, padding=200_000)
    await client.send(announce(surface, len(body)))
    await gateway.record(outcome="memory_full")
    await client.send(body)
    response = await client.response()
    refused_for_memory(surface, response)
    assert response.header("connection") == "close"
    assert await client.ended()
    assert not client.reset_seen


async def test_continue_is_not_said_when_memory_is_full(rig: Rig, surface: Surface) -> None:
    """A client that asks first is told 503 and not 100."""
    gateway = await rig.gateway(await rig.upstream(), server=BUDGET)
    holders = [await rig.client(gateway) for _ in range(3)]
    for holder in holders:
        await holder.send(announce(surface, MEGABYTE))
    await holds(gateway, 3 * MEGABYTE)
    client = await rig.client(gateway)
    await client.send(announce(surface, 1000, "expect: 100-continue"))
    refused_for_memory(surface, await client.response())


async def test_a_chunked_upload_grows(rig: Rig, surface: Surface, process: bool) -> None:
    """A body without a length counts as it comes, and is refused by the byte that is too many."""
    gateway = await rig.gateway(await rig.upstream(), server=BUDGET, process=process)
    holders = [await rig.client(gateway) for _ in range(2)]
    for holder in holders:
        await holder.send(announce(surface, MEGABYTE))
    growing, other = await rig.client(gateway), await rig.client(gateway)
    await growing.request("POST", surface.path, None, "transfer-encoding: chunked")
    await growing.send(b"80000\r\n" + b" " * 0x80000 + b"\r\n")
    await holds(gateway, 2 * MEGABYTE + 0x80000)
    await other.send(announce(surface, 0x80000 - 10))
    await holds(gateway, 3 * MEGABYTE - 10)
    await growing.send(b"b\r\n" + b" " * 11 + b"\r\n")
    response = await growing.response()
    refused_for_memory(surface, response)
    assert response.header("connection") == "close"
    await holds(gateway, 2 * MEGABYTE + 0x80000 - 10)


async def test_an_inflated_body_counts_in_full(rig: Rig, surface: Surface) -> None:
    """What is held of a compressed body is what it becomes."""
    gateway = await rig.gateway(await rig.upstream(), server=BUDGET)
    holders = [await rig.client(gateway) for _ in range(3)]
    for holder in holders:
        await holder.send(announce(surface, MEGABYTE - 100_000))
    await holds(gateway, 3 * MEGABYTE - 300_000)
    client = await rig.client(gateway)
    packed = gzip.compress(b" " * 500_000)
    assert len(packed) < 10_000
    await client.request("POST", surface.path, packed, "content-encoding: gzip")
    refused_for_memory(surface, await client.response())
    await holds(gateway, 3 * MEGABYTE - 300_000)


async def leaves_its_upload(client: RawClient, surface: Surface) -> None:
    await client.send(announce(surface, 1000) + b"{")
    client.reset()


async def is_too_large(client: RawClient, surface: Surface) -> None:
    await client.request("POST", surface.path, gzip.compress(b" " * (2 * MEGABYTE)), "content-encoding: gzip")
    assert (await client.response()).status == 413


async def is_no_document(client: RawClient, surface: Surface) -> None:
    await client.post(surface.path, b"{" * 1000)
    assert (await client.response()).status == 400


async def has_bad_chunks(client: RawClient, surface: Surface) -> None:
    # It is asked to send, so what it sends is not looked at together with its head.
    await client.request("POST", surface.path, None, "transfer-encoding: chunked", "expect: 100-continue")
    assert (await client.read_head()).status == 100
    await client.send(b"2\r\n{}\r\nzz\r\n")
    assert (await client.response()).status == 400


async def cannot_be_inflated(client: RawClient, surface: Surface) -> None:
    await client.request("POST", surface.path, b"no gzip", "content-encoding: gzip")
    assert (await client.response()).status == 400


async def has_no_model(client: RawClient, surface: Surface) -> None:
    await client.post(surface.path, surface.body(model="nobody"))
    assert (await client.response()).status == 404


async def is_refused_at_the_gate(client: RawClient, surface: Surface) -> None:
    await client.post(surface.path, surface.body(2))
    assert (await client.response()).status == 503


ENDINGS: tuple[Callable[[RawClient, Surface], object], ...] = (
    leaves_its_upload,
    is_too_large,
    is_no_document,
    has_bad_chunks,
    cannot_be_inflated,
    has_no_model,
    is_refused_at_the_gate,
)


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
async def test_however_it_ends_before_it_runs(rig: Rig, surface: Surface, ending: Callable[..., object]) -> None:
    """Ten of each kind, while one request holds what it holds: afterwards that is all that is held."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, server=BUDGET, queue_limit=0)
    running = await rig.post(gateway, surface, 1)
    exchange = await upstream.exchange(0)
    for _ in range(10):
        client = await rig.client(gateway)
        await ending(client, surface)  # type: ignore[misc]
        client.close()
    await eventually(lambda: len(gateway.records) == 10, what="their log lines")
    assert await held_bytes(gateway) == len(exchange.request.body)
    exchange.answer()
    assert (await running.response()).status == 200
    await holds(gateway, 0)


@pytest.mark.parametrize("end", ["client leaves the queue", "client leaves", "upstream breaks off", "upstream refuses"])
async def test_however_it_ends_at_the_upstream(rig: Rig, surface: Surface, stream: bool, end: str) -> None:
    """What a request held is given back with its end, whoever ends it."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, server=BUDGET)
    first = await rig.post(gateway, surface, 1, stream=stream, padding=1000)
    exchange = await upstream.exchange(0)
    (waiting,) = await rig.queued(gateway, surface, [2], stream=stream, padding=2000)
    if end == "client leaves the queue":
        waiting.reset()
        await holds(gateway, len(exchange.request.body))
    elif end == "client leaves":
        first.reset()
    elif end == "upstream breaks off":
        exchange.reset()
    else:
        exchange.answer(b"{}", status=400)
    if end == "client leaves the queue":
        exchange.respond(stream=stream)
    else:
        second = await upstream.exchange(1)
        assert await held_bytes(gateway) == len(second.request.body)
        second.respond(stream=stream)
    await holds(gateway, 0)


async def test_a_request_that_is_sent_again_is_held_until_it_is_answered(rig: Rig) -> None:
    """A kept connection that dies under a POST costs a second sending, for which the body has to be there."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, server=BUDGET)
    assert (await rig.ask(gateway, OPENAI)).status == 200
    upstream.script = lambda exchange: exchange.reset()
    client = await rig.client(gateway)
    upstream.script = None
    await client.post(OPENAI.path, OPENAI.body(1, padding=10_000))
    first = await upstream.exchange(1)
    first.reset()
    again = await upstream.exchange(2)
    assert again.request.body == first.request.body
    assert await held_bytes(gateway) == len(again.request.body)
    again.answer()
    assert (await client.response()).status == 200
    await holds(gateway, 0)


# -- uploads that are refused ---------------------------------------------------------------------------------------


async def test_a_refused_upload_is_not_read_to_its_end(rig: Rig, surface: Surface, process: bool) -> None:
    """The answer is there at once, the client's sending comes to a stop, and the connection ends."""
    gateway = await rig.gateway(await rig.upstream(), server=BUDGET, process=process)
    client = await rig.client(gateway)
    await client.send(announce(surface, 1 << 30))
    sent = 0
    # Whoever goes on sending fills what the kernels on both sides hold, and then is cut off.
    with contextlib.suppress(ConnectionError):
        while sent < 1 << 30:
            await client.send(b"x" * 65536)
            sent += 65536
    assert sent < 32 * MEGABYTE
    response = await client.response()
    assert (response.status, response.header("connection")) == (413, "close")
    surface.error(response)


@pytest.fixture
async def full(rig: Rig) -> AsyncIterator[RunningGateway]:
    """A gateway whose memory is full but for a few bytes, and will be."""
    gateway = await rig.daemon(
        await rig.upstream(), server={"max_body_bytes": 30 * MEGABYTE, "body_memory_bytes": 31 * MEGABYTE}
    )
    holder = await rig.client(gateway)
    await holder.send(announce(OPENAI, 30 * MEGABYTE))
    await holds(gateway, 30 * MEGABYTE)
    return gateway


async def test_what_is_announced_takes_no_memory_yet(rig: Rig) -> None:
    """A client that announces 64 MB and sends a byte costs what a byte costs."""
    daemon = await rig.daemon(await rig.upstream(), server={"max_body_bytes": 64 << 20, "body_memory_bytes": 200 << 20})
    before = resident_bytes(daemon)
    for number in (1, 2, 3):
        client = await rig.client(daemon)
        await client.send(announce(OPENAI, 64 << 20))
        await holds(daemon, number * (64 << 20))
        await client.send(b"{")
    assert 200 == (await daemon.admin("/livez")).status  # and so it has read the bytes
    assert resident_bytes(daemon) - before < 32 << 20


LARGE = [{"role": "user", "content": "x" * (20 * MEGABYTE)}]


async def test_the_sdks_hear_why_an_upload_was_refused(full: RunningGateway) -> None:
    """They get the refusal and not a broken connection, although they were still sending."""

    def ask_openai() -> None:
        with openai.OpenAI(base_url=f"{full.url}/v1", api_key="none", max_retries=0) as client:
            client.chat.completions.create(model="reasoning", messages=LARGE)  # type: ignore[arg-type]

    def ask_anthropic() -> None:
        with anthropic.Anthropic(base_url=f"{full.url}/llm", api_key="none", max_retries=0) as client:
            client.messages.create(model="reasoning", max_tokens=5, messages=LARGE)  # type: ignore[arg-type]

    # Their asynchronous clients look for an answer only after they have sent everything, and find the reset.
    for ask, error in ((ask_openai, openai.InternalServerError), (ask_anthropic, anthropic.InternalServerError)):
        with pytest.raises(error) as refused:
            await asyncio.to_thread(ask)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"]
        assert refused.value.response.headers["x-should-retry"] == "true"


# -- bombs, nesting, fields -----------------------------------------------------------------------------------------

ZEROS = b" " * (40 * MEGABYTE)


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


BOMBS = {
    "gzip": ("gzip", gzip.compress(ZEROS)),
    "deflate": ("deflate", zlib.compress(ZEROS)),
    "raw-deflate": ("deflate", raw_deflate(ZEROS)),
    "members": ("gzip", gzip.compress(ZEROS[: 8 * MEGABYTE]) * 5),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_bombs(rig: Rig, surface: Surface, name: str, chunked: bool) -> None:
    """R44: what unpacks to more than max_body_bytes is refused when it gets there, and never held beyond that."""
    coding, bomb = BOMBS[name]
    upstream = await rig.upstream()
    # With a budget of just one body, what is held beyond the limit would be a refusal of another kind.
    server = {"max_body_bytes": MEGABYTE, "body_memory_bytes": MEGABYTE}
    gateway = await rig.gateway(upstream, server=server)
    client = await rig.client(gateway)
    if chunked:
        await client.request("POST", surface.path, None, f"content-encoding: {coding}", "transfer-encoding: chunked")
        await client.send(b"%x\r\n" % len(bomb) + bomb + b"\r\n0\r\n\r\n")
    else:
        await client.request("POST", surface.path, bomb, f"content-encoding: {coding}")
    response = await client.response()
    assert response.status in (400, 413), response.body
    surface.error(response)
    if name != "members":
        assert response.status == 413
    assert upstream.exchanges == []
    await holds(gateway, 0)


async def test_a_bomb_in_a_bomb(rig: Rig, surface: Surface) -> None:
    """Only what the header says is undone, and only once: the inner one is no document."""
    gateway = await rig.gateway(await rig.upstream())
    client = await rig.client(gateway)
    await client.request("POST", surface.path, gzip.compress(gzip.compress(ZEROS)), "content-encoding: gzip")
    response = await client.response()
    assert response.status == 400
    surface.error(response)


NESTED = {
    "alone": b"[" * 100_000,
    "closed": b"[" * 100_000 + b"]" * 100_000,
    "objects": b'{"a":' * 100_000,
    "within": b'{"model":"reasoning","max_tokens":1,"messages":' + b"[" * 100_000,
    "unknown": b'{"model":"reasoning","max_tokens":1,"messages":[],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("body", NESTED.values(), ids=NESTED)
async def test_brackets_without_end(rig: Rig, surface: Surface, body: bytes, process: bool) -> None:
    """A hundred thousand brackets, wherever they are, are refused in order."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.client(gateway)
    await client.post(surface.path, body)
    response = await client.response()
    assert response.status == 400
    surface.error(response)
    assert upstream.exchanges == []


MANY = {
    "numbers": b'{"role":"user","content":[' + b"0," * 500_000 + b"0]}",
    "strings": b'{"role":"user","content":"' + b"," * 500_001 + b'"}',
    "objects": b'{"role":"user","content":[' + b"{}," * 300_000 + b"{}]}",
    "nested": b'{"role":"user","content":' + (b"[" * 300 + b"]" * 300) * 1001 + b"}",
}


@pytest.mark.parametrize("surface", [ANTHROPIC, LINES], ids=["anthropic", "lines"])
@pytest.mark.parametrize("message", MANY.values(), ids=MANY)
@pytest.mark.parametrize("coding", ["", "content-encoding: gzip"], ids=["plain", "gzip"])
async def test_more_values_than_any_context(rig: Rig, surface: Surface, message: bytes, coding: str) -> None:
    """What would be a hundred times as large when it is decoded is refused before it is."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    # The type of a form excuses nothing where none can be.
    body = b'{"model":"reasoning","max_tokens":1,"messages":[' + message + b"]}"
    fields = (coding, "content-type: multipart/form-data; boundary=x") if coding else ()
    await client.request("POST", surface.path, gzip.compress(body) if coding else body, *fields)
    response = await client.response()
    assert response.status == 400
    assert "it has more than" in surface.error(response)["message"]
    assert upstream.exchanges == []


@pytest.mark.parametrize("message", [MANY["numbers"], MANY["strings"], MANY["objects"]])
async def test_values_that_are_only_carried(rig: Rig, message: bytes) -> None:
    """On /v1 a body is looked through and not decoded: however many values it has, it passes as it is."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    body = b'{"model":"reasoning","max_tokens":1,"messages":[' + message + b"]}"
    await client.post(OPENAI.path, body)
    assert (await client.response()).status == 200
    assert upstream.exchanges[0].request.body == body


@pytest.mark.parametrize("prompt", [b"0," * 500_001 + b"0", b'"",' * 500_001 + b'""'], ids=["tokens", "prompts"])
async def test_more_prompts_than_can_be_counted(rig: Rig, prompt: bytes) -> None:
    """A list of prompts on /v1 has to be decoded, to know its slots, and is refused where that would take too much."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.post("/v1/completions", b'{"model":"reasoning","max_tokens":1,"prompt":[' + prompt + b"]}")
    response = await client.response()
    assert response.status == 400
    assert "it has more than" in OPENAI.error(response)["message"]
    assert upstream.exchanges == []


@pytest.mark.parametrize("surface", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
@pytest.mark.parametrize("content", ["," * 450_000, "[{" * 45_000], ids=["commas", "brackets"])
async def test_as_many_values_as_a_long_context(rig: Rig, surface: Surface, content: str) -> None:
    """A long table, or a long program, is no attack."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    document = {"model": "reasoning", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    await client.post(surface.path, json.dumps(document).encode())
    assert (await client.response()).status == 200
    assert content.encode() in upstream.exchanges[0].request.body


async def test_a_recording_may_have_any_bytes(rig: Rig) -> None:
    """Of a form nothing is decoded, and what is in its files is not counted."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nreasoning\r\n--x\r\n'
    form += b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b",[" * 600_000 + b"\r\n--x--\r\n"
    await client.request("POST", "/v1/audio/transcriptions", form, "content-type: multipart/form-data; boundary=x")
    assert (await client.response()).status == 200
    assert upstream.exchanges[0].request.body == form


async def test_more_fields_than_anybody_sends(rig: Rig, process: bool) -> None:
    """R66: a hundred fields and one of nine kilobytes are served; thousands are refused, and the connection closed."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.client(gateway)
    await client.post(
        OPENAI.path, OPENAI.body(1), *(f"x-{number}: y" for number in range(100)), f"cookie: {'c' * 9000}"
    )
    assert (await client.response()).status == 200
    await client.post(OPENAI.path, OPENAI.body(2), *(f"x-{number}: y" for number in range(3000)))
    response = await client.response()
    assert 400 <= response.status < 500
    assert await client.ended()
    assert upstream.tags == [1]


# -- long lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surface", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
@pytest.mark.parametrize("pieces", [1, 50])
async def test_a_line_of_megabytes(rig: Rig, surface: Surface, process: bool, pieces: int) -> None:
    """R40: one event of four megabytes arrives as it is, however it is cut on the way."""
    text = "x" * (4 * MEGABYTE)
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.post(gateway, surface, 1, stream=True)
    exchange = await upstream.exchange(0)
    long_event = chunk({"content": text})
    exchange.begin_stream(FIRST_EVENT)
    step = len(long_event) // pieces + 1
    for start in range(0, len(long_event), step):
        exchange.event(long_event[start : start + step])
    exchange.end_stream(chunk({"content": ""}, finish="stop"), chunk(usage=True), DONE)
    response = await client.response()
    assert response.complete
    assert surface.text(response) == text
    assert surface.says_end(response)
    if surface is OPENAI:
        assert json.dumps(text).encode() in response.body
