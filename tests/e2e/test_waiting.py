"""The queue seen from outside: one cap for both surfaces, arrival order, and refusals that say what they are."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter

import pytest
from rig import (
    ANTHROPIC,
    FIRST_EVENT,
    OPENAI,
    STREAM,
    SURFACES,
    Exchange,
    RawClient,
    Rig,
    ScriptedUpstream,
    Surface,
    answer,
    eventually,
    everywhere_both_ways,
    upstream_table,
)

# An event loop's clock stands still within a turn, so a time it measured can be a little shorter than it was.
CLOCK_SECONDS = 0.01


async def finish_all(upstream: ScriptedUpstream, count: int) -> None:
    """Answer whoever is in flight, in order of arrival, until ``count`` have been answered."""
    for number in range(count):
        (await upstream.exchange(number)).answer()


# -- the specification's own words -----------------------------------------------------------------------------------


async def test_both_surfaces_share_one_cap_and_one_queue(rig: Rig, process: bool) -> None:
    """Twenty requests on each surface, a cap of six: never seven at once, and all in the order of their arrival."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=6, queue_limit=40, process=process)
    clients = []
    for tag in range(40):
        clients.append(await rig.post(gateway, SURFACES[tag % 2], tag))
        if tag < 6:
            await upstream.exchange(tag)
        else:
            await gateway.waiting(tag - 5)

    await finish_all(upstream, 40)
    for tag, client in enumerate(clients):
        response = await client.response()
        assert response.status == 200
        assert SURFACES[tag % 2].text(response) == "Hello world"
    assert upstream.peak == 6
    # Those that are granted one by one cannot arrive in another order; the first six had their own connections.
    assert list(range(40)) == upstream.tags


async def test_both_surfaces_at_once(rig: Rig, process: bool) -> None:
    """Forty clients at the same moment on both surfaces: six run, eight wait, the rest is refused, nobody fails."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=6, queue_limit=8, process=process)
    clients = [await rig.client(gateway) for _ in range(40)]
    await asyncio.gather(
        *(client.post(SURFACES[tag % 2].path, SURFACES[tag % 2].body(tag)) for tag, client in enumerate(clients))
    )
    responses = asyncio.gather(*(client.response() for client in clients))

    async def all_there() -> bool:
        return await gateway.metric("aiogw_refusals_total", upstream="reasoning", reason="queue_full") == 26

    await eventually(all_there, what="26 refusals")
    await eventually(lambda: upstream.in_flight == 6, what="six at the upstream")
    await finish_all(upstream, 14)
    statuses = Counter(response.status for response in await responses)

    assert statuses == {200: 14, 503: 26}
    assert upstream.peak == 6


async def test_three_surfaces_contend_for_one_cap(rig: Rig, stream: bool, process: bool) -> None:
    """Sixty requests, a third of them in a dialect of which the gate has never heard: one cap, one line, one order."""
    rig.third_dialect = True
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=6, queue_limit=60, process=process)
    clients = []
    for tag in range(60):
        clients.append(await rig.post(gateway, SURFACES[tag % 3], tag, stream=stream))
        if tag < 6:
            await upstream.exchange(tag)
        else:
            await gateway.waiting(tag - 5)
    for number in range(60):
        (await upstream.exchange(number)).respond(stream=stream)
    for tag, client in enumerate(clients):
        response = await client.response()
        assert (200, "Hello world") == (response.status, SURFACES[tag % 3].text(response))
        assert not stream or SURFACES[tag % 3].says_end(response)
    assert 6 == upstream.peak
    assert list(range(60)) == upstream.tags


# -- order ----------------------------------------------------------------------------------------------------------


async def test_arrival_order_survives_departures(rig: Rig) -> None:
    """Those who stay are served in the order in which they came, whoever leaves in between, on both surfaces."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_limit=30)
    first = await rig.post(gateway, OPENAI, 0)
    await upstream.exchange(0)
    clients: dict[int, RawClient] = {}
    for tag in range(1, 31):
        clients[tag] = await rig.post(gateway, SURFACES[tag % 2], tag)
        await gateway.waiting(tag)
    stay = [tag for tag in clients if tag % 3]
    for tag, client in clients.items():
        if tag not in stay:
            client.close()
    await gateway.waiting(len(stay))

    await finish_all(upstream, 1 + len(stay))
    for tag in stay:
        assert (await clients[tag].response()).status == 200
    await first.response()
    assert [0, *stay] == upstream.tags


async def test_a_newcomer_does_not_overtake(rig: Rig) -> None:
    """A request that arrives just as a slot becomes free finds it booked for whoever waits."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_limit=30)
    holder = await rig.post(gateway, OPENAI, 0)
    exchange = await upstream.exchange(0)
    for number in range(20):
        (waiting,) = await rig.queued(gateway, OPENAI, [2 * number + 1])
        newcomer = await rig.client(gateway)
        exchange.answer()
        await newcomer.post(OPENAI.path, OPENAI.body(2 * number + 2))
        await holder.response()
        exchange = await upstream.exchange(2 * number + 1)
        exchange.answer()
        await waiting.response()
        exchange = await upstream.exchange(2 * number + 2)
        holder = newcomer
    exchange.answer()
    await holder.response()
    assert list(range(41)) == upstream.tags


async def test_the_next_request_is_sent_as_the_slot_becomes_free(rig: Rig, process: bool) -> None:
    """Hand-over: on the connection on which one answer ends, the next request begins, without a new connection."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_limit=20, process=process)
    clients = [await rig.post(gateway, OPENAI, 0)]
    await upstream.exchange(0)
    clients += await rig.queued(gateway, OPENAI, range(1, 11))
    for number in range(11):
        exchange = await upstream.exchange(number)
        # Nobody has read the answer before this one: it is not the client that frees the slot.
        exchange.answer()
    for client in clients:
        assert (await client.response()).status == 200
    assert len(upstream.connections) == 1
    gaps = [
        later.started_at - earlier.finished_at
        for earlier, later in zip(upstream.exchanges, upstream.exchanges[1:], strict=False)
        if earlier.finished_at is not None
    ]
    assert sorted(gaps)[len(gaps) // 2] < 0.05


async def test_a_request_on_the_finished_clients_own_connection_goes_to_the_end(rig: Rig) -> None:
    """A client that asks again on its connection waits behind those who came in between."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    client = await rig.post(gateway, OPENAI, 1)
    await upstream.exchange(0)
    (other,) = await rig.queued(gateway, OPENAI, [2])
    upstream.exchanges[0].answer()
    await client.response()
    await client.post(OPENAI.path, OPENAI.body(3))
    await gateway.waiting(1)
    (await upstream.exchange(1)).answer()
    (await upstream.exchange(2)).answer()
    await other.response()
    await client.response()
    assert upstream.tags == [1, 2, 3]


# -- deadline -------------------------------------------------------------------------------------------------------


@everywhere_both_ways
async def test_waiting_too_long(rig: Rig, surface: Surface, stream: bool, process: bool) -> None:
    """A request that has waited for queue_timeout_seconds is refused with 503, and is never sent after that."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_timeout_seconds=0.3, process=process)
    first = await rig.post(gateway, surface, 1, stream=stream)
    exchange = await upstream.exchange(0)
    entered_at = time.monotonic()
    response = await rig.ask(gateway, surface, 2, stream=stream)
    waited = time.monotonic() - entered_at

    assert response.status == 503
    assert 0.3 - CLOCK_SECONDS <= waited < 1.5
    assert "within 0.3" in surface.error(response)["message"]
    assert surface.code(response) in ("queue_timeout", None)
    assert surface is not ANTHROPIC or surface.error(response)["type"] == "overloaded_error"
    assert 1 <= int(response.header("retry-after") or 0) <= 60
    assert response.header("x-should-retry") == "true"
    record = await gateway.record(outcome="queue_timeout")
    assert 0.3 - CLOCK_SECONDS <= record["wait_seconds"] < 1.5
    assert await gateway.metric("aiogw_refusals_total", upstream="reasoning", reason="queue_timeout") == 1

    exchange.respond(stream=stream)
    assert (await first.response()).status == 200
    upstream.script = answer
    assert (await rig.ask(gateway, surface, 3)).status == 200
    assert upstream.tags == [1, 3]


async def test_every_wait_has_its_own_deadline(rig: Rig) -> None:
    """R30: deadlines run from each request's own arrival, and whoever is refused makes room for nobody but the next."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_timeout_seconds=0.4, queue_limit=3)
    first = await rig.post(gateway, OPENAI, 0)
    exchange = await upstream.exchange(0)
    early = await rig.queued(gateway, OPENAI, [1, 2])
    await asyncio.sleep(0.2)  # the distance between the two deadlines
    (late,) = await rig.queued(gateway, OPENAI, [3], before=2)
    for client in early:
        assert (await client.response()).status == 503
    await gateway.waiting(1)
    exchange.answer()
    await first.response()
    (await upstream.exchange(1)).answer()
    assert (await late.response()).status == 200
    assert upstream.tags == [0, 3]


async def test_the_deadline_is_the_queues_and_not_the_answers(rig: Rig) -> None:
    """Once granted, a request may take longer than queue_timeout_seconds."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_timeout_seconds=0.2)
    first = await rig.post(gateway, OPENAI, 0)
    exchange = await upstream.exchange(0)
    (second,) = await rig.queued(gateway, OPENAI, [1], stream=True)
    exchange.answer()
    await first.response()
    exchange = await upstream.exchange(1)
    exchange.begin_stream(FIRST_EVENT)
    await asyncio.sleep(0.4)  # twice the deadline
    exchange.end_stream(*STREAM[1:])
    assert (await second.response()).complete


async def test_deadline_and_grant_in_one_moment(rig: Rig) -> None:
    """However close the end that frees a slot is to a deadline, the waiting request is either served or refused."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_timeout_seconds=0.03, queue_limit=1)
    statuses = []
    sent = []
    for number in range(40):
        client = await rig.client(gateway)
        holder = await rig.post(gateway, OPENAI, 1000 + number)
        exchange = await upstream.tagged(1000 + number)
        asyncio.get_running_loop().call_later(0.02 + 0.0006 * (number % 30), exchange.answer)
        await client.post(OPENAI.path, OPENAI.body(number))
        response = asyncio.ensure_future(client.response())
        assert (await holder.response()).status == 200
        await asyncio.wait((response,), timeout=0.1)
        if not response.done():
            (await upstream.tagged(number)).answer()
        statuses.append((await response).status)
        sent.append(number in upstream.tags)
        client.close()
        holder.close()
    assert {200, 503} >= set(statuses)
    assert [status == 200 for status in statuses] == sent


async def test_a_hundred_waits_that_end_in_time_outs(rig: Rig, surface: Surface) -> None:
    """R13: a hundred requests that time out leave nothing behind: the next one is served at once."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_timeout_seconds=0.2, queue_limit=100)
    first = await rig.post(gateway, surface, 1000)
    exchange = await upstream.exchange(0)
    clients = [await rig.post(gateway, surface, tag) for tag in range(100)]
    for client in clients:
        assert (await client.response()).status == 503
        client.close()
    exchange.answer()
    await first.response()
    upstream.script = answer
    assert (await rig.ask(gateway, surface, 1001)).status == 200
    assert upstream.tags == [1000, 1001]


# -- full -----------------------------------------------------------------------------------------------------------


@everywhere_both_ways
async def test_a_full_queue_refuses_at_once(rig: Rig, surface: Surface, stream: bool, process: bool) -> None:
    """When slots and queue are full, a request is refused at once, in its surface's shape, with a time to come back."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_limit=1, process=process)
    first = await rig.post(gateway, surface, 1)
    exchange = await upstream.exchange(0)
    (second,) = await rig.queued(gateway, surface, [2])
    asked_at = time.monotonic()
    response = await rig.ask(gateway, surface, 3, stream=stream)

    assert time.monotonic() - asked_at < 1
    assert response.status == 503
    assert "queue" in surface.error(response)["message"]
    assert surface.code(response) in ("queue_full", None)
    assert surface is not ANTHROPIC or surface.error(response)["type"] == "overloaded_error"
    assert 1 <= int(response.header("retry-after") or 0) <= 60
    assert response.header("x-should-retry") == "true"
    await gateway.record(outcome="queue_full", status=503)
    assert await gateway.metric("aiogw_refusals_total", upstream="reasoning", reason="queue_full") == 1

    exchange.answer()
    (await upstream.exchange(1)).answer()
    assert (await first.response()).status == 200
    assert (await second.response()).status == 200
    assert upstream.tags == [1, 2]


async def test_refused_requests_change_nothing(rig: Rig, surface: Surface) -> None:
    """R17: fifty refusals take no place, no slot and no turn of anybody."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_limit=2)
    first = await rig.post(gateway, surface, 0)
    await upstream.exchange(0)
    waiting = await rig.queued(gateway, surface, [1, 2])
    for tag in range(50):
        assert (await rig.ask(gateway, surface, 100 + tag)).status == 503
    await finish_all(upstream, 3)
    for client in (first, *waiting):
        assert (await client.response()).status == 200
    assert upstream.tags == [0, 1, 2]


async def test_no_queue_at_all(rig: Rig, surface: Surface) -> None:
    """With queue_limit = 0 a request either runs at once or is refused at once."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_limit=0)
    first = await rig.post(gateway, surface, 1)
    exchange = await upstream.exchange(0)
    assert (await rig.ask(gateway, surface, 2)).status == 503
    exchange.answer()
    assert (await first.response()).status == 200
    await rig.check_usable(gateway, upstream)


async def test_the_time_to_come_back_is_kept_within_its_bounds(rig: Rig, surface: Surface) -> None:
    """Retry-After is never below the configured minimum nor above the maximum."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_limit=0, retry_after_min_seconds=7, retry_after_max_seconds=9)
    first = await rig.post(gateway, surface, 1)
    exchange = await upstream.exchange(0)
    response = await rig.ask(gateway, surface, 2)
    assert response.header("retry-after") == "7"
    exchange.answer()
    await first.response()


async def test_a_refused_client_keeps_its_connection(rig: Rig, surface: Surface) -> None:
    """After a refusal the client may try again on the same connection."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_limit=0)
    first = await rig.post(gateway, surface, 1)
    exchange = await upstream.exchange(0)
    client = await rig.client(gateway)
    for _ in range(3):
        await client.post(surface.path, surface.body(2))
        assert (await client.response()).status == 503
    exchange.answer()
    await first.response()
    await client.post(surface.path, surface.body(3))
    (await upstream.exchange(1)).answer()
    assert (await client.response()).status == 200


# -- other upstreams ------------------------------------------------------------------------------------------------


async def test_other_upstreams_are_not_blocked(rig: Rig, process: bool) -> None:
    """While one upstream is saturated and its queue is full, requests for another are served at once."""
    reasoning = await rig.upstream()
    embeddings = await rig.upstream(lambda exchange: exchange.answer(b"{}"))
    others = {"embeddings": upstream_table(embeddings.url, models=["embeddings"], admission="unlimited")}
    gateway = await rig.gateway(reasoning, queue_limit=1, others=others, process=process)
    first = await rig.post(gateway, OPENAI, 1)
    exchange = await reasoning.exchange(0)
    (second,) = await rig.queued(gateway, OPENAI, [2])
    assert (await rig.ask(gateway, OPENAI, 3)).status == 503

    client = await rig.client(gateway)
    for tag in range(20):
        await client.post("/v1/embeddings", json.dumps({"model": "embeddings", "input": f"tag:{tag}"}).encode())
        assert (await client.response()).status == 200
    assert list(range(20)) == embeddings.tags

    exchange.answer()
    (await reasoning.exchange(1)).answer()
    await first.response()
    await second.response()


async def test_two_gated_upstreams_have_two_queues(rig: Rig) -> None:
    """Each upstream has its own cap and its own queue."""
    one, two = await rig.upstream(), await rig.upstream()
    others = {"second": upstream_table(two.url, models=["second"], cap=2)}
    gateway = await rig.gateway(one, others=others)
    clients = [await rig.post(gateway, OPENAI, tag) for tag in range(2)]
    clients += [await rig.post(gateway, OPENAI, tag, model="second") for tag in range(3)]
    await gateway.waiting(1)
    await gateway.waiting(1, upstream="second")
    assert (one.in_flight, two.in_flight) == (1, 2)
    await finish_all(one, 2)
    await finish_all(two, 3)
    for client in clients:
        assert (await client.response()).status == 200
    assert (one.peak, two.peak) == (1, 2)


# -- weight ---------------------------------------------------------------------------------------------------------


def sequences(exchange: Exchange) -> int:
    document = json.loads(exchange.request.body)
    return document.get("n", 1) * (len(document["prompt"]) if isinstance(document.get("prompt"), list) else 1)


async def test_a_request_weighs_its_sequences(rig: Rig) -> None:
    """With n = 3 a request takes three slots: one more fits under a cap of four, a second such does not."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=4)
    clients = [await rig.post(gateway, OPENAI, 0, n=3), await rig.post(gateway, OPENAI, 1)]
    await upstream.exchange(1)
    assert await gateway.metric("aiogw_slots_in_use", upstream="reasoning") == 4
    clients += await rig.queued(gateway, OPENAI, [2], n=3)
    # It would fit when one of the two has ended, but it came later, and nobody overtakes.
    clients += await rig.queued(gateway, OPENAI, [3], before=1)
    upstream.exchanges[1].answer()
    await clients[1].response()
    await gateway.waiting(2)
    assert upstream.tags == [0, 1]

    upstream.exchanges[0].answer()
    await upstream.exchange(3)
    assert upstream.tags == [0, 1, 2, 3]
    await finish_all(upstream, 0)
    for exchange in upstream.exchanges[2:]:
        exchange.answer()
    for client in (clients[0], *clients[2:]):
        assert (await client.response()).status == 200


async def test_the_cap_counts_sequences(rig: Rig) -> None:
    """Whatever mixture of n and of prompts arrives, the upstream never has more sequences than the cap."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=5, queue_limit=60)
    clients = []
    for tag in range(40):
        client = await rig.client(gateway)
        if tag % 4 == 0:
            document = {"model": "reasoning", "prompt": [f"tag:{tag}"] * (1 + tag % 5), "n": 1}
            await client.post("/v1/completions", json.dumps(document).encode())
        else:
            await client.post(OPENAI.path, OPENAI.body(tag, n=1 + tag % 5))
        clients.append(client)
    await gateway.waiting(40 - len(upstream.exchanges))
    for number in range(40):
        exchange = await upstream.exchange(number)
        held = [one for one in upstream.exchanges if not one.finished]
        assert sum(map(sequences, held)) <= 5
        exchange.answer()
    for client in clients:
        assert (await client.response()).status == 200
    assert sorted(upstream.tags) == list(range(40))


async def test_heavier_than_the_cap(rig: Rig) -> None:
    """A request that could never run is refused for good, with what it asked for and what there is."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=2)
    response = await rig.ask(gateway, OPENAI, n=3)

    assert response.status == 422
    message = OPENAI.error(response)["message"]
    assert "3 sequences" in message
    assert "2" in message
    assert response.header("x-should-retry") == "false"
    assert response.header("retry-after") is None
    assert OPENAI.code(response) == "too_many_sequences"
    assert upstream.exchanges == []


async def test_an_upstream_without_a_gate_takes_any_weight(rig: Rig) -> None:
    """Where nothing is limited, n is the upstream's business."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, admission="unlimited")
    assert (await rig.ask(gateway, OPENAI, n=1000)).status == 200


def batch(tag: int, conversations: int, **more: object) -> bytes:
    messages = [[{"role": "user", "content": f"tag:{tag}"}]] * conversations
    return json.dumps({"model": "reasoning", "messages": messages} | more).encode()


async def test_a_batch_weighs_its_conversations(rig: Rig) -> None:
    """Each conversation of a batch is a sequence, n times over; more than the cap are refused for good."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=4)
    client, large = await rig.client(gateway), await rig.client(gateway)
    await client.post(f"{OPENAI.path}/batch", batch(1, 3))
    await upstream.exchange(0)
    assert 3 == await gateway.metric("aiogw_slots_in_use", upstream="reasoning")
    (waiting,) = await rig.queued(gateway, OPENAI, [2], n=2)
    for body in (batch(3, 5), batch(4, 3, n=2)):
        await large.post(f"{OPENAI.path}/batch", body)
        response = await large.response()
        assert (422, "too_many_sequences") == (response.status, OPENAI.code(response))
    upstream.exchanges[0].answer(b"{}")
    assert 200 == (await client.response()).status
    (await upstream.exchange(1)).answer()
    assert 200 == (await waiting.response()).status
    assert [1, 2] == upstream.tags
    assert f"{OPENAI.path}/batch" == upstream.exchanges[0].request.target


@pytest.mark.parametrize("path", [f"{OPENAI.path}/render", "/v1/completions/render", "/v1/responses/render"])
async def test_rendering_needs_no_slot(rig: Rig, path: str) -> None:
    """What the engine does not have to think about passes when all slots are taken and the queue is full."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_limit=1)
    first = await rig.post(gateway, OPENAI, 1)
    await upstream.exchange(0)
    (second,) = await rig.queued(gateway, OPENAI, [2])
    assert 503 == (await rig.ask(gateway, OPENAI, 3)).status
    upstream.script = lambda exchange: (
        exchange.answer(b'{"prompt":"x"}') if "/render" in exchange.request.target else None
    )
    client = await rig.client(gateway)
    for _ in range(3):
        await client.post(path, OPENAI.body(4))
        response = await client.response()
        assert (200, {"prompt": "x"}) == (response.status, response.json)
    record = await gateway.record(path=path)
    assert ("completed", 0) == (record["outcome"], record["sequences"])
    assert "position" not in record
    upstream.exchanges[0].answer()
    assert 200 == (await first.response()).status
    (await upstream.tagged(2)).answer()
    assert 200 == (await second.response()).status


# -- what can be watched --------------------------------------------------------------------------------------------


async def test_a_refusal_at_entry_has_not_waited(rig: Rig, surface: Surface) -> None:
    """The wait of the metric is that of those who were let in, and not zero for each who was turned away."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, queue_limit=0)
    name = "aiogw_queue_wait_seconds_count"
    before = await gateway.metric(name, upstream="reasoning")
    client = await rig.post(gateway, surface, 1)
    exchange = await upstream.exchange(0)
    for tag in range(2, 7):
        assert 503 == (await rig.ask(gateway, surface, tag)).status
    assert "wait_seconds" not in await gateway.record(outcome="queue_full")
    exchange.answer()
    assert 200 == (await client.response()).status
    await gateway.record(outcome="completed")
    assert before + 1 == await gateway.metric(name, upstream="reasoning")


async def test_the_gauges_agree_with_the_upstream(rig: Rig, surface: Surface) -> None:
    """Slots in use, waiting, oldest wait, limits and grants are what an observer of both sides would count."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=2, queue_limit=5)
    clients = [await rig.post(gateway, surface, tag) for tag in range(2)]
    await upstream.exchange(1)
    clients += await rig.queued(gateway, surface, [2, 3])
    await eventually(lambda: upstream.in_flight == 2)

    async def reading(name: str) -> float:
        return await gateway.metric(name, upstream="reasoning")

    assert await reading("aiogw_slots_in_use") == 2
    assert await reading("aiogw_slots_limit") == 2
    assert await reading("aiogw_queue_requests") == 2
    assert await reading("aiogw_queue_limit") == 5
    assert 0 < await reading("aiogw_queue_oldest_wait_seconds") < 5
    assert await reading("aiogw_grants_total") == 2
    await finish_all(upstream, 4)
    for client in clients:
        await client.response()
    assert await reading("aiogw_grants_total") == 4
    assert await reading("aiogw_queue_oldest_wait_seconds") == 0


@pytest.mark.parametrize("surface_of_first", SURFACES, ids=lambda one: one.name)
async def test_the_place_in_the_queue_is_logged(rig: Rig, surface_of_first: Surface) -> None:
    """The log line says at which place and for how long a request waited, whichever surface it came by."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    first = await rig.post(gateway, surface_of_first, 0)
    await upstream.exchange(0)
    waiting = await rig.queued(gateway, ANTHROPIC if surface_of_first is OPENAI else OPENAI, [1, 2])
    await finish_all(upstream, 3)
    for client in (first, *waiting):
        await client.response()
    await eventually(lambda: len(gateway.records) == 3)
    assert [record["position"] for record in gateway.records] == [1, 1, 2]
    assert gateway.records[1]["wait_seconds"] > 0
