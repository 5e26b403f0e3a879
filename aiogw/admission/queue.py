"""The fair queue of one upstream: who holds slots, who waits, who is next.

Pure: no await, no clock, no log, no metric, and no idea of what a ticket is for.

A ticket is in one of three states and only ever moves down this list:

    WAITING   in the queue, holding nothing
    HOLDING   counted against the cap, whether or not its owner has noticed yet
    LEFT      counted nowhere; leaving again is nothing

Two verbs move tickets.  ``enter`` and ``leave`` are O(1) apart from the tickets they move.  After each of them:

1. slots held never exceed the cap, waiting tickets never exceed the limit;
2. nobody waits while the head of the queue would fit;
3. slots were granted in the order of entry among those that have not left;
4. a freed slot is already booked for the next in line, so there is no moment in which a newcomer could take it;
5. when all have left, all counts are zero.

Cancelled, expired, completed and abandoned are reasons; the verb is ``leave``.

Around them the limits may change (``resize``), and a ticket whose endpoint turns out not to be there may go back to its
place (``put_back``): the only step up the list, and into the order of entry, so that law 3 holds for it as well.  After
a limit has shrunk, what exceeds it is not taken away from anybody: nothing is granted and nobody let in until it fits.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Generic, TypeVar

from aiogw.admission.capacity import ONE_ENDPOINT, Capacity


class TicketState(Enum):
    WAITING = "waiting"
    HOLDING = "holding"
    LEFT = "left"


class Ticket:
    """A claim to ``weight`` slots; made by its owner, moved only by the queue it entered.

    ``holder`` is whose it is, None: nobody's in particular.  ``endpoint`` is where it has held its slots last,
    ``number`` its place in the order of entry.
    """

    __slots__ = ("endpoint", "holder", "number", "state", "weight")

    def __init__(self, *, weight: int, holder: str | None = None) -> None:
        if weight < 1:
            raise ValueError(f"a ticket claims at least one slot, not {weight}")
        self.weight = weight
        self.holder = holder
        self.state = TicketState.WAITING
        self.endpoint = ""  # mutant: it is set with the slots
        self.number = -1  # mutant: it is set by the queue it enters

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.state.value} weight={self.weight}>"


T = TypeVar("T", bound=Ticket)


class FairQueue(Generic[T]):
    """Grants slots in order of entry; at most ``queue_limit`` tickets wait.  For the others see ``Capacity``.

    ``slots_wanted`` is what those who wait claim together.
    """

    def __init__(
        self, *, cap: int | None, queue_limit: int, endpoints: Mapping[str, int | None] = ONE_ENDPOINT
    ) -> None:
        self._capacity = Capacity(cap=cap, endpoints=endpoints)
        self.queue_limit = _checked(queue_limit)
        self._numbers = itertools.count()
        # An ordered dict, not a deque: whoever leaves from the middle of a long queue is found at once.
        self._waiting: OrderedDict[T, None] = OrderedDict()
        self._waiting_by_holder: Counter[str | None] = Counter()
        self.slots_wanted = 0

    def __repr__(self) -> str:
        cap = "unlimited" if self._capacity.cap is None else self._capacity.cap
        held = f"{self._capacity.in_use}/{cap} held"
        return f"<FairQueue {held}, {len(self._waiting)}/{self.queue_limit} waiting>"

    def enter(self, ticket: T) -> bool:
        """Take ``ticket`` in: it holds its slots at once if they are free and nobody waits, else it waits.

        False when the queue is full; the ticket has then left.  Raises ValueError for a ticket that could not hold its
        slots as things are, since it would block all behind it.
        """
        if not self.could_hold(ticket):
            raise ValueError(f"a ticket of weight {ticket.weight} can never be served under a cap of {self.largest}")
        ticket.number = next(self._numbers)
        if self._is_next(ticket):
            self._hold(ticket)
        elif len(self._waiting) < self.queue_limit:
            self._waiting[ticket] = None
            self._now_waits(ticket)
        else:
            ticket.state = TicketState.LEFT
            return False
        return True

    def has_place_for(self, ticket: Ticket) -> bool:
        """Whether ``enter`` would take in such a ticket, which could hold its slots."""
        return len(self._waiting) < self.queue_limit or self._is_next(ticket)

    def leave(self, ticket: T) -> list[T]:
        """Let ``ticket`` go, from any state, any number of times; returns those that thereby came to hold slots."""
        if ticket.state is TicketState.LEFT:
            return []
        if ticket.state is TicketState.HOLDING:
            self._capacity.give_back(ticket.weight, ticket.endpoint)
        else:
            self._no_longer_waits(ticket)
        ticket.state = TicketState.LEFT
        return self._advance()

    def resize(self, *, cap: int | None, queue_limit: int, endpoints: Mapping[str, int | None]) -> list[T]:
        """Change the limits; returns those that thereby came to hold slots.  Raises ValueError, and changes nothing.

        Tickets that wait and could not hold their slots as things are now block all behind them: their owner has to
        make them leave (``could_hold``).
        """
        _checked(queue_limit)
        self._capacity.resize(cap=cap, endpoints=endpoints)
        self.queue_limit = queue_limit
        return self._advance()

    def put_back(self, ticket: T) -> list[T]:
        """Return a ticket that holds slots, and could not use them, to its place in the order of entry.

        It takes no part in the queue's limit, since it is in nobody's way.  Returns those that thereby came to hold
        slots, itself perhaps first of all.  Raises ValueError for one that holds none.
        """
        if ticket.state is not TicketState.HOLDING:
            raise ValueError(f"only who holds slots can be put back, not {ticket}")
        self._capacity.give_back(ticket.weight, ticket.endpoint)
        ticket.state = TicketState.WAITING
        number = ticket.number
        before = list(itertools.takewhile(lambda one: one.number < number, self._waiting))  # mutant: no number is twice
        for other in (ticket, *reversed(before)):
            self._waiting[other] = None
            self._waiting.move_to_end(other, last=False)
        self._now_waits(ticket)
        return self._advance()

    @property
    def cap(self) -> int | None:
        """That of this moment; None: unlimited."""
        return self._capacity.cap

    @property
    def slots_in_use(self) -> int:
        return self._capacity.in_use

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def largest(self) -> int | None:
        """The heaviest weight that can be served as things are; None: any."""
        return self._capacity.largest

    def could_hold(self, ticket: Ticket) -> bool:
        """Whether the ticket would be served if all slots of the endpoints that answer were free."""
        return self._capacity.largest is None or ticket.weight <= self._capacity.largest

    def used(self) -> dict[str, int]:
        """Slots in use by endpoint."""
        return self._capacity.used()

    @property
    def head(self) -> T | None:
        """The ticket that is next in line."""
        return next(iter(self._waiting), None)

    def in_line(self) -> Iterator[T]:
        """The waiting tickets, the head first."""
        return iter(self._waiting)

    def waiting_of(self, holder: str | None) -> int:
        """How many of one holder's tickets wait."""
        return self._waiting_by_holder[holder]

    def newest_first(self) -> Iterator[T]:
        """The waiting tickets from the end of the queue, the order in which all can leave without one being granted."""
        return reversed(self._waiting)

    def _is_next(self, ticket: Ticket) -> bool:
        return not self._waiting and self._capacity.fits(ticket.weight)

    def _now_waits(self, ticket: T) -> None:
        self._waiting_by_holder[ticket.holder] += 1
        self.slots_wanted += ticket.weight

    def _no_longer_waits(self, ticket: T) -> None:
        del self._waiting[ticket]
        self.slots_wanted -= ticket.weight
        self._waiting_by_holder[ticket.holder] -= 1
        if not self._waiting_by_holder[ticket.holder]:
            del self._waiting_by_holder[ticket.holder]  # mutant: nothing is as much as none, and only kept for ever

    def _hold(self, ticket: T) -> None:
        ticket.endpoint = self._capacity.take(ticket.weight)
        ticket.state = TicketState.HOLDING

    def _advance(self) -> list[T]:
        granted: list[T] = []
        while (ticket := self.head) is not None and self._capacity.fits(ticket.weight):
            self._no_longer_waits(ticket)
            self._hold(ticket)
            granted.append(ticket)
        return granted


def _checked(queue_limit: int) -> int:
    if queue_limit < 0:
        raise ValueError(f"queue_limit is at least 0, not {queue_limit}")
    return queue_limit
