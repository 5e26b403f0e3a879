"""The live view in a terminal: the same document as on the page, drawn with what a terminal has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.styled import Styled
from rich.text import Text

from aiogw.record import FINISH, FIRST_BYTE, QUEUE, STREAM
from aiogw.status import figures
from aiogw.status.history import SAMPLES
from aiogw.status.snapshot import Document
from aiogw.status.tables import (
    BAD,
    GOOD,
    RUNNING,
    SOFT,
    WAITING,
    WARN,
    WIDE,
    Endings,
    RowsShown,
    running_cells,
    waiting_cells,
)

REFRESH_SECONDS = 0.25
STALE_SECONDS = 6.0
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
# An upstream takes one of these: a line, its drawing and that line, all of its figures, and these with room to breathe.
LINE, BRIEF, FULL, AIRY = range(4)
# So many rows of a table are worth more than figures and air, and so many endings more than further rows.
FEW_ROWS, SOME_ROWS, SOME_ENDINGS = 1, 6, 4
# Of the slots; what is beyond them is a number.
MOST_SLOT_LINES = 4


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
    rows = [row for _, row in sorted(told["requests"].items(), key=lambda item: int(item[0]))]
    head = [_head(told, silent_seconds, stale)]
    if not told["reload_successful"]:
        head.append(Text(f" {figures.RELOAD_FAILED}", style=BAD, no_wrap=True, overflow="ellipsis"))
    sections = [
        _Section(name, one, [row for row in rows if row["upstream"] == name], now, width)
        # A change says what is new, and not in which order.
        for name, one in sorted(told["upstreams"].items(), key=lambda item: item[1]["rank"])
    ]
    endings = Endings([row for _, row in sorted(told["endings"].items(), key=lambda item: -int(item[0]))], width)
    room = height - len(head) - endings.lines
    shown = sections
    if room < sum(section.lines for section in sections):
        shown = sections[: max(0, room - 1)]
        while shown and sum(section.lines for section in shown) > room - 1:
            shown.pop()
    left_out = len(sections) - len(shown)
    _hand_out(shown, endings, height - len(head) - bool(left_out))
    parts: list[RenderableType] = [section.drawn() for section in shown]
    if left_out:
        parts.append(Text(f" and {left_out} more upstreams", style=SOFT))
    if endings.rows:
        parts.append(endings.drawn())
    group: RenderableType = Group(*parts)
    return Group(*head, Styled(group, "dim") if stale else group)


def _hand_out(sections: list[_Section], endings: Endings, height: int) -> None:
    """Give the lines that are left to whom they say most; all begin with the least."""

    def left() -> int:
        return height - endings.lines - sum(section.lines for section in sections)

    def raise_to(level: int, among: list[_Section]) -> None:
        for section in among:
            before, section.level = section.level, level
            if left() < 0:
                section.level = before

    def add_rows(most: int) -> None:
        tables = [table for section in sections if section.level > LINE for table in section.tables]
        while tables:
            for table in list(tables):
                before = table.shown
                # The last one takes the line of the remark that there are more.
                table.shown += 1
                if table.shown > min(most, len(table.rows)) or left() < 0:
                    table.shown = before
                    tables.remove(table)

    def add_endings(most: int) -> None:
        endings.shown = max(endings.shown, min(most, len(endings.rows), endings.shown + left()))

    busy = [section for section in sections if section.busy]
    raise_to(BRIEF, busy)
    add_rows(FEW_ROWS)
    raise_to(FULL, busy)
    add_endings(SOME_ENDINGS)
    add_rows(SOME_ROWS)
    raise_to(AIRY, busy)
    add_rows(max((len(table.rows) for one in busy for table in one.tables), default=0))
    idle = [section for section in sections if not section.busy]
    raise_to(FULL, idle)
    raise_to(AIRY, idle)
    add_endings(len(endings.rows))


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


class _Section:
    """One upstream, in as many lines as its ``level`` and the rows of its tables take."""

    def __init__(self, name: str, one: Document, rows: list[Document], now: float, width: int) -> None:
        waiting = [row for row in rows if row["phase"] == QUEUE]
        running = [row for row in rows if row["phase"] != QUEUE]
        self._name, self._one = figures.plain(name), one
        self._leaves = f"  {figures.LEAVES}" if "leaving" in one else ""
        self._width = width
        self._bad = [
            Text(f"✕ {figures.plain(address)} {figures.endpoint_text(at, now)}", style=BAD, no_wrap=True)
            for address, at in one["endpoints"].items()
            if not at["up"]
        ]
        self._well = [
            Text.assemble((" ●", GOOD), (f" {figures.plain(address)} {figures.endpoint_text(at, now)} ", SOFT))
            for address, at in one["endpoints"].items()
            if at["up"]
        ]
        self._slots = _slots(one, running, now, width) if "cap" in one or one["slots_in_use"] else []
        self._queue = _queue(one, waiting, now, width) if one.get("queue_limit") or one["waiting"] else None
        self._figures = _figures(one, now, width)
        lists = [
            RowsShown(RUNNING, [running_cells(row, now, width) for row in running], len(running), width),
            RowsShown(WAITING, [waiting_cells(one, row, now, width) for row in waiting], one["waiting"], width),
        ]
        self.tables = [table for table in lists if table.total]
        self.busy = bool(self.tables or self._bad or one["slots_in_use"] or one["slots_settling"])
        self.level = LINE

    @property
    def lines(self) -> int:
        return sum(lines for _, lines in self._parts()) + (0 if self.level == LINE else 2)

    def _parts(self) -> list[tuple[RenderableType, int]]:
        """What is drawn, each with its lines."""
        if self.level == LINE:
            mark = (" ✕ ", BAD) if self._bad else (" ● ", GOOD)
            text = Text.assemble(
                mark, (self._name, "bold"), (self._leaves, WARN), "  ", no_wrap=True, overflow="ellipsis"
            )
            if self.tables:
                requests = sum(table.total for table in self.tables)
                text.append(f"no room for {requests} request{'s' * (requests > 1)}, ", style=SOFT)
            text.append_text(self._brief())
            return [(line, 1) for line in (text, *(Text("   ").append_text(bad) for bad in self._bad))]
        air: list[tuple[RenderableType, int]] = [(Text(""), 1)] if self.level == AIRY else []
        gap: list[tuple[RenderableType, int]] = [(Text(""), 1)] if self.level >= FULL else []
        parts: list[tuple[RenderableType, int]] = [(line, 1) for line in (*self._bad, *self._slots)]
        if self._queue:
            parts += [*(air if self._slots else []), (self._queue, 1)]
        if parts:
            parts += gap
        parts += [(line, 1) for line in (self._figures if self.level >= FULL else [self._brief()])]
        for table in self.tables:
            parts += [*gap, (table.drawn(), table.lines)]
        return parts

    def _brief(self) -> Text:
        one = self._one
        text = Text(f"{figures.slots_text(one)} slots in use", style=SOFT, no_wrap=True, overflow="ellipsis")
        if "cap" in one:
            text.append(f", {figures.queue_text(one)} waiting, a newcomer ")
            text.append(figures.newcomer_text(one), style="bold" if figures.serves(one) else BAD)
        return text

    def drawn(self) -> RenderableType:
        shown = Group(*(part for part, _ in self._parts()))
        if self.level == LINE:
            return shown
        return Panel(
            shown,
            title=Text.assemble(" ", (self._name, "bold"), (self._leaves, WARN), " "),
            title_align="left",
            subtitle=Text("  ").join(self._well),
            subtitle_align="right",
            border_style=SOFT,
        )


def _slots(one: Document, running: list[Document], now: float, width: int) -> list[Text]:
    """A cell for each slot, with the time it has been held; a mark for each where that is too many for a line."""
    cells: list[tuple[str, str]] = []
    for row in running:
        if row["phase"] != FINISH and row["sequences"]:
            held = figures.short_seconds(now - row["granted_at"])
            cells += [(held, row["phase"])] + [("⋯", row["phase"])] * (row["sequences"] - 1)
    cells += [("", "settling")] * one["slots_settling"]
    cells += [("", "free")] * (one.get("cap", 0) - len(cells))
    room = width - 4 - len("Slots  ")
    if 6 * len(cells) <= room:
        text = Text("Slots  ", style=SOFT, no_wrap=True)
        for held, kind in cells:
            text.append(f"{held:^5}" if held else MARKS[kind] * 5, style=STYLES[kind]).append(" ")
        return [text]
    lines = []
    for start in range(0, min(len(cells), MOST_SLOT_LINES * room), room):
        text = Text("       " if start else "Slots  ", style=SOFT, no_wrap=True)
        for _, kind in cells[start : start + room]:
            text.append(MARKS[kind], style=MARK_STYLES[kind])
        lines.append(text)
    if len(cells) > MOST_SLOT_LINES * room:
        lines.append(Text(f"       and {len(cells) - MOST_SLOT_LINES * room} more", style=SOFT, no_wrap=True))
    return lines


def _queue(one: Document, waiting: list[Document], now: float, width: int) -> Text:
    text = Text("Queue  ", style=SOFT, no_wrap=True, overflow="ellipsis")
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
VALUE_LETTERS, WIDE_VALUE_LETTERS, SCALE_LETTERS = 43, 56, 28


def _figures(one: Document, now: float, width: int) -> list[Text]:
    samples = [sample for _, sample in sorted(one["history"].items(), key=lambda item: int(item[0]))]
    slots, queue, oldest = zip(*samples, strict=True) if samples else ((), (), ())
    lines: list[Text] = []
    letters = VALUE_LETTERS if width < WIDE else WIDE_VALUE_LETTERS

    def line(name: str, value: str, more: str = "", *bars: Text, style: str = "bold") -> None:
        text = Text.assemble((f"{name:14}", SOFT), (value, style), (f"  {more}" if more else "", SOFT), no_wrap=True)
        text.truncate(width - 4, overflow="ellipsis")
        if bars:
            text.pad_right(max(0, letters - text.cell_len))
        lines.append(text.append_text(Text("").join(bars)))

    def spark(values: Sequence[float], at_least: float, *write: Callable[[float], str]) -> Text:
        drawn = _bars(values, at_least, max(8, min(60, width - letters - SCALE_LETTERS)))
        return Text.assemble((drawn, "rgb(60,150,220)"), (f"  {figures.scale_text(values, *write)}", SOFT))

    line("Slots in use", figures.slots_text(one), figures.slots_more(one), spark(slots, one.get("cap", 1)))
    if "cap" in one:
        full = BAD if one["newcomer"] == "queue_full" else "bold"
        line("In the queue", figures.queue_text(one), figures.limit_text(one), spark(queue, 1), style=full)
        wait = figures.seconds(now - one["waiting_since"]) if "waiting_since" in one else "nobody waits"
        line("Oldest wait", wait, "", spark(oldest, 1, figures.seconds))
        if needs := figures.next_text(one):
            line("Next in line", needs, style=WARN)
        line("A newcomer", figures.newcomer_text(one), style="bold" if figures.serves(one) else BAD)
        line("Last 5 min", figures.waits_text(one), style=SOFT)
    return lines


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
