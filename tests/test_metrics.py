"""What Prometheus sees: the names and labels that dashboards rely on, and gauges that are the state itself."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aiogw import __version__
from aiogw.admission.readings import EndpointStatistics, GateStatistics
from aiogw.enginewatch import EngineReading
from aiogw.listener import ListenerStatistics
from aiogw.metrics import NO_UPSTREAM, Observer, Readings, StateCollector
from aiogw.record import RequestRecord

GATED = GateStatistics(
    cap=6,
    configured_cap=6,
    slots_in_use=5,
    slots_settling=1,
    queue_limit=32,
    waiting=4,
    queue_timeout_seconds=60.0,
    refuses=None,
    ends=9,
    oldest_wait_seconds=3.5,
    grants_total=1234,
    refusals_total={"queue_full": 7, "queue_timeout": 2},
    endpoints={
        "a:8000": EndpointStatistics(left_out=False, slots=4, slots_in_use=4),
        "b:8000": EndpointStatistics(left_out=True, slots=None, slots_in_use=2),
    },
)
UNLIMITED = GateStatistics(
    cap=None,
    configured_cap=None,
    slots_in_use=9,
    slots_settling=0,
    queue_limit=0,
    waiting=0,
    queue_timeout_seconds=None,
    refuses=None,
    ends=9,
    oldest_wait_seconds=0.0,
    grants_total=10,
    refusals_total={},
    endpoints={"c:8000": EndpointStatistics(left_out=False, slots=None, slots_in_use=9)},
)


class State:
    """What the collector reads, for a test to change."""

    def __init__(self) -> None:
        self.readings = {"gated": GATED, "free": UNLIMITED}
        self.body_bytes = 0
        self.draining = False
        self.reload_successful = True
        self.engines = {"gated": EngineReading(running_requests=6, waiting_requests=2, drift_requests=2)}

    def read(self) -> Readings:
        return Readings(
            gates=self.readings,
            newcomers_wait_seconds={"gated": 12.5},
            engines=self.engines,
            listener=ListenerStatistics(connections=3, max_connections=100, refused_total={"limit": 5, "tls": 1}),
            body_bytes=self.body_bytes,
            body_limit_bytes=1000,
            draining=self.draining,
            reload_successful=self.reload_successful,
        )


@pytest.fixture
def state() -> Iterator[State]:
    """A collector registered as the gateway does it, and one request of each kind counted."""
    state = State()
    collector = StateCollector(state.read)
    collector.register()
    observer = Observer(("gated", "free"))
    observer.observe(request(upstream="gated"))
    observer.observe(request(outcome="not_found"))
    yield state
    collector.unregister()


def request(**changes: Any) -> RequestRecord:
    times = {"arrived_at": 100.0, "entered_at": 100.0, "granted_at": 102.0, "first_byte_at": 103.0, "ended_at": 107.0}
    return RequestRecord(**{"request_id": "req_1", "surface": "openai", **times, **changes})


def of(name: str, *labels: str) -> tuple[str, frozenset[str]]:
    return name, frozenset(labels)


def samples() -> dict[tuple[str, frozenset[str]], float]:
    """The value of every sample of ours, by its name and the values of its labels."""
    text = generate_latest(REGISTRY).decode()
    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("aiogw_")
    }


GOLDEN = {
    "aiogw_requests_total": ("counter", {"surface", "upstream", "outcome"}),
    "aiogw_queue_wait_seconds": ("histogram", {"upstream"}),
    "aiogw_upstream_first_byte_seconds": ("histogram", {"upstream"}),
    "aiogw_request_duration_seconds": ("histogram", {"upstream"}),
    "aiogw_slots_limit": ("gauge", {"upstream"}),
    "aiogw_slots_in_use": ("gauge", {"upstream"}),
    "aiogw_slots_settling": ("gauge", {"upstream"}),
    "aiogw_queue_limit": ("gauge", {"upstream"}),
    "aiogw_queue_requests": ("gauge", {"upstream"}),
    "aiogw_queue_oldest_wait_seconds": ("gauge", {"upstream"}),
    "aiogw_queue_timeout_seconds": ("gauge", {"upstream"}),
    "aiogw_queue_estimated_wait_seconds": ("gauge", {"upstream"}),
    "aiogw_grants_total": ("counter", {"upstream"}),
    "aiogw_refusals_total": ("counter", {"upstream", "reason"}),
    "aiogw_tokens_total": ("counter", {"upstream", "kind"}),
    "aiogw_body_memory_bytes": ("gauge", set()),
    "aiogw_body_memory_limit_bytes": ("gauge", set()),
    "aiogw_header_timeouts_total": ("counter", set()),
    "aiogw_malformed_requests_total": ("counter", set()),
    "aiogw_endpoint_up": ("gauge", {"upstream", "endpoint"}),
    "aiogw_endpoint_slots_in_use": ("gauge", {"upstream", "endpoint"}),
    "aiogw_engine_running_requests": ("gauge", {"upstream"}),
    "aiogw_engine_waiting_requests": ("gauge", {"upstream"}),
    "aiogw_engine_drift_requests": ("gauge", {"upstream"}),
    "aiogw_config_last_reload_successful": ("gauge", set()),
    "aiogw_connections": ("gauge", set()),
    "aiogw_connections_limit": ("gauge", set()),
    "aiogw_connections_refused_total": ("counter", {"reason"}),
    "aiogw_draining": ("gauge", set()),
    "aiogw_build_info": ("gauge", {"version", "python"}),
}


def test_the_names_and_labels(state: State) -> None:
    """These are what dashboards and alerts are written against; a change of them is a change for every user."""
    text = generate_latest(REGISTRY).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("aiogw_"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, labels)
        assert family.documentation.endswith(".")
    assert found == GOLDEN


def test_promtool_finds_nothing_to_say(state: State) -> None:
    """The whole page, also what the libraries add to it, is what Prometheus' own linter wants."""
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: install the Debian package prometheus"
    page = generate_latest(REGISTRY)
    assert b"aiogw_slots_in_use" in page
    checked = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, timeout=30, check=False)
    assert (0, b"", b"") == (checked.returncode, checked.stdout, checked.stderr)


def test_gauges_are_the_state(state: State) -> None:
    """Each gauge is what the gate says when it is scraped, and follows it in either direction."""
    found = samples()
    expected = {
        of("aiogw_slots_limit", "gated"): 6,
        of("aiogw_slots_in_use", "gated"): 5,
        of("aiogw_slots_settling", "gated"): 1,
        of("aiogw_queue_limit", "gated"): 32,
        of("aiogw_queue_requests", "gated"): 4,
        of("aiogw_queue_oldest_wait_seconds", "gated"): 3.5,
        of("aiogw_queue_timeout_seconds", "gated"): 60,
        of("aiogw_queue_estimated_wait_seconds", "gated"): 12.5,
        of("aiogw_grants_total", "gated"): 1234,
        of("aiogw_refusals_total", "gated", "queue_full"): 7,
        of("aiogw_refusals_total", "gated", "queue_timeout"): 2,
        of("aiogw_body_memory_bytes"): 0,
        of("aiogw_body_memory_limit_bytes"): 1000,
        of("aiogw_draining"): 0,
    }
    assert expected == {name: found[name] for name in expected}
    assert 1 == found[of("aiogw_build_info", __version__, platform.python_version())]
    state.readings["gated"] = UNLIMITED
    state.draining = True
    state.body_bytes = 7
    found = samples()
    assert 7 == found[of("aiogw_body_memory_bytes")]
    assert (9, 1) == (found[of("aiogw_slots_in_use", "gated")], found[of("aiogw_draining")])


def test_an_unlimited_upstream_has_no_limits_to_show(state: State) -> None:
    """A limit that is not there is no number; what is held is counted all the same."""
    found = samples()
    assert of("aiogw_slots_limit", "free") not in found
    assert of("aiogw_queue_limit", "free") not in found
    assert (9, 0) == (found[of("aiogw_slots_in_use", "free")], found[of("aiogw_queue_requests", "free")])


def test_a_gateway_that_is_gone_is_not_scraped(state: State) -> None:
    """A collector can be taken away, and another put in its place."""
    collector = StateCollector(State().read)
    with pytest.raises(KeyError):
        collector.unregister()
    # The names are not reserved, so a second gateway in the process does not fail to start.
    collector.register()
    collector.unregister()
    assert of("aiogw_slots_in_use", "gated") in samples()


# -- requests as they end -------------------------------------------------------------------------------------------


def counted(record: RequestRecord) -> dict[str, float]:
    """What one observation adds: the samples that grew, by their name without labels."""
    before = samples()
    Observer(("counted",)).observe(record)
    return {
        name: value - before.get((name, labels), 0)
        for (name, labels), value in samples().items()
        if value != before.get((name, labels), 0) and not name.endswith("_bucket")
    }


def test_a_request_that_went_all_the_way() -> None:
    """It counts once, and in each of the three histograms with its own time."""
    assert {
        "aiogw_requests_total": 1,
        "aiogw_queue_wait_seconds_count": 1,
        "aiogw_queue_wait_seconds_sum": 2,
        "aiogw_upstream_first_byte_seconds_count": 1,
        "aiogw_upstream_first_byte_seconds_sum": 1,
        "aiogw_request_duration_seconds_count": 1,
        "aiogw_request_duration_seconds_sum": 7,
    } == counted(request(upstream="counted"))


def test_a_request_that_timed_out_in_the_queue() -> None:
    """Its wait counts, for it did wait; a first byte there was not."""
    record = request(upstream="counted", outcome="queue_timeout", granted_at=None, first_byte_at=None)
    assert {
        "aiogw_requests_total": 1,
        "aiogw_queue_wait_seconds_count": 1,
        "aiogw_queue_wait_seconds_sum": 7,
        "aiogw_request_duration_seconds_count": 1,
        "aiogw_request_duration_seconds_sum": 7,
    } == counted(record)


@pytest.mark.parametrize("changes", [{"upstream": None}, {"upstream": "counted", "entered_at": None, "ended_at": None}])
def test_a_request_that_went_nowhere(changes: dict[str, Any]) -> None:
    """It counts, and is in no histogram: no upstream had anything to do with it, or nothing took any time."""
    assert {"aiogw_requests_total": 1} == counted(request(granted_at=None, outcome="model_not_found", **changes))


def test_requests_are_told_apart_by_surface_upstream_and_outcome() -> None:
    """One series for each; ``-`` where no upstream was chosen."""
    observer = Observer(("told",))
    for record in (request(upstream="told"), request(upstream="told"), request(surface="lost", outcome="not_found")):
        observer.observe(record)
    found = samples()
    assert 2 == found[of("aiogw_requests_total", "openai", "told", "completed")]
    assert 1 == found[of("aiogw_requests_total", "lost", "-", "not_found")]


def test_an_upstream_is_there_before_its_first_request() -> None:
    """Histograms begin at zero, so that the first rate is not missed."""
    Observer(("new",))
    assert 0 == samples()[of("aiogw_request_duration_seconds_count", "new")]


def test_what_alerts_look_at_is_there_before_it_happens() -> None:
    """A rate does not see a counter that begins at one, so the first refusal and the first fault have a zero before."""
    Observer(("new",), surfaces=("openai",))
    found = samples()
    assert 0 == found[of("aiogw_requests_total", "openai", "new", "internal_error")]
    assert 0 == found[of("aiogw_requests_total", "openai", NO_UPSTREAM, "internal_error")]
    assert 0 == found[of("aiogw_requests_total", "openai", "new", "upstream_unavailable")]


def test_every_reason_for_a_refusal_is_there_before_it_happens(state: State) -> None:
    """Those that have not occurred are zero."""
    found = samples()
    assert 0 == found[of("aiogw_refusals_total", "gated", "queue_too_slow")]
    assert 0 == found[of("aiogw_refusals_total", "free", "draining")]
