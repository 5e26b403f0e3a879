"""Who has left, as Linux tells it of real sockets that nobody reads."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import uvloop
from rig import eventually

from aiogw.departures import Departures, Watched

Pair = Callable[[], tuple[socket.socket, socket.socket]]


@pytest.fixture
async def departures() -> AsyncIterator[Departures]:
    watching = Departures(asyncio.get_running_loop())
    yield watching
    watching.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Makes connections over TCP, each with our end of it and the client's."""
    made: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def connect() -> tuple[socket.socket, socket.socket]:
            theirs = socket.create_connection(server.getsockname())
            ours, _address = server.accept()
            ours.setblocking(False)
            made.extend((ours, theirs))
            return ours, theirs

        yield connect
    for one in made:
        one.close()


def finish(theirs: socket.socket) -> None:
    theirs.close()


def reset(theirs: socket.socket) -> None:
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()


def half_close(theirs: socket.socket) -> None:
    theirs.shutdown(socket.SHUT_WR)


each_way = pytest.mark.parametrize("leave", [finish, reset, half_close])


async def turns() -> None:
    """Enough turns of the loop for whatever the kernel has to say by now."""
    for _ in range(5):
        await asyncio.sleep(0)


@each_way
@pytest.mark.parametrize("unread", [b"", b"the beginning of another request"], ids=["nothing", "unread"])
async def test_leaving_is_told_once(
    departures: Departures, pair: Pair, leave: Callable[[socket.socket], None], unread: bytes
) -> None:
    """A FIN, a RST and a half-close are all told, also behind bytes that nobody reads, and never again."""
    ours, theirs = pair()
    told: list[str] = []
    watched = departures.watch(ours.fileno(), lambda: told.append("gone"))
    theirs.send(unread)
    await turns()
    assert [] == told
    leave(theirs)
    await eventually(lambda: ["gone"] == told)
    await turns()
    assert ["gone"] == told
    departures.forget(watched)


@each_way
async def test_one_that_has_left_before(
    departures: Departures, pair: Pair, leave: Callable[[socket.socket], None]
) -> None:
    """Whoever left before anybody watched is told as well, from the loop and not from within the call."""
    ours, theirs = pair()
    leave(theirs)
    told: list[str] = []
    departures.watch(ours.fileno(), lambda: told.append("gone"))
    assert [] == told
    await eventually(lambda: ["gone"] == told)


async def test_only_the_one_that_leaves_is_told_of(departures: Departures, pair: Pair) -> None:
    """Of many, each has a callback of its own."""
    pairs = [pair() for _ in range(10)]
    told: list[int] = []
    for number, (ours, _theirs) in enumerate(pairs):
        departures.watch(ours.fileno(), lambda number=number: told.append(number))  # type: ignore[misc]
    for number in (7, 2):
        pairs[number][1].close()
        await eventually(lambda number=number: number in told)  # type: ignore[misc]
    await turns()
    assert [7, 2] == told


async def test_what_is_forgotten_is_not_told(departures: Departures, pair: Pair) -> None:
    """After ``forget`` a departure is nobody's, and forgetting twice is as good as once."""
    ours, theirs = pair()
    other, others = pair()
    told: list[str] = []
    watched = departures.watch(ours.fileno(), lambda: told.append("forgotten"))
    departures.watch(other.fileno(), lambda: told.append("watched"))
    departures.forget(watched)
    departures.forget(watched)
    theirs.close()
    others.close()
    await eventually(lambda: "watched" in told)
    await turns()
    assert ["watched"] == told


async def test_who_forgets_another_in_the_same_turn(departures: Departures, pair: Pair) -> None:
    """What is forgotten while departures are being told is not told, though the kernel has named it already."""
    told: list[str] = []
    watched: list[Watched] = []

    def forget_all() -> None:
        told.append("gone")
        for one in watched:
            departures.forget(one)

    for _ in range(2):
        ours, theirs = pair()
        theirs.close()
        watched.append(departures.watch(ours.fileno(), forget_all))
    await eventually(lambda: bool(told))
    await turns()
    assert 1 == len(told)


async def test_a_bug_in_one_callback_is_not_the_others(
    departures: Departures, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """Those named together with one whose callback fails are told all the same."""
    told: list[str] = []

    def fail() -> None:
        told.append("failed")
        raise RuntimeError

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    for callback in (fail, lambda: told.append("gone"), fail):
        ours, theirs = pair()
        theirs.close()
        departures.watch(ours.fileno(), callback)
    await eventually(lambda: ["failed", "failed", "gone"] == sorted(told))


async def test_a_number_that_another_socket_has_now(departures: Departures, pair: Pair) -> None:
    """A socket that was closed unforgotten takes nothing from the next one of its number, nor does forgetting it."""
    told: list[str] = []
    ours, _theirs = pair()
    another, anothers = pair()
    number = ours.fileno()
    before = departures.watch(number, lambda: told.append("before"))
    ours.close()
    with socket.socket(fileno=fcntl.fcntl(another.fileno(), fcntl.F_DUPFD, number)) as successor:
        assert number == successor.fileno()
        departures.watch(number, lambda: told.append("after"))
        departures.forget(before)
        await turns()
        assert [] == told
        anothers.close()
        await eventually(lambda: ["after"] == told)


async def test_the_same_socket_again(departures: Departures, pair: Pair) -> None:
    """The next request on a kept connection is the one that is told."""
    ours, theirs = pair()
    told: list[str] = []
    first = departures.watch(ours.fileno(), lambda: told.append("first"))
    departures.watch(ours.fileno(), lambda: told.append("second"))
    departures.forget(first)
    theirs.close()
    await eventually(lambda: ["second"] == told)


async def test_a_socket_that_is_closed_cannot_be_watched(departures: Departures, pair: Pair) -> None:
    """It is no error, nobody is called, and its number is free for the next."""
    ours, _theirs = pair()
    number = ours.fileno()
    ours.close()
    told: list[str] = []
    watched = departures.watch(number, lambda: told.append("closed"))
    await turns()
    departures.forget(watched)
    another, anothers = pair()
    departures.watch(another.fileno(), lambda: told.append("another"))
    anothers.close()
    await eventually(lambda: ["another"] == told)


async def test_our_own_closing_is_no_departure(departures: Departures, pair: Pair) -> None:
    """A socket that we close is not told of, and can be forgotten afterwards."""
    ours, theirs = pair()
    told: list[str] = []
    watched = departures.watch(ours.fileno(), lambda: told.append("gone"))
    ours.close()
    theirs.close()
    await turns()
    departures.forget(watched)
    assert [] == told


async def test_after_the_close_nobody_is_told(pair: Pair) -> None:
    """``close`` gives back its descriptor, and those still watched may be forgotten later."""
    ours, theirs = pair()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    departures = Departures(asyncio.get_running_loop())
    told: list[str] = []
    watched = departures.watch(ours.fileno(), lambda: told.append("gone"))
    theirs.close()
    departures.close()
    assert before - 1 == len(os.listdir("/proc/self/fd"))
    await turns()
    departures.forget(watched)
    assert [] == told


@each_way
def test_the_loop_that_the_gateway_runs_on(pair: Pair, leave: Callable[[socket.socket], None]) -> None:
    """On uvloop an epoll within its epoll is told of as well."""

    async def watch() -> None:
        departures = Departures(asyncio.get_running_loop())
        ours, theirs = pair()
        gone = asyncio.Event()
        departures.watch(ours.fileno(), gone.set)
        leave(theirs)
        async with asyncio.timeout(5):
            await gone.wait()
        departures.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(watch())
