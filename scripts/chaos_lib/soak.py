"""Chaos for as long as wanted, in rounds; after each the gateway is looked at, and at last it must not have grown."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import attrs
from attrs import define

from chaos_lib.plan import simple
from chaos_lib.run import ChaosRun, Options

COUNTED = (str(Path(__file__).with_name("counted.py")),)

ROUND_REQUESTS = 1000
# Until then caches, pools and the allocator's arenas take what they keep.
WARM_UP_SHARE = 1 / 3
WARM_UP_AT_MOST_SECONDS = 600
# So many readings of the memory at either end stand for it: one alone has what a round left by chance.
READINGS = 3
MAX_GROWTH = 0.02
PATIENCE_SECONDS = 5.0


@define
class Reading:
    """The gateway at rest after a round."""

    at_seconds: float
    resident_kib: int
    files: int
    tasks: int


class Soak(ChaosRun):
    """Rounds of chaos for ``minutes``, on one gateway."""

    program = COUNTED

    def __init__(self, options: Options, directory: Path, progress: Callable[[str], None], *, minutes: float) -> None:
        super().__init__(attrs.evolve(options, requests=ROUND_REQUESTS), directory, progress)
        self._seconds = minutes * 60
        self._told = progress
        self._progress = lambda _text: None
        self._faults: dict[str, list[str]] = {name: [] for name in ("gauges", "scrapes", "log", "cap", "upstream")}
        self._total = 0
        self.readings: list[Reading] = []

    async def _measure(self) -> None:
        began = time.monotonic()
        for surface in ("openai", "anthropic"):
            await self._one(simple(ROUND_REQUESTS, surface=surface))
        files_before = await self._settled_files(None)
        tasks_before = await self._gateway.tasks(PATIENCE_SECONDS)
        while (passed := time.monotonic() - began) < self._seconds:
            await self._round()
            files = await self._settled_files(set(files_before.values()))
            tasks = await self._tasks_left(len(tasks_before))
            reading = Reading(time.monotonic() - began, self._gateway.resident_kib()[0], len(files), len(tasks))
            self.readings.append(reading)
            self._look(len(self.readings))
            self._told(
                f"{passed / 60:.1f} of {self._seconds / 60:g} min, {self._total} requests: "
                f"{reading.resident_kib / 1024:.1f} MiB, {reading.files} descriptors, {reading.tasks} tasks"
            )
        self._check_memory()
        more = [name for name in files.values() if name not in files_before.values()]
        self.audit.add("descriptors are those of the start", f"{len(files_before)} before, {len(files)} after", more)
        more = tasks if len(tasks) > len(tasks_before) else []
        self.audit.add("tasks are those of the start", f"{len(tasks_before)} before, {len(tasks)} after", more)
        stuck = self._gateway.close_wait()
        self.audit.add("no socket in CLOSE_WAIT", len(stuck), stuck)
        self.audit.add("all gauges are zero after each round", "", self._faults["gauges"])
        self.audit.add("every scrape agrees with itself", "", self._faults["scrapes"])
        self.audit.add("no error and no traceback in the log", "", self._faults["log"])
        self.audit.add("never more sequences than the cap at the upstream", "", self._faults["cap"])
        self.audit.add("nothing is left at the upstream after a round", "", self._faults["upstream"])
        self.audit.add("no fault of the soak itself", "", self._own_faults)
        seconds = time.monotonic() - began
        self.summary = f"{self._total} requests in {seconds / 60:.1f} minutes, {len(self.readings)} rounds"

    async def _round(self) -> None:
        self._options = attrs.evolve(self._options, seed=self._options.seed + 1)
        self._asked = 0
        self._done = False
        self._results.clear()
        self._scrapes = self._new_scrapes()
        await self._let_loose()
        self._total += self._asked
        deadline = time.monotonic() + PATIENCE_SECONDS
        while left := await self._gauges():
            if time.monotonic() > deadline:
                self._faults["gauges"] += [f"round {len(self.readings) + 1}: {name}" for name in left]
                break

    async def _gauges(self) -> list[str]:
        names = ("aiogw_slots_in_use", "aiogw_slots_settling", "aiogw_queue_requests")
        metrics = await self._gateway.metrics()
        return [f"{name} is {value:g}" for name, value in metrics.items() if name.startswith(names) and value]

    async def _tasks_left(self, expected: int) -> list[str]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            tasks = await self._gateway.tasks(PATIENCE_SECONDS)
            if len(tasks) <= expected or time.monotonic() > deadline:
                return tasks

    def _look(self, number: int) -> None:
        """What this round has shown; its accounts are then closed, because those of an hour would fill the memory."""
        held = [one.request_id for one in self._stub.account if one.ended is None]
        self._faults["upstream"] += [f"round {number}: {name}" for name in held]
        self._faults["cap"] += [f"round {number}: {', '.join(ids)}" for ids in self._stub.over_cap]
        _, bad_lines = self._gateway.read_log()
        self._faults["log"] += bad_lines
        self._gateway.forget_log()
        self._faults["scrapes"] += self._scrapes.faults
        self._stub.account.clear()
        self._stub.over_cap.clear()
        self._clients.left_at_grant.clear()

    def _check_memory(self) -> None:
        warm_at = min(self._seconds * WARM_UP_SHARE, WARM_UP_AT_MOST_SECONDS)
        warm = [reading.resident_kib for reading in self.readings if reading.at_seconds >= warm_at]
        if len(warm) < 2 * READINGS:
            self.audit.add("resident memory", "", [f"only {len(warm)} rounds after the warm-up: run it for longer"])
            return
        before, after = statistics.median(warm[:READINGS]), statistics.median(warm[-READINGS:])
        growth = after / before - 1
        found = (
            f"{before / 1024:.1f} MiB after {warm_at / 60:.1f} minutes, {after / 1024:.1f} at the end: {growth:+.1%}"
        )
        self.audit.add("resident memory", found, [] if growth <= MAX_GROWTH else [f"more than {MAX_GROWTH:.0%}"])
