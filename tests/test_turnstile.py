"""The turnstile: one in each turn of the loop, in order, and nobody waits for one who has left."""

from __future__ import annotations

import asyncio
import itertools

from aiogw.turnstile import Turnstile


async def passing(turnstile: Turnstile, name: str, told: list[str]) -> None:
    await turnstile.wait()
    told.append(name)


async def test_the_first_of_a_turn_passes_at_once() -> None:
    """Without being suspended: alone, it costs nobody a turn."""
    turnstile = Turnstile()
    told: list[str] = []
    coroutine = passing(turnstile, "a", told)
    try:
        coroutine.send(None)
    except StopIteration:
        pass
    assert told == ["a"]


async def test_a_burst_passes_one_by_one() -> None:
    """In order, and between any two of them the loop has had its turn."""
    turnstile = Turnstile()
    told: list[str] = []
    tasks = [asyncio.create_task(passing(turnstile, name, told)) for name in "abcde"]

    def look() -> None:
        told.append("-")
        if len(told) < 30:
            asyncio.get_running_loop().call_soon(look)

    asyncio.get_running_loop().call_soon(look)
    await asyncio.gather(*tasks)
    names = [one for one in told if one != "-"]
    assert names == list("abcde")
    assert not any(first != "-" and second != "-" for first, second in itertools.pairwise(told))


async def test_who_has_left_is_not_waited_for() -> None:
    """A client that goes while it stands in the line holds up nobody."""
    turnstile = Turnstile()
    told: list[str] = []
    tasks = [asyncio.create_task(passing(turnstile, name, told)) for name in "abcd"]
    await asyncio.sleep(0)
    for number in (1, 2):
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert told == ["a", "d"]
    await passing(turnstile, "e", told)
    assert told == ["a", "d", "e"]


async def test_later_ones_do_not_overtake() -> None:
    """Who comes while others stand in the line goes to its end, also in a turn in which nobody has passed."""
    turnstile = Turnstile()
    told: list[str] = []
    first = [asyncio.create_task(passing(turnstile, name, told)) for name in "abc"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = asyncio.create_task(passing(turnstile, "d", told))
    await asyncio.gather(*first, late)
    assert told == list("abcd")
