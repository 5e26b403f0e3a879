"""Errors as Anthropic words them: one type and status for each, and the sentences Claude Code acts on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic_driver import transcript
from hypothesis import given, settings
from hypothesis import strategies as st
from specimens import OCCUPANCY

from aiogw import errors as tree
from aiogw.dialects.anthropic import ANTHROPIC
from aiogw.dialects.anthropic.errors import context_overflow, error_event


def upstream(status: int, message: str = "said", retry_after: int | None = None) -> tree.UpstreamStatus:
    return tree.UpstreamStatus(
        upstream="u",
        upstream_status=status,
        upstream_message=message,
        error=None,
        upstream_retry_after_seconds=retry_after,
    )


def render(error: tree.GatewayError) -> tuple[int, str, str, dict[str, str]]:
    """Status, type, message and headers; the envelope is checked on the way."""
    document = ANTHROPIC.render_error(error, "req_01ab")
    assert document.content_type == "application/json"
    body = json.loads(document.body)
    kind, message = body["error"]["type"], body["error"]["message"]
    assert body == {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_01ab"}
    assert message
    return document.status, kind, message, dict(document.headers)


REFUSAL: dict[str, Any] = {"upstream": "u", "occupancy": OCCUPANCY, "retry_after_seconds": 7}
AGAIN = {"retry-after": "7", "x-should-retry": "true"}
NEVER = {"x-should-retry": "false"}

LEAVES: list[tuple[tree.GatewayError, int, str, dict[str, str]]] = [
    (tree.MalformedBody(reason="x"), 400, "invalid_request_error", NEVER),
    (tree.InvalidField(path="a.0", reason="x"), 400, "invalid_request_error", NEVER),
    (tree.InvalidKey(), 401, "authentication_error", NEVER | {"www-authenticate": "Bearer"}),
    (tree.UnknownModel(model="m", known=("n",)), 404, "not_found_error", NEVER),
    (tree.UnknownEndpoint(method="GET", path="/llm/x", hint="h"), 404, "not_found_error", NEVER),
    (
        tree.MethodNotAllowed(method="GET", path="/llm/x", allowed=("POST",)),
        405,
        "invalid_request_error",
        NEVER | {"allow": "POST"},
    ),
    (tree.BodyTooLarge(limit_bytes=5), 413, "request_too_large", NEVER),
    (tree.BodyTimeout(timeout_seconds=5, min_bytes_per_second=6), 408, "timeout_error", NEVER),
    (tree.MalformedRequest(reason="its target is malformed"), 400, "invalid_request_error", NEVER),
    (tree.UnsupportedCoding(coding="br", known=("gzip",)), 415, "invalid_request_error", NEVER),
    (tree.TooManySequences(upstream="u", sequences=9, cap=6), 400, "invalid_request_error", NEVER),
    (tree.QueueFull(**REFUSAL), 503, "overloaded_error", AGAIN),
    (
        tree.MemoryFull(retry_after_seconds=7, limit_bytes=7, held_bytes=6, wanted_bytes=2),
        503,
        "overloaded_error",
        AGAIN,
    ),
    (tree.QueuePlacesTaken(**REFUSAL, queue_places=4), 503, "overloaded_error", AGAIN),
    (tree.QueueTimeout(**REFUSAL, waited_seconds=30), 503, "overloaded_error", AGAIN),
    (
        tree.QueueTooSlow(**REFUSAL, estimated_seconds=90, queue_timeout_seconds=30),
        503,
        "overloaded_error",
        AGAIN | {"x-aiogw-queue-estimate-seconds": "90.0"},
    ),
    (tree.Draining(upstream="u", retry_after_seconds=7), 503, "overloaded_error", AGAIN),
    (
        tree.UpstreamUnavailable(upstream="u", reason="refused", retry_after_seconds=7),
        503,
        "overloaded_error",
        AGAIN,
    ),
    (tree.UpstreamTimeout(upstream="u", waiting_for="the first byte", timeout_seconds=5), 504, "timeout_error", NEVER),
    (tree.UpstreamBroken(upstream="u", reason="reset"), 502, "api_error", {"x-should-retry": "true"}),
    (tree.InternalFault(), 500, "api_error", {}),
    (upstream(400), 400, "invalid_request_error", {}),
    (upstream(401), 502, "api_error", NEVER),
    (upstream(403), 502, "api_error", NEVER),
    (upstream(407), 502, "api_error", NEVER),
    (upstream(404, "The model `x` does not exist."), 404, "not_found_error", {}),
    (upstream(404), 502, "api_error", NEVER),
    (upstream(405), 502, "api_error", NEVER),
    (upstream(408), 504, "timeout_error", {}),
    (upstream(409), 409, "api_error", {}),
    (upstream(413), 413, "request_too_large", {}),
    (upstream(422), 400, "invalid_request_error", {}),
    (upstream(429), 429, "rate_limit_error", {}),
    (upstream(429, retry_after=3), 429, "rate_limit_error", {"retry-after": "3"}),
    (upstream(429, retry_after=3600), 429, "rate_limit_error", {"retry-after": "60"}),
    (upstream(429, retry_after=0), 429, "rate_limit_error", {"retry-after": "1"}),
    (upstream(500), 500, "api_error", {}),
    (upstream(502), 502, "api_error", {}),
    (upstream(503), 503, "overloaded_error", {"retry-after": "5"}),
    (upstream(503, retry_after=9), 503, "overloaded_error", {"retry-after": "9"}),
    (upstream(504), 504, "timeout_error", {}),
    (upstream(529), 503, "overloaded_error", {"retry-after": "5"}),
    (upstream(302), 502, "api_error", {}),
]


@pytest.mark.parametrize(("error", "status", "kind", "headers"), LEAVES)
def test_every_error_has_its_status_and_type(
    error: tree.GatewayError, status: int, kind: str, headers: dict[str, str]
) -> None:
    """E1 to E9, E14 to E16, E18 to E20: one row of the table each."""
    found_status, found_kind, _, found_headers = render(error)
    assert (found_status, found_kind, found_headers) == (status, kind, headers)


def test_no_leaf_of_the_tree_is_forgotten() -> None:
    """The table above has every kind of error there is."""

    def leaves(kind: type) -> set[type]:
        below = kind.__subclasses__()
        return {kind} if not below else set().union(*(leaves(one) for one in below))

    # attrs makes a slotted copy of each class; the copy is the one in the module.
    named = {kind for kind in leaves(tree.GatewayError) if getattr(tree, kind.__name__, None) is kind}
    assert named == {type(error) for error, *_ in LEAVES}


def test_the_envelope_is_compact() -> None:
    """4.1: Claude Code looks for this very text."""
    body = ANTHROPIC.render_error(tree.Draining(upstream="u", retry_after_seconds=7), "req_1").body
    assert body.startswith(b'{"type":"error","error":{"type":"overloaded_error","message":"')
    assert body.endswith(b'"},"request_id":"req_1"}')


def test_messages_are_anthropics() -> None:
    """Q10, E2, E3: a model is named as Anthropic names it, and the gateway's credentials are not the client's."""
    assert render(tree.UnknownModel(model="no\npe", known=("n",)))[2] == "model: no pe (known models: n)"
    recorded = json.loads(transcript("error-unknown-model"))["error"]["message"]
    assert render(upstream(404, recorded))[2] == "model: nope"
    assert render(upstream(404, "model does not exist"))[2] == "model: u"
    assert "the gateway's own credentials" in render(upstream(401, "Unauthorized"))[2]
    assert render(tree.InvalidField(path="messages.0.role", reason="x"))[2] == "messages.0.role: x"


def test_upstream_messages_are_made_safe() -> None:
    """4.3: bounded, without control characters or half characters; a fixed sentence where there is none."""
    assert render(upstream(400, "a\n\x00 b\x9f\ud83d"))[2] == "a  b \ufffd"
    assert len(render(upstream(400, "x" * 5000))[2]) == 2000
    assert render(upstream(500, ""))[2] == "The upstream 'u' answered with status 500"


@pytest.mark.parametrize(
    ("status", "kind"), [(404, "not_found_error"), (401, "api_error"), (422, "invalid_request_error")]
)
def test_types_inside_a_stream(status: int, kind: str) -> None:
    """4.3, S28: the same table by the code that was reported, where no path of ours can be wrong."""
    event = error_event(upstream(status), "req_1", max_model_len=None)
    assert event.startswith(b'event: error\ndata: {"type":"error","error":{"type":"' + kind.encode() + b'"')
    assert event.endswith(b"\n\n")


PLEASE = "decrease input length or `max_tokens` and try again"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input "
            "tokens, which exceeds this limit even without any output tokens.",
            "prompt is too long: 2049 tokens > 2048 maximum",
        ),
        (
            "maximum context length is 10 tokens. Your prompt contains 12 input tokens",
            "prompt is too long: 12 tokens > 10 maximum",
        ),
        (
            "Input length (300) exceeds model's maximum context length (256).",
            "prompt is too long: 300 tokens > 256 maximum",
        ),
        (
            "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            "This model's maximum context length is 100 tokens. However, you requested 150 tokens (120 in the "
            "messages, 30 in the completion). Please reduce the length.",
            "prompt is too long: 120 tokens > 100 maximum",
        ),
        (
            "This model's maximum context length is 100 tokens. However, you requested 110 tokens (100 in the "
            "messages, 10 in the completion).",
            "prompt is too long: 101 tokens > 100 maximum",
        ),
        (
            "maximum context length is 2048 tokens. However, your prompt contains 90000 characters",
            "prompt is too long: 22500 tokens > 2048 maximum",
        ),
        (
            "maximum context length is 2048 tokens. However, your prompt contains 4000 characters",
            "prompt is too long: 2049 tokens > 2048 maximum",
        ),
        (
            "max_tokens=80000 cannot be greater than max_model_len=2048. Please request fewer output tokens.",
            f"input length and `max_tokens` exceed context limit: 0 + 80000 > 2048, {PLEASE}",
        ),
        (
            "This model's maximum context length is 100 tokens. However, you requested 130 tokens (50 in the messages, "
            "80 in the completion).",
            f"input length and `max_tokens` exceed context limit: 50 + 80 > 100, {PLEASE}",
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 80. This model's maximum context length is 100 "
            "tokens and your request has 50 input tokens (80 > 100 - 50).",
            f"input length and `max_tokens` exceed context limit: 50 + 80 > 100, {PLEASE}",
        ),
        ("max_tokens must be at least 1, got -52.", "prompt is too long for this model"),
        ("temperature must be non-negative", "temperature must be non-negative"),
    ],
)
def test_context_overflow_is_said_so_that_claude_code_compacts(said: str, expected: str) -> None:
    """Case 29, E10-E13, E13a: only on a 400, whatever the upstream's words."""
    assert render(upstream(400, said))[2] == expected
    assert render(upstream(500, said))[2] == said


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("error-prompt-too-long", "prompt is too long: 2049 tokens > 2048 maximum"),
        ("error-context-length", f"input length and `max_tokens` exceed context limit: 0 + 80000 > 2048, {PLEASE}"),
    ],
)
def test_recorded_overflows(name: str, expected: str) -> None:
    """Case 29, E10, E12: what vLLM 0.32 really says."""
    assert render(upstream(400, json.loads(transcript(name))["error"]["message"]))[2] == expected


def test_recorded_validation_error_passes_in_its_own_words() -> None:
    """E1: any other 400 is the upstream's to explain."""
    message = json.loads(transcript("error-validation"))["error"]["message"]
    assert render(upstream(400, message))[2] == message.replace("\n", " ")


def test_a_known_length_gives_the_figures_of_a_full_context() -> None:
    """E13a: M + K > M where the length is known."""
    said = "max_tokens must be at least 1, got -52"
    assert context_overflow(said, max_model_len=2048) == "prompt is too long: 2100 tokens > 2048 maximum"


@settings(max_examples=200, deadline=None)
@given(st.integers(100, 999), st.text(max_size=50), st.one_of(st.none(), st.integers()), st.text(max_size=10))
def test_any_upstream_refusal_can_be_rendered(
    status: int, message: str, retry_after: int | None, request_id: str
) -> None:
    """Total: whatever an upstream says, and whatever a client called its request."""
    document = ANTHROPIC.render_error(upstream(status, message + "\ud83d", retry_after), request_id + "\udfff")
    assert json.loads(document.body)["error"]["message"]
    assert 400 <= document.status < 600
