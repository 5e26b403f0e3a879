"""What a Messages request asked for that its response has to honour; plain values."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class ReplyTerms:
    """From ``decode`` to the encoder of one call.

    - ``model``: the name the client used, echoed.
    - ``upstream``: the name an operator knows the engine's model by, for faults found in its answer.
    - ``show_thinking``, ``omit_thinking``: whether reasoning is rendered at all, and whether without its text.
    - ``max_tokens``: what the upstream was asked for.
    - ``max_model_len``: context length in tokens, None where it is not known.
    """

    model: str
    upstream: str
    show_thinking: bool
    omit_thinking: bool
    stop_sequences: tuple[str, ...]
    max_tokens: int
    max_model_len: int | None
