"""A Messages request into the chat request vLLM reads, and into the terms its response must keep.

Known fields are read strictly, unknown ones ignored: Claude Code adds some with every release.  The same request always
gives the same bytes, so that the engine finds its prefix again.  Nothing of the response may be known here.
"""

from __future__ import annotations

from typing import Any

import msgspec
from attrs import frozen

from aiogw.canonical import CanonicalRequest, Document, Engine, Operation
from aiogw.dialects.anthropic.counting import count_document, estimate, tokenize_body
from aiogw.dialects.anthropic.messages import Message, conversation
from aiogw.dialects.anthropic.parsing import NULL, checked, is_null, read
from aiogw.dialects.anthropic.terms import ReplyTerms
from aiogw.dialects.anthropic.tools import ToolChoice, tool_members
from aiogw.dialects.base import FindEngine, encode_body
from aiogw.errors import InvalidField, quoted

_EFFORTS_ABOVE_HIGH = ("xhigh", "max")


class _Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class _Format(msgspec.Struct):
    type: str
    schema: msgspec.Raw = NULL


class _OutputConfig(msgspec.Struct):
    effort: msgspec.Raw = NULL
    format: _Format | None = None


class _Request(msgspec.Struct):
    model: str
    messages: list[Message] = []
    max_tokens: int | None = None
    system: str | list[msgspec.Raw] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: msgspec.Raw = NULL
    top_p: msgspec.Raw = NULL
    top_k: msgspec.Raw = NULL
    thinking: _Thinking | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: ToolChoice | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    mcp_servers: msgspec.Raw = NULL
    container: msgspec.Raw = NULL


class _Container(msgspec.Struct):
    skills: list[msgspec.Raw] | None = None


_request = msgspec.json.Decoder(_Request)
_container = msgspec.json.Decoder(_Container)
_anything: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_list: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])


@frozen(kw_only=True)
class Translation:
    """The request that goes up and the terms of what comes down."""

    request: CanonicalRequest
    terms: ReplyTerms


def translate(body: bytes, *, path: str, surface: str, find_engine: FindEngine) -> Translation:
    """The chat request of a Messages request; raises MalformedBody, InvalidField or UnknownModel."""
    request = _read_request(body)
    engine = find_engine(request.model)
    max_tokens = _max_tokens(request.max_tokens, engine)
    document = {"model": engine.model} | _prompt(request, engine)
    document["max_tokens"] = max_tokens
    document |= _sampling(request)
    document |= _output(request, engine)
    if request.stream:
        document["stream"] = True
        document["stream_options"] = {"include_usage": True}
        if engine.continuous_usage:
            document["stream_options"]["continuous_usage_stats"] = True
    for name, value in engine.body_defaults.items():
        document.setdefault(name, value)
    thinking = request.thinking
    asked = thinking is not None and thinking.type != "disabled"
    return Translation(
        request=CanonicalRequest(
            operation=Operation.CHAT,
            model=request.model,
            stream=bool(request.stream),
            sequences=1,
            body=encode_body(document),
            content_type="application/json",
            path=path,
            surface=surface,
        ),
        terms=ReplyTerms(
            model=request.model,
            upstream=engine.model,
            show_thinking=asked or engine.show_unrequested_thinking,
            omit_thinking=thinking is not None and thinking.display == "omitted",
            stop_sequences=tuple(request.stop_sequences or ()),
            max_tokens=max_tokens,
            max_model_len=engine.max_model_len,
        ),
    )


def translate_count(body: bytes, *, path: str, surface: str, find_engine: FindEngine) -> CanonicalRequest | Document:
    """The ``/tokenize`` request of a Messages request, or the answer where the count is an estimate; raises as above.

    The same translation as for an answer, so that what is counted is what would be sent.
    """
    request = _read_request(body)
    engine = find_engine(request.model)
    prompt = _prompt(request, engine)
    if engine.count_tokens == "estimate":
        return count_document(estimate(prompt))
    return CanonicalRequest(
        operation=Operation.TOKENIZE,
        model=request.model,
        stream=False,
        sequences=0,
        body=tokenize_body(engine.model, prompt),
        content_type="application/json",
        path=path,
        surface=surface,
    )


def _read_request(body: bytes) -> _Request:
    request = read(checked(body), _request, "")
    if not request.model:
        raise InvalidField(path="model", reason="Field required")
    if not request.messages:
        raise InvalidField(path="messages", reason="at least one message is required")
    _refuse_servers(request)
    return request


def _refuse_servers(request: _Request) -> None:
    """What would bring tools that the model then does not have, while the caller counts on them."""
    if not is_null(request.mcp_servers) and read(request.mcp_servers, _list, "mcp_servers"):
        raise InvalidField(path="mcp_servers", reason="not supported by this gateway")
    if bytes(request.container).startswith(b"{") and read(request.container, _container, "container").skills:
        raise InvalidField(path="container", reason="skills are not supported by this gateway")


def _prompt(request: _Request, engine: Engine) -> dict[str, Any]:
    """All that the engine makes tokens of, which is what counting needs as well."""
    talk = conversation(request.system, request.messages, engine)
    members: dict[str, Any] = {"messages": talk.messages}
    members |= tool_members(request.tools or (), talk.tool_changes, request.tool_choice)
    if talk.prefill:
        members["continue_final_message"] = True
        members["add_generation_prompt"] = False
    if request.thinking is not None:
        members |= _thinking_members(request.thinking, engine)
    return members


def _thinking_members(thinking: _Thinking, engine: Engine) -> dict[str, Any]:
    if thinking.type == "disabled":
        return dict(engine.thinking_off)
    if thinking.type not in ("enabled", "adaptive", "between_tools"):
        # Claude Code knows this sentence and tries again without thinking.
        raise InvalidField(path="thinking.type", reason=f"{quoted(thinking.type)} is not supported")
    members = dict(engine.thinking_on)
    if engine.thinking_budget and thinking.type == "enabled" and thinking.budget_tokens is not None:
        members["thinking_token_budget"] = thinking.budget_tokens
    return members


def _max_tokens(max_tokens: int | None, engine: Engine) -> int:
    if max_tokens is None:
        raise InvalidField(path="max_tokens", reason="Field required")
    if max_tokens == 0:
        raise InvalidField(path="max_tokens", reason="must be at least 1; cache pre-warming is not offered here")
    if max_tokens < 1:
        raise InvalidField(path="max_tokens", reason="must be at least 1")
    if engine.max_model_len is not None:
        # Claude Code asks for 32,000 of a model it does not know; vLLM refuses more than the model's length (E12).
        return min(max_tokens, engine.max_model_len)
    return max_tokens


def _sampling(request: _Request) -> dict[str, Any]:
    members: dict[str, Any] = {}
    if request.stop_sequences:
        members["stop"] = request.stop_sequences
    for name in ("temperature", "top_p", "top_k"):
        number: msgspec.Raw = getattr(request, name)
        if is_null(number):
            continue
        if bytes(number)[:1] not in b"-0123456789":
            raise InvalidField(path=name, reason="must be a number")
        members[name] = number
    return members


def _output(request: _Request, engine: Engine) -> dict[str, Any]:
    members: dict[str, Any] = {}
    config = request.output_config or _OutputConfig()
    disabled = request.thinking is not None and request.thinking.type == "disabled"
    effort = _effort(config.effort, engine.reasoning_efforts)
    if effort is not None and not disabled:
        members["reasoning_effort"] = effort
    for path, wanted in (("output_config.format", config.format), ("output_format", request.output_format)):
        if wanted is None:
            continue
        if wanted.type != "json_schema":
            raise InvalidField(path=f"{path}.type", reason=f"{quoted(wanted.type)} is not supported by this gateway")
        if is_null(wanted.schema):
            raise InvalidField(path=f"{path}.schema", reason="Field required")
        schema = {"name": "output", "schema": wanted.schema}
        members.setdefault("response_format", {"type": "json_schema", "json_schema": schema})
    return members


def _effort(wanted: msgspec.Raw, efforts: tuple[str, ...]) -> str | None:
    effort = read(wanted, _anything, "output_config.effort")
    if effort in efforts:
        return str(effort)
    if effort in _EFFORTS_ABOVE_HIGH and efforts:
        return efforts[-1]
    return None
