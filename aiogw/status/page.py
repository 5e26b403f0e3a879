"""The page: the status document as HTML that stands by itself, and the style and script that bring it to life.

The script draws the same from the feed; without scripts the page is drawn anew every few seconds.  Nothing of it is
asked of anybody else, and the browser is told so.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC
from html import escape
from importlib import resources
from typing import Any

from aiogw.record import FIRST_BYTE, QUEUE, STREAM
from aiogw.status import figures
from aiogw.status.snapshot import Document


def _asset(name: str) -> str:
    """A file of this folder without what is for its readers only: indentation, and lines of comment."""
    lines = resources.files("aiogw.status").joinpath(name).read_text("utf-8").splitlines()
    return "".join(f"{line.strip()}\n" for line in lines if not line.strip().startswith("//"))


# Without the spaces around a sign, but for those of strings, and without line ends that say nothing.
_JS = re.sub(r"""("[^"]*"|`[^`]*`)| *([^\w\s"`$]) *""", lambda one: one[1] or one[2], _asset("page.js"))
_JS = re.sub(r"(?<=[{;,(])\n+", "", _JS)
_STYLE = re.sub(r"\s*([{};,])\s*|(?<=:)\s+", r"\1", _asset("page.css"))

# The head of a column, and its classes: n for numbers, wide for what a phone has no room for.
_Columns = tuple[tuple[str, str], ...]
_RUNNING: _Columns = (
    ("Request", "id"),
    ("Key", "key wide"),
    ("API", "api wide"),
    ("Model", "model wide"),
    ("Phase", "phase"),
    ("Age", "n"),
    ("Silent", "n wide"),
    ("Bytes", "n wide"),
)
_WAITING: _Columns = (
    ("Request", "id"),
    ("Key", "key wide"),
    ("API", "api wide"),
    ("Model", "model wide"),
    ("Place", "place"),
    ("Age", "n"),
    ("Estimate", "n estimate"),
)
_ENDED: _Columns = (
    ("Request", "id"),
    ("At", "at"),
    ("Ending", "ending"),
    ("Upstream", "upstream wide"),
    ("Key", "key wide"),
    ("Model", "model wide"),
    ("Waited", "n wide"),
    ("Took", "n wide"),
)
_WORDS = {
    "phases": figures.PHASES,
    "endings": figures.ENDINGS,
    "newcomers": figures.NEWCOMERS,
    "leaves": figures.LEAVES,
    "reload": figures.RELOAD_FAILED,
    "running": _RUNNING,
    "waiting": _WAITING,
    "ended": _ENDED,
}
_SCRIPT = f"const WORDS = {json.dumps(_WORDS, separators=(',', ':'))};\n{_JS}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


NOT_KEPT = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
HEADERS = NOT_KEPT | {
    "content-security-policy": (
        f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
}

# More frames than this are no drawing any more; of the queue, the rest is a number.
MOST_PLACES = 50
# From this many on, the cells are small and have no words.
MANY = 48

_LEGEND = (
    ("stream", "answering"),
    ("first_byte", "before its first byte"),
    ("tail", "⋯ one more slot of the same request"),
    ("settling", "aborted, engine lets go"),
    ("free", "free slot"),
    ("queue_", "waiting, next in line first"),
)


def render(told: Document) -> str:
    """The page for a document that has its ages (``snapshot.with_ages``)."""
    at = time.strftime("%H:%M:%S UTC", time.gmtime(told["time"]))
    draining = ", shutting down" if told["draining"] else ""
    sections = "".join(_upstream(name, one, told) for name, one in told["upstreams"].items())
    legend = "".join(f"<li>{_legend(name)}{text}</li>" for name, text in _LEGEND)
    uptime = figures.seconds(told["time"] - told["started_at"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>aiogw</title>'
        '<link rel="icon" href="data:,"><noscript><meta http-equiv="refresh" content="5"></noscript>'
        f"<style>{_STYLE}</style></head><body>"
        f'<header><h1>aiogw</h1><p id="state" class="static" role="status">as of {at}{draining}</p>'
        f'<p id="about">{escape(told["version"])}, up {uptime}</p>'
        f'<p id="reload">{"" if told["reload_successful"] else figures.RELOAD_FAILED}</p>'
        f'<ul class="legend" aria-label="Legend">{legend}</ul></header>'
        f'<main><div id="upstreams">{sections}</div>'
        f'<section id="endings" aria-label="Endings">{_endings(told)}</section></main>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _upstream(name: str, one: Document, told: Document) -> str:
    rows = [row for row in told["requests"].values() if row["upstream"] == name]
    waiting = [row for row in rows if row["phase"] == QUEUE]
    running = [row for row in rows if row["phase"] != QUEUE]
    now = told["time"]
    endpoints = "".join(_endpoint(address, endpoint, now) for address, endpoint in one["endpoints"].items())
    return (
        f'<section data-upstream="{escape(name)}"><div class="head"><h2>{escape(name)}</h2>'
        f'<p class="leaves">{figures.LEAVES if "leaving" in one else ""}</p>'
        f'<ul class="endpoints" aria-label="Endpoints">{endpoints}</ul></div>'
        f"{_drawing(one, running, waiting, now)}{_tiles(one)}"
        f"{_table('At work', _RUNNING, [_running_cells(row) for row in running])}"
        f"{_table('Waiting', _WAITING, [_waiting_cells(one, row, now) for row in waiting])}"
        "</section>"
    )


def _legend(name: str) -> str:
    return "" if name == "tail" else f'<i class="{name}"></i>'


def _endpoint(address: str, endpoint: Document, now: float) -> str:
    text = f"{escape(address)} {figures.endpoint_text(endpoint, now, UTC)}"
    return f"<li><b>●</b> {text}</li>" if endpoint["up"] else f'<li class="out">✕ {text}</li>'


def _drawing(one: Document, running: list[Document], waiting: list[Document], now: float) -> str:
    cells = []
    for row in running:
        if row["phase"] in (FIRST_BYTE, STREAM) and row["sequences"]:
            cells.append(f"<li>{_chip(row, now - row['granted_at'])}</li>")
            tail = f'<span class="tail {row["phase"]}" title="{_title(row)}"></span>'
            cells += [f"<li>{tail}</li>"] * (row["sequences"] - 1)
    cells += ['<li class="settling"></li>'] * one["slots_settling"]
    cells += ["<li></li>"] * (one.get("cap", 0) - len(cells))
    many = " many" if len(cells) > MANY else ""
    drawn = f'<span>Slots</span><ol class="cells slots{many}">{"".join(cells)}</ol>'
    label = f"{figures.slots_text(one)} slots in use"
    if one.get("queue_limit") or one["waiting"]:
        shown = waiting[:MOST_PLACES]
        places = [f"<li>{_chip(row, now - row['entered_at'])}</li>" for row in shown]
        places += ["<li></li>"] * (min(one["queue_limit"], MOST_PLACES) - len(places))
        if one["waiting"] > len(shown):
            places.append(f'<li class="more">and {one["waiting"] - len(shown)} more</li>')
        drawn += f'<span>Queue</span><ol class="cells queue">{"".join(places)}</ol>'
        label += f", {figures.queue_text(one)} places in the queue taken"
    hidden = "" if cells or "cap" in one else " hidden"
    return f'<div class="drawing" role="img" aria-label="{label}"{hidden}>{drawn}</div>'


def _chip(row: Document, seconds: float) -> str:
    phase = "queue_" if row["phase"] == QUEUE else row["phase"]
    return f'<span class="chip {phase}" title="{_title(row)}">{figures.short_seconds(seconds)}</span>'


def _title(row: Document) -> str:
    return escape(f"{row['id']}, {row.get('model', '-')}, {figures.PHASES[row['phase']]}")


def _tiles(one: Document) -> str:
    slots, queue, oldest = zip(*one["history"].values(), strict=True) if one["history"] else ((), (), ())
    tiles = _tile("Slots in use", figures.slots_text(one), figures.slots_more(one), _spark(slots, one.get("cap", 1)))
    if "cap" in one:
        wait = figures.seconds(one["oldest_wait_seconds"]) if one["waiting"] else "nobody waits"
        full = one["newcomer"] == "queue_full"
        tiles += _tile(
            "In the queue", figures.queue_text(one), f"{figures.limit_text(one)} each", _spark(queue, 1), bad=full
        )
        needs = figures.next_text(one)
        tiles += _tile("Oldest wait", wait, needs and f"next in line {needs}", _spark(oldest, 1, figures.seconds))
        waits = f'<p class="waits">last 5 min: {figures.waits_text(one)}</p>'
        tiles += _tile("A newcomer", figures.newcomer_text(one), "", waits, bad=not figures.serves(one))
    return f'<dl class="tiles">{tiles}</dl>'


def _tile(name: str, value: str, more: str, under: str, *, bad: bool = False) -> str:
    kind = ' class="full"' if bad else ""
    return f"<div{kind}><dt>{name}</dt><dd><strong>{value}</strong><small>{more}</small>{under}</dd></div>"


def _spark(values: Sequence[float], at_least: float, *write: Callable[[float], str]) -> str:
    """Five minutes as a line; the newest value is at the right, and the top is the cap or what was highest."""
    top = max([at_least, *values])
    points = " ".join(f"{150 - len(values) + i + 1},{30 - 28 * value / top:.1f}" for i, value in enumerate(values))
    area = f'<path d="M{151 - len(values)},30 L{points} L150,30 Z"/>' if values else ""
    return (
        '<svg class="spark" viewBox="0 0 150 30" preserveAspectRatio="none" aria-hidden="true">'
        f'{area}<polyline points="{points}"/></svg><small class="scale">{figures.scale_text(values, *write)}</small>'
    )


def _origin_cells(row: Document) -> list[str]:
    return [row["id"], row.get("key", "-"), row["surface"], row.get("model", "-")]


def _running_cells(row: Document) -> list[str]:
    silent = figures.seconds(row["silent_seconds"]) if "silent_seconds" in row else "-"
    return [
        *_origin_cells(row),
        figures.PHASES[row["phase"]] + figures.times_text(row),
        figures.seconds(row["age_seconds"]),
        silent,
        figures.size(row["bytes"]),
    ]


def _waiting_cells(one: Document, row: Document, now: float) -> list[str]:
    age, estimate = figures.seconds(row["age_seconds"]), figures.estimate_text(one, row, now)
    return [*_origin_cells(row), f"{row['position']}{figures.times_text(row)}", age, estimate]


def _table(caption: str, columns: _Columns, rows: Iterable[list[Any]]) -> str:
    body = "".join(
        "<tr>"
        + "".join(
            f'<{"td" if number else "th scope=row"} class="{kind}">{_cell(value)}</{"td" if number else "th"}>'
            for number, ((_, kind), value) in enumerate(zip(columns, row, strict=True))
        )
        + "</tr>"
        for row in rows
    )
    if not body:
        return ""
    heads = "".join(f'<th scope="col" class="{kind}">{name}</th>' for name, kind in columns)
    return (
        f'<div class="list"><table><caption>{caption}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        kind, text = value
        return f'<span class="{kind}">{escape(text)}</span>'
    return escape(value)


def _endings(told: Document) -> str:
    rows = [
        [
            row["id"],
            time.strftime("%H:%M:%S", time.gmtime(row["ended_at"])),
            (figures.kind_of_ending(row["outcome"]), figures.ending(row["outcome"])),
            row.get("upstream", "-"),
            row.get("key", "-"),
            row.get("model", "-"),
            figures.seconds(row["wait_seconds"]) if "wait_seconds" in row else "-",
            figures.seconds(row["duration_seconds"]) if "duration_seconds" in row else "-",
        ]
        for row in reversed(told["endings"].values())
    ]
    return _table("The last endings", _ENDED, rows) or '<p class="none">Nothing has ended yet.</p>'
