"""Requests that cannot be served: each is told why, in its surface's shape; none costs a slot or reaches an engine."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from rig import (
    ANTHROPIC,
    OPENAI,
    RawClient,
    Response,
    Rig,
    RunningGateway,
    ScriptedUpstream,
    Surface,
    answer,
    eventually,
)

from aiogw import server

LIMIT = 1 << 20


async def start(rig: Rig) -> tuple[ScriptedUpstream, RunningGateway, RawClient]:
    """An upstream that would answer, a gateway that takes bodies of up to a megabyte, and a client."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, server={"max_body_bytes": LIMIT}, models=["reasoning", "second"])
    return upstream, gateway, await rig.client(gateway)


async def refused(
    upstream: ScriptedUpstream, gateway: RunningGateway, surface: Surface, response: Response, status: int, code: str
) -> str:
    """Check that a refusal is one, was counted as what it is, and cost nothing; returns its message."""
    message = surface.error(response)["message"]
    assert response.status == status
    assert surface.code(response) in (code, None)
    assert response.header("x-should-retry") == "false"
    assert response.header("retry-after") is None
    record = await gateway.record(outcome=code)
    assert (record["status"], record["surface"]) == (status, surface.name)
    assert upstream.exchanges == []
    assert await gateway.metric("aiogw_grants_total", upstream="reasoning") == 0
    return message


# -- size -----------------------------------------------------------------------------------------------------------


async def test_a_declared_body_that_is_too_large(rig: Rig, surface: Surface) -> None:
    """R35, Q5, E18: a body that announces more than max_body_bytes is refused before any of it is read."""
    upstream, gateway, client = await start(rig)
    await client.send(f"POST {surface.path} HTTP/1.1\r\nhost: x\r\ncontent-length: {LIMIT + 1}\r\n\r\n".encode())
    message = await refused(upstream, gateway, surface, await client.response(), 413, "request_too_large")
    assert str(LIMIT) in message


async def test_a_chunked_body_that_becomes_too_large(rig: Rig, surface: Surface) -> None:
    """A body without a length is refused as soon as it has grown too large, not when it ends."""
    upstream, gateway, client = await start(rig)
    await client.request("POST", surface.path, b"", "transfer-encoding: chunked")
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    for _ in range(LIMIT // 65536 + 1):
        await client.send(piece)
    await refused(upstream, gateway, surface, await client.response(), 413, "request_too_large")


async def test_a_body_of_exactly_the_limit(rig: Rig, surface: Surface) -> None:
    """R45: the limit itself is allowed; one byte more is not."""
    upstream, gateway, client = await start(rig)
    body = surface.body(1, padding=LIMIT - len(surface.body(1)))
    assert len(body) == LIMIT
    await client.post(surface.path, body)
    assert (await client.response()).status == 200
    await client.post(surface.path, body.replace(b"tag:1", b"tag:11"))
    assert (await client.response()).status == 413
    assert upstream.tags == [1]
    await gateway.record(outcome="completed", request_bytes=LIMIT)


async def test_continue_is_not_said_to_a_body_that_is_too_large(rig: Rig, surface: Surface) -> None:
    """R46: a client that asks first is told 413 and not 100."""
    upstream, gateway, client = await start(rig)
    length = f"content-length: {LIMIT + 1}"
    await client.send(f"POST {surface.path} HTTP/1.1\r\nhost: x\r\n{length}\r\nexpect: 100-continue\r\n\r\n".encode())
    await refused(upstream, gateway, surface, await client.response(), 413, "request_too_large")


async def test_continue_is_not_said_to_an_unknown_path(rig: Rig) -> None:
    """Nor is a client asked to send a body for what does not exist."""
    _, _, client = await start(rig)
    await client.send(b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n")
    assert (await client.response()).status == 404


async def test_continue_is_said_to_a_body_that_is_fine(rig: Rig, surface: Surface) -> None:
    """A client that asks first and may send hears 100, sends, and gets its answer."""
    upstream, _, client = await start(rig)
    body = surface.body(1)
    head = f"POST {surface.path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nexpect: 100-continue\r\n\r\n"
    await client.send(head.encode())
    interim = await client.read_head()
    assert (interim.status, interim.headers) == (100, [])
    await client.send(body)
    assert (await client.response()).status == 200
    assert upstream.tags == [1]


# -- coding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_compressed_body(rig: Rig, surface: Surface, coding: str) -> None:
    """O16: a compressed request is inflated here, and goes up as plain bytes with no word of a coding."""
    upstream, _, client = await start(rig)
    body = surface.body(1)
    packed = gzip.compress(body) if coding == "gzip" else zlib.compress(body)
    await client.request("POST", surface.path, packed, f"content-encoding: {coding}")
    assert (await client.response()).status == 200
    (exchange,) = upstream.exchanges
    assert exchange.tag == 1
    assert exchange.request.header("content-encoding") is None
    assert surface is not OPENAI or exchange.request.body == body


async def test_a_bomb(rig: Rig, surface: Surface) -> None:
    """Q5, O16: what counts is the size after inflating: some kilobytes that become forty megabytes are too large."""
    # R44
    upstream, gateway, client = await start(rig)
    bomb = gzip.compress(b" " * (40 << 20), compresslevel=9)
    assert len(bomb) < 1 << 17
    await client.request("POST", surface.path, bomb, "content-encoding: gzip")
    await refused(upstream, gateway, surface, await client.response(), 413, "request_too_large")


async def test_a_body_that_cannot_be_inflated(rig: Rig, surface: Surface) -> None:
    """A body that is not what its coding says is a fault of the request."""
    upstream, gateway, client = await start(rig)
    await client.request("POST", surface.path, b"this is not gzip", "content-encoding: gzip")
    await refused(upstream, gateway, surface, await client.response(), 400, "invalid_body")


# -- content --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n",
        b"{",
        b"nonsense",
        b'{"model": "reasoning", }',
        b'"reasoning"',
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model":"reasoning"} {"model":"reasoning"}',
    ],
    ids=["empty", "blank", "open", "word", "comma", "string", "array", "null", "bytes", "two"],
)
async def test_a_body_that_is_no_document(rig: Rig, surface: Surface, body: bytes) -> None:
    """A body that is not a JSON object is refused with a sentence about what is wrong with it."""
    upstream, gateway, client = await start(rig)
    await client.post(surface.path, body)
    message = await refused(upstream, gateway, surface, await client.response(), 400, "invalid_body")
    assert len(message) > 20


async def test_a_body_that_is_nested_too_deeply(rig: Rig, surface: Surface) -> None:
    """A hundred thousand brackets are refused in order, and not by a stack that overflows."""
    upstream, _, client = await start(rig)
    await client.post(surface.path, b'{"model":"reasoning","max_tokens":1,"messages":' + b"[" * 100000)
    response = await client.response()
    assert response.status == 400
    surface.error(response)
    assert upstream.exchanges == []


async def test_an_unknown_model(rig: Rig, surface: Surface) -> None:
    """The message says which model is not there and which are."""
    upstream, gateway, client = await start(rig)
    await client.post(surface.path, surface.body(model="gpt-9"))
    message = await refused(upstream, gateway, surface, await client.response(), 404, "model_not_found")
    for name in ("gpt-9", "reasoning", "second"):
        assert name in message


@pytest.mark.parametrize(
    "model", ["a\r\nx-evil: 1", "x" * 100000, "\u202e\u0000\ud800", "reasoning ", "Reasoning", "../x"]
)
async def test_a_hostile_model_name(rig: Rig, surface: Surface, model: str) -> None:
    """Whatever a client calls a model, it is not found, and the answer and the log stay short and plain."""
    upstream, gateway, client = await start(rig)
    await client.post(surface.path, surface.body(model=model))
    response = await client.response()
    await refused(upstream, gateway, surface, response, 404, "model_not_found")
    assert len(response.body) < 5000
    assert response.header("x-evil") is None
    assert b"\x00" not in response.body
    (record,) = gateway.records
    # Half of a surrogate pair is no character, and a dialect may say so.
    assert record["model"] in (model[:200], model.replace("\ud800", "\ufffd"))


@pytest.mark.parametrize("model", [None, 7, ["reasoning"], {"id": "reasoning"}, True, ""])
async def test_a_model_that_is_no_name(rig: Rig, surface: Surface, model: object) -> None:
    """A model that is not a string is a bad field, named as such."""
    upstream, gateway, client = await start(rig)
    document = json.loads(surface.body()) | {"model": model}
    await client.post(surface.path, json.dumps(document).encode())
    message = await refused(upstream, gateway, surface, await client.response(), 400, "invalid_request")
    assert message.startswith("model")


async def test_no_model(rig: Rig, surface: Surface) -> None:
    """A request that names no model is refused: there is no default one."""
    upstream, gateway, client = await start(rig)
    document = json.loads(surface.body())
    del document["model"]
    await client.post(surface.path, json.dumps(document).encode())
    message = await refused(upstream, gateway, surface, await client.response(), 400, "invalid_request")
    assert message.startswith("model")


async def test_an_empty_list_of_messages(rig: Rig) -> None:
    """On /v1 that is the upstream's business and passes; on /llm it is a bad field."""
    upstream, _, client = await start(rig)
    await client.post(OPENAI.path, b'{"model":"reasoning","messages":[]}')
    assert (await client.response()).status == 200
    await client.post(ANTHROPIC.path, b'{"model":"reasoning","max_tokens":1,"messages":[]}')
    response = await client.response()
    assert response.status == 400
    assert ANTHROPIC.error(response)["message"].startswith("messages")
    assert len(upstream.exchanges) == 1


# -- paths and methods ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "surface"),
    [
        ("/v1", OPENAI),
        ("/v1/", OPENAI),
        ("/v1/nothing", OPENAI),
        ("/v1/chat/completions/", OPENAI),
        ("/v1/messages", OPENAI),
        ("/v1/v1/chat/completions", OPENAI),
        ("/chat/completions", OPENAI),
        ("/", OPENAI),
        ("/metrics", OPENAI),
        ("/llmx/v1/messages", OPENAI),
        ("/llm/v1", ANTHROPIC),
        ("/llm/v1/nothing", ANTHROPIC),
        ("/llm/v1/chat/completions", ANTHROPIC),
        ("/llm/v1/messages/batches", ANTHROPIC),
    ],
)
async def test_an_unknown_path(rig: Rig, path: str, surface: Surface) -> None:
    """A path that is not served is a 404 in the shape of the surface it lies below, with a hint at those that are."""
    # R67
    upstream, gateway, client = await start(rig)
    await client.post(path, surface.body())
    message = await refused(upstream, gateway, surface, await client.response(), 404, "not_found")
    assert path in message
    assert "/v1" in message


@pytest.mark.parametrize("path", ["/v1/%2e%2e/metrics", "/v1/chat%2fcompletions", "//evil.test/v1/x", "/v1/..%5cx"])
async def test_a_path_in_disguise(rig: Rig, path: str) -> None:
    """A path is compared with those that are served and never joined to an address: a disguise leads nowhere else."""
    upstream, _, client = await start(rig)
    await client.post(path, OPENAI.body())
    response = await client.response()
    assert response.status in (200, 400, 404)
    assert all(exchange.request.target == OPENAI.path for exchange in upstream.exchanges)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
async def test_a_wrong_method(rig: Rig, surface: Surface, method: str) -> None:
    """R68: a method that an endpoint does not take is a 405 that says which it does."""
    upstream, _, client = await start(rig)
    await client.request(method, surface.path)
    response = await client.response(to=method)
    assert response.status == 405
    assert response.header("allow") == "POST"
    if method != "HEAD":
        assert "POST" in surface.error(response)["message"]
    assert upstream.exchanges == []


async def test_models_are_only_read(rig: Rig, surface: Surface) -> None:
    """The list of models takes no POST."""
    _, gateway, client = await start(rig)
    await client.post(surface.models_path, b"{}")
    response = await client.response()
    assert response.status == 405
    assert "GET" in (response.header("allow") or "")
    surface.error(response)
    await gateway.record(outcome="method_not_allowed")


# -- framing --------------------------------------------------------------------------------------------------------


IN_DOUBT = (
    "content-length: abc",
    "content-length: -1",
    "content-length: +5",
    "content-length: 5\r\ncontent-length: 6",
    "content-length: 5\r\ntransfer-encoding: chunked",
    "transfer-encoding: chunked, identity",
    "transfer-encoding: xchunked",
    "na me: x",
    "name : x",
    " folded: x",
    "x: a\x00b",
)


async def test_a_request_whose_framing_is_in_doubt(rig: Rig, process: bool) -> None:
    """Where it is in doubt how long a request is, it is refused and the connection closed; nothing of it goes up."""
    # R48
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=process)
    smuggled = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    for head in IN_DOUBT:
        client = await rig.client(gateway)
        lines = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n"
        await client.send(lines.encode("latin-1") + smuggled)
        response = await client.response()
        assert response.status == 400, head
        assert await client.ended()
        client.close()
    assert upstream.exchanges == []


async def test_a_chunk_that_lies(rig: Rig, surface: Surface) -> None:
    """R50: a body whose chunks make no sense is a 400 in its surface's shape as soon as they do not, and the end."""
    upstream, gateway, client = await start(rig)
    await client.request("POST", surface.path, b"", "transfer-encoding: chunked", "expect: 100-continue")
    assert (await client.read_head()).status == 100
    await client.send(b"2\r\n{}\r\nzz\r\n")
    response = await client.response()
    await refused(upstream, gateway, surface, response, 400, "invalid_body")
    assert response.header("connection") == "close"
    assert await client.ended()


async def test_a_chunk_that_lies_behind_a_request(rig: Rig, process: bool) -> None:
    """R50: the same where it has come while its connection was still busy with the request before."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.post(gateway, OPENAI, 1)
    exchange = await upstream.exchange(0)
    await client.request("POST", OPENAI.path, b"", "transfer-encoding: chunked")
    await gateway.metrics()  # once that has been answered, the head has been read
    await client.send(b"zz\r\n")
    await gateway.metrics()
    exchange.answer()
    assert (await client.response()).status == 200
    assert (await client.response()).status == 400
    assert await client.ended()


async def test_what_is_not_a_request(rig: Rig, process: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R66: it is refused with an id and counted, and its connection ends at once."""
    monkeypatch.setattr(server, "LINGER_SECONDS", 60)
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.client(gateway)
    await client.send(b"GET /secret HTTP/1.1\r\nhost: a\r\nsecret\r\n\r\n")
    response = await client.response()
    assert response.status == 400
    assert OPENAI.code(response) == "malformed_request"
    assert "secret" not in OPENAI.error(response)["message"]
    assert response.header("connection") == "close"
    assert response.header("x-should-retry") == "false"
    assert await client.ended()
    assert await gateway.metric("aiogw_malformed_requests_total") >= 1


async def test_whoever_stays_behind_a_refusal_is_left(rig: Rig) -> None:
    """A client that does not close its side keeps no descriptor here for longer than it takes to read the answer."""
    upstream = await rig.upstream()
    gateway = await rig.daemon(upstream)
    # The event loop opens a file of its own for its first connection.
    assert (await gateway.admin("/livez")).status == 200
    before = gateway.open_files
    client = await rig.client(gateway)
    await client.send(b"nonsense\r\n\r\n")
    assert (await client.response()).status == 400
    await eventually(lambda: gateway.open_files <= before)


@pytest.mark.parametrize("field", ["cookie: {}", "{}: 1"], ids=["value", "name"])
async def test_a_field_that_is_too_long(rig: Rig, field: str) -> None:
    """R66: whoever sends megabytes in one field can read what is wrong: the answer is not lost to a reset."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.request("GET", "/v1/models", None, field.format("x" * (16 << 20)))
    response = await client.response()
    assert response.status == 400
    assert response.complete
    assert "longer than 32768 bytes" in OPENAI.error(response)["message"]


async def test_a_body_that_is_not_asked_for(rig: Rig, surface: Surface) -> None:
    """R35, R46: behind a refusal instead of a 100 nothing is read as a request or a body: the connection is closed."""
    upstream, gateway, client = await start(rig)
    length = f"content-length: {LIMIT + 1}"
    await client.request("POST", surface.path, None, length, "expect: 100-continue")
    response = await client.response()
    await refused(upstream, gateway, surface, response, 413, "request_too_large")
    assert response.header("connection") == "close"
    await client.post(surface.path, surface.body(1))
    client.half_close()
    assert await client.ended()
    assert upstream.exchanges == []


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "x-gzip"])
async def test_a_coding_that_is_not_known(rig: Rig, surface: Surface, coding: str) -> None:
    """R43: a 415 that names what would do, whatever happens to be installed, and no 100 before it."""
    upstream, gateway, client = await start(rig)
    await client.post(surface.path, surface.body(), f"content-encoding: {coding}", "expect: 100-continue")
    message = await refused(upstream, gateway, surface, await client.response(), 415, "unsupported_encoding")
    assert "gzip or deflate" in message
    assert coding in message
