"""What is told of what is not a request, and how often."""

from __future__ import annotations

import json
import logging

import pytest

from aiogw import server
from aiogw.dialects import DIALECTS
from aiogw.errors import MalformedRequest
from aiogw.server import LINES_PER_MINUTE, MalformedRequests

ERROR = MalformedRequest(reason="its target is malformed")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(server, "time", clock)
    return clock


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [record.fields for record in caplog.records if record.name == "aiogw.server"]  # type: ignore[attr-defined]


def test_a_scanner_does_not_fill_the_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """R66: every one is counted and answered; a few a minute are told, and then how many were not."""
    caplog.set_level(logging.INFO, logger="aiogw.server")
    counted: list[None] = []
    malformed = MalformedRequests(render=DIALECTS[0].render_error, count=lambda: counted.append(None))
    answers = [malformed.refuse(ERROR, "InvalidURLError") for _ in range(1000)]
    assert 1000 == len(counted) == len(set(answers))
    first = dict(told(caplog)[0])
    assert str(first.pop("request_id")).encode() in answers[0]
    assert {"status": 400, "kind": "InvalidURLError", "detail": ERROR.reason} == first
    assert LINES_PER_MINUTE == len(told(caplog))
    clock.now += 60
    malformed.refuse(ERROR, "InvalidURLError")
    malformed.refuse(ERROR, "InvalidURLError")
    *_, late, later = told(caplog)
    assert 1000 - LINES_PER_MINUTE == late["untold"]
    assert "untold" not in later


def test_the_answer(clock: Clock) -> None:
    """It is a problem document with an id, and the last thing on its connection."""
    malformed = MalformedRequests(render=DIALECTS[0].render_error, count=lambda: None)
    head, _, body = malformed.refuse(ERROR, "InvalidURLError").partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines)
    document = json.loads(body)
    assert "HTTP/1.1 400 Bad Request" == status
    assert ("close", "application/problem+json") == (fields["connection"], fields["content-type"])
    assert (len(body), fields["x-request-id"]) == (int(fields["content-length"]), document["request_id"])
    assert "aiogw" == fields["server"]
    assert ERROR.message == document["detail"]
