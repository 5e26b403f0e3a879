"""Every kind of fault at every point of an exchange, between gateway and upstream and between client and gateway.

One daemon for all of them.  After each kind it must be as it was before, to the last task, descriptor and line of its
log, and must serve.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from itertools import product

import pytest
import pytest_asyncio
from fault_kinds import KINDS, Effect, Kind
from fault_proxy import CONNECT, DOWN, FAR, POINTS, FaultProxy, Point
from invariants import COUNTED_DAEMON, Invariants
from rig import (
    ANTHROPIC,
    OPENAI,
    STREAM,
    STREAM_HEAD,
    TEXT,
    WHOLE,
    Address,
    Daemon,
    RawClient,
    Response,
    Surface,
    configuration,
    eventually,
    framed,
    upstream_table,
    whole,
)

in_module_loop = pytest.mark.asyncio(loop_scope="module")

FORMS = tuple(product((OPENAI, ANTHROPIC), (False, True)))
"""Surface, and whether streamed: all four at once at each point."""

PLACES = ("upstream", "kept-upstream", "client")

# Long enough for a crowded machine: each silence is waited out once, for all points together.
TIMEOUT_SECONDS = 0.8
# For silence that a fault has made; whoever only is slow is waited for as long as anywhere.
CLIENT_PATIENCE_SECONDS = 0.3


class Stub:
    """An upstream that answers what is not HTTP as uvicorn does: 400, and the end.

    To the model ``endless`` it says all but the last piece, and that only never: it is ``at_work`` until it is left.
    """

    def __init__(self) -> None:
        self.at_work = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while body := await self._request(reader):
                self.at_work += 1
                try:
                    await self._answer(body, reader, writer)
                finally:
                    self.at_work -= 1
            writer.write(whole(b"Invalid HTTP request received.", status=400, content_type="text/plain"))
            await writer.drain()
        writer.transport.abort()

    async def _request(self, reader: asyncio.StreamReader) -> bytes | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, _, version = head.split(b"\r\n")[0].split(b" ")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            if (method, version) != (b"POST", b"HTTP/1.1"):
                return None
            return await reader.readexactly(int(fields[b"content-length"]))
        except (ValueError, KeyError, asyncio.LimitOverrunError):
            return None

    async def _answer(self, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b'"stream":true' in body:
            pieces = [STREAM_HEAD, *map(framed, STREAM), b"0\r\n\r\n"]
        else:
            answer = whole(WHOLE)
            pieces = [answer[:-20], answer[-20:]]
        for piece in pieces[:-1]:
            writer.write(piece)
            await asyncio.sleep(0)
        await writer.drain()
        if b'"endless"' in body:
            await reader.read(1)
        else:
            writer.write(pieces[-1])
            await writer.drain()


@dataclass
class Heard:
    """What a client has got; ``silent``: it has left because nothing came any more."""

    response: Response | None = None
    silent: bool = False
    nonsense: bool = False


@dataclass
class House:
    """The daemon with a proxy for each point on both of its sides."""

    stub: Stub
    daemon: Daemon
    invariants: Invariants
    sides: dict[str, dict[Point, FaultProxy]]
    behind: Mapping[str, FaultProxy]
    """What is between the gateway and its upstream while the fault is on the client's side."""

    def drop(self) -> None:
        """Nobody is connected any more, and nothing kept."""
        self.mend()
        for proxy in self.behind.values():
            proxy.drop()

    def mend(self) -> None:
        """Take away the faults, and what they have left of the connections."""
        for proxy in (proxy for side in self.sides.values() for proxy in side.values()):
            proxy.set_fault(None)
            proxy.drop()
            assert proxy.own_faults == []

    async def exchange(
        self, side: str, point: Point, surface: Surface, stream: bool, effect: Effect = Effect.NONE
    ) -> Heard:
        """One request by way of the proxy of ``point``, to whatever end; patience begins with the fault."""
        patience = 8 if side != "client" or effect is Effect.NONE else CLIENT_PATIENCE_SECONDS
        heard = Heard()
        client = None
        proxy = self.sides[side][point]
        address: Address = proxy.address if side == "client" else self.daemon.address
        # Where the answer cannot reach its client in full, the upstream is still at work when that shows.
        endless = stream and effect is Effect.LOST and point.direction == DOWN and point.name != "end"
        model = model_of(side, point) if side != "client" else "endless" if endless else "direct"
        try:
            client = await RawClient.connect(address)
            await client.post(surface.path, surface.body(stream=stream, model=model))
            reading = asyncio.ensure_future(self._read(client, heard))
            if proxy.point is not None:
                await eventually(lambda: reading.done() or proxy.struck >= len(FORMS), what=f"{point} reached")
            await asyncio.wait_for(reading, patience)
        except TimeoutError:
            heard.silent = True
        except (OSError, EOFError):
            pass
        except (ValueError, AssertionError):
            heard.nonsense = True
        finally:
            if client is not None:
                client.close()
        return heard

    async def _read(self, client: RawClient, heard: Heard) -> None:
        heard.response = await client.read_head()
        while heard.response.status < 200:
            heard.response = await client.read_head()
        await client.read_body(heard.response)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    stub = Stub()
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    address: Address = server.sockets[0].getsockname()
    sides = {side: {point: FaultProxy(address) for point in POINTS} for side in ("upstream", "patient-upstream")}
    behind = {name: FaultProxy(address) for name in ("direct", "endless")}
    times = {f"{name}_timeout_seconds": TIMEOUT_SECONDS for name in ("connect", "first_byte", "idle")}
    gate = {"cap": 7, "engine_slots": 8, "queue_limit": 100, "abort_settle_seconds": 0.02}
    proxies = {model_of(side, point): proxy for side in sides for point, proxy in sides[side].items()} | behind
    tables = {
        name: upstream_table(f"http://127.0.0.1:{proxy.address[1]}", models=[name], **times, **gate)
        for name, proxy in proxies.items()
    }
    # Patient, so that it is the client's leaving that ends it, and what is only slow is not silent.
    for name in tables:
        if name.startswith(("direct", "endless", "patient")):
            tables[name] |= {"first_byte_timeout_seconds": 60, "idle_timeout_seconds": 60}
    path = tmp_path_factory.mktemp("faults") / "gateway.toml"
    path.write_text(configuration(tables, client_stall_timeout_seconds=TIMEOUT_SECONDS))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(server.close)
        for proxy in proxies.values():
            stack.callback(proxy.stop)
        daemon = await Daemon(path, program=COUNTED_DAEMON).start()
        stack.push_async_callback(daemon.stop)
        sides["client"] = {point: FaultProxy(daemon.address) for point in POINTS}
        for proxy in sides["client"].values():
            stack.callback(proxy.stop)
        house = House(stub, daemon, Invariants(daemon), sides, behind)
        # What is made once and kept is made now.
        for side, point in product(house.sides, POINTS):
            await probe(house, side, point)
        house.drop()
        await house.invariants.learn()
        yield house


def model_of(side: str, point: Point) -> str:
    return f"{side}-{point.name}"


async def probe(house: House, side: str, point: Point) -> None:
    heard = await house.exchange(side, point, OPENAI, False)
    if heard.response is not None and heard.response.status == 504:
        # The time-outs are tenths of seconds, which a busy machine may need for a whole answer.
        heard = await house.exchange(side, point, OPENAI, False)
    assert heard.response is not None
    assert (heard.response.status, heard.response.complete) == (200, True)


def is_success(heard: Heard, surface: Surface, stream: bool) -> bool:
    """Whether a client may take it for the whole answer; some take a stream for one that merely ends."""
    response = heard.response
    if response is None or not response.complete or response.status != 200 or heard.nonsense:
        return False
    return not stream or surface.in_band_error(response) is None


def check(kind: Kind, side: str, point: Point, surface: Surface, stream: bool, heard: Heard) -> None:
    """What the client of one exchange may have heard, given where and how its peers' network failed."""
    response = heard.response
    if kind.effect is Effect.NONE:
        assert is_success(heard, surface, stream), heard
        assert response is not None
        assert surface.text(response) == TEXT
        assert not stream or surface.says_end(response)
        return
    if kind.effect is Effect.LOST and is_success(heard, surface, stream):
        # All that the upstream had to say was there; only the end of its framing was not.
        assert side != "client"
        assert point.name == "end"
        assert stream
        assert response is not None
        assert surface.text(response) == TEXT
        assert surface.says_end(response)
    if side == "client":
        return
    # To the client the gateway speaks HTTP, and ends, whatever its upstream does.
    assert not heard.silent, heard
    assert not heard.nonsense, heard
    assert response is not None
    if response.status != 200:
        assert response.complete
        assert 400 <= response.status < 600
        assert surface.error(response)


@in_module_loop
@pytest.mark.parametrize(("side", "kept"), [("upstream", False), ("upstream", True), ("client", False)], ids=PLACES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_a_fault(house: House, kind: Kind, side: str, kept: bool) -> None:
    """It ends what it must and nothing else, by a refusal, an error or a break, never a hang; nothing is left of it."""
    # R07
    house.drop()
    if side == "upstream" and kind.effect is Effect.NONE:
        side = "patient-upstream"
    points = POINTS[1:] if kept else POINTS
    proxies = {point: house.sides[side][point] for point in points}
    cases = list(product(points, FORMS))
    if kept:
        await asyncio.gather(*(probe(house, side, point) for point, _ in cases))
        assert all(proxy.links for proxy in proxies.values())
    for point, proxy in proxies.items():
        proxy.set_fault(point, kind.steps)
    heard = await asyncio.gather(*(house.exchange(side, point, *form, kind.effect) for point, form in cases))

    if side != "client" or not any(link.is_open(FAR) for proxy in proxies.values() for link in proxy.links):
        # Before anything is mended: unless it cannot know that its client has gone.
        await house.invariants.at_rest()
    for point, proxy in proxies.items():
        # Where an exchange ends well all the same, another may go over its connection, and be lost with that.
        may_share = side != "client" and (point is CONNECT or kind.effect is Effect.OPEN)
        assert proxy.struck >= (1 if may_share else len(FORMS)), point
    house.mend()
    await house.invariants.at_rest()
    if side == "client":
        await eventually(lambda: house.stub.at_work == 0, what="whoever has left is not worked for")
    house.drop()
    await house.invariants.hold()
    for (point, form), one in zip(cases, heard, strict=True):
        check(kind, side, point, *form, one)
    await asyncio.gather(*(probe(house, side, point) for point in points))
    house.drop()


@in_module_loop
@pytest.mark.parametrize("how", ["refused", "not-answered"])
async def test_no_connection(house: House, how: str) -> None:
    """An upstream that takes no connection costs nobody more than the time-out: a 503, and later all is as before."""
    # R38
    point = CONNECT
    proxy = house.sides["upstream"][point]
    if how == "refused":
        proxy.refuse()
    else:
        proxy.let_wait()
    heard = await asyncio.gather(*(house.exchange("upstream", point, *form) for form in FORMS * 3))
    for (surface, _), one in zip(FORMS * 3, heard, strict=True):
        assert one.response is not None
        assert one.response.status == 503
        assert surface.error(one.response)

    await house.invariants.at_rest()
    proxy.accept_again()
    house.drop()
    await house.invariants.hold()
    await probe(house, "upstream", point)
    house.drop()


def test_there_are_enough_kinds() -> None:
    """At least 45, each with a name of its own, at more than five points."""
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 45
    assert len(POINTS) >= 5
