"""The error tree: every leaf says what went wrong, to programs by a code and to people by a sentence."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import attrs
import pytest
from specimens import OCCUPANCY, leaves, specimen, specimens

from aiogw.errors import (
    ClientFault,
    ClientGone,
    GatewayError,
    InternalFault,
    InvalidField,
    MalformedBody,
    MalformedRequest,
    MethodNotAllowed,
    QueueFull,
    QueueTimeout,
    Refusal,
    UnknownModel,
    UpstreamFault,
    UpstreamStatus,
    UpstreamTimeout,
    UpstreamUnavailable,
    quoted,
)

LEAVES = [pytest.param(error, id=type(error).__name__) for error in specimens()]


def upstream_status(status: int, message: str = "", **changes: Any) -> UpstreamStatus:
    fields: dict[str, Any] = {"error": None, "upstream_retry_after_seconds": None, **changes}
    return UpstreamStatus(upstream="reasoning", upstream_status=status, upstream_message=message, **fields)


@pytest.mark.parametrize("error", LEAVES)
def test_a_leaf_is_complete(error: GatewayError) -> None:
    """Every leaf has a code for programs, a title, an error status and a sentence, which is also its text."""
    assert error.code.replace("_", "").isalpha()
    assert error.code == error.code.lower()
    assert error.title
    assert 400 <= error.status <= 599
    assert error.should_retry in (True, False, None)
    assert error.message
    assert error.message == str(error)


@pytest.mark.parametrize("error", LEAVES)
def test_a_sentence_names_the_fields(error: GatewayError) -> None:
    """What an error holds is in what it says, except for what a surface renders in a place of its own."""
    elsewhere = {
        # Refusing everybody is not one upstream's doing.
        "Draining": {"upstream"},
        # Safe to send again; when, is in the header.
        "UpstreamUnavailable": {"retry_after_seconds"},
        # An estimate is told without its fractions; how others fare is not this client's business.
        "QueueFull": {"estimated_seconds", "occupancy"},
        "QueuePlacesTaken": {"estimated_seconds", "occupancy"},
        "QueueTimeout": {"estimated_seconds", "occupancy"},
        "QueueTooSlow": {"estimated_seconds", "occupancy"},
        "MemoryFull": {"held_bytes", "wanted_bytes"},
        # Its own words are passed on as they are.
        "UpstreamStatus": {"upstream", "upstream_status", "error", "upstream_retry_after_seconds"},
    }
    for field in attrs.fields(type(error)):
        if field.name in elsewhere.get(type(error).__name__, ()):
            continue
        value = getattr(error, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            assert str(part) in error.message


DECIDED = {
    "malformed_request": (400, False),
    "invalid_body": (400, False),
    "invalid_request": (400, False),
    "invalid_api_key": (401, False),
    "model_not_found": (404, False),
    "not_found": (404, False),
    "method_not_allowed": (405, False),
    "body_timeout": (408, False),
    "request_too_large": (413, False),
    "unsupported_encoding": (415, False),
    "too_many_sequences": (422, False),
    "queue_full": (503, True),
    "queue_places_taken": (503, True),
    "queue_timeout": (503, True),
    "queue_too_slow": (503, True),
    "memory_full": (503, True),
    "draining": (503, True),
    "upstream_unavailable": (503, True),
    "upstream_timeout": (504, False),
    "upstream_broken": (502, True),
    "upstream_error": (400, None),
    "internal_error": (500, None),
}


def test_what_is_decided_once_for_all_surfaces() -> None:
    """The status of each kind of error, and whether it makes sense to try again; programs rely on both."""
    assert {error.code: (error.status, error.should_retry) for error in specimens()} == DECIDED


def test_leaves_are_told_apart() -> None:
    """No two leaves share a code or a title, since both end up where only one of them is looked at."""
    for one, other in combinations(specimens(), 2):
        assert one.code != other.code
        assert one.title != other.title


def test_every_leaf_has_one_at_fault() -> None:
    """A leaf is the client's, ours, the upstream's or a bug, and its status says the same."""
    for cls in leaves():
        error = specimen(cls)
        sides = [side for side in (ClientFault, Refusal, UpstreamFault, InternalFault) if issubclass(cls, side)]
        assert 1 == len(sides)
        if sides == [ClientFault]:
            assert 400 <= error.status < 500
            assert error.should_retry is False
        if sides == [Refusal]:
            assert (503, True) == (error.status, error.should_retry)
            assert error.retry_after == attrs.asdict(error)["retry_after_seconds"]


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("must be an object", "must be an object"),
        (f"{quoted('a')} is not supported", "... is not supported"),
        (f"tool {quoted('it is ' + chr(39) + chr(34))} not found", "tool ... not found"),
        (f"{quoted('a')} is neither {quoted('b' + chr(10))} nor c", "... nor c"),
        ("one 'mark is cut", "one ..."),
    ],
)
def test_the_log_has_the_reason_without_what_a_client_said(reason: str, told: str) -> None:
    """The member that is wrong and why, and nothing that is in quotation marks."""
    assert f"messages.0.role: {told}" == InvalidField(path="messages.0.role", reason=reason).detail
    assert told == MalformedBody(reason=reason).detail == MalformedRequest(reason=reason).detail


def test_a_full_queue_may_have_free_slots() -> None:
    """They are fewer than the next one needs, and nobody is told that all were busy."""
    full = {"upstream": "u", "retry_after_seconds": 7}
    assert QueueFull(**full, occupancy=OCCUPANCY).message.startswith(
        "All 6 slots of the upstream 'u' are busy and all 8 "
    )
    some = QueueFull(**full, occupancy=attrs.evolve(OCCUPANCY, slots_in_use=3)).message
    expected = "The free slots of the upstream 'u' are too few for the request that is next (2 of 6) and all 8 places"
    assert some.startswith(expected)


def test_an_error_cannot_be_changed() -> None:
    """What was decided where the error arose is what the client is told."""
    error = InvalidField(path="n", reason="too many")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        error.path = "m"  # type: ignore[misc]


def test_only_a_wrong_member_has_a_param() -> None:
    """``param`` is the path of the member that is wrong, and None where no member is."""
    assert "messages.3.role" == InvalidField(path="messages.3.role", reason="unknown").param
    assert "model" == UnknownModel(model="x", known=("y",)).param
    for cls in set(leaves()) - {InvalidField, UnknownModel}:
        assert specimen(cls).param is None


def test_only_errors_with_a_time_to_name_have_retry_after() -> None:
    """``Retry-After`` is for refusals and for an upstream that is away; elsewhere there is no time to name."""
    timed = {cls for cls in leaves() if specimen(cls).retry_after is not None}
    assert set(leaves(Refusal)) | {UpstreamUnavailable, UpstreamStatus} == timed
    assert 5 == UpstreamUnavailable(upstream="reasoning", reason="refused").retry_after


def test_an_unknown_model_names_the_known_ones() -> None:
    """Whoever misspells a model sees what there is."""
    error = UnknownModel(model="resoning", known=("reasoning", "embeddings"))
    assert "The model 'resoning' is not served here. Known models: reasoning, embeddings" == error.message


def test_a_wrong_method_names_the_right_ones() -> None:
    """All allowed methods are in the sentence."""
    error = MethodNotAllowed(method="PUT", path="/v1/models", allowed=("GET", "HEAD"))
    assert "'/v1/models' takes GET or HEAD, not 'PUT'" == error.message


@pytest.mark.parametrize(("seconds", "shown"), [(60.0, "60 s"), (0.5, "0.5 s"), (12.345, "12.345 s")])
def test_seconds_are_shown_as_a_person_writes_them(seconds: float, shown: str) -> None:
    """Sixty seconds are 60 s, not 60.0 s."""
    error = QueueTimeout(upstream="reasoning", occupancy=OCCUPANCY, waited_seconds=seconds, retry_after_seconds=1)
    assert f"within {shown};" in error.message
    silence = UpstreamTimeout(upstream="reasoning", waiting_for="the first byte", timeout_seconds=seconds)
    assert f"silent for {shown} while the first byte was due" in silence.message


# -- what the upstream's own status becomes -------------------------------------------------------------------------

NO_SUCH_MODEL = "The model `x` does not exist."


@pytest.mark.parametrize(
    ("given", "message", "told"),
    [
        pytest.param(400, "bad", 400, id="E1-bad-request"),
        pytest.param(401, "no key", 502, id="E2-our-key-is-missing"),
        pytest.param(403, "wrong key", 502, id="E2-our-key-is-wrong"),
        pytest.param(407, "proxy", 502, id="E2-a-proxy-wants-a-key"),
        pytest.param(404, NO_SUCH_MODEL, 404, id="E3-model"),
        pytest.param(404, "Not Found", 502, id="E4-path"),
        pytest.param(404, "", 502, id="E4-nothing-said"),
        pytest.param(404, "The file does not exist", 502, id="E4-not-about-a-model"),
        pytest.param(404, "no model here", 502, id="E4-not-about-existing"),
        pytest.param(405, "Method Not Allowed", 502, id="E4-method"),
        pytest.param(413, "large", 413, id="E5"),
        pytest.param(422, "field", 422, id="E6"),
        pytest.param(408, "slow", 504, id="E7-request-timeout"),
        pytest.param(504, "slow", 504, id="E7-gateway-timeout"),
        pytest.param(429, "many", 429, id="E8"),
        pytest.param(503, "full", 503, id="E9"),
        pytest.param(500, "dead", 500, id="E14"),
        pytest.param(502, "gone", 502, id="E15-bad-gateway"),
        pytest.param(301, "", 502, id="E15-redirect"),
        pytest.param(304, "", 502, id="E15-not-modified"),
        pytest.param(501, "", 502, id="unknown-5xx"),
        pytest.param(599, "", 502, id="last-5xx"),
        pytest.param(999, "", 502, id="no-class-at-all"),
        pytest.param(409, "conflict", 409, id="other-4xx"),
        pytest.param(499, "odd", 499, id="last-4xx"),
    ],
)
def test_the_status_the_client_is_told(given: int, message: str, told: int) -> None:
    """The upstream's status is passed on unless it would mislead: dialects.md 4.3, E1-E9, E14, E15."""
    assert told == upstream_status(given, message).status


@pytest.mark.parametrize("given", [401, 403, 407])
def test_a_refusal_of_our_credentials_is_not_the_clients(given: int) -> None:
    """The upstream's words about the gateway's key stay here, and trying again is useless."""
    error = upstream_status(given, "Invalid key sk-secret")
    assert ("upstream_auth", False) == (error.code, error.should_retry)
    assert "The upstream 'reasoning' does not accept the gateway's own credentials" == error.message


def test_an_upstream_that_says_nothing_is_quoted_by_its_status() -> None:
    """Without a message there is still a sentence, and the gateway has no opinion on trying again."""
    error = upstream_status(503)
    assert ("upstream_error", None) == (error.code, error.should_retry)
    assert "The upstream 'reasoning' answered with status 503" == error.message


@pytest.mark.parametrize(
    ("error", "param"),
    [(None, None), ({}, None), ({"param": None}, None), ({"param": 3}, None), ({"param": "messages"}, "messages")],
)
def test_the_upstreams_param_is_kept_if_it_is_text(error: dict[str, Any] | None, param: str | None) -> None:
    """``param`` comes from the upstream's error object, whatever else that holds."""
    assert param == upstream_status(400, "bad", error=error).param


def test_the_upstreams_retry_after_is_kept() -> None:
    """What the upstream asks for is what the client hears."""
    assert 17 == upstream_status(429, upstream_retry_after_seconds=17).retry_after


@pytest.mark.parametrize(
    ("status", "named", "told"), [(503, None, 5), (503, 9, 9), (503, 0, 0), (429, None, None), (500, None, None)]
)
def test_an_upstream_that_is_busy_has_a_time(status: int, named: int | None, told: int | None) -> None:
    """A 503 that does not say for how long is worth asking again soon; what it says itself counts."""
    assert told == upstream_status(status, upstream_retry_after_seconds=named).retry_after


def test_a_client_that_left_is_no_error_to_tell() -> None:
    """ClientGone is outside the tree, because nobody is left to read a document."""
    assert not issubclass(ClientGone, GatewayError)
    assert "client_gone" == ClientGone(code="client_gone").code


# -- quoted ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "'plain'"),
        ("", "''"),
        ("it's", '"it\'s"'),
        ("a\r\nb\x1b[31m", r"'a\r\nb\x1b[31m'"),
        ("für", r"'f\xfcr'"),
        ("\ud83d", r"'\ud83d'"),
    ],
)
def test_client_text_is_quoted_safely(text: str, shown: str) -> None:
    """Whatever a client says is shown as printable ASCII in quotes."""
    assert shown == quoted(text)


def test_long_client_text_is_cut() -> None:
    """A text of the limit's length is whole; a longer one is cut and says so."""
    assert ascii("x" * 200) == quoted("x" * 200)
    assert ascii("x" * 199 + "…") == quoted("x" * 201)
    assert ascii("xx…") == quoted("x" * 10, limit=3)
