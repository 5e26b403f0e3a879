"""SIGHUP from outside: all of a new configuration or nothing of it, and no request that notices."""

from __future__ import annotations

import asyncio
import re
import signal
from typing import Any

import pytest
from rig import (
    ANTHROPIC,
    OPENAI,
    SURFACES,
    Daemon,
    Exchange,
    Rig,
    RunningGateway,
    ScriptedUpstream,
    answer,
    configuration,
    eventually,
    upstream_table,
)


def of(upstream: ScriptedUpstream, *, server: dict[str, Any] | None = None, **changes: Any) -> str:
    return configuration({"reasoning": upstream_table(upstream.url, **changes)}, **(server or {}))


async def in_use(gateway: RunningGateway, upstream: str = "reasoning") -> float:
    return await gateway.metric("aiogw_slots_in_use", upstream=upstream)


async def successful(gateway: RunningGateway) -> float:
    return await gateway.metric("aiogw_config_last_reload_successful")


# -- the cap --------------------------------------------------------------------------------------------------------


async def test_the_cap_goes_down_and_up_under_full_load(rig: Rig, process: bool) -> None:
    """R14: six to two to six to seven: nobody is cut off or granted above the cap, free slots are filled at once."""
    upstream = await rig.upstream()
    gateway = await rig.start(of(upstream, cap=6, queue_limit=40), process=process)
    clients = [await rig.post(gateway, SURFACES[tag % 2], tag) for tag in range(6)]
    for tag in range(6):
        await upstream.tagged(tag)
    for tag in range(6, 30):
        clients.append(await rig.post(gateway, SURFACES[tag % 2], tag))
        await gateway.waiting(tag - 5)

    assert await gateway.reload(of(upstream, cap=2, queue_limit=40))
    assert (6, 24) == (await in_use(gateway), await gateway.metric("aiogw_queue_requests", upstream="reasoning"))
    assert 2 == await gateway.metric("aiogw_slots_limit", upstream="reasoning")
    for tag in range(4):
        (await upstream.tagged(tag)).answer()
        assert (await clients[tag].response()).status == 200
    assert (2, 6) == (await in_use(gateway), len(upstream.exchanges))
    (await upstream.tagged(4)).answer()
    await upstream.tagged(6)
    assert 2 == await in_use(gateway)

    assert await gateway.reload(of(upstream, cap=6, queue_limit=40))
    assert 6 == await in_use(gateway)
    await upstream.tagged(10)
    assert await gateway.reload(of(upstream, cap=7, queue_limit=40))
    await upstream.tagged(11)
    assert 7 == await in_use(gateway) == upstream.in_flight

    upstream.script = answer
    for exchange in list(upstream.exchanges):
        if not exchange.finished:
            exchange.answer()
    for tag, client in enumerate(clients[4:], 4):
        response = await client.response()
        assert (200, "Hello world") == (response.status, SURFACES[tag % 2].text(response))
    # After a reload connections are made anew, and those that are made at once arrive in any order.
    assert sorted(upstream.tags) == list(range(30))
    assert upstream.peak == 7


async def test_five_hundred_reloads_lose_nothing(rig: Rig) -> None:
    """A closed loop of clients on both surfaces, while the cap changes 500 times: every answer comes, whole."""
    upstream = await rig.upstream(slow_answer)
    gateway = await rig.daemon(upstream, cap=6, queue_limit=40)
    answered = 0
    done = False

    async def client(number: int) -> None:
        nonlocal answered
        raw = await rig.client(gateway)
        surface = SURFACES[number % 2]
        while not done:
            await raw.post(surface.path, surface.body(number))
            response = await raw.response()
            assert (200, "Hello world") == (response.status, surface.text(response))
            answered += 1

    clients = [asyncio.ensure_future(client(number)) for number in range(12)]
    for number in range(500):
        cap = (2, 6, 7, 1)[number % 4]
        assert await gateway.reload(of(upstream, cap=cap, queue_limit=40))
        assert cap == await gateway.metric("aiogw_slots_limit", upstream="reasoning")
    done = True
    await asyncio.gather(*clients)
    assert answered > 500
    assert upstream.peak <= 7
    await gateway.settled()


def slow_answer(exchange: Exchange) -> None:
    asyncio.get_running_loop().call_later(0.005, answer, exchange)


async def test_a_request_that_has_become_too_heavy(rig: Rig, process: bool) -> None:
    """It is refused as one that comes now would be, and the queue behind it goes on."""
    upstream = await rig.upstream()
    gateway = await rig.start(of(upstream, cap=3), process=process)
    clients = [await rig.post(gateway, OPENAI, 0, n=2)]
    await upstream.tagged(0)
    for tag, n in ((1, 3), (2, 1)):
        clients.append(await rig.post(gateway, OPENAI, tag, n=n))
        await gateway.waiting(tag)
    assert await gateway.reload(of(upstream, cap=2))
    refusal = await clients[1].response()
    assert (422, "too_many_sequences") == (refusal.status, OPENAI.code(refusal))
    (await upstream.tagged(0)).answer()
    (await upstream.tagged(2)).answer()
    assert [200, 200] == [(await clients[number].response()).status for number in (0, 2)]


# -- all or nothing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"cap": 8}, "upstreams.reasoning.admission.cap: expected less than engine_slots (8), found an integer (8)"),
        ({"server": {"listen": "127.0.0.1:1"}}, "server.listen: cannot change from 127.0.0.1:0 to 127.0.0.1:1"),
        ({"server": {"admin_listen": "127.0.0.1:1"}}, "server.admin_listen: cannot change from 127.0.0.1:0"),
    ],
)
async def test_a_configuration_that_cannot_be_taken(rig: Rig, fault: dict[str, Any], said: str) -> None:
    """Nothing changes; log and metric say so, until one can be taken again."""
    upstream = await rig.upstream()
    gateway = await rig.daemon(upstream, cap=3)
    gateway.expect_error("the configuration is not taken")
    assert 1 == await successful(gateway)
    changes: dict[str, Any] = {"cap": 5, **fault}
    assert not await gateway.reload(of(upstream, **changes))
    (line,) = [line for line in gateway.lines if said in line]
    place = re.search(rf"{re.escape(str(gateway.config_path))}:\d+:\d+: upstreams", line)
    assert ("cap" in fault) == (place is not None)
    assert (0, 3) == (await successful(gateway), await gateway.metric("aiogw_slots_limit", upstream="reasoning"))
    assert await gateway.reload(of(upstream, cap=4))
    assert (1, 4) == (await successful(gateway), await gateway.metric("aiogw_slots_limit", upstream="reasoning"))


async def test_a_file_that_is_not_there(rig: Rig) -> None:
    """It is one more configuration that cannot be taken."""
    upstream = await rig.upstream(answer)
    gateway = await rig.daemon(upstream)
    gateway.expect_error("the configuration is not taken")
    gateway.config_path.unlink()
    gateway.signal(signal.SIGHUP)
    await eventually(lambda: any("no such file or directory" in line for line in gateway.lines))
    assert 0 == await successful(gateway)
    assert (await rig.ask(gateway, OPENAI)).status == 200


async def test_many_signals_at_once(rig: Rig) -> None:
    """What the file says after the last of them is what holds."""
    upstream = await rig.upstream(answer)
    gateway = await rig.daemon(upstream, cap=1)
    for cap in (2, 3, 4, 5):
        # As an editor does it, so that no signal finds half of a file.
        rig.config_file(of(upstream, cap=cap)).replace(gateway.config_path)
        gateway.signal(signal.SIGHUP)

    async def taken() -> bool:
        return await gateway.metric("aiogw_slots_limit", upstream="reasoning") == 5

    await eventually(taken)


# -- upstreams ------------------------------------------------------------------------------------------------------


async def test_an_upstream_appears_and_disappears(rig: Rig, process: bool) -> None:
    """A new one is served at once; one that has gone finishes what it has, who waits included, and takes no more."""
    first, second = await rig.upstream(), await rig.upstream(answer)
    gateway = await rig.start(of(first), process=process)
    running = await rig.post(gateway, OPENAI, 0)
    await first.tagged(0)
    waiting = await rig.post(gateway, ANTHROPIC, 1)
    await gateway.waiting(1)

    other = upstream_table(second.url, models=["other"])
    assert await gateway.reload(configuration({"reasoning": upstream_table(first.url), "other": other}))
    assert (await rig.ask(gateway, OPENAI, model="other")).status == 200

    assert await gateway.reload(configuration({"other": other}))
    refusal = await rig.ask(gateway, OPENAI)
    assert (404, "model_not_found") == (refusal.status, OPENAI.code(refusal))
    assert 1 == await in_use(gateway)
    (await first.tagged(0)).answer()
    (await first.tagged(1)).answer()
    assert [200, 200] == [(await client.response()).status for client in (running, waiting)]
    await gateway.settled()
    assert 1 == len(second.exchanges)


async def test_a_new_name_for_an_address_is_no_second_gate(rig: Rig, process: bool) -> None:
    """The slots that are held there stay held, and who waits keeps the place."""
    upstream = await rig.upstream()
    gateway = await rig.start(of(upstream), process=process)
    clients = [await rig.post(gateway, OPENAI, 0)]
    await upstream.tagged(0)
    clients.append(await rig.post(gateway, OPENAI, 1))
    await gateway.waiting(1)
    assert await gateway.reload(configuration({"renamed": upstream_table(upstream.url)}))
    clients.append(await rig.post(gateway, OPENAI, 2))
    await gateway.waiting(2, upstream="renamed")
    assert (1, 1) == (await in_use(gateway, "renamed"), upstream.in_flight)
    upstream.script = answer
    upstream.exchanges[0].answer()
    assert [200] * 3 == [(await client.response()).status for client in clients]
    assert [0, 1, 2] == upstream.tags
    assert 1 == upstream.peak


async def test_an_upstream_moves_to_another_address(rig: Rig, process: bool) -> None:
    """Who waits goes to the new one in turn; the cap counts both, and what is left at the old one ends there."""
    old, new = await rig.upstream(), await rig.upstream(answer)
    gateway = await rig.start(of(old, cap=2), process=process)
    clients = [await rig.post(gateway, OPENAI, tag) for tag in (0, 1)]
    for tag in (0, 1):
        await old.tagged(tag)
    clients.append(await rig.post(gateway, OPENAI, 2))
    await gateway.waiting(1)
    assert await gateway.reload(of(new, cap=2))
    assert (2, 1) == (await in_use(gateway), await gateway.metric("aiogw_queue_requests", upstream="reasoning"))
    (await old.tagged(0)).answer()
    assert [200, 200] == [(await clients[number].response()).status for number in (0, 2)]
    assert ([2], 2) == (new.tags, len(old.exchanges))
    (await old.tagged(1)).answer()
    assert (await clients[1].response()).status == 200


async def test_an_address_does_not_move_between_upstreams_at_work(rig: Rig) -> None:
    """Two gates would count the same slots; nothing is taken until nobody is there any more."""
    first, second = await rig.upstream(), await rig.upstream(answer)
    tables = {"a": upstream_table(first.url, models=["a"]), "b": upstream_table(second.url, models=["b"])}
    gateway = await rig.start(configuration(tables), process=True)
    assert isinstance(gateway, Daemon)
    gateway.expect_error("the configuration is not taken")
    slow = [await rig.post(gateway, OPENAI, 0, model="a")]
    await first.tagged(0)
    joined = {
        "url": ...,
        "endpoints": [{"url": first.url, "engine_slots": 4}, {"url": second.url, "engine_slots": 4}],
    }
    both = {key: value for key, value in (tables["b"] | joined).items() if value is not ...}
    both["admission"] = {key: value for key, value in both["admission"].items() if key != "engine_slots"}
    second.script = None
    slow.append(await rig.post(gateway, OPENAI, 1, model="b"))
    await second.tagged(1)
    assert not await gateway.reload(configuration({"b": both}))
    for upstream in (first, second):
        upstream.exchanges[-1].answer()
    assert [200, 200] == [(await client.response()).status for client in slow]
    await gateway.settled()
    assert await gateway.reload(configuration({"b": both}))


async def test_an_upstream_does_not_move_to_an_address_where_another_is_at_work(rig: Rig) -> None:
    """Nor does one take over an address whose requests are of an upstream that goes on: neither gate would be true."""
    first, second = await rig.upstream(), await rig.upstream()
    tables = {"x": upstream_table(first.url, models=["x"]), "y": upstream_table(second.url, models=["y"], cap=2)}
    gateway = await rig.start(configuration(tables), process=True)
    gateway.expect_error("the configuration is not taken")
    clients = [await rig.post(gateway, OPENAI, 0, model="x")]
    await first.tagged(0)
    clients += [await rig.post(gateway, OPENAI, 1, model="x"), await rig.post(gateway, OPENAI, 2, model="y")]
    await gateway.waiting(1, upstream="x")
    await second.tagged(2)
    moved = upstream_table(second.url, models=["x"])
    taken_over = upstream_table(first.url, models=["y"])
    assert not await gateway.reload(configuration({"x": moved}))
    assert not await gateway.reload(configuration({"x": moved, "y": taken_over}))
    assert not await gateway.reload(configuration({"y": taken_over}))
    assert (1, 1) == (await in_use(gateway, "x"), await in_use(gateway, "y"))
    for upstream in (first, second):
        upstream.script = answer
        upstream.exchanges[0].answer()
    assert [200] * 3 == [(await client.response()).status for client in clients]
    assert ([0, 1], [2]) == (first.tags, second.tags)
    await gateway.settled()
    assert await gateway.reload(configuration({"x": moved, "y": taken_over}))
    assert [200, 200] == [(await rig.ask(gateway, OPENAI, 3, model=model)).status for model in ("x", "y")]
    assert ([0, 1, 3], [2, 3]) == (first.tags, second.tags)


async def test_two_upstreams_under_one_address(rig: Rig) -> None:
    """A name that resolves to another upstream's address is no second gate for it."""
    upstream = await rig.upstream()
    port = upstream.url.rpartition(":")[2]
    gateway = await rig.start(of(upstream), process=True)
    gateway.expect_error("the configuration is not taken")
    named = upstream_table("", models=["other"], resolve="every-address")
    del named["url"], named["admission"]["engine_slots"]
    named["endpoints"] = [{"url": f"http://localhost:{port}", "engine_slots": 4}]
    both = configuration({"reasoning": upstream_table(f"http://127.0.0.1:{port}"), "other": named})
    assert not await gateway.reload(both)
    assert any("it has an address of upstreams.reasoning" in line for line in gateway.lines)  # type: ignore[attr-defined]


# -- everything else ------------------------------------------------------------------------------------------------


async def test_models_time_outs_and_sizes(rig: Rig, process: bool) -> None:
    """Each holds for the requests that come from now on."""
    upstream = await rig.upstream(answer)
    gateway = await rig.start(of(upstream), process=process)
    assert (await rig.ask(gateway, OPENAI, model="alias")).status == 404
    aliases = {"alias": "reasoning"}
    changed = of(upstream, server={"max_body_bytes": 200}, aliases=aliases, first_byte_timeout_seconds=0.1)
    assert await gateway.reload(changed)
    assert (await rig.ask(gateway, OPENAI, model="alias")).status == 200
    assert (await rig.ask(gateway, OPENAI, user="x" * 300)).status == 413
    upstream.script = None
    assert (await rig.ask(gateway, OPENAI)).status == 504


async def test_what_clients_may_take(rig: Rig, process: bool) -> None:
    """The memory for bodies and a body's time hold for the next request, a head's time for the next connection."""
    upstream = await rig.upstream(answer)
    gateway = await rig.start(of(upstream, server={"body_timeout_seconds": 300}), process=process)
    kept = await rig.client(gateway)
    uploading = await rig.client(gateway)
    await uploading.request("POST", OPENAI.path, b"{", "content-length: 1000")
    await eventually(lambda: gateway.metric("aiogw_body_memory_bytes"), what="its length held")
    short = {"header_timeout_seconds": 0.3, "body_timeout_seconds": 0.3}
    less = {"max_body_bytes": 1000, "body_memory_bytes": 1000}
    assert await gateway.reload(of(upstream, server=short | less))
    assert await gateway.metric("aiogw_body_memory_limit_bytes") == 1000
    await kept.request("POST", OPENAI.path, b"{", "content-length: 1000")
    assert (await kept.response()).status == 503
    uploading.reset()
    late = await rig.client(gateway)
    assert await late.ended()
    await eventually(lambda: uploaded(gateway), what="its memory given back")
    slow = await rig.client(gateway)
    await slow.request("POST", OPENAI.path, b"{", "content-length: 1000")
    assert (await slow.response()).status == 408


async def uploaded(gateway: RunningGateway) -> bool:
    return await gateway.metric("aiogw_body_memory_bytes") == 0


async def test_the_log_changes_its_level_and_its_form(rig: Rig) -> None:
    """From the next line on."""
    upstream = await rig.upstream(answer)
    gateway = await rig.daemon(upstream)
    assert await gateway.reload(of(upstream, server={"log_format": "text"}))
    await rig.ask(gateway, OPENAI)
    await eventually(lambda: any("Z info aiogw.access: " in line for line in gateway.lines))
    assert await gateway.reload(of(upstream, server={"log_format": "auto"}))
    assert any(line.startswith("{") and "the configuration is taken" in line for line in gateway.lines)


async def test_no_reload_during_a_drain(rig: Rig) -> None:
    """A gateway that is about to end takes nothing new."""
    upstream = await rig.upstream()
    gateway = await rig.daemon(upstream)
    client = await rig.post(gateway, OPENAI, 0)
    exchange = await upstream.tagged(0)
    gateway.signal(signal.SIGTERM)
    await eventually(lambda: any("draining" in line for line in gateway.lines))
    gateway.signal(signal.SIGHUP)
    await eventually(lambda: any("nothing was reloaded" in line for line in gateway.lines))
    exchange.answer()
    assert (await client.response()).status == 200
    assert 0 == await gateway.exit_code()
