"""The shapes every dialect meets: the canonical request, the head of a response, and what an engine can do.

Pure vocabulary.  Nothing here may know a dialect, a queue, a socket or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from attrs import field, frozen


class Operation(StrEnum):
    """What an upstream is asked to do; the value is the name used in logs."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    SCORE = "score"
    RERANK = "rerank"
    TRANSCRIPTIONS = "transcriptions"
    TRANSLATIONS = "translations"
    BATCH = "batch"
    RENDER = "render"
    TOKENIZE = "tokenize"


@frozen(kw_only=True)
class CanonicalRequest:
    """All that the gateway may know of a request once its dialect has been dealt with.

    ``body`` is the exact document the upstream gets: an OpenAI-style request as vLLM reads it.  ``path`` is relative
    to the upstream's address and constant per operation; nothing a client sends becomes part of it.  ``sequences`` is
    how many of the engine's sequence slots the request will occupy; 0 is for what needs none (counting tokens) and so
    passes no gate.  ``surface`` is a name for the log line, never a
    reason for a decision.
    """

    operation: Operation
    model: str
    stream: bool
    sequences: int
    body: bytes = field(repr=False)
    content_type: str
    path: str
    surface: str


@frozen(kw_only=True)
class ResponseHead:
    """The head of a response, the upstream's or our own.

    ``headers`` are end-to-end fields only, names in lower case, without ``content-type`` and ``content-length``, which
    have places of their own.  ``content_length`` is None where the body's length is not known beforehand.
    """

    status: int
    content_type: str
    content_length: int | None
    headers: tuple[tuple[str, str], ...] = ()


@frozen(kw_only=True)
class Document:
    """A whole answer made by the gateway itself: an error, a list of models."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


@frozen(kw_only=True)
class ModelCard:
    """A model a client may name.

    ``members`` is the upstream's own card, empty until it has shown one; ``alias_of`` the model behind an alias.
    ``created`` is Unix time in seconds, the upstream's where it is known.
    """

    id: str
    created: int
    max_model_len: int | None = None
    alias_of: str | None = None
    members: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class TokenUsage:
    """What a response cost, in tokens, as the engine counted."""

    prompt_tokens: int
    completion_tokens: int


@frozen(kw_only=True)
class Engine:
    """What is known of the engine behind one model, and what a translation into its request may use.

    These are capabilities, not limits, so they have defaults: what a current vLLM with a text model does.

    - ``model``: the name the upstream itself uses.
    - ``max_model_len``: context length in tokens, None where it is not known.
    - ``images``: image parts are understood; off, an image is refused here instead of by the engine.
    - ``image_urls``: the engine may fetch image URLs that clients choose (a way into its network: off).
    - ``tool_images``: image parts may stand in a tool message; else they move to the user message behind it.
    - ``system_anywhere``: the chat template takes system messages after the first place.
    - ``reasoning_field``: the member of an assistant message that carries its reasoning.
    - ``thinking_on``, ``thinking_off``: members merged into the body when the client asks for thinking or forbids it.
    - ``thinking_budget``: the engine takes ``thinking_token_budget`` (vLLM only with a reasoning configuration).
    - ``reasoning_efforts``: what ``reasoning_effort`` may be, lowest first.
    - ``show_unrequested_thinking``: reasoning is shown to clients that did not ask for thinking.
    - ``continuous_usage``: the engine knows ``stream_options.continuous_usage_stats``.
    - ``accounting``: streams that do not ask for their usage are made to tell it, and it is hidden from the client.
    - ``repeat_reasoning_as``: a second name for the reasoning on ``/v1``, for clients that know no other.
    - ``count_tokens``: ask the engine (``upstream``) or count characters (``estimate``).
    - ``body_defaults``: members every request gets that does not have them.
    """

    model: str
    max_model_len: int | None = None
    images: bool = True
    image_urls: bool = False
    tool_images: bool = False
    system_anywhere: bool = False
    reasoning_field: str = "reasoning"
    thinking_on: Mapping[str, Any] = field(factory=lambda: {"chat_template_kwargs": {"enable_thinking": True}})
    thinking_off: Mapping[str, Any] = field(factory=lambda: {"chat_template_kwargs": {"enable_thinking": False}})
    thinking_budget: bool = False
    reasoning_efforts: tuple[str, ...] = ("low", "medium", "high")
    show_unrequested_thinking: bool = False
    continuous_usage: bool = True
    accounting: bool = False
    repeat_reasoning_as: str | None = None
    count_tokens: Literal["upstream", "estimate"] = "upstream"
    body_defaults: Mapping[str, Any] = field(factory=dict)
