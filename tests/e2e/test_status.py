"""The live view from outside: the document and the feed against the upstream's own account, and the three commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp_sse_client import client as sse_client
from rig import (
    ANTHROPIC,
    FIRST_EVENT,
    OPENAI,
    WHOLE,
    Daemon,
    RawClient,
    Rig,
    RunningGateway,
    answer,
    configuration,
    eventually,
    upstream_table,
)

from aiogw.errors import GatewayError
from aiogw.status import feed as feed_module
from aiogw.status import reader, serving
from aiogw.status.explain import story
from aiogw.status.snapshot import Document, merge

SECRET = "the-prompt-that-nobody-may-see"


async def status(gateway: RunningGateway) -> Document:
    response = await gateway.admin("/status.json")
    assert (200, "application/json") == (response.status, response.header("content-type"))
    return json.loads(response.body)


@contextlib.asynccontextmanager
async def watching(gateway: RunningGateway, **options: Any) -> AsyncIterator[RawClient]:
    client = await RawClient.connect(gateway.admin_address, **options)
    try:
        await client.request("GET", "/status/events")
        yield client
    finally:
        client.close()


async def next_event(client: RawClient) -> tuple[str, Document]:
    event = (await client.read_event()).decode()
    name, data = re.fullmatch(r"event: (\w+)\ndata: (.*)\n\n", event).groups()  # type: ignore[union-attr]
    return name, json.loads(data)


def line_of(told: Document, phase: str) -> list[str]:
    """The ids of the requests in a phase, in the order of their places."""
    rows = [row for row in told["requests"].values() if row["phase"] == phase]
    return [row["id"] for row in sorted(rows, key=lambda row: row.get("position", 0))]


# -- one moment -----------------------------------------------------------------------------------------------------


async def test_the_document_of_a_saturated_gateway(rig: Rig, process: bool) -> None:
    """It agrees with the upstream's account: who is there, who waits behind whom; and of a prompt there is nothing."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=2, queue_limit=3, process=process)
    for tag in range(5):
        surface = (OPENAI, ANTHROPIC)[tag % 2]
        body = surface.body(tag, stream=True).replace(b"tag:", SECRET.encode() + b" tag:")
        client = await rig.client(gateway)
        await client.post(surface.path, body, f"x-request-id: id-{tag}")
        if tag < 2:
            await upstream.exchange(tag)
        else:
            await gateway.waiting(tag - 1)
    (await upstream.tagged(0)).begin_stream(FIRST_EVENT)
    refused = await rig.ask(gateway, OPENAI, 5, "x-request-id: id-5")
    assert 503 == refused.status

    async def answering() -> Document | None:
        told = await status(gateway)
        return told if line_of(told, "stream") else None

    told = await eventually(answering)
    one = told["upstreams"]["reasoning"]
    assert (2, 0, 2) == (one["slots_in_use"], one["slots_settling"], one["cap"])
    assert (3, 3) == (one["waiting"], one["queue_limit"])
    assert upstream.in_flight == one["slots_in_use"]
    assert 0 < one["oldest_wait_seconds"] < 30
    assert (1, 0.0) == (one["refused_by_queue"], round(one["wait_max_seconds"], 1))
    assert "newcomer_wait_seconds" not in one, "nothing has ended from which to tell"
    (endpoint,) = one["endpoints"].values()
    assert {"up": True, "slots": 8, "slots_in_use": 2} == endpoint
    assert (["id-0"], ["id-1"]) == (line_of(told, "stream"), line_of(told, "first_byte"))
    assert ["id-2", "id-3", "id-4"] == line_of(told, "queue")
    rows = {row["id"]: row for row in told["requests"].values()}
    assert ("openai", "reasoning", "reasoning") == tuple(
        rows["id-0"][name] for name in ("surface", "model", "upstream")
    )
    assert "anthropic" == rows["id-1"]["surface"]
    assert rows["id-0"]["bytes"] >= len(FIRST_EVENT)
    assert 0 <= rows["id-0"]["silent_seconds"] <= rows["id-0"]["age_seconds"] < 30
    assert "silent_seconds" not in rows["id-1"]
    (ending,) = told["endings"].values()
    assert ("id-5", "queue_full", 503) == (ending["id"], ending["outcome"], ending["status"])
    for path in ("/status", "/status.json"):
        assert SECRET.encode() not in (await gateway.admin(path)).body


async def test_whose_request_it_is(rig: Rig, tmp_path: Path) -> None:
    """Requests and endings have the name of their key, never the key; so has the story."""
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text("sk-not-to-be-seen\n")
    auth = {"mode": "keys", "keys": {"alice": {"file": str(path), "models": "all", "queue_places": 8}}}
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, auth=auth)
    client = await rig.post(daemon, OPENAI, 1, "authorization: Bearer sk-not-to-be-seen", "x-request-id: id-1")
    exchange = await upstream.exchange(0)
    refused = await rig.ask(daemon, OPENAI, 2, "authorization: Bearer sk-other-and-wrong")
    told = await status(daemon)
    assert (401, ["alice"]) == (refused.status, [row["key"] for row in told["requests"].values()])
    assert ["invalid_api_key"] == [row["outcome"] for row in told["endings"].values()]
    page = (await daemon.admin("/status")).body
    assert b"alice" in page
    for secret in ("sk-not-to-be-seen", "sk-other-and-wrong"):
        assert secret not in json.dumps(told)
        assert secret.encode() not in page
    exchange.answer()
    await client.response()
    await daemon.record(request_id="id-1")
    _, out, _ = await command("explain", "id-1", stdin="\n".join(daemon.lines).encode())
    assert "model reasoning, key alice" in out


def test_every_ending_has_a_sentence() -> None:
    """Whatever error the gateway knows, the story says who ended it, and why."""

    def kinds(one: type[GatewayError]) -> Iterator[type[GatewayError]]:
        yield one
        for kind in one.__subclasses__():
            yield from kinds(kind)

    codes = {kind.code for kind in kinds(GatewayError) if isinstance(getattr(kind, "code", None), str)}
    assert len(codes) > 15
    for code in (*codes, "completed", "client_gone", "client_stalled", "upstream_error", "upstream_auth"):
        (*_, last) = story({"request_id": "x", "time": "2026-12-01T10:00:00.000Z", "outcome": code})
        assert "ended by the " in last, code


async def test_a_departed_client_settles(rig: Rig) -> None:
    """Its slot is told apart while the engine lets go of it, and its ending says where it was."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=1, queue_limit=1, abort_settle_seconds=3)
    client = await rig.post(gateway, OPENAI, 1, "x-request-id: id-1")
    await upstream.exchange(0)
    client.close()

    async def settling() -> Document | None:
        told = await status(gateway)
        return told if told["endings"] else None

    told = await eventually(settling)
    one = told["upstreams"]["reasoning"]
    assert (0, 1) == (one["slots_in_use"], one["slots_settling"])
    (ending,) = told["endings"].values()
    assert ("client_gone", "first_byte") == (ending["outcome"], ending["phase"])


async def test_a_client_that_takes_its_time(rig: Rig) -> None:
    """Once the upstream has ended, the slot is free, and who has yet to take the rest is shown as that."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, server={"client_stall_timeout_seconds": 60, "response_buffer_bytes": 1 << 24})
    client = await rig.client(gateway, receive_buffer=4096)
    await client.post(OPENAI.path, OPENAI.body(1), "x-request-id: id-1")
    (await upstream.exchange(0)).answer(WHOLE + b" " * (8 << 20))

    async def finishing() -> Document | None:
        told = await status(gateway)
        return told if line_of(told, "finish") == ["id-1"] else None

    told = await eventually(finishing)
    assert 0 == told["upstreams"]["reasoning"]["slots_in_use"]
    assert b"<strong>runs at once</strong>" in (await gateway.admin("/status")).body
    assert 200 == (await client.response()).status


async def test_an_upstream_without_a_gate(rig: Rig) -> None:
    """Its requests are shown, and neither a cap nor a queue."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, admission="unlimited")
    await rig.post(gateway, OPENAI, 1)
    exchange = await upstream.exchange(0)
    told = await status(gateway)
    assert 1 == told["upstreams"]["reasoning"]["slots_in_use"]
    assert not {"cap", "queue_limit"} & set(told["upstreams"]["reasoning"])
    assert 200 == (await gateway.admin("/status")).status
    exchange.answer()


async def test_the_admin_listener_by_itself(rig: Rig, process: bool) -> None:
    """Whoever only knows its address is led to the page; what it runs on is nobody's business."""
    gateway = await rig.gateway(await rig.upstream(), process=process)
    root = await gateway.admin("/")
    assert (302, "status") == (root.status, root.header("location"))
    for path in ("/", "/status", "/status.json", "/metrics", "/livez", "/nowhere"):
        assert "aiogw" == (await gateway.admin(path)).header("server"), path
    async with watching(gateway) as client:
        assert "aiogw" == (await client.read_head()).header("server")


# -- the feed -------------------------------------------------------------------------------------------------------


async def test_the_feed_follows_a_request_through(rig: Rig, process: bool) -> None:
    """A snapshot, then what changes: it waits, gets its slot, ends; merged it is the document at every step."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=1, process=process)
    async with watching(gateway) as client:
        head = await client.read_head()
        assert (200, "text/event-stream") == (head.status, head.header("content-type"))
        name, told = await next_event(client)
        assert ("snapshot", {}) == (name, told["requests"])

        async def until(phase: str, ids: list[str]) -> Document:
            nonlocal told
            while line_of(told, phase) != ids:
                name, change = await next_event(client)
                assert "change" == name
                told = merge(told, change)
            return told

        for tag in (1, 2):
            await rig.post(gateway, OPENAI, tag, f"x-request-id: id-{tag}")
            await (upstream.exchange(0) if tag == 1 else gateway.waiting(1))
        await until("queue", ["id-2"])
        assert ["id-1"] == line_of(told, "first_byte")
        (await upstream.tagged(1)).answer()
        (await upstream.tagged(2)).begin_stream(FIRST_EVENT)
        await until("stream", ["id-2"])
        (await upstream.tagged(2)).end_stream()
        while len(told["endings"]) < 2:
            told = merge(told, (await next_event(client))[1])
        assert {} == told["requests"]


async def test_a_watcher_that_reads_nothing_is_let_go(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds no more than its buffers, is disconnected, and the others do not notice."""
    monkeypatch.setattr(serving, "WATCHER_STALL_SECONDS", 0.3)
    monkeypatch.setattr(serving, "WATCHER_BUFFER_BYTES", 4096)
    monkeypatch.setattr(feed_module, "INTERVAL_SECONDS", 0.002)
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, cap=1, queue_limit=60)
    # With an end there are estimates, which follow the time.
    ended = await rig.post(gateway, OPENAI, 60)
    (await upstream.tagged(60)).answer()
    await ended.response()
    await rig.post(gateway, OPENAI, 0)
    await upstream.exchange(1)
    # Long ids make long lines, and there is a change in every one of them for as long as somebody runs.
    for tag in range(50):
        await rig.post(gateway, OPENAI, tag, f"x-request-id: {'x' * 100}{tag}")
    await gateway.waiting(50)
    feed = gateway.gateway._live_view._feed  # type: ignore[attr-defined]
    async with watching(gateway, receive_buffer=4096) as stuck, watching(gateway) as quick:
        await quick.read_head()
        await eventually(lambda: 2 == feed.watchers)

        async def one_left() -> bool:
            await quick.read_event()
            return 1 == feed.watchers

        await eventually(one_left, 30)
        assert not stuck.closed
        await next_event(quick)
    await eventually(lambda: 0 == feed.watchers)
    upstream.script = answer
    upstream.exchanges[1].answer()
    await eventually(lambda: 52 == len(upstream.finished))


async def test_enough_is_enough(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One watcher too many is told to come back, so that there is room for who measures."""
    monkeypatch.setattr(serving, "MOST_WATCHERS", 1)
    gateway = await rig.gateway(await rig.upstream())
    async with watching(gateway) as first:
        await first.read_head()
        refused = await gateway.admin("/status/events")
        assert (503, "10") == (refused.status, refused.header("retry-after"))
        # Its reader looks now and then instead, and follows the feed as soon as it can.
        reading = reader.follow(reader.AdminAddress(admin_of(gateway)))
        told = await anext(reading)
        assert told is not None
        assert ["reasoning"] == list(told["upstreams"])
    assert 200 == (await gateway.admin("/metrics")).status
    feed = gateway.gateway._live_view._feed  # type: ignore[attr-defined]
    await eventually(lambda: 0 == feed.watchers)
    monkeypatch.setattr(reader, "ASK_AGAIN_SECONDS", 0.0)
    while not feed.watchers:
        assert await anext(reading) is not None
    await reading.aclose()  # type: ignore[attr-defined]


async def test_a_watcher_that_has_gone_before_the_first_byte(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose connection is closing when the feed is about to begin is no error in the log."""
    gateway = await rig.gateway(await rig.upstream())
    prepare = web.StreamResponse.prepare

    async def too_late(response: web.StreamResponse, request: web.BaseRequest) -> object:
        assert request.transport is not None
        request.transport.close()
        return await prepare(response, request)

    monkeypatch.setattr(web.StreamResponse, "prepare", too_late)
    async with watching(gateway) as client:
        with pytest.raises(EOFError):
            await client.read_head()
    monkeypatch.undo()
    assert 200 == (await gateway.admin("/status.json")).status


async def test_a_gateway_with_watchers_stops_at_once(rig: Rig) -> None:
    """They are told that it drains, and then that it has ended; nobody is waited for."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream)
    busy = await rig.post(daemon, OPENAI, 1)
    exchange = await upstream.exchange(0)
    async with watching(daemon) as client:
        await client.read_head()
        _, told = await next_event(client)
        rig.forget(daemon)
        daemon.signal(signal.SIGTERM)
        while not told["draining"]:
            told = merge(told, (await next_event(client))[1])
        # For a moment all is served, on the connections that there are.
        assert "closing" == told["upstreams"]["reasoning"]["newcomer"]
        exchange.answer()
        assert 200 == (await busy.response()).status
        while b"0\r\n\r\n" != (await client._some(65536, 5))[-5:]:
            pass
    assert 0 == await daemon.exit_code()


# -- the commands ---------------------------------------------------------------------------------------------------


async def command(*arguments: str, stdin: bytes | None = None) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "aiogw", *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin or b""), 30)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def admin_of(gateway: RunningGateway) -> str:
    address = gateway.admin_address
    return f"unix:{address}" if isinstance(address, str) else f"http://{address[0]}:{address[1]}"


async def test_status_for_scripts(rig: Rig, tmp_path: Path) -> None:
    """0 while there is room, 75 while there is none, 1 when nobody answers; words, or the document."""
    upstream = await rig.upstream()
    unix = f"unix:{tmp_path}/admin.sock"
    daemon = await rig.daemon(upstream, cap=1, queue_limit=0, server={"admin_listen": unix})
    code, out, err = await command("status", "--admin", unix)
    assert (0, "") == (code, err)
    assert "reasoning: 0 of 1 slots in use; 0 of 0 waiting, at most 10 s each; a newcomer runs at once" in out
    await rig.post(daemon, OPENAI, 1)
    exchange = await upstream.exchange(0)
    code, out, _ = await command("status", "--json", "--config", str(daemon.config_path))
    assert (75, 1) == (code, json.loads(out)["upstreams"]["reasoning"]["slots_in_use"])
    exchange.answer()
    code, out, err = await command("status", "--admin", f"unix:{tmp_path}/nobody.sock")
    assert (1, "", f"aiogw: unix:{tmp_path}/nobody.sock does not answer: no such file or directory\n") == (
        code,
        out,
        err,
    )


async def test_status_of_what_is_no_admin_address(rig: Rig) -> None:
    """The clients' own address says so, and is not taken for a gateway that is not well."""
    daemon = await rig.daemon(await rig.upstream())
    code, out, err = await command("status", "--admin", daemon.url)
    assert (1, "") == (code, out)
    assert "is it the admin address?" in err


async def test_a_reader_outlives_the_gateway(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, away for several attempts and started again, it is followed on, from a snapshot of the new one.

    That the connection is lost is told at once, and not only when the reader has waited for something in vain.
    """
    attempts = lost = 0

    class Counted(sse_client.EventSource):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal attempts
            attempts += 1
            super().__init__(*arguments, **options)

    monkeypatch.setattr(sse_client, "EventSource", Counted)
    monkeypatch.setattr(reader, "RECONNECT_SECONDS", 0.02)
    server = {"admin_listen": f"unix:{tmp_path}/admin.sock"}
    upstream = await rig.upstream()
    first = await rig.daemon(upstream, server=server)
    told: Document = {}

    async def follow() -> None:
        nonlocal told, lost
        async for document in reader.follow(reader.AdminAddress(server["admin_listen"])):
            told, lost = (told, lost + 1) if document is None else (document, lost)

    following = asyncio.ensure_future(follow())
    await eventually(lambda: told)
    await first.stop()
    rig.forget(first)
    await eventually(lambda: lost, reader.SILENCE_SECONDS / 4)
    before = attempts
    await eventually(lambda: attempts >= before + 3)
    second = await rig.daemon(upstream, server=server)
    await rig.post(second, OPENAI, 1, "x-request-id: after")
    await eventually(lambda: line_of(told, "first_byte") == ["after"], 20)
    (await upstream.exchange(0)).answer()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


class Screen:
    """``aiogw top`` at a terminal of its own; ``text`` is all that it has drawn."""

    def __init__(self, admin: str) -> None:
        self.terminal, inner = pty.openpty()
        termios.tcsetwinsize(inner, (40, 120))
        os.set_blocking(self.terminal, False)
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aiogw", "top", "--admin", admin],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment,
        )
        os.close(inner)
        self.text = ""

    def shows(self, part: str) -> bool:
        with contextlib.suppress(OSError):
            while data := os.read(self.terminal, 65536):
                self.text += data.decode(errors="replace")
        return part in self.text

    def forget(self) -> None:
        self.text = ""

    async def leave(self) -> int:
        self.process.send_signal(signal.SIGINT)
        await eventually(lambda: self.shows("") and self.process.poll() is not None, 15)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.terminal)


async def test_top_comes_back_by_itself(rig: Rig, tmp_path: Path) -> None:
    """It shows who is there, says that the gateway has gone, and goes on when it is back; Ctrl-C is a good end."""
    server = {"admin_listen": f"unix:{tmp_path}/admin.sock"}
    upstream = await rig.upstream()
    first = await rig.daemon(upstream, server=server)
    await rig.post(first, OPENAI, 1, "x-request-id: before")
    exchange = await upstream.exchange(0)
    with contextlib.closing(Screen(server["admin_listen"])) as screen:
        await eventually(lambda: screen.shows("before") and screen.shows("1 of 1"), 20, what=lambda: screen.text[-500:])
        exchange.answer()
        await first.stop()
        rig.forget(first)
        screen.forget()
        await eventually(lambda: screen.shows("connection lost, trying again"), 20, what=lambda: screen.text[-500:])
        second = await rig.daemon(upstream, server=server)
        await rig.post(second, OPENAI, 2, "x-request-id: again")
        await eventually(lambda: screen.shows("again"), 20, what=lambda: screen.text[-500:])
        assert 0 == await screen.leave(), screen.text[-500:]
    (await upstream.tagged(2)).answer()


async def test_top_wants_a_terminal(rig: Rig) -> None:
    """Into a pipe it says what is for scripts."""
    code, out, err = await command("top", "--admin", "127.0.0.1:1")
    assert (1, "", "aiogw: top needs a terminal; for scripts there is status\n") == (code, out, err)


async def a_log(rig: Rig, log_format: str) -> Daemon:
    """The log of a gateway at which one request waited and was served, one left, and one was refused."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, cap=1, queue_limit=2, server={"log_format": log_format})
    await rig.post(daemon, OPENAI, 1, "x-request-id: id-1")
    await upstream.exchange(0)
    waits = (await rig.post(daemon, OPENAI, 2, "x-request-id: id-2"),)
    await daemon.waiting(1)
    leaves = await rig.post(daemon, ANTHROPIC, 3, "x-request-id: id-3")
    await daemon.waiting(2)
    await rig.ask(daemon, OPENAI, 4, "x-request-id: id-4")
    leaves.close()
    await daemon.waiting(1)
    (await upstream.tagged(1)).answer()
    (await upstream.tagged(2)).answer()
    await waits[0].response()
    await eventually(lambda: 4 == sum("aiogw.access" in line for line in daemon.lines))
    return daemon


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("before", ["", "Dec 01 10:00:00 host aiogw[7]: "], ids=["bare", "journal"])
async def test_explain_tells_a_story(rig: Rig, log_format: str, before: str) -> None:
    """Phases with their seconds, place at entry, who ended it and why, from a log in either format."""
    daemon = await a_log(rig, log_format)
    log = "".join(f"{before}{line}\n" for line in daemon.lines).encode()

    code, out, err = await command("explain", "id-2", stdin=log)
    assert (0, "") == (code, err)
    lines = [line.strip() for line in out.splitlines()]
    assert "id-2: POST /v1/chat/completions, model reasoning" == lines[0]
    figure = r"\d+\.\d{3} s  "
    moment = r"\d\d:\d\d:\d\d\.\d{3}   "
    expected = (
        moment + r"arrived \(\d{4}-\d\d-\d\d, UTC\); its body has \d+ B",
        figure + "until all of it was there and valid",
        moment + "came to the gate of reasoning with 0 ahead of it",
        figure + "waited",
        moment + r"was let through, to 127\.0\.0\.1:\d+",
        figure + r"until the upstream's first byte, \d+\.\d+ s of it to connect",
        moment + "the answer began",
        figure + "until its last",
        figure + r"until the client had all it got, \d+ B",
        moment + r"ended by the upstream: its answer was complete, .* \(completed\); the client was told 200",
    )
    for line, pattern in zip(lines[1:], expected, strict=False):
        assert re.fullmatch(pattern, line), line

    _, out, _ = await command("explain", "id-3", stdin=log)
    assert "came to the gate of reasoning with 1 ahead of it" in out
    assert "ended by the client: it closed its connection, while it waited (client_gone)" in out
    assert "was let through" not in out
    _, out, _ = await command("explain", "id-4", stdin=log)
    assert "ended by the gateway: all places in the queue were taken (queue_full)" in out
    assert re.search("the client was told 503, and to come back in [0-9]+ s$", out, re.MULTILINE)
    assert "reasoning had 1 of 1 slots in use, and 2 of 2 places in its queue taken by other requests" in out
    code, out, err = await command("explain", "id", stdin=log)
    assert (1, "") == (code, out)
    read = r"the \d+ lines that were read, from 2\S+Z to 2\S+Z"
    assert re.fullmatch(f"aiogw: no line about id in {read}; what runs or waits now is in aiogw status .*\n", err)


async def test_explain_of_a_heavy_request(rig: Rig) -> None:
    """It waits for as many slots as it asked for, and who is refused meanwhile is not told that none is free."""
    upstream = await rig.upstream()
    daemon = await rig.daemon(upstream, cap=2, queue_limit=1)
    await rig.post(daemon, OPENAI, 1)
    await upstream.exchange(0)
    heavy = await rig.client(daemon)
    await heavy.post(OPENAI.path, OPENAI.body(2, n=2), "x-request-id: id-2")
    await daemon.waiting(1)
    refused = await rig.ask(daemon, OPENAI, 3)
    message = "The free slots of the upstream 'reasoning' are too few for the request that is next (1 of 2)"
    assert OPENAI.error(refused)["message"].startswith(message)
    (await upstream.tagged(1)).answer()
    (await upstream.tagged(2)).answer()
    await heavy.response()
    await daemon.record(request_id="id-2", sequences=2)
    log = "\n".join(daemon.lines).encode()
    _, out, _ = await command("explain", "id-2", stdin=log)
    assert "came to the gate of reasoning for 2 slots with 0 ahead of it" in out
    _, out, _ = await command("explain", refused.header("x-request-id") or "", stdin=log)
    assert "ended by the gateway: all places in the queue were taken (queue_full)" in out
    assert "reasoning had 1 of 2 slots in use, and 1 of 1 places in its queue taken by other requests" in out
    assert "the free slots were too few for the request that was next" in out


async def test_explain_reads_a_file(rig: Rig, tmp_path: Path) -> None:
    """What else the log says of a request is told as well, without what a terminal would obey."""
    path = tmp_path / "aiogw.log"
    line = "2026-12-01T10:00:05.000Z {} aiogw.access: request request_id={} duration_seconds={} outcome={}\n"
    path.write_text(
        line.format("info", "id-1", "5.0000", "upstream_broken")
        + line.format("info", "id-1", "1.0000", "completed")
        + line.format("info", "id-10", "1.0000", "completed")
        + "2026-12-01T10:00:00.000Z error aiogw.relay: request id-1 failed \x1b[31m\n"
    )
    code, out, _ = await command("explain", "id-1", str(path))
    assert 0 == code
    assert 2 == out.count("id-1: ")
    assert "10:00:00.000   arrived" in out
    assert "it broke the connection off" in out
    assert "request id-1 failed �[31m" in out
    assert "id-10" not in out
    code, out, err = await command("explain", "id-1", str(tmp_path / "none"))
    assert (1, "", f"aiogw: {tmp_path}/none: no such file or directory\n") == (code, out, err)


async def test_upstreams_come_and_go_with_the_configuration(rig: Rig) -> None:
    """A reload is seen by who watches: the new one appears, the old one goes."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream)
    async with watching(gateway) as client:
        await client.read_head()
        _, told = await next_event(client)
        other = {"other": upstream_table("http://127.0.0.1:1", models=["other"])}
        assert await gateway.reload(configuration(other))
        while ["other"] != list(told["upstreams"]):
            told = merge(told, (await next_event(client))[1])
