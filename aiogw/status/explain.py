"""The story of one request, from the log: its phases in seconds, its place in the queue, who ended it and why; pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from attrs import frozen

from aiogw.status import figures

_MEMBER = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|[^\s"]+)')
_STAMP = re.compile(r"(?<!\d)\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
_TEXT = re.compile(rf"({_STAMP.pattern}) \w+ (aiogw[\w.]*): [^=]*?(?= \w+=)")
# Members in which journald, Docker and others keep a line as they found it.
_WRAPPED = ("MESSAGE", "log", "message")
_ACCESS = "aiogw.access"
_JSON = json.JSONDecoder()
# What is before a line may have braces as well, a few of them.
_MOST_BRACES = 8

ASK = "what runs or waits now is in aiogw status --json, and aiogw top shows it"

# Why it ended, by the outcome of its line.
_ENDS: Mapping[str, str] = {
    "completed": "its answer was complete, and the client took it all",
    "client_gone": "it closed its connection",
    "client_stalled": "the client took nothing of its answer for client_stall_timeout_seconds",
    "queue_full": "all places in the queue were taken",
    "queue_places_taken": "as many requests of its key waited already as the key's queue_places",
    "memory_full": "all request bodies together had taken body_memory_bytes",
    "queue_timeout": "its turn had not come within queue_timeout_seconds",
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
    "malformed_request": "it was not HTTP, or in doubt where it ends",
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
    """One line of the log; ``told`` are its members, as far as it has the gateway's form."""

    text: str
    told: Mapping[str, Any]

    @property
    def is_end(self) -> bool:
        """Whether it is the one that each request has, be it whole or not."""
        # What is not HTTP has no other line than the one with its kind; of a document that is cut off nothing is read.
        cut_off = not self.told and _ACCESS in self.text
        return self.told.get("logger") == _ACCESS or "kind" in self.told or cut_off

    def story(self) -> list[str]:
        """What it tells; empty if it was cut off before it says how it ended, or has what no gateway writes."""
        try:
            if "kind" in self.told:
                return list(_no_request(self.told))
            return list(story(self.told)) if self.told.get("outcome") in _ENDS else []
        except (KeyError, OverflowError, TypeError, ValueError):
            return []


class Reading:
    """The lines of a log as they are read: how many, and from when to when they are."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines
        self._count = 0
        self._first: str | None = None
        self._last = ""

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self._count += 1
            if (stamp := _STAMP.search(line)) is not None:
                self._first, self._last = self._first or stamp[0], stamp[0]
            yield line

    def __str__(self) -> str:
        if not self._count:
            return "what was read, which is empty"
        what = "the line that was" if self._count == 1 else f"the {self._count} lines that were"
        when = "without the gateway's times" if self._first is None else f"from {self._first} to {self._last}"
        return f"{what} read, {when}"


def lines_about(lines: Iterable[str], request_id: str) -> Iterator[Line]:
    """The lines that have this id, in either format, whatever a journal has written before them."""
    whole = re.compile(rf"(?<![\w.:-]){re.escape(request_id)}(?![\w.:-])")
    for text in lines:
        if whole.search(text):
            told = _told(text)
            if told.get("request_id", request_id) == request_id:
                yield Line(text=text.rstrip("\n"), told=told)


def _told(text: str) -> Mapping[str, Any]:
    # JSON first: what a client has chosen stands in it, spaces and all, and may look like a line of text.
    for brace in islice(re.finditer("{", text), _MOST_BRACES):
        try:
            document: dict[str, Any] = _JSON.raw_decode(text, brace.start())[0]
        except (ValueError, RecursionError):
            continue
        if "logger" in document:
            return document
        inner = next((document[name] for name in _WRAPPED if isinstance(document.get(name), str)), "")
        return _told(inner)
    found = _TEXT.search(text)
    if found is None:
        return {}
    try:
        members = {
            name: json.loads(value) if value[0] == '"' else value for name, value in _MEMBER.findall(text, found.end())
        }
    except ValueError:
        return {}
    return {"time": found[1], "logger": found[2], **members}


def story(told: Mapping[str, Any]) -> Iterator[str]:
    """The lines that tell one request's life."""
    ended_at = datetime.fromisoformat(told["time"])
    duration = _seconds(told, "duration_seconds") or 0.0
    arrived_at = ended_at - timedelta(seconds=duration)
    outcome = told["outcome"]
    model = f", model {told['model']}" if "model" in told else ""
    key = f", key {told['key']}" if "key" in told else ""
    yield f"{told['request_id']}: {told.get('method', '-')} {told.get('path', '-')}{model}{key}"
    # None is told of a body that nobody has read, or not to its end.
    length = int(told.get("request_bytes", 0))
    body = f"; its body has {figures.size(length)}" if length else ""
    yield _moment(arrived_at, f"arrived ({arrived_at:%Y-%m-%d}, UTC){body}")
    if "upstream" in told and "read_seconds" not in told:
        yield _moment(ended_at, f"came to the gate of {told['upstream']}{_claim(told)}")
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
    elif rest >= 0.0005 and told.get("phase") == "connect":
        yield f"  {rest:12.3f} s  in want of a connection"
    elif rest >= 0.0005 and told.get("phase") == "first_byte":
        yield f"  {rest:12.3f} s  at the upstream, which had not begun to answer"
    why, detail = _ENDS[outcome], f": {told['detail']}" if "detail" in told else ""
    if outcome == "not_found" and "detail" in told:
        # There is something at its path, and the reason is all there is to say.
        why, detail = told["detail"], ""
    where = _WHERE.get(str(told.get("phase")), "") if outcome in _ON_THE_WAY else ""
    status = f"; the client was told {told['status']}" if "status" in told else "; the client was told no status"
    again = f", and to come back in {told['retry_after_seconds']} s" if "retry_after_seconds" in told else ""
    if str(told.get("status")) == "200" and outcome not in ("completed", "client_gone", "client_stalled"):
        # It had had the beginning of its answer or a sign of life, and with it a status and all the fields there are.
        how = "was told so by an event" if told.get("stream") in (True, "true") else "had its connection broken off"
        status, again = f"; the client, which had a 200 already, {how}", ""
    yield _moment(
        ended_at, f"ended by the {told.get('ended_by', '-')}: {why}{where} ({outcome}{detail}){status}{again}"
    )
    for line in _figures(told):
        yield f"{'':17}{line}"
    if "completion_tokens" in told:
        yield f"{'':17}{told.get('prompt_tokens', '-')} tokens of prompt, {told['completion_tokens']} of answer"


def _no_request(told: Mapping[str, Any]) -> Iterator[str]:
    """What there is to tell of what was refused before there was a request."""
    yield f"{told['request_id']}: not a request"
    why = told.get("detail", _ENDS["malformed_request"])
    told_it = f"; the client was told {told['status']}" if "status" in told else ""
    yield _moment(datetime.fromisoformat(told["time"]), f"refused: {why} (malformed_request, {told['kind']}){told_it}")
    if "untold" in told:
        yield f"{'':17}{told['untold']} more since the one before have no line of their own"


def _phases(told: Mapping[str, Any]) -> Iterator[tuple[str, float, str]]:
    """What is known of the way, in order: name, seconds, and what comes at its end."""
    names = ("wait", "read", "first_byte", "answer")
    wait, read, first, answer = (_seconds(told, f"{name}_seconds") for name in names)
    if read is not None and wait is None:
        yield "until all of it was there and valid", read, f"went on to {told.get('upstream', '-')}, without a slot"
    elif read is not None and "position" not in told:
        yield "until all of it was there and valid", read, f"went on to {told.get('upstream', '-')}, which has no gate"
    elif read is not None:
        came = f"came to the gate of {told.get('upstream', '-')}"
        ahead = f" with {int(told['position']) - 1} ahead of it"
        yield "until all of it was there and valid", read, f"{came}{_claim(told)}{ahead}"
    at = f", to {told['endpoint']}" if "endpoint" in told else ""
    times = int(told.get("put_back", 0))
    again = f", {'once' if times == 1 else f'{times} times'} anew because its endpoint was gone" if times else ""
    if wait is not None:
        yield f"waited{again}", wait, "" if told.get("phase") == "queue" else f"was let through{at}"
    if first is not None:
        connect = f", {told['connect_seconds']} s of it to connect" if "connect_seconds" in told else ""
        yield f"until the upstream's first byte{connect}", first, "the answer began"
    if answer is not None:
        yield "until its last", answer, ""


def _claim(told: Mapping[str, Any]) -> str:
    return f" for {told['sequences']} slots" if "sequences" in told else ""


def _figures(told: Mapping[str, Any]) -> Iterator[str]:
    """What a refusal rests on, as far as it rests on numbers."""
    if "slots_in_use" in told:
        settling = "" if int(told["slots_settling"]) == 0 else f", {told['slots_settling']} settling"
        taken = int(told["slots_in_use"]) + int(told["slots_settling"])
        slots = f"{told['slots_in_use']} of {told['cap']} slots in use{settling}"
        waiting = f"{told['waiting']} of {told['queue_limit']} places in its queue taken by other requests"
        yield f"{told.get('upstream', '-')} had {slots}, and {waiting}"
        if told["outcome"] == "queue_full" and taken < int(told["cap"]):
            yield "the free slots were too few for the request that was next"
    elif "cap" in told:
        yield f"it asked for {told.get('sequences', 1)}, and the cap was {told['cap']}"
    if "estimated_seconds" in told:
        may = (
            f"; queue_timeout_seconds is {float(told['queue_timeout_seconds']):g}"
            if "queue_timeout_seconds" in told
            else ""
        )
        yield f"who came then would have waited about {float(told['estimated_seconds']):.1f} s{may}"
    if "queue_places" in told:
        yield f"queue_places of its key is {told['queue_places']}, and its own requests had them all"
    if "held_bytes" in told:
        held, wanted, limit = (
            figures.size(int(told[name])) for name in ("held_bytes", "wanted_bytes", "body_memory_bytes")
        )
        yield f"the bodies of others took {held}, and it wanted {wanted}; body_memory_bytes is {limit}"
    if "max_body_bytes" in told:
        yield f"max_body_bytes is {told['max_body_bytes']}"
    if "body_timeout_seconds" in told:
        more = f"a second more for each {told['body_min_bytes_per_second']} bytes that have come"
        yield f"body_timeout_seconds is {float(told['body_timeout_seconds']):g}, with {more}"


def _seconds(told: Mapping[str, Any], name: str) -> float | None:
    return float(told[name]) if name in told else None


def _moment(when: datetime, what: str) -> str:
    return f"  {when:%H:%M:%S}.{when.microsecond // 1000:03d}   {what}"


def tell(reading: Reading, request_id: str) -> Iterator[str]:
    """All that the log has of a request; nothing, if it has nothing.  An id that came twice has two stories."""
    others = []
    has_story = has_ended = is_damaged = False
    for line in lines_about(reading, request_id):
        told = line.story() if line.is_end else []
        yield from told
        if not told:
            others.append(line.text)
        has_story = has_story or bool(told)
        is_damaged = is_damaged or (line.is_end and not told)
        has_ended = has_ended or line.is_end
    if is_damaged:
        yield f"{request_id} has ended, but the line that says how is cut off or damaged, and is not explained"
    elif others and not has_ended:
        yield f"{request_id} has not ended in {reading}; {ASK}"
    if others:
        yield "The log also says:" if has_story else "The log says:"
        yield from (f"  {text}" for text in others)
