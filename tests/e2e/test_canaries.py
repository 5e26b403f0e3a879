"""G23, R61: secrets and what was said, followed through every way a request can end, at DEBUG: none of it shows.

The log is searched for them after every test (rig.SAID); here all of it is provoked in one place, and error bodies,
metrics, what is printed of values, and the command line are searched as well.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import (
    ANTHROPIC,
    OPENAI,
    SAID,
    STREAM_HEAD,
    Daemon,
    Exchange,
    InProcessGateway,
    Response,
    Rig,
    RunningGateway,
    ScriptedUpstream,
    Surface,
    chunk,
    configuration,
    eventually,
    head,
    request_bytes,
    upstream_table,
    whole,
)

from aiogw.cli import main
from aiogw.dialects import DIALECTS
from aiogw.errors import UpstreamStatus

KEY, OTHER_KEY, WRONG_KEY, CREDENTIAL = "canary-key", "canary-other-key", "canary-wrong-key", "canary-credential"
SECRETS = (KEY, OTHER_KEY, WRONG_KEY, CREDENTIAL)
PROMPT, COMPLETION = "canary-prompt", "canary-completion"
EVERYTHING = (*SECRETS, PROMPT, COMPLETION)

AUTHORIZED = f"authorization: Bearer {KEY}"
ANSWER = json.dumps(
    {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "reasoning",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": COMPLETION}, "finish_reason": "stop"}],
    }
).encode()
EVENT = chunk({"role": "assistant", "content": COMPLETION})

both = pytest.mark.parametrize("surface", [OPENAI, ANTHROPIC], ids=lambda surface: surface.name)


def secret(path: Path, text: str) -> str:
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def auth(directory: Path, *, places: int = 2) -> dict[str, Any]:
    holders = {
        name: {"file": secret(directory / name, key), "models": ["reasoning", "nowhere"], "queue_places": places}
        for name, key in (("alice", KEY), ("bob", OTHER_KEY))
    }
    return {"mode": "keys", "keys": holders}


def asked(surface: Surface, **more: Any) -> bytes:
    """A request whose every text is the prompt."""
    return surface.body(1, **({"messages": [{"role": "user", "content": PROMPT}]} | more))


def user(block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


TOOLS = [{"name": "f", "input_schema": {}}]
UNSUPPORTED = "... is not supported by this gateway"
NO_TOOL = "tool_choice.name: tool ... not found in tools"
# What a client is shown of its own words, and what the log has instead.
REPEATED: list[tuple[dict[str, Any], str]] = [
    (user({"type": PROMPT}), f"messages.0.content.0.type: {UNSUPPORTED}"),
    (user({"type": f"'\"{PROMPT}`\n"}), f"messages.0.content.0.type: {UNSUPPORTED}"),
    ({"messages": [{"role": PROMPT, "content": "x"}]}, "messages.0.role: ... is not user, assistant or system"),
    ({"thinking": {"type": PROMPT}}, "thinking.type: ... is not supported"),
    ({"tools": TOOLS, "tool_choice": {"type": PROMPT}}, f"tool_choice.type: {UNSUPPORTED}"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": PROMPT}},
        "tool_choice.name: tool ... not found in tools",
    ),
    ({"tools": [{"type": PROMPT, "name": PROMPT}]}, "tools.0: tool type ... is not supported by this gateway"),
]


class House:
    """A gateway with secrets, before an upstream that a test scripts."""

    def __init__(self, rig: Rig, gateway: RunningGateway, upstream: ScriptedUpstream) -> None:
        self.rig = rig
        self.gateway = gateway
        self.upstream = upstream

    async def ask(self, surface: Surface, body: bytes, *headers: str, path: str | None = None) -> Response:
        client = await self.rig.client(self.gateway)
        await client.post(path or surface.path, body, *(headers or (AUTHORIZED,)))
        response = await client.response()
        client.close()
        return response

    async def refused(self, expected: int, surface: Surface, body: bytes, *headers: str, **more: str) -> None:
        """It is, and tells nothing it should not, whatever was sent."""
        response = await self.ask(surface, body, *headers, **more)
        assert response.status == expected, response.body
        for canary in EVERYTHING:
            assert canary.encode() not in response.raw_head + response.body

    async def outcome(self, outcome: str) -> None:
        await self.gateway.record(outcome=outcome)


@contextlib.asynccontextmanager
async def opened(rig: Rig, directory: Path, *, process: bool, **changes: Any) -> AsyncIterator[House]:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
    upstream = await rig.upstream()
    gateway = await rig.gateway(
        upstream,
        process=process,
        auth=auth(directory, places=changes.pop("places", 2)),
        others={"nowhere": upstream_table(nowhere, models=["nowhere"])},
        server={
            "log_level": "debug",
            "max_body_bytes": 10_000,
            "drain_timeout_seconds": 0.2,
            "models_refresh_seconds": 30,
        },
        credential_file=secret(directory / "credential", CREDENTIAL),
        **changes,
    )
    await eventually(lambda: upstream.exchanges)
    upstream.exchanges[0].answer(b'{"data": [{"id": "reasoning"}]}')
    yield House(rig, gateway, upstream)
    if not isinstance(gateway, Daemon) or gateway.running:
        metrics = (await gateway.admin("/metrics")).body.decode()
        assert not [canary for canary in EVERYTHING if canary in metrics]


@both
async def test_refusals_of_the_gateway(rig: Rig, surface: Surface, tmp_path: Path) -> None:
    """400, 401, 404, 405, 413, 422, and 503 of every kind."""
    async with opened(rig, tmp_path, process=True, queue_limit=2, queue_timeout_seconds=2, places=1) as house:
        body = asked(surface)
        for shown in (("x: y",), (f"x-api-key: {WRONG_KEY}",), (AUTHORIZED, f"x-api-key: {OTHER_KEY}")):
            await house.refused(401, surface, body, *shown)
        await house.refused(404, surface, asked(surface, model="m"))
        await house.refused(404, surface, body, path=f"{surface.path}/x?key={KEY}")
        await house.refused(413, surface, asked(surface, padding=1, messages=PROMPT * 1000))
        await house.refused(400, surface, b'{"model": "reasoning", "messages": [{"content": "' + PROMPT.encode())
        await house.refused(400, surface, asked(surface, model=7))
        for members, detail in REPEATED if surface is ANTHROPIC else ():
            response = await house.ask(surface, asked(surface, **members))
            assert (response.status, PROMPT.encode() in response.body) == (400, True)
            await house.gateway.record(outcome="invalid_request", detail=detail, model="reasoning")
        await house.refused(503, surface, asked(surface, model="nowhere"))
        if surface is OPENAI:
            await house.refused(422, surface, asked(surface, n=3))
        running = await house.rig.client(house.gateway)
        await running.post(surface.path, body, AUTHORIZED)
        exchange = await house.upstream.exchange(1)
        waiting = await house.rig.client(house.gateway)
        await waiting.post(surface.path, body, AUTHORIZED)
        await house.gateway.waiting(1)
        await house.refused(503, surface, body)
        other = await house.rig.client(house.gateway)
        await other.post(surface.path, body, f"x-api-key: {OTHER_KEY}")
        await house.gateway.waiting(2)
        await house.refused(503, surface, body, f"x-api-key: {OTHER_KEY}")
        for client in (waiting, other):
            assert (await client.response()).status == 503
        for outcome in ("queue_full", "queue_places_taken", "queue_timeout", "upstream_unavailable", "invalid_api_key"):
            await house.outcome(outcome)
        exchange.answer(ANSWER)
        assert COMPLETION.encode() in (await running.response()).body


@both
async def test_answers_and_departures(rig: Rig, surface: Surface, tmp_path: Path) -> None:
    """Whole and streamed, clients that leave in the queue and in the middle, and half-written or broken HTTP."""
    async with opened(rig, tmp_path, process=True) as house:
        house.upstream.script = lambda exchange: exchange.answer(ANSWER)
        assert COMPLETION.encode() in (await house.ask(surface, asked(surface))).body
        house.upstream.script = None
        for number, leave in enumerate(("fin", "rst"), 2):
            client = await rig.client(house.gateway)
            await client.post(surface.path, asked(surface, stream=True), AUTHORIZED)
            exchange = await house.upstream.exchange(number)
            exchange.begin_stream(EVENT)
            queued = await rig.client(house.gateway)
            await queued.post(surface.path, asked(surface), AUTHORIZED)
            await house.gateway.waiting(1)
            await client.read_head()
            assert COMPLETION.encode() in await client.read_event()
            queued.leave(leave)
            await house.gateway.waiting(0)
            client.leave(leave)
            await eventually(lambda exchange=exchange: exchange.aborted)
        for sent in (
            request_bytes("POST", surface.path, None, AUTHORIZED, "content-length: 5000") + PROMPT.encode(),
            f"POST {surface.path} HTTP/1.1\r\n{AUTHORIZED}\0\r\n\r\n{PROMPT}".encode(),
            f"{PROMPT} {KEY}\r\n\r\n".encode(),
            request_bytes("POST", surface.path, None, AUTHORIZED, "transfer-encoding: chunked")
            + b"zz"
            + PROMPT.encode(),
            request_bytes("POST", surface.path, PROMPT.encode(), AUTHORIZED, "content-encoding: gzip"),
        ):
            client = await rig.client(house.gateway)
            await client.send(sent)
            client.half_close()
            await client.rest()
            client.close()


def endings() -> Iterator[tuple[str, Callable[[Exchange], object]]]:
    error = json.dumps({"error": {"message": f"{CREDENTIAL} is no key", "type": "x", "code": 401}}).encode()
    for status in (401, 403):
        yield str(status), lambda exchange, status=status: exchange.answer(error, status=status)
    yield "no-http", lambda exchange: exchange.finish(COMPLETION.encode() * 100 + b"\r\n\r\n")
    yield "bad-field", lambda exchange: exchange.finish(head(200, f"{COMPLETION}\0: x", "content-length: 5"))
    yield "bad-chunk", lambda exchange: exchange.finish(STREAM_HEAD + COMPLETION.encode())
    yield "reset", Exchange.reset
    yield "closed", Exchange.close
    yield "reset-in-the-body", lambda exchange: (exchange.write(whole(ANSWER)[:-5]), exchange.reset())
    yield "closed-in-the-body", lambda exchange: (exchange.write(whole(ANSWER)[:-5]), exchange.close())
    yield "silent", lambda exchange: None
    yield "silent-in-the-body", lambda exchange: exchange.write(whole(ANSWER)[:-5])
    yield "no-json", lambda exchange: exchange.answer(COMPLETION.encode())
    yield "another-document", lambda exchange: exchange.answer(json.dumps([COMPLETION]).encode())
    yield "silent-in-the-stream", lambda exchange: exchange.begin_stream(EVENT)
    yield "reset-in-the-stream", lambda exchange: (exchange.begin_stream(EVENT), exchange.reset())
    yield "no-event", lambda exchange: (exchange.begin_stream(EVENT), exchange.end_stream(b"data: {" + EVENT))
    yield (
        "an-error-event",
        lambda exchange: (
            exchange.begin_stream(EVENT),
            exchange.end_stream(b'data: {"error": {"message": "%b", "code": 500}}\n\n' % COMPLETION.encode()),
        ),
    )


@both
async def test_faults_of_the_upstream(rig: Rig, surface: Surface, tmp_path: Path) -> None:
    """Refusals, breaks and silences before, in and behind its answer, to whole and to streaming requests."""
    times = {"first_byte_timeout_seconds": 0.2, "idle_timeout_seconds": 0.2}
    async with opened(rig, tmp_path, process=True, **times) as house:
        for _name, end in endings():
            for stream in (False, True):
                # What the upstream is asked again for after a reset is answered the same way.
                house.upstream.script = lambda exchange, end=end: end(exchange) and None
                response = await house.ask(surface, asked(surface, stream=stream))
                for canary in (*SECRETS, PROMPT):
                    assert canary.encode() not in response.raw_head + response.body
                await house.gateway.settled()
        for outcome in ("upstream_auth", "upstream_timeout", "upstream_broken"):
            await house.outcome(outcome)


@both
async def test_a_stop_in_the_middle(rig: Rig, surface: Surface, tmp_path: Path) -> None:
    """Those who wait are refused, those who run are cut short in-band, and the log of it says nothing."""
    async with opened(rig, tmp_path, process=True) as house:
        assert isinstance(house.gateway, Daemon)
        running = await rig.client(house.gateway)
        await running.post(surface.path, asked(surface, stream=True), AUTHORIZED)
        (await house.upstream.exchange(1)).begin_stream(EVENT)
        waiting = await rig.client(house.gateway)
        await waiting.post(surface.path, asked(surface), AUTHORIZED)
        await house.gateway.waiting(1)
        house.gateway.signal(signal.SIGTERM)
        assert (await waiting.response()).status == 503
        assert surface.in_band_error(await running.response()) is not None
        assert await house.gateway.exit_code() == 0
        assert sum("draining" in line for line in house.gateway.lines) >= 2


def printed() -> str:
    """What is printed of every value of ours that is alive."""
    gc.collect()
    ours = [one for one in gc.get_objects() if str(type(one).__module__).partition(".")[0] == "aiogw"]
    assert len(ours) > 100
    return "\n".join(f"{one!r} {one!s}" for one in ours)


@both
async def test_what_is_printed_of_a_value(rig: Rig, surface: Surface, tmp_path: Path) -> None:
    """Of all there is while one request runs, one waits and some were refused: records, requests, errors, parts."""
    async with opened(rig, tmp_path, process=False) as house:
        assert isinstance(house.gateway, InProcessGateway)
        running = await rig.client(house.gateway)
        await running.post(surface.path, asked(surface, stream=True), AUTHORIZED)
        exchange = await house.upstream.exchange(1)
        exchange.begin_stream(EVENT)
        waiting = await rig.client(house.gateway)
        await waiting.post(surface.path, asked(surface), AUTHORIZED)
        await house.gateway.waiting(1)
        shown = printed()
        assert "alice" in shown
        assert [canary for canary in EVERYTHING if canary in shown] == []
        exchange.end_stream(EVENT)
        (await house.upstream.exchange(2)).answer(PROMPT.encode(), status=400)
        assert (await waiting.response()).status == 400


def test_what_is_printed_of_an_upstreams_refusal() -> None:
    """It may repeat the request."""
    error = {"message": PROMPT}
    refused = UpstreamStatus(
        upstream="u", upstream_status=400, upstream_message=PROMPT, error=error, upstream_retry_after_seconds=None
    )
    assert refused.message == PROMPT
    assert PROMPT not in repr(refused)


def test_the_search_finds_what_is_there() -> None:
    """What the log of every test is searched for has all of these in it."""
    assert all(SAID.search(f"a line with {canary} in it") for canary in EVERYTHING)


async def test_a_log_with_a_secret_fails_its_test(rig: Rig, tmp_path: Path) -> None:
    """A process that logs what it is sent does not pass the check after its test; nor does a gateway in our own."""
    program = tmp_path / "talkative.py"
    program.write_text(
        "import logging, sys\n"
        "from aiogw import cli, middleware\n"
        "read = middleware._read_body\n"
        "async def talkative(*arguments):\n"
        "    body = await read(*arguments)\n"
        "    logging.getLogger('aiogw').info('%s', body)\n"
        "    return body\n"
        "middleware._read_body = talkative\n"
        "sys.exit(cli.main())\n"
    )
    upstream = await rig.upstream(lambda exchange: exchange.answer(ANSWER))
    path = rig.config_file(configuration({"reasoning": upstream_table(upstream.url)}))
    daemon = await Daemon(path, program=(str(program),)).start()
    await rig.ask(daemon, OPENAI, 1)
    await daemon.stop()
    with pytest.raises(AssertionError, match="tag:1"):
        daemon.check_log()
    gateway = await InProcessGateway(path.read_text(), DIALECTS).start()
    await gateway.stop()
    gateway.take(logging.LogRecord("aiogw", logging.DEBUG, "", 0, "%s", (KEY,), None))
    with pytest.raises(AssertionError, match=KEY):
        gateway.check_log()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What check and show print, of good files and of bad ones."""
    credential = secret(tmp_path / "credential", CREDENTIAL)
    path = tmp_path / "gateway.toml"
    tables = {"reasoning": upstream_table("http://engine", models=["reasoning", "nowhere"], credential_file=credential)}
    path.write_text(configuration(tables, auth=auth(tmp_path)))
    told = []
    for command in (["check"], ["show"], ["show", "--client", "curl"]):
        assert main([*command, "--config", str(path)]) == 0
        told.append(capsys.readouterr())
    os.chmod(credential, 0o644)
    (tmp_path / "alice").write_text(f"{KEY} {KEY}")
    (tmp_path / "bob").write_text(f"{OTHER_KEY}\n{OTHER_KEY}")
    for command in (["check"], []):
        assert main([*command, "--config", str(path)]) == 2
        told.append(capsys.readouterr())
    assert "chmod" in told[-1].err
    assert not [canary for canary in EVERYTHING for one in told if canary in one.out + one.err]
