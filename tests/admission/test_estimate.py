"""How long a newcomer would wait: arithmetic over how long slots were held and are being held."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiogw.admission.estimate import REMEMBERED, HoldTimes, retry_after_seconds, wait_seconds

TIMES = st.floats(min_value=0, max_value=1e6)


def held(*seconds: float) -> HoldTimes:
    times = HoldTimes()
    for one in seconds:
        times.observe(one)
    return times


def test_without_observations_there_is_no_time() -> None:
    """Where nothing ever ran, nothing is known, and nobody has to wait."""
    assert 0.0 == HoldTimes().mean_seconds([])


def test_the_mean_of_what_has_ended() -> None:
    """With nobody running, it is the plain mean."""
    assert 4.0 == held(2, 6).mean_seconds([])


def test_running_requests_add_time_but_no_end() -> None:
    """Two ended after 3 s each; two more run since 5 s and 7 s: 18 s passed for two ends."""
    assert 9.0 == held(3, 3).mean_seconds([5, 7])


def test_before_the_first_end_the_oldest_counts() -> None:
    """The first wave already says that it takes at least as long as its oldest has run."""
    assert 8.0 == HoldTimes().mean_seconds([4, 8, 2])


@pytest.mark.parametrize(("ended", "expected"), [(10, 60.0), (2, 61.0)])
def test_a_newcomer_waits_for_those_that_run(ended: int, expected: float) -> None:
    """Two that run since 60 s are not outvoted by many that ended after one: it is never less than their mean age."""
    assert expected == held(*[1.0] * ended).mean_seconds([60, 60])


def test_the_mean_grows_while_the_upstream_hangs() -> None:
    """Good old times do not hide that nothing has ended for a while."""
    times = held(*[1.0] * 10)
    means = [times.mean_seconds([age] * 6) for age in (0, 10, 60, 600)]
    assert sorted(means) == means
    assert means[-1] > 100 * means[0]


def test_old_times_are_forgotten() -> None:
    """After enough short holds the long ones of before do not count any more."""
    assert 1.0 == held(*[1000.0] * REMEMBERED, *[1.0] * REMEMBERED).mean_seconds([])
    assert held(*[1000.0] * REMEMBERED, *[1.0] * (REMEMBERED - 1)).mean_seconds([]) > 10


def test_nobody_runs_so_nobody_waits() -> None:
    """With no request running the next one is granted at once, whatever is remembered."""
    assert 0.0 == wait_seconds(mean_held_seconds=30, running=0, ahead=5)


@pytest.mark.parametrize(
    ("running", "ahead", "expected"), [(6, 0, 10.0), (6, 5, 60.0), (1, 0, 60.0), (6, 11, 120.0), (2, 1, 60.0)]
)
def test_slots_free_up_in_parallel(running: int, ahead: int, expected: float) -> None:
    """Of six that take 60 s each, one ends every 10 s: the first in line waits 10 s, the sixth 60 s."""
    assert expected == wait_seconds(mean_held_seconds=60, running=running, ahead=ahead)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, 2), (1.9, 2), (2, 2), (2.1, 3), (29.001, 30), (30, 30), (31, 30), (1e9, 30)]
)
def test_retry_after_is_whole_and_bounded(seconds: float, expected: int) -> None:
    """Rounded up, so that nobody comes back too early, and never outside what the operator allows."""
    assert expected == retry_after_seconds(seconds, minimum_seconds=2, maximum_seconds=30)


@given(st.lists(TIMES), st.lists(TIMES), st.integers(0, 100), st.integers(0, 1000))
def test_an_estimate_is_finite_and_not_negative(
    ended: list[float], ages: list[float], running: int, ahead: int
) -> None:
    """Whatever the history, the estimate is finite and not negative, and more ahead is never less to wait."""
    mean = held(*ended).mean_seconds(ages)
    assert sum(ages) / max(1, len(ages)) <= mean * (1 + 1e-9)
    estimate = wait_seconds(mean_held_seconds=mean, running=running, ahead=ahead)
    assert 0 <= estimate < math.inf
    assert estimate <= wait_seconds(mean_held_seconds=mean, running=running, ahead=ahead + 1)
    assert 1 <= retry_after_seconds(estimate, minimum_seconds=1, maximum_seconds=60) <= 60
