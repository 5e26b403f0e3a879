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
        try:
            key = upstream_address(table.get("url"), None).key
        except Fault:
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
    if isinstance(server, dict):
        yield from _listen_faults(server)
        yield from _memory_faults(server)


def _are_names(models: Any) -> bool:
    """Whether the list is one: if not, that is the fault to tell, and not what follows from it."""
    return isinstance(models, list) and all(isinstance(model, str) for model in models)


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


def _admission_faults(path: str, admission: Any) -> Iterator[str]:
    if not isinstance(admission, dict):
        return
    cap, engine_slots = admission.get("cap"), admission.get("engine_slots")
    if type(cap) is int and type(engine_slots) is int and cap >= engine_slots:
        yield f"{path}.cap: expected less than engine_slots ({engine_slots}), found {shown(cap)}"
    shortest, longest = admission.get("retry_after_min_seconds"), admission.get("retry_after_max_seconds")
    if type(shortest) is int and type(longest) is int and shortest > longest:
        expected = f"expected at most retry_after_max_seconds ({longest})"
        yield f"{path}.retry_after_min_seconds: {expected}, found {shown(shortest)}"
