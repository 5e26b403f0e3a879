"""Everything that can end a request badly, grouped by whose fault it is; fields and one sentence, no surface's wording.

    GatewayError
    ├── ClientFault           the request cannot be served as it was sent
    │   ├── MalformedRequest      400  not HTTP/1.1, or in doubt where it ends
    │   ├── MalformedBody         400  not JSON, not an object, not readable
    │   ├── InvalidField          400  one member is wrong; ``param`` is its path
    │   ├── InvalidKey            401  no key, more than one, or nobody's
    │   ├── UnknownModel          404
    │   ├── UnknownEndpoint       404
    │   ├── MethodNotAllowed      405
    │   ├── BodyTimeout           408
    │   ├── BodyTooLarge          413
    │   ├── UnsupportedCoding     415
    │   └── TooManySequences      422  heavier than the cap: could never be admitted
    ├── Refusal               ours: not now; always with ``retry_after_seconds``
    │   ├── QueueFull             503
    │   ├── QueuePlacesTaken      503  not full, but this holder's share of it
    │   ├── QueueTimeout          503
    │   ├── QueueTooSlow          503  would time out, by the estimate
    │   ├── MemoryFull            503  too many bytes of bodies at once
    │   └── Draining              503
    ├── UpstreamFault         behind us
    │   ├── UpstreamUnavailable   503  no connection could be made
    │   ├── UpstreamTimeout       504  connected, then silent for too long
    │   ├── UpstreamBroken        502  reset, cut short, or not HTTP
    │   └── UpstreamStatus        its own refusal, relayed
    └── InternalFault         500  a bug of ours

``ClientGone`` stands apart: nobody is left to be told.  Nothing here may know HTTP framing, a dialect or a clock.
"""

from __future__ import annotations

from attrs import frozen

from aiogw.errors.base import (
    GatewayError,
    quoted,
)
from aiogw.errors.client import (
    BodyTimeout,
    BodyTooLarge,
    ClientFault,
    InvalidField,
    InvalidKey,
    MalformedBody,
    MalformedRequest,
    MethodNotAllowed,
    TooManySequences,
    UnknownEndpoint,
    UnknownModel,
    UnsupportedCoding,
)
from aiogw.errors.ours import (
    Draining,
    InternalFault,
    MemoryFull,
    Occupancy,
    QueueFull,
    QueuePlacesTaken,
    QueueRefusal,
    QueueTimeout,
    QueueTooSlow,
    Refusal,
)
from aiogw.errors.upstream import (
    OVERLOADED_RETRY_AFTER_SECONDS,
    UpstreamBroken,
    UpstreamFault,
    UpstreamStatus,
    UpstreamTimeout,
    UpstreamUnavailable,
)

__all__ = [
    "OVERLOADED_RETRY_AFTER_SECONDS",
    "BodyTimeout",
    "BodyTooLarge",
    "ClientFault",
    "ClientGone",
    "Draining",
    "GatewayError",
    "InternalFault",
    "InvalidField",
    "InvalidKey",
    "MalformedBody",
    "MalformedRequest",
    "MemoryFull",
    "MethodNotAllowed",
    "Occupancy",
    "QueueFull",
    "QueuePlacesTaken",
    "QueueRefusal",
    "QueueTimeout",
    "QueueTooSlow",
    "Refusal",
    "TooManySequences",
    "UnknownEndpoint",
    "UnknownModel",
    "UnsupportedCoding",
    "UpstreamBroken",
    "UpstreamFault",
    "UpstreamStatus",
    "UpstreamTimeout",
    "UpstreamUnavailable",
    "quoted",
]


@frozen(kw_only=True)
class ClientGone(Exception):
    """The client left, or took nothing for so long that it was given up; ``code`` as for a GatewayError."""

    code: str
