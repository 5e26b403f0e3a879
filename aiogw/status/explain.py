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

# Why it ended, by the outcome of its line.
_ENDS: Mapping[str, str] = {
    "completed": "its answer was complete, and the client took it all",
    "client_gone": "it closed its connection",
    "client_stalled": "the client took nothing of its answer for client_stall_timeout_seconds",
    "queue_full": "all slots were taken and all places in the queue as well",
    "queue_places_taken": "as many requests of its key waited already as the key's queue_places",
    "memory_full": "all request bodies together had taken body_memory_bytes",
    "queue_timeout": "no slot had come free within queue_timeout_seconds",
    "queue_too_slow": "by the estimate it would have waited beyond queue_timeout_seconds",
    "draining": "it was shutting down",
    "upstream_unavailable": "no connection to the upstream could be made",
    "upstream_timeout": "the upstream was silent for too long",
    "upstream_broken": "it broke the connection off, or did not speak HTTP",
    "upstream_error": "it refused the request",
    "upstream_auth": "it refused the gateway's own credentials",
    "too_many_sequences": "it asks for more sequences at once than the cap allows",
    "model_not_found": "it asks for a model that is not served",
    "not_found": "there is nothing at its path",
    "method_not_allowed": "its path does not take that method",
    "invalid_body": "its body could not be read",
    "invalid_request": "a member of its body is wrong",
    "request_too_large": "its body is larger than max_body_bytes",
    "invalid_api_key": "it came with no key that is known",
    "body_timeout": "its body came too slowly, see body_timeout_seconds",
    "unsupported_encoding": "its body has a content coding that cannot be read",
    "malformed_request": "it was not HTTP",
    "internal_error": "a fault of its own; the log has more",
}
# Where it was by then, if somebody made an end of it on the way.
_ON_THE_WAY = ("client_gone", "client_stalled", "draining", "upstream_broken", "upstream_timeout")
_WHERE: Mapping[str, str] = {
    "read": ", while its body came in",
    "queue": ", while it waited",
    "connect": ", while a connection was made for it",
    "first_byte": ", before its answer began",
    "stream": ", in the middle of its answer",
    "finish": ", when its answer had all come",
}


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
    for name, seconds, then in _phases(told):
        yield f"  {seconds:12.3f} s  {name}"
        since, left = since + timedelta(seconds=seconds), left - seconds
        if then:
            yield _moment(since, then)
    rest = max(0.0, left)
    if "answer_seconds" in told:
        sent = figures.size(int(told.get("response_bytes", 0)))
        yield f"  {rest:12.3f} s  until the client had all it got, {sent}"
    elif rest >= 0.0005 and "wait_seconds" in told and _was_granted(told):
        yield f"  {rest:12.3f} s  at the upstream, which had not begun to answer"
    why = _ENDS.get(outcome, outcome.replace("_", " "))
    where = _WHERE.get(str(told.get("phase")), "") if outcome in _ON_THE_WAY else ""
    detail = f": {told['detail']}" if "detail" in told else ""
    status = f"; the client was told {told['status']}" if "status" in told else "; the client was told no status"
    again = f", and to come back in {told['retry_after_seconds']} s" if "retry_after_seconds" in told else ""
    if told.get("status") == 200 and "retry_after_seconds" in told:
        # It had had a sign of life while it waited, and with it a status and all the fields there are.
        status, again = "; the client, which had a 200 already, was told so by an event", ""
    yield _moment(
        ended_at, f"ended by the {told.get('ended_by', '-')}: {why}{where} ({outcome}{detail}){status}{again}"
    )
    if "completion_tokens" in told:
        yield f"{'':17}{told.get('prompt_tokens', '-')} tokens of prompt, {told['completion_tokens']} of answer"


def _phases(told: Mapping[str, Any]) -> Iterator[tuple[str, float, str]]:
    """What is known of the way, in order: name, seconds, and what comes at its end."""
    names = ("wait", "read", "first_byte", "answer")
    wait, read, first, answer = (_seconds(told, f"{name}_seconds") for name in names)
    if wait is None:
        return
    if read is not None:
        position = told.get("position")
        ahead = f" with {int(position) - 1} ahead of it" if position is not None else ""
        yield "until all of it was there and valid", read, f"came to the gate of {told.get('upstream', '-')}{ahead}"
    at = f" at {told['endpoint']}" if "endpoint" in told else ""
    again = f", {told['put_back']} times anew because its endpoint was gone" if "put_back" in told else ""
    yield f"waited{again}", wait, f"was given its slots{at}" if _was_granted(told) else ""
    if first is not None:
        connect = f", {told['connect_seconds']} s of it to connect" if "connect_seconds" in told else ""
        yield f"until the upstream's first byte{connect}", first, "the answer began"
    if answer is not None:
        yield "until its last", answer, ""


def _was_granted(told: Mapping[str, Any]) -> bool:
    return told.get("phase") not in ("read", "queue")


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
