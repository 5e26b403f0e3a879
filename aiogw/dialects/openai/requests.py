"""A request on ``/v1``: the few members that decide its way are read, and at most three are edited; all else is bytes.

Nobody decodes and re-encodes what is the client's: 20-digit integers, ``1e2``, key order and escapes survive.  Nothing
of the response may be known here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from aiogw.canonical import CanonicalRequest, Engine, Operation
from aiogw.dialects.base import FindEngine, RelayEndpoint, check_size_decoded, encode_body
from aiogw.dialects.openai import forms
from aiogw.dialects.openai.terms import ReplyTerms
from aiogw.errors import InvalidField, MalformedBody

# More sequences than any cap.
MAX_COUNT = 10**9

_STREAMING = (Operation.CHAT, Operation.COMPLETIONS)
"""The operations whose streams end with a finish reason and can be asked for their usage."""


class _Peek(msgspec.Struct):
    """The members that decide a request's way; all else is neither decoded nor judged here."""

    model: str | msgspec.UnsetType = msgspec.UNSET
    stream: msgspec.Raw = msgspec.Raw(b"false")
    n: msgspec.Raw = msgspec.Raw(b"1")
    best_of: msgspec.Raw = msgspec.Raw(b"1")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")


_DECIDING = tuple(name for name in _Peek.__struct_fields__ if name != "model")
_peek_decoder = msgspec.json.Decoder(_Peek)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_request(
    endpoint: RelayEndpoint, content_type: str, body: bytes, *, surface: str, find_engine: FindEngine
) -> tuple[CanonicalRequest, ReplyTerms]:
    """The canonical request of ``body`` and the terms of its response.

    Raises MalformedBody, InvalidField or UnknownModel.
    """
    is_form = content_type.lower().startswith("multipart/form-data")
    form = forms.find_part(content_type, body, "model") if is_form else None
    peek = (_Peek(model=form.text) if form else _Peek()) if is_form else _peek(body)
    if peek.model is msgspec.UNSET or not peek.model:
        raise InvalidField(path="model", reason="a model name is required")
    engine = find_engine(peek.model)
    stream = bytes(peek.stream) == b"true"
    hide_usage = False
    if form is None:
        body, hide_usage = _edited(body, endpoint.operation, engine, peek, stream)
    elif engine.model != peek.model:
        body = form.replaced(engine.model)
    request = CanonicalRequest(
        operation=endpoint.operation,
        model=peek.model,
        stream=stream,
        sequences=_sequences(endpoint.operation, peek),
        body=body,
        content_type=content_type or "application/json",
        path=endpoint.path,
        surface=surface,
    )
    terms = ReplyTerms(
        upstream=engine.model,
        stream=stream,
        operation=endpoint.operation,
        must_finish=endpoint.operation in _STREAMING,
        accounting=engine.accounting,
        hide_usage=hide_usage,
        reasoning_field=engine.reasoning_field,
        repeat_reasoning_as=engine.repeat_reasoning_as if endpoint.operation is Operation.CHAT else None,
    )
    return request, terms


# -- looking --------------------------------------------------------------------------------------------------------


def _peek(body: bytes) -> _Peek:
    if not body.strip():
        raise MalformedBody(reason="it is empty, where a JSON object is expected")
    try:
        return _peek_decoder.decode(body)
    except msgspec.ValidationError as error:
        if "$.model" in str(error):
            raise InvalidField(path="model", reason="expected a string") from None
        raise MalformedBody(reason="expected a JSON object") from None
    except RecursionError:
        raise MalformedBody(reason="it is nested too deeply") from None
    except msgspec.DecodeError:
        return _peek_leniently(body)


def _peek_leniently(body: bytes) -> _Peek:
    """As vLLM itself would read it: the standard library takes lone surrogates, NaN and a byte order mark; msgspec not.

    Whoever sent it gets the upstream's opinion and not a stricter one.
    """
    document = _parse_leniently(body)
    model = document.get("model", msgspec.UNSET)
    if model is not msgspec.UNSET and not isinstance(model, str):
        raise InvalidField(path="model", reason="expected a string")
    deciding = {name: document[name] for name in _DECIDING if name in document}
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in deciding.items()}
    return _Peek(model=model, **raw)


def _parse_leniently(body: bytes) -> dict[str, Any]:
    check_size_decoded(body)
    try:
        document = json.loads(body)
    except json.JSONDecodeError as error:
        reason = f"it is not valid JSON ({error.msg} at line {error.lineno}, column {error.colno})"
        raise MalformedBody(reason=reason) from None
    except UnicodeDecodeError as error:
        raise MalformedBody(reason=f"it is not valid UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise MalformedBody(reason="it is nested too deeply") from None
    except ValueError as error:
        raise MalformedBody(reason=f"it is not valid JSON ({error})") from None
    if not isinstance(document, dict):
        raise MalformedBody(reason="expected a JSON object")
    return document


def _sequences(operation: Operation, peek: _Peek) -> int:
    """How many engine sequences the request becomes: ``n`` (or ``best_of``, if more) for each of its prompts.

    A wrong type is for the upstream to refuse, and counts as 1 here.  Rendering a prompt makes the engine do nothing.
    What embeds or scores counts as 1 however long its list: an engine takes such a list in passing.
    """
    each = max(_count(peek.n), _count(peek.best_of))
    match operation:
        case Operation.RENDER:
            return 0
        case Operation.CHAT:
            return each
        case Operation.BATCH:
            return each * _prompts(peek.messages)
        case Operation.COMPLETIONS:
            embedded = _prompts(peek.prompt_embeds) if bytes(peek.prompt_embeds) not in (b"", b"null") else 0
            given = _prompts(peek.prompt) if bytes(peek.prompt) not in (b"", b"null") else 0
            return each * max(1, embedded + given)
        case _:
            return 1


def _count(raw: msgspec.Raw) -> int:
    """A count as vLLM's lax models read it: 6, 6.0 and "6" are six; what they refuse counts as 1."""
    text = bytes(raw)
    if text == b"1" or text[:1] in (b"[", b"{"):
        return 1  # and a list is not read: it may be as large, and as deep, as a body may be
    try:
        value = json.loads(text)
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        # An integer too long to be read, or to be a float, is not less than the others.
        return MAX_COUNT if text[:1].isdigit() else 1
    # Anything above is as good as one more than the cap.
    if not math.isfinite(number):
        return MAX_COUNT if number > 0 else 1
    return max(1, min(MAX_COUNT, int(number)))


def _prompts(raw: msgspec.Raw) -> int:
    """A string or a list of token ids is one prompt; a list of strings or of lists is as many."""
    text = bytes(raw)
    if not text.startswith(b"["):
        return 1
    check_size_decoded(text)
    try:
        items = _list_decoder.decode(text)
    except msgspec.DecodeError:
        # What only the lenient parser reads is text with lone surrogates, or NaN; see _peek_leniently.
        lenient = json.loads(text)
        return len(lenient) if isinstance(lenient[0], str | list) else 1
    return len(items) if items and bytes(items[0])[:1] in (b'"', b"[") else 1


# -- editing --------------------------------------------------------------------------------------------------------


def _edited(body: bytes, operation: Operation, engine: Engine, peek: _Peek, stream: bool) -> tuple[bytes, bool]:
    """The body with what must be different in it, and whether the usage it asks for must be hidden from the client."""
    asks_usage = engine.accounting and stream and operation in _STREAMING
    if engine.model == peek.model and not asks_usage and not engine.body_defaults:
        return body, False
    members = _members(body)
    if engine.model != peek.model:
        members["model"] = msgspec.Raw(msgspec.json.encode(engine.model))
    for name, value in engine.body_defaults.items():
        members.setdefault(name, msgspec.Raw(msgspec.json.encode(value)))
    options = _options_with_usage(members.get("stream_options")) if asks_usage else None
    if options is not None:
        members["stream_options"] = options
    return _join(members), options is not None


def _members(body: bytes) -> dict[str, msgspec.Raw]:
    """The top level only, every value as the bytes it was; a repeated key counts with its last value, as upstream."""
    check_size_decoded(body)
    try:
        return _members_decoder.decode(body)
    except msgspec.DecodeError:
        return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in _parse_leniently(body).items()}


def _options_with_usage(options: msgspec.Raw | None) -> msgspec.Raw | None:
    """The client's ``stream_options`` with ``include_usage``; None where they have it, or are not an object."""
    text = b"null" if options is None else bytes(options)
    if text == b"null":
        return msgspec.Raw(b'{"include_usage":true}')
    try:
        members = _members_decoder.decode(text)
    except msgspec.DecodeError:
        return None
    if bytes(members.get("include_usage", msgspec.Raw(b"false"))) == b"true":
        return None
    members["include_usage"] = msgspec.Raw(b"true")
    return msgspec.Raw(_join(members))


def _join(members: Mapping[str, msgspec.Raw]) -> bytes:
    try:
        return encode_body(members)
    except UnicodeEncodeError:
        # A name with half a character in it, which only the lenient parser lets in.
        return b"{%b}" % b",".join(json.dumps(name).encode() + b":" + bytes(raw) for name, raw in members.items())
