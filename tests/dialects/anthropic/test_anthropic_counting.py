"""Counting tokens: what the engine is asked to tokenize, what is estimated, and that it is never 200 with 0."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic_driver import JSON_HEAD, decode, upstream_body
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogw.canonical import CanonicalRequest, Document, Engine, Operation, ResponseHead
from aiogw.dialects.anthropic import ANTHROPIC
from aiogw.dialects.anthropic.counting import CHARACTERS_PER_TOKEN, IMAGE_TOKENS, MAX_DOCUMENT_BYTES
from aiogw.dialects.base import Call, RelayEndpoint, ResponseEncoder
from aiogw.errors import GatewayError, InvalidField, MalformedBody, UnknownEndpoint, UnknownModel, UpstreamStatus

COUNT = "/llm/v1/messages/count_tokens"
ENGINE = Engine(model="upstream-name")
ESTIMATING = evolve(ENGINE, count_tokens="estimate")
HI = [{"role": "user", "content": "hi"}]
LS = {"name": "ls", "input_schema": {"type": "object"}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}}
URL = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}


def counting_bytes(body: bytes, engine: Engine = ENGINE) -> Call | Document:
    def find_engine(model: str) -> Engine:
        if model != "reasoning":
            raise UnknownModel(model=model, known=("reasoning",))
        return engine

    endpoint = ANTHROPIC.endpoint("POST", COUNT)
    assert isinstance(endpoint, RelayEndpoint)
    return ANTHROPIC.decode(endpoint, "application/json", body, find_engine)


def counting(engine: Engine = ENGINE, **members: Any) -> Call | Document:
    return counting_bytes(json.dumps({"model": "reasoning", "messages": HI} | members).encode(), engine)


def tokenize_body(engine: Engine = ENGINE, **members: Any) -> dict[str, Any]:
    call = counting(engine, **members)
    assert isinstance(call, Call)
    body = json.loads(call.request.body)
    assert isinstance(body, dict)
    return body


def estimated(engine: Engine = ESTIMATING, **members: Any) -> int:
    document = counting(engine, **members)
    assert isinstance(document, Document)
    assert (200, "application/json") == (document.status, document.content_type)
    told = json.loads(document.body)
    assert ["input_tokens"] == list(told)
    assert type(told["input_tokens"]) is int
    return int(told["input_tokens"])


def encoder() -> ResponseEncoder:
    call = counting()
    assert isinstance(call, Call)
    return call.encoder


# -- what is asked --------------------------------------------------------------------------------------------------


def test_the_smallest_request_is_exact() -> None:
    """M1: Claude Code sends no more; it takes no engine slot, and does not stream whatever it says."""
    for members in ({}, {"stream": True}):
        call = counting(**members)
        assert isinstance(call, Call)
        assert call.request == CanonicalRequest(
            operation=Operation.TOKENIZE,
            model="reasoning",
            stream=False,
            sequences=0,
            body=b'{"model":"upstream-name","messages":[{"role":"user","content":"hi"}]}',
            content_type="application/json",
            path="/tokenize",
            surface="anthropic",
        )


CONVERSATION: dict[str, Any] = {
    "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be brief."}],
    "messages": [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"p": 12345678901234567890123}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [PNG]}]},
    ],
    "tools": [LS],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2048},
}


@pytest.mark.parametrize(
    "members", [CONVERSATION, {"messages": [*HI, {"role": "assistant", "content": "I"}]}], ids=["all", "prefill"]
)
def test_what_is_counted_is_what_would_be_sent(members: dict[str, Any]) -> None:
    """M1: the same translation, of which /tokenize gets the members that become tokens, and no others."""
    sent = upstream_body(ENGINE, **members)
    counted = tokenize_body(**members)
    allowed = {"model", "messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"}
    assert set(counted) <= allowed
    assert {name: value for name, value in sent.items() if name in allowed} == counted


def test_max_tokens_is_not_needed() -> None:
    """M1: and where it is there, it is not looked at."""
    assert tokenize_body() == tokenize_body(max_tokens=0)


@pytest.mark.parametrize(
    ("members", "path"),
    [
        ({"messages": []}, "messages"),
        ({"model": ""}, "model"),
        ({"messages": [{"role": "x", "content": ""}]}, "messages.0.role"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages.0.content.0.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
    ],
)
@pytest.mark.parametrize("engine", [ENGINE, ESTIMATING], ids=["upstream", "estimate"])
def test_what_could_not_be_sent_is_not_counted(engine: Engine, members: dict[str, Any], path: str) -> None:
    """M1: the same faults, with the same paths, as for an answer."""
    with pytest.raises(InvalidField) as caught:
        counting(engine, **members)
    assert path == caught.value.path


@pytest.mark.parametrize("engine", [ENGINE, ESTIMATING], ids=["upstream", "estimate"])
def test_an_unknown_model_is_not_counted(engine: Engine) -> None:
    """M1, Q10: nor a body that is none."""
    with pytest.raises(UnknownModel):
        counting(engine, model="gpt-4")
    with pytest.raises(MalformedBody):
        counting_bytes(b"{", engine)


# -- the estimate ---------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.text(max_size=300), st.text(max_size=300), st.integers(0, 5))
def test_an_estimate_is_on_the_high_side(system: str, said: str, images: int) -> None:
    """M2: never below a quarter of the characters, and 1,600 for each image, whose data count for nothing."""
    content = [{"type": "text", "text": said}, *[PNG] * images]
    tokens = estimated(system=system, messages=[{"role": "user", "content": content}])
    assert tokens >= (len(system) + len(said)) / CHARACTERS_PER_TOKEN + images * IMAGE_TOKENS
    assert tokens >= 1


def test_an_image_costs_the_same_whatever_its_size() -> None:
    """M2: also one that the engine would fetch."""
    large = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0=" * 10_000}}
    fetching = evolve(ESTIMATING, image_urls=True)
    costs = {estimated(fetching, messages=[{"role": "user", "content": [block]}]) for block in (PNG, large, URL)}
    assert 1 == len(costs)
    assert IMAGE_TOKENS <= costs.pop() < IMAGE_TOKENS + 50


def test_text_that_looks_like_an_image_is_text() -> None:
    """M2: whoever talks about data URLs is not told that a megabyte of them is cheap."""
    said = '{"type":"image_url","image_url":{"url":"data:image/png;base64,' + "A" * 1_000_000 + '"}}'
    assert estimated(messages=[{"role": "user", "content": said}]) > len(said) / CHARACTERS_PER_TOKEN


def test_tools_count() -> None:
    """M2: they are part of the prompt, and of Claude Code's the larger part."""
    tool = LS | {"description": "x" * 4000}
    assert estimated(tools=[tool]) > estimated() + 1000


# -- the answer -----------------------------------------------------------------------------------------------------


def answered(body: bytes, *, size: int = 1 << 30) -> Any:
    counted = encoder()
    counted.begin(JSON_HEAD)
    for start in range(0, len(body), size):
        assert b"" == counted.feed(body[start : start + size], last=False)
        assert counted.head is None
    out = counted.feed(b"", last=True)
    assert ResponseHead(status=200, content_type="application/json", content_length=len(out)) == counted.head
    return json.loads(out)


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_the_count_comes_down_alone(size: int) -> None:
    """M1: without the list of all tokens, which may be a megabyte long."""
    tokens = list(range(2000))
    body = json.dumps({"count": 2000, "max_model_len": 40960, "tokens": tokens, "token_strs": None}).encode()
    assert {"input_tokens": 2000} == answered(body, size=size)


NO_COUNT = [
    b"",
    b"{}",
    b"[]",
    b"<html>",
    b'{"count":"7"}',
    b'{"count":null}',
    b'{"count":true}',
    b'{"count":7.5}',
    b'{"count":0}',
    b'{"count":-1}',
    b'{"count":7',
    b'{"count":7} x',
    b"\xff",
    b'{"tokens":' + b"[" * 100_000,
]


@pytest.mark.parametrize("body", NO_COUNT, ids=lambda body: repr(body[:20]))
def test_what_is_no_count_is_the_upstreams_fault(body: bytes) -> None:
    """M2: an error and never a 0, on which Claude Code would never compact."""
    counted = encoder()
    counted.begin(JSON_HEAD)
    counted.feed(body, last=False)
    with pytest.raises(GatewayError) as caught:
        counted.feed(b"", last=True)
    assert 502 == caught.value.status
    assert counted.head is None


def test_an_answer_of_another_type_is_the_upstreams_fault() -> None:
    """M2: a page of a proxy is no count."""
    with pytest.raises(GatewayError) as caught:
        encoder().begin(evolve(JSON_HEAD, content_type="text/html"))
    assert 502 == caught.value.status


def test_an_answer_without_end_is_cut_off() -> None:
    """M1: what is held is bounded."""
    counted = encoder()
    counted.begin(JSON_HEAD)
    piece = b"1" * (MAX_DOCUMENT_BYTES // 4)
    for _ in range(4):
        counted.feed(piece, last=False)
    with pytest.raises(GatewayError, match="too long"):
        counted.feed(piece, last=False)


def refusal(status: int, message: str = "Not Found") -> UpstreamStatus:
    return UpstreamStatus(
        upstream="reasoning",
        upstream_status=status,
        upstream_message=message,
        error=None,
        upstream_retry_after_seconds=None,
    )


@pytest.mark.parametrize("status", [404, 405, 501])
def test_an_upstream_that_cannot_count(status: int) -> None:
    """M2: a 404 that is not to be tried again, and Claude Code counts by itself."""
    error = encoder().refused(refusal(status))
    assert isinstance(error, UnknownEndpoint)
    assert (404, False) == (error.status, error.should_retry)
    assert "its upstream does not count tokens" == error.detail
    document = ANTHROPIC.render_error(error, "req_1")
    assert "not_found_error" == json.loads(document.body)["error"]["type"]
    assert "false" == dict(document.headers)["x-should-retry"]


@pytest.mark.parametrize("status", [400, 401, 422, 429, 500, 503])
def test_other_refusals_are_what_they_are(status: int) -> None:
    """M2: as for an answer (E1 to E15)."""
    error = refusal(status)
    assert error is encoder().refused(error)


def test_a_model_the_upstream_does_not_know() -> None:
    """M2, E3: that is about the model, and not about counting."""
    error = encoder().refused(refusal(404, "The model `upstream-name` does not exist."))
    assert isinstance(error, UpstreamStatus)


def test_nothing_is_said_before_the_count() -> None:
    """M1: no sign of life, and a failure is a status."""
    counted = encoder()
    assert b"" == counted.wait(1, 2.0)
    assert counted.head is None
    assert counted.fail(refusal(500), "req_1") is None


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "content"]), inner),
    max_leaves=6,
)


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(st.sampled_from(["model", "messages", "system", "tools", "tool_choice", "thinking"]), _JSON),
    st.booleans(),
)
def test_any_document_is_counted_or_the_clients_fault(members: dict[str, Any], estimate: bool) -> None:
    """M1, M2: nothing but a fault of the client comes of what is no conversation."""
    try:
        found = counting(ESTIMATING if estimate else ENGINE, **members)
    except GatewayError as error:
        assert error.status < 500  # noqa: PT017 - it may just as well be counted
    else:
        assert isinstance(found, Document if estimate else Call)


def test_a_message_needs_no_count() -> None:
    """Q1, M1: the endpoint beside it is an answer's, with a slot of its own."""
    assert (1, Operation.CHAT) == (decode().request.sequences, decode().request.operation)
