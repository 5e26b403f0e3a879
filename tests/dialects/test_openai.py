"""The OpenAI dialect: looks at a few members of a request, and lets everything else through as it came."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from specimens import OCCUPANCY, specimens

from aiogw.canonical import CanonicalRequest, Engine, ModelCard, Operation, ResponseHead
from aiogw.dialects.base import LocalEndpoint, RelayEndpoint
from aiogw.dialects.openai import OPENAI
from aiogw.dialects.openai.forms import MAX_PART_HEAD_BYTES, MAX_PARTS
from aiogw.dialects.openai.requests import MAX_COUNT
from aiogw.dialects.openai.responses import HELD_BYTES, PassThrough
from aiogw.dialects.openai.terms import ReplyTerms
from aiogw.errors import (
    ClientFault,
    Draining,
    GatewayError,
    InternalFault,
    InvalidField,
    MalformedBody,
    MethodNotAllowed,
    QueueFull,
    UnknownEndpoint,
    UnknownModel,
    UpstreamStatus,
    UpstreamUnavailable,
)

TRANSCRIPTS = Path(__file__).parent.parent / "transcripts" / "vllm-0.32"
MODELS = (ModelCard(id="reasoning", created=1_700_000_000), ModelCard(id="org/big", created=1_700_000_000))
CHAT = "/v1/chat/completions"
POSTS = {
    CHAT: Operation.CHAT,
    "/v1/completions": Operation.COMPLETIONS,
    "/v1/responses": Operation.RESPONSES,
    "/v1/embeddings": Operation.EMBEDDINGS,
    "/v1/score": Operation.SCORE,
    "/v1/rerank": Operation.RERANK,
    "/v1/audio/transcriptions": Operation.TRANSCRIPTIONS,
    "/v1/audio/translations": Operation.TRANSLATIONS,
    "/v1/chat/completions/batch": Operation.BATCH,
    "/v1/chat/completions/render": Operation.RENDER,
    "/v1/chat/completions/derender": Operation.RENDER,
    "/v1/completions/render": Operation.RENDER,
    "/v1/completions/derender": Operation.RENDER,
    "/v1/responses/render": Operation.RENDER,
}


def find_engine(model: str) -> Engine:
    if model in {card.id for card in MODELS}:
        return Engine(model=model)
    raise UnknownModel(model=model, known=("reasoning", "org/big"))


def decode(body: bytes, *, path: str = CHAT, content_type: str = "application/json") -> CanonicalRequest:
    endpoint = OPENAI.endpoint("POST", path)
    assert isinstance(endpoint, RelayEndpoint)
    return OPENAI.decode(endpoint, content_type, body, find_engine).request


def completion(members: str, *, path: str = "/v1/completions") -> CanonicalRequest:
    return decode(b'{"model":"reasoning",%b}' % members.encode(), path=path)


def fault(body: bytes, **more: Any) -> ClientFault:
    with pytest.raises(ClientFault) as caught:
        decode(body, **more)
    return caught.value


# -- endpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "operation"), POSTS.items())
def test_what_vllm_serves_is_relayed(path: str, operation: Operation) -> None:
    """Every POST endpoint goes to the same path at the upstream."""
    assert RelayEndpoint(operation=operation, path=path) == OPENAI.endpoint("POST", path)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "post", "BREW"])
@pytest.mark.parametrize("path", POSTS)
def test_a_relayed_endpoint_takes_post_only(path: str, method: str) -> None:
    """Another method is told which one there is."""
    with pytest.raises(MethodNotAllowed) as caught:
        OPENAI.endpoint(method, path)
    assert (method, path, ("POST",)) == (caught.value.method, caught.value.path, caught.value.allowed)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/reasoning"])
def test_models_are_answered_here(path: str) -> None:
    """GET and HEAD of models need no upstream; another method is told so."""
    for method in ("GET", "HEAD"):
        assert isinstance(OPENAI.endpoint(method, path), LocalEndpoint)
    with pytest.raises(MethodNotAllowed) as caught:
        OPENAI.endpoint("POST", path)
    assert ("GET", "HEAD") == caught.value.allowed


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/messages", "Anthropic's Messages API is at /llm/v1/messages."),
        ("/v1/messages/count_tokens", "Anthropic's Messages API is at /llm/v1/messages/count_tokens."),
        ("/v1/responses/resp_1", "A stored response belongs to one engine"),
        ("/v1/responses/resp_1/cancel", "A stored response belongs to one engine"),
        ("/v1/v1/chat/completions", "The /v1 is doubled"),
        ("/chat/completions/batch", "The /v1 is missing."),
        ("/chat/completions", "The /v1 is missing."),
        ("/models", "The /v1 is missing."),
        ("/v1", "OpenAI clients use the base URL"),
        ("/v1/", "OpenAI clients use the base URL"),
        ("/", "OpenAI clients use the base URL"),
        ("/v1/chat/completions/", "OpenAI clients use the base URL"),
        ("/v1/Chat/completions", "OpenAI clients use the base URL"),
        ("/v1/modelsx", "OpenAI clients use the base URL"),
        ("/v1/../metrics", "OpenAI clients use the base URL"),
        ("/v1/load_lora_adapter", "OpenAI clients use the base URL"),
    ],
)
def test_an_unknown_path_has_a_hint(path: str, hint: str) -> None:
    """The usual mistakes with base URLs are recognised; nothing but the table reaches an upstream."""
    with pytest.raises(UnknownEndpoint) as caught:
        OPENAI.endpoint("POST", path)
    assert path in caught.value.message
    assert caught.value.hint.startswith(hint)
    assert "/llm" in caught.value.hint


# -- models ---------------------------------------------------------------------------------------------------------


def answer(path: str, models: tuple[ModelCard, ...] = MODELS, query: Mapping[str, str] | None = None) -> Any:
    endpoint = OPENAI.endpoint("GET", path)
    assert isinstance(endpoint, LocalEndpoint)
    document = endpoint.answer(models, query or {})
    assert (200, "application/json") == (document.status, document.content_type)
    return json.loads(document.body)


def test_the_list_of_models() -> None:
    """OpenAI's shape, in the order of the configuration."""
    cards = [
        {"id": model, "object": "model", "created": 1_700_000_000, "owned_by": "aiogw"}
        for model in ("reasoning", "org/big")
    ]
    assert {"object": "list", "data": cards} == answer("/v1/models")
    assert cards[0] == answer("/v1/models/reasoning")


def test_a_model_with_slashes_in_its_name() -> None:
    """The rest of the path is the id, whatever is in it."""
    assert "org/big" == answer("/v1/models/org/big")["id"]


@pytest.mark.parametrize("model", ["", "org", "big", "reasoning/", "Reasoning"])
def test_a_model_that_is_not_there(model: str) -> None:
    """The error names it and those that are."""
    with pytest.raises(UnknownModel) as caught:
        answer(f"/v1/models/{model}")
    assert (model, ("reasoning", "org/big")) == (caught.value.model, caught.value.known)


# -- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat-stream-usage", "chat-whole", "chat-stream-n2-logprobs", "completions-stream"])
def test_a_recorded_request_passes_as_it_is(name: str) -> None:
    """What a real client sent to a real vLLM goes up in the same bytes."""
    recorded = (TRANSCRIPTS / f"{name}.request.json").read_bytes()
    path = "/v1/completions" if name.startswith("completions") else "/v1/chat/completions"
    body = re.sub(rb'"model": ?"[^"]*"', b'"model":"reasoning"', recorded, count=1)
    found = decode(body, path=path)
    assert body is found.body
    assert ("reasoning", path, "openai") == (found.model, found.path, found.surface)
    assert ("stream" in name) is found.stream
    assert (2 if "n2" in name else 1) == found.sequences


ODD = b"""
 {"stream" : true, "seed":12345678901234567890123, "temperature": 1e2, "top_p":1.0, "model": "first",
  "x":"\\u00fc \\u0000", "x":{"deep":[[[{}]]]},\t"unknown": null, "messages":[], "model":"reasoning" }\r\n"""


def test_nothing_is_judged_that_is_not_looked_at() -> None:
    """Blanks, repeated keys, large integers, unknown members and an empty conversation are the upstream's business."""
    found = decode(ODD)
    assert ODD is found.body
    assert ("reasoning", True, 1, Operation.CHAT) == (found.model, found.stream, found.sequences, found.operation)


def test_the_content_type_goes_up() -> None:
    """As the client said it; JSON where it said nothing."""
    for said, goes_up in (("Application/JSON; charset=utf-8",) * 2, ("", "application/json")):
        assert goes_up == decode(b'{"model":"reasoning"}', content_type=said).content_type


@pytest.mark.parametrize(
    ("value", "stream"),
    [
        ("true", True),
        (" true ", True),
        ("false", False),
        ("null", False),
        ("1", False),
        ('"true"', False),
        ("[]", False),
    ],
)
def test_stream_is_true_or_it_is_not(value: str, stream: bool) -> None:
    """Other forms are for the upstream to read or refuse; how its answer is relayed depends on what it says."""
    assert stream is completion(f'"stream":{value}').stream
    assert stream is completion(f'"nan":NaN,"stream":{value}').stream


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"{}", "model: a model name is required"),
        (b'{"model":""}', "model: a model name is required"),
        (b'{"model":null}', "model: expected a string"),
        (b'{"model":7}', "model: expected a string"),
        (b'{"model":["reasoning"]}', "model: expected a string"),
        (b'{"x":NaN}', "model: a model name is required"),
        (b'{"x":NaN,"model":7}', "model: expected a string"),
    ],
)
def test_a_model_is_required(body: bytes, error: str) -> None:
    """Without a model there is nowhere to go; the member is named."""
    found = fault(body)
    assert isinstance(found, InvalidField)
    assert ("model", error) == (found.param, found.message)


@pytest.mark.parametrize("body", [b'{"model":"gpt-4"}', b'{"model":"\\ud83d"}', b'{"x":NaN,"model":"gpt-4"}'])
def test_an_unknown_model(body: bytes) -> None:
    """Also one whose name cannot even be shown; the known ones are named."""
    found = fault(body)
    assert isinstance(found, UnknownModel)
    assert ("reasoning", "org/big") == found.known
    assert found.message.isascii()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "it is empty, where a JSON object is expected"),
        (b" \r\n", "it is empty, where a JSON object is expected"),
        (b"[]", "expected a JSON object"),
        (b'"text"', "expected a JSON object"),
        (b"null", "expected a JSON object"),
        (b"NaN", "expected a JSON object"),
        (b"[NaN]", "expected a JSON object"),
        (b"{", "it is not valid JSON (Expecting property name enclosed in double quotes at line 1, column 2)"),
        (b'{"a":1,}', "it is not valid JSON ("),
        (b'{\n"model": reasoning}', "it is not valid JSON (Expecting value at line 2, column 10)"),
        (b'{"model":"reasoning"} x', "it is not valid JSON (Extra data at line 1, column 23)"),
        (b"model=reasoning", "it is not valid JSON ("),
        (b'{"model":"reason\xff"}', "it is not valid UTF-8 (byte 16)"),
        (b'{"x":NaN,"n":' + b"9" * 5000 + b"}", "it is not valid JSON (Exceeds the limit"),
    ],
)
def test_a_body_that_cannot_be_read(body: bytes, reason: str) -> None:
    """What is wrong is said, and where."""
    found = fault(body)
    assert isinstance(found, MalformedBody)
    assert found.reason.startswith(reason)


@pytest.mark.parametrize(
    "start", [b"[", b'{"a":', b'{"model":"reasoning","prompt":[', b'{"a":NaN,"b":[', b'[{"a":'], ids=repr
)
def test_deep_nesting_is_refused(start: bytes) -> None:
    """A hundred thousand open brackets are one bad request, and no more than that."""
    assert isinstance(fault(start * 100_000, path="/v1/completions"), MalformedBody)


@pytest.mark.parametrize("depth", range(0, 1000, 37))
def test_any_depth_is_read_or_refused(depth: int) -> None:
    """There is no depth at which one of the two parsers gives up in a way that nobody expects."""
    found = set()
    for start in ('"a":NaN,', '"a":"\\ud83d",', ""):
        for inside in ("NaN", '"\\ud83d"', "1"):
            try:
                found.add(completion(f'{start}"prompt":{"[" * depth}{inside}{"]" * depth}').sequences)
            except MalformedBody:
                found.add(0)
    assert found <= ({1} if depth < 100 else {0, 1})


@pytest.mark.parametrize(
    "body",
    [
        b'\xef\xbb\xbf{"model":"reasoning"}',
        b'{"model":"reasoning","x":NaN,"y":[Infinity,-Infinity]}',
        b'{"model":"reasoning","x":"\\ud83d"}',
        '{"model":"reasoning"}'.encode("utf-16"),
    ],
    ids=["byte-order-mark", "nan", "lone-surrogate", "utf-16"],
)
def test_what_the_upstream_might_read_goes_up(body: bytes) -> None:
    """Where the fast parser is stricter than the upstream's, the client gets the upstream's opinion, not ours."""
    found = decode(body)
    assert ("reasoning", body) == (found.model, found.body)


# -- sequences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "sequences"),
    [
        ('"prompt":"x"', 1),
        ('"prompt":""', 1),
        ('"prompt":[]', 1),
        ('"prompt":[1,2,3]', 1),
        ('"prompt":["a","b","c"]', 3),
        ('"prompt" : [ "a" , "b" ]', 2),
        ('"prompt":[[1,2],[3]]', 2),
        ('"prompt":["a"],"n":4', 4),
        ('"prompt":["a","b"],"n":4', 8),
        ('"prompt":["a","b"],"n":2,"best_of":5', 10),
        ('"prompt":"a","n":5,"best_of":2', 5),
        ('"n":3', 3),
        ('"n":0', 1),
        ('"n":-3', 1),
        ('"n":null', 1),
        ('"n":true', 1),
        ('"n":{}', 1),
        ('"n":[6]', 1),
        ('"n":"many"', 1),
        ('"prompt":{"a":["b","c"]}', 1),
        ('"prompt":null', 1),
        # As the upstream's lax models read them.
        ('"n":"6"', 6),
        ('"n":6.0', 6),
        ('"n":6e0', 6),
        ('"n":" 6 "', 6),
        ('"n":"\\u0036"', 6),
        ('"n":"\\t6\\n"', 6),
        ('"n":"6.0"', 6),
        ('"n":"\\"6\\""', 1),
        ('"n":"nan"', 1),
        ('"n":"-6"', 1),
        ('"n":{"n":6}', 1),
        ('"n": [ 6 ]', 1),
        ('"best_of":"\\u0034"', 4),
        # Prompts that have been embedded already.
        ('"prompt_embeds":"AAAA"', 1),
        ('"prompt_embeds":["AAAA","BBBB"]', 2),
        ('"prompt_embeds":["AAAA","BBBB"],"n":3', 6),
        ('"prompt_embeds":["AAAA","BBBB"],"prompt":null', 2),
        ('"prompt_embeds":["AAAA","BBBB"],"prompt":"a"', 3),
        ('"prompt_embeds":"AAAA","prompt":["a","b"]', 3),
        ('"prompt_embeds":null,"prompt":["a","b"]', 2),
        ('"prompt_embeds":null,"prompt":null', 1),
        ('"prompt_embeds":[]', 1),
        ('"x":NaN,"prompt_embeds":["AAAA","BBBB"]', 2),
        # What only the lenient parser reads.
        ('"x":NaN,"n":4', 4),
        ('"x":NaN,"n":"4"', 4),
        ('"x":"\\ud83d","prompt":["a","b"],"n":2', 4),
        ('"prompt":["\\ud83d","b"],"n":2', 4),
        ('"prompt":[[NaN],[1]]', 2),
        ('"prompt":[NaN]', 1),
        ('"n":NaN', 1),
        ('"n":-Infinity', 1),
    ],
)
def test_sequences_are_counted(members: str, sequences: int) -> None:
    """O7: ``n``, or ``best_of`` if more, for each prompt; a list of numbers is one prompt; what is wrong is one."""
    assert sequences == completion(members).sequences


@pytest.mark.parametrize(
    "value",
    ["9" * 20, "9" * 400, "9" * 5000, "1e300", "Infinity", '"' + "9" * 400 + '"', '"Infinity"'],
    ids=lambda value: f"{value[:9]}-{len(value)}",
)
def test_more_than_anybody_has_is_not_less(value: str) -> None:
    """A number too large to count is heavier than any cap, and not one."""
    assert MAX_COUNT == completion(f'"n":{value}').sequences


def test_a_chat_is_its_n_and_never_its_prompt() -> None:
    """In a chat ``n`` counts, and a member that only completions have does not."""
    members = '"n":3,"prompt":["a","b"],"prompt_embeds":["a","b"],"messages":[[],[]]'
    assert 3 == completion(members, path="/v1/chat/completions").sequences


@pytest.mark.parametrize(
    ("members", "sequences"),
    [
        ('"messages":[[{"role":"user"}],[{"role":"user"}],[]]', 3),
        ('"messages":[[],[]],"n":4', 8),
        ('"messages":[[],[]],"n":4,"prompt":["a","b","c"]', 8),
        ('"messages":[{"role":"user"},{"role":"user"}]', 1),
        ('"messages":[]', 1),
        ('"messages":null', 1),
        ('"n":2', 2),
        ('"x":NaN,"messages":[[],[]]', 2),
        ('"messages":[[{"content":"\\ud83d"}],[]],"n":2', 4),
    ],
)
def test_a_batch_is_all_its_conversations(members: str, sequences: int) -> None:
    """Each of the conversations runs ``n`` times, and all at once."""
    assert sequences == completion(members, path="/v1/chat/completions/batch").sequences


@pytest.mark.parametrize("path", [path for path, operation in POSTS.items() if operation is Operation.RENDER])
def test_rendering_weighs_nothing(path: str) -> None:
    """The engine itself has nothing to do, however many there are."""
    assert 0 == completion('"n":3,"prompt":["a","b"],"messages":[[],[]]', path=path).sequences


WEIGHED = (Operation.CHAT, Operation.COMPLETIONS, Operation.BATCH, Operation.RENDER)


@pytest.mark.parametrize("path", [path for path, operation in POSTS.items() if operation not in WEIGHED])
def test_other_operations_are_one(path: str) -> None:
    """Where there is no ``n``, a request is one."""
    assert 1 == completion('"n":3,"input":["a","b"],"prompt":["a","b"],"messages":[[],[]]', path=path).sequences


@pytest.mark.parametrize("member", ["n", "best_of", "prompt", "prompt_embeds", "messages"])
def test_no_depth_of_a_member_that_decides_is_a_bug(member: str) -> None:
    """Just before the first parser gives up there is none at which a second one does, with less room on the stack."""
    for depth in range(960, 1001):
        try:
            found = completion(f'"{member}":{"[" * depth}1{"]" * depth}', path="/v1/chat/completions/batch").sequences
        except MalformedBody:
            continue
        assert 1 == found


# -- forms ----------------------------------------------------------------------------------------------------------


def part(name: str, content: bytes, more: str = "") -> bytes:
    return f"content-disposition: form-data; {name}{more}\r\n\r\n".encode() + content


def form(*parts: bytes, boundary: str = "b0undary") -> bytes:
    delimiter = b"--" + boundary.encode()
    return b"".join(delimiter + b"\r\n" + one + b"\r\n" for one in parts) + delimiter + b"--\r\n"


FORM = "multipart/form-data; boundary=b0undary"
AUDIO = "/v1/audio/transcriptions"
MODEL = part('name="model"', b"reasoning")
BINARY = bytes(range(256)) * 40 + b'\r\n\r\n--b0undar\r\n\r\nname="model"\r\n\r\n--'


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (form(MODEL), FORM),
        (form(MODEL), 'Multipart/Form-Data; charset=utf-8; Boundary="b0undary"'),
        (form(part("name=model", b"reasoning")), FORM),
        (form(part('name="model"', b" reasoning\n")), FORM),
        (form(part('name="model"', b"reasoning", "; x=y")), FORM),
        (form(part('name="model"', b"reasoning", "\r\nContent-Type: text/plain")), FORM),
        (form(b'Content-Type: text/plain\r\nContent-Disposition: form-data;name="model"\r\n\r\nreasoning'), FORM),
        (form(part('name="file"; filename="a.wav"', BINARY), MODEL), FORM),
        (form(part('name="file"; filename="x; name=model"', b"org/big"), MODEL), FORM),
        (form(part('name="file"; filename="model"', b"org/big"), MODEL), FORM),
        (form(part('name="model2"', b"org/big"), MODEL), FORM),
        (form(part('name="empty"', b""), MODEL), FORM),
        (form(b"\r\nno head at all", MODEL), FORM),
        (b'--b0undary\r\ncontent-disposition: form-data; name="no end of its own"\r\n\r\n' + form(MODEL), FORM),
        (form(MODEL, part('name="file"', BINARY)), FORM),
        (b"a preamble\r\n" + form(MODEL) + b"an epilogue", FORM),
        (form(MODEL, boundary="a'()+_,-./:=? z"), 'multipart/form-data; boundary="a\'()+_,-./:=? z"'),
    ],
)
def test_the_model_part_of_a_form(body: bytes, content_type: str) -> None:
    """It is found by its name among the others, whatever these hold, and the form goes up as it came."""
    found = decode(body, path=AUDIO, content_type=content_type)
    assert ("reasoning", Operation.TRANSCRIPTIONS, 1) == (found.model, found.operation, found.sequences)
    assert body is found.body
    assert content_type == found.content_type
    assert found.stream is False


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (form(MODEL), "multipart/form-data", "names no boundary"),
        (form(MODEL), 'multipart/form-data; boundary=""', "names no boundary"),
        (form(MODEL), "multipart/form-data; boundary*=idna''abc", "names no boundary"),
        (form(MODEL), "multipart/form-data; boundary=other", "its multipart boundary does not occur in it"),
        (b"", FORM, "its multipart boundary does not occur in it"),
        (b"--b0undary\r\n" + MODEL, FORM, "its last multipart part has no end"),
        (form(*[part('name="x"', b"y")] * (MAX_PARTS + 1), MODEL), FORM, "multipart parts before the one named model"),
    ],
)
def test_a_form_that_cannot_be_read(body: bytes, content_type: str, message: str) -> None:
    """What is wrong with its framing is said."""
    found = fault(body, path=AUDIO, content_type=content_type)
    assert isinstance(found, MalformedBody)
    assert message in found.message


@pytest.mark.parametrize(
    "body",
    [
        form(part('name="file"', BINARY)),
        form(part('name="model"', b"")),
        form(part('name="model"', b"  ")),
        form(part('name="Model"', b"reasoning")),
        form(b"content-type: text/plain; name=model\r\n\r\nreasoning"),
        form(part('name="x"', b"y", "\r\nx: " + "y" * MAX_PART_HEAD_BYTES), MODEL),
        b"--b0undary--\r\n",
    ],
)
def test_a_form_without_a_model(body: bytes) -> None:
    """A form needs one as well."""
    found = fault(body, path=AUDIO, content_type=FORM)
    assert "model: a model name is required" == found.message


@pytest.mark.parametrize(
    "body",
    [
        b"--b0undary\r\n" + b"content-disposition:" * 400_000 + b"\r\n\r\nx\r\n--b0undary--",
        form(*[part('name="x"', b"y")] * 100_000),
        b"--b0undary\r\n" * 500_000,
        b"\r\n\r\n" * 2_000_000 + form(MODEL),
    ],
    ids=["one-endless-head", "many-parts", "only-delimiters", "only-blank-lines"],
)
def test_a_hostile_form_is_searched_once(body: bytes) -> None:
    """Reading a form of eight megabytes does not hold up everybody else, whatever is in it."""
    counted = Searched(body)
    try:
        decode(counted, path=AUDIO, content_type=FORM)
    except ClientFault:
        pass
    assert counted.searched <= 2 * len(body)


class Searched(bytes):
    """Counts how many of its bytes are searched."""

    searched = 0

    def find(self, sub: Any, start: Any = 0, end: Any = None) -> int:
        end = len(self) if end is None else min(end, len(self))
        found = super().find(sub, start, end)
        self.searched += (end if found < 0 else found) - start
        return found


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from([b"--b0undary", b"--", b"\r\n", b"\r\n\r\n", b"x", MODEL, b'; name="model"', b"\xff:"])),
    st.sampled_from([FORM, "multipart/form-data; boundary=", "multipart/form-data; boundary*0=b0; boundary*1=undary"]),
)
@example([b"--b0undary", b"\r\n", b"content-disposition: form-data; name*=idna''model", b"\r\n\r\n", b"x"], FORM)
@example([form(part("name*=undefined''model", b"x"))], FORM)
def test_any_form_is_read_or_refused(pieces: list[bytes], content_type: str) -> None:
    """However the pieces of a form are put together, nothing but a fault of the client comes of it."""
    try:
        decode(b"".join(pieces), path=AUDIO, content_type=content_type)
    except ClientFault as error:
        assert error.message  # noqa: PT017 - it may just as well be read


# -- responses ------------------------------------------------------------------------------------------------------

EVENTS = "text/event-stream; charset=utf-8"


TERMS = ReplyTerms(
    upstream="reasoning",
    stream=True,
    operation=Operation.CHAT,
    must_finish=False,
    accounting=False,
    hide_usage=False,
    reasoning_field="reasoning",
    repeat_reasoning_as=None,
)


def encoder(content_type: str = EVENTS, *headers: tuple[str, str], content_length: int | None = None) -> PassThrough:
    passing = PassThrough(TERMS)
    assert passing.head is None
    passing.begin(ResponseHead(status=200, content_type=content_type, content_length=content_length, headers=headers))
    return passing


def test_the_head_comes_down() -> None:
    """Type and length as they are, of the other headers only what speaks about the answer."""
    headers = (
        ("cache-control", "no-store"),
        ("server", "uvicorn"),
        ("set-cookie", "a=b"),
        ("x-request-id", "chatcmpl-1"),
        ("content-disposition", "attachment"),
    )
    expected = ResponseHead(
        status=200,
        content_type="application/json",
        content_length=17,
        headers=(("cache-control", "no-store"), ("content-disposition", "attachment")),
    )
    assert expected == encoder("application/json", *headers, content_length=17).head


def test_events_are_not_to_be_collected_on_their_way() -> None:
    """A proxy in front is told to pass events on at once."""
    head = encoder("Text/Event-Stream").head
    assert head is not None
    assert (("x-accel-buffering", "no"),) == head.headers


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


STREAMS = sorted(path.name for path in TRANSCRIPTS.glob("*stream*.body.txt"))


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from([*STREAMS, "chat-whole.body.txt"]),
    st.sampled_from([EVENTS, "application/json"]),
    st.lists(st.integers(0, 1 << 20), max_size=40),
)
def test_a_recorded_answer_is_let_through(name: str, content_type: str, places: list[int]) -> None:
    """Whatever vLLM answered reaches the client in the same bytes, however it was cut on its way."""
    body = (TRANSCRIPTS / name).read_bytes()
    passing = encoder(content_type)
    out = [passing.feed(piece, last=False) for piece in cut(body, places)]
    out.append(passing.feed(b"", last=True))
    assert body == b"".join(out)


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"data: x", b"\n", b"\r", b"\r\n", b"\n\n", b": c", b"id", b"\x00\xff"])), st.data())
def test_any_stream_is_let_through(pieces: list[bytes], data: st.DataObject) -> None:
    """All line ends, and their mixtures; and what is held back is never a whole event."""
    body = b"".join(pieces)
    passing = encoder()
    out = b""
    places = data.draw(st.lists(st.integers(0, len(body)), max_size=5))
    for piece in cut(body, places):
        out += passing.feed(piece, last=False)
        assert body.startswith(out)
    held = len(out)
    out += passing.feed(b"", last=True)
    assert body == out
    for blank in (b"\n\n", b"\r\n\r\n", b"\r\r"):
        assert blank not in body[held:]


@pytest.mark.parametrize("blank", [b"\n\n", b"\r\n\r\n", b"\r\r"], ids=repr)
def test_half_an_event_is_held_back(blank: bytes) -> None:
    """Only whole events go out, and those at once; the rest of one joins them with its blank line."""
    passing = encoder()
    assert b"data: a" + blank == passing.feed(b"data: a" + blank + b"da", last=False)
    assert b"" == passing.feed(b"ta: b", last=False)
    assert b"" == passing.feed(blank[: len(blank) // 2], last=False)
    assert b"data: b" + blank + b"data: c" + blank == passing.feed(
        blank[len(blank) // 2 :] + b"data: c" + blank, last=False
    )
    assert b"data: d" == passing.feed(b"data: d", last=True)


def test_holding_back_is_bounded() -> None:
    """An event larger than anybody would hold is passed on in parts, and after it events are whole again."""
    passing = encoder()
    assert b"" == passing.feed(b"x" * HELD_BYTES, last=False)
    assert b"x" * HELD_BYTES + b"y" == passing.feed(b"y", last=False)
    assert b"z\n\n" == passing.feed(b"z\n\nda", last=False)
    assert b"data: a\n\n" == passing.feed(b"ta: a\n\n", last=False)


def test_what_is_no_stream_is_not_held_back() -> None:
    """A whole answer passes piece by piece."""
    passing = encoder("application/json")
    assert [b'{"a', b'":1}\n\nx', b""] == [
        passing.feed(piece, last=last) for piece, last in ((b'{"a', False), (b'":1}\n\nx', False), (b"", True))
    ]


FULL = QueueFull(upstream="reasoning", retry_after_seconds=9, occupancy=OCCUPANCY)


def test_a_failure_in_a_stream_is_an_event() -> None:
    """It carries the error object on which the SDKs raise, and is not glued to the half of another event."""
    passing = encoder()
    passing.feed(b"data: a\n\ndata: half", last=False)
    told = passing.fail(FULL, "req_1")
    assert told is not None
    assert told.startswith(b"data: {")
    assert told.endswith(b"}\n\n")
    expected = {"message": FULL.message, "type": "server_overloaded", "param": None, "code": "queue_full"}
    assert {"error": expected} == json.loads(told.removeprefix(b"data: "))


@pytest.mark.parametrize(("content_type", "content_length"), [("application/json", None), (EVENTS, 1000)])
def test_a_failure_that_has_no_form(content_type: str, content_length: int | None) -> None:
    """Half a JSON document, or an announced number of bytes, cannot be completed by an error: the connection breaks."""
    passing = encoder(content_type, content_length=content_length)
    passing.feed(b"{", last=False)
    assert passing.fail(FULL, "req_1") is None
    assert PassThrough(TERMS).fail(FULL, "req_1") is None


# -- errors ---------------------------------------------------------------------------------------------------------


def upstream_error(error: dict[str, Any] | None, *, status: int = 400, message: str = "said") -> UpstreamStatus:
    return UpstreamStatus(
        upstream="u", upstream_status=status, upstream_message=message, error=error, upstream_retry_after_seconds=None
    )


@pytest.mark.parametrize("error", specimens(), ids=lambda error: type(error).__name__)
def test_every_error_has_a_document(error: GatewayError) -> None:
    """RFC 9457 with the OpenAI SDKs' ``error`` member, both saying the same."""
    document = OPENAI.render_error(error, "req_1")
    assert (error.status, "application/problem+json") == (document.status, document.content_type)
    told = json.loads(document.body)
    assert {
        "type": f"urn:aiogw:problem:{error.code.replace('_', '-')}",
        "title": error.title,
        "status": error.status,
        "detail": error.message,
        "instance": "urn:aiogw:request:req_1",
        "request_id": "req_1",
    } == {name: value for name, value in told.items() if name != "error"}
    assert told["detail"] == told["error"]["message"]
    assert {"message", "type", "param", "code"} <= set(told["error"])


@pytest.mark.parametrize(
    ("error", "type_"),
    [
        (MalformedBody(reason="x"), "invalid_request_error"),
        (Draining(upstream="u", retry_after_seconds=1), "server_overloaded"),
        (UpstreamUnavailable(upstream="u", reason="refused"), "upstream_error"),
        (InternalFault(), "server_error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_type_says_whose_fault_it_is(error: GatewayError, type_: str) -> None:
    """One type for each side: the client's, ours, the upstream's, a bug."""
    assert type_ == json.loads(OPENAI.render_error(error, "req_1").body)["error"]["type"]


def test_an_error_names_its_member() -> None:
    """``param`` is the path of the member that is wrong, ``code`` the kind of error."""
    told = json.loads(OPENAI.render_error(InvalidField(path="model", reason="required"), "req_1").body)["error"]
    assert ("model", "invalid_request") == (told["param"], told["code"])


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (FULL, {"retry-after": "9", "x-should-retry": "true"}),
        (MalformedBody(reason="x"), {"x-should-retry": "false"}),
        (
            MethodNotAllowed(method="PUT", path="/v1/models", allowed=("GET", "HEAD")),
            {"x-should-retry": "false", "allow": "GET, HEAD"},
        ),
        (InternalFault(), {}),
        (upstream_error(None, status=503), {"retry-after": "5"}),
        (upstream_error(None, status=429), {}),
    ],
    ids=["refusal", "client", "method", "bug", "busy-upstream", "upstream-limit"],
)
def test_the_headers_of_an_error(error: GatewayError, headers: dict[str, str]) -> None:
    """When to come back, whether to, and which methods there are."""
    assert headers == dict(OPENAI.render_error(error, "req_1").headers)


def test_the_upstreams_error_object_is_kept() -> None:
    """All its members are, also those nobody here knows; the message is the one that is safe to show."""
    given = {"message": "sa\x00id", "type": "BadRequestError", "param": "n", "code": 400, "extra": {"a": [1.5, None]}}
    told = json.loads(OPENAI.render_error(upstream_error(given), "req_1").body)
    assert {**given, "message": "said"} == told["error"]
    assert "said" == told["detail"]


def test_what_the_upstream_says_of_our_key_is_not_kept() -> None:
    """Its words about the gateway's credentials are not the client's business."""
    document = OPENAI.render_error(upstream_error({"message": "bad key sk-123", "code": 401}, status=401), "req_1")
    assert b"sk-123" not in document.body
    assert (502, "upstream_auth") == (document.status, json.loads(document.body)["error"]["code"])


def test_text_that_utf8_cannot_hold_is_escaped() -> None:
    """Half a character in an upstream's error object does not cost the client the document."""
    given = {"message": "x", "type": "\ud83d", "param": None, "code": 400}
    document = OPENAI.render_error(upstream_error(given), "req_1")
    assert b"\\ud83d" in document.body
    assert "\ud83d" == json.loads(document.body)["error"]["type"]
    passing = encoder()
    told = passing.fail(upstream_error(given), "req_1")
    assert told is not None
    assert 1 == told.count(b"\n\n")
