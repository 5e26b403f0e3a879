"""What very many clients at once cost: those who are refused, those who wait, and those who are told that they wait."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

from benchmark.figures import Figure, at_least, at_most, of_programs, p50_and_p99, quantile
from benchmark.gateways import Gateway, body_memory_bytes
from benchmark.load import (
    REFUSED_PAUSE_SECONDS,
    Answer,
    ClientConnection,
    Clients,
    ClosedLoop,
    all_begun,
    connect,
    connect_many,
    request,
)
from benchmark.processes import Program
from benchmark.rig import AMPLE_QUEUE, CAP, MOUNTS, RAMP_SECONDS, Bench, on_surface

OPEN_CLIENTS = 5000
OPEN_CLIENTS_QUEUE = 64
# As if each of them came back after ten seconds.
ARRIVALS_PER_SECOND = 500
WAITERS, LARGE_WAITERS = 1000, 100
# How long the gateway has to take all of them in, which it tells; and how long those have that do not.
TAKE_IN_SECONDS, TAKEN_IN_SHARE, SETTLE_SECONDS = 30.0, 0.95, 1.5
# One sign_interval_seconds, as it is shipped.
SIGNS_SECONDS = 10
# Whoever waits hears something in each interval.
SIGNS_SHARE = 0.9


async def refusals(bench: Bench) -> list[Figure]:
    """A full queue under 5,000 open clients: what a refusal takes, and whether those who were admitted notice."""
    refusals_ms: defaultdict[str, list[float]] = defaultdict(list)
    quiet_us: defaultdict[str, list[float]] = defaultdict(list)
    loud_us: defaultdict[str, list[float]] = defaultdict(list)
    cpu_us: defaultdict[str, list[float]] = defaultdict(list)
    per_second: defaultdict[str, list[float]] = defaultdict(list)
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
                refused_before = len(refusals_ms[program.name]) + load.statuses[503]
                loud = await bench.window(program, bench.leg_seconds)
                # Who is in the loop has lost places to those who come, and asks again after a moment.
                refused = len(refusals_ms[program.name]) + load.statuses[503] - refused_before
                loud_us[program.name] += load.late_us
                # The admitted cost what they cost before; what comes on top is the refusals'.
                cpu_seconds = loud.cpu_seconds - quiet.cpu_seconds * loud.seconds / quiet.seconds
                if not refused:
                    raise ConnectionError(f"{program.name} refused nobody while {ARRIVALS_PER_SECOND}/s came on top")
                cpu_us[program.name].append(cpu_seconds / refused * 1e6)
                per_second[program.name].append(refused / loud.seconds)
    crowd = f"{ARRIVALS_PER_SECOND}/s from {OPEN_CLIENTS} open clients"
    cpu = {name: statistics.mean(each) for name, each in cpu_us.items()}
    for name in cpu:
        if not (quiet_us[name] and loud_us[name]):
            raise ConnectionError(f"{name} admitted nobody while it was measured")
    slower = {
        share: {name: quantile(loud_us[name], share) / quantile(quiet_us[name], share) for name in cpu}
        for share in (0.5, 0.99)
    }
    bench.notes.append(
        f"refusals: {ARRIVALS_PER_SECOND}/s come on top of {CAP + OPEN_CLIENTS_QUEUE} clients that ask again at once, "
        f"or {REFUSED_PAUSE_SECONDS * 1000:.0f} ms after a refusal: so the programs differ in how many they refuse"
    )
    back = "refusals: way back of the admitted"
    return [
        *p50_and_p99(f"refusals: {crowd}", "ms", refusals_ms, at_most(10, issue=7)),
        of_programs(
            "refusals: 503s written meanwhile, to all clients",
            "1/s",
            "count",
            {name: statistics.mean(each) for name, each in per_second.items()},
        ),
        of_programs("refusals: CPU per refusal, on top of the admitted's", "µs", "cpu", cpu),
        of_programs(f"{back}, p50, over quiet", "x", "wall", slower[0.5], at_most(1.05, issue=7)),
        of_programs(f"{back}, p99, over quiet", "x", "wall", slower[0.99]),
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


async def memory(bench: Bench) -> list[Figure]:
    """Resident memory for each of 1,000 requests of 16 KiB that wait; a fresh process for each surface."""
    kib: dict[tuple[str, str], float] = {}
    for surface in bench.surfaces:
        for name, each in (await _waiting_kib(bench, surface, WAITERS, body_bytes=16 * 1024)).items():
            kib[name, surface] = each
    goals = (at_most(34, issue=2), at_most(1.2 * 16 + 12, issue=7))
    return [
        of_programs(
            f"memory: waiting 16 KiB request, {MOUNTS[surface]}", "KiB", "count", on_surface(surface, kib), *goals
        )
        for surface in bench.surfaces
    ]


async def large(bench: Bench) -> list[Figure]:
    """Resident memory for each of 100 requests of 1 MB that wait on /v1, over what one body takes."""
    kib = await _waiting_kib(bench, "openai", LARGE_WAITERS, body_bytes=1_000_000)
    copies = {name: each * 1024 / 1_000_000 for name, each in kib.items()}
    return [of_programs("large: waiting 1 MB request over its body, /v1", "x", "count", copies, at_most(1.2, issue=7))]


async def _waiting_kib(bench: Bench, surface: str, waiters: int, *, body_bytes: int) -> dict[str, float]:
    """What a process grows by when ``waiters`` wait, for each of them: all programs that speak ``surface``, fresh."""
    kib = {}
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
                await _all_taken_in(program, waiters * body_bytes)
                waiting_kib = program.resident_kib()
                if any(connection.answer.done() for connection in clients.connections if connection.answer):
                    raise ConnectionError(f"{program.name} did not let all of them wait")
            kib[program.name] = (waiting_kib - idle_kib) / waiters
    return kib


async def _all_taken_in(program: Program, all_bytes: int) -> None:
    """Wait until ``program`` holds the bodies: what it has not read takes no memory of it."""
    if (held_bytes := await body_memory_bytes(program)) is None:
        if program.name == "aiogw":
            raise ConnectionError(
                "the gateway's /metrics has no aiogw_body_memory_bytes, so nobody knows what it holds"
            )
        await asyncio.sleep(SETTLE_SECONDS)
        return
    give_up_at = time.monotonic() + TAKE_IN_SECONDS
    before_bytes = -1.0
    # Until nothing is added any more, for the last of them to be in as well.
    while held_bytes < TAKEN_IN_SHARE * all_bytes or held_bytes != before_bytes:
        if time.monotonic() > give_up_at:
            raise ConnectionError(
                f"{program.name} held {held_bytes / 1e6:.1f} MB of bodies and not {all_bytes / 1e6:.1f} MB "
                f"{TAKE_IN_SECONDS:g} s after they were sent"
            )
        await asyncio.sleep(0.2)
        before_bytes, held_bytes = held_bytes, await body_memory_bytes(program) or 0.0


async def signs(bench: Bench) -> list[Figure]:
    """5,000 streams of 1 KiB wait and are told so, every ten seconds as shipped: what the whole process then takes."""
    mib: dict[str, float] = {}
    busy: dict[str, float] = {}
    per_second: dict[str, float] = {}
    setting = bench.setting(cap=CAP, queue_limit=OPEN_CLIENTS)
    for launch in bench.launchers:
        if not isinstance(launch, Gateway):
            continue  # no other says anything
        async with launch(setting) as program:
            await bench.stub.prepare(interval_ms=1000)
            bench.progress(f"{OPEN_CLIENTS} wait, {program.name}")
            heard = [0] * (CAP + OPEN_CLIENTS)
            async with Clients() as clients:
                for tag in range(CAP + OPEN_CLIENTS):
                    clients.connections.append(await connect(program.port, _counting(heard, tag)))
                for tag, connection in enumerate(clients.connections):
                    surface = bench.surfaces[tag % len(bench.surfaces)]
                    connection.send(request(surface, tag=tag, stream=True, body_bytes=1024))
                await all_begun(clients.connections)
                # All have heard something once, soon after each other, and hear the next one an interval later: half
                # an interval from now is not when they do, so that none of them falls on an end of what is counted.
                await asyncio.sleep(SIGNS_SECONDS / 2)
                before, cpu_before, began_at = sum(heard), program.cpu_seconds(), time.monotonic()
                await asyncio.sleep(SIGNS_SECONDS)
                seconds = time.monotonic() - began_at
                busy[program.name] = 100 * (program.cpu_seconds() - cpu_before) / seconds
                per_second[program.name] = (sum(heard) - before) / seconds
                mib[program.name] = program.resident_kib() / 1024
    crowd = f"{OPEN_CLIENTS} wait"
    told = SIGNS_SHARE * OPEN_CLIENTS / SIGNS_SECONDS
    return [
        of_programs(f"signs: resident while {crowd}", "MiB", "count", mib, at_most(200, issue=7)),
        of_programs(f"signs: CPU while {crowd}, of a core", "%", "cpu", busy, at_most(15, issue=7)),
        of_programs("signs: pieces received by clients", "1/s", "count", per_second, at_least(told, issue=7)),
    ]


def _counting(heard: list[int], tag: int) -> Callable[[bytes], None]:
    def take(_: bytes) -> None:
        heard[tag] += 1

    return take


CROWD = (refusals, memory, large, signs)
