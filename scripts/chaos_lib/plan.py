"""What each request of a run is to be and how it is to end: decided by the seed and its number alone."""

from __future__ import annotations

import json
import random

from attrs import frozen

PATHS = {"openai": "/v1/chat/completions", "anthropic": "/llm/v1/messages"}

# How the upstream treats a request, by weight, and the outcomes the gateway may then tell of a client that stays.
# "ok" and its kin answer in full; what they differ in is named.
UPSTREAM_WAYS = {
    "ok": (740, {"completed"}),
    "slow": (20, {"completed"}),
    "drip": (30, {"completed"}),
    "close_after": (30, {"completed"}),
    "until_close": (10, {"completed"}),
    "die_idle": (20, {"completed"}),  # answers, and closes the kept connection just when it may be used again
    "reset_before": (20, {"upstream_broken"}),
    "fin_before": (10, {"upstream_broken"}),
    "reset_mid": (20, {"upstream_broken"}),
    "cut": (20, {"upstream_broken"}),
    "error_400": (15, {"upstream_error"}),
    "error_500": (15, {"upstream_error"}),
    "error_503": (10, {"upstream_error"}),
    "error_401": (3, {"upstream_auth"}),
    "silent": (3, {"upstream_timeout"}),
    "silent_mid": (3, {"upstream_timeout"}),
    "not_http": (8, {"upstream_broken"}),
    "two_framings": (5, {"upstream_broken"}),
    "bad_chunk": (5, {"upstream_broken"}),
    "huge_head": (3, {"upstream_broken"}),
    # On /v1 bytes pass unread, on /llm they cannot be translated.
    "bad_json": (5, {"completed", "upstream_broken"}),
}

# How the client behaves, by weight.
CLIENT_WAYS = {
    "stay": 760,
    "leave_at_once": 15,  # in the tick in which its request has been sent
    "leave_queued": 40,
    "leave_at_grant": 40,  # in the tick in which the slot it waits for becomes free
    "leave_running": 25,  # at the upstream, before the first byte
    "leave_midstream": 45,
    "stop_reading": 4,
    "not_http": 8,
    "truncated": 10,  # leaves in the middle of its body
    "bad_chunks": 5,  # aiohttp answers nothing to these until the client leaves
    "bad_json": 10,
    "bad_field": 10,
    "unknown_model": 8,
    "too_large": 4,
    "too_many": 6,  # more sequences than the cap
    "wrong_path": 6,
    "wrong_method": 4,
}
MALFORMED = {
    # What is not_http never becomes a request and so has no line in the log.
    "bad_json": {"invalid_body"},
    "bad_field": {"invalid_request"},
    "unknown_model": {"model_not_found"},
    "too_large": {"request_too_large"},
    "too_many": {"too_many_sequences"},
    "wrong_path": {"not_found"},
    "wrong_method": {"method_not_allowed"},
}
LEAVES = frozenset(
    way for way in CLIENT_WAYS if way.startswith("leave_") or way in ("stop_reading", "truncated", "bad_chunks")
)
# Those that are not for the upstream.
NEVER_GRANTED = frozenset(MALFORMED) | {"not_http", "truncated", "bad_chunks"}
FAREWELLS = ("fin", "rst", "half")

MAX_BODY_BYTES = 1 << 18


@frozen(kw_only=True)
class Plan:
    """One request.  ``request_id`` says all that the upstream has to know, so that the two need no other channel."""

    number: int
    surface: str
    stream: bool
    weight: int
    upstream: str
    delay_ms: int
    client: str
    farewell: str
    leave_after_seconds: float
    padding_bytes: int
    expects: bool

    @property
    def request_id(self) -> str:
        form = "stream" if self.stream else "whole"
        leaving = f"-{self.farewell}" if self.client in LEAVES else ""
        return (
            f"{self.number}.{self.surface}.{form}.w{self.weight}.{self.upstream}.{self.delay_ms}ms"
            f".{self.client}{leaving}"
        )

    @property
    def stays(self) -> bool:
        return self.client not in LEAVES

    def body(self, cap: int) -> bytes:
        document: dict[str, object] = {
            "model": "nobody" if self.client == "unknown_model" else "reasoning",
            "messages": [{"role": "user", "content": "x" * self.padding_bytes}],
            "max_tokens": 16,
        }
        if self.stream:
            document["stream"] = True
        if self.client == "too_many":
            document["n"] = cap + 1
        elif self.weight > 1:
            document["n"] = self.weight
        if self.client == "bad_field":
            document["model"] = 5
        text = json.dumps(document).encode()
        return text[:-1] if self.client == "bad_json" else text


def plan(seed: int, number: int) -> Plan:
    """The request with this number; two of the same seed and number are the same."""
    chance = random.Random(f"{seed}/{number}")
    surface = chance.choice(("openai", "anthropic"))
    client = _choice(chance, CLIENT_WAYS)
    if client == "too_many":
        surface = "openai"
    upstream = _choice(chance, {name: weight for name, (weight, _) in UPSTREAM_WAYS.items()})
    stream = chance.random() < 0.5
    delay_ms = chance.randint(0, 6)
    if client == "leave_midstream":
        stream, upstream = True, "drip"
    elif client == "stop_reading":
        stream, upstream = True, "flood"
    elif client == "leave_running" and upstream == "ok":
        upstream = "slow"
    if upstream == "slow":
        delay_ms = chance.randint(20, 100)
    return Plan(
        number=number,
        surface=surface,
        stream=stream,
        weight=chance.choices((1, 2, 3), (75, 15, 10))[0] if surface == "openai" else 1,
        upstream=upstream,
        delay_ms=delay_ms,
        client=client,
        farewell=chance.choice(FAREWELLS),
        leave_after_seconds=chance.uniform(0, {"leave_queued": 0.06, "leave_running": 0.005}.get(client, 0.01)),
        padding_bytes=chance.choice((10, 10, 10, 2000, 2000, 60000)),
        # Whoever has been told to go on is known to have been seen, however early it leaves afterwards.
        expects=client in ("leave_queued", "bad_chunks")
        or (client in ("stay", "leave_at_grant") and chance.random() < 0.2),
    )


def simple(number: int, *, delay_ms: int = 0, surface: str = "openai") -> Plan:
    """A request that is answered in full, for before and after the chaos."""
    return Plan(
        number=number,
        surface=surface,
        stream=False,
        weight=1,
        upstream="slow" if delay_ms else "ok",
        delay_ms=delay_ms,
        client="stay",
        farewell="fin",
        leave_after_seconds=0,
        padding_bytes=10,
        expects=False,
    )


def _choice(chance: random.Random, weights: dict[str, int]) -> str:
    return chance.choices(tuple(weights), tuple(weights.values()))[0]
