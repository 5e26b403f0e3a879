"""How long a newcomer would wait, from how long slots have been held; pure arithmetic over given numbers.

The clock is the caller's.  Nothing here may know why a slot was held.
"""

from __future__ import annotations

import math
from collections import deque

# So many ends make an estimate that may be the reason for refusing somebody.
ENOUGH = 8  # mutant: a choice, which the tests read from here

# Enough to be steady, few enough to follow a change of load within a minute or two of a busy upstream.
REMEMBERED = 64  # mutant: a choice, which the tests read from here


class HoldTimes:
    """The last ``REMEMBERED`` times for which a request held its slots, in seconds."""

    def __init__(self) -> None:
        self._held_seconds: deque[float] = deque(maxlen=REMEMBERED)

    def __len__(self) -> int:
        return len(self._held_seconds)

    def observe(self, held_seconds: float) -> None:
        self._held_seconds.append(held_seconds)  # mutant: at either end, the other one falls out

    def mean_seconds(self, ages_seconds: list[float]) -> float:
        """The mean time a request holds its slots; ``ages_seconds`` are those of the requests that still hold some.

        Running requests are observations cut off by the present (censored): they add time but no end.  So the mean
        grows while an upstream hangs, instead of remembering better days.  This is the maximum-likelihood estimate for
        exponential times; but a newcomer waits for those that run now, so it is never less than their mean age.  Before
        anything has ended there is only what the oldest has taken so far.
        """
        if not self._held_seconds:
            return max(ages_seconds, default=0.0)
        mean_seconds = (math.fsum(self._held_seconds) + math.fsum(ages_seconds)) / len(self._held_seconds)
        return max(mean_seconds, math.fsum(ages_seconds) / max(1, len(ages_seconds)))


def wait_seconds(*, mean_held_seconds: float, running: int, ahead: int) -> float:
    """Seconds until a request with ``ahead`` others before it is granted, while ``running`` requests free slots."""
    if running == 0:
        return 0.0
    return mean_held_seconds * (ahead + 1) / running


def retry_after_seconds(seconds: float, *, minimum_seconds: int, maximum_seconds: int) -> int:
    """``seconds`` as a whole number for ``Retry-After``, rounded up, within the configured bounds."""
    return max(minimum_seconds, min(maximum_seconds, math.ceil(seconds)))
