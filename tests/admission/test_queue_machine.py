"""The laws of the fair queue, checked after every step of generated histories against an independent account."""

from __future__ import annotations

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from aiogw.admission.queue import FairQueue, Ticket, TicketState


class NumberedTicket(Ticket):
    """A ticket that knows when it came."""

    def __init__(self, *, number: int, weight: int) -> None:
        super().__init__(weight=weight)
        self.number = number


class QueueMachine(RuleBasedStateMachine):
    """The account keeps plain lists and looks at nothing but what ``enter`` and ``leave`` return."""

    tickets = Bundle("tickets")

    @initialize(cap=st.none() | st.integers(1, 6), queue_limit=st.integers(0, 6))
    def open(self, cap: int | None, queue_limit: int) -> None:
        self.cap = cap
        self.queue_limit = queue_limit
        self.queue: FairQueue[NumberedTicket] = FairQueue(cap=cap, queue_limit=queue_limit)
        self.entered = 0
        self.everybody: list[NumberedTicket] = []
        self.holding: list[NumberedTicket] = []
        self.waiting: list[NumberedTicket] = []
        self.granted_up_to = -1

    def fits(self, ticket: NumberedTicket) -> bool:
        return self.cap is None or sum(one.weight for one in self.holding) + ticket.weight <= self.cap

    def account_for_grant(self, ticket: NumberedTicket) -> None:
        # Law 3: in the order of entry among those that have not left.
        assert ticket.number > self.granted_up_to
        self.granted_up_to = ticket.number
        self.holding.append(ticket)

    @rule(target=tickets, weight=st.integers(1, 6))
    def enter(self, weight: int) -> NumberedTicket:
        ticket = NumberedTicket(number=self.entered, weight=min(weight, self.cap or weight))
        self.entered += 1
        self.everybody.append(ticket)
        holds = not self.waiting and self.fits(ticket)
        taken = self.queue.enter(ticket)
        if holds:
            self.account_for_grant(ticket)
        elif taken:
            self.waiting.append(ticket)
        assert taken == (holds or ticket in self.waiting)
        # Law 1, the other side: nobody is refused while there is a place.
        assert taken or len(self.waiting) == self.queue_limit
        return ticket

    def leave_and_account(self, ticket: NumberedTicket) -> None:
        for tickets in (self.holding, self.waiting):
            if ticket in tickets:
                tickets.remove(ticket)
        expected = []
        while self.waiting and self.fits(self.waiting[0]):
            expected.append(self.waiting[0])
            self.account_for_grant(self.waiting.pop(0))
        # Law 4: the slots are booked in the very step that frees them.
        assert expected == self.queue.leave(ticket)

    @rule(ticket=tickets)
    def leave(self, ticket: NumberedTicket) -> None:
        self.leave_and_account(ticket)

    @rule(ticket=tickets)
    def leave_twice(self, ticket: NumberedTicket) -> None:
        self.leave_and_account(ticket)
        assert self.queue.leave(ticket) == []

    @rule()
    def refuse_all_who_wait(self) -> None:
        for ticket in list(self.queue.newest_first()):
            self.waiting.remove(ticket)
            assert self.queue.leave(ticket) == []
        assert self.waiting == []

    @invariant()
    def the_laws_hold(self) -> None:
        statistics = self.queue.statistics()
        # Law 1: never more than the cap, never more than the limit.
        assert self.cap is None or statistics.slots_in_use <= self.cap
        assert statistics.waiting <= self.queue_limit
        # Law 2: nobody waits while the head would fit.
        assert self.queue.head is None or not self.fits(self.queue.head)
        # The account and the queue agree.
        assert statistics.slots_in_use == sum(ticket.weight for ticket in self.holding)
        assert statistics.waiting == len(self.waiting)
        assert list(self.queue.in_line()) == self.waiting
        assert list(self.queue.newest_first()) == self.waiting[::-1]
        for ticket in self.everybody:
            expected = TicketState.HOLDING if ticket in self.holding else TicketState.LEFT
            assert ticket.state is (TicketState.WAITING if ticket in self.waiting else expected)

    def teardown(self) -> None:
        # Law 5: when all have left, all counts are zero.
        for ticket in getattr(self, "everybody", ()):
            self.leave_and_account(ticket)
            self.the_laws_hold()
        if self.everybody:
            assert (self.queue.statistics().slots_in_use, self.queue.statistics().waiting) == (0, 0)


# In CI as many as were promised; fewer at the desk, and any number where somebody else counts on it (scripts/mutate).
RUNS = int(os.environ.get("MACHINE_RUNS", "5000" if os.environ.get("CI") else "300"))

TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=RUNS, stateful_step_count=60, deadline=None)
