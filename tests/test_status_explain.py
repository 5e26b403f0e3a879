"""What ``aiogw explain`` makes of the log line of one request."""

from __future__ import annotations

import json
from typing import Any

from aiogw.status.explain import tell


def story(**members: Any) -> str:
    line = {
        "time": "2026-12-01T10:00:05.000Z",
        "logger": "aiogw.access",
        "request_id": "a",
        "method": "POST",
        "path": "/",
    }
    return "\n".join(tell([json.dumps(line | members)], "a"))


def test_a_request_that_broke_off() -> None:
    """What each phase took, where it went, and in whose words it failed."""
    told = story(
        duration_seconds=5.0,
        read_seconds=0.5,
        wait_seconds=1.0,
        put_back=2,
        endpoint="a:8000",
        connect_seconds=0.125,
        first_byte_seconds=0.5,
        answer_seconds=2.0,
        outcome="upstream_broken",
        phase="stream",
        ended_by="upstream",
        detail="it closed the connection",
        response_bytes=10,
    )
    assert "1.000 s  waited, 2 times anew because its endpoint was gone" in told
    assert "was given its slots at a:8000" in told
    assert "0.500 s  until the upstream's first byte, 0.125 s of it to connect" in told
    assert "2.000 s  until its last" in told
    assert "1.000 s  until the client had all it got, 10 B" in told
    end = "in the middle of its answer (upstream_broken: it closed the connection); the client was told no status"
    assert told.endswith(end)
    assert "ended by the upstream: " in told


def test_a_request_that_never_began_to_be_answered() -> None:
    """The time at the upstream is told as what it was."""
    told = story(
        duration_seconds=5.0, wait_seconds=1.0, outcome="upstream_timeout", phase="first_byte", ended_by="gateway"
    )
    assert "4.000 s  at the upstream, which had not begun to answer" in told
    assert "ended by the gateway: the upstream was silent for too long, before its answer began" in told


def test_a_request_that_was_refused_says_when_to_come_back() -> None:
    """As its client was told."""
    told = story(outcome="queue_full", phase="queue", ended_by="gateway", status=503, retry_after_seconds=7)
    assert told.endswith("(queue_full); the client was told 503, and to come back in 7 s")


def test_a_refusal_after_a_sign_was_an_event() -> None:
    """Its status was a 200 by then, which has no time to come back in."""
    told = story(outcome="queue_timeout", phase="queue", ended_by="gateway", status=200, retry_after_seconds=7)
    assert "the client, which had a 200 already, was told so by an event" in told
    assert "come back" not in told
