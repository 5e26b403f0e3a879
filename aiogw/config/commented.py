"""A configuration as a file that people go on with: what each key means stands above it.

What is as if nobody had said it is left out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w
from attrs import Factory, fields, has

from aiogw.config import Config, ListenAddress, UpstreamAddress
from aiogw.config.descriptions import DESCRIPTIONS
from aiogw.config.faults import dotted
from aiogw.config.positions import Key

WIDTH = 118


def commented(config: Config, introduction: str) -> str:
    """TOML that ``loads`` reads back to an equal value."""
    return "\n".join([*(_comment(line) for line in introduction.splitlines()), *_table(config, ())]) + "\n"


def _table(table: Any, key: Key) -> Iterator[str]:
    said = {one.name: getattr(table, one.name) for one in fields(type(table)) if not _is_default(table, one)}
    sentences = DESCRIPTIONS[type(table)]
    # What belongs to a table stands before the tables in it.
    for name, value in said.items():
        if not _is_table(value) and not isinstance(value, Mapping):
            yield _comment(sentences[name])
            yield tomli_w.dumps({name: _plain(value)}).rstrip("\n")
    for name, value in said.items():
        inner = {(*key, name, one): table for one, table in value.items()} if isinstance(value, Mapping) else {}
        if _is_table(value) or (inner and all(map(_is_table, inner.values()))):
            for place, one in (inner or {(*key, name): value}).items():
                yield ""
                yield _comment(sentences[name])
                yield f"[{dotted(place)}]"
                yield from _table(one, place)
        elif isinstance(value, Mapping):
            yield ""
            yield _comment(sentences[name])
            yield tomli_w.dumps(_within((*key, name), value)).rstrip("\n")


def _is_table(value: Any) -> bool:
    return has(type(value)) and not isinstance(value, ListenAddress | UpstreamAddress)


def _within(key: Key, value: Mapping[str, Any]) -> dict[str, Any]:
    for name in reversed(key):
        value = {str(name): value}
    return dict(value)


def _is_default(table: Any, attribute: Any) -> bool:
    default = attribute.default
    if isinstance(default, Factory):  # type: ignore[arg-type]
        default = default.factory()
    return bool(getattr(table, attribute.name) == default)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if _is_table(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(type(value))}
    return str(value) if isinstance(value, ListenAddress | UpstreamAddress) else value


def _comment(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="# ") if text else "#"
