"""What is ours: refusals of a request that would be served at another time, and our own mistakes."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import asdict, frozen

from aiogw.errors.base import GatewayError


@frozen(kw_only=True)
class Refusal(GatewayError):
    """Not now.  ``retry_after_seconds`` is a whole number from 1 to 60."""

    retry_after_seconds: int

    status = 503
    should_retry = True

    @property
    def retry_after(self) -> int | None:
        return self.retry_after_seconds


@frozen(kw_only=True)
class Occupancy:
    """What an upstream had of slots and of others who waited, at the moment of a refusal."""

    slots_in_use: int
    slots_settling: int
    cap: int
    waiting: int
    queue_limit: int

    @property
    def slots_free(self) -> int:
        return self.cap - self.slots_in_use - self.slots_settling


@frozen(kw_only=True)
class QueueRefusal(Refusal):
    """The queue's doing; ``estimated_seconds`` is what ``retry_after_seconds`` was made from: a newcomer's wait."""

    upstream: str
    occupancy: Occupancy
    estimated_seconds: float | None = None

    @property
    def figures(self) -> Mapping[str, float]:
        estimate = {} if self.estimated_seconds is None else {"estimated_seconds": round(self.estimated_seconds, 4)}
        return {**asdict(self.occupancy), **self._passed, **estimate}

    @property
    def _passed(self) -> Mapping[str, float]:
        """The limit that it ran into, where it is not one of those of the queue."""
        return {}

    @property
    def _advice(self) -> str:
        again = f"try again in {self.retry_after_seconds} s"
        return again if self.estimated_seconds is None else f"the wait is about {self.estimated_seconds:.3g} s; {again}"


@frozen(kw_only=True)
class QueueFull(QueueRefusal):
    code = "queue_full"
    title = "Queue full"

    @property
    def message(self) -> str:
        cap, free, places = self.occupancy.cap, self.occupancy.slots_free, self.occupancy.queue_limit
        slots = f"All {cap} slots of the upstream {self.upstream!r} are busy"
        if free > 0:
            # Who asks for several sequences waits for as many slots, and all others behind it.
            few = f"too few for the request that is next ({free} of {cap})"
            slots = f"The free slots of the upstream {self.upstream!r} are {few}"
        return f"{slots} and all {places} places of its queue are taken; {self._advice}"


@frozen(kw_only=True)
class QueuePlacesTaken(QueueRefusal):
    """The queue is not full, but one holder has as many who wait as it may."""

    queue_places: int

    code = "queue_places_taken"
    title = "Share of the queue taken"

    @property
    def message(self) -> str:
        return (
            f"All {self.queue_places} places that this key may occupy in the queue of the upstream {self.upstream!r} "
            f"are taken; {self._advice}"
        )

    @property
    def _passed(self) -> Mapping[str, float]:
        return {"queue_places": self.queue_places}


@frozen(kw_only=True)
class QueueTimeout(QueueRefusal):
    waited_seconds: float

    code = "queue_timeout"
    title = "Waited too long"

    @property
    def message(self) -> str:
        room = f"had no room for this request within {self.waited_seconds:g} s"
        return f"The upstream {self.upstream!r} {room}; {self._advice}"


@frozen(kw_only=True)
class QueueTooSlow(QueueRefusal):
    """Refused at entry: by the estimate it would only have timed out later."""

    queue_timeout_seconds: float

    code = "queue_too_slow"
    title = "Would wait too long"

    @property
    def message(self) -> str:
        limit = f"the {self.queue_timeout_seconds:g} s it may"
        return f"A request to the upstream {self.upstream!r} would wait longer than {limit}; {self._advice}"

    @property
    def _passed(self) -> Mapping[str, float]:
        return {"queue_timeout_seconds": self.queue_timeout_seconds}


@frozen(kw_only=True)
class MemoryFull(Refusal):
    """``held_bytes`` are those of others, ``wanted_bytes`` what this one would have taken."""

    limit_bytes: int
    held_bytes: int
    wanted_bytes: int

    code = "memory_full"
    title = "Memory full"

    @property
    def message(self) -> str:
        return (
            f"The bodies of other requests take too much of the {self.limit_bytes} bytes there are for all of them; "
            f"try again in {self.retry_after_seconds} s"
        )

    @property
    def figures(self) -> Mapping[str, float]:
        return {
            "body_memory_bytes": self.limit_bytes,
            "held_bytes": self.held_bytes,
            "wanted_bytes": self.wanted_bytes,
        }


@frozen(kw_only=True)
class Draining(Refusal):
    upstream: str

    code = "draining"
    title = "Shutting down"

    @property
    def message(self) -> str:
        return f"The gateway is shutting down or restarting; try again in {self.retry_after_seconds} s"


@frozen(kw_only=True)
class InternalFault(GatewayError):
    code = "internal_error"
    title = "Internal error"
    status = 500
    should_retry = None

    @property
    def message(self) -> str:
        return "The gateway failed in a way it should not; its log has the details under this request's id"
