"""What a reading of a gate says of itself."""

from __future__ import annotations

import pytest
from attrs import evolve

from aiogw.admission.estimate import ENOUGH
from aiogw.admission.readings import EndpointStatistics, GateStatistics

READING = GateStatistics(
    cap=3,
    configured_cap=3,
    slots_in_use=0,
    slots_settling=0,
    queue_limit=8,
    waiting=0,
    queue_timeout_seconds=30.0,
    oldest_wait_seconds=0.0,
    refuses=None,
    ends=ENOUGH,
    grants_total=0,
    refusals_total={},
    endpoints={},
)


@pytest.mark.parametrize(
    ("left_out", "unreached_since", "up"),
    [(False, None, True), (True, None, False), (False, 1.0, False), (True, 1.0, False)],
)
def test_an_endpoint_is_up_when_nothing_is_wrong_with_it(
    left_out: bool, unreached_since: float | None, up: bool
) -> None:
    """Neither left out nor not reached."""
    one = EndpointStatistics(left_out=left_out, slots=3, slots_in_use=0, unreached_since=unreached_since)
    assert up is one.up


def test_an_endpoint_has_been_reached_unless_it_is_said() -> None:
    """A gate that knows of no connections says nothing of them."""
    assert EndpointStatistics(left_out=False, slots=None, slots_in_use=0).up


def test_estimates_are_measured_from_the_end_on_from_which_the_gate_refuses_for_them() -> None:
    """One end fewer, and they are guesses."""
    assert READING.estimates_measured
    assert not evolve(READING, ends=ENOUGH - 1).estimates_measured
