"""systemd's protocol over real datagram sockets: what the service manager hears of a daemon, and when nothing."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import OPENAI, Rig, eventually

from aiogw import service
from aiogw.service import ServiceManager


class Manager:
    """systemd's end of the protocol."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(address.replace("@", "\0", 1))
        self.environment = {"NOTIFY_SOCKET": address}
        self.heard: list[tuple[float, str]] = []

    def lines(self) -> list[str]:
        """All that was heard up to now, line by line."""
        try:
            while datagram := self._socket.recv(65536):
                self.heard += [(time.monotonic(), line) for line in datagram.decode().split("\n")]
        except BlockingIOError:
            pass
        return [line for _, line in self.heard]

    async def hears(self, line: str, times: int = 1) -> None:
        await eventually(lambda: self.lines().count(line) >= times, what=lambda: f"{line} in {self.heard}")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    one = Manager(
        f"{tmp_path}/notify" if request.param == "path" else f"@aiogw-test-{os.getpid()}-{time.monotonic_ns()}"
    )
    yield one
    one.close()


async def test_what_a_daemon_tells(rig: Rig, manager: Manager) -> None:
    """A daemon tells that it is ready when it listens, what it does, that it lives, and that it stops."""
    upstream = await rig.upstream()
    environment = manager.environment | {"WATCHDOG_USEC": "400000"}
    daemon = await rig.activated(upstream, environment=environment)
    await manager.hears("READY=1")
    await manager.hears("STATUS=reasoning: 0 of 1 slots, 0 waiting")
    running = await rig.post(daemon, OPENAI, 1)
    exchange = await upstream.exchange(0)
    waiting = await rig.post(daemon, OPENAI, 2)
    await manager.hears("STATUS=reasoning: 1 of 1 slots, 1 waiting")
    await manager.hears("WATCHDOG=1", 5)
    assert await daemon.reload(daemon.config_path.read_text())
    await manager.hears("RELOADING=1")
    await manager.hears("READY=1", 2)
    assert "STOPPING=1" not in manager.lines()

    daemon.signal(signal.SIGTERM)
    await manager.hears("STOPPING=1")
    await manager.hears("EXTEND_TIMEOUT_USEC=15000000", 3)
    await manager.hears("STATUS=draining; reasoning: 1 of 1 slots, 1 waiting")
    exchange.answer()
    (await upstream.exchange(1)).answer()
    assert [(await client.response()).status for client in (running, waiting)] == [200, 200]
    assert await daemon.exit_code() == 0
    statuses = [at for at, line in manager.heard if line.startswith("STATUS=")]
    assert all(later - earlier > 0.8 for earlier, later in itertools.pairwise(statuses))


class Daemon:
    """What a service manager is told about, for a test to change."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.status = "well"
        self.keeps_up = True
        self.service = ServiceManager(environment, status=lambda: self.status, keeps_up=lambda: self.keeps_up)


async def test_a_daemon_that_does_not_keep_up_says_nothing(manager: Manager) -> None:
    """The watchdog hears nothing while connections wait that nobody accepts, and again when somebody does."""
    daemon = Daemon(manager.environment | {"WATCHDOG_USEC": "40000", "WATCHDOG_PID": str(os.getpid())})
    daemon.keeps_up = False
    daemon.service.ready()
    await asyncio.sleep(0.1)  # two of the watchdog's periods
    assert "WATCHDOG=1" not in manager.lines()
    daemon.keeps_up = True
    await manager.hears("WATCHDOG=1", 2)
    daemon.service.close()


async def test_a_loop_that_comes_late_says_nothing(manager: Manager) -> None:
    """A turn of the loop that took a quarter of the watchdog's period is not told as a sign of life; a busy loop is."""
    daemon = Daemon(manager.environment | {"WATCHDOG_USEC": "400000"})
    daemon.service.ready()
    await manager.hears("WATCHDOG=1", 1)
    await asyncio.sleep(0)
    told = manager.lines().count("WATCHDOG=1")
    for _ in range(3):
        time.sleep(0.25)  # noqa: ASYNC251 - what the loop must not do
        await asyncio.sleep(0)
    assert manager.lines().count("WATCHDOG=1") == told
    ends_at = time.monotonic() + 0.5
    while time.monotonic() < ends_at:
        time.sleep(0.005)  # noqa: ASYNC251 - busy, but turning
        await asyncio.sleep(0)
    assert manager.lines().count("WATCHDOG=1") >= told + 3
    daemon.service.close()


async def test_a_watchdog_of_another_process(manager: Manager) -> None:
    """Variables that were meant for the parent are not ours."""
    daemon = Daemon(manager.environment | {"WATCHDOG_USEC": "4000", "WATCHDOG_PID": "1"})
    daemon.service.ready()
    await manager.hears("STATUS=well")
    assert "WATCHDOG=1" not in manager.lines()
    daemon.service.close()


async def test_a_reload(manager: Manager) -> None:
    """A reload is told with the time at which it began, and its end however it ends."""
    daemon = Daemon(manager.environment)
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    with daemon.service.reloading():
        reloading, since = manager.lines()
    assert reloading == "RELOADING=1"
    assert before <= int(since.removeprefix("MONOTONIC_USEC=")) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert manager.lines()[-1] == "READY=1"
    with pytest.raises(RuntimeError), daemon.service.reloading():
        raise RuntimeError
    assert manager.lines()[-1] == "READY=1"
    daemon.service.close()


async def test_a_status_that_stays_is_told_once(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a change is worth a datagram."""
    monkeypatch.setattr(service, "TICK_SECONDS", 0.01)
    daemon = Daemon(manager.environment)
    daemon.service.ready()
    await manager.hears("STATUS=well")
    daemon.status = "busy"
    await manager.hears("STATUS=busy")
    daemon.service.stopping()
    await manager.hears("EXTEND_TIMEOUT_USEC=15000000", 5)
    assert [line for line in manager.lines() if line.startswith("STATUS=")] == ["STATUS=well", "STATUS=busy"]
    daemon.service.close()


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "/nowhere/at/all"])
async def test_nobody_to_tell(address: str) -> None:
    """Without a service manager, or with one that does not listen, there is nothing to do and nothing to fail."""
    daemon = Daemon({"NOTIFY_SOCKET": address} if address else {})
    daemon.service.ready()
    with daemon.service.reloading():
        pass
    daemon.service.stopping()
    daemon.service.close()


def test_sockets_of_another_process() -> None:
    """What is passed to another process, or nothing at all, is no socket of ours."""
    for environment in ({}, {"LISTEN_PID": "1", "LISTEN_FDS": "1"}):
        with service.inherited_sockets(environment) as sockets:
            assert sockets == []


def test_inherited_sockets_stay_with_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not go on to children, and one that nobody takes is closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        descriptor = os.dup(server.fileno())
        os.set_inheritable(descriptor, True)
        monkeypatch.setattr(service, "FIRST_DESCRIPTOR", descriptor)
        with service.inherited_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}) as sockets:
            assert [sock.getsockname() for sock in sockets] == [server.getsockname()]
            assert not os.get_inheritable(descriptor)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
