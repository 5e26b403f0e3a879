"""The laws of the fair queue, checked after every step of generated histories against an independent account."""

from __future__ import annotations

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from aiogw.admission.queue import FairQueue, Ticket, TicketState

CAPS = st.none() | st.integers(1, 6)
LIMITS = st.integers(0, 6)
# Names and slots of what answers; the empty name with no number is an upstream of which only the cap is known.
ENDPOINTS = st.dictionaries(st.sampled_from("xyz"), st.integers(1, 4)) | st.just({"": None})


class NumberedTicket(Ticket):
    """A ticket that knows when it came."""

    def __init__(self, *, entry: int, weight: int, holder: str) -> None:
        super().__init__(weight=weight, holder=holder)
        self.entry = entry


class QueueMachine(RuleBasedStateMachine):
    """The account keeps plain lists and looks at nothing but what the queue's methods return and where tickets went."""

    tickets = Bundle("tickets")

    @initialize(cap=CAPS, queue_limit=LIMITS, endpoints=ENDPOINTS)
    def open(self, cap: int | None, queue_limit: int, endpoints: dict[str, int | None]) -> None:
        self.set_limits(cap, queue_limit, endpoints)
        self.queue: FairQueue[NumberedTicket] = FairQueue(
            cap=self.cap, queue_limit=queue_limit, endpoints=self.endpoints
        )
        self.entered = 0
        self.everybody: list[NumberedTicket] = []
        self.holding: list[NumberedTicket] = []
        self.waiting: list[NumberedTicket] = []
        # What may exceed a limit, because the limit came later or the ticket has been put back.
        self.excess_slots = self.excess_waiting = 0

    def set_limits(self, cap: int | None, queue_limit: int, endpoints: dict[str, int | None]) -> None:
        self.cap = cap
        self.queue_limit = queue_limit
        self.endpoints = {"": None} if cap is None else endpoints

    # -- the account ------------------------------------------------------------------------------------------------

    def held(self, endpoint: str | None = None) -> int:
        return sum(one.weight for one in self.holding if endpoint in (None, one.endpoint))

    def cap_now(self) -> int | None:
        slots = self.endpoints.values()
        if self.cap is None or None in slots:
            return self.cap
        return min(self.cap, max(1, sum(slots) - 1)) if slots else 0  # type: ignore[arg-type]

    def free(self, endpoint: str) -> float:
        slots = self.endpoints[endpoint]
        return float("inf") if slots is None else slots - self.held(endpoint)

    def fits(self, ticket: NumberedTicket) -> bool:
        cap = self.cap_now()
        if self.cap is None or cap is None:
            return True
        here = sum(self.held(name) for name in self.endpoints)
        roomy = any(self.free(name) >= ticket.weight for name in self.endpoints)
        return self.held() + ticket.weight <= self.cap and here + ticket.weight <= cap and roomy

    def could_hold(self, ticket: NumberedTicket) -> bool:
        cap = self.cap_now()
        largest = [float("inf") if slots is None else slots for slots in self.endpoints.values()]
        return cap is None or ticket.weight <= min(cap, max(largest, default=0))

    def account_for_grants(self, granted: list[NumberedTicket]) -> None:
        """Law 3 and 4: in the order of entry, in the very step that frees the slots, at the emptiest endpoint."""
        for ticket in granted:
            assert self.waiting
            assert ticket is self.waiting.pop(0)
            assert self.fits(ticket)
            assert self.free(ticket.endpoint) == max(self.free(name) for name in self.endpoints)
            self.holding.append(ticket)
        assert not self.waiting or not self.fits(self.waiting[0])

    # -- what happens -----------------------------------------------------------------------------------------------

    @rule(target=tickets, weight=st.integers(1, 6), holder=st.sampled_from("pq"))
    def enter(self, weight: int, holder: str) -> NumberedTicket:
        ticket = NumberedTicket(entry=self.entered, weight=weight, holder=holder)
        self.entered += 1
        if not self.could_hold(ticket):
            try:
                self.queue.enter(ticket)
            except ValueError:
                ticket.state = TicketState.LEFT  # as its owner sees it: it has never been in
                return ticket
            raise AssertionError("who could not be served as things are is not let in")
        self.everybody.append(ticket)
        holds = not self.waiting and self.fits(ticket)
        full = len(self.waiting) >= self.queue_limit
        taken = self.queue.enter(ticket)
        # Law 1, the other side: nobody is refused while there is a place.
        assert taken == (holds or not full)
        if taken:
            self.waiting.append(ticket)
            self.account_for_grants([ticket] if holds else [])
        return ticket

    def leave_and_account(self, ticket: NumberedTicket) -> None:
        for tickets in (self.holding, self.waiting):
            if ticket in tickets:
                tickets.remove(ticket)
        self.account_for_grants(self.queue.leave(ticket))

    @rule(ticket=tickets)
    def leave(self, ticket: NumberedTicket) -> None:
        self.leave_and_account(ticket)

    @rule(ticket=tickets)
    def leave_twice(self, ticket: NumberedTicket) -> None:
        self.leave_and_account(ticket)
        assert self.queue.leave(ticket) == []

    @rule(ticket=tickets)
    def put_back(self, ticket: NumberedTicket) -> None:
        if ticket not in self.holding:
            try:
                self.queue.put_back(ticket)
            except ValueError:
                return
            raise AssertionError("only who holds slots can be put back")
        self.holding.remove(ticket)
        self.waiting = sorted([*self.waiting, ticket], key=lambda one: one.entry)
        self.excess_waiting = max(self.excess_waiting, len(self.waiting))
        self.account_for_grants(self.queue.put_back(ticket))
        self.refuse_who_could_not_be_served()

    @rule(cap=CAPS, queue_limit=LIMITS, endpoints=ENDPOINTS)
    def resize(self, cap: int | None, queue_limit: int, endpoints: dict[str, int | None]) -> None:
        self.set_limits(cap, queue_limit, endpoints)
        self.excess_slots, self.excess_waiting = self.held(), len(self.waiting)
        granted = self.queue.resize(cap=cap, queue_limit=queue_limit, endpoints=self.endpoints)
        self.account_for_grants(granted)
        self.refuse_who_could_not_be_served()

    def refuse_who_could_not_be_served(self) -> None:
        """As the owner of the queue has to, since such a one blocks all behind it."""
        for ticket in list(self.waiting):
            assert self.queue.could_hold(ticket) == self.could_hold(ticket)
            if ticket in self.waiting and not self.could_hold(ticket):
                self.leave_and_account(ticket)

    @rule()
    def refuse_all_who_wait(self) -> None:
        for ticket in list(self.queue.newest_first()):
            self.waiting.remove(ticket)
            assert self.queue.leave(ticket) == []
        assert self.waiting == []

    @invariant()
    def the_laws_hold(self) -> None:
        # Law 1: never more than the cap, never more than the limit, except what was there before they shrank.
        self.excess_slots = min(self.excess_slots, self.held())
        self.excess_waiting = min(self.excess_waiting, len(self.waiting))
        assert self.cap is None or self.queue.slots_in_use <= max(self.cap, self.excess_slots)
        assert self.queue.waiting <= max(self.queue_limit, self.excess_waiting)
        assert self.queue.cap == self.cap_now()
        # Law 2: nobody waits while the head would fit.
        assert self.queue.head is None or not self.fits(self.queue.head)
        # The account and the queue agree.
        assert self.queue.slots_in_use == self.held()
        assert self.queue.waiting == len(self.waiting)
        assert self.queue.slots_wanted == sum(one.weight for one in self.waiting)
        assert list(self.queue.in_line()) == self.waiting
        for holder in "pqr":
            assert self.queue.waiting_of(holder) == sum(one.holder == holder for one in self.waiting)
        assert list(self.queue.newest_first()) == self.waiting[::-1]
        used = self.queue.used()
        assert all(used[name] == self.held(name) for name in used)
        assert {one.endpoint for one in self.holding} | set(self.endpoints) == set(used)
        for ticket in self.everybody:
            expected = TicketState.HOLDING if ticket in self.holding else TicketState.LEFT
            assert ticket.state is (TicketState.WAITING if ticket in self.waiting else expected)

    def teardown(self) -> None:
        # Law 5: when all have left, all counts are zero.
        for ticket in getattr(self, "everybody", ()):
            self.leave_and_account(ticket)
            self.the_laws_hold()
        if getattr(self, "everybody", ()):
            assert (self.queue.slots_in_use, self.queue.waiting) == (0, 0)
            assert set(self.queue.used().values()) <= {0}


# In CI as many as were promised; fewer at the desk, and any number where somebody else counts on it (scripts/mutate).
RUNS = int(os.environ.get("MACHINE_RUNS", "5000" if os.environ.get("CI") else "300"))

TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=RUNS, stateful_step_count=60, deadline=None)
