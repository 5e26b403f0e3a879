"""What ``aiogw explain`` makes of the log line of one request."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from attrs import evolve

from aiogw.errors import (
    BodyTimeout,
    BodyTooLarge,
    GatewayError,
    MemoryFull,
    Occupancy,
    QueueFull,
    QueuePlacesTaken,
    QueueTimeout,
    QueueTooSlow,
    TooManySequences,
)
from aiogw.record import JsonFormatter, RequestRecord, TextFormatter, access_log
from aiogw.status.explain import Reading, tell

LINE = {
    "time": "2026-12-01T10:00:05.000Z",
    "logger": "aiogw.access",
    "request_id": "a",
    "method": "POST",
    "path": "/",
}


def explained(*lines: str, request_id: str = "a") -> str:
    return "\n".join(tell(Reading(lines), request_id))


def story(**members: Any) -> str:
    return explained(json.dumps(LINE | members))


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
    assert "was let through, to a:8000" in told
    assert "0.500 s  until the upstream's first byte, 0.125 s of it to connect" in told
    assert "2.000 s  until its last" in told
    assert "1.000 s  until the client had all it got, 10 B" in told
    end = "in the middle of its answer (upstream_broken: it closed the connection); the client was told no status"
    assert told.endswith(end)
    assert "ended by the upstream: " in told


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
@pytest.mark.parametrize(
    ("stream", "told"), [(True, "was told so by an event"), (False, "had its connection broken off")]
)
def test_an_answer_that_broke_off(stream: bool, told: str, formatter: logging.Formatter) -> None:
    """Its client had a 200, which is not the last that it heard."""
    line = logging.LogRecord(access_log.name, logging.INFO, "", 1, "request", (), None)
    line.fields = {"request_id": "a", "stream": stream, "status": 200, "outcome": "upstream_broken"}
    assert explained(formatter.format(line)).endswith(f"; the client, which had a 200 already, {told}")
    line.fields["outcome"] = "client_gone"
    assert explained(formatter.format(line)).endswith("; the client was told 200")


def test_a_request_that_was_put_back_once() -> None:
    """In words."""
    told = story(wait_seconds=1.0, put_back=1, outcome="completed")
    assert "waited, once anew because its endpoint was gone" in told


def test_an_upstream_without_a_gate() -> None:
    """There is no queue in which anybody could be ahead."""
    told = story(upstream="u", duration_seconds=1.0, read_seconds=0.5, wait_seconds=0.0, outcome="completed")
    assert "went on to u, which has no gate" in told
    assert "ahead" not in told


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
    told = story(
        outcome="queue_timeout", phase="queue", ended_by="gateway", status=200, stream=True, retry_after_seconds=7
    )
    assert "the client, which had a 200 already, was told so by an event" in told
    assert "come back" not in told


# -- why it was refused ---------------------------------------------------------------------------------------------

FULL = Occupancy(slots_in_use=5, slots_settling=1, cap=6, waiting=8, queue_limit=8)
QUEUE: dict[str, Any] = {"upstream": "u", "occupancy": FULL, "estimated_seconds": 12.34567, "retry_after_seconds": 7}
TAKEN = "u had 5 of 6 slots in use, 1 settling, and 8 of 8 places in its queue taken by other requests"
ESTIMATE = "who came then would have waited about 12.3 s"


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
@pytest.mark.parametrize(
    ("error", "figures"),
    [
        (QueueFull(**QUEUE), [TAKEN, ESTIMATE]),
        (
            QueueFull(**{**QUEUE, "occupancy": evolve(FULL, slots_in_use=3)}),
            [TAKEN.replace("5 of", "3 of"), "the free slots were too few for the request that was next", ESTIMATE],
        ),
        (
            QueuePlacesTaken(**QUEUE, queue_places=4),
            [TAKEN, ESTIMATE, "queue_places of its key is 4, and its own requests had them all"],
        ),
        (QueueTimeout(**QUEUE, waited_seconds=30.0), [TAKEN, ESTIMATE]),
        (QueueTooSlow(**QUEUE, queue_timeout_seconds=10), [TAKEN, f"{ESTIMATE}; queue_timeout_seconds is 10"]),
        (TooManySequences(upstream="u", sequences=9, cap=6), ["it asked for 9, and the cap was 6"]),
        (
            MemoryFull(limit_bytes=4_000_000, held_bytes=3_500_000, wanted_bytes=1_000_000, retry_after_seconds=5),
            ["the bodies of others took 3.5 MB, and it wanted 1.0 MB; body_memory_bytes is 4.0 MB"],
        ),
        (BodyTooLarge(limit_bytes=67_108_864), ["max_body_bytes is 67108864"]),
        (
            BodyTimeout(timeout_seconds=10, min_bytes_per_second=65536),
            ["body_timeout_seconds is 10, with a second more for each 65536 bytes that have come"],
        ),
    ],
    ids=lambda value: getattr(value, "code", ""),
)
def test_a_refusal_is_told_with_its_figures(
    error: GatewayError, figures: list[str], formatter: logging.Formatter
) -> None:
    """What there was at that moment of what it ran into, and the limit by its name: nobody has to look elsewhere."""
    one = RequestRecord(
        request_id="a", arrived_at=1.0, ended_at=1.5, upstream="u", sequences=getattr(error, "sequences", 1)
    )
    one.fail(error)
    line = logging.LogRecord(access_log.name, logging.INFO, "", 1, "request", (), None)
    line.fields = one.fields()
    lines = explained(formatter.format(line)).splitlines()
    end = next(number for number, text in enumerate(lines) if "ended by the gateway" in text)
    assert figures == [text.strip() for text in lines[end + 1 :]]
    claim = f" for {one.sequences} slots" if one.sequences > 1 else ""
    assert lines[end - 1].endswith(f"came to the gate of u{claim}")


def test_an_upstream_that_does_not_count() -> None:
    """Its path is right, so that is not what is said of it."""
    told = story(outcome="not_found", ended_by="gateway", detail="its upstream does not count tokens", status=404)
    assert told.endswith("by the gateway: its upstream does not count tokens (not_found); the client was told 404")
    assert "there is nothing at its path (not_found)" in story(outcome="not_found")


# -- only what the line shows ---------------------------------------------------------------------------------------


def test_a_request_that_no_connection_was_made_for() -> None:
    """It was not at the upstream, and nothing says that it was."""
    told = story(
        upstream="u",
        read_seconds=0.5,
        wait_seconds=0.0,
        endpoint="a:8000",
        duration_seconds=5.0,
        outcome="upstream_unavailable",
        phase="connect",
        ended_by="gateway",
    )
    assert "was let through, to a:8000" in told
    assert "4.500 s  in want of a connection" in told
    assert "at the upstream" not in told
    assert "slots" not in told


def test_a_request_that_takes_no_slot() -> None:
    """Counting tokens neither waits nor comes to a gate; its way is told from its arrival to its end."""
    record = RequestRecord(request_id="a", arrived_at=1.0, upstream="u", sequences=0)
    record.granted_at, record.sent_at, record.first_byte_at, record.answered_at, record.ended_at = (
        2.0,
        2.0,
        4.0,
        4.5,
        5.0,
    )
    told = story(**record.fields()).splitlines()
    assert ["arrived (2026-12-01, UTC)", "1.000 s  until all of it was there and valid"] == [
        line.strip() if line.lstrip()[1] == "." else line[17:] for line in told[1:3]
    ]
    assert told[3].endswith("went on to u, without a slot")
    assert told[-2].strip().startswith("0.500 s  until the client had all it got")
    assert "gate" not in "".join(told)
    assert "waited" not in "".join(told)


# -- what a log puts around a line ----------------------------------------------------------------------------------

END = json.dumps(LINE | {"outcome": "completed"})
TEXT = '2026-12-01T10:00:05.000Z info aiogw.access: request request_id=a path="/ b" outcome=completed'


@pytest.mark.parametrize(
    "line",
    [
        END,
        TEXT,
        f"Dec 01 10:00:05 host aiogw[7]: {END}",
        f"Dec 01 10:00:05 host aiogw[7]: {TEXT}",
        f"aiogw-1  | {END}",
        f"\x1b[36maiogw-1  | \x1b[0m{END}\x1b[0m",
        f"\x1b[36maiogw-1  | \x1b[0m{TEXT}",
        f"{{app=aiogw}} {END}",
        f"2026-12-01T10:00:05.123456789Z stderr F {END}",
        f"gateway.log:{TEXT}",
        json.dumps({"log": f"{END}\n", "stream": "stderr"}),
        json.dumps({"MESSAGE": END, "_PID": "7"}),
        json.dumps({"MESSAGE": TEXT, "_PID": "7"}),
        f"{END}\r\n",
    ],
)
def test_whatever_a_log_puts_around_a_line(line: str) -> None:
    """A journal, containers and their collectors have each a form of their own, and the line is still in it."""
    told = explained(line)
    assert told.startswith("a: ")
    assert "(completed)" in told
    assert "also says" not in told


@pytest.mark.parametrize("text", [TEXT, END], ids=["text", "json"])
def test_what_a_client_said_is_no_line(text: str) -> None:
    """A path may look like the line of another request; it is the path of its own."""
    forged = json.dumps(LINE | {"request_id": "b", "path": text})
    quoted = TextFormatter()
    line = logging.LogRecord(access_log.name, logging.INFO, "", 1, "request", (), None)
    line.fields = {"request_id": "b", "path": text}
    assert "" == explained(forged, quoted.format(line))


# -- no end, or nothing ---------------------------------------------------------------------------------------------

BACK = json.dumps(
    {"time": "2026-12-01T10:00:04.000Z", "logger": "aiogw.relay", "message": "it waits", "request_id": "a"}
)


@pytest.mark.parametrize("line", [BACK, "2026-12-01T10:00:04.000Z info aiogw.relay: it waits request_id=a"])
def test_a_request_that_has_not_ended(line: str) -> None:
    """What there is of it is told, and where to look for the rest."""
    told = explained("2026-12-01T09:00:00.000Z info aiogw.app: listening", line).splitlines()
    assert told[0] == (
        "a has not ended in the 2 lines that were read, from 2026-12-01T09:00:00.000Z to 2026-12-01T10:00:04.000Z; "
        "what runs or waits now is in aiogw status --json, and aiogw top shows it"
    )
    assert ["The log says:", f"  {line}"] == told[1:]
    assert "has not ended" not in explained(line, END)


GONE = (
    "2026-12-01T10:00:05.000Z info aiogw.access: request request_id=a method=POST path=/ wait_seconds={} "
    "duration_seconds=2.0000 status=200 outcome=client_gone phase=queue ended_by=client"
)


@pytest.mark.parametrize(
    "line",
    [
        GONE.format("0.5000").partition(" outcome")[0],
        GONE.format("0.5000").partition("_gone")[0],
        GONE.format("abc"),
        GONE.format("nan"),
        GONE.format("1e308"),
        GONE.format(r'"\x"'),
        GONE.format("0.5").replace("method=POST", r'method="\q"'),
        json.dumps(LINE | {"outcome": "client_gone"}).partition("client_gone")[0],
        json.dumps(LINE | {"outcome": "client_gone", "duration_seconds": [1]}),
        json.dumps(LINE | {"outcome": ["client_gone"]}),
        json.dumps(LINE | {"outcome": "client_gone", "time": "yesterday"}),
        json.dumps(LINE | {"outcome": "queue_full", "slots_in_use": 1}),
    ],
)
def test_a_line_that_is_not_whole(line: str) -> None:
    """How the request ended is not made up where its line is cut off or damaged, and what there is of it is told."""
    told = explained(line).splitlines()
    assert told[0] == "a has ended, but the line that says how is cut off or damaged, and is not explained"
    assert ["The log says:", f"  {line}"] == told[1:]
    assert "(client_gone)" in explained(GONE.format("0.5000"))


@pytest.mark.parametrize("line", [GONE.format("0.5000"), json.dumps(LINE | {"outcome": "client_gone", "status": 200})])
def test_a_line_may_be_cut_off_anywhere(line: str) -> None:
    """It is never taken for a success."""
    for length in range(len(line)):
        assert "completed" not in explained(line[:length])


def test_what_is_not_http_has_ended() -> None:
    """Its only line is no request's, and there will be no other; why is said in words."""
    members = {"time": LINE["time"], "logger": "aiogw.server", "request_id": "a", "status": 400, "kind": "LineTooLong"}
    told = explained(json.dumps(members | {"detail": "a line in it is too long", "untold": 3}))
    assert told.splitlines() == [
        "a: not a request",
        "  10:00:05.000   refused: a line in it is too long (malformed_request, LineTooLong); the client was told 400",
        "                 3 more since the one before have no line of their own",
    ]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((), "what was read, which is empty"),
        (("nothing",), "the line that was read, without the gateway's times"),
        ((END, BACK), "the 2 lines that were read, from 2026-12-01T10:00:05.000Z to 2026-12-01T10:00:04.000Z"),
    ],
)
def test_what_was_read(lines: tuple[str, ...], told: str) -> None:
    """How much it was, and from when to when, for whoever looked for something that is not there."""
    reading = Reading(lines)
    assert [] == list(tell(reading, "b"))
    assert told == str(reading)
