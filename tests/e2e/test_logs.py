"""The log: one line for each request, in either format, with the same members, and never what was said in it."""

from __future__ import annotations

import json
import re
import signal

import pytest
from rig import ANTHROPIC, OPENAI, STREAM, Rig, Surface, answer, eventually

VALUE = r'("(?:[^"\\]|\\.)*"|[^\s"]+)'
LINE = re.compile(
    rf"(?P<time>\S+) (?P<level>\w+) (?P<logger>[\w.]+): (?P<message>[^=]*?)(?P<members>(?: \w+={VALUE})*)"
)


def members(line: str) -> dict[str, str]:
    found = LINE.fullmatch(line)
    assert found, line
    pairs = re.findall(rf" (\w+)={VALUE}", found["members"])
    return {name: json.loads(value) if value.startswith('"') else value for name, value in pairs}


async def test_a_line_in_text(rig: Rig) -> None:
    """For people: a stamp, a level, and key=value for what is known of the request."""
    upstream = await rig.upstream(answer)
    daemon = await rig.daemon(upstream, server={"log_format": "text"})
    await rig.ask(daemon, ANTHROPIC, 1, "x-request-id: id-1", stream=True)
    lines = await eventually(lambda: [line for line in daemon.lines if "aiogw.access" in line])
    (line,) = lines
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info aiogw.access: request ", line)
    told = members(line)
    assert list(told) == [
        "request_id",
        "surface",
        "method",
        "path",
        "model",
        "upstream",
        "endpoint",
        "stream",
        "position",
        "read_seconds",
        "wait_seconds",
        "connect_seconds",
        "first_byte_seconds",
        "answer_seconds",
        "duration_seconds",
        "request_bytes",
        "response_bytes",
        "prompt_tokens",
        "completion_tokens",
        "status",
        "outcome",
        "phase",
        "ended_by",
    ]
    assert told["request_id"] == "id-1"
    assert (told["surface"], told["method"], told["path"]) == ("anthropic", "POST", "/llm/v1/messages")
    assert (told["model"], told["upstream"], told["stream"]) == ("reasoning", "reasoning", "true")
    assert (told["status"], told["outcome"], told["position"]) == ("200", "completed", "1")
    assert int(told["request_bytes"]) == len(ANTHROPIC.body(1, stream=True))
    assert int(told["response_bytes"]) > 100
    assert (told["prompt_tokens"], told["completion_tokens"]) == ("20", "2")
    assert 0 <= float(told["first_byte_seconds"]) <= float(told["duration_seconds"]) < 5


async def test_a_line_in_json(rig: Rig) -> None:
    """For pipelines: one JSON object a line, with the same members, numbers as numbers."""
    upstream = await rig.upstream(answer)
    daemon = await rig.daemon(upstream)
    await rig.ask(daemon, OPENAI, 1, "x-request-id: id-2", stream=True, n=1)
    told = await daemon.record(request_id="id-2")
    assert set(told) == {
        "time",
        "level",
        "logger",
        "message",
        "request_id",
        "surface",
        "method",
        "path",
        "model",
        "upstream",
        "endpoint",
        "stream",
        "position",
        "read_seconds",
        "wait_seconds",
        "connect_seconds",
        "first_byte_seconds",
        "answer_seconds",
        "duration_seconds",
        "request_bytes",
        "response_bytes",
        "status",
        "outcome",
        "phase",
        "ended_by",
    }
    assert told["response_bytes"] == sum(map(len, STREAM))
    assert told["stream"] is True
    assert told["status"] == 200
    for line in daemon.lines:
        assert isinstance(json.loads(line), dict)


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_hostile_input_stays_on_its_line(rig: Rig, log_format: str) -> None:
    """Nothing a client sends can begin a line of its own or look like another member."""
    upstream = await rig.upstream(answer)
    daemon = await rig.daemon(upstream, server={"log_format": log_format})
    client = await rig.client(daemon)
    await client.post("/v1/%0a%0d2026-01-01T00:00:00.000Z%20error%20x%20status=200%22", b"{}")
    assert (await client.response()).status == 404
    await client.post(OPENAI.path, OPENAI.body(model='x"\n\u2028 outcome=completed'))
    assert (await client.response()).status == 404
    daemon.signal(signal.SIGTERM)
    assert await daemon.exit_code() == 0
    told = [line for line in daemon.lines if "aiogw.access" in line]
    assert len(told) == 2
    for line in daemon.lines:
        assert line.isprintable()
        if log_format == "text":
            assert LINE.fullmatch(line), line
        else:
            json.loads(line)


async def test_a_model_that_is_not_there_is_named(rig: Rig, surface: Surface, process: bool) -> None:
    """Whoever looks for the reason of a 404 finds the name that was asked for, or the beginning of a long one."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    for model in ("gpt-4o", "m" * 5000):
        assert 404 == (await rig.ask(gateway, surface, model=model)).status
        record = await gateway.record(model=model[:200])
        assert ("model_not_found", 404) == (record["outcome"], record["status"])


async def test_what_was_wrong_is_named(rig: Rig, surface: Surface, process: bool) -> None:
    """The member and the reason, in the log as its client was told them; in a bounded line, whatever was sent."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, process=process)
    await rig.ask(gateway, surface, model=7)
    assert "model: " in (await gateway.record(outcome="invalid_request"))["detail"]
    client = await rig.client(gateway)
    await client.post(surface.path, b'{"model": "reasoning", ' + b'"x' * 5000)
    assert (await client.response()).status == 400
    detail = (await gateway.record(outcome="invalid_body"))["detail"]
    assert "JSON" in detail
    assert len(detail) < 200


async def test_what_was_said_is_not_logged(rig: Rig) -> None:
    """R61: neither prompts nor answers nor credentials appear in the log, however a request ends."""
    upstream = await rig.upstream(answer)
    daemon = await rig.daemon(upstream, server={"log_level": "debug"})
    for surface in (OPENAI, ANTHROPIC):
        for stream in (False, True):
            await rig.ask(daemon, surface, 424242, "authorization: Bearer sk-secret", stream=stream)
    upstream.script = lambda exchange: exchange.answer(b'{"error":{"message":"tag:424242 is bad"}}', status=400)
    await rig.ask(daemon, OPENAI, 424242)
    client = await rig.client(daemon)
    await client.post(f"{OPENAI.path}?key=sk-secret", b'{"model": "reasoning", 424242')
    await client.response()
    daemon.signal(signal.SIGTERM)
    assert await daemon.exit_code() == 0
    told = "\n".join(daemon.lines)
    for word in ("424242", "Hello", "sk-secret"):
        assert word not in told


async def test_the_level_is_obeyed(rig: Rig) -> None:
    """At "warning" requests leave no line; what is wrong still does."""
    upstream = await rig.upstream(answer)
    text = {
        "log_level": "warning",
        "listen": f"unix:{rig.directory}/a.sock",
        "admin_listen": f"unix:{rig.directory}/b.sock",
    }
    daemon = await rig.daemon(upstream, server=text)
    assert (await rig.ask(daemon, OPENAI, 1)).status == 200
    await upstream.stop()
    assert (await rig.ask(daemon, OPENAI, 2)).status == 503
    await eventually(lambda: daemon.lines)
    (line,) = daemon.lines
    assert json.loads(line)["level"] == "warning"
    assert "reasoning" in line
