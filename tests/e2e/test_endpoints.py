"""Several endpoints behind one queue, from outside: one cap, the emptiest endpoint, none that refuses connections."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from rig import (
    OPENAI,
    SURFACES,
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

from aiogw import lanes as lanes_room
from aiogw.upstream import endpoints as endpoints_room


def several(*endpoints: tuple[str, int], resolve: str | None = None, **changes: Any) -> str:
    table = upstream_table("", **changes)
    del table["url"], table["admission"]["engine_slots"]
    table["endpoints"] = [{"url": url, "engine_slots": slots} for url, slots in endpoints]
    if resolve is not None:
        table["resolve"] = resolve
    return configuration({"reasoning": table})


def healthy(exchange: Exchange) -> None:
    """A script: well, and nothing else yet."""
    if exchange.request.target == "/health":
        exchange.answer(b"")


def work(upstream: ScriptedUpstream) -> list[Exchange]:
    return [exchange for exchange in upstream.exchanges if exchange.request.method == "POST"]


async def up(gateway: RunningGateway, upstream: ScriptedUpstream) -> float:
    labels = {"upstream": "reasoning", "endpoint": upstream.url.partition("//")[2]}
    # One that is not there is no zero: nobody would be told of it.
    return (await gateway.metrics())["aiogw_endpoint_up", frozenset(labels.items())]


@pytest.fixture
def quick_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health checks of gateways in this process every few milliseconds."""
    monkeypatch.setattr(endpoints_room, "HEALTH_INTERVAL_SECONDS", 0.02)


async def test_each_request_goes_where_most_slots_are_free(rig: Rig, process: bool) -> None:
    """Six of eight: three and three, whatever the order of the ends; and never more than an endpoint's own slots."""
    first, second = await rig.upstream(), await rig.upstream()
    gateway = await rig.start(several((first.url, 4), (second.url, 4), cap=6, queue_limit=40), process=process)
    clients = [await rig.post(gateway, SURFACES[tag % 2], tag) for tag in range(20)]
    await eventually(lambda: (first.in_flight, second.in_flight) == (3, 3), what="three at each")
    await gateway.waiting(14)
    for _ in range(3):
        # All of one: what becomes free there is taken there.
        (next(one for one in work(first) if not one.finished)).answer()
        await eventually(lambda: (first.in_flight, second.in_flight) == (3, 3), what="three at each")
    for upstream in (first, second):
        upstream.script = answer
        for exchange in work(upstream):
            if not exchange.finished:
                exchange.answer()
    assert [200] * 20 == [(await client.response()).status for client in clients]
    assert (first.peak, second.peak) == (3, 3)


async def test_unequal_endpoints(rig: Rig) -> None:
    """The larger one is filled first, and the smaller one never beyond its own."""
    large, small = await rig.upstream(), await rig.upstream()
    gateway = await rig.start(several((large.url, 6), (small.url, 2), cap=7), process=True)
    for tag in range(7):
        await rig.post(gateway, OPENAI, tag)
    await eventually(lambda: large.in_flight + small.in_flight == 7)
    assert (large.in_flight, small.in_flight) in ((5, 2), (6, 1))


async def test_a_heavy_request_needs_one_endpoint(rig: Rig, process: bool) -> None:
    """Two free slots at two endpoints are no place for two sequences; more than any endpoint has is a 422 at once."""
    first, second = await rig.upstream(), await rig.upstream()
    gateway = await rig.start(several((first.url, 2), (second.url, 2), cap=3), process=process)
    refusal = await rig.ask(gateway, OPENAI, n=3)
    assert (422, "too_many_sequences") == (refusal.status, OPENAI.code(refusal))
    assert "at most 2 run" in OPENAI.error(refusal)["message"]
    light = [await rig.post(gateway, OPENAI, tag) for tag in (0, 1)]
    await eventually(lambda: (first.in_flight, second.in_flight) == (1, 1))
    heavy = await rig.post(gateway, OPENAI, 2, n=2)
    await gateway.waiting(1)
    work(first)[0].answer()
    await eventually(lambda: len(work(first)) == 2)
    for exchange in (work(first)[1], work(second)[0]):
        exchange.answer()
    assert [200] * 3 == [(await client.response()).status for client in (*light, heavy)]


async def test_an_endpoint_that_refuses_connections(rig: Rig, quick_health: None) -> None:
    """It is left out and its slots with it; who was sent there goes elsewhere; it is back when its health check is."""
    first, second = await rig.upstream(answer), await rig.upstream(answer)
    gateway = await rig.start(several((first.url, 4), (second.url, 4), cap=6), process=False)
    await first.stop()
    for tag in range(6):
        assert (await rig.ask(gateway, SURFACES[tag % 2], tag)).status == 200
    assert (0, 1) == (await up(gateway, first), await up(gateway, second))
    assert 3 == await gateway.metric("aiogw_slots_limit", upstream="reasoning")
    assert [] == work(first)
    assert 6 == len(work(second))

    await first.start_again()
    first.script = lambda exchange: exchange.answer(b"", status=503)
    await eventually(lambda: len(first.exchanges) > 1, what="health checks")
    assert 0 == await up(gateway, first)
    assert {"/health"} == {exchange.request.target for exchange in first.exchanges}
    first.script = healthy

    async def back() -> bool:
        return await up(gateway, first) == 1

    await eventually(back)
    assert 6 == await gateway.metric("aiogw_slots_limit", upstream="reasoning")
    first.script = second.script = answer
    await asyncio.gather(*(rig.ask(gateway, OPENAI, tag) for tag in range(6)))
    assert work(first)


async def test_who_was_granted_a_slot_at_a_dead_endpoint_keeps_its_place(rig: Rig) -> None:
    """It waits at the head for a slot elsewhere, and is answered; nobody has passed it."""
    first, second = await rig.upstream(), await rig.upstream()
    gateway = await rig.start(several((first.url, 2), (second.url, 2), cap=3), process=False)
    clients = [await rig.post(gateway, OPENAI, 0)]
    await eventually(lambda: first.in_flight == 1)
    await second.stop()
    # The first of these is sent to the second endpoint, where two slots are free; without that one the cap is one.
    for tag in (1, 2, 3):
        clients.append(await rig.post(gateway, SURFACES[tag % 2], tag))
        await gateway.waiting(tag)
    assert 1 == await gateway.metric("aiogw_slots_limit", upstream="reasoning")
    first.script = answer
    work(first)[0].answer()
    assert [200] * 4 == [(await client.response()).status for client in clients]
    assert [0, 1, 2, 3] == first.tags
    await gateway.settled()


async def test_no_endpoint_is_left(rig: Rig, quick_health: None) -> None:
    """All who wait and come are told at once, with a status that lets them come back, and served when one is there."""
    first, second = await rig.upstream(), await rig.upstream()
    gateway = await rig.start(several((first.url, 1), (second.url, 1)), process=False)
    clients = [await rig.post(gateway, OPENAI, 0)]
    await eventually(lambda: first.in_flight == 1)
    clients.append(await rig.post(gateway, OPENAI, 1))
    await gateway.waiting(1)
    await first.stop()
    await second.stop()
    response = await clients[1].response()
    assert (503, "upstream_unavailable") == (response.status, OPENAI.code(response))
    assert "true" == response.header("x-should-retry")
    again = await rig.ask(gateway, OPENAI)
    assert (503, "upstream_unavailable") == (again.status, OPENAI.code(again))
    assert 0 == await gateway.metric("aiogw_slots_limit", upstream="reasoning")
    first.script = lambda exchange: (healthy if exchange.request.target == "/health" else answer)(exchange)
    await first.start_again()

    async def served() -> bool:
        return (await rig.ask(gateway, OPENAI)).status == 200

    await eventually(served)


async def test_one_address_is_never_left_out(rig: Rig) -> None:
    """An upstream with a url has nowhere else to go: each of its requests says that it cannot be reached."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, process=True)
    await upstream.stop()
    for _ in range(2):
        response = await rig.ask(gateway, OPENAI)
        assert (503, "upstream_unavailable") == (response.status, OPENAI.code(response))
    assert 1 == await gateway.metric("aiogw_slots_limit", upstream="reasoning")
    await upstream.start_again()
    assert (await rig.ask(gateway, OPENAI)).status == 200


# -- every address of a name ----------------------------------------------------------------------------------------


class Names:
    """A name server: what ``engines.test`` resolves to, for gateways in this process."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.asked = 0

    async def look_up(self, host: str, port: int) -> list[Any]:
        if not host.endswith(".test"):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]
        self.asked += 1
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        kinds = [(socket.AF_INET6 if ":" in one else socket.AF_INET, one) for one in self.addresses]
        return [(family, socket.SOCK_STREAM, 6, "", (one, port)) for family, one in kinds]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(endpoints_room, "RESOLVE_INTERVAL_SECONDS", 0.02)

    async def getaddrinfo(_loop: asyncio.BaseEventLoop, host: str, port: int, **_options: Any) -> list[Any]:
        return await names.look_up(host, port)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return names


async def on_two_addresses(rig: Rig) -> tuple[ScriptedUpstream, ScriptedUpstream]:
    """Two upstreams at one port, as pods of one Service."""
    first = await rig.upstream(host="127.0.0.2")
    port = int(first.url.rpartition(":")[2])
    return first, await rig.upstream(host="127.0.0.3", port=port)


async def test_every_address_of_a_name_is_an_endpoint(rig: Rig, names: Names) -> None:
    """R36: they appear and disappear with the name's addresses; a name server that fails takes nothing away."""
    first, second = await on_two_addresses(rig)
    port = first.url.rpartition(":")[2]
    names.addresses = ["127.0.0.2", "127.0.0.3", "::2"]
    text = several((f"http://engines.test:{port}", 4), resolve="every-address", cap=6)
    gateway = await rig.start(text, process=False)
    for tag in range(6):
        await rig.post(gateway, SURFACES[tag % 2], tag)
    await eventually(lambda: (first.in_flight, second.in_flight) == (3, 3))
    assert f"engines.test:{port}" == work(first)[0].request.header("host")

    names.addresses = ["127.0.0.2"]

    async def limit(expected: int) -> bool:
        return await gateway.metric("aiogw_slots_limit", upstream="reasoning") == expected

    await eventually(lambda: limit(3))
    # What runs at an address that is none any more ends there.
    assert (3, 3) == (first.in_flight, second.in_flight)
    for upstream in (first, second):
        upstream.script = answer
        for exchange in work(upstream):
            exchange.answer()
    await gateway.settled()
    await asyncio.gather(*(rig.ask(gateway, OPENAI, tag) for tag in range(6, 12)))
    assert 3 == len(work(second))

    names.addresses = []
    asked = names.asked
    await eventually(lambda: names.asked > asked + 2)
    assert await limit(3)
    assert (await rig.ask(gateway, OPENAI)).status == 200
    names.addresses = ["127.0.0.2", "127.0.0.3"]
    await eventually(lambda: limit(6))


async def test_a_name_that_nobody_knows_yet(rig: Rig, names: Names) -> None:
    """The gateway starts all the same, refuses for the moment, and serves once the name has an address."""
    upstream = await rig.upstream(answer, host="127.0.0.2")
    port = upstream.url.rpartition(":")[2]
    text = several((f"http://engines.test:{port}", 4), resolve="every-address", cap=2)
    gateway = await rig.start(text, process=False)
    response = await rig.ask(gateway, OPENAI)
    assert (503, "upstream_unavailable") == (response.status, OPENAI.code(response))
    names.addresses = ["127.0.0.2"]

    async def served() -> bool:
        return (await rig.ask(gateway, OPENAI)).status == 200

    await eventually(served)


async def test_a_reload_while_no_name_can_be_resolved(rig: Rig, names: Names) -> None:
    """What was known of its addresses stays, and nobody who waits is refused."""
    upstream = await rig.upstream(host="127.0.0.2")
    port = upstream.url.rpartition(":")[2]
    names.addresses = ["127.0.0.2"]
    text = several((f"http://engines.test:{port}", 4), resolve="every-address", cap=1)
    gateway = await rig.start(text, process=False)
    clients = [await rig.post(gateway, OPENAI, tag) for tag in (0, 1)]
    await gateway.waiting(1)
    names.addresses = []
    assert await gateway.reload(text)
    upstream.script = answer
    upstream.exchanges[0].answer()
    assert [200, 200] == [(await client.response()).status for client in clients]


async def test_a_reload_without_a_name_server_is_true_all_the_same(rig: Rig, names: Names) -> None:
    """The addresses stay, what is said of them changes; a name that nobody knows is no configuration to take."""
    upstream = await rig.upstream(answer, host="127.0.0.2")
    port = upstream.url.rpartition(":")[2]
    names.addresses = ["127.0.0.2"]

    def text(host: str, slots: int) -> str:
        return several((f"http://{host}:{port}", slots), resolve="every-address", cap=6)

    gateway = await rig.start(text("engines.test", 4), process=False)
    gateway.expect_error("the configuration is not taken")
    names.addresses = []
    assert await gateway.reload(text("engines.test", 2))
    assert 1 == await gateway.metric("aiogw_slots_limit", upstream="reasoning")
    assert not await gateway.reload(text("nobody.test", 2))
    assert (await rig.ask(gateway, OPENAI)).status == 200


# -- reloads --------------------------------------------------------------------------------------------------------


async def test_from_endpoints_to_one_address_that_was_left_out(rig: Rig) -> None:
    """Nobody is lost on the way, and a single address is asked whatever is known of it."""
    first, second = await rig.upstream(), await rig.upstream(answer)
    gateway = await rig.start(several((first.url, 2), (second.url, 2), cap=3), process=True)
    await second.stop()
    clients = [await rig.post(gateway, OPENAI, 0)]
    await eventually(lambda: first.in_flight == 1)
    clients.append(await rig.post(gateway, OPENAI, 1))
    await gateway.waiting(1)
    table = upstream_table(second.url)
    assert await gateway.reload(configuration({"reasoning": table | {"admission": "unlimited"}}))
    refusal = await clients[1].response()
    assert (503, "upstream_unavailable") == (refusal.status, OPENAI.code(refusal))
    await second.start_again()
    second.script = lambda exchange: (
        exchange.answer(status=404) if exchange.request.method == "GET" else answer(exchange)
    )
    assert (await rig.ask(gateway, OPENAI)).status == 200
    first.exchanges[0].answer()
    assert (await clients[0].response()).status == 200


async def test_an_upstream_that_has_gone_is_forgotten(
    rig: Rig, quick_health: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its last request has ended, nobody asks after its endpoints any more."""
    monkeypatch.setattr(lanes_room, "SWEEP_SECONDS", 0.02)
    first, second, other = await rig.upstream(), await rig.upstream(), await rig.upstream(answer)
    gateway = await rig.start(several((first.url, 2), (second.url, 2), cap=3), process=False)
    client = await rig.post(gateway, OPENAI, 0)
    await eventually(lambda: first.in_flight == 1)
    await second.stop()
    await rig.post(gateway, OPENAI, 1)
    await gateway.waiting(1)
    await second.start_again()
    second.script = lambda exchange: exchange.answer(status=503)
    assert await gateway.reload(configuration({"other": upstream_table(other.url)}))
    await eventually(lambda: len(second.exchanges) > 2, what="health checks")
    first.script = answer
    first.exchanges[0].answer()
    assert (await client.response()).status == 200
    await gateway.settled()
    assert isinstance(gateway, InProcessGateway)
    await eventually(lambda: not gateway.gateway._lanes._retired)
    asked = len(second.exchanges)
    await asyncio.sleep(0.1)  # five health checks, had it not been forgotten
    assert asked == len(second.exchanges)


# -- the engine's own word ------------------------------------------------------------------------------------------


def metrics_of(running: float, waiting: float) -> bytes:
    """As vLLM 0.32 writes it, one engine and two models."""
    text = "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
    text += "# TYPE vllm:num_requests_running gauge\n"
    text += f'vllm:num_requests_running{{engine="0",model_name="a"}} {running}\n'
    text += 'vllm:num_requests_running{engine="0",model_name="b"} 1.0\n'
    text += "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.\n"
    text += "# TYPE vllm:num_requests_waiting gauge\n"
    return (text + f'vllm:num_requests_waiting{{engine="0",model_name="a"}} {waiting}\n').encode()


async def test_what_the_engine_says_is_told_beside_what_we_count(rig: Rig, process: bool) -> None:
    """Both of several endpoints are summed; more than our own count is traffic that went past us."""

    def script(exchange: Exchange) -> None:
        if exchange.request.target == "/metrics":
            exchange.answer(metrics_of(2.0, 3.0))

    first, second = await rig.upstream(script), await rig.upstream(script)
    text = several((first.url, 4), (second.url, 4), cap=6, watch_engine_seconds=0.05)
    gateway = await rig.start(text, process=process)
    for tag in range(2):
        await rig.post(gateway, OPENAI, tag)

    async def told() -> bool:
        names = ("running_requests", "waiting_requests", "drift_requests")
        found = [await gateway.metric(f"aiogw_engine_{name}", upstream="reasoning") for name in names]
        return found == [6, 6, 10]

    await eventually(told)
    assert 6 == await gateway.metric("aiogw_slots_limit", upstream="reasoning")


@pytest.mark.parametrize(
    "said",
    [
        b"vllm:num_requests_running 1\n",
        b"# nothing\n",
        b"vllm:num_requests_running x\nvllm:num_requests_waiting 1\n",
        b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 1\n",
        b"\xff\xfe",
        None,
    ],
    ids=["one-of-two", "neither", "no-number", "not-a-number", "no-text", "refused"],
)
async def test_an_engine_that_does_not_say(rig: Rig, said: bytes | None) -> None:
    """Then nothing is told of it, rather than something old; and once in the log."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(metrics_of(1, 0)))
    gateway = await rig.gateway(upstream, watch_engine_seconds=0.02, process=True)
    sample = ("aiogw_engine_running_requests", frozenset({("upstream", "reasoning")}))

    async def shown() -> bool:
        return sample in await gateway.metrics()

    async def gone() -> bool:
        return not await shown()

    await eventually(shown)
    upstream.script = lambda exchange: exchange.answer(said or b"{}", status=200 if said else 404)
    await eventually(gone)
    asked = len(upstream.exchanges)
    await eventually(lambda: len(upstream.exchanges) > asked + 2)
    warnings = [line for line in gateway.lines if "no metrics from the upstream reasoning" in line]  # type: ignore[attr-defined]
    assert 1 == len(warnings)


async def test_no_endpoint_says_nothing(rig: Rig) -> None:
    """When none answers, nothing is told: nought would be a figure."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(metrics_of(1, 0)))
    text = several((upstream.url, 4), cap=3, watch_engine_seconds=0.02)
    gateway = await rig.start(text, process=True)

    async def shown() -> bool:
        return any(name.startswith("aiogw_engine") for name, _ in await gateway.metrics())

    async def gone() -> bool:
        return not await shown()

    await eventually(shown)
    await upstream.stop()
    await eventually(gone)
    assert 0 == await gateway.metric("aiogw_slots_limit", upstream="reasoning")


async def test_nobody_is_asked_who_is_not_to_be_watched(rig: Rig) -> None:
    """It is off unless it is asked for."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    assert isinstance(gateway, InProcessGateway)
    await rig.ask(gateway, OPENAI)
    assert ["/v1/chat/completions"] == [exchange.request.target for exchange in upstream.exchanges]
    assert not json.dumps([name for name, _ in await gateway.metrics()]).count("aiogw_engine")
