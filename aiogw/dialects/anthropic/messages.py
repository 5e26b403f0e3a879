"""The turns of a Messages conversation into chat messages in the order chat templates expect; knows no other field.

Anthropic takes blocks in nearly any order; templates take an assistant's calls, then their results, then the user.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from attrs import define, field, frozen

from aiogw.canonical import Engine
from aiogw.dialects.anthropic.content import (
    Image,
    Part,
    block_type,
    chat_content,
    document,
    image,
    result_content,
    search_result,
    text_of,
    unsupported,
)
from aiogw.dialects.anthropic.ids import upstream_tool_id
from aiogw.dialects.anthropic.parsing import NULL, exact_json, is_null, read
from aiogw.dialects.anthropic.tools import ToolChange
from aiogw.errors import InvalidField, quoted

# Claude Code puts this first in its system prompt, with a hash that changes on every request: with it no prefix is ever
# found in the engine's cache (vllm-mlx#277).
_BILLING_HEADER = "x-anthropic-billing-header:"

# Uses and results of tools that ran on Anthropic's servers: no client can rewrite its past, so they are dropped.
_SERVER_TOOL_BLOCK = re.compile(r"(?:server|mcp)_tool_use|\w+_tool_result")


class Message(msgspec.Struct):
    role: str
    content: str | list[msgspec.Raw] | None = None


class _Thinking(msgspec.Struct, gc=False):
    thinking: str = ""


class _ToolUse(msgspec.Struct):
    id: str
    name: str
    input: msgspec.Raw = NULL


class _ToolResult(msgspec.Struct):
    tool_use_id: str
    content: str | list[msgspec.Raw] | None = None
    is_error: bool | None = None


_thinking = msgspec.json.Decoder(_Thinking)
_tool_use = msgspec.json.Decoder(_ToolUse)
_tool_result = msgspec.json.Decoder(_ToolResult)


@define
class _UserTurn:
    results: list[dict[str, Any]] = field(factory=list)
    parts: list[Part] = field(factory=list)
    result_images: list[Part] = field(factory=list)


@define
class _AssistantTurn:
    texts: list[str] = field(factory=list)
    reasoning: list[str] = field(factory=list)
    calls: list[dict[str, Any]] = field(factory=list)


@define
class _SystemTurn:
    text: str


@frozen(kw_only=True)
class Conversation:
    """``messages`` for the upstream; ``prefill``: the last one is the beginning of the answer."""

    messages: list[dict[str, Any]]
    tool_changes: list[ToolChange]
    prefill: bool


def system_text(system: str | list[msgspec.Raw] | None) -> str:
    """The system prompt as one text, empty where there is none."""
    if system is None:
        return ""
    if isinstance(system, str):
        stripped = system
        while stripped.startswith(_BILLING_HEADER):
            stripped = stripped.partition("\n")[2]
        return stripped if stripped == system or stripped.strip() else ""
    texts = []
    for number, block in enumerate(system):
        path = f"system.{number}"
        if (kind := block_type(block, path)) != "text":
            raise unsupported(kind, path)
        text = text_of(block, path)
        if text and not text.startswith(_BILLING_HEADER):
            texts.append(text)
    return "\n\n".join(texts)


def conversation(system: str | list[msgspec.Raw] | None, messages: list[Message], engine: Engine) -> Conversation:
    """The whole of it; raises InvalidField."""
    return _Translation(engine, system_text(system)).translate(messages)


class _Translation:
    def __init__(self, engine: Engine, leading: str) -> None:
        self._engine = engine
        self._leading = [leading] if leading else []
        self._system_given = bool(leading)
        self._turns: list[_UserTurn | _AssistantTurn | _SystemTurn] = []
        self._changes: list[ToolChange] = []

    def translate(self, messages: list[Message]) -> Conversation:
        for number, message in enumerate(messages):
            path = f"messages.{number}"
            if message.role not in ("user", "assistant", "system"):
                reason = f"{quoted(message.role)} is not user, assistant or system"
                raise InvalidField(path=f"{path}.role", reason=reason)
            if message.content is None and message.role != "system":
                raise InvalidField(path=f"{path}.content", reason="Field required")
            if message.role == "user":
                self._user(message.content, f"{path}.content")
            elif message.role == "assistant":
                self._assistant(message.content, f"{path}.content")
            else:
                self._system(message.content, f"{path}.content")
        last = self._turns[-1] if self._turns else None
        return Conversation(
            messages=self._chat_messages(),
            tool_changes=self._changes,
            prefill=isinstance(last, _AssistantTurn) and any(last.texts) and not last.calls,
        )

    # -- one message at a time: consecutive ones of one role are one turn ---------------------------------------------

    def _user_turn(self) -> _UserTurn:
        if self._turns and isinstance(turn := self._turns[-1], _UserTurn):
            return turn
        turn = _UserTurn()
        self._turns.append(turn)
        return turn

    def _user(self, content: str | list[msgspec.Raw] | None, path: str) -> None:
        turn = self._user_turn()
        if isinstance(content, str):
            turn.parts.append(content)
            return
        for number, block in enumerate(content or ()):
            where = f"{path}.{number}"
            match block_type(block, where):
                case "text":
                    turn.parts.append(text_of(block, where))
                case "tool_result":
                    self._tool_result(turn, block, where)
                case "image":
                    turn.parts.append(image(block, where, self._engine))
                case "document":
                    turn.parts += document(block, where, self._engine)
                case "search_result":
                    turn.parts.append(search_result(block, where))
                case "tool_use" | "thinking" | "redacted_thinking" as kind:
                    raise InvalidField(path=f"{where}.type", reason=f"{kind} can only stand in an assistant message")
                case kind:
                    _server_tool_or_refuse(kind, where)

    def _tool_result(self, turn: _UserTurn, block: msgspec.Raw, path: str) -> None:
        result = read(block, _tool_result, path)
        call_id = upstream_tool_id(result.tool_use_id)
        if isinstance(result.content, str):
            parts: list[Part] = [result.content]
        else:
            parts = result_content(result.content or [], f"{path}.content", self._engine)
        content: Any
        if self._engine.tool_images and any(isinstance(part, Image) for part in parts):
            content = chat_content(["Error:", *parts] if result.is_error else parts)
        else:
            text = "\n".join([part for part in parts if isinstance(part, str)])
            content = (f"Error:\n{text}" if text else "Error:") if result.is_error else text
            for part in parts:
                if isinstance(part, Image):
                    turn.result_images += (f"Image from the tool result {call_id}:", part)
        turn.results.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _assistant(self, content: str | list[msgspec.Raw] | None, path: str) -> None:
        last = self._turns[-1] if self._turns else None
        turn = last if isinstance(last, _AssistantTurn) else _AssistantTurn()
        if isinstance(content, str):
            turn.texts.append(content)
        else:
            for number, block in enumerate(content or ()):
                self._assistant_block(turn, block, f"{path}.{number}")
        # One with nothing left is dropped here, not later: the user turns around it are then one turn.
        if turn is not last and (any(turn.texts) or any(turn.reasoning) or turn.calls):
            self._turns.append(turn)

    def _assistant_block(self, turn: _AssistantTurn, block: msgspec.Raw, path: str) -> None:
        match block_type(block, path):
            case "text":
                turn.texts.append(text_of(block, path))
            case "thinking":
                turn.reasoning.append(read(block, _thinking, path).thinking)
            case "redacted_thinking":
                pass
            case "tool_use":
                use = read(block, _tool_use, path)
                arguments = "{}" if is_null(use.input) else exact_json(use.input)
                if not arguments.startswith("{"):
                    raise InvalidField(path=f"{path}.input", reason="must be an object")
                turn.calls.append(
                    {
                        "id": upstream_tool_id(use.id),
                        "type": "function",
                        "function": {"name": use.name, "arguments": arguments},
                    }
                )
            case "tool_result" | "image" | "document" | "search_result" as kind:
                raise InvalidField(path=f"{path}.type", reason=f"{kind} can only stand in a user message")
            case kind:
                _server_tool_or_refuse(kind, path)

    def _system(self, content: str | list[msgspec.Raw] | None, path: str) -> None:
        texts = [content] if isinstance(content, str) else []
        if isinstance(content, list):
            for number, block in enumerate(content):
                where = f"{path}.{number}"
                match block_type(block, where):
                    case "text":
                        texts.append(text_of(block, where))
                    case "tool_addition" | "tool_removal" as kind:
                        change = ToolChange(addition=kind == "tool_addition", block=block, path=where)
                        self._changes.append(change)
                    case kind:
                        raise unsupported(kind, where)
        text = "\n\n".join(filter(None, texts))
        if not text:
            return
        if not self._turns and not self._system_given:
            self._leading.append(text)
        elif self._engine.system_anywhere:
            self._turns.append(_SystemTurn(text))
        else:
            # Never hoisted to the front: that changes what it means, and the prefix the engine has cached.
            self._user_turn().parts.append(f"<system-reminder>\n{text}\n</system-reminder>")

    # -- the order of the wire ----------------------------------------------------------------------------------------

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self._leading:
            messages.append({"role": "system", "content": "\n\n".join(self._leading)})
        between: list[_UserTurn | _SystemTurn] = []
        for turn in self._turns:
            if isinstance(turn, _AssistantTurn):
                messages += _between_assistants(between)
                between = []
                messages.append(self._assistant_message(turn))
            else:
                between.append(turn)
        messages += _between_assistants(between)
        return messages

    def _assistant_message(self, turn: _AssistantTurn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(turn.texts)}
        if reasoning := "".join(turn.reasoning):
            message[self._engine.reasoning_field] = reasoning
        if turn.calls:
            message["tool_calls"] = turn.calls
        return message


def _between_assistants(turns: list[_UserTurn | _SystemTurn]) -> list[dict[str, Any]]:
    """All tool messages first: nothing may stand between calls and their results (vllm#46321, xinference#5389)."""
    messages = [result for turn in turns if isinstance(turn, _UserTurn) for result in turn.results]
    for turn in turns:
        if isinstance(turn, _SystemTurn):
            messages.append({"role": "system", "content": turn.text})
            continue
        content = chat_content(turn.result_images + turn.parts)
        if content or not turn.results:
            messages.append({"role": "user", "content": content})
    return messages


def _server_tool_or_refuse(kind: str, path: str) -> None:
    if not _SERVER_TOOL_BLOCK.fullmatch(kind):
        raise unsupported(kind, path)
