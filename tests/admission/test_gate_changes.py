"""The gate while its limits, its name and its endpoints change, and while a grant turns out to lead nowhere."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from test_gate import Caller, House

from aiogw.admission.door import Gate
from aiogw.admission.estimate import ENOUGH
from aiogw.admission.gate import UpstreamGate
from aiogw.admission.queue import TicketState
from aiogw.admission.readings import EndpointStatistics
from aiogw.errors import GatewayError, TooManySequences, UpstreamUnavailable

TWO = {"x": 2, "y": 2}


def house_of(endpoints: dict[str, int | None], **limits: Any) -> House:
    house = House(**limits)
    house.gate.set_endpoints(endpoints)
    return house


def resize(house: House, **changes: Any) -> None:
    gate = house.gate
    assert gate._limits is not None
    gate.resize(upstream="reasoning", limits=evolve(gate._limits, **changes), endpoints=gate._endpoints)


def refusal(house: House, weight: int = 1) -> Any:
    """What a newcomer is told at the door."""
    with pytest.raises(GatewayError) as caught:
        house.enter("newcomer", weight)
    return caught.value


# -- limits ---------------------------------------------------------------------------------------------------------


def test_a_risen_cap_is_filled_before_resize_returns() -> None:
    """In order of arrival, and no further than it reaches."""
    house = House(cap=1, queue_limit=4)
    house.fill("abcd")
    resize(house, cap=3)
    assert ["b granted", "c granted"] == house.told
    assert 1 == house.loop.armed


def test_a_shrunken_cap_takes_nothing_away() -> None:
    """Nothing is granted until what is held has come down below it."""
    house = House(cap=3, queue_limit=4)
    a, b, c, _d = house.fill("abcd")
    resize(house, cap=1)
    assert (3, 1, 1) == (
        house.gate.statistics().slots_in_use,
        house.gate.statistics().cap,
        house.gate.statistics().waiting,
    )
    for caller in (a, b):
        caller.admission.leave()
    assert [] == house.told
    c.admission.leave()
    assert ["d granted"] == house.told


def test_a_shrunken_queue_turns_nobody_away_who_is_in_it() -> None:
    """Newcomers are refused until it is shorter than the new limit."""
    house = House(cap=1, queue_limit=3)
    _a, b, c = house.fill("abc")
    resize(house, queue_limit=1)
    assert 2 == house.gate.statistics().waiting
    assert "queue_full" == refusal(house).code
    b.admission.leave()
    assert "queue_full" == refusal(house).code
    c.admission.leave()
    house.enter("d")
    assert 1 == house.gate.statistics().waiting


def test_deadlines_do_not_move() -> None:
    """Who waits has been promised a time; who comes now is promised the new one."""
    house = House(cap=1, queue_timeout_seconds=10)
    house.fill("ab")
    resize(house, queue_timeout_seconds=100)
    house.enter("c")
    house.loop.advance(10)
    assert ["b queue_timeout"] == house.told
    house.loop.advance(90)
    assert ["b queue_timeout", "c queue_timeout"] == house.told


def test_who_has_become_too_heavy_is_refused_and_blocks_nobody() -> None:
    """With the reason that a newcomer would be given, counted as his would be."""
    house = House(cap=2, largest=4, queue_limit=4)
    house.enter("a")
    heavy = house.enter("b", weight=2)
    house.enter("c")
    house.told.clear()
    resize(house, cap=1)
    assert ["b too_many_sequences"] == house.told
    assert isinstance(heavy.error, TooManySequences)
    assert (2, 1) == (heavy.error.sequences, heavy.error.cap)
    assert {"too_many_sequences": 1} == dict(house.gate.statistics().refusals_total)
    assert (TicketState.LEFT, 1) == (heavy.admission.state, house.loop.armed)


def test_who_is_made_to_leave_by_another_refusal_is_not_refused() -> None:
    """A refusal may end other requests, which are then gone when their turn would come."""
    house = House(cap=3, largest=3, queue_limit=4)
    house.enter("a", weight=3)
    house.enter("b", weight=2, on_refused=lambda _error: other.admission.leave())
    other = house.enter("c", weight=2)
    house.told.clear()
    resize(house, cap=1)
    assert ["b too_many_sequences"] == house.told


def test_another_name_is_told_from_then_on() -> None:
    """In what is refused, as well."""
    house = House(cap=1, queue_limit=0)
    house.enter("a")
    house.gate.resize(upstream="renamed", limits=house.gate._limits, endpoints={"": None})
    assert "renamed" == refusal(house).upstream


def test_no_limits_any_more() -> None:
    """All who wait are let in, and so is everybody who comes."""
    house = House(cap=1)
    house.fill("abc")
    house.gate.resize(upstream="reasoning", limits=None, endpoints={"": None})
    assert ["b granted", "c granted"] == house.told
    assert (None, 3) == (house.gate.statistics().cap, house.gate.statistics().slots_in_use)
    house.enter("d", weight=100)
    assert "d granted" == house.told[-1]


@pytest.mark.parametrize("who", ["holds", "waits", "settles"])
def test_idle_is_who_has_nobody(who: str) -> None:
    """Whether a gate may be forgotten."""
    house = House(cap=1, abort_settle_seconds=1)
    assert house.gate.idle
    first = house.enter("a")
    if who == "settles":
        first.admission.leave(aborted=True)
    elif who == "waits":
        house.enter("b")
    assert not house.gate.idle
    house.gate.drain()
    house.loop.advance(100)
    first.admission.leave()
    assert house.gate.idle


# -- endpoints ------------------------------------------------------------------------------------------------------


def test_endpoints_are_told_with_what_is_held_there() -> None:
    """One that has gone is, too, until the last of it is given back."""
    house = house_of({"x": 2, "y": 4}, cap=5, queue_limit=4)
    callers = [house.enter(str(number)) for number in range(4)]
    assert ["y", "y", "x", "y"] == [caller.admission.endpoint for caller in callers]
    house.gate.set_endpoints({"x": 2})
    assert {
        "x": EndpointStatistics(left_out=False, slots=2, slots_in_use=1),
        "y": EndpointStatistics(left_out=True, slots=None, slots_in_use=3),
    } == house.gate.statistics().endpoints
    for caller in callers:
        caller.admission.leave()
    assert {"x": EndpointStatistics(left_out=False, slots=2, slots_in_use=0)} == house.gate.statistics().endpoints


def test_no_endpoint_at_all() -> None:
    """Who waits is told at once, with a status to come back with; and so is who comes."""
    house = house_of(dict(TWO), cap=2, queue_limit=4)
    house.fill("abc")
    house.gate.set_endpoints({})
    assert ["c upstream_unavailable"] == house.told
    error = refusal(house)
    assert isinstance(error, UpstreamUnavailable)
    assert ("reasoning", "no endpoint with room for it answers") == (error.upstream, error.reason)
    assert {"upstream_unavailable": 2} == dict(house.gate.statistics().refusals_total)
    assert "upstream_unavailable" == house.gate.statistics().refuses


def test_heavier_than_any_endpoint_and_heavier_than_those_that_answer() -> None:
    """The one will never be served; the other may be."""
    house = house_of({"x": 4, "y": 2}, cap=5, largest=4, queue_limit=4)
    error = refusal(house, weight=5)
    assert isinstance(error, TooManySequences)
    assert 4 == error.cap
    house.gate.set_endpoints({"y": 2})
    assert "upstream_unavailable" == refusal(house, weight=3).code


def test_the_cap_in_force_decides_and_is_told() -> None:
    """With an endpoint out, who could not be served in time is refused at entry, and a full queue says what is full."""
    house = house_of({"x": 4, "y": 4}, cap=6, queue_limit=1, queue_timeout_seconds=10)
    for _ in range(ENOUGH):
        first = house.enter()
        house.loop.advance(40)
        first.admission.leave()
    house.gate.set_endpoints({"x": 4})
    for _ in range(3):
        house.enter()
    assert "queue_too_slow" == refusal(house).code
    house = house_of({"x": 4}, cap=6, largest=6, queue_limit=0)
    for _ in range(3):
        house.enter()
    assert 3 == refusal(house).figures["cap"]


# -- a grant that leads nowhere -------------------------------------------------------------------------------------


def bounced(house: House, caller: Caller) -> bool:
    """Its endpoint refuses connections: everybody is told, then it tries to wait again."""
    left = {name: slots for name, slots in house.gate._endpoints.items() if name != caller.admission.endpoint}
    house.gate.set_endpoints(left)
    return caller.admission.put_back()


def test_who_is_put_back_is_granted_elsewhere_in_the_same_call() -> None:
    """If there is a slot; and that is one more grant."""
    house = house_of(dict(TWO), cap=2)
    a = house.enter("a")
    assert bounced(house, a)
    assert (["a granted", "a granted"], "y") == (house.told, a.admission.endpoint)
    assert (2, 1, 0) == (
        house.gate.statistics().grants_total,
        house.gate.statistics().slots_in_use,
        house.loop.armed,
    )


def test_who_is_put_back_has_its_old_place_and_its_old_deadline() -> None:
    """Before those who came later; the time that it was thought to be served counts as waiting."""
    house = house_of(dict(TWO), cap=2, queue_timeout_seconds=10)
    a, b, _c = house.fill("abc")
    house.loop.advance(4)
    assert bounced(house, a)
    assert [] == house.told
    assert (TicketState.WAITING, True, None) == (a.admission.state, a.admission.waited, a.admission.granted_at)
    assert 0 == a.admission.outlook().ahead
    house.loop.advance(5)
    b.admission.leave()
    assert ["a granted"] == house.told
    house.loop.advance(2)
    assert ["a granted", "c queue_timeout"] == house.told


def test_who_is_put_back_after_its_deadline_is_refused() -> None:
    """Waiting has an end, even for somebody who had already been granted."""
    house = house_of(dict(TWO), cap=2, queue_timeout_seconds=10)
    a = house.enter("a")
    house.loop.advance(10)
    assert bounced(house, a)
    assert ["a granted", "a queue_timeout"] == house.told
    assert 0 == house.gate.statistics().slots_in_use


def test_who_can_not_be_put_back() -> None:
    """Whose endpoint is still one, who holds nothing, whom nobody could serve, and anybody during a drain."""
    house = house_of(dict(TWO), cap=2)
    a, b, c = house.fill("abc")
    assert not a.admission.put_back()
    assert not c.admission.put_back()
    a.admission.leave()
    assert not a.admission.put_back()
    house.gate.set_endpoints({})
    assert not b.admission.put_back()
    assert ["c granted"] == house.told
    house = house_of(dict(TWO), cap=2)
    d = house.enter("d")
    house.gate.drain()
    assert not bounced(house, d)
    assert (TicketState.HOLDING, 1) == (d.admission.state, house.gate.statistics().slots_in_use)


def test_who_leaves_after_being_put_back_holds_nothing_any_more() -> None:
    """Its slots were given back then; the estimate for others is as if it had never been granted."""
    house = house_of(dict(TWO), cap=2)
    a, b, c = house.fill("abc")
    house.loop.advance(4)
    assert bounced(house, a)
    a.admission.leave()
    assert 4 == house.gate.place_seconds()
    assert {c.admission} == set(house.gate._queue.in_line())
    b.admission.leave()
    assert (1, 0) == (house.gate.statistics().slots_in_use, house.gate.statistics().waiting)


def test_who_settles_is_not_put_back() -> None:
    """It is gone, and only its slots are not yet free."""
    house = house_of(dict(TWO), cap=2, abort_settle_seconds=1)
    a = house.enter("a")
    a.admission.leave(aborted=True)
    house.gate.set_endpoints({"y": 2})
    assert not a.admission.put_back()
    assert 1 == house.gate.statistics().slots_settling


# -- the door -------------------------------------------------------------------------------------------------------


def test_gates_are_replaced_and_those_at_work_drained_all_the_same() -> None:
    """A gate that nobody can enter any more has its requests, and they are refused with the others in the end."""
    gone, kept, idle = House(cap=1), House(cap=1), House(cap=1)
    door = Gate({"a": gone.gate, "b": kept.gate, "c": idle.gate})
    for house in (gone, kept):
        house.fill("ab")
    door.replace({"b": kept.gate, "d": kept.gate})
    door.replace({"b": kept.gate})
    with pytest.raises(KeyError):
        door.enter("a", 1, granted=lambda _admission: None, refused=lambda _error: None)
    assert [] == gone.told
    door.drain()
    assert ["b draining"] == gone.told == kept.told
    # One with nothing to do is forgotten at once.
    assert {UpstreamGate: 1} == {type(gate): 1 for gate in door._left}
    assert idle.gate not in door._left
