"""What is measured, one function for each scenario: the slots first, then what things cost.

Each starts the programs with the cap and queue it needs, and returns its rows of the table.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from typing import TypeVar

from benchmark.codecs import codecs
from benchmark.figures import (
    Figure,
    Goal,
    at_most,
    exactly,
    of_programs,
    p50_and_p99,
    quantile,
    ratio_at_least,
    ratio_at_most,
)
from benchmark.keys import keys
from benchmark.load import (
    Answer,
    ClientConnection,
    Clients,
    ClosedLoop,
    Streams,
    all_begun,
    connect,
    connect_many,
    request,
)
from benchmark.peers import Program
from benchmark.retries import retries
from benchmark.rig import RAMP_SECONDS, Bench, Window
from benchmark.waiting import WAITING

CAP = 6
MOUNTS = {"openai": "/v1", "anthropic": "/llm"}
AMPLE_QUEUE = 4096

OPEN_CLIENTS = 5000
OPEN_CLIENTS_QUEUE = 64
STARTS = 5
# As if each of them came back after ten seconds.
ARRIVALS_PER_SECOND = 500

Windows = defaultdict[str, Window]
Samples = defaultdict[str, list[float]]
T = TypeVar("T")


def _windows() -> Windows:
    return defaultdict(Window)


def _samples() -> Samples:
    return defaultdict(list)


def _cpu_per_request(name: str, windows: Mapping[str, Window], *goals: Goal) -> Figure:
    return of_programs(name, "µs", "cpu", {key: each.cpu_us_per_request for key, each in windows.items()}, *goals)


# -- the slots ------------------------------------------------------------------------------------------------------


async def gate(bench: Bench) -> list[Figure]:
    """How busy the slots are kept: 60 closed-loop clients over 6 slots, requests of 20 and of 5 ms."""
    figures = []
    async with bench.programs(cap=CAP, queue_limit=AMPLE_QUEUE) as programs:
        for hold_ms, goals in (
            (20, (ratio_at_least(0.98, issue=2), ratio_at_least(1, issue=7))),
            (5, (ratio_at_least(1, issue=7),)),
        ):
            windows = _windows()
            for program in bench.turns(programs):
                bench.progress(f"{hold_ms} ms requests, {program.name}")
                await bench.stub.prepare(hold_ms=hold_ms)
                async with ClosedLoop(program.port, count=60, surfaces=bench.surfaces_of(program)) as load:
                    await asyncio.sleep(RAMP_SECONDS)
                    windows[program.name] += await bench.window(program, bench.leg_seconds)
                    load.forget()
            used = {name: each.slot_seconds / (CAP * each.seconds) for name, each in windows.items()}
            most = {name: each.max_in_flight for name, each in windows.items()}
            figures += [
                of_programs(f"gate: slot utilisation, {hold_ms} ms requests", "", "wall", used, *goals),
                of_programs(f"gate: most in flight, {hold_ms} ms requests", "", "count", most, exactly(CAP, issue=2)),
                _cpu_per_request(f"gate: CPU per request, {hold_ms} ms requests", windows),
            ]
    return figures


async def order(bench: Bench) -> list[Figure]:
    """Whether who came first goes first: 160 arrivals, 2 ms apart, over 6 slots; all surfaces mixed."""
    arrivals = 160
    reached: Counter[str] = Counter()
    inversions: Counter[str] = Counter()
    async with bench.programs(cap=CAP, queue_limit=AMPLE_QUEUE) as programs:
        for program in bench.turns(programs):
            bench.progress(program.name)
            await bench.stub.prepare(hold_ms=40)
            surfaces = bench.surfaces_of(program)
            async with Clients() as clients:
                clients.connections = await connect_many(program.port, arrivals)
                answers = []
                for tag, connection in enumerate(clients.connections):
                    answers.append(connection.send(request(surfaces[tag % len(surfaces)], tag=tag)))
                    # Not by a timetable: after a hiccup of the machine, several would come at once, in no order.
                    await asyncio.sleep(0.002)
                await asyncio.gather(*answers)
            seen = (await bench.stub.account())["order"]
            reached[program.name] += len(seen)
            inversions[program.name] += sum(later < earlier for earlier, later in pairwise(seen))
    return [
        of_programs("order: inversions", "", "count", inversions, exactly(0, issue=2)),
        of_programs("order: requests that reached the upstream", "", "count", reached),
    ]


async def cancel(bench: Bench) -> list[Figure]:
    """What leaving does: 20 of 40 leave the queue, then streams are left in the middle, then all slots are there."""
    reached: Counter[str] = Counter()
    usable: dict[str, int] = {}
    aborts_ms = _samples()
    async with bench.programs(cap=CAP, queue_limit=AMPLE_QUEUE) as programs:
        for program in bench.turns(programs):
            bench.progress(f"clients leave the queue, {program.name}")
            reached[program.name] += await _leave_the_queue(bench, program)
            bench.progress(f"clients leave their streams, {program.name}")
            aborts_ms[program.name] += await _leave_streams(bench, program)
            bench.progress(f"the slots afterwards, {program.name}")
            usable[program.name] = await _slots_usable(bench, program)
    return [
        of_programs("cancel: reached the upstream after leaving the queue", "", "count", reached, exactly(0, issue=2)),
        *p50_and_p99("cancel: abort of a stream seen upstream", "ms", aborts_ms, at_most(5, issue=2)),
        of_programs("cancel: slots usable afterwards", "", "count", usable, exactly(CAP, issue=2)),
    ]


async def _leave_the_queue(bench: Bench, program: Program) -> int:
    """Six run, forty wait, every second of these leaves; how many of those reached the upstream all the same."""
    await bench.stub.prepare(hold_ms=200)
    surfaces = bench.surfaces_of(program)
    async with Clients() as clients:
        clients.connections = await connect_many(program.port, CAP + 40)
        answers = []
        for tag, connection in enumerate(clients.connections):
            answers.append(connection.send(request(surfaces[tag % len(surfaces)], tag=tag)))
            if tag == CAP - 1:
                await asyncio.sleep(0.05)  # so that it is certainly these that run
        await asyncio.sleep(0.05)
        left = set(range(CAP, CAP + 40, 2))
        for tag in left:
            clients.connections[tag].abort()
        await asyncio.gather(*(answer for tag, answer in enumerate(answers) if tag not in left))
    return len(left & set((await bench.stub.account())["order"]))


async def _leave_streams(bench: Bench, program: Program) -> list[float]:
    """Clients leave running streams, six at a time; from each leaving to the upstream's connection closing, in ms."""
    await bench.stub.prepare(interval_ms=20)
    surfaces = bench.surfaces_of(program)
    left_at: dict[int, float] = {}
    for first_tag in range(0, 10 * CAP, CAP):
        async with Clients() as clients:
            clients.connections = await connect_many(program.port, CAP)
            for tag, connection in enumerate(clients.connections, first_tag):
                connection.send(request(surfaces[tag % len(surfaces)], tag=tag, stream=True))
            await all_begun(clients.connections)
            await asyncio.sleep(0.05)
            for tag, connection in enumerate(clients.connections, first_tag):
                left_at[tag] = time.monotonic()
                connection.abort()
        await asyncio.sleep(0.1)
    aborted_at = (await bench.stub.account())["aborted_at"]
    # JSON has made the tags strings.  One that is missing was not aborted within 100 ms: as bad as it gets.
    return [(aborted_at.get(str(tag), left + 0.1) - left) * 1000 for tag, left in left_at.items()]


async def _slots_usable(bench: Bench, program: Program) -> int:
    await bench.stub.prepare(hold_ms=100)
    await asyncio.gather(*await _send_at_once(program, 2 * CAP, bench.surfaces_of(program)))
    return int((await bench.stub.account())["max_in_flight"])


async def full(bench: Bench) -> list[Figure]:
    """Forty at once over 6 slots and 8 places: 14 are answered, the rest is refused at once and told when to come."""
    statuses: defaultdict[str, set[str]] = defaultdict(set)
    told: defaultdict[str, set[str]] = defaultdict(set)
    refusals_ms = _samples()
    async with bench.programs(cap=CAP, queue_limit=8) as programs:
        for program in [*bench.turns(programs), *bench.turns(programs)]:
            bench.progress(program.name)
            await bench.stub.prepare(hold_ms=300)
            answers = await asyncio.gather(*await _send_at_once(program, 40, bench.surfaces_of(program)))
            refused = [answer for answer in answers if answer.status != 200]
            counted = sorted(Counter(answer.status for answer in answers).items())
            statuses[program.name].add(" ".join(f"{count}x{status}" for status, count in counted))
            told[program.name].add(f"{sum('retry-after' in answer.headers for answer in refused)}/{len(refused)}")
            refusals_ms[program.name] += [answer.seconds * 1000 for answer in refused]
    answered = {name: " | ".join(sorted(each)) for name, each in statuses.items()}
    with_header = {name: " | ".join(sorted(each)) for name, each in told.items()}
    return [
        of_programs("full: answers to 40 at once", "", "count", answered, exactly("14x200 26x503", issue=2)),
        of_programs("full: refusals with Retry-After", "", "count", with_header, exactly("26/26", issue=2)),
        *p50_and_p99("full: refusal, connecting included", "ms", refusals_ms, at_most(15, issue=2)),
    ]


async def _send_at_once(program: Program, count: int, surfaces: tuple[str, ...]) -> list[Awaitable[Answer]]:
    """``count`` clients that come at the same time, each on a fresh connection, which is part of what it waits for."""

    async def one(index: int) -> Answer:
        came_at = time.monotonic()
        connection = await connect(program.port)
        try:
            answer = await connection.send(request(surfaces[index % len(surfaces)], tag=index))
            seconds = time.monotonic() - came_at
            return Answer(status=answer.status, headers=answer.headers, body=answer.body, seconds=seconds)
        finally:
            connection.abort()

    return [one(index) for index in range(count)]


async def refusals(bench: Bench) -> list[Figure]:
    """A full queue under 5,000 open clients: what a refusal takes, and whether those who were admitted notice."""
    refusals_ms = _samples()
    quiet_us, loud_us = _samples(), _samples()
    cpu_us = _samples()
    async with bench.programs(cap=CAP, queue_limit=OPEN_CLIENTS_QUEUE) as programs:
        for program in bench.turns(programs):
            bench.progress(f"{OPEN_CLIENTS} clients connect, {program.name}")
            await bench.stub.prepare(hold_ms=20)
            surfaces = bench.surfaces_of(program)
            async with (
                Clients() as others,
                ClosedLoop(program.port, count=CAP + OPEN_CLIENTS_QUEUE, surfaces=surfaces) as load,
            ):
                others.connections = await connect_many(program.port, OPEN_CLIENTS)
                await asyncio.sleep(RAMP_SECONDS)
                load.forget()
                bench.progress(f"they are quiet, {program.name}")
                quiet = await bench.window(program, bench.leg_seconds)
                quiet_us[program.name] += load.late_us
                load.forget()
                bench.progress(f"{ARRIVALS_PER_SECOND} requests/s, {program.name}")
                count = int(ARRIVALS_PER_SECOND * (bench.leg_seconds + 1))
                arrivals = _arrive(others.connections, surfaces, count, refusals_ms[program.name])
                others.tasks.append(asyncio.create_task(arrivals))
                await asyncio.sleep(0.1)
                refused_before = len(refusals_ms[program.name])
                loud = await bench.window(program, bench.leg_seconds)
                refused = len(refusals_ms[program.name]) - refused_before
                loud_us[program.name] += load.late_us
                # The admitted cost what they cost before; what comes on top is the refusals'.
                cpu_seconds = loud.cpu_seconds - quiet.cpu_seconds * loud.seconds / quiet.seconds
                cpu_us[program.name].append(cpu_seconds / refused * 1e6)
    crowd = f"{ARRIVALS_PER_SECOND}/s from {OPEN_CLIENTS} open clients"
    cpu = {name: statistics.mean(each) for name, each in cpu_us.items()}
    slower = {name: quantile(loud_us[name], 0.5) / quantile(quiet_us[name], 0.5) for name in cpu}
    return [
        *p50_and_p99(f"refusals: {crowd}", "ms", refusals_ms, at_most(10, issue=7)),
        of_programs("refusals: CPU for each", "µs", "cpu", cpu),
        of_programs("refusals: latency of the admitted, over quiet", "x", "wall", slower, at_most(1.05, issue=7)),
    ]


async def _arrive(
    connections: list[ClientConnection], surfaces: tuple[str, ...], count: int, refusals_ms: list[float]
) -> None:
    """``count`` requests at a steady rate, each from the next of ``connections``, whatever is answered."""

    def note(answer: asyncio.Future[Answer]) -> None:
        if not answer.cancelled() and answer.exception() is None and answer.result().status == 503:
            refusals_ms.append(answer.result().seconds * 1000)

    requests = [request(surface) for surface in surfaces]
    began_at = time.monotonic()
    for index in range(count):
        connection = connections[index % len(connections)]
        # One that is still in the queue is left alone, as is one whose connection the gateway has closed.
        if connection.usable and (connection.answer is None or connection.answer.done()):
            connection.send(requests[index % len(requests)]).add_done_callback(note)
        await asyncio.sleep(max(0, began_at + index / ARRIVALS_PER_SECOND - time.monotonic()))


# -- what things cost -----------------------------------------------------------------------------------------------


def _on(surface: str, by_key: Mapping[tuple[str, str], T]) -> dict[str, T]:
    """The values of all programs by name: on ``surface``, or of those that have only one, on that."""
    values = {}
    for (name, spoken), value in by_key.items():
        if spoken == surface or (name, surface) not in by_key:
            values[name] = value
    return values


async def stream(bench: Bench) -> list[Figure]:
    """32 streams of 100 events/s: CPU and delay for each event, beside the same streams straight from the stub."""
    windows: defaultdict[tuple[str, str], Window] = defaultdict(Window)
    late_us: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    async with bench.programs(cap=64, queue_limit=AMPLE_QUEUE) as programs:
        for program in bench.turns([bench.stub.program, *programs]):
            for surface in bench.surfaces_of(program):
                bench.progress(f"{surface}, {program.name}")
                key = (program.name, surface)
                await bench.stub.prepare(interval_ms=10)
                async with Streams(program.port, count=32, surface=surface) as streams:
                    await asyncio.sleep(RAMP_SECONDS)
                    streams.late_us.clear()
                    windows[key] += await bench.window(program, bench.leg_seconds)
                    late_us[key] += streams.late_us
                    streams.check()

    figures = []
    for surface in bench.surfaces:
        mount = MOUNTS[surface]
        goals = (ratio_at_most(1.5, issue=2), ratio_at_most(1.25, issue=7)) if surface == "openai" else ()
        cpu_us = {name: each.cpu_us_per_event for name, each in _on(surface, windows).items() if name != "direct"}
        figures.append(of_programs(f"stream: CPU per event, {mount}", "µs", "cpu", cpu_us, *goals))
        for percent in (50, 99):
            whole_us = {name: quantile(each, percent / 100) for name, each in _on(surface, late_us).items()}
            direct_us = whole_us.pop("direct")
            added_us = {name: us - direct_us for name, us in whole_us.items()}
            figures.append(of_programs(f"stream: added latency per event, {mount}, p{percent}", "µs", "wall", added_us))
    if len(bench.surfaces) == 2:
        over = {
            name: each.cpu_us_per_event / windows[name, "openai"].cpu_us_per_event
            for (name, surface), each in windows.items()
            if surface == "anthropic"
        }
        goals = (at_most(2, issue=3), at_most(2, issue=7))
        figures.append(of_programs("stream: CPU per translated event over relayed", "x", "cpu", over, *goals))
    return figures


async def whole(bench: Bench) -> list[Figure]:
    """32 closed-loop clients, requests of 1 KiB and an upstream that answers at once: CPU for each."""
    windows: defaultdict[tuple[str, str], Window] = defaultdict(Window)
    async with bench.programs(cap=64, queue_limit=AMPLE_QUEUE) as programs:
        for program in bench.turns(programs):
            for surface in bench.surfaces_of(program):
                bench.progress(f"{surface}, {program.name}")
                windows[program.name, surface] += await _closed_loop(bench, program, surface, count=32, body_bytes=1024)
    figures = []
    for surface in bench.surfaces:
        mount = MOUNTS[surface]
        goals = (at_most(350, issue=2), *([at_most(230, issue=7)] if surface == "openai" else []))
        both = _on(surface, windows)
        rate = {name: each.completed / each.seconds for name, each in both.items()}
        figures += [
            _cpu_per_request(f"whole: CPU per 1 KiB request, {mount}", both, *goals),
            of_programs(f"whole: requests per second, {mount}", "1/s", "wall", rate),
        ]
    return figures


async def prompt(bench: Bench) -> list[Figure]:
    """Prompts of 1 MB on /v1, one after the other: CPU for each."""
    windows = _windows()
    async with bench.programs(cap=CAP, queue_limit=AMPLE_QUEUE) as programs:
        for program in bench.turns(programs):
            bench.progress(program.name)
            windows[program.name] += await _closed_loop(bench, program, "openai", count=2, body_bytes=1_000_000)
    return [_cpu_per_request("prompt: CPU per 1 MB request, /v1", windows, at_most(1500, issue=7))]


async def _closed_loop(bench: Bench, program: Program, surface: str, *, count: int, body_bytes: int) -> Window:
    """An upstream that answers at once; every answer has to be a 200."""
    await bench.stub.prepare(hold_ms=0)
    async with ClosedLoop(program.port, count=count, surfaces=[surface], body_bytes=body_bytes) as load:
        await asyncio.sleep(RAMP_SECONDS)
        load.forget()
        window = await bench.window(program, bench.leg_seconds)
        if set(load.statuses) != {200}:
            raise ConnectionError(f"{program.name} answered {dict(load.statuses)}")
        return window


async def memory(bench: Bench) -> list[Figure]:
    """Resident memory for each of 1,000 requests of 16 KiB that wait; a fresh process for each surface."""
    waiters, body_bytes = 1000, 16 * 1024
    kib: dict[tuple[str, str], float] = {}
    for surface in bench.surfaces:
        async with bench.programs(cap=CAP, queue_limit=AMPLE_QUEUE) as programs:
            for program in programs:
                if surface not in program.speaks:
                    continue
                bench.progress(f"{waiters} wait, {surface}, {program.name}")
                await bench.stub.prepare(hold_ms=30_000)
                idle_kib = program.resident_kib()
                async with Clients() as clients:
                    clients.connections = await connect_many(program.port, CAP + waiters)
                    for tag, connection in enumerate(clients.connections):
                        connection.send(request(surface, tag=tag, body_bytes=body_bytes))
                    await asyncio.sleep(1.5)
                    waiting_kib = program.resident_kib()
                    if any(connection.answer.done() for connection in clients.connections if connection.answer):
                        raise ConnectionError(f"{program.name} did not let all of them wait")
                kib[program.name, surface] = (waiting_kib - idle_kib) / waiters
    goals = (at_most(34, issue=2), at_most(1.2 * 16 + 12, issue=7))
    return [
        of_programs(f"memory: waiting 16 KiB request, {MOUNTS[surface]}", "KiB", "count", _on(surface, kib), *goals)
        for surface in bench.surfaces
    ]


async def start(bench: Bench) -> list[Figure]:
    """From starting the process to /readyz saying 200, and what the idle process then takes."""
    ready_ms = _samples()
    cpu_ms = _samples()
    resident_mib = _samples()
    setting = bench.setting(cap=CAP, queue_limit=AMPLE_QUEUE)
    for _ in range(STARTS):
        for launch in bench.launchers:
            began_at = time.monotonic()
            async with launch(setting) as program:
                name = program.name
                bench.progress(name)
                ready_ms[name].append((time.monotonic() - began_at) * 1000)
                cpu_ms[name].append(program.cpu_seconds() * 1000)
                await asyncio.sleep(0.3)
                resident_mib[name].append(program.resident_kib() / 1024)
    ready, cpu, resident = (
        {name: statistics.median(each) for name, each in samples.items()}
        for samples in (ready_ms, cpu_ms, resident_mib)
    )
    return [
        of_programs(f"start: until ready, median of {STARTS}", "ms", "wall", ready, at_most(600, issue=7)),
        of_programs("start: CPU until ready", "ms", "cpu", cpu),
        of_programs("start: resident when idle", "MiB", "count", resident, at_most(45, issue=7)),
    ]


SCENARIOS: dict[str, Callable[[Bench], Awaitable[list[Figure]]]] = {
    scenario.__name__: scenario
    for scenario in (
        gate,
        order,
        cancel,
        full,
        refusals,
        *WAITING,
        stream,
        whole,
        prompt,
        memory,
        start,
        codecs,
        retries,
        keys,
    )
}
