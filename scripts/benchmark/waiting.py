"""What waiting costs and how exact it is: the gate's two verbs at each depth, the hand-over, the deadline."""

from __future__ import annotations

import asyncio
import math
import random
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import tomli_w

from benchmark.figures import Figure, at_most, exactly, of_programs, p50_and_p99, quantile
from benchmark.load import Answer, Clients, ClosedLoop, Streams, connect_many, request
from benchmark.processes import ROOT, Program
from benchmark.rig import AMPLE_QUEUE, CAP, LEGS, RAMP_SECONDS, Bench, Window

if TYPE_CHECKING:
    from aiogw.admission.gate import Admission, UpstreamGate

HANDOVER_DEPTH = 1000

DEPTHS = (10, 100, 1000, 10_000)
# Time grows with the depth to this power: 1 would be a search through the queue.  Flat is not quite 0, since 10,000
# tickets do not fit into the processor's nearer caches.
FLAT_BETWEEN, FLAT_EXPONENT = (100, 10_000), 0.2
# So many of each verb at each depth in a leg; between the batches the loop runs, since cancelled timers end there.
BATCHES, BATCH = 120, 50
VERBS = {
    "enter": "enter, at the end of the queue",
    "leave": "leave, from the end of the queue",
    "leave_middle": "leave, from its middle",
    "hand_over": "leave, with the slots for the next",
}

DEADLINE_SECONDS = 1.0
# The streams that hold the slots meanwhile keep the gateway at work: 6 of 200 events a second.
WAITERS_PER_SECOND, STREAM_INTERVAL_MS = 150, 5
# Or they end when the first who wait for them have just been refused, and the others are about to be: streams last for
# so many events and one or two intervals more.
RACE_INTERVAL_MS, RACE_EVENTS, RACERS, RACERS_PER_SECOND = 50, 20, 130, 1000
RACES = 3
# Those who wait have other tags than the streams.
FIRST_TAG = 1000
# uvloop's timers count milliseconds.
EARLY_MS = 2


# -- the two verbs --------------------------------------------------------------------------------------------------


async def depth(bench: Bench) -> list[Figure]:
    """What enter and leave take with 10 to 10,000 waiting; the real gate on a real loop, in this process."""
    spent_us: dict[str, dict[int, list[float]]] = {verb: {depth: [] for depth in DEPTHS} for verb in VERBS}
    for leg in range(LEGS):
        for waiting in DEPTHS:
            bench.progress(f"{waiting} wait, {leg + 1} of {LEGS}")
            for verb, each in (await _verbs(waiting)).items():
                spent_us[verb][waiting] += each
    figures = []
    for verb, name in VERBS.items():
        by_depth = spent_us[verb]
        figures += [
            Figure(
                name=f"depth: {name}, {waiting:,} wait, p99",
                unit="µs",
                clock="cpu",
                aiogw=quantile(each, 0.99),
                goals=(at_most(20, issue=4),),
            )
            for waiting, each in by_depth.items()
        ]
        first, last = FLAT_BETWEEN
        growth = quantile(by_depth[last], 0.5) / quantile(by_depth[first], 0.5)
        figures.append(
            Figure(
                name=f"depth: {name}, growth from {first:,} to {last:,}, p50",
                unit="exp",
                clock="cpu",
                aiogw=math.log(growth) / math.log(last / first),
                goals=(at_most(FLAT_EXPONENT, issue=4),),
            )
        )
    return figures


async def _verbs(waiting: int) -> dict[str, list[float]]:
    """Microseconds of this thread's own time for each call of each verb while ``waiting`` wait."""
    gate = _gate(queue_limit=waiting + 1)
    chance = random.Random(waiting)
    holding: list[Admission] = []
    line: list[Admission] = []
    spent: dict[str, list[float]] = {verb: [] for verb in VERBS}

    def timed(verb: str, call: Callable[[], Any]) -> Any:
        began_ns = time.thread_time_ns()
        result = call()
        spent[verb].append((time.thread_time_ns() - began_ns) / 1000)
        return result

    def take(admission: Admission) -> None:
        holding.append(admission)
        if line and line[0] is admission:
            del line[0]

    def refused(error: Exception) -> None:
        raise error

    def enter() -> Admission:
        return gate.enter(1, granted=take, refused=refused)

    # Some have ended, so that there is an estimate to be made at each entry.
    for _ in range(100):
        enter()
        holding.pop().leave()
    for _ in range(CAP):
        enter()
    while len(line) < waiting:
        line.append(enter())
        if len(line) % 1000 == 0:
            await asyncio.sleep(0)
    for _ in range(BATCHES):
        for _ in range(BATCH):
            line.append(timed("enter", enter))
            timed("leave", line.pop().leave)
            timed("leave_middle", line.pop(chance.randrange(len(line) // 4, len(line) // 4 * 3)).leave)
            line.append(enter())
            timed("hand_over", holding.pop(0).leave)
            line.append(enter())
        await asyncio.sleep(0)
    if len(line) != waiting or len(holding) != CAP:
        raise RuntimeError(f"{len(line)} wait and {len(holding)} hold")
    for admission in [*reversed(line), *holding]:
        admission.leave()
    return spent


def _gate(*, queue_limit: int) -> UpstreamGate:
    """The gate as the gateway builds it from the configuration that is shipped."""
    # Here, so that a benchmark of anything else neither needs nor loads it.
    from aiogw import assembly, config
    from aiogw.admission.gate import UpstreamGate

    shipped = tomllib.loads((ROOT / "etc" / "gateway.toml").read_text())
    shipped["upstreams"]["reasoning"]["admission"] |= {
        "engine_slots": CAP + 1,
        "cap": CAP,
        "queue_limit": queue_limit,
        "queue_timeout_seconds": 3600,
    }
    upstream = config.loads(tomli_w.dumps(shipped)).upstreams["reasoning"]
    limits = assembly.limits(upstream)
    return UpstreamGate(loop=asyncio.get_running_loop(), upstream="reasoning", limits=limits)


# -- the hand-over --------------------------------------------------------------------------------------------------


async def handover(bench: Bench) -> list[Figure]:
    """How long a slot stands idle with 1,000 waiting: from the stub's last byte to the next request's first."""
    windows: defaultdict[str, Window] = defaultdict(Window)
    stub_cpu_seconds: defaultdict[str, float] = defaultdict(float)
    stub = bench.stub.program
    async with bench.programs(cap=CAP, queue_limit=AMPLE_QUEUE) as programs:
        for program in bench.turns([stub, *programs]):
            bench.progress(program.name)
            await bench.stub.prepare(hold_ms=20)
            # Six clients that ask the stub again at once: what it and the machine take by themselves.
            count = CAP if program is stub else HANDOVER_DEPTH + CAP
            async with ClosedLoop(program.port, count=count, surfaces=bench.surfaces_of(program)) as load:
                await asyncio.sleep(2 * RAMP_SECONDS)
                cpu_before = stub.cpu_seconds()
                windows[program.name] += await bench.window(program, bench.leg_seconds)
                stub_cpu_seconds[program.name] += stub.cpu_seconds() - cpu_before
                load.forget()
    idle_ms = {name: [us / 1000 for us in each.handovers_us] for name, each in windows.items()}
    direct = {"aiogw": idle_ms.pop(stub.name)}
    del windows[stub.name]
    busy = {name: 100 * stub_cpu_seconds[name] / each.seconds for name, each in windows.items()}
    cpu_us = {name: each.cpu_us_per_request for name, each in windows.items()}
    return [
        *p50_and_p99(f"handover: idle slot at depth {HANDOVER_DEPTH}", "ms", idle_ms, at_most(2, issue=4)),
        *p50_and_p99("handover: the same with nothing between 6 clients and the stub", "ms", direct),
        of_programs("handover: how busy the stub is", "%", "cpu", busy),
        of_programs(f"handover: CPU per request at depth {HANDOVER_DEPTH}", "µs", "cpu", cpu_us),
    ]


# -- the deadline ---------------------------------------------------------------------------------------------------


async def deadline(bench: Bench) -> list[Figure]:
    """A queue time-out of 1 s: how exactly it fires under load, and that nobody is granted a slot after it."""
    errors_ms: defaultdict[str, list[float]] = defaultdict(list)
    raced: Counter[str] = Counter()
    granted: Counter[str] = Counter()
    setting = bench.setting(cap=CAP, queue_limit=AMPLE_QUEUE, queue_timeout_seconds=DEADLINE_SECONDS)
    for _ in range(LEGS):
        for launch in bench.launchers:
            # A fresh process each time: an estimate from what has ended would refuse at entry who is to wait in vain.
            async with launch(setting) as program:
                surfaces = bench.surfaces_of(program)
                bench.progress(f"slots that are not freed, {program.name}")
                await bench.stub.prepare(interval_ms=STREAM_INTERVAL_MS)
                count = int((bench.leg_seconds + 1) * WAITERS_PER_SECOND)
                refused = await _refused_late(program, surfaces, count, WAITERS_PER_SECOND)
                errors_ms[program.name] += refused.values()
                granted[program.name] += await _reached(bench, refused)
                for number in range(RACES):
                    bench.progress(f"slots that are freed just then, {number + 1} of {RACES}, {program.name}")
                    await bench.stub.prepare(interval_ms=RACE_INTERVAL_MS, events=RACE_EVENTS)
                    refused = await _refused_late(program, surfaces, RACERS, RACERS_PER_SECOND)
                    errors_ms[program.name] += refused.values()
                    raced[program.name] += len(refused)
                    granted[program.name] += await _reached(bench, refused)
    late_ms = {name: [abs(error) for error in each] for name, each in errors_ms.items()}
    early = {name: sum(error < -EARLY_MS for error in each) for name, each in errors_ms.items()}
    most_ms = {name: max(each) for name, each in late_ms.items()}
    fired = {name: len(each) for name, each in late_ms.items()}
    goal = at_most(20, issue=4)
    return [
        of_programs("deadline: how many fired", "", "count", fired),
        of_programs("deadline: of these, while slots became free", "", "count", raced),
        *p50_and_p99("deadline: off by, as the client sees it", "ms", late_ms, goal),
        of_programs("deadline: off by, at most", "ms", "wall", most_ms, goal),
        of_programs("deadline: fired too early", "", "count", early, exactly(0, issue=4)),
        of_programs("deadline: granted afterwards", "", "count", granted, exactly(0, issue=4)),
    ]


async def _refused_late(program: Program, surfaces: tuple[str, ...], count: int, per_second: int) -> dict[int, float]:
    """Streams take all slots, then others come: by tag, by how many ms those that were refused missed the deadline."""
    refused: dict[int, float] = {}

    def note(tag: int) -> Callable[[asyncio.Future[Answer]], None]:
        def take(answer: asyncio.Future[Answer]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                told = answer.result()
                # A full queue, or one that is too slow, says so at once.
                if told.status == 503 and told.seconds > DEADLINE_SECONDS / 2:
                    refused[tag] = (told.seconds - DEADLINE_SECONDS) * 1000

        return take

    async with Clients() as clients:
        clients.connections = await connect_many(program.port, min(count, int(per_second * (DEADLINE_SECONDS + 0.5))))
        async with Streams(program.port, count=CAP, surface=surfaces[0]):
            began_at = time.monotonic()
            for index in range(count):
                connection = clients.connections[index % len(clients.connections)]
                if connection.usable and (connection.answer is None or connection.answer.done()):
                    tag = FIRST_TAG + index
                    connection.send(request(surfaces[index % len(surfaces)], tag=tag)).add_done_callback(note(tag))
                await asyncio.sleep(max(0, began_at + (index + 1) / per_second - time.monotonic()))
            await asyncio.sleep(DEADLINE_SECONDS + 0.2)
    return refused


async def _reached(bench: Bench, refused: dict[int, float]) -> int:
    """How many of them the upstream has seen all the same."""
    return len(refused.keys() & set((await bench.stub.account())["order"]))


WAITING: tuple[Callable[[Bench], Coroutine[Any, Any, list[Figure]]], ...] = (depth, handover, deadline)
