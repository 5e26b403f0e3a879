"""Whether the slots are kept: how busy, how many, in which order, after whoever left, and when all are taken."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable
from itertools import pairwise

from benchmark.figures import Figure, at_most, exactly, of_programs, p50_and_p99, ratio_at_least
from benchmark.load import Answer, Clients, ClosedLoop, all_begun, connect, connect_many, request
from benchmark.processes import Program
from benchmark.rig import AMPLE_QUEUE, CAP, RAMP_SECONDS, Bench, Window


async def gate(bench: Bench) -> list[Figure]:
    """How busy the slots are kept: 60 closed-loop clients over 6 slots, requests of 20 and of 5 ms."""
    figures = []
    async with bench.programs(cap=CAP, queue_limit=AMPLE_QUEUE, with_peers=True) as programs:
        for hold_ms, goals in (
            (20, (ratio_at_least(0.98, issue=2), ratio_at_least(1, issue=7))),
            (5, (ratio_at_least(1, issue=7),)),
        ):
            windows: defaultdict[str, Window] = defaultdict(Window)
            for program in bench.turns(programs):
                bench.progress(f"{hold_ms} ms requests, {program.name}")
                await bench.stub.prepare(hold_ms=hold_ms)
                async with ClosedLoop(program.port, count=60, surfaces=bench.surfaces_of(program)) as load:
                    await asyncio.sleep(RAMP_SECONDS)
                    windows[program.name] += await bench.window(program, bench.leg_seconds)
                    load.forget()
            # More than 1 of those that do not keep the cap.
            used = {name: each.slot_seconds / (CAP * each.seconds) for name, each in windows.items()}
            cpu_us = {name: each.cpu_us_per_request for name, each in windows.items()}
            most = {name: each.max_in_flight for name, each in windows.items()}
            figures += [
                of_programs(f"gate: slot utilisation, {hold_ms} ms requests", "", "wall", used, *goals),
                of_programs(f"gate: most in flight, {hold_ms} ms requests", "", "count", most, exactly(CAP, issue=2)),
                of_programs(f"gate: CPU per request, {hold_ms} ms requests", "µs", "cpu", cpu_us),
            ]
    return figures


async def order(bench: Bench) -> list[Figure]:
    """Whether who came first goes first: 160 arrivals, 2 ms apart, over 6 slots; all surfaces mixed."""
    arrivals = 160
    sent: Counter[str] = Counter()
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
            sent[program.name] += len(answers)
            reached[program.name] += len(seen)
            inversions[program.name] += sum(later < earlier for earlier, later in pairwise(seen))
    return [
        of_programs("order: inversions", "", "count", inversions, exactly(0, issue=2)),
        of_programs("order: requests that reached the upstream", "", "count", reached, exactly(sent["aiogw"], issue=2)),
    ]


async def cancel(bench: Bench) -> list[Figure]:
    """What leaving does: 20 of 40 leave the queue, then streams are left in the middle, then all slots are there."""
    reached: Counter[str] = Counter()
    usable: dict[str, int] = {}
    aborts_ms: defaultdict[str, list[float]] = defaultdict(list)
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
    refusals_ms: defaultdict[str, list[float]] = defaultdict(list)
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


SLOTS = (gate, order, cancel, full)
