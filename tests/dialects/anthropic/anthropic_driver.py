"""What the tests of this dialect share: requests in, chat bodies out; chat chunks in, Messages events out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from aiogw.canonical import Engine, ResponseHead
from aiogw.dialects.anthropic import ANTHROPIC
from aiogw.dialects.base import Call, RelayEndpoint
from aiogw.errors import GatewayError, UnknownModel

TRANSCRIPTS = Path(__file__).parents[2] / "transcripts/vllm-0.32"

SSE_HEAD = ResponseHead(status=200, content_type="text/event-stream; charset=utf-8", content_length=None)
JSON_HEAD = ResponseHead(status=200, content_type="application/json", content_length=None)

THINKING = {"type": "enabled", "budget_tokens": 2048}


def transcript(name: str) -> bytes:
    return (TRANSCRIPTS / f"{name}.body.txt").read_bytes()


def decode_bytes(body: bytes, engine: Engine | None = None) -> Call:
    def find_engine(model: str) -> Engine:
        if model != "reasoning":
            raise UnknownModel(model=model, known=("reasoning",))
        return engine or Engine(model="upstream-name")

    endpoint = ANTHROPIC.endpoint("POST", "/llm/v1/messages")
    assert isinstance(endpoint, RelayEndpoint)
    return ANTHROPIC.decode(endpoint, "application/json", body, find_engine)


def decode(engine: Engine | None = None, **members: Any) -> Call:
    """The call of a minimal request with ``members`` on top; a member that is ``...`` is left out."""
    request = {"model": "reasoning", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]} | members
    request = {name: value for name, value in request.items() if value is not ...}
    return decode_bytes(json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass"), engine)


def upstream_body(engine: Engine | None = None, **members: Any) -> dict[str, Any]:
    body = json.loads(decode(engine, **members).request.body)
    assert isinstance(body, dict)
    return body


def upstream_messages(messages: list[dict[str, Any]], engine: Engine | None = None, **members: Any) -> list[Any]:
    found = upstream_body(engine, messages=messages, **members)["messages"]
    assert isinstance(found, list)
    return found


def D(finish: str | None = None, stop: str | int | None = None, **delta: Any) -> dict[str, Any]:  # noqa: N802
    """A chunk with this delta, written as the notes write it."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "stop_reason": stop}],
    }


def U(prompt: int = 5, completion: int = 2, **details: Any) -> dict[str, Any]:  # noqa: N802
    """The chunk that only has the usage."""
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion} | details}


def tool(index: int | None, arguments: Any = None, *, id: str | None = None, name: str | None = None) -> dict[str, Any]:  # noqa: A002
    call: dict[str, Any] = {"function": {}}
    if index is not None:
        call["index"] = index
    if id is not None:
        call["id"] = id
    if name is not None:
        call["function"]["name"] = name
    if arguments is not None:
        call["function"]["arguments"] = arguments
    return call


def sse(chunks: Iterable[dict[str, Any] | bytes], *, done: bool = True) -> bytes:
    out = b""
    for chunk in chunks:
        data = chunk if isinstance(chunk, bytes) else json.dumps(chunk, ensure_ascii=False).encode()
        out += b"data: " + data + b"\n\n"
    return out + (b"data: [DONE]\n\n" if done else b"")


class Client:
    """What a client sees of one streamed call: driven as the relay drives it."""

    def __init__(self, call: Call) -> None:
        self.encoder = call.encoder
        self.started = False
        self.received = b""
        self.error: GatewayError | None = None
        self.encoder.begin(SSE_HEAD)

    def feed(self, data: bytes, *, last: bool = False) -> None:
        if self.error is not None:
            return
        try:
            out = self.encoder.feed(data, last=last)
        except GatewayError as error:
            self.fail(error)
            return
        self._send(out)

    def wait(self) -> None:
        self._send(self.encoder.wait(1, 2.0))

    def fail(self, error: GatewayError) -> None:
        self.error = error
        if self.started:
            told = self.encoder.fail(error, "req_1")
            assert told is not None
            self.received += told

    def _send(self, out: bytes) -> None:
        self.started = self.started or self.encoder.head is not None
        assert self.started or not out
        self.received += out

    @property
    def events(self) -> list[dict[str, Any]]:
        return parse(self.received)


def parse(stream: bytes) -> list[dict[str, Any]]:
    """The events of a Messages stream, each exactly in the form clients need (S5)."""
    events = []
    assert stream.endswith(b"\n\n") or not stream
    for event in stream.split(b"\n\n")[:-1]:
        first, second = event.split(b"\n")
        data = json.loads(second.removeprefix(b"data: "))
        assert first == b"event: " + data["type"].encode()
        assert second.startswith(b'data: {"type":"' + data["type"].encode() + b'"')
        events.append(data)
    return events


def stream(
    chunks: Sequence[dict[str, Any] | bytes], *, done: bool = True, call: Call | None = None, **members: Any
) -> Client:
    """One event per read, then the end of the body."""
    client = Client(call or decode(stream=True, **members))
    for chunk in chunks:
        client.feed(sse([chunk], done=False))
    client.feed(sse([], done=done), last=True)
    return client


def blocks(events: list[dict[str, Any]]) -> list[Any]:
    """The content blocks put together as a strict client does; raises AssertionError on any fault of order (S3, S4)."""
    found: list[Any] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(found)
                is_open = True
                block = event["content_block"]
                empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}
                if block["type"] == "tool_use":
                    assert block["input"] == {}
                    found.append(["tool_use", block["id"], block["name"], ""])
                else:
                    assert block == {"type": block["type"]} | empty[block["type"]]
                    found.append([block["type"], ""])
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(found) - 1
                block, delta = found[-1], event["delta"]
                if delta["type"] == "signature_delta":
                    assert block[0] == "thinking"
                    block.append("signed")
                    assert delta["signature"]
                    continue
                kind, member = {
                    "text_delta": ("text", "text"),
                    "thinking_delta": ("thinking", "thinking"),
                    "input_json_delta": ("tool_use", "partial_json"),
                }[delta["type"]]
                assert block[0] == kind
                block[-1] += delta[member]
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(found) - 1
                is_open = False
    return [tuple(block) for block in found]


def ending(events: list[dict[str, Any]]) -> tuple[str, str | None]:
    """Stop reason and stop sequence of a stream that came to its proper end."""
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert sum(event["type"] == "message_delta" for event in events) == 1
    delta = events[-2]["delta"]
    return delta["stop_reason"], delta["stop_sequence"]


def whole(document: dict[str, Any] | bytes, **members: Any) -> dict[str, Any]:
    """The Messages document of a chat completion."""
    encoder = decode(**members).encoder
    encoder.begin(JSON_HEAD)
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    assert encoder.feed(data[:10], last=False) == b""
    assert encoder.head is None
    out = encoder.feed(data[10:], last=True)
    head: ResponseHead | None = encoder.head
    assert head is not None
    assert (head.status, head.content_type, head.content_length) == (200, "application/json", len(out))
    message = json.loads(out)
    assert isinstance(message, dict)
    return message


def completion(finish: str | None = "stop", stop: str | int | None = None, **message: Any) -> dict[str, Any]:
    """A whole chat completion with this message."""
    return {
        "id": "chatcmpl-1",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "stop_reason": stop}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
    }
