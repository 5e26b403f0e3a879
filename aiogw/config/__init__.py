"""TOML text to attrs values and back; the only module that knows TOML, and strict: no default, no conversion, no guess.

Every fault of a file is found in one go and named by the full path of its key.  Nothing here may know what the values
are used for.
"""

from __future__ import annotations

import errno
import os
import sys
import tomllib
from codecs import BOM_UTF8
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NewType, get_args, get_type_hints

import tomli_w
from attrs import asdict, field, fields, frozen, has
from cattrs.errors import BaseValidationError
from cattrs.gen import make_dict_structure_fn

from aiogw.canonical import Engine
from aiogw.config.faults import Finding, as_meant, as_written, cross_faults, placed, syntax_fault, value_faults
from aiogw.config.positions import Key, line_and_column
from aiogw.config.values import (
    Aliases,
    Count,
    CredentialName,
    Fault,
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
    nearest,
    shown,
    value_converter,
)

__all__ = [
    "STANDARD_INPUT",
    "AdmissionConfig",
    "AuthConfig",
    "Config",
    "ConfigError",
    "DialectConfig",
    "EndpointConfig",
    "Finding",
    "Key",
    "KeyConfig",
    "ListenAddress",
    "ServerConfig",
    "TlsConfig",
    "UpstreamAddress",
    "UpstreamConfig",
    "dumps",
    "load",
    "loads",
    "place",
    "tables",
]

Unlimited = Literal["unlimited"]
All = Literal["all"]

Further = Callable[[Mapping[str, Any], Container[Key]], Iterable[Finding]]
"""Finds what else is wrong in tables with faults; of what is at the given keys that has been told."""

STANDARD_INPUT = Path("-")

_engine = Engine(model="")


class ConfigError(Exception):
    """A configuration that cannot be used; ``faults`` has one line for each thing that is wrong."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = findings
        self.faults = [str(one) for one in findings]
        super().__init__("\n".join(self.faults))


@frozen(kw_only=True)
class TlsConfig:
    """PEM files: the certificate with those that lead to its authority, and its key."""

    certificate: Text
    key: Text


@frozen(kw_only=True)
class ServerConfig:
    listen: ListenAddress
    admin_listen: ListenAddress
    max_connections: Positive
    header_timeout_seconds: Seconds
    keepalive_timeout_seconds: Seconds
    body_timeout_seconds: Seconds
    body_min_bytes_per_second: Positive
    max_body_bytes: Positive
    body_memory_bytes: Positive
    response_buffer_bytes: Positive
    client_stall_timeout_seconds: Seconds
    drain_timeout_seconds: Seconds
    first_sign_seconds: SecondsOrNever
    sign_interval_seconds: Seconds
    models_refresh_seconds: SecondsOrNever
    log_level: Literal["debug", "info", "warning", "error"]
    log_format: Literal["auto", "text", "json"]
    tls: TlsConfig | None = None


@frozen(kw_only=True)
class KeyConfig:
    """Where one holder's key is, exactly one of ``file`` and ``credential``, and what it is good for."""

    file: FilePath | None = None
    credential: CredentialName | None = None
    models: Names | All
    queue_places: Count


@frozen(kw_only=True)
class AuthConfig:
    mode: Literal["none", "keys"]
    keys: Mapping[Text, KeyConfig] = field(factory=dict)


@frozen(kw_only=True)
class AdmissionConfig:
    """``engine_slots`` stands here for a ``url``, and with each of ``endpoints``."""

    engine_slots: Positive | None = None
    cap: Positive
    queue_limit: Count
    queue_timeout_seconds: Seconds
    retry_after_min_seconds: RetrySeconds
    retry_after_max_seconds: RetrySeconds
    abort_settle_seconds: SecondsOrNever


@frozen(kw_only=True)
class DialectConfig:
    """What the engine can do.  These are capabilities and not limits, so what is not said is as in canonical.Engine."""

    images: bool = _engine.images
    image_urls: bool = _engine.image_urls
    tool_images: bool = _engine.tool_images
    system_anywhere: bool = _engine.system_anywhere
    reasoning_field: Text = field(factory=lambda: Text(_engine.reasoning_field))
    thinking_on: Members = field(factory=lambda: Members(dict(_engine.thinking_on)))
    thinking_off: Members = field(factory=lambda: Members(dict(_engine.thinking_off)))
    thinking_budget: bool = _engine.thinking_budget
    reasoning_efforts: Names = field(factory=lambda: Names(_engine.reasoning_efforts))
    show_unrequested_thinking: bool = _engine.show_unrequested_thinking
    continuous_usage: bool = _engine.continuous_usage
    accounting: bool = _engine.accounting
    repeat_reasoning_as: Text | None = None
    count_tokens: Literal["upstream", "estimate"] = _engine.count_tokens
    max_model_len: Positive | None = None
    body_defaults: Members = field(factory=lambda: Members({}))


@frozen(kw_only=True)
class EndpointConfig:
    url: UpstreamAddress
    engine_slots: Positive


Endpoints = NewType("Endpoints", tuple[EndpointConfig, ...])
"""At least one."""


@frozen(kw_only=True)
class UpstreamConfig:
    """Either ``url`` or ``endpoints`` is given."""

    url: UpstreamAddress | None = None
    endpoints: Endpoints | None = None
    resolve: Literal["every-address"] | None = None
    models: Names
    connect_timeout_seconds: Seconds
    first_byte_timeout_seconds: Seconds
    idle_timeout_seconds: Seconds
    admission: AdmissionConfig | Unlimited
    credential: CredentialName | None = None
    credential_file: FilePath | None = None
    ca_file: FilePath | None = None
    watch_engine_seconds: SecondsOrNever = field(factory=lambda: SecondsOrNever(0))
    aliases: Aliases = field(factory=lambda: Aliases({}))
    dialect: DialectConfig = field(factory=DialectConfig)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its addresses in normal form, which no other upstream has."""
        return tuple(url.key for url in self._urls)

    @property
    def speaks_tls(self) -> bool:
        return any(url.scheme == "https" for url in self._urls)

    @property
    def _urls(self) -> tuple[UpstreamAddress, ...]:
        return tuple(one.url for one in self.endpoints) if self.endpoints else (self.url,) if self.url else ()


@frozen(kw_only=True)
class Config:
    server: ServerConfig
    auth: AuthConfig
    upstreams: Mapping[str, UpstreamConfig]


def tables(type_: Any = Config, header: str = "") -> Iterator[tuple[str, type[Any]]]:
    """Each class of tables that a configuration can have, with its header; NAME is for the operator to choose."""
    type_ = getattr(type_, "__supertype__", type_)
    if has(type_):
        if type_ in (ListenAddress, UpstreamAddress):
            return
        yield header, type_
        for name, inner in get_type_hints(type_).items():
            yield from tables(inner, f"{header}.{name}".lstrip("."))
    else:
        for inner in get_args(type_):
            yield from tables(inner, f"{header}.NAME" if getattr(type_, "__origin__", None) is Mapping else header)


def load(path: Path, *, also: Further | None = None) -> Config:
    """Read and validate a file, or STANDARD_INPUT; raises ConfigError, also for what cannot be read."""
    text = _read(path)
    try:
        return loads(text, also=also)
    except ConfigError as error:
        raise ConfigError(placed(error.findings, text, _name(path))) from None


def place(error: ConfigError, path: Path) -> ConfigError:
    """The same, with the places in the file at ``path``, for faults that were found in what had been loaded from it."""
    if all(one.place for one in error.findings):
        return error
    try:
        return ConfigError(placed(error.findings, _read(path), _name(path)))
    except ConfigError:
        return error


def _read(path: Path) -> str:
    try:
        # Editors of Windows begin a file with this mark, which is no part of its text.
        content = (_standard_input() if path == STANDARD_INPUT else path.read_bytes()).removeprefix(BOM_UTF8)
    except OSError as error:
        raise ConfigError([Finding(text=(error.strerror or str(error)).lower(), place=_name(path))]) from None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        before = content[: error.start].decode()
        line, column = line_and_column(before, len(before))
        raise ConfigError([Finding(text="not UTF-8 text", place=f"{_name(path)}:{line}:{column}")]) from None


def _name(path: Path) -> str:
    return "<stdin>" if path == STANDARD_INPUT else str(path)


@cache
def _standard_input() -> bytes:
    """What was there to read: only once, however many faults have to be placed in it."""
    if sys.stdin is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return sys.stdin.buffer.read()


def loads(text: str, *, also: Further | None = None) -> Config:
    """Validate ``text``; raises ConfigError with every fault found, and then with those that ``also`` finds."""
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Not only TOMLDecodeError: an integer of thousands of digits and deep nesting have errors of their own.
        raise ConfigError([syntax_fault(text, error)]) from None
    misspelt: list[Finding] = []
    while True:
        config, findings = _structure(raw)
        found = [one for one in findings if one.meant is not None]
        if not found:
            break
        misspelt += found
        raw = as_meant(raw, found)
    findings = [*misspelt, *findings, *cross_faults(raw)]
    if findings or config is None:
        if also is not None:
            findings += also(raw, {one.key for one in findings})
        raise ConfigError([as_written(one, misspelt) for one in findings])
    return config


def _structure(raw: Mapping[str, Any]) -> tuple[Config | None, list[Finding]]:
    try:
        return _converter.structure(raw, Config), []
    except BaseValidationError as error:
        return None, list(value_faults(error, _HOMES, raw))


def dumps(config: Config) -> str:
    """The configuration as TOML that ``loads`` reads back to an equal value."""
    return tomli_w.dumps(asdict(config, filter=_is_said, value_serializer=_serialise))


def _is_said(_attribute: object, value: Any) -> bool:
    """TOML has no null: what is None is left out, and read back as None."""
    return value is not None


def _serialise(_owner: object, _attribute: object, value: Any) -> Any:
    return str(value) if isinstance(value, ListenAddress | UpstreamAddress) else value


def _table(cls: type[Any]) -> Callable[[Any, Any], Any]:
    """Structure ``cls`` from a table; whatever else stands in its place is a fault and not a crash."""
    structure = make_dict_structure_fn(cls, _converter, _cattrs_forbid_extra_keys=True)

    def checked(value: Any, type_: Any) -> Any:
        if not isinstance(value, dict):
            raise Fault(f"expected a table, found {shown(value)}")
        return structure(value, type_)

    return checked


def _upstreams(value: Any, _type: Any) -> dict[str, UpstreamConfig]:
    if not isinstance(value, dict):
        raise Fault(f"expected a table, found {shown(value)}")
    if not value:
        raise Fault("expected at least one upstream")
    return _converter.structure(value, dict[str, UpstreamConfig])


def _endpoints(value: Any, _type: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise Fault(f"expected an array of at least one table, found {shown(value) if value != [] else 'none'}")
    return tuple(_converter.structure(value, list[EndpointConfig]))


def _admission(value: Any, _type: Any) -> AdmissionConfig | Unlimited:
    if value == "unlimited":
        return "unlimited"
    if not isinstance(value, dict):
        raise Fault(
            f'expected a table with the limits, or "unlimited", found {shown(value)}{_perhaps(value, "unlimited")}'
        )
    return _converter.structure(value, AdmissionConfig)


def _keys(value: Any, _type: Any) -> dict[Text, KeyConfig]:
    if not isinstance(value, dict):
        raise Fault(f"expected a table, found {shown(value)}")
    return _converter.structure(value, dict[Text, KeyConfig])


def _allowed_models(value: Any, _type: Any) -> Names | All:
    if value == "all":
        return "all"
    if not isinstance(value, list):
        raise Fault(f'expected an array of names of models, or "all", found {shown(value)}{_perhaps(value, "all")}')
    return _converter.structure(value, Names)


def _perhaps(value: Any, word: str) -> str:
    return nearest(value, [word]) if isinstance(value, str) else ""


# Keys that are at home in one table only, for whoever puts them into another.
_HOMES: dict[str, str] = {}
_SEVERAL = ""
for _header, _class in tables():
    for _one in fields(_class):
        _HOMES[_one.name] = _SEVERAL if _one.name in _HOMES else f"[{_header}]" if _header else "the top of the file"

_converter = value_converter()
_converter.register_structure_hook_func(lambda type_: type_ == AdmissionConfig | Unlimited, _admission)
_converter.register_structure_hook_func(lambda type_: type_ == Names | All, _allowed_models)
_converter.register_structure_hook_func(lambda type_: type_ == Mapping[Text, KeyConfig], _keys)
_converter.register_structure_hook_func(lambda type_: type_ == Mapping[str, UpstreamConfig], _upstreams)
_converter.register_structure_hook(Endpoints, _endpoints)
for _class in (
    AdmissionConfig,
    AuthConfig,
    DialectConfig,
    EndpointConfig,
    KeyConfig,
    UpstreamConfig,
    TlsConfig,
    ServerConfig,
    Config,
):
    _converter.register_structure_hook(_class, _table(_class))
