"""How long a newcomer would wait, and when a refused one is told to come back: arithmetic over how slots are held."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiogw.admission.estimate import (
    DEVIATIONS,
    MANY_RETURNS,
    NEWCOMERS_PER_RETURN,
    REMEMBERED,
    UNKNOWN_SLOT_SECONDS,
    Returns,
    SlotTimes,
)

TIMES = st.floats(min_value=0, max_value=1e6)


class Slots:
    """Slot times with a clock, and an account of what runs."""

    def __init__(self) -> None:
        self.times = SlotTimes()
        self.now = 1000.0
        self.running: list[tuple[int, float]] = []

    def take(self, *weights: int) -> None:
        for weight in weights:
            self.times.take(weight, self.now)
            self.running.append((weight, self.now))

    def free(self) -> None:
        """The oldest ends."""
        weight, _since = self.running.pop(0)
        self.times.free(weight, self.now, ended=True)

    def ran(self, *seconds: float, weight: int = 1) -> Slots:
        """Requests one after another that held their slots for so long."""
        for one in seconds:
            self.take(weight)
            self.now += one
            self.free()
        return self

    @property
    def interval_seconds(self) -> float:
        running = [self.now - since for _weight, since in self.running]
        return self.times.slot_interval_seconds(running, self.now)


# -- the estimate ---------------------------------------------------------------------------------------------------


def test_nobody_runs_so_nobody_waits() -> None:
    """With no request running the next one is granted at once, whatever is remembered."""
    assert 0.0 == Slots().interval_seconds
    assert 0.0 == Slots().ran(30, 30).interval_seconds


def test_the_mean_of_what_has_ended() -> None:
    """What has just begun is taken to need what those before it needed."""
    slots = Slots().ran(2, 6)
    slots.take(1)
    assert 4.0 == slots.interval_seconds
    assert 2 == len(slots.times)


@pytest.mark.parametrize(("running", "expected"), [(1, 60.0), (2, 30.0), (6, 10.0)])
def test_slots_free_up_in_parallel(running: int, expected: float) -> None:
    """Of six that take 60 s each, one ends every 10 s."""
    slots = Slots().ran(60)
    slots.take(*[1] * running)
    assert expected == slots.interval_seconds


def test_idle_time_is_not_busy() -> None:
    """A night without a request does not make the next one longer."""
    slots = Slots().ran(2, 6)
    slots.now += 50_000
    slots.take(1)
    assert 4.0 == slots.interval_seconds


def test_a_heavy_request_gives_back_as_many_slots() -> None:
    """Three slots for ten seconds are ten for each; while two are in use, one of them is free after five."""
    slots = Slots().ran(10, weight=3)
    slots.take(1)
    assert 10.0 == slots.interval_seconds
    slots.take(1)
    assert 5.0 == slots.interval_seconds


def test_a_heavy_end_counts_as_so_many_slots() -> None:
    """One slot for two seconds and three for ten: 32 seconds for four slots."""
    slots = Slots().ran(2).ran(10, weight=3)
    slots.take(1)
    assert 8.0 == slots.interval_seconds


def test_slots_that_are_given_back_unused_are_no_end() -> None:
    """They are not in use any more, the time was spent, and nobody has been served."""
    slots = Slots().ran(3)
    slots.take(1, 1)
    slots.now += 1
    slots.times.free(1, slots.now, ended=False)
    slots.running.pop()
    assert 1 == len(slots.times)
    assert 5.0 == slots.interval_seconds


def test_running_requests_add_time_but_no_end() -> None:
    """Two ended after 3 s each; two more run since 2 s: 10 s of slots for two ends, from two slots."""
    slots = Slots().ran(3, 3)
    slots.take(1, 1)
    slots.now += 2
    assert 2.5 == slots.interval_seconds


def test_before_the_first_end_the_oldest_counts() -> None:
    """The first wave already says that it takes at least as long as its oldest has run."""
    slots = Slots()
    slots.take(1)
    slots.now += 5
    slots.take(1)
    slots.now += 3
    assert 8.0 / 2 == slots.interval_seconds


def test_before_anything_is_known_a_request_is_short_but_not_nothing() -> None:
    """Otherwise all who are refused after a start would come back in the first second."""
    slots = Slots()
    slots.take(1, 1)
    assert UNKNOWN_SLOT_SECONDS / 2 == slots.interval_seconds
    assert slots.ran(0.001).interval_seconds < UNKNOWN_SLOT_SECONDS / 100


def test_a_newcomer_waits_for_those_that_run() -> None:
    """Ten ends after one second do not outvote two that hang: it is never less than what the newest has taken."""
    slots = Slots().ran(*[1.0] * 10)
    slots.take(1)
    slots.now += 10
    slots.take(1)
    # Twenty seconds of slots for ten ends.
    assert 2.0 / 2 == slots.interval_seconds
    slots.now += 20
    assert 20.0 / 2 == slots.interval_seconds


def test_the_interval_grows_while_the_upstream_hangs() -> None:
    """Good old times do not hide that nothing has ended for a while."""
    slots = Slots().ran(*[1.0] * 10)
    slots.take(*[1] * 6)
    told = []
    for _ in range(5):
        told.append(slots.interval_seconds)
        slots.now += 60
    assert sorted(told) == told
    assert told[-1] > 100 * told[0]


def test_old_times_are_forgotten() -> None:
    """After enough short holds the long ones of before do not count any more."""
    slots = Slots().ran(*[1000.0] * REMEMBERED, *[1.0] * (REMEMBERED - 1))
    slots.take(1)
    assert slots.interval_seconds > 10
    assert REMEMBERED == len(slots.times)
    slots.running.clear()
    slots.now += 1
    slots.times.free(1, slots.now, ended=True)
    slots.take(1)
    assert 1.0 == slots.interval_seconds


def test_asking_changes_nothing() -> None:
    """However often somebody is told, the busy time is counted once."""
    slots = Slots().ran(4)
    slots.take(1)
    slots.now += 2
    assert [6.0] * 3 == [slots.interval_seconds for _ in range(3)]


@given(st.lists(st.tuples(TIMES, st.integers(1, 8)), max_size=2 * REMEMBERED), st.lists(TIMES, max_size=10))
def test_an_estimate_is_finite_and_not_negative(ended: list[tuple[float, int]], gaps: list[float]) -> None:
    """Whatever the history, the estimate is finite and not negative, and no less than what the newest has taken."""
    slots = Slots()
    for seconds, weight in ended:
        slots.ran(seconds, weight=weight)
    for gap in gaps:
        slots.take(1)
        slots.now += gap
    assert 0 <= slots.interval_seconds < math.inf
    if gaps:
        assert slots.interval_seconds * len(gaps) >= gaps[-1] * (1 - 1e-6) - 1e-6


# -- coming back ----------------------------------------------------------------------------------------------------


def told(returns: Returns, now: float = 0.0, **changes: float) -> int:
    arguments = {"ahead": 0, "grant_interval_seconds": 1.0, "minimum_seconds": 1, "maximum_seconds": 60, **changes}
    arguments["wait_seconds"] = (arguments.pop("ahead") + 1) * arguments["grant_interval_seconds"]
    return returns.retry_after_seconds(now, **arguments)  # type: ignore[arg-type]


def crowded() -> Returns:
    """Many are out, and none of them comes back within the next minute but one."""
    returns = Returns()
    for _ in range(MANY_RETURNS):
        told(returns, minimum_seconds=120, maximum_seconds=120)
    return returns


def likely(grants: int) -> int:
    """The second at which so many grants, one a second, have probably been made."""
    return math.ceil(grants + DEVIATIONS * math.sqrt(grants))


@pytest.mark.parametrize("ahead", [0, 1, 3, 8, 20])
def test_one_is_told_when_who_waits_now_has_probably_been_granted(ahead: int) -> None:
    """As many grants as wait and one more; where many are out, the spread of so many random ends on top."""
    assert ahead + 1 == told(Returns(), ahead=ahead)
    assert likely(ahead + 1) == told(crowded(), ahead=ahead)


def test_care_grows_with_the_number_of_those_who_are_out() -> None:
    """Up to what is enough for many."""
    returns = Returns()
    moments = []
    for out in range(2 * MANY_RETURNS):
        moments.append(told(returns, ahead=24))
        # Put out of the way of the next: what grows is the care, and not the number of those who come earlier.
        returns._due.clear()
        returns._due[1000] = out + 1
    expected = [math.ceil(25 + DEVIATIONS * min(1, out / MANY_RETURNS) * 5) for out in range(2 * MANY_RETURNS)]
    assert expected == moments


def test_a_second_that_fits_exactly_is_not_too_early() -> None:
    """Four grants of a second each and their spread are eight seconds, not nine."""
    assert 4 + DEVIATIONS * 2 == told(crowded(), ahead=3)
    assert 4 + DEVIATIONS * 2 + 1 == told(crowded(), ahead=3, grant_interval_seconds=1.0001)


def test_faster_grants_bring_them_back_earlier() -> None:
    """The moment is a time and not a number of places."""
    assert 16 / 4 == told(Returns(), ahead=15, grant_interval_seconds=0.25)
    assert math.ceil(likely(16) / 4) == told(crowded(), ahead=15, grant_interval_seconds=0.25)


def test_the_second_behind_the_maximum_is_not_told() -> None:
    """Although it would be the first that is likely."""
    assert told(Returns(), ahead=59) == 60
    assert told(Returns(), ahead=60) <= 60


def test_places_are_kept_free_for_all_who_come_earlier() -> None:
    """Those who come back before anybody of now has been granted have had their places by then."""
    returns = Returns()
    returns._due.update({1: 2, 4: 1, 50: 1})
    # Two and one before the fifth second, each with its part of a newcomer, then one grant of five seconds.
    expected = 5 + 3 * (1 + NEWCOMERS_PER_RETURN * 4 / MANY_RETURNS)
    spread = DEVIATIONS * 4 / MANY_RETURNS * math.sqrt(expected)
    assert math.ceil(expected + spread) == told(returns, ahead=4) < 50


def test_each_is_told_a_place_of_its_own() -> None:
    """Who is refused later comes back later, when those before it have had their places and newcomers theirs."""
    returns = crowded()
    moments: list[int] = []
    for _ in range(12):
        moments.append(told(returns))
        earlier = sum(moment <= moments[-1] for moment in moments[:-1])
        assert moments[-1] == max(moments)
        grants = 1 + (1 + NEWCOMERS_PER_RETURN) * earlier
        assert moments[-1] >= grants + DEVIATIONS * math.sqrt(grants)
    assert likely(1 + 11 * (1 + NEWCOMERS_PER_RETURN)) == moments[-1]


def test_a_few_do_not_leave_much_idle() -> None:
    """One slot of a second and one place behind it: three who are refused come back hardly slower than it serves."""
    returns = Returns()
    assert [2, 4, 6] == [told(returns, ahead=1) for _ in range(3)]


def test_who_has_come_back_counts_no_more() -> None:
    """A moment that is over, this very second included, is nobody's any more."""
    first = told(Returns(), ahead=3)
    for now, counts in ((100.9, True), (100.5 + first - 1, True), (100.5 + first, False), (200.0, False)):
        returns = Returns()
        assert first == told(returns, now=100.5, ahead=3)
        assert counts == (told(returns, now=now, ahead=3) > first)


def test_moments_are_those_of_the_clock() -> None:
    """One who is refused a second later and told a second less comes back in the same second, and so is counted."""
    one, other = Returns(), Returns()
    told(one, now=10.9)
    told(one, now=11.1, ahead=20)
    told(other, now=11.1, ahead=20)
    assert told(one, now=12.0, ahead=20) >= told(other, now=12.0, ahead=20)


@pytest.mark.parametrize(
    ("interval_seconds", "expected"), [(0.0, 5), (1e-6, 5), (2.0, 6), (2.1, 7), (19 / 3, 19), (20 / 3, 20), (21, 20)]
)
def test_retry_after_is_whole_and_bounded(interval_seconds: float, expected: int) -> None:
    """Rounded up, so that nobody comes back too early, and never outside what the operator allows."""
    assert expected == told(crowded(), grant_interval_seconds=interval_seconds, minimum_seconds=5, maximum_seconds=20)


def test_one_bound_for_both_is_that() -> None:
    """An operator may want one number and no other."""
    assert [7] * 20 == [told(returns, minimum_seconds=7, maximum_seconds=7) for returns in [Returns()] * 20]


def test_who_comes_back_too_early_for_the_minimum_counts() -> None:
    """Those due before the minimum will have had their places by then."""
    returns = Returns()
    for _ in range(10):
        told(returns)
    alone, behind = told(Returns(), minimum_seconds=20), told(returns, minimum_seconds=20)
    assert (20, True) == (alone, behind > 20)


def test_beyond_the_maximum_they_are_spread_over_the_later_half() -> None:
    """There is no right moment for them, only a crowd to be avoided; the later half is the better one."""
    returns = Returns()
    moments = [told(returns, grant_interval_seconds=1000, minimum_seconds=2, maximum_seconds=20) for _ in range(33)]
    assert list(range(20, 9, -1)) * 3 == moments


def test_the_maximum_itself_can_be_the_right_moment() -> None:
    """Where many come back in each second, two may be told the last one before anybody has to be told a wrong one."""
    returns = crowded()
    moments = [told(returns, ahead=165, grant_interval_seconds=0.1, maximum_seconds=20) for _ in range(2)]
    assert [20, 20] == moments


def test_what_is_over_is_forgotten() -> None:
    """A gate that refuses for days remembers the seconds of the next minute."""
    returns = Returns()
    for second in range(1000):
        told(returns, now=second, ahead=second % 50)
    assert len(returns._due) <= 60


def test_the_later_half_begins_no_earlier_than_the_minimum() -> None:
    """Bounds that are close together leave only what is between them."""
    returns = Returns()
    moments = [told(returns, grant_interval_seconds=1000, minimum_seconds=18, maximum_seconds=20) for _ in range(6)]
    assert [20, 19, 18, 20, 19, 18] == moments


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 100), TIMES), max_size=50),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_whatever_is_told_is_within_the_bounds(
    refusals: list[tuple[float, int, float]], one_bound: int, other_bound: int
) -> None:
    """At any time, behind anybody, at any pace."""
    minimum, maximum = sorted((one_bound, other_bound))
    returns, now = Returns(), 0.0
    for gap, ahead, interval in refusals:
        now += gap
        assert (
            minimum
            <= told(
                returns,
                now=now,
                ahead=ahead,
                grant_interval_seconds=interval,
                minimum_seconds=minimum,
                maximum_seconds=maximum,
            )
            <= maximum
        )
