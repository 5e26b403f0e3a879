"""The composition root: builds each part once, wires them, and owns start, reload, drain and stop.

With ``assembly`` and ``cli`` the only module that sees the configuration; every part gets plain values.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from prometheus_async.aio.web import server_stats

from aiogw import assembly, credentials
from aiogw.auth import Authenticator
from aiogw.bodies import BodyBudget
from aiogw.catalogue import Catalogue
from aiogw.config import Config, ConfigError
from aiogw.credentials import Credentials
from aiogw.departures import Departures
from aiogw.dialects import DIALECTS
from aiogw.dialects.base import Dialect
from aiogw.enginewatch import EngineWatch
from aiogw.lanes import CannotReload, Changes, Lanes
from aiogw.listener import Listener
from aiogw.metrics import HEADER_TIMEOUTS, MALFORMED, Observer, Readings, StateCollector
from aiogw.middleware import accept_expectation, authenticate, canonicalise, detect_dialect, keep_record, render_errors
from aiogw.protocol import ConnectionLimits
from aiogw.record import RequestRecord, configure_logging, tell
from aiogw.routing import Routes
from aiogw.server import MAX_FIELD_BYTES, MAX_HEADER_FIELDS, MalformedRequests, Runner
from aiogw.service import ServiceManager, inherited_sockets
from aiogw.sockets import CannotListen, shown
from aiogw.status.serving import State, Status
from aiogw.underway import Relay

log = logging.getLogger(__name__)

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
    """One gateway.  ``dialects`` is the registry; a test may serve one more.

    Raises ConfigError for a file that is named and cannot be used.  ``reread`` is asked for the configuration again at
    each SIGHUP; it raises ConfigError, too.  ``environment`` is where the service manager says what it passes and what
    it wants to hear.
    """

    def __init__(
        self,
        config: Config,
        *,
        reread: Callable[[], Config] | None = None,
        dialects: tuple[Dialect, ...] = DIALECTS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._credentials = credentials.load(config)
        self._authenticator = Authenticator(self._credentials.keyring)
        self._reread = reread
        self._dialects = dialects
        self._stop_now = asyncio.Event()
        self._stopping = asyncio.Event()
        self._runners: list[web.AppRunner] = []
        self._listeners: list[Listener] = []
        self._environment = environment or {}
        self._service = ServiceManager(self._environment, status=self._status, keeps_up=self._keeps_up)
        self._serving = False
        self._reloading: asyncio.Task[None] | None = None
        self._reload_again = False
        self._reload_successful = True
        self._departures = Departures(asyncio.get_running_loop())
        self._bodies = BodyBudget(limit_bytes=config.server.body_memory_bytes)
        self._lanes = Lanes()
        self._routes = Routes((), created=int(time.time()))
        self._relay = Relay(routes=self._routes, gate=self._lanes.gate, departures=self._departures)
        self._catalogue = Catalogue(learn=self._routes.learn)
        self._engine_watch = EngineWatch()
        self._observer = Observer(surfaces=[dialect.name for dialect in dialects])
        self._malformed = MalformedRequests(render=dialects[0].render_error, count=MALFORMED.inc)
        self._collector = StateCollector(self._read_state)
        self._live_view = Status(self._read_status)

    @property
    def addresses(self) -> tuple[Any, ...]:
        """What is listened on, clients' address first, as sockets name it: (host, port, ...) or a path."""
        return tuple(listener.addresses[0] for listener in self._listeners)

    async def start(self) -> None:
        """Listen; raises CannotListen."""
        server = self._config.server
        self._take(self._config, self._credentials, await self._lanes.prepare(self._config, self._credentials))
        self._collector.register()
        with inherited_sockets(self._environment) as inherited:
            clients = await self._listener(
                self._application(), server.max_connections, self._credentials.server_context
            )
            self._say_if_too_few_descriptors()
            await clients.listen(server.listen, inherited, "listening")
            admin = await self._listener(self._admin_application(), MAX_ADMIN_CONNECTIONS, None)
            await admin.listen(server.admin_listen, inherited, "metrics and health")
            for sock in inherited:
                raise CannotListen(f"{shown(sock)} is inherited, but neither server.listen nor server.admin_listen")
        self._serving = True
        self._ask_around()
        self._service.ready()

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
            with self._service.reloading():
                config = self._reread()
                self._refuse_what_is_fixed(config)
                read = credentials.load(config)
                changes = await self._lanes.prepare(config, read)
            if self._stopping.is_set():
                return False
        except (ConfigError, CannotListen, CannotReload) as error:
            self._reload_successful = False
            for fault in str(error).splitlines():
                log.error("the configuration is not taken: %s", fault)
            return False
        except Exception:
            # A mistake of ours, in a task that nobody awaits: the gauge has to say that nothing was taken.
            self._reload_successful = False
            log.exception("the configuration is not taken")
            return False
        self._take(config, read, changes)
        self._listeners[0].change(
            max_connections=config.server.max_connections,
            unacknowledged_seconds=_unacknowledged_seconds(config),
            ssl_context=read.server_context,
        )
        self._say_if_too_few_descriptors()
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

    def _take(self, config: Config, read: Credentials, changes: Changes) -> None:
        """In one step of the loop, so that no request sees half of it."""
        server, before = config.server, self._config.server
        if (server.log_level, server.log_format) != (before.log_level, before.log_format):
            configure_logging(level=server.log_level, format_=server.log_format)
        self._config = config
        self._bodies.limit_bytes = server.body_memory_bytes
        self._observer.know(config.upstreams)
        self._authenticator.keyring = read.keyring
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
            newcomers_wait_seconds=self._lanes.newcomers_wait_seconds(),
            engines=self._engine_watch.readings,
            body_bytes=self._bodies.held_bytes,
            body_limit_bytes=self._bodies.limit_bytes,
            listener=self._listeners[0].statistics() if self._listeners else None,
            draining=self._relay.draining,
            reload_successful=self._reload_successful,
        )

    def _read_status(self) -> State:
        return State(
            gates=self._lanes.statistics(),
            place_seconds=self._lanes.place_seconds(),
            engines=self._engine_watch.readings,
            progress=self._relay.progress(),
            leaving=self._lanes.leaving(),
            draining=self._relay.draining,
            reload_successful=self._reload_successful,
        )

    async def stop(self) -> None:
        """Stop accepting, refuse who waits, let who runs finish within the drain limit, end the rest in-band."""
        if self._serving:
            gates = self._lanes.statistics().values()
            at_work = {
                "running": sum(gate.slots_in_use for gate in gates),
                "waiting": sum(gate.waiting for gate in gates),
            }
            log.info("draining for at most %g s", self._config.server.drain_timeout_seconds, extra={"fields": at_work})
            self._service.stopping()
            await self._drain()
        if self._reloading is not None:
            self._reloading.cancel()
        self._live_view.close()
        await self._catalogue.stop()
        await self._engine_watch.stop()
        for listener in self._listeners:
            await listener.close()
        for runner in self._runners:
            await runner.cleanup()
        self._service.close()
        self._lanes.close()
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
                authenticate(self._authenticator),
                canonicalise(
                    routes=self._routes,
                    limits=lambda: assembly.body_limits(self._config.server),
                    budget=self._bodies,
                ),
            ]
        )
        application.router.add_route("*", "/{path:.*}", self._relay.handle, expect_handler=accept_expectation)
        application.on_response_prepare.append(self._say_close_while_draining)
        return application

    def _admin_application(self) -> web.Application:
        application = web.Application()
        application.on_response_prepare.append(_say_only_the_name)
        application.router.add_get("/", self._lead_to_status)
        application.router.add_get("/metrics", server_stats)
        application.router.add_get("/livez", self._livez)
        application.router.add_get("/readyz", self._readyz)
        self._live_view.start(application)
        return application

    async def _lead_to_status(self, _request: web.Request) -> web.Response:
        # Relative: a proxy may serve all of this below a path of its own.
        return web.Response(status=302, headers={"location": "status"})

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
        self._live_view.observe(record)
        tell(record)

    async def _listener(
        self, application: web.Application, max_connections: int, tls: ssl.SSLContext | None
    ) -> Listener:
        runner = make_runner(application, self._malformed, lambda: assembly.connection_limits(self._config.server))
        self._runners.append(runner)
        await runner.setup()
        server = runner.server
        assert server is not None
        listener = Listener(
            protocol_factory=server,
            connections=lambda: len(server.connections),
            max_connections=max_connections,
            unacknowledged_seconds=_unacknowledged_seconds(self._config),
            ssl_context=tls,
        )
        self._listeners.append(listener)
        return listener

    def _say_if_too_few_descriptors(self) -> None:
        """Bound the connections of clients by what the process may have open beside them, and say so if it matters."""
        caps = [gate.cap for gate in self._lanes.statistics().values()]
        reserved = sum(cap or 0 for cap in caps) + MAX_ADMIN_CONNECTIONS + OWN_DESCRIPTORS
        # Without a gate, each of them may have a request at an upstream.
        each = 2 if None in caps else 1
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The reserve is for the worst of times: where there is little, clients have a quarter all the same.
        limit = max(allowed - reserved, allowed // 4) // each
        wanted = self._config.server.max_connections
        self._listeners[0].descriptors_allow = limit
        if wanted > limit:
            needed = wanted * each + reserved
            log.warning(
                "max_connections may need %d open files, and the limit is %d (LimitNOFILE): only %d are accepted",
                needed,
                allowed,
                limit,
            )

    # -- the service manager ----------------------------------------------------------------------------------------

    def _status(self) -> str:
        states = []
        for name, gate in self._lanes.statistics().items():
            slots = f"{gate.slots_in_use} running" if gate.cap is None else f"{gate.slots_in_use} of {gate.cap} slots"
            states.append(f"{name}: {slots}, {gate.waiting} waiting")
        return ("draining; " if self._relay.draining else "") + "; ".join(states)

    def _keeps_up(self) -> bool:
        # Each is asked, whatever the others say: its next answer rests on this one.
        return False not in [listener.keeps_up() for listener in self._listeners]


async def _say_only_the_name(_request: web.Request, response: web.StreamResponse) -> None:
    # aiohttp's own says the versions of itself and of Python.
    response.headers["server"] = "aiogw"


def _unacknowledged_seconds(config: Config) -> float:
    return max(UNACKNOWLEDGED_SECONDS, config.server.client_stall_timeout_seconds)


def make_runner(
    application: web.Application, malformed: MalformedRequests, limits: Callable[[], ConnectionLimits]
) -> web.AppRunner:
    """The only place where a runner is made.

    aiohttp's test server has other settings than its runner, so a test that does not come through here proves nothing.
    """
    return Runner(
        application,
        malformed=malformed,
        limits=limits,
        on_header_timeout=HEADER_TIMEOUTS.inc,
        logger=logging.getLogger("aiogw.server"),
        access_log=None,
        max_line_size=MAX_FIELD_BYTES,
        max_field_size=MAX_FIELD_BYTES,
        max_headers=MAX_HEADER_FIELDS,
        # Inflated by the middleware, which bounds it and can say in the surface's words what is wrong.
        auto_decompress=False,
        # Nothing is left to wait for when the runner is cleaned up: the relay has drained.
        shutdown_timeout=0.5,
    )
