"""The official SDKs against the real process: they chat, whole and streamed, and understand its refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest
from rig import FIRST_EVENT, OPENAI, STREAM, TEXT, Daemon, Rig, RunningGateway, answer, eventually, vllm_error


@asynccontextmanager
async def openai_client(gateway: RunningGateway, *, retries: int = 0) -> AsyncIterator[openai.AsyncOpenAI]:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)  # proxies of the machine are nobody's business here
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="sk-test", max_retries=retries, http_client=http
    ) as client:
        yield client


@asynccontextmanager
async def anthropic_client(gateway: RunningGateway, *, retries: int = 0) -> AsyncIterator[anthropic.AsyncAnthropic]:
    http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    async with anthropic.AsyncAnthropic(
        base_url=f"{gateway.url}/llm", api_key="sk-test", max_retries=retries, http_client=http
    ) as client:
        yield client


async def ask_openai(client: openai.AsyncOpenAI, tag: int = 0) -> str:
    completion = await client.chat.completions.create(
        model="reasoning", messages=[{"role": "user", "content": f"tag:{tag}"}]
    )
    return completion.choices[0].message.content or ""


async def ask_anthropic(client: anthropic.AsyncAnthropic, tag: int = 0) -> str:
    message = await client.messages.create(
        model="reasoning", max_tokens=16, messages=[{"role": "user", "content": f"tag:{tag}"}]
    )
    return "".join(block.text for block in message.content if block.type == "text")


async def saturated(rig: Rig, **changes: object) -> tuple[Daemon, object]:
    """A daemon whose only slot is taken and which queues nobody; and the exchange that has the slot."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, queue_limit=0, **changes)
    await rig.post(daemon, OPENAI, 1000)
    exchange = await upstream.exchange(0)
    upstream.script = answer
    return daemon, exchange


async def test_openai_chats(rig: Rig) -> None:
    """Whole and streamed chat, the legacy completions and the list of models."""
    upstream = await rig.upstream(answer)
    daemon = await rig.daemon(upstream)
    async with openai_client(daemon) as client:
        assert await ask_openai(client) == TEXT
        stream = await client.chat.completions.create(
            model="reasoning",
            messages=[{"role": "user", "content": "tag:1"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 22
        assert [model.id async for model in client.models.list()] == ["reasoning"]
        assert (await client.models.retrieve("reasoning")).id == "reasoning"


async def test_anthropic_chats(rig: Rig) -> None:
    """Whole and streamed messages and the list of models."""
    upstream = await rig.upstream(answer)
    daemon = await rig.daemon(upstream)
    async with anthropic_client(daemon) as client:
        assert await ask_anthropic(client) == TEXT
        async with client.messages.stream(
            model="reasoning", max_tokens=16, system="Be brief.", messages=[{"role": "user", "content": "tag:1"}]
        ) as stream:
            assert "".join([text async for text in stream.text_stream]) == TEXT
            message = await stream.get_final_message()
        assert message.stop_reason == "end_turn"
        assert message.usage.output_tokens == 2
        assert [model.id async for model in client.models.list()] == ["reasoning"]
        assert (await client.models.retrieve("reasoning")).id == "reasoning"


async def test_openai_sees_a_refusal(rig: Rig) -> None:
    """A full queue is a 503 with the gateway's own sentence and a time to come back."""
    daemon, exchange = await saturated(rig)
    async with openai_client(daemon) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await ask_openai(client)
    assert caught.value.status_code == 503
    assert "of its queue are taken" in caught.value.message
    assert caught.value.request_id
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    exchange.answer()  # type: ignore[attr-defined]


async def test_anthropic_sees_a_refusal(rig: Rig) -> None:
    """The same on the other surface, as an overloaded_error."""
    daemon, exchange = await saturated(rig)
    async with anthropic_client(daemon) as client:
        with pytest.raises(anthropic.InternalServerError) as caught:
            await ask_anthropic(client)
    assert caught.value.status_code == 503
    assert "of its queue are taken" in caught.value.message
    assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    assert caught.value.request_id
    exchange.answer()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["openai", "anthropic"])
async def test_a_refused_request_succeeds_on_its_second_try(rig: Rig, name: str) -> None:
    """An SDK that may try again waits for as long as it was told to, and is served."""
    daemon, exchange = await saturated(rig, retry_after_min_seconds=1, retry_after_max_seconds=1)
    async with openai_client(daemon, retries=1) as one, anthropic_client(daemon, retries=1) as other:
        asking = asyncio.ensure_future(ask_openai(one, 7) if name == "openai" else ask_anthropic(other, 7))
        await daemon.record(outcome="queue_full")
        exchange.answer()  # type: ignore[attr-defined]
        assert await asking == TEXT
    await daemon.record(outcome="completed", surface=name, request_bytes=daemon.records[0]["request_bytes"])


@pytest.mark.parametrize("status", [400, 429, 500])
async def test_the_upstreams_message_is_what_the_sdks_show(rig: Rig, status: int) -> None:
    """Both SDKs raise the exception of the status, with the upstream's own words."""
    upstream = await rig.upstream(lambda exchange: exchange.answer(vllm_error("so it is", status), status=status))
    gateway = await rig.gateway(upstream)
    kinds = {400: "BadRequestError", 429: "RateLimitError", 500: "InternalServerError"}
    async with openai_client(gateway) as one, anthropic_client(gateway) as other:
        with pytest.raises(getattr(openai, kinds[status]), match="so it is"):
            await ask_openai(one)
        with pytest.raises(getattr(anthropic, kinds[status]), match="so it is"):
            await ask_anthropic(other)


async def test_a_stream_that_breaks_off_raises(rig: Rig) -> None:
    """An error inside a stream reaches the program as an exception and not as a short answer."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream)

    async with openai_client(daemon) as client:
        stream = await _begun(
            upstream,
            0,
            client.chat.completions.create(
                model="reasoning", messages=[{"role": "user", "content": "tag:1"}], stream=True
            ),
        )
        await anext(stream)
        upstream.exchanges[0].reset()
        with pytest.raises(openai.APIError, match="broke off"):
            await _exhaust(stream)

    async with anthropic_client(daemon) as client:
        events = await _begun(
            upstream,
            1,
            client.messages.create(
                model="reasoning", max_tokens=16, messages=[{"role": "user", "content": "tag:2"}], stream=True
            ),
        )
        await anext(events)
        upstream.exchanges[1].reset()
        with pytest.raises(anthropic.APIStatusError, match="broke off"):
            await _exhaust(events)


async def _exhaust(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


async def _begun(upstream: object, number: int, request: object) -> object:
    """The stream of ``request``, of which the upstream has said two events."""
    asking = asyncio.ensure_future(request)  # type: ignore[arg-type]
    exchange = await upstream.exchange(number)  # type: ignore[attr-defined]
    exchange.begin_stream(FIRST_EVENT, STREAM[1])
    return await asking


async def test_a_program_that_leaves_a_stream(rig: Rig) -> None:
    """A program that closes its stream early, as with ``break``, stops the upstream."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream)
    async with openai_client(daemon) as client:
        stream = await _begun(
            upstream,
            0,
            client.chat.completions.create(
                model="reasoning", messages=[{"role": "user", "content": "tag:1"}], stream=True
            ),
        )
        async for _ in stream:
            break
        await stream.close()
        await eventually(lambda: upstream.exchanges[0].aborted)
    async with anthropic_client(daemon) as client:
        events = await _begun(
            upstream,
            1,
            client.messages.create(
                model="reasoning", max_tokens=16, messages=[{"role": "user", "content": "tag:2"}], stream=True
            ),
        )
        async for _ in events:
            break
        await events.close()
        await eventually(lambda: upstream.exchanges[1].aborted)
    await rig.check_usable(daemon, upstream)
