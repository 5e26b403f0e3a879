"""The status document: what it says of one moment, and how one moment becomes the next."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiogw.admission.estimate import ENOUGH
from aiogw.admission.readings import EndpointStatistics, GateStatistics
from aiogw.enginewatch import EngineReading
from aiogw.record import CLIENT_GONE, FINISH, FIRST_BYTE, QUEUE, STREAM, Progress, RequestRecord
from aiogw.status import figures, words
from aiogw.status.history import ENDINGS, MOST_WAITS, SAMPLES, WAITS_SECONDS, History, Waits
from aiogw.status.snapshot import Readings, difference, document, merge, newcomer_wait_seconds, with_ages


def gate(**changes: Any) -> GateStatistics:
    told: dict[str, Any] = {
        "cap": 2,
        "configured_cap": changes.get("cap", 2),
        "slots_in_use": 2,
        "slots_settling": 0,
        "queue_limit": 4,
        "waiting": 0,
        "queue_timeout_seconds": 300.0,
        "refuses": None,
        "ends": 9,
        "oldest_wait_seconds": 0.0,
        "grants_total": 9,
        "refusals_total": {},
        "endpoints": {"a:80": EndpointStatistics(left_out=False, slots=3, slots_in_use=2)},
    }
    return GateStatistics(**told | changes)


UNLIMITED = gate(cap=None, queue_limit=0, slots_in_use=1, queue_timeout_seconds=None)


def endpoints(**changes: Any) -> dict[str, EndpointStatistics]:
    told: dict[str, Any] = {"left_out": False, "slots": 3, "slots_in_use": 0}
    return {"a:80": EndpointStatistics(**told | changes)}


def fully_told(**changes: Any) -> dict[str, Any]:
    """The document, with ages, of one upstream."""
    place_seconds = {"gpu": changes.pop("place_seconds", 4.0)}
    own = {name: changes.pop(name) for name in ("draining", "now", "leaving", "reload_successful") if name in changes}
    return with_ages(document(readings(gates={"gpu": gate(**changes)}, place_seconds=place_seconds, **own)))


def record(request_id: str, **changes: Any) -> RequestRecord:
    told: dict[str, Any] = {"arrived_at": 90.0, "surface": "openai", "model": "m", "upstream": "gpu"}
    return RequestRecord(request_id=request_id, **told | changes)


def progress(number: int, phase: str, one: RequestRecord, **changes: Any) -> Progress:
    told: dict[str, Any] = {"upstream": "gpu", "response_bytes": 0, "last_byte_at": None, "deadline_at": None}
    return Progress(number=number, phase=phase, record=one, **told | changes)


def readings(**changes: Any) -> Readings:
    told: dict[str, Any] = {
        "now": 100.0,
        "unix_offset": 1000.0,
        "version": "1",
        "started_at": 40.0,
        "draining": False,
        "reload_successful": True,
        "leaving": (),
        "gates": {"gpu": gate()},
        "place_seconds": {"gpu": 4.0},
        "engines": {},
        "waits": {},
        "samples": {},
        "progress": (),
        "endings": (),
    }
    return Readings(**told | changes)


# -- one moment -----------------------------------------------------------------------------------------------------


def test_a_document_of_a_busy_upstream() -> None:
    """Who runs, who waits in which place and for how long still, and what a newcomer would meet."""
    told = document(
        readings(
            gates={"gpu": gate(waiting=2), "embeddings": UNLIMITED},
            place_seconds={"gpu": 4.0, "embeddings": 0.0},
            engines={"gpu": EngineReading(running_requests=2, waiting_requests=1, drift_requests=1)},
            samples={"gpu": {"7": (2, 1, 0.5)}},
            # Given in no order.
            progress=[
                progress(4, QUEUE, record("d", entered_at=97.0)),
                progress(3, QUEUE, record("c", entered_at=96.0)),
                progress(
                    1, STREAM, record("a", entered_at=91.0, granted_at=92.0), response_bytes=77, last_byte_at=99.5
                ),
                progress(2, FIRST_BYTE, record("b", entered_at=91.0, granted_at=95.0, sequences=2)),
                progress(5, FINISH, record("e", entered_at=91.0, granted_at=92.0), last_byte_at=93.0),
            ],
        )
    )
    assert (1100.0, 1040.0, "1", False) == tuple(told[name] for name in ("time", "started_at", "version", "draining"))
    assert {
        "slots_in_use": 2,
        "slots_settling": 0,
        "waiting": 2,
        "waiting_since": 1096.0,
        "cap": 2,
        "queue_limit": 4,
        "queue_timeout_seconds": 300.0,
        "configured_cap": 2,
        "rank": 0,
        "next_needs_slots": 1,
        "estimates_measured": True,
        "newcomer": "waits",
        "newcomer_wait_seconds": 12.0,
        "endpoints": {"a:80": {"up": True, "slots": 3, "slots_in_use": 2}},
        "engine": {"running_requests": 2, "waiting_requests": 1, "drift_requests": 1},
        "history": {"7": (2, 1, 0.5)},
    } == told["upstreams"]["gpu"]
    assert "cap" not in told["upstreams"]["embeddings"]
    assert "newcomer_wait_seconds" not in told["upstreams"]["embeddings"]
    assert ["1", "2", "3", "4", "5"] == list(told["requests"])
    assert {
        "id": "a",
        "surface": "openai",
        "model": "m",
        "upstream": "gpu",
        "phase": "stream",
        "sequences": 1,
        "stream": False,
        "bytes": 77,
        "arrived_at": 1090.0,
        "entered_at": 1091.0,
        "granted_at": 1092.0,
        "last_byte_at": 1099.5,
    } == told["requests"]["1"]
    assert 2 == told["requests"]["2"]["sequences"]
    assert [(1, 4.0), (2, 8.0)] == [
        (told["requests"][number]["position"], told["requests"][number]["estimated_seconds"]) for number in "34"
    ]
    assert 0 == told["requests"]["5"]["sequences"]


def test_ages_are_added_for_people() -> None:
    """What scripts ask for is there, too: ages instead of moments."""
    told = with_ages(
        document(
            readings(
                gates={"gpu": gate(waiting=1)},
                progress=[
                    progress(1, STREAM, record("a", entered_at=91.0, granted_at=92.0), last_byte_at=99.5),
                    progress(2, QUEUE, record("b", entered_at=96.0)),
                ],
            )
        )
    )
    assert 4.0 == told["upstreams"]["gpu"]["oldest_wait_seconds"]
    assert (10.0, 0.5) == (told["requests"]["1"]["age_seconds"], told["requests"]["1"]["silent_seconds"])
    assert "silent_seconds" not in told["requests"]["2"]


def test_a_long_line_is_counted_and_not_told() -> None:
    """Whoever draws gets the head of the line; the others are a number, and keep their places in the whole document."""
    line = [progress(number, QUEUE, record(f"r{number}", entered_at=95.0)) for number in range(1, 11)]
    told = readings(gates={"gpu": gate(waiting=10)}, progress=line)
    assert ["1", "2", "3"] == list(document(told, most_in_line=3)["requests"])
    assert 10 == document(told)["requests"]["10"]["position"]
    assert 10 == document(told, most_in_line=3)["upstreams"]["gpu"]["waiting"]


def test_nothing_says_null() -> None:
    """What there is not is left out, because null means that something has gone."""

    def check(one: Any) -> None:
        assert one is not None
        for value in one.values() if isinstance(one, dict) else ():
            check(value)

    history = History()
    history.observe(record("x", outcome="model_not_found", upstream=None, model=None, ended_at=99.0))
    nameless = progress(1, QUEUE, record("a", model=None, entered_at=99.0))
    check(document(readings(gates={"gpu": gate(waiting=1)}, progress=[nameless], endings=history.endings)))


@pytest.mark.parametrize(
    ("one", "place_seconds", "expected"),
    [
        (gate(slots_in_use=1), 4.0, 0.0),
        (gate(slots_in_use=1, waiting=1), 4.0, 8.0),
        (gate(slots_in_use=1, slots_settling=1), 4.0, 4.0),
        (gate(waiting=3), 4.0, 16.0),
        (gate(slots_in_use=0, cap=0), 0.0, None),
        (UNLIMITED, 4.0, 0.0),
    ],
    ids=["free", "free, but somebody waits for two", "settling", "queue", "no endpoint", "unlimited"],
)
def test_what_a_newcomer_waits(one: GateStatistics, place_seconds: float, expected: float | None) -> None:
    """Nothing where there is a slot and nobody before it; unknown where nothing runs."""
    assert expected == newcomer_wait_seconds(one, place_seconds)


# -- from one moment to the next ------------------------------------------------------------------------------------

documents = st.recursive(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3) | st.lists(st.integers(0, 1), max_size=2)),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner | st.integers(0, 3)),
)


@given(documents, documents)
def test_a_change_makes_the_new_of_the_old(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Whatever changed; and nothing is told where nothing did."""
    before = repr(old)
    patch = difference(old, new)
    assert new == merge(old, patch)
    assert before == repr(old)
    assert (not patch) == (old == new)


def test_time_alone_changes_nothing() -> None:
    """A second later, with nothing done, there is nothing to send but the time."""
    line = [progress(1, QUEUE, record("a", entered_at=95.0))]
    old, new = (document(readings(now=now, gates={"gpu": gate(waiting=1)}, progress=line)) for now in (100.0, 101.0))
    assert {"time": 1101.0} == difference(old, new)


# -- what is remembered ---------------------------------------------------------------------------------------------


def test_the_last_endings_are_remembered() -> None:
    """So many, with ever growing numbers; a list of models that was answered here is none."""
    history = History()
    history.observe(record("models", upstream=None, ended_at=1.0))
    assert () == history.endings
    for number in range(1, ENDINGS + 11):
        history.observe(record(f"r{number}", ended_at=1.0))
    assert [11, ENDINGS + 10] == [history.endings[0].number, history.endings[-1].number]
    history.observe(record("lost", upstream=None, outcome="not_found", ended_at=1.0))
    assert "lost" == history.endings[-1].record.request_id


def test_an_ending_says_how() -> None:
    """Its outcome, where the client was by then, and its times."""
    history = History()
    history.observe(
        record("a", entered_at=91.0, granted_at=93.0, ended_at=99.0, outcome=CLIENT_GONE, response_bytes=5, status=200)
    )
    assert {
        "id": "a",
        "surface": "openai",
        "model": "m",
        "upstream": "gpu",
        "outcome": "client_gone",
        "phase": "connect",
        "ended_by": "client",
        "status": 200,
        "ended_at": 1099.0,
        "wait_seconds": 2.0,
        "duration_seconds": 9.0,
        "bytes": 5,
    } == document(readings(endings=history.endings))["endings"]["1"]


def test_waits_are_those_of_five_minutes() -> None:
    """By nearest rank, those that still run included, older ones not, and of none nothing is told."""
    history = History()
    assert {} == history.waits(1000.0, ())
    for wait in range(1, 101):
        history.observe(record("old", entered_at=500.0, granted_at=500.0 + 50, ended_at=990.0))
        history.observe(record("r", entered_at=900.0, granted_at=900.0 + wait / 10, ended_at=990.0))
    (waits,) = history.waits(1000.0, ()).values()
    assert (5.1, 9.6, 0) == (round(waits.p50_seconds or 0, 3), round(waits.p95_seconds or 0, 3), waits.in_vain)
    running = [progress(1, STREAM, record("s", entered_at=900.0, granted_at=960.0))] * 100
    assert 60.0 == history.waits(1000.0, running)["gpu"].p95_seconds
    assert {} == history.waits(900.0 + 10 + WAITS_SECONDS + 1, ())


def test_a_flood_of_refusals_hides_no_wait() -> None:
    """However many are turned away, what those waited who were served is still told."""
    history = History()
    history.observe(record("g", entered_at=900.0, granted_at=902.0, ended_at=950.0))
    for _ in range(MOST_WAITS + 1):
        history.observe(record("f", ended_at=960.0, outcome="queue_full"))
    waits = history.waits(1000.0, ())["gpu"]
    assert (2.0, MOST_WAITS) == (waits.p50_seconds, waits.refused)


def test_waits_in_vain_are_counted_apart() -> None:
    """Who timed out or left waited for nothing: that is no wait for a slot, and it is told beside those."""
    history = History()
    none: dict[str, Any] = {"p50_seconds": None, "p95_seconds": None, "max_seconds": None}
    for number, outcome in enumerate(("queue_timeout", CLIENT_GONE, "queue_timeout", "draining")):
        history.observe(
            record(f"v{number}", entered_at=900.0, refused_at=960.0, ended_at=960.0, outcome=outcome),
        )
    assert Waits(**none, in_vain=3, refused=0) == history.waits(1000.0, ())["gpu"]
    for outcome in ("queue_full", "queue_too_slow", "model_not_found"):
        history.observe(record("f", ended_at=960.0, outcome=outcome))
    assert Waits(**none, in_vain=3, refused=2) == history.waits(1000.0, ())["gpu"]
    assert "3 gave up or timed out; 2 refused by the queue" == figures.waits_text(
        document(readings(waits=history.waits(1000.0, ())))["upstreams"]["gpu"]
    )
    history = History()
    for _ in range(3):
        history.observe(record("v", entered_at=900.0, refused_at=960.0, ended_at=960.0, outcome="queue_timeout"))
    history.observe(record("g", entered_at=900.0, granted_at=902.0, ended_at=990.0))
    waits = history.waits(1000.0, ())
    assert Waits(p50_seconds=2.0, p95_seconds=2.0, max_seconds=2.0, in_vain=3, refused=0) == waits["gpu"]
    told = document(readings(waits=waits))["upstreams"]["gpu"]
    assert "half waited ≤ 2.0 s, 95% ≤ 2.0 s; 3 gave up or timed out" == figures.waits_text(told)
    assert "95% got a slot at once; 3 gave up or timed out" == figures.waits_text(
        told | {"wait_p50_seconds": 0.0, "wait_p95_seconds": 0.04}
    )
    all_at_once = {"wait_p50_seconds": 0.0, "wait_p95_seconds": 0.0, "wait_max_seconds": 0.04}
    assert "all others got a slot at once; 3 gave up or timed out" == figures.waits_text(told | all_at_once)
    del told["waits_in_vain"]
    assert "all got a slot at once" == figures.waits_text(told | all_at_once)
    told["waits_in_vain"] = 3
    assert "half got a slot at once, 95% waited ≤ 2.0 s; 3 gave up or timed out" == figures.waits_text(
        told | {"wait_p50_seconds": 0.0}
    )


def test_what_is_remembered_is_bounded() -> None:
    """However many requests there are, and however long it runs."""
    history = History()
    for _ in range(MOST_WAITS + 100):
        history.observe(record("r", entered_at=1.0, granted_at=1.0, ended_at=1.0))
    for _ in range(SAMPLES + 100):
        history.sample({"gpu": gate(slots_settling=1)})
    assert MOST_WAITS == len(history._waits["gpu"])
    assert SAMPLES == len(history.samples["gpu"])
    assert (3, 0, 0.0) == history.samples["gpu"][str(SAMPLES + 100)]
    history.sample({"other": gate()})
    assert {"other"} == set(history.samples)


# -- for people and scripts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "expected", "short"),
    [
        (-0.1, "0.0 s", "0s"),
        (0.44, "0.4 s", "0s"),
        (9.94, "9.9 s", "9s"),
        (9.96, "10 s", "9s"),
        (59.4, "59 s", "59s"),
        (59.6, "1:00 min", "59s"),
        (125, "2:05 min", "2m"),
        (11222, "3:07 h", "3h"),
    ],
)
def test_seconds_in_words(seconds: float, expected: str, short: str) -> None:
    """Never more digits than matter."""
    assert (expected, short) == (figures.seconds(seconds), figures.short_seconds(seconds))


@pytest.mark.parametrize(
    ("size", "expected"), [(0, "0 B"), (999, "999 B"), (4249, "4.2 kB"), (13_400_000, "13 MB"), (2 * 10**9, "2.0 GB")]
)
def test_sizes_in_words(size: int, expected: str) -> None:
    """In powers of a thousand."""
    assert expected == figures.size(size)


@pytest.mark.parametrize(
    ("one", "well", "says"),
    [
        ({"slots_in_use": 1}, True, "a newcomer runs at once"),
        ({"waiting": 3}, True, "a newcomer waits ≈ 16 s"),
        ({"waiting": 3, "ends": 0}, True, "a newcomer waits; last 5 min: nothing has ended yet"),
        ({"waiting": 3, "ends": ENOUGH - 1}, True, "a newcomer waits perhaps 16 s; last 5 min: no requests"),
        ({"waiting": 3, "place_seconds": 90.0}, True, "a newcomer waits 5:00 min in vain"),
        ({"waiting": 3, "place_seconds": 90.0, "ends": ENOUGH - 1}, True, "a newcomer waits perhaps 6:00 min"),
        ({"waiting": 4, "refuses": "queue_full"}, False, "a newcomer is refused: queue full"),
        ({"waiting": 3, "refuses": "queue_too_slow"}, False, "a newcomer is refused: would wait too long"),
        ({"slots_in_use": 1, "draining": True}, False, "a newcomer is served on open connections"),
        ({"slots_in_use": 1, "draining": True, "refuses": "draining"}, False, "a newcomer is refused: shutting down"),
        ({"leaving": ["gpu"]}, True, "gpu: leaves: no longer in the configuration; 2 of 2 slots in use; "),
        ({"leaving": ["gpu"]}, True, "a newcomer is not taken; "),
        (
            {"reload_successful": False},
            True,
            "\n▲ the last reload failed, its configuration is not taken; the log says",
        ),
        ({"cap": 2, "configured_cap": 5}, True, "2 of 2 slots in use (5 with all endpoints); "),
        (
            {"cap": 4, "configured_cap": 5, "slots_settling": 1},
            True,
            "3 of 4 slots in use (5 with all endpoints), 1 settling",
        ),
        (
            {"endpoints": endpoints(left_out=True), "refuses": "upstream_unavailable"},
            False,
            "a newcomer is refused: no endpoint answers; last 5 min: no requests; a:80 left out, 0 of 3",
        ),
        ({"slots_in_use": 0, "endpoints": endpoints(unreached_since=70.0)}, False, "probably fails: not reached"),
        ({"cap": None, "slots_in_use": 1}, True, "gpu: 1 slots in use\n"),
        ({"cap": None, "endpoints": endpoints(unreached_since=70.0)}, False, "a:80 not reached since "),
    ],
)
def test_whether_all_is_well(one: dict[str, Any], well: bool, says: str) -> None:
    """A request that comes now is served or waits; and the summary says why not."""
    told = fully_told(**one)
    assert well == words.is_well(told)
    assert says in words.summary(told)


def test_an_address_that_is_not_reached() -> None:
    """It says since when; one that is left out as well says both, and one that is fine neither."""
    at = fully_told(endpoints=endpoints(unreached_since=70.0))["upstreams"]["gpu"]["endpoints"]["a:80"]
    expected = {"up": False, "unreached_since": 1070.0, "unreached_seconds": 30.0, "slots": 3, "slots_in_use": 0}
    assert expected == at
    assert "not reached since 00:17:50, 0 of 3" == figures.endpoint_text(at, 1100.0, UTC)
    assert "not reached since 01 Jan 00:17, 0 of 3" == figures.endpoint_text(at, 99000.0, UTC)
    both = endpoints(unreached_since=70.0, left_out=True)
    at = fully_told(endpoints=both)["upstreams"]["gpu"]["endpoints"]["a:80"]
    assert "left out, not reached since 00:17:50, 0 of 3" == figures.endpoint_text(at, 1100.0, UTC)
    del at["slots"]
    assert "left out, not reached since 00:17:50, 0 in use" == figures.endpoint_text(at, 1100.0, UTC)
    at = fully_told(endpoints=endpoints())["upstreams"]["gpu"]["endpoints"]["a:80"]
    assert {"up": True, "slots": 3, "slots_in_use": 0} == at


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ["≈ 4.0 s", "≈ 8.0 s", "times out in 10 s"]),
        ({"now": 106.0}, ["≈ 4.0 s", "times out in 4.0 s", "times out in 4.0 s"]),
        ({"ends": 1}, ["perhaps 4.0 s", "perhaps 8.0 s", "perhaps 12 s"]),
        ({"ends": 0}, ["-", "-", "-"]),
    ],
    ids=["now", "later", "not enough measured", "nothing has ended"],
)
def test_an_estimate_and_a_deadline(changes: dict[str, Any], says: list[str]) -> None:
    """Who would wait longer than it may is told when it times out; a guess is no reason to say so."""
    now = changes.pop("now", 100.0)
    line = [progress(number, QUEUE, record(f"r{number}", entered_at=80.0), deadline_at=110.0) for number in (1, 2, 3)]
    told = document(readings(now=now, gates={"gpu": gate(waiting=3, **changes)}, progress=line))
    rows = told["requests"].values()
    assert [1110.0] * 3 == [row["deadline_at"] for row in rows]
    assert says == [figures.estimate_text(told["upstreams"]["gpu"], row, told["time"]) for row in rows]


@pytest.mark.parametrize(
    ("changes", "sequences", "says"),
    [
        ({"cap": 6, "slots_in_use": 3, "slots_settling": 1}, 3, "needs 3 slots, 2 are free"),
        ({"cap": 6, "slots_in_use": 5}, 2, "needs 2 slots, 1 is free"),
        ({"cap": 6, "slots_in_use": 3}, 3, "needs 3 slots at one endpoint, 3 are free"),
        ({"cap": 6, "slots_in_use": 6}, 3, ""),
        ({"cap": 6, "slots_in_use": 5}, 1, ""),
    ],
)
def test_what_holds_the_queue_is_told(changes: dict[str, Any], sequences: int, says: str) -> None:
    """A head that wants more than there is, while slots are free; and each row of more than one slot says so."""
    line = [
        progress(1, QUEUE, record("head", entered_at=95.0, sequences=sequences)),
        progress(2, QUEUE, record("next", entered_at=96.0)),
    ]
    told = with_ages(document(readings(gates={"gpu": gate(waiting=2, **changes)}, progress=line)))
    assert says == figures.next_text(told["upstreams"]["gpu"])
    assert (f"; the next in line {says}; a newcomer" in words.summary(told)) == bool(says)
    assert [f" ×{sequences}" * (sequences > 1), ""] == [figures.times_text(row) for row in told["requests"].values()]


def test_how_long_one_may_wait_is_told() -> None:
    """Beside the queue, where it is nobody's secret."""
    assert "0 of 4 waiting, at most 5:00 min each" in words.summary(fully_told())


def test_nothing_a_client_chose_reaches_a_terminal() -> None:
    """Escape sequences and line ends come out as what they are: no letters."""
    assert "a�[2Jb��" == figures.plain("a\x1b[2Jb\r\n")
