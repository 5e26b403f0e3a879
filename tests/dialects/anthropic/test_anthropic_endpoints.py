"""What there is below /llm: the closed table of endpoints, the hints, and the models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aiogw.canonical import ModelCard, Operation
from aiogw.dialects.anthropic import ANTHROPIC
from aiogw.dialects.base import LocalEndpoint, RelayEndpoint
from aiogw.errors import InvalidField, MethodNotAllowed, UnknownEndpoint, UnknownModel

CARDS = tuple(ModelCard(id=name, created=1796095098) for name in ("a", "org/b", "c"))


def local(path: str, cards: tuple[ModelCard, ...] = CARDS, method: str = "GET", **query: str) -> Any:
    endpoint = ANTHROPIC.endpoint(method, path)
    assert isinstance(endpoint, LocalEndpoint)
    document = endpoint.answer(cards, query)
    assert document.status == 200
    return json.loads(document.body) if document.body else None


def listed(cards: tuple[ModelCard, ...] = CARDS, **query: str) -> tuple[list[str], bool]:
    page = local("/llm/v1/models", cards, **query)
    names = [model["id"] for model in page["data"]]
    assert (page["first_id"], page["last_id"]) == ((names[0], names[-1]) if names else (None, None))
    return names, page["has_more"]


def test_what_the_dialect_is() -> None:
    """P1: its mount, its name, and the headers in which its SDK looks for the request id."""
    assert (ANTHROPIC.name, ANTHROPIC.mount) == ("anthropic", "/llm")
    assert ANTHROPIC.request_id_headers == ("x-request-id", "request-id")


def test_messages_become_chat_completions() -> None:
    """Q1: a POST, by its path alone."""
    endpoint = RelayEndpoint(operation=Operation.CHAT, path="/v1/chat/completions")
    assert ANTHROPIC.endpoint("POST", "/llm/v1/messages") == endpoint


def test_counting_asks_the_upstream_to_tokenize() -> None:
    """Q1, M1: a POST as well, and the one other thing an upstream is asked for."""
    endpoint = RelayEndpoint(operation=Operation.TOKENIZE, path="/tokenize")
    assert ANTHROPIC.endpoint("POST", "/llm/v1/messages/count_tokens") == endpoint


@pytest.mark.parametrize("path", ["/llm", "/llm/"])
def test_a_head_on_the_mount_is_answered(path: str) -> None:
    """Q1: without a body and without an upstream; a GET there is a 404."""
    assert local(path, method="HEAD") is None
    with pytest.raises(UnknownEndpoint):
        ANTHROPIC.endpoint("GET", path)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/llm/v1/messages", "POST"),
        ("DELETE", "/llm/v1/messages", "POST"),
        ("GET", "/llm/v1/messages/count_tokens", "POST"),
        ("POST", "/llm/v1/models", "GET, HEAD"),
        ("DELETE", "/llm/v1/models/org/b", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told(method: str, path: str, allowed: str) -> None:
    """Q1, E19: a known path says what it takes."""
    with pytest.raises(MethodNotAllowed) as caught:
        ANTHROPIC.endpoint(method, path)
    assert caught.value.allowed == tuple(allowed.split(", "))


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/llm/v1/v1/messages", "without /v1"),
        ("/llm/messages", "/llm/v1/messages"),
        ("/llm/models/x", "/llm/v1/models/x"),
        ("/llm/v1/chat/completions", "OpenAI clients use /v1"),
        ("/llm/chat/completions", "OpenAI clients use /v1"),
        ("/llm/v1/embeddings", "OpenAI clients use /v1"),
        ("/llm/v1/messages/batches", "batches are not offered"),
        ("/llm/v1/messages/", "/llm/v1/messages."),
        ("/llm/v1/models/", "/llm/v1/models."),
        ("/llm/v1/files", "There are POST /llm/v1/messages"),
        ("/llm/other/", "There are POST /llm/v1/messages"),
    ],
)
def test_what_there_is_not_comes_with_a_hint(path: str, hint: str) -> None:
    """Q1, E19: a 404, and the usual wrong base URLs are recognised."""
    with pytest.raises(UnknownEndpoint) as caught:
        ANTHROPIC.endpoint("POST", path)
    assert hint in caught.value.hint


def test_a_model_in_anthropics_form() -> None:
    """M3, M4: RFC 3339 and a display name; ids contain slashes."""
    expected = {
        "type": "model",
        "id": "org/b",
        "display_name": "org/b",
        "created_at": "2026-12-01T03:18:18Z",
        "max_input_tokens": None,
    }
    assert local("/llm/v1/models/org/b") == expected
    assert local("/llm/v1/models")["data"][1] == expected


def test_a_model_that_is_not_there() -> None:
    """M4: a 404 that names it."""
    with pytest.raises(UnknownModel) as caught:
        local("/llm/v1/models/org/x")
    assert (caught.value.model, caught.value.known) == ("org/x", ("a", "org/b", "c"))


@pytest.mark.parametrize(
    ("query", "names", "more"),
    [
        ({}, ["a", "org/b", "c"], False),
        ({"limit": "1000"}, ["a", "org/b", "c"], False),
        ({"limit": "2"}, ["a", "org/b"], True),
        ({"limit": "3"}, ["a", "org/b", "c"], False),
        ({"after_id": "a"}, ["org/b", "c"], False),
        ({"after_id": "a", "limit": "1"}, ["org/b"], True),
        ({"after_id": "c"}, [], False),
        ({"before_id": "c"}, ["a", "org/b"], False),
        ({"before_id": "c", "limit": "1"}, ["org/b"], True),
        ({"before_id": "a"}, [], False),
        ({"after_id": "a", "before_id": "c"}, ["org/b"], False),
        ({"after_id": "c", "before_id": "a"}, [], False),
    ],
)
def test_pages_of_models(query: dict[str, str], names: list[str], more: bool) -> None:
    """M3: limit, after_id and before_id, which pages backwards."""
    assert listed(**query) == (names, more)


def test_no_models_at_all() -> None:
    """M3: an empty page has no first and no last."""
    assert listed(()) == ([], False)
    assert listed(tuple(ModelCard(id=str(number), created=0) for number in range(30)))[1]


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "1001"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": "٣"}, "limit"),
        ({"limit": "1" * 5000}, "limit"),
        ({"after_id": "x"}, "after_id"),
        ({"before_id": "x"}, "before_id"),
    ],
)
def test_pages_that_make_no_sense(query: dict[str, str], path: str) -> None:
    """M3, E18: refused by the name of the parameter."""
    with pytest.raises(InvalidField) as caught:
        listed(**query)
    assert caught.value.path == path
