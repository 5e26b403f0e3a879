"""The fair queue, move by move."""

from __future__ import annotations

import pytest

from aiogw.admission.queue import FairQueue, Ticket, TicketState

Queue = FairQueue[Ticket]


def enter(queue: Queue, *weights: int) -> list[Ticket]:
    """Tickets of these weights, entered one after another."""
    tickets = [Ticket(weight=weight) for weight in weights]
    for ticket in tickets:
        assert queue.enter(ticket)
    return tickets


def states(*tickets: Ticket) -> str:
    """One letter for each: W(aiting), H(olding), L(eft)."""
    return "".join(ticket.state.name[0] for ticket in tickets)


def counts(queue: Queue) -> tuple[int, int]:
    return queue.slots_in_use, queue.waiting


# -- entering -------------------------------------------------------------------------------------------------------


def test_a_free_slot_is_held_at_once() -> None:
    """A ticket holds its slots as soon as it has entered, while there are some."""
    queue = Queue(cap=2, queue_limit=1)
    assert "HH" == states(*enter(queue, 1, 1))
    assert (2, 0) == counts(queue)


def test_the_next_one_waits() -> None:
    """With all slots held a ticket waits, and holds nothing."""
    queue = Queue(cap=1, queue_limit=2)
    assert "HWW" == states(*enter(queue, 1, 1, 1))
    assert (1, 2) == counts(queue)


def test_a_full_queue_refuses() -> None:
    """One more than fits is not taken in: it has left, and nothing has changed."""
    queue = Queue(cap=1, queue_limit=1)
    holding, waiting = enter(queue, 1, 1)
    late = Ticket(weight=1)
    assert queue.enter(late) is False
    assert "HWL" == states(holding, waiting, late)
    assert (1, 1) == counts(queue)
    assert [] == queue.leave(late)
    assert (1, 1) == counts(queue)


def test_a_queue_without_places_still_has_slots() -> None:
    """With a limit of zero nobody waits: held at once, or refused at once."""
    queue = Queue(cap=1, queue_limit=0)
    assert queue.has_place_for(Ticket(weight=1))
    (holding,) = enter(queue, 1)
    assert not queue.has_place_for(Ticket(weight=1))
    assert queue.enter(Ticket(weight=1)) is False
    assert [] == queue.leave(holding)
    assert "H" == states(*enter(queue, 1))


def test_a_newcomer_does_not_overtake() -> None:
    """A light newcomer waits behind a heavy head, although it would fit itself."""
    queue = Queue(cap=3, queue_limit=2)
    assert "HWW" == states(*enter(queue, 2, 2, 1))
    assert (2, 2) == counts(queue)


def test_a_newcomer_is_refused_rather_than_let_past() -> None:
    """When the queue is full, a free slot is for its head and not for whoever comes last."""
    queue = Queue(cap=3, queue_limit=1)
    enter(queue, 2, 2)
    assert queue.enter(Ticket(weight=1)) is False
    assert (2, 1) == counts(queue)


def test_no_cap_is_room_for_all() -> None:
    """An unlimited queue counts, and never lets anybody wait."""
    queue = Queue(cap=None, queue_limit=0)
    tickets = enter(queue, *[1000] * 100)
    assert {TicketState.HOLDING} == {ticket.state for ticket in tickets}
    assert (100_000, 0) == counts(queue)
    for ticket in tickets:
        assert [] == queue.leave(ticket)
    assert (0, 0) == counts(queue)


# -- leaving --------------------------------------------------------------------------------------------------------


def test_the_first_in_line_is_next() -> None:
    """A freed slot goes to the ticket that has waited longest, in the same step."""
    queue = Queue(cap=1, queue_limit=3)
    first, second, third = enter(queue, 1, 1, 1)
    assert [second] == queue.leave(first)
    assert "LHW" == states(first, second, third)
    assert (1, 1) == counts(queue)


def test_a_freed_slot_is_booked_before_anybody_can_come() -> None:
    """Whoever enters after a leave finds the slot held by the next in line."""
    queue = Queue(cap=1, queue_limit=3)
    first, second = enter(queue, 1, 1)
    queue.leave(first)
    assert "HW" == states(second, *enter(queue, 1))


def test_leaving_from_the_middle_keeps_the_order() -> None:
    """Whoever gives up is stepped over, and nobody else moves."""
    queue = Queue(cap=1, queue_limit=5)
    first, second, third, fourth = enter(queue, 1, 1, 1, 1)
    assert [] == queue.leave(third)
    assert (1, 2) == counts(queue)
    assert [second] == queue.leave(first)
    assert [fourth] == queue.leave(second)


def test_a_place_in_the_queue_is_free_again() -> None:
    """A queue that was full takes the next one as soon as somebody has given up."""
    queue = Queue(cap=1, queue_limit=1)
    _holding, waiting = enter(queue, 1, 1)
    queue.leave(waiting)
    assert "W" == states(*enter(queue, 1))


@pytest.mark.parametrize("position", [0, 1])
def test_leaving_twice_is_nothing(position: int) -> None:
    """The second leave gives nothing back, whether the ticket held a slot or waited for one."""
    queue = Queue(cap=1, queue_limit=1)
    tickets = enter(queue, 1, 1)
    queue.leave(tickets[position])
    before = counts(queue)
    assert [] == queue.leave(tickets[position])
    assert before == counts(queue)


def test_a_grant_that_was_not_collected_is_handed_on() -> None:
    """A ticket that leaves after it was granted and before it noticed passes its slot to the next."""
    queue = Queue(cap=1, queue_limit=2)
    first, second, third = enter(queue, 1, 1, 1)
    assert [second] == queue.leave(first)
    assert [third] == queue.leave(second)


# -- weights --------------------------------------------------------------------------------------------------------


def test_a_heavy_head_waits_for_all_its_slots() -> None:
    """It is granted when enough is free and not before, and keeps its place meanwhile."""
    queue = Queue(cap=4, queue_limit=5)
    one, two, three, heavy, light = enter(queue, 1, 1, 2, 4, 1)
    assert [] == queue.leave(one)
    assert [] == queue.leave(three)
    assert "HWW" == states(two, heavy, light)
    assert [heavy] == queue.leave(two)
    assert (4, 1) == counts(queue)


def test_when_a_heavy_head_gives_up_those_behind_it_go() -> None:
    """Leaving from the queue can grant others too: as many as now fit."""
    queue = Queue(cap=4, queue_limit=5)
    _holding, heavy, *light = enter(queue, 2, 3, 1, 1, 1)
    assert light[:2] == queue.leave(heavy)
    assert "HHW" == states(*light)
    assert (4, 1) == counts(queue)


def test_one_heavy_leave_lets_many_in() -> None:
    """A ticket that held many slots makes room for as many light ones, in their order."""
    queue = Queue(cap=3, queue_limit=9)
    heavy, *light = enter(queue, 3, 1, 1, 1, 1)
    assert light[:3] == queue.leave(heavy)
    assert (3, 1) == counts(queue)


def test_a_ticket_as_heavy_as_the_cap() -> None:
    """It runs alone, and it does run."""
    queue = Queue(cap=2, queue_limit=1)
    (light,) = enter(queue, 1)
    (heavy,) = enter(queue, 2)
    assert [heavy] == queue.leave(light)
    assert (2, 0) == counts(queue)


# -- what is refused as a mistake -----------------------------------------------------------------------------------


def test_a_ticket_heavier_than_the_cap_is_a_mistake() -> None:
    """It would block everybody for ever, so the queue does not take it, and is as before."""
    queue = Queue(cap=2, queue_limit=1)
    ticket = Ticket(weight=3)
    with pytest.raises(ValueError, match="weight 3 can never be served under a cap of 2"):
        queue.enter(ticket)
    assert (0, 0) == counts(queue)


@pytest.mark.parametrize("weight", [0, -1])
def test_a_ticket_has_a_weight(weight: int) -> None:
    """A claim to nothing, or to less, would break every count."""
    with pytest.raises(ValueError, match="at least one slot"):
        Ticket(weight=weight)


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_is_at_least_one(cap: int) -> None:
    """Nobody could ever be served under a cap of zero."""
    with pytest.raises(ValueError, match="cap is at least 1"):
        Queue(cap=cap, queue_limit=1)


def test_a_queue_limit_is_not_negative() -> None:
    """Fewer than no places is a mistake."""
    with pytest.raises(ValueError, match="queue_limit is at least 0"):
        Queue(cap=1, queue_limit=-1)


# -- looking at it --------------------------------------------------------------------------------------------------


def test_what_is_counted() -> None:
    """The counts come with their limits."""
    queue = Queue(cap=3, queue_limit=7)
    enter(queue, 2, 2, 1)
    assert (3, 7, 3) == (queue.cap, queue.queue_limit, queue.slots_wanted)
    assert (2, 2) == counts(queue)
    unlimited = Queue(cap=None, queue_limit=0)
    assert (None, 0, 0) == (unlimited.cap, unlimited.queue_limit, unlimited.slots_wanted)
    assert (0, 0) == counts(unlimited)


def test_the_head_and_the_end() -> None:
    """The line begins with its head, who is next; from its end on, all can leave without one being granted."""
    queue = Queue(cap=1, queue_limit=5)
    assert queue.head is None
    holding, *waiting = enter(queue, 1, 1, 1, 1)
    assert waiting[0] is queue.head
    assert waiting == list(queue.in_line())
    assert waiting[::-1] == list(queue.newest_first())
    for ticket in list(queue.newest_first()):
        assert [] == queue.leave(ticket)
    assert "HLLL" == states(holding, *waiting)


def test_representations() -> None:
    """A queue and a ticket in a log say where they stand."""
    queue = Queue(cap=2, queue_limit=7)
    tickets = enter(queue, 2, 1)
    assert "<FairQueue 2/2 held, 1/7 waiting>" == repr(queue)
    assert "<Ticket holding weight=2> <Ticket waiting weight=1>" == " ".join(map(repr, tickets))
    queue.leave(tickets[1])
    assert "<Ticket left weight=1>" == repr(tickets[1])
    assert "<FairQueue 0/unlimited held, 0/0 waiting>" == repr(Queue(cap=None, queue_limit=0))


# -- limits that change ---------------------------------------------------------------------------------------------


def test_several_that_are_put_back_are_in_the_order_of_their_entry() -> None:
    """Whatever the order in which they come back, and before all who came later."""
    queue: FairQueue[Ticket] = FairQueue(cap=4, queue_limit=2, endpoints={"a": 8})
    tickets = [Ticket(weight=1) for _ in range(6)]
    for ticket in tickets:
        queue.enter(ticket)
    queue.resize(cap=4, queue_limit=2, endpoints={})
    for number in (1, 0, 3, 2):
        assert queue.put_back(tickets[number]) == []
    assert list(queue.in_line()) == tickets
    assert queue.resize(cap=4, queue_limit=2, endpoints={"b": 3}) == tickets[:2]


@pytest.mark.parametrize("changes", [{"cap": 0}, {"queue_limit": -1}])
def test_limits_that_are_none_change_nothing(changes: dict[str, int]) -> None:
    """They are refused as they are at the beginning."""
    queue: FairQueue[Ticket] = FairQueue(cap=2, queue_limit=3)
    with pytest.raises(ValueError, match="is at least"):
        queue.resize(**({"cap": 1, "queue_limit": 1, "endpoints": {"": None}} | changes))  # type: ignore[arg-type]
    assert (queue.cap, queue.queue_limit) == (2, 3)
