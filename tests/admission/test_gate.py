"""The gate, with a clock that is turned by hand: grants and refusals as calls, deadlines, drain, Retry-After."""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiogw.admission.door import Gate
from aiogw.admission.estimate import ENOUGH, REMEMBERED, UNKNOWN_SLOT_SECONDS
from aiogw.admission.gate import POSITIONS_SECONDS, Admission, UpstreamGate
from aiogw.admission.queue import TicketState
from aiogw.admission.readings import EndpointStatistics, GateStatistics, Limits, Outlook
from aiogw.errors import (
    Draining,
    GatewayError,
    InternalFault,
    Occupancy,
    QueueFull,
    QueuePlacesTaken,
    QueueTimeout,
    QueueTooSlow,
    Refusal,
    TooManySequences,
)


class Timer:
    def __init__(self, when: float, callback: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.when = when
        self.callback = callback
        self.arguments = arguments
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class HandTurnedLoop:
    """The three members of an event loop that the gate uses; time passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._number = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., None], *arguments: Any) -> Timer:
        timer = Timer(when, callback, arguments)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, timer))
        return timer

    def call_later(self, delay: float, callback: Callable[..., None], *arguments: Any) -> Timer:
        return self.call_at(self.now + delay, callback, *arguments)

    def pass_time(self, seconds: float) -> None:
        """Time passes, but what is due has not run yet: the state in which a tick of a real loop begins."""
        self.now += seconds

    def run_due(self) -> None:
        while self._timers and self._timers[0][0] <= self.now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled:
                timer.callback(*timer.arguments)

    def advance(self, seconds: float) -> None:
        self.pass_time(seconds)
        self.run_due()

    @property
    def armed(self) -> int:
        return sum(not timer.cancelled for _when, _number, timer in self._timers)


class Caller:
    """One request: enters, and notes what it is told, in the order in which all of them are."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name = name
        self.told = told
        self.error: GatewayError | None = None
        self.on_granted: Callable[[Admission], None] = lambda admission: None
        self.on_refused: Callable[[GatewayError], None] = lambda error: None
        self.admission: Admission

    def granted(self, admission: Admission) -> None:
        self.told.append(f"{self.name} granted")
        self.admission = admission
        self.on_granted(admission)

    def refused(self, error: GatewayError) -> None:
        self.told.append(f"{self.name} {error.code}")
        self.error = error
        self.on_refused(error)


class House:
    """A gate, its clock and its callers."""

    def __init__(self, **changes: Any) -> None:
        limits: dict[str, Any] = {
            "cap": 2,
            "largest": changes.get("cap", 2),
            "queue_limit": 3,
            "queue_timeout_seconds": 60,
            "retry_after_min_seconds": 1,
            "retry_after_max_seconds": 60,
            "abort_settle_seconds": 0,
            **changes,
        }
        self.loop = HandTurnedLoop()
        self.gate = UpstreamGate(
            loop=self.loop,  # type: ignore[arg-type]
            upstream="reasoning",
            limits=None if limits["cap"] is None else Limits(**limits),
        )
        self.told: list[str] = []

    def enter(
        self,
        name: str = "x",
        weight: int = 1,
        holder: str | None = None,
        places: int | None = None,
        **reactions: Callable[[Any], None],
    ) -> Caller:
        caller = Caller(name, self.told)
        for reaction, call in reactions.items():
            setattr(caller, reaction, call)
        caller.admission = self.gate.enter(weight, caller.granted, caller.refused, holder, places)
        return caller

    def fill(self, names: str) -> list[Caller]:
        """One caller for each letter."""
        callers = [self.enter(name) for name in names]
        self.told.clear()
        return callers

    def statistics(self, **changes: Any) -> GateStatistics:
        """What is expected of ``self.gate.statistics()``."""
        held = changes.get("slots_in_use", 0) + changes.get("slots_settling", 0)
        return GateStatistics(
            **{
                "endpoints": {"": EndpointStatistics(left_out=False, slots=None, slots_in_use=held)},
                "cap": 2,
                "configured_cap": changes.get("cap", 2),
                "slots_in_use": 0,
                "slots_settling": 0,
                "queue_limit": 3,
                "waiting": 0,
                "queue_timeout_seconds": 60,
                "refuses": None,
                "ends": 0,
                "oldest_wait_seconds": 0.0,
                "grants_total": 0,
                "refusals_total": {},
                **changes,
            }
        )


@pytest.fixture
def house() -> House:
    return House()


def give_up(_anything: Any) -> None:
    raise RuntimeError("the callback's own mistake")


# -- grants ---------------------------------------------------------------------------------------------------------


def test_a_free_slot_is_granted_inside_enter(house: House) -> None:
    """With a slot free the request is on its way before ``enter`` returns, and no timer is left behind."""
    caller = house.enter("a")
    assert ["a granted"] == house.told
    assert (TicketState.HOLDING, False, 1) == (
        caller.admission.state,
        caller.admission.waited,
        caller.admission.position,
    )
    assert 0 == house.loop.armed


def test_granted_gets_the_admission_that_enter_returns(house: House) -> None:
    """A callback can leave with what it is given, before ``enter`` has returned it."""
    given: list[Admission] = []
    caller = house.enter("a", on_granted=given.append)
    assert [caller.admission] == given


def test_a_leave_grants_the_next_in_the_same_call(house: House) -> None:
    """When ``leave`` returns, the next request in line has its slot, and its timer is gone."""
    a, _b, c, d = house.fill("abcd")
    assert [(TicketState.WAITING, True, 1), (TicketState.WAITING, True, 2)] == [
        (admission.state, admission.waited, admission.position) for admission in (c.admission, d.admission)
    ]
    a.admission.leave()
    assert ["c granted"] == house.told
    assert 1 == house.loop.armed
    house.loop.advance(61)
    assert ["c granted", "d queue_timeout"] == house.told


def test_leaving_again_frees_nothing(house: House) -> None:
    """Every end of a request may call ``leave``; the slot is given back once."""
    a, _b, _c, _d = house.fill("abcd")
    for _ in range(3):
        a.admission.leave()
    assert ["c granted"] == house.told
    assert 2 == house.gate.statistics().slots_in_use


def test_who_leaves_the_queue_is_told_nothing(house: House) -> None:
    """A client that has left has no callback to come: no grant, no refusal, no deadline."""
    a, b, c, _d = house.fill("abcd")
    c.admission.leave()
    a.admission.leave()
    b.admission.leave()
    house.loop.advance(100)
    assert ["d granted"] == house.told


def test_a_grant_that_leaves_at_once_hands_on_its_slot(house: House) -> None:
    """A request whose client is gone gives the slot back inside its grant, and the next gets it in the same call."""
    a, _b = house.fill("ab")
    house.enter("c", on_granted=Admission.leave)
    house.enter("d")
    house.told.clear()
    a.admission.leave()
    assert ["c granted", "d granted"] == house.told


def test_thousands_of_grants_that_leave_at_once_are_a_loop() -> None:
    """As many grants as you like can fail one after another: no recursion, and each is called once, in order."""
    house = House(cap=1, queue_limit=10_000)
    first = house.enter("first")
    for number in range(10_000):
        house.enter(str(number), on_granted=Admission.leave)
    house.told.clear()
    first.admission.leave()
    assert [f"{number} granted" for number in range(10_000)] == house.told
    assert house.statistics(cap=1, queue_limit=10_000, grants_total=10_001, ends=REMEMBERED) == house.gate.statistics()


def test_a_grant_may_enter_again(house: House) -> None:
    """A callback that brings a new request meets the gate in order: the newcomer queues behind who waits."""
    a, _b = house.fill("ab")
    house.enter("c", on_granted=lambda _admission: house.enter("e") and None)
    house.enter("d")
    house.told.clear()
    a.admission.leave()
    assert ["c granted"] == house.told
    assert 2 == house.gate.statistics().waiting


def test_a_grant_may_end_another_request(house: House) -> None:
    """A request that was booked its slot in the same step, and is made to leave before its turn, is not called."""
    heavy = house.enter("heavy", weight=2)
    house.enter("a", on_granted=lambda _admission: b.admission.leave())
    b = house.enter("b")
    house.enter("c")
    house.told.clear()
    heavy.admission.leave()
    assert ["a granted", "c granted"] == house.told
    assert 2 == house.gate.statistics().slots_in_use


def test_a_heavy_request_takes_as_many_slots(house: House) -> None:
    """Two sequences are two slots, and nobody overtakes who waits for two."""
    a = house.enter("a")
    house.enter("heavy", weight=2)
    house.enter("light")
    assert ["a granted"] == house.told
    a.admission.leave()
    assert ["a granted", "heavy granted"] == house.told
    assert 2 == house.gate.statistics().slots_in_use


# -- callbacks that raise -------------------------------------------------------------------------------------------


def test_a_grant_that_raises_ends_its_own_request_only(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """The slot goes on to the next, the one who raised is told of a bug, and the log has it with its traceback."""
    a, _b = house.fill("ab")
    c = house.enter("c", on_granted=give_up)
    house.enter("d")
    house.told.clear()
    a.admission.leave()
    assert ["c granted", "c internal_error", "d granted"] == house.told
    assert isinstance(c.error, InternalFault)
    assert TicketState.LEFT is c.admission.state
    assert 2 == house.gate.statistics().slots_in_use
    (record,) = caplog.records
    assert record.exc_info
    assert "reasoning" in record.getMessage()


def test_a_grant_that_raises_inside_enter_is_not_the_callers(house: House) -> None:
    """``enter`` returns an admission that has left, instead of raising what its callback raised."""
    caller = house.enter("a", on_granted=give_up)
    assert ["a granted", "a internal_error"] == house.told
    assert TicketState.LEFT is caller.admission.state
    assert 0 == house.gate.statistics().slots_in_use


def test_a_grant_that_leaves_and_then_raises_frees_its_slot_once(house: House) -> None:
    """Both ends of one request in one callback are still one slot."""

    def leave_and_give_up(admission: Admission) -> None:
        admission.leave()
        give_up(admission)

    a, _b = house.fill("ab")
    house.enter("c", on_granted=leave_and_give_up)
    house.enter("d")
    house.enter("e")
    house.told.clear()
    a.admission.leave()
    assert ["c granted", "c internal_error", "d granted"] == house.told
    assert (2, 1) == (house.gate.statistics().slots_in_use, house.gate.statistics().waiting)


def test_a_refusal_that_raises_keeps_nothing_from_the_others(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """One request that cannot bear its refusal neither stops the drain nor keeps a slot from who is next."""
    a, _b = house.fill("ab")
    house.enter("c", on_granted=give_up, on_refused=give_up)
    house.enter("d", on_refused=give_up)
    house.enter("e", on_refused=give_up)
    house.told.clear()
    a.admission.leave()
    assert ["c granted", "c internal_error", "d granted"] == house.told
    house.gate.drain()
    assert ["c granted", "c internal_error", "d granted", "e draining"] == house.told
    assert 3 == len(caplog.records)


# -- deadlines ------------------------------------------------------------------------------------------------------


def test_a_deadline_refuses(house: House) -> None:
    """Whoever has waited for the whole time is told how long that was, and the place in the queue is free."""
    _a, _b, c = house.fill("abc")
    house.loop.advance(59.999)
    assert [] == house.told
    house.loop.advance(0.001)
    assert ["c queue_timeout"] == house.told
    assert isinstance(c.error, QueueTimeout)
    assert ("reasoning", 60) == (c.error.upstream, c.error.waited_seconds)
    assert c.admission.granted_at is None
    assert house.statistics(slots_in_use=2, grants_total=2, refusals_total={"queue_timeout": 1}) == (
        house.gate.statistics()
    )


def test_a_wait_is_told_in_milliseconds(house: House) -> None:
    """A timer that runs a little late does not make for a number with fifteen digits."""
    _a, _b, c = house.fill("abc")
    house.loop.advance(60.0123456)
    assert isinstance(c.error, QueueTimeout)
    assert 60.012 == c.error.waited_seconds


def test_each_request_has_its_own_deadline(house: House) -> None:
    """The deadline is set at entry and not when a request comes to be the head."""
    house.fill("ab")
    for name in "cde":
        house.enter(name)
        house.loop.advance(20)
    assert ["c queue_timeout"] == house.told
    house.loop.advance(20)
    assert ["c queue_timeout", "d queue_timeout"] == house.told


def test_a_deadline_that_is_due_is_not_followed_by_a_grant(house: House) -> None:
    """A slot that becomes free in the tick of the deadline, before its timer ran, goes past the one who is late."""
    a, _b, c = house.fill("abc")
    house.loop.pass_time(30)
    d = house.enter("d")
    house.loop.pass_time(30)
    a.admission.leave()
    assert ["c queue_timeout", "d granted"] == house.told
    house.loop.run_due()
    assert ["c queue_timeout", "d granted"] == house.told
    assert (TicketState.LEFT, TicketState.HOLDING) == (c.admission.state, d.admission.state)
    assert 0 == house.loop.armed


def test_a_grant_just_before_the_deadline_holds(house: House) -> None:
    """Once granted there is no deadline any more, however long the request runs."""
    a, _b, _c = house.fill("abc")
    house.loop.pass_time(59.999)
    a.admission.leave()
    house.loop.advance(10_000)
    assert ["c granted"] == house.told


def test_a_deadline_frees_the_way(house: House) -> None:
    """When a heavy head gives up, those behind it that fit are granted in the same call."""
    house.enter("a")
    house.enter("heavy", weight=2)
    house.loop.pass_time(1)
    house.enter("light")
    house.told.clear()
    house.loop.advance(59)
    assert ["light granted", "heavy queue_timeout"] == house.told


def test_all_deadlines_in_one_tick(house: House) -> None:
    """Many can be late at once; each is told once, and a slot freed among them stays free."""
    a, _b, *_waiting = house.fill("abcde")
    house.loop.pass_time(60)
    a.admission.leave()
    house.loop.run_due()
    assert ["c queue_timeout", "d queue_timeout", "e queue_timeout"] == house.told
    assert 1 == house.gate.statistics().slots_in_use
    house.enter("f")
    assert "f granted" == house.told[-1]


async def test_a_deadline_on_a_real_loop() -> None:
    """asyncio's own timer refuses, within a few milliseconds of the deadline."""
    loop = asyncio.get_running_loop()
    limits = Limits(
        cap=1,
        largest=1,
        queue_limit=1,
        queue_timeout_seconds=0.02,
        retry_after_min_seconds=1,
        retry_after_max_seconds=60,
        abort_settle_seconds=0,
    )
    gate = UpstreamGate(loop=loop, upstream="reasoning", limits=limits)
    gate.enter(1, lambda _admission: None, give_up)
    refused: asyncio.Future[GatewayError] = loop.create_future()
    started = loop.time()
    gate.enter(1, give_up, refused.set_result)
    async with asyncio.timeout(5):
        error = await refused
    assert isinstance(error, QueueTimeout)
    assert 0.015 < loop.time() - started < 2


# -- refusals at entry ----------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_at_once(house: House) -> None:
    """What is raised names the numbers; nobody who was there before is touched."""
    house.fill("abcde")
    with pytest.raises(QueueFull) as caught:
        house.enter("f")
    found = Occupancy(slots_in_use=2, slots_settling=0, cap=2, waiting=3, queue_limit=3)
    assert ("reasoning", found) == (caught.value.upstream, caught.value.occupancy)
    assert [] == house.told
    refused = {"refuses": "queue_full", "refusals_total": {"queue_full": 1}}
    assert house.statistics(slots_in_use=2, waiting=3, grants_total=2, **refused) == house.gate.statistics()


def test_a_refusal_tells_settling_slots_from_those_in_use() -> None:
    """Together they are what was taken; neither is told twice."""
    house = House(cap=2, queue_limit=0, abort_settle_seconds=1)
    aborted, _ = house.fill("ab")
    aborted.admission.leave(aborted=True)
    with pytest.raises(QueueFull) as caught:
        house.enter("c")
    assert (1, 1, 2) == attrs.astuple(caught.value.occupancy)[:3]


def test_a_request_heavier_than_the_cap_is_refused_at_once(house: House) -> None:
    """It could never be served, so it does not wait, and it says so before the queue is looked at."""
    with pytest.raises(TooManySequences) as caught:
        house.enter("a", weight=3)
    assert ("reasoning", 3, 2) == (caught.value.upstream, caught.value.sequences, caught.value.cap)
    assert {"too_many_sequences": 1} == house.gate.statistics().refusals_total


def test_an_unlimited_upstream_admits_everybody() -> None:
    """Without limits everybody is granted and counted, whatever their weight, and nobody is ever late."""
    house = House(cap=None)
    callers = [house.enter("x", weight=100) for _ in range(100)]
    house.loop.advance(1e9)
    assert ["x granted"] * 100 == house.told
    assert {None} == {caller.admission.position for caller in callers}
    unlimited = {"cap": None, "queue_limit": 0, "queue_timeout_seconds": None}
    assert house.statistics(**unlimited, slots_in_use=10_000, grants_total=100) == house.gate.statistics()
    for caller in callers:
        caller.admission.leave()
    assert 0 == house.gate.statistics().slots_in_use


# -- drain ----------------------------------------------------------------------------------------------------------


def test_a_drain_refuses_who_waits_and_grants_nobody(house: House) -> None:
    """From the newest on, so that no one is granted a slot by another's leaving; who holds a slot keeps it."""
    a, b, c, *_ = house.fill("abcde")
    house.gate.drain()
    assert ["e draining", "d draining", "c draining"] == house.told
    assert isinstance(c.error, Draining)
    assert 1 == c.error.retry_after_seconds
    assert (TicketState.HOLDING, TicketState.HOLDING) == (a.admission.state, b.admission.state)
    assert 0 == house.loop.armed


def test_a_drain_grants_nobody_behind_a_heavy_head(house: House) -> None:
    """Also where a slot is free and only the head's weight keeps the others out."""
    house.enter("a")
    house.enter("heavy", weight=2)
    house.enter("light")
    house.told.clear()
    house.gate.drain()
    assert ["light draining", "heavy draining"] == house.told


def test_a_drain_refuses_newcomers(house: House) -> None:
    """Even with slots free; a gate that drains does not begin again, and draining twice changes nothing."""
    (a,) = house.fill("a")
    house.gate.drain()
    house.gate.drain()
    with pytest.raises(Draining):
        house.enter("b")
    with pytest.raises(Draining):
        house.enter("heavy", weight=3)
    a.admission.leave()
    assert [] == house.told
    expected = house.statistics(grants_total=1, ends=1, refuses="draining", refusals_total={"draining": 2})
    assert expected == house.gate.statistics()


def test_an_unlimited_upstream_drains_as_well() -> None:
    """Newcomers are refused there too."""
    house = House(cap=None)
    house.gate.drain()
    with pytest.raises(Draining):
        house.enter("a")


# -- what is told about it ------------------------------------------------------------------------------------------


def test_statistics_are_read_from_the_state(house: House) -> None:
    """Every number is that of this moment; the two totals only grow."""
    assert house.statistics() == house.gate.statistics()
    a, _b, _c = house.fill("abc")
    house.loop.pass_time(7)
    house.enter("d")
    house.loop.pass_time(3)
    expected = house.statistics(slots_in_use=2, waiting=2, oldest_wait_seconds=10, grants_total=2)
    assert expected == house.gate.statistics()
    a.admission.leave()
    expected = house.statistics(slots_in_use=2, waiting=1, oldest_wait_seconds=3, grants_total=3, ends=1)
    assert expected == house.gate.statistics()


def test_refusals_are_counted_by_their_code(house: House) -> None:
    """Each way to be turned away has a count of its own."""
    house.fill("abcde")
    for weight in (1, 1, 3):
        with pytest.raises(GatewayError):
            house.enter(weight=weight)
    house.loop.advance(60)
    house.gate.drain()
    with pytest.raises(Draining):
        house.enter()
    expected = {"queue_full": 2, "too_many_sequences": 1, "queue_timeout": 3, "draining": 1}
    assert expected == house.gate.statistics().refusals_total


def test_what_was_granted_is_not_counted_as_refused(house: House) -> None:
    """A bug in a grant is counted with the grants; refusals are those whom the gate turned away."""
    house.enter("a", on_granted=give_up)
    assert (1, {}) == (house.gate.statistics().grants_total, house.gate.statistics().refusals_total)


def test_an_outlook_is_place_and_time() -> None:
    """Who waits can be told how many are ahead and about how long it takes; who does not wait, nothing."""
    house = House(queue_limit=10)
    measure(house, held_seconds=10, times=4)
    a, b, c, d, e = house.fill("abcde")
    assert Outlook(ahead=0, estimated_seconds=0.0) == a.admission.outlook()
    # One of two slots becomes free every five seconds.
    assert Outlook(ahead=0, estimated_seconds=5.0) == c.admission.outlook()
    assert Outlook(ahead=2, estimated_seconds=15.0) == e.admission.outlook()
    d.admission.leave()
    house.loop.pass_time(POSITIONS_SECONDS)
    assert 1 == e.admission.outlook().ahead
    for caller in (a, b, e):
        caller.admission.leave()
        assert Outlook(ahead=0, estimated_seconds=0.0) == caller.admission.outlook()


def test_places_are_not_counted_for_everybody_who_asks() -> None:
    """Within a second the count of before is good enough, except for who came after it."""
    house = House(queue_limit=10)
    _a, _b, c, d = house.fill("abcd")
    assert 1 == d.admission.outlook().ahead
    c.admission.leave()
    assert 1 == d.admission.outlook().ahead
    e = house.enter("e")
    assert (1, 0) == (e.admission.outlook().ahead, d.admission.outlook().ahead)


# -- Retry-After ----------------------------------------------------------------------------------------------------


def measure(house: House, *, held_seconds: float, times: int) -> None:
    """Let ``times`` requests hold a slot for so long, one after another."""
    for _ in range(times):
        caller = house.enter("measured")
        house.loop.pass_time(held_seconds)
        caller.admission.leave()


def refused(house: House, *, weight: int = 1) -> Refusal:
    with pytest.raises(Refusal) as caught:
        house.enter("late", weight=weight)
    return caught.value


def test_retry_after_has_the_right_magnitude() -> None:
    """Two slots, each held for ten seconds, four in line: 25 seconds for the next."""
    house = House(cap=2, queue_limit=4)
    measure(house, held_seconds=10, times=ENOUGH - 1)
    house.fill("abcdef")
    error = refused(house)
    assert 25.0 == error.estimated_seconds
    assert 25 == error.retry_after_seconds


def test_a_heavy_request_is_estimated_by_its_slots() -> None:
    """Requests that held two slots for ten seconds each, on two slots: one is granted every ten seconds."""
    house = House(cap=2, queue_limit=4)
    for _ in range(2):
        heavy = house.enter("heavy", weight=2)
        house.loop.pass_time(10)
        heavy.admission.leave()
    heavy = house.enter("heavy", weight=2)
    assert 10.0 == house.gate.place_seconds()
    house.loop.pass_time(12)
    # Twenty seconds for two ends, and the third has run for twelve: 64 seconds of slots.
    assert 16.0 == house.gate.place_seconds()
    heavy.admission.leave()
    assert 0.0 == house.gate.place_seconds()


def test_slots_are_waited_for_and_not_requests() -> None:
    """Three slots of ten seconds, and in line two that want all of them: each waits for as many ends as it wants."""
    house = House(cap=3, queue_limit=2, queue_timeout_seconds=1000)
    measure(house, held_seconds=10, times=ENOUGH)
    house.fill("abc")
    heavies = [house.enter(name, weight=3) for name in "de"]
    assert [10.0, 20.0] == [one.admission.outlook().estimated_seconds for one in heavies]
    light = refused(house)
    assert 70 / 3 == pytest.approx(light.estimated_seconds)
    heavy = refused(house, weight=3)
    assert 30.0 == pytest.approx(heavy.estimated_seconds)
    assert heavy.retry_after_seconds > light.retry_after_seconds
    assert 70 / 9 == pytest.approx(house.gate.place_seconds())
    heavies[0].admission.leave()
    assert 40 / 6 == pytest.approx(house.gate.place_seconds())


def test_a_heavy_request_without_a_place_of_its_own_is_told_so() -> None:
    """Whose holder has too many waiting is told the time for all the slots it wants."""
    house = House(cap=2, queue_limit=5)
    house.enter("a", weight=2)
    with pytest.raises(QueuePlacesTaken) as caught:
        house.enter("b", weight=2, holder="x", places=0)
    assert caught.value.retry_after_seconds == UNKNOWN_SLOT_SECONDS
    house.loop.pass_time(10)
    with pytest.raises(QueuePlacesTaken) as late:
        house.enter("c", weight=2, holder="x", places=0)
    assert late.value.retry_after_seconds == 10


def test_a_heavy_request_that_would_time_out_is_refused_at_entry() -> None:
    """In the same place a light one may wait."""
    house = House(cap=3, queue_limit=9, queue_timeout_seconds=60)
    measure(house, held_seconds=50, times=ENOUGH)
    house.fill("abcd")
    with pytest.raises(QueueTooSlow) as caught:
        house.enter("heavy", weight=3)
    assert 200 / 3 == pytest.approx(caught.value.estimated_seconds)
    house.enter("e")
    assert 2 == house.gate.statistics().waiting


def test_what_is_free_already_is_not_waited_for() -> None:
    """Of three slots one is free, and the head wants two: one more has to become so."""
    house = House(cap=3, queue_limit=9, queue_timeout_seconds=1000)
    measure(house, held_seconds=10, times=ENOUGH)
    house.fill("ab")
    head = house.enter("head", weight=2)
    assert Outlook(ahead=0, estimated_seconds=5.0) == head.admission.outlook()
    assert Outlook(ahead=1, estimated_seconds=10.0) == house.enter("next").admission.outlook()


def test_where_nobody_waits_there_is_a_pace_all_the_same() -> None:
    """Status asks every gate for it, also one without a cap."""
    house = House(cap=None)
    assert 0.0 == house.gate.place_seconds()
    house.enter("a")
    house.loop.pass_time(4)
    assert 4.0 == house.gate.place_seconds()


def test_before_an_end_a_heavy_request_has_used_all_its_slots() -> None:
    """Its age alone would make two slots look twice as fast as they are."""
    house = House(cap=2)
    house.enter("heavy", weight=2)
    house.loop.pass_time(10)
    assert 10.0 == house.gate.place_seconds()


def test_who_is_put_back_holds_nothing_and_has_not_ended() -> None:
    """A request whose endpoint has gone uses no slots while it waits again, and says nothing of how long one takes."""
    house = House(cap=2)
    house.gate.set_endpoints({"x": 1, "y": 2})
    stays, gone = house.fill("ab")
    assert ("y", "x") == (stays.admission.endpoint, gone.admission.endpoint)
    house.loop.pass_time(4)
    house.gate.set_endpoints({"y": 2})
    assert gone.admission.put_back()
    house.loop.pass_time(4)
    # Nothing has ended, and the one that holds its slot has done so for eight seconds.
    assert 8.0 == house.gate.place_seconds()
    stays.admission.leave()
    # One end after eight seconds, and four that were spent in vain.
    assert 12.0 == house.gate.place_seconds()


def test_those_who_are_refused_together_come_back_apart() -> None:
    """A crowd that meets a full queue is told more and more, and the estimate that all of them hear is the same."""
    house = House(cap=2, queue_limit=4)
    measure(house, held_seconds=2, times=ENOUGH)
    house.fill("abcdef")
    errors = [refused(house) for _ in range(6)]
    told = [error.retry_after_seconds for error in errors]
    assert sorted(set(told)) == told
    assert {errors[0].estimated_seconds} == {error.estimated_seconds for error in errors}


def test_retry_after_grows_while_the_upstream_hangs() -> None:
    """Nothing ends any more, so the estimate leaves the good old times behind, until the maximum."""
    house = House(cap=2, queue_limit=4, queue_timeout_seconds=10_000)
    measure(house, held_seconds=1, times=ENOUGH - 1)
    house.fill("abcdef")
    told = []
    for _ in range(10):
        told.append(refused(house).retry_after_seconds)
        house.loop.pass_time(3)
    assert sorted(told) == told
    assert told[0] <= 7
    assert 60 == told[-1]
    assert len(set(told)) > 3


@pytest.mark.parametrize(("held_seconds", "expected"), [(0.001, 5), (1000, 20)])
def test_retry_after_stays_within_its_bounds(held_seconds: float, expected: int) -> None:
    """Neither a very fast nor a very slow upstream makes it leave what the operator configured."""
    house = House(retry_after_min_seconds=5, retry_after_max_seconds=20, queue_timeout_seconds=10_000)
    measure(house, held_seconds=held_seconds, times=3)
    house.fill("abcde")
    assert expected == refused(house).retry_after_seconds


def test_retry_after_before_anything_has_ended() -> None:
    """With nothing measured about the minimum is told at first, and what runs counts from then on; no wait is told."""
    house = House(cap=2, queue_limit=0, retry_after_min_seconds=2)
    house.fill("ab")
    assert 2 == refused(house).retry_after_seconds
    house.loop.pass_time(10)
    # Two that have run for ten seconds each, and no end: ten seconds for an end, of one slot in two.
    error = refused(house)
    assert error.estimated_seconds is None
    assert 5 == error.retry_after_seconds


def test_nobody_is_told_a_wait_before_anything_has_ended() -> None:
    """With a first end there is something to tell; whoever has given up in the queue is no such end."""
    house = House(cap=1, queue_limit=3)
    first, left, second, _ = house.fill("abcd")
    left.admission.leave()
    house.loop.pass_time(10)
    assert Outlook(ahead=0, estimated_seconds=None) == second.admission.outlook()
    house.loop.advance(2)
    first.admission.leave()
    third = house.enter("e")
    assert Outlook(ahead=1, estimated_seconds=24.0) == third.admission.outlook()
    assert (1, False) == (house.gate.statistics().ends, house.gate.statistics().estimates_measured)


def test_a_timeout_has_a_retry_after_as_well() -> None:
    """Who waited in vain is told an estimate of then and not of the entry."""
    house = House(cap=2, queue_limit=4)
    measure(house, held_seconds=10, times=1)
    *_, last = house.fill("abc")
    house.loop.advance(60)
    assert isinstance(last.error, QueueTimeout)
    assert 60 == last.error.retry_after_seconds
    # Ten seconds of before and twice sixty for the one end, from two slots.
    assert 65.0 == last.error.estimated_seconds


def test_who_would_only_time_out_is_refused_at_entry() -> None:
    """With enough measured, a wait beyond the deadline is refused while that is still an honest status."""
    house = House(queue_timeout_seconds=60, queue_limit=100)
    measure(house, held_seconds=40, times=ENOUGH)
    # 20 s to the next free slot for each in line: the third would wait exactly 60 s.
    house.fill("abcd")
    assert house.gate.statistics().refuses is None
    house.fill("e")
    assert "queue_too_slow" == house.gate.statistics().refuses
    error = refused(house)
    assert isinstance(error, QueueTooSlow)
    assert (80, 60) == (error.estimated_seconds, error.queue_timeout_seconds)
    assert {"queue_too_slow": 1} == house.gate.statistics().refusals_total
    assert [] == house.told


def test_who_would_fit_but_has_to_wait_is_refused_as_well() -> None:
    """Behind a heavy head even a light request waits, so the estimate counts for it, too."""
    house = House(queue_timeout_seconds=60)
    measure(house, held_seconds=50, times=ENOUGH)
    house.enter("a")
    # At 50 s until the one that runs has ended, the heavy one may wait; behind it, it would be 100 s.
    house.enter("heavy", weight=2)
    error = refused(house)
    assert isinstance(error, QueueTooSlow)
    assert 100 == error.estimated_seconds


def test_who_heads_the_queue_is_refused_as_well() -> None:
    """Nobody waits yet, but a slot is too far away, or too few are free for a heavy request."""
    house = House(queue_timeout_seconds=60)
    measure(house, held_seconds=1000, times=ENOUGH)
    house.enter("a")
    with pytest.raises(QueueTooSlow):
        house.enter("heavy", weight=2)
    house.enter("b")
    assert isinstance(refused(house), QueueTooSlow)


def test_a_few_measurements_are_no_reason_to_refuse() -> None:
    """Before enough requests have ended, an estimate is for Retry-After only, and everybody may try the queue."""
    house = House(queue_timeout_seconds=60)
    measure(house, held_seconds=1000, times=ENOUGH - 1)
    house.fill("abcde")
    assert 3 == house.gate.statistics().waiting
    assert {} == house.gate.statistics().refusals_total


def test_a_full_queue_is_called_full_however_slow_the_upstream() -> None:
    """Where there is no place, that is the reason."""
    house = House(queue_timeout_seconds=60, queue_limit=1)
    measure(house, held_seconds=100, times=ENOUGH)
    house.fill("abc")
    assert isinstance(refused(house), QueueFull)


def test_a_free_slot_is_granted_however_slow_the_upstream() -> None:
    """The estimate is about waiting: who need not wait is never refused for it."""
    house = House(queue_timeout_seconds=1)
    measure(house, held_seconds=1000, times=2 * ENOUGH)
    for name in ("a granted", "b granted"):
        house.enter(name[0])
        assert name == house.told[-1]


# -- all the gates --------------------------------------------------------------------------------------------------


def test_gates_are_found_by_their_address() -> None:
    """Each address has its own slots, all drain together, and an address nobody configured is a mistake."""
    houses = {address: House(cap=1, queue_limit=1) for address in ("one:80", "two:80")}
    gate = Gate({address: house.gate for address, house in houses.items()})
    told: list[str] = []
    callers = {address: Caller(address, told) for address in houses}
    for address, caller in callers.items():
        gate.enter(address, 1, granted=caller.granted, refused=caller.refused)
    assert ["one:80 granted", "two:80 granted"] == told
    waiting = Caller("waiting", told)
    gate.enter("two:80", 1, granted=waiting.granted, refused=waiting.refused)
    assert (0, 1) == tuple(house.gate.statistics().waiting for house in houses.values())
    gate.drain()
    assert "waiting draining" == told[-1]
    for address in houses:
        with pytest.raises(Draining):
            gate.enter(address, 1, granted=give_up, refused=give_up)
    with pytest.raises(KeyError):
        gate.enter("three:80", 1, granted=give_up, refused=give_up)


# -- any history ----------------------------------------------------------------------------------------------------

REACTIONS = st.sampled_from(["nothing", "nothing", "nothing", "leave", "raise", "enter", "leave, enter and raise"])


# -- the share of a holder --------------------------------------------------------------------------------------------


def test_a_holder_has_so_many_places_and_no_more() -> None:
    """One more of its requests is refused, with a time to come back; those of others go on as before, in order."""
    house = House(cap=1, queue_limit=5, retry_after_min_seconds=20)
    house.enter("a", holder="x", places=2)
    house.enter("b", holder="x", places=2)
    house.enter("c", holder="y", places=1)
    house.enter("d", holder="x", places=2)
    armed = house.loop.armed
    with pytest.raises(QueuePlacesTaken) as caught:
        house.enter("e", holder="x", places=2)
    assert (caught.value.upstream, caught.value.queue_places) == ("reasoning", 2)
    assert caught.value.retry_after_seconds == 20
    # Nothing is known of how long a slot is held.
    assert caught.value.estimated_seconds is None
    with pytest.raises(QueuePlacesTaken):
        house.enter("f", holder="y", places=1)
    assert house.loop.armed == armed
    assert house.gate.statistics().waiting == 3
    assert house.gate.statistics().refusals_total == {"queue_places_taken": 2}
    house.enter("g")
    house.enter("h", holder="z", places=1)
    assert house.told == ["a granted"]
    with pytest.raises(QueueFull):
        house.enter("i", holder="z2", places=1)


@pytest.mark.parametrize("how", ["granted", "leaves", "expires"])
def test_a_place_is_free_again(how: str) -> None:
    """By a grant, by leaving and by a time-out: nothing of it is remembered."""
    house = House(cap=1, queue_timeout_seconds=10)
    a = house.enter("a", holder="x", places=1)
    for name in "bcd":
        waiting = house.enter(name, holder="x", places=1)
        with pytest.raises(QueuePlacesTaken):
            house.enter("no", holder="x", places=1)
        if how == "granted":
            a.admission.leave()
            a = waiting
        elif how == "leaves":
            waiting.admission.leave()
        else:
            house.loop.advance(10)
    house.enter("e", holder="x", places=1)


def test_only_who_waits_takes_a_place() -> None:
    """A holder that may not wait at all is served when there is a slot, as often as there is one."""
    house = House(cap=2)
    house.enter("a", holder="x", places=0)
    house.enter("b", holder="x", places=0)
    assert house.told == ["a granted", "b granted"]
    with pytest.raises(QueuePlacesTaken):
        house.enter("c", holder="x", places=0)
    assert house.gate.statistics().waiting == 0


def test_a_full_queue_is_full_for_everybody() -> None:
    """Whoever has places left and whoever has not are told the same."""
    house = House(cap=1, queue_limit=1)
    house.enter("a")
    house.enter("b", holder="x", places=1)
    for holder in ("x", "y"):
        with pytest.raises(QueueFull):
            house.enter("c", holder=holder, places=1)


def test_nobody_waits_where_there_is_no_gate() -> None:
    """So no share of a queue is ever taken."""
    house = House(cap=None)
    for _ in range(10):
        house.enter(holder="x", places=0)
    assert house.gate.statistics().slots_in_use == 10


class Tracked:
    """One request of the account: what it will do when it is called, and what has happened to it."""

    def __init__(self, machine: GateMachine, number: int, weight: int, reaction: str, holder: str | None) -> None:
        self.machine = machine
        self.number = number
        self.weight = weight
        self.reaction = reaction
        self.holder = holder
        self.deadline = machine.loop.now + machine.timeout_seconds
        self.events: list[str] = []
        self.admission: Admission | None = None

    def granted(self, admission: Admission) -> None:
        machine = self.machine
        assert [] == self.events, "granted after another end"
        assert not machine.draining, "granted during a drain"
        assert machine.loop.now < self.deadline, "granted after the deadline"
        assert self.number > machine.granted_up_to, "granted out of order"
        machine.granted_up_to = self.number
        self.admission = admission
        self.events.append("granted")
        machine.grants += 1
        settling = sum(weight for weight, until in machine.settling if until > machine.loop.now)
        assert machine.slots_in_use() + settling <= machine.cap, "granted above the cap"
        self.react()

    def refused(self, error: GatewayError) -> None:
        if isinstance(error, InternalFault):
            assert "raised" == self.events[-1]
        else:
            assert [] == self.events, "refused after another end"
            self.machine.refusals[error.code] += 1
        assert isinstance(error, Draining) == self.machine.draining
        self.events.append("refused")
        self.react()

    def react(self) -> None:
        if "leave" in self.reaction and self.admission is not None:
            self.leave()
        if "enter" in self.reaction:
            self.machine.take_in(1, "nothing", self.holder)
        if "raise" in self.reaction:
            self.events.append("raised")
            raise RuntimeError(self.reaction)

    def leave(self, *, aborted: bool = False) -> None:
        assert self.admission is not None
        machine = self.machine
        if aborted and machine.settle_seconds and self.holds:
            machine.settling.append((self.weight, machine.loop.now + machine.settle_seconds))
        self.events.append("left")
        self.admission.leave(aborted=aborted)

    @property
    def holds(self) -> bool:
        return ["granted"] == self.events

    @property
    def waits(self) -> bool:
        return [] == self.events


# How many of each holder may wait at once.
PLACES = {"none": 0, "one": 1, "some": 3}


class GateMachine(RuleBasedStateMachine):
    """Requests that come, leave, are late, raise and leave from inside their callbacks, in any order."""

    everybody = Bundle("everybody")

    @initialize(
        cap=st.integers(1, 4),
        queue_limit=st.integers(0, 6),
        timeout_seconds=st.sampled_from([1, 5, 1000]),
        settle_seconds=st.sampled_from([0, 0.5, 4]),
    )
    def open(self, cap: int, queue_limit: int, timeout_seconds: int, settle_seconds: float) -> None:
        house = House(
            cap=cap,
            queue_limit=queue_limit,
            queue_timeout_seconds=timeout_seconds,
            abort_settle_seconds=settle_seconds,
        )
        self.loop, self.gate = house.loop, house.gate
        self.cap, self.queue_limit, self.timeout_seconds = cap, queue_limit, timeout_seconds
        self.settle_seconds = settle_seconds
        # Weight, and time at which it is over, of all aborted requests whose timer has not run.
        self.settling: list[tuple[int, float]] = []
        self.tracked: list[Tracked] = []
        self.entered = 0
        self.grants = 0
        self.refusals: Counter[str] = Counter()
        self.granted_up_to = -1
        self.draining = False

    def slots_in_use(self) -> int:
        return sum(one.weight for one in self.tracked if one.holds)

    def waiting(self) -> list[Tracked]:
        return [one for one in self.tracked if one.waits]

    def take_in(self, weight: int, reaction: str, holder: str | None = None) -> tuple[Tracked, GatewayError | None]:
        request = Tracked(self, self.entered, weight, reaction, holder)
        self.entered += 1
        self.tracked.append(request)
        try:
            request.admission = self.gate.enter(weight, request.granted, request.refused, holder, PLACES.get(holder))
        except GatewayError as error:
            self.refusals[error.code] += 1
            request.events.append("turned away")
            return request, error
        return request, None

    def waiting_of(self, holder: str | None) -> int:
        return sum(one.holder == holder for one in self.waiting())

    @rule(target=everybody, weight=st.integers(1, 5), reaction=REACTIONS, holder=st.sampled_from([None, *PLACES]))
    def enter(self, weight: int, reaction: str, holder: str | None) -> Tracked:
        waiting, waiting_of_holder = len(self.waiting()), self.waiting_of(holder)
        foretold = self.gate.statistics().refuses
        request, error = self.take_in(weight, reaction, holder)
        assert weight > 1 or holder is not None or foretold == (error.code if error else None)
        assert not isinstance(error, QueuePlacesTaken) or waiting_of_holder == PLACES[holder]
        assert self.draining == isinstance(error, Draining)
        assert self.draining or isinstance(error, TooManySequences) == (weight > self.cap)
        assert not isinstance(error, QueueFull) or waiting == self.queue_limit
        assert request.admission is None or waiting + 1 == request.admission.position
        return request

    @rule(request=everybody, aborted=st.booleans())
    def leave(self, request: Tracked, aborted: bool) -> None:
        if request.admission is not None:
            request.leave(aborted=aborted)

    @rule(seconds=st.sampled_from([0.125, 0.5, 1.0, 4.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.loop.pass_time(seconds)

    @rule()
    def run_timers(self) -> None:
        self.loop.run_due()
        self.settling = [(weight, until) for weight, until in self.settling if until > self.loop.now]
        assert all(self.loop.now < one.deadline for one in self.waiting())

    @rule(request=everybody)
    def look(self, request: Tracked) -> None:
        if request.admission is not None:
            outlook = request.admission.outlook()
            assert outlook.estimated_seconds is None or outlook.estimated_seconds >= 0
            assert 0 <= outlook.ahead <= self.queue_limit

    @precondition(lambda self: self.entered > 20)
    @rule()
    def drain(self) -> None:
        self.draining = True
        self.gate.drain()
        assert [] == self.waiting()

    @invariant()
    def the_account_agrees(self) -> None:
        statistics = self.gate.statistics()
        waiting = self.waiting()
        settling = sum(weight for weight, _until in self.settling)
        assert (self.slots_in_use(), settling) == (statistics.slots_in_use, statistics.slots_settling)
        assert statistics.slots_in_use + settling <= self.cap
        assert len(waiting) == statistics.waiting <= self.queue_limit
        assert all(self.waiting_of(holder) <= places for holder, places in PLACES.items())
        # Every request is exactly one of: granted, refused, left while it waited, or still waiting.
        assert (self.grants, self.refusals) == (statistics.grants_total, Counter(statistics.refusals_total))
        assert len(waiting) + len(self.settling) == self.loop.armed
        if waiting:
            assert waiting[0].weight + statistics.slots_in_use + settling > self.cap, "the head would fit"
            assert statistics.oldest_wait_seconds == self.loop.now - (waiting[0].deadline - self.timeout_seconds)

    def teardown(self) -> None:
        for request in getattr(self, "tracked", ()):
            if request.admission is not None:
                request.leave()
                self.the_account_agrees()
        if hasattr(self, "gate"):
            self.loop.pass_time(self.settle_seconds)
            self.run_timers()
            self.the_account_agrees()
            assert (0, 0) == (self.gate.statistics().slots_in_use, self.gate.statistics().waiting)
            turned_away = sum("turned away" in one.events for one in self.tracked)
            ended = sum("granted" in one.events or "refused" in one.events for one in self.tracked)
            left_waiting = sum(one.events[0] == "left" for one in self.tracked)
            assert len(self.tracked) == turned_away + ended + left_waiting


@pytest.fixture
def _no_log() -> Iterator[None]:
    """Thousands of tracebacks that are meant."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# In CI as many as were promised; fewer at the desk, and any number where somebody else counts on it (scripts/mutate).
RUNS = int(os.environ.get("MACHINE_RUNS", "5000" if os.environ.get("CI") else "300"))

TestGateMachine = pytest.mark.usefixtures("_no_log")(GateMachine.TestCase)
TestGateMachine.settings = settings(max_examples=RUNS, stateful_step_count=60, deadline=None)
