"""TOML text to attrs values and back; the only module that knows TOML, and strict: no default, no conversion, no guess.

Every fault of a file is found in one go and named by the full path of its key.  Nothing here may know what the values
are used for.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NewType

import cattrs
import tomli_w
from attrs import asdict, field, fields, frozen
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    ForbiddenExtraKeysError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn

from aiogw.canonical import Engine

Count = NewType("Count", int)
"""A whole number, at least 0."""
Positive = NewType("Positive", int)
"""A whole number, at least 1."""
Seconds = NewType("Seconds", float)
"""A positive, finite number of seconds."""
SecondsOrNever = NewType("SecondsOrNever", float)
"""The same, or 0 for never."""
RetrySeconds = NewType("RetrySeconds", int)
"""A whole number from 1 to 60: Claude Code gives up when told to wait longer."""
Text = NewType("Text", str)
"""A string that is not empty."""
Names = NewType("Names", tuple[str, ...])
"""At least one string that is not empty."""
Members = NewType("Members", dict[str, Any])
"""Members of a JSON object, as a TOML table."""
Aliases = NewType("Aliases", dict[str, str])
"""Names for clients to use, each with the model it stands for."""
Unlimited = Literal["unlimited"]

_engine = Engine(model="")


class ConfigError(Exception):
    """A configuration that cannot be used; ``faults`` has one line for each thing that is wrong."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@frozen(kw_only=True)
class ListenAddress:
    """Where to listen: ``host`` and ``port``, or the ``path`` of a Unix socket."""

    host: str | None = None
    port: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if self.host and ":" in self.host else self.host
        return f"{host}:{self.port}"


@frozen(kw_only=True)
class UpstreamAddress:
    """An upstream's address in its one normal form: lower case, no trailing dot or slash, the port always there.

    ``prefix`` is a path that comes before ``/v1``, mostly empty; ``path`` is that of a Unix socket, then there is no
    host.
    """

    scheme: str
    host: str | None = None
    port: int | None = None
    prefix: str = ""
    path: str | None = None

    @property
    def key(self) -> str:
        """What makes two addresses the same: the endpoint, not how it is spoken to."""
        if self.path is not None:
            return f"unix:{self.path}"
        return f"{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """The value of ``Host``."""
        if self.path is not None:
            return "localhost"
        host = f"[{self.host}]" if self.host and ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path is not None else f"{self.scheme}://{self.authority}{self.prefix}"


@frozen(kw_only=True)
class ServerConfig:
    listen: ListenAddress
    admin_listen: ListenAddress
    max_body_bytes: Positive
    response_buffer_bytes: Positive
    client_stall_timeout_seconds: Seconds
    drain_timeout_seconds: Seconds
    first_sign_seconds: SecondsOrNever
    sign_interval_seconds: Seconds
    log_level: Literal["debug", "info", "warning", "error"]
    log_format: Literal["text", "json"]


@frozen(kw_only=True)
class AdmissionConfig:
    engine_slots: Positive
    cap: Positive
    queue_limit: Count
    queue_timeout_seconds: Seconds
    retry_after_min_seconds: RetrySeconds
    retry_after_max_seconds: RetrySeconds


@frozen(kw_only=True)
class DialectConfig:
    """What the engine can do.  These are capabilities and not limits, so what is not said is as in canonical.Engine."""

    images: bool = _engine.images
    image_urls: bool = _engine.image_urls
    tool_images: bool = _engine.tool_images
    system_anywhere: bool = _engine.system_anywhere
    reasoning_field: Text = Text(_engine.reasoning_field)
    thinking_on: Members = field(factory=lambda: Members(dict(_engine.thinking_on)))
    thinking_off: Members = field(factory=lambda: Members(dict(_engine.thinking_off)))
    thinking_budget: bool = _engine.thinking_budget
    reasoning_efforts: Names = Names(_engine.reasoning_efforts)
    show_unrequested_thinking: bool = _engine.show_unrequested_thinking
    continuous_usage: bool = _engine.continuous_usage
    accounting: bool = _engine.accounting
    repeat_reasoning_as: Text | None = None
    count_tokens: Literal["upstream", "estimate"] = _engine.count_tokens
    max_model_len: Positive | None = None
    body_defaults: Members = field(factory=lambda: Members({}))


@frozen(kw_only=True)
class UpstreamConfig:
    url: UpstreamAddress
    models: Names
    connect_timeout_seconds: Seconds
    first_byte_timeout_seconds: Seconds
    idle_timeout_seconds: Seconds
    admission: AdmissionConfig | Unlimited
    aliases: Aliases = field(factory=lambda: Aliases({}))
    dialect: DialectConfig = field(factory=DialectConfig)


@frozen(kw_only=True)
class Config:
    server: ServerConfig
    upstreams: Mapping[str, UpstreamConfig]


def load(path: Path) -> Config:
    """Read and validate the file at ``path``; raises ConfigError, also for a file that cannot be read."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError([f"{path}: {(error.strerror or str(error)).lower()}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 text (byte {error.start})"]) from None
    return loads(text)


def loads(text: str) -> Config:
    """Validate ``text``; raises ConfigError with every fault found."""
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Not only TOMLDecodeError: an integer of thousands of digits and deep nesting have errors of their own.
        raise ConfigError([f"not valid TOML: {error}"]) from None
    faults: list[str] = []
    config: Config | None = None
    try:
        config = _converter.structure(raw, Config)
    except BaseValidationError as error:
        faults = list(_faults(error, ""))
    faults += _cross_faults(raw)
    if faults or config is None:
        raise ConfigError(faults)
    return config


def dumps(config: Config) -> str:
    """The configuration as TOML that ``loads`` reads back to an equal value."""
    return tomli_w.dumps(asdict(config, filter=_is_said, value_serializer=_serialise))


def _is_said(_attribute: object, value: Any) -> bool:
    """TOML has no null: what is None is left out, and read back as None."""
    return value is not None


def _serialise(_owner: object, _attribute: object, value: Any) -> Any:
    return str(value) if isinstance(value, ListenAddress | UpstreamAddress) else value


# -- one value ------------------------------------------------------------------------------------------------------


class _Fault(ValueError):
    """One value is wrong; the text says what was expected and what was found."""


def _found(value: object) -> str:
    kinds = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array", dict: "a table"}
    kind = kinds.get(type(value), type(value).__name__)
    return kind if isinstance(value, list | dict) else f"{kind} ({_toml(value)})"


def _toml(value: object) -> str:
    """A value as one would write it; always one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 64:
        return "more than 64 bits"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def _whole_number(expected: str, minimum: int, maximum: float) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _type: Any) -> int:
        # type(), not isinstance: a TOML boolean is an int to Python.
        if type(value) is not int or not minimum <= value <= maximum:
            raise _Fault(f"expected {expected}, found {_found(value)}")
        return value

    return structure


def _seconds(value: Any, _type: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise _Fault(f"expected a positive number of seconds, found {_found(value)}")
    return value  # type: ignore[no-any-return]


def _seconds_or_never(value: Any, type_: Any) -> float:
    if value == 0 and type(value) in (int, float):
        return value  # type: ignore[no-any-return]
    try:
        return _seconds(value, type_)
    except _Fault:
        raise _Fault(f"expected a positive number of seconds, or 0 for never, found {_found(value)}") from None


def _text(value: Any, _type: Any = None) -> str:
    if not isinstance(value, str) or not value:
        raise _Fault(f"expected a string that is not empty, found {_found(value)}")
    return value


def _choice(value: Any, type_: Any) -> Any:
    allowed = type_.__args__
    if type(value) is not str or value not in allowed:
        raise _Fault(f"expected {' or '.join(_toml(one) for one in allowed)}, found {_found(value)}")
    return value


def _names(value: Any, _type: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise _Fault(f"expected an array of at least one name, found {_found(value) if value != [] else 'none'}")
    return tuple(_text(one) for one in value)


def _boolean(value: Any, _type: Any) -> bool:
    if type(value) is not bool:
        raise _Fault(f"expected true or false, found {_found(value)}")
    return value


def _members(value: Any, _type: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Fault(f"expected a table, found {_found(value)}")
    try:
        # TOML has dates, times and infinities; the engine's JSON has not.
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _Fault(f"expected values that JSON has, too ({error})") from None
    return value


def _aliases(value: Any, _type: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _Fault(f"expected a table of names and their models, found {_found(value)}")
    return {_text(alias): _text(model) for alias, model in value.items()}


_AUTHORITY = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]*))(?::(?P<port>[0-9]{1,5}))?"
)
_ORIGIN = re.compile(r"(?P<scheme>https?)://(?P<authority>[^/]*)(?P<path>/[!-~]*)?", re.IGNORECASE)


def _host_and_port(authority: str, default_port: int | None) -> tuple[str, int]:
    """Raises ValueError."""
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        raise ValueError(authority)
    port = int(found["port"]) if found["port"] else default_port
    if port is None or port > 65535:
        raise ValueError(authority)
    if found["v6"]:
        return ipaddress.IPv6Address(found["v6"]).compressed, port
    return found["host"].rstrip(".").lower(), port


def _listen_address(value: Any, _type: Any) -> ListenAddress:
    expected = 'expected "HOST:PORT", "[IPV6]:PORT" or "unix:/PATH"'
    if isinstance(value, str):
        if value.startswith("unix:/"):
            return ListenAddress(path=value.removeprefix("unix:"))
        try:
            host, port = _host_and_port(value, None)
        except ValueError:
            pass
        else:
            return ListenAddress(host=host, port=port)
    raise _Fault(f"{expected}, found {_found(value)}")


def _upstream_address(value: Any, _type: Any) -> UpstreamAddress:
    expected = 'expected "http://HOST[:PORT]", "https://HOST[:PORT]" or "unix:/PATH"'
    if not isinstance(value, str):
        raise _Fault(f"{expected}, found {_found(value)}")
    if value.startswith("unix:/"):
        return UpstreamAddress(scheme="http", path=value.removeprefix("unix:"))
    found = _ORIGIN.fullmatch(value)
    if found is None:
        raise _Fault(f"{expected}, found {_found(value)}")
    if "@" in found["authority"]:
        # Not shown: it may hold a password.
        raise _Fault("expected an address without user name and password in it")
    if "?" in value or "#" in value:
        raise _Fault(f"expected an address without a query or fragment, found {_found(value)}")
    scheme = found["scheme"].lower()
    try:
        host, port = _host_and_port(found["authority"], {"http": 80, "https": 443}[scheme])
    except ValueError:
        port = 0
    if port == 0:
        raise _Fault(f"{expected}, found {_found(value)}")
    prefix = (found["path"] or "").rstrip("/")
    if prefix.endswith("/v1"):
        raise _Fault(f"expected the address without /v1, which the gateway adds by itself, found {_found(value)}")
    return UpstreamAddress(scheme=scheme, host=host, port=port, prefix=prefix)


def _table(cls: type[Any]) -> Callable[[Any, Any], Any]:
    """Structure ``cls`` from a table; whatever else stands in its place is a fault and not a crash."""
    structure = make_dict_structure_fn(cls, _converter, _cattrs_forbid_extra_keys=True)

    def checked(value: Any, type_: Any) -> Any:
        if not isinstance(value, dict):
            raise _Fault(f"expected a table, found {_found(value)}")
        return structure(value, type_)

    return checked


def _upstreams(value: Any, _type: Any) -> dict[str, UpstreamConfig]:
    if not isinstance(value, dict):
        raise _Fault(f"expected a table, found {_found(value)}")
    if not value:
        raise _Fault("expected at least one upstream")
    return _converter.structure(value, dict[str, UpstreamConfig])


def _admission(value: Any, _type: Any) -> AdmissionConfig | Unlimited:
    if value == "unlimited":
        return "unlimited"
    if not isinstance(value, dict):
        raise _Fault(f'expected a table with the limits, or "unlimited", found {_found(value)}')
    return _converter.structure(value, AdmissionConfig)


_converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
_converter.register_structure_hook(Count, _whole_number("a whole number, at least 0", 0, math.inf))
_converter.register_structure_hook(Positive, _whole_number("a whole number, at least 1", 1, math.inf))
_converter.register_structure_hook(RetrySeconds, _whole_number("a whole number from 1 to 60", 1, 60))
_converter.register_structure_hook(Seconds, _seconds)
_converter.register_structure_hook(SecondsOrNever, _seconds_or_never)
_converter.register_structure_hook(Text, _text)
_converter.register_structure_hook(Names, _names)
_converter.register_structure_hook(Members, _members)
_converter.register_structure_hook(Aliases, _aliases)
_converter.register_structure_hook(bool, _boolean)
_converter.register_structure_hook(ListenAddress, _listen_address)
_converter.register_structure_hook(UpstreamAddress, _upstream_address)
_converter.register_structure_hook_func(lambda type_: getattr(type_, "__origin__", None) is Literal, _choice)
_converter.register_structure_hook_func(lambda type_: type_ == AdmissionConfig | Unlimited, _admission)
_converter.register_structure_hook_func(lambda type_: type_ == Mapping[str, UpstreamConfig], _upstreams)
for _class in (AdmissionConfig, DialectConfig, UpstreamConfig, ServerConfig, Config):
    _converter.register_structure_hook(_class, _table(_class))


# -- all faults of a file -------------------------------------------------------------------------------------------


def _faults(error: BaseException, path: str) -> Iterator[str]:
    """One line for each leaf of cattrs' tree of errors."""
    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            yield from _faults(inner, path + _step(inner))
    elif isinstance(error, ForbiddenExtraKeysError):
        known = ", ".join(one.name for one in fields(error.cl))
        for key in sorted(error.extra_fields):
            yield f"{_dotted(path, key)}: unknown key; known here: {known}"
    elif isinstance(error, KeyError):
        yield f"{path.lstrip('.')}: missing; it has no default"
    else:
        yield f"{path.lstrip('.')}: {error}"


def _step(error: BaseException) -> str:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return f".{note.name}"
        if isinstance(note, IterableValidationNote):
            return f".{_key(str(note.index))}"
    return ""


def _dotted(path: str, key: str) -> str:
    return f"{path}.{_key(key)}".lstrip(".")


def _key(key: str) -> str:
    """A key as TOML writes it: bare if it can be, else quoted."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _cross_faults(raw: Mapping[str, Any]) -> Iterator[str]:
    """What only shows when several values are seen together.

    Works on the raw tables, so that a fault in one place does not hide those in another.
    """
    upstreams = raw.get("upstreams")
    tables = upstreams if isinstance(upstreams, dict) else {}
    model_owner: dict[str, str] = {}
    address_owner: dict[str, str] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            continue
        path = f"upstreams.{_key(name)}"
        models = table.get("models")
        for model in models if isinstance(models, list) else ():
            if not isinstance(model, str):
                continue
            if model in model_owner:
                yield f"{path}.models: {_toml(model)} already belongs to upstreams.{model_owner[model]}"
            model_owner.setdefault(model, name)
        aliases = table.get("aliases")
        for alias, model in aliases.items() if isinstance(aliases, dict) else ():
            if alias in model_owner:
                yield f"{path}.aliases.{_key(alias)}: already the name of a model of upstreams.{model_owner[alias]}"
            model_owner.setdefault(alias, name)
            if isinstance(models, list) and isinstance(model, str) and model and model not in models:
                yield f"{path}.aliases.{_key(alias)}: expected one of {path}.models, found {_found(model)}"
        try:
            key = _upstream_address(table.get("url"), None).key
        except _Fault:
            pass
        else:
            if key in address_owner:
                yield (
                    f"{path}.url: the same address as upstreams.{address_owner[key]}.url ({key}); one address has one "
                    "gate, so list all its models under one upstream"
                )
            address_owner.setdefault(key, name)
        yield from _admission_faults(f"{path}.admission", table.get("admission"))
    server = raw.get("server")
    if isinstance(server, dict) and server.get("listen") == server.get("admin_listen") and "listen" in server:
        listen = server["listen"]
        # Port 0 asks the kernel for a free port each time, so two of them are two places.
        if not (isinstance(listen, str) and listen.endswith(":0")):
            yield "server.admin_listen: the same address as server.listen"


def _admission_faults(path: str, admission: Any) -> Iterator[str]:
    if not isinstance(admission, dict):
        return
    cap, engine_slots = admission.get("cap"), admission.get("engine_slots")
    if type(cap) is int and type(engine_slots) is int and cap >= engine_slots:
        yield f"{path}.cap: expected less than engine_slots ({engine_slots}), found {_found(cap)}"
    shortest, longest = admission.get("retry_after_min_seconds"), admission.get("retry_after_max_seconds")
    if type(shortest) is int and type(longest) is int and shortest > longest:
        expected = f"expected at most retry_after_max_seconds ({longest})"
        yield f"{path}.retry_after_min_seconds: {expected}, found {_found(shortest)}"
