"""The live view in a terminal: the same document as on the page, drawn with what a terminal has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from aiogw.record import FINISH, FIRST_BYTE, QUEUE, STREAM
from aiogw.status import figures
from aiogw.status.history import SAMPLES
from aiogw.status.snapshot import Document

REFRESH_SECONDS = 0.25
STALE_SECONDS = 6.0
# Columns of a terminal that has room for a model, and for whose request it is and at which API.
WIDE, WIDEST = 120, 150
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
WARN = "rgb(240,180,41)"
# An upstream without tables, and with what makes it easier on the eye; what an empty table does not cost; then the
# endings, which are never crowded out.
SECTION_LINES, AIRY_LINES = 10, 11
TABLE_LINES = 2
# As much as they need, and at most this, has to be left for tables before anything is spent on air.
TABLE_ROOM = 12
ENDINGS_LINES = 3 + 4


async def watch(documents: AsyncIterator[Document | None], console: Console) -> None:
    """Show what comes until somebody interrupts; None: there is no connection."""
    told: Document = {}
    heard_at: float | None = time.monotonic()

    async def listen() -> None:
        nonlocal told, heard_at
        async for one in documents:
            told, heard_at = (told, None) if one is None else (one, time.monotonic())

    listening = asyncio.create_task(listen())
    try:
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while not listening.done():
                silent_seconds = None if heard_at is None else time.monotonic() - heard_at
                live.update(view(told, silent_seconds, width=console.width, height=console.height), refresh=True)
                await asyncio.wait([listening], timeout=REFRESH_SECONDS)
    finally:
        # Until it has ended: aiohttp can take a cancellation for a time-out, and ``follow`` would only try again.
        while not listening.done():
            listening.cancel()
            await asyncio.wait([listening], timeout=REFRESH_SECONDS)
        if not listening.cancelled():
            listening.result()


def view(told: Document, silent_seconds: float | None, *, width: int, height: int) -> RenderableType:
    """The whole screen; ``silent_seconds`` have passed since ``told`` came, None: the connection is lost."""
    stale = silent_seconds is None or silent_seconds > STALE_SECONDS
    if not told:
        if stale:
            return Text(" aiogw  ▲ the gateway does not answer; trying again", style=BAD)
        return Text(" aiogw  ◌ connecting", style=SOFT)
    # What is shown of a gateway that has fallen silent is as old as its last word.
    now = told["time"] + (0.0 if silent_seconds is None or stale else silent_seconds)
    parts: list[RenderableType] = []
    bad = sum(not at["up"] for one in told["upstreams"].values() for at in one["endpoints"].values())
    beside = 1 + bad + (ENDINGS_LINES if told["endings"] else 0)
    airy = height - beside - AIRY_LINES * len(told["upstreams"]) >= min(TABLE_ROOM, 2 * len(told["requests"]))
    room = height - beside - (AIRY_LINES if airy else SECTION_LINES) * len(told["upstreams"])
    rows = sorted(told["requests"].items(), key=lambda item: int(item[0]))
    for name, one in told["upstreams"].items():
        ours = [row for _, row in rows if row["upstream"] == name]
        section, used = _upstream(name, one, ours, now, width=width, room=room, airy=airy)
        room -= used
        parts.append(section)
    endings = sorted(told["endings"].items(), key=lambda item: -int(item[0]))
    if endings:
        parts.append(_endings([row for _, row in endings[: max(4, room + 4)]], width=width))
    shown: RenderableType = Group(*parts)
    return Group(_head(told, silent_seconds, stale), Styled(shown, "dim") if stale else shown)


def _head(told: Document, silent_seconds: float | None, stale: bool) -> Text:
    text = Text(" aiogw  ", style="bold", no_wrap=True, overflow="ellipsis")
    if silent_seconds is None:
        as_of = figures.clock(told["time"], time.time())
        text.append(f"▲ connection lost, trying again; as of {as_of}", style=BAD)
    elif stale:
        text.append(f"▲ nothing heard for {figures.seconds(silent_seconds)}, trying again", style=BAD)
    else:
        mark, style, state = ("◐", WARN, " shutting down") if told["draining"] else ("●", GOOD, " live")
        text.append(mark, style=style).append(state, style=SOFT)
    uptime = figures.seconds(told["time"] - told["started_at"])
    text.append(f"   {told['version']}, up {uptime}   Ctrl-C leaves", style=SOFT)
    return text


def _upstream(
    name: str, one: Document, rows: list[Document], now: float, *, width: int, room: int, airy: bool
) -> tuple[RenderableType, int]:
    """The section, and how many lines its tables took of ``room``."""
    waiting = [row for row in rows if row["phase"] == QUEUE]
    running = [row for row in rows if row["phase"] != QUEUE]
    gated = "cap" in one
    parts: list[RenderableType] = [
        Text(f"✕ {address} {figures.endpoint_text(at, now)}", style=BAD, no_wrap=True)
        for address, at in one["endpoints"].items()
        if not at["up"]
    ]
    if gated or one["slots_in_use"]:
        parts += [_slots(one, running, now, width), Text("")]
    if one.get("queue_limit") or one["waiting"]:
        parts += [_queue(one, waiting, now, width), *([Text("")] if airy else [])]
    parts.append(_figures(one, now, width))
    used = 0
    for table, told in (
        (_table(RUNNING, width), [_running_cells(row, now, width) for row in running]),
        (_table(WAITING, width), [_waiting_cells(one, row, now, width) for row in waiting]),
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
    well = [
        Text.assemble((" ●", GOOD), (f" {address} {figures.endpoint_text(at, now)} ", SOFT))
        for address, at in one["endpoints"].items()
        if at["up"]
    ]
    panel = Panel(
        Group(*parts),
        title=Text(f" {figures.plain(name)} ", style="bold"),
        title_align="left",
        subtitle=Text("  ").join(well),
        subtitle_align="right",
        border_style=SOFT,
    )
    return panel, used


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


# What stands before a sparkline, and behind it with the borders.
VALUE_LETTERS, SCALE_LETTERS = 43, 28


def _figures(one: Document, now: float, width: int) -> RenderableType:
    samples = [sample for _, sample in sorted(one["history"].items(), key=lambda item: int(item[0]))]
    slots, queue, oldest = zip(*samples, strict=True) if samples else ((), (), ())
    lines: list[RenderableType] = []

    def line(name: str, value: str, more: str = "", *bars: Text, style: str = "bold") -> None:
        text = Text.assemble((f"{name:14}", SOFT), (value, style), (f"  {more}" if more else "", SOFT))
        text.truncate(width - 4, overflow="ellipsis")
        if bars:
            text.pad_right(max(0, VALUE_LETTERS - text.cell_len))
        lines.append(text.append_text(Text("").join(bars)))

    def spark(values: Sequence[float], at_least: float, *write: Callable[[float], str]) -> Text:
        drawn = _bars(values, at_least, max(8, min(60, width - VALUE_LETTERS - SCALE_LETTERS)))
        return Text.assemble((drawn, "rgb(60,150,220)"), (f"  {figures.scale_text(values, *write)}", SOFT))

    settling = f"{one['slots_settling']} settling" if one["slots_settling"] else ""
    more = settling if "cap" in one else "no limit"
    line("Slots in use", figures.slots_text(one), more, spark(slots, one.get("cap", 1)))
    if "cap" in one:
        full = BAD if one["newcomer"] == "queue_full" else "bold"
        line("In the queue", figures.queue_text(one), figures.limit_text(one), spark(queue, 1), style=full)
        wait = figures.seconds(now - one["waiting_since"]) if "waiting_since" in one else "nobody waits"
        line("Oldest wait", wait, "", spark(oldest, 1, figures.seconds))
        line("A newcomer", figures.newcomer_text(one), style="bold" if figures.serves(one) else BAD)
        line("Last 5 min", figures.waits_text(one), style=SOFT)
    return Group(*lines)


def _bars(values: Sequence[float], at_least: float, width: int) -> str:
    """Five minutes in ``width`` bars, the newest at the right, each as high as the highest of its time."""
    top = max([at_least, *values])
    each = SAMPLES / width
    drawn = []
    for number in range(width):
        from_end = len(values) - SAMPLES
        part = values[max(0, round(from_end + number * each)) : max(0, round(from_end + (number + 1) * each))]
        drawn.append(BARS[min(7, int(8 * max(part) / top))] if part else " ")
    return "".join(drawn)


# The columns of words, each with the width of a terminal that has room for it; then those of figures, with theirs.  The
# first, which has the name of the table, gets what is left over, and only an id is ever cut.
_Columns = tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]
RUNNING: _Columns = (
    (("At work", 0), ("Key", WIDEST), ("API", WIDEST), ("Model", WIDE), ("Phase", 0)),
    (("Age", 0), ("Silent", 0), ("Bytes", 90)),
)
WAITING: _Columns = (
    (("Waiting", 0), ("Key", WIDEST), ("API", WIDEST), ("Model", WIDE), ("Place", 0)),
    (("Age", 0), ("Estimate", 0)),
)
ENDED: _Columns = (
    (("Last endings", 0), ("Key", WIDEST), ("Model", WIDE), ("Upstream", WIDEST), ("Ending", 0)),
    (("At", 0), ("Waited", 90), ("Took", 0)),
)
# The longest of each; a time has up to nine letters, "59:59 min".
FIXED = {"Phase": 21, "Place": 6, "Ending": 30, "At": 8, "Bytes": 7, "Estimate": 22}
TIME_LETTERS = 9


def _table(columns: _Columns, width: int) -> Table:
    words, numbers = columns
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for name, needs in words:
        if width < needs:
            continue
        if name == words[0][0]:
            table.add_column(name, ratio=3, no_wrap=True, overflow="ellipsis", header_style="bold")
        elif name in FIXED:
            table.add_column(name, width=FIXED[name], header_style=SOFT)
        else:
            table.add_column(name, ratio=1, no_wrap=True, overflow="ellipsis", header_style=SOFT)
    for name, needs in numbers:
        if width >= needs:
            letters = FIXED.get(name, TIME_LETTERS)
            table.add_column(name, width=letters, justify="right", no_wrap=True, header_style=SOFT)
    return table


def _cells(columns: _Columns, width: int, *values: object) -> list[Text]:
    """Those there is room for, as text, which is never taken for rich's markup."""
    needs = [needs for part in columns for _, needs in part]
    return [
        one if isinstance(one, Text) else Text(figures.plain(one))
        for one, need in zip(values, needs, strict=True)
        if width >= need
    ]


def _origin(row: Document, *names: str) -> list[str]:
    return [row.get(name, "-") for name in names]


def _running_cells(row: Document, now: float, width: int) -> list[Text]:
    silent = figures.seconds(now - row["last_byte_at"]) if "last_byte_at" in row else "-"
    age = figures.seconds(now - row["arrived_at"])
    origin = _origin(row, "id", "key", "surface", "model")
    return _cells(RUNNING, width, *origin, figures.PHASES[row["phase"]], age, silent, figures.size(row["bytes"]))


def _waiting_cells(one: Document, row: Document, now: float, width: int) -> list[Text]:
    origin, age = _origin(row, "id", "key", "surface", "model"), figures.seconds(now - row["arrived_at"])
    return _cells(WAITING, width, *origin, row["position"], age, figures.estimate_text(one, row, now))


def _endings(rows: list[Document], *, width: int) -> RenderableType:
    table = _table(ENDED, width)
    marks = {"ok": ("✓ ", GOOD), "left": ("○ ", SOFT), "bad": ("✕ ", BAD)}
    for row in rows:
        ending = Text.assemble(marks[figures.kind_of_ending(row["outcome"])], figures.ending(row["outcome"]))
        at = time.strftime("%H:%M:%S", time.localtime(row["ended_at"]))
        waited, took = (
            figures.seconds(row[name]) if name in row else "-" for name in ("wait_seconds", "duration_seconds")
        )
        origin = _origin(row, "id", "key", "model", "upstream")
        table.add_row(*_cells(ENDED, width, *origin, ending, at, waited, took))
    return Panel(table, border_style=SOFT)
