"""What is known of one request, gathered along its way and told once at its end: the log line and the metrics.

Nothing here decides anything, and nothing of what a prompt or an answer says is ever put in.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from attrs import define, field, frozen

from aiogw.canonical import TokenUsage
from aiogw.errors import GatewayError

COMPLETED = "completed"
CLIENT_GONE = "client_gone"
CLIENT_STALLED = "client_stalled"
# The others are the gateway's doing: it refused, or gave up waiting.
_ENDED_BY_UPSTREAM = ("upstream_broken", "upstream_error", "upstream_auth")

# Request ids from outside end up in logs, headers and file names of other people: a short, plain pattern or none.
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def request_id_from(given: str | None) -> str:
    """``given`` if it is a sane request id, else a fresh one."""
    if given is not None and _SANE_REQUEST_ID.fullmatch(given):
        return given
    return f"req_{secrets.token_hex(12)}"


@define(kw_only=True)
class RequestRecord:
    """One request.  Times are of the monotonic clock, in seconds; None: did not happen.

    ``key`` is the name of whose key it came with, and never the key.  ``times_put_back``: its endpoint was gone, and it
    waited again; ``times_sent`` is more than one when a kept connection had died under it.
    """

    request_id: str
    arrived_at: float
    surface: str = "-"
    key: str | None = None
    method: str = "-"
    path: str = "-"
    model: str | None = None
    upstream: str | None = None
    stream: bool = False
    sequences: int = 1
    position: int | None = None
    endpoint: str | None = None
    entered_at: float | None = None
    granted_at: float | None = None
    refused_at: float | None = None
    sent_at: float | None = None
    first_byte_at: float | None = None
    answered_at: float | None = None
    ended_at: float | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    usage: TokenUsage | None = None
    status: int | None = None
    outcome: str = COMPLETED
    detail: str | None = None
    figures: Mapping[str, float] = field(factory=dict)
    retry_after_seconds: int | None = None
    times_put_back: int = 0
    times_sent: int = 0

    def fail(self, error: GatewayError) -> None:
        """It ends with ``error``, whatever its client is still told of it."""
        self.outcome = error.code
        self.detail = error.detail
        self.figures = error.figures
        self.retry_after_seconds = error.retry_after

    @property
    def read_seconds(self) -> float | None:
        """From the arrival of the request's head to its entry at the gate, or past it: what its body took to come."""
        until = self.granted_at if self.entered_at is None else self.entered_at
        return None if until is None else until - self.arrived_at

    @property
    def wait_seconds(self) -> float | None:
        """Time at the gate, until the grant or, without one, until the end."""
        if self.entered_at is None:
            return None
        for until in (self.granted_at, self.refused_at, self.ended_at):
            if until is not None:
                return until - self.entered_at
        return None

    def queue_headers(self) -> list[tuple[str, str]]:
        """What a client is told: its place in the queue when it came (1: next), and its wait, once that is over."""
        headers = []
        if self.position is not None:
            headers.append(("x-aiogw-queue-position", str(self.position)))
        if self.wait_seconds is not None:
            headers.append(("x-aiogw-queue-seconds", f"{self.wait_seconds:.3f}"))
        return headers

    @property
    def first_byte_seconds(self) -> float | None:
        """From the grant to the upstream's first byte."""
        if self.granted_at is None or self.first_byte_at is None:
            return None
        return self.first_byte_at - self.granted_at

    @property
    def connect_seconds(self) -> float | None:
        """From the grant until the request was written to the upstream: next to nothing on a kept connection."""
        return None if self.granted_at is None or self.sent_at is None else self.sent_at - self.granted_at

    @property
    def answer_seconds(self) -> float | None:
        """From the upstream's first byte to its last, or to the end if that came before."""
        until = self.ended_at if self.answered_at is None else self.answered_at
        return None if self.first_byte_at is None or until is None else until - self.first_byte_at

    @property
    def duration_seconds(self) -> float | None:
        """From the arrival of the request's head to the end of its response."""
        return None if self.ended_at is None else self.ended_at - self.arrived_at

    @property
    def phase(self) -> str:
        """How far it had come by its end."""
        if self.outcome == COMPLETED:
            return "done"
        if self.granted_at is None:
            return "read" if self.upstream is None else "queue"
        if self.first_byte_at is None:
            return "connect" if self.sent_at is None else "first_byte"
        return "stream" if self.answered_at is None else "finish"

    @property
    def ended_by(self) -> str:
        """Whose doing its end was: ``client``, ``upstream`` or ``gateway``."""
        if self.outcome == CLIENT_GONE:
            return "client"
        if self.outcome in _ENDED_BY_UPSTREAM or (self.outcome == COMPLETED and self.answered_at is not None):
            return "upstream"
        return "gateway"

    def fields(self) -> dict[str, Any]:
        """The members of the log line, in its order; what did not happen is left out."""
        told: dict[str, Any] = {
            "request_id": self.request_id,
            "surface": self.surface,
            "key": self.key,
            "method": self.method,
            "path": self.path,
            "model": self.model,
            "upstream": self.upstream,
            "endpoint": self.endpoint,
            "stream": self.stream,
            "sequences": self.sequences if self.sequences != 1 else None,
            "position": self.position,
            "read_seconds": _rounded(self.read_seconds),
            "wait_seconds": _rounded(self.wait_seconds),
            "put_back": self.times_put_back or None,
            "connect_seconds": _rounded(self.connect_seconds),
            "sent": self.times_sent if self.times_sent > 1 else None,
            "first_byte_seconds": _rounded(self.first_byte_seconds),
            "answer_seconds": _rounded(self.answer_seconds),
            "duration_seconds": _rounded(self.duration_seconds),
            "request_bytes": self.request_bytes,
            "response_bytes": self.response_bytes,
            "prompt_tokens": self.usage.prompt_tokens if self.usage else None,
            "completion_tokens": self.usage.completion_tokens if self.usage else None,
            "status": self.status,
            "outcome": self.outcome,
            "phase": self.phase,
            "ended_by": self.ended_by,
            "detail": self.detail,
            **self.figures,
            "retry_after_seconds": self.retry_after_seconds,
        }
        return {name: value for name, value in told.items() if value is not None}


# Where a request is that has not ended; from FINISH on it holds no slot any more.
QUEUE, FIRST_BYTE, STREAM, FINISH = "queue", "first_byte", "stream", "finish"


@frozen(kw_only=True)
class Progress:
    """A request under way: its record so far, and what is put there at its end only.

    ``number`` counts up in the order of entry; ``last_byte_at`` is when the upstream was last heard; ``deadline_at`` is
    until when it may wait.
    """

    number: int
    record: RequestRecord
    upstream: str
    phase: str
    response_bytes: int
    last_byte_at: float | None
    deadline_at: float | None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


access_log = logging.getLogger("aiogw.access")


def tell(record: RequestRecord) -> None:
    """Write the one line of a request that has ended."""
    if access_log.isEnabledFor(logging.INFO):
        access_log.info("request", extra={"fields": record.fields()})


class TextFormatter(logging.Formatter):
    """``time level logger: message key=value …`` for people and grep; values that need it are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None) or {}
        members = "".join(f" {name}={_text(value)}" for name, value in fields.items())
        stamp = _stamp(record.created)
        line = f"{stamp} {record.levelname.lower()} {record.name}: {record.getMessage()}{members}"
        return line + _traceback(self, record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, the same members as in the text form."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        told.update(getattr(record, "fields", None) or {})
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        with contextlib.suppress(UnicodeEncodeError):  # of half a character, which a path may have
            line = _json_encoder.encode(told)
            if line.isascii():
                return line.decode()
        # A quarter of the speed, and all that is not ASCII is escaped, whatever reads the log.
        return json.dumps(told, default=str, separators=(",", ":"))


_json_encoder = msgspec.json.Encoder(enc_hook=str)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value)
    if isinstance(value, float):
        # Not str(): 5e-05 reads badly where 0.0001 is meant.
        return f"{value:.4f}"
    return str(value).lower()


_PLAIN = re.compile(r"[!#-<>-~]+")


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return "\n" + formatter.formatException(record.exc_info) if record.exc_info else ""


def _stamp(created: float) -> str:
    """RFC 3339 with milliseconds, in UTC: sortable, and the same on every machine of the cluster."""
    whole = int(created)
    return f"{_second(whole)}.{int((created - whole) * 1000):03d}Z"


@functools.lru_cache(maxsize=2)
def _second(whole: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))


def configure_logging(*, level: str, format_: str) -> None:
    """Send every log line of the process to standard error, which is where systemd and containers pick it up.

    ``format_`` "auto" is text on a terminal, and JSON everywhere else.
    """
    handler = logging.StreamHandler()
    as_json = format_ == "json" or (format_ == "auto" and not os.isatty(2))
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
