"""The corpus of doubtful requests against the real process, on aiohttp's C parser and on its pure-Python one.

What the gateway writes, to the upstream as to the client, is read by h11, which shares no code with it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import framing_corpus as corpus
import h11
import pytest
import pytest_asyncio
from rig import Daemon, RawClient, Rig, ScriptedUpstream, answer, rigged

from aiogw.server import LINES_PER_MINUTE

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Within which every one is answered or closed.
DEADLINE_SECONDS = 8.0

# What may go up besides the body, and how often; nothing of it is the client's to choose but the last few.
OWN_FIELDS = {"host", "content-type", "content-length", "accept-encoding", "x-request-id"}
CLIENT_FIELDS = {"accept", "user-agent", "traceparent", "tracestate", "baggage"}


class Setting:
    """One gateway for all cases, and the upstream that sees what becomes of them."""

    def __init__(self, rig: Rig, upstream: ScriptedUpstream, gateway: Daemon, parser: str) -> None:
        self.rig = rig
        self.upstream = upstream
        self.gateway = gateway
        self.parser = parser


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["c", "pure"])
async def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setting]:
    async with rigged(tmp_path_factory.mktemp("framing")) as rig:
        upstream = await rig.upstream(answer)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("AIOHTTP_NO_EXTENSIONS", "1" if request.param == "pure" else "")
            gateway = await rig.daemon(upstream, server={"max_body_bytes": corpus.MAX_BODY_BYTES})
        assert uses_c_parser(gateway) == (request.param == "c")
        setting = Setting(rig, upstream, gateway, request.param)
        yield setting
        await check_afterwards(setting)


async def check_afterwards(setting: Setting) -> None:
    """No slot is held, nothing was the gateway's own fault, and its log is short, plain and without secrets."""
    await setting.gateway.settled()
    for (name, labels), value in (await setting.gateway.metrics()).items():
        assert not value or name != "aiogw_requests_total" or dict(labels)["outcome"] != "internal_error"
    refusals = [line for line in setting.gateway.lines if "refused what is not a request" in line]
    assert len(refusals) <= 2 * LINES_PER_MINUTE
    for line in setting.gateway.lines:
        assert "canary" not in line
        assert line.isascii()
        assert line.isprintable()
        assert len(line) < 1000


def uses_c_parser(gateway: Daemon) -> bool:
    return "_http_parser" in Path(f"/proc/{gateway.pid}/maps").read_text()


class Reader:
    """Final responses one after another, as h11 reads them."""

    def __init__(self, client: RawClient) -> None:
        self._client = client
        self._data = b""
        self.ended = False

    async def response(self, method: bytes) -> tuple[h11.Response | None, bytes]:
        """The next one and its body; None: the connection ended instead."""
        connection = h11.Connection(h11.CLIENT)
        connection.send(h11.Request(method=method, target=b"/", headers=[("host", "x")]))
        connection.send(h11.EndOfMessage())
        if self._data:
            connection.receive_data(self._data)
        response, body = None, b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                if (data := await self._read()) or response is not None:
                    connection.receive_data(data)
                    continue
                assert connection.trailing_data[0] == b""
                return None, b""
            if isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self._data = connection.trailing_data[0]
                return response, body
            else:
                raise AssertionError(f"{event} is out of place")

    async def end(self) -> bytes:
        """What comes until the end of the connection."""
        while not self.ended:
            self._data += await self._read()
        return self._data

    async def _read(self) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            data = await asyncio.wait_for(loop.sock_recv(self._client.sock, 1 << 16), DEADLINE_SECONDS)
        except ConnectionResetError:
            data = b""
        self.ended = not data
        return data


def check_upstream(setting: Setting, case: corpus.Case, seen: int, expected: tuple[bytes, ...]) -> None:
    """The upstream got these bodies, each in a request that is well-formed and holds nothing it should not."""
    exchanges = setting.upstream.exchanges[seen:]
    assert tuple(exchange.request.body for exchange in exchanges) == expected
    for exchange in exchanges:
        reader = h11.Connection(h11.SERVER)
        reader.receive_data(exchange.request.raw)
        head = reader.next_event()
        assert isinstance(head, h11.Request)
        assert (head.method, head.target, head.http_version) == (b"POST", b"/v1/chat/completions", b"1.1")
        names = [name.decode() for name, _ in head.headers]
        assert set(names) <= OWN_FIELDS | CLIENT_FIELDS
        assert len(set(names)) == len(names)
        assert set(names) >= OWN_FIELDS
        fields = dict(head.headers)
        assert fields[b"host"].decode() == setting.upstream.url.removeprefix("http://")
        assert fields[b"accept-encoding"] == b"identity"
        assert re.fullmatch(rb"[A-Za-z0-9._:-]{1,128}", fields[b"x-request-id"])
        body = b""
        while isinstance(event := reader.next_event(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage)
        assert list(event.headers) == []
        assert body == exchange.request.body
        assert reader.trailing_data == (b"", False)


def check_response(response: h11.Response, body: bytes) -> None:
    """It says who it is, is of this gateway's making, and a refusal names what is wrong."""
    fields = dict(response.headers)
    assert response.http_version in (b"1.0", b"1.1")
    assert len(fields) == len(response.headers)
    assert re.fullmatch(rb"[A-Za-z0-9._:-]{1,128}", fields[b"x-request-id"])
    assert b"aiohttp" not in fields.get(b"server", b"").lower()
    if response.status_code >= 400:
        assert fields[b"content-type"] in (b"application/problem+json", b"application/json")
        assert b"Traceback" not in body
        assert len(body) < 3000


@pytest.mark.parametrize("case", corpus.ALL, ids=lambda case: case.name)
async def test_a_doubtful_request(setting: Setting, case: corpus.Case) -> None:
    """R48: it is refused, forwarded as exactly one well-formed request, answered here, or the connection is closed."""
    outcome = case.pure if setting.parser == "pure" else case.outcome
    seen = len(setting.upstream.exchanges)
    client = await setting.rig.client(setting.gateway)
    first, *others = case.raw
    sending = asyncio.ensure_future(send(client, first))
    try:
        for piece in others:
            interim = await client.read_head()
            assert (interim.status, interim.headers) == (100, [])
            await client.send(piece)
        if not outcome.statuses:
            await sending
            client.half_close()
        await check(setting, case, outcome, seen, client)
    finally:
        sending.cancel()
        client.close()
    assert setting.gateway.running
    assert setting.upstream.violations == []


async def send(client: RawClient, data: bytes) -> None:
    try:
        await client.send(data)
    except OSError:
        pass  # it was refused before it had said everything


async def check(setting: Setting, case: corpus.Case, outcome: corpus.Outcome, seen: int, client: RawClient) -> None:
    reader = Reader(client)
    method = case.raw[0].partition(b" ")[0]
    method = b"HEAD" if method == b"HEAD" else b"GET"
    last: h11.Response | None = None
    for status in outcome.statuses:
        last, body = await reader.response(method)
        assert last is not None, "no answer"
        assert last.status_code == status, body
        check_response(last, body)
    says_close = last is None or last.http_version == b"1.0" or (b"connection", b"close") in last.headers
    if outcome.closes is not None:
        assert says_close == outcome.closes
    if says_close:
        if outcome.statuses:
            client.half_close()  # or it would be listened to for a while, so that it can read the answer in peace
        assert await reader.end() == b""
    else:
        # The gateway and its client still agree where a request begins.
        await client.send(corpus.MODELS)
        last, _ = await reader.response(b"GET")
        assert last is not None
        assert last.status_code == 200
    check_upstream(setting, case, seen, outcome.forwarded)
