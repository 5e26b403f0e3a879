"""Whole conversations through the official SDKs, of Anthropic's both generations: what they return, what goes up."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rig import DONE, OPENAI, PATIENCE_SECONDS, TEXT, Exchange, Rig, RunningGateway, ScriptedUpstream, chunk, vllm_error
from sdk_turns import PNG, RESULTS

PROGRAM = Path(__file__).parents[1] / "sdk_turns.py"
OLDER = Path(sys.prefix) / "anthropic-0.121"
SDKS = ("anthropic", "anthropic-0.121", "openai")

THOUGHT = "The user wants to be greeted."
CITIES = ("Paris", "Rome")
CALL_IDS = ("chatcmpl-tool-1", "chatcmpl-tool-2")
CALLS = [[call_id, "weather", {"city": city}] for call_id, city in zip(CALL_IDS, CITIES, strict=True)]
IMAGE = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
USAGE = [20, 2]

# -- the upstream ---------------------------------------------------------------------------------------------------


def marker(document: dict[str, Any]) -> str:
    """The word behind ``say:`` in the last message; ``results`` if that is a tool's."""
    last = document["messages"][-1]
    if last["role"] == "tool":
        return "results"
    content = last["content"]
    text = content if isinstance(content, str) else next(part["text"] for part in content if part["type"] == "text")
    return text.partition("say:")[2]


def script(exchange: Exchange) -> None:
    """Answer by the content of the request, in vLLM's shapes."""
    document = json.loads(exchange.request.body)
    word = marker(document)
    if word.isdigit():
        exchange.answer(vllm_error(f"told to fail with {word}", int(word)), status=int(word))
        return
    reasoning, text, calls = None, TEXT, False
    if word == "tools":
        text, calls = "", True
    elif word == "results":
        text = " and ".join(message["content"] for message in document["messages"] if message["role"] == "tool")
    elif word == "image":
        text = next(part["image_url"]["url"] for part in document["messages"][-1]["content"] if "image_url" in part)
    elif word == "thinking":
        # As Qwen's template does: it thinks unless it is told not to.
        reasoning = THOUGHT if document.get("chat_template_kwargs", {}).get("enable_thinking", True) else None
    answer = streamed if document.get("stream") else answered
    answer(exchange, text, reasoning, calls)


def answered(exchange: Exchange, text: str, reasoning: str | None, calls: bool) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": text or None, "reasoning": reasoning, "tool_calls": []}
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for call_id, name, arguments in CALLS
        ]
    finish = "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    document = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1796095065,
        "model": "reasoning",
        "choices": [choice],
        "usage": {"prompt_tokens": 20, "total_tokens": 22, "completion_tokens": 2},
    }
    exchange.answer(json.dumps(document).encode())


def streamed(exchange: Exchange, text: str, reasoning: str | None, calls: bool) -> None:
    events = [chunk({"role": "assistant", "content": ""})]
    if reasoning:
        events += [chunk({"reasoning": piece}) for piece in (reasoning[:9], reasoning[9:])]
    if text:
        events += [chunk({"content": piece}) for piece in (text[:5], text[5:])]
    for index, (call_id, name, arguments) in enumerate(CALLS if calls else ()):
        begun = {"id": call_id, "type": "function", "index": index, "function": {"name": name}}
        events.append(chunk({"content": None, "tool_calls": [begun]}))
        written = json.dumps(arguments)
        for piece in (written[:6], written[6:]):
            events.append(chunk({"content": None, "tool_calls": [{"index": index, "function": {"arguments": piece}}]}))
    events += [chunk({"content": ""}, finish="tool_calls" if calls else "stop"), chunk(usage=True), DONE]
    exchange.stream(events)


# -- the program ----------------------------------------------------------------------------------------------------


async def run(sdk: str, gateway: RunningGateway, *turns: str) -> dict[str, Any]:
    """What the program prints after these turns with this SDK."""
    environment = dict(os.environ)
    if sdk == "anthropic-0.121":
        if not OLDER.is_dir():
            pytest.fail(f"{OLDER} is missing; scripts/install puts anthropic 0.121 there")
        environment["PYTHONPATH"] = str(OLDER)
    command = (sys.executable, "-W", "ignore", str(PROGRAM), sdk.partition("-")[0], gateway.url, *turns)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        told, complaints = await asyncio.wait_for(process.communicate(), 5 * PATIENCE_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert 0 == process.returncode, complaints.decode()
    document = json.loads(told)
    assert sdk != "anthropic-0.121" or document["version"].startswith("0.121.")
    assert sdk != "anthropic" or int(document["version"].partition(".")[0]) >= 2
    return document


def shown(sdk: str, text: str, thought: str | None = None, calls: bool = False) -> dict[str, Any]:
    """The answer as a program with this SDK sees it, without what only a stream has; signatures are masked."""
    if sdk == "openai":
        stop = "tool_calls" if calls else "stop"
        return {
            "content": text or None,
            "reasoning": thought,
            "calls": CALLS if calls else [],
            "stop": stop,
            "usage": USAGE,
        }
    content: list[Any] = [["thinking", thought, "signed"]] if thought else []
    content += [["text", text]] if text else []
    content += [["tool_use", *call] for call in CALLS] if calls else []
    return {"content": content, "stop": "tool_use" if calls else "end_turn", "usage": USAGE}


def masked(answer: dict[str, Any]) -> dict[str, Any]:
    """``answer`` with each signature that is there replaced by a word."""
    content = answer["content"]
    if isinstance(content, list):
        content = [[*block[:2], "signed"] if block[0] == "thinking" and block[2] else block for block in content]
    if content == "":
        content = None  # streamed, nothing is an empty text to OpenAI's SDK
    return answer | {"content": content}


def sent(upstream: ScriptedUpstream, word: str) -> list[dict[str, Any]]:
    """The bodies that reached the upstream with this marker in their last message."""
    documents = [json.loads(exchange.request.body) for exchange in upstream.exchanges]
    return [document for document in documents if marker(document) == word]


@pytest.mark.parametrize("sdk", SDKS)
async def test_conversations(rig: Rig, sdk: str, stream: bool) -> None:
    """Text, two calls of a tool and their results, an image, thinking on and off, and what an upstream refuses."""
    upstream = await rig.upstream(script)
    daemon = await rig.daemon(upstream)
    form = "stream" if stream else "whole"
    names = [f"{turn}-{form}" for turn in ("text", "tools", "image", "thinking", "refused")]
    told = await run(sdk, daemon, *names)
    text, tools, image, thinking, refused = (told[name] for name in names)

    assert shown(sdk, TEXT) | {"said": TEXT if stream else None} == masked(text)
    assert [shown(sdk, "", calls=True), shown(sdk, " and ".join(RESULTS))] == [masked(answer) for answer in tools]
    assert shown(sdk, IMAGE) == masked(image)
    if sdk == "openai":
        expected = [shown(sdk, TEXT, THOUGHT), shown(sdk, TEXT)]
        types = ("BadRequestError", "InternalServerError")
    else:
        expected = [shown(sdk, TEXT, THOUGHT), shown(sdk, TEXT), shown(sdk, TEXT)]
        types = ("invalid_request_error", "api_error")
    assert expected == [masked(answer) for answer in thinking]
    assert [
        ["BadRequestError", 400, types[0], "told to fail with 400"],
        ["InternalServerError", 500, types[1], "told to fail with 500"],
    ] == refused
    check_what_went_up(upstream, sdk, stream)


def check_what_went_up(upstream: ScriptedUpstream, sdk: str, stream: bool) -> None:
    """Whichever SDK asked, vLLM got a chat request that says the same."""
    assert {"/v1/chat/completions"} == {exchange.request.target for exchange in upstream.exchanges}
    documents = [json.loads(exchange.request.body) for exchange in upstream.exchanges]
    assert {("reasoning", stream)} == {(one["model"], one.get("stream", False)) for one in documents}

    begun = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "say:text"}]
    assert begun == sent(upstream, "text")[0]["messages"]

    (tools,), (results,) = sent(upstream, "tools"), sent(upstream, "results")
    assert tools["tools"] == results["tools"]
    assert ["weather"] == [tool["function"]["name"] for tool in tools["tools"]]
    _, called, *answers = results["messages"]
    calls = [
        [call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])]
        for call in called["tool_calls"]
    ]
    assert CALLS == calls
    assert list(zip(CALL_IDS, RESULTS, strict=True)) == [(one["tool_call_id"], one["content"]) for one in answers]

    (image,) = sent(upstream, "image")
    assert ["image_url", "text"] == [part["type"] for part in image["messages"][0]["content"]]

    on, off = sent(upstream, "thinking")
    assert [True, False] == [one["chat_template_kwargs"]["enable_thinking"] for one in (on, off)]
    if sdk != "openai":
        # What was thought goes back up with the next turn.
        _, assistant, _ = sent(upstream, "text")[1]["messages"]
        assert ("assistant", TEXT, THOUGHT) == (assistant["role"], assistant["content"], assistant["reasoning"])


@pytest.mark.parametrize("sdk", SDKS)
async def test_a_refusal_and_the_sdks_own_retry(rig: Rig, sdk: str) -> None:
    """A full queue is a refusal that the SDK gets over by itself, after as long as it was told to wait."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, queue_limit=0, retry_after_min_seconds=1, retry_after_max_seconds=1)
    holder = await rig.post(daemon, OPENAI, 1000)
    exchange = await upstream.exchange(0)
    running = asyncio.ensure_future(run(sdk, daemon, "retried"))
    refused = await daemon.record(outcome="queue_full")
    upstream.script = script
    exchange.answer()
    assert 200 == (await holder.response()).status
    told = await running
    assert 1 <= told["retried"].pop("retries") <= 3
    assert shown(sdk, TEXT) == masked(told["retried"])
    assert ("openai" if sdk == "openai" else "anthropic", 503) == (refused["surface"], refused["status"])
    await daemon.record(outcome="completed", surface=refused["surface"], request_bytes=refused["request_bytes"])
    assert [["user"]] == [[message["role"] for message in one["messages"]] for one in sent(upstream, "text")]
