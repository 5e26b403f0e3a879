"""What the live view remembers: the last endings, the waits of five minutes, and a sample of each queue now and then.

All of it is bounded, and a request costs it two appends.  The clock is the caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from attrs import frozen

from aiogw.admission.readings import GateStatistics
from aiogw.errors import QueueFull, QueuePlacesTaken, QueueTimeout, QueueTooSlow
from aiogw.record import CLIENT_GONE, COMPLETED, Progress, RequestRecord

ENDINGS = 50
WAITS_SECONDS = 300.0
# Of one upstream; with more than 13 requests a second the five minutes are fewer.
MOST_WAITS = 4096
SAMPLE_SECONDS = 2.0
SAMPLES = 150

Sample = tuple[int, int, float]


@frozen(kw_only=True)
class Ending:
    number: int
    record: RequestRecord


@frozen(kw_only=True)
class Waits:
    """Of one upstream: the waits that ended with a grant, None: there was none; how many gave up or timed out; and how
    many the queue refused at entry.
    """

    p50_seconds: float | None
    p95_seconds: float | None
    max_seconds: float | None
    in_vain: int
    refused: int


# How a wait ends in vain by the client's will or the clock, and how none begins because of those who wait.
_IN_VAIN = {CLIENT_GONE, QueueTimeout.code}
_REFUSED = {QueueFull.code, QueuePlacesTaken.code, QueueTooSlow.code}


class History:
    def __init__(self) -> None:
        self._ended = 0
        self._endings: deque[Ending] = deque(maxlen=ENDINGS)
        # When each ended, and how long it took or, without a grant, the outcome; a flood of refusals is not to push out
        # what those have waited who were served.
        self._waits: dict[str, deque[tuple[float, float]]] = {}
        self._denials: dict[str, deque[tuple[float, str]]] = {}
        self._sampled = 0
        self._samples: dict[str, deque[tuple[str, Sample]]] = {}

    @property
    def endings(self) -> tuple[Ending, ...]:
        """The last ones, the newest at the end; what was answered here, a list of models, is not among them."""
        return tuple(self._endings)

    def observe(self, record: RequestRecord) -> None:
        """Take note of a request that has ended."""
        if record.upstream is None and record.outcome == COMPLETED:
            return
        self._ended += 1
        self._endings.append(Ending(number=self._ended, record=record))
        wait_seconds = record.wait_seconds
        if record.upstream is None:
            return
        if record.granted_at is not None and record.entered_at is not None and wait_seconds is not None:
            waits = self._waits.setdefault(record.upstream, deque(maxlen=MOST_WAITS))
            waits.append((record.entered_at + wait_seconds, wait_seconds))
        elif record.granted_at is None and record.outcome in (_REFUSED if wait_seconds is None else _IN_VAIN):
            assert record.ended_at is not None
            denials = self._denials.setdefault(record.upstream, deque(maxlen=MOST_WAITS))
            denials.append((record.ended_at, record.outcome))

    def waits(self, now: float, progress: Iterable[Progress]) -> dict[str, Waits]:
        """Of those that have ended within five minutes, those of requests that still run included."""
        since = now - WAITS_SECONDS
        recent = {name: [wait for ended_at, wait in waits if ended_at >= since] for name, waits in self._waits.items()}
        for one in progress:
            record = one.record
            if record.granted_at is not None and record.granted_at >= since and record.wait_seconds is not None:
                recent.setdefault(one.upstream, []).append(record.wait_seconds)
        denied = {name: [code for ended_at, code in all_ if ended_at >= since] for name, all_ in self._denials.items()}
        names = [*recent, *(denied.keys() - recent.keys())]
        summed = {name: _summed_up(sorted(recent.get(name, ())), denied.get(name, [])) for name in names}
        return {name: waits for name, waits in summed.items() if waits is not None}

    def sample(self, gates: Mapping[str, GateStatistics]) -> None:
        """Remember what the queues look like; to be called every ``SAMPLE_SECONDS``."""
        self._sampled += 1
        for name in self._samples.keys() - gates.keys():
            del self._samples[name]
        for name, gate in gates.items():
            samples = self._samples.get(name)
            if samples is None:
                samples = self._samples[name] = deque(maxlen=SAMPLES)
            in_use = gate.slots_in_use + gate.slots_settling
            samples.append((str(self._sampled), (in_use, gate.waiting, round(gate.oldest_wait_seconds, 1))))

    @property
    def samples(self) -> dict[str, dict[str, Sample]]:
        return {name: dict(samples) for name, samples in self._samples.items()}


def _summed_up(granted: list[float], denied: list[str]) -> Waits | None:
    """Quantiles by the nearest rank: a wait that somebody had, not one between two.  None: there was nothing."""
    if not granted and not denied:
        return None
    refused = sum(outcome in _REFUSED for outcome in denied)

    def at(share: float) -> float | None:
        return granted[min(len(granted) - 1, int(share * len(granted)))] if granted else None

    return Waits(
        p50_seconds=at(0.5),
        p95_seconds=at(0.95),
        max_seconds=at(1.0),
        in_vain=len(denied) - refused,
        refused=refused,
    )
