"""The account of the memory that request bodies take, all of them together: who may hold how much, and what is held.

Pure counting; whose bodies they are, and what becomes of them, is not known here.
"""

from __future__ import annotations

from aiogw.errors import MemoryFull

# How fast bodies go away is the upstreams' doing, and nobody knows which one the next will be for.
RETRY_AFTER_SECONDS = 5


class HeldBody:
    """What one request holds of the budget, from the first byte of its body until it is let go."""

    __slots__ = ("_budget", "size")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.size = 0

    def resize(self, size: int) -> None:
        """Hold ``size`` bytes from now on; raises MemoryFull, and holds what it held, where they are not to be had."""
        budget = self._budget
        if size > self.size and budget.held_bytes + size - self.size > budget.limit_bytes:
            raise MemoryFull(
                limit_bytes=budget.limit_bytes,
                held_bytes=budget.held_bytes - self.size,
                wanted_bytes=size,
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        budget.held_bytes += size - self.size
        self.size = size

    def release(self) -> None:
        """Give all of it back; again and again is the same as once."""
        self.resize(0)


class BodyBudget:
    """At most ``limit_bytes`` of bodies at any time; ``held_bytes`` are taken."""

    def __init__(self, *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def hold(self) -> HeldBody:
        """The account of one more request, which holds nothing yet."""
        return HeldBody(self)
