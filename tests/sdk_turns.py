"""A program that talks to a gateway through an official SDK and prints, as JSON, what the SDK made of the answers.

``python sdk_turns.py anthropic|openai URL TURN...``; which version of the SDK that is, is for PYTHONPATH to say.
Of both generations of Anthropic's only what they have in common is used.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from typing import Any

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
# What the two calls of a tool say, in the order of the calls.
RESULTS = ("7 degrees", "19 degrees")


class AnthropicTurns:
    """The turns as a program with Anthropic's SDK has them."""

    def __init__(self, url: str) -> None:
        import anthropic

        self.version = anthropic.__version__
        self._error = anthropic.APIStatusError
        self._client = anthropic.Anthropic(
            base_url=f"{url}/llm",
            api_key="sk-test",
            max_retries=0,
            http_client=anthropic.DefaultHttpxClient(trust_env=False),
        )

    def text(self, stream: bool) -> Any:
        said: list[str] = []
        message = self._ask(stream, [{"role": "user", "content": "say:text"}], said, system="Be brief.")
        return _message(message) | {"said": "".join(said) if stream else None}

    def tools(self, stream: bool) -> Any:
        tools = [{"name": "weather", "description": "The weather.", "input_schema": CITY}]
        messages: list[Any] = [{"role": "user", "content": "say:tools"}]
        first = self._ask(stream, messages, tools=tools)
        messages.append({"role": "assistant", "content": first.content})
        uses = [block for block in first.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": text}
            for use, text in zip(uses, RESULTS, strict=True)
        ]
        messages.append({"role": "user", "content": results})
        return [_message(first), _message(self._ask(stream, messages, tools=tools))]

    def image(self, stream: bool) -> Any:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "say:image"}]
        return _message(self._ask(stream, [{"role": "user", "content": content}]))

    def thinking(self, stream: bool) -> Any:
        messages: list[Any] = [{"role": "user", "content": "say:thinking"}]
        thinking = {"type": "enabled", "budget_tokens": 1024}
        first = self._ask(stream, messages, thinking=thinking)
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "say:text"}]
        second = self._ask(stream, messages, thinking=thinking)
        off = self._ask(stream, messages[:1], thinking={"type": "disabled"})
        return [_message(first), _message(second), _message(off)]

    def refused(self, stream: bool) -> Any:
        return [self._refusal(stream, status) for status in (400, 500)]

    def retried(self, _stream: bool) -> Any:
        raw = self._client.with_options(max_retries=3).messages.with_raw_response.create(
            model="reasoning", max_tokens=16, messages=[{"role": "user", "content": "say:text"}]
        )
        return _message(raw.parse()) | {"retries": raw.retries_taken}

    def _ask(self, stream: bool, messages: list[Any], said: list[str] | None = None, **more: Any) -> Any:
        members: dict[str, Any] = {"model": "reasoning", "max_tokens": 2048, "messages": messages, **more}
        if not stream:
            return self._client.messages.create(**members)
        with self._client.messages.stream(**members) as events:
            for text in events.text_stream:
                if said is not None:
                    said.append(text)
            return events.get_final_message()

    def _refusal(self, stream: bool, status: int) -> Any:
        try:
            self._ask(stream, [{"role": "user", "content": f"say:{status}"}])
        except self._error as error:
            body: Any = error.body
            return [type(error).__name__, error.status_code, body["error"]["type"], body["error"]["message"]]
        return None


class OpenAITurns:
    """The same with OpenAI's."""

    def __init__(self, url: str) -> None:
        import openai

        self.version = openai.__version__
        self._error = openai.APIStatusError
        self._client = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="sk-test",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )

    def text(self, stream: bool) -> Any:
        said: list[str] = []
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "say:text"}]
        return _completion(self._ask(stream, messages, said)) | {"said": "".join(said) if stream else None}

    def tools(self, stream: bool) -> Any:
        function = {"name": "weather", "description": "The weather.", "parameters": CITY, "strict": True}
        tools = [{"type": "function", "function": function}]
        messages: list[Any] = [{"role": "user", "content": "say:tools"}]
        first = self._ask(stream, messages, tools=tools)
        messages.append(first.choices[0].message)
        for call, text in zip(first.choices[0].message.tool_calls, RESULTS, strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return [_completion(first), _completion(self._ask(stream, messages, tools=tools))]

    def image(self, stream: bool) -> Any:
        url = {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}
        content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "say:image"}]
        return _completion(self._ask(stream, [{"role": "user", "content": content}]))

    def thinking(self, stream: bool) -> Any:
        messages = [{"role": "user", "content": "say:thinking"}]
        bodies = [{"chat_template_kwargs": {"enable_thinking": on}} for on in (True, False)]
        return [_completion(self._ask(stream, messages, extra_body=body)) for body in bodies]

    def refused(self, stream: bool) -> Any:
        return [self._refusal(stream, status) for status in (400, 500)]

    def retried(self, _stream: bool) -> Any:
        raw = self._client.with_options(max_retries=3).chat.completions.with_raw_response.create(
            model="reasoning", messages=[{"role": "user", "content": "say:text"}]
        )
        return _completion(raw.parse()) | {"retries": raw.retries_taken}

    def _ask(self, stream: bool, messages: list[Any], said: list[str] | None = None, **more: Any) -> Any:
        members: dict[str, Any] = {"model": "reasoning", "messages": messages, **more}
        if not stream:
            return self._client.chat.completions.create(**members)
        with self._client.chat.completions.stream(stream_options={"include_usage": True}, **members) as events:
            for event in events:
                if event.type == "content.delta" and said is not None:
                    said.append(event.delta)
            return events.get_final_completion()

    def _refusal(self, stream: bool, status: int) -> Any:
        try:
            self._ask(stream, [{"role": "user", "content": f"say:{status}"}])
        except self._error as error:
            body: Any = error.body
            return [type(error).__name__, error.status_code, body["type"], body["message"]]
        return None


def _message(message: Any) -> dict[str, Any]:
    """What a program sees of a message."""
    shown: dict[str, Callable[[Any], list[Any]]] = {
        "text": lambda block: [block.text],
        "thinking": lambda block: [block.thinking, block.signature],
        "tool_use": lambda block: [block.id, block.name, block.input],
    }
    return {
        "content": [[block.type, *shown[block.type](block)] for block in message.content],
        "stop": message.stop_reason,
        "usage": [message.usage.input_tokens, message.usage.output_tokens],
    }


def _completion(completion: Any) -> dict[str, Any]:
    """What a program sees of a completion."""
    (choice,) = completion.choices
    message = choice.message
    reasoning = (message.model_extra or {}).get("reasoning")
    calls = [[call.id, call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or ()]
    return {
        "content": message.content,
        "reasoning": reasoning,
        "calls": calls,
        "stop": choice.finish_reason,
        "usage": [completion.usage.prompt_tokens, completion.usage.completion_tokens],
    }


def main() -> None:
    sdk, url, *names = sys.argv[1:]
    turns: Any = {"anthropic": AnthropicTurns, "openai": OpenAITurns}[sdk](url)
    told: dict[str, Any] = {"version": turns.version}
    for name in names:
        turn, _, form = name.partition("-")
        told[name] = getattr(turns, turn)(form == "stream")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
