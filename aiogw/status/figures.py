"""How the live view writes figures for people; pure.  The page's script has the same rules in its own language."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def seconds(value: float) -> str:
    """``0.4 s``, ``12 s``, ``2:05 min``, ``3:07 h``: never more digits than matter."""
    if value < 9.95:
        return f"{max(0.0, value):.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def short_seconds(value: float) -> str:
    """The same where there is room for four characters."""
    whole = int(value)
    if whole < 100:
        return f"{max(0, whole)}s"
    return f"{whole // 60}m" if whole < 6000 else f"{whole // 3600}h"


def size(value: int) -> str:
    """``812 B``, ``4.2 kB``, ``13 MB``."""
    amount = float(value)
    for unit in ("B", "kB", "MB"):
        if amount < 999.5:
            return f"{amount:.1f} {unit}" if unit != "B" and amount < 9.95 else f"{amount:.0f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


# What a phase and an ending are called, in as few words as they take.
PHASES = {
    "queue": "waiting",
    "first_byte": "before the first byte",
    "stream": "answering",
    "finish": "client takes the rest",
}
ENDINGS = {
    "completed": "completed",
    "client_gone": "client left",
    "client_stalled": "client took nothing",
    "queue_full": "refused: queue full",
    "queue_places_taken": "refused: key's places taken",
    "memory_full": "refused: bodies fill memory",
    "queue_timeout": "refused: waited too long",
    "queue_too_slow": "refused: would wait too long",
    "draining": "refused: shutting down",
    "upstream_unavailable": "upstream not reached",
    "upstream_timeout": "upstream silent",
    "upstream_broken": "upstream broke off",
    "upstream_error": "upstream refused",
    "upstream_auth": "upstream refused our key",
    "invalid_api_key": "key not known",
    "body_timeout": "client sent too slowly",
    "internal_error": "fault of the gateway",
}


def ending(outcome: str) -> str:
    return ENDINGS.get(outcome, outcome.replace("_", " "))


def kind_of_ending(outcome: str) -> str:
    """``ok``, ``left`` (the client's own will) or ``bad``."""
    if outcome == "completed":
        return "ok"
    return "left" if outcome == "client_gone" else "bad"


# -- an upstream of a status document, in words


def slots_text(one: Mapping[str, Any]) -> str:
    used = one["slots_in_use"] + one["slots_settling"]
    return f"{used} of {one['cap']}" if "cap" in one else str(used)


def queue_text(one: Mapping[str, Any]) -> str:
    return f"{one['waiting']} of {one['queue_limit']}"


def is_full(one: Mapping[str, Any]) -> bool:
    return bool(one["waiting"] >= one["queue_limit"] and one["slots_in_use"] + one["slots_settling"] >= one["cap"])


def newcomer_text(one: Mapping[str, Any]) -> str:
    """What a request that came now would meet."""
    if is_full(one):
        return "is refused"
    wait_seconds = one.get("newcomer_wait_seconds")
    if wait_seconds is None:
        return "not known yet"
    return f"waits ≈ {seconds(wait_seconds)}" if wait_seconds else "runs at once"


def waits_text(one: Mapping[str, Any]) -> str:
    if "wait_p50_seconds" not in one:
        return "last 5 min: no requests"
    p50, p95 = seconds(one["wait_p50_seconds"]), seconds(one["wait_p95_seconds"])
    return f"last 5 min: half waited ≤ {p50}, 95 % ≤ {p95}"


def plain(text: object) -> str:
    """``text`` with nothing in it that a terminal would obey: some of it was chosen by clients."""
    return "".join(one if one.isprintable() else "�" for one in str(text))
