"""The model list and single models in Anthropic's form, from the gateway's own cards; asks no upstream."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from aiogw.canonical import Document, ModelCard
from aiogw.dialects.base import Answer
from aiogw.errors import InvalidField, UnknownModel, quoted

_DEFAULT_LIMIT = 20
_MAX_LIMIT = 1000


def list_models(cards: tuple[ModelCard, ...], query: Mapping[str, str]) -> Document:
    """One page: ``limit`` cards after ``after_id``, or before ``before_id``; raises InvalidField."""
    limit = _limit(query.get("limit"))
    first, end = 0, len(cards)
    if "after_id" in query:
        first = _place(cards, query, "after_id") + 1
    if "before_id" in query:
        end = _place(cards, query, "before_id")
    backwards = "before_id" in query and "after_id" not in query
    page = cards[max(first, end - limit) : end] if backwards else cards[first : min(first + limit, end)]
    return _document(
        {
            "data": [_model(card) for card in page],
            "has_more": end - first > limit,
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
        }
    )


def one_model(model: str) -> Answer:
    """The answer that is the card of ``model``; raises UnknownModel when asked."""

    def answer(cards: tuple[ModelCard, ...], query: Mapping[str, str]) -> Document:
        for card in cards:
            if card.id == model:
                return _document(_model(card))
        raise UnknownModel(model=model, known=tuple(card.id for card in cards))

    return answer


def _model(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(card.created, UTC)
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": card.max_model_len,
    }


def _limit(given: str | None) -> int:
    if given is None:
        return _DEFAULT_LIMIT
    if given.isascii() and given.isdecimal() and len(given) <= 4 and 1 <= int(given) <= _MAX_LIMIT:
        return int(given)
    raise InvalidField(path="limit", reason=f"must be a whole number from 1 to {_MAX_LIMIT}")


def _place(cards: tuple[ModelCard, ...], query: Mapping[str, str], name: str) -> int:
    for place, card in enumerate(cards):
        if card.id == query[name]:
            return place
    raise InvalidField(path=name, reason=f"there is no model {quoted(query[name])}")


def _document(members: dict[str, Any]) -> Document:
    return Document(status=200, content_type="application/json", body=msgspec.json.encode(members))
