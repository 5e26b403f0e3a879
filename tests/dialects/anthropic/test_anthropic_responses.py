"""Whole documents, the stop reason and the usage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message
from anthropic_driver import JSON_HEAD, SSE_HEAD, THINKING, D, U, completion, decode, stream, transcript, whole
from attrs import asdict
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogw.canonical import Engine, ResponseHead
from aiogw.dialects.anthropic import responses
from aiogw.dialects.anthropic.calls import JSONScan
from aiogw.errors import GatewayError, InternalFault, UpstreamBroken, UpstreamStatus


def call(arguments: Any, id_: str | None = "call_a", name: str | None = "ls") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def broken(document: dict[str, Any] | bytes, **members: Any) -> str:
    with pytest.raises(UpstreamBroken) as caught:
        whole(document, **members)
    assert caught.value.upstream == "upstream-name"
    return caught.value.reason


# -- documents --------------------------------------------------------------------------------------------------------


def test_a_whole_message_is_exact() -> None:
    """P1, P2, P3: all eight members, the client's name of the model, an id of Anthropic's kind."""
    encoder = decode().encoder
    encoder.begin(JSON_HEAD)
    out = encoder.feed(json.dumps(completion(content="hi")).encode(), last=True)
    assert out == (
        b'{"id":"msg_1","type":"message","role":"assistant","model":"reasoning","content":[{"type":"text","text":"hi"}],'
        b'"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":5,"output_tokens":2,'
        b'"cache_read_input_tokens":0,"cache_creation_input_tokens":0}}'
    )


@pytest.mark.parametrize("name", ["chat-whole", "chat-whole-stop", "chat-whole-tool-named", "chat-whole-tool-required"])
def test_recorded_documents_are_messages_to_the_official_client(name: str) -> None:
    """P1, P3e, P7, P8: vLLM's own members are gone, its reasoning shown only to whom asked for thinking."""
    shown = whole(transcript(name), thinking=THINKING)
    source = json.loads(transcript(name))["choices"][0]
    message = Message.model_validate(shown, strict=True)
    assert [block.type for block in message.content] == ["thinking"]
    assert shown["content"][0]["thinking"] == source["message"]["reasoning"]
    assert whole(transcript(name))["content"] == []
    assert set(shown) == {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert shown["stop_reason"] == {"length": "max_tokens"}.get(source["finish_reason"], "end_turn")


def test_thinking_text_and_calls_in_this_order() -> None:
    """P3, P3a, P3c: and one signature per text, the same as a stream's."""
    document = completion(
        "tool_calls", reasoning="r", reasoning_content="x", content="t", tool_calls=[call('{"p": "/"}')]
    )
    shown = whole(document, thinking=THINKING)["content"]
    streamed = stream([D(reasoning="r"), D(finish="stop")], thinking=THINKING)
    [signature] = [event["delta"]["signature"] for event in streamed.events if "signature" in event.get("delta", {})]
    assert shown == [
        {"type": "thinking", "thinking": "r", "signature": signature},
        {"type": "text", "text": "t"},
        {"type": "tool_use", "id": "call_a", "name": "ls", "input": {"p": "/"}},
    ]
    omitted = whole(document, thinking=THINKING | {"display": "omitted"})["content"][0]
    assert omitted == {"type": "thinking", "thinking": "", "signature": signature}
    old = completion(reasoning_content="x", content="t")
    assert whole(old, thinking=THINKING)["content"][0]["thinking"] == "x"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None}, []),
        ({"content": ""}, []),
        ({"content": "\n"}, ["\n"]),
        ({"content": [{"type": "text", "text": "a"}, {"text": "b"}, {"text": None}]}, ["ab"]),
        ({"content": None, "refusal": "no"}, ["no"]),
        ({"content": "a", "refusal": "no"}, ["a", "no"]),
    ],
)
def test_text_blocks(message: dict[str, Any], expected: list[str]) -> None:
    """P3b, P3e: no empty block, white space kept where it is all there is, refusals as text."""
    assert [block["text"] for block in whole(completion(**message))["content"]] == expected


def test_white_space_before_a_call_is_dropped() -> None:
    """P3b: litellm#34692."""
    blocks = whole(completion("tool_calls", content="\n\n", tool_calls=[call("{}")]))["content"]
    assert [block["type"] for block in blocks] == ["tool_use"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        (None, {}),
        (" ", {}),
        ("{}", {}),
        (' {"a": 123456789012345678901234567890} ', {"a": 123456789012345678901234567890}),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_arguments_become_an_object(arguments: Any, expected: dict[str, Any]) -> None:
    """P3c: integers exact, nothing at all is an empty object."""
    blocks = whole(completion("stop", tool_calls=[call(arguments)]))["content"]
    assert blocks[0]["input"] == expected


def test_arguments_keep_their_digits() -> None:
    """P3c: a float is spelled as the model spelled it."""
    encoder = decode().encoder
    encoder.begin(JSON_HEAD)
    document = completion(tool_calls=[{"function": {"name": "f"}}, call('{"a": 1e2}')])
    assert b'"input":{"a": 1e2}' in encoder.feed(json.dumps(document).encode(), last=True)


def test_ids_of_calls() -> None:
    """P3c, Q46: reversible where they must be encoded, generated where missing or given twice; legacy calls too."""
    calls = [call("{}", "functions.Bash:0"), call("{}", None), call("{}", "a"), call("{}", "a")]
    document = completion("stop", tool_calls=calls, function_call={"name": "old", "arguments": "{}"})
    blocks = whole(document)["content"]
    assert [block["id"] for block in blocks] == [
        "toolu_aiogw64_ZnVuY3Rpb25zLkJhc2g6MA",
        "toolu_1_1",
        "a",
        "toolu_1_3",
        "toolu_1_4",
    ]
    assert blocks[-1]["name"] == "old"


@pytest.mark.parametrize("upstream_id", [None, ""])
def test_a_missing_id_is_made_up(upstream_id: str | None) -> None:
    """P2: an id all the same, and a new one each time."""
    document = completion(content="x") | {"id": upstream_id}
    first, second = whole(document)["id"], whole(document)["id"]
    assert first.startswith("msg_")
    assert first != second
    assert whole(completion(content="x") | {"id": "abc"})["id"] == "msg_abc"


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", "x", '{"a":}', '{"a":' * 3000])
def test_broken_arguments(arguments: str) -> None:
    """P3d: a cut call is left out; otherwise it is an error that names the tool, because ``{}`` might be executed."""
    calls = [call('{"b": 2}', "b"), call(arguments)]
    cut = whole(completion("length", content="t", tool_calls=calls))
    assert cut["stop_reason"] == "max_tokens"
    assert [block["type"] for block in cut["content"]] == ["text", "tool_use"]
    assert "'ls'" in broken(completion("tool_calls", tool_calls=calls))


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"<html>",
        b"[1]",
        b"{}",
        {"choices": []},
        {"choices": None},
        {"choices": [{"finish_reason": "stop"}]},
        completion(None, content="x"),
        completion("", content="x"),
        completion("abort", content="x"),
        completion("error", tool_calls=[call("{}")]),
        completion(tool_calls=[call("{}", name=None)]),
        completion(tool_calls=[{"id": "x"}]),
        b'{"choices":[{"message":{"tool_calls":[{"function":{"name":"f","arguments":"\xff"}}]},"finish_reason":"stop"}]}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_answer_is_the_upstreams_fault(document: Any) -> None:
    """P4.8, P4.9, P6, E15: success is never made up."""
    if isinstance(document, bytes):
        document = document.ljust(11)
    assert broken(document)


def test_an_error_with_a_200_is_an_error() -> None:
    """P6, S28: what vLLM reports inside a 200 gets its own status."""
    with pytest.raises(UpstreamStatus) as caught:
        whole({"error": {"message": "boom", "code": 400}})
    assert caught.value.status == 400


def test_lone_surrogates_of_an_engine_are_repaired() -> None:
    """Q6: in text and in arguments."""
    document = (
        rb'{"choices":[{"message":{"content":"a\ud83d","tool_calls":['
        rb'{"id":"a","function":{"name":"f","arguments":"{\"x\":\"\ud83d\"}"}}]},"finish_reason":"stop"}]}'
    )
    blocks = whole(document)["content"]
    assert blocks[0]["text"] == "a\ufffd"
    assert blocks[1]["input"] == {"x": "\ufffd"}


def test_the_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: an upstream that never ends does not fill the memory."""
    monkeypatch.setattr(responses, "MAX_DOCUMENT_BYTES", 20)
    encoder = decode().encoder
    encoder.begin(JSON_HEAD)
    assert encoder.feed(b"x" * 20, last=False) == b""
    with pytest.raises(UpstreamBroken, match="larger than 20 bytes"):
        encoder.feed(b"x", last=False)


@pytest.mark.parametrize("content_type", ["text/html", "text/event-stream", ""])
def test_another_media_type_is_refused(content_type: str) -> None:
    """E15: a proxy's page is no answer, nor is a stream nobody asked for."""
    head = ResponseHead(status=200, content_type=content_type, content_length=None)
    with pytest.raises(UpstreamBroken, match="where application/json was due"):
        decode().encoder.begin(head)
    decode().encoder.begin(ResponseHead(status=200, content_type="Application/JSON; charset=utf-8", content_length=3))
    decode(stream=True).encoder.begin(SSE_HEAD)


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (404, "The model `upstream-name` does not exist.", "The model `reasoning` does not exist."),
        (404, "Not Found", "Not Found"),
        (400, "temperature is too high", "temperature is too high"),
        (
            400,
            "max_tokens must be at least 1, got -1952",
            "prompt is too long: 4000 tokens > 2048 maximum",
        ),
        (500, "The model `upstream-name` does not exist.", "The model `upstream-name` does not exist."),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_is_in_the_requests_terms(status: int, said: str, told: str, streamed: bool) -> None:
    """The client's own name of the model, and how much too long its prompt is, which only the request's terms tell."""
    error = UpstreamStatus(
        upstream="upstream-name",
        upstream_status=status,
        upstream_message=said,
        error=None,
        upstream_retry_after_seconds=None,
    )
    encoder = decode(Engine(model="upstream-name", max_model_len=2048), stream=streamed).encoder
    found = encoder.refused(error)
    assert isinstance(found, UpstreamStatus)
    assert asdict(error) | {"upstream_message": told} == asdict(found)


def test_a_whole_answer_has_no_signs_of_life() -> None:
    """S32: nothing can be said before the document, nor after its head has gone."""
    encoder = decode().encoder
    assert encoder.wait(3, None) == b""
    assert encoder.head is None
    assert encoder.fail(InternalFault(), "req_1") is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=4))
def test_any_bytes_are_a_message_or_a_gateway_error(pieces: list[bytes]) -> None:
    """The encoder is total."""
    encoder = decode().encoder
    encoder.begin(JSON_HEAD)
    for piece in pieces:
        assert encoder.feed(piece, last=False) == b""
    with pytest.raises(GatewayError):
        encoder.feed(b"", last=True)


# -- stop reasons -----------------------------------------------------------------------------------------------------

STOPS = [
    # P4.1
    ({"finish": "length"}, {}, "max_tokens", None),
    ({"finish": "length", "tool_calls": [call("{}")]}, {}, "max_tokens", None),
    # P4.3, P4.5: case 15
    ({"finish": "stop", "stop": "END"}, {"stop_sequences": ["END"]}, "stop_sequence", "END"),
    ({"finish": "stop", "stop": "END"}, {"stop_sequences": ["OTHER"]}, "end_turn", None),
    ({"finish": "stop", "stop": "END"}, {}, "end_turn", None),
    ({"finish": "stop", "stop": "END", "tool_calls": [call("{}")]}, {"stop_sequences": ["END"]}, "tool_use", None),
    (
        {"finish": "stop", "stop": "END", "tool_calls": [call('{"')]},
        {"stop_sequences": ["END"]},
        "stop_sequence",
        "END",
    ),
    # Case 16: an integer is a token id
    ({"finish": "stop", "stop": 151645}, {"stop_sequences": ["151645"]}, "end_turn", None),
    # P4.4: case 10
    ({"finish": "stop", "tool_calls": [call("{}")]}, {}, "tool_use", None),
    ({"finish": "tool_calls", "tool_calls": [call("{}")]}, {}, "tool_use", None),
    ({"finish": "content_filter", "tool_calls": [call("{}")]}, {}, "tool_use", None),
    # P4.2: vllm#58228
    ({"finish": "tool_calls", "tool_calls": [call("{}"), call('{"')]}, {"max_tokens": 2}, "max_tokens", None),
    ({"finish": "tool_calls", "tool_calls": [call("{}")]}, {"max_tokens": 2}, "tool_use", None),
    # P4.6, fact 4
    ({"finish": "tool_calls", "content": ""}, {}, "end_turn", None),
    ({"finish": "function_call", "content": "x"}, {}, "end_turn", None),
    ({"finish": "stop", "content": "x"}, {}, "end_turn", None),
    # P4.7, P4.8
    ({"finish": "content_filter", "content": "x"}, {}, "refusal", None),
    ({"finish": "something_new", "content": "x"}, {}, "end_turn", None),
]


@pytest.mark.parametrize(("message", "members", "reason", "sequence"), STOPS)
def test_stop_reasons(message: dict[str, Any], members: dict[str, Any], reason: str, sequence: str | None) -> None:
    """Cases 10, 15, 16, P4: the first rule that applies, the same for a whole document and for a stream."""
    found = whole(completion(**message), **members)
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
    delta = dict(message)
    delta["tool_calls"] = [given | {"index": number} for number, given in enumerate(message.get("tool_calls", ()))]
    streamed = stream([D(**delta), U(5, 2)], **members).events[-2]["delta"]
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == (reason, sequence)


def test_a_full_context_is_told_from_a_reached_cap() -> None:
    """P4.1: where the length is known, reaching it before max_tokens has its own word."""
    engine = Engine(model="upstream-name", max_model_len=7)

    def reason(max_tokens: int, **usage: int) -> str:
        document = completion("length", content="x") | {"usage": {"prompt_tokens": 5, "completion_tokens": 2} | usage}
        encoder = decode(engine, max_tokens=max_tokens).encoder
        encoder.begin(JSON_HEAD)
        found = json.loads(encoder.feed(json.dumps(document).encode(), last=True))["stop_reason"]
        assert isinstance(found, str)
        return found

    assert reason(100) == "model_context_window_exceeded"
    assert reason(2) == "max_tokens"
    assert reason(100, prompt_tokens=4) == "max_tokens"


# -- usage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, (0, 0, 0, 0)),
        ({}, (0, 0, 0, 0)),
        ({"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": None}, (0, 0, 0, 0)),
        (
            {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 64}},
            (36, 2, 64, 0),
        ),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4, "created_cache_tokens": 3}}, (2, 0, 4, 3)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 20, "created_cache_tokens": 3}}, (0, 0, 9, 0)),
        (
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": -1, "created_cache_tokens": 20}},
            (0, 0, 0, 9),
        ),
        ({"prompt_tokens": -9, "completion_tokens": -1}, (0, 0, 0, 0)),
    ],
)
def test_usage_adds_up(usage: Any, expected: tuple[int, int, int, int]) -> None:
    """Case 6, P5: four plain integers always, the three input figures adding up to the prompt's tokens."""
    found = whole(completion(content="x") | {"usage": usage})["usage"]
    names = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert tuple(found[name] for name in names) == expected
    assert len(found) == 4


@pytest.mark.parametrize(("tokens", "shown"), [(0, False), (None, False), (57, True)])
def test_thinking_tokens_only_where_counted(tokens: int | None, shown: bool) -> None:
    """P5: a zero is not trusted, vLLM's stream says it even after thinking."""
    usage = {"prompt_tokens": 5, "completion_tokens": 60, "completion_tokens_details": {"reasoning_tokens": tokens}}
    found = whole(completion(content="x") | {"usage": usage})["usage"]
    assert found.get("output_tokens_details") == ({"thinking_tokens": 57} if shown else None)


# -- where arguments end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("", False),
        ("  ", False),
        ("{}", True),
        (' {"a":[1,{"b":"}"}]} ', True),
        ('{"a":"\\"}', False),
        ('{"a":"\\\\"}', True),
        ('{"a":"\\u00e9\\n"}', True),
        ('"x"', True),
        ('"x', False),
        ("[[]", False),
        ("12", False),
        ("12}", False),
        ("true", False),
    ],
)
def test_the_end_of_a_json_value(text: str, complete: bool) -> None:
    """S21: depth and strings tell, however the text is cut; a bare number is never known to be complete."""
    whole_scan, by_character = JSONScan(), JSONScan()
    whole_scan.feed(text)
    for character in text:
        by_character.feed(character)
    assert whole_scan.complete == by_character.complete == complete


@settings(max_examples=300)
@given(
    st.recursive(
        st.one_of(st.none(), st.integers(), st.text(alphabet='a"\\{}[]\n', max_size=6)),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    ).map(lambda value: {"x": value}),
    st.integers(1, 5),
)
def test_the_end_is_seen_exactly_at_the_end(value: Any, size: int) -> None:
    """S21: complete with the last character of the value and not before."""
    text = json.dumps(value)
    scan = JSONScan()
    for at in range(0, len(text), size):
        assert not scan.complete
        scan.feed(text[at : at + size])
    assert scan.complete
