"""What a request on ``/v1`` settles for its response."""

from __future__ import annotations

from attrs import frozen

from aiogw.canonical import Operation


@frozen(kw_only=True)
class ReplyTerms:
    """``upstream`` is a name for messages; ``must_finish``: its stream ends with a finish reason or ``[DONE]``.

    ``accounting``: the usage is read; ``hide_usage``: the client did not ask for the event that tells it.
    ``repeat_reasoning_as``: the name under which ``reasoning_field`` is repeated, None for bytes as they are.
    """

    upstream: str
    stream: bool
    operation: Operation
    must_finish: bool
    accounting: bool
    hide_usage: bool
    reasoning_field: str
    repeat_reasoning_as: str | None
