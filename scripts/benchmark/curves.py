"""What things cost as the work grows, and with which power: those who wait, streams, sizes of events and prompts."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from attrs import evolve

from benchmark.figures import Curve, Figure, Goal, at_most, exponent, of_programs
from benchmark.load import ClosedLoop, Streams, connect, request
from benchmark.processes import Program
from benchmark.rig import AMPLE_QUEUE, CAP, MOUNTS, RAMP_SECONDS, Bench, Window, on_surface

DEPTHS = (10, 100, 1000, 10_000)
DEPTH_HOLD_MS = 5
# A gateway takes at least so many newcomers a second.
NEWCOMERS_PER_SECOND = 2500

STREAMS = (1, 10, 100, 1000)
# Of all streams together, evenly in time, however many they are.
EVENTS_PER_SECOND = 1000

EVENT_BYTES = (100, 1000, 10_000, 100_000, 1_000_000)
EVENT_STREAMS = 8
# Small events at the first rate, large ones as many as are so many bytes.
SIZED_EVENTS_PER_SECOND, SIZED_BYTES_PER_SECOND = 2000, 50_000_000

PROMPT_BYTES = (1000, 10_000, 100_000, 1_000_000, 10_000_000, 32_000_000)
PROMPTS_AT_LEAST = 2

# From here on what each byte costs is most of it.
LINEAR_FROM_BYTES = 100_000

# Cost grows with the size to this power: 0 is flat, 1 is linear; the rest is for caches and noise.
FLAT, LINEAR = at_most(0.2, issue=7), at_most(1.1, issue=7)

# A point of a curve needs less exactness than a figure.
SHARE_OF_LEG = 0.5
# In less than this there may be no event at all.
WINDOW_AT_LEAST_SECONDS = 0.3

Costs = dict[tuple[str, str], dict[int, float]]
Windows = defaultdict[tuple[str, str], defaultdict[int, Window]]


def _windows() -> Windows:
    return defaultdict(lambda: defaultdict(Window))


async def grow_depth(bench: Bench) -> list[Figure]:
    """CPU for each hand-over while 10 to 10,000 wait, their requests' coming and going included."""
    windows = _windows()
    # Ten thousand that come at once take so long that nobody is served meanwhile, and the first estimate is of hours.
    async with bench.programs(cap=CAP, queue_limit=2 * max(DEPTHS), queue_timeout_seconds=3600) as programs:
        for waiting in DEPTHS:
            for program in bench.turns(programs):
                bench.progress(f"{waiting} wait, {program.name}")
                await bench.stub.prepare(hold_ms=DEPTH_HOLD_MS)
                surfaces = bench.surfaces_of(program)
                async with ClosedLoop(program.port, count=waiting + CAP, surfaces=surfaces) as load:
                    await asyncio.sleep(RAMP_SECONDS + waiting / NEWCOMERS_PER_SECOND)
                    load.forget()
                    windows[program.name, "openai"][waiting] += await _window(bench, program)
                    if set(load.statuses) != {200}:
                        raise ConnectionError(f"{program.name} answered {dict(load.statuses)}")
    costs = _each(windows, "cpu_us_per_request")
    curve = _curve("grow_depth", "A hand-over, by depth of the queue", "requests that wait", "µs of CPU", costs)
    return _figures(curve, "CPU per hand-over", "{:,} wait", costs, ("openai",), FLAT, mounts=False)


async def grow_streams(bench: Bench) -> list[Figure]:
    """CPU for each event of 1 to 1,000 streams that have 1,000 events a second together."""
    windows = _windows()
    async with bench.programs(cap=max(STREAMS), queue_limit=AMPLE_QUEUE) as programs:
        for count in STREAMS:
            for program in bench.turns(programs):
                for surface in bench.surfaces_of(program):
                    bench.progress(f"{count} streams, {surface}, {program.name}")
                    interval_seconds = count / EVENTS_PER_SECOND
                    await bench.stub.prepare(interval_ms=interval_seconds * 1000, engines=count)
                    windows[program.name, surface][count] += await _stream_window(
                        bench, program, surface, count, interval_seconds
                    )
    costs = _each(windows, "cpu_us_per_event")
    title = f"An event, by number of streams, {EVENTS_PER_SECOND:,} events/s in all"
    curve = _curve("grow_streams", title, "streams", "µs of CPU", costs)
    return _figures(curve, "CPU per event", "{:,} streams", costs, bench.surfaces, FLAT)


async def grow_events(bench: Bench) -> list[Figure]:
    """CPU for each event of 100 bytes to 1 MB, 8 streams."""
    windows = _windows()
    async with bench.programs(cap=EVENT_STREAMS, queue_limit=AMPLE_QUEUE) as programs:
        for size in EVENT_BYTES:
            for program in bench.turns(programs):
                for surface in bench.surfaces_of(program):
                    bench.progress(f"{size} bytes, {surface}, {program.name}")
                    per_second = min(SIZED_EVENTS_PER_SECOND, SIZED_BYTES_PER_SECOND / size)
                    interval_seconds = EVENT_STREAMS / per_second
                    await bench.stub.prepare(
                        interval_ms=interval_seconds * 1000, engines=EVENT_STREAMS, event_bytes=size
                    )
                    windows[program.name, surface][size] += await _stream_window(
                        bench, program, surface, EVENT_STREAMS, interval_seconds
                    )
    costs = _each(windows, "cpu_us_per_event")
    curve = _curve("grow_events", "An event, by its size", "bytes", "µs of CPU", costs)
    return [
        *_figures(curve, "CPU per event", "{:,} bytes", costs, bench.surfaces),
        *_linear_part(curve.name, "event", costs, bench.surfaces),
    ]


async def grow_prompts(bench: Bench) -> list[Figure]:
    """CPU for each request with a prompt of 1 KB to 32 MB, one after the other."""
    windows = _windows()
    async with bench.programs(cap=CAP, queue_limit=AMPLE_QUEUE) as programs:
        for size in PROMPT_BYTES:
            for program in bench.turns(programs):
                for surface in bench.surfaces_of(program):
                    bench.progress(f"{size} bytes, {surface}, {program.name}")
                    await bench.stub.prepare()
                    windows[program.name, surface][size] += await _one_by_one(
                        program, request(surface, body_bytes=size), bench.leg_seconds * SHARE_OF_LEG
                    )
    costs = _each(windows, "cpu_us_per_request")
    curve = _curve("grow_prompts", "A request, by the size of its prompt", "bytes", "µs of CPU", costs)
    return [
        *_figures(curve, "CPU per request", "{:,} bytes", costs, bench.surfaces),
        *_linear_part(curve.name, "prompt", costs, bench.surfaces),
    ]


async def _window(bench: Bench, program: Program, streams: Streams | None = None) -> Window:
    return await bench.window(program, max(WINDOW_AT_LEAST_SECONDS, bench.leg_seconds * SHARE_OF_LEG), streams)


async def _stream_window(bench: Bench, program: Program, surface: str, count: int, interval_seconds: float) -> Window:
    async with Streams(program.port, count=count, surface=surface) as streams:
        # The first event comes within two intervals.
        await asyncio.sleep(RAMP_SECONDS + 2 * interval_seconds)
        return await _window(bench, program, streams)


async def _one_by_one(program: Program, request_bytes: bytes, seconds: float) -> Window:
    """One request after the other for ``seconds``, the last of them whole; two at the least."""
    connection = await connect(program.port)
    completed = 0
    began_at, cpu_before = time.monotonic(), program.cpu_seconds()
    while completed < PROMPTS_AT_LEAST or time.monotonic() < began_at + seconds:
        answer = await connection.send(request_bytes)
        if answer.status != 200:
            raise ConnectionError(f"{program.name} answered {answer.status}: {answer.body[:200]!r}")
        completed += 1
    window = Window(
        seconds=time.monotonic() - began_at, cpu_seconds=program.cpu_seconds() - cpu_before, completed=completed
    )
    connection.abort()
    return window


# -- what is told of them -------------------------------------------------------------------------------------------


def _each(windows: Windows, cost: str) -> Costs:
    return {key: {size: getattr(window, cost) for size, window in by_size.items()} for key, by_size in windows.items()}


def _curve(name: str, title: str, size: str, cost: str, costs: Costs) -> Curve:
    """A line for each program, and for each surface of those that have more than one."""
    surfaces = defaultdict(list)
    for program, surface in costs:
        surfaces[program].append(surface)
    lines = {
        program if len(surfaces[program]) == 1 else f"{program} {MOUNTS[surface]}": by_size
        for (program, surface), by_size in costs.items()
    }
    return Curve(name=name, title=title, size=size, cost=cost, lines=lines)


def _figures(
    curve: Curve,
    what: str,
    sized: str,
    costs: Costs,
    surfaces: Sequence[str],
    *goals: Goal,
    mounts: bool = True,
) -> list[Figure]:
    """A row for each size, and one for the exponent over all of them, on each surface."""
    figures = []
    for surface in surfaces:
        here = on_surface(surface, costs)
        where = f", {MOUNTS[surface]}" if mounts else ""
        sizes = list(here["aiogw"])
        for size in sizes:
            values = {name: by_size[size] for name, by_size in here.items()}
            figures.append(of_programs(f"{curve.name}: {what}, {sized.format(size)}{where}", "µs", "cpu", values))
        slopes = {name: exponent(by_size) for name, by_size in here.items()}
        growth = f"{curve.name}: exponent, {sized.format(sizes[0])} to {sized.format(sizes[-1])}{where}"
        figures.append(of_programs(growth, "exp", "cpu", slopes, *goals))
    # The curve is one for all surfaces.
    return [*figures[:-1], evolve(figures[-1], curve=curve)]


def _linear_part(name: str, what: str, costs: Costs, surfaces: Sequence[str]) -> list[Figure]:
    figures = []
    for surface in surfaces:
        here = {
            program: {size: cost for size, cost in by_size.items() if size >= LINEAR_FROM_BYTES}
            for program, by_size in on_surface(surface, costs).items()
        }
        where = f"from {LINEAR_FROM_BYTES:,} bytes on, {MOUNTS[surface]}"
        slopes = {program: exponent(by_size) for program, by_size in here.items()}
        per_byte = {program: _per_byte_ns(by_size) for program, by_size in here.items()}
        figures += [
            of_programs(f"{name}: exponent {where}", "exp", "cpu", slopes, LINEAR),
            of_programs(f"{name}: CPU per byte of the {what}, {where}", "ns", "cpu", per_byte),
        ]
    return figures


def _per_byte_ns(costs_us: Mapping[int, float]) -> float | None:
    """What the bytes between the smallest and the largest have cost."""
    if len(costs_us) < 2:
        return None
    first, last = min(costs_us), max(costs_us)
    return (costs_us[last] - costs_us[first]) / (last - first) * 1000


CURVES = (grow_depth, grow_streams, grow_events, grow_prompts)
