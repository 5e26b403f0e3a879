"""Where the gateway listens and where its upstreams may: TCP, IPv6 and Unix sockets; and what happens if it cannot."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import sys
from pathlib import Path

import pytest
from rig import OPENAI, Rig, Surface, answer, configuration, eventually, everywhere, upstream_table


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


@everywhere
async def test_a_unix_socket_for_clients(rig: Rig, surface: Surface, process: bool, tmp_path: Path) -> None:
    """The gateway can listen on a Unix socket, for clients and for metrics; the files are gone afterwards."""
    upstream = await rig.upstream(answer)
    paths = (tmp_path / "gateway.sock", tmp_path / "admin.sock")
    server = {"listen": f"unix:{paths[0]}", "admin_listen": f"unix:{paths[1]}"}
    gateway = await rig.gateway(upstream, server=server, process=process)
    assert (await rig.ask(gateway, surface, 1)).status == 200
    assert (await gateway.admin("/readyz")).status == 200
    await gateway.settled()
    await gateway.stop()
    rig.forget(gateway)
    assert not any(path.exists() for path in paths)


@pytest.mark.parametrize(("process", "how"), [(False, "fin"), (False, "half-close"), (True, "fin")])
async def test_leaving_the_queue_of_a_unix_socket(rig: Rig, process: bool, how: str, tmp_path: Path) -> None:
    """A departure is seen on a Unix socket as well as on TCP."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, server={"listen": f"unix:{tmp_path}/gateway.sock"}, process=process)
    first = await rig.post(gateway, OPENAI, 1)
    await upstream.exchange(0)
    leaver, third = await rig.queued(gateway, OPENAI, [2, 3])
    leaver.leave(how)
    await gateway.waiting(1)
    upstream.exchanges[0].answer()
    assert (await first.response()).status == 200
    (await upstream.exchange(1)).answer()
    assert (await third.response()).status == 200
    assert upstream.tags == [1, 3]


async def test_a_socket_file_that_was_left_behind(rig: Rig, process: bool, tmp_path: Path) -> None:
    """The file of a gateway that was killed does not keep the next one from starting."""
    path = tmp_path / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.exists()
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream, server={"listen": f"unix:{path}"}, process=process)
    assert (await rig.ask(gateway, OPENAI, 1)).status == 200


async def test_an_upstream_on_a_unix_socket(rig: Rig, surface: Surface, stream: bool, tmp_path: Path) -> None:
    """An upstream may listen on a Unix socket; its Host is then localhost."""
    upstream = await rig.upstream(answer, path=str(tmp_path / "vllm.sock"))
    gateway = await rig.gateway(upstream)
    for tag in (1, 2):
        response = await rig.ask(gateway, surface, tag, stream=stream)
        assert surface.text(response) == "Hello world"
    assert upstream.exchanges[0].request.header("host") == "localhost"
    assert len(upstream.connections) == 1


async def test_an_upstream_socket_that_is_not_there(rig: Rig, surface: Surface, tmp_path: Path) -> None:
    """A Unix socket that does not exist is an upstream that cannot be reached; its path stays here."""
    gateway = await rig.gateway(f"unix:{tmp_path}/nothing.sock")
    response = await rig.ask(gateway, surface)
    assert response.status == 503
    message = surface.error(response)["message"]
    assert "no such file" in message
    assert str(tmp_path) not in message


@needs_ipv6
@everywhere
async def test_ipv6_on_both_sides(rig: Rig, surface: Surface, process: bool) -> None:
    """[::1] works for clients, for metrics and for the upstream."""
    upstream = await rig.upstream(answer, host="::1")
    server = {"listen": "[::1]:0", "admin_listen": "[::1]:0"}
    gateway = await rig.gateway(upstream, server=server, process=process)
    assert (await rig.ask(gateway, surface, 1)).status == 200
    assert upstream.exchanges[0].request.header("host") == upstream.url.removeprefix("http://")


async def run_until_exit(path: Path, *arguments: str) -> tuple[int, str]:
    """Run the daemon to its end; returns its exit code and standard error."""
    command = (sys.executable, "-m", "aiogw", *arguments, "--config", str(path))
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, told = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode is not None
    return process.returncode, told.decode()


@pytest.mark.parametrize("key", ["listen", "admin_listen"])
async def test_a_port_that_is_in_use(rig: Rig, key: str) -> None:
    """R69: the daemon says which address is taken, in one line, and exits with 1."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        text = configuration({"reasoning": upstream_table("http://127.0.0.1:1")}, **{key: address})
        code, told = await run_until_exit(rig.config_file(text))
    assert code == 1
    assert told.endswith(f"aiogw: cannot listen on {address}: address already in use\n")
    assert "Traceback" not in told
    assert len([line for line in told.splitlines() if "cannot listen" in line]) == 1


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("unix:/nowhere/at/all/gateway.sock", "no such file or directory"),
        ("192.0.2.1:0", "cannot assign requested address"),
        ("unix:/" + "x" * 200, "path too long"),
    ],
)
async def test_an_address_that_cannot_be_listened_on(rig: Rig, address: str, reason: str) -> None:
    """Whatever is wrong with an address: one line, exit code 1, no traceback."""
    text = configuration({"reasoning": upstream_table("http://127.0.0.1:1")}, listen=address)
    code, told = await run_until_exit(rig.config_file(text))
    assert code == 1
    assert "Traceback" not in told
    last = told.splitlines()[-1]
    assert last.startswith(f"aiogw: cannot listen on {address}: ")
    assert reason in last


async def test_a_file_in_the_way_of_a_socket(rig: Rig, tmp_path: Path) -> None:
    """A file that is no socket keeps the gateway from starting, and is still there afterwards."""
    path = tmp_path / "precious"
    path.write_text("data")
    text = configuration({"reasoning": upstream_table("http://127.0.0.1:1")}, listen=f"unix:{path}")
    code, told = await run_until_exit(rig.config_file(text))
    assert code == 1
    assert "Traceback" not in told
    assert path.read_text() == "data"


async def test_a_second_start_by_mistake(rig: Rig, tmp_path: Path) -> None:
    """A gateway that cannot start, because another one runs with its configuration, leaves that one's sockets alone."""
    upstream = await rig.upstream(answer)
    admin = f"unix:{tmp_path}/admin.sock"
    running = await rig.daemon(upstream, server={"admin_listen": admin})
    assert not isinstance(running.address, str)
    listen = f"127.0.0.1:{running.address[1]}"
    text = configuration({"reasoning": upstream_table(upstream.url)}, listen=listen, admin_listen=admin)
    code, _ = await run_until_exit(rig.config_file(text))
    assert code == 1
    assert (await running.admin("/readyz")).status == 200
    assert (await rig.ask(running, OPENAI)).status == 200


async def test_a_second_start_on_the_same_sockets(rig: Rig, tmp_path: Path) -> None:
    """A Unix socket that somebody listens on is an address in use, like any other, and stays theirs."""
    upstream = await rig.upstream(answer)
    sockets = {"listen": f"unix:{tmp_path}/gateway.sock", "admin_listen": f"unix:{tmp_path}/admin.sock"}
    running = await rig.daemon(upstream, server=sockets)
    code, told = await run_until_exit(rig.config_file(configuration({"r": upstream_table(upstream.url)}, **sockets)))
    assert code == 1
    assert "address already in use" in told.splitlines()[-1]
    assert (await rig.ask(running, OPENAI)).status == 200


async def test_a_configuration_with_faults(rig: Rig) -> None:
    """A faulty configuration ends the daemon with 2 and one line for each fault, before anything is listened on."""
    text = configuration({"reasoning": upstream_table("http://127.0.0.1:1", cap=8, queue_limit=-1)})
    path = rig.config_file(text)
    code, told = await run_until_exit(path)
    assert code == 2
    keys = ["upstreams.reasoning.admission.cap", "upstreams.reasoning.admission.queue_limit"]
    assert keys == [line.removeprefix(f"{path}:").split(": ")[1] for line in told.splitlines()]


@pytest.mark.parametrize(
    ("key", "members"),
    [("body_defaults", {"n": 4}), ("thinking_on", {"messages": []}), ("thinking_off", {"stream": True})],
)
async def test_members_that_the_gate_decides_by(rig: Rig, key: str, members: dict[str, object]) -> None:
    """What is merged into a body cannot change what the request was admitted as: ``check`` names the key."""
    tables = {"reasoning": upstream_table("http://127.0.0.1:1", dialect={key: members})}
    code, told = await run_until_exit(rig.config_file(configuration(tables)), "check")
    assert 2 == code
    (line,) = told.splitlines()
    assert f": upstreams.reasoning.dialect.{key}: {next(iter(members))} is for the client to say" in line


async def test_more_clients_than_descriptors(rig: Rig) -> None:
    """When descriptors run out clients are turned away, with a reason where there is a way; later all is as before."""
    upstream = await rig.upstream(answer)
    daemon = await rig.daemon(upstream)
    limit = daemon.open_files + 10
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, limit))
    clients = [await rig.client(daemon) for _ in range(40)]
    await eventually(lambda: daemon.open_files >= limit - 1)
    await clients[0].post(OPENAI.path, OPENAI.body(1))
    response = await clients[0].response()
    assert response.status == 503
    assert "too many open files" in OPENAI.error(response)["message"]

    for client in clients:
        client.close()
    await eventually(lambda: daemon.open_files < limit - 5)
    assert (await rig.ask(daemon, OPENAI, 2)).status == 200
    assert upstream.tags == [2]
    # Running out is worth a line, but not one for every attempt.
    assert len(daemon.lines) < 20


async def test_a_signal_right_after_the_start(rig: Rig) -> None:
    """A daemon that is told to stop as soon as it listens stops in order."""
    daemon = await rig.daemon(await rig.upstream())
    daemon.signal(signal.SIGTERM)
    assert await daemon.exit_code() == 0
