"""All requests that are under way: let in, looked at and drained together; how one is served is not known here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Mapping

from aiohttp import web

from aiogw.admission.door import Gate
from aiogw.admission.gate import DRAINING_RETRY_AFTER_SECONDS
from aiogw.departures import Departures
from aiogw.errors import Draining
from aiogw.middleware import CALL, HOLDER
from aiogw.record import Progress
from aiogw.relay import RelayedRequest, RelayLimits
from aiogw.routing import Routes
from aiogw.upstream.endpoints import Upstream


class Relay:
    """All requests that are under way."""

    def __init__(
        self,
        *,
        routes: Routes,
        gate: Gate,
        departures: Departures,
    ) -> None:
        self._routes = routes
        self._departures = departures
        self._gate = gate
        self._running: set[RelayedRequest] = set()
        self._numbers = itertools.count(1)
        self._nothing_running = asyncio.Event()
        self._nothing_running.set()
        self.draining = False

    @property
    def idle(self) -> bool:
        return not self._running

    def serve(self, *, upstreams: Mapping[str, Upstream], limits: RelayLimits) -> None:
        """What is true for requests that come from now on; ``upstreams`` by address."""
        self._upstreams = dict(upstreams)
        self._limits = limits

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve the canonical request that the middlewares left in ``request``; raises GatewayError or ClientGone."""
        route = self._routes.find(request[CALL].request.model, request[HOLDER].models)
        relayed = RelayedRequest(
            request,
            # Taken out: nothing else may keep a body of many megabytes through an answer of many minutes.
            request.pop(CALL),
            route=route,
            gate=self._gate,
            upstream=self._upstreams[route.address],
            limits=self._limits,
            departures=self._departures,
            number=next(self._numbers),
        )
        relayed.stream.keep_alive = not self.draining
        self._running.add(relayed)
        self._nothing_running.clear()
        try:
            return await relayed.serve()
        finally:
            relayed.close()
            self._running.discard(relayed)
            if not self._running:
                self._nothing_running.set()

    def progress(self) -> Iterator[Progress]:
        """Where each request is, in no order."""
        return (relayed.progress() for relayed in self._running)

    def retire(self) -> None:
        """Serve what comes, but let every response that is still to begin say that its connection ends with it.

        One that has begun has promised the opposite, and its client may send the next request right behind its end.
        """
        self.draining = True
        for relayed in self._running:
            if not relayed.stream.started:
                relayed.stream.keep_alive = False

    async def drain(self, timeout_seconds: float) -> None:
        """Refuse whoever waits, let the others finish for at most ``timeout_seconds``, end the rest in-band."""
        self.retire()
        self._gate.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._nothing_running.wait()
        self.cut_short()
        # The last bytes are still to be taken; a client that does not take them is not waited for.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self._nothing_running.wait()
        for relayed in list(self._running):
            relayed.stream.give_up()

    def cut_short(self) -> None:
        for relayed in list(self._running):
            relayed.fail(Draining(upstream=relayed.route.upstream, retry_after_seconds=DRAINING_RETRY_AFTER_SECONDS))
