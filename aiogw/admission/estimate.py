"""How long a newcomer would wait, and when one that is refused should come back; pure arithmetic over given numbers.

The clock is the caller's.  Nothing here may know why a slot was held.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection

# So many ends make an estimate that may be the reason for refusing somebody.
ENOUGH = 8  # mutant: a choice, which the tests read from here

# Enough to be steady, few enough to follow a change of load within a minute or two of a busy upstream.
REMEMBERED = 64  # mutant: a choice, which the tests read from here

# What a request is taken to need while nothing is known: with less, all who are refused after a start would come back
# in the first second.
UNKNOWN_SLOT_SECONDS = 1.0  # mutant: a choice, which the tests read from here

# A place in the queue goes to whoever comes first, so not every place is left for those who were told to come back.
# scripts/bench retries: with two to three no more of them find one, and a herd takes longer than a minute.
NEWCOMERS_PER_RETURN = 1  # mutant: a choice, which the tests read from here

# How much later than expected they are told to come: so many standard deviations of so many grants.
DEVIATIONS = 2  # mutant: a choice, which the tests read from here

# Both in full where so many are out, and in proportion where fewer are: a few who are told to be that careful leave
# slots idle, since they are all there is.
MANY_RETURNS = 10  # mutant: a choice, which the tests read from here


class SlotTimes:
    """How long slots have been busy for each that was given back, over the last ``REMEMBERED`` requests that ended.

    Busy time over ends is the mean time for which a slot is held, whatever the distribution of the times (the
    utilization law of operational analysis: Denning and Buzen, ACM Computing Surveys 10(3), 1978).  What runs now
    counts with its age and without an end, so the mean grows while an upstream hangs; and since what ran at the first
    of those ends counts from then only, the ages of then and of now cancel out.
    """

    def __init__(self) -> None:
        self._slots_in_use = 0
        self._changed_at = 0.0  # mutant: no slot is in use before the first change
        self._slot_seconds = 0.0  # mutant: only differences count
        self._slots_ended = 0  # mutant: only differences count
        # After each end: the busy time, and the slots that have been given back.
        self._ends = deque([(self._slot_seconds, self._slots_ended)], maxlen=REMEMBERED + 1)

    def __len__(self) -> int:
        """The number of ends the mean rests on."""
        return len(self._ends) - 1

    def take(self, slots: int, now: float) -> None:
        self._pass_time(now)
        self._slots_in_use += slots

    def free(self, slots: int, now: float, *, ended: bool) -> None:
        """``ended`` False: given back by a request that has yet to be served."""
        self._pass_time(now)
        self._slots_in_use -= slots
        if ended:
            self._slots_ended += slots
            self._ends.append((self._slot_seconds, self._slots_ended))

    def slot_interval_seconds(self, running_seconds: Collection[float], now: float) -> float:
        """Seconds from one slot that becomes free to the next; 0.0 when none is in use.

        ``running_seconds``: the ages of those that run.  All of them say that a slot is held for at least as long as
        the newest has held its own; before anything has ended, the oldest is all there is to know.
        """
        if not running_seconds:
            return 0.0
        self._pass_time(now)
        if len(self) == 0:
            mean_seconds = max(UNKNOWN_SLOT_SECONDS, *running_seconds)
        else:
            slot_seconds, slots_ended = self._ends[0]
            mean_seconds = (self._slot_seconds - slot_seconds) / (self._slots_ended - slots_ended)
            mean_seconds = max(mean_seconds, min(running_seconds))
        return mean_seconds / self._slots_in_use

    def _pass_time(self, now: float) -> None:
        self._slot_seconds += self._slots_in_use * (now - self._changed_at)
        self._changed_at = now


class Returns:
    """When those who were refused have been told to come back, so that the next one is told a moment of its own.

    Nobody is kept a place, and nobody is known again: this only spreads them as thinly as places will be free.
    """

    def __init__(self) -> None:
        self._due: Counter[int] = Counter()

    def retry_after_seconds(
        self,
        now: float,
        *,
        wait_seconds: float,
        grant_interval_seconds: float,
        minimum_seconds: int,
        maximum_seconds: int,
    ) -> int:
        """The first whole second at which a place is likely: for ``Retry-After``, within the configured bounds.

        By then who waits now is granted, which ``wait_seconds`` estimates for one more, and those who come back earlier
        have had their places.  The time that so many grants take varies by about the root of their number.

        How much room is left for that, and for newcomers, grows with the number of those who are out.

        Where that is beyond the maximum there is no right moment, and the least crowded one of the later half is told.
        """
        second = math.floor(now)
        for past in [due for due in self._due if due <= second]:  # mutant: this second is not read either
            del self._due[past]
        crowding = min(1.0, self._due.total() / MANY_RETURNS)
        places_per_return = 1 + NEWCOMERS_PER_RETURN * crowding
        # Before who waits now is granted, no second is likely, and thousands may ask.
        first = math.ceil(min(max(1, wait_seconds), maximum_seconds))  # mutant: to begin earlier only takes longer
        earlier = sum(count for due, count in self._due.items() if due < second + first)
        for seconds in range(first, maximum_seconds + 1):
            earlier += self._due[second + seconds]
            expected_seconds = wait_seconds + grant_interval_seconds * places_per_return * earlier
            deviation_seconds = math.sqrt(expected_seconds * grant_interval_seconds)
            likely_seconds = expected_seconds + DEVIATIONS * crowding * deviation_seconds
            if minimum_seconds <= seconds and likely_seconds <= seconds:
                break
        else:
            later_half = range(maximum_seconds, max(minimum_seconds, maximum_seconds // 2) - 1, -1)
            seconds = min(later_half, key=lambda one: self._due[second + one])
        self._due[second + seconds] += 1
        return seconds
