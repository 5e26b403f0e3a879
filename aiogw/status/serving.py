"""The live view on the admin listener: ``/status``, ``/status.json`` and ``/status/events``."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import aclosing

import msgspec
from aiohttp import web
from attrs import frozen

from aiogw import __version__
from aiogw.admission.readings import GateStatistics
from aiogw.enginewatch import EngineReading
from aiogw.record import Progress, RequestRecord
from aiogw.status import page
from aiogw.status.feed import Feed
from aiogw.status.history import SAMPLE_SECONDS, History
from aiogw.status.snapshot import Document, Readings, document, with_ages

# More than anybody has screens; the listener also has to have room for Prometheus.
MOST_WATCHERS = 16
# A watcher that takes nothing for so long has gone without a word; a browser comes back by itself.
WATCHER_STALL_SECONDS = 10.0
# What the kernel may hold for one watcher: more than two snapshots of a full gateway, and not its own megabytes.
WATCHER_BUFFER_BYTES = 131072
# Of each queue, for those who watch; all of them are in /status.json.
MOST_IN_LINE = 50
# A clock that is set while the gateway runs is followed from this difference on.
CLOCK_STEP_SECONDS = 0.5


@frozen(kw_only=True)
class State:
    """What the rest of the gateway tells of itself, by the name of the upstream where there is one for each."""

    gates: Mapping[str, GateStatistics]
    place_seconds: Mapping[str, float]
    engines: Mapping[str, EngineReading]
    progress: Iterable[Progress]
    leaving: Collection[str]
    draining: bool
    reload_successful: bool


class Status:
    """``read`` is only asked while somebody wants to know, and now and then for a sample of the queues."""

    def __init__(self, read: Callable[[], State]) -> None:
        self._read = read
        self._history = History()
        self._feed = Feed(lambda: self._document(most_in_line=MOST_IN_LINE))
        self._started_at = time.monotonic()
        self._unix_offset = 0.0
        self._sampling: asyncio.TimerHandle | None = None

    def observe(self, record: RequestRecord) -> None:
        """Take note of a request that has ended."""
        self._history.observe(record)

    def start(self, application: web.Application) -> None:
        """Serve on ``application``, and begin to sample the queues."""
        application.router.add_get("/status", self._page)
        application.router.add_get("/status.json", self._json)
        application.router.add_get("/status/events", self._events, allow_head=False)
        self._sample()

    def close(self) -> None:
        """End all feeds, so that nobody waits for them."""
        self._feed.close()
        if self._sampling is not None:
            self._sampling.cancel()

    def _sample(self) -> None:
        self._history.sample(self._read().gates)
        self._sampling = asyncio.get_running_loop().call_later(SAMPLE_SECONDS, self._sample)

    def _document(self, *, most_in_line: int | None = None) -> Document:
        now, offset = time.monotonic(), time.time() - time.monotonic()
        if abs(offset - self._unix_offset) > CLOCK_STEP_SECONDS:
            self._unix_offset = offset
        state = self._read()
        progress = tuple(state.progress)
        readings = Readings(
            now=now,
            unix_offset=self._unix_offset,
            version=__version__,
            started_at=self._started_at,
            draining=state.draining,
            reload_successful=state.reload_successful,
            leaving=state.leaving,
            gates=state.gates,
            place_seconds=state.place_seconds,
            engines=state.engines,
            waits=self._history.waits(now, progress),
            samples=self._history.samples,
            progress=progress,
            endings=self._history.endings,
        )
        return document(readings, most_in_line=most_in_line)

    async def _json(self, _request: web.Request) -> web.Response:
        body = msgspec.json.encode(with_ages(self._document()))
        return web.Response(body=body, content_type="application/json", headers=page.NOT_KEPT)

    async def _page(self, _request: web.Request) -> web.Response:
        text = page.render(with_ages(self._document(most_in_line=MOST_IN_LINE)))
        return web.Response(text=text, content_type="text/html", headers=page.HEADERS)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._feed.watchers >= MOST_WATCHERS:
            return web.Response(status=503, text="enough are watching\n", headers={"retry-after": "10"})
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **page.NOT_KEPT})
        response.headers["x-accel-buffering"] = "no"
        sock = None if request.transport is None else request.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WATCHER_BUFFER_BYTES)
        # A watcher that leaves, at once perhaps, or stalls is nobody's fault; the others go on.
        with contextlib.suppress(TimeoutError, ConnectionError):
            await response.prepare(request)
            async with aclosing(self._feed.events()) as events:
                async for event in events:
                    async with asyncio.timeout(WATCHER_STALL_SECONDS):
                        await response.write(event)
            return response
        if request.transport is not None:
            request.transport.abort()
        return response
