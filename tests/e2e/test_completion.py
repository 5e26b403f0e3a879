"""Answers that go well: what the client asked reaches the upstream, and what the upstream said reaches the client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rig import (
    ANTHROPIC,
    DONE,
    FIRST_EVENT,
    OPENAI,
    STREAM,
    TEXT,
    TRANSCRIPTS,
    Exchange,
    Rig,
    Surface,
    answer,
    chunk,
    eventually,
    everywhere_both_ways,
    framed,
    head,
    whole,
)

# Real answers of a vLLM, for the requests that went well; the refused ones do not come through byte for byte.
ANSWERED = sorted(
    path.name.removesuffix(".request.json")
    for path in TRANSCRIPTS.glob("*.request.json")
    if not path.name.startswith(("error-", "anthropic-"))
)


@everywhere_both_ways
async def test_an_answer_reaches_the_client(rig: Rig, surface: Surface, stream: bool, process: bool) -> None:
    """The model's text comes to the client in its surface's form, and the slot is free afterwards."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=process)

    response = await rig.ask(gateway, surface, 7, stream=stream)

    assert response.status == 200
    assert response.complete
    assert surface.text(response) == TEXT
    assert not stream or surface.says_end(response)
    assert upstream.tags == [7]
    record = await gateway.record(surface=surface.name)
    assert ("completed", 200, stream) == (record["outcome"], record["status"], record["stream"])


@pytest.mark.parametrize("name", ANSWERED)
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
async def test_a_real_answer_passes_byte_for_byte(rig: Rig, name: str, piece: int) -> None:
    """O1, O6, O14: request and answer of a real vLLM pass unchanged, in whatever pieces the answer arrives."""
    request = (TRANSCRIPTS / f"{name}.request.json").read_bytes()
    said = (TRANSCRIPTS / f"{name}.body.txt").read_bytes()
    said_head = (TRANSCRIPTS / f"{name}.headers.txt").read_text().strip().replace("\r", "").split("\n")

    def replay(exchange: Exchange) -> None:
        exchange.write(("\r\n".join(said_head) + "\r\n\r\n").encode())
        if any(line.lower() == "transfer-encoding: chunked" for line in said_head):
            for start in range(0, len(said), piece):
                exchange.write(framed(said[start : start + piece]))
            exchange.finish(b"0\r\n\r\n")
        else:
            for start in range(0, len(said) - 1, piece):
                exchange.write(said[start : min(start + piece, len(said) - 1)])
            exchange.finish(said[-1:])

    upstream = await rig.upstream(replay)
    gateway = await rig.gateway(upstream, cap=2)
    client = await rig.client(gateway)
    operation = name.partition("-")[0]
    path = f"/v1/{operation}" if operation in ("completions", "responses") else "/v1/chat/completions"
    await client.post(path, request)
    response = await client.response()

    assert response.complete
    assert said == response.body
    (exchange,) = upstream.exchanges
    assert (path, request) == (exchange.request.target, exchange.request.body)
    (content_type,) = [line.partition(": ")[2] for line in said_head if line.lower().startswith("content-type:")]
    assert content_type == response.header("content-type")


async def test_the_body_goes_up_unchanged(rig: Rig) -> None:
    """Large integers, key order, duplicate keys, white space, escapes and unknown members go up as sent."""
    body = (
        b'{ "z":1,\t"seed": 123456789012345678901234567890, "model" : "reasoning","messages":[],\r\n "a":1.0e+2,'
        b'"a":2,"x":"\\u00e9\\ud83d\\ude00","\xc3\xa9":"\xf0\x9f\x98\x80","temperature":0.1000000000000000055}  \n'
    )
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.post(OPENAI.path, body)
    response = await client.response()

    assert response.status == 200
    (exchange,) = upstream.exchanges
    assert body == exchange.request.body


async def test_the_answer_comes_down_unchanged(rig: Rig) -> None:
    """An answer is relayed as bytes, and with its length."""
    said = b'{"choices":  [], "created":1234567890123456789012, "x":"\\u0041\xc3\xa9", "choices":[1]}\n'
    upstream = await rig.upstream(lambda exchange: exchange.answer(said))
    gateway = await rig.gateway(upstream)
    response = await rig.ask(gateway, OPENAI)

    assert said == response.body
    assert str(len(said)) == response.header("content-length")


async def test_an_event_arrives_before_the_next_is_sent(rig: Rig, process: bool) -> None:
    """Each event is passed on at once and alone; nothing waits for the next one."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    client = await rig.post(gateway, OPENAI, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream()
    response = await client.read_head()
    assert client.quiet()

    for event in STREAM:
        exchange.event(event)
        assert event == await client.read_event()
        assert client.quiet()

    exchange.end_stream()
    await client.read_body(response)
    assert response.complete


async def test_text_arrives_before_more_is_sent(rig: Rig) -> None:
    """On the Anthropic surface, too, a piece of text reaches its client before the upstream says the next one."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.post(gateway, ANTHROPIC, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(FIRST_EVENT)
    response = await client.read_head()
    seen = b""
    for word in (b"one", b"two", b"three"):
        exchange.event(chunk({"content": word.decode()}))
        while word not in seen:
            seen += await client.read_event()
        # Whole events only, whatever they are.
        assert seen.endswith(b"\n\n")
    exchange.end_stream(*STREAM[3:])
    await client.read_body(response)
    response.body = seen + response.body
    assert ANTHROPIC.text(response) == "onetwothree"
    assert ANTHROPIC.says_end(response)


async def test_an_event_is_passed_on_when_it_is_complete(rig: Rig) -> None:
    """Half an event waits for its other half, so that a failure in between can be told in an event of its own."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.post(gateway, OPENAI, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(STREAM[0] + STREAM[1][:20])
    response = await client.read_head()

    assert STREAM[0] == await client.read_event()
    exchange.event(STREAM[1][20:-1])
    exchange.event(STREAM[1][-1:] + STREAM[2][:1])
    assert STREAM[1] == await client.read_event()
    exchange.end_stream(STREAM[2][1:], DONE)
    await client.read_body(response)
    assert STREAM[2] + DONE == response.body


async def test_a_large_event_passes(rig: Rig) -> None:
    """R40: an event of three megabytes, larger than any line limit, passes unchanged."""
    event = b'data: {"choices":[],"x":"' + "é€😀".encode() * 333333 + b'"}\n\n'
    upstream = await rig.upstream(lambda exchange: exchange.stream((event, DONE)))
    gateway = await rig.gateway(upstream)
    response = await rig.ask(gateway, OPENAI, stream=True)

    assert response.complete
    assert event + DONE == response.body


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_every_endpoint_goes_to_its_own_path(rig: Rig, path: str, more: dict[str, object]) -> None:
    """A POST below /v1 reaches the same path at the upstream, below the prefix of its address."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(b"{}"))
    gateway = await rig.gateway(f"{upstream.url}/engine/one/")
    client = await rig.client(gateway)
    body = json.dumps({"model": "reasoning"} | more).encode()
    await client.post(f"{path}?api-version=1", body)
    response = await client.response()

    assert (response.status, response.body) == (200, b"{}")
    (exchange,) = upstream.exchanges
    assert (f"/engine/one{path}", body) == (exchange.request.target, exchange.request.body)


async def test_a_recording_goes_up_as_it_is(rig: Rig) -> None:
    """A multipart form goes to the upstream with its boundary and its bytes."""
    body = (
        b'--XyZ\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\x00\xff\r\n\r\n'
        b'--XyZ\r\ncontent-disposition: form-data; name="model"\r\n\r\nreasoning\r\n--XyZ--\r\n'
    )
    upstream = await rig.upstream(lambda exchange: exchange.answer(b'{"text":"hello"}'))
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.request("POST", "/v1/audio/transcriptions", body, "content-type: multipart/form-data; boundary=XyZ")
    response = await client.response()

    assert response.body == b'{"text":"hello"}'
    (exchange,) = upstream.exchanges
    assert body == exchange.request.body
    assert exchange.request.header("content-type") == "multipart/form-data; boundary=XyZ"


async def test_an_answer_without_a_body(rig: Rig) -> None:
    """A 204 has no body and no length, and its connection goes on; of an operation whose answer may be anything."""
    upstream = await rig.upstream(lambda exchange: exchange.finish(head(204)))
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    for tag in (1, 2):
        await client.post("/v1/embeddings", OPENAI.body(tag))
        response = await client.response()
        assert (response.status, response.body) == (204, b"")
        assert response.header("content-length") is None
        assert response.header("transfer-encoding") is None
    assert len(upstream.connections) == 1


async def test_an_answer_that_ends_with_its_connection(rig: Rig, stream: bool) -> None:
    """A body without length or chunks is whole when the upstream closes in order; the client gets it chunked."""
    said = b"".join(STREAM) if stream else whole(b"").partition(b"\r\n\r\n")[0]
    kind = "text/event-stream" if stream else "application/json"

    def until_close(exchange: Exchange) -> None:
        exchange.write(head(200, f"content-type: {kind}") + said)
        exchange.close()

    upstream = await rig.upstream(until_close)
    gateway = await rig.gateway(upstream)
    response = await rig.ask(gateway, OPENAI, stream=stream)

    assert response.complete
    assert response.header("transfer-encoding") == "chunked"
    assert said == response.body


async def test_what_the_gateway_adds_and_keeps_from_an_answer(rig: Rig) -> None:
    """Of the upstream's headers come down those that speak of the answer; a stream is marked as not to be buffered."""

    def script(exchange: Exchange) -> None:
        exchange.write(
            head(
                200,
                "content-type: text/event-stream",
                "cache-control: no-store",
                "server: uvicorn",
                "set-cookie: a=b",
                "x-internal: 10.0.0.1",
                "connection: x-hop",
                "x-hop: 1",
                "transfer-encoding: chunked",
            )
        )
        exchange.end_stream(*STREAM)

    upstream = await rig.upstream(script)
    gateway = await rig.gateway(upstream)
    response = await rig.ask(gateway, OPENAI, 0, "x-request-id: mine-1", stream=True)

    assert {
        "content-type",
        "cache-control",
        "x-accel-buffering",
        "x-request-id",
        "x-aiogw-queue-position",
        "x-aiogw-queue-seconds",
        "transfer-encoding",
        "date",
    } == {name for name, _ in response.headers}
    assert response.header("cache-control") == "no-store"
    assert response.header("x-accel-buffering") == "no"


@pytest.mark.parametrize("surface", [OPENAI, ANTHROPIC], ids=lambda surface: surface.name)
async def test_models_are_answered_here(rig: Rig, surface: Surface) -> None:
    """R49: the list of models and each model come from the configuration; no upstream is asked, and HEAD works too."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, models=["reasoning", "org/second"])
    path = surface.models_path
    client = await rig.client(gateway)

    await client.request("HEAD", path)
    response = await client.response(to="HEAD")
    assert (response.status, response.complete) == (200, True)

    await client.request("GET", path)
    response = await client.response()
    assert response.status == 200
    assert [model["id"] for model in response.json["data"]] == ["reasoning", "org/second"]

    for model in ("reasoning", "org/second", "org%2Fsecond"):
        await client.request("GET", f"{path}/{model}")
        response = await client.response()
        assert (200, model.replace("%2F", "/")) == (response.status, response.json["id"])

    await client.request("GET", f"{path}/third")
    response = await client.response()
    assert response.status == 404
    assert "org/second" in surface.error(response)["message"]
    assert upstream.exchanges == []


@pytest.mark.parametrize("path", ["/llm", "/llm/"])
async def test_claude_codes_knock_is_answered(rig: Rig, path: str) -> None:
    """HEAD /llm says 200, which is how Claude Code looks whether anybody is there."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.request("HEAD", path)
    response = await client.response(to="HEAD")
    assert response.status == 200


async def test_a_query_string_changes_nothing(rig: Rig, surface: Surface) -> None:
    """Clients may put a query behind the path, as Claude Code does."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    client = await rig.client(gateway)
    await client.post(f"{surface.path}?beta=true", surface.body())
    response = await client.response()

    assert surface.text(response) == TEXT
    (exchange,) = upstream.exchanges
    assert exchange.request.target == "/v1/chat/completions"


async def test_many_requests_on_many_connections(rig: Rig, surface: Surface) -> None:
    """A hundred requests under a cap of four all get their own answers and use at most four connections."""

    def echo(exchange: Exchange) -> None:
        exchange.stream((FIRST_EVENT, chunk({"content": f"for {exchange.tag}"}), *STREAM[3:]))

    upstream = await rig.upstream(echo)
    gateway = await rig.gateway(upstream, cap=4, queue_limit=100)
    clients = [await rig.post(gateway, surface, tag, stream=True) for tag in range(100)]
    for tag, client in enumerate(clients):
        assert f"for {tag}" == surface.text(await client.response())
        client.close()
    assert upstream.peak <= 4
    assert len(upstream.connections) <= 4
    assert sorted(upstream.tags) == list(range(100))


async def test_without_a_gate_nobody_waits(rig: Rig) -> None:
    """An upstream with admission = "unlimited" gets 150 requests at once: there is no hidden limit on connections."""
    # R33
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, admission="unlimited")
    clients = [await rig.post(gateway, OPENAI, tag) for tag in range(150)]
    await eventually(lambda: upstream.in_flight == 150, what=lambda: f"{upstream.in_flight} of 150")
    assert await gateway.metric("aiogw_slots_in_use", upstream="reasoning") == 150
    for exchange in list(upstream.exchanges):
        exchange.answer()
    for client in clients:
        response = await client.response()
        assert (response.status, response.header("x-aiogw-queue-position")) == (200, None)
    await eventually(lambda: len(gateway.records) == 150)
    assert not any("position" in record for record in gateway.records)


def test_transcripts_are_there() -> None:
    """The transcripts are found, so that the tests above have not silently become none."""
    assert {"chat-whole", "chat-stream-usage", "completions-stream"} <= set(ANSWERED)
    assert Path(TRANSCRIPTS).is_dir()
