"""One status document in a few lines for a shell, and the one question a script asks of it: is all well? Pure."""

from __future__ import annotations

import json

from aiogw.status import figures
from aiogw.status.snapshot import Document


def as_json(told: Document) -> str:
    return json.dumps(told, indent=1) + "\n"


def is_well(told: Document) -> bool:
    """Whether a request that comes now is served, or waits, whatever its model."""
    upstreams = told["upstreams"].values()
    return not told["draining"] and all(figures.serves(one) for one in upstreams if "leaving" not in one)


def summary(told: Document) -> str:
    state = "shutting down" if told["draining"] else f"up {figures.seconds(told['time'] - told['started_at'])}"
    lines = [f"aiogw {told['version']}, {state}"]
    if not told["reload_successful"]:
        lines.append(figures.RELOAD_FAILED)
    for name, one in told["upstreams"].items():
        parts = [figures.LEAVES] if "leaving" in one else []
        more = figures.slots_more(one) if "cap" in one else ""
        parts.append(f"{figures.slots_text(one)} slots in use{' ' * bool(more)}{more}")
        if "cap" in one:
            parts.append(f"{figures.queue_text(one)} waiting, {figures.limit_text(one)} each")
            if "oldest_wait_seconds" in one:
                parts.append(f"the oldest for {figures.seconds(one['oldest_wait_seconds'])}")
            if needs := figures.next_text(one):
                parts.append(f"the next in line {needs}")
            parts += [f"a newcomer {figures.newcomer_text(one)}", f"last 5 min: {figures.waits_text(one)}"]
        for address, at in one["endpoints"].items():
            if not at["up"]:
                parts.append(f"{address} {figures.endpoint_text(at, told['time'])}")
        lines.append(f"{name}: {'; '.join(parts)}")
    return "".join(f"{figures.plain(line)}\n" for line in lines)
