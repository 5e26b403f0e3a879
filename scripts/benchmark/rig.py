"""What every scenario measures with: the stub's account, the programs in turn, and windows of steady load."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any, Self, TypeVar

from attrs import field, frozen

from benchmark.load import ClientConnection, Streams, connect, post, request
from benchmark.processes import Launcher, Program, Setting

# The slots that are fought for, and a queue that never fills.
CAP, AMPLE_QUEUE = 6, 4096
MOUNTS = {"openai": "/v1", "anthropic": "/llm"}

# Each figure is taken in so many legs, the programs in turn, so that a busy moment does not hit one of them alone.
LEGS = 2
WARM_UP_REQUESTS = 50
# Longer than anybody waits where the time-out itself is not what is measured.
QUEUE_TIMEOUT_SECONDS = 60
# How long a load runs before a window begins: connections are made, the queue has filled.
RAMP_SECONDS = 0.4
# How long requests that were left behind may take to end before the next measurement.
QUIET_POLL_SECONDS, QUIET_POLLS = 0.02, 750
# Of what the upstream wrote, so much has to arrive, and so soon after a window: a program that keeps events back or
# loses them is not cheap.
ARRIVING_SHARE, ARRIVING_SECONDS = 0.95, 1.0

T = TypeVar("T")


class StubControl:
    """The stub upstream, told what to do over a connection of its own."""

    def __init__(self, program: Program, connection: ClientConnection) -> None:
        self.program = program
        self._connection = connection

    async def prepare(
        self,
        *,
        hold_ms: float = 0,
        interval_ms: float = 10,
        events: int = 1_000_000,
        engines: int = 10,
        event_bytes: int = 0,
    ) -> None:
        """Behave like this from now on, and forget what was; the requests of before have to be over first."""
        order = {
            "hold_ms": hold_ms,
            "interval_ms": interval_ms,
            "events": events,
            "engines": engines,
            "event_bytes": event_bytes,
        }
        for _ in range(QUIET_POLLS):
            # One question and not two, between which a request could begin.
            if not (await self._ask("/__prepare", order))["in_flight"]:
                return
            await asyncio.sleep(QUIET_POLL_SECONDS)
        raise TimeoutError("requests of the measurement before did not end")

    async def account(self) -> dict[str, Any]:
        return await self._ask("/__account", {})

    async def _ask(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        answer = await self._connection.send(post(path, json.dumps(document).encode()))
        told: dict[str, Any] = json.loads(answer.body)
        return told


@frozen(kw_only=True)
class Window:
    """What happened while a load was steady; windows of several legs add up."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    slot_seconds: float = 0.0
    completed: int = 0
    events: int = 0
    max_in_flight: int = 0
    handovers_us: list[float] = field(factory=list)

    def __add__(self, other: Self) -> Window:
        return Window(
            seconds=self.seconds + other.seconds,
            cpu_seconds=self.cpu_seconds + other.cpu_seconds,
            slot_seconds=self.slot_seconds + other.slot_seconds,
            completed=self.completed + other.completed,
            events=self.events + other.events,
            max_in_flight=max(self.max_in_flight, other.max_in_flight),
            handovers_us=self.handovers_us + other.handovers_us,
        )

    @property
    def cpu_us_per_request(self) -> float:
        if not self.completed:
            raise ValueError("no request was completed while it was measured")
        return self.cpu_seconds / self.completed * 1e6

    @property
    def cpu_us_per_event(self) -> float:
        if not self.events:
            raise ValueError("the upstream wrote no event while it was measured")
        return self.cpu_seconds / self.events * 1e6


@frozen(kw_only=True)
class Bench:
    """One run: what was asked for, and what it is measured with.

    ``launchers`` are of the programs that all is asked of, the gateway first; ``peers`` take part in a few scenarios.
    ``notes``: what whoever reads the figures has to be told beside them.
    """

    seconds: float
    surfaces: tuple[str, ...]
    launchers: tuple[Launcher, ...]
    peers: tuple[Launcher, ...] = ()
    directory: Path
    stub: StubControl
    progress: Callable[[str], None]
    notes: list[str] = field(factory=list)

    @property
    def leg_seconds(self) -> float:
        return self.seconds / LEGS

    def turns(self, programs: Sequence[Program]) -> Iterator[Program]:
        """There and back, so that a machine that slows down bit by bit does the same to all of them."""
        for leg in range(LEGS):
            yield from programs if leg % 2 == 0 else reversed(programs)

    def surfaces_of(self, program: Program) -> tuple[str, ...]:
        """The surfaces to ask ``program`` in: what was asked for, of what it speaks."""
        return tuple(name for name in self.surfaces if name in program.speaks) or program.speaks

    def setting(self, *, cap: int, queue_limit: int, queue_timeout_seconds: float = QUEUE_TIMEOUT_SECONDS) -> Setting:
        return Setting(
            cap=cap,
            queue_limit=queue_limit,
            queue_timeout_seconds=queue_timeout_seconds,
            upstream_port=self.stub.program.port,
            directory=self.directory,
        )

    @asynccontextmanager
    async def programs(
        self,
        *,
        cap: int,
        queue_limit: int,
        queue_timeout_seconds: float = QUEUE_TIMEOUT_SECONDS,
        with_peers: bool = False,
    ) -> AsyncIterator[list[Program]]:
        """The gateway and what it is compared with: fresh processes with this cap and queue, warmed up.

        A daemon has mostly been running for a while: what is loaded or built with the first request of a kind is not
        what a figure should be of.
        """
        setting = self.setting(cap=cap, queue_limit=queue_limit, queue_timeout_seconds=queue_timeout_seconds)
        launchers = self.launchers + (self.peers if with_peers else ())
        async with AsyncExitStack() as stack:
            programs = [await stack.enter_async_context(launch(setting)) for launch in launchers]
            await self.stub.prepare()
            for program in programs:
                for surface in program.speaks:
                    await self._warm_up(program, surface)
            # Clients that stop for 20 ms and more to look for garbage would be what is measured.
            gc.collect()
            gc.disable()
            try:
                yield programs
            finally:
                gc.enable()

    @staticmethod
    async def _warm_up(program: Program, surface: str) -> None:
        connection = await connect(program.port)
        for _ in range(WARM_UP_REQUESTS):
            answer = await connection.send(request(surface))
            if answer.status != 200:
                said = shorten(answer.body.decode(errors="replace"), 200, placeholder=" ...")
                raise ConnectionError(f"{program.name} answered {answer.status} on {MOUNTS[surface]}: {said}")
        connection.abort()

    async def try_out(self, launch: Launcher) -> None:
        """Start it and ask it once in all that it speaks; raises ProgramFailed or OSError."""
        async with launch(self.setting(cap=CAP, queue_limit=AMPLE_QUEUE)) as program:
            for surface in program.speaks:
                await self._warm_up(program, surface)

    async def window(self, program: Program, seconds: float, streams: Streams | None = None) -> Window:
        """Let the load that is on run for ``seconds``, and say what came of it; raises if ``streams`` lack events."""
        before = await self.stub.account()
        cpu_before = program.cpu_seconds()
        await asyncio.sleep(seconds)
        cpu_after = program.cpu_seconds()
        after = await self.stub.account()
        if streams is not None:
            streams.check()
            await self._arrived(program, streams, before, after)
        return Window(
            seconds=after["now"] - before["now"],
            cpu_seconds=cpu_after - cpu_before,
            slot_seconds=after["busy_seconds"] - before["busy_seconds"],
            completed=after["completed"] - before["completed"],
            events=after["events"] - before["events"],
            max_in_flight=after["max_in_flight"],
            handovers_us=after["handovers_us"][len(before["handovers_us"]) :],
        )

    @staticmethod
    async def _arrived(program: Program, streams: Streams, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Wait until clients have what was written between two accounts."""
        written = after["events"] - before["events"]
        give_up_at = time.monotonic() + ARRIVING_SECONDS
        while (received := streams.received(before["now"], after["now"])) < ARRIVING_SHARE * written:
            if time.monotonic() > give_up_at:
                raise ConnectionError(
                    f"clients of {program.name} had received {received:,} of {written:,} events that the upstream "
                    f"wrote, {ARRIVING_SECONDS:g} s after the last of them"
                )
            await asyncio.sleep(0.01)


def on_surface(surface: str, by_key: Mapping[tuple[str, str], T]) -> dict[str, T]:
    """Of what is known by program and surface, all programs on ``surface``; who has only one, on that."""
    return {
        name: value for (name, spoken), value in by_key.items() if spoken == surface or (name, surface) not in by_key
    }
