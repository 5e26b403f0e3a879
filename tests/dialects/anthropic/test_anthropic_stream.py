"""Streams: what each kind of chunk does to the blocks, how a stream ends, and how it fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message
from anthropic_driver import (
    JSON_HEAD,
    SSE_HEAD,
    THINKING,
    TRANSCRIPTS,
    Client,
    D,
    U,
    blocks,
    decode,
    ending,
    parse,
    sse,
    stream,
    tool,
    transcript,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from specimens import OCCUPANCY

from aiogw.canonical import Engine
from aiogw.dialects.anthropic import stream as stream_module
from aiogw.errors import (
    Draining,
    GatewayError,
    QueueTimeout,
    UpstreamBroken,
    UpstreamStatus,
    UpstreamTimeout,
)

STREAMS = sorted(path.name.removesuffix(".body.txt") for path in TRANSCRIPTS.glob("chat-stream-*.body.txt"))


def types(client: Client) -> list[str]:
    return [event["type"] for event in client.events]


# -- recorded streams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "chat-stream-tool-required"])
def test_recorded_stream_becomes_what_the_official_client_accumulates(name: str) -> None:
    """S2 to S5, S26: the SDK's own accumulator reads each recorded stream to its end, and a strict reader agrees.

    All but the one in which a random model wrote arguments that are no JSON, over which the SDK stumbles.
    """
    client = Client(decode(stream=True, thinking=THINKING))
    client.feed(transcript(name), last=True)
    assert client.error is None
    message: Any = None
    buffers: dict[int, bytes] = {}
    for event in client.events:
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)  # type: ignore[arg-type]
    assert isinstance(message, Message)
    assert message.stop_reason == ending(client.events)[0]
    expected = blocks(client.events)
    assert [block.type for block in message.content] == [block[0] for block in expected]
    assert message.usage.output_tokens == client.events[-2]["usage"]["output_tokens"]


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("thinking", [THINKING, None], ids=["thinking", "plain"])
def test_recorded_stream_cut_anywhere_gives_the_same_bytes(name: str, thinking: Any) -> None:
    """S40: the output does not depend on where a read ends, byte for byte."""
    source = transcript(name)[:4000]
    call = decode(stream=True, thinking=thinking)
    reference = Client(call)
    reference.feed(source)
    for at in range(1, len(source), 7):
        client = Client(decode(stream=True, thinking=thinking))
        client.feed(source[:at])
        client.feed(source[at:])
        assert client.received == reference.received
    single = Client(decode(stream=True, thinking=thinking))
    for at in range(len(source)):
        single.feed(source[at : at + 1])
    assert single.received == reference.received


def test_recorded_tool_calls_keep_their_arguments_byte_for_byte() -> None:
    """S20, S21: the pieces of recorded calls add up to what the model wrote, the call that was cut included."""
    expected: dict[int, str] = {}
    for line in transcript("chat-stream-tool-required").split(b"\n\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                for call in choice["delta"].get("tool_calls") or ():
                    expected.setdefault(call["index"], "")
                    expected[call["index"]] += call["function"].get("arguments") or ""
    client = Client(decode(stream=True))
    client.feed(transcript("chat-stream-tool-required"), last=True)
    assert [block[3] for block in blocks(client.events)] == list(expected.values())
    assert ending(client.events) == ("max_tokens", None)


# -- the start --------------------------------------------------------------------------------------------------------


def test_message_start_is_exact() -> None:
    """Case 1, S2: type and role are there, and usage comes from the first chunk's continuous figures."""
    first = D(role="assistant", content="") | {"usage": {"prompt_tokens": 5, "completion_tokens": 0}}
    client = stream([first, D(content="x", finish="stop")])
    assert client.received.startswith(
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","type":"message",'
        b'"role":"assistant","model":"reasoning","content":[],"stop_reason":null,"stop_sequence":null,"usage":'
        b'{"input_tokens":5,"output_tokens":0,"cache_read_input_tokens":0,"cache_creation_input_tokens":0}}}\n\n'
    )
    assert blocks(client.events) == [("text", "x")]


def test_the_head_names_what_proxies_must_not_do() -> None:
    """S1, S6: the head is committed with the first good chunk, as an event stream nobody may store or collect."""
    client = Client(decode(stream=True))
    client.feed(b": comment\n\n")
    client.feed(sse([{"choices": []}], done=False))
    assert client.encoder.head is None
    client.feed(sse([D(role="assistant", content="")], done=False))
    head = client.encoder.head
    assert head is not None
    assert (head.status, head.content_type, head.content_length) == (200, "text/event-stream; charset=utf-8", None)
    assert dict(head.headers) == {"cache-control": "no-cache", "x-accel-buffering": "no"}


def test_roles_again_start_nothing_again() -> None:
    """Case 11, S2: one message_start and one text block, however often the upstream says the role."""
    client = stream(
        [D(role="assistant", content="a"), D(role="assistant", content="b"), D(role="assistant", finish="stop")]
    )
    assert types(client).count("message_start") == 1
    assert blocks(client.events) == [("text", "ab")]


def test_no_choices_is_no_crash() -> None:
    """Case 5, S12: empty choices are skipped, and their usage is taken where there is one."""
    client = stream([{"choices": []}, {"id": "x"}, D(content="x", finish="stop"), U(3, 1)])
    assert blocks(client.events) == [("text", "x")]
    assert client.events[-2]["usage"]["input_tokens"] == 3
    assert client.events[-2]["usage"]["output_tokens"] == 1


@pytest.mark.parametrize(
    "delta",
    [
        None,
        {},
        {"content": None},
        {"content": ""},
        {"reasoning": ""},
        {"tool_calls": None},
        {"tool_calls": []},
        {"content": []},
        {"content": [{"type": "x"}]},
    ],
)
def test_empty_deltas_do_nothing(delta: Any) -> None:
    """S11: nothing is emitted, opened or closed by a delta that says nothing."""
    chunk = D()
    chunk["choices"][0]["delta"] = delta
    client = stream([D(content="a"), chunk, D(content="b", finish="stop")], thinking=THINKING)
    assert blocks(client.events) == [("text", "ab")]


def test_other_choices_are_ignored() -> None:
    """S13: only the choice with index 0 is this message."""
    other = D(content="no", finish="length")
    other["choices"][0]["index"] = 1
    assert blocks(stream([D(content="yes"), other, D(finish="stop")]).events) == [("text", "yes")]


def test_content_as_parts_and_refusals_are_text() -> None:
    """P3b: a list of parts is its texts, and a refusal is text."""
    client = stream([D(content=[{"type": "text", "text": "a"}, {"type": "x"}]), D(refusal="b", finish="stop")])
    assert blocks(client.events) == [("text", "ab")]


# -- thinking ---------------------------------------------------------------------------------------------------------


def test_thinking_and_text_alternate() -> None:
    """Cases 4 and 9, S3, S15: each change of kind is a new block, each thinking block signed before it stops."""
    client = stream(
        [D(reasoning="a"), D(content="b"), D(reasoning="c"), D(content="d", finish="stop")], thinking=THINKING
    )
    assert blocks(client.events) == [
        ("thinking", "a", "signed"),
        ("text", "b"),
        ("thinking", "c", "signed"),
        ("text", "d"),
    ]


def test_signatures_follow_from_the_text() -> None:
    """P3a, S15: equal thinking gives an equal signature, whole or in pieces, shown or omitted."""

    def signature(*texts: str, **more: Any) -> str:
        client = stream([*(D(reasoning=text) for text in texts), D(finish="stop")], thinking=THINKING | more)
        [found] = [event["delta"]["signature"] for event in client.events if "signature" in event.get("delta", {})]
        assert isinstance(found, str)
        return found

    assert signature("ab") == signature("a", "b") == signature("ab", display="omitted") != signature("abc")


def test_first_non_empty_reasoning_counts_once() -> None:
    """S14: of reasoning and reasoning_content, the first that says something, never both."""
    client = stream(
        [D(reasoning="", reasoning_content="a"), D(reasoning="b", reasoning_content="c"), D(finish="stop")],
        thinking=THINKING,
    )
    assert blocks(client.events) == [("thinking", "ab", "signed")]


def test_reasoning_nobody_asked_for_is_not_shown() -> None:
    """P8, S15: it is not rendered and closes nothing, unless the upstream is configured to show it."""
    chunks = [D(reasoning="a"), D(content="b"), D(reasoning="c"), D(content="d", finish="stop")]
    assert blocks(stream(chunks).events) == [("text", "bd")]
    assert blocks(stream(chunks, thinking={"type": "disabled"}).events) == [("text", "bd")]
    shown = decode(Engine(model="m", show_unrequested_thinking=True), stream=True)
    assert [block[0] for block in blocks(stream(chunks, call=shown).events)] == ["thinking", "text"] * 2


def test_omitted_thinking_is_signed_and_empty() -> None:
    """Q75: with display omitted a thinking block has a signature and no text."""
    client = stream([D(reasoning="a"), D(content="b", finish="stop")], thinking=THINKING | {"display": "omitted"})
    assert blocks(client.events) == [("thinking", "", "signed"), ("text", "b")]


# -- white space ------------------------------------------------------------------------------------------------------


def test_white_space_before_a_call_is_dropped() -> None:
    """Case 2, S16: no empty text block stands in front of a tool block."""
    call = tool(0, "{}", id="call_a", name="ls")
    client = stream([D(role="assistant", content=""), D(content="\n\n"), D(tool_calls=[call]), D(finish="stop")])
    assert blocks(client.events) == [("tool_use", "call_a", "ls", "{}")]
    assert ending(client.events) == ("tool_use", None)


def test_white_space_before_text_is_kept() -> None:
    """S16: what was held back is sent with the text it leads to, also across thinking; later white space is text."""
    client = stream(
        [D(content="\n"), D(reasoning="a"), D(content=" "), D(content="b"), D(content="\n", finish="stop")],
        thinking=THINKING,
    )
    assert blocks(client.events) == [("thinking", "a", "signed"), ("text", "\n b\n")]


def test_white_space_alone_is_the_answer() -> None:
    """S16: a message of nothing but white space, or of thinking and white space, keeps it; one with text drops it."""
    assert blocks(stream([D(content="\n"), D(content=" ", finish="stop")]).events) == [("text", "\n ")]
    after_thinking = stream([D(reasoning="a"), D(content="\n", finish="stop")], thinking=THINKING)
    assert blocks(after_thinking.events) == [("thinking", "a", "signed"), ("text", "\n")]
    after_text = stream([D(content="a"), D(reasoning="b"), D(content="\n", finish="stop")], thinking=THINKING)
    assert blocks(after_text.events) == [("text", "a"), ("thinking", "b", "signed")]


# -- tool calls -------------------------------------------------------------------------------------------------------


def test_arguments_beside_the_name_are_not_lost() -> None:
    """Case 3, S10, S20: a call that is whole in one chunk gives a start without input and one delta."""
    client = stream([D(tool_calls=[tool(0, '{"p":"/"}', id="call_a", name="ls")], finish="tool_calls")])
    assert blocks(client.events) == [("tool_use", "call_a", "ls", '{"p":"/"}')]
    assert types(client).count("content_block_delta") == 1
    assert ending(client.events) == ("tool_use", None)


def test_starts_have_the_members_strict_clients_need() -> None:
    """Case 8, S4, S19: starts carry empty members, and a call without arguments has no delta."""
    client = stream(
        [D(reasoning="hm"), D(tool_calls=[tool(0, id="a", name="f")]), D(finish="tool_calls")], thinking=THINKING
    )
    starts = [event["content_block"] for event in client.events if event["type"] == "content_block_start"]
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "tool_use", "id": "a", "name": "f", "input": {}},
    ]
    assert blocks(client.events)[1] == ("tool_use", "a", "f", "")
    assert ending(client.events) == ("tool_use", None)


def test_two_calls_that_share_an_index() -> None:
    """Case 7, S17: another id with a name on a known index is another call."""
    client = stream(
        [
            D(tool_calls=[tool(0, '{"k":1}', id="a", name="f")]),
            D(tool_calls=[tool(0, '{"k":2}', id="b", name="f")], finish="tool_calls"),
        ]
    )
    assert blocks(client.events) == [("tool_use", "a", "f", '{"k":1}'), ("tool_use", "b", "f", '{"k":2}')]


def test_two_calls_in_one_chunk() -> None:
    """Case 19, S21: one block after the other, each started and stopped once."""
    client = stream(
        [D(tool_calls=[tool(0, "{}", id="a", name="f"), tool(1, "{}", id="b", name="g")], finish="tool_calls")]
    )
    assert blocks(client.events) == [("tool_use", "a", "f", "{}"), ("tool_use", "b", "g", "{}")]


def test_the_id_on_every_piece_is_no_news() -> None:
    """Case 20, S17: one block, one delta per piece."""
    client = stream(
        [
            D(tool_calls=[tool(0, '{"x"', id="a", name="f")]),
            D(tool_calls=[tool(0, ":1}", id="a")]),
            D(tool_calls=[tool(0, "", id="a", name="f")], finish="tool_calls"),
        ]
    )
    assert blocks(client.events) == [("tool_use", "a", "f", '{"x":1}')]
    assert types(client).count("content_block_delta") == 2


def test_pieces_without_index() -> None:
    """S17: without an index the id tells, without either it is the last call; AstrBot#6661 lacks only the first."""
    by_id = [
        D(tool_calls=[tool(None, '{"x"', id="a", name="f")]),
        D(tool_calls=[tool(None, "{}", id="b", name="g")]),
        D(tool_calls=[tool(None, ":1}", id="a")]),
    ]
    assert blocks(stream([*by_id, D(finish="tool_calls")]).events) == [
        ("tool_use", "a", "f", '{"x":1}'),
        ("tool_use", "b", "g", "{}"),
    ]
    last = [D(tool_calls=[tool(None, '{"x"', id="a", name="f")]), D(tool_calls=[tool(None, ":1}")])]
    assert blocks(stream([*last, D(finish="stop")]).events) == [("tool_use", "a", "f", '{"x":1}')]
    later_index = [
        D(tool_calls=[tool(None, id="a", name="f")]),
        D(tool_calls=[tool(0, '{"x"')]),
        D(tool_calls=[tool(0, ":1}")]),
    ]
    assert blocks(stream([*later_index, D(finish="stop")]).events) == [("tool_use", "a", "f", '{"x":1}')]


def test_whole_calls_without_index_or_id_are_several() -> None:
    """S17, S18: a name with arguments after a call that is whole is another one, with an id of its own."""
    client = stream(
        [
            D(tool_calls=[tool(None, '{"x":1}', name="f")]),
            D(tool_calls=[tool(None, '{"x":2}', name="f")]),
            D(tool_calls=[tool(None, "", name="f")], finish="stop"),
        ]
    )
    found = blocks(client.events)
    assert [block[2:] for block in found] == [("f", '{"x":1}'), ("f", '{"x":2}')]
    assert found[0][1] != found[1][1]
    assert all(block[1].startswith("toolu_1_") for block in found)


def test_the_same_id_twice_is_told_apart() -> None:
    """P3c: a second call with the same id in one response gets one of ours."""
    client = stream([D(tool_calls=[tool(0, "{}", id="a", name="f"), tool(1, "{}", id="a", name="f")], finish="stop")])
    assert [block[1] for block in blocks(client.events)] == ["a", "toolu_1_1"]


def test_arguments_before_the_name_wait_for_it() -> None:
    """S18: a block starts with its name, and what came before it is the first delta; the id may follow too late."""
    client = stream(
        [
            D(tool_calls=[tool(0, '{"x"')]),
            D(content="later"),
            D(tool_calls=[tool(0, ":1}", name="f")]),
            D(tool_calls=[tool(0, "", id="a", name="f")], finish="stop"),
        ]
    )
    assert blocks(client.events) == [("tool_use", "toolu_1_0", "f", '{"x":1}'), ("text", "later")]


def test_arguments_as_an_object_are_its_text() -> None:
    """S19: an upstream that sends the object instead of a string means its JSON text; null means nothing."""
    client = stream([D(tool_calls=[tool(0, {"x": "é"}, id="a", name="f")], finish="stop")])
    assert json.loads(blocks(client.events)[0][3]) == {"x": "é"}
    null = b'{"choices":[{"delta":{"tool_calls":['
    null += b'{"index":0,"id":"a","function":{"name":"f","arguments":null}}]},"finish_reason":"stop"}]}'
    assert blocks(stream([null]).events) == [("tool_use", "a", "f", "")]


def test_interleaved_calls_are_one_after_the_other() -> None:
    """S22: the open call streams on, the others wait in order of appearance and are opened with all they have."""
    client = stream(
        [
            D(tool_calls=[tool(0, '{"a"', id="a", name="f")]),
            D(tool_calls=[tool(1, '{"b"', id="b", name="g")]),
            D(tool_calls=[tool(2, '{"c":3}', id="c", name="h")]),
            D(tool_calls=[tool(0, ":1}")]),
            D(tool_calls=[tool(1, ":2}")]),
            D(tool_calls=[tool(0, "\n")]),
            D(finish="tool_calls"),
        ]
    )
    assert blocks(client.events) == [
        ("tool_use", "a", "f", '{"a":1}'),
        ("tool_use", "b", "g", '{"b":2}'),
        ("tool_use", "c", "h", '{"c":3}'),
    ]
    deltas = [event["delta"]["partial_json"] for event in client.events if event["type"] == "content_block_delta"]
    assert deltas == ['{"a"', ":1}", '{"b"', ":2}", '{"c":3}']


def test_text_within_a_call_comes_after_it() -> None:
    """S23: text and thinking that come while a call is incomplete are sent in order once it is complete."""
    client = stream(
        [
            D(tool_calls=[tool(0, '{"a"', id="a", name="f")]),
            D(content="x"),
            D(content="y"),
            D(reasoning="z"),
            D(tool_calls=[tool(0, ":1}")]),
            D(content="w", finish="tool_calls"),
        ],
        thinking=THINKING,
    )
    assert blocks(client.events) == [
        ("tool_use", "a", "f", '{"a":1}'),
        ("text", "xy"),
        ("thinking", "z", "signed"),
        ("text", "w"),
    ]


def test_text_after_a_finished_call_closes_it() -> None:
    """S23: white space alone does not, so that a call may still get its own."""
    client = stream(
        [
            D(tool_calls=[tool(0, "{}", id="a", name="f")]),
            D(content="\n"),
            D(tool_calls=[tool(0, " ")]),
            D(content="x"),
            D(tool_calls=[tool(0, " ")], finish="stop"),
        ]
    )
    assert blocks(client.events) == [("tool_use", "a", "f", "{} "), ("text", "\nx")]


def test_arguments_for_a_stopped_call_are_a_failure() -> None:
    """S22: a client may have run it by now, so what follows must not be dropped in silence."""
    client = stream(
        [
            D(tool_calls=[tool(0, "{}", id="a", name="f")]),
            D(content="x"),
            D(tool_calls=[tool(0, '{"x":1}')], finish="stop"),
        ]
    )
    assert isinstance(client.error, UpstreamBroken)
    assert "more arguments" in client.error.message


def test_calls_that_never_complete_are_closed_at_the_end() -> None:
    """S19, S21, S26a: at an ordinary finish what the model wrote is out as it wrote it, and the turn is a tool's."""
    client = stream(
        [
            D(tool_calls=[tool(0, "12", id="a", name="f")]),
            D(tool_calls=[tool(1, id="b", name="g")]),
            D(content="x", finish="stop"),
        ]
    )
    assert blocks(client.events) == [("tool_use", "a", "f", "12"), ("tool_use", "b", "g", ""), ("text", "x")]
    assert ending(client.events) == ("tool_use", None)


def test_legacy_function_call_is_a_call() -> None:
    """P3c: the form before tool_calls still counts."""
    client = stream(
        [
            D(function_call={"name": "f", "arguments": '{"x"'}),
            D(function_call={"arguments": ":1}"}, finish="function_call"),
        ]
    )
    assert blocks(client.events) == [("tool_use", "toolu_1_0", "f", '{"x":1}')]


def test_a_call_without_a_name() -> None:
    """S18: with anything of its own it is a failure, and no block is stopped before it; an empty one is nothing."""
    named = D(tool_calls=[tool(0, '{"a"', id="a", name="f")])
    client = stream([named, D(tool_calls=[tool(1, "{}")], finish="tool_calls")])
    assert isinstance(client.error, UpstreamBroken)
    assert "content_block_stop" not in types(client)
    assert blocks(stream([D(content="x"), D(tool_calls=[tool(0)], finish="stop")]).events) == [("text", "x")]
    assert blocks(stream([D(content="x"), D(tool_calls=[{"index": 0}], finish="stop")]).events) == [("text", "x")]


def test_a_file_in_a_thousand_pieces() -> None:
    """S20, S21: four megabytes of arguments, escapes and all; what they cost is in scripts/bench."""
    piece = 'line of code \\"quoted\\"\\n' * 160
    pieces = [D(tool_calls=[tool(0, '{"a":"', id="a", name="f")])]
    pieces += [D(tool_calls=[tool(0, piece)])] * 1000
    reads = [sse([chunk], done=False) for chunk in [*pieces, D(tool_calls=[tool(0, '"}')], finish="tool_calls")]]
    encoder = decode(stream=True).encoder
    encoder.begin(SSE_HEAD)
    sent = parse(b"".join(encoder.feed(read, last=False) for read in reads))
    arguments = "".join(event["delta"]["partial_json"] for event in sent if event["type"] == "content_block_delta")
    assert arguments == '{"a":"' + piece * 1000 + '"}'
    assert b'"stop_reason":"tool_use"' in encoder.feed(b"data: [DONE]\n\n", last=True)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_usage_of_the_end_counts() -> None:
    """Case 6, S25, S26, S33, P5: the last usage wins, and message_delta has all four figures."""
    early = D(content="a") | {"usage": {"prompt_tokens": 100, "completion_tokens": 1}}
    client = stream([early, D(finish="stop"), U(100, 2, prompt_tokens_details={"cached_tokens": 64})])
    assert client.events[-2]["usage"] == {
        "input_tokens": 36,
        "output_tokens": 2,
        "cache_read_input_tokens": 64,
        "cache_creation_input_tokens": 0,
    }


def test_done_is_not_needed_and_nothing_follows_it() -> None:
    """S26: a clean end after a finish reason is an end; bytes after [DONE], pings and failures add nothing."""
    plain = stream([D(content="a", finish="stop")], done=False)
    client = Client(decode(stream=True))
    client.feed(sse([D(content="a", finish="stop")]) + b"data: nonsense\n\n")
    done = client.received
    assert done == plain.received
    client.feed(b"data: nonsense\n\n")
    client.wait()
    client.fail(UpstreamBroken(upstream="u", reason="reset"))
    client.feed(b"", last=True)
    assert client.received == done


@pytest.mark.parametrize("tail", [b"data: [DONE]", b"data:  [DONE] \n", b"\n: bye", b""])
def test_a_last_event_may_lack_its_blank_line(tail: bytes) -> None:
    """S43, S46: [DONE] or complete JSON counts without the blank line, and [DONE] is recognised when trimmed."""
    client = Client(decode(stream=True))
    client.feed(sse([D(content="a")], done=False) + sse([D(finish="stop")], done=False) + tail, last=True)
    assert ending(client.events) == ("end_turn", None)
    whole = Client(decode(stream=True))
    whole.feed(sse([D(content="a", finish="stop")], done=False)[:-2], last=True)
    assert ending(whole.events) == ("end_turn", None)


def test_a_truncated_last_event_is_a_failure() -> None:
    """S43, S29: a last event that is half a JSON text means that the stream was cut."""
    client = Client(decode(stream=True))
    client.feed(sse([D(content="a", finish="stop")], done=False))
    client.feed(b'data: {"choices":[', last=True)
    assert types(client)[-1] == "error"


def test_a_finish_reason_is_remembered() -> None:
    """S24: it says nothing by itself, what is in its chunk counts, and what comes after it does as well."""
    client = Client(decode(stream=True))
    client.feed(sse([D(content="a")], done=False))
    before = len(client.events)
    client.feed(sse([D(finish="length")], done=False))
    assert len(client.events) == before
    client.feed(sse([D(content="b", finish="stop", stop=None), D(content="c"), U(7, 3)], done=False))
    assert types(client)[-1] == "content_block_delta"
    client.feed(sse([]), last=True)
    assert blocks(client.events) == [("text", "abc")]
    assert ending(client.events) == ("end_turn", None)
    assert client.events[-2]["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("done", [True, False])
def test_no_finish_reason_is_a_failure(done: bool) -> None:
    """Case 23, S27, S30: a dropped connection is never an end of turn; the open block stays open."""
    client = stream([D(content="The answer is")], done=done)
    assert types(client) == ["message_start", "content_block_start", "content_block_delta", "error"]
    assert client.events[-1] == {
        "type": "error",
        "error": {
            "type": "api_error",
            "message": "The upstream 'upstream-name' broke off: upstream ended without a finish reason",
        },
        "request_id": "req_1",
    }


def test_waiting_calls_are_not_flushed_before_an_error() -> None:
    """S30: a buffered call is not opened, and none is stopped, because Claude Code would run it."""
    client = stream([D(tool_calls=[tool(0, '{"a"', id="a", name="f"), tool(1, "{}", id="b", name="g")])])
    assert types(client) == ["message_start", "content_block_start", "content_block_delta", "error"]


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_giving_up_is_no_success(finish: str) -> None:
    """P4.8: an engine that aborted the request did not answer it."""
    client = stream([D(content="a", finish=finish)])
    assert types(client)[-1] == "error"


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        ({"message": "boom", "type": "InternalServerError", "code": 500}, "api_error", "boom"),
        ({"message": "boom", "type": "BadRequestError", "code": 400}, "invalid_request_error", "boom"),
        ({"message": "boom", "type": "Bad Request"}, "invalid_request_error", "boom"),
        ({"message": "boom", "type": "x", "code": "422"}, "invalid_request_error", "boom"),
        ({"message": "boom", "code": 401}, "api_error", "own credentials"),
        ({"message": "boom", "code": 403}, "api_error", "own credentials"),
        ({"message": "boom", "code": 404}, "not_found_error", "boom"),
        ({"message": "boom", "code": 408}, "timeout_error", "boom"),
        ({"message": "boom", "code": 413}, "request_too_large", "boom"),
        ({"message": "boom", "code": 429}, "rate_limit_error", "boom"),
        ({"message": "boom", "code": 503}, "overloaded_error", "boom"),
        ({"message": "boom", "code": 529}, "overloaded_error", "boom"),
        ({"message": "boom", "code": 7, "type": 3}, "api_error", "boom"),
        ({"message": "boom", "code": "stop"}, "api_error", "boom"),
        ({"message": 3}, "api_error", "status 500"),
        ("boom", "api_error", "boom"),
        (["boom"], "api_error", "status 500"),
    ],
)
def test_an_error_in_the_stream_is_an_error_event(error: Any, kind: str, said: str) -> None:
    """Case 24, S28, 4.3: whatever else the chunk has, its error ends the stream, with a type by code or type."""
    client = stream([D(content="a"), D(content="b") | {"error": error}])
    assert types(client)[-2:] == ["content_block_delta", "error"]
    assert client.events[-1]["error"]["type"] == kind
    assert said in client.events[-1]["error"]["message"]
    assert blocks(client.events) == [("text", "a")]


@pytest.mark.parametrize("nothing", [None, {}, "", False])
def test_an_error_member_that_says_nothing_is_none(nothing: Any) -> None:
    """S28: some upstreams put an empty error on every chunk."""
    assert blocks(stream([D(content="a", finish="stop") | {"error": nothing}]).events) == [("text", "a")]


def test_an_error_first_is_an_http_error() -> None:
    """S1, S31: vLLM says 200 first and fails in-band; before anything good it still becomes a status."""
    chunk = {"error": {"message": "boom", "type": "BadRequestError", "param": None, "code": 400}}
    client = stream([chunk])
    assert not client.started
    assert isinstance(client.error, UpstreamStatus)
    assert (client.error.upstream_status, client.error.upstream_message) == (400, "boom")
    assert client.error.error == chunk["error"]
    together = Client(decode(stream=True))
    together.feed(sse([D(role="assistant", content=""), chunk]))
    assert not together.started
    assert together.encoder.head is None
    assert together.encoder.fail(Draining(upstream="u", retry_after_seconds=1), "req_1") is None


@pytest.mark.parametrize(
    "event",
    [
        b"nonsense",
        b"[1]",
        b'{"choices":[{"delta":{"content":5}}]}',
        b'{"choices":[{"delta":{"content":"\xff"}}]}',
        b'{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"\xff"}}]}}]}',
        b'{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":{"a":"\xff"}}}]}}]}',
        b"[" * 100_000,
    ],
)
def test_what_cannot_be_read_is_a_failure(event: bytes) -> None:
    """S29, S46: skipping it would lose text in silence."""
    client = stream([D(content="a"), event, D(finish="stop")])
    assert isinstance(client.error, UpstreamBroken)
    assert types(client)[-1] == "error"


def test_an_unreadable_error_is_still_an_error() -> None:
    """S28: an error whose own bytes are broken ends the stream all the same."""
    client = stream([D(content="a"), b'{"error":{"message":"\xff"}}'])
    assert isinstance(client.error, UpstreamStatus)


def test_lone_surrogates_become_replacement_characters() -> None:
    """Q6, fact 11: half a character from the engine is shown as U+FFFD, and the stream goes on."""
    client = stream([b'{"choices":[{"delta":{"content":"a\\ud83d"},"finish_reason":"stop"}]}'])
    assert blocks(client.events) == [("text", "a�")]


def test_every_character_survives() -> None:
    """Case 25, S5, fact 11: multi-byte characters cut into single bytes, NUL and special tokens arrive unchanged."""
    text = "渐 🧪 \x00\x1b <|im_end|> \u2028 é"
    client = Client(decode(stream=True))
    for byte in sse([D(content=text, finish="stop")]):
        client.feed(bytes([byte]))
    assert blocks(client.events) == [("text", text)]
    assert "渐 🧪".encode() in client.received


def test_an_oversized_event_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """S29, S44: an event over the cap ends the stream after what came before it."""
    monkeypatch.setattr(stream_module, "MAX_EVENT_BYTES", 1000)
    client = Client(decode(stream=True))
    client.feed(sse([D(content="a")], done=False))
    client.feed(sse([D(content="b"), D(content="c" * 1000)], done=False))
    assert blocks(client.events) == [("text", "ab")]
    assert "larger than 1000 bytes" in client.events[-1]["error"]["message"]


def test_failures_from_outside_are_told_in_band() -> None:
    """S29, S30: a time-out or a lost connection after the start is an error event and nothing more."""
    client = Client(decode(stream=True))
    client.feed(sse([D(content="a")], done=False))
    client.fail(UpstreamTimeout(upstream="u", waiting_for="the next byte", timeout_seconds=60))
    assert types(client)[-2:] == ["content_block_delta", "error"]
    assert client.events[-1]["error"]["type"] == "timeout_error"


def test_the_context_length_is_known_in_band() -> None:
    """E13a: a full context reported inside the stream names its figures."""
    message = "max_tokens must be at least 1, got -5"
    call = decode(Engine(model="m", max_model_len=2048), stream=True)
    client = stream([D(content="a"), {"error": {"message": message, "code": 400}}], call=call)
    assert client.events[-1]["error"]["message"] == "prompt is too long: 2053 tokens > 2048 maximum"


def test_an_answer_that_is_no_event_stream_is_refused() -> None:
    """E15: JSON where a stream was due is the upstream's fault."""
    with pytest.raises(UpstreamBroken, match="application/json where text/event-stream was due"):
        decode(stream=True).encoder.begin(JSON_HEAD)


# -- signs of life ----------------------------------------------------------------------------------------------------


def test_a_request_that_waits_gets_a_start_and_pings() -> None:
    """S32, S33: the first sign commits the response; the real first chunk then starts nothing again."""
    client = Client(decode(stream=True))
    client.wait()
    assert types(client) == ["message_start", "ping"]
    assert client.received.endswith(b'event: ping\ndata: {"type":"ping"}\n\n')
    client.wait()
    first = D(role="assistant", content="") | {"usage": {"prompt_tokens": 5, "completion_tokens": 0}}
    client.feed(sse([first, D(content="a", finish="stop")]), last=True)
    assert types(client)[:4] == ["message_start", "ping", "ping", "content_block_start"]
    assert client.events[0]["message"]["id"].startswith("msg_")
    assert client.events[-2]["usage"]["input_tokens"] == 5


def test_a_refusal_after_a_sign_is_an_error_event() -> None:
    """S30, E16: once the response has begun, a passed deadline is said in-band, as overloaded."""
    client = Client(decode(stream=True))
    client.wait()
    client.fail(QueueTimeout(upstream="u", occupancy=OCCUPANCY, retry_after_seconds=7, waited_seconds=30))
    assert types(client) == ["message_start", "ping", "error"]
    assert b'"type":"overloaded_error"' in client.received


def test_an_error_first_after_a_sign_is_in_band() -> None:
    """S1, S28: what would have been a status is an event once the head has gone."""
    client = Client(decode(stream=True))
    client.wait()
    client.feed(sse([{"error": {"message": "boom", "code": 500}}]))
    assert types(client) == ["message_start", "ping", "error"]


# -- properties -------------------------------------------------------------------------------------------------------

_TEXT = st.text(alphabet='ab{}"\\ \n', max_size=6)
_PIECES = st.lists(
    st.one_of(
        st.builds(lambda text: {"content": text}, _TEXT),
        st.builds(lambda text: {"reasoning": text}, _TEXT),
        st.builds(
            lambda index, arguments, id_, name: {"tool_calls": [tool(index, arguments, id=id_, name=name)]},
            st.one_of(st.none(), st.integers(0, 2)),
            st.one_of(st.none(), st.sampled_from(['{"a"', ":1}", "{}", " ", ""])),
            st.sampled_from([None, "x", "y", "functions.f:0"]),
            st.sampled_from([None, "f", "g"]),
        ),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(_PIECES, st.sampled_from(["stop", "length", "tool_calls", None]), st.data())
def test_any_deltas_give_a_legal_stream_however_cut(
    deltas: list[dict[str, Any]], finish: str | None, data: Any
) -> None:
    """S3, S22, S26, S30, S40: one block at a time, a proper end or an error event, and the same bytes for every cut."""
    source = sse([D(role="assistant", content=""), *(D(**delta) for delta in deltas), D(finish=finish)])
    start = len(sse([D(role="assistant", content="")], done=False))
    clients = []
    for cut in (start, data.draw(st.integers(start, len(source)))):
        client = Client(decode(stream=True, thinking=THINKING))
        client.feed(source[:start])
        client.feed(source[start:cut])
        client.feed(source[cut:], last=True)
        blocks(client.events)
        assert types(client)[-1] == ("message_stop" if client.error is None else "error")
        clients.append(client)
    assert clients[0].received == clients[1].received
    if clients[0].error is None:
        text = "".join(delta.get("content", "") for delta in deltas)
        shown = "".join(block[1] for block in blocks(clients[0].events) if block[0] == "text")
        assert "".join(shown.split()) == "".join(text.split())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(st.binary(max_size=40), st.sampled_from([b"data: ", b"\n\n", b'{"choices":[{"delta":', b"}]}"])),
        max_size=8,
    ),
    st.booleans(),
)
def test_no_upstream_bytes_raise_anything_else(pieces: list[bytes], wait: bool) -> None:
    """The encoder is total: on arbitrary bytes it raises nothing but a GatewayError."""
    client = Client(decode(stream=True))
    if wait:
        client.wait()
    for piece in pieces:
        client.feed(piece)
    client.feed(b"", last=True)
    assert isinstance(client.error, GatewayError)
    parse(client.received)
