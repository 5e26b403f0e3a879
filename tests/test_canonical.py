"""The vocabulary all dialects share holds values and nothing else."""

from __future__ import annotations

import attrs
import pytest

from aiogw.canonical import CanonicalRequest, Document, Engine, ModelCard, Operation, ResponseHead

REQUEST = CanonicalRequest(
    operation=Operation.CHAT,
    model="reasoning",
    stream=True,
    sequences=1,
    body=b'{"messages": "a secret prompt"}',
    content_type="application/json",
    path="/v1/chat/completions",
    surface="openai",
)


@pytest.mark.parametrize(
    "value",
    [
        REQUEST,
        ResponseHead(status=200, content_type="application/json", content_length=None),
        Document(status=200, content_type="application/json", body=b"{}"),
        ModelCard(id="reasoning", created=0),
        Engine(model="reasoning"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_canonical_value_cannot_be_changed(value: attrs.AttrsInstance) -> None:
    """A value that crosses a module border is the same on both sides."""
    name = attrs.fields(type(value))[0].name
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(value, name, None)


def test_a_request_does_not_print_its_body() -> None:
    """A canonical request in a log or a traceback does not give the prompt away."""
    assert "secret" not in repr(REQUEST)


def test_a_request_has_no_defaults() -> None:
    """A dialect has to say everything about a request; there is no value to fall back on."""
    assert [] == [field.name for field in attrs.fields(CanonicalRequest) if field.default is not attrs.NOTHING]


def test_an_operation_is_its_name_in_the_log() -> None:
    """Operations are written as they are named, without their class."""
    assert "chat" == str(Operation.CHAT)
    assert [operation.name.lower() for operation in Operation] == [operation.value for operation in Operation]


def test_engines_do_not_share_what_they_merge_in() -> None:
    """The default members for thinking are made for each engine, so that none can spoil another's."""
    assert Engine(model="a").thinking_on == Engine(model="b").thinking_on
    assert Engine(model="a").thinking_on is not Engine(model="b").thinking_on
    assert Engine(model="a").thinking_on != Engine(model="a").thinking_off
