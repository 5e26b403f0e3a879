"""The closed loop of scripts/bench in small: what clients are told is true, and those who obey find a place.

Time is virtual, so this is no timing; the seeds make it the same every time.  The proper figures are the bench's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """``benchmark.retries``, which can be imported by the programs that lie beside it."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        from benchmark import retries

        yield retries
    finally:
        sys.path.remove(str(SCRIPTS))


def test_where_there_is_room_those_who_obey_are_admitted(bench: ModuleType) -> None:
    """A little more is asked for than six slots can do: estimates are true, and Retry-After beats any fixed second."""
    setting = bench.STEADY["load 1.1"]
    told = bench.closed_loop(setting, seeds=range(4))
    assert told.counts["first retries"] > 100
    assert told.error_median <= 0.25
    assert told.factor_p90 <= 2
    assert told.first_retries_admitted >= 0.9
    fixed = bench.closed_loop(setting, seeds=range(2), fixed_seconds=1)
    assert fixed.first_retries_admitted < 0.6
    assert told.gave_up < fixed.gave_up


def test_a_wide_spread_of_times_does_not_bend_the_estimate(bench: ModuleType) -> None:
    """Of log-normal times with a sigma of 1 a few are very long; those that run are more often of these."""
    told = bench.closed_loop(bench.STEADY["load 1.1, wide times"], seeds=range(4))
    assert told.error_median <= 0.25
    assert told.factor_p90 <= 2


def test_a_herd_comes_back_spread(bench: ModuleType) -> None:
    """Two hundred at once: those who find the queue full come back one after another, and find a place."""
    told = bench.closed_loop(bench.HERD["a herd of 200"], seeds=range(2))
    assert told.counts["first retries"] > 1000
    assert told.first_retries_admitted >= 0.9
    assert told.fullest_second <= 0.2


def test_a_herd_that_is_told_one_second_stays_one(bench: ModuleType) -> None:
    """The measure notices: with a fixed answer they all meet again."""
    told = bench.closed_loop(bench.HERD["a herd of 200"], seeds=range(1), fixed_seconds=1)
    assert told.first_retries_admitted < 0.2
    assert told.fullest_second > 0.4


def test_a_gate_that_knows_nothing_yet_spreads_them_as_well(bench: ModuleType) -> None:
    """After a restart all ask at once, and no request has ever ended."""
    told = bench.closed_loop(bench.HARD["a herd at the start"], seeds=range(4))
    assert told.fullest_second <= 0.2
    assert told.first_retries_admitted > 0.8


def test_the_loop_is_the_same_every_time(bench: ModuleType) -> None:
    """A seed is a result, to be looked at again."""
    setting = bench.STEADY["load 1.1"]
    one, again, other = (bench.closed_loop(setting, seeds=[seed]) for seed in (7, 7, 8))
    assert one == again != other
