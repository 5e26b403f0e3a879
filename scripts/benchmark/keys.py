"""Whether the time of a key's check tells if the key was one, without a process around it."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable

from benchmark.figures import Figure, at_most
from benchmark.rig import Bench

HOLDERS = (2, 20, 200)
TRIES = 100_000
# The slowest are when something else ran meanwhile; without them a difference of a nanosecond shows.
KEPT = 0.95


async def keys(bench: Bench) -> list[Figure]:
    """A key that nobody has, and the last of 2, 20 and 200: 100,000 checks in random order."""
    from aiogw.auth import Holder, Keyring

    figures = []
    for count in HOLDERS:
        bench.progress(f"{count} holders")
        ring = Keyring.of(
            {
                Holder(name=str(number), models=None, queue_places=1): f"sk-{number:040}".encode()
                for number in range(count)
            }
        )
        shown = (b"sk-" + b"x" * 40, f"sk-{count - 1:040}".encode())
        if ring.holder_of(shown[0]) is not None or ring.holder_of(shown[1]) is not ring.holders[-1]:
            raise ValueError("the keyring does not work")
        nobodys, last = _nanoseconds(ring.holder_of, shown)
        slow = sorted(nobodys + last)[int(KEPT * TRIES)]
        difference = statistics.fmean(one for one in nobodys if one < slow) - statistics.fmean(
            one for one in last if one < slow
        )
        name = f"keys: {count} holders"
        figures += [
            Figure(name=f"{name}, one check", unit="µs", clock="wall", aiogw=statistics.median(last) / 1000),
            Figure(
                name=f"{name}, time tells wrong from right, Welch's t",
                unit="",
                clock="wall",
                aiogw=abs(welch_t(nobodys, last)),
                goals=(at_most(4.5, issue=5),),
            ),
            Figure(
                name=f"{name}, a wrong one takes longer by, without the slowest {1 - KEPT:.0%}",
                unit="ns",
                clock="wall",
                aiogw=difference,
            ),
        ]
    bench.notes.append(
        "keys: Welch's t is how many standard errors the mean times lie apart; below 4.5, time tells nothing"
    )
    return figures


def _nanoseconds(check: Callable[[bytes], object], shown: tuple[bytes, bytes]) -> tuple[list[int], list[int]]:
    times: tuple[list[int], list[int]] = ([], [])
    order = [random.getrandbits(1) for _ in range(TRIES)]
    gc.collect()
    for which in order:
        key = shown[which]
        before = time.perf_counter_ns()
        check(key)
        times[which].append(time.perf_counter_ns() - before)
    return times


def welch_t(one: list[int], other: list[int]) -> float:
    """How many standard errors the means lie apart."""
    error = statistics.variance(one) / len(one) + statistics.variance(other) / len(other)
    return (statistics.fmean(one) - statistics.fmean(other)) / math.sqrt(error)
