"""What the upstreams say of their models, asked in the background: stale rather than slow, and never in anybody's way.

It takes no slot and no kept connection, and a client that lists models never waits for it.  Nothing here may know a
dialect or a client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from aiogw.canonical import ResponseHead
from aiogw.errors import GatewayError, UpstreamBroken, UpstreamFault
from aiogw.upstream.answer import read_error
from aiogw.upstream.pool import UpstreamPool

log = logging.getLogger(__name__)

ASK_TIMEOUT_SECONDS = 10.0
MAX_LIST_BYTES = 4 << 20


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]


_list_decoder = msgspec.json.Decoder(_ModelList)

Learn = Callable[[str, list[dict[str, Any]]], None]


class Catalogue:
    """Asks each upstream of ``pools`` (by name) for ``/v1/models``, and tells ``learn`` what it said.

    Once at the start and then every ``every_seconds``; 0: never.
    """

    def __init__(self, *, pools: Mapping[str, UpstreamPool], learn: Learn, every_seconds: float) -> None:
        self._pools = pools
        self._every_seconds = every_seconds
        self._learn = learn
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        if not self._every_seconds:
            return
        self._tasks = [asyncio.create_task(self._keep_asking(name, pool)) for name, pool in self._pools.items()]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _keep_asking(self, upstream: str, pool: UpstreamPool) -> None:
        while True:
            try:
                async with asyncio.timeout(ASK_TIMEOUT_SECONDS):
                    cards = await ask(upstream, pool)
            except (GatewayError, TimeoutError) as error:
                log.info("no model list from the upstream %s: %s", upstream, str(error) or "it took too long")
            else:
                self._learn(upstream, cards)
            await asyncio.sleep(self._every_seconds)


async def ask(upstream: str, pool: UpstreamPool) -> list[dict[str, Any]]:
    """The upstream's model cards; raises UpstreamFault."""
    answer = _Answer(upstream)
    # A connection of its own, before and after: those that are kept are for requests that hold a slot.
    head = pool.request_head("/v1/models", [("accept", "application/json"), ("connection", "close")], b"", method="GET")
    call = pool.send(head, b"", answer, fresh=True)
    try:
        body = await answer.body
    finally:
        call.abort()
    try:
        return _list_decoder.decode(body).data
    except (msgspec.DecodeError, RecursionError) as error:
        raise UpstreamBroken(upstream=upstream, reason=f"its list of models is not one ({error})") from None


class _Answer:
    """Collects one response; see ``upstream.pool.ResponseListener``."""

    def __init__(self, upstream: str) -> None:
        self.body: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._upstream = upstream
        self._head: ResponseHead | None = None
        self._pieces = bytearray()

    def response_step(self, head: ResponseHead | None, data: bytes, ended: bool) -> None:
        self._head = head or self._head
        self._pieces += data
        if self.body.done():
            return
        if len(self._pieces) > MAX_LIST_BYTES:
            self.body.set_exception(UpstreamBroken(upstream=self._upstream, reason="its list of models is too long"))
        elif ended and self._head is not None:
            if self._head.status == 200:
                self.body.set_result(bytes(self._pieces))
            else:
                self.body.set_exception(read_error(self._upstream, self._head, bytes(self._pieces)))

    def response_failed(self, error: UpstreamFault) -> None:
        if not self.body.done():
            self.body.set_exception(error)
