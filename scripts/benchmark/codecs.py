"""What the Anthropic dialect's translation costs, without a process around it."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable

from benchmark.figures import Figure, at_most
from benchmark.rig import Bench

CONVERSATION_BYTES = 1_000_000
CONVERSATION_BLOCKS = 400
ARGUMENT_PIECES = 1000
REPEATS = 15

# Code and prose, with what has to be escaped and what is more than one byte long.
PROSE = 'The füll gate keeps "six" in flight.\n\tfor (int i = 0; i < 6; i++) { wait(i); }  // 待つ\n'


async def codecs(bench: Bench) -> list[Figure]:
    """A conversation of 1 MB in 400 blocks translated; a tool argument of 2 and of 4 MB in 1,000 pieces translated."""
    # Here, so that a benchmark of anything else neither needs nor loads it.
    from aiogw.canonical import Engine, ResponseHead
    from aiogw.dialects.anthropic import ANTHROPIC
    from aiogw.dialects.base import Call, RelayEndpoint

    endpoint = ANTHROPIC.endpoint("POST", "/llm/v1/messages")
    assert isinstance(endpoint, RelayEndpoint)

    def decode(body: bytes) -> Call:
        call = ANTHROPIC.decode(endpoint, "application/json", body, lambda model: Engine(model=model))
        assert isinstance(call, Call)
        return call

    def translate_stream(chunks: list[bytes]) -> None:
        encoder = decode(_question()).encoder
        encoder.begin(ResponseHead(status=200, content_type="text/event-stream", content_length=None))
        out_bytes = sum(len(encoder.feed(chunk, last=False)) for chunk in chunks)
        out_bytes += len(encoder.feed(b"", last=True))
        if out_bytes < sum(map(len, chunks)) / 4:
            raise ValueError("the tool call did not come out at the other end")

    bench.progress("a conversation of 1 MB")
    body = _conversation()
    conversation_ms = [_thread_ms(lambda: decode(body)) for _ in range(REPEATS)]
    streams = {megabytes: _tool_call_stream(megabytes * 1_000_000) for megabytes in (2, 4)}
    spent_ms: dict[int, list[float]] = {2: [], 4: []}
    for repeat in range(REPEATS):
        for megabytes, chunks in streams.items():
            bench.progress(f"a tool argument of {megabytes} MB, {repeat + 1} of {REPEATS}")
            spent_ms[megabytes].append(_thread_ms(lambda chunks=chunks: translate_stream(chunks)))  # type: ignore[misc]
    two, four = statistics.median(spent_ms[2]), statistics.median(spent_ms[4])
    return [
        Figure(
            name=f"codecs: conversation of {len(body) / 1e6:.1f} MB, {CONVERSATION_BLOCKS} blocks",
            unit="ms",
            clock="cpu",
            aiogw=statistics.median(conversation_ms),
            goals=(at_most(15, issue=3),),
        ),
        Figure(name="codecs: tool argument of 4 MB, 1,000 pieces", unit="ms", clock="cpu", aiogw=four),
        Figure(
            name="codecs: tool argument, 4 MB over 2 MB",
            unit="x",
            clock="cpu",
            aiogw=four / two,
            goals=(at_most(2.2, issue=3),),
        ),
    ]


def _thread_ms(action: Callable[[], object]) -> float:
    gc.collect()  # what others left behind is not for this one to sweep
    before = time.thread_time()
    action()
    return (time.thread_time() - before) * 1000


def _question() -> bytes:
    document = {
        "model": "reasoning",
        "max_tokens": 100_000,
        "stream": True,
        "messages": [{"role": "user", "content": "Write the file."}],
        "tools": [{"name": "write_file", "description": "Writes.", "input_schema": {"type": "object"}}],
    }
    return json.dumps(document).encode()


def _conversation() -> bytes:
    """A long session of a coding agent: text and a tool call, a result and text, and again."""
    text = _prose(CONVERSATION_BYTES // CONVERSATION_BLOCKS - 120)
    messages: list[dict[str, object]] = [{"role": "user", "content": "Mend the tests."}]
    for turn in range(CONVERSATION_BLOCKS // 4):
        call_id = f"toolu_{turn:024d}"
        messages += [
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": text},
                    {"type": "tool_use", "id": call_id, "name": "write_file", "input": {"path": "a", "content": text}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call_id, "content": text},
                    {"type": "text", "text": text},
                ],
            },
        ]
    document = json.loads(_question()) | {"messages": messages}
    return json.dumps(document, ensure_ascii=False).encode()


def _tool_call_stream(argument_bytes: int) -> list[bytes]:
    """The events of one tool call whose argument comes in pieces, as vLLM sends them."""
    arguments = json.dumps({"path": "a.c", "content": _prose(argument_bytes)})
    size = -(-len(arguments) // ARGUMENT_PIECES)
    first = {"index": 0, "id": "chatcmpl-tool-0", "type": "function", "function": {"name": "write_file"}}
    deltas: list[dict[str, object]] = [{"role": "assistant", "content": ""}, {"tool_calls": [first]}]
    deltas += (
        {"tool_calls": [{"index": 0, "function": {"arguments": arguments[at : at + size]}}]}
        for at in range(0, len(arguments), size)
    )
    return [
        *(_event(delta, None) for delta in deltas),
        _event({}, "tool_calls"),
        b"data: [DONE]\n\n",
    ]


def _event(delta: dict[str, object], finish_reason: str | None) -> bytes:
    document = {
        "id": "chatcmpl-bench",
        "object": "chat.completion.chunk",
        "created": 1796095065,
        "model": "reasoning",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
    }
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def _prose(size_bytes: int) -> str:
    """Text that is about ``size_bytes`` long as JSON in ASCII escapes or in UTF-8, whichever is shorter."""
    times = -(-size_bytes // len(json.dumps(PROSE, ensure_ascii=False).encode()))
    return PROSE * times
