"""What scripts/mutate found that no other test would have noticed, and the settling of aborted requests."""

from __future__ import annotations

import pytest
from test_gate import House, give_up

from aiogw.admission.queue import TicketState

# -- aborted is not yet free ----------------------------------------------------------------------------------------


def settling(**changes: object) -> House:
    return House(**{"cap": 1, "abort_settle_seconds": 0.5, **changes})


def test_the_slot_of_an_aborted_request_settles() -> None:
    """It counts against the cap, apart from those at work, until the engine has surely let go of it."""
    house = settling()
    a = house.enter("a")
    b = house.enter("b")
    a.admission.leave(aborted=True)
    statistics = house.gate.statistics()
    assert (0, 1, 1) == (statistics.slots_in_use, statistics.slots_settling, statistics.waiting)
    house.loop.advance(0.49)
    assert ["a granted"] == house.told
    house.loop.advance(0.01)
    assert ["a granted", "b granted"] == house.told
    statistics = house.gate.statistics()
    assert (1, 0, 0) == (statistics.slots_in_use, statistics.slots_settling, statistics.waiting)
    assert (TicketState.LEFT, TicketState.HOLDING) == (a.admission.state, b.admission.state)
    assert 0 == house.loop.armed


def test_a_heavy_request_settles_with_all_its_slots() -> None:
    """Every sequence of it may still be at work."""
    house = settling(cap=3)
    house.enter("a", weight=2).admission.leave(aborted=True)
    house.enter("b")
    statistics = house.gate.statistics()
    assert (1, 2) == (statistics.slots_in_use, statistics.slots_settling)


@pytest.mark.parametrize("aborted", [False, True])
def test_leaving_again_does_not_shorten_the_settling(aborted: bool) -> None:
    """A request that has been aborted is closed afterwards; that is neither a second abort nor an end."""
    house = settling()
    a = house.enter("a")
    house.enter("b")
    a.admission.leave(aborted=True)
    house.loop.advance(0.25)
    a.admission.leave(aborted=aborted)
    assert ["a granted"] == house.told
    assert 2 == house.loop.armed
    house.loop.advance(0.25)
    assert ["a granted", "b granted"] == house.told


def test_a_completed_request_does_not_settle() -> None:
    """The engine itself has said that it is done."""
    house = settling()
    a = house.enter("a")
    house.enter("b")
    a.admission.leave()
    assert ["a granted", "b granted"] == house.told
    assert 0 == house.gate.statistics().slots_settling
    a.admission.leave(aborted=True)
    assert 0 == house.gate.statistics().slots_settling


def test_who_only_waited_does_not_settle() -> None:
    """No engine has ever heard of it."""
    house = settling()
    house.enter("a")
    b = house.enter("b")
    b.admission.leave(aborted=True)
    statistics = house.gate.statistics()
    assert (1, 0, 0, 0) == (
        statistics.slots_in_use,
        statistics.slots_settling,
        statistics.waiting,
        house.loop.armed,
    )


def test_without_a_time_to_settle_an_aborted_slot_is_free_at_once() -> None:
    """Zero is allowed, and an unlimited upstream has nothing to wait for."""
    for house in (settling(abort_settle_seconds=0), settling(cap=None)):
        house.enter("a").admission.leave(aborted=True)
        statistics = house.gate.statistics()
        assert (0, 0, 0) == (statistics.slots_in_use, statistics.slots_settling, house.loop.armed)


def test_time_to_settle_counts_as_held() -> None:
    """Who waits waits for it as well, so the estimate knows it."""
    house = settling(queue_limit=2, abort_settle_seconds=4, queue_timeout_seconds=1000)
    a = house.enter("a")
    house.enter("b")
    house.loop.advance(6)
    a.admission.leave(aborted=True)
    house.loop.advance(2)
    # Nothing has ended yet, and what settles has been held for eight seconds.
    assert 8 == house.gate.place_seconds()
    house.loop.advance(2)
    assert 10 == house.gate.place_seconds()
    house.loop.advance(2)
    # One end after ten seconds, and one that has run for two since.
    assert 12 == house.gate.place_seconds()


def test_a_time_out_or_a_drain_while_slots_settle() -> None:
    """Who waits for a slot that settles is late or refused like everybody else, and the slot is free afterwards."""
    for drained in (False, True):
        house = settling(queue_timeout_seconds=0.25)
        house.enter("a").admission.leave(aborted=True)
        house.enter("b")
        if drained:
            house.gate.drain()
        house.loop.advance(0.25)
        assert ["a granted", "b draining" if drained else "b queue_timeout"] == house.told
        assert 1 == house.gate.statistics().slots_settling
        house.loop.advance(0.25)
        statistics = house.gate.statistics()
        assert (0, 0, 0) == (statistics.slots_in_use, statistics.slots_settling, house.loop.armed)


def test_a_grant_that_raises_does_not_settle() -> None:
    """It never came to be at the engine, so that the next one need not wait for it."""
    house = settling()
    a = house.enter("a")
    house.enter("b", on_granted=give_up)
    house.enter("c")
    a.admission.leave()
    assert ["a granted", "b granted", "b internal_error", "c granted"] == house.told
    assert 0 == house.gate.statistics().slots_settling


# -- what is told ---------------------------------------------------------------------------------------------------


def test_a_wait_is_never_negative() -> None:
    """Whatever the clock does, the gauge is one."""
    house = House(cap=1)
    house.fill("ab")
    house.loop.pass_time(-0.5)
    assert 0.0 == house.gate.statistics().oldest_wait_seconds
