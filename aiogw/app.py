"""The composition root: builds each part once, wires them, and owns start, reload, drain and stop.

With ``assembly`` and ``cli`` the only module that sees the configuration; every part gets plain values.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from prometheus_async.aio.web import server_stats

from aiogw import assembly
from aiogw.catalogue import Catalogue
from aiogw.config import Config, ConfigError, ListenAddress
from aiogw.departures import Departures
from aiogw.dialects import DIALECTS
from aiogw.dialects.base import Dialect
from aiogw.enginewatch import EngineWatch
from aiogw.lanes import CannotReload, Changes, Lanes
from aiogw.metrics import Observer, Readings, StateCollector
from aiogw.middleware import accept_expectation, canonicalise, detect_dialect, keep_record, render_errors
from aiogw.record import RequestRecord, configure_logging, tell
from aiogw.relay import Relay
from aiogw.routing import Routes
from aiogw.status.serving import State, Status

log = logging.getLogger(__name__)

# An idle client connection is closed after this; nginx's default, and longer than the SDKs keep theirs.
CLIENT_KEEPALIVE_SECONDS = 75
# One header field, or the request line: aiohttp's own 8,190 is less than some tokens and cookies have.
MAX_FIELD_BYTES = 32768
# Connections the kernel completes before we accept them: a burst of clients must not meet a full backlog.
LISTEN_BACKLOG = 4096


class CannotListen(Exception):
    """An address that cannot be listened on; the text says which and why."""


class Gateway:
    """One gateway.  ``dialects`` is the registry; a test may serve one more.

    ``reread`` is asked for the configuration again at each SIGHUP; it raises ConfigError.
    """

    def __init__(
        self,
        config: Config,
        *,
        reread: Callable[[], Config] | None = None,
        dialects: tuple[Dialect, ...] = DIALECTS,
    ) -> None:
        self._config = config
        self._reread = reread
        self._dialects = dialects
        self._stop_now = asyncio.Event()
        self._stopping = asyncio.Event()
        self._runners: list[web.AppRunner] = []
        self._socket_files: list[str] = []
        self._serving = False
        self._reloading: asyncio.Task[None] | None = None
        self._reload_again = False
        self._reload_successful = True
        self._departures = Departures(asyncio.get_running_loop())
        self._lanes = Lanes()
        self._routes = Routes((), created=int(time.time()))
        self._relay = Relay(routes=self._routes, gate=self._lanes.gate, departures=self._departures)
        self._catalogue = Catalogue(learn=self._routes.learn)
        self._engine_watch = EngineWatch()
        self._observer = Observer()
        self._collector = StateCollector(self._read_state)
        self._status = Status(self._read_status)

    @property
    def addresses(self) -> tuple[Any, ...]:
        """What is listened on, clients' address first, as sockets name it: (host, port, ...) or a path."""
        return tuple(runner.addresses[0] for runner in self._runners)

    async def start(self) -> None:
        """Listen; raises CannotListen."""
        server = self._config.server
        self._take(self._config, await self._lanes.prepare(self._config))
        self._collector.register()
        await self._listen(self._application(), server.listen, "listening")
        await self._listen(self._admin_application(), server.admin_listen, "metrics and health")
        self._serving = True
        self._ask_around()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain at once.  SIGHUP: reload.

        Raises CannotListen.
        """
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self.request_stop)
        loop.add_signal_handler(signal.SIGHUP, self.request_reload)
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

    def request_reload(self) -> None:
        """Read the configuration again as soon as no other reload is under way."""
        if self._reloading is not None and not self._reloading.done():
            self._reload_again = True
        else:
            self._reloading = asyncio.get_running_loop().create_task(self._reload_until_current())

    async def _reload_until_current(self) -> None:
        self._reload_again = True
        while self._reload_again:
            self._reload_again = False
            await self.reload()

    async def reload(self) -> bool:
        """Take the configuration as it is now, all of it or nothing; says in the log which, and why."""
        if self._reread is None or not self._serving or self._stopping.is_set():
            log.warning("nothing was reloaded: the gateway %s", "is not serving" if self._reread else "has no file")
            return False
        try:
            config = self._reread()
            self._refuse_what_is_fixed(config)
            changes = await self._lanes.prepare(config)
        except (ConfigError, CannotReload) as error:
            self._reload_successful = False
            for fault in str(error).splitlines():
                log.error("the configuration is not taken: %s", fault)
            return False
        self._take(config, changes)
        self._ask_around()
        self._reload_successful = True
        log.info("the configuration is taken: %s", ", ".join(config.upstreams))
        return True

    def _refuse_what_is_fixed(self, config: Config) -> None:
        for key in ("listen", "admin_listen"):
            new, old = getattr(config.server, key), getattr(self._config.server, key)
            if new != old:
                raise CannotReload(
                    f"server.{key}: cannot change from {old} to {new} while the gateway runs; restart it"
                )

    def _take(self, config: Config, changes: Changes) -> None:
        """In one step of the loop, so that no request sees half of it."""
        server, before = config.server, self._config.server
        if (server.log_level, server.log_format) != (before.log_level, before.log_format):
            configure_logging(level=server.log_level, format_=server.log_format)
        self._config = config
        self._observer.know(config.upstreams)
        self._routes.replace(assembly.routes(config))
        self._lanes.commit(changes)
        self._relay.serve(upstreams=self._lanes.upstreams, limits=assembly.relay_limits(config.server))

    def _ask_around(self) -> None:
        """Begin, or begin anew, with what the upstreams are asked in the background."""
        serving = self._lanes.serving()
        self._catalogue.start(serving.values(), every_seconds=self._config.server.models_refresh_seconds)
        self._engine_watch.start(
            {one: self._config.upstreams[name].watch_engine_seconds for name, one in serving.items()},
            at_work=self._lanes.at_work,
        )

    def _read_state(self) -> Readings:
        return Readings(
            gates=self._lanes.statistics(),
            engines=self._engine_watch.readings,
            draining=self._relay.draining,
            reload_successful=self._reload_successful,
        )

    def _read_status(self) -> State:
        return State(
            gates=self._lanes.statistics(),
            place_seconds=self._lanes.place_seconds(),
            engines=self._engine_watch.readings,
            progress=self._relay.progress(),
            draining=self._relay.draining,
        )

    async def stop(self) -> None:
        """Stop accepting, refuse who waits, let who runs finish within the drain limit, end the rest in-band."""
        if self._serving:
            log.info("draining for at most %g s", self._config.server.drain_timeout_seconds)
            await self._drain()
        if self._reloading is not None:
            self._reloading.cancel()
        self._status.close()
        await self._catalogue.stop()
        await self._engine_watch.stop()
        for runner in self._runners:
            await runner.cleanup()
        self._lanes.close()
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
        application = web.Application(
            middlewares=[
                keep_record(self._observe),
                detect_dialect(self._dialects),
                render_errors,
                canonicalise(routes=self._routes, max_body_bytes=lambda: self._config.server.max_body_bytes),
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
        self._status.start(application)
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
        self._status.observe(record)
        tell(record)

    async def _listen(self, application: web.Application, address: ListenAddress, purpose: str) -> None:
        runner = make_runner(application)
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
