"""What happens behind us: an upstream that is not there, silent, broken, or refuses by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from aiogw.errors.base import GatewayError

# When an upstream that is not there, or says that it is busy, is worth asking again.
OVERLOADED_RETRY_AFTER_SECONDS = 5


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
    def detail(self) -> str | None:
        return self.reason

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

    @property
    def detail(self) -> str | None:
        return f"silent for {self.timeout_seconds:g} s while {self.waiting_for} was due"


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

    @property
    def detail(self) -> str | None:
        # What is quoted in it is the answer's own.
        return None if any(mark in self.reason for mark in "'\"`") else self.reason


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
    def detail(self) -> str | None:
        return f"status {self.upstream_status}"

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
