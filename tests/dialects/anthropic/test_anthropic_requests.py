"""Requests: every field and block of a Messages request, and what the engine is sent for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic_driver import decode, decode_bytes, upstream_body, upstream_messages
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogw.canonical import CanonicalRequest, Engine, Operation
from aiogw.dialects.anthropic import ids
from aiogw.errors import GatewayError, InvalidField, MalformedBody, UnknownModel

PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0="}}
LS = {"name": "ls", "input_schema": {"type": "object"}}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def use(id_: str = "toolu_1", name: str = "ls", **members: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name} | ({"input": {}} | members)


def result(content: Any = ..., id_: str = "toolu_1", **members: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": id_} | members
    return block if content is ... else block | {"content": content}


def refused(engine: Engine | None = None, **members: Any) -> tuple[str, str]:
    """Path and reason of the refusal."""
    with pytest.raises(InvalidField) as caught:
        decode(engine, **members)
    return caught.value.path, caught.value.reason


def refused_block(block: Any, role: str = "user", engine: Engine | None = None) -> tuple[str, str]:
    return refused(engine, messages=[{"role": role, "content": [block]}])


# -- the request as a whole -------------------------------------------------------------------------------------------


def test_the_smallest_request_is_exact() -> None:
    """Q10, Q11, Q12, Q25: the upstream's name goes up, the client's routes, one sequence is taken."""
    call = decode()
    assert call.request == CanonicalRequest(
        operation=Operation.CHAT,
        model="reasoning",
        stream=False,
        sequences=1,
        body=b'{"model":"upstream-name","messages":[{"role":"user","content":"hi"}],"max_tokens":100}',
        content_type="application/json",
        path="/v1/chat/completions",
        surface="anthropic",
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"model":}', "byte 9"),
        (b"[1]", "not a JSON object"),
        (b'"x"', "not a JSON object"),
        (b'{"model":"reasoning\xff"}', "not UTF-8 at byte 19"),
        (b'{"other":"\xff"}', "not UTF-8 at byte 10"),
        (b'{"other":' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_body_that_cannot_be_read(body: bytes, said: str) -> None:
    """Q6: the refusal says where, also in members that are only carried."""
    with pytest.raises(MalformedBody, match=said):
        decode_bytes(body)


def test_lone_surrogates_are_repaired() -> None:
    """Q6: half a character is legal JSON; the upstream gets U+FFFD, and pairs and backslashes stay as they were."""
    body = (
        rb'{"model":"reasoning","max_tokens":1,"messages":[{"role":"user",'
        rb'"content":"a\ud83d \ud83d\ude00 \\ud83d \uDE00"}],'
        rb'"tools":[{"name":"f","input_schema":{"type":"object","title":"\ud83d"}}]}'
    )
    document = json.loads(decode_bytes(body).request.body)
    assert document["messages"][0]["content"] == "a\ufffd \U0001f600 \\ud83d \ufffd"
    assert document["tools"][0]["function"]["parameters"]["title"] == "\ufffd"


@pytest.mark.parametrize(
    ("members", "path", "said"),
    [
        ({"model": ...}, "model", "Field required"),
        ({"model": ""}, "model", "Field required"),
        ({"model": 5}, "model", "Expected str"),
        ({"max_tokens": ...}, "max_tokens", "Field required"),
        ({"max_tokens": None}, "max_tokens", "Field required"),
        ({"max_tokens": True}, "max_tokens", "Expected int"),
        ({"max_tokens": "5"}, "max_tokens", "Expected int"),
        ({"max_tokens": 2.5}, "max_tokens", "Expected int"),
        ({"max_tokens": 0}, "max_tokens", "pre-warming is not offered"),
        ({"max_tokens": -1}, "max_tokens", "at least 1"),
        ({"messages": ...}, "messages", "at least one message is required"),
        ({"messages": []}, "messages", "at least one message is required"),
        ({"messages": "x"}, "messages", "Expected array"),
        ({"messages": ["x"]}, "messages.0", "Expected object"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "Field required"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'tool' is not user"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "Field required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "Expected str"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0", "Expected object"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages.0.content.0.type", "Field required"),
        ({"messages": [user({"type": "text"})]}, "messages.0.content.0.text", "Field required"),
        ({"messages": [user({"type": "text", "text": 5})]}, "messages.0.content.0.text", "Expected str"),
        ({"stream": "yes"}, "stream", "Expected bool"),
        ({"stream": 1}, "stream", "Expected bool"),
        ({"stop_sequences": "x"}, "stop_sequences", "Expected array"),
        ({"stop_sequences": ["x", 5]}, "stop_sequences.1", "Expected str"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"top_p": True}, "top_p", "must be a number"),
        ({"top_k": [1]}, "top_k", "must be a number"),
        ({"system": 5}, "system", "Expected str"),
        ({"system": [PNG]}, "system.0.type", "'image' is not supported"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers", "not supported by this gateway"),
        ({"container": {"skills": [{"skill_id": "x"}]}}, "container", "skills are not supported"),
        ({"thinking": {"type": "quick"}}, "thinking.type", "'quick' is not supported"),
        ({"thinking": {}}, "thinking.type", "Field required"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens", "Expected int"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "'xml' is not supported"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "Field required"),
        ({"output_format": {"type": "xml"}}, "output_format.type", "'xml' is not supported"),
        ({"tools": {}}, "tools", "Expected array"),
        ({"tools": [{"name": ""}]}, "tools.0.name", "Field required"),
        ({"tools": [{"name": 5}]}, "tools.0.name", "Expected str"),
        ({"tools": [{"name": "f", "input_schema": "x"}]}, "tools.0.input_schema", "must be an object"),
        ({"tools": [LS, LS]}, "tools", "Tool names must be unique."),
        ({"tools": [{"name": "s", "type": "web_search_1"}]}, "tools.0", "tool type 'web_search_1' is not supported"),
        ({"tools": [{"type": "mcp_toolset"}]}, "tools.0", "tool type 'mcp_toolset' is not supported"),
        ({"tools": [LS], "tool_choice": {}}, "tool_choice.type", "Field required"),
        ({"tools": [LS], "tool_choice": {"type": "x"}}, "tool_choice.type", "'x' is not supported"),
        ({"tools": [LS], "tool_choice": {"type": "tool"}}, "tool_choice.name", "Field required"),
        (
            {"tools": [LS], "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice.name",
            "tool 'x' not found in tools",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools were given"),
        ({"tools": [], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "no tools were given"),
        (
            {"tools": [LS, {"name": "s", "type": "web_search_1"}], "tool_choice": {"type": "tool", "name": "s"}},
            "tools.1",
            "tool type 'web_search_1' is not supported",
        ),
    ],
)
def test_what_is_refused_names_its_path(members: dict[str, Any], path: str, said: str) -> None:
    """Q10 to Q16, Q22, Q24, Q30, Q61, Q63, Q65, Q74: strict where a field is known, with a dotted zero-based path."""
    refusal = refused(**members)
    assert refusal[0] == path
    assert said in refusal[1]


def test_an_unknown_model_is_its_own_error() -> None:
    """Q10: the router says which models there are."""
    with pytest.raises(UnknownModel):
        decode(model="nope")


@pytest.mark.parametrize(
    "members",
    [
        {
            "service_tier": "auto",
            "speed": "fast",
            "cache_control": {},
            "context_management": {"edits": []},
            "betas": [],
        },
        {"metadata": {"user_id": "{}"}},
        {"metadata": 5, "unheard_of": {"a": [1]}},
        {"mcp_servers": [], "container": None},
        {"mcp_servers": None, "container": "container_1"},
        {"container": {"id": "x", "skills": []}},
        {"tools": [], "tool_choice": {"type": "auto"}},
        {"tools": None, "tool_choice": {"type": "none", "disable_parallel_tool_use": True}},
        {"stop_sequences": [], "temperature": None, "thinking": None, "output_config": None, "system": None},
        {"stop_sequences": None, "system": "", "stream": None, "output_config": {"effort": "reckless"}},
        {"system": [], "stream": False, "output_config": {"effort": 5}},
    ],
)
def test_what_means_nothing_here_leaves_no_trace(members: dict[str, Any]) -> None:
    """Q13, Q15, Q16, Q18, Q21, Q23, Q24, Q62, Q65: hints, empty values and unknown fields change not one byte."""
    assert decode(**members).request.body == decode().request.body


def test_streams_ask_for_usage() -> None:
    """Q15: with continuous figures, unless the upstream does not know them."""
    body = upstream_body(stream=True)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    plain = upstream_body(Engine(model="m", continuous_usage=False), stream=True)
    assert plain["stream_options"] == {"include_usage": True}
    assert decode(stream=True).request.stream


def test_what_the_operator_adds_is_only_a_default() -> None:
    """What the client says, or what is made of it, stands before what the configuration would say."""
    engine = Engine(model="m", body_defaults={"top_k": 20, "min_p": 0.1, "max_tokens": 7})
    body = upstream_body(engine, top_k=5)
    assert (5, 0.1, 100) == (body["top_k"], body["min_p"], body["max_tokens"])


def test_max_tokens_is_clamped_to_a_known_length() -> None:
    """Q11: Claude Code asks for 32,000 of a model it does not know."""
    assert upstream_body(Engine(model="m", max_model_len=2048), max_tokens=32000)["max_tokens"] == 2048
    assert upstream_body(Engine(model="m", max_model_len=2048), max_tokens=5)["max_tokens"] == 5
    assert upstream_body(max_tokens=10**30)["max_tokens"] == 10**30


def test_numbers_go_up_as_they_came() -> None:
    """Q16, Q17: sampling values keep their spelling, stop sequences their order."""
    body = decode_bytes(
        b'{"model":"reasoning","max_tokens":1,"messages":[{"role":"user","content":"x"}],"temperature":1e0,'
        b'"top_p":0.90,"top_k":9007199254740993,"stop_sequences":["b","a"]}'
    ).request.body
    assert body.endswith(b'"max_tokens":1,"stop":["b","a"],"temperature":1e0,"top_p":0.90,"top_k":9007199254740993}')


@pytest.mark.parametrize(
    ("effort", "efforts", "expected"),
    [
        ("low", ("low", "medium", "high"), "low"),
        ("medium", ("low", "medium", "high"), "medium"),
        ("xhigh", ("low", "medium", "high"), "high"),
        ("max", ("low", "medium", "high", "max"), "max"),
        ("medium", ("low", "high"), None),
        ("max", (), None),
        ("other", ("low",), None),
    ],
)
def test_effort(effort: str, efforts: tuple[str, ...], expected: str | None) -> None:
    """Q21: what the upstream lists passes, the highest two become its highest, the rest is omitted."""
    engine = Engine(model="m", reasoning_efforts=efforts)
    assert upstream_body(engine, output_config={"effort": effort}).get("reasoning_effort") == expected
    disabled = upstream_body(engine, output_config={"effort": effort}, thinking={"type": "disabled"})
    assert "reasoning_effort" not in disabled


@pytest.mark.parametrize("place", ["new", "legacy", "both"])
def test_structured_output_keeps_the_schema(place: str) -> None:
    """Q22: the schema's bytes are the client's, wherever it stands."""
    schema = b'{"type": "object", "maximum": 1e2, "x": 9007199254740993, "$schema": "y"}'
    wanted = b'{"type":"json_schema","schema":' + schema + b"}"
    members = {
        "new": b'"output_config":{"format":' + wanted + b"}",
        "legacy": b'"output_format":' + wanted,
        "both": b'"output_config":{"format":' + wanted + b'},"output_format":{"type":"json_schema","schema":{}}',
    }[place]
    body = decode_bytes(
        b'{"model":"reasoning","max_tokens":1,"messages":[{"role":"user","content":"x"}],' + members + b"}"
    )
    expected = b'"response_format":{"type":"json_schema","json_schema":{"name":"output","schema":' + schema + b"}}"
    assert expected in body.request.body


# -- thinking ---------------------------------------------------------------------------------------------------------


def test_thinking_patches() -> None:
    """Q70 to Q73: asked for, forbidden or neither; a budget only where the upstream takes one."""
    on, off = {"enable_thinking": True}, {"enable_thinking": False}
    budget = Engine(model="m", thinking_budget=True)
    enabled = {"type": "enabled", "budget_tokens": 64}
    assert upstream_body(thinking=enabled)["chat_template_kwargs"] == on
    assert "thinking_token_budget" not in upstream_body(thinking=enabled)
    assert upstream_body(budget, thinking=enabled)["thinking_token_budget"] == 64
    assert "thinking_token_budget" not in upstream_body(budget, thinking={"type": "enabled"})
    for kind in ("adaptive", "between_tools"):
        body = upstream_body(budget, thinking={"type": kind})
        assert body["chat_template_kwargs"] == on
        assert "thinking_token_budget" not in body
    assert upstream_body(thinking={"type": "disabled"})["chat_template_kwargs"] == off
    assert "chat_template_kwargs" not in upstream_body(thinking=None)
    deepseek = Engine(model="m", thinking_on={"chat_template_kwargs": {"thinking": True}})
    assert upstream_body(deepseek, thinking=enabled)["chat_template_kwargs"] == {"thinking": True}


# -- the system prompt ------------------------------------------------------------------------------------------------


def test_system_blocks_are_one_text() -> None:
    """Q13: joined with a blank line, in order, empty ones left out."""
    messages = upstream_messages([user(text("x"))], system=[text("a"), text(""), text("b")])
    assert messages[0] == {"role": "system", "content": "a\n\nb"}
    assert upstream_messages([user(text("x"))], system="a")[0] == {"role": "system", "content": "a"}


def test_the_billing_line_does_not_reach_the_engine() -> None:
    """Case 14, Q14: two requests that differ only in it are one prefix; the same words of a user stay."""

    def body(cch: str, words: str) -> bytes:
        line = f"x-anthropic-billing-header: cc_version=2.1; cch={cch};"
        system: Any = [text(line), text(words)] if words else f"{line}\n{line}\nBe brief."
        return decode(system=system).request.body

    assert body("aa111", "Be brief.") == body("bb222", "Be brief.") == body("cc333", "")
    assert json.loads(body("a", ""))["messages"][0]["content"] == "Be brief."
    only = decode(system="x-anthropic-billing-header: a").request.body
    assert only == decode(system="x-anthropic-billing-header: a\n \n").request.body == decode().request.body
    kept = upstream_messages([{"role": "user", "content": "x-anthropic-billing-header: a"}])
    assert kept[0]["content"] == "x-anthropic-billing-header: a"


def test_a_system_message_in_mid_conversation_keeps_its_place() -> None:
    """Case 17, Q47: as a reminder in the user's turn by default, as a system message where templates take one."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": "Answer only BLUE."},
        {"role": "user", "content": "c"},
    ]
    folded = upstream_messages(messages)
    assert [message["role"] for message in folded] == ["user", "assistant", "user"]
    assert folded[2]["content"] == [
        {"type": "text", "text": "<system-reminder>\nAnswer only BLUE.\n</system-reminder>"},
        {"type": "text", "text": "c"},
    ]
    in_place = upstream_messages(messages, Engine(model="m", system_anywhere=True))
    assert [message["role"] for message in in_place] == ["user", "assistant", "system", "user"]


def test_a_system_message_first_leads() -> None:
    """Q47: first in the list, and without a system prompt, it is the system prompt; a second one joins it."""
    first = [
        {"role": "system", "content": "a"},
        {"role": "system", "content": [text("b")]},
        {"role": "user", "content": "c"},
    ]
    assert upstream_messages(first)[0] == {"role": "system", "content": "a\n\nb"}
    with_prompt = upstream_messages(first, system="p")
    assert with_prompt[0] == {"role": "system", "content": "p"}
    assert "system-reminder" in with_prompt[1]["content"][0]["text"]
    assert len(upstream_messages([{"role": "system"}, {"role": "user", "content": "c"}])) == 1


@pytest.mark.parametrize("anywhere", [True, False])
def test_a_system_message_never_parts_calls_from_results(anywhere: bool) -> None:
    """Q45, Q47: it goes after the results, even where these come in several user messages."""
    messages = [
        {"role": "user", "content": "a"},
        assistant(use("1"), use("2")),
        {"role": "system", "content": "s"},
        user(result("r1", "1")),
        {"role": "system", "content": "t"},
        user(text("b"), result("r2", "2")),
    ]
    sent = upstream_messages(messages, Engine(model="m", system_anywhere=anywhere))
    roles = [message["role"] for message in sent]
    last = ["system", "system", "user"] if anywhere else ["user"]
    assert roles == ["user", "assistant", "tool", "tool", *last]


def test_tools_change_in_mid_conversation() -> None:
    """Q48: additions and removals apply in order; what they refer to must be known."""
    cat = {"name": "cat", "input_schema": {"type": "object"}}

    def names(*changes: dict[str, Any]) -> list[str]:
        messages = [{"role": "user", "content": "x"}, {"role": "system", "content": list(changes)}]
        tools = upstream_body(messages=messages, tools=[LS, cat]).get("tools", [])
        return [tool["function"]["name"] for tool in tools]

    def change(kind: str, **tool: Any) -> dict[str, Any]:
        return {"type": f"tool_{kind}", "tool": tool}

    remove_ls = change("removal", type="tool_reference", name="ls")
    add_ls = change("addition", type="tool_reference", name="ls")
    define = change("addition", type="tool_definition", definition={"name": "new"})
    assert names(remove_ls) == ["cat"]
    assert names(remove_ls, add_ls) == ["cat", "ls"]
    assert names(define) == ["ls", "cat", "new"]
    assert names(remove_ls, change("removal", type="tool_reference", name="cat")) == []
    for bad, path in (
        (change("removal", type="tool_reference", name="x"), "tool.name"),
        (change("removal", type="mcp_toolset_reference"), "tool.type"),
        (change("removal", type="tool_definition", definition={"name": "x"}), "tool.type"),
        ({"type": "tool_change"}, "type"),
        ({"type": "tool_addition"}, "tool"),
    ):
        messages = [{"role": "user", "content": "x"}, {"role": "system", "content": [bad]}]
        assert refused(messages=messages, tools=[LS])[0] == f"messages.1.content.0.{path}"


# -- user turns -------------------------------------------------------------------------------------------------------


def test_user_text_is_a_string_where_it_can_be() -> None:
    """Q31, Q32: one text is a plain string, several are parts, empty ones go, nothing left is one empty string."""
    assert upstream_messages([{"role": "user", "content": ""}]) == [{"role": "user", "content": ""}]
    assert upstream_messages([user()]) == [{"role": "user", "content": ""}]
    assert upstream_messages([user(text(""), text(" a\n"))]) == [{"role": "user", "content": " a\n"}]
    several = upstream_messages([user(text("a"), text("b"))])[0]["content"]
    assert several == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_cache_control_reaches_no_upstream() -> None:
    """Case 13, Q23, Q32, Q60: a hint for Anthropic's cache is nobody else's, and one text block is a string."""
    hint = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    call = decode(messages=[user(text("hi") | hint)], tools=[LS | hint], system=[text("s") | hint])
    assert b"cache_control" not in call.request.body
    assert b'{"role":"user","content":"hi"}' in call.request.body


def test_turns_of_one_role_are_one_turn() -> None:
    """Q12: strict templates refuse two in a row; also what only an empty assistant turn parted is one."""
    messages = [
        {"role": "user", "content": "a"},
        assistant({"type": "redacted_thinking", "data": "x"}),
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        assistant(text("d"), use()),
    ]
    sent = upstream_messages(messages)
    assert [message["role"] for message in sent] == ["user", "assistant"]
    assert sent[0]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert sent[1]["content"] == "cd"


def test_images() -> None:
    """Q34, Q35: base64 becomes a data URL; a web address only where the engine may fetch those."""
    sent = upstream_messages([user(text("a"), PNG, text("b"))])[0]["content"]
    assert sent == [{"type": "text", "text": "a"}, PNG_PART, {"type": "text", "text": "b"}]
    assert upstream_messages([user(PNG)])[0]["content"] == [PNG_PART]
    url = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    fetching = Engine(model="m", image_urls=True)
    assert upstream_messages([user(url)], fetching)[0]["content"][0]["image_url"] == {
        "url": "https://example.org/a.png"
    }
    local = {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}
    assert refused_block(url)[0] == "messages.0.content.0.image.source"
    assert refused_block(local, engine=fetching)[0] == "messages.0.content.0.image.source"
    file = {"type": "image", "source": {"type": "file", "file_id": "x"}}
    assert refused_block(file)[0] == "messages.0.content.0.image.source"
    tiff = {"type": "image", "source": {"type": "base64", "media_type": "image/tiff", "data": ""}}
    assert refused_block(tiff)[0] == "messages.0.content.0.image.source.media_type"
    empty = {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}
    assert refused_block(empty)[0] == "messages.0.content.0.image.source.data"
    blind = refused_block(PNG, engine=Engine(model="m", images=False))
    assert blind == ("messages.0.content.0.image", "this model does not accept images")


def test_text_documents_are_inlined() -> None:
    """Q36: text at its place behind a header line, images as images."""

    def sent(**members: Any) -> Any:
        return upstream_messages([user({"type": "document"} | members)])[0]["content"]

    plain = {"type": "text", "media_type": "text/plain", "data": "body"}
    assert sent(source=plain) == "body"
    assert sent(source=plain, title="T", context="C") == "Document: T - C\nbody"
    assert sent(source={"type": "content", "content": "body"}, title="T") == "Document: T\nbody"
    mixed = sent(source={"type": "content", "content": [PNG, text("b")]}, title="T")
    assert mixed == [{"type": "text", "text": "Document: T\n"}, PNG_PART, {"type": "text", "text": "b"}]
    for source, path in (
        ({"type": "text"}, "source.data"),
        ({"type": "content"}, "source.content"),
        ({"type": "content", "content": [use()]}, "source.content.0.type"),
    ):
        refusal = refused_block({"type": "document", "source": source})
        assert refusal[0] == f"messages.0.content.0.document.{path}"


@pytest.mark.parametrize("kind", ["base64", "url", "file"])
def test_documents_that_are_no_text_are_refused(kind: str) -> None:
    """Case 12, Q37: never dropped, never sent as a file part; also within a tool result."""
    pdf = {"type": "document", "source": {"type": kind, "media_type": "application/pdf", "data": "JVBERi0="}}
    path, reason = refused(messages=[user(pdf, text("sum up"))])
    assert path == "messages.0.content.0.document"
    assert reason == "PDF and file sources are not supported by this gateway; send the text instead"
    assert refused_block(result([pdf]))[0] == "messages.0.content.0.content.0.document"


def test_search_results_are_text() -> None:
    """Q38: title, source, then the texts."""
    found = {"type": "search_result", "title": "T", "source": "https://x", "content": [text("a"), text("b")]}
    assert upstream_messages([user(found)])[0]["content"] == "T\nhttps://x\na\nb"
    assert refused_block(found | {"content": [PNG]})[0] == "messages.0.content.0.content.0.type"


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        ("user", "container_upload"),
        ("user", "unheard_of"),
        ("assistant", "unheard_of"),
        ("user", "tool_use"),
        ("user", "thinking"),
        ("assistant", "tool_result"),
        ("assistant", "image"),
        ("system", "image"),
    ],
)
def test_blocks_that_are_not_understood_are_refused(role: str, kind: str) -> None:
    """Q45, Q51: silently dropped content is the worst answer."""
    assert refused_block({"type": kind}, role)[0] == "messages.0.content.0.type"


@pytest.mark.parametrize(
    "kind", ["server_tool_use", "web_search_tool_result", "code_execution_tool_result", "mcp_tool_use"]
)
def test_blocks_of_server_tools_are_dropped(kind: str) -> None:
    """Q50: the client cannot rewrite its past."""
    messages = [{"role": "user", "content": "a"}, assistant({"type": kind}, text("b")), user({"type": kind}, text("c"))]
    assert [message["content"] for message in upstream_messages(messages)] == ["a", "b", "c"]


# -- assistant turns --------------------------------------------------------------------------------------------------


def test_assistant_turns() -> None:
    """Q33, Q39, Q40, Q41: texts with nothing in between, reasoning in the upstream's field, calls with their input."""
    turn = assistant(
        {"type": "thinking", "thinking": "t1", "signature": "anything"},
        {"type": "redacted_thinking", "data": "x"},
        text("a "),
        {"type": "thinking", "thinking": "", "signature": ""},
        text("b"),
        use("toolu_1", "ls", input={"p": "/"}),
        use("toolu_2", "ls", input=None),
    )
    messages = [{"role": "user", "content": "x"}, turn, user(result("r"))]
    expected = {
        "role": "assistant",
        "content": "a b",
        "reasoning": "t1",
        "tool_calls": [
            {"id": "toolu_1", "type": "function", "function": {"name": "ls", "arguments": '{"p":"/"}'}},
            {"id": "toolu_2", "type": "function", "function": {"name": "ls", "arguments": "{}"}},
        ],
    }
    assert upstream_messages(messages)[1] == expected
    other = upstream_messages(messages, Engine(model="m", reasoning_field="reasoning_content"))[1]
    assert other["reasoning_content"] == "t1"
    assert "reasoning" not in other
    only_thinking = [messages[0], assistant({"type": "thinking", "thinking": "t"}), messages[0]]
    assert upstream_messages(only_thinking)[1] == {"role": "assistant", "content": "", "reasoning": "t"}


def test_tool_input_survives() -> None:
    """Q41: key order, integers of any size and the spelling of floats stay; characters are not escaped."""
    tool_input = (
        b'{ "z" : 123456789012345678901234567890, "a": [1e2, 1.10, -0.0], "caf\\u00e9": "\xc3\xbc \\ud83d\\ude00 \\n" }'
    )
    body = (
        b'{"model":"reasoning","max_tokens":1,"messages":[{"role":"user","content":"x"},{"role":"assistant","content":'
        b'[{"type":"tool_use","id":"a","name":"f","input":' + tool_input + b"}]}]}"
    )
    message = json.loads(decode_bytes(body).request.body)["messages"][1]
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"z":123456789012345678901234567890,"a":[1e2,1.10,-0.0],"café":"ü 😀 \\n"}'
    endless = body.replace(b"123456789012345678901234567890", b"1" * 5000)
    message = json.loads(decode_bytes(endless).request.body)["messages"][1]
    assert "1" * 5000 in message["tool_calls"][0]["function"]["arguments"]
    assert refused_block(use(input="x"), "assistant") == ("messages.0.content.0.input", "must be an object")


def test_a_trailing_assistant_text_is_continued() -> None:
    """Q49: a prefill goes up verbatim, white space included; a turn that ends in calls is none."""
    body = upstream_body(messages=[{"role": "user", "content": "x"}, assistant(text("The answer: "))])
    assert body["continue_final_message"] is True
    assert body["add_generation_prompt"] is False
    assert body["messages"][1]["content"] == "The answer: "
    for last in (
        assistant(text("a"), use()),
        assistant({"type": "thinking", "thinking": "t"}),
        {"role": "assistant", "content": ""},
    ):
        assert "continue_final_message" not in upstream_body(messages=[{"role": "user", "content": "x"}, last])


# -- tool results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (result(), ""),
        (result(None), ""),
        (result([]), ""),
        (result(""), ""),
        (result("a\n"), "a\n"),
        (result([text("a"), text("b")]), "a\nb"),
        (result([{"type": "tool_reference", "tool_name": "ls"}]), "ls"),
        (result([{"type": "search_result", "title": "T", "source": "S", "content": [text("a")]}]), "T\nS\na"),
        (result([{"type": "document", "source": {"type": "text", "data": "d"}}]), "d"),
        (result("boom", is_error=True), "Error:\nboom"),
        (result(is_error=True), "Error:"),
        (result("fine", is_error=False), "fine"),
        (result("fine", is_error=None), "fine"),
    ],
)
def test_tool_results(block: dict[str, Any], expected: str) -> None:
    """Q42, Q44: the text of a result, with a first line that says so where it is an error."""
    sent = upstream_messages([{"role": "user", "content": "x"}, assistant(use()), user(block)])
    assert sent[2:] == [{"role": "tool", "tool_call_id": "toolu_1", "content": expected}]


def test_images_of_a_result_reach_the_model() -> None:
    """Case 21, Q43: in the tool message where it takes them, else in the user message behind, named."""
    messages = [{"role": "user", "content": "x"}, assistant(use()), user(text("next"), result([text("shot"), PNG]))]
    tool_message, user_message = upstream_messages(messages)[2:]
    assert tool_message["content"] == "shot"
    assert user_message["content"] == [
        {"type": "text", "text": "Image from the tool result toolu_1:"},
        PNG_PART,
        {"type": "text", "text": "next"},
    ]
    taking = Engine(model="m", tool_images=True)
    tool_message, user_message = upstream_messages(messages, taking)[2:]
    assert tool_message["content"] == [{"type": "text", "text": "shot"}, PNG_PART]
    assert user_message == {"role": "user", "content": "next"}
    failed = upstream_messages([user(result([PNG], is_error=True))], taking)[0]["content"]
    assert failed == [{"type": "text", "text": "Error:"}, PNG_PART]


def test_results_come_right_after_their_calls() -> None:
    """Case 22, Q45: all tool messages first, in the order of their blocks, then the user's own."""
    turn = user(text("next"), result("ok", "2"), text("more"), result("ok", "1"))
    sent = upstream_messages([{"role": "user", "content": "x"}, assistant(use("1"), use("2")), turn])[2:]
    assert [message["role"] for message in sent] == ["tool", "tool", "user"]
    assert [message["tool_call_id"] for message in sent[:2]] == ["2", "1"]


def test_unknown_content_of_a_result_is_refused() -> None:
    """Q42: with the path down to the block."""
    assert refused_block(result([{"type": "video"}]))[0] == "messages.0.content.0.content.0.type"
    assert refused_block({"type": "tool_result"})[0] == "messages.0.content.0.tool_use_id"


# -- ids --------------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.text(alphabet="abc_-:.", min_size=1)))
def test_ids_are_reversible(upstream_id: str) -> None:
    """Q46: whatever an engine calls a call, the client sees Anthropic's alphabet and the engine gets its own back."""
    shown = ids.shown_tool_id(upstream_id)
    assert shown.replace("-", "a").replace("_", "a").isalnum()
    assert shown.isascii()
    assert ids.upstream_tool_id(shown) == upstream_id
    assert ids.upstream_tool_id(ids.shown_tool_id(shown)) == shown


def test_plain_ids_pass_verbatim() -> None:
    """Q46: ids of other makers, and what only looks like one of ours, are nobody's to change."""
    for plain in ("toolu_01ab", "call-1", "a"):
        assert ids.shown_tool_id(plain) == ids.upstream_tool_id(plain) == plain
    prefix = ids.shown_tool_id(":").rstrip("Og")
    for foreign in (f"{prefix}!", f"{prefix}a", f"{prefix}_w", prefix + "Zg="):
        assert ids.upstream_tool_id(foreign) == foreign
    sent = upstream_messages(
        [
            assistant(use(ids.shown_tool_id("functions.Bash:0"))),
            user(result("x", ids.shown_tool_id("functions.Bash:0"))),
        ]
    )
    assert sent[0]["tool_calls"][0]["id"] == sent[1]["tool_call_id"] == "functions.Bash:0"


# -- tools ------------------------------------------------------------------------------------------------------------


def test_tools_go_up_as_functions() -> None:
    """Q60: name, description and the schema's own bytes; nothing is added and hints disappear."""
    schema = b'{"$schema": "x", "type": "object", "properties": {"b": {"maximum": 1e2}, "a": {}}, "items": false}'
    body = decode_bytes(
        b'{"model":"reasoning","max_tokens":1,"messages":[{"role":"user","content":"x"}],"tools":['
        b'{"name":"f","description":"d","input_schema":' + schema + b',"strict":true,"defer_loading":true},'
        b'{"name":"g","type":"custom","description":5,"strict":false,"eager_input_streaming":true},{"name":"h","type":null}]}'
    ).request.body
    empty = b'"parameters":{"type":"object","properties":{}}}}'
    assert body.split(b'"tools":')[1].split(b',"max_tokens"')[0] == (
        b'[{"type":"function","function":{"name":"f","description":"d","parameters":' + schema + b',"strict":true}},'
        b'{"type":"function","function":{"name":"g",'
        + empty
        + b',{"type":"function","function":{"name":"h",'
        + empty
        + b"]"
    )


def test_long_tool_names_are_not_touched() -> None:
    """Q61: vLLM has no limit of 64 characters."""
    assert upstream_body(tools=[{"name": "x" * 200}])["tools"][0]["function"]["name"] == "x" * 200


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "ls"}, {"tool_choice": {"type": "function", "function": {"name": "ls"}}}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto"}),
        (None, {}),
    ],
)
def test_tool_choice(choice: Any, expected: dict[str, Any]) -> None:
    """Case 18, Q64, Q66: each choice has its word, and forbidding parallel calls changes nothing else."""
    body = upstream_body(tools=[LS], tool_choice=choice)
    assert len(body["tools"]) == 1
    assert {name: body[name] for name in ("tool_choice", "parallel_tool_calls") if name in body} == expected


def test_server_tools_are_left_out_beside_others() -> None:
    """Q63: an engine cannot run them, but the rest of the tools still works."""
    body = upstream_body(tools=[LS, {"type": "web_search_20250305", "name": "web_search"}], tool_choice={"type": "any"})
    assert [tool["function"]["name"] for tool in body["tools"]] == ["ls"]


# -- as a whole -------------------------------------------------------------------------------------------------------


def test_the_same_request_gives_the_same_bytes() -> None:
    """0.4.3: no clock and no chance in the request direction, so that the prefix cache works."""
    members: dict[str, Any] = {
        "messages": [user(text("a"), PNG), assistant(use()), user(result("r"))],
        "tools": [LS],
        "stream": True,
        "thinking": {"type": "adaptive"},
    }
    assert decode(**members).request.body == decode(**members).request.body


_JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["type", "text", "content", "source", "name", "id", "tool", "input", "role"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
_BLOCK = st.dictionaries(
    st.sampled_from(
        ["text", "content", "source", "name", "id", "tool_use_id", "input", "is_error", "tool", "thinking", "title"]
    ),
    _JSON,
    max_size=4,
).flatmap(
    lambda members: st.sampled_from(
        ["text", "image", "document", "tool_use", "tool_result", "thinking", "search_result", "tool_addition", "x"]
    ).map(lambda kind: {"type": kind} | members)
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["user", "assistant", "system"]),
                "content": st.one_of(_JSON, st.lists(_BLOCK, max_size=3)),
            }
        ),
        max_size=4,
    ),
    st.dictionaries(
        st.sampled_from(
            ["system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences", "container", "stream"]
        ),
        _JSON,
        max_size=3,
    ),
)
def test_any_document_is_translated_or_refused(messages: list[Any], members: dict[str, Any]) -> None:
    """The decoder is total: a chat request, or a GatewayError that says what is wrong."""
    try:
        call = decode(messages=messages, **members)
    except GatewayError:
        return
    assert json.loads(call.request.body)["messages"] is not None


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(alphabet='{}[]",:\\ud8dc0 1e', max_size=40).map(str.encode)))
def test_any_bytes_are_refused_in_words(body: bytes) -> None:
    """Q6: no bytes whatever raise anything but a GatewayError."""
    with pytest.raises(GatewayError):
        decode_bytes(body)
