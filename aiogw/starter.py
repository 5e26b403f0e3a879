"""A first configuration for an engine that is there: its models by its own word, and numbers for its operator.

It asks as the gateway itself will ask, so where this comes through the gateway will, too.
"""

from __future__ import annotations

import asyncio
import re

import msgspec
from attrs import evolve

from aiogw import assembly, config, credentials
from aiogw.catalogue import ASK_TIMEOUT_SECONDS, ask_models
from aiogw.config import AdmissionConfig, Config, UpstreamAddress, UpstreamConfig
from aiogw.config.commented import commented
from aiogw.config.values import FilePath, Names, Positive
from aiogw.errors import GatewayError
from aiogw.upstream.asking import ask
from aiogw.upstream.pool import UpstreamPool

MAX_VERSION_BYTES = 4096

# What ``etc/gateway.toml`` has for its reasoning model.
NUMBERS = """
[server]
listen = "127.0.0.1:8080"
admin_listen = "127.0.0.1:9464"
max_connections = 4096
header_timeout_seconds = 10
keepalive_timeout_seconds = 75
body_timeout_seconds = 10
body_min_bytes_per_second = 65536
max_body_bytes = 67108864
body_memory_bytes = 268435456
response_buffer_bytes = 4194304
client_stall_timeout_seconds = 30
drain_timeout_seconds = 30
first_sign_seconds = 2
sign_interval_seconds = 10
models_refresh_seconds = 60
log_level = "info"
log_format = "auto"
[auth]
mode = "none"
[upstreams.NAME]
url = "http://localhost"
models = ["NAME"]
connect_timeout_seconds = 5
first_byte_timeout_seconds = 600
idle_timeout_seconds = 120
[upstreams.NAME.admission]
engine_slots = 8
cap = 6
queue_limit = 32
queue_timeout_seconds = 60
retry_after_min_seconds = 1
retry_after_max_seconds = 60
abort_settle_seconds = 0.2
"""

INTRODUCTION = """\
Made by "aiogw init" for {engine} at {url}.

Every limit is a number that you can change, and none has a default. Look at engine_slots first, which the engine \
does not tell: if it is more than what the engine really works on, requests wait inside it, where nobody sees them.

  aiogw check --config FILE    says what is wrong with this file, all of it at once

What else there is, keys for clients for one, stands in README.rst.
"""


class CannotAsk(Exception):
    """There is nothing to make a configuration from; the text says why."""


async def first_configuration(url: UpstreamAddress, *, engine_slots: int, credential_file: str | None) -> str:
    """TOML for a gateway before the engine at ``url``; raises CannotAsk, and ConfigError for ``credential_file``."""
    numbers = config.loads(NUMBERS)
    upstream = numbers.upstreams["NAME"]
    assert isinstance(upstream.admission, AdmissionConfig)
    upstream = evolve(
        upstream,
        url=url,
        credential_file=None if credential_file is None else FilePath(credential_file),
        admission=evolve(upstream.admission, engine_slots=Positive(engine_slots), cap=Positive(engine_slots - 1)),
    )
    models, version = await _ask(evolve(numbers, upstreams={str(url): upstream}), upstream)
    made = evolve(numbers, upstreams={_name(models[0]): evolve(upstream, models=Names(tuple(models)))})
    return commented(made, INTRODUCTION.format(engine=f"vLLM {version}" if version else "the engine", url=url))


async def _ask(asking: Config, upstream: UpstreamConfig) -> tuple[list[str], str | None]:
    """Its models, and its version if it tells one."""
    ((name, _),) = asking.upstreams.items()
    plan = assembly.plan(name, upstream, credentials.load(asking))
    (endpoint,) = plan.endpoints.values()
    pool = plan.make_pool(endpoint.target, lambda: None)
    try:
        async with asyncio.timeout(ASK_TIMEOUT_SECONDS):
            cards = await ask_models(name, pool)
            version = await _version(name, pool)
    except GatewayError as error:
        raise CannotAsk(f"no list of models: {error}") from None
    except TimeoutError:
        raise CannotAsk(f"no list of models from {name}: it took longer than {ASK_TIMEOUT_SECONDS:g} s") from None
    finally:
        pool.close()
    models = [card["id"] for card in cards if isinstance(card.get("id"), str) and card["id"]]
    if not models:
        raise CannotAsk(f"{name} serves no model")
    return list(dict.fromkeys(models)), version


class _Version(msgspec.Struct):
    version: str


async def _version(name: str, pool: UpstreamPool) -> str | None:
    """vLLM has one; what else speaks OpenAI's API need not."""
    try:
        body = await ask(
            name,
            pool,
            "/version",
            accept="application/json",
            max_bytes=MAX_VERSION_BYTES,
            timeout_seconds=ASK_TIMEOUT_SECONDS,
        )
        version = msgspec.json.decode(body, type=_Version).version
    except (GatewayError, msgspec.DecodeError):
        return None
    return version if re.fullmatch(r"[\w.+-]{1,64}", version) else None


def _name(model: str) -> str:
    """What logs and metrics will call the upstream: the model's name without those who made it."""
    return re.sub(r"[^a-z0-9_.-]+|\.", "-", model.rpartition("/")[2].lower()).strip("-") or "engine"
