"""Restarts behind an inherited socket: nobody is refused, nothing that can end is cut, and the cap holds throughout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import ANTHROPIC, OPENAI, STREAM, Daemon, RawClient, Rig, Surface, answer, configuration, upstream_table

RESTARTS = Path(__file__).parents[2] / "scripts" / "restarts"


def restarts(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The gateway is not measured for coverage here: that takes as long as all else it does.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, str(RESTARTS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_restarts_under_load_lose_nothing() -> None:
    """G18 in short: clients in a closed loop, on kept and new connections, get every answer through three restarts."""
    done = restarts("--requests", "2000", "--restarts", "3", "--clients", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed\n" in done.stdout
    assert "3 restarts, exit codes [0]" in done.stdout


def test_restarts_without_inheritance_lose_something() -> None:
    """The count can fail: without inheritance whoever comes between end and start is refused."""
    done = restarts("--requests", "500", "--restarts", "1", "--clients", "20", "--bind")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ConnectionRefusedError" in done.stdout


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """The socket that systemd would keep open."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as sock:
        yield sock


def at(sock: socket.socket) -> str:
    host, port = sock.getsockname()
    return f"{host}:{port}"


async def stopping(daemon: Daemon) -> None:
    """Tell it to stop, and wait until it has heard."""
    daemon.signal(signal.SIGTERM)
    while (await daemon.admin("/readyz")).status != 503:
        pass


async def test_streams_end_in_the_old_process(rig: Rig, listening: socket.socket) -> None:
    """R58, G19: 20 streams go on to their end, who connects meanwhile waits, and the cap holds over both processes."""
    upstream = await rig.upstream()
    limits = {"cap": 20, "engine_slots": 21, "server": {"listen": at(listening), "drain_timeout_seconds": 60}}
    old = await rig.activated(upstream, sockets=[listening], **limits)
    clients = [await rig.post(old, OPENAI, tag, stream=True) for tag in range(20)]
    for tag in range(20):  # on connections of their own, which come in any order
        (await upstream.tagged(tag)).begin_stream(*STREAM[:2])
    heads = [await client.read_head() for client in clients]
    await stopping(old)
    late = [await RawClient.connect(listening.getsockname()) for _ in range(5)]
    for number, client in enumerate(late):
        await client.post(OPENAI.path, OPENAI.body(100 + number))
    for exchange in upstream.exchanges[:20]:
        exchange.end_stream(*STREAM[2:])
    for head, client in zip(heads, clients, strict=True):
        await client.read_body(head)
        assert head.complete
        assert OPENAI.text(head) == "Hello world"
        client.close()
    assert await old.exit_code() == 0
    assert all(client.quiet() for client in late)

    new = await rig.activated(upstream, sockets=[listening], **limits)
    upstream.script = answer
    for exchange in upstream.exchanges[20:]:
        answer(exchange)
    for client in late:
        assert (await client.response()).status == 200
        client.close()
    assert upstream.peak <= 20
    assert new.running


@pytest.mark.parametrize("surface", [OPENAI, ANTHROPIC], ids=lambda surface: surface.name)
async def test_a_kept_connection_is_served_to_its_end(rig: Rig, surface: Surface, listening: socket.socket) -> None:
    """R55: what is sent on a kept connection during the grace is answered, and that it ends the connection."""
    upstream = await rig.upstream(answer)
    daemon = await rig.activated(upstream, sockets=[listening], server={"listen": at(listening)})
    kept = await rig.post(daemon, surface, 1)
    response = await kept.response()
    assert (response.status, response.header("connection")) == (200, None)
    fresh = await rig.client(daemon)
    await stopping(daemon)
    for tag, client in enumerate((kept, fresh), 2):
        await client.post(surface.path, surface.body(tag, stream=True))
        response = await client.response()
        assert (response.status, response.complete) == (200, True)
        assert response.header("connection") == "close"
        assert await client.ended()
    assert await daemon.exit_code() == 0
    assert upstream.tags == [1, 2, 3]


async def test_an_answer_that_promised_its_connection(rig: Rig, listening: socket.socket) -> None:
    """A stream that began before the stop did not end its connection, so the next request is answered, too."""
    upstream = await rig.upstream()
    daemon = await rig.activated(upstream, sockets=[listening], server={"listen": at(listening)})
    client = await rig.post(daemon, OPENAI, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(*STREAM[:2])
    head = await client.read_head()
    assert head.header("connection") is None
    await stopping(daemon)
    exchange.end_stream(*STREAM[2:])
    await client.read_body(head)
    assert head.complete
    upstream.script = answer
    await client.post(OPENAI.path, OPENAI.body(2))
    response = await client.response()
    assert (response.status, response.header("connection")) == (200, "close")
    assert await daemon.exit_code() == 0


async def test_the_queue_moves_on_for_a_moment(rig: Rig, listening: socket.socket) -> None:
    """Who waits for a slot that comes free during the grace gets it; who still waits then is told to come back."""
    upstream = await rig.upstream()
    daemon = await rig.activated(upstream, sockets=[listening], server={"listen": at(listening)})
    running = await rig.post(daemon, OPENAI, 1)
    await upstream.exchange(0)
    second, third = await rig.queued(daemon, OPENAI, [2, 3])
    await stopping(daemon)
    upstream.exchanges[0].answer()
    assert (await running.response()).status == 200
    await upstream.exchange(1)
    response = await third.response()
    assert (response.status, OPENAI.code(response), response.header("connection")) == (503, "draining", "close")
    assert (response.header("retry-after"), response.header("x-should-retry")) == ("1", "true")
    upstream.exchanges[1].answer()
    assert (await second.response()).status == 200
    assert await daemon.exit_code() == 0
    assert upstream.tags == [1, 2]


async def test_silent_connections_do_not_hold_up_a_stop(rig: Rig, listening: socket.socket) -> None:
    """Idle connections are listened to for two seconds, and no longer; without any the stop is immediate."""
    upstream = await rig.upstream(answer)
    daemon = await rig.activated(upstream, sockets=[listening], server={"listen": at(listening)})
    idle = await rig.post(daemon, OPENAI, 1)
    await idle.response()
    began_at = time.monotonic()
    daemon.signal(signal.SIGTERM)
    assert await daemon.exit_code() == 0
    assert 2 <= time.monotonic() - began_at < 4
    assert await idle.ended()
    assert not idle.reset_seen

    daemon = await rig.activated(upstream, sockets=[listening], server={"listen": at(listening)})
    assert (await rig.ask(daemon, OPENAI, 2)).status == 200
    began_at = time.monotonic()
    daemon.signal(signal.SIGTERM)
    assert await daemon.exit_code() == 0
    assert time.monotonic() - began_at < 1.9


async def test_all_kinds_of_inherited_sockets(rig: Rig, listening: socket.socket, tmp_path: Path) -> None:
    """Both listeners can inherit, in any order and of any kind, and a socket file stays for the next process."""
    path = tmp_path / "kept.sock"
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        upstream = await rig.upstream(answer)
        server = {"listen": f"unix:{path}", "admin_listen": at(listening)}
        for tag in range(2):
            daemon = await rig.activated(upstream, sockets=[listening, unix], server=server)
            assert (daemon.address, daemon.admin_address) == (str(path), listening.getsockname())
            assert sum("(inherited)" in line for line in daemon.lines) == 2
            assert (await rig.ask(daemon, OPENAI, tag)).status == 200
            daemon.signal(signal.SIGTERM)
            assert await daemon.exit_code() == 0
            assert path.exists()


async def test_a_socket_that_the_configuration_does_not_know(rig: Rig, listening: socket.socket) -> None:
    """An inherited socket that is neither listen nor admin_listen ends the start, in one line with its address."""
    text = configuration({"reasoning": upstream_table("http://127.0.0.1:1")})
    daemon = Daemon(rig.config_file(text), sockets=[listening])
    # It may have said where it listens before it found the one that is left over.
    with contextlib.suppress(AssertionError):
        await daemon.start()
    assert await daemon.exit_code() == 1
    assert daemon.lines[-1] == (
        f"aiogw: {at(listening)} is inherited, but neither server.listen nor server.admin_listen"
    )


# What systemd never does, and a script that imitates it may: the last statement is the daemon.
ACTIVATION = """
import os, socket, sys
os.environ["LISTEN_PID"] = str(os.getpid())
{}
from aiogw.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ('os.environ["LISTEN_FDS"] = "abc"', "LISTEN_FDS says 'abc'; expected the number of sockets that are passed"),
        ('os.environ["LISTEN_FDS"] = "-1"', "LISTEN_FDS says '-1'; expected the number of sockets that are passed"),
        ("", "LISTEN_FDS says ''; expected the number of sockets that are passed"),
        (
            'os.environ["LISTEN_FDS"] = "1"; os.dup2(0, 3)',
            "cannot use descriptor 3 of LISTEN_FDS=1: socket operation on non-socket",
        ),
        (
            'os.environ["LISTEN_FDS"] = "1"; one = socket.socket(type=socket.SOCK_DGRAM); os.dup2(one.fileno(), 3)',
            "cannot use descriptor 3 of LISTEN_FDS=1: nobody can connect to it",
        ),
        (
            'os.environ["LISTEN_FDS"] = "1"; one = socket.socket(); os.dup2(one.fileno(), 3)',
            "cannot use descriptor 3 of LISTEN_FDS=1: nobody can connect to it",
        ),
    ],
    ids=["no-number", "negative", "missing", "no-socket", "udp", "not-listening"],
)
async def test_variables_that_systemd_would_not_set(rig: Rig, wrong: str, told: str) -> None:
    """They end the start in one line, with exit code 1."""
    text = configuration({"reasoning": upstream_table("http://127.0.0.1:1")}, log_level="error")
    path = rig.config_file(text)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ACTIVATION.format(wrong), "--config", str(path)),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, said.decode()) == (1, f"aiogw: {told}\n")
