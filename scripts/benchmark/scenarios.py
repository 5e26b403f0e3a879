"""All scenarios of the benchmark, by name and in the order in which they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from benchmark.codecs import codecs
from benchmark.costs import COSTS
from benchmark.crowd import CROWD
from benchmark.curves import CURVES
from benchmark.figures import Figure
from benchmark.keys import keys
from benchmark.retries import retries
from benchmark.rig import Bench
from benchmark.slots import SLOTS
from benchmark.waiting import WAITING

SCENARIOS: dict[str, Callable[[Bench], Awaitable[list[Figure]]]] = {
    scenario.__name__: scenario for scenario in (*SLOTS, *CROWD, *WAITING, *COSTS, *CURVES, codecs, retries, keys)
}
