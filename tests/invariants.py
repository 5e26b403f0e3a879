"""What must hold of a daemon after whatever has happened to it, looked at from outside.

The daemon has to be scripts/chaos_lib/counted.py, which tells its tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from rig import Daemon, eventually

COUNTED_DAEMON = (str(Path(__file__).parents[1] / "scripts" / "chaos_lib" / "counted.py"),)

CLOSE_WAIT = "08"
GAUGES = ("aiogw_slots_in_use", "aiogw_slots_settling", "aiogw_queue_requests", "aiogw_queue_oldest_wait_seconds")


class Invariants:
    """As many tasks and descriptors as there were at first, no slot held, nobody waiting, no error in the log."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._tasks = 0
        self._files = 0
        self._lines_seen = 0

    async def learn(self) -> None:
        """How it is now, at rest and with nobody connected, is how it is to be."""
        await self.at_rest()
        # What was closed a moment ago may not be gone; what comes and goes is not more than what stays.
        self._files = await _lowest(lambda: self._daemon.open_files)
        self._tasks = min([len(await tasks(self._daemon)) for _ in range(3)])

    async def at_rest(self) -> None:
        """Wait until the gate is empty, whoever is still connected."""
        await eventually(self._gate_empty, what="slots in use, settling, and queue at zero")

    async def hold(self) -> None:
        """Wait until nothing is left, then look at the log; nobody may be connected."""
        await self.at_rest()
        await eventually(self._files_closed, what=lambda: f"{self._files} descriptors: {self._open_files()}")
        await eventually(lambda: not close_wait(self._daemon.pid), what="no socket in CLOSE_WAIT")
        left: list[str] = []

        async def few() -> bool:
            left[:] = await tasks(self._daemon)
            return len(left) <= self._tasks

        await eventually(few, what=lambda: f"{self._tasks} tasks: {left}")
        self.check_log()

    def check_log(self) -> None:
        """What was logged since the last look."""
        lines = self._daemon.lines[self._lines_seen :]
        self._lines_seen += len(lines)
        assert [] == [line for line in lines if not is_fine(line)]

    async def _gate_empty(self) -> bool:
        metrics = await self._daemon.metrics()
        return not any(value for (name, _), value in metrics.items() if name in GAUGES)

    def _files_closed(self) -> bool:
        return self._daemon.open_files <= self._files

    def _open_files(self) -> str:
        return ", ".join(open_files(self._daemon.pid))


async def _lowest(count: Callable[[], int]) -> int:
    """The least of several looks, until a tenth of a second has brought none that is less."""
    least, until = count(), time.monotonic() + 0.1
    while time.monotonic() < until:
        await asyncio.sleep(0.005)
        now = count()
        if now < least:
            least, until = now, time.monotonic() + 0.1
    return least


async def tasks(daemon: Daemon) -> list[str]:
    """What the daemon's tasks run, as it tells when it is asked."""
    before = len(daemon.lines)
    daemon.signal(signal.SIGUSR1)

    def told() -> re.Match[str] | None:
        found = (re.search(r'"tasks \d+: ([^"]*)"', line) for line in daemon.lines[before:])
        return next((one for one in found if one), None)

    return (await eventually(told, what="its tasks"))[1].split(", ")


def is_fine(line: str) -> bool:
    """Whether a healthy gateway may write this line: of the log's own form, no error, and without a traceback."""
    try:
        told = json.loads(line)
        return told["level"] in ("debug", "info", "warning") and "exception" not in told
    except (ValueError, KeyError, TypeError):
        return False


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process stand for."""
    names = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(path))
    return names


def close_wait(pid: int) -> list[str]:
    """The sockets whose peer has closed and which the process has not: the addresses of their peers."""
    inodes = {name.removeprefix("socket:[").removesuffix("]") for name in open_files(pid)}
    fields = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [each[2] for each in fields if each[3] == CLOSE_WAIT and each[9] in inodes]
