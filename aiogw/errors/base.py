"""What all endings other than success have in common; fields and one sentence, no surface's wording."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from attrs import frozen

_QUOTED = re.compile(r"['\"`].*['\"`]|['\"`].*", re.DOTALL)


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

    @property
    def detail(self) -> str | None:
        """What the log says besides the code; never anything that a client, a prompt or an answer may have said."""
        return None

    @property
    def figures(self) -> Mapping[str, float]:
        """The numbers by which it was decided, for the log; a limit has the name of its key in the configuration."""
        return {}

    def __str__(self) -> str:
        return self.message


def without_quotes(reason: str) -> str:
    """``reason`` for the log: from the first quotation mark to the last there may be what a client has said."""
    return _QUOTED.sub("...", reason, count=1)


def quoted(text: str, *, limit: int = 200) -> str:
    """Client-given text made safe to show: printable ASCII, escaped, bounded, in quotes."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return ascii(cut)
