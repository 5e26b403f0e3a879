"""What a response on /v1 is looked into for: its usage, its reasoning, its end; and the signs of life before it.

The rule ids are those of dialects.md.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from specimens import OCCUPANCY

from aiogw.canonical import Operation, ResponseHead, TokenUsage
from aiogw.dialects.openai import responses
from aiogw.dialects.openai.responses import ACCOUNTED_BYTES, HELD_BYTES, PassThrough
from aiogw.dialects.openai.terms import ReplyTerms
from aiogw.errors import GatewayError, QueueTimeout, UpstreamBroken, UpstreamStatus

TRANSCRIPTS = Path(__file__).parent.parent / "transcripts" / "vllm-0.32"

TERMS = ReplyTerms(
    upstream="reasoning",
    stream=True,
    operation=Operation.CHAT,
    must_finish=True,
    accounting=False,
    hide_usage=False,
    reasoning_field="reasoning",
    repeat_reasoning_as=None,
)
ACCOUNTED = evolve(TERMS, accounting=True, hide_usage=True)
TWICE = evolve(TERMS, repeat_reasoning_as="reasoning_content")
WHOLE = evolve(TERMS, stream=False)

EVENTS = ResponseHead(status=200, content_type="text/event-stream; charset=utf-8", content_length=None)
JSON = ResponseHead(status=200, content_type="application/json", content_length=None)

DONE = b"data: [DONE]\n\n"
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":20,"total_tokens":22,"completion_tokens":2}}\n\n'
COST = TokenUsage(prompt_tokens=20, completion_tokens=2)
REFUSAL = QueueTimeout(upstream="reasoning", occupancy=OCCUPANCY, waited_seconds=9, retry_after_seconds=3)


def chunk(text: str, **more: Any) -> bytes:
    document = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def begun(terms: ReplyTerms = TERMS, head: ResponseHead = EVENTS) -> PassThrough:
    encoder = PassThrough(terms)
    encoder.begin(head)
    return encoder


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def relay(encoder: PassThrough, *pieces: bytes) -> bytes:
    return b"".join([*(encoder.feed(piece, last=False) for piece in pieces), encoder.feed(b"", last=True)])


def broken(encoder: PassThrough, *pieces: bytes) -> bytes:
    """What the client gets of a stream that ends badly: all of its events, then the error event."""
    out = b"".join(encoder.feed(piece, last=False) for piece in pieces)
    with pytest.raises(UpstreamBroken) as caught:
        encoder.feed(b"", last=True)
    told = encoder.fail(caught.value, "req_1")
    assert told is not None
    return out + told


# -- accounting -----------------------------------------------------------------------------------------------------

STREAM = chunk("Hello") + chunk(" world") + LAST


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=8))
def test_the_usage_nobody_asked_for_is_hidden(places: list[int]) -> None:
    """O3: one event is dropped and everything else passes, however the stream is cut."""
    encoder = begun(ACCOUNTED)
    assert STREAM + DONE == relay(encoder, *cut(STREAM + USAGE + DONE, places))
    assert COST == encoder.usage


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"], ids=repr)
def test_the_usage_is_hidden_with_any_line_ends(end: bytes) -> None:
    """O3: also where the upstream ends its lines in another way."""
    body = (STREAM + USAGE + DONE).replace(b"\n\n", end)
    assert (STREAM + DONE).replace(b"\n\n", end) == relay(begun(ACCOUNTED), body)


def test_the_usage_the_client_asked_for_passes() -> None:
    """O3: nothing is hidden, and it is read all the same."""
    encoder = begun(evolve(ACCOUNTED, hide_usage=False))
    assert STREAM + USAGE + DONE == relay(encoder, STREAM + USAGE + DONE)
    assert COST == encoder.usage


def test_without_accounting_nothing_is_read() -> None:
    """O3: the switch switches all of it."""
    encoder = begun()
    assert STREAM + USAGE + DONE == relay(encoder, STREAM + USAGE + DONE)
    assert encoder.usage is None


PASSING = [
    chunk("a", usage={"prompt_tokens": 20, "completion_tokens": 1}),
    chunk("a", usage=None),
    b'data: {"choices":[]}\n\n',
    b'data: {"choices":[],"usage":null}\n\n',
    b'data: {"usage":{"prompt_tokens":20,"completion_tokens":2}}\n\n',
    b'data: {"choices":null,"usage":{"prompt_tokens":20,"completion_tokens":2}}\n\n',
    b'data: {"choices":[],"prompt_filter_results":[]}\n\n',
    b': "usage" "choices":[]\n\n',
    b'data: "usage"\n\n',
    chunk('{"choices":[],"usage":{}}'),
    b'data: {"choices":"x","usage":1}\n\n',
    b'data: {"choices":[],"usage"',
]


@pytest.mark.parametrize("event", PASSING, ids=range(len(PASSING)))
def test_only_that_event_is_hidden(event: bytes) -> None:
    """O4: usage beside choices, no usage, an empty list alone, and what cannot be read, all pass."""
    assert STREAM + event == relay(begun(ACCOUNTED), STREAM + event)


def test_usage_on_every_chunk_counts_once() -> None:
    """O4: what counts is the last that was said."""
    encoder = begun(evolve(ACCOUNTED, hide_usage=False))
    for tokens in range(3):
        encoder.feed(chunk("a", usage={"prompt_tokens": 20, "completion_tokens": tokens}), last=False)
    assert TokenUsage(prompt_tokens=20, completion_tokens=2) == encoder.usage


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_the_usage_of_a_whole_answer_is_read(size: int) -> None:
    """O6: it passes piece by piece as it comes, and is looked at in its end."""
    body = (TRANSCRIPTS / "chat-whole.body.txt").read_bytes()
    encoder = begun(evolve(WHOLE, accounting=True), JSON)
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    assert pieces == [encoder.feed(piece, last=False) for piece in pieces]
    assert b"" == encoder.feed(b"", last=True)
    told = json.loads(body)["usage"]
    expected = TokenUsage(prompt_tokens=told["prompt_tokens"], completion_tokens=told["completion_tokens"])
    assert expected == encoder.usage


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"{}", b'{"usage":7}', b"\xff", b"[" * 100_000, b'{"x":' * 100_000], ids=range(8)
)
def test_a_whole_answer_without_usage_passes(body: bytes) -> None:
    """O6: what cannot be read is the client's to judge."""
    encoder = begun(evolve(WHOLE, accounting=True), JSON)
    assert body == relay(encoder, body)
    assert encoder.usage is None


def test_a_huge_answer_is_not_kept() -> None:
    """O6: beyond a megabyte nothing is held for the sake of accounting."""
    encoder = begun(evolve(WHOLE, accounting=True), JSON)
    piece = b"x" * (ACCOUNTED_BYTES // 2)
    for _ in range(64):
        assert piece is encoder.feed(piece, last=False)
    assert sum(map(len, encoder._whole)) < 2 * ACCOUNTED_BYTES


# -- the second name of reasoning -----------------------------------------------------------------------------------


def delta(**members: Any) -> bytes:
    document = {"seed": 1e2, "choices": [{"index": 0, "delta": members, "finish_reason": None}]}
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=6))
def test_reasoning_is_repeated_in_a_stream(places: list[int]) -> None:
    """O15: under the second name, with the same bytes; chunks without it stay as they are."""
    sent = delta(reasoning="hm\u00e9", content=None) + delta(content="a") + LAST + DONE
    expected = (
        delta(reasoning="hm\u00e9", content=None, reasoning_content="hm\u00e9") + delta(content="a") + LAST + DONE
    )
    assert expected == relay(begun(TWICE), *cut(sent, places))


def test_a_whole_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """O15: an answer that has to be kept whole, to be changed, has a bound."""
    monkeypatch.setattr(responses, "REWRITTEN_BYTES", 10)
    passing = PassThrough(evolve(TWICE, stream=False))
    passing.begin(ResponseHead(status=200, content_type="application/json", content_length=None))
    assert passing.feed(b"x" * 10, last=False) == b""
    with pytest.raises(UpstreamBroken, match="larger than 10 bytes"):
        passing.feed(b"x", last=False)


def test_reasoning_is_repeated_in_a_whole_answer() -> None:
    """O15: in every choice, with numbers and escapes as they were, and without the length that no longer holds."""
    body = (
        b'{"x":1e2,"choices":[{"index":0,"message":{"role":"assistant","reasoning":"h\\u00e9","content":"a"},'
        b'"logprobs":9007199254740993},{"index":1,"message":{"reasoning":null,"content":"b"}}]}'
    )
    encoder = begun(evolve(TWICE, stream=False), evolve(JSON, content_length=len(body)))
    assert encoder.head is not None
    assert encoder.head.content_length is None
    assert [b"", b""] == [encoder.feed(body[:50], last=False), encoder.feed(body[50:], last=False)]
    expected = body.replace(b'"content":"a"', b'"content":"a","reasoning_content":"h\\u00e9"')
    expected = expected.replace(b'"content":"b"', b'"content":"b","reasoning_content":null')
    assert expected == encoder.feed(b"", last=True)


UNCHANGED = [
    delta(reasoning="a", reasoning_content="b"),
    delta(content="a"),
    b'data: {"choices":[{"index":0,"text":"reasoning \\"delta\\""}]}\n\n',
    b'data: {"choices":[{"delta":null}]}\n\n',
    b'data: {"choices":{"delta":{"reasoning":"a"}}}\n\n',
    b'data: {"delta":{"reasoning":"a"}}\n\n',
    b'data: ["delta"]\n\n',
    b'data: "delta" and \xff\n\n',
    b'data: {"delta":' * 3 + b"\n\n",
]


@pytest.mark.parametrize("event", UNCHANGED, ids=range(len(UNCHANGED)))
def test_what_has_no_reasoning_to_repeat_stays(event: bytes) -> None:
    """O15: nothing is doubled, invented or broken."""
    assert event + DONE == relay(begun(TWICE), event + DONE)


@pytest.mark.parametrize("name", sorted(path.name for path in TRANSCRIPTS.glob("chat-stream*.body.txt")))
def test_a_recorded_stream_gains_nothing_but_the_name(name: str) -> None:
    """O15: of what a real vLLM said, everything else is the same."""
    body = (TRANSCRIPTS / name).read_bytes()
    out = relay(begun(TWICE), body)

    def documents(stream: bytes) -> list[Any]:
        lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line.startswith(b"data: {")]
        return [json.loads(line) for line in lines]

    expected = documents(body)
    for document in expected:
        for choice in document.get("choices", ()):
            if "reasoning" in choice["delta"]:
                choice["delta"]["reasoning_content"] = choice["delta"]["reasoning"]
    assert expected == documents(out)
    assert body.count(b"\n\n") == out.count(b"\n\n")


# -- the end --------------------------------------------------------------------------------------------------------

ENDINGS = [
    LAST,
    LAST + DONE,
    DONE,
    chunk("a") + b"data: [DONE]",
    b'data: {"choices":[{"text":"a","finish_reason": "length"}]}\n\n',
    b'data: {"error":{"message":"boom","code":500}}\n\n' + DONE,
    b'data: {"error":{"message":"boom","code":500}}\n\n',
    chunk("a") + b'data: {"error":"boom"}',
]


@pytest.mark.parametrize("body", ENDINGS, ids=range(len(ENDINGS)))
def test_an_end_that_is_one_passes(body: bytes) -> None:
    """O11: a finish reason or [DONE] is enough, and an error says what there is to say; nothing is added."""
    assert body == relay(begun(), body)


@pytest.mark.parametrize(
    "pieces",
    [
        [b'data: {"choices":[{"finish_reason" : "stop"}]}\n\n', DONE, b": bye\n\n"],
        [LAST + chunk("a", finish_reason=None)],
        [LAST + b'data: {"choices":[{"finish_reason":null}],"usage":{}}\n\n', b"\n"],
        [chunk("a") + DONE, USAGE],
    ],
    ids=["a comment behind it", "null behind it", "usage with a choice behind it", "usage behind it"],
)
def test_what_comes_behind_an_end_does_not_undo_it(pieces: list[bytes]) -> None:
    """O11: a finish reason or [DONE] counts wherever it was, whatever else its read or a later one brings."""
    assert b"".join(pieces) == relay(begun(), *pieces)


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_a_stream_that_ends_without_an_end_says_so(size: int) -> None:
    """O11: what came before it reaches the client, then one error event and no [DONE]."""
    body = chunk("Hello") + chunk(" wor")
    out = broken(begun(), *[body[start : start + size] for start in range(0, len(body), size)])
    assert out.startswith(body)
    error = json.loads(out.removeprefix(body).removeprefix(b"data: "))["error"]
    assert {"message", "type", "param", "code"} == set(error)
    assert ("upstream_broken", None) == (error["code"], error["param"])
    assert "without a finish reason" in error["message"]


def test_the_rest_of_an_event_is_closed_before_the_error() -> None:
    """O11: an event that was cut at the end is not glued to the error."""
    out = broken(begun(), chunk("Hello") + b'data: {"choices":[{"de')
    assert out.startswith(chunk("Hello") + b'data: {"choices":[{"de\n\ndata: {"error":')


def test_words_about_an_end_are_none() -> None:
    """O11: what the model says of finish reasons is in quotes of quotes, and null is no reason."""
    body = chunk('{"finish_reason":"stop"}') + chunk("x")
    assert b'"error"' in broken(begun(), body).removeprefix(body)


def test_a_finish_reason_is_found_however_it_is_cut() -> None:
    """O11: at whatever byte, since only whole events are looked at."""
    for place in range(len(LAST)):
        assert LAST == relay(begun(), LAST[:place], LAST[place:])


def test_other_streams_end_as_they_like() -> None:
    """O11, O14: Responses and transcriptions have an end of their own."""
    body = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
    assert body == relay(begun(evolve(TERMS, must_finish=False)), body)


def test_a_whole_answer_ends_as_it_likes() -> None:
    """O5, O11: what decides is what the upstream answers with, not what was asked for."""
    assert b'{"choices":[]}' == relay(begun(TERMS, JSON), b'{"choices":[]}')
    assert STREAM == relay(begun(WHOLE), STREAM)


# -- signs of life --------------------------------------------------------------------------------------------------


def test_the_first_sign_begins_the_response() -> None:
    """O11: a comment, with the place in the queue and the estimate, behind the head of an event stream."""
    encoder = PassThrough(TERMS)
    assert b": queued: 3 ahead, about 7 s to wait\n\n" == encoder.wait(3, 7.4)
    expected = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))
    assert evolve(EVENTS, headers=expected) == encoder.head
    assert b": keep-alive\n\n" == encoder.wait(0, None)


def test_the_upstreams_stream_follows_a_sign() -> None:
    """O11: its head no longer matters, its events do."""
    encoder = PassThrough(TERMS)
    encoder.wait(0, 1.0)
    head = encoder.head
    encoder.begin(evolve(EVENTS, headers=(("cache-control", "private"),)))
    assert head is encoder.head
    assert STREAM + DONE == relay(encoder, STREAM + DONE)


def test_a_whole_answer_gets_no_sign() -> None:
    """O11: there is no way to say something before a document, and a refusal is to stay a status."""
    encoder = PassThrough(WHOLE)
    assert b"" == encoder.wait(3, 1.5)
    assert encoder.head is None
    # Asked to stream, an upstream may yet answer with a document.
    encoder = begun(TERMS, JSON)
    assert b"" == encoder.wait(0, None)
    assert b"" == begun(TERMS, evolve(EVENTS, content_length=100)).wait(0, None)


@pytest.mark.parametrize(
    ("content_type", "reason"),
    [
        ("application/json", "it answered a request for a stream with 'application/json'"),
        ("text/html", "it answered with text/html where application/json was due"),
        ("", "it answered with no content type where application/json was due"),
    ],
)
def test_no_stream_after_a_sign(content_type: str, reason: str) -> None:
    """O11: a document inside of an event stream would be garbage, so it is a failure, and told as one."""
    encoder = PassThrough(TERMS)
    encoder.wait(0, 1.0)
    with pytest.raises(UpstreamBroken, match=reason) as caught:
        encoder.begin(evolve(JSON, content_type=content_type))
    told = encoder.fail(caught.value, "req_1")
    assert told is not None
    assert told.startswith(b'data: {"error":')


def test_a_refusal_after_a_sign_is_an_event() -> None:
    """O11: the status has gone, the error object is the same."""
    encoder = PassThrough(TERMS)
    encoder.wait(0, 1.0)
    told = encoder.fail(REFUSAL, "req_1")
    assert told is not None
    assert "queue_timeout" == json.loads(told.removeprefix(b"data: "))["error"]["code"]


def test_between_events_there_is_room_for_a_sign() -> None:
    """O11: half an event that is held back has not gone out, so a comment may."""
    encoder = begun()
    assert chunk("a") == encoder.feed(chunk("a") + b"data: {", last=False)
    assert b": keep-alive\n\n" == encoder.wait(0, None)
    assert b"data: {}\n\n" + DONE == encoder.feed(b"}\n\n" + DONE, last=False)


def test_no_sign_inside_of_an_event() -> None:
    """O11: one so large that it goes out in parts is not torn, and after it there is room again."""
    encoder = begun()
    assert encoder.feed(b"data: " + b"x" * HELD_BYTES, last=False)
    assert b"" == encoder.wait(0, None)
    assert b"x\n\n" == encoder.feed(b"x\n\n", last=False)
    assert b": keep-alive\n\n" == encoder.wait(0, None)


@pytest.mark.parametrize(
    "events", [b"id: 1\ndata: {}\n\n", b"data: {}\nid: 1\n\n", b": x\n\nid:1\ndata: {}\n\n", b"data: {}\rid:1\r\r"]
)
def test_a_sign_after_an_id_has_no_blank_line(events: bytes) -> None:
    """O11: once openai's decoder knows an id, each further blank line is an empty event to it, and kills it."""
    encoder = begun()
    assert events == encoder.feed(events, last=False)
    assert b": keep-alive\n" == encoder.wait(0, None)


def test_an_id_in_the_middle_is_remembered() -> None:
    """O11: it may have been one event's alone, and long ago."""
    encoder = begun()
    for event in (chunk("a"), b"id: 1\n\n", chunk("b"), chunk("c")):
        encoder.feed(event, last=False)
    assert b": keep-alive\n" == encoder.wait(0, None)


def test_no_id_and_no_empty_event_is_ours() -> None:
    """O11: a sign is a comment and nothing else."""
    encoder = PassThrough(TERMS)
    signs = encoder.wait(2, 1.0) + encoder.wait(0, None)
    for line in signs.split(b"\n"):
        assert line == b"" or line.startswith(b":")


# -- what an answer may be -------------------------------------------------------------------------------------------

TEXTUAL = (Operation.CHAT, Operation.COMPLETIONS, Operation.RESPONSES, Operation.BATCH)


@pytest.mark.parametrize(
    "content_type",
    ["text/html; charset=utf-8", "", "text/plain", "text/event-streams", "application/jsonl", "x; application/json"],
)
@pytest.mark.parametrize("operation", TEXTUAL)
def test_a_page_is_no_answer(operation: Operation, content_type: str) -> None:
    """What a proxy in between says with a 200 is the upstream's failure, and no empty answer."""
    encoder = PassThrough(evolve(TERMS, operation=operation))
    with pytest.raises(UpstreamBroken, match="where application/json was due") as caught:
        encoder.begin(evolve(JSON, content_type=content_type))
    assert encoder.head is None
    assert encoder.fail(caught.value, "req_1") is None


@pytest.mark.parametrize("content_type", ["Application/JSON", "application/json ;charset=utf-8", "TEXT/event-stream;x"])
@pytest.mark.parametrize("operation", TEXTUAL)
def test_json_and_events_are_answers(operation: Operation, content_type: str) -> None:
    """However they are spelt, and whatever parameters they have."""
    head = begun(evolve(TERMS, operation=operation), evolve(JSON, content_type=content_type)).head
    assert head is not None
    assert content_type == head.content_type


@pytest.mark.parametrize("content_type", ["audio/wav", "text/plain", "application/octet-stream", "", "text/html"])
@pytest.mark.parametrize("operation", [operation for operation in Operation if operation not in TEXTUAL])
def test_other_operations_answer_as_they_like(operation: Operation, content_type: str) -> None:
    """Transcripts may be plain text or subtitles, embeddings bytes: they pass as they are."""
    encoder = begun(evolve(WHOLE, operation=operation), evolve(JSON, content_type=content_type))
    assert encoder.head is not None
    assert content_type == encoder.head.content_type
    assert b"<html>" == relay(encoder, b"<html>")


@pytest.mark.parametrize(
    ("terms", "head", "length"),
    [
        (TERMS, EVENTS, 100),
        (ACCOUNTED, EVENTS, None),
        (TWICE, EVENTS, None),
        (WHOLE, JSON, 100),
        (evolve(WHOLE, accounting=True), JSON, 100),
        (evolve(TWICE, stream=False), JSON, None),
    ],
    ids=["events", "accounted", "twice", "whole", "whole-accounted", "whole-twice"],
)
def test_what_may_be_changed_has_no_length(terms: ReplyTerms, head: ResponseHead, length: int | None) -> None:
    """O3: an event may be hidden, or grow, so the number of bytes that was announced is not promised any more."""
    found = begun(terms, evolve(head, content_length=100)).head
    assert found is not None
    assert length == found.content_length


# -- failures on /v1/responses ---------------------------------------------------------------------------------------


def refused_by_upstream(message: str) -> UpstreamStatus:
    return UpstreamStatus(
        upstream="reasoning",
        upstream_status=400,
        upstream_message=message,
        error=None,
        upstream_retry_after_seconds=None,
    )


TOO_LONG = "This model's maximum context length is 40960 tokens. However, you requested 50000 tokens."


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (REFUSAL, "rate_limit_exceeded", f"{REFUSAL.message}. Please try again in 3s."),
        (refused_by_upstream(TOO_LONG), "context_length_exceeded", TOO_LONG),
        (refused_by_upstream("no"), "server_error", "no"),
        (
            UpstreamBroken(upstream="reasoning", reason=TOO_LONG),
            "server_error",
            UpstreamBroken(upstream="reasoning", reason=TOO_LONG).message,
        ),
    ],
    ids=["refusal", "too-long", "upstream", "broken"],
)
def test_a_responses_stream_fails_in_its_own_words(error: GatewayError, code: str, message: str) -> None:
    """An ``error`` is nothing to a client of /v1/responses: it waits for the event that ends each of its streams."""
    encoder = PassThrough(evolve(TERMS, operation=Operation.RESPONSES, must_finish=False))
    encoder.wait(0, 1.0)
    told = encoder.fail(error, "req_1")
    assert told is not None
    name, data, *rest = told.split(b"\n")
    assert (b"event: response.failed", [b"", b""]) == (name, rest)
    event = json.loads(data.removeprefix(b"data: "))
    assert {"type", "sequence_number", "response"} == set(event)
    assert ("response.failed", 2**31 - 1) == (event["type"], event["sequence_number"])
    assert {
        "id": "resp_req_1",
        "object": "response",
        "status": "failed",
        "output": [],
        "error": {"code": code, "message": message},
    } == event["response"]


def test_a_responses_failure_is_not_glued_to_an_event() -> None:
    """Half an event that has gone out is closed before it."""
    encoder = begun(evolve(TERMS, operation=Operation.RESPONSES, must_finish=False))
    encoder.feed(b"x" * (HELD_BYTES + 1), last=False)
    told = encoder.fail(REFUSAL, "req_1")
    assert told is not None
    assert told.startswith(b"\n\nevent: response.failed\n")


# -- what decides ---------------------------------------------------------------------------------------------------


def test_an_upstream_refusal_keeps_its_meaning() -> None:
    """O12: the error is the upstream's own; how it is wrapped is the document's business."""
    error = UpstreamStatus(
        upstream="reasoning",
        upstream_status=400,
        upstream_message="no",
        error={"message": "no", "code": 400},
        upstream_retry_after_seconds=None,
    )
    assert error is begun().refused(error)


def test_headers_that_come_down() -> None:
    """O9: type, caching and disposition; nothing that is about a connection, a server, a cookie or another request."""
    given = (
        ("server", "uvicorn"),
        ("date", "today"),
        ("set-cookie", "a=b"),
        ("x-request-id", "chatcmpl-1"),
        ("request-id", "chatcmpl-1"),
        ("x-ratelimit-remaining-requests", "1"),
        ("cache-control", "no-store"),
    )
    head = begun(TERMS, evolve(JSON, headers=given)).head
    assert head is not None
    assert (("cache-control", "no-store"),) == head.headers


PIECES = [
    b"data: ",
    b"\n",
    b"\n\n",
    b"\r",
    b'{"choices":[',
    b"]",
    b"}",
    b'{"delta":{"reasoning":"a"}}',
    b'"usage"',
    b":",
]
PIECES += [
    b'{"prompt_tokens":1}',
    b",",
    b'"x"',
    b"[DONE]",
    b"\xff",
    b'"\\ud83d"',
    b'"error"',
    b"id: 1",
    LAST,
    USAGE,
    DONE,
]
PIECES += [b"[" * 2000, b'{"choices":[{"delta":{"reasoning":' + b"[" * 2000]


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.sampled_from(PIECES) | st.binary(max_size=3), max_size=14),
    st.sampled_from([EVENTS, JSON]),
    st.sampled_from([TERMS, ACCOUNTED, TWICE, evolve(ACCOUNTED, repeat_reasoning_as="r", stream=False)]),
    st.booleans(),
)
def test_any_answer_is_passed_on_or_the_upstreams_fault(
    pieces: list[bytes], head: ResponseHead, terms: ReplyTerms, signed: bool
) -> None:
    """O6, O11: nothing but a GatewayError comes of what is no answer."""
    encoder = PassThrough(terms)
    try:
        if signed:
            encoder.wait(1, 1.0)
        encoder.begin(head)
        for piece in pieces:
            encoder.feed(piece, last=False)
            encoder.wait(0, None)
        encoder.feed(b"", last=True)
    except GatewayError as error:
        encoder.fail(error, "req_1")
