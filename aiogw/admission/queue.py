"""The fair queue of one upstream: who holds slots, who waits, who is next.

Pure: no await, no clock, no log, no metric, and no idea of what a ticket is for.

A ticket is in one of three states and only ever moves down this list:

    WAITING   in the queue, holding nothing
    HOLDING   counted against the cap, whether or not its owner has noticed yet
    LEFT      counted nowhere; leaving again is nothing

Two verbs change anything.  ``enter`` and ``leave`` are O(1) apart from the tickets they move.  After each of them:

1. slots held never exceed the cap, waiting tickets never exceed the limit;
2. nobody waits while the head of the queue would fit;
3. slots were granted in the order of entry among those that have not left;
4. a freed slot is already booked for the next in line, so there is no moment in which a newcomer could take it;
5. when all have left, all counts are zero.

Cancelled, expired, completed and abandoned are reasons; the verb is ``leave``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import Generic, TypeVar

from attrs import frozen


class TicketState(Enum):
    WAITING = "waiting"
    HOLDING = "holding"
    LEFT = "left"


class Ticket:
    """A claim to ``weight`` slots; made by its owner, moved only by the queue it entered."""

    __slots__ = ("state", "weight")

    def __init__(self, *, weight: int) -> None:
        if weight < 1:
            raise ValueError(f"a ticket claims at least one slot, not {weight}")
        self.weight = weight
        self.state = TicketState.WAITING

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.state.value} weight={self.weight}>"


T = TypeVar("T", bound=Ticket)


@frozen(kw_only=True)
class QueueStatistics:
    """Slots in use and requests waiting, with their limits; ``cap`` None: unlimited."""

    cap: int | None
    slots_in_use: int
    queue_limit: int
    waiting: int


class FairQueue(Generic[T]):
    """Grants ``cap`` slots in order of entry; at most ``queue_limit`` tickets wait.  ``cap`` None: everybody fits."""

    def __init__(self, *, cap: int | None, queue_limit: int) -> None:
        if cap is not None and cap < 1:
            raise ValueError(f"cap is at least 1, not {cap}")
        if queue_limit < 0:
            raise ValueError(f"queue_limit is at least 0, not {queue_limit}")
        self._cap = cap
        self._queue_limit = queue_limit
        self._slots_in_use = 0
        # An ordered dict, not a deque: whoever leaves from the middle of a long queue is found at once.
        self._waiting: OrderedDict[T, None] = OrderedDict()

    def __repr__(self) -> str:
        cap = "unlimited" if self._cap is None else self._cap
        return f"<FairQueue {self._slots_in_use}/{cap} held, {len(self._waiting)}/{self._queue_limit} waiting>"

    def enter(self, ticket: T) -> bool:
        """Take ``ticket`` in: it holds its slots at once if they are free and nobody waits, else it waits.

        False when the queue is full; the ticket has then left.  Raises ValueError for a ticket that could never hold
        its slots, since it would block all behind it for ever.
        """
        if self._cap is not None and ticket.weight > self._cap:
            raise ValueError(f"a ticket of weight {ticket.weight} can never be served under a cap of {self._cap}")
        if not self._waiting and self._fits(ticket):
            self._hold(ticket)
        elif len(self._waiting) < self._queue_limit:
            self._waiting[ticket] = None
        else:
            ticket.state = TicketState.LEFT
            return False
        return True

    def leave(self, ticket: T) -> list[T]:
        """Let ``ticket`` go, from any state, any number of times; returns those that thereby came to hold slots."""
        if ticket.state is TicketState.LEFT:
            return []
        if ticket.state is TicketState.HOLDING:
            self._slots_in_use -= ticket.weight
        else:
            del self._waiting[ticket]
        ticket.state = TicketState.LEFT
        return self._advance()

    @property
    def head(self) -> T | None:
        """The ticket that is next in line."""
        return next(iter(self._waiting), None)

    def in_line(self) -> Iterator[T]:
        """The waiting tickets, the head first."""
        return iter(self._waiting)

    def newest_first(self) -> Iterator[T]:
        """The waiting tickets from the end of the queue, the order in which all can leave without one being granted."""
        return reversed(self._waiting)

    def statistics(self) -> QueueStatistics:
        return QueueStatistics(
            cap=self._cap,
            slots_in_use=self._slots_in_use,
            queue_limit=self._queue_limit,
            waiting=len(self._waiting),
        )

    def _fits(self, ticket: T) -> bool:
        return self._cap is None or self._slots_in_use + ticket.weight <= self._cap

    def _hold(self, ticket: T) -> None:
        self._slots_in_use += ticket.weight
        ticket.state = TicketState.HOLDING

    def _advance(self) -> list[T]:
        granted: list[T] = []
        while (ticket := self.head) is not None and self._fits(ticket):
            del self._waiting[ticket]
            self._hold(ticket)
            granted.append(ticket)
        return granted
