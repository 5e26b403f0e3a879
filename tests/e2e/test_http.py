"""HTTP as clients speak it: versions, connections, request ids, and what never travels from one side to the other."""

from __future__ import annotations

import re

import pytest
from rig import (
    ANTHROPIC,
    OPENAI,
    STREAM,
    TEXT,
    WHOLE,
    Exchange,
    Rig,
    Surface,
    answer,
    eventually,
    head,
    request_bytes,
    whole,
)

# -- versions and connections ---------------------------------------------------------------------------------------


async def test_an_old_client(rig: Rig, surface: Surface, stream: bool) -> None:
    """A client that speaks HTTP/1.0 gets its answer without chunks; the end of the connection ends the body."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.request("POST", surface.path, surface.body(stream=stream), version="1.0")
    response = await client.response()
    assert response.status == 200
    assert response.header("transfer-encoding") is None
    assert response.complete
    assert surface.text(response) == TEXT
    assert await client.ended()


async def test_an_old_client_that_asks_first(rig: Rig) -> None:
    """HTTP/1.0 has no interim answers, so a client that speaks it never gets one (RFC 9110, 10.1.1)."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.request("POST", OPENAI.path, OPENAI.body(), "expect: 100-continue", version="1.0")
    assert (await client.response()).status == 200


async def test_an_old_client_that_wants_to_stay(rig: Rig) -> None:
    """HTTP/1.0 with keep-alive gets a right answer, whether or not the connection stays."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.request("POST", OPENAI.path, OPENAI.body(), "connection: keep-alive", version="1.0")
    response = await client.response()
    assert (response.status, response.body) == (200, WHOLE)
    if response.header("connection") != "keep-alive":
        assert await client.ended()


async def test_many_requests_on_one_connection(rig: Rig, process: bool) -> None:
    """One connection carries answers of all kinds, one after another, on both surfaces."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.client(gateway)
    for number in range(24):
        surface = (OPENAI, ANTHROPIC)[number % 2]
        kind = number % 6
        if kind < 4:
            await client.post(surface.path, surface.body(number, stream=kind >= 2))
            response = await client.response()
            assert (response.status, surface.text(response)) == (200, TEXT)
        elif kind == 4:
            await client.request("GET", "/v1/models")
            assert (await client.response()).status == 200
        else:
            await client.post(surface.path, b"{")
            assert (await client.response()).status == 400


async def test_a_client_that_asks_to_close(rig: Rig, surface: Surface, stream: bool) -> None:
    """``Connection: close`` is obeyed and answered."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.post(surface.path, surface.body(stream=stream), "connection: close")
    response = await client.response()
    assert response.complete
    assert response.header("connection") == "close"
    assert await client.ended()


async def test_requests_sent_ahead(rig: Rig, process: bool) -> None:
    """Pipelined requests are answered in their order, each with its own answer, and run one after another."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(b'{"tag":%d}' % (exchange.tag or 0)))
    gateway = await rig.gateway(upstream, cap=4, process=process)
    client = await rig.client(gateway)
    await client.send(b"".join(request_bytes("POST", OPENAI.path, OPENAI.body(tag)) for tag in range(12)))
    for tag in range(12):
        assert (await client.response()).json == {"tag": tag}
    assert upstream.tags == list(range(12))
    assert upstream.peak == 1


async def test_requests_sent_ahead_behind_a_stream(rig: Rig) -> None:
    """A request sent behind one that streams waits for its end and then gets its own answer."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    for tag in (1, 2):
        await client.post(OPENAI.path, OPENAI.body(tag, stream=tag == 1))
    exchange = await upstream.exchange(0)
    exchange.stream()
    assert (await client.response()).body == b"".join(STREAM)
    (await upstream.exchange(1)).answer()
    assert (await client.response()).body == WHOLE


async def test_a_chunked_request(rig: Rig, surface: Surface) -> None:
    """A body that comes in chunks goes up in one piece with its length."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    body = surface.body(1)
    await client.request("POST", surface.path, b"", "transfer-encoding: chunked", "content-type: application/json")
    for start in range(0, len(body), 10):
        piece = body[start : start + 10]
        await client.send(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece))
    await client.send(b"0\r\nx-trailer: 1\r\n\r\n")
    assert (await client.response()).status == 200
    (exchange,) = upstream.exchanges
    assert exchange.request.header("transfer-encoding") is None
    assert exchange.request.header("x-trailer") is None
    assert surface is not OPENAI or exchange.request.body == body


async def test_a_request_that_arrives_byte_by_byte(rig: Rig, surface: Surface) -> None:
    """However a request is cut into packets, it is the same request."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    for byte in request_bytes("POST", surface.path, surface.body(1), "content-type: application/json"):
        await client.send(bytes([byte]))
    assert (await client.response()).status == 200
    assert upstream.tags == [1]


# -- request ids ----------------------------------------------------------------------------------------------------


async def test_a_request_id_is_taken_over(rig: Rig, surface: Surface, stream: bool) -> None:
    """A sane x-request-id comes back on the response, goes up to the upstream, and stands in the log."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    response = await rig.ask(gateway, surface, 1, "x-request-id: trace-1.a:B_9", stream=stream)
    assert response.header("x-request-id") == "trace-1.a:B_9"
    assert surface is not ANTHROPIC or response.header("request-id") == "trace-1.a:B_9"
    assert upstream.exchanges[0].request.header("x-request-id") == "trace-1.a:B_9"
    await gateway.record(request_id="trace-1.a:B_9")


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "-rm", "a\tb", 'a"b', "a;b", "../x", "\xe9"])
async def test_a_request_id_is_made(rig: Rig, surface: Surface, given: str | None) -> None:
    """R47: without a sane id the gateway makes one, and uses it everywhere in its place."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    headers = [] if given is None else [f"x-request-id: {given}"]
    response = await rig.ask(gateway, surface, 1, *headers)
    made = response.header("x-request-id")
    assert re.fullmatch(r"req_[0-9a-f]{24}", made or "")
    assert upstream.exchanges[0].request.header("x-request-id") == made
    await gateway.record(request_id=made)


async def test_every_response_has_a_request_id(rig: Rig, surface: Surface) -> None:
    """Refusals, lists of models and unknown paths carry it as well, each another one."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    seen = set()
    for method, target in (("GET", surface.models_path), ("GET", f"{surface.models_path}x"), ("PUT", surface.path)):
        await client.request(method, target)
        response = await client.response()
        seen.add(response.header("x-request-id"))
        assert surface is not ANTHROPIC or response.header("request-id") == response.header("x-request-id")
    assert len(seen) == 3
    assert None not in seen


# -- what stays on its side -----------------------------------------------------------------------------------------


async def test_credentials_stay_here(rig: Rig, surface: Surface) -> None:
    """Q2, O8: what a client shows the gateway is not shown to the upstream; what describes the request is."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    secrets = ("authorization: Bearer sk-secret-1", "x-api-key: sk-secret-2", "cookie: session=secret-3")
    others = ("proxy-authorization: Basic secret-4", "x-forwarded-for: 10.0.0.9", "forwarded: for=10.0.0.9", "x-any: 1")
    kept = (
        "accept: text/event-stream",
        "user-agent: test/1",
        "traceparent: 00-1-2-01",
        "tracestate: a=b",
        "baggage: c=d",
    )
    await rig.ask(gateway, surface, 1, *secrets, *others, *kept)
    (exchange,) = upstream.exchanges
    assert b"secret" not in exchange.request.raw
    names = [name for name, _ in exchange.request.headers]
    assert sorted(names) == sorted(
        ["host", "content-type", "x-request-id", "accept-encoding", "content-length"]
        + [line.partition(":")[0] for line in kept]
    )
    for line in kept:
        name, _, value = line.partition(": ")
        assert exchange.request.header(name) == value


@pytest.mark.parametrize("target", ["{path}", "http://evil.test:1/{path}", "http://evil.test{path}"])
async def test_the_upstream_is_the_configured_one(rig: Rig, surface: Surface, target: str) -> None:
    """Neither Host nor an absolute target can choose where a request goes, or what the upstream is told its name is."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    path = target.format(path=surface.path)
    await client.request(
        "POST",
        path,
        surface.body(1),
        "host: evil.test",
        "x-forwarded-host: evil.test",
        "content-type: application/json",
    )
    response = await client.response()
    if response.status == 200:
        (exchange,) = upstream.exchanges
        assert exchange.request.header("host") == upstream.url.removeprefix("http://")
        assert exchange.request.target == "/v1/chat/completions"
        assert b"evil" not in exchange.request.raw
    else:
        assert response.status in (400, 404)


CLAUDE_CODE = (
    "anthropic-version: 2099-01-01",
    "anthropic-beta: claude-code-20250219,interleaved-thinking-2025-05-14,nobody-knows-2030-01-01",
    "anthropic-dangerous-direct-browser-access: true",
    "x-app: cli",
    "x-claude-code-session-id: 1234",
    "x-claude-remote-container-id: 1234",
    "x-stainless-lang: js",
    "x-stainless-retry-count: 1",
    "x-stainless-timeout: 600",
    "openai-organization: org-1",
    "openai-project: proj-1",
    "x-data-parallel-rank: 1",
    "x-openwebui-user-id: 1",
    "te: trailers",
    "sec-fetch-mode: cors",
)


async def test_headers_nobody_knows_are_accepted_and_stay_here(rig: Rig, surface: Surface) -> None:
    """Q3, Q4, O8: any version, any beta and any header of a client is fine, and none of them goes up."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.post(f"{surface.path}?beta=true", surface.body(1), *CLAUDE_CODE)
    assert (await client.response()).status == 200
    (exchange,) = upstream.exchanges
    names = {name for name, _ in exchange.request.headers}
    assert names == {"host", "content-type", "x-request-id", "accept-encoding", "content-length"}
    assert exchange.request.target == "/v1/chat/completions"


async def test_compression_is_never_asked_for(rig: Rig, surface: Surface) -> None:
    """O8: the upstream is asked for plain bytes, whatever the client would take: events are looked into here."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    await rig.ask(gateway, surface, 1, "accept-encoding: gzip, br")
    assert upstream.exchanges[0].request.header("accept-encoding") == "identity"


async def test_a_coding_that_came_unasked_is_passed_on_with_its_name(rig: Rig) -> None:
    """R43: on /v1 an upstream's content coding is left as it is, in header and body alike."""
    import gzip

    packed = gzip.compress(WHOLE)
    upstream = await rig.upstream(lambda exchange: exchange.answer(packed, "content-encoding: gzip"))
    gateway = await rig.gateway(upstream)
    response = await rig.ask(gateway, OPENAI)
    assert (response.header("content-encoding"), response.body) == ("gzip", packed)


async def test_header_values_keep_their_bytes(rig: Rig) -> None:
    """A header value that is not ASCII comes down with the bytes it had."""
    name = 'attachment; filename="é.mp3"'.encode()

    def script(exchange: Exchange) -> None:
        exchange.finish(
            head(200, "content-type: audio/mpeg", "content-length: 1")[:-2] + b"content-disposition: " + name
        )
        exchange.write(b"\r\n\r\nx")

    upstream = await rig.upstream(script)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.post("/v1/embeddings", OPENAI.body())
    response = await client.response()
    assert b"\r\ncontent-disposition: " + name + b"\r\n" in response.raw_head


async def test_an_answer_of_the_wrong_kind(rig: Rig, surface: Surface, stream: bool) -> None:
    """An upstream that streams unasked, or does not when asked, leaves no slot and no client behind."""
    upstream = await rig.upstream(lambda exchange: exchange.respond(stream=not stream))
    gateway = await rig.gateway(upstream)
    response = await rig.ask(gateway, surface, stream=stream)
    if surface is OPENAI:
        # Bytes are bytes here: the client gets what the upstream said, under its own content type.
        assert (response.status, response.complete) == (200, True)
        assert response.body == (WHOLE if stream else b"".join(STREAM))
    else:
        assert response.status == 502 or surface.in_band_error(response) is not None
    await rig.check_usable(gateway, upstream)


async def test_an_answer_that_is_no_document(rig: Rig, stream: bool) -> None:
    """Where an answer has to be understood and cannot be, the client is told, and the slot is free."""
    said = whole(b"<html>hello</html>", content_type="text/html")
    upstream = await rig.upstream(lambda exchange: exchange.finish(said))
    gateway = await rig.gateway(upstream)
    response = await rig.ask(gateway, ANTHROPIC, stream=stream)
    assert response.status == 502
    ANTHROPIC.error(response)
    await eventually(lambda: upstream.in_flight == 0)
    await rig.check_usable(gateway, upstream)


PAGE = whole(b"<html>sign in</html>", content_type="text/html; charset=utf-8")


@pytest.mark.parametrize("said", [PAGE, whole(b"hello", content_type="text/plain"), head(204)])
@pytest.mark.parametrize("path", [OPENAI.path, "/v1/completions", "/v1/responses", f"{OPENAI.path}/batch"])
async def test_a_success_that_is_no_answer(rig: Rig, path: str, stream: bool, said: bytes) -> None:
    """A page of a proxy in between is not passed on as a success: a client would take it for an empty answer."""
    upstream = await rig.upstream(lambda exchange: exchange.finish(said))
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.post(path, OPENAI.body(stream=stream))
    response = await client.response()
    assert 502 == response.status
    assert "upstream_broken" == OPENAI.code(response)
    assert "application/json was due" in OPENAI.error(response)["message"]
    await gateway.record(outcome="upstream_broken", status=502)
    await rig.check_usable(gateway, upstream)


async def test_a_transcription_is_text(rig: Rig) -> None:
    """Whisper's answers may be plain text, so there any content type passes."""
    upstream = await rig.upstream(lambda exchange: exchange.finish(whole(b"Hello", content_type="text/plain")))
    gateway = await rig.gateway(upstream)
    form = b'--XyZ\r\ncontent-disposition: form-data; name="model"\r\n\r\nreasoning\r\n--XyZ--\r\n'
    client = await rig.client(gateway)
    await client.request("POST", "/v1/audio/transcriptions", form, "content-type: multipart/form-data; boundary=XyZ")
    response = await client.response()
    assert (200, "text/plain", b"Hello") == (response.status, response.header("content-type"), response.body)
