"""Accepting with real sockets: the limit, descriptors that run out, and who is taken in at the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import eventually

from aiogw import listener as module
from aiogw.config import ListenAddress
from aiogw.listener import Listener
from aiogw.sockets import SEND_BUFFER_BYTES, CannotListen, ListeningSockets, shown

MAX_BUFFER_BYTES = int(Path("/proc/sys/net/core/wmem_max").read_text())
ANYWHERE = ListenAddress(host="127.0.0.1", port=0)


class Server:
    """Makes protocols that greet, and knows which of their connections are open."""

    def __init__(self) -> None:
        self.open: list[Greeting] = []

    def __call__(self) -> Greeting:
        return Greeting(self)


class Greeting(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self.server = server
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.server.open.append(self)
        self.transport.write(b"hello")

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.open.remove(self)
        self.transport = None


Make = Callable[..., Listener]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def make(server: Server) -> AsyncIterator[Make]:
    made: list[Listener] = []

    def one(*, max_connections: int = 100) -> Listener:
        made.append(
            Listener(
                protocol_factory=server,
                connections=lambda: len(server.open),
                max_connections=max_connections,
                unacknowledged_seconds=30,
            )
        )
        return made[-1]

    yield one
    for listener in made:
        await listener.close()
    for greeting in server.open:
        greeting.transport.abort()
    await eventually(lambda: not server.open)


@pytest.fixture
def connect() -> Iterator[Callable[[Any], socket.socket]]:
    """Connects without the loop, so that the connection waits until the loop turns."""
    made: list[socket.socket] = []

    def one(address: Any) -> socket.socket:
        made.append(socket.create_connection(address))
        made[-1].setblocking(False)
        return made[-1]

    yield one
    for sock in made:
        sock.close()


async def said(sock: socket.socket) -> bytes:
    """All that comes until the end, or the greeting."""
    loop = asyncio.get_running_loop()
    answer = b""
    while answer != b"hello" and (data := await asyncio.wait_for(loop.sock_recv(sock, 4096), 5)):
        answer += data
    return answer


def option(sock: Any, *of: int) -> int:
    value = sock.getsockopt(*of)
    assert isinstance(value, int)
    return value


async def test_what_is_set_on_a_connection(make: Make, server: Server, connect: Callable[[Any], socket.socket]) -> None:
    """A client that vanishes is noticed within 45 s, and the kernel holds a bounded part of an answer."""
    listener = make()
    await listener.listen(ANYWHERE, [], "listening")
    await said(connect(listener.addresses[0]))
    sock = server.open[0].transport.get_extra_info("socket")
    assert option(sock, socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    idle, interval, probes = (
        option(sock, socket.IPPROTO_TCP, one) for one in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert (idle, interval, probes) == (15, 5, 3)
    assert option(sock, socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    # As much as was asked for, or as the kernel allows, which then doubles it.
    assert option(sock, socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * min(SEND_BUFFER_BYTES, MAX_BUFFER_BYTES)


async def test_the_limit_is_exact_in_a_burst(
    make: Make, server: Server, connect: Callable[[Any], socket.socket]
) -> None:
    """Of connections that come in one turn of the loop as many are served as there may be, and the others are told."""
    listener = make(max_connections=7)
    await listener.listen(ANYWHERE, [], "listening")
    clients = [connect(listener.addresses[0]) for _ in range(20)]
    answers = [await said(client) for client in clients]
    assert answers[:7] == [b"hello"] * 7
    for answer in answers[7:]:
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"\r\nretry-after: 1\r\nx-should-retry: true\r\nconnection: close\r\n" in answer
    statistics = listener.statistics()
    assert (statistics.connections, statistics.max_connections) == (7, 7)
    assert statistics.refused_total == {"limit": 13, "descriptors": 0}

    clients[0].close()
    await eventually(lambda: listener.open == 6)
    late = [connect(listener.addresses[0]) for _ in range(2)]
    assert [(await said(client))[:5] for client in late] == [b"hello", b"HTTP/"]
    assert listener.open == 7


async def test_many_refusals_are_few_lines(
    make: Make,
    connect: Callable[[Any], socket.socket],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first refusal is told at once, and what follows in one line when its time has come."""
    monkeypatch.setattr(module, "TELL_SECONDS", 0.3)
    listener = make(max_connections=1)
    await listener.listen(ANYWHERE, [], "listening")
    clients = [connect(listener.addresses[0]) for _ in range(30)]
    for client in clients:
        await said(client)

    def told() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]

    await eventually(lambda: len(told()) == 2)
    assert told()[0] == "turned connections away (limit: 1); 1 of 1 are open"
    assert told()[1] == "turned connections away (limit: 28); 1 of 1 are open"


async def test_a_socket_of_our_own_is_emptied_at_the_end(
    make: Make, server: Server, connect: Callable[[Any], socket.socket]
) -> None:
    """R56: who has connected before the end is served, also if the loop has not come to it; later ones are refused."""
    listener = make()
    await listener.listen(ANYWHERE, [], "listening")
    address = listener.addresses[0]
    clients = [connect(address) for _ in range(100)]
    listener.stop_accepting()
    assert listener.open == 100
    assert [await said(client) for client in clients] == [b"hello"] * 100
    with pytest.raises(ConnectionRefusedError):
        connect(address)
    assert listener.keeps_up()


async def test_an_end_right_after_an_accept(make: Make, connect: Callable[[Any], socket.socket]) -> None:
    """A connection that is being handed over when all ends is closed, and not left to the garbage collector."""
    listener = make()
    await listener.listen(ANYWHERE, [], "listening")
    clients = [connect(listener.addresses[0]) for _ in range(3)]
    listener.stop_accepting()
    await listener.close()
    assert [await said(client) for client in clients] == [b"hello"] * 3


async def test_an_inherited_socket_is_left_to_the_next(
    make: Make, server: Server, connect: Callable[[Any], socket.socket]
) -> None:
    """Who connects after the end waits for the next process, which finds everybody there."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as kept:
        address = kept.getsockname()
        listener, following = make(), make()
        await listener.listen(ListenAddress(host=address[0], port=address[1]), given := [kept.dup()], "listening")
        assert given == []
        assert await said(connect(address)) == b"hello"
        listener.stop_accepting()
        clients = [connect(address) for _ in range(20)]
        await listener.close()
        assert len(server.open) == 1
        await following.listen(ListenAddress(host=address[0], port=address[1]), [kept.dup()], "listening")
        assert [await said(client) for client in clients] == [b"hello"] * 20


async def test_nobody_accepts(make: Make, connect: Callable[[Any], socket.socket]) -> None:
    """A connection that waits while nobody is accepted is a listener that does not keep up; a quiet one does."""
    listener = make()
    await listener.listen(ANYWHERE, [], "listening")
    assert listener.keeps_up()
    assert listener.keeps_up()
    client = connect(listener.addresses[0])
    assert listener.keeps_up(), "it has only just come"
    assert not listener.keeps_up()
    assert await said(client) == b"hello"
    assert listener.keeps_up()


@pytest.fixture
def no_descriptors() -> Iterator[Callable[[], Callable[[], None]]]:
    """Use up all descriptors; the answer gives them back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def give_back() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        while taken:
            os.close(taken.pop())

    def take() -> Callable[[], None]:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, before[1]))
        with contextlib.suppress(OSError):
            while len(taken) < 1000:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        return give_back

    yield take
    give_back()


async def test_no_descriptors(
    make: Make, connect: Callable[[Any], socket.socket], no_descriptors: Callable[[], Callable[[], None]]
) -> None:
    """Without a descriptor each client is told to come back, by means of the spare one; with one it is served again."""
    listener = make()
    await listener.listen(ANYWHERE, [], "listening")
    clients = [connect(listener.addresses[0]) for _ in range(5)]
    give_back = no_descriptors()
    for client in clients:
        assert (await said(client)).startswith(b"HTTP/1.1 503 ")
    assert listener.statistics().refused_total == {"limit": 0, "descriptors": 5}
    give_back()
    assert await said(connect(listener.addresses[0])) == b"hello"


async def test_not_even_a_spare_descriptor(
    make: Make,
    connect: Callable[[Any], socket.socket],
    no_descriptors: Callable[[], Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a spare one clients wait, the loop does not spin, and they are served soon after the pressure ends."""
    monkeypatch.setattr(module, "_open_spare", lambda: None)
    monkeypatch.setattr(module, "REST_SECONDS", 0.05)
    listener = make()
    await listener.listen(ANYWHERE, [], "listening")
    client = connect(listener.addresses[0])
    give_back = no_descriptors()
    await eventually(lambda: listener.statistics().refused_total["descriptors"] >= 3)
    assert listener._turns < 20
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1
    give_back()
    assert await said(client) == b"hello"


async def test_a_failure_to_accept(make: Make, server: Server) -> None:
    """A connection that failed by itself costs nobody else a turn; what cannot be accepted at all is tried later."""
    listener = make()
    failures = [errno.ECONNABORTED, errno.EPROTO]

    class Listening:
        def accept(self) -> Any:
            if failures:
                raise OSError(failures.pop(), "")
            raise BlockingIOError

        def fileno(self) -> int:
            return -1

    assert not listener._accept(Listening())  # type: ignore[arg-type]
    assert failures == []
    assert sum(listener.statistics().refused_total.values()) == 0


async def test_a_client_that_resets_before_it_is_served(
    make: Make, server: Server, connect: Callable[[Any], socket.socket]
) -> None:
    """A client that has come and gone in one turn of the loop leaves nothing behind."""
    listener = make()
    await listener.listen(ANYWHERE, [], "listening")
    for _ in range(5):
        client = connect(listener.addresses[0])
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    assert await said(connect(listener.addresses[0])) == b"hello"
    await eventually(lambda: listener.open == 1)


# -- the sockets themselves -----------------------------------------------------------------------------------------


async def open_at(address: ListenAddress, given: list[socket.socket] | None = None) -> ListeningSockets:
    return await ListeningSockets.open(address, [] if given is None else given, unacknowledged_seconds=30)


async def resolve(monkeypatch: pytest.MonkeyPatch, *places: tuple[int, Any]) -> None:
    async def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        return [(family, socket.SOCK_STREAM, 6, "", place) for family, place in places]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


async def test_a_name_with_two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """All addresses of a name are listened on, at one port, and what this machine does not have is left out."""
    v4, v4_too = (socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET, ("127.0.0.2", 0))
    elsewhere = (socket.AF_INET6, ("2001:db8::1", 0, 0, 0))
    await resolve(monkeypatch, elsewhere, v4, v4_too)
    opened = await open_at(ListenAddress(host="gateway", port=0))
    names = [sock.getsockname() for sock in opened]
    assert [name[0] for name in names] == ["127.0.0.1", "127.0.0.2"]
    assert names[0][1] == names[1][1] != 0
    opened.close()
    await resolve(monkeypatch, elsewhere)
    with pytest.raises(CannotListen, match="cannot listen on gateway:0: cannot assign requested address"):
        await open_at(ListenAddress(host="gateway", port=0))


async def test_one_address_of_two_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address in use is a fault, also where another one of the name is free; nothing stays open."""
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        await resolve(monkeypatch, (socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET, ("127.0.0.2", port)))
        with pytest.raises(CannotListen, match=f"cannot listen on gateway:{port}: address already in use"):
            await open_at(ListenAddress(host="gateway", port=port))
        socket.create_server(("127.0.0.1", port)).close()


async def test_inherited_sockets_are_found_by_their_address(tmp_path: Path) -> None:
    """Of the sockets given, those are taken that are bound to the address, whatever their order."""
    path = str(tmp_path / "gateway.sock")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind(path)
        unix.listen()
        given = [other, unix, tcp]
        at_path = await open_at(ListenAddress(path=path), given)
        at_port = await open_at(ListenAddress(host="127.0.0.1", port=tcp.getsockname()[1]), given)
        assert (list(at_path), list(at_port), given) == ([unix], [tcp], [other])
        assert at_path.inherited
        assert shown(unix) == f"unix:{path}"
        at_path.close()
        # The next process still needs it.
        assert (tmp_path / "gateway.sock").exists()
        at_port.close()


async def test_a_socket_file_of_the_next_gateway_is_left_alone(tmp_path: Path) -> None:
    """A gateway that ends removes the file it made, and not the one that has taken its place."""
    address = ListenAddress(path=str(tmp_path / "gateway.sock"))
    first = await open_at(address)
    (tmp_path / "gateway.sock").unlink()
    second = await open_at(address)
    first.close()
    assert (tmp_path / "gateway.sock").exists()
    second.close()
    assert not (tmp_path / "gateway.sock").exists()
