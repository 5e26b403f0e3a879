"""A whole chat completion into a Messages document, and what streams share with it: the stop reason and the usage."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from attrs import evolve, frozen

from aiogw.canonical import ResponseHead, TokenUsage
from aiogw.dialects.anthropic import chat
from aiogw.dialects.anthropic.errors import context_overflow
from aiogw.dialects.anthropic.ids import generated_tool_id, message_id, shown_tool_id
from aiogw.dialects.anthropic.terms import ReplyTerms
from aiogw.errors import GatewayError, UpstreamBroken, UpstreamStatus

# A whole answer is held until it is complete.  The longest contexts served today make some 4 MB of text; sixteen times
# that leaves room for escapes and for members nobody asked for, and still stops an upstream that never ends.
MAX_DOCUMENT_BYTES = 64 * 1024 * 1024


class WholeEncoder:
    """The response of one call that did not ask to stream: nothing until the upstream's document is complete."""

    def __init__(self, terms: ReplyTerms) -> None:
        self.head: ResponseHead | None = None
        self.usage: TokenUsage | None = None
        self.said_all = False
        self._terms = terms
        self._received = bytearray()

    def begin(self, head: ResponseHead) -> None:
        require_media_type(head, "application/json", self._terms.upstream)

    def feed(self, data: bytes, *, last: bool) -> bytes:
        if len(self._received) + len(data) > MAX_DOCUMENT_BYTES:
            reason = f"its answer is larger than {MAX_DOCUMENT_BYTES} bytes"
            raise UpstreamBroken(upstream=self._terms.upstream, reason=reason)
        self._received += data
        if not last:
            return b""
        completion = chat.read_completion(bytes(self._received), self._terms.upstream)
        self.usage = token_usage(completion.usage)
        document = whole_message(completion, self._terms)
        self.head = ResponseHead(status=200, content_type="application/json", content_length=len(document))
        return document

    def wait(self, ahead: int, estimated_seconds: float | None) -> bytes:
        return b""

    def refused(self, error: UpstreamStatus) -> GatewayError:
        return in_terms(error, self._terms)

    def fail(self, error: GatewayError, request_id: str) -> bytes | None:
        return None


def in_terms(error: UpstreamStatus, terms: ReplyTerms) -> UpstreamStatus:
    """``error`` with its message as Claude Code acts on it, where the request's own terms are needed to say so."""
    message = error.upstream_message
    if error.upstream_status == 404 and error.about_model:
        message = f"The model `{terms.model}` does not exist."
    elif error.upstream_status == 400:
        message = context_overflow(message, max_model_len=terms.max_model_len) or message
    return evolve(error, upstream_message=message)


def require_media_type(head: ResponseHead, expected: str, upstream: str) -> None:
    """Raise UpstreamBroken where a 2xx is something else than what was asked for, as a page of a proxy would be."""
    media_type = head.content_type.partition(";")[0].strip().lower()
    if media_type != expected:
        reason = f"it answered with {media_type or 'no content type'} where {expected} was due"
        raise UpstreamBroken(upstream=upstream, reason=reason)


@frozen(kw_only=True)
class Ending:
    """How a choice ended; ``calls`` says of each of its tool calls whether its arguments are complete."""

    finish_reason: str | None
    matched: str | int | None
    calls: Sequence[bool]


def stop_reason(ending: Ending, usage: chat.Usage | None, terms: ReplyTerms) -> tuple[str, str | None]:
    """``stop_reason`` and ``stop_sequence``: the first that applies.

    Raises UpstreamBroken where the upstream did not come to an end: success is never made up.
    """
    finish_reason = ending.finish_reason
    if not finish_reason:
        raise UpstreamBroken(upstream=terms.upstream, reason="upstream ended without a finish reason")
    if finish_reason in ("abort", "error"):
        raise UpstreamBroken(upstream=terms.upstream, reason=f"it gave up with finish reason {finish_reason!r}")
    usage = usage or chat.Usage()
    prompt, completion = usage.prompt_tokens or 0, usage.completion_tokens or 0
    if finish_reason == "length":
        full = terms.max_model_len is not None and prompt + completion >= terms.max_model_len
        return ("model_context_window_exceeded" if full and completion < terms.max_tokens else "max_tokens"), None
    if ending.calls and not ending.calls[-1] and completion >= terms.max_tokens:
        # Parsed calls say ``tool_calls`` even where the cap cut them (vllm#58228).
        return "max_tokens", None
    # An integer is the id of a stop token: the model's natural end (vllm#17516).
    matched = ending.matched if ending.matched in terms.stop_sequences else None
    if isinstance(matched, str) and not (ending.calls and all(ending.calls)):
        return "stop_sequence", matched
    if ending.calls:
        # Whatever the finish reason says: forced calls finish with ``stop``.
        return "tool_use", None
    if finish_reason == "content_filter":
        return "refusal", None
    # ``tool_calls`` without a call occurs (vLLM 0.32, tool_choice "required"); ``tool_use`` without a block would hang
    # every agent's loop.
    return "end_turn", None


def usage_members(usage: chat.Usage | None) -> dict[str, Any]:
    """``usage``: the three input figures add up to the upstream's ``prompt_tokens``."""
    usage = usage or chat.Usage()
    prompt = max(usage.prompt_tokens or 0, 0)
    details = usage.prompt_tokens_details or chat.PromptDetails()
    cached = min(max(details.cached_tokens or 0, 0), prompt)
    created = min(max(details.created_cache_tokens or 0, 0), prompt - cached)
    members: dict[str, Any] = {
        "input_tokens": prompt - cached - created,
        "output_tokens": max(usage.completion_tokens or 0, 0),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": created,
    }
    completion = usage.completion_tokens_details
    if completion is not None and (completion.reasoning_tokens or 0) > 0:
        members["output_tokens_details"] = {"thinking_tokens": completion.reasoning_tokens}
    return members


def token_usage(usage: chat.Usage | None) -> TokenUsage | None:
    if usage is None:
        return None
    return TokenUsage(prompt_tokens=usage.prompt_tokens or 0, completion_tokens=usage.completion_tokens or 0)


def signature(thinking: str) -> str:
    """What stands for Anthropic's signature: clients hide a thinking block without one.  Equal text, equal bytes."""
    return hashlib.sha256(thinking.encode()).hexdigest()


def whole_message(completion: chat.Completion, terms: ReplyTerms) -> bytes:
    """The Messages document of a chat completion; raises UpstreamBroken or UpstreamStatus."""
    choice = completion.choices[0] if completion.choices else None
    if choice is None or choice.message is None:
        raise UpstreamBroken(upstream=terms.upstream, reason="its answer has no message")
    message = choice.message
    calls = _calls(message, terms)
    complete = [chat.is_json_object(arguments) for _, _, arguments in calls]
    ending = Ending(finish_reason=choice.finish_reason, matched=choice.stop_reason, calls=complete)
    reason, sequence = stop_reason(ending, completion.usage, terms)
    if reason == "tool_use":
        for whole, (_, name, _) in zip(complete, calls, strict=True):
            if not whole:
                # A made-up ``{}`` might be executed.
                fault = f"the arguments of its call of {name!r} are not a JSON object"
                raise UpstreamBroken(upstream=terms.upstream, reason=fault)
    shown_id = message_id(completion.id)
    # A cut call must not look whole, so it is left out.
    kept = [call for call, whole in zip(calls, complete, strict=True) if whole]
    return msgspec.json.encode(
        {
            "id": shown_id,
            "type": "message",
            "role": "assistant",
            "model": terms.model,
            "content": _thinking_blocks(message, terms)
            + _text_blocks(message, bool(kept))
            + _tool_use_blocks(kept, shown_id),
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage_members(completion.usage),
        }
    )


def _calls(message: chat.Message, terms: ReplyTerms) -> list[tuple[str | None, str, str]]:
    """Id, name and arguments of each call."""
    given = [(call.id, call.function) for call in message.tool_calls or ()]
    if message.function_call is not None:
        given.append((None, message.function_call))
    calls = []
    for call_id, function in given:
        if function is None or not function.name:
            raise UpstreamBroken(upstream=terms.upstream, reason="a tool call has no name")
        arguments = chat.arguments_text(function, terms.upstream)
        calls.append((call_id, function.name, arguments.strip() or "{}"))
    return calls


def _thinking_blocks(message: chat.Message, terms: ReplyTerms) -> list[dict[str, Any]]:
    reasoning = message.reasoning or message.reasoning_content
    if not reasoning or not terms.show_thinking:
        return []
    shown = "" if terms.omit_thinking else reasoning
    return [{"type": "thinking", "thinking": shown, "signature": signature(reasoning)}]


def _text_blocks(message: chat.Message, before_a_call: bool) -> list[dict[str, Any]]:
    texts = [chat.content_text(message.content), message.refusal or ""]
    return [{"type": "text", "text": text} for text in texts if text and not (before_a_call and text.isspace())]


def _tool_use_blocks(calls: list[tuple[str | None, str, str]], shown_message_id: str) -> list[dict[str, Any]]:
    blocks = []
    used: set[str] = set()
    for ordinal, (call_id, name, arguments) in enumerate(calls):
        shown_id = shown_tool_id(call_id) if call_id and call_id not in used else None
        used.add(call_id or "")
        blocks.append(
            {
                "type": "tool_use",
                "id": shown_id or generated_tool_id(shown_message_id, ordinal),
                "name": name,
                # As the model wrote it, digit for digit; that it is an object has been seen.
                "input": msgspec.Raw(arguments.encode()),
            }
        )
    return blocks
