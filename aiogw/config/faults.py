"""Every fault of a file, each with the full path of its key: those of single values, and those of several together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import fields
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    ForbiddenExtraKeysError,
    IterableValidationNote,
)

from aiogw.config.values import Fault, listen_address, shown, toml, upstream_address


def value_faults(error: BaseException, path: str) -> Iterator[str]:
    """One line for each leaf of cattrs' tree of errors."""
    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            yield from value_faults(inner, path + _step(inner))
    elif isinstance(error, ForbiddenExtraKeysError):
        known = ", ".join(one.name for one in fields(error.cl))
        for key in sorted(error.extra_fields):
            yield f"{dotted(path, key)}: unknown key; known here: {known}"
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


def dotted(path: str, key: str) -> str:
    """The full path of ``key`` in the table at ``path``."""
    return f"{path}.{_key(key)}".lstrip(".")


def _key(key: str) -> str:
    """A key as TOML writes it: bare if it can be, else quoted."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def cross_faults(raw: Mapping[str, Any]) -> Iterator[str]:
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
                yield f"{path}.models: {toml(model)} already belongs to upstreams.{model_owner[model]}"
            model_owner.setdefault(model, name)
        aliases = table.get("aliases")
        for alias, model in aliases.items() if isinstance(aliases, dict) else ():
            if alias in model_owner:
                yield f"{path}.aliases.{_key(alias)}: already the name of a model of upstreams.{model_owner[alias]}"
            model_owner.setdefault(alias, name)
            if _are_names(models) and isinstance(model, str) and model and model not in (models or ()):
                yield f"{path}.aliases.{_key(alias)}: expected one of {path}.models, found {shown(model)}"
        for where, url in _urls(table):
            try:
                key = upstream_address(url, None).key
            except Fault:
                continue
            if key in address_owner:
                yield (
                    f"{path}.{where}: the same address as {address_owner[key]} ({key}); one address has one gate, so "
                    "list all its models under one upstream"
                )
            address_owner.setdefault(key, f"{path}.{where}")
        yield from _endpoint_faults(path, table)
        yield from _admission_faults(f"{path}.admission", table)
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


def _upstream_file_faults(path: str, table: Mapping[str, Any]) -> Iterator[str]:
    if "credential" in table and "credential_file" in table:
        yield f"{path}.credential_file: there is a credential, too; expected one of them"
    urls = [url for _, url in _urls(table) if isinstance(url, str)]
    if "ca_file" in table and urls and not any(url.lower().startswith("https:") for url in urls):
        yield f"{path}.ca_file: only for an https url"


def _auth_faults(auth: Mapping[str, Any], served: Mapping[str, str] | None) -> Iterator[str]:
    mode, keys = auth.get("mode"), auth.get("keys", {})
    if mode == "keys" and not keys:
        yield 'auth.keys: expected at least one holder of a key, since auth.mode is "keys"'
    if mode == "none" and keys:
        yield 'auth.keys: only with auth.mode = "keys": nobody is asked for a key'
    for name, table in keys.items() if isinstance(keys, dict) else ():
        if not isinstance(table, dict):
            continue
        path = dotted("auth.keys", name)
        if ("file" in table) == ("credential" in table):
            yield f"{path}: expected one of file and credential, found {'both' if 'file' in table else 'none'}"
        models = table.get("models")
        if served is not None and isinstance(models, list) and _are_names(models):
            for model in models:
                if model and model not in served:
                    yield f"{path}.models: no upstream serves {toml(model)}"


def _listen_faults(server: Mapping[str, Any]) -> Iterator[str]:
    try:
        listen, admin_listen = (listen_address(server.get(key), None) for key in ("listen", "admin_listen"))
    except Fault:
        return
    # Port 0 asks the kernel for a free port each time, so two of them are two places.
    if listen == admin_listen and listen.port != 0:
        yield "server.admin_listen: the same address as server.listen"


def _memory_faults(server: Mapping[str, Any]) -> Iterator[str]:
    largest, all_together = server.get("max_body_bytes"), server.get("body_memory_bytes")
    if type(largest) is int and type(all_together) is int and all_together < largest:
        yield f"server.body_memory_bytes: expected at least max_body_bytes ({largest}), found {shown(all_together)}"


def _urls(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if "url" in table:
        yield "url", table["url"]
    endpoints = table.get("endpoints")
    for position, endpoint in enumerate(endpoints if isinstance(endpoints, list) else ()):
        if isinstance(endpoint, dict) and "url" in endpoint:
            yield f"endpoints.{position}.url", endpoint["url"]


def _endpoint_faults(path: str, table: Mapping[str, Any]) -> Iterator[str]:
    if "endpoints" not in table:
        if "url" not in table:
            yield f"{path}.url: missing; it has no default"
        if "resolve" in table:
            yield f"{path}.resolve: needs endpoints, since each address has slots of its own"
        return
    if "url" in table:
        yield f"{path}.endpoints: expected either url or endpoints, found both"
    if table.get("admission") == "unlimited":
        yield f"{path}.admission: expected a table with a cap, since endpoints are chosen by their free slots"
    if table.get("resolve") == "every-address":
        for where, url in _urls(table):
            if isinstance(url, str) and url.startswith("unix:"):
                yield f"{path}.{where}: expected a host name, since resolve is set, found {shown(url)}"


def _admission_faults(path: str, table: Mapping[str, Any]) -> Iterator[str]:
    admission = table.get("admission")
    if not isinstance(admission, dict):
        return
    cap, engine_slots = admission.get("cap"), admission.get("engine_slots")
    if "endpoints" in table:
        if "engine_slots" in admission:
            yield f"{path}.engine_slots: expected with each of endpoints, and not here"
        engine_slots = _sum_of_slots(table)
    elif "engine_slots" not in admission:
        yield f"{path}.engine_slots: missing; it has no default"
    if type(cap) is int and type(engine_slots) is int and cap >= engine_slots:
        yield f"{path}.cap: expected less than engine_slots ({engine_slots}), found {shown(cap)}"
    shortest, longest = admission.get("retry_after_min_seconds"), admission.get("retry_after_max_seconds")
    if type(shortest) is int and type(longest) is int and shortest > longest:
        expected = f"expected at most retry_after_max_seconds ({longest})"
        yield f"{path}.retry_after_min_seconds: {expected}, found {shown(shortest)}"


def _sum_of_slots(table: Mapping[str, Any]) -> int | None:
    """What all endpoints together run at a time; None: nobody knows yet, or something is wrong with one of them."""
    endpoints = table["endpoints"]
    if "resolve" in table or not isinstance(endpoints, list) or not endpoints:
        return None
    slots = [one["engine_slots"] for one in endpoints if isinstance(one, dict) and type(one.get("engine_slots")) is int]
    return sum(slots) if len(slots) == len(endpoints) else None
