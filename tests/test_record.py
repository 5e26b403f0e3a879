"""What is told of a request: its id, its times, its one line in the log."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specimens import OCCUPANCY, specimens

from aiogw.errors import (
    GatewayError,
    QueueFull,
    QueuePlacesTaken,
    QueueRefusal,
    QueueTimeout,
    QueueTooSlow,
    UpstreamUnavailable,
)
from aiogw.record import (
    COMPLETED,
    JsonFormatter,
    RequestRecord,
    TextFormatter,
    access_log,
    configure_logging,
    request_id_from,
    tell,
)

# -- request ids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_id", ["a", "req_01ab", "0", "4bf92f35-77b3.x:1_y", "A" * 128])
def test_a_sane_request_id_is_kept(given_id: str) -> None:
    """A client's own id goes through, so that its log and ours can be laid side by side."""
    assert given_id == request_id_from(given_id)


@pytest.mark.parametrize(
    "given_id",
    [
        None,
        "",
        " a",
        "a b",
        "a\n",
        "a\r\nx-evil: 1",
        "-a",
        ".a",
        "../a",
        "_a",
        "ä",
        "a" * 129,
        'a"b',
        "a/b",
        "\x00",
        "a;b",
    ],
)
def test_any_other_request_id_is_replaced(given_id: str | None) -> None:
    """What could do harm in a header, a log or a file name is not kept in part: there is a fresh id instead."""
    made = request_id_from(given_id)
    assert re.fullmatch(r"req_[0-9a-f]{24}", made)
    assert made == request_id_from(made)
    assert made != request_id_from(given_id)


@given(st.text())
def test_a_request_id_is_always_sane(given_id: str) -> None:
    """Whatever was given, what comes out is short, plain ASCII without a blank."""
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", request_id_from(given_id))


# -- times ----------------------------------------------------------------------------------------------------------


def record(**changes: Any) -> RequestRecord:
    return RequestRecord(**{"request_id": "req_1", "arrived_at": 100.0, **changes})


def test_times_of_a_request_that_went_all_the_way() -> None:
    """Wait until the grant, first byte since the grant, duration since the arrival."""
    one = record(entered_at=101.0, granted_at=103.5, first_byte_at=104.0, ended_at=110.0)
    assert (2.5, 0.5, 10.0) == (one.wait_seconds, one.first_byte_seconds, one.duration_seconds)


def test_times_of_a_request_that_was_never_granted() -> None:
    """It waited until its end; there was no first byte."""
    one = record(entered_at=101.0, ended_at=131.0)
    assert (30.0, None, 31.0) == (one.wait_seconds, one.first_byte_seconds, one.duration_seconds)


@pytest.mark.parametrize("changes", [{}, {"entered_at": 101.0}, {"first_byte_at": 102.0}, {"granted_at": 101.0}])
def test_times_that_have_not_come(changes: dict[str, float]) -> None:
    """What did not happen has no duration, instead of one from or until nowhere."""
    one = record(**changes)
    assert (None, None, None) == (one.wait_seconds, one.first_byte_seconds, one.duration_seconds)


# -- the line -------------------------------------------------------------------------------------------------------

WHOLE = record(
    surface="openai",
    method="POST",
    path="/v1/chat/completions",
    model="reasoning",
    upstream="reasoning",
    stream=True,
    sequences=2,
    position=3,
    endpoint="a:8000",
    entered_at=100.0001,
    granted_at=102.00019,
    sent_at=102.5,
    first_byte_at=103.0,
    answered_at=109.0,
    ended_at=110.00006,
    request_bytes=12,
    response_bytes=345,
    status=200,
)


def test_the_fields_of_a_whole_request() -> None:
    """The line's members in their order; times rounded to a tenth of a millisecond."""
    assert [
        ("request_id", "req_1"),
        ("surface", "openai"),
        ("method", "POST"),
        ("path", "/v1/chat/completions"),
        ("model", "reasoning"),
        ("upstream", "reasoning"),
        ("endpoint", "a:8000"),
        ("stream", True),
        ("sequences", 2),
        ("position", 3),
        ("read_seconds", 0.0001),
        ("wait_seconds", 2.0001),
        ("connect_seconds", 0.4998),
        ("first_byte_seconds", 0.9998),
        ("answer_seconds", 6.0),
        ("duration_seconds", 10.0001),
        ("request_bytes", 12),
        ("response_bytes", 345),
        ("status", 200),
        ("outcome", COMPLETED),
        ("phase", "done"),
        ("ended_by", "upstream"),
    ] == list(WHOLE.fields().items())


def test_what_did_not_happen_is_left_out() -> None:
    """Of a request that went nowhere there is no model, no time and no status to tell."""
    told = {"request_id": "req_1", "surface": "-", "method": "-", "path": "-", "stream": False}
    told |= {"request_bytes": 0, "response_bytes": 0, "outcome": COMPLETED, "phase": "done", "ended_by": "gateway"}
    assert told == record().fields()


# -- how it is written ----------------------------------------------------------------------------------------------


def entry(fields: dict[str, Any] | None = None, message: str = "request", **changes: Any) -> logging.LogRecord:
    made = logging.LogRecord("aiogw.access", logging.INFO, "x.py", 1, message, (), None)
    made.created = 1_800_000_000.9990234375
    if fields is not None:
        made.fields = fields
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def parsed(line: str) -> dict[str, str]:
    """The members of a text line, read as logfmt: a value is a word, or a JSON string."""
    members = {}
    rest = line.partition(": request")[2]
    while rest:
        found = re.match(r' ([a-z_]+)=("(?:[^"\\]|\\.)*"|[^ "=]+)', rest)
        assert found, rest
        members[found[1]] = json.loads(found[2]) if found[2].startswith('"') else found[2]
        rest = rest[found.end() :]
    return members


WAY = {
    "upstream": "reasoning",
    "granted_at": 102.0,
    "sent_at": 103.0,
    "first_byte_at": 104.0,
    "answered_at": 105.0,
}


@pytest.mark.parametrize(
    ("steps", "phase"),
    [(0, "read"), (1, "queue"), (2, "connect"), (3, "first_byte"), (4, "stream"), (5, "finish")],
)
def test_how_far_it_had_come(steps: int, phase: str) -> None:
    """The step it had not taken yet by its end; one that completed has taken all."""
    changes: dict[str, Any] = dict(list(WAY.items())[:steps])
    assert phase == record(outcome="client_gone", **changes).phase
    assert "done" == record(**changes).phase


@pytest.mark.parametrize(
    ("outcome", "answered_at", "ended_by"),
    [
        (COMPLETED, 105.0, "upstream"),
        (COMPLETED, None, "gateway"),
        ("client_gone", 105.0, "client"),
        ("client_stalled", None, "gateway"),
        ("queue_full", None, "gateway"),
        ("upstream_broken", None, "upstream"),
        ("upstream_error", 105.0, "upstream"),
        ("upstream_auth", 105.0, "upstream"),
        ("upstream_timeout", None, "gateway"),
        ("upstream_unavailable", None, "gateway"),
    ],
)
def test_whose_doing_the_end_was(outcome: str, answered_at: float | None, ended_by: str) -> None:
    """A client that leaves is no refusal, and one that is given up has not left."""
    assert ended_by == record(outcome=outcome, answered_at=answered_at).ended_by


def test_an_answer_that_was_cut_short_lasted_until_the_end() -> None:
    """Without a last byte there is the end of the request."""
    assert 6.0 == record(first_byte_at=104.0, ended_at=110.0).answer_seconds
    assert record(first_byte_at=104.0).answer_seconds is None
    assert record(ended_at=104.0).answer_seconds is None


def test_what_is_known_of_a_failure() -> None:
    """Its code, when to come back, and of an upstream's the gateway's own words."""
    one = record()
    one.fail(UpstreamUnavailable(upstream="u", reason="connection refused", retry_after_seconds=7))
    assert ("upstream_unavailable", "connection refused", 7) == (one.outcome, one.detail, one.retry_after_seconds)


QUEUE = {"slots_in_use": 5, "slots_settling": 1, "cap": 6, "waiting": 8, "queue_limit": 8, "estimated_seconds": 12.3457}


@pytest.mark.parametrize(
    ("error", "figures"),
    [
        (QueueFull, QUEUE),
        (QueuePlacesTaken, QUEUE | {"queue_places": 4}),
        (QueueTimeout, QUEUE),
        (QueueTooSlow, QUEUE | {"queue_timeout_seconds": 10}),
    ],
)
def test_the_figures_of_a_refusal_by_the_queue(error: type[QueueRefusal], figures: dict[str, float]) -> None:
    """What was taken, of how many, who waited, the estimate, and the limit that it was measured by."""
    more = {"queue_places": 4, "waited_seconds": 11.0, "queue_timeout_seconds": 10}
    own = {name: value for name, value in more.items() if name in {one.name for one in attrs.fields(error)}}
    refusal = error(upstream="u", occupancy=OCCUPANCY, estimated_seconds=12.34567, retry_after_seconds=7, **own)
    assert figures == refusal.figures


def test_what_happened_more_than_once() -> None:
    """Going back to the queue and being sent again are told when they happened."""
    told = record(times_sent=2, times_put_back=1).fields()
    assert (2, 1) == (told["sent"], told["put_back"])
    assert not {"sent", "put_back"} & record(times_sent=1).fields().keys()


# -- the schema -----------------------------------------------------------------------------------------------------

SCHEMA = json.loads((Path(__file__).parent.parent / "etc" / "log.schema.json").read_text())
valid = jsonschema.Draft202012Validator(SCHEMA).is_valid


def test_the_schema_is_one_and_says_what_each_member_means() -> None:
    """It is valid itself, and no member comes without a sentence."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert all(one["description"].endswith(".") for one in SCHEMA["properties"].values())


def test_the_schema_knows_every_outcome() -> None:
    """One for each leaf of the error tree, and the three that are no errors."""
    codes = {"completed", "client_gone", "client_stalled", "upstream_auth", *(one.code for one in specimens())}
    assert codes == set(SCHEMA["properties"]["outcome"]["enum"])


def test_the_line_of_a_request_is_as_the_schema_says() -> None:
    """A whole one and a poor one are; one that lacks what each has, or has what none has, is not."""
    head = {"time": "2027-01-15T08:00:00.999Z", "level": "info", "logger": "aiogw.access", "message": "request"}
    whole = head | WHOLE.fields()
    assert valid(whole)
    assert valid(head | record(ended_at=101.0).fields())
    assert not valid(whole | {"prompt": "hello"})
    assert not valid(whole | {"outcome": "other"})
    assert not valid(whole | {"wait_seconds": "2"})
    assert not valid({name: value for name, value in whole.items() if name != "phase"})
    assert valid(head | {"logger": "aiogw.app", "message": "stopped"})
    assert not valid(head | {"logger": "aiogw.app", "outcome": "completed"})


@pytest.mark.parametrize("error", specimens(), ids=lambda error: error.code)
def test_the_line_of_a_refusal_has_the_figures_it_rests_on(error: GatewayError) -> None:
    """Whoever asks later why it was refused is told the limit it ran into, by its name, and what there was of it."""
    one = record(ended_at=101.0)
    one.fail(error)
    told = one.fields()
    assert {} == {name: value for name, value in error.figures.items() if told[name] != value}
    head = {"time": "2027-01-15T08:00:00.999Z", "level": "info", "logger": "aiogw.access", "message": "request"}
    assert valid(head | told)


def test_what_an_answer_says_of_the_queue() -> None:
    """The place at entry and the time waited, as far as each is known."""
    waiting = RequestRecord(request_id="r", arrived_at=0.0, entered_at=1.0, position=4)
    assert [("x-aiogw-queue-position", "4")] == waiting.queue_headers()
    waiting.refused_at = 2.5
    assert [("x-aiogw-queue-position", "4"), ("x-aiogw-queue-seconds", "1.500")] == waiting.queue_headers()
    assert [] == RequestRecord(request_id="r", arrived_at=0.0).queue_headers()


def test_a_line_of_text() -> None:
    """Time in UTC to the millisecond, level, logger, message, and the members as words."""
    line = TextFormatter().format(entry(WHOLE.fields()))
    assert line.startswith("2027-01-15T08:00:00.999Z info aiogw.access: request request_id=req_1 surface=openai ")
    assert line.endswith(" status=200 outcome=completed phase=done ended_by=upstream")
    assert " stream=true " in line
    assert " wait_seconds=2.0001 " in line


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain/path?x&y", "plain/path?x&y"),
        ("two words", '"two words"'),
        ('quo"te', '"quo\\"te"'),
        ("a=b", '"a=b"'),
        ("", '""'),
        ("für", '"f\\u00fcr"'),
        ("a\nb\x1b", '"a\\nb\\u001b"'),
        (0.00005, "0.0001"),
        (0.0, "0.0000"),
        (12345678.5, "12345678.5000"),
        (False, "false"),
        (7, "7"),
    ],
)
def test_a_value_in_a_line_of_text(value: Any, shown: str) -> None:
    """One word where that is possible, else a JSON string; numbers in plain digits."""
    assert TextFormatter().format(entry({"path": value})).endswith(f": request path={shown}")


@given(st.dictionaries(st.sampled_from(["path", "model", "surface"]), st.text()))
def test_a_line_of_text_can_be_read_back(fields: dict[str, str]) -> None:
    """Whatever a client said, it is one line, and gives the members back."""
    line = TextFormatter().format(entry(fields))
    assert 1 == len(line.splitlines())
    assert line.isascii()
    assert fields == parsed(line)


def test_a_line_of_json() -> None:
    """One object, with the same members as the text."""
    told = json.loads(JsonFormatter().format(entry(WHOLE.fields())))
    head = {"time": "2027-01-15T08:00:00.999Z", "level": "info", "logger": "aiogw.access", "message": "request"}
    assert head | WHOLE.fields() == told
    assert not set(head) & set(WHOLE.fields())


@given(st.dictionaries(st.sampled_from(["path", "model"]), st.text()), st.text())
def test_a_line_of_json_is_one_line(fields: dict[str, str], message: str) -> None:
    """Also with line ends, half characters and percent signs in what is told."""
    line = JsonFormatter().format(entry(fields, message))
    assert 1 == len(line.splitlines())
    told = json.loads(line)
    assert message == told.pop("message")
    assert fields == {name: value for name, value in told.items() if name in fields}


def test_a_line_without_members() -> None:
    """Other log lines have only their message, with its arguments filled in."""
    assert TextFormatter().format(entry(None, "drain %s", args=("now",))).endswith("info aiogw.access: drain now")
    assert "drain now" == json.loads(JsonFormatter().format(entry(None, "drain %s", args=("now",))))["message"]


def test_an_exception_is_told() -> None:
    """The text form has the traceback below the line, the JSON form in a member of the one line."""
    try:
        raise RuntimeError("a bug")
    except RuntimeError:
        caught = sys.exc_info()
    text = TextFormatter().format(entry({"status": 500}, exc_info=caught))
    assert "request status=500" == text.splitlines()[0].partition("access: ")[2]
    assert "RuntimeError: a bug" == text.splitlines()[-1]
    line = JsonFormatter().format(entry({"status": 500}, exc_info=caught))
    assert 1 == len(line.splitlines())
    assert json.loads(line)["exception"].startswith("Traceback (most recent call last):\n")
    assert json.loads(line)["exception"].endswith("RuntimeError: a bug")


def test_what_json_has_no_form_for() -> None:
    """A member of another type does not cost the line."""
    assert "1j" == json.loads(JsonFormatter().format(entry({"path": 1j})))["path"]
    assert None is json.loads(JsonFormatter().format(entry({"path": math.nan})))["path"]


# -- where it goes --------------------------------------------------------------------------------------------------


def test_a_request_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line for each request, at level info."""
    with caplog.at_level(logging.INFO, logger="aiogw.access"):
        tell(WHOLE)
    (line,) = caplog.records
    assert (logging.INFO, "request", WHOLE.fields()) == (line.levelno, line.getMessage(), line.fields)  # type: ignore[attr-defined]


def test_a_request_costs_nothing_where_it_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """Above info there are no lines of requests."""
    with caplog.at_level(logging.WARNING, logger="aiogw.access"):
        tell(WHOLE)
    assert [] == caplog.records


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, which is afterwards what it was before."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("format_", "formatter"), [("text", TextFormatter), ("json", JsonFormatter)], ids=["text", "json"]
)
def test_the_log_goes_to_standard_error(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], format_: str, formatter: type[logging.Formatter]
) -> None:
    """One handler, however often it is configured; nothing on standard output."""
    for _ in range(2):
        configure_logging(level="info", format_=format_)
    (handler,) = root.handlers
    assert type(handler.formatter) is formatter
    access_log.debug("not shown")
    tell(WHOLE)
    out, err = capsys.readouterr()
    assert ("", 1) == (out, len(err.splitlines()))
    assert "req_1" in err


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_auto_is_text_on_a_terminal_and_json_elsewhere(terminal: bool) -> None:
    """By what standard error is, and not standard output."""
    script = (
        "import logging; from aiogw.record import configure_logging; "
        "configure_logging(level='info', format_='auto'); logging.warning('told')"
    )
    ours, theirs = os.openpty() if terminal else os.pipe()
    try:
        subprocess.run([sys.executable, "-c", script], stderr=theirs, stdout=subprocess.PIPE, timeout=60, check=True)
        line = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "told" in line
    assert line.startswith("{") is not terminal


def test_the_level_is_the_configured_one(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """At level error a warning is not written, and an error is."""
    configure_logging(level="error", format_="text")
    logging.getLogger("aiogw.upstream").warning("less")
    logging.getLogger("aiogw.upstream").error("more")
    assert ["more"] == [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()]
