"""One sentence or two for each key, for editors, for a first configuration and for whoever generates a reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiogw.config import (
    AdmissionConfig,
    AuthConfig,
    Config,
    DialectConfig,
    EndpointConfig,
    KeyConfig,
    ServerConfig,
    TlsConfig,
    UpstreamConfig,
)

DESCRIPTIONS: Mapping[type[Any], Mapping[str, str]] = {
    Config: {
        "server": "What holds for all clients.",
        "auth": "Who may ask.",
        "upstreams": "An upstream is one engine with one queue; its name is what logs and metrics call it.",
    },
    ServerConfig: {
        "listen": 'Where clients come in: "HOST:PORT", "[IPV6]:PORT" or "unix:/PATH".',
        "admin_listen": "The same for /metrics, /status, /livez and /readyz. Nobody is asked for a key here.",
        "max_connections": "Connections of clients, the kept ones included; one more is told to come back.",
        "header_timeout_seconds": (
            "For the head of a request, from the beginning of the connection or, on a kept one, from its first byte."
        ),
        "keepalive_timeout_seconds": "How long a connection may be idle after an answer.",
        "body_timeout_seconds": (
            "For a request body: so long, and a second more for every body_min_bytes_per_second bytes that have come."
        ),
        "body_min_bytes_per_second": "A body that comes more slowly is refused with 408.",
        "max_body_bytes": "One request body, counted after decompression; a larger one is refused with 413.",
        "body_memory_bytes": (
            "All request bodies together, from the upload until the upstream begins to answer; what goes beyond is "
            "refused with 503."
        ),
        "response_buffer_bytes": "What may pile up for a client that reads slowly, before its upstream is paused.",
        "client_stall_timeout_seconds": "A client that takes nothing for so long is given up.",
        "drain_timeout_seconds": "How long a stop waits for answers that are under way.",
        "first_sign_seconds": (
            "A client that streams and waits hears something after so long in the queue; a later refusal is then an "
            "event and no status. 0: never."
        ),
        "sign_interval_seconds": "From then on it hears something whenever it has heard nothing for so long.",
        "models_refresh_seconds": "How often upstreams are asked for their model cards, in the background. 0: never.",
        "log_level": 'At "info" there is one line for each request.',
        "log_format": '"text" for people, "json" for a log pipeline; "auto": text on a terminal, else JSON.',
        "tls": "Speak TLS with clients.",
    },
    TlsConfig: {
        "certificate": "A PEM file: the certificate, with those that lead to its authority.",
        "key": "A PEM file with the key of the certificate, which nobody but its owner may read or write.",
    },
    AuthConfig: {
        "mode": '"none": everybody who can reach the gateway. "keys": who shows one of the keys below.',
        "keys": "The holders of keys, each with a name for the logs.",
    },
    KeyConfig: {
        "file": "The key is the one line of this file, which nobody but its owner may read or write.",
        "credential": "Instead of a file: the name of a credential of systemd's (LoadCredential=NAME:PATH).",
        "models": 'The models and aliases that this key is good for, or "all".',
        "queue_places": "How many requests of this key may wait at one upstream at once.",
    },
    UpstreamConfig: {
        "url": 'Where the engine is: "http://HOST[:PORT]", "https://HOST[:PORT]" or "unix:/PATH", without /v1.',
        "endpoints": "Instead of url: several addresses with one queue.",
        "resolve": '"every-address": each address that a name of endpoints resolves to is an endpoint.',
        "models": 'The values of "model" that lead here. A model belongs to one upstream.',
        "connect_timeout_seconds": "Until a connection stands: short, since the upstream is near.",
        "first_byte_timeout_seconds": (
            "From the grant to the first byte of an answer. A whole (not streamed) answer sends nothing until it is "
            "complete, so this must cover the longest one. It begins anew while the request is still being taken."
        ),
        "idle_timeout_seconds": "Between two pieces of an answer that has begun.",
        "admission": 'The limits of the gate, or "unlimited" for an upstream without one.',
        "credential": ("The name of a credential of systemd's with the key that this upstream wants of the gateway."),
        "credential_file": "Instead of it: the file with that key.",
        "ca_file": "With https: the CA (PEM) that has signed the upstream's certificate, instead of the system's.",
        "watch_engine_seconds": "How often the engine is asked for its own count of requests, for metrics. 0: never.",
        "aliases": "Further names for the models, each with the model it stands for.",
        "dialect": "What the engine can do, where that differs from a current vLLM with a text model.",
    },
    EndpointConfig: {
        "url": "As the url of an upstream.",
        "engine_slots": "Sequences that the engine at this address works on at once.",
    },
    AdmissionConfig: {
        "engine_slots": (
            "Sequences that the engine works on at once: replicas x --max-num-seqs of vLLM. With endpoints it stands "
            "there."
        ),
        "cap": "How many the gateway sends at once; below engine_slots, so that an operator's request finds room.",
        "queue_limit": "How many may wait for a slot; the next one is refused at once with 503 and Retry-After.",
        "queue_timeout_seconds": "How long one may wait before it is refused.",
        "retry_after_min_seconds": "Retry-After is computed, and is at least this, from 1 to 60.",
        "retry_after_max_seconds": "And at most this; told to wait longer than 60 seconds, some clients give up.",
        "abort_settle_seconds": (
            "How long the slot of an aborted request is kept, since its engine goes on for a moment. 0: not at all."
        ),
    },
    DialectConfig: {
        "images": "It understands images; without them a request with one is refused.",
        "image_urls": "It may fetch the URLs of images that clients choose.",
        "tool_images": "Images may stand in a tool message; otherwise they are moved behind it.",
        "system_anywhere": "The chat template takes system messages after the first place.",
        "reasoning_field": "The member of a message that carries reasoning.",
        "thinking_on": "Members that are merged into the body when a client of /llm asks for thinking.",
        "thinking_off": "Members that are merged into the body when a client of /llm asks for none.",
        "thinking_budget": "It takes thinking_token_budget.",
        "reasoning_efforts": "What reasoning_effort may be.",
        "show_unrequested_thinking": "Clients of /llm see reasoning that they did not ask for.",
        "continuous_usage": "It knows continuous_usage_stats.",
        "accounting": "Every stream is made to tell its usage, for log and metrics.",
        "repeat_reasoning_as": "A second name for the reasoning on /v1, for clients that know no other.",
        "count_tokens": '"upstream" asks /tokenize, "estimate" counts characters.',
        "max_model_len": "The context length in tokens; asked from the upstream if it is not given.",
        "body_defaults": "Members for every request that does not have them.",
    },
}
