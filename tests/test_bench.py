"""Every scenario of scripts/bench still measures: whether the interfaces it leans on are those the gateway has now.

What is measured is as small as it can be, and nobody looks at the figures: this is no timing.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"

# What each module does more often than it takes to see that it works.
LESS = {
    "rig": {"LEGS": 1, "WARM_UP_REQUESTS": 2, "RAMP_SECONDS": 0.1},
    "scenarios": {"OPEN_CLIENTS": 100, "STARTS": 1, "RAMP_SECONDS": 0.1},
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
    from benchmark import codecs, keys, rig, scenarios, waiting
    from benchmark import retries as closed_loop
    from benchmark.load import connect
    from benchmark.peers import Gateway, stub_upstream

    modules = (rig, scenarios, waiting, codecs, keys, closed_loop)
    for module in modules:
        for constant, value in LESS[module.__name__.rpartition(".")[2]].items():
            monkeypatch.setattr(module, constant, value)
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
        control.abort()


def bench_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``scripts/bench`` as it is called, on this source tree."""
    command = [sys.executable, SCRIPTS / "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_revision_is_measured_beside_the_work_tree() -> None:
    """``--compare`` starts the gateway of a commit as well, and gives it a column and a ratio."""
    if subprocess.run(["git", "-C", SCRIPTS, "rev-parse", "HEAD"], capture_output=True).returncode:
        pytest.skip("not a git checkout")
    done = bench_run("--compare", "HEAD", "--seconds", "0.2", "--no-peers", "whole")
    assert done.returncode == 0, done.stderr + done.stdout
    headings = done.stdout.splitlines()[0].split()
    name = headings[4]
    assert headings[3:6] == ["aiogw", name, f":{name}"]
    row = next(line for line in done.stdout.splitlines() if line.startswith("whole: CPU per 1 KiB request, /v1"))
    ratio = float(row.split()[11])
    assert 0.2 < ratio < 5
    assert f"{name} is HEAD" in done.stdout


def test_a_revision_that_is_not_there_is_said() -> None:
    """An unknown name for --compare is a fault in how it was called, found before anything is started."""
    done = bench_run("--compare", "no-such-branch", "whole")
    assert done.returncode == 2
    assert "no-such-branch" in done.stderr
    assert not done.stdout
