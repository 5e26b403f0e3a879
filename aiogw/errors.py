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

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import field, frozen


@frozen(kw_only=True)
class GatewayError(Exception):
    """An ending other than success.

    ``status`` is the one decision all surfaces share; ``code`` names the kind for programs, logs and metrics;
    ``message`` is the sentence a person reads.  ``should_retry`` is what ``x-should-retry`` says to the SDKs, None
    where the gateway has no opinion of its own.
    """

    code: ClassVar[str]
    title: ClassVar[str]
    status: ClassVar[int]
    should_retry: ClassVar[bool | None] = False

    @property
    def message(self) -> str:
        raise NotImplementedError  # pragma: no cover - every leaf has its own sentence

    @property
    def param(self) -> str | None:
        """The path of the member that is wrong, where one is."""
        return None

    @property
    def retry_after(self) -> int | None:
        """Whole seconds for ``Retry-After``, where there is a time to name."""
        return None

    def __str__(self) -> str:
        return self.message


# -- the client's ---------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class ClientFault(GatewayError):
    """The request cannot be served as it was sent; sending it again unchanged is useless."""


@frozen(kw_only=True)
class MalformedRequest(ClientFault):
    """Its connection cannot go on: whoever sent it may be of another mind about where the next one begins."""

    reason: str

    code = "malformed_request"
    title = "Not a request"
    status = 400

    @property
    def message(self) -> str:
        return f"This cannot be read as a request: {self.reason}"


@frozen(kw_only=True)
class MalformedBody(ClientFault):
    reason: str

    code = "invalid_body"
    title = "Body not readable"
    status = 400

    @property
    def message(self) -> str:
        return f"The request body could not be read: {self.reason}"


@frozen(kw_only=True)
class InvalidField(ClientFault):
    """``path`` is dotted and zero-based, as in ``messages.3.content.1.type``."""

    path: str
    reason: str

    code = "invalid_request"
    title = "Invalid request"
    status = 400

    @property
    def message(self) -> str:
        return f"{self.path}: {self.reason}"

    @property
    def param(self) -> str | None:
        return self.path


@frozen(kw_only=True)
class InvalidKey(ClientFault):
    """Without fields, so that nothing can be learned from it."""

    code = "invalid_api_key"
    title = "Key not valid"
    status = 401

    @property
    def message(self) -> str:
        return "A valid key is needed here, and only one: as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"


@frozen(kw_only=True)
class UnknownModel(ClientFault):
    model: str
    known: tuple[str, ...]

    code = "model_not_found"
    title = "Unknown model"
    status = 404

    @property
    def message(self) -> str:
        return f"The model {quoted(self.model)} is not served here. Known models: {', '.join(self.known)}"

    @property
    def param(self) -> str | None:
        return "model"


@frozen(kw_only=True)
class UnknownEndpoint(ClientFault):
    method: str
    path: str
    hint: str

    code = "not_found"
    title = "No such endpoint"
    status = 404

    @property
    def message(self) -> str:
        return f"There is no {quoted(f'{self.method} {self.path}')} here. {self.hint}"


@frozen(kw_only=True)
class MethodNotAllowed(ClientFault):
    method: str
    path: str
    allowed: tuple[str, ...]

    code = "method_not_allowed"
    title = "Method not allowed"
    status = 405

    @property
    def message(self) -> str:
        return f"{quoted(self.path)} takes {' or '.join(self.allowed)}, not {quoted(self.method)}"


@frozen(kw_only=True)
class BodyTimeout(ClientFault):
    timeout_seconds: float
    min_bytes_per_second: int

    code = "body_timeout"
    title = "Request too slow"
    status = 408

    @property
    def message(self) -> str:
        more = f"a second more for every {self.min_bytes_per_second} bytes that have come"
        return f"The request body came too slowly: it has {self.timeout_seconds:g} s, and {more}"


@frozen(kw_only=True)
class BodyTooLarge(ClientFault):
    limit_bytes: int

    code = "request_too_large"
    title = "Request too large"
    status = 413

    @property
    def message(self) -> str:
        return f"The request body is larger than the {self.limit_bytes} bytes this gateway accepts"


@frozen(kw_only=True)
class UnsupportedCoding(ClientFault):
    coding: str
    known: tuple[str, ...]

    code = "unsupported_encoding"
    title = "Content-Encoding not known"
    status = 415

    @property
    def message(self) -> str:
        return f"Content-Encoding may be {' or '.join(self.known)}, not {quoted(self.coding)}"


@frozen(kw_only=True)
class TooManySequences(ClientFault):
    upstream: str
    sequences: int
    cap: int

    code = "too_many_sequences"
    title = "Request heavier than the cap"
    status = 422

    @property
    def message(self) -> str:
        return (
            f"The request asks for {self.sequences} sequences at once (n times the number of prompts), but at most "
            f"{self.cap} run at the upstream {self.upstream!r}: send it in smaller parts"
        )


# -- ours -----------------------------------------------------------------------------------------------------------


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
class QueueRefusal(Refusal):
    """The queue's doing; ``estimated_seconds`` is what ``retry_after_seconds`` was made from: a newcomer's wait."""

    upstream: str
    estimated_seconds: float | None = None

    @property
    def _advice(self) -> str:
        again = f"try again in {self.retry_after_seconds} s"
        return again if self.estimated_seconds is None else f"the wait is about {self.estimated_seconds:.3g} s; {again}"


@frozen(kw_only=True)
class QueueFull(QueueRefusal):
    cap: int
    queue_limit: int

    code = "queue_full"
    title = "Queue full"

    @property
    def message(self) -> str:
        return (
            f"All {self.cap} slots of the upstream {self.upstream!r} are busy and all {self.queue_limit} places of its "
            f"queue are taken; {self._advice}"
        )


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


@frozen(kw_only=True)
class QueueTimeout(QueueRefusal):
    waited_seconds: float

    code = "queue_timeout"
    title = "Waited too long"

    @property
    def message(self) -> str:
        return f"No slot of the upstream {self.upstream!r} became free within {self.waited_seconds:g} s; {self._advice}"


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


@frozen(kw_only=True)
class MemoryFull(Refusal):
    limit_bytes: int

    code = "memory_full"
    title = "Memory full"

    @property
    def message(self) -> str:
        return (
            f"The bodies of other requests take too much of the {self.limit_bytes} bytes there are for all of them; "
            f"try again in {self.retry_after_seconds} s"
        )


@frozen(kw_only=True)
class Draining(Refusal):
    upstream: str

    code = "draining"
    title = "Shutting down"

    @property
    def message(self) -> str:
        return f"The gateway is shutting down or restarting; try again in {self.retry_after_seconds} s"


# When an upstream that is not there, or says that it is busy, is worth asking again.
OVERLOADED_RETRY_AFTER_SECONDS = 5

# -- behind us ------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class UpstreamFault(GatewayError):
    upstream: str


@frozen(kw_only=True)
class UpstreamUnavailable(UpstreamFault):
    """No connection could be made, so nothing was generated: safe to send again."""

    reason: str
    retry_after_seconds: int = OVERLOADED_RETRY_AFTER_SECONDS

    code = "upstream_unavailable"
    title = "Upstream unavailable"
    status = 503
    should_retry = True

    @property
    def message(self) -> str:
        return f"The upstream {self.upstream!r} cannot be reached: {self.reason}"

    @property
    def retry_after(self) -> int | None:
        return self.retry_after_seconds


@frozen(kw_only=True)
class UpstreamTimeout(UpstreamFault):
    """``waiting_for`` is ``the first byte`` or ``the next byte``."""

    waiting_for: str
    timeout_seconds: float

    code = "upstream_timeout"
    title = "Upstream silent"
    status = 504

    @property
    def message(self) -> str:
        silence = f"was silent for {self.timeout_seconds:g} s while {self.waiting_for} was due"
        return f"The upstream {self.upstream!r} {silence}"


@frozen(kw_only=True)
class UpstreamBroken(UpstreamFault):
    reason: str

    code = "upstream_broken"
    title = "Upstream broke off"
    status = 502
    should_retry = True

    @property
    def message(self) -> str:
        return f"The upstream {self.upstream!r} broke off: {self.reason}"


@frozen(kw_only=True)
class UpstreamStatus(UpstreamFault):
    """The upstream's own refusal.

    ``upstream_status`` and ``upstream_message`` are what it said; ``error`` is its OpenAI-style ``error`` object where
    it sent one.  ``status`` is what the client is told: the upstream's, except where that would mislead (its 401 is
    about the gateway's credentials, its 404 about the gateway's path).
    """

    upstream_status: int
    # Not shown: an upstream likes to repeat what it was asked.
    upstream_message: str = field(repr=False)
    error: Mapping[str, Any] | None = field(repr=False)
    upstream_retry_after_seconds: int | None

    title = "Upstream refused"

    @property
    def code(self) -> str:  # type: ignore[override]
        return "upstream_auth" if self.about_credentials else "upstream_error"

    @property
    def should_retry(self) -> bool | None:  # type: ignore[override]
        return False if self.about_credentials else None

    @property
    def about_credentials(self) -> bool:
        """Whether it refused the gateway itself: the client's own key never goes there."""
        return self.upstream_status in (401, 403, 407)

    @property
    def status(self) -> int:  # type: ignore[override]
        given = self.upstream_status
        if given in (400, 413, 422, 429, 500, 503, 504):
            return given
        if given == 404 and self.about_model:
            return 404
        if given == 408:
            return 504
        if 400 <= given < 500 and not self.about_credentials and given not in (404, 405):
            return given
        return 502

    @property
    def about_model(self) -> bool:
        """Whether the upstream says that it does not know the model, as vLLM does with a 404."""
        text = self.upstream_message.lower()
        return "model" in text and "does not exist" in text

    @property
    def message(self) -> str:
        if self.about_credentials:
            return f"The upstream {self.upstream!r} does not accept the gateway's own credentials"
        if self.upstream_message:
            return self.upstream_message
        return f"The upstream {self.upstream!r} answered with status {self.upstream_status}"

    @property
    def param(self) -> str | None:
        given = (self.error or {}).get("param")
        return given if isinstance(given, str) else None

    @property
    def retry_after(self) -> int | None:
        if self.upstream_retry_after_seconds is None and self.status == 503:
            # It is overloaded, starting or asleep, and does not say for how long.
            return OVERLOADED_RETRY_AFTER_SECONDS
        return self.upstream_retry_after_seconds


# -- a bug ----------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class InternalFault(GatewayError):
    code = "internal_error"
    title = "Internal error"
    status = 500
    should_retry = None

    @property
    def message(self) -> str:
        return "The gateway failed in a way it should not; its log has the details under this request's id"


# -- nobody is left to be told --------------------------------------------------------------------------------------


@frozen(kw_only=True)
class ClientGone(Exception):
    """The client left, or took nothing for so long that it was given up; ``code`` as for a GatewayError."""

    code: str


def quoted(text: str, *, limit: int = 200) -> str:
    """Client-given text made safe to show: printable ASCII, escaped, bounded, in quotes."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return ascii(cut)
