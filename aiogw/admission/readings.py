"""What the gate is given and what it tells: an operator's limits, and readings of a queue; values only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from aiogw.admission.estimate import ENOUGH
from aiogw.admission.queue import FairQueue
from aiogw.errors import Occupancy


@frozen(kw_only=True)
class Limits:
    """The numbers an operator chose for one upstream.

    ``abort_settle_seconds`` is how long an engine may go on with a request after its connection has been closed;
    ``largest`` the heaviest request that any endpoint could ever take.
    """

    cap: int
    largest: int
    queue_limit: int
    queue_timeout_seconds: float
    retry_after_min_seconds: int
    retry_after_max_seconds: int
    abort_settle_seconds: float


@frozen(kw_only=True)
class EndpointStatistics:
    """``slots``: its engine's, None: unknown.

    ``left_out``: it gets no request until it answers, or it is gone, and only its ``slots_in_use`` are not.  Slots that
    settle count as in use here.  ``unreached_since``, on the monotonic clock: since then each attempt to connect has
    failed; None: the last one has not, as far as whoever made the reading knows.
    """

    left_out: bool
    slots: int | None
    slots_in_use: int
    unreached_since: float | None = None

    @property
    def up(self) -> bool:
        return not self.left_out and self.unreached_since is None


@frozen(kw_only=True)
class GateStatistics:
    """A reading of one upstream's queue; ``cap``, that of this moment, None: unlimited, and then nobody waits.

    ``configured_cap`` is what an operator wrote; with fewer endpoints that answer, ``cap`` may be less.

    ``slots_in_use`` and ``slots_settling`` together are what counts against the cap: requests at work, and aborted ones
    that the engine may not have let go of yet.
    ``refusals_total`` counts by the code of the error; the two totals only ever grow.
    ``refuses``: the code of the error that a request of one sequence would meet now, None: it would be let in.
    ``ends``: the requests that have ended on which the estimates rest; ``queue_timeout_seconds`` None: unlimited.
    """

    cap: int | None
    configured_cap: int | None
    slots_in_use: int
    slots_settling: int
    queue_limit: int
    waiting: int
    queue_timeout_seconds: float | None
    oldest_wait_seconds: float
    refuses: str | None
    ends: int
    grants_total: int
    refusals_total: Mapping[str, int]
    endpoints: Mapping[str, EndpointStatistics]

    @property
    def estimates_measured(self) -> bool:
        """Whether they rest on enough to refuse somebody for them."""
        return self.ends >= ENOUGH

    @property
    def makes_newcomers_wait(self) -> bool:
        full = self.cap is not None and self.slots_in_use + self.slots_settling >= self.cap
        return full or self.waiting > 0


@frozen(kw_only=True)
class Outlook:
    """What a waiting request may be told: how many are ahead of it, and the estimated seconds until its grant.

    None: nothing has ended yet from which to tell.
    """

    ahead: int
    estimated_seconds: float | None


def occupancy(queue: FairQueue[Any], slots_settling: int) -> Occupancy:
    """For a refusal, of which there may be thousands: a whole reading would work out for each what a newcomer meets."""
    return Occupancy(
        slots_in_use=queue.slots_in_use - slots_settling,
        slots_settling=slots_settling,
        cap=queue.cap or 0,  # mutant: with none, nobody is refused by the queue
        waiting=queue.waiting,
        queue_limit=queue.queue_limit,
    )
