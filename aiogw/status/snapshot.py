"""The status document: one moment of the gateway as JSON, and the changes from one moment to the next; pure.

A document has no null: what there is not is left out.  So a change is a JSON merge patch (RFC 7396), whose null means
that something has gone.  Moments are seconds of the Unix clock, so that only what happens changes a document, and not
the time that passes; ``with_ages`` adds what people ask for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from attrs import frozen

from aiogw.admission.readings import GateStatistics
from aiogw.enginewatch import EngineReading
from aiogw.errors import Draining
from aiogw.record import FINISH, QUEUE, Progress, RequestRecord
from aiogw.status.history import Ending, Waits

Document = dict[str, Any]

# What a newcomer meets, if it is no refusal; the second would be sent to where the last attempt to connect has failed.
RUNS, UNREACHED, WAITS = "runs", "unreached", "waits"
# Nobody is sent there any more; and only who has a connection already is served as ever.
LEAVING, CLOSING = "leaving", "closing"


@frozen(kw_only=True)
class Readings:
    """All that is true at the moment ``now`` of the monotonic clock; ``unix_offset`` makes a Unix time of it.

    The offset stays the same from one document to the next, or every moment would change with it.  ``samples`` are
    occupancy, queue length and oldest wait, by their number.  ``leaving`` are upstreams that are no longer configured.
    """

    now: float
    unix_offset: float
    version: str
    started_at: float
    draining: bool
    reload_successful: bool
    leaving: Collection[str]
    gates: Mapping[str, GateStatistics]
    place_seconds: Mapping[str, float]
    engines: Mapping[str, EngineReading]
    waits: Mapping[str, Waits]
    samples: Mapping[str, Mapping[str, tuple[int, int, float]]]
    progress: Iterable[Progress]
    endings: Iterable[Ending]

    def unix_time(self, moment: float) -> float:
        return round(moment + self.unix_offset, 3)


def document(readings: Readings, *, most_in_line: int | None = None) -> Document:
    """The document; of each queue at most the first ``most_in_line`` requests, while all are counted."""
    upstreams = {
        name: {"rank": rank} | _upstream(name, gate, readings)
        for rank, (name, gate) in enumerate(readings.gates.items())
    }
    requests = _requests(readings, most_in_line)
    for row in reversed(requests.values()):
        if row["phase"] == QUEUE and row["upstream"] in upstreams:
            upstreams[row["upstream"]] |= {"waiting_since": row["entered_at"], "next_needs_slots": row["sequences"]}
    return {
        "time": readings.unix_time(readings.now),
        "version": readings.version,
        "started_at": readings.unix_time(readings.started_at),
        "draining": readings.draining,
        "reload_successful": readings.reload_successful,
        "upstreams": upstreams,
        "requests": requests,
        "endings": {str(ending.number): _ending(ending, readings) for ending in readings.endings},
    }


def _upstream(name: str, gate: GateStatistics, readings: Readings) -> Document:
    told: Document = {
        "slots_in_use": gate.slots_in_use,
        "slots_settling": gate.slots_settling,
        "waiting": gate.waiting,
        "endpoints": {
            address: _without_none(
                up=one.up,
                left_out=one.left_out or None,
                unreached_since=None if one.unreached_since is None else readings.unix_time(one.unreached_since),
                slots=one.slots,
                slots_in_use=one.slots_in_use,
            )
            for address, one in gate.endpoints.items()
        },
        "history": dict(readings.samples.get(name, {})),
    }
    leaving = name in readings.leaving
    if leaving:
        told["leaving"] = True
    if gate.cap is not None:
        told |= {
            "cap": gate.cap,
            "configured_cap": gate.configured_cap,
            "queue_limit": gate.queue_limit,
            "queue_timeout_seconds": gate.queue_timeout_seconds,
            "estimates_measured": gate.estimates_measured,
            "newcomer": newcomer(gate, draining=readings.draining, leaving=leaving),
        }
        wait_seconds = newcomer_wait_seconds(gate, readings.place_seconds[name])
        if wait_seconds is not None:
            told["newcomer_wait_seconds"] = _coarse(wait_seconds)
    if (waits := readings.waits.get(name)) is not None:
        told |= _without_none(
            wait_p50_seconds=_rounded(waits.p50_seconds),
            wait_p95_seconds=_rounded(waits.p95_seconds),
            wait_max_seconds=_rounded(waits.max_seconds),
            waits_in_vain=waits.in_vain or None,
            refused_by_queue=waits.refused or None,
        )
    if (engine := readings.engines.get(name)) is not None:
        told["engine"] = {
            "running_requests": engine.running_requests,
            "waiting_requests": engine.waiting_requests,
            "drift_requests": engine.drift_requests,
        }
    return told


def newcomer(gate: GateStatistics, *, draining: bool, leaving: bool) -> str:
    """What a request of one sequence that came now would meet: the code of an error, or one of the words above."""
    if leaving and gate.refuses != Draining.code:
        return LEAVING
    if draining and gate.refuses is None:
        return CLOSING
    if gate.refuses is not None:
        return gate.refuses
    if not any(one.up for one in gate.endpoints.values()):
        return UNREACHED
    return WAITS if gate.makes_newcomers_wait else RUNS


def newcomer_wait_seconds(gate: GateStatistics, place_seconds: float) -> float | None:
    """What a request that came now would wait, if the queue takes it; None: nothing has ended from which to tell."""
    if not gate.makes_newcomers_wait:
        return 0.0
    if not gate.ends:
        return None
    return place_seconds * (gate.waiting + 1) or None


def _requests(readings: Readings, most_in_line: int | None) -> Document:
    told: Document = {}
    in_line: dict[str, int] = defaultdict(int)
    for one in sorted(readings.progress, key=lambda one: one.number):
        row = _row(one, readings)
        if one.phase == QUEUE:
            in_line[one.upstream] += 1
            position = in_line[one.upstream]
            if most_in_line is not None and position > most_in_line:
                continue
            row["position"] = position
            place_seconds = readings.place_seconds.get(one.upstream, 0.0)
            gate = readings.gates.get(one.upstream)
            if place_seconds and gate is not None and gate.ends:
                row["estimated_seconds"] = _coarse(place_seconds * position)
            if one.deadline_at is not None and one.deadline_at != math.inf:
                row["deadline_at"] = readings.unix_time(one.deadline_at)
        told[str(one.number)] = row
    return told


def _row(one: Progress, readings: Readings) -> Document:
    record = one.record
    row = _origin(record) | {
        "upstream": one.upstream,
        "phase": one.phase,
        "sequences": record.sequences if one.phase != FINISH else 0,
        "stream": record.stream,
        "bytes": one.response_bytes,
    }
    moments = {
        "arrived_at": record.arrived_at,
        "entered_at": record.entered_at,
        "granted_at": record.granted_at,
        "last_byte_at": one.last_byte_at,
    }
    for name, moment in moments.items():
        if moment is not None:
            row[name] = readings.unix_time(moment)
    return row


def _ending(ending: Ending, readings: Readings) -> Document:
    record = ending.record
    assert record.ended_at is not None
    return _origin(record) | _without_none(
        upstream=record.upstream,
        outcome=record.outcome,
        status=record.status,
        phase=record.phase,
        ended_by=record.ended_by,
        ended_at=readings.unix_time(record.ended_at),
        wait_seconds=_rounded(record.wait_seconds),
        first_byte_seconds=_rounded(record.first_byte_seconds),
        duration_seconds=_rounded(record.duration_seconds),
        bytes=record.response_bytes,
    )


def _origin(record: RequestRecord) -> Document:
    """Whose it is and what it asks for."""
    return _without_none(
        id=record.request_id,
        key=record.key,
        surface=record.surface,
        model=record.model,
    )


def with_ages(told: Document) -> Document:
    """A copy in which each moment also is a time that has passed since, as of the document's ``time``."""
    now: float = told["time"]

    def since(moment: float) -> float:
        return max(0.0, round(now - moment, 3))

    def with_age(one: Document, name: str, moment: str) -> Document:
        return one | {name: since(one[moment])} if moment in one else one

    upstreams = {}
    for name, one in told["upstreams"].items():
        upstreams[name] = with_age(one, "oldest_wait_seconds", "waiting_since") | {
            "endpoints": {
                address: with_age(at, "unreached_seconds", "unreached_since")
                for address, at in one["endpoints"].items()
            }
        }
    requests = {}
    for number, row in told["requests"].items():
        requests[number] = with_age(with_age(row, "age_seconds", "arrived_at"), "silent_seconds", "last_byte_at")
    return told | {"upstreams": upstreams, "requests": requests}


def difference(old: Document, new: Document) -> Document:
    """The merge patch that makes ``new`` of ``old``."""
    patch: Document = {}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := difference(before, value):
                patch[name] = inner
        elif value != before:
            patch[name] = value
    for name in old.keys() - new.keys():
        patch[name] = None
    return patch


def merge(old: Document, patch: Document) -> Document:
    """``old`` after ``patch``; neither of them changes."""
    merged = dict(old)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            before = merged.get(name)
            merged[name] = merge(before if isinstance(before, dict) else {}, value)
        else:
            merged[name] = value
    return merged


def _without_none(**members: Any) -> Document:
    return {name: value for name, value in members.items() if value is not None}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _coarse(seconds: float) -> float:
    """An estimate, no finer than anybody should take it; only what is nothing becomes nothing."""
    if seconds >= 10:
        return float(round(seconds))
    return max(0.1, round(seconds, 1)) if seconds else 0.0
