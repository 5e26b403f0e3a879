"""The account of what request bodies hold: exact whatever the order, and full is full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiogw.bodies import BodyBudget
from aiogw.errors import MemoryFull


def test_what_is_held_is_counted_once() -> None:
    """Growing, shrinking and giving back move the sum by the difference; giving back twice moves it once."""
    budget = BodyBudget(limit_bytes=100)
    one, other = budget.hold(), budget.hold()
    one.resize(60)
    other.resize(40)
    assert 100 == budget.held_bytes
    one.resize(10)
    other.resize(41)
    assert (51, 10, 41) == (budget.held_bytes, one.size, other.size)
    one.release()
    one.release()
    assert (41, 0) == (budget.held_bytes, one.size)


def test_a_byte_too_many() -> None:
    """What does not fit is refused, and changes nothing; what it held goes on being held."""
    budget = BodyBudget(limit_bytes=100)
    one, other = budget.hold(), budget.hold()
    one.resize(60)
    other.resize(30)
    with pytest.raises(MemoryFull) as refused:
        other.resize(41)
    assert (90, 30) == (budget.held_bytes, other.size)
    assert (100, 60, 41) == (refused.value.limit_bytes, refused.value.held_bytes, refused.value.wanted_bytes)
    assert 1 <= refused.value.retry_after_seconds <= 60
    one.release()
    other.resize(100)
    assert 100 == budget.held_bytes


@given(st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(0, 60))), max_size=60))
def test_any_history(steps: list[tuple[int, int | None]]) -> None:
    """After every step the sum is what the parts are, and within the limit; when all are released, it is zero."""
    budget = BodyBudget(limit_bytes=100)
    held = [budget.hold() for _ in range(5)]
    for number, size in steps:
        before = [one.size for one in held]
        if size is None:
            held[number].release()
        else:
            fits = sum(before) - before[number] + size <= 100 or size <= before[number]
            try:
                held[number].resize(size)
            except MemoryFull:
                assert not fits
                assert before == [one.size for one in held]
            else:
                assert fits
                assert size == held[number].size
        assert sum(one.size for one in held) == budget.held_bytes <= 100
    for one in held:
        one.release()
    assert 0 == budget.held_bytes
