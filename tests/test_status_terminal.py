"""The terminal view: what is on the screen, and that it stays on the screen."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rich.console import Console
from rig import eventually
from test_status_snapshot import UNLIMITED, gate, progress, readings, record

from aiogw.admission.readings import EndpointStatistics
from aiogw.record import FINISH, FIRST_BYTE, QUEUE, STREAM
from aiogw.status import figures, terminal
from aiogw.status.history import ENDINGS, SAMPLES, History
from aiogw.status.snapshot import Document, difference, document, merge


def drawn(told: Document, *, silent_seconds: float | None = 0.1, width: int = 120, height: int = 40) -> list[str]:
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
    for part in ("2 of 2", f"{waiting} of 200", "at most 5:00 min", "A newcomer", "refused: queue full"):
        assert part in text
    assert f"end-{ENDINGS - 1}" in text


def three(*, waiting: int, running: int = 3) -> Document:
    """One with a queue, one without a gate that is at work as well, and one that is idle."""
    line = [
        progress(number, STREAM, record(f"run-{number}-", entered_at=91.0, granted_at=92.0))
        for number in range(running)
    ]
    line += [progress(100 + number, QUEUE, record(f"wait-{number}-", entered_at=95.0)) for number in range(waiting)]
    line.append(progress(9999, STREAM, record("free-0-", granted_at=92.0, upstream="free"), upstream="free"))
    history = History()
    for number in range(ENDINGS):
        history.observe(record(f"end-{number}-", ended_at=99.0))
    gates = {
        "idle": gate(slots_in_use=0),
        "gpu": gate(cap=running, slots_in_use=running, waiting=waiting, queue_limit=2000),
        "free": UNLIMITED,
    }
    place_seconds = dict.fromkeys(gates, 4.0)
    return document(
        readings(gates=gates, place_seconds=place_seconds, progress=line, endings=history.endings), most_in_line=50
    )


@pytest.mark.parametrize(("width", "height"), [(80, 20), (80, 24), (120, 45), (160, 60)])
@pytest.mark.parametrize("waiting", [0, 9, 1073])
def test_room_goes_to_requests(width: int, height: int, waiting: int) -> None:
    """Of several upstreams: who runs, who waits and what has ended, before an idle one has more than a line."""
    lines = drawn(three(waiting=waiting), width=width, height=height)
    assert len(lines) <= height
    text = "\n".join(lines)
    shown = {kind: text.count(f"{kind}-") for kind in ("run", "wait", "free", "end")}
    assert "idle" in text
    assert shown["end"] >= 1
    assert shown["run"] >= 1 or "At work  3 more" in text or "no room for" in text
    if height >= 24:
        assert shown["run"] >= 1
        assert shown["wait"] >= min(1, waiting)
    assert (shown["wait"] < waiting) == (f" {waiting - shown['wait']} more" in text or "no room for" in text)
    assert f"and {ENDINGS - shown['end']} more" in text
    if shown["wait"] < min(waiting, 50) or shown["end"] < ENDINGS:
        assert len(lines) >= height - 2, "there is room for more"
    if height == 60 and waiting == 9:
        assert {"run": 3, "wait": 9, "free": 1} == {kind: shown[kind] for kind in ("run", "wait", "free")}


@pytest.mark.parametrize("height", range(4, 60))
def test_it_never_takes_more_lines_than_there_are(height: int) -> None:
    """However many upstreams there are; what is not shown is counted."""
    names = [f"up-{number}" for number in range(12)]
    gates = {name: gate(slots_in_use=0) for name in names} | {"wide": gate(cap=2000)}
    told = document(readings(gates=gates, place_seconds=dict.fromkeys(gates, 1.0)))
    lines = drawn(told, width=80, height=height)
    assert len(lines) <= height
    text = "\n".join(lines)
    shown = text.count("up-") + text.count("wide")
    assert shown == 13 or f"and {13 - shown} more upstreams" in text


@pytest.mark.parametrize("width", [80, 100, 120, 150])
def test_no_reason_and_no_time_is_cut_off(width: int) -> None:
    """The longest of each, in the narrowest of terminals: what is cut is an id, which its length tells nothing."""
    history = History()
    outcomes = [*figures.ENDINGS, "too_many_sequences"]
    for number, outcome in enumerate(outcomes):
        history.observe(record(f"{'x' * 100}{number}", arrived_at=-3499.0, outcome=outcome, ended_at=99.0))
    line = [
        progress(number, phase, record("y" * 100, arrived_at=-3499.0, entered_at=95.0, granted_at=96.0))
        for number, phase in enumerate([STREAM, FIRST_BYTE, FINISH])
    ]
    line.append(progress(9, QUEUE, record("z" * 100, arrived_at=-3499.0, entered_at=95.0), deadline_at=225.0))
    gates = {"gpu": gate(waiting=1, refuses="queue_too_slow")}
    told = document(readings(gates=gates, place_seconds={"gpu": 999.0}, progress=line, endings=history.endings))
    text = "\n".join(drawn(told, width=width, height=90))
    for outcome in outcomes:
        assert figures.ending(outcome) in text
    for part in (*figures.PHASES.values(), "59:58 min", "59:59 min", "times out in 2:05 min"):
        assert part in text or part == "waiting"
    assert "is refused: would wait too long" in text


def test_a_sparkline_has_a_scale() -> None:
    """Its highest value and its span; a peak of one sample is not lost where there is less room than samples."""
    samples = {str(number): (2, 12 if number == 7 else 1, 61.0) for number in range(SAMPLES)}
    for width in (80, 200):
        lines = drawn(busy(samples={"gpu": samples}), width=width)
        (queue,) = [line for line in lines if "In the queue" in line]
        assert "max 12 · 5 min" in queue
        assert 1 == queue.count("█")
        assert "max 1:01 min · 5 min" in "\n".join(lines)


def test_an_address_that_is_not_reached_is_told_first() -> None:
    """With a line of its own, and apart from those that are well."""
    endpoints = {
        "a:80": EndpointStatistics(left_out=False, slots=4, slots_in_use=1, unreached_since=95.0),
        "b:80": EndpointStatistics(left_out=True, slots=4, slots_in_use=0),
        "c:80": EndpointStatistics(left_out=False, slots=4, slots_in_use=2),
    }
    lines = drawn(document(readings(gates={"gpu": gate(endpoints=endpoints)})), width=80)
    assert "✕ a:80 not reached since " in lines[2]
    assert "✕ b:80 left out, 0 of 4" in lines[3]
    assert "● c:80 2 of 4" in "\n".join(lines)


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


def test_a_heavy_request_explains_itself() -> None:
    """In its row, and at the upstream whose queue it holds; so do an upstream that leaves and a failed reload."""
    line = [
        progress(1, FIRST_BYTE, record("run", entered_at=91.0, granted_at=92.0, sequences=4)),
        progress(2, QUEUE, record("wait", entered_at=95.0, sequences=3)),
    ]
    gates = {"gpu": gate(cap=6, configured_cap=9, slots_in_use=4, waiting=1)}
    told = document(readings(gates=gates, progress=line, leaving=["gpu"], reload_successful=False))
    text = "\n".join(drawn(told, width=80, height=24))
    for part in (
        "4 of 6  (9 with all endpoints)",
        "before the first byte ×4",
        "1 ×3",
        "needs 3 slots, 2 are free",
        "gpu  leaves: no longer in the configuration",
        "the last reload failed, its configuration is not taken",
    ):
        assert part in text


def test_upstreams_stand_as_they_are_configured() -> None:
    """Also when a change has brought one that stands before the others."""
    before = document(readings(gates={"a": gate(), "b": gate()}, place_seconds={"a": 1.0, "b": 1.0}))
    after = document(readings(gates=dict.fromkeys("cab", gate()), place_seconds=dict.fromkeys("cab", 1.0)))
    merged = merge(before, difference(before, after))
    assert ["c", "a", "b"] == [line[4] for line in drawn(merged, height=60) if line.startswith("╭─  ")]


def test_what_is_old_says_so() -> None:
    """After a silence it is stale, and its ages stand still; a lost connection is told at once."""
    old = "\n".join(drawn(busy(), silent_seconds=60.0))
    assert "nothing heard for 1:00 min, trying again" in old
    assert "live" not in old
    assert "8s" in old
    lost = "\n".join(drawn(busy(), silent_seconds=None))
    assert "connection lost, trying again; as of " in lost
    assert "live" not in lost
    assert "8s" in lost
    assert "shutting down" in "\n".join(drawn(busy(draining=True)))


def test_before_the_first_word() -> None:
    """It is connecting, and says nothing of a gateway that it has yet to hear; only then that it does not answer."""
    assert "connecting" in "\n".join(drawn({}))
    for silent_seconds in (None, 60.0):
        assert "the gateway does not answer" in "\n".join(drawn({}, silent_seconds=silent_seconds))


async def test_a_lost_connection_is_shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the gateway's last word stays, as old; until it is heard again."""
    seen: list[tuple[bool, bool]] = []
    go_on = asyncio.Event()

    def view(told: Document, silent_seconds: float | None, **_: int) -> str:
        seen.append((bool(told), silent_seconds is None))
        go_on.set()
        return ""

    async def documents() -> AsyncIterator[Document | None]:
        for one in (None, busy(), None, busy()):
            await go_on.wait()
            go_on.clear()
            yield one
        await asyncio.Event().wait()

    monkeypatch.setattr(terminal, "view", view)
    monkeypatch.setattr(terminal, "REFRESH_SECONDS", 0.01)
    watching = asyncio.create_task(terminal.watch(documents(), Console(file=io.StringIO(), force_terminal=True)))
    expected = [(False, False), (False, True), (True, False), (True, True), (True, False)]
    await eventually(lambda: [one for one, _ in itertools.groupby(seen)] == expected, what=lambda: repr(seen))
    watching.cancel()
    await asyncio.wait([watching], timeout=10)


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
