"""Content blocks of a Messages request into parts of a chat message: text or image; knows neither turns nor tools."""

from __future__ import annotations

from typing import Any

import msgspec
from attrs import frozen

from aiogw.canonical import Engine
from aiogw.dialects.anthropic.parsing import read
from aiogw.errors import InvalidField, quoted

IMAGE_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


@frozen
class Image:
    """An image the engine is to see; ``url`` is a data URL, or a web address where the engine may fetch those."""

    url: str


Part = str | Image


class _Typed(msgspec.Struct, gc=False):
    type: str


class _Text(msgspec.Struct, gc=False):
    text: str


class _Source(msgspec.Struct):
    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | list[msgspec.Raw] | None = None


class _Sourced(msgspec.Struct):
    source: _Source
    title: str | None = None
    context: str | None = None


class _SearchResult(msgspec.Struct):
    source: str
    title: str
    content: list[msgspec.Raw]


class _ToolReference(msgspec.Struct):
    tool_name: str


_typed = msgspec.json.Decoder(_Typed)
_text = msgspec.json.Decoder(_Text)
_sourced = msgspec.json.Decoder(_Sourced)
_search_result = msgspec.json.Decoder(_SearchResult)
_tool_reference = msgspec.json.Decoder(_ToolReference)


def block_type(block: msgspec.Raw, path: str) -> str:
    return read(block, _typed, path).type


def text_of(block: msgspec.Raw, path: str) -> str:
    return read(block, _text, path).text


def unsupported(kind: str, path: str) -> InvalidField:
    """What is not understood is refused: silently dropped content is the worst answer."""
    return InvalidField(path=f"{path}.type", reason=f"{quoted(kind)} is not supported by this gateway")


def image(block: msgspec.Raw, path: str, engine: Engine) -> Image:
    if not engine.images:
        raise InvalidField(path=f"{path}.image", reason="this model does not accept images")
    source = read(block, _sourced, path).source
    where = f"{path}.image.source"
    if source.type == "base64":
        if source.media_type not in IMAGE_MEDIA_TYPES:
            allowed = ", ".join(IMAGE_MEDIA_TYPES)
            raise InvalidField(path=f"{where}.media_type", reason=f"must be one of {allowed}")
        if source.data is None:
            raise InvalidField(path=f"{where}.data", reason="Field required")
        return Image(f"data:{source.media_type};base64,{source.data}")
    if source.type == "url" and engine.image_urls and (source.url or "").startswith(("https://", "http://")):
        return Image(source.url or "")
    if source.type == "url":
        # The engine would fetch it: a way into its network for whoever may send a prompt.
        raise InvalidField(path=where, reason="image URLs are not supported by this gateway; send the image as base64")
    raise InvalidField(path=where, reason=f"source type {quoted(source.type)} is not supported; send it as base64")


def document(block: msgspec.Raw, path: str, engine: Engine) -> list[Part]:
    """A text document inlined: a header line where it has a title or a context, then its text and images."""
    sourced = read(block, _sourced, path)
    source = sourced.source
    where = f"{path}.document.source"
    if source.type not in ("text", "content"):
        # Never passed on as an OpenAI ``file`` part: vLLM refuses those late, and others drop them.
        reason = "PDF and file sources are not supported by this gateway; send the text instead"
        raise InvalidField(path=f"{path}.document", reason=reason)
    given = source.data if source.type == "text" else source.content
    if given is None:
        raise InvalidField(path=f"{where}.{'data' if source.type == 'text' else 'content'}", reason="Field required")
    body: list[Part] = [given] if isinstance(given, str) else _texts_and_images(given, f"{where}.content", engine)
    header = " - ".join(line for line in (sourced.title, sourced.context) if line)
    if not header:
        return body
    header = f"Document: {header}\n"
    if body and isinstance(body[0], str):
        return [header + body[0], *body[1:]]
    return [header, *body]


def _texts_and_images(blocks: list[msgspec.Raw], path: str, engine: Engine) -> list[Part]:
    parts: list[Part] = []
    for number, block in enumerate(blocks):
        where = f"{path}.{number}"
        kind = block_type(block, where)
        if kind == "text":
            parts.append(text_of(block, where))
        elif kind == "image":
            parts.append(image(block, where, engine))
        else:
            raise unsupported(kind, where)
    return parts


def search_result(block: msgspec.Raw, path: str) -> str:
    found = read(block, _search_result, path)
    lines = [found.title, found.source]
    for number, part in enumerate(found.content):
        where = f"{path}.content.{number}"
        if (kind := block_type(part, where)) != "text":
            raise unsupported(kind, where)
        lines.append(text_of(part, where))
    return "\n".join(lines)


def result_content(blocks: list[msgspec.Raw], path: str, engine: Engine) -> list[Part]:
    """The content of a tool result, in order."""
    parts: list[Part] = []
    for number, block in enumerate(blocks):
        where = f"{path}.{number}"
        match block_type(block, where):
            case "text":
                parts.append(text_of(block, where))
            case "image":
                parts.append(image(block, where, engine))
            case "document":
                parts += document(block, where, engine)
            case "search_result":
                parts.append(search_result(block, where))
            case "tool_reference":
                parts.append(read(block, _tool_reference, where).tool_name)
            case kind:
                raise unsupported(kind, where)
    return parts


def chat_content(parts: list[Part]) -> str | list[dict[str, Any]]:
    """``content`` of a chat message: a plain string where it can be one, because strict templates know nothing else."""
    kept = [part for part in parts if part != ""]
    if not kept:
        return ""
    if len(kept) == 1 and isinstance(kept[0], str):
        return kept[0]
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part.url}}
        for part in kept
    ]
