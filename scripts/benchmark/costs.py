"""What one thing costs: an event of a stream, a whole request, a large prompt, a start."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping

from benchmark.figures import (
    CHEAPER_ROUTER,
    DEARER_ROUTER,
    Figure,
    Goal,
    at_most,
    not_measured,
    of_programs,
    quantile,
    ratio_at_most,
)
from benchmark.load import ClosedLoop, Paced, Streams
from benchmark.processes import Program
from benchmark.rig import AMPLE_QUEUE, CAP, MOUNTS, RAMP_SECONDS, Bench, Window, on_surface

STARTS = 5
PACE_PER_SECOND, PACE_SHARE = 1000, 0.95


def _cpu_per_request(name: str, windows: Mapping[str, Window], *goals: Goal) -> Figure:
    return of_programs(name, "µs", "cpu", {key: each.cpu_us_per_request for key, each in windows.items()}, *goals)


async def stream(bench: Bench) -> list[Figure]:
    """32 streams of 100 events/s: CPU and delay for each event, beside the same streams straight from the stub."""
    windows: defaultdict[tuple[str, str], Window] = defaultdict(Window)
    late_us: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    async with bench.programs(cap=64, queue_limit=AMPLE_QUEUE, with_peers=True) as programs:
        for program in bench.turns([bench.stub.program, *programs]):
            for surface in bench.surfaces_of(program):
                bench.progress(f"{surface}, {program.name}")
                key = (program.name, surface)
                await bench.stub.prepare(interval_ms=10)
                async with Streams(program.port, count=32, surface=surface) as streams:
                    await asyncio.sleep(RAMP_SECONDS)
                    streams.late_us.clear()
                    windows[key] += await bench.window(program, bench.leg_seconds, streams)
                    late_us[key] += streams.late_us

    figures = []
    for surface in bench.surfaces:
        mount = MOUNTS[surface]
        relayed = surface == "openai"
        below_routers = ratio_at_most(1, of=CHEAPER_ROUTER, issue=7)
        goals = [ratio_at_most(1.5, issue=2), ratio_at_most(1.25, issue=7), below_routers]
        windows_here = on_surface(surface, windows)
        del windows_here["direct"]
        cpu_us = {name: each.cpu_us_per_event for name, each in windows_here.items()}
        figures.append(of_programs(f"stream: CPU per event, {mount}", "µs", "cpu", cpu_us, *goals * relayed))
        for percent in (50, 99):
            whole_us = {name: quantile(each, percent / 100) for name, each in on_surface(surface, late_us).items()}
            direct_us = whole_us.pop("direct")
            added_us = {name: max(0, us - direct_us) for name, us in whole_us.items()}
            if 0 in added_us.values():
                bench.notes.append(
                    "stream: an added latency of 0 is below what this run can tell; no goal is held against it"
                )
            name = f"stream: added latency per event, {mount}, p{percent}"
            figures.append(of_programs(name, "µs", "wall", added_us, *[below_routers] * relayed))
    if len(bench.surfaces) == 2:
        over = {
            name: each.cpu_us_per_event / windows[name, "openai"].cpu_us_per_event
            for (name, surface), each in windows.items()
            if surface == "anthropic"
        }
        figures.append(
            of_programs(
                "stream: CPU per translated event over relayed",
                "x",
                "cpu",
                over,
                at_most(2, issue=3),
                at_most(2, issue=7),
            )
        )
    return figures


async def whole(bench: Bench) -> list[Figure]:
    """Requests of 1 KiB and an upstream that answers at once: from 32 clients without a pause, and 1,000 a second."""
    # Who is asked without a pause finds more to do in each turn the faster it is, which makes each cheaper.
    windows: defaultdict[tuple[str, str], Window] = defaultdict(Window)
    paced: defaultdict[tuple[str, str], Window] = defaultdict(Window)
    async with bench.programs(cap=64, queue_limit=AMPLE_QUEUE, with_peers=True) as programs:
        for program in bench.turns(programs):
            for surface in bench.surfaces_of(program):
                bench.progress(f"{surface}, {program.name}")
                windows[program.name, surface] += await _closed_loop(bench, program, surface, count=32, body_bytes=1024)
                paced[program.name, surface] += await _at_a_pace(bench, program, surface)
    figures = []
    for surface in bench.surfaces:
        mount = MOUNTS[surface]
        goals = [at_most(350, issue=2)]
        if surface == "openai":
            goals += [at_most(230, issue=7), ratio_at_most(1, of=DEARER_ROUTER, issue=7)]
        windows_here = on_surface(surface, windows)
        rate = {name: each.completed / each.seconds for name, each in windows_here.items()}
        figures += [
            _cpu_per_request(f"whole: CPU per 1 KiB request, {mount}", windows_here, *goals),
            of_programs(f"whole: requests per second, {mount}", "1/s", "wall", rate),
            _cpu_at_a_pace(bench, mount, on_surface(surface, paced), *goals[2:]),
        ]
    return figures


def _cpu_at_a_pace(bench: Bench, mount: str, windows: Mapping[str, Window], *goals: Goal) -> Figure:
    """Of those that kept the pace: with fewer requests, each of them costs something else."""
    name = f"whole: CPU per 1 KiB request at {PACE_PER_SECOND:,}/s, {mount}"
    slow = {
        program: f"{program} managed {rate:,.0f} of {PACE_PER_SECOND:,} requests/s"
        for program, window in windows.items()
        if (rate := window.completed / window.seconds) < PACE_SHARE * PACE_PER_SECOND
    }
    if "aiogw" in slow:
        return not_measured(name, slow["aiogw"])
    bench.notes.extend(f"{name}: {said}, so it has no figure" for said in slow.values())
    cpu_us = {program: None if program in slow else each.cpu_us_per_request for program, each in windows.items()}
    return of_programs(name, "µs", "cpu", cpu_us, *goals)


async def _at_a_pace(bench: Bench, program: Program, surface: str) -> Window:
    await bench.stub.prepare()
    async with Paced(program.port, count=32, surface=surface, per_second=PACE_PER_SECOND, body_bytes=1024) as load:
        await asyncio.sleep(RAMP_SECONDS)
        window = await bench.window(program, bench.leg_seconds)
        load.check()
        return window


async def prompt(bench: Bench) -> list[Figure]:
    """Prompts of 1 MB on /v1, one after the other: CPU for each."""
    windows: defaultdict[str, Window] = defaultdict(Window)
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


async def start(bench: Bench) -> list[Figure]:
    """From starting the process to /readyz saying 200, and what the idle process then takes."""
    ready_ms: defaultdict[str, list[float]] = defaultdict(list)
    cpu_ms: defaultdict[str, list[float]] = defaultdict(list)
    resident_mib: defaultdict[str, list[float]] = defaultdict(list)
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


COSTS = (stream, whole, prompt, start)
