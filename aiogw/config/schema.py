"""The configuration as a JSON schema (draft 2020-12), made from its classes, for editors that complete and underline.

It says what one value may be.  What several values must be together only ``loads`` knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import cattrs
from attrs import NOTHING, Attribute, Factory, fields, has

from aiogw.config import Config, EndpointConfig, Endpoints, UpstreamConfig, tables
from aiogw.config.descriptions import DESCRIPTIONS
from aiogw.config.values import (
    Aliases,
    Count,
    CredentialName,
    FilePath,
    ListenAddress,
    Members,
    Names,
    Positive,
    RetrySeconds,
    Seconds,
    SecondsOrNever,
    Text,
    UpstreamAddress,
)

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_VALUES: Mapping[Any, Schema] = {
    bool: {"type": "boolean"},
    Count: {"type": "integer", "minimum": 0},
    Positive: {"type": "integer", "minimum": 1},
    RetrySeconds: {"type": "integer", "minimum": 1, "maximum": 60},
    Seconds: {"type": "number", "exclusiveMinimum": 0},
    SecondsOrNever: {"type": "number", "minimum": 0},
    Text: _TEXT,
    Names: {"type": "array", "items": _TEXT, "minItems": 1},
    Members: {"type": "object"},
    Aliases: {"type": "object", "additionalProperties": _TEXT},
    FilePath: {"type": "string", "pattern": "^/"},
    CredentialName: {"type": "string", "pattern": "^[^/]+$"},
    ListenAddress: {"type": "string", "pattern": "^(unix:/.+|.+:[0-9]{1,5})$"},
    UpstreamAddress: {"type": "string", "pattern": "^([hH][tT][tT][pP][sS]?://[^/].*|unix:/.+)$"},
    Endpoints: {"type": "array", "items": {"$ref": f"#/$defs/{EndpointConfig.__name__}"}, "minItems": 1},
    str: {"type": "string"},
}


def schema() -> Schema:
    classes = {cls: _table(cls) for _, cls in tables()}
    # Which of them is missing or one too many an editor need not be told in other words than these.
    classes[UpstreamConfig]["oneOf"] = [{"required": ["url"]}, {"required": ["endpoints"]}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "aiogw",
        "description": "The configuration of aiogw, the front door of a self-hosted LLM cluster.",
        **classes.pop(Config),
        "$defs": {cls.__name__: table for cls, table in classes.items()},
    }


def _table(cls: type[Any]) -> Schema:
    types = get_type_hints(cls)
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            one.name: {**_value(types[one.name]), "description": DESCRIPTIONS[cls][one.name], **_default(one)}
            for one in fields(cls)
        },
        "required": [one.name for one in fields(cls) if one.default is NOTHING],
    }


def _default(attribute: Attribute[Any]) -> Schema:
    default: Any = attribute.default
    if isinstance(default, Factory):  # type: ignore[arg-type]
        default = default.factory()
    return {} if default in (None, NOTHING) else {"default": cattrs.unstructure(default)}


def _value(type_: Any) -> Schema:
    if type_ in _VALUES:
        return dict(_VALUES[type_])
    if has(type_):
        return {"$ref": f"#/$defs/{type_.__name__}"}
    arguments = get_args(type_)
    origin = get_origin(type_)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        # None is a key that is left out: TOML cannot say it.
        choices = [_value(one) for one in arguments if one is not NoneType]
        return choices[0] if len(choices) == 1 else {"anyOf": choices}
    assert origin is Mapping, type_
    return {"type": "object", "additionalProperties": _value(arguments[1])}
