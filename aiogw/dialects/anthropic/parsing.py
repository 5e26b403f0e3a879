"""JSON of Messages requests into typed values, with the faults named as Anthropic names them; knows no single rule.

msgspec rather than cattrs does the structuring: a ``Raw`` member keeps the client's own bytes (a schema, a number),
where cattrs would only ever see what a parser made of them, and it needs no second pass over a parsed conversation.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from aiogw.dialects.base import check_size_decoded
from aiogw.errors import InvalidField, MalformedBody

T = TypeVar("T")

NULL = msgspec.Raw(b"null")

_WHERE = re.compile(r" - at `\$(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")

# Every escape of a JSON text, so that the parity of backslashes is never in doubt; the pairs that make up a character
# come first, what is left of the surrogates stands alone.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\(u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)


def repair_surrogates(document: bytes) -> bytes:
    """``document`` with each lone surrogate escape turned into U+FFFD and every other byte as it was.

    JavaScript clients cut strings in the middle of a character; the escape is legal JSON, but neither msgspec nor the
    parser of vLLM takes it.
    """
    if b"\\ud" not in document and b"\\uD" not in document:
        return document
    return _ESCAPE.sub(lambda escape: escape[0] if escape[1] is None else b"\\ufffd", document)


def checked(body: bytes) -> bytes:
    """``body`` as UTF-8 without lone surrogates; raises MalformedBody.

    Checked as a whole because the parser does not look into strings that are only carried.
    """
    check_size_decoded(body)
    try:
        str(body, "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedBody(reason=f"not UTF-8 at byte {error.start}") from None
    return repair_surrogates(body)


def read(document: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], path: str) -> T:
    """``document`` by ``decoder``; ``path`` is where it stands in the request, empty for the request itself.

    Raises InvalidField with the path of the member at fault, or MalformedBody.
    """
    try:
        return decoder.decode(document)
    except msgspec.ValidationError as error:
        raise _located(str(error), path) from None
    except msgspec.DecodeError as error:
        raise MalformedBody(reason=f"not JSON: {error}") from None
    except RecursionError:
        raise MalformedBody(reason="nested too deeply") from None


def _located(text: str, path: str) -> InvalidField | MalformedBody:
    inner = ""
    if where := _WHERE.search(text):
        inner = where[1].replace("[", ".").replace("]", "")
        text = text[: where.start()]
    reason = text.replace("`", "")
    if missing := _MISSING.fullmatch(text):
        inner += f".{missing[1]}"
        reason = "Field required"
    full_path = f"{path}{inner}".removeprefix(".")
    if not full_path:
        return MalformedBody(reason=f"not a JSON object: {reason}")
    return InvalidField(path=full_path, reason=reason)


_exact: msgspec.json.Decoder[Any] = msgspec.json.Decoder(float_hook=lambda digits: msgspec.Raw(digits.encode()))


def exact_json(value: msgspec.Raw) -> str:
    """The JSON text of ``value``, compact and with characters instead of escapes; key order and digits stay.

    Floats keep their spelling too: ``1e2`` read and written back would come out as ``100.0``.
    """
    try:
        return str(msgspec.json.encode(_exact.decode(value)), "utf-8")
    except (msgspec.DecodeError, RecursionError):
        # An integer of thousands of digits, or nesting that only fits where the request was carried, not read.
        return str(bytes(value), "utf-8")


def is_null(value: msgspec.Raw) -> bool:
    return value is NULL or bytes(value) == b"null"
