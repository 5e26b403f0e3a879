"""Thousands of requests of which a third end badly, against the real process: scripts/chaos in short.

The program itself compares the accounts; here it has to say that all of them balance, and to notice when one does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rig import OPENAI, Rig

CHAOS = Path(__file__).parents[2] / "scripts" / "chaos"
PATIENCE_SECONDS = 180


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The gateway is not measured for coverage here: that takes as long as all else it does.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, str(CHAOS), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--requests", "5000"), id="at-large"),
        # An engine that goes on with what was aborted: the slots settle until it has let go.
        pytest.param(("--requests", "500", "--engine-lag-seconds", "0.3"), id="slow-to-abort"),
    ],
)
def test_the_accounts_balance(arguments: tuple[str, ...]) -> None:
    """R12, R14: What clients sent and got, what the upstream held, and what log and metrics say is one and the same."""
    done = chaos(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert "ok    never more sequences than the cap at the upstream" in done.stdout
    assert "ok    conservation" in done.stdout


def test_an_engine_that_is_not_waited_for_has_too_many() -> None:
    """The checks can fail: without the settling time the engine holds more than it has slots, and the ids are told."""
    done = chaos("--requests", "300", "--engine-lag-seconds", "1", "--settle-seconds", "0")
    assert done.returncode == 1, done.stdout + done.stderr
    _, failed, told = done.stdout.partition("FAIL  never more in the engine than it has slots")
    assert failed
    assert ".stay" in told


async def test_a_refusal_stays_one_when_the_client_leaves_in_its_tick(rig: Rig) -> None:
    """Found by a run of 100,000: the counter of refusals said queue_timeout where the log said client_gone."""
    upstream = await rig.upstream()
    signs = {"first_sign_seconds": 0.05, "sign_interval_seconds": 10}
    gateway = await rig.gateway(upstream, queue_timeout_seconds=0.4, server=signs)
    await rig.post(gateway, OPENAI, 1)
    await gateway.waiting(0)
    await upstream.exchange(0)
    (client,) = await rig.queued(gateway, OPENAI, [2], stream=True)
    await client.read_head()

    client.half_close()
    time.sleep(0.5)  # noqa: ASYNC251 - the FIN and the deadline are to be found in the same turn of the loop

    # Whichever comes first in that turn, the log and the gate agree on it.
    record = await gateway.record(stream=True)
    refused = (await gateway.metrics()).get(
        ("aiogw_refusals_total", frozenset({("upstream", "reasoning"), ("reason", "queue_timeout")})), 0
    )
    assert (record["outcome"], refused) in {("queue_timeout", 1), ("client_gone", 0)}
    upstream.exchanges[0].answer()
