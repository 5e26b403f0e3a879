"""One value of the configuration: its type, what it must look like, and the sentence for when it does not.

No conversion and no guess: ``"8"``, ``2.9`` and ``true`` are not integers.  Nothing here knows which key it is for.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import math
import posixpath
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NewType

import cattrs
from attrs import frozen

Count = NewType("Count", int)
"""A whole number, at least 0."""
Positive = NewType("Positive", int)
"""A whole number, at least 1."""
Seconds = NewType("Seconds", float)
"""A positive, finite number of seconds."""
SecondsOrNever = NewType("SecondsOrNever", float)
"""The same, or 0 for never."""
MAX_RETRY_SECONDS = 60
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
FilePath = NewType("FilePath", str)
"""The absolute path of a file."""
CredentialName = NewType("CredentialName", str)
"""The name of a credential of systemd, which is that of a file in a folder that systemd makes."""


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


class Fault(ValueError):
    """One value is wrong; the text says what was expected and what was found."""


def shown(value: object) -> str:
    kinds = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array", dict: "a table"}
    kind = kinds.get(type(value), type(value).__name__)
    return kind if isinstance(value, list | dict) else f"{kind} ({toml(value)})"


def toml(value: object) -> str:
    """A value as one would write it; always one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 64:
        return "more than 64 bits"
    if not isinstance(value, str):
        return str(value)
    return "".join(
        sign if sign.isprintable() else f"\\U{ord(sign):08x}" for sign in json.dumps(value, ensure_ascii=False)
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """A question to put behind a fault, or nothing if none of ``known`` looks like ``word``."""
    one = closest(word, known)
    return "" if one is None else f"; did you mean {one}?"


def closest(word: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that looks like ``word``."""
    lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(word.lower(), lower, n=1)
    return lower[found[0]] if found else None


def _whole_number(expected: str, minimum: int, maximum: float) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _type: Any) -> int:
        # type(), not isinstance: a TOML boolean is an int to Python.
        if type(value) is not int or not minimum <= value <= maximum:
            raise Fault(f"expected {expected}, found {shown(value)}")
        return value

    return structure


def _seconds(value: Any, _type: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise Fault(f"expected a positive number of seconds, found {shown(value)}")
    return value  # type: ignore[no-any-return]


def _seconds_or_never(value: Any, type_: Any) -> float:
    if value == 0 and type(value) in (int, float):
        return value  # type: ignore[no-any-return]
    try:
        return _seconds(value, type_)
    except Fault:
        raise Fault(f"expected a positive number of seconds, or 0 for never, found {shown(value)}") from None


def _text(value: Any, _type: Any = None) -> str:
    if not isinstance(value, str) or not value:
        raise Fault(f"expected a string that is not empty, found {shown(value)}")
    return value


def _file_path(value: Any, _type: Any) -> str:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise Fault(f"expected the absolute path of a file, found {shown(value)}")
    return value


def _credential_name(value: Any, _type: Any) -> str:
    if not isinstance(value, str) or value in ("", ".", "..") or "/" in value or "\0" in value:
        raise Fault(f"expected the name of a credential, as in LoadCredential=NAME:PATH, found {shown(value)}")
    return value


def _choice(value: Any, type_: Any) -> Any:
    allowed = type_.__args__
    if type(value) is not str or value not in allowed:
        hint = nearest(value, allowed) if isinstance(value, str) else ""
        raise Fault(f"expected {' or '.join(toml(one) for one in allowed)}, found {shown(value)}{hint}")
    return value


def _not_empty(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise Fault(f"expected an array of at least one name, found {shown(value) if value != [] else 'none'}")
    return value


def _boolean(value: Any, _type: Any) -> bool:
    if type(value) is not bool:
        raise Fault(f"expected true or false, found {shown(value)}")
    return value


# What a request's way and weight are decided by.
_DECIDING_MEMBERS = frozenset(
    {"model", "messages", "prompt", "prompt_embeds", "input", "stream", "stream_options", "n", "best_of"}
)


def _members(value: Any, _type: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Fault(f"expected a table, found {shown(value)}")
    if taken := sorted(_DECIDING_MEMBERS & set(value)):
        raise Fault(f"{taken[0]} is for the client to say: the gateway has decided by it before this is merged in")
    try:
        # TOML has dates, times and infinities; the engine's JSON has not.
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Fault(f"expected values that JSON has, too ({error})") from None
    return value


def _alias_table(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise Fault(f"expected a table of names and their models, found {shown(value)}")
    return value


_AUTHORITY = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]*))(?::(?P<port>[0-9]{1,5}))?"
)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
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
        address = ipaddress.IPv6Address(found["v6"])
        return str(address.ipv4_mapped or address.compressed), port
    host = found["host"].rstrip(".").lower()
    if not all(0 < len(label) < 64 for label in host.split(".")):
        raise ValueError(authority)  # RFC 1035, 2.3.4: no name server could be asked for it
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        # 127.1, 0177.0.0.1 and 0x7f.1 are addresses to the resolver: only the usual way of writing one is taken.
        ipaddress.IPv4Address(host)
    return host, port


def _socket_path(value: str) -> str:
    # "//" at the start is a path of its own to POSIX, and the same as "/" to Linux.
    return posixpath.normpath("/" + value.removeprefix("unix:").lstrip("/"))


def listen_address(value: Any, _type: Any) -> ListenAddress:
    expected = 'expected "HOST:PORT", "[IPV6]:PORT" or "unix:/PATH"'
    if isinstance(value, str):
        if value.startswith("unix:/"):
            return ListenAddress(path=_socket_path(value))
        try:
            host, port = _host_and_port(value, None)
        except ValueError:
            pass
        else:
            return ListenAddress(host=host, port=port)
    raise Fault(f"{expected}, found {shown(value)}")


def upstream_address(value: Any, _type: Any) -> UpstreamAddress:
    expected = 'expected "http://HOST[:PORT]", "https://HOST[:PORT]" or "unix:/PATH"'
    if not isinstance(value, str):
        raise Fault(f"{expected}, found {shown(value)}")
    if value.startswith("unix:/"):
        return UpstreamAddress(scheme="http", path=_socket_path(value))
    found = _ORIGIN.fullmatch(value)
    if found is None:
        raise Fault(f"{expected}, found {shown(value)}")
    if "@" in found["authority"]:
        # Not shown: it may hold a password.
        raise Fault("expected an address without user name and password in it")
    if "?" in value or "#" in value:
        raise Fault(f"expected an address without a query or fragment, found {shown(value)}")
    scheme = found["scheme"].lower()
    try:
        host, port = _host_and_port(found["authority"], {"http": 80, "https": 443}[scheme])
    except ValueError:
        port = 0
    if port == 0:
        raise Fault(f"{expected}, found {shown(value)}")
    prefix = (found["path"] or "").rstrip("/")
    if "%" in prefix or any(step in ("", ".", "..") for step in prefix.split("/")[1:]):
        raise Fault(f"expected a path that can be written in one way only, found {shown(value)}")
    if prefix.endswith("/v1"):
        raise Fault(f"expected the address without /v1, which the gateway adds by itself, found {shown(value)}")
    return UpstreamAddress(scheme=scheme, host=host, port=port, prefix=prefix)


def value_converter() -> cattrs.Converter:
    """A converter that knows the values above and nothing of tables."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    converter.register_structure_hook(Count, _whole_number("a whole number, at least 0", 0, math.inf))
    converter.register_structure_hook(Positive, _whole_number("a whole number, at least 1", 1, math.inf))
    retry = f"a whole number from 1 to {MAX_RETRY_SECONDS}"
    converter.register_structure_hook(RetrySeconds, _whole_number(retry, 1, MAX_RETRY_SECONDS))
    converter.register_structure_hook(Seconds, _seconds)
    converter.register_structure_hook(SecondsOrNever, _seconds_or_never)
    converter.register_structure_hook(Text, _text)
    converter.register_structure_hook(Names, lambda v, _: tuple(converter.structure(_not_empty(v), list[Text])))
    converter.register_structure_hook(Members, _members)
    converter.register_structure_hook(Aliases, lambda v, _: converter.structure(_alias_table(v), dict[Text, Text]))
    converter.register_structure_hook(FilePath, _file_path)
    converter.register_structure_hook(CredentialName, _credential_name)
    converter.register_structure_hook(bool, _boolean)
    converter.register_structure_hook(ListenAddress, listen_address)
    converter.register_structure_hook(UpstreamAddress, upstream_address)
    converter.register_structure_hook_func(lambda type_: getattr(type_, "__origin__", None) is Literal, _choice)
    return converter
