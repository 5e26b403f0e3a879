"""Every fault of a file, each with the full path of its key: those of single values, and those of several together."""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from ipaddress import IPv4Address, IPv6Address, ip_address
from operator import itemgetter
from typing import Any

from attrs import evolve, fields, frozen
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    ForbiddenExtraKeysError,
    IterableValidationNote,
)

from aiogw.config.positions import Key, Positions, of_syntax_error
from aiogw.config.values import (
    MAX_RETRY_SECONDS,
    Fault,
    closest,
    listen_address,
    nearest,
    shown,
    toml,
    upstream_address,
)

NOT_TOML = "not valid TOML"


@frozen(kw_only=True)
class Finding:
    """One thing that is wrong: with the value at ``key``, or with its name.  ``place`` is "FILE:LINE:COLUMN".

    ``meant`` is the key that is probably meant, and is not there; ``other`` has what it collides with.
    """

    text: str
    key: Key = ()
    is_of_name: bool = False
    meant: str | None = None
    other: Key = ()
    place: str | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, dotted(self.key), self.text) if part)


def placed(findings: Sequence[Finding], text: str, file: str) -> list[Finding]:
    """With the places of their keys in ``text``, in the order in which they stand there."""
    try:
        tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason, where = of_syntax_error(text, error)
        place = f"{file}:{where[0]}:{where[1]}" if where else file
        return [Finding(text=f"{NOT_TOML}: {reason}", place=place)]
    positions = Positions(text)
    places = [positions.of_name(one.key) if one.is_of_name else positions.of(one.key) for one in findings]
    ordered = sorted(zip(places, findings, strict=True), key=itemgetter(0))
    found = []
    for (line, column), one in ordered:
        other = "" if not one.other else " (see line {}, column {})".format(*positions.of_name(one.other))
        found.append(evolve(one, text=one.text + other, place=f"{file}:{line}:{column}"))
    return found


def syntax_fault(text: str, error: ValueError | RecursionError) -> Finding:
    """The fault of a text that is no TOML, as far as it can be told without a file."""
    reason, where = of_syntax_error(text, error)
    return Finding(text=f"{NOT_TOML}: {reason}" + (f" (line {where[0]}, column {where[1]})" if where else ""))


def as_meant(raw: Mapping[str, Any], findings: Sequence[Finding]) -> dict[str, Any]:
    """A copy of ``raw`` with its misspelt keys put right, so that what follows from them is not told as well."""
    corrected = deepcopy(dict(raw))
    for one in findings:
        if one.meant is not None:
            table: Any = corrected
            for step in one.key[:-1]:
                table = table[step]
            table[one.meant] = table.pop(one.key[-1])
    return corrected


def as_written(finding: Finding, misspelt: Sequence[Finding]) -> Finding:
    """With the keys of the file for those that were put right, the last of which is the first to be undone."""
    key, other = finding.key, finding.other
    for one in reversed(misspelt):
        depth = len(one.key)
        right = (*one.key[:-1], one.meant)
        key = (*one.key, *key[depth:]) if key[:depth] == right else key
        other = (*one.key, *other[depth:]) if other[:depth] == right else other
    return evolve(finding, key=key, other=other)


def value_faults(error: BaseException, homes: Mapping[str, str], raw: Any, key: Key = ()) -> Iterator[Finding]:
    """One for each leaf of cattrs' tree of errors, which are of ``raw``.  ``homes`` has the one table of a key."""
    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            step = _step(inner)
            yield from value_faults(inner, homes, _inside(raw, step), (*key, *step))
    elif isinstance(error, ForbiddenExtraKeysError):
        known = [one.name for one in fields(error.cl)]
        absent = [name for name in known if name not in raw]
        for name in sorted(error.extra_fields):
            home = homes.get(name)
            meant = None if home else closest(name, absent)
            if meant is not None:
                absent.remove(meant)
            hint = f"; it belongs to {home}." if home else nearest(name, known if meant is None else [meant]) or "."
            text = f"unknown key{hint} Known here: {', '.join(known)}"
            yield Finding(key=(*key, name), text=text, is_of_name=True, meant=meant)
    elif isinstance(error, KeyError):
        yield Finding(key=key, text="missing; it has no default")
    else:
        yield Finding(key=key, text=str(error))


def _step(error: BaseException) -> Key:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return (note.name,)
        if isinstance(note, IterableValidationNote):
            return (note.index,)
    return ()


def _inside(raw: Any, step: Key) -> Any:
    for name in step:
        try:
            raw = raw[name]
        except (LookupError, TypeError):
            return {}
    return raw


def dotted(key: Key) -> str:
    """The full path of a key, as TOML writes it: each name bare if it can be, else quoted."""
    return ".".join(
        str(name) if isinstance(name, int) or re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name) for name in key
    )


def cross_faults(raw: Mapping[str, Any]) -> Iterator[Finding]:
    """What only shows when several values are seen together.

    Works on the raw tables, so that a fault in one place does not hide those in another.
    """
    upstreams = raw.get("upstreams")
    tables = upstreams if isinstance(upstreams, dict) else {}
    owner: dict[str, Key] = {}
    address_owner: dict[str, Key] = {}
    for name, table in tables.items():
        path: Key = ("upstreams", name)
        yield from _name_faults(path)
        if not isinstance(table, dict):
            continue
        models = table.get("models")
        for position, model in enumerate(models if isinstance(models, list) else ()):
            if not isinstance(model, str):
                continue
            key: Key = (*path, "models", position)
            if model in owner:
                yield Finding(
                    key=key, text=f"{toml(model)} is already {_named(owner[model], path)}", other=owner[model]
                )
            owner.setdefault(model, key)
        aliases = table.get("aliases")
        for alias, model in aliases.items() if isinstance(aliases, dict) else ():
            key = (*path, "aliases", alias)
            if alias in owner:
                text = f"already {_named(owner[alias], path)}"
                yield Finding(key=key, text=text, is_of_name=True, other=owner[alias])
            owner.setdefault(alias, key)
            if _are_names(models) and isinstance(model, str) and model and model not in (models or ()):
                expected = f"expected one of {dotted((*path, 'models'))}"
                yield Finding(key=key, text=f"{expected}, found {shown(model)}{nearest(model, models or ())}")
        for where, url in _urls(table):
            try:
                address = upstream_address(url, None).key
            except Fault:
                continue
            if address in address_owner:
                text = (
                    f"the same address as {dotted(address_owner[address])} ({address}); one address has one gate, so "
                    "list all its models under one upstream"
                )
                yield Finding(key=(*path, *where), text=text, other=address_owner[address])
            address_owner.setdefault(address, (*path, *where))
        yield from _endpoint_faults(path, table)
        yield from _admission_faults((*path, "admission"), table)
        yield from _upstream_file_faults(path, table)
    auth = raw.get("auth")
    if isinstance(auth, dict):
        all_known = all(isinstance(table, dict) and _are_names(table.get("models")) for table in tables.values())
        yield from _auth_faults(auth, owner if all_known else None)
    server = raw.get("server")
    if isinstance(server, dict):
        yield from _listen_faults(server)
        yield from _memory_faults(server)


def _name_faults(key: Key) -> Iterator[Finding]:
    """Of what the operator has called something: logs, metrics and terminals show it as it is."""
    if not key[-1] or not str(key[-1]).isprintable():
        yield Finding(key=key, text="expected a name of printable characters", is_of_name=True)


def _named(owner: Key, path: Key) -> str:
    """What a name is that was given before, seen from the upstream at ``path``."""
    what = "a model" if owner[2] == "models" else "an alias"
    return f"{what} of this upstream" if owner[:2] == path else f"{what} of {dotted(owner[:2])}"


def _are_names(models: Any) -> bool:
    """Whether the list is one: if not, that is the fault to tell, and not what follows from it."""
    return isinstance(models, list) and all(isinstance(model, str) for model in models)


def _upstream_file_faults(path: Key, table: Mapping[str, Any]) -> Iterator[Finding]:
    if "credential" in table and "credential_file" in table:
        text = "there is a credential, too; expected one of them"
        yield Finding(key=(*path, "credential_file"), text=text, is_of_name=True)
    urls = [url for _, url in _urls(table) if isinstance(url, str)]
    if "ca_file" in table and urls and not any(url.lower().startswith("https:") for url in urls):
        yield Finding(key=(*path, "ca_file"), text="only for an https url", is_of_name=True)


def _auth_faults(auth: Mapping[str, Any], served: Mapping[str, Key] | None) -> Iterator[Finding]:
    mode, keys = auth.get("mode"), auth.get("keys", {})
    if mode == "keys" and not keys:
        text = 'expected at least one holder of a key, since auth.mode is "keys"'
        yield Finding(key=("auth", "keys"), text=text)
    if mode == "none" and keys:
        yield Finding(key=("auth", "keys"), text='only with auth.mode = "keys": nobody is asked for a key')
    for name, table in keys.items() if isinstance(keys, dict) else ():
        path: Key = ("auth", "keys", name)
        yield from _name_faults(path)
        if not isinstance(table, dict):
            continue
        if ("file" in table) == ("credential" in table):
            found = "both" if "file" in table else "none"
            yield Finding(key=path, text=f"expected one of file and credential, found {found}")
        models = table.get("models")
        if served is not None and isinstance(models, list) and _are_names(models):
            for position, model in enumerate(models):
                if model and model not in served:
                    text = f"no upstream serves {toml(model)}{nearest(model, served)}"
                    yield Finding(key=(*path, "models", position), text=text)


def _listen_faults(server: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        listen, admin_listen = (listen_address(server.get(key), None) for key in ("listen", "admin_listen"))
    except Fault:
        return
    # Port 0 asks the kernel for a free port each time, so two of them are two places.
    if listen == admin_listen and listen.port != 0:
        yield Finding(key=("server", "admin_listen"), text="the same address as server.listen")
    elif listen.port == admin_listen.port != 0 and _are_one_place(listen.host, admin_listen.host):
        text = f"server.listen ({listen}) has this port on the same address"
        yield Finding(key=("server", "admin_listen"), text=text)


def _are_one_place(one: str | None, other: str | None) -> bool:
    """Whether nobody can listen at both, on one port.  What a name resolves to is not known here, "localhost" apart."""
    return any(
        first.version == second.version and (first == second or first.is_unspecified or second.is_unspecified)
        for first in _addresses(one)
        for second in _addresses(other)
    )


def _addresses(host: str | None) -> Iterator[IPv4Address | IPv6Address]:
    for text in ("127.0.0.1", "::1") if host == "localhost" else (host,):
        with contextlib.suppress(ValueError):
            yield ip_address(text or "")


def _memory_faults(server: Mapping[str, Any]) -> Iterator[Finding]:
    largest, all_together = server.get("max_body_bytes"), server.get("body_memory_bytes")
    if type(largest) is int and type(all_together) is int and 0 < all_together < largest:
        text = f"expected at least max_body_bytes ({largest}), found {shown(all_together)}"
        yield Finding(key=("server", "body_memory_bytes"), text=text)


def _urls(table: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    if "url" in table:
        yield ("url",), table["url"]
    endpoints = table.get("endpoints")
    for position, endpoint in enumerate(endpoints if isinstance(endpoints, list) else ()):
        if isinstance(endpoint, dict) and "url" in endpoint:
            yield ("endpoints", position, "url"), endpoint["url"]


def _endpoint_faults(path: Key, table: Mapping[str, Any]) -> Iterator[Finding]:
    if "endpoints" not in table:
        if "url" not in table:
            yield Finding(key=(*path, "url"), text="missing; it has no default")
        if "resolve" in table:
            text = "needs endpoints, since each address has slots of its own"
            yield Finding(key=(*path, "resolve"), text=text, is_of_name=True)
        return
    if "url" in table:
        text = "expected either url or endpoints, found both"
        yield Finding(key=(*path, "endpoints"), text=text, is_of_name=True)
    if table.get("admission") == "unlimited":
        text = "expected a table with a cap, since endpoints are chosen by their free slots"
        yield Finding(key=(*path, "admission"), text=text)
    if table.get("resolve") == "every-address":
        for where, url in _urls(table):
            if isinstance(url, str) and url.startswith("unix:"):
                text = f"expected a host name, since resolve is set, found {shown(url)}"
                yield Finding(key=(*path, *where), text=text)


def _admission_faults(path: Key, table: Mapping[str, Any]) -> Iterator[Finding]:
    admission = table.get("admission")
    if not isinstance(admission, dict):
        return
    cap, engine_slots = admission.get("cap"), admission.get("engine_slots")
    if "endpoints" in table:
        if "engine_slots" in admission:
            text = "expected with each of endpoints, and not here"
            yield Finding(key=(*path, "engine_slots"), text=text, is_of_name=True)
        engine_slots = _sum_of_slots(table)
    elif "engine_slots" not in admission:
        yield Finding(key=(*path, "engine_slots"), text="missing; it has no default")
    if type(cap) is int and type(engine_slots) is int and cap >= engine_slots > 0:
        text = f"expected less than engine_slots ({engine_slots}), found {shown(cap)}"
        yield Finding(key=(*path, "cap"), text=text)
    shortest, longest = admission.get("retry_after_min_seconds"), admission.get("retry_after_max_seconds")
    # What is out of its own range is told there.
    if type(shortest) is int and type(longest) is int and MAX_RETRY_SECONDS >= shortest > longest > 0:
        expected = f"expected at most retry_after_max_seconds ({longest})"
        yield Finding(key=(*path, "retry_after_min_seconds"), text=f"{expected}, found {shown(shortest)}")


def _sum_of_slots(table: Mapping[str, Any]) -> int | None:
    """What all endpoints together run at a time; None: nobody knows yet, or something is wrong with one of them."""
    endpoints = table["endpoints"]
    if "resolve" in table or not isinstance(endpoints, list) or not endpoints:
        return None
    slots = [one["engine_slots"] for one in endpoints if isinstance(one, dict) and type(one.get("engine_slots")) is int]
    return sum(slots) if len(slots) == len(endpoints) else None
