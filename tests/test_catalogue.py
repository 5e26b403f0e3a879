"""The catalogue: asks upstreams for their models beside everything else, and is never in anybody's way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from rig import (
    ANTHROPIC,
    OPENAI,
    WHOLE,
    Exchange,
    InProcessGateway,
    Rig,
    RunningGateway,
    ScriptedUpstream,
    answer,
    eventually,
    framed,
    head,
    whole,
)

from aiogw import catalogue
from aiogw.catalogue import MAX_LIST_BYTES, Catalogue, ask_models
from aiogw.errors import GatewayError, UpstreamBroken, UpstreamStatus, UpstreamUnavailable
from aiogw.upstream.pool import Target, UpstreamPool

CARD = {"id": "reasoning", "object": "model", "created": 5, "owned_by": "vllm", "max_model_len": 40960}
LIST = json.dumps({"object": "list", "data": [CARD]}).encode()


def pool_of(upstream: ScriptedUpstream) -> UpstreamPool:
    assert isinstance(upstream.address, tuple)
    host, port = upstream.address
    return UpstreamPool(
        upstream="reasoning",
        target=Target(
            host=host, port=port, path=None, authority=f"{host}:{port}", prefix="", ssl_context=None, credential=None
        ),
        connect_timeout_seconds=2,
        first_byte_timeout_seconds=2,
        idle_timeout_seconds=2,
    )


def listing(exchange: Exchange) -> None:
    """A script: the list for who asks for it, the standard answer for the rest."""
    if exchange.request.target == "/v1/models":
        # As it was asked to, and as uvicorn does.
        exchange.answer(LIST, "connection: close")
        exchange.close()
    else:
        answer(exchange)


def asked(upstream: ScriptedUpstream) -> list[Exchange]:
    return [exchange for exchange in upstream.exchanges if exchange.request.target == "/v1/models"]


async def models(rig: Rig, gateway: RunningGateway, path: str = "/v1/models") -> list[dict[str, Any]]:
    client = await rig.client(gateway)
    await client.request("GET", path, None)
    response = await client.response()
    client.close()
    assert 200 == response.status
    return list(response.json["data"])


async def learned(rig: Rig, gateway: RunningGateway) -> None:
    async def found() -> bool:
        return "max_model_len" in (await models(rig, gateway))[0]

    await eventually(found, what="the list is learned")


# -- one question ---------------------------------------------------------------------------------------------------


async def test_a_list_is_asked_for(rig: Rig) -> None:
    """O13: with a GET, on a connection that is not kept, and the cards are what comes of it."""
    upstream = await rig.upstream(listing)
    assert [CARD] == await ask_models("reasoning", pool_of(upstream))
    request = upstream.exchanges[0].request
    assert ("GET", "/v1/models", b"", "close") == (
        request.method,
        request.target,
        request.body,
        request.header("connection"),
    )


async def test_a_kept_connection_is_left_alone(rig: Rig) -> None:
    """Those are for requests that hold a slot, and a list must not cost one of them its connection."""
    upstream = await rig.upstream(listing)
    gateway = await rig.gateway(upstream, server={"models_refresh_seconds": 1000})
    assert isinstance(gateway, InProcessGateway)
    await learned(rig, gateway)
    await rig.ask(gateway, OPENAI)
    (pool,) = gateway.gateway._lanes.serving()["reasoning"].pools()
    await ask_models("reasoning", pool)
    await rig.ask(gateway, OPENAI)
    connections = [exchange.connection for exchange in upstream.exchanges]
    assert [exchange.request.target for exchange in upstream.exchanges] == [
        "/v1/models",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/chat/completions",
    ]
    assert connections[1] is connections[3]
    assert 3 == len(set(connections))


BAD: list[tuple[bytes, str]] = [
    (whole(b"<html>", content_type="text/html"), "is not one"),
    (whole(b""), "is not one"),
    (whole(b"[]"), "is not one"),
    (whole(b'{"data":7}'), "is not one"),
    (whole(b'{"data":[7]}'), "is not one"),
    (whole(b'{"data":[{"id":"\xff"}]}'), "is not one"),
    (whole(b'{"data":[' + b'{"a":' * 100_000), "is not one"),
    (whole(b'{"data":[{"x":' + b"[" * 100_000), "is not one"),
    (whole(LIST[:-1]), "is not one"),
]


@pytest.mark.parametrize(("said", "reason"), BAD, ids=[str(said[-12:]) for said, _ in BAD])
async def test_what_is_no_list(rig: Rig, said: bytes, reason: str) -> None:
    """A page, another document and half a one are the upstream's fault and nothing worse."""
    upstream = await rig.upstream(lambda exchange: exchange.finish(said))
    with pytest.raises(UpstreamBroken, match=reason):
        await ask_models("reasoning", pool_of(upstream))


async def test_a_list_that_is_too_long(rig: Rig) -> None:
    """What is held of it is bounded, and the connection closed before it has all come."""
    upstream = await rig.upstream()
    asking = asyncio.ensure_future(ask_models("reasoning", pool_of(upstream)))
    exchange = await upstream.exchange(0)
    exchange.write(head(200, "content-type: application/json", "transfer-encoding: chunked"))
    for _ in range(5):
        exchange.write(framed(b" " * (MAX_LIST_BYTES // 4)))
    with pytest.raises(UpstreamBroken, match="too long"):
        await asking
    await eventually(lambda: exchange.aborted)


async def test_an_upstream_that_refuses(rig: Rig) -> None:
    """Its status is told, and so is its silence."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(b'{"detail":"Not Found"}', status=404))
    with pytest.raises(UpstreamStatus, match="Not Found"):
        await ask_models("reasoning", pool_of(upstream))
    upstream.script = lambda exchange: exchange.reset()
    with pytest.raises(GatewayError):
        await ask_models("reasoning", pool_of(upstream))
    pool = pool_of(upstream)
    await upstream.stop()
    with pytest.raises(UpstreamUnavailable):
        await ask_models("reasoning", pool)


# -- again and again ------------------------------------------------------------------------------------------------


async def test_it_asks_at_the_start_and_again(rig: Rig) -> None:
    """Every ``models_refresh_seconds``, and what changes is seen."""
    upstream = await rig.upstream(listing)
    gateway = await rig.gateway(upstream, server={"models_refresh_seconds": 0.02})
    await learned(rig, gateway)
    assert [CARD] == await models(rig, gateway)
    (card,) = await models(rig, gateway, "/llm/v1/models")
    assert (40960, "1970-01-01T00:00:05Z") == (card["max_input_tokens"], card["created_at"])
    await eventually(lambda: len(asked(upstream)) > 3)
    upstream.script = lambda exchange: exchange.answer(LIST.replace(b"40960", b"8192"))

    async def seen() -> bool:
        return (await models(rig, gateway))[0]["max_model_len"] == 8192

    await eventually(seen, what="the new length is seen")


async def test_zero_is_never(rig: Rig) -> None:
    """Nobody is asked, and the list is what the configuration says."""
    upstream = await rig.upstream(listing)
    gateway = await rig.gateway(upstream, server={"models_refresh_seconds": 0})
    assert isinstance(gateway, InProcessGateway)
    assert [] == gateway.gateway._catalogue._tasks
    assert ["reasoning"] == [card["id"] for card in await models(rig, gateway)]


async def test_an_upstream_that_is_down_is_stale_and_not_slow(rig: Rig) -> None:
    """O13, M3: the list that was learned stays, and is answered at once while the question hangs or fails."""
    upstream = await rig.upstream(listing)
    gateway = await rig.gateway(upstream, server={"models_refresh_seconds": 0.02})
    await learned(rig, gateway)
    upstream.script = None
    known = len(upstream.exchanges)
    await upstream.exchange(known)
    assert [CARD] == await models(rig, gateway)
    await upstream.stop()
    assert [CARD] == await models(rig, gateway)


async def test_a_question_that_hangs_is_given_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a while it is asked again, and the log says why there is no list."""
    monkeypatch.setattr(catalogue, "ASK_TIMEOUT_SECONDS", 0.02)
    upstream = await rig.upstream()
    await rig.gateway(upstream, server={"models_refresh_seconds": 0.02})
    first = await upstream.exchange(0)
    await eventually(lambda: first.aborted)
    upstream.script = listing
    await upstream.exchange(1)
    assert "no model list from the upstream reasoning: it took too long" in caplog.messages


async def test_bad_lists_do_not_end_the_asking(rig: Rig) -> None:
    """After each of them the next question comes, and a good answer is learned."""
    said = [data for data, _ in BAD]

    def script(exchange: Exchange) -> None:
        if said:
            exchange.finish(said.pop())
        else:
            listing(exchange)

    upstream = await rig.upstream(script)
    gateway = await rig.gateway(upstream, server={"models_refresh_seconds": 0.001})
    await learned(rig, gateway)


async def test_it_ends_with_the_gateway(rig: Rig) -> None:
    """A question that is under way is let go, its connection closed, and nothing is asked any more."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, server={"models_refresh_seconds": 1000})
    exchange = await upstream.exchange(0)
    rig.forget(gateway)
    await gateway.stop()
    await eventually(lambda: exchange.aborted)
    assert 1 == len(upstream.exchanges)


async def test_it_can_be_stopped_before_it_was_started(rig: Rig) -> None:
    """As when a listener cannot be opened."""
    upstream = await rig.upstream()
    await Catalogue(learn=lambda upstream, cards: None).stop()
    assert [] == upstream.exchanges


# -- beside everything else -----------------------------------------------------------------------------------------


async def test_it_takes_no_slot(rig: Rig) -> None:
    """M3, O13: it asks while all slots are busy and the queue is full, and is no grant."""
    upstream = await rig.upstream(lambda exchange: listing(exchange) if exchange.request.method == "GET" else None)
    gateway = await rig.gateway(upstream, queue_limit=0, server={"models_refresh_seconds": 0.02})
    busy = await rig.post(gateway, OPENAI, 1)
    exchange = await upstream.tagged(1)
    before = len(asked(upstream))
    await eventually(lambda: len(asked(upstream)) > before + 2)
    await learned(rig, gateway)
    assert 1 == await gateway.metric("aiogw_slots_in_use", upstream="reasoning")
    assert 1 == await gateway.metric("aiogw_grants_total", upstream="reasoning")
    exchange.answer(WHOLE)
    assert 200 == (await busy.response()).status


async def test_a_length_that_was_learned_is_used(rig: Rig) -> None:
    """Q11: Claude Code asks for 32,000 tokens of a model it does not know, and gets what there is."""
    upstream = await rig.upstream(listing)
    gateway = await rig.gateway(upstream, server={"models_refresh_seconds": 1000})
    await learned(rig, gateway)
    assert 200 == (await rig.ask(gateway, ANTHROPIC, 1, max_tokens=50_000)).status
    assert 40960 == json.loads((await upstream.tagged(1)).request.body)["max_tokens"]
