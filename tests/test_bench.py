"""Every scenario of scripts/bench still measures: whether the interfaces it leans on are those the gateway has now.

What is measured is as small as it can be, and nobody looks at the figures: this is no timing.
"""

from __future__ import annotations

import asyncio
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
    from benchmark.peers import stub_upstream

    modules = (rig, scenarios, waiting, codecs, keys, closed_loop)
    for module in modules:
        for constant, value in LESS[module.__name__.rpartition(".")[2]].items():
            monkeypatch.setattr(module, constant, value)
    with stub_upstream(tmp_path) as stub:
        control = await connect(stub.port)
        bench = rig.Bench(
            seconds=0.1,
            surfaces=("openai",),
            with_haproxy=False,
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
