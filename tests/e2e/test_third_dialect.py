"""A dialect that nobody has heard of: served from its registry entry alone, and contained when it is faulty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve, frozen
from rig import FIRST_EVENT, OPENAI, STREAM, TEXT, WHOLE, Rig, Surface, answer

from aiogw.canonical import Document, ResponseHead, TokenUsage
from aiogw.dialects.base import Call, Endpoint, FindEngine, RelayEndpoint, ResponseEncoder
from aiogw.dialects.openai import OPENAI as OPENAI_DIALECT
from aiogw.errors import GatewayError, UpstreamStatus

THIRD = Surface("openai", "/third/chat/completions")


class Encoder:
    """Passes everything to the one of /v1, apart from what is to go wrong."""

    def __init__(self, encoder: ResponseEncoder, faults: frozenset[str]) -> None:
        self._encoder = encoder
        self._faults = faults

    @property
    def head(self) -> ResponseHead | None:
        return self._encoder.head

    @property
    def usage(self) -> TokenUsage | None:
        return self._encoder.usage

    @property
    def said_all(self) -> bool:
        return self._encoder.said_all

    def refused(self, error: UpstreamStatus) -> GatewayError:
        return self._encoder.refused(error)

    def begin(self, head: ResponseHead) -> None:
        self._fault("begin")
        self._encoder.begin(head)

    def feed(self, data: bytes, *, last: bool) -> bytes:
        self._fault("last" if last else "feed")
        return self._encoder.feed(data, last=last)

    def wait(self, position: int, estimated_seconds: float | None) -> bytes:
        return b""

    def fail(self, error: GatewayError, request_id: str) -> bytes | None:
        self._fault("fail")
        return self._encoder.fail(error, request_id)

    def _fault(self, place: str) -> None:
        if place in self._faults:
            raise RuntimeError(f"planted in {place}")


@frozen(kw_only=True)
class ThirdDialect:
    """The words of /v1 under another name and another mount."""

    name: str = "third"
    mount: str = "/third"
    request_id_headers: tuple[str, ...] = ("x-request-id", "x-third-id")
    faults: frozenset[str] = frozenset()

    def endpoint(self, method: str, path: str) -> Endpoint:
        return OPENAI_DIALECT.endpoint(method, "/v1" + path.removeprefix(self.mount))

    def decode(self, endpoint: RelayEndpoint, content_type: str, body: bytes, find_engine: FindEngine) -> Call:
        if "decode" in self.faults:
            raise RuntimeError("planted in decode")
        call = OPENAI_DIALECT.decode(endpoint, content_type, body, find_engine)
        return Call(request=evolve(call.request, surface=self.name), encoder=Encoder(call.encoder, self.faults))

    def render_error(self, error: GatewayError, request_id: str) -> Document:
        return OPENAI_DIALECT.render_error(error, request_id)


def dialects(*faults: str) -> tuple[Any, ...]:
    return (OPENAI_DIALECT, ThirdDialect(faults=frozenset(faults)))


async def test_a_third_dialect_shares_the_queue(rig: Rig, stream: bool) -> None:
    """It is served, named in log and headers, and waits in the same line as the others."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, dialects=dialects())
    first = await rig.post(gateway, OPENAI, 1)
    await upstream.exchange(0)
    (second,) = await rig.queued(gateway, THIRD, [2], stream=stream)
    (third,) = await rig.queued(gateway, OPENAI, [3], before=1)
    for number in range(3):
        (await upstream.exchange(number)).respond(stream=stream and number == 1)
    await first.response()
    response = await second.response()
    await third.response()

    assert upstream.tags == [1, 2, 3]
    assert THIRD.text(response) == TEXT
    assert response.header("x-third-id") == response.header("x-request-id")
    await gateway.record(surface="third", outcome="completed")


@pytest.mark.parametrize("place", ["decode", "begin", "feed", "last"])
async def test_a_fault_before_the_response_has_begun(rig: Rig, place: str) -> None:
    """An exception nobody expected is a 500 without its text, an error in the log, and a slot that is free again."""
    upstream = await rig.upstream(lambda exchange: (exchange.write(b"HTTP/1.1 200 OK\r\n"), exchange.finish(REST))[1])
    gateway = await rig.gateway(upstream, dialects=dialects(place, "last"))
    gateway.expect_error(f"planted in {place}")
    gateway.expect_error("planted in last")
    response = await rig.ask(gateway, THIRD, 1)

    assert response.status == 500
    assert "planted" not in THIRD.error(response)["message"]
    assert THIRD.code(response) == "internal_error"
    await gateway.record(outcome="internal_error", status=500)
    await rig.check_usable(gateway, upstream)


REST = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(WHOLE), WHOLE)


@pytest.mark.parametrize("place", ["feed", "last"])
async def test_a_fault_within_a_stream(rig: Rig, place: str) -> None:
    """Once the response has begun the fault is told in-band, and the upstream is let go."""
    upstream = await rig.upstream()
    faults: set[str] = set()
    third = ThirdDialect(faults=faults)  # type: ignore[arg-type]
    gateway = await rig.gateway(upstream, dialects=(OPENAI_DIALECT, third))
    gateway.expect_error(f"planted in {place}")
    client = await rig.post(gateway, THIRD, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(FIRST_EVENT)
    response = await client.read_head()
    response.body = await client.read_event()
    faults.add(place)
    exchange.event(STREAM[1]) if place == "feed" else exchange.end_stream()
    await client.read_body(response)

    assert response.complete
    error = THIRD.in_band_error(response)
    assert error is not None
    assert "planted" not in error["message"]
    await gateway.record(outcome="internal_error", status=200)
    await rig.check_usable(gateway, upstream)


def _reset(exchange: Any) -> None:
    exchange.reset()


def _finish_wrongly(exchange: Any) -> None:
    exchange.finish(b"zz\r\n")


@pytest.mark.parametrize("ending", [_reset, _finish_wrongly])
async def test_a_fault_in_telling_a_fault(rig: Rig, ending: Callable[[Any], None]) -> None:
    """When even the error cannot be told, the client's connection is broken off: nobody is left waiting."""
    upstream = await rig.upstream()
    gateway = await rig.gateway(upstream, dialects=dialects("fail"))
    gateway.expect_error("planted in fail")
    client = await rig.post(gateway, THIRD, 1, stream=True)
    exchange = await upstream.exchange(0)
    exchange.begin_stream(FIRST_EVENT)
    response = await client.read_head()
    ending(exchange)
    await client.read_body(response, 2)

    assert not response.complete
    await rig.check_usable(gateway, upstream)


async def test_what_is_not_registered_is_not_served(rig: Rig) -> None:
    """The third dialect is not served where it is not registered."""
    upstream = await rig.upstream(answer)
    gateway = await rig.gateway(upstream)
    assert (await rig.ask(gateway, THIRD, 1)).status == 404
    assert upstream.exchanges == []
