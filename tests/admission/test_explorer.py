"""The gate in every order its callbacks can have: no leak, no lost wake-up, nothing twice, no grant to the departed."""

from __future__ import annotations

import os
from typing import Any

import pytest
from explorer import Ask, Scenario, ScheduleError, drain, endpoints, explore, replay, resize

from aiogw.admission.gate import Admission, UpstreamGate
from aiogw.admission.queue import FairQueue, Ticket, TicketState
from aiogw.errors import GatewayError

# In CI every schedule of every scenario; at the desk the first so many of each.
LIMIT = int(os.environ.get("EXPLORER_LIMIT", "0")) or (None if os.environ.get("CI") else 1000)
EXPECTED = 10_000

ABC = (Ask("a"), Ask("b"), Ask("c"))
SENT = (Ask("a", grant="sends"), Ask("b", grant="sends"), Ask("c", grant="sends"))
# The second is heavy; with two slots it waits alone in front of the third, which would fit.
HEAVY = (Ask("a"), Ask("b", weight=2), Ask("c"))
# Two of one holder's, of whom one may wait, and one of another's.
SHARED = (Ask("a"), *(Ask(name, holder="x", places=1) for name in "bc"), Ask("d", holder="y", places=1))
HANGING = (Ask("a", hold_seconds=None, grant="sends"), Ask("b", grant="sends"), Ask("c"))

# Where a time-out, a drain or the end of settling is to fall into the very tick in which a slot becomes free, both are
# given the same second: then the explorer runs them in either order.
SCENARIOS = [
    Scenario(name="one-slot", asks=ABC, cancellations=2),
    Scenario(name="one-slot-one-place", asks=ABC, queue_limit=1, cancellations=2),
    Scenario(name="one-slot-sent", asks=SENT, cancellations=2),
    Scenario(name="two-slots", asks=ABC, cap=2, queue_limit=1),
    Scenario(name="two-slots-sent", asks=SENT, cap=2, queue_limit=1),
    Scenario(name="two-slots-late-newcomer", asks=(*ABC[:2], Ask("c", at_seconds=1)), cap=2, queue_limit=1),
    Scenario(name="time-out", asks=ABC, timeout_seconds=1),
    Scenario(name="time-out-two-slots", asks=ABC, cap=2, queue_limit=1, timeout_seconds=1),
    Scenario(name="time-out-one-place", asks=ABC, queue_limit=1, timeout_seconds=1),
    Scenario(name="time-out-sent", asks=SENT, timeout_seconds=2),
    Scenario(
        name="time-out-one-by-one",
        asks=(Ask("a", hold_seconds=2), Ask("b", at_seconds=1), Ask("c", at_seconds=1.5)),
        timeout_seconds=1,
    ),
    Scenario(name="shared", asks=SHARED, queue_limit=3),
    Scenario(name="shared-full", asks=SHARED, queue_limit=1),
    Scenario(name="shared-two-slots", asks=SHARED, cap=2),
    Scenario(name="shared-time-out", asks=SHARED, timeout_seconds=1, cancellations=0),
    Scenario(name="shared-drain", asks=SHARED, events=(drain(1),), cancellations=0),
    Scenario(name="shared-settling", asks=(*HANGING[:1], *SHARED[1:]), settle_seconds=1, cancellations=1),
    Scenario(
        name="shared-enters",
        asks=(
            Ask("a"),
            Ask("b", grant="enters d", holder="x", places=1),
            *(Ask(n, holder="x", places=1) for n in "cd"),
        ),
    ),
    Scenario(name="no-share", asks=(Ask("a"), Ask("b", holder="x", places=0), Ask("c"))),
    Scenario(name="drain", asks=ABC, events=(drain(1),)),
    Scenario(name="drain-two-slots", asks=ABC, cap=2, queue_limit=1, events=(drain(1),)),
    Scenario(name="drain-at-once", asks=ABC, queue_limit=1, events=(drain(0),)),
    Scenario(name="drain-time-out", asks=ABC, timeout_seconds=1, events=(drain(1),), cancellations=0),
    Scenario(name="drain-heavy", asks=HEAVY, cap=2, events=(drain(1),), cancellations=0),
    Scenario(name="heavy", asks=HEAVY, cap=2),
    Scenario(name="heavy-one-place", asks=HEAVY, cap=2, queue_limit=1),
    Scenario(name="heavy-first", asks=(Ask("a", weight=2), Ask("b"), Ask("c")), cap=2),
    Scenario(
        name="heavy-time-out", asks=(Ask("a", hold_seconds=3), *HEAVY[1:]), cap=2, timeout_seconds=1, cancellations=0
    ),
    Scenario(name="too-heavy", asks=(Ask("a"), Ask("b", weight=2), Ask("c"))),
    Scenario(name="settling", asks=HANGING, settle_seconds=1),
    Scenario(name="settling-woken", asks=ABC, settle_seconds=0.5, cancellations=2),
    Scenario(name="settling-time-out", asks=HANGING, settle_seconds=1, timeout_seconds=1),
    Scenario(name="settling-two-slots", asks=HANGING, cap=2, queue_limit=1, settle_seconds=1),
    Scenario(name="settling-drain", asks=HANGING, settle_seconds=1, events=(drain(1),)),
    Scenario(name="fails", asks=(Ask("a"), Ask("b", grant="fails"), Ask("c"))),
    Scenario(name="all-fail", asks=(Ask("a", grant="fails"), Ask("b", grant="fails"), Ask("c", grant="fails"))),
    Scenario(name="raises", asks=(Ask("a"), Ask("b", grant="raises"), Ask("c", grant="sends")), cancellations=2),
    Scenario(name="raises-booked", asks=(Ask("a", weight=2), Ask("b", grant="raises"), Ask("c")), cap=2),
    Scenario(name="raises-time-out", asks=(Ask("a"), Ask("b", grant="raises"), Ask("c")), timeout_seconds=1),
    Scenario(name="ends-the-booked", asks=(Ask("a", weight=2), Ask("b", grant="ends c"), Ask("c")), cap=2),
    Scenario(name="enters", asks=(Ask("a"), Ask("b", grant="enters c"), Ask("c")), queue_limit=1),
    Scenario(name="enters-settling", asks=(Ask("a"), Ask("b", grant="enters c"), Ask("c")), settle_seconds=1),
    # Time passes while callbacks are ready: timers are late, of everybody and in any order.
    Scenario(name="slow", asks=ABC, slow=True, cancellations=0),
    Scenario(name="slow-time-out", asks=ABC, timeout_seconds=1, slow=True, cancellations=0),
    Scenario(name="slow-time-out-two-slots", asks=ABC, cap=2, timeout_seconds=1, slow=True, cancellations=0),
    Scenario(name="slow-heavy", asks=HEAVY, cap=2, timeout_seconds=1, slow=True, detours=3),
    Scenario(name="slow-drain", asks=ABC, events=(drain(1),), slow=True, detours=3),
    Scenario(name="slow-settling", asks=HANGING, settle_seconds=0.5, timeout_seconds=1, slow=True, detours=3),
    Scenario(name="slow-cancelled", asks=ABC, timeout_seconds=1, slow=True, detours=3),
]

TWO = {"x": 2, "y": 2}
BOUNCED = (Ask("a", grant="bounces"), Ask("b", grant="sends"), Ask("c"))

SCENARIOS += [
    # The cap and the queue change under those who wait and hold, in the tick in which a slot becomes free, or another.
    Scenario(name="cap-rises", asks=ABC, events=(resize(0.5, cap=2),)),
    Scenario(name="cap-rises-in-the-tick", asks=SENT, events=(resize(1, cap=2),)),
    Scenario(name="cap-shrinks", asks=ABC, cap=2, events=(resize(0.5, cap=1),)),
    Scenario(name="cap-shrinks-in-the-tick", asks=SENT, cap=2, events=(resize(1, cap=1),)),
    Scenario(name="cap-up-and-down", asks=ABC, events=(resize(1, cap=2), resize(1, cap=1))),
    Scenario(name="cap-shrinks-time-out", asks=ABC, cap=2, timeout_seconds=1, events=(resize(1, cap=1),)),
    Scenario(name="cap-shrinks-below-the-heavy", asks=HEAVY, cap=2, events=(resize(0.5, cap=1),)),
    Scenario(name="cap-shrinks-below-the-head", asks=HEAVY, cap=2, events=(resize(1, cap=1),)),
    Scenario(name="queue-shrinks", asks=(*ABC, Ask("d", at_seconds=0.5)), events=(resize(0.5, cap=1, queue_limit=1),)),
    Scenario(name="cap-rises-drain", asks=ABC, events=(resize(1, cap=3), drain(1))),
    Scenario(name="cap-rises-settling", asks=HANGING, settle_seconds=1, events=(resize(1, cap=2),)),
    Scenario(name="slow-cap", asks=ABC, cap=2, events=(resize(1, cap=1),), slow=True, detours=3),
    # Several endpoints, which come and go.
    Scenario(name="two-endpoints", asks=ABC, cap=2, endpoints=TWO),
    Scenario(name="endpoints-in-pieces", asks=(*ABC, Ask("d", weight=2)), cap=3, endpoints=TWO, cancellations=0),
    Scenario(name="endpoint-goes", asks=ABC, cap=2, endpoints={"x": 1, "y": 2}, events=(endpoints(0.5, x=1),)),
    Scenario(
        name="endpoint-goes-and-comes",
        asks=SENT,
        cap=2,
        endpoints=TWO,
        events=(endpoints(0.5, x=2), endpoints(1, x=2, y=2)),
    ),
    Scenario(name="endpoint-goes-under-the-heavy", asks=HEAVY, cap=2, endpoints=TWO, events=(endpoints(1, x=2),)),
    Scenario(name="all-endpoints-go", asks=ABC, endpoints=TWO, events=(endpoints(0.5), endpoints(1, y=2))),
    Scenario(name="bounces", asks=BOUNCED, endpoints=TWO),
    Scenario(name="bounces-two-slots", asks=BOUNCED, cap=2, endpoints=TWO),
    Scenario(name="both-bounce", asks=(BOUNCED[0], Ask("b", grant="bounces"), Ask("c")), cap=2, endpoints=TWO),
    Scenario(name="bounces-time-out", asks=BOUNCED, endpoints=TWO, timeout_seconds=1),
    Scenario(name="bounces-drain", asks=BOUNCED, endpoints=TWO, events=(drain(0),)),
    Scenario(name="bounces-settling", asks=BOUNCED, endpoints=TWO, settle_seconds=1),
    Scenario(name="slow-bounces", asks=BOUNCED, cap=2, endpoints=TWO, timeout_seconds=1, slow=True, detours=3),
]

explored: dict[str, int] = {}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_schedule_keeps_the_laws(scenario: Scenario) -> None:
    """Whatever order the callbacks of a scenario are run in, and whoever is cancelled when, no law is broken."""
    # R10, R11, R20
    exploration = explore(scenario, limit=LIMIT)
    assert LIMIT is not None or exploration.complete
    explored[scenario.name] = exploration.schedules


def test_enough_was_explored(capsys: pytest.CaptureFixture[str]) -> None:
    """All scenarios together are as many schedules as were promised, each a different one."""
    if len(explored) < len(SCENARIOS):
        pytest.skip("not all scenarios were run")
    total = sum(explored.values())
    with capsys.disabled():
        print(f"\nexplorer: {total:,} schedules of {len(explored)} scenarios, all laws kept")
    assert total >= EXPECTED


# -- the explorer finds faults ---------------------------------------------------------------------------------------


class ForgetsTheUncollected(UpstreamGate):
    """Whoever leaves in the tick of the grant has not been seen to hold anything."""

    def _leave(self, admission: Admission, *, aborted: bool = False) -> None:
        if admission.granted_at != self._loop.time():
            super()._leave(admission, aborted=aborted)


class ForgetsTheBooked(UpstreamGate):
    """Whoever leaves between the booking of the slot and the call of ``granted`` takes it along."""

    def _leave(self, admission: Admission, *, aborted: bool = False) -> None:
        if admission.state is TicketState.HOLDING and admission not in self._holding:
            admission.timer.cancel()
            admission.state = TicketState.LEFT
        else:
            super()._leave(admission, aborted=aborted)


class GrantsTheDeparted(UpstreamGate):
    """What was booked is granted, whatever has happened since."""

    def _grant_one(self, admission: Admission) -> None:
        if admission.state is TicketState.LEFT:
            admission.grant()
        else:
            super()._grant_one(admission)


class GrantsAfterTheDeadline(UpstreamGate):
    """The deadline is left to the timer."""

    def _grant_one(self, admission: Admission) -> None:
        admission.deadline = float("inf")
        super()._grant_one(admission)


class KeepsTheTimer(UpstreamGate):
    """A grant does not end the waiting."""

    def _grant_one(self, admission: Admission) -> None:
        timer, admission.timer = admission.timer, None
        super()._grant_one(admission)
        admission.timer = timer


class DrainsFromTheHead(UpstreamGate):
    """Whoever leaves the queue during a drain lets the next one in."""

    def drain(self) -> None:
        self._draining = True
        for admission in list(self._queue.in_line()):
            self._leave(admission)
            self._refuse(admission, self._counted(self._draining_error()))


class AbortedIsFree(UpstreamGate):
    """An engine is taken to stop at once."""

    def _leave(self, admission: Admission, *, aborted: bool = False) -> None:
        super()._leave(admission)


class SettlesForEver(UpstreamGate):
    """What settles never comes back."""

    def _settled(self, admission: Admission) -> None:
        admission.timer = None


class StopsAtARaise(UpstreamGate):
    """A grant that raises ends the granting, although others have been booked their slots as well."""

    def _refuse(self, admission: Admission, error: GatewayError) -> None:
        super()._refuse(admission, error)
        self._to_grant.clear()


class KeepsTheRiseToItself(UpstreamGate):
    """Who fits under a risen cap holds its slots, and is not told."""

    def resize(self, **changes: Any) -> None:
        self._granting = True
        super().resize(**changes)
        self._granting = False
        self._to_grant.clear()


class KeepsTheUnservable(UpstreamGate):
    """A request that has become too heavy stays at the head."""

    def resize(self, *, upstream: str, limits: Any, endpoints: Any) -> None:
        self._limits, self._endpoints = limits, dict(endpoints)
        self._grant(self._queue.resize(cap=limits.cap, queue_limit=limits.queue_limit, endpoints=endpoints))


class WaitsAgainForEver(UpstreamGate):
    """Who is put back is given no deadline."""

    def _put_back(self, admission: Admission) -> bool:
        put_back = super()._put_back(admission)
        if admission.timer is not None:
            admission.timer.cancel()
            admission.timer = None
        return put_back


class PutsBackDuringADrain(UpstreamGate):
    """A request that finds no endpoint waits again, although nobody will be granted anything any more."""

    def _put_back(self, admission: Admission) -> bool:
        draining, self._draining = self._draining, False
        put_back = super()._put_back(admission)
        self._draining = draining
        return put_back


class PutBackAtTheEndQueue(FairQueue[Ticket]):
    """Who is put back begins anew."""

    def put_back(self, ticket: Ticket) -> list[Ticket]:
        self._capacity.give_back(ticket.weight, ticket.endpoint)
        ticket.state = TicketState.WAITING
        self._waiting[ticket] = None
        return self._advance()


class FirstEndpointQueue(FairQueue[Ticket]):
    """The first endpoint is good enough for everybody."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self._capacity._freest = lambda: next(iter(self._capacity._slots))  # type: ignore[method-assign]


class FaithfulToTheGoneQueue(FairQueue[Ticket]):
    """Endpoints are never given up."""

    def resize(self, **limits: Any) -> list[Ticket]:
        return super().resize(**(limits | {"endpoints": {**self._capacity._slots, **limits["endpoints"]}}))


class SharelessQueue(FairQueue[Ticket]):
    """Whoever waits is nobody's."""

    def waiting_of(self, _holder: str | None) -> int:
        return 0


class DepartedCountingQueue(FairQueue[Ticket]):
    """A count that goes up with who comes to wait, and that not every way out takes down again."""

    def leave(self, ticket: Ticket) -> list[Ticket]:
        waited = ticket.state is TicketState.WAITING
        granted = super().leave(ticket)
        self._waiting_by_holder[ticket.holder] += waited
        return granted


class OvertakingQueue(FairQueue[Ticket]):
    """A newcomer that fits need not wait."""

    def enter(self, ticket: Ticket) -> bool:
        if self._capacity.fits(ticket.weight):
            self._hold(ticket)
            return True
        return super().enter(ticket)


class TwiceReleasingQueue(FairQueue[Ticket]):
    """A second end of the same request gives the slots back again."""

    def leave(self, ticket: Ticket) -> list[Ticket]:
        if ticket.state is TicketState.LEFT:
            self._capacity.give_back(ticket.weight, ticket.endpoint)
            return self._advance()
        return super().leave(ticket)


class SleepingQueue(FairQueue[Ticket]):
    """When a heavy head gives up, nobody looks at who was behind it."""

    def leave(self, ticket: Ticket) -> list[Ticket]:
        if ticket.state is TicketState.WAITING:
            del self._waiting[ticket]
            ticket.state = TicketState.LEFT
            return []
        return super().leave(ticket)


class OneAtATimeQueue(FairQueue[Ticket]):
    """A heavy one that leaves lets only one light one in."""

    def _advance(self) -> list[Ticket]:
        if self.head is None or not self._capacity.fits(self.head.weight):
            return []
        ticket, _ = self._waiting.popitem(last=False)
        self._hold(ticket)
        return [ticket]


class LatestFirstQueue(FairQueue[Ticket]):
    """The last to come is the first to be served."""

    @property
    def head(self) -> Ticket | None:
        return next(reversed(self._waiting), None)


class LooseQueue(FairQueue[Ticket]):
    """One slot more than there is."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self._capacity.fits = lambda weight: self._capacity.in_use <= self._capacity.cap  # type: ignore[method-assign]


def with_queue(kind: type[FairQueue[Ticket]]) -> type[UpstreamGate]:
    class BrokenGate(UpstreamGate):
        def __init__(self, *, limits: Any, endpoints: Any, **others: Any) -> None:
            super().__init__(limits=limits, endpoints=endpoints, **others)
            self._queue = kind(cap=limits.cap, queue_limit=limits.queue_limit, endpoints=endpoints)

    BrokenGate.__name__ = kind.__name__
    return BrokenGate


FAULTS = [
    (ForgetsTheUncollected, "one-slot", "no leak"),
    (ForgetsTheBooked, "ends-the-booked", "no leak"),
    (GrantsTheDeparted, "ends-the-booked", "no grant to the departed"),
    (GrantsAfterTheDeadline, "time-out", "no grant at or after the deadline"),
    (GrantsAfterTheDeadline, "slow-time-out", "no grant at or after the deadline"),
    (KeepsTheTimer, "time-out-one-by-one", "timers of the gate are armed"),
    (DrainsFromTheHead, "drain-heavy", "no grant during a drain"),
    (AbortedIsFree, "settling", "slots in use never exceed the cap"),
    (SettlesForEver, "settling", "timers of the gate are armed"),
    (StopsAtARaise, "raises-booked", "no leak"),
    (with_queue(SharelessQueue), "shared", "no more of x wait than may"),
    (with_queue(DepartedCountingQueue), "shared", "nobody is refused while there is a place"),
    (with_queue(OvertakingQueue), "heavy", "grants in the order of arrival"),
    (with_queue(TwiceReleasingQueue), "too-heavy", "no double release"),
    (with_queue(SleepingQueue), "heavy", "no lost wake-up"),
    (with_queue(OneAtATimeQueue), "heavy-first", "no lost wake-up"),
    (with_queue(LatestFirstQueue), "one-slot", "grants in the order of arrival"),
    (with_queue(LooseQueue), "one-slot", "slots in use never exceed the cap"),
    (KeepsTheRiseToItself, "cap-rises", "no leak"),
    (KeepsTheUnservable, "cap-shrinks-below-the-head", "nobody waits for what there could never be"),
    (WaitsAgainForEver, "bounces-two-slots", "timers of the gate are armed"),
    (PutsBackDuringADrain, "bounces-drain", "no grant during a drain"),
    (with_queue(PutBackAtTheEndQueue), "bounces-two-slots", "grants in the order of arrival"),
    (with_queue(FirstEndpointQueue), "two-endpoints", "the endpoint with the most free slots"),
    (with_queue(FaithfulToTheGoneQueue), "endpoint-goes", "no grant at an endpoint that is not there"),
]


@pytest.mark.parametrize(("gate", "name", "law"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_gate_is_found(gate: type[UpstreamGate], name: str, law: str) -> None:
    """Each fault breaks a law in some schedule, which the message shows, and whose number shows it again."""
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.name == name)
    with pytest.raises(ScheduleError) as found:
        explore(scenario, gate=gate)
    assert law in str(found.value)
    assert f"schedule {found.value.number}" in str(found.value)
    assert f"BROKEN: {found.value.law}" in str(found.value)
    with pytest.raises(ScheduleError) as again:
        replay(found.value.number, SCENARIOS, gate=gate)
    assert str(found.value) == str(again.value)
    # The same schedule over the real gate is a good one.
    replay(found.value.number, SCENARIOS)


def test_no_schedule_is_run_twice() -> None:
    """The numbers are all different, and so are the traces, except where an order makes no difference to anybody."""
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.name == "drain-heavy")
    numbers: list[str] = []
    assert explore(scenario, each=numbers.append).schedules == len(numbers) == len(set(numbers))
    traces = {"\n".join(replay(number, SCENARIOS)) for number in numbers}
    assert len(traces) == len(numbers)


def test_a_replay_is_told_step_by_step() -> None:
    """The first schedule of the simplest scenario, as the real loop would run it."""
    told = "a goes on,     a is granted, b goes on, c goes on, "
    told += "it is 1 s, Request._wake a, a goes on,     a leaves,     b is granted, b goes on, "
    told += "it is 2 s, Request._wake b, b goes on,     b leaves,     c is granted, c goes on, "
    told += "it is 3 s, Request._wake c, c goes on,     c leaves"
    assert told.split(", ") == replay("one-slot#", SCENARIOS)
