"""What every dialect promises, for all that are registered: a new one is tested by being listed.

Nothing here knows a dialect by name.  The endpoints are found by trying the paths under which APIs have their
endpoints, and the request is one that has the members of all of them.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lines_dialect import LINES
from specimens import leaves, specimen

from aiogw.canonical import CanonicalRequest, Engine, ModelCard, Operation, ResponseHead
from aiogw.dialects import DIALECTS
from aiogw.dialects.base import Call, Dialect, LocalEndpoint, RelayEndpoint, ResponseEncoder, error_headers
from aiogw.errors import (
    ClientFault,
    GatewayError,
    MethodNotAllowed,
    Refusal,
    UnknownEndpoint,
    UnknownModel,
    UpstreamStatus,
)

TRANSCRIPTS = Path(__file__).parent.parent / "transcripts" / "vllm-0.32"
# One more than is served, with a wire that is not even SSE: what holds for it holds for the next one.
ALL = (*DIALECTS, LINES)
MODEL = "reasoning"
MODELS = (ModelCard(id=MODEL, created=1_700_000_000), ModelCard(id="org/big", created=1_700_000_000))

VERSIONS = ("", "/v1", "/v2", "/v1beta", "/api")
RELAYED = ("/chat/completions", "/messages", "/chat", "/completions", "/generate", f"/models/{MODEL}:generateContent")
LISTED = ("/models", "/tags")
FORM = "multipart/form-data; boundary=x"
# The members by which any of these says: one user, one short text, a bounded answer.
REQUEST: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 16,
    "messages": [{"role": "user", "content": "Hello"}],
    "prompt": "Hello",
    "contents": [{"role": "user", "parts": [{"text": "Hello"}]}],
}

each_dialect = pytest.mark.parametrize("dialect", ALL, ids=lambda dialect: dialect.name)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get", "BREW")


def find_engine(model: str) -> Engine:
    if model == MODEL:
        return Engine(model=model)
    raise UnknownModel(model=model, known=tuple(card.id for card in MODELS))


def endpoints(dialect: Dialect, method: str, tails: tuple[str, ...]) -> dict[str, RelayEndpoint | LocalEndpoint]:
    found = {}
    for path in (f"{dialect.mount}{version}{tail}" for version in VERSIONS for tail in tails):
        try:
            found[path] = dialect.endpoint(method, path)
        except ClientFault:
            continue
    return found


def relayed(dialect: Dialect) -> tuple[str, RelayEndpoint]:
    """The path and the endpoint of a conversation."""
    for path, endpoint in endpoints(dialect, "POST", RELAYED).items():
        if isinstance(endpoint, RelayEndpoint) and endpoint.operation is Operation.CHAT:
            return path, endpoint
    pytest.fail(f"no endpoint for a conversation found below {dialect.mount}: add its path to RELAYED")


def begin(dialect: Dialect, *, stream: bool) -> Call:
    body = json.dumps({**REQUEST, "stream": stream}).encode()
    call = dialect.decode(relayed(dialect)[1], "application/json", body, find_engine)
    assert stream is call.request.stream
    return call


# -- who it is ------------------------------------------------------------------------------------------------------


def test_dialects_are_told_apart() -> None:
    """No two have a name in common, and no mount lies below another."""
    for one, other in combinations(ALL, 2):
        assert one.name != other.name
        assert not f"{one.mount}/".startswith(f"{other.mount}/")
        assert not f"{other.mount}/".startswith(f"{one.mount}/")


@each_dialect
def test_a_dialect_has_a_name_and_a_mount(dialect: Dialect) -> None:
    """A name fit for a label, a path without a slash at its end, and headers for the request id."""
    assert dialect.name.isidentifier()
    assert dialect.name == dialect.name.lower()
    assert dialect.mount.startswith("/")
    assert not dialect.mount.endswith("/")
    assert "x-request-id" in dialect.request_id_headers
    for name in dialect.request_id_headers:
        assert name == name.lower()


def modules(dialect: Dialect) -> Iterator[tuple[Path, ast.Module]]:
    """The source of the module, or of all modules of the folder, in which the dialect is made."""
    path = Path(inspect.getfile(type(dialect)))
    for one in path.parent.rglob("*.py") if path.name == "__init__.py" else (path,):
        yield one, ast.parse(one.read_text())


@each_dialect
def test_a_dialect_neither_waits_nor_knows_another(dialect: Dialect) -> None:
    """It imports no event loop, no server, no gate, and of the other dialects only what a dialect is."""
    own = type(dialect).__module__
    for path, tree in modules(dialect):
        for node in ast.walk(tree):
            assert not isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith), path
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                assert 0 == node.level, path
            for name in names:
                assert name.partition(".")[0] not in ("asyncio", "aiohttp", "uvloop", "time", "logging", "socket"), path
                if name.startswith("aiogw.dialects."):
                    assert name.startswith(("aiogw.dialects.base.", f"{own}.")) or name == own, path
                elif name.startswith("aiogw."):
                    assert name.split(".")[1] in ("canonical", "errors", "sse"), path


# -- endpoints ------------------------------------------------------------------------------------------------------


@each_dialect
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["/no-such-thing", "/v1/no-such-thing", "/v1/../metrics", "//", "/v1/%2e%2e/x", "/\n"])
def test_an_unknown_path(dialect: Dialect, path: str, method: str) -> None:
    """Any method of a path that is not there is told so, with a hint of what is."""
    with pytest.raises(UnknownEndpoint) as caught:
        dialect.endpoint(method, dialect.mount + path)
    assert (method, dialect.mount + path) == (caught.value.method, caught.value.path)
    assert caught.value.hint
    assert "\n" not in caught.value.message


@each_dialect
def test_a_wrong_method(dialect: Dialect) -> None:
    """Where only the method is wrong, the right ones are named, and they are right."""
    path, _endpoint = relayed(dialect)
    for method in METHODS:
        if method == "POST":
            continue
        with pytest.raises(MethodNotAllowed) as caught:
            dialect.endpoint(method, path)
        assert (method, path) == (caught.value.method, caught.value.path)
        assert caught.value.allowed
        for allowed in caught.value.allowed:
            dialect.endpoint(allowed, path)


@each_dialect
def test_what_reaches_an_upstream_is_a_constant(dialect: Dialect) -> None:
    """Where a request goes at the upstream is of the table, and nothing that a client can say."""
    for endpoint in endpoints(dialect, "POST", RELAYED).values():
        assert isinstance(endpoint, RelayEndpoint)
        assert endpoint.path in {"/v1/chat/completions", "/v1/completions"}


@each_dialect
def test_the_models_are_listed(dialect: Dialect) -> None:
    """The configured models, all of them, in a JSON document that needs no upstream."""
    found = endpoints(dialect, "GET", LISTED)
    assert found, f"no list of models found below {dialect.mount}: add its path to LISTED"
    for endpoint in found.values():
        assert isinstance(endpoint, LocalEndpoint)
        document = endpoint.answer(MODELS, {})
        assert (200, "application/json") == (document.status, document.content_type)
        text = json.dumps(json.loads(document.body))
        for card in MODELS:
            assert json.dumps(card.id) in text
        endpoint.answer((), {})


# -- requests -------------------------------------------------------------------------------------------------------


@each_dialect
@pytest.mark.parametrize("stream", [False, True])
def test_a_plain_request(dialect: Dialect, stream: bool) -> None:
    """One message of one user becomes one sequence of a chat, in a document as the upstream reads it."""
    request = begin(dialect, stream=stream).request
    assert (Operation.CHAT, MODEL, 1, dialect.name) == (
        request.operation,
        request.model,
        request.sequences,
        request.surface,
    )
    assert ("/v1/chat/completions", "application/json") == (request.path, request.content_type)
    document = json.loads(request.body)
    assert [{"role": "user", "content": "Hello"}] == document["messages"]
    assert (MODEL, stream) == (document["model"], document.get("stream", False))


@each_dialect
def test_the_same_request_is_the_same_bytes(dialect: Dialect) -> None:
    """Nothing of a clock, and nothing random, goes up: the engine's prefix cache lives on it."""
    assert begin(dialect, stream=True).request == begin(dialect, stream=True).request


@each_dialect
def test_an_unknown_model_is_refused_when_it_is_decoded(dialect: Dialect) -> None:
    """Whoever names a model that is not there does not get as far as the queue."""
    with pytest.raises(UnknownModel):
        dialect.decode(
            relayed(dialect)[1], "application/json", json.dumps({**REQUEST, "model": "gpt-4"}).encode(), find_engine
        )


def decoded(dialect: Dialect, body: bytes, content_type: str = "application/json") -> CanonicalRequest | None:
    try:
        return dialect.decode(relayed(dialect)[1], content_type, body, find_engine).request
    except ClientFault as error:
        json.loads(dialect.render_error(error, "req_1").body)
        return None


@each_dialect
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"1e999",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages":' * 100_000,
        b'{"model":"\\ud83d","messages":[]}',
        b'{"model":NaN}',
        b'{"model":"reasoning","max_tokens":' + b"9" * 5000 + b"}",
        b'{"model":"reasoning","max_tokens":1,"messages":[{"role":"user","content":"\\ud83d"}]}',
        b'{"model":"reasoning","max_tokens":1,"messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"reasoning","max_tokens":1,"messages":' + b"[" * 10_000,
        b'{"model":"reasoning","max_tokens":1,"messages":[{"role":"user","content":' + b"[" * 10_000,
    ],
    ids=lambda body: repr(body[:40]),
)
def test_a_body_nobody_should_send(dialect: Dialect, body: bytes) -> None:
    """It is decoded, or it is the client's fault, and the fault can be told."""
    decoded(dialect, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "source", "id", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)
MEMBERS = ["model", "messages", "stream", "n", "best_of", "prompt", "max_tokens", "system", "tools", "tool_choice"]
MEMBERS += ["stop_sequences", "temperature", "thinking", "metadata", "output_config", "mcp_servers", "unknown"]


@each_dialect
@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from(MEMBERS), JSON, max_size=4), st.lists(st.integers(0, 300), max_size=2))
def test_any_document_is_decoded_or_the_clients_fault(
    dialect: Dialect, changes: dict[str, Any], places: list[int]
) -> None:
    """Whatever stands in place of a member, and wherever the text is damaged."""
    body = json.dumps({**REQUEST, **changes}).encode()
    request = decoded(dialect, body)
    if request is not None:
        assert MODEL == request.model
        assert request.sequences >= 1
        json.loads(request.body)
    for place in places:
        decoded(dialect, body[:place] + body[place + 1 :])
        decoded(dialect, body[:place] + b"\xff" + body[place:])


@each_dialect
@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=100), st.sampled_from(["application/json", "", "text/plain", FORM]))
def test_any_body_is_decoded_or_the_clients_fault(dialect: Dialect, body: bytes, content_type: str) -> None:
    """Bytes of any kind, called anything."""
    decoded(dialect, body, content_type)


# -- responses ------------------------------------------------------------------------------------------------------

JSON_HEAD = ResponseHead(status=200, content_type="application/json", content_length=None)
EVENT_HEAD = ResponseHead(status=200, content_type="text/event-stream; charset=utf-8", content_length=None)


def relay(encoder: ResponseEncoder, head: ResponseHead, pieces: list[bytes]) -> bytes:
    """What the client gets of a response that arrives in ``pieces``."""
    encoder.begin(head)
    out = b""
    for piece in pieces:
        gained = encoder.feed(piece, last=False)
        assert encoder.head is not None or not gained, "bytes before there is a head"
        out += gained
    out += encoder.feed(b"", last=True)
    assert encoder.head is not None
    assert 200 == encoder.head.status
    assert encoder.head.content_length in (None, len(out))
    for name, value in encoder.head.headers:
        assert name == name.lower()
        assert value.isprintable()
    return out


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@each_dialect
def test_nothing_is_known_before_the_upstream_has_spoken(dialect: Dialect) -> None:
    """A head comes of a response, so that until then a failure can be a status."""
    for stream in (False, True):
        assert begin(dialect, stream=stream).encoder.head is None


@each_dialect
@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 1 << 20), max_size=8))
def test_a_whole_answer(dialect: Dialect, places: list[int]) -> None:
    """A recorded answer becomes one JSON document, the same however it was cut, and has its text in it."""
    recorded = (TRANSCRIPTS / "chat-whole.body.txt").read_bytes()
    # The model that was recorded thought, and then had nothing to say.
    body = recorded.replace(b'"content":null', b'"content":"Good morning"', 1)
    out = relay(begin(dialect, stream=False).encoder, JSON_HEAD, cut(body, places))
    assert out == relay(begin(dialect, stream=False).encoder, JSON_HEAD, [body])
    assert "Good morning" in texts(json.loads(out))


@each_dialect
@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(["chat-stream-usage", "chat-stream-stop"]),
    st.lists(st.integers(0, 1 << 20), max_size=30),
)
def test_a_streamed_answer(dialect: Dialect, name: str, places: list[int]) -> None:
    """A recorded stream becomes whole events with JSON in them, the same however it was cut."""
    body = (TRANSCRIPTS / f"{name}.body.txt").read_bytes()
    encoder = begin(dialect, stream=True).encoder
    out = relay(encoder, EVENT_HEAD, cut(body, places))
    assert out == relay(begin(dialect, stream=True).encoder, EVENT_HEAD, [body])
    assert documents(encoder, out)


def blank(encoder: ResponseEncoder) -> bytes:
    """What stands between two events of the stream that ``encoder`` makes."""
    assert encoder.head is not None
    return b"\n\n" if encoder.head.content_type.startswith("text/event-stream") else b"\n"


def documents(encoder: ResponseEncoder, out: bytes) -> list[Any]:
    """The documents in whole events of either form."""
    assert out.endswith(blank(encoder))
    if blank(encoder) == b"\n":
        return [json.loads(line) for line in out.splitlines()]
    found = []
    for line in out.split(b"\n"):
        assert line.partition(b":")[0] in (b"", b"data", b"event")
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            found.append(json.loads(data))
    return found


@each_dialect
def test_a_failure_in_a_stream_is_one_more_event(dialect: Dialect) -> None:
    """It is glued to nothing, at whatever byte the stream broke off, and says what happened in one event."""
    body = (TRANSCRIPTS / "chat-stream-usage.body.txt").read_bytes()
    failures = 0
    for place in range(0, len(body), 23):
        for error in (specimen(cls) for cls in leaves(Refusal)):
            encoder = begin(dialect, stream=True).encoder
            encoder.begin(EVENT_HEAD)
            out = encoder.feed(body[:place], last=False)
            if encoder.head is None:
                break
            told = encoder.fail(error, "req_1")
            assert told is not None
            assert out == b"" or out.endswith(blank(encoder))
            assert error.message in texts(documents(encoder, told)[-1])
            failures += 1
    assert failures > 100


@each_dialect
def test_a_failure_in_a_whole_answer_breaks_it_off(dialect: Dialect) -> None:
    """Half a document cannot say what happened; an answer that has not begun is none."""
    encoder = begin(dialect, stream=False).encoder
    encoder.begin(JSON_HEAD)
    encoder.feed(b'{"id":"x","choices":[', last=False)
    assert encoder.head is None or encoder.fail(specimen(UpstreamStatus), "req_1") is None


STRANGE: list[Callable[[bytes], bytes]] = [
    lambda body: b"",
    lambda body: b"{}",
    lambda body: b"null",
    lambda body: b"<html>",
    lambda body: body[: len(body) // 2],
    lambda body: b"[" * 100_000,
    lambda body: body + b"x",
    lambda body: b"\xff" + body,
    lambda body: body.replace(b'"choices":[', b'"choices":[null,'),
    lambda body: body.replace(b'"index":0', b'"index":"x"'),
    lambda body: body.replace(b"data: ", b"data: \xff"),
]


@each_dialect
@pytest.mark.parametrize("change", range(len(STRANGE)))
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("called", [JSON_HEAD, EVENT_HEAD, ResponseHead(status=200, content_type="", content_length=0)])
def test_a_strange_answer_is_relayed_or_the_upstreams_fault(
    dialect: Dialect, stream: bool, change: int, called: ResponseHead
) -> None:
    """What an upstream should not answer is passed on, or is a GatewayError, and nothing else."""
    name = "chat-stream-usage" if stream else "chat-whole"
    body = STRANGE[change]((TRANSCRIPTS / f"{name}.body.txt").read_bytes())
    encoder = begin(dialect, stream=stream).encoder
    try:
        encoder.begin(called)
        encoder.feed(body, last=False)
        encoder.feed(b"", last=True)
    except GatewayError as error:
        json.loads(dialect.render_error(error, "req_1").body)
        if encoder.head is not None:
            encoder.fail(error, "req_1")


RECORDED = sorted(TRANSCRIPTS.glob("chat-*.body.txt"))
BYTES = [b"data: ", b"\n\n", b"\r", b"[DONE]", b'{"choices":[', b"{", b"}", b"]", b'"delta":{', b'"content":"a"', b","]
BYTES += [b'"finish_reason":"stop"', b'"tool_calls":[{"index":0', b'"function":{"name":"f","arguments":"{"}', b"\xff"]
BYTES += [
    b'"error":',
    b"null",
    b"1e999",
    b'"\\ud83d"',
    b'"usage":{"prompt_tokens":-1}',
    b'"message":',
    b":" * 9,
    b"[" * 2000,
]


@each_dialect
@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_any_answer_is_relayed_or_the_upstreams_fault(dialect: Dialect, data: st.DataObject) -> None:
    """Whatever an upstream says, recorded and then damaged or made up, in whatever pieces and with signs in between."""
    stream = data.draw(st.booleans())
    if data.draw(st.booleans()):
        body = data.draw(st.sampled_from(RECORDED)).read_bytes()
        for place in data.draw(st.lists(st.integers(0, len(body)), max_size=3)):
            inserted = data.draw(st.sampled_from(BYTES) | st.binary(max_size=3))
            body = body[:place] + inserted + body[place + data.draw(st.integers(0, 40)) :]
    else:
        body = b"".join(data.draw(st.lists(st.sampled_from(BYTES) | st.binary(max_size=3), max_size=20)))
    pieces = cut(body, data.draw(st.lists(st.integers(0, 1 << 20), max_size=5)))
    signed = data.draw(st.booleans())
    encoder = begin(dialect, stream=stream).encoder
    try:
        if signed:
            encoder.wait(1, 2.0)
        encoder.begin(data.draw(st.sampled_from([JSON_HEAD, EVENT_HEAD])))
        for piece in pieces:
            encoder.feed(piece, last=False)
            if signed:
                encoder.wait(0, None)
        encoder.feed(b"", last=True)
    except GatewayError as error:
        json.loads(dialect.render_error(error, "req_1").body)
        encoder.fail(error, "req_1")
    assert encoder.usage is None or encoder.usage.prompt_tokens is not None


@each_dialect
def test_a_sign_of_life(dialect: Dialect) -> None:
    """It is bytes with a head, or nothing at all; what comes after it is as it would have been."""
    encoder = begin(dialect, stream=True).encoder
    sign = encoder.wait(3, 1.5) + encoder.wait(2, None)
    assert (encoder.head is not None) == bool(sign)
    whole = begin(dialect, stream=False).encoder
    assert b"" == whole.wait(3, 1.5)
    assert whole.head is None


# -- errors ---------------------------------------------------------------------------------------------------------


def texts(document: Any) -> list[str]:
    """Every string in a JSON document."""
    if isinstance(document, str):
        return [document]
    inner = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return [text for value in inner for text in texts(value)]


# Clients act on a surface's own sentence for these, so it may replace ours; what it is about has to be in it.
OWN_WORDS = {UnknownModel: "the-model", UpstreamStatus: "the-upstream_message"}


@each_dialect
@pytest.mark.parametrize("cls", list(leaves()), ids=lambda cls: cls.__name__)
def test_every_error_can_be_told(dialect: Dialect, cls: type[GatewayError]) -> None:
    """Each leaf of the tree becomes a JSON document with its sentence, the request's id and the common headers."""
    error = specimen(cls)
    document = dialect.render_error(error, "req_1")
    assert 400 <= document.status <= 599
    assert (document.status >= 500) == (error.status >= 500)
    assert document.content_type.endswith("json")
    told = texts(json.loads(document.body))
    assert any(OWN_WORDS.get(cls, error.message) in text for text in told)
    assert any("req_1" in text for text in told)
    assert set(error_headers(error)) <= set(document.headers)
    assert len(dict(document.headers)) == len(document.headers)


@each_dialect
@pytest.mark.parametrize("cls", list(leaves(Refusal)), ids=lambda cls: cls.__name__)
def test_a_refusal_can_be_tried_again(dialect: Dialect, cls: type[Refusal]) -> None:
    """Busy is a status on which the SDKs try again, with the time after which it makes sense."""
    error = specimen(cls)
    document = dialect.render_error(error, "req_1")
    assert document.status in (503, 529)
    headers = dict(document.headers)
    assert (str(error.retry_after), "true") == (headers["retry-after"], headers["x-should-retry"])


@each_dialect
@settings(deadline=None)
@given(st.text(), st.sampled_from(list(leaves())), st.integers(100, 999))
def test_an_error_with_any_text_in_it_can_be_told(
    dialect: Dialect, text: str, cls: type[GatewayError], status: int
) -> None:
    """Whatever a client or an upstream said is in the error, its document is JSON and its headers are one line each."""
    fields = attrs.asdict(specimen(cls), recurse=False)
    said = {name: text for name, value in fields.items() if isinstance(value, str)}
    if "upstream_status" in fields:
        said["upstream_status"] = status
    document = dialect.render_error(cls(**(fields | said)), "req_1")
    json.loads(document.body)
    assert 400 <= document.status <= 599
    for _name, value in document.headers:
        assert value.isascii()
        assert value.isprintable()
