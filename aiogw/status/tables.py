"""The tables of the terminal view: their columns, as far as there is room, and their rows, as far as told."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from aiogw.status import figures
from aiogw.status.snapshot import Document

# Columns of a terminal that has room for a model, and for whose request it is and at which API.
WIDE, WIDEST = 120, 150
SOFT, BAD, GOOD = "rgb(140,145,152)", "bold rgb(230,120,70)", "rgb(60,180,150)"
WARN = "rgb(240,180,41)"

# The columns of words, each with the width of a terminal that has room for it; then those of figures, with theirs.  The
# first, which has the name of the table, gets what is left over, and only an id is ever cut.
Columns = tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]
RUNNING: Columns = (
    (("At work", 0), ("Key", WIDEST), ("API", WIDEST), ("Model", WIDE), ("Phase", 0)),
    (("Age", 0), ("Silent", 0), ("Bytes", 90)),
)
WAITING: Columns = (
    (("Waiting", 0), ("Key", WIDEST), ("API", WIDEST), ("Model", WIDE), ("Place", 0)),
    (("Age", 0), ("Estimate", 0)),
)
ENDED: Columns = (
    (("Last endings", 0), ("Key", WIDEST), ("Model", WIDE), ("Upstream", WIDEST), ("Ending", 0)),
    (("At", 0), ("Waited", 90), ("Took", 0)),
)
# The longest of each; a time has up to nine letters, "59:59 min".
FIXED = {"Phase": 24, "Place": 8, "Ending": 30, "At": 8, "Bytes": 7, "Estimate": 22}
TIME_LETTERS = 9


class RowsShown:
    """A table of which there may be room for ``shown`` rows only; ``total`` is how many there really are."""

    def __init__(self, columns: Columns, rows: list[list[Text]], total: int, width: int) -> None:
        self.columns = columns
        self.rows = rows
        self.total = max(total, len(rows))
        self.width = width
        self.shown = 0

    @property
    def lines(self) -> int:
        return self.shown + bool(self.shown) + (self.total > self.shown)

    def drawn(self) -> RenderableType:
        more = f"and {self.total - self.shown} more"
        if not self.shown:
            (name, _), *_ = self.columns[0]
            return Text.assemble((f"{name}  ", "bold"), (more.removeprefix("and "), SOFT), no_wrap=True)
        table = _table(self.columns, self.width)
        for cells in self.rows[: self.shown]:
            table.add_row(*cells)
        return Group(table, *([Text(more, style=SOFT)] if self.total > self.shown else []))


class Endings:
    def __init__(self, rows: list[Document], width: int) -> None:
        self.rows = rows
        self._width = width
        self.shown = min(1, len(rows))

    @property
    def lines(self) -> int:
        return 3 + self.shown if self.shown else 0

    def drawn(self) -> RenderableType:
        table = _table(ENDED, self._width)
        marks = {"ok": ("✓ ", GOOD), "left": ("○ ", SOFT), "bad": ("✕ ", BAD)}
        for row in self.rows[: self.shown]:
            ending = Text.assemble(marks[figures.kind_of_ending(row["outcome"])], figures.ending(row["outcome"]))
            at = time.strftime("%H:%M:%S", time.localtime(row["ended_at"]))
            waited, took = (
                figures.seconds(row[name]) if name in row else "-" for name in ("wait_seconds", "duration_seconds")
            )
            origin = _origin(row, "id", "key", "model", "upstream")
            table.add_row(*_cells(ENDED, self._width, *origin, ending, at, waited, took))
        more = len(self.rows) - self.shown
        told = Text(f" and {more} more ") if more else None
        return Panel(table, border_style=SOFT, subtitle=told, subtitle_align="left")


def _table(columns: Columns, width: int) -> Table:
    words, numbers = columns
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for name, needs in words:
        if width < needs:
            continue
        if name == words[0][0]:
            table.add_column(name, ratio=3, no_wrap=True, overflow="ellipsis", header_style="bold")
        elif name in FIXED:
            table.add_column(name, width=FIXED[name], no_wrap=True, overflow="ellipsis", header_style=SOFT)
        else:
            table.add_column(name, ratio=1, no_wrap=True, overflow="ellipsis", header_style=SOFT)
    for name, needs in numbers:
        if width >= needs:
            letters = FIXED.get(name, TIME_LETTERS)
            table.add_column(name, width=letters, justify="right", no_wrap=True, header_style=SOFT)
    return table


def _cells(columns: Columns, width: int, *values: object) -> list[Text]:
    """Those there is room for, as text, which is never taken for rich's markup."""
    needs = [needs for part in columns for _, needs in part]
    return [
        one if isinstance(one, Text) else Text(figures.plain(one))
        for one, need in zip(values, needs, strict=True)
        if width >= need
    ]


def _origin(row: Document, *names: str) -> list[str]:
    return [row.get(name, "-") for name in names]


def running_cells(row: Document, now: float, width: int) -> list[Text]:
    silent = figures.seconds(now - row["last_byte_at"]) if "last_byte_at" in row else "-"
    age = figures.seconds(now - row["arrived_at"])
    origin = _origin(row, "id", "key", "surface", "model")
    phase = figures.PHASES[row["phase"]] + figures.times_text(row)
    return _cells(RUNNING, width, *origin, phase, age, silent, figures.size(row["bytes"]))


def waiting_cells(one: Document, row: Document, now: float, width: int) -> list[Text]:
    origin, age = _origin(row, "id", "key", "surface", "model"), figures.seconds(now - row["arrived_at"])
    return _cells(
        WAITING,
        width,
        *origin,
        f"{row['position']}{figures.times_text(row)}",
        age,
        figures.estimate_text(one, row, now),
    )
