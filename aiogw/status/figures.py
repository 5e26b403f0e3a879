"""How the live view writes figures for people; pure.  The page's script has the same rules in its own language."""

from __future__ import annotations


def seconds(value: float) -> str:
    """``0.4 s``, ``12 s``, ``2 min 05 s``, ``3 h 07 min``: never more than three digits that matter."""
    if value < 9.95:
        return f"{max(0.0, value):.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


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
    "queue_timeout": "refused: waited too long",
    "queue_too_slow": "refused: would wait too long",
    "draining": "refused: shutting down",
    "upstream_unavailable": "upstream not reached",
    "upstream_timeout": "upstream silent",
    "upstream_broken": "upstream broke off",
    "upstream_error": "upstream refused",
    "internal_error": "fault of the gateway",
}


def ending(outcome: str) -> str:
    return ENDINGS.get(outcome, outcome.replace("_", " "))


def kind_of_ending(outcome: str) -> str:
    """``ok``, ``left`` (the client's own will) or ``bad``."""
    if outcome == "completed":
        return "ok"
    return "left" if outcome == "client_gone" else "bad"
