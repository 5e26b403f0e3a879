#!/usr/bin/env python3
"""A stub of a vLLM server that follows a script, so that agents in front of it can be tried: text, or one tool call.

What it answers is decided by the end of the conversation, from the last thing the assistant said on:

    a tool's result             "The tool said: RESULT"
    a user's "use the tool"     a call of the shell tool that is offered, which prints its MARK
    anything else               "Hello from the script."

It speaks chat completions and responses, whole and streamed, in the shapes of scripts/stub_upstream.py, and thinks
before it speaks, as a reasoning model does.  With --requests FILE, every request becomes a line of JSON there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import stub_upstream
from stub_upstream import FINGERPRINT, RESPONSE, RESPONSE_USAGE, Answer, Asked, event, new_id, nulls

TEXT = "Hello from the script."
CUE = "use the tool"
# The shell works it out, so that this cannot be found in what was only said, only in what was really run.
MARK = "mark-42"
COMMAND = "echo mark-$((6*7))"
THOUGHTS = ["The user ", "wants ", "something."]

JSON = dict[str, Any]
Endpoint = Callable[[Asked], Answer]


# -- the script -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str


def decide(said: str, results: list[str], tools: list[tuple[str, JSON]]) -> str | ToolCall:
    """What comes next: ``said`` by the user and ``results`` of tools are what came since the assistant last spoke."""
    if results:
        return "The tool said: " + " ".join(results)
    if CUE in said:
        for name, schema in tools:
            if (arguments := shell_arguments(schema)) is not None:
                return ToolCall(name, json.dumps(arguments))
    return TEXT


def shell_arguments(schema: JSON) -> JSON | None:
    """Arguments that make a tool with this ``schema`` run COMMAND; None if it is not a tool for that."""
    properties = schema.get("properties") or {}
    for name in ("command", "cmd"):
        if name in properties:
            arguments: JSON = {name: ["sh", "-c", COMMAND] if properties[name].get("type") == "array" else COMMAND}
            break
    else:
        return None
    for name in schema.get("required") or ():
        arguments.setdefault(name, "Print a mark")
    return arguments


def text_of(content: Any) -> str:
    """The text in a message's content, be it a string or parts; of whatever dialect."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return " ".join(text_of(part.get("text")) for part in content if isinstance(part, dict))
    return ""


def pieces(text: str, size: int = 7) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


# -- chat completions -----------------------------------------------------------------------------------------------


def chat(asked: Asked) -> Answer:
    messages = asked.required("messages")
    since = list(itertools.takewhile(lambda message: message["role"] != "assistant", reversed(messages)))[::-1]
    said = " ".join(text_of(message.get("content")) for message in since if message["role"] == "user")
    results = [text_of(message.get("content")) for message in since if message["role"] == "tool"]
    offered = [tool["function"] for tool in asked.body.get("tools") or () if tool.get("type") == "function"]
    step = decide(said, results, [(tool["name"], tool.get("parameters") or {}) for tool in offered])

    head = {"id": new_id("chatcmpl-"), "object": "chat.completion", "created": int(time.time()), "model": asked.model}
    deltas: list[JSON] = [{"reasoning": thought} for thought in THOUGHTS]
    message: JSON = {"role": "assistant", "content": None, "reasoning": "".join(THOUGHTS)}
    if isinstance(step, ToolCall):
        reason = "tool_calls"
        opened = {"id": new_id("chatcmpl-tool-"), "type": "function"}
        message["tool_calls"] = [opened | {"function": {"name": step.name, "arguments": step.arguments}}]
        calls = [opened | {"index": 0, "function": {"name": step.name}}]
        calls += [{"index": 0, "function": {"arguments": piece}} for piece in pieces(step.arguments)]
        deltas += [{"content": None, "tool_calls": [call]} for call in calls]
    else:
        reason = "stop"
        message["content"] = step
        deltas += [{"content": piece} for piece in pieces(step)]

    usage = stub_upstream.chat_usage(stub_upstream.tokens_in(messages), len(deltas))
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    document = {**head, "choices": [choice], "system_fingerprint": FINGERPRINT, "usage": usage}

    head["object"] = "chat.completion.chunk"
    end = {"finish_reason": None}
    deltas.insert(0, {"role": "assistant", "content": ""})
    chunks: list[JSON] = [
        {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, **end}]} for delta in deltas
    ]
    chunks[-1]["choices"][0] |= {"finish_reason": reason, "stop_reason": None}
    at_end, _ = asked.usage_wanted()
    closing = stub_upstream.completion_ends(head, chunks[-1], usage if at_end else None)
    return Answer(1, document, [], [[event(chunk)] for chunk in chunks], closing)


# -- responses ------------------------------------------------------------------------------------------------------


def responses(asked: Asked) -> Answer:
    given = asked.required("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    since = list(itertools.takewhile(lambda item: not is_assistants(item), reversed(items)))[::-1]
    said = " ".join(text_of(item.get("content")) for item in since if item.get("role") == "user")
    results = [text_of(item.get("output")) for item in since if item.get("type") == "function_call_output"]
    offered = [tool for tool in asked.body.get("tools") or () if tool.get("type") == "function"]
    step = decide(said, results, [(tool["name"], tool.get("parameters") or {}) for tool in offered])

    begun = RESPONSE | {"id": new_id("resp_"), "created_at": int(time.time()), "model": asked.model}
    story = Story()
    story.tell("response.created", response=begun)
    story.tell("response.in_progress", response=begun)
    story.tell_thoughts(new_id("rs_"))
    if isinstance(step, ToolCall):
        story.tell_call(new_id("fc_"), step)
    else:
        story.tell_text(new_id("msg_"), step)
    counts = {"input_tokens": stub_upstream.tokens_in(given), "output_tokens": len(story.events)}
    usage = RESPONSE_USAGE | counts | {"total_tokens": sum(counts.values())}
    ended = begun | {"status": "completed", "output": story.output, "usage": usage}
    story.tell("response.completed", response=ended)
    return Answer(1, ended, [], [[one] for one in story.events], [])


def is_assistants(item: JSON) -> bool:
    return item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning")


@dataclass
class Story:
    """The events of one response, and the output items they amount to."""

    events: list[bytes] = field(default_factory=list)
    output: list[JSON] = field(default_factory=list)

    def tell(self, kind: str, **members: Any) -> None:
        members |= {"sequence_number": len(self.events), "type": kind}
        self.events.append(b"event: %s\n" % kind.encode() + event(dict(sorted(members.items()))))

    def tell_thoughts(self, item_id: str) -> None:
        text = "".join(THOUGHTS)
        part = {"text": text, "type": "reasoning_text"}
        item = {"id": item_id, "summary": [], "type": "reasoning", **nulls("content encrypted_content")}
        place = {"item_id": item_id, "output_index": len(self.output), "content_index": 0}
        with self.item(item | {"status": "in_progress"}, item | {"content": [part], "status": "completed"}):
            self.tell("response.content_part.added", part=part | {"text": ""}, **place)
            for thought in THOUGHTS:
                self.tell("response.reasoning_text.delta", delta=thought, **place)
            self.tell("response.reasoning_text.done", text=text, **place)
            self.tell("response.content_part.done", part=part, **place)

    def tell_text(self, item_id: str, text: str) -> None:
        part: JSON = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
        item = {"id": item_id, "content": [], "role": "assistant", "type": "message"}
        place = {"item_id": item_id, "output_index": len(self.output), "content_index": 0}
        with self.item(item | {"status": "in_progress"}, item | {"content": [part], "status": "completed"}):
            self.tell("response.content_part.added", part=part | {"text": "", "logprobs": []}, **place)
            for piece in pieces(text):
                self.tell("response.output_text.delta", delta=piece, logprobs=[], **place)
            self.tell("response.output_text.done", text=text, logprobs=[], **place)
            self.tell("response.content_part.done", part=part, **place)

    def tell_call(self, item_id: str, call: ToolCall) -> None:
        item = {"id": item_id, "call_id": new_id("call_"), "name": call.name, "type": "function_call"}
        place = {"item_id": item_id, "output_index": len(self.output)}
        done = item | {"arguments": call.arguments, "status": "completed"}
        with self.item(item | {"arguments": "", "status": "in_progress"}, done):
            for piece in pieces(call.arguments):
                self.tell("response.function_call_arguments.delta", delta=piece, **place)
            self.tell("response.function_call_arguments.done", arguments=call.arguments, name=call.name, **place)

    @contextlib.contextmanager
    def item(self, begun: JSON, done: JSON) -> Iterator[None]:
        index = len(self.output)
        self.tell("response.output_item.added", item=begun, output_index=index)
        yield
        self.tell("response.output_item.done", item=done, output_index=index)
        self.output.append(done)


# -- serving --------------------------------------------------------------------------------------------------------


def tokenize(asked: Asked) -> Answer:
    count = stub_upstream.tokens_in([asked.body.get("messages"), asked.body.get("tools")])
    return Answer(0, {"count": count, "max_model_len": 32768, "tokens": [], "token_strs": None}, [], [], [])


def written_down(path: str, endpoint: Endpoint, log: IO[str]) -> Endpoint:
    def answer(asked: Asked) -> Answer:
        print(json.dumps({"path": path, "body": asked.body}, ensure_ascii=False), file=log, flush=True)
        return endpoint(asked)

    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--model", action="append", dest="models", help="a model it serves; may be repeated")
    parser.add_argument("--requests", help="file that gets a line for every request")
    options = parser.parse_args()
    scripted: dict[str, Endpoint] = {"/v1/chat/completions": chat, "/v1/responses": responses, "/tokenize": tokenize}
    with contextlib.ExitStack() as stack:
        if options.requests:
            log = stack.enter_context(open(options.requests, "a", encoding="utf-8"))
            scripted = {path: written_down(path, endpoint, log) for path, endpoint in scripted.items()}
        stub_upstream.ENDPOINTS.update(scripted)
        engine = stub_upstream.Engine(options.models or ["reasoning"], 0.0, [], stub_upstream.Account(None))
        asyncio.run(stub_upstream.serve("127.0.0.1", options.port, engine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
