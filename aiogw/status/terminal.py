"""The live view in a terminal: the same document as on the page, drawn with what a terminal has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from aiogw.record import FINISH, FIRST_BYTE, QUEUE, STREAM
from aiogw.status import figures
from aiogw.status.snapshot import Document

REFRESH_SECONDS = 0.25
STALE_SECONDS = 6.0
# Columns of a terminal that has room for whose request it is, and at which API.
WIDE = 100
BARS = "▁▂▃▄▅▆▇█"
# Colours that can be told apart without seeing red or green; each also has a form of its own.
STYLES = {
    STREAM: "bold white on rgb(0,114,178)",
    FIRST_BYTE: "bold black on rgb(240,180,41)",
    "settling": "rgb(140,145,152)",
    QUEUE: "black on rgb(205,205,200)",
    "next": "bold black on rgb(250,250,246)",
    "free": "rgb(110,115,122)",
}
MARKS = {STREAM: "■", FIRST_BYTE: "◧", "settling": "╱", "free": "╌"}
MARK_STYLES = STYLES | {STREAM: "rgb(60,150,220)", FIRST_BYTE: "rgb(240,180,41)"}
SOFT, BAD, GOOD = "rgb(140,145,152)", "bold rgb(230,120,70)", "rgb(60,180,150)"
# An upstream without tables, and what an empty table does not cost; then the endings, which are never crowded out.
SECTION_LINES = 9
TABLE_LINES = 2
ENDINGS_LINES = 3 + 4


async def watch(documents: AsyncIterator[Document], console: Console) -> None:
    """Show what comes until somebody interrupts."""
    told: Document = {}
    heard_at = time.monotonic()

    async def listen() -> None:
        nonlocal told, heard_at
        async for one in documents:
            told, heard_at = one, time.monotonic()

    listening = asyncio.create_task(listen())
    try:
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while not listening.done():
                silent_seconds = time.monotonic() - heard_at
                live.update(view(told, silent_seconds, width=console.width, height=console.height), refresh=True)
                await asyncio.wait([listening], timeout=REFRESH_SECONDS)
    finally:
        # Until it has ended: aiohttp can take a cancellation for a time-out, and ``follow`` would only try again.
        while not listening.done():
            listening.cancel()
            await asyncio.wait([listening], timeout=REFRESH_SECONDS)
        if not listening.cancelled():
            listening.result()


def view(told: Document, silent_seconds: float, *, width: int, height: int) -> RenderableType:
    """The whole screen; ``silent_seconds`` have passed since ``told`` came."""
    if not told:
        return Text("aiogw  ▲ the gateway does not answer; trying again", style=BAD)
    stale = silent_seconds > STALE_SECONDS
    # What is shown of a gateway that has fallen silent is as old as its last word.
    now = told["time"] + (0.0 if stale else silent_seconds)
    wide = width >= WIDE
    parts: list[RenderableType] = [_head(told, silent_seconds, stale)]
    room = height - 1 - SECTION_LINES * len(told["upstreams"]) - (ENDINGS_LINES if told["endings"] else 0)
    rows = sorted(told["requests"].items(), key=lambda item: int(item[0]))
    for name, one in told["upstreams"].items():
        ours = [row for _, row in rows if row["upstream"] == name]
        section, used = _upstream(name, one, ours, now, width=width, room=room)
        room -= used
        parts.append(section)
    endings = sorted(told["endings"].items(), key=lambda item: -int(item[0]))
    if endings:
        parts.append(_endings([row for _, row in endings[: max(4, room + 4)]], wide=wide))
    return Group(*parts)


def _head(told: Document, silent_seconds: float, stale: bool) -> Text:
    text = Text(" aiogw  ", style="bold")
    if stale:
        text.append(f"▲ stale: nothing heard for {figures.seconds(silent_seconds)}; trying again", style=BAD)
    else:
        text.append("●", style=GOOD)
        text.append(" shutting down" if told["draining"] else " live", style=SOFT)
    uptime = figures.seconds(told["time"] - told["started_at"])
    text.append(f"   {told['version']}, up {uptime}   Ctrl-C leaves", style=SOFT)
    return text


def _upstream(
    name: str, one: Document, rows: list[Document], now: float, *, width: int, room: int
) -> tuple[RenderableType, int]:
    """The section, and how many lines its tables took of ``room``."""
    wide = width >= WIDE
    waiting = [row for row in rows if row["phase"] == QUEUE]
    running = [row for row in rows if row["phase"] != QUEUE]
    gated = "cap" in one
    parts: list[RenderableType] = []
    if gated or one["slots_in_use"]:
        parts += [_slots(one, running, now, width), Text("")]
    if one.get("queue_limit") or one["waiting"]:
        parts += [_queue(one, waiting, now, width), Text("")]
    parts.append(_figures(one, now, width))
    used = 0
    for table, told in (
        (_table(RUNNING, wide), [_running_cells(row, now, wide) for row in running]),
        (_table(WAITING, wide), [_waiting_cells(row, now, wide) for row in waiting]),
    ):
        shown = told[: max(0, room - used - TABLE_LINES - 1)]
        if not shown:
            continue
        for cells in shown:
            table.add_row(*cells)
        if len(told) > len(shown):
            table.add_row(Text(f"and {len(told) - len(shown)} more", style=SOFT))
        parts += [Text(""), table]
        used += TABLE_LINES + len(shown) + (len(told) > len(shown))
    endpoints = Text("  ").join(_endpoint(address, at) for address, at in one["endpoints"].items())
    title = Text(f" {figures.plain(name)} ", style="bold")
    panel = Panel(
        Group(*parts), title=title, title_align="left", subtitle=endpoints, subtitle_align="right", border_style=SOFT
    )
    return panel, used


def _endpoint(address: str, at: Document) -> Text:
    slots = f"{at['slots_in_use']}" + (f" of {at['slots']}" if "slots" in at else "")
    if at["up"]:
        return Text.assemble((" ●", GOOD), (f" {address} {slots} ", SOFT))
    return Text(f" ✕ {address} left out, {slots} ", style=BAD)


def _slots(one: Document, running: list[Document], now: float, width: int) -> Text:
    """A cell for each slot, with the time it has been held; a mark for each where that is too many for a line."""
    cells: list[tuple[str, str]] = []
    for row in running:
        if row["phase"] != FINISH and row["sequences"]:
            held = figures.short_seconds(now - row["granted_at"])
            cells += [(held, row["phase"])] + [("⋯", row["phase"])] * (row["sequences"] - 1)
    cells += [("", "settling")] * one["slots_settling"]
    cells += [("", "free")] * (one.get("cap", 0) - len(cells))
    text = Text("Slots  ", style=SOFT)
    small = 6 * len(cells) > width - 11
    for held, kind in cells:
        if small:
            text.append(MARKS[kind], style=MARK_STYLES[kind])
        else:
            text.append(f"{held:^5}" if held else MARKS[kind] * 5, style=STYLES[kind]).append(" ")
    return text


def _queue(one: Document, waiting: list[Document], now: float, width: int) -> Text:
    text = Text("Queue  ", style=SOFT)
    shown = waiting[: max(1, (width - 25) // 6)]  # on one line, the borders and a remark taken off
    for number, row in enumerate(shown):
        text.append(
            f"{figures.short_seconds(now - row['entered_at']):^5}", style=STYLES["next" if number == 0 else QUEUE]
        ).append(" ")
    free = one["queue_limit"] - one["waiting"]
    if one["waiting"] > len(shown):
        text.append(f"and {one['waiting'] - len(shown)} more", style=SOFT)
    elif free > 0:
        places = (width - 11 - 6 * len(shown)) // 2
        text.append("· " * free if free <= places else f"{free} places free", style=STYLES["free"])
    return text


def _figures(one: Document, now: float, width: int) -> Table:
    samples = [sample for _, sample in sorted(one["history"].items(), key=lambda item: int(item[0]))][
        -(width // 5 - 4) :
    ]
    slots = figures.slots_text(one) + (f", {one['slots_settling']} settling" if one["slots_settling"] else "")
    tiles = [("Slots in use", slots, [s[0] for s in samples], one.get("cap", 1), "")]
    if "cap" in one:
        bad = BAD if figures.is_full(one) else ""
        oldest = figures.seconds(now - one["waiting_since"]) if "waiting_since" in one else "nobody waits"
        tiles += [
            ("In the queue", figures.queue_text(one), [s[1] for s in samples], 1, bad),
            ("Oldest wait", oldest, [s[2] for s in samples], 1, ""),
        ]
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    cells = []
    for name, value, values, at_least, style in tiles:
        grid.add_column(ratio=1)
        cells.append(
            Text.assemble(
                (f"{name}\n", SOFT), (f"{value}\n", f"bold {style}"), (_bars(values, at_least), "rgb(0,114,178)")
            )
        )
    grid.add_column(ratio=2)
    if "cap" in one:
        newcomer = ("A newcomer\n", SOFT), (f"{figures.newcomer_text(one)}\n", "bold")
        cells.append(Text.assemble(*newcomer, (figures.waits_text(one), SOFT)))
    else:
        cells.append(Text("no limit", style=SOFT))
    grid.add_row(*cells)
    return grid


def _bars(values: Iterable[float], at_least: float) -> str:
    values = list(values)
    top = max([at_least, *values])
    return "".join(BARS[min(7, int(8 * value / top))] if value else "▁" for value in values)


# The columns that take their share of the width, and those of figures; the first has the name of the table, and the two
# after it are only there where there is room.
RUNNING = (("At work", "Key", "API", "Model", "Phase"), ("Age", "Silent", "Bytes"))
WAITING = (("Waiting", "Key", "API", "Model", "Place"), ("Age", "Estimate", ""))
ENDED = (("Last endings", "Key", "Model", "Upstream", "Ending"), ("At", "Waited", "Took"))


def _table(columns: tuple[tuple[str, ...], tuple[str, ...]], wide: bool) -> Table:
    words, numbers = columns
    table = Table(box=None, expand=True, padding=(0, 1), pad_edge=False, header_style="")
    for name in words if wide else (words[0], *words[3:]):
        ratio = {words[0]: 5, words[-1]: 6}.get(name, 3)
        style = "bold" if name == words[0] else SOFT
        table.add_column(name, ratio=ratio, no_wrap=True, overflow="ellipsis", header_style=style)
    for name in numbers:
        table.add_column(name, min_width=8, justify="right", no_wrap=True, header_style=SOFT)
    return table


def _origin_cells(row: Document, wide: bool, *names: str) -> list[Text]:
    """As text, which is never taken for rich's markup."""
    return [Text(figures.plain(row.get(name, "-"))) for name in (names if wide else (names[0], *names[3:]))]


def _running_cells(row: Document, now: float, wide: bool) -> list[str | Text]:
    silent = figures.seconds(now - row["last_byte_at"]) if "last_byte_at" in row else "-"
    age = figures.seconds(now - row["arrived_at"])
    origin = _origin_cells(row, wide, "id", "key", "surface", "model")
    return [*origin, figures.PHASES[row["phase"]], age, silent, figures.size(row["bytes"])]


def _waiting_cells(row: Document, now: float, wide: bool) -> list[str | Text]:
    estimate = f"≈ {figures.seconds(row['estimated_seconds'])}" if "estimated_seconds" in row else "-"
    origin = _origin_cells(row, wide, "id", "key", "surface", "model")
    return [*origin, str(row["position"] + 1), figures.seconds(now - row["arrived_at"]), estimate, ""]


def _endings(rows: list[Document], *, wide: bool) -> RenderableType:
    table = _table(ENDED, wide)
    marks = {"ok": ("✓ ", GOOD), "left": ("○ ", SOFT), "bad": ("✕ ", BAD)}
    for row in rows:
        table.add_row(
            *_origin_cells(row, wide, "id", "key", "model", "upstream"),
            Text.assemble(marks[figures.kind_of_ending(row["outcome"])], figures.ending(row["outcome"])),
            time.strftime("%H:%M:%S", time.localtime(row["ended_at"])),
            figures.seconds(row["wait_seconds"]) if "wait_seconds" in row else "-",
            figures.seconds(row["duration_seconds"]) if "duration_seconds" in row else "-",
        )
    return Panel(table, border_style=SOFT)
