"""Whether an upstream is reached: known without any traffic, told everywhere, and no reason to leave it out."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from rig import (
    OPENAI,
    Exchange,
    InProcessGateway,
    Rig,
    RunningGateway,
    ScriptedUpstream,
    answer,
    configuration,
    eventually,
    upstream_table,
)

from aiogw import catalogue, enginewatch
from aiogw.cli import main
from aiogw.status import words
from aiogw.upstream import endpoints as endpoints_room


async def told_of(gateway: RunningGateway, upstream: ScriptedUpstream) -> dict[str, Any]:
    """What the document says of its address."""
    document = json.loads((await gateway.admin("/status.json")).body)
    return dict(document["upstreams"]["reasoning"]["endpoints"][upstream.url.partition("//")[2]])


async def well(gateway: RunningGateway) -> bool:
    return words.is_well(json.loads((await gateway.admin("/status.json")).body))


async def up(gateway: RunningGateway, upstream: ScriptedUpstream) -> float:
    labels = {"upstream": "reasoning", "endpoint": upstream.url.partition("//")[2]}
    return (await gateway.metrics())["aiogw_endpoint_up", frozenset(labels.items())]


async def becomes(gateway: RunningGateway, upstream: ScriptedUpstream, value: int) -> None:
    async def is_so() -> bool:
        return await up(gateway, upstream) == value

    await eventually(is_so, 15, what=lambda: f"aiogw_endpoint_up is not {value}")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not reached is tried every few milliseconds by gateways in this process."""
    monkeypatch.setattr(endpoints_room, "HEALTH_INTERVAL_SECONDS", 0.02)


@pytest.mark.parametrize("admission", [None, "unlimited"], ids=["gated", "unlimited"])
async def test_a_dead_engine_is_known_without_traffic(rig: Rig, quick: None, admission: str | None) -> None:
    """The periodic question finds it; it is not left out, and is well as soon as it takes connections."""
    upstream = await rig.upstream(answer)
    changes = {} if admission is None else {"admission": admission}
    gateway = await rig.gateway(upstream, server={"models_refresh_seconds": 0.05}, process=False, **changes)
    assert (1, True) == (await up(gateway, upstream), await well(gateway))
    assert "unreached_since" not in await told_of(gateway, upstream)
    await upstream.stop()
    await becomes(gateway, upstream, 0)
    told = await told_of(gateway, upstream)
    assert (False, False) == (told["up"], "left_out" in told)
    assert 0 <= told["unreached_seconds"] < 30
    assert not await well(gateway)
    page = (await gateway.admin("/status")).body.decode().partition("<script>")[0]
    assert "not reached since " in page
    assert "left out" not in page
    await upstream.start_again()
    await becomes(gateway, upstream, 1)
    assert await well(gateway)
    assert "unreached_since" not in await told_of(gateway, upstream)


async def test_the_command_says_it(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts with its exit code, for people in words."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=False)
    host, port = gateway.admin_address
    await upstream.stop()
    await rig.ask(gateway, OPENAI, 1)
    assert 75 == await asyncio.to_thread(main, ["status", "--admin", f"{host}:{port}"])
    told = capsys.readouterr().out
    assert re.search(
        r"a newcomer probably fails: not reached; .*; 127.0.0.1:\d+ not reached since \d\d:\d\d:\d\d, 0 of 8$", told
    )


async def test_a_request_finds_it_and_a_connection_is_enough(rig: Rig, quick: None) -> None:
    """Where nothing is asked in the background: it is still tried by each request, and found again without any."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=False)
    await upstream.stop()
    assert 1 == await up(gateway, upstream)
    refused = await rig.ask(gateway, OPENAI, 1)
    assert (503, "upstream_unavailable") == (refused.status, OPENAI.code(refused))
    assert 0 == await up(gateway, upstream)
    since = (await told_of(gateway, upstream))["unreached_since"]
    assert 503 == (await rig.ask(gateway, OPENAI, 2)).status
    assert since == (await told_of(gateway, upstream))["unreached_since"]
    await upstream.start_again()
    await becomes(gateway, upstream, 1)
    assert [] == upstream.exchanges
    assert 200 == (await rig.ask(gateway, OPENAI, 3)).status


async def test_the_engine_watch_finds_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the time it gives an answer: how long connecting may take is the upstream's own."""
    for room in (catalogue, enginewatch):
        monkeypatch.setattr(room, "ASK_TIMEOUT_SECONDS", 0.0)
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, watch_engine_seconds=0.05, process=False)
    await upstream.stop()
    await becomes(gateway, upstream, 0)


async def test_an_endpoint_that_is_dead_is_left_out_without_traffic(rig: Rig, quick: None) -> None:
    """Each of several is asked for its models; one that is left out may be reached again before its health is back."""
    first, second = await rig.upstream(answer), await rig.upstream(answer)
    table = upstream_table("", cap=6)
    del table["url"], table["admission"]["engine_slots"]
    table["endpoints"] = [{"url": one.url, "engine_slots": 4} for one in (first, second)]
    text = configuration({"reasoning": table}, models_refresh_seconds=0.05)
    gateway = await rig.start(text, process=False)
    await second.stop()
    await becomes(gateway, second, 0)
    told = await told_of(gateway, second)
    assert (True, False, True) == (told["left_out"], told["up"], "unreached_since" in told)
    assert (1, True) == (await up(gateway, first), await well(gateway))

    def ill(exchange: Exchange) -> None:
        exchange.answer(b"", status=503)

    second.script = ill
    await second.start_again()

    async def reached() -> bool:
        return "unreached_since" not in await told_of(gateway, second)

    await eventually(reached)
    assert 0 == await up(gateway, second)
    second.script = answer
    await becomes(gateway, second, 1)


async def test_a_reload_does_not_forget_it(rig: Rig) -> None:
    """The connections are made anew, and what is known of the address stays until it is tried again."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=False)
    assert isinstance(gateway, InProcessGateway)
    await upstream.stop()
    await rig.ask(gateway, OPENAI, 1)
    before = await told_of(gateway, upstream)
    assert await gateway.reload(configuration({"reasoning": upstream_table(upstream.url, queue_limit=3)}))
    told = await told_of(gateway, upstream)
    assert (False, before["unreached_since"]) == (told["up"], told["unreached_since"])
    await upstream.start_again()
    await becomes(gateway, upstream, 1)
