"""What the upstreams say of their models, asked in the background: stale rather than slow, and never in anybody's way.

It takes no slot and no kept connection, and a client that lists models never waits for it.  Nothing here may know a
dialect or a client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from aiogw.errors import GatewayError, UpstreamBroken, UpstreamUnavailable
from aiogw.upstream.asking import ask
from aiogw.upstream.endpoints import Upstream
from aiogw.upstream.pool import UpstreamPool

log = logging.getLogger(__name__)

ASK_TIMEOUT_SECONDS = 10.0
MAX_LIST_BYTES = 4 << 20


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]


_list_decoder = msgspec.json.Decoder(_ModelList)

Learn = Callable[[str, list[dict[str, Any]]], None]


class Catalogue:
    """Asks each upstream for ``/v1/models``, and tells ``learn`` what the one of that name said."""

    def __init__(self, *, learn: Learn) -> None:
        self._learn = learn
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, upstreams: Iterable[Upstream], *, every_seconds: float) -> None:
        """Ask now and then every ``every_seconds``, and from now on only these; 0: never."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        if every_seconds:
            self._tasks = [asyncio.create_task(self._keep_asking(one, every_seconds)) for one in upstreams]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _keep_asking(self, upstream: Upstream, every_seconds: float) -> None:
        while True:
            try:
                cards = await _ask_all(upstream)
            except (GatewayError, TimeoutError) as error:
                log.info("no model list from the upstream %s: %s", upstream.name, str(error) or "it took too long")
            else:
                self._learn(upstream.name, cards)
            await asyncio.sleep(every_seconds)


async def _ask_all(upstream: Upstream) -> list[dict[str, Any]]:
    """What the first of its endpoints says, which serve the same; all are asked, and so it is known who is reached."""
    asked = (ask_models(upstream.name, pool) for pool in upstream.pools())
    failure: BaseException = UpstreamUnavailable(upstream=upstream.name, reason="no endpoint answers")
    for cards in await asyncio.gather(*asked, return_exceptions=True):
        if not isinstance(cards, BaseException):
            return cards
        failure = cards
    raise failure


async def ask_models(upstream: str, pool: UpstreamPool) -> list[dict[str, Any]]:
    """The upstream's model cards; raises UpstreamFault or TimeoutError."""
    body = await ask(
        upstream,
        pool,
        "/v1/models",
        accept="application/json",
        max_bytes=MAX_LIST_BYTES,
        timeout_seconds=ASK_TIMEOUT_SECONDS,
    )
    try:
        return _list_decoder.decode(body).data
    except (msgspec.DecodeError, RecursionError) as error:
        raise UpstreamBroken(upstream=upstream, reason=f"its list of models is not one ({error})") from None
