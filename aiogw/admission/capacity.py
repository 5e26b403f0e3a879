"""How many slots there are, how many are taken and at which endpoint; pure, and no idea of who takes them or why.

A request runs at one endpoint, whole.  So what counts is not only how many slots are free, but whether one endpoint has
enough of them: nine of eleven slots in use may leave no endpoint with room for a request of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

# One endpoint of which nothing is known: the cap is all there is.
ONE_ENDPOINT: Mapping[str, int | None] = MappingProxyType({"": None})


class Capacity:
    """At most ``cap`` slots, None: as many as are asked for.

    ``endpoints`` are those that answer, each with the sequences its engine runs at a time (None: unknown).  Slots taken
    at an endpoint that has gone stay taken until they are given back: they count against ``cap``, and not against the
    slots of the others, which they do not burden.

    ``cap`` is what may be granted at the endpoints of this moment: strictly fewer than they have slots, as everywhere,
    and 0 when there are none.  (A last endpoint with a single slot is the exception: it would never be used.)
    ``largest`` is the heaviest weight that could be taken if all of it were free.  None: no bound.
    """

    def __init__(self, *, cap: int | None, endpoints: Mapping[str, int | None]) -> None:
        self.in_use = 0
        self._used: dict[str, int] = {}
        self.resize(cap=cap, endpoints=endpoints)

    def resize(self, *, cap: int | None, endpoints: Mapping[str, int | None]) -> None:
        """Raises ValueError for a cap that would let nobody through."""
        if cap is not None and cap < 1:
            raise ValueError(f"cap is at least 1, not {cap}")
        self._most = math.inf if cap is None else cap
        self._slots = {name: math.inf if cap is None or slots is None else slots for name, slots in endpoints.items()}
        self._used = {name: used for name, used in self._used.items() if used}
        for name in endpoints:
            self._used.setdefault(name, 0)
        now = min(self._most, max(1, sum(self._slots.values()) - 1)) if endpoints else 0
        largest = min(now, max(self._slots.values(), default=0))  # mutant: without endpoints ``now`` is 0
        self._now = now
        self.cap = _bound(now)
        self.largest = _bound(largest)

    def used(self) -> dict[str, int]:
        """Slots in use by endpoint, those included that have gone but not given all back."""
        return dict(self._used)

    def fits(self, weight: int) -> bool:
        if self.in_use + weight > self._most:
            return False
        if sum(self._used[name] for name in self._slots) + weight > self._now:
            return False
        endpoint = self._freest()
        return self._used[endpoint] + weight <= self._slots[endpoint]

    def take(self, weight: int) -> str:
        """Take ``weight`` slots, which must fit; returns the endpoint that has most of its own free."""
        endpoint = self._freest()
        self.in_use += weight
        self._used[endpoint] += weight
        return endpoint

    def give_back(self, weight: int, endpoint: str) -> None:
        self.in_use -= weight
        self._used[endpoint] -= weight
        if not self._used[endpoint] and endpoint not in self._slots:
            del self._used[endpoint]

    def _freest(self) -> str:
        return max(self._slots, key=lambda name: self._slots[name] - self._used[name])


def _bound(number: float) -> int | None:
    return None if number == math.inf else int(number)
