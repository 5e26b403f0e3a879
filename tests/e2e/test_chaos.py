"""Thousands of requests of which a third end badly, against the real process: scripts/chaos in short.

The program itself compares the accounts; here it has to say that all of them balance, and to notice when one does not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rig import OPENAI, InProcessGateway, Rig

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
    """R12, R14: what clients sent and got, what the upstream held, and what log and metrics say is one and the same."""
    done = chaos(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert "ok    never more sequences than the cap at the upstream" in done.stdout
    assert "ok    conservation" in done.stdout


def test_every_scrape_equals_a_recount() -> None:
    """Each of hundreds of scrapes under chaos says what an account says that was kept beside the gate, from events."""
    done = chaos("--requests", "1000", "--scrapes", "500")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"ok    every scrape equals an independent recount +(\d+) of (\d+) scrapes", done.stdout)
    assert found is not None
    assert int(found[1]) == int(found[2]) >= 500


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("slots_in_use", 1),
        ("slots_settling", 1),
        ("queue_requests", -1),
        ("grants_total", 1),
        ("queue_oldest_wait_seconds", 0.1),
        ("request_duration_seconds_count", -1),
    ],
)
def test_a_gauge_that_is_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch, name: str, by: float) -> None:
    """The comparison can fail, for each of the samples it looks at."""
    monkeypatch.syspath_prepend(CHAOS.parent)
    from chaos_lib.audit import ScrapeCheck

    account = {
        "slots_in_use": 4,
        "slots_settling": 1,
        "queue_requests": 3,
        "oldest_seconds": [0.0199, 0.0201],
        "grants_total": 50,
        "refusals_total": {"queue_full": 2},
        "requests_total": {'outcome="completed",surface="openai",upstream="reasoning"': 40},
        "queue_wait_seconds_count": 44,
        "request_duration_seconds_count": 45,
    }
    of_upstream = 'upstream="reasoning"'
    samples = {
        f"aiogw_{key}{{{of_upstream}}}": float(value) for key, value in account.items() if isinstance(value, int)
    } | {
        f"aiogw_queue_oldest_wait_seconds{{{of_upstream}}}": 0.02,
        f'aiogw_refusals_total{{reason="queue_full",{of_upstream}}}': 2.0,
        f'aiogw_requests_total{{outcome="completed",surface="openai",{of_upstream}}}': 40.0,
    }
    check = ScrapeCheck(queue_timeout_seconds=1, heaviest=3)
    check.recount(samples, account)
    assert (check.recounted, check.unlike) == (1, [])

    samples[f"aiogw_{name}{{{of_upstream}}}"] += by
    check.recount(samples, account)
    assert check.recounted == 1
    (told,) = check.unlike
    assert name.removeprefix("queue_").removesuffix("_wait_seconds") in told


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


async def test_a_refusal_stays_one_when_the_handler_was_cancelled_before(rig: Rig) -> None:
    """Found by the next 100,000: on uvloop a deadline can pass between a handler's cancellation and its end."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_timeout_seconds=30)
    assert isinstance(gateway, InProcessGateway)
    await rig.post(gateway, OPENAI, 1)
    await upstream.exchange(0)
    await rig.queued(gateway, OPENAI, [2])
    (queued,) = (one for one in gateway.gateway._relay._running if one._record.granted_at is None)
    assert queued._admission is not None

    queued._ended.cancel()  # as aiohttp does it when the client leaves
    queued._admission._gate._expire(queued._admission)

    await gateway.record(outcome="queue_timeout")
    assert await gateway.metric("aiogw_refusals_total", upstream="reasoning", reason="queue_timeout") == 1
    upstream.exchanges[0].answer()
