"""What Prometheus sees: names, labels, and a collector that reads the gate when it is scraped.

Gauges are read from the state itself and never counted up and down, so they cannot drift.  Labels come from the
configuration and from closed sets, never from what a client says.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping

import prometheus_client
from attrs import frozen
from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector

from aiogw import __version__
from aiogw.admission.readings import GateStatistics
from aiogw.enginewatch import EngineReading
from aiogw.errors import (
    Draining,
    InternalFault,
    QueueFull,
    QueuePlacesTaken,
    QueueTimeout,
    QueueTooSlow,
    TooManySequences,
    UpstreamBroken,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from aiogw.listener import ListenerStatistics
from aiogw.record import CLIENT_GONE, COMPLETED, RequestRecord

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

_WAIT_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

# A rate does not see what a counter begins with: what alerts look at is there, at zero, before it happens.
REFUSALS = tuple(
    error.code
    for error in (
        QueueFull,
        QueueTimeout,
        QueueTooSlow,
        QueuePlacesTaken,
        Draining,
        TooManySequences,
        UpstreamUnavailable,
    )
)
OUTCOMES = (
    COMPLETED,
    CLIENT_GONE,
    *(error.code for error in (UpstreamUnavailable, UpstreamTimeout, UpstreamBroken, InternalFault)),
    "upstream_error",
)

REQUESTS = Counter(
    "aiogw_requests",
    'Requests that have ended, by how; without an upstream it is "-".',
    ("surface", "upstream", "outcome"),
)
MALFORMED = Counter("aiogw_malformed_requests", "What was refused before it was a request.")
QUEUE_WAIT = Histogram(
    "aiogw_queue_wait_seconds",
    "Entry at the gate to grant or, without one, to the end.",
    ("upstream",),
    buckets=_WAIT_BUCKETS,
)
FIRST_BYTE = Histogram(
    "aiogw_upstream_first_byte_seconds",
    "Grant to the upstream's first byte.",
    ("upstream",),
    buckets=_WAIT_BUCKETS,
)
DURATION = Histogram(
    "aiogw_request_duration_seconds",
    "Arrival of a request to the end of its response.",
    ("upstream",),
    buckets=_DURATION_BUCKETS,
)

TOKENS = Counter(
    "aiogw_tokens",
    "Tokens by kind (prompt, completion), where the upstream told them.",
    ("upstream", "kind"),
)

HEADER_TIMEOUTS = Counter("aiogw_header_timeouts", "Connections closed because a request's head was late.")

NO_UPSTREAM = "-"


class Observer:
    """Counts requests as they end; the children for each upstream are looked up once and not per request."""

    def __init__(self, upstreams: Iterable[str] = (), *, surfaces: Iterable[str] = ()) -> None:
        self._surfaces = tuple(surfaces)
        self._histograms: dict[str, tuple[Histogram, Histogram, Histogram]] = {}
        self._tokens: dict[str, tuple[Counter, Counter]] = {}
        self._requests: dict[tuple[str, ...], Counter] = {}
        for surface in self._surfaces:
            self._counter(surface, NO_UPSTREAM, InternalFault.code)
        self.know(upstreams)

    def know(self, upstreams: Iterable[str]) -> None:
        """Show these from now on, those as well of which there is nothing to tell yet."""
        for name in upstreams:
            self._histograms[name] = (QUEUE_WAIT.labels(name), FIRST_BYTE.labels(name), DURATION.labels(name))
            self._tokens[name] = (TOKENS.labels(name, "prompt"), TOKENS.labels(name, "completion"))
            for surface in self._surfaces:
                for outcome in OUTCOMES:
                    self._counter(surface, name, outcome)

    def _counter(self, *key: str) -> Counter:
        counter = self._requests.get(key)
        if counter is None:
            counter = self._requests[key] = REQUESTS.labels(*key)
        return counter

    def observe(self, record: RequestRecord) -> None:
        self._counter(record.surface, record.upstream or NO_UPSTREAM, record.outcome).inc()
        if record.upstream is None:
            return
        wait, first_byte, duration = self._histograms[record.upstream]
        if record.wait_seconds is not None:
            wait.observe(record.wait_seconds)
        if record.first_byte_seconds is not None:
            first_byte.observe(record.first_byte_seconds)
        if record.duration_seconds is not None:
            duration.observe(record.duration_seconds)
        if record.usage is not None:
            prompt, completion = self._tokens[record.upstream]
            prompt.inc(max(0, record.usage.prompt_tokens))
            completion.inc(max(0, record.usage.completion_tokens))


@frozen(kw_only=True)
class Readings:
    """What is true at the moment of a scrape, by the name of the upstream where there is one for each."""

    gates: Mapping[str, GateStatistics]
    newcomers_wait_seconds: Mapping[str, float]
    engines: Mapping[str, EngineReading]
    body_bytes: int
    body_limit_bytes: int
    listener: ListenerStatistics | None
    draining: bool
    reload_successful: bool


class StateCollector(Collector):
    """Reads the gateway's state at scrape time."""

    def __init__(self, read: Callable[[], Readings]) -> None:
        self._read = read

    def register(self) -> None:
        REGISTRY.register(self)

    def unregister(self) -> None:
        REGISTRY.unregister(self)

    def describe(self) -> Iterator[Metric]:
        """Nothing beforehand: a description would have to read a gate that is not built yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        readings = self._read()
        yield from _gate_families(readings.gates)
        yield from _wait_families(readings)
        yield from _endpoint_families(readings.gates)
        yield from _engine_families(readings.engines)
        yield GaugeMetricFamily("aiogw_body_memory_bytes", "Bytes that request bodies take.", value=readings.body_bytes)
        yield GaugeMetricFamily(
            "aiogw_body_memory_limit_bytes", "How many they may take together.", value=readings.body_limit_bytes
        )
        if readings.listener is not None:
            yield from _connection_families(readings.listener)
        yield GaugeMetricFamily("aiogw_draining", "1 while the gateway shuts down.", value=float(readings.draining))
        yield GaugeMetricFamily(
            "aiogw_config_last_reload_successful",
            "0: the configuration was to be read again and could not be taken.",
            value=float(readings.reload_successful),
        )
        build = GaugeMetricFamily("aiogw_build_info", "Always 1.", labels=["version", "python"])
        build.add_metric([__version__, platform.python_version()], 1)
        yield build


def _gate_families(gates: Mapping[str, GateStatistics]) -> Iterator[Metric]:
    labels = ["upstream"]
    cap = GaugeMetricFamily(
        "aiogw_slots_limit", "The cap, less while an endpoint is out; absent where there is none.", labels=labels
    )
    in_use = GaugeMetricFamily("aiogw_slots_in_use", "Slots held by requests at the upstream.", labels=labels)
    settling = GaugeMetricFamily(
        "aiogw_slots_settling", "Slots of aborted requests, kept until the engine has let go of them.", labels=labels
    )
    queue_limit = GaugeMetricFamily("aiogw_queue_limit", "Places in the queue.", labels=labels)
    waiting = GaugeMetricFamily("aiogw_queue_requests", "Requests that wait for a slot.", labels=labels)
    oldest = GaugeMetricFamily(
        "aiogw_queue_oldest_wait_seconds", "How long the head of the queue has waited.", labels=labels
    )
    grants = CounterMetricFamily("aiogw_grants", "Times that a request was given its slots.", labels=labels)
    refusals = CounterMetricFamily("aiogw_refusals", "Requests turned away at the gate.", labels=[*labels, "reason"])
    for name, reading in gates.items():
        if reading.cap is not None:
            cap.add_metric([name], reading.cap)
            queue_limit.add_metric([name], reading.queue_limit)
        in_use.add_metric([name], reading.slots_in_use)
        settling.add_metric([name], reading.slots_settling)
        waiting.add_metric([name], reading.waiting)
        oldest.add_metric([name], reading.oldest_wait_seconds)
        grants.add_metric([name], reading.grants_total)
        for reason, count in (dict.fromkeys(REFUSALS, 0) | dict(reading.refusals_total)).items():
            refusals.add_metric([name, reason], count)
    yield from (cap, in_use, settling, queue_limit, waiting, oldest, grants, refusals)


def _wait_families(readings: Readings) -> Iterator[Metric]:
    timeouts = {name: one.queue_timeout_seconds for name, one in readings.gates.items()}
    for name, help_, waits in (
        ("aiogw_queue_timeout_seconds", "How long a request may wait.", timeouts),
        (
            "aiogw_queue_estimated_wait_seconds",
            "How long one that came now would probably wait.",
            readings.newcomers_wait_seconds,
        ),
    ):
        family = GaugeMetricFamily(name, help_, labels=["upstream"])
        for upstream, seconds in waits.items():
            if seconds is not None:
                family.add_metric([upstream], seconds)
        yield family


def _endpoint_families(gates: Mapping[str, GateStatistics]) -> Iterator[Metric]:
    labels = ["upstream", "endpoint"]
    up = GaugeMetricFamily("aiogw_endpoint_up", "0: left out, or the last attempt to connect failed.", labels=labels)
    in_use = GaugeMetricFamily("aiogw_endpoint_slots_in_use", "Slots held there, settling ones too.", labels=labels)
    for name, reading in gates.items():
        for endpoint, one in reading.endpoints.items():
            up.add_metric([name, endpoint], float(one.up))
            in_use.add_metric([name, endpoint], one.slots_in_use)
    yield from (up, in_use)


def _engine_families(engines: Mapping[str, EngineReading]) -> Iterator[Metric]:
    labels = ["upstream"]
    running = GaugeMetricFamily(
        "aiogw_engine_running_requests", "Sequences at work, by the engine's own word.", labels=labels
    )
    waiting = GaugeMetricFamily(
        "aiogw_engine_waiting_requests", "Sequences that wait inside the engine, by its own word.", labels=labels
    )
    drift = GaugeMetricFamily(
        "aiogw_engine_drift_requests", "How many more sequences the engine has than we have slots held.", labels=labels
    )
    for name, reading in engines.items():
        running.add_metric([name], reading.running_requests)
        waiting.add_metric([name], reading.waiting_requests)
        drift.add_metric([name], reading.drift_requests)
    yield from (running, waiting, drift)


def _connection_families(reading: ListenerStatistics) -> Iterator[Metric]:
    yield GaugeMetricFamily("aiogw_connections", "Connections of clients.", value=reading.connections)
    yield GaugeMetricFamily("aiogw_connections_limit", "How many there may be.", value=reading.max_connections)
    refused = CounterMetricFamily(
        "aiogw_connections_refused", "Turned away: limit, descriptors, tls (no handshake).", labels=["reason"]
    )
    for reason, count in reading.refused_total.items():
        refused.add_metric([reason], count)
    yield refused
