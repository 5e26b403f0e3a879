"""Capacity: what is free, and where; the figures that the queue decides by."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from aiogw.admission.capacity import ONE_ENDPOINT, Capacity


def capacity(cap: int | None, **slots: int | None) -> Capacity:
    return Capacity(cap=cap, endpoints=slots)


@pytest.mark.parametrize(
    ("cap", "endpoints", "cap_now", "largest"),
    [
        (None, ONE_ENDPOINT, None, None),
        (6, ONE_ENDPOINT, 6, 6),
        (6, {"a": 8}, 6, 6),
        (6, {"a": 4, "b": 4}, 6, 4),
        (7, {"a": 4, "b": 4}, 7, 4),
        # One is gone: strictly fewer than what is left, as everywhere.
        (6, {"a": 4}, 3, 3),
        (6, {"a": 1}, 1, 1),
        (2, {"a": 4}, 2, 2),
        (6, {}, 0, 0),
        (None, {"a": None}, None, None),
        (None, {"a": 8}, None, None),
    ],
)
def test_the_cap_of_the_moment(
    cap: int | None, endpoints: Mapping[str, int | None], cap_now: int | None, largest: int | None
) -> None:
    """It shrinks with the endpoints that answer, never grows beyond what was configured, and bounds one request."""
    found = Capacity(cap=cap, endpoints=endpoints)
    assert (cap_now, largest) == (found.cap, found.largest)


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_that_would_let_nobody_through(cap: int) -> None:
    """It is refused, and what was true before stays so."""
    with pytest.raises(ValueError, match=f"at least 1, not {cap}"):
        capacity(cap, a=4)
    found = capacity(3, a=4)
    with pytest.raises(ValueError, match="at least 1"):
        found.resize(cap=cap, endpoints={})
    assert (3, 3, {"a": 0}) == (found.cap, found.largest, found.used())


def test_slots_are_taken_where_most_are_free() -> None:
    """Of equals the first; each gets back its own."""
    found = capacity(7, a=4, b=4, c=2)
    assert ["a", "b", "a", "b", "a", "b", "c"] == [found.take(1) for _ in range(7)]
    assert ({"a": 3, "b": 3, "c": 1}, 7) == (found.used(), found.in_use)
    found.give_back(1, "b")
    assert "b" == found.take(1)


def test_one_endpoint_has_to_have_room_for_all_of_a_request() -> None:
    """Three endpoints with one free slot each are no place for two sequences."""
    found = capacity(11, a=4, b=4, c=4)
    for _ in range(3):
        found.take(3)
    assert (True, False) == (found.fits(1), found.fits(2))
    found.give_back(3, "b")
    assert (True, False) == (found.fits(4), found.fits(5))


def test_the_cap_bounds_all_endpoints_together() -> None:
    """Free slots at an endpoint are of no use when the cap is reached."""
    found = capacity(2, a=4, b=4)
    found.take(1)
    found.take(1)
    assert not found.fits(1)


def test_slots_at_an_endpoint_that_has_gone() -> None:
    """They count against the cap, and not against the others' slots; when the last is given back it is forgotten."""
    found = capacity(6, a=4, b=4)
    for _ in range(6):
        found.take(1)
    found.resize(cap=6, endpoints={"b": 4})
    assert (3, False) == (found.cap, found.fits(1))
    found.give_back(1, "b")
    assert (True, "b") == (found.fits(1), found.take(1))
    assert not found.fits(1)
    for left in (3, 2, 1):
        assert {"a": left, "b": 3} == found.used()
        found.give_back(1, "a")
    assert {"b": 3} == found.used()
    assert not found.fits(1)
    found.resize(cap=6, endpoints={"a": 4, "b": 4})
    assert {"a": 0, "b": 3} == found.used()
    assert "a" == found.take(1)


def test_all_that_is_taken_at_one_that_has_gone_leaves_room_at_the_others() -> None:
    """A dead endpoint's requests must not keep a living one idle."""
    found = capacity(6, a=8, b=8)
    for _ in range(6):
        found.take(1)
    found.give_back(3, "b")
    found.resize(cap=6, endpoints={"b": 8})
    assert [found.take(1) for _ in range(3) if found.fits(1)] == ["b"] * 3
    # But never more than the cap in all: they may still be at work.
    assert not found.fits(1)


def test_no_cap() -> None:
    """Everybody fits, and is counted all the same."""
    found = capacity(None, a=None)
    for _ in range(100):
        assert found.fits(50)
        assert "a" == found.take(50)
    assert ({"a": 5000}, 5000) == (found.used(), found.in_use)
