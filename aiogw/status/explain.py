"""The story of one request, from the log: its phases in seconds, its place in the queue, who ended it and why; pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from attrs import frozen

from aiogw.status import figures

_MEMBER = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|[^\s"]+)')
_ACCESS_TEXT = re.compile(r"(?:^|\s)(\d{4}-\d\d-\d\dT[\d:.]+Z) \w+ aiogw\.access: request(?= )")

# Who ended it, and why, by the outcome of its line; the numbers are for the sentence to fill in.
_ENDS: Mapping[str, tuple[str, str]] = {
    "completed": ("the upstream", "its answer was complete, and the client took it all"),
    "client_gone": ("the client", "it closed its connection"),
    "client_stalled": ("the gateway", "the client took nothing of its answer for client_stall_timeout_seconds"),
    "queue_full": ("the gateway", "all slots were taken and all places in the queue as well"),
    "queue_places_taken": ("the gateway", "as many requests of its key waited already as the key's queue_places"),
    "memory_full": ("the gateway", "all request bodies together had taken body_memory_bytes"),
    "queue_timeout": ("the gateway", "no slot had come free within queue_timeout_seconds"),
    "queue_too_slow": ("the gateway", "by the estimate it would have waited beyond queue_timeout_seconds"),
    "draining": ("the gateway", "it was shutting down"),
    "upstream_unavailable": ("the gateway", "no connection to the upstream could be made"),
    "upstream_timeout": ("the gateway", "the upstream was silent for too long"),
    "upstream_broken": ("the upstream", "it broke the connection off, or did not speak HTTP"),
    "upstream_error": ("the upstream", "it refused the request"),
    "upstream_auth": ("the upstream", "it refused the gateway's own credentials"),
    "too_many_sequences": ("the gateway", "it asks for more sequences at once than the cap allows"),
    "model_not_found": ("the gateway", "it asks for a model that is not served"),
    "not_found": ("the gateway", "there is nothing at its path"),
    "method_not_allowed": ("the gateway", "its path does not take that method"),
    "invalid_body": ("the gateway", "its body could not be read"),
    "invalid_request": ("the gateway", "a member of its body is wrong"),
    "request_too_large": ("the gateway", "its body is larger than max_body_bytes"),
    "invalid_api_key": ("the gateway", "it came with no key that is known"),
    "body_timeout": ("the gateway", "its body came too slowly, see body_timeout_seconds"),
    "unsupported_encoding": ("the gateway", "its body has a content coding that cannot be read"),
    "malformed_request": ("the gateway", "it was not HTTP"),
    "internal_error": ("the gateway", "a fault of its own; the log has more"),
}
_NEVER_GRANTED = ("queue_full", "queue_places_taken", "queue_timeout", "queue_too_slow", "draining")


@frozen(kw_only=True)
class Line:
    """One line of the log; ``told`` are the members of the line that each request has, None: another line."""

    text: str
    told: Mapping[str, Any] | None


def lines_about(lines: Iterable[str], request_id: str) -> Iterator[Line]:
    """The lines that have this id, in either format, whatever a journal has written before them."""
    whole = re.compile(rf"(?<![\w.:-]){re.escape(request_id)}(?![\w.:-])")
    for text in lines:
        if whole.search(text):
            told = _told(text)
            if told is None or str(told.get("request_id")) == request_id:
                yield Line(text=text.rstrip("\n"), told=told)


def _told(text: str) -> dict[str, Any] | None:
    found = _ACCESS_TEXT.search(text)
    if found is not None:
        members = {name: json.loads(value) if value[0] == '"' else value for name, value in _MEMBER.findall(text)}
        return {"time": found[1], **members}
    start = text.find("{")
    try:
        document = json.loads(text[start:]) if start >= 0 else None
    except ValueError:
        return None
    is_access = isinstance(document, dict) and document.get("logger") == "aiogw.access"
    return document if is_access else None


def story(told: Mapping[str, Any]) -> Iterator[str]:
    """The lines that tell one request's life."""
    ended_at = datetime.fromisoformat(told["time"])
    duration = _seconds(told, "duration_seconds") or 0.0
    arrived_at = ended_at - timedelta(seconds=duration)
    outcome = str(told.get("outcome", "completed"))
    model = f", model {told['model']}" if "model" in told else ""
    key = f", key {told['key']}" if "key" in told else ""
    yield f"{told['request_id']}: {told.get('method', '-')} {told.get('path', '-')}{model}{key}"
    yield _moment(arrived_at, f"arrived; its body has {figures.size(int(told.get('request_bytes', 0)))}")
    since, left = arrived_at, duration
    for name, seconds, then in _phases(told, outcome):
        yield f"  {seconds:12.3f} s  {name}"
        since, left = since + timedelta(seconds=seconds), left - seconds
        if then:
            yield _moment(since, then)
    rest = max(0.0, left)
    if "first_byte_seconds" in told:
        yield f"  {rest:12.3f} s  from there to the end: {figures.size(int(told.get('response_bytes', 0)))} went out"
    elif rest >= 0.0005 and "wait_seconds" in told and _was_granted(told, outcome):
        yield f"  {rest:12.3f} s  at the upstream, which had not begun to answer"
    who, why = _ENDS.get(outcome, ("-", outcome.replace("_", " ")))
    where = {"queued": ", while it waited", "running": ", while it held its slots"}.get(str(told.get("left")), "")
    status = f"; the client was told {told['status']}" if "status" in told else "; the client was told no status"
    yield _moment(ended_at, f"ended by {who}: {why}{where} ({outcome}){status}")
    if "completion_tokens" in told:
        yield f"{'':17}{told.get('prompt_tokens', '-')} tokens of prompt, {told['completion_tokens']} of answer"


def _phases(told: Mapping[str, Any], outcome: str) -> Iterator[tuple[str, float, str]]:
    """What is known of the way, in order: name, seconds, and what comes at its end."""
    wait, read, first = (_seconds(told, f"{name}_seconds") for name in ("wait", "read", "first_byte"))
    if wait is None:
        return
    if read is not None:
        position = told.get("position")
        ahead = f" with {position} ahead of it" if position is not None else ""
        yield "until all of it was there and valid", read, f"came to the gate of {told.get('upstream', '-')}{ahead}"
    yield "waited", wait, "was given its slots" if _was_granted(told, outcome) else ""
    if first is not None:
        yield "until the upstream's first byte", first, "the answer began"


def _was_granted(told: Mapping[str, Any], outcome: str) -> bool:
    return "first_byte_seconds" in told or (told.get("left") != "queued" and outcome not in _NEVER_GRANTED)


def _seconds(told: Mapping[str, Any], name: str) -> float | None:
    return float(told[name]) if name in told else None


def _moment(when: datetime, what: str) -> str:
    return f"  {when:%H:%M:%S}.{when.microsecond // 1000:03d}   {what}"


def tell(lines: Iterable[str], request_id: str) -> Iterator[str]:
    """All that the log has of a request; nothing, if it has nothing.  An id that came twice has two stories."""
    others = []
    for line in lines_about(lines, request_id):
        if line.told is None:
            others.append(line.text)
        else:
            yield from story(line.told)
    if others:
        yield "The log also says:"
        yield from (f"  {text}" for text in others)
