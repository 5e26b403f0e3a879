"""The story of a request in the log: how far it came, who ended it and why, under the id that its client was told."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rig import OPENAI, Daemon, Exchange, Rig, RunningGateway, ScriptedUpstream, answer, configuration, eventually
from rig import upstream_table as table

from aiogw.upstream.pool import UpstreamPool

ID = "x-request-id: the-one"
Situation = Callable[[Rig, RunningGateway, ScriptedUpstream], Awaitable[None]]


async def full(rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream) -> None:
    await rig.post(gateway, OPENAI, 1)
    await upstream.exchange(0)
    await rig.queued(gateway, OPENAI, (2, 3))
    await rig.ask(gateway, OPENAI, 0, ID)


async def answered(rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream) -> None:
    upstream.script = answer
    await rig.ask(gateway, OPENAI, 0, ID, stream=True)


async def answered_here(rig: Rig, gateway: RunningGateway, _upstream: ScriptedUpstream) -> None:
    client = await rig.client(gateway)
    await client.request("GET", "/v1/models", None, ID)
    await client.response()


async def not_there(rig: Rig, gateway: RunningGateway, _upstream: ScriptedUpstream) -> None:
    await rig.ask(gateway, OPENAI, 0, ID, model="nobody")


async def waited_in_vain(rig: Rig, gateway: RunningGateway, _upstream: ScriptedUpstream) -> None:
    await rig.post(gateway, OPENAI, 1)
    await rig.ask(gateway, OPENAI, 0, ID)


async def left_the_queue(rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream) -> None:
    await rig.post(gateway, OPENAI, 1)
    await upstream.exchange(0)
    client = await rig.post(gateway, OPENAI, 0, ID)
    await gateway.waiting(1)
    client.close()


async def left_before_the_answer(rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream) -> None:
    client = await rig.post(gateway, OPENAI, 0, ID)
    await upstream.exchange(0)
    client.close()


async def left_the_stream(rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream) -> None:
    client = await rig.post(gateway, OPENAI, 0, ID, stream=True)
    (await upstream.exchange(0)).begin_stream(b"data: {}\n\n")
    await client.read_head()
    client.close()


async def reset(rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream) -> None:
    upstream.script = Exchange.reset
    await rig.ask(gateway, OPENAI, 0, ID)


async def cut_short(rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream) -> None:
    client = await rig.post(gateway, OPENAI, 0, ID, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(b"data: {}\n\n")
    await client.read_head()
    exchange.close()


async def refused_there(rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream) -> None:
    upstream.script = lambda exchange: exchange.answer(b'{"error":{"message":"tag:0 is bad"}}', status=400)
    await rig.ask(gateway, OPENAI, 0, ID)


async def silent(rig: Rig, gateway: RunningGateway, _upstream: ScriptedUpstream) -> None:
    await rig.ask(gateway, OPENAI, 0, ID)


async def unreachable(rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream) -> None:
    await upstream.stop()
    await rig.ask(gateway, OPENAI, 0, ID)


async def drained(rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream) -> None:
    await rig.post(gateway, OPENAI, 1)
    await upstream.exchange(0)
    client = await rig.post(gateway, OPENAI, 0, ID)
    await gateway.waiting(1)
    rig.forget(gateway)
    await gateway.stop()
    await client.response()


async def died_under_it(rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream) -> None:
    await answered_with(rig, gateway, upstream, "x-request-id: before")
    connection = upstream.exchanges[0].connection

    def close_the_kept(exchange: Exchange) -> None:
        if exchange.connection is connection:
            exchange.close()
        else:
            answer(exchange)

    upstream.script = close_the_kept
    await rig.ask(gateway, OPENAI, 0, ID)


async def answered_with(rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream, header: str) -> None:
    upstream.script = answer
    await rig.ask(gateway, OPENAI, 5, header)


@pytest.mark.parametrize(
    ("situation", "told", "steps"),
    [
        (answered, {"phase": "done", "ended_by": "upstream", "outcome": "completed"}, "rwcfa"),
        (answered_here, {"phase": "done", "ended_by": "gateway", "outcome": "completed"}, ""),
        (not_there, {"phase": "read", "ended_by": "gateway", "outcome": "model_not_found"}, ""),
        (full, {"phase": "queue", "ended_by": "gateway", "outcome": "queue_full"}, ""),
        (waited_in_vain, {"phase": "queue", "ended_by": "gateway", "outcome": "queue_timeout", "position": 1}, "rw"),
        (left_the_queue, {"phase": "queue", "ended_by": "client", "outcome": "client_gone"}, "rw"),
        (left_before_the_answer, {"phase": "first_byte", "ended_by": "client", "outcome": "client_gone"}, "rwc"),
        (left_the_stream, {"phase": "stream", "ended_by": "client", "outcome": "client_gone"}, "rwcfa"),
        (
            reset,
            {
                "phase": "first_byte",
                "ended_by": "upstream",
                "outcome": "upstream_broken",
                "detail": "it closed the connection without an answer",
            },
            "rwc",
        ),
        (
            cut_short,
            {
                "phase": "stream",
                "ended_by": "upstream",
                "outcome": "upstream_broken",
                "detail": "it closed the connection before its answer was complete",
            },
            "rwcfa",
        ),
        (
            refused_there,
            {"phase": "finish", "ended_by": "upstream", "outcome": "upstream_error", "detail": "status 400"},
            "rwcfa",
        ),
        (
            silent,
            {
                "phase": "first_byte",
                "ended_by": "gateway",
                "outcome": "upstream_timeout",
                "detail": "silent for 0.5 s while the first byte was due",
            },
            "rwc",
        ),
        (
            unreachable,
            {
                "phase": "connect",
                "ended_by": "gateway",
                "outcome": "upstream_unavailable",
                "detail": "connection refused",
                "retry_after_seconds": 5,
            },
            "rw",
        ),
        (
            drained,
            {"phase": "queue", "ended_by": "gateway", "outcome": "draining", "retry_after_seconds": 1},
            "rw",
        ),
        (died_under_it, {"phase": "done", "outcome": "completed", "sent": 2}, "rwcfa"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_the_line_tells_the_story(rig: Rig, situation: Situation, told: dict[str, Any], steps: str) -> None:
    """How far it came, with the seconds of each step that it took and of no other, whose doing its end was, and why."""
    upstream = await rig.upstream()
    short = {"first_byte_timeout_seconds": 0.5} if situation is silent else {}
    waits = {"queue_timeout_seconds": 0.3} if situation is waited_in_vain else {}
    gateway = await rig.gateway(upstream, queue_limit=2, **short, **waits)
    await situation(rig, gateway, upstream)
    record = await gateway.record(request_id="the-one")
    assert told == {name: record.get(name) for name in told}
    names = {"r": "read", "w": "wait", "c": "connect", "f": "first_byte", "a": "answer"}
    assert {f"{names[step]}_seconds" for step in steps} == {
        f"{name}_seconds" for name in names.values() if f"{name}_seconds" in record
    }
    parts = sum(record.get(f"{name}_seconds", 0) for name in ("read", "wait", "first_byte", "answer"))
    assert 0 <= parts <= record["duration_seconds"] + 0.001
    for exchange in upstream.exchanges:
        if not exchange.finished and not exchange.aborted:
            exchange.answer()


async def test_who_waits_again_is_told_of(rig: Rig) -> None:
    """One id has the line that says that it went back to the queue, and from where, and the one of its end."""
    there, gone = await rig.upstream(answer), await rig.upstream(answer)
    both = table("", cap=2)
    del both["url"], both["admission"]["engine_slots"]
    both["endpoints"] = [{"url": url, "engine_slots": 2} for url in (gone.url, there.url)]
    await gone.stop()
    daemon = await rig.start(configuration({"reasoning": both}), process=True)
    assert isinstance(daemon, Daemon)
    assert 200 == (await rig.ask(daemon, OPENAI, 0, ID)).status
    await daemon.record(request_id="the-one")
    back, end = [json.loads(line) for line in daemon.lines if "the-one" in line]
    assert ("aiogw.relay", "it waits again, its endpoint is gone") == (back["logger"], back["message"])
    assert gone.url.endswith(back["endpoint"])
    assert "connection refused" == back["detail"]
    assert (1, "completed") == (end["put_back"], end["outcome"])
    assert there.url.endswith(end["endpoint"])


async def test_a_fault_of_ours_is_told_under_the_id(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The traceback of what went wrong at the grant has the id as well, as a member like that of any other line."""

    def broken(*_arguments: Any, **_options: Any) -> None:
        raise RuntimeError("planted")

    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    monkeypatch.setattr(UpstreamPool, "send", broken)
    gateway.expect_error("it failed when its turn had come")
    assert 500 == (await rig.ask(gateway, OPENAI, 0, ID)).status
    (line,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert {"request_id": "the-one", "upstream": "reasoning"} == line.fields  # type: ignore[attr-defined]
    assert 0 == await gateway.metric("aiogw_slots_in_use", upstream="reasoning")
    record = await gateway.record(request_id="the-one")
    assert ("internal_error", "gateway", 500) == (record["outcome"], record["ended_by"], record["status"])


async def test_a_drain_says_what_there_is_to_drain(rig: Rig) -> None:
    """How many run, and how many wait, when it begins."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, cap=2)
    clients = [await rig.post(daemon, OPENAI, tag) for tag in (1, 2)]
    await upstream.exchange(1)
    clients += await rig.queued(daemon, OPENAI, (3,))
    daemon.signal(signal.SIGTERM)
    (line,) = await eventually(lambda: [line for line in daemon.lines if "draining" in line and '"aiogw.app"' in line])
    assert (2, 1) == (json.loads(line)["running"], json.loads(line)["waiting"])
    upstream.script = answer
    for exchange in upstream.exchanges:
        exchange.answer()
    assert 0 == await daemon.exit_code()
