"""What an upstream says when it refuses, in all the forms in which upstreams say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiogw.canonical import ResponseHead
from aiogw.dialects.openai import OPENAI
from aiogw.errors import UpstreamStatus
from aiogw.upstream.answer import MAX_MESSAGE_CHARACTERS, MAX_RETRY_AFTER_SECONDS, read_error

TRANSCRIPTS = Path(__file__).parent.parent / "transcripts" / "vllm-0.32"


def read(
    body: Any, *headers: tuple[str, str], status: int = 400, content_type: str = "application/json"
) -> UpstreamStatus:
    given_body = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = ResponseHead(status=status, content_type=content_type, content_length=None, headers=headers)
    return read_error("reasoning", head, given_body)


VLLM = {"message": "n must be at least 1, got 0.", "type": "BadRequestError", "param": "n", "code": 400}


@pytest.mark.parametrize(
    ("body", "message", "error"),
    [
        pytest.param({"error": VLLM}, VLLM["message"], VLLM, id="openai"),
        pytest.param({"error": "Unauthorized"}, "Unauthorized", None, id="error-is-text"),
        pytest.param({"object": "error", "message": "old", "code": 40001}, "old", None, id="old-vllm"),
        pytest.param({"detail": "Not Found"}, "Not Found", None, id="fastapi"),
        pytest.param({"message": "plain"}, "plain", None, id="message"),
        pytest.param({"error": {"code": 7}, "message": "outer"}, "outer", {"code": 7}, id="error-without-message"),
        pytest.param({"error": {"message": 5}, "detail": "last"}, "last", {"message": 5}, id="message-is-no-text"),
        pytest.param({"error": {"message": "in"}, "message": "out"}, "in", {"message": "in"}, id="the-first-counts"),
        pytest.param({"error": "", "message": "", "detail": "only"}, "only", None, id="empty-ones-are-skipped"),
        pytest.param({"error": None, "detail": None}, "", None, id="nulls"),
        pytest.param({"error": ["a"], "detail": {"b": 1}}, "", None, id="other-types"),
        pytest.param({}, "", None, id="empty-object"),
        pytest.param(["error"], "", None, id="list"),
        pytest.param("error", "", None, id="string"),
        pytest.param(b"", "", None, id="nothing"),
        pytest.param(b"{", "", None, id="cut-short"),
        pytest.param(b"<html><body>502 Bad Gateway</body></html>", "", None, id="html-called-json"),
        pytest.param(b'{"error":' * 100_000, "", None, id="nested-too-deeply"),
        pytest.param(b'{"message": "a\xff"}', "", None, id="not-utf-8"),
    ],
)
def test_the_message_is_the_first_text_there_is(body: Any, message: str, error: dict[str, Any] | None) -> None:
    """Of ``error.message``, ``error``, ``message`` and ``detail``; an error object is kept whole beside it."""
    found = read(body)
    assert ("reasoning", 400, message, error) == (
        found.upstream,
        found.upstream_status,
        found.upstream_message,
        found.error,
    )


@pytest.mark.parametrize("name", ["error-not-json", "error-unknown-model"])
def test_what_a_real_vllm_says(name: str) -> None:
    """The recorded refusals of a real vLLM are read with their message and their error object."""
    headers = (TRANSCRIPTS / f"{name}.headers.txt").read_text().splitlines()
    body = (TRANSCRIPTS / f"{name}.body.txt").read_bytes()
    found = read(body, status=int(headers[0].split()[1]))
    assert json.loads(body)["error"] == found.error
    assert json.loads(body)["error"]["message"] == found.upstream_message


@pytest.mark.parametrize("content_type", ["text/html", "text/html; charset=utf-8", "application/octet-stream", ""])
def test_a_page_is_not_shown(content_type: str) -> None:
    """HTML, and what nobody calls text, is not for a person to read: the status says it then."""
    found = read(b"<html>nginx</html>", status=502, content_type=content_type)
    assert "" == found.upstream_message
    assert "The upstream 'reasoning' answered with status 502" == found.message


@pytest.mark.parametrize("content_type", ["text/plain", "Text/Plain; charset=utf-8"])
def test_plain_text_is_shown(content_type: str) -> None:
    """A sentence without JSON around it is a message, also with bytes in it that are not UTF-8."""
    found = read(b" no healthy upstream \xff\n", content_type=content_type)
    assert "no healthy upstream \ufffd" == found.upstream_message


def test_plain_text_that_is_json_is_read_as_such() -> None:
    """What the body is counts more than what it is called."""
    assert "in" == read({"message": "in"}, content_type="text/plain").upstream_message


def test_a_message_is_cut() -> None:
    """A page of text is cut to what a person would read; one of just that length is whole."""
    assert "x" * MAX_MESSAGE_CHARACTERS == read({"message": "x" * 100_000}).upstream_message
    assert "y" * MAX_MESSAGE_CHARACTERS == read({"message": "y" * MAX_MESSAGE_CHARACTERS}).upstream_message


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("a\x00b\x1b[31mc\x7f", "ab[31mc"),
        ("one\r\n\ttwo", "one\n\ttwo"),
        ("  \n", ""),
        ("für \U0001f9ea", "für \U0001f9ea"),
        ("right\u202eto left\u200b", "rightto left"),
    ],
)
def test_a_message_has_no_control_characters(said: str, shown: str) -> None:
    """What could move a terminal's cursor or hide text is dropped; lines and tabs stay."""
    assert shown == read({"message": said}).upstream_message


def test_lone_surrogates_do_not_cost_the_message() -> None:
    """vLLM quotes what it was sent; half a character cannot be shown and is dropped, and the rest is told."""
    found = read(b'{"error":{"message":"bad token \\ud83d here","param":"\\ud83d"}}')
    assert "bad token  here" == found.upstream_message
    assert {"message": "bad token \ud83d here", "param": "\ud83d"} == found.error
    assert "bad token  here" == json.loads(OPENAI.render_error(found, "req_1").body)["detail"]


def test_numbers_of_the_error_object_are_exact() -> None:
    """An integer beyond 64 bits is still itself when the error object is relayed."""
    assert {"code": 12345678901234567890123} == read(b'{"error":{"code":12345678901234567890123}}').error


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7),
        ("0", 1),
        ("60", 60),
        ("61", MAX_RETRY_AFTER_SECONDS),
        ("007", 7),
        ("9" * 5000, MAX_RETRY_AFTER_SECONDS),
        ("-1", None),
        ("1.5", None),
        ("", None),
        ("soon", None),
        ("\u0667", None),
        ("Fri, 31 Dec 2026 23:59:59 GMT", None),
    ],
)
def test_retry_after_is_whole_seconds_within_bounds(value: str, seconds: int | None) -> None:
    """What the upstream asks for is kept between 1 and 60 s; a date, or nonsense, is as if nothing had been said."""
    assert seconds == read(b"", ("retry-after", value), status=429).upstream_retry_after_seconds


def test_without_retry_after_there_is_none() -> None:
    """Other headers are not looked at."""
    assert read(b"", ("x-retry-after", "5"), ("date", "5")).upstream_retry_after_seconds is None


@given(st.binary(max_size=200), st.sampled_from(["", "text/plain", "application/json"]), st.text(max_size=10))
def test_no_body_is_too_strange(body: bytes, content_type: str, retry_after: str) -> None:
    """Whatever comes from behind, there is an error to tell, and it can be rendered."""
    found = read(body, ("retry-after", retry_after), content_type=content_type)
    assert found.message
    assert json.loads(OPENAI.render_error(found, "req_1").body)["detail"] == found.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["error", "message", "detail", "code", "param"]), JSON, max_size=4))
def test_no_document_is_too_strange(document: dict[str, Any]) -> None:
    """Whatever stands where a text or an object is expected, there is an error to tell, and it can be rendered."""
    found = read(document)
    assert json.loads(OPENAI.render_error(found, "req_1").body)["detail"] == found.message
