"""The composition root: builds each part once, wires them, and owns start, drain and stop.

Only this module and ``cli`` see the configuration; every part gets plain values.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import time
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from attrs import asdict
from prometheus_async.aio.web import server_stats

from aiogw.admission.gate import Gate, Limits, UpstreamGate
from aiogw.bodies import BodyBudget
from aiogw.canonical import Engine
from aiogw.catalogue import Catalogue
from aiogw.config import Config, ListenAddress, UpstreamConfig
from aiogw.departures import Departures
from aiogw.dialects import DIALECTS
from aiogw.dialects.base import Dialect
from aiogw.metrics import HEADER_TIMEOUTS, GateCollector, Observer
from aiogw.middleware import BodyLimits, accept_expectation, canonicalise, detect_dialect, keep_record, render_errors
from aiogw.protocol import ClientRunner, ConnectionLimits
from aiogw.record import RequestRecord, tell
from aiogw.relay import Relay, RelayLimits
from aiogw.routing import Route, Routes
from aiogw.upstream.pool import Target, UpstreamPool

log = logging.getLogger(__name__)

# One header field, or the request line: aiohttp's own 8,190 is less than some tokens and cookies have.
MAX_FIELD_BYTES = 32768
# Connections the kernel completes before we accept them: a burst of clients must not meet a full backlog.
LISTEN_BACKLOG = 4096


class CannotListen(Exception):
    """An address that cannot be listened on; the text says which and why."""


class Gateway:
    """One gateway.  ``dialects`` is the registry; a test may serve one more."""

    def __init__(self, config: Config, *, dialects: tuple[Dialect, ...] = DIALECTS) -> None:
        self._config = config
        self._dialects = dialects
        self._stop_now = asyncio.Event()
        self._stopping = asyncio.Event()
        self._runners: list[web.AppRunner] = []
        self._socket_files: list[str] = []
        self._serving = False
        loop = asyncio.get_running_loop()
        self._departures = Departures(loop)
        server = config.server
        gates: dict[str, UpstreamGate] = {}
        self._pools: dict[str, UpstreamPool] = {}
        routes: list[Route] = []
        for name, upstream in config.upstreams.items():
            address = upstream.url.key
            gates[address] = UpstreamGate(loop=loop, upstream=name, limits=_limits(upstream))
            self._pools[address] = UpstreamPool(
                upstream=name,
                target=_target(upstream),
                connect_timeout_seconds=upstream.connect_timeout_seconds,
                first_byte_timeout_seconds=upstream.first_byte_timeout_seconds,
                idle_timeout_seconds=upstream.idle_timeout_seconds,
            )
            routes += (
                Route(model=model, upstream=name, address=address, engine=_engine(upstream, served_as))
                for model, served_as in _served(upstream).items()
            )
        self._gate = Gate(gates)
        self._bodies = BodyBudget(limit_bytes=server.body_memory_bytes)
        self._routes = Routes(routes, created=int(time.time()))
        self._relay = Relay(
            routes=self._routes,
            gate=self._gate,
            pools=self._pools,
            limits=RelayLimits(
                response_buffer_bytes=server.response_buffer_bytes,
                client_stall_timeout_seconds=server.client_stall_timeout_seconds,
                first_sign_seconds=server.first_sign_seconds,
                sign_interval_seconds=server.sign_interval_seconds,
            ),
            departures=self._departures,
        )
        self._catalogue = Catalogue(
            pools={name: self._pools[upstream.url.key] for name, upstream in config.upstreams.items()},
            learn=self._routes.learn,
            every_seconds=server.models_refresh_seconds,
        )
        self._observer = Observer(tuple(config.upstreams))
        self._collector = GateCollector(
            upstreams={
                name: partial(self._gate.statistics, upstream.url.key) for name, upstream in config.upstreams.items()
            },
            bodies=self._bodies,
            draining=lambda: self._relay.draining,
        )

    @property
    def addresses(self) -> tuple[Any, ...]:
        """What is listened on, clients' address first, as sockets name it: (host, port, ...) or a path."""
        return tuple(runner.addresses[0] for runner in self._runners)

    async def start(self) -> None:
        """Listen; raises CannotListen."""
        server = self._config.server
        self._collector.register()
        await self._listen(self._application(), server.listen, "listening")
        await self._listen(self._admin_application(), server.admin_listen, "metrics and health")
        self._serving = True
        self._catalogue.start()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain at once.  Raises CannotListen."""
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self.request_stop)
        try:
            await self.start()
            await self._stopping.wait()
        finally:
            await self.stop()

    def request_stop(self) -> None:
        """Begin to stop; asked again, do not wait for anything any more."""
        if self._stopping.is_set():
            log.warning("stopping at once: running requests are cut short")
            self._stop_now.set()
        self._stopping.set()

    async def stop(self) -> None:
        """Stop accepting, refuse who waits, let who runs finish within the drain limit, end the rest in-band."""
        if self._serving:
            log.info("draining for at most %g s", self._config.server.drain_timeout_seconds)
            await self._drain()
        await self._catalogue.stop()
        for runner in self._runners:
            await runner.cleanup()
        for pool in self._pools.values():
            pool.close()
        self._departures.close()
        self._collector.unregister()
        self._remove_socket_files()
        log.info("stopped")

    async def _drain(self) -> None:
        for site in list(self._runners[0].sites):
            await site.stop()
        drain = asyncio.ensure_future(self._relay.drain(self._config.server.drain_timeout_seconds))
        hurry = asyncio.ensure_future(self._stop_now.wait())
        await asyncio.wait((drain, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not drain.done():
            self._relay.cut_short()
        await drain

    # -- the two listeners ------------------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        server = self._config.server
        limits = BodyLimits(
            max_bytes=server.max_body_bytes,
            timeout_seconds=server.body_timeout_seconds,
            min_bytes_per_second=server.body_min_bytes_per_second,
        )
        application = web.Application(
            middlewares=[
                keep_record(self._observe),
                detect_dialect(self._dialects),
                render_errors,
                canonicalise(routes=self._routes, limits=limits, budget=self._bodies),
            ]
        )
        application.router.add_route("*", "/{path:.*}", self._relay.handle, expect_handler=accept_expectation)
        application.on_response_prepare.append(self._say_close_while_draining)
        return application

    def _admin_application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/metrics", server_stats)
        application.router.add_get("/livez", self._livez)
        application.router.add_get("/readyz", self._readyz)
        return application

    async def _livez(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        if self._relay.draining:
            return web.Response(status=503, text="draining\n")
        return web.Response(text="ok\n")

    async def _say_close_while_draining(self, _request: web.Request, response: web.StreamResponse) -> None:
        # Said in the header as well: by now aiohttp has written its own, and would close without a word, under the next
        # request of a client that keeps its connection.
        if self._relay.draining:
            response.headers["connection"] = "close"
            response.force_close()

    def _observe(self, record: RequestRecord) -> None:
        self._observer.observe(record)
        tell(record)

    async def _listen(self, application: web.Application, address: ListenAddress, purpose: str) -> None:
        server = self._config.server
        runner = make_runner(
            application,
            ConnectionLimits(
                header_timeout_seconds=server.header_timeout_seconds,
                keepalive_timeout_seconds=server.keepalive_timeout_seconds,
                client_stall_timeout_seconds=server.client_stall_timeout_seconds,
            ),
        )
        self._runners.append(runner)
        await runner.setup()
        site: web.BaseSite
        if address.path is not None:
            site = web.UnixSite(runner, address.path, backlog=LISTEN_BACKLOG)
        else:
            site = web.TCPSite(runner, address.host, address.port, backlog=LISTEN_BACKLOG, reuse_address=True)
        try:
            if address.path is not None and _is_listened_on(address.path):
                # asyncio would take the file away from whoever listens there, and nobody would be told.
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            await site.start()
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else error.strerror
            raise CannotListen(f"cannot listen on {address}: {reason or error}") from None
        if address.path is not None:
            self._socket_files.append(address.path)
        for bound in runner.addresses:
            where = ListenAddress(path=bound) if isinstance(bound, str) else ListenAddress(host=bound[0], port=bound[1])
            log.info("%s on %s", purpose, where if where.path is not None else f"http://{where}")

    def _remove_socket_files(self) -> None:
        # Only those that were made here: what is in the way of a start may be a file, or another gateway's socket.
        for path in self._socket_files:
            with contextlib.suppress(OSError):
                Path(path).unlink()


def _is_listened_on(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def make_runner(application: web.Application, limits: ConnectionLimits) -> web.AppRunner:
    """The only place where a runner is made.

    ``handler_cancellation`` is off in aiohttp's own runner: a queued client could leave without anybody noticing.  It
    is on in aiohttp's test server, so a test that does not come through here proves nothing.
    """
    server_log = logging.getLogger("aiogw.server")
    if not server_log.filters:
        server_log.addFilter(_told_without_its_bytes)
    return ClientRunner(
        application,
        limits=limits,
        on_header_timeout=HEADER_TIMEOUTS.inc,
        logger=server_log,
        handler_cancellation=True,
        access_log=None,
        max_line_size=MAX_FIELD_BYTES,
        max_field_size=MAX_FIELD_BYTES,
        # Nothing is left to wait for when the runner is cleaned up: the relay has drained.
        shutdown_timeout=0.5,
    )


def _served(upstream: UpstreamConfig) -> dict[str, str]:
    """The names clients may use, each with the name the upstream uses."""
    return {model: model for model in upstream.models} | upstream.aliases


def _engine(upstream: UpstreamConfig, model: str) -> Engine:
    return Engine(model=model, **asdict(upstream.dialect))


def _told_without_its_bytes(record: logging.LogRecord) -> bool:
    """A request that is not HTTP, or whose body is not what it says, is the peer's fault: one line, and nothing of it.

    aiohttp logs it with a traceback that quotes what was sent, which any scanner could fill a log with.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "refused what is not a request (%s)", (type(error).__name__,)
        record.exc_info = None
    return True


def _limits(upstream: UpstreamConfig) -> Limits | None:
    admission = upstream.admission
    if admission == "unlimited":
        return None
    return Limits(
        cap=admission.cap,
        queue_limit=admission.queue_limit,
        queue_timeout_seconds=admission.queue_timeout_seconds,
        retry_after_min_seconds=admission.retry_after_min_seconds,
        retry_after_max_seconds=admission.retry_after_max_seconds,
        abort_settle_seconds=admission.abort_settle_seconds,
    )


def _target(upstream: UpstreamConfig) -> Target:
    url = upstream.url
    return Target(
        host=url.host or "",
        port=url.port or 0,
        path=url.path,
        authority=url.authority,
        prefix=url.prefix,
        ssl_context=ssl.create_default_context() if url.scheme == "https" else None,
    )
