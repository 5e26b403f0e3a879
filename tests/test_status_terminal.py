"""The terminal view: what is on the screen, and that it stays on the screen."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rich.console import Console
from test_status_snapshot import gate, progress, readings, record

from aiogw.record import QUEUE, STREAM
from aiogw.status import figures, terminal
from aiogw.status.history import ENDINGS, History
from aiogw.status.snapshot import Document, document


def drawn(told: Document, *, silent_seconds: float = 0.1, width: int = 120, height: int = 40) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None, force_terminal=True)
    with console.capture() as capture:
        console.print(terminal.view(told, silent_seconds, width=width, height=height))
    return capture.get().splitlines()


def busy(*, waiting: int = 3, hostile: str = "m", cap: int = 2, **more: Any) -> Document:
    """Two that run, some that wait, and as many endings as are ever told."""
    line = [
        progress(number, STREAM, record(f"run-{number}", entered_at=91.0, granted_at=92.0), last_byte_at=99.0)
        for number in (1, 2)
    ]
    line += [
        progress(3 + number, QUEUE, record(f"wait-{number}", entered_at=95.0, model=hostile))
        for number in range(waiting)
    ]
    history = History()
    for number in range(ENDINGS):
        history.observe(record(f"end-{number}", outcome="queue_full", model=hostile, ended_at=99.0))
    gates = {"gpu": gate(waiting=waiting, queue_limit=200, cap=cap)}
    return document(readings(gates=gates, progress=line, endings=history.endings, **more), most_in_line=50)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (120, 40), (200, 60)])
@pytest.mark.parametrize("waiting", [0, 3, 150])
def test_it_fits(width: int, height: int, waiting: int) -> None:
    """However many wait: the figures, the head of the line, and the last endings are all there."""
    lines = drawn(busy(waiting=waiting), width=width, height=height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    for part in ("2 of 2", f"{waiting} of 200", "A newcomer", f"end-{ENDINGS - 1}", "refused: queue"):
        assert part in text


def test_whoever_waits_is_shown_in_order() -> None:
    """With place and estimate; what has no room is a number."""
    lines = [line for line in drawn(busy(waiting=30), height=40) if "wait-" in line]
    assert lines
    for number, line in enumerate(lines):
        assert f"wait-{number} " in line
        assert f" {number + 1} " in line
        assert f"≈ {figures.seconds(4.0 * (number + 1))} " in line
    assert f"and {30 - len(lines)} more" in "\n".join(drawn(busy(waiting=30), height=40))


def test_more_slots_than_a_line_has_room_for() -> None:
    """Each is a mark then, and none is left out."""
    (line,) = [line for line in drawn(busy(cap=96)) if "Slots " in line and "╌" in line]
    assert (2, 94) == (line.count("■"), line.count("╌"))


def test_what_is_old_says_so() -> None:
    """After a silence it is stale, and its ages stand still; before the first word there is nothing to show."""
    old = "\n".join(drawn(busy(), silent_seconds=60.0))
    assert "stale: nothing heard for 1:00 min" in old
    assert "live" not in old
    assert "8s" in old
    assert "the gateway does not answer" in "\n".join(drawn({}))
    assert "shutting down" in "\n".join(drawn(busy(draining=True)))


def test_nothing_a_client_chose_is_obeyed() -> None:
    """A model's name with escape sequences is shown, and does nothing; nor is it taken for markup."""
    text = "\n".join(drawn(busy(hostile="\x1b[2J[red]x")))
    assert "�[2J[red]x" in text
    assert "\x1b[2J" not in text


async def test_a_cancellation_that_is_swallowed_is_given_again() -> None:
    """aiohttp can take one for a time-out; whoever leaves is let go all the same."""
    swallowed = 0
    listening = asyncio.Event()

    async def documents() -> AsyncIterator[Document]:
        nonlocal swallowed
        yield busy()
        for _ in range(2):
            listening.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            swallowed += 1
        await asyncio.Event().wait()

    watching = asyncio.create_task(terminal.watch(documents(), Console(file=io.StringIO(), force_terminal=True)))
    await listening.wait()
    watching.cancel()
    await asyncio.wait([watching], timeout=10)
    assert watching.cancelled()
    assert swallowed == 2
