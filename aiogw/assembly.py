"""From a configuration to the plain values its parts are made of; builds nothing that is alive.

With ``app`` and ``cli`` the only module that sees the configuration.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from functools import partial

from attrs import asdict

from aiogw.admission.readings import Limits
from aiogw.canonical import Engine
from aiogw.config import Config, ServerConfig, UpstreamAddress, UpstreamConfig
from aiogw.credentials import Credentials
from aiogw.middleware import BodyLimits
from aiogw.protocol import ConnectionLimits
from aiogw.relay import RelayLimits
from aiogw.routing import Route
from aiogw.upstream.endpoints import Endpoint, UpstreamPlan
from aiogw.upstream.pool import Target, UpstreamPool


def body_limits(server: ServerConfig) -> BodyLimits:
    return BodyLimits(
        max_bytes=server.max_body_bytes,
        timeout_seconds=server.body_timeout_seconds,
        min_bytes_per_second=server.body_min_bytes_per_second,
    )


def connection_limits(server: ServerConfig) -> ConnectionLimits:
    return ConnectionLimits(
        header_timeout_seconds=server.header_timeout_seconds,
        keepalive_timeout_seconds=server.keepalive_timeout_seconds,
        client_stall_timeout_seconds=server.client_stall_timeout_seconds,
    )


def routes(config: Config) -> Iterator[Route]:
    for name, upstream in config.upstreams.items():
        served = {model: model for model in upstream.models} | upstream.aliases
        for model, served_as in served.items():
            engine = Engine(model=served_as, **asdict(upstream.dialect))
            yield Route(model=model, upstream=name, address=upstream.addresses[0], engine=engine)


def plan(name: str, upstream: UpstreamConfig, credentials: Credentials) -> UpstreamPlan:
    admission = upstream.admission
    target = partial(
        _target, ssl_context=credentials.ssl_contexts.get(name), credential=credentials.upstreams.get(name)
    )
    if upstream.endpoints is not None:
        listed = [(one.url, int(one.engine_slots)) for one in upstream.endpoints]
        endpoints = {url.key: Endpoint(target=target(url), slots=slots) for url, slots in listed}
    else:
        assert upstream.url is not None
        slots = None if admission == "unlimited" else admission.engine_slots
        endpoints = {upstream.url.key: Endpoint(target=target(upstream.url), slots=slots)}
    return UpstreamPlan(
        name=name,
        endpoints=endpoints,
        make_pool=_pool_maker(name, upstream),
        leave_out=upstream.endpoints is not None,
        every_address=upstream.resolve is not None,
    )


def limits(upstream: UpstreamConfig) -> Limits | None:
    admission = upstream.admission
    if admission == "unlimited":
        return None
    slots = [one.engine_slots for one in upstream.endpoints or ()]
    return Limits(
        cap=admission.cap,
        largest=max(slots, default=admission.cap),
        queue_limit=admission.queue_limit,
        queue_timeout_seconds=admission.queue_timeout_seconds,
        retry_after_min_seconds=admission.retry_after_min_seconds,
        retry_after_max_seconds=admission.retry_after_max_seconds,
        abort_settle_seconds=admission.abort_settle_seconds,
    )


def relay_limits(server: ServerConfig) -> RelayLimits:
    return RelayLimits(
        response_buffer_bytes=server.response_buffer_bytes,
        client_stall_timeout_seconds=server.client_stall_timeout_seconds,
        first_sign_seconds=server.first_sign_seconds,
        sign_interval_seconds=server.sign_interval_seconds,
    )


def _pool_maker(name: str, upstream: UpstreamConfig) -> Callable[[Target, Callable[[], None]], UpstreamPool]:
    def make(target: Target, on_unreachable: Callable[[], None]) -> UpstreamPool:
        return UpstreamPool(
            upstream=name,
            target=target,
            connect_timeout_seconds=upstream.connect_timeout_seconds,
            first_byte_timeout_seconds=upstream.first_byte_timeout_seconds,
            idle_timeout_seconds=upstream.idle_timeout_seconds,
            on_unreachable=on_unreachable,
        )

    return make


def _target(url: UpstreamAddress, *, ssl_context: ssl.SSLContext | None, credential: str | None) -> Target:
    return Target(
        host=url.host or "",
        port=url.port or 0,
        path=url.path,
        authority=url.authority,
        prefix=url.prefix,
        ssl_context=ssl_context if url.scheme == "https" else None,
        credential=credential,
    )
