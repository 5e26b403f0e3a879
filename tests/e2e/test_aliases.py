"""Aliases, from the configuration to the upstream and back: clients use one name, the engine another."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rig import (
    ANTHROPIC,
    OPENAI,
    STREAM,
    TEXT,
    WHOLE,
    Rig,
    RunningGateway,
    Surface,
    answer,
    everywhere_both_ways,
    upstream_table,
    vllm_error,
    whole,
)

ALIAS = "claude-sonnet-4-5"
ALIASES = {ALIAS: "reasoning", "org/alias": "reasoning"}


async def get(rig: Rig, gateway: RunningGateway, path: str) -> Any:
    client = await rig.client(gateway)
    await client.request("GET", path, None)
    response = await client.response()
    client.close()
    assert 200 == response.status, response.body
    return response.json


@everywhere_both_ways
async def test_an_alias_end_to_end(rig: Rig, surface: Surface, stream: bool, process: bool) -> None:
    """O2, Q10: the upstream gets its own name; the client, the log and the queue see the client's."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, aliases=ALIASES, process=process)
    response = await rig.ask(gateway, surface, 1, stream=stream, model=ALIAS)
    assert 200 == response.status
    assert TEXT == surface.text(response)
    assert "reasoning" == json.loads(upstream.exchanges[0].request.body)["model"]
    assert ALIAS.encode() not in upstream.exchanges[0].request.raw
    assert surface is not ANTHROPIC or ALIAS.encode() in response.body
    record = await gateway.record(model=ALIAS)
    assert ("reasoning", "completed") == (record["upstream"], record["outcome"])


async def test_what_v1_says_of_the_model_is_the_upstreams(rig: Rig) -> None:
    """O6: the answer passes byte for byte, with the name the engine gives itself."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, aliases=ALIASES)
    assert WHOLE == (await rig.ask(gateway, OPENAI, model=ALIAS)).body
    assert b"".join(STREAM) == (await rig.ask(gateway, OPENAI, model=ALIAS, stream=True)).body


async def test_aliases_are_in_the_lists(rig: Rig) -> None:
    """M3, M4, O13: after the models, on both surfaces, also one by one, with slashes."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, aliases=ALIASES)
    names = ["reasoning", *ALIASES]
    assert names == [card["id"] for card in (await get(rig, gateway, "/v1/models"))["data"]]
    assert names == [card["id"] for card in (await get(rig, gateway, "/llm/v1/models?limit=1000"))["data"]]
    for name in names:
        card = await get(rig, gateway, f"/v1/models/{name}")
        assert (name, "reasoning" if name in ALIASES else None) == (card["id"], card.get("root"))
        assert name == (await get(rig, gateway, f"/llm/v1/models/{name}"))["id"]


async def test_one_queue_for_all_names(rig: Rig) -> None:
    """An alias is a name and not an upstream: it contends for the same slots."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, aliases=ALIASES, queue_limit=1)
    first = await rig.post(gateway, OPENAI, 1)
    await upstream.exchange(0)
    (second,) = await rig.queued(gateway, ANTHROPIC, [2], model=ALIAS)
    assert 503 == (await rig.ask(gateway, OPENAI, 3, model="org/alias")).status
    upstream.exchanges[0].answer()
    (await upstream.exchange(1)).answer()
    assert [200, 200] == [(await client.response()).status for client in (first, second)]
    assert 1 == upstream.peak


async def test_aliases_of_two_upstreams(rig: Rig) -> None:
    """Each leads to its own."""
    one, two = await rig.upstream(answer), await rig.upstream(answer)
    others = {"second": upstream_table(two.url, models=["small"], aliases={"claude-haiku": "small"})}
    gateway = await rig.gateway(one, others=others, aliases=ALIASES)
    await rig.ask(gateway, ANTHROPIC, 1, model=ALIAS)
    await rig.ask(gateway, ANTHROPIC, 2, model="claude-haiku")
    assert ([1], [2]) == (one.tags, two.tags)
    assert "small" == json.loads(two.exchanges[0].request.body)["model"]


async def test_a_form_with_an_alias(rig: Rig) -> None:
    """O2: speech to text too, with the audio untouched and the length right."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(b'{"text":"hi"}'))
    gateway = await rig.gateway(upstream, aliases=ALIASES)

    def form(model: str) -> bytes:
        return (
            b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\x00\xff\r\n-x\r\n--x\r\n'
            b'content-disposition: form-data; name="model"\r\n\r\n' + model.encode() + b"\r\n--x--\r\n"
        )

    client = await rig.client(gateway)
    body = form(ALIAS)
    await client.request("POST", "/v1/audio/transcriptions", body, "content-type: multipart/form-data; boundary=x")
    assert 200 == (await client.response()).status
    assert form("reasoning") == upstream.exchanges[0].request.body


async def test_a_model_the_upstream_forgot(rig: Rig) -> None:
    """E3: on /llm the client's own name is in the sentence, and not the engine's."""
    said = vllm_error("The model `reasoning` does not exist.", 404)
    upstream = await rig.upstream(lambda exchange: exchange.answer(said, status=404))
    gateway = await rig.gateway(upstream, aliases=ALIASES)
    response = await rig.ask(gateway, ANTHROPIC, model=ALIAS)
    assert 404 == response.status
    assert f"model: {ALIAS}" == ANTHROPIC.error(response)["message"]


async def test_counting_by_an_alias(rig: Rig) -> None:
    """M1: /tokenize gets the engine's name, too."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(b'{"count":7}'))
    gateway = await rig.gateway(upstream, aliases=ALIASES)
    client = await rig.client(gateway)
    await client.post(f"{ANTHROPIC.path}/count_tokens", ANTHROPIC.body(1, model=ALIAS))
    assert {"input_tokens": 7} == (await client.response()).json
    assert "reasoning" == json.loads(upstream.exchanges[0].request.body)["model"]


@pytest.mark.parametrize("include", [None, False, True])
async def test_accounting_end_to_end(rig: Rig, include: bool | None) -> None:
    """O3: the upstream tells the usage, the log and the metrics have it, and only who asked for it sees it."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, dialect={"accounting": True})
    more = {} if include is None else {"stream_options": {"include_usage": include}}
    response = await rig.ask(gateway, OPENAI, stream=True, **more)
    expected = [event for event in STREAM if include or b'"choices":[]' not in event]
    assert b"".join(expected) == response.body
    assert json.loads(upstream.exchanges[0].request.body)["stream_options"] == {"include_usage": True}
    record = await gateway.record(surface="openai")
    assert (20, 2) == (record["prompt_tokens"], record["completion_tokens"])
    for kind in ("prompt", "completion"):
        assert await gateway.metric("aiogw_tokens_total", upstream="reasoning", kind=kind) > 0


@pytest.mark.parametrize("include", [False, True])
async def test_accounting_of_a_stream_with_a_length(rig: Rig, include: bool) -> None:
    """O3: a length that the upstream has announced is not promised where the usage may be taken out."""
    said = whole(b"".join(STREAM), content_type="text/event-stream")
    upstream = await rig.upstream(lambda exchange: exchange.finish(said))
    gateway = await rig.gateway(upstream, dialect={"accounting": True})
    response = await rig.ask(gateway, OPENAI, stream=True, stream_options={"include_usage": include})
    assert (200, True) == (response.status, response.complete)
    assert b"".join(event for event in STREAM if include or b'"choices":[]' not in event) == response.body
    record = await gateway.record(outcome="completed")
    assert (20, 2) == (record["prompt_tokens"], record["completion_tokens"])


async def test_capabilities_reach_the_dialects(rig: Rig) -> None:
    """Q11, Q34, O1, O15: what the table of an upstream says is what its requests and answers are made by."""
    dialect = {"images": False, "max_model_len": 10, "repeat_reasoning_as": "reasoning_content"}
    dialect |= {"body_defaults": {"top_k": 20}}
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, dialect=dialect)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}}
    refused = await rig.ask(gateway, ANTHROPIC, messages=[{"role": "user", "content": [image]}])
    assert (400, "messages.0.content.0.image: this model does not accept images") == (
        refused.status,
        ANTHROPIC.error(refused)["message"],
    )
    await rig.ask(gateway, ANTHROPIC, 1)
    assert (10, 20) == tuple(json.loads(upstream.exchanges[0].request.body)[name] for name in ("max_tokens", "top_k"))
    said = await rig.ask(gateway, OPENAI, 2)
    assert {"reasoning": None, "reasoning_content": None}.items() <= said.json["choices"][0]["message"].items()
    assert 20 == json.loads(upstream.exchanges[1].request.body)["top_k"]
    assert {10} == {card["max_model_len"] for card in (await get(rig, gateway, "/v1/models"))["data"]}
