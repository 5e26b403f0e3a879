"""The gate of one upstream: its queue, and what a queue cannot do for itself: call back, keep deadlines, drain.

It knows an upstream by its name, a request by a weight, whose it is and two callbacks, and nothing else of either.  It
never awaits: every change happens inside one call, in one step of the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from aiogw.admission.capacity import ONE_ENDPOINT
from aiogw.admission.estimate import ENOUGH, Returns, SlotTimes
from aiogw.admission.queue import FairQueue, Ticket, TicketState
from aiogw.admission.readings import EndpointStatistics, GateStatistics, Limits, Outlook, occupancy
from aiogw.errors import (
    Draining,
    GatewayError,
    InternalFault,
    QueueFull,
    QueuePlacesTaken,
    QueueTimeout,
    QueueTooSlow,
    TooManySequences,
    UpstreamUnavailable,
)

log = logging.getLogger(__name__)

E = TypeVar("E", bound=GatewayError)

# What a client is told while the gateway restarts: a second is about what that takes.
DRAINING_RETRY_AFTER_SECONDS = 1

# Places in the queue are counted anew this often at the most: thousands who wait are told theirs every few seconds.
POSITIONS_SECONDS = 1.0  # mutant: a choice, which the tests read from here


class Admission(Ticket):
    """One request at the gate: waiting, then holding its slots until ``leave``."""

    __slots__ = ("_gate", "_granted", "_refused", "deadline", "entered_at", "granted_at", "position", "timer", "waited")

    def __init__(
        self,
        gate: UpstreamGate,
        *,
        weight: int,
        granted: Callable[[Admission], None],
        refused: Callable[[GatewayError], None],
        entered_at: float,
        deadline: float,
        position: int | None,
        holder: str | None,
    ) -> None:
        super().__init__(weight=weight, holder=holder)
        self._gate = gate
        self._granted = granted
        self._refused = refused
        self.entered_at = entered_at
        self.deadline = deadline
        self.position = position
        self.waited = False
        self.granted_at: float | None = None
        self.timer: asyncio.TimerHandle | None = None

    def leave(self, *, aborted: bool = False) -> None:
        """Give back whatever is held or claimed; whoever is next is granted before this returns.

        ``aborted``: an engine may still be at work on it; its slots settle before they are granted again.
        Synchronous, idempotent, and right from every state and every place, so that whichever end comes first may
        simply call it.
        """
        self._gate._leave(self, aborted=aborted)

    def put_back(self) -> bool:
        """Wait again, at the old place and until the old deadline, if the endpoint it was granted has gone meanwhile.

        For a request that could not be sent.  False: nothing has changed, since the endpoint is still one, or nothing
        could come of waiting.
        """
        return self._gate._put_back(self)

    def outlook(self) -> Outlook:
        """Its place in the queue as of at most a second ago; 0 and 0.0 once it holds its slots."""
        return self._gate._outlook(self)

    def grant(self) -> None:
        self._granted(self)

    def refuse(self, error: GatewayError) -> None:
        self._refused(error)


class UpstreamGate:
    """The gate of one upstream; ``limits`` None: everybody is granted at once, and merely counted.

    ``endpoints``: those that answer, each with its engine's slots; see ``Capacity``.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        upstream: str,
        limits: Limits | None,
        endpoints: Mapping[str, int | None] = ONE_ENDPOINT,
    ) -> None:
        self._loop = loop
        self._upstream = upstream
        self._limits = limits
        self._endpoints = dict(endpoints)
        self._queue: FairQueue[Admission] = FairQueue(
            cap=limits.cap if limits else None, queue_limit=limits.queue_limit if limits else 0, endpoints=endpoints
        )
        self._holding: set[Admission] = set()
        self._settling: set[Admission] = set()
        self._slot_times = SlotTimes()
        self._returns = Returns()
        self._to_grant: deque[Admission] = deque()
        self._granting = False
        self._draining = False
        self._grants_total = 0
        self._refusals_total: Counter[str] = Counter()
        # By number: how many are ahead, and the slots that are granted with it and before it.
        self._places: dict[int, tuple[int, int]] = {}  # mutant: made anew at the first question, for the type only
        self._places_at = float("-inf")

    def enter(
        self,
        weight: int,
        granted: Callable[[Admission], None],
        refused: Callable[[GatewayError], None],
        holder: str | None = None,
        places: int | None = None,
    ) -> Admission:
        """See ``door.Gate.enter``."""
        if self._draining:
            raise self._counted(self._draining_error())
        limits = self._limits
        now = self._loop.time()
        admission = Admission(
            self,
            weight=weight,
            granted=granted,
            refused=refused,
            entered_at=now,
            deadline=now + limits.queue_timeout_seconds if limits else float("inf"),
            # Where there is no gate there is no queue to have a place in.
            position=self._queue.waiting + 1 if limits else None,
            holder=holder,
        )
        if limits is not None:
            if not self._queue.could_hold(admission):
                raise self._counted(self._unservable_error(admission))
            if self._is_hopeless(admission.weight, limits):
                raise self._counted(self._too_slow_error(admission.weight, limits))
        if not self._queue.enter(admission):
            estimated_seconds = self._told_seconds(admission.weight)
            raise self._counted(
                QueueFull(
                    upstream=self._upstream,
                    occupancy=occupancy(self._queue, self._slots_settling),
                    estimated_seconds=estimated_seconds,
                    retry_after_seconds=self._retry_after_seconds(admission.weight),
                )
            )
        if admission.state is TicketState.HOLDING:
            self._grant([admission])
        elif places is not None and self._queue.waiting_of(holder) > places:
            self._leave(admission)
            raise self._counted(self._places_taken_error(places, admission.weight))
        else:
            admission.waited = True
            admission.timer = self._loop.call_at(admission.deadline, self._expire, admission)
        return admission

    def _is_hopeless(self, weight: int, limits: Limits) -> bool:
        """Who would wait in vain is refused at entry, while that is an honest status and has cost nobody anything.

        Only where the estimate rests on enough requests that have ended, and somebody is really in front.
        """
        queue = self._queue
        cap = queue.cap or limits.cap  # mutant: with none, nobody comes as far as here
        waits = queue.waiting > 0 or queue.slots_in_use + weight > cap
        if not waits or queue.waiting >= limits.queue_limit or len(self._slot_times) < ENOUGH:
            return False
        return self._newcomer_waits_seconds(weight) > limits.queue_timeout_seconds

    def _newcomer_meets(self) -> str | None:
        """The code of the error that ``enter`` would raise for one sequence of a holder without ``places``."""
        newcomer, limits = Ticket(weight=1), self._limits
        if self._draining:
            return Draining.code
        if limits is None:
            return None
        if not self._queue.could_hold(newcomer):
            return self._unservable_error(newcomer).code
        if self._is_hopeless(newcomer.weight, limits):
            return QueueTooSlow.code
        return None if self._queue.has_place_for(newcomer) else QueueFull.code

    def resize(self, *, upstream: str, limits: Limits | None, endpoints: Mapping[str, int | None]) -> None:
        """Take other limits, another name or other endpoints; who thereby fits is granted before this returns.

        Nobody is turned away for a place that is no longer one, and no deadline moves; only who could never be served
        any more is refused, because it would block all behind it.
        """
        self._upstream = upstream
        self._limits = limits
        self._endpoints = dict(endpoints)
        cap = limits.cap if limits else None
        queue_limit = limits.queue_limit if limits else 0  # mutant: nobody waits without a cap
        self._grant(self._queue.resize(cap=cap, queue_limit=queue_limit, endpoints=endpoints))
        for admission in [one for one in self._queue.in_line() if not self._queue.could_hold(one)]:
            if admission.state is TicketState.WAITING:
                self._leave(admission)
                self._refuse(admission, self._counted(self._unservable_error(admission)))

    def set_endpoints(self, endpoints: Mapping[str, int | None]) -> None:
        """Take note of which endpoints answer."""
        self.resize(upstream=self._upstream, limits=self._limits, endpoints=endpoints)

    @property
    def idle(self) -> bool:
        """Whether nobody holds slots or settles; whoever waits, waits for somebody who does."""
        return not self._queue.slots_in_use

    def drain(self) -> None:
        """Refuse all who wait and all who come; those who hold slots keep them."""
        self._draining = True
        for admission in list(self._queue.newest_first()):
            self._leave(admission)
            self._refuse(admission, self._counted(self._draining_error()))

    def place_seconds(self) -> float:
        """How long the queue takes to move up by one place, the last of which would be a newcomer's."""
        return self._newcomer_waits_seconds(weight=1) / (self._queue.waiting + 1)

    def _estimated_wait_seconds(self, slots: int) -> float:
        """The wait of a request that is granted with ``slots``, its own and those of all before it together.

        What is free already need not become so.  Whoever waits, waits for the end of a whole request at the least.
        """
        queue = self._queue
        free = 0 if queue.cap is None else queue.cap - queue.slots_in_use  # mutant: nobody waits without a cap
        slot_interval_seconds = self._slot_interval_seconds()
        return max(slot_interval_seconds * (slots - free), slot_interval_seconds * self._mean_weight())

    def _slot_interval_seconds(self) -> float:
        now = self._loop.time()
        running = [now - one.granted_at for one in self._holding if one.granted_at is not None]
        return self._slot_times.slot_interval_seconds(running, now)

    def _mean_weight(self) -> float:
        """Of those that run."""
        return self._queue.slots_in_use / max(1, len(self._holding))

    def _outlook(self, admission: Admission) -> Outlook:
        if admission.state is not TicketState.WAITING:
            return Outlook(ahead=0, estimated_seconds=0.0)
        now = self._loop.time()
        if now >= self._places_at + POSITIONS_SECONDS or admission.number not in self._places:
            self._places = {}  # mutant: only those would be kept who have left
            slots = 0
            for ahead, waiting in enumerate(self._queue.in_line()):
                slots += waiting.weight
                self._places[waiting.number] = (ahead, slots)
            self._places_at = now
        ahead, slots = self._places[admission.number]
        estimated_seconds = self._estimated_wait_seconds(slots) if len(self._slot_times) else None
        return Outlook(ahead=ahead, estimated_seconds=estimated_seconds)

    @property
    def _slots_settling(self) -> int:
        return sum(admission.weight for admission in self._settling)

    def statistics(self) -> GateStatistics:
        queue, settling = self._queue, self._slots_settling
        head = queue.head
        return GateStatistics(
            cap=queue.cap,
            configured_cap=self._limits.cap if self._limits else None,
            slots_in_use=queue.slots_in_use - settling,
            slots_settling=settling,
            queue_limit=queue.queue_limit,
            waiting=queue.waiting,
            queue_timeout_seconds=self._limits.queue_timeout_seconds if self._limits else None,
            refuses=self._newcomer_meets(),
            ends=len(self._slot_times),
            oldest_wait_seconds=0.0 if head is None else max(0.0, self._loop.time() - head.entered_at),
            grants_total=self._grants_total,
            refusals_total=dict(self._refusals_total),
            endpoints={
                name: EndpointStatistics(
                    left_out=name not in self._endpoints, slots=self._endpoints.get(name), slots_in_use=slots_in_use
                )
                for name, slots_in_use in queue.used().items()
            },
        )

    def _leave(self, admission: Admission, *, aborted: bool = False) -> None:
        if admission in self._settling:
            return
        if admission.timer is not None:
            admission.timer.cancel()
            admission.timer = None  # mutant: it could be cancelled again, but need not be kept
        settle_seconds = self._limits.abort_settle_seconds if self._limits is not None else 0
        if aborted and settle_seconds and admission in self._holding:
            self._settling.add(admission)
            admission.timer = self._loop.call_later(settle_seconds, self._settled, admission)
        else:
            self._free(admission)

    def _settled(self, admission: Admission) -> None:
        admission.timer = None  # mutant: has run, and would keep the admission and itself alive
        self._settling.discard(admission)
        self._free(admission)

    def _free(self, admission: Admission) -> None:
        if admission in self._holding:
            self._holding.discard(admission)
            self._slot_times.free(admission.weight, self._loop.time(), ended=True)
        self._grant(self._queue.leave(admission))

    def _put_back(self, admission: Admission) -> bool:
        at_work = admission in self._holding and admission not in self._settling
        gone = at_work and admission.endpoint not in self._endpoints
        if not gone or self._draining or not self._queue.could_hold(admission):
            return False
        self._holding.discard(admission)
        self._slot_times.free(admission.weight, self._loop.time(), ended=False)
        admission.granted_at = None
        admission.waited = True
        admission.timer = self._loop.call_at(admission.deadline, self._expire, admission)
        self._grant(self._queue.put_back(admission))
        return True

    def _grant(self, admissions: list[Admission]) -> None:
        """Call each one's ``granted``, now, in order.

        A grant can fail and leave at once, which frees the slot for the next: that one is appended here and granted by
        the loop that is already running, so that a thousand failing grants are a loop and not a recursion.
        """
        self._to_grant.extend(admissions)
        if self._granting:
            return
        self._granting = True
        try:
            while self._to_grant:
                self._grant_one(self._to_grant.popleft())
        finally:
            self._granting = False

    def _grant_one(self, admission: Admission) -> None:
        if admission.state is not TicketState.HOLDING:
            return
        now = self._loop.time()
        if now >= admission.deadline:
            # Its timer is due in this very tick but has not run yet: a deadline is never followed by a grant.
            self._expire(admission)
            return
        if admission.timer is not None:
            admission.timer.cancel()
            admission.timer = None  # mutant: it could be cancelled again, but need not be kept
        admission.granted_at = now
        self._grants_total += 1
        self._holding.add(admission)
        self._slot_times.take(admission.weight, now)
        try:
            admission.grant()
        except Exception:
            log.exception("a request failed while it was granted its slot at %s", self._upstream)
            self._leave(admission)
            self._refuse(admission, InternalFault())

    def _expire(self, admission: Admission) -> None:
        self._leave(admission)
        estimated_seconds = self._told_seconds(admission.weight)
        error = QueueTimeout(
            upstream=self._upstream,
            occupancy=occupancy(self._queue, self._slots_settling),
            waited_seconds=round(self._loop.time() - admission.entered_at, 3),
            estimated_seconds=estimated_seconds,
            retry_after_seconds=self._retry_after_seconds(admission.weight),
        )
        self._refuse(admission, self._counted(error))

    def _refuse(self, admission: Admission, error: GatewayError) -> None:
        """Tell one request; one that cannot bear it is not to keep the news from the others."""
        try:
            admission.refuse(error)
        except Exception:
            log.exception("a request failed while it was refused at %s", self._upstream)

    def _counted(self, error: E) -> E:
        self._refusals_total[error.code] += 1
        return error

    def _too_slow_error(self, weight: int, limits: Limits) -> QueueTooSlow:
        return QueueTooSlow(
            upstream=self._upstream,
            occupancy=occupancy(self._queue, self._slots_settling),
            estimated_seconds=self._newcomer_waits_seconds(weight),
            queue_timeout_seconds=limits.queue_timeout_seconds,
            retry_after_seconds=self._retry_after_seconds(weight),
        )

    def _unservable_error(self, ticket: Ticket) -> GatewayError:
        limits = self._limits
        assert limits is not None
        largest = min(limits.cap, limits.largest)
        if ticket.weight > largest:
            return TooManySequences(upstream=self._upstream, sequences=ticket.weight, cap=largest)
        return UpstreamUnavailable(upstream=self._upstream, reason="no endpoint with room for it answers")

    def _newcomer_waits_seconds(self, weight: int) -> float:
        return self._estimated_wait_seconds(self._queue.slots_wanted + weight)

    def _told_seconds(self, weight: int) -> float | None:
        """The same for people: before anything has ended, the age of what runs is no measure of when it will."""
        return self._newcomer_waits_seconds(weight) if len(self._slot_times) else None

    def _retry_after_seconds(self, weight: int) -> int:
        assert self._limits is not None
        return self._returns.retry_after_seconds(
            self._loop.time(),
            wait_seconds=self._newcomer_waits_seconds(weight),
            grant_interval_seconds=self._slot_interval_seconds() * self._mean_weight(),
            minimum_seconds=self._limits.retry_after_min_seconds,
            maximum_seconds=self._limits.retry_after_max_seconds,
        )

    def _places_taken_error(self, places: int, weight: int) -> QueuePlacesTaken:
        estimated_seconds = self._told_seconds(weight)
        return QueuePlacesTaken(
            upstream=self._upstream,
            occupancy=occupancy(self._queue, self._slots_settling),
            queue_places=places,
            estimated_seconds=estimated_seconds,
            retry_after_seconds=self._retry_after_seconds(weight),
        )

    def _draining_error(self) -> Draining:
        return Draining(upstream=self._upstream, retry_after_seconds=DRAINING_RETRY_AFTER_SECONDS)
