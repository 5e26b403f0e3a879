"""The three edits of a request on /v1: an alias, the usage of a stream, the operator's defaults; nothing else changes.

The rule ids are those of dialects.md.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogw.canonical import CanonicalRequest, Engine
from aiogw.dialects.base import Call, RelayEndpoint
from aiogw.dialects.openai import OPENAI
from aiogw.errors import GatewayError, UnknownModel

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
AUDIO = "/v1/audio/transcriptions"
FORM = "multipart/form-data; boundary=b0undary"

PLAIN = Engine(model="reasoning")
ACCOUNTED = evolve(PLAIN, accounting=True)
DEFAULTED = evolve(PLAIN, body_defaults={"top_k": 20, "chat_template_kwargs": {"enable_thinking": False}})


def call(body: bytes, engine: Engine = PLAIN, *, path: str = CHAT, content_type: str = "application/json") -> Call:
    """``body`` decoded where the names ``reasoning`` and ``alias`` lead to ``engine``."""

    def find_engine(model: str) -> Engine:
        if model in ("reasoning", "alias"):
            return engine
        raise UnknownModel(model=model, known=("reasoning",))

    endpoint = OPENAI.endpoint("POST", path)
    assert isinstance(endpoint, RelayEndpoint)
    decoded = OPENAI.decode(endpoint, content_type, body, find_engine)
    assert isinstance(decoded, Call)
    return decoded


def decode(body: bytes, engine: Engine = PLAIN, **more: Any) -> CanonicalRequest:
    return call(body, engine, **more).request


# -- nothing to edit ------------------------------------------------------------------------------------------------

ODD = b"""
 {"seed":12345678901234567890123, "temperature": 1e2, "top_p":1.0,\t"\\u0061lso":"\\u00fc\\ud83d\\ude00\\u0000",
  "x":1, "x":{"deep":[[[{}]]], "n":-0.0},"unknown": null, "messages":[], "stream":true,"model":"reasoning" }\r\n"""


def test_without_an_edit_nobody_writes() -> None:
    """O1, O3: not a byte is changed, not even the object is another, and without accounting no usage is asked for."""
    assert decode(ODD).body is ODD
    assert decode(ODD, path=COMPLETIONS).body is ODD


PASSED = (
    '"user":"u"',
    '"metadata":{"a":"b"}',
    '"store":true',
    '"service_tier":"flex"',
    '"prompt_cache_key":"k"',
    '"safety_identifier":"s"',
    '"priority":3',
    '"cache_salt":"s"',
    '"kv_transfer_params":{"do_remote_decode":true}',
    '"vllm_xargs":{"x":1}',
    '"request_id":"r"',
    '"session_id":"s"',
)


@pytest.mark.parametrize("member", PASSED)
def test_every_other_field_is_passed(member: str) -> None:
    """O10: what the gateway has no business with goes up, with an edit elsewhere or without."""
    body = b'{"model":"alias",%b,"messages":[]}' % member.encode()
    assert body.replace(b"alias", b"reasoning") == decode(body).body


# -- aliases --------------------------------------------------------------------------------------------------------


def test_an_alias_becomes_the_upstreams_name() -> None:
    """O2: only that member; the client's name stays the one that is routed and logged."""
    found = decode(b'{"messages":[], "model" : "alias","seed":9007199254740993}')
    assert b'{"messages":[],"model":"reasoning","seed":9007199254740993}' == found.body
    assert "alias" == found.model


NUMBERS = ("9007199254740993", "123456789012345678901234567890", "-0", "1e2", "1E+2", "1.0", "0.1000000000000000055")


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_survive_an_edit(number: str) -> None:
    """O2: no number is read and written again (llm-d-router#2518 rounded them)."""
    expected = b'{"model":"reasoning","prompt":"x","seed":%b}' % number.encode()
    assert expected == decode(expected.replace(b"reasoning", b"alias"), path=COMPLETIONS).body


def test_values_keep_their_bytes_and_members_their_order() -> None:
    """O2: escapes, blanks inside of values and nested repeated keys stay as they were."""
    body = (
        b'{"z":{ "b" : [1 , 2],"b":3 },"model":"alias","a":"\\u00e9\\/\\ud83d\\ude00",'
        b'"\xc3\xa9":"\xf0\x9f\x98\x80","n":null}'
    )
    assert body.replace(b"alias", b"reasoning") == decode(body).body


def test_a_repeated_key_counts_with_its_last_value() -> None:
    """O2: as it would have for the upstream, and for the name that is routed as well."""
    body = b'{"model":"nobody","n":1,"model":"alias","n":2,"messages":[]}'
    found = decode(body)
    assert {"model": "reasoning", "n": 2, "messages": []} == json.loads(found.body)
    assert 2 == found.sequences
    assert b'{"model":"reasoning","n":2,"messages":[]}' == found.body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"x":NaN,"model":"alias","y":[-Infinity]}', b'{"x":NaN,"model":"reasoning","y":[-Infinity]}'),
        (b'\xef\xbb\xbf{"model":"alias","n":1}', b'{"model":"reasoning","n":1}'),
        (b'{"x":"\\ud83d","model":"alias"}', b'{"x":"\\ud83d","model":"reasoning"}'),
        (b'{"\\ud83d":1,"model":"alias"}', b'{"\\ud83d":1,"model":"reasoning"}'),
        (b'{"model":"alias","seed":12345678901234567890123,"x":NaN}', None),
    ],
    ids=["nan", "byte-order-mark", "half-a-character", "half-a-character-in-a-name", "large-integer"],
)
def test_what_only_a_lenient_parser_reads_is_edited_too(body: bytes, expected: bytes | None) -> None:
    """O2: the upstream still gets what it would have read, also where the fast parser gives up."""
    found = decode(body).body
    assert (expected or body.replace(b"alias", b"reasoning")) == found.replace(b": ", b":").replace(b", ", b",")


def test_an_alias_changes_nothing_else_that_is_called_model() -> None:
    """O2: the same word in a message, or a member of that name further down, stays."""
    body = b'{"messages":[{"role":"user","content":"alias","model":"alias"}],"model":"alias"}'
    expected = b'{"messages":[{"role":"user","content":"alias","model":"alias"}],"model":"reasoning"}'
    assert expected == decode(body).body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, "/v1/score", "/v1/rerank"])
def test_an_alias_serves_every_operation(path: str) -> None:
    """O2: whatever the name is used for."""
    assert b'{"model":"reasoning","input":"x"}' == decode(b'{"model":"alias","input":"x"}', path=path).body


def part(disposition: bytes, content: bytes) -> bytes:
    return b"--b0undary\r\nContent-Disposition: form-data; " + disposition + b"\r\n\r\n" + content + b"\r\n"


@pytest.mark.parametrize("content", [b"alias", b" alias\t"], ids=repr)
def test_an_alias_in_a_form(content: bytes) -> None:
    """O2: the content of that one part is replaced; the audio beside it is not touched, whatever is in it."""
    audio = part(b'name="file"; filename="model"', b"alias\r\n--b0undar\x00\xff" * 1000)
    body = audio + part(b'name="model"', content) + part(b'name="prompt"', b"alias") + b"--b0undary--\r\n"
    found = decode(body, path=AUDIO, content_type=FORM)
    assert ("alias", FORM) == (found.model, found.content_type)
    expected = audio + part(b'name="model"', b"reasoning") + part(b'name="prompt"', b"alias") + b"--b0undary--\r\n"
    assert expected == found.body


def test_a_form_without_an_alias_is_passed_as_it_is() -> None:
    """O1: with accounting and defaults as well, which are for JSON bodies."""
    body = part(b'name="model"', b"reasoning") + b"--b0undary--\r\n"
    assert body is decode(body, evolve(DEFAULTED, accounting=True), path=AUDIO, content_type=FORM).body


# -- accounting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", '{"include_usage":true}'),
        ('"stream_options":null,', '{"include_usage":true}'),
        ('"stream_options":{},', '{"include_usage":true}'),
        ('"stream_options":{"include_usage":false},', '{"include_usage":true}'),
        ('"stream_options":{"include_usage":null},', '{"include_usage":true}'),
        (
            '"stream_options":{"continuous_usage_stats":true,"x":1e2},',
            '{"continuous_usage_stats":true,"x":1e2,"include_usage":true}',
        ),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_usage_of_a_stream_is_asked_for(path: str, options: str, expected: str) -> None:
    """O3: other members of the options are kept, there is one of them and not two, and the rest stays as it is."""
    found = decode(b'{"model":"reasoning",%b"seed":1e2,"stream":true}' % options.encode(), ACCOUNTED, path=path)
    members = json.loads(found.body, object_pairs_hook=lambda pairs: pairs)
    assert 1 == sum(name == "stream_options" for name, _ in members)
    assert expected.encode() in found.body
    assert b'"seed":1e2' in found.body
    assert found.stream


@pytest.mark.parametrize(
    "members",
    [
        '"stream":true,"stream_options":{"include_usage":true}',
        '"stream":true,"stream_options":{ "include_usage" : true, "x":1 }',
        '"stream":false',
        '"stream":null',
        '"stream":1',
        '"messages":[]',
        '"stream":false,"stream_options":{"include_usage":false}',
        # For the upstream to refuse.
        '"stream":true,"stream_options":[]',
        '"stream":true,"stream_options":"x"',
    ],
)
def test_the_usage_is_not_asked_for(members: str) -> None:
    """O3: where the client does so itself, where nothing is streamed, and where the options are none."""
    body = b'{ "model":"reasoning",%b}' % members.encode()
    found = decode(body, ACCOUNTED).body
    assert json.loads(body) == json.loads(found)
    assert members.replace(" ", "") in found.decode().replace(" ", "")


@pytest.mark.parametrize("path", [RESPONSES, EMBEDDINGS, "/v1/score"])
def test_only_chat_and_completions_have_options(path: str) -> None:
    """O3, O14: a stream of Responses tells its usage by itself, and would be refused with options."""
    body = b'{"model":"reasoning","stream":true}'
    assert body == decode(body, ACCOUNTED, path=path).body


# -- the operator's defaults ----------------------------------------------------------------------------------------


def test_defaults_are_for_what_the_client_does_not_say() -> None:
    """O1: the configured members are added, and one that the client sent stays, also null."""
    found = decode(b'{"model":"reasoning","top_k":1e0}', DEFAULTED).body
    assert b'{"model":"reasoning","top_k":1e0,"chat_template_kwargs":{"enable_thinking":false}}' == found
    found = decode(b'{"chat_template_kwargs":null,"model":"reasoning"}', DEFAULTED).body
    assert b'{"chat_template_kwargs":null,"model":"reasoning","top_k":20}' == found


def test_all_edits_at_once() -> None:
    """O2: each changes its own member."""
    found = decode(b'{"model":"alias","stream":true,"x":1.0}', evolve(DEFAULTED, accounting=True)).body
    assert (
        b'{"model":"reasoning","stream":true,"x":1.0,"top_k":20,"chat_template_kwargs":{"enable_thinking":false},'
        b'"stream_options":{"include_usage":true}}'
    ) == found


# -- whatever is sent -----------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(["stream", "stream_options", "n", "prompt", "top_k", "messages"]) | st.text(max_size=4)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(NAMES, VALUES, max_size=5), st.booleans())
def test_an_edit_changes_nothing_else(members: dict[str, Any], accounting: bool) -> None:
    """O1, O2: whatever the other members are, also half characters and NaN, each is what it was."""
    engine = evolve(DEFAULTED, accounting=accounting)
    sent = {**members, "model": "alias"}
    received = json.loads(decode(json.dumps(sent).encode(), engine).body)
    expected = {**DEFAULTED.body_defaults, **sent, "model": "reasoning"}
    if accounting and members.get("stream") is True:
        options = members.get("stream_options")
        if options is None or isinstance(options, dict):
            expected["stream_options"] = {**(options or {}), "include_usage": True}
    # As text, because NaN is not equal to itself.
    assert json.dumps(expected, sort_keys=True) == json.dumps(received, sort_keys=True)


PIECES = [
    b"{",
    b"}",
    b"[",
    b"]",
    b'"model"',
    b'"alias"',
    b":",
    b",",
    b'"stream"',
    b"true",
    b"1e2",
    b'"\\ud83d"',
    b"\xff",
]
PIECES += [b'"stream_options"', b"NaN", b" ", b'"n"', b"-", b'"', b"\\", b"\x00", b'{"model":"alias",']


@settings(deadline=None, max_examples=500)
@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=3), max_size=14), st.sampled_from([CHAT, COMPLETIONS]))
def test_any_body_is_edited_or_refused(pieces: list[bytes], path: str) -> None:
    """O1, E18: nothing but a GatewayError comes of what is no request."""
    body = b"".join(pieces)
    for engine in (PLAIN, evolve(DEFAULTED, accounting=True)):
        try:
            decode(body, engine, path=path)
        except GatewayError as error:
            assert error.status < 500  # noqa: PT017 - it may just as well be read
