"""The composition root: builds each part once, wires them, and owns start, drain and stop.

Only this module and ``cli`` see the configuration; every part gets plain values.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import ssl
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from attrs import asdict
from prometheus_async.aio.web import server_stats

from aiogw.admission.gate import Gate, Limits, UpstreamGate
from aiogw.canonical import Engine
from aiogw.catalogue import Catalogue
from aiogw.config import Config, UpstreamConfig
from aiogw.departures import Departures
from aiogw.dialects import DIALECTS
from aiogw.dialects.base import Dialect
from aiogw.listener import Listener
from aiogw.metrics import GateCollector, Observer
from aiogw.middleware import accept_expectation, canonicalise, detect_dialect, keep_record, render_errors
from aiogw.record import RequestRecord, tell
from aiogw.relay import Relay, RelayLimits
from aiogw.routing import Route, Routes
from aiogw.service import ServiceManager, inherited_sockets
from aiogw.sockets import CannotListen, server_context, shown
from aiogw.upstream.pool import Target, UpstreamPool

log = logging.getLogger(__name__)

# An idle client connection is closed after this; nginx's default, and longer than the SDKs keep theirs.
CLIENT_KEEPALIVE_SECONDS = 75
# One header field, or the request line: aiohttp's own 8,190 is less than some tokens and cookies have.
MAX_FIELD_BYTES = 32768
# Probes and scrapes; never refused because clients have taken all there is.
MAX_ADMIN_CONNECTIONS = 64
# Log, event loop, libraries: what is open before anybody connects.
OWN_DESCRIPTORS = 64
# A client that has acknowledged nothing for so long is gone, unless it may be silent for longer.
UNACKNOWLEDGED_SECONDS = 30.0
# A client may be sending on a kept connection just when it is about to be closed: that long it is listened to.
GRACE_SECONDS = 2.0
EMPTY_POLL_SECONDS = 0.02


class Gateway:
    """One gateway.  ``dialects`` is the registry; a test may serve one more.  ``environment`` is systemd's to use."""

    def __init__(
        self,
        config: Config,
        *,
        dialects: tuple[Dialect, ...] = DIALECTS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._dialects = dialects
        self._stop_now = asyncio.Event()
        self._stopping = asyncio.Event()
        self._runners: list[web.AppRunner] = []
        self._listeners: list[Listener] = []
        self._environment = environment or {}
        self._service = ServiceManager(self._environment, status=self._status, keeps_up=self._keeps_up)
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
            listener=lambda: self._listeners[0].statistics() if self._listeners else None,
            draining=lambda: self._relay.draining,
        )

    @property
    def addresses(self) -> tuple[Any, ...]:
        """What is listened on, clients' address first, as sockets name it: (host, port, ...) or a path."""
        return tuple(listener.addresses[0] for listener in self._listeners)

    async def start(self) -> None:
        """Listen; raises CannotListen."""
        server = self._config.server
        self._collector.register()
        with inherited_sockets(self._environment) as inherited:
            clients = await self._listener(self._application(), server.max_connections, self._tls())
            await clients.listen(server.listen, inherited, "listening")
            admin = await self._listener(self._admin_application(), MAX_ADMIN_CONNECTIONS, None)
            await admin.listen(server.admin_listen, inherited, "metrics and health")
            for sock in inherited:
                raise CannotListen(f"{shown(sock)} is inherited, but neither server.listen nor server.admin_listen")
        self._say_if_too_few_descriptors()
        self._serving = True
        self._catalogue.start()
        self._service.ready()

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
            self._service.stopping()
            await self._drain()
        await self._catalogue.stop()
        for listener in self._listeners:
            await listener.close()
        for runner in self._runners:
            await runner.cleanup()
        self._service.close()
        for pool in self._pools.values():
            pool.close()
        self._departures.close()
        self._collector.unregister()
        log.info("stopped")

    async def _drain(self) -> None:
        self._listeners[0].stop_accepting()
        self._relay.retire()
        drain = asyncio.ensure_future(self._wind_down(self._config.server.drain_timeout_seconds))
        hurry = asyncio.ensure_future(self._stop_now.wait())
        await asyncio.wait((drain, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not drain.done():
            self._relay.cut_short()
        await drain

    async def _wind_down(self, limit_seconds: float) -> None:
        """Serve on for a moment, the queue included, then only what runs; and close nothing that may be in use.

        A kept connection that closes under a request is a failure that the client cannot tell from any other.  So
        connections end with a response that says so, and only those that stay silent are closed.
        """
        grace_seconds = min(GRACE_SECONDS, limit_seconds)
        began_at = time.monotonic()
        await self._emptied(grace_seconds)
        left_seconds = max(0.0, limit_seconds - (time.monotonic() - began_at))
        idle = self._relay.idle
        await self._relay.drain(0.0 if self._stop_now.is_set() else left_seconds)
        if not idle:
            await self._emptied(grace_seconds)

    async def _emptied(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._listeners[0].open and time.monotonic() < deadline and not self._stop_now.is_set():  # noqa: ASYNC110
            # aiohttp does not tell when a connection ends.
            await asyncio.sleep(EMPTY_POLL_SECONDS)

    # -- the two listeners ------------------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        application = web.Application(
            middlewares=[
                keep_record(self._observe),
                detect_dialect(self._dialects),
                render_errors,
                canonicalise(routes=self._routes, max_body_bytes=self._config.server.max_body_bytes),
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

    async def _listener(
        self, application: web.Application, max_connections: int, tls: ssl.SSLContext | None
    ) -> Listener:
        runner = make_runner(application)
        self._runners.append(runner)
        await runner.setup()
        server = runner.server
        assert server is not None
        listener = Listener(
            protocol_factory=server,
            connections=lambda: len(server.connections),
            max_connections=max_connections,
            unacknowledged_seconds=max(UNACKNOWLEDGED_SECONDS, self._config.server.client_stall_timeout_seconds),
            ssl_context=tls,
        )
        self._listeners.append(listener)
        return listener

    def reload_certificates(self) -> None:
        """Read the files again, for the connections that follow; raises CannotListen, and then all is as before."""
        self._listeners[0].ssl_context = self._tls()

    def _tls(self) -> ssl.SSLContext | None:
        tls = self._config.server.tls
        return None if tls is None else server_context(tls.certificate, tls.key)

    def _say_if_too_few_descriptors(self) -> None:
        admissions = [upstream.admission for upstream in self._config.upstreams.values()]
        slots = sum(admission.cap for admission in admissions if admission != "unlimited")
        needed = self._config.server.max_connections + slots + MAX_ADMIN_CONNECTIONS + OWN_DESCRIPTORS
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if needed > allowed:
            log.warning("max_connections may need %d open files, and the limit is %d (LimitNOFILE)", needed, allowed)

    # -- the service manager ----------------------------------------------------------------------------------------

    def _status(self) -> str:
        states = []
        for name, upstream in self._config.upstreams.items():
            reading = self._gate.statistics(upstream.url.key)
            slots = f"{reading.slots_in_use} of {reading.cap} slots, " if reading.cap is not None else ""
            states.append(f"{name}: {slots or f'{reading.slots_in_use} running, '}{reading.waiting} waiting")
        return ("draining; " if self._relay.draining else "") + "; ".join(states)

    def _keeps_up(self) -> bool:
        # Each is asked, whatever the others say: its next answer rests on this one.
        return False not in [listener.keeps_up() for listener in self._listeners]


def make_runner(application: web.Application) -> web.AppRunner:
    """The only place where a runner is made.

    ``handler_cancellation`` is off in aiohttp's own runner: a queued client could leave without anybody noticing.  It
    is on in aiohttp's test server, so a test that does not come through here proves nothing.
    """
    server_log = logging.getLogger("aiogw.server")
    if not server_log.filters:
        server_log.addFilter(_told_without_its_bytes)
    return web.AppRunner(
        application,
        logger=server_log,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=CLIENT_KEEPALIVE_SECONDS,
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
