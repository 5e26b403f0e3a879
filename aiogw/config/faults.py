"""Every fault of a file, each with the full path of its key: those of single values, and those of several together."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
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
from aiogw.config.values import Fault, listen_address, nearest, shown, toml, upstream_address


@frozen(kw_only=True)
class Finding:
    """One thing that is wrong: with the value at ``key``, or with its name.  ``place`` is "FILE:LINE:COLUMN"."""

    text: str
    key: Key = ()
    is_of_name: bool = False
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
        return [Finding(text=f"not valid TOML: {reason}", place=place)]
    positions = Positions(text)
    places = [positions.of_name(one.key) if one.is_of_name else positions.of(one.key) for one in findings]
    ordered = sorted(zip(places, findings, strict=True), key=itemgetter(0))
    return [evolve(one, place=f"{file}:{line}:{column}") for (line, column), one in ordered]


def value_faults(error: BaseException, homes: Mapping[str, str], key: Key = ()) -> Iterator[Finding]:
    """One for each leaf of cattrs' tree of errors.  ``homes`` has the one table of a key."""
    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            yield from value_faults(inner, homes, (*key, *_step(inner)))
    elif isinstance(error, ForbiddenExtraKeysError):
        known = [one.name for one in fields(error.cl)]
        for name in sorted(error.extra_fields):
            home = homes.get(name)
            hint = f"; it belongs to {home}." if home else nearest(name, known) or "."
            text = f"unknown key{hint} Known here: {', '.join(known)}"
            yield Finding(key=(*key, name), text=text, is_of_name=True)
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
    model_owner: dict[str, str] = {}
    address_owner: dict[str, str] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            continue
        path: Key = ("upstreams", name)
        models = table.get("models")
        for position, model in enumerate(models if isinstance(models, list) else ()):
            if not isinstance(model, str):
                continue
            if model in model_owner:
                text = f"{toml(model)} already belongs to {dotted(('upstreams', model_owner[model]))}"
                yield Finding(key=(*path, "models", position), text=text)
            model_owner.setdefault(model, name)
        aliases = table.get("aliases")
        for alias, model in aliases.items() if isinstance(aliases, dict) else ():
            key = (*path, "aliases", alias)
            if alias in model_owner:
                text = f"already the name of a model of {dotted(('upstreams', model_owner[alias]))}"
                yield Finding(key=key, text=text, is_of_name=True)
            model_owner.setdefault(alias, name)
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
                    f"the same address as {address_owner[address]} ({address}); one address has one gate, so list all "
                    "its models under one upstream"
                )
                yield Finding(key=(*path, *where), text=text)
            address_owner.setdefault(address, dotted((*path, *where)))
        yield from _endpoint_faults(path, table)
        yield from _admission_faults((*path, "admission"), table)
        yield from _upstream_file_faults(path, table)
    auth = raw.get("auth")
    if isinstance(auth, dict):
        all_known = all(isinstance(table, dict) and _are_names(table.get("models")) for table in tables.values())
        yield from _auth_faults(auth, model_owner if all_known else None)
    server = raw.get("server")
    if isinstance(server, dict):
        yield from _listen_faults(server)
        yield from _memory_faults(server)


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


def _auth_faults(auth: Mapping[str, Any], served: Mapping[str, str] | None) -> Iterator[Finding]:
    mode, keys = auth.get("mode"), auth.get("keys", {})
    if mode == "keys" and not keys:
        text = 'expected at least one holder of a key, since auth.mode is "keys"'
        yield Finding(key=("auth", "keys"), text=text)
    if mode == "none" and keys:
        yield Finding(key=("auth", "keys"), text='only with auth.mode = "keys": nobody is asked for a key')
    for name, table in keys.items() if isinstance(keys, dict) else ():
        if not isinstance(table, dict):
            continue
        path = ("auth", "keys", name)
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


def _memory_faults(server: Mapping[str, Any]) -> Iterator[Finding]:
    largest, all_together = server.get("max_body_bytes"), server.get("body_memory_bytes")
    if type(largest) is int and type(all_together) is int and all_together < largest:
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
    if type(cap) is int and type(engine_slots) is int and cap >= engine_slots:
        text = f"expected less than engine_slots ({engine_slots}), found {shown(cap)}"
        yield Finding(key=(*path, "cap"), text=text)
    shortest, longest = admission.get("retry_after_min_seconds"), admission.get("retry_after_max_seconds")
    if type(shortest) is int and type(longest) is int and shortest > longest:
        expected = f"expected at most retry_after_max_seconds ({longest})"
        yield Finding(key=(*path, "retry_after_min_seconds"), text=f"{expected}, found {shown(shortest)}")


def _sum_of_slots(table: Mapping[str, Any]) -> int | None:
    """What all endpoints together run at a time; None: nobody knows yet, or something is wrong with one of them."""
    endpoints = table["endpoints"]
    if "resolve" in table or not isinstance(endpoints, list) or not endpoints:
        return None
    slots = [one["engine_slots"] for one in endpoints if isinstance(one, dict) and type(one.get("engine_slots")) is int]
    return sum(slots) if len(slots) == len(endpoints) else None
