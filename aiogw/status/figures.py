"""How the live view writes figures for people; pure.  The page's script has the same rules in its own language."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, tzinfo
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


def clock(unix: float, now: float, zone: tzinfo | None = None) -> str:
    """``14:02:11``, or ``30 Nov 14:02`` when that is half a day ago; ``zone`` None: where the reader is."""
    return f"{datetime.fromtimestamp(unix, zone):{'%H:%M:%S' if now - unix < 43200 else '%d %b %H:%M'}}"


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

LEAVES = "leaves: no longer in the configuration"
RELOAD_FAILED = "▲ the last reload failed, its configuration is not taken; the log says why"

# What a newcomer meets; see ``snapshot.newcomer``.
NEWCOMERS = {
    "runs": "runs at once",
    "unreached": "probably fails: not reached",
    "queue_full": "is refused: queue full",
    "queue_too_slow": "is refused: would wait too long",
    "draining": "is refused: shutting down",
    "closing": "is served on open connections",
    "leaving": "is not taken",
    "upstream_unavailable": "is refused: no endpoint answers",
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


def slots_more(one: Mapping[str, Any]) -> str:
    """What else there is to say of the slots."""
    if "cap" not in one:
        return "no limit"
    told = []
    if one["configured_cap"] != one["cap"]:
        told.append(f"({one['configured_cap']} with all endpoints)")
    if one["slots_settling"]:
        told.append(f"{one['slots_settling']} settling")
    return ", ".join(told)


def next_text(one: Mapping[str, Any]) -> str:
    """What the next in line needs, where that is why free slots stay free."""
    needs, free = one.get("next_needs_slots", 1), one.get("cap", 0) - one["slots_in_use"] - one["slots_settling"]
    if needs == 1 or free < 1:
        return ""
    is_free = f"{free} {'is' if free == 1 else 'are'} free"
    return f"needs {needs} slots, {is_free}" if free < needs else f"needs {needs} slots at one endpoint, {is_free}"


def times_text(row: Mapping[str, Any]) -> str:
    """How many slots a request takes, where it is more than one."""
    return f" ×{row['sequences']}" if row["sequences"] > 1 else ""


def queue_text(one: Mapping[str, Any]) -> str:
    return f"{one['waiting']} of {one['queue_limit']}"


def limit_text(one: Mapping[str, Any]) -> str:
    """How long a request may wait."""
    return f"at most {seconds(one['queue_timeout_seconds'])}"


def serves(one: Mapping[str, Any]) -> bool:
    """Whether a request that came now is served, or waits."""
    if "cap" in one:
        return one["newcomer"] in ("runs", "waits")
    return any(at["up"] for at in one["endpoints"].values())


def _about(one: Mapping[str, Any], wait_seconds: float) -> str:
    # As long as the gate would refuse nobody for it, it is a guess.
    return f"{'≈' if one['estimates_measured'] else 'perhaps'} {seconds(wait_seconds)}"


def newcomer_text(one: Mapping[str, Any]) -> str:
    """What a request that came now would meet."""
    if one["newcomer"] != "waits":
        return NEWCOMERS[one["newcomer"]]
    wait_seconds = one.get("newcomer_wait_seconds")
    if wait_seconds is None:
        return "waits"
    if one["estimates_measured"] and wait_seconds > one["queue_timeout_seconds"]:
        return f"waits {seconds(one['queue_timeout_seconds'])} in vain"
    return f"waits {_about(one, wait_seconds)}"


def estimate_text(one: Mapping[str, Any], row: Mapping[str, Any], now: float) -> str:
    """What a request that waits may expect of the rest of its wait."""
    estimated_seconds = row.get("estimated_seconds")
    if estimated_seconds is None:
        return "-"
    left_seconds = row.get("deadline_at", math.inf) - now
    if one["estimates_measured"] and estimated_seconds > left_seconds:
        return f"times out in {seconds(left_seconds)}"
    return _about(one, estimated_seconds)


def _waited(one: Mapping[str, Any], others: str) -> str:
    p50, p95 = one["wait_p50_seconds"], one["wait_p95_seconds"]
    if one["wait_max_seconds"] < 0.05:
        return f"all{others} got a slot at once"
    if p95 < 0.05:
        return "95% got a slot at once"
    return (
        "half got a slot at once, 95% waited" if p50 < 0.05 else f"half waited ≤ {seconds(p50)}, 95%"
    ) + f" ≤ {seconds(p95)}"


def waits_text(one: Mapping[str, Any]) -> str:
    """How long others have waited."""
    in_vain, refused = one.get("waits_in_vain", 0), one.get("refused_by_queue", 0)
    told = []
    if "wait_p50_seconds" in one:
        told.append(_waited(one, " others" if in_vain or refused else ""))
    if in_vain:
        told.append(f"{in_vain} gave up or timed out")
    if refused:
        told.append(f"{refused} refused by the queue")
    if one.get("newcomer") == "waits" and "newcomer_wait_seconds" not in one:
        told.append("nothing has ended yet")
    return "; ".join(told) or "no requests"


def endpoint_text(at: Mapping[str, Any], now: float, zone: tzinfo | None = None) -> str:
    """What is behind its address: what is wrong with it, and its slots."""
    slots = f"{at['slots_in_use']} " + (f"of {at['slots']}" if "slots" in at else "in use")
    wrong = []
    if at.get("left_out"):
        wrong.append("left out")
    if "unreached_since" in at:
        wrong.append(f"not reached since {clock(at['unreached_since'], now, zone)}")
    return ", ".join([*wrong, slots]) if wrong else slots


def scale_text(values: Iterable[float], write: Callable[[float], str] = lambda value: f"{value:.0f}") -> str:
    """What the top of a sparkline is, and how far back it goes."""
    return f"max {write(max(values, default=0))} · 5 min"


def plain(text: object) -> str:
    """``text`` with nothing in it that a terminal would obey: some of it was chosen by clients."""
    return "".join(one if one.isprintable() else "�" for one in str(text))
