"""The alerts in etc/prometheus/: each fires when it should and is quiet otherwise, by Prometheus' own evaluation."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen

from aiogw.metrics import NO_UPSTREAM

RULES = Path(__file__).parent.parent / "etc" / "prometheus" / "aiogw.rules.yml"
ALERTS = re.findall(r"^ +- alert: (\w+)$", RULES.read_text(), re.MULTILINE)

GATEWAY = 'job="aiogw",instance="gw:9464"'
UPSTREAM = f'{GATEWAY},upstream="reasoning"'
OTHER = f'{GATEWAY},upstream="other"'
ENDPOINT_A = f'{UPSTREAM},endpoint="a:8000"'
ENDPOINT_B = f'{UPSTREAM},endpoint="b:8000"'


def series(name: str, labels: str, *more: str) -> str:
    return f"{name}{{{','.join((labels, *more))}}}"


def requests(outcome: str, labels: str = UPSTREAM) -> str:
    return series("aiogw_requests_total", labels, 'surface="openai"', f'outcome="{outcome}"')


def refusals(reason: str, labels: str = UPSTREAM) -> str:
    return series("aiogw_refusals_total", labels, f'reason="{reason}"')


IN_USE, SETTLING, CAP = (series(f"aiogw_slots_{name}", UPSTREAM) for name in ("in_use", "settling", "limit"))
GRANTS = series("aiogw_grants_total", UPSTREAM)
WAITING, QUEUE_LIMIT = series("aiogw_queue_requests", UPSTREAM), series("aiogw_queue_limit", UPSTREAM)


@frozen
class Case:
    """Series by the minute, in promtool's notation (``a+bxn``: n steps of b from a); ``labels`` are the alert's own."""

    firing: Mapping[str, str]
    quiet: Mapping[str, str]
    labels: str = UPSTREAM
    severity: str = "warning"
    at: str = field(default="30m")


FULL = {IN_USE: "5x60", SETTLING: "1x60", CAP: "6x60"}
# Another upstream, at which something else is the matter.
HALF = {
    series(f"aiogw_slots_{name}", OTHER): f"{slots}x60"
    for name, slots in (("in_use", 3), ("settling", 0), ("limit", 6))
}

CASES = {
    "AiogwDown": Case({series("up", GATEWAY): "1x20 0x20"}, {series("up", GATEWAY): "1x60"}, GATEWAY, "critical"),
    "AiogwRestartLoop": Case(
        {series("process_start_time_seconds", GATEWAY): "100x20 200x3 300x3 400x10"},
        {series("process_start_time_seconds", GATEWAY): "100x20 200x30"},
        GATEWAY,
        "critical",
    ),
    "AiogwDrainingTooLong": Case(
        {series("aiogw_draining", GATEWAY): "0x10 1x50"}, {series("aiogw_draining", GATEWAY): "0x20 1x40"}, GATEWAY
    ),
    "AiogwReloadFailed": Case(
        {series("aiogw_config_last_reload_successful", GATEWAY): "1x20 0x40"},
        {series("aiogw_config_last_reload_successful", GATEWAY): "1x20 0x5 1x40"},
        GATEWAY,
    ),
    "AiogwInternalError": Case(
        {requests("internal_error"): "0x20 1x40"},
        {requests("internal_error"): "1x60", requests("completed"): "0+9x60"},
        GATEWAY,
    ),
    "AiogwBodyMemoryNearlyFull": Case(
        {
            series("aiogw_body_memory_bytes", GATEWAY): "95x60",
            series("aiogw_body_memory_limit_bytes", GATEWAY): "100x60",
        },
        {
            series("aiogw_body_memory_bytes", GATEWAY): "85x60",
            series("aiogw_body_memory_limit_bytes", GATEWAY): "100x60",
        },
        GATEWAY,
    ),
    "AiogwConnectionsNearlyFull": Case(
        {series("aiogw_connections", GATEWAY): "95x60", series("aiogw_connections_limit", GATEWAY): "100x60"},
        {series("aiogw_connections", GATEWAY): "85x60", series("aiogw_connections_limit", GATEWAY): "100x60"},
        GATEWAY,
    ),
    "AiogwConnectionsRefused": Case(
        {series("aiogw_connections_refused_total", GATEWAY, 'reason="limit"'): "0x25 0+5x40"},
        {
            series("aiogw_connections_refused_total", GATEWAY, 'reason="limit"'): "7x60",
            series("aiogw_connections_refused_total", GATEWAY, 'reason="tls"'): "0+5x60",
        },
        f'{GATEWAY},reason="limit"',
    ),
    "AiogwFilesNearlyFull": Case(
        {series("process_open_fds", GATEWAY): "95x60", series("process_max_fds", GATEWAY): "100x60"},
        {series("process_open_fds", GATEWAY): "85x60", series("process_max_fds", GATEWAY): "100x60"},
        GATEWAY,
    ),
    "AiogwSaturated": Case(
        FULL | {WAITING: "0x10 3x50"}, FULL | {WAITING: "0x60"} | HALF | {series("aiogw_queue_requests", OTHER): "3x60"}
    ),
    "AiogwQueueNearlyFull": Case({WAITING: "30x60", QUEUE_LIMIT: "32x60"}, {WAITING: "20x60", QUEUE_LIMIT: "32x60"}),
    "AiogwQueueFull": Case(
        {refusals("queue_full"): "0x10 0+1x50"}, {refusals("queue_full"): "9x60", refusals("draining"): "0+5x60"}
    ),
    "AiogwQueuePlacesTaken": Case(
        {refusals("queue_places_taken"): "0+1x60"}, {refusals("queue_places_taken"): "9x20 12x40"}
    ),
    "AiogwQueueTimeouts": Case(
        {refusals("queue_timeout"): "0x25 3x40"}, {refusals("queue_timeout"): "9x60", refusals("queue_full"): "0+5x60"}
    ),
    "AiogwOldestWaitNearLimit": Case(
        {
            series("aiogw_queue_oldest_wait_seconds", UPSTREAM): "55x60",
            series("aiogw_queue_timeout_seconds", UPSTREAM): "60x60",
        },
        {
            series("aiogw_queue_oldest_wait_seconds", UPSTREAM): "30x60",
            series("aiogw_queue_timeout_seconds", UPSTREAM): "60x60",
        },
    ),
    "AiogwNothingMoves": Case(
        FULL | {GRANTS: "7x60"},
        FULL | {GRANTS: "0+1x60"} | HALF | {series("aiogw_grants_total", OTHER): "7x60"},
        severity="critical",
    ),
    "AiogwSettlingStuck": Case({SETTLING: "0x10 1x50"}, {SETTLING: "0x10 1x10 0x1 1x50"}),
    "AiogwUpstreamUnavailable": Case(
        {requests("upstream_unavailable"): "0x25 0+2x40"},
        {requests("upstream_unavailable"): "9x60", requests("completed"): "0+9x60"},
        severity="critical",
    ),
    "AiogwUpstreamErrors": Case(
        {requests("upstream_broken"): "0+1x60", requests("completed"): "0+9x60"},
        {requests("upstream_broken"): "0+1x60", requests("completed"): "0+99x60", requests("client_gone"): "0+99x60"},
    ),
    "AiogwEndpointOut": Case(
        {series("aiogw_endpoint_up", ENDPOINT_A): "1x20 0x40", series("aiogw_endpoint_up", ENDPOINT_B): "1x60"},
        {series("aiogw_endpoint_up", ENDPOINT_A): "1x20 0x2 1x40", series("aiogw_endpoint_up", ENDPOINT_B): "1x60"},
        ENDPOINT_A,
    ),
    "AiogwAllEndpointsOut": Case(
        {series("aiogw_endpoint_up", ENDPOINT_A): "1x20 0x40", series("aiogw_endpoint_up", ENDPOINT_B): "0x60"},
        {series("aiogw_endpoint_up", ENDPOINT_A): "1x60", series("aiogw_endpoint_up", ENDPOINT_B): "0x60"},
        severity="critical",
    ),
    "AiogwEngineDrift": Case(
        {series("aiogw_engine_drift_requests", UPSTREAM): "0x10 2x50"},
        {series("aiogw_engine_drift_requests", UPSTREAM): "2x25 0x1 2x40"},
    ),
    "AiogwEngineQueues": Case(
        {series("aiogw_engine_waiting_requests", UPSTREAM): "0x10 2x50"},
        {series("aiogw_engine_waiting_requests", UPSTREAM): "2x27 0x1 2x40"},
    ),
}


def evaluate(directory: Path, alert: str, inputs: Mapping[str, str], at: str, expected: list[str]) -> None:
    """Have promtool look which series of ``alert`` fire at that time."""
    firing = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
    samples = [{"labels": one, "value": 1} for one in expected]
    promtool_test(directory, inputs, {"promql_expr_test": [{"expr": firing, "eval_time": at, "exp_samples": samples}]})


def promtool_test(directory: Path, inputs: Mapping[str, str], expected: Mapping[str, Any]) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: install the Debian package prometheus"
    group = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in inputs.items()],
        **expected,
    }
    # YAML reads JSON.
    path = directory / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [group]}))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, timeout=60, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr


def test_every_alert_has_its_cases() -> None:
    """Nobody adds an alert without saying when it fires and when it does not."""
    assert len(ALERTS) >= 10
    assert ALERTS == list(CASES)


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires(tmp_path: Path, alert: str) -> None:
    """In the trouble it is for, once, and for whom it concerns."""
    case = CASES[alert]
    own = f'ALERTS{{alertname="{alert}",alertstate="firing",severity="{case.severity}",{case.labels}}}'
    evaluate(tmp_path, alert, case.firing, case.at, [own])


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_is_quiet(tmp_path: Path, alert: str) -> None:
    """In what resembles the trouble and is none."""
    case = CASES[alert]
    assert case.firing.keys() & case.quiet.keys()
    evaluate(tmp_path, alert, case.quiet, case.at, [])


def test_a_target_that_nobody_scrapes_is_down(tmp_path: Path) -> None:
    """Without any series of the job, as after a change of the scrape configuration."""
    own = 'ALERTS{alertname="AiogwDown",alertstate="firing",severity="critical",job="aiogw"}'
    evaluate(tmp_path, "AiogwDown", {'up{job="other"}': "1x60"}, "30m", [own])


@pytest.mark.parametrize(
    ("inputs", "description"),
    [
        ({series("up", GATEWAY): "0x60"}, "Prometheus has had no metrics from gw:9464 for a minute."),
        ({'up{job="other"}': "1x60"}, 'Prometheus has no target with job="aiogw".'),
    ],
    ids=["down", "absent"],
)
def test_what_is_down_is_named(tmp_path: Path, inputs: Mapping[str, str], description: str) -> None:
    """A target by its address; where there is none, that is said."""
    told = dict(re.findall(r"^ +(summary|action): (.*aiogw.*)$", RULES.read_text(), re.MULTILINE)[:2])
    labels = {"severity": "critical", "job": "aiogw"} | ({"instance": "gw:9464"} if "gw:9464" in description else {})
    alert = {"exp_labels": labels, "exp_annotations": {**told, "description": description}}
    promtool_test(
        tmp_path, inputs, {"alert_rule_test": [{"eval_time": "30m", "alertname": "AiogwDown", "exp_alerts": [alert]}]}
    )


def test_a_first_fault_before_routing_is_not_missed(tmp_path: Path) -> None:
    """It has no upstream, and its series is there at zero: increase() would not see one that begins at one."""
    first = requests("internal_error", f'{GATEWAY},upstream="{NO_UPSTREAM}"')
    own = f'ALERTS{{alertname="AiogwInternalError",alertstate="firing",severity="warning",{GATEWAY}}}'
    evaluate(tmp_path, "AiogwInternalError", {first: "0x20 1x40"}, "30m", [own])
    evaluate(tmp_path, "AiogwInternalError", {first: "_x20 1x40"}, "30m", [])


def test_the_rules_are_rules() -> None:
    """promtool has nothing to say of the file."""
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: install the Debian package prometheus"
    command = [promtool, "check", "rules", "--lint=all", "--lint-fatal", RULES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
